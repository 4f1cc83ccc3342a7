// SPDX-License-Identifier: MIT
/* bench/srms_norm_gated.cu - lk_srms_norm_gated against its ceiling; how to run it: bench.h. */
#include "bench/bench.h"
#include "lk/srms_norm_gated.cuh"

LK_DEFINE_SRMS_NORM_GATED(bf16)

typedef struct {
    const char *name;
    int64_t rows, cols;
    int first, groups; /* first: gate_first. All have a weight, and backward has dweight */
} shape;

/* Heads of 128 columns, as Gated DeltaNet's: 32 of them, 8192 tokens; Mamba-2's groups and whole rows. In all but the last case
 * each tensor starts on 256 bytes, as allocators give it. */
static const shape shapes[] = {
    {"rows=262144 cols=128", 262144, 128, 0, 1},
    {"rows=1024 cols=128", 1024, 128, 0, 1},
    {"rows=262144 cols=128 gate_first=1", 262144, 128, 1, 1},
    {"rows=16384 cols=4096", 16384, 4096, 0, 1},
    {"rows=16384 cols=4096 gate_first=1", 16384, 4096, 1, 1},
    {"rows=65536 cols=1024 gate_first=1 groups=8", 65536, 1024, 1, 8},
    {"rows=8192 cols=8192 gate_first=1", 8192, 8192, 1, 1},
    {"rows=100 cols=4096", 100, 4096, 0, 1},
    {"rows=8192 cols=4095 gate_first=1", 8192, 4095, 1, 1},
    {"rows=8190 cols=4095 gate_first=1", 8190, 4095, 1, 1}, /* tensors behind one another, so not alike modulo 16 bytes */
};
#define SHAPES ((int)(sizeof shapes / sizeof shapes[0]))
static const shape host_shape = {"rows=16 cols=1024", 16, 1024, 0, 1};
#define EPS 1e-6f

static bool is_backward(const bench_case *c) { return strcmp(c->direction, "backward") == 0; }
static size_t bytes_of(const shape *s) { return (size_t)(s->rows * s->cols) * 2; }
static size_t weight_bytes(const shape *s) { return bench_round_up((size_t)(s->cols * s->groups) * 2); }

/* The least traffic: forward reads x and gate and writes y; backward reads dy too and writes dx and dgate. `read` has x, gate and dy,
 * `write` y, or dx and dgate; `in` the weight and backward's rstd; `out` rstd, or dweight. */
static lk_srms_norm_gated_args args_of(const bench_case *c, const bench_buffers *set)
{
    const shape *const s = (const shape *)c->context;
    const size_t n = bytes_of(s);
    lk_srms_norm_gated_args args = {};
    lk_srms_norm_args &a = args.common;
    a.x = set->read, args.gate = set->read + n, a.weight = set->in, a.rows = s->rows, a.cols = s->cols, a.groups = s->groups;
    a.eps = EPS, args.gate_first = s->first;
    if (!is_backward(c)) {
        a.y = set->write, a.rstd = (float *)set->out;
        return args;
    }
    a.dy = set->read + 2 * n, a.dx = set->write, args.dgate = set->write + n, a.rstd = (float *)(set->in + weight_bytes(s));
    a.dweight = set->out, a.workspace = set->workspace, a.workspace_bytes = c->workspace_bytes;
    return args;
}
static size_t workspace(const bench_case *c, int)
{
    char *const anywhere = (char *)256; /* the query looks at what is NULL, and at no memory */
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    const lk_srms_norm_gated_args args = args_of(c, &set);
    size_t bytes = 0;
    return lk_srms_norm_gated_backward_workspace_bytes_bf16(&args, &bytes) ? 0 : bytes;
}

static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    lk_srms_norm_gated_args args = args_of(c, set);
    args.common.path = path;
    return is_backward(c) ? lk_srms_norm_gated_backward_bf16(&args, stream) : lk_srms_norm_gated_forward_bf16(&args, stream);
}

/* backward's rstd comes from forward, which writes y where dx will be. */
static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const int64_t n = s->rows * s->cols;
    bench_fill("bf16", set->read, (is_backward(c) ? 3 : 2) * n, 2.0f, 2 * (uint64_t)number, stream);
    bench_fill("bf16", set->in, s->cols * s->groups, 1.0f, 2 * (uint64_t)number + 1, stream);
    if (!is_backward(c)) return;
    lk_srms_norm_gated_args args = args_of(c, set);
    args.common.y = set->write;
    const lk_status status = lk_srms_norm_gated_forward_bf16(&args, stream);
    if (status) fprintf(stderr, "%s: %s\n", c->name, lk_last_error()), exit(1);
}

/* Holds four rows of y, or of dx and dgate, against double: half a unit of bf16, and 2^-16 of the magnitudes of the terms. */
static bool check(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *const s = (const shape *)c->context;
    const bool back = is_backward(c);
    const int64_t rows[] = {0, s->rows / 3, s->rows / 2, s->rows - 1}, cols = s->cols, n = s->rows * cols;
    lk_bf16 *const x_row = (lk_bf16 *)malloc((size_t)(6 * cols) * 2), *const of[3] = {x_row, x_row + cols, x_row + 2 * cols};
    lk_bf16 *const out = x_row + 3 * cols, *const weight = out + 2 * cols;
    bool right = true;
    for (int k = 0; right && k < 4; k++) {
        const int64_t at = rows[k] * cols;
        for (int i = 0; i < 2 + back; i++)
            BENCH_CUDA(cudaMemcpy(of[i], (lk_bf16 *)set->read + i * n + at, (size_t)cols * 2, cudaMemcpyDeviceToHost));
        for (int i = 0; i < 1 + back; i++)
            BENCH_CUDA(cudaMemcpy(out + i * cols, (lk_bf16 *)set->write + i * n + at, (size_t)cols * 2, cudaMemcpyDeviceToHost));
        BENCH_CUDA(cudaMemcpy(weight, (lk_bf16 *)set->in + rows[k] % s->groups * cols, (size_t)cols * 2, cudaMemcpyDeviceToHost));
        double squares = 0, mean = 0, size = 0, rstd = 0;
        for (int pass = 0; right && pass < 3; pass++) {
            for (int64_t col = 0; right && col < cols; col++) {
                const double x = (double)(float)of[0][col], g = (double)(float)of[1][col], w = (double)(float)weight[col];
                const double sigmoid = 1 / (1 + exp(-g)), silu = g * sigmoid, slope = sigmoid + silu * (1 - sigmoid);
                const double in = s->first ? x * silu : x, dy = back ? (double)(float)of[2][col] : 0;
                const double e = dy * w * (s->first ? 1 : silu), h = in * rstd;
                if (pass == 0) squares += in * in;
                if (pass == 1) mean += e * h / (double)cols, size += fabs(e * h) / (double)cols;
                if (pass < 2) continue;
                const double ds = rstd * (e - h * mean), off = rstd * (fabs(e) + fabs(h) * size);
                const double dx = s->first ? ds * silu : ds, dgate = s->first ? ds * x * slope : dy * h * w * slope;
                const double want[] = {back ? dx : h * w * (s->first ? 1 : silu), dgate};
                const double terms[] = {back ? off * (s->first ? fabs(silu) : 1) : fabs(want[0]),
                                        s->first ? off * fabs(x) * 2 : fabs(dy * h * w) * 2};
                for (int i = 0; right && i <= back; i++) {
                    const double got = (double)(float)out[i * cols + col];
                    right = fabs(got - want[i]) <= fabs(want[i]) * 0x1p-8 + terms[i] * 0x1p-16 + 1e-30;
                    if (!right)
                        snprintf(why, why_bytes, "%s[%lld,%lld] is %.9g, not %.9g", !back ? "y" : i ? "dgate" : "dx",
                                 (long long)rows[k], (long long)col, got, want[i]);
                }
            }
            if (pass == 0) rstd = 1 / sqrt(squares / (double)cols + (double)EPS);
        }
    }
    free(x_row);
    return right;
}

static void describe(bench_case *c, const shape *s, bool back)
{
    c->name = s->name, c->direction = back ? "backward" : "forward", c->dtype = "bf16";
    c->read_bytes = (back ? 3 : 2) * bytes_of(s), c->write_bytes = (back ? 2 : 1) * bytes_of(s);
    c->in_bytes = weight_bytes(s) + (back ? bench_round_up((size_t)s->rows * 4) : 0), c->out_bytes = (size_t)s->rows * 4;
    c->mix = back ? bench_streams<3, 2>() : bench_streams<2, 1>();
    c->context = s, c->fill = fill, c->launch = launch_lk, c->check = check;
    if (back) c->out_bytes = weight_bytes(s), c->workspace = workspace;
}

int main(int argc, char **argv)
{
    static bench_case cases[2 * SHAPES], hosts[2];
    for (int k = 0; k < 2 * SHAPES; k++) describe(&cases[k], &shapes[k % SHAPES], k >= SHAPES);
    for (int k = 0; k < 2; k++) describe(&hosts[k], &host_shape, k);
    return bench_run("srms_norm_gated", cases, 2 * SHAPES, hosts, 2, argc, argv);
}
