// SPDX-License-Identifier: MIT
/* The gated linear unit of SwiGLU, y = silu(gate) * up, in four rungs, one idea per rung. silu(g) = g sigmoid(g) = g / (1 + e^-g).
 * gate is in turns 0 and log 3, -log 3, whose sigmoids are 1/2, 3/4 and 1/4; up counts 1, 2, 3, ...:
 *
 *   gate   0    log 3           -log 3            0    log 3 ...
 *   up     1    2               3                 4    5 ...
 *   y      0    1.5 log 3       -0.75 log 3       0    3.75 log 3 ...      log 3 = 1.0986
 *
 * and lk's backward for dy = 1: dup = silu(gate), and dgate = up (s + g s (1 - s)) with s = sigmoid(g), 1/2 at the first element.
 *
 *   make example-glu                                  on a GPU, or on the CPU where there is none
 *   make BACKEND=cpu SAN=asan example-glu             on the CPU, with symbols; then
 *   gdb build/cpu-asan/examples/glu                   and: break rung_3_kernel, run, next
 *
 * lk_launch(kernel, grid, block, smem, stream, args) is CUDA's launch in triple angle brackets, written so that it also runs on
 * the CPU.
 */
#include <math.h>
#include <stdio.h>

#include "lk/glu.cuh"

LK_DEFINE_GLU(f32)

#define ROWS 3
#define COLS 64

typedef struct {
    const float *gate, *up; /* [ROWS, COLS] */
    float *y;               /* [ROWS, COLS] */
    const float *both;      /* [ROWS, 2 COLS]: gate in the first half of a row, up in the second */
} rung_args;

/* Rung 1: the formula in two kernels, as a framework without fusion runs it. y is written, read and written again: five accesses to
 * memory per element, where three are needed. */
__global__ void rung_1_silu_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < ROWS * COLS) a.y[i] = a.gate[i] / (1.0f + expf(-a.gate[i]));
}
__global__ void rung_1_multiply_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < ROWS * COLS) a.y[i] *= a.up[i];
}

/* Rung 2: one kernel. The product stays in a register. */
__global__ void rung_2_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < ROWS * COLS) a.y[i] = a.gate[i] / (1.0f + expf(-a.gate[i])) * a.up[i];
}

/* Rung 3: 16 bytes at a time. A thread asks for four neighbours of each tensor before it waits for any, so that more bytes are on
 * their way, by fewer instructions. */
__global__ void rung_3_kernel(rung_args a)
{
    const int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= ROWS * COLS) return;
    float gate[4], up[4], y[4];
    lk_unpack(gate, lk_load_vec(a.gate + i));
    lk_unpack(up, lk_load_vec(a.up + i));
    for (int j = 0; j < 4; j++) y[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
    lk_store_n(a.y + i, y);
}

/* Rung 4: one matmul gives gate and up as the halves of a row, so nothing is copied: a row is a block's, and the second half is
 * COLS elements behind the first. */
__global__ void rung_4_kernel(rung_args a)
{
    const int row = blockIdx.x, col = 4 * threadIdx.x;
    const float *gate_row = a.both + row * 2 * COLS, *up_row = gate_row + COLS;
    float gate[4], up[4], y[4];
    lk_unpack(gate, lk_load_vec(gate_row + col));
    lk_unpack(up, lk_load_vec(up_row + col));
    for (int j = 0; j < 4; j++) y[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
    lk_store_n(a.y + row * COLS + col, y);
}

/* CUDA's functions and lk's return 0 or an error. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Prints four results and compares all with the formula in double. */
static void show(const char *name, const float *device, const float *gate, const float *up)
{
    static float y[ROWS * COLS];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(y, device, sizeof y, cudaMemcpyDeviceToHost));
    printf("%-44s %9.5f %9.5f %9.5f %9.5f\n", name, (double)y[0], (double)y[1], (double)y[2], (double)y[4]);
    for (int i = 0; i < ROWS * COLS; i++) {
        const double right = (double)gate[i] / (1 + exp(-(double)gate[i])) * (double)up[i];
        failures += !(fabs((double)y[i] - right) <= 1e-6 * fabs(right));
    }
}

int main(void)
{
    static float gate[ROWS * COLS], up[ROWS * COLS], both[ROWS * 2 * COLS], dy[ROWS * COLS], dgate[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++) {
        gate[i] = i % 3 == 0 ? 0.0f : i % 3 == 1 ? logf(3.0f) : -logf(3.0f);
        up[i] = (float)(i + 1), dy[i] = 1.0f;
        both[i / COLS * 2 * COLS + i % COLS] = gate[i], both[i / COLS * 2 * COLS + COLS + i % COLS] = up[i];
    }
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("silu(gate) * up of %d rows of %d on: %s\n", ROWS, COLS, device.name);

    float *memory[6];
    const size_t bytes = sizeof gate;
    for (int i = 0; i < 6; i++) check("cudaMalloc", cudaMalloc(&memory[i], 2 * bytes));
    check("cudaMemcpy", cudaMemcpy(memory[0], gate, bytes, cudaMemcpyHostToDevice));
    check("cudaMemcpy", cudaMemcpy(memory[1], up, bytes, cudaMemcpyHostToDevice));
    check("cudaMemcpy", cudaMemcpy(memory[3], both, sizeof both, cudaMemcpyHostToDevice));
    check("cudaMemcpy", cudaMemcpy(memory[4], dy, bytes, cudaMemcpyHostToDevice));
    const rung_args args = {memory[0], memory[1], memory[2], memory[3]};

    printf("%-44s %9s %9s %9s %9s\n", "element", "0", "1", "2", "4");
    printf("%-44s %9.5f %9.5f %9.5f %9.5f\n", "expected", 0.0, 1.5 * log(3.0), -0.75 * log(3.0), 3.75 * log(3.0));
    check("rung 1", lk_launch(rung_1_silu_kernel, 2, 128, 0, NULL, args));
    check("rung 1", lk_launch(rung_1_multiply_kernel, 2, 128, 0, NULL, args));
    show("rung 1: two kernels", memory[2], gate, up);
    check("rung 2", lk_launch(rung_2_kernel, 2, 128, 0, NULL, args));
    show("rung 2: one kernel", memory[2], gate, up);
    check("rung 3", lk_launch(rung_3_kernel, 1, 64, 0, NULL, args));
    show("rung 3: 16 bytes at a time", memory[2], gate, up);
    check("rung 4", lk_launch(rung_4_kernel, ROWS, COLS / 4, 0, NULL, args));
    show("rung 4: the halves of a row", memory[2], gate, up);

    lk_glu_args call = {}; /* silu */
    call.gate = memory[3], call.up = memory[3] + COLS, call.gate_stride = call.up_stride = 2 * COLS;
    call.y = memory[2], call.rows = ROWS, call.cols = COLS;
    check("lk", lk_glu_forward_f32(&call, NULL));
    show("lk, of the halves of a row", memory[2], gate, up);

    call.dy = memory[4], call.dgate = memory[5]; /* dup NULL: it is not wanted */
    check("lk", lk_glu_backward_f32(&call, NULL));
    check("lk", cudaMemcpy(dgate, memory[5], bytes, cudaMemcpyDeviceToHost));
    printf("lk's gradient of gate, elements 0 to 2:");
    for (int i = 0; i < 3; i++) {
        const double s = 1 / (1 + exp(-(double)gate[i])), right = (double)up[i] * (s + (double)gate[i] * s * (1 - s));
        printf(" %.6f", (double)dgate[i]);
        failures += !(fabs((double)dgate[i] - right) <= 1e-6 * fabs(right));
    }

    call.activation = 7; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_glu_forward_f32(&call, NULL);
    printf("\nactivation = 7: %s, %s\n", lk_status_string(status), lk_last_error());

    for (int i = 0; i < 6; i++) cudaFree(memory[i]);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
