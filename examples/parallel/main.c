// SPDX-License-Identifier: MIT
/* A language model's head over several GPUs: each rank has some columns of the vocabulary, all ranks have all tokens.
 *
 *   parallel [TOKENS HIDDEN VOCAB RANKS]            virtual ranks, one after another, on one GPU or on the CPU simulator
 *   parallel --gpus [TOKENS HIDDEN VOCAB]           one process, a thread per GPU
 *   parallel --rank R --ranks P --id FILE [...]     one process per GPU; all name the same FILE, which rank 0 writes
 *
 * The last two need NCCL (-DWITH_NCCL). Each rank holds its results against the head without ranks on its own device: the loss,
 * dx summed over ranks, and its rows of dweight.
 *
 *   make example-parallel                           virtual ranks
 *   make example-parallel NCCL=DIR ARGS=--gpus      DIR has include/nccl.h and lib/libnccl.so.2
 */
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
#include "lk_nccl.h"
#endif

enum { MOST_RANKS = 64 };

static int64_t tokens = 96, hidden = 64, vocab = 1000;
static int ranks = 3;

static void check(const char *what, int status)
{
    if (status == 0) return;
    fprintf(stderr, "%s: %s %s\n", what, lk_status_string(status), lk_last_error());
    exit(1);
}
#ifdef WITH_NCCL
static void check_nccl(const char *what, ncclResult_t result)
{
    if (result == ncclSuccess) return;
    fprintf(stderr, "%s: %s\n", what, ncclGetErrorString(result));
    exit(1);
}
#endif

/* ---- Numbers ------------------------------------------------------------------------------------------------------------- */

static double drawn(uint64_t i) /* -1 to 1; the same on every rank */
{
    i = (i + 1) * 0x9e3779b97f4a7c15u, i = (i ^ i >> 30) * 0xbf58476d1ce4e5b9u, i = (i ^ i >> 27) * 0x94d049bb133111ebu;
    return (double)(i >> 11) * 0x1p-52 - 1.0;
}
static uint16_t to_bf16(double x)
{
    const float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static double of_bf16(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return (double)f;
}

static void *device_memory(size_t bytes)
{
    void *at = NULL;
    check("cudaMalloc", cudaMalloc(&at, bytes ? bytes : 1));
    return at;
}

/* Rows `first` to first + rows - 1 of a matrix of drawn numbers. */
static uint16_t *matrix(uint64_t seed, int64_t first, int64_t rows, double spread)
{
    const size_t bytes = (size_t)(rows * hidden) * 2;
    uint16_t *const host = (uint16_t *)malloc(bytes + 1), *const device = (uint16_t *)device_memory(bytes);
    for (int64_t i = 0; i < rows * hidden; i++) host[i] = to_bf16(spread * drawn(seed + (uint64_t)(first * hidden + i)));
    check("cudaMemcpy", cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    free(host);
    return device;
}

static double *fetch(const void *device, int64_t count)
{
    uint16_t *const raw = (uint16_t *)malloc((size_t)count * 2 + 1);
    double *const out = (double *)malloc((size_t)count * 8 + 1);
    check("cudaMemcpy", cudaMemcpy(raw, device, (size_t)count * 2, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < count; i++) out[i] = of_bf16(raw[i]);
    free(raw);
    return out;
}

/* |a - b| / |b| */
static double difference(const double *a, const double *b, int64_t count)
{
    double off = 0.0, all = 0.0;
    for (int64_t i = 0; i < count; i++) off += (a[i] - b[i]) * (a[i] - b[i]), all += b[i] * b[i];
    return all > 0.0 ? sqrt(off / all) : sqrt(off);
}

/* ---- A rank's tensors ---------------------------------------------------------------------------------------------------- */

typedef struct {
    lk_linear_cross_entropy_context context;
    lk_linear_cross_entropy_parallel_args args; /* `common` is of columns first to first + vocab - 1 */
    int64_t first;
    size_t room;
} head;

/* The columns of rank i begin here: slices that differ by one column at most. */
static int64_t cut(int i)
{
    return vocab * i / ranks;
}

static void make_head(head *h, int64_t first, int64_t cols)
{
    int64_t *const target = (int64_t *)malloc((size_t)tokens * 8);
    lk_linear_cross_entropy_args *const a = &h->args.common;
    memset(h, 0, sizeof *h);
    for (int64_t t = 0; t < tokens; t++) target[t] = t % 7 == 3 ? -100 : (t * 7919 + 13) % vocab;
    check("init", lk_linear_cross_entropy_init(&h->context));
    a->context = &h->context, a->tokens = tokens, a->hidden = hidden, a->vocab = cols, h->first = first;
    a->x = matrix(1, 0, tokens, 1.0), a->weight = matrix(1u << 30, first, cols, 2.0 / sqrt((double)hidden));
    void *const target_device = device_memory((size_t)tokens * 8);
    check("cudaMemcpy", cudaMemcpy(target_device, target, (size_t)tokens * 8, cudaMemcpyHostToDevice));
    a->target = target_device, a->use_ignore_index = 1, a->ignore_index = -100, a->reduction = LK_REDUCTION_MEAN;
    a->loss = (float *)device_memory(4), a->lse = (float *)device_memory((size_t)tokens * 4);
    a->valid_rows = (int64_t *)device_memory(8);
    a->dx = device_memory((size_t)(tokens * hidden) * 2), a->dweight = device_memory((size_t)(cols * hidden) * 2);
    free(target);
}

static void need(head *h, size_t bytes)
{
    if (bytes <= h->room) return;
    cudaFree(h->args.common.workspace);
    h->args.common.workspace = device_memory(h->room = bytes);
}

static void free_head(head *h)
{
    const lk_linear_cross_entropy_args *const a = &h->args.common;
    const void *const all[] = {a->x,  a->weight,  a->target,    a->loss,       a->lse, a->valid_rows,
                               a->dx, a->dweight, a->workspace, h->args.states};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) cudaFree((void *)(uintptr_t)all[i]);
    lk_linear_cross_entropy_destroy(&h->context);
}

/* Forward and backward without ranks. */
static void run_whole(head *h)
{
    make_head(h, 0, vocab);
    lk_linear_cross_entropy_args *const a = &h->args.common;
    check("workspace", lk_linear_cross_entropy_forward_backward_workspace_bytes_bf16(a, &a->workspace_bytes));
    need(h, a->workspace_bytes);
    check("forward_backward", lk_linear_cross_entropy_forward_backward_bf16(a, NULL));
    check("cudaDeviceSynchronize", cudaDeviceSynchronize());
}

/* Prints how far a rank's results are from those without ranks. Returns 1 where that is too far. */
static int compare(int rank, const head *h, const head *whole, const double *dx)
{
    float loss = 0.0f, want = 0.0f;
    const lk_linear_cross_entropy_args *const a = &h->args.common, *const b = &whole->args.common;
    check("cudaMemcpy", cudaMemcpy(&loss, a->loss, 4, cudaMemcpyDeviceToHost));
    check("cudaMemcpy", cudaMemcpy(&want, b->loss, 4, cudaMemcpyDeviceToHost));
    double *const whole_dx = fetch(b->dx, tokens * hidden), *const dweight = fetch(a->dweight, a->vocab * hidden);
    double *const whole_dweight = fetch((uint16_t *)b->dweight + h->first * hidden, a->vocab * hidden);
    const double off_dx = difference(dx, whole_dx, tokens * hidden);
    const double off_dweight = difference(dweight, whole_dweight, a->vocab * hidden);
    printf("rank %d of %d, columns %lld to %lld: loss %.6f (%.6f without ranks), dx off by %.1e, dweight by %.1e\n", rank, ranks,
           (long long)h->first, (long long)(h->first + a->vocab) - 1, (double)loss, (double)want, off_dx, off_dweight);
    free(whole_dx), free(dweight), free(whole_dweight);
    return !(fabs((double)(loss - want)) <= 1e-5 * fabs((double)want) && off_dx < 6e-3 && off_dweight < 6e-3);
}

/* ---- Virtual ranks: three calls each, and the collectives by copies and sums --------------------------------------------- */

static int run_virtual(void)
{
    static head whole, rank_of[MOST_RANKS];
    const size_t states = (size_t)tokens * 16; /* without label_smoothing, entropy and argmax */
    char *const table = (char *)device_memory(states * (size_t)ranks);
    double *const dx = (double *)calloc((size_t)(tokens * hidden), 8);
    int failures = 0;
    run_whole(&whole);
    for (int i = 0; i < ranks; i++) { /* the states of each slice, and the collective: a copy into the table of all */
        head *const h = &rank_of[i];
        make_head(h, cut(i), cut(i + 1) - cut(i));
        lk_linear_cross_entropy_parallel_args *const a = &h->args;
        size_t *const bytes = &a->common.workspace_bytes;
        a->parallel = (lk_vocab_parallel){.vocab_start = cut(i), .vocab_total = vocab, .rank = i, .ranks = ranks};
        a->states = device_memory(states), a->all_states = table;
        check("workspace", lk_linear_cross_entropy_parallel_forward_workspace_bytes_bf16(a, bytes));
        need(h, *bytes);
        check("forward", lk_linear_cross_entropy_parallel_forward_bf16(a, NULL));
        check("cudaMemcpy", cudaMemcpy(table + (size_t)i * states, a->states, states, cudaMemcpyDeviceToDevice));
    }
    for (int i = 0; i < ranks; i++) { /* the results, and the gradients of each slice */
        head *const h = &rank_of[i];
        lk_linear_cross_entropy_parallel_args *const a = &h->args;
        size_t *const bytes = &a->common.workspace_bytes;
        check("workspace", lk_linear_cross_entropy_parallel_finish_workspace_bytes_bf16(a, bytes));
        need(h, *bytes);
        check("finish", lk_linear_cross_entropy_parallel_finish_bf16(a, NULL));
        check("workspace", lk_linear_cross_entropy_parallel_backward_workspace_bytes_bf16(a, bytes));
        need(h, *bytes);
        check("backward", lk_linear_cross_entropy_parallel_backward_bf16(a, NULL));
        double *const part = fetch(a->common.dx, tokens * hidden);
        for (int64_t k = 0; k < tokens * hidden; k++) dx[k] += part[k];
        free(part);
    }
    for (int i = 0; i < ranks; i++) failures += compare(i, &rank_of[i], &whole, dx), free_head(&rank_of[i]);
    free_head(&whole), cudaFree(table), free(dx);
    return failures;
}

/* ---- NCCL: one call per rank --------------------------------------------------------------------------------------------- */

#ifdef WITH_NCCL
static ncclUniqueId id;

static int run_rank(int rank, int device)
{
    static pthread_mutex_t output = PTHREAD_MUTEX_INITIALIZER;
    head whole, h;
    lk_nccl n;
    ncclComm_t comm;
    cudaStream_t stream;
    check("cudaSetDevice", cudaSetDevice(device));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = 8; /* blocks of NCCL, which run on the SMs that reduce_sms leaves it */
    check_nccl("ncclCommInitRankConfig", ncclCommInitRankConfig(&comm, ranks, id, rank, &config));
    check("lk_nccl_init", lk_nccl_init(&n, comm, ncclBfloat16, (size_t)hidden));
    check("cudaStreamCreate", cudaStreamCreate(&stream));
    run_whole(&whole);
    make_head(&h, cut(rank), cut(rank + 1) - cut(rank));
    lk_linear_cross_entropy_parallel_args *const a = &h.args;
    size_t *const bytes = &a->common.workspace_bytes;
    a->parallel = (lk_vocab_parallel){.vocab_start = cut(rank), .vocab_total = vocab, .rank = rank, .ranks = ranks, .user = &n,
                                      .all_gather = lk_nccl_all_gather, .reduce = lk_nccl_reduce, .reduce_sms = 8};
    check("workspace", lk_linear_cross_entropy_parallel_forward_backward_workspace_bytes_bf16(a, bytes));
    need(&h, *bytes);
    check("forward_backward", lk_linear_cross_entropy_parallel_forward_backward_bf16(a, stream));
    check("lk_nccl_join", lk_nccl_join(&n, stream));
    check("cudaStreamSynchronize", cudaStreamSynchronize(stream));
    double *const dx = fetch(a->common.dx, tokens * hidden);
    pthread_mutex_lock(&output);
    const int failures = compare(rank, &h, &whole, dx);
    pthread_mutex_unlock(&output);
    free(dx), free_head(&h), free_head(&whole), lk_nccl_destroy(&n), cudaStreamDestroy(stream);
    check_nccl("ncclCommDestroy", ncclCommDestroy(comm));
    return failures;
}

static void *run_thread(void *rank)
{
    return (void *)(intptr_t)run_rank((int)(intptr_t)rank, (int)(intptr_t)rank);
}

static int run_gpus(void)
{
    pthread_t thread[MOST_RANKS];
    int failures = 0;
    check("cudaGetDeviceCount", cudaGetDeviceCount(&ranks));
    check_nccl("ncclGetUniqueId", ncclGetUniqueId(&id));
    for (int i = 0; i < ranks; i++) pthread_create(&thread[i], NULL, run_thread, (void *)(intptr_t)i);
    for (int i = 0; i < ranks; i++) {
        void *failed = NULL;
        pthread_join(thread[i], &failed);
        failures += (int)(intptr_t)failed;
    }
    return failures;
}

/* Rank 0 writes the id; the others wait until the file has all of it. In the end it goes, so that the next run does not read it. */
static int run_process(int rank, const char *path)
{
    int devices = 0;
    char whole_name[4096];
    snprintf(whole_name, sizeof whole_name, "%s.part", path);
    if (rank == 0) {
        check_nccl("ncclGetUniqueId", ncclGetUniqueId(&id));
        FILE *const file = fopen(whole_name, "wb");
        if (!file || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file) || rename(whole_name, path)) return 1;
    }
    for (size_t got = 0; rank > 0 && got != 1;) {
        FILE *const file = fopen(path, "rb");
        if (file) got = fread(&id, sizeof id, 1, file), fclose(file);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    check("cudaGetDeviceCount", cudaGetDeviceCount(&devices));
    const int failures = run_rank(rank, rank % devices);
    if (rank == 0) remove(path);
    return failures;
}
#endif

int main(int argc, char **argv)
{
    int64_t *const sizes[] = {&tokens, &hidden, &vocab};
    const char *path = NULL;
    int rank = -1, gpus = 0, given = 0, failures = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--gpus")) gpus = 1;
        else if (!strcmp(argv[i], "--rank") && i + 1 < argc) rank = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--ranks") && i + 1 < argc) ranks = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--id") && i + 1 < argc) path = argv[++i];
        else if (given < 3) *sizes[given++] = atoll(argv[i]);
        else ranks = atoi(argv[i]);
    }
    if (tokens < 1 || hidden < 1 || vocab < 1 || ranks < 1 || ranks > MOST_RANKS) return fprintf(stderr, "sizes from 1 on, and up to 64 ranks\n"), 2;
    printf("%lld tokens of %lld, %lld columns, bf16\n", (long long)tokens, (long long)hidden, (long long)vocab);
#ifdef WITH_NCCL
    failures = gpus ? run_gpus() : path && rank >= 0 ? run_process(rank, path) : run_virtual();
#else
    if (gpus || path || rank >= 0) return fprintf(stderr, "this program was built without NCCL: make example-parallel NCCL=DIR\n"), 2;
    failures = run_virtual();
#endif
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures != 0;
}
