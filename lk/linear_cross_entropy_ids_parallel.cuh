// SPDX-License-Identifier: MIT
/* linear_cross_entropy_ids_parallel.cuh - linear_cross_entropy_ids.cuh for columns that are split over ranks (GPUs, or processes):
 * each rank has some rows of weight and all tokens, and gets the results of all columns.
 *
 *   logits, dx, dweight, dbias    as at the top of linear_cross_entropy.cuh, of the rank's columns; dx is the rank's part of a sum
 *   states, the collective,       those of cross_entropy_ids_parallel.cuh for these logits
 *   finish, dZ
 *
 * Use        In one .cu file, linked with -lcublasLt:
 *                #include "lk/linear_cross_entropy_ids_parallel.cuh"
 *                LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS_PARALLEL(bf16)
 *            Anywhere, C included: LK_DECLARE_LINEAR_CROSS_ENTROPY_IDS_PARALLEL(bf16).
 *            The calls are those of lk_ranks.cuh, the manual of all headers for ranks. `common` is
 *            lk_linear_cross_entropy_ids_args, and common.common has the head: weight, bias, dweight, dbias and vocab are of this
 *            rank's columns; target_ids has columns of the whole vocabulary. The workspace and the context are those of
 *            common.common. All calls but finish have a ..._plan.
 *            dx and parallel.reduce are those of linear_cross_entropy_parallel.cuh: reduce is called once, with all tokens. If
 *            reduce is NULL, the caller sums dx of all ranks. dx of a rank without columns is 0.
 * States     Those of cross_entropy_ids_parallel.cuh, of tokens; the logits are f32, or with fast_logits T. For a mean backward
 *            counts the tokens itself; it does not read valid_rows.
 * Needs      linear_cross_entropy_ids.cuh, linear_cross_entropy_parallel.cuh, cross_entropy_ids_parallel.cuh, lk_ranks.cuh and what
 *            these need.
 * Options    Those of linear_cross_entropy_ids.cuh. path is CHUNKS or 0, which means CHUNKS. Every rank counts all tokens with a
 *            bad id; without all_gather, finish and backward count them, and forward does not.
 *            forward_backward keeps lse in two floats between its halves; backward without lse_low is less exact.
 * Errors     Those of lk_ranks.cuh, then as in linear_cross_entropy_ids.cuh. LK_ERR_PATH: path is neither CHUNKS nor 0.
 * Read on    lk/linear_cross_entropy.md and lk/cross_entropy.md: plans, how exact results are, and what is read and written.
 *
 * This is CHUNKS of linear_cross_entropy_ids.cuh, with a rank's columns in place of all columns. For each slice of logits:
 *   forward    lk_cross_entropy_ids_slice_kernel and the rows' kernel of a rank write the states and the ids' logits; with a tail
 *              lk_cross_entropy_ids_tail_kernel adds its part
 *   backward   lk_lce_ids_scale_kernel; then dZ by lk_cross_entropy_ids_weigh_kernel, the rows' kernel and
 *              lk_cross_entropy_ids_put_kernel
 * forward_backward is forward, the collective, finish and backward in one workspace. The logits are computed in both halves, so it
 * has 4 matmuls.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LINEAR_CROSS_ENTROPY_IDS_PARALLEL_CUH
#define LK_LINEAR_CROSS_ENTROPY_IDS_PARALLEL_CUH

#include "cross_entropy_ids_parallel.cuh"
#include "linear_cross_entropy_ids.cuh"
#include "linear_cross_entropy_parallel.cuh"

/* One struct for all calls. */
typedef struct {
    lk_linear_cross_entropy_ids_args common;
    lk_vocab_parallel parallel;
    void *states;           /* see States. forward writes them; finish writes what backward reads, or NULL to skip */
    const void *all_states; /* [ranks] of them: finish reads them */
} lk_linear_cross_entropy_ids_parallel_args;

#define LK_LINEAR_CROSS_ENTROPY_IDS_PARALLEL_FUNCTIONS(X, T)                                                                   \
    X##_PLANNED(linear_cross_entropy_ids_parallel, forward, LK_FORWARD, linear_cross_entropy, T)                               \
    X##_PLANNED(linear_cross_entropy_ids_parallel, backward, LK_BACKWARD, linear_cross_entropy, T)                             \
    X##_PLANNED(linear_cross_entropy_ids_parallel, forward_backward, LK_BOTH, linear_cross_entropy, T)                         \
    X##_CALL(linear_cross_entropy_ids_parallel, finish, LK_FINISH, T)
#define LK_DECLARE_LINEAR_CROSS_ENTROPY_IDS_PARALLEL(T) LK_DECLARE(LINEAR_CROSS_ENTROPY_IDS_PARALLEL, T)
#define LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS_PARALLEL(T) LK_DEFINE(LINEAR_CROSS_ENTROPY_IDS_PARALLEL, T)

#if LK_CUDA

/* ---- The rows of a slice ------------------------------------------------------------------------------------------------- */

/* In place of lk_lce_ids_rows. Logit: the type of the logits. */
template <class Logit>
LK_HOST lk_status lk_lce_ids_rank_rows(const lk_lce_job *job, const lk_lce_work &chunk, const lk_cross_entropy_call &f)
{
    const lk_lce_ids *const ids = lk_lce_ids_of(job);
    const bool forward = chunk.call.gives_loss;
    const lk_lce_rank &rank = chunk.call.rank;
    lk_ce_ids_job rows = {job->op, job->device, job->stream, forward ? LK_FORWARD : LK_BACKWARD,
                          {lk_lce_ids_call_of(ids, chunk.first_row, chunk.rows).x, rank.parallel, NULL, NULL}, {}};
    lk_cross_entropy_args &a = rows.x.common.common;
    a = f.a, a.workspace = ids->rows;
    rows.x.states = forward ? rank.states : rank.others + chunk.first_row;
    lk_lce_ids_put_options(ids, &a);
    rows.space.ids = lk_ce_ids_space_of(&rows.x.common, forward ? LK_FORWARD : LK_BACKWARD);
    if (forward) return lk_ce_ids_run_states<Logit>(rows, chunk.first_row, chunk.call.a.tokens);
    const lk_status status = lk_lce_ids_scale(job, chunk);
    if (status) return status;
    if (lk_ce_ids_has_tail(&rows.x.common, LK_BACKWARD))
        return lk_ce_ids_run_gradients<Logit>(rows, {lk_cross_entropy_ids_weigh_kernel<Logit, true, true>,
                                                     lk_cross_entropy_gradient<Logit, LK_BACKWARD>,
                                                     lk_cross_entropy_ids_put_kernel<Logit, false, true>});
    return lk_ce_ids_run_gradients<Logit>(rows, {lk_cross_entropy_ids_weigh_kernel<Logit, true>,
                                                 lk_cross_entropy_gradient<Logit, LK_BACKWARD>,
                                                 lk_cross_entropy_ids_put_kernel<Logit, false>});
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* A call that gathers, in steps. */
typedef struct {
    const char *op;
    cudaStream_t stream;
    lk_lce_ids ids;
    lk_lce_ids_split split;
    lk_lce_steps steps;
    lk_cross_entropy_ids_parallel_args finish;
    lk_lce_rows rows;
} lk_lce_ids_ranks;

/* The arguments of finish. */
LK_HOST lk_cross_entropy_ids_args lk_lce_ids_finish_args(const lk_lce_ids_args *x)
{
    lk_cross_entropy_ids_args f = {};
    f.common = lk_lce_finish_args(&x->common);
    f.target_ids = x->target_ids, f.target_weight = x->target_weight, f.logp = x->logp, f.ids_per_row = x->ids_per_row;
    f.target_ids_stride = x->target_ids_stride, f.target_weight_stride = x->target_weight_stride, f.logp_stride = x->logp_stride;
    f.tail_weight = x->tail_weight, f.tail = x->tail;
    return f;
}
LK_HOST lk_cross_entropy_ids_parallel_args lk_lce_ids_parallel_finish_args(const lk_linear_cross_entropy_ids_parallel_args *x)
{
    return {lk_lce_ids_finish_args(&x->common), x->parallel, x->states, x->all_states};
}

/* The bytes of a token's state, and of the logits of its ids behind the states. */
template <class Logit> LK_HOST int64_t lk_lce_ids_row_bytes(const lk_lce_ids_args *args, lk_direction direction)
{
    lk_cross_entropy_ids_args x = lk_lce_ids_finish_args(args);
    x.common.dentropy = args->common.dentropy;
    if (x.ids_per_row < 1 || x.ids_per_row > LK_CE_IDS_MOST) x.ids_per_row = 1; /* it is refused in its place */
    return lk_ce_ids_row_bytes<Logit>(&x, direction);
}

/* Checks `parallel` and the fields that ids do not have; x becomes the arguments with the place of the states. */
template <class Logit>
LK_HOST lk_status lk_lce_ids_begin_ranks(const char *op, const lk_linear_cross_entropy_ids_parallel_args *args,
                                         lk_direction direction, lk_arena *arena, lk_linear_cross_entropy_ids_parallel_args *x,
                                         lk_lce_ids_split *split)
{
    lk_checks checks = {op, LK_OK};
    const lk_lce_args &a = args->common.common;
    *x = *args;
    lk_lce_refuse(&checks, &a, false, "it is not for tokens with target_ids");
    lk_ranks_check(&checks, x->parallel, a.vocab, direction);
    if (checks.status) return checks.status; /* before sizes are computed of it */
    lk_ranks_place(x->parallel, direction, a.tokens, lk_lce_ids_row_bytes<Logit>(&args->common, direction), 4, 16, arena,
                   &x->states, &x->all_states, &split->list);
    split->rows = lk_lce_ids_rank_rows<Logit>, split->rank = {x->parallel, x->states, (float *)x->states};
    return LK_OK;
}

/* Checks a call that gathers as a whole, and divides the workspace. */
template <class T, class Logit>
LK_HOST lk_status lk_lce_ids_parallel_split(const char *op, const lk_linear_cross_entropy_ids_parallel_args *args,
                                            lk_direction direction, bool query, lk_lce_ids_ranks *r)
{
    const bool both = direction == LK_BOTH;
    lk_linear_cross_entropy_ids_parallel_args x;
    lk_lce_steps &s = r->steps;
    lk_lce_args instead;
    lk_arena room = {0, 0, LK_WORKSPACE_ALIGNMENT}; /* only to see the tensors: the states lie behind the arrays of ids */
    size_t bytes = 0, least = 0;
    *r = {};
    lk_status status = lk_lce_ids_begin_ranks<Logit>(op, args, direction, &room, &x, &r->split);
    if (!status)
        status = lk_lce_ids_check<T>(op, &args->common, direction, query, &r->ids, &instead, &s.call, NULL, &r->split);
    if (status) return status;
    lk_arena arena = {(uintptr_t)args->common.common.workspace, r->ids.bytes, LK_WORKSPACE_ALIGNMENT};
    status = lk_lce_ids_begin_ranks<Logit>(op, args, direction, &arena, &x, &r->split);
    const int64_t row_bytes = lk_lce_ids_row_bytes<Logit>(&args->common, direction);
    lk_lce_split_call(&instead, both, &r->split.rank, x.all_states, row_bytes, &arena, &s);
    lk_lce_ids_args whole = r->ids.x;
    whole.tail = r->ids.tail, whole.common.lse = s.forward.lse, whole.common.lse_low = s.forward.lse_low;
    whole.common.entropy = s.forward.entropy;
    r->finish = {lk_lce_ids_finish_args(&whole), s.rank.parallel, x.states, x.all_states};
    if (!status) status = lk_cross_entropy_ids_parallel_query<Logit>(op, &r->finish, LK_FINISH, &bytes);
    lk_cross_entropy_args &f = r->finish.common.common;
    f.workspace = lk_take_bytes(&arena, true, (int64_t)bytes), f.workspace_bytes = bytes;
    s.fixed = arena.used + 256;
    if (!status)
        status = lk_lce_steps_least<T>(op, &s, &s.forward, both && s.call.gradient ? &s.backward : NULL, true, &least);
    s.least = s.fixed + least;
    return status;
}

/* Finish, from the blocks of all ranks. */
template <class Logit>
LK_HOST lk_status lk_lce_ids_run_finish(const char *op, const lk_cross_entropy_ids_parallel_args *args, cudaStream_t stream)
{
    lk_ce_ids_job job;
    const lk_status status = lk_ce_ids_begin_job<Logit>(op, args, LK_FINISH, stream, &job);
    return status ? status : lk_ce_ids_run_finish<Logit>(job);
}

template <class T, class Logit> LK_HOST lk_status lk_lce_ids_parallel_step(void *of, lk_direction step)
{
    const lk_lce_ids_ranks &r = *(lk_lce_ids_ranks *)of;
    const lk_lce_steps &s = r.steps;
    if (step == LK_FORWARD) return lk_lce_step<T>(r.op, &s.forward, LK_FORWARD, true, r.stream, r.rows, &s.rank);
    if (step == LK_FINISH) return lk_lce_ids_run_finish<Logit>(r.op, &r.finish, r.stream);
    return s.call.gradient ? lk_lce_step<T>(r.op, &s.backward, LK_BACKWARD, true, r.stream, r.rows, &s.rank) : LK_OK;
}

/* All calls with logits. */
template <class T, class Logit, lk_direction direction>
LK_HOST lk_status lk_lce_ids_run_ranks(const char *op, const lk_linear_cross_entropy_ids_parallel_args *args, cudaStream_t stream)
{
    const lk_lce_args &a = args->common.common;
    if (direction != LK_BOTH && !lk_ranks_gathers(args->parallel, direction)) {
        lk_linear_cross_entropy_ids_parallel_args x;
        lk_lce_ids_split split = {};
        lk_arena none = {0, 0, LK_WORKSPACE_ALIGNMENT};
        const lk_status status = lk_lce_ids_begin_ranks<Logit>(op, args, direction, &none, &x, &split);
        return status ? status : lk_linear_cross_entropy_ids_run<T, direction>(op, &args->common, stream, &split);
    }
    lk_lce_ids_ranks r = {};
    const lk_status status = lk_lce_ids_parallel_split<T, Logit>(op, args, direction, false, &r);
    if (status) return status;
    const lk_lce_ids_own own = {&r.ids, r.split.rows};
    r.op = op, r.stream = stream, r.rows = lk_lce_ids_table<T>(&a, &own);
    return lk_lce_run_steps(op, &a, args->parallel, &r.steps, direction, stream, lk_lce_ids_parallel_step<T, Logit>, &r);
}

/* The plan within a budget; least: or the smallest, where that is more. */
template <class T, class Logit>
LK_HOST lk_status lk_lce_ids_find_ranks(const char *op, const lk_linear_cross_entropy_ids_parallel_args *args,
                                        lk_direction direction, size_t budget, bool least, lk_linear_cross_entropy_plan *plan)
{
    if (direction == LK_BOTH || lk_ranks_gathers(args->parallel, direction)) {
        lk_lce_ids_ranks r = {};
        const lk_status status = lk_lce_ids_parallel_split<T, Logit>(op, args, direction, true, &r);
        return status ? status : lk_lce_query_steps<T>(op, &args->common.common, direction, budget, least, &r.steps, plan);
    }
    lk_linear_cross_entropy_ids_parallel_args x;
    lk_lce_ids_split split = {};
    lk_arena none = {0, 0, LK_WORKSPACE_ALIGNMENT};
    const lk_status status = lk_lce_ids_begin_ranks<Logit>(op, args, direction, &none, &x, &split);
    return status ? status : lk_linear_cross_entropy_ids_query_plan<T>(op, &args->common, direction, budget, least, plan, &split);
}

/* All calls. finish: the results from the blocks of all ranks, which the caller has gathered. */
template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_cross_entropy_ids_parallel_run(const char *op, const lk_linear_cross_entropy_ids_parallel_args *args,
                                                           cudaStream_t stream)
{
    const bool fast = args->common.common.fast_logits;
    if (direction == LK_FINISH) {
        const lk_cross_entropy_ids_parallel_args f = lk_lce_ids_parallel_finish_args(args);
        return fast ? lk_lce_ids_run_finish<T>(op, &f, stream) : lk_lce_ids_run_finish<lk_f32>(op, &f, stream);
    }
    return fast ? lk_lce_ids_run_ranks<T, T, direction>(op, args, stream)
                : lk_lce_ids_run_ranks<T, lk_f32, direction>(op, args, stream);
}
template <class T>
LK_HOST lk_status lk_linear_cross_entropy_ids_parallel_query_plan(const char *op,
                                                                  const lk_linear_cross_entropy_ids_parallel_args *args,
                                                                  lk_direction direction, size_t budget, bool least,
                                                                  lk_linear_cross_entropy_plan *plan)
{
    return args->common.common.fast_logits ? lk_lce_ids_find_ranks<T, T>(op, args, direction, budget, least, plan)
                                           : lk_lce_ids_find_ranks<T, lk_f32>(op, args, direction, budget, least, plan);
}

/* Of finish, which has no plan. */
template <class T>
LK_HOST lk_status lk_linear_cross_entropy_ids_parallel_query(const char *op,
                                                             const lk_linear_cross_entropy_ids_parallel_args *args,
                                                             lk_direction direction, size_t *bytes)
{
    const lk_cross_entropy_ids_parallel_args f = lk_lce_ids_parallel_finish_args(args);
    return args->common.common.fast_logits ? lk_cross_entropy_ids_parallel_query<T>(op, &f, direction, bytes)
                                           : lk_cross_entropy_ids_parallel_query<lk_f32>(op, &f, direction, bytes);
}

#endif /* CUDA or the simulator */
#endif
