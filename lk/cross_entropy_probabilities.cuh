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
 * Options    Those of cross_entropy.cuh, without ranks. A row of target_prob need not add up to 1. Every row counts:
 *            ignore_index does not apply, and bad_targets stays as it is. A mean is over the rows, with class
 *            weights too, so backward needs no counts. A column at -inf: where u[j] is 0 it adds nothing to the loss (in
 *            PyTorch the loss is NaN then); where u[j] is above 0 the loss is +inf. The gradient is finite in both.
 * Errors     As in cross_entropy.cuh, and LK_ERR_VALUE: target is given too, target_prob_dtype is neither T nor f32, or the
 *            columns are split over ranks. Rows of target_prob of any alignment; where a row does not have its logits' offset
 *            modulo 16 bytes (of another type: both at multiples of 16), it is read element by element.
 * Read on    lk/cross_entropy.md: how exact results are, and what is read and written.
 *
 * One kernel, lk_cross_entropy_prob_kernel: 1 to 32 threads, a block or a cluster per row. For example, forward_backward of 4096
 * rows of 50257 columns in bf16: a cluster of 8 blocks of 256 threads per row reads the row for its state, and once more for the
 * gradients. Then come the sums over all rows.
 */
#ifndef LK_CROSS_ENTROPY_PROBABILITIES_CUH
#define LK_CROSS_ENTROPY_PROBABILITIES_CUH

#include "cross_entropy.cuh"

#define LK_CROSS_ENTROPY_PROBABILITIES_DECLARE(T)                                                                              \
    LK_PROTOTYPES(cross_entropy, probabilities_forward, T)                                                                     \
    LK_PROTOTYPES(cross_entropy, probabilities_backward, T)                                                                    \
    LK_PROTOTYPES(cross_entropy, probabilities_forward_backward, T)
#define LK_DECLARE_CROSS_ENTROPY_PROBABILITIES(T) LK_OF_TYPE(LK_CROSS_ENTROPY_PROBABILITIES_DECLARE, T)

#if defined(__CUDACC__) || defined(LK_SIMT)

/* ---- The kernel ---------------------------------------------------------------------------------------------------------- */

typedef lk_inbox<lk_ce_row, LK_CROSS_ENTROPY_THREADS> lk_ce_row_inbox;

#define LK_CE_PROB_BYTES 32768 /* of a row that a block reads twice: small enough that those of an SM's blocks fit in its L1 */
#define LK_CE_PROB_BLOCKS (LK_ARCH >= 1200 ? 2 : 3) /* per SM: as many as registers allow without spills */

/* What a thread reads at once: vectors of logits, and the probabilities of their columns. */
template <class T, class Q> constexpr int LK_CE_PROB_LOADS = sizeof(T) == sizeof(Q) ? 2 : 1;
template <class T, class Q> struct lk_ce_prob_vecs {
    lk_vec<T> logits[LK_CE_PROB_LOADS<T, Q>];
    lk_vec<Q> prob[LK_CE_PROB_LOADS<T, Q>][LK_VEC<T> / LK_VEC<Q>];
};

/* Loads a thread's vectors from `first` on; logits: those too. Probabilities of another alignment are loaded one by one. */
template <bool logits, class T, class Q>
LK_DEVICE void lk_ce_prob_load(lk_ce_prob_vecs<T, Q> *v, const lk_row<T> &row, const Q *prob, int first)
{
    constexpr int U = LK_CE_PROB_LOADS<T, Q>, N = LK_VEC<Q>, M = LK_VEC<T> / N;
    const int col = (int)lk_row_col(row, first), step = LK_VEC<T> << row.size_log2;
    const bool wide = (uintptr_t)(prob + col) % 16 == 0;
    if (wide && first + U <= row.count) { /* loads without predicates all start before the first is waited for */
        LK_UNROLL
        for (int i = 0; i < U * M; i++) v->prob[i / M][i % M] = lk_load_vec_ca(prob + col + i / M * step + i % M * N);
        LK_UNROLL for (int u = 0; logits && u < U; u++) v->logits[u] = lk_load_vec_ca(row.data + col + u * step);
        return;
    }
    LK_UNROLL for (int i = 0; i < U * M; i++) {
        float q[N];
        if (first + i / M >= row.count) continue;
        if (logits && i % M == 0) v->logits[i / M] = lk_load_vec_ca(row.data + col + i / M * step);
        LK_UNROLL for (int j = 0; j < N; j++) q[j] = lk_to_float(prob[col + i / M * step + i % M * N + j]);
        lk_pack(&v->prob[i / M][i % M], q);
    }
}

/* u of a column from its probability. */
LK_DEVICE float lk_ce_prob_weight(const lk_cross_entropy_call &call, float q, int col)
{
    return fmaf(call.confidence, q, call.smoothing_per_class) * (call.a.class_weight ? call.a.class_weight[col] : 1.0f);
}

/* The logits x and their u of vector i, the first of whose columns is col. */
template <class T, class Q>
LK_DEVICE void lk_ce_prob_unpack(float (&x)[LK_VEC<T>], float (&w)[LK_VEC<T>], const lk_ce_prob_vecs<T, Q> &v, int i,
                                 const lk_cross_entropy_call &call, int col)
{
    constexpr int N = LK_VEC<Q>;
    lk_unpack(x, v.logits[i]);
    LK_UNROLL for (int m = 0; m < LK_VEC<T>; m += N) {
        float q[N];
        lk_unpack(q, v.prob[i][m / N]);
        LK_UNROLL for (int j = 0; j < N; j++) w[m + j] = lk_ce_prob_weight(call, q[j], col + m + j);
    }
}

/* Adds the logits x of columns col, col + 1, ... and their u to the state; backward: u alone. */
template <bool backward, int n>
LK_DEVICE lk_ce_row lk_ce_prob_add(lk_ce_row s, float (&x)[n], const float (&w)[n], int col, const lk_cross_entropy_args &a,
                                    float scale)
{
    float sum = 0.0f, slope;
    if (!backward && a.argmax) s = lk_ce_add_top(s, x, col);
    LK_UNROLL for (int j = 0; j < n; j++) {
        sum += w[j];
        if (!backward && a.softcap > 0.0f) x[j] = lk_ce_cap(x[j], a.logit_scale, a.softcap, &slope);
    }
    if (!backward) return lk_ce_row_add<true>(s, x, w, scale);
    s.weights += sum;
    return s;
}

/* The state of a row, for all its threads. */
template <bool backward, class T, class Q>
LK_DEVICE lk_ce_row lk_ce_prob_read(const lk_cross_entropy_call &call, const lk_row<T> &row, const Q *prob,
                                    lk_ce_row_inbox *inbox, float scale)
{
    constexpr bool exact = sizeof(T) == 4;
    constexpr int U = LK_CE_PROB_LOADS<T, Q>;
    lk_ce_row s = lk_ce_row_empty(), all = s;
    for (int first = 0; first < row.count; first += U) {
        lk_ce_prob_vecs<T, Q> v;
        lk_ce_prob_load<!backward>(&v, row, prob, first);
        LK_UNROLL for (int u = 0; u < U && first + u < row.count; u++) {
            float x[LK_VEC<T>], w[LK_VEC<T>];
            const int col = (int)lk_row_col(row, first + u);
            lk_ce_prob_unpack(x, w, v, u, call, col);
            s = lk_ce_prob_add<backward>(s, x, w, col, call.a, scale);
        }
    }
    for (int i = row.rank; i < row.split.edge; i += 1 << row.size_log2) {
        const int col = (int)lk_edge_col<T>(row.split, i);
        float x[1] = {lk_to_float(row.data[col])}, w[1] = {lk_ce_prob_weight(call, lk_to_float(prob[col]), col)};
        s = lk_ce_prob_add<backward>(s, x, w, col, call.a, scale);
    }
    s = lk_ce_row_warp<true, exact>(s, scale, row.lanes);
    if (row.size_log2 <= 5) return s;
    lk_inbox_collect<LK_TEAM_ANY, true>(inbox, s);
    for (int i = (int)threadIdx.x % 32; i < lk_inbox_count<LK_TEAM_ANY>(inbox); i += 32)
        all = lk_ce_row_merge<exact>(all, lk_inbox_state(inbox, i), scale);
    return lk_ce_row_warp<true, exact>(all, scale);
}

/* The factors of a row's gradient from its state, of which backward has the sum of u alone. w_factor is logit_scale f. */
template <bool backward>
LK_DEVICE lk_ce_gradient lk_ce_prob_factors(const lk_cross_entropy_call &call, int64_t row, lk_ce_upstream up, lk_ce_row s,
                                            float scale)
{
    const lk_cross_entropy_args &a = call.a;
    const bool proper = backward ? lk_is_finite(up.lse) : s.sum > 0.0f && lk_is_finite(s.sum);
    lk_ce_gradient g = {};
    float p_scale;
    if (backward) {
        p_scale = lk_ce_p_scale(up.lse, up.lse_low, scale, &g.rate, &g.base);
        const float entropy = a.dentropy && row < a.rows ? a.entropy[row] : 0.0f; /* a thread may be without a row */
        lk_ce_entropy_factors(&g, up.entropy_factor * p_scale, up.lse, up.lse_low, entropy, scale);
    } else {
        g.rate = lk_ce_rate(scale * LK_LOG2E, s.max);
        p_scale = lk_ce_p_scale_of_sum({s.max, s.sum}, __fdividef(1.0f, s.sum), g.rate, &g.base);
        if (a.z_loss > 0.0f) up.lse = lk_ce_row_finish<false>(s, {scale, 0.0f, 0.0f, 1.0f, a.vocab}).lse;
        g.entropy_factor = up.entropy_factor * p_scale, g.center = lk_lse_reference(s.max);
        g.shift = -scale * __fdiv_rn(s.entropic, s.sum);
    }
    float G = a.dlse ? a.logit_scale * up.dlse : 0.0f;
    if (a.z_loss > 0.0f) G = fmaf(2.0f * a.z_loss * up.lse, up.h * a.logit_scale, G);
    g.w_factor = up.f * a.logit_scale, g.p_factor = proper ? fmaf(g.w_factor, s.weights, G) * p_scale : NAN;
    return g;
}

/* Turns the logits x of columns col, col + 1, ... into gradients and stores them. wide: as in lk_ce_store. */
template <class T, int n>
LK_DEVICE void lk_ce_prob_differentiate(float (&x)[n], const float (&w)[n], const lk_ce_gradient &g,
                                        const lk_cross_entropy_args &a, int64_t row, int col, float scale, bool wide)
{
    LK_UNROLL for (int j = 0; j < n; j++) {
        float slope = 1.0f;
        if (a.softcap > 0.0f) x[j] = lk_ce_cap(x[j], a.logit_scale, a.softcap, &slope);
        const float e = lk_ex2(fmaf(g.rate, x[j], -g.base)),
                    entropy_term = a.dentropy ? lk_ce_entropy_term(g, e, x[j], scale) : 0.0f;
        x[j] = (fmaf(g.p_factor, e, -g.w_factor * w[j]) + entropy_term) * slope;
    }
    lk_ce_store<T>(a, lk_ce_at<T>(a, row, col), x, wide);
}

/* Writes the gradients of a thread's columns, and the padding. */
template <class T, class Q>
LK_DEVICE void lk_ce_prob_write(const lk_cross_entropy_call &call, const lk_row<T> &row, const Q *prob, const lk_ce_gradient &g,
                                float scale)
{
    constexpr int U = LK_CE_PROB_LOADS<T, Q>;
    const lk_cross_entropy_args &a = call.a;
    const int size = 1 << row.size_log2;
    const bool wide = (uintptr_t)lk_ce_at<T>(a, row.number, row.split.head) % (LK_VEC<T> * lk_ce_bytes<T>(a)) == 0;
    float single = 0.0f;
    if (row.rank < row.split.edge) single = lk_to_float(row.data[lk_edge_col<T>(row.split, row.rank)]);
    for (int first = 0; first <= (int)(a.vocab / LK_VEC<T>) >> row.size_log2; first += U) { /* as often in every row */
        lk_ce_prob_vecs<T, Q> v;
        lk_ce_prob_load<true>(&v, row, prob, first);
        if (call.ordered) lk_ce_sync(size); /* the logits that lie where this step writes have been read */
        LK_UNROLL for (int u = 0; u < U && first + u < row.count; u++) {
            float x[LK_VEC<T>], w[LK_VEC<T>];
            const int col = (int)lk_row_col(row, first + u);
            lk_ce_prob_unpack(x, w, v, u, call, col);
            lk_ce_prob_differentiate<T>(x, w, g, a, row.number, col, scale, wide);
        }
    }
    for (int i = row.rank; i < row.split.edge; i += size) {
        const int col = (int)lk_edge_col<T>(row.split, i);
        float x[1] = {i == row.rank ? single : lk_to_float(row.data[col])};
        const float w[1] = {lk_ce_prob_weight(call, lk_to_float(prob[col]), col)};
        lk_ce_prob_differentiate<T>(x, w, g, a, row.number, col, scale, false);
    }
    if (row.there) lk_ce_zero_padding<T>(call, row.number, a.vocab, row.rank, size);
}

/* All directions; Q: the type of target_prob. A team of up to 32 lanes, a block or a cluster owns a row. It reads the row for its
 * state, whose weights are u[j]; backward, which has lse, reads the probabilities alone, for their sum. Gradients take a second
 * reading, by the same threads and mostly from the caches. */
template <class T, class Q, bool backward>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_THREADS, LK_CE_PROB_BLOCKS)
    lk_cross_entropy_prob_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    LK_SHARED(lk_ce_row_inbox, inbox, [1]);
    const lk_cross_entropy_args &a = call.a;
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    const lk_row<T> row =
        lk_row_of<LK_TEAM_ANY, LK_CROSS_ENTROPY_THREADS>(call.team, (const T *)a.logits, a.logits_stride, a.rows, a.vocab);
    const Q *const prob = (const Q *)a.target_prob + row.number * a.target_prob_stride;
    lk_inbox_begin<LK_TEAM_ANY, true>(inbox);
    if (!backward) lk_griddepcontrol_launch_dependents();
    lk_row_prefetch<1>(row);
    lk_griddepcontrol_wait();
    const lk_ce_upstream up = lk_ce_load_upstream<false, backward>(call, row.number, row.there ? 0 : -1);
    lk_ce_row s = lk_ce_prob_read<backward>(call, row, prob, inbox, scale);
    if (!backward && row.there && row.rank == 0) {
        s.target = s.max; /* any finite value. With label_smoothing 1 and vocab 1 the loss is sum_j u[j] (lse - z[j]) */
        lk_ce_put_result<true>(call, row.number, {-1, true, false}, 1.0f, lk_ce_row_finish(s, {scale, 1.0f, a.z_loss, 1.0f, 1}));
        if (row.number == 0 && !call.row_losses.loss && a.valid_rows) *a.valid_rows = a.rows;
        if (row.number == 0 && !call.row_losses.loss && a.weight_sum) *a.weight_sum = (float)a.rows;
    }
    if (a.dlogits) lk_ce_prob_write(call, row, prob, lk_ce_prob_factors<backward>(call, row.number, up, s, scale), scale);
    if (backward) lk_griddepcontrol_launch_dependents();
}

/* Rows with class probabilities, in any direction. Where a row is read twice, it gets so many blocks that the caches may
 * still hold it the second time. */
template <class T, bool backward>
LK_HOST lk_status lk_cross_entropy_prob(const char *op, const lk_device *device, lk_cross_entropy_call &call, cudaStream_t stream)
{
    const lk_cross_entropy_args &a = call.a;
    const bool f32 = a.target_prob_dtype == LK_DTYPE_F32;
    const int64_t bytes = a.vocab * (int64_t)(sizeof(T) + (f32 ? 4 : sizeof(T)));
    call.confidence = 1.0f - a.label_smoothing, call.smoothing_per_class = a.label_smoothing / (float)a.vocab;
    const int path = a.path ? a.path : lk_team_path(device, a.rows, bytes);
    int64_t preferred = lk_ceil_div(a.vocab, 2 * LK_VEC<T>), cluster = 1;
    if (call.ordered && preferred < 8) preferred = 8; /* single elements are read at once then, one per thread */
    if (path == LK_CROSS_ENTROPY_CLUSTER) cluster = lk_team_cluster(device, a.rows);
    if (!a.path && path != LK_CROSS_ENTROPY_WARP && a.dlogits && device->arch >= 90)
        while (cluster < 8 && bytes > cluster * LK_CE_PROB_BYTES) cluster *= 2;
    if (path != LK_CROSS_ENTROPY_WARP) preferred = cluster * LK_CROSS_ENTROPY_THREADS;
    call.team = lk_team_of(a.rows, preferred, path == LK_CROSS_ENTROPY_WARP ? 32 : preferred, LK_CROSS_ENTROPY_THREADS);
    return lk_launch_pdl(op, device,
                         f32 ? lk_cross_entropy_prob_kernel<T, lk_f32, backward> : lk_cross_entropy_prob_kernel<T, T, backward>,
                         call.team.grid, call.team.cluster, LK_CROSS_ENTROPY_THREADS, 0, stream, call);
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

LK_CE_ENTRY(probabilities_forward, LK_CE_PROBABILITIES, LK_CE_FORWARD, lk_cross_entropy_run_prob<T>(op, &device, call, stream))
LK_CE_ENTRY(probabilities_backward, LK_CE_PROBABILITIES, LK_CE_BACKWARD,
            lk_cross_entropy_run_prob_backward<T>(op, &device, call, stream))
LK_CE_ENTRY(probabilities_forward_backward, LK_CE_PROBABILITIES, LK_CE_BOTH,
            lk_cross_entropy_run_prob<T>(op, &device, call, stream))

#define LK_CROSS_ENTROPY_PROBABILITIES_DEFINE(T)                                                                               \
    LK_CROSS_ENTROPY_PROBABILITIES_DECLARE(T)                                                                                  \
    LK_EMIT(cross_entropy, probabilities_forward, T)                                                                           \
    LK_EMIT(cross_entropy, probabilities_backward, T)                                                                          \
    LK_EMIT(cross_entropy, probabilities_forward_backward, T)
#define LK_DEFINE_CROSS_ENTROPY_PROBABILITIES(T) LK_OF_TYPE(LK_CROSS_ENTROPY_PROBABILITIES_DEFINE, T)

#else
#define LK_DEFINE_CROSS_ENTROPY_PROBABILITIES(T) LK_NEEDS_NVCC("LK_DEFINE_CROSS_ENTROPY_PROBABILITIES")
#endif /* CUDA or the simulator */
#endif
