// SPDX-License-Identifier: MIT
/* bench/glu.cu - lk_glu against its ceiling and against the formula as the simplest kernel; how to run it: bench.h. */
#include "bench/bench.h"
#include "lk/glu.cuh"

LK_DEFINE_GLU(bf16)
LK_DEFINE_GLU(f32)

typedef struct {
    const char *name, *dtype;
    int64_t rows, cols;
    int activation, halves, interleaved, weight; /* weight: row_weight, in backward drow_weight too */
    float alpha, limit, up_offset;
} shape;

/* The hidden sizes of MLPs: Llama 8B 14336, Llama 1B 8192, Qwen3 1.7B 6144, an expert of Qwen3 30B 768, gpt-oss 2880.
 * But in the halves of 5461 columns, tensors start on 256 bytes, as allocators give them. */
static const shape shapes[] = {
    {"rows=4096 cols=14336", "bf16", 4096, 14336, 0, 0, 0, 0, 0, 0, 0},
    {"rows=8192 cols=8192", "bf16", 8192, 8192, 0, 0, 0, 0, 0, 0, 0},
    {"rows=16384 cols=6144", "bf16", 16384, 6144, 0, 0, 0, 0, 0, 0, 0},
    {"rows=4096 cols=2048", "bf16", 4096, 2048, 0, 0, 0, 0, 0, 0, 0},
    {"rows=8 cols=14336", "bf16", 8, 14336, 0, 0, 0, 0, 0, 0, 0},
    {"rows=100 cols=14336", "bf16", 100, 14336, 0, 0, 0, 0, 0, 0, 0},
    {"rows=4096 cols=5461", "bf16", 4096, 5461, 0, 0, 0, 0, 0, 0, 0},
    {"rows=8192 cols=8192 halves=1", "bf16", 8192, 8192, 0, 1, 0, 0, 0, 0, 0},
    {"rows=4090 cols=5461 halves=1", "bf16", 4090, 5461, 0, 1, 0, 0, 0, 0, 0},
    {"rows=8192 cols=8192 activation=gelu", "bf16", 8192, 8192, LK_GLU_GELU, 0, 0, 0, 0, 0, 0},
    {"rows=8192 cols=8192 activation=gelu_tanh", "bf16", 8192, 8192, LK_GLU_GELU_TANH, 0, 0, 0, 0, 0, 0},
    {"rows=32768 cols=2880 interleaved=1 alpha=1.702 limit=7 up_offset=1", "bf16", 32768, 2880, 0, 0, 1, 0, 1.702f, 7, 1},
    {"rows=65536 cols=768 row_weight=1", "bf16", 65536, 768, 0, 1, 0, 1, 0, 0, 0},
    {"rows=16384 cols=2048 row_weight=1", "bf16", 16384, 2048, 0, 1, 0, 1, 0, 0, 0},
    {"rows=4096 cols=8192", "f32", 4096, 8192, 0, 0, 0, 0, 0, 0, 0},
};
#define SHAPES ((int)(sizeof shapes / sizeof shapes[0]))

static const shape host_shape = {"rows=16 cols=1024", "bf16", 16, 1024, 0, 0, 0, 0, 0, 0, 0};

static bool is_f32(const shape *s) { return strcmp(s->dtype, "f32") == 0; }
static bool is_backward(const bench_case *c) { return strcmp(c->direction, "backward") == 0; }
static int64_t elements(const shape *s) { return s->rows * s->cols; }
static size_t element_bytes(const shape *s) { return is_f32(s) ? 4 : 2; }

/* The least traffic: forward reads gate and up and writes y; backward reads dy too and writes both gradients. The weights of rows,
 * four bytes a row, are not counted. `read` has gate, up and then dy, `write` has y, or dgate and dup. */
#define TRAFFIC_READ(s, back) ((back ? 3 : 2) * (size_t)elements(s) * element_bytes(s))
#define TRAFFIC_WRITE(s, back) ((back ? 2 : 1) * (size_t)elements(s) * element_bytes(s))

static lk_glu_args args_of(const shape *s, const bench_buffers *set)
{
    const size_t n = (size_t)elements(s) * element_bytes(s), second = s->halves ? (size_t)s->cols * element_bytes(s) : n;
    lk_glu_args a = {};
    a.gate = set->read, a.y = a.dgate = set->write, a.dy = set->read + 2 * n;
    if (!s->interleaved) a.up = set->read + second, a.dup = set->write + second;
    if (s->halves) a.gate_stride = a.up_stride = a.dgate_stride = a.dup_stride = 2 * s->cols;
    if (s->weight) a.row_weight = (float *)set->in, a.drow_weight = (float *)set->out;
    a.rows = s->rows, a.cols = s->cols, a.activation = s->activation, a.interleaved = s->interleaved;
    a.alpha = s->alpha, a.limit = s->limit, a.up_offset = s->up_offset;
    return a;
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    const lk_glu_args a = args_of(s, set);
    if (is_backward(c)) return is_f32(s) ? lk_glu_backward_f32(&a, stream) : lk_glu_backward_bf16(&a, stream);
    return is_f32(s) ? lk_glu_forward_f32(&a, stream) : lk_glu_forward_bf16(&a, stream);
}

/* ---- The baseline: the formula of silu, untuned; a thread has one element ------------------------------------------------ */

#define NAIVE_THREADS 256

template <class T, bool back> LK_KERNEL void naive_kernel(lk_glu_args a)
{
    const int64_t i = (int64_t)blockIdx.x * NAIVE_THREADS + threadIdx.x;
    if (i >= a.rows * a.cols) return;
    const float gate = lk_to_float(((const T *)a.gate)[i]), up = lk_to_float(((const T *)a.up)[i]), s = 1.0f / (1.0f + expf(-gate));
    if (!back) return lk_put((T *)a.y + i, gate * s * up);
    const float dy = lk_to_float(((const T *)a.dy)[i]);
    lk_put((T *)a.dgate + i, dy * up * s * (1.0f + gate * (1.0f - s)));
    lk_put((T *)a.dup + i, dy * gate * s);
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    void (*const kernels[][2])(lk_glu_args) = {{naive_kernel<lk_bf16, false>, naive_kernel<lk_bf16, true>},
                                               {naive_kernel<lk_f32, false>, naive_kernel<lk_f32, true>}};
    return (lk_status)lk_launch(kernels[is_f32(s)][is_backward(c)], lk_ceil_div(elements(s), NAIVE_THREADS), NAIVE_THREADS, 0,
                                stream, args_of(s, set));
}

/* ---- The functions of a case --------------------------------------------------------------------------------------------- */

static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    bench_fill(s->dtype, set->read, (is_backward(c) ? 3 : 2) * elements(s), 2.0f, 2 * (uint64_t)number, stream);
    if (s->weight) bench_fill("f32", set->in, s->rows, 0.5f, 2 * (uint64_t)number + 1, stream);
}

/* act and its slope, in double. */
static double act_of(const shape *s, double g, double *slope)
{
    const double alpha = s->alpha == 0 ? 1 : (double)s->alpha, c = 2 * sqrt(2 / 3.14159265358979323846);
    if (s->activation == LK_GLU_GELU) {
        const double below = 0.5 * erfc(-g / sqrt(2));
        *slope = below + g * exp(-0.5 * g * g) / sqrt(2 * 3.14159265358979323846);
        return g * below;
    }
    const bool tanh = s->activation == LK_GLU_GELU_TANH;
    const double z = tanh ? c * (g + 0.044715 * g * g * g) : alpha * g, steep = tanh ? c * (1 + 3 * 0.044715 * g * g) : alpha;
    const double share = 1 / (1 + exp(-z));
    *slope = share + g * share * (1 - share) * steep;
    return g * share;
}

template <class T> static void get(T *to, const T *from, int64_t count)
{
    BENCH_CUDA(cudaMemcpy(to, from, (size_t)count * sizeof(T), cudaMemcpyDeviceToHost));
}

/* Holds four rows against double: half a unit of T, and 2^-18 of the magnitudes of the terms. */
template <class T> static bool check_rows(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const bool back = is_backward(c);
    const int64_t n = elements(s), wide = s->halves || s->interleaved ? 2 * s->cols : s->cols;
    const int64_t rows[] = {0, s->rows / 3, s->rows / 2, s->rows - 1};
    T *const read = (T *)malloc((size_t)(5 * wide) * sizeof(T)), *const dy = read + 2 * wide, *const out = dy + s->cols;
    bool right = true;
    for (int k = 0; right && k < 4; k++) {
        const int64_t row = rows[k], second = s->interleaved ? 1 : s->halves ? s->cols : wide, step = s->interleaved ? 2 : 1;
        const bool apart = wide == s->cols;
        float weight = 1, dweight = 0;
        double sum = 0, size = 0;
        get(read, (T *)set->read + row * wide, wide);
        if (apart) get(read + wide, (T *)set->read + n + row * wide, wide);
        if (back) get(dy, (T *)set->read + 2 * n + row * s->cols, s->cols);
        get(out, (T *)set->write + row * (back ? wide : s->cols), back ? wide : s->cols);
        if (back && apart) get(out + wide, (T *)set->write + n + row * wide, wide);
        if (s->weight) get(&weight, (float *)set->in + row, 1);
        if (s->weight && back) get(&dweight, (float *)set->out + row, 1);
        for (int64_t col = 0; right && col < s->cols; col++) {
            const double gate = (double)(float)read[col * step], up = (double)(float)read[second + col * step];
            const bool low = !(s->limit > 0) || gate <= (double)s->limit, inside = !(s->limit > 0) || fabs(up) <= (double)s->limit;
            const double v = (inside ? up : copysign((double)s->limit, up)) + (double)s->up_offset;
            double slope;
            const double act = act_of(s, low ? gate : (double)s->limit, &slope), d = back ? (double)(float)dy[col] : 1;
            double want[2] = {(double)weight * act * v, 0}, limit[2] = {fabs(want[0]), 0};
            if (back) {
                want[0] = low ? (double)weight * d * v * slope : 0, want[1] = inside ? (double)weight * d * act : 0;
                limit[0] = fabs((double)weight * d * v) * 2, limit[1] = fabs(want[1]);
                sum += d * act * v, size += fabs(d * act * v);
            }
            for (int i = 0; i <= back; i++) {
                const double got = (double)(float)out[back ? (i ? second : 0) + col * step : col];
                const double most = limit[i] * 0x1p-18 + fabs(want[i]) * (sizeof(T) == 4 ? 0x1p-24 : 0x1p-8) + 1e-30;
                if (!(fabs(got - want[i]) <= most) && right)
                    right = false, snprintf(why, why_bytes, "%s[%lld,%lld] is %.9g, not %.9g", back ? i ? "dup" : "dgate" : "y",
                                            (long long)row, (long long)col, got, want[i]);
            }
        }
        if (right && s->weight && back && !(fabs((double)dweight - sum) <= size * 0x1p-18)) {
            right = false;
            snprintf(why, why_bytes, "drow_weight[%lld] is %.9g, not %.9g", (long long)row, (double)dweight, sum);
        }
    }
    free(read);
    return right;
}

static void describe(bench_case *c, const shape *s, bool back)
{
    c->name = s->name, c->direction = back ? "backward" : "forward", c->dtype = s->dtype;
    c->read_bytes = TRAFFIC_READ(s, back), c->write_bytes = TRAFFIC_WRITE(s, back);
    c->in_bytes = s->weight ? (size_t)s->rows * 4 : 0, c->out_bytes = back ? c->in_bytes : 0;
    c->mix = back ? bench_streams<3, 2>() : bench_streams<2, 1>();
    c->context = s;
    c->fill = fill, c->launch = launch_lk;
    if (!s->activation && !s->interleaved && !s->halves) c->naive = launch_naive;
    c->check = is_f32(s) ? check_rows<lk_f32> : check_rows<lk_bf16>;
}

int main(int argc, char **argv)
{
    static bench_case cases[2 * SHAPES], hosts[2];
    for (int k = 0; k < 2 * SHAPES; k++) describe(&cases[k], &shapes[k % SHAPES], k >= SHAPES);
    for (int k = 0; k < 2; k++) describe(&hosts[k], &host_shape, k);
    return bench_run("glu", cases, 2 * SHAPES, hosts, 2, argc, argv);
}
