// SPDX-License-Identifier: MIT
/* cross_entropy in eight rungs, one idea a rung. Each computes loss[r] = log sum_j exp(logits[r,j]) - logits[r,target[r]] of
 * the same four rows of 8:
 *
 *   row 0   log 1, log 2, ..., log 8; target 5          the exponentials are 1 to 8, of 36:   loss = log 36/6 = 1.791759
 *   row 1   1000, eight times; target 3                 exp(1000) is no float, 8 equal terms: loss = log 8    = 2.079442
 *   row 2   log 1, log 1, log 2, log 4, -inf; target 3  exp(-inf) is 0, so 4 of 8:            loss = log 8/4  = 0.693147
 *   row 3   NaN, eight times; target -100               ignored, whatever it holds:           loss = 0
 *
 * The fourth adds the gradient, as do the last two and lk, which has forward, backward and forward_backward. The first four
 * are about the formula, and a thread has a whole row. The other four are about the GPU: who reads what, and where it is kept.
 *
 *   gradient    p[j] is an exponential over its row's sum, and 1 less at the target:
 *               row 0   times 36:   1  2  3  4  5 -30  7  8
 *               row 1   times 8:    1  1  1 -7  1  1  1  1      backward, which is given lse, is off by what 1002.079442 loses
 *               row 2   times 8:    1  1  2 -4  0  0  0  0      as a float: 6e-5. Given lse_low too, which is that loss, it is
 *               row 3               0  0  0  0  0  0  0  0      right; and so is who still has the sum
 *   mean        three rows count:   (log 6 + log 8 + log 2) / 3 = log(96) / 3 = 1.521449, and a third of these gradients
 *
 *   make example-cross_entropy                            on a GPU, or on the CPU where there is none
 *   make BACKEND=cpu SAN=asan example-cross_entropy       on the CPU, with symbols; then
 *   gdb build/cpu-asan/examples/cross_entropy             and: break rung_2_kernel, run, next
 *
 * lk_launch(kernel, grid, block, smem, stream, args) is CUDA's launch in triple angle brackets, spelt so that it also runs on
 * the CPU.
 */
#include <math.h>
#include <stdio.h>

#include "lk/cross_entropy.cuh"

LK_DEFINE_CROSS_ENTROPY(f32)

#define ROWS 4
#define VOCAB 8
#define IGNORED (-100)

typedef struct {
    const float *logits;   /* [ROWS, VOCAB] */
    const int64_t *target; /* [ROWS] */
    float *loss;           /* [ROWS] */
    float *dlogits;        /* [ROWS, VOCAB]; rungs 4, 7 and 8 */
} rung_args;

/* Rung 1: the formula, one thread a row. Right on paper; in float, exp overflows above 88 (row 1 becomes inf). */
__global__ void rung_1_kernel(rung_args a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= ROWS) return;
    const float *logits = a.logits + row * VOCAB;
    const int64_t y = a.target[row];
    float sum = 0.0f;
    for (int col = 0; col < VOCAB; col++) sum += expf(logits[col]);
    a.loss[row] = y == IGNORED ? 0.0f : logf(sum) - logits[y];
}

/* Rung 2: the online sum. Keep the largest logit so far and the sum of exponentials against it; when the largest grows, rescale
 * the sum. The loss is put together as (max - logits[y]) + log sum: a difference of two logits is exact, while max + log sum
 * would round 1002.079442 to a float before 1000 is taken off, which costs three digits. */
__global__ void rung_2_kernel(rung_args a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= ROWS) return;
    const float *logits = a.logits + row * VOCAB;
    const int64_t y = a.target[row];
    float max = -INFINITY, sum = 0.0f;
    for (int col = 0; col < VOCAB; col++) {
        if (logits[col] == -INFINITY) continue; /* adds nothing, and -inf - -inf would be NaN */
        const float larger = fmaxf(max, logits[col]);
        sum = sum * expf(max - larger) + expf(logits[col] - larger);
        max = larger;
    }
    a.loss[row] = y == IGNORED ? 0.0f : (max - logits[y]) + logf(sum);
}

/* Rung 3: lk_ce_row is that state, with what the options need. States of slices of a vocabulary merge into the state of the
 * whole, whoever computed them: a lane each, as in lk's kernels, or a GPU each. Here one thread takes two halves in turn. */
__global__ void rung_3_kernel(rung_args a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= ROWS) return;
    const int64_t y = a.target[row];
    const float ones[VOCAB / 2] = {1, 1, 1, 1}; /* class weights */
    lk_ce_row half[2];
    for (int i = 0; i < 2; i++) {
        const float *logits = a.logits + row * VOCAB + i * VOCAB / 2;
        const float four[VOCAB / 2] = {logits[0], logits[1], logits[2], logits[3]};
        half[i] = lk_ce_row_add(lk_ce_row_empty(), four, ones, 1.0f);
        if (y >= i * VOCAB / 2 && y < (i + 1) * VOCAB / 2) half[i].target = four[y - i * VOCAB / 2];
    }
    const lk_ce_options options = {1.0f, 0.0f, 0.0f, 1.0f, VOCAB}; /* scale, label_smoothing, z_loss, weight, vocab */
    const lk_ce_result result = lk_ce_row_finish(lk_ce_row_merge(half[0], half[1], 1.0f), options);
    a.loss[row] = y == IGNORED ? 0.0f : result.class_loss;
}

/* Rung 4: the gradient in the same pass. Backward reads the logits again, since it usually comes after all of the forward. But
 * the loss is a model's last step, so its gradient can be made at once, from logits that are still at hand: here in `held`, in
 * lk in shared memory. One read and one write do what took two reads and a write. The target is left out of the first sum: the
 * sum of the others' p is minus its gradient, where p[y] - 1 would have no digits left once p[y] is all but 1. */
__global__ void rung_4_kernel(rung_args a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= ROWS) return;
    const int64_t y = a.target[row];
    float held[VOCAB], max = -INFINITY, others = 0.0f;
    for (int col = 0; col < VOCAB; col++) {
        held[col] = y == IGNORED ? 0.0f : a.logits[row * VOCAB + col];
        max = fmaxf(max, held[col]);
    }
    for (int col = 0; col < VOCAB; col++)
        if (col != y) others += expf(held[col] - max);
    const float sum = others + (y == IGNORED ? 0.0f : expf(held[y] - max));
    for (int col = 0; col < VOCAB; col++) {
        const float gradient = col == y ? -others / sum : expf(held[col] - max) / sum;
        a.dlogits[row * VOCAB + col] = y == IGNORED ? 0.0f : gradient;
    }
    a.loss[row] = y == IGNORED ? 0.0f : (max - held[y]) + logf(sum);
}

/* Rung 5: a warp per row. In the rungs above neighbouring threads read neighbouring rows, so one load of a warp touches 32
 * places of memory. Here its lanes read neighbouring columns: 128 consecutive bytes, which memory delivers at once. lk_lse is
 * rung 2's running maximum and sum, of lk_row.cuh; lk_lse_warp merges those of the lanes. */
__global__ void rung_5_kernel(rung_args a)
{
    const int row = blockIdx.x, lane = threadIdx.x;
    const float *logits = a.logits + row * VOCAB;
    const int64_t y = a.target[row];
    lk_lse s = lk_lse_empty();
    for (int col = lane; col < VOCAB; col += 32) s = lk_lse_add(s, {logits[col]});
    s = lk_lse_warp(s);
    if (lane == 0) a.loss[row] = y == IGNORED ? 0.0f : (s.max - logits[y]) + logf(s.sum);
}

/* Rung 6: 16 bytes per load. A lane asks for four logits with one instruction, so more bytes are on their way at a time. Such
 * a load must begin at a multiple of 16 bytes, and a row need not. So the row has three parts: a head of up to three logits,
 * the vectors, a tail of up to three. Lanes take the edges one logit each. */
__global__ void rung_6_kernel(rung_args a)
{
    const int row = blockIdx.x, lane = threadIdx.x;
    const float *logits = a.logits + row * VOCAB;
    const int64_t y = a.target[row];
    const int to_boundary = (int)((16 - (uintptr_t)logits % 16) % 16 / sizeof(float));
    const int head = to_boundary < VOCAB ? to_boundary : VOCAB, vectors = (VOCAB - head) / 4, tail = head + vectors * 4;
    const float4 *vector = (const float4 *)(logits + head);
    lk_lse s = lk_lse_empty();
    if (lane < head) s = lk_lse_add(s, {logits[lane]});
    for (int i = lane; i < vectors; i += 32) {
        const float4 v = vector[i];
        s = lk_lse_add(s, {v.x, v.y, v.z, v.w});
    }
    if (tail + lane < VOCAB) s = lk_lse_add(s, {logits[tail + lane]});
    s = lk_lse_warp(s);
    if (lane == 0) a.loss[row] = y == IGNORED ? 0.0f : (s.max - logits[y]) + logf(s.sum);
}

/* Rung 7: a block per row, and the row in shared memory. A long row has more columns than a warp should wait for, and rung 4
 * wants them twice: for the sum, then for the gradient. A thread cannot hold 32768 logits, but a block of an H100 has 227 KiB.
 * So global memory is read once and written once. The sums of warps meet in `of_warp`, behind a barrier. */
#define RUNG_7_THREADS 64
struct rung_7_shared {
    lk_lse of_warp[RUNG_7_THREADS / 32];
    float logits[VOCAB];
};
__global__ void rung_7_kernel(rung_args a)
{
    LK_DYN_SMEM(rung_7_shared, shared); /* the bytes that the launch asked for; lk_base.cuh has the CUDA spelling */
    const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t y = a.target[row];
    lk_lse s = lk_lse_empty(); /* of every column but the target: rung 4 says why */
    for (int col = threadIdx.x; col < VOCAB; col += RUNG_7_THREADS) {
        const float logit = shared.logits[col] = a.logits[row * VOCAB + col];
        if (col != y) s = lk_lse_add(s, {logit});
    }
    s = lk_lse_warp(s);
    if (lane == 0) shared.of_warp[warp] = s;
    __syncthreads(); /* all logits and all warps' sums are written */
    lk_lse others = shared.of_warp[0];
    for (int i = 1; i < RUNG_7_THREADS / 32; i++) others = lk_lse_merge(others, shared.of_warp[i]);
    const lk_lse all = y == IGNORED ? others : lk_lse_add(others, {shared.logits[y]});
    const float share = others.max == -INFINITY ? 0.0f : others.sum * expf(others.max - all.max) / all.sum;
    for (int col = threadIdx.x; col < VOCAB; col += RUNG_7_THREADS) {
        const float gradient = col == y ? -share : expf(shared.logits[col] - all.max) / all.sum;
        a.dlogits[row * VOCAB + col] = y == IGNORED ? 0.0f : gradient;
    }
    if (threadIdx.x == 0) a.loss[row] = y == IGNORED ? 0.0f : (all.max - shared.logits[y]) + logf(all.sum);
}

/* Rung 8: a cluster per row. 128256 logits in f32 are 501 KiB, more than a block can hold; four can. Blocks of a cluster run at
 * the same time and can write into each other's shared memory: each keeps its part of the columns, and each warp puts its sum
 * into every block. All blocks then merge the same sums in the same order. Clusters need sm_90. */
#define RUNG_8_BLOCKS 2
#define RUNG_8_WARPS 2
struct rung_8_shared {
    lk_lse of_warp[RUNG_8_BLOCKS * RUNG_8_WARPS];
    float logits[VOCAB / RUNG_8_BLOCKS]; /* this block's part */
};
__global__ void rung_8_kernel(rung_args a)
{
    LK_DYN_SMEM(rung_8_shared, shared);
    const int rank = (int)lk_cluster_ctarank(), first = rank * (VOCAB / RUNG_8_BLOCKS);
    const int row = blockIdx.x / RUNG_8_BLOCKS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t y = a.target[row];
    const float own = y == IGNORED ? 0.0f : a.logits[row * VOCAB + y]; /* every block's copy of the target's logit */
    lk_cluster_begin();
    lk_lse s = lk_lse_empty();
    for (int i = threadIdx.x; i < VOCAB / RUNG_8_BLOCKS; i += RUNG_8_WARPS * 32) {
        const float logit = shared.logits[i] = a.logits[row * VOCAB + first + i];
        if (first + i != y) s = lk_lse_add(s, {logit});
    }
    s = lk_lse_warp(s);
    lk_cluster_ready(); /* all blocks have begun, so their shared memory can be written */
    if (lane < RUNG_8_BLOCKS) ((rung_8_shared *)lk_mapa(&shared, lane))->of_warp[rank * RUNG_8_WARPS + warp] = s;
    lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait(); /* all sums are in all blocks */
    lk_lse others = shared.of_warp[0];
    for (int i = 1; i < RUNG_8_BLOCKS * RUNG_8_WARPS; i++) others = lk_lse_merge(others, shared.of_warp[i]);
    const lk_lse all = y == IGNORED ? others : lk_lse_add(others, {own});
    const float share = others.max == -INFINITY ? 0.0f : others.sum * expf(others.max - all.max) / all.sum;
    for (int i = threadIdx.x; i < VOCAB / RUNG_8_BLOCKS; i += RUNG_8_WARPS * 32) { /* each thread reads what it wrote itself */
        const float gradient = first + i == y ? -share : expf(shared.logits[i] - all.max) / all.sum;
        a.dlogits[row * VOCAB + first + i] = y == IGNORED ? 0.0f : gradient;
    }
    if (rank == 0 && threadIdx.x == 0) a.loss[row] = y == IGNORED ? 0.0f : (all.max - own) + logf(all.sum);
}

/* CUDA's calls and lk's return 0 or what went wrong. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Prints `count` values on the device times `factor` and holds them against the comment above. */
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

/* Device memory of `bytes` bytes, a copy of `from` unless that is NULL. */
static void *memory_of(const void *from, size_t bytes)
{
    void *device = NULL;
    check("cudaMalloc", cudaMalloc(&device, bytes));
    if (from) check("cudaMemcpy", cudaMemcpy(device, from, bytes, cudaMemcpyHostToDevice));
    return device;
}

int main(void)
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
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("cross_entropy of %d rows of %d on: %s\n", ROWS, VOCAB, device.name);

    const float *logits = (const float *)memory_of(logits_host, sizeof logits_host);
    const int64_t *target = (const int64_t *)memory_of(target_host, sizeof target_host);
    float *loss = (float *)memory_of(NULL, ROWS * sizeof(float)), *lse = (float *)memory_of(NULL, ROWS * sizeof(float));
    float *dlogits = (float *)memory_of(NULL, sizeof logits_host), *mean = (float *)memory_of(NULL, sizeof(float));
    float *lse_low = (float *)memory_of(NULL, ROWS * sizeof(float));
    int64_t *valid_rows = (int64_t *)memory_of(NULL, sizeof(int64_t));
    const rung_args args = {logits, target, loss, dlogits};

    printf("%-42s %12s %12s %12s %12s\n", "", "row 0", "row 1", "row 2", "row 3");
    check("rung 1", lk_launch(rung_1_kernel, 1, 32, 0, NULL, args));
    show("rung 1: the formula (row 1 overflows)", loss, ROWS, overflow_right, 1);
    check("rung 2", lk_launch(rung_2_kernel, 1, 32, 0, NULL, args));
    show("rung 2: the online sum", loss, ROWS, loss_right, 1);
    check("rung 3", lk_launch(rung_3_kernel, 1, 32, 0, NULL, args));
    show("rung 3: two halves of the vocabulary", loss, ROWS, loss_right, 1);
    check("rung 4", lk_launch(rung_4_kernel, 1, 32, 0, NULL, args));
    show("rung 4: the gradient in the same pass", loss, ROWS, loss_right, 1);
    const float factors[ROWS] = {36, 8, 8, 1};
    const float exact[ROWS] = {1e-6f, 1e-6f, 1e-6f, 0}, from_lse[ROWS] = {1e-6f, 6e-5f, 1e-6f, 0};
    show_gradient("rung 4: its gradient", dlogits, factors, exact);
    check("rung 5", lk_launch(rung_5_kernel, ROWS, 32, 0, NULL, args));
    show("rung 5: a warp per row", loss, ROWS, loss_right, 1);
    /* rows that begin 4 bytes past a multiple of 16 */
    float *shifted = (float *)memory_of(NULL, sizeof logits_host + sizeof(float));
    check("rung 6", cudaMemcpy(shifted + 1, logits_host, sizeof logits_host, cudaMemcpyHostToDevice));
    const rung_args off = {shifted + 1, target, loss, dlogits};
    check("rung 6", lk_launch(rung_6_kernel, ROWS, 32, 0, NULL, off));
    show("rung 6: 16 bytes per load", loss, ROWS, loss_right, 1);
    check("rung 7", cudaMemset(dlogits, 0xff, sizeof logits_host)); /* NaN: what is shown next has been written */
    check("rung 7", lk_launch(rung_7_kernel, ROWS, RUNG_7_THREADS, sizeof(rung_7_shared), NULL, args));
    show("rung 7: a block per row, in shared memory", loss, ROWS, loss_right, 1);
    show_gradient("rung 7: its gradient", dlogits, factors, exact);
    lk_device code;
    check("rung 8", lk_current_device(&code));
    if (code.arch >= 90) { /* what the code was compiled for: older code has no clusters on a newer GPU either */
        check("rung 8", cudaMemset(dlogits, 0xff, sizeof logits_host));
        check("rung 8", lk_launch_blocks("rung 8", false, rung_8_kernel, ROWS * RUNG_8_BLOCKS, RUNG_8_BLOCKS, RUNG_8_WARPS * 32,
                                         sizeof(rung_8_shared), NULL, args));
        show("rung 8: a cluster of blocks per row", loss, ROWS, loss_right, 1);
        show_gradient("rung 8: its gradient", dlogits, factors, exact);
    } else {
        printf("rung 8: a cluster of blocks per row: skipped, it needs code for sm_90 or later\n");
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
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
