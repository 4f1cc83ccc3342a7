// SPDX-License-Identifier: MIT
/* linear_cross_entropy_ids.cuh - linear_cross_entropy.cuh with K weighted ids per token instead of one target, and the
 * log-probability of each: distillation from a teacher's top K, shifted targets of several tokens, choices among a few answers.
 *
 *   logits, dx, dweight, dbias    as at the top of linear_cross_entropy.cuh
 *   loss, logp, dZ                those of cross_entropy_ids.cuh for these logits: dZ is its dz
 *
 * Use        In one .cu file, linked with -lcublasLt:       Anywhere, C included:
 *                #include "lk/linear_cross_entropy_ids.cuh"     #include "lk/linear_cross_entropy_ids.cuh"
 *                LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS(bf16)       LK_DECLARE_LINEAR_CROSS_ENTROPY_IDS(bf16)
 *            The struct has that of linear_cross_entropy.cuh in its field `common`, whose target stays NULL; a context as there:
 *                lk_linear_cross_entropy_context context;
 *                lk_status status = lk_linear_cross_entropy_init(&context);
 *                lk_linear_cross_entropy_ids_args args = {};
 *                args.common.context = &context, args.common.x = x, args.common.weight = weight, args.common.loss = loss;
 *                args.common.dx = dx, args.common.dweight = dweight;
 *                args.common.tokens = tokens, args.common.hidden = hidden, args.common.vocab = vocab;
 *                args.target_ids = ids, args.target_weight = weights, args.ids_per_row = ids_per_row, args.logp = logp;
 *                size_t *const bytes = &args.common.workspace_bytes;
 *                status = lk_linear_cross_entropy_ids_forward_backward_workspace_bytes_bf16(&args, bytes);
 *                args.common.workspace = ...;
 *                status = lk_linear_cross_entropy_ids_forward_backward_bf16(&args, stream);
 *            forward computes loss, logp and lse, backward the gradients from a saved lse and from dlogp, and computes the logits
 *            again. ..._plan answers as in linear_cross_entropy.cuh.
 * Needs      linear_cross_entropy.cuh, cross_entropy_ids.cuh and what these need.
 * Options    Those of linear_cross_entropy.cuh, without class_weight, label_smoothing, saved, max_counted, batch_invariant and
 *            ranks. Ids, their weights, skipped and bad ids, and dlogp as in cross_entropy_ids.cuh. For a token with a bad id loss,
 *            all logp and dx are NaN, and it adds nothing to dweight and dbias. The tail of cross_entropy_ids.cuh is not here.
 *            path is CHUNKS; 0 means it. So logits are stored for some tokens at a time, in f32, or with fast_logits in T.
 * Errors     As in linear_cross_entropy.cuh. First of all LK_ERR_VALUE: target, class_weight, label_smoothing, saved, max_counted,
 *            batch_invariant or parallel.vocab_total is given; LK_ERR_PATH: path is PANELS or FUSED; LK_ERR_SHAPE: ids_per_row is
 *            not 1 to 128. Then the tensors of this header.
 * Read on    lk/linear_cross_entropy.md and lk/cross_entropy.md: plans, how exact results are, and what is read and written.
 *
 * linear_cross_entropy's CHUNKS, with other kernels between its matmuls. lk_lce_ids_begin_kernel gives it a target for each token:
 * a column, ignored or bad. For each slice of logits lk_lce_ids_scale_kernel divides dlogp by alpha, as dZ is; then come the
 * kernels of cross_entropy_ids.cuh. In f16 a dZ may be as large as the sum of a token's weights, so a power of two above the
 * largest such sum goes into alpha too: lk_lce_ids_upstream_kernel.
 */
#ifndef LK_LINEAR_CROSS_ENTROPY_IDS_CUH
#define LK_LINEAR_CROSS_ENTROPY_IDS_CUH

#include "cross_entropy_ids.cuh"
#include "linear_cross_entropy.cuh"

/* F, B and FB as in lk_linear_cross_entropy_args. A row of each tensor is ids_per_row numbers; strides are in elements, 0 means
 * packed. */
typedef struct {
    lk_linear_cross_entropy_args common;
    const void *target_ids;     /* F B FB in   common.target_dtype [tokens, ids_per_row] */
    const float *target_weight; /* F B FB in   f32 [tokens, ids_per_row], finite; NULL: 1 */
    const float *dlogp;         /* B FB in     f32 [tokens, ids_per_row], the gradient of logp; NULL: none */
    float *logp;                /* F FB out    f32 [tokens, ids_per_row] */
    int64_t ids_per_row;        /* 1 to 128 */
    int64_t target_ids_stride, target_weight_stride, dlogp_stride, logp_stride;
} lk_linear_cross_entropy_ids_args;

#define LK_LINEAR_CROSS_ENTROPY_IDS_DECLARE_DIRECTION(direction, T)                                                            \
    LK_PROTOTYPES(linear_cross_entropy_ids, direction, T)                                                                      \
    LK_API lk_status lk_linear_cross_entropy_ids_##direction##_plan_##T(const lk_linear_cross_entropy_ids_args *args,          \
                                                                        size_t budget, lk_linear_cross_entropy_plan *plan);
#define LK_LINEAR_CROSS_ENTROPY_IDS_DECLARE(T)                                                                                 \
    LK_LINEAR_CROSS_ENTROPY_IDS_DECLARE_DIRECTION(forward, T)                                                                  \
    LK_LINEAR_CROSS_ENTROPY_IDS_DECLARE_DIRECTION(backward, T)                                                                 \
    LK_LINEAR_CROSS_ENTROPY_IDS_DECLARE_DIRECTION(forward_backward, T)
#define LK_DECLARE_LINEAR_CROSS_ENTROPY_IDS(T) LK_OF_TYPE(LK_LINEAR_CROSS_ENTROPY_IDS_DECLARE, T)

#if defined(__CUDACC__) || defined(LK_SIMT)

/* ---- The kernels --------------------------------------------------------------------------------------------------------- */

typedef lk_linear_cross_entropy_ids_args lk_lce_ids_args;

/* A call and its part of the workspace, which comes before linear_cross_entropy's. */
typedef struct {
    lk_lce_ids_args x; /* with every default filled in; common: as the caller has it */
    int32_t *target;   /* [tokens]: column 0, LK_CE_IDS_IGNORED or LK_CE_IDS_BAD */
    float *bound;      /* [tokens], with dlogp: at least what dlse and dlogp of a token add to a dZ */
    float *dlogp;      /* [tokens, ids_per_row], over alpha */
    float *zero;       /* [1], the upstream where there is dlogp alone */
    float *most;       /* [1], f16's gradients: the largest sum of |weights| of a token */
    float *upstream;   /* [1] or [tokens], f16's gradients: upstream times 2^q, lk_lce_ids_power */
    float *lse;        /* [tokens], where the caller wants logp and no lse: linear_cross_entropy has no output else */
    void *rows;        /* lk_ce_ids_space of a slice */
    lk_cross_entropy_args ids; /* whose ids: what lk_ce_ids_load reads */
    size_t bytes;
} lk_lce_ids;

/* What both kernels get. */
typedef struct {
    lk_ce_ids_call call; /* x: the ids of the rows from first_row on */
    lk_lce_ids all;
    const float *dlse;   /* the caller's, of all tokens */
    float *scaled_dlse;  /* of these rows */
    float *factor;       /* of these rows */
    const lk_lce_counts *counts;
    int64_t first_row;
} lk_lce_ids_work;

/* q of 2^q, at least 1, which upstream has and the factors of the rows then lose again: so alpha gets it. */
LK_DEVICE int lk_lce_ids_power(const lk_lce_ids &ids)
{
    const int q = ids.most ? lk_cublas_exponent(*ids.most) : 0;
    return q > 0 ? q : 0;
}

/* A warp owns a token. */
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS) lk_lce_ids_begin_kernel(const __grid_constant__ lk_lce_ids_work p)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * LK_CE_IDS_WARPS + threadIdx.x / 32;
    lk_griddepcontrol_wait();
    const bool there = row < p.all.ids.rows;
    const lk_ce_ids s = lk_ce_ids_load(p.call, row, there);
    float sum = 0.0f, weights = 0.0f;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        if (s.id[i] < 0) continue;
        if (p.all.bound) sum += fabsf(p.all.x.dlogp[row * p.all.x.dlogp_stride + lane + 32 * i]);
        weights += fabsf(s.weight[i]);
    }
    sum = lk_sum_warp(sum), weights = lk_sum_warp(weights);
    if (row == 0 && lane == 0 && p.all.zero) *p.all.zero = 0.0f;
    if (!there || lane != 0) return;
    if (p.all.most && !s.bad) atomicMax((int *)p.all.most, __float_as_int(weights)); /* no sign: they compare as floats do */
    p.all.target[row] = s.bad ? LK_CE_IDS_BAD : s.any ? 0 : LK_CE_IDS_IGNORED;
    if (p.all.bound) p.all.bound[row] = sum + (p.dlse ? fabsf(p.dlse[row]) : 0.0f);
}

/* A thread per upstream. */
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS) lk_lce_ids_upstream_kernel(const __grid_constant__ lk_lce_ids_work p)
{
    const int64_t i = (int64_t)blockIdx.x * (32 * LK_CE_IDS_WARPS) + threadIdx.x;
    const lk_lce_args &a = p.all.x.common;
    lk_griddepcontrol_wait();
    if (i >= (a.upstream && a.upstream_per_token ? a.tokens : 1)) return;
    const float upstream = a.upstream ? a.upstream[i] : p.all.zero ? 0.0f : 1.0f;
    p.all.upstream[i] = upstream * __int_as_float((127 + lk_lce_ids_power(p.all)) << 23);
}

/* What is added to dZ of a slice's rows, over alpha, a power of two; and their factors without 2^q. A thread per id. */
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS) lk_lce_ids_scale_kernel(const __grid_constant__ lk_lce_ids_work p)
{
    const int64_t k = p.all.x.ids_per_row, i = (int64_t)blockIdx.x * (32 * LK_CE_IDS_WARPS) + threadIdx.x, row = i / k;
    lk_griddepcontrol_wait();
    if (row >= p.all.ids.rows) return;
    const int64_t token = p.first_row + row;
    const float shift = __fdiv_rn(1.0f, p.counts->alpha);
    if (p.all.dlogp) p.all.dlogp[token * k + i % k] = shift * p.all.x.dlogp[token * p.all.x.dlogp_stride + i % k];
    if (i % k != 0) return;
    if (p.all.dlogp) p.scaled_dlse[row] = p.dlse ? shift * p.dlse[token] : 0.0f;
    if (p.all.most) p.factor[row] *= __int_as_float((127 - lk_lce_ids_power(p.all)) << 23);
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* The ids of `rows` tokens from first_row on. */
LK_HOST lk_ce_ids_call lk_lce_ids_call_of(const lk_lce_ids *ids, int64_t first_row, int64_t rows)
{
    const lk_lce_ids_args &x = ids->x;
    lk_ce_ids_call call = {};
    const int bytes = x.common.target_dtype == LK_TARGET_INT32 ? 4 : 8;
    call.x.target_ids = (const char *)x.target_ids + first_row * x.target_ids_stride * bytes;
    if (x.target_weight) call.x.target_weight = x.target_weight + first_row * x.target_weight_stride;
    if (x.dlogp) call.x.dlogp = ids->dlogp + first_row * x.ids_per_row;
    if (x.logp) call.x.logp = x.logp + first_row * x.logp_stride;
    call.x.ids_per_row = x.ids_per_row, call.x.target_ids_stride = x.target_ids_stride;
    call.x.target_weight_stride = x.target_weight_stride, call.x.dlogp_stride = x.ids_per_row, call.x.logp_stride = x.logp_stride;
    call.all.a = ids->ids, call.all.a.rows = rows;
    return call;
}

LK_HOST lk_status lk_lce_ids_begin(const lk_lce_job *job)
{
    lk_lce_ids_work p = {};
    p.all = *(const lk_lce_ids *)job->other_rows->user, p.dlse = p.all.x.common.dlse;
    p.all.ids.rows = job->p.call.a.tokens, p.call = lk_lce_ids_call_of(&p.all, 0, p.all.ids.rows);
    const int threads = 32 * LK_CE_IDS_WARPS;
    const int64_t upstreams = p.all.x.common.upstream_per_token ? p.all.ids.rows : 1;
    lk_status status = LK_OK;
    if (p.all.most) status = lk_launched(job->op, cudaMemsetAsync(p.all.most, 0, sizeof(float), job->stream));
    if (!status)
        status = lk_launch_pdl(job->op, &job->device, lk_lce_ids_begin_kernel, lk_ceil_div(p.all.ids.rows, LK_CE_IDS_WARPS), 1,
                               threads, 0, job->stream, p);
    if (status || !p.all.most) return status;
    return lk_launch_pdl(job->op, &job->device, lk_lce_ids_upstream_kernel, lk_ceil_div(upstreams, threads), 1, threads, 0,
                         job->stream, p);
}

/* The rows of a slice. f: what they would be with one target each; L: the type of the logits. */
template <class L>
LK_HOST lk_status lk_lce_ids_rows(const lk_lce_job *job, const lk_lce_work &chunk, const lk_cross_entropy_call &f)
{
    const lk_lce_ids *const ids = (const lk_lce_ids *)job->other_rows->user;
    const bool gives_loss = chunk.call.gives_loss, gradient = chunk.call.gradient;
    const int threads = 32 * LK_CE_IDS_WARPS;
    const int64_t rows = chunk.rows, blocks = lk_ceil_div(rows, LK_CE_IDS_WARPS);
    lk_ce_ids_call call = lk_lce_ids_call_of(ids, chunk.first_row, rows);
    call.direction = !gradient ? LK_CE_FORWARD : gives_loss ? LK_CE_BOTH : LK_CE_BACKWARD, call.bad_is_zero = true;
    call.all = f;
    call.all.a.target_dtype = ids->ids.target_dtype, call.all.a.ignore_index = ids->ids.ignore_index;
    call.all.a.use_ignore_index = ids->ids.use_ignore_index;
    lk_status status = LK_OK;
    if ((ids->x.dlogp || ids->most) && gradient) {
        lk_lce_ids_work p = {};
        p.all = *ids, p.all.ids.rows = rows, p.dlse = ids->x.common.dlse, p.first_row = chunk.first_row;
        p.scaled_dlse = chunk.ws.dlse + chunk.first_row, p.factor = chunk.ws.factor + chunk.first_row, p.counts = chunk.ws.counts;
        status = lk_launch_pdl(job->op, &job->device, lk_lce_ids_scale_kernel, lk_ceil_div(rows * ids->x.ids_per_row, threads), 1,
                               threads, 0, job->stream, p);
    }
    lk_cross_entropy_ids_args space = call.x;
    space.common = call.all.a, space.common.workspace = ids->rows;
    call.space = lk_ce_ids_space_of(&space, call.direction);
    lk_cross_entropy_call one = lk_ce_ids_rows(call);
    call.lse = one.a.lse, call.entropy = one.a.entropy;
    call.all.a.lse = NULL, call.all.a.entropy = NULL, call.all.a.argmax = NULL;
    const lk_device *const device = &job->device;
    if (!status)
        status = lk_launch_pdl(job->op, device, lk_cross_entropy_ids_read_kernel<L>, blocks, 1, threads, 0, job->stream, call);
    if (!status && call.direction == LK_CE_FORWARD)
        status = lk_cross_entropy_is_plain(&one.a) ? lk_cross_entropy_plain<L>(job->op, device, one, job->stream)
                                                   : lk_cross_entropy_gradient<L, LK_CE_FORWARD>(job->op, device, one, job->stream);
    else if (!status)
        status = gives_loss ? lk_cross_entropy_gradient<L, LK_CE_BOTH>(job->op, device, one, job->stream)
                            : lk_cross_entropy_gradient<L, LK_CE_BACKWARD>(job->op, device, one, job->stream);
    if (status) return status;
    return lk_launch_pdl(job->op, device, lk_cross_entropy_ids_write_kernel<L>, blocks, 1, threads, 0, job->stream, call);
}

/* Puts this header's arrays at the start of a workspace. sizes: T is f16. */
LK_HOST void lk_lce_ids_lay_out(lk_lce_ids *ids, int direction, bool sizes, void *workspace)
{
    const lk_lce_ids_args &x = ids->x;
    const bool both = direction == LK_LCE_FORWARD_BACKWARD, dlogp = x.dlogp != NULL;
    sizes = sizes && direction != LK_LCE_FORWARD;
    lk_arena arena = {(uintptr_t)workspace, 0, LK_WORKSPACE_ALIGNMENT};
    lk_cross_entropy_ids_args space = {};
    space.common.rows = x.common.tokens, space.common.z_loss = x.common.z_loss, space.ids_per_row = x.ids_per_row;
    const int rows = direction == LK_LCE_FORWARD ? LK_CE_FORWARD : both ? LK_CE_BOTH : LK_CE_BACKWARD;
    lk_take(&ids->target, &arena, true, x.common.tokens + 1); /* even without tokens not NULL: the second half has an address */
    lk_take(&ids->bound, &arena, dlogp, x.common.tokens);
    lk_take(&ids->dlogp, &arena, dlogp, x.common.tokens * x.ids_per_row);
    lk_take(&ids->zero, &arena, dlogp && !x.common.upstream, 1);
    lk_take(&ids->most, &arena, sizes, 1);
    lk_take(&ids->upstream, &arena, sizes, x.common.upstream && x.common.upstream_per_token ? x.common.tokens : 1);
    lk_take(&ids->lse, &arena, x.logp && !x.common.lse, x.common.tokens);
    ids->rows = lk_take_bytes(&arena, true, (int64_t)lk_ce_ids_space_of(&space, rows).bytes);
    ids->bytes = arena.used;
}

/* Checks what this header adds, and fills in the call that linear_cross_entropy gets. */
template <class T>
LK_HOST lk_status lk_lce_ids_check(const char *op, const lk_lce_ids_args *args, int direction, bool query, lk_lce_ids *ids,
                                   lk_lce_args *call)
{
    if (!args) return lk_fail(LK_ERR_NULL, op, "args is NULL");
    *ids = {};
    ids->x = *args;
    lk_lce_ids_args *const x = &ids->x;
    const lk_lce_args &a = args->common;
    const bool forward = direction == LK_LCE_FORWARD, back = direction == LK_LCE_BACKWARD;
    const char *const refused = a.target                      ? "target"
                                : a.class_weight              ? "class_weight"
                                : a.label_smoothing != 0.0f   ? "label_smoothing"
                                : a.saved                     ? "saved"
                                : a.max_counted != 0          ? "max_counted"
                                : a.batch_invariant           ? "batch_invariant"
                                : a.parallel.vocab_total != 0 ? "parallel.vocab_total"
                                : a.statistics                ? "statistics"
                                                              : NULL;
    lk_checks checks = {op, LK_OK};
    if (refused) lk_reject(&checks, LK_ERR_VALUE, "%s is given; it is not for tokens with target_ids", refused);
    if (a.path != LK_LINEAR_CROSS_ENTROPY_AUTO && a.path != LK_LINEAR_CROSS_ENTROPY_CHUNKS)
        lk_reject(&checks, LK_ERR_PATH, "path is %d; with target_ids it is 0 or LK_LINEAR_CROSS_ENTROPY_CHUNKS", a.path);
    lk_check_size(&checks, "ids_per_row", x->ids_per_row, 1, LK_CE_IDS_MOST);
    lk_check_size(&checks, "tokens", a.tokens, 0, INT32_MAX);
    lk_check_enum(&checks, "target_dtype", a.target_dtype, LK_TARGET_INT32, "LK_TARGET_*");
    if (a.ignore_index != 0 && !a.use_ignore_index)
        lk_reject(&checks, LK_ERR_VALUE, "ignore_index is %lld, but use_ignore_index is 0; set both or neither",
                  (long long)a.ignore_index);
    if (checks.status) return checks.status; /* before sizes are computed of it */
    if (forward) x->dlogp = NULL, x->common.dlse = NULL;
    if (back) x->logp = NULL;
    lk_tensor list[] = {
        {"target_ids", x->target_ids, a.target_dtype == LK_TARGET_INT32 ? 4 : 8, LK_REQUIRED, x->ids_per_row,
         {{a.tokens, &x->target_ids_stride, "target_ids_stride"}}},
        {"target_weight", x->target_weight, 4, LK_IN, x->ids_per_row,
         {{a.tokens, &x->target_weight_stride, "target_weight_stride"}}},
        {"dlse", x->common.dlse, 4, forward ? LK_UNUSED : LK_IN, a.tokens},
        {"dlogp", x->dlogp, 4, forward ? LK_UNUSED : LK_IN, x->ids_per_row, {{a.tokens, &x->dlogp_stride, "dlogp_stride"}}},
        {"logp", x->logp, 4, back ? LK_UNUSED : LK_OUT, x->ids_per_row, {{a.tokens, &x->logp_stride, "logp_stride"}}},
    };
    const int count = lk_used_tensors(list, LK_COUNT(list));
    if (!query && a.tokens && !x->target_ids) lk_reject(&checks, LK_ERR_NULL, "target_ids is NULL");
    lk_check_shapes(&checks, list, count, query);
    if (!query) lk_check_alignment(&checks, list, count);
    if (!query) lk_check_allocations(&checks, list, count);
    if (checks.status) return checks.status;

    lk_lce_ids_lay_out(ids, direction, lk_dtype<T> == LK_DTYPE_F16, a.workspace);
    *call = a;
    call->path = LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    call->target = ids->target, call->target_dtype = LK_TARGET_INT32;
    call->use_ignore_index = 1, call->ignore_index = LK_CE_IDS_IGNORED;
    if (x->dlogp) {
        call->dlse = ids->bound; /* it also keeps a common factor out of alpha, which dlogp does not have */
        if (!a.upstream) call->upstream = ids->zero, call->upstream_per_token = 0;
    }
    if (ids->upstream) call->upstream = ids->upstream, call->upstream_per_token = a.upstream && a.upstream_per_token;
    if (ids->lse) call->lse = ids->lse;
    call->workspace = (char *)a.workspace + ids->bytes;
    call->workspace_bytes = a.workspace_bytes > ids->bytes ? a.workspace_bytes - ids->bytes : 0;
    ids->ids.target_dtype = a.target_dtype, ids->ids.vocab = a.vocab;
    ids->ids.use_ignore_index = a.use_ignore_index, ids->ids.ignore_index = a.ignore_index;
    return LK_OK;
}

/* The plan within a budget; least: or the smallest, where that is more. */
template <class T>
LK_HOST lk_status lk_lce_ids_query(const char *op, const lk_lce_ids_args *args, int direction, size_t budget, bool least,
                                   lk_linear_cross_entropy_plan *plan)
{
    lk_lce_ids ids;
    lk_lce_args call;
    if (!plan) return lk_fail(LK_ERR_NULL, op, "plan is NULL");
    lk_status status = lk_lce_ids_check<T>(op, args, direction, true, &ids, &call);
    if (!status) status = lk_lce_query<T>(op, &call, direction, budget > ids.bytes ? budget - ids.bytes : 0, true, plan);
    if (status) return status;
    plan->workspace_bytes += ids.bytes, plan->minimum_bytes += ids.bytes;
    if (budget < plan->minimum_bytes && !least)
        return lk_fail(LK_ERR_WORKSPACE, op, "the budget is %zu; this call needs a workspace of %zu bytes", budget,
                       plan->minimum_bytes);
    return LK_OK;
}

template <class T>
LK_HOST lk_status lk_lce_ids_run(const char *op, const lk_lce_ids_args *args, int direction, cudaStream_t stream)
{
    lk_lce_ids ids;
    lk_lce_args call;
    lk_linear_cross_entropy_plan plan;
    lk_status status = lk_lce_ids_check<T>(op, args, direction, false, &ids, &call);
    if (status) return status;
    const lk_lce_other_rows rows = {lk_lce_ids_begin, call.fast_logits ? lk_lce_ids_rows<T> : lk_lce_ids_rows<float>, &ids};
    lk_checks checks = {op, LK_OK};
    if (lk_lce_query<T>(op, &call, direction, 0, true, &plan) == LK_OK) /* else the step says what is wrong */
        lk_check_workspace(&checks, args->common.workspace, args->common.workspace_bytes, plan.minimum_bytes + ids.bytes);
    return checks.status ? checks.status : lk_lce_step<T>(op, &call, direction, false, stream, &rows);
}

/* The functions of a direction. */
#define LK_LCE_IDS_ENTRY(name, direction)                                                                                      \
    template <class T>                                                                                                         \
    LK_HOST lk_status lk_linear_cross_entropy_ids_##name(const char *op, const lk_lce_ids_args *args, cudaStream_t stream)     \
    {                                                                                                                          \
        return lk_lce_ids_run<T>(op, args, direction, stream);                                                                 \
    }                                                                                                                          \
    template <class T>                                                                                                         \
    LK_HOST lk_status lk_linear_cross_entropy_ids_##name##_workspace(const char *op, const lk_lce_ids_args *args, size_t *n)   \
    {                                                                                                                          \
        lk_linear_cross_entropy_plan plan;                                                                                     \
        const lk_status status = lk_lce_ids_query<T>(op, args, direction, lk_cublas_default_budget(), true, &plan);            \
        if (!status && n) *n = plan.workspace_bytes;                                                                           \
        return status;                                                                                                         \
    }
LK_LCE_IDS_ENTRY(forward, LK_LCE_FORWARD)
LK_LCE_IDS_ENTRY(backward, LK_LCE_BACKWARD)
LK_LCE_IDS_ENTRY(forward_backward, LK_LCE_FORWARD_BACKWARD)

#define LK_LINEAR_CROSS_ENTROPY_IDS_EMIT(direction, which, T)                                                                  \
    LK_EMIT(linear_cross_entropy_ids, direction, T)                                                                            \
    LK_API lk_status lk_linear_cross_entropy_ids_##direction##_plan_##T(const lk_lce_ids_args *args, size_t budget,            \
                                                                        lk_linear_cross_entropy_plan *plan)                    \
    {                                                                                                                          \
        return lk_lce_ids_query<lk_##T>("lk_linear_cross_entropy_ids_" #direction "_plan_" #T, args, which, budget, false, plan); \
    }
#define LK_LINEAR_CROSS_ENTROPY_IDS_DEFINE(T)                                                                                  \
    LK_LINEAR_CROSS_ENTROPY_IDS_DECLARE(T)                                                                                     \
    LK_LINEAR_CROSS_ENTROPY_IDS_EMIT(forward, LK_LCE_FORWARD, T)                                                               \
    LK_LINEAR_CROSS_ENTROPY_IDS_EMIT(backward, LK_LCE_BACKWARD, T)                                                             \
    LK_LINEAR_CROSS_ENTROPY_IDS_EMIT(forward_backward, LK_LCE_FORWARD_BACKWARD, T)
#define LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS(T) LK_OF_TYPE(LK_LINEAR_CROSS_ENTROPY_IDS_DEFINE, T)

#else
#define LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS(T) LK_NEEDS_NVCC("LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS")
#endif /* CUDA or the simulator */
#endif
