// SPDX-License-Identifier: MIT
/* cross_entropy_parallel.cuh - cross_entropy.cuh for columns that are split over ranks (GPUs, or processes), as those of a
 * vocabulary-parallel head are: each rank has some columns of every row, and gets the results of all columns.
 *
 *   a rank's state of a row   max, sum and what the options add, over the rank's columns without the target's: lk_ce_row of
 *                             lk_loss.cuh. The rank that has the target's column stores that logit beside them
 *   the collective            every rank gets the states of all ranks, in the order of ranks
 *   finish                    merges them, adds the target, and computes loss, lse and the other results by cross_entropy.cuh's
 *                             formulas
 *   backward                  each rank computes dlogits of its own columns, from lse and from others[r] = sum_{j != y} p[r,j]
 *
 * Use        In one .cu file:                                   Anywhere, C included:
 *                #include "lk/cross_entropy_parallel.cuh"           #include "lk/cross_entropy_parallel.cuh"
 *                LK_DEFINE_CROSS_ENTROPY_PARALLEL(bf16)             LK_DECLARE_CROSS_ENTROPY_PARALLEL(bf16)
 *            The calls are those of lk_ranks.cuh, the manual of all headers for ranks. `common` is lk_cross_entropy_args: logits,
 *            dlogits and vocab are of this rank's columns; target has columns of the whole vocabulary, and class_weight has
 *            vocab_total elements on every rank.
 * States     Per row 16 bytes, or 32 with label_smoothing, entropy, argmax or, in forward_backward, dentropy, aligned to 16; 40
 *            with statistics, aligned to 8. Set these in forward too, even where it writes only states. finish writes `others`,
 *            f32 [rows], to the start of `states`. backward reads `others`, lse, lse_low if given, and with dentropy entropy.
 * Mean       backward reads valid_rows or weight_sum, which finish writes.
 * Workspace  Without all_gather: forward needs none. finish needs one if the loss is reduced. backward needs one if class_weight
 *            and label_smoothing are both given.
 * Needs      cross_entropy.cuh, lk_ranks.cuh and what these need.
 * Options    Those of cross_entropy.cuh, without target_prob. Every rank counts all bad targets. Without all_gather, finish and
 *            backward both add the number of bad rows to bad_targets, so together they add it twice; forward adds nothing.
 * Errors     Those of lk_ranks.cuh, then as in cross_entropy.cuh.
 * Read on    lk/cross_entropy.md: how exact results are, and what is read and written.
 *
 * The kernels: lk_cross_entropy_gradient_kernel of cross_entropy.cuh computes the states, and later the gradients;
 * lk_cross_entropy_finish_kernel, here, merges the states, with one thread per row. Then come the sums over all rows, as on one
 * GPU. Heads call finish.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_CROSS_ENTROPY_PARALLEL_CUH
#define LK_CROSS_ENTROPY_PARALLEL_CUH

#include "cross_entropy.cuh"
#include "lk_ranks.cuh"

/* One struct for all calls. */
typedef struct {
    lk_cross_entropy_args common;
    lk_vocab_parallel parallel;
    void *states;           /* see States. forward writes them; finish writes what backward reads, or NULL to skip */
    const void *all_states; /* [ranks][rows] of them: finish reads them */
} lk_cross_entropy_parallel_args;

#define LK_CROSS_ENTROPY_PARALLEL_FUNCTIONS(X, T)                                                                              \
    X##_CALL(cross_entropy_parallel, forward, LK_FORWARD, T)                                                                   \
    X##_CALL(cross_entropy_parallel, backward, LK_BACKWARD, T)                                                                 \
    X##_CALL(cross_entropy_parallel, forward_backward, LK_BOTH, T)                                                             \
    X##_CALL(cross_entropy_parallel, finish, LK_FINISH, T)
#define LK_DECLARE_CROSS_ENTROPY_PARALLEL(T) LK_DECLARE(CROSS_ENTROPY_PARALLEL, T)
#define LK_DEFINE_CROSS_ENTROPY_PARALLEL(T) LK_DEFINE(CROSS_ENTROPY_PARALLEL, T)

#if LK_CUDA

/* ---- Finish -------------------------------------------------------------------------------------------------------------- */

/* A thread merges the states of a row, in the order of ranks, and writes its results. */
template <class State> LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_THREADS)
    lk_cross_entropy_finish_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    const lk_cross_entropy_args &a = call.a;
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    const int64_t row = (int64_t)blockIdx.x * LK_CROSS_ENTROPY_THREADS + threadIdx.x;
    lk_griddepcontrol_wait();
    if (row >= a.rows) return;
    const lk_ce_label label = lk_ce_look_up(a, row);
    State s = lk_ce_row_empty<State>();
    float others = 0.0f, target = -INFINITY, weight = 1.0f;
    for (int rank = 0; label.counted && rank < call.slice.ranks; rank++) {
        const State part = lk_ce_unpack_state<State>(call.slice.all_states, call.state_bytes, rank * a.rows + row);
        if (part.target != -INFINITY) target = part.target; /* lk_ce_row_merge takes a maximum, which would lose a NaN */
        s = lk_ce_row_merge<true>(s, part, scale);
    }
    if (label.y >= 0) {
        if (a.class_weight) weight = a.class_weight[label.y];
        const float v[1] = {target}, w[1] = {a.label_smoothing > 0.0f ? weight : 1.0f};
        s = lk_ce_row_raise_halfway<true>(s, target, scale);
        const State all = lk_ce_row_add(s, v, w, scale);
        others = __fdiv_rn(lk_ce_row_raise<true>(s, all.max, scale).sum, all.sum);
        s = all, s.target = target;
    }
    if (call.slice.others) call.slice.others[row] = others;
    lk_ce_put<true>(call, row, label, weight, s);
}

/* finish: merges the states of all ranks and writes the results; then the sum over rows where a loss is reduced. */
LK_HOST lk_status lk_cross_entropy_run_finish(const char *op, const lk_device *device, lk_cross_entropy_call call,
                                              cudaStream_t stream)
{
    lk_cross_entropy_args &a = call.a;
    lk_status status = LK_OK;
    const bool reduced = lk_cross_entropy_reduced(&a);
    a.vocab = call.classes, a.class_weight = call.weights; /* of all ranks */
    if (!reduced && (a.valid_rows || a.weight_sum)) status = lk_cross_entropy_count(op, device, call, stream);
    const int64_t blocks = lk_ceil_div(a.rows, LK_CROSS_ENTROPY_THREADS);
    void (*const kernel)(lk_cross_entropy_call) =
        a.statistics ? lk_cross_entropy_finish_kernel<lk_ce_row_squares> : lk_cross_entropy_finish_kernel<lk_ce_row>;
    if (!status && blocks > 0)
        status = lk_launch_pdl(op, device, kernel, blocks, 1, LK_CROSS_ENTROPY_THREADS, 0, stream, call);
    if (!status && reduced) status = lk_cross_entropy_sum(op, device, call, stream);
    return status;
}

/* ---- Checks and workspace ------------------------------------------------------------------------------------------------ */

/* The bytes of a row's state. forward and finish have no dentropy. Args: also a head's. */
template <class Args> LK_HOST int lk_ce_ranks_state_bytes(const Args *a, lk_direction direction)
{
    Args of = *a;
    if (direction == LK_FORWARD || direction == LK_FINISH) of.dentropy = NULL;
    return lk_ce_state_bytes(&of);
}

/* What lies in the workspace of a call, besides the states: the counts and losses; then what backward reads and the caller did not
 * give. */
typedef struct {
    lk_ce_space rows;
    float *lse, *lse_low, *entropy;
} lk_ce_ranks_space;

LK_HOST lk_ce_ranks_space lk_ce_ranks_space_of(const lk_cross_entropy_args *a, lk_direction direction, bool gathers,
                                               lk_arena *arena)
{
    const bool both = direction == LK_BOTH, reduced = (gathers || direction == LK_FINISH) && lk_cross_entropy_reduced(a);
    const bool weights = (both || direction == LK_BACKWARD) && lk_cross_entropy_sums_weights(a);
    const int64_t rows = lk_ce_space_rows(a->rows);
    lk_ce_ranks_space s = {};
    s.rows = lk_ce_take_rows(arena, a, weights || (both && a->reduction == LK_REDUCTION_MEAN), reduced);
    lk_take(&s.lse, arena, both && !a->lse, rows);
    lk_take(&s.lse_low, arena, both && !a->lse_low, rows);
    lk_take(&s.entropy, arena, both && !a->entropy && a->dentropy, rows);
    return s;
}

/* Gives the arguments of a checked call what lies there. */
LK_HOST void lk_ce_ranks_put_space(const lk_ce_ranks_space &space, lk_direction direction, lk_cross_entropy_args *a)
{
    if (space.lse) a->lse = space.lse;
    if (space.lse_low) a->lse_low = space.lse_low;
    if (space.entropy) a->entropy = space.entropy;
    if (direction != LK_BOTH || a->reduction != LK_REDUCTION_MEAN || a->denominator) return;
    if (!a->valid_rows) a->valid_rows = &space.rows.counts->valid_rows; /* what backward divides by */
    if (a->class_weight && !a->weight_sum) a->weight_sum = &space.rows.counts->weight_sum;
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* What the kernels get of checked arguments. */
template <class T> LK_HOST lk_cross_entropy_call lk_ce_ranks_call_of(const lk_cross_entropy_parallel_args &x)
{
    lk_cross_entropy_call call = lk_cross_entropy_call_of<T>(x.common);
    const lk_vocab_parallel &v = x.parallel;
    call.slice = {v.vocab_start, 1, v.ranks, x.states, x.all_states, (float *)x.states};
    call.classes = v.vocab_total, call.state_bytes = lk_ce_state_bytes(&x.common);
    if (call.weights) call.a.class_weight = call.weights + v.vocab_start;
    return call;
}

/* A call of a rank while it is launched: its arguments after the checks, and what the kernels get. */
typedef struct {
    const char *op;
    lk_device device;
    cudaStream_t stream;
    lk_direction direction;
    lk_cross_entropy_parallel_args x;
    lk_cross_entropy_call call;
} lk_ce_ranks_job;

template <class T> LK_HOST lk_status lk_ce_ranks_step(void *of, lk_direction step)
{
    lk_ce_ranks_job *const job = (lk_ce_ranks_job *)of;
    lk_cross_entropy_call *const call = &job->call;
    const bool some = call->a.rows > 0;
    if (step == LK_FINISH) return lk_cross_entropy_run_finish(job->op, &job->device, *call, job->stream);
    if (step == LK_FORWARD)
        return some ? lk_cross_entropy_gradient<T, LK_FORWARD>(job->op, &job->device, *call, job->stream) : LK_OK;
    if (job->direction == LK_BOTH) call->a.bad_targets = NULL; /* finish has counted them */
    const lk_status status = lk_cross_entropy_prepare_backward(job->op, &job->device, *call, job->stream);
    return !status && some ? lk_cross_entropy_gradient_of<T, LK_BACKWARD>(job->op, &job->device, *call, job->stream) : status;
}

/* Checks a call and fills in its job. If the call gathers, states and all_states lie in the workspace, unless the caller gave
 * `states`. query: the call is of a workspace function, which answers `bytes`. */
template <class T>
LK_HOST lk_status lk_ce_ranks_begin(const char *op, const lk_cross_entropy_parallel_args *args, lk_direction direction,
                                    bool query, cudaStream_t stream, lk_ce_ranks_job *job, size_t *bytes)
{
    *job = {op, {}, stream, direction, *args, {}};
    lk_cross_entropy_parallel_args &x = job->x;
    lk_cross_entropy_args &a = x.common;
    lk_ce_more more = {};
    lk_checks checks = {op, LK_OK};
    lk_cross_entropy_check_function(&checks, &a, LK_CE_RANKS, direction);
    lk_ranks_check(&checks, x.parallel, a.vocab, direction);
    if (checks.status) return checks.status; /* before sizes are computed of it */
    if (direction == LK_FORWARD || direction == LK_FINISH) a.dentropy = NULL;
    lk_arena arena = {(uintptr_t)a.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    const lk_ce_ranks_space space = lk_ce_ranks_space_of(&a, direction, lk_ranks_gathers(x.parallel, direction), &arena);
    lk_ranks_place(x.parallel, direction, a.rows, lk_ce_state_bytes(&a), 4, a.statistics ? 8 : 16, &arena, &x.states,
                   &x.all_states, &more.states);
    more.bytes = arena.used, more.parallel = &x.parallel;
    const lk_status status = lk_cross_entropy_check<T>(op, &args->common, LK_CE_RANKS, direction,
                                                       query ? NULL : &job->device, &a, &more);
    if (!status && bytes) *bytes = more.bytes;
    if (status || query) return status;
    lk_ce_ranks_put_space(space, direction, &a);
    job->call = lk_ce_ranks_call_of<T>(x);
    job->call.row_losses = space.rows.row_losses;
    return LK_OK;
}

/* finish, for heads: they need no other kernel of this header. */
template <class T>
LK_HOST lk_status lk_ce_ranks_finish(const char *op, const lk_cross_entropy_parallel_args *args, cudaStream_t stream)
{
    lk_ce_ranks_job job;
    const lk_status status = lk_ce_ranks_begin<T>(op, args, LK_FINISH, false, stream, &job, NULL);
    return status ? status : lk_cross_entropy_run_finish(op, &job.device, job.call, stream);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_cross_entropy_parallel_run(const char *op, const lk_cross_entropy_parallel_args *args, cudaStream_t stream)
{
    lk_ce_ranks_job job;
    const lk_status status = lk_ce_ranks_begin<T>(op, args, direction, false, stream, &job, NULL);
    if (status) return status;
    const lk_cross_entropy_args &a = job.x.common;
    const lk_ranks ranks = {op, stream, job.x.parallel, a.vocab, job.x.states, job.x.all_states,
                            (size_t)a.rows * (size_t)job.call.state_bytes, 1, lk_ce_ranks_step<T>, &job};
    return lk_ranks_run(&ranks, direction);
}
template <class T>
LK_HOST lk_status lk_cross_entropy_parallel_query(const char *op, const lk_cross_entropy_parallel_args *args,
                                                  lk_direction direction, size_t *bytes)
{
    lk_ce_ranks_job job;
    return lk_ce_ranks_begin<T>(op, args, direction, true, NULL, &job, bytes);
}

#endif /* CUDA or the simulator */
#endif
