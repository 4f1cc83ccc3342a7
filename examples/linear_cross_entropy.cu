// SPDX-License-Identifier: MIT
/* linear_cross_entropy in seven rungs, one idea per rung: the loss of logits = x weight^T. The first two compute its gradients
 * too. Rungs 1 to 4 are for any GPU, 5 to 7 for Hopper's tensor cores. First 4 tokens of 2 numbers and a vocabulary of 4. The
 * weights are logarithms, so that the exponentials of the logits are whole numbers:
 *
 *   weight[0] = log 1, log 4         token 0   x = 1, 0    exponentials 1 2 3 4    target 3    loss = log 10/4 = 0.916291
 *   weight[1] = log 2, log 1         token 1   x = 0, 1                 4 1 1 2           0           log  8/4 = 0.693147
 *   weight[2] = log 3, log 1         token 2   x = 1, 1                 4 2 3 8           1           log 17/2 = 2.140066
 *   weight[3] = log 4, log 2         token 3   x = 2, 2                                ignored        0
 *
 *   dlogits    p, and 1 less at the target:  1 2 3 -6 of 10;  -4 1 1 2 of 8;  4 -15 3 8 of 17;  0 0 0 0
 *   dx         = dlogits weight, a row per token, times 10, 8, 17, 1:
 *              3 log 3 - 10 log 2, -4 log 2;   5 log 2 + log 3, -6 log 2;   log 2 + 3 log 3, 16 log 2;   0, 0
 *   dweight    = dlogits^T x. Column 0 is rows 0 and 2 of dlogits:   1/10 + 4/17 and so on, times 170:   57 -116  81 -22
 *              column 1 is rows 1 and 2:                            -4/8 + 4/17 and so on, times 136:  -36 -103  41  98
 *   mean       three tokens count: log(10/4 8/4 17/2) / 3 = log(42.5) / 3 = 1.249835, and a third of these gradients
 *
 * Then all rungs in bf16, for sizes of any number, against the formula in double; on a GPU with their times:
 *
 *   make example-linear_cross_entropy                        on a GPU, or on the CPU where there is none
 *   make example-linear_cross_entropy ARGS="4096 2048 32768" tokens, hidden, vocab; make bench-ladder keeps these times
 *   make BACKEND=cpu SAN=asan example-linear_cross_entropy   on the CPU, with symbols; then
 *   gdb build/cpu-asan/examples/linear_cross_entropy         and: break losses_kernel, run, next
 *
 * lk_launch(kernel, grid, block, smem, stream, args) is CUDA's launch in triple angle brackets, written so that it also runs
 * on the CPU.
 */
#include "examples/ladder.h"
#include "lk/linear_cross_entropy.cuh"

LK_DEFINE_LINEAR_CROSS_ENTROPY(f32)
LK_DEFINE_LINEAR_CROSS_ENTROPY(bf16)

/* ---- Rungs 1 to 4: any GPU ----------------------------------------------------------------------------------------------- */

template <class T> struct rung_args {
    const T *x;            /* [tokens, hidden] */
    const T *weight;       /* [vocab, hidden] */
    const int64_t *target; /* [tokens] */
    float *logits;         /* [tokens, vocab], overwritten by dlogits */
    float *loss;           /* [tokens] */
    float *dx;             /* [tokens, hidden]; NULL: no gradients */
    float *dweight;        /* [vocab, hidden] */
    int tokens, hidden, vocab;
};

/* Rung 1: all logits in memory. Each thread computes one logit. This product and the two of the gradients take nearly all of
 * the time; lk leaves them to cuBLASLt, or to rung 7's kernel. At 12288 tokens and a vocabulary of 131072 the logits are 6 GiB;
 * rung 2 needs less. */
template <class T> __global__ void logits_kernel(rung_args<T> a)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, token = i / a.vocab, col = i % a.vocab;
    if (token >= a.tokens) return;
    float sum = 0.0f;
    for (int d = 0; d < a.hidden; d++) sum += (float)a.x[token * a.hidden + d] * (float)a.weight[col * a.hidden + d];
    a.logits[i] = sum;
}

/* Each thread computes a token's loss, and dlogits over its logits. lk has cross_entropy.cuh's kernels for this, where a block
 * reads a row once. examples/cross_entropy.cu explains them, and why the target's gradient is minus the sum of the others. */
template <class T> __global__ void losses_kernel(rung_args<T> a)
{
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= a.tokens) return;
    float *row = a.logits + (int64_t)token * a.vocab, max = -INFINITY, sum = 0.0f, others = 0.0f;
    const int64_t y = a.target[token];
    for (int col = 0; col < a.vocab; col++) max = fmaxf(max, row[col]);
    for (int col = 0; col < a.vocab; col++) sum += expf(row[col] - max);
    a.loss[token] = y == IGNORED ? 0.0f : (max - row[y]) + logf(sum);
    if (!a.dx) return;
    for (int col = 0; col < a.vocab; col++) {
        row[col] = y == IGNORED ? 0.0f : expf(row[col] - max) / sum;
        others += col == y ? 0.0f : row[col];
    }
    if (y != IGNORED) row[y] = -others;
}

/* Each thread computes an element of dx. */
template <class T> __global__ void dx_kernel(rung_args<T> a)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, token = i / a.hidden, d = i % a.hidden;
    if (token >= a.tokens) return;
    float sum = 0.0f;
    for (int64_t col = 0; col < a.vocab; col++) sum += a.logits[token * a.vocab + col] * (float)a.weight[col * a.hidden + d];
    a.dx[i] = sum;
}

/* Each thread adds these tokens to an element of dweight. */
template <class T> __global__ void dweight_kernel(rung_args<T> a)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, col = i / a.hidden, d = i % a.hidden;
    if (col >= a.vocab) return;
    float sum = a.dweight[i];
    for (int64_t token = 0; token < a.tokens; token++)
        sum += a.logits[token * a.vocab + col] * (float)a.x[token * a.hidden + d];
    a.dweight[i] = sum;
}

/* Rungs 1 and 2: loss and gradients, `chunk` tokens at a time. Rung 1 has one chunk of all tokens.
 * Rung 2: a token's loss and gradients need its own logits only. So half of the tokens need half of the memory, and the other
 * half uses it again. Only dweight needs every token: it is summed over the chunks. The loss needs no logits in memory at all,
 * as rung 3 shows. */
template <class T> static lk_status launch_chunks(const rung_args<T> &all, int chunk)
{
    cudaError_t error = cudaSuccess;
    if (all.dx) error = cudaMemsetAsync(all.dweight, 0, (size_t)all.vocab * (size_t)all.hidden * sizeof(float), NULL);
    for (int first = 0; !error && first < all.tokens; first += chunk) {
        rung_args<T> a = all;
        a.x += (int64_t)first * a.hidden, a.target += first, a.loss += first;
        if (all.dx) a.dx += (int64_t)first * a.hidden;
        a.tokens = chunk < all.tokens - first ? chunk : all.tokens - first;
        error = lk_launch(logits_kernel<T>, lk_ceil_div((int64_t)a.tokens * a.vocab, 256), 256, 0, NULL, a);
        if (!error) error = lk_launch(losses_kernel<T>, lk_ceil_div(a.tokens, 32), 32, 0, NULL, a);
        if (!all.dx) continue;
        if (!error) error = lk_launch(dx_kernel<T>, lk_ceil_div((int64_t)a.tokens * a.hidden, 256), 256, 0, NULL, a);
        if (!error) error = lk_launch(dweight_kernel<T>, lk_ceil_div((int64_t)a.vocab * a.hidden, 256), 256, 0, NULL, a);
    }
    return (lk_status)error;
}

/* Rung 3: one logit at a time. The loss alone needs each logit once, so none is stored. Each thread keeps a token's largest
 * logit so far, the sum of exponentials relative to it, and the target's. The gradients need the logits again when the sum is
 * known: computed once more, or stored in some form. But every thread reads all weights by itself; rung 4 shares what it
 * reads. */
template <class T> __global__ void running_kernel(rung_args<T> a)
{
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= a.tokens) return;
    const int64_t y = a.target[token];
    float max = -INFINITY, sum = 0.0f, target = 0.0f;
    for (int64_t col = 0; col < a.vocab; col++) {
        float logit = 0.0f;
        for (int d = 0; d < a.hidden; d++)
            logit += (float)a.x[(int64_t)token * a.hidden + d] * (float)a.weight[col * a.hidden + d];
        const float before = max;
        max = fmaxf(max, logit);
        sum = sum * expf(before - max) + expf(logit - max);
        if (col == y) target = logit;
    }
    a.loss[token] = y == IGNORED ? 0.0f : (max - target) + logf(sum);
}

/* Rung 4: a tile per block. A block computes 64 x 64 logits. It reads 16 numbers of 64 tokens and of 64 columns into shared
 * memory, and uses each of them 64 times; then the next 16. Each thread has 4 x 4 sums in registers, so eight loads from shared
 * memory serve 16 multiplications. The logits are stored again, which is simpler; rung 6 does without. The multiplications are
 * ordinary ones; rung 5 leaves them to the tensor cores. */
#define TILE 64
#define DEPTH 16
template <class T> __global__ void __launch_bounds__(256) block_tile_kernel(rung_args<T> a)
{
    LK_SHARED(float, x, [TILE][DEPTH + 1]); /* one more than needed: neighbouring rows begin in different banks */
    LK_SHARED(float, weight, [TILE][DEPTH + 1]);
    const int row_tiles = (a.tokens + TILE - 1) / TILE, across = threadIdx.x % 16, down = threadIdx.x / 16;
    const int64_t token = (int64_t)(blockIdx.x % row_tiles) * TILE, col = (int64_t)(blockIdx.x / row_tiles) * TILE;
    float sum[4][4] = {};
    for (int first = 0; first < a.hidden; first += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) { /* 0 stands for what is outside */
            const int r = i / DEPTH, d = first + i % DEPTH;
            const bool in = d < a.hidden;
            x[r][i % DEPTH] = in && token + r < a.tokens ? (float)a.x[(token + r) * a.hidden + d] : 0.0f;
            weight[r][i % DEPTH] = in && col + r < a.vocab ? (float)a.weight[(col + r) * a.hidden + d] : 0.0f;
        }
        __syncthreads(); /* all of it is written */
        for (int d = 0; d < DEPTH; d++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] += x[down + 16 * i][d] * weight[across + 16 * j][d];
        __syncthreads(); /* all of it is read, so the next may be written */
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t row = token + down + 16 * i, at = col + across + 16 * j;
            if (row < a.tokens && at < a.vocab) a.logits[row * a.vocab + at] = sum[i][j];
        }
}

/* A warp per token, for stored logits: rung 5 of examples/cross_entropy.cu. */
template <class T> __global__ void token_kernel(rung_args<T> a)
{
    const int token = blockIdx.x, lane = threadIdx.x;
    const float *row = a.logits + (int64_t)token * a.vocab;
    const int64_t y = a.target[token];
    lk_lse s = lk_lse_empty();
    for (int col = lane; col < a.vocab; col += 32) s = lk_lse_add(s, {row[col]});
    s = lk_lse_warp(s);
    if (lane == 0) a.loss[token] = y == IGNORED ? 0.0f : (s.max - row[y]) + logf(s.sum);
}
template <class T> static lk_status launch_block_tiles(const rung_args<T> &a)
{
    const int64_t tiles = lk_ceil_div(a.tokens, TILE) * lk_ceil_div(a.vocab, TILE);
    const cudaError_t error = lk_launch(block_tile_kernel<T>, tiles, 256, 0, NULL, a);
    return (lk_status)(error ? error : lk_launch(token_kernel<T>, a.tokens, 32, 0, NULL, a));
}

/* ---- Rungs 5 to 7: Hopper's tensor cores --------------------------------------------------------------------------------- */

/* One kernel. The rungs differ in what it does with a tile (stored), and in how many clusters it has. */
typedef struct {
    CUtensorMap x, weight; /* [tokens, hidden] and [vocab, hidden] in bf16, described to TMA */
    const int64_t *target;
    float *logits;        /* [tokens, vocab], of rung 5 */
    lk_lse *states;       /* [tokens, col_tiles]: the max and the sum of a token's logits in each tile, of rungs 6 and 7 */
    float *target_logit;  /* [tokens], of rungs 6 and 7 */
    float *loss;          /* [tokens] */
    int tokens, vocab;
    int row_pairs, col_tiles, steps; /* pairs of 128 tokens, tiles of 256 columns, stages of 64 numbers of hidden */
} tile_args;

/* Rung 5: TMA and wgmma. lk_gemm.cuh has the drawing: two blocks make a cluster, and each computes 128 x 256 logits. In each
 * block one thread starts the copies that fill a ring of stages in shared memory, and two warpgroups multiply what has arrived.
 * Copies and products run by themselves: threads only start them and wait. Each thread of the two warpgroups gets 128 sums in
 * registers; lk_gemm_row(i) and lk_gemm_col(i) say which. They are stored, and token_kernel reads them: 512 MiB each way for
 * 4096 tokens and 32768 columns. Rung 6 saves that. */
__device__ __forceinline__ void rung_5_put(const tile_args &a, const float (&z)[LK_GEMM_SUMS], int first_row, int tile)
{
#pragma unroll
    for (int i = 0; i < LK_GEMM_SUMS; i++) {
        const int64_t row = first_row + lk_gemm_row(i), col = (int64_t)tile * LK_GEMM_COLS + lk_gemm_col(i);
        if (row < a.tokens && col < a.vocab) a.logits[row * a.vocab + col] = z[i];
    }
}

/* Rung 6: the epilogue. Rung 3's idea for a tile: logits stay in registers. What leaves is a row's max and sum over the tile's
 * 256 columns, 8 bytes instead of 1024, and the target's logit where the tile has it. A thread holds 64 columns of two rows, 8
 * apart, and four lanes share a row. merge_kernel makes a token's loss of its tiles. But a cluster ends with its tile: while it
 * computes exponentials, no copies run. In rung 7 they do. */
__device__ __forceinline__ void rung_6_put(const tile_args &a, const float (&z)[LK_GEMM_SUMS], int first_row, int tile)
{
    const int first_col = tile * LK_GEMM_COLS, columns = a.vocab - first_col; /* those from there on */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = first_row + lk_gemm_row(2 * r);
        const int y = row < a.tokens ? (int)a.target[row] - first_col : -1; /* of the tile's columns */
        float logit[LK_GEMM_SUMS / 2];
#pragma unroll
        for (int k = 0; k < LK_GEMM_SUMS / 2; k++) logit[k] = z[k / 2 * 4 + 2 * r + k % 2];
        if (columns < LK_GEMM_COLS) { /* the last tile may be wider than what is left */
#pragma unroll
            for (int k = 0; k < LK_GEMM_SUMS / 2; k++)
                if (lk_gemm_col(k / 2 * 4 + k % 2) >= columns) logit[k] = -INFINITY; /* adds nothing */
        }
        if (y >= 0 && y < LK_GEMM_COLS) {
#pragma unroll
            for (int k = 0; k < LK_GEMM_SUMS / 2; k++)
                if (lk_gemm_col(k / 2 * 4 + k % 2) == y) a.target_logit[row] = logit[k];
        }
        const lk_lse s = lk_lse_warp(lk_lse_add(lk_lse_empty(), logit), 4); /* over four lanes */
        if (threadIdx.x % 4 == 0 && row < a.tokens) a.states[(int64_t)row * a.col_tiles + tile] = s;
    }
}

/* Rung 7: persistent clusters. There are as many clusters as the GPU can run at once, and each takes one tile after another, in
 * the loop below. Rungs 5 and 6 have a cluster per tile, so their loops run once. While one warpgroup computes exponentials,
 * the other may multiply, and the ring fills for the next tile: the tensor cores rarely wait. lk's kernel is this one with the
 * options; it keeps a token's state over several tiles, and for the gradients it keeps exponentials. */
template <bool stored>
__global__ void __launch_bounds__(LK_GEMM_THREADS, 1) tensor_core_kernel(const __grid_constant__ tile_args a)
{
#if LK_SM90A
    LK_DYN_SMEM(lk_gemm_memory, memory);
    lk_gemm_ring *const ring = lk_gemm_begin(&memory);
    const int rank = blockIdx.x % 2, clusters = gridDim.x / 2, tiles = a.row_pairs * a.col_tiles;
    unsigned step = 0;
    if (lk_gemm_loads()) { /* the first warpgroup; it needs few registers, so that the others can have more */
        lk_setmaxnreg_dec<LK_GEMM_LOAD_REGISTERS>();
        for (int i = blockIdx.x / 2; threadIdx.x == 0 && i < tiles; i += clusters)
            lk_gemm_load(ring, &step, &a.x, &a.weight, (i % a.row_pairs * 2 + rank) * LK_GEMM_ROWS,
                         i / a.row_pairs * LK_GEMM_COLS, a.steps);
    } else {
        lk_setmaxnreg_inc<LK_GEMM_MULTIPLY_REGISTERS>();
        float z[LK_GEMM_SUMS];
        for (int i = blockIdx.x / 2; i < tiles; i += clusters) {
            lk_gemm_multiply(z, ring, &step, a.steps);
            const int row = (i % a.row_pairs * 2 + rank) * LK_GEMM_ROWS, tile = i / a.row_pairs;
            if (stored) rung_5_put(a, z, row, tile);
            else rung_6_put(a, z, row, tile);
        }
    }
    lk_gemm_end();
#endif
}

/* A warp per token: the states of its tiles become its loss. */
__global__ void merge_kernel(const __grid_constant__ tile_args a)
{
    const int token = blockIdx.x, lane = threadIdx.x;
    lk_lse s = lk_lse_empty();
    for (int tile = lane; tile < a.col_tiles; tile += 32) s = lk_lse_merge(s, a.states[(int64_t)token * a.col_tiles + tile]);
    s = lk_lse_warp(s);
    if (lane == 0) a.loss[token] = a.target[token] == IGNORED ? 0.0f : (s.max - a.target_logit[token]) + logf(s.sum);
}

/* hidden is a multiple of 8, since TMA wants rows of whole 16 bytes. */
static lk_status launch_tensor_cores(int rung, const rung_args<lk_bf16> &a, lk_lse *states, float *target_logit)
{
    lk_device device;
    const cudaError_t error = lk_current_device(&device);
    if (error) return (lk_status)error;
    tile_args p = {};
    p.target = a.target, p.logits = a.logits, p.states = states, p.target_logit = target_logit, p.loss = a.loss;
    p.tokens = a.tokens, p.vocab = a.vocab;
    p.row_pairs = (int)lk_ceil_div(a.tokens, 2 * LK_GEMM_ROWS), p.col_tiles = (int)lk_ceil_div(a.vocab, LK_GEMM_COLS);
    p.steps = (int)lk_ceil_div(a.hidden, LK_GEMM_DEPTH);
    lk_status status = lk_gemm_map("x", &p.x, a.x, a.tokens, a.hidden, a.hidden, LK_GEMM_ROWS);
    if (!status) status = lk_gemm_map("weight", &p.weight, a.weight, a.vocab, a.hidden, a.hidden, LK_GEMM_COLS / 2);
    int64_t clusters = (int64_t)p.row_pairs * p.col_tiles;
    if (rung == 7 && clusters > device.sms / 2) clusters = device.sms / 2;
    if (!status)
        status = lk_launch_blocks("tiles", false, rung == 5 ? tensor_core_kernel<true> : tensor_core_kernel<false>,
                                  2 * clusters, 2, LK_GEMM_THREADS, sizeof(lk_gemm_memory), NULL, p);
    if (status) return status;
    return (lk_status)(rung == 5 ? lk_launch(token_kernel<lk_bf16>, a.tokens, 32, 0, NULL, a)
                                 : lk_launch(merge_kernel, a.tokens, 32, 0, NULL, p));
}

/* ---- All rungs at any size ----------------------------------------------------------------------------------------------- */

#define RUNGS 7
static const char *const ideas[RUNGS + 1] = {
    "all logits in memory", "the logits of half the tokens", "one logit at a time", "a tile per block: shared memory",
    "TMA and wgmma", "the epilogue: no logits stored", "persistent clusters", "lk's own op"};

typedef struct {
    int rung;
    rung_args<lk_bf16> a;
    lk_lse *states;
    float *target_logit;
    lk_linear_cross_entropy_args lk;
} climb_call;

static lk_status climb_launch(const void *call)
{
    const climb_call *const c = (const climb_call *)call;
    if (c->rung <= 2) return launch_chunks(c->a, c->rung == 1 ? c->a.tokens : (c->a.tokens + 1) / 2);
    if (c->rung == 3) return (lk_status)lk_launch(running_kernel<lk_bf16>, lk_ceil_div(c->a.tokens, 32), 32, 0, NULL, c->a);
    if (c->rung == 4) return launch_block_tiles(c->a);
    if (c->rung <= RUNGS) return launch_tensor_cores(c->rung, c->a, c->states, c->target_logit);
    return lk_linear_cross_entropy_forward_bf16(&c->lk, NULL);
}

/* Some tokens by the formula in double: their logits' log sum exp, and the target's logit. */
typedef struct {
    double lse, logit;
} climb_right;

static void climb_formula(const rung_args<lk_bf16> &a, const int64_t *target, climb_right *right)
{
    const size_t row = (size_t)a.hidden, weights = row * (size_t)a.vocab;
    lk_bf16 *const x = (lk_bf16 *)malloc(row * sizeof *x), *const weight = (lk_bf16 *)malloc(weights * sizeof *weight);
    check("check", cudaMemcpy(weight, a.weight, weights * sizeof *weight, cudaMemcpyDeviceToHost));
    for (int k = 0; k < ladder_checked(a.tokens); k++) {
        const int token = ladder_checked_row(a.tokens, k);
        double sum = 0;
        right[k].logit = 0;
        check("check", cudaMemcpy(x, a.x + (size_t)token * row, row * sizeof *x, cudaMemcpyDeviceToHost));
        for (int col = 0; col < a.vocab; col++) {
            double logit = 0;
            for (size_t d = 0; d < row; d++) logit += (double)(float)x[d] * (double)(float)weight[(size_t)col * row + d];
            sum += exp(logit);
            if (col == target[token]) right[k].logit = logit;
        }
        right[k].lse = log(sum);
    }
    free(x), free(weight);
}

/* Tensor cores add 16 products at a time and may cut off what does not fit: hidden / 16 errors on the same side. */
static void climb_check(const rung_args<lk_bf16> &a, const int64_t *target, const climb_right *right, char *why,
                        size_t why_bytes)
{
    for (int k = 0; k < ladder_checked(a.tokens) && !why[0]; k++) {
        const int token = ladder_checked_row(a.tokens, k);
        const double expected = target[token] == IGNORED ? 0 : right[k].lse - right[k].logit;
        const double magnitude = fabs(right[k].lse) + fabs(right[k].logit);
        float loss;
        check("check", cudaMemcpy(&loss, a.loss + token, sizeof loss, cudaMemcpyDeviceToHost));
        if (!(fabs(loss - expected) <= ladder_limit(a.vocab, magnitude) + 0x1p-23 * a.hidden / 16 * (1 + magnitude)))
            snprintf(why, why_bytes, "WRONG: loss[%d] is %.9g, not %.9g", token, (double)loss, expected);
    }
}

/* The slow rungs get this many columns at most; a rate says as much there. */
#define FEW 2048

static void climb(int tokens, int hidden, int vocab)
{
    const int few = vocab < FEW ? vocab : FEW;
    const int64_t logits = (int64_t)tokens * vocab, states = (int64_t)tokens * lk_ceil_div(vocab, LK_GEMM_COLS);
    int64_t *const target = (int64_t *)malloc((size_t)tokens * sizeof(int64_t));
    climb_right *const right = (climb_right *)malloc((size_t)ladder_checked(tokens) * sizeof(climb_right));
    climb_call call = {};
    rung_args<lk_bf16> *const a = &call.a;
    a->x = ladder_normal((int64_t)tokens * hidden, 1, 1.0f);
    a->weight = ladder_normal((int64_t)vocab * hidden, 2, 1.5f / sqrtf((float)hidden)); /* logits have a deviation of 1.5 */
    a->target = ladder_targets(target, tokens, few), a->tokens = tokens, a->hidden = hidden;
    a->loss = (float *)memory_of(NULL, (size_t)tokens * sizeof(float));
    a->logits = (float *)memory_of(NULL, (size_t)logits * sizeof(float));
    call.states = (lk_lse *)memory_of(NULL, (size_t)states * sizeof(lk_lse));
    call.target_logit = (float *)memory_of(NULL, (size_t)tokens * sizeof(float));

    static lk_linear_cross_entropy_context context;
    check("init", lk_linear_cross_entropy_init(&context));
    lk_linear_cross_entropy_args *const args = &call.lk;
    args->context = &context, args->x = a->x, args->weight = a->weight, args->target = a->target, args->loss = a->loss;
    args->tokens = tokens, args->hidden = hidden, args->vocab = vocab;
    args->use_ignore_index = 1, args->ignore_index = IGNORED;
    check("query", lk_linear_cross_entropy_forward_workspace_bytes_bf16(args, &args->workspace_bytes));
    args->workspace = memory_of(NULL, args->workspace_bytes);

    lk_device device;
    check("device", lk_current_device(&device));
    const bool tensor_cores = lk_gemm_available(&device) && hidden % 8 == 0;
    for (call.rung = 1; call.rung <= RUNGS + 1; call.rung++) {
        const bool slow = call.rung <= 3;
        const int columns = slow ? few : vocab;
        if (a->vocab != columns) a->vocab = columns, climb_formula(*a, target, right);
        char number[8], shape[64], why[128] = "";
        snprintf(number, sizeof number, "%d", call.rung);
        snprintf(shape, sizeof shape, "tokens=%d hidden=%d vocab=%d", tokens, hidden, columns);
        const double product = 2.0 * tokens * hidden * columns, stored = 4.0 * tokens * columns;
        const double workspace[RUNGS + 1] = {stored, stored / 2, 0, stored, stored, 8.0 * (double)states, 8.0 * (double)states,
                                             (double)args->workspace_bytes};
        const ladder_line line = {"linear_cross_entropy", "forward", shape, call.rung > RUNGS ? "lk" : number,
                                  ideas[call.rung - 1], 0, product, workspace[call.rung - 1]};
        if (call.rung >= 5 && call.rung <= RUNGS && !tensor_cores) {
            ladder_report(&line, hidden % 8 ? "skipped: hidden is no multiple of 8" : "skipped: it needs code for sm_90a", 0);
            continue;
        }
        check(number, cudaMemset(a->loss, 0xff, (size_t)tokens * sizeof(float))); /* NaN: what is checked has been written */
        check(number, climb_launch(&call));
        check(number, cudaDeviceSynchronize());
        climb_check(*a, target, right, why, sizeof why);
        failures += why[0] != 0;
        ladder_report(&line, why, why[0] ? 0 : ladder_ms(climb_launch, &call));
    }
    check("destroy", lk_linear_cross_entropy_destroy(&context));
    cudaFree((void *)a->x), cudaFree((void *)a->weight), cudaFree((void *)a->target), cudaFree(a->logits), cudaFree(a->loss);
    cudaFree(call.states), cudaFree(call.target_logit), cudaFree(args->workspace), free(target);
    free(right);
}

/* ---- The four tokens ----------------------------------------------------------------------------------------------------- */

#define TOKENS 4
#define HIDDEN 2
#define VOCAB 4

/* Prints `count` values on the device, each times its factor, and compares them with the comment above. */
static void show(const char *name, const float *device, int count, const float *expected, const float *factors)
{
    float host[TOKENS * HIDDEN];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(host, device, (size_t)count * sizeof host[0], cudaMemcpyDeviceToHost));
    printf("%-37s", name);
    for (int i = 0; i < count; i++) {
        const float value = host[i] * factors[i];
        printf(" %10.5f", (double)value);
        failures += !(fabsf(value - expected[i]) <= 3e-6f * (1.0f + fabsf(expected[i])));
    }
    printf("\n");
}

static const float ones[TOKENS] = {1, 1, 1, 1}, loss_right[TOKENS] = {0.916291f, 0.693147f, 2.140066f, 0};

/* All three results; the gradients of a mean over three are a third. */
static void show_all(const char *name, const rung_args<float> *a, bool mean)
{
    static const float mean_right[1] = {1.249835f};
    static const float dx_right[TOKENS * HIDDEN] = {-3.635635f, -2.772589f, 4.564348f, -4.158883f, 3.988984f, 11.090355f, 0, 0};
    static const float dweight_right[VOCAB * HIDDEN] = {57, -36, -116, -103, 81, 41, -22, 98};
    const float over = mean ? 3.0f : 1.0f;
    float dx_factors[TOKENS * HIDDEN], dweight_factors[VOCAB * HIDDEN];
    const float sums[TOKENS] = {10, 8, 17, 1};
    for (int i = 0; i < TOKENS * HIDDEN; i++) dx_factors[i] = over * sums[i / HIDDEN];
    for (int i = 0; i < VOCAB * HIDDEN; i++) dweight_factors[i] = over * (i % HIDDEN == 0 ? 170.0f : 136.0f);
    printf("%s\n", name);
    show(mean ? "  mean loss" : "  loss", a->loss, mean ? 1 : TOKENS, mean ? mean_right : loss_right, ones);
    show("  dx, times 10 10 8 8 17 17 1 1", a->dx, TOKENS * HIDDEN, dx_right, dx_factors);
    show("  dweight, times 170 136 170 136 ...", a->dweight, VOCAB * HIDDEN, dweight_right, dweight_factors);
}

/* NaN everywhere: what is shown next has been written. */
static void forget(const rung_args<float> *a)
{
    check("cudaMemset", cudaMemset(a->loss, 0xff, TOKENS * sizeof(float)));
    check("cudaMemset", cudaMemset(a->dx, 0xff, TOKENS * HIDDEN * sizeof(float)));
    check("cudaMemset", cudaMemset(a->dweight, 0xff, VOCAB * HIDDEN * sizeof(float)));
}

static void four_tokens(void)
{
    const float x_host[TOKENS][HIDDEN] = {{1, 0}, {0, 1}, {1, 1}, {2, 2}};
    const float weight_host[VOCAB][HIDDEN] = {{logf(1), logf(4)}, {logf(2), logf(1)}, {logf(3), logf(1)}, {logf(4), logf(2)}};
    const int64_t target_host[TOKENS] = {3, 0, 1, IGNORED};
    rung_args<float> a = {};
    a.tokens = TOKENS, a.hidden = HIDDEN, a.vocab = VOCAB;
    a.x = (const float *)memory_of(x_host, sizeof x_host), a.weight = (const float *)memory_of(weight_host, sizeof weight_host);
    a.target = (const int64_t *)memory_of(target_host, sizeof target_host);
    a.logits = (float *)memory_of(NULL, TOKENS * VOCAB * sizeof(float));
    a.loss = (float *)memory_of(NULL, TOKENS * sizeof(float));
    a.dx = (float *)memory_of(NULL, sizeof x_host), a.dweight = (float *)memory_of(NULL, sizeof weight_host);

    check("rung 1", launch_chunks(a, TOKENS));
    show_all("rung 1: all logits in memory", &a, false);
    forget(&a);
    check("rung 2", launch_chunks(a, TOKENS / 2));
    show_all("rung 2: the logits of half the tokens", &a, false);
    forget(&a);
    check("rung 3", lk_launch(running_kernel<float>, 1, 32, 0, NULL, a));
    printf("rung 3: one logit at a time\n");
    show("  loss", a.loss, TOKENS, loss_right, ones);
    forget(&a);
    check("rung 4", launch_block_tiles(a));
    printf("rung 4: a tile per block\n");
    show("  loss", a.loss, TOKENS, loss_right, ones);

    /* lk: a query answers a good size of the workspace. Or the caller has so much memory, and a plan says what lk does with it.
     * The context holds cuBLASLt's handle. */
    static lk_linear_cross_entropy_context context;
    check("init", lk_linear_cross_entropy_init(&context));
    lk_linear_cross_entropy_args args = {};
    args.context = &context, args.x = a.x, args.weight = a.weight, args.target = a.target;
    args.loss = a.loss, args.dx = a.dx, args.dweight = a.dweight;
    args.tokens = TOKENS, args.hidden = HIDDEN, args.vocab = VOCAB;
    args.use_ignore_index = 1, args.ignore_index = IGNORED;
    size_t bytes = 0;
    lk_linear_cross_entropy_plan plan;
    check("query", lk_linear_cross_entropy_forward_backward_workspace_bytes_f32(&args, &bytes));
    check("plan", lk_linear_cross_entropy_forward_backward_plan_f32(&args, bytes, &plan));
    printf("by default %zu bytes, %zu of them for cuBLASLt: %s\n", bytes, plan.cublas_bytes, plan.text);
    check("plan", lk_linear_cross_entropy_forward_backward_plan_f32(&args, (size_t)1 << 20, &plan));
    printf("with 1 MiB: %s\n", plan.text);
    args.workspace = memory_of(NULL, plan.workspace_bytes), args.workspace_bytes = plan.workspace_bytes;
    forget(&a);
    check("lk", lk_linear_cross_entropy_forward_backward_f32(&args, NULL));
    show_all("lk", &a, false);

    /* A chunk may also have some columns of the vocabulary at a time. Here the caller chooses the path and the chunk. */
    args.reduction = LK_REDUCTION_MEAN, args.path = LK_LINEAR_CROSS_ENTROPY_PANELS, args.chunk_tokens = 2;
    check("plan", lk_linear_cross_entropy_forward_backward_plan_f32(&args, args.workspace_bytes, &plan));
    printf("with path and chunk_tokens: %s\n", plan.text);
    forget(&a);
    check("lk", lk_linear_cross_entropy_forward_backward_f32(&args, NULL));
    show_all("lk: mean", &a, true);

    args.label_smoothing = 2; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_linear_cross_entropy_forward_backward_f32(&args, NULL);
    printf("label_smoothing = 2: %s, %s\n", lk_status_string(status), lk_last_error());
    failures += status != LK_ERR_VALUE;

    check("destroy", lk_linear_cross_entropy_destroy(&context));
    cudaFree((void *)a.x), cudaFree((void *)a.weight), cudaFree((void *)a.target), cudaFree(a.logits), cudaFree(a.loss);
    cudaFree(a.dx), cudaFree(a.dweight), cudaFree(args.workspace);
}

int main(int argc, char **argv)
{
    const int tokens = argc == 4 ? ladder_size(argv[1], 1 << 20) : 300, hidden = argc == 4 ? ladder_size(argv[2], 1 << 20) : 72;
    const int vocab = argc == 4 ? ladder_size(argv[3], 1 << 20) : 600;
    if ((argc != 1 && argc != 4) || !tokens || !hidden || !vocab) {
        printf("usage: %s [TOKENS HIDDEN VOCAB]\n", argv[0]);
        return 2;
    }
    cudaDeviceProp device = {};
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("linear_cross_entropy on: %s\n", device.name);
    if (argc == 1) four_tokens();
    climb(tokens, hidden, vocab);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
