// SPDX-License-Identifier: MIT
/* bench/rope.cu - lk_rope against its ceiling and against the formula as the simplest kernel; how to run it: bench.h. */
#include "bench/bench.h"
#include "lk/rope.cuh"

LK_DEFINE_ROPE(bf16)
LK_DEFINE_ROPE(f32)

typedef struct {
    const char *name, *dtype;
    int64_t batch, tokens, q_heads, k_heads, dim, rotary;
    int norm, tables, interleaved, positions; /* positions: int64, given; norm: in backward with the gradients of the weights */
} shape;

/* Heads of models: Llama 8B 32 and 8 of 128, Llama 1B 32 and 8 of 64, Qwen3 1.7B 16 and 8 of 128 with a norm, Gemma 3 4 and 1 of 256.
 * 28520 tokens of 32 + 8 heads are those of an issue of sglang. */
static const shape shapes[] = {
    {"tokens=8192 heads=32+8 dim=128", "bf16", 1, 8192, 32, 8, 128, 0, 0, 0, 0, 0},
    {"tokens=28520 heads=32+8 dim=128 positions=1", "bf16", 1, 28520, 32, 8, 128, 0, 0, 0, 0, 1},
    {"batch=8 tokens=2048 heads=32+8 dim=64", "bf16", 8, 2048, 32, 8, 64, 0, 0, 0, 0, 0},
    {"tokens=8192 heads=32+8 dim=128 tables=1", "bf16", 1, 8192, 32, 8, 128, 0, 0, 1, 0, 0},
    {"tokens=8192 heads=32+8 dim=128 interleaved=1", "bf16", 1, 8192, 32, 8, 128, 0, 0, 0, 1, 0},
    {"tokens=8192 heads=32+32 dim=80 rotary=32", "bf16", 1, 8192, 32, 32, 80, 32, 0, 0, 0, 0},
    {"tokens=4090 heads=32+8 dim=128", "bf16", 1, 4090, 32, 8, 128, 0, 0, 0, 0, 0},
    {"tokens=8 heads=32+8 dim=128 positions=1", "bf16", 1, 8, 32, 8, 128, 0, 0, 0, 0, 1},
    {"tokens=1024 heads=32+8 dim=256", "bf16", 1, 1024, 32, 8, 256, 0, 0, 0, 0, 0},
    {"tokens=16384 heads=16+8 dim=128 norm=1", "bf16", 1, 16384, 16, 8, 128, 0, 1, 0, 0, 0},
    {"tokens=16384 heads=4+1 dim=256 norm=1", "bf16", 1, 16384, 4, 1, 256, 0, 1, 0, 0, 0},
    {"tokens=8192 heads=32+8 dim=128 norm=1 tables=1", "bf16", 1, 8192, 32, 8, 128, 0, 1, 1, 0, 0},
    {"tokens=8192 heads=32+8 dim=128", "f32", 1, 8192, 32, 8, 128, 0, 0, 0, 0, 0},
};
#define SHAPES ((int)(sizeof shapes / sizeof shapes[0]))

static const shape host_shape = {"tokens=16 heads=8+2 dim=128", "bf16", 1, 16, 8, 2, 128, 0, 0, 0, 0, 0};

static bool is_f32(const shape *s) { return strcmp(s->dtype, "f32") == 0; }
static bool is_backward(const bench_case *c) { return strcmp(c->direction, "backward") == 0; }
static int64_t heads(const shape *s) { return s->q_heads + s->k_heads; }
static int64_t elements(const shape *s) { return s->batch * s->tokens * heads(s) * s->dim; }
static int64_t pairs(const shape *s) { return (s->rotary ? s->rotary : s->dim) / 2; }
static size_t element_bytes(const shape *s) { return is_f32(s) ? 4 : 2; }

/* The least traffic: q and k, in backward their gradients, once in and once out; with a norm backward reads q and k too. Angles,
 * positions and weights are not counted. q [batch, tokens, q_heads, dim] lies before k. */
#define TRAFFIC_READ(s, back) ((back && (s)->norm ? 2 : 1) * (size_t)elements(s) * element_bytes(s))
#define TRAFFIC_WRITE(s) ((size_t)elements(s) * element_bytes(s))

/* The small inputs, one behind another: inv_freq, cos, sin (of a token, pairs [tokens, pairs]), weights f32, positions. */
static size_t table_bytes(const shape *s) { return s->tables ? (size_t)(s->batch * s->tokens * pairs(s)) * 4 : 0; }
static float *inv_freq_of(const shape *, const bench_buffers *set) { return (float *)set->in; }
static float *cos_of(const shape *s, const bench_buffers *set) { return inv_freq_of(s, set) + 256; }
static float *sin_of(const shape *s, const bench_buffers *set) { return cos_of(s, set) + table_bytes(s) / 4; }
static float *weight_of(const shape *s, const bench_buffers *set) { return sin_of(s, set) + table_bytes(s) / 4; }
static int64_t *position_of(const shape *s, const bench_buffers *set) { return (int64_t *)(weight_of(s, set) + 512); }
static size_t in_bytes(const shape *s) { return 4 * 256 + 2 * table_bytes(s) + 4 * 512 + (size_t)(s->batch * s->tokens) * 8; }

static lk_rope_args args_of(const bench_case *c, const bench_buffers *set)
{
    const shape *s = (const shape *)c->context;
    const size_t q = (size_t)(s->batch * s->tokens * s->q_heads * s->dim) * element_bytes(s), all = TRAFFIC_WRITE(s);
    lk_rope_args a = {};
    a.q = set->read, a.k = set->read + q, a.q_out = a.dq = set->write, a.k_out = a.dk = set->write + q;
    a.dq_out = set->read + (s->norm ? all : 0), a.dk_out = (const char *)a.dq_out + q;
    if (s->tables) a.cos = cos_of(s, set), a.sin = sin_of(s, set), a.table_dtype = LK_DTYPE_F32;
    else a.inv_freq = inv_freq_of(s, set);
    if (s->positions) a.position = position_of(s, set);
    if (s->norm) {
        a.q_weight = weight_of(s, set), a.k_weight = weight_of(s, set) + 256, a.weight_dtype = LK_DTYPE_F32, a.eps = 1e-6f;
        if (is_backward(c)) a.dq_weight = set->out, a.dk_weight = set->out + 4 * s->dim;
        a.workspace = set->workspace, a.workspace_bytes = c->workspace_bytes;
    }
    a.batch = s->batch, a.tokens = s->tokens, a.q_heads = s->q_heads, a.k_heads = s->k_heads, a.dim = s->dim,
    a.rotary = s->rotary;
    a.interleaved = s->interleaved;
    return a;
}

static size_t workspace(const bench_case *c, int)
{
    char *const anywhere = (char *)256; /* the query looks at what is NULL, and at no memory */
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    const lk_rope_args a = args_of(c, &set);
    size_t bytes = 0;
    return is_backward(c) && lk_rope_backward_workspace_bytes_bf16(&a, &bytes) == LK_OK ? bytes : 0;
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const lk_rope_args a = args_of(c, set);
    if (is_backward(c)) return is_f32(s) ? lk_rope_backward_f32(&a, stream) : lk_rope_backward_bf16(&a, stream);
    return is_f32(s) ? lk_rope_forward_f32(&a, stream) : lk_rope_forward_bf16(&a, stream);
}

/* ---- The baseline: halves, from inv_freq, a thread for each pair ------------------------------------------------------------ */

#define NAIVE_THREADS 256

template <class T> LK_KERNEL void naive_kernel(lk_rope_args a)
{
    const int64_t half = a.dim / 2, i = (int64_t)blockIdx.x * NAIVE_THREADS + threadIdx.x, heads = a.q_heads + a.k_heads;
    if (i >= a.batch * a.tokens * heads * half) return;
    const int64_t q_rows = a.batch * a.tokens * a.q_heads, row = i / half, pair = i % half;
    const bool is_k = row >= q_rows;
    const int64_t own = is_k ? row - q_rows : row, token = own / (is_k ? a.k_heads : a.q_heads) % a.tokens;
    const bool back = a.scale < 0;
    const T *in = (const T *)(is_k ? back ? a.dk_out : a.k : back ? a.dq_out : a.q) + own * a.dim + pair;
    T *out = (T *)(is_k ? a.k_out : a.q_out) + own * a.dim + pair;
    float s, c;
    const float phi = (float)token * a.inv_freq[pair], lost = fmaf((float)token, a.inv_freq[pair], -phi);
    sincosf(phi, &s, &c);
    const float sine = fmaf(c, lost, s); /* phi is rounded: at 8192 radians by up to 2.4e-4 */
    c = fmaf(-s, lost, c), s = back ? -sine : sine;
    const float x = lk_to_float(in[0]), partner = lk_to_float(in[half]);
    lk_put(out, x * c - partner * s), lk_put(out + half, partner * c + x * s);
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    lk_rope_args a = args_of(c, set);
    a.scale = is_backward(c) ? -1 : 1; /* the baseline's own sign of the direction */
    return (lk_status)lk_launch(is_f32(s) ? naive_kernel<lk_f32> : naive_kernel<lk_bf16>,
                                lk_ceil_div(elements(s) / 2, NAIVE_THREADS), NAIVE_THREADS, 0, stream, a);
}

/* ---- The functions of a case --------------------------------------------------------------------------------------------- */

static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    static float host[256];
    bench_fill(s->dtype, set->read, (int64_t)(c->read_bytes / element_bytes(s)), 1.5f, 2 * (uint64_t)number, stream);
    for (int64_t j = 0; j < pairs(s); j++) host[j] = (float)pow(10000.0, -(double)j / (double)pairs(s));
    BENCH_CUDA(cudaMemcpy(inv_freq_of(s, set), host, sizeof host, cudaMemcpyHostToDevice));
    if (s->norm) bench_fill("f32", weight_of(s, set), 512, 1.0f, 2 * (uint64_t)number + 1, stream);
    const int64_t rows = s->batch * s->tokens;
    if (s->positions) {
        int64_t *const positions = (int64_t *)malloc((size_t)rows * 8);
        for (int64_t r = 0; r < rows; r++) positions[r] = r % s->tokens;
        BENCH_CUDA(cudaMemcpy(position_of(s, set), positions, (size_t)rows * 8, cudaMemcpyHostToDevice));
        free(positions);
    }
    if (!s->tables) return;
    float *const table = (float *)malloc(table_bytes(s));
    for (int i = 0; i < 2; i++) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < pairs(s); j++) {
                const double phi = (double)(r % s->tokens) * (double)host[j];
                table[r * pairs(s) + j] = (float)(i ? sin(phi) : cos(phi));
            }
        BENCH_CUDA(cudaMemcpy(i ? sin_of(s, set) : cos_of(s, set), table, table_bytes(s), cudaMemcpyHostToDevice));
    }
    free(table);
}

template <class T> static void get(double *to, const void *from, int64_t at, int64_t count)
{
    T host[512];
    BENCH_CUDA(cudaMemcpy(host, (const T *)from + at, (size_t)count * sizeof(T), cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < count; i++) to[i] = (double)(float)host[i];
}

/* Holds 200 heads against double: half a unit of T, and 2^-18 of the head's largest. The weights' gradients are the tests' to check. */
template <class T> static bool check_heads(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const lk_rope_args a = args_of(c, set);
    const bool back = is_backward(c);
    const int64_t q_rows = s->batch * s->tokens * s->q_heads, rows = s->batch * s->tokens * heads(s), half = pairs(s);
    double x[512], z[512], w[512], y[512], got[512];
    for (int k = 0; k < 200; k++) {
        const int64_t row = k == 0 ? rows - 1 : (int64_t)((uint64_t)k * 0x9e3779b97f4a7c15u >> 20) % rows;
        const bool is_k = row >= q_rows;
        const int64_t own = is_k ? row - q_rows : row, token = own / (is_k ? s->k_heads : s->q_heads) % s->tokens;
        get<T>(x, is_k ? back ? a.dk_out : a.k : back ? a.dq_out : a.q, own * s->dim, s->dim);
        get<T>(got, is_k ? a.k_out : a.q_out, own * s->dim, s->dim);
        double square = 0, dot = 0, most = 0, rstd = 1;
        for (int64_t f = 0; f < s->dim; f++) w[f] = 1, z[f] = 0;
        if (s->norm) {
            get<T>(z, is_k ? a.k : a.q, own * s->dim, s->dim), get<float>(w, is_k ? a.k_weight : a.q_weight, 0, s->dim);
            for (int64_t f = 0; f < s->dim; f++) square += z[f] * z[f];
            rstd = 1 / sqrt(square / (double)s->dim + (double)a.eps);
            for (int64_t f = 0; !back && f < s->dim; f++) x[f] *= rstd * w[f];
        }
        for (int64_t f = 0; f < s->dim; f++) y[f] = x[f];
        for (int64_t j = 0; j < half; j++) {
            const int64_t u = s->interleaved ? 2 * j : j, v = s->interleaved ? 2 * j + 1 : half + j;
            const double phi = (double)token * (double)(float)pow(10000.0, -(double)j / (double)half), sign = back ? -1 : 1;
            y[u] = x[u] * cos(phi) - x[v] * sign * sin(phi), y[v] = x[v] * cos(phi) + x[u] * sign * sin(phi);
        }
        for (int64_t f = 0; f < s->dim; f++) dot += y[f] * w[f] * z[f];
        for (int64_t f = 0; s->norm && back && f < s->dim; f++)
            y[f] = rstd * (y[f] * w[f] - z[f] * rstd * rstd * dot / (double)s->dim);
        for (int64_t f = 0; f < s->dim; f++) most = fmax(most, fabs(y[f]));
        for (int64_t f = 0; f < s->dim; f++) {
            if (fabs(got[f] - y[f]) <= fabs(y[f]) * (sizeof(T) == 4 ? 0x1p-24 : 0x1p-8) + most * 0x1p-18) continue;
            snprintf(why, why_bytes, "head %lld, feature %lld is %.9g, not %.9g", (long long)row, (long long)f, got[f], y[f]);
            return false;
        }
    }
    return true;
}

static void describe(bench_case *c, const shape *s, bool back)
{
    c->name = s->name, c->direction = back ? "backward" : "forward", c->dtype = s->dtype;
    c->read_bytes = TRAFFIC_READ(s, back), c->write_bytes = TRAFFIC_WRITE(s);
    c->in_bytes = in_bytes(s), c->out_bytes = back && s->norm ? 8 * (size_t)s->dim : 0;
    c->mix = back && s->norm ? bench_streams<2, 1>() : bench_streams<1, 1>();
    c->context = s;
    c->fill = fill, c->launch = launch_lk;
    if (!s->norm && !s->tables && !s->interleaved && !s->rotary) c->naive = launch_naive;
    if (back && s->norm) c->workspace = workspace;
    c->check = is_f32(s) ? check_heads<lk_f32> : check_heads<lk_bf16>;
}

int main(int argc, char **argv)
{
    static bench_case cases[2 * SHAPES], hosts[2];
    for (int k = 0; k < 2 * SHAPES; k++) describe(&cases[k], &shapes[k % SHAPES], k >= SHAPES);
    for (int k = 0; k < 2; k++) describe(&hosts[k], &host_shape, k);
    return bench_run("rope", cases, 2 * SHAPES, hosts, 2, argc, argv);
}
