// SPDX-License-Identifier: MIT
/* srms_norm.cuh - root mean square normalisation of rows, with residual stream and weight, forward and backward.
 *
 *   forward    s[r,c] = x[r,c] + residual[r,c]                                           (s = x without a residual)
 *              rstd[r] = 1 / sqrt(mean_c s[r,c]^2 + eps)
 *              y[r,c] = s[r,c] rstd[r] weight[c]                                         (weight = 1 without one)
 *              residual_out[r,c] = s[r,c]
 *   backward   g[r,c] = dy[r,c] weight[c],  h[r,c] = s[r,c] rstd[r]
 *              ds[r,c] = rstd[r] (g[r,c] - h[r,c] mean_c(g[r,c] h[r,c])) + dresidual_out[r,c]
 *              dx = ds,  dresidual = ds
 *              dweight[c] = sum_r dy[r,c] h[r,c]
 *
 * Without weight this is SRMSNorm (scaled to sqrt(cols) times the unit sphere), with weight RMSNorm; with a residual it is the
 * "add and norm" of a transformer block.
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/srms_norm.cuh"               #include "lk/srms_norm.cuh"
 *                LK_DEFINE_SRMS_NORM(bf16)                 LK_DECLARE_SRMS_NORM(bf16)
 *            T is f32, f16 or bf16. Then, asynchronously on the caller's stream, in a graph too:
 *                lk_srms_norm_forward_args args = {.x = x, .y = y, .rows = rows, .cols = cols, .eps = 1e-6f};
 *                lk_status status = lk_srms_norm_forward_bf16(&args, stream);
 * Strides    0 means packed, so a tensor that was expanded, whose stride is 0, cannot be passed as it is. A NULL dy means 1
 *            everywhere, not 0.
 * Needs      lk_base.cuh, lk_row.cuh, lk_ptx.cuh. No workspace but for dweight: at most 64 MiB + 8 cols + 128 bytes, the
 *            query says how much on the current device, which it needs for that.
 * Numerics   Sums, s and rstd are float; every output is rounded once, y and dx from the unrounded s where it is x + residual.
 *            Relative errors before that rounding: rstd 8 2^-24, y 10 2^-24, dx 16 2^-24 of the sum of its terms' magnitudes,
 *            dweight (16 + log2 rows) 2^-24 of them, where rounding errors have random signs: its sums over rows are chains, in
 *            which many rows all alike round one way. With rstd from forward and s from residual_out, backward also has the
 *            rounding of residual_out.
 *            Against float64 on an H200, 512 rows of N(0, 1.5), 1024 to 16384 columns, with a weight, PyTorch 2.11's rms_norm
 *            in brackets, relative Frobenius: y f32 5.3e-8 (5.7e-8), f16 2.1e-4 (2.1e-4), bf16 1.7e-3 (1.7e-3); dx 5.9e-8
 *            (5.7e-8), 2.1e-4 (2.1e-4), 1.7e-3 (1.7e-3); dweight 1.0e-7 (1.1e-7), 2.1e-4 (2.1e-4), 1.7e-3 (1.7e-3).
 *            A zero row: y = 0 and dx = g / sqrt(eps) + dresidual_out. With eps = 0: rstd = +inf, y and dx NaN, and so all of
 *            dweight. A NaN in a row: NaN in all of it. An infinity in s: rstd = 0, y is NaN there and 0 elsewhere, dx NaN.
 *            The sum of squares is a float. Where it overflows, from a root mean square of 1.8e19 / sqrt(cols) on: rstd = 0,
 *            y = 0 and dx = dresidual_out, or dx = NaN where sum g s overflows too. Squares below 2^-126 lose digits, and those
 *            below 2^-150 are 0 (with --use_fast_math all below 2^-126), which does not matter where the mean square + eps is
 *            at least 2^-100. Below that, so with eps = 0 and a root mean square under 2^-50, the bounds above do not hold;
 *            where all squares are 0 and eps is, rstd = +inf, y is +-inf, NaN where s is 0, and dx is infinite or NaN.
 * Traffic    forward reads x (and residual) once and writes y (and residual_out) once; backward reads s, dy (and dresidual_out)
 *            once and writes dx once. Rows longer than a cluster holds are read twice: of 16 bits, forward above 2^18 columns
 *            (2^17 with a residual), backward above about 2^17 (2^16 with weight or dweight); of 32 bits, above half as many.
 * Repeatable The same bits every time on the same device: fixed order, no atomics.
 * Source     Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; without weight: Qin et al., "TransNormerLLM",
 *            2023.
 */
#ifndef LK_SRMS_NORM_CUH
#define LK_SRMS_NORM_CUH

#include "lk_base.cuh"

/* Which kernel runs. Every path takes every shape and every option. */
enum {
    LK_SRMS_NORM_AUTO = 0,
    LK_SRMS_NORM_WARP = 1,   /* a row by a team of 1 to 32 lanes, several rows a block */
    LK_SRMS_NORM_BLOCK = 2,  /* a row by a block */
    LK_SRMS_NORM_CLUSTER = 3 /* sm_90 and later: a row by a cluster of blocks */
};

/* One struct for both calls: a training step fills it once. F: forward, B: backward. A call ignores the fields of the other. */
typedef struct {
    const void *x;                /* F B in        T [rows, cols]; B: ignored where residual_out is given */
    const void *residual;         /* F B in        residual_dtype [rows, cols]; NULL: none; B: ignored likewise */
    void *residual_out;           /* F out, B in   residual_dtype [rows, cols], s; F: may be residual; NULL to skip;
                                                   B: s as forward wrote it; NULL: s is x + residual */
    float *rstd;                  /* F out, B in   f32 [rows]; F: NULL to skip; B: NULL: computed again from s and eps */
    const void *weight;           /* F B in        weight_dtype [cols]; NULL means 1 */
    void *y;                      /* F out         T [rows, cols]; may be x; NULL to skip */
    const void *dy;               /* B in          T [rows, cols], the gradient of y; NULL means 1, not 0 */
    const void *dresidual_out;    /* B in          residual_dtype [rows, cols], the other gradient of s, which reaches
                                                   residual_out; NULL: none */
    void *dx;                     /* B out         T [rows, cols]; may be dy, or dresidual_out of the same type; NULL to skip */
    void *dresidual;              /* B out         residual_dtype [rows, cols], the float of dx rounded to it; may be
                                                   dresidual_out; NULL to skip */
    void *dweight;                /* B out         dweight_dtype [cols]; NULL to skip */
    void *workspace;              /* B             scratch memory, aligned to LK_WORKSPACE_ALIGNMENT; NULL where none is needed */
    size_t workspace_bytes;       /* B             at least what the query answers */
    int64_t rows;                 /* F B           at least 0 */
    int64_t cols;                 /* F B           1 to 2^30 */
    int64_t x_stride;             /* F B           elements between rows; 0 means packed, cols */
    int64_t residual_stride;      /* F B           likewise */
    int64_t residual_out_stride;  /* F B           likewise, or where it is residual that one's stride */
    int64_t y_stride;             /* F             likewise, or where it is x that one's stride */
    int64_t dy_stride;            /* B             elements between rows; 0 means packed, cols */
    int64_t dresidual_out_stride; /* B             likewise */
    int64_t dx_stride;            /* B             likewise, or in place the other's stride */
    int64_t dresidual_stride;     /* B             likewise */
    float eps;                    /* F B           used as given; finite, at least 0; B: without rstd */
    int residual_dtype;           /* F B           LK_DTYPE_*: T or f32; 0 means T; of residual, residual_out and their gradients */
    int weight_dtype;             /* F B           likewise */
    int dweight_dtype;            /* B             likewise */
    int accumulate;               /* B             not 0: dweight += instead of = */
    int path;                     /* F B           LK_SRMS_NORM_*; 0 chooses */
} lk_srms_norm_args;

/* Errors, in the order of the checks:
 *   LK_ERR_NULL       args; x (forward); y, residual_out and rstd all three (forward); x and residual_out both (backward); dx,
 *                     dresidual and dweight all three (backward). Tensors without elements (rows = 0) may be NULL
 *   LK_ERR_SHAPE      rows below 0; cols below 1 or above 2^30; a stride that is not 0 and below cols; a tensor that spans more
 *                     than 2^62 elements; one pointer for two tensors that may share it (y = x, residual_out = residual,
 *                     dx = dy, dx = dresidual_out, dresidual = dresidual_out) with other strides
 *   LK_ERR_VALUE      eps negative or not finite; a dtype that is neither T nor f32; residual_out together with x or residual
 *                     (backward); dx = dresidual_out of another type; path is none of the enum
 *   LK_ERR_PATH       CLUSTER in code for less than sm_90; a path of one row a block (BLOCK, CLUSTER) with more than 2^27 rows
 *   LK_ERR_ALIGNMENT  a pointer is not aligned to its element
 *   LK_ERR_WORKSPACE  where a workspace is needed: workspace NULL, workspace_bytes too small, workspace not aligned to
 *                     LK_WORKSPACE_ALIGNMENT
 * The queries look at sizes and options alone: tensors may be NULL there. A NULL dweight means that it is not wanted, and needs
 * no device. With x or residual_out, backward's query answers for just the tensors that are given; with both NULL for any.
 * All tensors with rows at the same offset modulo 16 bytes (f32 beside 16-bit: any offset that puts both on 16) run at full
 * speed; other rows go element by element. So do, in backward with weight or dweight, rows of more than 2^21 columns (f32:
 * 2^23) whose offsets differ from row to row.
 * Backward is fastest with dy, one source of s, cols a multiple of 16 bytes, and a weight of type T where there is one. */

#define LK_DECLARE_SRMS_NORM(T)                                                                                                \
    LK_PROTOTYPES(srms_norm, forward, T)                                                                                       \
    LK_PROTOTYPES(srms_norm, backward, T)

#if defined(__CUDACC__) || defined(LK_SIMT)

#include "lk_row.cuh"

/* ---- What both directions share ----------------------------------------------------------------------------------------- */

/* N elements of type E: one, or LK_VEC<T> beside a tensor of T, which are one or two accesses of 16 bytes. They may stay in the
 * caches. Measured on an H200, forward without a weight by streaming ones, four vectors a thread in both, in time: on tensors
 * as PyTorch's allocator lays them 102 to 106 %, on our bench's 99 to 103 %, on rows of 8191 columns, whose vectors share
 * lines, 106 %. */
template <class E> LK_DEVICE void lk_srms_norm_load(float (&x)[1], const E *from) { x[0] = lk_to_float(*from); }
template <class E, int N> LK_DEVICE void lk_srms_norm_unpack(float (&x)[N], const lk_vec<E> (&raw)[N / LK_VEC<E>])
{
#pragma unroll
    for (int i = 0; i < N / LK_VEC<E>; i++) {
        float part[LK_VEC<E>];
        lk_unpack(part, raw[i]);
#pragma unroll
        for (int j = 0; j < LK_VEC<E>; j++) x[i * LK_VEC<E> + j] = part[j];
    }
}
template <class E, int N> LK_DEVICE void lk_srms_norm_load_raw(lk_vec<E> (&raw)[N], const E *from)
{
#pragma unroll
    for (int i = 0; i < N; i++) raw[i] = lk_load_vec_ca(from + i * LK_VEC<E>);
}
template <class E, int N> LK_DEVICE void lk_srms_norm_load(float (&x)[N], const E *from)
{
    lk_vec<E> raw[N / LK_VEC<E>];
    lk_srms_norm_load_raw(raw, from);
    lk_srms_norm_unpack<E, N>(x, raw);
}
template <class E> LK_DEVICE void lk_srms_norm_store(E *to, const float (&x)[1]) { lk_put(to, x[0]); }
template <class E, int N> LK_DEVICE void lk_srms_norm_store(E *to, const float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N / LK_VEC<E>; i++) {
        float part[LK_VEC<E>];
#pragma unroll
        for (int j = 0; j < LK_VEC<E>; j++) part[j] = x[i * LK_VEC<E> + j];
        lk_vec<E> raw;
        lk_pack(&raw, part);
        lk_store_vec_wb(to + i * LK_VEC<E>, raw);
    }
}

/* x *= weight[0 .. N): at full width where it is aligned, which it is not beside rows of odd length. Every row reads it, so it
 * may stay in the caches. */
template <class E, int N> LK_DEVICE void lk_srms_norm_scale_wide(float (&x)[N], const E *weight)
{
    lk_vec<E> raw[N / LK_VEC<E>];
    float w[N];
#pragma unroll
    for (int i = 0; i < N / LK_VEC<E>; i++) raw[i].raw = ((const uint4 *)weight)[i];
    lk_srms_norm_unpack<E, N>(w, raw);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] *= w[j];
}
template <class E, int N> LK_DEVICE void lk_srms_norm_scale(float (&x)[N], const E *weight)
{
    if constexpr (N > 1) {
        if ((uintptr_t)weight % 16 == 0) return lk_srms_norm_scale_wide(x, weight);
    }
#pragma unroll
    for (int j = 0; j < N; j++) x[j] *= lk_to_float(weight[j]);
}
template <class T> LK_DEVICE lk_vec<T> lk_srms_norm_load_weight(const T *weight)
{
    if ((uintptr_t)weight % 16 == 0) return {*(const uint4 *)weight};
    float w[LK_VEC<T>];
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++) w[j] = lk_to_float(weight[j]);
    lk_vec<T> raw;
    lk_pack(&raw, w);
    return raw;
}
template <class T> LK_DEVICE void lk_srms_norm_scale(float (&x)[LK_VEC<T>], lk_vec<T> weight)
{
    float w[LK_VEC<T>];
    lk_forget(&weight.raw); /* its floats are not kept beside it */
    lk_unpack(w, weight);
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++) x[j] *= w[j];
}
template <class T, int N> LK_DEVICE void lk_srms_norm_weigh(float (&x)[N], const void *weight, int is_f32, int col)
{
    if (weight && is_f32) lk_srms_norm_scale(x, (const float *)weight + col);
    else if (weight) lk_srms_norm_scale(x, (const T *)weight + col);
}

/* A tensor that a kernel reads; rows NULL: there is none. part: how many 16-byte parts of a vector come before it, where a
 * thread holds all of a vector in shared memory. */
typedef struct {
    const void *rows;
    int64_t stride;
    int part;
} lk_srms_norm_input;

/* How the rows are shared out. A row's team is 1 to 32 lanes of a warp, several teams a block; or a block; or a cluster, of
 * which each block takes a segment of the columns. */
typedef struct {
    lk_srms_norm_input x, r, dy, dr; /* of T, R, T, R: s = x + r, either may be missing; r is residual or residual_out; dr is
                                        dresidual_out */
    int parts;                       /* of a vector of all inputs */
    int team_log2;                   /* 0 to 5, or -1: the block or the cluster is the team */
    int segment;                     /* columns a block, a multiple of LK_VEC<T> in a cluster */
    int stretch;                     /* vectors a warp of a block, a multiple of 32 */
    int aligned;                     /* all tensors' rows have their 16-byte boundaries at the same columns */
    int offset, offset_step;         /* row r starts offset + r offset_step elements, modulo LK_VEC<T>, behind a boundary */
    int weight_is_f32;
    float inverse_cols;
} lk_srms_norm_plan;

/* Where a thread stands: its team's first row and the step to the next, of each row columns begin .. begin + cols, which `size`
 * threads share. Of the vectors a warp has a stretch, each lane every 32nd of it: vec, vec + 32, ... below stop. A step known
 * to the compiler saves registers and instructions. */
typedef struct {
    int64_t row, step;
    int begin, cols, team, rank, size, vec, stop;
} lk_srms_norm_place;

LK_DEVICE lk_srms_norm_place lk_srms_norm_stand(const lk_srms_norm_plan &p, int cols)
{
    if (p.team_log2 >= 0) {
        const int size = 1 << p.team_log2, teams = (int)blockDim.x >> p.team_log2, team = (int)threadIdx.x >> p.team_log2;
        const int64_t row = (int64_t)blockIdx.x * teams + team, step = (int64_t)gridDim.x * teams;
        const int rank = (int)threadIdx.x & (size - 1);
        return {row, step, 0, cols, team, rank, size, rank, cols};
    }
    const unsigned blocks = lk_cluster_nctarank();
    const int begin = min((int)lk_cluster_ctarank() * p.segment, cols), left = cols - begin;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    return {blockIdx.x / blocks, gridDim.x / blocks, begin, left < p.segment ? left : p.segment, 0, (int)threadIdx.x,
            (int)blockDim.x, warp * p.stretch + lane, (warp + 1) * p.stretch};
}

/* How a segment of a row splits into vectors, as lk_split; rows that do not agree go element by element. */
typedef struct {
    int head, edge, vecs;
} lk_srms_norm_split;

/* How many elements behind a 16-byte boundary a row starts, of N a vector. */
LK_DEVICE int lk_srms_norm_past(const lk_srms_norm_plan &p, int64_t row, int N)
{
    return (int)((unsigned)p.offset + (unsigned)row * (unsigned)p.offset_step) & (N - 1);
}
template <class T> LK_DEVICE lk_srms_norm_split lk_srms_norm_split_row(const lk_srms_norm_plan &p, int64_t row, int cols)
{
    if (!p.aligned) return {0, cols, 0};
    const int past = lk_srms_norm_past(p, row, LK_VEC<T>);
    const int head = min(-past & (LK_VEC<T> - 1), cols), vecs = (cols - head) / LK_VEC<T>;
    return {head, cols - vecs * LK_VEC<T>, vecs};
}
template <class T> LK_DEVICE int lk_srms_norm_edge(lk_srms_norm_split split, int i)
{
    return i < split.head ? i : split.vecs * LK_VEC<T> + i;
}

/* N elements of s = x + r from global memory. */
template <class T, class R, int N>
LK_DEVICE void lk_srms_norm_load_s(float (&s)[N], const lk_srms_norm_plan &p, int64_t row, int col)
{
#pragma unroll
    for (int j = 0; j < N; j++) s[j] = 0.0f;
    if (p.x.rows) lk_srms_norm_load(s, (const T *)p.x.rows + row * p.x.stride + col);
    if (!p.r.rows) return;
    float r[N];
    lk_srms_norm_load(r, (const R *)p.r.rows + row * p.r.stride + col);
#pragma unroll
    for (int j = 0; j < N; j++) s[j] += r[j];
}

/* What a thread holds of a vector of s from the sum to the scaling: PACKED, where s is one tensor of T, as it came; else the
 * float sum. Unpacking again costs less than registers do. */
template <class T, bool PACKED> struct lk_srms_norm_held {
    lk_vec<T> s;
};
template <class T> struct lk_srms_norm_held<T, false> {
    float s[LK_VEC<T>];
};
template <class T> LK_DEVICE void lk_srms_norm_get(float (&s)[LK_VEC<T>], lk_srms_norm_held<T, true> *held)
{
    lk_forget(&held->s.raw);
    lk_unpack(s, held->s);
}
template <class T> LK_DEVICE void lk_srms_norm_get(float (&s)[LK_VEC<T>], lk_srms_norm_held<T, false> *held)
{
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++) s[j] = held->s[j];
}

/* Asks for what is at column col of a row, before it may be read. */
template <class E> LK_DEVICE void lk_srms_norm_prefetch(const lk_srms_norm_input &in, int64_t row, int col)
{
    if (in.rows) lk_prefetch_l2((const E *)in.rows + row * in.stride + col);
}

/* Loads U vectors of a thread, 32 apart: `count` vectors are left from the first on, which is at column col. */
template <class E, int PARTS, int U>
LK_DEVICE void lk_srms_norm_load_raw(lk_vec<E> (&raw)[U][PARTS], const lk_srms_norm_input &in, int64_t row, int col, int count)
{
    if (!in.rows) return;
    const E *from = (const E *)in.rows + row * in.stride + col;
#pragma unroll
    for (int u = 0; u < U; u++)
        if (u * 32 < count) lk_srms_norm_load_raw(raw[u], from + u * 32 * PARTS * LK_VEC<E>);
}
/* s = x + r, of which either may be missing. */
template <class T, class R>
LK_DEVICE void lk_srms_norm_add(float (&s)[LK_VEC<T>], const lk_srms_norm_plan &p, const lk_vec<T> (&x)[1],
                                const lk_vec<R> (&r)[LK_VEC<T> / LK_VEC<R>])
{
    constexpr int N = LK_VEC<T>;
    float add[N];
#pragma unroll
    for (int j = 0; j < N; j++) s[j] = 0.0f;
    if (p.x.rows) lk_unpack(s, x[0]);
    lk_srms_norm_unpack<R, N>(add, r);
#pragma unroll
    for (int j = 0; j < N && p.r.rows; j++) s[j] += add[j];
}
/* The first U vectors of s of a thread. */
template <class T, class R, int U>
LK_DEVICE void lk_srms_norm_hold(lk_srms_norm_held<T, true> (&held)[U], const lk_srms_norm_plan &p, int64_t row, int col,
                                 int count)
{
    const T *x = (const T *)p.x.rows + row * p.x.stride + col;
#pragma unroll
    for (int u = 0; u < U; u++)
        if (u * 32 < count) held[u].s = lk_load_vec_ca(x + u * 32 * LK_VEC<T>);
}
template <class T, class R, int U>
LK_DEVICE void lk_srms_norm_hold(lk_srms_norm_held<T, false> (&held)[U], const lk_srms_norm_plan &p, int64_t row, int col,
                                 int count)
{
    lk_vec<T> x[U][1];
    lk_vec<R> r[U][LK_VEC<T> / LK_VEC<R>];
    lk_srms_norm_load_raw(x, p.x, row, col, count);
    lk_srms_norm_load_raw(r, p.r, row, col, count);
#pragma unroll
    for (int u = 0; u < U; u++) lk_srms_norm_add<T, R>(held[u].s, p, x[u], r[u]);
}

/* The sums over a row's team; turn as in lk_sum_cluster. */
template <int N> LK_DEVICE void lk_srms_norm_sum(const lk_srms_norm_plan &p, float (&v)[N], int turn)
{
    if (p.team_log2 < 0) return lk_sum_cluster(v, turn);
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = lk_sum_warp(v[n], 1 << p.team_log2);
}

/* A sum in short chains: long ones of like terms, as squares are, round one way. */
typedef struct {
    float sum, part;
    int count;
} lk_srms_norm_total;

LK_DEVICE void lk_srms_norm_add(lk_srms_norm_total *total, float x)
{
    total->part += x;
    if (++total->count % 16 == 0) total->sum += total->part, total->part = 0.0f;
}

template <int N> LK_DEVICE float lk_srms_norm_dot(const float (&a)[N], const float (&b)[N])
{
    float sum[2] = {0.0f, 0.0f}; /* of 8, two chains: neither waits for the other's latency */
#pragma unroll
    for (int j = 0; j < N; j++) sum[j / 4 % 2] = fmaf(a[j], b[j], sum[j / 4 % 2]);
    return sum[0] + sum[1];
}

/* Threads of a large block, and the vectors of a row that a thread of forward holds. */
#define LK_SRMS_NORM_THREADS 512
#define LK_SRMS_NORM_FORWARD_VECS(packed) ((packed) ? 8 : 4)
/* Most threads a block, and blocks an SM, which bound a thread's registers: up to sm_90 64 are enough for 8 packed vectors of
 * 16-bit elements, or 4 and their weight, of f32 for 8 on sm_90. Measured on an H200, f32, 16384 rows of 4096: 0.97 of the
 * ceiling, by 92 registers 0.72. */
#define LK_SRMS_NORM_FORWARD_MOST(packed) ((packed) && LK_ARCH == 900 ? 1024 : LK_SRMS_NORM_THREADS)
#define LK_SRMS_NORM_FORWARD_BLOCKS(T, packed, weight)                                                                         \
    ((packed) && sizeof(T) == 2 && LK_ARCH < ((weight) ? 1000 : 900) ? 2 : 1)

/* Few rows: vectors a thread holds, most threads of a block, and most blocks an SM (on an H200, 2048 rows of 256 columns take
 * 2.8 us instead of 2.1); and a thread's first vector. */
#define LK_SRMS_NORM_FEW_VECS 2
#define LK_SRMS_NORM_FEW_THREADS 512
#define LK_SRMS_NORM_FEW_BLOCKS 8
LK_DEVICE int lk_srms_norm_first(void)
{
    return (int)threadIdx.x / 32 * LK_SRMS_NORM_FEW_VECS * 32 + (int)threadIdx.x % 32;
}

/* ---- Forward ------------------------------------------------------------------------------------------------------------ */

/* A kernel's part of the arguments. */
typedef struct {
    const void *x, *residual, *weight;
    void *y, *residual_out;
    float *rstd;
    int64_t rows, cols, x_stride, residual_stride, y_stride, residual_out_stride;
    float eps;
    int residual_dtype, weight_dtype, path;
} lk_srms_norm_forward_call;

typedef struct {
    lk_srms_norm_forward_call a;
    lk_srms_norm_plan p;
} lk_srms_norm_forward_plan;

/* Writes N elements of a row; weight: theirs, where it is held. */
template <class T, class R, int N>
LK_DEVICE void lk_srms_norm_forward_put(const lk_srms_norm_forward_plan &p, float rstd, float (&s)[N], int64_t row, int col,
                                        const lk_vec<T> *weight = NULL)
{
    if (p.a.residual_out) lk_srms_norm_store((R *)p.a.residual_out + row * p.a.residual_out_stride + col, s);
    if (!p.a.y) return;
#pragma unroll
    for (int j = 0; j < N; j++) s[j] *= rstd;
    if constexpr (N > 1) {
        if (weight) lk_srms_norm_scale(s, *weight);
    }
    if (!weight) lk_srms_norm_weigh<T>(s, p.a.weight, p.p.weight_is_f32, col);
    lk_srms_norm_store((T *)p.a.y + row * p.a.y_stride + col, s);
}

/* A team owns a row. Each thread holds its first U vectors; what is beyond them, and the single elements at a row's ends, it
 * reads twice. WEIGHT: there is one of T, on 16 bytes as x's rows are, and a thread holds its vectors too; of f32 there are not
 * enough registers. Measured on an H200, bf16, with a residual, in shares of the ceiling: 4096 rows of 2048 columns 0.96, by a
 * weight read behind the sum 0.88; 16384 of 4096 0.97 and 0.96. */
template <class T, class R, bool PACKED, bool WEIGHT>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_FORWARD_MOST(PACKED && !WEIGHT),
                                 LK_SRMS_NORM_FORWARD_BLOCKS(T, PACKED, WEIGHT))
    lk_srms_norm_forward_kernel(const __grid_constant__ lk_srms_norm_forward_plan p)
{
    constexpr int U = LK_SRMS_NORM_FORWARD_VECS(PACKED && !WEIGHT), N = LK_VEC<T>;
    const lk_srms_norm_place at = lk_srms_norm_stand(p.p, (int)p.a.cols);
    const int64_t row = at.row;
    const bool owner = row < p.a.rows; /* lanes without a row still take part in the warp's reduction */
    const lk_srms_norm_split split = owner ? lk_srms_norm_split_row<T>(p.p, row, at.cols) : lk_srms_norm_split{0, 0, 0};
    const int first = at.begin + split.head, stop = min(split.vecs, at.stop);
    lk_cluster_begin();
    /* Prefetch, dependents: on an H200 larger blocks of a row took 1 to 4 % longer so. On sm_80 it would only spill. */
    const bool early = LK_ARCH >= 900 && at.size <= 64;
    if (early && at.vec < stop) {
        lk_srms_norm_prefetch<T>(p.p.x, row, first + at.vec * N);
        lk_srms_norm_prefetch<R>(p.p.r, row, first + at.vec * N);
    }
    lk_griddepcontrol_wait();
    if (early) lk_griddepcontrol_launch_dependents();

    lk_vec<T> weight[U][1];
    if (WEIGHT) lk_srms_norm_load_raw(weight, {p.a.weight, 0, 0}, 0, first + at.vec * N, stop - at.vec);
    lk_srms_norm_held<T, PACKED> held[U];
    lk_srms_norm_hold<T, R>(held, p.p, row, first + at.vec * N, stop - at.vec);
    lk_srms_norm_total total = {};
    float s[N], one[1];
#pragma unroll
    for (int u = 0; u < U; u++) {
        if (at.vec + u * 32 >= stop) break;
        lk_srms_norm_get<T>(s, &held[u]);
        total.sum += lk_srms_norm_dot(s, s);
    }
    for (int vec = at.vec + U * 32; vec < stop; vec += 32) {
        lk_srms_norm_load_s<T, R>(s, p.p, row, first + vec * N);
        lk_srms_norm_add(&total, lk_srms_norm_dot(s, s));
    }
    for (int i = at.rank; i < split.edge; i += at.size) {
        lk_srms_norm_load_s<T, R>(one, p.p, row, at.begin + lk_srms_norm_edge<T>(split, i));
        lk_srms_norm_add(&total, one[0] * one[0]);
    }
    lk_cluster_ready();
    float sum[1] = {total.sum + total.part};
    lk_srms_norm_sum(p.p, sum, 0);
    if (!early) lk_griddepcontrol_launch_dependents();

    const float rstd = lk_rsqrt(fmaf(sum[0], p.p.inverse_cols, p.a.eps));
    if (owner && at.begin == 0 && at.rank == 0 && p.a.rstd) p.a.rstd[row] = rstd;
#pragma unroll
    for (int u = 0; u < U; u++) {
        const int vec = at.vec + u * 32;
        if (vec >= stop) break;
        lk_srms_norm_get<T>(s, &held[u]);
        lk_srms_norm_forward_put<T, R>(p, rstd, s, row, first + vec * N, WEIGHT ? weight[u] : NULL);
    }
    for (int vec = at.vec + U * 32; vec < stop; vec += 32) {
        lk_srms_norm_load_s<T, R>(s, p.p, row, first + vec * N);
        lk_srms_norm_forward_put<T, R>(p, rstd, s, row, first + vec * N);
    }
    for (int i = at.rank; i < split.edge; i += at.size) {
        const int col = at.begin + lk_srms_norm_edge<T>(split, i);
        lk_srms_norm_load_s<T, R>(one, p.p, row, col);
        lk_srms_norm_forward_put<T, R>(p, rstd, one, row, col);
    }
}

/* Few rows, whose time is one turn of latencies: a block owns a row, all that a thread needs is on its way before anything is
 * waited for, and the code is short, since instructions come late to a block that has just started. Rows start and end on 16
 * bytes, weight is of type T on 16 bytes, and a thread holds all of its vectors. BARE: there are x and y, perhaps rstd.
 * Measured on an H200, bf16: 512 rows of 2048 columns with a residual take 0.67 of the kernel above's time; 4 of 1024 without
 * take 1.35 us, where a copy takes 1.01; in earlier forms, without prefetches 1.46, as if not BARE 1.54 and by the kernel above
 * 1.74; 1 of 4096 with residual and weight takes 1.74 us. */
template <class T, class R, bool BARE>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_FEW_THREADS)
    lk_srms_norm_forward_few_kernel(const __grid_constant__ lk_srms_norm_forward_plan p)
{
    constexpr int U = LK_SRMS_NORM_FEW_VECS, N = LK_VEC<T>;
    const int64_t row = blockIdx.x;
    const int vec = lk_srms_norm_first(), count = (int)p.a.cols / N - vec;
    if (count > 0) {
        lk_srms_norm_prefetch<T>(p.p.x, row, vec * N);
        if (!BARE) lk_srms_norm_prefetch<R>(p.p.r, row, vec * N);
        if (!BARE) lk_srms_norm_prefetch<T>({p.a.weight, 0, 0}, 0, vec * N);
    }
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();

    lk_vec<T> weight[U][1];
    if (!BARE) lk_srms_norm_load_raw(weight, {p.a.weight, 0, 0}, 0, vec * N, count);
    lk_srms_norm_held<T, BARE> held[U];
    lk_srms_norm_hold<T, R>(held, p.p, row, vec * N, count);
    float sum[1] = {0.0f}, s[N];
#pragma unroll
    for (int u = 0; u < U; u++) {
        lk_srms_norm_get<T>(s, &held[u]);
        if (u * 32 < count) sum[0] += lk_srms_norm_dot(s, s);
    }
    lk_sum_cluster<1, true>(sum, 0);

    const float rstd = lk_rsqrt(fmaf(sum[0], p.p.inverse_cols, p.a.eps));
    if (threadIdx.x == 0 && p.a.rstd) p.a.rstd[row] = rstd;
#pragma unroll
    for (int u = 0; u < U; u++) {
        const int col = (vec + u * 32) * N;
        if (u * 32 >= count) break;
        lk_srms_norm_get<T>(s, &held[u]);
        if (!BARE && p.a.residual_out) lk_srms_norm_store((R *)p.a.residual_out + row * p.a.residual_out_stride + col, s);
#pragma unroll
        for (int j = 0; j < N; j++) s[j] *= rstd;
        if (!BARE && p.a.weight) lk_srms_norm_scale(s, weight[u][0]);
        if (BARE || p.a.y) lk_srms_norm_store((T *)p.a.y + row * p.a.y_stride + col, s);
    }
}

/* ---- Backward ----------------------------------------------------------------------------------------------------------- */

/* Vectors of a row that a thread holds, rows at a time, and most threads a block: with weight a thread also has a register
 * for dweight's sum of each element it holds, and the next row on its way. */
#define LK_SRMS_NORM_BACKWARD_VECS 4
#define LK_SRMS_NORM_BACKWARD_STAGES(weight) ((weight) ? 2 : 1)
#define LK_SRMS_NORM_BACKWARD_THREADS(weight) ((weight) ? 256 : 512)

typedef struct {
    const void *x, *residual, *residual_out;
    const float *rstd;
    const void *weight, *dy, *dresidual_out;
    void *dx, *dresidual, *dweight, *workspace;
    size_t workspace_bytes;
    int64_t rows, cols, x_stride, residual_stride, residual_out_stride, dy_stride, dresidual_out_stride, dx_stride;
    int64_t dresidual_stride;
    float eps;
    int residual_dtype, weight_dtype, dweight_dtype, accumulate, path;
} lk_srms_norm_backward_call;

typedef struct {
    lk_srms_norm_backward_call a;
    lk_srms_norm_plan p;
    int64_t partials; /* rows of the workspace, f32 [partials, pitch], of sums for dweight: one a team, and as many elements
                         behind a boundary as the team's rows start, so that the sums of their vectors are vectors too */
    int64_t pitch;
    int vec;          /* LK_VEC<T> */
    bool hot;         /* see the kernel */
} lk_srms_norm_backward_plan;

/* What threads hold from the sums to the scaling: [warp][stage][part][vector][lane], each lane's its own, so that no barrier
 * guards it. The copies need no registers, and all of them are on their way at once. */
typedef struct {
    uint4 held[1]; /* as many as the launch says */
} lk_srms_norm_smem;

/* What a row's threads know of it. */
typedef struct {
    int64_t row;
    float rstd, slope; /* slope: mean(g h) rstd */
} lk_srms_norm_row;

/* Starts copies of an input's vectors into the lane's slots, `count` vectors being left from the first on, at column col. */
template <class E, int N, int U>
LK_DEVICE void lk_srms_norm_fetch_one(const lk_srms_norm_input &in, uint4 *slot, int64_t row, int col, int count)
{
    if (!in.rows) return;
    const E *from = (const E *)in.rows + row * in.stride + col;
#pragma unroll
    for (int u = 0; u < U; u++) {
        if (u * 32 >= count) break;
#pragma unroll
        for (int i = 0; i < N / LK_VEC<E>; i++)
            lk_cp_async_16(slot + in.part * U * 32, (i * U + u) * 512, from + u * 32 * N + i * LK_VEC<E>);
    }
}
template <class T, class R, class S, int U>
LK_DEVICE void lk_srms_norm_fetch(const lk_srms_norm_plan &p, uint4 *slot, int64_t row, int col, int count)
{
    lk_srms_norm_fetch_one<S, LK_VEC<T>, U>(p.x, slot, row, col, count);
    lk_srms_norm_fetch_one<R, LK_VEC<T>, U>(p.r, slot, row, col, count);
    lk_srms_norm_fetch_one<T, LK_VEC<T>, U>(p.dy, slot, row, col, count);
    lk_srms_norm_fetch_one<R, LK_VEC<T>, U>(p.dr, slot, row, col, count);
}

/* An input's N elements: vector u of the lane's U slots, or, U = 0, from global memory. */
template <class E, int U, int N>
LK_DEVICE void lk_srms_norm_get(float (&x)[N], const lk_srms_norm_input &in, const uint4 *slot, int u, int64_t row, int col)
{
    if constexpr (U > 0) {
        lk_vec<E> raw[N / LK_VEC<E>];
#pragma unroll
        for (int i = 0; i < N / LK_VEC<E>; i++) raw[i].raw = slot[((in.part + i) * U + u) * 32];
        lk_srms_norm_unpack<E, N>(x, raw);
    } else {
        lk_srms_norm_load(x, (const E *)in.rows + row * in.stride + col);
    }
}

/* s and dy, N elements of each. */
template <class T, class R, class S, bool HOT, int U, int N>
LK_DEVICE void lk_srms_norm_get_both(float (&s)[N], float (&dy)[N], const lk_srms_norm_plan &p, const uint4 *slot, int u,
                                     int64_t row, int col)
{
    if (HOT || p.dy.rows) {
        lk_srms_norm_get<T, U>(dy, p.dy, slot, u, row, col);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) dy[j] = 1.0f;
    }
    if constexpr (HOT) {
        lk_srms_norm_get<S, U>(s, p.x, slot, u, row, col);
    } else {
        float x[N];
#pragma unroll
        for (int j = 0; j < N; j++) s[j] = x[j] = 0.0f;
        if (p.r.rows) lk_srms_norm_get<R, U>(s, p.r, slot, u, row, col);
        if (p.x.rows) lk_srms_norm_get<T, U>(x, p.x, slot, u, row, col);
#pragma unroll
        for (int j = 0; j < N; j++) s[j] += x[j];
    }
}

/* What N elements of a row have of its sums of g s and, where rstd is not given, of s^2. */
template <class T, class R, class S, bool WEIGHT, bool HOT, int N, int U>
LK_DEVICE void lk_srms_norm_backward_sums(const lk_srms_norm_backward_plan &p, float (&sum)[2], lk_vec<T> weight,
                                          const uint4 *slot, int u, int64_t row, int col)
{
    float s[N], g[N];
    lk_srms_norm_get_both<T, R, S, HOT, U>(s, g, p.p, slot, u, row, col);
    if constexpr (WEIGHT && HOT) lk_srms_norm_scale(g, weight);
    else if (WEIGHT) lk_srms_norm_weigh<T>(g, p.a.weight, p.p.weight_is_f32, col);
    sum[0] = lk_srms_norm_dot(s, g);
    sum[1] = p.a.rstd ? 0.0f : lk_srms_norm_dot(s, s);
}

/* Writes N elements of a row, and adds what they have of dweight to sums. */
template <class T, class R, class S, bool WEIGHT, bool HOT, int N, int U>
LK_DEVICE void lk_srms_norm_backward_put(const lk_srms_norm_backward_plan &p, lk_srms_norm_row at, float (&sums)[N],
                                         lk_vec<T> weight, const uint4 *slot, int u, int col)
{
    float s[N], g[N];
    lk_srms_norm_get_both<T, R, S, HOT, U>(s, g, p.p, slot, u, at.row, col);
    if (WEIGHT) {
#pragma unroll
        for (int j = 0; j < N; j++) sums[j] = fmaf(g[j] * at.rstd, s[j], sums[j]);
        if constexpr (HOT) lk_srms_norm_scale(g, weight);
        else lk_srms_norm_weigh<T>(g, p.a.weight, p.p.weight_is_f32, col);
    }
#pragma unroll
    for (int j = 0; j < N; j++) g[j] = at.rstd * fmaf(-s[j], at.slope, g[j]);
    if (p.p.dr.rows) {
        lk_srms_norm_get<R, U>(s, p.p.dr, slot, u, at.row, col);
#pragma unroll
        for (int j = 0; j < N; j++) g[j] += s[j];
    }
    if (p.a.dx) lk_srms_norm_store((T *)p.a.dx + at.row * p.a.dx_stride + col, g);
    if (p.a.dresidual) lk_srms_norm_store((R *)p.a.dresidual + at.row * p.a.dresidual_stride + col, g);
}

/* The same for elements that no thread holds: their sums for dweight are in the team's row of the workspace. */
template <class T, class R, bool WEIGHT, int N>
LK_DEVICE void lk_srms_norm_backward_rest(const lk_srms_norm_backward_plan &p, lk_srms_norm_row at, float *partial, int col)
{
    float sums[N];
#pragma unroll
    for (int j = 0; j < N; j++) sums[j] = WEIGHT && p.a.dweight ? partial[col + j] : 0.0f;
    lk_srms_norm_backward_put<T, R, T, WEIGHT, false, N, 0>(p, at, sums, {}, NULL, 0, col);
#pragma unroll
    for (int j = 0; j < N; j++)
        if (WEIGHT && p.a.dweight) partial[col + j] = sums[j];
}

/* A thread's single element of a row. */
typedef struct {
    float s, dy, dr;
} lk_srms_norm_single;

template <class T, class R, class S>
LK_DEVICE lk_srms_norm_single lk_srms_norm_load_single(const lk_srms_norm_plan &p, int64_t row, int col)
{
    return {lk_to_float(((const S *)p.x.rows)[row * p.x.stride + col]),
            lk_to_float(((const T *)p.dy.rows)[row * p.dy.stride + col]),
            p.dr.rows ? lk_to_float(((const R *)p.dr.rows)[row * p.dr.stride + col]) : 0.0f};
}

/* A team owns a row, or with WEIGHT (there is weight or dweight) every step-th row, and then its vectors are at the same
 * columns in all of them. HOT: all elements are held, and there are dy, one source of s, of type S, and a weight of T where
 * there is weight; EDGES: single elements among them, at most one a thread. Without HOT single elements, and those beyond the
 * first U vectors of a thread, are read twice, and their sums for dweight are in the workspace from the start. */
template <class T, class R, class S, bool WEIGHT, bool HOT, bool EDGES>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_BACKWARD_THREADS(WEIGHT), HOT ? 2 : 1)
    lk_srms_norm_backward_kernel(const __grid_constant__ lk_srms_norm_backward_plan p)
{
    constexpr int U = LK_SRMS_NORM_BACKWARD_VECS, N = LK_VEC<T>, STAGES = LK_SRMS_NORM_BACKWARD_STAGES(WEIGHT);
    LK_DYN_SMEM(lk_srms_norm_smem, smem);
    const lk_srms_norm_place at = lk_srms_norm_stand(p.p, (int)p.a.cols);
    const int stage_size = p.p.parts * U * 32;
    uint4 *slots = smem.held + (int)threadIdx.x / 32 * STAGES * stage_size + (int)threadIdx.x % 32;
    float *partial = (float *)p.a.workspace; /* a team's first row is its number */
    if (WEIGHT) partial += at.row * p.pitch + lk_srms_norm_past(p.p, at.row, N);
    lk_cluster_begin();
    float sums[WEIGHT ? U : 1][N] = {};
    lk_srms_norm_split split = lk_srms_norm_split_row<T>(p.p, at.row, at.cols);
    const int first = at.begin + split.head + at.vec * N, vecs = min(split.vecs, at.stop) - at.vec;
    int count = at.row < p.a.rows ? vecs : 0;
    if (count > 0) {
        lk_srms_norm_prefetch<S>(p.p.x, at.row, first);
        lk_srms_norm_prefetch<T>(p.p.dy, at.row, first);
        lk_srms_norm_prefetch<R>(p.p.dr, at.row, first);
    }
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    if (WEIGHT && !HOT && p.a.dweight) { /* each thread what it will add to */
        for (int i = at.rank; i < split.edge; i += at.size) partial[at.begin + lk_srms_norm_edge<T>(split, i)] = 0.0f;
        for (int i = U * 32; i < vecs; i += 32)
            for (int j = 0; j < N; j++) partial[first + i * N + j] = 0.0f;
    }
    lk_srms_norm_fetch<T, R, S, U>(p.p, slots, at.row, first, count);
    lk_cp_async_commit_group();
    lk_vec<T> weights[WEIGHT ? U : 1] = {};
#pragma unroll
    for (int u = 0; WEIGHT && HOT && u < U; u++)
        if (u * 32 < count) weights[u] = lk_srms_norm_load_weight((const T *)p.a.weight + first + u * 32 * N);
    const bool single = HOT && EDGES && at.rank < split.edge;
    const int single_col = at.begin + lk_srms_norm_edge<T>(split, at.rank);
    const float single_weight = WEIGHT && single ? lk_to_float(((const T *)p.a.weight)[single_col]) : 1.0f;
    float single_sum = 0.0f;
    lk_srms_norm_single one = {}, next = {};
    if (single && at.row < p.a.rows) one = lk_srms_norm_load_single<T, R, S>(p.p, at.row, single_col);
    lk_cluster_ready();

    int turn = 0;
    for (int64_t row = at.row; row - at.team < p.a.rows; row += at.step, turn++) {
        const bool owner = row < p.a.rows; /* lanes without a row still take part in the warp's reduction */
        if (!owner) split.edge = count = 0;
        const uint4 *slot = slots + (WEIGHT ? (turn & 1) * stage_size : 0);
        if (WEIGHT) {
            const bool more = row + at.step < p.a.rows;
            if (more) lk_srms_norm_fetch<T, R, S, U>(p.p, slots + (~turn & 1) * stage_size, row + at.step, first, count);
            if (single && more) next = lk_srms_norm_load_single<T, R, S>(p.p, row + at.step, single_col);
            lk_cp_async_commit_group();
        }
        lk_srms_norm_row here = {row, p.a.rstd && owner ? p.a.rstd[row] : 0.0f, 0.0f};
        float sum[2] = {0.0f, 0.0f}, more[2];
        if (!HOT) { /* in short chains: long ones of like terms round one way */
            lk_srms_norm_total total[2] = {};
            for (int i = at.rank; i < split.edge; i += at.size) {
                const int col = at.begin + lk_srms_norm_edge<T>(split, i);
                lk_srms_norm_backward_sums<T, R, T, WEIGHT, false, 1, 0>(p, more, {}, NULL, 0, row, col);
                lk_srms_norm_add(&total[0], more[0]), lk_srms_norm_add(&total[1], more[1]);
            }
            for (int i = U * 32; i < count; i += 32) {
                lk_srms_norm_backward_sums<T, R, T, WEIGHT, false, N, 0>(p, more, {}, NULL, 0, row, first + i * N);
                lk_srms_norm_add(&total[0], more[0]), lk_srms_norm_add(&total[1], more[1]);
            }
            sum[0] = total[0].sum + total[0].part, sum[1] = total[1].sum + total[1].part;
        }
        if (single) sum[0] = one.s * (one.dy * single_weight), sum[1] = one.s * one.s;
        lk_cp_async_wait_group<STAGES - 1>();
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (u * 32 >= count) break;
            const int col = first + u * 32 * N, w = WEIGHT ? u : 0;
            lk_srms_norm_backward_sums<T, R, S, WEIGHT, HOT, N, U>(p, more, weights[w], slot, u, row, col);
            sum[0] += more[0], sum[1] += more[1];
        }
        if (p.a.rstd) {
            float weighted[1] = {sum[0]};
            lk_srms_norm_sum(p.p, weighted, turn);
            sum[0] = weighted[0];
        } else {
            lk_srms_norm_sum(p.p, sum, turn);
        }

        if (!p.a.rstd) here.rstd = lk_rsqrt(fmaf(sum[1], p.p.inverse_cols, p.a.eps));
        here.slope = sum[0] * here.rstd * p.p.inverse_cols * here.rstd;
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (u * 32 >= count) break;
            const int col = first + u * 32 * N, w = WEIGHT ? u : 0;
            lk_srms_norm_backward_put<T, R, S, WEIGHT, HOT, N, U>(p, here, sums[w], weights[w], slot, u, col);
        }
        if (single && owner) {
            single_sum = fmaf(one.dy * here.rstd, one.s, single_sum);
            float ds[1] = {here.rstd * fmaf(-one.s, here.slope, one.dy * single_weight) + one.dr};
            if (p.a.dx) lk_srms_norm_store((T *)p.a.dx + row * p.a.dx_stride + single_col, ds);
            if (p.a.dresidual) lk_srms_norm_store((R *)p.a.dresidual + row * p.a.dresidual_stride + single_col, ds);
            one = next;
        }
        if constexpr (!HOT) {
            for (int i = U * 32; i < count; i += 32)
                lk_srms_norm_backward_rest<T, R, WEIGHT, N>(p, here, partial, first + i * N);
            for (int i = at.rank; i < split.edge; i += at.size)
                lk_srms_norm_backward_rest<T, R, WEIGHT, 1>(p, here, partial, at.begin + lk_srms_norm_edge<T>(split, i));
        }
    }
    if (!WEIGHT || !p.a.dweight) return;
    if (single) partial[single_col] = single_sum;
    count = vecs; /* also of a team without rows */
#pragma unroll
    for (int u = 0; WEIGHT && u < U; u++) {
        if (u * 32 >= count) break;
        const float(&sum)[N] = sums[WEIGHT ? u : 0];
        float *to = partial + first + u * 32 * N;
#pragma unroll
        for (int j = 0; j < N; j += 4) *(float4 *)(to + j) = make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
    }
}

/* Few rows, as forward's, without dweight. BARE: there are x, dy and dx, perhaps rstd. Measured on an H200, bf16: 4 rows of
 * 1024 columns take 1.45 us; in earlier forms, without prefetches 1.62, before BARE 1.76, and 2.05 by the kernel above; 512
 * with a residual 0.86 of its time. */
template <class T, class R, bool BARE>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_FEW_THREADS)
    lk_srms_norm_backward_few_kernel(const __grid_constant__ lk_srms_norm_backward_plan p)
{
    constexpr int U = LK_SRMS_NORM_FEW_VECS, N = LK_VEC<T>, PARTS = N / LK_VEC<R>;
    const int64_t row = blockIdx.x;
    const int vec = lk_srms_norm_first(), count = (int)p.a.cols / N - vec;
    if (count > 0) {
        lk_srms_norm_prefetch<T>(p.p.dy, row, vec * N);
        lk_srms_norm_prefetch<T>(p.p.x, row, vec * N);
        if (!BARE) {
            lk_srms_norm_prefetch<T>({p.a.weight, 0, 0}, 0, vec * N);
            lk_srms_norm_prefetch<R>(p.p.r, row, vec * N);
            lk_srms_norm_prefetch<R>(p.p.dr, row, vec * N);
        }
    }
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();

    lk_vec<T> weight[U][1], x[U][1], dy[U][1];
    lk_vec<R> r[U][PARTS], dr[U][PARTS];
    float rstd = p.a.rstd ? p.a.rstd[row] : 0.0f;
    lk_srms_norm_load_raw(dy, p.p.dy, row, vec * N, count);
    lk_srms_norm_load_raw(x, p.p.x, row, vec * N, count);
    if (!BARE) {
        lk_srms_norm_load_raw(weight, {p.a.weight, 0, 0}, 0, vec * N, count);
        lk_srms_norm_load_raw(r, p.p.r, row, vec * N, count);
        lk_srms_norm_load_raw(dr, p.p.dr, row, vec * N, count);
    }
    float s[U][N], g[U][N], sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int u = 0; u < U; u++) {
        if (BARE) lk_unpack(s[u], x[u][0]);
        else lk_srms_norm_add<T, R>(s[u], p.p, x[u], r[u]);
#pragma unroll
        for (int j = 0; j < N; j++) g[u][j] = 1.0f;
        if (BARE || p.p.dy.rows) lk_unpack(g[u], dy[u][0]);
        if (!BARE && p.a.weight) lk_srms_norm_scale(g[u], weight[u][0]);
        if (u * 32 < count) sum[0] += lk_srms_norm_dot(s[u], g[u]), sum[1] += lk_srms_norm_dot(s[u], s[u]);
    }
    lk_sum_cluster<2, true>(sum, 0);

    if (!p.a.rstd) rstd = lk_rsqrt(fmaf(sum[1], p.p.inverse_cols, p.a.eps));
    const float slope = sum[0] * rstd * p.p.inverse_cols * rstd;
#pragma unroll
    for (int u = 0; u < U; u++) {
        const int col = (vec + u * 32) * N;
        if (u * 32 >= count) break;
        float add[N] = {};
        if (!BARE && p.p.dr.rows) lk_srms_norm_unpack<R, N>(add, dr[u]);
#pragma unroll
        for (int j = 0; j < N; j++) g[u][j] = fmaf(rstd, fmaf(-s[u][j], slope, g[u][j]), add[j]);
        if (BARE || p.a.dx) lk_srms_norm_store((T *)p.a.dx + row * p.a.dx_stride + col, g[u]);
        if (!BARE && p.a.dresidual) lk_srms_norm_store((R *)p.a.dresidual + row * p.a.dresidual_stride + col, g[u]);
    }
}

/* A lane owns a column, a block 32 of them: its 32 warps share the rows of the workspace. */
template <class T>
LK_KERNEL void __launch_bounds__(1024) lk_srms_norm_dweight_kernel(const __grid_constant__ lk_srms_norm_backward_plan p)
{
    LK_SHARED(float, part, [1024]);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int64_t col = (int64_t)blockIdx.x * 32 + lane;
    const int past = lk_srms_norm_past(p.p, warp, p.vec); /* the same for every 32nd row */
    const float *from = (const float *)p.a.workspace + past + col;
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    float sum = 0.0f;
    if (col < p.a.cols) {
#pragma unroll 8
        for (int64_t row = warp; row < p.partials; row += 32) sum += from[row * p.pitch];
    }
    part[threadIdx.x] = sum;
    __syncthreads(); /* all shares are there before the first warp adds them */
    if (warp > 0 || col >= p.a.cols) return;
    float quarter[4] = {};
#pragma unroll
    for (int i = 0; i < 32; i++) quarter[i % 4] += part[i * 32 + lane];
    sum = (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
    T *out = (T *)p.a.dweight + col;
    lk_put(out, p.a.accumulate ? lk_to_float(*out) + sum : sum);
}

/* ---- Launchers ---------------------------------------------------------------------------------------------------------- */

/* The tensors of a call, for the checks and for the layout: first those of rows, the ones that kernels read before the others. */
#define LK_SRMS_NORM_ROW_TENSORS 8
typedef struct {
    lk_tensor list[LK_SRMS_NORM_ROW_TENSORS + 3];
} lk_srms_norm_table;

template <class T> LK_HOST lk_srms_norm_table lk_srms_norm_tensors(lk_srms_norm_args *a, bool backward)
{
    const int own = sizeof(T), stream = lk_dtype_bytes<T>(a->residual_dtype);
    const bool summed = backward && a->residual_out; /* s is given: x and residual are not looked at */
    const int source = summed ? LK_UNUSED : LK_IN, forward_out = backward ? LK_UNUSED : LK_OUT;
    const int backward_in = backward ? LK_IN : LK_UNUSED, backward_out = backward ? LK_OUT : LK_UNUSED;
    const int64_t rows = a->rows, cols = a->cols;
    return {{
        {"x", a->x, own, source | LK_REQUIRED, cols, {{rows, &a->x_stride, "x_stride"}}},
        {"residual", a->residual, stream, source, cols, {{rows, &a->residual_stride, "residual_stride"}}},
        {"residual_out", a->residual_out, stream, summed ? LK_REQUIRED : backward ? LK_IN : LK_OUT, cols,
         {{rows, &a->residual_out_stride, "residual_out_stride"}}, {backward ? NULL : "residual"}},
        {"dy", a->dy, own, backward_in, cols, {{rows, &a->dy_stride, "dy_stride"}}},
        {"dresidual_out", a->dresidual_out, stream, backward_in, cols,
         {{rows, &a->dresidual_out_stride, "dresidual_out_stride"}}},
        {"y", a->y, own, forward_out, cols, {{rows, &a->y_stride, "y_stride"}}, {"x"}},
        {"dx", a->dx, own, backward_out, cols, {{rows, &a->dx_stride, "dx_stride"}},
         {"dy", stream == own ? "dresidual_out" : NULL}},
        {"dresidual", a->dresidual, stream, backward_out, cols, {{rows, &a->dresidual_stride, "dresidual_stride"}},
         {"dresidual_out"}},
        {"weight", a->weight, lk_dtype_bytes<T>(a->weight_dtype), LK_IN, rows ? cols : 0},
        {"rstd", a->rstd, 4, backward ? LK_IN : LK_OUT, rows},
        {"dweight", a->dweight, lk_dtype_bytes<T>(a->dweight_dtype), backward_out, cols},
    }};
}

#define LK_SRMS_NORM_ROWS ((int64_t)1 << 27) /* most rows of the paths that give each its blocks */

/* Validates; a becomes the arguments with every default filled in. arch: lk_device's, or LK_QUERY. */
template <class T>
LK_HOST lk_status lk_srms_norm_check(const char *op, const lk_srms_norm_args *args, bool backward, int arch,
                                     lk_srms_norm_args *a)
{
    if (!args) return lk_fail(LK_ERR_NULL, op, "args is NULL");
    *a = *args;
    const bool query = arch == LK_QUERY;
    lk_srms_norm_table table = lk_srms_norm_tensors<T>(a, backward);
    lk_tensor *const list = table.list;
    const int count = lk_used_tensors(list, LK_COUNT(table.list));
    lk_status status = query ? LK_OK : lk_check_null(op, list, count);
    if (!status) status = lk_check_size(op, "rows", a->rows, 0, INT64_MAX);
    if (!status) status = lk_check_size(op, "cols", a->cols, 1, (int64_t)1 << 30);
    if (!status) status = lk_check_shapes(op, list, count, query);
    if (!status) status = lk_check_number(op, "eps", a->eps, a->eps >= 0.0f && a->eps <= FLT_MAX, "finite and at least 0");
    if (!status) status = lk_check_dtype<T>(op, "residual_dtype", a->residual_dtype);
    if (!status) status = lk_check_dtype<T>(op, "weight_dtype", a->weight_dtype);
    if (!status && backward) status = lk_check_dtype<T>(op, "dweight_dtype", a->dweight_dtype);
    if (!status) status = lk_check_enum(op, "path", a->path, LK_SRMS_NORM_CLUSTER, "LK_SRMS_NORM_*");
    if (status) return status;
    if (a->path >= LK_SRMS_NORM_BLOCK && a->rows > LK_SRMS_NORM_ROWS)
        return lk_fail(LK_ERR_PATH, op, "path %d takes 2^27 rows at most; rows is %lld", a->path, (long long)a->rows);
    if (a->path == LK_SRMS_NORM_CLUSTER && arch < 90)
        return lk_fail(LK_ERR_PATH, op, "path %d (cluster) needs code for sm_90 or later", a->path);
    if (query) return LK_OK;
    status = lk_check_alignment(op, list, count);
    if (status) return status;
    lk_check_warn(op, a->rows == 0, backward ? "rows is 0; dweight alone is written, where it is given"
                                             : "rows is 0; nothing is computed");
    lk_check_warn(op, a->eps == 0.0f && !(backward && a->rstd), "eps is 0; a row of zeros gives NaN");
    return lk_check_allocations(op, list, count);
}

/* Whether a field names f32 while T is another type. */
template <class T> LK_HOST bool lk_srms_norm_other(int dtype)
{
    return dtype == LK_DTYPE_F32 && sizeof(T) < sizeof(float);
}

/* What a kernel is made for: vectors that a thread holds, and the number of them that it gets while there are threads; bytes
 * of shared memory that it needs for a part of a vector; most threads a block, and of one with several teams; whether single
 * elements need a thread each; most threads an SM of the kernel for few rows. */
typedef struct {
    int held, wanted, part_bytes, most_threads, team_threads, singles, few;
} lk_srms_norm_traits;

/* How a launch is laid out: one row a team. */
typedef struct {
    lk_srms_norm_plan p;
    int threads, cluster;
    int64_t grid;
    bool edges, few; /* rows have single elements at their ends; the kernel for few rows takes them */
    size_t smem, workspace;
} lk_srms_norm_layout;

/* Most bytes of shared memory that are asked for; every architecture has that much. */
#define LK_SRMS_NORM_SMEM (92 * 1024)

/* Fills in the plan's inputs and shares the rows out; N is LK_VEC<T>. */
LK_HOST lk_srms_norm_layout lk_srms_norm_lay_out(const lk_device *device, const lk_srms_norm_args *a, int N,
                                                 lk_srms_norm_traits traits, const lk_srms_norm_table &table)
{
    lk_srms_norm_layout l = {};
    l.cluster = 1;
    lk_srms_norm_plan *p = &l.p;
    lk_srms_norm_input *const inputs[] = {&p->x, &p->r, &p->r, &p->dy, &p->dr}; /* of the table's first tensors */
    p->inverse_cols = 1.0f / (float)a->cols;
    p->aligned = 1;
    const lk_tensor *given[LK_SRMS_NORM_ROW_TENSORS], *base = NULL; /* base: the first of T, else of f32 */
    int count = 0;
    for (int i = 0; i < LK_SRMS_NORM_ROW_TENSORS; i++) {
        const lk_tensor *const t = &table.list[i];
        if (!t->pointer || t->use & LK_UNUSED || lk_in_place_of(table.list, t)) continue; /* in place: as the other */
        given[count++] = t;
        if (!base || t->bytes < base->bytes) base = t;
        if (t->use & LK_OUT) continue;
        *inputs[i] = {t->pointer, *t->dim[0].stride, p->parts};
        p->parts += N * t->bytes / 16;
    }
    if (base) p->offset = (int)((uintptr_t)base->pointer / (unsigned)base->bytes % (unsigned)N);
    if (base) p->offset_step = (int)(*base->dim[0].stride % N);
    for (int i = 0; i < count; i++) {
        const int vec = 16 / given[i]->bytes;
        const int64_t offset = (int64_t)((uintptr_t)given[i]->pointer / (unsigned)given[i]->bytes);
        if ((offset - p->offset) % vec || (*given[i]->dim[0].stride - p->offset_step) % vec) p->aligned = 0;
    }
    const int64_t rows = a->rows, cols = a->cols;
    int path = a->path;
    l.edges = p->offset || p->offset_step || cols % N;
    const int64_t units = p->aligned ? lk_ceil_div(cols, N) : cols;
    l.threads = (int)(lk_ceil_div(units, 32 * LK_SRMS_NORM_FEW_VECS) * 32); /* of few rows */
    if (path == LK_SRMS_NORM_AUTO && p->aligned && !l.edges && l.threads <= LK_SRMS_NORM_FEW_THREADS &&
        rows <= LK_SRMS_NORM_FEW_BLOCKS * device->sms && rows * l.threads <= (int64_t)traits.few * device->sms) {
        l.few = true, l.grid = rows;
        return l;
    }
    /* As many vectors a thread as it can hold where all rows are resident at once, and for rows whose ends are not on 16 bytes:
     * fewer warps share a line. */
    const int wanted = l.edges || rows * units <= (int64_t)traits.held * 1024 * device->sms ? traits.held : traits.wanted;
    const int thread_bytes = traits.part_bytes * p->parts;
    int64_t most = traits.most_threads;
    if (most * thread_bytes > LK_SRMS_NORM_SMEM) most = LK_SRMS_NORM_SMEM / thread_bytes / 32 * 32;
    if (path == LK_SRMS_NORM_AUTO) {
        path = units <= 32 * wanted || rows > LK_SRMS_NORM_ROWS ? LK_SRMS_NORM_WARP : LK_SRMS_NORM_BLOCK;
        if (path == LK_SRMS_NORM_BLOCK && units > most * traits.held && device->arch >= 90) path = LK_SRMS_NORM_CLUSTER;
    }
    p->segment = (int)cols;
    if (path == LK_SRMS_NORM_WARP) {
        const int64_t lanes = traits.singles && l.edges && units < 2 * N - 2 ? 2 * N - 2 : units;
        while (p->team_log2 < 5 && 1 << p->team_log2 < lanes) p->team_log2++;
        l.threads = traits.team_threads;
        l.grid = lk_ceil_div(rows, l.threads >> p->team_log2);
        return l;
    }
    p->team_log2 = -1;
    if (path == LK_SRMS_NORM_CLUSTER) {
        l.cluster = 2;
        while (l.cluster < 8 && lk_ceil_div(units, l.cluster) > most * traits.held) l.cluster *= 2;
        p->segment = (int)(lk_ceil_div(lk_ceil_div(cols, l.cluster), 8 * N) * 8 * N); /* whole lines of 128 bytes */
    }
    const int64_t share = lk_ceil_div(units, l.cluster);
    int64_t threads = lk_ceil_div(share, wanted);
    while (threads < share && rows * l.cluster * threads < 1024 * (int64_t)device->sms) threads *= 2; /* few rows */
    threads = lk_ceil_div(threads < share ? threads : share, 32) * 32;
    l.threads = (int)(threads < most ? threads : most);
    p->stretch = (int)lk_ceil_div(share, l.threads) * 32;
    l.grid = rows * l.cluster;
    return l;
}

template <class T, class R, bool PACKED> LK_HOST void (*lk_srms_norm_forward_choose(bool held))(lk_srms_norm_forward_plan)
{
    if constexpr (sizeof(T) == 2) {
        if (held) return lk_srms_norm_forward_kernel<T, R, PACKED, true>;
    }
    return lk_srms_norm_forward_kernel<T, R, PACKED, false>;
}

template <class T> LK_HOST lk_status lk_srms_norm_forward(const char *op, const lk_srms_norm_args *args, cudaStream_t stream)
{
    lk_srms_norm_args a = {};
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    lk_status status = lk_srms_norm_check<T>(op, args, false, error ? 90 : device.arch, &a);
    if (!status) status = lk_asked_device(op, error);
    if (status || a.rows == 0) return status;

    const bool other = lk_srms_norm_other<T>(a.residual_dtype), packed = !other && !a.residual;
    const bool bare = !a.residual && !a.residual_out && !a.weight && a.y;
    const int64_t vecs = a.cols / LK_VEC<T>;
    /* Measured on an H200, bf16: 131072 columns 0.976 of the ceiling by 1024 threads, 0.926 by 512, but 256 rows of them 0.835
     * and 0.882; 32768 with a residual, two blocks an SM in turn, 0.875 by 256 threads and 0.81 by 512. */
    int most = LK_SRMS_NORM_THREADS;
    if (packed && device.arch == 90 && vecs > 8192 && a.rows >= 4 * device.sms) most = 1024;
    if (!packed && device.arch >= 90 && vecs > 2048 && vecs <= 8192) most = 256;
    const bool weight_is_f32 = a.weight && lk_srms_norm_other<T>(a.weight_dtype);
    const bool plain = !weight_is_f32 && (uintptr_t)a.weight % 16 == 0;
    const bool held = sizeof(T) == 2 && a.weight && plain && (uintptr_t)a.x % 16 == 0 && a.x_stride % LK_VEC<T> == 0 &&
                      vecs <= LK_SRMS_NORM_THREADS * LK_SRMS_NORM_FORWARD_VECS(false);
    /* Measured on an H200, without a weight and before BARE: up to 2048 threads an SM the kernel for few rows takes 0.63 to
     * 1.00 of the other's time, then 1.06 to 1.24; backward's up to 256 threads 0.86 to 1.01, then 0.89 to 1.50. */
    const lk_srms_norm_traits traits = {LK_SRMS_NORM_FORWARD_VECS(packed && !held), 4, 0, most, 128, 0, plain ? 2048 : 0};
    const lk_srms_norm_layout l = lk_srms_norm_lay_out(&device, &a, LK_VEC<T>, traits, lk_srms_norm_tensors<T>(&a, false));
    lk_srms_norm_forward_plan plan = {
        {a.x, a.residual, a.weight, a.y, a.residual_out, a.rstd, a.rows, a.cols, a.x_stride, a.residual_stride, a.y_stride,
         a.residual_out_stride, a.eps, a.residual_dtype, a.weight_dtype, a.path}, l.p};
    plan.p.weight_is_f32 = weight_is_f32;
    return lk_launch_pdl(op, &device,
                         l.few && bare    ? lk_srms_norm_forward_few_kernel<T, T, true>
                         : l.few && other ? lk_srms_norm_forward_few_kernel<T, float, false>
                         : l.few          ? lk_srms_norm_forward_few_kernel<T, T, false>
                         : packed         ? lk_srms_norm_forward_choose<T, T, true>(held)
                         : other          ? lk_srms_norm_forward_choose<T, float, false>(held)
                                          : lk_srms_norm_forward_choose<T, T, false>(held),
                         l.grid, l.cluster, l.threads, 0, stream, plan);
}

/* Lays the launch of checked arguments out. */
template <class T>
LK_HOST lk_srms_norm_layout lk_srms_norm_backward_lay_out(const lk_device *device, lk_srms_norm_args *a,
                                                          lk_srms_norm_backward_plan *plan)
{
    constexpr int N = LK_VEC<T>, vecs = LK_SRMS_NORM_BACKWARD_VECS;
    const bool weight = a->weight || a->dweight, weight_is_f32 = a->weight && lk_srms_norm_other<T>(a->weight_dtype);
    const int few = a->dweight || weight_is_f32 || (uintptr_t)a->weight % 16 ? 0 : 256; /* measured: see forward */
    const int part_bytes = 16 * vecs * LK_SRMS_NORM_BACKWARD_STAGES(weight);
    const lk_srms_norm_traits traits = {vecs, vecs, part_bytes, LK_SRMS_NORM_BACKWARD_THREADS(weight), 64, 1, few};
    lk_srms_norm_layout l = lk_srms_norm_lay_out(device, a, N, traits, lk_srms_norm_tensors<T>(a, true));
    l.smem = l.few ? 0 : sizeof(lk_srms_norm_smem) + (size_t)(part_bytes * l.p.parts * l.threads);
    if (weight && !l.few && a->rows > 0) { /* persistent blocks, as many as fit; each team has a row of the workspace */
        plan->vec = N, plan->pitch = lk_ceil_div(a->cols, N) * N + N; /* vectors, and the elements before the first */
        const int64_t room = 220 * 1024 / ((int64_t)l.smem + 5 * 1024);
        const int64_t resident = 2 * LK_SRMS_NORM_BACKWARD_THREADS(true) / l.threads;
        const int64_t most = (resident < room ? resident : room) * device->sms;
        const int64_t cap = ((int64_t)64 << 20) / (4 * plan->pitch) + 2;
        const int64_t teams = l.p.team_log2 < 0 ? 1 : l.threads >> l.p.team_log2;
        int64_t blocks = l.grid / l.cluster;
        if (l.grid > most) blocks = lk_ceil_div(most, l.cluster);
        if (blocks * teams > cap) blocks = cap / teams; /* 64 MiB and two rows at most */
        const int64_t turn = l.p.offset_step ? lk_ceil_div(N, teams) : 1; /* every N-th row starts at the same offset */
        if (blocks * teams < a->rows && blocks < turn) l.p.aligned = 0;
        else if (blocks * teams < a->rows) blocks -= blocks % turn;
        l.grid = blocks * l.cluster;
        plan->partials = blocks * teams;
        if (a->dweight) l.workspace = (size_t)(plan->partials * plan->pitch) * sizeof(float);
    }
    plan->p = l.p;
    plan->p.weight_is_f32 = weight_is_f32;
    const bool held = !l.few && l.p.aligned && l.p.stretch <= 32 * vecs &&
                      (l.p.team_log2 < 0 || lk_ceil_div(a->cols, N) <= (int64_t)vecs << l.p.team_log2);
    const bool one = !l.p.x.rows || !l.p.r.rows; /* source of s */
    plan->hot = held && a->dy && one && (!weight || (a->weight && !weight_is_f32));
    if (plan->hot && !plan->p.x.rows) plan->p.x = plan->p.r, plan->p.r.rows = NULL;
    return l;
}

template <class T, class R, class S, bool WEIGHT>
LK_HOST void (*lk_srms_norm_backward_choose(bool hot, bool edges))(lk_srms_norm_backward_plan)
{
    if (!hot) return lk_srms_norm_backward_kernel<T, R, T, WEIGHT, false, false>;
    return edges ? lk_srms_norm_backward_kernel<T, R, S, WEIGHT, true, true>
                 : lk_srms_norm_backward_kernel<T, R, S, WEIGHT, true, false>;
}
template <class T, class R, class S>
LK_HOST void (*lk_srms_norm_backward_choose(const lk_srms_norm_backward_plan &p,
                                            const lk_srms_norm_layout &l))(lk_srms_norm_backward_plan)
{
    const bool bare = p.p.x.rows && p.p.dy.rows && p.a.dx && !p.p.r.rows && !p.p.dr.rows && !p.a.dresidual && !p.a.weight;
    if (l.few) return bare ? lk_srms_norm_backward_few_kernel<T, T, true> : lk_srms_norm_backward_few_kernel<T, R, false>;
    return p.a.weight || p.a.dweight ? lk_srms_norm_backward_choose<T, R, S, true>(p.hot, l.edges)
                                     : lk_srms_norm_backward_choose<T, R, S, false>(p.hot, l.edges);
}

template <class T> LK_HOST lk_status lk_srms_norm_backward(const char *op, const lk_srms_norm_args *args, cudaStream_t stream)
{
    lk_srms_norm_args a = {};
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    lk_status status = lk_srms_norm_check<T>(op, args, true, error ? 90 : device.arch, &a);
    if (!status) status = lk_asked_device(op, error);
    if (status) return status;
    lk_srms_norm_backward_plan plan = {
        {a.x, a.residual, a.residual_out, a.rstd, a.weight, a.dy, a.dresidual_out, a.dx, a.dresidual, a.dweight, a.workspace,
         a.workspace_bytes, a.rows, a.cols, a.x_stride, a.residual_stride, a.residual_out_stride, a.dy_stride,
         a.dresidual_out_stride, a.dx_stride, a.dresidual_stride, a.eps, a.residual_dtype, a.weight_dtype, a.dweight_dtype,
         a.accumulate, a.path}, {}, 0, 0, 0, false};
    const lk_srms_norm_layout l = lk_srms_norm_backward_lay_out<T>(&device, &a, &plan);
    const lk_tensor scratch = {"workspace", a.workspace, 1, LK_OUT, (int64_t)l.workspace};
    status = lk_check_workspace(op, a.workspace, a.workspace_bytes, l.workspace);
    if (!status) status = lk_check_allocations(op, &scratch, 1);
    /* Persistent blocks of more rows start once the grid in front has ended. Measured on an H200, bf16, with a weight, forward
     * and backward in turn: 131072 rows of 2048 643 us, with programmatic dependent launch 764; 8192 of 2048 53.4 and 57.6;
     * backward alone 391 and 394, and 35.2 and 34.8. */
    const bool pdl = device.arch >= 90 && (plan.partials == 0 || a.rows <= 4 * plan.partials);
    const bool other = lk_srms_norm_other<T>(a.residual_dtype);
    if (!status && a.rows > 0)
        status = lk_launch_blocks(op, pdl,
                                  !other           ? lk_srms_norm_backward_choose<T, T, T>(plan, l)
                                  : a.residual_out ? lk_srms_norm_backward_choose<T, float, float>(plan, l)
                                                   : lk_srms_norm_backward_choose<T, float, T>(plan, l),
                                  l.grid, l.cluster, l.threads, l.smem, stream, plan);
    if (status || !a.dweight) return status;
    const bool f32 = lk_srms_norm_other<T>(a.dweight_dtype);
    return lk_launch_pdl(op, &device, f32 ? lk_srms_norm_dweight_kernel<float> : lk_srms_norm_dweight_kernel<T>,
                         lk_ceil_div(a.cols, 32), 1, 1024, 0, stream, plan);
}

/* No workspace. */
template <class T> LK_HOST lk_status lk_srms_norm_forward_workspace(const char *op, const lk_srms_norm_args *args, size_t *bytes)
{
    lk_srms_norm_args a = {};
    return lk_no_workspace(lk_srms_norm_check<T>(op, args, false, LK_QUERY, &a), bytes);
}

/* With x or residual_out the answer is for just these tensors. With neither it is the most that a call needs with any tensors
 * of these sizes and types: s from x, from x and residual or from residual_out, each other tensor given or not (an output in
 * place is as one that is not given); on 16 bytes, all off by an element, or each at an offset of its own. */
template <class T> LK_HOST lk_status lk_srms_norm_backward_workspace(const char *op, const lk_srms_norm_args *args, size_t *bytes)
{
    lk_srms_norm_args given = {};
    lk_device device = {};
    lk_status status = lk_srms_norm_check<T>(op, args, true, LK_QUERY, &given);
    if (status || !given.dweight || given.rows == 0) return lk_no_workspace(status, bytes);
    status = lk_asked_device(op, lk_current_device(&device));
    if (status) return status;
    const bool known = given.x || given.residual_out;
    size_t most = 0;
    for (int i = 0; i < (known ? 1 : 3 * 3 * 16); i++) {
        lk_srms_norm_args a = given;
        if (!known) {
            const int source = i % 3, shift = i / 3 % 3, which = i / 9;
            const int own = shift ? (int)sizeof(T) : 0, stream = shift ? lk_dtype_bytes<T>(given.residual_dtype) : 0;
            char *const address = (char *)(uintptr_t)4096;
            a.x = source < 2 ? address + own : NULL;
            a.residual = source == 1 ? address + stream : NULL;
            a.residual_out = source == 2 ? address + stream : NULL;
            a.dy = which & 1 ? address + own : NULL;
            a.dresidual_out = which & 2 ? address + stream : NULL;
            a.dx = which & 4 ? 2 * 4096 + address + (shift == 1 ? own : 0) : NULL;
            a.dresidual = which & 8 ? 4096 + address + (shift == 1 ? stream : 0) : NULL;
        }
        lk_srms_norm_backward_plan plan = {};
        const lk_srms_norm_layout l = lk_srms_norm_backward_lay_out<T>(&device, &a, &plan);
        if (l.workspace > most) most = l.workspace;
    }
    if (bytes) *bytes = most;
    return LK_OK;
}

#define LK_DEFINE_SRMS_NORM(T)                                                                                                 \
    LK_DECLARE_SRMS_NORM(T)                                                                                                    \
    LK_EMIT(srms_norm, forward, T)                                                                                             \
    LK_EMIT(srms_norm, backward, T)

#else
#define LK_DEFINE_SRMS_NORM(T) LK_NEEDS_NVCC("LK_DEFINE_SRMS_NORM")
#endif /* CUDA or the simulator */
#endif
