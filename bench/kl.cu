// SPDX-License-Identifier: MIT
/* bench/kl.cu - lk_kl against its ceiling and the formula as the simplest kernel; how to run it: bench.h. */
#include "bench/bench.h"
#include "lk/kl_parallel.cuh"

LK_DEFINE_KL(bf16)
LK_DEFINE_KL(f32)
LK_DEFINE_KL_PARALLEL(bf16)

typedef struct {
    const char *name, *direction, *dtype;
    int64_t rows, vocab;
    int divergence;
} shape;

/* "ranks=1": the kernels for columns that are split over ranks, by the only rank; a copy takes the collective's place.
 * "upstream=rows": an upstream gradient for each row, which lk_torch's backward always has. */
static const shape shapes[] = {
    {"rows=4096 vocab=4096", "forward", "bf16", 4096, 4096, LK_KL_FORWARD},
    {"rows=4096 vocab=32768", "forward", "bf16", 4096, 32768, LK_KL_FORWARD},
    {"rows=4096 vocab=131072", "forward", "bf16", 4096, 131072, LK_KL_FORWARD},
    {"rows=4096 vocab=32768", "backward", "bf16", 4096, 32768, LK_KL_FORWARD},
    {"rows=4096 vocab=131072", "backward", "bf16", 4096, 131072, LK_KL_FORWARD},
    {"rows=4096 vocab=32768 upstream=rows", "backward", "bf16", 4096, 32768, LK_KL_FORWARD},
    {"rows=1000 vocab=32003 upstream=rows", "backward", "bf16", 1000, 32003, LK_KL_FORWARD},
    {"rows=8 vocab=151935", "forward_backward", "bf16", 8, 151935, LK_KL_FORWARD},
    {"rows=4090 vocab=32003", "forward_backward", "bf16", 4090, 32003, LK_KL_FORWARD},
    {"rows=4096 vocab=1024", "forward_backward", "bf16", 4096, 1024, LK_KL_FORWARD},
    {"rows=4096 vocab=4096", "forward_backward", "bf16", 4096, 4096, LK_KL_FORWARD},
    {"rows=4096 vocab=8192", "forward_backward", "bf16", 4096, 8192, LK_KL_FORWARD},
    {"rows=4096 vocab=32768", "forward_backward", "bf16", 4096, 32768, LK_KL_FORWARD},
    {"rows=4096 vocab=131072", "forward_backward", "bf16", 4096, 131072, LK_KL_FORWARD},
    {"rows=4096 vocab=151936", "forward_backward", "bf16", 4096, 151936, LK_KL_FORWARD},
    {"rows=4096 vocab=32768 divergence=reverse", "forward_backward", "bf16", 4096, 32768, LK_KL_REVERSE},
    {"rows=4096 vocab=131072 divergence=reverse", "forward_backward", "bf16", 4096, 131072, LK_KL_REVERSE},
    {"rows=4096 vocab=32768 divergence=jensen_shannon", "forward_backward", "bf16", 4096, 32768, LK_KL_JENSEN_SHANNON},
    {"rows=4096 vocab=131072 divergence=jensen_shannon", "forward_backward", "bf16", 4096, 131072, LK_KL_JENSEN_SHANNON},
    {"rows=4096 vocab=32768 divergence=total_variation", "forward_backward", "bf16", 4096, 32768, LK_KL_TOTAL_VARIATION},
    {"rows=4096 vocab=131072 divergence=total_variation", "forward_backward", "bf16", 4096, 131072, LK_KL_TOTAL_VARIATION},
    {"rows=4096 vocab=32768", "forward_backward", "f32", 4096, 32768, LK_KL_FORWARD},
    {"rows=8192 vocab=16384 ranks=1", "forward", "bf16", 8192, 16384, LK_KL_FORWARD},
    {"rows=8192 vocab=16384 ranks=1", "forward_backward", "bf16", 8192, 16384, LK_KL_FORWARD},
    {"rows=8192 vocab=32768 ranks=1", "forward_backward", "bf16", 8192, 32768, LK_KL_FORWARD},
    {"rows=8192 vocab=32768 ranks=1 divergence=jensen_shannon", "forward_backward", "bf16", 8192, 32768, LK_KL_JENSEN_SHANNON},
};
#define CASES ((int)(sizeof shapes / sizeof shapes[0]))

/* Those whose host time is taken: little work. */
static const shape host_shapes[] = {{"rows=16 vocab=1024", "forward_backward", "bf16", 16, 1024, LK_KL_FORWARD}};
#define HOSTS ((int)(sizeof host_shapes / sizeof host_shapes[0]))

/* The least traffic: both tensors are read, and the gradient is written. loss, four bytes a row, is not counted. */
#define LOGITS_BYTES(s, element) ((size_t)((s)->rows * (s)->vocab) * (element))
#define TRAFFIC_READ(s, element) (2 * LOGITS_BYTES(s, element))
#define TRAFFIC_WRITE(s, element) (gives_gradient(s) ? LOGITS_BYTES(s, element) : 0)

static bool gives_loss(const shape *s) { return strcmp(s->direction, "backward") != 0; }
static bool gives_gradient(const shape *s) { return strcmp(s->direction, "forward") != 0; }
static bool is_split(const shape *s) { return strstr(s->name, " ranks=") != NULL; }
static bool has_upstreams(const shape *s) { return strstr(s->name, " upstream=rows") != NULL; }
static bool is_f32(const shape *s) { return strcmp(s->dtype, "f32") == 0; }

/* ---- The baseline: the formula of FORWARD, untuned ------------------------------------------------------------------------ */

#define NAIVE_THREADS 256

/* The sum, or the largest, of x over a block. */
LK_DEVICE float naive_over_block(float x, bool sum)
{
    LK_SHARED(float, part, [NAIVE_THREADS]);
    part[threadIdx.x] = x;
    for (int half = NAIVE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads(); /* part is complete up to 2 half */
        if ((int)threadIdx.x < half)
            part[threadIdx.x] = sum ? part[threadIdx.x] + part[threadIdx.x + half]
                                    : fmaxf(part[threadIdx.x], part[threadIdx.x + half]);
    }
    __syncthreads(); /* part[0] is the result */
    x = part[0];
    __syncthreads(); /* all have read it */
    return x;
}

/* A block owns a row: four passes over both tensors. */
template <class T> LK_KERNEL void naive_kernel(lk_kl_args a)
{
    const T *const x = (const T *)a.logits + blockIdx.x * a.vocab, *const y = (const T *)a.teacher + blockIdx.x * a.vocab;
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, loss = 0.0f;
    for (int64_t c = threadIdx.x; c < a.vocab; c += NAIVE_THREADS)
        max[0] = fmaxf(max[0], lk_to_float(x[c])), max[1] = fmaxf(max[1], lk_to_float(y[c]));
    for (int i = 0; i < 2; i++) max[i] = naive_over_block(max[i], false);
    for (int64_t c = threadIdx.x; c < a.vocab; c += NAIVE_THREADS)
        sum[0] += expf(lk_to_float(x[c]) - max[0]), sum[1] += expf(lk_to_float(y[c]) - max[1]);
    for (int i = 0; i < 2; i++) sum[i] = max[i] + logf(naive_over_block(sum[i], true));
    for (int64_t c = threadIdx.x; c < a.vocab; c += NAIVE_THREADS) {
        const float log_p = lk_to_float(x[c]) - sum[0], log_q = lk_to_float(y[c]) - sum[1];
        loss += expf(log_q) * (log_q - log_p);
        if (a.dlogits) lk_put((T *)a.dlogits + blockIdx.x * a.vocab + c, expf(log_p) - expf(log_q));
    }
    loss = naive_over_block(loss, true);
    if (threadIdx.x == 0 && a.loss) a.loss[blockIdx.x] = loss;
}

/* ---- The functions of a case ----------------------------------------------------------------------------------------------- */

static lk_kl_args args_of(const shape *s, const bench_buffers *set, int path)
{
    lk_kl_args args = {};
    args.logits = set->read, args.teacher = (const char *)set->read + LOGITS_BYTES(s, is_f32(s) ? 4 : 2);
    args.loss = gives_loss(s) ? (float *)set->out : NULL, args.dlogits = gives_gradient(s) ? set->write : NULL;
    if (has_upstreams(s)) args.upstream = (const float *)set->in, args.upstream_per_row = 1;
    args.rows = s->rows, args.vocab = s->vocab, args.divergence = s->divergence, args.path = path;
    return args;
}

static lk_status copy_gather(void *, const void *send, void *receive, size_t bytes, cudaStream_t stream)
{
    return (lk_status)cudaMemcpyAsync(receive, send, bytes, cudaMemcpyDeviceToDevice, stream);
}
static lk_kl_parallel_args split_args_of(const bench_case *c, const bench_buffers *set, int path)
{
    lk_kl_parallel_args args = {};
    args.common = args_of((const shape *)c->context, set, path);
    args.parallel.vocab_total = args.common.vocab, args.parallel.ranks = 1, args.parallel.all_gather = copy_gather;
    args.common.workspace = set->workspace, args.common.workspace_bytes = c->workspace_bytes;
    return args;
}
static size_t workspace(const bench_case *c, int path)
{
    char *const anywhere = (char *)256; /* the query looks at what is NULL, and at no memory */
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    const lk_kl_parallel_args args = split_args_of(c, &set, path);
    size_t bytes = 0;
    BENCH_CUDA((cudaError_t)(gives_gradient((const shape *)c->context)
                                 ? lk_kl_parallel_forward_backward_workspace_bytes_bf16(&args, &bytes)
                                 : lk_kl_parallel_forward_workspace_bytes_bf16(&args, &bytes)));
    return bytes;
}

static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    bench_fill(s->dtype, set->read, 2 * s->rows * s->vocab, 1.5f, 2 * (uint64_t)number, stream);
    if (has_upstreams(s)) bench_fill("f32", set->in, s->rows, 1.0f, 2 * (uint64_t)number + 1, stream);
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    return (lk_status)lk_launch(is_f32(s) ? naive_kernel<lk_f32> : naive_kernel<lk_bf16>, s->rows, NAIVE_THREADS, 0, stream,
                                args_of(s, set, 0));
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const lk_kl_args args = args_of(s, set, path);
    if (is_split(s)) {
        const lk_kl_parallel_args split = split_args_of(c, set, path);
        if (!gives_gradient(s)) return lk_kl_parallel_forward_bf16(&split, stream);
        return lk_kl_parallel_forward_backward_bf16(&split, stream);
    }
    if (!gives_gradient(s)) return is_f32(s) ? lk_kl_forward_f32(&args, stream) : lk_kl_forward_bf16(&args, stream);
    if (!gives_loss(s)) return is_f32(s) ? lk_kl_backward_f32(&args, stream) : lk_kl_backward_bf16(&args, stream);
    return is_f32(s) ? lk_kl_forward_backward_f32(&args, stream) : lk_kl_forward_backward_bf16(&args, stream);
}

/* Holds a row against double. The values are below 6, so a log-probability is within 2^-18. */
template <class T>
static bool check_row(const shape *s, const T *x, const T *y, const T *dx, const float *loss, double upstream, int64_t row,
                      char *why, size_t why_bytes)
{
    double lse[2] = {0, 0}, sum[2] = {0, 0};
    const T *const of[2] = {x, y};
    for (int i = 0; i < 2; i++) {
        for (int64_t c = 0; c < s->vocab; c++) lse[i] += exp((double)(float)of[i][c]);
        lse[i] = log(lse[i]);
    }
    for (int64_t c = 0; c < s->vocab; c++) { /* sum[0]: the loss; sum[1]: KL(p || m), or the sum of p where q > p */
        const double lp = (double)(float)x[c] - lse[0], lq = (double)(float)y[c] - lse[1], p = exp(lp), q = exp(lq), m = (p + q) / 2;
        if (s->divergence == LK_KL_FORWARD) sum[0] += q * (lq - lp);
        if (s->divergence == LK_KL_REVERSE) sum[0] += p * (lp - lq);
        if (s->divergence == LK_KL_JENSEN_SHANNON) sum[0] += (p * (lp - log(m)) + q * (lq - log(m))) / 2, sum[1] += p * (lp - log(m));
        if (s->divergence == LK_KL_TOTAL_VARIATION) sum[0] += fabs(q - p) / 2, sum[1] += q > p ? p : 0;
    }
    if (loss && !(fabs((double)loss[row] - sum[0]) <= 1e-5 * sum[0])) {
        snprintf(why, why_bytes, "loss[%lld] is %.9g, not %.9g", (long long)row, (double)loss[row], sum[0]);
        return false;
    }
    for (int64_t c = 0; dx && c < s->vocab; c++) {
        const double lp = (double)(float)x[c] - lse[0], lq = (double)(float)y[c] - lse[1], p = exp(lp), q = exp(lq), m = (p + q) / 2;
        const double of_one = s->divergence == LK_KL_FORWARD   ? p - q
                              : s->divergence == LK_KL_REVERSE ? p * (lp - lq - sum[0])
                              : s->divergence == LK_KL_TOTAL_VARIATION ? p * (sum[1] - (q > p))
                                                                       : p * (lp - log(m) - sum[1]) / 2;
        const double right = upstream * of_one;
        if (s->divergence == LK_KL_TOTAL_VARIATION && fabs(q - p) <= 1e-5 * p) continue; /* it may count to either side */
        const double value = (double)(float)dx[c], rounding = sizeof(T) == 4 ? 0x1p-24 : 0x1p-8;
        if (!(fabs(value - right) <= rounding * fabs(right) + fabs(upstream) * 1e-5 * (p + q))) {
            snprintf(why, why_bytes, "dlogits[%lld,%lld] is %.9g, not %.9g", (long long)row, (long long)c, value, right);
            return false;
        }
    }
    return true;
}

/* Checks the first, the last and two rows between. */
template <class T> static bool check_rows(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const int64_t rows[4] = {0, s->rows / 3, s->rows * 2 / 3 + 1, s->rows - 1};
    const size_t row_bytes = (size_t)s->vocab * sizeof(T);
    T *const x = (T *)malloc(3 * row_bytes), *const y = x + s->vocab, *const dx = y + s->vocab;
    float *const loss = (float *)calloc((size_t)s->rows, sizeof(float));
    if (gives_loss(s)) BENCH_CUDA(cudaMemcpy(loss, set->out, (size_t)s->rows * sizeof(float), cudaMemcpyDeviceToHost));
    bool right = true;
    for (int k = 0; right && k < 4; k++) {
        const T *const from = (const T *)set->read + rows[k] * s->vocab;
        BENCH_CUDA(cudaMemcpy(x, from, row_bytes, cudaMemcpyDeviceToHost));
        BENCH_CUDA(cudaMemcpy(y, from + s->rows * s->vocab, row_bytes, cudaMemcpyDeviceToHost));
        if (gives_gradient(s))
            BENCH_CUDA(cudaMemcpy(dx, (const T *)set->write + rows[k] * s->vocab, row_bytes, cudaMemcpyDeviceToHost));
        float upstream = 1.0f;
        const float *const ups = (const float *)set->in;
        if (has_upstreams(s)) BENCH_CUDA(cudaMemcpy(&upstream, ups + rows[k], sizeof upstream, cudaMemcpyDeviceToHost));
        right = check_row(s, x, y, gives_gradient(s) ? dx : NULL, gives_loss(s) ? loss : NULL, (double)upstream, rows[k], why,
                          why_bytes);
    }
    free(x), free(loss);
    return right;
}

static void describe(bench_case *c, const shape *s)
{
    const size_t element = is_f32(s) ? sizeof(lk_f32) : sizeof(lk_bf16);
    c->name = s->name, c->direction = s->direction, c->dtype = s->dtype;
    c->read_bytes = TRAFFIC_READ(s, element), c->write_bytes = TRAFFIC_WRITE(s, element);
    c->in_bytes = has_upstreams(s) ? (size_t)s->rows * sizeof(float) : 0;
    c->out_bytes = gives_loss(s) ? (size_t)s->rows * sizeof(float) : 0;
    c->mix = gives_gradient(s) ? bench_streams<2, 1>() : bench_streams<1, 0>();
    c->context = s;
    c->fill = fill, c->launch = launch_lk, c->naive = s->divergence == LK_KL_FORWARD && !is_split(s) && !has_upstreams(s) ? launch_naive : NULL;
    if (is_split(s)) c->workspace = workspace;
    c->check = is_f32(s) ? check_rows<lk_f32> : check_rows<lk_bf16>;
}

int main(int argc, char **argv)
{
    static bench_case cases[CASES], hosts[HOSTS];
    for (int k = 0; k < CASES; k++) describe(&cases[k], &shapes[k]);
    for (int k = 0; k < HOSTS; k++) describe(&hosts[k], &host_shapes[k]);
    return bench_run("kl", cases, CASES, hosts, HOSTS, argc, argv);
}
