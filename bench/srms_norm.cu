// SPDX-License-Identifier: MIT
/* bench/srms_norm.cu - lk_srms_norm against its ceiling and the formula as simple kernels; how to run it: bench.h. */
#include "bench/bench.h"
#include "lk/srms_norm.cuh"

LK_DEFINE_SRMS_NORM(bf16)
LK_DEFINE_SRMS_NORM(f16)
LK_DEFINE_SRMS_NORM(f32)

/* residual: forward has a residual in and out, backward starts from residual_out and has its gradient; not where
 * backward follows forward. weight: there is one, and backward computes dweight. What only the general kernels take: offset is
 * weight_offset; bias: forward has one, and backward computes dbias; groups: as in the args. wide: dy is f32 beside 16 bits.
 * rounded: forward with round_sum. */
typedef struct shape {
    const char *name, *direction, *dtype;
    int64_t rows, cols;
    int residual, weight;
    float offset = 0;
    int bias = 0, groups = 0, wide = 0, rounded = 0;
} shape;

static const shape shapes[] = {
    {"rows=4 cols=1024 residual=0", "forward", "bf16", 4, 1024, 0, 0},
    {"rows=4096 cols=1024 residual=0", "forward", "bf16", 4096, 1024, 0, 0},
    {"rows=4096 cols=1024 residual=1", "forward", "bf16", 4096, 1024, 1, 0},
    {"rows=4096 cols=2048 residual=0", "forward", "bf16", 4096, 2048, 0, 0},
    {"rows=8192 cols=2048 residual=0", "forward", "bf16", 8192, 2048, 0, 0},
    {"rows=16384 cols=2048 residual=0", "forward", "bf16", 16384, 2048, 0, 0},
    {"rows=32768 cols=2048 residual=0", "forward", "bf16", 32768, 2048, 0, 0},
    {"rows=65536 cols=2048 residual=0", "forward", "bf16", 65536, 2048, 0, 0},
    {"rows=131072 cols=2048 residual=0", "forward", "bf16", 131072, 2048, 0, 0},
    {"rows=4096 cols=2048 residual=1", "forward", "bf16", 4096, 2048, 1, 0},
    {"rows=8192 cols=2048 residual=1", "forward", "bf16", 8192, 2048, 1, 0},
    {"rows=16384 cols=2048 residual=1", "forward", "bf16", 16384, 2048, 1, 0},
    {"rows=32768 cols=2048 residual=1", "forward", "bf16", 32768, 2048, 1, 0},
    {"rows=65536 cols=2048 residual=1", "forward", "bf16", 65536, 2048, 1, 0},
    {"rows=131072 cols=2048 residual=1", "forward", "bf16", 131072, 2048, 1, 0},
    {"rows=16384 cols=4096 residual=0", "forward", "bf16", 16384, 4096, 0, 0},
    {"rows=16384 cols=5120 residual=0", "forward", "bf16", 16384, 5120, 0, 0},
    {"rows=16384 cols=8191 residual=0", "forward", "bf16", 16384, 8191, 0, 0},
    {"rows=16384 cols=8191 residual=0 weight=1", "forward", "bf16", 16384, 8191, 0, 1},
    {"rows=16384 cols=8192 residual=0", "forward", "bf16", 16384, 8192, 0, 0},
    {"rows=4096 cols=32768 residual=0", "forward", "bf16", 4096, 32768, 0, 0},
    {"rows=1024 cols=262144 residual=0", "forward", "bf16", 1024, 262144, 0, 0},
    {"rows=16384 cols=4096 residual=0", "forward", "f32", 16384, 4096, 0, 0},
    {"rows=16384 cols=4096 residual=1 weight=1", "forward", "bf16", 16384, 4096, 1, 1},
    {"rows=4096 cols=2048 residual=0 weight=1", "forward", "bf16", 4096, 2048, 0, 1},
    {"rows=4096 cols=2048 residual=1 weight=1", "forward", "bf16", 4096, 2048, 1, 1},
    {"rows=16384 cols=4096 residual=0 weight=1", "forward", "bf16", 16384, 4096, 0, 1},
    {"rows=16384 cols=8192 residual=0 weight=1", "forward", "bf16", 16384, 8192, 0, 1},
    {"rows=64 cols=8192 residual=1 weight=1", "forward", "bf16", 64, 8192, 1, 1},
    {"rows=100 cols=5120 residual=1 weight=1", "forward", "bf16", 100, 5120, 1, 1},
    {"rows=1000 cols=4096 residual=1 weight=1", "forward", "bf16", 1000, 4096, 1, 1},
    {"rows=8188 cols=4096 residual=1 weight=1", "forward", "bf16", 8188, 4096, 1, 1},
    {"rows=1 cols=4096 residual=1 weight=1", "forward", "bf16", 1, 4096, 1, 1},
    {"rows=16384 cols=4096 residual=1 weight=1 round_sum=1", "forward", "bf16", 16384, 4096, 1, 1, 0.0f, 0, 0, 0, 1},
    {"rows=1000 cols=4096 residual=1 weight=1 round_sum=1", "forward", "bf16", 1000, 4096, 1, 1, 0.0f, 0, 0, 0, 1},
    {"rows=16384 cols=4096 residual=0 weight=1 offset=1", "forward", "bf16", 16384, 4096, 0, 1, 1.0f, 0, 0},
    {"rows=16384 cols=4096 residual=0 weight=1 bias=1", "forward", "bf16", 16384, 4096, 0, 1, 0.0f, 1, 0},
    {"rows=131072 cols=128 residual=0 weight=1", "forward", "bf16", 131072, 128, 0, 1},
    {"rows=131072 cols=128 residual=0 weight=1 groups=32", "forward", "bf16", 131072, 128, 0, 1, 0.0f, 0, 32},
    {"rows=4 cols=1024 residual=0", "backward", "bf16", 4, 1024, 0, 0},
    {"rows=4096 cols=1024 residual=0", "backward", "bf16", 4096, 1024, 0, 0},
    {"rows=4096 cols=1024 residual=1", "backward", "bf16", 4096, 1024, 1, 0},
    {"rows=4096 cols=2048 residual=0", "backward", "bf16", 4096, 2048, 0, 0},
    {"rows=8192 cols=2048 residual=0", "backward", "bf16", 8192, 2048, 0, 0},
    {"rows=16384 cols=2048 residual=0", "backward", "bf16", 16384, 2048, 0, 0},
    {"rows=32768 cols=2048 residual=0", "backward", "bf16", 32768, 2048, 0, 0},
    {"rows=65536 cols=2048 residual=0", "backward", "bf16", 65536, 2048, 0, 0},
    {"rows=131072 cols=2048 residual=0", "backward", "bf16", 131072, 2048, 0, 0},
    {"rows=4096 cols=2048 residual=1", "backward", "bf16", 4096, 2048, 1, 0},
    {"rows=8192 cols=2048 residual=1", "backward", "bf16", 8192, 2048, 1, 0},
    {"rows=16384 cols=2048 residual=1", "backward", "bf16", 16384, 2048, 1, 0},
    {"rows=32768 cols=2048 residual=1", "backward", "bf16", 32768, 2048, 1, 0},
    {"rows=65536 cols=2048 residual=1", "backward", "bf16", 65536, 2048, 1, 0},
    {"rows=131072 cols=2048 residual=1", "backward", "bf16", 131072, 2048, 1, 0},
    {"rows=16384 cols=8191 residual=0", "backward", "bf16", 16384, 8191, 0, 0},
    {"rows=16384 cols=8191 residual=1", "backward", "bf16", 16384, 8191, 1, 0},
    {"rows=16384 cols=4096 residual=0", "backward", "f16", 16384, 4096, 0, 0},
    {"rows=16384 cols=4096 residual=0", "backward", "f32", 16384, 4096, 0, 0},
    {"rows=131072 cols=2048 residual=0 weight=1", "backward", "bf16", 131072, 2048, 0, 1},
    {"rows=16384 cols=4096 residual=1 weight=1", "backward", "bf16", 16384, 4096, 1, 1},
    {"rows=16384 cols=5120 residual=1 weight=1", "backward", "bf16", 16384, 5120, 1, 1},
    {"rows=16384 cols=8191 residual=1 weight=1", "backward", "bf16", 16384, 8191, 1, 1},
    {"rows=16384 cols=8192 residual=1 weight=1", "backward", "bf16", 16384, 8192, 1, 1},
    {"rows=100 cols=5120 residual=1 weight=1", "backward", "bf16", 100, 5120, 1, 1},
    {"rows=1000 cols=4096 residual=1 weight=1", "backward", "bf16", 1000, 4096, 1, 1},
    {"rows=8188 cols=4096 residual=1 weight=1", "backward", "bf16", 8188, 4096, 1, 1},
    {"rows=16384 cols=4096 residual=0 weight=1 offset=1", "backward", "bf16", 16384, 4096, 0, 1, 1.0f, 0, 0},
    {"rows=16384 cols=4096 residual=0 weight=1 bias=1", "backward", "bf16", 16384, 4096, 0, 1, 0.0f, 1, 0},
    {"rows=131072 cols=128 residual=0 weight=1", "backward", "bf16", 131072, 128, 0, 1},
    {"rows=131072 cols=128 residual=0 weight=1 groups=32", "backward", "bf16", 131072, 128, 0, 1, 0.0f, 0, 32},
    {"rows=16384 cols=4096 residual=0 weight=1 dy=f32", "backward", "bf16", 16384, 4096, 0, 1, 0.0f, 0, 0, 1},
    {"rows=16384 cols=4096 residual=1 weight=1 dy=f32", "backward", "bf16", 16384, 4096, 1, 1, 0.0f, 0, 0, 1},
    {"rows=4096 cols=1024 residual=0", "forward then backward", "bf16", 4096, 1024, 0, 0},
    {"rows=131072 cols=2048 residual=0", "forward then backward", "bf16", 131072, 2048, 0, 0},
    {"rows=4090 cols=500 residual=0 weight=1", "forward then backward", "bf16", 4090, 500, 0, 1},
    {"rows=4096 cols=2048 residual=0 weight=1", "forward then backward", "bf16", 4096, 2048, 0, 1},
    {"rows=8192 cols=2048 residual=0 weight=1", "forward then backward", "bf16", 8192, 2048, 0, 1},
    {"rows=131072 cols=2048 residual=0 weight=1", "forward then backward", "bf16", 131072, 2048, 0, 1},
};
#define CASES ((int)(sizeof shapes / sizeof shapes[0]))

/* Host times are measured for these: little work. A block of the last one needs 64 KiB of shared memory, of the one before it
 * 16. From 32 KiB on a launch reads the kernel's limit of shared memory and raises it where it must. */
static const shape host_shapes[] = {
    {"rows=16 cols=1024 residual=0", "forward", "bf16", 16, 1024, 0, 0},
    {"rows=16 cols=1024 residual=0", "backward", "bf16", 16, 1024, 0, 0},
    {"rows=16 cols=1024 residual=0 weight=1", "backward", "bf16", 16, 1024, 0, 1},
    {"rows=16 cols=8192 residual=0 weight=1", "backward", "bf16", 16, 8192, 0, 1},
};
#define HOSTS ((int)(sizeof host_shapes / sizeof host_shapes[0]))
#define EPS 1e-6f

/* The least traffic in tensors of rows x cols elements: forward reads x (and residual) and writes y (and residual_out);
 * backward reads s, that is x or residual_out, and dy (and dresidual_out) and writes dx. Where backward follows forward x
 * counts once, since it may still be in the L2. rstd, weight and dweight are small and not counted. A wide dy counts as two. */
#define TRAFFIC_READS(s) (1 + gives_dx(s) + (s)->wide + (s)->residual)
#define TRAFFIC_WRITES(s) (gives_y(s) + gives_dx(s) + (gives_y(s) && (s)->residual))

static bool gives_y(const shape *s)
{
    return strcmp(s->direction, "backward") != 0;
}

static bool gives_dx(const shape *s)
{
    return strcmp(s->direction, "forward") != 0;
}

static size_t element_bytes(const shape *s)
{
    return strcmp(s->dtype, "f32") == 0 ? sizeof(lk_f32) : sizeof(lk_bf16);
}

static size_t tensor_bytes(const shape *s)
{
    return (size_t)(s->rows * s->cols) * element_bytes(s);
}

static size_t dresidual_at(const shape *s)
{
    return (size_t)(2 + s->wide) * tensor_bytes(s);
}

/* `in` holds the weight, then the bias, then for backward alone rstd; `out` holds rstd where forward writes it, then dweight,
 * then dbias. */
static int64_t columns_of(const shape *s)
{
    return (s->groups ? s->groups : 1) * s->cols;
}

static size_t weight_bytes(const shape *s)
{
    return s->weight ? bench_round_up((size_t)columns_of(s) * element_bytes(s)) : 0;
}

static float *rstd_of(const shape *s, const bench_buffers *set)
{
    return (float *)(gives_y(s) ? set->out : set->in + (s->bias ? 2 : 1) * weight_bytes(s));
}

static char *dweight_of(const shape *s, const bench_buffers *set)
{
    return set->out + (gives_y(s) ? (size_t)s->rows * sizeof(float) : 0);
}

static char *dbias_of(const shape *s, const bench_buffers *set)
{
    return dweight_of(s, set) + (size_t)columns_of(s) * element_bytes(s);
}

/* What is written holds y (and residual_out), then dx. */
static char *dx_of(const shape *s, const bench_buffers *set)
{
    return set->write + (gives_y(s) ? tensor_bytes(s) : 0);
}

/* ---- The baseline: the formula, untuned --------------------------------------------------------------------------------- */

typedef struct {
    const void *x, *residual, *weight; /* x: s in backward */
    void *y, *residual_out;            /* NULL to skip */
    float *rstd;
    const void *dy, *dresidual_out;
    void *dx, *dweight;
    int64_t rows, cols;
    const void *bias;
    void *dbias;
    float offset;
    int groups; /* at least 1 */
    int wide, rounded;
} naive_args;

/* Threads per row. At most 256 squares per thread: they have few bits and round in one direction, so that a float sum of 1024
 * of them is off by 34 2^-24, of 256 by 6 2^-24 (bf16, N(0, 1.5)). */
#define NAIVE_THREADS(cols) ((cols) <= 65536 ? 256 : 1024)

/* The sum of every thread's value, for all of them. */
LK_DEVICE float naive_sum(float value)
{
    LK_SHARED(float, part, [1024]);
    part[threadIdx.x] = value;
    for (int half = (int)blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads(); /* part is complete up to 2 half */
        if ((int)threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads(); /* part[0] is the sum */
    return part[0];
}

/* Element i of a tensor that may be absent. */
template <class T> LK_DEVICE float naive_at(const void *tensor, int64_t i, float absent)
{
    return tensor ? lk_to_float(((const T *)tensor)[i]) : absent;
}

template <class T> LK_DEVICE float naive_dy(const naive_args &a, int64_t i)
{
    return a.wide ? naive_at<float>(a.dy, i, 1.0f) : naive_at<T>(a.dy, i, 1.0f);
}

/* The factor of a column. */
template <class T> LK_DEVICE float naive_factor(const naive_args &a, int64_t row, int64_t col)
{
    return a.offset + naive_at<T>(a.weight, row % a.groups * a.cols + col, 1.0f);
}

/* x + residual, rounded with round_sum. */
template <class T> LK_DEVICE float naive_s(const naive_args &a, int64_t i)
{
    const float s = naive_at<T>(a.x, i, 0.0f) + naive_at<T>(a.residual, i, 0.0f);
    T rounded;
    lk_put(&rounded, s);
    return a.rounded ? lk_to_float(rounded) : s;
}

/* A block owns a row: the sum of squares first, then y, x and residual read for each. */
template <class T> LK_KERNEL void naive_forward_kernel(naive_args a)
{
    const int64_t row = blockIdx.x, begin = row * a.cols;
    float sum = 0.0f;
    for (int64_t col = threadIdx.x; col < a.cols; col += blockDim.x) {
        const float s = naive_s<T>(a, begin + col);
        sum += s * s;
    }
    const float rstd = 1.0f / sqrtf(naive_sum(sum) / (float)a.cols + EPS);
    if (threadIdx.x == 0) a.rstd[row] = rstd;
    for (int64_t col = threadIdx.x; col < a.cols; col += blockDim.x) {
        const float s = naive_s<T>(a, begin + col);
        const float bias = naive_at<T>(a.bias, row % a.groups * a.cols + col, 0.0f);
        if (a.y) lk_put((T *)a.y + begin + col, s * rstd * naive_factor<T>(a, row, col) + bias);
        if (a.residual_out) lk_put((T *)a.residual_out + begin + col, s);
    }
}

/* A block owns a row: the mean of g h first, then dx. */
template <class T> LK_KERNEL void naive_backward_kernel(naive_args a)
{
    const int64_t row = blockIdx.x, begin = row * a.cols;
    const float rstd = a.rstd[row];
    float sum = 0.0f;
    for (int64_t col = threadIdx.x; col < a.cols; col += blockDim.x) {
        const float g = naive_dy<T>(a, begin + col) * naive_factor<T>(a, row, col);
        sum += g * naive_at<T>(a.x, begin + col, 0.0f) * rstd;
    }
    const float mean = naive_sum(sum) / (float)a.cols;
    for (int64_t col = threadIdx.x; col < a.cols; col += blockDim.x) {
        const float g = naive_dy<T>(a, begin + col) * naive_factor<T>(a, row, col);
        const float h = naive_at<T>(a.x, begin + col, 0.0f) * rstd;
        lk_put((T *)a.dx + begin + col, rstd * (g - h * mean) + naive_at<T>(a.dresidual_out, begin + col, 0.0f));
    }
}

#define NAIVE_SIDE 32

/* A block owns NAIVE_SIDE columns of all groups, a lane one of them. Each of NAIVE_SIDE warps adds some rows; the first adds
 * their sums. */
template <class T> LK_KERNEL void naive_dweight_kernel(naive_args a)
{
    LK_SHARED(float, part, [NAIVE_SIDE * NAIVE_SIDE]);
    const int lane = threadIdx.x % NAIVE_SIDE, warp = threadIdx.x / NAIVE_SIDE;
    const int64_t column = (int64_t)blockIdx.x * NAIVE_SIDE + lane, columns = a.groups * a.cols;
    float sum = 0.0f;
    for (int64_t k = warp; column < columns && k * a.groups + column / a.cols < a.rows; k += NAIVE_SIDE) {
        const int64_t i = k * columns + column, row = i / a.cols;
        sum += naive_dy<T>(a, i) * (a.dbias ? 1.0f : naive_at<T>(a.x, i, 0.0f) * a.rstd[row]);
    }
    part[threadIdx.x] = sum;
    __syncthreads(); /* every warp's sums are written */
    for (int i = 1; warp == 0 && i < NAIVE_SIDE; i++) sum += part[i * NAIVE_SIDE + lane];
    if (warp == 0 && column < columns) lk_put((T *)(a.dbias ? a.dbias : a.dweight) + column, sum);
}

/* ---- The four functions of a case --------------------------------------------------------------------------------------- */

/* Launches the kernels that the outputs in args ask for. */
template <class T> static lk_status launch_kernels_t(const naive_args &args, cudaStream_t stream)
{
    const int threads = NAIVE_THREADS(args.cols);
    if (!args.dx) return (lk_status)lk_launch(naive_forward_kernel<T>, args.rows, threads, 0, stream, args);
    const cudaError_t error = lk_launch(naive_backward_kernel<T>, args.rows, threads, 0, stream, args);
    if (error != cudaSuccess || !args.dweight) return (lk_status)error;
    const int64_t grid = lk_ceil_div(args.groups * args.cols, NAIVE_SIDE);
    naive_args weight = args;
    weight.dbias = NULL;
    const cudaError_t next = lk_launch(naive_dweight_kernel<T>, grid, NAIVE_SIDE * NAIVE_SIDE, 0, stream, weight);
    if (next != cudaSuccess || !args.dbias) return (lk_status)next;
    return (lk_status)lk_launch(naive_dweight_kernel<T>, grid, NAIVE_SIDE * NAIVE_SIDE, 0, stream, args);
}

static lk_status launch_kernels(const shape *s, const naive_args &args, cudaStream_t stream)
{
    if (strcmp(s->dtype, "f32") == 0) return launch_kernels_t<lk_f32>(args, stream);
    if (strcmp(s->dtype, "f16") == 0) return launch_kernels_t<lk_f16>(args, stream);
    return launch_kernels_t<lk_bf16>(args, stream);
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    const size_t tensor = tensor_bytes(s);
    naive_args args = {};
    args.x = set->read, args.rstd = rstd_of(s, set), args.rows = s->rows, args.cols = s->cols;
    args.groups = s->groups ? s->groups : 1, args.offset = s->offset, args.rounded = s->rounded;
    if (s->weight) args.weight = set->in;
    if (s->bias) args.bias = set->in + weight_bytes(s);
    if (gives_y(s)) {
        args.y = set->write;
        if (s->residual) args.residual = set->read + tensor, args.residual_out = set->write + tensor;
        const lk_status status = launch_kernels(s, args, stream);
        if (status || !gives_dx(s)) return status;
    }
    args.dy = set->read + tensor, args.wide = s->wide, args.dx = dx_of(s, set);
    if (s->residual) args.dresidual_out = set->read + dresidual_at(s);
    if (s->weight) args.dweight = dweight_of(s, set);
    if (s->bias) args.dbias = dbias_of(s, set);
    return launch_kernels(s, args, stream);
}

/* Tensors, weight and, for backward alone, the rstd of its s. */
static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const uint64_t seed = 4 * (uint64_t)number;
    for (int k = 0; k < TRAFFIC_READS(s) - s->wide; k++) {
        const bool wide = s->wide && k == 1;
        const size_t at = k < 2 ? (size_t)k * tensor_bytes(s) : dresidual_at(s);
        bench_fill(wide ? "f32" : s->dtype, set->read + at, s->rows * s->cols, k ? 1.0f : 1.5f, seed + (uint64_t)k, stream);
    }
    if (s->weight) bench_fill(s->dtype, set->in, columns_of(s), 1.0f, seed + 3, stream);
    if (s->bias) bench_fill(s->dtype, set->in + weight_bytes(s), columns_of(s), 1.0f, seed + 5, stream);
    naive_args args = {};
    args.groups = 1;
    args.x = set->read, args.rstd = rstd_of(s, set), args.rows = s->rows, args.cols = s->cols;
    if (!gives_y(s)) BENCH_CUDA((cudaError_t)launch_kernels(s, args, stream));
}

static lk_srms_norm_args forward_args(const bench_case *c, const bench_buffers *set, int path)
{
    const shape *s = (const shape *)c->context;
    lk_srms_norm_args args = {};
    args.x = set->read, args.y = set->write, args.rstd = rstd_of(s, set);
    if (s->residual) args.residual = set->read + tensor_bytes(s), args.residual_out = set->write + tensor_bytes(s);
    if (s->weight) args.weight = set->in;
    if (s->bias) args.bias = set->in + weight_bytes(s);
    args.groups = s->groups, args.weight_offset = s->offset, args.round_sum = s->rounded;
    args.rows = s->rows, args.cols = s->cols, args.eps = EPS;
    args.path = path;
    return args;
}

static lk_srms_norm_args backward_args(const bench_case *c, const bench_buffers *set, int path)
{
    const shape *s = (const shape *)c->context;
    lk_srms_norm_args args = {};
    if (s->residual) args.residual_out = set->read, args.dresidual_out = set->read + dresidual_at(s);
    else args.x = set->read;
    args.dy = set->read + tensor_bytes(s), args.dy_dtype = s->wide ? LK_DTYPE_F32 : LK_DTYPE_T;
    args.rstd = rstd_of(s, set), args.dx = dx_of(s, set);
    if (s->weight) args.weight = set->in, args.dweight = dweight_of(s, set);
    if (s->bias) args.dbias = dbias_of(s, set);
    args.groups = s->groups, args.weight_offset = s->offset;
    args.workspace = c->workspace_bytes ? set->workspace : NULL, args.workspace_bytes = c->workspace_bytes;
    args.rows = s->rows, args.cols = s->cols;
    args.path = path;
    return args;
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    if (gives_y(s)) {
        const lk_srms_norm_args args = forward_args(c, set, path);
        const lk_status status = OF_TYPE(s, lk_srms_norm_forward, &args, stream);
        if (status || !gives_dx(s)) return status;
    }
    const lk_srms_norm_args args = backward_args(c, set, path);
    return OF_TYPE(s, lk_srms_norm_backward, &args, stream);
}

/* ---- Checks against double ---------------------------------------------------------------------------------------------- */

/* Half a unit in the last place of the value 1, and of subnormals, which may flush where T is no f16. */
template <class T> constexpr double HALF_ULP = sizeof(T) == 4 ? 0x1p-24 : 0x1p-8;
template <> constexpr double HALF_ULP<lk_f16> = 0x1p-11;
template <class T> constexpr double LEAST = 0x1p-126;
template <> constexpr double LEAST<lk_f16> = 0x1p-25;

/* Beside its rounding to T a value may be off by 16 2^-24 of the magnitudes of its terms: sums within 8 2^-24 (see
 * NAIVE_THREADS), of which rstd has half, a root within 2 ulp, and at most 5 products and additions that round once each. */
#define FLOAT_ERROR (16 * 0x1p-24)

static bool within(double value, double expected, double limit, const char *name, int64_t row, int64_t col, char *why,
                   size_t why_bytes)
{
    if (fabs(value - expected) <= limit) return true;
    snprintf(why, why_bytes, "%s[%lld,%lld] is %.9g, not %.9g; limit %.2g", name, (long long)row, (long long)col, value,
             expected, limit);
    return false;
}

/* Row `row` of tensor `number` behind `tensors`, in a buffer that the caller frees. */
template <class T> static T *fetch_row(const shape *s, const char *tensors, int number, int64_t row)
{
    const size_t bytes = (size_t)s->cols * sizeof(T);
    T *host = (T *)malloc(bytes);
    const char *from = tensors + (size_t)number * tensor_bytes(s) + (size_t)row * bytes;
    BENCH_CUDA(cudaMemcpy(host, from, bytes, cudaMemcpyDeviceToHost));
    return host;
}

/* Columns of dy in `rows` rows, from column `first` on, as floats in a buffer that the caller frees. */
template <class T>
static float *fetch_dy(const shape *s, const bench_buffers *set, int64_t row, int64_t first, size_t rows, int64_t cols)
{
    const size_t bytes = s->wide ? sizeof(float) : sizeof(T), width = (size_t)cols * bytes, pitch = (size_t)s->cols * bytes;
    const char *from = set->read + tensor_bytes(s) + (size_t)(row * s->cols + first) * bytes;
    float *const host = (float *)malloc(rows * (size_t)cols * sizeof(float));
    void *const raw = s->wide ? (void *)host : malloc(rows * width);
    BENCH_CUDA(cudaMemcpy2D(raw, width, from, pitch, width, rows, cudaMemcpyDeviceToHost));
    for (size_t i = 0; raw != (void *)host && i < rows * (size_t)cols; i++) host[i] = (float)((const T *)raw)[i];
    if (raw != (void *)host) free(raw);
    return host;
}

/* The double of element i of a row that may be absent. */
template <class T> static double value_of(const T *row, int64_t i, double absent)
{
    return row ? (double)(float)row[i] : absent;
}

/* rstd, which forward wrote or backward was given, against the values that it was made of: backward's limits stand on it. */
static bool check_rstd(double rstd, double squares, const shape *s, int64_t row, char *why, size_t why_bytes)
{
    const double right = 1 / sqrt(squares / (double)s->cols + EPS);
    return within(rstd, right, right * FLOAT_ERROR, "rstd", row, 0, why, why_bytes);
}

template <class T>
static bool check_forward_row(const shape *s, const bench_buffers *set, const T *weight, const T *bias, int64_t row,
                              char *why, size_t why_bytes)
{
    T *x = fetch_row<T>(s, set->read, 0, row), *residual = s->residual ? fetch_row<T>(s, set->read, 1, row) : NULL;
    T *y = fetch_row<T>(s, set->write, 0, row), *residual_out = s->residual ? fetch_row<T>(s, set->write, 1, row) : NULL;
    float rstd;
    BENCH_CUDA(cudaMemcpy(&rstd, rstd_of(s, set) + row, sizeof rstd, cudaMemcpyDeviceToHost));
    double squares = 0;
    for (int64_t col = 0; col < s->cols; col++) {
        const double sum = s->rounded ? value_of(residual_out, col, 0) : value_of(x, col, 0) + value_of(residual, col, 0);
        squares += sum * sum;
    }
    const double root = sqrt(squares / (double)s->cols + EPS);
    bool right = check_rstd(rstd, squares, s, row, why, why_bytes);
    for (int64_t col = 0; right && col < s->cols; col++) {
        const double sum = value_of(x, col, 0) + value_of(residual, col, 0);
        const double normed = s->rounded ? value_of(residual_out, col, 0) : sum;
        const double product = normed / root * (value_of(weight, col, 1) + s->offset);
        const double expected = product + value_of(bias, col, 0), terms = fabs(product) + fabs(value_of(bias, col, 0));
        const double limit = fabs(expected) * HALF_ULP<T> + terms * FLOAT_ERROR + LEAST<T>;
        right = within(value_of(y, col, 0), expected, limit, "y", row, col, why, why_bytes);
        if (!right || !residual_out) continue;
        const double rounding = fabs(sum) * (HALF_ULP<T> + 2 * 0x1p-24) + LEAST<T>; /* of an addition and a store */
        right = within(value_of(residual_out, col, 0), sum, rounding, "residual_out", row, col, why, why_bytes);
    }
    free(x), free(residual), free(y), free(residual_out);
    return right;
}

template <class T>
static bool check_backward_row(const shape *s, const bench_buffers *set, const T *weight, int64_t row, char *why,
                               size_t why_bytes)
{
    T *x = fetch_row<T>(s, set->read, 0, row);
    float *dy = fetch_dy<T>(s, set, row, 0, 1, s->cols);
    T *dresidual_out = s->residual ? fetch_row<T>(s, set->read + dresidual_at(s), 0, row) : NULL;
    T *dx = fetch_row<T>(s, dx_of(s, set), 0, row);
    float rstd;
    BENCH_CUDA(cudaMemcpy(&rstd, rstd_of(s, set) + row, sizeof rstd, cudaMemcpyDeviceToHost));
    double squares = 0, mean = 0, magnitude = 0;
    for (int64_t col = 0; col < s->cols; col++) {
        const double value = value_of(x, col, 0), g = value_of(dy, col, 0) * (value_of(weight, col, 1) + s->offset);
        const double product = g * value * rstd;
        squares += value * value, mean += product / (double)s->cols, magnitude += fabs(product) / (double)s->cols;
    }
    bool right = check_rstd(rstd, squares, s, row, why, why_bytes);
    for (int64_t col = 0; right && col < s->cols; col++) {
        const double h = value_of(x, col, 0) * rstd, g = value_of(dy, col, 0) * (value_of(weight, col, 1) + s->offset);
        const double upstream = value_of(dresidual_out, col, 0), expected = rstd * (g - h * mean) + upstream;
        const double terms = rstd * (fabs(g) + fabs(h) * magnitude) + fabs(upstream);
        const double limit = fabs(expected) * HALF_ULP<T> + terms * FLOAT_ERROR + LEAST<T>;
        right = within(value_of(dx, col, 0), expected, limit, "dx", row, col, why, why_bytes);
    }
    free(x), free(dy), free(dresidual_out), free(dx);
    return right;
}

/* Holds `count` columns of the first group's dweight, or dbias, the first being `first`, against the sums over all its rows. */
template <class T>
static bool check_dweight(const shape *s, const bench_buffers *set, bool bias, int64_t first, int count, char *why,
                          size_t why_bytes)
{
    const char *const results = bias ? dbias_of(s, set) : dweight_of(s, set);
    const size_t step = s->groups ? (size_t)s->groups : 1;
    const size_t width = (size_t)count * sizeof(T), pitch = (size_t)s->cols * sizeof(T), rows = (size_t)s->rows;
    T *x = (T *)malloc(rows * width), *dweight = (T *)malloc(width);
    float *rstd = (float *)malloc(rows * sizeof(float)), *dy = fetch_dy<T>(s, set, 0, first, rows, count);
    const T *from = (const T *)set->read + first;
    BENCH_CUDA(cudaMemcpy2D(x, width, from, pitch, width, rows, cudaMemcpyDeviceToHost));
    BENCH_CUDA(cudaMemcpy(dweight, (const T *)results + first, width, cudaMemcpyDeviceToHost));
    BENCH_CUDA(cudaMemcpy(rstd, rstd_of(s, set), rows * sizeof(float), cudaMemcpyDeviceToHost));
    bool right = true;
    for (int k = 0; right && k < count; k++) {
        double expected = 0, terms = 0;
        for (size_t row = 0; row < rows; row += step) {
            const int64_t i = (int64_t)row * count + k;
            const double term = value_of(dy, i, 0) * (bias ? 1 : value_of(x, i, 0) * rstd[row]);
            expected += term, terms += fabs(term);
        }
        const double limit = fabs(expected) * HALF_ULP<T> + terms * FLOAT_ERROR + LEAST<T>;
        right = within(value_of(dweight, k, 0), expected, limit, bias ? "dbias" : "dweight", 0, first + k, why, why_bytes);
    }
    free(x), free(dy), free(dweight), free(rstd);
    return right;
}

/* Checks the first, the last and two rows between, and of dweight 8 columns at each end and in the middle. */
template <class T> static bool check(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const int64_t rows[4] = {0, s->rows / 3, s->rows * 2 / 3, s->rows - 1};
    bool right = true;
    for (int k = 0; right && k < 4; k++) {
        const int64_t group = s->groups ? rows[k] % s->groups : 0;
        T *weight = s->weight ? fetch_row<T>(s, set->in, 0, group) : NULL;
        T *bias = s->bias ? fetch_row<T>(s, set->in + weight_bytes(s), 0, group) : NULL;
        if (gives_y(s)) right = check_forward_row(s, set, weight, bias, rows[k], why, why_bytes);
        if (right && gives_dx(s)) right = check_backward_row(s, set, weight, rows[k], why, why_bytes);
        free(weight), free(bias);
    }
    for (int k = 0; right && gives_dx(s) && s->weight && k < 6; k++)
        if (k < 3 || s->bias) right = check_dweight<T>(s, set, k >= 3, (s->cols - 8) * (k % 3) / 2, 8, why, why_bytes);
    return right;
}

static size_t workspace(const bench_case *c, int path)
{
    const shape *s = (const shape *)c->context;
    char *anywhere = (char *)256; /* the query looks at what is NULL, and at no memory */
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    const lk_srms_norm_args args = backward_args(c, &set, path);
    size_t bytes = 0;
    const lk_status status = OF_TYPE(s, lk_srms_norm_backward_workspace_bytes, &args, &bytes);
    return status ? 0 : bytes;
}

static bench_mix mix_of(const shape *s)
{
    if (gives_y(s) && gives_dx(s)) return bench_streams<1, 1>();
    if (gives_dx(s) && s->wide) return s->residual ? bench_streams<4, 1>() : bench_streams<3, 1>();
    if (gives_dx(s)) return s->residual ? bench_streams<3, 1>() : bench_streams<2, 1>();
    return s->residual ? bench_streams<2, 2>() : bench_streams<1, 1>();
}

static void describe(bench_case *c, const shape *s)
{
    const size_t rstd_bytes = (size_t)s->rows * sizeof(float);
    c->name = s->name, c->direction = s->direction, c->dtype = s->dtype;
    c->read_bytes = TRAFFIC_READS(s) * tensor_bytes(s), c->write_bytes = TRAFFIC_WRITES(s) * tensor_bytes(s);
    const size_t sums = (s->bias ? 2 : 1) * (size_t)columns_of(s) * element_bytes(s);
    c->in_bytes = (s->bias ? 2 : 1) * weight_bytes(s) + (gives_y(s) ? 0 : rstd_bytes);
    c->out_bytes = (gives_y(s) ? rstd_bytes : 0) + (gives_dx(s) && s->weight ? sums : 0);
    c->mix = mix_of(s);
    c->context = s;
    c->fill = fill, c->launch = launch_lk, c->naive = launch_naive;
    c->check = check<lk_bf16>;
    if (strcmp(s->dtype, "f32") == 0) c->check = check<lk_f32>;
    if (strcmp(s->dtype, "f16") == 0) c->check = check<lk_f16>;
    if (gives_dx(s)) c->workspace = workspace;
}

int main(int argc, char **argv)
{
    static bench_case cases[CASES], hosts[HOSTS];
    for (int k = 0; k < CASES; k++) describe(&cases[k], &shapes[k]);
    for (int k = 0; k < HOSTS; k++) describe(&hosts[k], &host_shapes[k]);
    return bench_run("srms_norm", cases, CASES, hosts, HOSTS, argc, argv);
}
