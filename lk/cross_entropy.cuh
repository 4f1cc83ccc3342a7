// SPDX-License-Identifier: MIT
/* cross_entropy.cuh - cross entropy of rows of logits, with what language models add to it, forward and backward.
 *
 *   z[r,j]     = logit_scale logits[r,j], or softcap tanh(logit_scale logits[r,j] / softcap)
 *   lse[r]     = log sum_j exp(z[r,j]),   p[r,j] = exp(z[r,j] - lse[r])
 *   class[r]   = (1 - e) w[y] (lse[r] - z[r,y]) + (e / vocab) (W lse[r] - sum_j w[j] z[r,j])
 *                with y = target[r], e = label_smoothing, w = class_weight (1 without), W = sum_j w[j]
 *   z_loss[r]  = k lse[r]^2,   k = z_loss
 *   entropy[r] = lse[r] - sum_j p[r,j] z[r,j]
 *   loss       = class[r] + z_loss[r] for each row (none), sum_r (class[r] + z_loss[r]) (sum), or
 *                sum_r class[r] / D + sum_r z_loss[r] / valid_rows (mean), where valid_rows is the number of rows counted,
 *                that is not ignored, weight_sum the sum of w[target[r]] over them, and D = weight_sum with class weights,
 *                else valid_rows
 *   backward   f = upstream, over D for mean;   h = upstream, over valid_rows for mean
 *              F = f ((1 - e) w[y] + (e / vocab) W),   G = 2 k lse[r] h + dlse[r],   S = sum_{j != y} p[r,j]
 *              dz[j] = (F + G) p[r,j] - f (e / vocab) w[j]                  for j != y
 *              dz[y] = G p[r,y] - F S + f (e / vocab) (W - w[y])            which is G - sum_{j != y} dz[j]: minus the others
 *              dlogits[r,j] = dz[j] logit_scale (1 - (z[r,j] / softcap)^2)  (without softcap: dz[j] logit_scale)
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/cross_entropy.cuh"           #include "lk/cross_entropy.cuh"
 *                LK_DEFINE_CROSS_ENTROPY(bf16)             LK_DECLARE_CROSS_ENTROPY(bf16)
 *            T is f32, f16 or bf16. Then, asynchronously on the caller's stream, in a graph too:
 *                lk_cross_entropy_forward_args args = {.logits = logits, .target = target, .loss = loss, .lse = lse,
 *                                                      .rows = rows, .vocab = vocab};
 *                lk_status status = lk_cross_entropy_forward_bf16(&args, stream);
 *            A reduced loss also wants a workspace: lk_cross_entropy_forward_workspace_bytes_bf16(&args, &bytes) says of how
 *            many bytes. lk_ce_row below is the state of a row (empty, add, merge, finish) for kernels of your own.
 * Needs      lk_base.cuh, lk_block.cuh, lk_ptx.cuh.
 * Options    Zero is off, so zeroed arguments with the required fields set compute the plain loss of each row.
 *            Ignored row (use_ignore_index and target = ignore_index): it is not read; loss, z-loss, lse and entropy are 0,
 *            argmax is -1, dlogits exactly 0, whatever the row or the upstream holds. It counts nowhere.
 *            Bad target (outside [0, vocab), not ignored): loss and dlogits of the row are NaN, and so is a reduced loss; lse,
 *            z-loss, entropy and argmax are those of its logits. It counts in valid_rows, with class weight 0.
 *            Mean over nothing (D is 0): loss and z-loss are NaN, or with zero_when_empty 0 unless a row's loss is NaN; the
 *            gradients of both are 0.
 * Numerics   Sums, lse and losses are float, and built of differences to a reference of the row, never of sums of z: an offset
 *            common to all logits, 1e4 say, costs lse its digits and nothing else. A gradient is made from the lse that it is
 *            given, whose rounding is a relative error of |lse| 2^-24 in each p[j]; p[j] itself has (4 + |z - lse|) 2^-23. S
 *            sums these p[j], so dz[y] is as good even where p[y] is all but 1; with z_loss, dlse or smoothing its terms may
 *            cancel, and the error is relative to the largest. Every result is rounded to its type once.
 *            Target at -inf: loss +inf, gradient finite. -inf elsewhere: as if it were not there, 0 in the entropy; with
 *            smoothing the loss is +inf (NaN where its class weight is 0), as in PyTorch. Under softcap -inf is -softcap and
 *            +inf is softcap. A counted row whose z are all -inf, or hold +inf or NaN: loss, entropy and all of dlogits are
 *            NaN, lse is -inf, +inf, NaN.
 * Traffic    forward reads the logits once; backward reads them once and writes dlogits once. Smoothing with class weights
 *            reads class_weight along each row, backward twice.
 * Repeatable The same bits every time on the same device: fixed order, no float atomics.
 * Source     Label smoothing: Szegedy et al., 2016, as PyTorch's cross_entropy has it; z-loss: Chowdhery et al., "PaLM", 2022;
 *            softcap: Gemma 2, 2024.
 */
#ifndef LK_CROSS_ENTROPY_CUH
#define LK_CROSS_ENTROPY_CUH

#include "lk_base.cuh"

/* Which kernel runs. Every path takes every shape and every option. */
enum {
    LK_CROSS_ENTROPY_AUTO = 0,
    LK_CROSS_ENTROPY_WARP = 1,   /* a row by a team of 1 to 32 lanes, several rows a block */
    LK_CROSS_ENTROPY_BLOCK = 2,  /* a row by a block */
    LK_CROSS_ENTROPY_CLUSTER = 3 /* sm_90 and later: a row by a cluster of blocks */
};

/* What `reduction` says: PyTorch's numbers. */
enum { LK_REDUCTION_NONE = 0, LK_REDUCTION_MEAN = 1, LK_REDUCTION_SUM = 2 };

/* What `target_dtype` says. */
enum { LK_TARGET_INT64 = 0, LK_TARGET_INT32 = 1 };

typedef struct {
    const void *logits;        /* in   T [rows, vocab] */
    const void *target;        /* in   target_dtype [rows] */
    const float *class_weight; /* in   f32 [vocab]; NULL means 1 */
    float *loss;               /* out  f32 [rows], or [1] when reduced; NULL to skip */
    float *z_loss_out;         /* out  f32, the part of loss that z_loss adds: [rows], or [1] when reduced; NULL to skip */
    float *lse;                /* out  f32 [rows]; NULL to skip */
    float *entropy;            /* out  f32 [rows], in nats; NULL to skip */
    int64_t *argmax;           /* out  int64 [rows], the smallest column of the largest logit, NaN above all; NULL to skip */
    int64_t *valid_rows;       /* out  int64 [1], the number of rows counted; NULL to skip */
    float *weight_sum;         /* out  f32 [1], the sum of class_weight[target] over rows counted; NULL to skip. Some output */
    int32_t *bad_targets;      /* out  int32 [1], the number of bad targets is added to it; NULL to skip */
    void *workspace;           /* scratch of at least the queried bytes, aligned to 256; NULL when 0 */
    size_t workspace_bytes;
    int64_t rows;              /* at least 0 */
    int64_t vocab;             /* 1 to 2^30 */
    int64_t logits_stride;     /* elements between rows; 0 means packed, vocab. What lies between vocab and it is never read */
    int64_t ignore_index;      /* any value; -100 is PyTorch's */
    float logit_scale;         /* finite, at least 0; 0 means 1 */
    float softcap;             /* finite, at least 0; 0: off */
    float label_smoothing;     /* 0 to 1; 0: off */
    float z_loss;              /* the factor k; finite, at least 0; 0: off */
    int use_ignore_index;      /* not 0: rows with target = ignore_index are ignored */
    int reduction;             /* LK_REDUCTION_* */
    int zero_when_empty;       /* not 0: a mean over nothing is 0 instead of NaN */
    int target_dtype;          /* LK_TARGET_* */
    int path;                  /* LK_CROSS_ENTROPY_*; 0 chooses */
} lk_cross_entropy_forward_args;

typedef struct {
    const void *logits;        /* in   T [rows, vocab] */
    const void *target;        /* in   target_dtype [rows] */
    const float *class_weight; /* in   f32 [vocab]; NULL means 1 */
    const float *lse;          /* in   f32 [rows] from forward with the same options */
    const float *upstream;     /* in   f32 [1], or [rows] with upstream_per_row, the gradient of loss; NULL means 1 */
    const float *dlse;         /* in   f32 [rows], a gradient of lse from elsewhere, added; NULL: none */
    const int64_t *valid_rows; /* in   int64 [1] from forward; for mean, but with class weights only when z_loss is not 0 */
    const float *weight_sum;   /* in   f32 [1] from forward; for mean with class weights */
    void *dlogits;             /* out  dlogits_dtype [rows, vocab]; may be logits, with rows that start at the same bytes */
    int32_t *bad_targets;      /* out  int32 [1], the number of bad targets is added to it; NULL to skip */
    int64_t rows;              /* at least 0 */
    int64_t vocab;             /* 1 to 2^30 */
    int64_t logits_stride;     /* elements between rows; 0 means packed, vocab. What lies between vocab and it is never read */
    int64_t dlogits_stride;    /* likewise, in elements of dlogits; 0 means packed, and the rows of logits when in place */
    int64_t ignore_index;      /* any value */
    float logit_scale;         /* finite, at least 0; 0 means 1 */
    float softcap;             /* finite, at least 0; 0: off */
    float label_smoothing;     /* 0 to 1; 0: off */
    float z_loss;              /* finite, at least 0; 0: off */
    int use_ignore_index;      /* not 0: rows with target = ignore_index are ignored */
    int reduction;             /* LK_REDUCTION_* */
    int upstream_per_row;      /* not 0: upstream is [rows] */
    int zero_padding;          /* not 0: columns vocab to dlogits_stride - 1 of every row of dlogits become 0 (to
                                  logits_stride - 1 where 16-bit dlogits lie in place of f32 logits) */
    int dlogits_dtype;         /* LK_DTYPE_*: T; f16 or bf16 too when T is f32, in place then in the first half of each row */
    int target_dtype;          /* LK_TARGET_* */
    int path;                  /* LK_CROSS_ENTROPY_*; 0 chooses */
} lk_cross_entropy_backward_args;

/* Both at once: one read and one write of the logits. The fields are those of forward and backward. */
typedef struct {
    const void *logits;        /* in   T [rows, vocab] */
    const void *target;        /* in   target_dtype [rows] */
    const float *class_weight; /* in   f32 [vocab]; NULL means 1 */
    const float *upstream;     /* in   f32 [1], or [rows] with upstream_per_row, the gradient of loss; NULL means 1 */
    const float *dlse;         /* in   f32 [rows], a gradient of lse from elsewhere, added; NULL: none */
    float *loss;               /* out  f32 [rows], or [1] when reduced; NULL to skip */
    float *z_loss_out;         /* out  f32, the part of loss that z_loss adds: [rows], or [1] when reduced; NULL to skip */
    float *lse;                /* out  f32 [rows]; NULL to skip */
    float *entropy;            /* out  f32 [rows]; NULL to skip */
    int64_t *argmax;           /* out  int64 [rows]; NULL to skip */
    int64_t *valid_rows;       /* out  int64 [1]; NULL to skip */
    float *weight_sum;         /* out  f32 [1]; NULL to skip */
    void *dlogits;             /* out  dlogits_dtype [rows, vocab]; may be logits, with rows that start at the same bytes */
    int32_t *bad_targets;      /* out  int32 [1], the number of bad targets is added to it; NULL to skip */
    void *workspace;           /* scratch of at least the queried bytes, aligned to 256; NULL when 0 */
    size_t workspace_bytes;
    int64_t rows;              /* at least 0 */
    int64_t vocab;             /* 1 to 2^30 */
    int64_t logits_stride;     /* elements between rows; 0 means packed, vocab */
    int64_t dlogits_stride;    /* likewise, in elements of dlogits; 0 means packed, and the rows of logits when in place */
    int64_t ignore_index;      /* any value */
    float logit_scale;         /* finite, at least 0; 0 means 1 */
    float softcap;             /* finite, at least 0; 0: off */
    float label_smoothing;     /* 0 to 1; 0: off */
    float z_loss;              /* finite, at least 0; 0: off */
    int use_ignore_index;      /* not 0: rows with target = ignore_index are ignored */
    int reduction;             /* LK_REDUCTION_* */
    int zero_when_empty;       /* not 0: a mean over nothing is 0 instead of NaN */
    int upstream_per_row;      /* not 0: upstream is [rows] */
    int zero_padding;          /* not 0: columns from vocab on become 0, as in backward */
    int dlogits_dtype;         /* LK_DTYPE_*, as in backward */
    int target_dtype;          /* LK_TARGET_* */
    int path;                  /* LK_CROSS_ENTROPY_*; 0 chooses */
} lk_cross_entropy_forward_backward_args;

/* Errors, in the order of the checks; the forward's and the backward's alike where a field is in both:
 *   LK_ERR_NULL       args; logits; target; all eight outputs (forward); lse; dlogits; valid_rows or weight_sum where mean
 *                     needs it (backward). With rows = 0 each of them but args may be NULL
 *   LK_ERR_SHAPE      rows below 0; vocab below 1 or above 2^30; a stride that is not 0 and below vocab; logits or dlogits that
 *                     span more than 2^62 elements; dlogits = logits with rows that start at other bytes
 *   LK_ERR_VALUE      logit_scale, softcap or z_loss negative or not finite; label_smoothing outside [0, 1]; reduction,
 *                     target_dtype, path: none of the enum; dlogits_dtype: neither T nor 16 bits wide for T = f32
 *   LK_ERR_PATH       CLUSTER below sm_90; BLOCK or CLUSTER with more than 2^27 rows
 *   LK_ERR_ALIGNMENT  a pointer is not aligned to its element
 *   LK_ERR_WORKSPACE  where the query's answer is not 0: workspace_bytes below it, workspace NULL or not aligned to 256 bytes
 * Rows of any alignment run at full speed as long as those of dlogits start at the same offset modulo 16 bytes as those of
 * logits (16-bit dlogits of f32 logits: both at multiples of 16 bytes); otherwise dlogits is written element by element. */

#define LK_DECLARE_CROSS_ENTROPY(T)                                                                                            \
    LK_API lk_status lk_cross_entropy_forward_##T(const lk_cross_entropy_forward_args *args, cudaStream_t stream);             \
    LK_API lk_status lk_cross_entropy_backward_##T(const lk_cross_entropy_backward_args *args, cudaStream_t stream);           \
    LK_API lk_status lk_cross_entropy_forward_workspace_bytes_##T(const lk_cross_entropy_forward_args *args, size_t *bytes);   \
    LK_API lk_status lk_cross_entropy_backward_workspace_bytes_##T(const lk_cross_entropy_backward_args *args, size_t *bytes);

#if defined(__CUDACC__) || defined(LK_SIMT)

#include "lk_block.cuh"

/* ---- The state of a row ------------------------------------------------------------------------------------------------- */

/* What is known of a row of logits after a set of its columns, wherever they stand. The values v are the logits themselves and
 * z = scale v, so that differences of large logits are exact; only under a softcap v is z and scale 1. Every call for one row
 * is given the same scale. The reference of the sums is max where that is finite, else 0. A kernel may take another value for
 * max that is no more than 60 / scale below the largest, as those below do.
 * Two states of disjoint sets of columns merge into the state of their union: max, target and argmax exactly, sums to float
 * rounding. The empty set adds nothing. A NaN makes sum NaN, +inf makes it +inf, and -inf adds nothing to it. */
typedef struct {
    float max;      /* the largest v; -inf when empty */
    float sum;      /* sum_j exp(scale (v[j] - reference)) */
    float target;   /* v[y], set by whoever holds column y; -inf until then */
    float weights;  /* sum_j w[j], the number of columns where there are no class weights */
    float weighted; /* sum_j w[j] (v[j] - reference) */
    float entropic; /* sum_j exp(scale (v[j] - reference)) (v[j] - reference), 0 where v[j] is -inf */
    int64_t top;    /* the largest logit and its column, in an order of integers; see lk_ce_row_top */
} lk_ce_row;

/* What finish needs beside the state. */
typedef struct {
    float scale, label_smoothing, z_loss;
    float weight; /* w[y]; 1 without class weights */
    int64_t vocab;
} lk_ce_options;

/* What finish makes of it. class_loss is NaN, and entropy, where the row is all -inf or holds +inf or NaN. */
typedef struct {
    float class_loss, z_loss, lse, entropy;
    int64_t argmax; /* -1 where lk_ce_row_top was not called */
} lk_ce_result;

LK_DEVICE lk_ce_row lk_ce_row_empty(void)
{
    return {-INFINITY, 0.0f, -INFINITY, 0.0f, 0.0f, 0.0f, INT64_MIN};
}

/* The same set against a larger or equal max. */
LK_DEVICE lk_ce_row lk_ce_row_raise(lk_ce_row s, float max, float scale)
{
    const float reference = lk_lse_reference(max), shift = lk_lse_reference(s.max) - reference;
    const float factor = lk_ex2(scale * LK_LOG2E * (s.max - reference)); /* 0 for the empty set */
    s.weighted = fmaf(shift, s.weights, s.weighted);
    s.entropic = factor * fmaf(shift, s.sum, s.entropic);
    s.sum *= factor;
    s.max = max;
    return s;
}

/* Adds n values with their class weights (1 without) at the price of n + 1 exponentials; add many at a time. */
template <int n> LK_DEVICE lk_ce_row lk_ce_row_add(lk_ce_row s, const float (&v)[n], const float (&w)[n], float scale)
{
    float max = s.max;
#pragma unroll
    for (int j = 0; j < n; j++) max = fmaxf(max, v[j]);
    s = lk_ce_row_raise(s, max, scale);
    const float rate = scale * LK_LOG2E, reference = lk_lse_reference(max);
    float sum = 0.0f, weights = 0.0f, weighted = 0.0f, entropic = 0.0f;
#pragma unroll
    for (int j = 0; j < n; j++) {
        const float d = v[j] - reference, e = lk_ex2(rate * d);
        sum += e;
        weights += w[j];
        weighted = fmaf(w[j], d, weighted);
        entropic = fmaf(e, fmaxf(d, -3.402823466e38f), entropic); /* 0 times -inf counts 0 */
    }
    s.sum += sum, s.weights += weights, s.weighted += weighted, s.entropic += entropic;
    return s;
}

/* Larger logits have larger integers, NaN the largest, -0 and +0 the same. */
LK_DEVICE int32_t lk_ce_order(float x)
{
    const int32_t bits = __float_as_int(x);
    return x != x ? INT32_MAX : x == 0.0f ? 0 : bits < 0 ? bits ^ 0x7fffffff : bits;
}

/* Adds logit x of column col, 0 <= col < 2^31, to the argmax. Below its order stands the column, the smaller the larger. */
LK_DEVICE lk_ce_row lk_ce_row_top(lk_ce_row s, float x, int64_t col)
{
    const int64_t top = (int64_t)((uint64_t)(uint32_t)lk_ce_order(x) << 32 | (uint64_t)(0x7fffffff - col));
    if (top > s.top) s.top = top;
    return s;
}

LK_DEVICE lk_ce_row lk_ce_row_merge(lk_ce_row a, lk_ce_row b, float scale)
{
    const float max = fmaxf(a.max, b.max);
    a = lk_ce_row_raise(a, max, scale);
    b = lk_ce_row_raise(b, max, scale);
    a.sum += b.sum, a.weights += b.weights, a.weighted += b.weighted, a.entropic += b.entropic;
    a.target = fmaxf(a.target, b.target);
    a.top = a.top > b.top ? a.top : b.top;
    return a;
}

/* The row's results from the state of all its columns. */
LK_DEVICE lk_ce_result lk_ce_row_finish(lk_ce_row s, lk_ce_options o)
{
    const bool proper = s.sum > 0.0f && lk_is_finite(s.sum);
    const float log_sum = lk_log(s.sum), max = o.scale * s.max;
    const float above = o.scale * (s.max - s.target); /* +inf for a target at -inf */
    lk_ce_result r;
    r.lse = lk_lse_log({max, s.sum});
    if (lk_is_finite(max)) r.lse += fmaf(o.scale, s.max, -max); /* what max was rounded by */
    r.z_loss = o.z_loss > 0.0f ? o.z_loss * r.lse * r.lse : 0.0f;
    r.class_loss = o.weight * (lk_is_finite(above) ? lk_lse_log({above, s.sum}) : above);
    if (o.label_smoothing > 0.0f) {
        const float others = fmaf(s.weights, log_sum, -o.scale * s.weighted);
        r.class_loss = fmaf(1.0f - o.label_smoothing, r.class_loss, __fdiv_rn(o.label_smoothing, (float)o.vocab) * others);
    }
    r.entropy = log_sum - o.scale * __fdiv_rn(s.entropic, s.sum);
    if (!proper) r.class_loss = r.entropy = NAN;
    r.argmax = s.top == INT64_MIN ? -1 : 0x7fffffff - (int64_t)(uint32_t)s.top;
    return r;
}

/* Merges the states of `team` consecutive lanes, a power of two. All 32 lanes call it; every lane of a team gets the result.
 * all: more than max and sum, but never target, which one thread of the row looks up. */
template <bool all> LK_DEVICE lk_ce_row lk_ce_row_warp(lk_ce_row s, float scale, int team = 32)
{
    float max = s.max;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    s = lk_ce_row_raise(s, max, scale);
    s.sum = lk_sum_warp(s.sum, team);
    if (all) {
        s.weights = lk_sum_warp(s.weights, team);
        s.weighted = lk_sum_warp(s.weighted, team);
        s.entropic = lk_sum_warp(s.entropic, team);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            if (offset >= team) continue;
            const int64_t top = __shfl_xor_sync(0xffffffffu, s.top, offset);
            if (top > s.top) s.top = top;
        }
    }
    return s;
}

/* ---- What forward and backward share ------------------------------------------------------------------------------------ */

#define LK_CROSS_ENTROPY_THREADS_LOG2 8
#define LK_CROSS_ENTROPY_THREADS (1 << LK_CROSS_ENTROPY_THREADS_LOG2)

/* tanh(u) and its derivative 1 - tanh(u)^2, both to a few units in the last place; the polynomial is a least-maximum fit. */
LK_DEVICE float lk_ce_tanh(float u, float *slope)
{
    const float e = lk_exp(-2.0f * fabsf(u)), inverse = __fdividef(1.0f, 1.0f + e), square = u * u;
    *slope = 4.0f * e * inverse * inverse;
    const float p = fmaf(fmaf(fmaf(0.019268046f, square, -0.0537151214f), square, 0.133325321f), square, -0.333333293f);
    return fabsf(u) < 0.4f ? fmaf(u * square, p, u) : copysignf((1.0f - e) * inverse, u);
}

/* z of logit x under a softcap. */
LK_DEVICE float lk_ce_cap(float x, float logit_scale, float softcap, float *slope)
{
    return softcap * lk_ce_tanh(x * __fdiv_rn(logit_scale, softcap), slope);
}

/* What a row's target says. */
typedef struct {
    int y;             /* the target, -1 where it is ignored or bad */
    bool counted, bad; /* bad: counted, and outside [0, vocab) */
} lk_ce_label;

template <class Args> LK_DEVICE lk_ce_label lk_ce_look_up(const Args &a, int64_t row)
{
    const int64_t y = a.target_dtype == LK_TARGET_INT32 ? ((const int32_t *)a.target)[row] : ((const int64_t *)a.target)[row];
    const bool counted = !(a.use_ignore_index && y == a.ignore_index), good = y >= 0 && y < a.vocab;
    return {counted && good ? (int)y : -1, counted, counted && !good};
}

/* ---- Forward ------------------------------------------------------------------------------------------------------------ */

/* Plain rows (nothing but loss, z-loss and lse, without smoothing and softcap) are summed against a reference, a value of the
 * thread's share itself, and not against a running maximum: an element costs a multiply-add, an ex2 and an addition,
 * sum 2^(rate v - base) with rate = logit_scale log2 e and base = rate reference, rounded. A sum of floats does not care that
 * its terms are large as long as it stays below LK_CROSS_ENTROPY_LIMIT. Where it does not, or where there is a NaN or +inf, or
 * nothing but -inf in the first vector, the share is read again with a running maximum, as all other rows are at once. */
#define LK_CROSS_ENTROPY_LIMIT 0x1p80f

typedef struct {
    lk_cross_entropy_forward_args a; /* loss and z_loss_out are [rows] here: the caller's, or of the workspace */
    int team_log2;                   /* a row has 1 << team_log2 threads: up to 32, or all of a block or a cluster */
    int apart;                       /* not 0: loss holds the class term alone */
} lk_cross_entropy_forward_plan;

/* sum_j 2^(rate v_j - base) over a vector, added pairwise. */
template <class T> LK_DEVICE float lk_ce_terms(lk_vec<T> raw, float rate, float base)
{
    float v[LK_VEC<T>];
    lk_unpack(v, raw);
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++) v[j] = lk_ex2(fmaf(rate, v[j], -base));
#pragma unroll
    for (int half = LK_VEC<T> / 2; half > 0; half /= 2)
#pragma unroll
        for (int j = 0; j < half; j++) v[j] += v[j + half];
    return v[0];
}

/* Adds the logits x of columns col, col + 1, ... to the state. */
template <bool plain, int n>
LK_DEVICE lk_ce_row lk_ce_take(lk_ce_row s, const float (&x)[n], int64_t col, const lk_cross_entropy_forward_args &a)
{
    float v[n], w[n], slope;
#pragma unroll
    for (int j = 0; j < n; j++) v[j] = x[j], w[j] = 1.0f;
    if (plain) return lk_ce_row_add(s, v, w, a.logit_scale);
    if (a.class_weight && a.label_smoothing > 0.0f) {
#pragma unroll
        for (int j = 0; j < n; j++) w[j] = a.class_weight[col + j];
    }
    if (a.argmax) { /* few vectors hold a new largest logit */
        float most = x[0];
        bool nan = false;
#pragma unroll
        for (int j = 0; j < n; j++) most = fmaxf(most, x[j]), nan |= x[j] != x[j];
        if (nan || lk_ce_order(most) >= (int32_t)(s.top >> 32)) {
#pragma unroll
            for (int j = 0; j < n; j++) s = lk_ce_row_top(s, x[j], col + j);
        }
    }
    if (a.softcap > 0.0f) {
#pragma unroll
        for (int j = 0; j < n; j++) v[j] = lk_ce_cap(x[j], a.logit_scale, a.softcap, &slope);
        return lk_ce_row_add(s, v, w, 1.0f);
    }
    return lk_ce_row_add(s, v, w, a.logit_scale);
}

/* The max and sum of a share's vectors with a running maximum. */
template <class T> LK_NOINLINE lk_lse lk_ce_read_slowly(const T *next, int count, int64_t step, float scale)
{
    lk_ce_row s = lk_ce_row_empty();
    for (int i = 0; i < count; i++, next += step) {
        float v[LK_VEC<T>], w[LK_VEC<T>] = {};
        lk_unpack(v, lk_load_vec(next));
        s = lk_ce_row_add(s, v, w, scale);
    }
    return {s.max, s.sum};
}

/* The max and sum of a plain share: `count` vectors, `step` elements apart, of which raw holds the first U. U loads are always
 * in flight: each vector is used and the next one loaded into its registers. */
template <class T, int U>
LK_DEVICE lk_lse lk_ce_read(lk_vec<T> (&raw)[U], const T *first, int count, int64_t step, float scale)
{
    const float rate = scale * LK_LOG2E;
    float v[LK_VEC<T>], reference = -INFINITY;
    lk_unpack(v, raw[0]);
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++) reference = fmaxf(reference, v[j]);
    const float base = rate * reference;
    float sum = 0.0f, lost = 0.0f, part = 0.0f;
    const T *next = first + U * step;
    int left = count;
    while (left > U) {
        for (const int stop = left > 17 * U ? left - 16 * U : U; left > stop; left -= U) {
#pragma unroll
            for (int u = 0; u < U; u++, next += step) {
                part += lk_ce_terms(raw[u], rate, base);
                if (U + u < left) raw[u] = lk_load_vec(next);
            }
        }
        part -= lost; /* Kahan's sum, now and then: what the additions of a long row round off is taken along */
        const float grown = sum + part;
        lost = (grown - sum) - part;
        sum = grown, part = 0.0f;
    }
#pragma unroll
    for (int u = 0; u < U; u++)
        if (u < left) part += lk_ce_terms(raw[u], rate, base);
    sum += part - lost;
    if (count == 0) return {-INFINITY, 0.0f};
    /* base differs from rate reference by a rounding error, which is known exactly. */
    if (lk_is_finite(base) && sum < LK_CROSS_ENTROPY_LIMIT) return {reference, sum * lk_ex2(-fmaf(rate, reference, -base))};
    return lk_ce_read_slowly(first, count, step, scale);
}

/* Brings one state a warp together. Who calls: every thread of a block of THREADS, or of a cluster of such blocks, once a
 * kernel, with a state that is its warp's; before it, anywhere, lk_cluster_begin(). Who holds the result, blocks * THREADS / 32
 * states: the first warp of the block with rank 0; the others get NULL. A peer may end after the call. */
template <int THREADS, class State> LK_DEVICE const State *lk_ce_collect(State s)
{
    constexpr int WARPS = THREADS / 32;
    LK_SHARED(State, inbox, [8 * WARPS]);
    const int blocks = (int)lk_cluster_nctarank(), rank = (int)lk_cluster_ctarank(), warp = (int)threadIdx.x / 32;
    State *slot = &inbox[rank * WARPS + warp];
    if (blocks > 1) {
        lk_barrier_cluster_wait(); /* the block with rank 0 runs, so that its memory may be written */
        slot = (State *)lk_mapa(slot, 0);
    }
    if (threadIdx.x % 32 == 0) *slot = s;
    if (blocks > 1) {
        lk_barrier_cluster_arrive(); /* orders the writes into the inbox before its reads */
        if (rank != 0) return NULL;
        lk_barrier_cluster_wait();
    } else {
        __syncthreads(); /* likewise */
    }
    return warp == 0 ? inbox : NULL;
}

/* Writes a row's results; one thread of the row. weight: w[y]. */
LK_DEVICE void lk_ce_put(const lk_cross_entropy_forward_plan &p, int64_t row, lk_ce_label label, float weight, lk_ce_row s)
{
    const lk_cross_entropy_forward_args &a = p.a;
    const lk_ce_options options = {a.softcap > 0.0f ? 1.0f : a.logit_scale, a.label_smoothing, a.z_loss, weight, a.vocab};
    lk_ce_result r = {0.0f, 0.0f, 0.0f, 0.0f, -1};
    if (label.counted) r = lk_ce_row_finish(s, options);
    if (label.bad) r.class_loss = NAN;
    if (label.bad && a.bad_targets) atomicAdd(a.bad_targets, 1);
    if (a.loss) a.loss[row] = p.apart ? r.class_loss : r.class_loss + r.z_loss;
    if (a.z_loss_out) a.z_loss_out[row] = r.z_loss;
    if (a.lse) a.lse[row] = r.lse;
    if (a.entropy) a.entropy[row] = r.entropy;
    if (a.argmax) a.argmax[row] = r.argmax;
}

/* What a thread puts into shared memory while the row is read, since registers are for loads: what only the thread with rank 0
 * needs, the target and its logit and class weight, and how the row splits, with the thread's first single element. */
typedef struct {
    lk_ce_label label;
    float target, weight, single;
    lk_split split;
} lk_ce_aside;

/* A team of threads owns a row: up to 32 lanes of a warp, a block, or a cluster of blocks. */
template <class T, int U, int BLOCKS, bool plain>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_THREADS, BLOCKS)
    lk_cross_entropy_forward_kernel(lk_cross_entropy_forward_plan p)
{
    const lk_cross_entropy_forward_args &a = p.a;
    const int team = 1 << p.team_log2;
    const int64_t thread = (int64_t)blockIdx.x * LK_CROSS_ENTROPY_THREADS + threadIdx.x, row = thread >> p.team_log2;
    const int rank = (int)thread & (team - 1), step = team * LK_VEC<T>;
    const T *logits = (const T *)a.logits + row * a.logits_stride;
    LK_SHARED(lk_ce_aside, asides, [LK_CROSS_ENTROPY_THREADS]);
    lk_ce_aside *aside = &asides[threadIdx.x];
    lk_cluster_begin();
    lk_griddepcontrol_wait();
    lk_ce_aside own = {{-1, false, false}, -INFINITY, 1.0f, 0.0f, {}};
    if (row < a.rows) own.label = lk_ce_look_up(a, row); /* lanes without a row still take part in the warp's reduction */
    if (own.label.counted) own.split = lk_split_row(logits, a.vocab);
    if (rank == 0 && own.label.y >= 0) {
        own.target = lk_to_float(logits[own.label.y]);
        if (a.class_weight) own.weight = a.class_weight[own.label.y];
    }
    const int vecs = (int)own.split.vecs, count = (vecs >> p.team_log2) + (rank < (vecs & (team - 1)));
    const T *first = logits + own.split.head + rank * LK_VEC<T>;
    lk_vec<T> raw[U];
#pragma unroll
    for (int u = 0; u < U; u++)
        if (u < count) raw[u] = lk_load_vec(first + u * step);
    if (rank < own.split.edge) own.single = lk_to_float(logits[lk_edge_col<T>(own.split, rank)]);
    *aside = own;

    lk_ce_row s = lk_ce_row_empty();
    if constexpr (plain) {
        const lk_lse read = lk_ce_read(raw, first, count, step, a.logit_scale);
        s.max = read.max, s.sum = read.sum;
    } else {
        int col = own.split.head + rank * LK_VEC<T>;
        for (int left = count; left > 0; left -= U) {
#pragma unroll
            for (int u = 0; u < U; u++, col += step) {
                if (u >= left) break;
                float x[LK_VEC<T>];
                lk_unpack(x, raw[u]);
                if (U + u < left) raw[u] = lk_load_vec(logits + col + U * step);
                s = lk_ce_take<plain>(s, x, col, a);
            }
        }
    }
    for (int i = rank; i < aside->split.edge; i += team) {
        const int64_t col = lk_edge_col<T>(aside->split, i);
        const float single[1] = {i == rank ? aside->single : lk_to_float(logits[col])};
        s = lk_ce_take<plain>(s, single, col, a);
    }
    lk_griddepcontrol_launch_dependents();

    const float scale = !plain && a.softcap > 0.0f ? 1.0f : a.logit_scale;
    s = lk_ce_row_warp<!plain>(s, scale, team < 32 ? team : 32);
    if (team > 32) {
        const int states = team / 32;
        lk_ce_row all = lk_ce_row_empty();
        if constexpr (plain) {
            const lk_lse *inbox = lk_ce_collect<LK_CROSS_ENTROPY_THREADS>(lk_lse{s.max, s.sum});
            if (!inbox) return;
            for (int i = rank; i < states; i += 32) {
                s.max = inbox[i].max, s.sum = inbox[i].sum;
                all = lk_ce_row_merge(all, s, scale);
            }
        } else {
            const lk_ce_row *inbox = lk_ce_collect<LK_CROSS_ENTROPY_THREADS>(s);
            if (!inbox) return;
            for (int i = rank; i < states; i += 32) all = lk_ce_row_merge(all, inbox[i], scale);
        }
        s = lk_ce_row_warp<!plain>(all, scale);
    }
    if (rank != 0 || row >= a.rows) return;
    float slope;
    s.target = !plain && a.softcap > 0.0f ? lk_ce_cap(aside->target, a.logit_scale, a.softcap, &slope) : aside->target;
    lk_ce_put(p, row, aside->label, aside->weight, s);
}

/* The sums over all rows, by one block or one cluster, started behind the row kernel: a second launch costs no more than having
 * the last block of the first find out that it is the last, and needs no counter that somebody must have set to 0. */
typedef struct {
    lk_cross_entropy_forward_args a; /* as the caller gave them */
    const float *row_loss, *row_z;   /* f32 [rows], the terms of each row; NULL: 0 */
} lk_cross_entropy_sum_plan;

typedef struct {
    float loss, z, weight;
    int64_t count;
} lk_ce_sums;

LK_DEVICE lk_ce_sums lk_ce_sums_warp(lk_ce_sums s)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) s.count += __shfl_xor_sync(0xffffffffu, s.count, offset);
    return {lk_sum_warp(s.loss), lk_sum_warp(s.z), lk_sum_warp(s.weight), s.count};
}

template <int THREADS> LK_KERNEL void __launch_bounds__(THREADS) lk_cross_entropy_sum_kernel(lk_cross_entropy_sum_plan p)
{
    const lk_cross_entropy_forward_args &a = p.a;
    const int threads = (int)lk_cluster_nctarank() * THREADS, rank = (int)lk_cluster_ctarank() * THREADS + (int)threadIdx.x;
    lk_cluster_begin();
    lk_griddepcontrol_wait();
    lk_ce_sums s = {};
    int count = 0;
#pragma unroll 8
    for (int64_t row = rank; row < a.rows; row += threads) {
        const lk_ce_label label = lk_ce_look_up(a, row);
        if (p.row_loss) s.loss += p.row_loss[row];
        if (p.row_z) s.z += p.row_z[row];
        if (a.class_weight && label.y >= 0) s.weight += a.class_weight[label.y];
        count += label.counted;
    }
    s.count = count;
    lk_griddepcontrol_launch_dependents();
    const lk_ce_sums *inbox = lk_ce_collect<THREADS>(lk_ce_sums_warp(s));
    if (!inbox) return;
    s = {};
    for (int i = rank; i < threads / 32; i += 32)
        s = {s.loss + inbox[i].loss, s.z + inbox[i].z, s.weight + inbox[i].weight, s.count + inbox[i].count};
    s = lk_ce_sums_warp(s);
    if (rank != 0) return;
    const float valid = (float)s.count, over = a.class_weight ? s.weight : valid;
    if (a.reduction == LK_REDUCTION_MEAN) {
        const float nothing = a.zero_when_empty ? 0.0f : NAN;
        if (over != 0.0f) s.loss = __fdiv_rn(s.loss, over), s.z = __fdiv_rn(s.z, valid);
        else s.loss = s.loss != s.loss ? s.loss : nothing, s.z = s.z != s.z ? s.z : nothing;
    }
    if (a.reduction != LK_REDUCTION_NONE && a.loss) *a.loss = s.loss + s.z;
    if (a.reduction != LK_REDUCTION_NONE && a.z_loss_out) *a.z_loss_out = s.z;
    if (a.valid_rows) *a.valid_rows = s.count;
    if (a.weight_sum) *a.weight_sum = a.class_weight ? s.weight : valid;
}

/* ---- Backward ----------------------------------------------------------------------------------------------------------- */

/* Vectors a thread keeps in flight. */
#define LK_CROSS_ENTROPY_BACKWARD_U 4

typedef struct {
    lk_cross_entropy_backward_args a;
    int team_log2;      /* as in forward */
    int ordered;        /* not 0: 16-bit dlogits in place of f32 logits */
    int64_t padded_end; /* columns vocab to padded_end - 1 of dlogits become 0 */
} lk_cross_entropy_backward_plan;

/* What one row's gradient needs, logit_scale included: dlogits[j] = (rise p[j] - fall w[j]) slope[j] for j != y, where
 * p[j] = exp(scale v[j] - lse), with v = z and scale = 1 under a softcap, and slope is 1 without one. In a row that is all 0 or
 * NaN p is 1 and rise is that. */
typedef struct {
    float scale, lse, rise, fall;
} lk_ce_gradient;

/* What a thread puts into shared memory while the row is streamed, since registers are for loads: the terms of the target's
 * gradient, dlogits[y] = (own p[y] - rest S + fixed) slope[y], y or -1 where no column is special, logit y for who has it, else
 * 0, how the row splits, with the thread's first single element, and where its gradients are. */
typedef struct {
    float own, rest, fixed, logit, single;
    int y;
    lk_split split;
    void *dlogits;
} lk_ce_backward_aside;

/* weights: W. */
template <bool plain>
LK_DEVICE lk_ce_gradient lk_ce_prepare(const lk_cross_entropy_backward_args &a, int64_t row, lk_ce_label label, float weights,
                                       lk_ce_backward_aside *aside)
{
    lk_ce_gradient g = {};
    if (!label.counted) return g;
    const float lse = a.lse[row];
    if (label.bad || !lk_is_finite(lse)) {
        g.rise = NAN;
        return g;
    }
    const float upstream = a.upstream ? a.upstream[a.upstream_per_row ? row : 0] : 1.0f;
    const float weight = a.class_weight ? a.class_weight[label.y] : 1.0f, e = a.label_smoothing;
    float f = upstream, h = upstream;
    if (a.reduction == LK_REDUCTION_MEAN) {
        const float valid = a.valid_rows ? (float)*a.valid_rows : 1.0f, over = a.class_weight ? *a.weight_sum : valid;
        f = over != 0.0f ? __fdiv_rn(upstream, over) : 0.0f;
        h = over != 0.0f ? __fdiv_rn(upstream, valid) : 0.0f;
    }
    f *= a.logit_scale, h *= a.logit_scale;
    aside->y = label.y;
    g.lse = lse;
    g.scale = !plain && a.softcap > 0.0f ? 1.0f : a.logit_scale;
    g.fall = f * __fdiv_rn(e, (float)a.vocab);
    aside->rest = fmaf(f * (1.0f - e), weight, g.fall * weights);
    aside->own = (a.z_loss > 0.0f ? 2.0f * a.z_loss * lse * h : 0.0f) + (a.dlse ? a.logit_scale * a.dlse[row] : 0.0f);
    aside->fixed = g.fall * (weights - weight);
    g.rise = aside->rest + aside->own;
    return g;
}

/* The logits x of columns col, col + 1, ... become their gradients, and sum gets their p but p[y]. */
template <bool plain, int n>
LK_DEVICE void lk_ce_differentiate(float (&x)[n], const lk_ce_gradient &g, const lk_cross_entropy_backward_args &a, int64_t col,
                                   int hit, float *sum)
{
    float part[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < n; j++) {
        float slope = 1.0f, fall = g.fall;
        if (!plain && a.softcap > 0.0f) x[j] = lk_ce_cap(x[j], a.logit_scale, a.softcap, &slope);
        if (!plain && a.class_weight && g.fall != 0.0f) fall *= a.class_weight[col + j];
        const float p = j == hit ? 0.0f : lk_exp(fmaf(g.scale, x[j], -g.lse));
        part[j % 2] += p;
        x[j] = fmaf(g.rise, p, -fall) * slope;
    }
    *sum += part[0] + part[1];
}

/* Stores n neighbouring gradients, 16 bytes of them or 8; wide: at an address that is a multiple of that. */
template <class D, int n> LK_DEVICE void lk_ce_store(D *out, const float (&x)[n], bool wide)
{
    float full[LK_VEC<D>];
    lk_vec<D> packed;
#pragma unroll
    for (int j = 0; j < LK_VEC<D>; j++) full[j] = x[j % n];
    lk_pack(&packed, full);
    if (wide && n == LK_VEC<D>) lk_store_vec(out, packed);
    else if (wide) __stcs((uint2 *)out, make_uint2(packed.raw.x, packed.raw.y));
#pragma unroll
    for (int j = 0; !wide && j < n; j++) lk_put(out + j, x[j]);
}

/* A barrier of the threads of a row. */
LK_DEVICE void lk_ce_sync(int team)
{
    if (team <= 32) {
        __syncwarp();
    } else if (lk_cluster_nctarank() > 1) {
        lk_barrier_cluster_arrive(); /* orders what the caller says */
        lk_barrier_cluster_wait();
    } else {
        __syncthreads(); /* likewise */
    }
}

/* Sums over the threads of a row; every one gets them. */
template <int N> LK_DEVICE void lk_ce_sum(float (&v)[N], int team)
{
    if (team > 32) {
        lk_sum_cluster(v, 0);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = lk_sum_warp(v[i], team);
    }
}

/* A team of threads owns a row: up to 32 lanes of a warp, a block, or a cluster of blocks. They stream it, and when all of it
 * is stored, the thread with rank 0 writes the target's element. 16-bit gradients in place of f32 logits lie where earlier
 * steps or this one have read, so a barrier a step keeps the writes behind the reads. */
template <class T, class D, bool plain>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_THREADS, plain && sizeof(T) < 4 ? 4 : 3)
    lk_cross_entropy_backward_kernel(lk_cross_entropy_backward_plan p)
{
    constexpr int U = LK_CROSS_ENTROPY_BACKWARD_U, N = LK_VEC<T>;
    const lk_cross_entropy_backward_args &a = p.a;
    const int team = 1 << p.team_log2;
    const int64_t thread = (int64_t)blockIdx.x * LK_CROSS_ENTROPY_THREADS + threadIdx.x, row = thread >> p.team_log2;
    const int rank = (int)thread & (team - 1);
    const T *logits = (const T *)a.logits + row * a.logits_stride;
    D *dlogits = (D *)a.dlogits + row * a.dlogits_stride;
    const int steps = (int)a.vocab / N / (team * U); /* and one: the same for all rows, whatever their alignment */
    LK_SHARED(lk_ce_backward_aside, asides, [LK_CROSS_ENTROPY_THREADS]);
    lk_ce_backward_aside *aside = &asides[threadIdx.x];
    lk_cluster_begin();
    lk_griddepcontrol_wait();
    lk_ce_label label = {-1, false, false};
    lk_split split = {};
    if (row < a.rows) { /* threads without a row take part in barriers and sums */
        label = lk_ce_look_up(a, row);
        split = lk_split_row(logits, a.vocab);
    }
    const bool read = label.y >= 0, wide = (uintptr_t)(dlogits + split.head) % (N * sizeof(D)) == 0;
    const int jump = team * N, vecs = (int)split.vecs;
    const T *next = logits + split.head + rank * N;
    lk_vec<T> raw[U] = {};
    float single[1] = {0.0f}, logit = 0.0f, sum = 0.0f;
#pragma unroll
    for (int u = 0; u < U; u++, next += jump)
        if (read && rank + u * team < vecs) raw[u] = lk_load_vec(next);
    if (read && rank < split.edge) single[0] = lk_to_float(logits[lk_edge_col<T>(split, rank)]);
    const int inner = label.y - split.head; /* whoever overwrites the target's logit reads it before */
    if (inner >= 0 && inner / N < vecs && (inner / N & (team - 1)) == rank) logit = lk_to_float(logits[label.y]);
    lk_cluster_ready();
    float weights[1] = {(float)a.vocab};
    if (!plain && a.class_weight && a.label_smoothing > 0.0f) {
        weights[0] = 0.0f;
        for (int64_t col = rank; col < a.vocab; col += team) weights[0] += a.class_weight[col];
        lk_ce_sum(weights, team);
    }
    lk_ce_gradient g = {};
    aside->y = -1;
    if (row < a.rows) g = lk_ce_prepare<plain>(a, row, label, weights[0], aside);
    aside->logit = logit, aside->single = single[0], aside->split = split, aside->dlogits = dlogits;
    const int col = split.head + rank * N;
    int left = (vecs >> p.team_log2) + (rank < (vecs & (team - 1))), hit = aside->y - col;
    D *out = dlogits + col;
    for (int step = steps; step >= 0; step--, left -= U) {
        if (p.ordered) lk_ce_sync(team); /* the logits that lie where this step writes have been read */
#pragma unroll
        for (int u = 0; u < U; u++, next += jump, out += jump, hit -= jump) {
            if (u >= left) break;
            float x[N];
            lk_unpack(x, raw[u]);
            if (read && U + u < left) raw[u] = lk_load_vec(next);
            /* Two copies, since all vectors but one of a row's need not look which of their elements is the target. */
            if ((unsigned)hit < (unsigned)N) lk_ce_differentiate<plain>(x, g, a, out - dlogits, hit, &sum);
            else lk_ce_differentiate<plain>(x, g, a, out - dlogits, -1, &sum);
            lk_ce_store(out, x, wide);
        }
    }
    split = aside->split, dlogits = (D *)aside->dlogits;
    const int y = aside->y;
    for (int i = rank; i < split.edge; i += team) {
        const int at = (int)lk_edge_col<T>(split, i);
        single[0] = i == rank || !read ? aside->single : lk_to_float(((const T *)a.logits + row * a.logits_stride)[at]);
        if (at == y) aside->logit = single[0];
        lk_ce_differentiate<plain>(single, g, a, at, y - at, &sum);
        lk_put(dlogits + at, single[0]);
    }
    if (row < a.rows)
        for (int64_t end = a.vocab + rank; end < p.padded_end; end += team) lk_put(dlogits + end, 0.0f);
    lk_griddepcontrol_launch_dependents();
    float sums[2] = {sum, aside->logit};
    lk_ce_sum(sums, team);
    if (team <= 32) __syncwarp(); /* as lk_ce_sum's barrier in a block: the row is stored before its target is */
    if (rank != 0 || row >= a.rows) return;
    if (a.bad_targets && lk_ce_look_up(a, row).bad) atomicAdd(a.bad_targets, 1);
    if (y < 0) return;
    float slope = 1.0f, v = sums[1];
    if (!plain && a.softcap > 0.0f) v = lk_ce_cap(v, a.logit_scale, a.softcap, &slope);
    v = fmaf(aside->own, lk_exp(fmaf(g.scale, v, -g.lse)), aside->fixed) - aside->rest * sums[0];
    lk_put(dlogits + y, v * slope);
}

/* ---- Launchers ---------------------------------------------------------------------------------------------------------- */

#define LK_CROSS_ENTROPY_ROWS ((int64_t)1 << 27) /* most rows of the paths that give each its blocks */

LK_HOST lk_status lk_cross_entropy_check_null(const char *op, const char *field, const void *pointer)
{
    return pointer ? LK_OK : lk_fail(LK_ERR_NULL, op, "%s is NULL", field);
}

LK_HOST lk_status lk_cross_entropy_check_aligned(const char *op, const char *field, const void *pointer, size_t bytes)
{
    if ((uintptr_t)pointer % bytes == 0) return LK_OK;
    return lk_fail(LK_ERR_ALIGNMENT, op, "%s is not aligned to its element of %d bytes", field, (int)bytes);
}

LK_HOST lk_status lk_cross_entropy_check_option(const char *op, const char *field, float value)
{
    if (value >= 0.0f && value <= 3.402823466e38f) return LK_OK;
    return lk_fail(LK_ERR_VALUE, op, "%s is %g; it must be finite and at least 0", field, (double)value);
}

/* Fills in a packed stride and checks it; the field is `name`_stride. */
LK_HOST lk_status lk_cross_entropy_check_stride(const char *op, const char *name, int64_t rows, int64_t vocab, int64_t *stride)
{
    if (*stride == 0) *stride = vocab;
    if (*stride < vocab)
        return lk_fail(LK_ERR_SHAPE, op, "%s_stride is %lld; it must be 0 or at least vocab, %lld", name, (long long)*stride,
                       (long long)vocab);
    __extension__ const __int128 span = (__int128)rows * *stride;
    if (span <= (__int128)1 << 62) return LK_OK;
    return lk_fail(LK_ERR_SHAPE, op, "%s with %s_stride %lld spans more than 2^62 elements", name, name, (long long)*stride);
}

template <class Args> LK_HOST lk_status lk_cross_entropy_check_sizes(const char *op, Args *a)
{
    if (a->rows < 0) return lk_fail(LK_ERR_SHAPE, op, "rows is %lld; it must be at least 0", (long long)a->rows);
    if (a->vocab < 1 || a->vocab > 1 << 30)
        return lk_fail(LK_ERR_SHAPE, op, "vocab is %lld; it must be 1 to 2^30", (long long)a->vocab);
    return lk_cross_entropy_check_stride(op, "logits", a->rows, a->vocab, &a->logits_stride);
}

/* The values that forward and backward both have, but path, which comes last. */
template <class Args> LK_HOST lk_status lk_cross_entropy_check_values(const char *op, const Args *a)
{
    lk_status status = lk_cross_entropy_check_option(op, "logit_scale", a->logit_scale);
    if (!status) status = lk_cross_entropy_check_option(op, "softcap", a->softcap);
    if (!status) status = lk_cross_entropy_check_option(op, "z_loss", a->z_loss);
    if (status) return status;
    if (!(a->label_smoothing >= 0.0f && a->label_smoothing <= 1.0f))
        return lk_fail(LK_ERR_VALUE, op, "label_smoothing is %g; it must be 0 to 1", (double)a->label_smoothing);
    if (a->reduction < LK_REDUCTION_NONE || a->reduction > LK_REDUCTION_SUM)
        return lk_fail(LK_ERR_VALUE, op, "reduction is %d; it must be one of LK_REDUCTION_*", a->reduction);
    if (a->target_dtype != LK_TARGET_INT64 && a->target_dtype != LK_TARGET_INT32)
        return lk_fail(LK_ERR_VALUE, op, "target_dtype is %d; it must be one of LK_TARGET_*", a->target_dtype);
    return LK_OK;
}

template <class Args> LK_HOST lk_status lk_cross_entropy_check_path(const char *op, const Args *a, int arch)
{
    if (a->path < LK_CROSS_ENTROPY_AUTO || a->path > LK_CROSS_ENTROPY_CLUSTER)
        return lk_fail(LK_ERR_VALUE, op, "path is %d; it must be one of LK_CROSS_ENTROPY_*", a->path);
    if (a->path == LK_CROSS_ENTROPY_CLUSTER && arch < 90)
        return lk_fail(LK_ERR_PATH, op, "path %d (cluster) needs sm_90 or later", a->path);
    if (a->path > LK_CROSS_ENTROPY_WARP && a->rows > LK_CROSS_ENTROPY_ROWS)
        return lk_fail(LK_ERR_PATH, op, "path %d takes 2^27 rows at most; rows is %lld", a->path, (long long)a->rows);
    return LK_OK;
}

/* Validates; a becomes the arguments with every default filled in. arch: of the device, 90 where it does not matter. */
template <class T>
LK_HOST lk_status lk_cross_entropy_forward_check(const char *op, const lk_cross_entropy_forward_args *args, int arch,
                                                 lk_cross_entropy_forward_args *a)
{
    if (!args) return lk_fail(LK_ERR_NULL, op, "args is NULL");
    *a = *args;
    lk_status status = LK_OK;
    if (a->rows != 0) {
        status = lk_cross_entropy_check_null(op, "logits", a->logits);
        if (!status) status = lk_cross_entropy_check_null(op, "target", a->target);
        const bool any = a->loss || a->z_loss_out || a->lse || a->entropy || a->argmax || a->valid_rows || a->weight_sum ||
                         a->bad_targets;
        if (!status && !any) status = lk_fail(LK_ERR_NULL, op, "every output is NULL");
    }
    if (!status) status = lk_cross_entropy_check_sizes(op, a);
    if (!status) status = lk_cross_entropy_check_values(op, a);
    if (!status) status = lk_cross_entropy_check_path(op, a, arch);
    if (!status) status = lk_cross_entropy_check_aligned(op, "logits", a->logits, sizeof(T));
    if (!status) status = lk_cross_entropy_check_aligned(op, "target", a->target, a->target_dtype == LK_TARGET_INT32 ? 4 : 8);
    if (!status) status = lk_cross_entropy_check_aligned(op, "class_weight", a->class_weight, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "loss", a->loss, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "z_loss_out", a->z_loss_out, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "lse", a->lse, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "entropy", a->entropy, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "argmax", a->argmax, 8);
    if (!status) status = lk_cross_entropy_check_aligned(op, "valid_rows", a->valid_rows, 8);
    if (!status) status = lk_cross_entropy_check_aligned(op, "weight_sum", a->weight_sum, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "bad_targets", a->bad_targets, 4);
    if (a->logit_scale == 0.0f) a->logit_scale = 1.0f;
    return status;
}

/* Bytes of one [rows] array in the workspace, and how many a reduced loss wants: the class terms, and those of z_loss. */
LK_HOST size_t lk_cross_entropy_array_bytes(const lk_cross_entropy_forward_args *a)
{
    return (size_t)lk_ceil_div(a->rows * (int64_t)sizeof(float), 256) * 256;
}
LK_HOST size_t lk_cross_entropy_forward_bytes(const lk_cross_entropy_forward_args *a)
{
    if (a->reduction == LK_REDUCTION_NONE) return 0;
    const int arrays = (a->loss != NULL) + (a->z_loss > 0.0f && (a->loss || a->z_loss_out));
    return lk_cross_entropy_array_bytes(a) * (size_t)arrays;
}

template <class T>
LK_HOST lk_status lk_cross_entropy_forward_workspace(const char *op, const lk_cross_entropy_forward_args *args, size_t *bytes)
{
    lk_cross_entropy_forward_args a = {};
    const lk_status status = lk_cross_entropy_forward_check<T>(op, args, 90, &a);
    if (!status && bytes) *bytes = lk_cross_entropy_forward_bytes(&a);
    return status;
}

/* The path where the caller leaves it open, and the threads of a row: lanes until each has `each` vectors. */
template <class T, class Args>
LK_HOST int lk_cross_entropy_team(const lk_device *device, const Args *a, int64_t warp_bytes, int each, int *cluster)
{
    const int64_t lanes = lk_ceil_div(a->vocab, each * LK_VEC<T>);
    int path = a->path, team_log2 = 0;
    if (path == LK_CROSS_ENTROPY_AUTO) {
        if (a->vocab * (int64_t)sizeof(T) <= warp_bytes || a->rows > LK_CROSS_ENTROPY_ROWS) path = LK_CROSS_ENTROPY_WARP;
        else path = a->rows < 2 * device->sms && device->arch >= 90 ? LK_CROSS_ENTROPY_CLUSTER : LK_CROSS_ENTROPY_BLOCK;
    }
    *cluster = 1;
    if (path == LK_CROSS_ENTROPY_WARP) {
        while (team_log2 < 5 && 1 << team_log2 < lanes) team_log2++;
        return team_log2;
    }
    if (path == LK_CROSS_ENTROPY_CLUSTER)
        for (*cluster = 2; *cluster < 8 && a->rows * *cluster < 2 * device->sms;) *cluster *= 2;
    for (team_log2 = LK_CROSS_ENTROPY_THREADS_LOG2; LK_CROSS_ENTROPY_THREADS * *cluster > 1 << team_log2;) team_log2++;
    return team_log2;
}

LK_HOST int64_t lk_cross_entropy_grid(int64_t rows, int team_log2) /* logits would not fit above 2^31 - 1 */
{
    const int over = team_log2 - LK_CROSS_ENTROPY_THREADS_LOG2;
    return over >= 0 ? rows << over : lk_ceil_div(rows, 1 << -over);
}

/* The row kernel where a row's output is wanted, then the sum kernel where a sum is. */
template <class T>
LK_HOST lk_status lk_cross_entropy_forward(const char *op, const lk_cross_entropy_forward_args *args, cudaStream_t stream)
{
    lk_cross_entropy_forward_args a = {};
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    lk_status status = lk_cross_entropy_forward_check<T>(op, args, error ? 90 : device.arch, &a);
    if (status) return status;
    if (error) return lk_launched(op, error);
    const size_t bytes = lk_cross_entropy_forward_bytes(&a);
    if (bytes && (!a.workspace || (uintptr_t)a.workspace % 256 || a.workspace_bytes < bytes))
        return lk_fail(LK_ERR_WORKSPACE, op, "workspace must be %zu bytes at a multiple of 256; it is %zu at %p", bytes,
                       a.workspace_bytes, a.workspace);

    const bool reduced = a.reduction != LK_REDUCTION_NONE;
    lk_cross_entropy_forward_plan plan = {a, 0, reduced};
    if (a.rows == 1) plan.a.logits_stride = 0; /* up to 2^62, which overflows in threads without a row */
    lk_cross_entropy_sum_plan sum = {a, NULL, NULL};
    if (reduced) {
        float *next = (float *)a.workspace;
        if (a.loss) sum.row_loss = plan.a.loss = next, next += lk_cross_entropy_array_bytes(&a) / sizeof(float);
        plan.a.z_loss_out = NULL;
        if (a.z_loss > 0.0f && (a.loss || a.z_loss_out)) sum.row_z = plan.a.z_loss_out = next;
    }
    if (a.rows > 0 && (plan.a.loss || plan.a.z_loss_out || a.lse || a.entropy || a.argmax || a.bad_targets)) {
        const bool plain = a.softcap == 0.0f && a.label_smoothing == 0.0f && !a.argmax && !a.entropy;
        int cluster;
        plan.team_log2 = lk_cross_entropy_team<T>(&device, &a, 16384, 2, &cluster);
        const int64_t grid = lk_cross_entropy_grid(a.rows, plan.team_log2);
        const bool alone = plan.team_log2 == LK_CROSS_ENTROPY_THREADS_LOG2;
        status = lk_launch_pdl(op, &device,
                               !plain  ? lk_cross_entropy_forward_kernel<T, 2, 3, false>
                               : alone ? lk_cross_entropy_forward_kernel<T, 8, 4, true>
                                       : lk_cross_entropy_forward_kernel<T, 2, 5, true>,
                               grid, cluster, LK_CROSS_ENTROPY_THREADS, 0, stream, plan);
    }
    if (status || !(reduced || a.valid_rows || a.weight_sum)) return status;
    const int cluster = device.arch >= 90 && a.rows > 16384 ? 8 : 1;
    return lk_launch_pdl(op, &device, lk_cross_entropy_sum_kernel<512>, cluster, cluster, 512, 0, stream, sum);
}

/* LK_DTYPE_* of T. */
template <class T> constexpr int lk_cross_entropy_dtype = LK_DTYPE_F32;
template <> constexpr int lk_cross_entropy_dtype<lk_f16> = LK_DTYPE_F16;
template <> constexpr int lk_cross_entropy_dtype<lk_bf16> = LK_DTYPE_BF16;

template <class T>
LK_HOST lk_status lk_cross_entropy_backward_check(const char *op, const lk_cross_entropy_backward_args *args, int arch,
                                                  lk_cross_entropy_backward_args *a)
{
    if (!args) return lk_fail(LK_ERR_NULL, op, "args is NULL");
    *a = *args;
    const bool mean = a->reduction == LK_REDUCTION_MEAN, in_place = a->dlogits && a->dlogits == a->logits;
    lk_status status = LK_OK;
    if (a->rows != 0) {
        status = lk_cross_entropy_check_null(op, "logits", a->logits);
        if (!status) status = lk_cross_entropy_check_null(op, "target", a->target);
        if (!status) status = lk_cross_entropy_check_null(op, "lse", a->lse);
        if (!status) status = lk_cross_entropy_check_null(op, "dlogits", a->dlogits);
        if (!status && mean && (!a->class_weight || a->z_loss != 0.0f))
            status = lk_cross_entropy_check_null(op, "valid_rows", a->valid_rows);
        if (!status && mean && a->class_weight) status = lk_cross_entropy_check_null(op, "weight_sum", a->weight_sum);
    }
    if (!status) status = lk_cross_entropy_check_sizes(op, a);
    if (status) return status;
    if (a->dlogits_dtype == LK_DTYPE_T) a->dlogits_dtype = lk_cross_entropy_dtype<T>;
    const bool half = sizeof(T) == 4 && (a->dlogits_dtype == LK_DTYPE_F16 || a->dlogits_dtype == LK_DTYPE_BF16);
    int64_t in_place_stride = a->logits_stride;
    if (half) in_place_stride = in_place_stride > INT64_MAX / 2 ? INT64_MAX : 2 * in_place_stride;
    if (in_place && a->dlogits_stride == 0) a->dlogits_stride = in_place_stride;
    status = lk_cross_entropy_check_stride(op, "dlogits", a->rows, a->vocab, &a->dlogits_stride);
    if (status) return status;
    if (in_place && a->rows > 1 && a->dlogits_stride != in_place_stride)
        return lk_fail(LK_ERR_SHAPE, op, "dlogits is logits, but dlogits_stride is %lld; it must be %lld",
                       (long long)a->dlogits_stride, (long long)in_place_stride);
    status = lk_cross_entropy_check_values(op, a);
    if (status) return status;
    if (a->dlogits_dtype != lk_cross_entropy_dtype<T> && !half)
        return lk_fail(LK_ERR_VALUE, op, "dlogits_dtype is %d; it must be T, or f16 or bf16 when T is f32", a->dlogits_dtype);
    status = lk_cross_entropy_check_path(op, a, arch);
    if (!status) status = lk_cross_entropy_check_aligned(op, "logits", a->logits, sizeof(T));
    if (!status) status = lk_cross_entropy_check_aligned(op, "target", a->target, a->target_dtype == LK_TARGET_INT32 ? 4 : 8);
    if (!status) status = lk_cross_entropy_check_aligned(op, "class_weight", a->class_weight, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "lse", a->lse, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "upstream", a->upstream, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "dlse", a->dlse, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "valid_rows", a->valid_rows, 8);
    if (!status) status = lk_cross_entropy_check_aligned(op, "weight_sum", a->weight_sum, 4);
    if (!status) status = lk_cross_entropy_check_aligned(op, "dlogits", a->dlogits, half ? 2 : sizeof(T));
    if (!status) status = lk_cross_entropy_check_aligned(op, "bad_targets", a->bad_targets, 4);
    if (a->logit_scale == 0.0f) a->logit_scale = 1.0f;
    return status;
}

template <class T, class D>
LK_HOST lk_status lk_cross_entropy_backward_launch(const char *op, const lk_device *device,
                                                   const lk_cross_entropy_backward_args &a, cudaStream_t stream)
{
    lk_cross_entropy_backward_plan plan = {a, 0, sizeof(D) != sizeof(T) && a.dlogits == a.logits, a.vocab};
    if (a.zero_padding) plan.padded_end = plan.ordered ? a.logits_stride : a.dlogits_stride;
    if (a.rows == 1) plan.a.logits_stride = plan.a.dlogits_stride = 0; /* as in forward */
    int cluster;
    plan.team_log2 = lk_cross_entropy_team<T>(device, &a, 8192, LK_CROSS_ENTROPY_BACKWARD_U, &cluster);
    if (plan.ordered && plan.team_log2 < 3) plan.team_log2 = 3; /* single elements are read at once, one a thread */
    const bool plain = a.softcap == 0.0f && !(a.class_weight && a.label_smoothing > 0.0f);
    return lk_launch_pdl(op, device,
                         plain ? lk_cross_entropy_backward_kernel<T, D, true> : lk_cross_entropy_backward_kernel<T, D, false>,
                         lk_cross_entropy_grid(a.rows, plan.team_log2), cluster, LK_CROSS_ENTROPY_THREADS, 0, stream, plan);
}

template <class T>
LK_HOST lk_status lk_cross_entropy_backward(const char *op, const lk_cross_entropy_backward_args *args, cudaStream_t stream)
{
    lk_cross_entropy_backward_args a = {};
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    const lk_status status = lk_cross_entropy_backward_check<T>(op, args, error ? 90 : device.arch, &a);
    if (status) return status;
    if (error) return lk_launched(op, error);
    if (a.rows == 0) return LK_OK;
    if constexpr (sizeof(T) == 4) {
        if (a.dlogits_dtype == LK_DTYPE_F16)
            return lk_cross_entropy_backward_launch<T, lk_f16>(op, &device, a, stream);
        if (a.dlogits_dtype == LK_DTYPE_BF16)
            return lk_cross_entropy_backward_launch<T, lk_bf16>(op, &device, a, stream);
    }
    return lk_cross_entropy_backward_launch<T, T>(op, &device, a, stream);
}

/* Emits the four functions of LK_DECLARE_CROSS_ENTROPY(T). */
#define LK_DEFINE_CROSS_ENTROPY(T)                                                                                             \
    LK_DECLARE_CROSS_ENTROPY(T)                                                                                                \
    LK_API lk_status lk_cross_entropy_forward_##T(const lk_cross_entropy_forward_args *args, cudaStream_t stream)              \
    {                                                                                                                          \
        return lk_cross_entropy_forward<lk_##T>("lk_cross_entropy_forward_" #T, args, stream);                                 \
    }                                                                                                                          \
    LK_API lk_status lk_cross_entropy_backward_##T(const lk_cross_entropy_backward_args *args, cudaStream_t stream)            \
    {                                                                                                                          \
        return lk_cross_entropy_backward<lk_##T>("lk_cross_entropy_backward_" #T, args, stream);                               \
    }                                                                                                                          \
    LK_API lk_status lk_cross_entropy_forward_workspace_bytes_##T(const lk_cross_entropy_forward_args *args, size_t *bytes)    \
    {                                                                                                                          \
        return lk_cross_entropy_forward_workspace<lk_##T>("lk_cross_entropy_forward_" #T, args, bytes);                        \
    }                                                                                                                          \
    LK_API lk_status lk_cross_entropy_backward_workspace_bytes_##T(const lk_cross_entropy_backward_args *args, size_t *bytes)  \
    {                                                                                                                          \
        lk_cross_entropy_backward_args a = {};                                                                                 \
        return lk_no_workspace(                                                                                                \
            lk_cross_entropy_backward_check<lk_##T>("lk_cross_entropy_backward_" #T, args, 90, &a), bytes);                    \
    }

#endif /* CUDA or the simulator */
#endif
