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
 * Options    Those of srms_norm.cuh, without residual, residual_out, dresidual_out, dresidual, bias and dbias; dy has type T.
 *            Any output may be NULL, but not all.
 * Errors     As in srms_norm.cuh. First of all LK_ERR_VALUE: one of the tensors above is given, or dy_dtype is not T.
 *            LK_ERR_NULL: gate is NULL, too.
 * Source     Dao and Gu, "Transformers are SSMs", 2024; Yang et al., "Gated Delta Networks", 2024.
 * Read on    lk/srms_norm.md: how exact results are, and what is read and written.
 *
 * The kernels, which divide the rows as srms_norm.cuh's kernels for any rows do:
 *   lk_srms_norm_gated_forward_kernel    threads hold 4 vectors of x and of gate
 *   lk_srms_norm_gated_backward_kernel   threads have 4 vectors of x, gate and dy in shared memory; dweight as in srms_norm.cuh
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

/* Num elements of a row. */
template <int Num> struct lk_srms_norm_gated_values {
    float x[Num], gate[Num];
};

/* s, and silu of the gates. */
template <bool First, int Num>
LK_DEVICE void lk_srms_norm_gated_s(float (&s)[Num], float (&silu)[Num], const lk_srms_norm_gated_values<Num> &v)
{
    float other;
    LK_UNROLL for (int j = 0; j < Num; j++) {
        silu[j] = v.gate[j] * lk_sigmoid(v.gate[j], &other);
        s[j] = First ? v.x[j] * silu[j] : v.x[j];
    }
}

template <class T, int Num>
LK_DEVICE lk_srms_norm_gated_values<Num> lk_srms_norm_gated_load(const lk_srms_norm_input &in, int64_t row, int col)
{
    lk_srms_norm_gated_values<Num> v;
    lk_srms_norm_load(v.x, (const T *)in.x.data + row * in.x.stride + col);
    lk_srms_norm_load(v.gate, (const T *)in.r.data + row * in.r.stride + col);
    return v;
}

/* The sum of s^2 over Num elements. */
template <bool First, int Num> LK_DEVICE float lk_srms_norm_gated_square(const lk_srms_norm_gated_values<Num> &v)
{
    float s[Num], silu[Num];
    lk_srms_norm_gated_s<First>(s, silu, v);
    return lk_srms_norm_dot(s, s);
}

/* Writes Num elements of y. */
template <class T, bool First, int Num> LK_DEVICE void lk_srms_norm_gated_put(const lk_srms_norm_call &call,
                                                                              const lk_srms_norm_gated_values<Num> &v, float rstd,
                                                                              int64_t row, int col, int group)
{
    float y[Num], silu[Num];
    lk_srms_norm_gated_s<First>(y, silu, v);
    LK_UNROLL for (int j = 0; j < Num; j++) y[j] *= rstd;
    lk_srms_norm_apply(y, call, group + col);
    LK_UNROLL for (int j = 0; j < Num && !First; j++) y[j] *= silu[j];
    lk_srms_norm_store((T *)call.a.y + row * call.a.y_stride + col, y);
}

/* A team owns a row. Each thread holds its first Vecs vectors, and reads the others and the single elements twice. */
template <class T, bool First>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_THREADS, 1)
    lk_srms_norm_gated_forward_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr int Num = LK_VEC<T>, Vecs = LK_SRMS_NORM_FORWARD_VECS(false);
    const lk_srms_norm_input &in = call.in;
    const lk_srms_norm_thread at = lk_srms_norm_thread_of<T>(in, (int)call.a.cols);
    const bool owner = at.row < call.a.rows; /* lanes without a row still take part in the warp's reduction */
    const int count = owner ? at.count : 0, edge = owner ? at.edge : 0;
    lk_cluster_begin();
    const bool early = LK_ARCH >= 900 && at.size <= 64; /* as in lk_srms_norm_forward_kernel */
    if (early && count > 0) {
        lk_srms_norm_prefetch<T>(in.x, at);
        lk_srms_norm_prefetch<T>(in.r, at);
    }
    lk_griddepcontrol_wait();
    if (early) lk_griddepcontrol_launch_dependents();

    lk_vec<T> x[Vecs][1], gate[Vecs][1];
    lk_srms_norm_gated_values<Num> v;
    lk_srms_norm_load_raw(x, in.x, at.row, at.first, count);
    lk_srms_norm_load_raw(gate, in.r, at.row, at.first, count);
    lk_srms_norm_total total = {};
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u * 32 >= count) break;
        lk_unpack(v.x, x[u][0]), lk_unpack(v.gate, gate[u][0]);
        total.sum += lk_srms_norm_gated_square<First>(v);
    }
    LK_NO_UNROLL for (int i = Vecs * 32; i < count; i += 32) {
        v = lk_srms_norm_gated_load<T, Num>(in, at.row, at.first + i * Num);
        lk_srms_norm_add(&total, lk_srms_norm_gated_square<First>(v));
    }
    for (int i = at.rank; i < edge; i += at.size) {
        const lk_srms_norm_gated_values<1> one = lk_srms_norm_gated_load<T, 1>(in, at.row, lk_srms_norm_edge(at, i));
        lk_srms_norm_add(&total, lk_srms_norm_gated_square<First>(one));
    }
    lk_cluster_ready();
    float sum[1] = {total.sum + total.chain};
    lk_srms_norm_sum(in, sum, 0);
    if (!early) lk_griddepcontrol_launch_dependents();

    const float rstd = lk_rsqrt(fmaf(sum[0], in.inverse_cols, call.a.eps));
    const int group = lk_srms_norm_group_start(call, at.row);
    if (owner && at.begin == 0 && at.rank == 0 && call.a.rstd) call.a.rstd[at.row] = rstd;
    if (!call.a.y) return;
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u * 32 >= count) break;
        lk_forget(&x[u][0].raw), lk_forget(&gate[u][0].raw); /* or their floats stay in registers too */
        lk_unpack(v.x, x[u][0]), lk_unpack(v.gate, gate[u][0]);
        lk_srms_norm_gated_put<T, First>(call, v, rstd, at.row, at.first + u * 32 * Num, group);
    }
    LK_NO_UNROLL for (int i = Vecs * 32; i < count; i += 32) {
        const int col = at.first + i * Num;
        lk_srms_norm_gated_put<T, First>(call, lk_srms_norm_gated_load<T, Num>(in, at.row, col), rstd, at.row, col, group);
    }
    LK_NO_UNROLL for (int i = at.rank; i < edge; i += at.size) {
        const int col = lk_srms_norm_edge(at, i);
        lk_srms_norm_gated_put<T, First>(call, lk_srms_norm_gated_load<T, 1>(in, at.row, col), rstd, at.row, col, group);
    }
}

/* Num elements of a row in backward: v, s and silu(gate) as above; e is the gradient of the norm's result, w not in it. */
template <int Num> struct lk_srms_norm_gated_row {
    lk_srms_norm_gated_values<Num> v;
    float s[Num], silu[Num], dy[Num], e[Num];
};
template <class T, bool First, int Num, bool Copied> LK_DEVICE void
lk_srms_norm_gated_get(lk_srms_norm_gated_row<Num> *r, const lk_srms_norm_input &in, lk_srms_norm_where<Copied> where)
{
    LK_UNROLL for (int j = 0; j < Num; j++) r->dy[j] = 1.0f;
    if (in.dy.data) lk_srms_norm_get<T>(r->dy, in.dy, where);
    lk_srms_norm_get<T>(r->v.x, in.x, where), lk_srms_norm_get<T>(r->v.gate, in.r, where);
    lk_srms_norm_gated_s<First>(r->s, r->silu, r->v);
    LK_UNROLL for (int j = 0; j < Num; j++) r->e[j] = First ? r->dy[j] : r->dy[j] * r->silu[j];
}

/* The sums of g s over Num elements of a row and, where rstd is not given, of s^2. */
template <class T, bool First, int Num, bool Copied>
LK_DEVICE void lk_srms_norm_gated_sums(const lk_srms_norm_call &call, float (&sum)[2], lk_srms_norm_where<Copied> where)
{
    lk_srms_norm_gated_row<Num> r;
    lk_srms_norm_gated_get<T, First>(&r, call.in, where);
    lk_srms_norm_apply(r.e, call, where.group + where.col);
    sum[0] = lk_srms_norm_dot(r.s, r.e);
    sum[1] = call.a.rstd ? 0.0f : lk_srms_norm_dot(r.s, r.s);
}

/* Writes Num elements of dx and dgate, and adds their terms to dweight's sums. */
template <class T, bool First, bool Weight, int Num, bool Copied>
LK_DEVICE void lk_srms_norm_gated_backward_put(const lk_srms_norm_call &call, lk_srms_norm_row row, float (&sums)[Num],
                                               lk_srms_norm_where<Copied> where)
{
    lk_srms_norm_gated_row<Num> r;
    float w[Num], dx[Num], dgate[Num], other;
    lk_srms_norm_gated_get<T, First>(&r, call.in, where);
    lk_srms_norm_load_w(w, call, where.group + where.col);
    LK_UNROLL for (int j = 0; j < Num; j++) {
        const float h = r.s[j] * row.rstd, sigmoid = lk_sigmoid(r.v.gate[j], &other), slope = fmaf(r.silu[j], other, sigmoid);
        if (Weight) sums[j] = fmaf(r.e[j], h, sums[j]);
        const float ds = row.rstd * fmaf(-r.s[j], row.slope, r.e[j] * w[j]);
        dx[j] = First ? ds * r.silu[j] : ds;
        dgate[j] = (First ? ds * r.v.x[j] : r.dy[j] * (h * w[j])) * slope;
    }
    lk_srms_norm_backward_store<T, T>(call, row.number, where.col, dx, dgate);
}

/* Elements that no thread holds: as lk_srms_norm_rest_sums and lk_srms_norm_rest_put. */
template <class T, bool First, int Num>
LK_DEVICE void lk_srms_norm_gated_rest_sums(const lk_srms_norm_call &call, lk_srms_norm_total (&total)[2],
                                            lk_srms_norm_where<false> where)
{
    float more[2];
    lk_srms_norm_gated_sums<T, First, Num>(call, more, where);
    lk_srms_norm_add(&total[0], more[0]), lk_srms_norm_add(&total[1], more[1]);
}
template <class T, bool First, bool Weight, int Num>
LK_DEVICE void lk_srms_norm_gated_rest_put(const lk_srms_norm_call &call, lk_srms_norm_row row, float *partial,
                                           lk_srms_norm_where<false> where)
{
    const bool has_sums = Weight && call.a.dweight;
    float sums[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) sums[j] = has_sums ? partial[where.col + j] : 0.0f;
    lk_srms_norm_gated_backward_put<T, First, Weight>(call, row, sums, where);
    LK_UNROLL for (int j = 0; j < Num; j++)
        if (has_sums) partial[where.col + j] = sums[j];
}

/* A team owns a row. Weight: there is weight or dweight; a team owns every step-th row, all of one group, in which its vectors are at
 * the same columns, and copies its next row while it works on this one. */
template <class T, bool First, bool Weight>
LK_KERNEL void __launch_bounds__(LK_SRMS_NORM_BACKWARD_THREADS(Weight), 1)
    lk_srms_norm_gated_backward_kernel(const __grid_constant__ lk_srms_norm_call call)
{
    constexpr int Vecs = LK_SRMS_NORM_BACKWARD_VECS, Num = LK_VEC<T>, Stages = LK_SRMS_NORM_BACKWARD_STAGES(Weight);
    LK_DYN_SMEM(lk_srms_norm_smem, smem);
    const lk_srms_norm_thread at = lk_srms_norm_thread_of<T>(call.in, (int)call.a.cols);
    const int stage_size = call.in.parts * Vecs * 32;
    uint4 *const slots = smem.held + (int)threadIdx.x / 32 * Stages * stage_size + (int)threadIdx.x % 32;
    const int group = Weight ? lk_srms_norm_group_start(call, at.row) : 0; /* the same for all rows of the team */
    float *const partial = Weight && call.a.dweight ? lk_srms_norm_partial(call, at.row, Num) : NULL;
    float sums[Weight ? Vecs : 1][Num] = {};
    lk_cluster_begin();
    if (at.row < call.a.rows && at.count > 0) {
        lk_srms_norm_prefetch<T>(call.in.x, at);
        lk_srms_norm_prefetch<T>(call.in.r, at);
        lk_srms_norm_prefetch<T>(call.in.dy, at);
    }
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    if (partial) lk_srms_norm_rest_clear<Num>(partial, at);
    if (at.row < call.a.rows) lk_srms_norm_fetch_row<T, T, T>(call.in, slots, at.row, at);
    lk_cp_async_commit_group();
    lk_cluster_ready();

    int number = 0;
    for (int64_t row = at.row; row - at.team < call.a.rows; row += at.step, number++) {
        const bool owner = row < call.a.rows; /* lanes without a row still take part in the warp's reduction */
        const int count = owner ? at.count : 0, edge = owner ? at.edge : 0;
        const uint4 *const slot = slots + (Weight ? (number & 1) * stage_size : 0);
        if (Weight) {
            if (row + at.step < call.a.rows)
                lk_srms_norm_fetch_row<T, T, T>(call.in, slots + (~number & 1) * stage_size, row + at.step, at);
            lk_cp_async_commit_group();
        }
        lk_srms_norm_row here = {row, call.a.rstd && owner ? call.a.rstd[row] : 0.0f, 0.0f};
        lk_srms_norm_total total[2] = {};
        for (int i = at.rank; i < edge; i += at.size)
            lk_srms_norm_gated_rest_sums<T, First, 1>(call, total, {row, lk_srms_norm_edge(at, i), group, NULL});
        for (int i = Vecs * 32; i < count; i += 32)
            lk_srms_norm_gated_rest_sums<T, First, Num>(call, total, {row, at.first + i * Num, group, NULL});
        float sum[2] = {total[0].sum + total[0].chain, total[1].sum + total[1].chain}, more[2];
        lk_cp_async_wait_group<Stages - 1>();
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (u * 32 >= count) break;
            const lk_srms_norm_where<true> where = {row, at.first + u * 32 * Num, group, slot + u * 32};
            lk_srms_norm_gated_sums<T, First, Num>(call, more, where);
            sum[0] += more[0], sum[1] += more[1];
        }
        lk_srms_norm_sum(call.in, sum, number, call.a.rstd);
        if (!call.a.rstd) here.rstd = lk_rsqrt(fmaf(sum[1], call.in.inverse_cols, call.a.eps));
        here.slope = sum[0] * here.rstd * call.in.inverse_cols * here.rstd;
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (u * 32 >= count) break;
            const lk_srms_norm_where<true> where = {row, at.first + u * 32 * Num, group, slot + u * 32};
            lk_srms_norm_gated_backward_put<T, First, Weight>(call, here, sums[Weight ? u : 0], where);
        }
        for (int i = Vecs * 32; i < count; i += 32)
            lk_srms_norm_gated_rest_put<T, First, Weight, Num>(call, here, partial, {row, at.first + i * Num, group, NULL});
        for (int i = at.rank; i < edge; i += at.size)
            lk_srms_norm_gated_rest_put<T, First, Weight, 1>(call, here, partial, {row, lk_srms_norm_edge(at, i), group, NULL});
        if (!Weight) break;
    }
    if (partial) lk_srms_norm_put_sums(partial + at.first, sums, at.count); /* a team without rows writes zeros */
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

template <class T, bool First>
LK_HOST lk_status lk_srms_norm_gated_launch(const char *op, const lk_device *device, lk_srms_norm_args *a, lk_direction direction,
                                            cudaStream_t stream)
{
    if (direction == LK_BACKWARD) {
        const lk_srms_norm_layout layout = lk_srms_norm_backward_lay_out<T>(device, a, true);
        return lk_srms_norm_backward_launch<T>(op, device, *a, layout,
                                               a->weight || a->dweight ? lk_srms_norm_gated_backward_kernel<T, First, true>
                                                                       : lk_srms_norm_gated_backward_kernel<T, First, false>,
                                               stream);
    }
    const int vecs = LK_SRMS_NORM_FORWARD_VECS(false);
    const lk_srms_norm_traits traits = {vecs, vecs, 0, 0, LK_SRMS_NORM_THREADS, 128, 0, 0};
    const lk_srms_norm_layout layout = lk_srms_norm_lay_out<T>(device, a, false, traits);
    return lk_launch_pdl(op, device, lk_srms_norm_gated_forward_kernel<T, First>, layout.grid, layout.cluster, layout.threads, 0,
                         stream, layout.call);
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
    return lk_srms_norm_ask<T>(op, given, true, bytes);
}

#endif /* CUDA or the simulator */
#endif
