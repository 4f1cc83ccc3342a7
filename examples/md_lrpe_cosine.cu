// SPDX-License-Identifier: MIT
/* md_lrpe_cosine in two rungs and lk. A grid of 2 x 3 tokens, one token before it, two heads of four features, a batch of two.
 * e = 2: features 0 and 1 turn with the row r of the grid, features 2 and 3 with its column c. theta is pi / 2 for the even
 * features and pi for the odd ones, in head 1 twice that, so that the angles are multiples of pi / 2 and the answer can be
 * read:
 *
 *   x = 1 2 3 4 at token (r, c), head 0:   angles r pi/2, r pi, c pi/2, c pi
 *   token (1, 1)   y = cos: 0 -2 0 -4   sin: 1 0 3 0
 *   token (1, 2)   y = cos: 0 -2 -3 4   sin: 1 0 0 0
 *   the prefix     y = 1 2 3 4  0 0 0 0
 *
 * lk's backward of that y gives x again: dx = dy[f] cos + dy[dim + f] sin = x (cos^2 + sin^2).
 *
 *   make example-md_lrpe_cosine                            on a GPU, or on the CPU where there is none
 *   make BACKEND=cpu SAN=asan example-md_lrpe_cosine       on the CPU, with symbols; then
 *   gdb build/cpu-asan/examples/md_lrpe_cosine             and: break rung_2_kernel, run, next
 *
 * lk_launch(kernel, grid, block, smem, stream, args) is CUDA's launch in triple angle brackets, spelt so that it also runs on
 * the CPU.
 */
#include <math.h>
#include <stdio.h>

#include "lk/md_lrpe_cosine.cuh"

LK_DEFINE_MD_LRPE_COSINE(f32)

#define BATCH 2
#define HEADS 2
#define ROWS 2
#define COLS 3
#define PREFIX 1
#define TOKENS (PREFIX + ROWS * COLS)
#define DIM 4
#define E 2 /* features an axis */
#define N (BATCH * HEADS * TOKENS * DIM)

typedef struct {
    const float *x, *theta; /* [BATCH, HEADS, TOKENS, DIM], [HEADS, E] */
    float *y;               /* [BATCH, HEADS, TOKENS, 2 DIM] */
} rung_args;

/* The position on the axis of feature f: the row of the grid for the first E features, the column for the others. */
__device__ int position(int token, int f)
{
    const int cell = token - PREFIX;
    return f / E == 0 ? cell / COLS : cell % COLS;
}

/* Rung 1: the formula, one thread per element of x. Every thread computes a cosine and a sine for the two numbers it writes. */
__global__ void rung_1_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    const int f = i % DIM, row = i / DIM, token = row % TOKENS, head = row / TOKENS % HEADS;
    const float phi = token < PREFIX ? 0.0f : (float)position(token, f) * a.theta[head * E + f % E];
    a.y[row * 2 * DIM + f] = a.x[i] * cosf(phi);
    a.y[row * 2 * DIM + DIM + f] = a.x[i] * sinf(phi);
}

/* Rung 2: the angle depends on (head, token, feature) and not on the batch, so one thread takes all batches of a feature and
 * computes its cosine and sine once. That is what makes the op as fast as a copy: its memory traffic hides the rest. */
__global__ void rung_2_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N / BATCH) return;
    const int f = i % DIM, row = i / DIM, token = row % TOKENS, head = row / TOKENS;
    const float phi = token < PREFIX ? 0.0f : (float)position(token, f) * a.theta[head * E + f % E];
    const float cos_of = cosf(phi), sin_of = sinf(phi);
    for (int batch = 0; batch < BATCH; batch++) {
        const int at = batch * HEADS * TOKENS + row;
        const float x = a.x[at * DIM + f];
        a.y[at * 2 * DIM + f] = x * cos_of;
        a.y[at * 2 * DIM + DIM + f] = x * sin_of;
    }
}

/* CUDA's calls and lk's return 0 or what went wrong. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Prints two tokens of head 0 and holds all of y against the formula on the host, whose cosines are whole numbers. */
static void show(const char *name, rung_args a)
{
    static float y[2 * N];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(y, a.y, sizeof y, cudaMemcpyDeviceToHost));
    printf("%-34s", name);
    for (int k = 0; k < 2; k++) {
        printf(k ? "   (1, 2):" : "(1, 1):");
        for (int f = 0; f < 2 * DIM; f++) printf(" %2ld", lroundf(y[(PREFIX + COLS + 1 + k) * 2 * DIM + f]));
    }
    printf("\n");
    for (int i = 0; i < N; i++) {
        const int f = i % DIM, row = i / DIM, token = row % TOKENS, head = row / TOKENS % HEADS, cell = token - PREFIX;
        const int s = token < PREFIX ? 0 : f / E == 0 ? cell / COLS : cell % COLS, quarters = s * (f % E + 1) * (head + 1) % 4;
        const float x = (float)(f + 1), cosine[] = {1, 0, -1, 0}, sine[] = {0, 1, 0, -1};
        failures += !(fabsf(y[row * 2 * DIM + f] - x * cosine[quarters]) <= 4e-6f);
        failures += !(fabsf(y[row * 2 * DIM + DIM + f] - x * sine[quarters]) <= 4e-6f);
    }
    check(name, cudaMemset(a.y, 0xff, sizeof y)); /* the next rung starts from NaN */
}

int main(void)
{
    static float x[N], dx[N];
    const float quarter = 1.57079632679f, theta[HEADS * E] = {quarter, 2 * quarter, 2 * quarter, 4 * quarter};
    for (int i = 0; i < N; i++) x[i] = (float)(i % DIM + 1);
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("md_lrpe_cosine of %d x %d tokens on: %s\n", ROWS, COLS, device.name);

    float *x_device = NULL, *theta_device = NULL, *y = NULL, *dx_device = NULL;
    check("cudaMalloc", cudaMalloc(&x_device, sizeof x));
    check("cudaMalloc", cudaMalloc(&theta_device, sizeof theta));
    check("cudaMalloc", cudaMalloc(&y, 2 * sizeof x));
    check("cudaMalloc", cudaMalloc(&dx_device, sizeof x));
    check("cudaMemcpy", cudaMemcpy(x_device, x, sizeof x, cudaMemcpyHostToDevice));
    check("cudaMemcpy", cudaMemcpy(theta_device, theta, sizeof theta, cudaMemcpyHostToDevice));
    check("cudaMemset", cudaMemset(y, 0xff, 2 * sizeof x));
    const rung_args args = {x_device, theta_device, y};

    printf("%-34s(1, 1):  0 -2  0 -4  1  0  3  0   (1, 2):  0 -2 -3  4  1  0  0  0\n", "expected, cosines then sines");
    check("rung 1", lk_launch(rung_1_kernel, (N + 31) / 32, 32, 0, NULL, args));
    show("rung 1: the formula", args);
    check("rung 2", lk_launch(rung_2_kernel, (N / BATCH + 31) / 32, 32, 0, NULL, args));
    show("rung 2: an angle serves the batch", args);

    lk_md_lrpe_cosine_args call = {};
    call.x = x_device, call.theta = theta_device, call.y = y;
    call.batch = BATCH, call.heads = HEADS, call.dim = DIM, call.prefix = PREFIX;
    call.axes = 2, call.shape[0] = ROWS, call.shape[1] = COLS;
    check("lk", lk_md_lrpe_cosine_forward_f32(&call, NULL));
    show("lk", args);

    check("lk", lk_md_lrpe_cosine_forward_f32(&call, NULL));
    call.dy = y, call.dx = dx_device; /* the same struct serves both directions */
    check("lk", lk_md_lrpe_cosine_backward_f32(&call, NULL));
    check("lk", cudaMemcpy(dx, dx_device, sizeof dx, cudaMemcpyDeviceToHost));
    printf("lk's dx of that y, token (1, 2):");
    for (int f = 0; f < DIM; f++) printf(" %.5f", (double)dx[(PREFIX + COLS + 2) * DIM + f]);
    for (int i = 0; i < N; i++) failures += !(fabsf(dx[i] - x[i]) <= 8e-6f);

    /* A million tokens on, a float product of position and theta is off by up to 0.06; lk's angle is right. One token, decoded
     * by its offset. */
    call.prefix = 0, call.axes = 1, call.shape[0] = 1, call.offset[0] = 1000001, call.batch = 1;
    check("lk", lk_md_lrpe_cosine_forward_f32(&call, NULL));
    float far[2 * DIM];
    check("lk", cudaMemcpy(far, y, sizeof far, cudaMemcpyDeviceToHost));
    const double phi = 1000001.0 * (double)quarter;
    printf("\nposition 1000001: cos %.7f, sin %.7f; exactly %.7f, %.7f\n", (double)far[0], (double)far[DIM], cos(phi),
           sin(phi));
    failures += !(fabs((double)far[0] - cos(phi)) <= 1e-6 && fabs((double)far[DIM] - sin(phi)) <= 1e-6);

    call.axes = 9; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_md_lrpe_cosine_forward_f32(&call, NULL);
    printf("axes = 9: %s, %s\n", lk_status_string(status), lk_last_error());

    cudaFree(x_device), cudaFree(theta_device), cudaFree(y), cudaFree(dx_device);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
