// SPDX-License-Identifier: MIT
/* A kernel of your own on lk_row.cuh: softmax over rows, y[r,j] = exp(x[r,j] - log sum_k exp(x[r,k])), in 30 lines. It takes
 * rows of any length and any alignment: short ones by some lanes of a warp, long ones by a block, long ones that are too few
 * for the card by a cluster of blocks. lk_row.cuh divides the rows; the kernel is the formula.
 *
 * Every row has x[j] = log(j + 1), so that exp(x[j]) = j + 1 and y[j] = (j + 1) / (1 + 2 + ... + cols). For cols = 8:
 *
 *   y   1/36  2/36  3/36  4/36  5/36  6/36  7/36  8/36
 *
 *   make example-row_softmax        on a GPU, or on the CPU where there is none
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lk/lk_row.cuh"

LK_DEFINE_COMMON /* lk_last_error and lk_status_string: no other file of this program has an LK_DEFINE_ line */

#define THREADS 256

typedef struct {
    const float *x; /* [rows, cols] */
    float *y;       /* [rows, cols]; as many bytes behind a 16-byte boundary as x */
    int64_t rows, cols;
    lk_team team;
} softmax_args;

template <int KIND> LK_KERNEL void __launch_bounds__(THREADS) softmax_kernel(softmax_args a)
{
    /* Which columns of which row this thread has: vectors of 16 bytes, and single elements at both ends of the row. */
    const lk_row<float> row = lk_row_of<KIND, THREADS>(a.team, a.x, a.cols, a.rows, a.cols);
    LK_SHARED(lk_lse_inbox<THREADS>, inbox, [1]);
    lk_inbox_begin<KIND, true>(inbox);
    lk_griddepcontrol_wait(); /* a kernel that lk_launch_pdl starts waits here for the previous one */

    /* The sum over this warp's columns, then over the whole team; true: every thread gets it. */
    lk_vec<float> raw[2];
    lk_row_load(raw, row);
    const lk_lse own = lk_lse_read(raw, row, 1.0f);
    const float lse = lk_lse_log(lk_lse_team<KIND, true>(inbox, own));
    if (!row.there) return; /* threads behind the last row were needed until here */

    float *y = a.y + row.number * a.cols;
    for (int u = 0; u < row.count; u++) {
        const int64_t col = lk_row_col(row, u);
        float v[4];
        lk_unpack(v, lk_load_vec(row.data + col));
        for (int j = 0; j < 4; j++) v[j] = lk_exp(v[j] - lse);
        lk_vec<float> packed;
        lk_pack(&packed, v);
        lk_store_vec(y + col, packed);
    }
    for (int i = row.rank; i < row.split.edge; i += 1 << row.size_log2) {
        const int64_t col = lk_edge_col<float>(row.split, i);
        y[col] = lk_exp(row.data[col] - lse);
    }
}

/* Lanes until each has two vectors of a row; or a block, or a cluster. */
static lk_status softmax(softmax_args a, cudaStream_t stream)
{
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    if (error) return lk_asked_device("softmax", error);
    const int kind = lk_team_path(&device, a.rows, a.cols * (int64_t)sizeof(float));
    if (kind == LK_TEAM_WARP) a.team = lk_team_of(a.rows, lk_ceil_div(a.cols, 2 * LK_VEC<float>), 32, THREADS);
    if (kind == LK_TEAM_BLOCK) a.team = lk_team_of(a.rows, THREADS, THREADS, THREADS);
    const int64_t threads = THREADS * lk_team_cluster(&device, a.rows);
    if (kind == LK_TEAM_CLUSTER) a.team = lk_team_of(a.rows, threads, threads, THREADS);
    void (*const kernels[])(softmax_args) = {NULL, softmax_kernel<LK_TEAM_LANES>, softmax_kernel<LK_TEAM_BLOCK>,
                                             softmax_kernel<LK_TEAM_CLUSTER>};
    return lk_launch_pdl("softmax", &device, kernels[kind], a.team.grid, a.team.cluster, THREADS, 0, stream, a);
}

static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Runs it on rows that start `offset` elements behind a 16-byte boundary, and holds it against the formula in double. */
static void run(int64_t rows, int64_t cols, int offset)
{
    const size_t count = (size_t)(rows * cols), bytes = (count + (size_t)offset) * sizeof(float);
    float *host = (float *)malloc(bytes), *x = NULL, *y = NULL;
    for (size_t i = 0; i < count; i++) host[i] = logf((float)(i % (size_t)cols + 1));
    check("cudaMalloc", cudaMalloc(&x, bytes));
    check("cudaMalloc", cudaMalloc(&y, bytes));
    check("cudaMemcpy", cudaMemcpy(x + offset, host, count * sizeof(float), cudaMemcpyHostToDevice));
    check("softmax", softmax({x + offset, y + offset, rows, cols, {}}, NULL));
    check("cudaMemcpy", cudaMemcpy(host, y + offset, count * sizeof(float), cudaMemcpyDeviceToHost));

    double largest = 0.0; /* the largest relative error */
    for (size_t i = 0; i < count; i++) {
        const double expected = (double)(i % (size_t)cols + 1) / (0.5 * (double)cols * (double)(cols + 1));
        const double error = fabs((double)host[i] - expected) / expected;
        if (!(error <= largest)) largest = error;
    }
    printf("%3lld rows of %5lld, offset %d: largest relative error %.1e\n", (long long)rows, (long long)cols, offset, largest);
    failures += !(largest <= 1e-5);
    if (cols == 8) {
        printf("  row 0, times 36:");
        for (int col = 0; col < 8; col++) printf(" %.5f", 36.0 * (double)host[col]);
        printf("\n");
    }
    cudaFree(x), cudaFree(y), free(host);
}

int main(void)
{
    run(3, 8, 0);       /* one lane per row */
    run(5, 101, 1);     /* 16 lanes; rows start and end between two boundaries */
    run(3, 6001, 3);    /* a cluster; a block where there are none */
    run(300, 5000, 2); /* a block */
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
