// SPDX-License-Identifier: MIT
/* Rotary position embedding in three rungs, one idea per rung. A head has 4 features, two pairs (x[0], x[2]) and (x[1], x[3]); token t
 * turns the first pair by t pi / 2 and the second by t pi / 4. x is (1, 1, 0, 0) everywhere:
 *
 *   token 0   (1, 1, 0, 0)                  not turned
 *   token 1   (0, 0.7071, 1, 0.7071)        (cos 90, cos 45, sin 90, sin 45)
 *   token 2   (-1, 0, 0, 1)
 *   token 3   (0, -0.7071, -1, 0.7071)
 *
 * The dot product of two tokens depends on their distance alone: tokens 0 and 1, and tokens 2 and 3, have 0.7071.
 * lk's backward turns the other way, so of y it gives x.
 *
 *   make example-rope                                 on a GPU, or on the CPU where there is none
 *   make BACKEND=cpu SAN=asan example-rope            on the CPU, with symbols; then
 *   gdb build/cpu-asan/examples/rope                  and: break rung_2_kernel, run, next
 *
 * lk_launch(kernel, grid, block, smem, stream, args) is CUDA's launch in triple angle brackets, written so that it also runs on
 * the CPU.
 */
#include <math.h>
#include <stdio.h>

#include "lk/rope.cuh"

LK_DEFINE_ROPE(f32)

#define TOKENS 4
#define HEADS 2
#define DIM 4
#define PAIRS (DIM / 2)

typedef struct {
    const float *x;        /* [TOKENS, HEADS, DIM] */
    float *y;              /* [TOKENS, HEADS, DIM] */
    const float *inv_freq; /* [PAIRS] */
} rung_args;

/* Rung 1: the formula, a thread for each feature. Both features of a pair are read twice, and each thread computes a cosine and a
 * sine. */
__global__ void rung_1_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= TOKENS * HEADS * DIM) return;
    const int token = i / (HEADS * DIM), f = i % DIM, pair = f % PAIRS;
    const float phi = (float)token * a.inv_freq[pair];
    if (f < PAIRS) a.y[i] = a.x[i] * cosf(phi) - a.x[i + PAIRS] * sinf(phi);
    else a.y[i] = a.x[i] * cosf(phi) + a.x[i - PAIRS] * sinf(phi);
}

/* Rung 2: a thread for each pair. It reads both features before it writes either, so y may be x. */
__global__ void rung_2_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= TOKENS * HEADS * PAIRS) return;
    const int head = i / PAIRS, pair = i % PAIRS, at = head * DIM + pair;
    const float phi = (float)(head / HEADS) * a.inv_freq[pair], c = cosf(phi), s = sinf(phi);
    const float x = a.x[at], partner = a.x[at + PAIRS];
    a.y[at] = x * c - partner * s, a.y[at + PAIRS] = partner * c + x * s;
}

/* Rung 3: a thread for each pair of a token, in all heads: the angle is that of the token, so its cosine and sine are computed once.
 * lk_phase keeps the angle as a part of a turn: at position 10^6 it is as exact as at 1, where a float product has lost 4 digits. */
__global__ void rung_3_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= TOKENS * PAIRS) return;
    const int token = i / PAIRS, pair = i % PAIRS;
    const uint32_t phase = lk_phase(lk_make_turn(__float_as_uint(a.inv_freq[pair])), token);
    const float phi = (float)(int)phase * LK_PHASE_UNIT, c = lk_cos(phi), s = lk_sin(phi);
    for (int head = 0; head < HEADS; head++) {
        const int at = (token * HEADS + head) * DIM + pair;
        const float x = a.x[at], partner = a.x[at + PAIRS];
        a.y[at] = x * c - partner * s, a.y[at + PAIRS] = partner * c + x * s;
    }
}

/* CUDA's functions and lk's return 0 or an error. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Prints the first head of token 1 and compares all with the formula in double. */
static void show(const char *name, const float *device)
{
    float y[TOKENS * HEADS * DIM];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(y, device, sizeof y, cudaMemcpyDeviceToHost));
    const float *one = y + HEADS * DIM;
    printf("%-44s %8.4f %8.4f %8.4f %8.4f\n", name, (double)one[0], (double)one[1], (double)one[2], (double)one[3]);
    for (int i = 0; i < TOKENS * HEADS * DIM; i++) {
        const double phi = (double)(i / (HEADS * DIM)) * 3.14159265358979323846 / (i % PAIRS ? 4 : 2);
        failures += !(fabs((double)y[i] - (i % DIM < PAIRS ? cos(phi) : sin(phi))) <= 1e-6);
    }
}

int main(void)
{
    float x[TOKENS * HEADS * DIM], y[TOKENS * HEADS * DIM];
    const float inv_freq[PAIRS] = {1.57079633f, 0.785398163f};
    for (int i = 0; i < TOKENS * HEADS * DIM; i++) x[i] = i % DIM < PAIRS ? 1.0f : 0.0f;
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("rotary position embedding of %d tokens, %d heads of %d on: %s\n", TOKENS, HEADS, DIM, device.name);

    float *memory[3];
    for (int i = 0; i < 3; i++) check("cudaMalloc", cudaMalloc(&memory[i], sizeof x));
    check("cudaMemcpy", cudaMemcpy(memory[0], x, sizeof x, cudaMemcpyHostToDevice));
    check("cudaMemcpy", cudaMemcpy(memory[2], inv_freq, sizeof inv_freq, cudaMemcpyHostToDevice));
    const rung_args args = {memory[0], memory[1], memory[2]};

    printf("%-44s %8.4f %8.4f %8.4f %8.4f\n", "expected of token 1", 0.0, 0.7071, 1.0, 0.7071);
    check("rung 1", lk_launch(rung_1_kernel, 1, 32, 0, NULL, args));
    show("rung 1: a thread for each feature", memory[1]);
    check("rung 2", lk_launch(rung_2_kernel, 1, 32, 0, NULL, args));
    show("rung 2: a thread for each pair", memory[1]);
    check("rung 3", lk_launch(rung_3_kernel, 1, 32, 0, NULL, args));
    show("rung 3: angles once for all heads", memory[1]);

    lk_rope_args call = {}; /* q alone; k would be turned in the same launch */
    call.q = memory[0], call.q_out = memory[1], call.inv_freq = memory[2];
    call.batch = 1, call.tokens = TOKENS, call.q_heads = HEADS, call.dim = DIM;
    check("lk", lk_rope_forward_f32(&call, NULL));
    show("lk", memory[1]);

    call.dq_out = call.dq = memory[1]; /* in place */
    check("lk", lk_rope_backward_f32(&call, NULL));
    check("lk", cudaMemcpy(y, memory[1], sizeof y, cudaMemcpyDeviceToHost));
    printf("%-44s %8.4f %8.4f %8.4f %8.4f\n", "lk's backward of that: x again", (double)y[8], (double)y[9], (double)y[10], (double)y[11]);
    for (int i = 0; i < TOKENS * HEADS * DIM; i++) failures += !(fabs((double)y[i] - (double)x[i]) <= 1e-6);

    call.rotary = 3; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_rope_forward_f32(&call, NULL);
    printf("rotary = 3: %s, %s\n", lk_status_string(status), lk_last_error());

    for (int i = 0; i < 3; i++) cudaFree(memory[i]);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
