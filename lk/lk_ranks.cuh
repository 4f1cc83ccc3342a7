// SPDX-License-Identifier: MIT
/* lk_ranks.cuh - columns that are split over ranks (GPUs, or processes): the checks of a rank's slice, where the states lie, and the
 * steps of a call. Plumbing of the headers <op>_parallel.cuh and of linear_cross_entropy; it knows no loss.
 *
 *   state      what a rank computes of a row from its own columns, before any other rank is heard
 *   FORWARD    computes the states of this rank's columns
 *   collective every rank gets the states of all ranks, in the order of ranks: parallel.all_gather, or the caller does it
 *   BETWEEN    where a loss needs the states of all columns before its sums: computes these into the states; then a second
 *              collective
 *   FINISH     merges the states of all ranks and computes the results, the same bits on every rank
 *   BACKWARD   computes the gradients of this rank's columns, from what finish wrote
 *
 * With parallel.all_gather, forward is FORWARD to FINISH, and forward_backward all of them. Without it each step is a call.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_RANKS_CUH
#define LK_RANKS_CUH

#include "lk_check.cuh"

#if LK_CUDA

/* The status of a callback of `parallel`, with a sentence. */
LK_HOST lk_status lk_called_back(const char *op, const char *name, lk_status status)
{
    return status ? lk_fail(status, op, "parallel.%s returned %d", name, (int)status) : LK_OK;
}

/* Compiled with -DLK_CHECK: gathers the slices of all ranks and looks for missing columns and overlaps, which no rank sees by
 * itself. It waits for the stream, so it does nothing while that is captured. states and all_states are scratch memory here: the
 * states overwrite them later. bytes: of one rank's states; where a slice takes more (32 bytes), nothing is checked. */
LK_HOST lk_status lk_check_all_slices(const char *op, const lk_vocab_parallel *v, int64_t vocab, void *states, void *all_states,
                                      size_t bytes, cudaStream_t stream)
{
    (void)op, (void)v, (void)vocab, (void)states, (void)all_states, (void)bytes, (void)stream;
#if defined(LK_CHECK)
    const int64_t mine[4] = {v->vocab_start, vocab, v->vocab_total, v->ranks};
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (bytes < sizeof mine || v->ranks > 1024 || cudaStreamIsCapturing(stream, &capture) || capture) return LK_OK;
    int64_t of[1024][4], sum = 0;
    cudaError_t error = cudaMemcpyAsync(states, mine, sizeof mine, cudaMemcpyHostToDevice, stream);
    const lk_status status = error ? LK_OK : v->all_gather(v->user, states, all_states, sizeof mine, stream);
    if (status) return lk_called_back(op, "all_gather", status);
    if (!error) error = cudaMemcpyAsync(of, all_states, (size_t)v->ranks * sizeof mine, cudaMemcpyDeviceToHost, stream);
    if (!error) error = cudaStreamSynchronize(stream);
    if (error) return lk_fail((lk_status)error, op, "the slices were not gathered: %s", cudaGetErrorString(error));
    for (int i = 0; i < v->ranks; i++) {
        sum += of[i][1];
        if (of[i][2] != v->vocab_total || of[i][3] != v->ranks)
            return lk_fail(LK_ERR_SHAPE, op, "rank %d has other parallel.vocab_total or parallel.ranks than rank %d", i,
                           v->rank);
        for (int k = 0; k < i; k++)
            if (of[i][1] && of[k][1] && of[i][0] < of[k][0] + of[k][1] && of[k][0] < of[i][0] + of[i][1])
                return lk_fail(LK_ERR_SHAPE, op, "the columns of ranks %d and %d overlap", k, i);
    }
    if (sum != v->vocab_total)
        return lk_fail(LK_ERR_SHAPE, op, "the ranks have %lld columns of %lld", (long long)sum, (long long)v->vocab_total);
#endif
    return LK_OK;
}

/* Whether a call gathers by itself. */
LK_HOST bool lk_ranks_gathers(const lk_vocab_parallel &v, lk_direction direction)
{
    return v.all_gather && (direction == LK_FORWARD || direction == LK_BOTH);
}

/* What a call gives, as one of all columns would: FORWARD, BACKWARD, BOTH, or 0 for states alone. */
LK_HOST lk_direction lk_ranks_give(const lk_vocab_parallel &v, lk_direction direction)
{
    const bool results = lk_ranks_gathers(v, direction) || direction == LK_FINISH;
    const bool gradients = direction == LK_BOTH || direction == LK_BACKWARD;
    return (lk_direction)(results * LK_FORWARD + gradients * LK_BACKWARD);
}

/* The rules of `parallel`; they come before all others, since sizes follow from it. vocab: this rank's columns. */
LK_HOST void lk_ranks_check(lk_checks *checks, const lk_vocab_parallel &v, int64_t vocab, lk_direction direction)
{
    if (!v.vocab_total)
        lk_reject(checks, LK_ERR_SHAPE, "parallel.vocab_total is 0; this call is for columns that are split over ranks");
    lk_check_size(checks, "parallel.vocab_total", v.vocab_total, 1, 1 << 30);
    lk_check_size(checks, "vocab", vocab, 0, v.vocab_total);
    if (checks->status) return; /* before their difference is computed */
    lk_check_size(checks, "parallel.vocab_start", v.vocab_start, 0, v.vocab_total - vocab);
    lk_check_size(checks, "parallel.ranks", v.ranks, 1, 1 << 16);
    lk_check_size(checks, "parallel.rank", v.rank, 0, (int64_t)v.ranks - 1);
    lk_check_size(checks, "parallel.reduce_sms", v.reduce_sms, 0, 1 << 16);
    if (!checks->status && direction == LK_BOTH && !v.all_gather)
        lk_reject(checks, LK_ERR_NULL, "parallel.all_gather is NULL; without it call forward, finish and backward");
}

/* The states of a call: `bytes` of a row, of which backward reads `kept`, in units of `unit` bytes. What the checks see of them;
 * then, where the call gathers, their place in the workspace. rows may be unchecked. */
LK_HOST void lk_ranks_place(const lk_vocab_parallel &v, lk_direction direction, int64_t rows, int64_t bytes, int64_t kept, int unit,
                            lk_arena *arena, void **states, const void **all_states, lk_tensor (*list)[2])
{
    const bool gathers = lk_ranks_gathers(v, direction), back = direction == LK_BACKWARD;
    const bool reads = direction == LK_FINISH || direction == LK_BETWEEN;
    const int unit_read = kept % unit ? 4 : unit;
    const int use = back ? LK_REQUIRED : direction == LK_FINISH || gathers ? LK_OUT : LK_OUT | LK_REQUIRED;
    const int64_t mine = lk_count(rows, bytes), all = lk_count(mine, v.ranks);
    (*list)[0] = {"states", *states, back ? unit_read : unit, use, lk_count(rows, back ? kept / unit_read : bytes / unit)};
    (*list)[1] = {"all_states", *all_states, unit, reads ? LK_REQUIRED : LK_UNUSED, lk_count(lk_count(rows, bytes / unit), v.ranks)};
    if (!gathers) return;
    *all_states = lk_take_bytes(arena, rows, all);
    if (!*states) *states = lk_take_bytes(arena, rows, mine);
}

/* A call of a rank. */
typedef struct {
    const char *op;
    cudaStream_t stream;
    lk_vocab_parallel parallel;
    int64_t vocab;            /* this rank's columns */
    void *states, *all_states;
    size_t bytes;             /* of this rank's states; 0 where there are no rows, and then none is gathered */
    int rounds;               /* collectives: 2 with BETWEEN, else 1 */
    lk_status (*step)(void *job, lk_direction step);
    void *job;
} lk_ranks;

LK_HOST lk_status lk_ranks_gather(const lk_ranks *r)
{
    if (!r->bytes) return LK_OK;
    const lk_vocab_parallel &v = r->parallel;
    return lk_called_back(r->op, "all_gather", v.all_gather(v.user, r->states, r->all_states, r->bytes, r->stream));
}

/* The steps of a call, in order. */
LK_HOST lk_status lk_ranks_run(const lk_ranks *r, lk_direction direction)
{
    if (direction != LK_FORWARD && direction != LK_BOTH) return r->step(r->job, direction);
    const bool gathers = lk_ranks_gathers(r->parallel, direction);
    lk_status status = LK_OK;
    if (gathers)
        status = lk_check_all_slices(r->op, &r->parallel, r->vocab, r->states, r->all_states, r->bytes, r->stream);
    if (!status) status = r->step(r->job, LK_FORWARD);
    if (status || !gathers) return status;
    status = lk_ranks_gather(r);
    if (!status && r->rounds > 1) status = r->step(r->job, LK_BETWEEN);
    if (!status && r->rounds > 1) status = lk_ranks_gather(r);
    if (!status) status = r->step(r->job, LK_FINISH);
    return status || direction == LK_FORWARD ? status : r->step(r->job, LK_BACKWARD);
}

#endif /* CUDA or the simulator */
#endif
