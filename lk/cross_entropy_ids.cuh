// SPDX-License-Identifier: MIT
/* cross_entropy_ids.cuh - cross_entropy.cuh with K weighted ids per row instead of one target, and the log-probability of each:
 * distillation from a teacher's top K, shifted targets of several tokens, choices among a few answers.
 *
 *   id, w      = target_ids[r,k], target_weight[r,k]; a row is r, k goes from 0 to ids_per_row - 1
 *   logp[r,k]  = z[r,id] - lse[r]
 *   class[r]   = -sum_k w logp[r,k],   with the option row_weight times row_weight[r]
 *   u[k]       = f w - dlogp[r,k],     f = upstream * upstream_value * row_weight[r]; for mean f is divided by D, which is
 *                                      valid_rows, or denominator
 *   dz[j]      = (sum_k u[k] + G) p[r,j] - sum_{k: id = j} u[k],     to which dentropy adds its term
 *   An id may come several times in a row: its weights add up. The other formulas and names are at the top of cross_entropy.cuh.
 *   The tail, an option, is one more bin: all columns that are none of the row's ids. I is the set of the ids.
 *   tail[r]    = log P,  P = sum_{j not in I} p[r,j];  to class[r] comes -tail_weight[r] tail[r]
 *   u_tail     = f tail_weight[r] - dtail[r]
 *   dz[j]      gains u_tail p[r,j], and where j is not in I: -u_tail p[r,j] / P
 *
 * Use        In one .cu file:                              Anywhere, C included:
 *                #include "lk/cross_entropy_ids.cuh"           #include "lk/cross_entropy_ids.cuh"
 *                LK_DEFINE_CROSS_ENTROPY_IDS(bf16)             LK_DECLARE_CROSS_ENTROPY_IDS(bf16)
 *            The struct has that of cross_entropy.cuh in its field `common`, whose target stays NULL. Every call needs a
 *            workspace:
 *                lk_cross_entropy_ids_args args = {};
 *                args.common.logits = logits, args.common.rows = rows, args.common.vocab = vocab;
 *                args.target_ids = ids, args.target_weight = weights, args.ids_per_row = ids_per_row;
 *                args.common.loss = loss, args.common.lse = lse, args.logp = logp;
 *                lk_cross_entropy_ids_forward_workspace_bytes_bf16(&args, &args.common.workspace_bytes);
 *                args.common.workspace = ...;                    // that many bytes, aligned to 128
 *                lk_status status = lk_cross_entropy_ids_forward_bf16(&args, stream);
 *                args.common.dlogits = dlogits, args.dlogp = dlogp;
 *                lk_cross_entropy_ids_backward_workspace_bytes_bf16(&args, &args.common.workspace_bytes);
 *                args.common.workspace = ...;
 *                status = lk_cross_entropy_ids_backward_bf16(&args, stream);    // reads the lse of forward
 *            lk_cross_entropy_ids_forward_backward_bf16 computes both in one call. The workspace takes 4 bytes for each id, up to
 *            32 bytes for each row, and 128 bytes; with a tail up to 48 bytes for each row, and 256 bytes. The number of rows is
 *            rounded up to a multiple of 64. The workspace functions read shapes, options, which outputs are wanted, and which
 *            gradients and tail_weight are given.
 *            With a tail: args.tail_weight = weights_of_tails, args.tail = tail, which backward reads as it reads lse.
 * Needs      cross_entropy.cuh and what that needs.
 * Options    Those of cross_entropy.cuh, without class_weight, label_smoothing, target_prob, statistics and batch_invariant.
 *            Columns that are split over ranks: cross_entropy_ids_parallel.cuh.
 *            Skipped id: ignore_index with use_ignore_index, or an id outside [0, vocab) whose weight is 0. It adds nothing
 *            anywhere, its logp is 0 and its dlogp is not used. A row whose ids are all skipped is an ignored row.
 *            Bad id: outside [0, vocab), not skipped. It makes the row bad, as a bad target does: loss, dlogits and all logp of the
 *            row are NaN, and bad_targets counts the row once. But the row's loss is 0 where row_weight is 0, and its dlogits
 *            are 0 where f, dlse, dentropy, dtail and its dlogp are all 0.
 *            Good id: neither skipped nor bad. Good row: it has a good id, and no bad one. Place: the index k of an id in its row;
 *            an id that comes twice has two places.
 *            A weight of 0 adds nothing to the loss, even where logp is -inf. Weights may be of either sign. Those of a row
 *            need not add up to 1. A row counts in a mean whatever its weights are; for a weighted mean pass the sum of the
 *            weights as denominator. weight_sum is the number of rows that are neither ignored nor bad.
 *            dlogp is a gradient of logp from elsewhere, which is added like dlse and not divided by D. With dlogp the caller's
 *            loss is made of logp, so a NULL upstream with upstream_value 0 is 0, not 1. For the gradient of the
 *            loss too, set upstream or upstream_value, even to 1. z_loss has the same upstream as the loss.
 *            Tail: asked for by tail_weight, by `tail` (F FB) or by dtail (B FB). A skipped id is not in I; an id of weight
 *            0 within the columns is. tail is 0 for an ignored row, NaN for a bad one, and -inf where no other column has a
 *            probability, as where all columns are ids. A tail_weight of 0 adds nothing to the loss even then. Where tail is -inf,
 *            its gradient still reaches the ids, by the formula, and dlogits of the other columns are 0. dtail is added like dlogp:
 *            not divided by D, not times row_weight, and with it a NULL upstream is 0 as with dlogp. For a KL over K ids and the rest, pass 1
 *            minus the sum of the teacher's K probabilities as tail_weight; the loss is this KL plus the teacher's entropy over
 *            the K + 1 bins. Do not compute the tail from logp: 1 minus the sum of exp(logp) has an absolute error of about 2^-24,
 *            which is a large relative error where the sum is near 1. Neither `tail` nor its gradient is clamped.
 * Errors     As in cross_entropy.cuh. First of all LK_ERR_VALUE: target, target_prob, class_weight, label_smoothing, statistics or
 *            batch_invariant is given. LK_ERR_SHAPE: ids_per_row is not 1 to 128, before the other sizes. The tensors of
 *            this header come behind those of cross_entropy.cuh.
 * Source     Top-K distillation: Peng et al., "Pre-training Distillation", 2024; several tokens: Gloeckle et al., 2024.
 * Read on    lk/cross_entropy.md: how exact results are, and what is read and written.
 *
 * A tail changes what is read: forward reads a row again where its ids have more than 63/64 of p, and forward_backward is forward,
 * then backward, so it reads the logits twice.
 *
 * Two kernels, with a warp per row, stand around the rows' kernel, which is one of cross_entropy.cuh. A row's target, below, is an
 * id that the first of them chooses; the caller's `target` is NULL.
 *   lk_cross_entropy_ids_read_kernel     loads the ids and saves their logits, since dlogits may overwrite the logits. The id with
 *                                        the largest logit becomes the row's target
 *   the rows' kernel                     loss and gradient of that target. As upstream it gets u of the target. The sum of u of the
 *                                        other ids is added to dlse
 *   lk_cross_entropy_ids_write_kernel    computes logp and the loss of all ids, from the target's loss and differences of logits.
 *                                        It computes dlogits of the other ids again, and writes each once
 * So the columns cost what they cost with one target, and a result is as exact as there: no other id has more than half of p.
 * With a tail lk_cross_entropy_ids_tail_kernel comes between the rows' kernel and the write kernel of forward. In backward the
 * rows' kernel gets lse + tail in place of lse. That is the lse of the columns that are no ids, so the kernel computes p / P where
 * it would compute p. In these columns p / P neither overflows nor vanishes, however small P is. The write kernel writes dlogits of
 * all ids.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_CROSS_ENTROPY_IDS_CUH
#define LK_CROSS_ENTROPY_IDS_CUH

#include "cross_entropy.cuh"

/* F, B and FB as in lk_cross_entropy_args. A row of each tensor is ids_per_row numbers; strides are in elements, 0 means packed. */
typedef struct {
    lk_cross_entropy_args common;
    const void *target_ids;     /* F B FB in   common.target_dtype [rows, ids_per_row] */
    const float *target_weight; /* F B FB in   f32 [rows, ids_per_row], finite; NULL: 1 */
    const float *dlogp;         /* B FB in     f32 [rows, ids_per_row], the gradient of logp; NULL: none */
    float *logp;                /* F FB out    f32 [rows, ids_per_row] */
    int64_t ids_per_row;        /* 1 to 128 */
    int64_t target_ids_stride, target_weight_stride, dlogp_stride, logp_stride;
    const float *tail_weight;   /* F B FB in   f32 [rows], finite; NULL: the tail is not in the loss */
    const float *dtail;         /* B FB in     f32 [rows], the gradient of tail; NULL: none */
    float *tail;                /* F FB out, B in: forward's. f32 [rows]; B requires it with tail_weight or dtail */
} lk_cross_entropy_ids_args;

#define LK_CROSS_ENTROPY_IDS_FUNCTIONS(X, T)                                                                                   \
    X##_CALL(cross_entropy_ids, forward, LK_FORWARD, T)                                                                        \
    X##_CALL(cross_entropy_ids, backward, LK_BACKWARD, T)                                                                      \
    X##_CALL(cross_entropy_ids, forward_backward, LK_BOTH, T)
#define LK_DECLARE_CROSS_ENTROPY_IDS(T) LK_DECLARE(CROSS_ENTROPY_IDS, T)
#define LK_DEFINE_CROSS_ENTROPY_IDS(T) LK_DEFINE(CROSS_ENTROPY_IDS, T)

#if LK_CUDA

/* ---- The kernels --------------------------------------------------------------------------------------------------------- */

#define LK_CE_IDS_EACH 4 /* of a lane */
#define LK_CE_IDS_MOST (32 * LK_CE_IDS_EACH)
#define LK_CE_IDS_WARPS 4 /* of a block; each owns a row */
#define LK_CE_TAIL_THREADS 256
#define LK_CE_TAIL_BLOCKS 3 /* per SM: as many as registers allow without spills */
#define LK_CE_TAIL_MARKS 8192
#define LK_CE_TAIL_LEAST 0x1p-6f /* what ids must leave of 1, so that the difference is good to 2^-16 */

/* What lies in the workspace. */
typedef struct {
    lk_ce_counts *counts;
    lk_ce_row_losses row_losses; /* of the rows' targets; of all ids later, where a reduced loss is wanted */
    int32_t *target;             /* of each row: a column, LK_BAD or LK_IGNORED */
    float *logit;                /* [rows, ids_per_row]; undefined where an id is not good */
    float *upstream, *dlse;      /* what the rows' kernel gets: u of the target, and what is added to the factor of p besides */
    float *lse, *entropy;        /* forward_backward, where the caller does not want them */
    float *tail;                 /* forward with a tail that the caller does not want */
    /* What the rows' kernel gets in backward with a tail; `upstream` and `dlse` are the ids' then. */
    float *others_upstream, *others_lse, *others_lse_low, *others_entropy, *others_dentropy;
    size_t bytes;
} lk_ce_ids_space;

/* What the read, tail and write kernels get. all.a has NULL for what the rows' kernel writes: lse, lse_low, entropy, argmax. */
typedef struct {
    lk_cross_entropy_ids_args x; /* its `common` is not used: all.a is */
    lk_cross_entropy_call all;
    lk_ce_ids_space space;
    const float *lse, *lse_low, *entropy; /* of the rows */
    float *tail; /* the caller's or the workspace's; NULL: the call has no tail, as forward_backward never has */
    lk_direction direction;
    bool bad_is_zero; /* a row with a bad id has gradients of 0 instead of NaN; lse, z-loss and entropy are those of its logits */
} lk_ce_ids_call;

/* A lane's ids k = lane, lane + 32, ... of a row. */
typedef struct {
    int id[LK_CE_IDS_EACH]; /* -1: skipped, bad or none */
    float weight[LK_CE_IDS_EACH];
    bool any, bad; /* of all lanes: some id is good; some id is bad */
} lk_ce_ids;

/* What place k of a row means. */
LK_DEVICE lk_ce_label lk_ce_ids_label(const lk_ce_ids_call &call, int64_t row, int64_t k)
{
    const lk_cross_entropy_args &a = call.all.a;
    const int64_t at = row * call.x.target_ids_stride + k;
    const int64_t id = a.target_dtype == LK_TARGET_INT32 ? ((const int32_t *)call.x.target_ids)[at]
                                                         : ((const int64_t *)call.x.target_ids)[at];
    return lk_ce_label_among(a, id, a.vocab);
}

/* Called by: all lanes of a warp; there: false without such a row. */
LK_DEVICE lk_ce_ids lk_ce_ids_load(const lk_ce_ids_call &call, int64_t row, bool there)
{
    lk_ce_ids s = {};
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        const int k = (int)threadIdx.x % 32 + 32 * i;
        s.id[i] = -1;
        if (!there || k >= (int)call.x.ids_per_row) continue;
        const lk_ce_label label = lk_ce_ids_label(call, row, k);
        s.weight[i] = call.x.target_weight ? call.x.target_weight[row * call.x.target_weight_stride + k] : 1.0f;
        s.id[i] = label.y, s.any |= label.y >= 0, s.bad |= label.bad && s.weight[i] != 0.0f;
    }
    s.any = __any_sync(0xffffffffu, s.any), s.bad = __any_sync(0xffffffffu, s.bad);
    return s;
}

/* The upstreams of a row that is neither ignored nor bad. */
LK_DEVICE lk_ce_upstream lk_ce_ids_load_upstream(const lk_ce_ids_call &call, int64_t row)
{
    lk_ce_upstream up = lk_ce_load_upstream<false>(call.all, row, 0);
    if (call.all.a.upstream_value == 0.0f) up.f = up.h = 0.0f; /* the loss has no gradient, whatever row_weight is */
    if (call.direction == LK_BACKWARD) up.lse = call.lse[row];
    if (call.direction == LK_BACKWARD && call.lse_low) up.lse_low = call.lse_low[row];
    return up;
}

/* u of a lane's id number i, which is good. */
LK_DEVICE float lk_ce_ids_factor(const lk_ce_ids_call &call, int64_t row, const lk_ce_ids &s, int i, float f)
{
    const float u = s.weight[i] != 0.0f ? f * s.weight[i] : 0.0f;
    return call.x.dlogp ? u - call.x.dlogp[row * call.x.dlogp_stride + (int)threadIdx.x % 32 + 32 * i] : u;
}

/* Sums u over a row's places: *own where the id is y, *rest where it is not; 0 in a row that is not good. Called by its warp. */
LK_DEVICE void lk_ce_ids_sum_factors(const lk_ce_ids_call &call, int64_t row, const lk_ce_ids &s, bool good, int y, float f,
                                     float *own, float *rest)
{
    float of_y = 0.0f, others = 0.0f;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        const float u = good && s.id[i] >= 0 ? lk_ce_ids_factor(call, row, s, i, f) : 0.0f;
        if (s.id[i] == y) of_y += u;
        else others += u;
    }
    *own = lk_sum_warp(of_y), *rest = lk_sum_warp(others);
}

/* Writes logp of a row's ids, from z and the loss of its target. z, minus_logp: of a lane's ids. Nothing cancels, since no id has a
 * smaller -logp than the target. Called by the row's warp. Returns the row's loss, in all lanes. */
LK_DEVICE float lk_ce_ids_put_logp(const lk_ce_ids_call &call, int64_t row, const lk_ce_ids &s, const float (&z)[LK_CE_IDS_EACH],
                                   float first_z, float first_loss, float scale, float (&minus_logp)[LK_CE_IDS_EACH])
{
    const int lane = (int)threadIdx.x % 32;
    float part = 0.0f;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        minus_logp[i] = z[i] == first_z ? first_loss : first_loss + scale * (first_z - z[i]);
        if (s.id[i] < 0) minus_logp[i] = s.bad ? NAN : 0.0f;
        if (s.id[i] >= 0 && s.weight[i] != 0.0f) part = fmaf(s.weight[i], minus_logp[i], part);
        if (call.x.logp && lane + 32 * i < (int)call.x.ids_per_row)
            call.x.logp[row * call.x.logp_stride + lane + 32 * i] = 0.0f - minus_logp[i]; /* 0, not -0 */
    }
    return lk_sum_warp(part);
}

/* Whether the rows' kernel adds the gradient of the z-loss. It must in forward_backward, where lse is not known before. Its
 * upstream is then h, that of the z-loss, in place of the target's u. The write kernel corrects the target's dlogits if u is not h.
 * */
LK_DEVICE bool lk_ce_ids_keeps_z(const lk_ce_ids_call &call)
{
    return call.direction == LK_BOTH && call.all.a.z_loss > 0.0f;
}

/* Backward with a tail: what the rows' kernel and the write kernel get of a good row. With lse + tail in place of lse the rows'
 * kernel computes p / P where it would compute p. dz of a column that is no id is (factor P - u_tail) p / P. own: u of the target;
 * rest: the sum of u of the other ids, plus the gradient of lse. factor: own + rest + u_tail. */
LK_DEVICE void lk_ce_ids_put_tail(const lk_ce_ids_call &call, int64_t row, const lk_ce_upstream &up, float own, float rest)
{
    const lk_cross_entropy_args &a = call.all.a;
    const lk_ce_ids_space &space = call.space;
    const float weight = call.x.tail_weight ? call.x.tail_weight[row] : 0.0f, tail = call.tail[row];
    const float wanted = weight != 0.0f ? up.f * weight : 0.0f, u = call.x.dtail ? wanted - call.x.dtail[row] : wanted;
    const float shift = tail == -INFINITY ? 0.0f : tail; /* where P is 0, so is e, against lse too */
    const float p_tail = lk_exp(shift), lse = up.lse + shift, back = lse - up.lse;
    space.upstream[row] = own, space.dlse[row] = rest + u;
    space.others_upstream[row] = fmaf(own + (rest + u), p_tail, -u);
    space.others_lse[row] = lse;
    space.others_lse_low[row] = up.lse_low + ((up.lse - (lse - back)) + (shift - back)); /* what the sum was rounded by */
    if (!a.dentropy) return;
    space.others_entropy[row] = call.entropy[row] + shift; /* log p + entropy = (log p - tail) + (entropy + tail) */
    space.others_dentropy[row] = a.dentropy[row] * p_tail;
}

/* The upstream that the rows' kernel gets for a row with a bad id: 0 with bad_is_zero, or where no gradient is asked of the row;
 * else NaN. Called by the row's warp. */
LK_DEVICE float lk_ce_ids_bad_factor(const lk_ce_ids_call &call, int64_t row)
{
    if (call.bad_is_zero) return 0.0f;
    const lk_ce_upstream up = lk_ce_ids_load_upstream(call, row);
    bool asked = !lk_ce_masked(up.f, up.dlse, up.entropy_factor) || (call.x.dtail && call.x.dtail[row] != 0.0f);
    for (int k = (int)threadIdx.x % 32; call.x.dlogp && k < (int)call.x.ids_per_row; k += 32)
        asked |= call.x.dlogp[row * call.x.dlogp_stride + k] != 0.0f;
    return __any_sync(0xffffffffu, asked) ? NAN : 0.0f;
}

/* In place of lk_ce_ids_put_tail where the row has a bad id. factor: lk_ce_ids_bad_factor. */
LK_DEVICE void lk_ce_ids_put_no_tail(const lk_ce_ids_call &call, int64_t row, float factor)
{
    const lk_ce_ids_space &space = call.space;
    space.upstream[row] = space.dlse[row] = space.others_lse_low[row] = 0.0f, space.others_upstream[row] = factor;
    space.others_lse[row] = call.lse[row];
    if (call.all.a.dentropy) space.others_entropy[row] = space.others_dentropy[row] = 0.0f;
}

/* A warp owns a row. */
template <class T>
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS)
    lk_cross_entropy_ids_read_kernel(const __grid_constant__ lk_ce_ids_call call)
{
    const lk_cross_entropy_args &a = call.all.a;
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * LK_CE_IDS_WARPS + threadIdx.x / 32;
    lk_griddepcontrol_wait(); /* the rows do not start early: they want more shared memory than this kernel leaves */
    const bool there = row < a.rows;
    const lk_ce_ids s = lk_ce_ids_load(call, row, there);
    const bool good = s.any && !s.bad;
    int64_t top = INT64_MIN;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        if (s.id[i] < 0) continue;
        const float logit = lk_to_float(((const T *)a.logits + row * a.logits_stride)[s.id[i]]);
        call.space.logit[row * call.x.ids_per_row + lane + 32 * i] = logit;
        const int64_t its = lk_ce_top(logit, s.id[i]);
        top = its > top ? its : top;
    }
    top = lk_ce_top_warp(top);
    const int y = lk_ce_top_col(top);
    const int without = !s.bad ? LK_IGNORED : call.bad_is_zero ? 0 : LK_BAD;
    if (there && lane == 0) call.space.target[row] = good ? y : without;
    if (call.direction == LK_FORWARD) return;

    lk_ce_upstream up = {};
    float own, rest; /* u of the target; the sum of u of the other ids, plus the gradient of lse */
    if (good) up = lk_ce_ids_load_upstream(call, row);
    lk_ce_ids_sum_factors(call, row, s, good, y, up.f, &own, &rest);
    rest += up.dlse;
    if (s.bad) up.h = own = lk_ce_ids_bad_factor(call, row);
    if (!there || lane != 0) return;
    if (call.direction == LK_BACKWARD && a.z_loss > 0.0f) rest = fmaf(2.0f * a.z_loss * up.lse, up.h, rest);
    if (call.tail) {
        if (good) lk_ce_ids_put_tail(call, row, up, own, rest);
        else if (s.bad) lk_ce_ids_put_no_tail(call, row, own);
        return;
    }
    const bool keeps_z = lk_ce_ids_keeps_z(call);
    call.space.upstream[row] = keeps_z ? up.h : own;
    call.space.dlse[row] = keeps_z ? rest + __fsub_rn(own, up.h) : rest; /* of h as it is stored */
}

/* The sum of exp(-loss) over a row's ids, each once. The loss of an id is first_loss + scale (first_z - z). Also writes the ids to
 * id, LK_CE_IDS_MOST of shared memory. Called by the row's warp. */
LK_DEVICE float lk_ce_ids_sum_p(int *id, int64_t ids_per_row, const lk_ce_ids &s, const float (&z)[LK_CE_IDS_EACH], float first_z,
                                float first_loss, float scale)
{
    const int lane = (int)threadIdx.x % 32;
    float sum = 0.0f;
    bool first[LK_CE_IDS_EACH];
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) first[i] = s.id[i] >= 0, id[lane + 32 * i] = s.id[i];
    __syncwarp(); /* the ids are written before they are read */
    for (int k = 0; k < (int)ids_per_row; k++) {
        const int other = id[k];
        LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) first[i] = first[i] && (other != s.id[i] || k >= lane + 32 * i);
    }
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++)
        if (first[i]) sum += lk_exp(-(z[i] == first_z ? first_loss : first_loss + scale * (first_z - z[i])));
    return lk_sum_warp(sum);
}

/* What a block knows of its row's tail. */
typedef struct {
    int id[LK_CE_IDS_MOST]; /* of place k; -1: skipped or none */
    uint32_t mark[LK_CE_TAIL_MARKS / 32]; /* vector v of the row may have an id where bit v modulo their number is set */
    lk_lse part[32];                      /* of each warp */
    float first_z, first_loss;            /* the target's z and loss */
    bool reads;                           /* the row is to be read */
} lk_ce_tail;

/* Called by the block's first warp. If the row's ids leave at least 1/64 of p, it writes the tail: the log of 1 minus the sum of
 * their p. Else it sets `reads`: the row is read again. The tail of a row that is not good is NaN or 0, and the row is not read. */
template <class T> LK_DEVICE void lk_ce_tail_begin(const lk_ce_ids_call &call, int64_t row, lk_ce_tail *tail)
{
    const lk_cross_entropy_args &a = call.all.a;
    const int lane = (int)threadIdx.x % 32;
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    const lk_ce_ids s = lk_ce_ids_load(call, row, true);
    const float first_loss = s.bad ? NAN : call.space.row_losses.loss[row];
    float z[LK_CE_IDS_EACH], first_z = -INFINITY, slope;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        z[i] = -INFINITY;
        if (s.id[i] >= 0) z[i] = call.space.logit[row * call.x.ids_per_row + lane + 32 * i];
        if (s.id[i] >= 0 && a.softcap > 0.0f) z[i] = lk_ce_cap(z[i], a.logit_scale, a.softcap, &slope);
        first_z = fmaxf(first_z, z[i]);
    }
    first_z = lk_max_warp(first_z);
    const float sum = lk_ce_ids_sum_p(tail->id, call.x.ids_per_row, s, z, first_z, first_loss, scale);
    if (lane != 0) return;
    const bool good = s.any && !s.bad && first_loss == first_loss;
    tail->first_z = first_z, tail->first_loss = first_loss, tail->reads = good && sum > 1.0f - LK_CE_TAIL_LEAST;
    if (!tail->reads) call.tail[row] = good ? log1pf(-sum) : s.any || s.bad ? NAN : 0.0f;
}

/* Adds the logits x of columns col, col + 1, ... that are not ids. */
template <int n, bool exact>
LK_DEVICE lk_lse lk_ce_tail_add(lk_lse s, float (&x)[n], int64_t col, bool marked, const lk_ce_ids_call &call,
                                const lk_ce_tail *tail)
{
    const lk_cross_entropy_args &a = call.all.a;
    float slope[n];
    if (a.softcap > 0.0f) lk_ce_cap<exact>(x, slope, a.logit_scale, a.softcap);
    for (int k = 0; marked && k < (int)call.x.ids_per_row; k++) {
        const int64_t at = tail->id[k] - col;
        if (at < 0 || at >= n) continue;
        LK_UNROLL for (int j = 0; j < n; j++) x[j] = j == (int)at ? -INFINITY : x[j];
    }
    return lk_lse_add(s, x, a.softcap > 0.0f ? 1.0f : a.logit_scale);
}

/* The same of a thread's part of the row. */
template <class T> LK_DEVICE lk_lse lk_ce_tail_read(const lk_ce_ids_call &call, int64_t row, const lk_ce_tail *tail)
{
    constexpr int Num = LK_VEC<T>, Vecs = 4; /* Vecs: loads in flight */
    const T *const logits = (const T *)call.all.a.logits + row * call.all.a.logits_stride;
    const lk_split split = lk_split_row(logits, call.all.a.vocab);
    const int threads = (int)blockDim.x;
    lk_lse s = lk_lse_empty();
    for (int i = (int)threadIdx.x; i < split.edge; i += threads) {
        const int64_t col = lk_edge_col<T>(split, i);
        float x[1] = {lk_to_float(logits[col])};
        s = lk_ce_tail_add<1, true>(s, x, col, true, call, tail);
    }
    for (int v = (int)threadIdx.x; v < split.vecs; v += Vecs * threads) {
        lk_vec<T> raw[Vecs];
        LK_UNROLL for (int u = 0; u < Vecs; u++)
            if (v + u * threads < split.vecs) raw[u] = lk_load_vec(logits + split.head + (int64_t)(v + u * threads) * Num);
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            const int at = v + u * threads;
            if (at >= split.vecs) break;
            float x[Num];
            lk_unpack(x, raw[u]);
            const bool marked = tail->mark[at / 32 % (LK_CE_TAIL_MARKS / 32)] >> at % 32 & 1;
            s = lk_ce_tail_add<Num, sizeof(T) == 4>(s, x, split.head + (int64_t)at * Num, marked, call, tail);
        }
    }
    return s;
}

LK_DEVICE const lk_ce_ids_call &lk_ce_tail_ids(const lk_ce_ids_call &call) { return call; }
LK_DEVICE float *lk_ce_tail_result(const lk_ce_ids_call &call, int64_t row) { return call.tail + row; }

/* A block owns a row; if there are more rows than blocks, also every gridDim.x-th row after it. Call: lk_ce_ids_call, or
 * lk_ce_ids_slice of cross_entropy_ids_parallel.cuh, where its lk_ce_tail_ids, lk_ce_tail_result and lk_ce_tail_begin are. */
template <class T, class Call>
LK_KERNEL void __launch_bounds__(LK_CE_TAIL_THREADS, LK_CE_TAIL_BLOCKS)
    lk_cross_entropy_ids_tail_kernel(const __grid_constant__ Call call)
{
    LK_SHARED(lk_ce_tail, tail, [1]);
    const lk_ce_ids_call &ids = lk_ce_tail_ids(call);
    const lk_cross_entropy_args &a = ids.all.a;
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x;
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    lk_griddepcontrol_wait();
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        __syncthreads(); /* the row before is done with what this one writes */
        for (int i = thread; i < LK_CE_TAIL_MARKS / 32; i += threads) tail->mark[i] = 0;
        if (thread < 32) lk_ce_tail_begin<T>(call, row, tail);
        __syncthreads(); /* the ids are there, and the marks are empty */
        if (!tail->reads) continue;
        const int64_t head = lk_split_row((const T *)a.logits + row * a.logits_stride, a.vocab).head;
        for (int k = thread; k < (int)ids.x.ids_per_row; k += threads) {
            const int64_t v = (tail->id[k] - head) / LK_VEC<T>; /* single elements look at all ids, marked or not */
            if (tail->id[k] >= head) atomicOr(&tail->mark[v / 32 % (LK_CE_TAIL_MARKS / 32)], 1u << v % 32);
        }
        __syncthreads(); /* the marks are set */
        lk_lse s = lk_lse_warp(lk_ce_tail_read<T>(ids, row, tail), 32, scale);
        if (thread % 32 == 0) tail->part[thread / 32] = s;
        __syncthreads(); /* the parts are there */
        if (thread >= 32) continue;
        s = lk_lse_warp(thread < threads / 32 ? tail->part[thread] : lk_lse_empty(), 32, scale);
        float k;
        const float log = lk_log_split(s.sum, &k); /* all differences: nothing of lse's size is added */
        const float above = scale * (s.max - tail->first_z) - tail->first_loss;
        if (thread == 0) *lk_ce_tail_result(call, row) = s.sum > 0.0f ? lk_lse_join(above, k, log) : -INFINITY;
    }
}

/* An id of a row, and its u. */
typedef struct {
    int id;
    float u;
} lk_ce_ids_term;

/* Adds up u over all places of each id of a row. terms: of all places; sum: of a lane's ids. writes stays true in an id's first
 * place alone, which writes its column. Called by the row's warp. */
LK_DEVICE void lk_ce_ids_add_places(const lk_ce_ids_term *terms, int64_t ids_per_row, const lk_ce_ids &s,
                                    float (&sum)[LK_CE_IDS_EACH], bool (&writes)[LK_CE_IDS_EACH])
{
    __syncwarp(); /* the terms are written before they are read */
    for (int k = 0; k < (int)ids_per_row; k++) {
        const lk_ce_ids_term term = terms[k];
        LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
            if (term.id != s.id[i]) continue;
            sum[i] += term.u, writes[i] = writes[i] && k >= (int)threadIdx.x % 32 + 32 * i;
        }
    }
}

/* Writes the gradients of a row's ids. z, slope, minus_logp: of a lane's ids; backward has no minus_logp. given_others: with a tail
 * all.slice.others has the sum of p of all columns but the target's. Called by the row's warp. */
template <class T, bool eight, bool given_others = false>
LK_DEVICE void lk_ce_ids_write_gradients(const lk_ce_ids_call &call, lk_ce_ids_term *terms, int64_t row, const lk_ce_ids &s,
                                         const float (&z)[LK_CE_IDS_EACH], const float (&slope)[LK_CE_IDS_EACH],
                                         const float (&minus_logp)[LK_CE_IDS_EACH], float first_z, float first_loss)
{
    const lk_cross_entropy_args &a = call.all.a;
    const int lane = (int)threadIdx.x % 32, y = call.space.target[row];
    const bool backward = call.direction == LK_BACKWARD, keeps_z = lk_ce_ids_keeps_z(call);
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale, given = call.space.upstream[row];
    const lk_ce_upstream up = lk_ce_ids_load_upstream(call, row);
    const float entropy = a.dentropy ? call.entropy[row] : 0.0f;
    float p_factor = given + call.space.dlse[row], p_scale = 1.0f, sum[LK_CE_IDS_EACH] = {};
    bool writes[LK_CE_IDS_EACH];
    if (keeps_z) p_factor = fmaf(2.0f * a.z_loss * call.lse[row], given, p_factor);
    lk_ce_gradient g = {};
    if (backward) p_scale = lk_ce_base_of_lse(&g, up, scale, a.dentropy != NULL, entropy);
    else g.entropy_factor = up.entropy_factor, g.center = first_z, g.shift = entropy - first_loss;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        writes[i] = s.id[i] >= 0;
        terms[lane + 32 * i] = {s.id[i], writes[i] ? lk_ce_ids_factor(call, row, s, i, up.f) : 0.0f};
    }
    lk_ce_ids_add_places(terms, call.x.ids_per_row, s, sum, writes);
    float others = 0.0f; /* with a tail: the sum of p of all columns but the target's, which is 1 - p without the rounding */
    if constexpr (given_others) {
        others = call.all.slice.others[row];
    } else if (call.tail) {
        LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++)
            if (writes[i] && s.id[i] != y) others += lk_ex2(fmaf(g.rate, z[i], -g.base));
        others = fmaf(p_scale, lk_sum_warp(others), lk_exp(call.tail[row]));
    }
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        const bool own = s.id[i] == y;
        if (!writes[i] || (own && !call.tail && (!keeps_z || sum[i] == given))) continue; /* the target's is right already */
        const float e = backward ? lk_ex2(fmaf(g.rate, z[i], -g.base)) : lk_exp(-minus_logp[i]);
        float x[1] = {a.logit_scale * fmaf(p_factor, p_scale * e, -sum[i])};
        if (own && call.tail) x[0] = a.logit_scale * fmaf(call.space.dlse[row], p_scale * e, -sum[i] * others);
        if (a.dentropy) x[0] += lk_ce_entropy_term(g, e, z[i], scale);
        x[0] *= slope[i];
        lk_ce_store<T, eight>(a, lk_ce_at<T, eight>(a, row, s.id[i]), x, false);
    }
}

/* The class term of a good row with that of its tail. loss: of its ids. */
LK_DEVICE float lk_ce_ids_add_tail(const lk_ce_ids_call &call, int64_t row, float loss)
{
    const float weight = call.x.tail_weight[row];
    return weight != 0.0f ? fmaf(-weight, call.tail[row], loss) : loss;
}

/* A warp owns a row. eight: dlogits are e5m2. */
template <class T, bool eight = false>
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS)
    lk_cross_entropy_ids_write_kernel(const __grid_constant__ lk_ce_ids_call call)
{
    LK_SHARED(lk_ce_ids_term, terms, [LK_CE_IDS_WARPS * LK_CE_IDS_MOST]);
    const lk_cross_entropy_args &a = call.all.a;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int64_t row = (int64_t)blockIdx.x * LK_CE_IDS_WARPS + warp;
    const bool backward = call.direction == LK_BACKWARD;
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    lk_griddepcontrol_launch_dependents();
    lk_griddepcontrol_wait();
    if (row >= a.rows) return;
    const lk_ce_ids s = lk_ce_ids_load(call, row, true);
    const bool good = s.any && !s.bad;
    float z[LK_CE_IDS_EACH], slope[LK_CE_IDS_EACH], minus_logp[LK_CE_IDS_EACH] = {}, first_z = -INFINITY, part = 0.0f;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        z[i] = -INFINITY, slope[i] = 1.0f;
        if (s.id[i] >= 0) z[i] = call.space.logit[row * call.x.ids_per_row + lane + 32 * i];
        if (a.softcap > 0.0f) z[i] = lk_ce_cap(z[i], a.logit_scale, a.softcap, &slope[i]);
        if (s.id[i] >= 0) first_z = fmaxf(first_z, z[i]);
    }
    first_z = lk_max_warp(first_z); /* the target's */
    const float first_loss = backward ? 0.0f : s.bad ? NAN : call.space.row_losses.loss[row];
    if (!backward) part = lk_ce_ids_put_logp(call, row, s, z, first_z, first_loss, scale, minus_logp);
    const bool proper = backward ? good && lk_is_finite(call.lse[row]) : first_loss == first_loss;
    if (a.dlogits && good && proper) /* other rows are 0 or NaN throughout */
        lk_ce_ids_write_gradients<T, eight>(call, terms + warp * LK_CE_IDS_MOST, row, s, z, slope, minus_logp, first_z, first_loss);
    if (backward) return;
    __syncwarp(); /* all lanes have read the target's loss, which is overwritten */
    if (lane != 0) return;
    lk_ce_result r = {part, 0.0f, 0.0f, 0.0f, -1, 0.0f};
    if (call.x.tail_weight && good) r.class_loss = lk_ce_ids_add_tail(call, row, part);
    if (!proper) r.class_loss = NAN;
    if (a.z_loss > 0.0f) r.z_loss = call.space.row_losses.z[row];
    lk_ce_put_result<false>(call.all, row, {-1, s.any || s.bad, s.bad}, 1.0f, r);
}

/* ---- Checks and workspace ------------------------------------------------------------------------------------------------ */

/* Whether a call has a tail. Args, here and below: also lk_linear_cross_entropy_ids_args, whose ids are the same fields. */
template <class Args> LK_HOST bool lk_ce_ids_has_tail(const Args *x, lk_direction direction)
{
    return x->tail_weight || (direction != LK_BACKWARD && x->tail) || (direction != LK_FORWARD && x->dtail);
}

/* What backward with a tail needs. */
LK_HOST void lk_ce_ids_take_others(lk_ce_ids_space *s, lk_arena *arena, bool dentropy, int64_t rows)
{
    lk_take(&s->others_upstream, arena, true, rows);
    lk_take(&s->others_lse, arena, true, rows);
    lk_take(&s->others_lse_low, arena, true, rows);
    lk_take(&s->others_entropy, arena, dentropy, rows);
    lk_take(&s->others_dentropy, arena, dentropy, rows);
}

LK_HOST lk_ce_ids_space lk_ce_ids_space_of(const lk_cross_entropy_ids_args *x, lk_direction direction)
{
    const lk_cross_entropy_args &a = x->common;
    const bool back = direction == LK_BACKWARD, gradient = direction != LK_FORWARD;
    const bool tail = lk_ce_ids_has_tail(x, direction);
    const int64_t rows = lk_ce_space_rows(a.rows);
    lk_arena arena = {(uintptr_t)a.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    lk_ce_ids_space s = {};
    lk_take(&s.counts, &arena, true, 1);
    lk_take(&s.row_losses.loss, &arena, !back, rows);
    lk_take(&s.row_losses.z, &arena, !back && a.z_loss > 0.0f, rows);
    lk_take(&s.row_losses.weight, &arena, !back && lk_cross_entropy_reduced(&a) && a.weight_sum, rows);
    lk_take(&s.target, &arena, true, rows);
    lk_take(&s.logit, &arena, true, rows * x->ids_per_row);
    lk_take(&s.upstream, &arena, gradient, rows);
    lk_take(&s.dlse, &arena, gradient, rows);
    lk_take(&s.lse, &arena, gradient && !back, rows);
    lk_take(&s.entropy, &arena, gradient && !back, rows);
    lk_take(&s.tail, &arena, !gradient && tail && !x->tail, rows);
    if (back && tail) lk_ce_ids_take_others(&s, &arena, a.dentropy != NULL, rows);
    s.bytes = arena.used;
    return s;
}

/* forward_backward with a tail: what forward leaves to backward, and the workspace of both. */
typedef struct {
    float *lse, *lse_low, *entropy, *tail;
    int64_t *valid_rows;
    void *calls;
    size_t call_bytes, bytes;
} lk_ce_ids_saved;

LK_HOST lk_ce_ids_saved lk_ce_ids_saved_of(const lk_cross_entropy_ids_args *x)
{
    const lk_cross_entropy_args &a = x->common;
    const int64_t rows = lk_ce_space_rows(a.rows);
    const size_t forward = lk_ce_ids_space_of(x, LK_FORWARD).bytes, backward = lk_ce_ids_space_of(x, LK_BACKWARD).bytes;
    lk_arena arena = {(uintptr_t)a.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    lk_ce_ids_saved s = {};
    s.call_bytes = forward > backward ? forward : backward;
    s.calls = lk_take_bytes(&arena, true, (int64_t)s.call_bytes);
    lk_take(&s.valid_rows, &arena, !a.valid_rows, 1);
    lk_take(&s.lse, &arena, !a.lse, rows);
    lk_take(&s.lse_low, &arena, !a.lse_low, rows);
    lk_take(&s.entropy, &arena, !a.entropy && a.dentropy, rows);
    lk_take(&s.tail, &arena, !x->tail, rows);
    s.bytes = arena.used;
    return s;
}

LK_HOST size_t lk_ce_ids_bytes(const lk_cross_entropy_ids_args *x, lk_direction direction)
{
    const bool halves = direction == LK_BOTH && lk_ce_ids_has_tail(x, direction);
    return halves ? lk_ce_ids_saved_of(x).bytes : lk_ce_ids_space_of(x, direction).bytes;
}

/* The fields of rows with a target. */
LK_HOST void lk_cross_entropy_ids_refuse(lk_checks *checks, const lk_cross_entropy_args *a)
{
    const char *const why = "it is not for rows with target_ids";
    lk_check_absent(checks, "target", a->target, why);
    lk_check_absent(checks, "target_prob", a->target_prob, why);
    lk_check_absent(checks, "class_weight", a->class_weight, why);
    lk_check_absent(checks, "label_smoothing", a->label_smoothing != 0.0f, why);
    lk_check_absent(checks, "statistics", a->statistics, why);
    lk_check_absent(checks, "batch_invariant", a->batch_invariant, why);
}

/* Takes out of the ids what belongs to other calls. */
template <class Args> LK_HOST void lk_ce_ids_fill_in(Args *x, lk_direction direction)
{
    const int64_t k = x->ids_per_row;
    if (k < 1 || k > LK_CE_IDS_MOST) x->ids_per_row = 1; /* it is refused in its place */
    if (direction == LK_FORWARD || direction == LK_FINISH) x->dlogp = x->dtail = NULL;
    if (direction == LK_BACKWARD) x->logp = NULL;
    if (!lk_ce_ids_has_tail(x, direction)) x->tail = NULL;
}

/* The tensors of ids, after lk_ce_ids_fill_in. rows: of each of them. parallel: of a rank, or NULL. */
template <class Args>
LK_HOST void lk_ce_ids_put_tensors(lk_tensor (&list)[7], Args *x, int64_t rows, lk_direction direction,
                                   const lk_vocab_parallel *parallel)
{
    const bool forward = direction == LK_FORWARD || direction == LK_FINISH, back = direction == LK_BACKWARD;
    const bool leaves_states = parallel && direction == LK_FORWARD && !parallel->all_gather;
    const int64_t k = x->ids_per_row;
    const int tail = lk_ce_ids_has_tail(x, direction) ? LK_IN | LK_REQUIRED : LK_UNUSED;
    list[0] = {"target_ids", x->target_ids, x->common.target_dtype == LK_TARGET_INT32 ? 4 : 8, LK_REQUIRED, k,
               {{rows, &x->target_ids_stride, "target_ids_stride"}}};
    list[1] = {"target_weight", x->target_weight, 4, LK_IN, k, {{rows, &x->target_weight_stride, "target_weight_stride"}}};
    list[2] = {"dlogp", x->dlogp, 4, forward ? LK_UNUSED : LK_IN, k, {{rows, &x->dlogp_stride, "dlogp_stride"}}};
    list[3] = {"logp", x->logp, 4, back ? LK_UNUSED : LK_OUT, k, {{rows, &x->logp_stride, "logp_stride"}}};
    list[4] = {"tail_weight", x->tail_weight, 4, LK_IN, rows};
    list[5] = {"dtail", x->dtail, 4, forward ? LK_UNUSED : LK_IN, rows};
    list[6] = {"tail", x->tail, 4, leaves_states ? LK_UNUSED : back ? tail : LK_OUT, rows};
}

/* Validates a call; x becomes its arguments with every default filled in. device: as in lk_check_begin. ranks: what
 * cross_entropy_ids_parallel.cuh adds behind the tensors of ids, or NULL. */
template <class T>
LK_HOST lk_status lk_cross_entropy_ids_check(const char *op, const lk_cross_entropy_ids_args *args, lk_direction direction,
                                             lk_device *device, lk_cross_entropy_ids_args *x, const lk_ce_more *ranks = NULL)
{
    *x = *args;
    const lk_cross_entropy_args &a = args->common;
    lk_checks checks = {op, LK_OK};
    lk_cross_entropy_ids_refuse(&checks, &a);
    if (checks.status) return checks.status; /* before all rules */
    lk_ce_ids_fill_in(x, direction);
    lk_ce_more more = {};
    if (ranks) more = *ranks;
    else more.bytes = lk_ce_ids_bytes(x, direction);
    more.ids_per_row = args->ids_per_row, more.most_ids = LK_CE_IDS_MOST, more.other_gradients = x->dlogp || x->dtail;
    lk_ce_ids_put_tensors(more.list, x, a.rows, direction, more.parallel);
    return lk_cross_entropy_check<T>(op, &a, LK_CE_IDS, direction, device, &x->common, &more);
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* The arguments that the rows' kernels get: the caller's, but with a target per row, and with upstream and dlse that follow from
 * all ids. The terms of the losses go to the workspace, without row_weight. */
LK_HOST lk_cross_entropy_call lk_ce_ids_rows(const lk_ce_ids_call &call)
{
    lk_cross_entropy_call rows = call.all;
    lk_cross_entropy_args &a = rows.a;
    const bool reduced = lk_cross_entropy_reduced(&a), both = call.direction == LK_BOTH;
    rows.row_losses = call.space.row_losses, rows.loss_weight = NULL;
    a.target = call.space.target, a.target_dtype = LK_TARGET_INT32;
    a.use_ignore_index = 1, a.ignore_index = LK_IGNORED;
    a.row_weight = a.denominator = NULL, a.reduction = LK_REDUCTION_NONE;
    a.loss = call.space.row_losses.loss, a.z_loss_out = NULL;
    if (reduced) a.valid_rows = NULL, a.weight_sum = NULL; /* the sum kernel writes them */
    if (call.direction == LK_BACKWARD) a.z_loss = 0.0f;
    if (call.direction != LK_FORWARD) a.upstream = call.space.upstream, a.upstream_per_row = 1, a.dlse = call.space.dlse;
    a.upstream_value = 1.0f; /* it is in space.upstream */
    if (both && a.z_loss > 0.0f && !a.lse) a.lse = call.space.lse;
    if (both && a.dentropy && !a.entropy) a.entropy = call.space.entropy;
    if (call.tail && call.direction == LK_BACKWARD) { /* lk_ce_ids_put_tail's */
        a.upstream = call.space.others_upstream, a.lse = call.space.others_lse, a.lse_low = call.space.others_lse_low;
        a.dlse = NULL;
        if (a.dentropy) a.entropy = call.space.others_entropy, a.dentropy = call.space.others_dentropy;
    }
    return rows;
}

/* Four vectors for a thread, where there are so many. */
template <class T> LK_HOST int lk_ce_tail_threads(int64_t vocab)
{
    int threads = 32;
    while (threads < LK_CE_TAIL_THREADS && vocab > 4 * LK_VEC<T> * threads) threads *= 2;
    return threads;
}

/* Launches the kernel of tails for the rows of a call. Call: the type of its argument; a: the rows and vocab. */
template <class T, class Call>
LK_HOST lk_status lk_ce_tail_launch(const char *op, const lk_device *device, const lk_cross_entropy_args &a, const Call &call,
                                    cudaStream_t stream)
{
    return lk_launch_pdl(op, device, lk_cross_entropy_ids_tail_kernel<T, Call>, a.rows < 1 << 30 ? a.rows : 1 << 30, 1,
                         lk_ce_tail_threads<T>(a.vocab), 0, stream, call);
}

/* One call in one direction; forward_backward without a tail. */
template <class T, lk_direction direction>
LK_HOST lk_status lk_cross_entropy_run_ids(const char *op, const lk_cross_entropy_ids_args *args, cudaStream_t stream)
{
    lk_ce_ids_call call = {};
    lk_device device = {};
    lk_status status = lk_cross_entropy_ids_check<T>(op, args, direction, &device, &call.x);
    if (status) return status;
    call.all = lk_cross_entropy_call_of<T>(call.x.common);
    call.space = lk_ce_ids_space_of(&call.x, direction), call.direction = direction;
    lk_cross_entropy_args &a = call.all.a;
    if (lk_ce_ids_has_tail(&call.x, direction)) call.tail = call.x.tail ? call.x.tail : call.space.tail;
    lk_cross_entropy_call rows = lk_ce_ids_rows(call);
    constexpr bool back = direction == LK_BACKWARD;
    const bool reduced = !back && lk_cross_entropy_reduced(&a), some = a.rows > 0;
    /* Only ids that may be skipped leave a row out of the count, which the gradients of a mean need first. */
    const bool counts = direction == LK_BOTH && a.reduction == LK_REDUCTION_MEAN && !a.denominator && some &&
                        (a.use_ignore_index || call.x.target_weight);
    call.all.over = a.denominator;
    if (back) call.all.valid_rows = a.valid_rows;
    call.lse = back ? a.lse : rows.a.lse, call.lse_low = a.lse_low, call.entropy = back ? a.entropy : rows.a.entropy;
    a.lse = a.lse_low = NULL, a.entropy = NULL, a.argmax = NULL;
    if (reduced) call.all.row_losses = call.space.row_losses;
    const int64_t blocks = lk_ceil_div(a.rows, LK_CE_IDS_WARPS);
    const int threads = 32 * LK_CE_IDS_WARPS;
    void (*const read)(lk_ce_ids_call) = lk_cross_entropy_ids_read_kernel<T>;
    if (some) status = lk_launch_pdl(op, &device, read, blocks, 1, threads, 0, stream, call);
    if (!status && counts) {
        rows.counts = call.space.counts, call.all.valid_rows = &call.space.counts->valid_rows;
        status = lk_cross_entropy_count(op, &device, rows, stream);
        if (!status) status = lk_launch_pdl(op, &device, read, blocks, 1, threads, 0, stream, call); /* with the count */
    }
    if constexpr (back) {
        if (!status && some) status = lk_cross_entropy_rows<T, LK_BACKWARD>(op, &device, rows, stream);
    } else {
        if (!status) status = lk_cross_entropy_run_rows<T, direction == LK_BOTH>(op, &device, rows, stream);
        if (!status && some && call.tail) status = lk_ce_tail_launch<T>(op, &device, a, call, stream);
    }
    if (!status && some)
        status = lk_launch_pdl(op, &device,
                               a.dlogits_dtype == LK_DTYPE_E5M2 ? lk_cross_entropy_ids_write_kernel<T, true>
                                                                : lk_cross_entropy_ids_write_kernel<T, false>,
                               blocks, 1, threads, 0, stream, call);
    return !status && reduced ? lk_cross_entropy_sum(op, &device, call.all, stream) : status;
}

/* forward_backward with a tail: forward, then backward, since the gradients need the tail. */
template <class T>
LK_HOST lk_status lk_cross_entropy_run_ids_halves(const char *op, const lk_cross_entropy_ids_args *args, cudaStream_t stream)
{
    lk_cross_entropy_ids_args x = {};
    lk_device device = {};
    lk_status status = lk_cross_entropy_ids_check<T>(op, args, LK_BOTH, &device, &x);
    if (status) return status;
    const lk_ce_ids_saved saved = lk_ce_ids_saved_of(&x);
    x = *args;
    lk_cross_entropy_args &a = x.common;
    a.workspace = saved.calls, a.workspace_bytes = saved.call_bytes;
    if (!a.valid_rows) a.valid_rows = saved.valid_rows;
    if (!a.lse) a.lse = saved.lse;
    if (!a.lse_low) a.lse_low = saved.lse_low;
    if (!a.entropy) a.entropy = saved.entropy;
    if (!x.tail) x.tail = saved.tail;
    status = lk_cross_entropy_run_ids<T, LK_FORWARD>(op, &x, stream);
    a.bad_targets = NULL; /* forward has counted them */
    return status ? status : lk_cross_entropy_run_ids<T, LK_BACKWARD>(op, &x, stream);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_cross_entropy_ids_run(const char *op, const lk_cross_entropy_ids_args *args, cudaStream_t stream)
{
    if constexpr (direction == LK_BOTH)
        if (lk_ce_ids_has_tail(args, direction)) return lk_cross_entropy_run_ids_halves<T>(op, args, stream);
    return lk_cross_entropy_run_ids<T, direction>(op, args, stream);
}
template <class T>
LK_HOST lk_status lk_cross_entropy_ids_query(const char *op, const lk_cross_entropy_ids_args *args, lk_direction direction,
                                             size_t *bytes)
{
    lk_cross_entropy_ids_args x = {};
    const lk_status status = lk_cross_entropy_ids_check<T>(op, args, direction, NULL, &x);
    if (!status && bytes) *bytes = lk_ce_ids_bytes(&x, direction);
    return status;
}

#endif /* CUDA or the simulator */
#endif
