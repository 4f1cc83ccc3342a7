// SPDX-License-Identifier: MIT
/* bench/linear_kl.cu - lk_linear_kl against its matmuls alone (bare) and the same with all logits in memory (naive); how to run it:
 * bench.h.
 *
 * lk       as a caller gets it: init, then calls, in a workspace of N MiB (workspace=N), or of what the query asks for.
 * bare     cuBLASLt's products for all tokens, nothing between them: both heads' logits into bf16, dZ W into bf16, dZ^T X into the
 *          type of dweight; for forward the first two alone. Their dZ is what kl makes of this case's own logits, since the speed
 *          of a matmul depends on its data. Rows start at multiples of 64 elements. Each algorithm is the one that cuBLASLt's
 *          heuristic names first, with 32 MiB of workspace, as in lk.
 * naive    bare with logits of f32 and kl between: what a program does that has the memory for both heads' logits.
 * ranks=1  the calls for columns that are split over ranks, by the only rank; a copy takes the place of the collective.
 * Check    loss, lse and dx of 4 tokens, dweight of 3 columns, against plain kernels in double. JENSEN_SHANNON: no dweight.
 */
#include "bench/bench.h"
#include "lk/linear_kl_parallel.cuh"

LK_DEFINE_LINEAR_KL(bf16)
LK_DEFINE_LINEAR_KL_PARALLEL(bf16)

typedef struct {
    const char *name, *direction;
    int64_t tokens, hidden, teacher_hidden, vocab, workspace_mb;
    int divergence, wide, fast; /* wide: dweight is f32, else bf16 */
    int counted = 0;            /* not 0: max_counted; every fourth token counts */
} shape;

#define LARGE "tokens=8192 hidden=4096 teacher=4096 vocab=131072"
#define BOTH "forward_backward"
#define PART "tokens=8192 hidden=4096 teacher=4096 vocab=32768 dweight=bf16 ranks=1"
static const shape shapes[] = {
    {LARGE, "forward", 8192, 4096, 4096, 131072, 0, LK_KL_FORWARD, 0, 0},
    {LARGE " dweight=bf16", BOTH, 8192, 4096, 4096, 131072, 0, LK_KL_FORWARD, 0, 0},
    {LARGE " dweight=f32", BOTH, 8192, 4096, 4096, 131072, 0, LK_KL_FORWARD, 1, 0},
    {LARGE " dweight=bf16 workspace=1024", BOTH, 8192, 4096, 4096, 131072, 1024, LK_KL_FORWARD, 0, 0},
    {LARGE " dweight=f32 workspace=1024", BOTH, 8192, 4096, 4096, 131072, 1024, LK_KL_FORWARD, 1, 0},
    {LARGE " dweight=bf16 workspace=3072", BOTH, 8192, 4096, 4096, 131072, 3072, LK_KL_FORWARD, 0, 0},
    {LARGE " dweight=bf16 fast_logits=1", BOTH, 8192, 4096, 4096, 131072, 0, LK_KL_FORWARD, 0, 1},
    {LARGE " dweight=bf16 divergence=reverse", BOTH, 8192, 4096, 4096, 131072, 0, LK_KL_REVERSE, 0, 0},
    {LARGE " dweight=bf16 divergence=jensen_shannon", BOTH, 8192, 4096, 4096, 131072, 0, LK_KL_JENSEN_SHANNON, 0, 0},
    {LARGE " dweight=bf16 counted=2048", BOTH, 8192, 4096, 4096, 131072, 0, LK_KL_FORWARD, 0, 0, 2048},
    {PART, BOTH, 8192, 4096, 4096, 32768, 0, LK_KL_FORWARD, 0, 0},
    {PART " workspace=1024", BOTH, 8192, 4096, 4096, 32768, 1024, LK_KL_FORWARD, 0, 0},
    {PART " divergence=jensen_shannon", BOTH, 8192, 4096, 4096, 32768, 0, LK_KL_JENSEN_SHANNON, 0, 0},
    {"tokens=8192 hidden=2048 teacher=4096 vocab=32768 dweight=bf16", BOTH, 8192, 2048, 4096, 32768, 0, LK_KL_FORWARD, 0, 0},
    {"tokens=8192 hidden=1024 teacher=8192 vocab=151936 dweight=bf16", BOTH, 8192, 1024, 8192, 151936, 0, LK_KL_FORWARD, 0, 0},
    {"tokens=8 hidden=4096 teacher=4096 vocab=151935 dweight=bf16", BOTH, 8, 4096, 4096, 151935, 0, LK_KL_FORWARD, 0, 0},
    {"tokens=100 hidden=4096 teacher=4096 vocab=32003 dweight=bf16", BOTH, 100, 4096, 4096, 32003, 0, LK_KL_FORWARD, 0, 0},
    {"tokens=1000 hidden=4096 teacher=4096 vocab=151936 dweight=bf16", BOTH, 1000, 4096, 4096, 151936, 0, LK_KL_FORWARD, 0, 0},
    {"tokens=4090 hidden=4096 teacher=4096 vocab=32003", "forward", 4090, 4096, 4096, 32003, 0, LK_KL_FORWARD, 0, 0},
};
#define CASES ((int)(sizeof shapes / sizeof shapes[0]))

/* Those whose host time is taken. */
static const shape host_shapes[] = {
    {"tokens=256 hidden=256 teacher=256 vocab=1024 dweight=bf16", BOTH, 256, 256, 256, 1024, 0, LK_KL_FORWARD, 0, 0}};
#define HOSTS ((int)(sizeof host_shapes / sizeof host_shapes[0]))

/* What a call reads and writes, small tensors aside; its matmuls. */
#define X_BYTES(s, hidden) ((size_t)((s)->tokens * (hidden)) * sizeof(lk_bf16))
#define WEIGHT_BYTES(s, hidden, element) ((size_t)((s)->vocab * (hidden)) * (element))
#define FLOPS(s)                                                                                                               \
    (2.0 * (double)rows_of(s) * (double)(s)->vocab *                                                                           \
     (double)((gives_gradient(s) ? 3 : 1) * (s)->hidden + (s)->teacher_hidden))

/* Tokens that count. */
static int64_t rows_of(const shape *s) { return s->counted ? s->counted : s->tokens; }
static bool counts(const shape *s, int64_t token) { return !s->counted || token % 4 == 0; }

static bool gives_gradient(const shape *s) { return strcmp(s->direction, "forward") != 0; }
static bool is_split(const shape *s) { return strstr(s->name, " ranks=") != NULL; }

/* read: x, weight, teacher_x, teacher_weight, row_weight. write: dx, dweight. out: loss, lse, teacher_lse. */
typedef struct {
    lk_bf16 *x, *weight, *teacher_x, *teacher_weight, *dx;
    void *dweight;
    float *row_weight, *loss, *lse, *teacher_lse;
} tensors;

static tensors tensors_of(const shape *s, const bench_buffers *set)
{
    tensors t = {};
    t.x = (lk_bf16 *)set->read, t.weight = t.x + s->tokens * s->hidden;
    t.teacher_x = t.weight + s->vocab * s->hidden, t.teacher_weight = t.teacher_x + s->tokens * s->teacher_hidden;
    if (s->counted) t.row_weight = (float *)(t.teacher_weight + s->vocab * s->teacher_hidden);
    t.dx = (lk_bf16 *)set->write, t.dweight = t.dx + s->tokens * s->hidden;
    t.loss = (float *)set->out, t.lse = t.loss + s->tokens, t.teacher_lse = t.lse + s->tokens;
    return t;
}

/* ---- bare and naive ------------------------------------------------------------------------------------------------------ */

/* Their scratch memory, as large as the largest case so far. */
typedef struct {
    float *student, *teacher; /* [tokens, stride]; of bare bf16 */
    lk_bf16 *dz;
    void *cublas;
    int64_t stride;
} scratch;

static scratch scratch_of(const shape *s)
{
    static char *memory;
    static size_t held;
    scratch t = {};
    t.stride = lk_ceil_div(s->vocab, 64) * 64;
    const size_t dz = bench_round_up((size_t)(s->tokens * t.stride) * sizeof(lk_bf16)), bytes = 5 * dz + LK_HEAD_CUBLAS_BYTES;
    if (bytes > held) {
        BENCH_CUDA(cudaDeviceSynchronize());
        BENCH_CUDA(cudaFree(memory));
        BENCH_CUDA(cudaMalloc((void **)&memory, bytes));
        held = bytes;
    }
    t.student = (float *)memory, t.teacher = (float *)(memory + 2 * dz), t.dz = (lk_bf16 *)(memory + 4 * dz);
    t.cublas = memory + 5 * dz;
    return t;
}

static void right(lk_status status)
{
    if (status == LK_OK) return;
    fprintf(stderr, "%s\n", lk_last_error());
    exit(1);
}

/* m x n over k, in cuBLASLt's column-major order. */
static void multiply(const scratch *h, cudaStream_t stream, const void *a, const void *b, void *d, int64_t m, int64_t n, int64_t k,
                     int64_t lda, int64_t ldb, int64_t ldd, int transpose_a, int transpose_b, int wide)
{
    static lk_cublas_context context;
    if (!context.handle) right(lk_cublas_init("bench", &context));
    const lk_cublas_call call = {"bench", stream, &context, h->cublas, LK_HEAD_CUBLAS_BYTES, LK_CUBLAS_LAUNCH};
    lk_cublas_product p = {};
    p.key.factor_type = LK_DTYPE_BF16, p.key.type = wide ? LK_DTYPE_F32 : LK_DTYPE_BF16;
    p.key.transpose_a = transpose_a, p.key.transpose_b = transpose_b;
    p.key.m = m, p.key.n = n, p.key.k = k, p.key.lda = lda, p.key.ldb = ldb, p.key.ldd = ldd;
    p.a = a, p.b = b, p.d = d;
    right(lk_cublas_multiply(&call, &p));
}

static void multiply_logits(const shape *s, int64_t n, const tensors *t, const scratch *h, int wide, cudaStream_t stream)
{
    const int64_t v = s->vocab, d = s->hidden, e = s->teacher_hidden;
    multiply(h, stream, t->weight, t->x, h->student, v, n, d, d, d, h->stride, 1, 0, wide);
    multiply(h, stream, t->teacher_weight, t->teacher_x, h->teacher, v, n, e, e, e, h->stride, 1, 0, wide);
}

static void multiply_gradients(const shape *s, int64_t n, const tensors *t, const scratch *h, cudaStream_t stream)
{
    const int64_t v = s->vocab, d = s->hidden;
    multiply(h, stream, t->weight, h->dz, t->dx, d, n, v, d, h->stride, d, 0, 0, 0);
    multiply(h, stream, t->x, h->dz, t->dweight, d, v, n, d, h->stride, d, 0, 1, s->wide);
}

/* From logits to losses and dZ. */
static lk_status launch_kl(const shape *s, const tensors *t, const scratch *h, cudaStream_t stream)
{
    lk_kl_args args = {};
    args.logits = h->student, args.teacher = h->teacher, args.rows = s->tokens, args.vocab = s->vocab;
    args.logits_stride = args.teacher_stride = args.dlogits_stride = h->stride, args.divergence = s->divergence;
    args.loss = t->loss, args.lse = t->lse, args.teacher_lse = t->teacher_lse, args.dlogits = gives_gradient(s) ? h->dz : NULL;
    args.row_weight = t->row_weight;
    lk_device device = {};
    BENCH_CUDA(lk_current_device(&device));
    lk_kl_fill_in(&args);
    return lk_kl_launch<lk_f32, lk_bf16>("bench", &device, args, stream);
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    const scratch h = scratch_of(s);
    multiply_logits(s, s->tokens, &t, &h, 1, stream);
    const lk_status status = launch_kl(s, &t, &h, stream);
    if (!status && gives_gradient(s)) multiply_gradients(s, s->tokens, &t, &h, stream);
    return status;
}

static lk_status launch_bare(const bench_case *c, const bench_buffers *set, int, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    const scratch h = scratch_of(s);
    multiply_logits(s, rows_of(s), &t, &h, 0, stream);
    if (gives_gradient(s)) multiply_gradients(s, rows_of(s), &t, &h, stream);
    return LK_OK;
}

/* ---- The operation ------------------------------------------------------------------------------------------------------- */

/* All sets hold the same numbers, so that bare's dZ, made here, belongs to each. */
static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    bench_fill("bf16", t.x, s->tokens * s->hidden, 1.0f, 1, stream);
    bench_fill("bf16", t.weight, s->vocab * s->hidden, 1.28f / sqrtf((float)s->hidden), 2, stream);
    bench_fill("bf16", t.teacher_x, s->tokens * s->teacher_hidden, 1.0f, 3, stream);
    bench_fill("bf16", t.teacher_weight, s->vocab * s->teacher_hidden, 1.28f / sqrtf((float)s->teacher_hidden), 4, stream);
    if (s->counted) {
        BENCH_CUDA(cudaMemsetAsync(t.row_weight, 0, (size_t)s->tokens * sizeof(float), stream));
        const float one = 1.0f;
        for (int64_t token = 0; token < s->tokens; token += 4)
            BENCH_CUDA(cudaMemcpyAsync(t.row_weight + token, &one, sizeof one, cudaMemcpyHostToDevice, stream));
        BENCH_CUDA(cudaStreamSynchronize(stream));
    }
    if (number > 0 || !gives_gradient(s)) return;
    const scratch h = scratch_of(s);
    multiply_logits(s, s->tokens, &t, &h, 1, stream);
    right(launch_kl(s, &t, &h, stream));
}

static lk_linear_kl_context context;

static lk_linear_kl_args args_of(const bench_case *c, const bench_buffers *set)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    lk_linear_kl_args args = {};
    args.context = &context, args.x = t.x, args.weight = t.weight, args.teacher_x = t.teacher_x;
    args.teacher_weight = t.teacher_weight, args.loss = t.loss, args.lse = t.lse, args.teacher_lse = t.teacher_lse;
    args.dx = t.dx, args.dweight = t.dweight, args.dweight_dtype = s->wide ? LK_DTYPE_F32 : LK_DTYPE_BF16;
    args.tokens = s->tokens, args.hidden = s->hidden, args.teacher_hidden = s->teacher_hidden, args.vocab = s->vocab;
    args.divergence = s->divergence, args.fast_logits = s->fast;
    args.row_weight = t.row_weight, args.max_counted = s->counted;
    args.workspace = set->workspace, args.workspace_bytes = c->workspace_bytes;
    return args;
}

static lk_status copy_gather(void *, const void *send, void *receive, size_t bytes, cudaStream_t stream)
{
    return (lk_status)cudaMemcpyAsync(receive, send, bytes, cudaMemcpyDeviceToDevice, stream);
}
static lk_linear_kl_parallel_args split_args_of(const lk_linear_kl_args *common)
{
    lk_linear_kl_parallel_args args = {};
    args.common = *common, args.parallel.vocab_total = common->vocab, args.parallel.ranks = 1, args.parallel.all_gather = copy_gather;
    return args;
}

/* A case has a context of its own, which its first launch makes. */
static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int, cudaStream_t stream)
{
    static const bench_case *owner;
    const lk_linear_kl_args args = args_of(c, set);
    lk_status status = LK_OK;
    if (owner != c) {
        if (owner) status = lk_linear_kl_destroy(&context);
        if (!status) status = lk_linear_kl_init(&context);
        owner = status ? NULL : c;
    }
    if (status) return status;
    const lk_linear_kl_parallel_args split = split_args_of(&args);
    if (is_split((const shape *)c->context)) return lk_linear_kl_parallel_forward_backward_bf16(&split, stream);
    return gives_gradient((const shape *)c->context) ? lk_linear_kl_forward_backward_bf16(&args, stream)
                                                     : lk_linear_kl_forward_bf16(&args, stream);
}

/* The plan of a case's workspace; the queries look at what is NULL, and at no memory. */
static lk_linear_kl_plan plan_of(const bench_case *c)
{
    const shape *s = (const shape *)c->context;
    char *const anywhere = (char *)256;
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    const lk_linear_kl_args args = args_of(c, &set);
    size_t bytes = (size_t)s->workspace_mb << 20;
    lk_linear_kl_plan plan = {};
    if (is_split(s)) {
        const lk_linear_kl_parallel_args split = split_args_of(&args);
        if (!bytes) right(lk_linear_kl_parallel_forward_backward_workspace_bytes_bf16(&split, &bytes));
        right(lk_linear_kl_parallel_forward_backward_plan_bf16(&split, bytes, &plan));
    } else if (gives_gradient(s)) {
        if (!bytes) right(lk_linear_kl_forward_backward_workspace_bytes_bf16(&args, &bytes));
        right(lk_linear_kl_forward_backward_plan_bf16(&args, bytes, &plan));
    } else {
        if (!bytes) right(lk_linear_kl_forward_workspace_bytes_bf16(&args, &bytes));
        right(lk_linear_kl_forward_plan_bf16(&args, bytes, &plan));
    }
    return plan;
}
static size_t workspace(const bench_case *c, int) { return plan_of(c).workspace_bytes; }

/* ---- Checks against double ----------------------------------------------------------------------------------------------- */

#define SAMPLE 4  /* tokens */
#define COLUMNS 3 /* of dweight */
#define LIMIT 1e-2 /* of a row of a gradient, as a share of its norm: dZ and the result are rounded to bf16 */

/* out[i] = sum_d a[d] b[i,d] */
typedef struct {
    const lk_bf16 *a, *b;
    double *out;
    int64_t count, length;
} dots_args;
LK_KERNEL void dots_kernel(dots_args p) /* a warp owns a product */
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t i = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    double sum = 0.0;
    if (i >= p.count) return;
    for (int64_t d = lane; d < p.length; d += 32) sum += (double)lk_to_float(p.a[d]) * (double)lk_to_float(p.b[i * p.length + d]);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) p.out[i] = sum;
}

/* out[d] = sum_i factor[i] b[i,d] */
typedef struct {
    const double *factor;
    const lk_bf16 *b;
    double *out;
    int64_t count, length;
} sums_args;
LK_KERNEL void sums_kernel(sums_args p)
{
    const int64_t d = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    double sum = 0.0;
    if (d >= p.length) return;
    for (int64_t i = 0; i < p.count; i++) sum += p.factor[i] * (double)lk_to_float(p.b[i * p.length + d]);
    p.out[d] = sum;
}

static double *on_device; /* of these kernels */

/* The products of a with all rows of b; the caller frees them. */
static double *dots_of(const lk_bf16 *a, const lk_bf16 *b, int64_t count, int64_t length)
{
    double *const host = (double *)malloc((size_t)count * sizeof(double));
    const dots_args args = {a, b, on_device, count, length};
    BENCH_CUDA(lk_launch(dots_kernel, lk_ceil_div(count, 8), 256, 0, NULL, args));
    BENCH_CUDA(cudaMemcpy(host, on_device, (size_t)count * sizeof(double), cudaMemcpyDeviceToHost));
    return host;
}

/* Whether a row of a gradient is sum_i factor[i] b[i,:]. */
static bool row_right(const char *name, int64_t row, const void *tensor, int wide, const double *factor, const lk_bf16 *b,
                      int64_t count, int64_t length, char *why, size_t why_bytes)
{
    const size_t bytes = (size_t)length * (wide ? sizeof(float) : sizeof(lk_bf16));
    double *const expected = (double *)malloc((size_t)length * sizeof(double)), error = 0, norm = 0;
    void *const raw = malloc(bytes);
    BENCH_CUDA(cudaMemcpy(on_device, factor, (size_t)count * sizeof(double), cudaMemcpyHostToDevice));
    const sums_args args = {on_device, b, on_device + count, count, length};
    BENCH_CUDA(lk_launch(sums_kernel, lk_ceil_div(length, 256), 256, 0, NULL, args));
    BENCH_CUDA(cudaMemcpy(expected, on_device + count, (size_t)length * sizeof(double), cudaMemcpyDeviceToHost));
    BENCH_CUDA(cudaMemcpy(raw, (const char *)tensor + (size_t)row * bytes, bytes, cudaMemcpyDeviceToHost));
    for (int64_t d = 0; d < length; d++) {
        const double off = (wide ? (double)((const float *)raw)[d] : (double)(float)((const lk_bf16 *)raw)[d]) - expected[d];
        error += off * off, norm += expected[d] * expected[d];
    }
    free(expected), free(raw);
    if (sqrt(error) <= LIMIT * sqrt(norm)) return true;
    snprintf(why, why_bytes, "%s's row %lld is off by %.3g of its norm; limit %.3g", name, (long long)row, sqrt(error / norm),
             LIMIT);
    return false;
}

static bool within(const char *name, int64_t i, double value, double expected, double limit, char *why, size_t why_bytes)
{
    if (fabs(value - expected) <= limit) return true;
    snprintf(why, why_bytes, "%s[%lld] is %.9g, not %.9g; limit %.2g", name, (long long)i, value, expected, limit);
    return false;
}

/* A head's logits less lse, which *lse becomes. */
static double *log_p_of(const lk_bf16 *x, const lk_bf16 *weight, int64_t vocab, int64_t hidden, double *lse)
{
    double *const z = dots_of(x, weight, vocab, hidden), sum = 0;
    for (int64_t j = 0; j < vocab; j++) sum += exp(z[j]); /* logits are below 10 */
    *lse = log(sum);
    for (int64_t j = 0; j < vocab; j++) z[j] -= *lse;
    return z;
}

static bool token_right(const shape *s, const tensors *t, int64_t token, const float *loss, const float *lse, char *why,
                        size_t why_bytes)
{
    double log_sum[2], sum = 0, mean = 0;
    const lk_bf16 *const x = t->x + token * s->hidden, *const y = t->teacher_x + token * s->teacher_hidden;
    double *const lp = log_p_of(x, t->weight, s->vocab, s->hidden, &log_sum[0]);
    double *const lq = log_p_of(y, t->teacher_weight, s->vocab, s->teacher_hidden, &log_sum[1]);
    for (int64_t j = 0; j < s->vocab; j++) {
        const double p = exp(lp[j]), q = exp(lq[j]), lm = log((p + q) / 2);
        if (s->divergence == LK_KL_FORWARD) sum += q * (lq[j] - lp[j]);
        if (s->divergence == LK_KL_REVERSE) sum += p * (lp[j] - lq[j]), mean = sum;
        if (s->divergence == LK_KL_JENSEN_SHANNON) mean += p * (lp[j] - lm), sum += (p * (lp[j] - lm) + q * (lq[j] - lm)) / 2;
    }
    const double off = s->fast ? 2e-3 : 2e-5; /* of a logit */
    bool good = within("loss", token, loss[token], sum, off * (0.1 + sum), why, why_bytes) &&
                within("lse", token, lse[token], log_sum[0], off * 10, why, why_bytes);
    for (int64_t j = 0; j < s->vocab; j++) {
        const double p = exp(lp[j]), q = exp(lq[j]), lm = log((p + q) / 2);
        lp[j] = s->divergence == LK_KL_FORWARD ? p - q
                : s->divergence == LK_KL_REVERSE ? p * (lp[j] - lq[j] - mean)
                                                 : p * (lp[j] - lm - mean) / 2;
    }
    if (good && gives_gradient(s))
        good = row_right("dx", token, t->dx, 0, lp, t->weight, s->vocab, s->hidden, why, why_bytes);
    free(lp), free(lq);
    return good;
}

/* dweight of a column, from logits in double and the operation's loss and lse, which are right where they were looked at. */
static bool column_right(const shape *s, const tensors *t, int64_t col, const float *loss, const float *lse,
                         const float *teacher_lse, char *why, size_t why_bytes)
{
    double *const z = dots_of(t->weight + col * s->hidden, t->x, s->tokens, s->hidden);
    double *const y = dots_of(t->teacher_weight + col * s->teacher_hidden, t->teacher_x, s->tokens, s->teacher_hidden);
    for (int64_t i = 0; i < s->tokens; i++) {
        const double lp = z[i] - lse[i], lq = y[i] - teacher_lse[i];
        z[i] = !counts(s, i) ? 0 : s->divergence == LK_KL_FORWARD ? exp(lp) - exp(lq) : exp(lp) * (lp - lq - loss[i]);
    }
    const bool good = row_right("dweight", col, t->dweight, s->wide, z, t->x, s->tokens, s->hidden, why, why_bytes);
    free(z), free(y);
    return good;
}

static bool check(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    const int64_t most = s->vocab > s->tokens ? s->vocab : s->tokens;
    float *const loss = (float *)malloc(3 * (size_t)s->tokens * sizeof(float)), *const lse = loss + s->tokens;
    BENCH_CUDA(cudaMemcpy(loss, t.loss, 3 * (size_t)s->tokens * sizeof(float), cudaMemcpyDeviceToHost));
    BENCH_CUDA(cudaMalloc((void **)&on_device, (size_t)(most + s->hidden) * sizeof(double)));
    bool good = true;
    for (int i = 0; i < SAMPLE && good; i++) {
        int64_t token = i * (s->tokens - 1) / (SAMPLE - 1);
        while (!counts(s, token)) token--;
        good = token_right(s, &t, token, loss, lse, why, why_bytes);
    }
    for (int i = 0; i < COLUMNS && good && gives_gradient(s) && s->divergence != LK_KL_JENSEN_SHANNON; i++)
        good = column_right(s, &t, i * (s->vocab - 1) / (COLUMNS - 1), loss, lse, lse + s->tokens, why, why_bytes);
    BENCH_CUDA(cudaFree(on_device));
    free(loss);
    return good;
}

static void describe(bench_case *c, const shape *s)
{
    const size_t element = s->wide ? sizeof(float) : sizeof(lk_bf16);
    c->name = s->name, c->direction = s->direction, c->dtype = "bf16", c->context = s;
    c->read_bytes = X_BYTES(s, s->hidden) + WEIGHT_BYTES(s, s->hidden, 2) + X_BYTES(s, s->teacher_hidden) +
                    WEIGHT_BYTES(s, s->teacher_hidden, 2) + (s->counted ? (size_t)s->tokens * sizeof(float) : 0);
    c->write_bytes = gives_gradient(s) ? X_BYTES(s, s->hidden) + WEIGHT_BYTES(s, s->hidden, element) : 0;
    c->out_bytes = 3 * (size_t)s->tokens * sizeof(float);
    c->flops = FLOPS(s);
    c->naive_bytes = (size_t)(s->tokens * s->vocab) * 10 + LK_HEAD_CUBLAS_BYTES;
    c->fill = fill, c->launch = launch_lk, c->bare = launch_bare, c->check = check, c->workspace = workspace;
    if (!s->workspace_mb && !s->fast && !is_split(s)) c->naive = launch_naive;
}

int main(int argc, char **argv)
{
    static bench_case cases[CASES], hosts[HOSTS];
    static char remarks[CASES][330];
    for (int k = 0; k < CASES; k++) {
        describe(&cases[k], &shapes[k]);
        const lk_linear_kl_plan plan = plan_of(&cases[k]);
        snprintf(remarks[k], sizeof remarks[k], "%zu MiB: %s", plan.workspace_bytes >> 20, plan.text);
        cases[k].remark = remarks[k];
    }
    for (int k = 0; k < HOSTS; k++) describe(&hosts[k], &host_shapes[k]);
    return bench_run("linear_kl", cases, CASES, hosts, HOSTS, argc, argv);
}
