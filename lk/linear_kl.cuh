// SPDX-License-Identifier: MIT
/* linear_kl.cuh - Kullback-Leibler divergence of two language-model heads, a teacher's and a student's, from their hidden states:
 * distillation without storing the logits of either, and all gradients of the student's head.
 *
 *   logits[t,j]  = sum_d x[t,d] weight[j,d] + bias[j]                  teacher[t,j]: the teacher's, with its own hidden size
 *   loss, lse, teacher_lse, entropy    those of kl.cuh for these logits; its comment has the formulas and the divergences
 *   dZ[t,j]      the gradient of logits[t,j], by kl.cuh's formula, with upstream and row_weight
 *   dx[t,d]      = sum_j dZ[t,j] weight[j,d]
 *   dweight[j,d] = sum_t dZ[t,j] x[t,d]        with accumulate added to its old contents
 *   dbias[j]     = sum_t dZ[t,j]               with accumulate added to its old contents
 *
 * All columns of both heads count: this is the divergence itself and not that of the teacher's largest columns.
 *
 * Use        In one .cu file, linked with -lcublasLt:   Anywhere, C included:
 *                #include "lk/linear_kl.cuh"                #include "lk/linear_kl.cuh"
 *                LK_DEFINE_LINEAR_KL(bf16)                  LK_DECLARE_LINEAR_KL(bf16)
 *            T is f32, f16 or bf16. Make a context for each device, and for each host thread that calls at the same time;
 *            lk_linear_kl_destroy(&context) frees it at the end:
 *                lk_linear_kl_context context;
 *                lk_status status = lk_linear_kl_init(&context);
 *            Then, asynchronously on the caller's stream, in a graph too:
 *                lk_linear_kl_args args = {};
 *                args.context = &context, args.x = x, args.weight = weight;
 *                args.teacher_x = teacher_x, args.teacher_weight = teacher_weight;
 *                args.tokens = tokens, args.hidden = hidden, args.teacher_hidden = teacher_hidden, args.vocab = vocab;
 *                args.loss = loss, args.dx = dx, args.dweight = dweight;
 *                status = lk_linear_kl_forward_backward_workspace_bytes_bf16(&args, &args.workspace_bytes);
 *                args.workspace = ...;
 *                status = lk_linear_kl_forward_backward_bf16(&args, stream);
 *            forward computes loss, lse, teacher_lse and entropy. backward computes dx, dweight and dbias, and needs nothing of
 *            forward: it computes the logits again. forward_backward computes all with two matmuls fewer; upstream has to be
 *            known before. Outputs whose pointer is NULL are not computed.
 *            The workspace function answers what the fastest plan within a sixteenth of the device's memory (without a device
 *            1 GiB) needs, or the smallest plan if that needs more. For another amount of memory, ask for a plan:
 *                lk_linear_kl_plan plan;
 *                status = lk_linear_kl_forward_backward_plan_bf16(&args, budget, &plan);   puts(plan.text);
 *                args.workspace = ..., args.workspace_bytes = plan.workspace_bytes;
 * Needs      kl.cuh, lk_base.cuh, lk_check.cuh, lk_cublas.cuh, lk_head.cuh, lk_head_plan.cuh, lk_loss.cuh, lk_move.cuh, lk_row.cuh,
 *            lk_ptx.cuh; cuBLASLt.
 * Options    A struct with context, x, weight, teacher_x, teacher_weight, the sizes and one output computes LK_KL_FORWARD of each
 *            token. Divergences, scales, softcaps and beta are kl.cuh's. teacher_hidden 0 means hidden.
 *            row_weight is a factor of each token's loss and gradient. A mean over the tokens that count is row_weight = 1 over
 *            their number for them, 0 for the others, and the sum of loss. A token with row_weight 0 has loss 0 and adds nothing;
 *            keep its x finite, since 0 times NaN is NaN.
 *            Vocabularies of different lengths: pass the shorter one; the other head's last columns are then left out.
 *            bias = -inf masks a column of the student, teacher_bias = -inf one of the teacher.
 *            fast_logits: logits are rounded to T; less memory and traffic. Else they are f32. tf32: products of f32 by TF32.
 *            upstream: one number, or with upstream_per_token one for each token.
 *            Columns that are split over ranks: linear_kl_parallel.cuh, which has these options.
 * Exact      As kl.cuh, for logits in f32. dZ is rounded to T once, and dx, dweight and dbias once more. A dweight of 16 bits is a
 *            sum over chunks of tokens: plan.dweight_sums says whether it lies in the workspace in float, or is rounded after each
 *            chunk. With one chunk, or a dweight of f32, there is no such sum.
 * Repeatable The same bits every time for the same shapes, strides, alignment of pointers (modulo 256) and workspace size. A matmul
 *            has the algorithm that cuBLASLt's heuristic names first. All else has a fixed order; there are no float atomics.
 * Source     Hinton et al., 2015, and Agarwal et al., 2023, as in kl.cuh; chunks of tokens: Liger-Kernel, 2024.
 * Read on    lk/linear_kl.md: plans of the workspace, how exact results are, and what is read and written.
 *
 * What runs. Tokens come in chunks, the logits of a chunk in slices. The matmuls and their order are lk_head.cuh's, as CHUNKS; what
 * happens to rows is a table of functions that the head calls, lk_linear_kl_table. The plan is of this file.
 *   every call, first     lk_linear_kl_prepare_kernel: the factor of each row's gradient
 *   each slice            logits of student and teacher by cuBLASLt; kl.cuh's kernel computes losses and dZ from them
 *   each chunk            lk_linear_kl_bias_kernel sums dbias; dweight and dx by cuBLASLt
 *   after the chunks      lk_move_kernel rounds dweight, where its sums lie in the workspace
 * A call first goes through all its matmuls without a launch, so that cuBLASLt refuses one before anything has run.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LINEAR_KL_CUH
#define LK_LINEAR_KL_CUH

#include "kl.cuh"

/* The cuBLASLt handle and the algorithms that were chosen; no device memory. The caller owns it. One host thread at a time uses
 * it, on the device that was current at init. It may not be moved or copied between init and destroy. */
typedef struct {
    uint64_t opaque[2048];
} lk_linear_kl_context;

LK_API lk_status lk_linear_kl_init(lk_linear_kl_context *context);
LK_API lk_status lk_linear_kl_destroy(lk_linear_kl_context *context);

/* What lk does within a workspace of some size. */
typedef struct {
    size_t workspace_bytes; /* what the plan uses, cublas_bytes included; no more than the budget */
    size_t minimum_bytes;   /* the smallest workspace that the call accepts; its plan is slower */
    size_t cublas_bytes;    /* cuBLASLt's part of workspace_bytes */
    int64_t chunk_tokens, chunks; /* tokens of a chunk, whose dZ exists at a time; number of chunks */
    int64_t slice_tokens;   /* tokens of a chunk whose logits exist at a time */
    int matmuls;            /* of 2 * tokens * hidden * vocab operations, or of teacher_hidden */
    int dweight_sums;       /* not 0: dweight of 16 bits is summed over chunks in float, in the workspace */
    char text[240];         /* all of this in words */
} lk_linear_kl_plan;

/* One struct for all calls. F: forward, B: backward, FB: forward_backward; without a letter: all three. A call ignores the fields
 * that are marked for other calls. */
typedef struct {
    lk_linear_kl_context *context; /* in and out, from init; one call at a time */
    const void *x;              /*      in    T [tokens, hidden], the student's */
    const void *weight;         /*      in    T [vocab, hidden] */
    const void *bias;           /*      in    T [vocab]; NULL: none */
    const void *teacher_x;      /*      in    T [tokens, teacher_hidden] */
    const void *teacher_weight; /*      in    T [vocab, teacher_hidden] */
    const void *teacher_bias;   /*      in    T [vocab]; NULL: none */
    const float *row_weight;    /*      in    f32 [tokens], a factor of each token's loss and gradient; NULL: 1 */
    const float *upstream;      /* B FB in    f32 [1], or [tokens] with upstream_per_token, the gradient of loss; NULL: 1 */
    float *loss;                /* F FB out   f32 [tokens]; NULL to skip */
    float *lse;                 /* F FB out   f32 [tokens]; NULL to skip */
    float *teacher_lse;         /* F FB out   f32 [tokens]; NULL to skip */
    float *entropy;             /* F FB out   f32 [tokens]; NULL to skip */
    void *dx;                   /* B FB out   T [tokens, hidden]; NULL to skip */
    void *dweight;              /* B FB out   dweight_dtype [vocab, hidden]; NULL to skip */
    void *dbias;                /* B FB out   T [vocab]; NULL to skip */
    void *workspace;            /* scratch, aligned to LK_WORKSPACE_ALIGNMENT bytes; NULL when 0 */
    size_t workspace_bytes;     /* at least a plan's minimum_bytes; it chooses the plan. More is faster, or the same */
    int64_t tokens;             /* 0 to 2^31 - 1 */
    int64_t hidden;             /* 1 to 2^30 */
    int64_t teacher_hidden;     /* likewise; 0 means hidden */
    int64_t vocab;              /* 1 to 2^30 */
    int64_t x_stride;           /* elements between rows; 0 means packed */
    int64_t weight_stride;      /* likewise */
    int64_t teacher_x_stride;   /* likewise */
    int64_t teacher_weight_stride; /* likewise */
    int64_t dx_stride;          /* B FB likewise */
    int64_t dweight_stride;     /* B FB likewise */
    int64_t chunk_tokens;       /* tokens of a chunk; 0: lk chooses */
    int64_t slice_tokens;       /* tokens of a slice; 0: lk chooses. Ignored where a call has no slices */
    float logit_scale;          /* 2^-100 to 2^100; 0 means 1 */
    float teacher_scale;        /* likewise */
    float softcap;              /* 2^-100 to 2^100, keep logit_scale / softcap there too; 0: off */
    float teacher_softcap;      /* likewise */
    float beta;                 /* JENSEN_SHANNON: above 0 and below 1; 0 means 1/2 */
    int divergence;             /* LK_KL_FORWARD, _REVERSE, _JENSEN_SHANNON; 0: FORWARD */
    int upstream_per_token;     /* B FB not 0: upstream is [tokens] */
    int accumulate;             /* B FB not 0: dweight and dbias are added to their old contents */
    int dweight_dtype;          /* B FB LK_DTYPE_*: T or f32; 0: T */
    int fast_logits;            /* not 0: logits are T instead of f32 */
    int tf32;                   /* not 0: matmuls of T = f32 may round their factors to TF32 */
} lk_linear_kl_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md:
 *   LK_ERR_NULL       args, plan, context, x, weight, teacher_x or teacher_weight is NULL; all outputs are. With tokens = 0 all
 *                     except for args and plan may be NULL
 *   LK_ERR_SHAPE      tokens, hidden, teacher_hidden or vocab out of range; a stride that is not 0 and below its row; a tensor
 *                     that spans more than 2^62 elements; chunk_tokens or slice_tokens below 0
 *   LK_ERR_VALUE      a scale, a softcap or beta out of range; divergence is none of its enum; dweight_dtype is neither T nor f32;
 *                     a context that init has not made, or of another device
 *   LK_ERR_ALIGNMENT  a pointer is not aligned to its element
 *   LK_ERR_WORKSPACE  workspace_bytes, or a plan's budget, is below the smallest; workspace is NULL or not aligned to
 *                     LK_WORKSPACE_ALIGNMENT bytes
 *   LK_ERR_CUBLAS     cuBLASLt has no algorithm for a matmul: nothing was launched. Or it failed to launch one: outputs are
 *                     undefined. lk_last_error says which
 * Matmuls are fastest where x, weight, dx and dweight start at multiples of 16 bytes and the hidden sizes are multiples of 8.
 *
 * Each direction has three functions that take the same struct: ..._<T> is the call, ..._workspace_bytes the workspace of its
 * default plan, ..._plan the plan within `budget` bytes. The last two need shapes and options, and no tensors: a pointer other than
 * NULL says that there is such a tensor, or that it is wanted (dx, dweight, dbias, bias, teacher_bias). */
#define LK_LINEAR_KL_FUNCTIONS(X, T)                                                                                           \
    X##_PLANNED(linear_kl, forward, LK_FORWARD, linear_kl, T)                                                                  \
    X##_PLANNED(linear_kl, backward, LK_BACKWARD, linear_kl, T)                                                                \
    X##_PLANNED(linear_kl, forward_backward, LK_BOTH, linear_kl, T)
#define LK_DECLARE_LINEAR_KL(T) LK_DECLARE(LINEAR_KL, T)
#define LK_DEFINE_LINEAR_KL(T) LK_DEFINE(LINEAR_KL, T)

#if LK_CUDA

#include "lk_head.cuh"

/* ---- A call, and its plan ------------------------------------------------------------------------------------------------ */

/* Arrays of the workspace besides lk_head_workspace's. NULL: not there. */
typedef struct {
    float *upstream;     /* [tokens], over alpha */
    void *teacher_bias;  /* [vocab], in the logits' type and on 16 bytes, as cuBLASLt wants it */
    void *teacher;       /* its logits, of a slice */
} lk_linear_kl_arrays;

struct lk_linear_kl_call {
    typedef lk_linear_kl_args args;
    lk_linear_kl_args a; /* with every default filled in; without the outputs of other calls */
    lk_linear_kl_arrays ws; /* once they are laid out */
    bool gradient;       /* dx, dweight or dbias is wanted */
    bool separate;       /* dZ has memory of its own, since the student's logits have another type */
    int type, logits_type;
};

/* lk_head.cuh's, for these calls. */
typedef lk_head_work<lk_linear_kl_call> lk_linear_kl_work;
typedef lk_head_job<lk_linear_kl_call> lk_linear_kl_job;
typedef lk_head_rows<lk_linear_kl_call> lk_linear_kl_table;

#define LK_LINEAR_KL_SLICE 512 /* tokens that a slice has if there is room: its matmuls read both weights */
#define LK_LINEAR_KL_LEAST 64  /* tokens of a chunk in the smallest workspace */

/* An array of rows, which may be more than there can be. */
LK_HOST void *lk_linear_kl_take(lk_arena *arena, bool wanted, int64_t rows, int64_t row_bytes)
{
    return lk_take_bytes(arena, wanted, lk_head_min(lk_count(rows, row_bytes), (int64_t)1 << 61));
}

/* What the head's steps follow from. Its planner is not asked. */
LK_HOST lk_head_shape lk_linear_kl_shape(const lk_linear_kl_call *call)
{
    const lk_linear_kl_args &a = call->a;
    lk_head_shape s = {};
    s.rows = a.tokens, s.hidden = a.hidden, s.vocab = s.classes = a.vocab;
    s.type = call->type, s.logits_type = call->logits_type, s.gradient = call->gradient, s.tf32 = a.tf32;
    return s;
}

/* Puts the arrays of a plan into a workspace, or counts their bytes. */
LK_HOST lk_head_workspace lk_linear_kl_lay_out(const lk_linear_kl_call *call, const lk_linear_kl_plan *plan, void *workspace,
                                               lk_linear_kl_arrays *own)
{
    const lk_linear_kl_args &a = call->a;
    const lk_head_shape s = lk_linear_kl_shape(call);
    const int64_t stride = lk_head_round_up(a.vocab, 64), bytes = lk_head_bytes_of(call->type), f32 = sizeof(float);
    const int64_t logits_bytes = stride * lk_head_bytes_of(call->logits_type);
    lk_arena arena = {((uintptr_t)workspace + 255) / 256 * 256, 0, 256};
    lk_head_workspace ws = {};
    ws.logits_stride = stride;
    lk_take(&ws.counts, &arena, call->gradient, 1);
    lk_take(&own->upstream, &arena, call->gradient, a.tokens);
    ws.bias = lk_take_bytes(&arena, a.bias != NULL, a.vocab * f32);
    own->teacher_bias = lk_take_bytes(&arena, a.teacher_bias != NULL, a.vocab * f32);
    void *const student = lk_linear_kl_take(&arena, true, plan->slice_tokens, logits_bytes);
    own->teacher = lk_linear_kl_take(&arena, true, plan->slice_tokens, logits_bytes);
    ws.logits = lk_linear_kl_take(&arena, call->separate, plan->chunk_tokens, stride * bytes);
    if (call->separate) ws.slice = (float *)student;
    else ws.logits = student; /* and dZ overwrites them */
    const bool two_matmuls = a.dx && call->type != LK_DTYPE_F32 && lk_head_tail_cols(&s, a.vocab);
    ws.dx = (float *)lk_linear_kl_take(&arena, two_matmuls, plan->chunk_tokens, a.hidden * f32);
    ws.dweight = (float *)lk_linear_kl_take(&arena, plan->dweight_sums, a.vocab, a.hidden * f32);
    lk_take(&ws.dbias, &arena, a.dbias != NULL, a.vocab);
    ws.cublas = lk_take_bytes(&arena, plan->cublas_bytes > 0, (int64_t)plan->cublas_bytes);
    ws.bytes = arena.used + 256 - LK_WORKSPACE_ALIGNMENT; /* the arrays start at a multiple of 256 */
    return ws;
}
LK_HOST size_t lk_linear_kl_bytes(const lk_linear_kl_call *call, const lk_linear_kl_plan *plan)
{
    lk_linear_kl_arrays unused;
    return lk_linear_kl_lay_out(call, plan, NULL, &unused).bytes;
}

/* Whether the plan's arrays take no more than `budget` bytes. */
LK_HOST bool lk_linear_kl_fits(const lk_linear_kl_call *call, const lk_linear_kl_plan *plan, size_t budget)
{
    return lk_linear_kl_bytes(call, plan) <= budget;
}

/* Raises *tokens, a field of plan, to the largest number up to `most` that fits; same: slice_tokens with it. */
LK_HOST void lk_linear_kl_raise(const lk_linear_kl_call *call, lk_linear_kl_plan *plan, int64_t lk_linear_kl_plan::*tokens,
                                bool same, int64_t most, size_t budget)
{
    int64_t low = plan->*tokens, high = most;
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        lk_linear_kl_plan tried = *plan;
        tried.*tokens = middle;
        if (same) tried.slice_tokens = middle;
        if (lk_linear_kl_fits(call, &tried, budget)) low = middle;
        else high = middle - 1;
    }
    plan->*tokens = low;
    if (same) plan->slice_tokens = low;
}

/* The smallest plan with these options: the one that raising begins with. */
LK_HOST lk_linear_kl_plan lk_linear_kl_smallest(const lk_linear_kl_call *call)
{
    const lk_linear_kl_args &a = call->a;
    lk_linear_kl_plan plan = {};
    plan.chunk_tokens = lk_head_min(a.chunk_tokens ? a.chunk_tokens : LK_LINEAR_KL_LEAST, a.tokens);
    plan.slice_tokens = lk_head_min(a.slice_tokens && call->separate ? a.slice_tokens : LK_LINEAR_KL_LEAST, plan.chunk_tokens);
    if (!call->separate) plan.slice_tokens = plan.chunk_tokens;
    return plan;
}

/* `most` tokens, or fewer where as many parts of `all` can then be of nearly equal lengths. */
LK_HOST int64_t lk_linear_kl_even(int64_t all, int64_t most)
{
    return lk_head_min(most, lk_head_round_up(lk_ceil_div(all, lk_ceil_div(all, most)), 64));
}

/* The plan with as long chunks as fit, and slices as long as fit then. False: not even the smallest plan fits. */
LK_HOST bool lk_linear_kl_search(const lk_linear_kl_call *call, int sums, size_t cublas_bytes, size_t budget,
                                 lk_linear_kl_plan *plan)
{
    const lk_linear_kl_args &a = call->a;
    *plan = lk_linear_kl_smallest(call);
    plan->dweight_sums = sums, plan->cublas_bytes = cublas_bytes;
    if (!lk_linear_kl_fits(call, plan, budget)) return false;
    const bool chunks = !a.chunk_tokens, slices = call->separate && !a.slice_tokens;
    if (chunks) { /* first slices of some length, then chunks of any */
        const int64_t most = slices ? lk_head_min(LK_LINEAR_KL_SLICE, a.tokens) : a.tokens;
        lk_linear_kl_raise(call, plan, &lk_linear_kl_plan::chunk_tokens, slices || !call->separate, most, budget);
        lk_linear_kl_raise(call, plan, &lk_linear_kl_plan::chunk_tokens, !call->separate, a.tokens, budget);
        plan->chunk_tokens = lk_linear_kl_even(a.tokens, plan->chunk_tokens);
        plan->slice_tokens = call->separate ? lk_head_min(plan->slice_tokens, plan->chunk_tokens) : plan->chunk_tokens;
    }
    if (slices) lk_linear_kl_raise(call, plan, &lk_linear_kl_plan::slice_tokens, false, plan->chunk_tokens, budget);
    return true;
}

/* The plan within a budget; false if there is none. The first of these that fits:
 *   one chunk, so that dweight is one matmul
 *   chunks of a slice or more, dweight's sums in float in the workspace
 *   chunks of any length, dweight rounded after each; then the same without a workspace for cuBLASLt
 * passes: how often the logits are read. They are computed as often, unless all of them exist at a time. */
LK_HOST bool lk_linear_kl_choose(const lk_linear_kl_call *call, size_t budget, lk_linear_kl_plan *plan, int passes = 1)
{
    const lk_linear_kl_args &a = call->a;
    const bool sums = a.dweight && a.dweight_dtype != LK_DTYPE_F32 && call->gradient;
    lk_linear_kl_plan with = {};
    const int64_t enough = a.chunk_tokens ? 1 : lk_head_min(LK_LINEAR_KL_SLICE, a.tokens);
    if (!lk_linear_kl_search(call, 0, LK_HEAD_CUBLAS_BYTES, budget, plan) && !lk_linear_kl_search(call, 0, 0, budget, plan))
        return false;
    if (sums && plan->chunk_tokens < a.tokens && lk_linear_kl_search(call, 1, plan->cublas_bytes, budget, &with) &&
        with.chunk_tokens >= enough)
        *plan = with;
    const lk_linear_kl_plan smallest = lk_linear_kl_smallest(call);
    plan->workspace_bytes = lk_linear_kl_bytes(call, plan); /* these give the plan again; even slices take less */
    if (!a.slice_tokens) plan->slice_tokens = lk_linear_kl_even(plan->chunk_tokens, plan->slice_tokens);
    plan->minimum_bytes = lk_linear_kl_bytes(call, &smallest);
    plan->chunks = lk_ceil_div(a.tokens, plan->chunk_tokens);
    plan->matmuls = 2 * (plan->slice_tokens < a.tokens ? passes : 1) + (a.dx != NULL) + (a.dweight != NULL);
    snprintf(plan->text, sizeof plan->text, "%lld x %lld tokens, %s logits of %lld tokens at a time, %d matmuls%s",
             (long long)plan->chunks, (long long)plan->chunk_tokens, call->logits_type == LK_DTYPE_F32 ? "f32" : "16-bit",
             (long long)plan->slice_tokens, plan->matmuls,
             !sums || plan->chunks == 1 ? ""
             : plan->dweight_sums       ? ", dweight summed in float"
                                        : ", dweight rounded after each chunk");
    return true;
}

/* ---- The kernels --------------------------------------------------------------------------------------------------------- */

/* One block. A power of two that all rows have goes into alpha, which the matmuls multiply by: f16 has too small a range. */
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_linear_kl_prepare_kernel(lk_linear_kl_work p)
{
    const lk_linear_kl_args &a = p.call.a;
    LK_SHARED(float, warps, [LK_HEAD_THREADS / 32]);
    const int thread = (int)threadIdx.x;
    float most = 0.0f;
    lk_griddepcontrol_wait();
    for (int64_t token = thread; token < a.tokens; token += LK_HEAD_THREADS) {
        const float up = a.upstream ? a.upstream[a.upstream_per_token ? token : 0] : 1.0f;
        most = fmaxf(most, fabsf(a.row_weight ? up * a.row_weight[token] : up));
    }
    most = lk_max_warp(most);
    if (thread % 32 == 0) warps[thread / 32] = most;
    __syncthreads(); /* orders the warps' writes before their reads */
    for (int i = 0; i < LK_HEAD_THREADS / 32; i++) most = fmaxf(most, warps[i]);
    const int e = p.call.type == LK_DTYPE_F32 ? 0 : lk_cublas_exponent(most);
    const float shift = __int_as_float((127 + p.power - e) << 23);
    for (int64_t token = thread; token < a.tokens; token += LK_HEAD_THREADS)
        p.call.ws.upstream[token] = shift * (a.upstream ? a.upstream[a.upstream_per_token ? token : 0] : 1.0f);
    lk_head_counts *const counts = p.ws.counts;
    if (thread == 0) counts->alpha = __int_as_float((127 + e - p.power) << 23), counts->zero = 0.0f, counts->one = 1.0f;
}

/* A thread sums a column of dZ over a chunk. */
template <class T> LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_linear_kl_bias_kernel(lk_linear_kl_work p)
{
    const lk_linear_kl_args &a = p.call.a;
    const int64_t col = (int64_t)blockIdx.x * LK_HEAD_THREADS + threadIdx.x;
    lk_griddepcontrol_wait();
    if (col >= a.vocab) return;
    const T *const dz = (const T *)p.ws.logits + col;
    float sum = p.first_row == 0 ? 0.0f : p.ws.dbias[col];
    LK_UNROLL_BY(8) for (int64_t row = 0; row < p.rows; row++) sum += lk_to_float(dz[row * p.ws.logits_stride]);
    p.ws.dbias[col] = sum;
    if (p.first_row + p.rows < a.tokens) return;
    T *const out = (T *)a.dbias + col;
    lk_put(out, fmaf(p.ws.counts->alpha, sum, a.accumulate ? lk_to_float(*out) : 0.0f));
}

/* ---- The table that the head gets ---------------------------------------------------------------------------------------- */

/* Computes rows of logits. f: what kl.cuh would do with them; args of the table points to one of these. */
typedef lk_status (*lk_linear_kl_rows)(const lk_linear_kl_job *job, const lk_kl_args &f, int64_t first_row);

template <class T, class Logit>
LK_HOST lk_status lk_linear_kl_all_columns(const lk_linear_kl_job *job, const lk_kl_args &f, int64_t)
{
    if (!job->shape.gradient) return lk_kl_launch<Logit, Logit>(job->op, &job->device, f, job->stream);
    return lk_kl_launch<Logit, T>(job->op, &job->device, f, job->stream);
}

/* What the rows need; both biases in the type of the logits. */
template <class T, class Logit> LK_HOST lk_status lk_linear_kl_prepare(const lk_linear_kl_job *job)
{
    const lk_linear_kl_work &p = job->p;
    const lk_linear_kl_args &a = p.call.a;
    lk_status status = LK_OK;
    if (job->shape.gradient)
        status = lk_launch_pdl(job->op, &job->device, lk_linear_kl_prepare_kernel, 1, 1, LK_HEAD_THREADS, 0, job->stream, p);
    for (int i = 0; i < 2 && !status && a.vocab > 0; i++) {
        const void *const from = i ? a.teacher_bias : a.bias;
        void *const to = i ? p.call.ws.teacher_bias : p.ws.bias;
        if (to) status = lk_head_move_rows<T, Logit>(job, {from, to, NULL, NULL, 1, a.vocab, a.vocab, a.vocab, 0, NULL});
    }
    return status;
}

/* The teacher's logits of a slice. */
template <class T> LK_HOST lk_status lk_linear_kl_teacher(const lk_linear_kl_job *job, const lk_linear_kl_work &slice)
{
    const lk_linear_kl_args &a = slice.call.a;
    lk_cublas_product m = lk_head_product(job, job->shape.logits_type, false);
    m.key.transpose_a = 1;
    m.key.m = a.vocab, m.key.n = slice.rows, m.key.k = a.teacher_hidden;
    m.key.lda = a.teacher_weight_stride, m.key.ldb = a.teacher_x_stride, m.key.ldd = slice.ws.logits_stride;
    m.a = a.teacher_weight, m.b = (const T *)a.teacher_x + slice.first_row * a.teacher_x_stride;
    m.bias = slice.call.ws.teacher_bias, m.d = slice.call.ws.teacher;
    return lk_head_multiply_columns(job, &m, &lk_cublas_key::m);
}

/* Losses and dZ of a slice of a chunk. */
template <class T> LK_HOST lk_status lk_linear_kl_slice(const lk_linear_kl_job *job, const lk_linear_kl_work &slice)
{
    const lk_linear_kl_args &a = slice.call.a;
    const lk_head_workspace &ws = slice.ws;
    const int64_t first_row = slice.first_row;
    lk_kl_args f = {};
    f.logits = ws.slice ? ws.slice : ws.logits, f.teacher = slice.call.ws.teacher, f.rows = slice.rows, f.vocab = a.vocab;
    f.logits_stride = f.teacher_stride = f.dlogits_stride = ws.logits_stride;
    f.logit_scale = a.logit_scale, f.teacher_scale = a.teacher_scale;
    f.softcap = a.softcap, f.teacher_softcap = a.teacher_softcap, f.beta = a.beta, f.divergence = a.divergence;
    if (a.row_weight) f.row_weight = a.row_weight + first_row;
    if (a.loss) f.loss = a.loss + first_row;
    if (a.lse) f.lse = a.lse + first_row;
    if (a.teacher_lse) f.teacher_lse = a.teacher_lse + first_row;
    if (a.entropy) f.entropy = a.entropy + first_row;
    if (job->shape.gradient) {
        f.upstream = slice.call.ws.upstream + first_row, f.upstream_per_row = 1;
        f.dlogits = (T *)ws.logits + lk_head_in_chunk(job, slice) * ws.logits_stride;
    }
    return (*(const lk_linear_kl_rows *)job->rows->args)(job, f, first_row);
}

/* dbias of a chunk's dZ; with the last chunk it is complete. */
template <class T> LK_HOST lk_status lk_linear_kl_dbias(const lk_linear_kl_job *job, const lk_linear_kl_work &chunk)
{
    const lk_linear_kl_args &a = chunk.call.a;
    if (!a.dbias) return LK_OK;
    return lk_head_launch(job, lk_linear_kl_bias_kernel<T>, lk_ceil_div(a.vocab, LK_HEAD_THREADS), chunk);
}

/* A rank without columns still has rows. */
template <class T, class Logit> LK_HOST lk_status lk_linear_kl_no_columns(const lk_linear_kl_job *job, lk_direction)
{
    lk_linear_kl_work all = job->p;
    all.rows = all.call.a.tokens;
    const lk_status status = lk_linear_kl_prepare<T, Logit>(job);
    return status ? status : lk_linear_kl_slice<T>(job, all);
}

template <class T, class Logit> LK_HOST lk_linear_kl_table lk_linear_kl_table_of(const lk_linear_kl_rows *rows)
{
    return {lk_linear_kl_prepare<T, Logit>, lk_linear_kl_teacher<T>, lk_linear_kl_slice<T>, lk_linear_kl_dbias<T>, NULL, NULL,
            lk_linear_kl_no_columns<T, Logit>, NULL, NULL, NULL, NULL, NULL, rows};
}

/* ---- The context --------------------------------------------------------------------------------------------------------- */

static_assert(sizeof(lk_cublas_context) <= sizeof(lk_linear_kl_context), "the opaque struct is large enough");

LK_CUBLAS_CONTEXT(linear_kl)

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* What linear_kl_parallel.cuh adds to the checks. */
typedef struct {
    int passes; /* as in lk_linear_kl_choose */
    size_t fixed; /* bytes of the workspace that it takes before all others */
    lk_tensor list[2];
} lk_linear_kl_more;

/* Validates a call and fills it in. A query looks at shapes and options; its pointers say what is wanted. plan: that of the
 * workspace, or of `budget` in a query. least: a budget below the smallest workspace counts as that. more: NULL for all columns. */
template <class T>
LK_HOST lk_status lk_linear_kl_check(const char *op, const lk_linear_kl_args *args, lk_direction direction, bool query,
                                     size_t budget, bool least, lk_linear_kl_call *call, lk_linear_kl_plan *plan,
                                     const lk_linear_kl_more *more = NULL)
{
    *call = {}, *plan = {};
    lk_linear_kl_args *const a = &call->a;
    *a = *args;
    lk_kl_fill_in(a);
    if (a->teacher_hidden == 0) a->teacher_hidden = a->hidden;
    const bool forward = direction & LK_FORWARD, backward = direction & LK_BACKWARD; /* a rank may give neither */
    if (!forward) a->loss = a->lse = a->teacher_lse = a->entropy = NULL;
    if (!backward) a->dx = a->dweight = a->dbias = NULL, a->upstream = NULL, a->dweight_dtype = LK_DTYPE_T;
    const bool some = a->tokens != 0, written = backward && (some || !a->accumulate); /* without tokens nothing is read */
    const int64_t vocab = some ? a->vocab : 0, tokens = a->tokens;
    const int out = forward ? LK_OUT : LK_UNUSED, gradient = backward ? LK_OUT : LK_UNUSED;
    const size_t fixed = more ? more->fixed : 0;
    const lk_tensor none = {"", NULL, 1, LK_UNUSED, 0};
    lk_tensor list[] = {
        {"x", a->x, sizeof(T), LK_REQUIRED, a->hidden, {{tokens, &a->x_stride, "x_stride"}}},
        {"weight", a->weight, sizeof(T), LK_REQUIRED, a->hidden, {{vocab, &a->weight_stride, "weight_stride"}}},
        {"bias", a->bias, sizeof(T), LK_IN, vocab},
        {"teacher_x", a->teacher_x, sizeof(T), LK_REQUIRED, a->teacher_hidden,
         {{tokens, &a->teacher_x_stride, "teacher_x_stride"}}},
        {"teacher_weight", a->teacher_weight, sizeof(T), LK_REQUIRED, a->teacher_hidden,
         {{vocab, &a->teacher_weight_stride, "teacher_weight_stride"}}},
        {"teacher_bias", a->teacher_bias, sizeof(T), LK_IN, vocab},
        {"row_weight", a->row_weight, 4, LK_IN, tokens},
        {"upstream", a->upstream, 4, backward ? LK_IN : LK_UNUSED, a->upstream_per_token ? tokens : some},
        {"loss", a->loss, 4, out, tokens},
        {"lse", a->lse, 4, out, tokens},
        {"teacher_lse", a->teacher_lse, 4, out, tokens},
        {"entropy", a->entropy, 4, out, tokens},
        {"dx", a->dx, sizeof(T), gradient, a->hidden, {{tokens, &a->dx_stride, "dx_stride"}}},
        {"dweight", a->dweight, lk_dtype_bytes<T>(a->dweight_dtype), gradient, a->hidden,
         {{written ? a->vocab : 0, &a->dweight_stride, "dweight_stride"}}},
        {"dbias", a->dbias, sizeof(T), gradient, written ? a->vocab : 0},
        more ? more->list[0] : none,
        more ? more->list[1] : none,
        lk_workspace(a->workspace, some ? a->workspace_bytes : 0),
    };
    const int count = lk_used_tensors(list, LK_COUNT(list));
    lk_checks checks = {op, LK_OK};
    if (!query && some && !a->context) lk_reject(&checks, LK_ERR_NULL, "context is NULL");
    lk_check_size(&checks, "tokens", tokens, 0, INT32_MAX);
    lk_check_size(&checks, "hidden", a->hidden, 1, 1 << 30);
    lk_check_size(&checks, "teacher_hidden", a->teacher_hidden, 1, 1 << 30);
    lk_check_size(&checks, "vocab", a->vocab, more ? 0 : 1, 1 << 30);
    lk_check_size(&checks, "chunk_tokens", a->chunk_tokens, 0, INT64_MAX);
    lk_check_size(&checks, "slice_tokens", a->slice_tokens, 0, INT64_MAX);
    lk_check_shapes(&checks, list, count, query);
    lk_kl_check_values(&checks, a);
    lk_check_dtype<T>(&checks, "dweight_dtype", a->dweight_dtype);
    if (!checks.status && !query && some) checks.status = lk_cublas_check(op, (const lk_cublas_context *)a->context);
    if (checks.status) return checks.status;

    if (a->dweight_dtype == LK_DTYPE_T) a->dweight_dtype = lk_dtype<T>;
    if (tokens <= 1) a->x_stride = lk_head_round_up(a->hidden, 8), a->teacher_x_stride = lk_head_round_up(a->teacher_hidden, 8);
    call->gradient = a->dx || a->dweight || a->dbias;
    call->type = lk_dtype<T>, call->logits_type = a->fast_logits ? lk_dtype<T> : LK_DTYPE_F32;
    call->separate = call->gradient && call->type != call->logits_type;
    size_t needed = 0;
    if (some) {
        const lk_linear_kl_plan smallest = lk_linear_kl_smallest(call);
        needed = fixed + lk_linear_kl_bytes(call, &smallest);
        if (least && budget < needed) budget = needed;
        if ((budget < fixed || !lk_linear_kl_choose(call, budget - fixed, plan, more ? more->passes : 1)) && query)
            return lk_fail(LK_ERR_WORKSPACE, op, "the budget is %zu; this call needs a workspace of %zu bytes", budget, needed);
        plan->workspace_bytes += fixed, plan->minimum_bytes += fixed;
    } else {
        snprintf(plan->text, sizeof plan->text, "no tokens, no workspace");
    }
    if (query) return LK_OK;
    lk_check_alignment(&checks, list, count);
    lk_check_workspace(&checks, a->workspace, a->workspace_bytes, needed);
    lk_check_warn(&checks, !some, "tokens is 0; nothing is computed");
    lk_check_allocations(&checks, list, count);
    return checks.status;
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* The gradients of no tokens. */
LK_HOST lk_status lk_linear_kl_clear(const char *op, const lk_linear_kl_args &a, int bytes, cudaStream_t stream)
{
    const size_t element = a.dweight_dtype == LK_DTYPE_F32 ? 4 : (size_t)bytes;
    const size_t stride = (size_t)a.dweight_stride * element, width = (size_t)a.hidden * element;
    cudaError_t error = cudaSuccess;
    if (a.dweight && !a.accumulate) error = cudaMemset2DAsync(a.dweight, stride, 0, width, (size_t)a.vocab, stream);
    if (a.dbias && !a.accumulate && !error) error = cudaMemsetAsync(a.dbias, 0, (size_t)(a.vocab * bytes), stream);
    return lk_launched(op, error);
}

/* Checks a call and begins its job. */
template <class T>
LK_HOST lk_status lk_linear_kl_begin(const char *op, const lk_linear_kl_args *args, lk_direction direction, cudaStream_t stream,
                                     lk_linear_kl_job *job, const lk_linear_kl_more *more = NULL)
{
    const cudaError_t error = lk_current_device(&job->device);
    lk_linear_kl_call &call = job->p.call;
    const size_t given = args ? args->workspace_bytes : 0;
    lk_linear_kl_plan plan;
    lk_checks checks = {op, lk_linear_kl_check<T>(op, args, direction, false, given, false, &call, &plan, more)};
    lk_check_device(&checks, error);
    if (checks.status || call.a.tokens == 0) return checks.status;
    job->op = op, job->stream = stream, job->shape = lk_linear_kl_shape(&call);
    job->plan.path = LK_HEAD_PATH_CHUNKS, job->plan.panel_vocab = call.a.vocab, job->plan.panels = 1;
    job->plan.chunk_tokens = plan.chunk_tokens, job->plan.chunks = plan.chunks, job->plan.slice_tokens = plan.slice_tokens;
    job->plan.cublas_bytes = plan.cublas_bytes;
    job->p.ws = lk_linear_kl_lay_out(&call, &plan, (char *)call.a.workspace + (more ? more->fixed : 0), &call.ws);
    const int power = 8 - (int)ceilf(log2f(call.a.logit_scale)); /* so |dZ| below 2^8 times its factors fits f16 */
    job->p.power = call.type == LK_DTYPE_F32 ? 0 : power < -20 ? -20 : power > 40 ? 40 : power;
    return LK_OK;
}

template <class T>
LK_HOST lk_status lk_linear_kl_run(const char *op, const lk_linear_kl_args *args, lk_direction direction, cudaStream_t stream)
{
    lk_linear_kl_job job = {};
    lk_status status = lk_linear_kl_begin<T>(op, args, direction, stream, &job);
    const lk_linear_kl_args &a = job.p.call.a;
    if (status) return status;
    if (a.tokens == 0) return lk_linear_kl_clear(op, a, sizeof(T), stream);
    const lk_linear_kl_rows f32 = lk_linear_kl_all_columns<T, float>, fast = lk_linear_kl_all_columns<T, T>;
    const lk_linear_kl_table table = a.fast_logits ? lk_linear_kl_table_of<T, T>(&fast) : lk_linear_kl_table_of<T, float>(&f32);
    job.rows = &table;
    return lk_head_run<T>(&job);
}

/* The plan within a budget; least: or the smallest, where that is more. */
template <class T>
LK_HOST lk_status lk_linear_kl_find(const char *op, const lk_linear_kl_args *args, lk_direction direction, size_t budget,
                                    bool least, lk_linear_kl_plan *plan)
{
    lk_linear_kl_call call;
    lk_linear_kl_plan answer;
    const lk_status status = lk_linear_kl_check<T>(op, args, direction, true, budget, least, &call, &answer);
    if (!status) *plan = answer;
    return status;
}

template <class T>
LK_HOST lk_status lk_linear_kl_query(const char *op, const lk_linear_kl_args *args, lk_direction direction, size_t *bytes)
{
    lk_linear_kl_plan plan;
    const lk_status status = lk_linear_kl_find<T>(op, args, direction, lk_cublas_default_budget(), true, &plan);
    if (!status && bytes) *bytes = plan.workspace_bytes;
    return status;
}
template <class T>
LK_HOST lk_status lk_linear_kl_query_plan(const char *op, const lk_linear_kl_args *args, lk_direction direction, size_t budget,
                                          lk_linear_kl_plan *plan)
{
    return lk_linear_kl_find<T>(op, args, direction, budget, false, plan);
}

#endif /* CUDA or the simulator */
#endif
