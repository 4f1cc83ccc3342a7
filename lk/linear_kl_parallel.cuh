// SPDX-License-Identifier: MIT
/* linear_kl_parallel.cuh - linear_kl.cuh for columns that are split over ranks (GPUs, or processes): each rank has some columns
 * of the logits, that is some rows of both weights, the same of student and teacher. It has all tokens, and gets the results of all
 * columns.
 *
 *   logits, dx, dweight, dbias    as at the top of linear_kl.cuh, of the rank's columns; dx is the rank's part of a sum
 *   states, the collective,       those of kl_parallel.cuh for these logits
 *   between, finish, dZ
 *
 * Use        In one .cu file, linked with -lcublasLt:            Anywhere, C included:
 *                #include "lk/linear_kl_parallel.cuh"                #include "lk/linear_kl_parallel.cuh"
 *                LK_DEFINE_LINEAR_KL_PARALLEL(bf16)                  LK_DECLARE_LINEAR_KL_PARALLEL(bf16)
 *            The calls, dx and parallel.reduce are those of lk_ranks.cuh, the manual of all headers for ranks; JENSEN_SHANNON
 *            and TOTAL_VARIATION have between, and two collectives. `common` is lk_linear_kl_args: the teacher's weight and bias,
 *            too, are of this rank's columns. between and backward compute the logits again. parallel.reduce_sms is not used.
 * States     Those of kl_parallel.cuh, of tokens. finish needs no workspace.
 * Needs      linear_kl.cuh, kl_parallel.cuh, lk_ranks.cuh and what these need.
 * Options    Those of linear_kl.cuh, without max_counted. forward_backward goes through the logits twice, with JENSEN_SHANNON and
 *            TOTAL_VARIATION three times. If a slice has all tokens, logits are computed once: 4 matmuls. Else they are computed
 *            each time: 6 matmuls, or 8 with these two. plan.matmuls says how many.
 * Errors     LK_ERR_VALUE: max_counted is given. Then those of lk_ranks.cuh and kl_parallel.cuh, then as in linear_kl.cuh.
 * Exact      As linear_kl.cuh; dx is rounded on each rank before it is summed. dweight and dbias are of the rank's own columns.
 * Read on    lk/linear_kl.md: plans of the workspace, how exact results are, and what is read and written.
 *
 * What runs: linear_kl.cuh's slices and chunks, once for the states, with `between` once for the terms, and once for the
 * gradients, with a step of kl.cuh's kernel for the rows. lk_kl_merge_kernel of kl_parallel.cuh runs after each
 * collective.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LINEAR_KL_PARALLEL_CUH
#define LK_LINEAR_KL_PARALLEL_CUH

#include "kl_parallel.cuh"
#include "linear_kl.cuh"

/* One struct for all calls. */
typedef struct {
    lk_linear_kl_args common;
    lk_vocab_parallel parallel;
    void *states;           /* see States. forward and between write them; finish writes what backward reads, or NULL to skip */
    const void *all_states; /* [ranks][tokens] of them: between and finish read them */
} lk_linear_kl_parallel_args;

#define LK_LINEAR_KL_PARALLEL_FUNCTIONS(X, T)                                                                                  \
    X##_PLANNED(linear_kl_parallel, forward, LK_FORWARD, linear_kl, T)                                                         \
    X##_PLANNED(linear_kl_parallel, between, LK_BETWEEN, linear_kl, T)                                                         \
    X##_CALL(linear_kl_parallel, finish, LK_FINISH, T)                                                                         \
    X##_PLANNED(linear_kl_parallel, backward, LK_BACKWARD, linear_kl, T)                                                       \
    X##_PLANNED(linear_kl_parallel, forward_backward, LK_BOTH, linear_kl, T)
#define LK_DECLARE_LINEAR_KL_PARALLEL(T) LK_DECLARE(LINEAR_KL_PARALLEL, T)
#define LK_DEFINE_LINEAR_KL_PARALLEL(T) LK_DEFINE(LINEAR_KL_PARALLEL, T)

#if LK_CUDA

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* The field that ranks do not take. */
LK_HOST lk_status lk_linear_kl_refuse(const char *op, const lk_linear_kl_args &a)
{
    lk_checks checks = {op, LK_OK};
    lk_check_absent(&checks, "max_counted", a.max_counted != 0, "it is not for columns that are split over ranks");
    return checks.status;
}

/* Checks `parallel`, and finds the place of the states; x becomes the arguments. more: what the checks of linear_kl.cuh look at
 * besides. */
LK_HOST lk_status lk_linear_kl_place_states(const char *op, const lk_linear_kl_parallel_args *args, lk_direction direction,
                                            lk_linear_kl_parallel_args *x, lk_linear_kl_more *more)
{
    const lk_linear_kl_args &a = args->common;
    lk_checks checks = {op, lk_linear_kl_refuse(op, a)};
    *x = *args;
    if (checks.status) return checks.status; /* before all rules */
    lk_kl_check_ranks(&checks, x->parallel, a.vocab, a.divergence, direction);
    if (checks.status) return checks.status; /* before sizes are computed of it */
    const bool again = lk_ranks_gathers(x->parallel, direction) && LK_KL_HAS_BETWEEN(a.divergence);
    lk_arena arena = {(uintptr_t)a.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    *more = {1 + again + (direction == LK_BOTH), 0, {}};
    lk_kl_place_states(x->parallel, a.tokens, direction, &arena, &x->states, &x->all_states, &more->list);
    more->bytes = arena.used;
    return LK_OK;
}

/* kl_parallel.cuh's arguments of finish and between. a: those of x, perhaps with defaults. */
LK_HOST lk_kl_parallel_args lk_linear_kl_finish_args(const lk_linear_kl_parallel_args &x, const lk_linear_kl_args &a)
{
    return {lk_linear_kl_args_of(a, 0, a.tokens), x.parallel, x.states, x.all_states};
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* A call of a rank while it is launched. */
typedef struct {
    lk_linear_kl_job job; /* the first member: a function that gets the job casts it to this struct */
    lk_linear_kl_parallel_args x;
    float *entropy; /* not NULL: it is wanted */
} lk_linear_kl_ranks;

template <class T, class Logit, int Step>
LK_HOST lk_status lk_linear_kl_step_rows(const lk_linear_kl_job *job, const lk_kl_args &f, int64_t first_row)
{
    const lk_linear_kl_ranks *const r = (const lk_linear_kl_ranks *)job;
    lk_kl_args a = f;
    a.entropy = r->entropy;
    return lk_kl_run_step<Logit, T, Step>(job->op, &job->device, a, (lk_kl_row *)r->x.states + first_row, job->stream);
}

/* Goes through all tokens with a step for their rows. */
template <class T, class Logit, int Step> LK_HOST lk_status lk_linear_kl_pass(lk_linear_kl_ranks *r)
{
    lk_linear_kl_job *const job = &r->job;
    const bool gradient = job->shape.gradient, launches = job->mode == LK_CUBLAS_LAUNCH;
    const lk_linear_kl_own own = {lk_linear_kl_step_rows<T, Logit, Step>, NULL};
    const lk_linear_kl_table table = lk_linear_kl_table_of<T, Logit>(&own);
    lk_status status = LK_OK;
    job->rows = &table, job->shape.gradient = gradient && Step == LK_KL_GRADIENT;
    if (job->shape.vocab > 0) status = lk_head_run_all<T>(job);
    else if (launches) status = lk_head_no_columns<T>(job, LK_BOTH);
    job->shape.gradient = gradient;
    const int64_t at_once = job->plan.slice_tokens ? job->plan.slice_tokens : job->plan.chunk_tokens;
    if (launches) job->has_logits = at_once >= job->p.call.a.tokens;
    return status;
}

/* Computes the states of all columns from the states of all ranks; and the results, unless `between`. */
LK_HOST lk_status lk_linear_kl_merge(const lk_linear_kl_ranks *r, bool between)
{
    const lk_linear_kl_job &job = r->job;
    return lk_kl_run_merge(job.op, &job.device, lk_linear_kl_finish_args(r->x, job.p.call.a), between, job.stream);
}

/* A step of a call that has at least one token. */
template <class T, class Logit> LK_HOST lk_status lk_linear_kl_step(void *of, lk_direction step)
{
    lk_linear_kl_ranks *const r = (lk_linear_kl_ranks *)of;
    if (step == LK_FORWARD) return lk_linear_kl_pass<T, Logit, LK_KL_STATE>(r);
    if (step == LK_FINISH) return lk_linear_kl_merge(r, false);
    if (step == LK_BACKWARD) return lk_linear_kl_pass<T, Logit, LK_KL_GRADIENT>(r);
    const lk_status status = lk_linear_kl_merge(r, true);
    return status ? status : lk_linear_kl_pass<T, Logit, LK_KL_TERMS>(r);
}

template <class T, class Logit> LK_HOST lk_status lk_linear_kl_run_ranks(lk_linear_kl_ranks *r, lk_direction direction)
{
    const lk_linear_kl_args &a = r->x.common;
    const lk_ranks ranks = {r->job.op, r->job.stream, r->x.parallel, a.vocab, r->x.states, r->x.all_states,
                            (size_t)a.tokens * sizeof(lk_kl_row), LK_KL_HAS_BETWEEN(a.divergence) ? 2 : 1,
                            lk_linear_kl_step<T, Logit>, r};
    r->job.mode = LK_CUBLAS_RESOLVE;
    const lk_status status = lk_linear_kl_pass<T, Logit, LK_KL_GRADIENT>(r); /* its matmuls are those of all passes */
    r->job.mode = LK_CUBLAS_LAUNCH;
    return status ? status : lk_ranks_run(&ranks, direction);
}

/* All calls. finish: the results from the states of all ranks, which the caller has gathered. */
template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_kl_parallel_run(const char *op, const lk_linear_kl_parallel_args *args, cudaStream_t stream)
{
    if (direction == LK_FINISH) {
        const lk_kl_parallel_args f = lk_linear_kl_finish_args(*args, args->common);
        const lk_status refused = lk_linear_kl_refuse(op, args->common);
        return refused ? refused : lk_kl_ranks_finish<T>(op, &f, stream);
    }
    lk_linear_kl_ranks r = {};
    lk_linear_kl_more more = {};
    lk_counted none;
    lk_status status = lk_linear_kl_place_states(op, args, direction, &r.x, &more);
    if (!status)
        status = lk_linear_kl_begin<T>(op, &args->common, lk_ranks_give(args->parallel, direction), stream, &r.job, &none,
                                       &more);
    const lk_linear_kl_args &a = r.job.p.call.a;
    if (status) return status;
    if (a.tokens == 0) return lk_linear_kl_clear(op, a, sizeof(T), stream);
    r.entropy = args->common.entropy;
    r.x.parallel.reduce_sms = 0;
    r.job.parallel = &r.x.parallel, r.job.shape.split = r.x.parallel.reduce != NULL;
    return a.fast_logits ? lk_linear_kl_run_ranks<T, T>(&r, direction) : lk_linear_kl_run_ranks<T, float>(&r, direction);
}

template <class T>
LK_HOST lk_status lk_linear_kl_parallel_query_plan(const char *op, const lk_linear_kl_parallel_args *args,
                                                   lk_direction direction, size_t budget, bool least, lk_linear_kl_plan *plan)
{
    lk_linear_kl_parallel_args x;
    lk_linear_kl_more more = {};
    const lk_status status = lk_linear_kl_place_states(op, args, direction, &x, &more);
    if (status) return status;
    return lk_linear_kl_query_plan<T>(op, &args->common, lk_ranks_give(args->parallel, direction), budget, least, plan, &more);
}

/* Of finish, which has no plan. */
template <class T>
LK_HOST lk_status lk_linear_kl_parallel_query(const char *op, const lk_linear_kl_parallel_args *args, lk_direction direction,
                                              size_t *bytes)
{
    const lk_kl_parallel_args f = lk_linear_kl_finish_args(*args, args->common);
    const lk_status refused = lk_linear_kl_refuse(op, args->common);
    return refused ? refused : lk_kl_parallel_query<T>(op, &f, direction, bytes);
}

#endif /* CUDA or the simulator */
#endif
