// SPDX-License-Identifier: MIT
/* linear_cross_entropy.cuh - cross entropy of x W^T without storing all logits: loss and all gradients of a language model's
 * head, exact, in a workspace of almost any size.
 *
 *   logits[t,j]  = sum_d x[t,d] weight[j,d] + bias[j]
 *   loss, lse    those of cross_entropy.cuh for these logits; its comment has the formulas of all options
 *   entropy, argmax   likewise; with the option statistics log_sum_sq_probs, mean_logits and top_logprob too
 *   dZ[t,j]      the gradient of logits[t,j], by cross_entropy.cuh's formula, with upstream, dlse and dentropy
 *   dx[t,d]      = sum_j dZ[t,j] weight[j,d]
 *   dweight[j,d] = sum_t dZ[t,j] x[t,d]        with accumulate added to its old contents
 *   dbias[j]     = sum_t dZ[t,j]               likewise
 *
 * All logits at once may be larger than the weights: 6 GiB for 12288 tokens and 131072 columns. So lk computes them for a chunk
 * of tokens or a panel of columns, uses them, and computes the next ones in the same memory. In bf16 on Hopper logits stay in
 * registers (FUSED): memory gets their exponentials, of as many columns as it has room for.
 *
 * Use        In one .cu file, linked with -lcublasLt:   Anywhere, C included:
 *                #include "lk/linear_cross_entropy.cuh"     #include "lk/linear_cross_entropy.cuh"
 *                LK_DEFINE_LINEAR_CROSS_ENTROPY(bf16)       LK_DECLARE_LINEAR_CROSS_ENTROPY(bf16)
 *            T is f32, f16 or bf16. Make a context for each device, and for each host thread that calls at the same time;
 *            lk_linear_cross_entropy_destroy(&context) frees it at the end:
 *                lk_linear_cross_entropy_context context;
 *                lk_status status = lk_linear_cross_entropy_init(&context);
 *            Then, asynchronously on the caller's stream, in a graph too:
 *                lk_linear_cross_entropy_args args = {};
 *                args.context = &context, args.x = x, args.weight = weight, args.target = target, args.loss = loss;
 *                args.dx = dx, args.dweight = dweight, args.tokens = tokens, args.hidden = hidden, args.vocab = vocab;
 *                args.reduction = LK_REDUCTION_MEAN;
 *                status = lk_linear_cross_entropy_forward_backward_workspace_bytes_bf16(&args, &args.workspace_bytes);
 *                args.workspace = ...;
 *                status = lk_linear_cross_entropy_forward_backward_bf16(&args, stream);
 *            forward_backward computes loss, lse and gradients. forward computes loss and lse, backward the gradients from a
 *            saved lse, with dentropy also from a saved entropy; without `saved` it computes the logits again. Outputs whose
 *            pointer is NULL are not computed.
 *            The workspace function answers what the fastest plan within a sixteenth of the device's memory needs (5 GiB of
 *            80, 512 MiB of 8), or the smallest plan if that needs more. For another amount of memory, ask for a plan:
 *                lk_linear_cross_entropy_plan plan;
 *                status = lk_linear_cross_entropy_forward_backward_plan_bf16(&args, budget, &plan);   puts(plan.text);
 *                args.workspace = ..., args.workspace_bytes = plan.workspace_bytes;
 *            In a framework with autograd the upstream gradient is known later. Pass the expected one, NULL for 1, without dlse,
 *            dentropy and accumulate. Keep packed dx, dweight and dbias. When upstream is known, correct each of them by
 *            lk_rescale_bf16 of lk_scale.cuh (lk_rescale_f32 for an f32 dweight), which does nothing where it was as expected.
 *            upstream NULL means 1, not 0. A stride of 0 means packed, so copy a tensor that PyTorch has expanded.
 * Needs      cross_entropy.cuh, lk_base.cuh, lk_check.cuh, lk_cublas.cuh, lk_gemm.cuh, lk_head.cuh,
 *            lk_head_plan.cuh, lk_head_sm90.cuh, lk_loss.cuh, lk_move.cuh, lk_ranks.cuh, lk_row.cuh, lk_ptx.cuh; cuBLASLt.
 * Options    Zero is off. A struct with context, x, weight, target, the sizes and one output computes the plain loss of each
 *            token. Without use_ignore_index a target of -100 is bad.
 *            Ignored token: loss, z-loss, lse, entropy and dx are 0, argmax is -1; it adds nothing to dweight and dbias. Keep
 *            its x finite, since 0 times NaN is NaN. Only where max_counted is below tokens, it may be anything.
 *            Bad target (counted, outside [0, vocab)): loss and the token's dx are NaN, and so is a reduced loss. It adds
 *            nothing to dweight and dbias. lse, z-loss, entropy and argmax are those of its logits. valid_rows, the divisor of
 *            a mean without class_weight, includes it. It adds 0 to weight_sum, the divisor with class_weight. If its
 *            row_weight is 0, its loss is 0, and does not make a reduced loss NaN. Its dx is 0 if upstream times row_weight,
 *            dlse and dentropy are all 0. In a mean over nothing, upstream times row_weight counts as 0.
 *            bias = -inf masks a column: p is 0 there. Without label_smoothing, only tokens with that target use the column:
 *            their loss is +inf, their gradient finite. With label_smoothing every loss is +inf, and the column has the
 *            formula's gradient with p = 0. With softcap nothing is masked: the logit becomes -softcap, its derivative 0.
 *            max_counted: the matmuls have only this many rows. x of the tokens that are not ignored is copied into the
 *            workspace; no other x is read. If more tokens count, then loss, z-loss, lse, entropy and all gradients are NaN,
 *            and argmax is -1.
 *            Mean over nothing: loss as in cross_entropy.cuh; the gradients are those of dlse and dentropy, 0 without them.
 *            statistics: in forward alone, as in cross_entropy.cuh. entropy is [4, tokens] then. The rules are entropy's: 0 where
 *            the token is ignored, NaN where more than max_counted count. It takes no second matmul, on any path; FUSED does
 *            not have it with label_smoothing. A masked column makes mean_logits -inf.
 *            row_weight, denominator, upstream_value, accumulate_loss, and log-probabilities of the targets with a temperature: as
 *            in cross_entropy.cuh. So is upstream_per_token, which is called upstream_per_row there.
 *            batch_invariant: each token's loss, lse, z-loss, entropy and argmax have the same bits for any number of tokens,
 *            at any place among them, with or without max_counted, in any workspace. So a trainer sees the log-probabilities
 *            that the sampler saw. The rest of the call has to be the same: device, hidden, vocab, options, panel_vocab. It
 *            takes FUSED, with panel_vocab columns between two merges, or as many as suit vocab and the device. A reduced loss
 *            still depends on all tokens.
 *            saved: forward leaves there what backward would compute again. ..._saved_bytes says how many bytes that takes.
 *            backward then has 2 matmuls instead of 3, for any upstream, row_weight and dlse. It only reads saved, so it may
 *            be called again. Its device, shapes, other inputs, options, path and lse must be forward's. The workspace and
 *            chunk_tokens may differ. A copy of saved must have an address that is the same modulo 256.
 *            CHUNKS saves the logits: in f32, or with fast_logits in T. FUSED saves bf16 exponentials of them. With ranks, lk
 *            takes FUSED. Without ranks and with path 0, it takes FUSED if T is bf16 on sm_90a, there is no label_smoothing,
 *            there are many columns (more than 2 * hidden; or more than 2048 and no multiple of 8), and stored logits would
 *            take more time: lk_head_stored_is_faster, by tokens, hidden, vocab, bias and softcap. Else it takes CHUNKS. Nothing
 *            else changes this choice. So a call for which it takes FUSED fails (LK_ERR_PATH) with entropy, argmax or dentropy,
 *            or with x that FUSED cannot read; with ranks also if T is not bf16 on sm_90a, or with label_smoothing. path CHUNKS
 *            takes such a call, but not with ranks.
 *            A token whose logits are all -inf, or hold +inf or NaN: loss, entropy and dx are NaN, and so are dweight and
 *            dbias.
 * Ranks      Columns that are split over ranks (a vocabulary-parallel head, tensor parallel): linear_cross_entropy_parallel.cuh.
 * Repeatable The same bits every time for the same shapes, strides, alignment of pointers (modulo 256) and workspace size. A
 *            matmul has the algorithm that cuBLASLt's heuristic names first. Everything else has a fixed order; there are no
 *            float atomics.
 * Source     Chunks of tokens: Liger-Kernel, 2024. Panels: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language
 *            Models", 2024.
 * Read on    lk/linear_cross_entropy.md: plans of the workspace, how exact results are, and what is read and written.
 *
 * What runs, in the order of a call. A plan says how a call is done; lk_head_plan.cuh chooses it. lk_head.cuh has the matmuls, and
 * this file what happens to rows of logits, as a table of functions that the head calls: lk_lce_labels.
 *   every call, first     lk_lce_prepare_kernel: what the targets mean, the divisor of a mean, the factor of each row's gradient
 *   CHUNKS, PANELS        lk_head_tail_kernel, where logits of the columns behind a multiple of 8 take weight from a copy
 *   CHUNKS, each chunk    logits by cuBLASLt, all columns at once or in slices of tokens; the kernels of cross_entropy.cuh compute
 *                         losses and dZ from them; lk_head_columns_kernel sums dbias; dweight and dx by cuBLASLt
 *   PANELS, each chunk    a panel is to cross_entropy.cuh's kernels what a rank's columns are. For each panel logits by
 *                         cuBLASLt, which they add to the rows' states; lk_lce_panels_kernel computes the losses. Then for each
 *                         panel logits again, dZ by them, dbias, dweight and dx by cuBLASLt
 *   FUSED, each chunk     in lk_head_sm90.cuh, for forward_backward:
 *                         1. cuBLASLt: logits of 8 columns, from which references of the exponentials are guessed
 *                         2. lk_head_fused_kernel: the states of all columns, and exponentials of those that are kept
 *                         3. lk_lce_factor_kernel: each row's lse, and v, its factor of the exponentials. lk_move_kernel: v x
 *                         4. the kept columns: lk_head_products_kernel for dx; dweight by cuBLASLt, or by the same kernel where it
 *                            has 16 bits and there are several chunks. With all columns in one panel, and memory for an f32 dx,
 *                            cuBLASLt computes dx, and lk_head_round_dx_kernel rounds it
 *                         5. each panel of the others: lk_head_fused_kernel computes dZ; then as 4, without v
 *                         forward takes step 2 without exponentials, then lk_lce_merge_kernel; with saved steps 1 to 3, without v.
 *                         backward takes step 5 for all columns, with lk_head_others_kernel; with saved lk_lce_saved_kernel,
 *                         v x, and step 4
 *   FUSED, after them     lk_head_targets_kernel adds the targets' part to dweight and dbias
 *   every call, last      lk_lce_finish_kernel: the reduced loss, results of each token, rows without a gradient, dbias
 * A call first goes through all its matmuls without a launch, so that cuBLASLt refuses one before anything has run. Of very many
 * chunks, slices or panels it looks at 128 and the last: the others have the same matmuls.
 * For example, forward_backward of 8192 x 4096 x 131072 in bf16 on an H100, with 1 GiB and a bf16 dweight: FUSED, all tokens at
 * once. All exponentials would take 2 GiB. Those of 60928 columns are kept in dweight's memory until its rows are written, those of
 * 58624 in the workspace. The last 11520 columns are one panel: their logits are computed twice, so there are 4 matmuls, the fourth
 * of 9 % of the columns.
 * Here come the kernels for the rows, path by path, and the table; then the context, the checks of arguments, the calls and the
 * queries of plans.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LINEAR_CROSS_ENTROPY_CUH
#define LK_LINEAR_CROSS_ENTROPY_CUH

#include "cross_entropy.cuh"

/* The kinds of plan: lk/linear_cross_entropy.md has them all. Every path takes every option, except as under LK_ERR_PATH. */
enum {
    LK_LINEAR_CROSS_ENTROPY_AUTO = 0,
    LK_LINEAR_CROSS_ENTROPY_CHUNKS = 1,
    LK_LINEAR_CROSS_ENTROPY_PANELS = 2,
    LK_LINEAR_CROSS_ENTROPY_FUSED = 3
};

/* The cuBLASLt handle and the algorithms that were chosen; no device memory. The caller owns it. One host thread at a time uses
 * it, on the device that was current at init. It may not be moved or copied between init and destroy. */
typedef struct {
    uint64_t opaque[2048];
} lk_linear_cross_entropy_context;

LK_API lk_status lk_linear_cross_entropy_init(lk_linear_cross_entropy_context *context);
LK_API lk_status lk_linear_cross_entropy_destroy(lk_linear_cross_entropy_context *context);

/* What lk does within a workspace of some size. */
typedef struct {
    size_t workspace_bytes; /* what the plan uses, cublas_bytes included; no more than the budget */
    size_t minimum_bytes;   /* the smallest workspace that the call accepts; its plan is slower */
    size_t cublas_bytes;    /* cuBLASLt's part of workspace_bytes */
    int64_t chunk_tokens, chunks; /* tokens of a chunk, number of chunks */
    int64_t panel_vocab, panels;  /* columns of a panel (FUSED's forward: those that share a token's state), number of them; with
                                   * kept_vocab: of the columns that are computed again */
    int64_t slice_tokens;   /* tokens of a chunk whose f32 logits exist at a time; 0: no slices */
    int64_t kept_vocab;     /* FUSED: columns whose exponentials forward_backward keeps; those of the others are computed again */
    int64_t lent_vocab;     /* of those, the ones that are kept in dweight's memory */
    int path;               /* LK_LINEAR_CROSS_ENTROPY_* */
    int matmuls;            /* of 2 * tokens * hidden * vocab operations; logits of some columns alone count as one more */
    int exact;              /* not 0: logits are f32, or stay in registers; 0: fast_logits rounds them to T */
    char text[300];         /* all of this in words, and why FUSED is left out */
} lk_linear_cross_entropy_plan;

/* One struct for all calls. F: forward, B: backward, FB: forward_backward; without a letter: all three. A call ignores the
 * fields that are marked for other calls. */
typedef struct {
    lk_linear_cross_entropy_context *context; /* in and out, from init; one call at a time */
    const void *x;             /*      in      T [tokens, hidden] */
    const void *weight;        /*      in      T [vocab, hidden] */
    const void *bias;          /*      in      bias_dtype [vocab]; -inf masks the column; NULL: none */
    const void *target;        /*      in      target_dtype [tokens] */
    const float *class_weight; /*      in      f32 [vocab]; NULL means 1 */
    const float *row_weight;   /*      in      f32 [tokens], a factor of each token's loss and of its gradient; NULL: 1 */
    const float *upstream;     /* B FB in      f32 [1], or [tokens] with upstream_per_token, the gradient of loss; NULL: 1 */
    const float *dlse;         /* B FB in      f32 [tokens], a gradient of lse from elsewhere, which is added; NULL: none */
    const float *dentropy;     /* B FB in      f32 [tokens], the gradient of entropy, likewise; NULL: none */
    const float *denominator;  /*      in      f32 [1], what a mean divides by instead; NULL: its own counts */
    float *loss;               /* F FB out     f32 [tokens], or [1] when reduced; NULL to skip */
    float *z_loss_out;         /* F FB out     f32, the part of loss that z_loss adds, shaped like loss; NULL to skip */
    float *lse;                /* F FB out, B in: f32 [tokens], B: from forward with the same options; F FB: NULL to skip */
    float *lse_low;            /* F FB out, B in: f32 [tokens], as in cross_entropy.cuh; F FB: NULL to skip; B: NULL means 0 */
    float *entropy;            /* F FB out, B in: f32 [tokens]; F FB: NULL to skip; F: with statistics [4, tokens], required;
                                                  B: from forward, required with dentropy */
    int64_t *argmax;           /* F FB out     int64 [tokens], the smallest column of the largest logit; NULL to skip */
    int64_t *valid_rows;       /* F FB out     int64 [1], the number of tokens counted; NULL to skip */
    float *weight_sum;         /* F FB out     f32 [1], the sum of class_weight[target], or 1, of good targets; NULL to skip */
    void *saved;               /* F out, B in: what backward would compute again, ..._saved_bytes; NULL: none. See Options */
    int32_t *bad_targets;      /*      in, out int32 [1], zeroed by the caller: each call adds its count; NULL to skip */
    void *dx;                  /* B FB out     T [tokens, hidden]; NULL to skip. Used as scratch memory before */
    void *dweight;             /* B FB out     dweight_dtype [vocab, hidden]; NULL to skip. Scratch first, except with accumulate */
    void *dbias;               /* B FB out     dbias_dtype [vocab]; NULL to skip */
    void *workspace;           /* scratch, aligned to LK_WORKSPACE_ALIGNMENT bytes; NULL when 0 */
    size_t workspace_bytes;    /* at least a plan's minimum_bytes; it chooses the plan. More is faster, or the same */
    int64_t tokens;            /* 0 to 2^31 - 1 */
    int64_t hidden;            /* 1 to 2^30 */
    int64_t vocab;             /* 1 to 2^30; of a rank: 0 to 2^30 */
    int64_t x_stride;          /* elements between rows; 0 means packed, hidden */
    int64_t weight_stride;     /* likewise */
    int64_t dx_stride;         /* B FB likewise */
    int64_t dweight_stride;    /* B FB likewise */
    int64_t ignore_index;      /* with use_ignore_index any value, PyTorch's is -100; without it 0 */
    int64_t max_counted;       /* an upper bound of the tokens that are not ignored; 0, or tokens and more: none */
    int64_t chunk_tokens;      /* tokens of a chunk; 0: lk chooses */
    int64_t panel_vocab;       /* columns of a panel, rounded up to a multiple of 16, for FUSED of 256; 0: lk chooses */
    int64_t slice_tokens;      /* B FB tokens of a slice; 0: lk chooses */
    float logit_scale;         /* 0 to 2^127; 0 means 1 */
    float softcap;             /* 2^-100 to 2^100; logit_scale / softcap too; 0: off */
    float label_smoothing;     /* 0 to 1; 0: off */
    float z_loss;              /* the factor; finite, at least 0; 0: off */
    float upstream_value;      /* B FB a factor of upstream, or where that is NULL the gradient of loss itself; 0 means 1 */
    int accumulate_loss;       /* F FB not 0: loss and z_loss_out are added to what is there */
    int use_ignore_index;      /* not 0: tokens with target = ignore_index are ignored */
    int reduction;             /* LK_REDUCTION_* */
    int zero_when_empty;       /* F FB not 0: a mean over nothing is 0 instead of NaN */
    int upstream_per_token;    /* B FB not 0: upstream is [tokens] */
    int accumulate;            /* B FB not 0: dweight and dbias are added to their old contents */
    int target_dtype;          /* LK_TARGET_*; 0: int64 */
    int bias_dtype;            /* LK_DTYPE_*: T or f32; 0: T */
    int dweight_dtype;         /* B FB likewise */
    int dbias_dtype;           /* B FB likewise */
    int fast_logits;           /* not 0: stored logits are T instead of f32 */
    int tf32;                  /* not 0: matmuls of T = f32 may round their factors to TF32 */
    int batch_invariant;       /* F    not 0: a token's results do not depend on the other tokens; bf16 on sm_90a */
    int path;                  /* LK_LINEAR_CROSS_ENTROPY_*; 0: lk chooses */
    int statistics;            /* F    not 0: entropy, then required, is [4, tokens]. See Options */
} lk_linear_cross_entropy_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md.
 *   LK_ERR_NULL       args, plan, context, x, weight or target is NULL; in backward lse is, or with dentropy entropy; in forward
 *                     with statistics entropy is; or all outputs are. With tokens = 0 all except for args and plan may be NULL
 *   LK_ERR_SHAPE      tokens, hidden or vocab out of range; a stride that is not 0 and below hidden; a tensor that spans more
 *                     than 2^62 elements; max_counted, chunk_tokens, panel_vocab or slice_tokens below 0
 *   LK_ERR_VALUE      B FB: statistics, before all others;
 *                     logit_scale, softcap, z_loss or label_smoothing out of range; ignore_index without use_ignore_index;
 *                     reduction, target_dtype or path is none of the enum; bias_dtype, dweight_dtype or dbias_dtype is neither
 *                     T nor f32; a context that init has not made, or of another device
 *   LK_ERR_PATH       FUSED where it cannot run: T is not bf16; the code is not for sm_90a; 2^30 tokens or more; x (unless
 *                     max_counted is below tokens) or weight does not start at a multiple of 16 bytes, or has a stride above
 *                     2^38 or of no multiple of 8. batch_invariant there, or with another path. saved
 *                     with PANELS or batch_invariant. saved where FUSED writes it (see Options), if FUSED cannot run, or with
 *                     label_smoothing, entropy, argmax or dentropy
 *   LK_ERR_ALIGNMENT  a pointer is not aligned to its element
 *   LK_ERR_WORKSPACE  workspace_bytes, or a plan's budget, is below the smallest; workspace is NULL or not aligned to
 *                     LK_WORKSPACE_ALIGNMENT bytes
 *   LK_ERR_CUBLAS     cuBLASLt has no algorithm for a matmul: nothing was launched. Or it failed to launch
 *                     one: outputs are undefined. lk_last_error says which
 * Except for this, any alignment and stride is fine. Matmuls are fastest where x, weight, dx and dweight start at multiples of
 * 16 bytes and hidden is a multiple of 8.
 *
 * Each direction has three functions that take the same struct:
 *   ..._<T>              the call
 *   ..._workspace_bytes  the workspace of the plan within a sixteenth of the device's memory (without a device 1 GiB), or the
 *                        smallest workspace if that is larger
 *   ..._plan             the plan within `budget` bytes. A workspace of plan->workspace_bytes runs it
 * A context keeps cuBLASLt's algorithms for 64 different matmuls; later ones replace the last, and cost more time to launch.
 * ..._workspace_bytes and ..._plan need shapes and options, and no tensors. A pointer other than NULL says that there is such a
 * tensor, or that it is wanted: dx, dweight, dbias, bias, dlse, dentropy, denominator, class_weight, loss, z_loss_out, entropy,
 * argmax, lse_low, saved. With statistics entropy is always wanted. The alignment of x, weight and dweight matters for FUSED and
 * slices. Where x or weight is NULL, it counts as aligned; minimum_bytes is then enough for any x and weight. */
#define LK_LINEAR_CROSS_ENTROPY_FUNCTIONS(X, T)                                                                                \
    X##_PLANNED(linear_cross_entropy, forward, LK_FORWARD, linear_cross_entropy, T)                                            \
    X##_PLANNED(linear_cross_entropy, forward_backward, LK_BOTH, linear_cross_entropy, T)                                      \
    X##_PLANNED(linear_cross_entropy, backward, LK_BACKWARD, linear_cross_entropy, T)                                          \
    X##_SAVED(linear_cross_entropy, T)
#define LK_PROTOTYPE_SAVED(op, T) LK_API lk_status lk_##op##_saved_bytes_##T(const lk_##op##_args *args, size_t *bytes);
#define LK_IF_forward_SAVED(op, T) LK_PROTOTYPE_SAVED(op, T) LK_EMIT_SAVED(op, T) /* with LK_DEFINE_ONLY forward brings it */
#define LK_IF_backward_SAVED(op, T)
#define LK_IF_forward_backward_SAVED(op, T)
#define LK_IF_finish_SAVED(op, T)
#if !LK_CUDA
#define LK_EMIT_SAVED(op, T)
#endif
#define LK_DECLARE_LINEAR_CROSS_ENTROPY(T) LK_DECLARE(LINEAR_CROSS_ENTROPY, T)
#define LK_DEFINE_LINEAR_CROSS_ENTROPY(T) LK_DEFINE(LINEAR_CROSS_ENTROPY, T)

#if LK_CUDA

#include "lk_head.cuh"
#include "lk_head_sm90.cuh"

#if LK_ARCH == 900 && !LK_SM90A
#pragma message("linear_cross_entropy.cuh: code for sm_90 lacks LK_LINEAR_CROSS_ENTROPY_FUSED, which code for sm_90a has")
#endif

/* ---- A call -------------------------------------------------------------------------------------------------------------- */

typedef lk_linear_cross_entropy_args lk_lce_args;

/* Columns that are one rank's. */
typedef struct {
    lk_vocab_parallel parallel;
    void *states;  /* forward without all_gather leaves them here */
    float *others; /* backward: [tokens], as in lk_ce_slice */
} lk_lce_rank;

struct lk_lce_call {
    typedef lk_lce_args args;
    lk_lce_args a;              /* with every default filled in; what the call does not have is 0 */
    const float *saved_lse, *saved_lse_low, *saved_entropy; /* backward's */
    bool gives_loss, gradient, compact;
    bool saves;                 /* forward leaves, or backward reads, a.saved */
    bool split;                 /* the columns are split over ranks; then forward leaves states, and backward is given others */
    bool stores;                /* a.saved has logits, not exponentials */
    bool no_panels;             /* the loss has no panels: the plan may not be PANELS, and with ranks it is CHUNKS */
    int64_t classes;            /* the columns of all ranks */
    const float *weights;       /* the class weights of all columns; a.class_weight: of this rank's */
    int state_bytes;            /* of a packed state */
    bool fused;                 /* the plan may be, or must be, LK_LINEAR_CROSS_ENTROPY_FUSED */
    bool placement_unknown;     /* a query without x or weight: where they lie may still rule out fused */
    int type, logits_type;      /* LK_DTYPE_* of T and of the logits */
    int clusters;               /* fused: that the device runs at a time, one per two SMs */
    int64_t rows;               /* tokens, or max_counted where rows are compacted */
    const char *why_not_fused;  /* why fused is ruled out, where plan.text says it; else "" */
    lk_lce_rank rank;           /* with split */
};

/* lk_head.cuh's, for these calls. */
typedef lk_head_work<lk_lce_call> lk_lce_work;
typedef lk_head_job<lk_lce_call> lk_lce_job;
typedef lk_head_rows<lk_lce_call> lk_lce_rows;
typedef lk_head_fused<lk_lce_call> lk_lce_fused;

static_assert(LK_HEAD_STATE_BYTES == sizeof(lk_ce_row) && LK_HEAD_STATISTICS_BYTES == sizeof(lk_ce_row_squares),
              "plans have lk_loss's states");
static_assert((int)LK_HEAD_PATH_CHUNKS == LK_LINEAR_CROSS_ENTROPY_CHUNKS &&
              (int)LK_HEAD_PATH_PANELS == LK_LINEAR_CROSS_ENTROPY_PANELS &&
              (int)LK_HEAD_PATH_FUSED == LK_LINEAR_CROSS_ENTROPY_FUSED, "plans have the op's paths");

/* What the plan of a call follows from. */
LK_HOST lk_head_shape lk_lce_shape_of(const lk_lce_call *call)
{
    const lk_lce_args &a = call->a;
    lk_head_shape s = {};
    s.rows = call->rows, s.hidden = a.hidden, s.vocab = a.vocab, s.classes = call->classes, s.dweight_stride = a.dweight_stride;
    s.chunk_tokens = a.chunk_tokens, s.panel_vocab = a.panel_vocab, s.slice_tokens = a.slice_tokens;
    s.dweight = a.dweight, s.saved = a.saved, s.why_not_fused = call->why_not_fused, s.path = a.path;
    s.type = call->type, s.logits_type = call->logits_type, s.dweight_dtype = a.dweight_dtype, s.clusters = call->clusters;
    s.gives_loss = call->gives_loss, s.gradient = call->gradient, s.compact = call->compact, s.saves = call->saves;
    s.split = call->split, s.stores = call->stores, s.fused = call->fused, s.placement_unknown = call->placement_unknown;
    s.bias = a.bias, s.class_weight = a.class_weight, s.dlse = a.dlse, s.dentropy = a.dentropy, s.denominator = a.denominator;
    s.row_weight = a.row_weight, s.statistics = a.statistics, s.lse_low = a.lse_low || call->saved_lse_low;
    s.loss = a.loss, s.z_loss_out = a.z_loss_out, s.argmax = a.argmax, s.dx = a.dx, s.dbias = a.dbias;
    s.entropy = a.entropy || a.statistics;
    s.softcap = a.softcap > 0.0f, s.label_smoothing = a.label_smoothing > 0.0f, s.z_loss = a.z_loss > 0.0f;
    s.mean = a.reduction == LK_REDUCTION_MEAN;
    s.accumulate = a.accumulate, s.tf32 = a.tf32, s.no_panels = call->no_panels;
    return s;
}

/* ---- Before the matmuls: counts, and what each row needs ----------------------------------------------------------------- */

/* What a token's target means, among the columns of all ranks; and what ws.target says of it, see lk_head_workspace. */
LK_DEVICE lk_ce_label lk_lce_look_up(const lk_lce_call &call, int64_t token)
{
    return lk_ce_label_among(call.a, lk_ce_target_at(call.a, token), call.classes);
}
LK_DEVICE int lk_lce_column(const lk_lce_work &p, lk_ce_label label)
{
    const lk_lce_args &a = p.call.a;
    if (!p.call.split) return label.y >= 0 ? label.y : label.bad ? 0 : LK_IGNORED;
    if (!label.counted) return LK_IGNORED;
    if (p.ws.states) return label.bad ? LK_ELSEWHERE : label.y;
    const int64_t col = label.y - p.call.rank.parallel.vocab_start;
    return label.y >= 0 && col >= 0 && col < a.vocab ? (int)col : LK_ELSEWHERE;
}

/* The weight of a token that counts. */
LK_DEVICE float lk_lce_row_weight(const lk_lce_args &a, int64_t token)
{
    return a.row_weight ? a.row_weight[token] : 1.0f;
}

/* The gradient of a token's loss. */
LK_DEVICE float lk_lce_upstream(const lk_lce_args &a, int64_t token)
{
    return a.upstream_value * (a.upstream ? a.upstream[a.upstream_per_token ? token : 0] : 1.0f);
}

/* Whether nothing is asked of a token that counts. */
LK_DEVICE bool lk_lce_masked(const lk_lce_args &a, const lk_head_counts &counts, int64_t token)
{
    const float factor = lk_lce_upstream(a, token) * lk_lce_row_weight(a, token);
    const float f = a.reduction == LK_REDUCTION_MEAN && counts.divisor == 0.0f ? 0.0f : factor;
    return lk_ce_masked(f, a.dlse ? a.dlse[token] : 0.0f, a.dentropy ? a.dentropy[token] : 0.0f);
}

/* Threads of a block: more where each has many targets to count. */
#define LK_LCE_PREPARE_MOST 1024
LK_HOST int lk_lce_prepare_threads(int64_t tokens) { return tokens > 8 * LK_HEAD_THREADS ? LK_LCE_PREPARE_MOST : LK_HEAD_THREADS; }

typedef struct {
    int counted, bad, before;     /* before: counted, and of an earlier block */
    int spoils;                   /* bad, with a row_weight that is not 0 */
    float weight, upstream, dlse; /* the sum of class weights; the largest absolute values, of dlse and dentropy together */
} lk_lce_tally;

LK_DEVICE lk_lce_tally lk_lce_merge(lk_lce_tally s, lk_lce_tally t)
{
    return {s.counted + t.counted, s.bad + t.bad, s.before + t.before, s.spoils + t.spoils,
            s.weight + t.weight, fmaxf(s.upstream, t.upstream), fmaxf(s.dlse, t.dlse)};
}

/* The tally of a warp, in every lane. */
LK_DEVICE lk_lce_tally lk_lce_tally_warp(lk_lce_tally s)
{
    LK_UNROLL for (int offset = 16; offset > 0; offset /= 2) {
        const unsigned all = 0xffffffffu;
        s = lk_lce_merge(s, {__shfl_xor_sync(all, s.counted, offset), __shfl_xor_sync(all, s.bad, offset),
                             __shfl_xor_sync(all, s.before, offset), __shfl_xor_sync(all, s.spoils, offset),
                             __shfl_xor_sync(all, s.weight, offset),
                             __shfl_xor_sync(all, s.upstream, offset), __shfl_xor_sync(all, s.dlse, offset)});
    }
    return s;
}

/* The tally of a block. Every thread calls and gets it. Its shared memory may be used again after a barrier. */
LK_DEVICE lk_lce_tally lk_lce_tally_block(lk_lce_tally s)
{
    LK_SHARED(lk_lce_tally, tallies, [LK_LCE_PREPARE_MOST / 32]);
    const int lane = (int)threadIdx.x % 32;
    s = lk_lce_tally_warp(s);
    if (lane == 0) tallies[threadIdx.x / 32] = s;
    __syncthreads(); /* orders the warps' tallies before their reads */
    s = {};
    if (lane < (int)blockDim.x / 32) s = tallies[lane];
    return lk_lce_tally_warp(s);
}

/* Every block counts all targets, which is faster than a second launch. Then it writes what its own tokens' rows need.
 *
 * A mean's divisor and a single upstream are the same for all rows. Rounded into 16-bit dZ, they would give every row the same
 * error, which no sum over rows makes smaller. So they go into alpha, which the matmuls multiply by. There are two exceptions:
 * alpha would be zero, subnormal, infinite or NaN (then ignored rows would not give zeros), or there is dlse or dentropy, which
 * they do not scale.
 *
 * factor has the rest; where dZ is f32 it has everything. f16 has too small a range: there factor is also multiplied by
 * 2^(power - e), and alpha divides by it. 2^e is the first power of two above the largest |factor|. */
LK_KERNEL void __launch_bounds__(LK_LCE_PREPARE_MOST) lk_lce_prepare_kernel(lk_lce_work p)
{
    const lk_lce_args &a = p.call.a;
    const lk_head_workspace &ws = p.ws;
    const int threads = (int)blockDim.x, thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int64_t begin = blockIdx.x * p.block_tokens, end = begin + p.block_tokens;
    LK_SHARED(int, warps, [LK_LCE_PREPARE_MOST / 32]);
    lk_griddepcontrol_wait();
    const bool mean = a.reduction == LK_REDUCTION_MEAN, all_alike = !(a.upstream && a.upstream_per_token);
    const bool sizes = p.call.type == LK_DTYPE_F16 && p.call.gradient;
    lk_lce_tally s = {};
    constexpr int Ahead = 8; /* targets that a thread loads before it looks at the first */
    for (int64_t first = thread; first < a.tokens; first += Ahead * threads) {
        int64_t target[Ahead];
        int y[Ahead];
        LK_UNROLL for (int i = 0; i < Ahead; i++) {
            const int64_t token = first + i * threads;
            target[i] = lk_ce_target_at(a, token < a.tokens ? token : first);
        }
        LK_UNROLL for (int i = 0; i < Ahead; i++) {
            const int64_t token = first + i * threads;
            lk_ce_label label = {-1, false, false};
            if (token < a.tokens) label = lk_ce_label_among(a, target[i], p.call.classes);
            s.counted += label.counted, s.bad += label.bad, s.before += label.counted && token < begin;
            if (label.bad) s.spoils += lk_lce_row_weight(a, token) != 0.0f;
            y[i] = label.y;
        }
        if (a.class_weight) {
            LK_UNROLL for (int i = 0; i < Ahead; i++) s.weight += y[i] >= 0 ? p.call.weights[y[i]] : 0.0f;
        }
        LK_NO_UNROLL for (int64_t token = first; sizes && token < a.tokens && token < first + Ahead * threads;
                          token += threads) {
            if (lk_lce_look_up(p.call, token).y < 0) continue;
            s.upstream = fmaxf(s.upstream, fabsf((all_alike ? 1.0f : lk_lce_upstream(a, token)) * lk_lce_row_weight(a, token)));
            if (a.dlse) s.dlse = fmaxf(s.dlse, fabsf(a.dlse[token]));
            if (a.dentropy) s.dlse = fmaxf(s.dlse, fabsf(a.dentropy[token]));
        }
    }
    s = lk_lce_tally_block(s);
    const float valid = (float)s.counted, over = a.denominator ? *a.denominator : a.class_weight ? s.weight : valid;
    const float one = all_alike ? lk_lce_upstream(a, 0) : 1.0f, divisor = ws.class_weight ? valid : over;
    const float most = all_alike && !a.row_weight ? 1.0f : s.upstream;
    const float common = mean && over != 0.0f ? __fdiv_rn(one, divisor) : one;
    int e = sizes ? lk_cublas_exponent(most) : p.power;
    float alpha = common * __int_as_float((127 + e - p.power) << 23);
    const bool alone = !a.dlse && !a.dentropy;
    const bool in_alpha = p.call.type != LK_DTYPE_F32 && alone && lk_is_finite(alpha) && fabsf(alpha) >= 0x1p-126f;
    if (!in_alpha) {
        if (sizes) e = lk_cublas_exponent(fmaxf(most * fabsf(common), s.dlse));
        alpha = __int_as_float((127 + e - p.power) << 23);
    }
    const float rate = over != 0.0f ? __fdiv_rn(valid, over) : 0.0f; /* of scaled class weights */
    const float shift = __int_as_float((127 + p.power - e) << 23);
    int seen = s.before; /* counted tokens before this tile */
    for (int64_t tile = begin; tile < end; tile += threads) {
        const int64_t token = tile + thread;
        const bool mine = token < end && token < a.tokens;
        lk_ce_label label = {-1, false, false};
        if (mine) label = lk_lce_look_up(p.call, token);
        int64_t row = token;
        if (p.call.compact) {
            const unsigned counted = __ballot_sync(0xffffffffu, label.counted);
            if (lane == 0) warps[warp] = __popc(counted);
            __syncthreads(); /* orders the counts before their reads */
            int left = seen + __popc(counted & ((1u << lane) - 1));
            for (int i = 0; i < threads / 32; i++) left += i < warp ? warps[i] : 0, seen += warps[i];
            __syncthreads(); /* orders the reads before the next tile's counts */
            row = label.counted ? left : p.call.rows;
        }
        if (!mine || row >= p.call.rows) continue;
        const bool good = label.y >= 0;
        ws.target[row] = lk_lce_column(p, label);
        if (ws.weight) ws.weight[row] = good ? p.call.weights[label.y] * (ws.class_weight ? rate : 1.0f) : 0.0f;
        if (ws.others && p.call.split && !p.call.gives_loss) ws.others[row] = label.counted ? p.call.rank.others[token] : 0.0f;
        if (ws.row_weight) ws.row_weight[row] = a.row_weight[token];
        if (ws.token) ws.token[row] = (int)token;
        if (ws.lse && p.call.saved_lse) ws.lse[row] = label.counted ? p.call.saved_lse[token] : 0.0f;
        if (ws.lse_low && p.call.saved_lse_low) ws.lse_low[row] = label.counted ? p.call.saved_lse_low[token] : 0.0f;
        if (ws.entropy && p.call.saved_entropy) ws.entropy[row] = label.counted ? p.call.saved_entropy[token] : 0.0f;
        if (!ws.factor) continue;
        float factor = good ? (!all_alike ? lk_lce_upstream(a, token) : in_alpha ? 1.0f : one) * lk_lce_row_weight(a, token) : 0.0f;
        if (mean) factor = over == 0.0f || !good ? 0.0f : in_alpha ? factor : __fdiv_rn(factor, divisor);
        ws.factor[row] = factor * shift;
        if (ws.dlse) ws.dlse[row] = good ? a.dlse[token] * shift : 0.0f;
        if (ws.dentropy) ws.dentropy[row] = good ? a.dentropy[token] * shift : 0.0f;
    }
    const int64_t step = (int64_t)gridDim.x * threads, from = (int64_t)blockIdx.x * threads + thread;
    for (int64_t row = s.counted + from; p.call.compact && row < p.call.rows; row += step) { /* rows without a token */
        ws.target[row] = LK_IGNORED, ws.token[row] = -1;
        if (ws.lse) ws.lse[row] = 0.0f;
        if (ws.lse_low) ws.lse_low[row] = 0.0f;
        if (ws.factor) ws.factor[row] = 0.0f;
        if (ws.dlse) ws.dlse[row] = 0.0f;
        if (ws.dentropy) ws.dentropy[row] = 0.0f;
    }
    for (int64_t col = from; ws.bias && col < a.vocab; col += step)
        lk_put_as(ws.bias, p.call.logits_type, col, lk_get_as(a.bias, a.bias_dtype, col));
    const float *const unscaled = ws.states ? p.call.weights : a.class_weight;
    for (int64_t col = from; ws.class_weight && col < (ws.states ? p.call.classes : a.vocab); col += step)
        ws.class_weight[col] = unscaled[col] * rate;
    for (int64_t col = from; ws.owners && col < a.vocab; col += step) ws.owners[col] = {INT32_MAX, 0};
    if (blockIdx.x != 0) return;
    lk_lce_tally all = {};
    const bool sums_weights = a.class_weight && a.label_smoothing > 0.0f;
    for (int64_t col = thread; sums_weights && col < p.call.classes; col += threads)
        all.weight += p.call.weights[col] * (ws.class_weight ? rate : 1.0f);
    __syncthreads(); /* orders the reads of lk_lce_tally_block before its next writes */
    all = lk_lce_tally_block(all);
    if (thread != 0) return;
    const float weights = a.class_weight ? all.weight : (float)p.call.classes;
    *ws.counts = {s.counted, over, weights, alpha, 0.0f, 1.0f, s.counted > p.call.rows, s.bad, s.spoils};
    if (a.valid_rows) *a.valid_rows = s.counted;
    if (a.weight_sum) *a.weight_sum = a.class_weight ? s.weight : (float)(s.counted - s.bad);
    if (a.bad_targets && s.bad) atomicAdd(a.bad_targets, s.bad);
}

/* ---- After the matmuls --------------------------------------------------------------------------------------------------- */

/* The sums of a reduced loss, by one block; every thread calls. */
LK_DEVICE void lk_lce_reduce(const lk_lce_work &p, const lk_head_counts &counts)
{
    const lk_lce_args &a = p.call.a;
    const lk_head_workspace &ws = p.ws;
    unsigned counted = 0; /* lk_ce_add_up's count, which is not used here */
    float sums[2] = {0.0f, 0.0f};
    if (counts.bad && !counts.spoils && ws.loss) { /* all bad tokens have the weight 0 */
        for (int64_t row = threadIdx.x; row < p.call.rows; row += LK_HEAD_THREADS) {
            const int64_t token = ws.token ? ws.token[row] : row;
            if (token >= 0 && lk_lce_look_up(p.call, token).bad) ws.loss[row] = 0.0f;
        }
        __syncthreads(); /* orders these losses before their reads */
    }
    if (ws.loss) sums[0] = lk_ce_add_up<LK_HEAD_THREADS, 1, 16>(ws.loss, p.call.rows, &counted);
    if (ws.z) sums[1] = lk_ce_add_up<LK_HEAD_THREADS, 1, 16>(ws.z, p.call.rows, &counted);
    lk_sum_cluster<2, true>(sums, 0);
    if (threadIdx.x != 0) return;
    if (counts.spoils) sums[0] = NAN;
    if (a.reduction == LK_REDUCTION_MEAN) {
        const float valid = (float)counts.counted, over = counts.divisor;
        const float divisor = ws.class_weight ? valid : over, nothing = a.zero_when_empty ? 0.0f : NAN;
        const float z_divisor = a.denominator ? over : valid;
        const bool some = over != 0.0f;
        sums[0] = some ? __fdiv_rn(sums[0], divisor) : sums[0] != sums[0] ? sums[0] : nothing;
        if (ws.z || !some) sums[1] = some ? __fdiv_rn(sums[1], z_divisor) : sums[1] != sums[1] ? sums[1] : nothing;
    }
    if (counts.too_many) sums[0] = sums[1] = NAN;
    if (a.loss) lk_put_or_add(a.loss, sums[0], a.accumulate_loss);
    if (a.z_loss_out) lk_put_or_add(a.z_loss_out, sums[1], a.accumulate_loss);
}

/* The statistics of a row, as the rows' kernels have left them. */
LK_DEVICE lk_ce_statistics lk_lce_statistics_of(const lk_lce_work &p, int64_t row)
{
    const float *const at = p.ws.entropy + row;
    return {at[p.call.rows], at[2 * p.call.rows], at[3 * p.call.rows]};
}

/* The loss of a token. If its target is bad, ws.loss of its row was computed for another target, and the token's is NaN, or 0 with
 * row_weight 0. */
LK_DEVICE float lk_lce_loss_of(const lk_lce_work &p, int64_t row, int64_t token, bool bad)
{
    if (!bad) return p.ws.loss[row];
    return lk_lce_row_weight(p.call.a, token) == 0.0f ? 0.0f : NAN;
}

/* Writes what the matmuls do not: the reduced loss; each token's results; dx of bad tokens and, where rows are compacted, of
 * ignored ones; dbias; everything if there is no token, or too many count. */
template <class State> LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS, LK_HEAD_BLOCKS) lk_lce_finish_kernel(lk_lce_work p)
{
    const lk_lce_args &a = p.call.a;
    const lk_head_workspace &ws = p.ws;
    const int lane = (int)threadIdx.x % 32;
    const int64_t block = (int64_t)blockIdx.x - 1, blocks = (int64_t)gridDim.x - 1; /* without the block of the reduced loss */
    const int64_t thread = block * LK_HEAD_THREADS + threadIdx.x, step = blocks * LK_HEAD_THREADS;
    lk_griddepcontrol_wait();
    const bool reduced = a.reduction != LK_REDUCTION_NONE, none = p.call.rows == 0;
    lk_head_counts counts = {};
    if (!none) counts = *ws.counts;
    else if (p.call.gives_loss && a.denominator) counts.divisor = *a.denominator;
    if (block < 0) {
        if (p.call.gives_loss && !p.call.split && reduced && (a.loss || a.z_loss_out)) lk_lce_reduce(p, counts);
        if (none && threadIdx.x == 0 && a.valid_rows) *a.valid_rows = 0;
        if (none && threadIdx.x == 0 && a.weight_sum) *a.weight_sum = 0.0f;
        return;
    }
    if (p.call.split && p.call.gives_loss) { /* states: they are NaN where too many tokens count */
        State unknown = lk_ce_row_empty<State>();
        unknown.max = unknown.sum = NAN;
        for (int64_t token = thread; counts.too_many && token < a.tokens; token += step)
            lk_ce_pack_state(p.call.rank.states, p.call.state_bytes, token, unknown);
        return;
    }
    const bool every = p.call.gives_loss && !reduced, compact = p.call.compact, too_many = counts.too_many;
    const bool rows = p.call.gives_loss && (a.lse || a.lse_low || a.entropy || a.argmax);
    const bool left = every || rows || counts.bad || too_many || compact; /* some token has something */
    for (int64_t first = thread - lane; left && first < a.tokens; first += step) {
        const int64_t token = first + lane;
        lk_ce_label label = {-1, false, false};
        if (token < a.tokens) {
            label = lk_lce_look_up(p.call, token);
            if (!compact || too_many || !label.counted) {
                const bool skip = too_many || compact;
                const float instead = too_many ? NAN : 0.0f;
                if (every && a.loss)
                    lk_put_or_add(a.loss + token, skip ? instead : lk_lce_loss_of(p, token, token, label.bad), a.accumulate_loss);
                if (every && a.z_loss_out)
                    lk_put_or_add(a.z_loss_out + token, skip || !ws.z ? instead : ws.z[token], a.accumulate_loss);
                if (p.call.gives_loss && a.lse) a.lse[token] = skip ? instead : ws.lse[token];
                if (p.call.gives_loss && a.lse_low) a.lse_low[token] = skip ? 0.0f : ws.lse_low[token];
                if (p.call.gives_loss && a.entropy) a.entropy[token] = skip ? instead : ws.entropy[token];
                if constexpr (lk_ce_has_squares<State>)
                    lk_ce_put_statistics(a.entropy, a.tokens, token, skip ? lk_ce_statistics{instead, instead, instead}
                                                                          : lk_lce_statistics_of(p, token));
                if (p.call.gives_loss && a.argmax) a.argmax[token] = skip ? -1 : ws.argmax[token];
            }
        }
        const bool fill = token < a.tokens && (label.bad || too_many || (compact && !label.counted));
        const bool bad = a.dx && label.bad && !lk_lce_masked(a, counts, token);
        const float with = bad || too_many ? NAN : 0.0f;
        unsigned todo = a.dx ? __ballot_sync(0xffffffffu, fill) : 0;
        for (; todo; todo &= todo - 1) {
            const int owner = __ffs((int)todo) - 1;
            const float value = __shfl_sync(0xffffffffu, with, owner);
            for (int64_t col = lane; col < a.hidden; col += 32)
                lk_put_as(a.dx, p.call.type, (first + owner) * a.dx_stride + col, value);
        }
    }
    for (int64_t row = thread; compact && !too_many && row < p.call.rows; row += step) {
        const int64_t token = ws.token[row];
        if (token < 0) continue;
        const bool bad = every && lk_lce_look_up(p.call, token).bad;
        if (every && a.loss) lk_put_or_add(a.loss + token, lk_lce_loss_of(p, row, token, bad), a.accumulate_loss);
        if (every && a.z_loss_out) lk_put_or_add(a.z_loss_out + token, ws.z ? ws.z[row] : 0.0f, a.accumulate_loss);
        if (p.call.gives_loss && a.lse) a.lse[token] = ws.lse[row];
        if (p.call.gives_loss && a.lse_low) a.lse_low[token] = ws.lse_low[row];
        if (p.call.gives_loss && a.entropy) a.entropy[token] = ws.entropy[row];
        if constexpr (lk_ce_has_squares<State>)
            lk_ce_put_statistics(a.entropy, a.tokens, token, lk_lce_statistics_of(p, row));
        if (p.call.gives_loss && a.argmax) a.argmax[token] = ws.argmax[row];
    }
    if (too_many || (none && !a.accumulate)) {
        const float value = too_many ? NAN : 0.0f;
        for (int64_t i = thread; a.dweight && i < a.vocab * a.hidden; i += step)
            lk_put_as(a.dweight, a.dweight_dtype, i / a.hidden * a.dweight_stride + i % a.hidden, value);
        for (int64_t col = thread; a.dbias && col < a.vocab; col += step) lk_put_as(a.dbias, a.dbias_dtype, col, value);
    } else if (!none && a.dbias) {
        for (int64_t col = thread; col < a.vocab; col += step) {
            float sum = 0.0f;
            for (int64_t split = 0; split < ws.splits; split++) sum += ws.dbias[split * a.vocab + col];
            sum = fmaf(counts.alpha, sum, a.accumulate ? lk_get_as(a.dbias, a.dbias_dtype, col) : 0.0f);
            lk_put_as(a.dbias, a.dbias_dtype, col, sum);
        }
    }
}

/* `finish` of the table: what the matmuls do not write of these outputs. */
LK_HOST lk_status lk_lce_write_rest(const lk_lce_job *job, const lk_lce_work &p)
{
    const lk_lce_call &call = p.call;
    const int64_t tokens = call.a.tokens, vocab = call.a.vocab;
    const int64_t blocks = lk_head_min(lk_ceil_div(tokens > vocab ? tokens : vocab, LK_HEAD_THREADS), 2 * job->device.sms);
    const bool some = call.rows == 0 || call.compact || call.a.dx || (!call.gives_loss && call.a.dbias);
    if (call.split && !some) return LK_OK; /* nothing is left to write */
    return lk_head_launch(job, call.a.statistics ? lk_lce_finish_kernel<lk_ce_row_squares> : lk_lce_finish_kernel<lk_ce_row>,
                          blocks + 1, p);
}

/* ---- The rows of CHUNKS -------------------------------------------------------------------------------------------------- */

/* What cross_entropy.cuh's kernels for rows of any length get of some rows and columns. */
template <class Logit> LK_HOST lk_cross_entropy_call lk_lce_rows_of(const lk_lce_job *job, const lk_lce_work &chunk)
{
    const lk_lce_call &call = chunk.call;
    const lk_head_workspace &ws = chunk.ws;
    lk_cross_entropy_args f = {};
    f.logits = ws.slice ? ws.slice : ws.logits, f.target = ws.target + chunk.first_row, f.lse = ws.lse + chunk.first_row;
    f.class_weight = ws.class_weight ? ws.class_weight : call.weights;
    f.rows = chunk.rows, f.vocab = chunk.cols, f.logits_stride = ws.logits_stride, f.ignore_index = -1, f.use_ignore_index = 1;
    f.logit_scale = call.a.logit_scale, f.softcap = call.a.softcap;
    f.label_smoothing = call.a.label_smoothing, f.z_loss = call.a.z_loss;
    f.target_dtype = LK_TARGET_INT32, f.dlogits_dtype = call.gradient ? call.type : lk_dtype<Logit>;
    if (ws.loss) f.loss = ws.loss + chunk.first_row;
    if (ws.z) f.z_loss_out = ws.z + chunk.first_row;
    if (ws.lse_low) f.lse_low = ws.lse_low + chunk.first_row;
    if (ws.entropy) f.entropy = ws.entropy + chunk.first_row;
    if (ws.argmax) f.argmax = ws.argmax + chunk.first_row;
    if (call.gradient) {
        const int64_t first = ws.slice ? lk_head_in_chunk(job, chunk) * ws.logits_stride * lk_head_bytes_of(call.type) : 0;
        f.dlogits = (char *)ws.logits + first, f.dlogits_stride = lk_head_dz_stride(job, chunk);
        f.upstream = ws.factor + chunk.first_row, f.upstream_per_row = 1, f.upstream_value = 1.0f;
    }
    if (ws.dlse) f.dlse = ws.dlse + chunk.first_row;
    if (ws.dentropy) f.dentropy = ws.dentropy + chunk.first_row;
    lk_cross_entropy_call p = lk_cross_entropy_call_of<Logit>(f);
    if (lk_cross_entropy_sums_weights(&f)) p.weight_total = &ws.counts->weights;
    if (ws.row_weight) p.loss_weight = ws.row_weight + chunk.first_row;
    if (call.a.statistics) p.a.statistics = 1, p.valid = call.rows;
    return p;
}

/* The rows of a slice, from logits of all columns to loss and dZ. */
template <class Logit> LK_HOST lk_status lk_lce_slice(const lk_lce_job *job, const lk_lce_work &slice)
{
    const lk_lce_call &call = slice.call;
    lk_cross_entropy_call p = lk_lce_rows_of<Logit>(job, slice);
    if (!call.gradient && lk_cross_entropy_is_plain(&p.a))
        return lk_cross_entropy_plain<Logit>(job->op, &job->device, p, job->stream);
    if (!call.gradient) return lk_cross_entropy_gradient<Logit, LK_FORWARD>(job->op, &job->device, p, job->stream);
    return call.gives_loss ? lk_cross_entropy_gradient<Logit, LK_BOTH>(job->op, &job->device, p, job->stream)
                           : lk_cross_entropy_gradient<Logit, LK_BACKWARD>(job->op, &job->device, p, job->stream);
}

/* ---- The rows of PANELS -------------------------------------------------------------------------------------------------- */

/* Writes a row's results. One thread calls it. */
LK_DEVICE void lk_lce_put_result(const lk_head_workspace &ws, int64_t row, lk_ce_result r)
{
    if (ws.loss) ws.loss[row] = r.class_loss + r.z_loss;
    if (ws.z) ws.z[row] = r.z_loss;
    ws.lse[row] = r.lse;
    if (ws.lse_low) ws.lse_low[row] = r.lse_low;
    if (ws.entropy) ws.entropy[row] = r.entropy;
    if (ws.argmax) ws.argmax[row] = r.argmax;
}

/* Writes a row's results, or with ranks its state, which has the target's logit outside the sums. All threads may call; the one
 * with `writes` writes. */
template <class State>
LK_DEVICE lk_ce_result lk_lce_put_row(const lk_lce_work &p, int64_t row, int y, State s, float scale, bool writes)
{
    const lk_lce_args &a = p.call.a;
    const lk_head_workspace &ws = p.ws;
    lk_ce_result r = {0.0f, 0.0f, 0.0f, 0.0f, -1, 0.0f};
    lk_ce_statistics more = {};
    float others = 0.0f;
    if (p.call.split) { /* the results follow from the states of all ranks */
        const int64_t token = ws.token ? ws.token[row] : row;
        if (s.top != INT64_MIN) s.top -= p.call.rank.parallel.vocab_start;
        if (writes && y >= 0) lk_ce_pack_state(p.call.rank.states, p.call.state_bytes, token, s);
        return r;
    }
    if (y >= 0) {
        const float weight[1] = {ws.weight ? ws.weight[row] : 1.0f}, value[1] = {s.target};
        const float smoothed[1] = {a.label_smoothing > 0.0f ? weight[0] : 1.0f};
        const State all = lk_ce_row_add(s, value, smoothed, scale);
        const lk_ce_options options = {scale, a.label_smoothing, a.z_loss, weight[0], a.vocab};
        r = lk_ce_row_finish(all, options);
        if constexpr (lk_ce_has_squares<State>) more = lk_ce_row_statistics(all, options);
        others = __fdiv_rn(lk_ce_row_raise(s, all.max, scale).sum, all.sum);
        if (ws.row_weight) r.class_loss *= ws.row_weight[row], r.z_loss *= ws.row_weight[row];
    }
    if (!writes) return r;
    lk_lce_put_result(ws, row, r);
    if constexpr (lk_ce_has_squares<State>) lk_ce_put_statistics(ws.entropy, p.call.rows, row, more);
    if (ws.others) ws.others[row] = others;
    return r;
}

/* After a chunk's last panel: a thread owns a row, and writes its results from the state of all columns, as
 * lk_cross_entropy_finish_kernel does from those of ranks. */
template <class State>
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_lce_panels_kernel(const __grid_constant__ lk_lce_work chunk)
{
    const lk_lce_args &a = chunk.call.a;
    const int64_t in_chunk = (int64_t)blockIdx.x * LK_HEAD_THREADS + threadIdx.x, row = chunk.first_row + in_chunk;
    const float scale = lk_head_scale(a);
    lk_griddepcontrol_wait();
    if (in_chunk >= chunk.rows) return;
    const int y = chunk.ws.target[row];
    State s = lk_ce_unpack_state<State>(chunk.ws.states, chunk.call.state_bytes, in_chunk);
    if (chunk.call.split && s.top != INT64_MIN)
        s.top += chunk.call.rank.parallel.vocab_start; /* lk_lce_put_row takes columns of this rank */
    if (!chunk.call.split) s = lk_ce_row_raise_halfway<true>(s, s.target, scale);
    lk_lce_put_row(chunk, row, y, s, scale, true);
}

/* What a panel is to cross_entropy.cuh: a rank's columns. Its states are added to those of the panels before. */
template <class Logit> LK_HOST lk_status lk_lce_panel(const lk_lce_job *job, const lk_lce_work &chunk, lk_direction direction)
{
    const lk_lce_call &call = chunk.call;
    lk_cross_entropy_call p = lk_lce_rows_of<Logit>(job, chunk);
    const int64_t first_col = call.rank.parallel.vocab_start + chunk.first_col;
    p.slice = {first_col, 1, 0, chunk.ws.states, NULL, chunk.ws.others + chunk.first_row};
    p.classes = call.classes, p.state_bytes = call.state_bytes, p.adds_state = !chunk.first;
    if (p.weights) p.a.class_weight = p.weights + first_col;
    if (direction == LK_BACKWARD) return lk_cross_entropy_gradient<Logit, LK_BACKWARD>(job->op, &job->device, p, job->stream);
    const lk_status status = lk_cross_entropy_gradient<Logit, LK_FORWARD>(job->op, &job->device, p, job->stream);
    if (status || !chunk.last) return status;
    return lk_head_launch(job, call.a.statistics ? lk_lce_panels_kernel<lk_ce_row_squares> : lk_lce_panels_kernel<lk_ce_row>,
                          lk_ceil_div(chunk.rows, LK_HEAD_THREADS), chunk);
}

/* ---- The rows of FUSED --------------------------------------------------------------------------------------------------- */

/* A warp owns a row: it merges the states of the stretches and writes the results. */
template <class State> LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_lce_merge_kernel(const __grid_constant__ lk_lce_fused p)
{
    const int64_t row = (int64_t)blockIdx.x * (LK_HEAD_THREADS / 32) + threadIdx.x / 32;
    lk_griddepcontrol_wait();
    if (row >= p.chunk.rows) return;
    float slope;
    const int y = p.chunk.ws.target[p.chunk.first_row + row];
    const State s = lk_head_merge_stretches<State>(p, row, y, &slope);
    lk_lce_put_row(p.chunk, p.chunk.first_row + row, y, s, lk_head_scale(p.chunk.call.a), threadIdx.x % 32 == 0);
}

/* A warp owns a row. It writes the row's results, finds v and the target's dZ, and rescales tiles with other references.
 *
 * Without smoothing, dZ is p_factor p[j] for every column but the target's. So v = p_factor p[j] / E[j], the same for all j. */
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS, LK_HEAD_BLOCKS) lk_lce_factor_kernel(const __grid_constant__ lk_lce_fused p)
{
    const lk_lce_work &chunk = p.chunk;
    const lk_lce_args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * (LK_HEAD_THREADS / 32) + threadIdx.x / 32, at = chunk.first_row + row;
    lk_griddepcontrol_wait();
    if (row >= chunk.rows) return;
    const float scale = lk_head_scale(a), rate = scale * LK_LOG2E;
    const int y = ws.target[at];
    float slope, v = 0.0f, target_dz = 0.0f;
    const lk_ce_row s = lk_head_merge_stretches<lk_ce_row>(p, row, y, &slope);
    const lk_ce_result r = lk_lce_put_row(chunk, at, y, s, scale, lane == 0);
    const float base = lk_head_largest_reference(p, row, y);
    if (y >= 0) {
        const lk_head_terms t = ws.factor ? lk_head_terms_of(chunk, at, y, r.lse, r.lse_low, r.entropy) : lk_head_terms{};
        v = lk_head_row_factor(a, s, t, base, slope, r.lse, &target_dz);
    }
    lk_head_rescale(p, row, y, rate, base, 1.0f);
    if (lane != 0) return;
    if (ws.target_dz) lk_head_put_target_dz(ws, at, y, target_dz);
    if (ws.scale) ws.scale[row] = v;
    if (ws.base) ws.base[at] = base;
}

/* backward from saved exponentials: a thread owns a row and finds v and the target's dZ. */
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_lce_saved_kernel(const __grid_constant__ lk_lce_work p)
{
    const lk_head_workspace &ws = p.ws;
    const int64_t row = (int64_t)blockIdx.x * LK_HEAD_THREADS + threadIdx.x;
    lk_griddepcontrol_wait();
    if (row >= p.call.rows) return;
    const int y = ws.target[row];
    const lk_head_terms t = lk_head_terms_at(p, row, y);
    const float below = fmaf(lk_head_scale(p.call.a), ws.base[row], -ws.lse[row]) - lk_head_lse_low(p, row);
    const float p_scale = ws.base[row] > -INFINITY ? lk_exp(below) : 0.0f;
    lk_head_put_target_dz(ws, row, y, lk_head_target_dz_by_lse(p, row, y, t, ws.others[row]));
    ws.scale[row] = y < 0 ? 0.0f : t.g.p_factor * p_scale;
}

/* The rows of a chunk, after their states. */
LK_HOST lk_status lk_lce_fused_rows(const lk_lce_job *job, const lk_lce_fused &p)
{
    const lk_lce_call &call = p.chunk.call;
    void (*rows)(lk_lce_fused) = call.gradient || p.kept ? lk_lce_factor_kernel : lk_lce_merge_kernel<lk_ce_row>;
    if (call.a.statistics) rows = lk_lce_merge_kernel<lk_ce_row_squares>;
    return lk_head_launch(job, rows, lk_ceil_div(p.chunk.rows, LK_HEAD_THREADS / 32), p);
}

/* backward; without `saved` lk_head_others_kernel does this, after the last panel. */
LK_HOST lk_status lk_lce_fused_backward(const lk_lce_job *job)
{
    const lk_lce_call &call = job->p.call;
    return call.saves ? lk_head_launch(job, lk_lce_saved_kernel, lk_ceil_div(call.rows, LK_HEAD_THREADS), job->p) : LK_OK;
}

/* ---- Labels: the table that the head gets -------------------------------------------------------------------------------- */

/* `begin`. There are blocks for all tokens, and, where an array of the workspace has an element for each column, for the columns:
 * few tokens may have many. */
LK_HOST lk_status lk_lce_prepare(const lk_lce_job *job)
{
    const lk_head_workspace &ws = job->p.ws;
    const int64_t tokens = lk_ceil_div(job->p.call.a.tokens, job->p.block_tokens), columns = job->p.call.a.vocab;
    const int64_t most = ws.bias || ws.class_weight || ws.owners ? 2 * job->device.sms : 0;
    const int threads = lk_lce_prepare_threads(job->p.call.a.tokens);
    const int64_t blocks = lk_head_min(lk_ceil_div(columns, threads), most);
    return lk_launch_pdl(job->op, &job->device, lk_lce_prepare_kernel, tokens > blocks ? tokens : blocks, 1, threads, 0,
                         job->stream, job->p);
}

/* The arguments of cross_entropy.cuh for results without logits. */
LK_HOST lk_cross_entropy_args lk_lce_finish_args(const lk_lce_args *a)
{
    lk_cross_entropy_args f = {};
    f.target = a->target, f.class_weight = a->class_weight, f.row_weight = a->row_weight, f.denominator = a->denominator;
    f.loss = a->loss, f.z_loss_out = a->z_loss_out, f.lse = a->lse, f.entropy = a->entropy, f.argmax = a->argmax;
    f.lse_low = a->lse_low;
    f.valid_rows = a->valid_rows, f.weight_sum = a->weight_sum, f.bad_targets = a->bad_targets;
    f.workspace = a->workspace, f.workspace_bytes = a->workspace_bytes;
    f.rows = a->tokens, f.vocab = a->vocab, f.ignore_index = a->ignore_index, f.logit_scale = a->logit_scale;
    f.softcap = a->softcap, f.label_smoothing = a->label_smoothing, f.z_loss = a->z_loss;
    f.use_ignore_index = a->use_ignore_index, f.reduction = a->reduction, f.zero_when_empty = a->zero_when_empty;
    f.target_dtype = a->target_dtype, f.statistics = a->statistics, f.accumulate_loss = a->accumulate_loss;
    return f;
}

/* What cross_entropy.cuh's kernels get where a rank has no columns. */
LK_HOST lk_cross_entropy_call lk_lce_no_columns_call(const lk_lce_job *job)
{
    const lk_lce_call &call = job->p.call;
    const lk_lce_args &a = call.a;
    lk_cross_entropy_call p = {};
    p.a = lk_lce_finish_args(&a);
    p.a.lse = const_cast<float *>(call.saved_lse), p.a.class_weight = p.weights = call.weights;
    p.slice = {call.rank.parallel.vocab_start, 1, 0, call.rank.states, NULL, call.rank.others};
    p.classes = call.classes;
    return p;
}

/* The empty states of a rank without columns; in backward it counts bad targets. It reads no logits, so the kernels of f32 serve
 * every T. */
LK_HOST lk_status lk_lce_no_columns(const lk_lce_job *job, lk_direction direction)
{
    lk_cross_entropy_call p = lk_lce_no_columns_call(job);
    if (direction == LK_FORWARD) {
        p.state_bytes = job->p.call.state_bytes;
        return lk_cross_entropy_gradient<lk_f32, LK_FORWARD>(job->op, &job->device, p, job->stream);
    }
    return p.a.bad_targets ? lk_cross_entropy_gradient<lk_f32, LK_BACKWARD>(job->op, &job->device, p, job->stream) : LK_OK;
}

/* The table. Logit: the type of stored logits. */
template <class T, class Logit> LK_HOST lk_lce_rows lk_lce_labels_as(void)
{
    return {lk_lce_prepare, NULL, lk_lce_slice<Logit>, lk_head_dbias<T, lk_lce_call>, lk_lce_panel<Logit>, lk_lce_write_rest,
            lk_lce_no_columns, lk_head_run_fused<T, lk_lce_call>, lk_lce_fused_rows, lk_lce_fused_backward, NULL, NULL, NULL};
}
template <class T> LK_HOST lk_lce_rows lk_lce_labels(const lk_lce_args *args)
{
    return args->fast_logits ? lk_lce_labels_as<T, T>() : lk_lce_labels_as<T, float>();
}

/* ---- The context --------------------------------------------------------------------------------------------------------- */

static_assert(sizeof(lk_cublas_context) <= sizeof(lk_linear_cross_entropy_context), "the opaque struct is large enough");

LK_CUBLAS_CONTEXT(linear_cross_entropy)

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* NULL if FUSED can run this call, wherever x and weight lie; else what it would need, for an error's text. Sets clusters
 * and why_not_fused. */
LK_HOST const char *lk_lce_not_fused(lk_lce_call *call)
{
    lk_device device = {};
    if (call->type != LK_DTYPE_BF16) return "bf16";
    if (call->a.statistics && call->a.label_smoothing > 0.0f) return "calls without both statistics and label_smoothing";
    if (call->rows >= 1 << 30) return "fewer than 2^30 tokens";
    call->clusters = 1;
    if (call->rows == 0) return NULL;
    const bool clean = cudaPeekAtLastError() == cudaSuccess; /* else the caller's own error stays */
    const cudaError_t error = lk_current_device(&device);
    if (device.sms > 1) call->clusters = device.sms / 2;
    if (!error && lk_gemm_available(&device)) return NULL;
    int id = 0, major = 0;
    if (error == cudaErrorNoKernelImageForDevice) call->why_not_fused = ": the program has no code for this GPU";
    else if (error) call->why_not_fused = ": there is no usable CUDA device";
    else if (cudaGetDevice(&id) == cudaSuccess &&
             cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id) == cudaSuccess && major == 9)
        call->why_not_fused = ": the code that this device runs was not compiled for it";
    if (clean && cudaPeekAtLastError() != cudaSuccess) (void)cudaGetLastError(); /* a query leaves no error */
    return "sm_90a";
}

/* Likewise, NULL if FUSED can read x and weight where they lie. */
LK_HOST const char *lk_lce_misplaced(const lk_lce_call *call)
{
    const lk_lce_args &a = call->a;
    const int64_t longest = (int64_t)1 << 38; /* a tensor map's strides are below 2^40 bytes */
    const bool weight = (uintptr_t)a.weight % 16 == 0 && a.weight_stride % 8 == 0 && a.weight_stride <= longest;
    const bool x = call->compact || ((uintptr_t)a.x % 16 == 0 && a.x_stride % 8 == 0 && a.x_stride <= longest);
    if (x && weight) return NULL;
    return "x and weight at multiples of 16 bytes, with strides of at most 2^38 that are multiples of 8";
}

/* Whether `saved` has logits. forward and backward have to agree, so it depends on nothing that one of them lacks, and not on
 * where tensors lie. With few columns f32 logits cost less time than the copy of x that exponentials need. */
LK_HOST bool lk_lce_saves_logits(lk_lce_call *call)
{
    const int path = call->a.path;
    if (!call->saves || call->split) return false;
    if (path) return path == LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    if (call->a.label_smoothing > 0.0f || lk_lce_not_fused(call)) return true;
    const lk_head_shape s = lk_lce_shape_of(call);
    const int64_t hidden = s.hidden > 0 ? lk_head_min(s.hidden, INT32_MAX) : 0; /* sizes are checked later */
    const bool sizes = call->rows > 0 && call->rows <= INT32_MAX && hidden > 0 && s.vocab > 0 && s.vocab <= 1 << 30;
    return !lk_head_many_columns(&s, 2 * hidden) || (sizes && lk_head_stored_is_faster(&s));
}

/* batch_invariant: the columns between two merges, however many tokens there are. They keep all SMs busy with one tile of rows, where
 * each block has stretches of its own, and all clusters with one pair of tiles, so with any number of pairs. */
LK_HOST int64_t lk_lce_invariant_cols(const lk_lce_call *call)
{
    const int64_t tiles = lk_ceil_div(call->a.vocab, LK_GEMM_COLS), most = 64;
    int64_t best = 1;
    double least = INFINITY;
    for (int64_t stretch = 1; stretch <= most && stretch <= tiles; stretch++) {
        const int64_t stretches = lk_ceil_div(tiles, stretch), rounds = lk_ceil_div(stretches, call->clusters);
        const double time = (double)(rounds + lk_ceil_div(stretches, 2 * call->clusters)) * ((double)stretch + 0.01);
        if (time < least) best = stretch, least = time;
    }
    return best * LK_GEMM_COLS;
}

/* Copies the arguments that a call of this direction has, and sets what follows from them alone. rank: NULL for all columns. */
template <class T>
LK_HOST void lk_lce_copy_args(const lk_lce_args *args, lk_direction direction, const lk_lce_rank *rank, lk_lce_call *call)
{
    lk_lce_args *const a = &call->a;
    *call = {}, *a = *args;
    if (direction != LK_FORWARD) a->batch_invariant = 0;
    if (direction == LK_FORWARD) {
        a->upstream = a->dlse = a->dentropy = NULL, a->dx = a->dweight = a->dbias = NULL;
        a->dx_stride = a->dweight_stride = a->slice_tokens = 0;
        a->upstream_per_token = a->accumulate = a->dweight_dtype = a->dbias_dtype = 0;
    }
    if (direction == LK_BACKWARD) {
        call->saved_lse = a->lse, call->saved_lse_low = a->lse_low, call->saved_entropy = a->dentropy ? a->entropy : NULL;
        a->loss = a->z_loss_out = a->lse = a->lse_low = a->entropy = a->weight_sum = NULL, a->argmax = a->valid_rows = NULL;
        a->zero_when_empty = 0;
    }
    if (a->reduction != LK_REDUCTION_MEAN) a->denominator = NULL;
    if (direction == LK_BOTH || !a->tokens) a->saved = NULL;
    call->split = rank != NULL, call->classes = rank ? rank->parallel.vocab_total : a->vocab;
    if (rank) call->rank = *rank;
    call->state_bytes = lk_ce_state_bytes(a), call->saves = a->saved != NULL;
    call->gives_loss = direction != LK_BACKWARD, call->gradient = !call->gives_loss || a->dx || a->dweight || a->dbias;
    call->why_not_fused = "", call->type = lk_dtype<T>, call->logits_type = a->fast_logits ? lk_dtype<T> : LK_DTYPE_F32;
    call->compact = a->max_counted > 0 && a->max_counted < a->tokens;
    call->rows = call->compact ? a->max_counted : a->tokens;
    call->stores = lk_lce_saves_logits(call);
}

/* Fills in every default, and resolves whether FUSED may be the path. Fails where a call asks for a path that it cannot have. */
template <class T> LK_HOST lk_status lk_lce_resolve_path(const char *op, bool query, lk_lce_call *call)
{
    lk_lce_args *const a = &call->a;
    const bool empty = a->tokens == 0;
    call->weights = a->class_weight;
    if (a->class_weight) a->class_weight += call->rank.parallel.vocab_start;
    if (call->split && a->path == LK_LINEAR_CROSS_ENTROPY_CHUNKS && !call->no_panels)
        return lk_fail(LK_ERR_PATH, op, "path LK_LINEAR_CROSS_ENTROPY_CHUNKS is not for columns that are split over ranks");
    if (a->logit_scale == 0.0f) a->logit_scale = 1.0f;
    if (a->upstream_value == 0.0f) a->upstream_value = 1.0f;
    if (a->tokens <= 1) a->x_stride = lk_head_round_up(a->hidden, 8); /* a single row has no stride; TMA takes this one */
    if (empty || a->vocab <= 1) a->weight_stride = lk_head_round_up(a->hidden, 8);
    for (int *dtype : {&a->bias_dtype, &a->dweight_dtype, &a->dbias_dtype})
        if (*dtype == LK_DTYPE_T) *dtype = lk_dtype<T>;
    call->placement_unknown = query && (!a->weight || (!a->x && !call->compact));
    if (a->batch_invariant && a->path != LK_LINEAR_CROSS_ENTROPY_AUTO && a->path != LK_LINEAR_CROSS_ENTROPY_FUSED)
        return lk_fail(LK_ERR_PATH, op, "batch_invariant needs path 0 or LK_LINEAR_CROSS_ENTROPY_FUSED; path is %d", a->path);
    if (a->batch_invariant) a->path = LK_LINEAR_CROSS_ENTROPY_FUSED;
    const bool lengths = a->chunk_tokens || a->panel_vocab || a->slice_tokens; /* then FUSED must be asked for */
    const bool by_name = a->path == LK_LINEAR_CROSS_ENTROPY_FUSED;
    call->fused = by_name || (a->path == LK_LINEAR_CROSS_ENTROPY_AUTO && (!lengths || call->saves));
    if (call->saves && a->batch_invariant) return lk_fail(LK_ERR_PATH, op, "saved is for calls without batch_invariant");
    if (call->stores) call->fused = false;
    const char *fused_needs = call->fused ? lk_lce_not_fused(call) : NULL;
    if (call->fused && !fused_needs) fused_needs = lk_lce_misplaced(call);
    if (call->saves && !call->stores) {
        if (!call->fused) return lk_fail(LK_ERR_PATH, op, "saved is not for path LK_LINEAR_CROSS_ENTROPY_PANELS");
        if (!fused_needs && (a->label_smoothing > 0.0f || a->entropy || a->statistics || a->argmax || a->dentropy))
            fused_needs = "calls without label_smoothing, entropy, argmax and dentropy";
        if (fused_needs)
            return lk_fail(LK_ERR_PATH, op, "saved has exponentials here, which are for %s%s%s", fused_needs, call->why_not_fused,
                           call->split ? "" : "; with path LK_LINEAR_CROSS_ENTROPY_CHUNKS it has logits");
    }
    if (fused_needs && by_name)
        return lk_fail(LK_ERR_PATH, op, "%spath LK_LINEAR_CROSS_ENTROPY_FUSED%s is for %s%s",
                       a->batch_invariant ? "batch_invariant needs " : "", a->batch_invariant ? ", which" : "", fused_needs,
                       call->why_not_fused);
    if (fused_needs) call->fused = false;
    if (a->batch_invariant && !a->panel_vocab) a->panel_vocab = lk_lce_invariant_cols(call);
    a->chunk_tokens = lk_head_min(a->chunk_tokens, call->rows), a->slice_tokens = lk_head_min(a->slice_tokens, call->rows);
    a->panel_vocab = lk_head_min(lk_head_round_up(lk_head_min(a->panel_vocab, a->vocab), 16), a->vocab); /* for bias's alignment */
    return LK_OK;
}

/* The bytes of a.saved. */
LK_HOST size_t lk_lce_saved_size(const lk_lce_call *call)
{
    const lk_head_shape s = lk_lce_shape_of(call);
    lk_head_workspace ws = {};
    return lk_head_lay_out_saved(&s, NULL, &ws);
}

/* forward leaves the states of a rank's columns; finish computes the results, so forward has none of them. */
LK_HOST bool lk_lce_leaves_states(const lk_lce_call *call)
{
    return call->split && call->gives_loss && !call->rank.parallel.all_gather;
}

/* What other headers add to the checks: their tensors; bytes of the workspace that they take first; a rank's columns. Of ids: how
 * many a token has; what is wrong with path, or NULL; and the arguments of a call that passes. */
typedef struct {
    lk_tensor list[7], states[2]; /* states: a rank's */
    size_t bytes;
    const lk_lce_rank *rank;
    int64_t ids_per_row, most_ids; /* 0: each token has a target */
    const char *path_rule;
    lk_lce_args *instead;
} lk_lce_added;

/* The fields that another loss of this head does not take. weighted: it takes class_weight and label_smoothing; counted:
 * it takes max_counted. */
LK_HOST void lk_lce_refuse(lk_checks *checks, const lk_lce_args *a, bool weighted, bool counted, const char *why)
{
    lk_check_absent(checks, "target", a->target, why);
    lk_check_absent(checks, "class_weight", !weighted && a->class_weight, why);
    lk_check_absent(checks, "label_smoothing", !weighted && a->label_smoothing != 0.0f, why);
    lk_check_absent(checks, "saved", a->saved, why);
    lk_check_absent(checks, "max_counted", !counted && a->max_counted != 0, why);
    lk_check_absent(checks, "batch_invariant", a->batch_invariant, why);
    lk_check_absent(checks, "statistics", a->statistics, why);
}

/* Gives arguments the strides of those that have been checked: of x and dx only where these are the same tensors. */
LK_HOST void lk_lce_put_strides(lk_lce_args *a, const lk_lce_args &checked)
{
    a->weight_stride = checked.weight_stride, a->dweight_stride = checked.dweight_stride;
    if (a->x == checked.x) a->x_stride = checked.x_stride;
    if (a->dx == checked.dx || !checked.dx) a->dx_stride = checked.dx_stride;
}

/* The second half of lk_lce_check, from arguments whose strides are filled in. A step of a rank begins here, with
 * lk_lce_copy_args: its call is checked. planner: NULL where no plan is asked for. */
template <class T> LK_HOST lk_status lk_lce_begin(const char *op, bool query, lk_lce_call *call, lk_head_planner *planner)
{
    lk_lce_args *const a = &call->a;
    if (lk_lce_leaves_states(call)) {
        a->loss = a->z_loss_out = a->lse = a->lse_low = a->weight_sum = NULL, a->valid_rows = NULL, a->bad_targets = NULL;
    }
    const lk_status status = lk_lce_resolve_path<T>(op, query, call);
    if (status || !planner) return status;
    const lk_head_shape shape = lk_lce_shape_of(call);
    lk_head_plan_begin(planner, &shape);
    return LK_OK;
}

/* Validates a call, fills it in and begins its plan. A query looks at shapes and options; its pointers say what is wanted.
 * planner: NULL where the steps of the call have plans of their own. */
template <class T>
LK_HOST lk_status lk_lce_check(const char *op, const lk_lce_args *args, lk_direction direction, bool query, lk_lce_call *call,
                               lk_head_planner *planner, const lk_lce_added *more = NULL)
{
    const bool backward = direction == LK_BACKWARD;
    const bool ids = more && more->most_ids;
    const lk_lce_rank *const rank = more ? more->rank : NULL;
    const lk_tensor *const added = more ? more->list : NULL, *const states = more ? more->states : NULL;
    lk_lce_args *const a = &call->a;
    lk_lce_copy_args<T>(args, direction, rank, call);
    lk_checks checks = {op, LK_OK};
    lk_cross_entropy_check_statistics(&checks, args, direction == LK_FORWARD);
    if (checks.status) return checks.status; /* before all rules */
    const struct {
        const char *name;
        int64_t size, least, most;
    } sizes[] = {{"ids_per_row", ids ? more->ids_per_row : 1, 1, ids ? more->most_ids : 1},
                 {"tokens", a->tokens, 0, INT32_MAX}, {"hidden", a->hidden, 1, 1 << 30}, {"vocab", a->vocab, !call->split, 1 << 30},
                 {"max_counted", a->max_counted, 0, INT64_MAX}, {"chunk_tokens", a->chunk_tokens, 0, INT64_MAX},
                 {"panel_vocab", a->panel_vocab, 0, INT64_MAX}, {"slice_tokens", a->slice_tokens, 0, INT64_MAX}};
    for (const auto &s : sizes) lk_check_size(&checks, s.name, s.size, s.least, s.most);
    const int64_t saved_bytes = !call->saves ? 0 : checks.status ? 1 : (int64_t)lk_lce_saved_size(call);
    const bool some = a->tokens != 0, written = some || !a->accumulate; /* without tokens nothing is read */
    int64_t x_stride = a->x_stride, dx_stride = a->dx_stride; /* those of `instead` may be of copies */
    const int64_t vocab = some ? a->vocab : 0, losses = a->reduction == LK_REDUCTION_NONE ? a->tokens : 1;
    lk_tensor list[] = {
        {"x", a->x, sizeof(T), LK_REQUIRED, a->hidden, {{a->tokens, &x_stride, "x_stride"}}},
        {"weight", a->weight, sizeof(T), LK_REQUIRED, a->hidden, {{vocab, &a->weight_stride, "weight_stride"}}},
        {"bias", a->bias, lk_dtype_bytes<T>(a->bias_dtype), LK_IN, vocab},
        {"target", a->target, a->target_dtype == LK_TARGET_INT32 ? 4 : 8, ids ? LK_UNUSED : LK_REQUIRED, a->tokens},
        {"class_weight", a->class_weight, 4, LK_IN, some ? call->classes : 0},
        {"row_weight", a->row_weight, 4, LK_IN, a->tokens},
        {"upstream", a->upstream, 4, LK_IN, a->upstream_per_token ? a->tokens : some},
        {"dlse", a->dlse, 4, LK_IN, a->tokens},
        {"dentropy", a->dentropy, 4, LK_IN, a->tokens},
        {"denominator", a->denominator, 4, LK_IN, backward ? some : 1},
        {"loss", a->loss, 4, LK_OUT, losses},
        {"z_loss_out", a->z_loss_out, 4, LK_OUT, losses},
        {"lse", args->lse, 4, backward ? LK_REQUIRED : LK_OUT, a->tokens},
        {"lse_low", args->lse_low, 4, backward ? LK_IN : LK_OUT, a->tokens},
        {"entropy", backward ? call->saved_entropy : a->entropy, 4,
         backward ? (a->dentropy ? LK_REQUIRED : LK_IN) : a->statistics ? LK_OUT | LK_REQUIRED : LK_OUT,
         a->statistics ? lk_count(4, a->tokens) : a->tokens},
        {"argmax", a->argmax, 8, LK_OUT, a->tokens},
        {"valid_rows", a->valid_rows, 8, LK_OUT, 1},
        {"weight_sum", a->weight_sum, 4, LK_OUT, 1},
        {"saved", a->saved, 1, backward ? LK_IN : LK_OUT, saved_bytes},
        {"bad_targets", a->bad_targets, 4, LK_OUT, some},
        {"dx", a->dx, sizeof(T), LK_OUT, a->hidden, {{a->tokens, &dx_stride, "dx_stride"}}},
        {"dweight", a->dweight, lk_dtype_bytes<T>(a->dweight_dtype), LK_OUT, a->hidden,
         {{written ? a->vocab : 0, &a->dweight_stride, "dweight_stride"}}},
        {"dbias", a->dbias, lk_dtype_bytes<T>(a->dbias_dtype), LK_OUT, written ? a->vocab : 0},
        lk_ce_added(added, 0), lk_ce_added(added, 1), lk_ce_added(added, 2), lk_ce_added(added, 3), lk_ce_added(added, 4),
        lk_ce_added(added, 5), lk_ce_added(added, 6), lk_ce_added(states, 0), lk_ce_added(states, 1),
        lk_workspace(a->workspace, some && (a->vocab || ids || !planner) ? a->workspace_bytes : 0), /* a call that gathers has no planner */
    };
    const int count = lk_used_tensors(list, LK_COUNT(list));
    if (!query && some && !a->context) lk_reject(&checks, LK_ERR_NULL, "context is NULL");
    lk_check_shapes(&checks, list, count, query);
    a->x_stride = x_stride, a->dx_stride = dx_stride;
    lk_cross_entropy_check_values(&checks, a);
    lk_check_enum(&checks, "path", a->path, LK_LINEAR_CROSS_ENTROPY_FUSED, "LK_LINEAR_CROSS_ENTROPY_*");
    lk_check_dtype<T>(&checks, "bias_dtype", a->bias_dtype);
    lk_check_dtype<T>(&checks, "dweight_dtype", a->dweight_dtype);
    lk_check_dtype<T>(&checks, "dbias_dtype", a->dbias_dtype);
    if (!checks.status && !query && some) checks.status = lk_cublas_check(op, (const lk_cublas_context *)a->context);
    if (ids && more->path_rule) lk_reject(&checks, LK_ERR_PATH, "path is %d; %s", args->path, more->path_rule);
    if (!checks.status && ids) {
        lk_lce_put_strides(more->instead, *a);
        lk_lce_copy_args<T>(more->instead, direction, rank, call);
        call->no_panels = true;
    }
    if (!checks.status) checks.status = lk_lce_begin<T>(op, query, call, planner);
    if (query) return checks.status;
    lk_check_alignment(&checks, list, count);
    if (!checks.status && planner) /* else lk_lce_run_ranks checks it */
        lk_check_workspace(&checks, args->workspace, args->workspace_bytes, planner->least + (more ? more->bytes : 0));
    lk_check_warn(&checks, !some, "tokens is 0; nothing is computed");
    lk_check_allocations(&checks, list, count);
    return checks.status;
}

/* ---- Launchers ----------------------------------------------------------------------------------------------------------- */

/* Launches a call that is checked: of a rank forward as far as the states, or backward. */
template <class T>
LK_HOST lk_status lk_lce_launch(const char *op, const lk_lce_call &checked, lk_head_planner *planner, lk_direction direction,
                                cudaStream_t stream, const lk_lce_rows &rows)
{
    lk_lce_job job = {};
    const lk_status status = lk_asked_device(op, lk_current_device(&job.device));
    if (status) return status;
    lk_lce_call &call = job.p.call;
    call = checked;
    const lk_lce_args &a = call.a;
    job.op = op, job.stream = stream, job.shape = planner->shape, job.rows = &rows;
    if (call.split) job.parallel = &call.rank.parallel;
    job.has_logits = call.stores && !call.gives_loss;
    if (a.vocab == 0) return lk_head_no_columns<T>(&job, direction);
    lk_head_choose(planner, a.workspace_bytes, &job.plan);
    if (job.plan.path == LK_LINEAR_CROSS_ENTROPY_FUSED) call.logits_type = LK_DTYPE_F32; /* fast_logits are for stored ones */
    if (call.rows > 0) job.p.ws = lk_head_lay_out(&job.shape, &job.plan, a.workspace);
    job.p.block_tokens = lk_head_round_up(lk_ceil_div(a.tokens > 0 ? a.tokens : 1, 2 * job.device.sms),
                                          lk_lce_prepare_threads(a.tokens));
    job.p.power = 12 - (int)ceilf(log2f(a.logit_scale));
    job.p.power = job.p.power < -20 ? -20 : job.p.power > 40 ? 40 : job.p.power;
    return lk_head_run<T>(&job);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_cross_entropy_run(const char *op, const lk_lce_args *args, cudaStream_t stream)
{
    lk_lce_call call;
    lk_head_planner planner;
    const lk_status status = lk_lce_check<T>(op, args, direction, false, &call, &planner);
    return status ? status : lk_lce_launch<T>(op, call, &planner, direction, stream, lk_lce_labels<T>(args));
}

/* ---- Plans and workspaces ------------------------------------------------------------------------------------------------ */

/* What the caller gets of a plan. */
LK_HOST lk_linear_cross_entropy_plan lk_lce_answer(const lk_head_planner *planner, const lk_head_plan *plan)
{
    lk_linear_cross_entropy_plan to = {};
    to.workspace_bytes = plan->workspace_bytes, to.cublas_bytes = plan->cublas_bytes;
    to.minimum_bytes = planner->least;
    to.chunk_tokens = plan->chunk_tokens, to.chunks = plan->chunks, to.panel_vocab = plan->panel_vocab, to.panels = plan->panels;
    to.slice_tokens = plan->slice_tokens, to.kept_vocab = plan->kept_vocab, to.lent_vocab = plan->lent_vocab;
    to.path = plan->path, to.matmuls = plan->matmuls, to.exact = plan->exact;
    lk_head_describe(&planner->shape, plan, to.text, sizeof to.text);
    return to;
}

/* The plan of a checked call. before: bytes of the workspace that come before its arrays. */
LK_HOST lk_status lk_lce_query_planner(const char *op, lk_head_planner *planner, size_t before, size_t budget, bool least,
                                       lk_linear_cross_entropy_plan *answer)
{
    lk_head_plan plan;
    const lk_status status = lk_head_query(op, planner, before, budget, least, &plan);
    if (status) return status;
    *answer = lk_lce_answer(planner, &plan);
    answer->workspace_bytes += before, answer->minimum_bytes += before;
    return LK_OK;
}

/* The plan within the budget; least: within that, or the smallest where that is more. */
template <class T>
LK_HOST lk_status lk_linear_cross_entropy_query_plan(const char *op, const lk_lce_args *args, lk_direction direction,
                                                     size_t budget, bool least, lk_linear_cross_entropy_plan *answer)
{
    lk_lce_call call;
    lk_head_planner planner;
    const lk_status status = lk_lce_check<T>(op, args, direction, true, &call, &planner);
    return status ? status : lk_lce_query_planner(op, &planner, 0, budget, least, answer);
}
/* The bytes of `saved`. more: as in lk_lce_check. */
template <class T>
LK_HOST lk_status lk_lce_saved_bytes(const char *op, const lk_lce_args *args, size_t *bytes, const lk_lce_added *more = NULL)
{
    lk_lce_args with = *args;
    lk_lce_call call;
    with.saved = &with;
    const lk_status status = lk_lce_check<T>(op, &with, LK_FORWARD, true, &call, NULL, more);
    if (!status) *bytes = call.saves ? lk_lce_saved_size(&call) : 0;
    return status;
}
template <class T> LK_HOST lk_status lk_linear_cross_entropy_query_saved(const char *op, const lk_lce_args *args, size_t *bytes)
{
    return lk_lce_saved_bytes<T>(op, args, bytes);
}

#define LK_EMIT_SAVED(op, T)                                                                                                   \
    LK_API LK_BODY lk_status lk_##op##_saved_bytes_##T(const lk_##op##_args *args, size_t *bytes)                              \
    {                                                                                                                          \
        if (!args || !bytes)                                                                                                   \
            return lk_fail(LK_ERR_NULL, "lk_" #op "_saved_bytes_" #T, "%s is NULL", args ? "bytes" : "args");                  \
        return lk_##op##_query_saved<lk_##T>("lk_" #op "_saved_bytes_" #T, args, bytes);                                       \
    }

#endif /* CUDA or the simulator */
#endif
