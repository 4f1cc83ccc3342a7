// SPDX-License-Identifier: MIT
/* linear_cross_entropy.cuh - cross entropy of x W^T without keeping the logits: loss and all gradients of a language model's
 * head, exact, within any workspace.
 *
 *   logits[t,j]  = sum_d x[t,d] weight[j,d] + bias[j]
 *   loss, lse    cross_entropy.cuh's of these logits: its comment has the formulas of logit_scale, softcap, label_smoothing,
 *                class_weight, z_loss, of ignored and bad targets, and of none, mean and sum
 *   dlogits[t,j] its gradient, with upstream and dlse; dZ below
 *   dx[t,d]      = sum_j dlogits[t,j] weight[j,d]
 *   dweight[j,d] = sum_t dlogits[t,j] x[t,d], added to what is there with accumulate
 *   dbias[j]     = sum_t dlogits[t,j], likewise
 *
 * Use        In one .cu file, linked with -lcublasLt:   Anywhere, C included:
 *                #include "lk/linear_cross_entropy.cuh"     #include "lk/linear_cross_entropy.cuh"
 *                LK_DEFINE_LINEAR_CROSS_ENTROPY(bf16)       LK_DECLARE_LINEAR_CROSS_ENTROPY(bf16)
 *            T is f32, f16 or bf16. Once a device, and once a host thread that calls:
 *                static lk_linear_cross_entropy_context context;
 *                lk_status status = lk_linear_cross_entropy_init(&context);
 *            Then, asynchronously on the caller's stream, in a graph too:
 *                lk_linear_cross_entropy_forward_backward_args args = {.context = &context, .x = x, .weight = weight,
 *                    .target = target, .loss = loss, .dx = dx, .dweight = dweight, .tokens = tokens, .hidden = hidden,
 *                    .vocab = vocab, .reduction = LK_REDUCTION_MEAN};
 *                status = lk_linear_cross_entropy_forward_backward_workspace_bytes_bf16(&args, &args.workspace_bytes);
 *                args.workspace = ...;
 *                status = lk_linear_cross_entropy_forward_backward_bf16(&args, stream);
 *            The query answers the best plan's workspace within 1 GiB. Where that is too much, or too little, ask for a plan:
 *                lk_linear_cross_entropy_plan plan;
 *                status = lk_linear_cross_entropy_forward_backward_plan_bf16(&args, budget, &plan);   puts(plan.text);
 *                args.workspace = ..., args.workspace_bytes = plan.workspace_bytes;
 *            forward gives loss and lse without any work for gradients; backward makes the gradients from a saved lse, by
 *            computing the logits again. What dx, dweight and dbias are NULL for is not done.
 *            In autograd the upstream gradient is known after forward_backward: leave upstream NULL, keep dx, dweight and
 *            dbias, and multiply each of them in place, by lk_scale_bf16(dx, tokens * hidden, upstream, stream) of
 *            lk_scale.cuh, which returns at once where upstream is 1.
 *            Upstream NULL means 1, not 0. A stride of 0 means packed: an expanded tensor of PyTorch, whose stride is 0, has to
 *            be copied first.
 * Needs      cross_entropy.cuh, lk_base.cuh, lk_row.cuh, lk_gemm.cuh, lk_ptx.cuh; cuBLASLt.
 * Options    Zero is off, so zeroed arguments with the required fields set compute the plain loss of each token.
 *            Ignored token: loss, z-loss and lse are 0; it adds nothing to dweight and dbias, and its dx is 0. Its x must be
 *            finite (0 times NaN) unless max_counted is below tokens, where x is gathered and only tokens that count are
 *            read, or the plan is FUSED.
 *            Bad target: loss and the token's dx are NaN, and so is a reduced loss; it adds nothing to dweight and dbias; lse
 *            and z-loss are those of its logits. It counts in valid_rows, which is a mean's divisor without class_weight; to
 *            weight_sum, which is the divisor with it, it adds 0.
 *            bias: -inf masks a column: p is 0 there. Without label_smoothing its dweight, dbias and part of dx come from the
 *            tokens alone whose target it is: their loss is +inf, their gradient finite. With label_smoothing every loss is
 *            +inf, and the column has the gradient that smoothing gives where p is 0. With softcap nothing is masked: the
 *            logit is -softcap, which counts, and its slope, so its gradient too, is 0.
 *            max_counted: matmuls over that many tokens only. When more count, loss, z-loss, lse and all gradients are NaN.
 *            Mean over nothing: as in cross_entropy.cuh; the gradients are 0.
 *            Tokens whose logits are all -inf, or hold +inf or NaN: loss and dx are NaN, and so are dweight and dbias.
 * Plans      The workspace holds the logits of a chunk of tokens, or of a panel of the vocabulary for a chunk, in f32, and dZ
 *            in their place, in T. More bytes, fewer chunks. 16-bit dZ of a chunk takes half of that where its logits are made
 *            slice by slice, in a place of their own: in dweight, when that is packed, starts at a multiple of 256 bytes, is
 *            not added to and is written last, or else in the workspace. Whatever fits is found by a model of an H200's times;
 *            path, chunk_tokens, slice_tokens and panel_vocab overrule it. Each plan is exact: dweight is a sum of floats over
 *            all tokens, rounded once; it lives in the caller's f32 dweight, in dweight itself where one chunk has all tokens,
 *            in f32 of the workspace, or, FUSED, in dweight and a byte an element of the workspace: 24 bits. At 12288 tokens of
 *            hidden 4096, vocab 131072 in bf16 (6144 MiB of f32 logits), where logits are kept:
 *                MiB     f32 dweight                             MiB     bf16 dweight
 *                6177    all tokens at once, 3 matmuls           6177    all tokens at once, 3 matmuls
 *                3105    likewise, in 3 slices in dweight        3105    likewise, in 6 slices in dweight
 *                1130    6 chunks, 3 matmuls                     1130    7 panels, all tokens, 4 matmuls
 *                 512    14 chunks, 3 matmuls                     256    205 panels of 640, all tokens, 4 matmuls
 *                 256    3 chunks x 14 panels, 4 matmuls          128    3 chunks x 128 panels, 5 matmuls
 *                   2    the smallest, 4 matmuls                    6    the smallest, 5 matmuls
 *            The fourth matmul computes a panel's logits again when lse is known; the fifth does that once more, so that a
 *            panel of dweight can be summed over all chunks while none of dx is held. forward takes 1 matmul in any plan.
 *            LK_LINEAR_CROSS_ENTROPY_FUSED has kernels of its own (bf16 on sm_90a, by TMA and wgmma, see lk_gemm.cuh). forward
 *            keeps no logits: the columns of a tile are added to the states of its rows while they are in registers, which
 *            takes 16 bytes a token and run of columns (here 12 MiB). forward_backward keeps e^(z - reference) in bf16 where
 *            other plans have f32 logits, and there is no pass over it: it is dZ but for a factor of the row, which dx's tiles
 *            and a copy of x take. dx's tiles are lk's own, and so are dweight's where a bf16 one is summed over chunks; any
 *            other dweight is a product of cuBLASLt's. Here 160 MiB hold a 24th of the tokens, 512 MiB a seventh, 1130 MiB a
 *            third (f32 dweight; with bf16 dweight in chunks 660, 1044 and 1568 MiB hold a 24th, a sixth and a third), and 3178
 *            MiB all (either).
 *            Path 0 takes FUSED for the calls that it is for (see Errors), where no length of kept logits is given: in forward
 *            wherever it fits; in forward_backward where the model expects it to take less time, here from about 17000
 *            columns on, and with fewer where vocab is not a multiple of 8. Queries look at the current device, as the calls
 *            do: on another one, in code that was not compiled for sm_90a, as for sm_90, and where there is none, they give
 *            the plan that keeps logits; for the latter two reasons the plan's text says so.
 *            On an H200, in ms, without tuning, for 12288 tokens of hidden 4096 (bench/results/h200.md has more and the notes):
 *                              8192 f32   32768 f32   50257 f32   131072 f32   131072 bf16
 *                FUSED             3.99        15.7        24.1         61.6          60.1
 *                kept logits       3.99        16.9        25.9         65.1          62.1
 *            131072 columns with bf16 dweight in 1130 MiB take 64.9 ms FUSED.
 *            Power is forward's limit: the tensor cores are busy for 94 % of forward's time, at 690 W and 1.5 GHz of 1.98, and
 *            without anything but the matmul it takes 4 to 6 % less. Warpgroups that start 1 to 3 stages apart gave nothing.
 *            Of the workspace cuBLASLt gets what the plan leaves, 32 MiB at most, never less than that (FUSED: 8, or none where
 *            it has no product) or a tenth.
 *            In f16, where the last columns are apart and there are no panels, dx of a chunk is summed in f32 of the workspace.
 *            Where vocab is not a multiple of 8 cuBLASLt has products of their own for the last vocab % 8 columns (not in true
 *            float): with 50257 columns it takes 7, 5 and 1.3 times as long for logits, dx and dweight as with 50256.
 *            hidden has no such help: expect matmuls that slow where it is not a multiple of 8.
 * Numerics   Matmuls of bf16 and f16 sum in float, those of f32 are true float unless tf32 is set. Logits are f32, so the loss
 *            has cross_entropy.cuh's accuracy besides the rounding of a sum of hidden products; dZ has one rounding to T, dx,
 *            dweight and dbias another. Only where bf16's last columns are apart and there are no panels is their part of dx, a
 *            sum of at most 7 products, rounded to bf16 before the rest is added to it. fast_logits keeps the logits in T,
 *            where they are kept: half the bytes, and errors of half an ulp of T in each. The mean's division and a single
 *            upstream are not in 16-bit dZ, which would round them alike for all tokens, but in the matmuls' alpha, unless
 *            there is dlse. f16: dZ is stored times a power of 2 that brings the largest of what else scales it to about 2^12,
 *            and alpha takes that back, so that a loss scale of 65536 and a mean over 10^6 tokens are both safe; where a class
 *            weight and 2 z_loss |lse| are above 15 together, dZ may overflow. In panels and FUSED the sum of p over all
 *            columns but the target is formed apart, as in cross_entropy.cuh. FUSED rounds the exponentials to bf16, and x
 *            times the factor: up to 2.4e-3 in dx and 2.8e-3 in dweight, where chunks have up to 2.5e-3 in each (relative
 *            Frobenius norms, 64 tokens of 500 columns, sigma 0.02 to 64, simulated). A row some of whose tiles are 2^40 above
 *            the reference, which is a guess from the first 256 columns, or 2^90 below it is rescaled, with one rounding more.
 *            Its sums of 24 bits are rounded once a chunk, to 2^-16 of what they are, seldom 2^-15.
 * Traffic    Each matmul 2 tokens hidden vocab operations. Between them forward_backward reads the logits once and writes dZ
 *            once: with f32 logits 6 bytes an element beside the 4 that the matmul writes and the 4 that the gradients' read.
 *            dbias reads dZ once more.
 * Repeatable The same bits every time for the same context, shapes, strides, alignment of pointers (modulo 256) and workspace
 *            size: a matmul has the algorithm that cuBLASLt's heuristic names first, with partial sums in float alone, or the
 *            one that tune kept; all else has a fixed order, and there are no float atomics.
 * Source     Chunks of tokens: Liger-Kernel, 2024; panels: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language
 *            Models", 2024.
 */
#ifndef LK_LINEAR_CROSS_ENTROPY_CUH
#define LK_LINEAR_CROSS_ENTROPY_CUH

#include "cross_entropy.cuh"
#include "lk_gemm.cuh"

/* What holds the logits in turn. Every path takes every option, but for what Errors says of FUSED. */
enum {
    LK_LINEAR_CROSS_ENTROPY_AUTO = 0,
    LK_LINEAR_CROSS_ENTROPY_CHUNKS = 1,     /* chunks of tokens (one: all of them), the whole vocabulary */
    LK_LINEAR_CROSS_ENTROPY_PANELS = 2,     /* panels of the vocabulary too; a second pass over them makes the gradients */
    LK_LINEAR_CROSS_ENTROPY_PANELS_TWICE = 3, /* likewise, but a second pass for dx and a third for dweight */
    LK_LINEAR_CROSS_ENTROPY_FUSED = 4 /* nothing does, or their exponentials in bf16: kernels for sm_90a, see Plans */
};

/* The cuBLASLt handle and the algorithms that were chosen; no device memory. The caller owns it, and one host thread at a time
 * uses it, on the device that was current at init. It may not be moved or copied between init and destroy. */
typedef struct {
    uint64_t opaque[2048];
} lk_linear_cross_entropy_context;

#if !defined(__cplusplus) || !(defined(__CUDACC__) || defined(LK_SIMT)) /* else defined below */
/* Init times nothing: each matmul takes the first algorithm that cuBLASLt's heuristic names, unless tuned. */
LK_API lk_status lk_linear_cross_entropy_init(lk_linear_cross_entropy_context *context);
LK_API lk_status lk_linear_cross_entropy_destroy(lk_linear_cross_entropy_context *context);
#endif

/* What a workspace of some size buys. */
typedef struct {
    size_t workspace_bytes; /* what the plan uses, cublas_bytes among it; no more than the budget */
    size_t minimum_bytes;   /* the smallest workspace that is accepted: more chunks and panels, so slower */
    size_t cublas_bytes;    /* what cuBLASLt gets: 32 MiB, less where the budget is small, 0 where it has no product */
    int64_t chunk_tokens, chunks;
    int64_t panel_vocab, panels;
    int64_t slice_tokens;   /* tokens of a chunk whose logits are there at a time; 0: all, and dZ takes their place */
    int path;               /* LK_LINEAR_CROSS_ENTROPY_* */
    int matmuls;            /* how many products of 2 tokens hidden vocab operations each */
    int exact;              /* not 0: no 16-bit logits, and the sums of dweight over tokens are float, or 24 bits, see Plans */
    char text[300];         /* all that in words, and what keeps FUSED away where that is the device or its code */
} lk_linear_cross_entropy_plan;

typedef struct {
    lk_linear_cross_entropy_context *context; /* in/out */
    const void *x;             /* in   T [tokens, hidden] */
    const void *weight;        /* in   T [vocab, hidden] */
    const void *bias;          /* in   bias_dtype [vocab]; may be -inf, which masks the column; NULL: none */
    const void *target;        /* in   target_dtype [tokens] */
    const float *class_weight; /* in   f32 [vocab]; NULL means 1 */
    float *loss;               /* out  f32 [tokens], or [1] when reduced; NULL to skip */
    float *z_loss_out;         /* out  f32, the part of loss that z_loss adds: [tokens], or [1] when reduced; NULL to skip */
    float *lse;                /* out  f32 [tokens]; NULL to skip */
    int64_t *valid_rows;       /* out  int64 [1], the number of tokens counted; NULL to skip */
    float *weight_sum;         /* out  f32 [1], the sum of class_weight[target], or 1, over those not bad; NULL to skip */
    int32_t *bad_targets;      /* out  int32 [1], the number of bad targets is added to it; NULL to skip. Some output */
    void *workspace;           /* scratch, aligned to LK_WORKSPACE_ALIGNMENT bytes; NULL when 0 */
    size_t workspace_bytes;    /* what a query answers; at least lk_linear_cross_entropy_plan's minimum_bytes. More is faster */
    int64_t tokens;            /* 0 to 2^31 - 1 */
    int64_t hidden;            /* 1 to 2^30 */
    int64_t vocab;             /* 1 to 2^30 */
    int64_t x_stride;          /* elements between rows; 0 means packed, hidden: no expanded tensor */
    int64_t weight_stride;     /* likewise */
    int64_t ignore_index;      /* any value; -100 is PyTorch's */
    int64_t max_counted;       /* 0, or a bound of the tokens that count: the others take no part in the matmuls */
    int64_t chunk_tokens;      /* tokens of a chunk, panel_vocab: columns of a panel; 0 chooses */
    int64_t panel_vocab;       /* rounded up to a multiple of 16 */
    float logit_scale;         /* 0 to 2^127; 0 means 1 */
    float softcap;             /* 2^-100 to 2^100, and so logit_scale / softcap; 0: off */
    float label_smoothing;     /* 0 to 1; 0: off */
    float z_loss;              /* the factor k; finite, at least 0; 0: off */
    int use_ignore_index;      /* not 0: tokens with target = ignore_index are ignored */
    int reduction;             /* LK_REDUCTION_* */
    int zero_when_empty;       /* not 0: a mean over nothing is 0 instead of NaN */
    int target_dtype;          /* LK_TARGET_* */
    int bias_dtype;            /* LK_DTYPE_*: T or f32 */
    int fast_logits;           /* not 0: logits are kept in T, not f32: the fast mode, half the bytes */
    int tf32;                  /* not 0: matmuls of T = f32 may round their factors to TF32 */
    int path;                  /* LK_LINEAR_CROSS_ENTROPY_*; 0 chooses */
} lk_linear_cross_entropy_forward_args;

/* Loss and gradients at once. The fields are those of forward and backward. */
typedef struct {
    lk_linear_cross_entropy_context *context; /* in/out */
    const void *x;             /* in   T [tokens, hidden] */
    const void *weight;        /* in   T [vocab, hidden] */
    const void *bias;          /* in   bias_dtype [vocab]; NULL: none */
    const void *target;        /* in   target_dtype [tokens] */
    const float *class_weight; /* in   f32 [vocab]; NULL means 1 */
    const float *upstream;     /* in   f32 [1], or [tokens] with upstream_per_token, the gradient of loss; NULL: 1 */
    const float *dlse;         /* in   f32 [tokens], a gradient of lse from elsewhere, added; NULL: none */
    float *loss;               /* out  f32 [tokens], or [1] when reduced; NULL to skip */
    float *z_loss_out;         /* out  f32, as loss; NULL to skip */
    float *lse;                /* out  f32 [tokens]; NULL to skip */
    int64_t *valid_rows;       /* out  int64 [1]; NULL to skip */
    float *weight_sum;         /* out  f32 [1]; NULL to skip */
    int32_t *bad_targets;      /* out  int32 [1], the number of bad targets is added to it; NULL to skip */
    void *dx;                  /* out  T [tokens, hidden]; NULL skips its matmul. Scratch before it is written */
    void *dweight;             /* out  dweight_dtype [vocab, hidden]; NULL skips its matmul. Scratch before it is written */
    void *dbias;               /* out  dbias_dtype [vocab]; NULL to skip */
    void *workspace;           /* scratch, aligned to LK_WORKSPACE_ALIGNMENT bytes; NULL when 0 */
    size_t workspace_bytes;    /* what a query answers; at least lk_linear_cross_entropy_plan's minimum_bytes. More is faster */
    int64_t tokens;            /* 0 to 2^31 - 1 */
    int64_t hidden;            /* 1 to 2^30 */
    int64_t vocab;             /* 1 to 2^30 */
    int64_t x_stride;          /* elements between rows; 0 means packed, hidden: no expanded tensor */
    int64_t weight_stride, dx_stride, dweight_stride; /* likewise */
    int64_t ignore_index;      /* any value */
    int64_t max_counted;       /* 0, or a bound of the tokens that count */
    int64_t chunk_tokens;      /* tokens of a chunk, panel_vocab: columns of a panel; 0 chooses */
    int64_t panel_vocab;       /* rounded up to a multiple of 16 */
    int64_t slice_tokens;      /* tokens of a chunk whose logits are there at a time; 0 chooses */
    float logit_scale;         /* 0 to 2^127; 0 means 1 */
    float softcap;             /* 2^-100 to 2^100, and so logit_scale / softcap; 0: off */
    float label_smoothing;     /* 0 to 1; 0: off */
    float z_loss;              /* finite, at least 0; 0: off */
    int use_ignore_index;      /* not 0: tokens with target = ignore_index are ignored */
    int reduction;             /* LK_REDUCTION_* */
    int zero_when_empty;       /* not 0: a mean over nothing is 0 instead of NaN */
    int upstream_per_token;    /* not 0: upstream is [tokens] */
    int accumulate;            /* not 0: dweight and dbias are added to what is there */
    int target_dtype;          /* LK_TARGET_* */
    int bias_dtype, dweight_dtype, dbias_dtype; /* LK_DTYPE_*: T or f32 */
    int fast_logits;           /* not 0: logits are kept in T, not f32 */
    int tf32;                  /* not 0: matmuls of T = f32 may round their factors to TF32 */
    int path;                  /* LK_LINEAR_CROSS_ENTROPY_*; 0 chooses */
} lk_linear_cross_entropy_forward_backward_args;

/* The gradients from a saved lse: the logits are computed again. */
typedef struct {
    lk_linear_cross_entropy_context *context; /* in/out */
    const void *x;             /* in   T [tokens, hidden] */
    const void *weight;        /* in   T [vocab, hidden] */
    const void *bias;          /* in   bias_dtype [vocab]; NULL: none */
    const void *target;        /* in   target_dtype [tokens] */
    const float *class_weight; /* in   f32 [vocab]; NULL means 1 */
    const float *lse;          /* in   f32 [tokens] from forward with the same options */
    const float *upstream;     /* in   f32 [1], or [tokens] with upstream_per_token, the gradient of loss; NULL: 1 */
    const float *dlse;         /* in   f32 [tokens], a gradient of lse from elsewhere, added; NULL: none */
    int32_t *bad_targets;      /* out  int32 [1], the number of bad targets is added to it; NULL to skip */
    void *dx;                  /* out  T [tokens, hidden]; NULL skips its matmul. Scratch before it is written */
    void *dweight;             /* out  dweight_dtype [vocab, hidden]; NULL skips its matmul. Scratch before it is written */
    void *dbias;               /* out  dbias_dtype [vocab]; NULL to skip. One of these three */
    void *workspace;           /* scratch, aligned to LK_WORKSPACE_ALIGNMENT bytes; NULL when 0 */
    size_t workspace_bytes;    /* what a query answers; at least lk_linear_cross_entropy_plan's minimum_bytes. More is faster */
    int64_t tokens;            /* 0 to 2^31 - 1 */
    int64_t hidden;            /* 1 to 2^30 */
    int64_t vocab;             /* 1 to 2^30 */
    int64_t x_stride;          /* elements between rows; 0 means packed, hidden: no expanded tensor */
    int64_t weight_stride, dx_stride, dweight_stride; /* likewise */
    int64_t ignore_index;      /* any value */
    int64_t max_counted;       /* 0, or a bound of the tokens that count */
    int64_t chunk_tokens;      /* tokens of a chunk, panel_vocab: columns of a panel; 0 chooses */
    int64_t panel_vocab;       /* rounded up to a multiple of 16 */
    int64_t slice_tokens;      /* tokens of a chunk whose logits are there at a time; 0 chooses */
    float logit_scale;         /* 0 to 2^127; 0 means 1 */
    float softcap;             /* 2^-100 to 2^100, and so logit_scale / softcap; 0: off */
    float label_smoothing;     /* 0 to 1; 0: off */
    float z_loss;              /* finite, at least 0; 0: off */
    int use_ignore_index;      /* not 0: tokens with target = ignore_index are ignored */
    int reduction;             /* LK_REDUCTION_* */
    int upstream_per_token;    /* not 0: upstream is [tokens] */
    int accumulate;            /* not 0: dweight and dbias are added to what is there */
    int target_dtype;          /* LK_TARGET_* */
    int bias_dtype, dweight_dtype, dbias_dtype; /* LK_DTYPE_*: T or f32 */
    int fast_logits;           /* not 0: logits are kept in T, not f32 */
    int tf32;                  /* not 0: matmuls of T = f32 may round their factors to TF32 */
    int path;                  /* LK_LINEAR_CROSS_ENTROPY_*; 0 chooses */
} lk_linear_cross_entropy_backward_args;

/* Errors, in the order of the checks, alike where a field is in several:
 *   LK_ERR_NULL       args, plan; context, x, weight, target, lse of backward; every output. With tokens = 0, and in
 *                     queries, each of them but args and plan may be NULL
 *   LK_ERR_SHAPE      tokens, hidden, vocab out of range; a stride that is not 0 and below hidden; x, weight, dx or dweight
 *                     that span more than 2^62 elements; max_counted, chunk_tokens, panel_vocab or
 *                     slice_tokens below 0
 *   LK_ERR_VALUE      logit_scale, softcap or z_loss negative or not finite; logit_scale above 2^127; a softcap, or
 *                     logit_scale / softcap, outside [2^-100, 2^100]; label_smoothing outside [0, 1]; reduction,
 *                     target_dtype, path: none of the enum; another dtype: neither T nor f32; a context that init has not made,
 *                     or of another device
 *   LK_ERR_PATH       FUSED for another T than bf16, on another device than sm_90a (or code for it left out), for backward, for
 *                     gradients with label_smoothing, for 2^30 tokens or more, or for x (unless max_counted is below tokens)
 *                     or weight that do not start at a multiple of 16 bytes or have a stride that is no multiple of 8, or
 *                     above 2^38
 *   LK_ERR_ALIGNMENT  a pointer is not aligned to its element; not in queries
 *   LK_ERR_WORKSPACE  workspace_bytes, or a plan's budget, below the smallest; workspace NULL or not aligned to
 *                     LK_WORKSPACE_ALIGNMENT bytes
 *   LK_ERR_CUBLAS     cuBLASLt knows no algorithm for one of the matmuls, which is found out before anything is launched, or
 *                     fails to launch one: outputs are then undefined
 * Pointers and strides of any alignment are taken as they are; matmuls are at their best where x, weight, dx and dweight start
 * at multiples of 16 bytes and hidden is a multiple of 8.
 *
 * The calls of a direction, all with its arguments:
 *   ..._workspace_bytes  what one wants by default: the workspace of the plan of the least expected time within 1 GiB, which is
 *                        that of all tokens at once where that fits; the smallest where that is more
 *   ..._plan             the best plan within `budget` bytes: a workspace of plan->workspace_bytes runs it. Its minimum_bytes
 *                        is the smallest workspace that the call accepts
 *                        Both queries need shapes, strides and options. A pointer other than NULL says that there is such a
 *                        tensor, or that it is wanted: dx, dweight, dbias, bias, dlse, class_weight, loss, z_loss_out. Where
 *                        it lies matters for x, weight and dweight, see FUSED and Plans; without x or weight they are taken to
 *                        be aligned, and what is answered is enough for any
 *   ..._tune             runs the call with each of cuBLASLt's first 8 algorithms for each of its matmuls, timed, and keeps
 *                        the fastest in the context for this shape, these alignments and this workspace size. It waits for the
 *                        GPU; outputs hold no results afterwards. A context holds 64 matmuls; later ones take the last place */
#define LK_LINEAR_CROSS_ENTROPY_DECLARE_DIRECTION(D, T)                                                                        \
    LK_API lk_status lk_linear_cross_entropy_##D##_##T(const lk_linear_cross_entropy_##D##_args *args, cudaStream_t stream);   \
    LK_API lk_status lk_linear_cross_entropy_##D##_workspace_bytes_##T(const lk_linear_cross_entropy_##D##_args *args,         \
                                                                       size_t *bytes);                                         \
    LK_API lk_status lk_linear_cross_entropy_##D##_plan_##T(const lk_linear_cross_entropy_##D##_args *args, size_t budget,     \
                                                            lk_linear_cross_entropy_plan *plan);                               \
    LK_API lk_status lk_linear_cross_entropy_##D##_tune_##T(const lk_linear_cross_entropy_##D##_args *args,                    \
                                                            cudaStream_t stream);

#define LK_DECLARE_LINEAR_CROSS_ENTROPY(T)                                                                                     \
    LK_LINEAR_CROSS_ENTROPY_DECLARE_DIRECTION(forward, T)                                                                      \
    LK_LINEAR_CROSS_ENTROPY_DECLARE_DIRECTION(forward_backward, T)                                                             \
    LK_LINEAR_CROSS_ENTROPY_DECLARE_DIRECTION(backward, T)

#if defined(__CUDACC__) || defined(LK_SIMT)

#include <cublasLt.h>

#if LK_ARCH == 900 && !LK_SM90A
#pragma message("linear_cross_entropy.cuh: code for sm_90 lacks LK_LINEAR_CROSS_ENTROPY_FUSED; compile for sm_90a to have it")
#endif

/* ---- What is known of a call ----------------------------------------------------------------------------------------- */

/* The arguments of every direction in one form: those of forward have no gradient, those of backward no loss. */
typedef lk_linear_cross_entropy_forward_backward_args lk_lce_args;

typedef struct {
    lk_lce_args a; /* with every default filled in */
    const float *saved_lse;                          /* backward's */
    bool gives_loss, gradient, compact;
    bool fused;                                      /* the plan may be, or must be, LK_LINEAR_CROSS_ENTROPY_FUSED */
    bool open;                                       /* a query without x or weight: where they lie may yet forbid fused */
    int type, logits_type;                           /* LK_DTYPE_* of T and of the logits */
    int64_t rows;                                    /* tokens, or max_counted where rows are compacted */
    const char *note;                                /* what of the device or its code keeps fused away, or "" */
} lk_lce_call;

/* At the head of the workspace. */
typedef struct {
    int64_t counted;
    float weight_sum;       /* the mean's divisor: valid_rows without class weights */
    float weights;          /* W */
    float alpha, zero, one; /* what matmuls with 16-bit dZ are scaled by, and what they add: see lk_lce_prepare_kernel */
    int32_t over, bad;      /* not 0: more than max_counted count; some target is bad */
} lk_lce_counts;

/* What is known of a row in a run of columns, without its target: fields of lk_ce_row. */
typedef struct {
    float max, sum, weights, weighted;
} lk_lce_sums;

/* Where the rest lies. A row is a token, or a counted token where rows are compacted. NULL: there is none. */
typedef struct {
    lk_lce_counts *counts;
    int32_t *target;       /* [rows], -1: ignored, or no token; 0 for a bad one, whose factor is 0 */
    int32_t *token;        /* [rows], of compacted rows; -1: none */
    float *factor;         /* [rows], the gradient of the row's loss over counts->alpha */
    float *dlse;           /* [rows] */
    float *loss, *z, *lse; /* [rows] */
    float *others;         /* [rows], sum_{j != y} p[j], of panels */
    lk_ce_row *states;     /* [chunk], of panels: of all columns but the target's */
    float *logit;          /* [rows], the target's: fused, like the next four */
    lk_lce_sums *parts;    /* [chunk, runs] */
    lk_lce_sums *sample;   /* [rows], or [chunk] where rows are compacted, of the first 256 columns */
    float *references;     /* [chunk, tiles of 256 columns], what the exponentials of a row in a tile are against */
    float *scale;          /* [chunk], what turns a row of them into dZ */
    void *bias;            /* [vocab], in the logits' type, as cuBLASLt wants it */
    float *class_weight;   /* [vocab], times valid_rows / weight_sum: with it class and z-loss terms have one divisor */
    float *dbias;          /* [splits, vocab], sums over tokens */
    void *x;               /* T [chunk, x_stride], compacted, and times the factor of the row: fused */
    float *dx;             /* [chunk, hidden], sums over panels, or of the last columns and the others */
    float *dweight;        /* [vocab or panel, hidden], sums over chunks */
    int8_t *low;           /* [tiles of dweight, LK_GEMM_ROWS LK_GEMM_COLS], what such a sum has beyond its bf16: fused */
    void *logits;          /* [chunk, logits_stride]; dZ in place, 16-bit dZ of f32 logits in the first half of each row */
    float *slice;          /* [slice, logits_stride], f32 logits of a part of the chunk's rows; logits is then T's and all dZ */
    void *cublas;
    int64_t logits_stride, x_stride, splits;
    size_t bytes;          /* of all but cublas */
} lk_lce_pieces;

/* What kernels are given. */
typedef struct {
    lk_lce_call c;
    lk_lce_pieces w;
    int64_t share; /* tokens of a block of the kernel before the matmuls */
    int power;     /* f16: dZ is stored as about 2^power times what it is for a factor of 1 */
} lk_lce_work;

LK_DEVICE float lk_lce_get(const void *from, int type, int64_t i)
{
    if (type == LK_DTYPE_F32) return ((const float *)from)[i];
    return type == LK_DTYPE_F16 ? lk_to_float(((const lk_f16 *)from)[i]) : lk_to_float(((const lk_bf16 *)from)[i]);
}
LK_DEVICE void lk_lce_set(void *to, int type, int64_t i, float x)
{
    if (type == LK_DTYPE_F32) ((float *)to)[i] = x;
    else if (type == LK_DTYPE_F16) lk_put((lk_f16 *)to + i, x);
    else lk_put((lk_bf16 *)to + i, x);
}

/* ---- Before the matmuls: counts, and what each row needs ------------------------------------------------------------- */

#define LK_LCE_THREADS 256
#define LK_LCE_BLOCKS 3 /* an SM, at least, of kernels that ptxas would else give fewer registers than they need */

typedef struct {
    int counted, bad, before; /* before: counted, and of a block to the left */
    float weight, upstream, dlse; /* the sum of class weights; the largest sizes */
} lk_lce_tally;

LK_DEVICE lk_lce_tally lk_lce_merge(lk_lce_tally s, lk_lce_tally t)
{
    return {s.counted + t.counted, s.bad + t.bad, s.before + t.before,
            s.weight + t.weight, fmaxf(s.upstream, t.upstream), fmaxf(s.dlse, t.dlse)};
}

/* The tally of all threads of a block; every thread calls and gets it. Its shared memory may be used again after a barrier. */
LK_DEVICE lk_lce_tally lk_lce_tally_block(lk_lce_tally s)
{
    LK_SHARED(lk_lce_tally, tallies, [LK_LCE_THREADS / 32]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const unsigned all = 0xffffffffu;
        s = lk_lce_merge(s, {__shfl_xor_sync(all, s.counted, offset), __shfl_xor_sync(all, s.bad, offset),
                             __shfl_xor_sync(all, s.before, offset), __shfl_xor_sync(all, s.weight, offset),
                             __shfl_xor_sync(all, s.upstream, offset), __shfl_xor_sync(all, s.dlse, offset)});
    }
    if (threadIdx.x % 32 == 0) tallies[threadIdx.x / 32] = s;
    __syncthreads(); /* orders the warps' tallies before their reads */
    s = tallies[0];
    for (int i = 1; i < LK_LCE_THREADS / 32; i++) s = lk_lce_merge(s, tallies[i]);
    return s;
}

/* The e of the first power of two 2^e above x, as far as f16's dZ needs it; 0 where there is none. */
LK_DEVICE int lk_lce_exponent(float x)
{
    const int e = x > 0.0f && lk_is_finite(x) ? (__float_as_int(x) >> 23) - 126 : 0;
    return e < -80 ? -80 : e > 80 ? 80 : e;
}

/* Every block counts all targets, which is sooner than a second launch, and writes what its share of the rows needs.
 *
 * 16-bit dZ would round what all rows have in common, the mean's division and a single upstream, into all of them alike: an
 * error that no sum over rows makes smaller. So that is left to alpha, with which the matmuls scale, unless alpha would then be
 * zero, subnormal, infinite or NaN (ignored rows would not give zeros), or there is dlse, which has nothing in common with it.
 * The rest is in factor, for true float everything. f16 has not the range for that either: there 2^(power - e) is in factor too
 * and alpha takes it back, where 2^e is the first power of two above the rest of all |factor|. */
LK_KERNEL void __launch_bounds__(LK_LCE_THREADS, LK_LCE_BLOCKS) lk_lce_prepare_kernel(lk_lce_work p)
{
    const lk_lce_args &a = p.c.a;
    const lk_lce_pieces &w = p.w;
    const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int64_t share = p.share, begin = blockIdx.x * share;
    LK_SHARED(int, warps, [LK_LCE_THREADS / 32]);
    lk_griddepcontrol_wait();
    const bool mean = a.reduction == LK_REDUCTION_MEAN, all_alike = !(a.upstream && a.upstream_per_token);
    const bool sizes = p.c.type == LK_DTYPE_F16 && p.c.gradient;
    lk_lce_tally s = {};
#pragma unroll 16
    for (int64_t token = thread; token < a.tokens; token += LK_LCE_THREADS) {
        const lk_ce_label label = lk_ce_look_up(a, token);
        s.counted += label.counted, s.bad += label.bad, s.before += label.counted && token < begin;
    }
    for (int64_t token = thread; (a.class_weight || sizes) && token < a.tokens; token += LK_LCE_THREADS) {
        const lk_ce_label label = lk_ce_look_up(a, token);
        if (label.y < 0) continue;
        if (a.class_weight) s.weight += a.class_weight[label.y];
        if (sizes && !all_alike) s.upstream = fmaxf(s.upstream, fabsf(a.upstream[token]));
        if (sizes && a.dlse) s.dlse = fmaxf(s.dlse, fabsf(a.dlse[token]));
    }
    s = lk_lce_tally_block(s);
    const float valid = (float)s.counted, over = a.class_weight ? s.weight : valid;
    const float one = a.upstream && all_alike ? *a.upstream : 1.0f, divisor = w.class_weight ? valid : over;
    const float most = all_alike ? 1.0f : s.upstream, common = mean && over != 0.0f ? __fdiv_rn(one, divisor) : one;
    int e = sizes ? lk_lce_exponent(most) : p.power;
    float alpha = common * __int_as_float((127 + e - p.power) << 23);
    const bool apart = p.c.type != LK_DTYPE_F32 && !a.dlse && lk_is_finite(alpha) && fabsf(alpha) >= 0x1p-126f;
    if (!apart) {
        if (sizes) e = lk_lce_exponent(fmaxf(most * fabsf(common), s.dlse));
        alpha = __int_as_float((127 + e - p.power) << 23);
    }
    const float shift = __int_as_float((127 + p.power - e) << 23);
    int seen = s.before; /* counted tokens to the left of this tile */
    for (int64_t tile = begin; tile < begin + share; tile += LK_LCE_THREADS) {
        const int64_t token = tile + thread;
        const bool mine = token < begin + share && token < a.tokens;
        lk_ce_label label = {-1, false, false};
        if (mine) label = lk_ce_look_up(a, token);
        int64_t row = token;
        if (p.c.compact) {
            const unsigned counted = __ballot_sync(0xffffffffu, label.counted);
            if (lane == 0) warps[warp] = __popc(counted);
            __syncthreads(); /* orders the counts before their reads */
            int left = seen + __popc(counted & ((1u << lane) - 1));
            for (int i = 0; i < LK_LCE_THREADS / 32; i++) left += i < warp ? warps[i] : 0, seen += warps[i];
            __syncthreads(); /* and those before the next tile's writes */
            row = label.counted ? left : p.c.rows;
        }
        if (!mine || row >= p.c.rows) continue;
        const bool good = label.y >= 0;
        w.target[row] = good ? label.y : label.bad ? 0 : -1;
        if (w.token) w.token[row] = (int)token;
        if (w.lse && p.c.saved_lse) w.lse[row] = label.counted ? p.c.saved_lse[token] : 0.0f;
        if (!w.factor) continue;
        float factor = good ? (!all_alike ? a.upstream[token] : apart ? 1.0f : one) : 0.0f;
        if (mean) factor = over == 0.0f || !good ? 0.0f : apart ? factor : __fdiv_rn(factor, divisor);
        w.factor[row] = factor * shift;
        if (w.dlse) w.dlse[row] = good ? a.dlse[token] * shift : 0.0f;
    }
    const int64_t step = (int64_t)gridDim.x * LK_LCE_THREADS, from = (int64_t)blockIdx.x * LK_LCE_THREADS + thread;
    for (int64_t row = s.counted + from; p.c.compact && row < p.c.rows; row += step) { /* rows that no token needs */
        w.target[row] = w.token[row] = -1;
        if (w.lse) w.lse[row] = 0.0f;
        if (w.factor) w.factor[row] = 0.0f;
        if (w.dlse) w.dlse[row] = 0.0f;
    }
    const float rate = over != 0.0f ? __fdiv_rn(valid, over) : 0.0f;
    for (int64_t col = from; w.bias && col < a.vocab; col += step)
        lk_lce_set(w.bias, p.c.logits_type, col, lk_lce_get(a.bias, a.bias_dtype, col));
    for (int64_t col = from; w.class_weight && col < a.vocab; col += step) w.class_weight[col] = a.class_weight[col] * rate;
    if (blockIdx.x != 0) return;
    lk_lce_tally all = {};
    for (int64_t col = thread; w.states && a.class_weight && a.label_smoothing > 0.0f && col < a.vocab; col += LK_LCE_THREADS)
        all.weight += a.class_weight[col] * (w.class_weight ? rate : 1.0f);
    __syncthreads(); /* lk_lce_tally_block's memory has been read */
    all = lk_lce_tally_block(all);
    if (thread != 0) return;
    const float weights = a.class_weight ? all.weight : (float)a.vocab;
    *w.counts = {s.counted, over, weights, alpha, 0.0f, 1.0f, s.counted > p.c.rows, s.bad};
    if (a.valid_rows) *a.valid_rows = s.counted;
    if (a.weight_sum) *a.weight_sum = a.class_weight ? s.weight : (float)(s.counted - s.bad);
    if (a.bad_targets && s.bad) atomicAdd(a.bad_targets, s.bad);
}

/* ---- Rows that move: compacted x, gradients that are rounded --------------------------------------------------------- */

typedef struct {
    const void *from;
    void *to;
    const int32_t *from_row, *to_row; /* which row each is; NULL: itself. No row, -1: zeros come from it, nothing goes there */
    int64_t rows, cols, from_stride, to_stride;
    int add;            /* not 0: to what is there */
    const float *scale; /* of each row, 0 whatever the row holds; NULL: 1 */
} lk_lce_move;

#define LK_LCE_TILE (8 * LK_LCE_THREADS)

template <class T> LK_DEVICE void lk_lce_load8(float (&x)[8], const T *aligned)
{
    if constexpr (sizeof(T) == 2) {
        lk_unpack(x, lk_load_vec(aligned));
    } else {
        float low[4], high[4];
        lk_unpack(low, lk_load_vec(aligned)), lk_unpack(high, lk_load_vec(aligned + 4));
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = low[i], x[4 + i] = high[i];
    }
}
template <class T> LK_DEVICE void lk_lce_store8(T *aligned, const float (&x)[8])
{
    lk_vec<T> v;
    if constexpr (sizeof(T) == 2) {
        lk_pack(&v, x);
        lk_store_vec(aligned, v);
    } else {
        const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
        lk_pack(&v, low), lk_store_vec(aligned, v);
        lk_pack(&v, high), lk_store_vec(aligned + 4, v);
    }
}

/* A block owns LK_LCE_TILE columns of a row, a thread 8 neighbours of them where both sides are aligned. */
template <class S, class D> LK_KERNEL void __launch_bounds__(LK_LCE_THREADS) lk_lce_move_kernel(lk_lce_move p)
{
    const int64_t tiles = (p.cols + LK_LCE_TILE - 1) / LK_LCE_TILE, row = blockIdx.x / tiles;
    const int64_t begin = blockIdx.x % tiles * LK_LCE_TILE, left = p.cols - begin;
    lk_griddepcontrol_wait();
    const float scale = p.scale ? p.scale[row] : 1.0f;
    const int64_t from_row = scale == 0.0f ? -1 : p.from_row ? p.from_row[row] : row, to_row = p.to_row ? p.to_row[row] : row;
    if (to_row < 0) return;
    const S *from = (const S *)p.from + (from_row < 0 ? 0 : from_row) * p.from_stride + begin;
    D *to = (D *)p.to + to_row * p.to_stride + begin;
    const int first = (int)threadIdx.x * 8;
    if (first + 8 <= left && ((uintptr_t)from | (uintptr_t)to) % 16 == 0) {
        float x[8] = {}, old[8] = {};
        if (from_row >= 0) lk_lce_load8(x, from + first);
        if (p.add) lk_lce_load8(old, to + first);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = fmaf(scale, x[i], old[i]);
        lk_lce_store8(to + first, x);
    } else if (((uintptr_t)from | (uintptr_t)to) % 16 != 0) {
        for (int64_t i = threadIdx.x; i < left && i < LK_LCE_TILE; i += LK_LCE_THREADS)
            lk_put(to + i, (from_row < 0 ? 0.0f : scale * lk_to_float(from[i])) + (p.add ? lk_to_float(to[i]) : 0.0f));
    } else {
        for (int i = first; i < left && i < first + 8; i++)
            lk_put(to + i, (from_row < 0 ? 0.0f : scale * lk_to_float(from[i])) + (p.add ? lk_to_float(to[i]) : 0.0f));
    }
}

/* ---- Panels: a slice of the vocabulary at a time --------------------------------------------------------------------- */

typedef struct {
    lk_lce_work p;
    int64_t first_row, rows;  /* of the chunk */
    int64_t first_col, cols;  /* of the panel */
    int first, last;          /* not 0: it is the first, the last panel of its chunk */
} lk_lce_panel;

#define LK_LCE_U 4 /* vectors a lane keeps in flight */

/* What a vector's columns are worth in sums: 1 without class weights. */
template <int n>
LK_DEVICE void lk_lce_values(float (&v)[n], float (&w)[n], const lk_lce_args &a,
                             const float *class_weight, int64_t col)
{
    float slope;
#pragma unroll
    for (int j = 0; j < n; j++) {
        w[j] = class_weight && a.label_smoothing > 0.0f ? class_weight[col + j] : 1.0f;
        if (a.softcap > 0.0f) v[j] = lk_ce_cap(v[j], a.logit_scale, a.softcap, &slope);
    }
}

/* The results of a row whose state lacks the target's column but has its logit; one thread of those that call writes them. */
LK_DEVICE lk_ce_result lk_lce_put_row(const lk_lce_work &p, int64_t row, int y, lk_ce_row s, float scale, bool writes)
{
    const lk_lce_args &a = p.c.a;
    const lk_lce_pieces &w = p.w;
    const float *class_weight = w.class_weight ? w.class_weight : a.class_weight;
    lk_ce_result r = {};
    float others = 0.0f;
    if (y >= 0) {
        const float weight[1] = {class_weight ? class_weight[y] : 1.0f}, value[1] = {s.target};
        const float smoothed[1] = {a.label_smoothing > 0.0f ? weight[0] : 1.0f};
        const lk_ce_row all = lk_ce_row_add(s, value, smoothed, scale);
        r = lk_ce_row_finish(all, {scale, a.label_smoothing, a.z_loss, weight[0], a.vocab});
        others = __fdiv_rn(lk_ce_row_raise(s, all.max, scale).sum, all.sum);
    }
    if (!writes) return r;
    if (w.loss) w.loss[row] = r.class_loss + r.z_loss;
    if (w.z) w.z[row] = r.z_loss;
    w.lse[row] = r.lse;
    if (w.others) w.others[row] = others;
    return r;
}

/* Pass 1: a warp owns a row and adds a panel of its logits to its state. The target's column stays out, so that the sum of the
 * others is known without a difference; its logit is kept beside. After the last panel it writes the row's results. */
template <class L> LK_KERNEL void __launch_bounds__(LK_LCE_THREADS, LK_LCE_BLOCKS) lk_lce_state_kernel(lk_lce_panel q)
{
    constexpr int N = LK_VEC<L>, U = LK_LCE_U;
    const lk_lce_args &a = q.p.c.a;
    const lk_lce_pieces &w = q.p.w;
    const int lane = (int)threadIdx.x % 32;
    const int64_t in_chunk = (int64_t)blockIdx.x * (LK_LCE_THREADS / 32) + threadIdx.x / 32, row = q.first_row + in_chunk;
    lk_griddepcontrol_wait();
    if (in_chunk >= q.rows) return;
    const L *logits = (const L *)w.logits + in_chunk * w.logits_stride;
    const float *class_weight = w.class_weight ? w.class_weight : a.class_weight;
    const int y = w.target[row];
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    const int hit = (int)(y - q.first_col), cols = y < 0 ? 0 : (int)q.cols; /* an ignored row is not read */
    lk_ce_row s = lk_ce_row_empty();
    for (int col = lane * N; col < cols; col += 32 * N * U) {
        lk_vec<L> raw[U];
#pragma unroll
        for (int u = 0; u < U; u++) /* a row ends with padding up to a multiple of 64 */
            if (col + u * 32 * N < cols) raw[u] = lk_load_vec(logits + col + u * 32 * N);
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = col + u * 32 * N;
            float v[N], weight[N];
            if (at >= cols) break;
            lk_unpack(v, raw[u]);
            if (at + N <= cols && (unsigned)(hit - at) >= (unsigned)N) {
                lk_lce_values(v, weight, a, class_weight, q.first_col + at);
                s = lk_ce_row_add(s, v, weight, scale);
                continue;
            }
#pragma unroll
            for (int j = 0; j < N; j++) {
                float one[1] = {v[j]}, one_weight[1];
                if (at + j >= cols || at + j == hit) continue;
                lk_lce_values(one, one_weight, a, class_weight, q.first_col + at + j);
                s = lk_ce_row_add(s, one, one_weight, scale);
            }
        }
    }
    s = lk_ce_row_warp<true>(s, scale);
    if (lane != 0) return;
    float target = -INFINITY, slope;
    if (hit >= 0 && hit < cols) {
        target = lk_to_float(logits[hit]);
        if (a.softcap > 0.0f) target = lk_ce_cap(target, a.logit_scale, a.softcap, &slope);
    }
    if (!q.first) {
        const lk_ce_row before = w.states[in_chunk];
        s = lk_ce_row_merge(before, s, scale);
        if (!(hit >= 0 && hit < cols)) target = before.target; /* a maximum of the two would lose a NaN */
    }
    s.target = target;
    w.states[in_chunk] = s;
    if (!q.last) return;
    lk_lce_put_row(q.p, row, y, s, scale, true);
}

/* Pass 2: a warp owns a row of a panel and puts dZ in the place of its logits. 16-bit dZ of f32 logits lies where this step or
 * earlier ones have read, so the warp meets between a step's reads and its writes. */
template <class L, class D> LK_KERNEL void __launch_bounds__(LK_LCE_THREADS) lk_lce_gradient_kernel(lk_lce_panel q)
{
    constexpr int N = LK_VEC<L>, U = LK_LCE_U;
    const lk_lce_args &a = q.p.c.a;
    const lk_lce_pieces &w = q.p.w;
    const int lane = (int)threadIdx.x % 32;
    const int64_t in_chunk = (int64_t)blockIdx.x * (LK_LCE_THREADS / 32) + threadIdx.x / 32, row = q.first_row + in_chunk;
    lk_griddepcontrol_wait();
    if (in_chunk >= q.rows) return;
    const L *logits = (const L *)w.logits + in_chunk * w.logits_stride;
    D *dz = (D *)((L *)w.logits + in_chunk * w.logits_stride);
    const float *class_weight = w.class_weight ? w.class_weight : a.class_weight;
    const int y = w.target[row], hit = (int)(y - q.first_col), cols = (int)q.cols;
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale, lse = w.lse[row], weights = w.counts->weights;
    float rest = 0.0f, own = 0.0f, fall = 0.0f, weight = 1.0f;
    if (y >= 0) { /* cross_entropy.cuh's F, G and f e / vocab, times logit_scale */
        const float f = w.factor[row] * a.logit_scale;
        weight = class_weight ? class_weight[y] : 1.0f;
        fall = f * __fdiv_rn(a.label_smoothing, (float)a.vocab);
        rest = fmaf(f * (1.0f - a.label_smoothing), weight, fall * weights);
        own = (a.z_loss > 0.0f ? 2.0f * a.z_loss * lse * f : 0.0f) + (w.dlse ? a.logit_scale * w.dlse[row] : 0.0f);
    }
    const bool proper = lk_is_finite(lse);
    const float rise = proper ? rest + own : NAN;
    for (int step = 0; step < cols; step += 32 * N * U) {
        const int col = step + lane * N;
        lk_vec<L> raw[U] = {};
#pragma unroll
        for (int u = 0; u < U; u++)
            if (y >= 0 && col + u * 32 * N < cols) raw[u] = lk_load_vec(logits + col + u * 32 * N);
        __syncwarp(); /* the logits that lie where this step writes have been read */
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = col + u * 32 * N;
            float v[N], x[LK_VEC<D>] = {};
            lk_vec<D> packed;
            if (at >= cols) break;
            lk_unpack(v, raw[u]);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (y < 0 || at + j >= cols) continue;
                float slope = 1.0f;
                if (a.softcap > 0.0f) v[j] = lk_ce_cap(v[j], a.logit_scale, a.softcap, &slope);
                const float p = proper ? lk_exp(fmaf(scale, v[j], -lse)) : 1.0f;
                const bool smooth = class_weight && a.label_smoothing > 0.0f;
                float z = fmaf(rise, p, -fall * (smooth ? class_weight[q.first_col + at + j] : 1.0f));
                if (at + j == hit) z = fmaf(proper ? own : NAN, p, fall * (weights - weight)) - rest * w.others[row];
                x[j] = z * slope;
            }
            lk_pack(&packed, x); /* what it has beyond the row is 0, and padding */
            if (sizeof(D) == sizeof(L)) lk_store_vec(dz + at, packed);
            else *(uint2 *)(dz + at) = make_uint2(packed.raw.x, packed.raw.y);
        }
    }
}

/* ---- Fused: the logits stay in registers ------------------------------------------------------------------------------ */

/* Kernels of lk_gemm.cuh's tiles. Without gradients nothing of the logits is kept. With them, a chunk's exponentials
 * E[t,j] = exp(scale (v[t,j] - reference)) are, in bf16: dZ is E but for a factor of the row, v below, which is known when the
 * row's sum is, and the target's element, which is put in its place then. So dx = v (E weight), where v comes last, and
 * dweight = E^T (v x).
 * The reference is one of a row and has to be known before the row: it is guessed from the first tile, whose maximum and mean
 * say how far the largest of all columns will be. bf16 has float's range, so it may be off by 2^40 upwards and 2^90 downwards.
 * A tile beyond that takes its own maximum for that row, says so in `references`, and is brought in line later. */

#define LK_LCE_GROUP 12 /* pairs of row tiles that walk the vocabulary together: few enough for their x, 24 MiB at hidden 4096,
                           to stay in L2. 6, 16 and 24 take as long on an H200 */

typedef struct {
    CUtensorMap x, weight;
    lk_lce_panel q;       /* the chunk, all columns */
    lk_lce_sums *parts;   /* [chunk, runs] */
    float ahead;          /* how much further above the mean the largest of vocab columns is than that of a tile */
    int pairs, tiles;     /* of 256 rows, of 256 columns */
    int run_tiles, runs;  /* a cluster keeps its rows' states over a run of tiles */
    int items;            /* pairs times runs */
    int steps;            /* of hidden */
} lk_lce_fused;

/* Item i of the order in which tiles are worked on, as a pair of row tiles and a run of columns: the clusters that run at a
 * time share the rows of a group, of `most` pairs, and few runs, so that each tile of columns is read from memory once a group.
 */
typedef struct {
    int pair, run;
} lk_lce_item;

LK_DEVICE lk_lce_item lk_lce_item_of(int pairs, int runs, int most, int i)
{
    const int group = i / (most * runs), first = group * most, rest = i - first * runs;
    const int wide = pairs - first < most ? pairs - first : most;
    return {first + rest % wide, rest / wide};
}

/* What is multiplied into v under the exponent: v is z itself under a softcap, and in other rows the logit. */
LK_DEVICE float lk_lce_scale(const lk_lce_args &a)
{
    return a.softcap > 0.0f ? 1.0f : a.logit_scale;
}

/* Where a row of a tile ends and where its target is, in columns from the one of the thread's first sum on. */
typedef struct {
    int left, hit;
} lk_lce_window;

/* Whether the thread's i-th sum of the row takes part: its column is there, and not the target's, which stays out so that the
 * sum of the others is known without a difference. */
LK_DEVICE bool lk_lce_within(lk_lce_window w, int i)
{
    const int c = i / 2 * 8 + i % 2;
    return c < w.left && c != w.hit;
}

/* Adds the bias. Of a pair of columns the second may lie behind the last one: it does not count. */
LK_DEVICE void lk_lce_add_bias(float (&z)[LK_GEMM_SUMS], const float *bias, int left)
{
#pragma unroll
    for (int i = 0; i < LK_GEMM_SUMS; i += 4) {
        const float2 two = i * 2 < left ? *(const float2 *)(bias + i * 2) : make_float2(0.0f, 0.0f);
        z[i] += two.x, z[i + 1] += two.y, z[i + 2] += two.x, z[i + 3] += two.y;
    }
}

/* Writes the target's logit, where the thread has it. */
LK_DEVICE void lk_lce_find(float *logit, const float (&v)[LK_GEMM_SUMS / 2], int hit)
{
    float found = 0.0f;
    if (!((unsigned)hit < LK_GEMM_COLS && hit % 8 < 2)) return;
#pragma unroll
    for (int i = 0; i < LK_GEMM_SUMS / 2; i++) found = i / 2 * 8 + i % 2 == hit ? v[i] : found;
    *logit = found;
}

/* Adds a row's columns of a tile to its state. plain: neither bias, softcap nor smoothing. edge: a column may be out. */
template <bool plain>
LK_DEVICE lk_ce_row lk_lce_take_tile(lk_ce_row s, float (&v)[LK_GEMM_SUMS / 2], lk_lce_window window, bool edge, const float *w,
                                     const lk_lce_args &a)
{
    const float scale = lk_lce_scale(a);
    float slope;
    if (!plain && a.softcap > 0.0f) {
#pragma unroll
        for (int i = 0; i < LK_GEMM_SUMS / 2; i++) v[i] = lk_ce_cap(v[i], a.logit_scale, a.softcap, &slope);
    }
    if (edge) {
#pragma unroll
        for (int i = 0; i < LK_GEMM_SUMS / 2; i++) v[i] = lk_lce_within(window, i) ? v[i] : -INFINITY;
    }
    if (plain || a.label_smoothing <= 0.0f) {
        const lk_lse sum = lk_lse_add({s.max, s.sum}, v, scale);
        s.max = sum.max, s.sum = sum.sum;
        return s;
    }
    float max = s.max, sum = 0.0f, weights = 0.0f, weighted = 0.0f;
#pragma unroll
    for (int i = 0; i < LK_GEMM_SUMS / 2; i++) max = fmaxf(max, v[i]);
    s = lk_ce_row_raise(s, max, scale);
    const float reference = lk_lse_reference(max);
#pragma unroll
    for (int i = 0; i < LK_GEMM_SUMS / 2; i++) {
        if (!lk_lce_within(window, i)) continue;
        const float d = v[i] - reference, weight = w ? w[i / 2 * 8 + i % 2] : 1.0f;
        sum += lk_ex2(scale * LK_LOG2E * d), weights += weight, weighted = fmaf(weight, d, weighted);
    }
    s.sum += sum, s.weights += weights, s.weighted += weighted;
    return s;
}

/* The reference guessed from a row's first tile. */
LK_DEVICE float lk_lce_guess(lk_lce_sums first, float ahead, float scale)
{
    const float max = lk_lse_reference(first.max), above = -ahead * __fdiv_rn(first.weighted, first.weights);
    const float most = __fdiv_rn(80.0f * LK_LN2, scale);
    return max + (above > 0.0f && above < INFINITY ? fminf(above, most) : 0.0f); /* 0: no columns, or -inf among them */
}

LK_DEVICE uint32_t lk_lce_pair(float low, float high)
{
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    uint32_t pair;
    memcpy(&pair, &two, sizeof pair);
    return pair;
}

/* Four lanes that hold two columns each of four groups of 8, as pairs of bf16, change so that each holds a group. */
LK_DEVICE uint4 lk_lce_turn(const uint32_t (&pair)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t low[2] = {odd ? pair[0] : pair[1], odd ? pair[2] : pair[3]}, u[4], far[2];
    low[0] = __shfl_xor_sync(0xffffffffu, low[0], 1), low[1] = __shfl_xor_sync(0xffffffffu, low[1], 1);
    u[0] = odd ? low[0] : pair[0], u[1] = odd ? pair[1] : low[0];
    u[2] = odd ? low[1] : pair[2], u[3] = odd ? pair[3] : low[1];
    far[0] = __shfl_xor_sync(0xffffffffu, high ? u[0] : u[2], 2), far[1] = __shfl_xor_sync(0xffffffffu, high ? u[1] : u[3], 2);
    return high ? make_uint4(far[0], far[1], u[2], u[3]) : make_uint4(u[0], u[1], far[0], far[1]);
}

/* Puts a row's exponentials of a tile in place, with slopes under a softcap, and adds their sum to the row's state, whose max
 * is the largest reference so far. room: how many columns there are from this tile's first on, a multiple of 64; out: those of
 * the tile; NULL: no such row. edge: a column may be out. */
template <bool plain>
LK_DEVICE lk_lse lk_lce_put_tile(lk_lse s, float (&v)[LK_GEMM_SUMS / 2], lk_lce_window window, bool edge, float guess, int room,
                                 lk_bf16 *out, float *reference, const lk_lce_args &a)
{
    const float scale = lk_lce_scale(a), rate = scale * LK_LOG2E;
    float max = -INFINITY, sum = 0.0f, slope = 1.0f;
    if (plain && edge) {
#pragma unroll
        for (int i = 0; i < LK_GEMM_SUMS / 2; i++) v[i] = lk_lce_within(window, i) ? v[i] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < LK_GEMM_SUMS / 2; i++) max = plain || lk_lce_within(window, i) ? fmaxf(max, v[i]) : max;
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
    if (!plain && a.softcap > 0.0f) max = lk_ce_cap(max, a.logit_scale, a.softcap, &slope); /* -softcap for masked columns */
    const float off = rate * (max - guess);
    const float from = off > 40.0f || off < -90.0f ? max : guess, base = lk_lse_reference(from);
    const int quarter = (int)threadIdx.x % 4;
#pragma unroll
    for (int block = 0; block < LK_GEMM_COLS / 32; block++) {
        uint32_t pair[4];
#pragma unroll
        for (int g = 0; g < 4; g++) {
            float e[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int i = block * 8 + g * 2 + j;
                if (!plain && a.softcap > 0.0f) v[i] = lk_ce_cap(v[i], a.logit_scale, a.softcap, &slope);
                e[j] = plain || lk_lce_within(window, i) ? lk_ex2(rate * (v[i] - base)) : 0.0f;
                sum += e[j];
                if (!plain && e[j] > 0.0f) e[j] *= slope; /* an ignored row's slope may be NaN */
            }
            pair[g] = lk_lce_pair(e[0], e[1]);
        }
        const uint4 group = lk_lce_turn(pair);
        if (out && block * 32 + quarter * 8 < room) *(uint4 *)(out + block * 32 + quarter * 8) = group;
    }
    if (out && quarter == 0) *reference = from;
    return lk_lse_merge(s, {sum == 0.0f ? -INFINITY : from, sum}, scale); /* not (+inf, 0), which would give 0 times inf */
}

/* A cluster owns a pair of row tiles and a run of the vocabulary at a time; of a block's 128 rows a consumer thread has a
 * quarter of two, whose states it keeps through the run. store: the exponentials are kept. */
template <bool plain, bool store>
LK_KERNEL void __launch_bounds__(LK_GEMM_THREADS, 1) lk_lce_fused_kernel(const __grid_constant__ lk_lce_fused p)
{
#if LK_SM90A
    LK_DYN_SMEM(lk_gemm_memory, memory);
    lk_gemm_ring *const ring = lk_gemm_begin(&memory);
    const lk_lce_args &a = p.q.p.c.a;
    const lk_lce_pieces &w = p.q.p.w;
    const int rank = (int)blockIdx.x % 2;
    unsigned step = 0;
    if (threadIdx.x == 0) lk_prefetch_tensormap(&p.x), lk_prefetch_tensormap(&p.weight);
    lk_griddepcontrol_wait();
    if (lk_gemm_loads()) {
        lk_setmaxnreg_dec<LK_GEMM_LOAD_REGISTERS>();
        for (int i = (int)blockIdx.x / 2; threadIdx.x == 0 && i < p.items; i += (int)gridDim.x / 2) {
            const lk_lce_item item = lk_lce_item_of(p.pairs, p.runs, LK_LCE_GROUP, i);
            const int row = (2 * item.pair + rank) * LK_GEMM_ROWS, first = item.run * p.run_tiles;
            for (int tile = first; tile < first + p.run_tiles && tile < p.tiles; tile++)
                lk_gemm_load(ring, &step, &p.x, &p.weight, row, tile * LK_GEMM_COLS, p.steps);
        }
    } else {
        lk_setmaxnreg_inc<LK_GEMM_MULTIPLY_REGISTERS>();
        const int own = lk_gemm_col(0), quarter = (int)threadIdx.x % 4;
        const float *const weights = w.class_weight ? w.class_weight : a.class_weight;
        float z[LK_GEMM_SUMS];
        for (int i = (int)blockIdx.x / 2; i < p.items; i += (int)gridDim.x / 2) {
            const lk_lce_item item = lk_lce_item_of(p.pairs, p.runs, LK_LCE_GROUP, i);
            const int row = (2 * item.pair + rank) * LK_GEMM_ROWS + lk_gemm_row(0), first = item.run * p.run_tiles;
            int y[2];
            float guess[2] = {0.0f, 0.0f};
            lk_ce_row s[2] = {lk_ce_row_empty(), lk_ce_row_empty()};
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const bool here = row + 8 * r < p.q.rows;
                if (store) guess[r] = lk_lce_guess(w.sample[here ? row + 8 * r : 0], p.ahead, lk_lce_scale(a));
                y[r] = here ? w.target[p.q.first_row + row + 8 * r] : -1;
            }
            for (int tile = first; tile < first + p.run_tiles && tile < p.tiles; tile++) {
                const int col = tile * LK_GEMM_COLS, left = (int)a.vocab - col;
                lk_gemm_multiply(z, ring, &step, p.steps);
                if (!plain && w.bias) lk_lce_add_bias(z, (const float *)w.bias + col + own, left - own);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const bool hit = (unsigned)(y[r] - col) < LK_GEMM_COLS;
                    const bool ignored = store && y[r] < 0; /* its exponentials are 0 */
                    const bool edge = __any_sync(0xffffffffu, hit || ignored || left < LK_GEMM_COLS);
                    const lk_lce_window window = {ignored ? 0 : left - own, y[r] - col - own};
                    float v[LK_GEMM_SUMS / 2];
#pragma unroll
                    for (int k = 0; k < LK_GEMM_SUMS / 2; k++) v[k] = z[k / 2 * 4 + 2 * r + k % 2];
                    if (edge && y[r] >= 0) lk_lce_find(w.logit + p.q.first_row + row + 8 * r, v, window.hit);
                    if (store) {
                        const int64_t at = row + 8 * r;
                        const int room = (int)w.logits_stride - col;
                        const bool here = at < p.q.rows;
                        lk_bf16 *const out = here ? (lk_bf16 *)w.logits + at * w.logits_stride + col : NULL;
                        const lk_lse sum = lk_lce_put_tile<plain>({s[r].max, s[r].sum}, v, window, edge, guess[r], room, out,
                                                                  w.references + at * p.tiles + tile, a);
                        s[r].max = sum.max, s[r].sum = sum.sum;
                    } else {
                        s[r] = lk_lce_take_tile<plain>(s[r], v, window, edge, weights ? weights + col + own : NULL, a);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int64_t at = row + 8 * r;
                s[r] = lk_ce_row_warp<!plain && !store>(s[r], lk_lce_scale(a), 4);
                if (quarter == 0 && at < p.q.rows)
                    p.parts[at * p.runs + item.run] = {s[r].max, s[r].sum, s[r].weights, s[r].weighted};
            }
        }
    }
    lk_gemm_end();
#endif
}

/* The state of a row, by a warp: that of its runs, with the target's value but not in the sums. */
LK_DEVICE lk_ce_row lk_lce_merge_runs(const lk_lce_fused &p, int64_t row, int y, float *slope)
{
    const lk_lce_args &a = p.q.p.c.a;
    const float scale = lk_lce_scale(a);
    lk_ce_row s = lk_ce_row_empty();
    for (int run = (int)threadIdx.x % 32; run < p.runs; run += 32) {
        const lk_lce_sums part = p.parts[row * p.runs + run];
        lk_ce_row other = lk_ce_row_empty();
        other.max = part.max, other.sum = part.sum, other.weights = part.weights, other.weighted = part.weighted;
        s = lk_ce_row_merge(s, other, scale);
    }
    s = lk_ce_row_warp<true>(s, scale);
    s.target = y < 0 ? -INFINITY : p.q.p.w.logit[p.q.first_row + row];
    *slope = 1.0f;
    if (y >= 0 && a.softcap > 0.0f) s.target = lk_ce_cap(s.target, a.logit_scale, a.softcap, slope);
    return s;
}

/* A warp owns a row: it merges the states of its runs and writes the results. */
LK_KERNEL void __launch_bounds__(LK_LCE_THREADS) lk_lce_merge_kernel(const __grid_constant__ lk_lce_fused p)
{
    const int64_t row = (int64_t)blockIdx.x * (LK_LCE_THREADS / 32) + threadIdx.x / 32;
    lk_griddepcontrol_wait();
    if (row >= p.q.rows) return;
    float slope;
    const int y = p.q.p.w.target[p.q.first_row + row];
    const lk_ce_row s = lk_lce_merge_runs(p, row, y, &slope);
    lk_lce_put_row(p.q.p, p.q.first_row + row, y, s, lk_lce_scale(p.q.p.c.a), threadIdx.x % 32 == 0);
}

/* A warp owns a row. It writes the row's results and makes its exponentials dZ but for the factor v.
 * With f = upstream logit_scale, rest = f w[y], own = 2 k lse f + logit_scale dlse: dlogits[j] = (rest + own) p[j] for j != y,
 * and own p[y] - rest (1 - p[y]) for the target, each times its slope. So v = (rest + own) p[j] / E[j], the same for all j;
 * where the two terms cancel, v has rest alone and E gets (rest + own) / rest, or the target would have nothing. */
LK_KERNEL void __launch_bounds__(LK_LCE_THREADS, LK_LCE_BLOCKS) lk_lce_factor_kernel(const __grid_constant__ lk_lce_fused p)
{
    const lk_lce_args &a = p.q.p.c.a;
    const lk_lce_pieces &w = p.q.p.w;
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * (LK_LCE_THREADS / 32) + threadIdx.x / 32, at = p.q.first_row + row;
    lk_griddepcontrol_wait();
    if (row >= p.q.rows) return;
    const float scale = lk_lce_scale(a), rate = scale * LK_LOG2E;
    const int y = w.target[at];
    float slope, v = 0.0f, single = 0.0f, rise = 1.0f, base = 0.0f;
    const lk_ce_row s = lk_lce_merge_runs(p, row, y, &slope);
    const lk_ce_result r = lk_lce_put_row(p.q.p, at, y, s, scale, lane == 0);
    if (y >= 0) {
        const float one[1] = {s.target}, ones[1] = {1.0f};
        const lk_ce_row all = lk_ce_row_add(s, one, ones, scale);
        const float *class_weight = w.class_weight ? w.class_weight : a.class_weight;
        const float f = w.factor[at] * a.logit_scale, rest = f * (class_weight ? class_weight[y] : 1.0f);
        const float own = (a.z_loss > 0.0f ? 2.0f * a.z_loss * r.lse * f : 0.0f) + (w.dlse ? a.logit_scale * w.dlse[at] : 0.0f);
        const float others = __fdiv_rn(lk_ce_row_raise(s, all.max, scale).sum, all.sum);
        const float target = __fdiv_rn(lk_ex2(rate * (s.target - lk_lse_reference(all.max))), all.sum);
        base = rate * (s.target - s.max) > 60.0f ? s.target : s.max; /* what the row's exponentials are against at the end */
        float whole = rest + own;
        if (fabsf(whole) < 0x1p-60f * fabsf(rest)) rise = __fdiv_rn(whole, rest), whole = rest;
        v = whole * __fdiv_rn(lk_ex2(rate * (lk_lse_reference(base) - lk_lse_reference(all.max))), all.sum);
        single = v != 0.0f ? slope * __fdiv_rn(fmaf(own, target, -rest * others), v) : 0.0f;
        if (!lk_is_finite(r.lse)) v = NAN;
    }
    lk_bf16 *const e = (lk_bf16 *)w.logits + row * w.logits_stride;
    for (int first = 0; y >= 0 && first < p.tiles; first += 32) { /* few tiles are out of line, or, with large logits, most */
        const float from = first + lane < p.tiles ? w.references[row * p.tiles + first + lane] : -INFINITY;
        const float mine = from > -INFINITY ? rise * lk_ex2(rate * (from - base)) : 1.0f;
        for (unsigned out = __ballot_sync(0xffffffffu, mine != 1.0f); out; out &= out - 1) {
            const int tile = first + __ffs((int)out) - 1;
            const int64_t col = (int64_t)tile * LK_GEMM_COLS + lane * 8;
            const float factor = __shfl_sync(0xffffffffu, mine, tile - first);
            float x[8] = {};
            lk_vec<lk_bf16> eight;
            if (col >= w.logits_stride) continue;
            if (factor != 0.0f) { /* as it is where the tile is far below */
                eight.raw = *(const uint4 *)(e + col);
                lk_unpack(x, eight);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] *= factor;
            lk_pack(&eight, x);
            *(uint4 *)(e + col) = eight.raw;
        }
    }
    __syncwarp(); /* the target's place is not written over */
    if (lane == 0) {
        if (y >= 0) lk_put(e + y, single);
        w.scale[row] = v;
    }
}

/* dx = v (E weight) of a chunk and, where bf16 dweight is summed over chunks, dweight (+)= E^T (v x), in one launch, so that
 * the last tiles of one leave nobody idle. In shared memory a factor that lies across is squares of 64 k by 64, which wgmma
 * takes as they are.
 * dweight holds its sums, rounded, and a byte each of the workspace what they are beyond that, in units of 2^-8 of a bf16's
 * last place: 24 bits in all, and nothing is left to do after the last chunk.
 * Any other dweight is cuBLASLt's. On an H200, 12288 tokens of hidden 4096 in one chunk came to 0.962 and 0.956 of the matmuls'
 * speed with bf16 dweight of 65536 and 131072 columns by these tiles, and come to 0.994 and 0.964 by cuBLASLt's. f32 that is
 * added to is so between a tile's last step and the next one's first: 16 chunks with 131072 columns took 80 ms, and take 71.
 * Those 80 were with additions by the L2 (red); L2 prefetches of what is added to, clusters that start apart or of which half
 * do dweight before dx gained nothing. */

#define LK_LCE_BAND 8 /* pairs of row tiles that walk all columns together, as above. 4, 6 and 16 took as long */

typedef struct {
    int pairs, cols; /* of 256 rows, of 256 columns; 0: the product is not asked for, or is cuBLASLt's */
    int steps;       /* of what is summed over */
} lk_lce_tiles;

typedef struct {
    CUtensorMap e, weight;    /* dx's factors */
    CUtensorMap e_across, x;  /* dweight's */
    lk_lce_panel q;           /* the chunk, all columns */
    lk_lce_tiles dx, dweight;
    int lead;                 /* see lk_lce_gradient_tile */
    bool first, last;         /* chunk */
    bool wide_dx, wide_dweight; /* eight neighbours from a multiple of 8 on are all there, at a multiple of 16 bytes */
} lk_lce_gradients;

typedef struct {
    int row, col; /* the first of the pair of tiles; row -1: there is none */
    bool dx;
} lk_lce_gradient_item;

LK_DEVICE lk_lce_gradient_item lk_lce_gradient_place(const lk_lce_tiles &t, int i, bool dx)
{
    const lk_lce_item item = lk_lce_item_of(t.pairs, t.cols, LK_LCE_BAND, i);
    return {2 * LK_GEMM_ROWS * item.pair, LK_GEMM_COLS * item.run, dx};
}

/* What a cluster works on at its turn: first its share of dx, in rounds of all clusters. Those that the last round leaves out,
 * the late ones, take `lead` rounds of dweight before all take turns again. */
LK_DEVICE lk_lce_gradient_item lk_lce_gradient_tile(const lk_lce_gradients &p, int turn)
{
    const int clusters = (int)gridDim.x / 2, cluster = (int)blockIdx.x / 2;
    const int items = p.dx.pairs * p.dx.cols, more = items % clusters, late = clusters - more;
    const int own = items / clusters + (cluster < more), behind = cluster < more ? late + cluster : cluster - more;
    if (turn < own) return lk_lce_gradient_place(p.dx, turn * clusters + cluster, true);
    turn -= own;
    int i = p.lead * late + turn * clusters + behind;
    if (cluster >= more) i = turn < p.lead ? turn * late + behind : i - p.lead * clusters;
    if (i < p.dweight.pairs * p.dweight.cols) return lk_lce_gradient_place(p.dweight, i, false);
    return {-1, 0, false};
}

/* Eight neighbours of a row to and from memory, or those that are left of it; zeros instead of what is not. */
LK_DEVICE uint4 lk_lce_get8(const lk_bf16 *from, int left, bool wide)
{
    lk_bf16 x[8];
    uint4 group = {};
    if (wide && left > 0) return *(const uint4 *)from;
#pragma unroll
    for (int i = 0; i < 8; i++) lk_put(x + i, i < left ? lk_to_float(from[i]) : 0.0f);
    memcpy(&group, x, sizeof group);
    return group;
}
LK_DEVICE void lk_lce_put8(lk_bf16 *to, uint4 group, int left, bool wide)
{
    lk_bf16 x[8];
    if (wide && left > 0) {
        *(uint4 *)to = group;
        return;
    }
    memcpy(x, &group, sizeof group);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < left) to[i] = x[i];
}

/* dx of the thread's two rows of a tile. */
LK_DEVICE void lk_lce_put_dx_tile(const lk_lce_gradients &p, const float (&d)[LK_GEMM_SUMS], int row, int col, float alpha)
{
    const lk_lce_args &a = p.q.p.c.a;
    const lk_lce_pieces &w = p.q.p.w;
    const int mine = col + (int)threadIdx.x % 4 * 8, left = (int)a.hidden - mine;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t at = row + 8 * r;
        const bool here = at < p.q.rows;
        const int64_t token = !here ? -1 : w.token ? w.token[p.q.first_row + at] : p.q.first_row + at;
        const float v = here ? w.scale[at] : 0.0f;
        lk_bf16 *const out = (lk_bf16 *)a.dx + (token < 0 ? 0 : token) * a.dx_stride + mine;
#pragma unroll
        for (int block = 0; block < LK_GEMM_COLS / 32; block++) {
            uint32_t pair[4];
#pragma unroll
            for (int g = 0; g < 4; g++) {
                const float *const two = d + block * 16 + g * 4 + 2 * r;
                pair[g] = lk_lce_pair(v * (alpha * two[0]), v * (alpha * two[1]));
            }
            const uint4 group = lk_lce_turn(pair);
            if (token >= 0) lk_lce_put8(out + block * 32, group, left - block * 32, p.wide_dx);
        }
    }
}

/* A sum of 24 bits: its bf16, and what it has beyond that. */
LK_DEVICE float lk_lce_join(uint32_t bf16, int low)
{
    return __uint_as_float((bf16 << 16) + (uint32_t)(low * 256));
}
LK_DEVICE int lk_lce_beyond(float x, uint32_t bf16)
{
    const int low = (int)(__float_as_uint(x) - (bf16 << 16) + 128) >> 8; /* of a NaN, anything: it stays one */
    return low > 127 ? 127 : low;
}

/* A tile of dweight. */
LK_DEVICE void lk_lce_put_dweight_tile(const lk_lce_gradients &p, const float (&d)[LK_GEMM_SUMS], int row, int col, float alpha)
{
    const lk_lce_args &a = p.q.p.c.a;
    const bool add = !p.first || a.accumulate;
    const int mine = col + (int)threadIdx.x % 4 * 8, left = (int)a.hidden - mine;
    const int64_t tile = (int64_t)(row / LK_GEMM_ROWS) * p.dweight.cols + col / LK_GEMM_COLS;
    uint4 *const low = (uint4 *)(p.q.p.w.low + tile * LK_GEMM_ROWS * LK_GEMM_COLS) + threadIdx.x - 128;
    lk_bf16 *out[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        out[r] = row + 8 * r < a.vocab ? (lk_bf16 *)a.dweight + (row + 8 * r) * a.dweight_stride + mine : NULL;
#pragma unroll
    for (int half = 0; half < 8; half += 4) { /* blocks of 32 columns */
        uint4 high[4][2], beyond[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int block = half + i;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                high[i][r] = {};
                if (add && out[r]) high[i][r] = lk_lce_get8(out[r] + block * 32, left - block * 32, p.wide_dweight);
            }
            beyond[i] = p.first ? make_uint4(0, 0, 0, 0) : low[block * 256];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int block = half + i;
            uint32_t bytes[4] = {beyond[i].x, beyond[i].y, beyond[i].z, beyond[i].w};
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t pair[4] = {high[i][r].x, high[i][r].y, high[i][r].z, high[i][r].w};
                if (add) {
                    const uint4 turned = lk_lce_turn(pair); /* its own inverse */
                    pair[0] = turned.x, pair[1] = turned.y, pair[2] = turned.z, pair[3] = turned.w;
                }
#pragma unroll
                for (int g = 0; g < 4; g++) { /* two columns: half of bytes[r * 2 + g / 2] */
                    const float *const two = d + block * 16 + g * 4 + 2 * r;
                    uint32_t &four = bytes[r * 2 + g / 2];
                    const int at = g % 2 * 16;
                    const float x = fmaf(alpha, two[0], lk_lce_join(pair[g] & 0xffff, (int8_t)(four >> at)));
                    const float y = fmaf(alpha, two[1], lk_lce_join(pair[g] >> 16, (int8_t)(four >> (at + 8))));
                    pair[g] = lk_lce_pair(x, y);
                    const uint32_t beyond_x = lk_lce_beyond(x, pair[g] & 0xffff) & 0xff;
                    const uint32_t beyond_y = lk_lce_beyond(y, pair[g] >> 16) & 0xff;
                    four = (four & ~(0xffffu << at)) | (beyond_x | beyond_y << 8) << at;
                }
                const uint4 group = lk_lce_turn(pair);
                if (out[r]) lk_lce_put8(out[r] + block * 32, group, left - block * 32, p.wide_dweight);
            }
            if (!p.last) low[block * 256] = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
        }
    }
}

LK_KERNEL void __launch_bounds__(LK_GEMM_THREADS, 1) lk_lce_gradients_kernel(const __grid_constant__ lk_lce_gradients p)
{
#if LK_SM90A
    LK_DYN_SMEM(lk_gemm_memory, memory);
    lk_gemm_ring *const ring = lk_gemm_begin(&memory);
    const int below = LK_GEMM_ROWS * ((int)blockIdx.x % 2);
    unsigned step = 0;
    lk_griddepcontrol_wait();
    if (lk_gemm_loads()) {
        lk_setmaxnreg_dec<LK_GEMM_LOAD_REGISTERS>();
        for (int turn = 0; threadIdx.x == 0; turn++) {
            const lk_lce_gradient_item item = lk_lce_gradient_tile(p, turn);
            if (item.row < 0) break;
            if (item.dx)
                lk_gemm_load<false, true>(ring, &step, &p.e, &p.weight, item.row + below, item.col, p.dx.steps);
            else lk_gemm_load<true, true>(ring, &step, &p.e_across, &p.x, item.row + below, item.col, p.dweight.steps);
        }
    } else {
        lk_setmaxnreg_inc<LK_GEMM_MULTIPLY_REGISTERS>();
        const float alpha = p.q.p.w.counts->alpha;
        float d[LK_GEMM_SUMS];
        for (int turn = 0;; turn++) {
            const lk_lce_gradient_item item = lk_lce_gradient_tile(p, turn);
            const int row = item.row + below + lk_gemm_row(0);
            if (item.row < 0) break;
            if (item.dx) {
                lk_gemm_multiply<false, true>(d, ring, &step, p.dx.steps);
                lk_lce_put_dx_tile(p, d, row, item.col, alpha);
            } else {
                lk_gemm_multiply<true, true>(d, ring, &step, p.dweight.steps);
                lk_lce_put_dweight_tile(p, d, row, item.col, alpha);
            }
        }
    }
    lk_gemm_end();
#endif
}

/* ---- dbias ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    lk_lce_panel q;
    int64_t stride; /* of dZ */
    int add;        /* not 0: to the sums of the chunks before */
} lk_lce_columns;

/* A thread sums a column over its block's share of the chunk's rows. */
template <class D> LK_KERNEL void __launch_bounds__(LK_LCE_THREADS) lk_lce_columns_kernel(lk_lce_columns p)
{
    const lk_lce_pieces &w = p.q.p.w;
    const int64_t tiles = (p.q.cols + LK_LCE_THREADS - 1) / LK_LCE_THREADS, split = blockIdx.x / tiles;
    const int64_t col = blockIdx.x % tiles * LK_LCE_THREADS + threadIdx.x, share = (p.q.rows + w.splits - 1) / w.splits;
    const int64_t end = (split + 1) * share < p.q.rows ? (split + 1) * share : p.q.rows;
    lk_griddepcontrol_wait();
    if (col >= p.q.cols) return;
    float *out = w.dbias + split * p.q.p.c.a.vocab + p.q.first_col + col;
    float sum = p.add ? *out : 0.0f;
#pragma unroll 8
    for (int64_t row = split * share; row < end; row++) {
        const float dz = lk_to_float(((const D *)w.logits)[row * p.stride + col]);
        sum = fmaf(w.scale ? w.scale[row] : 1.0f, dz, sum);
    }
    *out = sum;
}

/* ---- After the matmuls ----------------------------------------------------------------------------------------------- */

/* The sums of a reduced loss, by one block; every thread calls. */
LK_DEVICE void lk_lce_reduce(const lk_lce_work &p, const lk_lce_counts &counts)
{
    const lk_lce_args &a = p.c.a;
    const lk_lce_pieces &w = p.w;
    unsigned terms = 0; /* lk_ce_add_up's count, which nobody needs here */
    float sums[2] = {0.0f, 0.0f};
    if (w.loss) sums[0] = lk_ce_add_up<LK_LCE_THREADS, 1, 16>(w.loss, p.c.rows, &terms);
    if (w.z) sums[1] = lk_ce_add_up<LK_LCE_THREADS, 1, 16>(w.z, p.c.rows, &terms);
    lk_sum_cluster<2, true>(sums, 0);
    if (threadIdx.x != 0) return;
    if (counts.bad) sums[0] = NAN;
    if (a.reduction == LK_REDUCTION_MEAN) {
        const float valid = (float)counts.counted, over = counts.weight_sum;
        const float divisor = w.class_weight ? valid : over, nothing = a.zero_when_empty ? 0.0f : NAN;
        const bool some = over != 0.0f;
        sums[0] = some ? __fdiv_rn(sums[0], divisor) : sums[0] != sums[0] ? sums[0] : nothing;
        sums[1] = some ? __fdiv_rn(sums[1], valid) : sums[1] != sums[1] ? sums[1] : nothing;
    }
    if (counts.over) sums[0] = sums[1] = NAN;
    if (a.loss) *a.loss = sums[0];
    if (a.z_loss_out) *a.z_loss_out = sums[1];
}

/* Writes what the matmuls leave open: the reduced loss; each token's results; dx of bad tokens and, where rows are compacted,
 * of ignored ones; dbias; everything where there is no token, or too many count. */
LK_KERNEL void __launch_bounds__(LK_LCE_THREADS, LK_LCE_BLOCKS) lk_lce_finish_kernel(lk_lce_work p)
{
    const lk_lce_args &a = p.c.a;
    const lk_lce_pieces &w = p.w;
    const int lane = (int)threadIdx.x % 32;
    const int64_t block = (int64_t)blockIdx.x - 1, blocks = (int64_t)gridDim.x - 1; /* less the one for the reduced loss */
    const int64_t thread = block * LK_LCE_THREADS + threadIdx.x, step = blocks * LK_LCE_THREADS;
    lk_griddepcontrol_wait();
    const bool reduced = a.reduction != LK_REDUCTION_NONE, none = p.c.rows == 0;
    lk_lce_counts counts = {};
    if (!none) counts = *w.counts;
    if (block < 0) {
        if (p.c.gives_loss && reduced && (a.loss || a.z_loss_out)) lk_lce_reduce(p, counts);
        if (none && threadIdx.x == 0 && a.valid_rows) *a.valid_rows = 0;
        if (none && threadIdx.x == 0 && a.weight_sum) *a.weight_sum = 0.0f;
        return;
    }
    const bool every = p.c.gives_loss && !reduced, compact = p.c.compact, over = counts.over;
    const bool left = every || (p.c.gives_loss && a.lse) || counts.bad || over || compact; /* something of tokens */
    for (int64_t first = thread - lane; left && first < a.tokens; first += step) {
        const int64_t token = first + lane;
        lk_ce_label label = {-1, false, false};
        if (token < a.tokens) {
            label = lk_ce_look_up(a, token);
            if (!compact || over || !label.counted) {
                const bool skip = over || compact;
                const float instead = over ? NAN : 0.0f;
                if (every && a.loss) a.loss[token] = label.bad ? NAN : skip ? instead : w.loss[token];
                if (every && a.z_loss_out) a.z_loss_out[token] = skip || !w.z ? instead : w.z[token];
                if (p.c.gives_loss && a.lse) a.lse[token] = skip ? instead : w.lse[token];
            }
        }
        const bool fill = token < a.tokens && (label.bad || over || (compact && !label.counted));
        const float with = label.bad || over ? NAN : 0.0f;
        unsigned todo = a.dx ? __ballot_sync(0xffffffffu, fill) : 0;
        for (; todo; todo &= todo - 1) {
            const int owner = __ffs((int)todo) - 1;
            const float value = __shfl_sync(0xffffffffu, with, owner);
            for (int64_t col = lane; col < a.hidden; col += 32)
                lk_lce_set(a.dx, p.c.type, (first + owner) * a.dx_stride + col, value);
        }
    }
    for (int64_t row = thread; compact && !over && row < p.c.rows; row += step) {
        const int64_t token = w.token[row];
        if (token < 0) continue;
        if (every && a.loss) a.loss[token] = lk_ce_look_up(a, token).bad ? NAN : w.loss[row];
        if (every && a.z_loss_out) a.z_loss_out[token] = w.z ? w.z[row] : 0.0f;
        if (p.c.gives_loss && a.lse) a.lse[token] = w.lse[row];
    }
    if (over || (none && !a.accumulate)) {
        const float value = over ? NAN : 0.0f;
        for (int64_t i = thread; a.dweight && i < a.vocab * a.hidden; i += step)
            lk_lce_set(a.dweight, a.dweight_dtype, i / a.hidden * a.dweight_stride + i % a.hidden, value);
        for (int64_t col = thread; a.dbias && col < a.vocab; col += step) lk_lce_set(a.dbias, a.dbias_dtype, col, value);
    } else if (!none && a.dbias) {
        for (int64_t col = thread; col < a.vocab; col += step) {
            float sum = 0.0f;
            for (int64_t split = 0; split < w.splits; split++) sum += w.dbias[split * a.vocab + col];
            sum = fmaf(counts.alpha, sum, a.accumulate ? lk_lce_get(a.dbias, a.dbias_dtype, col) : 0.0f);
            lk_lce_set(a.dbias, a.dbias_dtype, col, sum);
        }
    }
}

/* ---- The context ----------------------------------------------------------------------------------------------------- */

/* What an algorithm is chosen for; compared byte by byte. D is m x n in cuBLASLt's column-major order. */
typedef struct {
    int32_t factor_type, type, transpose_a, transpose_b, tf32, bias, scalars_on_device; /* types: LK_DTYPE_* */
    int32_t align_a, align_b, align_d;
    int64_t m, n, k, lda, ldb, ldd, workspace_bytes, add; /* add: D is read too, which another algorithm may be best at */
} lk_lce_key;

typedef struct {
    lk_lce_key key;
    cublasLtMatmulAlgo_t algorithm;
    int64_t tuned;
} lk_lce_choice;

#define LK_LCE_CHOICES 64
#define LK_LCE_MAGIC 0x6c6b6c6365747831u

typedef struct {
    uint64_t magic;
    cublasLtHandle_t handle;
    int device, count;
    lk_lce_choice choices[LK_LCE_CHOICES];
} lk_lce_context;
static_assert(sizeof(lk_lce_context) <= sizeof(lk_linear_cross_entropy_context), "the opaque struct is large enough");

LK_HOST lk_status lk_lce_cublas(const char *op, const char *call, cublasStatus_t status)
{
    if (status == CUBLAS_STATUS_SUCCESS) return LK_OK;
    return lk_fail(LK_ERR_CUBLAS, op, "%s failed with status %d, %s", call, (int)status, cublasLtGetStatusName(status));
}

LK_API inline __attribute__((used)) lk_status lk_linear_cross_entropy_init(lk_linear_cross_entropy_context *context)
{
    const char *const op = "lk_linear_cross_entropy_init";
    lk_lce_context *const c = (lk_lce_context *)context;
    if (!c) return lk_fail(LK_ERR_NULL, op, "context is NULL");
    memset((void *)context, 0, sizeof *context);
    lk_status status = lk_asked_device(op, cudaGetDevice(&c->device));
    if (!status) status = lk_lce_cublas(op, "cublasLtCreate", cublasLtCreate(&c->handle));
    if (!status) c->magic = LK_LCE_MAGIC;
    return status;
}

LK_API inline __attribute__((used)) lk_status lk_linear_cross_entropy_destroy(lk_linear_cross_entropy_context *context)
{
    const char *const op = "lk_linear_cross_entropy_destroy";
    lk_lce_context *const c = (lk_lce_context *)context;
    if (!c) return lk_fail(LK_ERR_NULL, op, "context is NULL");
    if (c->magic != LK_LCE_MAGIC) return lk_fail(LK_ERR_VALUE, op, "context is not one that init has made");
    c->magic = 0;
    return lk_lce_cublas(op, "cublasLtDestroy", cublasLtDestroy(c->handle));
}

/* ---- Plans ----------------------------------------------------------------------------------------------------------- */

#define LK_LCE_CUBLAS_BYTES ((size_t)32 << 20) /* what cuBLASLt is said to want on Hopper */
#define LK_LCE_DEFAULT_BYTES ((size_t)1 << 30) /* what ..._workspace_bytes stays within, where that is enough */

LK_HOST int64_t lk_lce_round_up(int64_t x, int64_t to)
{
    return lk_ceil_div(x, to) * to;
}
LK_HOST int64_t lk_lce_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
LK_HOST int lk_lce_type_bytes(int type)
{
    return type == LK_DTYPE_F32 ? 4 : 2;
}

/* The next piece of the workspace, NULL where there is nothing to hold. What no memory holds does not wrap around to a few. */
LK_HOST void *lk_lce_take(char *base, size_t *used, bool wanted, int64_t elements, size_t each)
{
    if (!wanted) return NULL;
    void *const piece = base + *used;
    const size_t bytes = (size_t)lk_lce_round_up(elements * (int64_t)each, 256), most = (size_t)1 << 62;
    *used = bytes > most - *used ? most : *used + bytes;
    return piece;
}

/* dweight is summed apart: it is 16 bits wide and made of several chunks. */
LK_HOST bool lk_lce_sums_dweight(const lk_lce_call *c, int64_t chunk)
{
    return c->a.dweight && c->a.dweight_dtype != LK_DTYPE_F32 && chunk < c->rows;
}

/* Whether a plan of chunks may have its logits in slices: 16-bit dZ needs half the room of f32 logits. */
LK_HOST bool lk_lce_slices(const lk_lce_call *c, int path)
{
    return path == LK_LINEAR_CROSS_ENTROPY_CHUNKS && c->gradient && c->type != LK_DTYPE_F32 && c->logits_type == LK_DTYPE_F32;
}

/* For how many rows of logits there is room in dweight, which is scratch until its one product or its sums come. */
LK_HOST int64_t lk_lce_lent(const lk_lce_call *c, int64_t chunk)
{
    const lk_lce_args &a = c->a;
    const bool at_the_end = chunk >= c->rows || lk_lce_sums_dweight(c, chunk);
    if (!a.dweight || a.accumulate || !at_the_end || a.dweight_stride != a.hidden || (uintptr_t)a.dweight % 256) return 0;
    return a.vocab * a.hidden * lk_lce_type_bytes(a.dweight_dtype) / (lk_lce_round_up(a.vocab, 64) * 4);
}

/* How many columns at the end of these have matmuls of their own: cuBLASLt takes up to 7 times as long for 16-bit factors
 * where a contiguous length is no multiple of 8; those of TF32 are presumed to be alike. */
LK_HOST int64_t lk_lce_apart(const lk_lce_call *c, int64_t cols)
{
    return cols > 8 && (c->type != LK_DTYPE_F32 || c->a.tf32) ? cols % 8 : 0;
}

/* Whether dx of a chunk is summed in f32 of the workspace: over panels, and in f16 where the last columns are apart, since
 * either of two sums that nearly cancel may be beyond f16's range. */
LK_HOST bool lk_lce_sums_dx(const lk_lce_call *c, int path)
{
    if (path == LK_LINEAR_CROSS_ENTROPY_CHUNKS) return c->type == LK_DTYPE_F16 && lk_lce_apart(c, c->a.vocab);
    return path != LK_LINEAR_CROSS_ENTROPY_FUSED && (c->type != LK_DTYPE_F32 || c->compact);
}

/* slice: 0 where logits and dZ share their place. */
LK_HOST lk_lce_pieces lk_lce_lay_out(const lk_lce_call *c, int path, int64_t chunk, int64_t panel, int64_t slice,
                                     void *workspace)
{
    const lk_lce_args &a = c->a;
    const bool panels = path == LK_LINEAR_CROSS_ENTROPY_PANELS || path == LK_LINEAR_CROSS_ENTROPY_PANELS_TWICE;
    const bool fused = path == LK_LINEAR_CROSS_ENTROPY_FUSED, mean = a.reduction == LK_REDUCTION_MEAN;
    /* Pieces begin at multiples of 256, which cuBLASLt wants and some of its algorithms are chosen by, wherever the workspace
     * does: 256 bytes more are enough, and keep sizes multiples of 256. NULL says that a piece is not there. */
    char *const base = workspace ? (char *)(((uintptr_t)workspace + 255) / 256 * 256) : (char *)256;
    const int64_t rows = c->rows, dweight_rows = path == LK_LINEAR_CROSS_ENTROPY_PANELS_TWICE ? panel : a.vocab;
    lk_lce_pieces w = {};
    size_t used = 0;
    w.logits_stride = lk_lce_round_up(fused ? a.vocab : panel, 64), w.x_stride = lk_lce_round_up(a.hidden, 64);
    w.splits = lk_lce_min(lk_ceil_div(512, lk_ceil_div(a.vocab, LK_LCE_THREADS)), lk_ceil_div(rows, 64));
    w.counts = (lk_lce_counts *)lk_lce_take(base, &used, true, 1, sizeof *w.counts);
    w.target = (int32_t *)lk_lce_take(base, &used, true, rows, 4);
    w.token = (int32_t *)lk_lce_take(base, &used, c->compact, rows, 4);
    w.factor = (float *)lk_lce_take(base, &used, c->gradient, rows, 4);
    w.dlse = (float *)lk_lce_take(base, &used, c->gradient && a.dlse, rows, 4);
    w.loss = (float *)lk_lce_take(base, &used, c->gives_loss && a.loss, rows, 4);
    w.z = (float *)lk_lce_take(base, &used, c->gives_loss && a.z_loss_out && a.z_loss > 0.0f, rows, 4);
    w.lse = (float *)lk_lce_take(base, &used, true, rows, 4);
    w.others = (float *)lk_lce_take(base, &used, panels, rows, 4);
    w.states = (lk_ce_row *)lk_lce_take(base, &used, panels, chunk, sizeof *w.states);
    w.logit = (float *)lk_lce_take(base, &used, fused, rows, 4);
    w.scale = (float *)lk_lce_take(base, &used, fused && c->gradient, chunk, 4);
    w.bias = lk_lce_take(base, &used, a.bias, a.vocab, (size_t)lk_lce_type_bytes(fused ? LK_DTYPE_F32 : c->logits_type));
    w.class_weight = (float *)lk_lce_take(base, &used, a.class_weight && mean && a.z_loss > 0.0f, a.vocab, 4);
    w.dbias = (float *)lk_lce_take(base, &used, a.dbias, w.splits * a.vocab, 4);
    w.x = lk_lce_take(base, &used, c->compact, chunk * w.x_stride, (size_t)lk_lce_type_bytes(c->type));
    w.sample = (lk_lce_sums *)lk_lce_take(base, &used, fused && c->gradient, c->compact ? chunk : rows, sizeof *w.sample);
    size_t instead = used; /* v x, when the factors are made and what they are made of is done with */
    w.parts = (lk_lce_sums *)lk_lce_take(base, &used, fused, chunk * lk_ceil_div(a.vocab, panel), sizeof *w.parts);
    w.references = (float *)lk_lce_take(base, &used, fused && c->gradient, chunk * lk_ceil_div(a.vocab, LK_GEMM_COLS), 4);
    if (fused && a.dweight && !c->compact) w.x = lk_lce_take(base, &instead, true, chunk * w.x_stride, 2);
    used = used > instead ? used : instead;
    const bool sums_dx = lk_lce_sums_dx(c, path), sums_dweight = lk_lce_sums_dweight(c, chunk);
    const int64_t tiles = lk_ceil_div(a.vocab, 2 * LK_GEMM_ROWS) * lk_ceil_div(a.hidden, LK_GEMM_COLS); /* pairs of them */
    w.dx = (float *)lk_lce_take(base, &used, a.dx && sums_dx, chunk * a.hidden, 4);
    w.dweight = (float *)lk_lce_take(base, &used, sums_dweight && !fused, dweight_rows * a.hidden, 4);
    w.low = (int8_t *)lk_lce_take(base, &used, sums_dweight && fused, tiles, 2 * LK_GEMM_ROWS * LK_GEMM_COLS);
    if (slice > chunk) slice = chunk;
    const int64_t logit_bytes = lk_lce_type_bytes(slice || fused ? c->type : c->logits_type);
    const int64_t lent = slice ? lk_lce_lent(c, chunk) : 0;
    w.logits = lk_lce_take(base, &used, !fused || c->gradient, chunk * w.logits_stride, (size_t)logit_bytes);
    w.slice = (float *)lk_lce_take(base, &used, slice > lent, slice * w.logits_stride, 4);
    if (slice && slice <= lent) w.slice = (float *)a.dweight;
    w.cublas = base + used, w.bytes = used + 256;
    return w;
}

/* How long a matmul takes, in microseconds of an H200: waves of its 128 x 256 tiles or its bytes, whichever is longer, a tenth
 * of the other, and a launch. What plans are compared by, no more. whole: waves are; else a part of one is a part of its time,
 * as it is about where cuBLASLt finds tiles that fit. */
LK_HOST double lk_lce_matmul_cost(const lk_lce_call *c, bool whole, int64_t m, int64_t n, int64_t k, double bytes_out)
{
    const double tiles = (double)lk_ceil_div(m, 128) * (double)lk_ceil_div(n, 256);
    const double waves = whole ? ceil(tiles / 132.0) : tiles / 132.0;
    const double rate = c->type == LK_DTYPE_F32 ? (c->a.tf32 ? 350e6 : 45e6) : 700e6;
    const double sums = waves * 132.0 * 128.0 * 256.0 * 2.0 * (double)k / rate;
    const double bytes = ((double)(m + n) * (double)k * lk_lce_type_bytes(c->type) + (double)m * (double)n * bytes_out) / 4e6;
    return fmax(sums, bytes) + 0.1 * fmin(sums, bytes) + 3.0;
}

/* whole: so are chunks. Fused, the tile that is looked at first takes 45 us with hidden 4096, and what is done to an element of
 * x 5 ps, which is as much as leaves 16384 columns to kept logits, whose dZ is rounded once less: in the bench, of the matmuls'
 * speed, 0.941 with f32 dweight, 0.973 with bf16 and 0.969 with that and weights of 1, where FUSED by itself, in another run,
 * came to 0.945, 0.965 and 0.938; dx by itself has whole waves, and where sums of 24 bits are read and written, nothing is
 * multiplied. */
LK_HOST double lk_lce_cost(const lk_lce_call *c, bool whole, int path, int64_t chunk, int64_t panel, int64_t slice)
{
    const lk_lce_args &a = c->a;
    const bool fused = path == LK_LINEAR_CROSS_ENTROPY_FUSED, twice = path == LK_LINEAR_CROSS_ENTROPY_PANELS_TWICE;
    const bool panels = twice || path == LK_LINEAR_CROSS_ENTROPY_PANELS;
    const double each = (double)chunk * (double)panel, logit = lk_lce_type_bytes(fused ? c->type : c->logits_type);
    const double slices = slice ? (double)lk_ceil_div(chunk, slice) : 1.0;
    const int64_t rows = slice ? lk_lce_min(slice, chunk) : chunk;
    const double logits = slices * lk_lce_matmul_cost(c, whole, panel, rows, a.hidden, logit);
    const double rate = panels ? fmin(4e6, 2e3 * (double)chunk) : 4e6; /* a warp to a row of panels: a few rows are slow */
    const bool sums = lk_lce_sums_dweight(c, chunk);
    const double copy = fused && a.dweight ? 5e-6 * (double)chunk * (double)a.hidden : 0.0;
    const double pass = fused ? copy + 9.0 : each * 1.5 * logit / rate + 3.0 * slices;
    const double dx_bytes = panels || lk_lce_sums_dx(c, path) ? 8.0 : 2.0;
    const double dx = a.dx ? lk_lce_matmul_cost(c, whole || (fused && !sums), a.hidden, chunk, panel, dx_bytes) : 0.0;
    const double sum = fused && sums ? 0.0 : a.dweight_dtype == LK_DTYPE_F32 || sums ? 8.0 : 2.0;
    const double dweight = a.dweight ? lk_lce_matmul_cost(c, whole, a.hidden, panel, chunk, sum) : 0.0;
    double cost = logits + pass + dx + dweight + (fused && sums ? (double)panel * (double)a.hidden * 6.0 / 4e6 : 0.0);
    if (panels && c->gradient) cost += logits + pass;
    if (twice && a.dx && (a.dweight || a.dbias)) cost += logits + pass;
    const double chunks = whole ? (double)lk_ceil_div(c->rows, chunk) : (double)c->rows / (double)chunk;
    return cost * chunks * (double)lk_ceil_div(a.vocab, panel) + (fused ? 0.011 * (double)a.hidden : 0.0);
}

/* The most tokens a chunk may have within `bytes`, or 0: all of them, else a multiple of 128, fused of 256, that makes the
 * chunks about equal, or fewer than that. */
LK_HOST int64_t lk_lce_chunk(const lk_lce_call *c, int path, int64_t panel, int64_t slice, size_t bytes)
{
    if (c->a.chunk_tokens)
        return lk_lce_lay_out(c, path, c->a.chunk_tokens, panel, slice, NULL).bytes <= bytes ? c->a.chunk_tokens : 0;
    if (lk_lce_lay_out(c, path, c->rows, panel, slice, NULL).bytes <= bytes) return c->rows;
    if (c->rows == 1) return 0;
    int64_t low = 0, high = c->rows; /* low fits, high does not */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (lk_lce_lay_out(c, path, middle, panel, slice, NULL).bytes <= bytes) low = middle;
        else high = middle;
    }
    const int64_t whole = path == LK_LINEAR_CROSS_ENTROPY_FUSED ? 2 * LK_GEMM_ROWS : 128;
    if (low < whole) return low;
    return lk_lce_round_up(lk_ceil_div(c->rows, lk_ceil_div(c->rows, low / whole * whole)), whole);
}

/* About equal slices of these rows, none longer than `most`. */
LK_HOST int64_t lk_lce_equal(int64_t rows, int64_t most)
{
    return lk_lce_min(lk_lce_round_up(lk_ceil_div(rows, lk_ceil_div(rows, most)), 128), most);
}

/* The at-th length of slices to try, 0: none, -1: there is no such. Lengths are those that dweight has room for, and a few. */
LK_HOST int64_t lk_lce_slice(const lk_lce_call *c, int path, int at)
{
    if (!lk_lce_slices(c, path) || c->a.slice_tokens) return at ? -1 : lk_lce_slices(c, path) ? c->a.slice_tokens : 0;
    const int64_t lent = lk_lce_lent(c, c->rows) / 128 * 128, lengths[] = {0, 2048, 4096, lent ? lent : 2048};
    if (at >= 4) return -1;
    return lengths[at] ? lk_lce_equal(c->rows, lengths[at]) : 0;
}

/* Panels of about equal width, in multiples of 128. */
LK_HOST int64_t lk_lce_panel_of(const lk_lce_call *c, int64_t panels)
{
    return lk_lce_min(lk_lce_round_up(lk_ceil_div(c->a.vocab, panels), 128), c->a.vocab);
}

/* The columns of a run of a chunk within `bytes`, for the fewest rounds of an H200's 66 clusters and then the fewest runs; all
 * of them where nothing less fits. */
LK_HOST int64_t lk_lce_run_cols(const lk_lce_call *c, int64_t chunk, size_t bytes)
{
    const int64_t pairs = lk_ceil_div(chunk, 2 * LK_GEMM_ROWS), tiles = lk_ceil_div(c->a.vocab, LK_GEMM_COLS);
    if (c->a.panel_vocab) return lk_lce_round_up(c->a.panel_vocab, LK_GEMM_COLS);
    int64_t best = tiles;
    double least = (double)lk_ceil_div(pairs, 66) * ((double)tiles + 0.01);
    for (int64_t run = tiles; run > 1;) {
        run = lk_ceil_div(run, 2);
        const int64_t items = pairs * lk_ceil_div(tiles, run);
        const double time = (double)lk_ceil_div(items, 66) * ((double)run + 0.01); /* a run ends with a merge of lanes */
        const size_t wanted = lk_lce_lay_out(c, LK_LINEAR_CROSS_ENTROPY_FUSED, chunk, run * LK_GEMM_COLS, 0, NULL).bytes;
        if (wanted <= bytes && time < 0.995 * least && items < 1 << 30) best = run, least = time;
    }
    return best * LK_GEMM_COLS;
}

/* What is set aside for cuBLASLt: fused, nothing where it has no product. */
LK_HOST size_t lk_lce_cublas_share(const lk_lce_call *c, int path, size_t budget)
{
    const lk_lce_args &a = c->a;
    const bool fused = path == LK_LINEAR_CROSS_ENTROPY_FUSED;
    const size_t most = fused ? LK_LCE_CUBLAS_BYTES / 4 : LK_LCE_CUBLAS_BYTES; /* fused, more could be one more chunk */
    const size_t share = budget / 10 < most ? budget / 10 / 256 * 256 : most;
    if (fused && (!c->gradient || !a.dweight)) return 0;
    if (fused && a.dweight_dtype != LK_DTYPE_F32) { /* its product in one chunk */
        const int64_t chunk = a.chunk_tokens ? a.chunk_tokens : c->rows, run = lk_lce_run_cols(c, chunk, 0);
        if (chunk < c->rows || lk_lce_lay_out(c, path, chunk, run, 0, NULL).bytes + share > budget) return 0;
    }
    return share;
}

/* The smallest budget: that of the leanest plan which the choice below would find, wherever tensors lie that the call does not
 * give. */
LK_HOST size_t lk_lce_minimum(const lk_lce_call *c)
{
    const lk_lce_args &a = c->a;
    size_t least = SIZE_MAX;
    if (c->rows == 0) return 0;
    for (int path = LK_LINEAR_CROSS_ENTROPY_CHUNKS; path <= LK_LINEAR_CROSS_ENTROPY_FUSED; path++) {
        const bool fused = path == LK_LINEAR_CROSS_ENTROPY_FUSED, undivided = fused && !c->gradient;
        if (fused ? !c->fused || (c->open && !a.path) : a.path && a.path != path) continue;
        const int64_t narrow = a.panel_vocab ? a.panel_vocab : lk_lce_panel_of(c, lk_ceil_div(a.vocab, 256));
        const int64_t kept = path == LK_LINEAR_CROSS_ENTROPY_CHUNKS ? a.vocab : narrow;
        const int64_t panel = fused ? lk_lce_run_cols(c, c->rows, 0) : kept;
        const int64_t most = a.chunk_tokens && !undivided ? a.chunk_tokens : c->rows;
        const int64_t few = a.chunk_tokens || undivided ? most : lk_lce_min(c->rows, fused ? 128 : 64);
        const int64_t slice = lk_lce_slice(c, path, 0);
        const size_t part = lk_lce_lay_out(c, path, few, panel, slice, NULL).bytes;
        const size_t all = lk_lce_lay_out(c, path, most, panel, slice, NULL).bytes, bytes = part < all ? part : all;
        size_t budget = bytes;
        for (size_t room; (room = budget - lk_lce_cublas_share(c, path, budget)) < bytes;) budget += bytes - room;
        if (budget < least) least = budget;
    }
    return least;
}

/* The cheapest plan that keeps logits within so many bytes, cuBLASLt's not among them: its path, its lengths and its bytes.
 * Without one its path is 0. */
LK_HOST void lk_lce_search_kept(const lk_lce_call *c, size_t room, lk_linear_cross_entropy_plan *plan)
{
    const int64_t vocab = c->a.vocab;
    double best = INFINITY;
    int64_t slice = lk_lce_slice(c, LK_LINEAR_CROSS_ENTROPY_CHUNKS, 0);
    if (c->a.path <= LK_LINEAR_CROSS_ENTROPY_CHUNKS &&
        lk_lce_chunk(c, LK_LINEAR_CROSS_ENTROPY_CHUNKS, vocab, slice, room) == c->rows)
        best = 0.0, plan->path = LK_LINEAR_CROSS_ENTROPY_CHUNKS, plan->chunk_tokens = c->rows, plan->panel_vocab = vocab;
    for (int path = LK_LINEAR_CROSS_ENTROPY_CHUNKS; path <= LK_LINEAR_CROSS_ENTROPY_PANELS_TWICE && best > 0.0; path++) {
        if (c->a.path && c->a.path != path) continue;
        const int64_t most = path == LK_LINEAR_CROSS_ENTROPY_CHUNKS || c->a.panel_vocab ? 1 : lk_ceil_div(vocab, 256);
        for (int64_t panels = 1; panels <= most;) {
            const int64_t narrow = c->a.panel_vocab ? c->a.panel_vocab : lk_lce_panel_of(c, panels);
            const int64_t panel = path == LK_LINEAR_CROSS_ENTROPY_CHUNKS ? vocab : narrow;
            for (int at = 0; lk_lce_slice(c, path, at) >= 0; at++) {
                const int64_t some = lk_lce_slice(c, path, at), chunk = lk_lce_chunk(c, path, panel, some, room);
                const double cost = chunk ? lk_lce_cost(c, true, path, chunk, panel, some) : INFINITY;
                const bool room_for_more = some && chunk < c->rows && some > lk_lce_lent(c, chunk); /* tokens in their place */
                if (!(cost < best) || (room_for_more && !c->a.slice_tokens)) continue;
                best = cost, plan->path = path, plan->chunk_tokens = chunk, plan->panel_vocab = panel, slice = some;
            }
            const int64_t next = panels + 1 + panels / 8; /* the last is always tried */
            panels = panels < most && next > most ? most : next;
        }
    }
    if (!plan->path) return;
    if (slice && !c->a.slice_tokens) slice = lk_lce_equal(plan->chunk_tokens, slice);
    plan->slice_tokens = lk_lce_min(slice, plan->chunk_tokens);
    plan->workspace_bytes = lk_lce_lay_out(c, plan->path, plan->chunk_tokens, plan->panel_vocab, slice, NULL).bytes;
}

/* The cheapest plan within the budget, as above. Fused and not, they are of unlike chunks, so that a whole wave or chunk more
 * would say little. */
LK_HOST void lk_lce_search(const lk_lce_call *c, size_t budget, lk_linear_cross_entropy_plan *plan)
{
    const int path = LK_LINEAR_CROSS_ENTROPY_FUSED;
    lk_linear_cross_entropy_plan fused = {};
    *plan = {};
    if (c->fused) {
        const size_t room = budget - lk_lce_cublas_share(c, path, budget);
        const int64_t chunk = c->gradient ? lk_lce_chunk(c, path, lk_lce_run_cols(c, c->rows, 0), 0, room) : c->rows;
        fused.chunk_tokens = chunk, fused.panel_vocab = lk_lce_run_cols(c, chunk, room);
        fused.workspace_bytes = lk_lce_lay_out(c, path, chunk, fused.panel_vocab, 0, NULL).bytes;
        fused.path = chunk && fused.workspace_bytes <= room ? path : 0;
    }
    const bool only = fused.path && (!c->gradient || c->a.path == path);
    if (!only) lk_lce_search_kept(c, budget - lk_lce_cublas_share(c, LK_LINEAR_CROSS_ENTROPY_CHUNKS, budget), plan);
    if (fused.path && plan->path) { /* kept logits' last columns are products of their own: 30 ns a token on an H200 */
        const double apart = lk_lce_apart(c, c->a.vocab) ? 0.03 * (double)c->rows : 0.0;
        const double cost = lk_lce_cost(c, false, plan->path, plan->chunk_tokens, plan->panel_vocab, plan->slice_tokens);
        if (cost + apart <= lk_lce_cost(c, false, path, fused.chunk_tokens, c->a.vocab, 0)) return;
    }
    if (fused.path) *plan = fused;
}

/* The plan within the budget, which is at least `least`. Plans leave a part of it unused, and fewer bytes may have another one:
 * the plan is one that the bytes it says have too. */
LK_HOST void lk_lce_choose(const lk_lce_call *c, size_t least, size_t budget, lk_linear_cross_entropy_plan *plan)
{
    static const char *const sums[] = {"", ", dweight summed in the caller's f32", ", dweight summed in f32 of the workspace",
                                       ", dweight summed in 24 bits"};
    const int64_t vocab = c->a.vocab;
    *plan = {};
    if (c->rows == 0) {
        snprintf(plan->text, sizeof plan->text, "no tokens, no workspace");
        return;
    }
    bool fused = false, added = false; /* fused, dweight is cuBLASLt's */
    for (size_t before = 0; before != budget;) {
        before = budget;
        lk_lce_search(c, budget, plan);
        fused = plan->path == LK_LINEAR_CROSS_ENTROPY_FUSED;
        const size_t left = budget - plan->workspace_bytes;
        plan->cublas_bytes = left < LK_LCE_CUBLAS_BYTES ? left / 256 * 256 : LK_LCE_CUBLAS_BYTES;
        added = c->a.dweight && !lk_lce_sums_dweight(c, plan->chunk_tokens);
        if (fused && !added) plan->cublas_bytes = 0;
        plan->workspace_bytes += plan->cublas_bytes;
        budget = plan->workspace_bytes = plan->workspace_bytes < least ? least : plan->workspace_bytes;
    }
    plan->minimum_bytes = least;
    const lk_lce_pieces w = lk_lce_lay_out(c, plan->path, plan->chunk_tokens, plan->panel_vocab, plan->slice_tokens, NULL);
    plan->chunks = lk_ceil_div(c->rows, plan->chunk_tokens), plan->panels = lk_ceil_div(vocab, plan->panel_vocab);
    const int gradients = (c->a.dx != NULL) + (c->a.dweight != NULL);
    plan->matmuls = 1 + gradients;
    if (plan->path != LK_LINEAR_CROSS_ENTROPY_CHUNKS && c->gradient && !fused) plan->matmuls++;
    if (plan->path == LK_LINEAR_CROSS_ENTROPY_PANELS_TWICE && c->a.dx && (c->a.dweight || c->a.dbias)) plan->matmuls++;
    plan->exact = fused || c->logits_type == LK_DTYPE_F32; /* as the sums of tensor cores are */
    const int sum = !c->a.dweight || plan->chunks == 1 ? 0 : !lk_lce_sums_dweight(c, plan->chunk_tokens) ? 1 : fused ? 3 : 2;
    const char *const kept = fused ? c->gradient ? "bf16 exponentials of" : "no kept" : plan->exact ? "f32" : "16-bit";
    const int apart = fused && !added ? 0 : (int)lk_lce_apart(c, vocab - (plan->panels - 1) * plan->panel_vocab);
    char last[40] = "", part[60] = "";
    if (w.slice)
        snprintf(part, sizeof part, " of %lld tokens at a time%s", (long long)plan->slice_tokens,
                 (void *)w.slice == c->a.dweight ? " in dweight" : "");
    if (apart) snprintf(last, sizeof last, ", the last %d columns apart", apart);
    snprintf(plan->text, sizeof plan->text, "%lld x %lld tokens, %lld x %lld columns, %s logits%s%s, %d matmuls%s: %s%s%s",
             (long long)plan->chunks, (long long)plan->chunk_tokens, (long long)plan->panels, (long long)plan->panel_vocab,
             kept, part, sums[sum], plan->matmuls, apart == 1 ? ", the last column apart" : last,
             plan->exact ? "exact" : "fast", c->note[0] ? "; FUSED, for sm_90a, is left out" : "", c->note);
}

/* ---- Checks ---------------------------------------------------------------------------------------------------------- */

LK_HOST lk_status lk_lce_check_range(const char *op, const char *field, int64_t value, int64_t least, int64_t most)
{
    if (value >= least && value <= most) return LK_OK;
    return lk_fail(LK_ERR_SHAPE, op, "%s is %lld; it must be %lld to %lld", field, (long long)value, (long long)least,
                   (long long)most);
}
/* Fills in T; the field is `name`_dtype. */
LK_HOST lk_status lk_lce_check_type(const char *op, const char *name, int own, int *type)
{
    if (*type == LK_DTYPE_T) *type = own;
    if (*type == own || *type == LK_DTYPE_F32) return LK_OK;
    return lk_fail(LK_ERR_VALUE, op, "%s_dtype is %d; it must be T or f32", name, *type);
}

/* The fields that all directions have. */
template <class Args> LK_HOST void lk_lce_copy(lk_lce_args *a, const Args *from)
{
    a->context = from->context, a->x = from->x, a->weight = from->weight, a->bias = from->bias, a->target = from->target;
    a->class_weight = from->class_weight, a->bad_targets = from->bad_targets;
    a->workspace = from->workspace, a->workspace_bytes = from->workspace_bytes;
    a->tokens = from->tokens, a->hidden = from->hidden, a->vocab = from->vocab;
    a->x_stride = from->x_stride, a->weight_stride = from->weight_stride;
    a->ignore_index = from->ignore_index, a->max_counted = from->max_counted;
    a->chunk_tokens = from->chunk_tokens, a->panel_vocab = from->panel_vocab;
    a->logit_scale = from->logit_scale, a->softcap = from->softcap, a->label_smoothing = from->label_smoothing;
    a->z_loss = from->z_loss, a->use_ignore_index = from->use_ignore_index, a->reduction = from->reduction;
    a->target_dtype = from->target_dtype, a->bias_dtype = from->bias_dtype, a->fast_logits = from->fast_logits;
    a->tf32 = from->tf32, a->path = from->path;
}
LK_HOST lk_lce_call lk_lce_call_of(const lk_linear_cross_entropy_forward_args *args)
{
    lk_lce_call c = {};
    c.gives_loss = true;
    if (!args) return c;
    lk_lce_copy(&c.a, args);
    c.a.loss = args->loss, c.a.z_loss_out = args->z_loss_out, c.a.lse = args->lse;
    c.a.valid_rows = args->valid_rows, c.a.weight_sum = args->weight_sum, c.a.zero_when_empty = args->zero_when_empty;
    return c;
}
LK_HOST lk_lce_call lk_lce_call_of(const lk_lce_args *args)
{
    lk_lce_call c = {};
    c.gives_loss = true;
    if (args) c.a = *args, c.gradient = args->dx || args->dweight || args->dbias;
    return c;
}
LK_HOST lk_lce_call lk_lce_call_of(const lk_linear_cross_entropy_backward_args *args)
{
    lk_lce_call c = {};
    c.gradient = true;
    if (!args) return c;
    lk_lce_copy(&c.a, args);
    c.saved_lse = args->lse, c.a.upstream = args->upstream, c.a.dlse = args->dlse;
    c.a.dx = args->dx, c.a.dweight = args->dweight, c.a.dbias = args->dbias;
    c.a.dx_stride = args->dx_stride, c.a.dweight_stride = args->dweight_stride, c.a.slice_tokens = args->slice_tokens;
    c.a.upstream_per_token = args->upstream_per_token, c.a.accumulate = args->accumulate;
    c.a.dweight_dtype = args->dweight_dtype, c.a.dbias_dtype = args->dbias_dtype;
    return c;
}

/* What the fused path is for, where that is not this call; NULL: it is. */
LK_HOST const char *lk_lce_not_fused(lk_lce_call *c)
{
    const lk_lce_args &a = c->a;
    const int64_t longest = (int64_t)1 << 38; /* a tensor map's strides are below 2^40 bytes */
    const bool weight = (uintptr_t)a.weight % 16 == 0 && a.weight_stride % 8 == 0 && a.weight_stride <= longest;
    const bool x = c->compact || ((uintptr_t)a.x % 16 == 0 && a.x_stride % 8 == 0 && a.x_stride <= longest);
    lk_device device = {};
    if (c->type != LK_DTYPE_BF16) return "bf16";
    if (!c->gives_loss) return "forward and forward_backward";
    if (c->gradient && a.label_smoothing > 0.0f) return "gradients without label_smoothing";
    if (c->rows >= 1 << 30) return "fewer than 2^30 tokens";
    if (!x || !weight) return "x and weight at multiples of 16 bytes, with strides of at most 2^38 that are multiples of 8";
    if (c->rows == 0) return NULL;
    const bool clean = cudaPeekAtLastError() == cudaSuccess; /* else an error of the caller's is still to be seen */
    const cudaError_t error = lk_current_device(&device);
    if (!error && lk_gemm_available(&device)) return NULL;
    int id = 0, major = 0;
    if (error == cudaErrorNoKernelImageForDevice) c->note = ": the program has no code for this GPU";
    else if (error) c->note = ": there is no usable CUDA device";
    else if (cudaGetDevice(&id) == cudaSuccess &&
             cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id) == cudaSuccess && major == 9)
        c->note = ": the code that this device runs was not compiled for it";
    if (clean && cudaPeekAtLastError() != cudaSuccess) (void)cudaGetLastError(); /* a query works without a device */
    return "sm_90a";
}

/* Whether each pointer is aligned to its element. */
LK_HOST lk_status lk_lce_check_alignment(const char *op, const lk_lce_call *c, int T_bytes)
{
    const lk_lce_args *const a = &c->a;
    lk_status status = lk_check_aligned(op, "x", a->x, T_bytes);
    if (!status) status = lk_check_aligned(op, "weight", a->weight, T_bytes);
    if (!status) status = lk_check_aligned(op, "bias", a->bias, lk_lce_type_bytes(a->bias_dtype));
    if (!status) status = lk_check_aligned(op, "target", a->target, a->target_dtype == LK_TARGET_INT32 ? 4 : 8);
    const struct {
        const char *name;
        const void *at;
    } words[] = {{"class_weight", a->class_weight}, {"lse", c->saved_lse}, {"upstream", a->upstream}, {"dlse", a->dlse},
                 {"loss", a->loss}, {"z_loss_out", a->z_loss_out}, {"lse", a->lse}, {"weight_sum", a->weight_sum},
                 {"bad_targets", a->bad_targets}};
    for (const auto &word : words)
        if (!status) status = lk_check_aligned(op, word.name, word.at, 4);
    if (!status) status = lk_check_aligned(op, "valid_rows", a->valid_rows, 8);
    if (!status) status = lk_check_aligned(op, "dx", a->dx, T_bytes);
    if (!status) status = lk_check_aligned(op, "dweight", a->dweight, lk_lce_type_bytes(a->dweight_dtype));
    if (!status) status = lk_check_aligned(op, "dbias", a->dbias, lk_lce_type_bytes(a->dbias_dtype));
    return status;
}

/* Validates all but the workspace, fills in the defaults. query: pointers say what is wanted, and may be any. */
template <class T> LK_HOST lk_status lk_lce_check(const char *op, bool query, lk_lce_call *c)
{
    lk_lce_args *const a = &c->a;
    const int own = lk_cross_entropy_dtype<T>;
    lk_status status = LK_OK;
    c->note = "";
    if (!query && a->tokens != 0) {
        status = lk_cross_entropy_check_null(op, "context", a->context);
        if (!status) status = lk_cross_entropy_check_null(op, "x", a->x);
        if (!status) status = lk_cross_entropy_check_null(op, "weight", a->weight);
        if (!status) status = lk_cross_entropy_check_null(op, "target", a->target);
        if (!status && !c->gives_loss) status = lk_cross_entropy_check_null(op, "lse", c->saved_lse);
        const bool loss = a->loss || a->z_loss_out || a->lse || a->valid_rows || a->weight_sum || a->bad_targets;
        const bool any = (c->gives_loss && loss) || a->dx || a->dweight || a->dbias;
        if (!status && !any) status = lk_fail(LK_ERR_NULL, op, "every output is NULL");
    }
    if (!status) status = lk_lce_check_range(op, "tokens", a->tokens, 0, INT32_MAX);
    if (!status) status = lk_lce_check_range(op, "hidden", a->hidden, 1, 1 << 30);
    if (!status) status = lk_lce_check_range(op, "vocab", a->vocab, 1, 1 << 30);
    if (!status) status = lk_cross_entropy_check_stride(op, "x", a->tokens, "hidden", a->hidden, &a->x_stride);
    if (!status) status = lk_cross_entropy_check_stride(op, "weight", a->vocab, "hidden", a->hidden, &a->weight_stride);
    if (!status) status = lk_cross_entropy_check_stride(op, "dx", a->tokens, "hidden", a->hidden, &a->dx_stride);
    if (!status) status = lk_cross_entropy_check_stride(op, "dweight", a->vocab, "hidden", a->hidden, &a->dweight_stride);
    if (!status) status = lk_lce_check_range(op, "max_counted", a->max_counted, 0, INT64_MAX);
    if (!status) status = lk_lce_check_range(op, "chunk_tokens", a->chunk_tokens, 0, INT64_MAX);
    if (!status) status = lk_lce_check_range(op, "panel_vocab", a->panel_vocab, 0, INT64_MAX);
    if (!status) status = lk_lce_check_range(op, "slice_tokens", a->slice_tokens, 0, INT64_MAX);
    if (!status) status = lk_cross_entropy_check_values(op, a);
    if (!status) status = lk_lce_check_type(op, "bias", own, &a->bias_dtype);
    if (!status) status = lk_lce_check_type(op, "dweight", own, &a->dweight_dtype);
    if (!status) status = lk_lce_check_type(op, "dbias", own, &a->dbias_dtype);
    if (status) return status;
    if (a->path < LK_LINEAR_CROSS_ENTROPY_AUTO || a->path > LK_LINEAR_CROSS_ENTROPY_FUSED)
        return lk_fail(LK_ERR_VALUE, op, "path is %d; it must be one of LK_LINEAR_CROSS_ENTROPY_*", a->path);
    if (!query && a->tokens != 0) {
        const lk_lce_context *const context = (const lk_lce_context *)a->context;
        int device = -1;
        if (context->magic != LK_LCE_MAGIC) return lk_fail(LK_ERR_VALUE, op, "context is not one that init has made");
        const cudaError_t error = cudaGetDevice(&device);
        if (error) return lk_asked_device(op, error);
        if (device != context->device)
            return lk_fail(LK_ERR_VALUE, op, "context is of device %d; the current one is %d", context->device, device);
    }
    if (!query) status = lk_lce_check_alignment(op, c, (int)sizeof(T));
    if (a->logit_scale == 0.0f) a->logit_scale = 1.0f;
    c->type = own, c->logits_type = a->fast_logits ? own : LK_DTYPE_F32;
    c->compact = a->max_counted > 0 && a->max_counted < a->tokens;
    c->rows = c->compact ? a->max_counted : a->tokens;
    c->open = query && (!a->weight || (!a->x && !c->compact));
    const bool lengths = a->chunk_tokens || a->panel_vocab || a->slice_tokens; /* they are those of kept logits */
    c->fused = a->path == LK_LINEAR_CROSS_ENTROPY_FUSED || (a->path == LK_LINEAR_CROSS_ENTROPY_AUTO && !lengths);
    const char *const only = c->fused && !status ? lk_lce_not_fused(c) : NULL;
    if (only && a->path)
        status = lk_fail(LK_ERR_PATH, op, "path LK_LINEAR_CROSS_ENTROPY_FUSED is for %s%s", only, c->note);
    if (only) c->fused = false;
    a->chunk_tokens = lk_lce_min(a->chunk_tokens, c->rows), a->slice_tokens = lk_lce_min(a->slice_tokens, c->rows);
    a->panel_vocab = lk_lce_min(lk_lce_round_up(lk_lce_min(a->panel_vocab, a->vocab), 16), a->vocab); /* for bias's alignment */
    return status;
}

/* ---- Matmuls --------------------------------------------------------------------------------------------------------- */

/* RESOLVE launches nothing: it only sees to it that every matmul of the call has its algorithm. */
enum { LK_LCE_RESOLVE, LK_LCE_LAUNCH, LK_LCE_TUNE };

typedef struct {
    const char *op;
    cudaStream_t stream;
    lk_device device;
    lk_lce_context *context;
    lk_lce_work p;
    lk_linear_cross_entropy_plan plan;
    int mode;
} lk_lce_run;

/* D = A B (+ D), in cuBLASLt's terms. */
typedef struct {
    lk_lce_key key;
    const void *a, *b, *bias;
    void *d;
    bool add;
} lk_lce_product;

/* The same in cuBLASLt's structs. */
typedef struct {
    cublasLtMatmulDescOpaque_t matmul;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulPreferenceOpaque_t preference;
} lk_lce_described;

LK_HOST cudaDataType_t lk_lce_cuda_type(int type)
{
    return type == LK_DTYPE_F32 ? CUDA_R_32F : type == LK_DTYPE_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

LK_HOST int32_t lk_lce_alignment(const void *pointer)
{
    int32_t bytes = 256; /* the most that cuBLASLt asks about */
    while ((uintptr_t)pointer % (uintptr_t)bytes) bytes /= 2;
    return bytes;
}

LK_HOST cublasStatus_t lk_lce_describe(const lk_lce_product *m, lk_lce_described *s)
{
    const lk_lce_key *k = &m->key;
    const cudaDataType_t factor = lk_lce_cuda_type(k->factor_type), type = lk_lce_cuda_type(k->type);
    const int32_t mode = k->scalars_on_device ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
    const int32_t transpose_a = k->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t transpose_b = k->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS, sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t align_a = (uint32_t)k->align_a, align_b = (uint32_t)k->align_b, align_d = (uint32_t)k->align_d;
    const uint64_t workspace = (uint64_t)k->workspace_bytes, um = (uint64_t)k->m, un = (uint64_t)k->n, uk = (uint64_t)k->k;
    const cublasComputeType_t compute = k->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasStatus_t status = cublasLtMatmulDescInit(&s->matmul, compute, CUDA_R_32F);
#define SET(what, value)                                                                                                       \
    if (!status) status = cublasLtMatmulDescSetAttribute(&s->matmul, CUBLASLT_MATMUL_DESC_##what, &value, sizeof value)
#define PREFER(what, value)                                                                                                    \
    if (!status)                                                                                                               \
    status = cublasLtMatmulPreferenceSetAttribute(&s->preference, CUBLASLT_MATMUL_PREF_##what, &value, sizeof value)
    SET(POINTER_MODE, mode);
    SET(TRANSA, transpose_a);
    SET(TRANSB, transpose_b);
    if (k->bias) {
        SET(EPILOGUE, epilogue);
        SET(BIAS_POINTER, m->bias);
    }
    if (!status) status = cublasLtMatrixLayoutInit(&s->a, factor, k->transpose_a ? uk : um, k->transpose_a ? um : uk, k->lda);
    if (!status) status = cublasLtMatrixLayoutInit(&s->b, factor, k->transpose_b ? un : uk, k->transpose_b ? uk : un, k->ldb);
    if (!status) status = cublasLtMatrixLayoutInit(&s->d, type, um, un, k->ldd);
    if (!status) status = cublasLtMatmulPreferenceInit(&s->preference);
    PREFER(MAX_WORKSPACE_BYTES, workspace);
    PREFER(REDUCTION_SCHEME_MASK, sums); /* parts of a sum are added in float, in a fixed order */
    PREFER(MIN_ALIGNMENT_A_BYTES, align_a);
    PREFER(MIN_ALIGNMENT_B_BYTES, align_b);
    PREFER(MIN_ALIGNMENT_C_BYTES, align_d);
    PREFER(MIN_ALIGNMENT_D_BYTES, align_d);
#undef SET
#undef PREFER
    return status;
}

LK_HOST lk_status lk_lce_multiply(const lk_lce_run *r, const lk_lce_product *m, lk_lce_described *s,
                                  const cublasLtMatmulAlgo_t *algorithm)
{
    const lk_lce_counts *const counts = r->p.w.counts;
    const float one = 1.0f, add = m->add ? 1.0f : 0.0f;
    const bool device = m->key.scalars_on_device;
    const float *const alpha = device ? &counts->alpha : &one;
    const float *const beta = !device ? &add : m->add ? &counts->one : &counts->zero;
    const cublasStatus_t status =
        cublasLtMatmul(r->context->handle, &s->matmul, alpha, m->a, &s->a, m->b, &s->b, beta, m->d, &s->d, m->d, &s->d,
                       algorithm, r->p.w.cublas, (size_t)m->key.workspace_bytes, r->stream);
    return lk_lce_cublas(r->op, "cublasLtMatmul", status);
}

#define LK_LCE_CANDIDATES 8

/* Times the algorithms in turns, so that a clock which the heat lowers is lower for all, after a first turn that is not
 * counted, and puts the one with the least median of 5 first. */
LK_HOST lk_status lk_lce_race(const lk_lce_run *r, const lk_lce_product *m, lk_lce_described *s,
                              cublasLtMatmulHeuristicResult_t *results, int count)
{
    enum { RUNS = 5 };
    cudaEvent_t from = NULL, to = NULL;
    float times[LK_LCE_CANDIDATES][RUNS], best = INFINITY;
    lk_status status = lk_launched(r->op, cudaEventCreate(&from));
    if (!status) status = lk_launched(r->op, cudaEventCreate(&to));
    for (int turn = -1; turn < RUNS; turn++)
        for (int i = 0; i < count && !status; i++) {
            if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
            float time = 0.0f;
            status = lk_launched(r->op, cudaEventRecord(from, r->stream));
            if (!status) status = lk_lce_multiply(r, m, s, &results[i].algo);
            if (!status) status = lk_launched(r->op, cudaEventRecord(to, r->stream));
            if (!status) status = lk_launched(r->op, cudaEventSynchronize(to));
            if (!status) status = lk_launched(r->op, cudaEventElapsedTime(&time, from, to));
            int at = turn; /* sorted */
            for (; at > 0 && time < times[i][at - 1]; at--) times[i][at] = times[i][at - 1];
            if (at >= 0) times[i][at] = time;
        }
    int winner = 0;
    for (int i = 0; i < count && !status; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS && times[i][RUNS / 2] < best) best = times[i][RUNS / 2], winner = i;
    if (from) cudaEventDestroy(from);
    if (to) cudaEventDestroy(to);
    results[0] = results[winner];
    return status;
}

/* Runs a matmul with the algorithm that the context holds for it; one that is not there yet is asked for. */
LK_HOST lk_status lk_lce_product_run(lk_lce_run *r, lk_lce_product *m)
{
    lk_lce_context *const c = r->context;
    const bool tune = r->mode == LK_LCE_TUNE;
    m->key.factor_type = r->p.c.type, m->key.bias = m->bias != NULL, m->key.tf32 = r->p.c.type == LK_DTYPE_F32 && r->p.c.a.tf32;
    m->key.align_a = lk_lce_alignment(m->a), m->key.align_b = lk_lce_alignment(m->b), m->key.align_d = lk_lce_alignment(m->d);
    m->key.workspace_bytes = (int64_t)r->plan.cublas_bytes, m->key.add = m->add;
    lk_lce_described s;
    lk_status status = lk_lce_cublas(r->op, "a cublasLt attribute", lk_lce_describe(m, &s));
    int at = 0;
    while (at < c->count && memcmp(&c->choices[at].key, &m->key, sizeof m->key)) at++;
    if (!status && (at == c->count || (tune && !c->choices[at].tuned))) {
        cublasLtMatmulHeuristicResult_t results[LK_LCE_CANDIDATES];
        int count = 0;
        cublasStatus_t found = cublasLtMatmulAlgoGetHeuristic(c->handle, &s.matmul, &s.a, &s.b, &s.d, &s.d, &s.preference,
                                                              tune ? LK_LCE_CANDIDATES : 1, results, &count);
        if (!found && (count == 0 || results[0].state)) found = CUBLAS_STATUS_NOT_SUPPORTED;
        status = lk_lce_cublas(r->op, "cublasLtMatmulAlgoGetHeuristic", found);
        if (!status && tune) status = lk_lce_race(r, m, &s, results, count);
        if (status) return status;
        if (at == c->count && at == LK_LCE_CHOICES) at--; /* a full table: its last place is everybody's */
        if (at == c->count) c->count++;
        c->choices[at] = {m->key, results[0].algo, tune};
    }
    if (status || r->mode == LK_LCE_RESOLVE) return status;
    return lk_lce_multiply(r, m, &s, &c->choices[at].algorithm);
}

/* A product that has columns of the vocabulary in one of its sizes: the last ones by themselves, first, for where they are a
 * part of a sum of bf16 it is theirs that is rounded once more. */
LK_HOST lk_status lk_lce_product_columns(lk_lce_run *r, lk_lce_product *m, int64_t lk_lce_key::*cols)
{
    const bool rows_of_d = cols == &lk_lce_key::m, cols_of_d = cols == &lk_lce_key::n;
    const int64_t bytes = lk_lce_type_bytes(r->p.c.type), bytes_out = lk_lce_type_bytes(m->key.type);
    const int64_t apart = lk_lce_apart(&r->p.c, m->key.*cols), others = m->key.*cols - apart;
    if (!apart) return lk_lce_product_run(r, m);
    lk_lce_product last = *m;
    last.key.*cols = apart, m->key.*cols = others;
    if (!cols_of_d) last.a = (const char *)m->a + others * m->key.lda * bytes;
    if (!rows_of_d) last.b = (const char *)m->b + others * bytes;
    if (rows_of_d || cols_of_d) last.d = (char *)m->d + others * (cols_of_d ? m->key.ldd : 1) * bytes_out;
    else m->add = 1;
    if (m->bias) last.bias = (const char *)m->bias + others * bytes_out;
    const lk_status status = lk_lce_product_run(r, &last);
    return status ? status : lk_lce_product_run(r, m);
}

/* ---- The steps of a call --------------------------------------------------------------------------------------------- */

template <class Args> LK_HOST lk_status lk_lce_launch(const lk_lce_run *r, void (*kernel)(Args), int64_t grid, const Args &args)
{
    if (r->mode == LK_LCE_RESOLVE) return LK_OK;
    return lk_launch_pdl(r->op, &r->device, kernel, grid, 1, LK_LCE_THREADS, 0, r->stream, args);
}

/* Clusters of a kernel of tiles, of two blocks each: one for each two SMs. */
LK_HOST int64_t lk_lce_clusters(const lk_lce_run *r, int64_t items)
{
    return lk_lce_min(items, r->device.sms / 2 > 0 ? r->device.sms / 2 : 1);
}
template <class Args>
LK_HOST lk_status lk_lce_launch_tiles(const lk_lce_run *r, void (*kernel)(Args), int64_t items, const Args &p)
{
    if (r->mode == LK_LCE_RESOLVE) return LK_OK;
    return lk_launch_pdl(r->op, &r->device, kernel, 2 * lk_lce_clusters(r, items), 2, LK_GEMM_THREADS, sizeof(lk_gemm_memory),
                         r->stream, p);
}

template <class S, class D>
LK_HOST lk_status lk_lce_move_rows(const lk_lce_run *r, const lk_lce_move &move)
{
    return lk_lce_launch(r, lk_lce_move_kernel<S, D>, move.rows * lk_ceil_div(move.cols, LK_LCE_TILE), move);
}

/* Elements between rows of dZ: 16-bit dZ in the place of f32 logits has rows of twice as many. */
LK_HOST int64_t lk_lce_dz_stride(const lk_lce_run *r)
{
    if (r->p.w.slice || r->plan.path == LK_LINEAR_CROSS_ENTROPY_FUSED) return r->p.w.logits_stride;
    return r->p.w.logits_stride * lk_lce_type_bytes(r->p.c.logits_type) / lk_lce_type_bytes(r->p.c.type);
}

/* Which row of its chunk the part begins with. */
LK_HOST int64_t lk_lce_in_chunk(const lk_lce_run *r, const lk_lce_panel &q)
{
    return q.first_row % r->plan.chunk_tokens;
}

/* x of a chunk, gathered where rows are compacted. */
template <class T> LK_HOST lk_status lk_lce_gather(const lk_lce_run *r, const lk_lce_panel &q)
{
    const lk_lce_pieces &w = r->p.w;
    if (!r->p.c.compact) return LK_OK;
    return lk_lce_move_rows<T, T>(r, {r->p.c.a.x, w.x, w.token + q.first_row, NULL, q.rows, r->p.c.a.hidden, r->p.c.a.x_stride,
                                      w.x_stride, 0, NULL});
}
template <class T> LK_HOST const void *lk_lce_x(const lk_lce_run *r, const lk_lce_panel &q)
{
    const lk_lce_pieces &w = r->p.w;
    return r->p.c.compact ? (const T *)w.x + lk_lce_in_chunk(r, q) * w.x_stride
                          : (const T *)r->p.c.a.x + q.first_row * r->p.c.a.x_stride;
}
LK_HOST int64_t lk_lce_x_stride(const lk_lce_run *r)
{
    return r->p.c.compact ? r->p.w.x_stride : r->p.c.a.x_stride;
}

template <class T> LK_HOST lk_status lk_lce_logits(lk_lce_run *r, const lk_lce_panel &q)
{
    const lk_lce_args &a = r->p.c.a;
    lk_lce_product m = {};
    m.key.type = r->p.c.logits_type, m.key.transpose_a = 1;
    m.key.m = q.cols, m.key.n = q.rows, m.key.k = a.hidden;
    m.key.lda = a.weight_stride, m.key.ldb = lk_lce_x_stride(r), m.key.ldd = r->p.w.logits_stride;
    m.a = (const T *)a.weight + q.first_col * a.weight_stride, m.b = lk_lce_x<T>(r, q);
    m.d = r->p.w.slice ? (void *)r->p.w.slice : r->p.w.logits;
    if (a.bias) m.bias = (const char *)r->p.w.bias + q.first_col * lk_lce_type_bytes(r->p.c.logits_type);
    return lk_lce_product_columns(r, &m, &lk_lce_key::m);
}

/* The chunk's dx, or a panel's part of it. */
template <class T> LK_HOST lk_status lk_lce_dx(lk_lce_run *r, const lk_lce_panel &q)
{
    const lk_lce_args &a = r->p.c.a;
    const lk_lce_pieces &w = r->p.w;
    lk_lce_product m = {};
    m.key.type = w.dx ? LK_DTYPE_F32 : r->p.c.type, m.key.scalars_on_device = r->p.c.type != LK_DTYPE_F32;
    m.key.m = a.hidden, m.key.n = q.rows, m.key.k = q.cols;
    m.key.lda = a.weight_stride, m.key.ldb = lk_lce_dz_stride(r);
    m.key.ldd = w.dx ? a.hidden : r->p.c.compact ? w.x_stride : a.dx_stride;
    m.a = (const T *)a.weight + q.first_col * a.weight_stride, m.b = w.logits;
    m.d = w.dx ? (void *)w.dx : r->p.c.compact ? w.x : (T *)a.dx + q.first_row * a.dx_stride;
    m.add = !q.first;
    return lk_lce_product_columns(r, &m, &lk_lce_key::k);
}

/* dx of a chunk from where it was made to where it belongs. */
template <class T> LK_HOST lk_status lk_lce_put_dx(const lk_lce_run *r, const lk_lce_panel &q)
{
    const lk_lce_args &a = r->p.c.a;
    const lk_lce_pieces &w = r->p.w;
    if (!a.dx || !(w.dx || r->p.c.compact)) return LK_OK;
    T *const to = (T *)a.dx + (r->p.c.compact ? 0 : q.first_row * a.dx_stride);
    const int32_t *const token = r->p.c.compact ? w.token + q.first_row : NULL;
    const lk_lce_move move = {w.dx ? (const void *)w.dx : w.x, to, NULL, token, q.rows, a.hidden,
                              w.dx ? a.hidden : w.x_stride, a.dx_stride, 0, NULL};
    return w.dx ? lk_lce_move_rows<float, T>(r, move) : lk_lce_move_rows<T, T>(r, move);
}

/* A chunk's part of dweight for the panel's columns. */
template <class T> LK_HOST lk_status lk_lce_dweight(lk_lce_run *r, const lk_lce_panel &q)
{
    const lk_lce_args &a = r->p.c.a;
    const lk_lce_pieces &w = r->p.w;
    const int64_t panel_row = r->plan.path == LK_LINEAR_CROSS_ENTROPY_PANELS_TWICE ? 0 : q.first_col; /* one panel's sums */
    const bool fused = r->plan.path == LK_LINEAR_CROSS_ENTROPY_FUSED;
    lk_lce_product m = {};
    m.key.type = w.dweight ? LK_DTYPE_F32 : a.dweight_dtype, m.key.scalars_on_device = r->p.c.type != LK_DTYPE_F32;
    m.key.transpose_b = 1;
    m.key.m = a.hidden, m.key.n = q.cols, m.key.k = q.rows;
    m.key.lda = fused ? w.x_stride : lk_lce_x_stride(r), m.key.ldb = lk_lce_dz_stride(r);
    m.key.ldd = w.dweight ? a.hidden : a.dweight_stride;
    m.a = fused ? w.x : lk_lce_x<T>(r, q), m.b = w.logits;
    m.d = w.dweight ? (void *)(w.dweight + panel_row * a.hidden)
                    : (char *)a.dweight + q.first_col * a.dweight_stride * lk_lce_type_bytes(a.dweight_dtype);
    m.add = q.first_row > 0 || (a.accumulate && !w.dweight);
    return lk_lce_product_columns(r, &m, &lk_lce_key::n);
}

/* Sums of dweight in the workspace, all rows or a panel's, rounded to where they belong. */
template <class T> LK_HOST lk_status lk_lce_put_dweight(const lk_lce_run *r, int64_t first_col, int64_t cols)
{
    const lk_lce_args &a = r->p.c.a;
    if (!r->p.w.dweight) return LK_OK;
    T *const to = (T *)a.dweight + first_col * a.dweight_stride;
    return lk_lce_move_rows<float, T>(r, {r->p.w.dweight, to, NULL, NULL, cols, a.hidden, a.hidden, a.dweight_stride,
                                          a.accumulate, NULL});
}

template <class T> LK_HOST lk_status lk_lce_dbias(const lk_lce_run *r, const lk_lce_panel &q)
{
    if (!r->p.c.a.dbias) return LK_OK;
    const lk_lce_columns columns = {q, lk_lce_dz_stride(r), q.first_row > 0};
    return lk_lce_launch(r, lk_lce_columns_kernel<T>, lk_ceil_div(q.cols, LK_LCE_THREADS) * r->p.w.splits, columns);
}

/* What forward and forward_backward are told alike, and backward in part. */
template <class Args> LK_HOST void lk_lce_row_args(const lk_lce_run *r, const lk_lce_panel &q, Args *f)
{
    const lk_lce_args &a = r->p.c.a;
    const lk_lce_pieces &w = r->p.w;
    f->logits = w.slice ? w.slice : w.logits, f->target = w.target + q.first_row, f->lse = w.lse + q.first_row;
    f->class_weight = w.class_weight ? w.class_weight : a.class_weight;
    f->rows = q.rows, f->vocab = a.vocab, f->logits_stride = w.logits_stride, f->ignore_index = -1, f->use_ignore_index = 1;
    f->logit_scale = a.logit_scale, f->softcap = a.softcap, f->label_smoothing = a.label_smoothing, f->z_loss = a.z_loss;
    f->target_dtype = LK_TARGET_INT32;
}
template <class Args> LK_HOST void lk_lce_row_losses(const lk_lce_run *r, const lk_lce_panel &q, Args *f)
{
    if (r->p.w.loss) f->loss = r->p.w.loss + q.first_row;
    if (r->p.w.z) f->z_loss_out = r->p.w.z + q.first_row;
}
template <class Args> LK_HOST void lk_lce_row_gradients(const lk_lce_run *r, const lk_lce_panel &q, Args *b)
{
    const lk_lce_pieces &w = r->p.w;
    b->dlogits = w.logits, b->dlogits_dtype = r->p.c.type;
    if (w.slice) { /* of 16-bit elements */
        b->dlogits_stride = w.logits_stride;
        b->dlogits = (char *)w.logits + lk_lce_in_chunk(r, q) * w.logits_stride * lk_lce_type_bytes(r->p.c.type);
    }
    b->upstream = r->p.w.factor + q.first_row, b->upstream_per_row = 1;
    if (r->p.w.dlse) b->dlse = r->p.w.dlse + q.first_row;
}

/* A slice's rows, from logits of the whole vocabulary to loss and dZ. */
template <class T, class L> LK_HOST lk_status lk_lce_rows(const lk_lce_run *r, const lk_lce_panel &q)
{
    lk_cross_entropy_forward_args forward = {};
    lk_cross_entropy_backward_args backward = {};
    lk_cross_entropy_forward_backward_args both = {};
    if (r->mode == LK_LCE_RESOLVE) return LK_OK;
    if (!r->p.c.gradient) {
        lk_lce_row_args(r, q, &forward), lk_lce_row_losses(r, q, &forward);
        return lk_cross_entropy_forward<L>(r->op, &forward, r->stream);
    }
    if (!r->p.c.gives_loss) {
        lk_lce_row_args(r, q, &backward), lk_lce_row_gradients(r, q, &backward);
        return lk_cross_entropy_backward<L>(r->op, &backward, r->stream);
    }
    lk_lce_row_args(r, q, &both), lk_lce_row_losses(r, q, &both), lk_lce_row_gradients(r, q, &both);
    return lk_cross_entropy_forward_backward<L>(r->op, &both, r->stream);
}

/* A panel's dZ, again from its logits. */
template <class T, class L> LK_HOST lk_status lk_lce_panel_gradient(lk_lce_run *r, const lk_lce_panel &q)
{
    const lk_status status = lk_lce_logits<T>(r, q);
    if (status) return status;
    return lk_lce_launch(r, lk_lce_gradient_kernel<L, T>, lk_ceil_div(q.rows, LK_LCE_THREADS / 32), q);
}

/* The panel-th panel of the chunk-th chunk; panel -1: all columns. */
LK_HOST lk_lce_panel lk_lce_part(const lk_lce_run *r, int64_t chunk, int64_t panel)
{
    const int64_t first_row = chunk * r->plan.chunk_tokens, first_col = panel * r->plan.panel_vocab;
    return {r->p, first_row, lk_lce_min(r->plan.chunk_tokens, r->p.c.rows - first_row), first_col,
            lk_lce_min(r->plan.panel_vocab, r->p.c.a.vocab - first_col), panel == 0, panel + 1 == r->plan.panels};
}

/* One chunk with the logits of the whole vocabulary. */
template <class T, class L> LK_HOST lk_status lk_lce_run_chunk(lk_lce_run *r, int64_t chunk)
{
    const lk_lce_panel q = lk_lce_part(r, chunk, 0);
    lk_status status = lk_lce_gather<T>(r, q);
    const int64_t step = r->plan.slice_tokens ? r->plan.slice_tokens : q.rows;
    for (int64_t from = 0; from < q.rows && !status; from += step) {
        lk_lce_panel slice = q;
        slice.first_row += from, slice.rows = lk_lce_min(step, q.rows - from);
        status = lk_lce_logits<T>(r, slice);
        if (!status) status = lk_lce_rows<T, L>(r, slice);
    }
    if (!status) status = lk_lce_dbias<T>(r, q);
    if (!status && r->p.c.a.dweight) status = lk_lce_dweight<T>(r, q); /* before dx, which may overwrite the copy of x */
    if (!status && r->p.c.a.dx) status = lk_lce_dx<T>(r, q);
    return status ? status : lk_lce_put_dx<T>(r, q);
}

/* One chunk in panels: the rows' states, then the gradients; those of dweight only where it has no pass of its own. */
template <class T, class L> LK_HOST lk_status lk_lce_run_panels(lk_lce_run *r, int64_t chunk)
{
    const bool shared = r->plan.path == LK_LINEAR_CROSS_ENTROPY_PANELS, dx = r->p.c.a.dx != NULL;
    lk_status status = lk_lce_gather<T>(r, lk_lce_part(r, chunk, 0));
    for (int64_t panel = 0; panel < r->plan.panels && !status; panel++) {
        const lk_lce_panel q = lk_lce_part(r, chunk, panel);
        status = lk_lce_logits<T>(r, q);
        if (!status) status = lk_lce_launch(r, lk_lce_state_kernel<L>, lk_ceil_div(q.rows, LK_LCE_THREADS / 32), q);
    }
    if (!r->p.c.gradient || !(shared || dx)) return status;
    for (int64_t panel = 0; panel < r->plan.panels && !status; panel++) {
        const lk_lce_panel q = lk_lce_part(r, chunk, panel);
        status = lk_lce_panel_gradient<T, L>(r, q);
        if (!status && shared) status = lk_lce_dbias<T>(r, q);
        if (!status && shared && r->p.c.a.dweight) status = lk_lce_dweight<T>(r, q);
        if (!status && dx) status = lk_lce_dx<T>(r, q);
    }
    return status ? status : lk_lce_put_dx<T>(r, lk_lce_part(r, chunk, 0));
}

/* The third pass: dweight and dbias panel by panel, each over all chunks. */
template <class T, class L> LK_HOST lk_status lk_lce_run_last_pass(lk_lce_run *r)
{
    lk_status status = LK_OK;
    for (int64_t panel = 0; panel < r->plan.panels && !status; panel++) {
        for (int64_t chunk = 0; chunk < r->plan.chunks && !status; chunk++) {
            const lk_lce_panel q = lk_lce_part(r, chunk, panel);
            status = lk_lce_gather<T>(r, q);
            if (!status) status = lk_lce_panel_gradient<T, L>(r, q);
            if (!status) status = lk_lce_dbias<T>(r, q);
            if (!status && r->p.c.a.dweight) status = lk_lce_dweight<T>(r, q);
        }
        const lk_lce_panel q = lk_lce_part(r, 0, panel);
        if (!status) status = lk_lce_put_dweight<T>(r, q.first_col, q.cols);
    }
    return status;
}

/* What the references are guessed from, of all rows at once: a tile a row keeps few clusters busy. Compacted rows of x are
 * there a chunk at a time. */
template <class T> LK_HOST lk_status lk_lce_sample(const lk_lce_run *r, lk_lce_fused p)
{
    const lk_lce_call &c = r->p.c;
    lk_status status = LK_OK;
    if (!c.compact) p.q.rows = c.rows, p.pairs = (int)lk_ceil_div(c.rows, 2 * LK_GEMM_ROWS);
    if (r->mode != LK_LCE_RESOLVE)
        status = lk_gemm_map(r->op, &p.x, lk_lce_x<T>(r, p.q), p.q.rows, c.a.hidden, lk_lce_x_stride(r), LK_GEMM_ROWS);
    p.parts = p.q.p.w.sample, p.tiles = p.runs = p.run_tiles = 1, p.items = p.pairs;
    p.q.p.c.a.label_smoothing = 1.0f; /* the sums of smoothing too: the tile's mean */
    p.q.p.c.a.class_weight = NULL, p.q.p.w.class_weight = NULL;
    return status ? status : lk_lce_launch_tiles(r, lk_lce_fused_kernel<false, false>, p.items, p);
}

/* How many rounds of dweight the clusters that have one tile of dx less take first: what ends soonest. A tile's end is worth
 * about 4 of its steps. */
LK_HOST int lk_lce_lead(const lk_lce_tiles &dx, const lk_lce_tiles &dweight, int64_t clusters)
{
    const int64_t items = (int64_t)dweight.pairs * dweight.cols, late = clusters - (int64_t)dx.pairs * dx.cols % clusters;
    const int64_t all = dx.steps + 4, each = dweight.steps + 4, most = late < clusters ? items / late + 1 : 0;
    int64_t best = 0, least = INT64_MAX;
    for (int64_t lead = 0; lead <= most && lead <= all / each + 1; lead++) {
        const int64_t rest = items > lead * late ? items - lead * late : 0, rounds = lk_ceil_div(rest, clusters);
        const int64_t others = rest > late ? lk_ceil_div(rest - late, clusters) : 0, early = all + others * each;
        const int64_t time = (lead + rounds) * each > early ? (lead + rounds) * each : early;
        if (time < least) best = lead, least = time;
    }
    return (int)best;
}

/* A chunk's gradients, of its exponentials, their factors and v x: dx, and dweight where it has sums. */
LK_HOST lk_status lk_lce_run_gradients(const lk_lce_run *r, const lk_lce_panel &q, bool dweight)
{
    const lk_lce_args &a = r->p.c.a;
    const lk_lce_pieces &w = r->p.w;
    lk_lce_gradients p = {};
    lk_status status = LK_OK;
    if (r->mode == LK_LCE_RESOLVE) return LK_OK;
    p.q = q, p.first = q.first_row == 0, p.last = q.first_row + q.rows >= r->p.c.rows;
    const int cols = (int)lk_ceil_div(a.hidden, LK_GEMM_COLS), groups = (int)lk_ceil_div(a.vocab, 2 * LK_GEMM_ROWS);
    if (a.dx) p.dx = {(int)lk_ceil_div(q.rows, 2 * LK_GEMM_ROWS), cols, (int)lk_ceil_div(a.vocab, LK_GEMM_DEPTH)};
    if (dweight) p.dweight = {groups, cols, (int)lk_ceil_div(q.rows, LK_GEMM_DEPTH)};
    const int64_t items = (int64_t)p.dx.pairs * p.dx.cols + (int64_t)p.dweight.pairs * p.dweight.cols;
    p.lead = lk_lce_lead(p.dx, p.dweight, lk_lce_clusters(r, items));
    p.wide_dx = (uintptr_t)a.dx % 16 == 0 && a.dx_stride % 8 == 0 && a.hidden % 8 == 0;
    p.wide_dweight = (uintptr_t)a.dweight % 16 == 0 && a.dweight_stride % 8 == 0 && a.hidden % 8 == 0;
    if (a.dx) status = lk_gemm_map(r->op, &p.e, w.logits, q.rows, a.vocab, w.logits_stride, LK_GEMM_ROWS);
    if (a.dx && !status) status = lk_gemm_map(r->op, &p.weight, a.weight, a.vocab, a.hidden, a.weight_stride, LK_GEMM_DEPTH);
    if (dweight && !status)
        status = lk_gemm_map(r->op, &p.e_across, w.logits, q.rows, a.vocab, w.logits_stride, LK_GEMM_DEPTH);
    if (dweight && !status) status = lk_gemm_map(r->op, &p.x, w.x, q.rows, a.hidden, w.x_stride, LK_GEMM_DEPTH);
    return status ? status : lk_lce_launch_tiles(r, lk_lce_gradients_kernel, items, p);
}

/* One chunk whose logits stay in registers. */
template <class T> LK_HOST lk_status lk_lce_run_fused(lk_lce_run *r, int64_t chunk)
{
    const lk_lce_call &c = r->p.c;
    const lk_lce_args &a = c.a;
    lk_lce_fused p = {};
    lk_lce_panel &q = p.q;
    q = lk_lce_part(r, chunk, 0);
    q.cols = a.vocab, q.last = 1;
    p.parts = q.p.w.parts;
    const void *const x = lk_lce_x<T>(r, q);
    const int64_t x_stride = lk_lce_x_stride(r);
    p.pairs = (int)lk_ceil_div(q.rows, 2 * LK_GEMM_ROWS), p.tiles = (int)lk_ceil_div(a.vocab, LK_GEMM_COLS);
    p.run_tiles = (int)lk_ceil_div(r->plan.panel_vocab, LK_GEMM_COLS), p.runs = (int)lk_ceil_div(p.tiles, p.run_tiles);
    p.items = p.pairs * p.runs;
    p.steps = (int)lk_ceil_div(a.hidden, LK_GEMM_DEPTH);
    /* Of n normal values the largest is sqrt(2 log n) deviations above the mean, of 256 it is 2.8. */
    p.ahead = p.tiles > 1 ? sqrtf(2.0f * logf((float)a.vocab)) / 2.8f - 1.0f : 0.0f;
    lk_status status = lk_lce_gather<T>(r, q);
    if (!status && r->mode != LK_LCE_RESOLVE) {
        status = lk_gemm_map(r->op, &p.x, x, q.rows, a.hidden, x_stride, LK_GEMM_ROWS);
        if (!status) status = lk_gemm_map(r->op, &p.weight, a.weight, a.vocab, a.hidden, a.weight_stride, LK_GEMM_COLS / 2);
    }
    const bool plain = !a.bias && a.softcap == 0.0f && a.label_smoothing == 0.0f;
    const int64_t blocks = lk_ceil_div(q.rows, LK_LCE_THREADS / 32);
    if (!c.gradient) {
        if (!status)
            status = lk_lce_launch_tiles(r, plain ? lk_lce_fused_kernel<true, false> : lk_lce_fused_kernel<false, false>,
                                         p.items, p);
        return status ? status : lk_lce_launch(r, lk_lce_merge_kernel, blocks, p);
    }
    if (!status && (chunk == 0 || c.compact)) status = lk_lce_sample<T>(r, p);
    if (!c.compact) q.p.w.sample += q.first_row;
    if (!status)
        status = lk_lce_launch_tiles(r, plain ? lk_lce_fused_kernel<true, true> : lk_lce_fused_kernel<false, true>, p.items, p);
    const lk_lce_pieces &w = q.p.w;
    if (!status) status = lk_lce_launch(r, lk_lce_factor_kernel, blocks, p);
    if (!status) status = lk_lce_dbias<T>(r, q);
    if (!status && a.dweight)
        status = lk_lce_move_rows<T, T>(r, {x, w.x, NULL, NULL, q.rows, a.hidden, x_stride, w.x_stride, 0, w.scale});
    const bool sums = lk_lce_sums_dweight(&c, r->plan.chunk_tokens);
    if (!status && (a.dx || sums)) status = lk_lce_run_gradients(r, q, sums);
    return status || !a.dweight || sums ? status : lk_lce_dweight<T>(r, q);
}

/* All of a call, in the run's mode. */
template <class T, class L> LK_HOST lk_status lk_lce_run_all(lk_lce_run *r)
{
    const lk_lce_args &a = r->p.c.a;
    const int path = r->plan.path;
    const bool whole = path == LK_LINEAR_CROSS_ENTROPY_CHUNKS, twice = path == LK_LINEAR_CROSS_ENTROPY_PANELS_TWICE;
    const bool fused = path == LK_LINEAR_CROSS_ENTROPY_FUSED;
    lk_status status = LK_OK;
    if (r->p.c.rows > 0)
        status = lk_lce_launch(r, lk_lce_prepare_kernel, lk_ceil_div(a.tokens, r->p.share), r->p);
    for (int64_t chunk = 0; chunk < r->plan.chunks && !status; chunk++)
        status = fused   ? lk_lce_run_fused<T>(r, chunk)
                 : whole ? lk_lce_run_chunk<T, L>(r, chunk)
                         : lk_lce_run_panels<T, L>(r, chunk);
    if (!status && twice && (a.dweight || a.dbias)) status = lk_lce_run_last_pass<T, L>(r);
    else if (!status) status = lk_lce_put_dweight<T>(r, 0, a.vocab);
    if (status) return status;
    int64_t blocks = lk_ceil_div(a.tokens > a.vocab ? a.tokens : a.vocab, LK_LCE_THREADS);
    if (blocks > 2 * r->device.sms) blocks = 2 * r->device.sms;
    return lk_lce_launch(r, lk_lce_finish_kernel, blocks + 1, r->p);
}

/* ---- Launchers ------------------------------------------------------------------------------------------------------- */

/* Every tensor against the memory it lies in, with -DLK_CHECK. */
LK_HOST lk_status lk_lce_check_memory(const char *op, const lk_lce_call *c, size_t workspace_bytes)
{
    const lk_lce_args &a = c->a;
    const int own = lk_lce_type_bytes(c->type), dweight_bytes = lk_lce_type_bytes(a.dweight_dtype);
    const int64_t tokens = a.tokens, some = tokens > 0, vocab = some ? a.vocab : 0; /* without tokens nothing is read */
    const int64_t losses = a.reduction == LK_REDUCTION_NONE ? tokens : 1, upstreams = a.upstream_per_token ? tokens : some;
    const int64_t dweights = (a.vocab - 1) * a.dweight_stride + a.hidden, written = some || !a.accumulate; /* dweight, dbias */
    const lk_tensor list[] = {
        {"x", a.x, own, some * ((tokens - 1) * a.x_stride + a.hidden)},
        {"weight", a.weight, own, some * ((a.vocab - 1) * a.weight_stride + a.hidden)},
        {"bias", a.bias, lk_lce_type_bytes(a.bias_dtype), vocab},
        {"target", a.target, a.target_dtype == LK_TARGET_INT32 ? 4 : 8, tokens},
        {"class_weight", a.class_weight, 4, vocab},
        {"lse", c->saved_lse, 4, tokens},
        {"upstream", a.upstream, 4, c->gradient ? upstreams : 0},
        {"dlse", a.dlse, 4, c->gradient ? tokens : 0},
        {"loss", a.loss, 4, losses},
        {"z_loss_out", a.z_loss_out, 4, losses},
        {"lse", a.lse, 4, tokens},
        {"valid_rows", a.valid_rows, 8, 1},
        {"weight_sum", a.weight_sum, 4, 1},
        {"bad_targets", a.bad_targets, 4, some},
        {"dx", a.dx, own, some * ((tokens - 1) * a.dx_stride + a.hidden)},
        {"dweight", a.dweight, dweight_bytes, written * dweights},
        {"dbias", a.dbias, lk_lce_type_bytes(a.dbias_dtype), written * a.vocab},
        {"workspace", a.workspace, 1, (int64_t)workspace_bytes},
    };
    return lk_check_memory(op, list, (int)(sizeof list / sizeof list[0]));
}

template <class T, class Args>
LK_HOST lk_status lk_linear_cross_entropy(const char *op, const Args *args, cudaStream_t stream, int mode)
{
    if (!args) return lk_fail(LK_ERR_NULL, op, "args is NULL");
    lk_lce_run r = {};
    r.op = op, r.stream = stream, r.p.c = lk_lce_call_of(args);
    lk_status status = lk_lce_check<T>(op, false, &r.p.c);
    if (status) return status;
    const lk_lce_args &a = r.p.c.a;
    const size_t least = lk_lce_minimum(&r.p.c);
    status = lk_check_workspace(op, a.workspace, a.workspace_bytes, least);
    if (status) return status;
    lk_lce_choose(&r.p.c, least, a.workspace_bytes, &r.plan);
    lk_check_warn(op, a.tokens == 0, "tokens is 0; nothing is computed");
    status = lk_lce_check_memory(op, &r.p.c, r.plan.workspace_bytes);
    if (status) return status;
    status = lk_asked_device(op, lk_current_device(&r.device));
    if (status) return status;
    r.context = (lk_lce_context *)a.context;
    const lk_linear_cross_entropy_plan &plan = r.plan;
    if (plan.path == LK_LINEAR_CROSS_ENTROPY_FUSED) r.p.c.logits_type = LK_DTYPE_F32; /* fast_logits are for those it keeps */
    if (r.p.c.rows > 0)
        r.p.w = lk_lce_lay_out(&r.p.c, plan.path, plan.chunk_tokens, plan.panel_vocab, plan.slice_tokens, a.workspace);
    r.p.share = lk_lce_round_up(lk_ceil_div(a.tokens > 0 ? a.tokens : 1, 2 * r.device.sms), LK_LCE_THREADS);
    r.p.power = 12 - (int)ceilf(log2f(a.logit_scale));
    r.p.power = r.p.power < -20 ? -20 : r.p.power > 40 ? 40 : r.p.power;
    for (r.mode = LK_LCE_RESOLVE; r.mode <= mode && !status; r.mode = r.mode == LK_LCE_RESOLVE ? mode : mode + 1)
        status = a.fast_logits ? lk_lce_run_all<T, T>(&r) : lk_lce_run_all<T, float>(&r);
    return status;
}

/* The plan within the budget; least: within that, or the smallest where that is more. */
template <class T, class Args>
LK_HOST lk_status lk_linear_cross_entropy_query(const char *op, const Args *args, size_t budget, bool least,
                                                lk_linear_cross_entropy_plan *plan)
{
    if (!args) return lk_fail(LK_ERR_NULL, op, "args is NULL");
    if (!plan) return lk_fail(LK_ERR_NULL, op, "plan is NULL");
    lk_lce_call c = lk_lce_call_of(args);
    const lk_status status = lk_lce_check<T>(op, true, &c);
    if (status) return status;
    const size_t smallest = lk_lce_minimum(&c);
    if (budget < smallest && !least)
        return lk_fail(LK_ERR_WORKSPACE, op, "the budget is %zu; this call needs a workspace of %zu bytes", budget, smallest);
    lk_lce_choose(&c, smallest, budget < smallest ? smallest : budget, plan);
    return LK_OK;
}

/* Emits the functions of LK_DECLARE_LINEAR_CROSS_ENTROPY(T). */
#define LK_LINEAR_CROSS_ENTROPY_DEFINE_DIRECTION(D, T)                                                                         \
    LK_API lk_status lk_linear_cross_entropy_##D##_##T(const lk_linear_cross_entropy_##D##_args *args, cudaStream_t stream)    \
    {                                                                                                                          \
        return lk_linear_cross_entropy<lk_##T>("lk_linear_cross_entropy_" #D "_" #T, args, stream, LK_LCE_LAUNCH);             \
    }                                                                                                                          \
    LK_API lk_status lk_linear_cross_entropy_##D##_workspace_bytes_##T(const lk_linear_cross_entropy_##D##_args *args,         \
                                                                       size_t *bytes)                                          \
    {                                                                                                                          \
        lk_linear_cross_entropy_plan plan = {};                                                                                \
        const lk_status status = lk_linear_cross_entropy_query<lk_##T>("lk_linear_cross_entropy_" #D "_" #T, args,             \
                                                                       LK_LCE_DEFAULT_BYTES, true, &plan);                     \
        if (!status && bytes) *bytes = plan.workspace_bytes;                                                                   \
        return status;                                                                                                         \
    }                                                                                                                          \
    LK_API lk_status lk_linear_cross_entropy_##D##_plan_##T(const lk_linear_cross_entropy_##D##_args *args, size_t budget,     \
                                                            lk_linear_cross_entropy_plan *plan)                                \
    {                                                                                                                          \
        return lk_linear_cross_entropy_query<lk_##T>("lk_linear_cross_entropy_" #D "_" #T, args, budget, false, plan);         \
    }                                                                                                                          \
    LK_API lk_status lk_linear_cross_entropy_##D##_tune_##T(const lk_linear_cross_entropy_##D##_args *args,                    \
                                                            cudaStream_t stream)                                               \
    {                                                                                                                          \
        return lk_linear_cross_entropy<lk_##T>("lk_linear_cross_entropy_" #D "_" #T, args, stream, LK_LCE_TUNE);               \
    }

#define LK_DEFINE_LINEAR_CROSS_ENTROPY(T)                                                                                      \
    LK_DECLARE_LINEAR_CROSS_ENTROPY(T)                                                                                         \
    LK_LINEAR_CROSS_ENTROPY_DEFINE_DIRECTION(forward, T)                                                                       \
    LK_LINEAR_CROSS_ENTROPY_DEFINE_DIRECTION(forward_backward, T)                                                              \
    LK_LINEAR_CROSS_ENTROPY_DEFINE_DIRECTION(backward, T)

#else
#define LK_DEFINE_LINEAR_CROSS_ENTROPY(T) LK_NEEDS_NVCC("LK_DEFINE_LINEAR_CROSS_ENTROPY")
#endif /* CUDA or the simulator */
#endif
