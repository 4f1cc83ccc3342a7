// SPDX-License-Identifier: MIT
/* The divergence of two heads in three rungs: where logits are kept, and how often they are computed. A teacher has hidden states
 * of 12 numbers, a student of 8; both have a head of 50 columns. Every rung computes
 *
 *   loss[t] = KL(teacher || student) of token t,  dx = dZ weight,  dweight = dZ^T x,  with dZ = p - q
 *
 * and is held against the formula in double. A matmul here is a loop in each thread: it is what a rung leaves to cuBLASLt in lk.
 *
 *   make example-linear_kl                     on a GPU, or on the CPU where there is none
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lk/linear_kl.cuh"

LK_DEFINE_LINEAR_KL(f32)

enum { TOKENS = 24, HIDDEN = 8, TEACHER = 12, VOCAB = 50, CHUNK = 7, THREADS = 64 };

typedef struct {
    const float *x, *weight, *teacher_x, *teacher_weight;
    float *logits, *teacher; /* [tokens of a chunk, VOCAB]; rung 2: none */
    float *loss, *dx, *dweight;
    int first, tokens; /* of a chunk */
} rung_args;

__device__ float dot(const float *a, const float *b, int n)
{
    float sum = 0.0f;
    for (int d = 0; d < n; d++) sum = fmaf(a[d], b[d], sum);
    return sum;
}

/* The logits of both heads, a thread per column of a token: two matmuls. */
__global__ void logits_kernel(rung_args a)
{
    const int i = blockIdx.x * THREADS + threadIdx.x, t = i / VOCAB, j = i % VOCAB;
    if (t >= a.tokens) return;
    a.logits[i] = dot(a.x + (a.first + t) * HIDDEN, a.weight + j * HIDDEN, HIDDEN);
    a.teacher[i] = dot(a.teacher_x + (a.first + t) * TEACHER, a.teacher_weight + j * TEACHER, TEACHER);
}

/* log sum exp, by lk's running state: examples/logsumexp.cu says how. */
__device__ float lse_of(const float *logits)
{
    lk_lse state = lk_lse_empty();
    for (int j = 0; j < VOCAB; j++) {
        const float one[1] = {logits[j]};
        state = lk_lse_add(state, one);
    }
    return lk_lse_log(state);
}

/* A column's term of the loss; lk_kl_terms: examples/kl.cu. */
static __device__ float term(float q, float p, float log_ratio)
{
    const float of_q[1] = {q}, of_p[1] = {p}, d[1] = {log_ratio * LK_LOG2E};
    return lk_kl_terms(of_q, of_p, d);
}

/* Losses, and dZ in place of the student's logits; a thread per token. */
__global__ void kl_kernel(rung_args a)
{
    const int t = blockIdx.x * THREADS + threadIdx.x;
    if (t >= a.tokens) return;
    float *const x = a.logits + t * VOCAB, loss = 0.0f;
    const float *const y = a.teacher + t * VOCAB;
    const float lse_p = lse_of(x), lse_q = lse_of(y);
    for (int j = 0; j < VOCAB; j++) {
        const float log_p = x[j] - lse_p, log_q = y[j] - lse_q, p = lk_exp(log_p), q = lk_exp(log_q);
        loss += term(q, p, log_q - log_p);
        x[j] = p - q;
    }
    a.loss[a.first + t] = loss;
}

/* dx of the chunk's tokens, and its part of dweight: two matmuls. A thread per element of either. */
__global__ void gradients_kernel(rung_args a)
{
    int i = blockIdx.x * THREADS + threadIdx.x;
    float sum = 0.0f;
    if (i < a.tokens * HIDDEN) {
        for (int j = 0; j < VOCAB; j++) sum = fmaf(a.logits[i / HIDDEN * VOCAB + j], a.weight[j * HIDDEN + i % HIDDEN], sum);
        a.dx[a.first * HIDDEN + i] = sum;
        return;
    }
    i -= a.tokens * HIDDEN;
    if (i >= VOCAB * HIDDEN) return;
    for (int t = 0; t < a.tokens; t++)
        sum = fmaf(a.logits[t * VOCAB + i / HIDDEN], a.x[(a.first + t) * HIDDEN + i % HIDDEN], sum);
    a.dweight[i] += sum;
}

/* Rung 2: no logits in memory. A thread computes those of its token twice: for the sums of their exponentials, then for the loss
 * and the gradient. dweight is summed by atomics, in an order that is not the same each time. */
__global__ void again_kernel(rung_args a)
{
    const int t = blockIdx.x * THREADS + threadIdx.x;
    if (t >= a.tokens) return;
    const float *const x = a.x + t * HIDDEN, *const y = a.teacher_x + t * TEACHER;
    lk_lse p_state = lk_lse_empty(), q_state = lk_lse_empty();
    float loss = 0.0f, dx[HIDDEN] = {};
    for (int j = 0; j < VOCAB; j++) {
        const float z[1] = {dot(x, a.weight + j * HIDDEN, HIDDEN)};
        const float u[1] = {dot(y, a.teacher_weight + j * TEACHER, TEACHER)};
        p_state = lk_lse_add(p_state, z), q_state = lk_lse_add(q_state, u);
    }
    const float lse_p = lk_lse_log(p_state), lse_q = lk_lse_log(q_state);
    for (int j = 0; j < VOCAB; j++) {
        const float log_p = dot(x, a.weight + j * HIDDEN, HIDDEN) - lse_p;
        const float log_q = dot(y, a.teacher_weight + j * TEACHER, TEACHER) - lse_q, p = lk_exp(log_p), q = lk_exp(log_q);
        loss += term(q, p, log_q - log_p);
        for (int d = 0; d < HIDDEN; d++) {
            dx[d] = fmaf(p - q, a.weight[j * HIDDEN + d], dx[d]);
            atomicAdd(&a.dweight[j * HIDDEN + d], (p - q) * x[d]);
        }
    }
    for (int d = 0; d < HIDDEN; d++) a.dx[t * HIDDEN + d] = dx[d];
    a.loss[t] = loss;
}

/* CUDA's functions and lk's return 0 or an error. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Device memory with `count` numbers around 0, which `host` gets too; NULL: zeros. */
static float *make(float *host, int count)
{
    static unsigned state = 1;
    float *device = NULL;
    check("cudaMalloc", cudaMalloc(&device, (size_t)count * sizeof(float)));
    check("cudaMemset", cudaMemset(device, 0, (size_t)count * sizeof(float)));
    for (int i = 0; host && i < count; i++) {
        state = state * 1664525u + 1013904223u;
        host[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
    if (host) check("cudaMemcpy", cudaMemcpy(device, host, (size_t)count * sizeof(float), cudaMemcpyHostToDevice));
    return device;
}

static double right_loss[TOKENS], right_dx[TOKENS * HIDDEN], right_dweight[VOCAB * HIDDEN];

static void compute_right(const float *x, const float *weight, const float *teacher_x, const float *teacher_weight)
{
    for (int t = 0; t < TOKENS; t++) {
        double p[VOCAB], q[VOCAB], sum_p = 0, sum_q = 0;
        for (int j = 0; j < VOCAB; j++) {
            double z = 0, y = 0;
            for (int d = 0; d < HIDDEN; d++) z += (double)x[t * HIDDEN + d] * (double)weight[j * HIDDEN + d];
            for (int d = 0; d < TEACHER; d++) y += (double)teacher_x[t * TEACHER + d] * (double)teacher_weight[j * TEACHER + d];
            sum_p += p[j] = exp(z), sum_q += q[j] = exp(y);
        }
        for (int j = 0; j < VOCAB; j++) {
            p[j] /= sum_p, q[j] /= sum_q, right_loss[t] += q[j] * log(q[j] / p[j]);
            for (int d = 0; d < HIDDEN; d++) {
                right_dx[t * HIDDEN + d] += (p[j] - q[j]) * (double)weight[j * HIDDEN + d];
                right_dweight[j * HIDDEN + d] += (p[j] - q[j]) * (double)x[t * HIDDEN + d];
            }
        }
    }
}

static double largest_error(const float *device, const double *right, int count)
{
    static float host[TOKENS * HIDDEN + VOCAB * HIDDEN];
    double most = 0;
    check("cudaMemcpy", cudaMemcpy(host, device, (size_t)count * sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < count; i++) most = fmax(most, fabs((double)host[i] - right[i]));
    return most;
}

/* Prints a rung's line, and clears its results for the next one. */
static void show(const char *name, const rung_args *a, size_t bytes, int matmuls)
{
    const double error[] = {largest_error(a->loss, right_loss, TOKENS), largest_error(a->dx, right_dx, TOKENS * HIDDEN),
                            largest_error(a->dweight, right_dweight, VOCAB * HIDDEN)};
    printf("%-48s %9zu %8d %11.1e %9.1e %9.1e\n", name, bytes, matmuls, error[0], error[1], error[2]);
    for (int i = 0; i < 3; i++) failures += !(error[i] < 1e-5);
    check("cudaMemset", cudaMemset(a->loss, 0xff, TOKENS * sizeof(float)));
    check("cudaMemset", cudaMemset(a->dx, 0xff, TOKENS * HIDDEN * sizeof(float)));
    check("cudaMemset", cudaMemset(a->dweight, 0, VOCAB * HIDDEN * sizeof(float)));
}

/* Rungs 1 and 3: the three kernels, for `chunk` tokens at a time. */
static void run_chunks(rung_args a, int chunk)
{
    for (a.first = 0; a.first < TOKENS; a.first += chunk) {
        a.tokens = TOKENS - a.first < chunk ? TOKENS - a.first : chunk;
        check("logits", lk_launch(logits_kernel, lk_ceil_div(a.tokens * VOCAB, THREADS), THREADS, 0, NULL, a));
        check("kl", lk_launch(kl_kernel, lk_ceil_div(a.tokens, THREADS), THREADS, 0, NULL, a));
        check("gradients",
              lk_launch(gradients_kernel, lk_ceil_div((a.tokens + VOCAB) * HIDDEN, THREADS), THREADS, 0, NULL, a));
    }
}

int main(void)
{
    static float x[TOKENS * HIDDEN], weight[VOCAB * HIDDEN], teacher_x[TOKENS * TEACHER], teacher_weight[VOCAB * TEACHER];
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("linear_kl of %d tokens, hidden %d and %d, %d columns, on: %s\n", TOKENS, HIDDEN, TEACHER, VOCAB, device.name);
    rung_args a = {};
    a.x = make(x, TOKENS * HIDDEN), a.weight = make(weight, VOCAB * HIDDEN);
    a.teacher_x = make(teacher_x, TOKENS * TEACHER), a.teacher_weight = make(teacher_weight, VOCAB * TEACHER);
    a.logits = make(NULL, TOKENS * VOCAB), a.teacher = make(NULL, TOKENS * VOCAB);
    a.loss = make(NULL, TOKENS), a.dx = make(NULL, TOKENS * HIDDEN), a.dweight = make(NULL, VOCAB * HIDDEN);
    a.tokens = TOKENS;
    compute_right(x, weight, teacher_x, teacher_weight);

    printf("%-48s %9s %8s %11s %9s %9s\n", "", "bytes of", "matmuls", "largest error:", "", "");
    printf("%-48s %9s %8s %11s %9s %9s\n", "", "logits", "", "loss", "dx", "dweight");
    run_chunks(a, TOKENS);
    show("rung 1: all logits of both heads in memory", &a, 2 * TOKENS * VOCAB * sizeof(float), 4);
    check("rung 2", lk_launch(again_kernel, lk_ceil_div(TOKENS, THREADS), THREADS, 0, NULL, a));
    show("rung 2: none; each is computed twice", &a, 0, 6);
    run_chunks(a, CHUNK);
    show("rung 3: those of 7 tokens at a time", &a, 2 * CHUNK * VOCAB * sizeof(float), 4);

    static lk_linear_kl_context context;
    check("init", lk_linear_kl_init(&context));
    lk_linear_kl_args args = {};
    args.context = &context, args.x = a.x, args.weight = a.weight, args.teacher_x = a.teacher_x;
    args.teacher_weight = a.teacher_weight, args.loss = a.loss, args.dx = a.dx, args.dweight = a.dweight;
    args.tokens = TOKENS, args.hidden = HIDDEN, args.teacher_hidden = TEACHER, args.vocab = VOCAB, args.chunk_tokens = CHUNK;
    check("lk", lk_linear_kl_forward_backward_workspace_bytes_f32(&args, &args.workspace_bytes));
    check("cudaMalloc", cudaMalloc(&args.workspace, args.workspace_bytes));
    check("lk", lk_linear_kl_forward_backward_f32(&args, NULL));
    show("lk, in chunks of 7 tokens", &a, 2 * CHUNK * 64 * sizeof(float), 4); /* a row of logits begins at a multiple of 64 */
    lk_linear_kl_plan plan;
    check("lk", lk_linear_kl_forward_backward_plan_f32(&args, args.workspace_bytes, &plan));
    printf("lk's plan: %s, in %zu bytes with cuBLASLt's\n", plan.text, plan.workspace_bytes);
    args.vocab = 0; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_linear_kl_forward_backward_f32(&args, NULL);
    printf("vocab = 0: %s, %s\n", lk_status_string(status), lk_last_error());

    check("destroy", lk_linear_kl_destroy(&context));
    const float *const all[] = {a.x, a.weight, a.teacher_x, a.teacher_weight, a.logits, a.teacher, a.loss, a.dx, a.dweight};
    for (const float *one : all) cudaFree((void *)one);
    cudaFree(args.workspace);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
