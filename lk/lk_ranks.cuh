// SPDX-License-Identifier: MIT
/* lk_ranks.cuh - columns that are split over ranks (GPUs, or processes), as those of a vocabulary-parallel head are: each rank has
 * some columns of every row, and gets the results of all columns, the same bits on every rank. This is the manual of all headers
 * <op>_parallel.cuh; each of them says what is its own.
 *
 * The struct lk_<op>_parallel_args has four members:
 *   common      the struct of the op. Tensors with columns, and vocab, are of this rank's columns; everything else is the same on
 *               all ranks. class_weight has all columns, and targets are columns of the whole vocabulary
 *   parallel    lk_vocab_parallel of lk_base.cuh: which columns are this rank's, and the caller's collectives
 *   states      what a rank computes of each row from its own columns, for the other ranks. In device memory; each header says
 *               how many bytes a row takes
 *   all_states  the states of all ranks, in the order of ranks, with a copy of this rank's own: ranks times as many bytes. It is
 *               aligned as `states`, and must not overlap `states`
 *
 * With parallel.all_gather, forward is a single call, and so is forward_backward. All ranks make the same call:
 *     lk_<op>_parallel_args args = {};
 *     args.common = ...;                                              // the fields of <op>.cuh; ids: the workspace is in common.common
 *     args.parallel.vocab_start = first, args.parallel.vocab_total = all;
 *     args.parallel.rank = rank, args.parallel.ranks = ranks, args.parallel.all_gather = all_gather;
 *     size_t *bytes = &args.common.workspace_bytes;                   // the workspace has all_states, and `states` if NULL
 *     lk_status status = lk_<op>_parallel_forward_backward_workspace_bytes_bf16(&args, bytes);
 *     args.common.workspace = ...;
 *     status = lk_<op>_parallel_forward_backward_bf16(&args, stream);
 *
 * If you give `states` to this call, set it before you ask for the bytes.
 *
 * Without all_gather, each step is a call of its own, and the caller gathers `states` of all ranks into all_states. Each call may
 * need a workspace, and has its own ..._workspace_bytes, as above:
 *     args.parallel.all_gather = NULL, args.states = states;
 *     status = lk_<op>_parallel_forward_bf16(&args, stream);          // writes `states`, and `saved` of linear_cross_entropy
 *     args.all_states = ...;                                          // `states` of all ranks, gathered
 *     status = lk_<op>_parallel_finish_bf16(&args, stream);           // merges them and writes the results
 *     status = lk_<op>_parallel_backward_bf16(&args, stream);         // gradients of this rank's columns
 * kl and linear_kl have the call between, for JENSEN_SHANNON and TOTAL_VARIATION, whose terms need the sums of all columns. In place
 * of finish above:
 *       status = lk_<op>_parallel_between_bf16(&args, stream);        // reads all_states, writes `states` again
 *       ...                                                           // gather again, into the same all_states
 *       status = lk_<op>_parallel_finish_bf16(&args, stream);
 * lk does not notice a missing between: then the loss is 0, and lse and the gradients are wrong.
 *
 * Set the same options and outputs in all calls from forward to backward: the size of a state follows from some of them, as each
 * header says, and lk does not see a difference. finish, and calls with all_gather, write to `states` what backward needs. There
 * `states` may be NULL if no backward follows. To call backward after a forward with all_gather, give forward `states`, and the
 * outputs that the op's backward reads: for the cross entropies lse and those named in the header, for kl none.
 *
 * The same bits on any number of ranks: divide the columns into slices. Each rank has slices that stand side by side, and as many as
 * the other ranks. Without all_gather, call forward once for each slice, as a rank does that has no other columns: vocab,
 * vocab_start and the tensors with columns are the slice's, parallel.ranks is the number of all slices, parallel.rank that of this
 * slice, and `states` its part of a tensor [slices of this rank][rows]. Call between in the same way. Gather these tensors. Call
 * finish with the number of all slices as parallel.ranks. Call backward with all columns of this rank and the number of ranks.
 * Then finish merges the same states in the same order on any number of ranks. Rows of logits must lie alike modulo 16 bytes in all
 * slices. Gradients may differ, since dx is a sum over ranks.
 *
 * Heads (linear_...): weight, bias, dweight, dbias and vocab are of this rank's columns. dx is this rank's part of the sum over
 * all columns, rounded to T, and 0 on a rank without columns. Ask for it on all ranks or on none. A call that computes dx calls
 * parallel.reduce once, with all tokens, as soon as dx is complete. The matmul for the last chunk's or panel's dweight comes
 * behind it on the stream, so the sum over ranks can run at the same time. This matmul leaves parallel.reduce_sms SMs free.
 * With NCCL, set reduce_sms = 8 and NCCL's maxCTAs = 8. If reduce is NULL, the caller sums dx. lk does not touch dx after
 * parallel.reduce. So with sequence parallelism parallel.reduce may reduce-scatter dx into other memory, where each rank gets the
 * rows of its own tokens. x and dx of the call still have all tokens; the caller gathers x first. All calls but finish have a
 * ..._plan, which follows from this rank's columns alone.
 *
 * A rank may have no columns: vocab is 0, and tensors with columns may be NULL. It makes the same calls as the others. A call that
 * fails returns its status on its own rank. The other ranks do not learn of it, so they may wait in a collective for ever. If a
 * callback returns a number that is not 0, the call returns that number.
 *
 * Errors, in the order of the checks: fields that the call does not take, then the errors below, then those of the op:
 *   LK_ERR_SHAPE   parallel.vocab_total is 0; vocab_total, vocab, vocab_start, rank (0 to ranks - 1), ranks (1 to 2^16) or
 *                  reduce_sms is out of range; ranks is 1, and vocab is not vocab_total
 *   LK_ERR_NULL    forward_backward without all_gather. states or all_states is NULL and the call needs it: this is checked with
 *                  the op's own pointers
 * Compiled with -DLK_CHECK, a call with all_gather first gathers the slice of each rank, 32 bytes, and waits for the stream. It
 * fails if ranks share columns or columns are missing. Compile it so for all ranks or for none. There is no such check while the
 * stream is captured, with more than 1024 ranks, or if `states` of a rank has less than 32 bytes in all.
 *
 * What follows knows no loss: the checks of `parallel`, where states lie, and the steps of a call.
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

/* Whether a call gathers by itself. */
LK_HOST bool lk_ranks_gathers(const lk_vocab_parallel &v, lk_direction direction)
{
    return v.all_gather && (direction == LK_FORWARD || direction == LK_BOTH);
}

/* Which outputs a call writes, as a direction of the op without ranks: LK_FORWARD, LK_BACKWARD, LK_BOTH, or 0 for states alone. */
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
    if (v.ranks == 1 && vocab != v.vocab_total)
        lk_reject(checks, LK_ERR_SHAPE, "vocab is %lld; with parallel.ranks 1 it must be parallel.vocab_total, %lld",
                  (long long)vocab, (long long)v.vocab_total);
    lk_check_size(checks, "parallel.reduce_sms", v.reduce_sms, 0, 1 << 16);
    if (!checks->status && direction == LK_BOTH && !v.all_gather)
        lk_reject(checks, LK_ERR_NULL, "parallel.all_gather is NULL; without it call forward, finish and backward");
}

/* Describes states and all_states to the checks, in `list`. If the call gathers, it also takes their place from the workspace.
 * bytes: of a row's state. unit: of an element of it. kept: the bytes of a row that finish writes and backward reads. rows has not
 * been checked yet. */
LK_HOST void lk_ranks_place(const lk_vocab_parallel &v, lk_direction direction, int64_t rows, int64_t bytes, int64_t kept, int unit,
                            lk_arena *arena, void **states, const void **all_states, lk_tensor (*list)[2])
{
    const bool gathers = lk_ranks_gathers(v, direction), back = direction == LK_BACKWARD, finish = direction == LK_FINISH;
    const bool part = back || finish;
    const int of_part = kept % unit ? 4 : unit, use = back ? LK_REQUIRED : finish || gathers ? LK_OUT : LK_OUT | LK_REQUIRED;
    const int64_t mine = lk_count(rows, bytes), all = lk_count(lk_count(rows, bytes / unit), v.ranks);
    (*list)[0] = {"states", *states, part ? of_part : unit, use, lk_count(rows, part ? kept / of_part : bytes / unit)};
    (*list)[1] = {"all_states", *all_states, unit, finish || direction == LK_BETWEEN ? LK_REQUIRED : LK_UNUSED, all};
    if (!gathers) return;
    *all_states = lk_take_bytes(arena, rows, lk_count(mine, v.ranks));
    if (!*states) *states = lk_take_bytes(arena, rows, mine);
}

/* A call of a rank. */
typedef struct {
    const char *op;
    cudaStream_t stream;
    lk_vocab_parallel parallel;
    int64_t vocab;            /* this rank's columns */
    void *states;
    const void *all_states;
    size_t bytes;             /* of this rank's states; 0 where there are no rows, and then none is gathered */
    int rounds;               /* collectives: 2 with between, else 1 */
    lk_status (*step)(void *job, lk_direction step);
    void *job;
} lk_ranks;

/* Gathers so many bytes of each rank. */
LK_HOST lk_status lk_ranks_gather(const lk_ranks *r, size_t bytes)
{
    if (!bytes) return LK_OK;
    const lk_vocab_parallel &v = r->parallel;
    void *const all = const_cast<void *>(r->all_states);
    return lk_called_back(r->op, "all_gather", v.all_gather(v.user, r->states, all, bytes, r->stream));
}

/* Compiled with -DLK_CHECK: gathers the slices of all ranks and looks for missing columns and overlaps, which no rank sees by
 * itself. It waits for the stream, so it does nothing while that is captured. states and all_states are scratch memory here:
 * the states overwrite them later. Where a rank's states have fewer bytes than a slice, 32, nothing is checked. */
LK_HOST lk_status lk_check_all_slices(const lk_ranks *r)
{
    (void)r;
#if defined(LK_CHECK)
    const lk_vocab_parallel *const v = &r->parallel;
    const char *const op = r->op;
    const cudaStream_t stream = r->stream;
    const int64_t mine[4] = {v->vocab_start, r->vocab, v->vocab_total, v->ranks};
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (r->bytes < sizeof mine || v->ranks > 1024 || cudaStreamIsCapturing(stream, &capture) || capture) return LK_OK;
    int64_t of[1024][4], sum = 0;
    cudaError_t error = cudaMemcpyAsync(r->states, mine, sizeof mine, cudaMemcpyHostToDevice, stream);
    const lk_status status = error ? LK_OK : lk_ranks_gather(r, sizeof mine);
    if (status) return status;
    if (!error) error = cudaMemcpyAsync(of, r->all_states, (size_t)v->ranks * sizeof mine, cudaMemcpyDeviceToHost, stream);
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

/* The steps of a call, in order. */
LK_HOST lk_status lk_ranks_run(const lk_ranks *r, lk_direction direction)
{
    if (direction != LK_FORWARD && direction != LK_BOTH) return r->step(r->job, direction);
    const bool gathers = lk_ranks_gathers(r->parallel, direction);
    lk_status status = LK_OK;
    if (gathers) status = lk_check_all_slices(r);
    if (!status) status = r->step(r->job, LK_FORWARD);
    if (status || !gathers) return status;
    status = lk_ranks_gather(r, r->bytes);
    if (!status && r->rounds > 1) status = r->step(r->job, LK_BETWEEN);
    if (!status && r->rounds > 1) status = lk_ranks_gather(r, r->bytes);
    if (!status) status = r->step(r->job, LK_FINISH);
    return status || direction == LK_FORWARD ? status : r->step(r->job, LK_BACKWARD);
}

#endif /* CUDA or the simulator */
#endif
