// SPDX-License-Identifier: MIT
/* glu.cuh - gated linear units, act(gate) * up, forward and backward: SwiGLU, GeGLU, ReGLU, and gpt-oss' form.
 *
 *   forward    y[r,c]          = row_weight[r] act(g[r,c]) v[r,c]
 *                                g = gate, or min(gate, limit);  v = up, or max(-limit, min(up, limit));  then + up_offset
 *   backward   dgate[r,c]      = row_weight[r] dy[r,c] v[r,c] act'(g[r,c]), 0 where the limit changed gate
 *              dup[r,c]        = row_weight[r] dy[r,c] act(g[r,c]), 0 where the limit changed up
 *              drow_weight[r]  = sum_c dy[r,c] act(g[r,c]) v[r,c]
 *   act        silu: g sigmoid(alpha g);  gelu: g Phi(g), Phi the normal distribution;  gelu_tanh: the same with
 *              Phi(g) = sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3));  relu: max(g, 0);  sigmoid: sigmoid(g)
 *
 * gate, up and y are [rows, cols]. Where one matmul computes gate and up, they are the halves of a tensor [rows, 2 cols]: give
 * up = gate + cols, and 2 cols as both strides. Where they are in turns (gate, up, gate, up, ...), set `interleaved`, and up to
 * NULL. gpt-oss has interleaved = 1, alpha = 1.702, limit = 7 and up_offset = 1. "Quick GELU" is silu with alpha = 1.702.
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/glu.cuh"                     #include "lk/glu.cuh"
 *                LK_DEFINE_GLU(bf16)                       LK_DECLARE_GLU(bf16)
 *            T is f32, f16 or bf16. Then, from C, asynchronously on the caller's stream, in a graph too:
 *                lk_glu_args args = {};                                    // silu
 *                args.gate = gate, args.up = up, args.y = y, args.rows = rows, args.cols = cols;
 *                lk_status status = lk_glu_forward_bf16(&args, stream);
 *                args.dy = dy, args.dgate = gate, args.dup = up;           // over gate and up; other tensors do as well
 *                status = lk_glu_backward_bf16(&args, stream);
 * Needs      lk_base.cuh, lk_check.cuh, lk_row.cuh, lk_ptx.cuh. No workspace: ..._workspace_bytes_<T> sets *bytes to 0.
 * Strides    From row to row; 0 means packed: cols, or 2 cols where a tensor is interleaved. So an expanded tensor, whose
 *            stride is 0, must be copied first.
 * Repeatable The same bits every time: fixed order, no atomics.
 * Source     Shazeer, "GLU Variants Improve Transformer", 2020.
 * Read on    lk/glu.md: how exact results are, and what is read and written.
 *
 * The kernels: lk_glu_forward_kernel, and lk_glu_backward_kernel, which has a form that also sums drow_weight. A thread has 1 to 4
 * vectors of 16 bytes of y or dy; with drow_weight a team of up to 256 threads has a row. Where rows are packed and there
 * are no row weights, all rows are one. For example forward of 4096 rows of 14336 columns in bf16: 7,340,032 vectors, 2 of them a
 * thread's, 28,672 blocks of 128 threads. The checks of arguments and the calls come last.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_GLU_CUH
#define LK_GLU_CUH

enum {
    LK_GLU_SILU = 0,
    LK_GLU_GELU = 1,
    LK_GLU_GELU_TANH = 2,
    LK_GLU_RELU = 3,
    LK_GLU_SIGMOID = 4
};

/* One struct for both calls: a training step fills it once. F: forward, B: backward; no letter: both. A call ignores the fields
 * of the other one. */
typedef struct {
    const void *gate;        /* F B in   T [rows, cols]; interleaved: T [rows, 2 cols], gate at the even columns, up at the odd */
    const void *up;          /* F B in   T [rows, cols]; interleaved: NULL */
    void *y;                 /* F out    T [rows, cols]; may be gate or up, unless these are interleaved */
    const void *dy;          /* B in     T [rows, cols], the upstream gradient */
    void *dgate;             /* B out    T [rows, cols]; may be gate or dy. Interleaved: T [rows, 2 cols], both gradients; may
                                         be gate. NULL to skip */
    void *dup;               /* B out    T [rows, cols]; may be up or dy; interleaved: NULL. NULL to skip */
    const float *row_weight; /* F B in   f32 [rows], the weight of an expert for a token, say; NULL means 1 */
    float *drow_weight;      /* B out    f32 [rows]; NULL to skip */
    int64_t rows;            /* at least 0 */
    int64_t cols;            /* at least 0 */
    int64_t gate_stride;     /* elements between rows; 0 means packed */
    int64_t up_stride;
    int64_t y_stride;        /* F: 0 means packed, or the stride of gate or up where y is one of these */
    int64_t dy_stride;       /* B */
    int64_t dgate_stride;    /* B: 0 means packed, or the stride of gate or dy where dgate is one of these */
    int64_t dup_stride;      /* B: 0 means packed, or the stride of up or dy where dup is one of these */
    int activation;          /* LK_GLU_SILU to LK_GLU_SIGMOID */
    int interleaved;         /* not 0: gate and up are in turns in `gate`, their gradients in `dgate` */
    float alpha;             /* silu's factor, finite; 0 means 1. Other activations have none */
    float limit;             /* above 0: gate is at most limit, up at most limit in size; 0: no limit */
    float up_offset;         /* finite; is added to up, after the limit */
} lk_glu_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md (overlap, alignment):
 *   LK_ERR_NULL    gate, or up without interleaved, in backward dy, is NULL and has elements; all outputs are NULL
 *   LK_ERR_SHAPE   a negative size or stride; cols above 2^61; a tensor of more than 2^62 elements with its gaps; elements of an
 *                  output that overlap
 *   LK_ERR_VALUE   activation is not in its enum; alpha or up_offset is not finite; alpha is given with another activation;
 *                  limit is below 0 or NaN; interleaved, and up or dup is given
 * Fastest: tensors whose rows start at the same address modulo 16, where interleaved at twice that of y or dy. */

#define LK_GLU_FUNCTIONS(X, T)                                                                                                 \
    X##_CALL(glu, forward, LK_FORWARD, T)                                                                                      \
    X##_CALL(glu, backward, LK_BACKWARD, T)
#define LK_DECLARE_GLU(T) LK_DECLARE(GLU, T)
#define LK_DEFINE_GLU(T) LK_DEFINE(GLU, T)

#if LK_CUDA

#include "lk_check.cuh"
#include "lk_row.cuh"

/* What every kernel gets: the caller's arguments with all defaults filled in, and how the rows are divided. */
typedef struct {
    lk_glu_args a;
    lk_team team;
} lk_glu_call;

#define LK_GLU_THREADS 128     /* of a block */
#define LK_GLU_SUM_THREADS 256 /* with drow_weight: of a block, and the most of a row */

/* Vectors of y or dy that a thread has at a time; one where an SM would have fewer than LK_GLU_FEW of them. */
template <class T, bool Back> constexpr int LK_GLU_VECS = Back && sizeof(T) == 2 ? 4 : 2;
#define LK_GLU_FEW 2048

/* ---- Activations --------------------------------------------------------------------------------------------------------- */

/* Phi(x), the share of a normal distribution below x, and its density phi(x). Phi(-a) = exp(-a^2 / 2) t P(t) with t = 1 / (1 +
 * 0.32 a), P a least-maximum fit of degree 9, so that a small Phi is exact too: lk/glu.md says how exact. In (1 + erf) / 2 digits of
 * it would cancel. */
LK_DEVICE float lk_glu_normal(float x, float *density)
{
    const float size = fabsf(x), t = lk_rcp(fmaf(0.32f, size, 1.0f)), bell = lk_ex2(-0.5f * LK_LOG2E * x * x);
    float p = -0x1.5958aep-6f;
    p = fmaf(p, t, 0x1.86ca4p-4f);
    p = fmaf(p, t, -0x1.2c756cp-3f);
    p = fmaf(p, t, 0x1.0b9656p-4f);
    p = fmaf(p, t, -0x1.334d08p-7f);
    p = fmaf(p, t, 0x1.e07ea4p-5f);
    p = fmaf(p, t, 0x1.67bf74p-4f);
    p = fmaf(p, t, 0x1.d57e42p-4f);
    p = fmaf(p, t, 0x1.05731ap-3f);
    p = fmaf(p, t, 0x1.057368p-3f);
    const float tail = bell * t * p;
    *density = 0.398942280401432678f * bell; /* 1 / sqrt(2 pi) */
    return x >= 0.0f ? 1.0f - tail : tail;
}

/* x becomes act(x), and slope act'(x). */
template <int Num> LK_DEVICE void lk_glu_activate(const lk_glu_args &a, float (&x)[Num], float (&slope)[Num])
{
    float other;
    if (a.activation == LK_GLU_SILU) {
        LK_UNROLL for (int j = 0; j < Num; j++) {
            const float z = a.alpha * x[j], s = lk_sigmoid(z, &other);
            x[j] *= s, slope[j] = fmaf(z * other, s, s);
        }
    } else if (a.activation == LK_GLU_GELU) {
        LK_UNROLL for (int j = 0; j < Num; j++) {
            const float below = lk_glu_normal(x[j], &other);
            slope[j] = fmaf(x[j], other, below), x[j] *= below;
        }
    } else if (a.activation == LK_GLU_GELU_TANH) {
        LK_UNROLL for (int j = 0; j < Num; j++) {
            /* beyond 16 the sigmoid is 0 or 1, and the square of a large x would be infinite */
            const float near = x[j] > 16.0f ? 16.0f : x[j] < -16.0f ? -16.0f : x[j], square = near * near;
            const float s = lk_sigmoid(near * fmaf(0.0713548162726009f, square, 1.595769121605731f), &other);
            slope[j] = fmaf(near * fmaf(3 * 0.0713548162726009f, square, 1.595769121605731f) * other, s, s), x[j] *= s;
        }
    } else if (a.activation == LK_GLU_RELU) {
        LK_UNROLL for (int j = 0; j < Num; j++) slope[j] = x[j] <= 0.0f ? 0.0f : 1.0f, x[j] = x[j] <= 0.0f ? 0.0f : x[j];
    } else {
        LK_UNROLL for (int j = 0; j < Num; j++) x[j] = lk_sigmoid(x[j], &other), slope[j] = x[j] * other;
    }
}

/* gate and up of Num columns as they are used: act(g) in `gate`, v in `up`. The factors of their gradients: act'(g) in `slope`, 0
 * where the limit changed gate, and act(g) in `of_up`, 0 where it changed up. */
template <int Num>
LK_DEVICE void lk_glu_apply(const lk_glu_args &a, float (&gate)[Num], float (&up)[Num], float (&slope)[Num],
                            float (&of_up)[Num])
{
    if (a.limit > 0.0f) {
        bool low[Num], inside[Num];
        LK_UNROLL for (int j = 0; j < Num; j++) {
            low[j] = gate[j] <= a.limit, inside[j] = fabsf(up[j]) <= a.limit;
            gate[j] = gate[j] > a.limit ? a.limit : gate[j];
            up[j] = up[j] > a.limit ? a.limit : up[j] < -a.limit ? -a.limit : up[j];
        }
        lk_glu_activate(a, gate, slope);
        LK_UNROLL for (int j = 0; j < Num; j++) {
            slope[j] = low[j] ? slope[j] : 0.0f, of_up[j] = inside[j] ? gate[j] : 0.0f;
            up[j] += a.up_offset;
        }
        return;
    }
    lk_glu_activate(a, gate, slope);
    LK_UNROLL for (int j = 0; j < Num; j++) of_up[j] = gate[j], up[j] += a.up_offset;
}

/* ---- Reading and writing ------------------------------------------------------------------------------------------------- */

/* How tensors lie. ALIKE: the rows of all start at the same address modulo 16. TURNS: interleaved; gate and dgate at twice the
 * address of y or dy modulo 16. ANY: interleaved or not, at any address. */
enum { LK_GLU_ALIKE, LK_GLU_TURNS, LK_GLU_ANY };

template <int Lie> LK_DEVICE bool lk_glu_in_turns(const lk_glu_args &a)
{
    return Lie == LK_GLU_TURNS || (Lie == LK_GLU_ANY && a.interleaved);
}

/* Where the elements of a thread's vector of y or dy are: columns col, col + step, ... ANY: neighbouring threads have neighbouring
 * columns, one element at a time; else they are one vector, and step is 1. */
typedef struct {
    int64_t col;
    int step;
} lk_glu_place;

template <int Lie, class T> LK_DEVICE lk_glu_place lk_glu_place_of(const lk_row<T> &row, int u)
{
    const int64_t col = lk_row_col(row, u);
    if constexpr (Lie != LK_GLU_ANY) return {col, 1};
    const int64_t before = (col - row.split.head) / LK_VEC<T> - row.rank,
                  left = row.split.vecs - before; /* of the team's vectors */
    return {row.split.head + before * LK_VEC<T> + row.rank, left >> row.size_log2 ? 1 << row.size_log2 : (int)left};
}

/* Num elements of a tensor: every times-th one from column times col on. */
template <int Lie, class T> LK_DEVICE lk_vec<T> lk_glu_load(const T *from, lk_glu_place at, int times = 1)
{
    if constexpr (Lie == LK_GLU_ANY) {
        T some[LK_VEC<T>];
        lk_vec<T> v;
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) some[j] = from[times * (at.col + j * at.step)];
        memcpy(&v, some, sizeof v);
        return v;
    } else {
        return lk_load_vec(from + at.col);
    }
}
template <int Lie, int Num, class T> LK_DEVICE void lk_glu_store(T *to, lk_glu_place at, const float (&x)[Num], int times = 1)
{
    if constexpr (Lie == LK_GLU_ANY) {
        LK_UNROLL for (int j = 0; j < Num; j++) lk_put(to + times * (at.col + j * at.step), x[j]);
    } else {
        lk_store_n(to + at.col, x);
    }
}

/* What a thread has of gate and up: a vector of each, or, in TURNS, two neighbours. */
template <class T> struct lk_glu_pair {
    lk_vec<T> first, second;
};
template <int Lie, class T>
LK_DEVICE lk_glu_pair<T> lk_glu_load_pair(const lk_glu_args &a, const T *gate, const T *up, lk_glu_place at)
{
    if (Lie == LK_GLU_TURNS) return {lk_load_vec(gate + 2 * at.col), lk_load_vec(gate + 2 * at.col + LK_VEC<T>)};
    if (Lie == LK_GLU_ANY && a.interleaved) return {lk_glu_load<Lie>(gate, at, 2), lk_glu_load<Lie>(gate + 1, at, 2)};
    return {lk_glu_load<Lie>(gate, at), lk_glu_load<Lie>(up, at)};
}
template <int Lie, int Num, class T> LK_DEVICE void lk_glu_unpack(float (&gate)[Num], float (&up)[Num], const lk_glu_pair<T> &raw)
{
    lk_unpack(gate, raw.first), lk_unpack(up, raw.second);
    if (Lie == LK_GLU_TURNS) lk_to_pairs(gate, up);
}
/* Writes the gradients of Num columns, g and v; what is left in these means nothing. */
template <int Lie, int Num, class T>
LK_DEVICE void lk_glu_store_pair(const lk_glu_args &a, T *dgate, T *dup, lk_glu_place at, float (&g)[Num], float (&v)[Num])
{
    if (Lie == LK_GLU_TURNS) {
        lk_from_pairs(g, v);
        if (dgate) lk_store_n(dgate + 2 * at.col, g), lk_store_n(dgate + 2 * at.col + Num, v);
    } else if (Lie == LK_GLU_ANY && a.interleaved) {
        if (dgate) lk_glu_store<Lie>(dgate, at, g, 2), lk_glu_store<Lie>(dgate + 1, at, v, 2);
    } else {
        if (dgate) lk_glu_store<Lie>(dgate, at, g);
        if (dup) lk_glu_store<Lie>(dup, at, v);
    }
}

/* One column of both. */
template <int Lie, class T>
LK_DEVICE void lk_glu_read_one(const lk_glu_args &a, float *gate, float *up, const T *gate_row, const T *up_row, int64_t col)
{
    const bool turns = lk_glu_in_turns<Lie>(a);
    *gate = lk_to_float(gate_row[turns ? 2 * col : col]);
    *up = lk_to_float(turns ? gate_row[2 * col + 1] : up_row[col]);
}

/* ---- Forward ------------------------------------------------------------------------------------------------------------- */

template <int Num>
LK_DEVICE void lk_glu_forward(const lk_glu_args &a, float weight, float (&y)[Num], float (&gate)[Num], float (&up)[Num])
{
    float slope[Num], of_up[Num];
    lk_glu_apply(a, gate, up, slope, of_up);
    LK_UNROLL for (int j = 0; j < Num; j++) y[j] = weight * gate[j] * up[j];
}

/* A team owns a piece of a row: Vecs vectors of y of each thread, and with the first piece the row's single elements. */
template <class T, int Lie, int Vecs>
LK_KERNEL void __launch_bounds__(LK_GLU_THREADS) lk_glu_forward_kernel(const __grid_constant__ lk_glu_call call)
{
    const lk_glu_args &a = call.a;
    const lk_row<T> row = lk_row_of<LK_TEAM_ANY, LK_GLU_THREADS, Vecs>(call.team, (const T *)a.y, a.y_stride, a.rows, a.cols);
    const T *gate = (const T *)a.gate + row.number * a.gate_stride, *up = (const T *)a.up + row.number * a.up_stride;
    T *y = (T *)a.y + row.number * a.y_stride;
    lk_glu_pair<T> raw[Vecs] = {};
    lk_griddepcontrol_wait();
    if (!row.there) return;
    LK_UNROLL for (int u = 0; u < Vecs; u++)
        if (u < row.count) raw[u] = lk_glu_load_pair<Lie>(a, gate, up, lk_glu_place_of<Lie>(row, u));
    const float weight = a.row_weight ? a.row_weight[row.number] : 1.0f;
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        float g[LK_VEC<T>], v[LK_VEC<T>], result[LK_VEC<T>];
        lk_glu_unpack<Lie>(g, v, raw[u]);
        lk_glu_forward(a, weight, result, g, v);
        if (u < row.count) lk_glu_store<Lie>(y, lk_glu_place_of<Lie>(row, u), result);
    }
    lk_griddepcontrol_launch_dependents();
    LK_NO_UNROLL for (int i = row.rank; i < row.split.edge; i += 1 << row.size_log2) {
        const int64_t col = lk_edge_col<T>(row.split, i);
        float g[1], v[1], result[1];
        lk_glu_read_one<Lie>(a, g, v, gate, up, col);
        lk_glu_forward(a, weight, result, g, v);
        lk_put(y + col, result[0]);
    }
}

/* ---- Backward ------------------------------------------------------------------------------------------------------------ */

/* gate and up become their gradients; returns the terms of drow_weight. */
template <int Num>
LK_DEVICE float lk_glu_backward(const lk_glu_args &a, float weight, float (&gate)[Num], float (&up)[Num],
                                const float (&dy)[Num])
{
    float slope[Num], of_up[Num], sum = 0.0f;
    lk_glu_apply(a, gate, up, slope, of_up);
    LK_UNROLL for (int j = 0; j < Num; j++) {
        const float upstream = weight * dy[j];
        sum = fmaf(dy[j] * gate[j], up[j], sum);
        gate[j] = upstream * up[j] * slope[j], up[j] = upstream * of_up[j];
    }
    return sum;
}

/* A team owns a piece of a row, as in forward; Sum: a row, some vectors of each thread at a time, and its drow_weight. */
template <class T, int Lie, int Vecs, bool Sum>
LK_KERNEL void __launch_bounds__(Sum ? LK_GLU_SUM_THREADS : LK_GLU_THREADS)
    lk_glu_backward_kernel(const __grid_constant__ lk_glu_call call)
{
    const lk_glu_args &a = call.a;
    const lk_row<T> row = lk_row_of<LK_TEAM_ANY, Sum ? 0 : LK_GLU_THREADS, Sum ? 0 : Vecs>(call.team, (const T *)a.dy,
                                                                                          a.dy_stride, a.rows, a.cols);
    const T *gate = (const T *)a.gate + row.number * a.gate_stride, *up = (const T *)a.up + row.number * a.up_stride;
    const T *dy = (const T *)a.dy + row.number * a.dy_stride;
    T *const dgate = a.dgate ? (T *)a.dgate + row.number * a.dgate_stride : NULL;
    T *const dup = a.dup ? (T *)a.dup + row.number * a.dup_stride : NULL;
    lk_griddepcontrol_wait();
    if (!Sum && !row.there) return;
    float weight = 1.0f, sum = 0.0f;
    int begin = 0;
    do {
        lk_glu_pair<T> raw[Vecs] = {};
        lk_vec<T> raw_dy[Vecs] = {};
        LK_UNROLL for (int u = 0; u < Vecs; u++)
            if (begin + u < row.count) {
                const lk_glu_place at = lk_glu_place_of<Lie>(row, begin + u);
                raw[u] = lk_glu_load_pair<Lie>(a, gate, up, at);
                raw_dy[u] = lk_glu_load<Lie>(dy, at);
            }
        if (begin == 0 && a.row_weight && row.there) weight = a.row_weight[row.number];
        LK_UNROLL for (int u = 0; u < Vecs; u++)
            if (begin + u < row.count) {
                float g[LK_VEC<T>], v[LK_VEC<T>], upstream[LK_VEC<T>];
                lk_glu_unpack<Lie>(g, v, raw[u]), lk_unpack(upstream, raw_dy[u]);
                sum += lk_glu_backward(a, weight, g, v, upstream);
                lk_glu_store_pair<Lie>(a, dgate, dup, lk_glu_place_of<Lie>(row, begin + u), g, v);
            }
        begin += Vecs;
    } while (Sum && begin < row.count);
    lk_griddepcontrol_launch_dependents();
    LK_NO_UNROLL for (int i = row.rank; i < row.split.edge; i += 1 << row.size_log2) {
        const int64_t col = lk_edge_col<T>(row.split, i);
        const bool turns = lk_glu_in_turns<Lie>(a);
        const float upstream[1] = {lk_to_float(dy[col])};
        float g[1], v[1];
        lk_glu_read_one<Lie>(a, g, v, gate, up, col);
        sum += lk_glu_backward(a, weight, g, v, upstream);
        if (dgate) lk_put(dgate + (turns ? 2 * col : col), g[0]);
        if (dgate && turns) lk_put(dgate + 2 * col + 1, v[0]);
        if (dup) lk_put(dup + col, v[0]);
    }
    if constexpr (Sum) {
        float total[1] = {sum};
        if (row.size_log2 <= 5) total[0] = lk_sum_warp(sum, row.lanes);
        else lk_sum_cluster<1, true>(total, 0);
        if (row.there && row.rank == 0) a.drow_weight[row.number] = total[0];
    }
}

/* ---- Checks and launches ------------------------------------------------------------------------------------------------- */

/* Validates a call, and fills in its defaults. */
template <class T> LK_HOST lk_status lk_glu_check(const char *op, lk_glu_args *a, bool backward, lk_device *device)
{
    const int bytes = sizeof(T), forward_only = backward ? LK_UNUSED : LK_OUT, backward_only = backward ? LK_OUT : LK_UNUSED;
    const bool turns = a->interleaved != 0;
    lk_checks checks = lk_check_begin(op, device);
    lk_check_size(&checks, "rows", a->rows, 0, INT64_MAX);
    lk_check_size(&checks, "cols", a->cols, 0, (int64_t)1 << 61);
    const int64_t wide = turns && !lk_rejected(&checks, LK_ERR_SHAPE) ? 2 * a->cols : a->cols, rows = a->cols ? a->rows : 0;
    const char *const narrow_gate = turns ? NULL : "gate", *const narrow_dy = turns ? NULL : "dy";
    const int input = LK_REQUIRED | LK_MAY_OVERLAP, up = turns && !a->up ? LK_UNUSED : input;
    lk_tensor list[] = {
        {"gate", a->gate, bytes, input, wide, {{a->rows, &a->gate_stride, "gate_stride"}}},
        {"up", a->up, bytes, up, a->cols, {{a->rows, &a->up_stride, "up_stride"}}},
        {"y", a->y, bytes, forward_only, a->cols, {{a->rows, &a->y_stride, "y_stride"}}, {narrow_gate, "up"}},
        {"dy", a->dy, bytes, backward ? input : LK_UNUSED, a->cols, {{a->rows, &a->dy_stride, "dy_stride"}}},
        {"dgate", a->dgate, bytes, backward_only, wide, {{a->rows, &a->dgate_stride, "dgate_stride"}}, {"gate", narrow_dy}},
        {"dup", a->dup, bytes, backward_only, a->cols, {{a->rows, &a->dup_stride, "dup_stride"}},
         {"up", "dy"}},
        {"row_weight", a->row_weight, 4, LK_IN, rows},
        {"drow_weight", a->drow_weight, 4, backward_only, a->rows}};
    const int count = lk_used_tensors(list, LK_COUNT(list));
    lk_check_shapes(&checks, list, count, !device);
    lk_check_enum(&checks, "activation", a->activation, LK_GLU_SIGMOID, "LK_GLU_*");
    lk_check_number(&checks, "alpha", (double)a->alpha, isfinite(a->alpha), "finite");
    lk_check_absent(&checks, "alpha", a->alpha != 0.0f && a->activation != LK_GLU_SILU, "it is for LK_GLU_SILU");
    lk_check_number(&checks, "limit", (double)a->limit, a->limit >= 0.0f, "above 0, or 0 for none");
    lk_check_number(&checks, "up_offset", (double)a->up_offset, isfinite(a->up_offset), "finite");
    lk_check_absent(&checks, "up", turns && a->up, "with interleaved it is NULL, and gate has both");
    lk_check_absent(&checks, "dup", turns && backward && a->dup, "with interleaved it is NULL, and dgate has both");
    lk_check_end(&checks, list, count);
    if (a->alpha == 0.0f) a->alpha = 1.0f;
    return checks.status;
}

template <class T>
LK_HOST lk_status lk_glu_query(const char *op, const lk_glu_args *args, lk_direction direction, size_t *bytes)
{
    lk_glu_args a = *args;
    return lk_no_workspace(lk_glu_check<T>(op, &a, direction == LK_BACKWARD, NULL), bytes);
}

/* Whether a tensor's rows lie as those of `other` (y, dy) do: at `times` its address modulo 16. */
LK_HOST bool lk_glu_lies_as(const lk_glu_args *a, const void *tensor, int64_t stride, const void *other, int64_t other_stride,
                            unsigned times, unsigned bytes)
{
    const uintptr_t off = (uintptr_t)tensor - times * (uintptr_t)other;
    const uint64_t steps = ((uint64_t)stride - times * (uint64_t)other_stride) * bytes;
    return !tensor || (off % 16 == 0 && (a->rows <= 1 || steps % 16 == 0));
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_glu_run(const char *op, const lk_glu_args *args, cudaStream_t stream)
{
    const bool backward = direction == LK_BACKWARD;
    lk_device device = {};
    lk_glu_call call = {*args, {}};
    lk_glu_args &a = call.a;
    const lk_status status = lk_glu_check<T>(op, &a, backward, &device);
    if (status) return status;
    const bool turns = a.interleaved, sum = backward && a.drow_weight;
    if (a.rows == 0 || (a.cols == 0 && !sum)) return LK_OK;
    if (turns || a.cols == 0) a.up = NULL, a.dup = NULL, a.up_stride = a.dup_stride = 0;
    if (a.cols == 0) a.dgate = NULL, a.gate_stride = a.dy_stride = 0; /* all of these may be NULL */
    const void *const base = backward ? a.dy : a.y;
    int64_t *const base_stride = backward ? &a.dy_stride : &a.y_stride;
    const unsigned times = turns ? 2 : 1, bytes = sizeof(T);
    const int64_t wide = times * a.cols;
    bool alike = lk_glu_lies_as(&a, a.gate, a.gate_stride, base, *base_stride, times, bytes) &&
                 lk_glu_lies_as(&a, a.up, a.up_stride, base, *base_stride, 1, bytes);
    bool packed = !a.row_weight && !sum && a.gate_stride == wide && (turns || a.up_stride == a.cols) && *base_stride == a.cols;
    if (backward) {
        alike = alike && lk_glu_lies_as(&a, a.dgate, a.dgate_stride, base, *base_stride, times, bytes) &&
                lk_glu_lies_as(&a, a.dup, a.dup_stride, base, *base_stride, 1, bytes);
        packed = packed && (!a.dgate || a.dgate_stride == wide) && (!a.dup || a.dup_stride == a.cols);
    }
    if (packed) a.cols = lk_count(a.rows, a.cols), a.rows = 1; /* all rows are one */
    const int lie = !alike ? LK_GLU_ANY : turns ? LK_GLU_TURNS : LK_GLU_ALIKE;
    constexpr int Vecs = LK_GLU_VECS<T, direction == LK_BACKWARD>;
    const int64_t vecs = lk_ceil_div(a.cols, LK_VEC<T>);
    const bool few = lie == LK_GLU_ALIKE && !sum && lk_count(a.rows, vecs) < LK_GLU_FEW * (int64_t)device.sms;
    const int64_t wanted = few ? vecs : lk_ceil_div(vecs, Vecs);
    if (sum) {
        const int log2 = lk_log2(wanted < LK_GLU_SUM_THREADS ? wanted : LK_GLU_SUM_THREADS);
        call.team = lk_team_of(a.rows, wanted, LK_GLU_SUM_THREADS, log2 > 5 ? 1 << log2 : LK_GLU_SUM_THREADS);
    } else {
        call.team = lk_team_in_pieces(a.rows, wanted, LK_GLU_THREADS, LK_GLU_THREADS);
    }
    void (*kernel)(lk_glu_call) = NULL;
    if constexpr (direction == LK_FORWARD) {
        void (*const kernels[])(lk_glu_call) = {lk_glu_forward_kernel<T, LK_GLU_ALIKE, Vecs>,
                                                lk_glu_forward_kernel<T, LK_GLU_TURNS, Vecs>,
                                                lk_glu_forward_kernel<T, LK_GLU_ANY, Vecs>};
        kernel = few ? lk_glu_forward_kernel<T, LK_GLU_ALIKE, 1> : kernels[lie];
    } else {
        void (*const kernels[][2])(lk_glu_call) = {
            {lk_glu_backward_kernel<T, LK_GLU_ALIKE, Vecs, false>, lk_glu_backward_kernel<T, LK_GLU_ALIKE, Vecs, true>},
            {lk_glu_backward_kernel<T, LK_GLU_TURNS, Vecs, false>, lk_glu_backward_kernel<T, LK_GLU_TURNS, Vecs, true>},
            {lk_glu_backward_kernel<T, LK_GLU_ANY, Vecs, false>, lk_glu_backward_kernel<T, LK_GLU_ANY, Vecs, true>}};
        kernel = few ? lk_glu_backward_kernel<T, LK_GLU_ALIKE, 1, false> : kernels[lie][sum];
    }
    return lk_launch_pdl(op, &device, kernel, call.team.grid, 1, call.team.threads, 0, stream, call);
}

#endif /* CUDA or the simulator */
#endif
