// SPDX-License-Identifier: MIT
/* The k largest logits of each token, with their log-probabilities, in three rungs, one idea per rung. The hidden states and the weight
 * are small whole numbers, so that all can be checked by hand. The logits of all 6 ids, with the k = 2 largest in brackets; of equal
 * ones the smallest id comes first:
 *
 *   token 0   x = (1, 0):    0   1   2   3  [4] [5]      ids 5, 4
 *   token 1   x = (0, 1):   [2] [2]  2   2   2   2       ids 0, 1
 *   token 2   x = (1, 1):    2   3   4   5  [6] [7]      ids 5, 4
 *
 *   logp of tokens 0 and 2: 5 - log(1 + e + ... + e^5) = -0.456193, then -1.456193. Of token 1: -log 6 = -1.791759, twice.
 *
 *   make example-linear_topk                on a GPU, or on the CPU where there is none
 */
#include <math.h>
#include <stdio.h>

#include "lk/linear_topk.cuh"

LK_DEFINE_LINEAR_TOPK(f32)

#define TOKENS 3
#define HIDDEN 2
#define VOCAB 6
#define K 2

typedef struct {
    const float *x, *weight; /* [TOKENS, HIDDEN], [VOCAB, HIDDEN] */
    float *logits;           /* rung 1: [TOKENS, VOCAB] */
    int *ids;                /* [TOKENS, K] */
    float *logp;             /* [TOKENS, K] */
} rung_args;

__device__ float logit_of(rung_args a, int token, int id)
{
    float sum = 0.0f;
    for (int d = 0; d < HIDDEN; d++) sum += a.x[token * HIDDEN + d] * a.weight[id * HIDDEN + d];
    return sum;
}

/* Rung 1: all logits in memory. The log-sum-exp is summed as they are computed (examples/logsumexp.cu says how). Then all are read once
 * for each of the K results. For 8192 tokens and 151936 ids the logits take 5 GB. */
__global__ void rung_1_kernel(rung_args a)
{
    const int token = threadIdx.x;
    if (token >= TOKENS) return;
    float *const logits = a.logits + token * VOCAB;
    lk_lse state = lk_lse_empty();
    for (int id = 0; id < VOCAB; id++) {
        const float one[1] = {logits[id] = logit_of(a, token, id)};
        state = lk_lse_add(state, one);
    }
    for (int i = 0; i < K; i++) {
        int best = 0;
        for (int id = 1; id < VOCAB; id++)
            if (logits[id] > logits[best]) best = id;
        a.ids[token * K + i] = best, a.logp[token * K + i] = logits[best] - lk_lse_log(state);
        logits[best] = -INFINITY; /* so that the next one is found */
    }
}

/* Rung 2: a logit is used when it is computed, and not kept. A list has the k largest so far, in order. Most logits are smaller than
 * its last one, the threshold, and cost one comparison. */
__global__ void rung_2_kernel(rung_args a)
{
    const int token = threadIdx.x;
    if (token >= TOKENS) return;
    float list[K];
    int ids[K];
    lk_lse state = lk_lse_empty();
    for (int i = 0; i < K; i++) list[i] = -INFINITY, ids[i] = 0;
    for (int id = 0; id < VOCAB; id++) {
        const float one[1] = {logit_of(a, token, id)};
        state = lk_lse_add(state, one);
        if (!(one[0] > list[K - 1])) continue;
        int i = K - 1; /* the smaller ones of the list move one place back */
        for (; i > 0 && one[0] > list[i - 1]; i--) list[i] = list[i - 1], ids[i] = ids[i - 1];
        list[i] = one[0], ids[i] = id;
    }
    for (int i = 0; i < K; i++) a.ids[token * K + i] = ids[i], a.logp[token * K + i] = list[i] - lk_lse_log(state);
}

/* Rung 3: a warp per token, each lane with every 32nd id. A logit and its id become one whole number, a key. A larger logit
 * has a larger key; of equal logits the smaller id has it. So no two keys are equal, and one reduction finds the largest of all lanes. */
__global__ void rung_3_kernel(rung_args a)
{
    const int token = blockIdx.x, lane = threadIdx.x;
    int64_t list[K];
    lk_lse state = lk_lse_empty();
    for (int i = 0; i < K; i++) list[i] = INT64_MIN;
    for (int id = lane; id < VOCAB; id += 32) {
        const float one[1] = {logit_of(a, token, id)};
        state = lk_lse_add(state, one);
        int64_t key = lk_ce_top(one[0], id);
        for (int i = 0; i < K; i++) { /* key takes its place, and what was there goes on to the next */
            const int64_t other = list[i];
            if (key > other) list[i] = key, key = other;
        }
    }
    const float lse = lk_lse_log(lk_lse_warp(state));
    for (int i = 0; i < K; i++) {
        const int64_t top = lk_ce_top_warp(list[0]);
        const int id = lk_ce_top_col(top);
        if (list[0] == top) /* the lane that had it */
            for (int j = 0; j < K; j++) list[j] = j + 1 < K ? list[j + 1] : INT64_MIN;
        if (lane == 0) a.ids[token * K + i] = id, a.logp[token * K + i] = logit_of(a, token, id) - lse;
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

static void *memory_of(const void *from, size_t bytes)
{
    void *device = NULL;
    check("cudaMalloc", cudaMalloc(&device, bytes));
    if (from) check("cudaMemcpy", cudaMemcpy(device, from, bytes, cudaMemcpyHostToDevice));
    return device;
}

static void show(const char *name, rung_args a)
{
    static const int right[TOKENS][K] = {{5, 4}, {0, 1}, {5, 4}};
    const double lse = 5 - log(1 + exp(1) + exp(2) + exp(3) + exp(4) + exp(5));
    int ids[TOKENS][K];
    float logp[TOKENS][K];
    check(name, cudaDeviceSynchronize());
    check(name, cudaMemcpy(ids, a.ids, sizeof ids, cudaMemcpyDeviceToHost));
    check(name, cudaMemcpy(logp, a.logp, sizeof logp, cudaMemcpyDeviceToHost));
    printf("%-40s", name);
    for (int token = 0; token < TOKENS; token++) {
        for (int i = 0; i < K; i++) {
            const double want = token == 1 ? -log(6) : lse - i;
            printf(" %d %.6f%s", ids[token][i], (double)logp[token][i], i + 1 < K ? "," : token + 1 < TOKENS ? " |" : "\n");
            failures += ids[token][i] != right[token][i] || !(fabs((double)logp[token][i] - want) <= 1e-6);
        }
    }
    check(name, cudaMemset(a.ids, 0xff, sizeof ids)), check(name, cudaMemset(a.logp, 0xff, sizeof logp));
}

int main(void)
{
    const float x[TOKENS][HIDDEN] = {{1, 0}, {0, 1}, {1, 1}};
    const float weight[VOCAB][HIDDEN] = {{0, 2}, {1, 2}, {2, 2}, {3, 2}, {4, 2}, {5, 2}};
    cudaDeviceProp device;
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
    printf("linear_topk of %d tokens, %d of %d ids, on: %s\n", TOKENS, K, VOCAB, device.name);
    printf("%-40s ids and logp of token 0 | token 1 | token 2\n", "");
    rung_args args = {(float *)memory_of(x, sizeof x), (float *)memory_of(weight, sizeof weight),
                      (float *)memory_of(NULL, TOKENS * VOCAB * sizeof(float)), (int *)memory_of(NULL, TOKENS * K * sizeof(int)),
                      (float *)memory_of(NULL, TOKENS * K * sizeof(float))};
    check("rung 1", lk_launch(rung_1_kernel, 1, 32, 0, NULL, args));
    show("rung 1: all logits in memory", args);
    check("rung 2", lk_launch(rung_2_kernel, 1, 32, 0, NULL, args));
    show("rung 2: a list and its threshold", args);
    check("rung 3", lk_launch(rung_3_kernel, TOKENS, 32, 0, NULL, args));
    show("rung 3: keys, a warp per token", args);

    lk_linear_topk_context context;
    lk_linear_topk_args call = {};
    check("lk", lk_linear_topk_init(&context));
    call.context = &context, call.x = args.x, call.weight = args.weight, call.ids = args.ids, call.logp = args.logp;
    call.ids_dtype = LK_TARGET_INT32, call.tokens = TOKENS, call.hidden = HIDDEN, call.vocab = VOCAB, call.k = K;
    check("lk", lk_linear_topk_forward_workspace_bytes_f32(&call, &call.workspace_bytes));
    call.workspace = memory_of(NULL, call.workspace_bytes);
    check("lk", lk_linear_topk_forward_f32(&call, NULL));
    show("lk", args);
    call.k = VOCAB + 1; /* wrong: lk returns an error and has a sentence, and nothing is launched */
    const lk_status status = lk_linear_topk_forward_f32(&call, NULL);
    printf("k = %d: %s, %s\n", call.k, lk_status_string(status), lk_last_error());
    check("lk", lk_linear_topk_destroy(&context));
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
