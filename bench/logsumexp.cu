// SPDX-License-Identifier: MIT
/* bench/logsumexp.cu - lk_logsumexp against its ceiling, the formula as the simplest kernel and, where rows are contiguous,
 * CUB's segmented reduction; how to run it: bench.h. */
#include <cub/device/device_segmented_reduce.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <thrust/iterator/transform_output_iterator.h>

#include "bench/bench.h"
#include "lk/logsumexp.cuh"

LK_DEFINE_LOGSUMEXP(bf16)
LK_DEFINE_LOGSUMEXP(f32)

typedef struct {
    const char *name, *direction, *dtype;
    int64_t outer, cols, inner;
    int low; /* backward is given lse_low too */
} shape;

/* "upstream=T": the upstream gradient is of x's type, as autograd gives it for a result of that type. */
static const shape shapes[] = {
    {"rows=4096 cols=1024", "forward", "bf16", 4096, 1024, 1, 0},
    {"rows=4096 cols=2048", "forward", "bf16", 4096, 2048, 1, 0},
    {"rows=4096 cols=4096", "forward", "bf16", 4096, 4096, 1, 0},
    {"rows=4096 cols=8192", "forward", "bf16", 4096, 8192, 1, 0},
    {"rows=4096 cols=16384", "forward", "bf16", 4096, 16384, 1, 0},
    {"rows=4096 cols=32768", "forward", "bf16", 4096, 32768, 1, 0},
    {"rows=4096 cols=65536", "forward", "bf16", 4096, 65536, 1, 0},
    {"rows=4096 cols=131072", "forward", "bf16", 4096, 131072, 1, 0},
    {"rows=8 cols=151935", "forward", "bf16", 8, 151935, 1, 0},
    {"rows=64 cols=128256", "forward", "bf16", 64, 128256, 1, 0},
    {"rows=1000 cols=32003", "forward", "bf16", 1000, 32003, 1, 0},
    {"outer=64 cols=4096 inner=1024", "forward", "bf16", 64, 4096, 1024, 0},
    {"rows=4096 cols=65536", "forward", "f32", 4096, 65536, 1, 0},
    {"rows=4096 cols=1024", "backward", "bf16", 4096, 1024, 1, 0},
    {"rows=4096 cols=2048", "backward", "bf16", 4096, 2048, 1, 0},
    {"rows=4096 cols=4096", "backward", "bf16", 4096, 4096, 1, 0},
    {"rows=4096 cols=8192", "backward", "bf16", 4096, 8192, 1, 0},
    {"rows=4096 cols=16384", "backward", "bf16", 4096, 16384, 1, 0},
    {"rows=4096 cols=32768", "backward", "bf16", 4096, 32768, 1, 0},
    {"rows=4096 cols=65536", "backward", "bf16", 4096, 65536, 1, 0},
    {"rows=4096 cols=131072", "backward", "bf16", 4096, 131072, 1, 0},
    {"outer=64 cols=4096 inner=1024", "backward", "bf16", 64, 4096, 1024, 0},
    {"rows=4096 cols=8192", "backward", "f32", 4096, 8192, 1, 0},
    {"rows=4096 cols=1024 lse_low=1", "backward", "bf16", 4096, 1024, 1, 1},
    {"rows=4096 cols=8192 lse_low=1", "backward", "bf16", 4096, 8192, 1, 1},
    {"rows=4096 cols=8192 lse_low=1", "backward", "f32", 4096, 8192, 1, 1},
    {"rows=4096 cols=4096 lse_low=1 upstream=T", "backward", "bf16", 4096, 4096, 1, 1},
    {"rows=4096 cols=65536 lse_low=1 upstream=T", "backward", "bf16", 4096, 65536, 1, 1},
    {"rows=4090 cols=32003 lse_low=1 upstream=T", "backward", "bf16", 4090, 32003, 1, 1},
    {"rows=4096 cols=1024", "forward then backward", "bf16", 4096, 1024, 1, 0},
    {"rows=4096 cols=8192", "forward then backward", "bf16", 4096, 8192, 1, 0},
    {"rows=4096 cols=131072", "forward then backward", "bf16", 4096, 131072, 1, 0},
};
#define CASES ((int)(sizeof shapes / sizeof shapes[0]))

/* Those whose host time is taken: little work. */
static const shape host_shapes[] = {
    {"rows=16 cols=1024", "forward", "bf16", 16, 1024, 1, 0},
    {"rows=16 cols=1024", "backward", "bf16", 16, 1024, 1, 0},
};
#define HOSTS ((int)(sizeof host_shapes / sizeof host_shapes[0]))

/* The least traffic: forward reads x, backward reads x and writes dx; of both in turn that of backward, since what forward has
 * read may still be in the L2. lse, lse_low and dlse, four bytes a row, are not counted. */
#define TRAFFIC_READ(s, element) ((size_t)((s)->outer * (s)->cols * (s)->inner) * (element))
#define TRAFFIC_WRITE(s, element) (gives_gradient(s) ? TRAFFIC_READ(s, element) : 0)

static bool gives_lse(const shape *s)
{
    return strcmp(s->direction, "backward") != 0;
}

static bool gives_gradient(const shape *s)
{
    return strcmp(s->direction, "forward") != 0;
}

static bool is_f32(const shape *s)
{
    return strcmp(s->dtype, "f32") == 0;
}

static bool is_rounded(const shape *s) /* the upstream gradient */
{
    return strstr(s->name, " upstream=T") != NULL;
}

static size_t row_bytes(const shape *s)
{
    return (size_t)(s->outer * s->inner) * sizeof(float);
}

/* ---- The baseline: the formula, untuned --------------------------------------------------------------------------------- */

typedef struct {
    const void *x;
    float *lse;
    const float *dlse;
    void *dx;
    int64_t outer, cols, inner;
} naive_args;

#define NAIVE_THREADS 256

/* A block owns row (o, i): the maximum first, then the sum of exponentials, x read for each. */
template <class T> LK_KERNEL void naive_forward_kernel(naive_args a)
{
    LK_SHARED(float, part, [NAIVE_THREADS]);
    const int64_t row = blockIdx.x;
    const T *x = (const T *)a.x + row / a.inner * a.cols * a.inner + row % a.inner;
    float max = -INFINITY, sum = 0.0f;
    for (int64_t col = threadIdx.x; col < a.cols; col += NAIVE_THREADS) max = fmaxf(max, lk_to_float(x[col * a.inner]));
    part[threadIdx.x] = max;
    for (int half = NAIVE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads(); /* part is complete up to 2 half */
        if ((int)threadIdx.x < half) part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + half]);
    }
    __syncthreads(); /* part[0] is the maximum */
    max = part[0];
    for (int64_t col = threadIdx.x; col < a.cols; col += NAIVE_THREADS) sum += expf(lk_to_float(x[col * a.inner]) - max);
    __syncthreads(); /* everyone has read the maximum */
    part[threadIdx.x] = sum;
    for (int half = NAIVE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads(); /* part is complete up to 2 half */
        if ((int)threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) a.lse[row] = max + logf(part[0]);
}

/* A thread owns one element. */
template <class T> LK_KERNEL void naive_backward_kernel(naive_args a)
{
    const int64_t i = (int64_t)blockIdx.x * NAIVE_THREADS + threadIdx.x;
    if (i >= a.outer * a.cols * a.inner) return;
    const int64_t row = i / (a.cols * a.inner) * a.inner + i % a.inner;
    lk_put((T *)a.dx + i, a.dlse[row] * expf(lk_to_float(((const T *)a.x)[i]) - a.lse[row]));
}

/* ---- The peer: CUB's reduction of segments, with the state of a log-sum-exp ---------------------------------------------- */

/* Of an element, or of two sets. */
struct cub_state {
    float max, sum;
    cub_state() = default;
    __host__ __device__ cub_state(float x, float terms) : max(x), sum(terms) {}
    template <class T> __host__ __device__ cub_state(T x) : max(lk_to_float(x)), sum(1.0f) {}
};
struct cub_merge {
    __host__ __device__ cub_state operator()(cub_state a, cub_state b) const
    {
        const float max = fmaxf(a.max, b.max);
        return {max, a.sum * expf(a.max - max) + b.sum * expf(b.max - max)};
    }
};
struct cub_lse_of {
    __host__ __device__ float operator()(cub_state s) const { return s.max + logf(s.sum); }
};
struct cub_offset_of { /* of a segment */
    int64_t cols;
    __host__ __device__ int64_t operator()(int64_t row) const { return row * cols; }
};

template <class T> static cudaError_t launch_cub_t(const shape *s, const void *x, float *lse, cudaStream_t stream)
{
    const auto out = thrust::make_transform_output_iterator(lse, cub_lse_of());
    const auto offset = thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0), cub_offset_of{s->cols});
    void *workspace = NULL;
    size_t bytes = 0;
    cudaError_t error = cudaSuccess;
    for (int pass = 0; !error && pass < 2; pass++, workspace = lse) { /* the first asks for the workspace: one unused byte */
        error = cub::DeviceSegmentedReduce::Reduce(workspace, bytes, (const T *)x, out, (int)s->outer, offset, offset + 1,
                                                   cub_merge(), -FLT_MAX, stream);
        if (!error && bytes > 1) error = cudaErrorMemoryAllocation;
    }
    return error;
}

/* ---- The four functions of a case --------------------------------------------------------------------------------------- */

/* `in` holds dlse for a gradient, before it lse for backward alone, and behind it lse_low where that is given; `out` holds lse
 * where forward writes it. A dlse of T has the place of one of floats. */
static float *lse_of(const shape *s, const bench_buffers *set)
{
    return (float *)(gives_lse(s) ? set->out : set->in);
}

static float *dlse_of(const shape *s, const bench_buffers *set)
{
    return (float *)set->in + (gives_lse(s) ? 0 : s->outer * s->inner);
}

static float *lse_low_of(const shape *s, const bench_buffers *set)
{
    return s->low ? dlse_of(s, set) + s->outer * s->inner : NULL;
}

static lk_status launch_naive_forward(const shape *s, const void *x, float *lse, cudaStream_t stream)
{
    const naive_args args = {x, lse, NULL, NULL, s->outer, s->cols, s->inner};
    return (lk_status)lk_launch(is_f32(s) ? naive_forward_kernel<lk_f32> : naive_forward_kernel<lk_bf16>, s->outer * s->inner,
                                NAIVE_THREADS, 0, stream, args);
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    lk_status status = LK_OK;
    if (gives_lse(s)) status = launch_naive_forward(s, set->read, lse_of(s, set), stream);
    if (status || !gives_gradient(s)) return status;
    const naive_args args = {set->read, lse_of(s, set), dlse_of(s, set), set->write, s->outer, s->cols, s->inner};
    return (lk_status)lk_launch(is_f32(s) ? naive_backward_kernel<lk_f32> : naive_backward_kernel<lk_bf16>,
                                lk_ceil_div(s->outer * s->cols * s->inner, NAIVE_THREADS), NAIVE_THREADS, 0, stream, args);
}

static lk_status launch_cub(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    return (lk_status)(is_f32(s) ? launch_cub_t<lk_f32>(s, set->read, lse_of(s, set), stream)
                                 : launch_cub_t<lk_bf16>(s, set->read, lse_of(s, set), stream));
}

static lk_logsumexp_args args_of(const shape *s, const bench_buffers *set, int path)
{
    lk_logsumexp_args args = {};
    args.x = set->read, args.lse = lse_of(s, set), args.lse_low = lse_low_of(s, set);
    if (is_rounded(s)) args.dlse_rounded = dlse_of(s, set);
    else args.dlse = dlse_of(s, set);
    args.dx = set->write;
    args.outer = s->outer, args.cols = s->cols, args.inner = s->inner;
    args.path = path;
    return args;
}

static lk_status launch_forward(const shape *s, const bench_buffers *set, int path, cudaStream_t stream)
{
    const lk_logsumexp_args args = args_of(s, set, path);
    return is_f32(s) ? lk_logsumexp_forward_f32(&args, stream) : lk_logsumexp_forward_bf16(&args, stream);
}

static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    bench_fill(s->dtype, set->read, s->outer * s->cols * s->inner, 1.5f, 2 * (uint64_t)number, stream);
    if (!gives_gradient(s)) return;
    bench_fill(is_rounded(s) ? s->dtype : "f32", dlse_of(s, set), s->outer * s->inner, 1.0f, 2 * (uint64_t)number + 1, stream);
    if (s->low) BENCH_CUDA((cudaError_t)launch_forward(s, set, 0, stream));
    else if (!gives_lse(s)) BENCH_CUDA((cudaError_t)launch_naive_forward(s, set->read, lse_of(s, set), stream));
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    if (gives_lse(s)) {
        const lk_status status = launch_forward(s, set, path, stream);
        if (status || !gives_gradient(s)) return status;
    }
    const lk_logsumexp_args args = args_of(s, set, path);
    return is_f32(s) ? lk_logsumexp_backward_f32(&args, stream) : lk_logsumexp_backward_bf16(&args, stream);
}

/* Holds row (o, i) against double. x and dx are slab o on the host; the limits are those of the header, Numerics. lse is the
 * sum of both parts where there is lse_low. */
template <class T>
static bool check_row(const shape *s, const T *x, const T *dx, double lse, double dlse, int64_t o, int64_t i, char *why,
                      size_t why_bytes)
{
    double max = -INFINITY, min = INFINITY, magnitude = 0, sum = 0;
    for (int64_t col = 0; col < s->cols; col++) {
        const double value = (float)x[col * s->inner + i];
        max = fmax(max, value), min = fmin(min, value), magnitude = fmax(magnitude, fabs(value));
    }
    for (int64_t col = 0; col < s->cols; col++) sum += exp((double)(float)x[col * s->inner + i] - max);
    const double right = max + log(sum), size = s->low ? max - min : magnitude, constant = s->low ? 8 : 4 + fabs(lse);
    const double limit = 8 * 0x1p-24 * (size + log((double)s->cols) + 1);
    if (!(fabs(lse - right) <= limit)) { /* of backward's input too: the gradient's limit stands on it */
        snprintf(why, why_bytes, "lse[%lld,%lld] is %.9g, not %.9g; limit %.2g", (long long)o, (long long)i, lse, right, limit);
        return false;
    }
    const double rounding = sizeof(T) == 4 ? 0x1p-24 : 0x1p-8;
    for (int64_t col = 0; dx && col < s->cols; col++) {
        const double z = (double)(float)x[col * s->inner + i], value = (float)dx[col * s->inner + i];
        const double expected = dlse * exp(z - lse);
        const double error = fabs(expected) * (rounding + (constant + fabs(z - lse)) * 0x1p-23) + 0x1p-126;
        if (!(fabs(value - expected) <= error)) {
            snprintf(why, why_bytes, "dx[%lld,%lld,%lld] is %.9g, not %.9g", (long long)o, (long long)col, (long long)i,
                     value, expected);
            return false;
        }
    }
    return true;
}

/* Checks the first, the last and one row between in the first, the last and two slabs between. */
template <class T> static bool check_rows(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const int64_t slab = s->cols * s->inner, rows = s->outer * s->inner;
    const int64_t slabs[4] = {0, s->outer / 3, s->outer * 2 / 3 + 1, s->outer - 1};
    const int64_t inners[3] = {0, s->inner / 2 + 1, s->inner - 1};
    const bool gradient = gives_gradient(s);
    T *x = (T *)malloc((size_t)slab * sizeof(T)), *dx = gradient ? (T *)malloc((size_t)slab * sizeof(T)) : NULL;
    float *lse = (float *)calloc(3 * (size_t)rows, sizeof(float)), *dlse = lse + rows, *low = dlse + rows;
    BENCH_CUDA(cudaMemcpy(lse, lse_of(s, set), row_bytes(s), cudaMemcpyDeviceToHost));
    if (gradient) BENCH_CUDA(cudaMemcpy(dlse, dlse_of(s, set), row_bytes(s), cudaMemcpyDeviceToHost));
    if (s->low) BENCH_CUDA(cudaMemcpy(low, lse_low_of(s, set), row_bytes(s), cudaMemcpyDeviceToHost));
    for (int64_t row = rows; is_rounded(s) && row-- > 0;) dlse[row] = (float)((const T *)dlse)[row]; /* from behind, in place */
    bool right = true;
    for (int k = 0; right && k < 4; k++) {
        const int64_t o = slabs[k];
        BENCH_CUDA(cudaMemcpy(x, (const T *)set->read + o * slab, (size_t)slab * sizeof(T), cudaMemcpyDeviceToHost));
        if (gradient)
            BENCH_CUDA(cudaMemcpy(dx, (const T *)set->write + o * slab, (size_t)slab * sizeof(T), cudaMemcpyDeviceToHost));
        for (int j = 0; right && j < (s->inner > 1 ? 3 : 1); j++) {
            const int64_t i = inners[j], row = o * s->inner + i;
            right = check_row(s, x, dx, (double)lse[row] + (double)low[row], dlse[row], o, i, why, why_bytes);
        }
    }
    free(x), free(dx), free(lse);
    return right;
}

static void describe(bench_case *c, const shape *s)
{
    const size_t element = is_f32(s) ? sizeof(lk_f32) : sizeof(lk_bf16);
    c->name = s->name, c->direction = s->direction, c->dtype = s->dtype;
    c->read_bytes = TRAFFIC_READ(s, element), c->write_bytes = TRAFFIC_WRITE(s, element);
    c->out_bytes = gives_lse(s) ? row_bytes(s) : 0;
    c->in_bytes = row_bytes(s) * (gives_gradient(s) + !gives_lse(s) + s->low);
    c->mix = gives_gradient(s) ? bench_streams<1, 1>() : bench_streams<1, 0>();
    c->context = s;
    c->fill = fill, c->launch = launch_lk, c->naive = s->low ? NULL : launch_naive;
    if (!gives_gradient(s) && s->inner == 1) c->peer = launch_cub, c->peer_name = "cub";
    c->check = is_f32(s) ? check_rows<lk_f32> : check_rows<lk_bf16>;
}

int main(int argc, char **argv)
{
    static bench_case cases[CASES], hosts[HOSTS];
    for (int k = 0; k < CASES; k++) describe(&cases[k], &shapes[k]);
    for (int k = 0; k < HOSTS; k++) describe(&hosts[k], &host_shapes[k]);
    return bench_run("logsumexp", cases, CASES, hosts, HOSTS, argc, argv);
}
