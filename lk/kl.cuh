// SPDX-License-Identifier: MIT
/* kl.cuh - Kullback-Leibler divergence of two tensors of logits, a teacher's and a student's: the loss of distillation, and its
 * gradient for the student. Also their Jensen-Shannon divergence and their total variation.
 *
 *   z = scale logits,  with a softcap c: z = c tanh(scale logits / c)          y: the teacher's, with its own scale and softcap
 *   p = softmax(z),  q = softmax(y),  m = beta q + (1 - beta) p,  d = log q - log p
 *
 *                     loss, divided by w = row_weight                         gradient with respect to z, divided by f
 *   FORWARD           KL(q || p) = sum q log(q / p)                           p - q
 *   REVERSE           KL(p || q) = sum p log(p / q)                           p (log(p / q) - KL(p || q))
 *   JENSEN_SHANNON    beta KL(q || m) + (1 - beta) KL(p || m)                 (1 - beta) p (log(p / m) - KL(p || m))
 *   TOTAL_VARIATION   sum |q - p| / 2                                         p (s - 1) where q > p, else p s
 *
 *   s = the sum of p over the columns with q > p
 *   f = upstream * upstream_value * w
 *   entropy = - sum p log p, the student's;   lse = log sum exp(z),  teacher_lse = log sum exp(y)
 *   dlogits[r,j] = the gradient with respect to z, times the softcap's slope and scale
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/kl.cuh"                      #include "lk/kl.cuh"
 *                LK_DEFINE_KL(bf16)                        LK_DECLARE_KL(bf16)
 *            T is f32, f16 or bf16. Then, asynchronously on the caller's stream, in a graph too:
 *                lk_kl_args args = {};
 *                args.logits = logits, args.teacher = teacher, args.rows = rows, args.vocab = vocab;
 *                args.loss = loss, args.dlogits = dlogits;
 *                lk_status status = lk_kl_forward_backward_bf16(&args, stream);
 *            forward computes loss, lse, teacher_lse and entropy. backward computes dlogits from both tensors of logits; it
 *            needs no result of forward. forward_backward computes all of them. kl.md says how often each call reads a row.
 * Needs      lk_base.cuh, lk_check.cuh, lk_loss.cuh, lk_row.cuh, lk_ptx.cuh. No workspace: ..._workspace_bytes_<T> sets *bytes
 *            to 0.
 * Options    A struct with logits, teacher, the sizes and one output computes FORWARD with all options off. A row with row_weight
 *            0, padding say, is not read: its loss is 0, and so are its other results and dlogits.
 *            Temperature t: set logit_scale = teacher_scale = 1 / t, and divide softcap and teacher_softcap by t. The loss is
 *            usually multiplied by t^2. Pass t^2 as row_weight: it multiplies the loss and the gradient. To
 *            multiply the gradient alone, set upstream_value to t^2. upstream is one number, or with upstream_per_row one for
 *            each row. accumulate_loss: each row's loss is added to what loss holds; set it to 0 before the first call.
 *            Without a softcap, a logit of -inf masks its column: p is 0 there. Where p is 0 and q is not, FORWARD is +inf; its
 *            gradient is finite. Where q is 0 and p is not, REVERSE is +inf, and the row's gradient is infinite or NaN, except 0
 *            where p is 0. JENSEN_SHANNON is finite. If a row of either tensor has only -inf, or has a +inf or NaN, the loss is
 *            NaN. Each element of the gradient is NaN then, or may be 0 where p is 0.
 *            batch_invariant: in forward each row's results have the same bits for any number of rows and at any place among
 *            them, if all rows lie alike modulo 16 bytes. Teams are those of two rows for each SM then, so few or very many rows
 *            take longer.
 *            Columns that are split over ranks: kl_parallel.cuh, which has these options.
 *            TOTAL_VARIATION is 1 - sum min(p, q). So it is the share of a draft's tokens that speculative decoding rejects, where
 *            p is the draft's and q the target's. It is at most 1, and finite where p or q is 0. Its gradient has a jump where q
 *            passes p.
 * Exact      A term q log(q / p) is added as q (e^-d - 1 + d), which is never negative, so the sums have no cancellation: the
 *            loss is never negative, and has relative accuracy where p and q nearly agree. (The two forms have the same sum,
 *            since p and q add up to 1.) TOTAL_VARIATION is off by some 2^-22. For 1 - s the kernel
 *            sums p over the other columns, so its gradient has no cancellation.
 * Repeatable The same bits every time on the same device, for the same sizes, strides and alignment: fixed order, no atomics.
 *            loss and entropy of forward and of forward_backward may differ in their last digits.
 * Source     Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; Agarwal et al., "On-Policy Distillation of
 *            Language Models", 2023, whose generalised Jensen-Shannon divergence this is. Total variation as the rate of
 *            rejections: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
 * Read on    lk/kl.md: how exact results are, and what is read and written.
 *
 * One kernel, lk_kl_kernel: 1 to 32 threads, a block of 256 or a cluster of up to 8 blocks per row. Asynchronous copies bring the
 * first vectors of both rows into shared memory. The team sums the exponentials of both, then the terms of the divergence, then
 * it computes the gradient. Two of these passes may be one: REVERSE, and FORWARD without a gradient, sum the terms in the first.
 * FORWARD with a gradient sums them in the last.
 * For example, in forward_backward a row of 131072 columns in bf16 on an H100 has 8 blocks. A thread has 8 vectors of each tensor.
 * It reads 6 of them from memory once, and the other 2 in every pass. In forward of many rows such a row has a block. A thread has
 * 64 vectors, which are all read once.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_KL_CUH
#define LK_KL_CUH

enum { LK_KL_FORWARD = 0, LK_KL_REVERSE = 1, LK_KL_JENSEN_SHANNON = 2, LK_KL_TOTAL_VARIATION = 3 };

/* Whether the terms need the sums of all columns, so that ranks have the call `between`. */
#define LK_KL_HAS_BETWEEN(Divergence) ((Divergence) == LK_KL_JENSEN_SHANNON || (Divergence) == LK_KL_TOTAL_VARIATION)

/* The threads that compute a row. Every path takes every option and shape, except as under LK_ERR_PATH. */
enum {
    LK_KL_AUTO = 0,
    LK_KL_WARP = 1,   /* 1 to 32 lanes of a warp */
    LK_KL_BLOCK = 2,  /* a block */
    LK_KL_CLUSTER = 3 /* sm_90 and later: a cluster of 2 to 8 blocks */
};

/* One struct for all calls. F: forward, B: backward, FB: forward_backward; without a letter: all three. A call ignores the fields
 * that are marked for other calls. */
typedef struct {
    const void *logits;      /*      in    T [rows, vocab], the student's */
    const void *teacher;     /*      in    T [rows, vocab], the teacher's */
    const float *row_weight; /*      in    f32 [rows], a factor of each row's loss and gradient; NULL: 1 */
    const float *upstream;   /* B FB in    f32 [1], or [rows] with upstream_per_row, the gradient of loss; NULL: 1 */
    float *loss;             /* F FB out   f32 [rows]; NULL to skip */
    float *lse;              /* F FB out   f32 [rows]; NULL to skip */
    float *teacher_lse;      /* F FB out   f32 [rows]; NULL to skip */
    float *entropy;          /* F FB out   f32 [rows]; NULL to skip */
    void *dlogits;           /* B FB out   T [rows, vocab]; may be logits */
    int64_t rows;            /* at least 0 */
    int64_t vocab;           /* 1 to 2^30; with ranks 0 to 2^30 */
    int64_t logits_stride;   /* elements between rows; 0 means packed, vocab */
    int64_t teacher_stride;  /* likewise */
    int64_t dlogits_stride;  /* B FB likewise; if dlogits is logits, 0 means logits_stride */
    float logit_scale;       /* 2^-100 to 2^100; 0 means 1 */
    float teacher_scale;     /* likewise */
    float softcap;           /* 2^-100 to 2^100, keep logit_scale / softcap there too; 0: off */
    float teacher_softcap;   /* likewise */
    float beta;              /* JENSEN_SHANNON: above 0 and below 1; 0 means 1/2 */
    float upstream_value;    /* B FB a factor of upstream, or where that is NULL the gradient of loss itself; 0 means 1 */
    int accumulate_loss;     /* F FB not 0: loss is added to what is there */
    int divergence;          /* LK_KL_FORWARD, _REVERSE, _JENSEN_SHANNON or _TOTAL_VARIATION; 0: FORWARD */
    int upstream_per_row;    /* B FB not 0: upstream is [rows] */
    int path;                /* LK_KL_AUTO, _WARP, _BLOCK or _CLUSTER; 0 chooses */
    int batch_invariant;     /* F not 0: a row's results do not depend on the other rows. See Options */
    void *workspace;         /* only for kl_parallel.cuh: at least the queried bytes, aligned to 128; NULL where that is 0 */
    size_t workspace_bytes;  /* of workspace */
} lk_kl_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md (overlap, alignment):
 *   LK_ERR_NULL       logits or teacher is NULL and has elements; in backward and forward_backward likewise dlogits; or all
 *                     outputs are NULL
 *   LK_ERR_SHAPE      rows or vocab out of range; a stride that is not 0 and below vocab; a tensor of more than 2^62 elements
 *                     with its gaps
 *   LK_ERR_VALUE      a scale, a softcap or beta out of range; divergence or path is none of its enum
 *   LK_ERR_PATH       BLOCK, CLUSTER and batch_invariant with more than 2^27 rows; CLUSTER in code for less than sm_90
 * Fastest: rows of all tensors start on 16 bytes, or at the same place behind a multiple of 16. Where teacher or dlogits do not
 * lie as logits do, they are read or written element by element. */

#define LK_KL_FUNCTIONS(X, T)                                                                                                  \
    X##_CALL(kl, forward, LK_FORWARD, T)                                                                                       \
    X##_CALL(kl, backward, LK_BACKWARD, T)                                                                                     \
    X##_CALL(kl, forward_backward, LK_BOTH, T)
#define LK_DECLARE_KL(T) LK_DECLARE(KL, T)
#define LK_DEFINE_KL(T) LK_DEFINE(KL, T)

#if LK_CUDA

#include "lk_check.cuh"
#include "lk_loss.cuh"

/* ---- The mathematics ----------------------------------------------------------------------------------------------------- */

/* The sums of both tensors' exponentials. */
typedef struct {
    lk_lse student, teacher;
} lk_kl_state;

/* What kl_parallel.cuh has of a row: the state of a rank's columns, or of all columns; and their sums by lk_kl_add_terms, all in
 * natural logarithms. */
typedef struct {
    lk_kl_state of;
    float divergence, entropy;
    float of_student, rest; /* JENSEN_SHANNON: KL(p || m). TOTAL_VARIATION: the sum of p where q > p; that of the other columns */
} lk_kl_row;

/* What a row's probabilities follow from. x: a logit, or z under a softcap.
 *   plain       log2 p = rate x - at - low      one multiply-add; all columns have the same low, below 2^-14
 *   otherwise   log2 p = rate (x - at) - low    low is small too, unless logits are huge */
typedef struct {
    float rate, at, low;
} lk_kl_softmax;

#define LK_KL_BASE 512.0f /* plain below it: then low is below 2^-14 */

/* With log2 of the sum as a whole number k and a rest. Plain: at and low are rate max + k + rest, and nothing is lost. */
LK_DEVICE lk_kl_softmax lk_kl_softmax_of(lk_lse s, float rate, bool plain)
{
    float k = 0.0f;
    const float max = lk_lse_reference(s.max);
    const float rest = s.sum > 0.0f && lk_is_finite(s.sum) ? lk_log_split(s.sum, &k) * LK_LOG2E : NAN;
    if (!plain) {
        const float raised = fmaf(k, lk_rcp(rate), max), at = lk_is_finite(raised) ? raised : max;
        return {rate, at, fmaf(-rate, at - max, k) + rest};
    }
    const float product = rate * max, whole = product + k, at = whole + rest;
    const float k_in = whole - product, rest_in = at - whole;
    const float lost = ((product - (whole - k_in)) + (k - k_in)) + ((whole - (at - rest_in)) + (rest - rest_in));
    return {rate, at, lost + fmaf(rate, max, -product)};
}

/* The sum of w (e^-a - 1 + a), which is never negative, with a = a2 ln 2; other is w e^-a. Where a is small, a polynomial is more
 * exact than w a + (other - w). Where w is 0, a2 may be anything, NaN too. Where w is not, a2 is above -150. Each step is one loop,
 * so that n chains of multiply-adds run side by side. linear: the sum of w a2. */
template <int n>
LK_DEVICE float lk_kl_terms(const float (&w)[n], const float (&other)[n], const float (&a2)[n], float *linear = NULL)
{
    float a[n], h[n], sum = 0.0f;
    LK_UNROLL for (int j = 0; j < n; j++) a[j] = w[j] == 0.0f ? -1000.0f : a2[j]; /* 0 times it is 0 */
    LK_UNROLL for (int j = 0; j < n; j++) h[j] = fmaf(a[j], -0x1.5de42ap-10f, 0x1.3b9f16p-7f);
    LK_UNROLL for (int j = 0; j < n; j++) h[j] = fmaf(a[j], h[j], -0x1.c6b086p-5f);
    LK_UNROLL for (int j = 0; j < n; j++) h[j] = fmaf(a[j], h[j], 0x1.ebfbccp-3f);
    LK_UNROLL for (int j = 0; j < n; j++) h[j] = lk_hold(w[j] * a[j] * (a[j] * h[j]));
    LK_UNROLL
    for (int j = 0; j < n; j++) {
        const float term = fabsf(a[j]) < 0.3f ? h[j] : fmaf(w[j] * a[j], LK_LN2, other[j] - w[j]);
        sum = j == 0 ? term : sum + term;
        if (linear) *linear = fmaf(w[j], a[j], *linear);
    }
    return sum;
}

/* Num columns of both tensors: the logits x and y, capped; then log2 p and log2 q. slope: the softcap's. */
template <int Num> struct lk_kl_values {
    float x[Num], y[Num], slope[Num], p[Num], q[Num];
};

template <bool exact, int Num> LK_DEVICE void lk_kl_cap(lk_kl_values<Num> *v, const lk_kl_args &a)
{
    float unused[Num];
    if (a.softcap > 0.0f) lk_ce_cap<exact>(v->x, v->slope, a.logit_scale, a.softcap);
    if (a.teacher_softcap > 0.0f) lk_ce_cap<exact>(v->y, unused, a.teacher_scale, a.teacher_softcap);
}
/* To log2 p, p and so on. plain: these are log2 p + low and p 2^low; lk_kl_finish and the gradient's factors take low out. */
template <bool plain, bool exact, int Num>
LK_DEVICE void lk_kl_normalize(lk_kl_values<Num> *v, const lk_kl_softmax &p, const lk_kl_softmax &q, const lk_kl_args &a)
{
    if (plain) {
        LK_UNROLL for (int j = 0; j < Num; j++) v->x[j] = fmaf(p.rate, v->x[j], -p.at), v->y[j] = fmaf(q.rate, v->y[j], -q.at);
    } else {
        lk_kl_cap<exact>(v, a);
        LK_UNROLL for (int j = 0; j < Num; j++) v->x[j] = fmaf(p.rate, v->x[j] - p.at, -p.low);
        LK_UNROLL for (int j = 0; j < Num; j++) v->y[j] = fmaf(q.rate, v->y[j] - q.at, -q.low);
    }
    LK_UNROLL for (int j = 0; j < Num; j++) v->p[j] = lk_ex2(v->x[j]), v->q[j] = lk_ex2(v->y[j]);
}

template <bool exact>
LK_DEVICE void lk_kl_normalize_one(lk_kl_values<1> *v, const lk_kl_softmax &p, const lk_kl_softmax &q, bool plain,
                                   const lk_kl_args &a)
{
    if (plain) lk_kl_normalize<true, exact>(v, p, q, a);
    else lk_kl_normalize<false, exact>(v, p, q, a);
}

/* log2(p / m) and log2(q / m), for JENSEN_SHANNON. Let L be the larger of p and q, and e the smaller one over L. Then
 * m / L = share + weight e, with share + weight = 1. Where e is near 1, 1 + weight (e - 1) is more exact. log2(L / m) follows from
 * it, and then the other logarithm. Where p and q are 0, the result is not used. */
typedef struct {
    float p, q;
} lk_kl_ratios;
LK_DEVICE lk_kl_ratios lk_kl_ratios_of(float log2_p, float log2_q, float beta)
{
    const float d = log2_q - log2_p, least = -fabsf(d), e = lk_ex2(least);
    const float weight = d < 0.0f ? beta : 1.0f - beta, share = d < 0.0f ? 1.0f - beta : beta; /* of the smaller, the larger one */
    const float m = least < -1.0f ? fmaf(weight, e, share) : fmaf(weight, e - 1.0f, 1.0f);
    const float larger = -lk_lg2(m), smaller = larger + least;
    return d < 0.0f ? lk_kl_ratios{larger, smaller} : lk_kl_ratios{smaller, larger};
}

/* The sums of a row: of the divergence, in TOTAL_VARIATION twice it; of the entropy (here in log2); then those of lk_kl_row. */
#define LK_KL_SUMS(Divergence) (Divergence == LK_KL_TOTAL_VARIATION ? 4 : Divergence == LK_KL_JENSEN_SHANNON ? 3 : 2)

/* TOTAL_VARIATION: whether a column counts as q > p. NaN does not, but it makes the row's first sum NaN, and so its gradient. */
template <int Num> LK_DEVICE bool lk_kl_above(const lk_kl_values<Num> &v, int j)
{
    return v.q[j] > v.p[j];
}

/* Adds the columns' terms to the sums. */
template <int Divergence, int Num>
LK_DEVICE void lk_kl_add_terms(float (&sum)[LK_KL_SUMS(Divergence)], const lk_kl_values<Num> &v, const lk_kl_args &a)
{
    float of_p[Num], of_q[Num], m[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) {
        lk_kl_ratios r = {v.x[j] - v.y[j], v.y[j] - v.x[j]};
        if (Divergence == LK_KL_JENSEN_SHANNON) r = lk_kl_ratios_of(v.x[j], v.y[j], a.beta);
        of_p[j] = r.p, of_q[j] = r.q, m[j] = fmaf(a.beta, v.q[j], (1.0f - a.beta) * v.p[j]);
    }
    if (Divergence == LK_KL_FORWARD) sum[0] += lk_kl_terms(v.q, v.p, of_q);
    if (Divergence == LK_KL_REVERSE) sum[0] += lk_kl_terms(v.p, v.q, of_p);
    if constexpr (Divergence == LK_KL_JENSEN_SHANNON) {
        const float from_p = lk_kl_terms(v.p, m, of_p);
        sum[0] += a.beta * lk_kl_terms(v.q, m, of_q) + (1.0f - a.beta) * from_p, sum[2] += from_p;
    }
    if constexpr (Divergence == LK_KL_TOTAL_VARIATION) {
        LK_UNROLL for (int j = 0; j < Num; j++) sum[0] += fabsf(v.q[j] - v.p[j]);
        LK_UNROLL for (int j = 0; j < Num; j++) {
            if (lk_kl_above(v, j)) sum[2] += v.p[j];
            else sum[3] += v.p[j];
        }
    }
    if (!a.entropy) return;
    LK_UNROLL for (int j = 0; j < Num; j++) sum[1] = fmaf(v.p[j], -fmaxf(v.x[j], -1000.0f), sum[1]); /* 0 where p is */
}

/* The factors of a row's gradient. of_x: upstream * row_weight * logit_scale, in JENSEN_SHANNON also times 1 - beta. of_q: one more
 * factor, for q alone; 1 unless the row is plain. mean: the row's sum of p log(p / q), or of p log(p / m). In a plain row all three
 * also correct for the low of p and q. In TOTAL_VARIATION mean is s, and rest 1 - s. */
typedef struct {
    float of_x, of_q, mean, rest;
} lk_kl_factors;

/* Turns x into gradients. */
template <int Divergence, bool plain, int Num>
LK_DEVICE void lk_kl_differentiate(lk_kl_values<Num> *v, const lk_kl_factors &f, const lk_kl_args &a)
{
    LK_UNROLL for (int j = 0; j < Num; j++) {
        float g = fmaf(-f.of_q, v->q[j], v->p[j]);
        if (Divergence == LK_KL_TOTAL_VARIATION) {
            g = v->p[j] * (lk_kl_above(*v, j) ? -f.rest : f.mean);
        } else if (Divergence != LK_KL_FORWARD) {
            const bool reverse = Divergence == LK_KL_REVERSE;
            const float slope = reverse ? v->x[j] - v->y[j] : lk_kl_ratios_of(v->x[j], v->y[j], a.beta).p;
            g = v->p[j] == 0.0f ? 0.0f : v->p[j] * fmaf(slope, LK_LN2, -f.mean);
        }
        v->x[j] = f.of_x * g;
    }
    if (!plain && a.softcap > 0.0f) {
        LK_UNROLL for (int j = 0; j < Num; j++) v->x[j] *= v->slope[j];
    }
}

/* ---- The kernel ---------------------------------------------------------------------------------------------------------- */

#define LK_KL_THREADS 256
#define LK_KL_VECS 8 /* of each tensor, that a thread should have: see lk_kl_lay_out */
#define LK_KL_VECS_ONCE 64 /* the same at most where a row is read once: see lk_kl_lay_out */
#define LK_KL_HELD 6 /* of them, in shared memory, 48 KiB of a block, so that four blocks fit an SM; or half as many */
#define LK_KL_BLOCKS (LK_ARCH == 900 ? 4 : 3) /* per SM: as many as registers allow without spills */

/* What a launch computes: a call of this header; or, for kl_parallel.cuh, the state of a rank's columns, the sums of terms over them
 * from the state of all columns, or the gradient from that and the sums of all. */
enum { LK_KL_WHOLE, LK_KL_STATE, LK_KL_TERMS, LK_KL_GRADIENT };

typedef struct {
    lk_kl_args a; /* with all defaults filled in; without outputs that the call does not have */
    lk_team team;
    int slots;
    float scale, teacher_scale; /* of x: 1 under a softcap */
    float rate, teacher_rate;   /* times log2 e. As operands in constant memory they take no registers */
    lk_kl_row *states;          /* [rows], of other steps than LK_KL_WHOLE */
} lk_kl_call;

/* A thread's part of a row. The first in_slots of its vectors lie in shared memory. Vector u lies u steps behind the first. */
template <class T> struct lk_kl_thread {
    lk_row<T> row;                  /* of logits */
    const T *from, *teacher_from;   /* the first vectors */
    lk_vec<T> *slot, *teacher_slot; /* of the first; the next are blockDim.x apart */
    uint32_t step;                  /* bytes */
    int in_slots;
    bool wide; /* the teacher's vectors lie on 16 bytes too */
};

/* Where vector u of a thread is: u steps of so many bytes behind the first. */
template <class Elem> LK_DEVICE Elem *lk_kl_place(Elem *first, uint32_t step, int u)
{
    return (Elem *)((uintptr_t)first + (uint64_t)step * (uint32_t)u);
}

template <class T> LK_DEVICE lk_vec<T> lk_kl_load_narrow(const T *from)
{
    T each[LK_VEC<T>];
    lk_vec<T> v;
    LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) each[j] = from[j];
    memcpy(&v, each, sizeof v);
    return v;
}
template <class T> LK_DEVICE lk_vec<T> lk_kl_load_teacher(const lk_kl_thread<T> &t, int u)
{
    const T *const from = lk_kl_place(t.teacher_from, t.step, u);
    return t.wide ? lk_load_vec(from) : lk_kl_load_narrow(from);
}

/* Starts the copies of vectors begin to end - 1, as a group. */
template <class T> LK_DEVICE void lk_kl_copy(const lk_kl_thread<T> &t, int begin, int end)
{
    LK_NO_UNROLL for (int u = begin; u < end; u++)
        lk_cp_async_16(t.slot, u * LK_KL_THREADS * 16, lk_kl_place(t.from, t.step, u));
    LK_NO_UNROLL for (int u = begin; u < end && t.wide; u++)
        lk_cp_async_16(t.teacher_slot, u * LK_KL_THREADS * 16, lk_kl_place(t.teacher_from, t.step, u));
    LK_NO_UNROLL for (int u = begin; u < end && !t.wide; u++) t.teacher_slot[u * LK_KL_THREADS] = lk_kl_load_teacher(t, u);
    lk_cp_async_commit_group();
}

/* Vector u of a thread. */
template <class T> struct lk_kl_vecs {
    lk_vec<T> x, y;
};
template <class T> LK_DEVICE lk_kl_vecs<T> lk_kl_load(const lk_kl_thread<T> &t, int u)
{
    if (u < t.in_slots) return {t.slot[u * LK_KL_THREADS], t.teacher_slot[u * LK_KL_THREADS]};
    return {lk_load_vec(lk_kl_place(t.from, t.step, u)), lk_kl_load_teacher(t, u)};
}

/* The Num logits from element `first` of a vector on. */
template <int Num, class T> LK_DEVICE lk_kl_values<Num> lk_kl_get(const lk_kl_vecs<T> &vecs, int first)
{
    lk_kl_values<Num> v;
    float x[LK_VEC<T>], y[LK_VEC<T>];
    lk_unpack(x, vecs.x), lk_unpack(y, vecs.y);
    LK_UNROLL for (int j = 0; j < Num; j++) v.x[j] = x[first + j], v.y[j] = y[first + j];
    return v;
}
/* The logits of a row's column, from memory. */
template <class T> LK_DEVICE lk_kl_values<1> lk_kl_get_one(const lk_kl_args &a, int64_t row, int64_t col)
{
    const T x = ((const T *)a.logits)[row * a.logits_stride + col], y = ((const T *)a.teacher)[row * a.teacher_stride + col];
    return {{lk_to_float(x)}, {lk_to_float(y)}, {1.0f}, {}, {}};
}

/* Adds logits, capped, to the state. */
template <int Num> LK_DEVICE lk_kl_state lk_kl_add(lk_kl_state s, const lk_kl_values<Num> &v, float scale, float teacher_scale)
{
    return {lk_lse_add(s.student, v.x, scale), lk_lse_add(s.teacher, v.y, teacher_scale)};
}

/* A thread's sum of one tensor against one reference: sum 2^(rate x + minus), where -minus is about the largest of rate x. So a
 * column costs a multiply-add, an exponential and an addition. */
typedef struct {
    float minus, sum;
} lk_kl_tally;

/* Both tensors' sums; and what FORWARD, with w = q, and REVERSE, with w = p, sum beside them. p, q and log2 of them are against the
 * references here. So a2 = log2(w / other) is off by one number in all columns, until lk_kl_move changes the references. */
typedef struct {
    lk_kl_tally x, y;
    float terms, linear; /* sum w (e^-a - 1 + a) and sum w a2 */
    float p_log_p;       /* sum p log2 p */
} lk_kl_tallies;

/* The references are raised where an exponent is above LK_KL_RAISE, or, with terms, where four probabilities add up to more than
 * LK_KL_LIMIT, which is as much. Below an exponent of 16 merging is exact to 2^-21. */
#define LK_KL_RAISE 12.0f
#define LK_KL_LIMIT 4096.0f

LK_DEVICE lk_kl_tallies lk_kl_tallies_empty(void)
{
    const lk_kl_tally none = {FLT_MAX, 0.0f};
    return {none, none, 0.0f, 0.0f, 0.0f};
}

template <int Num> struct lk_kl_floats {
    float of[Num];
};

/* Adds by_x to all log2 p and by_y to all log2 q; weigh: there are terms. more = by_y - by_x, exact where p and q nearly agree. So
 * every a2 grows by g, which is more or -more. Let G = g ln 2, and D = w e^-a - w. Then each term grows by
 * w (e^-G - 1 + G) + D (e^-G - 1). The sum of D is terms - linear ln 2. Where g is small, this is added to the terms, since nothing
 * cancels. Elsewhere their sum is computed from the new sums of w e^-a, of w and of w a. */
template <int Divergence, bool weigh> LK_DEVICE void lk_kl_move(lk_kl_tallies *t, float by_x, float by_y, float more)
{
    constexpr bool forward = Divergence == LK_KL_FORWARD;
    const float times_x = lk_ex2(by_x), times_y = lk_ex2(by_y);
    if constexpr (weigh) {
        const float g = forward ? more : -more, one[1] = {1.0f}, e[1] = {lk_ex2(-g)}, of_g[1] = {g};
        const float w = forward ? t->y.sum : t->x.sum, times_w = forward ? times_y : times_x;
        const float other = forward ? t->x.sum : t->y.sum, times_other = forward ? times_x : times_y;
        const float curve = lk_kl_terms(one, e, of_g), linear = fmaf(g, w, t->linear), d = t->terms - LK_LN2 * t->linear;
        if (fabsf(g) < 0.3f) t->terms = times_w * (t->terms + fmaf(w, curve, d * fmaf(-LK_LN2, g, curve)));
        else t->terms = times_other * other - times_w * w + LK_LN2 * times_w * linear;
        t->linear = times_w * linear, t->p_log_p = times_x * fmaf(by_x, t->x.sum, t->p_log_p);
    }
    t->x.sum *= times_x, t->y.sum *= times_y;
}

/* Raises both references to the largest logits where those are above them. Both, so that log2(q / p) stays small in a row where p
 * and q nearly agree. If a logit is too large, the student's sum becomes NaN, and the thread reads its vectors again. */
template <int Divergence, bool weigh>
LK_DEVICE void lk_kl_raise(lk_kl_tallies *t, float most, float teacher_most, float rate, float teacher_rate)
{
    const float minus = fminf(t->x.minus, -(rate * most)), teacher_minus = fminf(t->y.minus, -(teacher_rate * teacher_most));
    const bool sound = minus > -LK_KL_BASE && teacher_minus > -LK_KL_BASE;
    const float more = (teacher_minus - minus) - (t->y.minus - t->x.minus);
    lk_kl_move<Divergence, weigh>(t, minus - t->x.minus, teacher_minus - t->y.minus, more);
    t->x.minus = sound ? minus : NAN, t->y.minus = teacher_minus;
}

/* The largest of a vector, NaN only where all are. */
LK_DEVICE float lk_kl_most(lk_vec<lk_f32> v)
{
    float x[4];
    lk_unpack(x, v);
    return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
}
template <class Pair> LK_DEVICE float lk_kl_most_of_pairs(uint4 raw)
{
    Pair x[4];
    memcpy(x, &raw, 16);
    const Pair most = __hmax2(__hmax2(x[0], x[1]), __hmax2(x[2], x[3]));
    return fmaxf(__low2float(most), __high2float(most));
}
LK_DEVICE float lk_kl_most(lk_vec<lk_f16> v) { return lk_kl_most_of_pairs<__half2>(v.raw); }
LK_DEVICE float lk_kl_most(lk_vec<lk_bf16> v) { return lk_kl_most_of_pairs<__nv_bfloat162>(v.raw); }

/* Adds a vector of both tensors, without terms. The references are raised before, so that no branch waits for exponentials. */
template <int Divergence, class T>
LK_DEVICE void lk_kl_tally_add(lk_kl_tallies *t, const lk_kl_vecs<T> &vecs, float rate, float teacher_rate)
{
    const float most = lk_kl_most(vecs.x), teacher_most = lk_kl_most(vecs.y);
    const bool raise = fmaf(rate, most, t->x.minus) > LK_KL_RAISE;
    if (raise || fmaf(teacher_rate, teacher_most, t->y.minus) > LK_KL_RAISE)
        lk_kl_raise<Divergence, false>(t, most, teacher_most, rate, teacher_rate);
    t->x.sum += lk_lse_terms(vecs.x, rate, -t->x.minus), t->y.sum += lk_lse_terms(vecs.y, teacher_rate, -t->y.minus);
}

/* z of four logits: a function of its own, since that takes fewer registers where it is used. */
template <bool exact> LK_NOINLINE lk_kl_floats<4> lk_kl_cap_four(lk_kl_floats<4> x, float scale, float softcap)
{
    float unused[4];
    lk_ce_cap<exact>(x.of, unused, scale, softcap);
    return x;
}

/* Four logits of both tensors, from element `first` of a vector on. */
template <bool capped, class T> LK_DEVICE lk_kl_values<4> lk_kl_get_four(const lk_kl_vecs<T> &vecs, int first, const lk_kl_args &a)
{
    lk_kl_values<4> v = lk_kl_get<4>(vecs, first);
    if constexpr (capped) {
        lk_kl_floats<4> x, y;
        LK_UNROLL for (int j = 0; j < 4; j++) x.of[j] = v.x[j], y.of[j] = v.y[j];
        if (a.softcap > 0.0f) x = lk_kl_cap_four<sizeof(T) == 4>(x, a.logit_scale, a.softcap);
        if (a.teacher_softcap > 0.0f) y = lk_kl_cap_four<sizeof(T) == 4>(y, a.teacher_scale, a.teacher_softcap);
        LK_UNROLL for (int j = 0; j < 4; j++) v.x[j] = x.of[j], v.y[j] = y.of[j];
    }
    return v;
}

/* Turns four logits into their probabilities against the references, and y into a2; sum[2] is that of p log2 p. False: a reference
 * is to be raised. */
template <int Divergence>
LK_DEVICE bool lk_kl_weigh_against(lk_kl_values<4> *v, float (&sum)[3], const lk_kl_tallies &t, const lk_kl_call &call)
{
    LK_UNROLL for (int j = 0; j < 4; j++) v->x[j] = fmaf(call.rate, v->x[j], t.x.minus), v->p[j] = lk_ex2(v->x[j]);
    LK_UNROLL for (int j = 0; j < 4; j++) v->y[j] = fmaf(call.teacher_rate, v->y[j], t.y.minus), v->q[j] = lk_ex2(v->y[j]);
    sum[0] = (v->p[0] + v->p[1]) + (v->p[2] + v->p[3]), sum[1] = (v->q[0] + v->q[1]) + (v->q[2] + v->q[3]), sum[2] = 0.0f;
    if (call.a.entropy) {
        LK_UNROLL for (int j = 0; j < 4; j++) sum[2] = fmaf(v->p[j], fmaxf(v->x[j], -1000.0f), sum[2]); /* 0 where p is */
    }
    LK_UNROLL
    for (int j = 0; j < 4; j++) v->y[j] = lk_hold(Divergence == LK_KL_FORWARD ? v->y[j] - v->x[j] : v->x[j] - v->y[j]);
    return sum[0] <= LK_KL_LIMIT && sum[1] <= LK_KL_LIMIT;
}

/* Adds four columns and their terms. */
template <int Divergence, bool capped, class T>
LK_DEVICE void lk_kl_weigh(lk_kl_tallies *t, const lk_kl_vecs<T> &vecs, int first, const lk_kl_call &call)
{
    float sum[3];
    lk_kl_values<4> v = lk_kl_get_four<capped>(vecs, first, call.a);
    if (!lk_kl_weigh_against<Divergence>(&v, sum, *t, call)) {
        v = lk_kl_get_four<capped>(vecs, first, call.a);
        const float most = fmaxf(fmaxf(v.x[0], v.x[1]), fmaxf(v.x[2], v.x[3]));
        const float teacher_most = fmaxf(fmaxf(v.y[0], v.y[1]), fmaxf(v.y[2], v.y[3]));
        lk_kl_raise<Divergence, true>(t, most, teacher_most, call.rate, call.teacher_rate);
        lk_kl_weigh_against<Divergence>(&v, sum, *t, call);
    }
    t->x.sum += sum[0], t->y.sum += sum[1], t->p_log_p += sum[2];
    t->terms += Divergence == LK_KL_FORWARD ? lk_kl_terms(v.q, v.p, v.y, &t->linear) : lk_kl_terms(v.p, v.q, v.y, &t->linear);
}
/* All vectors of a thread; weigh: with their terms. Those from `halfway` on are not awaited yet. */
template <int Divergence, bool weigh, bool capped, class T>
LK_DEVICE void lk_kl_tally_all(lk_kl_tallies *t, const lk_kl_thread<T> &thread, int count, int halfway, const lk_kl_call &call)
{
    int u = 0;
    LK_NO_UNROLL for (int part = 0; part < 2; part++) {
        if (part) lk_cp_async_wait_group<0>();
        LK_NO_UNROLL for (const int end = part ? count : halfway; u < end; u++) {
            const lk_kl_vecs<T> vecs = lk_kl_load(thread, u);
            if constexpr (weigh) {
                LK_UNROLL for (int at = 0; at < LK_VEC<T>; at += 4) lk_kl_weigh<Divergence, capped>(t, vecs, at, call);
            } else {
                lk_kl_tally_add<Divergence>(t, vecs, call.rate, call.teacher_rate);
            }
        }
    }
}

/* Whether a sum has something, and nothing that is too large. */
LK_DEVICE bool lk_kl_tally_sound(const lk_kl_tally &t)
{
    return t.sum > 0.0f && fabsf(t.minus) < LK_KL_BASE;
}

/* What rounding took off minus / rate is known exactly. */
LK_DEVICE lk_lse lk_kl_tally_state(const lk_kl_tally &t, float rate)
{
    const float reference = -__fdividef(t.minus, rate);
    return t.sum == 0.0f ? lk_lse_empty() : lk_lse{reference, t.sum * lk_ex2(-fmaf(rate, reference, t.minus))};
}

/* From a thread's references to those of the row. */
template <int Divergence>
LK_DEVICE void lk_kl_move_to(lk_kl_tallies *t, const lk_kl_softmax &p, const lk_kl_softmax &q, bool plain)
{
    const float by_x = plain ? -p.at - t->x.minus : -fmaf(p.rate, p.at, t->x.minus) - p.low;
    const float by_y = plain ? -q.at - t->y.minus : -fmaf(q.rate, q.at, t->y.minus) - q.low;
    lk_kl_move<Divergence, true>(t, by_x, by_y, plain ? (p.at - q.at) - (t->y.minus - t->x.minus) : by_y - by_x);
}

/* Stores Num neighbours; wide: at a multiple of Num sizeof(Out) bytes. */
template <class Out, int Num> LK_NOINLINE void lk_kl_store_narrow(Out *to, lk_kl_floats<Num> x)
{
    LK_UNROLL for (int j = 0; j < Num; j++) lk_put(to + j, x.of[j]);
}
template <class Out, int Num> LK_DEVICE void lk_kl_store(Out *to, const float (&x)[Num], bool wide)
{
    if (!wide) {
        lk_kl_floats<Num> row;
        LK_UNROLL for (int j = 0; j < Num; j++) row.of[j] = x[j];
        lk_kl_store_narrow(to, row);
    } else if constexpr (Num == LK_VEC<Out>) {
        lk_store_n<true>(to, x);
    } else { /* half a vector */
        Out each[Num];
        uint2 packed;
        static_assert(sizeof each == sizeof packed, "8 bytes");
        LK_UNROLL for (int j = 0; j < Num; j++) lk_put(&each[j], x[j]);
        memcpy(&packed, each, sizeof packed);
        *(uint2 *)to = packed;
    }
}

/* Where a row's gradient goes: the row, a thread's first vector in column `first`, and whether vectors lie at multiples of their
 * bytes. */
template <class Out> struct lk_kl_out {
    Out *row, *first;
    bool wide;
};
template <class Out, class T> LK_DEVICE lk_kl_out<Out> lk_kl_out_of(const lk_row<T> &row, int64_t first, const lk_kl_args &a)
{
    Out *const out = (Out *)a.dlogits + row.number * a.dlogits_stride;
    return {out, out + first, (uintptr_t)(out + row.split.head) % (LK_VEC<T> * sizeof(Out)) == 0};
}

/* The gradient of a row that is not read. */
template <class T, class Out> LK_DEVICE void lk_kl_write_zeros(const lk_kl_thread<T> &t, const lk_kl_out<Out> &out)
{
    const float zeros[LK_VEC<T>] = {};
    LK_NO_UNROLL
    for (int u = 0; u < t.row.count; u++) lk_kl_store(lk_kl_place(out.first, t.step / sizeof(T) * sizeof(Out), u), zeros, out.wide);
    LK_NO_UNROLL for (int i = t.row.rank; i < t.row.split.edge; i += 1 << t.row.size_log2)
        lk_put(out.row + lk_edge_col<T>(t.row.split, i), 0.0f);
}

/* Adds a vector's terms to the sums. lk_kl_differentiate_vecs computes its gradients g; in FORWARD it adds the terms too. */
template <int Divergence, bool plain, class T>
LK_DEVICE void lk_kl_add_vecs(float (&sum)[LK_KL_SUMS(Divergence)], const lk_kl_vecs<T> &vecs, const lk_kl_softmax &p,
                              const lk_kl_softmax &q, const lk_kl_args &a)
{
    LK_UNROLL for (int at = 0; at < LK_VEC<T>; at += 4) {
        lk_kl_values<4> v = lk_kl_get<4>(vecs, at);
        lk_kl_normalize<plain, sizeof(T) == 4>(&v, p, q, a);
        lk_kl_add_terms<Divergence>(sum, v, a);
    }
}
template <int Divergence, bool plain, class T>
LK_DEVICE void lk_kl_differentiate_vecs(float (&g)[LK_VEC<T>], float (&sum)[LK_KL_SUMS(Divergence)], bool terms,
                                        const lk_kl_vecs<T> &vecs, const lk_kl_softmax &p, const lk_kl_softmax &q,
                                        const lk_kl_factors &f, const lk_kl_args &a)
{
    LK_UNROLL for (int at = 0; at < LK_VEC<T>; at += 4) {
        lk_kl_values<4> v = lk_kl_get<4>(vecs, at);
        lk_kl_normalize<plain, sizeof(T) == 4>(&v, p, q, a);
        if (Divergence == LK_KL_FORWARD && terms) lk_kl_add_terms<Divergence>(sum, v, a);
        lk_kl_differentiate<Divergence, plain>(&v, f, a);
        LK_UNROLL for (int j = 0; j < 4; j++) g[at + j] = v.x[j];
    }
}

/* Adds up the sums of a row's team, and writes the results; other steps than LK_KL_WHOLE write them to the row's state. In a plain
 * row the terms of the divergence have w 2^low instead of w, and log(w / other) + shift instead of the log. Over the row w sums to
 * 1, and so does other. So the sum of the terms is 2^low (the divergence + e^-shift - 1 + shift). */
template <int Divergence, int Step, int Sums, class T>
LK_DEVICE void lk_kl_finish(float (&sum)[Sums], const lk_row<T> &row, bool plain, float low_p, float low_q, const lk_kl_call &call)
{
    const lk_kl_args &a = call.a;
    if (row.size_log2 > 5) {
        lk_sum_cluster(sum, 0);
    } else {
        LK_UNROLL for (int i = 0; i < Sums; i++) sum[i] = lk_sum_warp(sum[i], row.lanes);
    }
    if (plain) {
        const float shift = LK_LN2 * (low_q - low_p), more = 0.5f * shift * shift;
        sum[0] = sum[0] * lk_ex2(Divergence == LK_KL_FORWARD ? -low_q : -low_p) - more;
        sum[0] = sum[0] < 0.0f ? 0.0f : sum[0];
        sum[1] = fmaf(sum[1], lk_ex2(-low_p), low_p);
    }
    if (Divergence == LK_KL_TOTAL_VARIATION) sum[0] *= 0.5f;
    if (!row.there || row.rank != 0) return;
    if constexpr (Step != LK_KL_WHOLE) {
        lk_kl_row *const to = call.states + row.number;
        to->divergence = sum[0], to->entropy = LK_LN2 * sum[1];
        if constexpr (Sums > 2) to->of_student = sum[2];
        if constexpr (Sums > 3) to->rest = sum[3];
        return;
    }
    const float weight = a.row_weight ? a.row_weight[row.number] : 1.0f; /* read again: it is not held in a register */
    if (a.loss) lk_put_or_add(a.loss + row.number, weight == 0.0f ? 0.0f : weight * sum[0], a.accumulate_loss);
    if (a.entropy) a.entropy[row.number] = LK_LN2 * sum[1];
}

/* The number of a thread's row, by instructions of its own. */
LK_DEVICE int64_t lk_kl_row_again(int size_log2)
{
    const float thread = lk_hold(__int_as_float((int)threadIdx.x));
    return ((int64_t)blockIdx.x * LK_KL_THREADS + __float_as_int(thread)) >> size_log2;
}

/* A team owns a row. Out: the type of dlogits, which may be in place of logits where Out is T. */
template <class T, class Out, int Divergence, int Step = LK_KL_WHOLE>
LK_KERNEL void __launch_bounds__(LK_KL_THREADS, LK_KL_BLOCKS) lk_kl_kernel(const __grid_constant__ lk_kl_call call)
{
    constexpr int Num = LK_VEC<T>;
    constexpr bool exact = sizeof(T) == 4; /* lk_ce_cap's */
    constexpr bool given = Step == LK_KL_TERMS || Step == LK_KL_GRADIENT; /* the state of all columns */
    LK_DYN_SMEM(lk_vec<T>, slots);
    typedef lk_inbox<lk_kl_state, LK_KL_THREADS> inbox_type;
    LK_SHARED(inbox_type, inbox, [1]);
    const lk_kl_args &a = call.a;
    lk_kl_thread<T> t;
    t.row = lk_row_of<LK_TEAM_ANY, LK_KL_THREADS>(call.team, (const T *)a.logits, a.logits_stride, a.rows, a.vocab);
    t.row.split.vecs = (int)t.row.split.vecs; /* vocab is at most 2^30, and a register is saved */
    int64_t row = t.row.number;
    const int team = 1 << t.row.size_log2;
    if constexpr (Step == LK_KL_TERMS) lk_cluster_begin(), lk_cluster_ready();
    else if constexpr (!given) lk_inbox_begin<LK_TEAM_ANY, true>(inbox);
    lk_griddepcontrol_launch_dependents();
    lk_griddepcontrol_wait();
    const bool read = t.row.there && !(a.row_weight && a.row_weight[row] == 0.0f); /* the same in all threads of the team */
    t.step = 16u << t.row.size_log2;
    lk_kl_out<Out> out = lk_kl_out_of<Out>(t.row, t.row.first - t.row.data, a);
    if (t.row.there && !read && a.dlogits) lk_kl_write_zeros(t, out);
    const int count = read ? t.row.count : 0, edge = read ? t.row.split.edge : 0;
    const T *const teacher = (const T *)a.teacher + row * a.teacher_stride;
    t.from = t.row.first, t.teacher_from = teacher + (t.row.first - t.row.data);
    t.slot = &slots + threadIdx.x, t.teacher_slot = t.slot + call.slots * LK_KL_THREADS;
    t.in_slots = count < call.slots ? count : call.slots;
    t.wide = (uintptr_t)(teacher + t.row.split.head) % 16 == 0;
    const int halfway = (t.in_slots + 1) / 2;
    lk_kl_copy(t, 0, halfway);
    lk_kl_copy(t, halfway, t.in_slots);

    /* weigh: terms are summed in the first pass. beside: in the last, with FORWARD's gradient, which needs no sum. */
    const bool all_terms = a.loss || a.entropy || (Divergence != LK_KL_FORWARD && a.dlogits);
    const bool terms = Step == LK_KL_WHOLE   ? all_terms
                       : Step == LK_KL_STATE ? !LK_KL_HAS_BETWEEN(Divergence)
                                             : Step == LK_KL_TERMS;
    const bool beside = Divergence == LK_KL_FORWARD && terms && a.dlogits;
    const bool weigh = !LK_KL_HAS_BETWEEN(Divergence) && terms && !beside;
    const float scale = call.scale, teacher_scale = call.teacher_scale;
    lk_kl_state s = {lk_lse_empty(), lk_lse_empty()};
    lk_kl_tallies tallies = lk_kl_tallies_empty();
    const bool uncapped = !(a.softcap > 0.0f || a.teacher_softcap > 0.0f);
    bool tallied = !given;
    if constexpr (given) {
        lk_cp_async_wait_group<0>();
        if (read) s = call.states[row].of;
    } else {
        lk_cp_async_wait_group<1>();
        if constexpr (!LK_KL_HAS_BETWEEN(Divergence)) {
            if (weigh && uncapped) lk_kl_tally_all<Divergence, true, false>(&tallies, t, count, halfway, call);
            else if (weigh) lk_kl_tally_all<Divergence, true, true>(&tallies, t, count, halfway, call);
        }
        if (!weigh && uncapped) lk_kl_tally_all<Divergence, false, false>(&tallies, t, count, halfway, call);
        s = {lk_kl_tally_state(tallies.x, call.rate), lk_kl_tally_state(tallies.y, call.teacher_rate)};
        tallied = lk_kl_tally_sound(tallies.x) && lk_kl_tally_sound(tallies.y);
        if (!tallied) { /* all are -inf, one is too large or too small, or there is a softcap */
            lk_cp_async_wait_group<0>();
            s = {lk_lse_empty(), lk_lse_empty()};
            LK_NO_UNROLL for (int u = 0; u < count; u++) {
                const lk_kl_vecs<T> vecs = lk_kl_load(t, u);
                LK_UNROLL
                for (int at = 0; at < Num; at += 4) s = lk_kl_add(s, lk_kl_get_four<true>(vecs, at, a), scale, teacher_scale);
            }
            tallied = weigh && (lk_kl_tally_sound(tallies.x) || (tallies.x.sum == 0.0f && s.student.max == -INFINITY)) &&
                      (lk_kl_tally_sound(tallies.y) || (tallies.y.sum == 0.0f && s.teacher.max == -INFINITY));
        }
        lk_cp_async_wait_group<0>();
        if (!LK_KL_HAS_BETWEEN(Divergence)) { /* again: no register held it while terms were summed */
            row = t.row.number = lk_kl_row_again(t.row.size_log2);
            out = lk_kl_out_of<Out>(t.row, t.row.split.head + (int64_t)t.row.rank * Num, a);
        }
        LK_NO_UNROLL for (int i = t.row.rank; i < edge; i += team) {
            lk_kl_values<1> v = lk_kl_get_one<T>(a, row, lk_edge_col<T>(t.row.split, i));
            lk_kl_cap<exact>(&v, a);
            s = lk_kl_add(s, v, scale, teacher_scale);
        }
        s = {lk_lse_warp(s.student, t.row.lanes, scale), lk_lse_warp(s.teacher, t.row.lanes, teacher_scale)};
        if (team > 32) {
            lk_inbox_collect<LK_TEAM_ANY, true>(inbox, s);
            s = {lk_lse_empty(), lk_lse_empty()};
            for (int i = (int)threadIdx.x % 32; i < lk_inbox_count<LK_TEAM_ANY>(inbox); i += 32) {
                const lk_kl_state other = lk_inbox_state(inbox, i);
                s = {lk_lse_merge(s.student, other.student, scale), lk_lse_merge(s.teacher, other.teacher, teacher_scale)};
            }
            s = {lk_lse_warp(s.student, 32, scale), lk_lse_warp(s.teacher, 32, teacher_scale)};
        }
    }
    bool plain = !LK_KL_HAS_BETWEEN(Divergence) && uncapped; /* the same in all threads of the team */
    lk_kl_softmax p = lk_kl_softmax_of(s.student, call.rate, plain), q = lk_kl_softmax_of(s.teacher, call.teacher_rate, plain);
    if (plain && !(fabsf(p.at) < LK_KL_BASE && fabsf(q.at) < LK_KL_BASE)) {
        plain = false;
        p = lk_kl_softmax_of(s.student, call.rate, false), q = lk_kl_softmax_of(s.teacher, call.teacher_rate, false);
    }

    const bool first = t.row.there && t.row.rank == 0;
    if (Step == LK_KL_STATE && first) call.states[row] = {s, 0.0f, 0.0f, 0.0f, 0.0f}; /* lk_kl_finish adds the sums */
    if (first && a.lse) a.lse[row] = read ? lk_lse_log({scale * s.student.max, s.student.sum}) : 0.0f;
    if (first && a.teacher_lse) a.teacher_lse[row] = read ? lk_lse_log({teacher_scale * s.teacher.max, s.teacher.sum}) : 0.0f;

    float sum[LK_KL_SUMS(Divergence)] = {};
    tallied = tallied && weigh;
    if (!LK_KL_HAS_BETWEEN(Divergence) && tallied) {
        lk_kl_move_to<Divergence>(&tallies, p, q, plain);
        tallied = lk_is_finite(tallies.terms) && lk_is_finite(tallies.p_log_p);
        if (tallied) sum[0] = tallies.terms, sum[1] = -tallies.p_log_p;
    }
    if (terms && !beside) {
        LK_NO_UNROLL for (int u = 0; u < count && !tallied; u++) {
            const lk_kl_vecs<T> vecs = lk_kl_load(t, u);
            if (plain) lk_kl_add_vecs<Divergence, true>(sum, vecs, p, q, a);
            else lk_kl_add_vecs<Divergence, false>(sum, vecs, p, q, a);
        }
        LK_NO_UNROLL for (int i = t.row.rank; i < edge; i += team) {
            lk_kl_values<1> v = lk_kl_get_one<T>(a, row, lk_edge_col<T>(t.row.split, i));
            lk_kl_normalize_one<exact>(&v, p, q, plain, a);
            lk_kl_add_terms<Divergence>(sum, v, a);
        }
    }
    if (terms && Divergence != LK_KL_FORWARD) lk_kl_finish<Divergence, Step>(sum, t.row, plain, p.low, q.low, call);
    if (Step == LK_KL_GRADIENT && read) {
        const lk_kl_row of = call.states[row];
        sum[0] = of.divergence;
        if constexpr (LK_KL_SUMS(Divergence) > 2) sum[2] = of.of_student;
        if constexpr (LK_KL_SUMS(Divergence) > 3) sum[3] = of.rest;
    }
    if (a.dlogits) {
        const float upstream = a.upstream_value * (read && a.upstream ? a.upstream[a.upstream_per_row ? row : 0] : 1.0f);
        const float mixed = Divergence == LK_KL_JENSEN_SHANNON ? 1.0f - a.beta : 1.0f;
        const float low_p = plain ? p.low : 0.0f, low_q = plain ? q.low : 0.0f;
        const float mean = sum[Divergence == LK_KL_JENSEN_SHANNON ? 2 : 0] + LK_LN2 * (low_p - low_q);
        const float weight = read && a.row_weight ? a.row_weight[row] : 1.0f; /* read again: it was not held in a register */
        lk_kl_factors f = {upstream * weight * a.logit_scale * mixed * lk_ex2(-low_p), lk_ex2(low_p - low_q), mean, 0.0f};
        if constexpr (Divergence == LK_KL_TOTAL_VARIATION) {
            const bool sound = lk_is_finite(sum[0]); /* else a row is NaN throughout */
            f.mean = sound ? sum[2] : NAN, f.rest = sound ? sum[3] : NAN;
        }
        LK_NO_UNROLL for (int u = 0; u < count; u++) {
            const lk_kl_vecs<T> vecs = lk_kl_load(t, u);
            float g[Num];
            if (plain) lk_kl_differentiate_vecs<Divergence, true>(g, sum, beside, vecs, p, q, f, a);
            else lk_kl_differentiate_vecs<Divergence, false>(g, sum, beside, vecs, p, q, f, a);
            lk_kl_store(lk_kl_place(out.first, t.step / sizeof(T) * sizeof(Out), u), g, out.wide);
        }
        LK_NO_UNROLL for (int i = t.row.rank; i < edge; i += team) {
            const int64_t col = lk_edge_col<T>(t.row.split, i);
            lk_kl_values<1> v = lk_kl_get_one<T>(a, row, col);
            lk_kl_normalize_one<exact>(&v, p, q, plain, a);
            if (beside) lk_kl_add_terms<Divergence>(sum, v, a);
            lk_kl_differentiate<Divergence, false>(&v, f, a);
            lk_put(out.row + col, v.x[0]);
        }
    }
    if (terms && Divergence == LK_KL_FORWARD) lk_kl_finish<Divergence, Step>(sum, t.row, plain, p.low, q.low, call);
}

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* The options of kl and of linear_kl, with every default filled in. */
template <class Args> LK_HOST void lk_kl_check_values(lk_checks *checks, const Args *a)
{
    const struct {
        const char *name;
        float value;
        bool off; /* 0 is allowed */
    } numbers[] = {{"logit_scale", a->logit_scale, false}, {"teacher_scale", a->teacher_scale, false},
                   {"softcap", a->softcap, true}, {"teacher_softcap", a->teacher_softcap, true}};
    for (int i = 0; i < 4; i++) {
        const float value = numbers[i].value;
        lk_check_number(checks, numbers[i].name, value,
                        (value >= 0x1p-100f && value <= 0x1p100f) || (numbers[i].off && value == 0), "2^-100 to 2^100, or 0");
    }
    lk_check_number(checks, "beta", a->beta, a->beta > 0.0f && a->beta < 1.0f, "above 0 and below 1, or 0 for 1/2");
    lk_check_enum(checks, "divergence", a->divergence, LK_KL_TOTAL_VARIATION,
                  "LK_KL_FORWARD, _REVERSE, _JENSEN_SHANNON, _TOTAL_VARIATION");
}
template <class Args> LK_HOST void lk_kl_fill_in(Args *a)
{
    if (a->logit_scale == 0.0f) a->logit_scale = 1.0f;
    if (a->teacher_scale == 0.0f) a->teacher_scale = 1.0f;
    if (a->beta == 0.0f) a->beta = 0.5f;
    if (a->upstream_value == 0.0f) a->upstream_value = 1.0f;
}

/* What kl_parallel.cuh adds to the checks. */
typedef struct {
    bool reads; /* logits and teacher */
    lk_tensor list[2];
    size_t needed; /* bytes of workspace */
} lk_kl_more;

/* Validates; a becomes the arguments with every default filled in, and without the outputs of other calls. device: as in
 * lk_check_begin. more: NULL for all columns. */
template <class T>
LK_HOST lk_status lk_kl_check(const char *op, const lk_kl_args *args, lk_direction direction, lk_device *device, lk_kl_args *a,
                              const lk_kl_more *more = NULL)
{
    *a = *args;
    lk_kl_fill_in(a);
    const bool forward = direction & LK_FORWARD, backward = direction & LK_BACKWARD; /* a rank may give neither */
    if (!forward) a->loss = a->lse = a->teacher_lse = a->entropy = NULL;
    if (!backward) a->dlogits = NULL, a->upstream = NULL;
    if (backward) a->batch_invariant = 0;
    const bool query = !device;
    const int64_t rows = a->rows, vocab = a->vocab;
    const int out = forward ? LK_OUT : LK_UNUSED, gradient = backward ? LK_OUT | LK_REQUIRED : LK_UNUSED;
    const int in = !more || more->reads ? LK_REQUIRED : LK_UNUSED;
    const lk_tensor none = {"", NULL, 1, LK_UNUSED, 0};
    lk_tensor list[] = {
        {"logits", a->logits, sizeof(T), in, vocab, {{rows, &a->logits_stride, "logits_stride"}}},
        {"teacher", a->teacher, sizeof(T), in, vocab, {{rows, &a->teacher_stride, "teacher_stride"}}},
        {"row_weight", a->row_weight, 4, LK_IN, rows},
        {"upstream", a->upstream, 4, backward ? LK_IN : LK_UNUSED, rows && !a->upstream_per_row ? 1 : rows},
        {"loss", a->loss, 4, out, rows},
        {"lse", a->lse, 4, out, rows},
        {"teacher_lse", a->teacher_lse, 4, out, rows},
        {"entropy", a->entropy, 4, out, rows},
        {"dlogits", a->dlogits, sizeof(T), gradient, vocab, {{rows, &a->dlogits_stride, "dlogits_stride"}}, {"logits"}},
        more ? more->list[0] : none,
        more ? more->list[1] : none,
        lk_workspace(a->workspace, more ? more->needed : 0),
    };
    const int count = lk_used_tensors(list, LK_COUNT(list));
    lk_checks checks = lk_check_begin(op, device);
    lk_check_size(&checks, "rows", rows, 0, INT64_MAX);
    lk_check_size(&checks, "vocab", vocab, more ? 0 : 1, (int64_t)1 << 30);
    lk_check_shapes(&checks, list, count, query);
    lk_kl_check_values(&checks, a);
    lk_check_enum(&checks, "path", a->path, LK_KL_CLUSTER, "LK_KL_AUTO, _WARP, _BLOCK, _CLUSTER");
    lk_check_rows(&checks, a->path, a->path >= LK_KL_BLOCK && rows > LK_TEAM_ROWS, "rows", rows);
    lk_check_invariant(&checks, a->batch_invariant && rows > LK_TEAM_ROWS, rows);
    lk_check_cluster(&checks, a->path, a->path == LK_KL_CLUSTER && checks.arch < 90);
    if (more) lk_check_workspace(&checks, a->workspace, a->workspace_bytes, more->needed);
    lk_check_end(&checks, list, count);
    lk_check_warn(&checks, rows == 0, "rows is 0; nothing is computed");
    return checks.status;
}

/* ---- The calls, and their workspace: none -------------------------------------------------------------------------------- */

/* Divides the rows among teams. A row gets threads with LK_KL_VECS vectors each, up to a block; a longer one gets a cluster of
 * up to 8 blocks. Where rows are many, a warp takes up to four times as many vectors; where they are few, each row gets a cluster
 * at once. With batch_invariant rows are divided as if there were two for each SM. If vectors are read only once, a thread has more
 * of them, since what it computes once is a third of its work with 8, but no more than leave two rounds of full SMs. */
LK_HOST void lk_kl_lay_out(const lk_device *device, lk_kl_call *call, int64_t vecs)
{
    const int64_t rows = call->a.batch_invariant ? 2 * device->sms : call->a.rows, by_warp = rows >= 16 * device->sms ? 128 : 32;
    const int64_t share = call->a.dlogits || LK_KL_HAS_BETWEEN(call->a.divergence) ? 0 : rows * vecs / (2048 * device->sms);
    const int64_t each = share < LK_KL_VECS ? LK_KL_VECS : share < LK_KL_VECS_ONCE ? share : LK_KL_VECS_ONCE;
    const int64_t preferred = lk_ceil_div(vecs, each);
    int64_t least = 1, most = LK_KL_THREADS;
    int path = call->a.path;
    if (path == LK_KL_AUTO && (preferred <= by_warp || rows > LK_TEAM_ROWS)) path = LK_KL_WARP;
    if (path == LK_KL_AUTO && device->arch >= 90 && (preferred > LK_KL_THREADS || rows < 2 * device->sms)) path = LK_KL_CLUSTER;
    if (path == LK_KL_WARP) most = 32;
    else if (path == LK_KL_CLUSTER) {
        least = lk_team_cluster(device, rows) * LK_KL_THREADS, most = 8 * LK_KL_THREADS;
    } else least = LK_KL_THREADS;
    call->team = lk_team_of(call->a.rows, preferred > least ? preferred : least, most, LK_KL_THREADS);
    const int64_t slots = lk_ceil_div(vecs, (int64_t)1 << call->team.size_log2);
    const int held = device->smem > 150 ? LK_KL_HELD : LK_KL_HELD / 2;
    call->slots = slots < held ? (int)slots : held;
}

/* a: checked, without defaults. states: of other steps than LK_KL_WHOLE. */
template <class T, class Out, int Step = LK_KL_WHOLE>
LK_HOST lk_status lk_kl_launch(const char *op, const lk_device *device, const lk_kl_args &a, cudaStream_t stream,
                               lk_kl_row *states = NULL)
{
    lk_kl_call call = {a, {}, 0, 0.0f, 0.0f, 0.0f, 0.0f, states};
    call.scale = a.softcap > 0.0f ? 1.0f : a.logit_scale, call.rate = call.scale * LK_LOG2E;
    call.teacher_scale = a.teacher_softcap > 0.0f ? 1.0f : a.teacher_scale, call.teacher_rate = call.teacher_scale * LK_LOG2E;
    lk_kl_lay_out(device, &call, a.vocab > 0 ? lk_ceil_div(a.vocab, LK_VEC<T>) : 1); /* a rank may have no columns */
    constexpr int js = LK_KL_JENSEN_SHANNON; /* TERMS is for it and TOTAL_VARIATION alone; STATE is the same for both */
    constexpr bool terms = Step == LK_KL_TERMS, state = Step == LK_KL_STATE;
    void (*const kernels[])(lk_kl_call) = {
        lk_kl_kernel<T, Out, terms ? js : LK_KL_FORWARD, Step>, lk_kl_kernel<T, Out, terms ? js : LK_KL_REVERSE, Step>,
        lk_kl_kernel<T, Out, js, Step>, lk_kl_kernel<T, Out, state ? js : LK_KL_TOTAL_VARIATION, Step>};
    const size_t shared = (size_t)call.slots * 2 * 16 * LK_KL_THREADS;
    return lk_launch_pdl(op, device, kernels[a.divergence], call.team.grid, call.team.cluster, LK_KL_THREADS, shared, stream,
                         call);
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_kl_run(const char *op, const lk_kl_args *args, cudaStream_t stream)
{
    lk_kl_args a = {};
    lk_device device = {};
    const lk_status status = lk_kl_check<T>(op, args, direction, &device, &a);
    return status || a.rows == 0 ? status : lk_kl_launch<T, T>(op, &device, a, stream);
}
template <class T>
LK_HOST lk_status lk_kl_query(const char *op, const lk_kl_args *args, lk_direction direction, size_t *bytes)
{
    lk_kl_args a = {};
    return lk_no_workspace(lk_kl_check<T>(op, args, direction, NULL, &a), bytes);
}

#endif /* CUDA or the simulator */
#endif
