// SPDX-License-Identifier: MIT
/* bench/linear_cross_entropy.cu - lk_linear_cross_entropy against its matmuls alone (bare) and the unfused head (naive); how
 * to run it: bench.h.
 *
 * lk       as a caller gets it: init, then calls, each matmul by the algorithm that cuBLASLt's heuristic names first.
 * bare     cuBLASLt's products for the whole batch, nothing between them: X W^T into bf16, dZ W into bf16, dZ^T X into the type
 *          of dweight, with beta = 0, 32 MiB of workspace and the fastest of the heuristic's first 8 algorithms each; for
 *          forward the first product alone. Its dZ is what cross_entropy's kernels make of this case's own f32 logits, since
 *          the speed of a matmul depends on its data. Rows of dZ and of logits start at multiples of 64 elements, and columns
 *          beyond a multiple of 8 are left out, since cuBLASLt is several times as slow with odd lengths.
 * naive    all logits in f32, lk_cross_entropy forward, then backward, and the two products, by the same algorithms: what a
 *          framework does. Not at 50257, where it is slow.
 * of_gemm  is bare over lk, of replays in turn with nothing else between them: see bench.h. A naive between them let the card
 *          rest: at 50257 bare then took 18.8 ms, without it 22.3.
 * Tuning   bare and naive choose their algorithms by time before anything is measured; lk does not.
 * Check    dx of 8 tokens, dweight of 4 columns, lse of the 8 tokens and the mean loss, against plain kernels in double.
 *
 * Cases with workspace=N at the end are memory against time: N MiB, or what the query asks for; those with path=... take that
 * path, to stand beside the plan that lk takes by itself. Cases with weights=1 have logits of sigma 64, and a dZ that is mostly
 * zeros; the others' weights are 0.02, as in a fresh model, for logits of sigma 1.28. Those with ids=K are
 * linear_cross_entropy_ids: K ids per token, the target with weight 1 and K - 1 others with weight 0, so the results are the same.
 * The one with statistics=1 gives entropy and the three statistics too.
 */
#include "bench/bench.h"
#include "lk/linear_cross_entropy_ids.cuh"

LK_DEFINE_CROSS_ENTROPY(f32)
LK_DEFINE_LINEAR_CROSS_ENTROPY(bf16)
LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS(bf16)

#ifndef TOKENS
#define TOKENS 12288 /* of most cases; -DTOKENS=8192 measures another number of them */
#endif

typedef struct shape {
    const char *name, *direction;
    int64_t vocab;
    int wide;             /* dweight is f32, else bf16 */
    float sigma;          /* of the weights */
    int64_t workspace_mb; /* what lk gets; 0: what the query wants */
    double bare_ms;       /* of 12288 tokens in the study of an H200, in proportion between its sizes; 0: none of such data */
    int naive;
    int path; /* LK_LINEAR_CROSS_ENTROPY_* */
    int ids;  /* per token; 0: a target */
    int64_t tokens = TOKENS;
} shape;

#define HIDDEN 4096
#define TEXT(x) #x
#define TEXT_OF(macro) TEXT(macro)

#define CHUNKS LK_LINEAR_CROSS_ENTROPY_CHUNKS
#define FUSED LK_LINEAR_CROSS_ENTROPY_FUSED
#define FEW(tokens, vocab) "tokens=" #tokens " hidden=4096 vocab=" #vocab
#define CASE(vocab, dweight) "tokens=" TEXT_OF(TOKENS) " hidden=4096 vocab=" #vocab " dweight=" #dweight

static const shape shapes[] = {
    {CASE(1024, f32), "forward_backward", 1024, 1, 0.02f, 163, 0.43, 1, 0, 0},
    {CASE(2048, f32), "forward_backward", 2048, 1, 0.02f, 171, 0.862, 1, 0, 0},
    {CASE(4096, f32), "forward_backward", 4096, 1, 0.02f, 186, 1.727, 1, 0, 0},
    {CASE(8192, f32), "forward_backward", 8192, 1, 0.02f, 216, 3.46, 1, 0, 0},
    {CASE(16384, f32), "forward_backward", 16384, 1, 0.02f, 277, 6.92, 1, 0, 0},
    {CASE(32768, f32), "forward_backward", 32768, 1, 0.02f, 399, 13.86, 1, 0, 0},
    {CASE(65536, f32), "forward_backward", 65536, 1, 0.02f, 643, 27.74, 1, 0, 0},
    {CASE(131072, f32), "forward_backward", 131072, 1, 0.02f, 1130, 55.5, 1, 0, 0},
    {CASE(50257, f32), "forward_backward", 50257, 1, 0.02f, 529, 21.27, 0, 0, 0},
    {CASE(1024, bf16), "forward_backward", 1024, 0, 0.02f, 179, 0.43, 1, 0, 0},
    {CASE(2048, bf16), "forward_backward", 2048, 0, 0.02f, 203, 0.862, 1, 0, 0},
    {CASE(4096, bf16), "forward_backward", 4096, 0, 0.02f, 250, 1.727, 1, 0, 0},
    {CASE(8192, bf16), "forward_backward", 8192, 0, 0.02f, 344, 3.46, 1, 0, 0},
    {CASE(16384, bf16), "forward_backward", 16384, 0, 0.02f, 533, 6.92, 1, 0, 0},
    {CASE(32768, bf16), "forward_backward", 32768, 0, 0.02f, 911, 13.86, 1, 0, 0},
    {CASE(65536, bf16), "forward_backward", 65536, 0, 0.02f, 1667, 27.74, 1, 0, 0},
    {CASE(131072, bf16), "forward_backward", 131072, 0, 0.02f, 3178, 55.5, 1, 0, 0},
    {CASE(131072, f32 workspace=64), "forward_backward", 131072, 1, 0.02f, 64, 55.5, 0, 0, 0},
    {CASE(131072, f32 workspace=256), "forward_backward", 131072, 1, 0.02f, 256, 55.5, 0, 0, 0},
    {CASE(131072, f32 workspace=512), "forward_backward", 131072, 1, 0.02f, 512, 55.5, 0, 0, 0},
    {CASE(131072, f32 workspace=2260), "forward_backward", 131072, 1, 0.02f, 2260, 55.5, 0, 0, 0},
    {CASE(131072, f32 workspace=6208), "forward_backward", 131072, 1, 0.02f, 6208, 55.5, 0, 0, 0},
    {CASE(131072, bf16 workspace=256), "forward_backward", 131072, 0, 0.02f, 256, 55.5, 0, 0, 0},
    {CASE(131072, bf16 workspace=1130), "forward_backward", 131072, 0, 0.02f, 1130, 55.5, 0, 0, 0},
    {CASE(131072, bf16 workspace=6208), "forward_backward", 131072, 0, 0.02f, 6208, 55.5, 0, 0, 0},
    {CASE(1024, bf16 weights=1), "forward_backward", 1024, 0, 1.0f, 179, 0, 1, 0, 0},
    {CASE(2048, bf16 weights=1), "forward_backward", 2048, 0, 1.0f, 203, 0, 1, 0, 0},
    {CASE(4096, bf16 weights=1), "forward_backward", 4096, 0, 1.0f, 250, 0, 1, 0, 0},
    {CASE(8192, bf16 weights=1), "forward_backward", 8192, 0, 1.0f, 344, 0, 1, 0, 0},
    {CASE(16384, bf16 weights=1), "forward_backward", 16384, 0, 1.0f, 533, 0, 1, 0, 0},
    {CASE(32768, bf16 weights=1), "forward_backward", 32768, 0, 1.0f, 911, 0, 1, 0, 0},
    {CASE(65536, bf16 weights=1), "forward_backward", 65536, 0, 1.0f, 1667, 0, 1, 0, 0},
    {CASE(131072, bf16 weights=1), "forward_backward", 131072, 0, 1.0f, 3178, 0, 1, 0, 0},
    {"tokens=" TEXT_OF(TOKENS) " hidden=4096 vocab=131072", "forward", 131072, 0, 0.02f, 64, 18.74, 1, 0, 0},
    {FEW(1, 151935), "forward", 151935, 0, 0.02f, 0, 0, 0, 0, 0, 1},
    {FEW(8, 151936), "forward", 151936, 0, 0.02f, 0, 0, 0, 0, 0, 8},
    {FEW(100, 32003), "forward", 32003, 0, 0.02f, 0, 0, 0, 0, 0, 100},
    {FEW(1000, 151936), "forward", 151936, 0, 0.02f, 0, 0, 0, 0, 0, 1000},
    {FEW(4090, 131072), "forward", 131072, 0, 0.02f, 0, 0, 0, 0, 0, 4090},
    {FEW(8188, 131072), "forward", 131072, 0, 0.02f, 0, 0, 0, 0, 0, 8188},
    {FEW(8, 151936) " dweight=bf16", "forward_backward", 151936, 0, 0.02f, 0, 0, 0, 0, 0, 8},
    {FEW(100, 32003) " dweight=bf16", "forward_backward", 32003, 0, 0.02f, 0, 0, 0, 0, 0, 100},
    {FEW(1000, 151935) " dweight=bf16", "forward_backward", 151935, 0, 0.02f, 0, 0, 0, 0, 0, 1000},
    {FEW(4090, 32768) " dweight=bf16", "forward_backward", 32768, 0, 0.02f, 0, 0, 0, 0, 0, 4090},
    {"tokens=" TEXT_OF(TOKENS) " hidden=4096 vocab=131072 statistics=1", "forward", 131072, 0, 0.02f, 64, 18.74, 0, 0, 0},
    {CASE(50257, f32 path=chunks), "forward_backward", 50257, 1, 0.02f, 529, 21.27, 0, CHUNKS, 0},
    {CASE(8192, f32 path=fused), "forward_backward", 8192, 1, 0.02f, 216, 3.46, 0, FUSED, 0},
    {CASE(32768, f32 path=chunks), "forward_backward", 32768, 1, 0.02f, 399, 13.86, 0, CHUNKS, 0},
    {CASE(131072, f32 path=chunks), "forward_backward", 131072, 1, 0.02f, 1130, 55.5, 0, CHUNKS, 0},
    {CASE(131072, bf16 path=chunks), "forward_backward", 131072, 0, 0.02f, 3178, 55.5, 0, CHUNKS, 0},
    {CASE(131072, f32 ids=1), "forward_backward", 131072, 1, 0.02f, 1130, 55.5, 0, 0, 1},
    {CASE(131072, f32 ids=8), "forward_backward", 131072, 1, 0.02f, 1130, 55.5, 0, 0, 8},
    {CASE(131072, f32 ids=64), "forward_backward", 131072, 1, 0.02f, 1130, 55.5, 0, 0, 64},
    {CASE(131072, f32 ids=1 path=chunks), "forward_backward", 131072, 1, 0.02f, 1130, 55.5, 0, CHUNKS, 1},
    {CASE(131072, f32 ids=8 path=chunks), "forward_backward", 131072, 1, 0.02f, 1130, 55.5, 0, CHUNKS, 8},
    {CASE(131072, f32 ids=64 path=chunks), "forward_backward", 131072, 1, 0.02f, 1130, 55.5, 0, CHUNKS, 64},
    {CASE(32768, f32 ids=8), "forward_backward", 32768, 1, 0.02f, 399, 13.86, 0, 0, 8},
    {CASE(32768, f32 ids=64 path=fused), "forward_backward", 32768, 1, 0.02f, 399, 13.86, 0, FUSED, 64},
    {CASE(32768, f32 ids=64 path=chunks), "forward_backward", 32768, 1, 0.02f, 399, 13.86, 0, CHUNKS, 64},
    {CASE(131072, f32 workspace=queried), "forward_backward", 131072, 1, 0.02f, 0, 55.5, 0, 0, 0},
    {CASE(131072, bf16 workspace=queried), "forward_backward", 131072, 0, 0.02f, 0, 55.5, 0, 0, 0},
};
#define CASES ((int)(sizeof shapes / sizeof shapes[0]))

/* Those whose host time is taken. FUSED's kernels ask for about 200 KiB of shared memory, those of CHUNKS for
 * less than 32: from there on a launch has the kernel's limit of it looked at, and raised if need be. */
static const shape host_shapes[] = {
    {CASE(1024, f32 path=chunks), "forward_backward", 1024, 1, 0.02f, 163, 0, 0, CHUNKS, 0},
    {CASE(1024, f32 path=fused), "forward_backward", 1024, 1, 0.02f, 163, 0, 0, FUSED, 0},
};
#define HOSTS ((int)(sizeof host_shapes / sizeof host_shapes[0]))

/* What a call reads and writes, small tensors aside; its matmuls, of 2 tokens hidden vocab operations each. */
#define X_BYTES(s) ((size_t)(s)->tokens * HIDDEN * sizeof(lk_bf16))
#define WEIGHT_BYTES(s) ((size_t)(s)->vocab * HIDDEN * sizeof(lk_bf16))
#define DWEIGHT_BYTES(s) ((size_t)(s)->vocab * HIDDEN * ((s)->wide ? sizeof(float) : sizeof(lk_bf16)))
#define FLOPS(s) ((gives_gradient(s) ? 3.0 : 1.0) * 2.0 * (double)(s)->tokens * HIDDEN * (double)(s)->vocab)

static bool gives_gradient(const shape *s)
{
    return strcmp(s->direction, "forward") != 0;
}

static bool has_statistics(const shape *s)
{
    return strstr(s->name, " statistics=") != NULL;
}

/* read: x, weight. write: dx, dweight. in: target; ids and their weights, [tokens, K]. out: lse, the mean loss; logp, likewise, or
 * entropy and statistics, [4, tokens]. */
typedef struct {
    lk_bf16 *x, *weight, *dx;
    void *dweight;
    int64_t *target, *ids;
    float *lse, *loss, *logp, *entropy;
} tensors;

static tensors tensors_of(const shape *s, const bench_buffers *set)
{
    tensors t = {};
    t.x = (lk_bf16 *)set->read, t.weight = (lk_bf16 *)(set->read + X_BYTES(s));
    t.dx = (lk_bf16 *)set->write, t.dweight = set->write + X_BYTES(s);
    t.target = (int64_t *)set->in, t.lse = (float *)set->out, t.loss = t.lse + s->tokens;
    t.ids = t.target + s->tokens, t.logp = t.entropy = t.loss + 1;
    return t;
}

static void cublas(cublasStatus_t status, const char *call, int line)
{
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fflush(stdout);
    fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, line, call, cublasLtGetStatusName(status));
    exit(1);
}
#define CUBLAS(call) cublas(call, #call, __LINE__)

/* ---- What bare and naive share: scratch for the whole batch, and products ------------------------------------------------ */

#define CUBLAS_BYTES ((size_t)32 << 20)

/* One allocation for all cases, as large as the largest so far. */
typedef struct {
    float *logits; /* [tokens, stride]; of bare bf16 */
    lk_bf16 *dz;   /* [tokens, stride] */
    char *losses;  /* the workspace of cross_entropy's mean */
    int64_t *valid_rows;
    void *cublas;
    int64_t stride;
    size_t bytes;
} scratch;

static scratch scratch_of(const shape *s)
{
    static char *memory;
    static size_t held;
    const size_t losses = (size_t)1 << 20;
    scratch t = {};
    t.stride = lk_ceil_div(s->vocab, 64) * 64;
    const size_t elements = (size_t)s->tokens * (size_t)t.stride, logits = bench_round_up(elements * sizeof(float));
    const size_t dz = gives_gradient(s) ? bench_round_up(elements * sizeof(lk_bf16)) : 0;
    t.bytes = logits + dz + losses + 256 + CUBLAS_BYTES;
    if (t.bytes > held) {
        BENCH_CUDA(cudaDeviceSynchronize());
        BENCH_CUDA(cudaFree(memory));
        BENCH_CUDA(cudaMalloc((void **)&memory, t.bytes));
        held = t.bytes;
    }
    t.logits = (float *)memory, t.dz = (lk_bf16 *)(memory + logits), t.losses = memory + logits + dz;
    t.valid_rows = (int64_t *)(t.losses + losses), t.cublas = t.losses + losses + 256;
    return t;
}

/* D = op(A) op(B), m x n over k, in cuBLASLt's column-major order: a row-major matrix is its transpose there. */
typedef struct {
    const lk_bf16 *a, *b;
    void *d;
    int64_t m, n, k, lda, ldb, ldd;
    int transpose_a, transpose_b, wide; /* wide: D is f32 */
} product;

static bool same_kind(const product *p, const product *q)
{
    return p->m == q->m && p->n == q->n && p->k == q->k && p->lda == q->lda && p->ldb == q->ldb && p->ldd == q->ldd &&
           p->transpose_a == q->transpose_a && p->transpose_b == q->transpose_b && p->wide == q->wide;
}

/* A product's algorithm, chosen by time when a product of its kind comes first: the median of 5, after one run. */
typedef struct {
    product kind;
    cublasLtMatmulAlgo_t algorithm;
} choice;

#define ALGORITHMS 8
#define RUNS 5

static void multiply(const product *p, void *workspace, cudaStream_t stream)
{
    static choice choices[8 * (CASES + HOSTS)];
    static int count;
    static cublasLtHandle_t handle;
    if (!handle) CUBLAS(cublasLtCreate(&handle));
    const float one = 1.0f, zero = 0.0f;
    const int32_t transpose_a = p->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t transpose_b = p->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint64_t m = (uint64_t)p->m, n = (uint64_t)p->n, k = (uint64_t)p->k, bytes = CUBLAS_BYTES;
    cublasLtMatmulDescOpaque_t matmul;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    CUBLAS(cublasLtMatmulDescInit(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS(cublasLtMatmulDescSetAttribute(&matmul, CUBLASLT_MATMUL_DESC_TRANSA, &transpose_a, sizeof transpose_a));
    CUBLAS(cublasLtMatmulDescSetAttribute(&matmul, CUBLASLT_MATMUL_DESC_TRANSB, &transpose_b, sizeof transpose_b));
    CUBLAS(cublasLtMatrixLayoutInit(&a, CUDA_R_16BF, p->transpose_a ? k : m, p->transpose_a ? m : k, p->lda));
    CUBLAS(cublasLtMatrixLayoutInit(&b, CUDA_R_16BF, p->transpose_b ? n : k, p->transpose_b ? k : n, p->ldb));
    CUBLAS(cublasLtMatrixLayoutInit(&d, p->wide ? CUDA_R_32F : CUDA_R_16BF, m, n, p->ldd));
#define MULTIPLY(chosen)                                                                                                       \
    cublasLtMatmul(handle, &matmul, &one, p->a, &a, p->b, &b, &zero, p->d, &d, p->d, &d, chosen, workspace, bytes, stream)
    int at = 0;
    while (at < count && !same_kind(&choices[at].kind, p)) at++;
    if (at == count) {
        cublasLtMatmulPreferenceOpaque_t preference;
        cublasLtMatmulHeuristicResult_t found[ALGORITHMS];
        int known = 0, best = 0;
        float best_ms = INFINITY;
        cudaEvent_t from, to;
        BENCH_CUDA(cudaEventCreate(&from)), BENCH_CUDA(cudaEventCreate(&to));
        CUBLAS(cublasLtMatmulPreferenceInit(&preference));
        CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                                    sizeof bytes));
        CUBLAS(cublasLtMatmulAlgoGetHeuristic(handle, &matmul, &a, &b, &d, &d, &preference, ALGORITHMS, found, &known));
        for (int i = 0; i < known; i++) {
            float ms[RUNS];
            CUBLAS(MULTIPLY(&found[i].algo));
            for (int run = 0; run < RUNS; run++) {
                BENCH_CUDA(cudaEventRecord(from, stream));
                CUBLAS(MULTIPLY(&found[i].algo));
                BENCH_CUDA(cudaEventRecord(to, stream));
                BENCH_CUDA(cudaEventSynchronize(to));
                BENCH_CUDA(cudaEventElapsedTime(&ms[run], from, to));
            }
            qsort(ms, RUNS, sizeof ms[0], bench_compare_floats);
            if (ms[RUNS / 2] < best_ms) best_ms = ms[RUNS / 2], best = i;
        }
        BENCH_CUDA(cudaEventDestroy(from)), BENCH_CUDA(cudaEventDestroy(to));
        choices[count].kind = *p, choices[count++].algorithm = found[best].algo;
    }
    CUBLAS(MULTIPLY(&choices[at].algorithm));
#undef MULTIPLY
}

/* With the first `vocab` columns. */
static void multiply_logits(const shape *s, const tensors *t, const scratch *h, int64_t vocab, int wide, cudaStream_t stream)
{
    const product p = {t->weight, t->x, h->logits, vocab, s->tokens, HIDDEN, HIDDEN, HIDDEN, h->stride, 1, 0, wide};
    multiply(&p, h->cublas, stream);
}

static void multiply_gradients(const shape *s, const tensors *t, const scratch *h, int64_t vocab, cudaStream_t stream)
{
    const product dx = {t->weight, h->dz, t->dx, HIDDEN, s->tokens, vocab, HIDDEN, h->stride, HIDDEN, 0, 0, 0};
    const product dweight = {t->x, h->dz, t->dweight, HIDDEN, vocab, s->tokens, HIDDEN, h->stride, HIDDEN, 0, 1, s->wide};
    multiply(&dx, h->cublas, stream);
    multiply(&dweight, h->cublas, stream);
}

/* From the f32 logits to lse, the mean loss, and dZ. */
static lk_status launch_losses(const shape *s, const tensors *t, const scratch *h, cudaStream_t stream)
{
    lk_cross_entropy_args args = {};
    args.logits = h->logits, args.target = t->target, args.loss = t->loss, args.lse = t->lse;
    args.valid_rows = h->valid_rows, args.reduction = LK_REDUCTION_MEAN;
    args.dlogits = h->dz, args.dlogits_dtype = LK_DTYPE_BF16;
    args.rows = s->tokens, args.vocab = s->vocab, args.logits_stride = args.dlogits_stride = h->stride;
    lk_status status = lk_cross_entropy_forward_workspace_bytes_f32(&args, &args.workspace_bytes);
    args.workspace = args.workspace_bytes ? h->losses : NULL;
    if (!status) status = lk_cross_entropy_forward_f32(&args, stream);
    return status || !gives_gradient(s) ? status : lk_cross_entropy_backward_f32(&args, stream);
}

static lk_status launch_naive(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    const scratch h = scratch_of(s);
    multiply_logits(s, &t, &h, s->vocab, 1, stream);
    const lk_status status = launch_losses(s, &t, &h, stream);
    if (!status && gives_gradient(s)) multiply_gradients(s, &t, &h, s->vocab, stream);
    return status;
}

static lk_status launch_bare(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    (void)path;
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    const scratch h = scratch_of(s);
    const int64_t vocab = s->vocab / 8 * 8;
    multiply_logits(s, &t, &h, vocab, 0, stream);
    if (gives_gradient(s)) multiply_gradients(s, &t, &h, vocab, stream);
    return LK_OK;
}

/* ---- The operation ------------------------------------------------------------------------------------------------------- */

/* All sets hold the same numbers, so that bare's dZ, made here, belongs to each. The first and the last column are targets. */
static void fill(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    bench_fill("bf16", t.x, s->tokens * HIDDEN, 1.0f, 1, stream);
    bench_fill("bf16", t.weight, s->vocab * HIDDEN, s->sigma, 2, stream);
    int64_t *const target = (int64_t *)malloc((size_t)s->tokens * sizeof *target);
    uint64_t state = 1;
    for (int64_t token = 0; token < s->tokens; token++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        target[token] = token == 0 ? 0 : token == s->tokens - 1 ? s->vocab - 1 : (int64_t)((state >> 32) % (uint64_t)s->vocab);
    }
    const size_t target_bytes = (size_t)s->tokens * sizeof *target;
    BENCH_CUDA(cudaMemcpyAsync(t.target, target, target_bytes, cudaMemcpyHostToDevice, stream));
    const size_t ids = (size_t)(s->tokens * s->ids);
    int64_t *const id = (int64_t *)malloc(ids * (sizeof(int64_t) + sizeof(float)) + 1);
    float *const id_weight = (float *)(id + ids);
    for (size_t i = 0; i < ids; i++) {
        const int64_t token = (int64_t)i / s->ids, k = (int64_t)i % s->ids;
        id[i] = (target[token] + k * 7919) % s->vocab, id_weight[i] = k == 0 ? 1.0f : 0.0f;
    }
    BENCH_CUDA(cudaMemcpyAsync(t.ids, id, ids * (sizeof(int64_t) + sizeof(float)), cudaMemcpyHostToDevice, stream));
    BENCH_CUDA(cudaStreamSynchronize(stream));
    free(id), free(target);
    if (number > 0 || !gives_gradient(s)) return;
    const scratch h = scratch_of(s);
    multiply_logits(s, &t, &h, s->vocab, 1, stream);
    BENCH_CUDA((cudaError_t)launch_losses(s, &t, &h, stream));
}

static lk_linear_cross_entropy_context context;

static lk_linear_cross_entropy_args args_of(const bench_case *c, const bench_buffers *set, int path)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    lk_linear_cross_entropy_args args = {};
    args.context = &context, args.x = t.x, args.weight = t.weight, args.target = t.target;
    args.loss = t.loss, args.lse = t.lse, args.reduction = LK_REDUCTION_MEAN;
    if (has_statistics(s)) args.entropy = t.entropy, args.statistics = 1;
    args.dx = t.dx, args.dweight = t.dweight, args.dweight_dtype = s->wide ? LK_DTYPE_F32 : LK_DTYPE_BF16;
    args.tokens = s->tokens, args.hidden = HIDDEN, args.vocab = s->vocab;
    args.workspace = set->workspace, args.workspace_bytes = c->workspace_bytes, args.path = path ? path : s->path;
    return args;
}

static lk_linear_cross_entropy_ids_args ids_args_of(const bench_case *c, const bench_buffers *set)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    lk_linear_cross_entropy_ids_args args = {};
    args.common = args_of(c, set, 0), args.common.target = NULL;
    args.target_ids = t.ids, args.target_weight = (const float *)(t.ids + s->tokens * s->ids), args.logp = t.logp;
    args.ids_per_row = s->ids;
    return args;
}

/* A case has a context of its own, which its first launch makes. */
static lk_status launch_lk(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream)
{
    static const bench_case *owner;
    const bool forward = !gives_gradient((const shape *)c->context);
    const lk_linear_cross_entropy_args args = args_of(c, set, path);
    lk_status status = LK_OK;
    if (owner != c) {
        if (owner) status = lk_linear_cross_entropy_destroy(&context);
        if (!status) status = lk_linear_cross_entropy_init(&context);
        if (status) return status;
        owner = c;
    }
    if (status) return status;
    if (((const shape *)c->context)->ids) {
        const lk_linear_cross_entropy_ids_args ids = ids_args_of(c, set);
        return lk_linear_cross_entropy_ids_forward_backward_bf16(&ids, stream);
    }
    return forward ? lk_linear_cross_entropy_forward_bf16(&args, stream)
                   : lk_linear_cross_entropy_forward_backward_bf16(&args, stream);
}

static size_t workspace(const bench_case *c, int path)
{
    const shape *s = (const shape *)c->context;
    if (s->workspace_mb) return (size_t)s->workspace_mb << 20;
    char *const anywhere = (char *)256; /* the query looks at what is NULL, and at no memory */
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    const lk_linear_cross_entropy_args args = args_of(c, &set, path);
    size_t bytes = 0;
    const lk_status status = gives_gradient(s) ? lk_linear_cross_entropy_forward_backward_workspace_bytes_bf16(&args, &bytes)
                                               : lk_linear_cross_entropy_forward_workspace_bytes_bf16(&args, &bytes);
    return status ? 0 : bytes;
}

/* ---- Checks against double ----------------------------------------------------------------------------------------------- */

#define SAMPLE 8  /* tokens */
#define COLUMNS 4 /* of dweight */

/* What a sample of rows may be off by, as a share of their norm: the larger of the two that the header's promises come to. */
#define SAMPLE_LIMIT 3.5e-3
#define ROW_LIMIT 2e-2

/* out[i] is the product of a row of a and a row of b: the rows of `rows` with each of b's `cols` rows in turn, or, where rows
 * is NULL, row i of a with row target[i] of b. */
typedef struct {
    const lk_bf16 *a, *b;
    const int64_t *rows, *target;
    double *out;
    int64_t cols, count;
} dots_args;

/* A warp owns a product. */
LK_KERNEL void dots_kernel(dots_args p)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t i = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= p.count) return;
    const lk_bf16 *a = p.a + (p.rows ? p.rows[i / p.cols] : i) * HIDDEN;
    const lk_bf16 *b = p.b + (p.rows ? i % p.cols : p.target[i]) * HIDDEN;
    double sum = 0.0;
    for (int d = lane; d < HIDDEN; d += 32) sum += (double)lk_to_float(a[d]) * (double)lk_to_float(b[d]);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) p.out[i] = sum;
}

/* out[i,d] = sum_j factor[i,j] b[j,d]. */
typedef struct {
    const double *factor;
    const lk_bf16 *b;
    double *out;
    int64_t terms, count;
} sums_args;

/* A thread owns an element. */
LK_KERNEL void sums_kernel(sums_args p)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count * HIDDEN) return;
    const double *factor = p.factor + i / HIDDEN * p.terms;
    const lk_bf16 *b = p.b + i % HIDDEN;
    double sum = 0.0;
#pragma unroll 16
    for (int64_t j = 0; j < p.terms; j++) sum += factor[j] * (double)lk_to_float(b[j * HIDDEN]);
    p.out[i] = sum;
}

/* Host memory that the caller frees, with a copy of what is on the device. */
static void *fetch(const void *device, size_t bytes)
{
    void *host = malloc(bytes);
    BENCH_CUDA(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
    return host;
}

/* Device memory of a check. */
typedef struct {
    double *dots, *sums; /* [SAMPLE, vocab] or [COLUMNS, tokens], or [tokens]; [SAMPLE, HIDDEN] */
    int64_t *rows;       /* [SAMPLE] */
} check_memory;

/* Products of `count` rows of a with all `cols` rows of b; the caller frees them. */
static double *dots_of(const check_memory *m, const lk_bf16 *a, const int64_t *rows, int64_t count, const lk_bf16 *b,
                       int64_t cols)
{
    BENCH_CUDA(cudaMemcpy(m->rows, rows, (size_t)count * sizeof *rows, cudaMemcpyHostToDevice));
    const dots_args args = {a, b, m->rows, NULL, m->dots, cols, count * cols};
    BENCH_CUDA(lk_launch(dots_kernel, lk_ceil_div(args.count, 8), 256, 0, NULL, args));
    return (double *)fetch(m->dots, (size_t)args.count * sizeof(double));
}

/* sum_j factor[i,j] b[j,d]; the caller frees them. */
static double *sums_of(const check_memory *m, const double *factor, int64_t count, const lk_bf16 *b, int64_t terms)
{
    BENCH_CUDA(cudaMemcpy(m->dots, factor, (size_t)(count * terms) * sizeof *factor, cudaMemcpyHostToDevice));
    const sums_args args = {m->dots, b, m->sums, terms, count};
    BENCH_CUDA(lk_launch(sums_kernel, lk_ceil_div(count * HIDDEN, 256), 256, 0, NULL, args));
    return (double *)fetch(m->sums, (size_t)count * HIDDEN * sizeof(double));
}

/* A gradient's row in double; the caller frees it. */
static double *fetch_row(const void *tensor, int wide, int64_t row)
{
    const size_t bytes = HIDDEN * (wide ? sizeof(float) : sizeof(lk_bf16));
    void *raw = fetch((const char *)tensor + (size_t)row * bytes, bytes);
    double *values = (double *)malloc(HIDDEN * sizeof(double));
    for (int d = 0; d < HIDDEN; d++) values[d] = wide ? ((const float *)raw)[d] : (float)((const lk_bf16 *)raw)[d];
    free(raw);
    return values;
}

/* Whether `count` rows of a gradient are within SAMPLE_LIMIT of `expected`, as the Frobenius norm of the difference over that
 * of what is right; and each row that is not small against the largest within ROW_LIMIT. */
static bool rows_right(const char *name, const void *tensor, int wide, const int64_t *rows, int count, const double *expected,
                       char *why, size_t why_bytes)
{
    double error[SAMPLE] = {}, norm[SAMPLE] = {}, errors = 0, norms = 0, largest = 0;
    for (int i = 0; i < count; i++) {
        double *values = fetch_row(tensor, wide, rows[i]);
        for (int d = 0; d < HIDDEN; d++) {
            const double right = expected[i * HIDDEN + d], off = values[d] - right;
            error[i] += off * off, norm[i] += right * right;
        }
        errors += error[i], norms += norm[i], largest = fmax(largest, norm[i]);
        free(values);
    }
    for (int i = 0; i < count; i++) {
        if (norm[i] <= 1e-6 * largest || sqrt(error[i] / norm[i]) <= ROW_LIMIT) continue;
        snprintf(why, why_bytes, "%s's row %lld is off by %.3g of its norm; limit %.3g", name, (long long)rows[i],
                 sqrt(error[i] / norm[i]), ROW_LIMIT);
        return false;
    }
    if (sqrt(errors / norms) <= SAMPLE_LIMIT) return true;
    snprintf(why, why_bytes, "%s's sampled rows are off by %.3g of their norm; limit %.3g", name, sqrt(errors / norms),
             SAMPLE_LIMIT);
    return false;
}

static bool within(const char *name, int64_t i, double value, double expected, double limit, char *why, size_t why_bytes)
{
    if (fabs(value - expected) <= limit) return true;
    snprintf(why, why_bytes, "%s[%lld] is %.9g, not %.9g; limit %.2g", name, (long long)i, value, expected, limit);
    return false;
}

/* lse and dx of sampled tokens from logits in double; *most becomes the largest |logit| seen. */
static bool tokens_right(const shape *s, const tensors *t, const check_memory *m, const int64_t *target, const float *lse,
                         double *most, char *why, size_t why_bytes)
{
    int64_t tokens[SAMPLE];
    for (int i = 0; i < SAMPLE; i++) tokens[i] = (int64_t)i * (s->tokens - 1) / (SAMPLE - 1);
    double *z = dots_of(m, t->x, tokens, SAMPLE, t->weight, s->vocab);
    bool right = true;
    for (int i = 0; right && i < SAMPLE; i++) {
        double *const row = z + i * s->vocab, max = -INFINITY, magnitude = 0, sum = 0, others = 0, first = 0, squares = 0, all = 0;
        const int64_t y = target[tokens[i]];
        for (int64_t j = 0; j < s->vocab; j++) max = fmax(max, row[j]), magnitude = fmax(magnitude, fabs(row[j]));
        for (int64_t j = 0; j < s->vocab; j++) {
            const double e = exp(row[j] - max);
            sum += e, first += e * row[j], squares += e * e, all += row[j];
        }
        const double exact = max + log(sum), limit = 1e-5 * fabs(exact - row[y]) + 4e-6 * magnitude;
        right = within("lse", tokens[i], lse[tokens[i]], exact, limit, why, why_bytes);
        static const char *const names[] = {"entropy", "log_sum_sq_probs", "mean_logits", "top_logprob"};
        const double want[] = {exact - first / sum, log(squares) - 2 * log(sum), all / (double)s->vocab, max - exact};
        for (int k = 0; right && has_statistics(s) && k < 4; k++) {
            float *const got = (float *)fetch(t->entropy + k * s->tokens + tokens[i], sizeof(float));
            right = within(names[k], tokens[i], *got, want[k], 4 * limit, why, why_bytes);
            free(got);
        }
        for (int64_t j = 0; j < s->vocab; j++) {
            row[j] = exp(row[j] - exact) / (double)s->tokens;
            if (j != y) others += row[j];
        }
        row[y] = -others, *most = fmax(*most, magnitude);
    }
    if (right && gives_gradient(s)) {
        double *dx = sums_of(m, z, SAMPLE, t->weight, s->vocab);
        right = rows_right("dx", t->dx, 0, tokens, SAMPLE, dx, why, why_bytes);
        free(dx);
    }
    free(z);
    return right;
}

/* dweight of sampled columns, from logits in double and the operation's lse, which are right where they were looked at. */
static bool columns_right(const shape *s, const tensors *t, const check_memory *m, const int64_t *target, const float *lse,
                          char *why, size_t why_bytes)
{
    const int64_t columns[COLUMNS] = {0, target[s->tokens / 3], target[s->tokens / 2], s->vocab - 1};
    double *z = dots_of(m, t->weight, columns, COLUMNS, t->x, s->tokens);
    for (int i = 0; i < COLUMNS; i++)
        for (int64_t token = 0; token < s->tokens; token++) {
            double *const at = z + i * s->tokens + token;
            *at = (exp(*at - lse[token]) - (target[token] == columns[i] ? 1 : 0)) / (double)s->tokens;
        }
    double *dweight = sums_of(m, z, COLUMNS, t->x, s->tokens);
    const bool right = rows_right("dweight", t->dweight, s->wide, columns, COLUMNS, dweight, why, why_bytes);
    free(dweight), free(z);
    return right;
}

/* The mean of all losses, from the operation's lse and the targets' logits in double. */
static bool mean_right(const shape *s, const tensors *t, const check_memory *m, const float *lse, double most, char *why,
                       size_t why_bytes)
{
    const dots_args args = {t->x, t->weight, NULL, t->target, m->dots, 1, s->tokens};
    BENCH_CUDA(lk_launch(dots_kernel, lk_ceil_div(args.count, 8), 256, 0, NULL, args));
    double *z = (double *)fetch(m->dots, (size_t)s->tokens * sizeof(double)), mean = 0;
    for (int64_t token = 0; token < s->tokens; token++) mean += (lse[token] - z[token]) / (double)s->tokens;
    float loss;
    BENCH_CUDA(cudaMemcpy(&loss, t->loss, sizeof loss, cudaMemcpyDeviceToHost));
    free(z);
    return within("loss", 0, loss, mean, 1e-5 * fabs(mean) + 4e-6 * most, why, why_bytes);
}

static bool check(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes)
{
    const shape *s = (const shape *)c->context;
    const tensors t = tensors_of(s, set);
    const size_t dots = (size_t)(SAMPLE * s->vocab > COLUMNS * s->tokens ? SAMPLE * s->vocab : COLUMNS * s->tokens);
    check_memory m;
    BENCH_CUDA(cudaMalloc((void **)&m.dots, dots * sizeof(double)));
    BENCH_CUDA(cudaMalloc((void **)&m.sums, SAMPLE * HIDDEN * sizeof(double)));
    BENCH_CUDA(cudaMalloc((void **)&m.rows, SAMPLE * sizeof(int64_t)));
    int64_t *target = (int64_t *)fetch(t.target, (size_t)s->tokens * sizeof *target);
    float *lse = (float *)fetch(t.lse, (size_t)s->tokens * sizeof *lse);
    double most = 0;
    const bool right = tokens_right(s, &t, &m, target, lse, &most, why, why_bytes) &&
                       mean_right(s, &t, &m, lse, most, why, why_bytes) &&
                       (!gives_gradient(s) || columns_right(s, &t, &m, target, lse, why, why_bytes));
    free(target), free(lse);
    BENCH_CUDA(cudaFree(m.dots)), BENCH_CUDA(cudaFree(m.sums)), BENCH_CUDA(cudaFree(m.rows));
    return right;
}

/* ---- The bench ----------------------------------------------------------------------------------------------------------- */

/* What the workspace buys, in the words of the query, which needs no device. */
static const char *plan_of(const bench_case *c)
{
    static char remarks[CASES][384];
    char *const remark = remarks[(const shape *)c->context - shapes];
    char *const anywhere = (char *)256; /* the query looks at what is NULL, and at no memory */
    const bench_buffers set = {anywhere, anywhere, anywhere, anywhere, anywhere};
    lk_linear_cross_entropy_plan plan = {};
    const size_t budget = workspace(c, 0);
    const lk_linear_cross_entropy_args args = args_of(c, &set, 0);
    const lk_linear_cross_entropy_ids_args ids = ids_args_of(c, &set);
    if (ids.ids_per_row) lk_linear_cross_entropy_ids_forward_backward_plan_bf16(&ids, budget, &plan);
    else if (gives_gradient((const shape *)c->context)) lk_linear_cross_entropy_forward_backward_plan_bf16(&args, budget, &plan);
    else lk_linear_cross_entropy_forward_plan_bf16(&args, budget, &plan);
    snprintf(remark, sizeof remarks[0], "%zu MiB: %s", budget >> 20, plan.text);
    return remark;
}

static void describe(bench_case *c, const shape *s)
{
    const bool gradient = gives_gradient(s);
    c->name = s->name, c->direction = s->direction, c->dtype = "bf16", c->context = s;
    c->read_bytes = X_BYTES(s) + WEIGHT_BYTES(s), c->write_bytes = gradient ? X_BYTES(s) + DWEIGHT_BYTES(s) : 0;
    const size_t ids = (size_t)s->tokens * (size_t)s->ids;
    c->in_bytes = (size_t)s->tokens * sizeof(int64_t) + ids * (sizeof(int64_t) + sizeof(float));
    c->out_bytes = ((size_t)s->tokens * (has_statistics(s) ? 5 : 1) + 1 + ids) * sizeof(float);
    c->flops = FLOPS(s), c->known_ms = s->bare_ms * (double)s->tokens / 12288;
    c->naive_bytes = (size_t)s->tokens * (size_t)s->vocab * (gradient ? 6 : 4) + CUBLAS_BYTES;
    c->fill = fill, c->launch = launch_lk, c->bare = launch_bare, c->check = check, c->workspace = workspace;
    if (s->naive) c->naive = launch_naive;
}

int main(int argc, char **argv)
{
    static bench_case cases[CASES], hosts[HOSTS];
    for (int k = 0; k < CASES; k++) describe(&cases[k], &shapes[k]), cases[k].remark = plan_of(&cases[k]);
    for (int k = 0; k < HOSTS; k++) describe(&hosts[k], &host_shapes[k]);
    return bench_run("linear_cross_entropy", cases, CASES, hosts, HOSTS, argc, argv);
}
