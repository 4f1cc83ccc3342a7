// SPDX-License-Identifier: MIT
/* bench/md_lrpe_cosine.cu - lk_md_lrpe_cosine against its ceiling and the formula as the simplest kernel; how to run it:
 * bench.h.
 *
 * The shapes are those of the reference's 1-d, 2-d and 3-d tables, batch 12, 12 heads of 128, with 0 and 10 tokens before the
 * grid; then a batch of 1, [batch, tokens, heads, dim] in memory, a dim that is no power of two, decoding (one token of each of
 * 256 sequences), and lengths of no round number. The last ones, for which there are no goals, have an activation, dtheta or f32.
 */
#include "bench/bench.h"
#include "lk/md_lrpe_cosine.cuh"

LK_DEFINE_MD_LRPE_COSINE(bf16)
LK_DEFINE_MD_LRPE_COSINE(f32)

typedef struct {
    int64_t batch, heads, dim, prefix;
    int axes;
    int64_t shape[3];
    const char *more; /* what the case's name says besides */
    int activation;
    bool bnhd, dtheta, f32;
} shape;

#define LINE(n, prefix) {12, 12, 128, prefix, 1, {n}, "", 0, false, false, false}
#define SQUARE(n, prefix) {12, 12, 128, prefix, 2, {n, n}, "", 0, false, false, false}
#define CUBE(n, prefix) {12, 12, 128, prefix, 3, {n, n, n}, "", 0, false, false, false}
/* Softmax over tokens. Two axes of which the second is long are read twice; 16384 tokens in slabs of two vectors, in backward of
 * one; 32768 of one, in backward twice. */
#define TOKENS(batch, axes, n, m)                                                                                              \
    {batch, 12, 128, 0, axes, {n, m}, " activation=softmax_tokens", LK_MD_LRPE_COSINE_SOFTMAX_TOKENS, false, false, false}
#define GRIDS(prefix)                                                                                                          \
    LINE(256, prefix), LINE(512, prefix), LINE(1024, prefix), LINE(2048, prefix), LINE(4096, prefix), LINE(8192, prefix),      \
        LINE(16384, prefix), LINE(32768, prefix), SQUARE(16, prefix), SQUARE(32, prefix), SQUARE(64, prefix),                  \
        SQUARE(128, prefix), CUBE(4, prefix), CUBE(8, prefix), CUBE(16, prefix), CUBE(32, prefix)

static const shape shapes[] = {
    GRIDS(0),
    GRIDS(10),
    {1, 12, 128, 0, 1, {32768}, "", 0, false, false, false},
    {1, 12, 128, 0, 3, {32, 32, 32}, "", 0, false, false, false},
    {12, 12, 128, 0, 1, {8192}, " layout=bnhd", 0, true, false, false},
    {12, 12, 96, 0, 1, {8192}, "", 0, false, false, false},
    {256, 12, 128, 0, 1, {1}, "", 0, false, false, false},
    {8, 32, 128, 0, 1, {100}, "", 0, false, false, false},
    {1, 32, 128, 0, 1, {1000}, "", 0, false, false, false},
    {2, 32, 128, 0, 1, {4090}, "", 0, false, false, false},
    {12, 12, 128, 0, 1, {8192}, " activation=silu", LK_MD_LRPE_COSINE_SILU, false, false, false},
    {12, 12, 128, 0, 1, {8192}, " activation=softmax", LK_MD_LRPE_COSINE_SOFTMAX, false, false, false},
    TOKENS(12, 1, 8192, 1), TOKENS(12, 2, 2, 4096), TOKENS(24, 1, 4096, 1), TOKENS(6, 1, 16384, 1), TOKENS(3, 1, 32768, 1),
    {64, 12, 128, 0, 2, {16, 16}, " dtheta=1", 0, false, true, false},
    {12, 12, 128, 0, 1, {8192}, " dtheta=1", 0, false, true, false},
    {1, 12, 128, 0, 1, {32768}, " dtheta=1", 0, false, true, false},
    {12, 12, 128, 0, 1, {8192}, "", 0, false, false, true},
    {1, 12, 128, 0, 1, {32768}, "", 0, false, false, true},
};
#define SHAPES ((int)(sizeof shapes / sizeof shapes[0]))

/* The one whose host time is taken, forward and backward: little work. */
static const shape host_shape = {1, 1, 128, 0, 1, {16}, "", 0, false, false, false};

static int64_t cells_of(const shape *s)
{
    return s->shape[0] * (s->axes > 1 ? s->shape[1] : 1) * (s->axes > 2 ? s->shape[2] : 1);
}

static int64_t tokens_of(const shape *s)
{
    return s->prefix + cells_of(s);
}
static int64_t rows_of(const shape *s)
{
    return s->batch * s->heads * tokens_of(s);
}
static int64_t e_of(const shape *s)
{
    return (s->dim + s->axes - 1) / s->axes;
}
static bool is_backward(const bench_case *c)
{
    return c->direction[0] == 'b';
}
static bool reads_x(const shape *s)
{
    return s->dtheta || s->activation;
}

/* The least traffic: forward reads n elements of x and writes 2 n; backward reads 2 n of dy, and n of x where it needs them,
 * and writes n. theta and dtheta are not counted, nor what softmax over tokens reads twice. */
#define TRAFFIC_READ(s, backward) ((size_t)(rows_of(s) * (s)->dim) * ((s)->f32 ? 4 : 2) * ((backward) ? 2 + reads_x(s) : 1))
#define TRAFFIC_WRITE(s, backward) ((size_t)(rows_of(s) * (s)->dim) * ((s)->f32 ? 4 : 2) * ((backward) ? 1 : 2))

/* The row of (batch, head, token) in a tensor. */
static int64_t row_at(const shape *s, int64_t batch, int64_t head, int64_t token)
{
    return s->bnhd ? (batch * tokens_of(s) + token) * s->heads + head : (batch * s->heads + head) * tokens_of(s) + token;
}

static const void *x_of(const shape *s, const bench_buffers *set) /* behind dy */
{
    return set->read + (size_t)(rows_of(s) * s->dim) * (s->f32 ? 8 : 4);
}

static float theta_of(const shape *s, int64_t head, int64_t t)
{
    return (float)(pow(10000.0, -(double)t / (double)e_of(s)) * (1.0 + 0.01 * (double)head));
}

/* ---- The baseline: the formula, untuned --------------------------------------------------------------------------------- */

typedef struct {
    const void *in;
    const float *theta;
    void *out;
    int64_t heads, tokens, prefix, dim, e, elements;
    int64_t behind[3], shape[3]; /* of each axis */
    bool bnhd, backward;
} naive_args;

#define NAIVE_THREADS 256

/* A thread owns an element of x or dx; the angle is taken in double, since in float it would be wrong. */
template <class T> LK_KERNEL void naive_kernel(naive_args a)
{
    const int64_t i = (int64_t)blockIdx.x * NAIVE_THREADS + threadIdx.x;
    if (i >= a.elements) return;
    const int64_t row = i / a.dim, f = i % a.dim, axis = f / a.e;
    const int64_t token = a.bnhd ? row / a.heads % a.tokens : row % a.tokens,
                  head = a.bnhd ? row % a.heads : row / a.tokens % a.heads;
    double sin_of = 0.0, cos_of = 1.0;
    if (token >= a.prefix)
        sincos((double)((token - a.prefix) / a.behind[axis] % a.shape[axis]) * (double)a.theta[head * a.e + f % a.e], &sin_of,
               &cos_of);
    const T *in = (const T *)a.in;
    T *out = (T *)a.out;
    if (a.backward) {
        const float u = lk_to_float(in[2 * row * a.dim + f]), v = lk_to_float(in[(2 * row + 1) * a.dim + f]);
        lk_put(out + i, u * (float)cos_of + v * (float)sin_of);
    } else {
        const float x = lk_to_float(in[i]);
        lk_put(out + 2 * row * a.dim + f, x * (float)cos_of);
        lk_put(out + (2 * row + 1) * a.dim + f, x * (float)sin_of);
    }
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    naive_args args = {set->read, (const float *)set->in, set->write, s->heads,  tokens_of(s), s->prefix,     s->dim,
                       e_of(s),   rows_of(s) * s->dim,    {1, 1, 1},  {1, 1, 1}, s->bnhd,      is_backward(c)};
    for (int i = s->axes - 1; i >= 0; i--) {
        args.shape[i] = s->shape[i];
        if (i + 1 < s->axes) args.behind[i] = args.behind[i + 1] * s->shape[i + 1];
    }
    return (lk_status)lk_launch(s->f32 ? naive_kernel<lk_f32> : naive_kernel<lk_bf16>,
                                lk_ceil_div(args.elements, NAIVE_THREADS), NAIVE_THREADS, 0, stream, args);
}

/* ---- The functions of a case: `in` holds theta, `out` dtheta --------------------------------------------------------------
 */

static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    bench_fill(c->dtype, set->read, (int64_t)(c->read_bytes / (s->f32 ? 4 : 2)), 1.0f, (uint64_t)number, stream);
    const int64_t e = e_of(s);
    float *theta = (float *)malloc(c->in_bytes);
    for (int64_t i = 0; i < s->heads * e; i++) theta[i] = theta_of(s, i / e, i % e);
    BENCH_CUDA(cudaMemcpyAsync(set->in, theta, c->in_bytes, cudaMemcpyHostToDevice, stream));
    BENCH_CUDA(cudaStreamSynchronize(stream));
    free(theta);
}

/* Of [batch, tokens, heads, width], strides are spelt out. */
static void set_strides(const shape *s, int64_t width, int64_t *batch_stride, int64_t *head_stride, int64_t *token_stride)
{
    if (!s->bnhd) return;
    *head_stride = width, *token_stride = s->heads * width, *batch_stride = tokens_of(s) * s->heads * width;
}

static lk_md_lrpe_cosine_args args_of(const bench_case *c, const bench_buffers *set, int path)
{
    const shape *s = (const shape *)c->context;
    lk_md_lrpe_cosine_args args = {};
    args.batch = s->batch, args.heads = s->heads, args.dim = s->dim, args.prefix = s->prefix, args.axes = s->axes;
    for (int i = 0; i < s->axes; i++) args.shape[i] = s->shape[i];
    args.theta_dtype = LK_DTYPE_F32, args.activation = s->activation, args.path = path, args.theta = set->in;
    args.workspace = c->workspace_bytes ? set->workspace : NULL, args.workspace_bytes = c->workspace_bytes;
    set_strides(s, s->dim, &args.x_batch_stride, &args.x_head_stride, &args.x_token_stride);
    if (is_backward(c)) {
        args.dy = set->read, args.x = reads_x(s) ? x_of(s, set) : NULL, args.dx = set->write;
        args.dtheta = s->dtheta ? (float *)set->out : NULL;
        set_strides(s, 2 * s->dim, &args.dy_batch_stride, &args.dy_head_stride, &args.dy_token_stride);
        set_strides(s, s->dim, &args.dx_batch_stride, &args.dx_head_stride, &args.dx_token_stride);
    } else {
        args.x = set->read, args.y = set->write;
        set_strides(s, 2 * s->dim, &args.y_batch_stride, &args.y_head_stride, &args.y_token_stride);
    }
    return args;
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    const lk_md_lrpe_cosine_args args = args_of(c, set, path);
    const bool f32 = ((const shape *)c->context)->f32;
    if (is_backward(c)) return (f32 ? lk_md_lrpe_cosine_backward_f32 : lk_md_lrpe_cosine_backward_bf16)(&args, stream);
    return (f32 ? lk_md_lrpe_cosine_forward_f32 : lk_md_lrpe_cosine_forward_bf16)(&args, stream);
}

/* act(x) and act'(x) of a row, elementwise; softmax's slope is left to its caller. */
template <class T> static void activate(const shape *s, const T *x, double *act, double *slope)
{
    double max = -INFINITY, sum = 0;
    for (int64_t f = 0; f < s->dim; f++) max = fmax(max, (double)(float)x[f]);
    for (int64_t f = 0; f < s->dim; f++) sum += exp((double)(float)x[f] - max);
    for (int64_t f = 0; f < s->dim; f++) {
        const double v = (double)(float)x[f], sigmoid = 1 / (1 + exp(-v));
        act[f] = v, slope[f] = 1;
        if (s->activation == LK_MD_LRPE_COSINE_SILU) act[f] = v * sigmoid, slope[f] = sigmoid * (1 + v * (1 - sigmoid));
        if (s->activation == LK_MD_LRPE_COSINE_SOFTMAX) act[f] = exp(v - max) / sum;
    }
}

static double angle_of(const shape *s, int64_t token, int64_t head, int64_t f)
{
    int64_t cell = token - s->prefix;
    for (int i = s->axes - 1; i > f / e_of(s); i--) cell /= s->shape[i];
    return token < s->prefix ? 0.0 : (double)(cell % s->shape[f / e_of(s)]) * theta_of(s, head, f % e_of(s));
}

/* Softmax over tokens: of each feature of a batch and head, the sums over all tokens. dot, size: of act(x) g and |act(x) g|. */
typedef struct {
    double max[128], sum[128], dot[128], size[128];
} columns;

template <class T>
static void sum_columns(const bench_case *c, const bench_buffers *set, int64_t first_row, int64_t head, columns *k)
{
    const shape *s = (const shape *)c->context;
    const int64_t tokens = tokens_of(s), dim = s->dim;
    const bool back = is_backward(c);
    const size_t bytes = (size_t)(tokens * dim) * sizeof(T);
    T *const x = (T *)malloc(3 * bytes), *const dy = x + tokens * dim;
    const T *const from = (back ? (const T *)x_of(s, set) : (const T *)set->read) + first_row * dim;
    BENCH_CUDA(cudaMemcpy(x, from, bytes, cudaMemcpyDeviceToHost));
    if (back) BENCH_CUDA(cudaMemcpy(dy, (const T *)set->read + 2 * first_row * dim, 2 * bytes, cudaMemcpyDeviceToHost));
    for (int64_t f = 0; f < dim; f++) {
        k->max[f] = -INFINITY, k->sum[f] = k->dot[f] = k->size[f] = 0;
        for (int64_t t = 0; t < tokens; t++) k->max[f] = fmax(k->max[f], (double)(float)x[t * dim + f]);
        for (int64_t t = 0; t < tokens; t++) k->sum[f] += exp((double)(float)x[t * dim + f] - k->max[f]);
        for (int64_t t = 0; back && t < tokens; t++) {
            const T *const row = dy + 2 * t * dim;
            const double phi = angle_of(s, t, head, f), p = exp((double)(float)x[t * dim + f] - k->max[f]) / k->sum[f];
            const double g = (double)(float)row[f] * cos(phi) + (double)(float)row[dim + f] * sin(phi);
            k->dot[f] += p * g, k->size[f] += fabs(p * g);
        }
    }
    free(x);
}

/* Half a unit in the last place of x in T; nothing for 0, which is stored as it is. */
template <class T> static double half_ulp(double x)
{
    int exponent;
    frexp(x, &exponent); /* |x| is in [2^(exponent - 1), 2^exponent) */
    return x == 0 ? 0 : ldexp(sizeof(T) == 4 ? 0x1p-25 : 0x1p-9, exponent);
}

/* Checks 60 rows, or 6 with softmax over tokens: the first, the last, others at random. The limits: what the header says,
 * doubled, since here it need not be tight, and half an ulp of T. dtheta is held against a second launch on the other path,
 * which sums in another order. */
template <class T> static bool check_rows(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    enum { MOST = 128 };
    const shape *s = (const shape *)c->context;
    const bool back = is_backward(c);
    const bool over_tokens = s->activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS;
    const bool softmax = over_tokens || s->activation == LK_MD_LRPE_COSINE_SOFTMAX;
    const double slack = 1.6e-6 * (over_tokens ? 8 : s->activation ? 4 : 1);
    uint64_t random = 7;
    bool right = true;
    static columns sums;
    for (int k = 0; right && k < (over_tokens ? 6 : 60); k++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const int64_t number = k == 0 ? 0 : k == 1 ? rows_of(s) - 1 : (int64_t)((random >> 20) % (uint64_t)rows_of(s));
        const int64_t token = number % tokens_of(s), head = number / tokens_of(s) % s->heads;
        const int64_t row = row_at(s, number / tokens_of(s) / s->heads, head, token);
        T in[2 * MOST], x[MOST], out[2 * MOST];
        const int64_t in_width = back ? 2 * s->dim : s->dim, out_width = back ? s->dim : 2 * s->dim;
        BENCH_CUDA(cudaMemcpy(in, (const T *)set->read + row * in_width, (size_t)in_width * sizeof(T), cudaMemcpyDeviceToHost));
        BENCH_CUDA(
            cudaMemcpy(out, (const T *)set->write + row * out_width, (size_t)out_width * sizeof(T), cudaMemcpyDeviceToHost));
        const bool has_x = !back || reads_x(s);
        if (has_x)
            BENCH_CUDA(cudaMemcpy(x, (back ? (const T *)x_of(s, set) : (const T *)set->read) + row * s->dim,
                                  (size_t)s->dim * sizeof(T), cudaMemcpyDeviceToHost));
        double act[MOST], slope[MOST], cos_of[MOST], sin_of[MOST], g[MOST], dot = 0, size = 0;
        for (int64_t f = 0; f < s->dim; f++) act[f] = 0, slope[f] = 1;
        if (has_x) activate(s, x, act, slope);
        if (over_tokens) sum_columns<T>(c, set, row_at(s, number / tokens_of(s) / s->heads, head, 0), head, &sums);
        for (int64_t f = 0; over_tokens && f < s->dim; f++) act[f] = exp((double)(float)x[f] - sums.max[f]) / sums.sum[f];
        for (int64_t f = 0; f < s->dim; f++) {
            const double phi = angle_of(s, token, head, f);
            cos_of[f] = cos(phi), sin_of[f] = sin(phi);
            if (!back) continue;
            g[f] = (double)(float)in[f] * cos_of[f] + (double)(float)in[s->dim + f] * sin_of[f];
            dot += act[f] * g[f], size += fabs(act[f] * g[f]);
        }
        for (int64_t i = 0; right && i < out_width; i++) {
            const int64_t f = i % s->dim;
            double want, scale;
            if (over_tokens) dot = sums.dot[f], size = sums.size[f];
            if (!back) want = act[f] * (i < s->dim ? cos_of[f] : sin_of[f]), scale = fabs(act[f]);
            else if (softmax) want = act[f] * (g[f] - dot), scale = act[f] * (fabs(g[f]) + size + 4);
            else want = g[f] * slope[f], scale = fabs((double)(float)in[f]) + fabs((double)(float)in[s->dim + f]);
            const double got = (double)(float)out[i], limit = half_ulp<T>(want) + slack * scale;
            if (fabs(got - want) <= limit) continue;
            snprintf(why, why_bytes, "row %lld, feature %lld is %.9g, not %.9g; limit %.2g", (long long)row, (long long)i, got,
                     want, limit);
            right = false;
        }
    }
    if (!right || !s->dtheta || !back) return right;
    const size_t count = (size_t)(s->heads * e_of(s));
    float *first = (float *)malloc(8 * count), *second = first + count;
    BENCH_CUDA(cudaMemcpy(first, set->out, 4 * count, cudaMemcpyDeviceToHost));
    BENCH_CUDA((cudaError_t)launch_lk(c, set, LK_MD_LRPE_COSINE_ROW, NULL));
    BENCH_CUDA(cudaMemcpy(second, set->out, 4 * count, cudaMemcpyDeviceToHost));
    double norm = 0, distance = 0;
    for (size_t i = 0; i < count; i++) {
        norm += (double)second[i] * (double)second[i];
        distance += ((double)first[i] - (double)second[i]) * ((double)first[i] - (double)second[i]);
    }
    free(first);
    if (distance <= 1e-10 * norm) return true;
    snprintf(why, why_bytes, "dtheta on two paths differs by %.3g of its norm", sqrt(distance / norm));
    return false;
}

static size_t workspace(const bench_case *c, int path)
{
    char *const anywhere = (char *)256; /* the query looks at what is NULL, and at no memory */
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    const shape *s = (const shape *)c->context;
    const lk_md_lrpe_cosine_args args = args_of(c, &set, path);
    size_t bytes = 0;
    lk_status (*const f32)(const lk_md_lrpe_cosine_args *, size_t *) =
        is_backward(c) ? lk_md_lrpe_cosine_backward_workspace_bytes_f32 : lk_md_lrpe_cosine_forward_workspace_bytes_f32;
    lk_status (*const bf16)(const lk_md_lrpe_cosine_args *, size_t *) =
        is_backward(c) ? lk_md_lrpe_cosine_backward_workspace_bytes_bf16 : lk_md_lrpe_cosine_forward_workspace_bytes_bf16;
    return (s->f32 ? f32 : bf16)(&args, &bytes) ? 0 : bytes;
}

static void describe(bench_case *c, const shape *s, bool backward)
{
    static char names[2 * SHAPES + 2][128];
    static int count;
    char *const name = names[count++];
    int used = snprintf(name, sizeof names[0], "batch=%lld heads=%lld dim=%lld shape=", (long long)s->batch,
                        (long long)s->heads, (long long)s->dim);
    for (int i = 0; i < s->axes; i++)
        used += snprintf(name + used, sizeof names[0] - (size_t)used, "%s%lld", i ? "x" : "", (long long)s->shape[i]);
    snprintf(name + used, sizeof names[0] - (size_t)used, " prefix=%lld%s", (long long)s->prefix, s->more);
    c->name = name, c->direction = backward ? "backward" : "forward", c->dtype = s->f32 ? "f32" : "bf16";
    c->read_bytes = TRAFFIC_READ(s, backward), c->write_bytes = TRAFFIC_WRITE(s, backward);
    c->in_bytes = (size_t)(s->heads * e_of(s)) * sizeof(float);
    c->out_bytes = s->dtheta ? c->in_bytes : 0;
    c->mix = !backward ? bench_streams<1, 2>() : reads_x(s) ? bench_streams<3, 1>() : bench_streams<2, 1>();
    c->context = s;
    c->fill = fill, c->launch = launch_lk, c->naive = reads_x(s) ? NULL : launch_naive;
    c->check = s->f32 ? check_rows<lk_f32> : check_rows<lk_bf16>;
    if (s->dtheta || s->activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS) c->workspace = workspace;
}

int main(int argc, char **argv)
{
    static bench_case cases[2 * SHAPES], hosts[2];
    int count = 0;
    for (int k = 0; k < 2 * SHAPES; k++)
        if (k % 2 || !shapes[k / 2].dtheta) describe(&cases[count++], &shapes[k / 2], k % 2);
    for (int k = 0; k < 2; k++) describe(&hosts[k], &host_shape, k);
    return bench_run("md_lrpe_cosine", cases, count, hosts, 2, argc, argv);
}
