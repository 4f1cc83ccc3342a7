// SPDX-License-Identifier: MIT
/* cross_entropy_probabilities.cuh - cross_entropy.cuh with class probabilities as targets, as PyTorch's cross_entropy has them: a
 * row's target is a probability for each class, not the number of one class.
 *
 *   q = target_prob,  u[r,j] = w[j] ((1 - e) q[r,j] + e / vocab),  U[r] = sum_j u[r,j]
 *   class[r]   = sum_j u[r,j] (lse[r] - z[r,j]),   D = valid_rows = weight_sum = rows
 *   dz[j]      = (f U + G) p[r,j] - f u[r,j],      to which dentropy adds its term
 *   The other formulas and names are those at the top of cross_entropy.cuh.
 *
 * Use        In one .cu file:                                        Anywhere, C included:
 *                #include "lk/cross_entropy_probabilities.cuh"           #include "lk/cross_entropy_probabilities.cuh"
 *                LK_DEFINE_CROSS_ENTROPY_PROBABILITIES(bf16)             LK_DECLARE_CROSS_ENTROPY_PROBABILITIES(bf16)
 *            The struct and the workspace are those of cross_entropy.cuh, with target_prob in place of target:
 *                lk_cross_entropy_args args = {};
 *                args.logits = logits, args.target_prob = target, args.rows = rows, args.vocab = vocab;
 *                args.loss = loss, args.lse = lse;
 *                lk_status status = lk_cross_entropy_probabilities_forward_bf16(&args, stream);
 *                args.dlogits = dlogits;
 *                status = lk_cross_entropy_probabilities_backward_bf16(&args, stream);    // reads the lse of forward
 *            lk_cross_entropy_probabilities_forward_backward_bf16 computes both in one call.
 * Needs      cross_entropy.cuh and what that needs.
 * Options    Those of cross_entropy.cuh, without ranks, statistics, batch_invariant and dlogits in e5m2. A row of target_prob need
 *            not add up to 1. Every row counts: ignore_index does not apply, and bad_targets stays as it is. A mean is over the rows, with class
 *            weights too, so backward needs no counts. A column at -inf: where u[j] is 0 it adds nothing to the loss (in
 *            PyTorch the loss is NaN then); where u[j] is above 0 the loss is +inf. The gradient is finite in both.
 * Errors     As in cross_entropy.cuh, and LK_ERR_VALUE: target is given too, target_prob_dtype is neither T nor f32,
 *            batch_invariant is given, or dlogits_dtype is E5M2. Rows of target_prob of any alignment; where a row does
 *            not have its logits' offset modulo 16 bytes (of another type: both at multiples of 16), it is read element by
 *            element.
 * Read on    lk/cross_entropy.md: how exact results are, and what is read and written.
 *
 * One kernel, lk_cross_entropy_prob_kernel: 1 to 32 threads, a block or a cluster per row. Then come the sums over all rows. For
 * example, 4096 rows of 50257 columns in bf16: forward by itself, without other options, has a block of 256 threads per row, which
 * streams. backward and forward_backward have a cluster of 4 blocks per row, which stays in shared memory: 7 vectors of logits and
 * 7 of probabilities per thread.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_CROSS_ENTROPY_PROBABILITIES_CUH
#define LK_CROSS_ENTROPY_PROBABILITIES_CUH

#include "cross_entropy.cuh"

typedef lk_cross_entropy_args lk_cross_entropy_probabilities_args; /* the same: target_prob is read */

#define LK_CROSS_ENTROPY_PROBABILITIES_FUNCTIONS(X, T)                                                                         \
    X##_CALL(cross_entropy_probabilities, forward, LK_FORWARD, T)                                                              \
    X##_CALL(cross_entropy_probabilities, backward, LK_BACKWARD, T)                                                            \
    X##_CALL(cross_entropy_probabilities, forward_backward, LK_BOTH, T)
#define LK_DECLARE_CROSS_ENTROPY_PROBABILITIES(T) LK_DECLARE(CROSS_ENTROPY_PROBABILITIES, T)
#define LK_DEFINE_CROSS_ENTROPY_PROBABILITIES(T) LK_DEFINE(CROSS_ENTROPY_PROBABILITIES, T)

#if LK_CUDA

/* ---- The kernel ---------------------------------------------------------------------------------------------------------- */

/* A thread's part of a row. Its vectors of logits and the probabilities of their columns have slots in shared memory, as in
 * lk_cross_entropy_gradient_kernel; those from in_slots on are read where they are used. */
#define LK_CE_PROB_VECS 8 /* per thread until a row has a whole block, then 8 blocks */
#define LK_CE_PROB_SLOTS(bytes) (64 * 1024 / LK_CROSS_ENTROPY_BLOCK_MOST / (bytes)) /* at most, so that three blocks fit on an SM */
#define LK_CE_PROB_STREAM 16 /* forward of plain rows: vectors per thread until a row has a whole block */
template <class T, class Prob> struct lk_ce_prob_thread {
    lk_ce_share<T> at;
    lk_vec<T> *slot;      /* of its first vector; the next are blockDim.x apart */
    lk_vec<Prob> *prob_slot; /* likewise, LK_VEC<T> / LK_VEC<Prob> vectors for each of logits */
    const Prob *prob;        /* the row's probabilities */
    bool wide;            /* they are read by vectors, else one by one */
    int in_slots, half;   /* slots in use, and how many of them are filled first */
};

/* Loads the probabilities of a vector of columns. */
template <class T, class Prob>
LK_DEVICE void lk_ce_prob_load(lk_vec<Prob> (&prob)[LK_VEC<T> / LK_VEC<Prob>], const lk_ce_prob_thread<T, Prob> &t, int col)
{
    LK_UNROLL for (int m = 0; m < LK_VEC<T> / LK_VEC<Prob>; m++) {
        const Prob *from = t.prob + col + m * LK_VEC<Prob>;
        float q[LK_VEC<Prob>];
        if (t.wide) {
            prob[m] = lk_load_vec(from);
            continue;
        }
        LK_UNROLL for (int j = 0; j < LK_VEC<Prob>; j++) q[j] = lk_to_float(from[j]);
        lk_pack(&prob[m], q);
    }
}

/* Starts the copies of slots begin to end - 1, as a group. */
template <class T, class Prob> LK_DEVICE void lk_ce_prob_copy(const lk_ce_prob_thread<T, Prob> &t, int begin, int end)
{
    constexpr int Ratio = LK_VEC<T> / LK_VEC<Prob>;
    const int threads = (int)blockDim.x;
    LK_NO_UNROLL for (int u = begin; u < end; u++) {
        const int col = lk_ce_share_col(t.at, u);
        lk_cp_async_16(t.slot, u * threads * 16, t.at.logits + col);
        if (t.wide) {
            LK_UNROLL
            for (int m = 0; m < Ratio; m++)
                lk_cp_async_16(t.prob_slot, (u * Ratio + m) * threads * 16, t.prob + col + m * LK_VEC<Prob>);
        } else {
            lk_vec<Prob> prob[Ratio];
            lk_ce_prob_load(prob, t, col);
            LK_UNROLL for (int m = 0; m < Ratio; m++) t.prob_slot[(u * Ratio + m) * threads] = prob[m];
        }
    }
    lk_cp_async_commit_group();
}

/* u of a column from its probability. */
template <bool plain> LK_DEVICE float lk_ce_prob_weight(const lk_cross_entropy_call &call, float q, int col)
{
    const float u = fmaf(call.confidence, q, call.share);
    return !plain && call.a.class_weight ? u * call.a.class_weight[col] : u;
}

/* A vector of logits, and the probabilities of its columns. */
template <class T, class Prob> struct lk_ce_prob_vecs {
    lk_vec<T> logits;
    lk_vec<Prob> prob[LK_VEC<T> / LK_VEC<Prob>];
};

/* Vector i of a thread, from its slots or else from memory. logits: false leaves them out. */
template <bool logits, class T, class Prob>
LK_DEVICE void lk_ce_prob_get(lk_ce_prob_vecs<T, Prob> *v, const lk_ce_prob_thread<T, Prob> &t, int i)
{
    constexpr int Ratio = LK_VEC<T> / LK_VEC<Prob>;
    const int threads = (int)blockDim.x, col = lk_ce_share_col(t.at, i);
    if (i < t.in_slots) {
        if (logits) v->logits = t.slot[i * threads];
        LK_UNROLL for (int m = 0; m < Ratio; m++) v->prob[m] = t.prob_slot[(i * Ratio + m) * threads];
    } else {
        if (logits) v->logits = lk_load_vec(t.at.logits + col);
        lk_ce_prob_load(v->prob, t, col);
    }
}

/* The logits x of a vector whose first column is col, and their u. */
template <bool plain, bool logits, class T, class Prob>
LK_DEVICE void lk_ce_prob_unpack(float (&x)[LK_VEC<T>], float (&w)[LK_VEC<T>], const lk_ce_prob_vecs<T, Prob> &v, int col,
                                 const lk_cross_entropy_call &call)
{
    constexpr int Num = LK_VEC<Prob>;
    if (logits) lk_unpack(x, v.logits);
    LK_UNROLL for (int m = 0; m < LK_VEC<T>; m += Num) {
        float q[Num];
        lk_unpack(q, v.prob[m / Num]);
        LK_UNROLL for (int j = 0; j < Num; j++) w[m + j] = lk_ce_prob_weight<plain>(call, q[j], col + m + j);
    }
}

/* Adds the logits x of columns col, col + 1, ... and their u to the state; backward: u alone. */
template <bool plain, bool backward, bool exact, int n>
LK_DEVICE lk_ce_row lk_ce_prob_add(lk_ce_row s, float (&x)[n], const float (&w)[n], int col, const lk_cross_entropy_args &a,
                                   float scale)
{
    float slope[n];
    if constexpr (backward) {
        float sum = 0.0f;
        LK_UNROLL for (int j = 0; j < n; j++) sum += w[j];
        s.weights += sum;
        return s;
    }
    if (!plain && a.argmax) s = lk_ce_add_top(s, x, col);
    if (!plain && a.softcap > 0.0f) lk_ce_cap<exact>(x, slope, a.logit_scale, a.softcap);
    return lk_ce_row_add<true, !plain>(s, x, w, scale);
}

/* The state of a thread's columns, as they arrive, with a running maximum. */
template <bool plain, bool backward, class T, class Prob>
LK_DEVICE lk_ce_row lk_ce_prob_read(const lk_cross_entropy_call &call, const lk_ce_prob_thread<T, Prob> &t, float scale)
{
    lk_ce_row s = lk_ce_row_empty();
    lk_cp_async_wait_group<1>();
    LK_NO_UNROLL for (int u = 0; u < t.at.count; u++) {
        if (u == t.half) lk_cp_async_wait_group<0>();
        lk_ce_prob_vecs<T, Prob> v;
        float x[LK_VEC<T>], w[LK_VEC<T>];
        lk_ce_prob_get<!backward>(&v, t, u);
        lk_ce_prob_unpack<plain, !backward>(x, w, v, lk_ce_share_col(t.at, u), call);
        s = lk_ce_prob_add<plain, backward, sizeof(T) == 4>(s, x, w, lk_ce_share_col(t.at, u), call.a, scale);
    }
    lk_cp_async_wait_group<0>();
    LK_NO_UNROLL for (int i = t.at.rank; i < t.at.edge; i += t.at.team) {
        const int col = lk_ce_edge_col(t.at, i);
        float x[1] = {lk_to_float(t.at.logits[col])}, w[1] = {lk_ce_prob_weight<plain>(call, lk_to_float(t.prob[col]), col)};
        s = lk_ce_prob_add<plain, backward, sizeof(T) == 4>(s, x, w, col, call.a, scale);
    }
    return s;
}

/* The state of a warp's part of a plain row, in all lanes. Its max is the largest of the lanes' first vectors, as in
 * lk_ce_reduce. Vecs vectors are on their way: each is used, then the next takes its registers. */
template <class T, class Prob>
LK_DEVICE lk_ce_row lk_ce_prob_reduce(const lk_cross_entropy_call &call, const lk_ce_prob_thread<T, Prob> &t, float scale)
{
    constexpr int Num = LK_VEC<T>, Vecs = 2;
    const float rate = scale * LK_LOG2E;
    const bool edge = t.at.rank < t.at.edge;
    lk_ce_prob_vecs<T, Prob> v[Vecs];
    float x[Num], w[Num], single = -INFINITY, reference;
    lk_cp_async_wait_group<1>();
    if (t.half < Vecs) lk_cp_async_wait_group<0>();
    LK_UNROLL for (int k = 0; k < Vecs; k++)
        if (k < t.at.count) lk_ce_prob_get<true>(&v[k], t, k);
    if (edge) single = lk_to_float(t.at.logits[lk_ce_edge_col(t.at, t.at.rank)]);
    reference = t.at.count > 0 ? -INFINITY : single;
    lk_unpack(x, v[0].logits);
    LK_UNROLL for (int j = 0; j < Num; j++)
        if (t.at.count > 0) reference = fmaxf(reference, x[j]);
    reference = lk_max_warp(reference, t.at.team);
    const float base = rate * reference;
    lk_ce_row s = lk_ce_row_empty();
    LK_NO_UNROLL for (int first = 0; first < t.at.count; first += Vecs) {
        LK_UNROLL for (int k = 0; k < Vecs; k++) {
            const int u = first + k;
            if (u >= t.at.count) continue;
            float sum[2] = {}, weights[2] = {}, weighted[2] = {};
            lk_ce_prob_unpack<true, true>(x, w, v[k], 0, call);
            if (u + Vecs == t.half) lk_cp_async_wait_group<0>();
            if (u + Vecs < t.at.count) lk_ce_prob_get<true>(&v[k], t, u + Vecs);
            LK_UNROLL for (int j = 0; j < Num; j++) {
                const float d = x[j] - reference;
                sum[j % 2] += lk_ex2(fmaf(rate, x[j], -base)), weights[j % 2] += w[j];
                weighted[j % 2] = fmaf(w[j], w[j] == 0.0f ? 0.0f : d, weighted[j % 2]);
            }
            s.sum += sum[0] + sum[1], s.weights += weights[0] + weights[1], s.weighted += weighted[0] + weighted[1];
        }
    }
    lk_cp_async_wait_group<0>();
    LK_NO_UNROLL for (int i = t.at.rank; i < t.at.edge; i += t.at.team) {
        const int col = lk_ce_edge_col(t.at, i);
        const float logit = lk_to_float(t.at.logits[col]), u = lk_ce_prob_weight<true>(call, lk_to_float(t.prob[col]), col);
        s.sum += lk_ex2(fmaf(rate, logit, -base)), s.weights += u;
        s.weighted = fmaf(u, u == 0.0f ? 0.0f : logit - reference, s.weighted);
    }
    const bool fast = fabsf(base) < LK_LSE_BASE && s.sum < LK_LSE_LIMIT;
    if (!__all_sync(0xffffffffu, fast || t.at.vecs + t.at.edge == 0)) { /* again */
        s = lk_ce_prob_read<true, false>(call, t, scale);
        return lk_ce_row_warp<true, sizeof(T) == 4>(s, scale, t.at.team);
    }
    s.max = reference; /* base differs from rate reference by a rounding error, which is known exactly */
    s.sum = lk_sum_warp(s.sum, t.at.team) * lk_ex2(-fmaf(rate, reference, -base));
    s.weights = lk_sum_warp(s.weights, t.at.team), s.weighted = lk_sum_warp(s.weighted, t.at.team);
    return s;
}

/* The factors of a row's gradient from its state, of which backward has the sum of u alone. w_factor is logit_scale f. */
template <bool plain, bool backward>
LK_DEVICE lk_ce_gradient lk_ce_prob_factors(const lk_cross_entropy_call &call, int64_t row, lk_ce_upstream up, lk_ce_row s,
                                            float scale)
{
    const lk_cross_entropy_args &a = call.a;
    const bool proper = backward ? lk_is_finite(up.lse) : s.sum > 0.0f && lk_is_finite(s.sum);
    const bool dentropy = !plain && a.dentropy && row < a.rows; /* a thread may be without a row */
    lk_ce_gradient g = {};
    float p_scale;
    if (backward) p_scale = lk_ce_base_of_lse(&g, up, scale, dentropy, dentropy ? a.entropy[row] : 0.0f);
    else p_scale = lk_ce_base_of_state(&g, up, scale, dentropy, s, __fdividef(1.0f, s.sum));
    if (!backward && a.z_loss > 0.0f) up.lse = lk_ce_row_finish<false>(s, {scale, 0.0f, 0.0f, 1.0f, a.vocab}).lse;
    const float f_lse = lk_ce_lse_factor(a, up, up.lse);
    g.w_factor = up.f * a.logit_scale, g.p_factor = proper ? fmaf(g.w_factor, s.weights, f_lse) * p_scale : NAN;
    return g;
}

/* Turns the logits x of columns col, col + 1, ... into gradients and stores them. wide: as in lk_ce_store. */
template <bool plain, class T, int n>
LK_DEVICE void lk_ce_prob_differentiate(float (&x)[n], const float (&w)[n], const lk_ce_gradient &g,
                                        const lk_cross_entropy_args &a, int64_t row, int col, bool wide)
{
    float slope[n] LK_UNSET;
    if (!plain && a.softcap > 0.0f) lk_ce_cap<sizeof(T) == 4>(x, slope, a.logit_scale, a.softcap);
    LK_UNROLL for (int j = 0; j < n; j++) { /* one by one: all at once spill */
        float v[1] = {x[j]};
        const float e[1] = {lk_ex2(fmaf(g.rate, x[j], -g.base))}, u[1] = {g.w_factor * w[j]}, by[1] = {slope[j]};
        lk_ce_dz<plain>(v, e, u, by, g, a);
        x[j] = v[0];
    }
    lk_ce_store<T>(a, lk_ce_at<T>(a, row, col), x, wide);
}

/* Writes the gradients of a thread's columns, and the padding. */
template <bool plain, class T, class Prob>
LK_DEVICE void lk_ce_prob_write(const lk_cross_entropy_call &call, const lk_ce_prob_thread<T, Prob> &t, int64_t row,
                                const lk_ce_gradient &g)
{
    const lk_cross_entropy_args &a = call.a;
    const bool wide = (uintptr_t)lk_ce_at<T>(a, row, t.at.head) % (LK_VEC<T> * lk_ce_bytes<T>(a)) == 0;
    float single = 0.0f;
    if (t.at.rank < t.at.edge) single = lk_to_float(t.at.logits[lk_ce_edge_col(t.at, t.at.rank)]);
    LK_NO_UNROLL for (int u = 0; u <= (int)(a.vocab / LK_VEC<T>) >> call.team_log2; u++) { /* as often in every row */
        const int col = lk_ce_share_col(t.at, u);
        lk_ce_prob_vecs<T, Prob> v;
        float x[LK_VEC<T>], w[LK_VEC<T>];
        if (u < t.at.count) lk_ce_prob_get<true>(&v, t, u);
        if (call.ordered) lk_ce_sync(t.at.team); /* the logits that lie where this step writes have been read */
        if (u >= t.at.count) continue;
        lk_ce_prob_unpack<plain, true>(x, w, v, col, call);
        lk_ce_prob_differentiate<plain, T>(x, w, g, a, row, col, wide);
    }
    LK_NO_UNROLL for (int i = t.at.rank; i < t.at.edge; i += t.at.team) {
        const int col = lk_ce_edge_col(t.at, i);
        float x[1] = {i == t.at.rank ? single : lk_to_float(t.at.logits[col])};
        const float w[1] = {lk_ce_prob_weight<plain>(call, lk_to_float(t.prob[col]), col)};
        lk_ce_prob_differentiate<plain, T>(x, w, g, a, row, col, false);
    }
    if (row < a.rows) lk_ce_zero_padding<T>(call, row, a.vocab, t.at.rank, t.at.team);
}

/* All directions; Prob: the type of target_prob. plain: no softcap, class_weight, entropy, argmax and dentropy. A team of up to 32
 * lanes, a block or a cluster owns a row, which stays in shared memory, unless forward of plain rows has no slots and streams. The
 * sums of u, and in forward the state, are taken as the vectors arrive, in two halves; gradients are computed from the slots. */
template <class T, class Prob, bool plain, bool backward>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_BLOCK_MOST, 3)
    lk_cross_entropy_prob_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    LK_DYN_SMEM(lk_vec<T>, slots); /* and after them those of probabilities */
    LK_SHARED(lk_ce_inbox, inbox, [1]);
    constexpr bool exact = sizeof(T) == 4;
    const lk_cross_entropy_args &a = call.a;
    const float scale = !plain && a.softcap > 0.0f ? 1.0f : a.logit_scale;
    const int64_t row = lk_ce_row_of(call);
    const bool there = row < a.rows;
    lk_ce_prob_thread<T, Prob> t;
    t.at = lk_ce_share_of<T>(call, row);
    t.in_slots = t.at.count < call.slots ? t.at.count : call.slots, t.half = (t.in_slots + 1) / 2;
    t.slot = &slots + threadIdx.x, t.prob_slot = (lk_vec<Prob> *)(&slots + call.slots * (int)blockDim.x) + threadIdx.x;
    t.prob = (const Prob *)a.target_prob + row * a.target_prob_stride;
    t.wide = (uintptr_t)(t.prob + t.at.head) % 16 == 0;
    lk_ce_inbox_begin(inbox);
    lk_cluster_begin();
    if (!backward) lk_griddepcontrol_launch_dependents();
    if (t.at.count > 0) lk_prefetch_l2(t.at.first);
    if (t.at.count > 0) lk_prefetch_l2(t.prob + lk_ce_share_col(t.at, 0));
    lk_griddepcontrol_wait();
    lk_ce_prob_copy(t, 0, t.half);
    lk_ce_prob_copy(t, t.half, t.in_slots);
    const lk_ce_upstream up = lk_ce_load_upstream<backward, !plain>(call, row, there ? 0 : -1);
    lk_cluster_ready();
    lk_ce_row s;
    if constexpr (backward) {
        s = lk_ce_prob_read<plain, true>(call, t, scale);
        s.weights = lk_ce_sum(s.weights, t.at.team);
    } else {
        float unused = 0.0f;
        if (plain) s = lk_ce_prob_reduce(call, t, scale);
        else s = lk_ce_row_warp<true, exact>(lk_ce_prob_read<plain, false>(call, t, scale), scale, t.at.team);
        s = lk_ce_exchange<true, exact>(inbox, s, scale, t.at.team, 0, t.at.rank == 0, &unused);
    }
    if (!backward && there && t.at.rank == 0) {
        s.target = s.max; /* any finite value. With label_smoothing 1 and vocab 1 the loss is sum_j u[j] (lse - z[j]) */
        lk_ce_put_result<!plain>(call, row, {-1, true, false}, 1.0f, lk_ce_row_finish(s, {scale, 1.0f, a.z_loss, 1.0f, 1}));
        if (row == 0 && !call.row_losses.loss && a.valid_rows) *a.valid_rows = a.rows;
        if (row == 0 && !call.row_losses.loss && a.weight_sum) *a.weight_sum = (float)a.rows;
    }
    if (a.dlogits) lk_ce_prob_write<plain>(call, t, row, lk_ce_prob_factors<plain, backward>(call, row, up, s, scale));
    if (backward) lk_griddepcontrol_launch_dependents();
}

/* Rows with class probabilities, in any direction. */
template <class T, class Prob, bool backward>
LK_HOST lk_status lk_cross_entropy_prob_of(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                           cudaStream_t stream)
{
    constexpr int bytes = 16 * (1 + LK_VEC<T> / LK_VEC<Prob>), slots = LK_CE_PROB_SLOTS(bytes);
    const lk_cross_entropy_args &a = call.a;
    const bool plain = a.softcap == 0.0f && !a.class_weight && !a.entropy && !a.argmax && !a.dentropy;
    const bool streams = plain && !a.dlogits; /* then no vector has a slot: a warp or a block per row, at first */
    const lk_ce_layout at = lk_cross_entropy_layout(device, &call, a.vocab / LK_VEC<T>, streams ? 1 : bytes, 0,
                                                    streams ? LK_CE_PROB_STREAM : LK_CE_PROB_VECS,
                                                    streams ? 1 << 20 : LK_CE_PROB_VECS);
    if (call.slots > (streams ? 0 : slots)) call.slots = streams ? 0 : slots;
    call.confidence = 1.0f - a.label_smoothing, call.share = a.label_smoothing / (float)a.vocab;
    const size_t shared = call.slots ? (size_t)call.slots * at.threads * bytes : 16; /* the kernel names its first slot in any case */
    return lk_launch_pdl(op, device,
                         plain ? lk_cross_entropy_prob_kernel<T, Prob, true, backward>
                               : lk_cross_entropy_prob_kernel<T, Prob, false, backward>,
                         lk_ceil_div(a.rows, at.rows) * at.cluster, at.cluster, at.threads, shared, stream, call);
}
template <class T, bool backward>
LK_HOST lk_status lk_cross_entropy_prob(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                        cudaStream_t stream)
{
    if (call.a.target_prob_dtype == LK_DTYPE_F32) return lk_cross_entropy_prob_of<T, lk_f32, backward>(op, device, call, stream);
    return lk_cross_entropy_prob_of<T, T, backward>(op, device, call, stream);
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* forward and forward_backward. The kernel writes the counts too, unless there is no row. */
template <class T>
LK_HOST lk_status lk_cross_entropy_run_prob(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                            cudaStream_t stream)
{
    const lk_cross_entropy_args &a = call.a;
    const bool reduced = lk_cross_entropy_reduced(&a);
    lk_status status = LK_OK;
    call.over = a.denominator;
    if (a.rows > 0) status = lk_cross_entropy_prob<T, false>(op, device, call, stream);
    else if (!reduced && (a.valid_rows || a.weight_sum)) status = lk_cross_entropy_count(op, device, call, stream);
    return !status && reduced ? lk_cross_entropy_sum(op, device, call, stream) : status;
}

template <class T>
LK_HOST lk_status lk_cross_entropy_run_prob_backward(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                                     cudaStream_t stream)
{
    call.over = call.a.denominator;
    return call.a.rows > 0 ? lk_cross_entropy_prob<T, true>(op, device, call, stream) : LK_OK;
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_cross_entropy_probabilities_run(const char *op, const lk_cross_entropy_args *args, cudaStream_t stream)
{
    lk_cross_entropy_call call = {};
    lk_device device = {};
    const lk_status status = lk_cross_entropy_fill_call<T>(op, args, LK_CE_PROBABILITIES, direction, &device, &call);
    if (status) return status;
    if constexpr (direction == LK_BACKWARD) return lk_cross_entropy_run_prob_backward<T>(op, &device, call, stream);
    else return lk_cross_entropy_run_prob<T>(op, &device, call, stream);
}
template <class T>
LK_HOST lk_status lk_cross_entropy_probabilities_query(const char *op, const lk_cross_entropy_args *args,
                                                       lk_direction direction, size_t *bytes)
{
    return lk_cross_entropy_bytes<T>(op, args, LK_CE_PROBABILITIES, direction, bytes);
}

#endif /* CUDA or the simulator */
#endif
