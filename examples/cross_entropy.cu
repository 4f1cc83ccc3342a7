// SPDX-License-Identifier: MIT
/* cross_entropy in nine rungs, one idea per rung. Each computes loss[r] = log sum_j exp(logits[r,j]) - logits[r,target[r]],
 * first of the same four rows of 8:
 *
 *   row 0   log 1, log 2, ..., log 8; target 5          the exponentials are 1 to 8, of 36:   loss = log 36/6 = 1.791759
 *   row 1   1000, eight times; target 3                 exp(1000) is no float, 8 equal terms: loss = log 8    = 2.079442
 *   row 2   log 1, log 1, log 2, log 4, -inf; target 3  exp(-inf) is 0, so 4 of 8:            loss = log 8/4  = 0.693147
 *   row 3   NaN, eight times; target -100               ignored, whatever it holds:           loss = 0
 *
 * The fourth adds the gradient, as do the last three and lk, which has forward, backward and forward_backward. The first four
 * are about the formula, and a thread has a whole row. The other five are about the GPU: which thread reads what, and where it
 * is kept.
 *
 *   gradient    p[j] is an exponential over its row's sum, and 1 less at the target:
 *               row 0   times 36:   1  2  3  4  5 -30  7  8
 *               row 1   times 8:    1  1  1 -7  1  1  1  1      backward, which is given lse, is off by what 1002.079442 loses
 *               row 2   times 8:    1  1  2 -4  0  0  0  0      as a float: 6e-5. With lse_low, which is that loss, it is
 *               row 3               0  0  0  0  0  0  0  0      right
 *   mean        three rows count:   (log 6 + log 8 + log 2) / 3 = log(96) / 3 = 1.521449, and a third of these gradients
 *
 * Then all rungs in bf16, on rows of any number and length, against the formula in double; on a GPU with their times:
 *
 *   make example-cross_entropy                            on a GPU, or on the CPU where there is none
 *   make example-cross_entropy ARGS="4096 32768"          4096 rows of 32768; make bench-ladder keeps these times
 *   make BACKEND=cpu SAN=asan example-cross_entropy       on the CPU, with symbols; then
 *   gdb build/cpu-asan/examples/cross_entropy             and: break rung_2_kernel, run, next
 *
 * lk_launch(kernel, grid, block, smem, stream, args) is CUDA's launch in triple angle brackets, written so that it also runs on
 * the CPU.
 */
#include <cub/block/block_reduce.cuh>

#include "examples/ladder.h"
#include "lk/cross_entropy.cuh"

LK_DEFINE_CROSS_ENTROPY(f32)
LK_DEFINE_CROSS_ENTROPY(bf16)

template <class T> struct rung_args {
    const T *logits;       /* [rows, vocab] */
    const int64_t *target; /* [rows] */
    float *loss;           /* [rows] */
    T *dlogits;            /* [rows, vocab]; rungs 4 and 7 to 9. NULL: the loss alone */
    int rows, vocab;
};

/* Rung 1: the formula, a thread per row. Right on paper; in float, exp overflows above 88 (row 1 becomes inf). */
template <class T> __global__ void rung_1_kernel(rung_args<T> a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.rows) return;
    const T *logits = a.logits + (int64_t)row * a.vocab;
    const int64_t y = a.target[row];
    float sum = 0.0f;
    for (int col = 0; col < a.vocab; col++) sum += expf((float)logits[col]);
    a.loss[row] = y == IGNORED ? 0.0f : logf(sum) - (float)logits[y];
}

/* Rung 2: the running sum. Keep the largest logit so far and the sum of exponentials relative to it. When the largest grows,
 * rescale the sum. The loss is (max - logits[y]) + log sum: a difference of two logits is exact, while max + log sum would
 * round 1002.079442 to a float before 1000 is subtracted, which costs three digits. The row is still read from the first column
 * to the last; rung 3 splits it. */
template <class T> __global__ void rung_2_kernel(rung_args<T> a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.rows) return;
    const T *logits = a.logits + (int64_t)row * a.vocab;
    const int64_t y = a.target[row];
    float max = -INFINITY, sum = 0.0f;
    for (int col = 0; col < a.vocab; col++) {
        const float logit = (float)logits[col];
        if (logit == -INFINITY) continue; /* adds nothing, and -inf - -inf would be NaN */
        const float larger = fmaxf(max, logit);
        sum = sum * expf(max - larger) + expf(logit - larger);
        max = larger;
    }
    a.loss[row] = y == IGNORED ? 0.0f : (max - (float)logits[y]) + logf(sum);
}

/* Rung 3: a state that merges. lk_ce_row is rung 2's maximum and sum, with what the options need. States of parts of a
 * vocabulary merge into the state of the whole, and it does not matter what computed them: a lane each, as from rung 5 on, or a
 * GPU each. Here one thread takes two halves, one after the other. */
template <class T> __global__ void rung_3_kernel(rung_args<T> a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.rows) return;
    const T *logits = a.logits + (int64_t)row * a.vocab;
    const int64_t y = a.target[row];
    lk_ce_row half[2];
    for (int i = 0; i < 2; i++) {
        half[i] = lk_ce_row_empty();
        for (int col = i * (a.vocab / 2); col < (i ? a.vocab : a.vocab / 2); col++) {
            const float logit = (float)logits[col];
            half[i] = lk_ce_row_add(half[i], {logit}, {1.0f}, 1.0f); /* its class weight; the scale */
            if (col == y) half[i].target = logit;
        }
    }
    const lk_ce_options options = {1.0f, 0.0f, 0.0f, 1.0f, a.vocab}; /* scale, label_smoothing, z_loss, weight, vocab */
    const lk_ce_result result = lk_ce_row_finish(lk_ce_row_merge(half[0], half[1], 1.0f), options);
    a.loss[row] = y == IGNORED ? 0.0f : result.class_loss;
}

/* Rung 4: the gradient in the same kernel. Backward usually comes after all of the forward. But the loss is a model's last
 * step, so its gradient can be computed at once, while the row's sum is known. The target is left out of the first sum: the sum
 * of the others' p is minus its gradient, where p[y] - 1 would have no digits left once p[y] is nearly 1. lk_lse, of
 * lk_row.cuh, is rung 2's maximum and sum alone. The logits are read twice; rung 7 reads them once. */
struct rung_sums {
    float max, sum, others, loss; /* others: the part of the sum that is not the target's */
};
LK_DEVICE rung_sums rung_4_sums(lk_lse others, float target_logit, bool ignored)
{
    const lk_lse all = ignored ? others : lk_lse_add(others, {target_logit});
    const float part = others.max == -INFINITY ? 0.0f : others.sum * expf(others.max - all.max) / all.sum;
    return {all.max, all.sum, part, ignored ? 0.0f : (all.max - target_logit) + logf(all.sum)};
}
template <class T> __global__ void rung_4_kernel(rung_args<T> a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.rows) return;
    const T *logits = a.logits + (int64_t)row * a.vocab;
    const int64_t y = a.target[row];
    lk_lse others = lk_lse_empty();
    for (int col = 0; col < a.vocab; col++)
        if (col != y) others = lk_lse_add(others, {(float)logits[col]});
    const rung_sums sums = rung_4_sums(others, y == IGNORED ? 0.0f : (float)logits[y], y == IGNORED);
    a.loss[row] = sums.loss;
    for (int col = 0; a.dlogits && col < a.vocab; col++) {
        const float gradient = col == y ? -sums.others : expf((float)logits[col] - sums.max) / sums.sum;
        lk_put(a.dlogits + (int64_t)row * a.vocab + col, y == IGNORED ? 0.0f : gradient);
    }
}

/* Rung 5: a warp per row. In the rungs above neighbouring threads read neighbouring rows, so one load of a warp touches 32
 * places of memory. Here its lanes read neighbouring columns: consecutive bytes, which memory delivers at once. lk_lse_warp
 * merges the states of the lanes. Each load is of one logit; rung 6 widens it. */
template <class T> __global__ void rung_5_kernel(rung_args<T> a)
{
    const int row = blockIdx.x, lane = threadIdx.x;
    const T *logits = a.logits + (int64_t)row * a.vocab;
    const int64_t y = a.target[row];
    lk_lse s = lk_lse_empty();
    for (int col = lane; col < a.vocab; col += 32) s = lk_lse_add(s, {(float)logits[col]});
    s = lk_lse_warp(s);
    if (lane == 0) a.loss[row] = y == IGNORED ? 0.0f : (s.max - (float)logits[y]) + logf(s.sum);
}

/* Rung 6: 16 bytes per load. A lane asks for four floats or eight bf16 with one instruction, so more bytes are on their way at
 * a time. Such a load must begin at a multiple of 16 bytes, and a row need not. So the row is cut into groups at these
 * multiples. The first and the last group may be partly outside of the row: their logits are loaded one by one, and -inf, which
 * adds nothing, stands for what is outside. The gradient would read the row again; rung 7 keeps it. */
template <class T> LK_DEVICE int rung_6_groups(const T *row, int vocab)
{
    return ((int)((uintptr_t)row % 16 / sizeof(T)) + vocab + LK_VEC<T> - 1) / LK_VEC<T>;
}
template <class T> LK_DEVICE int rung_6_first(const T *row, int group) /* its first column; of group 0 it may be negative */
{
    return group * LK_VEC<T> - (int)((uintptr_t)row % 16 / sizeof(T));
}
template <class T> LK_DEVICE lk_vec<T> rung_6_load(const T *row, int vocab, int group)
{
    const int first = rung_6_first(row, group);
    if (first >= 0 && first + LK_VEC<T> <= vocab) return lk_load_vec(row + first);
    float x[LK_VEC<T>];
    for (int j = 0; j < LK_VEC<T>; j++) x[j] = first + j >= 0 && first + j < vocab ? (float)row[first + j] : -INFINITY;
    lk_vec<T> v;
    lk_pack(&v, x);
    return v;
}
template <class T> __global__ void rung_6_kernel(rung_args<T> a)
{
    const int row = blockIdx.x, lane = threadIdx.x;
    const T *logits = a.logits + (int64_t)row * a.vocab;
    const int64_t y = a.target[row];
    lk_lse s = lk_lse_empty();
    for (int group = lane; group < rung_6_groups(logits, a.vocab); group += 32) {
        float x[LK_VEC<T>];
        lk_unpack(x, rung_6_load(logits, a.vocab, group));
        s = lk_lse_add(s, x);
    }
    s = lk_lse_warp(s);
    if (lane == 0) a.loss[row] = y == IGNORED ? 0.0f : (s.max - (float)logits[y]) + logf(s.sum);
}

/* Rung 7: a block per row, and the row in shared memory. A long row has more columns than a warp should wait for, and rung 4
 * needs them twice: for the sum, then for the gradient. A thread cannot hold 32768 logits, but a block of an H100 has 227 KiB.
 * So global memory is read once and written once. The states of the warps are merged by way of `of_warp`, behind a barrier.
 * That reduction is written by hand; rung 8 takes it from CUB. */
#define RUNG_7_THREADS 512
struct alignas(16) rung_7_shared { /* and behind it the groups of the row */
    lk_lse of_warp[RUNG_7_THREADS / 32];
};
/* Adds a group to the state, without the target: rung 4 says why. */
template <class T> LK_DEVICE lk_lse rung_7_add(lk_lse s, lk_vec<T> v, int first, int64_t y)
{
    float x[LK_VEC<T>];
    lk_unpack(x, v);
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++) x[j] = first + j == y ? -INFINITY : x[j];
    return lk_lse_add(s, x);
}
/* Writes the gradient of a group. The rows of dlogits begin at the same bytes of 16 as those of logits. */
template <class T> LK_DEVICE void rung_7_put(T *row, int vocab, lk_vec<T> v, int first, int64_t y, rung_sums sums)
{
    float x[LK_VEC<T>];
    lk_unpack(x, v);
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++) {
        x[j] = first + j == y ? -sums.others : expf(x[j] - sums.max) / sums.sum;
        if (y == IGNORED) x[j] = 0.0f;
    }
    lk_pack(&v, x);
    if (first >= 0 && first + LK_VEC<T> <= vocab) {
        lk_store_vec(row + first, v);
        return;
    }
    for (int j = 0; j < LK_VEC<T>; j++)
        if (first + j >= 0 && first + j < vocab) lk_put(row + first + j, x[j]);
}
template <class T> __global__ void __launch_bounds__(RUNG_7_THREADS) rung_7_kernel(rung_args<T> a)
{
    LK_DYN_SMEM(rung_7_shared, shared); /* the bytes that the launch asked for; lk_base.cuh has the CUDA spelling */
    lk_vec<T> *const kept = (lk_vec<T> *)(&shared + 1);
    const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T *logits = a.logits + (int64_t)row * a.vocab;
    const int64_t y = a.target[row];
    const int groups = rung_6_groups(logits, a.vocab);
    lk_lse s = lk_lse_empty();
    for (int group = threadIdx.x; group < groups; group += RUNG_7_THREADS) {
        kept[group] = rung_6_load(logits, a.vocab, group);
        s = rung_7_add(s, kept[group], rung_6_first(logits, group), y);
    }
    s = lk_lse_warp(s);
    if (lane == 0) shared.of_warp[warp] = s;
    __syncthreads(); /* all warps' states are written */
    lk_lse others = shared.of_warp[0];
    for (int i = 1; i < RUNG_7_THREADS / 32; i++) others = lk_lse_merge(others, shared.of_warp[i]);
    const rung_sums sums = rung_4_sums(others, y == IGNORED ? 0.0f : (float)logits[y], y == IGNORED);
    if (threadIdx.x == 0) a.loss[row] = sums.loss;
    if (!a.dlogits) return;
    T *const dlogits = a.dlogits + (int64_t)row * a.vocab;
    for (int group = threadIdx.x; group < groups; group += RUNG_7_THREADS) /* each thread reads what it wrote itself */
        rung_7_put(dlogits, a.vocab, kept[group], rung_6_first(logits, group), y, sums);
}

/* Rung 8: CUB's reduction. cub::BlockReduce merges the values of a block's threads, of any type and by any function. It has
 * three rules: all threads call it, only thread 0 has the result, and a barrier stands before its memory is used again. The
 * rest is rung 7. The row must fit into one block's shared memory; rung 9 uses several. */
struct rung_8_merge {
    __device__ lk_lse operator()(lk_lse a, lk_lse b) const { return lk_lse_merge(a, b); }
};
typedef cub::BlockReduce<lk_lse, RUNG_7_THREADS> rung_8_reduce;
struct alignas(16) rung_8_shared { /* and behind it the groups of the row */
    rung_8_reduce::TempStorage reduce;
    lk_lse others;
};
template <class T> __global__ void __launch_bounds__(RUNG_7_THREADS) rung_8_kernel(rung_args<T> a)
{
    LK_DYN_SMEM(rung_8_shared, shared);
    lk_vec<T> *const kept = (lk_vec<T> *)(&shared + 1);
    const int row = blockIdx.x;
    const T *logits = a.logits + (int64_t)row * a.vocab;
    const int64_t y = a.target[row];
    const int groups = rung_6_groups(logits, a.vocab);
    lk_lse s = lk_lse_empty();
    for (int group = threadIdx.x; group < groups; group += RUNG_7_THREADS) {
        kept[group] = rung_6_load(logits, a.vocab, group);
        s = rung_7_add(s, kept[group], rung_6_first(logits, group), y);
    }
    s = rung_8_reduce(shared.reduce).Reduce(s, rung_8_merge());
    if (threadIdx.x == 0) shared.others = s;
    __syncthreads(); /* thread 0's result is written */
    const rung_sums sums = rung_4_sums(shared.others, y == IGNORED ? 0.0f : (float)logits[y], y == IGNORED);
    if (threadIdx.x == 0) a.loss[row] = sums.loss;
    if (!a.dlogits) return;
    T *const dlogits = a.dlogits + (int64_t)row * a.vocab;
    for (int group = threadIdx.x; group < groups; group += RUNG_7_THREADS)
        rung_7_put(dlogits, a.vocab, kept[group], rung_6_first(logits, group), y, sums);
}

/* Rung 9: a cluster per row. 128256 logits in f32 are 501 KiB, more than a block can hold; four can. Blocks of a cluster run at
 * the same time and can write into each other's shared memory: each keeps its part of the groups, and each warp puts its state
 * into every block. All blocks then merge the same states in the same order. Clusters need sm_90. lk chooses lanes, a block or
 * a cluster by the row's length, and keeps several loads on their way per thread. */
#define RUNG_9_BLOCKS 2
#define RUNG_9_WARPS 8
struct alignas(16) rung_9_shared { /* and behind it this block's groups */
    lk_lse of_warp[RUNG_9_BLOCKS * RUNG_9_WARPS];
};
template <class T> __global__ void __launch_bounds__(RUNG_9_WARPS * 32) rung_9_kernel(rung_args<T> a)
{
    LK_DYN_SMEM(rung_9_shared, shared);
    lk_vec<T> *const kept = (lk_vec<T> *)(&shared + 1);
    const int rank = (int)lk_cluster_ctarank(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x / RUNG_9_BLOCKS;
    const T *logits = a.logits + (int64_t)row * a.vocab;
    const int64_t y = a.target[row];
    const float target_logit = y == IGNORED ? 0.0f : (float)logits[y];
    const int groups = rung_6_groups(logits, a.vocab), part = (groups + RUNG_9_BLOCKS - 1) / RUNG_9_BLOCKS;
    const int begin = rank * part, end = begin + part < groups ? begin + part : groups;
    lk_cluster_begin();
    lk_lse s = lk_lse_empty();
    for (int group = begin + threadIdx.x; group < end; group += RUNG_9_WARPS * 32) {
        kept[group - begin] = rung_6_load(logits, a.vocab, group);
        s = rung_7_add(s, kept[group - begin], rung_6_first(logits, group), y);
    }
    s = lk_lse_warp(s);
    lk_cluster_ready(); /* all blocks have begun, so their shared memory can be written */
    if (lane < RUNG_9_BLOCKS) ((rung_9_shared *)lk_mapa(&shared, lane))->of_warp[rank * RUNG_9_WARPS + warp] = s;
    lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait(); /* all states are in all blocks */
    lk_lse others = shared.of_warp[0];
    for (int i = 1; i < RUNG_9_BLOCKS * RUNG_9_WARPS; i++) others = lk_lse_merge(others, shared.of_warp[i]);
    const rung_sums sums = rung_4_sums(others, target_logit, y == IGNORED);
    if (rank == 0 && threadIdx.x == 0) a.loss[row] = sums.loss;
    if (!a.dlogits) return;
    T *const dlogits = a.dlogits + (int64_t)row * a.vocab;
    for (int group = begin + threadIdx.x; group < end; group += RUNG_9_WARPS * 32)
        rung_7_put(dlogits, a.vocab, kept[group - begin], rung_6_first(logits, group), y, sums);
}

/* ---- The launches -------------------------------------------------------------------------------------------------------- */

#define RUNGS 9
static const char *const ideas[RUNGS + 1] = {
    "the formula: a thread per row", "a running maximum and sum", "a state that merges", "the gradient in the same kernel",
    "a warp per row", "16 bytes per load", "a block per row: shared memory", "CUB's reduction of a block",
    "a cluster of blocks per row", "lk's own op"};

static bool has_gradient(int rung)
{
    return rung == 4 || rung >= 7;
}

/* Why a rung cannot run here; NULL where it can. */
template <class T> static const char *cannot(int rung, int vocab)
{
    lk_device device; /* its architecture is the one of the code: older code has no clusters on a newer GPU either */
    check("device", lk_current_device(&device));
    const int64_t bytes = ((int64_t)vocab / LK_VEC<T> + 2) * 16 / (rung == 9 ? RUNG_9_BLOCKS : 1) + 2048;
    if (rung == 9 && device.arch < 90) return "skipped: it needs code for sm_90 or later";
    return rung >= 7 && rung <= 9 && bytes > (int64_t)(device.smem - 1) * 1024 ? "skipped: the row is too long" : NULL;
}

template <class T> static lk_status launch_rung(int rung, const rung_args<T> &a)
{
    const size_t groups = (size_t)a.vocab / LK_VEC<T> + 2, row_bytes = groups * 16; /* the most that any alignment needs */
    const int few = 32, blocks = (int)lk_ceil_div(a.rows, few);
    if (rung == 1) return lk_launch(rung_1_kernel<T>, blocks, few, 0, NULL, a);
    if (rung == 2) return lk_launch(rung_2_kernel<T>, blocks, few, 0, NULL, a);
    if (rung == 3) return lk_launch(rung_3_kernel<T>, blocks, few, 0, NULL, a);
    if (rung == 4) return lk_launch(rung_4_kernel<T>, blocks, few, 0, NULL, a);
    if (rung == 5) return lk_launch(rung_5_kernel<T>, a.rows, 32, 0, NULL, a);
    if (rung == 6) return lk_launch(rung_6_kernel<T>, a.rows, 32, 0, NULL, a);
    if (rung == 7) /* lk_launch_blocks allows a kernel more than 48 KiB of shared memory, and has clusters */
        return lk_launch_blocks("rung 7", false, rung_7_kernel<T>, a.rows, 1, RUNG_7_THREADS, sizeof(rung_7_shared) + row_bytes,
                                NULL, a);
    if (rung == 8)
        return lk_launch_blocks("rung 8", false, rung_8_kernel<T>, a.rows, 1, RUNG_7_THREADS, sizeof(rung_8_shared) + row_bytes,
                                NULL, a);
    return lk_launch_blocks("rung 9", false, rung_9_kernel<T>, (int64_t)a.rows * RUNG_9_BLOCKS, RUNG_9_BLOCKS,
                            RUNG_9_WARPS * 32, sizeof(rung_9_shared) + (groups / RUNG_9_BLOCKS + 1) * 16, NULL, a);
}

/* ---- All rungs at any size ----------------------------------------------------------------------------------------------- */

typedef struct {
    int rung;
    rung_args<lk_bf16> a;
} climb_call;

static lk_status climb_launch(const void *call)
{
    const int rung = ((const climb_call *)call)->rung;
    const rung_args<lk_bf16> a = ((const climb_call *)call)->a;
    if (rung <= RUNGS) return launch_rung(rung, a);
    lk_cross_entropy_args args = {};
    args.logits = a.logits, args.target = a.target, args.loss = a.loss, args.dlogits = a.dlogits;
    args.rows = a.rows, args.vocab = a.vocab, args.use_ignore_index = 1, args.ignore_index = IGNORED;
    return a.dlogits ? lk_cross_entropy_forward_backward_bf16(&args, NULL) : lk_cross_entropy_forward_bf16(&args, NULL);
}

/* Compares some rows with the formula in double. p is off by 2^-8 of itself at most, once rounded to bf16. */
static void climb_check(const rung_args<lk_bf16> &a, const int64_t *target, char *why, size_t why_bytes)
{
    const size_t bytes = (size_t)a.vocab * sizeof(lk_bf16);
    lk_bf16 *logits = (lk_bf16 *)malloc(bytes), *dlogits = (lk_bf16 *)malloc(bytes);
    for (int k = 0; k < ladder_checked(a.rows) && !why[0]; k++) {
        const int row = ladder_checked_row(a.rows, k);
        const int64_t y = target[row];
        float loss;
        double sum = 0;
        check("check", cudaMemcpy(&loss, a.loss + row, sizeof loss, cudaMemcpyDeviceToHost));
        check("check", cudaMemcpy(logits, a.logits + (int64_t)row * a.vocab, bytes, cudaMemcpyDeviceToHost));
        for (int col = 0; col < a.vocab; col++) sum += exp((double)(float)logits[col]);
        const double logit = y == IGNORED ? 0 : (float)logits[y], right = y == IGNORED ? 0 : log(sum) - logit;
        if (!(fabs(loss - right) <= ladder_limit(a.vocab, fabs(log(sum)) + fabs(logit))))
            snprintf(why, why_bytes, "WRONG: loss[%d] is %.9g, not %.9g", row, (double)loss, right);
        if (!a.dlogits) continue;
        check("check", cudaMemcpy(dlogits, a.dlogits + (int64_t)row * a.vocab, bytes, cudaMemcpyDeviceToHost));
        for (int col = 0; col < a.vocab && !why[0]; col++) {
            const double p = exp((double)(float)logits[col]) / sum, gradient = y == IGNORED ? 0 : col == y ? p - 1 : p;
            if (!(fabs((float)dlogits[col] - gradient) <= 0x1p-8 * fabs(gradient)))
                snprintf(why, why_bytes, "WRONG: dlogits[%d,%d] is %.9g, not %.9g", row, col, (double)(float)dlogits[col],
                         gradient);
        }
    }
    free(logits), free(dlogits);
}

static void climb(int rows, int vocab)
{
    const size_t bytes = (size_t)rows * (size_t)vocab * sizeof(lk_bf16);
    int64_t *const target = (int64_t *)malloc((size_t)rows * sizeof(int64_t));
    climb_call call = {};
    call.a.logits = ladder_normal((int64_t)rows * vocab, 1, 1.5f);
    call.a.target = ladder_targets(target, rows, vocab);
    call.a.loss = (float *)memory_of(NULL, (size_t)rows * sizeof(float)), call.a.rows = rows, call.a.vocab = vocab;
    lk_bf16 *const dlogits = (lk_bf16 *)memory_of(NULL, bytes);
    char shape[64];
    snprintf(shape, sizeof shape, "rows=%d vocab=%d", rows, vocab);
    for (int backward = 0; backward < 2; backward++)
        for (call.rung = 1; call.rung <= RUNGS + 1; call.rung++) {
            if (backward && !has_gradient(call.rung)) continue;
            call.a.dlogits = backward ? dlogits : NULL;
            char number[8], why[128] = "";
            snprintf(number, sizeof number, "%d", call.rung);
            const ladder_line line = {"cross_entropy", backward ? "forward_backward" : "forward", shape,
                                      call.rung > RUNGS ? "lk" : number, ideas[call.rung - 1],
                                      (double)bytes * (1 + backward), 0, 0};
            const char *reason = cannot<lk_bf16>(call.rung, vocab);
            if (reason) {
                ladder_report(&line, reason, 0);
                continue;
            }
            check(number, cudaMemset(dlogits, 0xff, bytes)); /* NaN: what is checked has been written */
            check(number, cudaMemset(call.a.loss, 0xff, (size_t)rows * sizeof(float)));
            check(number, climb_launch(&call));
            check(number, cudaDeviceSynchronize());
            climb_check(call.a, target, why, sizeof why);
            failures += why[0] != 0;
            ladder_report(&line, why, why[0] ? 0 : ladder_ms(climb_launch, &call));
        }
    free(target), cudaFree((void *)call.a.logits), cudaFree((void *)call.a.target), cudaFree(call.a.loss), cudaFree(dlogits);
}

/* ---- The four rows of 8 -------------------------------------------------------------------------------------------------- */

#define ROWS 4
#define VOCAB 8

/* Prints `count` values on the device times `factor` and compares them with the comment above. */
static void show(const char *name, const float *device, int count, const float *expected, float factor, float limit = 1e-6f)
{
    float host[VOCAB];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(host, device, (size_t)count * sizeof host[0], cudaMemcpyDeviceToHost));
    printf("%-42s", name);
    for (int i = 0; i < count; i++) {
        const float value = host[i] * factor;
        printf(count > ROWS ? " %9.5f" : " %12.6f", (double)value);
        failures += value != expected[i] && !(fabsf(value - expected[i]) <= limit * fabsf(expected[i]));
    }
    printf("\n");
}

static const float loss_right[ROWS] = {1.791759f, 2.079442f, 0.693147f, 0};
static const float lse_right[ROWS] = {3.583519f, 1002.079442f, 2.079442f, 0};
static const float overflow_right[ROWS] = {1.791759f, INFINITY, 0.693147f, 0};
static const float gradient_right[ROWS][VOCAB] = {
    {1, 2, 3, 4, 5, -30, 7, 8}, {1, 1, 1, -7, 1, 1, 1, 1}, {1, 1, 2, -4, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0}};

/* Shows each row of a gradient times its factor. */
static void show_gradient(const char *name, const float *dlogits, const float *factors, const float *limits)
{
    for (int row = 0; row < ROWS; row++) {
        char line[64];
        snprintf(line, sizeof line, "%s in row %d, times %g", name, row, (double)factors[row]);
        show(line, dlogits + row * VOCAB, VOCAB, gradient_right[row], factors[row], limits[row]);
    }
}

static void four_rows(void)
{
    const int64_t target_host[ROWS] = {5, 3, 3, IGNORED};
    const float row_2[VOCAB] = {logf(1), logf(1), logf(2), logf(4), -INFINITY, -INFINITY, -INFINITY, -INFINITY};
    float logits_host[ROWS][VOCAB];
    for (int col = 0; col < VOCAB; col++) {
        logits_host[0][col] = logf((float)(col + 1));
        logits_host[1][col] = 1000.0f;
        logits_host[2][col] = row_2[col];
        logits_host[3][col] = NAN;
    }
    const float *logits = (const float *)memory_of(logits_host, sizeof logits_host);
    const int64_t *target = (const int64_t *)memory_of(target_host, sizeof target_host);
    float *loss = (float *)memory_of(NULL, ROWS * sizeof(float)), *lse = (float *)memory_of(NULL, ROWS * sizeof(float));
    float *dlogits = (float *)memory_of(NULL, sizeof logits_host), *mean = (float *)memory_of(NULL, sizeof(float));
    float *lse_low = (float *)memory_of(NULL, ROWS * sizeof(float));
    int64_t *valid_rows = (int64_t *)memory_of(NULL, sizeof(int64_t));
    const rung_args<float> args = {logits, target, loss, dlogits, ROWS, VOCAB};
    const float factors[ROWS] = {36, 8, 8, 1};
    const float exact[ROWS] = {1e-6f, 1e-6f, 1e-6f, 0}, from_lse[ROWS] = {1e-6f, 6e-5f, 1e-6f, 0};
    /* For rung 6, rows that begin 4 bytes past a multiple of 16. */
    float *shifted = (float *)memory_of(NULL, sizeof logits_host + sizeof(float));
    check("rung 6", cudaMemcpy(shifted + 1, logits_host, sizeof logits_host, cudaMemcpyHostToDevice));

    printf("%-42s %12s %12s %12s %12s\n", "", "row 0", "row 1", "row 2", "row 3");
    for (int rung = 1; rung <= RUNGS; rung++) {
        char name[64];
        rung_args<float> a = args;
        if (rung == 6) a.logits = shifted + 1;
        snprintf(name, sizeof name, "rung %d: %s", rung, ideas[rung - 1]);
        if (const char *reason = cannot<float>(rung, VOCAB)) {
            printf("%s: %s\n", name, reason);
            continue;
        }
        check(name, cudaMemset(loss, 0xff, ROWS * sizeof(float))); /* NaN: what is shown next has been written */
        check(name, cudaMemset(dlogits, 0xff, sizeof logits_host));
        check(name, launch_rung(rung, a));
        show(name, loss, ROWS, rung == 1 ? overflow_right : loss_right, 1);
        if (has_gradient(rung)) show_gradient("  its gradient", dlogits, factors, exact);
    }

    lk_cross_entropy_args call = {};
    call.logits = logits, call.target = target, call.loss = loss, call.lse = lse, call.lse_low = lse_low;
    call.rows = ROWS, call.vocab = VOCAB;
    call.use_ignore_index = 1, call.ignore_index = IGNORED;
    check("lk", lk_cross_entropy_forward_f32(&call, NULL));
    show("lk: loss", loss, ROWS, loss_right, 1);
    show("lk: lse", lse, ROWS, lse_right, 1);

    call.dlogits = dlogits; /* backward reads forward's lse; upstream stays NULL: 1, the gradient of the sum of losses */
    call.lse_low = NULL;
    check("lk", lk_cross_entropy_backward_f32(&call, NULL));
    show_gradient("lk: its gradient", dlogits, factors, from_lse);
    call.lse_low = lse_low;
    check("lk", lk_cross_entropy_backward_f32(&call, NULL));
    show_gradient("lk: with lse_low", dlogits, factors, exact);

    check("lk", cudaMemset(dlogits, 0xff, sizeof logits_host)); /* NaN: what is shown next has been written */
    check("lk", lk_cross_entropy_forward_backward_f32(&call, NULL));
    show("lk, one pass: loss", loss, ROWS, loss_right, 1);
    show_gradient("lk, one pass: gradient", dlogits, factors, exact);

    /* The mean over the rows that count needs scratch, which is the caller's; backward reads their number on the device. */
    call.reduction = LK_REDUCTION_MEAN, call.loss = mean, call.valid_rows = valid_rows;
    check("lk", lk_cross_entropy_forward_workspace_bytes_f32(&call, &call.workspace_bytes));
    call.workspace = memory_of(NULL, call.workspace_bytes);
    check("lk", lk_cross_entropy_forward_f32(&call, NULL));
    const float mean_right[1] = {1.521449f};
    show("lk: mean", mean, 1, mean_right, 1);
    check("lk", lk_cross_entropy_backward_f32(&call, NULL));
    show("lk: its gradient in row 0, times 3 * 36", dlogits, VOCAB, gradient_right[0], 3 * 36);
    show("lk: its gradient in row 3", dlogits + 3 * VOCAB, VOCAB, gradient_right[3], 1);

    call.label_smoothing = 2; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_cross_entropy_forward_f32(&call, NULL);
    printf("label_smoothing = 2: %s, %s\n", lk_status_string(status), lk_last_error());
    failures += status != LK_ERR_VALUE;

    cudaFree((void *)logits), cudaFree((void *)target), cudaFree(loss), cudaFree(lse), cudaFree(lse_low), cudaFree(dlogits);
    cudaFree(mean), cudaFree(valid_rows), cudaFree(shifted), cudaFree(call.workspace);
}

int main(int argc, char **argv)
{
    const int rows = argc == 3 ? ladder_size(argv[1], 1 << 24) : 5, vocab = argc == 3 ? ladder_size(argv[2], 1 << 24) : 1003;
    if ((argc != 1 && argc != 3) || !rows || !vocab) {
        printf("usage: %s [ROWS VOCAB]\n", argv[0]);
        return 2;
    }
    cudaDeviceProp device = {};
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("cross_entropy on: %s\n", device.name);
    if (argc == 1) four_rows();
    climb(rows, vocab);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
