// SPDX-License-Identifier: MIT
/* srms_norm_gated.cuh - srms_norm.cuh with a gate of each element: the norms of Mamba-2, of Gated DeltaNet and of the models that
 * have these layers.
 *
 *   gate last (0)      y[r,c] = h[r,c] w[c] silu(gate[r,c]),                 h[r,c] = x[r,c] rstd[r]
 *                      g[r,c] = dy[r,c] silu(gate[r,c]) w[c],                dx = ds
 *                      dgate[r,c] = dy[r,c] h[r,c] w[c] silu'(gate[r,c]),    dweight[c] = sum_r dy[r,c] silu(gate[r,c]) h[r,c]
 *   gate_first (1)     y[r,c] = s[r,c] rstd[r] w[c],                         s[r,c] = x[r,c] silu(gate[r,c])
 *                      g[r,c] = dy[r,c] w[c],                                dx[r,c] = ds[r,c] silu(gate[r,c])
 *                      dgate[r,c] = ds[r,c] x[r,c] silu'(gate[r,c]),         dweight[c] = sum_r dy[r,c] s[r,c] rstd[r]
 *
 *   silu(v) = v / (1 + e^-v). The other names are at the top of srms_norm.cuh: w has weight_offset, weight may be of groups, and ds
 *   follows from g as there; with the gate last, s is x. Mamba-2's norm_before_gate=True is 0 here.
 *
 * Use        In one .cu file:                             Anywhere, C included:
 *                #include "lk/srms_norm_gated.cuh"            #include "lk/srms_norm_gated.cuh"
 *                LK_DEFINE_SRMS_NORM_GATED(bf16)              LK_DECLARE_SRMS_NORM_GATED(bf16)
 *            The struct has that of srms_norm.cuh in its field `common`:
 *                lk_srms_norm_gated_args args = {};
 *                args.common.x = x, args.common.weight = weight, args.common.rows = rows, args.common.cols = cols;
 *                args.common.eps = 1e-6f, args.common.y = y, args.common.rstd = rstd, args.gate = gate;
 *                lk_status status = lk_srms_norm_gated_forward_bf16(&args, stream);
 *                args.common.dy = dy, args.common.dx = dx, args.dgate = dgate;
 *                status = lk_srms_norm_gated_backward_bf16(&args, stream);    // reads x, gate and the rstd that forward wrote
 * Needs      srms_norm.cuh and what that needs. The workspace of dweight is as there.
 * Options    Those of srms_norm.cuh, without residual, residual_out, round_sum, dresidual_out, dresidual, bias and dbias; dy has
 *            type T. Any output may be NULL, but not all.
 *            Fastest where all rows start and end on 16 bytes, as for srms_norm.cuh; in forward with a weight of T on 16 bytes.
 * Errors     As in srms_norm.cuh. First of all LK_ERR_VALUE: one of these is given, or dy_dtype is not T.
 *            LK_ERR_NULL: gate is NULL, too.
 * Source     Dao and Gu, "Transformers are SSMs", 2024; Yang et al., "Gated Delta Networks", 2024.
 * Read on    lk/srms_norm.md: how exact results are, and what is read and written.
 *
 * The kernels, which divide the rows as those of srms_norm.cuh do; they are compiled for the kinds of rows below.
 *   lk_srms_norm_gated_forward_kernel        threads hold 4 vectors of x and of gate; with the gate first they hold s instead
 *   lk_srms_norm_gated_forward_short_kernel  many rows of at most 32 vectors: a team's threads have 2 rows each
 *   lk_srms_norm_gated_backward_kernel       threads have 4 vectors of x, gate and dy in shared memory, of this row and the next;
 *                                            of rows of at most 32 vectors one vector, of 4 rows. There are as many blocks as
 *                                            run at once, and a team has many rows. dweight as in srms_norm.cuh
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_SRMS_NORM_GATED_CUH
#define LK_SRMS_NORM_GATED_CUH

#include "srms_norm.cuh"

/* F: forward, B: backward, as in lk_srms_norm_args. */
typedef struct {
    lk_srms_norm_args common;
    const void *gate;     /* F B in    T [rows, cols] */
    void *dgate;          /* B out     T [rows, cols]; NULL to skip */
    int64_t gate_stride;  /* F B       elements between rows; 0 means packed, cols */
    int64_t dgate_stride; /* B         likewise */
    int gate_first;       /* F B       not 0: the norm is of x silu(gate); 0: the gate multiplies the result */
} lk_srms_norm_gated_args;

#define LK_SRMS_NORM_GATED_FUNCTIONS(X, T)                                                                                     \
    X##_CALL(srms_norm_gated, forward, LK_FORWARD, T)                                                                          \
    X##_CALL(srms_norm_gated, backward, LK_BACKWARD, T)
#define LK_DECLARE_SRMS_NORM_GATED(T) LK_DECLARE(SRMS_NORM_GATED, T)
#define LK_DEFINE_SRMS_NORM_GATED(T) LK_DEFINE(SRMS_NORM_GATED, T)

#if LK_CUDA

/* ---- The kernels --------------------------------------------------------------------------------------------------------- */

/* A call has gate where srms_norm.cuh has the residual, in.r and a.residual, and dgate where that has dresidual. */

/* WHOLE: a team's threads hold all of a row in vectors: rows start and end on 16 bytes, and the threads hold weight too; in
 * backward dy is given. SHORT: such rows of at most 32 vectors. FEW: few such rows, in forward, as in srms_norm.cuh. ANY: any
 * rows and options; threads hold their first vectors. SINGLES: the same where tensors are not aligned to each other: a vector
 * is one element. */
enum {
    LK_SRMS_NORM_GATED_WHOLE, LK_SRMS_NORM_GATED_SHORT, LK_SRMS_NORM_GATED_FEW, LK_SRMS_NORM_GATED_ANY, LK_SRMS_NORM_GATED_SINGLES
};
#define LK_SRMS_NORM_GATED_NUM(T, Kind) ((Kind) == LK_SRMS_NORM_GATED_SINGLES ? 1 : LK_VEC<T>)
/* The vectors that a thread holds of a row. */
#define LK_SRMS_NORM_GATED_VECS(Kind)                                                                                          \
    ((Kind) == LK_SRMS_NORM_GATED_SHORT     ? 1                                                                                \
     : (Kind) == LK_SRMS_NORM_GATED_FEW     ? LK_SRMS_NORM_FEW_VECS                                                            \
     : (Kind) == LK_SRMS_NORM_GATED_SINGLES ? 8                                                                                \
                                            : LK_SRMS_NORM_BACKWARD_VECS)

/* The sigmoid. e^-x may overflow: then the result is 0, as where the sigmoid is below 2^-126. */
LK_DEVICE float lk_srms_norm_gated_sigmoid(float x)
{
    return lk_rcp(1.0f + lk_exp(-x));
}

/* Num elements at column col of a row, and all vectors of a thread. */
template <class T, int Num> LK_DEVICE lk_vec<T> lk_srms_norm_gated_read(const lk_srms_norm_tensor &t, int64_t row, int col)
{
    return lk_load_n<Num, true>((const T *)t.data + row * t.stride + col);
}
template <class T, int Num, int Vecs> LK_DEVICE void
lk_srms_norm_gated_read(lk_vec<T> (&raw)[Vecs], const lk_srms_norm_tensor &t, int64_t row, int col, int count)
{
    const T *const from = (const T *)t.data + row * t.stride + col;
    LK_UNROLL for (int u = 0; u < Vecs; u++)
        if (u * 32 < count) raw[u] = lk_load_n<Num, true>(from + u * 32 * Num);
}
/* Again the floats of what a thread holds: the compiler does not keep those that it had. */
template <class T, int Num> LK_DEVICE void lk_srms_norm_gated_again(float (&x)[Num], lk_vec<T> raw)
{
    if (Num > 1) lk_forget(&raw.raw);
    lk_unpack_n(x, raw);
}

/* s of x and gate. */
template <bool First, class T, int Num> LK_DEVICE void lk_srms_norm_gated_s(float (&s)[Num], lk_vec<T> x, lk_vec<T> gate)
{
    float v[Num];
    lk_unpack_n(s, x);
    if (First) lk_unpack_n(v, gate);
    LK_UNROLL for (int j = 0; j < Num && First; j++) s[j] *= v[j] * lk_srms_norm_gated_sigmoid(v[j]);
}

/* Writes Num elements of y, of s. weight: what the thread holds of it; not in ANY and SINGLES. */
template <class T, bool First, int Kind, int Num>
LK_DEVICE void lk_srms_norm_gated_put(const lk_srms_norm_call &call, float (&s)[Num], lk_vec<T> gate, float rstd, int64_t row,
                                      int col, int group, lk_vec<T> weight)
{
    float v[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] *= rstd;
    if constexpr (Kind == LK_SRMS_NORM_GATED_ANY || Kind == LK_SRMS_NORM_GATED_SINGLES) lk_srms_norm_apply(s, call, group + col);
    else if (call.a.weight) lk_srms_norm_apply<false>(s, weight, call.a.weight_offset);
    if (!First) lk_srms_norm_gated_again(v, gate);
    LK_UNROLL for (int j = 0; j < Num && !First; j++) s[j] *= v[j] * lk_srms_norm_gated_sigmoid(v[j]);
    lk_store_n<true>((T *)call.a.y + row * call.a.y_stride + col, s);
}

/* A team owns a row. Each thread holds its first Vecs vectors, and reads the others and the single elements twice. Of a row with
 * the gate first it holds s, else x and gate. */
template <class T, bool First, int Kind>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_THREADS, 1)
    lk_srms_norm_gated_forward_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr bool Few = Kind == LK_SRMS_NORM_GATED_FEW, Whole = Few || Kind == LK_SRMS_NORM_GATED_WHOLE;
    constexpr bool Edges = Kind == LK_SRMS_NORM_GATED_ANY;
    constexpr int Num = LK_SRMS_NORM_GATED_NUM(T, Kind), Vecs = LK_SRMS_NORM_GATED_VECS(Kind);
    const lk_srms_norm_input &in = call.in;
    const lk_srms_norm_thread at =
        Few ? lk_srms_norm_few_thread<T>((int)call.a.cols) : lk_srms_norm_thread_of<T, Num>(in, (int)call.a.cols);
    const bool owner = at.row < call.a.rows; /* lanes without a row still take part in the warp's reduction */
    const int count = owner ? at.count : 0, edge = owner ? at.edge : 0, group = lk_srms_norm_group_start(call, at.row);
    if (!Few) lk_cluster_begin();
    const bool early = Few || (LK_ARCH >= 900 && at.size <= 64); /* as in lk_srms_norm_forward_kernel */
    if (early && count > 0) {
        lk_srms_norm_prefetch<T>(in.x, at);
        lk_srms_norm_prefetch<T>(in.r, at);
    }
    lk_griddepcontrol_wait();
    if (early) lk_griddepcontrol_launch_dependents();

    lk_vec<T> x[Vecs], gate[Vecs], weight[Vecs];
    float held[First ? Vecs : 1][Num], s[Num], one[1];
    lk_srms_norm_gated_read<T, Num>(x, in.x, at.row, at.first, count);
    lk_srms_norm_gated_read<T, Num>(gate, in.r, at.row, at.first, count);
    if (Whole && call.a.weight) lk_srms_norm_gated_read<T, Num>(weight, {call.a.weight, 0, 0}, 0, group + at.first, count);
    lk_srms_norm_total total = {};
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u * 32 >= count) break;
        float(&of)[Num] = First ? held[First ? u : 0] : s;
        lk_srms_norm_gated_s<First>(of, x[u], gate[u]);
        total.sum += lk_srms_norm_dot(of, of);
    }
    LK_NO_UNROLL for (int i = Vecs * 32; !Whole && i < count; i += 32) {
        const int col = at.first + i * Num;
        lk_srms_norm_gated_s<First>(s, lk_srms_norm_gated_read<T, Num>(in.x, at.row, col),
                                    lk_srms_norm_gated_read<T, Num>(in.r, at.row, col));
        lk_srms_norm_add(&total, lk_srms_norm_dot(s, s));
    }
    LK_NO_UNROLL for (int i = at.rank; Edges && i < edge; i += at.size) {
        const int col = lk_srms_norm_edge(at, i);
        lk_srms_norm_gated_s<First>(one, lk_srms_norm_gated_read<T, 1>(in.x, at.row, col),
                                    lk_srms_norm_gated_read<T, 1>(in.r, at.row, col));
        lk_srms_norm_add(&total, one[0] * one[0]);
    }
    if (!Few) lk_cluster_ready();
    float sum[1] = {total.sum + total.chain};
    if (Few) lk_sum_cluster<1, true>(sum, 0);
    else lk_srms_norm_sum(in, sum, 0);
    if (!early) lk_griddepcontrol_launch_dependents();

    const float rstd = lk_rsqrt(fmaf(sum[0], in.inverse_cols, call.a.eps));
    if (owner && at.begin == 0 && at.rank == 0 && call.a.rstd) call.a.rstd[at.row] = rstd;
    if (!call.a.y) return;
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u * 32 >= count) break;
        if (!First) lk_srms_norm_gated_again(s, x[u]);
        lk_srms_norm_gated_put<T, First, Kind>(call, First ? held[First ? u : 0] : s, gate[u], rstd, at.row,
                                               at.first + u * 32 * Num, group, weight[u]);
    }
    LK_NO_UNROLL for (int i = Vecs * 32; !Whole && i < count; i += 32) {
        const int col = at.first + i * Num;
        const lk_vec<T> of_gate = lk_srms_norm_gated_read<T, Num>(in.r, at.row, col);
        lk_srms_norm_gated_s<First>(s, lk_srms_norm_gated_read<T, Num>(in.x, at.row, col), of_gate);
        lk_srms_norm_gated_put<T, First, LK_SRMS_NORM_GATED_ANY>(call, s, of_gate, rstd, at.row, col, group, {});
    }
    LK_NO_UNROLL for (int i = at.rank; Edges && i < edge; i += at.size) {
        const int col = lk_srms_norm_edge(at, i);
        const lk_vec<T> of_gate = lk_srms_norm_gated_read<T, 1>(in.r, at.row, col);
        lk_srms_norm_gated_s<First>(one, lk_srms_norm_gated_read<T, 1>(in.x, at.row, col), of_gate);
        lk_srms_norm_gated_put<T, First, LK_SRMS_NORM_GATED_ANY>(call, one, of_gate, rstd, at.row, col, group, {});
    }
}

/* Short rows, as in lk_srms_norm_forward_short_kernel. */
template <class T, bool First>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_SHORT_THREADS, LK_SRMS_NORM_SHORT_BLOCKS(T))
    lk_srms_norm_gated_forward_short_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr int Num = LK_VEC<T>, Rows = LK_SRMS_NORM_SHORT_ROWS;
    const lk_srms_norm_args &a = call.a;
    const int lanes = 1 << call.in.team_log2, teams = (int)blockDim.x >> call.in.team_log2, cols = (int)a.cols;
    const int col = ((int)threadIdx.x & (lanes - 1)) * Num;
    const int64_t first = (int64_t)blockIdx.x * teams * Rows + ((int)threadIdx.x >> call.in.team_log2);
    lk_vec<T> x[Rows] = {}, gate[Rows] = {}, weight[Rows] = {};
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    LK_UNROLL for (int u = 0; u < Rows; u++) {
        const int64_t row = first + u * teams;
        if (col >= cols || row >= a.rows) continue;
        x[u] = lk_srms_norm_gated_read<T, Num>(call.in.x, row, col);
        gate[u] = lk_srms_norm_gated_read<T, Num>(call.in.r, row, col);
    }
    LK_UNROLL for (int u = 0; u < Rows; u++) {
        if (u > 0) weight[u] = weight[0];
        if (col < cols && a.weight && (u == 0 || a.groups > 1))
            weight[u] = lk_load_vec_ca((const T *)a.weight + lk_srms_norm_group_start(call, first + u * teams) + col);
    }
    float s[Rows][Num], sum[Rows];
    LK_UNROLL for (int u = 0; u < Rows; u++) {
        lk_srms_norm_gated_s<First>(s[u], x[u], gate[u]);
        sum[u] = lk_srms_norm_dot(s[u], s[u]);
    }
    LK_UNROLL for (int u = 0; u < Rows; u++) sum[u] = lk_sum_warp(sum[u], lanes);
    LK_UNROLL for (int u = 0; u < Rows; u++) {
        const int64_t row = first + u * teams;
        const float rstd = lk_rsqrt(fmaf(sum[u], call.in.inverse_cols, a.eps));
        if (col >= cols || row >= a.rows) continue;
        if (col == 0 && a.rstd) a.rstd[row] = rstd;
        if (!a.y) continue;
        if (!First) lk_srms_norm_gated_again(s[u], x[u]);
        lk_srms_norm_gated_put<T, First, LK_SRMS_NORM_GATED_SHORT>(call, s[u], gate[u], rstd, row, col, 0, weight[u]);
    }
}

/* ---- Backward ------------------------------------------------------------------------------------------------------------ */

/* Rows in flight, and the limits of a block. */
#define LK_SRMS_NORM_GATED_STAGES(Kind) ((Kind) == LK_SRMS_NORM_GATED_SHORT ? 4 : (Kind) == LK_SRMS_NORM_GATED_SINGLES ? 1 : 2)
#define LK_SRMS_NORM_GATED_THREADS(Kind) ((Kind) == LK_SRMS_NORM_GATED_SINGLES ? 512 : LK_SRMS_NORM_BACKWARD_THREADS(true))
#define LK_SRMS_NORM_GATED_BLOCKS(Kind) ((Kind) == LK_SRMS_NORM_GATED_SINGLES ? 1 : 2)

/* Num elements of a row as they are read; dy is 1 where there is none. */
template <class T> struct lk_srms_norm_gated_raw {
    lk_vec<T> x, gate, dy;
};
/* The same as numbers. s, silu(gate); e: the gradient of the norm's result, w not in it; rise: silu's slope times dy, or with the
 * gate first times x. */
template <int Num> struct lk_srms_norm_gated_row {
    float s[Num], silu[Num], e[Num], rise[Num];
};

template <class T, int Num>
LK_DEVICE lk_srms_norm_gated_raw<T> lk_srms_norm_gated_raw_of(const lk_srms_norm_input &in, int64_t row, int col)
{
    lk_srms_norm_gated_raw<T> raw = {};
    raw.x = lk_srms_norm_gated_read<T, Num>(in.x, row, col), raw.gate = lk_srms_norm_gated_read<T, Num>(in.r, row, col);
    if (in.dy.data) raw.dy = lk_srms_norm_gated_read<T, Num>(in.dy, row, col);
    return raw;
}

/* Of a vector in a thread's slots. */
template <class T, int Vecs, bool HasDy>
LK_DEVICE lk_srms_norm_gated_raw<T> lk_srms_norm_gated_copied(const lk_srms_norm_input &in, const uint4 *slot)
{
    lk_srms_norm_gated_raw<T> raw = {{slot[0]}, {slot[Vecs * 32]}, {}};
    if (HasDy || in.dy.data) raw.dy.raw = slot[2 * Vecs * 32];
    return raw;
}

template <class T, bool First, int Num, bool HasDy = false>
LK_DEVICE void lk_srms_norm_gated_get(lk_srms_norm_gated_row<Num> *r, const lk_srms_norm_input &in, lk_srms_norm_gated_raw<T> raw)
{
    float x[Num], gate[Num], dy[Num];
    if constexpr (Num == 1) { /* or the compiler keeps what it computes of a held element */
        uint4 all = make_uint4(raw.x.raw.x, raw.gate.raw.x, raw.dy.raw.x, 0);
        lk_forget(&all);
        raw.x.raw.x = all.x, raw.gate.raw.x = all.y, raw.dy.raw.x = all.z;
    }
    LK_UNROLL for (int j = 0; j < Num; j++) dy[j] = 1.0f;
    if (HasDy || in.dy.data) lk_unpack_n(dy, raw.dy);
    lk_unpack_n(x, raw.x), lk_unpack_n(gate, raw.gate);
    LK_UNROLL for (int j = 0; j < Num; j++) {
        const float sigmoid = lk_srms_norm_gated_sigmoid(gate[j]), slope = fmaf(gate[j] * sigmoid, 1.0f - sigmoid, sigmoid);
        r->silu[j] = gate[j] * sigmoid;
        r->s[j] = First ? x[j] * r->silu[j] : x[j];
        r->e[j] = First ? dy[j] : dy[j] * r->silu[j];
        r->rise[j] = (First ? x[j] : dy[j]) * slope;
    }
}

/* Adds the sums of g s over Num elements of a row and, where rstd is not given, of s^2. */
template <int Num>
LK_DEVICE void lk_srms_norm_gated_sums(const lk_srms_norm_call &call, float (&sum)[2], const lk_srms_norm_gated_row<Num> &r,
                                       const float (&w)[Num])
{
    float g[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) g[j] = r.e[j] * w[j];
    sum[0] = lk_srms_norm_dot(r.s, g);
    sum[1] = call.a.rstd ? 0.0f : lk_srms_norm_dot(r.s, r.s);
}

/* Writes Num elements of dx and dgate, and adds their terms to dweight's sums. */
template <class T, bool First, int Num>
LK_DEVICE void lk_srms_norm_gated_backward_put(const lk_srms_norm_call &call, lk_srms_norm_row row, int col, float (&sums)[Num],
                                               const lk_srms_norm_gated_row<Num> &r, const float (&w)[Num])
{
    float dx[Num], dgate[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) {
        const float h = r.s[j] * row.rstd, ds = row.rstd * fmaf(-r.s[j], row.slope, r.e[j] * w[j]);
        sums[j] = fmaf(r.e[j], h, sums[j]);
        dx[j] = First ? ds * r.silu[j] : ds;
        dgate[j] = r.rise[j] * (First ? ds : h * w[j]);
    }
    if (call.a.dx) lk_store_n<true>((T *)call.a.dx + row.number * call.a.dx_stride + col, dx);
    if (call.a.dresidual) lk_store_n<true>((T *)call.a.dresidual + row.number * call.a.dresidual_stride + col, dgate);
}

/* Elements that no thread holds: as lk_srms_norm_rest_sums and lk_srms_norm_rest_put. */
template <class T, bool First, int Num>
LK_DEVICE void lk_srms_norm_gated_rest_sums(const lk_srms_norm_call &call, lk_srms_norm_total (&total)[2], int64_t row, int col,
                                            int group)
{
    lk_srms_norm_gated_row<Num> r;
    float more[2], w[Num];
    lk_srms_norm_load_w(w, call, group + col);
    lk_srms_norm_gated_get<T, First>(&r, call.in, lk_srms_norm_gated_raw_of<T, Num>(call.in, row, col));
    lk_srms_norm_gated_sums(call, more, r, w);
    lk_srms_norm_add(&total[0], more[0]), lk_srms_norm_add(&total[1], more[1]);
}
template <class T, bool First, int Num>
LK_DEVICE void lk_srms_norm_gated_rest_put(const lk_srms_norm_call &call, lk_srms_norm_row row, float *partial, int col,
                                           int group)
{
    lk_srms_norm_gated_row<Num> r;
    float sums[Num], w[Num];
    lk_srms_norm_load_w(w, call, group + col);
    lk_srms_norm_gated_get<T, First>(&r, call.in, lk_srms_norm_gated_raw_of<T, Num>(call.in, row.number, col));
    LK_UNROLL for (int j = 0; j < Num; j++) sums[j] = partial ? partial[col + j] : 0.0f;
    lk_srms_norm_gated_backward_put<T, First>(call, row, col, sums, r, w);
    LK_UNROLL for (int j = 0; j < Num; j++)
        if (partial) partial[col + j] = sums[j];
}

/* Starts the copies of a thread's first Vecs vectors of a row into its slots: [tensor][vector][lane]. */
template <class T, int Vecs>
LK_DEVICE void lk_srms_norm_gated_fetch(const lk_srms_norm_input &in, uint4 *slot, int64_t row, const lk_srms_norm_thread &at)
{
    const lk_srms_norm_tensor *const of[3] = {&in.x, &in.r, &in.dy};
    LK_UNROLL for (int t = 0; t < 3; t++) {
        const T *const from = (const T *)of[t]->data + row * of[t]->stride + at.first;
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (u * 32 >= at.count || (t == 2 && !of[t]->data)) break;
            lk_cp_async_16(slot + t * Vecs * 32, u * 512, from + u * 32 * LK_VEC<T>);
        }
    }
}

/* Where a block of SHORT has whole sets of groups it adds up its teams' sums for dweight. */
template <class T, int Num>
LK_DEVICE void lk_srms_norm_gated_short_sums(const lk_srms_norm_call &call, float *shared, const float (&sums)[1][Num],
                                             const lk_srms_norm_thread &at)
{
    const int teams = (int)blockDim.x >> call.in.team_log2, groups = (int)call.a.groups, width = Num << call.in.team_log2;
    if (teams % groups) { /* uniform */
        if (at.count > 0) lk_srms_norm_put_sums(lk_srms_norm_partial(call, at.row, Num) + at.first, sums, 1);
        return;
    }
    __syncthreads(); /* all teams have read their rows, which lie where the sums will */
    LK_UNROLL for (int j = 0; j < Num; j++) shared[(int)threadIdx.x * Num + j] = sums[0][j];
    __syncthreads(); /* all teams' sums are written before they are read */
    for (int i = (int)threadIdx.x; i < groups * width; i += (int)blockDim.x) {
        const int group = i / width, col = i % width;
        float sum = 0.0f;
        LK_UNROLL_BY(4) for (int team = group; team < teams; team += groups) sum += shared[team * width + col];
        if (col < call.a.cols) lk_srms_norm_partial(call, (int64_t)blockIdx.x * groups + group, Num)[col] = sum;
    }
}

/* A team owns every step-th row, all of one group, in which its vectors are at the same columns, and copies its next rows while
 * it works on this one. */
template <class T, bool First, int Kind>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_GATED_THREADS(Kind), LK_SRMS_NORM_GATED_BLOCKS(Kind))
    lk_srms_norm_gated_backward_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr bool Short = Kind == LK_SRMS_NORM_GATED_SHORT, Whole = Short || Kind == LK_SRMS_NORM_GATED_WHOLE;
    constexpr bool Copied = Kind != LK_SRMS_NORM_GATED_SINGLES, Edges = Kind == LK_SRMS_NORM_GATED_ANY;
    constexpr int Num = LK_SRMS_NORM_GATED_NUM(T, Kind), Vecs = LK_SRMS_NORM_GATED_VECS(Kind);
    constexpr int Stages = LK_SRMS_NORM_GATED_STAGES(Kind);
    LK_DYN_SMEM(lk_srms_norm_smem, smem);
    const lk_srms_norm_thread at = lk_srms_norm_thread_of<T, Num>(call.in, (int)call.a.cols);
    const int stage_size = call.in.parts * Vecs * 32;
    uint4 *const slots = smem.held + (int)threadIdx.x / 32 * Stages * stage_size + (int)threadIdx.x % 32;
    const int group = lk_srms_norm_group_start(call, at.row); /* the same for all rows of the team */
    float *const partial = call.a.dweight && !Short ? lk_srms_norm_partial(call, at.row, LK_VEC<T>) : NULL;
    float sums[Vecs][Num] = {}, w[Whole ? Vecs : 1][Num];
    lk_cluster_begin();
    if (!Short && at.row < call.a.rows && at.count > 0) {
        lk_srms_norm_prefetch<T>(call.in.x, at);
        lk_srms_norm_prefetch<T>(call.in.r, at);
        lk_srms_norm_prefetch<T>(call.in.dy, at);
    }
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    if (partial && !Whole) lk_srms_norm_rest_clear<Num, Vecs>(partial, at);
    LK_UNROLL for (int i = 0; Copied && i < Stages - 1; i++) {
        const int64_t row = at.row + i * (int64_t)at.step;
        if (row < call.a.rows) lk_srms_norm_gated_fetch<T, Vecs>(call.in, slots + i * stage_size, row, at);
        lk_cp_async_commit_group();
    }
    LK_UNROLL for (int u = 0; Whole && u < Vecs; u++)
        if (u * 32 < at.count) lk_srms_norm_load_w(w[Whole ? u : 0], call, group + at.first + u * 32 * Num);
    float next_rstd = call.a.rstd && at.row < call.a.rows ? call.a.rstd[at.row] : 0.0f;
    lk_cluster_ready();

    int number = 0;
    for (int64_t row = at.row; row - at.team < call.a.rows; row += at.step, number++) {
        const bool owner = row < call.a.rows; /* lanes without a row still take part in the warp's reduction */
        const int count = owner ? at.count : 0, edge = owner ? at.edge : 0;
        const uint4 *const slot = slots + number % Stages * stage_size;
        if (Copied) {
            const int64_t later = row + (Stages - 1) * (int64_t)at.step;
            if (later < call.a.rows)
                lk_srms_norm_gated_fetch<T, Vecs>(call.in, slots + (number + Stages - 1) % Stages * stage_size, later, at);
            lk_cp_async_commit_group();
        }
        lk_srms_norm_row here = {row, next_rstd, 0.0f};
        if (call.a.rstd && row + at.step < call.a.rows) next_rstd = call.a.rstd[row + at.step];
        lk_srms_norm_gated_raw<T> raw[Copied ? 1 : Vecs];
        LK_UNROLL for (int u = 0; !Copied && u < Vecs; u++)
            if (u * 32 < count) raw[Copied ? 0 : u] = lk_srms_norm_gated_raw_of<T, Num>(call.in, row, at.first + u * 32 * Num);
        lk_srms_norm_total total[2] = {};
        for (int i = at.rank; Edges && i < edge; i += at.size)
            lk_srms_norm_gated_rest_sums<T, First, 1>(call, total, row, lk_srms_norm_edge(at, i), group);
        for (int i = Vecs * 32; !Whole && i < count; i += 32)
            lk_srms_norm_gated_rest_sums<T, First, Num>(call, total, row, at.first + i * Num, group);
        float sum[2] = {total[0].sum + total[0].chain, total[1].sum + total[1].chain}, more[2];
        lk_cp_async_wait_group<Stages - 1>();
        lk_srms_norm_gated_row<Num> r;
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (u * 32 >= count) break;
            if (Copied) raw[0] = lk_srms_norm_gated_copied<T, Vecs, Whole>(call.in, slot + u * 32);
            lk_srms_norm_gated_get<T, First, Num, Whole>(&r, call.in, raw[Copied ? 0 : u]);
            if (!Whole) lk_srms_norm_load_w(w[0], call, group + at.first + u * 32 * Num);
            lk_srms_norm_gated_sums(call, more, r, w[Whole ? u : 0]);
            sum[0] += more[0], sum[1] += more[1];
        }
        if constexpr (Short) {
            sum[0] = lk_sum_warp(sum[0], 1 << call.in.team_log2);
            if (!call.a.rstd) sum[1] = lk_sum_warp(sum[1], 1 << call.in.team_log2);
        } else {
            lk_srms_norm_sum(call.in, sum, number, call.a.rstd);
        }
        if (!call.a.rstd) here.rstd = lk_rsqrt(fmaf(sum[1], call.in.inverse_cols, call.a.eps));
        here.slope = sum[0] * here.rstd * call.in.inverse_cols * here.rstd;
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (u * 32 >= count) break;
            const int col = at.first + u * 32 * Num;
            if (Copied && !Short) raw[0] = lk_srms_norm_gated_copied<T, Vecs, Whole>(call.in, slot + u * 32);
            if (!Short) lk_srms_norm_gated_get<T, First, Num, Whole>(&r, call.in, raw[Copied ? 0 : u]);
            else if (First) lk_srms_norm_gated_again(r.e, lk_vec<T>{slot[2 * 32]}); /* dy: registers are few */
            if (!Whole) lk_srms_norm_load_w(w[0], call, group + col);
            lk_srms_norm_gated_backward_put<T, First>(call, here, col, sums[u], r, w[Whole ? u : 0]);
        }
        for (int i = Vecs * 32; !Whole && i < count; i += 32)
            lk_srms_norm_gated_rest_put<T, First, Num>(call, here, partial, at.first + i * Num, group);
        for (int i = at.rank; Edges && i < edge; i += at.size)
            lk_srms_norm_gated_rest_put<T, First, 1>(call, here, partial, lk_srms_norm_edge(at, i), group);
    }
    if constexpr (Short) {
        if (call.a.dweight) lk_srms_norm_gated_short_sums<T>(call, (float *)smem.held, sums, at);
    } else if (partial) { /* a team without rows writes zeros */
        if constexpr (Num > 1) lk_srms_norm_put_sums(partial + at.first, sums, at.count);
        LK_UNROLL for (int u = 0; Num == 1 && u < Vecs; u++)
            if (u * 32 < at.count) partial[at.first + u * 32] = sums[u][0];
    }
}

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* Validates; a becomes the arguments with every default filled in, with gate and dgate where the kernels look for them. */
template <class T>
LK_HOST lk_status lk_srms_norm_gated_check(const char *op, const lk_srms_norm_gated_args *args, lk_direction direction,
                                           lk_device *device, lk_srms_norm_args *a)
{
    const char *const why = "it is not for norms with a gate";
    lk_srms_norm_args given = args->common;
    lk_checks checks = {op, LK_OK};
    const bool back = direction == LK_BACKWARD; /* fields of the other call are ignored */
    lk_check_absent(&checks, "residual", given.residual, why);
    lk_check_absent(&checks, "residual_out", given.residual_out, why);
    lk_check_absent(&checks, "round_sum", given.round_sum, why);
    lk_check_absent(&checks, "bias", !back && given.bias, why);
    lk_check_absent(&checks, "dresidual_out", back && given.dresidual_out, why);
    lk_check_absent(&checks, "dresidual", back && given.dresidual, why);
    lk_check_absent(&checks, "dbias", back && given.dbias, why);
    lk_check_absent(&checks, "dy_dtype", back && given.dy_dtype && given.dy_dtype != lk_dtype<T>, "dy has type T");
    if (checks.status) return checks.status;
    given.residual = args->gate, given.residual_stride = args->gate_stride, given.residual_dtype = LK_DTYPE_T;
    given.dresidual = args->dgate, given.dresidual_stride = args->dgate_stride, given.dy_dtype = LK_DTYPE_T;
    return lk_srms_norm_check<T>(op, &given, direction, device, a, true);
}

/* ---- The calls, and the workspace ---------------------------------------------------------------------------------------- */

/* Divides the rows, and chooses between WHOLE, ANY and SINGLES. traits: for vectors. */
template <class T>
LK_HOST lk_srms_norm_layout lk_srms_norm_gated_lay_out(const lk_device *device, lk_srms_norm_args *a, bool backward,
                                                       lk_srms_norm_traits traits)
{
    const int vecs = traits.most_vecs, singles = LK_SRMS_NORM_GATED_VECS(LK_SRMS_NORM_GATED_SINGLES);
    lk_srms_norm_layout layout = lk_srms_norm_lay_out<T>(device, a, backward, traits);
    lk_srms_norm_input *const in = &layout.call.in;
    const bool held = in->warp_span <= 32 * vecs && (in->team_log2 < 0 || a->cols / LK_VEC<T> <= vecs << in->team_log2);
    layout.gated = layout.few                                        ? LK_SRMS_NORM_GATED_FEW
                   : held && !layout.edges && (!backward || a->dy) ? LK_SRMS_NORM_GATED_WHOLE
                                                                     : LK_SRMS_NORM_GATED_ANY;
    if (!in->aligned) {
        traits.most_vecs = traits.preferred_vecs = singles, traits.part_bytes = 0, traits.most_threads = LK_SRMS_NORM_THREADS;
        layout = lk_srms_norm_lay_out<T>(device, a, backward, traits);
        in->warp_span = (int)(lk_ceil_div(in->segment, layout.threads) * 32);
        layout.gated = LK_SRMS_NORM_GATED_SINGLES;
    }
    return layout;
}

template <class T> LK_HOST lk_srms_norm_layout lk_srms_norm_gated_backward_lay_out(const lk_device *device, lk_srms_norm_args *a)
{
    constexpr int vecs = LK_SRMS_NORM_BACKWARD_VECS, most = LK_SRMS_NORM_BACKWARD_THREADS(true), part_bytes = 16 * vecs * 2;
    const bool fits = 2 * (3 * part_bytes * most + 8 * 1024) <= device->smem * 1024; /* blocks of `most` threads */
    const lk_srms_norm_traits traits = {vecs, vecs, fits ? 0 : part_bytes, 0, most, LK_SRMS_NORM_TEAM_THREADS, 0, 0};
    lk_srms_norm_layout layout = lk_srms_norm_gated_lay_out<T>(device, a, true, traits);
    lk_srms_norm_call *const call = &layout.call;
    const int log2 = call->in.team_log2, sums = a->dweight != NULL;
    if (layout.gated == LK_SRMS_NORM_GATED_WHOLE && log2 >= 0 && a->cols <= 32 * LK_VEC<T>) {
        layout.gated = LK_SRMS_NORM_GATED_SHORT, layout.threads = most;
        while (layout.threads > 64 && (a->rows << log2) < (int64_t)layout.threads / 2 * device->sms) layout.threads /= 2;
        /* Each team has a row of sums. Many groups need many blocks, and smaller ones keep the sums within the header's bound. */
        const int64_t cap = ((int64_t)64 << 20) / (4 * (a->cols + LK_VEC<T>)); /* rows in 64 MiB */
        while (sums && layout.threads > 64 && lk_srms_norm_common_multiple(a->groups, layout.threads >> log2) > cap)
            layout.threads /= 2;
        layout.grid = lk_ceil_div(a->rows, layout.threads >> log2);
    }
    const int stages = LK_SRMS_NORM_GATED_STAGES(layout.gated);
    const int bytes = stages > 1 ? 16 * LK_SRMS_NORM_GATED_VECS(layout.gated) * stages * call->in.parts : 0;
    layout.smem = sizeof(lk_srms_norm_smem) + (size_t)(bytes * layout.threads);
    if (a->rows == 0) return layout;
    lk_srms_norm_backward_fill<T>(device, a, sums, 2 * most, &layout);
    const int64_t teams = log2 < 0 ? 1 : layout.threads >> call->in.team_log2;
    if (layout.gated == LK_SRMS_NORM_GATED_SHORT && teams % a->groups == 0) {
        call->partials = layout.grid * a->groups;
        layout.workspace = (size_t)(sums * call->partials * call->pitch) * sizeof(float);
    }
    return layout;
}

template <class T> LK_HOST lk_srms_norm_layout lk_srms_norm_gated_forward_lay_out(const lk_device *device, lk_srms_norm_args *a)
{
    const int vecs = LK_SRMS_NORM_FORWARD_VECS(false);
    const bool vector_weight = lk_srms_norm_vector_weight<T>(a);
    const lk_srms_norm_traits traits = {vecs, vecs, 0, 0, LK_SRMS_NORM_THREADS, 128, 0, vector_weight ? 2048 : 0};
    lk_srms_norm_layout layout = lk_srms_norm_gated_lay_out<T>(device, a, false, traits);
    if (layout.gated == LK_SRMS_NORM_GATED_WHOLE && !vector_weight) layout.gated = LK_SRMS_NORM_GATED_ANY;
    if (vector_weight && lk_srms_norm_are_short<T>(device, a, &layout)) layout.gated = LK_SRMS_NORM_GATED_SHORT;
    return layout;
}

template <class T, bool First> LK_HOST void (*lk_srms_norm_gated_forward_choose(int kind))(lk_srms_norm_call)
{
    return kind == LK_SRMS_NORM_GATED_WHOLE   ? lk_srms_norm_gated_forward_kernel<T, First, LK_SRMS_NORM_GATED_WHOLE>
           : kind == LK_SRMS_NORM_GATED_SHORT ? lk_srms_norm_gated_forward_short_kernel<T, First>
           : kind == LK_SRMS_NORM_GATED_FEW   ? lk_srms_norm_gated_forward_kernel<T, First, LK_SRMS_NORM_GATED_FEW>
           : kind == LK_SRMS_NORM_GATED_ANY   ? lk_srms_norm_gated_forward_kernel<T, First, LK_SRMS_NORM_GATED_ANY>
                                              : lk_srms_norm_gated_forward_kernel<T, First, LK_SRMS_NORM_GATED_SINGLES>;
}
template <class T, bool First> LK_HOST void (*lk_srms_norm_gated_backward_choose(int kind))(lk_srms_norm_call)
{
    return kind == LK_SRMS_NORM_GATED_WHOLE   ? lk_srms_norm_gated_backward_kernel<T, First, LK_SRMS_NORM_GATED_WHOLE>
           : kind == LK_SRMS_NORM_GATED_SHORT ? lk_srms_norm_gated_backward_kernel<T, First, LK_SRMS_NORM_GATED_SHORT>
           : kind == LK_SRMS_NORM_GATED_ANY   ? lk_srms_norm_gated_backward_kernel<T, First, LK_SRMS_NORM_GATED_ANY>
                                              : lk_srms_norm_gated_backward_kernel<T, First, LK_SRMS_NORM_GATED_SINGLES>;
}

template <class T, bool First>
LK_HOST lk_status lk_srms_norm_gated_launch(const char *op, const lk_device *device, lk_srms_norm_args *a, lk_direction direction,
                                            cudaStream_t stream)
{
    if (direction == LK_BACKWARD) {
        const lk_srms_norm_layout layout = lk_srms_norm_gated_backward_lay_out<T>(device, a);
        const int log2 = layout.call.in.team_log2;
        const int64_t teams = log2 < 0 ? layout.grid / layout.cluster : layout.grid * (layout.threads >> log2);
        return lk_srms_norm_backward_launch<T>(op, device, *a, layout, lk_srms_norm_gated_backward_choose<T, First>(layout.gated),
                                               stream, teams);
    }
    const lk_srms_norm_layout layout = lk_srms_norm_gated_forward_lay_out<T>(device, a);
    return lk_launch_pdl(op, device, lk_srms_norm_gated_forward_choose<T, First>(layout.gated), layout.grid, layout.cluster,
                         layout.threads, 0, stream, layout.call);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_srms_norm_gated_run(const char *op, const lk_srms_norm_gated_args *args, cudaStream_t stream)
{
    lk_srms_norm_args a = {};
    lk_device device = {};
    const lk_status status = lk_srms_norm_gated_check<T>(op, args, direction, &device, &a);
    if (status || (a.rows == 0 && direction == LK_FORWARD)) return status;
    return args->gate_first ? lk_srms_norm_gated_launch<T, true>(op, &device, &a, direction, stream)
                            : lk_srms_norm_gated_launch<T, false>(op, &device, &a, direction, stream);
}

/* Forward has none. As in srms_norm.cuh, with x the answer is for the tensors that are given, without it the most for any. */
template <class T> LK_HOST lk_status lk_srms_norm_gated_query(const char *op, const lk_srms_norm_gated_args *args,
                                                              lk_direction direction, size_t *bytes)
{
    lk_srms_norm_args given = {};
    const lk_status status = lk_srms_norm_gated_check<T>(op, args, direction, NULL, &given);
    if (status || direction == LK_FORWARD) return lk_no_workspace(status, bytes);
    return lk_srms_norm_ask<T>(op, given, lk_srms_norm_gated_backward_lay_out<T>, bytes);
}

#endif /* CUDA or the simulator */
#endif
