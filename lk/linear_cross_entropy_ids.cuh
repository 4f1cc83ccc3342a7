// SPDX-License-Identifier: MIT
/* linear_cross_entropy_ids.cuh - linear_cross_entropy.cuh with K weighted ids per token instead of one target, and the
 * log-probability of each: distillation from a teacher's top K, shifted targets of several tokens, choices among a few answers.
 *
 *   logits, dx, dweight, dbias    as at the top of linear_cross_entropy.cuh
 *   loss, logp, tail, dZ          those of cross_entropy_ids.cuh for these logits: dZ is its dlogits
 *
 * Use        In one .cu file, linked with -lcublasLt:       Anywhere, C included:
 *                #include "lk/linear_cross_entropy_ids.cuh"     #include "lk/linear_cross_entropy_ids.cuh"
 *                LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS(bf16)       LK_DECLARE_LINEAR_CROSS_ENTROPY_IDS(bf16)
 *            The struct has that of linear_cross_entropy.cuh in its field `common`, whose target stays NULL; a context as there:
 *                lk_linear_cross_entropy_context context;
 *                lk_status status = lk_linear_cross_entropy_init(&context);
 *                lk_linear_cross_entropy_ids_args args = {};
 *                args.common.context = &context, args.common.x = x, args.common.weight = weight, args.common.loss = loss;
 *                args.common.dx = dx, args.common.dweight = dweight;
 *                args.common.tokens = tokens, args.common.hidden = hidden, args.common.vocab = vocab;
 *                args.target_ids = ids, args.target_weight = weights, args.ids_per_row = ids_per_row, args.logp = logp;
 *                size_t *const bytes = &args.common.workspace_bytes;
 *                status = lk_linear_cross_entropy_ids_forward_backward_workspace_bytes_bf16(&args, bytes);
 *                args.common.workspace = ...;
 *                status = lk_linear_cross_entropy_ids_forward_backward_bf16(&args, stream);
 *            forward computes loss, logp and lse, backward the gradients from a saved lse and from dlogp, and computes the logits
 *            again. ..._plan answers as in linear_cross_entropy.cuh.
 * Needs      linear_cross_entropy.cuh, cross_entropy_ids.cuh, lk_counted.cuh and what these need.
 * Options    Those of linear_cross_entropy.cuh, without class_weight, label_smoothing, saved, batch_invariant and
 *            statistics. Columns that are split over ranks: linear_cross_entropy_ids_parallel.cuh.
 *            max_counted is an upper bound of the tokens that have an id which is not skipped. Such a token counts even if its
 *            row_weight or all its weights are 0. If more tokens count, then loss, z-loss, lse, entropy, logp, tail and all
 *            gradients are NaN, and argmax is -1. valid_rows is then still the number of all that count; weight_sum and
 *            bad_targets are those of the first max_counted of them.
 *            Ids, their weights, skipped, bad and good ids, dlogp and the tail are as in cross_entropy_ids.cuh. Of a token with a
 *            bad id, loss, all logp, tail and dx are NaN. It adds nothing to dweight and dbias. But as there, its loss is 0
 *            where row_weight is 0, and its dx is 0 where f, dlse, dentropy, dtail and the token's dlogp are all 0; in a mean over
 *            nothing f is 0.
 *            path is CHUNKS, FUSED or 0. FUSED is for calls without a tail. 0 takes it if linear_cross_entropy.cuh would take it
 *            for one target, and ids_per_row is 1 or at most vocab / 768. With more ids the dot products for their logits take
 *            more time than FUSED saves. Else 0 takes CHUNKS: the logits of some tokens at a time are stored, in f32, or with
 *            fast_logits in T.
 * Workspace  With max_counted a query also looks at which of lse, logp and tail are wanted, and which of row_weight, tail_weight,
 *            dlogp, dtail, and with upstream_per_token upstream, are given.
 * Errors     As in linear_cross_entropy.cuh. First of all LK_ERR_VALUE: target, class_weight, label_smoothing, saved,
 *            batch_invariant or statistics is given. LK_ERR_SHAPE: ids_per_row is not 1 to 128, before the other sizes.
 *            LK_ERR_PATH: path is PANELS, or FUSED with a tail. The tensors of this header come behind those of
 *            linear_cross_entropy.cuh.
 * Read on    lk/linear_cross_entropy.md and lk/cross_entropy.md: plans, how exact results are, and what is read and written.
 *
 * A call is linear_cross_entropy's CHUNKS or FUSED with other kernels between the matmuls. First lk_lce_ids_begin_kernel writes a
 * target for each token: a column, ignored or bad. So the target, below, is an id that lk chooses; the caller's `target` is NULL.
 *
 * CHUNKS: this target is any good id, since there are no logits yet. dZ is stored divided by alpha, so for each slice of logits
 * lk_lce_ids_scale_kernel divides dlogp, dtail and dlse by alpha too. Then come the kernels of cross_entropy_ids.cuh. They choose
 * the id with the largest logit as the target. In f16 a dZ may be as large as the sum of |weights| of a token, so a power of two
 * above the largest such sum goes into alpha too: lk_lce_ids_upstream_kernel. With a tail forward_backward reads the
 * logits of a slice twice: first for the losses and the tail, then for dZ. It computes them once.
 *
 * With max_counted lk_lce_ids_counts_kernel comes before all others: which tokens have an id that is not skipped. Then lk_counted.cuh
 * copies what the call reads of these tokens. The call runs as if there were no others.
 *
 * FUSED, where there are several ids: before lk_lce_ids_begin_kernel, lk_lce_ids_dots_kernel computes their logits, each as x of
 * the token times a row of weight. The id with the largest logit is the target. So no other id has more than half of p. Where the
 * target has more, its 1 - p is computed as the sum of p of all other columns. What FUSED does for one target follows, with other
 * kernels for rows:
 *   lk_lce_ids_rows_kernel      loss, logp and lse; v, the factor of the row's exponentials; dZ of the ids. In columns whose
 *                               exponentials are kept, dZ / v replaces the exponential of an id
 *   lk_lce_ids_backward_kernel  backward: dZ of the ids by the saved lse
 *   lk_lce_ids_panel_kernel     writes dZ of the ids into a panel, when lk_head_fused_kernel has computed its other columns
 * So dZ of the other ids is rounded to T once, as in CHUNKS. dZ of the target stays in float, as with one target.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LINEAR_CROSS_ENTROPY_IDS_CUH
#define LK_LINEAR_CROSS_ENTROPY_IDS_CUH

#include "cross_entropy_ids.cuh"
#include "linear_cross_entropy.cuh"

/* F, B and FB as in lk_linear_cross_entropy_args. A row of each tensor is ids_per_row numbers; strides are in elements, 0 means
 * packed. */
typedef struct {
    lk_linear_cross_entropy_args common;
    const void *target_ids;     /* F B FB in   common.target_dtype [tokens, ids_per_row] */
    const float *target_weight; /* F B FB in   f32 [tokens, ids_per_row], finite; NULL: 1 */
    const float *dlogp;         /* B FB in     f32 [tokens, ids_per_row], the gradient of logp; NULL: none */
    float *logp;                /* F FB out    f32 [tokens, ids_per_row] */
    int64_t ids_per_row;        /* 1 to 128 */
    int64_t target_ids_stride, target_weight_stride, dlogp_stride, logp_stride;
    const float *tail_weight;   /* F B FB in   f32 [tokens], finite; NULL: the tail is not in the loss */
    const float *dtail;         /* B FB in     f32 [tokens], the gradient of tail; NULL: none */
    float *tail;                /* F FB out, B in: forward's. f32 [tokens]; B requires it with tail_weight or dtail */
} lk_linear_cross_entropy_ids_args;

#define LK_LINEAR_CROSS_ENTROPY_IDS_FUNCTIONS(X, T)                                                                            \
    X##_PLANNED(linear_cross_entropy_ids, forward, LK_FORWARD, linear_cross_entropy, T)                                        \
    X##_PLANNED(linear_cross_entropy_ids, backward, LK_BACKWARD, linear_cross_entropy, T)                                      \
    X##_PLANNED(linear_cross_entropy_ids, forward_backward, LK_BOTH, linear_cross_entropy, T)
#define LK_DECLARE_LINEAR_CROSS_ENTROPY_IDS(T) LK_DECLARE(LINEAR_CROSS_ENTROPY_IDS, T)
#define LK_DEFINE_LINEAR_CROSS_ENTROPY_IDS(T) LK_DEFINE(LINEAR_CROSS_ENTROPY_IDS, T)

#if LK_CUDA

#include "lk_counted.cuh"

/* ---- The kernels --------------------------------------------------------------------------------------------------------- */

typedef lk_linear_cross_entropy_ids_args lk_lce_ids_args;

/* lk takes FUSED for one id, or where there are so many columns for each. FUSED saves some 6 % of a call, and a dot reads 2 hidden
 * bytes at about 3 TB/s (bench/results/choices/linear_cross_entropy.md). */
#define LK_LCE_IDS_COLUMNS 768

/* FUSED's arrays. logit and column: [tokens, ids_per_row], one number for each place; NULL where a token has one id. */
typedef struct {
    float *logit;     /* the logit of a good id. A call with gradients later puts its dZ here, from the sum of u of its places */
    int32_t *column;  /* gradients: the id whose dZ this place writes; -1: none */
    float *own, *rest; /* gradients: [tokens]. own: the sum of u of the target; rest: of the other ids, plus the gradient of lse */
} lk_lce_ids_arrays;

/* A call and its part of the workspace, which comes before linear_cross_entropy's. */
typedef struct {
    lk_lce_ids_args x; /* with every default filled in; common: as the caller has it */
    int32_t *target;   /* [tokens]: a good id, in FUSED the one with the largest logit, in CHUNKS any; or LK_IGNORED, LK_BAD */
    float *bound;      /* [tokens], with dlogp or dtail: an upper bound of what a token's dlse, dlogp and dtail add to a dz.
                        * linear_cross_entropy gets it as dlse and chooses alpha by it. The rows get the caller's dlse */
    float *dlogp;      /* [tokens, ids_per_row]: the caller's, divided by alpha */
    float *dtail;      /* [tokens]: the caller's, divided by alpha */
    float *tail;       /* [tokens], the caller's where it has one; NULL: the call has no tail */
    float *zero;       /* [1], a 0: the upstream where the caller gives dlogp or dtail and no upstream */
    float *most;       /* [1], f16's gradients: the largest sum of |weights| of a token, its tail's too */
    float *upstream;   /* [1] or [tokens], f16's gradients: upstream times 2^q of lk_lce_ids_power */
    void *rows;        /* lk_ce_ids_space of a slice */
    lk_lce_ids_arrays fused; /* in place of dlogp and rows, which FUSED does not need */
    lk_cross_entropy_args ids; /* whose ids: what lk_ce_ids_load reads */
    size_t bytes;
} lk_lce_ids;

/* What these kernels get. */
typedef struct {
    lk_ce_ids_call call; /* x: the ids of the rows from first_row on */
    lk_lce_ids all;
    const float *dlse;   /* the caller's, of all tokens */
    float *scaled_dlse;  /* of these rows */
    float *factor;       /* of these rows */
    const lk_head_counts *counts;
    const float *logit;  /* of all ids; NULL: any of a token's ids may be its target */
    int64_t first_row;
} lk_lce_ids_work;

/* q, at least 0. lk_lce_ids_upstream_kernel multiplies upstream by 2^q. Later lk_lce_ids_scale_kernel divides the factors of the
 * rows by 2^q. alpha, which is computed between the two, keeps it. */
LK_DEVICE int lk_lce_ids_power(const lk_lce_ids &ids)
{
    const int q = ids.most ? lk_cublas_exponent(*ids.most) : 0;
    return q > 0 ? q : 0;
}

/* With max_counted: the ids of all tokens. */
typedef struct {
    lk_ce_ids_call call;
    unsigned *flag; /* [tokens]: not 0: the token has an id that is not skipped */
} lk_lce_ids_tokens;
typedef struct {
    lk_counted copies; /* of 0 rows: there is no max_counted, or it is not below tokens */
    lk_lce_ids_tokens tokens;
} lk_lce_ids_counted;

/* A warp owns a token. */
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS) lk_lce_ids_counts_kernel(const __grid_constant__ lk_lce_ids_tokens p)
{
    const int64_t row = (int64_t)blockIdx.x * LK_CE_IDS_WARPS + threadIdx.x / 32;
    lk_griddepcontrol_wait();
    const bool there = row < p.call.all.a.rows;
    const lk_ce_ids s = lk_ce_ids_load(p.call, row, there);
    if (there && threadIdx.x % 32 == 0) p.flag[row] = s.any || s.bad;
}

/* A warp owns a token. */
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS) lk_lce_ids_begin_kernel(const __grid_constant__ lk_lce_ids_work p)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * LK_CE_IDS_WARPS + threadIdx.x / 32;
    lk_griddepcontrol_wait();
    const bool there = row < p.all.ids.rows;
    const lk_ce_ids s = lk_ce_ids_load(p.call, row, there);
    float sum = 0.0f, weights = 0.0f;
    int64_t top = INT64_MIN; /* the id with the largest logit is the target: then no other id has more than half of p */
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        if (s.id[i] < 0) continue;
        const float logit = p.logit ? p.logit[row * p.all.x.ids_per_row + lane + 32 * i] : 0.0f;
        const int64_t its = lk_ce_top(logit, s.id[i]);
        top = its > top ? its : top;
        if (p.all.dlogp && !s.bad) sum += fabsf(p.all.x.dlogp[row * p.all.x.dlogp_stride + lane + 32 * i]);
        weights += fabsf(s.weight[i]);
    }
    for (int k = lane; s.bad && p.all.dlogp && k < (int)p.all.x.ids_per_row; k += 32) /* whether something is asked of it */
        sum += fabsf(p.all.x.dlogp[row * p.all.x.dlogp_stride + k]);
    if (lane == 0 && (s.any || s.bad)) {
        if (p.all.dtail) sum += fabsf(p.all.x.dtail[row]);
        if (p.all.x.tail_weight) weights += fabsf(p.all.x.tail_weight[row]);
    }
    sum = lk_sum_warp(sum), weights = lk_sum_warp(weights);
    top = lk_ce_top_warp(top);
    if (row == 0 && lane == 0 && p.all.zero) *p.all.zero = 0.0f;
    if (!there || lane != 0) return;
    if (p.all.most && !s.bad) atomicMax((int *)p.all.most, __float_as_int(weights)); /* no sign: they compare as floats do */
    p.all.target[row] = s.bad ? LK_BAD : s.any ? lk_ce_top_col(top) : LK_IGNORED;
    if (p.all.bound) p.all.bound[row] = sum + (p.dlse ? fabsf(p.dlse[row]) : 0.0f);
}

/* A thread per upstream. */
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS) lk_lce_ids_upstream_kernel(const __grid_constant__ lk_lce_ids_work p)
{
    const int64_t i = (int64_t)blockIdx.x * (32 * LK_CE_IDS_WARPS) + threadIdx.x;
    const lk_lce_args &a = p.all.x.common;
    lk_griddepcontrol_wait();
    if (i >= (a.upstream && a.upstream_per_token ? a.tokens : 1)) return;
    const float value = a.upstream_value != 0.0f ? a.upstream_value : 1.0f;
    const float upstream = value * (a.upstream ? a.upstream[i] : p.all.zero ? 0.0f : 1.0f);
    p.all.upstream[i] = upstream * __int_as_float((127 + lk_lce_ids_power(p.all)) << 23);
}

/* Divides dlogp, dtail and dlse of a slice's rows by alpha, and the rows' factors by 2^q. With dlogp or dtail alpha is a power of
 * two. Without them lk_lce_prepare_kernel has divided dlse. A thread per place. */
LK_KERNEL void __launch_bounds__(32 * LK_CE_IDS_WARPS) lk_lce_ids_scale_kernel(const __grid_constant__ lk_lce_ids_work p)
{
    const int64_t k = p.all.x.ids_per_row, i = (int64_t)blockIdx.x * (32 * LK_CE_IDS_WARPS) + threadIdx.x, row = i / k;
    lk_griddepcontrol_wait();
    if (row >= p.all.ids.rows) return;
    const int64_t token = p.first_row + row;
    const float shift = __fdiv_rn(1.0f, p.counts->alpha);
    if (p.all.dlogp) p.all.dlogp[token * k + i % k] = shift * p.all.x.dlogp[token * p.all.x.dlogp_stride + i % k];
    if (i % k != 0) return;
    if (p.all.dtail) p.all.dtail[token] = shift * p.all.x.dtail[token];
    if (p.all.bound) p.scaled_dlse[row] = p.dlse ? shift * p.dlse[token] : 0.0f;
    if (p.all.most) p.factor[row] *= __int_as_float((127 - lk_lce_ids_power(p.all)) << 23);
}

/* ---- The kernels of FUSED ------------------------------------------------------------------------------------------------ */

/* What all of them get. */
typedef struct {
    lk_lce_fused f;      /* after the states; elsewhere f.chunk alone */
    lk_ce_ids_call call; /* the ids of all tokens */
    lk_lce_ids_arrays ws;
    const float *dlse;   /* the caller's */
} lk_lce_ids_fused;

/* Logits of the ids: x of a token times a row of weight. A warp owns a place. If there are more places than warps, it goes on in
 * steps of the number of warps. */
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_lce_ids_dots_kernel(const __grid_constant__ lk_lce_ids_fused p)
{
    constexpr int Vecs = 4, Step = 32 * 8; /* Vecs: loads of each factor in flight */
    const lk_lce_args &a = p.f.chunk.call.a;
    const int lane = (int)threadIdx.x % 32;
    const int64_t k = p.call.x.ids_per_row, warps = LK_HEAD_THREADS / 32, step = (int64_t)gridDim.x * warps;
    lk_griddepcontrol_wait();
    for (int64_t at = blockIdx.x * warps + threadIdx.x / 32; at < a.tokens * k; at += step) {
        const int64_t token = at / k;
        const int y = lk_ce_ids_label(p.call, token, at % k).y;
        if (y < 0) continue;
        const lk_bf16 *const x = (const lk_bf16 *)a.x + token * a.x_stride;
        const lk_bf16 *const weight = (const lk_bf16 *)a.weight + y * a.weight_stride;
        float sums[Vecs] = {};
        for (int64_t col = lane * 8; col < a.hidden; col += Vecs * Step) {
            lk_vec<lk_bf16> left[Vecs], right[Vecs];
            LK_UNROLL for (int u = 0; u < Vecs; u++) {
                const int64_t rest = a.hidden - col - u * Step;
                const int some = rest < 0 ? 0 : rest < 8 ? (int)rest : 8;
                left[u].raw = lk_gemm_get8(x + col + u * Step, some, some == 8);
                right[u].raw = lk_gemm_get8(weight + col + u * Step, some, some == 8);
            }
            LK_UNROLL for (int u = 0; u < Vecs; u++) {
                float v[8], w[8];
                lk_unpack(v, left[u]), lk_unpack(w, right[u]);
                LK_UNROLL for (int j = 0; j < 8; j++) sums[u] = fmaf(v[j], w[j], sums[u]);
            }
        }
        const float sum = lk_sum_warp((sums[0] + sums[1]) + (sums[2] + sums[3]));
        if (lane == 0) p.ws.logit[at] = sum + (a.bias ? lk_get_as(a.bias, a.bias_dtype, y) : 0.0f);
    }
}

/* Of a lane's ids of a row. */
typedef struct {
    float z[LK_CE_IDS_EACH], slope[LK_CE_IDS_EACH]; /* the logit, under a softcap z; -inf: not a good id, or ids_per_row is 1 */
    float u[LK_CE_IDS_EACH];                        /* the sum of u over all places of the id */
    bool writes[LK_CE_IDS_EACH];                    /* whether the place writes dZ: the id's first, not of the target */
    float own, rest;                                /* the sum of u of the target; of the other ids */
} lk_lce_ids_values;

LK_DEVICE void lk_lce_ids_get_logits(const lk_lce_ids_fused &p, int64_t at, const lk_ce_ids &s, lk_lce_ids_values *v)
{
    const lk_lce_args &a = p.f.chunk.call.a;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        v->z[i] = -INFINITY, v->slope[i] = 1.0f;
        if (s.id[i] < 0 || !p.ws.logit) continue;
        v->z[i] = p.ws.logit[at * p.call.x.ids_per_row + (int)threadIdx.x % 32 + 32 * i];
        if (a.softcap > 0.0f) v->z[i] = lk_ce_cap(v->z[i], a.logit_scale, a.softcap, &v->slope[i]);
    }
}

/* The sums of u of a row's ids; 0 where the row is not good. Called by the row's warp. terms: shared memory of the warp. */
LK_DEVICE void lk_lce_ids_add_up(const lk_lce_ids_fused &p, lk_ce_ids_term *terms, int64_t at, int y, const lk_ce_ids &s, bool good,
                                 lk_lce_ids_values *v)
{
    const int lane = (int)threadIdx.x % 32;
    const float f = p.f.chunk.ws.factor[at];
    float own = 0.0f, rest = 0.0f;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        const bool here = good && s.id[i] >= 0;
        const float u = here ? lk_ce_ids_factor(p.call, at, s, i, f) : 0.0f;
        v->u[i] = 0.0f, v->writes[i] = here && s.id[i] != y;
        if (s.id[i] == y) own += u;
        else rest += u;
        terms[lane + 32 * i] = {s.id[i], u};
    }
    v->own = lk_sum_warp(own), v->rest = lk_sum_warp(rest);
    lk_ce_ids_add_places(terms, p.call.x.ids_per_row, s, v->u, v->writes);
}

/* The terms of a row's gradient, as lk_head_terms_of. own, *rest: the sum of u of the target; of the other ids. The gradient of lse
 * is added to *rest. */
LK_DEVICE lk_head_terms lk_lce_ids_terms(const lk_lce_ids_fused &p, int64_t at, bool good, float own, float *rest, float lse,
                                         float lse_low, float entropy)
{
    const lk_lce_work &chunk = p.f.chunk;
    const lk_lce_args &a = chunk.call.a;
    lk_head_terms t = {};
    if (good && p.dlse) *rest += p.dlse[at];
    if (good && a.z_loss > 0.0f) *rest = fmaf(2.0f * a.z_loss * lse, chunk.ws.factor[at], *rest);
    t.f_rest = a.logit_scale * own, t.f_lse = a.logit_scale * *rest;
    t.g.p_factor = lk_is_finite(lse) ? t.f_rest + t.f_lse : NAN;
    if (chunk.ws.dentropy)
        lk_ce_entropy_factors(&t.g, -a.logit_scale * chunk.ws.dentropy[at], lse, lse_low, entropy, lk_head_scale(a));
    return t;
}

/* dZ of an id that is not the target. u: its sum over the places of the id. */
LK_DEVICE float lk_lce_ids_dz(const lk_lce_args &a, const lk_head_terms &t, float p, float z, float slope, float u)
{
    float dz[1] = {z};
    const float e[1] = {p}, w[1] = {a.logit_scale * u}, slopes[1] = {slope};
    lk_ce_dz<false>(dz, e, w, slopes, t.g, a);
    return dz[0];
}

/* Stores what the panels need of a row. Called by the row's warp. dz: of a lane's ids. */
LK_DEVICE void lk_lce_ids_keep(const lk_lce_ids_fused &p, int64_t at, const lk_ce_ids &s, const lk_lce_ids_values &v, float rest,
                               const float (&dz)[LK_CE_IDS_EACH])
{
    const int lane = (int)threadIdx.x % 32;
    if (lane == 0) p.ws.own[at] = v.own, p.ws.rest[at] = rest;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        if (!p.ws.column || lane + 32 * i >= (int)p.call.x.ids_per_row) continue;
        const int64_t place = at * p.call.x.ids_per_row + lane + 32 * i;
        p.ws.column[place] = v.writes[i] ? s.id[i] : -1, p.ws.logit[place] = dz[i];
    }
}

/* Gives the kept exponentials of a row one reference, base. Then dZ / v replaces the exponential of each id but the target. factor
 * is v. A float v may be 0, or too small to divide by, where the sum of u nearly cancels. Then a power of two w, of the size of the
 * largest dZ, takes the place of v, and the exponentials are multiplied by v / w. Returns v or w. Called by the row's warp. */
LK_DEVICE float lk_lce_ids_put_kept(const lk_lce_ids_fused &p, int64_t row, int y, const lk_ce_ids &s, const lk_lce_ids_values &v,
                                    float base, float factor, const float (&dz)[LK_CE_IDS_EACH])
{
    float most = 0.0f, times = 1.0f;
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) most = v.writes[i] ? fmaxf(most, fabsf(dz[i])) : most;
    most = lk_max_warp(most);
    if (most > 0x1p64f * fabsf(factor) && most < INFINITY) {
        const float w = fmaxf(__int_as_float(__float_as_int(most) & 0x7f800000), 0x1p-126f);
        times = __fdiv_rn(factor, w), factor = w;
    }
    lk_head_rescale(p.f, row, y, lk_head_scale(p.f.chunk.call.a) * LK_LOG2E, base, times);
    __syncwarp(); /* the exponentials are rescaled before some of them are written again */
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        const int tile = s.id[i] / LK_GEMM_COLS;
        if (!v.writes[i] || tile >= p.f.kept) continue;
        int cols_left;
        lk_bf16 *const e = lk_head_place(p.f, row, tile, &cols_left) + s.id[i] % LK_GEMM_COLS;
        lk_put(e, factor != 0.0f ? __fdiv_rn(dz[i], factor) : 0.0f);
    }
    return factor;
}

/* In place of lk_lce_merge_kernel and lk_lce_factor_kernel. A warp owns a row. */
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS, 2) lk_lce_ids_rows_kernel(const __grid_constant__ lk_lce_ids_fused p)
{
    LK_SHARED(lk_ce_ids_term, terms, [LK_HEAD_THREADS / 32 * LK_CE_IDS_MOST]);
    const lk_lce_work &chunk = p.f.chunk;
    const lk_lce_args &a = chunk.call.a;
    const int warp = (int)threadIdx.x / 32;
    const int64_t row = (int64_t)blockIdx.x * (LK_HEAD_THREADS / 32) + warp, at = chunk.first_row + row;
    lk_griddepcontrol_wait();
    if (row >= chunk.rows) return;
    const float scale = lk_head_scale(a);
    const int y = chunk.ws.target[at];
    const lk_ce_ids ids = lk_ce_ids_load(p.call, at, true);
    lk_lce_ids_values v;
    lk_lce_ids_get_logits(p, at, ids, &v);
    float slope, first_z = -INFINITY, minus_logp[LK_CE_IDS_EACH];
    const lk_ce_row s = lk_head_merge_stretches<lk_ce_row>(p.f, row, y, &slope);
    const float one[1] = {s.target}, ones[1] = {1.0f};
    const lk_ce_row all = lk_ce_row_add(s, one, ones, scale);
    lk_ce_result r = {0.0f, 0.0f, 0.0f, 0.0f, -1, 0.0f};
    if (y >= 0) r = lk_ce_row_finish(all, {scale, 0.0f, a.z_loss, 1.0f, a.vocab});
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) first_z = fmaxf(first_z, v.z[i]);
    first_z = lk_max_warp(first_z); /* the target's, as lk_lce_ids_dots_kernel has it */
    const float loss = lk_ce_ids_put_logp(p.call, at, ids, v.z, first_z, ids.bad ? NAN : r.class_loss, scale, minus_logp);
    if (threadIdx.x % 32 == 0) {
        lk_ce_result of_ids = r;
        if (r.class_loss == r.class_loss) of_ids.class_loss = loss;
        const float weight = y >= 0 && chunk.ws.row_weight ? chunk.ws.row_weight[at] : 1.0f; /* an ignored token's may be NaN */
        of_ids.class_loss *= weight, of_ids.z_loss *= weight;
        lk_lce_put_result(chunk.ws, at, of_ids);
    }
    if (!chunk.call.gradient) return;

    const bool good = ids.any && !ids.bad;
    lk_lce_ids_add_up(p, terms + warp * LK_CE_IDS_MOST, at, y, ids, good, &v);
    float rest = v.rest, factor = 0.0f, target_dz = 0.0f, dz[LK_CE_IDS_EACH];
    const lk_head_terms t = lk_lce_ids_terms(p, at, good, v.own, &rest, r.lse, r.lse_low, r.entropy);
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++)
        dz[i] = v.writes[i] ? lk_lce_ids_dz(a, t, lk_exp(-minus_logp[i]), v.z[i], v.slope[i], v.u[i]) : 0.0f;
    lk_lce_ids_keep(p, at, ids, v, rest, dz);
    if (y >= 0) {
        const float base = lk_head_largest_reference(p.f, row, y);
        factor = lk_head_row_factor(a, s, t, base, slope, r.lse, &target_dz);
        if (p.f.kept) factor = lk_lce_ids_put_kept(p, row, y, ids, v, base, factor, dz);
    }
    if (threadIdx.x % 32 != 0) return;
    if (chunk.ws.target_dz) lk_head_put_target_dz(chunk.ws, at, y, target_dz);
    if (chunk.ws.scale) chunk.ws.scale[row] = factor;
}

/* backward: what the panels need. The sum of p of all columns but the target's is not known yet. A warp owns a row. */
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS, 2) lk_lce_ids_backward_kernel(const __grid_constant__ lk_lce_ids_fused p)
{
    LK_SHARED(lk_ce_ids_term, terms, [LK_HEAD_THREADS / 32 * LK_CE_IDS_MOST]);
    const lk_lce_work &work = p.f.chunk;
    const lk_lce_args &a = work.call.a;
    const int warp = (int)threadIdx.x / 32;
    const int64_t row = (int64_t)blockIdx.x * (LK_HEAD_THREADS / 32) + warp;
    lk_griddepcontrol_wait();
    if (row >= work.call.rows) return;
    const lk_ce_ids ids = lk_ce_ids_load(p.call, row, true);
    const bool good = ids.any && !ids.bad;
    const float lse = work.ws.lse[row], lse_low = lk_head_lse_low(work, row);
    const float entropy = work.ws.dentropy ? work.ws.entropy[row] : 0.0f;
    lk_lce_ids_values v;
    lk_lce_ids_get_logits(p, row, ids, &v);
    lk_lce_ids_add_up(p, terms + warp * LK_CE_IDS_MOST, row, work.ws.target[row], ids, good, &v);
    float rest = v.rest, dz[LK_CE_IDS_EACH];
    const lk_head_terms t = lk_lce_ids_terms(p, row, good, v.own, &rest, lse, lse_low, entropy);
    LK_UNROLL for (int i = 0; i < LK_CE_IDS_EACH; i++) {
        const float probability = lk_exp(fmaf(lk_head_scale(a), v.z[i], -lse) - lse_low);
        dz[i] = v.writes[i] ? lk_lce_ids_dz(a, t, probability, v.z[i], v.slope[i], v.u[i]) : 0.0f;
    }
    lk_lce_ids_keep(p, row, ids, v, rest, dz);
}

/* Writes dZ of a panel's ids. A thread per place. */
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_lce_ids_panel_kernel(const __grid_constant__ lk_lce_ids_fused p)
{
    const lk_lce_work &chunk = p.f.chunk;
    const int64_t k = p.call.x.ids_per_row, i = (int64_t)blockIdx.x * LK_HEAD_THREADS + threadIdx.x, row = i / k;
    lk_griddepcontrol_wait();
    if (row >= chunk.rows) return;
    const int64_t place = chunk.first_row * k + i, col = p.ws.column[place] - chunk.first_col;
    if (col < 0 || col >= chunk.cols) return;
    lk_put((lk_bf16 *)chunk.ws.logits + row * chunk.ws.logits_stride + col, p.ws.logit[place]);
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* Computes the rows of a slice. f: the call of these rows that linear_cross_entropy.cuh makes for one target per row. */
typedef lk_status (*lk_lce_ids_slice_rows)(const lk_lce_job *job, const lk_lce_work &chunk, const lk_cross_entropy_call &f);

/* `args` of the table. */
typedef struct {
    const lk_lce_ids *ids;
    lk_lce_ids_slice_rows rows; /* lk_lce_ids_rows, or a rank's */
    const lk_lce_ids_counted *counted; /* NULL: all tokens are rows */
} lk_lce_ids_own;

LK_HOST const lk_lce_ids *lk_lce_ids_of(const lk_lce_job *job)
{
    return ((const lk_lce_ids_own *)job->rows->args)->ids;
}

/* The ids of `rows` tokens from first_row on. */
LK_HOST lk_ce_ids_call lk_lce_ids_call_of(const lk_lce_ids *ids, int64_t first_row, int64_t rows)
{
    const lk_lce_ids_args &x = ids->x;
    lk_ce_ids_call call = {};
    const int bytes = x.common.target_dtype == LK_TARGET_INT32 ? 4 : 8;
    call.x.target_ids = (const char *)x.target_ids + first_row * x.target_ids_stride * bytes;
    if (x.target_weight) call.x.target_weight = x.target_weight + first_row * x.target_weight_stride;
    if (x.dlogp) call.x.dlogp = ids->dlogp + first_row * x.ids_per_row;
    if (x.logp) call.x.logp = x.logp + first_row * x.logp_stride;
    if (x.tail_weight) call.x.tail_weight = x.tail_weight + first_row;
    if (x.dtail) call.x.dtail = ids->dtail + first_row;
    if (ids->tail) call.tail = call.x.tail = ids->tail + first_row;
    call.x.ids_per_row = x.ids_per_row, call.x.target_ids_stride = x.target_ids_stride;
    call.x.target_weight_stride = x.target_weight_stride, call.x.dlogp_stride = x.ids_per_row, call.x.logp_stride = x.logp_stride;
    call.all.a = ids->ids, call.all.a.rows = rows;
    return call;
}

/* What FUSED's kernels get. */
LK_HOST lk_lce_ids_fused lk_lce_ids_fused_of(const lk_lce_job *job)
{
    const lk_lce_ids *const ids = lk_lce_ids_of(job);
    lk_lce_ids_fused p = {};
    p.f.chunk = job->p, p.ws = ids->fused, p.dlse = ids->x.common.dlse;
    p.call = lk_lce_ids_call_of(ids, 0, job->p.call.a.tokens);
    p.call.x.dlogp = ids->x.dlogp, p.call.x.dlogp_stride = ids->x.dlogp_stride; /* with dlogp alpha is 1 */
    return p;
}

/* The table's entries for FUSED. */
LK_HOST lk_status lk_lce_ids_fused_rows(const lk_lce_job *job, const lk_lce_fused &f)
{
    lk_lce_ids_fused p = lk_lce_ids_fused_of(job);
    p.f = f;
    return lk_head_launch(job, lk_lce_ids_rows_kernel, lk_ceil_div(f.chunk.rows, LK_HEAD_THREADS / 32), p);
}
LK_HOST lk_status lk_lce_ids_fused_backward(const lk_lce_job *job)
{
    const lk_lce_ids_fused p = lk_lce_ids_fused_of(job);
    return lk_head_launch(job, lk_lce_ids_backward_kernel, lk_ceil_div(job->p.call.rows, LK_HEAD_THREADS / 32), p);
}
LK_HOST void lk_lce_ids_fused_terms(const lk_lce_job *job, lk_lce_work *chunk)
{
    const lk_lce_ids_arrays &ws = lk_lce_ids_of(job)->fused;
    chunk->ws.factor = ws.own, chunk->ws.dlse = ws.rest;
    chunk->call.a.dlse = ws.rest, chunk->call.a.z_loss = 0.0f; /* rest has both */
}
LK_HOST lk_status lk_lce_ids_fused_panel(const lk_lce_job *job, const lk_lce_work &chunk)
{
    lk_lce_ids_fused p = lk_lce_ids_fused_of(job);
    p.f.chunk = chunk;
    if (!p.ws.column) return LK_OK;
    return lk_head_launch(job, lk_lce_ids_panel_kernel, lk_ceil_div(chunk.rows * p.call.x.ids_per_row, LK_HEAD_THREADS), p);
}

LK_HOST lk_status lk_lce_ids_begin(const lk_lce_job *job)
{
    lk_lce_ids_work p = {};
    p.all = *lk_lce_ids_of(job), p.dlse = p.all.x.common.dlse;
    p.all.ids.rows = job->p.call.a.tokens, p.call = lk_lce_ids_call_of(&p.all, 0, p.all.ids.rows);
    const int threads = 32 * LK_CE_IDS_WARPS;
    const int64_t upstreams = p.all.x.common.upstream_per_token ? p.all.ids.rows : 1;
    lk_status status = LK_OK;
    if (job->plan.path == LK_LINEAR_CROSS_ENTROPY_FUSED && p.all.fused.logit) {
        const int64_t blocks = lk_ceil_div(p.all.ids.rows * p.all.x.ids_per_row, LK_HEAD_THREADS / 32);
        p.logit = p.all.fused.logit;
        status = lk_head_launch(job, lk_lce_ids_dots_kernel, lk_head_min(blocks, 1 << 30), lk_lce_ids_fused_of(job));
    }
    if (!status && p.all.most) status = lk_launched(job->op, cudaMemsetAsync(p.all.most, 0, sizeof(float), job->stream));
    if (!status)
        status = lk_launch_pdl(job->op, &job->device, lk_lce_ids_begin_kernel, lk_ceil_div(p.all.ids.rows, LK_CE_IDS_WARPS), 1,
                               threads, 0, job->stream, p);
    if (status || !p.all.most) return status;
    return lk_launch_pdl(job->op, &job->device, lk_lce_ids_upstream_kernel, lk_ceil_div(upstreams, threads), 1, threads, 0,
                         job->stream, p);
}

/* Gives the call of a slice's rows what ids have in place of a target. */
LK_HOST void lk_lce_ids_put_options(const lk_lce_ids *ids, lk_cross_entropy_args *a)
{
    a->target_dtype = ids->ids.target_dtype, a->ignore_index = ids->ids.ignore_index;
    a->use_ignore_index = ids->ids.use_ignore_index;
}

/* The rows of a slice in one direction. f: as in lk_lce_ids_slice_rows; Logit: the type of the logits. */
template <class Logit>
LK_HOST lk_status lk_lce_ids_pass(const lk_lce_job *job, const lk_lce_work &chunk, const lk_cross_entropy_call &f,
                                  lk_direction direction)
{
    const lk_lce_ids *const ids = lk_lce_ids_of(job);
    const int threads = 32 * LK_CE_IDS_WARPS;
    const int64_t rows = chunk.rows, blocks = lk_ceil_div(rows, LK_CE_IDS_WARPS);
    lk_ce_ids_call call = lk_lce_ids_call_of(ids, chunk.first_row, rows);
    call.direction = direction, call.bad_is_zero = true;
    if (!lk_ce_ids_has_tail(&call.x, direction)) call.tail = NULL; /* backward, where the tail is an output alone */
    call.all = f;
    lk_cross_entropy_args &a = call.all.a;
    lk_lce_ids_put_options(ids, &a);
    if (direction == LK_FORWARD) a.dlogits = NULL, a.upstream = a.dlse = a.dentropy = NULL;
    if (direction == LK_BACKWARD) a.argmax = NULL, a.entropy = a.dentropy ? a.entropy : NULL;
    lk_cross_entropy_ids_args space = call.x;
    space.common = a, space.common.workspace = ids->rows;
    call.space = lk_ce_ids_space_of(&space, direction);
    lk_cross_entropy_call one = lk_ce_ids_rows(call);
    call.lse = one.a.lse, call.entropy = one.a.entropy;
    if (direction == LK_BACKWARD) call.lse = a.lse, call.lse_low = a.lse_low, call.entropy = a.entropy;
    a.lse = a.lse_low = NULL, a.entropy = NULL, a.argmax = NULL;
    const lk_device *const device = &job->device;
    lk_status status = lk_launch_pdl(job->op, device, lk_cross_entropy_ids_read_kernel<Logit>, blocks, 1, threads, 0, job->stream,
                                     call);
    if (!status && direction == LK_FORWARD)
        status = lk_cross_entropy_is_plain(&one.a)
                     ? lk_cross_entropy_plain<Logit>(job->op, device, one, job->stream)
                     : lk_cross_entropy_gradient<Logit, LK_FORWARD>(job->op, device, one, job->stream);
    else if (!status)
        status = direction == LK_BOTH ? lk_cross_entropy_gradient<Logit, LK_BOTH>(job->op, device, one, job->stream)
                                         : lk_cross_entropy_gradient<Logit, LK_BACKWARD>(job->op, device, one, job->stream);
    if (!status && call.tail && direction == LK_FORWARD)
        status = lk_ce_tail_launch<Logit>(job->op, device, a, call, job->stream);
    if (status) return status;
    return lk_launch_pdl(job->op, device, lk_cross_entropy_ids_write_kernel<Logit>, blocks, 1, threads, 0, job->stream, call);
}

/* Launches lk_lce_ids_scale_kernel for a slice's rows, before their gradients, if it has something to do. */
LK_HOST lk_status lk_lce_ids_scale(const lk_lce_job *job, const lk_lce_work &chunk)
{
    const lk_lce_ids *const ids = lk_lce_ids_of(job);
    const int threads = 32 * LK_CE_IDS_WARPS;
    lk_lce_ids_work p = {};
    if (!chunk.call.gradient || (!ids->bound && !ids->most)) return LK_OK;
    p.all = *ids, p.all.ids.rows = chunk.rows, p.dlse = ids->x.common.dlse, p.first_row = chunk.first_row;
    p.scaled_dlse = chunk.ws.dlse + chunk.first_row, p.factor = chunk.ws.factor + chunk.first_row, p.counts = chunk.ws.counts;
    return lk_launch_pdl(job->op, &job->device, lk_lce_ids_scale_kernel, lk_ceil_div(chunk.rows * ids->x.ids_per_row, threads), 1,
                         threads, 0, job->stream, p);
}

/* The rows of a slice. forward_backward with a tail has two passes, since the gradients need the tail. */
template <class Logit>
LK_HOST lk_status lk_lce_ids_rows(const lk_lce_job *job, const lk_lce_work &chunk, const lk_cross_entropy_call &f)
{
    const lk_lce_ids *const ids = lk_lce_ids_of(job);
    const bool gives_loss = chunk.call.gives_loss, gradient = chunk.call.gradient;
    lk_status status = lk_lce_ids_scale(job, chunk);
    if (status) return status;
    if (!gradient) return lk_lce_ids_pass<Logit>(job, chunk, f, LK_FORWARD);
    if (!gives_loss) return lk_lce_ids_pass<Logit>(job, chunk, f, LK_BACKWARD);
    if (!ids->tail) return lk_lce_ids_pass<Logit>(job, chunk, f, LK_BOTH);
    status = lk_lce_ids_pass<Logit>(job, chunk, f, LK_FORWARD);
    return status ? status : lk_lce_ids_pass<Logit>(job, chunk, f, LK_BACKWARD);
}

/* `begin` of the table. */
template <class T> LK_HOST lk_status lk_lce_ids_prepare(const lk_lce_job *job)
{
    const lk_lce_ids_counted *const counted = ((const lk_lce_ids_own *)job->rows->args)->counted;
    lk_status status = LK_OK;
    if (counted)
        status = lk_launch_pdl(job->op, &job->device, lk_lce_ids_counts_kernel,
                               lk_ceil_div(counted->copies.list.tokens, LK_CE_IDS_WARPS), 1, 32 * LK_CE_IDS_WARPS, 0, job->stream,
                               counted->tokens);
    if (counted && !status) status = lk_counted_gather<T>(job->op, &job->device, &counted->copies, job->stream);
    if (!status) status = lk_lce_ids_begin(job);
    return status ? status : lk_lce_prepare(job);
}

/* `finish` of the table. */
template <class T> LK_HOST lk_status lk_lce_ids_finish(const lk_lce_job *job, const lk_lce_work &p)
{
    const lk_lce_ids_counted *const counted = ((const lk_lce_ids_own *)job->rows->args)->counted;
    const lk_status status = lk_lce_write_rest(job, p);
    return status || !counted ? status : lk_counted_scatter<T>(job->op, &job->device, &counted->copies, job->stream);
}
template <class Logit> LK_HOST lk_status lk_lce_ids_slice(const lk_lce_job *job, const lk_lce_work &slice)
{
    const lk_lce_ids_own *const own = (const lk_lce_ids_own *)job->rows->args;
    return own->rows(job, slice, lk_lce_rows_of<Logit>(job, slice));
}

/* The states of a rank without columns; in backward it counts the tokens with a bad id. */
LK_HOST lk_status lk_lce_ids_no_columns(const lk_lce_job *job, lk_direction direction)
{
    const lk_lce_args &a = job->p.call.a;
    lk_lce_work all = job->p;
    all.rows = a.tokens;
    if (direction == LK_FORWARD)
        return ((const lk_lce_ids_own *)job->rows->args)->rows(job, all, lk_lce_no_columns_call(job));
    const lk_status status = a.bad_targets ? lk_lce_ids_begin(job) : LK_OK;
    return status ? status : lk_lce_no_columns(job, direction);
}

/* The table. */
template <class T> LK_HOST lk_lce_rows lk_lce_ids_table(const lk_lce_args *args, const lk_lce_ids_own *own)
{
    return {lk_lce_ids_prepare<T>, NULL, args->fast_logits ? lk_lce_ids_slice<T> : lk_lce_ids_slice<float>,
            lk_head_dbias<T, lk_lce_call>, NULL, lk_lce_ids_finish<T>, lk_lce_ids_no_columns, lk_head_run_fused<T, lk_lce_call>,
            lk_lce_ids_fused_rows, lk_lce_ids_fused_backward, lk_lce_ids_fused_terms, lk_lce_ids_fused_panel, own};
}

/* Takes this header's arrays from a workspace. sizes: T is f16. fused: the path may be FUSED. split: the columns are
 * split over ranks. */
LK_HOST void lk_lce_ids_lay_out(lk_lce_ids *ids, lk_direction direction, bool sizes, bool fused, bool split,
                                lk_arena *arena)
{
    const lk_lce_ids_args &x = ids->x;
    const bool both = direction == LK_BOTH, tail = lk_ce_ids_has_tail(&x, direction), given = x.dlogp || x.dtail;
    const int64_t tokens = x.common.tokens < 0 ? 0 : lk_head_min(x.common.tokens, INT32_MAX); /* it may be unchecked */
    const bool halves = both && (tail || split); /* forward, then backward */
    sizes = sizes && direction != LK_FORWARD;
    lk_cross_entropy_ids_args space = {};
    space.common.rows = tokens, space.common.z_loss = x.common.z_loss, space.ids_per_row = x.ids_per_row;
    space.common.dentropy = x.common.dentropy, space.tail_weight = x.tail_weight, space.dtail = x.dtail;
    lk_take(&ids->target, arena, true, tokens + 1); /* even without tokens not NULL: the second half has an address */
    lk_take(&ids->bound, arena, given, tokens);
    lk_take(&ids->dtail, arena, x.dtail, tokens);
    lk_take(&ids->tail, arena, tail && !x.tail, tokens);
    if (x.tail) ids->tail = x.tail;
    space.tail = ids->tail;
    lk_take(&ids->zero, arena, given && !x.common.upstream && x.common.upstream_value == 0.0f, 1);
    lk_take(&ids->most, arena, sizes, 1);
    lk_take(&ids->upstream, arena, sizes, x.common.upstream && x.common.upstream_per_token ? tokens : 1);
    const bool several = x.ids_per_row > 1, gradient = direction != LK_FORWARD;
    lk_arena instead = *arena;
    lk_take(&ids->dlogp, arena, x.dlogp, tokens * x.ids_per_row);
    const size_t forward = lk_ce_ids_space_of(&space, LK_FORWARD).bytes, back = lk_ce_ids_space_of(&space, LK_BACKWARD).bytes;
    const size_t passes = forward > back ? forward : back, one = lk_ce_ids_space_of(&space, LK_BOTH).bytes;
    const size_t bytes = direction == LK_FORWARD ? forward : !both ? back : halves ? passes : one;
    ids->rows = lk_take_bytes(arena, true, (int64_t)bytes);
    lk_take(&ids->fused.logit, &instead, fused && several, tokens * x.ids_per_row);
    lk_take(&ids->fused.column, &instead, fused && several && gradient, tokens * x.ids_per_row);
    lk_take(&ids->fused.own, &instead, fused && gradient, tokens);
    lk_take(&ids->fused.rest, &instead, fused && gradient, tokens);
    if (arena->used < instead.used) arena->used = instead.used;
    ids->bytes = arena->used;
}

/* The fields of tokens with a target, and what ids do not have. */
LK_HOST void lk_lce_ids_refuse(lk_checks *checks, const lk_lce_args *a, bool ranks)
{
    lk_lce_refuse(checks, a, false, true, "it is not for tokens with target_ids");
    lk_check_absent(checks, "max_counted", ranks && a->max_counted,
                    "with target_ids it is not for columns that are split over ranks");
}

/* Changes the arguments of a call: they become those of the tokens that count. Its strides are filled in, and not checked yet. */
template <class T>
LK_HOST void lk_lce_ids_count(lk_lce_ids_counted *counted, lk_arena *arena, lk_lce_ids_args *x, lk_direction direction)
{
    lk_counted *const c = &counted->copies;
    lk_lce_args *const a = &x->common;
    const bool back = direction == LK_BACKWARD, forward = direction == LK_FORWARD, each = a->reduction == LK_REDUCTION_NONE;
    const int64_t k = x->ids_per_row, words = a->target_dtype == LK_TARGET_INT32 ? 1 : 2;
    lk_cross_entropy_ids_args *const all = &counted->tokens.call.x;
    all->target_ids = x->target_ids, all->target_ids_stride = x->target_ids_stride, all->ids_per_row = k;
    all->target_weight = x->target_weight, all->target_weight_stride = x->target_weight_stride;
    lk_take(&counted->tokens.flag, arena, true, a->tokens);
    lk_counted_begin(c, arena, a->tokens, a->max_counted, counted->tokens.flag);
    lk_counted_in(c, arena, &x->target_ids, true, words * k, (int64_t)((uint64_t)x->target_ids_stride * (uint64_t)words), ~0u);
    lk_counted_in_factor(c, arena, &x->target_weight, k, x->target_weight_stride); /* an id of weight 0 out of range is skipped */
    lk_counted_in(c, arena, &a->row_weight), lk_counted_in(c, arena, &x->tail_weight);
    if (!forward) {
        if (a->upstream_per_token) lk_counted_in(c, arena, &a->upstream);
        lk_counted_in(c, arena, &x->dlogp, false, k, x->dlogp_stride);
        for (const float **in : {&a->dlse, &a->dentropy, &x->dtail}) lk_counted_in(c, arena, in);
    }
    if (back) {
        lk_counted_in(c, arena, &a->lse, true), lk_counted_in(c, arena, &a->lse_low);
        if (a->dentropy) lk_counted_in(c, arena, &a->entropy, true);
        lk_counted_in(c, arena, &x->tail, lk_ce_ids_has_tail(x, direction));
    } else {
        if (each) lk_counted_out(c, arena, &a->loss, true, 0, 1, 1, a->accumulate_loss);
        if (each) lk_counted_out(c, arena, &a->z_loss_out, true, 0, 1, 1, a->accumulate_loss);
        for (float **out : {&a->lse, &a->lse_low, &a->entropy, &x->tail}) lk_counted_out(c, arena, out, true);
        lk_counted_out(c, arena, &a->argmax, false, ~0u);
        lk_counted_out(c, arena, &x->logp, true, 0, k, x->logp_stride);
        c->out.valid_rows = a->valid_rows, a->valid_rows = NULL;
        if (each) a->accumulate_loss = 0;
    }
    if (!back && !each) lk_counted_spoil(c, a->loss, 1, 1, 1, 4), lk_counted_spoil(c, a->z_loss_out, 1, 1, 1, 4);
    if (!forward) {
        const int64_t stride = a->dweight_stride ? a->dweight_stride : a->hidden;
        lk_counted_spoil(c, a->dx, a->tokens, a->hidden, a->dx_stride, sizeof(T));
        lk_counted_spoil(c, a->dweight, a->vocab, a->hidden, stride, lk_dtype_bytes<T>(a->dweight_dtype));
        lk_counted_spoil(c, a->dbias, 1, a->vocab, a->vocab, lk_dtype_bytes<T>(a->dbias_dtype));
    }
    lk_counted_x<T>(c, arena, &a->x, a->hidden, &a->x_stride, &c->x[0]);
    if (!forward) lk_counted_dx<T>(c, arena, &a->dx, a->hidden, &a->dx_stride);
    x->target_ids_stride = x->target_weight_stride = x->dlogp_stride = x->logp_stride = k;
    a->tokens = a->max_counted, a->max_counted = 0;
}

/* Validates a call. call: the arguments that linear_cross_entropy gets; checked, planner: of these, as in lk_lce_check. arena:
 * of the workspace, with what ranks take of it. ranks: what linear_cross_entropy_parallel.cuh adds to the checks, or NULL. counted:
 * what max_counted needs; NULL with ranks. */
template <class T>
LK_HOST lk_status lk_lce_ids_check(const char *op, const lk_lce_ids_args *args, lk_direction direction, bool query,
                                   lk_lce_ids *ids, lk_lce_args *call, lk_lce_call *checked, lk_head_planner *planner,
                                   lk_arena *arena, const lk_lce_added *ranks, lk_lce_ids_counted *counted = NULL)
{
    *ids = {};
    ids->x = *args;
    lk_lce_ids_args *const x = &ids->x;
    lk_lce_ids_args all; /* what the caller gave, with defaults, where the call will have the tokens that count alone */
    const lk_lce_args &given = args->common;
    lk_checks checks = {op, LK_OK};
    lk_lce_ids_refuse(&checks, &given, ranks != NULL);
    if (checks.status) return checks.status; /* before all rules */
    lk_ce_ids_fill_in(x, direction);
    if (direction == LK_FORWARD) x->common.dlse = x->common.dentropy = NULL;
    if (counted) *counted = {};
    const bool counts = counted && given.max_counted > 0 && given.max_counted < given.tokens && given.tokens <= INT32_MAX &&
                        given.hidden >= 1 && given.hidden <= 1 << 30; /* other sizes are refused in their place */
    if (counts) {
        const uintptr_t align = LK_WORKSPACE_ALIGNMENT;
        arena->base = (arena->base + align - 1) / align * align; /* another place is refused later, by its own sentence */
        all = *x;
        for (int64_t *stride : {&all.target_ids_stride, &all.target_weight_stride, &all.dlogp_stride, &all.logp_stride})
            if (*stride == 0) *stride = all.ids_per_row;
        for (int64_t *stride : {&all.common.x_stride, &all.common.dx_stride})
            if (*stride == 0) *stride = all.common.hidden;
        *x = all;
        lk_lce_ids_count<T>(counted, arena, x, direction);
    }
    const lk_lce_args a = x->common;
    const bool tail = lk_ce_ids_has_tail(x, direction);
    const bool fused_asked = a.path == LK_LINEAR_CROSS_ENTROPY_FUSED && !ranks;
    const bool known = a.path == LK_LINEAR_CROSS_ENTROPY_AUTO || a.path == LK_LINEAR_CROSS_ENTROPY_CHUNKS || fused_asked;

    *call = a;
    const bool few = x->ids_per_row == 1 || x->ids_per_row <= a.vocab / LK_LCE_IDS_COLUMNS;
    if (a.path == LK_LINEAR_CROSS_ENTROPY_AUTO && (!few || tail || ranks)) call->path = LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    const bool fused = lk_dtype<T> == LK_DTYPE_BF16 && call->path != LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    lk_lce_ids_lay_out(ids, direction, lk_dtype<T> == LK_DTYPE_F16, fused, ranks != NULL, arena);
    call->target = ids->target, call->target_dtype = LK_TARGET_INT32;
    call->use_ignore_index = 1, call->ignore_index = LK_IGNORED;
    if (ids->bound) {
        call->dlse = ids->bound; /* it also keeps a common factor out of alpha, which dlogp does not have */
        if (ids->zero) call->upstream = ids->zero, call->upstream_per_token = 0;
    }
    if (ids->upstream) {
        call->upstream = ids->upstream, call->upstream_per_token = a.upstream && a.upstream_per_token;
        call->upstream_value = 1.0f; /* it is in there */
    }
    call->workspace = (void *)(arena->base + arena->used);
    call->workspace_bytes = a.workspace_bytes > ids->bytes ? a.workspace_bytes - ids->bytes : 0;
    ids->ids.target_dtype = a.target_dtype, ids->ids.vocab = ranks ? ranks->rank->parallel.vocab_total : a.vocab;
    ids->ids.use_ignore_index = a.use_ignore_index, ids->ids.ignore_index = a.ignore_index;
    if (counts) counted->tokens.call.all.a = ids->ids, counted->tokens.call.all.a.rows = given.tokens;

    lk_lce_added more = {};
    if (ranks) more = *ranks;
    lk_ce_ids_put_tensors(more.list, counts ? &all : x, given.tokens, direction, ranks ? &ranks->rank->parallel : NULL);
    more.bytes = ids->bytes, more.ids_per_row = args->ids_per_row, more.most_ids = LK_CE_IDS_MOST, more.instead = call;
    if (!known && ranks) more.path_rule = "where columns are split over ranks it is 0 or LK_LINEAR_CROSS_ENTROPY_CHUNKS";
    else if (!known)
        more.path_rule = "with target_ids it is 0, LK_LINEAR_CROSS_ENTROPY_CHUNKS or LK_LINEAR_CROSS_ENTROPY_FUSED";
    else if (tail && fused_asked) more.path_rule = "LK_LINEAR_CROSS_ENTROPY_FUSED is for calls without a tail";
    return lk_lce_check<T>(op, &given, direction, query, checked, planner, &more);
}

/* The plan within a budget; least: or the smallest, where that is more. */
template <class T>
LK_HOST lk_status lk_linear_cross_entropy_ids_query_plan(const char *op, const lk_lce_ids_args *args, lk_direction direction,
                                                         size_t budget, bool least, lk_linear_cross_entropy_plan *plan)
{
    lk_lce_ids ids;
    lk_lce_args instead;
    lk_lce_call call;
    lk_head_planner planner;
    lk_arena arena = {(uintptr_t)args->common.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    lk_lce_ids_counted counted;
    const lk_status status = lk_lce_ids_check<T>(op, args, direction, true, &ids, &instead, &call, &planner, &arena, NULL,
                                                 &counted);
    return status ? status : lk_lce_query_planner(op, &planner, ids.bytes, budget, least, plan);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_cross_entropy_ids_run(const char *op, const lk_lce_ids_args *args, cudaStream_t stream)
{
    lk_lce_ids ids;
    lk_lce_args instead;
    lk_lce_call call;
    lk_head_planner planner;
    lk_arena arena = {(uintptr_t)args->common.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    lk_lce_ids_counted counted;
    const lk_status status = lk_lce_ids_check<T>(op, args, direction, false, &ids, &instead, &call, &planner, &arena, NULL,
                                                 &counted);
    if (status) return status;
    const lk_lce_ids_own own = {&ids, instead.fast_logits ? lk_lce_ids_rows<T> : lk_lce_ids_rows<float>,
                                counted.copies.list.rows ? &counted : NULL};
    return lk_lce_launch<T>(op, call, &planner, direction, stream, lk_lce_ids_table<T>(&instead, &own));
}

#endif /* CUDA or the simulator */
#endif
