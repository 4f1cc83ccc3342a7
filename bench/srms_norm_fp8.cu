// SPDX-License-Identifier: MIT
/* bench/srms_norm_fp8.cu - lk_srms_norm_fp8 against its ceiling; how to run it: bench.h.
 *
 * amax starts at 0 and is not set back, so that launches after the first find it where it ends. */
#include "bench/bench.h"
#include "lk/srms_norm_fp8.cuh"

LK_DEFINE_SRMS_NORM_FP8(bf16)

/* All have a weight; TENSOR has tensor_scale and amax. residual: one in and out. transposed: q_transposed. */
typedef struct shape {
    const char *name;
    int64_t rows, cols;
    int scaling, residual, transposed, power_of_two;
} shape;

enum { TENSOR, ROW, BLOCK, MX };
static const shape shapes[] = {
    {"rows=8192 cols=4096 scaling=tensor", 8192, 4096, TENSOR, 0, 0, 0},
    {"rows=16384 cols=4096 scaling=tensor", 16384, 4096, TENSOR, 0, 0, 0},
    {"rows=16384 cols=8192 scaling=tensor", 16384, 8192, TENSOR, 0, 0, 0},
    {"rows=65536 cols=2048 scaling=tensor", 65536, 2048, TENSOR, 0, 0, 0},
    {"rows=1000 cols=4096 scaling=row", 1000, 4096, ROW, 0, 0, 0},
    {"rows=8192 cols=4096 scaling=row", 8192, 4096, ROW, 0, 0, 0},
    {"rows=16384 cols=4096 scaling=row", 16384, 4096, ROW, 0, 0, 0},
    {"rows=16384 cols=7168 scaling=row", 16384, 7168, ROW, 0, 0, 0},
    {"rows=100 cols=5120 scaling=block", 100, 5120, BLOCK, 0, 0, 0},
    {"rows=8188 cols=4096 scaling=block", 8188, 4096, BLOCK, 0, 0, 0},
    {"rows=8192 cols=4096 scaling=block", 8192, 4096, BLOCK, 0, 0, 0},
    {"rows=16384 cols=4096 scaling=block", 16384, 4096, BLOCK, 0, 0, 0},
    {"rows=16384 cols=4096 scaling=block power_of_two=1", 16384, 4096, BLOCK, 0, 0, 1},
    {"rows=16384 cols=7168 scaling=block", 16384, 7168, BLOCK, 0, 0, 0},
    {"rows=16384 cols=4096 scaling=mx", 16384, 4096, MX, 0, 0, 0},
    {"rows=8192 cols=4096 scaling=tensor residual=1", 8192, 4096, TENSOR, 1, 0, 0},
    {"rows=16384 cols=4096 scaling=tensor residual=1", 16384, 4096, TENSOR, 1, 0, 0},
    {"rows=16384 cols=4096 scaling=row residual=1", 16384, 4096, ROW, 1, 0, 0},
    {"rows=16384 cols=4096 scaling=block residual=1", 16384, 4096, BLOCK, 1, 0, 0},
    {"rows=8192 cols=4096 scaling=tensor transposed=1", 8192, 4096, TENSOR, 0, 1, 0},
    {"rows=16384 cols=4096 scaling=tensor transposed=1", 16384, 4096, TENSOR, 0, 1, 0},
    {"rows=16384 cols=4096 scaling=block transposed=1", 16384, 4096, BLOCK, 0, 1, 0},
    {"rows=16384 cols=7168 scaling=block transposed=1", 16384, 7168, BLOCK, 0, 1, 0},
    {"rows=16384 cols=4096 scaling=mx transposed=1", 16384, 4096, MX, 0, 1, 0},
    {"rows=65536 cols=2048 scaling=block transposed=1", 65536, 2048, BLOCK, 0, 1, 0},
    {"rows=16384 cols=4096 scaling=block residual=1 transposed=1", 16384, 4096, BLOCK, 1, 1, 0},
};
#define CASES ((int)(sizeof shapes / sizeof shapes[0]))
static const shape host_shapes[] = {
    {"rows=16 cols=1024 scaling=row", 16, 1024, ROW, 0, 0, 0},
    {"rows=16 cols=1024 scaling=block transposed=1", 16, 1024, BLOCK, 0, 1, 0},
};
#define HOSTS ((int)(sizeof host_shapes / sizeof host_shapes[0]))
#define EPS 1e-6f
#define TENSOR_SCALE 0x1p-6f /* |y| is at most 7 */

/* The least traffic: x (and residual) in bf16 is read; q, residual_out in bf16 and q_transposed are written. Scales and rstd are
 * small and not counted. `read` holds x, residual; `write` q, residual_out, q_transposed; `in` the weight, tensor_scale, amax;
 * `out` rstd, scale, transposed_scale. */
static size_t elements(const shape *s) { return (size_t)(s->rows * s->cols); }
static size_t scale_bytes(const shape *s, int64_t rows, int64_t cols)
{
    const int64_t per = s->scaling == ROW ? cols : s->scaling == BLOCK ? 128 : 32, scales = rows * lk_ceil_div(cols, per);
    return s->scaling == TENSOR ? 0 : (size_t)scales * (s->scaling == MX ? 1 : 4);
}
static size_t weight_bytes(const shape *s) { return bench_round_up((size_t)s->cols * 2); }
static float *tensor_scale_of(const shape *s, const bench_buffers *set) { return (float *)(set->in + weight_bytes(s)); }
/* rstd, and the scales behind it: without gaps, since the bench asks for every word; rows are a multiple of 4. */
static char *scale_of(const shape *s, const bench_buffers *set) { return set->out + (size_t)s->rows * 4; }
static char *transposed_scale_of(const shape *s, const bench_buffers *set)
{
    return scale_of(s, set) + scale_bytes(s, s->rows, s->cols);
}
static char *transposed_of(const shape *s, const bench_buffers *set)
{
    return set->write + elements(s) * (s->residual ? 3 : 1);
}

static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const uint64_t seed = 4 * (uint64_t)number;
    const float small[2] = {TENSOR_SCALE, 0.0f};
    for (int k = 0; k <= s->residual; k++)
        bench_fill("bf16", set->read + (size_t)k * 2 * elements(s), (int64_t)elements(s), 1.5f, seed + (uint64_t)k, stream);
    bench_fill("bf16", set->in, s->cols, 1.0f, seed + 3, stream);
    BENCH_CUDA(cudaMemcpyAsync(tensor_scale_of(s, set), small, sizeof small, cudaMemcpyHostToDevice, stream));
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    lk_srms_norm_fp8_args args = {};
    args.common.x = set->read, args.common.weight = set->in, args.common.rstd = (float *)set->out, args.common.path = path;
    if (s->residual) args.common.residual = set->read + 2 * elements(s), args.common.residual_out = set->write + elements(s);
    args.common.rows = s->rows, args.common.cols = s->cols, args.common.eps = EPS;
    args.scaling = s->scaling, args.power_of_two = s->power_of_two, args.q = set->write;
    if (s->scaling == TENSOR) args.tensor_scale = tensor_scale_of(s, set), args.amax = tensor_scale_of(s, set) + 1;
    else args.scale = scale_of(s, set);
    if (s->transposed) args.q_transposed = transposed_of(s, set);
    if (s->transposed && s->scaling != TENSOR) { /* a scale's columns are next to one another, as the product's tiles want them */
        args.transposed_scale = transposed_scale_of(s, set);
        args.transposed_scale_stride = 1, args.transposed_block_stride = s->cols;
    }
    return lk_srms_norm_fp8_forward_bf16(&args, stream);
}

/* ---- Checks against double ---------------------------------------------------------------------------------------------- */

/* E4M3. */
static double number_of(uint8_t bits)
{
    const int field = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    return (bits & 0x80 ? -1 : 1) * ldexp(field ? mantissa + 8 : mantissa, (field ? field : 1) - 10);
}

/* Whether q is y / scale to within half of a unit in its last place, and a little for y's own error. */
static bool near(uint8_t q, double y, double scale, const char *name, int64_t row, int64_t col, char *why, size_t why_bytes)
{
    int exponent;
    const double x = y / scale, got = number_of(q);
    frexp(x, &exponent); /* |x| is below 2^exponent */
    const double half = ldexp(1, (exponent < -5 ? -5 : exponent) - 5), limit = half * 1.0001 + fabs(x) * 0x1p-19;
    if (fabs(got - x) <= limit || (fabs(x) > 448 && fabs(got) == 448)) return true;
    snprintf(why, why_bytes, "%s[%lld,%lld] is %g, not %g", name, (long long)row, (long long)col, got, x);
    return false;
}
static double scale_at(const shape *s, const char *scales, int64_t at)
{
    float scale = TENSOR_SCALE;
    uint8_t byte;
    if (s->scaling == MX) BENCH_CUDA(cudaMemcpy(&byte, scales + at, 1, cudaMemcpyDeviceToHost));
    else if (s->scaling != TENSOR) BENCH_CUDA(cudaMemcpy(&scale, scales + 4 * at, 4, cudaMemcpyDeviceToHost));
    return s->scaling == MX ? ldexp(1, byte - 127) : (double)scale;
}

/* A row, and its elements in q_transposed; each scale is at least the largest |y| / 448, and at most twice that. */
static bool check_row(const shape *s, const bench_buffers *set, int64_t row, char *why, size_t why_bytes)
{
    const int64_t cols = s->cols, per = s->scaling == BLOCK ? 128 : s->scaling == MX ? 32 : cols;
    lk_bf16 *x = (lk_bf16 *)malloc((size_t)cols * 6), *residual = x + cols, *weight = x + 2 * cols;
    double *y = (double *)malloc((size_t)cols * sizeof(double)), squares = 0, scale = TENSOR_SCALE;
    uint8_t *q = (uint8_t *)malloc((size_t)cols * 2), *turned = q + cols;
    const size_t at = (size_t)(row * cols), bytes = (size_t)cols * 2;
    BENCH_CUDA(cudaMemcpy(x, set->read + 2 * at, bytes, cudaMemcpyDeviceToHost));
    if (s->residual) BENCH_CUDA(cudaMemcpy(residual, set->read + 2 * (elements(s) + at), bytes, cudaMemcpyDeviceToHost));
    BENCH_CUDA(cudaMemcpy(weight, set->in, bytes, cudaMemcpyDeviceToHost));
    BENCH_CUDA(cudaMemcpy(q, set->write + at, (size_t)cols, cudaMemcpyDeviceToHost));
    if (s->transposed)
        BENCH_CUDA(cudaMemcpy2D(turned, 1, transposed_of(s, set) + row, (size_t)s->rows, 1, (size_t)cols, cudaMemcpyDeviceToHost));
    for (int64_t col = 0; col < cols; col++) {
        y[col] = (double)(float)x[col] + (s->residual ? (double)(float)residual[col] : 0);
        squares += y[col] * y[col];
    }
    for (int64_t col = 0; col < cols; col++) y[col] *= (double)(float)weight[col] / sqrt(squares / (double)cols + EPS);
    bool right = true;
    for (int64_t col = 0; right && col < cols; col++) {
        if (s->scaling != TENSOR && col % per == 0) {
            double most = 0;
            for (int64_t i = col; i < col + per && i < cols; i++) most = fmax(most, fabs(y[i]));
            scale = scale_at(s, scale_of(s, set), row * lk_ceil_div(cols, per) + col / per);
            const bool narrow = s->scaling == MX || s->power_of_two;
            right = scale * 448 >= most * (1 - 1e-5) && scale * 448 <= most * (narrow ? 2 : 1) * (1 + 1e-5);
            if (!right)
                snprintf(why, why_bytes, "scale[%lld,%lld] is %g for %g", (long long)row, (long long)(col / per), scale, most);
        }
        right = right && near(q[col], y[col], scale, "q", row, col, why, why_bytes);
        if (!right || !s->transposed || col % 37) continue; /* a sample: each scale is a copy from the device */
        const double own = scale_at(s, transposed_scale_of(s, set), row / per * cols + col);
        right = near(turned[col], y[col], own, "q_transposed", col, row, why, why_bytes);
    }
    free(x), free(y), free(q);
    return right;
}

static bool check(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const int64_t rows[4] = {0, s->rows / 3, s->rows * 2 / 3, s->rows - 1};
    bool right = true;
    for (int k = 0; right && k < 4; k++) right = check_row(s, set, rows[k], why, why_bytes);
    return right;
}

static void describe(bench_case *c, const shape *s)
{
    const size_t n = elements(s);
    c->name = s->name, c->direction = "forward", c->dtype = "bf16";
    c->read_bytes = n * (s->residual ? 4 : 2), c->write_bytes = n * (size_t)(1 + 2 * s->residual + s->transposed);
    c->in_bytes = weight_bytes(s) + bench_round_up(8);
    c->out_bytes = (size_t)s->rows * 4 + scale_bytes(s, s->rows, s->cols) +
                   (s->transposed ? scale_bytes(s, s->cols, s->rows) : 0);
    c->mix = s->transposed ? bench_streams<1, 1>() : s->residual ? bench_streams<4, 3>() : bench_streams<2, 1>();
    c->context = s;
    c->fill = fill, c->launch = launch_lk, c->check = check;
}

int main(int argc, char **argv)
{
    static bench_case cases[CASES], hosts[HOSTS];
    for (int k = 0; k < CASES; k++) describe(&cases[k], &shapes[k]);
    for (int k = 0; k < HOSTS; k++) describe(&hosts[k], &host_shapes[k]);
    return bench_run("srms_norm_fp8", cases, CASES, hosts, HOSTS, argc, argv);
}
