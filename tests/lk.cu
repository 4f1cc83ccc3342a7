// SPDX-License-Identifier: MIT
/* lk.cu - what holds for every op on the host, in each direction and in f32 and bf16:
 *
 *   threads     four host threads with streams, buffers and shapes of their own call the same kernels, some of which then need
 *               much shared memory and some little: every status is 0 and every bit as if one thread were alone
 *   graphs      a captured call survives a smaller call of the same kernel, before it is instantiated and behind
 *   first       an op is a process's first call, and a capture of mode Global is going on: the program starts itself again
 *   errors      a CUDA error of the caller's stays what it is; a positive status leaves its own
 *   devices     cached state is of one device; skipped where there is only one
 *   scale       lk_scale.cuh
 *   LK_CHECK    compiled with -DLK_CHECK wrong memory is told in a sentence before anything is written; without, nothing is
 *               looked at
 *
 *   ./lk [--small] [--stop] [--case SUBSTRING]; see test.h. The simulator gets a second device of an older kind.
 */
#include "lk/cross_entropy.cuh"
#include "lk/cross_entropy_parallel.cuh"
#include "lk/linear_cross_entropy.cuh"
#include "lk/lk_scale.cuh"
#include "lk/logsumexp.cuh"
#include "lk/md_lrpe_cosine.cuh"
#include "lk/srms_norm.cuh"

#include "tests/test.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#define DEFINE(T)                                                                                                              \
    LK_DEFINE_LOGSUMEXP(T)                                                                                                     \
    LK_DEFINE_CROSS_ENTROPY(T)                                                                                                 \
    LK_DEFINE_LINEAR_CROSS_ENTROPY(T)                                                                                          \
    LK_DEFINE_MD_LRPE_COSINE(T)                                                                                                \
    LK_DEFINE_SRMS_NORM(T)                                                                                                     \
    LK_DEFINE_SCALE(T)
DEFINE(f32)
DEFINE(bf16)
LK_DEFINE_SCALE(f16)
LK_DEFINE_CROSS_ENTROPY_PARALLEL(f32)

/* What a call needs besides its arguments: a pair of functions each, its workspace's query and itself. */
#define WITH_WORKSPACE(call, query, args)                                                                                      \
    if (w->naming) return LK_OK;                                                                                               \
    if (bytes) return w->type == TEST_F32 ? call##_##query##_f32(&args, bytes) : call##_##query##_bf16(&args, bytes);          \
    return w->type == TEST_F32 ? call##_f32(&args, w->stream) : call##_bf16(&args, w->stream)
#define WITHOUT_WORKSPACE(call, args)                                                                                          \
    if (w->naming) return LK_OK;                                                                                               \
    if (bytes) return *bytes = 0, LK_OK;                                                                                       \
    return w->type == TEST_F32 ? call##_f32(&args, w->stream) : call##_bf16(&args, w->stream)

/* ---- An op's call with all that belongs to it ---------------------------------------------------------------------------- */

enum { IN_T, IN_F32, IN_TARGETS, IN_FACTOR, OUT, IN_OUT }; /* what a tensor holds before the call */

typedef struct {
    const char *name;            /* the field's */
    char *device;                /* its own memory */
    void *given;                 /* what the call gets, most often the same */
    unsigned char *host, *first; /* what it holds before; what it held after the first call, of outputs */
    size_t bytes;
    int kind;
} tensor;

typedef struct work {
    const struct op *op;
    int type, size; /* size 0: much shared memory, 1: half of that, 2, 3: little */
    int path;       /* linear_cross_entropy's */
    cudaStream_t stream;
    lk_linear_cross_entropy_context context;
    bool has_context;
    tensor tensors[8];
    int count, next; /* tensors that there are, that the arguments have named so far */
    void *workspace;
    size_t workspace_bytes;
    bool naming;        /* makes the tensors and calls nothing of lk */
    bool empty, no_eps; /* 0 rows; eps 0 */
    long failed;        /* calls with a status that is not 0; the first of their sentences */
    char sentence[512];
} work;

typedef struct op {
    const char *name;
    lk_status (*run)(work *w, size_t *bytes); /* bytes: asks for the workspace and does no more */
} op;

static int element_of(const work *w, int kind)
{
    return kind == IN_TARGETS ? 8 : kind == IN_F32 || kind == IN_FACTOR ? 4 : test_type_bytes[w->type];
}

/* The next tensor of the arguments; made and filled when it is named for the first time. `element`: bytes, 0: the kind's. */
static void *tensor_of(work *w, const char *name, int kind, int64_t elements, int64_t below = 1, int element = 0)
{
    tensor *t = &w->tensors[w->next++];
    if (w->next <= w->count) return t->given;
    w->count = w->next;
    if (!element) element = element_of(w, kind);
    *t = {name, NULL, NULL, NULL, NULL, (size_t)(elements * element), kind};
    t->host = (unsigned char *)malloc(t->bytes);
    uint64_t state = test_hash((uint64_t)w->count * 1000 + (uint64_t)w->size);
    memset(t->host, 0xEE, t->bytes);
    for (int64_t i = 0; i < elements && kind != OUT; i++) {
        if (kind == IN_TARGETS) ((int64_t *)t->host)[i] = test_below(&state, below);
        else if (kind == IN_FACTOR) ((float *)t->host)[i] = 0.5f;
        else test_put(kind == IN_F32 ? TEST_F32 : w->type, t->host, i, (float)test_uniform(&state) + (kind == IN_F32 ? 9.0f : 0));
    }
    TEST_CUDA(cudaMalloc((void **)&t->device, t->bytes));
    TEST_CUDA(cudaMemcpyAsync(t->device, t->host, t->bytes, cudaMemcpyHostToDevice, w->stream));
    TEST_CUDA(cudaStreamSynchronize(w->stream));
    return t->given = t->device;
}

/* TSan's steps cost the more the more threads, of host and device, there are. It looks for what host threads share: there
 * shapes are small, and cases with one thread are for f32 alone. */
#if defined(__SANITIZE_THREAD__)
enum { TSAN = 1, THREADS = 3 };
#else
enum { TSAN = 0, THREADS = 4 };
#endif

/* Rows of the sizes; those of 16 bits have as many bytes. */
static int64_t cols_of(const work *w)
{
    static const int64_t cols[4] = {TSAN ? 517 : 16391, TSAN ? 261 : 8199, TSAN ? 133 : 1029, 77};
    return cols[w->size] * 4 / test_type_bytes[w->type];
}
static int64_t rows_of(const work *w)
{
    return w->empty ? 0 : test.small ? 2 : 4;
}

static lk_status logsumexp_forward(work *w, size_t *bytes)
{
    const int64_t rows = test.small ? 2 : 4, cols = cols_of(w);
    lk_logsumexp_args a = {};
    a.x = tensor_of(w, "x", IN_T, rows * cols);
    a.lse = (float *)tensor_of(w, "lse", OUT, rows, 0, 4);
    a.outer = rows_of(w), a.cols = cols, a.path = w->size < 2 ? LK_LOGSUMEXP_BLOCK : LK_LOGSUMEXP_AUTO;
    WITHOUT_WORKSPACE(lk_logsumexp_forward, a);
}

static lk_status logsumexp_backward(work *w, size_t *bytes)
{
    const int64_t rows = test.small ? 2 : 4, cols = cols_of(w);
    lk_logsumexp_args a = {};
    a.x = tensor_of(w, "x", IN_T, rows * cols);
    a.lse = (float *)tensor_of(w, "lse", IN_F32, rows);
    a.dlse = (const float *)tensor_of(w, "dlse", IN_F32, rows);
    a.dx = tensor_of(w, "dx", OUT, rows * cols);
    a.outer = rows_of(w), a.cols = cols;
    WITHOUT_WORKSPACE(lk_logsumexp_backward, a);
}

static lk_status cross_entropy_forward(work *w, size_t *bytes)
{
    const int64_t rows = test.small ? 2 : 4, cols = cols_of(w);
    lk_cross_entropy_args a = {};
    a.logits = tensor_of(w, "logits", IN_T, rows * cols);
    a.target = tensor_of(w, "target", IN_TARGETS, rows, cols);
    a.loss = (float *)tensor_of(w, "loss", OUT, 1, 0, 4);
    a.lse = (float *)tensor_of(w, "lse", OUT, rows, 0, 4);
    a.rows = rows_of(w), a.vocab = cols, a.reduction = LK_REDUCTION_MEAN;
    a.path = w->size < 2 ? LK_CROSS_ENTROPY_BLOCK : LK_CROSS_ENTROPY_AUTO;
    a.workspace = w->workspace, a.workspace_bytes = w->workspace_bytes;
    WITH_WORKSPACE(lk_cross_entropy_forward, workspace_bytes, a);
}

static lk_status cross_entropy_backward(work *w, size_t *bytes)
{
    const int64_t rows = test.small ? 2 : 4, cols = cols_of(w);
    lk_cross_entropy_args a = {};
    a.logits = tensor_of(w, "logits", IN_T, rows * cols);
    a.target = tensor_of(w, "target", IN_TARGETS, rows, cols);
    a.lse = (float *)tensor_of(w, "lse", IN_F32, rows);
    a.upstream = (const float *)tensor_of(w, "upstream", IN_F32, 1);
    a.dlogits = tensor_of(w, "dlogits", OUT, rows * cols);
    a.rows = rows_of(w), a.vocab = cols;
    a.path = w->size < 2 ? LK_CROSS_ENTROPY_BLOCK : LK_CROSS_ENTROPY_AUTO;
    WITHOUT_WORKSPACE(lk_cross_entropy_backward, a);
}

static lk_status cross_entropy_forward_backward(work *w, size_t *bytes)
{
    const int64_t rows = test.small ? 2 : 4, cols = cols_of(w);
    lk_cross_entropy_args a = {};
    a.logits = tensor_of(w, "logits", IN_T, rows * cols);
    a.target = tensor_of(w, "target", IN_TARGETS, rows, cols);
    a.loss = (float *)tensor_of(w, "loss", OUT, 1, 0, 4);
    a.lse = (float *)tensor_of(w, "lse", OUT, rows, 0, 4);
    a.dlogits = tensor_of(w, "dlogits", OUT, rows * cols);
    a.rows = rows_of(w), a.vocab = cols, a.reduction = LK_REDUCTION_MEAN;
    a.path = w->size < 2 ? LK_CROSS_ENTROPY_BLOCK : LK_CROSS_ENTROPY_AUTO;
    a.workspace = w->workspace, a.workspace_bytes = w->workspace_bytes;
    WITH_WORKSPACE(lk_cross_entropy_forward_backward, workspace_bytes, a);
}

typedef struct {
    int64_t tokens, hidden, vocab;
} head;
static head head_of(const work *w)
{
    static const head heads[4] = {{TSAN ? 9 : 70, 64, 264}, {TSAN ? 5 : 40, 64, 264}, {20, 72, 40}, {6, 24, 16}}; /* of 8: FUSED */
    return heads[w->size];
}

static void linear_inputs(work *w, lk_linear_cross_entropy_args *a)
{
    const head h = head_of(w);
    a->context = &w->context;
    a->x = tensor_of(w, "x", IN_T, h.tokens * h.hidden);
    a->weight = tensor_of(w, "weight", IN_T, h.vocab * h.hidden);
    a->target = tensor_of(w, "target", IN_TARGETS, h.tokens, h.vocab);
    a->tokens = w->empty ? 0 : h.tokens, a->hidden = h.hidden, a->vocab = h.vocab;
    a->workspace = w->workspace, a->workspace_bytes = w->workspace_bytes, a->path = w->path;
}
static void linear_gradients(work *w, lk_linear_cross_entropy_args *a)
{
    const head h = head_of(w);
    a->dx = tensor_of(w, "dx", OUT, h.tokens * h.hidden);
    a->dweight = tensor_of(w, "dweight", OUT, h.vocab * h.hidden);
}

static lk_status linear_cross_entropy_forward(work *w, size_t *bytes)
{
    lk_linear_cross_entropy_args a = {};
    linear_inputs(w, &a);
    a.loss = (float *)tensor_of(w, "loss", OUT, head_of(w).tokens, 0, 4);
    a.lse = (float *)tensor_of(w, "lse", OUT, head_of(w).tokens, 0, 4);
    WITH_WORKSPACE(lk_linear_cross_entropy_forward, workspace_bytes, a);
}

static lk_status linear_cross_entropy_backward(work *w, size_t *bytes)
{
    lk_linear_cross_entropy_args a = {};
    linear_inputs(w, &a);
    a.lse = (float *)tensor_of(w, "lse", IN_F32, head_of(w).tokens);
    linear_gradients(w, &a);
    WITH_WORKSPACE(lk_linear_cross_entropy_backward, workspace_bytes, a);
}

static lk_status linear_cross_entropy_forward_backward(work *w, size_t *bytes)
{
    lk_linear_cross_entropy_args a = {};
    linear_inputs(w, &a);
    a.loss = (float *)tensor_of(w, "loss", OUT, 1, 0, 4), a.reduction = LK_REDUCTION_MEAN;
    linear_gradients(w, &a);
    WITH_WORKSPACE(lk_linear_cross_entropy_forward_backward, workspace_bytes, a);
}

enum { LRPE_BATCH = 2, LRPE_HEADS = 3, LRPE_SIDE = TSAN ? 2 : 8, LRPE_TOKENS = 3 + 5 * LRPE_SIDE };
static int64_t lrpe_dim_of(const work *w)
{
    static const int64_t dims[4] = {128, 64, 33, 8};
    return dims[w->size];
}
static void lrpe_shape(const work *w, lk_md_lrpe_cosine_args *a)
{
    a->batch = w->empty ? 0 : LRPE_BATCH, a->heads = LRPE_HEADS, a->dim = lrpe_dim_of(w);
    a->prefix = 3, a->axes = 2, a->shape[0] = 5, a->shape[1] = LRPE_SIDE;
}

static lk_status md_lrpe_cosine_forward(work *w, size_t *bytes)
{
    const int64_t dim = lrpe_dim_of(w), rows = LRPE_BATCH * LRPE_HEADS * LRPE_TOKENS;
    lk_md_lrpe_cosine_args a = {};
    lrpe_shape(w, &a);
    a.x = tensor_of(w, "x", IN_T, rows * dim);
    a.theta = tensor_of(w, "theta", IN_T, LRPE_HEADS * ((dim + 1) / 2));
    a.y = tensor_of(w, "y", OUT, rows * 2 * dim);
    WITHOUT_WORKSPACE(lk_md_lrpe_cosine_forward, a);
}

static lk_status md_lrpe_cosine_backward(work *w, size_t *bytes)
{
    const int64_t dim = lrpe_dim_of(w), rows = LRPE_BATCH * LRPE_HEADS * LRPE_TOKENS;
    lk_md_lrpe_cosine_args a = {};
    lrpe_shape(w, &a);
    a.dy = tensor_of(w, "dy", IN_T, rows * 2 * dim);
    a.x = tensor_of(w, "x", IN_T, rows * dim);
    a.theta = tensor_of(w, "theta", IN_T, LRPE_HEADS * ((dim + 1) / 2));
    a.dx = tensor_of(w, "dx", OUT, rows * dim);
    a.dtheta = (float *)tensor_of(w, "dtheta", OUT, LRPE_HEADS * ((dim + 1) / 2), 0, 4);
    a.workspace = w->workspace, a.workspace_bytes = w->workspace_bytes;
    WITH_WORKSPACE(lk_md_lrpe_cosine_backward, workspace_bytes, a);
}

static lk_status srms_norm_forward(work *w, size_t *bytes)
{
    const int64_t rows = test.small ? 2 : 4, cols = cols_of(w);
    lk_srms_norm_args a = {};
    a.x = tensor_of(w, "x", IN_T, rows * cols);
    a.weight = tensor_of(w, "weight", IN_T, cols);
    a.y = tensor_of(w, "y", OUT, rows * cols);
    a.rstd = (float *)tensor_of(w, "rstd", OUT, rows, 0, 4);
    a.rows = rows_of(w), a.cols = cols, a.eps = w->no_eps ? 0.0f : 1e-6f;
    a.path = w->size < 2 ? LK_SRMS_NORM_BLOCK : LK_SRMS_NORM_AUTO;
    WITHOUT_WORKSPACE(lk_srms_norm_forward, a);
}

static lk_status srms_norm_backward(work *w, size_t *bytes)
{
    const int64_t rows = test.small ? 2 : 4, cols = cols_of(w);
    lk_srms_norm_args a = {};
    a.x = tensor_of(w, "x", IN_T, rows * cols);
    a.weight = tensor_of(w, "weight", IN_T, cols);
    a.dy = tensor_of(w, "dy", IN_T, rows * cols);
    a.dx = tensor_of(w, "dx", OUT, rows * cols);
    a.dweight = tensor_of(w, "dweight", OUT, cols);
    a.rows = rows_of(w), a.cols = cols, a.eps = w->no_eps ? 0.0f : 1e-6f;
    a.path = w->size < 2 ? LK_SRMS_NORM_BLOCK : LK_SRMS_NORM_AUTO;
    a.workspace = w->workspace, a.workspace_bytes = w->workspace_bytes;
    WITH_WORKSPACE(lk_srms_norm_backward, workspace_bytes, a);
}

static lk_status scale(work *w, size_t *bytes)
{
    const int64_t count = (test.small ? 2 : 4) * cols_of(w);
    void *const x = tensor_of(w, "x", IN_OUT, count);
    const float *const factor = (const float *)tensor_of(w, "factor", IN_FACTOR, 1);
    if (w->naming) return LK_OK;
    if (bytes) return *bytes = 0, LK_OK;
    return w->type == TEST_F32 ? lk_scale_f32(x, w->empty ? 0 : count, factor, w->stream)
                               : lk_scale_bf16(x, w->empty ? 0 : count, factor, w->stream);
}

static const op ops[] = {
    {"logsumexp_forward", logsumexp_forward},
    {"logsumexp_backward", logsumexp_backward},
    {"cross_entropy_forward", cross_entropy_forward},
    {"cross_entropy_backward", cross_entropy_backward},
    {"cross_entropy_forward_backward", cross_entropy_forward_backward},
    {"linear_cross_entropy_forward", linear_cross_entropy_forward},
    {"linear_cross_entropy_backward", linear_cross_entropy_backward},
    {"linear_cross_entropy_forward_backward", linear_cross_entropy_forward_backward},
    {"md_lrpe_cosine_forward", md_lrpe_cosine_forward},
    {"md_lrpe_cosine_backward", md_lrpe_cosine_backward},
    {"srms_norm_forward", srms_norm_forward},
    {"srms_norm_backward", srms_norm_backward},
    {"scale", scale},
};
static const int types[2] = {TEST_F32, TEST_BF16};

static lk_status call(work *w)
{
    w->next = 0;
    return w->op->run(w, NULL);
}

/* A call's tensors, stream, context and workspace on the current device. known: the process may not call lk yet, so path and
 * workspace_bytes are given. */
static work *make(const op *o, int type, int size, const work *known = NULL)
{
    work *w = (work *)calloc(1, sizeof *w);
    w->op = o, w->type = type, w->size = size;
    TEST_CUDA(cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking));
    if (known) {
        w->path = known->path, w->workspace_bytes = known->workspace_bytes;
        w->naming = true, o->run(w, NULL), w->naming = false;
    } else {
        const bool linear = strstr(o->name, "linear") != NULL;
        w->path = linear ? LK_LINEAR_CROSS_ENTROPY_FUSED : 0; /* where it can run: the most shared memory of all kernels */
        lk_status status = o->run(w, &w->workspace_bytes);
        w->next = 0;
        if (linear && status == LK_ERR_PATH) w->path = 0, status = o->run(w, &w->workspace_bytes);
        if (!test_that(status == LK_OK)) test_detail("workspace's query: %s", lk_last_error());
    }
    w->next = 0;
    if (w->workspace_bytes) TEST_CUDA(cudaMalloc(&w->workspace, w->workspace_bytes));
    w->has_context = strstr(o->name, "linear") != NULL;
    if (w->has_context && !test_that(lk_linear_cross_entropy_init(&w->context) == LK_OK)) test_detail("%s", lk_last_error());
    return w;
}

static void unmake(work *w)
{
    for (int i = 0; i < w->count; i++) {
        TEST_CUDA(cudaFree(w->tensors[i].device));
        free(w->tensors[i].host), free(w->tensors[i].first);
    }
    if (w->workspace) TEST_CUDA(cudaFree(w->workspace));
    if (w->has_context) lk_linear_cross_entropy_destroy(&w->context);
    TEST_CUDA(cudaStreamDestroy(w->stream));
    free(w);
}

static bool is_output(const tensor *t)
{
    return t->kind == OUT || t->kind == IN_OUT;
}

/* What the outputs hold before a call. */
static void reset(work *w)
{
    for (int i = 0; i < w->count; i++)
        if (is_output(&w->tensors[i]))
            TEST_CUDA(cudaMemcpyAsync(w->tensors[i].device, w->tensors[i].host, w->tensors[i].bytes, cudaMemcpyHostToDevice, w->stream));
}

/* Whether the outputs hold what they did after the first call; before_call: what they did before. */
static bool same(work *w, bool before_call = false)
{
    bool equal = true;
    for (int i = 0; i < w->count; i++) {
        tensor *t = &w->tensors[i];
        if (!is_output(t)) continue;
        std::vector<unsigned char> now(t->bytes);
        TEST_CUDA(cudaMemcpyAsync(now.data(), t->device, t->bytes, cudaMemcpyDeviceToHost, w->stream));
        TEST_CUDA(cudaStreamSynchronize(w->stream));
        equal &= !memcmp(now.data(), before_call ? t->host : t->first, t->bytes);
    }
    return equal;
}

/* The first call, whose outputs the others' have to equal. Everything of it has been written to. */
static bool first_call(work *w)
{
    const lk_status status = call(w);
    if (!test_that(status == LK_OK)) {
        test_detail("%s: status %d, %s", w->op->name, status, lk_last_error());
        return false;
    }
    for (int i = 0; i < w->count; i++) {
        tensor *t = &w->tensors[i];
        if (!is_output(t)) continue;
        if (!t->first) t->first = (unsigned char *)malloc(t->bytes);
        TEST_CUDA(cudaMemcpyAsync(t->first, t->device, t->bytes, cudaMemcpyDeviceToHost, w->stream));
        TEST_CUDA(cudaStreamSynchronize(w->stream));
        if (!test_that(memcmp(t->first, t->host, t->bytes) != 0)) test_detail("%s: %s was not written", w->op->name, t->name);
    }
    return true;
}

/* One call more, straight or through a graph, has the same bits. */
static void check_call(work *w, cudaGraphExec_t graph, const char *what)
{
    reset(w);
    if (graph) TEST_CUDA(cudaGraphLaunch(graph, w->stream));
    const lk_status status = graph ? LK_OK : call(w);
    if (!test_that(status == LK_OK)) test_detail("%s: status %d, %s", what, status, lk_last_error());
    if (!test_that(same(w))) test_detail("%s: other results", what);
}

static bool left_out(int type) { return TSAN && type != TEST_F32; }

/* For every op and type, a case with works of `count` sizes. */
template <class Body> static void for_all(const char *name, int count, Body body)
{
    for (const op &o : ops)
        for (const int type : types) {
            if (count < THREADS && left_out(type)) continue;
            if (!test_begin("%s: %s %s", name, o.name, test_type_name[type])) continue;
            work *works[4] = {};
            bool good = true;
            for (int i = 0; i < count; i++) works[i] = make(&o, type, i);
            for (int i = 0; i < count; i++) good = good && first_call(works[i]);
            if (good) body(works);
            for (int i = 0; i < count; i++) unmake(works[i]);
            test_finish();
        }
}

/* ---- Threads --------------------------------------------------------------------------------------------------------------- */

/* Calls in bursts; at the end of each one the results are looked at. What changes what it reads is called once a burst. */
static void call_often(work *w, int bursts, int burst, std::atomic<int> *ready, std::atomic<long> *different)
{
    if (w->op->run == scale) burst = 1;
    for (ready->fetch_sub(1); ready->load() > 0;) std::this_thread::yield();
    for (int i = 0; i < bursts; i++) {
        reset(w);
        for (int j = 0; j < burst; j++)
            if (call(w) != LK_OK && !w->failed++) snprintf(w->sentence, sizeof w->sentence, "%s", lk_last_error());
        if (!same(w)) different->fetch_add(1);
    }
}

static void case_threads(void)
{
#if defined(LK_SIMT)
    const int bursts = test.small ? 2 : 3, burst = test.small ? 1 : 2;
#else
    const int bursts = test.small ? 10 : 50, burst = 50;
#endif
    for_all("threads", THREADS, [&](work **works) {
        std::atomic<int> ready(THREADS);
        std::atomic<long> different(0);
        std::vector<std::thread> threads;
        for (int i = 0; i < THREADS; i++) threads.emplace_back(call_often, works[i], bursts, burst, &ready, &different);
        for (std::thread &t : threads) t.join();
        for (int i = 0; i < THREADS; i++)
            if (!test_that(works[i]->failed == 0)) test_detail("%ld calls failed; %s", works[i]->failed, works[i]->sentence);
        if (!test_that(different == 0)) test_detail("%ld times other results than one thread alone", different.load());
    });
}

static void case_sentences(void)
{
    if (!test_begin("each thread has its own sentence")) return;
    static const char *const names[4] = {"lk_logsumexp_forward_f32", "lk_cross_entropy_backward_bf16", "lk_srms_norm_forward_f32",
                                               "lk_scale_f16"};
    std::atomic<int> left(THREADS);
    int bad[THREADS] = {};
    std::vector<std::thread> threads;
    for (int i = 0; i < THREADS; i++)
        threads.emplace_back([&, i] {
            bad[i] += lk_last_error()[0] != 0;
            const lk_status status = i == 0   ? lk_logsumexp_forward_f32(NULL, NULL)
                                     : i == 1 ? lk_cross_entropy_backward_bf16(NULL, NULL)
                                     : i == 2 ? lk_srms_norm_forward_f32(NULL, NULL)
                                              : lk_scale_f16(NULL, 1, NULL, NULL);
            bad[i] += status != LK_ERR_NULL;
            for (left--; left > 0;) std::this_thread::yield();
            bad[i] += strncmp(lk_last_error(), names[i], strlen(names[i])) != 0;
        });
    for (std::thread &t : threads) t.join();
    for (int i = 0; i < THREADS; i++)
        if (!test_that(bad[i] == 0)) test_detail("thread %d", i);
    test_finish();
}

/* ---- Graphs ---------------------------------------------------------------------------------------------------------------- */

static cudaGraph_t capture(work *w, cudaStreamCaptureMode mode)
{
    cudaGraph_t graph = NULL;
    TEST_CUDA(cudaStreamBeginCapture(w->stream, mode));
    const lk_status status = call(w);
    const cudaError_t error = cudaStreamEndCapture(w->stream, &graph);
    if (!test_that(status == LK_OK && error == cudaSuccess))
        test_detail("capture: status %d, %s, the end of the capture: %s", status, lk_last_error(), cudaGetErrorName(error));
    return error == cudaSuccess && status == LK_OK ? graph : NULL;
}

static void case_graphs(void)
{
    for_all("graphs", 2, [&](work **works) {
        for (const bool before : {true, false}) {
            const char *const what = before ? "captured, smaller call, instantiated" : "instantiated, smaller call, launched";
            const cudaGraph_t graph = capture(works[0], cudaStreamCaptureModeThreadLocal);
            cudaGraphExec_t executable;
            if (!graph) return;
            if (before) check_call(works[1], NULL, "smaller call");
            const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
            if (!test_that(error == cudaSuccess)) {
                test_detail("%s: %s", what, cudaGetErrorString(error));
                return;
            }
            if (!before) check_call(works[1], NULL, "smaller call");
            check_call(works[0], executable, what);
            TEST_CUDA(cudaGraphExecDestroy(executable));
            TEST_CUDA(cudaGraphDestroy(graph));
        }
    });
}

/* ---- A process's first call ------------------------------------------------------------------------------------------------- */


/* The process that case_first starts: --first OP TYPE PATH WORKSPACE. */
static int first_main(char **argv)
{
    work known = {};
    known.path = atoi(argv[4]), known.workspace_bytes = strtoull(argv[5], NULL, 0);
    test.small = true;
    for (const op &o : ops) {
        if (strcmp(o.name, argv[2]) || !test_begin("first: %s", argv[2])) continue;
        work *w = make(&o, atoi(argv[3]), 0, &known);
        cudaGraphExec_t executable;
        const cudaGraph_t graph = capture(w, cudaStreamCaptureModeGlobal);
        if (graph) {
            TEST_CUDA(cudaGraphInstantiate(&executable, graph, 0));
            if (first_call(w)) check_call(w, executable, "graph");
            TEST_CUDA(cudaGraphExecDestroy(executable));
            TEST_CUDA(cudaGraphDestroy(graph));
        }
        unmake(w);
        test_finish();
    }
    return test_end();
}

static void case_first(void)
{
    for (const op &o : ops)
        for (const int type : types) {
            if (left_out(type)) continue;
            if (!test_begin("first call in a global capture: %s %s", o.name, test_type_name[type])) continue;
            const bool small = test.small;
            test.small = true;
            work *w = make(&o, type, 0);
            test.small = small;
            char number[3][32];
            snprintf(number[0], sizeof number[0], "%d", type), snprintf(number[1], sizeof number[1], "%d", w->path);
            snprintf(number[2], sizeof number[2], "%zu", w->workspace_bytes);
            unmake(w);
            fflush(stdout);
            int ends[2], status = -1;
            TEST_CUDA(pipe(ends) ? cudaErrorUnknown : cudaSuccess);
            const pid_t child = fork();
            if (child == 0) {
                dup2(ends[1], 1), close(ends[0]), close(ends[1]);
                execl("/proc/self/exe", "lk", "--first", o.name, number[0], number[1], number[2], (char *)NULL);
                _exit(127);
            }
            close(ends[1]);
            char text[1024];
            size_t got = 0;
            for (ssize_t n; (n = read(ends[0], text + got, sizeof text - 1 - got)) > 0;) got += (size_t)n;
            text[got] = 0;
            close(ends[0]);
            waitpid(child, &status, 0);
            if (!test_that(status == 0 && strstr(text, "1 passed, 0 failed"))) test_detail("status %d: %s", status, text);
            test_finish();
        }
}

/* ---- Errors of CUDA's -------------------------------------------------------------------------------------------------------- */

static void case_pending(void)
{
    for_all("an error pending from before", 1, [&](work **works) {
        for (const bool memory : {true, false}) {
            void *much = NULL;
            (void)cudaGetLastError();
            const cudaError_t error = memory ? cudaMalloc(&much, (size_t)1 << 60) : cudaSetDevice(99);
            if (!test_that(error != cudaSuccess && cudaPeekAtLastError() == error)) test_detail("the error is not pending");
            check_call(works[0], NULL, cudaGetErrorName(error));
            if (!test_that(cudaPeekAtLastError() == error))
                test_detail("%s was pending, now %s is", cudaGetErrorName(error), cudaGetErrorName(cudaPeekAtLastError()));
            (void)cudaGetLastError();
        }
    });
}

/* Into a capture that has become invalid nothing can be launched. */
static void case_positive(void)
{
    for_all("a positive status", 1, [&](work **works) {
        void *memory = NULL;
        cudaGraph_t graph = NULL;
        TEST_CUDA(cudaStreamBeginCapture(works[0]->stream, cudaStreamCaptureModeGlobal));
        const bool spoilt = cudaMalloc(&memory, 256) != cudaSuccess;
        if (!test_that(spoilt)) test_detail("the capture is still valid");
        (void)cudaGetLastError();
        const lk_status status = call(works[0]);
        const cudaError_t last = cudaGetLastError();
        if (!test_that(status > 0 && last == (cudaError_t)status && lk_last_error()[0]))
            test_detail("status %d, CUDA's last error %d, \"%s\"", status, last, lk_last_error());
        (void)cudaStreamEndCapture(works[0]->stream, &graph), (void)cudaGetLastError();
        check_call(works[0], NULL, "the call after it");
    });
}

/* ---- lk_launch_blocks ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    float held[10 * 1024];
} shared_held;
typedef struct {
    float *out;
} shared_args;

/* 12 KiB of static shared memory beside 40 of dynamic. Thread i writes to both and reads what its neighbour has written. */
LK_KERNEL void __launch_bounds__(128) shared_kernel(shared_args a)
{
    LK_SHARED(float, fixed, [3 * 1024]);
    LK_DYN_SMEM(shared_held, dynamic);
    for (int i = threadIdx.x; i < 3 * 1024; i += 128) fixed[i] = (float)i;
    for (int i = threadIdx.x; i < 10 * 1024; i += 128) dynamic.held[i] = (float)-i;
    __syncthreads(); /* all is written before it is read */
    float sum = 0.0f;
    for (int i = threadIdx.x; i < 3 * 1024; i += 128) sum += fixed[i ^ 1];
    for (int i = threadIdx.x; i < 10 * 1024; i += 128) sum += dynamic.held[i ^ 1];
    a.out[threadIdx.x] = sum;
}

static void case_launch(void)
{
    test_buffer out = {};
    if (test_begin("12 KiB of static and 40 of dynamic shared memory")) {
        test_buffer_size(&out, 128 * 4, 0, 0xEE), test_buffer_upload(&out);
        const shared_args args = {(float *)test_buffer_device(&out)};
        const lk_status status = lk_launch_blocks("test", false, shared_kernel, 1, 1, 128, sizeof(shared_held), test.stream, args);
        if (!test_that(status == LK_OK)) test_detail("status %d: %s", status, lk_last_error());
        test_buffer_download(&out);
        for (int t = 0; t < 128 && !status; t++) {
            double want = 0;
            for (int i = t; i < 3 * 1024; i += 128) want += i ^ 1;
            for (int i = t; i < 10 * 1024; i += 128) want -= i ^ 1;
            if (!test_that(((float *)test_buffer_back(&out))[t] == want)) test_detail("thread %d", t);
        }
        test_finish();
    }
    if (test_begin("more blocks than CUDA launches")) {
        test_buffer_size(&out, 128 * 4, 0, 0xEE), test_buffer_upload(&out);
        const shared_args args = {(float *)test_buffer_device(&out)};
        const size_t smem = sizeof(shared_held);
        for (const int64_t grid : {(int64_t)1 << 31, ((int64_t)1 << 32) + 1, (int64_t)1 << 40}) {
            const lk_status status = lk_launch_blocks("test", false, shared_kernel, grid, 1, 128, smem, test.stream, args);
            const cudaError_t last = cudaGetLastError();
            if (!test_that(status > 0 && last == (cudaError_t)status))
                test_detail("%lld: status %d, CUDA's last error %d", (long long)grid, status, last);
        }
        test_buffer_download(&out);
        test_buffer_untouched(&out, "out", "nothing was launched");
        test_finish();
    }
    test_buffer_free(&out);
}

/* ---- Devices ----------------------------------------------------------------------------------------------------------------- */

/* Runs a body in a thread of its own, which has no state of lk's yet. */
template <class Body> static void alone(Body body)
{
    std::thread thread(body);
    thread.join();
}

static void case_devices(void)
{
    int count = 0;
    TEST_CUDA(cudaGetDeviceCount(&count));
    if (count < 2) return test_skip("devices", "there is only one");
    for (const op &o : ops)
        for (const int type : types)
            for (const int size : {0, 1}) {
                if (TSAN && size > 0) continue;
                if (!test_begin("devices: %s %s, size %d", o.name, test_type_name[type], size)) continue;
                work *w[2] = {};
                bool good = true;
                for (int d = 0; d < 2; d++)
                    alone([&, d] { /* of a thread that knows no other device */
                        TEST_CUDA(cudaSetDevice(d));
                        w[d] = make(&o, type, size);
                        good = first_call(w[d]) && good;
                    });
                for (const int d : {0, 1, 0, 1}) {
                    if (!good) break;
                    TEST_CUDA(cudaSetDevice(d));
                    check_call(w[d], NULL, d ? "device 1 in turn with device 0" : "device 0 in turn with device 1");
                }
                if (good) { /* both at once */
                    std::atomic<int> ready(2);
                    std::atomic<long> different(0);
                    std::vector<std::thread> threads;
                    for (int d = 0; d < 2; d++)
                        threads.emplace_back([&, d] {
                            TEST_CUDA(cudaSetDevice(d));
                            call_often(w[d], 2, 2, &ready, &different);
                        });
                    for (std::thread &t : threads) t.join();
                    for (int d = 0; d < 2; d++)
                        if (!test_that(!w[d]->failed)) test_detail("device %d, a thread each: %s", d, w[d]->sentence);
                    if (!test_that(different == 0)) test_detail("a thread each: other results");
                    if (w[0]->has_context) { /* a context of the other device */
                        TEST_CUDA(cudaSetDevice(1));
                        if (!test_that(call(w[0]) == LK_ERR_VALUE)) test_detail("device 0's context on device 1: %s", lk_last_error());
                    }
                }
                for (int d = 0; d < 2; d++) {
                    TEST_CUDA(cudaSetDevice(d));
                    unmake(w[d]);
                }
                TEST_CUDA(cudaSetDevice(0));
                test_finish();
            }
}

/* What a body prints on stderr. */
template <class Body> static std::vector<char> heard(Body body)
{
    fflush(stderr);
    FILE *const file = tmpfile();
    const int kept = dup(2);
    dup2(fileno(file), 2);
    body();
    fflush(stderr);
    dup2(kept, 2), close(kept);
    std::vector<char> text((size_t)lseek(fileno(file), 0, SEEK_END) + 1);
    rewind(file);
    text[fread(text.data(), 1, text.size() - 1, file)] = 0;
    fclose(file);
    return text;
}

/* ---- lk_scale ---------------------------------------------------------------------------------------------------------------- */

static lk_status scale_of(int type, void *x, int64_t count, const float *factor)
{
    return type == TEST_F32   ? lk_scale_f32(x, count, factor, test.stream)
           : type == TEST_F16 ? lk_scale_f16(x, count, factor, test.stream)
                              : lk_scale_bf16(x, count, factor, test.stream);
}

/* NaN for NaN, else the bits of the float product rounded to T; products of float may flush below 2^-126. */
static bool scaled(int type, uint32_t got, uint32_t before, float factor)
{
    const float x = test_decode(type, before), want = x * factor, is = test_decode(type, got);
    if (factor == 1.0f) return got == before;
    if (want != want) return is != is;
    const bool flushes = (fabsf(x) < 0x1p-126f || fabsf(want) < 0x1p-126f || fabsf(factor) < 0x1p-126f) && is == 0;
    return got == test_encode(type, want) || flushes;
}

static void case_scale(void)
{
    static const float factors[] = {1.0f, 0.0f, -0.0f, 0.5f, -3.7f, 1.0f + 0x1p-23f, 1e30f, 1e-30f, INFINITY, NAN};
    test_buffer x = {}, f = {};
    for (int type = 0; type < TEST_TYPES; type++) {
        const int bytes = test_type_bytes[type];
        if (test_begin("scale %s: lengths, alignments, factors", test_type_name[type])) {
            uint64_t state = 7;
            for (const int64_t count : {0, 1, 2, 3, 7, 8, 9, 31, 255, 256, 257, 2047, 4096 + 5, TSAN ? 8191 : 70001})
                for (int off = 0; off < 16 / bytes; off += count > 300 ? 3 : 1) {
                    const float factor = factors[test_below(&state, 10)];
                    test_buffer_size(&x, (size_t)(count * bytes), (size_t)(off * bytes), 0xEE);
                    test_buffer_size(&f, 4, 4, 0xEE);
                    *(float *)test_buffer_host(&f) = factor;
                    for (int64_t i = 0; i < count; i++) { /* any bits: subnormals, infinities, NaNs with payloads */
                        const uint64_t bits = test_random(&state);
                        if (bytes == 4) ((uint32_t *)test_buffer_host(&x))[i] = (uint32_t)bits;
                        else ((uint16_t *)test_buffer_host(&x))[i] = (uint16_t)bits;
                    }
                    test_buffer_upload(&x), test_buffer_upload(&f);
                    lk_status status = LK_OK;
                    const auto run = [&] {
                        status = scale_of(type, test_buffer_device(&x), count, (const float *)test_buffer_device(&f));
                    };
                    if (count) run();
                    else heard(run); /* with LK_CHECK a line on stderr, which case_heard looks at */
                    test_buffer_download(&x), test_buffer_download(&f);
                    if (!test_that(status == LK_OK)) test_detail("count %lld: %s", (long long)count, lk_last_error());
                    for (int64_t i = 0; i < count; i++) {
                        const uint32_t before = test_get_bits(type, test_buffer_host(&x), i);
                        const uint32_t got = test_get_bits(type, test_buffer_back(&x), i);
                        if (!test_that(scaled(type, got, before, factor)))
                            test_detail("count %lld, offset %d, [%lld]: %08x times %g is %08x", (long long)count, off, (long long)i,
                                        before, factor, got);
                        test_buffer_accept(&x, i, bytes);
                    }
                    test_buffer_untouched(&x, "x", "scale"), test_buffer_untouched(&f, "factor", "scale");
                }
            test_finish();
        }
        if (test_begin("scale %s: errors", test_type_name[type])) {
            test_buffer_size(&x, 64, 0, 0xEE), test_buffer_size(&f, 8, 0, 0x11);
            test_buffer_upload(&x), test_buffer_upload(&f);
            char *const at = (char *)test_buffer_device(&x);
            const float *const factor = (const float *)test_buffer_device(&f);
            const float *const odd = (const float *)((const char *)factor + 2);
            const struct {
                void *x;
                int64_t count;
                const float *factor;
                lk_status status;
                const char *sentence;
            } errors[] = {{NULL, 4, factor, LK_ERR_NULL, "x is NULL"},
                          {at, 4, NULL, LK_ERR_NULL, "factor is NULL"},
                          {at, -1, factor, LK_ERR_SHAPE, "count is -1; it must be 0 to 2^62"},
                          {at, ((int64_t)1 << 62) + 1, factor, LK_ERR_SHAPE, "count is"},
                          {at + 1, 4, factor, LK_ERR_ALIGNMENT, "x is not aligned"},
                          {at, 4, odd, LK_ERR_ALIGNMENT, "factor is not aligned"},
                          {NULL, 0, NULL, LK_OK, ""}};
            for (const auto &e : errors) {
                const lk_status status = scale_of(type, e.x, e.count, e.factor);
                if (!test_that(status == e.status && strstr(lk_last_error(), e.sentence)))
                    test_detail("status %d, \"%s\"; not %d, \"%s\"", status, lk_last_error(), e.status, e.sentence);
            }
            test_buffer_download(&x), test_buffer_download(&f);
            test_buffer_untouched(&x, "x", "errors");
            test_finish();
        }
        if (test_begin("scale %s: a graph, with another factor at each launch", test_type_name[type])) {
            test_buffer_size(&x, 1001 * (size_t)bytes, (size_t)bytes, 0xEE), test_buffer_size(&f, 4, 0, 0);
            for (int64_t i = 0; i < 1001; i++) test_put(type, test_buffer_host(&x), i, (float)(i % 7 - 3));
            test_buffer_upload(&x), test_buffer_upload(&f);
            cudaGraph_t graph;
            cudaGraphExec_t executable;
            TEST_CUDA(cudaStreamBeginCapture(test.stream, cudaStreamCaptureModeGlobal));
            const lk_status status = scale_of(type, test_buffer_device(&x), 1001, (const float *)test_buffer_device(&f));
            TEST_CUDA(cudaStreamEndCapture(test.stream, &graph));
            TEST_CUDA(cudaGraphInstantiate(&executable, graph, 0));
            if (!test_that(status == LK_OK)) test_detail("%s", lk_last_error());
            double product = 1;
            for (const float factor : {2.0f, 1.0f, -4.0f}) {
                *(float *)test_buffer_host(&f) = factor, product *= factor;
                test_buffer_download(&f), test_buffer_upload(&f);
                TEST_CUDA(cudaGraphLaunch(executable, test.stream));
                test_buffer_download(&x);
                for (int64_t i = 0; i < 1001; i++)
                    if (!test_that(test_get(type, test_buffer_back(&x), i) == (float)(i % 7 - 3) * product))
                        test_detail("factor %g: [%lld]", factor, (long long)i);
            }
            test_buffer_download(&f);
            TEST_CUDA(cudaGraphExecDestroy(executable));
            TEST_CUDA(cudaGraphDestroy(graph));
            test_finish();
        }
    }
    test_buffer_free(&x), test_buffer_free(&f);
}

/* lk_rescale: out of place and in place, every pair of alignments, divisors, and what the history expects. */
static lk_status rescale_of(int type, const lk_rescale_args *a)
{
    return type == TEST_F32   ? lk_rescale_f32(a, test.stream)
           : type == TEST_F16 ? lk_rescale_f16(a, test.stream)
                              : lk_rescale_bf16(a, test.stream);
}

static void case_rescale(void)
{
    static const float pairs[][2] = {{1, 1}, {0.25f, 0.25f}, {3, 1}, {-0.5f, 4}, {0.3f, 0.7f}, {0, 2}, {1e30f, 1}, {NAN, 1}};
    test_buffer x = {}, y = {}, f = {};
    for (int type = 0; type < TEST_TYPES; type++) {
        const int bytes = test_type_bytes[type];
        if (test_begin("rescale %s: lengths, alignments of x and of y, divisors", test_type_name[type])) {
            uint64_t state = 11;
            int pair = 0;
            for (const int64_t count : {1, 7, 8, 9, 31, 257, 4096 + 5})
                for (int x_off = 0; x_off < 16 / bytes; x_off += count > 300 ? 3 : 1)
                    for (int y_off = 0; y_off < 16 / bytes; y_off += count > 300 ? 3 : 1) {
                        const float *const p = pairs[pair++ % LK_COUNT(pairs)];
                        test_buffer_size(&x, (size_t)(count * bytes), (size_t)(x_off * bytes), 0xEE);
                        test_buffer_size(&y, (size_t)(count * bytes), (size_t)(y_off * bytes), 0xEE);
                        test_buffer_size(&f, 8, 8, 0xEE);
                        memcpy(test_buffer_host(&f), p, 8);
                        for (int64_t i = 0; i < count; i++) {
                            const uint64_t bits = test_random(&state);
                            if (bytes == 4) ((uint32_t *)test_buffer_host(&x))[i] = (uint32_t)bits;
                            else ((uint16_t *)test_buffer_host(&x))[i] = (uint16_t)bits;
                        }
                        test_buffer_upload(&x), test_buffer_upload(&y), test_buffer_upload(&f);
                        const float *const at = (const float *)test_buffer_device(&f);
                        const lk_rescale_args a = {test_buffer_device(&x), test_buffer_device(&y), count, at, at + 1, NULL};
                        const lk_status status = rescale_of(type, &a);
                        test_buffer_download(&x), test_buffer_download(&y), test_buffer_download(&f);
                        if (!test_that(status == LK_OK)) test_detail("count %lld: %s", (long long)count, lk_last_error());
                        for (int64_t i = 0; i < count; i++) {
                            const uint32_t before = test_get_bits(type, test_buffer_host(&x), i);
                            const uint32_t got = test_get_bits(type, test_buffer_back(&y), i);
                            if (!test_that(scaled(type, got, before, p[0] == p[1] ? 1.0f : p[0] / p[1])))
                                test_detail("count %lld, offsets %d %d, [%lld]: %08x times %g / %g is %08x", (long long)count,
                                            x_off, y_off, (long long)i, before, p[0], p[1], got);
                            test_buffer_accept(&y, i, bytes);
                        }
                        test_buffer_untouched(&x, "x", "rescale"), test_buffer_untouched(&y, "y", "rescale");
                        test_buffer_untouched(&f, "factor and divisor", "rescale");
                    }
            test_finish();
        }
        if (test_begin("rescale %s: a history expects what came twice", test_type_name[type])) {
            static const float came[] = {1, 0.3f, 0.3f, 0.5f, 0.3f, 0.5f, 0.5f, 0, 0, NAN, NAN, INFINITY, INFINITY, 1e-30f, 1e-30f, 2, 2};
            float expected = 1, last = 1;
            test_buffer_size(&x, 300 * (size_t)bytes, 0, 0), test_buffer_size(&f, 16, 0, 0x11);
            float *const host = (float *)test_buffer_host(&f);
            host[1] = host[2] = 1; /* the history; host[0] is the factor, and host[3] stays as it is */
            test_buffer_upload(&x);
            for (const float factor : came) {
                host[0] = factor, host[1] = expected, host[2] = last;
                test_buffer_download(&f), test_buffer_upload(&f);
                float *const at = (float *)test_buffer_device(&f);
                const lk_rescale_args a = {test_buffer_device(&x), test_buffer_device(&x), 300, at, NULL, at + 1};
                const lk_status status = rescale_of(type, &a);
                test_buffer_download(&f);
                const float *const back = (const float *)test_buffer_back(&f);
                if (!test_that(status == LK_OK)) test_detail("%s", lk_last_error());
                if (fabsf(factor) >= 0x1p-40f && fabsf(factor) <= 0x1p40f) expected = factor == last ? factor : expected, last = factor;
                if (!test_that(back[1] == expected && back[2] == last))
                    test_detail("after %g: %g, %g; not %g, %g", factor, back[1], back[2], expected, last);
            }
            test_buffer_download(&x);
            test_finish();
        }
        if (test_begin("rescale %s: errors", test_type_name[type])) {
            test_buffer_size(&x, 128, 0, 0xEE), test_buffer_size(&f, 16, 0, 0x11);
            test_buffer_upload(&x), test_buffer_upload(&f);
            char *const at = (char *)test_buffer_device(&x);
            float *const factor = (float *)test_buffer_device(&f);
            const struct {
                lk_rescale_args a;
                lk_status status;
                const char *sentence;
            } errors[] = {{{NULL, at, 4, factor, NULL, NULL}, LK_ERR_NULL, "x is NULL"},
                          {{at, NULL, 4, factor, NULL, NULL}, LK_ERR_NULL, "y is NULL"},
                          {{at, at, 4, NULL, NULL, NULL}, LK_ERR_NULL, "factor is NULL"},
                          {{at, at + bytes, 4, factor, NULL, NULL}, LK_ERR_SHAPE, "y"},
                          {{at, at, 4, factor, NULL, factor}, LK_ERR_SHAPE, "factor"},
                          {{at, at, 4, factor, (const float *)((char *)factor + 2), NULL}, LK_ERR_ALIGNMENT, "divisor is not aligned"},
                          {{NULL, NULL, 0, NULL, NULL, NULL}, LK_OK, ""}};
            for (const auto &e : errors) {
                const lk_status status = rescale_of(type, &e.a);
                if (!test_that(status == e.status && strstr(lk_last_error(), e.sentence)))
                    test_detail("status %d, \"%s\"; not %d, \"%s\"", status, lk_last_error(), e.status, e.sentence);
            }
            if (!test_that(rescale_of(type, NULL) == LK_ERR_NULL)) test_detail("args NULL: %s", lk_last_error());
            test_buffer_download(&x), test_buffer_download(&f);
            test_buffer_untouched(&x, "x", "errors");
            test_finish();
        }
    }
    test_buffer_free(&x), test_buffer_free(&y), test_buffer_free(&f);
}

#if !defined(LK_SIMT)
/* More than 2^31 elements: 0x3f3f is 0.747 in bf16, and times 2 it is 0x3fbf. */
static void case_scale_large(void)
{
    const int64_t count = ((int64_t)1 << 31) + 12345;
    unsigned char *x = NULL;
    float *factor = NULL, two = 2.0f;
    if (test.small || !test_begin("scale bf16: 2^31 + 12345 elements")) return;
    TEST_CUDA(cudaMalloc((void **)&x, (size_t)count * 2 + 512));
    TEST_CUDA(cudaMalloc((void **)&factor, 4));
    TEST_CUDA(cudaMemset(x, 0x3f, (size_t)count * 2 + 512));
    TEST_CUDA(cudaMemcpy(factor, &two, 4, cudaMemcpyHostToDevice));
    TEST_CUDA(cudaDeviceSynchronize());
    const lk_status status = lk_scale_bf16(x + 256 + 2, count, factor, test.stream);
    if (!test_that(status == LK_OK)) test_detail("%s", lk_last_error());
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    std::vector<uint16_t> back((size_t)1 << 24);
    for (int64_t from = 0; from < count; from += (int64_t)back.size()) {
        const int64_t here = count - from < (int64_t)back.size() ? count - from : (int64_t)back.size();
        TEST_CUDA(cudaMemcpy(back.data(), x + 258 + from * 2, (size_t)here * 2, cudaMemcpyDeviceToHost));
        int64_t bad = -1;
        for (int64_t i = 0; i < here; i++)
            if (back[(size_t)i] != 0x3fbf) bad = from + i;
        if (!test_that(bad < 0)) test_detail("[%lld]", (long long)bad);
    }
    uint16_t beside[2];
    TEST_CUDA(cudaMemcpy(&beside[0], x + 256, 2, cudaMemcpyDeviceToHost));
    TEST_CUDA(cudaMemcpy(&beside[1], x + 258 + count * 2, 2, cudaMemcpyDeviceToHost));
    if (!test_that(beside[0] == 0x3f3f && beside[1] == 0x3f3f)) test_detail("written beside it");
    TEST_CUDA(cudaFree(x));
    TEST_CUDA(cudaFree(factor));
    test_finish();
}
#endif

/* ---- LK_CHECK ------------------------------------------------------------------------------------------------------------------ */

/* A call that is right but looks odd: a line with `sentence` under LK_CHECK, else nothing. */
static void check_heard(work *w, const char *what, const char *sentence)
{
    lk_status status = LK_OK;
    const std::vector<char> text = heard([&] { status = call(w); });
    TEST_CUDA(cudaStreamSynchronize(w->stream));
    if (!test_that(status == LK_OK)) test_detail("%s: status %d, %s", what, status, lk_last_error());
#if defined(LK_CHECK)
    const bool told = sentence ? strstr(text.data(), sentence) && strstr(text.data(), w->op->name) : !text[0];
#else
    const bool told = !text[0];
    (void)sentence;
#endif
    if (!test_that(told)) test_detail("%s: stderr has \"%s\"", what, text.data());
}

static void case_heard(void)
{
    for (const op &o : ops)
        for (const int type : types) {
            if (left_out(type)) continue;
            if (!test_begin("stderr: %s %s", o.name, test_type_name[type])) continue;
            work *w = make(&o, type, 2);
            check_heard(w, "as it should be", NULL);
            w->empty = true;
            check_heard(w, "nothing to do", " is 0");
            w->empty = false, w->no_eps = true;
            if (strstr(o.name, "srms")) check_heard(w, "eps 0", "eps is 0");
            w->no_eps = false;
            unmake(w);
            test_finish();
        }
}

#if defined(LK_CHECK)

/* A call that is refused with this status and sentence, and writes nothing. */
static void check_refused(work *w, const char *what, lk_status want, const char *sentence)
{
    reset(w);
    const lk_status status = call(w);
    if (!test_that(status == want && strstr(lk_last_error(), sentence)))
        test_detail("%s: status %d, \"%s\"; not %d, \"...%s\"", what, status, lk_last_error(), want, sentence);
    if (!test_that(same(w, true))) test_detail("%s: something was written", what);
}

/* What CUDA knows of the allocation that a pointer lies in. */
static char *end_of_allocation(const void *pointer, size_t *bytes)
{
    typedef int range_function(uintptr_t *base, size_t *bytes, uintptr_t pointer);
    void *found = NULL;
    uintptr_t base = 0;
    TEST_CUDA(lk_driver_function("cuMemGetAddressRange", &found));
    TEST_CUDA(((range_function *)found)(&base, bytes, (uintptr_t)pointer) ? cudaErrorUnknown : cudaSuccess);
    return (char *)base + *bytes;
}

static void case_check(void)
{
    char sentence[256];
    int devices = 0;
    TEST_CUDA(cudaGetDeviceCount(&devices));
    for_all("LK_CHECK", 1, [&](work **works) {
        work *w = works[0];
        for (int i = 0; i < w->count; i++) {
            tensor *t = &w->tensors[i];
            const int element = t->kind == OUT && (!strcmp(t->name, "loss") || !strcmp(t->name, "lse") || !strcmp(t->name, "rstd") ||
                                                   !strcmp(t->name, "dtheta")) ? 4 : element_of(w, t->kind);
            char *other = NULL;
            size_t range = 0;
            t->given = t->host;
            snprintf(sentence, sizeof sentence, "%s is a pointer to host memory", t->name);
            check_refused(w, "host memory", LK_ERR_VALUE, sentence);

            /* Less than is needed lies behind it: without what is over 16 bytes, so that it is aligned as before. */
            const size_t over = t->bytes <= 16 ? (size_t)element : t->bytes % 16 ? t->bytes % 16 : 16;
            TEST_CUDA(cudaMalloc((void **)&other, (t->bytes + 15) / 16 * 32 + 256));
            t->given = end_of_allocation(other, &range) - t->bytes + over;
            snprintf(sentence, sizeof sentence, "%s needs %zu bytes", t->name, t->bytes);
            if (over < t->bytes) check_refused(w, "too few elements", LK_ERR_SHAPE, sentence);
            if (t->kind == IN_TARGETS) {
                t->given = end_of_allocation(other, &range) - t->bytes / 2;
                check_refused(w, "int32 for int64", LK_ERR_SHAPE, sentence);
            }
            TEST_CUDA(cudaFree(other));

            if (devices > 1) {
                TEST_CUDA(cudaSetDevice(1));
                TEST_CUDA(cudaMalloc((void **)&other, t->bytes));
                TEST_CUDA(cudaSetDevice(0));
                t->given = other;
                snprintf(sentence, sizeof sentence, "%s lies on device 1; the current device is 0", t->name);
                check_refused(w, "another device's", LK_ERR_VALUE, sentence);
                TEST_CUDA(cudaFree(other));
            }

            TEST_CUDA(cudaMalloc((void **)&other, 2 * t->bytes)); /* right, but as large as floats would be */
            TEST_CUDA(cudaMemset(other, 0, 2 * t->bytes));
            TEST_CUDA(cudaDeviceSynchronize());
            t->given = other;
            end_of_allocation(other, &range);
            snprintf(sentence, sizeof sentence, "%s is an allocation of", t->name);
            if (range == 2 * t->bytes) check_heard(w, "twice the bytes", element == 2 ? sentence : NULL);
            TEST_CUDA(cudaFree(other));
            t->given = t->device;
        }
        check_call(w, NULL, "put right again");
    });
    if (test_begin("LK_CHECK: slices of ranks with a hole, an overlap, another vocabulary")) {
        static const struct {
            int64_t start, vocab, total;
            const char *sentence;
            int64_t own;
        } other[] = {{8, 8, 16, "", 8},        {7, 9, 16, "overlap", 8}, {9, 7, 16, "15 columns of 16", 8},
                     {8, 8, 17, "rank 1", 8},  {4, 0, 16, "", 16}}; /* a slice without columns overlaps nothing */
        for (int i = 0; i < 5; i++) {
            const int64_t theirs[4] = {other[i].start, other[i].vocab, other[i].total, 2};
            lk_cross_entropy_parallel_args x = {};
            lk_cross_entropy_args &a = x.common;
            char *memory = NULL;
            TEST_CUDA(cudaMalloc(&memory, 1 << 16));
            TEST_CUDA(cudaMemset(memory, 0, 1 << 16));
            TEST_CUDA(cudaDeviceSynchronize()); /* test.stream does not wait for the default stream */
            a.logits = memory, a.target = memory + 4096, a.loss = (float *)(memory + 8192), a.rows = 4, a.vocab = other[i].own;
            a.workspace = memory + 16384, a.workspace_bytes = 32768;
            x.parallel.vocab_total = 16, x.parallel.ranks = 2, x.parallel.user = (void *)(uintptr_t)theirs;
            x.parallel.all_gather = [](void *user, const void *send, void *receive, size_t bytes, cudaStream_t stream) -> lk_status {
                cudaMemcpyAsync(receive, send, bytes, cudaMemcpyDeviceToDevice, stream);
                const void *const second = bytes == 32 ? user : NULL; /* the slice; states are those of the first rank */
                if (!second) cudaMemcpyAsync((char *)receive + bytes, send, bytes, cudaMemcpyDeviceToDevice, stream);
                else cudaMemcpyAsync((char *)receive + bytes, second, bytes, cudaMemcpyHostToDevice, stream);
                return LK_OK;
            };
            const lk_status status = lk_cross_entropy_parallel_forward_f32(&x, test.stream);
            const bool right = other[i].sentence[0] ? status == LK_ERR_SHAPE && strstr(lk_last_error(), other[i].sentence) : status == LK_OK;
            if (!test_that(right)) test_detail("case %d: status %d, %s", i, status, lk_last_error());
            TEST_CUDA(cudaStreamSynchronize(test.stream));
            TEST_CUDA(cudaFree(memory));
        }
        test_finish();
    }
    if (test_begin("LK_CHECK: 2^20 floats given to lk_scale_bf16")) { /* a size that no allocator rounds up */
        work *w = make(&ops[12], TEST_BF16, 2);
        void *x = NULL, *factor = NULL;
        TEST_CUDA(cudaMalloc(&x, 4 << 20));
        TEST_CUDA(cudaMalloc(&factor, 4));
        TEST_CUDA(cudaMemset(x, 0, 4 << 20));
        TEST_CUDA(cudaMemset(factor, 0, 4));
        TEST_CUDA(cudaDeviceSynchronize());
        const std::vector<char> text = heard([&] { lk_scale_bf16(x, 1 << 20, (const float *)factor, w->stream); });
        TEST_CUDA(cudaStreamSynchronize(w->stream));
        if (!test_that(strstr(text.data(), "is it f32?") != NULL)) test_detail("stderr has \"%s\"", text.data());
        TEST_CUDA(cudaFree(x));
        TEST_CUDA(cudaFree(factor));
        unmake(w);
        test_finish();
    }
}

#endif

/* An error below 0 is no error at all, so a limit below 0 would let it pass. */
static void case_harness(void)
{
    if (!test_begin("harness: a negative limit")) return;
    const bool good = test_within(-2, -1), said = strstr(test.detail, "the test is wrong");
    test.bad = 0, test.detail[0] = 0, test.worst = -1, test.error = test.limit = 0;
    if (!test_that(!good && said)) test_detail("it passes, or nothing says why not");
    test_finish();
}

int main(int argc, char **argv)
{
#if defined(LK_SIMT)
    setenv("SIMT_DEVICES", "2", 0);
#endif
    if (argc == 6 && !strcmp(argv[1], "--first")) return first_main(argv);
    test_start(argc, argv);
    case_harness();
    case_launch();
    case_scale();
    case_rescale();
#if !defined(LK_SIMT)
    case_scale_large();
#endif
    case_sentences();
    case_threads();
    case_graphs();
    case_first();
    case_pending();
    case_positive();
    case_devices();
    case_heard();
#if defined(LK_CHECK)
    case_check();
#endif
    TEST_CUDA(cudaStreamDestroy(test.stream));
    return test_end();
}
