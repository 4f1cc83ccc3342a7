// SPDX-License-Identifier: MIT
/* The Kullback-Leibler divergence in four rungs, one idea per rung. A student with probabilities p learns a teacher's q; the logits
 * are logarithms of small numbers, so that all can be checked by hand:
 *
 *   row 0   p = 1/2, 1/4, 1/4        q = 1/4, 1/4, 1/2:   KL(q || p) = (1/4) log(1/2) + (1/2) log 2 = log(2) / 4 = 0.173287
 *           its gradient is p - q = 1/4, 0, -1/4
 *   row 1   the same, and 1000 added to all logits: the same probabilities, as near as logits can be there, 6e-5 apart
 *   row 2   q = 0, 1/2, 1/2, so a teacher's logit is -inf; p = 1/2, 1/4, 1/4:     log 2 = 0.693147
 *   row 3   p and q differ by e = 1/16384: p = 1/2, 1/4 + e, 1/4 - e, q = 1/2, 1/4, 1/4: about 4 e^2 = 1.490e-8
 *
 *   make example-kl                            on a GPU, or on the CPU where there is none
 */
#include <math.h>
#include <stdio.h>

#include "lk/kl.cuh"

LK_DEFINE_KL(f32)

#define ROWS 4
#define COLS 3

typedef struct {
    const float *x, *y; /* [ROWS, COLS], logits of student and teacher */
    float *loss;        /* [ROWS] */
} rung_args;

/* Rung 1: the formula, one thread per row: softmax of both, then sum q log(q / p). exp overflows in row 1, and row 2 has 0 log 0. */
__global__ void rung_1_kernel(rung_args a)
{
    const int row = threadIdx.x;
    if (row >= ROWS) return;
    float p[COLS], q[COLS], sum_p = 0.0f, sum_q = 0.0f, loss = 0.0f;
    for (int c = 0; c < COLS; c++) sum_p += p[c] = expf(a.x[row * COLS + c]), sum_q += q[c] = expf(a.y[row * COLS + c]);
    for (int c = 0; c < COLS; c++) loss += q[c] / sum_q * logf(q[c] / sum_q / (p[c] / sum_p));
    a.loss[row] = loss;
}

/* log sum exp of a row, by lk's running state: examples/logsumexp.cu says how. */
__device__ float lse_of(const float *x)
{
    lk_lse state = lk_lse_empty();
    for (int c = 0; c < COLS; c++) {
        const float one[1] = {x[c]};
        state = lk_lse_add(state, one);
    }
    return lk_lse_log(state);
}

/* Rung 2: log-probabilities, log p = x - lse. Nothing overflows, and a column where q is 0 adds nothing. Row 3 has no digit right:
 * its terms are 4000 times as large as their sum, and rounded. */
__global__ void rung_2_kernel(rung_args a)
{
    const int row = threadIdx.x;
    if (row >= ROWS) return;
    const float lse_p = lse_of(a.x + row * COLS), lse_q = lse_of(a.y + row * COLS);
    float loss = 0.0f;
    for (int c = 0; c < COLS; c++) {
        const float log_p = a.x[row * COLS + c] - lse_p, log_q = a.y[row * COLS + c] - lse_q, q = expf(log_q);
        if (q > 0.0f) loss += q * (log_q - log_p);
    }
    a.loss[row] = loss;
}

/* Rung 3: add p - q to each term. Both add up to 1, so that changes nothing; but a term q d + p - q, d = log(q / p), is never
 * negative, and nothing cancels among terms. What is left is within a term: q d and p - q are nearly opposite, so row 3 is no better. */
__global__ void rung_3_kernel(rung_args a)
{
    const int row = threadIdx.x;
    if (row >= ROWS) return;
    const float lse_p = lse_of(a.x + row * COLS), lse_q = lse_of(a.y + row * COLS);
    float loss = 0.0f;
    for (int c = 0; c < COLS; c++) {
        const float log_p = a.x[row * COLS + c] - lse_p, log_q = a.y[row * COLS + c] - lse_q, p = expf(log_p), q = expf(log_q);
        loss += q > 0.0f ? q * (log_q - log_p) + (p - q) : p;
    }
    a.loss[row] = loss;
}

/* Rung 4: p = q e^-d, so the term is q (e^-d - 1 + d) = q (d^2 / 2 - d^3 / 6 + ...), by its series where d is small. lk_kl_terms adds
 * several such terms, here one; its d is in base 2. */
__global__ void rung_4_kernel(rung_args a)
{
    const int row = threadIdx.x;
    if (row >= ROWS) return;
    const float lse_p = lse_of(a.x + row * COLS), lse_q = lse_of(a.y + row * COLS);
    float loss = 0.0f;
    for (int c = 0; c < COLS; c++) {
        const float log_p = a.x[row * COLS + c] - lse_p, log_q = a.y[row * COLS + c] - lse_q;
        const float q[1] = {lk_exp(log_q)}, p[1] = {lk_exp(log_p)}, d[1] = {(log_q - log_p) * LK_LOG2E};
        loss += lk_kl_terms(q, p, d);
    }
    a.loss[row] = loss;
}

/* CUDA's functions and lk's return 0 or an error. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

static double right[ROWS];

/* Prints a rung's results and compares the rows that it gets right with the formula in double. */
static void show(const char *name, rung_args a, const char *rows)
{
    float loss[ROWS];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(loss, a.loss, sizeof loss, cudaMemcpyDeviceToHost));
    printf("%-44s", name);
    for (int row = 0; row < ROWS; row++) {
        printf(" %13.6g", (double)loss[row]);
        const bool good = fabs((double)loss[row] - right[row]) <= (row == 1 ? 3e-4 : row == 3 ? 1e-2 : 1e-5) * right[row];
        failures += rows[row] == 'x' && !good;
    }
    printf("\n");
}

int main(void)
{
    const double e = 1.0 / 16384, p[ROWS][COLS] = {{0.5, 0.25, 0.25}, {0.5, 0.25, 0.25}, {0.5, 0.25, 0.25}, {0.5, 0.25 + e, 0.25 - e}};
    const double q[ROWS][COLS] = {{0.25, 0.25, 0.5}, {0.25, 0.25, 0.5}, {0, 0.5, 0.5}, {0.5, 0.25, 0.25}};
    float x[ROWS][COLS], y[ROWS][COLS];
    for (int row = 0; row < ROWS; row++)
        for (int c = 0; c < COLS; c++) {
            x[row][c] = (float)log(p[row][c]) + (row == 1 ? 1000 : 0), y[row][c] = (float)log(q[row][c]) + (row == 1 ? 1000 : 0);
            right[row] += q[row][c] > 0 ? q[row][c] * log(q[row][c] / p[row][c]) : 0;
        }
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("kl of %d rows of %d on: %s\n", ROWS, COLS, device.name);

    float *x_device = NULL, *y_device = NULL, *loss = NULL, *dx = NULL;
    check("cudaMalloc", cudaMalloc(&x_device, sizeof x));
    check("cudaMalloc", cudaMalloc(&y_device, sizeof y));
    check("cudaMalloc", cudaMalloc(&loss, ROWS * sizeof(float)));
    check("cudaMalloc", cudaMalloc(&dx, sizeof x));
    check("cudaMemcpy", cudaMemcpy(x_device, x, sizeof x, cudaMemcpyHostToDevice));
    check("cudaMemcpy", cudaMemcpy(y_device, y, sizeof y, cudaMemcpyHostToDevice));
    const rung_args args = {x_device, y_device, loss};

    printf("%-44s %13s %13s %13s %13s\n", "", "row 0", "row 1", "row 2", "row 3");
    printf("%-44s %13.6g %13.6g %13.6g %13.6g\n", "expected", right[0], right[1], right[2], right[3]);
    check("rung 1", lk_launch(rung_1_kernel, 1, 32, 0, NULL, args));
    show("rung 1: the formula (row 0 alone is right)", args, "x   ");
    check("rung 2", lk_launch(rung_2_kernel, 1, 32, 0, NULL, args));
    show("rung 2: log-probabilities (row 3 is wrong)", args, "xxx ");
    check("rung 3", lk_launch(rung_3_kernel, 1, 32, 0, NULL, args));
    show("rung 3: terms that are never negative", args, "xxx ");
    check("rung 4", lk_launch(rung_4_kernel, 1, 32, 0, NULL, args));
    show("rung 4: their series", args, "xxxx");

    lk_kl_args call = {};
    call.logits = x_device, call.teacher = y_device, call.loss = loss, call.dlogits = dx, call.rows = ROWS, call.vocab = COLS;
    check("lk", lk_kl_forward_backward_f32(&call, NULL));
    show("lk", args, "xxxx");
    check("lk", cudaMemcpy(x, dx, sizeof x, cudaMemcpyDeviceToHost));
    printf("lk's gradient of row 0, times 4:");
    for (int c = 0; c < COLS; c++) {
        printf(" %.5f", 4.0 * (double)x[0][c]);
        failures += fabs(4.0 * (double)x[0][c] - (1 - c)) > 1e-5;
    }
    call.beta = 2; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_kl_forward_backward_f32(&call, NULL);
    printf("\nbeta = 2: %s, %s\n", lk_status_string(status), lk_last_error());

    cudaFree(x_device), cudaFree(y_device), cudaFree(loss), cudaFree(dx);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
