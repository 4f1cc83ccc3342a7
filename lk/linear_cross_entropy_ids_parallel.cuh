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
 *            The calls, dx and parallel.reduce are those of lk_ranks.cuh, the manual of all headers for ranks. `common` is
 *            lk_linear_cross_entropy_ids_args, and common.common has the head, its workspace and its context; target_ids has
 *            columns of the whole vocabulary.
 * States     Those of cross_entropy_ids_parallel.cuh, of tokens; the logits are f32, or with fast_logits T. For a mean backward
 *            counts the tokens itself; it does not read valid_rows.
 * Needs      linear_cross_entropy_ids.cuh, linear_cross_entropy_parallel.cuh, cross_entropy_ids_parallel.cuh, lk_ranks.cuh and what
 *            these need.
 * Options    Those of linear_cross_entropy_ids.cuh, without max_counted. path is CHUNKS or 0, which means CHUNKS. Every rank counts
 *            all tokens with a bad id; without all_gather, finish and backward count them, and forward does not.
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
    return status ? status : lk_ce_ids_run_backward<Logit, true>(rows);
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* A call of a rank, of ids. */
typedef struct {
    lk_lce_ranks of; /* the first member: a function that gets it casts it to this struct */
    const lk_lce_ids_args *args;
    lk_lce_ids ids;
    lk_lce_ids_own own;
} lk_lce_ids_ranks;

template <class T>
LK_HOST lk_status lk_lce_ids_ranks_check(lk_lce_ranks *of, lk_direction direction, bool query, lk_head_planner *planner)
{
    lk_lce_ids_ranks *const r = (lk_lce_ids_ranks *)of;
    return lk_lce_ids_check<T>(of->op, r->args, direction, query, &r->ids, &of->args, &of->call, planner, &of->arena,
                               &of->more);
}

template <class Logit> LK_HOST lk_status lk_lce_ids_ranks_finish(const lk_lce_ranks *of, bool query, size_t *bytes)
{
    const lk_lce_ids &ids = ((const lk_lce_ids_ranks *)of)->ids;
    const lk_lce_args &f = of->forward;
    lk_cross_entropy_ids_parallel_args x = {lk_lce_ids_call_of(&ids, 0, 0).x, of->parallel, of->rank.states, of->all_states};
    lk_cross_entropy_args &a = x.common.common;
    a = lk_lce_finish_args(&ids.x.common); /* not those of `forward`, which has another target */
    a.lse = f.lse, a.lse_low = f.lse_low, a.entropy = f.entropy;
    a.workspace = f.workspace, a.workspace_bytes = f.workspace_bytes;
    lk_ce_ids_job job;
    const lk_status status = lk_ce_ids_begin_job<Logit>(of->op, &x, LK_FINISH, query, of->stream, &job, bytes);
    return status || query ? status : lk_ce_ids_run_finish<Logit>(job);
}

/* What depends on the type of the logits. */
template <class Logit> LK_HOST void lk_lce_ids_put_logits(lk_lce_ids_ranks *r, lk_direction direction)
{
    r->own = {&r->ids, lk_lce_ids_rank_rows<Logit>, NULL}, r->of.finish = lk_lce_ids_ranks_finish<Logit>;
    r->of.row_bytes = lk_ce_ids_row_bytes<Logit>(&r->args->common, r->args->ids_per_row, direction);
}

template <class T>
LK_HOST void lk_lce_ids_begin_ranks(const char *op, const lk_linear_cross_entropy_ids_parallel_args *x, lk_direction direction,
                                    cudaStream_t stream, lk_lce_ids_ranks *r)
{
    const lk_lce_args &a = x->common.common;
    *r = {lk_lce_ranks_of(op, x, &a, stream), &x->common, {}, {}};
    r->ids.x = x->common, r->ids.tail = x->common.tail;
    r->of.rows = lk_lce_ids_table<T>(&a, &r->own), r->of.check = lk_lce_ids_ranks_check<T>;
    if (a.fast_logits) lk_lce_ids_put_logits<T>(r, direction);
    else lk_lce_ids_put_logits<lk_f32>(r, direction);
    if (direction != LK_FINISH) lk_lce_ids_refuse(&r->of.checks, &a, true);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_cross_entropy_ids_parallel_run(const char *op, const lk_linear_cross_entropy_ids_parallel_args *args,
                                                           cudaStream_t stream)
{
    lk_lce_ids_ranks r = {};
    lk_lce_ids_begin_ranks<T>(op, args, direction, stream, &r);
    return lk_lce_run_ranks<T>(&r.of, direction);
}

template <class T>
LK_HOST lk_status lk_linear_cross_entropy_ids_parallel_query_plan(const char *op,
                                                                  const lk_linear_cross_entropy_ids_parallel_args *args,
                                                                  lk_direction direction, size_t budget, bool least,
                                                                  lk_linear_cross_entropy_plan *plan)
{
    lk_lce_ids_ranks r = {};
    lk_lce_ids_begin_ranks<T>(op, args, direction, NULL, &r);
    return lk_lce_query_ranks<T>(&r.of, direction, budget, least, plan);
}

/* Of finish, which has no plan. */
template <class T>
LK_HOST lk_status lk_linear_cross_entropy_ids_parallel_query(const char *op,
                                                             const lk_linear_cross_entropy_ids_parallel_args *args,
                                                             lk_direction direction, size_t *bytes)
{
    lk_lce_ids_ranks r = {};
    lk_lce_ids_begin_ranks<T>(op, args, direction, NULL, &r);
    return r.of.finish(&r.of, true, bytes);
}

#endif /* CUDA or the simulator */
#endif
