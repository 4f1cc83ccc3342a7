// SPDX-License-Identifier: MIT
/* lk_loss.cuh - the mathematics of the cross entropies, once: the formulas at the top of cross_entropy.cuh, for a kernel that
 * has some of a row's logits in registers. Rows are read and written elsewhere, and nothing is launched here.
 * NVRTC takes the file too.
 *
 *   label      lk_ce_label_among: what a target means
 *   state      lk_ce_row: a few numbers that some columns of a row are reduced to. lk_ce_row_empty, lk_ce_row_add or, with all
 *              options, lk_ce_add; lk_ce_row_merge joins the states of two parts, lk_ce_row_finish computes a row's results.
 *              lk_ce_tally: sums of many columns, with fewer instructions for each, that become a state
 *              With the option statistics the state is lk_ce_row_squares, and lk_ce_row_statistics computes three results more.
 *              Where a template takes a State, it is one of these two
 *   softcap    lk_ce_cap: z and its slope; lk_ce_capped: terms of 16-bit logits, and codes of their gradients
 *   gradient   lk_ce_factors and lk_ce_p_scale or lk_ce_p_scale_of_sum compute a row's factors, lk_ce_gradient, where the
 *              target is bad lk_ce_bad_factors; with these
 *              lk_ce_dz computes dlogits of the other columns, lk_ce_target_dz that of the target
 *
 * Where a function takes args, these are an op's struct; it reads the options by the names that both cross entropies have.
 *
 * Needs: lk_base.cuh, lk_row.cuh, lk_ptx.cuh.
 */
#ifndef LK_LOSS_CUH
#define LK_LOSS_CUH

#include "lk_row.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

/* ---- Labels -------------------------------------------------------------------------------------------------------------- */

/* A target without a column here. LK_IGNORED: the row is ignored. LK_BAD: the row counts, but its target is none of the classes.
 * LK_ELSEWHERE: another rank or panel has the column. */
enum { LK_IGNORED = -1, LK_BAD = -2, LK_ELSEWHERE = INT32_MAX };

/* What a row's target means. */
typedef struct {
    int y;             /* the target, below 0 where it is ignored or bad */
    bool counted, bad; /* bad: counted, and outside [0, vocab) */
} lk_ce_label;

template <class Args> LK_DEVICE lk_ce_label lk_ce_label_among(const Args &a, int64_t y, int64_t classes)
{
    const bool counted = !(a.use_ignore_index && y == a.ignore_index), good = y >= 0 && y < classes;
    return {counted && good ? (int)y : -1, counted, counted && !good};
}

/* ---- The state of a cross entropy ---------------------------------------------------------------------------------------- */

/* The state of a row of logits after some of its columns, in any order. The values v are the logits themselves and z = scale v,
 * so that differences of large logits are exact. Only under a softcap v is z and scale is 1. All calls for one row get the same
 * scale. Sums are taken against a reference: max where that is finite, else 0. max need not be the maximum. It is the
 * largest v; or a value at most 65 / scale below it, in kernels of cross_entropy; or a softcap of up to LK_CE_CAPPED_MOST.
 * The states of two disjoint sets of columns merge into the state of their union. That is exact for max, argmax and target (but a
 * target that is NaN may be lost); sums have float rounding. The empty set adds nothing. A NaN makes sum NaN, +inf makes it +inf,
 * and -inf adds nothing to it. */
typedef struct {
    float max;      /* the largest v, or near it; -inf when empty */
    float sum;      /* sum_j exp(scale (v[j] - reference)) */
    float target;   /* v[y], set by the thread that has column y; -inf until then */
    float weights;  /* sum_j w[j], the number of columns where there are no class weights */
    float weighted; /* sum_j w[j] (v[j] - reference) */
    float entropic; /* sum_j exp(scale (v[j] - reference)) (v[j] - reference), 0 where v[j] is -inf */
    int64_t top;    /* the largest logit and its column as one integer; see lk_ce_top */
} lk_ce_row;

/* The state with the option statistics. Its max is the largest v whenever results are computed from it. */
struct lk_ce_row_squares : lk_ce_row {
    float squares; /* sum_j exp(2 scale (v[j] - reference)) */
    float total;   /* sum_j v[j] lk_ce_mean_unit(scale) */
};
template <class State> constexpr bool lk_ce_has_squares = sizeof(State) > sizeof(lk_ce_row);

/* The factor of logits in `total`, so that a total of 2^30 logits does not overflow: 2^-30; or 1 if scale is so large that logits
 * with a finite z are small. A logit is rounded to 0 only if its |z| is below 2^-65. */
LK_DEVICE float lk_ce_mean_unit(float scale)
{
    return scale < 0x1p30f ? 0x1p-30f : 1.0f;
}

/* What lk_ce_row_finish needs besides the state. */
typedef struct {
    float scale, label_smoothing, z_loss;
    float weight; /* w[y]; 1 without class weights */
    int64_t vocab;
} lk_ce_options;

/* The result of lk_ce_row_finish. class_loss and entropy are NaN where the row is all -inf or has +inf or NaN. */
typedef struct {
    float class_loss, z_loss, lse, entropy;
    int64_t argmax; /* -1 where lk_ce_row_top was not called */
    float lse_low;  /* what lse was rounded by; 0 where lse is not finite */
} lk_ce_result;

/* The result of lk_ce_row_statistics: the rows of `entropy` after the first. */
typedef struct {
    float log_sum_sq_probs, mean_logits, top_logprob;
} lk_ce_statistics;

template <class State = lk_ce_row> LK_DEVICE State lk_ce_row_empty(void)
{
    if constexpr (lk_ce_has_squares<State>) return {lk_ce_row_empty<lk_ce_row>(), 0.0f, 0.0f};
    else return {-INFINITY, 0.0f, -INFINITY, 0.0f, 0.0f, 0.0f, INT64_MIN};
}

/* e^(scale d), 0 for -inf. exact: to a few units in the last place, by correcting what the product with log2 e was rounded by.
 * Otherwise the relative error is (|scale d| + 2) 2^-23, which matters where many terms have the same factor. */
template <bool exact> LK_DEVICE float lk_ce_factor(float scale, float d)
{
    const float rate = scale * LK_LOG2E, power = rate * d, factor = lk_ex2(power);
    if (!exact || !(fabsf(power) < 128.0f)) return factor;
    const float rate_low = fmaf(scale, LK_LOG2E, -rate) + scale * 1.925963e-8f; /* LK_LOG2E's own rounding */
    return fmaf(factor, LK_LN2 * fmaf(rate_low, d, fmaf(rate, d, -power)), factor);
}

/* The same state with a larger or equal max. exact, here and below: as in lk_ce_factor. Kernels that read logits are exact
 * for f32 alone, since it does not matter for 16-bit results. Merging the states of ranks and panels is always exact. */
template <bool exact = false, class State> LK_DEVICE State lk_ce_row_raise(State s, float max, float scale)
{
    const float reference = lk_lse_reference(max), shift = lk_lse_reference(s.max) - reference;
    const float factor = lk_ce_factor<exact>(scale, s.max - reference); /* 0 for the empty set */
    s.weighted = fmaf(shift, s.weights, s.weighted);
    s.entropic = fmaf(factor * fmaxf(shift, -FLT_MAX), s.sum, factor * s.entropic); /* 0 times -inf counts 0 */
    s.sum *= factor;
    if constexpr (lk_ce_has_squares<State>) s.squares = factor * (factor * s.squares); /* the factor's square may be 0 */
    s.max = max;
    return s;
}

/* Raises a state halfway to v, a value far above its max. Its max may be below its largest v, so its sum may be very large. One
 * factor for all of the raise could then underflow to 0, although factor * sum would not. So raise in two steps; this is the
 * first. If the value halfway is not finite, the state stays as it is. */
template <bool exact = false, class State> LK_DEVICE State lk_ce_row_raise_halfway(State s, float v, float scale)
{
    const float halfway = 0.5f * s.max + 0.5f * v;
    return lk_is_finite(halfway) ? lk_ce_row_raise<exact>(s, fmaxf(s.max, halfway), scale) : s;
}

/* Adds n values with their class weights (1 without). It costs n + 1 exponentials, so add many at a time. skip: a weight of 0
 * times -inf counts 0. entropic: for the entropy too. */
template <bool skip = false, bool entropic = true, class State, int n>
LK_DEVICE State lk_ce_row_add(State s, const float (&v)[n], const float (&w)[n], float scale)
{
    float max = s.max;
    LK_UNROLL for (int j = 0; j < n; j++) max = fmaxf(max, v[j]);
    s = lk_ce_row_raise(s, max, scale);
    const float rate = scale * LK_LOG2E, reference = lk_lse_reference(max);
    float sum = 0.0f, weights = 0.0f, weighted = 0.0f, terms = 0.0f, squares = 0.0f, total = 0.0f;
    LK_UNROLL for (int j = 0; j < n; j++) {
        const float d = v[j] - reference, e = lk_ex2(rate * d);
        sum += e;
        if (lk_ce_has_squares<State>) squares = fmaf(e, e, squares), total = fmaf(v[j], lk_ce_mean_unit(scale), total);
        weights += w[j];
        weighted = fmaf(w[j], skip && w[j] == 0.0f ? 0.0f : d, weighted);
        if (entropic) terms = fmaf(e, fmaxf(d, -FLT_MAX), terms); /* 0 times -inf counts 0 */
    }
    s.sum += sum, s.weights += weights, s.weighted += weighted, s.entropic += terms;
    if constexpr (lk_ce_has_squares<State>) s.squares += squares, s.total += total;
    return s;
}

/* Larger logits have larger integers, NaN has the largest, and -0 has that of +0. */
LK_DEVICE int32_t lk_ce_order(float x)
{
    const int32_t bits = __float_as_int(x);
    return x != x ? INT32_MAX : x == 0.0f ? 0 : bits < 0 ? bits ^ 0x7fffffff : bits;
}

/* Logit x and its column col, 0 <= col < 2^31, as one integer: of several the largest is the argmax's. Its low half is larger for
 * smaller columns, so the smallest of equal logits wins. INT64_MIN: of no column. */
LK_DEVICE int64_t lk_ce_top(float x, int64_t col)
{
    return (int64_t)((uint64_t)(uint32_t)lk_ce_order(x) << 32 | (uint64_t)(0x7fffffff - col));
}
LK_DEVICE int lk_ce_top_col(int64_t top) { return 0x7fffffff - (int)(uint32_t)top; }

/* The largest of `team` consecutive lanes. All 32 lanes call it. */
LK_DEVICE int64_t lk_ce_top_warp(int64_t top, int team = 32)
{
    LK_UNROLL for (int offset = 16; offset > 0; offset /= 2) {
        if (offset >= team) continue;
        const int64_t other = __shfl_xor_sync(0xffffffffu, top, offset);
        if (other > top) top = other;
    }
    return top;
}

/* Adds logit x of column col to the argmax. */
template <class State> LK_DEVICE State lk_ce_row_top(State s, float x, int64_t col)
{
    const int64_t top = lk_ce_top(x, col);
    if (top > s.top) s.top = top;
    return s;
}

/* Adds the logits x of columns col, col + 1, ... to the argmax. Few vectors have a new largest logit. */
template <class State, int n> LK_DEVICE State lk_ce_add_top(State s, const float (&x)[n], int64_t col)
{
    float most = x[0];
    bool nan = false;
    LK_UNROLL for (int j = 0; j < n; j++) most = fmaxf(most, x[j]), nan |= x[j] != x[j];
    if (nan || lk_ce_order(most) >= (int32_t)(s.top >> 32)) {
        int first = 0;
        LK_UNROLL for (int j = n - 1; j >= 0; j--) first = (nan ? x[j] != x[j] : x[j] == most) ? j : first;
        s = lk_ce_row_top(s, nan ? NAN : most, col + first);
    }
    return s;
}

template <bool exact = false, class State> LK_DEVICE State lk_ce_row_merge(State a, State b, float scale)
{
    const float max = fmaxf(a.max, b.max);
    a = lk_ce_row_raise<exact>(a, max, scale);
    b = lk_ce_row_raise<exact>(b, max, scale);
    a.sum += b.sum, a.weights += b.weights, a.weighted += b.weighted, a.entropic += b.entropic;
    if constexpr (lk_ce_has_squares<State>) a.squares += b.squares, a.total += b.total;
    a.target = fmaxf(a.target, b.target);
    a.top = a.top > b.top ? a.top : b.top;
    return a;
}

/* The row's results from the state of all its columns. all: the entropy too; smooths: the smoothed loss. */
template <bool all = true, bool smooths = all> LK_DEVICE lk_ce_result lk_ce_row_finish(lk_ce_row s, lk_ce_options o)
{
    const bool proper = s.sum > 0.0f && lk_is_finite(s.sum);
    float k;
    const float log = lk_log_split(s.sum, &k), log_sum = fmaf(k, LK_LN2, log), max = o.scale * s.max;
    const float above = o.scale * (s.max - s.target); /* +inf for a target at -inf */
    lk_ce_result r;
    float rounded = 0.0f; /* what joining was rounded by; added below: what max was rounded by */
    const float joined = proper ? lk_lse_join(max, k, log, &rounded) : s.sum == 0.0f ? -INFINITY : s.sum;
    const float missed = lk_is_finite(max) ? fmaf(o.scale, s.max, -max) : 0.0f;
    r.lse = joined + missed;
    const float added = r.lse - joined;
    r.lse_low = lk_is_finite(r.lse) ? rounded + ((joined - (r.lse - added)) + (missed - added)) : 0.0f;
    r.z_loss = o.z_loss > 0.0f ? o.z_loss * r.lse * r.lse : 0.0f;
    r.class_loss = o.weight * (lk_is_finite(above) ? lk_lse_join(above, k, log) : above);
    if (smooths && o.label_smoothing > 0.0f) {
        const float smoothed = fmaf(s.weights, log_sum, -o.scale * s.weighted); /* sum_j w[j] (lse - z[j]) */
        r.class_loss = fmaf(1.0f - o.label_smoothing, r.class_loss, __fdiv_rn(o.label_smoothing, (float)o.vocab) * smoothed);
    }
    r.entropy = all ? log_sum - o.scale * __fdiv_rn(s.entropic, s.sum) : 0.0f;
    if (!proper) r.class_loss = r.entropy = NAN;
    r.argmax = s.top == INT64_MIN ? -1 : 0x7fffffff - (int64_t)(uint32_t)s.top;
    return r;
}

/* The statistics of a row from the state of all its columns. NaN where lk_ce_row_finish's entropy is. -inf in some columns makes
 * the mean -inf. */
LK_DEVICE lk_ce_statistics lk_ce_row_statistics(lk_ce_row_squares s, lk_ce_options o)
{
    float k;
    const float log = lk_log_split(s.sum, &k), log_sum = fmaf(k, LK_LN2, log);
    if (!(s.sum > 0.0f && lk_is_finite(s.sum))) return {NAN, NAN, NAN};
    const float log_squares = lk_log_split(s.squares, &k), mean = __fdiv_rn(s.total, (float)o.vocab);
    const float mean_logit = o.scale < 0x1p30f ? mean * 0x1p30f : mean; /* over lk_ce_mean_unit */
    return {fmaf(-2.0f, log_sum, fmaf(k, LK_LN2, log_squares)), o.scale * mean_logit, -log_sum};
}

/* Merges the states of `team` consecutive lanes, a power of two. All 32 lanes call it; every lane of a team gets the result.
 * all: more than max and sum. target is not merged here: each lane keeps its own. */
template <bool all, bool exact = false, class State> LK_DEVICE State lk_ce_row_warp(State s, float scale, int team = 32)
{
    s = lk_ce_row_raise<exact>(s, lk_max_warp(s.max, team), scale);
    s.sum = lk_sum_warp(s.sum, team);
    if (all) {
        s.weights = lk_sum_warp(s.weights, team);
        s.weighted = lk_sum_warp(s.weighted, team);
        s.entropic = lk_sum_warp(s.entropic, team);
        if constexpr (lk_ce_has_squares<State>) s.squares = lk_sum_warp(s.squares, team), s.total = lk_sum_warp(s.total, team);
        s.top = lk_ce_top_warp(s.top, team);
    }
    return s;
}

/* The state of a row in a rank's columns, as it goes from rank to rank, or panel to panel: 16 bytes, or all of lk_ce_row or
 * lk_ce_row_squares. max and the sums leave out the target's column, which one rank has. Its logit is in `target`. */
template <class State> LK_DEVICE void lk_ce_pack_state(void *states, int bytes, int64_t row, State s)
{
    if (!lk_ce_has_squares<State> && bytes == 16) ((float4 *)states)[row] = make_float4(s.max, s.sum, s.target, 0.0f);
    else ((State *)states)[row] = s;
}
template <class State = lk_ce_row> LK_DEVICE State lk_ce_unpack_state(const void *states, int bytes, int64_t row)
{
    if (lk_ce_has_squares<State> || bytes != 16) return ((const State *)states)[row];
    const float4 packed = ((const float4 *)states)[row];
    State s = lk_ce_row_empty<State>();
    s.max = packed.x, s.sum = packed.y, s.target = packed.z;
    return s;
}
template <class Args> LK_HOST int lk_ce_state_bytes(const Args *a)
{
    if (a->statistics) return (int)sizeof(lk_ce_row_squares);
    return a->label_smoothing > 0.0f || a->entropy || a->argmax || a->dentropy ? (int)sizeof(lk_ce_row) : 16;
}

/* ---- The softcap --------------------------------------------------------------------------------------------------------- */

/* tanh(u) and its derivative 1 - tanh(u)^2, both to a few units in the last place; the polynomial is a least-maximum fit. It takes
 * fewer registers than lk_ce_cap, whose extra accuracy does not matter for 16-bit logits. */
LK_DEVICE float lk_ce_tanh(float u, float *slope)
{
    const float e = lk_exp(-2.0f * fabsf(u)), inverse = __fdividef(1.0f, 1.0f + e), square = u * u;
    *slope = 4.0f * e * inverse * inverse;
    const float p = fmaf(fmaf(fmaf(0.019268046f, square, -0.0537151214f), square, 0.133325321f), square, -0.333333293f);
    return fabsf(u) < 0.4f ? fmaf(u * square, p, u) : copysignf((1.0f - e) * inverse, u);
}

/* What is the same for all logits x under a softcap: exp(-2 |u|) with u = logit_scale x / softcap is 2^-(rate |x|). rate has a
 * second float, since its rounding would change all z of a row alike. */
typedef struct {
    float logit_scale, softcap, rate, rate_low;
} lk_ce_softcap;

LK_DEVICE lk_ce_softcap lk_ce_softcap_of(float logit_scale, float softcap)
{
    const float steep = __fdiv_rn(logit_scale, softcap), two = 2.0f * LK_LOG2E, rate = two * steep;
    const float steep_low = __fdividef(fmaf(-steep, softcap, logit_scale), softcap);
    return {logit_scale, softcap, rate,
            fmaf(two, steep, -rate) + fmaf(two, steep_low, steep * (2.0f * 1.925963e-8f))}; /* LK_LOG2E's own rounding */
}

/* z = softcap tanh(u) of logit x, and its slope 1 - tanh(u)^2. tanh(|u|) is 1 - 2 e / (1 + e) with e = exp(-2 |u|); below 0.6
 * that loses digits, and z is logit_scale x (1 + u^2 p), where p is a least-maximum fit, off by 3e-9. */
LK_DEVICE float lk_ce_cap(const lk_ce_softcap &c, float x, float *slope)
{
    const float size = fabsf(x), power = -c.rate * size, power_low = fmaf(-c.rate, size, -power) - c.rate_low * size;
    const float rounded = lk_ex2(power), e = power < -160.0f ? 0.0f : fmaf(rounded, LK_LN2 * power_low, rounded);
    const float d = 1.0f + e, near = lk_rcp(d), inverse = fmaf(near, fmaf(-d, near, 1.0f), near), q = e * inverse;
    *slope = 4.0f * q * inverse;
    const float u = 0.5f * LK_LN2 * power, square = u * u, z = c.logit_scale * x;
    float p = fmaf(-0.0058950851f, square, 0.0207959143f);
    p = fmaf(fmaf(fmaf(p, square, -0.0537838149f), square, 0.13331924f), square, -0.33333298f);
    return u > -0.6f ? fmaf(z * square, p, z) : copysignf(fmaf(-2.0f * c.softcap, q, c.softcap), x);
}
LK_DEVICE float lk_ce_cap(float x, float logit_scale, float softcap, float *slope)
{
    return lk_ce_cap(lk_ce_softcap_of(logit_scale, softcap), x, slope);
}

/* tanh(u) is 1 - 2 r with r = 1 / (1 + e) and e = e^2u. e and r of two logits, from one division: r is off by at most 5 2^-24.
 * rate: 2 log2(e) logit_scale / softcap. e ends at 2^62, so that a product of two stays finite. */
LK_DEVICE void lk_ce_logistic(const float *x, float rate, float (&e)[2], float (&r)[2])
{
    LK_UNROLL for (int j = 0; j < 2; j++) e[j] = lk_ex2(lk_min_nan(rate * x[j], 62.0f));
    const float d[2] = {1.0f + e[0], 1.0f + e[1]}, inverse = lk_rcp(d[0] * d[1]);
    r[0] = d[1] * inverse, r[1] = d[0] * inverse;
}
LK_DEVICE float lk_ce_logistic_rate(float logit_scale, float softcap)
{
    return 2.0f * LK_LOG2E * __fdividef(logit_scale, softcap);
}

/* z and slope of n logits, which become z. Where it is not exact, z is off by softcap 2^-20: that does not matter for 16-bit
 * logits, unless softcap is large. */
template <bool exact, int n> LK_DEVICE void lk_ce_cap(float (&x)[n], float (&slope)[n], float logit_scale, float softcap)
{
    if constexpr (!exact && n % 2 == 0) {
        if (softcap <= 64.0f) {
            const float rate = lk_ce_logistic_rate(logit_scale, softcap);
            LK_UNROLL for (int j = 0; j < n; j += 2) {
                float e[2], r[2];
                lk_ce_logistic(x + j, rate, e, r);
                LK_UNROLL
                for (int i = 0; i < 2; i++)
                    slope[j + i] = 4.0f * (e[i] * r[i]) * r[i], x[j + i] = fmaf(-2.0f * softcap, r[i], softcap);
            }
            return;
        }
    }
    if constexpr (exact) {
        const lk_ce_softcap c = lk_ce_softcap_of(logit_scale, softcap);
        LK_UNROLL for (int j = 0; j < n; j++) x[j] = lk_ce_cap(c, x[j], &slope[j]);
    } else {
        const float steep = __fdiv_rn(logit_scale, softcap);
        LK_UNROLL for (int j = 0; j < n; j++) x[j] = softcap * lk_ce_tanh(x[j] * steep, &slope[j]);
    }
}

/* Terms of 16-bit logits under a softcap of up to LK_CE_CAPPED_MOST: e = exp(z - softcap), which is at least 2^-93, and w = e
 * slope / 4. z is off by softcap 2^-20, as by lk_ce_logistic. Without w, and where no |u| of a vector is above 3/4, tanh(u) is
 * u p(u^2), a least-maximum fit that is off by 3 2^-24: that takes as many instructions and 1 instead of 2.5 of the special function
 * unit. factor: the coefficients of p for log2(e) z = x p(x^2). */
#define LK_CE_CAPPED_MOST 32.0f
typedef struct {
    float rate, power, limit, base, factor[5];
} lk_ce_capped;

LK_DEVICE lk_ce_capped lk_ce_capped_of(float logit_scale, float softcap)
{
    const float steep = __fdividef(logit_scale, softcap), square = steep * steep, base = LK_LOG2E * softcap;
    lk_ce_capped c = {2.0f * LK_LOG2E * steep, -2.0f * base, -1.0f, base,
                      {0.99999729f, -0.33323022f, 0.13224723f, -0.049233135f, 0.012274016f}};
    if (fabsf(steep) > 0x1p-10f && fabsf(steep) < 0x1p10f) c.limit = __fdividef(0.75f, fabsf(steep)); /* its powers too */
    float power = base * steep;
    LK_UNROLL for (int i = 0; i < 5; i++, power *= square) c.factor[i] *= power;
    return c;
}

/* e, and w if asked for, of n logits. */
template <bool slopes, int n> LK_DEVICE void lk_ce_capped_terms(const lk_ce_capped &c, const float (&x)[n], float (&e)[n], float (&w)[n])
{
    float most = fabsf(x[0]);
    LK_UNROLL for (int j = 1; j < n; j++) most = fmaxf(most, fabsf(x[j]));
    if (!slopes && most <= c.limit) {
        LK_UNROLL for (int j = 0; j < n; j++) {
            const float square = x[j] * x[j];
            float p = fmaf(fmaf(c.factor[4], square, c.factor[3]), square, c.factor[2]);
            p = fmaf(fmaf(p, square, c.factor[1]), square, c.factor[0]);
            e[j] = lk_ex2(fmaf(x[j], p, -c.base));
        }
        return;
    }
    LK_UNROLL for (int j = 0; j < n; j += 2) {
        float grown[2], r[2];
        lk_ce_logistic(x + j, c.rate, grown, r);
        LK_UNROLL for (int i = 0; i < 2; i++) {
            e[j + i] = lk_ex2(c.power * r[i]);
            if (slopes) w[j + i] = e[j + i] * (grown[i] * r[i] * r[i]);
        }
    }
}

/* e of one logit. */
LK_DEVICE float lk_ce_capped_term(const lk_ce_capped &c, float x)
{
    const float pair[2] = {x, x};
    float e[2], none[2];
    lk_ce_capped_terms<false>(c, pair, e, none);
    return e[0];
}

/* A thread that needs a row's logits twice keeps w in their place, as codes of 16 bits: dz of a column without a target is a factor of
 * the row times w, so no exponential is computed again. w is below 1/2, so a code is its bits 14 to 29: 7 of the exponent and 9 of
 * the fraction, 2 more than bf16 has. coarse: w in bf16, for gradients of 8 bits; that takes fewer instructions. */
template <bool coarse> LK_DEVICE uint4 lk_ce_encode(const float (&w)[8])
{
    lk_vec<lk_bf16> code = {};
    if (coarse) {
        lk_pack(&code, w);
    } else {
        uint32_t word[4];
        LK_UNROLL for (int i = 0; i < 4; i++)
            word[i] = __byte_perm(__float_as_uint(w[2 * i]) * 4 + 0x8000, __float_as_uint(w[2 * i + 1]) * 4 + 0x8000, 0x7632);
        code.raw = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return code.raw;
}
template <bool coarse> LK_DEVICE void lk_ce_decode(float (&w)[8], uint4 code)
{
    const uint32_t word[4] = {code.x, code.y, code.z, code.w};
    LK_UNROLL for (int i = 0; i < 4; i++) {
        w[2 * i] = __uint_as_float(coarse ? word[i] << 16 : word[i] << 14 & 0x3fffc000u);
        w[2 * i + 1] = __uint_as_float(coarse ? word[i] & 0xffff0000u : word[i] >> 2 & 0x3fffc000u);
    }
}

/* ---- The state with all options ------------------------------------------------------------------------------------------ */

/* Adds the logits x of columns col, col + 1, ... to the state. plain: options need only max and sum. exact: for lk_ce_cap. */
template <bool plain, bool exact, class State, class Args, int n>
LK_DEVICE State lk_ce_add(State s, const float (&x)[n], int64_t col, const Args &a)
{
    float v[n], w[n], slope[n];
    LK_UNROLL for (int j = 0; j < n; j++) v[j] = x[j], w[j] = 1.0f;
    if (plain) return lk_ce_row_add(s, v, w, a.logit_scale);
    if (a.class_weight && a.label_smoothing > 0.0f) {
        LK_UNROLL for (int j = 0; j < n; j++) w[j] = a.class_weight[col + j];
    }
    if (a.argmax) s = lk_ce_add_top(s, x, col);
    const bool all = lk_ce_has_squares<State> || a.label_smoothing > 0.0f || a.entropy || a.dentropy;
    if (a.softcap > 0.0f) lk_ce_cap<exact>(v, slope, a.logit_scale, a.softcap);
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    if (all) return lk_ce_row_add(s, v, w, scale);
    const lk_lse sum = lk_lse_add({s.max, s.sum}, v, scale);
    s.max = sum.max, s.sum = sum.sum;
    return s;
}

/* Adds one logit; the target's only to the argmax. */
template <bool plain, bool exact, class State, class Args>
LK_DEVICE State lk_ce_add_one(State s, float x, int col, int y, const Args &a)
{
    const float one[1] = {x};
    if (col != y) return lk_ce_add<plain, exact>(s, one, col, a);
    return !plain && a.argmax ? lk_ce_row_top(s, x, col) : s;
}

/* ---- The sums of many vectors --------------------------------------------------------------------------------------------- */

/* The sums of a thread's columns, with few instructions for each column; begin with lk_ce_tally_empty. The sums are of
 * t = rate (v - reference) and e = 2^t, with rate = scale log2(e); that of smoothing is of v - reference. A column with t above 2
 * raises the reference first. This is rare if the reference is the largest v of many. failed: a column was NaN, +inf or too large for exact sums, or rate too small.
 * Then do not use the sums: add the columns to a state instead. exact, here and below: t is computed so, and is 0 for
 * v = reference, as in a state. Otherwise t is rate v - base, one instruction less; base is rate * reference, rounded. */
template <class State> struct lk_ce_tally {
    float reference, base;    /* -inf and 0: nothing is in the sums, except -inf in total */
    float sum, terms;         /* of e; of e t, where 0 times -inf counts 0 */
    float total, count;       /* with label_smoothing: of v - reference; the number of columns */
    float squares, logits;    /* with statistics: of e^2; of v, times lk_ce_mean_unit */
    float peak;               /* the largest v */
    float most;               /* with argmax: the largest logit, */
    int col;                  /* and the first of the columns that it was added with; -1: none */
    bool failed;
};

template <class State> LK_DEVICE lk_ce_tally<State> lk_ce_tally_empty(void)
{
    return {-INFINITY, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, -INFINITY, -INFINITY, -1, false};
}

/* Puts the sums against another reference. */
template <bool exact, class State> LK_DEVICE void lk_ce_tally_move(lk_ce_tally<State> *t, float reference, float rate)
{
    const float base = __fmul_rn(rate, reference); /* rounded, also in the difference */
    const float shift = exact ? rate * (t->reference - reference) : t->base - base, factor = lk_ex2(shift);
    const bool none = t->reference == -INFINITY;
    if (!none) { /* else total may be -inf already */
        t->terms = factor * fmaf(shift, t->sum, t->terms), t->sum *= factor;
        t->squares = factor * (factor * t->squares), t->total = fmaf(t->reference - reference, t->count, t->total);
    }
    t->reference = reference, t->base = base;
}

/* Whether sums against v are exact. */
LK_DEVICE bool lk_ce_tally_fits(float v, float rate)
{
    return fabsf(rate * v) < LK_LSE_BASE && rate > 0x1p-40f;
}

/* The largest of n numbers, NaN where one of them is. */
template <int n> LK_DEVICE float lk_ce_most(const float (&x)[n])
{
    float most = x[0];
    LK_UNROLL for (int j = 1; j < n; j++) most = lk_max_nan(most, x[j]);
    return most;
}

/* Adds the logits x of columns col, col + 1, ..., without class weights. The argmax is updated only if n > 1; then call it with
 * rising columns. exact: for lk_ce_tally and lk_ce_cap. */
template <bool exact, class State, class Args, int n>
LK_DEVICE void lk_ce_tally_add(lk_ce_tally<State> *t, const float (&x)[n], int col, const Args &a)
{
    float v[n], slope[n], most = lk_ce_most(x);
    LK_UNROLL for (int j = 0; j < n; j++) v[j] = x[j];
    if (n > 1 && a.argmax && (t->col < 0 || most > t->most)) t->most = most, t->col = col;
    if (a.softcap > 0.0f) {
        lk_ce_cap<exact>(v, slope, a.logit_scale, a.softcap);
        most = lk_ce_most(v);
    }
    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale, rate = scale * LK_LOG2E;
    if (!(rate * (most - t->reference) <= 2.0f)) {
        if (lk_ce_tally_fits(most, rate)) lk_ce_tally_move<exact>(t, most, rate);
        else if (most != -INFINITY) t->failed = true;
    }
    if (a.label_smoothing > 0.0f) {
        float total = 0.0f;
        LK_UNROLL for (int j = 0; j < n; j++) total += v[j] - lk_lse_reference(t->reference);
        t->total += total, t->count += (float)n;
    }
    float sum = 0.0f, terms = 0.0f, squares = 0.0f, logits = 0.0f;
    LK_UNROLL for (int j = 0; j < n; j++) {
        logits += v[j];
        v[j] = exact ? rate * (v[j] - lk_lse_reference(t->reference)) : fmaf(rate, v[j], -t->base);
        const float d = fmaxf(v[j], -256.0f), e = lk_ex2(d);
        sum += e, terms = fmaf(e, d, terms), squares = fmaf(e, e, squares);
    }
    t->sum += sum, t->terms += terms;
    if (lk_ce_has_squares<State>) t->squares += squares, t->logits = fmaf(logits, lk_ce_mean_unit(scale), t->logits);
    t->peak = fmaxf(t->peak, most);
}

/* The state of a tally that has not failed. Of the argmax it has `col`. peak: the largest of several tallies. */
template <bool exact, class State> LK_DEVICE State lk_ce_tally_state(lk_ce_tally<State> t, float peak, float scale)
{
    State s = lk_ce_row_empty<State>();
    s.weights = t.count, s.weighted = t.total;
    if constexpr (lk_ce_has_squares<State>) s.total = t.logits;
    if (t.col >= 0) s = lk_ce_row_top(s, t.most, t.col);
    if (t.reference == -INFINITY) return s;
    const float rate = scale * LK_LOG2E, inverse = __fdiv_rn(1.0f, rate);
    if (lk_ce_tally_fits(peak, rate)) lk_ce_tally_move<exact>(&t, peak, rate);
    const float lost = exact ? 0.0f : fmaf(rate, t.reference, -t.base), factor = lk_ex2(-lost); /* what base was rounded by */
    s.max = t.reference, s.sum = factor * t.sum, s.entropic = factor * fmaf(-lost, t.sum, t.terms) * inverse;
    s.weighted = t.total;
    if constexpr (lk_ce_has_squares<State>) s.squares = factor * (factor * t.squares);
    return s;
}

/* The state of the whole row and, in *others, that of its other columns against the same reference. y: the target. */
template <bool plain, bool exact, class State>
LK_DEVICE State lk_ce_with_target(State *others, int y, float logit, float weight, float scale)
{
    State all = *others;
    if (y < 0) return all;
    if (!plain) { /* of the others as they are: a sum of 0 raised to +inf is not 0 when raised again */
        const float v[1] = {logit}, w[1] = {weight};
        all = lk_ce_row_add(*others, v, w, scale);
    }
    if (plain) *others = lk_ce_row_raise_halfway<exact>(*others, logit, scale);
    *others = lk_ce_row_raise<exact>(*others, fmaxf(others->max, logit), scale);
    if (plain) {
        all = *others;
        all.sum += lk_ex2(scale * LK_LOG2E * (logit - lk_lse_reference(all.max)));
    }
    all.target = logit;
    return all;
}

/* ---- Gradients ----------------------------------------------------------------------------------------------------------- */

/* The factors of a row's gradient, logit_scale included: dlogits[j] = (p_factor e[j] - w_factor w[j]) slope[j] for j != y.
 * Here e[j] = 2^(rate v[j] - base) is p[j] without a factor that is in p_factor, v is z under a softcap, and slope is 1 without
 * one. In a row that becomes all 0 or all NaN, e is 1 and p_factor is that value.
 * dentropy adds entropy_factor e[j] (log p[j] + entropy) slope[j], with log p[j] + entropy = scale (v[j] - center)
 * + shift. center: also what the logits are summed against, see LK_CE_SUM_X. */
typedef struct {
    float rate, base, p_factor, w_factor, entropy_factor, center, shift;
} lk_ce_gradient;

/* What the owner of the target's element keeps in shared memory, since registers are for vectors: dlogits[y] = (f_lse p[y] - f_rest
 * sum_{j != y} p[j] + w_term) slope[y] with p = p_scale e. The sum is `others` where it is known before the end. */
typedef struct {
    float f_lse, f_rest, w_term, p_scale, others, logit, slope;
    int y; /* where it is none of the row's columns, no element is written */
} lk_ce_target_term;

/* What a row's gradient reads besides the logits, loaded before it is needed. f and h: the upstreams of the class term and of
 * the z-loss; entropy_factor: dentropy, times -logit_scale. */
typedef struct {
    float f, h, dlse, lse, lse_low, weight, entropy_factor;
} lk_ce_upstream;

/* f_lse: the gradient of lse, times logit_scale. */
template <class Args> LK_DEVICE float lk_ce_lse_factor(const Args &a, lk_ce_upstream up, float lse)
{
    float f_lse = 0.0f;
    if (a.z_loss > 0.0f) f_lse = 2.0f * a.z_loss * lse * (up.h * a.logit_scale);
    if (a.dlse) f_lse = fmaf(a.logit_scale, up.dlse, f_lse);
    return f_lse;
}

/* The factors of a row's gradient except for rate, base and the factor of e; share: e / vocab; weights: W. smooth: false where the
 * caller knows that label_smoothing is 0. */
template <bool smooth = true, class Args>
LK_DEVICE lk_ce_gradient lk_ce_factors(const Args &a, float share, lk_ce_upstream up, float lse, float weights,
                                       lk_ce_target_term *target_term)
{
    const float f = up.f * a.logit_scale;
    lk_ce_gradient g = {};
    float f_rest = f * up.weight, w_term = 0.0f;
    if (smooth && a.label_smoothing > 0.0f) {
        g.w_factor = f * share;
        f_rest = fmaf(f * (1.0f - a.label_smoothing), up.weight, g.w_factor * weights);
        w_term = g.w_factor * (weights - up.weight);
    }
    const float f_lse = lk_ce_lse_factor(a, up, lse);
    g.p_factor = f_rest + f_lse;
    if (target_term) target_term->f_rest = f_rest, target_term->f_lse = f_lse, target_term->w_term = w_term;
    return g;
}

/* Whether nothing is asked of a row: neither its losses nor its lse have a gradient. */
LK_DEVICE bool lk_ce_masked(float f, float dlse, float dentropy)
{
    return f == 0.0f && dlse == 0.0f && dentropy == 0.0f;
}

/* The factors of a row whose target is bad: NaN, or 0 where nothing is asked of it. rate is not 0, so that e is 0 and not NaN
 * where a column is -inf. */
LK_DEVICE lk_ce_gradient lk_ce_bad_factors(lk_ce_upstream up)
{
    lk_ce_gradient g = {};
    g.rate = 0x1p-126f, g.p_factor = lk_ce_masked(up.f, up.dlse, up.entropy_factor) ? 0.0f : NAN;
    return g;
}

/* rate, for logits up to `value`. Where rate value is 2^30 or more: a power of two, whose product with value is exact. p of
 * neighbouring floats differs by a factor of 2^64 or more there, and by 2^256 with this rate, so all but the largest are 0. */
LK_DEVICE float lk_ce_rate(float rate, float value)
{
    if (fabsf(rate * value) < 0x1p30f) return rate;
    const int exponent = 31 + 2 * 127 - (__float_as_int(value) >> 23 & 255);
    return __int_as_float((exponent < 254 ? exponent : 254) << 23);
}

/* p_scale, rate and base of p = p_scale 2^(rate v - base), from a given lse and lse_low. base is rate times a value, as in
 * forward, so that the rounding of rate is not multiplied by large logits. By how much value misses (lse + lse_low) / scale is
 * known exactly, and so is the rounding of base. Where neighbouring floats differ by much, value is computed again, from
 * lse_low too. With lk_ce_rate's power of two it is the largest logit then; lse alone may miss that, and p_scale is 1. */
LK_DEVICE float lk_ce_p_scale(float lse, float lse_low, float scale, float *rate, float *base)
{
    float value = __fdiv_rn(lse, scale);
    if (!lk_is_finite(value)) value = 0.0f;
    *rate = lk_ce_rate(scale * LK_LOG2E, value), *base = *rate * value;
    float missed = fmaf(scale, value, -lse) - lse_low;
    if (fabsf(*base) >= 0x1p24f) {
        if (lse_low == 0.0f && *rate != scale * LK_LOG2E) return 1.0f;
        value -= __fdiv_rn(missed, scale), *base = *rate * value;
        missed = fmaf(scale, value, -lse) - lse_low;
    }
    return lk_ex2(fmaf(missed, LK_LOG2E, -fmaf(*rate, value, -*base)));
}

/* The factors of dentropy, from a given lse and entropy: center is lse / scale, and shift has what that was rounded by. */
LK_DEVICE void lk_ce_entropy_factors(lk_ce_gradient *g, float entropy_factor, float lse, float lse_low, float entropy,
                                     float scale)
{
    const float value = __fdiv_rn(lse, scale);
    g->center = lk_is_finite(value) ? value : 0.0f;
    g->entropy_factor = entropy_factor, g->shift = (fmaf(scale, g->center, -lse) - lse_low) + entropy;
}

/* What dentropy adds to the gradient of v, without the slope. 0 times -inf counts 0. */
LK_DEVICE float lk_ce_entropy_term(const lk_ce_gradient &g, float e, float v, float scale)
{
    return g.entropy_factor * (e * fmaxf(fmaf(scale, v - g.center, g.shift), -FLT_MAX));
}

/* p_scale and base from a row's sum and inverse = 1 / sum. base includes log2 of the sum, rounded down, so p_scale is above
 * 1/2. The rounding of the product and of the addition is known exactly. It is a separate factor beside the power of two: in
 * one exponent with that it would lose digits. */
LK_DEVICE float lk_ce_p_scale_of_sum(lk_lse s, float inverse, float rate, float *base)
{
    const int bits = __float_as_int(s.sum);
    const float product = rate * s.max, power = (float)((bits >> 23 & 255) - 127);
    *base = product + power;
    const float added = *base - product, lost = (product - (*base - added)) + (power - added);
    return lk_ex2(-lost - fmaf(rate, s.max, -product)) * (__int_as_float(bits & 0x7f800000) * inverse);
}

/* rate and base from a row's lse, or from its state with inverse = 1 / sum. dentropy: its factors too; the mean of z is
 * lse - entropy. Returns p_scale. */
LK_DEVICE float lk_ce_base_of_lse(lk_ce_gradient *g, lk_ce_upstream up, float scale, bool dentropy, float entropy)
{
    const float p_scale = lk_ce_p_scale(up.lse, up.lse_low, scale, &g->rate, &g->base);
    if (dentropy) lk_ce_entropy_factors(g, up.entropy_factor * p_scale, up.lse, up.lse_low, entropy, scale);
    return p_scale;
}
LK_DEVICE float lk_ce_base_of_state(lk_ce_gradient *g, lk_ce_upstream up, float scale, bool dentropy, lk_ce_row s, float inverse)
{
    g->rate = lk_ce_rate(scale * LK_LOG2E, s.max);
    const float p_scale = lk_ce_p_scale_of_sum({s.max, s.sum}, inverse, g->rate, &g->base);
    if (!dentropy) return p_scale;
    g->entropy_factor = up.entropy_factor * p_scale, g->center = lk_lse_reference(s.max);
    g->shift = -scale * __fdiv_rn(s.entropic, s.sum);
    return p_scale;
}

/* Turns n values v into their gradients, by their e, slopes and w_factor w[j]. Not the target's. Each option has one branch for
 * all of them, so that the compiler can overlap them. */
template <bool plain, class Args, int n>
LK_DEVICE void lk_ce_dz(float (&v)[n], const float (&e)[n], const float (&w)[n], const float (&slope)[n], const lk_ce_gradient &g,
                        const Args &a)
{
    if (!plain && a.dentropy) {
        const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
        LK_UNROLL for (int j = 0; j < n; j++) v[j] = fmaf(g.p_factor, e[j], lk_ce_entropy_term(g, e[j], v[j], scale) - w[j]);
    } else {
        LK_UNROLL for (int j = 0; j < n; j++) v[j] = fmaf(g.p_factor, e[j], -w[j]);
    }
    if (!plain && a.softcap > 0.0f) {
        LK_UNROLL for (int j = 0; j < n; j++) v[j] *= slope[j];
    }
}

/* The gradient of the target: f_lse p[y] minus what the others get. others: the sum of their p, so that nothing cancels where p[y]
 * is almost 1. Below 1/2 the error of p[y] is less than that of the sum. */
LK_DEVICE float lk_ce_target_dz(float f_lse, float f_rest, float w_term, float p, float others, float entropy_term, float slope)
{
    return (fmaf(f_lse, p, w_term) - f_rest * (p < 0.5f ? 1.0f - p : others) + entropy_term) * slope;
}

/* What lk_ce_differentiate adds up: nothing; e, except for that of x[target_offset]; or x - g.center of all. */
typedef enum { LK_CE_SUM_NOTHING, LK_CE_SUM_E, LK_CE_SUM_X } lk_ce_summand;

/* Turns the logits x of columns col, col + 1, ... into gradients, and adds to sum. The target is x[target_offset], which may lie
 * outside x; the caller writes its gradient later. exact: for lk_ce_cap. */
template <bool plain, lk_ce_summand summand, bool exact, class Args, int n>
LK_DEVICE void lk_ce_differentiate(float (&x)[n], const lk_ce_gradient &g, const Args &a, int64_t col, int target_offset,
                                   float *sum)
{
    float part[2] = {0.0f, 0.0f}, slope[n] LK_UNSET, w_factor[n], e[n];
    LK_UNROLL for (int j = 0; j < n; j++) w_factor[j] = g.w_factor;
    if (!plain && a.class_weight && g.w_factor != 0.0f) {
        LK_UNROLL for (int j = 0; j < n; j++) w_factor[j] *= a.class_weight[col + j];
    }
    if (!plain && a.softcap > 0.0f) lk_ce_cap<exact>(x, slope, a.logit_scale, a.softcap);
    if (summand == LK_CE_SUM_X) {
        LK_UNROLL for (int j = 0; j < n; j++) part[j % 2] += x[j] - g.center;
    }
    LK_UNROLL for (int j = 0; j < n; j++) e[j] = lk_ex2(fmaf(g.rate, x[j], -g.base));
    if (summand == LK_CE_SUM_E && (unsigned)target_offset < (unsigned)n) {
        LK_UNROLL for (int j = 0; j < n; j++) e[j] = j == target_offset ? 0.0f : e[j];
    }
    if (summand == LK_CE_SUM_E) {
        LK_UNROLL for (int j = 0; j < n; j++) part[j % 2] += e[j];
    }
    lk_ce_dz<plain>(x, e, w_factor, slope, g, a);
    if (summand != LK_CE_SUM_NOTHING) *sum += part[0] + part[1];
}

/* The target's, from what its owner keeps. */
template <bool plain, class Args>
LK_DEVICE float lk_ce_target_gradient(const Args &a, const lk_ce_target_term *target_term, const lk_ce_gradient &g, float others,
                                      float scale)
{
    const float e = lk_ex2(fmaf(g.rate, target_term->logit, -g.base)), p = target_term->p_scale * e;
    const float entropy_term = !plain && a.dentropy ? lk_ce_entropy_term(g, e, target_term->logit, scale) : 0.0f;
    return lk_ce_target_dz(target_term->f_lse, target_term->f_rest, target_term->w_term, p, others, entropy_term, target_term->slope);
}

#endif /* CUDA or the simulator */
#endif
