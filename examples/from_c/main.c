// SPDX-License-Identifier: MIT
/* lk from C11. The folder lk/ is copied beside this file; kernels.cu makes the functions, this file calls them.
 *
 *   cp -r ../../lk .
 *   nvcc -std=c++17 -gencode arch=compute_90a,code=sm_90a -c kernels.cu
 *   gcc -std=c11 -I/usr/local/cuda/include -c main.c
 *   gcc main.o kernels.o -L/usr/local/cuda/lib64 -lcudart -lstdc++ -lm -o program
 *
 * It takes log sum exp over the rows, then over the columns, of
 *       0  log 3
 *   log 2  log 4      whose exponentials are  1 3 / 2 4:  log 4, log 6  and  log 3, log 7.
 *
 * Then it takes the norm y = x / sqrt(mean of x^2) of rows in 8 bits (E4M3), with a scale for each row, as a matrix product of 8
 * bits reads them. The largest number of a row becomes 448, the largest of E4M3, so y is scale q:
 *   1   1  1  1       y =   1            1       1  1     q = 448  448 448 448     scale = 1 / 448
 *   2  -8  0  0       y =   2/sqrt(17)  -8/sqrt(17)  0  0     q = 112 -448   0   0     scale = 8/sqrt(17) / 448
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>

#include "lk/logsumexp.cuh"
#include "lk/srms_norm_fp8.cuh"

LK_DECLARE_LOGSUMEXP(f32)
LK_DECLARE_SRMS_NORM_FP8(f32)

static int check(const char *what, int status)
{
    if (status) printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    return status != 0;
}

/* The number that a byte is in E4M3: a sign, 4 bits of exponent, 3 of mantissa. */
static double number(unsigned char byte)
{
    const int exponent = byte >> 3 & 15, mantissa = (byte & 7) + (exponent ? 8 : 0);
    return (byte & 128 ? -1 : 1) * ldexp(mantissa, (exponent ? exponent : 1) - 10);
}

static int norms(void)
{
    const float x[8] = {1, 1, 1, 1, 2, -8, 0, 0};
    const double expected[8] = {448, 448, 448, 448, 112, -448, 0, 0};
    unsigned char q[8] = {0};
    float scale[2] = {0};
    void *x_device = NULL, *q_device = NULL, *scale_device = NULL;
    int failures = 0;
    failures += check("cudaMalloc", cudaMalloc(&x_device, sizeof x));
    failures += check("cudaMalloc", cudaMalloc(&q_device, sizeof q));
    failures += check("cudaMalloc", cudaMalloc(&scale_device, sizeof scale));
    failures += check("cudaMemcpy", cudaMemcpy(x_device, x, sizeof x, cudaMemcpyHostToDevice));
    const lk_srms_norm_fp8_args args = {.common = {.x = x_device, .rows = 2, .cols = 4},
                                        .q = q_device, .scale = scale_device, .scaling = LK_SRMS_NORM_FP8_ROW};
    failures += check("norms", lk_srms_norm_fp8_forward_f32(&args, NULL));
    failures += check("cudaMemcpy", cudaMemcpy(q, q_device, sizeof q, cudaMemcpyDeviceToHost));
    failures += check("cudaMemcpy", cudaMemcpy(scale, scale_device, sizeof scale, cudaMemcpyDeviceToHost));
    for (int row = 0; row < 2; row++) {
        double squares = 0;
        for (int col = 0; col < 4; col++) squares += (double)x[4 * row + col] * (double)x[4 * row + col] / 4;
        printf("norm of row %d in 8 bits: scale %.8f, q", row, (double)scale[row]);
        for (int i = 4 * row; i < 4 * row + 4; i++) {
            printf(" %g", number(q[i]));
            failures += number(q[i]) != expected[i] || fabs((double)scale[row] * number(q[i]) - (double)x[i] / sqrt(squares)) > 1e-6;
        }
        printf(", expected");
        for (int i = 4 * row; i < 4 * row + 4; i++) printf(" %g", expected[i]);
        printf("\n");
    }
    cudaFree(x_device);
    cudaFree(q_device);
    cudaFree(scale_device);
    return failures;
}

int main(void)
{
    const float x[4] = {0.0f, 1.0986123f, 0.6931472f, 1.3862944f}, expected[4] = {4.0f, 6.0f, 3.0f, 7.0f};
    float lse[4] = {0};
    void *x_device = NULL, *lse_device = NULL;
    int failures = 0;
    failures += check("cudaMalloc", cudaMalloc(&x_device, sizeof x));
    failures += check("cudaMalloc", cudaMalloc(&lse_device, sizeof lse));
    failures += check("cudaMemcpy", cudaMemcpy(x_device, x, sizeof x, cudaMemcpyHostToDevice));

    const lk_logsumexp_args rows = {.x = x_device, .lse = lse_device, .outer = 2, .cols = 2};
    const lk_logsumexp_args columns = {.x = x_device, .lse = (float *)lse_device + 2, .outer = 1, .cols = 2, .inner = 2};
    failures += check("rows", lk_logsumexp_forward_f32(&rows, NULL));
    failures += check("columns", lk_logsumexp_forward_f32(&columns, NULL));
    failures += check("cudaMemcpy", cudaMemcpy(lse, lse_device, sizeof lse, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 4; i++) {
        printf("log sum exp over %s %d: %.6f, expected log %g = %.6f\n", i < 2 ? "row" : "column", i % 2, (double)lse[i],
               (double)expected[i], log((double)expected[i]));
        failures += fabs((double)lse[i] - log((double)expected[i])) > 1e-6;
    }
    const lk_logsumexp_args wrong = {.lse = lse_device, .outer = 2, .cols = 2};
    const lk_status status = lk_logsumexp_forward_f32(&wrong, NULL);
    printf("without x: %s, %s\n", lk_status_string(status), lk_last_error());

    cudaFree(x_device);
    cudaFree(lse_device);
    failures += norms();
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
