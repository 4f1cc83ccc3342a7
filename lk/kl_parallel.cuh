// SPDX-License-Identifier: MIT
/* kl_parallel.cuh - kl.cuh for columns that are split over ranks (GPUs, or processes), as those of a vocabulary-parallel head are:
 * each rank has some columns of every row, the same of student and teacher, and gets the results of all columns.
 *
 *   a rank's state of a row   the sums of the exponentials of both tensors over the rank's columns. With the divergences
 *                             FORWARD and REVERSE also the divergence and the entropy of these columns, as if there were no others
 *   the collective            every rank gets the states of all ranks, in the order of ranks
 *   between                   only with JENSEN_SHANNON and TOTAL_VARIATION, whose terms need the sums of all columns: each rank
 *                             merges the states and sums the terms of its own columns. A second collective gathers the states
 *                             with these sums
 *   finish                    merges the states. P is the sum of p over a rank's columns, Q that of q:
 *                             KL(q || p) = sum over ranks of Q * (log(Q / P) + the rank's KL(q || p));
 *                             KL(p || q): likewise, with p and q swapped, and P and Q;
 *                             entropy = sum over ranks of P * (the rank's entropy - log P);
 *                             with JENSEN_SHANNON and TOTAL_VARIATION it adds the sums of between
 *   backward                  each rank computes dlogits of its own columns, from the state of all columns
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/kl_parallel.cuh"             #include "lk/kl_parallel.cuh"
 *                LK_DEFINE_KL_PARALLEL(bf16)               LK_DECLARE_KL_PARALLEL(bf16)
 *            The calls are those of lk_ranks.cuh, the manual of all headers for ranks; JENSEN_SHANNON and TOTAL_VARIATION have
 *            between, and two collectives. `common` is lk_kl_args: logits, teacher, dlogits and vocab are of this rank's columns.
 *            finish reads no logits: of `common` it takes row_weight, rows, vocab, the options and the outputs.
 * States     32 bytes per row, aligned to 16. finish writes to `states` the state of all columns. Of what the other calls wrote,
 *            backward reads nothing else. To get the entropy, set `entropy` in forward and between too: they do not write to it,
 *            but without it they do not sum the entropy. Calls without all_gather need no workspace.
 * Needs      kl.cuh, lk_ranks.cuh and what these need.
 * Options    Those of kl.cuh.
 * Errors     Those of lk_ranks.cuh, with LK_ERR_VALUE for between with FORWARD or REVERSE; then as in kl.cuh.
 * Exact      As kl.cuh. log P and log Q are off by the relative error of the rank's sum, some 2^-22, however large the logits
 *            are.
 * Read on    lk/kl.md: how exact results are, and what is read and written.
 *
 * The kernels: lk_kl_kernel of kl.cuh computes states, the sums of between and gradients; lk_kl_merge_kernel, here, merges, with
 * one thread per row. linear_kl_parallel.cuh calls both.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_KL_PARALLEL_CUH
#define LK_KL_PARALLEL_CUH

#include "kl.cuh"
#include "lk_ranks.cuh"

/* One struct for all calls. */
typedef struct {
    lk_kl_args common;
    lk_vocab_parallel parallel;
    void *states;           /* see States. forward and between write them; finish writes what backward reads, or NULL to skip */
    const void *all_states; /* [ranks][rows] of them: between and finish read them */
} lk_kl_parallel_args;

#define LK_KL_PARALLEL_FUNCTIONS(X, T)                                                                                         \
    X##_CALL(kl_parallel, forward, LK_FORWARD, T)                                                                              \
    X##_CALL(kl_parallel, between, LK_BETWEEN, T)                                                                              \
    X##_CALL(kl_parallel, finish, LK_FINISH, T)                                                                                \
    X##_CALL(kl_parallel, backward, LK_BACKWARD, T)                                                                            \
    X##_CALL(kl_parallel, forward_backward, LK_BOTH, T)
#define LK_DECLARE_KL_PARALLEL(T) LK_DECLARE(KL_PARALLEL, T)
#define LK_DEFINE_KL_PARALLEL(T) LK_DEFINE(KL_PARALLEL, T)

#if LK_CUDA

/* ---- Finish -------------------------------------------------------------------------------------------------------------- */

#define LK_KL_PARALLEL_THREADS 256

typedef struct {
    lk_kl_args a; /* with every default filled in */
    const lk_kl_row *all_states;
    lk_kl_row *states; /* NULL: not wanted */
    float scale, teacher_scale; /* of the states: 1 under a softcap */
    int ranks;
    bool between; /* only the sums of the exponentials are there */
} lk_kl_merge_call;

/* log of a rank's sum of exponentials, minus scale * reference. */
LK_DEVICE double lk_kl_log_of(lk_lse s, float scale, float reference)
{
    return log((double)s.sum) + (double)scale * ((double)s.max - (double)reference);
}

/* A row's state of all columns, from the states of the ranks in their order. In double: where p and q nearly agree, log P and log Q
 * nearly cancel. There is one of each per rank, so double costs little. */
LK_DEVICE lk_kl_row lk_kl_merge(const lk_kl_merge_call &call, int64_t row)
{
    const lk_kl_args &a = call.a;
    const float scale = call.scale, teacher_scale = call.teacher_scale;
    float max = -INFINITY, teacher_max = -INFINITY;
    double sum = 0.0, teacher_sum = 0.0, divergence = 0.0, entropy = 0.0;
    for (int rank = 0; rank < call.ranks; rank++) {
        const lk_kl_state part = call.all_states[rank * a.rows + row].of;
        max = fmaxf(max, part.student.max), teacher_max = fmaxf(teacher_max, part.teacher.max);
    }
    const float reference = lk_lse_reference(max), teacher_reference = lk_lse_reference(teacher_max);
    for (int rank = 0; rank < call.ranks; rank++) {
        const lk_kl_state part = call.all_states[rank * a.rows + row].of;
        sum += exp(lk_kl_log_of(part.student, scale, reference));
        teacher_sum += exp(lk_kl_log_of(part.teacher, teacher_scale, teacher_reference));
    }
    const double log_sum = log(sum), teacher_log_sum = log(teacher_sum);
    /* P or Q below FLT_MIN counts as 0, as a probability does. So a rank whose columns are all masked is left out: its divergence
     * and entropy are NaN. */
    for (int rank = 0; rank < call.ranks && !call.between; rank++) {
        const lk_kl_row part = call.all_states[rank * a.rows + row];
        const double log_p = lk_kl_log_of(part.of.student, scale, reference) - log_sum, p = exp(log_p);
        const double log_q = lk_kl_log_of(part.of.teacher, teacher_scale, teacher_reference) - teacher_log_sum;
        const bool forward = a.divergence == LK_KL_FORWARD;
        const double w = forward ? exp(log_q) : p, log_w = forward ? log_q : log_p, log_other = forward ? log_p : log_q;
        if (w >= FLT_MIN) divergence += log_other == -INFINITY ? INFINITY : w * (log_w - log_other + part.divergence);
        if (p >= FLT_MIN) entropy += p * (part.entropy - log_p);
    }
    const bool sound = lk_is_finite((float)log_sum), both = sound && lk_is_finite((float)teacher_log_sum);
    return {{{max, (float)sum}, {teacher_max, (float)teacher_sum}}, both ? (divergence < 0.0 ? 0.0f : (float)divergence) : NAN,
            sound ? (float)entropy : NAN, 0.0f, 0.0f};
}

/* The same after between: each rank's state already has the sums of exponentials of all columns. */
LK_DEVICE lk_kl_row lk_kl_add_up(const lk_kl_merge_call &call, int64_t row)
{
    lk_kl_row all = call.all_states[row];
    for (int rank = 1; rank < call.ranks; rank++) {
        const lk_kl_row part = call.all_states[rank * call.a.rows + row];
        all.divergence += part.divergence, all.entropy += part.entropy, all.of_student += part.of_student;
        all.rest += part.rest;
    }
    return all;
}

/* A thread owns a row: it writes the state of all columns and the row's results. */
LK_KERNEL void __launch_bounds__(LK_KL_PARALLEL_THREADS) lk_kl_merge_kernel(const __grid_constant__ lk_kl_merge_call call)
{
    const lk_kl_args &a = call.a;
    const int64_t row = (int64_t)blockIdx.x * LK_KL_PARALLEL_THREADS + threadIdx.x;
    lk_griddepcontrol_launch_dependents();
    lk_griddepcontrol_wait();
    if (row >= a.rows) return;
    const float weight = a.row_weight ? a.row_weight[row] : 1.0f;
    const bool read = weight != 0.0f;
    lk_kl_row all = {};
    if (read) all = call.between || !LK_KL_HAS_BETWEEN(a.divergence) ? lk_kl_merge(call, row) : lk_kl_add_up(call, row);
    const lk_lse student = all.of.student, teacher = all.of.teacher;
    if (call.states) call.states[row] = all;
    if (call.between) return;
    if (a.loss) lk_put_or_add(a.loss + row, read ? weight * all.divergence : 0.0f, a.accumulate_loss);
    if (a.entropy) a.entropy[row] = all.entropy;
    if (a.lse) a.lse[row] = read ? lk_lse_log({call.scale * student.max, student.sum}) : 0.0f;
    if (a.teacher_lse) a.teacher_lse[row] = read ? lk_lse_log({call.teacher_scale * teacher.max, teacher.sum}) : 0.0f;
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* What linear_kl_parallel.cuh also checks: `parallel`, and whether a call may have the divergence. */
LK_HOST void lk_kl_check_ranks(lk_checks *checks, const lk_vocab_parallel &v, int64_t vocab, int divergence,
                               lk_direction direction)
{
    lk_ranks_check(checks, v, vocab, direction);
    if (!checks->status && direction == LK_BETWEEN && !LK_KL_HAS_BETWEEN(divergence))
        lk_reject(checks, LK_ERR_VALUE, "divergence is %d; this call is for LK_KL_JENSEN_SHANNON and _TOTAL_VARIATION", divergence);
}

/* What the checks see of the states; then, where the call gathers, their place in the workspace. */
LK_HOST void lk_kl_place_states(const lk_vocab_parallel &v, int64_t rows, lk_direction direction, lk_arena *arena,
                                void **states, const void **all_states, lk_tensor (*list)[2])
{
    lk_ranks_place(v, direction, rows, sizeof(lk_kl_row), sizeof(lk_kl_row), 16, arena, states, all_states, list);
}

/* Validates; x becomes the arguments with every default filled in. If the call gathers, states and all_states lie in the workspace,
 * unless the caller gave `states`. */
template <class T>
LK_HOST lk_status lk_kl_parallel_check(const char *op, const lk_kl_parallel_args *args, lk_direction direction, lk_device *device,
                                       lk_kl_parallel_args *x, size_t *bytes)
{
    *x = *args;
    const lk_vocab_parallel &v = x->parallel;
    const lk_direction gives = lk_ranks_give(v, direction);
    lk_checks checks = {op, LK_OK};
    lk_kl_check_ranks(&checks, v, x->common.vocab, x->common.divergence, direction);
    if (checks.status) return checks.status; /* before sizes are computed of it */
    lk_arena arena = {(uintptr_t)x->common.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    lk_kl_more more = {direction != LK_FINISH, {}, 0};
    lk_kl_place_states(v, x->common.rows, direction, &arena, &x->states, &x->all_states, &more.list);
    more.needed = arena.used;
    const lk_status status = lk_kl_check<T>(op, &args->common, gives, device, &x->common, &more);
    if (!(gives & LK_FORWARD)) x->common.entropy = args->common.entropy; /* not written here; not NULL: it is wanted */
    if (!status && bytes) *bytes = arena.used;
    return status;
}

/* Computes the state of all columns from the states of all ranks; and the results, unless `between`. */
LK_HOST lk_status lk_kl_run_merge(const char *op, const lk_device *device, const lk_kl_parallel_args &x, bool between,
                                  cudaStream_t stream)
{
    const lk_kl_args &a = x.common;
    const lk_kl_merge_call call = {a, (const lk_kl_row *)x.all_states, (lk_kl_row *)x.states,
                                   a.softcap > 0.0f ? 1.0f : a.logit_scale, a.teacher_softcap > 0.0f ? 1.0f : a.teacher_scale,
                                   x.parallel.ranks, between};
    const int64_t blocks = lk_ceil_div(x.common.rows, LK_KL_PARALLEL_THREADS);
    return lk_launch_pdl(op, device, lk_kl_merge_kernel, blocks, 1, LK_KL_PARALLEL_THREADS, 0, stream, call);
}

/* A step of lk_kl_kernel. It writes dlogits alone: other outputs are of all columns. entropy not NULL: the entropy is wanted. */
template <class T, class Out, int Step>
LK_HOST lk_status lk_kl_run_step(const char *op, const lk_device *device, lk_kl_args a, void *states, cudaStream_t stream)
{
    a.loss = a.lse = a.teacher_lse = NULL;
    if (Step != LK_KL_GRADIENT) a.dlogits = NULL;
    if (Step == LK_KL_GRADIENT && a.vocab == 0) return LK_OK;
    return lk_kl_launch<T, Out, Step>(op, device, a, stream, (lk_kl_row *)states);
}

/* between: merges the states, then sums the terms over the rank's columns. */
template <class T>
LK_HOST lk_status lk_kl_run_between(const char *op, const lk_device *device, const lk_kl_parallel_args &x, cudaStream_t stream)
{
    const lk_status status = lk_kl_run_merge(op, device, x, true, stream);
    return status ? status : lk_kl_run_step<T, T, LK_KL_TERMS>(op, device, x.common, x.states, stream);
}

/* A call of a rank while it is launched. */
typedef struct {
    const char *op;
    const lk_device *device;
    cudaStream_t stream;
    lk_kl_parallel_args x;
} lk_kl_ranks_job;

template <class T> LK_HOST lk_status lk_kl_step(void *of, lk_direction step)
{
    const lk_kl_ranks_job &job = *(lk_kl_ranks_job *)of;
    const lk_kl_parallel_args &x = job.x;
    if (step == LK_FORWARD) return lk_kl_run_step<T, T, LK_KL_STATE>(job.op, job.device, x.common, x.states, job.stream);
    if (step == LK_BETWEEN) return lk_kl_run_between<T>(job.op, job.device, x, job.stream);
    if (step == LK_FINISH) return lk_kl_run_merge(job.op, job.device, x, false, job.stream);
    return lk_kl_run_step<T, T, LK_KL_GRADIENT>(job.op, job.device, x.common, x.states, job.stream);
}

/* finish, for heads: they need no other kernel of this header. */
template <class T> LK_HOST lk_status lk_kl_ranks_finish(const char *op, const lk_kl_parallel_args *args, cudaStream_t stream)
{
    lk_device device = {};
    lk_kl_parallel_args x = {};
    const lk_status status = lk_kl_parallel_check<T>(op, args, LK_FINISH, &device, &x, NULL);
    return status || x.common.rows == 0 ? status : lk_kl_run_merge(op, &device, x, false, stream);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_kl_parallel_run(const char *op, const lk_kl_parallel_args *args, cudaStream_t stream)
{
    lk_device device = {};
    lk_kl_ranks_job job = {op, &device, stream, {}};
    const lk_kl_parallel_args &x = job.x;
    const lk_status status = lk_kl_parallel_check<T>(op, args, direction, &device, &job.x, NULL);
    if (status || x.common.rows == 0) return status;
    const lk_ranks ranks = {op, stream, x.parallel, x.common.vocab, x.states, x.all_states,
                            (size_t)x.common.rows * sizeof(lk_kl_row), LK_KL_HAS_BETWEEN(x.common.divergence) ? 2 : 1,
                            lk_kl_step<T>, &job};
    return lk_ranks_run(&ranks, direction);
}

template <class T>
LK_HOST lk_status lk_kl_parallel_query(const char *op, const lk_kl_parallel_args *args, lk_direction direction, size_t *bytes)
{
    lk_kl_parallel_args x = {};
    return lk_kl_parallel_check<T>(op, args, direction, NULL, &x, bytes);
}

#endif /* CUDA or the simulator */
#endif
