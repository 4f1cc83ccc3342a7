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
 *            forward computes loss, lse, teacher_lse and entropy, in 2 matmuls. backward computes dx, dweight and dbias, in 4: it
 *            needs nothing of forward and computes the logits again. forward_backward computes all of these in 4; it needs
 *            upstream in advance. Outputs whose pointer is NULL are not computed.
 *            The workspace function answers what the fastest plan within a sixteenth of the device's memory (without a device
 *            1 GiB) needs, or the smallest plan if that needs more. For another amount of memory, ask for a plan:
 *                lk_linear_kl_plan plan;
 *                status = lk_linear_kl_forward_backward_plan_bf16(&args, budget, &plan);   puts(plan.text);
 *                args.workspace = ..., args.workspace_bytes = plan.workspace_bytes;
 * Needs      kl.cuh, lk_base.cuh, lk_check.cuh, lk_counted.cuh, lk_cublas.cuh, lk_head.cuh, lk_head_plan.cuh, lk_loss.cuh,
 *            lk_move.cuh, lk_row.cuh, lk_ptx.cuh; cuBLASLt.
 * Options    A struct with context, x, weight, teacher_x, teacher_weight, the sizes and one output computes LK_KL_FORWARD of each
 *            token. Divergences, scales, softcaps and beta are kl.cuh's. teacher_hidden 0 means hidden.
 *            row_weight is a factor of each token's loss and gradient. A mean over the tokens that count is row_weight = 1 over
 *            their number for them, 0 for the others, and the sum of loss. A token with row_weight 0 has loss 0 and adds nothing;
 *            keep its x finite, since 0 times NaN is NaN.
 *            max_counted, above 0 and below tokens: only tokens whose row_weight is not 0 count, and the matmuls have
 *            max_counted rows. x and teacher_x of the tokens that count are copied into the workspace; no other x and teacher_x is
 *            read, so they may be anything. Results are as without it. But if more tokens count than max_counted says, then loss,
 *            lse, teacher_lse, entropy and all gradients are NaN.
 *            Vocabularies of different lengths: pass the shorter one; the other head's last columns are then left out.
 *            bias = -inf masks a column of the student, teacher_bias = -inf one of the teacher.
 *            fast_logits: logits are rounded to T; less memory and traffic. Else they are f32. tf32: products of f32 by TF32.
 *            upstream: one number, or with upstream_per_token one for each token; upstream_value, a number of the host, is one
 *            more factor. With accumulate_loss each token's loss is added to what loss holds.
 *            Columns that are split over ranks: linear_kl_parallel.cuh, which has these options.
 * Exact      As kl.cuh, for logits in f32. dZ is rounded to T once, dx and dbias once more; of dx in bf16 the part of the last
 *            vocab % 8 columns twice. A dweight of f32 is the float sum over all chunks. A dweight of 16 bits is rounded once if
 *            there is one chunk. With several chunks plan.dweight_sums says when. Not 0: once, after the last chunk, from a float
 *            sum in the workspace. 0: after each chunk.
 * Repeatable The same bits every time for the same shapes, strides, alignment of pointers (modulo 256) and workspace size. A matmul
 *            has the algorithm that cuBLASLt's heuristic names first. All else has a fixed order; there are no float atomics.
 *            loss and entropy of forward and of forward_backward may differ in their last digits.
 * Source     Hinton et al., 2015, and Agarwal et al., 2023, as in kl.cuh; chunks of tokens: Liger-Kernel, 2024.
 * Read on    lk/linear_kl.md: plans of the workspace, how exact results are, and what is read and written.
 *
 * What runs. Tokens come in chunks, the logits of a chunk in slices. The matmuls and their order are lk_head.cuh's, as CHUNKS; what
 * happens to rows is a table of functions that the head calls, lk_linear_kl_table. lk_head_plan.cuh chooses the plan.
 *   every call, first     lk_linear_kl_prepare_kernel: the factor of each row's gradient
 *                         with max_counted before it: lk_counted.cuh copies the tokens that count, and at the end their results
 *   each slice            logits of student and teacher by cuBLASLt; kl.cuh's kernel computes losses and dZ from them
 *   each chunk            lk_head_columns_kernel sums dbias; dweight and dx by cuBLASLt
 *   after the chunks      lk_move_kernel rounds dweight, where its sums lie in the workspace; lk_linear_kl_finish_kernel: dbias
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
    int matmuls;            /* of 2 * tokens * hidden * vocab operations each; the teacher's with teacher_hidden instead */
    int dweight_sums;       /* not 0: dweight of 16 bits is summed over chunks in float, in the workspace. 0: see Exact */
    char text[300];         /* all of this in words */
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
    void *dweight;              /* B FB out   dweight_dtype [vocab, hidden]; NULL to skip. Scratch first, except with accumulate */
    void *dbias;                /* B FB out   T [vocab]; NULL to skip */
    void *workspace;            /* scratch, aligned to LK_WORKSPACE_ALIGNMENT bytes; NULL when 0 */
    size_t workspace_bytes;     /* at least a plan's minimum_bytes; it chooses the plan. More is faster, or the same */
    int64_t tokens;             /* 0 to 2^31 - 1 */
    int64_t hidden;             /* 1 to 2^30 */
    int64_t teacher_hidden;     /* 1 to 2^30; 0 means hidden */
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
    float upstream_value;       /* B FB a factor of upstream, or where that is NULL the gradient of loss itself; 0 means 1 */
    int accumulate_loss;        /* F FB not 0: loss is added to what is there */
    int divergence;             /* LK_KL_FORWARD, _REVERSE, _JENSEN_SHANNON, _TOTAL_VARIATION; 0: FORWARD */
    int upstream_per_token;     /* B FB not 0: upstream is [tokens] */
    int accumulate;             /* B FB not 0: dweight and dbias are added to their old contents */
    int dweight_dtype;          /* B FB LK_DTYPE_*: T or f32; 0: T */
    int fast_logits;            /* not 0: logits are T instead of f32 */
    int tf32;                   /* not 0: matmuls of T = f32 may round their factors to TF32 */
    int max_counted;            /* an upper bound of the tokens whose row_weight is not 0; 0, or tokens and more: none */
} lk_linear_kl_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md:
 *   LK_ERR_NULL       args, plan, context, x, weight, teacher_x or teacher_weight is NULL; row_weight, if max_counted is above 0
 *                     and below tokens; or all outputs are NULL. With tokens = 0 all except for args and plan may be NULL
 *   LK_ERR_SHAPE      tokens, hidden, teacher_hidden or vocab out of range; a stride that is not 0 and below its row; a tensor
 *                     that spans more than 2^62 elements; chunk_tokens, slice_tokens or max_counted below 0
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
 * NULL says that there is such a tensor, or that it is wanted (dx, dweight, dbias, bias, teacher_bias; with max_counted
 * also loss, lse, teacher_lse and entropy, and with upstream_per_token upstream). Without accumulate, a packed dweight at a multiple
 * of 256 bytes may hold logits. So a plan depends on dweight's address; minimum_bytes does not. */
#define LK_LINEAR_KL_FUNCTIONS(X, T)                                                                                           \
    X##_PLANNED(linear_kl, forward, LK_FORWARD, linear_kl, T)                                                                  \
    X##_PLANNED(linear_kl, backward, LK_BACKWARD, linear_kl, T)                                                                \
    X##_PLANNED(linear_kl, forward_backward, LK_BOTH, linear_kl, T)
#define LK_DECLARE_LINEAR_KL(T) LK_DECLARE(LINEAR_KL, T)
#define LK_DEFINE_LINEAR_KL(T) LK_DEFINE(LINEAR_KL, T)

#if LK_CUDA

#include "lk_counted.cuh"
#include "lk_head.cuh"

/* ---- A call, and its plan ------------------------------------------------------------------------------------------------ */

struct lk_linear_kl_call {
    typedef lk_linear_kl_args args;
    lk_linear_kl_args a; /* with every default filled in; without the outputs of other calls. With max_counted: of the rows */
    bool gradient;       /* dx, dweight or dbias is wanted */
    int type, logits_type;
};

/* lk_head.cuh's, for these calls. */
typedef lk_head_work<lk_linear_kl_call> lk_linear_kl_work;
typedef lk_head_job<lk_linear_kl_call> lk_linear_kl_job;
typedef lk_head_rows<lk_linear_kl_call> lk_linear_kl_table;

/* What the plan of a call follows from. */
LK_HOST lk_head_shape lk_linear_kl_shape(const lk_linear_kl_call *call)
{
    const lk_linear_kl_args &a = call->a;
    lk_head_shape s = {};
    s.rows = a.tokens, s.hidden = a.hidden, s.vocab = s.classes = a.vocab, s.dweight_stride = a.dweight_stride;
    s.chunk_tokens = lk_head_min(a.chunk_tokens, a.tokens), s.slice_tokens = lk_head_min(a.slice_tokens, a.tokens);
    s.dweight = a.dweight, s.why_not_fused = "", s.type = call->type, s.logits_type = call->logits_type;
    s.dweight_dtype = a.dweight_dtype, s.gradient = call->gradient, s.no_panels = s.no_targets = s.two_heads = true;
    s.bias = a.bias, s.other_bias = a.teacher_bias, s.dx = a.dx, s.dbias = a.dbias, s.accumulate = a.accumulate, s.tf32 = a.tf32;
    return s;
}

/* What the caller gets of a plan. passes: how often a call goes through the logits. Each pass computes them again, unless one slice
 * has all tokens. */
LK_HOST lk_linear_kl_plan lk_linear_kl_answer(const lk_head_planner *planner, lk_head_plan plan, int passes)
{
    const lk_head_shape &s = planner->shape;
    lk_linear_kl_plan to = {};
    to.workspace_bytes = plan.workspace_bytes, to.minimum_bytes = planner->least, to.cublas_bytes = plan.cublas_bytes;
    to.chunk_tokens = plan.chunk_tokens, to.chunks = plan.chunks;
    to.slice_tokens = plan.slice_tokens ? plan.slice_tokens : plan.chunk_tokens;
    if (plan.chunks && to.slice_tokens < s.rows) plan.matmuls += 2 * (passes - 1);
    to.matmuls = plan.matmuls, to.dweight_sums = lk_head_sums_dweight(&s, plan.chunk_tokens) && !plan.rounds;
    lk_head_describe(&s, &plan, to.text, sizeof to.text);
    return to;
}

/* ---- The kernels --------------------------------------------------------------------------------------------------------- */

LK_DEVICE float lk_linear_kl_upstream(const lk_linear_kl_args &a, int64_t token)
{
    return a.upstream_value * (a.upstream ? a.upstream[a.upstream_per_token ? token : 0] : 1.0f);
}

/* One block. For dZ of 16 bits it takes a power of two, the same for all rows, out of their factors and puts it into alpha, which
 * the matmuls multiply by. f16 needs this, since its range is small; bf16 could do without. */
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_linear_kl_prepare_kernel(lk_linear_kl_work p)
{
    const lk_linear_kl_args &a = p.call.a;
    LK_SHARED(float, warps, [LK_HEAD_THREADS / 32]);
    const int thread = (int)threadIdx.x;
    float most = 0.0f;
    lk_griddepcontrol_wait();
    for (int64_t token = thread; token < a.tokens; token += LK_HEAD_THREADS) {
        const float up = lk_linear_kl_upstream(a, token);
        most = fmaxf(most, fabsf(a.row_weight ? up * a.row_weight[token] : up));
    }
    most = lk_max_warp(most);
    if (thread % 32 == 0) warps[thread / 32] = most;
    __syncthreads(); /* orders the warps' writes before their reads */
    for (int i = 0; i < LK_HEAD_THREADS / 32; i++) most = fmaxf(most, warps[i]);
    const int e = p.call.type == LK_DTYPE_F32 ? 0 : lk_cublas_exponent(most);
    const float shift = __int_as_float((127 + p.power - e) << 23);
    for (int64_t token = thread; token < a.tokens; token += LK_HEAD_THREADS)
        p.ws.factor[token] = shift * lk_linear_kl_upstream(a, token);
    lk_head_counts *const counts = p.ws.counts;
    if (thread == 0) counts->alpha = __int_as_float((127 + e - p.power) << 23), counts->zero = 0.0f, counts->one = 1.0f;
}

/* A thread completes a column of dbias. */
template <class T> LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_linear_kl_finish_kernel(lk_linear_kl_work p)
{
    const lk_linear_kl_args &a = p.call.a;
    const int64_t col = (int64_t)blockIdx.x * LK_HEAD_THREADS + threadIdx.x;
    float sum = 0.0f;
    lk_griddepcontrol_wait();
    if (col >= a.vocab) return;
    for (int64_t split = 0; split < p.ws.splits; split++) sum += p.ws.dbias[split * a.vocab + col];
    T *const out = (T *)a.dbias + col;
    lk_put(out, fmaf(p.ws.counts->alpha, sum, a.accumulate ? lk_to_float(*out) : 0.0f));
}

/* ---- The table that the head gets ---------------------------------------------------------------------------------------- */

/* Computes rows of logits. f: what kl.cuh would do with them. */
typedef lk_status (*lk_linear_kl_rows)(const lk_linear_kl_job *job, const lk_kl_args &f, int64_t first_row);

/* What args of the table points to. */
typedef struct {
    lk_linear_kl_rows rows;
    const lk_counted *counted; /* NULL: all tokens are rows */
} lk_linear_kl_own;
LK_HOST const lk_linear_kl_own *lk_linear_kl_own_of(const lk_linear_kl_job *job)
{
    return (const lk_linear_kl_own *)job->rows->args;
}

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
    const lk_counted *const counted = lk_linear_kl_own_of(job)->counted;
    lk_status status = counted ? lk_counted_gather<T>(job->op, &job->device, counted, job->stream) : LK_OK;
    if (job->shape.gradient && !status)
        status = lk_launch_pdl(job->op, &job->device, lk_linear_kl_prepare_kernel, 1, 1, LK_HEAD_THREADS, 0, job->stream, p);
    for (int i = 0; i < 2 && !status && a.vocab > 0; i++) {
        const void *const from = i ? a.teacher_bias : a.bias;
        void *const to = i ? p.ws.other_bias : p.ws.bias;
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
    m.bias = slice.ws.other_bias, m.d = slice.ws.other_logits;
    return lk_head_multiply_columns(job, &m, &lk_cublas_key::m);
}

/* What kl.cuh gets of `rows` tokens from `first` on, besides logits and gradients. */
LK_HOST lk_kl_args lk_linear_kl_args_of(const lk_linear_kl_args &a, int64_t first, int64_t rows)
{
    lk_kl_args f = {};
    f.rows = rows, f.vocab = a.vocab;
    f.logit_scale = a.logit_scale, f.teacher_scale = a.teacher_scale;
    f.softcap = a.softcap, f.teacher_softcap = a.teacher_softcap, f.beta = a.beta, f.divergence = a.divergence;
    f.accumulate_loss = a.accumulate_loss;
    if (a.row_weight) f.row_weight = a.row_weight + first;
    if (a.loss) f.loss = a.loss + first;
    if (a.lse) f.lse = a.lse + first;
    if (a.teacher_lse) f.teacher_lse = a.teacher_lse + first;
    if (a.entropy) f.entropy = a.entropy + first;
    return f;
}

/* Losses and dZ of a slice of a chunk. */
template <class T> LK_HOST lk_status lk_linear_kl_slice(const lk_linear_kl_job *job, const lk_linear_kl_work &slice)
{
    const lk_head_workspace &ws = slice.ws;
    lk_kl_args f = lk_linear_kl_args_of(slice.call.a, slice.first_row, slice.rows);
    f.logits = ws.slice ? ws.slice : ws.logits, f.teacher = ws.other_logits, f.upstream_value = 1.0f;
    f.logits_stride = f.teacher_stride = f.dlogits_stride = ws.logits_stride;
    if (job->shape.gradient) {
        f.upstream = ws.factor + slice.first_row, f.upstream_per_row = 1;
        f.dlogits = (T *)ws.logits + lk_head_in_chunk(job, slice) * ws.logits_stride;
    }
    return lk_linear_kl_own_of(job)->rows(job, f, slice.first_row);
}

/* After the last chunk: dbias, and the results of the tokens that count. */
template <class T> LK_HOST lk_status lk_linear_kl_finish(const lk_linear_kl_job *job, const lk_linear_kl_work &p)
{
    const lk_counted *const counted = lk_linear_kl_own_of(job)->counted;
    lk_status status = LK_OK;
    if (job->shape.gradient && p.call.a.dbias)
        status = lk_head_launch(job, lk_linear_kl_finish_kernel<T>, lk_ceil_div(p.call.a.vocab, LK_HEAD_THREADS), p);
    return status || !counted ? status : lk_counted_scatter<T>(job->op, &job->device, counted, job->stream);
}

/* A rank without columns still has rows, and their states. */
template <class T> LK_HOST lk_status lk_linear_kl_no_columns(const lk_linear_kl_job *job, lk_direction)
{
    lk_linear_kl_work all = job->p;
    all.rows = all.call.a.tokens;
    return job->shape.gradient ? LK_OK : lk_linear_kl_slice<T>(job, all);
}

template <class T, class Logit> LK_HOST lk_linear_kl_table lk_linear_kl_table_of(const lk_linear_kl_own *own)
{
    return {lk_linear_kl_prepare<T, Logit>, lk_linear_kl_teacher<T>, lk_linear_kl_slice<T>, lk_head_dbias<T, lk_linear_kl_call>, NULL,
            lk_linear_kl_finish<T>, lk_linear_kl_no_columns<T>, NULL, NULL, NULL, NULL, NULL, own};
}

/* ---- The context --------------------------------------------------------------------------------------------------------- */

static_assert(sizeof(lk_cublas_context) <= sizeof(lk_linear_kl_context), "the opaque struct is large enough");

LK_CUBLAS_CONTEXT(linear_kl)

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* What linear_kl_parallel.cuh adds to the checks. */
typedef struct {
    int passes;   /* as in lk_linear_kl_answer */
    size_t bytes; /* of the workspace that it takes before all others */
    lk_tensor list[2];
} lk_linear_kl_more;

/* Changes the arguments of a call: they become those of the tokens that count. Its strides are filled in. arena: of the workspace. */
template <class T> LK_HOST void lk_linear_kl_count(lk_counted *c, lk_arena *arena, lk_linear_kl_args *a)
{
    lk_counted_begin(c, arena, a->tokens, a->max_counted, a->row_weight);
    lk_counted_spoil(c, a->dx, a->tokens, a->hidden, a->dx_stride, sizeof(T));
    lk_counted_spoil(c, a->dweight, a->vocab, a->hidden, a->dweight_stride, lk_dtype_bytes<T>(a->dweight_dtype));
    lk_counted_spoil(c, a->dbias, 1, a->vocab, a->vocab, sizeof(T));
    lk_counted_in(c, arena, &a->row_weight, true);
    if (a->upstream_per_token) lk_counted_in(c, arena, &a->upstream);
    lk_counted_out(c, arena, &a->loss, true, 0, 1, 1, a->accumulate_loss);
    for (float **out : {&a->lse, &a->teacher_lse, &a->entropy}) lk_counted_out(c, arena, out, true);
    lk_counted_x<T>(c, arena, &a->x, a->hidden, &a->x_stride, &c->x[0]);
    lk_counted_x<T>(c, arena, &a->teacher_x, a->teacher_hidden, &a->teacher_x_stride, &c->x[1]);
    lk_counted_dx<T>(c, arena, &a->dx, a->hidden, &a->dx_stride);
    a->tokens = a->max_counted, a->accumulate_loss = 0;
}

/* Validates a call, fills it in and begins its plan. A query looks at shapes and options; its pointers say what is wanted. before:
 * the bytes of the workspace that come before the plan's; counted, where max_counted is below tokens, takes of them. more: NULL for
 * all columns. */
template <class T>
LK_HOST lk_status lk_linear_kl_check(const char *op, const lk_linear_kl_args *args, lk_direction direction, bool query,
                                     lk_linear_kl_call *call, lk_head_planner *planner, lk_counted *counted, size_t *before,
                                     const lk_linear_kl_more *more = NULL)
{
    *call = {};
    lk_linear_kl_args *const a = &call->a;
    *a = *args;
    lk_kl_fill_in(a);
    if (a->teacher_hidden == 0) a->teacher_hidden = a->hidden;
    const bool forward = direction & LK_FORWARD, backward = direction & LK_BACKWARD; /* a rank may give neither */
    if (!forward) a->loss = a->lse = a->teacher_lse = a->entropy = NULL;
    if (!backward) a->dx = a->dweight = a->dbias = NULL, a->upstream = NULL, a->dweight_dtype = LK_DTYPE_T;
    const bool some = a->tokens != 0, written = backward && (some || !a->accumulate); /* without tokens nothing is read */
    const bool counts = a->max_counted > 0 && a->max_counted < a->tokens;
    const int64_t vocab = some ? a->vocab : 0, tokens = a->tokens;
    const int out = forward ? LK_OUT : LK_UNUSED, gradient = backward ? LK_OUT : LK_UNUSED;
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
        {"row_weight", a->row_weight, 4, counts ? LK_REQUIRED : LK_IN, tokens},
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
    lk_check_size(&checks, "max_counted", a->max_counted, 0, INT32_MAX);
    lk_check_shapes(&checks, list, count, query);
    lk_kl_check_values(&checks, a);
    lk_check_dtype<T>(&checks, "dweight_dtype", a->dweight_dtype);
    if (!checks.status && !query && some) checks.status = lk_cublas_check(op, (const lk_cublas_context *)a->context);
    if (checks.status) return checks.status;

    if (a->dweight_dtype == LK_DTYPE_T) a->dweight_dtype = lk_dtype<T>;
    if (tokens <= 1) a->x_stride = lk_head_round_up(a->hidden, 8), a->teacher_x_stride = lk_head_round_up(a->teacher_hidden, 8);
    call->gradient = a->dx || a->dweight || a->dbias;
    call->type = lk_dtype<T>, call->logits_type = a->fast_logits ? lk_dtype<T> : LK_DTYPE_F32;
    lk_linear_kl_call rows = *call; /* those that count; `list` has addresses of the tokens' strides */
    lk_arena arena = {(uintptr_t)a->workspace, 0, LK_WORKSPACE_ALIGNMENT};
    *counted = {};
    if (counts) lk_linear_kl_count<T>(counted, &arena, &rows.a);
    *before = more ? more->bytes : arena.used;
    lk_head_shape shape = lk_linear_kl_shape(&rows);
    shape.several_passes = more && more->passes > 1;
    lk_head_plan_begin(planner, &shape);
    if (!query) {
        lk_check_alignment(&checks, list, count);
        lk_check_workspace(&checks, a->workspace, a->workspace_bytes, planner->least + *before);
        lk_check_warn(&checks, !some, "tokens is 0; nothing is computed");
        lk_check_allocations(&checks, list, count);
    }
    *call = rows;
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
                                     lk_linear_kl_job *job, lk_counted *counted, const lk_linear_kl_more *more = NULL)
{
    const cudaError_t error = lk_current_device(&job->device);
    lk_linear_kl_call &call = job->p.call;
    size_t before;
    lk_head_planner planner;
    lk_checks checks = {op, lk_linear_kl_check<T>(op, args, direction, false, &call, &planner, counted, &before, more)};
    lk_check_device(&checks, error);
    if (checks.status || call.a.tokens == 0) return checks.status;
    job->op = op, job->stream = stream, job->shape = planner.shape;
    lk_head_choose(&planner, call.a.workspace_bytes - before, &job->plan);
    if (call.a.vocab > 0) job->p.ws = lk_head_lay_out(&job->shape, &job->plan, (char *)call.a.workspace + before);
    const int power = 8 - (int)ceilf(log2f(call.a.logit_scale)); /* so |dZ| below 2^8 times its factors fits f16 */
    job->p.power = call.type == LK_DTYPE_F32 ? 0 : power < -20 ? -20 : power > 40 ? 40 : power;
    return LK_OK;
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_kl_run(const char *op, const lk_linear_kl_args *args, cudaStream_t stream)
{
    lk_linear_kl_job job = {};
    lk_counted counted;
    lk_status status = lk_linear_kl_begin<T>(op, args, direction, stream, &job, &counted);
    const lk_linear_kl_args &a = job.p.call.a;
    if (status) return status;
    if (a.tokens == 0) return lk_linear_kl_clear(op, a, sizeof(T), stream);
    const lk_linear_kl_own own = {a.fast_logits ? lk_linear_kl_all_columns<T, T> : lk_linear_kl_all_columns<T, float>,
                                  counted.list.rows ? &counted : NULL};
    const lk_linear_kl_table table = a.fast_logits ? lk_linear_kl_table_of<T, T>(&own) : lk_linear_kl_table_of<T, float>(&own);
    job.rows = &table;
    return lk_head_run<T>(&job);
}

/* The plan within a budget; least: or the smallest, where that is more. more: as in lk_linear_kl_check. */
template <class T>
LK_HOST lk_status lk_linear_kl_query_plan(const char *op, const lk_linear_kl_args *args, lk_direction direction, size_t budget,
                                          bool least, lk_linear_kl_plan *answer, const lk_linear_kl_more *more = NULL)
{
    lk_linear_kl_call call;
    lk_head_planner planner;
    lk_head_plan plan;
    lk_counted counted;
    size_t before;
    lk_status status = lk_linear_kl_check<T>(op, args, direction, true, &call, &planner, &counted, &before, more);
    if (!status) status = lk_head_query(op, &planner, before, budget, least, &plan);
    if (status) return status;
    *answer = lk_linear_kl_answer(&planner, plan, more ? more->passes : 1);
    answer->workspace_bytes += before, answer->minimum_bytes += before;
    return LK_OK;
}

#endif /* CUDA or the simulator */
#endif
