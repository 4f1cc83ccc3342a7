// SPDX-License-Identifier: MIT
/* bench.h - what every bench/<op>.cu shares: timing, ceilings, checks, rows.
 *
 * Use        From the project's root, logsumexp being any op:
 *                make bench-logsumexp                          all cases; rewrites the op's rows in bench/results/<gpu>.csv
 *                make bench-logsumexp ARGS="--case SUBSTRING"  the cases whose "direction dtype case" holds SUBSTRING
 *                make bench-logsumexp ARGS=--quick             fewer replays, no CSV
 *                make bench-logsumexp ARGS="--path N"          forces args.path; provider "lk:path=N", no CSV
 *                make bench-logsumexp ARGS=--host              only the host's time of a call, no CSV
 *                make bench-logsumexp ARGS=--list              names the cases and measures nothing
 *            BENCH_CSV=FILE in the environment replaces bench/results/<gpu>.csv.
 *
 * A bench    is a static array of cases and, for each, a bench_case: the least traffic in bytes and four functions (fill,
 *            launch, naive, check); a fifth, workspace, where the operation needs scratch. A second array has the small calls
 *            that are timed on the host. bench_run() does the rest.
 *
 * Buffers    A case gets sets of buffers: read (the inputs that count as traffic), write (the outputs that count), in and out
 *            (small tensors that do not count, such as lse). Launch i of a replay uses set i modulo the number of sets; all
 *            sets together exceed four times the L2, so every launch finds its inputs in DRAM only.
 *
 * Time       Operation, baseline and ceiling are CUDA graphs of back-to-back launches over the same sets, as many for the
 *            operation as for the ceiling, about 1 ms a replay. Replays alternate, graph by graph, and are queued ahead of
 *            the GPU, so that no launch waits for the host. ms is the median over the replays of replay time / launches, and
 *            p10 and p90 are percentiles of the same.
 *
 * Ceiling    A kernel that reads set->read and writes set->write and computes nothing, in 16-byte accesses, launched with the
 *            attributes of the operation (programmatic stream serialisation). All launch shapes get a few replays, the best
 *            two then alternate with the operation; the better median is the ceiling. It prefetches
 *            nothing before it waits for the previous launch. logsumexp's forward, cross_entropy and srms_norm do, while that
 *            launch still runs, so that short ones may be above the ceiling. of_ceiling = ceiling ms / own ms.
 *            On an H200 a ceiling over 3 % slower than it was measured before (bench_known_gb_per_s) makes the row
 *            "invalid: ceiling"; an of_ceiling above 1.03 makes it "invalid: above ceiling". Both are written all the same,
 *            with that note.
 *
 * Bare       Where an operation is matmuls, its case names another yardstick, bare: the same matmuls and nothing between them.
 *            One replay of the operation and one of bare alternate, 21 of each, and nothing else runs between them: both find
 *            the same card, hot or cool, so of_gemm = bare ms / own ms (medians) needs no rule about the card. The baseline
 *            alternates with bare by itself, 7 times, since the card rests in its passes over memory and bare is faster after
 *            it. Where bare differs by over 3 % from an earlier study of the H200 (known_ms), a note says so, for
 *            information: "card: bare took 1.05 times as long as in an earlier study".
 *
 * Host       The time that the host spends in a call: 1000 calls of a small shape in groups of 100 (matmuls: of 10) that
 *            wait for nothing; the median group. Printed as "host: ... us per call" after the rows, no CSV.
 *
 * Check      Before it is timed, the graph that will be timed runs once over poisoned outputs; check() then compares the last set
 *            with double on the host. A provider that fails prints FAIL and has no row.
 *
 * CSV        Rows of the cases that ran replace their old rows, and all rows of the op when all cases ran; rows of other ops
 *            stay. The file is sorted by op, then in the order of the bench's array, and appears by rename. BENCH_COLUMNS names
 *            the columns. note: "invalid: ..." and "card: ..." as above, and what a case says of itself; mostly empty.
 *
 * Needs      lk/lk_base.cuh; CUDA 12.3 or later (programmatic launches in graphs).
 */
#ifndef BENCH_H
#define BENCH_H

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "lk/lk_base.cuh"

#ifndef BENCH_COMMIT
#define BENCH_COMMIT "none"
#endif
#ifndef BENCH_CODE
#define BENCH_CODE "" /* the hash of the op's machine code, by tests/code */
#endif

#define BENCH_CUDA(call) bench_cuda(call, #call, __FILE__, __LINE__)

static inline void bench_cuda(cudaError_t error, const char *call, const char *file, int line)
{
    if (error == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(error));
    exit(1);
}

/* ---- Ceilings ----------------------------------------------------------------------------------------------------------- */

/* A unit is one 16-byte vector from each of R input streams and one to each of W output streams; stream s holds vectors
 * [s units, (s + 1) units). */
typedef struct {
    const uint4 *read;
    uint4 *write;
    uint4 *sink;    /* where a kernel without outputs would store */
    int64_t units;
    uint32_t never; /* the one xor of all values read that is stored to sink: unknown to the compiler, so it must load */
} bench_stream_args;

template <bool CS> LK_DEVICE uint4 bench_load(const uint4 *from)
{
    if constexpr (CS) return __ldcs(from);
    else return *from;
}

template <bool CS> LK_DEVICE void bench_store(uint4 *to, uint4 v)
{
    if constexpr (CS) __stcs(to, v);
    else *to = v;
}

LK_DEVICE uint4 bench_xor(uint4 a, uint4 b)
{
    return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}

/* What a thread does with the R vectors of unit i: copies them to the W outputs, the surplus inputs folded into the first
 * output; without outputs, into seen. */
template <int R, int W, bool CS>
LK_DEVICE void bench_finish_unit(const bench_stream_args &p, int64_t i, uint4 (&v)[R], uint32_t *seen)
{
    if constexpr (W == 0) {
#pragma unroll
        for (int r = 0; r < R; r++) *seen ^= v[r].x ^ v[r].y ^ v[r].z ^ v[r].w;
    } else {
#pragma unroll
        for (int r = W; r < R; r++) v[0] = bench_xor(v[0], v[r]);
#pragma unroll
        for (int w = 0; w < W; w++) bench_store<CS>(p.write + w * p.units + i, v[w % R]);
    }
}

/* A block owns chunks of U THREADS consecutive units, a thread every THREADS-th unit of them. Its loads of a chunk come before
 * its stores; without stores ptxas starts to fold the first of 8 when 5 are in flight, to stay at 32 registers and 2048
 * threads an SM. CS: evict-first accesses. */
template <int R, int W, int U, int THREADS, bool CS>
LK_KERNEL void __launch_bounds__(THREADS) bench_stream_kernel(bench_stream_args p)
{
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    uint32_t seen = 0;
    int64_t i = (int64_t)blockIdx.x * (U * THREADS) + threadIdx.x;
#pragma unroll 1
    for (; i + (U - 1) * THREADS < p.units; i += (int64_t)gridDim.x * (U * THREADS)) {
        uint4 v[U][R];
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int r = 0; r < R; r++) v[u][r] = bench_load<CS>(p.read + r * p.units + i + u * THREADS);
#pragma unroll
        for (int u = 0; u < U; u++) bench_finish_unit<R, W, CS>(p, i + u * THREADS, v[u], &seen);
    }
#pragma unroll 1
    for (; i < p.units; i += THREADS) { /* what is left of the last chunk, if it is this block's */
        uint4 v[R];
#pragma unroll
        for (int r = 0; r < R; r++) v[r] = bench_load<CS>(p.read + r * p.units + i);
        bench_finish_unit<R, W, CS>(p, i, v, &seen);
    }
    if (W == 0 && seen == p.never) *p.sink = make_uint4(seen, seen, seen, seen);
}

typedef struct {
    void (*kernel)(bench_stream_args);
    int threads, units; /* a thread's units in flight */
    bool cs;
    int blocks_per_sm; /* of a persistent grid; 0: one chunk a block */
} bench_shape;

typedef struct {
    int reads, writes;
    const bench_shape *shapes;
    int count;
} bench_mix;

#define BENCH_SHAPES_MOST 16

/* The launch shapes of the mix R : W, e.g. bench_streams<1, 2> for one byte read and two written. Loads or stores in flight
 * stand in the macro's second place: 8 vectors are 32 registers, which still lets 1024 threads run on an SM. */
template <int R, int W> static bench_mix bench_streams(void)
{
    constexpr int most = R > W ? R : W;
#define BENCH_SHAPE(threads, flight, cs, blocks_per_sm)                                                                        \
    {bench_stream_kernel<R, W, (flight < most ? 1 : flight / most), threads, cs>, threads,                                     \
     (flight < most ? 1 : flight / most), cs, blocks_per_sm}
    static const bench_shape shapes[] = {
        BENCH_SHAPE(128, 2, false, 0),  BENCH_SHAPE(128, 4, false, 0), BENCH_SHAPE(256, 2, false, 0),
        BENCH_SHAPE(256, 4, false, 0),  BENCH_SHAPE(256, 4, true, 0),  BENCH_SHAPE(256, 8, false, 0),
        BENCH_SHAPE(256, 8, true, 0),   BENCH_SHAPE(512, 2, true, 0),  BENCH_SHAPE(512, 4, false, 0),
        BENCH_SHAPE(512, 4, true, 0),   BENCH_SHAPE(1024, 4, true, 0), BENCH_SHAPE(256, 8, true, 4),
        BENCH_SHAPE(512, 4, false, 4),  BENCH_SHAPE(1024, 4, true, 2),
    };
#undef BENCH_SHAPE
    static_assert(sizeof shapes / sizeof shapes[0] <= BENCH_SHAPES_MOST, "raise BENCH_SHAPES_MOST");
    return {R, W, shapes, (int)(sizeof shapes / sizeof shapes[0])};
}

/* What a plain ceiling reached on our H200, GB/s by bytes of traffic, without programmatic launches: the medians of
 * measured.md, and of its ranges the lower end. */
typedef struct {
    double mib, gb_per_s;
} bench_known;

static const bench_known bench_known_read[] = {{8, 2621},   {16, 3355},  {32, 3857},  {64, 4221},
                                               {128, 4430}, {256, 4519}, {512, 4604}, {1024, 4662}};
static const bench_known bench_known_copy[] = {{16, 3166},  {32, 3608},  {64, 3857},   {128, 4043},
                                               {256, 4149}, {512, 4204}, {1024, 4241}, {2048, 4263}};
static const bench_known bench_known_three[] = {{4.5, 1700}, {18, 3000}, {72, 3800}, {144, 3960}, {288, 4080}, {1152, 4130}};
static const bench_known bench_known_four[] = {{6, 2000}, {24, 3200}, {96, 3850}, {192, 4000}, {384, 4110}};

/* Interpolated in the logarithm of the size; above the table its last value, below it 0: nothing is known there. */
static double bench_known_at(const bench_known *known, int count, double mib)
{
    if (mib < known[0].mib * 0.999) return 0;
    for (int i = 1; i < count; i++)
        if (mib < known[i].mib) {
            const double share = log(mib / known[i - 1].mib) / log(known[i].mib / known[i - 1].mib);
            return known[i - 1].gb_per_s + share * (known[i].gb_per_s - known[i - 1].gb_per_s);
        }
    return known[count - 1].gb_per_s;
}

/* 0 where nothing is known: another card, another mix, too small. */
static double bench_known_gb_per_s(const char *gpu, bench_mix mix, double bytes)
{
    const double mib = bytes / (1 << 20);
    if (strcmp(gpu, "h200") != 0) return 0;
    if (mix.writes == 0) return bench_known_at(bench_known_read, 8, mib);
    if (mix.reads == 1 && mix.writes == 1) return bench_known_at(bench_known_copy, 8, mib);
    if (mix.reads + mix.writes == 3) return bench_known_at(bench_known_three, 6, mib);
    if (mix.reads + mix.writes == 4) return bench_known_at(bench_known_four, 5, mib);
    return 0;
}

/* ---- Cases -------------------------------------------------------------------------------------------------------------- */

/* One set of buffers; each starts on 256 bytes. workspace is shared by all sets: launches follow one another. */
typedef struct {
    char *read, *write, *in, *out, *workspace;
} bench_buffers;

typedef struct bench_case bench_case;
typedef lk_status bench_launch(const bench_case *c, const bench_buffers *set, int path, cudaStream_t stream);

struct bench_case {
    const char *name, *direction, *dtype; /* name as in goals.csv */
    size_t read_bytes, write_bytes;       /* the least traffic, and the sizes of set->read and set->write */
    size_t in_bytes, out_bytes;           /* of the small tensors that the goals do not count */
    size_t workspace_bytes;               /* of the operation: bench_run asks workspace() */
    bench_mix mix;                        /* read_bytes : write_bytes in small numbers */
    const void *context;                  /* the op's own */
    void (*fill)(const bench_case *c, const bench_buffers *set, int number, cudaStream_t stream); /* read and in */
    bench_launch *launch, *naive;         /* naive may be NULL */
    bench_launch *peer;                   /* a library's, timed as naive is, with a ceiling alone; NULL: none */
    const char *peer_name;                /* its provider */
    size_t (*workspace)(const bench_case *c, int path); /* what the query says, 0 when it refuses; NULL means 0 */
    /* Whether write and out are right; says what is wrong in `why`. The stream is idle. */
    bool (*check)(const bench_case *c, const bench_buffers *set, char *why, size_t why_bytes);
    bench_launch *bare;  /* the matmuls alone, in place of a ceiling; NULL: a ceiling by mix. Alike for all cases of a bench */
    double flops;        /* of the matmuls */
    double known_ms;     /* of bare in the study of an H200; 0: unknown */
    size_t naive_bytes;  /* naive's scratch, for memory_mb */
    const char *remark;  /* printed beside the operation's row; NULL: none */
    const char *note;    /* the same, and kept in the CSV */
};

/* `function` of the case's type, of the arguments and what follows. */
#define OF_TYPE(s, function, ...)                                                                                              \
    (strcmp((s)->dtype, "f32") == 0   ? function##_f32(__VA_ARGS__)                                                            \
     : strcmp((s)->dtype, "f16") == 0 ? function##_f16(__VA_ARGS__)                                                            \
                                      : function##_bf16(__VA_ARGS__))

/* Values of a case's inputs: a sum of four uniform values, near enough to a normal one, from a hash of the index. */
typedef struct {
    void *out;
    int64_t count;
    uint64_t seed;
    float sigma;
} bench_fill_args;

template <class T> LK_KERNEL void bench_fill_kernel(bench_fill_args p)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t h = (p.seed << 40) + (uint64_t)i + 1; /* splitmix64 */
        h *= 0x9e3779b97f4a7c15u;
        h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
        h = (h ^ h >> 27) * 0x94d049bb133111ebu;
        h ^= h >> 31;
        const int sum = (int)(h & 0xffff) + (int)(h >> 16 & 0xffff) + (int)(h >> 32 & 0xffff) + (int)(h >> 48);
        /* Four uniform values below 2^16 sum to 131070 on average, with a variance of 2^32 / 3. */
        lk_put((T *)p.out + i, p.sigma * 1.7320508f / 65536.0f * (float)(sum - 131070));
    }
}

static inline void bench_fill(const char *dtype, void *out, int64_t count, float sigma, uint64_t seed, cudaStream_t stream)
{
    const bench_fill_args args = {out, count, seed, sigma};
    void (*kernel)(bench_fill_args) = bench_fill_kernel<lk_f32>;
    if (strcmp(dtype, "bf16") == 0) kernel = bench_fill_kernel<lk_bf16>;
    if (strcmp(dtype, "f16") == 0) kernel = bench_fill_kernel<lk_f16>;
    const int64_t blocks = lk_ceil_div(count, 256);
    if (count) BENCH_CUDA(lk_launch(kernel, blocks < 8192 ? blocks : 8192, 256, 0, stream, args));
}

/* Outputs are poisoned with all-ones words, a NaN in every type; how many words are still so. */
typedef struct {
    const uint32_t *words;
    int64_t count;
    unsigned long long *left;
} bench_poison_args;

LK_KERNEL void bench_poison_kernel(bench_poison_args p)
{
    unsigned long long left = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (int64_t)gridDim.x * blockDim.x)
        left += p.words[i] == 0xffffffffu;
    if (left) atomicAdd(p.left, left);
}

/* ---- Timing ------------------------------------------------------------------------------------------------------------- */

#define BENCH_EVENTS 1024
#define BENCH_CASES_MOST 256

/* The CSV's columns, in order; nothing else lists them. A bench fills a new one with a bench_set in bench_finish_row. Rows of
 * an older file, which lacks it, have it empty. */
#define BENCH_COLUMNS(X)                                                                                                       \
    X(op) X(direction) X(dtype) X(case) X(provider) X(ms) X(gb_per_s) X(tflop_per_s) X(of_ceiling) X(of_gemm) X(workspace_mb)  \
    X(memory_mb) X(gpu) X(commit) X(code) X(note)
#define BENCH_COLUMN_NUMBER(name) bench_column_##name,
#define BENCH_COLUMN_NAME(name) #name,
enum { BENCH_COLUMNS(BENCH_COLUMN_NUMBER) BENCH_COLUMN_COUNT };
static const char *const bench_column_names[] = {BENCH_COLUMNS(BENCH_COLUMN_NAME)};

typedef struct {
    char *field[BENCH_COLUMN_COUNT]; /* NULL: empty */
    int order;                       /* within its op */
} bench_row;

typedef struct {
    const char *op;
    const bench_case *cases;
    int count;
    const char *filter;
    bool quick, list, host;
    int path;
    char gpu[64];
    int64_t l2_bytes, memory_bytes;
    lk_device device;
    cudaStream_t stream;
    cudaEvent_t events[BENCH_EVENTS];
    bool ran[BENCH_CASES_MOST];
    int measured, failed, invalid, skipped;
    bench_row *rows;
    int row_count;
} bench;

/* What a case's launches work on. */
typedef struct {
    char *memory;
    size_t set_bytes;
    int sets, launches;
    unsigned long long *poison_left;
    uint4 *sink;
} bench_arena;

/* One thing to time: an operation, its baseline, or a ceiling, by shape or by the matmuls that launch makes. */
typedef struct {
    const char *provider;
    bench_launch *launch;
    const bench_shape *shape;
    bool ceiling;
    int launches; /* a replay */
    cudaGraphExec_t graph;
    float ms, p10, p90;
} bench_subject;

static size_t bench_round_up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

static bench_buffers bench_set(const bench_case *c, const bench_arena *arena, int number)
{
    bench_buffers set;
    set.workspace = arena->memory + 256; /* behind the poison counter and the sink */
    set.read = set.workspace + bench_round_up(c->workspace_bytes) + (size_t)number * arena->set_bytes;
    set.write = set.read + bench_round_up(c->read_bytes);
    set.in = set.write + bench_round_up(c->write_bytes);
    set.out = set.in + bench_round_up(c->in_bytes);
    return set;
}

/* sets: how many; 0: as many as the L2 cannot hold. */
static bool bench_allocate(const bench *b, const bench_case *c, int sets, bench_arena *arena)
{
    const size_t traffic = c->read_bytes + c->write_bytes;
    arena->set_bytes = bench_round_up(c->read_bytes) + bench_round_up(c->write_bytes) + bench_round_up(c->in_bytes) +
                       bench_round_up(c->out_bytes);
    arena->sets = 1 + (int)lk_ceil_div(4 * b->l2_bytes, (int64_t)traffic);
    if (arena->sets < 2) arena->sets = 2;
    if (sets) arena->sets = sets;
    const double launch_ms = 2e-3 + (double)traffic / 4.3e9 + c->flops / 7e11; /* a guess, to make a replay about 1 ms */
    arena->launches = arena->sets * (int)ceil(1.0 / (launch_ms * arena->sets));
    const size_t bytes = 256 + bench_round_up(c->workspace_bytes) + (size_t)arena->sets * arena->set_bytes;
    if (cudaMalloc((void **)&arena->memory, bytes) != cudaSuccess) {
        cudaGetLastError(); /* clears it */
        return false;
    }
    arena->poison_left = (unsigned long long *)arena->memory;
    arena->sink = (uint4 *)(arena->memory + 128);
    for (int i = 0; i < arena->sets; i++) {
        const bench_buffers set = bench_set(c, arena, i);
        BENCH_CUDA(cudaMemsetAsync(set.write, 0, c->write_bytes, b->stream));
        c->fill(c, &set, i, b->stream);
    }
    BENCH_CUDA(cudaStreamSynchronize(b->stream));
    return true;
}

static lk_status bench_launch_one(const bench *b, const bench_case *c, const bench_arena *arena, const bench_subject *s,
                                  int number)
{
    const bench_buffers set = bench_set(c, arena, number % arena->sets);
    if (!s->shape) return s->launch(c, &set, b->path, b->stream);
    const bench_mix mix = c->mix;
    const int64_t units = (int64_t)(c->read_bytes / 16) / mix.reads; /* of the outputs too: bench_run checks the ratio */
    const bench_stream_args args = {(const uint4 *)set.read, (uint4 *)set.write, arena->sink, units, 0x9e3779b9u};
    int64_t grid = lk_ceil_div(units, (int64_t)s->shape->threads * s->shape->units);
    const int64_t persistent = (int64_t)s->shape->blocks_per_sm * b->device.sms;
    if (persistent && grid > persistent) grid = persistent;
    return lk_launch_pdl("ceiling", &b->device, s->shape->kernel, grid, 1, s->shape->threads, 0, b->stream, args);
}

/* Captures the launches of one replay. The first launch of a kernel loads its code, so one comes before the capture. */
static lk_status bench_capture(const bench *b, const bench_case *c, const bench_arena *arena, bench_subject *s)
{
    const lk_status status = bench_launch_one(b, c, arena, s, 0);
    if (status) return status;
    BENCH_CUDA(cudaStreamSynchronize(b->stream));
    cudaGraph_t graph;
    BENCH_CUDA(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < s->launches; i++) {
        const lk_status launched = bench_launch_one(b, c, arena, s, i);
        if (launched) {
            fprintf(stderr, "%s refuses to be captured: %s\n", s->provider, lk_status_string(launched));
            exit(1);
        }
    }
    BENCH_CUDA(cudaStreamEndCapture(b->stream, &graph));
    BENCH_CUDA(cudaGraphInstantiate(&s->graph, graph, 0));
    BENCH_CUDA(cudaGraphDestroy(graph));
    BENCH_CUDA(cudaGraphUpload(s->graph, b->stream));
    return LK_OK;
}

static int bench_compare_floats(const void *a, const void *b)
{
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

/* How many replays a case gets: matmuls last too long for as many as kernels get, and most of all for those of a baseline. */
static int bench_rounds(const bench *b, bool matmuls, bool baseline)
{
    if (matmuls && baseline) return b->quick ? 3 : 7;
    return matmuls ? (b->quick ? 5 : 21) : b->quick ? 11 : 51;
}

/* Replays the subjects in turn, `rounds` times after 2 rounds of warm-up, and fills in their times. */
static void bench_replay(const bench *b, bench_subject *subjects, int count, int rounds)
{
    if (rounds > (BENCH_EVENTS - 1) / count) rounds = (BENCH_EVENTS - 1) / count;
    for (int round = -2; round < rounds; round++) {
        if (round == 0) BENCH_CUDA(cudaEventRecord(b->events[0], b->stream));
        for (int i = 0; i < count; i++) {
            BENCH_CUDA(cudaGraphLaunch(subjects[i].graph, b->stream));
            if (round >= 0) BENCH_CUDA(cudaEventRecord(b->events[1 + round * count + i], b->stream));
        }
    }
    BENCH_CUDA(cudaStreamSynchronize(b->stream));
    for (int i = 0; i < count; i++) {
        float ms[BENCH_EVENTS];
        for (int round = 0; round < rounds; round++) {
            const int at = round * count + i;
            BENCH_CUDA(cudaEventElapsedTime(&ms[round], b->events[at], b->events[at + 1]));
            ms[round] /= (float)subjects[i].launches;
        }
        qsort(ms, (size_t)rounds, sizeof ms[0], bench_compare_floats);
        subjects[i].ms = 0.5f * (ms[(rounds - 1) / 2] + ms[rounds / 2]);
        subjects[i].p10 = ms[(rounds - 1) / 10];
        subjects[i].p90 = ms[(rounds - 1) - (rounds - 1) / 10];
    }
}

static int bench_compare_subjects(const void *a, const void *b)
{
    return bench_compare_floats(&((const bench_subject *)a)->ms, &((const bench_subject *)b)->ms);
}

/* The ceilings worth a full count: fills in the best two and returns 2, or the one bare and returns 1. */
static int bench_choose_ceilings(const bench *b, const bench_case *c, const bench_arena *arena, bench_subject *best)
{
    bench_subject all[BENCH_SHAPES_MOST] = {};
    if (c->bare) {
        best->provider = "bare", best->ceiling = true, best->launch = c->bare, best->launches = arena->launches;
        BENCH_CUDA((cudaError_t)bench_capture(b, c, arena, best));
        return 1;
    }
    for (int i = 0; i < c->mix.count; i++) {
        all[i].provider = "ceiling", all[i].ceiling = true;
        all[i].shape = &c->mix.shapes[i];
        all[i].launches = arena->launches;
        BENCH_CUDA((cudaError_t)bench_capture(b, c, arena, &all[i]));
    }
    bench_replay(b, all, c->mix.count, 7);
    qsort(all, (size_t)c->mix.count, sizeof all[0], bench_compare_subjects);
    for (int i = 0; i < c->mix.count; i++)
        if (i < 2) best[i] = all[i];
        else BENCH_CUDA(cudaGraphExecDestroy(all[i].graph));
    return 2;
}

/* Runs the subject's graph over poisoned outputs and checks the last set. */
static bool bench_check(const bench *b, const bench_case *c, const bench_arena *arena, const bench_subject *s, char *why,
                        size_t why_bytes)
{
    const bench_buffers set = bench_set(c, arena, arena->sets - 1);
    BENCH_CUDA(cudaMemsetAsync(set.write, 0xff, c->write_bytes, b->stream));
    BENCH_CUDA(cudaMemsetAsync(set.out, 0xff, c->out_bytes, b->stream));
    BENCH_CUDA(cudaMemsetAsync(arena->poison_left, 0, sizeof *arena->poison_left, b->stream));
    BENCH_CUDA(cudaGraphLaunch(s->graph, b->stream));
    const bench_poison_args write = {(const uint32_t *)set.write, (int64_t)(c->write_bytes / 4), arena->poison_left};
    const bench_poison_args out = {(const uint32_t *)set.out, (int64_t)(c->out_bytes / 4), arena->poison_left};
    if (write.count) BENCH_CUDA(lk_launch(bench_poison_kernel, 1024, 256, 0, b->stream, write));
    if (out.count) BENCH_CUDA(lk_launch(bench_poison_kernel, 16, 256, 0, b->stream, out));
    unsigned long long left;
    BENCH_CUDA(cudaMemcpyAsync(&left, arena->poison_left, sizeof left, cudaMemcpyDeviceToHost, b->stream));
    BENCH_CUDA(cudaStreamSynchronize(b->stream));
    snprintf(why, why_bytes, "%llu words of the output were not written", left);
    return left == 0 && c->check(c, &set, why, why_bytes);
}

/* ---- Rows --------------------------------------------------------------------------------------------------------------- */

static bench_row *bench_new_row(bench *b, int order)
{
    b->rows = (bench_row *)realloc(b->rows, (size_t)(b->row_count + 1) * sizeof b->rows[0]);
    bench_row *row = &b->rows[b->row_count++];
    *row = {};
    row->order = order;
    return row;
}

static const char *bench_field(const bench_row *row, int column)
{
    return row->field[column] ? row->field[column] : "";
}

/* Fields are never quoted: commas become semicolons, quotes and line ends go. */
__attribute__((format(printf, 3, 4))) static void bench_set(bench_row *row, int column, const char *format, ...)
{
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    for (char *p = text; *p; p++)
        if (*p == ',') *p = ';';
        else if (*p == '"') *p = '\'';
        else if (*p == '\r' || *p == '\n') *p = ' ';
    free(row->field[column]);
    row->field[column] = strdup(text);
}

/* Prints a subject's row and keeps it for the CSV, with `note`, and not the remark. */
static void bench_finish_row(bench *b, int number, int chosen, const bench_case *c, const bench_subject *s,
                             const bench_subject *ceiling, const char *note, const char *remark)
{
    const double bytes = (double)(c->read_bytes + c->write_bytes), mib = 1.0 / (1 << 20);
    const double gb_per_s = bytes / s->ms * 1e-6, tflop_per_s = c->flops / s->ms * 1e-9;
    bench_row *row = bench_new_row(b, (int)(c - b->cases));
    bench_set(row, bench_column_op, "%s", b->op);
    bench_set(row, bench_column_direction, "%s", c->direction);
    bench_set(row, bench_column_dtype, "%s", c->dtype);
    bench_set(row, bench_column_case, "%s", c->name);
    bench_set(row, bench_column_provider, "%s", s->provider);
    bench_set(row, bench_column_ms, "%.5g", s->ms);
    if (c->bare) bench_set(row, bench_column_tflop_per_s, "%.5g", tflop_per_s);
    else bench_set(row, bench_column_gb_per_s, "%.5g", gb_per_s);
    const int share = c->bare ? bench_column_of_gemm : bench_column_of_ceiling;
    if (!s->ceiling) {
        const double small = (double)(c->in_bytes + c->out_bytes);
        const double workspace = (double)(strcmp(s->provider, "naive") == 0 ? c->naive_bytes : c->workspace_bytes);
        bench_set(row, share, "%.3f", ceiling->ms / s->ms);
        bench_set(row, bench_column_workspace_mb, "%.6g", workspace * mib);
        bench_set(row, bench_column_memory_mb, "%.6g", (bytes + small + workspace) * mib);
    }
    bench_set(row, bench_column_gpu, "%s", b->gpu);
    bench_set(row, bench_column_commit, "%s", BENCH_COMMIT);
    bench_set(row, bench_column_code, "%s", BENCH_CODE);
    bench_set(row, bench_column_note, "%s", note);
    printf("| %d/%d | %s | %s | %s | %s | %.5g | %.4g-%.4g | %.0f | %s | %.5g | %s%s%s |\n", number, chosen, c->name,
           c->direction, c->dtype, s->provider, s->ms, s->p10, s->p90, c->bare ? tflop_per_s : gb_per_s,
           bench_field(row, share), ceiling->ms, note, note[0] && remark[0] ? "; " : "", remark);
    fflush(stdout);
}

/* The case of this op that a row belongs to, -1 when it is another op's, b->count when the array no longer has it. */
static int bench_case_of(const bench *b, const bench_row *row)
{
    if (strcmp(bench_field(row, bench_column_op), b->op) != 0) return -1;
    for (int i = 0; i < b->count; i++) {
        const bench_case *c = &b->cases[i];
        if (strcmp(bench_field(row, bench_column_direction), c->direction) == 0 &&
            strcmp(bench_field(row, bench_column_dtype), c->dtype) == 0 &&
            strcmp(bench_field(row, bench_column_case), c->name) == 0)
            return i;
    }
    return b->count;
}

/* By op, then by order. */
static bool bench_row_before(const bench_row *x, const bench_row *y)
{
    const int by_op = strcmp(bench_field(x, bench_column_op), bench_field(y, bench_column_op));
    return by_op ? by_op < 0 : x->order < y->order;
}

/* Adds the rows of the file at `path` that no new row replaces; false, with a sentence on stderr, when it has a column that is
 * none of BENCH_COLUMNS. */
static bool bench_read_csv(bench *b, const char *path)
{
    int columns[BENCH_COLUMN_COUNT], count = 0;
    bool all = true;
    for (int i = 0; i < b->count; i++) all = all && b->ran[i];
    FILE *old = fopen(path, "r");
    char line[2048];
    for (int number = 0; old && fgets(line, sizeof line, old); number++) {
        line[strcspn(line, "\r\n")] = 0;
        if (!line[0]) continue;
        bench_row read = {};
        char *rest = line;
        for (int i = 0; rest; i++) {
            const char *text = strsep(&rest, ",");
            int known = 0;
            while (number == 0 && known < BENCH_COLUMN_COUNT && strcmp(text, bench_column_names[known]) != 0) known++;
            if (known == BENCH_COLUMN_COUNT || i == (number ? count : BENCH_COLUMN_COUNT)) {
                fprintf(stderr, "%s, line %d: '%s' is in no column of this bench's; the file is left as it is\n", path,
                        number + 1, text);
                fclose(old);
                return false;
            }
            if (number == 0) columns[count++] = known;
            else bench_set(&read, columns[i], "%s", text);
        }
        const int at = number ? bench_case_of(b, &read) : 0;
        const bool replaced = at >= 0 && (all || (at < b->count && b->ran[at]));
        if (number && !replaced) {
            read.order = at < 0 ? number : at;
            *bench_new_row(b, 0) = read;
        }
    }
    if (old) fclose(old);
    return true;
}

/* Merges the new rows into the file at `path`; false, with a sentence on stderr, when that is not possible. */
static bool bench_write_csv(bench *b, const char *path)
{
    if (!bench_read_csv(b, path)) return false;
    for (int i = 1; i < b->row_count; i++) { /* insertion sort: rows of one case keep their order */
        const bench_row row = b->rows[i];
        int to = i;
        for (; to > 0 && bench_row_before(&row, &b->rows[to - 1]); to--) b->rows[to] = b->rows[to - 1];
        b->rows[to] = row;
    }

    char part[1100];
    for (size_t i = 1; path[i]; i++) /* the folders above it */
        if (path[i] == '/' && i < sizeof part) {
            memcpy(part, path, i);
            part[i] = 0;
            mkdir(part, 0777);
        }
    snprintf(part, sizeof part, "%s.part", path);
    FILE *file = fopen(part, "w");
    bool written = file != NULL;
    for (int i = -1; written && i < b->row_count; i++)
        for (int k = 0; written && k < BENCH_COLUMN_COUNT; k++)
            written = fprintf(file, "%s%c", i < 0 ? bench_column_names[k] : bench_field(&b->rows[i], k),
                              k + 1 < BENCH_COLUMN_COUNT ? ',' : '\n') > 0;
    if (file) written = fclose(file) == 0 && written;
    if (written && rename(part, path) == 0) return true;
    fprintf(stderr, "%s cannot be written: %s\n", path, strerror(errno));
    return false;
}

/* ---- The run ------------------------------------------------------------------------------------------------------------ */

static void bench_measure(bench *b, const bench_case *c, int number, int chosen)
{
    if (isatty(2))
        fprintf(stderr, "case %d of %d: %s %s %s %s\033[K\r", number, chosen, b->op, c->direction, c->dtype, c->name);
    bench_arena arena = {};
    if (!bench_allocate(b, c, 0, &arena)) {
        printf("| %d/%d | %s | %s | %s | | | | | | | FAIL: not enough memory for %d sets of %.0f MiB |\n", number, chosen,
               c->name, c->direction, c->dtype, arena.sets, (double)arena.set_bytes / (1 << 20));
        b->failed++;
        return;
    }

    char forced[32] = "lk";
    if (b->path) snprintf(forced, sizeof forced, "lk:path=%d", b->path);
    bench_subject candidates[3] = {};
    candidates[0].provider = forced, candidates[0].launch = c->launch, candidates[0].launches = arena.launches;
    /* The baseline may be many times slower: a quarter of the launches, in whole turns of the sets. */
    candidates[1].provider = "naive", candidates[1].launch = b->path ? NULL : c->naive;
    candidates[1].launches = arena.sets * (int)lk_ceil_div(arena.launches, 4 * arena.sets);
    candidates[2] = candidates[1];
    candidates[2].provider = c->peer_name, candidates[2].launch = b->path ? NULL : c->peer;
    bench_subject subjects[5] = {};
    int count = 0;
    for (int i = 0; i < 3; i++) {
        bench_subject s = candidates[i];
        if (!s.launch || (i > 0 && count == 0)) continue; /* no baseline beside an operation that is wrong */
        char why[640] = "";
        const lk_status status = bench_capture(b, c, &arena, &s);
        const bool skipped = i == 0 && b->path && status == LK_ERR_PATH;
        if (status) snprintf(why, sizeof why, "%s (%s)", lk_last_error(), lk_status_string(status));
        if (!status && bench_check(b, c, &arena, &s, why, sizeof why)) {
            subjects[count++] = s;
            continue;
        }
        printf("| %d/%d | %s | %s | %s | %s | | | | | | %s: %s |\n", number, chosen, c->name, c->direction, c->dtype,
               s.provider, skipped ? "skipped" : "FAIL", why);
        fflush(stdout);
        if (s.graph) BENCH_CUDA(cudaGraphExecDestroy(s.graph));
        if (skipped) b->skipped++;
        else b->failed++;
    }

    if (count) {
        const int operations = count;
        count += bench_choose_ceilings(b, c, &arena, subjects + count);
        const bench_subject *ceiling = &subjects[operations], *yardsticks[3] = {ceiling, ceiling, ceiling};
        bench_subject pairs[2][2]; /* what alternates where there is a bare: the operation with it, the baseline with it */
        if (c->bare) {
            for (int i = 0; i < operations; i++) {
                pairs[i][0] = subjects[i], pairs[i][1] = *ceiling;
                bench_replay(b, pairs[i], 2, bench_rounds(b, true, i > 0));
                subjects[i] = pairs[i][0], yardsticks[i] = &pairs[i][1];
            }
            ceiling = yardsticks[0];
        } else {
            bench_replay(b, subjects, count, bench_rounds(b, false, false));
            if (ceiling[1].ms < ceiling[0].ms) ceiling++;
            yardsticks[0] = yardsticks[1] = yardsticks[2] = ceiling;
        }

        const double bytes = (double)(c->read_bytes + c->write_bytes);
        const double known = c->bare ? 0.0 : bench_known_gb_per_s(b->gpu, c->mix, bytes);
        const double known_ms = strcmp(b->gpu, "h200") == 0 ? c->known_ms : 0.0;
        const double of_study = known_ms > 0 ? ceiling->ms / known_ms : 1.0;
        const bool slow = bytes / ceiling->ms * 1e-6 * 1.03 < known;
        const bool above = !c->bare && ceiling->ms / subjects[0].ms > 1.03f;
        const char *invalid = slow ? "invalid: ceiling" : above ? "invalid: above ceiling" : "";
        if (invalid[0]) b->invalid++;
        b->measured++;
        char card[96] = "", note[320], remark[160];
        if (fabs(of_study - 1.0) > 0.03)
            snprintf(card, sizeof card, "card: bare took %.2f times as long as in an earlier study", of_study);
        const char *said = invalid[0] ? invalid : card, *own = c->note ? c->note : ""; /* never both of the first */
        snprintf(note, sizeof note, "%s%s%s", said, said[0] && own[0] ? "; " : "", own);
        for (int i = 0; i < operations; i++)
            bench_finish_row(b, number, chosen, c, &subjects[i], yardsticks[i], i ? "" : note,
                             i == 0 && c->remark ? c->remark : "");
        const bench_shape *shape = ceiling->shape;
        int used = snprintf(remark, sizeof remark, "the matmuls alone");
        if (shape)
            used = snprintf(remark, sizeof remark, "%d threads x %d units%s%s", shape->threads, shape->units,
                            shape->cs ? ", cs" : "", shape->blocks_per_sm ? ", persistent" : "");
        if (known > 0) snprintf(remark + used, sizeof remark - (size_t)used, "; known %.0f GB/s", known);
        if (known_ms > 0) snprintf(remark + used, sizeof remark - (size_t)used, "; the study's %.4g ms", known_ms);
        bench_finish_row(b, number, chosen, c, ceiling, ceiling, slow ? invalid : card, remark);
    }
    for (int i = 0; i < count; i++) BENCH_CUDA(cudaGraphExecDestroy(subjects[i].graph));
    BENCH_CUDA(cudaFree(arena.memory));
}

/* Prints the host's time of a call of c: stretches of calls that wait for nothing, few enough to fit into the queue of
 * launches; where that is full the host waits for the GPU. */
static void bench_time_host(bench *b, const bench_case *c)
{
    enum { CALLS = 1000, MOST = 100 };
    const int calls = c->bare ? 10 : 100, stretches = CALLS / calls;
    float us[MOST];
    bench_arena arena = {};
    if (!bench_allocate(b, c, 1, &arena)) {
        printf("host: FAIL: not enough memory (%s %s %s)\n", c->direction, c->dtype, c->name);
        b->failed++;
        return;
    }
    const bench_buffers set = bench_set(c, &arena, 0);
    lk_status status = LK_OK;
    for (int stretch = -1; !status && stretch < stretches; stretch++) { /* the first is for what a first call loads */
        struct timespec from, to;
        clock_gettime(CLOCK_MONOTONIC, &from);
        for (int i = 0; !status && i < calls; i++) status = c->launch(c, &set, b->path, b->stream);
        clock_gettime(CLOCK_MONOTONIC, &to);
        BENCH_CUDA(cudaStreamSynchronize(b->stream));
        const double spent = (double)(to.tv_sec - from.tv_sec) * 1e6 + (double)(to.tv_nsec - from.tv_nsec) * 1e-3;
        if (stretch >= 0) us[stretch] = (float)(spent / calls);
    }
    if (status) {
        printf("host: FAIL: %s (%s %s %s)\n", lk_last_error(), c->direction, c->dtype, c->name);
        b->failed++;
    } else {
        qsort(us, (size_t)stretches, sizeof us[0], bench_compare_floats);
        printf("host: %.2f us per call (%s %s %s; %d times %d calls in a row, %.2f to %.2f)\n", us[stretches / 2], c->direction,
               c->dtype, c->name, stretches, calls, us[0], us[stretches - 1]);
    }
    fflush(stdout);
    BENCH_CUDA(cudaFree(arena.memory));
}

/* Fills in what is known of the card and prints the first lines. */
static void bench_open(bench *b)
{
    cudaDeviceProp properties;
    int runtime = 0, driver = 0;
    BENCH_CUDA(cudaSetDevice(0));
    BENCH_CUDA(cudaGetDeviceProperties(&properties, 0));
    BENCH_CUDA(cudaRuntimeGetVersion(&runtime));
    BENCH_CUDA(cudaDriverGetVersion(&driver));
    BENCH_CUDA(lk_current_device(&b->device));
    BENCH_CUDA(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking));
    for (int i = 0; i < BENCH_EVENTS; i++) BENCH_CUDA(cudaEventCreate(&b->events[i]));
    b->l2_bytes = properties.l2CacheSize;

    const char *name = strncmp(properties.name, "NVIDIA ", 7) == 0 ? properties.name + 7 : properties.name;
    snprintf(b->gpu, sizeof b->gpu, "%.63s", name);
    for (char *p = b->gpu; *p; p++)
        if (*p == ' ' || *p == '/' || *p == ',') *p = '-';
        else if (*p >= 'A' && *p <= 'Z') *p = (char)(*p - 'A' + 'a');

    char version[64] = "unknown"; /* the runtime knows only the driver's CUDA version */
    FILE *file = fopen("/sys/module/nvidia/version", "r");
    if (file && fgets(version, sizeof version, file)) version[strcspn(version, "\n")] = 0;
    if (file) fclose(file);
    printf("GPU %s, %d SMs, L2 %.0f MiB; driver %s (CUDA %d.%d); CUDA %d.%d; commit %s\n", properties.name, b->device.sms,
           (double)b->l2_bytes / (1 << 20), version, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10,
           BENCH_COMMIT);
    if (b->host) return;
    const bool matmuls = b->cases[0].bare != NULL;
    printf("ms: median of %d graph replays%s, per launch, cold L2; p10-p90: their percentiles; ",
           bench_rounds(b, matmuls, false), matmuls ? " (naive: of fewer)" : "");
    puts(matmuls ? "TFLOP/s: that of the matmuls;\nof_gemm: time of the matmuls alone (bare, timed alternately) / ms.\n"
                 : "GB/s: least traffic / ms;\nof_ceiling: time of the best plain kernel with the same reads and writes "
                   "(ceiling, timed alternately) / ms.\n");
    printf("| # | case | direction | dtype | provider | ms | p10-p90 | %s | note |\n",
           matmuls ? "TFLOP/s | of_gemm | bare ms" : "GB/s | of_ceiling | ceiling ms");
    printf("|---|---|---|---|---|---|---|---|---|---|---|\n");
    fflush(stdout);
}

static bool bench_selected(const bench *b, const bench_case *c)
{
    char key[256];
    snprintf(key, sizeof key, "%s %s %s", c->direction, c->dtype, c->name);
    return !b->filter || strstr(key, b->filter);
}

/* The whole program of a bench: returns its exit status, 1 when a case failed. hosts: the calls whose host time is taken. */
static int bench_run(const char *op, bench_case *cases, int count, bench_case *hosts, int host_count, int argc, char **argv)
{
    static bench b;
    b.op = op, b.cases = cases, b.count = count;
    for (int i = 1; i < argc; i++) {
        char *end = NULL;
        if (strcmp(argv[i], "--quick") == 0) b.quick = true;
        else if (strcmp(argv[i], "--list") == 0) b.list = true;
        else if (strcmp(argv[i], "--host") == 0) b.host = true;
        else if (strcmp(argv[i], "--case") == 0 && i + 1 < argc) b.filter = argv[++i];
        else if (strcmp(argv[i], "--path") == 0 && i + 1 < argc) b.path = (int)strtol(argv[++i], &end, 10);
        else end = argv[i];
        if (end && *end) { /* not an option, or not a number */
            fprintf(stderr, "usage: %s [--case SUBSTRING] [--quick] [--host] [--list] [--path N]\n", argv[0]);
            return 2;
        }
    }
    if (count > BENCH_CASES_MOST) {
        fprintf(stderr, "raise BENCH_CASES_MOST to %d\n", count);
        return 2;
    }
    int chosen = 0;
    for (int i = 0; i < count; i++) {
        const bench_case *c = &cases[i];
        if (c->read_bytes * (size_t)c->mix.writes != c->write_bytes * (size_t)c->mix.reads) {
            fprintf(stderr, "%s: its traffic is not in the ratio of its mix %d : %d\n", c->name, c->mix.reads, c->mix.writes);
            return 2;
        }
        if (!bench_selected(&b, c)) continue;
        chosen++;
        if (b.list) printf("%s %s %s %s\n", op, c->direction, c->dtype, c->name);
    }
    if (b.list) return 0;
    if (chosen == 0 && !b.host) {
        fprintf(stderr, "no case holds '%s'; --list names them\n", b.filter);
        return 2;
    }
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        printf("No GPU here (%s), so nothing was measured: bench/results/h200.csv holds the results measured on an H200.\n",
               error != cudaSuccess ? cudaGetErrorString(error) : "the driver sees none");
        return 0;
    }

    bench_open(&b);
    for (int i = 0, number = 0; i < count && !b.host; i++) {
        if (!bench_selected(&b, &cases[i])) continue;
        b.ran[i] = true;
        if (cases[i].workspace) cases[i].workspace_bytes = cases[i].workspace(&cases[i], b.path);
        bench_measure(&b, &cases[i], ++number, chosen);
    }
    if (isatty(2)) fprintf(stderr, "\033[K");
    if (!b.host) putchar('\n');
    for (int i = 0; i < host_count; i++) {
        if (!b.host && (b.filter || b.path)) continue;
        if (!bench_selected(&b, &hosts[i])) continue;
        if (hosts[i].workspace) hosts[i].workspace_bytes = hosts[i].workspace(&hosts[i], b.path);
        bench_time_host(&b, &hosts[i]);
    }
    if (b.host) return b.failed > 0;

    const char *path = getenv("BENCH_CSV");
    char own[128];
    snprintf(own, sizeof own, "bench/results/%s.csv", b.gpu);
    if (!path || !path[0]) path = own;
    const bool keep = !b.quick && !b.path, wrote = keep && bench_write_csv(&b, path);
    printf("%d cases measured, %d failed, %d invalid", b.measured, b.failed, b.invalid);
    if (b.skipped) printf(", %d skipped", b.skipped);
    printf("; %s%s\n", wrote ? "wrote " : keep ? "could not write " : "no CSV with --quick or --path", keep ? path : "");
    return b.failed || (keep && !wrote);
}

#endif
