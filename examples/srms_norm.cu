// SPDX-License-Identifier: MIT
/* srms_norm in four rungs, one idea per rung. The first two compute y = x / sqrt(mean(x^2) + eps), the others its gradient, of the same
 * four rows of 8, which repeat two values, so that the root mean square is a whole number (5, since (1 + 49) / 2 = 25):
 *
 *           x            root mean square    y = x / that
 *   row 0     1,    7      5                 0.2, 1.4
 *   row 1    -2,   -2      2                  -1,  -1
 *   row 2   100,  700    500                 0.2, 1.4    100 times row 0: the same y
 *   row 3     0,    0      0                   0,   0    eps = 1e-6 keeps 0 / 0 away
 *
 * Then lk, with one more option each time. Rungs 3 and 4 compute what stands at backward:
 *
 *   weight 10, 100       y = 2, 140;  -10, -100;  2, 140;  0, 0
 *   residual             (6, -6), (3, 9), (600, -600), (1, 1) make the sums s = (7, 1), (1, 7), (700, 100), (1, 1), which
 *                        are handed on, and y = s / (5, 5, 500, 1) = 1.4, 0.2;  0.2, 1.4;  1.4, 0.2;  1, 1
 *   backward             of the sum of all weighted y. With h = x / rms and g = weight, dx = (g - h mean(g h)) / rms:
 *                        row 0   h = 0.2, 1.4, mean(g h) = (2 + 140) / 2 = 71:   dx = -0.84, 0.12
 *                        row 1   h = -1, -1, mean(g h) = -55:                    dx = -22.5, 22.5
 *                        row 2   as row 0, a hundredth:                          dx = -0.0084, 0.0012
 *                        row 3   g / sqrt(eps), eps being all there is:          dx = 10000, 100000
 *                        dweight = sum of h over the rows = -0.6, 1.8
 *
 *   make example-srms_norm                            on a GPU, or on the CPU where there is none
 *   make BACKEND=cpu SAN=asan example-srms_norm       on the CPU, with symbols; then
 *   gdb build/cpu-asan/examples/srms_norm             and: break rung_2_kernel, run, next
 *
 * lk_launch(kernel, grid, block, smem, stream, args) is CUDA's launch in triple angle brackets, written so that it also runs
 * on the CPU.
 */
#include <math.h>
#include <stdio.h>

#include "lk/srms_norm.cuh"

LK_DEFINE_SRMS_NORM(f32)

#define ROWS 4
#define COLS 8
#define EPS 1e-6f

typedef struct {
    const float *x; /* [ROWS, COLS] */
    float *y;       /* [ROWS, COLS] */
} rung_args;

/* Rung 1: the formula, one thread per row. Neighbouring threads read neighbouring rows, so each load of a warp touches 32 lines
 * of memory and uses 4 bytes of each. And 4096 rows are too few threads to fill a GPU. */
__global__ void rung_1_kernel(rung_args a)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= ROWS) return;
    float sum = 0.0f;
    for (int col = 0; col < COLS; col++) sum += a.x[row * COLS + col] * a.x[row * COLS + col];
    const float rstd = 1.0f / sqrtf(sum / COLS + EPS);
    for (int col = 0; col < COLS; col++) a.y[row * COLS + col] = a.x[row * COLS + col] * rstd;
}

/* Rung 2: a warp per row. Neighbouring lanes read neighbouring elements, so a warp's load is one line of memory. Then five
 * exchanges add the lanes' sums, and every lane has the total. x is still read twice: lk keeps the row in
 * registers, loads 16 bytes at a time, and gives long rows a block or a cluster of blocks. */
__global__ void rung_2_kernel(rung_args a)
{
    const int row = blockIdx.x, lane = threadIdx.x;
    float sum = 0.0f;
    for (int col = lane; col < COLS; col += 32) sum += a.x[row * COLS + col] * a.x[row * COLS + col];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const float rstd = 1.0f / sqrtf(sum / COLS + EPS);
    for (int col = lane; col < COLS; col += 32) a.y[row * COLS + col] = a.x[row * COLS + col] * rstd;
}

/* The gradient of the sum of all weighted y: dy is 1. */
typedef struct {
    const float *x, *weight;      /* [ROWS, COLS], [COLS] */
    float *rstd, *dx, *dweight;   /* [ROWS], [ROWS, COLS], [COLS] */
} backward_args;

/* Rung 3: dx, a warp per row. With h = x rstd and g = weight, dx = rstd (g - h mean(g h)): an element needs two sums over its row, that
 * of x^2 and that of g h. h needs rstd, which is not known before the first sum is complete; but mean(g h) is rstd mean(g x), so one
 * reading has both. Their ten exchanges do not wait for each other. */
__global__ void rung_3_kernel(backward_args a)
{
    const int row = blockIdx.x, lane = threadIdx.x;
    float squares = 0.0f, dot = 0.0f;
    for (int col = lane; col < COLS; col += 32) {
        const float x = a.x[row * COLS + col];
        squares += x * x, dot += a.weight[col] * x;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        dot += __shfl_xor_sync(0xffffffffu, dot, offset);
    }
    const float rstd = 1.0f / sqrtf(squares / COLS + EPS), mean = rstd * dot / COLS;
    for (int col = lane; col < COLS; col += 32)
        a.dx[row * COLS + col] = rstd * (a.weight[col] - a.x[row * COLS + col] * rstd * mean);
    if (lane == 0) a.rstd[row] = rstd;
}

/* Rung 4: dweight, the sum of h over all rows, a thread per column. Neighbouring threads read neighbouring elements, and the order of
 * a column's sum is always the same, so the bits are too: atomic additions of floats would not have that. But x is read again, 4096
 * columns are too few threads, and each adds up all rows, one after another. lk's rows' kernel keeps the sums of its rows in registers
 * while it computes dx. Each of its blocks writes them once, and a second kernel adds the blocks' sums in a fixed order. */
__global__ void rung_4_kernel(backward_args a)
{
    const int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= COLS) return;
    float sum = 0.0f;
    for (int row = 0; row < ROWS; row++) sum += a.x[row * COLS + col] * a.rstd[row];
    a.dweight[col] = sum;
}

/* CUDA's calls and lk's return 0 or what went wrong. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Prints the two values that each of `rows` rows on the device repeats, and holds the whole rows against the comment above. A
 * row's error is measured against the largest of its terms; for y that is y, in dx terms cancel. */
static void show(const char *name, const float *device, int rows, const float (*expected)[2], const float *largest)
{
    float host[ROWS][COLS];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(host, device, (size_t)rows * sizeof host[0], cudaMemcpyDeviceToHost));
    printf("%-38s", name);
    for (int row = 0; row < rows; row++) {
        printf(" %10.6g %10.6g", (double)host[row][0], (double)host[row][1]);
        for (int col = 0; col < COLS; col++) {
            const float right = expected[row][col % 2], limit = 1e-6f * (largest ? largest[row] : fabsf(right));
            if (!(fabsf(host[row][col] - right) <= limit)) failures++;
        }
    }
    printf("\n");
}

static const float x_pair[ROWS][2] = {{1, 7}, {-2, -2}, {100, 700}, {0, 0}};
static const float residual_pair[ROWS][2] = {{6, -6}, {3, 9}, {600, -600}, {1, 1}};
static const float weight_pair[1][2] = {{10, 100}};

static const float y_right[ROWS][2] = {{0.2f, 1.4f}, {-1, -1}, {0.2f, 1.4f}, {0, 0}};
static const float weighted_right[ROWS][2] = {{2, 140}, {-10, -100}, {2, 140}, {0, 0}};
static const float sum_right[ROWS][2] = {{7, 1}, {1, 7}, {700, 100}, {1, 1}};
static const float sum_y_right[ROWS][2] = {{1.4f, 0.2f}, {0.2f, 1.4f}, {1.4f, 0.2f}, {1, 1}};
static const float dx_right[ROWS][2] = {{-0.84f, 0.12f}, {-22.5f, 22.5f}, {-0.0084f, 0.0012f}, {10000, 100000}};
static const float dx_largest[ROWS] = {20, 50, 0.2f, 100000}; /* the largest weight / rms */
static const float dweight_right[1][2] = {{-0.6f, 1.8f}}, dweight_largest[1] = {1.4f};

/* Device memory of `rows` rows that repeat the given pairs; of zeros without pairs. */
static float *rows_of(const float (*pair)[2], int rows)
{
    float host[ROWS][COLS] = {};
    for (int row = 0; pair && row < rows; row++)
        for (int col = 0; col < COLS; col++) host[row][col] = pair[row][col % 2];
    float *device = NULL;
    check("cudaMalloc", cudaMalloc(&device, (size_t)rows * sizeof host[0]));
    check("cudaMemcpy", cudaMemcpy(device, host, (size_t)rows * sizeof host[0], cudaMemcpyHostToDevice));
    return device;
}

int main(void)
{
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("srms_norm of %d rows of %d on: %s\n", ROWS, COLS, device.name);

    float *x = rows_of(x_pair, ROWS), *residual = rows_of(residual_pair, ROWS), *weight = rows_of(weight_pair, 1);
    float *y = rows_of(NULL, ROWS), *residual_out = rows_of(NULL, ROWS), *dx = rows_of(NULL, ROWS), *dweight = rows_of(NULL, 1);
    float *rstd = rows_of(NULL, 1); /* more than [ROWS] */
    const rung_args args = {x, y};

    printf("%-38s %21s %21s %21s %21s\n", "", "row 0", "row 1", "row 2", "row 3");
    show("x", x, ROWS, x_pair, NULL);
    check("rung 1", lk_launch(rung_1_kernel, 1, 32, 0, NULL, args));
    show("rung 1: the formula, a thread per row", y, ROWS, y_right, NULL);
    check("rung 2", lk_launch(rung_2_kernel, ROWS, 32, 0, NULL, args));
    show("rung 2: a warp per row", y, ROWS, y_right, NULL);
    const backward_args back = {x, weight, rstd, dx, dweight};
    check("rung 3", lk_launch(rung_3_kernel, ROWS, 32, 0, NULL, back));
    show("rung 3: dx, two sums in one reading", dx, ROWS, dx_right, dx_largest);
    check("rung 4", lk_launch(rung_4_kernel, 1, 32, 0, NULL, back));
    show("rung 4: dweight, a thread per column", dweight, 1, dweight_right, dweight_largest);
    check("cudaMemset", cudaMemset(dx, 0, ROWS * COLS * sizeof(float))), check("cudaMemset", cudaMemset(dweight, 0, COLS * sizeof(float)));

    lk_srms_norm_args a = {};
    a.x = x, a.y = y, a.rows = ROWS, a.cols = COLS, a.eps = EPS;
    check("lk", lk_srms_norm_forward_f32(&a, NULL));
    show("lk: SRMSNorm", y, ROWS, y_right, NULL);

    a.residual = residual, a.residual_out = residual_out;
    check("lk", lk_srms_norm_forward_f32(&a, NULL));
    show("lk: with a residual, the sum", residual_out, ROWS, sum_right, NULL);
    show("lk: with a residual, y", y, ROWS, sum_y_right, NULL);

    a.residual = NULL, a.residual_out = NULL, a.weight = weight, a.rstd = rstd;
    check("lk", lk_srms_norm_forward_f32(&a, NULL));
    show("lk: with a weight, that is RMSNorm", y, ROWS, weighted_right, NULL);

    a.dx = dx, a.dweight = dweight; /* backward reads x and rstd; dy stays NULL: 1, for the gradient of the sum of y */
    check("lk", lk_srms_norm_backward_workspace_bytes_f32(&a, &a.workspace_bytes));
    check("cudaMalloc", a.workspace_bytes ? cudaMalloc(&a.workspace, a.workspace_bytes) : cudaSuccess);
    check("lk", lk_srms_norm_backward_f32(&a, NULL));
    show("lk: its gradient dx", dx, ROWS, dx_right, dx_largest);
    show("lk: its gradient dweight", dweight, 1, dweight_right, dweight_largest);

    a.cols = 0; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_srms_norm_forward_f32(&a, NULL);
    printf("cols = 0: %s, %s\n", lk_status_string(status), lk_last_error());

    cudaFree(x), cudaFree(residual), cudaFree(weight), cudaFree(y), cudaFree(residual_out), cudaFree(dx), cudaFree(dweight);
    cudaFree(rstd), cudaFree(a.workspace);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
