// SPDX-License-Identifier: MIT
/* Log-probabilities over a support in three rungs, one idea per rung. A sampler kept some ids of each token, and drew one of them, y.
 * The hidden states and the weight are small whole numbers, so that all can be checked by hand. The logits of all 6 ids, with the
 * ids that were kept in brackets:
 *
 *   token 0   x = (1, 0):   [0]  1  [2] [3]  4   5       y = 3
 *   token 1   x = (0, 1):    2  [2]  2  [2]  2   2       y = 1
 *   token 2   x = (1, 1):    2   3   4   5   6  [7]      y = 5
 *
 *   token 0   logp = 3 - log(1 + e^2 + e^3) = -0.349012      token 1   -log 2 = -0.693147      token 2   0
 *   Over all 6 ids logp would be -2.456193, -1.791759 and -0.456193, since the ids that were not kept have a share.
 *   The gradient of logp with respect to the logits is 1 - p for y and -p for the other ids that were kept. For token 1 it is
 *   (1/2, -1/2). So dx of token 1,
 *   with 1/2 and -1/2 as factors of rows 1 and 3 of the weight, (1, 2) and (3, 2), is (-1, 0). dx of token 2 is 0.
 *
 *   make example-linear_support                on a GPU, or on the CPU where there is none
 */
#include <math.h>
#include <stdio.h>

#include "lk/linear_support.cuh"

LK_DEFINE_LINEAR_SUPPORT(f32)

#define TOKENS 3
#define HIDDEN 2
#define VOCAB 6
#define ENTRIES 6

typedef struct {
    const float *x, *weight;          /* [TOKENS, HIDDEN], [VOCAB, HIDDEN] */
    const int *offsets, *ids, *target; /* the ids of token t are ids[offsets[t]] to ids[offsets[t + 1] - 1] */
    float *logits;                    /* rungs 1 and 2: [TOKENS, VOCAB]; rung 3: [ENTRIES] */
    float *logp;                      /* [TOKENS] */
} rung_args;

__device__ float logit_of(rung_args a, int token, int id)
{
    float sum = 0.0f;
    for (int d = 0; d < HIDDEN; d++) sum += a.x[token * HIDDEN + d] * a.weight[id * HIDDEN + d];
    return sum;
}

/* Rung 1: a head. The logits of all ids, and a softmax over them: the log-probability under another policy than the sampler's. */
__global__ void rung_1_kernel(rung_args a)
{
    const int token = threadIdx.x;
    if (token >= TOKENS) return;
    lk_lse state = lk_lse_empty(); /* examples/logsumexp.cu says how */
    for (int id = 0; id < VOCAB; id++) {
        const float one[1] = {a.logits[token * VOCAB + id] = logit_of(a, token, id)};
        state = lk_lse_add(state, one);
    }
    a.logp[token] = a.logits[token * VOCAB + a.target[token]] - lk_lse_log(state);
}

/* Rung 2: the softmax over the ids that were kept. It is right, and still all logits are computed: a model of today
 * has 151936 of them per token, and a sampler keeps 16. */
__global__ void rung_2_kernel(rung_args a)
{
    const int token = threadIdx.x;
    if (token >= TOKENS) return;
    lk_lse state = lk_lse_empty();
    for (int id = 0; id < VOCAB; id++) a.logits[token * VOCAB + id] = logit_of(a, token, id);
    for (int e = a.offsets[token]; e < a.offsets[token + 1]; e++) {
        const float one[1] = {a.logits[token * VOCAB + a.ids[e]]};
        state = lk_lse_add(state, one);
    }
    a.logp[token] = a.logits[token * VOCAB + a.target[token]] - lk_lse_log(state);
}

/* Rung 3: only the logits that are used, one for each entry: the kernel reads only the rows of the weight that the ids name.
 * lk does one thing more: it leaves the largest logit out of the sum, and computes log1p of the sum of the others. That keeps logp
 * exact near 0. */
__global__ void rung_3_kernel(rung_args a)
{
    const int token = threadIdx.x;
    if (token >= TOKENS) return;
    lk_lse state = lk_lse_empty();
    float own = 0.0f;
    for (int e = a.offsets[token]; e < a.offsets[token + 1]; e++) {
        const float one[1] = {a.logits[e] = logit_of(a, token, a.ids[e])};
        state = lk_lse_add(state, one);
        if (a.ids[e] == a.target[token]) own = one[0];
    }
    a.logp[token] = own - lk_lse_log(state);
}

/* CUDA's functions and lk's return 0 or an error. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

static void *memory_of(const void *from, size_t bytes)
{
    void *device = NULL;
    check("cudaMalloc", cudaMalloc(&device, bytes));
    if (from) check("cudaMemcpy", cudaMemcpy(device, from, bytes, cudaMemcpyHostToDevice));
    return device;
}

/* Prints a rung's results; those that should be right are compared. */
static void show(const char *name, const float *logp, const double *right)
{
    float found[TOKENS];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(found, logp, sizeof found, cudaMemcpyDeviceToHost));
    printf("%-44s", name);
    for (int token = 0; token < TOKENS; token++) {
        printf(" %11.6f", (double)found[token]);
        failures += !(fabs((double)found[token] - right[token]) <= 1e-6);
    }
    printf("\n");
}

int main(void)
{
    const float x[TOKENS][HIDDEN] = {{1, 0}, {0, 1}, {1, 1}};
    const float weight[VOCAB][HIDDEN] = {{0, 2}, {1, 2}, {2, 2}, {3, 2}, {4, 2}, {5, 2}};
    const int offsets[TOKENS + 1] = {0, 3, 5, 6}, ids[ENTRIES] = {0, 2, 3, 1, 3, 5}, target[TOKENS] = {3, 1, 5};
    const double of_all[TOKENS] = {3 - log(1 + exp(1) + exp(2) + exp(3) + exp(4) + exp(5)), -log(6),
                                   5 - log(1 + exp(1) + exp(2) + exp(3) + exp(4) + exp(5))};
    const double right[TOKENS] = {3 - log(1 + exp(2) + exp(3)), -log(2), 0};
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("linear_support of %d tokens, %d of %d ids, on: %s\n", TOKENS, ENTRIES, TOKENS * VOCAB, device.name);

    rung_args args = {(float *)memory_of(x, sizeof x), (float *)memory_of(weight, sizeof weight), (int *)memory_of(offsets, sizeof offsets),
                      (int *)memory_of(ids, sizeof ids), (int *)memory_of(target, sizeof target),
                      (float *)memory_of(NULL, TOKENS * VOCAB * sizeof(float)), (float *)memory_of(NULL, TOKENS * sizeof(float))};
    printf("%-44s %11s %11s %11s\n", "logp of", "token 0", "token 1", "token 2");
    printf("%-44s %11.6f %11.6f %11.6f\n", "expected", right[0], right[1], right[2]);
    check("rung 1", lk_launch(rung_1_kernel, 1, 32, 0, NULL, args));
    show("rung 1: over all ids (another policy's)", args.logp, of_all);
    check("rung 2", lk_launch(rung_2_kernel, 1, 32, 0, NULL, args));
    show("rung 2: over the ids that were kept", args.logp, right);
    check("rung 3", lk_launch(rung_3_kernel, 1, 32, 0, NULL, args));
    show("rung 3: of these ids alone", args.logp, right);

    float *const dx = (float *)memory_of(NULL, sizeof x);
    const float ones[TOKENS] = {1, 1, 1};
    lk_linear_support_args call = {};
    call.x = args.x, call.weight = args.weight, call.offsets = args.offsets, call.ids = args.ids, call.target = args.target;
    call.offsets_dtype = call.target_dtype = LK_TARGET_INT32;
    call.tokens = TOKENS, call.hidden = HIDDEN, call.vocab = VOCAB, call.entries = ENTRIES;
    call.logits = args.logits, call.logp = args.logp, call.dlogp = (float *)memory_of(ones, sizeof ones), call.dx = dx;
    size_t forward = 0, backward = 0;
    check("lk", lk_linear_support_forward_workspace_bytes_f32(&call, &forward));
    check("lk", lk_linear_support_backward_workspace_bytes_f32(&call, &backward));
    call.workspace_bytes = forward > backward ? forward : backward, call.workspace = memory_of(NULL, call.workspace_bytes);
    check("lk", lk_linear_support_forward_f32(&call, NULL));
    show("lk", args.logp, right);
    float found[TOKENS][HIDDEN];
    check("lk", lk_linear_support_backward_f32(&call, NULL));
    check("lk", cudaDeviceSynchronize());
    check("lk", cudaMemcpy(found, dx, sizeof found, cudaMemcpyDeviceToHost));
    printf("lk's dx of tokens 1 and 2:");
    for (int token = 1; token < TOKENS; token++)
        for (int d = 0; d < HIDDEN; d++) {
            printf(" %.5f", (double)found[token][d]);
            failures += fabs((double)found[token][d] - (token == 1 && d == 0 ? -1 : 0)) > 1e-6;
        }
    call.logit_scale = -1; /* wrong: lk returns an error and has a sentence, and nothing is launched */
    const lk_status status = lk_linear_support_forward_f32(&call, NULL);
    printf("\nlogit_scale = -1: %s, %s\n", lk_status_string(status), lk_last_error());
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
