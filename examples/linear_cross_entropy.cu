// SPDX-License-Identifier: MIT
/* linear_cross_entropy in three rungs, one idea per rung: the loss of logits = x weight^T, and its gradients, for 4 tokens of 2
 * numbers and a vocabulary of 4. The weights are logarithms, so that the exponentials of the logits are whole numbers:
 *
 *   weight[0] = log 1, log 4         token 0   x = 1, 0    exponentials 1 2 3 4    target 3    loss = log 10/4 = 0.916291
 *   weight[1] = log 2, log 1         token 1   x = 0, 1                 4 1 1 2           0           log  8/4 = 0.693147
 *   weight[2] = log 3, log 1         token 2   x = 1, 1                 4 2 3 8           1           log 17/2 = 2.140066
 *   weight[3] = log 4, log 2         token 3   x = 2, 2                                ignored        0
 *
 *   dlogits    p, and 1 less at the target:  1 2 3 -6 of 10;  -4 1 1 2 of 8;  4 -15 3 8 of 17;  0 0 0 0
 *   dx         = dlogits weight, a row per token, times 10, 8, 17, 1:
 *              3 log 3 - 10 log 2, -4 log 2;   5 log 2 + log 3, -6 log 2;   log 2 + 3 log 3, 16 log 2;   0, 0
 *   dweight    = dlogits^T x. Column 0 is rows 0 and 2 of dlogits:   1/10 + 4/17 and so on, times 170:   57 -116  81 -22
 *              column 1 is rows 1 and 2:                            -4/8 + 4/17 and so on, times 136:  -36 -103  41  98
 *   mean       three tokens count: log(10/4 8/4 17/2) / 3 = log(42.5) / 3 = 1.249835, and a third of these gradients
 *
 *   make example-linear_cross_entropy                        on a GPU, or on the CPU where there is none
 *   make BACKEND=cpu SAN=asan example-linear_cross_entropy   on the CPU, with symbols; then
 *   gdb build/cpu-asan/examples/linear_cross_entropy         and: break losses_kernel, run, next
 *
 * lk_launch(kernel, grid, block, smem, stream, args) is CUDA's launch in triple angle brackets, written so that it also runs
 * on the CPU.
 */
#include <math.h>
#include <stdio.h>

#include "lk/linear_cross_entropy.cuh"

LK_DEFINE_LINEAR_CROSS_ENTROPY(f32)

#define TOKENS 4
#define HIDDEN 2
#define VOCAB 4
#define IGNORED (-100)

typedef struct {
    const float *x;        /* [TOKENS, HIDDEN] */
    const float *weight;   /* [VOCAB, HIDDEN] */
    const int64_t *target; /* [TOKENS] */
    float *logits;         /* [tokens, VOCAB], overwritten by dlogits */
    float *loss;           /* [TOKENS] */
    float *dx;             /* [TOKENS, HIDDEN] */
    float *dweight;        /* [VOCAB, HIDDEN] */
    int first, tokens;     /* which tokens the logits are of */
} rung_args;

/* A thread owns a logit. This product and the two of the gradients take nearly all of the time; lk leaves them to cuBLASLt. */
__global__ void logits_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x, token = i / VOCAB, col = i % VOCAB;
    if (token >= a.tokens) return;
    float sum = 0.0f;
    for (int d = 0; d < HIDDEN; d++) sum += a.x[(a.first + token) * HIDDEN + d] * a.weight[col * HIDDEN + d];
    a.logits[i] = sum;
}

/* A thread owns a token: its loss, and dlogits over its logits. lk has cross_entropy.cuh's kernels for this, where a block
 * reads a row once. examples/cross_entropy.cu explains them, and why the target's gradient is minus the sum of the others. */
__global__ void losses_kernel(rung_args a)
{
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= a.tokens) return;
    float *row = a.logits + token * VOCAB, max = -INFINITY, sum = 0.0f, others = 0.0f;
    const int64_t y = a.target[a.first + token];
    for (int col = 0; col < VOCAB; col++) max = fmaxf(max, row[col]);
    for (int col = 0; col < VOCAB; col++) sum += expf(row[col] - max);
    a.loss[a.first + token] = y == IGNORED ? 0.0f : (max - row[y]) + logf(sum);
    for (int col = 0; col < VOCAB; col++) {
        row[col] = y == IGNORED ? 0.0f : expf(row[col] - max) / sum;
        others += col == y ? 0.0f : row[col];
    }
    if (y != IGNORED) row[y] = -others;
}

/* A thread owns an element of dx. */
__global__ void dx_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x, token = i / HIDDEN, d = i % HIDDEN;
    if (token >= a.tokens) return;
    float sum = 0.0f;
    for (int col = 0; col < VOCAB; col++) sum += a.logits[token * VOCAB + col] * a.weight[col * HIDDEN + d];
    a.dx[a.first * HIDDEN + i] = sum;
}

/* A thread owns an element of dweight and adds these tokens to it. */
__global__ void dweight_kernel(rung_args a)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x, col = i / HIDDEN, d = i % HIDDEN;
    if (col >= VOCAB) return;
    float sum = a.dweight[i];
    for (int token = 0; token < a.tokens; token++) sum += a.logits[token * VOCAB + col] * a.x[(a.first + token) * HIDDEN + d];
    a.dweight[i] = sum;
}

/* A thread owns a token: its loss from one logit at a time. It keeps the largest so far, the sum of exponentials relative to
 * that, and the target's. For bf16 on a Hopper GPU lk does so with tiles of 128 tokens and 256 columns. */
__global__ void running_kernel(rung_args a)
{
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= TOKENS) return;
    const int64_t y = a.target[token];
    float max = -INFINITY, sum = 0.0f, target = 0.0f;
    for (int col = 0; col < VOCAB; col++) {
        float logit = 0.0f;
        for (int d = 0; d < HIDDEN; d++) logit += a.x[token * HIDDEN + d] * a.weight[col * HIDDEN + d];
        const float before = max;
        max = fmaxf(max, logit);
        sum = sum * expf(before - max) + expf(logit - max);
        if (col == y) target = logit;
    }
    a.loss[token] = y == IGNORED ? 0.0f : (max - target) + logf(sum);
}

/* CUDA's functions and lk's return 0 or an error. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Loss and gradients, `chunk` tokens at a time. */
static void run_rung(const char *name, rung_args a, int chunk)
{
    check(name, cudaMemset(a.dweight, 0, VOCAB * HIDDEN * sizeof(float)));
    for (a.first = 0; a.first < TOKENS; a.first += chunk) {
        a.tokens = chunk;
        check(name, lk_launch(logits_kernel, 1, 32, 0, NULL, a));
        check(name, lk_launch(losses_kernel, 1, 32, 0, NULL, a));
        check(name, lk_launch(dx_kernel, 1, 32, 0, NULL, a));
        check(name, lk_launch(dweight_kernel, 1, 32, 0, NULL, a));
    }
}

/* Prints `count` values on the device, each times its factor, and compares them with the comment above. */
static void show(const char *name, const float *device, int count, const float *expected, const float *factors)
{
    float host[TOKENS * HIDDEN];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(host, device, (size_t)count * sizeof host[0], cudaMemcpyDeviceToHost));
    printf("%-37s", name);
    for (int i = 0; i < count; i++) {
        const float value = host[i] * factors[i];
        printf(" %10.5f", (double)value);
        failures += !(fabsf(value - expected[i]) <= 3e-6f * (1.0f + fabsf(expected[i])));
    }
    printf("\n");
}

static const float ones[TOKENS] = {1, 1, 1, 1}, loss_right[TOKENS] = {0.916291f, 0.693147f, 2.140066f, 0};

/* All three results; the gradients of a mean over three are a third. */
static void show_all(const char *name, const rung_args *a, bool mean)
{
    static const float mean_right[1] = {1.249835f};
    static const float dx_right[TOKENS * HIDDEN] = {-3.635635f, -2.772589f, 4.564348f, -4.158883f, 3.988984f, 11.090355f, 0, 0};
    static const float dweight_right[VOCAB * HIDDEN] = {57, -36, -116, -103, 81, 41, -22, 98};
    const float over = mean ? 3.0f : 1.0f;
    float dx_factors[TOKENS * HIDDEN], dweight_factors[VOCAB * HIDDEN];
    const float sums[TOKENS] = {10, 8, 17, 1};
    for (int i = 0; i < TOKENS * HIDDEN; i++) dx_factors[i] = over * sums[i / HIDDEN];
    for (int i = 0; i < VOCAB * HIDDEN; i++) dweight_factors[i] = over * (i % HIDDEN == 0 ? 170.0f : 136.0f);
    printf("%s\n", name);
    show(mean ? "  mean loss" : "  loss", a->loss, mean ? 1 : TOKENS, mean ? mean_right : loss_right, ones);
    show("  dx, times 10 10 8 8 17 17 1 1", a->dx, TOKENS * HIDDEN, dx_right, dx_factors);
    show("  dweight, times 170 136 170 136 ...", a->dweight, VOCAB * HIDDEN, dweight_right, dweight_factors);
}

/* Device memory of `bytes` bytes, a copy of `from` unless that is NULL. */
static void *memory_of(const void *from, size_t bytes)
{
    void *device = NULL;
    check("cudaMalloc", cudaMalloc(&device, bytes));
    if (from) check("cudaMemcpy", cudaMemcpy(device, from, bytes, cudaMemcpyHostToDevice));
    return device;
}

/* NaN everywhere: what is shown next has been written. */
static void forget(const rung_args *a)
{
    check("cudaMemset", cudaMemset(a->loss, 0xff, TOKENS * sizeof(float)));
    check("cudaMemset", cudaMemset(a->dx, 0xff, TOKENS * HIDDEN * sizeof(float)));
    check("cudaMemset", cudaMemset(a->dweight, 0xff, VOCAB * HIDDEN * sizeof(float)));
}

int main(void)
{
    const float x_host[TOKENS][HIDDEN] = {{1, 0}, {0, 1}, {1, 1}, {2, 2}};
    const float weight_host[VOCAB][HIDDEN] = {{logf(1), logf(4)}, {logf(2), logf(1)}, {logf(3), logf(1)}, {logf(4), logf(2)}};
    const int64_t target_host[TOKENS] = {3, 0, 1, IGNORED};
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("linear_cross_entropy of %d tokens of %d, vocabulary of %d, on: %s\n", TOKENS, HIDDEN, VOCAB, device.name);

    rung_args a = {};
    a.x = (const float *)memory_of(x_host, sizeof x_host), a.weight = (const float *)memory_of(weight_host, sizeof weight_host);
    a.target = (const int64_t *)memory_of(target_host, sizeof target_host);
    a.logits = (float *)memory_of(NULL, TOKENS * VOCAB * sizeof(float));
    a.loss = (float *)memory_of(NULL, TOKENS * sizeof(float));
    a.dx = (float *)memory_of(NULL, sizeof x_host), a.dweight = (float *)memory_of(NULL, sizeof weight_host);

    /* Rung 1: unfused. All logits at once, dlogits in their place. At 12288 tokens and a vocabulary of 131072 that is 6 GiB. */
    run_rung("rung 1", a, TOKENS);
    show_all("rung 1: all logits at once", &a, false);

    /* Rung 2: a token's loss and gradients need its own logits only. So half of the tokens need half of the memory, and the
     * other half uses it again. Only dweight needs every token: it is summed over the chunks. */
    forget(&a);
    run_rung("rung 2", a, TOKENS / 2);
    show_all("rung 2: the logits of half the tokens", &a, false);

    /* Rung 3: the loss alone needs each logit once, so none is stored. The gradients need them again when the sum is known:
     * computed once more, or stored in some form. */
    forget(&a);
    check("rung 3", lk_launch(running_kernel, 1, 32, 0, NULL, a));
    printf("rung 3: one logit at a time\n");
    show("  loss", a.loss, TOKENS, loss_right, ones);

    /* lk: a query answers a good size of the workspace. Or the caller has so much memory, and a plan says what lk does with it.
     * The context holds cuBLASLt's handle. */
    static lk_linear_cross_entropy_context context;
    check("init", lk_linear_cross_entropy_init(&context));
    lk_linear_cross_entropy_args args = {};
    args.context = &context, args.x = a.x, args.weight = a.weight, args.target = a.target;
    args.loss = a.loss, args.dx = a.dx, args.dweight = a.dweight;
    args.tokens = TOKENS, args.hidden = HIDDEN, args.vocab = VOCAB;
    args.use_ignore_index = 1, args.ignore_index = IGNORED;
    size_t bytes = 0;
    lk_linear_cross_entropy_plan plan;
    check("query", lk_linear_cross_entropy_forward_backward_workspace_bytes_f32(&args, &bytes));
    check("plan", lk_linear_cross_entropy_forward_backward_plan_f32(&args, bytes, &plan));
    printf("by default %zu bytes, %zu of them for cuBLASLt: %s\n", bytes, plan.cublas_bytes, plan.text);
    check("plan", lk_linear_cross_entropy_forward_backward_plan_f32(&args, (size_t)1 << 20, &plan));
    printf("with 1 MiB: %s\n", plan.text);
    args.workspace = memory_of(NULL, plan.workspace_bytes), args.workspace_bytes = plan.workspace_bytes;
    forget(&a);
    check("lk", lk_linear_cross_entropy_forward_backward_f32(&args, NULL));
    show_all("lk", &a, false);

    /* A chunk may also have some columns of the vocabulary at a time. Here the caller chooses the path and the chunk. */
    args.reduction = LK_REDUCTION_MEAN, args.path = LK_LINEAR_CROSS_ENTROPY_PANELS, args.chunk_tokens = 2;
    check("plan", lk_linear_cross_entropy_forward_backward_plan_f32(&args, args.workspace_bytes, &plan));
    printf("with path and chunk_tokens: %s\n", plan.text);
    forget(&a);
    check("lk", lk_linear_cross_entropy_forward_backward_f32(&args, NULL));
    show_all("lk: mean", &a, true);

    args.label_smoothing = 2; /* a wrong argument is a sentence, and nothing is launched */
    const lk_status status = lk_linear_cross_entropy_forward_backward_f32(&args, NULL);
    printf("label_smoothing = 2: %s, %s\n", lk_status_string(status), lk_last_error());
    failures += status != LK_ERR_VALUE;

    check("destroy", lk_linear_cross_entropy_destroy(&context));
    cudaFree((void *)a.x), cudaFree((void *)a.weight), cudaFree((void *)a.target), cudaFree(a.logits), cudaFree(a.loss);
    cudaFree(a.dx), cudaFree(a.dweight), cudaFree(args.workspace);
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
