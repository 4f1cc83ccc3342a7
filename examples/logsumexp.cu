// SPDX-License-Identifier: MIT
/* logsumexp in four rungs, one idea per rung. Each computes lse[r] = log sum_j exp(x[r,j]) of the same four rows:
 *
 *   row 0   log 1, log 2, ..., log 8    the exponentials are 1 to 8:              lse = log 36 = 3.583519
 *   row 1   1000, eight times           exp(1000) is no float, 8 equal terms:     lse = 1000 + log 8 = 1002.079442
 *   row 2   -inf, except for one 5      exp(-inf) is 0:                           lse = 5
 *   row 3   -inf, eight times           the logarithm of nothing:                 lse = -inf
 *
 * and lk's backward computes the gradient of row 0, dx[j] = exp(x[j] - lse) = (j + 1) / 36.
 *
 *   make example-logsumexp                            on a GPU, or on the CPU where there is none
 *   make BACKEND=cpu SAN=asan example-logsumexp       on the CPU, with symbols; then
 *   gdb build/cpu-asan/examples/logsumexp             and: break rung_2_kernel, run, next
 *
 * lk_launch(kernel, grid, block, smem, stream, args) is CUDA's launch in triple angle brackets, written so that it also runs on
 * the CPU.
 */
#include <math.h>
#include <stdio.h>

#include "lk/logsumexp.cuh"

LK_DEFINE_LOGSUMEXP(f32)

#define ROWS 4
#define COLS 8

typedef struct {
    const float *x; /* [ROWS, COLS] */
    float *lse;     /* [ROWS] */
} rung_args;

/* Rung 1: the formula, one thread per row. Right on paper; in float, exp overflows above 88 (row 1 becomes inf). */
__global__ void rung_1_kernel(rung_args a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= ROWS) return;
    float sum = 0.0f;
    for (int col = 0; col < COLS; col++) sum += expf(a.x[row * COLS + col]);
    a.lse[row] = logf(sum);
}

/* Rung 2: subtract the maximum first, log sum exp(x) = max + log sum exp(x - max). No term exceeds 1 now, but x is read twice,
 * and a row of -inf needs care: -inf - -inf is NaN. */
__global__ void rung_2_kernel(rung_args a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= ROWS) return;
    float max = -INFINITY, sum = 0.0f;
    for (int col = 0; col < COLS; col++) max = fmaxf(max, a.x[row * COLS + col]);
    const float reference = max == -INFINITY ? 0.0f : max;
    for (int col = 0; col < COLS; col++) sum += expf(a.x[row * COLS + col] - reference);
    a.lse[row] = max + logf(sum);
}

/* Rung 3: one pass. Keep the maximum so far and the sum against it; when the maximum grows, rescale the sum. lk_lse is that
 * pair, and lk_lse_add adds several values for one rescaling. */
__global__ void rung_3_kernel(rung_args a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= ROWS) return;
    lk_lse state = lk_lse_empty();
    for (int col = 0; col < COLS; col += 4) {
        const float *next = a.x + row * COLS + col;
        const float four[4] = {next[0], next[1], next[2], next[3]};
        state = lk_lse_add(state, four);
    }
    a.lse[row] = lk_lse_log(state);
}

/* Rung 4: a warp per row. Neighbouring lanes read neighbouring elements, so a warp's load is one stretch of memory; then the
 * lanes' states merge, which needs no second pass either. */
__global__ void rung_4_kernel(rung_args a)
{
    const int row = blockIdx.x, lane = threadIdx.x;
    lk_lse state = lk_lse_empty();
    for (int col = lane; col < COLS; col += 32) {
        const float one[1] = {a.x[row * COLS + col]};
        state = lk_lse_add(state, one);
    }
    state = lk_lse_warp(state);
    if (lane == 0) a.lse[row] = lk_lse_log(state);
}

/* CUDA's functions and lk's return 0 or an error. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Prints a rung's four results and compares them with the comment above; rung 1 overflows in row 1. */
static void show(const char *name, rung_args a, int overflows)
{
    const float expected[ROWS] = {3.583519f, overflows ? INFINITY : 1002.079442f, 5.0f, -INFINITY};
    float lse[ROWS];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(lse, a.lse, sizeof lse, cudaMemcpyDeviceToHost));
    printf("%-44s", name);
    for (int row = 0; row < ROWS; row++) {
        printf(" %12.6f", (double)lse[row]);
        failures += lse[row] != expected[row] && !(fabsf(lse[row] - expected[row]) <= 1e-6f * fabsf(expected[row]));
    }
    printf("\n");
}

int main(void)
{
    float x[ROWS][COLS];
    for (int col = 0; col < COLS; col++) {
        x[0][col] = logf((float)(col + 1));
        x[1][col] = 1000.0f;
        x[2][col] = col == 6 ? 5.0f : -INFINITY;
        x[3][col] = -INFINITY;
    }
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("logsumexp of %d rows of %d on: %s\n", ROWS, COLS, device.name);

    float *x_device = NULL, *lse = NULL, *dx = NULL;
    check("cudaMalloc", cudaMalloc(&x_device, sizeof x));
    check("cudaMalloc", cudaMalloc(&lse, ROWS * sizeof(float)));
    check("cudaMalloc", cudaMalloc(&dx, sizeof x));
    check("cudaMemcpy", cudaMemcpy(x_device, x, sizeof x, cudaMemcpyHostToDevice));
    const rung_args args = {x_device, lse};

    printf("%-44s %12s %12s %12s %12s\n", "", "row 0", "row 1", "row 2", "row 3");
    printf("%-44s %12.6f %12.6f %12.6f %12.6f\n", "expected", 3.583519, 1002.079442, 5.0, -INFINITY);
    check("rung 1", lk_launch(rung_1_kernel, 1, 32, 0, NULL, args));
    show("rung 1: the formula (row 1 overflows)", args, 1);
    check("rung 2", lk_launch(rung_2_kernel, 1, 32, 0, NULL, args));
    show("rung 2: minus the maximum, two passes", args, 0);
    check("rung 3", lk_launch(rung_3_kernel, 1, 32, 0, NULL, args));
    show("rung 3: the running state, one pass", args, 0);
    check("rung 4", lk_launch(rung_4_kernel, ROWS, 32, 0, NULL, args));
    show("rung 4: a warp per row", args, 0);

    lk_logsumexp_args call = {};
    call.x = x_device, call.lse = lse, call.outer = ROWS, call.cols = COLS;
    check("lk", lk_logsumexp_forward_f32(&call, NULL));
    show("lk", args, 0);

    call.dx = dx; /* backward reads x and the lse that forward wrote */
    check("lk", lk_logsumexp_backward_f32(&call, NULL));
    check("lk", cudaMemcpy(x, dx, sizeof x, cudaMemcpyDeviceToHost));
    printf("lk's gradient of row 0, times 36:");
    for (int col = 0; col < COLS; col++) {
        printf(" %.5f", 36.0 * (double)x[0][col]);
        if (fabs(36.0 * (double)x[0][col] - (col + 1)) > 1e-5 * (col + 1)) failures++;
    }

    call.cols = -1; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_logsumexp_forward_f32(&call, NULL);
    printf("\ncols = -1: %s, %s\n", lk_status_string(status), lk_last_error());

    cudaFree(x_device), cudaFree(lse), cudaFree(dx);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
