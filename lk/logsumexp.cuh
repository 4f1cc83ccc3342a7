// SPDX-License-Identifier: MIT
/* logsumexp.cuh - log sum exp over any one dimension, forward and backward.
 *
 *   forward    lse[o,i]  = log sum_c exp(scale x[o,c,i])
 *   backward   dx[o,c,i] = scale dlse[o,i] exp(scale x[o,c,i] - lse[o,i])
 *
 * x is [outer, cols, inner], the sum runs over cols. For the last dimension of a matrix, outer is its rows and inner is 1;
 * for the first, outer is 1 and inner is its columns.
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/logsumexp.cuh"               #include "lk/logsumexp.cuh"
 *                LK_DEFINE_LOGSUMEXP(bf16)                 LK_DECLARE_LOGSUMEXP(bf16)
 *            T is f32, f16 or bf16. Then, from C, asynchronously on the caller's stream, in a graph too:
 *                lk_logsumexp_args args = {};
 *                args.x = x, args.lse = lse, args.outer = rows, args.cols = cols;
 *                lk_status status = lk_logsumexp_forward_bf16(&args, stream);
 *                args.dlse = dlse, args.dx = dx;
 *                status = lk_logsumexp_backward_bf16(&args, stream);       // reads x and the lse that forward wrote
 *            lk_lse in lk_row.cuh is the running state (empty, add, merge, log) for kernels of your own.
 * Needs      lk_base.cuh, lk_check.cuh, lk_row.cuh, lk_ptx.cuh. No workspace: ..._workspace_bytes_<T> sets *bytes to 0.
 * Strides    0 means packed. So an expanded tensor, whose stride is 0, must be copied first. lse, lse_low, lse_rounded, dlse
 *            and dlse_rounded are always packed. Where both dlse are NULL they are 1, not 0.
 * Repeatable The same bits every time on the same device: fixed order, no atomics.
 * Source     The online form: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
 * Read on    lk/logsumexp.md: how exact results are, and what is read and written.
 *
 * The kernels, in the order of the file, and when they run unless `path` says otherwise. Contiguous: inner and the columns'
 * strides are 1.
 *   forward, contiguous                   lk_logsumexp_forward_row_kernel: up to 2 KiB per row 1 to 32 threads, a power of two,
 *                                         each with at most 4 vectors of 16 bytes; up to 16 KiB a warp; longer a block of 256
 *                                         threads, or a cluster of 2 to 8 such blocks where there are fewer rows than two per SM
 *   backward, contiguous, rows of x and   lk_logsumexp_backward_row_kernel: up to 128 threads with 4 vectors each, above 2 KiB
 *   dx at the same address modulo 16      with 2; a longer row is in pieces, each with threads of its own
 *   all other rows                        lk_logsumexp_forward_column_kernel, in clusters where there are few rows, and
 *                                         lk_logsumexp_backward_column_kernel: neighbouring threads take neighbouring rows, 16
 *                                         bytes of them where all are aligned
 * For example 4096 rows of 50257 columns in bf16, 6282 vectors: in forward a block of 256 threads has a row, 24 or 25 vectors
 * per thread; in backward a row is in 25 pieces of 128 threads. The checks of arguments and the calls come last.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LOGSUMEXP_CUH
#define LK_LOGSUMEXP_CUH

/* The kernel to run; all compute the same function. Backward runs COLUMN in place of WARP and BLOCK where the rows of x and dx
 * start at different addresses modulo 16. */
enum {
    LK_LOGSUMEXP_AUTO = 0,
    LK_LOGSUMEXP_WARP = 1,    /* 1 to 32 lanes per row, in backward per piece of a row; rows are contiguous (see LK_ERR_PATH) */
    LK_LOGSUMEXP_BLOCK = 2,   /* a block per row, in backward one or more blocks; rows are contiguous */
    LK_LOGSUMEXP_CLUSTER = 3, /* forward only, sm_90 and later: a cluster of blocks per row; rows are contiguous */
    LK_LOGSUMEXP_COLUMN = 4   /* any shape and strides: neighbouring threads take neighbouring rows (or columns, in backward) */
};

/* One struct for both calls: a training step fills it once. F: forward, B: backward. A call ignores the fields of the other. */
typedef struct {
    const void *x;           /* F B in        T [outer, cols, inner]; inner is contiguous */
    float *lse;              /* F out, B in   f32 [outer, inner] packed; F: NULL to skip */
    float *lse_low;          /* F out, B in   f32 [outer, inner] packed, the rounding of lse; NULL: skip in F, 0 in B */
    void *lse_rounded;       /* F out         T [outer, inner] packed, lse rounded to T; of f32 it may be lse; NULL to skip */
    const float *dlse;       /* B in          f32 [outer, inner] packed, the upstream gradient; NULL means 1, not 0 */
    void *dx;                /* B out         T [outer, cols, inner]; may be x */
    int64_t outer;           /* at least 0 */
    int64_t cols;            /* at least 0 */
    int64_t inner;           /* at least 0; 0 means 1: an empty dimension cannot be given */
    int64_t outer_stride;    /* elements between x[o] and x[o+1]; 0 means packed: cols * col_stride */
    int64_t col_stride;      /* elements between x[o,c] and x[o,c+1]; 0 means packed: inner */
    int64_t dx_outer_stride; /* B: of dx; 0 means packed, or the stride of x where dx is x */
    int64_t dx_col_stride;   /* B: likewise */
    float scale;             /* any finite value; 0 means 1 */
    int path;                /* LK_LOGSUMEXP_*; 0 chooses */
    const void *dlse_rounded; /* B in         T [outer, inner] packed, the same in place of dlse; NULL: dlse */
} lk_logsumexp_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md (overlap, alignment):
 *   LK_ERR_NULL       x, in backward also lse or dx, is NULL and has elements; all outputs are NULL
 *   LK_ERR_SHAPE      a negative size or stride; a tensor of more than 2^62 elements with its gaps; elements of dx that overlap
 *                     (those of x may)
 *   LK_ERR_VALUE      scale is not finite; path is none of the enum; dlse and dlse_rounded are both given
 *   LK_ERR_PATH       a path for contiguous rows with inner, col_stride or (backward) dx_col_stride > 1; BLOCK and CLUSTER with
 *                     more than 2^27 rows; CLUSTER in backward, or in code for less than sm_90
 * Fastest: packed rows that start on 16 bytes; with inner > 1, columns that do. Slower: rows of dx and x with different
 * addresses modulo 16, and columns with inner > 1 that are not all aligned to 16 bytes. */

#define LK_LOGSUMEXP_FUNCTIONS(X, T)                                                                                           \
    X##_CALL(logsumexp, forward, LK_FORWARD, T)                                                                                \
    X##_CALL(logsumexp, backward, LK_BACKWARD, T)
#define LK_DECLARE_LOGSUMEXP(T) LK_DECLARE(LOGSUMEXP, T)
#define LK_DEFINE_LOGSUMEXP(T) LK_DEFINE(LOGSUMEXP, T)

#if LK_CUDA

#include "lk_check.cuh"
#include "lk_row.cuh"

/* What every kernel gets: the caller's arguments with all defaults filled in, and how the rows are divided. */
typedef struct {
    lk_logsumexp_args a;
    lk_team team;           /* of the kernels for contiguous rows */
    int width;              /* column kernels: threads side by side, each with a group of Num rows; a power of two up to 32 */
    int64_t tiles, span;    /* backward's column kernel: tiles of `width` groups of rows, and the columns that a warp has */
} lk_logsumexp_call;

#define LK_LOGSUMEXP_THREADS 256

/* A row's columns, for choices by length. More than 2^50 count as 2^50, so that no product overflows. */
LK_HOST int64_t lk_logsumexp_length(const lk_logsumexp_args *a)
{
    return a->cols < (int64_t)1 << 50 ? a->cols : (int64_t)1 << 50;
}

/* ---- Forward of contiguous rows ------------------------------------------------------------------------------------------ */

template <class T> LK_DEVICE void lk_logsumexp_put(const lk_logsumexp_args &a, int64_t at, lk_lse s)
{
    float low;
    const float lse = lk_lse_log(s, &low);
    if (a.lse) a.lse[at] = lse;
    if (a.lse_low) a.lse_low[at] = low;
    if (a.lse_rounded) lk_put((T *)a.lse_rounded + at, lse);
}

/* Loads in flight per thread. Many loads hide the latency. Few loads leave registers for the blocks of the next launch, which
 * counts most where a launch is a single wave. The figures are in bench/results/choices/logsumexp.md. */
template <int Kind> constexpr int LK_LOGSUMEXP_LOADS = Kind == LK_TEAM_BLOCK ? 8 : Kind == LK_TEAM_WARP ? 4 : 2;

/* A team owns a row. LANES is for rows of up to 2048 bytes, WARP for longer ones. */
template <class T, int Kind>
LK_KERNEL void __launch_bounds__(LK_LOGSUMEXP_THREADS, Kind == LK_TEAM_CLUSTER ? 5 : 4)
    lk_logsumexp_forward_row_kernel(lk_logsumexp_call call)
{
    const lk_logsumexp_args &a = call.a;
    constexpr bool early = Kind != LK_TEAM_BLOCK; /* the next kernel may start early */
    const lk_row<T> row = lk_row_of<Kind, LK_LOGSUMEXP_THREADS>(call.team, (const T *)a.x, a.outer_stride, a.outer, a.cols);
    LK_SHARED(lk_lse_inbox<LK_LOGSUMEXP_THREADS>, inbox, [1]);
    lk_vec<T> raw[LK_LOGSUMEXP_LOADS<Kind>];
    lk_inbox_begin<Kind>(inbox);
    if (early) lk_griddepcontrol_launch_dependents();
    lk_row_prefetch<early ? 2 : 1>(row);
    lk_griddepcontrol_wait();
    lk_row_load(raw, row);
    lk_lse s = lk_lse_read(raw, row, a.scale);
    if (!early) lk_griddepcontrol_launch_dependents();
    s = lk_lse_team<Kind>(inbox, s);
    if (row.there && row.rank == 0) lk_logsumexp_put<T>(a, row.number, s);
}

/* kind: WARP, BLOCK or CLUSTER of LK_TEAM_*. */
template <class T>
LK_HOST lk_status lk_logsumexp_forward_rows(const char *op, const lk_device *device, lk_logsumexp_call call, int kind,
                                            cudaStream_t stream)
{
    const lk_logsumexp_args &a = call.a;
    if (kind == LK_TEAM_WARP && lk_logsumexp_length(&a) * (int64_t)sizeof(T) <= 2048) kind = LK_TEAM_LANES;
    const int cluster = kind == LK_TEAM_CLUSTER ? lk_team_cluster(device, a.outer) : 1;
    const int64_t wanted = kind < LK_TEAM_BLOCK ? lk_ceil_div(a.cols, 2 * LK_VEC<T>) : LK_LOGSUMEXP_THREADS * cluster;
    call.team = lk_team_of(a.outer, wanted, kind < LK_TEAM_BLOCK ? 32 : wanted, LK_LOGSUMEXP_THREADS);
    void (*const kernels[])(lk_logsumexp_call) = {
        lk_logsumexp_forward_row_kernel<T, LK_TEAM_LANES>, lk_logsumexp_forward_row_kernel<T, LK_TEAM_WARP>,
        lk_logsumexp_forward_row_kernel<T, LK_TEAM_BLOCK>, lk_logsumexp_forward_row_kernel<T, LK_TEAM_CLUSTER>};
    return lk_launch_pdl(op, device, kernels[kind], call.team.grid, call.team.cluster, call.team.threads, 0, stream, call);
}

/* ---- Backward of contiguous rows ----------------------------------------------------------------------------------------- */

/* The row's values in dx = scale dlse exp(scale x - lse - lse_low). They are only loaded here: a product would wait for one of
 * these loads, and ptxas would put the loads of x behind it. So would the conversion of a rounded dlse: it comes last. */
typedef struct {
    float scale, lse, dlse, lse_low;
} lk_logsumexp_row;

template <class T> LK_DEVICE lk_logsumexp_row lk_logsumexp_load_row(const lk_logsumexp_args &a, int64_t at)
{
    const T *const rounded = (const T *)a.dlse_rounded;
    T raw = {};
    const float lse = a.lse[at], dlse = a.dlse ? a.dlse[at] : 1.0f;
    if (rounded) raw = rounded[at];
    const float lse_low = a.lse_low ? a.lse_low[at] : 0.0f;
    return {a.scale, lse, rounded ? lk_to_float(raw) : dlse, lse_low};
}

LK_DEVICE float lk_logsumexp_gradient(lk_logsumexp_row row, float x)
{
    /* In a row of -inf, scale x - lse would be -inf + inf = NaN. So +inf is taken for that lse, and the gradient is 0. */
    const float t = fmaf(row.scale, x, row.lse == -INFINITY ? -INFINITY : -row.lse);
    return row.scale * row.dlse * lk_ex2(fmaf(t, LK_LOG2E, -LK_LOG2E * row.lse_low)); /* lse_low costs no instruction here */
}

/* A team owns a piece of a row: Vecs vectors per thread, and with the first piece the row's single elements. Rows of x and dx
 * start at the same offset modulo 16 bytes. Vecs = 4 streams its loads. Vecs = 2 keeps them in the caches: then the distance of x and
 * dx in memory matters less, and least to small blocks. */
#define LK_LOGSUMEXP_BACKWARD_THREADS 128
template <class T, int Vecs>
LK_KERNEL void __launch_bounds__(LK_LOGSUMEXP_BACKWARD_THREADS) lk_logsumexp_backward_row_kernel(lk_logsumexp_call call)
{
    const lk_logsumexp_args &a = call.a;
    const lk_row<T> row = lk_row_of<LK_TEAM_ANY, LK_LOGSUMEXP_BACKWARD_THREADS, Vecs>(call.team, (const T *)a.x, a.outer_stride,
                                                                                      a.outer, a.cols);
    T *dx = (T *)a.dx + row.number * a.dx_outer_stride;
    lk_vec<T> raw[Vecs];
    lk_griddepcontrol_wait();
    if (!row.there) return;
    lk_row_load<Vecs == 2>(raw, row);
    const lk_logsumexp_row values = lk_logsumexp_load_row<T>(a, row.number);
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        float x[LK_VEC<T>];
        lk_unpack(x, raw[u]);
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) x[j] = lk_logsumexp_gradient(values, x[j]);
        if (u < row.count) lk_store_n(dx + lk_row_col(row, u), x);
    }
    lk_griddepcontrol_launch_dependents();
    for (int i = row.rank; i < row.split.edge; i += 1 << row.size_log2) {
        const int64_t col = lk_edge_col<T>(row.split, i);
        lk_put(dx + col, lk_logsumexp_gradient(values, lk_to_float(row.data[col])));
    }
}

template <class T>
LK_HOST lk_status lk_logsumexp_backward_rows(const char *op, const lk_device *device, lk_logsumexp_call call,
                                             cudaStream_t stream)
{
    const lk_logsumexp_args &a = call.a;
    const bool narrow = lk_logsumexp_length(&a) * (int64_t)sizeof(T) <= 2048;
    const int64_t most = a.path == LK_LOGSUMEXP_WARP ? 32 : LK_LOGSUMEXP_BACKWARD_THREADS;
    const int64_t wanted = lk_ceil_div(lk_ceil_div(a.cols, LK_VEC<T>), narrow ? 4 : 2);
    call.team = lk_team_in_pieces(a.outer, a.path == LK_LOGSUMEXP_BLOCK && wanted < most ? most : wanted, most,
                                  LK_LOGSUMEXP_BACKWARD_THREADS);
    return lk_launch_pdl(op, device,
                         narrow ? lk_logsumexp_backward_row_kernel<T, 4> : lk_logsumexp_backward_row_kernel<T, 2>,
                         call.team.grid, 1, call.team.threads, 0, stream, call);
}

/* ---- Any rows: inner > 1, strided columns, rows of dx that lie otherwise ------------------------------------------------- */

/* The states of `count` columns of Num neighbouring rows, `jump` elements apart. A row's reference is its first value that is not
 * -inf. False where a sum or a base is out of range. */
template <class T, int Num>
LK_DEVICE bool lk_logsumexp_read(lk_lse (&s)[Num], const T *next, int64_t jump, int64_t count, float scale)
{
    constexpr int Vecs = 8; /* loads in flight */
    const float rate = scale * LK_LOG2E, nothing = lk_lse_nothing(scale);
    float reference[Num], base[Num], sum[Num], most = 0.0f; /* most: INFINITY once something is out of range */
    bool set = false;                                  /* every row has its reference */
    LK_UNROLL for (int j = 0; j < Num; j++) reference[j] = nothing, base[j] = 0.0f, sum[j] = 0.0f;
    for (int64_t i = 0; i < count && most < LK_LSE_LIMIT; i += Vecs) {
        lk_vec<T> raw[Vecs];
        const int here = count - i < Vecs ? (int)(count - i) : Vecs;
        if (here == Vecs) { /* loads without predicates all start before the first is waited for */
            LK_UNROLL for (int u = 0; u < Vecs; u++, next += jump) raw[u] = lk_load_n<Num>(next);
        } else {
            LK_UNROLL for (int u = 0; u < Vecs; u++, next += jump)
                if (u < here) raw[u] = lk_load_n<Num>(next);
        }
        float part[Num] = {};
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (u >= here) break;
            float x[Num];
            lk_unpack_n(x, raw[u]);
            if (!set) {
                set = true;
                LK_UNROLL for (int j = 0; j < Num; j++) {
                    if (reference[j] == nothing) reference[j] = x[j], base[j] = x[j] == nothing ? 0.0f : rate * x[j];
                    if (reference[j] == nothing) set = false;
                    if (!(fabsf(base[j]) < LK_LSE_BASE)) most = INFINITY;
                }
            }
            LK_UNROLL for (int j = 0; j < Num; j++) part[j] += lk_ex2(fmaf(rate, x[j], -base[j]));
        }
        LK_UNROLL for (int j = 0; j < Num; j++) sum[j] += part[j];
        LK_UNROLL for (int j = 0; j < Num; j++) most = sum[j] < LK_LSE_LIMIT ? most : INFINITY;
    }
    LK_UNROLL for (int j = 0; j < Num; j++) {
        s[j] = lk_lse_against(reference[j], base[j], sum[j], scale);
        if (reference[j] == nothing) s[j] = lk_lse_empty();
    }
    return most < LK_LSE_LIMIT;
}

/* The same by a running maximum, for all values. */
template <class T, int Num>
LK_DEVICE void lk_logsumexp_read_slowly(lk_lse (&s)[Num], const T *next, int64_t jump, int64_t count, float scale)
{
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] = lk_lse_empty();
    for (int64_t i = 0; i < count; i++, next += jump) {
        float x[Num];
        lk_unpack_n(x, lk_load_n<Num>(next));
        LK_UNROLL for (int j = 0; j < Num; j++) {
            const float z[1] = {scale * x[j]}, low = lk_lse_product_low(scale, x[j], z[0]);
            s[j] = lk_lse_add(s[j], z, 1.0f, &low);
        }
    }
}

/* A thread owns Num neighbouring rows (Num inner positions of one outer) and every step-th of their columns. `width` threads with
 * neighbouring rows are a layer; the THREADS / width layers of a block, and the blocks of a cluster, read the columns
 * alternately. Then the block merges the states of its layers pairwise, and the block with rank 0 those of its peers. */
template <class T, int Num>
LK_KERNEL void __launch_bounds__(LK_LOGSUMEXP_THREADS) lk_logsumexp_forward_column_kernel(lk_logsumexp_call call)
{
    LK_SHARED(lk_lse, part, [LK_LOGSUMEXP_THREADS * Num]); /* [layer][n][side] */
    const lk_logsumexp_args &a = call.a;
    const int blocks = (int)lk_cluster_nctarank(), rank = (int)lk_cluster_ctarank();
    const int side = threadIdx.x % call.width, layer = threadIdx.x / call.width, layers = LK_LOGSUMEXP_THREADS / call.width;
    const int64_t groups = a.inner / Num, tile = (int64_t)(blockIdx.x / blocks) * call.width, group = tile + side;
    const int step = layers * blocks, start = rank * layers + layer;
    const bool owner = group < a.outer * groups;
    const T *x = (const T *)a.x + start * a.col_stride;
    if (owner) x += group / groups * a.outer_stride + group % groups * Num;
    const int64_t jump = step * a.col_stride, count = owner && start < a.cols ? (a.cols - start - 1) / step + 1 : 0;
    lk_griddepcontrol_wait();
    lk_lse s[Num];
    const bool good = lk_logsumexp_read(s, x, jump, count, a.scale);
    lk_griddepcontrol_launch_dependents();
    if (!good) lk_logsumexp_read_slowly(s, x, jump, count, a.scale);

    LK_UNROLL for (int j = 0; j < Num; j++) part[(layer * Num + j) * call.width + side] = s[j];
    __syncthreads(); /* the states are written before others merge them */
    for (int reach = layers / 2 * Num * call.width; reach >= Num * call.width; reach /= 2) {
        for (int k = threadIdx.x; k < reach; k += LK_LOGSUMEXP_THREADS) part[k] = lk_lse_merge(part[k], part[k + reach]);
        __syncthreads(); /* this half is merged before it is halved again */
    }
    if (blocks > 1) lk_cluster_sync(); /* orders each block's states before rank 0 reads them */
    for (int k = threadIdx.x; rank == 0 && k < Num * call.width; k += LK_LOGSUMEXP_THREADS) {
        lk_lse total = part[k];
        for (int peer = 1; peer < blocks; peer++) total = lk_lse_merge(total, *(const lk_lse *)lk_mapa(&part[k], peer));
        const int64_t merged = tile + k % call.width;
        if (merged < a.outer * groups) lk_logsumexp_put<T>(a, merged * Num + k / call.width, total);
    }
    if (blocks > 1) lk_cluster_sync(); /* no block ends while rank 0 reads its shared memory */
}

template <class T> LK_HOST bool lk_logsumexp_aligned(const void *x, int64_t outer_stride, int64_t col_stride, int64_t inner)
{
    return ((uintptr_t)x % 16 | (uint64_t)(outer_stride | col_stride | inner) % LK_VEC<T>) == 0;
}

template <class T>
LK_HOST lk_status lk_logsumexp_forward_columns(const char *op, const lk_device *device, lk_logsumexp_call call,
                                               cudaStream_t stream)
{
    const lk_logsumexp_args &a = call.a;
    const bool wide = lk_logsumexp_aligned<T>(a.x, a.outer_stride, a.col_stride, a.inner);
    const int64_t groups = a.outer * (a.inner / (wide ? LK_VEC<T> : 1));
    while (call.width > 4 && lk_ceil_div(groups, call.width) < 2 * device->sms) call.width /= 2;
    const int64_t tiles = lk_ceil_div(groups, call.width), slots = lk_logsumexp_length(&a) * call.width; /* columns x threads */
    int cluster = 1; /* doubled while there are few blocks and each thread has more than 4 columns, so it keeps more than 2 */
    while (device->arch >= 90 && cluster < 8 && tiles * cluster < 2 * device->sms && cluster * 1024 < slots) cluster *= 2;
    return lk_launch_pdl(op, device,
                         wide ? lk_logsumexp_forward_column_kernel<T, LK_VEC<T>> : lk_logsumexp_forward_column_kernel<T, 1>,
                         tiles * cluster, cluster, LK_LOGSUMEXP_THREADS, 0, stream, call);
}

/* A lane owns Num neighbouring rows and some columns of a span: `width` lanes with neighbouring rows are a layer, and the
 * warp's 32 / width layers read the columns alternately. */
template <class T, int Num>
LK_KERNEL void __launch_bounds__(LK_LOGSUMEXP_THREADS) lk_logsumexp_backward_column_kernel(lk_logsumexp_call call)
{
    constexpr int Vecs = 4; /* loads in flight per thread */
    const lk_logsumexp_args &a = call.a;
    const int lane = threadIdx.x % 32, side = lane % call.width, layer = lane / call.width, layers = 32 / call.width;
    const int64_t warp = (int64_t)blockIdx.x * (LK_LOGSUMEXP_THREADS / 32) + threadIdx.x / 32;
    const int64_t groups = a.inner / Num, group = warp % call.tiles * call.width + side;
    const int64_t begin = warp / call.tiles * call.span, end = begin + call.span < a.cols ? begin + call.span : a.cols;
    lk_griddepcontrol_wait();
    if (group >= a.outer * groups) return;

    const int64_t outer = group / groups, inner = group % groups * Num;
    const T *x = (const T *)a.x + outer * a.outer_stride + inner;
    T *dx = (T *)a.dx + outer * a.dx_outer_stride + inner;
    lk_logsumexp_row row[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) row[j] = lk_logsumexp_load_row<T>(a, outer * a.inner + inner + j);
    for (int64_t col = begin + layer; col < end; col += Vecs * layers) {
        lk_vec<T> raw[Vecs];
        LK_UNROLL for (int u = 0; u < Vecs; u++)
            if (col + u * layers < end) raw[u] = lk_load_n<Num>(x + (col + u * layers) * a.col_stride);
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (col + u * layers >= end) break;
            float v[Num];
            lk_unpack_n(v, raw[u]);
            LK_UNROLL for (int j = 0; j < Num; j++) v[j] = lk_logsumexp_gradient(row[j], v[j]);
            lk_store_n(dx + (col + u * layers) * a.dx_col_stride, v);
        }
    }
}

template <class T>
LK_HOST lk_status lk_logsumexp_backward_columns(const char *op, const lk_device *device, lk_logsumexp_call call,
                                                cudaStream_t stream)
{
    const lk_logsumexp_args &a = call.a;
    const bool row_major = a.inner == 1 && a.col_stride == 1; /* then neighbouring lanes take neighbouring columns */
    const bool wide = lk_logsumexp_aligned<T>(a.x, a.outer_stride, a.col_stride, a.inner) &&
                      lk_logsumexp_aligned<T>(a.dx, a.dx_outer_stride, a.dx_col_stride, a.inner);
    const int64_t groups = a.outer * (a.inner / (wide ? LK_VEC<T> : 1));
    while (call.width > 1 && (call.width / 2 >= groups || (row_major && 32 / call.width < a.cols))) call.width /= 2;
    call.tiles = lk_ceil_div(groups, call.width), call.span = 64;
    /* Long spans amortise the loads of lse. Short ones fill the card: 64 warps per SM. */
    while (call.span > 4 && call.tiles * lk_ceil_div(a.cols, call.span) < 64 * device->sms) call.span /= 2;
    const int64_t warps = call.tiles * lk_ceil_div(a.cols, call.span);
    return lk_launch_pdl(op, device,
                         wide ? lk_logsumexp_backward_column_kernel<T, LK_VEC<T>> : lk_logsumexp_backward_column_kernel<T, 1>,
                         lk_ceil_div(warps, LK_LOGSUMEXP_THREADS / 32), 1, LK_LOGSUMEXP_THREADS, 0, stream, call);
}

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* Validates; a becomes the arguments with every default filled in. device: as in lk_check_begin. */
template <class T>
LK_HOST lk_status lk_logsumexp_check(const char *op, const lk_logsumexp_args *args, lk_direction direction, lk_device *device,
                                     lk_logsumexp_args *a)
{
    *a = *args;
    if (a->inner == 0) a->inner = 1;
    if (a->scale == 0.0f) a->scale = 1.0f;
    const bool query = !device, backward = direction == LK_BACKWARD;
    const int forward_out = backward ? LK_UNUSED : LK_OUT, backward_in = backward ? LK_IN : LK_UNUSED;
    const int64_t rows = backward && a->cols == 0 ? 0 : lk_count(a->outer, a->inner); /* backward has no work without columns */
    lk_tensor list[] = {
        {"x", a->x, sizeof(T), LK_REQUIRED | LK_MAY_OVERLAP, a->inner,
         {{a->outer, &a->outer_stride, "outer_stride"}, {a->cols, &a->col_stride, "col_stride"}}},
        {"lse", a->lse, 4, backward ? LK_REQUIRED : LK_OUT, rows},
        {"lse_low", a->lse_low, 4, backward ? LK_IN : LK_OUT, rows},
        {"lse_rounded", a->lse_rounded, sizeof(T), forward_out, rows, {}, {sizeof(T) == 4 ? "lse" : NULL}},
        {"dlse", a->dlse, 4, backward_in, rows},
        {"dlse_rounded", a->dlse_rounded, sizeof(T), backward_in, rows},
        {"dx", a->dx, sizeof(T), backward ? LK_OUT | LK_REQUIRED : LK_UNUSED, a->inner,
         {{a->outer, &a->dx_outer_stride, "dx_outer_stride"}, {a->cols, &a->dx_col_stride, "dx_col_stride"}}, {"x"}},
    };
    const int count = lk_used_tensors(list, LK_COUNT(list));
    lk_checks checks = lk_check_begin(op, device);
    lk_check_size(&checks, "outer", a->outer, 0, INT64_MAX);
    lk_check_size(&checks, "cols", a->cols, 0, INT64_MAX);
    lk_check_size(&checks, "inner", a->inner, 0, INT64_MAX);
    lk_check_shapes(&checks, list, count, query);
    lk_check_number(&checks, "scale", a->scale, fabsf(a->scale) <= FLT_MAX, "finite");
    lk_check_enum(&checks, "path", a->path, LK_LOGSUMEXP_COLUMN, "LK_LOGSUMEXP_*");
    if (!query && backward && a->dlse && a->dlse_rounded)
        lk_reject(&checks, LK_ERR_VALUE, "dlse and dlse_rounded are both given; one of them must be NULL");
    const bool rowwise = a->path >= LK_LOGSUMEXP_WARP && a->path <= LK_LOGSUMEXP_CLUSTER;
    if (rowwise && (a->inner != 1 || a->col_stride != 1 || (backward && a->dx_col_stride != 1)))
        lk_reject(&checks, LK_ERR_PATH, "path %d needs contiguous rows: inner 1 and col_stride 1", a->path);
    lk_check_rows(&checks, a->path, rowwise && a->path > LK_LOGSUMEXP_WARP && a->outer > LK_TEAM_ROWS, "outer", a->outer);
    if (a->path == LK_LOGSUMEXP_CLUSTER && backward) lk_reject(&checks, LK_ERR_PATH, "backward has no path %d (cluster)", a->path);
    lk_check_cluster(&checks, a->path, a->path == LK_LOGSUMEXP_CLUSTER && checks.arch < 90);
    lk_check_end(&checks, list, count);
    lk_check_warn(&checks, a->outer == 0, "outer is 0; nothing is computed");
    lk_check_warn(&checks, backward && a->cols == 0, "cols is 0; nothing is computed");
    return checks.status;
}

/* ---- The calls, and their workspace: none -------------------------------------------------------------------------------- */

template <class T>
LK_HOST lk_status lk_logsumexp_forward(const char *op, const lk_device *device, const lk_logsumexp_call &call,
                                       cudaStream_t stream)
{
    const lk_logsumexp_args &a = call.a;
    const int64_t row_bytes = lk_logsumexp_length(&a) * (int64_t)sizeof(T);
    int kind = a.path; /* then an LK_TEAM_*: WARP, BLOCK and CLUSTER have the same numbers in both, 0 and 4 do not */
    if (kind == LK_LOGSUMEXP_AUTO && (a.inner != 1 || a.col_stride != 1)) kind = LK_LOGSUMEXP_COLUMN;
    if (kind == LK_LOGSUMEXP_AUTO) kind = lk_team_path(device, a.outer, row_bytes);
    if (kind == LK_LOGSUMEXP_COLUMN) return lk_logsumexp_forward_columns<T>(op, device, call, stream);
    return lk_logsumexp_forward_rows<T>(op, device, call, kind, stream);
}

template <class T>
LK_HOST lk_status lk_logsumexp_backward(const char *op, const lk_device *device, const lk_logsumexp_call &call,
                                        cudaStream_t stream)
{
    const lk_logsumexp_args &a = call.a;
    const bool contiguous = a.inner == 1 && a.col_stride == 1 && a.dx_col_stride == 1;
    const bool aligned = ((uintptr_t)a.x ^ (uintptr_t)a.dx) % 16 == 0 && (a.outer_stride - a.dx_outer_stride) % LK_VEC<T> == 0;
    if (a.path == LK_LOGSUMEXP_COLUMN || !contiguous || !aligned)
        return lk_logsumexp_backward_columns<T>(op, device, call, stream);
    return lk_logsumexp_backward_rows<T>(op, device, call, stream);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_logsumexp_run(const char *op, const lk_logsumexp_args *args, cudaStream_t stream)
{
    lk_logsumexp_call call = {{}, {}, 32, 0, 0};
    lk_device device = {};
    const lk_status status = lk_logsumexp_check<T>(op, args, direction, &device, &call.a);
    if (status || call.a.outer == 0) return status;
    if constexpr (direction == LK_FORWARD) return lk_logsumexp_forward<T>(op, &device, call, stream);
    else return call.a.cols == 0 ? LK_OK : lk_logsumexp_backward<T>(op, &device, call, stream);
}
template <class T>
LK_HOST lk_status lk_logsumexp_query(const char *op, const lk_logsumexp_args *args, lk_direction direction, size_t *bytes)
{
    lk_logsumexp_args a = {};
    return lk_no_workspace(lk_logsumexp_check<T>(op, args, direction, NULL, &a), bytes);
}

#endif /* CUDA or the simulator */
#endif
