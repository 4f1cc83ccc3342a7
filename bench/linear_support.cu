// SPDX-License-Identifier: MIT
/* bench/linear_support.cu - lk_linear_support against its ceiling and against the formula as the simplest kernel; how to run it:
 * bench.h.
 *
 * Each token has some ids, drawn from the vocabulary, a quarter of them from 64 popular ones. logp of one of them is computed, and
 * its gradients to x and to all of the weight. The least traffic: forward reads a row of the weight for each entry. backward reads
 * it again, and writes dx and a dweight of all rows. What is not counted: x, which caches have, though dweight reads a row of it for
 * each entry, and what is computed between. The number of entries is tokens + vocab, so that backward reads as much as it writes.
 */
#include "bench/bench.h"
#include "lk/linear_support.cuh"

LK_DEFINE_LINEAR_SUPPORT(bf16)

typedef struct {
    const char *name;
    int64_t tokens, hidden, vocab;
} shape;

static const shape shapes[] = {
    {"tokens=8192 hidden=4096 vocab=151936 ids=19.5", 8192, 4096, 151936},
    {"tokens=16384 hidden=2048 vocab=151936 ids=10.3", 16384, 2048, 151936},
    {"tokens=2048 hidden=4096 vocab=151936 ids=75.2", 2048, 4096, 151936},
    {"tokens=256 hidden=4096 vocab=151936 ids=594.5", 256, 4096, 151936},
    {"tokens=8188 hidden=4096 vocab=32003 ids=4.9", 8188, 4096, 32003},
};
#define SHAPES ((int)(sizeof shapes / sizeof shapes[0]))
static const shape host_shape = {"tokens=64 hidden=256 vocab=1024 ids=17", 64, 256, 1024};

static bool is_backward(const bench_case *c) { return strcmp(c->direction, "backward") == 0; }
static int64_t entries(const shape *s) { return s->tokens + s->vocab; }
#define TRAFFIC_READ(s) ((size_t)(entries(s) * s->hidden) * 2)
#define TRAFFIC_WRITE(s) ((size_t)((s->tokens + s->vocab) * s->hidden) * 2)

/* What lies in set->in. read: nothing that the operation reads, but as many bytes. */
typedef struct {
    lk_bf16 *x, *weight;
    int32_t *offsets, *ids, *target;
    float *dlogp, *logits, *logp;
} tensors;

static tensors tensors_of(const shape *s, void *base, size_t *bytes)
{
    tensors t;
    lk_arena arena = {(uintptr_t)base, 0, 256};
    lk_take(&t.x, &arena, true, s->tokens * s->hidden), lk_take(&t.weight, &arena, true, s->vocab * s->hidden);
    lk_take(&t.offsets, &arena, true, s->tokens + 1), lk_take(&t.ids, &arena, true, entries(s));
    lk_take(&t.target, &arena, true, s->tokens), lk_take(&t.dlogp, &arena, true, s->tokens);
    lk_take(&t.logits, &arena, true, entries(s)), lk_take(&t.logp, &arena, true, s->tokens);
    if (bytes) *bytes = arena.used;
    return t;
}

static lk_linear_support_args args_of(const bench_case *c, const bench_buffers *set)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set->in, NULL);
    lk_linear_support_args a = {};
    a.x = t.x, a.weight = t.weight, a.offsets = t.offsets, a.ids = t.ids, a.target = t.target, a.logits = t.logits, a.logp = t.logp;
    a.dlogp = t.dlogp, a.dx = set->write, a.dweight = set->write + (size_t)(s->tokens * s->hidden) * 2;
    a.tokens = s->tokens, a.hidden = s->hidden, a.vocab = s->vocab, a.entries = entries(s);
    a.offsets_dtype = a.target_dtype = LK_TARGET_INT32;
    a.workspace = set->workspace, a.workspace_bytes = c->workspace_bytes;
    return a;
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const lk_linear_support_args a = args_of(c, set);
    return is_backward(c) ? lk_linear_support_backward_bf16(&a, stream) : lk_linear_support_forward_bf16(&a, stream);
}

static size_t workspace(const bench_case *c, int)
{
    const bench_buffers none = {};
    const lk_linear_support_args a = args_of(c, &none);
    size_t bytes = 0;
    if (is_backward(c)) lk_linear_support_backward_workspace_bytes_bf16(&a, &bytes);
    else lk_linear_support_forward_workspace_bytes_bf16(&a, &bytes);
    return bytes;
}

/* ---- The baseline of forward: the formula, untuned; a block has a token --------------------------------------------------- */

#define NAIVE_THREADS 256

LK_KERNEL void naive_kernel(lk_linear_support_args a)
{
    LK_SHARED(float, sums, [NAIVE_THREADS]);
    const int64_t token = blockIdx.x;
    const int32_t *const offsets = (const int32_t *)a.offsets, *const ids = (const int32_t *)a.ids;
    const lk_bf16 *const x = (const lk_bf16 *)a.x + token * a.hidden;
    float most = -INFINITY, sum = 0.0f, own = 0.0f;
    for (int64_t e = offsets[token]; e < offsets[token + 1]; e++) {
        const lk_bf16 *const weight = (const lk_bf16 *)a.weight + ids[e] * a.hidden;
        float part = 0.0f;
        for (int64_t d = threadIdx.x; d < a.hidden; d += NAIVE_THREADS) part += lk_to_float(x[d]) * lk_to_float(weight[d]);
        sums[threadIdx.x] = part;
        __syncthreads(); /* all parts */
        for (int half = NAIVE_THREADS / 2; half > 0; half /= 2) {
            if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
            __syncthreads(); /* the sums of pairs */
        }
        const float z = sums[0], larger = fmaxf(most, z);
        sum = sum * expf(most - larger) + expf(z - larger), most = larger;
        if (ids[e] == ((const int32_t *)a.target)[token]) own = z;
        if (threadIdx.x == 0) a.logits[e] = z;
        __syncthreads(); /* all have read the sum */
    }
    if (threadIdx.x == 0) a.logp[token] = own - most - logf(sum);
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    return (lk_status)lk_launch(naive_kernel, s->tokens, NAIVE_THREADS, 0, stream, args_of(c, set));
}

/* ---- The functions of a case --------------------------------------------------------------------------------------------- */

static uint64_t hash(uint64_t x)
{
    x = (x + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    return x ^ x >> 31;
}

static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set->in, NULL);
    const int64_t n = entries(s);
    bench_fill("bf16", t.x, s->tokens * s->hidden, 1.0f, 5 * (uint64_t)number, stream);
    bench_fill("bf16", t.weight, s->vocab * s->hidden, 0.03f, 5 * (uint64_t)number + 1, stream);
    bench_fill("f32", t.dlogp, s->tokens, 1.0f, 5 * (uint64_t)number + 2, stream);
    bench_fill("f32", t.logits, n, 2.0f, 5 * (uint64_t)number + 3, stream); /* of backward; forward writes its own */
    bench_fill("bf16", set->read, (int64_t)(c->read_bytes / 2), 1.0f, 5 * (uint64_t)number + 4, stream);
    int32_t *const host = (int32_t *)malloc((size_t)(2 * s->tokens + 1 + n) * 4), *const ids = host + s->tokens + 1, *const target = ids + n;
    for (int64_t token = 0; token <= s->tokens; token++) {
        const int64_t at = token * n / s->tokens, mean = n / s->tokens, least = at - mean / 3;
        host[token] = (int32_t)(token == 0 ? 0 : token == s->tokens ? n : least + (int64_t)(hash((uint64_t)token) % (uint64_t)(2 * mean / 3 + 1)));
    }
    for (int64_t e = 0; e < n; e++) {
        const uint64_t h = hash((uint64_t)(e + (int64_t)number * n));
        ids[e] = (int32_t)(h % 4 == 0 ? h / 4 % 64 * (uint64_t)(s->vocab / 64) : h / 4 % (uint64_t)s->vocab);
    }
    for (int64_t token = 0; token < s->tokens; token++) target[token] = ids[host[token]];
    BENCH_CUDA(cudaMemcpyAsync(t.offsets, host, (size_t)(s->tokens + 1) * 4, cudaMemcpyHostToDevice, stream));
    BENCH_CUDA(cudaMemcpyAsync(t.ids, ids, (size_t)n * 4, cudaMemcpyHostToDevice, stream));
    BENCH_CUDA(cudaMemcpyAsync(t.target, target, (size_t)s->tokens * 4, cudaMemcpyHostToDevice, stream));
    BENCH_CUDA(cudaStreamSynchronize(stream));
    free(host);
}

template <class T> static T *get(const T *from, int64_t count)
{
    T *const to = (T *)malloc((size_t)count * sizeof(T));
    BENCH_CUDA(cudaMemcpy(to, from, (size_t)count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
}

/* Holds logp, or dx, of four tokens against double, and the row of dweight of the first id of each. */
static bool check(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set->in, NULL);
    const int64_t n = entries(s), H = s->hidden, tokens[] = {0, s->tokens / 3, s->tokens / 2, s->tokens - 1};
    int32_t *const offsets = get(t.offsets, s->tokens + 1), *const ids = get(t.ids, n), *const target = get(t.target, s->tokens);
    float *const logits = get(t.logits, n), *const logp = get(t.logp, s->tokens), *const dlogp = get(t.dlogp, s->tokens);
    lk_bf16 *const dx = (lk_bf16 *)set->write, *const dweight = dx + s->tokens * H;
    double *const sum = (double *)malloc((size_t)H * 16), *const size = sum + H, *const dz = (double *)malloc((size_t)n * 8);
    bool right = true;
    for (int64_t token = 0; token < s->tokens; token++) { /* dlogits, of the logits that the call has */
        double most = -INFINITY, all = 0;
        for (int64_t e = offsets[token]; e < offsets[token + 1]; e++) most = fmax(most, (double)logits[e]);
        for (int64_t e = offsets[token]; e < offsets[token + 1]; e++) all += exp((double)logits[e] - most);
        for (int64_t e = offsets[token], found = 0; e < offsets[token + 1]; e++) {
            const bool own = !found && ids[e] == target[token];
            dz[e] = (double)dlogp[token] * (own - exp((double)logits[e] - most) / all), found = found || own;
            const double want = (double)logits[e] - most - log(all);
            if (own && !is_backward(c) && right && !(fabs((double)logp[token] - want) <= 1e-5))
                right = false, snprintf(why, why_bytes, "logp[%lld] is %.9g, not %.9g", (long long)token, (double)logp[token], want);
        }
    }
    for (int k = 0; right && k < 4; k++) {
        const int64_t token = tokens[k], first = offsets[token];
        lk_bf16 *const x = get(t.x + token * H, H);
        if (!is_backward(c)) {
            lk_bf16 *const w = get(t.weight + ids[first] * H, H);
            double dot = 0, terms = 0;
            for (int64_t d = 0; d < H; d++) {
                const double term = (double)(float)x[d] * (double)(float)w[d];
                dot += term, terms += fabs(term);
            }
            right = fabs((double)logits[first] - dot) <= terms * 0x1p-18;
            if (!right) snprintf(why, why_bytes, "logits[%lld] is %.9g, not %.9g", (long long)first, (double)logits[first], dot);
            free(w);
        }
        for (int row = 0; row < 2 && is_backward(c) && right; row++) { /* dx of the token; dweight of its first id */
            memset(sum, 0, (size_t)H * 16);
            for (int64_t e = row ? 0 : first, owner = 0; e < (row ? n : offsets[token + 1]); e++) {
                if (row && ids[e] != ids[first]) continue;
                while (row && offsets[owner + 1] <= e) owner++;
                lk_bf16 *const v = row ? get(t.x + owner * H, H) : get(t.weight + ids[e] * H, H);
                for (int64_t d = 0; d < H; d++) {
                    const double term = dz[e] * (double)(float)v[d];
                    sum[d] += term, size[d] += fabs(term);
                }
                free(v);
            }
            lk_bf16 *const got = get(row ? dweight + ids[first] * H : dx + token * H, H);
            for (int64_t d = 0; d < H && right; d++)
                if (!(fabs((double)(float)got[d] - sum[d]) <= fabs(sum[d]) * 0x1p-8 + size[d] * 0x1p-16 + 1e-30)) {
                    right = false;
                    snprintf(why, why_bytes, "%s[%lld,%lld] is %.9g, not %.9g", row ? "dweight" : "dx",
                             (long long)(row ? ids[first] : token), (long long)d, (double)(float)got[d], sum[d]);
                }
            free(got);
        }
        free(x);
    }
    free(offsets), free(ids), free(target), free(logits), free(logp), free(dlogp), free(sum), free(dz);
    return right;
}

static void describe(bench_case *c, const shape *s, bool back)
{
    c->name = s->name, c->direction = back ? "backward" : "forward", c->dtype = "bf16";
    c->read_bytes = TRAFFIC_READ(s), c->write_bytes = back ? TRAFFIC_WRITE(s) : 0;
    tensors_of(s, NULL, &c->in_bytes);
    c->mix = back ? bench_streams<1, 1>() : bench_streams<1, 0>();
    c->context = s;
    c->fill = fill, c->launch = launch_lk, c->workspace = workspace, c->check = check;
    if (!back) c->naive = launch_naive;
}

int main(int argc, char **argv)
{
    static bench_case cases[2 * SHAPES], hosts[2];
    for (int k = 0; k < 2 * SHAPES; k++) describe(&cases[k], &shapes[k % SHAPES], k >= SHAPES);
    for (int k = 0; k < 2; k++) describe(&hosts[k], &host_shape, k);
    return bench_run("linear_support", cases, 2 * SHAPES, hosts, 2, argc, argv);
}
