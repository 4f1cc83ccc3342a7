// SPDX-License-Identifier: MIT
/* ladder.h - what cross_entropy.cu and linear_cross_entropy.cu share beside their rungs: inputs of any size, times, the table.
 *
 * A time is the median of several rounds of launches, after one that is checked. The inputs are larger than the L2 at the sizes
 * of `make bench-ladder`, so a launch finds little of them there. The simulator has no times: it says nothing about speed.
 * LADDER_CSV=FILE in the environment appends a line per rung to FILE. `make bench-ladder` adds the columns gpu and commit.
 */
#ifndef LADDER_H
#define LADDER_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lk/lk_base.cuh"

#define IGNORED (-100) /* the target of a row that does not count */

/* CUDA's functions and lk's return 0 or an error. */
static int failures;
static void check(const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s %s\n", what, lk_status_string(status), status < 0 ? lk_last_error() : "");
    failures++;
}

/* Device memory of `bytes` bytes, a copy of `from` unless that is NULL. */
static void *memory_of(const void *from, size_t bytes)
{
    void *device = NULL;
    const cudaError_t error = cudaMalloc(&device, bytes ? bytes : 1);
    check("cudaMalloc", error);
    if (error) exit(1);
    if (from) check("cudaMemcpy", cudaMemcpy(device, from, bytes, cudaMemcpyHostToDevice));
    return device;
}

/* Element i is a hash of i, as a sum of four uniform numbers: nearly normal, with deviation sigma. */
typedef struct {
    lk_bf16 *out;
    int64_t count;
    uint64_t seed;
    float sigma;
} ladder_fill_args;

__global__ void ladder_fill_kernel(ladder_fill_args a)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    uint64_t h = ((a.seed << 40) + (uint64_t)i + 1) * 0x9e3779b97f4a7c15u; /* splitmix64 */
    h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
    h = (h ^ h >> 27) * 0x94d049bb133111ebu;
    h ^= h >> 31;
    const int sum = (int)(h & 0xffff) + (int)(h >> 16 & 0xffff) + (int)(h >> 32 & 0xffff) + (int)(h >> 48);
    a.out[i] = __float2bfloat16_rn(a.sigma * 1.7320508f / 65536.0f * (float)(sum - 131070));
}

static lk_bf16 *ladder_normal(int64_t count, uint64_t seed, float sigma)
{
    const ladder_fill_args args = {(lk_bf16 *)memory_of(NULL, (size_t)count * sizeof(lk_bf16)), count, seed, sigma};
    check("fill", lk_launch(ladder_fill_kernel, lk_ceil_div(count, 256), 256, 0, NULL, args));
    return args.out;
}

/* Targets below `vocab`, on the device, and in `host` too. The second row is ignored. */
static int64_t *ladder_targets(int64_t *host, int rows, int vocab)
{
    for (int row = 0; row < rows; row++) host[row] = row == 1 ? IGNORED : (int64_t)(row * 2654435761u % (unsigned)vocab);
    return (int64_t *)memory_of(host, (size_t)rows * sizeof host[0]);
}

/* The rows that are checked: all of a few, eight of many, the first, the second and the last among them. */
static int ladder_checked(int rows)
{
    return rows < 512 ? rows : 8;
}
static int ladder_checked_row(int rows, int k)
{
    return rows < 512 || k < 2 ? k : (int)((int64_t)k * (rows - 1) / 7);
}

/* How far a loss of `vocab` exponentials may be off: each addition rounds, in either direction, so that errors add up like the
 * steps of a random walk. magnitude: of what is subtracted at the end. */
static double ladder_limit(int vocab, double magnitude)
{
    return 0x1p-24 * (16 + 4 * sqrt((double)vocab)) * (1 + magnitude);
}

typedef lk_status ladder_launch(const void *call);

#if !defined(LK_SIMT)
static float ladder_round(ladder_launch *launch, const void *call, int launches, cudaEvent_t begin, cudaEvent_t end)
{
    float ms = 0;
    check("time", cudaEventRecord(begin));
    for (int i = 0; i < launches; i++) check("time", launch(call));
    check("time", cudaEventRecord(end));
    check("time", cudaEventSynchronize(end));
    check("time", cudaEventElapsedTime(&ms, begin, end));
    return ms / (float)launches;
}
static int ladder_before(const void *a, const void *b)
{
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}
#endif

/* Milliseconds of a launch: the median of up to 11 rounds, half a second in all. 0: not measured. */
static double ladder_ms(ladder_launch *launch, const void *call)
{
#if defined(LK_SIMT)
    (void)launch, (void)call;
    return 0;
#else
    float rounds[11];
    cudaEvent_t begin, end;
    check("time", cudaEventCreate(&begin));
    check("time", cudaEventCreate(&end));
    const float once = fmaxf(1e-3f, ladder_round(launch, call, 1, begin, end));
    const int launches = once > 2 ? 1 : (int)(2 / once), most = (int)(500 / (once * (float)launches));
    const int count = most < 1 ? 1 : most < 11 ? most : 11;
    for (int i = 0; i < count; i++) rounds[i] = ladder_round(launch, call, launches, begin, end);
    qsort(rounds, (size_t)count, sizeof rounds[0], ladder_before);
    check("time", cudaEventDestroy(begin));
    check("time", cudaEventDestroy(end));
    return rounds[count / 2];
#endif
}

/* A line of the table and of LADDER_CSV. The rate is of bytes, the least traffic, or of the matmul's flops; the other is 0.
 * Texts have no commas. */
typedef struct {
    const char *op, *direction, *shape, *rung, *idea;
    double bytes, flops, workspace_bytes;
} ladder_line;

/* What is wrong with a rung's results (`why`, empty: nothing), or its time. */
static void ladder_report(const ladder_line *line, const char *why, double ms)
{
    const double rate = ms > 0 ? (line->bytes > 0 ? line->bytes * 1e-6 : line->flops * 1e-9) / ms : 0;
    printf("%-4s %-32s %-16s %-36s", line->rung, line->idea, line->direction, line->shape);
    if (ms > 0) printf(" %10.4f ms %9.4g %s", ms, rate, line->bytes > 0 ? "GB/s" : "TFLOP/s");
    printf(" %s\n", why[0] ? why : "right");
    fflush(stdout);
    const char *path = getenv("LADDER_CSV");
    if (!path || !path[0] || why[0] || !(ms > 0)) return;
    FILE *file = fopen(path, "a");
    char gb_per_s[32] = "", tflop_per_s[32] = "";
    snprintf(line->bytes > 0 ? gb_per_s : tflop_per_s, 32, "%.5g", rate);
    if (!file || fprintf(file, "%s,%s,bf16,%s,%s,%s,%.5g,%s,%s,%.6g\n", line->op, line->direction, line->shape, line->rung,
                         line->idea, ms, gb_per_s, tflop_per_s, line->workspace_bytes / (1 << 20)) < 0)
        failures++, printf("%s cannot be written\n", path);
    if (file) fclose(file);
}

/* A size given as an argument; 0: it is none. */
static int ladder_size(const char *text, int most)
{
    char *end;
    const long size = strtol(text, &end, 10);
    return *text && !*end && size >= 1 && size <= most ? (int)size : 0;
}

#endif
