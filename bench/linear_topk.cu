// SPDX-License-Identifier: MIT
/* bench/linear_topk.cu - lk_linear_topk against its matmul alone (bare); how to run it: bench.h.
 *
 * lk       as a caller gets it: init, then calls, in a workspace of N MiB (workspace=N), or of what the query asks for.
 * bare     cuBLASLt's product for all tokens, the logits into bf16, with 32 MiB of workspace. lk has logits of f32, and reads them.
 *          The algorithm is the one that cuBLASLt's heuristic names first, as in lk.
 * Check    ids, logp and lse of 3 tokens, against the logits of a plain kernel in double.
 * seed=1   ids are drawn.
 */
#include "bench/bench.h"
#include "lk/linear_topk.cuh"

LK_DEFINE_LINEAR_TOPK(bf16)

typedef struct {
    const char *name;
    int64_t tokens, hidden, vocab;
    int k, workspace_mb, draws;
} shape;

static const shape shapes[] = {
    {"tokens=8192 hidden=4096 vocab=151936 k=64", 8192, 4096, 151936, 64, 0, 0},
    {"tokens=4096 hidden=4096 vocab=151936 k=64", 4096, 4096, 151936, 64, 0, 0},
    {"tokens=4096 hidden=4096 vocab=151936 k=8", 4096, 4096, 151936, 8, 0, 0},
    {"tokens=4096 hidden=4096 vocab=151936 k=64 workspace=512", 4096, 4096, 151936, 64, 512, 0},
    {"tokens=4096 hidden=4096 vocab=151936 k=64 seed=1", 4096, 4096, 151936, 64, 0, 1},
    {"tokens=4096 hidden=4096 vocab=151936 k=1 seed=1", 4096, 4096, 151936, 1, 0, 1},
    {"tokens=8 hidden=4096 vocab=151936 k=1 seed=1", 8, 4096, 151936, 1, 0, 1},
    {"tokens=8192 hidden=2048 vocab=32768 k=32", 8192, 2048, 32768, 32, 0, 0},
    {"tokens=4090 hidden=4096 vocab=32003 k=32", 4090, 4096, 32003, 32, 0, 0},
    {"tokens=1000 hidden=4096 vocab=151936 k=64", 1000, 4096, 151936, 64, 0, 0},
    {"tokens=100 hidden=4096 vocab=151935 k=64", 100, 4096, 151935, 64, 0, 0},
    {"tokens=8 hidden=4096 vocab=151936 k=64", 8, 4096, 151936, 64, 0, 0},
    {"tokens=1 hidden=4096 vocab=151936 k=64", 1, 4096, 151936, 64, 0, 0},
};
#define CASES ((int)(sizeof shapes / sizeof shapes[0]))
static const shape host_shape = {"tokens=64 hidden=256 vocab=1024 k=16", 64, 256, 1024, 16, 0, 0};

/* read: x, weight. out: logp, lse, ids. in: seed. */
typedef struct {
    lk_bf16 *x, *weight;
    float *logp, *lse;
    int32_t *ids;
    uint64_t *seed;
} tensors;

static tensors tensors_of(const shape *s, const bench_buffers *set)
{
    tensors t = {};
    t.x = (lk_bf16 *)set->read, t.weight = t.x + s->tokens * s->hidden;
    t.logp = (float *)set->out, t.lse = t.logp + s->tokens * s->k, t.ids = (int32_t *)(t.lse + s->tokens);
    t.seed = (uint64_t *)set->in;
    return t;
}

static void right(lk_status status)
{
    if (status == LK_OK) return;
    fprintf(stderr, "%s\n", lk_last_error());
    exit(1);
}

static lk_linear_topk_context context;

static lk_linear_topk_args args_of(const bench_case *c, const bench_buffers *set)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    lk_linear_topk_args args = {};
    args.context = &context, args.x = t.x, args.weight = t.weight, args.logp = t.logp, args.lse = t.lse, args.ids = t.ids;
    args.tokens = s->tokens, args.hidden = s->hidden, args.vocab = s->vocab, args.k = s->k, args.ids_dtype = LK_TARGET_INT32;
    if (s->draws) args.seed = t.seed;
    args.workspace = set->workspace, args.workspace_bytes = c->workspace_bytes;
    return args;
}

/* A case has a context of its own, which its first launch makes. */
static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int, cudaStream_t stream)
{
    static const bench_case *owner;
    const lk_linear_topk_args args = args_of(c, set);
    lk_status status = LK_OK;
    if (owner != c) {
        if (owner) status = lk_linear_topk_destroy(&context);
        if (!status) status = lk_linear_topk_init(&context);
        owner = status ? NULL : c;
    }
    return status ? status : lk_linear_topk_forward_bf16(&args, stream);
}

/* The plan of a case's workspace; the queries look at what is NULL, and at no memory. */
static lk_linear_topk_plan plan_of(const bench_case *c)
{
    const shape *s = (const shape *)c->context;
    char *const anywhere = (char *)256;
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    const lk_linear_topk_args args = args_of(c, &set);
    size_t bytes = (size_t)s->workspace_mb << 20;
    lk_linear_topk_plan plan = {};
    if (!bytes) right(lk_linear_topk_forward_workspace_bytes_bf16(&args, &bytes));
    right(lk_linear_topk_forward_plan_bf16(&args, bytes, &plan));
    return plan;
}
static size_t workspace(const bench_case *c, int) { return plan_of(c).workspace_bytes; }

static lk_status launch_bare(const bench_case *c, const bench_buffers *set, int, cudaStream_t stream)
{
    static lk_cublas_context cublas;
    static char *memory;
    static size_t held;
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    const int64_t stride = lk_ceil_div(s->vocab, 64) * 64;
    const size_t bytes = LK_HEAD_CUBLAS_BYTES + (size_t)(s->tokens * stride) * sizeof(lk_bf16);
    if (!cublas.handle) right(lk_cublas_init("bench", &cublas));
    if (bytes > held) {
        BENCH_CUDA(cudaDeviceSynchronize());
        BENCH_CUDA(cudaFree(memory));
        BENCH_CUDA(cudaMalloc((void **)&memory, bytes));
        held = bytes;
    }
    const lk_cublas_call call = {"bench", stream, &cublas, memory, LK_HEAD_CUBLAS_BYTES, LK_CUBLAS_LAUNCH};
    lk_cublas_product p = {};
    p.key.factor_type = p.key.type = LK_DTYPE_BF16, p.key.transpose_a = 1;
    p.key.m = s->vocab, p.key.n = s->tokens, p.key.k = p.key.lda = p.key.ldb = s->hidden, p.key.ldd = stride;
    p.a = t.weight, p.b = t.x, p.d = memory + LK_HEAD_CUBLAS_BYTES;
    return lk_cublas_multiply(&call, &p);
}

typedef struct {
    uint64_t *seed;
    int64_t tokens;
} seed_args;
LK_KERNEL void seed_kernel(seed_args p)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.tokens) p.seed[i] = 0x9e3779b97f4a7c15u * (uint64_t)(i + 1);
}
static void fill(const bench_case *c, const bench_buffers *set, int, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    bench_fill("bf16", t.x, s->tokens * s->hidden, 1.0f, 1, stream);
    const seed_args args = {t.seed, s->tokens};
    BENCH_CUDA(lk_launch(seed_kernel, lk_ceil_div(s->tokens, 256), 256, 0, stream, args));
    bench_fill("bf16", t.weight, s->vocab * s->hidden, 2.0f / sqrtf((float)s->hidden), 2, stream);
}

/* The noise of a column whose token has this seed. */
static double noise_of(uint64_t seed, int64_t col)
{
    uint32_t c[4] = {(uint32_t)(col / 4), 0, 0, 0}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++, key[0] += 0x9e3779b9, key[1] += 0xbb67ae85) {
        const uint64_t a = (uint64_t)0xd2511f53 * c[0], b = (uint64_t)0xcd9e8d57 * c[2];
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ key[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ key[1], (uint32_t)a};
        memcpy(c, next, sizeof c);
    }
    return -log(-log1p(-((double)c[col % 4] + 0.5) * 0x1p-32));
}

/* out[j] = sum_d x[d] weight[j,d]. A warp owns a product. */
typedef struct {
    const lk_bf16 *x, *weight;
    double *out;
    int64_t vocab, hidden;
} dots_args;
LK_KERNEL void dots_kernel(dots_args p)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t j = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    double sum = 0.0;
    if (j >= p.vocab) return;
    for (int64_t d = lane; d < p.hidden; d += 32) sum += (double)lk_to_float(p.x[d]) * (double)lk_to_float(p.weight[j * p.hidden + d]);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) p.out[j] = sum;
}

#define OFF 2e-4 /* tensor cores' sums of 4096 products of up to 2 / 64 */
static bool check(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    const int64_t tokens[] = {0, s->tokens / 2, s->tokens - 1};
    double *const logits = (double *)malloc((size_t)s->vocab * sizeof(double)), *device;
    float logp[64], lse;
    int32_t ids[64];
    bool good = true;
    BENCH_CUDA(cudaMalloc((void **)&device, (size_t)s->vocab * sizeof(double)));
    for (int n = 0; n < 3 && good; n++) {
        const dots_args args = {t.x + tokens[n] * s->hidden, t.weight, device, s->vocab, s->hidden};
        const size_t count = (size_t)s->k;
        BENCH_CUDA(lk_launch(dots_kernel, lk_ceil_div(s->vocab, 8), 256, 0, NULL, args));
        BENCH_CUDA(cudaMemcpy(logits, device, (size_t)s->vocab * sizeof(double), cudaMemcpyDeviceToHost));
        BENCH_CUDA(cudaMemcpy(logp, t.logp + tokens[n] * s->k, count * 4, cudaMemcpyDeviceToHost));
        BENCH_CUDA(cudaMemcpy(ids, t.ids + tokens[n] * s->k, count * 4, cudaMemcpyDeviceToHost));
        BENCH_CUDA(cudaMemcpy(&lse, t.lse + tokens[n], 4, cudaMemcpyDeviceToHost));
        double sum = 0, last = INFINITY;
        int64_t above = 0;
        uint64_t seed = 0;
        if (s->draws) BENCH_CUDA(cudaMemcpy(&seed, t.seed + tokens[n], 8, cudaMemcpyDeviceToHost));
        auto score_of = [=](int64_t j) { return logits[j] + (s->draws ? noise_of(seed, j) : 0); };
        for (int64_t j = 0; j < s->vocab; j++) sum += exp(logits[j]); /* they are below 10 */
        for (int i = 0; i < s->k && good; i++) {
            const double z = ids[i] >= 0 && ids[i] < s->vocab ? logits[ids[i]] : NAN;
            const double score = z == z ? score_of(ids[i]) : NAN;
            good = score <= last + OFF && fabs((double)logp[i] - (z - log(sum))) <= OFF, last = score;
            if (!good) snprintf(why, why_bytes, "token %lld: id %d is %d, logp %.9g, not %.9g", (long long)tokens[n], i, ids[i],
                                (double)logp[i], z - log(sum));
        }
        for (int64_t j = 0; j < s->vocab && good; j++) above += score_of(j) > last + OFF;
        if (good && (above >= s->k || fabs((double)lse - log(sum)) > OFF))
            good = false, snprintf(why, why_bytes, "token %lld: %lld logits are above the last, lse is %.9g", (long long)tokens[n],
                                   (long long)above, (double)lse);
    }
    BENCH_CUDA(cudaFree(device));
    free(logits);
    return good;
}

static void describe(bench_case *c, const shape *s)
{
    c->name = s->name, c->direction = "forward", c->dtype = "bf16", c->context = s;
    c->read_bytes = (size_t)((s->tokens + s->vocab) * s->hidden) * sizeof(lk_bf16);
    c->out_bytes = (size_t)(s->tokens * (2 * s->k + 1)) * 4, c->in_bytes = (size_t)s->tokens * 8;
    c->flops = 2.0 * (double)s->tokens * (double)s->vocab * (double)s->hidden;
    c->fill = fill, c->launch = launch_lk, c->bare = launch_bare, c->check = check, c->workspace = workspace;
}

int main(int argc, char **argv)
{
    static bench_case cases[CASES], host;
    static char remarks[CASES][330];
    for (int k = 0; k < CASES; k++) {
        describe(&cases[k], &shapes[k]);
        const lk_linear_topk_plan plan = plan_of(&cases[k]);
        snprintf(remarks[k], sizeof remarks[k], "%zu MiB: %s", plan.workspace_bytes >> 20, plan.text);
        cases[k].remark = remarks[k];
    }
    describe(&host, &host_shape);
    return bench_run("linear_topk", cases, CASES, &host, 1, argc, argv);
}
