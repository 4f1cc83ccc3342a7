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
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>

#include "lk/logsumexp.cuh"

LK_DECLARE_LOGSUMEXP(f32)

static int check(const char *what, int status)
{
    if (status) printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    return status != 0;
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
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
