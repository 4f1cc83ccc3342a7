// SPDX-License-Identifier: MIT
/* Strong scaling of linear_cross_entropy whose columns are split over ranks: `make bench-parallel`.
 *
 *   parallel             on one GPU: one rank of 2, 4 and 8, whose all-gather is copies on the GPU; dx is not summed. It shows
 *                        what a rank computes, against 1/P of the head without ranks
 *   parallel --gpus      with NCCL: a thread per GPU of the machine, one rank each; and NCCL's all-reduce of dx alone
 *   --leave N            --gpus: dweight's matmul leaves N SMs to NCCL, which has N blocks (reduce_sms, maxCTAs). May be given
 *                        several times, 0 too; without it 0 and 8
 *   --register           --gpus: then once more with dx, the states and the workspace in memory of ncclMemAlloc, registered
 *                        with NCCL as symmetric windows: it reads and writes the other GPUs' in place
 *   --case TEXT          only cases that hold TEXT
 *
 * A call is repeated back to back, 0.4 s to warm up and 0.4 s that are timed; ms is the mean. --gpus: of the slowest rank, with
 * the sum of dx; the rows "until" are of one call. bf16, dweight in bf16, mean loss, a workspace of up to 4 GiB. efficiency is
 * ms of the head without ranks, over P, over ms. forward is forward by itself; backward makes the gradients from lse;
 * forward_backward is one call; "one graph" is that call captured once, with its collectives. bytes: what a rank sends in the
 * all-gather; of the all-reduce, those of dx. "no collectives": all GPUs at once, each by itself, as without --gpus.
 * Rows go to BENCH_CSV. */
#define _POSIX_C_SOURCE 200809L
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "lk/linear_cross_entropy.cuh"
#include "lk/linear_cross_entropy_parallel.cuh"

LK_DECLARE_LINEAR_CROSS_ENTROPY(bf16)
LK_DECLARE_LINEAR_CROSS_ENTROPY_PARALLEL(bf16)

#ifdef WITH_NCCL
#include "examples/parallel/lk_nccl.h"
#endif

enum { FORWARD, BACKWARD, BOTH, GRAPH, DIRECTIONS, MOST_GPUS = 64, MOST_LEAVES = 16 };
static const char *const direction_name[] = {"forward", "backward", "forward_backward", "forward_backward"};
static const double seconds = 0.4;
static const size_t budget = (size_t)4 << 30;

typedef struct {
    int64_t tokens, hidden, vocab;
} shape;

static FILE *csv;
static int leave_of[MOST_LEAVES] = {0, 8}, leaves;

static void check(const char *what, int status)
{
    if (status == 0) return;
    fprintf(stderr, "%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *device_memory(size_t bytes)
{
    void *at = NULL;
    check("cudaMalloc", cudaMalloc(&at, bytes ? bytes : 1));
    return at;
}

/* bf16 numbers of about normal distribution; a block of them, repeated. */
static void *numbers(size_t count, double spread, unsigned seed)
{
    const size_t block = count < (1u << 22) ? count : 1u << 22;
    uint16_t *const host = (uint16_t *)malloc(block * 2 + 1);
    char *const device = (char *)device_memory(count * 2);
    for (size_t i = 0; i < block; i++) {
        double sum = 0.0;
        for (int k = 0; k < 3; k++) seed = seed * 1664525u + 1013904223u, sum += (double)(seed >> 8) * 0x1p-23 - 1.0;
        const float f = (float)(spread * sum);
        uint32_t bits;
        memcpy(&bits, &f, 4);
        host[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    for (size_t done = 0; done < count; done += block) {
        const size_t n = count - done < block ? count - done : block;
        check("cudaMemcpy", cudaMemcpy(device + done * 2, host, n * 2, cudaMemcpyHostToDevice));
    }
    free(host);
    return device;
}

/* ---- A rank's calls ------------------------------------------------------------------------------------------------------ */

typedef struct {
    lk_linear_cross_entropy_context context;
    lk_linear_cross_entropy_parallel_args args[GRAPH]; /* without ranks `common` alone */
    cudaStream_t stream;
    cudaGraphExec_t graph; /* of forward_backward */
    size_t sent; /* bytes of an all-gather */
} head;

/* As many copies as `ranks` has bits: what is there is doubled. */
static lk_status copy_gather(void *user, const void *send, void *receive, size_t bytes, cudaStream_t stream)
{
    const head *const h = (const head *)user;
    const size_t all = bytes * (size_t)h->args[BOTH].parallel.ranks;
    ((head *)user)->sent = bytes;
    cudaError_t error = cudaMemcpyAsync(receive, send, bytes, cudaMemcpyDeviceToDevice, stream);
    for (size_t done = bytes; done < all && !error; done *= 2)
        error = cudaMemcpyAsync((char *)receive + done, receive, done < all - done ? done : all - done, cudaMemcpyDeviceToDevice, stream);
    return (lk_status)error;
}

/* Rank `rank` of `ranks`; 0 ranks: the head without them. */
static void make_head(head *h, shape s, int rank, int ranks, lk_vocab_parallel with)
{
    const int64_t first = ranks ? s.vocab * rank / ranks : 0, end = ranks ? s.vocab * (rank + 1) / ranks : s.vocab;
    int64_t *const target = (int64_t *)malloc((size_t)s.tokens * 8);
    memset(h, 0, sizeof *h);
    check("init", lk_linear_cross_entropy_init(&h->context));
    check("cudaStreamCreate", cudaStreamCreate(&h->stream));
    for (int64_t t = 0; t < s.tokens; t++) target[t] = t * 7919 % s.vocab;
    lk_linear_cross_entropy_parallel_args all = {0};
    lk_linear_cross_entropy_args a = {.context = &h->context, .tokens = s.tokens, .hidden = s.hidden, .vocab = end - first};
    a.x = numbers((size_t)(s.tokens * s.hidden), 1.0, 1), a.reduction = LK_REDUCTION_MEAN;
    a.weight = numbers((size_t)((end - first) * s.hidden), 1.0 / sqrt((double)s.hidden), 2);
    void *const target_device = device_memory((size_t)s.tokens * 8);
    check("cudaMemcpy", cudaMemcpy(target_device, target, (size_t)s.tokens * 8, cudaMemcpyHostToDevice));
    a.target = target_device, a.loss = (float *)device_memory(4), a.valid_rows = (int64_t *)device_memory(8);
    a.lse = (float *)device_memory((size_t)s.tokens * 4), a.dx = device_memory((size_t)(s.tokens * s.hidden) * 2);
    a.dweight = device_memory((size_t)((end - first) * s.hidden) * 2);
    if (ranks) with.vocab_start = first, with.vocab_total = s.vocab, with.rank = rank, with.ranks = ranks, all.parallel = with;
    if (ranks) all.states = device_memory((size_t)s.tokens * 16);
    all.common = a;
    lk_linear_cross_entropy_plan plan[GRAPH];
    size_t most = 0;
    if (ranks) {
        check("plan", lk_linear_cross_entropy_parallel_forward_plan_bf16(&all, budget, &plan[FORWARD]));
        check("plan", lk_linear_cross_entropy_parallel_backward_plan_bf16(&all, budget, &plan[BACKWARD]));
        check("plan", lk_linear_cross_entropy_parallel_forward_backward_plan_bf16(&all, budget, &plan[BOTH]));
    } else {
        check("plan", lk_linear_cross_entropy_forward_plan_bf16(&a, budget, &plan[FORWARD]));
        check("plan", lk_linear_cross_entropy_backward_plan_bf16(&a, budget, &plan[BACKWARD]));
        check("plan", lk_linear_cross_entropy_forward_backward_plan_bf16(&a, budget, &plan[BOTH]));
    }
    for (int d = 0; d < GRAPH; d++)
        if (plan[d].workspace_bytes > most) most = plan[d].workspace_bytes;
    all.common.workspace = device_memory(most);
    for (int d = 0; d < GRAPH; d++) h->args[d] = all, h->args[d].common.workspace_bytes = plan[d].workspace_bytes;
    if (rank == 0) printf("    %s\n", plan[BOTH].text);
    free(target);
}

static void free_head(head *h)
{
    const lk_linear_cross_entropy_args *const a = &h->args[BOTH].common;
    const void *const all[] = {a->x,   a->weight, a->target,  a->loss,      a->valid_rows,
                               a->lse, a->dx,     a->dweight, a->workspace, h->args[BOTH].states};
    if (h->graph) cudaGraphExecDestroy(h->graph);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) cudaFree((void *)(uintptr_t)all[i]);
    check("destroy", lk_linear_cross_entropy_destroy(&h->context));
    cudaStreamDestroy(h->stream);
}

static void call(head *h, int direction)
{
    if (direction == GRAPH) {
        check("cudaGraphLaunch", cudaGraphLaunch(h->graph, h->stream));
        return;
    }
    const lk_linear_cross_entropy_parallel_args *const a = &h->args[direction];
    const int split = a->parallel.ranks > 0;
    lk_status status;
    if (direction == FORWARD)
        status = split ? lk_linear_cross_entropy_parallel_forward_bf16(a, h->stream)
                       : lk_linear_cross_entropy_forward_bf16(&a->common, h->stream);
    else if (direction == BACKWARD)
        status = split ? lk_linear_cross_entropy_parallel_backward_bf16(a, h->stream)
                       : lk_linear_cross_entropy_backward_bf16(&a->common, h->stream);
    else
        status = split ? lk_linear_cross_entropy_parallel_forward_backward_bf16(a, h->stream)
                       : lk_linear_cross_entropy_forward_backward_bf16(&a->common, h->stream);
    check(direction_name[direction], status);
}

/* forward_backward, and `join` if there is one, as a graph. It has been called before. */
static void capture(head *h, lk_status (*join)(void *, cudaStream_t), void *user)
{
    cudaGraph_t graph;
    check("cudaStreamBeginCapture", cudaStreamBeginCapture(h->stream, cudaStreamCaptureModeThreadLocal));
    call(h, BOTH);
    if (join) check("join", join(user, h->stream));
    check("cudaStreamEndCapture", cudaStreamEndCapture(h->stream, &graph));
    check("cudaGraphInstantiate", cudaGraphInstantiate(&h->graph, graph, 0));
    check("cudaGraphDestroy", cudaGraphDestroy(graph));
}

/* Calls per measurement, from a few; every rank is told the same. */
static int calls_for(head *h, int direction)
{
    for (int i = 0; i < 2; i++) call(h, direction);
    check("cudaStreamSynchronize", cudaStreamSynchronize(h->stream));
    const double start = now();
    for (int i = 0; i < 3; i++) call(h, direction);
    check("cudaStreamSynchronize", cudaStreamSynchronize(h->stream));
    const double each = (now() - start) / 3.0;
    return each > seconds / 5.0 ? 5 : (int)(seconds / each);
}

/* Milliseconds of a call; after each one `join`, if there is one, makes the stream wait. */
static double measure(head *h, int direction, int calls, lk_status (*join)(void *, cudaStream_t), void *user)
{
    cudaEvent_t from, to;
    float ms = 0.0f;
    check("cudaEventCreate", cudaEventCreate(&from));
    check("cudaEventCreate", cudaEventCreate(&to));
    for (int half = 0; half < 2; half++) {
        if (half) check("cudaEventRecord", cudaEventRecord(from, h->stream));
        for (int i = 0; i < calls; i++) {
            call(h, direction);
            if (join && (direction == BACKWARD || direction == BOTH)) check("join", join(user, h->stream));
        }
    }
    check("cudaEventRecord", cudaEventRecord(to, h->stream));
    check("cudaEventSynchronize", cudaEventSynchronize(to));
    check("cudaEventElapsedTime", cudaEventElapsedTime(&ms, from, to));
    cudaEventDestroy(from), cudaEventDestroy(to);
    return (double)ms / (double)calls;
}

static void row(shape s, const char *direction, int ranks, const char *provider, double ms, double one, size_t bytes)
{
    const double efficiency = one > 0.0 ? one / (double)ranks / ms : 0.0;
    char of[16] = "";
    if (one > 0.0) snprintf(of, sizeof of, "%.3f", efficiency);
    printf("| %lld x %lld x %lld | %s | %d | %s | %.4f | %s | %zu |\n", (long long)s.tokens, (long long)s.hidden, (long long)s.vocab,
           direction, ranks, provider, ms, of, bytes);
    fflush(stdout);
    if (csv)
        fprintf(csv, "linear_cross_entropy,%s,bf16,tokens=%lld hidden=%lld vocab=%lld,%d,%s,%.5g,%s,%zu,%s,%s\n", direction,
                (long long)s.tokens, (long long)s.hidden, (long long)s.vocab, ranks, provider, ms, of, bytes,
                getenv("BENCH_GPU") ? getenv("BENCH_GPU") : "", getenv("COMMIT") ? getenv("COMMIT") : "");
}

/* The head without ranks. */
static void measure_one(shape s, double *one)
{
    static head h;
    make_head(&h, s, 0, 0, (lk_vocab_parallel){0});
    for (int d = 0; d < GRAPH; d++) {
        if (d == BACKWARD) call(&h, FORWARD); /* its lse */
        one[d] = measure(&h, d, calls_for(&h, d), NULL, NULL);
        row(s, direction_name[d], 1, "one GPU", one[d], 0.0, 0);
    }
    one[GRAPH] = one[BOTH];
    free_head(&h);
}

static void measure_virtual(shape s, const double *one)
{
    for (int ranks = 2; ranks <= 8; ranks *= 2) {
        static head h;
        make_head(&h, s, 0, ranks, (lk_vocab_parallel){.user = &h, .all_gather = copy_gather});
        for (int d = 0; d < DIRECTIONS; d++) {
            if (d == BACKWARD) call(&h, FORWARD);
            if (d == GRAPH) capture(&h, NULL, NULL);
            const double ms = measure(&h, d, calls_for(&h, d), NULL, NULL);
            row(s, direction_name[d], ranks, d == GRAPH ? "virtual rank; one graph" : "virtual rank", ms, one[d],
                d == BACKWARD ? 0 : h.sent);
        }
        free_head(&h);
    }
}

/* ---- Several GPUs -------------------------------------------------------------------------------------------------------- */

#ifdef WITH_NCCL
static ncclUniqueId id;
static int gpus, leave, in_windows, calls_of[DIRECTIONS];
static shape now_shape;
enum { COMPLETE = DIRECTIONS + 1, SUMMED, END, ALONE, KINDS, WINDOWS = 3 };
static double worst[KINDS];
static pthread_barrier_t together;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static lk_status join(void *n, cudaStream_t stream)
{
    return lk_nccl_join((lk_nccl *)n, stream);
}

static void keep_worst(int i, double ms)
{
    pthread_mutex_lock(&lock);
    if (ms > worst[i]) worst[i] = ms;
    pthread_mutex_unlock(&lock);
}

/* Moves dx, the states and the workspace to memory of NCCL, in windows that are the same on all ranks. */
static void enter_windows(head *h, ncclComm_t comm, ncclWindow_t *window)
{
    const lk_linear_cross_entropy_args *const a = &h->args[BOTH].common;
    void *at[WINDOWS] = {a->dx, h->args[BOTH].states, a->workspace};
    size_t bytes[WINDOWS] = {(size_t)(a->tokens * a->hidden) * 2, (size_t)a->tokens * 16, 0};
    for (int d = 0; d < GRAPH; d++)
        if (h->args[d].common.workspace_bytes > bytes[2]) bytes[2] = h->args[d].common.workspace_bytes;
    for (int i = 0; i < WINDOWS; i++) {
        check("cudaFree", cudaFree(at[i])), check("ncclMemAlloc", ncclMemAlloc(&at[i], bytes[i]));
        check("ncclCommWindowRegister", ncclCommWindowRegister(comm, at[i], bytes[i], &window[i], NCCL_WIN_COLL_SYMMETRIC));
    }
    for (int d = 0; d < GRAPH; d++)
        h->args[d].common.dx = at[0], h->args[d].states = at[1], h->args[d].common.workspace = at[2];
}

static void leave_windows(head *h, ncclComm_t comm, const ncclWindow_t *window)
{
    lk_linear_cross_entropy_parallel_args *const a = &h->args[BOTH];
    void **const at[WINDOWS] = {&a->common.dx, &a->states, &a->common.workspace};
    for (int i = 0; i < WINDOWS; i++) {
        if (window[i]) check("ncclCommWindowDeregister", ncclCommWindowDeregister(comm, window[i])); /* NULL: NCCL has none here */
        check("ncclMemFree", ncclMemFree(*at[i]));
        *at[i] = NULL;
    }
}

/* What this GPU takes while the others do the same, without NCCL. */
static void run_alone(int rank)
{
    head h;
    make_head(&h, now_shape, rank, gpus, (lk_vocab_parallel){.user = &h, .all_gather = copy_gather, .reduce_sms = leave});
    const int calls = calls_for(&h, BOTH);
    pthread_barrier_wait(&together);
    keep_worst(ALONE, measure(&h, BOTH, calls, NULL, NULL));
    pthread_barrier_wait(&together);
    free_head(&h);
}

static void *run_rank(void *argument)
{
    const int rank = (int)(intptr_t)argument;
    const shape s = now_shape;
    head h;
    lk_nccl n;
    ncclComm_t comm;
    ncclWindow_t window[WINDOWS];
    cudaEvent_t from, to;
    float ms = 0.0f;
    check("cudaSetDevice", cudaSetDevice(rank));
    if (!in_windows) run_alone(rank);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (leave) config.maxCTAs = leave;
    check("ncclCommInitRankConfig", ncclCommInitRankConfig(&comm, gpus, id, rank, &config));
    check("lk_nccl_init", lk_nccl_init(&n, comm, ncclBfloat16, (size_t)s.hidden));
    make_head(&h, s, rank, gpus, (lk_vocab_parallel){.user = &n, .all_gather = lk_nccl_all_gather, .reduce = lk_nccl_reduce,
                                                     .reduce_sms = leave});
    if (in_windows) enter_windows(&h, comm, window);
    for (int d = 0; d < DIRECTIONS; d++) {
        if (d == BACKWARD) call(&h, FORWARD);
        if (d == GRAPH) capture(&h, join, &n);
        const int calls = calls_for(&h, d);
        if (rank == 0) calls_of[d] = calls;
        pthread_barrier_wait(&together);
        keep_worst(d, measure(&h, d, calls_of[d], join, &n));
        pthread_barrier_wait(&together);
    }
    check("cudaEventCreate", cudaEventCreate(&from));
    check("cudaEventCreate", cudaEventCreate(&to));
    /* A timeline of one call, after others: when dx of this rank is complete, when it is summed, when dweight is done. */
    cudaEventDestroy(n.complete), cudaEventDestroy(n.summed);
    check("cudaEventCreate", cudaEventCreate(&n.complete));
    check("cudaEventCreate", cudaEventCreate(&n.summed));
    for (int i = 0; i < 10; i++) {
        if (i == 9) check("cudaEventRecord", cudaEventRecord(from, h.stream));
        call(&h, BOTH);
        if (i == 9) check("cudaEventRecord", cudaEventRecord(to, h.stream));
        check("join", join(&n, h.stream));
    }
    check("cudaStreamSynchronize", cudaStreamSynchronize(h.stream));
    const cudaEvent_t moments[] = {n.complete, n.summed, to};
    for (int i = 0; i < 3; i++) {
        check("cudaEventElapsedTime", cudaEventElapsedTime(&ms, from, moments[i]));
        keep_worst(COMPLETE + i, (double)ms);
    }
    void *const dx = h.args[BOTH].common.dx;
    for (int i = 0; i < 40; i++) { /* the sum of dx alone */
        if (i == 20) check("cudaEventRecord", cudaEventRecord(from, h.stream));
        check("ncclAllReduce", ncclAllReduce(dx, dx, (size_t)(s.tokens * s.hidden), ncclBfloat16, ncclSum, comm, h.stream));
    }
    check("cudaEventRecord", cudaEventRecord(to, h.stream));
    check("cudaEventSynchronize", cudaEventSynchronize(to));
    check("cudaEventElapsedTime", cudaEventElapsedTime(&ms, from, to));
    keep_worst(DIRECTIONS, (double)ms / 20.0);
    cudaEventDestroy(from), cudaEventDestroy(to);
    if (in_windows) leave_windows(&h, comm, window);
    free_head(&h), lk_nccl_destroy(&n);
    check("ncclCommDestroy", ncclCommDestroy(comm));
    return NULL;
}

static void measure_gpus(shape s, const double *one)
{
    pthread_t thread[MOST_GPUS];
    check("cudaGetDeviceCount", cudaGetDeviceCount(&gpus));
    check("ncclGetUniqueId", ncclGetUniqueId(&id));
    now_shape = s, memset(worst, 0, sizeof worst);
    pthread_barrier_init(&together, NULL, (unsigned)gpus);
    for (int i = 0; i < gpus; i++) pthread_create(&thread[i], NULL, run_rank, (void *)(intptr_t)i);
    for (int i = 0; i < gpus; i++) pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&together);
    char left[48] = "", name[80];
    if (leave) snprintf(left, sizeof left, "; %d SMs left", leave);
    if (in_windows) strcat(left, "; in windows");
#define NAME(what) (snprintf(name, sizeof name, "%s%s", what, left), name)
    for (int d = 0; d < DIRECTIONS; d++)
        row(s, direction_name[d], gpus, NAME(d == GRAPH ? "rank; one graph" : "rank"), worst[d], one[d],
            d == BACKWARD ? 0 : (size_t)s.tokens * 16);
    row(s, "forward_backward", gpus, NAME("until dx is complete"), worst[COMPLETE], 0.0, 0);
    row(s, "forward_backward", gpus, NAME("until dx is summed"), worst[SUMMED], 0.0, 0);
    row(s, "forward_backward", gpus, NAME("until dweight is done"), worst[END], 0.0, 0);
    row(s, "backward", gpus, NAME("all-reduce of dx alone"), worst[DIRECTIONS], 0.0, (size_t)(s.tokens * s.hidden) * 2);
    if (!in_windows) row(s, "forward_backward", gpus, NAME("no collectives"), worst[ALONE], one[BOTH], 0);
#undef NAME
}
#endif

int main(int argc, char **argv)
{
    static const int64_t tokens[] = {8192, 2048}, hidden[] = {4096, 2048}, vocab[] = {131072, 32000};
    const char *filter = "", *path = getenv("BENCH_CSV");
    int several = 0, windows = 0, count = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--gpus")) several = 1;
        else if (!strcmp(argv[i], "--case") && i + 1 < argc) filter = argv[++i];
        else if (!strcmp(argv[i], "--register")) windows = 1;
        else if (!strcmp(argv[i], "--leave") && i + 1 < argc && leaves < MOST_LEAVES) leave_of[leaves++] = atoi(argv[++i]);
        else return fprintf(stderr, "usage: %s [--gpus [--register] [--leave N]...] [--case TEXT]\n", argv[0]), 2;
    }
    if (!leaves) leaves = 2;
#ifndef WITH_NCCL
    if (several || windows) return fprintf(stderr, "built without NCCL: make bench-parallel NCCL=DIR ARGS=--gpus\n"), 2;
#endif
    csv = path ? fopen(path, "a") : NULL;
    printf("| tokens x hidden x vocab | direction | ranks | provider | ms | efficiency | bytes sent |\n|---|---|---|---|---|---|---|\n");
    for (int v = 0; v < 2; v++)
        for (int t = 0; t < 2; t++)
            for (int h = 0; h < 2; h++) {
                const shape s = {tokens[t], hidden[h], vocab[v]};
                char name[100];
                double one[DIRECTIONS];
                snprintf(name, sizeof name, "tokens=%lld hidden=%lld vocab=%lld", (long long)s.tokens, (long long)s.hidden,
                         (long long)s.vocab);
                if (!strstr(name, filter)) continue;
                measure_one(s, one), count++;
#ifdef WITH_NCCL
                for (in_windows = 0; several && in_windows <= windows; in_windows++)
                    for (int i = 0; i < leaves; i++) leave = leave_of[i], measure_gpus(s, one);
#endif
                if (!several) measure_virtual(s, one);
            }
    if (csv) fclose(csv);
    printf("parallel: %d cases%s%s\n", count, path ? "; wrote " : "; no CSV without BENCH_CSV", path ? path : "");
    return count == 0;
}
