// SPDX-License-Identifier: MIT
/* cross_entropy_parallel.cuh - cross_entropy.cuh for columns that are split over ranks (GPUs, or processes), as those of a
 * vocabulary-parallel head are: each rank has some columns of every row, and gets the results of all columns.
 *
 *   a rank's state of a row   max, sum and what the options add, over the rank's columns without the target's: lk_ce_row of
 *                             lk_loss.cuh. The rank that has the target's column stores that logit beside them
 *   the collective            every rank gets the states of all ranks, in their order
 *   finish                    merges them, adds the target, and computes loss, lse and the other results by cross_entropy.cuh's
 *                             formulas
 *   backward                  each rank computes dlogits of its own columns, from lse and from others[r] = sum_{j != y} p[r,j]
 *
 * Use        In one .cu file:                                   Anywhere, C included:
 *                #include "lk/cross_entropy_parallel.cuh"           #include "lk/cross_entropy_parallel.cuh"
 *                LK_DEFINE_CROSS_ENTROPY_PARALLEL(bf16)             LK_DECLARE_CROSS_ENTROPY_PARALLEL(bf16)
 *            The struct is lk_cross_entropy_args; `parallel` says which columns are this call's. logits, dlogits and vocab are
 *            of these columns. target has columns of the whole vocabulary, class_weight has vocab_total elements on every rank.
 *            All ranks get the same results, bit for bit.
 *            With parallel.all_gather, forward and forward_backward are one call with one collective; all ranks make the call:
 *                lk_cross_entropy_args args = {};
 *                args.logits = logits, args.target = target, args.rows = rows, args.vocab = vocab;    // of this rank
 *                args.parallel.vocab_start = first, args.parallel.vocab_total = all;
 *                args.parallel.rank = rank, args.parallel.ranks = ranks, args.parallel.all_gather = all_gather;
 *                args.loss = loss, args.dlogits = dlogits;
 *                size_t *bytes = &args.workspace_bytes;
 *                lk_status status = lk_cross_entropy_parallel_forward_backward_workspace_bytes_bf16(&args, bytes);
 *                args.workspace = ...;                  // that many bytes, aligned to 128; the states of all ranks lie there
 *                status = lk_cross_entropy_parallel_forward_backward_bf16(&args, stream);
 *            Without it there are three calls. forward writes `states` alone: 16 bytes per row, 32 with label_smoothing,
 *            entropy or argmax, aligned to 16; with statistics 40, aligned to 8. The caller gathers those of all ranks,
 *            [ranks][rows]. finish computes the results from them. backward reads lse and others; lse_low if given; entropy with
 *            dentropy; and the counts for a mean:
 *                args.parallel.all_gather = NULL, args.states = states, args.lse = lse;
 *                status = lk_cross_entropy_parallel_forward_bf16(&args, stream);
 *                args.all_states = ...;                 // gathered from the states of all ranks
 *                args.others = others;
 *                status = lk_cross_entropy_parallel_finish_bf16(&args, stream);
 *                status = lk_cross_entropy_parallel_backward_bf16(&args, stream);
 *            entropy, argmax and statistics are set in forward too, though finish writes them: they decide how large states
 *            are. Only finish needs a workspace then, for a reduced loss. To call backward after a forward with all_gather, give
 *            forward `lse` and `others`.
 * Needs      cross_entropy.cuh and what that needs.
 * Options    Those of cross_entropy.cuh, without target_prob. Every rank counts all bad targets; without all_gather, finish and
 *            backward count them, and forward does not.
 * Errors     As in cross_entropy.cuh, which lists those of `parallel` too. A call that fails returns its status on its own rank.
 *            That of all_gather is returned. lk waits for no rank. Compiled with -DLK_CHECK, a call with all_gather gathers the
 *            slices first, and fails where two overlap or columns are missing; not in a graph's capture, nor with states of 16
 *            bytes per row that are few.
 * Read on    lk/cross_entropy.md: how exact results are, and what is read and written.
 *
 * The kernels: lk_cross_entropy_gradient_kernel of cross_entropy.cuh computes the states, and later the gradients;
 * lk_cross_entropy_finish_kernel, here, merges the states, with one thread per row. Then come the sums over all rows, as on one
 * GPU. linear_cross_entropy calls finish and the checks of slices.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_CROSS_ENTROPY_PARALLEL_CUH
#define LK_CROSS_ENTROPY_PARALLEL_CUH

#include "cross_entropy.cuh"

typedef lk_cross_entropy_args lk_cross_entropy_parallel_args;

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
    for (int rank = 0; label.counted && rank < a.parallel.ranks; rank++) {
        const State part = lk_ce_unpack_state<State>(a.all_states, call.state_bytes, rank * a.rows + row);
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
    if (a.others) a.others[row] = others;
    lk_ce_put<true>(call, row, label, weight, s);
}

/* finish: merges the states of all ranks and writes the results; then the sum over rows where a loss is reduced. */
LK_HOST lk_status lk_cross_entropy_run_finish(const char *op, const lk_device *device, lk_cross_entropy_call call,
                                              cudaStream_t stream)
{
    lk_cross_entropy_args &a = call.a;
    lk_status status = LK_OK;
    const bool reduced = lk_cross_entropy_reduced(&a);
    call.state_bytes = lk_ce_state_bytes(&a), a.vocab = call.classes;
    if (!reduced && (a.valid_rows || a.weight_sum)) status = lk_cross_entropy_count(op, device, call, stream);
    const int64_t blocks = lk_ceil_div(a.rows, LK_CROSS_ENTROPY_THREADS);
    void (*const kernel)(lk_cross_entropy_call) =
        a.statistics ? lk_cross_entropy_finish_kernel<lk_ce_row_squares> : lk_cross_entropy_finish_kernel<lk_ce_row>;
    if (!status && blocks > 0)
        status = lk_launch_pdl(op, device, kernel, blocks, 1, LK_CROSS_ENTROPY_THREADS, 0, stream, call);
    if (!status && reduced) status = lk_cross_entropy_sum(op, device, call, stream);
    return status;
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* backward of a rank's columns. */
template <class T>
LK_HOST lk_status lk_cross_entropy_run_ranks_backward(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                                      cudaStream_t stream)
{
    const lk_status status = lk_cross_entropy_prepare_backward(op, device, call, stream);
    return !status && call.a.rows > 0 ? lk_cross_entropy_gradient_of<T, LK_BACKWARD>(op, device, call, stream) : status;
}

/* forward and forward_backward: states, all_gather, finish; then, for forward_backward, backward. */
template <class T>
LK_HOST lk_status lk_cross_entropy_run_ranks(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                             lk_direction direction, cudaStream_t stream)
{
    lk_cross_entropy_args &a = call.a;
    const lk_vocab_parallel v = a.parallel;
    const lk_ce_space x = lk_ce_space_of(&a, LK_CE_RANKS, direction);
    if (v.all_gather && a.rows > 0) a.states = x.states, a.all_states = x.all_states;
    if (direction == LK_BOTH) { /* outputs that backward reads: where the caller gave NULL they are in the workspace */
        const bool needs_counts = a.reduction == LK_REDUCTION_MEAN && !a.denominator;
        if (!a.lse) a.lse = x.lse;
        if (!a.lse_low) a.lse_low = x.lse_low;
        if (!a.others) a.others = x.others;
        if (a.dentropy && !a.entropy) a.entropy = x.entropy;
        if (needs_counts && !a.valid_rows) a.valid_rows = &x.counts->valid_rows;
        if (needs_counts && a.class_weight && !a.weight_sum) a.weight_sum = &x.counts->weight_sum;
    }
    call.state_bytes = lk_ce_state_bytes(&a);
    const size_t bytes = (size_t)a.rows * (size_t)call.state_bytes;
    lk_status status = v.all_gather ? lk_check_all_slices(op, &v, a.vocab, x.states, x.all_states, bytes, stream) : LK_OK;
    if (!status && a.rows > 0) status = lk_cross_entropy_gradient<T, LK_FORWARD>(op, device, call, stream);
    if (status || !v.all_gather) return status;
    if (a.rows > 0) status = lk_called_back(op, "all_gather", v.all_gather(v.user, x.states, x.all_states, bytes, stream));
    if (!status) status = lk_cross_entropy_run_finish(op, device, call, stream);
    if (status || direction != LK_BOTH) return status;
    a.bad_targets = NULL; /* finish has counted them */
    return lk_cross_entropy_run_ranks_backward<T>(op, device, call, stream);
}

template <class T>
LK_HOST lk_status lk_cross_entropy_parallel_run(const char *op, const lk_cross_entropy_args *args, lk_direction direction,
                                                cudaStream_t stream)
{
    lk_cross_entropy_call call = {};
    lk_device device = {};
    const lk_status status = lk_cross_entropy_fill_call<T>(op, args, LK_CE_RANKS, direction, &device, &call);
    if (status) return status;
    if (direction == LK_FINISH) return lk_cross_entropy_run_finish(op, &device, call, stream);
    return direction == LK_BACKWARD ? lk_cross_entropy_run_ranks_backward<T>(op, &device, call, stream)
                                    : lk_cross_entropy_run_ranks<T>(op, &device, call, direction, stream);
}
template <class T>
LK_HOST lk_status lk_cross_entropy_parallel_query(const char *op, const lk_cross_entropy_args *args, lk_direction direction,
                                                  size_t *bytes)
{
    return lk_cross_entropy_bytes<T>(op, args, LK_CE_RANKS, direction, bytes);
}

#endif /* CUDA or the simulator */
#endif
