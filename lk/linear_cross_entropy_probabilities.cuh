// SPDX-License-Identifier: MIT
/* linear_cross_entropy_probabilities.cuh - linear_cross_entropy.cuh with class probabilities as targets: a token's target is a
 * probability for each column, not the number of one column. So a teacher's soft labels or mixed labels train a head whose logits are
 * not stored.
 *
 *   logits, dx, dweight, dbias    as at the top of linear_cross_entropy.cuh
 *   loss, lse, dZ                 those of cross_entropy_probabilities.cuh for these logits: dZ is its dlogits
 *
 * Use        In one .cu file, linked with -lcublasLt:                   Anywhere, C included:
 *                #include "lk/linear_cross_entropy_probabilities.cuh"       #include "lk/linear_cross_entropy_probabilities.cuh"
 *                LK_DEFINE_LINEAR_CROSS_ENTROPY_PROBABILITIES(bf16)         LK_DECLARE_LINEAR_CROSS_ENTROPY_PROBABILITIES(bf16)
 *            The struct has that of linear_cross_entropy.cuh in its field `common`, whose target stays NULL; a context as there:
 *                lk_linear_cross_entropy_context context;
 *                lk_status status = lk_linear_cross_entropy_init(&context);
 *                lk_linear_cross_entropy_probabilities_args args = {};
 *                args.common.context = &context, args.common.x = x, args.common.weight = weight, args.common.loss = loss;
 *                args.common.dx = dx, args.common.dweight = dweight;
 *                args.common.tokens = tokens, args.common.hidden = hidden, args.common.vocab = vocab;
 *                args.target_prob = target_prob;
 *                size_t *const bytes = &args.common.workspace_bytes;
 *                status = lk_linear_cross_entropy_probabilities_forward_backward_workspace_bytes_bf16(&args, bytes);
 *                args.common.workspace = ...;
 *                status = lk_linear_cross_entropy_probabilities_forward_backward_bf16(&args, stream);
 *            forward computes loss and lse, backward the gradients from a saved lse, and computes the logits again. ..._plan answers
 *            as in linear_cross_entropy.cuh.
 * Needs      linear_cross_entropy.cuh, cross_entropy_probabilities.cuh and what these need.
 * Options    Those of linear_cross_entropy.cuh, without ranks, saved, max_counted, batch_invariant and statistics. Every token
 *            counts: ignore_index does not apply, and bad_targets stays as it is. A token with row_weight 0 has loss 0 and adds
 *            nothing. A mean is over the tokens, with class_weight too, so valid_rows and weight_sum are tokens. Rows of
 *            target_prob and columns at -inf: as in cross_entropy_probabilities.cuh.
 *            path is CHUNKS or 0, which means CHUNKS: logits are stored for some tokens at a time.
 * Errors     As in linear_cross_entropy.cuh. First of all LK_ERR_VALUE: target, saved, max_counted, batch_invariant or statistics is
 *            given; target_prob_dtype is neither f32 nor the type of the logits. LK_ERR_PATH: path is PANELS or FUSED. target_prob
 *            comes behind the tensors of linear_cross_entropy.cuh.
 * Read on    lk/linear_cross_entropy.md and lk/cross_entropy.md: plans, how exact results are, and what is read and written.
 *
 * linear_cross_entropy's CHUNKS, with lk_cross_entropy_prob_kernel for the rows of a slice. linear_cross_entropy gets a target of
 * column 0 for every token; nothing reads it but its counts.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LINEAR_CROSS_ENTROPY_PROBABILITIES_CUH
#define LK_LINEAR_CROSS_ENTROPY_PROBABILITIES_CUH

#include "cross_entropy_probabilities.cuh"
#include "linear_cross_entropy.cuh"

/* F, B and FB as in lk_linear_cross_entropy_args. */
typedef struct {
    lk_linear_cross_entropy_args common;
    const void *target_prob;    /* F B FB in   target_prob_dtype [tokens, vocab] */
    int64_t target_prob_stride; /* elements between rows; 0 means packed */
    int target_prob_dtype;      /* LK_DTYPE_*: f32, or the type of the logits; 0: that of the logits, f32 or with fast_logits T */
} lk_linear_cross_entropy_probabilities_args;

#define LK_LINEAR_CROSS_ENTROPY_PROBABILITIES_FUNCTIONS(X, T)                                                                  \
    X##_PLANNED(linear_cross_entropy_probabilities, forward, LK_FORWARD, linear_cross_entropy, T)                              \
    X##_PLANNED(linear_cross_entropy_probabilities, backward, LK_BACKWARD, linear_cross_entropy, T)                            \
    X##_PLANNED(linear_cross_entropy_probabilities, forward_backward, LK_BOTH, linear_cross_entropy, T)
#define LK_DECLARE_LINEAR_CROSS_ENTROPY_PROBABILITIES(T) LK_DECLARE(LINEAR_CROSS_ENTROPY_PROBABILITIES, T)
#define LK_DEFINE_LINEAR_CROSS_ENTROPY_PROBABILITIES(T) LK_DEFINE(LINEAR_CROSS_ENTROPY_PROBABILITIES, T)

#if LK_CUDA

typedef lk_linear_cross_entropy_probabilities_args lk_lce_prob_args;

/* A call and its part of the workspace, which comes before linear_cross_entropy's. */
typedef struct {
    lk_lce_prob_args x; /* with every default filled in; common: as the caller has it */
    int32_t *target;    /* [tokens], column 0 */
    size_t bytes;
} lk_lce_prob;

/* ---- The table that the head gets ---------------------------------------------------------------------------------------- */

LK_HOST const lk_lce_prob *lk_lce_prob_of(const lk_lce_job *job) { return (const lk_lce_prob *)job->rows->args; }

LK_HOST lk_status lk_lce_prob_begin(const lk_lce_job *job)
{
    const size_t bytes = (size_t)job->p.call.a.tokens * sizeof(int32_t);
    const lk_status status = lk_launched(job->op, cudaMemsetAsync(lk_lce_prob_of(job)->target, 0, bytes, job->stream));
    return status ? status : lk_lce_prepare(job);
}

/* The rows of a slice, from logits of all columns to loss and dZ. */
template <class Logit> LK_HOST lk_status lk_lce_prob_slice(const lk_lce_job *job, const lk_lce_work &slice)
{
    const lk_lce_prob_args &x = lk_lce_prob_of(job)->x;
    const int64_t before = slice.first_row * x.target_prob_stride * lk_dtype_bytes<Logit>(x.target_prob_dtype);
    lk_cross_entropy_call p = lk_lce_rows_of<Logit>(job, slice);
    p.a.target_prob = (const char *)x.target_prob + before, p.a.target_prob_stride = x.target_prob_stride;
    p.a.target_prob_dtype = x.target_prob_dtype, p.a.class_weight = x.common.class_weight;
    return slice.call.gives_loss ? lk_cross_entropy_prob<Logit, false>(job->op, &job->device, p, job->stream)
                                 : lk_cross_entropy_prob<Logit, true>(job->op, &job->device, p, job->stream);
}

template <class T> LK_HOST lk_lce_rows lk_lce_prob_table(const lk_lce_args *args, const lk_lce_prob *own)
{
    return {lk_lce_prob_begin, NULL, args->fast_logits ? lk_lce_prob_slice<T> : lk_lce_prob_slice<float>,
            lk_head_dbias<T, lk_lce_call>, NULL, lk_lce_write_rest, NULL, NULL, NULL, NULL, NULL, NULL, own};
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* Validates a call. call, planner: of the arguments that linear_cross_entropy gets, as in lk_lce_check. */
template <class T>
LK_HOST lk_status lk_lce_prob_check(const char *op, const lk_lce_prob_args *args, lk_direction direction, bool query,
                                    lk_lce_prob *own, lk_lce_call *call, lk_head_planner *planner)
{
    *own = {*args, NULL, 0};
    lk_lce_prob_args *const x = &own->x;
    const lk_lce_args &a = args->common;
    const int logits = a.fast_logits ? lk_dtype<T> : LK_DTYPE_F32;
    lk_checks checks = {op, LK_OK};
    lk_lce_refuse(&checks, &a, true, false, "it is not for tokens with target_prob");
    if (x->target_prob_dtype == LK_DTYPE_T) x->target_prob_dtype = logits;
    if (x->target_prob_dtype != LK_DTYPE_F32 && x->target_prob_dtype != logits)
        lk_reject(&checks, LK_ERR_VALUE, "target_prob_dtype is %d; it must be LK_DTYPE_F32, the type of the logits, or 0 for that",
                  x->target_prob_dtype);
    if (checks.status) return checks.status; /* before all rules */
    const int64_t tokens = a.tokens < 0 ? 0 : lk_head_min(a.tokens, INT32_MAX); /* it is refused in its place */
    lk_arena arena = {(uintptr_t)a.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    lk_take(&own->target, &arena, true, tokens + 1); /* even without tokens not NULL */
    own->bytes = arena.used;
    lk_lce_args instead = a;
    instead.target = own->target, instead.target_dtype = LK_TARGET_INT32;
    instead.use_ignore_index = 0, instead.ignore_index = 0;
    instead.class_weight = NULL, instead.path = LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    instead.workspace = (char *)a.workspace + own->bytes;
    instead.workspace_bytes = a.workspace_bytes > own->bytes ? a.workspace_bytes - own->bytes : 0;
    const bool known = a.path == LK_LINEAR_CROSS_ENTROPY_AUTO || a.path == LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    lk_lce_added more = {};
    more.list[0] = {"target_prob", x->target_prob, lk_dtype_bytes<T>(x->target_prob_dtype), LK_REQUIRED, a.vocab,
                    {{a.tokens, &x->target_prob_stride, "target_prob_stride"}}};
    more.bytes = own->bytes, more.ids_per_row = more.most_ids = 1, more.instead = &instead;
    if (!known) more.path_rule = "with target_prob it is 0 or LK_LINEAR_CROSS_ENTROPY_CHUNKS";
    return lk_lce_check<T>(op, &a, direction, query, call, planner, &more);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_cross_entropy_probabilities_run(const char *op, const lk_lce_prob_args *args, cudaStream_t stream)
{
    lk_lce_prob own;
    lk_lce_call call;
    lk_head_planner planner;
    const lk_status status = lk_lce_prob_check<T>(op, args, direction, false, &own, &call, &planner);
    return status ? status : lk_lce_launch<T>(op, call, &planner, direction, stream, lk_lce_prob_table<T>(&args->common, &own));
}

/* The plan within a budget; least: or the smallest, where that is more. */
template <class T>
LK_HOST lk_status lk_linear_cross_entropy_probabilities_query_plan(const char *op, const lk_lce_prob_args *args,
                                                                   lk_direction direction, size_t budget, bool least,
                                                                   lk_linear_cross_entropy_plan *plan)
{
    lk_lce_prob own;
    lk_lce_call call;
    lk_head_planner planner;
    const lk_status status = lk_lce_prob_check<T>(op, args, direction, true, &own, &call, &planner);
    return status ? status : lk_lce_query_planner(op, &planner, own.bytes, budget, least, plan);
}

#endif /* CUDA or the simulator */
#endif
