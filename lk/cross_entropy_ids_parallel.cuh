// SPDX-License-Identifier: MIT
/* cross_entropy_ids_parallel.cuh - cross_entropy_ids.cuh for columns that are split over ranks (GPUs, or processes), as those of a
 * vocabulary-parallel head are: each rank has some columns of every row, and gets the results of all columns.
 *
 *   a rank's state of a row   as in cross_entropy_parallel.cuh. The rank's target is the id with the largest logit, of the row's
 *                             ids in the rank's columns. Behind the states of all rows lie the logits of all ids, -inf where
 *                             an id is skipped or bad, or another rank has its column
 *   the collective            every rank gets the states and logits of all ranks, in their order
 *   finish                    merges the states. Of the ranks' targets the one with the largest logit is the row's target; the
 *                             others are columns like all others. Then loss and logp of all ids are computed as on one GPU
 *   backward                  each rank computes dlogits of its own columns, from lse and from others[r], the sum of p[r,j] over
 *                             all columns but the target
 *   the tail, an option       a rank's part is the log of the sum of exp(z) over its own columns that are no ids. The state has
 *                             it. If the ids have more than 63/64 of p, finish merges the parts. Else the tail is the log of
 *                             1 minus the sum of the ids' p. backward reads tail
 *
 * Use        In one .cu file:                                       Anywhere, C included:
 *                #include "lk/cross_entropy_ids_parallel.cuh"           #include "lk/cross_entropy_ids_parallel.cuh"
 *                LK_DEFINE_CROSS_ENTROPY_IDS_PARALLEL(bf16)             LK_DECLARE_CROSS_ENTROPY_IDS_PARALLEL(bf16)
 *            The calls are those of lk_ranks.cuh, the manual of all headers for ranks. `common` is lk_cross_entropy_ids_args, and
 *            common.common has the rows: logits, dlogits and vocab are of this rank's columns; target_ids has columns of the whole
 *            vocabulary. The workspace is that of common.common.
 * States     16 bytes per row, 32 with entropy, argmax or, in forward_backward, dentropy, aligned to 16; then for each row the
 *            logits of its ids, in T, padded to a multiple of 16 bytes. The caller gathers [ranks][those bytes]. Set entropy
 *            and argmax in forward too. The states have a tail only if forward gets tail or tail_weight. finish writes `others`,
 *            f32 [rows], to the start of `states`. backward reads it there. It also reads lse, lse_low if given, entropy with
 *            dentropy, tail with tail_weight or dtail, and valid_rows for a mean. Each call needs a workspace.
 * Needs      cross_entropy_ids.cuh, cross_entropy_parallel.cuh, lk_ranks.cuh and what these need.
 * Options    Those of cross_entropy_ids.cuh. Every rank counts all rows with a bad id; without all_gather, finish and backward
 *            count them, and forward does not.
 * Errors     Those of lk_ranks.cuh, then as in cross_entropy_ids.cuh.
 * Read on    lk/cross_entropy.md: how exact results are, and what is read and written.
 *
 * The rows' kernel is that of cross_entropy_parallel.cuh, in forward and in backward. Around it are kernels with a warp per row:
 *   lk_cross_entropy_ids_slice_kernel   before it in forward: looks at the ids, writes their logits, chooses the rank's target
 *   lk_cross_entropy_ids_tail_kernel    behind it in forward, with a tail: the rank's part, with a block per row
 *   lk_cross_entropy_ids_finish_kernel  finish
 *   lk_cross_entropy_ids_weigh_kernel   before it in backward: keeps the logits of the rank's ids, and sums u of all ids
 *   lk_cross_entropy_ids_put_kernel     behind it: computes dlogits of the rank's ids again and writes each once
 * In backward no rank needs to know which id is the row's target. `others` is needed only for an id with more than half of p, and
 * such an id is always the target. 1 - p of every other id is at least 1/2, so it is computed from p and loses no digits.
 * The sum in a rank's state leaves out the rank's target. If the rank's other ids have at most 63/64 of that sum, its part of the
 * tail is the log of a difference: that sum minus theirs. Else the rank reads its columns of the row again. No rank knows in
 * forward how much of p all ids have.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_CROSS_ENTROPY_IDS_PARALLEL_CUH
#define LK_CROSS_ENTROPY_IDS_PARALLEL_CUH

#include "cross_entropy_ids.cuh"
#include "cross_entropy_parallel.cuh"

/* One struct for all calls. */
typedef struct {
    lk_cross_entropy_ids_args common;
    lk_vocab_parallel parallel;
    void *states;           /* see States. forward writes them; finish writes what backward reads, or NULL to skip */
    const void *all_states; /* [ranks] of them: finish reads them */
} lk_cross_entropy_ids_parallel_args;

#define LK_CROSS_ENTROPY_IDS_PARALLEL_FUNCTIONS(X, T)                                                                          \
    X##_CALL(cross_entropy_ids_parallel, forward, LK_FORWARD, T)                                                               \
    X##_CALL(cross_entropy_ids_parallel, backward, LK_BACKWARD, T)                                                             \
    X##_CALL(cross_entropy_ids_parallel, forward_backward, LK_BOTH, T)                                                         \
    X##_CALL(cross_entropy_ids_parallel, finish, LK_FINISH, T)
#define LK_DECLARE_CROSS_ENTROPY_IDS_PARALLEL(T) LK_DECLARE(CROSS_ENTROPY_IDS_PARALLEL, T)
#define LK_DEFINE_CROSS_ENTROPY_IDS_PARALLEL(T) LK_DEFINE(CROSS_ENTROPY_IDS_PARALLEL, T)

#if LK_CUDA

/* ---- The kernels --------------------------------------------------------------------------------------------------------- */

/* What they get. ids.all.a.vocab is the number of all ranks' columns; logits and dlogits point to where column 0 of all ranks would
 * be, so that an id is an index. */
typedef struct {
    lk_ce_ids_call ids;
    int64_t vocab;     /* this rank's columns, from parallel.vocab_start on */
    int64_t block;     /* bytes of a rank's states and logits */
    int state_bytes;   /* of a row, without logits */
    int logits_of_row; /* in a block, with padding to 16 bytes */
} lk_ce_ids_slice;

/* The logits of a row's ids in a rank's block. */
template <class T> LK_DEVICE T *lk_ce_ids_logits(const lk_ce_ids_slice &call, const void *block, int64_t row)
{
    return (T *)(const_cast<char *>((const char *)block) + call.ids.all.a.rows * call.state_bytes) + row * call.logits_of_row;
}

/* The same ids without those whose columns other ranks have. */
LK_DEVICE lk_ce_ids lk_ce_ids_here(const lk_ce_ids_slice &call, lk_ce_ids s)
{
    const unsigned first = (unsigned)call.ids.all.slice.vocab_start;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++)
        if ((unsigned)s.id[i] - first >= (unsigned)call.vocab) s.id[i] = -1;
    return s;
}

/* Forward, before the rows: the logits of the rank's ids, and the rank's target. Without one the sums are of all its columns, as
 * in a row with a bad target. A warp owns a row. */
template <class T>
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS)
    lk_cross_entropy_ids_slice_kernel(const __grid_constant__ lk_ce_ids_slice call)
{
    const lk_cross_entropy_args &a = call.ids.all.a;
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * LK_CE_IDS_WARPS + threadIdx.x / 32;
    lk_griddepcontrol_wait(); /* the rows do not start early: they want more shared memory than this kernel leaves */
    const bool there = row < a.rows;
    const lk_ce_ids s = lk_ce_ids_load(call.ids, row, there), here = lk_ce_ids_here(call, s);
    T *const out = lk_ce_ids_logits<T>(call, call.ids.all.slice.states, row);
    int64_t top = INT64_MIN;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        float logit = -INFINITY;
        if (here.id[i] >= 0) {
            logit = lk_to_float(((const T *)a.logits + row * a.logits_stride)[s.id[i]]);
            const int64_t its = lk_ce_top(logit, s.id[i]);
            top = its > top ? its : top;
        }
        if (there && lane + 32 * i < call.logits_of_row) lk_put(out + lane + 32 * i, logit);
    }
    top = lk_ce_top_warp(top);
    const int y = s.bad || top == INT64_MIN ? LK_BAD : lk_ce_top_col(top);
    if (there && lane == 0) call.ids.space.target[row] = s.any || s.bad ? y : LK_IGNORED;
}

/* A rank's part of a row's tail: the log of the sum of exp(z - max) over its columns that are no ids, with max of the rank's state,
 * as a z. It is the fourth float of the state, which nothing else of ids has a use for. */
LK_DEVICE float *lk_ce_ids_tail_part(const lk_ce_ids_slice &call, const void *states, int64_t row)
{
    return (float *)(const_cast<char *>((const char *)states) + row * call.state_bytes) + 3;
}

/* What lk_cross_entropy_ids_tail_kernel asks for. Here call.ids.all.a.logits and vocab are the rank's columns. */
LK_DEVICE const lk_ce_ids_call &lk_ce_tail_ids(const lk_ce_ids_slice &call) { return call.ids; }
LK_DEVICE float *lk_ce_tail_result(const lk_ce_ids_slice &call, int64_t row)
{
    return lk_ce_ids_tail_part(call, call.ids.all.slice.states, row);
}
template <class T> LK_DEVICE void lk_ce_tail_begin(const lk_ce_ids_slice &call, int64_t row, lk_ce_tail *tail)
{
    const lk_cross_entropy_args &a = call.ids.all.a;
    const int lane = (int)threadIdx.x % 32, first = (int)call.ids.all.slice.vocab_start, y = call.ids.space.target[row];
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    lk_ce_ids_call all = call.ids;
    all.all.a.vocab = call.ids.all.classes;
    const lk_ce_ids s = lk_ce_ids_load(all, row, true), here = lk_ce_ids_here(call, s);
    lk_ce_ids rest = here; /* the state leaves out the target */
    float z[LK_CE_IDS_EACH], slope;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        z[i] = -INFINITY;
        if (here.id[i] == y) rest.id[i] = -1;
        if (rest.id[i] < 0) continue;
        z[i] = lk_to_float(((const T *)a.logits + row * a.logits_stride)[rest.id[i] - first]);
        if (a.softcap > 0.0f) z[i] = lk_ce_cap(z[i], a.logit_scale, a.softcap, &slope);
    }
    const lk_ce_row state = lk_ce_unpack_state(call.ids.all.slice.states, call.state_bytes, row);
    const float sum = lk_ce_ids_sum_p(tail->id, call.ids.x.ids_per_row, rest, z, state.max, 0.0f, scale);
    __syncwarp(); /* all lanes have read the ids, which are overwritten */
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) tail->id[lane + 32 * i] = here.id[i] < 0 ? -1 : here.id[i] - first;
    if (lane != 0) return;
    tail->first_z = state.max, tail->first_loss = 0.0f;
    tail->reads = s.any && !s.bad && sum > (1.0f - LK_CE_TAIL_LEAST) * state.sum;
    if (!tail->reads) *lk_ce_tail_result(call, row) = lk_lse_log({0.0f, state.sum - sum});
}

/* The tail of a row from all ranks' parts. all: its state of all columns. */
LK_DEVICE float lk_ce_ids_merge_tail(const lk_ce_ids_slice &call, int64_t row, const lk_ce_row &all, float scale)
{
    lk_lse tail = lk_lse_empty();
    const lk_ce_slice &slice = call.ids.all.slice;
    for (int rank = 0; rank < slice.ranks; rank++) {
        const char *const states = (const char *)slice.all_states + rank * call.block;
        const float max = lk_ce_unpack_state(states, call.state_bytes, row).max;
        const float part[1] = {scale * (max - all.max) + *lk_ce_ids_tail_part(call, states, row)};
        tail = lk_lse_add(tail, part);
    }
    return lk_lse_log(tail) - lk_lse_log({0.0f, all.sum});
}

/* The state of one column whose value is v. */
LK_DEVICE lk_ce_row lk_ce_ids_alone(float v, float scale)
{
    const float values[1] = {v}, weights[1] = {1.0f};
    return lk_ce_row_add(lk_ce_row_empty(), values, weights, scale);
}

/* A row's state of all columns. Of the ranks' targets the one with the largest value is the row's. *others: in a good row the sum
 * of p of all columns but that target's, else 0. Every lane computes it. */
LK_DEVICE lk_ce_row lk_ce_ids_merge(const lk_ce_ids_slice &call, int64_t row, bool good, float *others)
{
    const lk_cross_entropy_args &a = call.ids.all.a;
    const lk_ce_slice &slice = call.ids.all.slice;
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    lk_ce_row all = lk_ce_row_empty();
    float target = -INFINITY;
    int owner = -1;
    for (int rank = 0; rank < slice.ranks; rank++) {
        const lk_ce_row part = lk_ce_unpack_state((const char *)slice.all_states + rank * call.block, call.state_bytes, row);
        if (owner < 0 || lk_ce_order(part.target) > lk_ce_order(target)) target = part.target, owner = rank;
        all = lk_ce_row_merge<true>(all, part, scale);
    }
    *others = 0.0f;
    if (!good) return all;
    for (int rank = 0; rank < slice.ranks; rank++) {
        const char *const states = (const char *)slice.all_states + rank * call.block;
        const float v = lk_ce_unpack_state(states, call.state_bytes, row).target;
        if (rank != owner && v != -INFINITY) all = lk_ce_row_merge<true>(all, lk_ce_ids_alone(v, scale), scale);
    }
    const float values[1] = {target}, weights[1] = {1.0f};
    const lk_ce_row rest = lk_ce_row_raise_halfway<true>(all, target, scale);
    all = lk_ce_row_add(rest, values, weights, scale);
    *others = __fdiv_rn(lk_ce_row_raise<true>(rest, all.max, scale).sum, all.sum);
    all.target = target;
    return all;
}

/* A warp owns a row. tail: the call has one. */
template <class T, bool tail = false>
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS)
    lk_cross_entropy_ids_finish_kernel(const __grid_constant__ lk_ce_ids_slice call)
{
    const lk_cross_entropy_args &a = call.ids.all.a;
    const lk_ce_slice &slice = call.ids.all.slice;
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * LK_CE_IDS_WARPS + threadIdx.x / 32;
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    LK_SHARED(int, id, [LK_CE_IDS_WARPS * LK_CE_IDS_MOST]);
    lk_griddepcontrol_launch_dependents();
    lk_griddepcontrol_wait();
    if (row >= a.rows) return;
    const lk_ce_ids s = lk_ce_ids_load(call.ids, row, true);
    const bool counted = s.any || s.bad, good = s.any && !s.bad;
    float z[LK_CE_IDS_EACH], first_z = -INFINITY, others = 0.0f, slope, unused[LK_CE_IDS_EACH];
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) z[i] = -INFINITY;
    for (int rank = 0; good && rank < slice.ranks; rank++) { /* each id's logit is -inf on all ranks but one */
        const T *const logits = lk_ce_ids_logits<T>(call, (const char *)slice.all_states + rank * call.block, row);
        LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
            const float logit = s.id[i] >= 0 ? lk_to_float(logits[lane + 32 * i]) : -INFINITY;
            if (logit != -INFINITY) z[i] = logit;
        }
    }
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        if (s.id[i] >= 0 && a.softcap > 0.0f) z[i] = lk_ce_cap(z[i], a.logit_scale, a.softcap, &slope);
        first_z = fmaxf(first_z, z[i]);
    }
    first_z = lk_max_warp(first_z); /* the target's */
    lk_ce_result r = {0.0f, 0.0f, 0.0f, 0.0f, -1, 0.0f};
    lk_ce_row all = {};
    if (counted) all = lk_ce_ids_merge(call, row, good, &others), r = lk_ce_row_finish(all, {scale, 0.0f, a.z_loss, 1.0f, a.vocab});
    if (s.bad) r.class_loss = NAN;
    if constexpr (tail) {
        int *const own = id + threadIdx.x / 32 * LK_CE_IDS_MOST;
        const float sum = lk_ce_ids_sum_p(own, call.ids.x.ids_per_row, s, z, first_z, r.class_loss, scale);
        float of_row = counted ? NAN : 0.0f;
        if (good && r.class_loss == r.class_loss)
            of_row = sum > 1.0f - LK_CE_TAIL_LEAST ? lk_ce_ids_merge_tail(call, row, all, scale) : log1pf(-sum);
        if (lane == 0) call.ids.tail[row] = of_row;
    }
    const float part = lk_ce_ids_put_logp(call.ids, row, s, z, first_z, r.class_loss, scale, unused);
    if (lane != 0) return;
    const bool adds = tail && call.ids.x.tail_weight && good;
    if (r.class_loss == r.class_loss) r.class_loss = adds ? lk_ce_ids_add_tail(call.ids, row, part) : part;
    if (slice.others) slice.others[row] = others;
    if (s.bad && a.bad_targets) atomicAdd(a.bad_targets, 1);
    call.ids.space.target[row] = s.bad ? LK_BAD : s.any ? 0 : LK_IGNORED; /* for the counts of all rows */
    lk_ce_put_result<true>(call.ids.all, row, {-1, counted, s.bad}, 1.0f, r);
}

/* Backward, before the rows: what all ids add to the factor of p. Where one of the rank's ids has more than half of p, it is the
 * target of the rows' kernel. A warp owns a row. bad_is_zero: as in lk_ce_ids_call. */
template <class T, bool bad_is_zero = false, bool tail = false>
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS)
    lk_cross_entropy_ids_weigh_kernel(const __grid_constant__ lk_ce_ids_slice call)
{
    const lk_cross_entropy_args &a = call.ids.all.a;
    const lk_ce_ids_space &space = call.ids.space;
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * LK_CE_IDS_WARPS + threadIdx.x / 32;
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    lk_griddepcontrol_wait(); /* the rows do not start early: see above */
    const bool there = row < a.rows;
    const lk_ce_ids s = lk_ce_ids_load(call.ids, row, there), here = lk_ce_ids_here(call, s);
    const bool good = s.any && !s.bad;
    int64_t top = INT64_MIN;
    float largest = -INFINITY, slope;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        if (here.id[i] < 0) continue;
        const float logit = lk_to_float(((const T *)a.logits + row * a.logits_stride)[s.id[i]]);
        space.logit[row * call.ids.x.ids_per_row + lane + 32 * i] = logit;
        const int64_t its = lk_ce_top(logit, s.id[i]);
        top = its > top ? its : top;
        largest = fmaxf(largest, logit);
    }
    top = lk_ce_top_warp(top), largest = lk_max_warp(largest);
    lk_ce_upstream up = {};
    if (good) up = lk_ce_ids_load_upstream(call.ids, row);
    int y = LK_ELSEWHERE;
    if (good && top != INT64_MIN) {
        lk_ce_gradient g = {};
        const float p_scale = lk_ce_base_of_lse(&g, up, scale, false, 0.0f);
        if (a.softcap > 0.0f) largest = lk_ce_cap(largest, a.logit_scale, a.softcap, &slope);
        if (p_scale * lk_ex2(fmaf(g.rate, largest, -g.base)) > 0.5f) y = lk_ce_top_col(top);
    }
    float own, rest; /* u of the target; the sum of u of the other ids of all ranks, plus the gradient of lse */
    lk_ce_ids_sum_factors(call.ids, row, s, good, y, up.f, &own, &rest);
    rest += up.dlse;
    if (s.bad && !bad_is_zero) own = lk_ce_ids_bad_factor(call.ids, row);
    if (!there || lane != 0) return;
    if (a.z_loss > 0.0f) rest = fmaf(2.0f * a.z_loss * up.lse, up.h, rest);
    space.target[row] = good ? y : s.bad && !bad_is_zero ? LK_BAD : LK_IGNORED;
    if constexpr (tail) {
        if (good) lk_ce_ids_put_tail(call.ids, row, up, own, rest);
        else if (s.bad) lk_ce_ids_put_no_tail(call.ids, row, own);
    } else {
        space.upstream[row] = own, space.dlse[row] = rest;
    }
}

/* Backward, behind the rows: dlogits of the rank's ids. A warp owns a row. eight: dlogits are e5m2. */
template <class T, bool eight, bool tail = false>
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS)
    lk_cross_entropy_ids_put_kernel(const __grid_constant__ lk_ce_ids_slice call)
{
    LK_SHARED(lk_ce_ids_term, terms, [LK_CE_IDS_WARPS * LK_CE_IDS_MOST]);
    const lk_cross_entropy_args &a = call.ids.all.a;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int64_t row = (int64_t)blockIdx.x * LK_CE_IDS_WARPS + warp;
    lk_griddepcontrol_launch_dependents();
    lk_griddepcontrol_wait();
    if (row >= a.rows) return;
    const lk_ce_ids s = lk_ce_ids_load(call.ids, row, true), here = lk_ce_ids_here(call, s);
    if (!s.any || s.bad || !lk_is_finite(call.ids.lse[row])) return; /* these rows are 0 or NaN throughout */
    float z[LK_CE_IDS_EACH], slope[LK_CE_IDS_EACH], unused[LK_CE_IDS_EACH] = {};
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        z[i] = -INFINITY, slope[i] = 1.0f;
        if (here.id[i] >= 0) z[i] = call.ids.space.logit[row * call.ids.x.ids_per_row + lane + 32 * i];
        if (a.softcap > 0.0f) z[i] = lk_ce_cap(z[i], a.logit_scale, a.softcap, &slope[i]);
    }
    lk_ce_ids_write_gradients<T, eight, tail>(call.ids, terms + warp * LK_CE_IDS_MOST, row, here, z, slope, unused, 0.0f, 0.0f);
}

/* ---- Workspace ----------------------------------------------------------------------------------------------------------- */

/* The logits of a row in a rank's block. */
template <class T> LK_HOST int lk_ce_ids_logits_of_row(int64_t ids_per_row)
{
    return (int)lk_ceil_div(ids_per_row, LK_VEC<T>) * LK_VEC<T>;
}

/* The bytes of a row's state and its logits. ids_per_row may be unchecked. Args: also a head's. */
template <class T, class Args>
LK_HOST int64_t lk_ce_ids_row_bytes(const Args *a, int64_t ids_per_row, lk_direction direction)
{
    const int64_t k = ids_per_row < 1 || ids_per_row > LK_CE_IDS_MOST ? 1 : ids_per_row;
    return lk_ce_ranks_state_bytes(a, direction) + lk_ce_ids_logits_of_row<T>(k) * (int64_t)sizeof(T);
}

/* What lies in the workspace, besides what is gathered. */
typedef struct {
    lk_ce_ranks_space ranks; /* as without ids */
    lk_ce_ids_space ids;
} lk_ce_ids_slice_space;

LK_HOST lk_ce_ids_slice_space lk_ce_ids_slice_space_of(const lk_cross_entropy_ids_args *x, lk_direction direction, bool gathers,
                                                       lk_arena *arena)
{
    const lk_cross_entropy_args &a = x->common;
    const bool back = direction == LK_BOTH || direction == LK_BACKWARD, results = gathers || direction == LK_FINISH;
    const int64_t rows = lk_ce_space_rows(a.rows);
    lk_ce_ids_slice_space s = {lk_ce_ranks_space_of(&a, direction, gathers, arena), {}};
    s.ids.row_losses = s.ranks.rows.row_losses;
    lk_take(&s.ids.target, arena, true, rows);
    lk_take(&s.ids.logit, arena, back, rows * x->ids_per_row);
    lk_take(&s.ids.upstream, arena, back, rows);
    lk_take(&s.ids.dlse, arena, back, rows);
    lk_take(&s.ids.tail, arena, results && !x->tail && lk_ce_ids_has_tail(x, direction), rows);
    if (back && lk_ce_ids_has_tail(x, LK_BACKWARD)) lk_ce_ids_take_others(&s.ids, arena, a.dentropy != NULL, rows);
    return s;
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* A call of a rank while it is launched: its arguments after the checks. */
typedef struct {
    const char *op;
    lk_device device;
    cudaStream_t stream;
    lk_direction direction;
    lk_cross_entropy_ids_parallel_args x;
    lk_ce_ids_slice_space space;
} lk_ce_ids_job;

/* What the kernels around the rows get. rows: what the rows' kernel gets. */
template <class T>
LK_HOST lk_ce_ids_slice lk_ce_ids_slice_of(const lk_ce_ids_job &job, lk_direction direction, lk_cross_entropy_call *rows)
{
    lk_ce_ids_slice call = {};
    call.ids.x = job.x.common, call.ids.space = job.space.ids, call.ids.direction = direction;
    call.ids.all = lk_ce_ranks_call_of<T>({job.x.common.common, job.x.parallel, job.x.states, job.x.all_states});
    lk_cross_entropy_args &a = call.ids.all.a;
    call.vocab = a.vocab, call.logits_of_row = lk_ce_ids_logits_of_row<T>(job.x.common.ids_per_row);
    call.state_bytes = call.ids.all.state_bytes;
    call.block = a.rows * (call.state_bytes + call.logits_of_row * (int64_t)sizeof(T));
    call.ids.lse = a.lse, call.ids.lse_low = a.lse_low, call.ids.entropy = a.entropy;
    call.ids.all.over = a.denominator;
    if (direction != LK_BACKWARD || lk_ce_ids_has_tail(&job.x.common, direction)) call.ids.tail = job.x.common.tail;
    if (direction == LK_BACKWARD) call.ids.all.valid_rows = a.valid_rows;
    *rows = lk_ce_ids_rows(call.ids);
    if (direction == LK_FORWARD) rows->a.upstream = rows->a.dlse = NULL; /* forward_backward's */
    a.vocab = call.ids.all.classes;
    a.logits = (const void *)((uintptr_t)a.logits - (uintptr_t)job.x.parallel.vocab_start * sizeof(T));
    a.dlogits = (void *)((uintptr_t)a.dlogits -
                         (uintptr_t)job.x.parallel.vocab_start * (size_t)lk_dtype_bytes<T>(a.dlogits_dtype));
    return call;
}

LK_HOST lk_status lk_ce_ids_launch(const lk_ce_ids_job &job, void (*kernel)(lk_ce_ids_slice), const lk_ce_ids_slice &call)
{
    const int64_t blocks = lk_ceil_div(job.x.common.common.rows, LK_CE_IDS_WARPS);
    return lk_launch_pdl(job.op, &job.device, kernel, blocks, 1, 32 * LK_CE_IDS_WARPS, 0, job.stream, call);
}

/* The states of a rank's columns, and the logits of its ids, in the block of `all` rows that x.states is. The job's rows are
 * those from `first` on. */
template <class T> LK_HOST lk_status lk_ce_ids_run_states(const lk_ce_ids_job &job, int64_t first, int64_t all)
{
    lk_cross_entropy_call rows;
    lk_ce_ids_slice call = lk_ce_ids_slice_of<T>(job, LK_FORWARD, &rows);
    lk_cross_entropy_args &a = call.ids.all.a;
    char *const block = (char *)job.x.states;
    rows.slice.states = block + first * call.state_bytes;
    /* The kernel looks for the logits behind the states of its rows. */
    call.ids.all.slice.states = block + (all - a.rows) * call.state_bytes + first * call.logits_of_row * (int64_t)sizeof(T);
    lk_status status = lk_ce_ids_launch(job, lk_cross_entropy_ids_slice_kernel<T>, call);
    if (!status) status = lk_cross_entropy_gradient<T, LK_FORWARD>(job.op, &job.device, rows, job.stream);
    if (status || !lk_ce_ids_has_tail(&job.x.common, LK_BOTH)) return status;
    call.ids.all.slice.states = rows.slice.states, a.logits = rows.a.logits, a.vocab = call.vocab;
    return lk_ce_tail_launch<T>(job.op, &job.device, a, call, job.stream);
}

/* The results from the blocks of all ranks. */
template <class T> LK_HOST lk_status lk_ce_ids_run_finish(const lk_ce_ids_job &job)
{
    lk_cross_entropy_call rows;
    lk_ce_ids_slice call = lk_ce_ids_slice_of<T>(job, LK_FINISH, &rows);
    const lk_cross_entropy_args &a = call.ids.all.a;
    const bool reduced = lk_cross_entropy_reduced(&a);
    lk_status status = LK_OK;
    rows.a.vocab = rows.classes;
    if (reduced) call.ids.all.row_losses = job.space.ids.row_losses;
    void (*const kernel)(lk_ce_ids_slice) =
        call.ids.tail ? lk_cross_entropy_ids_finish_kernel<T, true> : lk_cross_entropy_ids_finish_kernel<T>;
    if (a.rows > 0) status = lk_ce_ids_launch(job, kernel, call);
    if (!status && reduced) return lk_cross_entropy_sum(job.op, &job.device, call.ids.all, job.stream);
    return !status && (a.valid_rows || a.weight_sum) ? lk_cross_entropy_count(job.op, &job.device, rows, job.stream) : status;
}

/* The gradients of a rank's columns. head: of a head's rows, where a row with a bad id gets 0, and dlogits are not e5m2. */
template <class T, bool head, bool tail> LK_HOST lk_status lk_ce_ids_run_gradients(const lk_ce_ids_job &job)
{
    lk_cross_entropy_call rows;
    const lk_ce_ids_slice call = lk_ce_ids_slice_of<T>(job, LK_BACKWARD, &rows);
    if (job.x.common.common.rows == 0) return LK_OK;
    rows.classes = (int64_t)LK_ELSEWHERE + 1; /* the target that no rank has is good */
    void (*put)(lk_ce_ids_slice) = lk_cross_entropy_ids_put_kernel<T, false, tail>;
    lk_status status = lk_ce_ids_launch(job, lk_cross_entropy_ids_weigh_kernel<T, head, tail>, call);
    if constexpr (head) {
        if (!status) status = lk_cross_entropy_gradient<T, LK_BACKWARD>(job.op, &job.device, rows, job.stream);
    } else {
        if (rows.a.dlogits_dtype == LK_DTYPE_E5M2) put = lk_cross_entropy_ids_put_kernel<T, true, tail>;
        if (!status) status = lk_cross_entropy_gradient_of<T, LK_BACKWARD>(job.op, &job.device, rows, job.stream);
    }
    return status ? status : lk_ce_ids_launch(job, put, call);
}
template <class T, bool head> LK_HOST lk_status lk_ce_ids_run_backward(const lk_ce_ids_job &job)
{
    return lk_ce_ids_has_tail(&job.x.common, LK_BACKWARD) ? lk_ce_ids_run_gradients<T, head, true>(job)
                                                          : lk_ce_ids_run_gradients<T, head, false>(job);
}

/* Checks a call and fills in its job. query: the call is of a workspace function, which answers `bytes`. */
template <class T>
LK_HOST lk_status lk_ce_ids_begin_job(const char *op, const lk_cross_entropy_ids_parallel_args *args, lk_direction direction,
                                      bool query, cudaStream_t stream, lk_ce_ids_job *job, size_t *bytes)
{
    *job = {op, {}, stream, direction, *args, {}};
    lk_cross_entropy_ids_parallel_args &x = job->x;
    lk_cross_entropy_ids_args &ids = x.common;
    lk_cross_entropy_args &a = ids.common;
    lk_ce_more more = {};
    lk_checks checks = {op, LK_OK};
    lk_cross_entropy_ids_refuse(&checks, &a);
    lk_ranks_check(&checks, x.parallel, a.vocab, direction);
    if (checks.status) return checks.status; /* before sizes are computed of it */
    lk_ce_ids_fill_in(&ids, direction);
    lk_arena arena = {(uintptr_t)a.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    job->space = lk_ce_ids_slice_space_of(&ids, direction, lk_ranks_gathers(x.parallel, direction), &arena);
    const int64_t row_bytes = lk_ce_ids_row_bytes<T>(&a, ids.ids_per_row, direction);
    lk_ranks_place(x.parallel, direction, a.rows, row_bytes, 4, 16, &arena, &x.states, &x.all_states, &more.states);
    more.bytes = arena.used, more.parallel = &x.parallel;
    const lk_status status =
        lk_cross_entropy_ids_check<T>(op, &args->common, direction, query ? NULL : &job->device, &ids, &more);
    if (!status && bytes) *bytes = more.bytes;
    if (status || query) return status;
    if (!ids.tail) ids.tail = job->space.ids.tail;
    lk_ce_ranks_put_space(job->space.ranks, direction, &a);
    return LK_OK;
}

template <class T> LK_HOST lk_status lk_ce_ids_step(void *of, lk_direction step)
{
    lk_ce_ids_job *const job = (lk_ce_ids_job *)of;
    lk_cross_entropy_args &a = job->x.common.common;
    if (step == LK_FINISH) return lk_ce_ids_run_finish<T>(*job);
    if (step == LK_FORWARD) return a.rows > 0 ? lk_ce_ids_run_states<T>(*job, 0, a.rows) : LK_OK;
    if (job->direction == LK_BOTH) a.bad_targets = NULL; /* finish has counted them */
    return lk_ce_ids_run_backward<T, false>(*job);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_cross_entropy_ids_parallel_run(const char *op, const lk_cross_entropy_ids_parallel_args *args,
                                                    cudaStream_t stream)
{
    lk_ce_ids_job job;
    const lk_status status = lk_ce_ids_begin_job<T>(op, args, direction, false, stream, &job, NULL);
    if (status) return status;
    const lk_cross_entropy_args &a = job.x.common.common;
    const size_t row_bytes = (size_t)lk_ce_ids_row_bytes<T>(&a, job.x.common.ids_per_row, direction);
    const lk_ranks ranks = {op, stream, job.x.parallel, a.vocab, job.x.states, job.x.all_states, (size_t)a.rows * row_bytes, 1,
                            lk_ce_ids_step<T>, &job};
    return lk_ranks_run(&ranks, direction);
}
template <class T>
LK_HOST lk_status lk_cross_entropy_ids_parallel_query(const char *op, const lk_cross_entropy_ids_parallel_args *args,
                                                      lk_direction direction, size_t *bytes)
{
    lk_ce_ids_job job;
    return lk_ce_ids_begin_job<T>(op, args, direction, true, NULL, &job, bytes);
}

#endif /* CUDA or the simulator */
#endif
