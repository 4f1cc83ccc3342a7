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
 *                that is not ignored, weight_sum the sum of w[target[r]] over those of them whose target is not bad, and
 *                D = weight_sum with class weights, else valid_rows
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
 *                lk_cross_entropy_args args = {.logits = logits, .target = target, .loss = loss, .lse = lse,
 *                                              .rows = rows, .vocab = vocab};
 *                lk_status status = lk_cross_entropy_forward_bf16(&args, stream);
 *            lk_cross_entropy_forward_backward_bf16 makes the loss and dlogits at once, with the fields of both.
 *            A reduced loss also wants a workspace: lk_cross_entropy_forward_workspace_bytes_bf16(&args, &bytes) says of how
 *            many bytes: 4 a row, 4 more with z_loss and 4 more with class_weight or weight_sum; forward_backward's mean wants
 *            at least 128. It asks shapes and options, and which outputs are wanted, and neither tensors nor a device: inputs
 *            may be NULL then. lk_ce_row below is the state of a row (empty, add, merge, finish) for kernels of your own.
 *            Autograd knows upstream only after forward_backward: call that with upstream NULL, and when upstream is there
 *            multiply dlogits by it in place, by lk_scale_bf16 of lk_scale.cuh, which returns at once where it is 1.
 * Needs      lk_base.cuh, lk_row.cuh, lk_ptx.cuh.
 * Options    Zero is off, so zeroed arguments with the required fields set compute the plain loss of each row.
 *            Ignored row (use_ignore_index and target = ignore_index): it is not read; loss, z-loss, lse and entropy are 0,
 *            argmax is -1, dlogits exactly 0, whatever the row or the upstream holds. It counts nowhere.
 *            Bad target (outside [0, vocab), not ignored): loss and dlogits of the row are NaN, and so is a reduced loss; lse,
 *            z-loss, entropy and argmax are those of its logits. It counts in valid_rows and adds 0 to weight_sum, with class
 *            weights or without: without them weight_sum is the number of rows with a good target.
 *            A stride of 0 means packed, so rows that are all the same memory (PyTorch's expanded tensors, of stride 0) cannot
 *            be given: an expanded upstream is one value, upstream_per_row 0. A NULL upstream is 1, not 0; a NULL dlse is 0.
 *            Mean over nothing (D is 0): loss and z-loss are NaN, or with zero_when_empty 0 unless a row's loss is NaN; the
 *            gradients of both are 0.
 * Numerics   Sums, lse and losses are float, and built of differences to a reference of the row, never of sums of z: an offset
 *            common to all logits, 1e4 say, costs lse its digits and nothing else. forward_backward's gradient comes from the
 *            same sum. Backward's is made from the lse that it is given, whose rounding is a relative error of |lse| 2^-24 in
 *            each p[j]: 1e-6 at 16, 6e-4 at 1e4. With lse_low it is not: lse + lse_low misses the log of forward's sum by
 *            2^-23 + |lse| 2^-46 at most, so that backward is as good as forward_backward, f32 too. lse_low is 0 for ignored
 *            rows and where lse is not finite. A term of the sum has an error of (|z - reference| + 2) 2^-23, for a reference
 *            that may be up to 60 below the largest z; p[j] has the sum's and (4 + |z - lse|) 2^-23. S sums these p[j], so
 *            dz[y] is as good even where p[y] is all but 1; with z_loss, dlse or smoothing its terms may cancel, and the error
 *            is relative to the largest. Every result is rounded to its type once.
 *            Under a softcap z misses by up to |z| 2^-20, each p[j] by twice the largest of that, and 1 - (z / softcap)^2 by
 *            (5 + |logit_scale logits / softcap|) 2^-22 of itself. So f32 gradients have a bound of 8e-5 at a softcap of 40,
 *            however lse is given: 5e-6 was seen at N(0, 10), and 4e-6 of the formula in float with the C library's tanhf.
 *            An exponential below 2^-126 is 0, and so dlogits[r,j] where p[j] is below 2^-126, also if its product with f
 *            logit_scale is above that. Where the largest z is beyond float's range lse is infinite and backward's dlogits
 *            are NaN.
 *            Against float64 on an H200, N(0, 1.5), PyTorch 2.11 in brackets. bf16, mean, 4096 rows of 1024 to 131072 columns
 *            and 8192 of 32000 to 151936: relative error of the loss up to 1.0e-7 (3.4e-3), of dlogits, relative Frobenius,
 *            7.3e-4 (9.6e-4), backward and forward_backward alike. 64 and 1024 rows of 1024 to 131072, not reduced: largest
 *            |loss error| f32 1.2e-6 (1.4e-6), f16 9.5e-7 (7.7e-3), bf16 1.0e-6 (6.0e-2); dlogits f32 backward 3.4e-7,
 *            forward_backward 5.9e-8 (3.3e-8), f16 2.0e-4 (2.2e-4), bf16 1.3e-3 (1.4e-3).
 *            Target at -inf: loss +inf, gradient finite. -inf elsewhere: as if it were not there, 0 in the entropy; with
 *            smoothing the loss is +inf (NaN where its class weight is 0), as in PyTorch. Under softcap -inf is -softcap and
 *            +inf is softcap. A counted row whose z are all -inf, or hold +inf or NaN: loss, entropy and all of dlogits are
 *            NaN, lse is -inf, +inf, NaN.
 * Traffic    forward reads the logits once; backward, and forward_backward too, reads them once and writes dlogits once (rows
 *            that no cluster's shared memory holds are read twice by forward_backward). Smoothing with class weights
 *            reads class_weight along each row, backward twice. Of a row that is ignored a thread's first vector or two
 *            may be prefetched, before its target is known; by the gradients' first blocks all of one of up to 8 KiB.
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
    LK_CROSS_ENTROPY_WARP = 1,   /* a row by a team of 1 to 32 lanes, or of a few warps, several rows a block */
    LK_CROSS_ENTROPY_BLOCK = 2,  /* a row by a block */
    LK_CROSS_ENTROPY_CLUSTER = 3 /* sm_90 and later: a row by a cluster of blocks */
};

/* What `reduction` says: PyTorch's numbers. */
enum { LK_REDUCTION_NONE = 0, LK_REDUCTION_MEAN = 1, LK_REDUCTION_SUM = 2 };

/* What `target_dtype` says. */
enum { LK_TARGET_INT64 = 0, LK_TARGET_INT32 = 1 };

/* One struct for the three calls, so that a training step fills it once. F: forward, B: backward, FB: forward_backward. Fields
 * that a call does not have are not looked at. */
typedef struct {
    const void *logits;        /* F B FB in        T [rows, vocab] */
    const void *target;        /* F B FB in        target_dtype [rows] */
    const float *class_weight; /* F B FB in        f32 [vocab]; NULL means 1 */
    const float *upstream;     /* B FB in          f32 [1], or [rows] with upstream_per_row: the gradient of loss; NULL: 1 */
    const float *dlse;         /* B FB in          f32 [rows], a gradient of lse from elsewhere, which is added; NULL: none */
    float *loss;               /* F FB out         f32 [rows], or [1] when reduced; NULL to skip */
    float *z_loss_out;         /* F FB out         f32, the part of loss that z_loss adds, shaped as loss; NULL to skip */
    float *lse;                /* F FB out, B in   f32 [rows]; F FB: NULL to skip */
    float *lse_low;            /* F FB out, B in   f32 [rows], what lse was rounded by; F FB: NULL to skip; B: NULL means 0 */
    float *entropy;            /* F FB out         f32 [rows], in nats; NULL to skip */
    int64_t *argmax;           /* F FB out         int64 [rows], the smallest column of the largest logit, NaN above all; NULL
                                                   to skip */
    int64_t *valid_rows;       /* F FB out, B in   int64 [1], the number of rows counted; F FB: NULL to skip; B: for mean, but
                                                   with class weights only when z_loss is not 0 */
    float *weight_sum;         /* F FB out, B in   f32 [1], the sum of class_weight[target] over good targets; F FB: NULL to
                                                   skip; B: for mean with class weights */
    void *dlogits;             /* B FB out         dlogits_dtype [rows, vocab]; may be logits */
    int32_t *bad_targets;      /* F B FB out       int32 [1]; each call adds its number of bad targets; NULL to skip */
    void *workspace;           /* F FB             at least the queried bytes, aligned to 128; NULL where that is 0 */
    size_t workspace_bytes;    /* F FB */
    int64_t rows;              /* at least 0 */
    int64_t vocab;             /* 1 to 2^30 */
    int64_t logits_stride;     /* elements between rows; 0 means packed, vocab. What lies between vocab and it is never read */
    int64_t dlogits_stride;    /* B FB: elements of dlogits between its rows; 0 means packed, or the rows of logits in place */
    int64_t ignore_index;      /* any value; -100 is PyTorch's */
    float logit_scale;         /* 0 to 2^127; 0 means 1 */
    float softcap;             /* 2^-100 to 2^100, and so logit_scale / softcap; 0: off */
    float label_smoothing;     /* 0 to 1; 0: off */
    float z_loss;              /* the factor k; finite, at least 0; 0: off */
    int use_ignore_index;      /* not 0: rows with target = ignore_index are ignored */
    int reduction;             /* LK_REDUCTION_* */
    int zero_when_empty;       /* F FB: not 0: a mean over nothing is 0 instead of NaN */
    int upstream_per_row;      /* B FB: not 0: upstream is [rows] */
    int zero_padding;          /* B FB: not 0: columns vocab to dlogits_stride - 1 of each row of dlogits become 0, of a single
                                  row too; in place to logits_stride - 1 */
    int dlogits_dtype;         /* B FB: LK_DTYPE_*: T; f16 or bf16 too when T is f32, in place then in the first half of each
                                  row */
    int target_dtype;          /* LK_TARGET_* */
    int path;                  /* LK_CROSS_ENTROPY_*; 0 chooses */
} lk_cross_entropy_args;

/* Errors, in the order of the checks (lk/README.md has the rules for all ops):
 *   LK_ERR_NULL       logits; target; B: lse, dlogits, and valid_rows or weight_sum where mean needs it; FB: dlogits; F: every
 *                     output
 *   LK_ERR_SHAPE      rows below 0; vocab below 1 or above 2^30; a stride that is not 0 and below vocab; a tensor of more than
 *                     2^62 elements, gaps included; dlogits = logits with other strides; tensors that overlap
 *   LK_ERR_VALUE      logit_scale, softcap, z_loss or label_smoothing out of range; under a softcap logit_scale / softcap
 *                     outside [2^-100, 2^100]; reduction, target_dtype, path: none of the enum; dlogits_dtype: neither T nor
 *                     16 bits wide for T = f32
 *   LK_ERR_PATH       CLUSTER in code for less than sm_90; BLOCK or CLUSTER with more than 2^27 rows
 *   LK_ERR_ALIGNMENT  a pointer is not aligned to its element
 *   LK_ERR_WORKSPACE  the workspace is NULL, too small or not aligned to 128 bytes
 * Rows of any alignment run at full speed as long as those of dlogits start at the same offset modulo 16 bytes as those of
 * logits (16-bit dlogits of f32 logits: both at multiples of 16 bytes); otherwise dlogits is written element by element. */

#define LK_DECLARE_CROSS_ENTROPY(T)                                                                                            \
    LK_PROTOTYPES(cross_entropy, forward, T)                                                                                   \
    LK_PROTOTYPES(cross_entropy, backward, T)                                                                                  \
    LK_PROTOTYPES(cross_entropy, forward_backward, T)

#if defined(__CUDACC__) || defined(LK_SIMT)

#include "lk_row.cuh"

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

template <class Args> LK_DEVICE lk_ce_label lk_ce_label_of(const Args &a, int64_t y)
{
    const bool counted = !(a.use_ignore_index && y == a.ignore_index), good = y >= 0 && y < a.vocab;
    return {counted && good ? (int)y : -1, counted, counted && !good};
}

template <class Args> LK_DEVICE lk_ce_label lk_ce_look_up(const Args &a, int64_t row)
{
    const int64_t y = a.target_dtype == LK_TARGET_INT32 ? ((const int32_t *)a.target)[row] : ((const int64_t *)a.target)[row];
    return lk_ce_label_of(a, y);
}

/* The same in two steps, so that what stands between them does not wait for the target: its words, 0 of a row that is not
 * there; and what they say. */
typedef struct alignas(8) {
    uint32_t low, high;
} lk_ce_word;

template <class Args> LK_DEVICE lk_ce_word lk_ce_request(const Args &a, int64_t row)
{
    const uint32_t *target = (const uint32_t *)a.target;
    const bool wide = a.target_dtype == LK_TARGET_INT64;
    lk_ce_word word = {0, 0};
    if (row < a.rows) word.low = target[wide ? 2 * row : row];
    if (row < a.rows && wide) word.high = target[2 * row + 1];
    return word;
}
template <class Args> LK_DEVICE lk_ce_label lk_ce_received(const Args &a, int64_t row, lk_ce_word word)
{
    if (row >= a.rows) return {-1, false, false};
    const int64_t wide = (int64_t)((uint64_t)word.high << 32 | word.low);
    return lk_ce_label_of(a, a.target_dtype == LK_TARGET_INT64 ? wide : (int64_t)(int32_t)word.low);
}

/* ---- Sums over all rows ------------------------------------------------------------------------------------------------- */

/* A reduced loss is a launch behind the rows, which leave their terms in the workspace. The other way, where the block that
 * draws the last of as many tickets as there are blocks adds up, was as fast in forward and slower in forward_backward on an
 * H200, in an earlier form: 5 us of 41 at 4096 rows of 8192, 8 of 533 at 131072. */

/* The terms of the rows, each kind an array [rows] at a multiple of 128 bytes: few blocks read them all. An ignored row leaves
 * -0 for its class term, which adds nothing to a sum. No other row leaves -0, and those that do not are the rows counted. */
typedef struct {
    float *loss;   /* the class terms; NULL: no reduced loss is wanted */
    float *z;      /* the z-losses; NULL without z_loss */
    float *weight; /* w[y], 0 where y is ignored or bad; NULL where neither a mean nor the caller wants their sum */
} lk_ce_terms;
#define LK_CE_IGNORED 0x80000000u /* the bits of -0 */

/* The counts of all rows, where a mean's gradients want them before the rows. The first bytes of the workspace; behind them lie
 * the rows' terms. */
typedef struct alignas(LK_WORKSPACE_ALIGNMENT) {
    int64_t valid_rows;
    float weight_sum; /* where there are class weights */
} lk_ce_tally;

/* Brings one state a warp together. Who calls: every thread of a block of THREADS, or of a cluster of MOST such blocks at most,
 * once a kernel, with a state that is its warp's; before it, anywhere, lk_cluster_begin() unless MOST is 1. Who holds the
 * result, blocks * THREADS / 32 states: the first warp of the block with rank 0; the others get NULL. A peer may end after the
 * call. */
template <int THREADS, int MOST = 8, class State> LK_DEVICE const State *lk_ce_collect(State s)
{
    constexpr int WARPS = THREADS / 32;
    LK_SHARED(State, inbox, [MOST * WARPS]);
    const int warp = (int)threadIdx.x / 32;
    const int blocks = MOST > 1 ? (int)lk_cluster_nctarank() : 1, rank = MOST > 1 ? (int)lk_cluster_ctarank() : 0;
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

/* What a warp, or all of them, has of the sums. A warp's count is below 2^32 while the rows' targets fit in memory. */
template <class Int> struct alignas(16) lk_ce_sums {
    float loss, z, weight;
    Int count;
};

/* Kahan's sum. An infinite one stays as it is. */
LK_DEVICE void lk_ce_grow(float *sum, float *lost, float x)
{
    const float part = x - *lost, grown = *sum + part, over = (grown - *sum) - part;
    *lost = lk_is_finite(over) ? over : 0.0f;
    *sum = grown;
}

/* The sums over all threads, from those of each, for the threads that lk_ce_collect gives the states; the others get false. */
template <int THREADS, int MOST>
LK_DEVICE bool lk_ce_sum_up(lk_ce_sums<unsigned> own, bool z, bool weight, lk_ce_sums<int64_t> *all)
{
    own.loss = lk_sum_warp(own.loss);
    if (z) own.z = lk_sum_warp(own.z);
    if (weight) own.weight = lk_sum_warp(own.weight);
    own.count = __reduce_add_sync(0xffffffffu, own.count);
    const lk_ce_sums<unsigned> *inbox = lk_ce_collect<THREADS, MOST>(own);
    if (!inbox) return false;
    constexpr int WARPS = THREADS / 32, team = MOST * WARPS < 32 ? MOST * WARPS : 32;
    const int warps = MOST > 1 ? (int)lk_cluster_nctarank() * WARPS : WARPS;
    lk_ce_sums<int64_t> s = {};
#pragma unroll
    for (int k = 0; k < MOST * WARPS; k += 32) {
        const int i = k + (int)threadIdx.x;
        if (i < warps)
            s = {s.loss + inbox[i].loss, s.z + inbox[i].z, s.weight + inbox[i].weight, s.count + inbox[i].count};
    }
    s.loss = lk_sum_warp(s.loss, team);
    if (z) s.z = lk_sum_warp(s.z, team);
    if (weight) s.weight = lk_sum_warp(s.weight, team);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) s.count += __shfl_xor_sync(0xffffffffu, s.count, offset);
    *all = s;
    return true;
}

/* What forward's kernels are given of a call. Gradients' kernels are given all of it. */
typedef struct {
    const void *logits, *target;
    const float *class_weight;
    float *loss, *z_loss_out, *lse, *lse_low, *entropy;
    int64_t *argmax, *valid_rows;
    float *weight_sum;
    int32_t *bad_targets;
    void *workspace;
    size_t workspace_bytes;
    int64_t rows, vocab, logits_stride, ignore_index;
    float logit_scale, softcap, label_smoothing, z_loss;
    int use_ignore_index, reduction, zero_when_empty, target_dtype, path;
} lk_cross_entropy_forward_call;

typedef struct {
    lk_cross_entropy_forward_call a; /* the targets, and where the counts go */
    lk_ce_tally *tally;              /* here too; NULL: not */
} lk_cross_entropy_count_plan;

/* A thread's share of the count: U rows at once, since a look at one alone takes as long. */
template <int THREADS, int MOST, class Int>
LK_DEVICE lk_ce_sums<unsigned> lk_ce_count(const lk_cross_entropy_forward_call &a, const Int *target)
{
    constexpr int U = 16, BATCH = U * THREADS;
    const int64_t rank = MOST > 1 ? lk_cluster_ctarank() : 0, step = BATCH * (MOST > 1 ? (int64_t)lk_cluster_nctarank() : 1);
    const int64_t ignored = a.ignore_index;
    const bool every = !a.use_ignore_index, weighs = a.class_weight || a.weight_sum;
    lk_ce_sums<unsigned> s = {};
    float lost = 0.0f;
    for (int64_t first = rank * BATCH; first < a.rows; first += step) {
        const Int *at = target + first + threadIdx.x;
        const int left = (int)(a.rows - first < BATCH ? a.rows - first : BATCH) - (int)threadIdx.x;
        Int y[U] = {};
        if (a.rows - first >= BATCH) { /* as in lk_ce_add_up */
#pragma unroll
            for (int u = 0; u < U; u++) y[u] = at[u * THREADS];
        } else {
#pragma unroll
            for (int u = 0; u < U; u++)
                if (u * THREADS < left) y[u] = at[u * THREADS];
        }
        unsigned counted = 0; /* a bit each */
#pragma unroll
        for (int u = 0; u < U; u++) counted |= (unsigned)(every | (y[u] != ignored)) << u;
        s.count += (unsigned)__popc(counted & ((1u << (left + THREADS - 1) / THREADS) - 1));
        if (!weighs) continue;
        float w[U] = {}, sum = 0.0f;
#pragma unroll
        for (int u = 0; u < U; u++) {
            const lk_ce_label label = lk_ce_label_of(a, y[u]);
            if (u * THREADS < left && label.y >= 0) w[u] = a.class_weight ? a.class_weight[label.y] : 1.0f;
        }
#pragma unroll
        for (int u = 0; u < U; u++) sum += w[u];
        lk_ce_grow(&s.weight, &lost, sum);
    }
    return s;
}

/* The counts over all rows, by one block or one cluster of MOST blocks at most. */
template <int THREADS, int MOST>
LK_KERNEL void __launch_bounds__(THREADS) lk_cross_entropy_count_kernel(lk_cross_entropy_count_plan p)
{
    const lk_cross_entropy_forward_call &a = p.a;
    lk_griddepcontrol_launch_dependents();
    if (MOST > 1) lk_cluster_begin();
    lk_griddepcontrol_wait();
    lk_ce_sums<unsigned> own;
    lk_ce_sums<int64_t> s;
    if (a.target_dtype == LK_TARGET_INT32) own = lk_ce_count<THREADS, MOST>(a, (const int32_t *)a.target);
    else own = lk_ce_count<THREADS, MOST>(a, (const int64_t *)a.target);
    if (!lk_ce_sum_up<THREADS, MOST>(own, false, a.class_weight || a.weight_sum, &s) || threadIdx.x != 0) return;
    if (p.tally) p.tally->valid_rows = s.count, p.tally->weight_sum = s.weight;
    if (a.valid_rows) *a.valid_rows = s.count;
    if (a.weight_sum) *a.weight_sum = s.weight;
}

typedef struct {
    lk_ce_terms terms;
    float *loss, *z_loss_out; /* the caller's, f32 [1]; NULL to skip */
    int64_t *valid_rows;      /* likewise */
    float *weight_sum;
    int64_t rows;
    int mean, weighted, zero_when_empty; /* weighted: the mean has class weights */
} lk_cross_entropy_sum_plan;

/* The sum of four terms; those that are not -0 are counted. */
LK_DEVICE float lk_ce_add_four(uint4 t, unsigned *count)
{
    *count += (min(t.x ^ LK_CE_IGNORED, 1u) + min(t.y ^ LK_CE_IGNORED, 1u)) +
              (min(t.z ^ LK_CE_IGNORED, 1u) + min(t.w ^ LK_CE_IGNORED, 1u));
    return (__uint_as_float(t.x) + __uint_as_float(t.y)) + (__uint_as_float(t.z) + __uint_as_float(t.w));
}

/* A thread's share of the sum of an array of terms, and of the count of those that are not -0. Groups of four are read at once,
 * U of them in flight; what is left below four goes to the first threads. Nothing behind the last row is read. */
template <int THREADS, int MOST, int U = 4>
LK_DEVICE float lk_ce_add_up(const float *terms, int64_t rows, unsigned *count)
{
    constexpr int BATCH = U * THREADS;
    const uint4 *groups = (const uint4 *)terms;
    const int64_t rank = MOST > 1 ? lk_cluster_ctarank() : 0, step = BATCH * (MOST > 1 ? (int64_t)lk_cluster_nctarank() : 1);
    const int64_t whole = rows >> 2;
    const bool rest = rank == 0 && threadIdx.x < (unsigned)rows % 4;
    float sum = 0.0f, lost = 0.0f;
#pragma unroll 1
    for (int64_t first = rank * BATCH; first < whole; first += step) {
        const uint4 *at = groups + first + threadIdx.x;
        const int64_t left = whole - first;
        uint4 next[U];
        if (left >= BATCH) { /* where loads are not predicated, all of them start before the first is waited for */
#pragma unroll
            for (int u = 0; u < U; u++) next[u] = at[u * THREADS];
        } else {
#pragma unroll
            for (int u = 0; u < U; u++) {
                next[u] = {LK_CE_IGNORED, LK_CE_IGNORED, LK_CE_IGNORED, LK_CE_IGNORED};
                if ((int)threadIdx.x + u * THREADS < (int)left) next[u] = at[u * THREADS];
            }
        }
        float part = 0.0f;
#pragma unroll
        for (int u = 0; u < U; u++) part += lk_ce_add_four(next[u], count);
        lk_ce_grow(&sum, &lost, part);
    }
    if (!rest) return sum;
    const float single = terms[whole * 4 + threadIdx.x];
    *count += __float_as_uint(single) != LK_CE_IGNORED;
    return sum + single;
}

/* A reduced loss from the terms of all rows, by one block or one cluster of MOST blocks at most. */
template <int THREADS, int MOST>
LK_KERNEL void __launch_bounds__(THREADS) lk_cross_entropy_sum_kernel(lk_cross_entropy_sum_plan p)
{
    const bool z = p.terms.z != NULL, weight = p.terms.weight != NULL;
    lk_griddepcontrol_launch_dependents();
    if (MOST > 1) lk_cluster_begin();
    lk_griddepcontrol_wait();
    lk_ce_sums<unsigned> own = {};
    lk_ce_sums<int64_t> s;
    unsigned again = 0; /* the same rows, of which the class terms have the count */
    own.loss = lk_ce_add_up<THREADS, MOST>(p.terms.loss, p.rows, &own.count);
    if (z) own.z = lk_ce_add_up<THREADS, MOST>(p.terms.z, p.rows, &again);
    if (weight) own.weight = lk_ce_add_up<THREADS, MOST>(p.terms.weight, p.rows, &again);
    if (!lk_ce_sum_up<THREADS, MOST>(own, z, weight, &s) || threadIdx.x != 0) return;
    const float valid = (float)s.count, over = p.weighted ? s.weight : valid;
    if (p.mean) {
        const float nothing = p.zero_when_empty ? 0.0f : NAN;
        if (over == 0.0f) s.loss = s.loss != s.loss ? s.loss : nothing, s.z = s.z != s.z ? s.z : nothing;
        else s.loss = __fdiv_rn(s.loss, over);
        if (over != 0.0f && z) s.z = __fdiv_rn(s.z, valid);
    }
    if (p.loss) *p.loss = s.loss + s.z;
    if (p.z_loss_out) *p.z_loss_out = s.z;
    if (p.valid_rows) *p.valid_rows = s.count;
    if (p.weight_sum) *p.weight_sum = s.weight;
}

/* The same of few rows' class terms alone, 16 THREADS rows at most, by one block. It is in a chain behind the rows, where
 * instructions come late: there are few of them, and every load is on its way before anything is waited for. On an H200, 4096
 * rows of 1024 take 4.76 us with it and 3.72 without a sum; in earlier forms of both 4.93 by 256 threads, 5.15 by 128, 4.97 by
 * 512, and 5.23 by the kernel above. */
template <int THREADS>
LK_KERNEL void __launch_bounds__(THREADS) lk_cross_entropy_sum_few_kernel(const __grid_constant__ lk_cross_entropy_sum_plan p)
{
    constexpr int U = 4, WARPS = THREADS / 32;
    LK_SHARED(float, sums, [WARPS]);
    LK_SHARED(unsigned, counts, [WARPS]);
    const int thread = (int)threadIdx.x, whole = (int)p.rows / 4;
    lk_griddepcontrol_launch_dependents();
    lk_griddepcontrol_wait();
    const uint4 *groups = (const uint4 *)p.terms.loss + thread;
    uint4 t[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
        t[u] = {LK_CE_IGNORED, LK_CE_IGNORED, LK_CE_IGNORED, LK_CE_IGNORED};
        if (thread + u * THREADS < whole) t[u] = groups[u * THREADS];
    }
    uint32_t rest = LK_CE_IGNORED;
    if (thread < (int)p.rows % 4) rest = __float_as_uint(p.terms.loss[whole * 4 + thread]);
    float sum = __uint_as_float(rest) + 0.0f; /* not -0 */
    unsigned count = min(rest ^ LK_CE_IGNORED, 1u);
#pragma unroll
    for (int u = 0; u < U; u++) sum += lk_ce_add_four(t[u], &count);
    sum = lk_sum_warp(sum);
    count = __reduce_add_sync(0xffffffffu, count);
    if (thread % 32 == 0) sums[thread / 32] = sum, counts[thread / 32] = count;
    __syncthreads(); /* the warps' sums of few rows are written before they are read */
    if (thread >= 32) return;
    sum = lk_sum_warp(thread < WARPS ? sums[thread] : 0.0f, WARPS);
    count = __reduce_add_sync(0xffffffffu, thread < WARPS ? counts[thread] : 0u);
    if (thread > 0) return;
    const float valid = (float)count, nothing = p.zero_when_empty ? 0.0f : NAN;
    const bool empty = p.mean && count == 0;
    if (p.mean) sum = empty ? nothing : __fdiv_rn(sum, valid);
    if (p.loss) *p.loss = sum;
    if (p.z_loss_out) *p.z_loss_out = empty ? nothing : 0.0f;
    if (p.valid_rows) *p.valid_rows = count;
}

/* ---- Forward ------------------------------------------------------------------------------------------------------------ */

/* Plain rows (nothing but loss, z-loss and lse, without smoothing and softcap) are read by lk_lse_read, all others with a
 * running maximum. */

typedef struct {
    lk_cross_entropy_forward_call a; /* loss and z_loss_out are [rows] here, NULL where they are reduced */
    lk_ce_terms terms; /* for a reduced loss */
    int team_log2;     /* a row has 1 << team_log2 threads: up to 32, or all of a block or a cluster */
} lk_cross_entropy_forward_plan;

/* Adds the logits x of columns col, col + 1, ... to the state. */
template <int n, class Args>
LK_DEVICE lk_ce_row lk_ce_take(lk_ce_row s, const float (&x)[n], int64_t col, const Args &a)
{
    float v[n], w[n], slope;
#pragma unroll
    for (int j = 0; j < n; j++) v[j] = x[j], w[j] = 1.0f;
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

/* Adds one logit, the target's to the argmax alone. */
template <class Args> LK_DEVICE lk_ce_row lk_ce_take_but(lk_ce_row s, float x, int col, int y, const Args &a)
{
    const float one[1] = {x};
    if (col != y) return lk_ce_take(s, one, col, a);
    return a.argmax ? lk_ce_row_top(s, x, col) : s;
}

/* Writes a row's results, and its terms of the sums over all where they are wanted; one thread of the row. weight: w[y]; all:
 * entropy and argmax too. */
template <bool all, class Args>
LK_DEVICE void lk_ce_put(const Args &a, lk_ce_terms terms, int64_t row, lk_ce_label label, float weight, lk_ce_row s)
{
    const lk_ce_options options = {a.softcap > 0.0f ? 1.0f : a.logit_scale, a.label_smoothing, a.z_loss, weight, a.vocab};
    lk_ce_result r = {0.0f, 0.0f, 0.0f, 0.0f, -1, 0.0f};
    if (label.counted) r = lk_ce_row_finish<all>(s, options);
    if (label.bad) r.class_loss = NAN;
    if (label.bad && a.bad_targets) atomicAdd(a.bad_targets, 1);
    if (a.loss) a.loss[row] = r.class_loss + r.z_loss;
    if (a.z_loss_out) a.z_loss_out[row] = r.z_loss;
    if (a.lse) a.lse[row] = r.lse;
    if (a.lse_low) a.lse_low[row] = r.lse_low;
    if (all && a.entropy) a.entropy[row] = r.entropy;
    if (all && a.argmax) a.argmax[row] = r.argmax;
    if (!terms.loss) return;
    terms.loss[row] = !label.counted ? __uint_as_float(LK_CE_IGNORED) : r.class_loss == 0.0f ? 0.0f : r.class_loss;
    if (terms.z) terms.z[row] = r.z_loss;
    if (terms.weight) terms.weight[row] = label.counted && !label.bad ? weight : 0.0f;
}

/* lk_split_row in 32 bits. */
template <class T> LK_DEVICE lk_split lk_ce_split(const T *logits, int vocab)
{
    const int past = (int)((uintptr_t)logits / sizeof(T)) & (LK_VEC<T> - 1);
    int head = past ? LK_VEC<T> - past : 0;
    if (head > vocab) head = vocab;
    const int vecs = (int)((unsigned)(vocab - head) / (unsigned)LK_VEC<T>);
    return {head, vocab - vecs * LK_VEC<T>, vecs};
}

/* A row's target on its way into the L2. */
template <class Args> LK_DEVICE void lk_ce_prefetch_target(const Args &a, int64_t row)
{
    lk_prefetch_l2((const char *)a.target + row * (a.target_dtype == LK_TARGET_INT64 ? 8 : 4));
}

/* What only the thread that writes a row's results needs: its label, and the target's logit and class weight. */
template <class T> struct lk_ce_target {
    lk_ce_label label;
    float weight;
    T logit; /* undefined where there is no target */
};

/* Writes the results of a plain row; one thread of it. s has max = v: see lk_ce_row. */
template <class T>
LK_DEVICE void lk_ce_put_plain(const lk_cross_entropy_forward_plan &p, int64_t row, const lk_ce_target<T> &target, lk_lse s)
{
    lk_ce_row state = lk_ce_row_empty();
    state.max = s.max, state.sum = s.sum;
    if (target.label.y >= 0) state.target = lk_to_float(target.logit);
    lk_ce_put<false>(p.a, p.terms, row, target.label, target.weight, state);
}

/* Nothing of an ignored row is to be read, so that rows wait for their targets first. Meanwhile, and while the grid in front
 * ends, the targets and a thread's first vectors are brought into the L2, which reads nothing. On an H200, in us, by one vector
 * behind the wait, by one in front of it and by two: 4096 rows of 1024 3.76, 3.72 and 3.96, of 2048 5.79, 5.61 and 5.59, of
 * 4096 9.84, 9.65 and 9.50; 64 of 128256, by clusters, 6.27, 6.17 and 6.29. Whole rows at once by cp.async.bulk.prefetch took
 * forward 18 to 26 % longer, and dependents that come early 2 to 4 % on 1024 and 2048.
 *
 * Of an ignored row that much is fetched for nothing: 4096 rows of 32768, half of them ignored, take 35.5 us instead of 34.3.
 * By the first wave of blocks alone 16384 and 32768 columns would take 2 to 3 % longer where nothing is ignored.
 *
 * A team of up to 32 lanes owns a plain row. The results of all rows of a block are made by its first threads, one a row: what
 * takes 135 instructions, and the way to the target's logit, then cost one warp's instead of every warp's. On an H200, 4096
 * rows of 2048 in earlier forms: 0.828 of the ceiling, by blocks of 256 threads 0.818, of 512 0.664. An ignored row is not
 * read. */
#define LK_CROSS_ENTROPY_WARP_THREADS 128
#define LK_CROSS_ENTROPY_WARP_BLOCKS (LK_ARCH >= 1200 ? 6 : 8) /* on an SM, as far as registers go without spills */
template <class T, int U>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_WARP_THREADS, LK_CROSS_ENTROPY_WARP_BLOCKS)
    lk_cross_entropy_forward_warp_kernel(lk_cross_entropy_forward_plan p)
{
    /* Rows of more than 2048 bytes, which U = 4 is for, have whole warps. */
    const int team_log2 = U == 2 ? p.team_log2 : 5, rank = threadIdx.x & ((1 << team_log2) - 1);
    const int rows = LK_CROSS_ENTROPY_WARP_THREADS >> team_log2; /* of the block */
    const int64_t first = (int64_t)blockIdx.x * rows, row = first + (threadIdx.x >> team_log2), result = first + threadIdx.x;
    const lk_cross_entropy_forward_call &a = p.a;
    const bool writes = (int)threadIdx.x < rows && result < a.rows;
    LK_SHARED(lk_lse, states, [LK_CROSS_ENTROPY_WARP_THREADS]); /* of the rows */
    lk_lse_share<T> share = {};
    if (row < a.rows) { /* lanes without a row still take part in the warp's reduction */
        const T *logits = (const T *)a.logits + row * a.logits_stride;
        share = lk_lse_aim(logits, lk_split_row(logits, a.vocab), rank, team_log2);
    }
    lk_lse_prefetch<U / 2>(share, team_log2);
    if (writes) lk_ce_prefetch_target(a, result);
    lk_griddepcontrol_wait();
    lk_ce_label label = {-1, false, false};
    lk_ce_target<T> target = {};
    if (row < a.rows) label = lk_ce_look_up(a, row);
    if (writes) target.label = lk_ce_look_up(a, result), target.weight = 1.0f;
    if (!label.counted) share.count = share.split.edge = 0;
    lk_vec<T> raw[U];
    lk_lse_start(raw, share, team_log2);
    if (writes && target.label.y >= 0) {
        target.logit = ((const T *)a.logits + result * a.logits_stride)[target.label.y];
        if (a.class_weight) target.weight = a.class_weight[target.label.y];
    }
    const lk_lse s = lk_lse_read<true>(raw, share, a.logit_scale, rank, team_log2, 1 << team_log2, label.counted);
    lk_griddepcontrol_launch_dependents();
    if (rank == 0) states[threadIdx.x >> team_log2] = s;
    __syncthreads(); /* the states are written before they are read */
    if (writes) lk_ce_put_plain(p, result, target, states[threadIdx.x]);
}

/* A cluster of blocks owns a plain row; without clusters, a block. */
template <class T, int U, int BLOCKS>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_THREADS, BLOCKS)
    lk_cross_entropy_forward_block_kernel(lk_cross_entropy_forward_plan p)
{
    const int over = U == 8 ? 0 : 31 - __clz((int)lk_cluster_nctarank()), size_log2 = LK_CROSS_ENTROPY_THREADS_LOG2 + over;
    const int rank = (int)(lk_cluster_ctarank() * LK_CROSS_ENTROPY_THREADS + threadIdx.x);
    const int64_t row = blockIdx.x >> over; /* U = 8 is for rows of one block */
    const lk_cross_entropy_forward_call &a = p.a;
    const T *logits = (const T *)a.logits + row * a.logits_stride;
    lk_lse_share<T> share = lk_lse_aim(logits, lk_split_row(logits, a.vocab), rank, size_log2);
    LK_SHARED(lk_ce_target<T>, target, [1]); /* by one thread for itself, since registers are for loads */
    LK_SHARED(lk_lse_inbox<LK_CROSS_ENTROPY_THREADS>, inbox, [1]);
    lk_vec<T> raw[U];
    lk_lse_cluster_begin(inbox);
    lk_lse_prefetch<1>(share, size_log2);
    if (rank == 0) lk_ce_prefetch_target(a, row);
    lk_griddepcontrol_wait();
    if (U == 2) lk_griddepcontrol_launch_dependents();
    const lk_ce_label label = lk_ce_look_up(a, row);
    if (!label.counted) share.count = share.split.edge = 0;
    lk_lse_start(raw, share, size_log2);
    T logit = {}; /* the target's, which nobody waits for yet */
    if (rank == 0) {
        target->label = label, target->weight = 1.0f;
        if (label.y >= 0) logit = logits[label.y];
        if (label.y >= 0 && a.class_weight) target->weight = a.class_weight[label.y];
    }
    lk_lse s = lk_lse_read<true>(raw, share, a.logit_scale, rank, size_log2, 32);
    if (U != 2) lk_griddepcontrol_launch_dependents();
    s = lk_lse_cluster(inbox, s, a.logit_scale);
    if (rank != 0) return;
    target->logit = logit;
    lk_ce_put_plain(p, row, *target, s);
}

/* What a thread puts into shared memory while the row is read, since registers are for loads: what only the thread with rank 0
 * needs, the target and its logit and class weight, and how the row splits, with the thread's first single element. */
typedef struct {
    lk_ce_label label;
    float target, weight, single;
    lk_split split;
} lk_ce_aside;

/* A team of threads owns a row that is not plain: up to 32 lanes of a warp, a block, or a cluster of blocks. */
template <class T, int U, int BLOCKS>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_THREADS, BLOCKS)
    lk_cross_entropy_forward_kernel(lk_cross_entropy_forward_plan p)
{
    const lk_cross_entropy_forward_call &a = p.a;
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
    int col = own.split.head + rank * LK_VEC<T>;
    for (int left = count; left > 0; left -= U) {
#pragma unroll
        for (int u = 0; u < U; u++, col += step) {
            if (u >= left) break;
            float x[LK_VEC<T>];
            lk_unpack(x, raw[u]);
            if (U + u < left) raw[u] = lk_load_vec(logits + col + U * step);
            s = lk_ce_take(s, x, col, a);
        }
    }
    for (int i = rank; i < aside->split.edge; i += team) {
        const int64_t edge = lk_edge_col<T>(aside->split, i);
        const float single[1] = {i == rank ? aside->single : lk_to_float(logits[edge])};
        s = lk_ce_take(s, single, edge, a);
    }
    lk_griddepcontrol_launch_dependents();

    const float scale = a.softcap > 0.0f ? 1.0f : a.logit_scale;
    s = lk_ce_row_warp<true, sizeof(T) == 4>(s, scale, team < 32 ? team : 32);
    if (team > 32) {
        const lk_ce_row *inbox = lk_ce_collect<LK_CROSS_ENTROPY_THREADS>(s);
        if (inbox) {
            lk_ce_row all = lk_ce_row_empty();
            for (int i = rank; i < team / 32; i += 32) all = lk_ce_row_merge<sizeof(T) == 4>(all, inbox[i], scale);
            s = lk_ce_row_warp<true, sizeof(T) == 4>(all, scale);
        }
    }
    if (rank == 0 && row < a.rows) {
        float slope;
        s.target = a.softcap > 0.0f ? lk_ce_cap(aside->target, a.logit_scale, a.softcap, &slope) : aside->target;
        lk_ce_put<true>(a, p.terms, row, aside->label, aside->weight, s);
    }
}

/* ---- Backward and forward_backward -------------------------------------------------------------------------------------- */

/* One kernel is both. A team of threads owns a row: up to 32 lanes of a warp, a block, or a cluster of blocks. All of a row is
 * on its way into shared memory at once, to the thread that will use it: a thread's vectors stand in slots of its own, which
 * costs no barrier. forward_backward sums them as they land, the team exchanges its sums, and the gradients are made from the
 * slots; backward, which is given lse, makes them as they land. Copies, exponentials and stores overlap because an SM has
 * several rows in different stages: the first blocks of each SM start one after another (see `stagger`), later ones when one
 * has ended. Left alone they would all load, then all compute, then all store.
 * Vectors that find no slot, in rows longer than a cluster can hold, are read where they are used: twice in forward_backward.
 * The thread that owns the target's element writes it, after its vector. */
#define LK_CROSS_ENTROPY_FEW 8   /* slots a thread while a row has less threads than a block can have; in backward, a cluster */
#define LK_CROSS_ENTROPY_MANY 16 /* and in forward_backward while it has less than a cluster can have */
#define LK_CROSS_ENTROPY_BLOCK_MOST 256
/* Blocks of that size on an SM, as far as registers go without spills. */
#define LK_CROSS_ENTROPY_BLOCKS(plain) (!(plain) ? 3 : LK_ARCH >= 1000 ? 4 : 5)
#define LK_CROSS_ENTROPY_STAGGER 34 /* bytes an SM can load in a ns */

typedef struct {
    lk_cross_entropy_args a; /* loss and z_loss_out are [rows] here, NULL where they are reduced */
    lk_ce_terms terms;         /* for a reduced loss */
    const float *given;        /* backward: lse [rows] */
    const float *given_low;    /* and what it was rounded by; NULL: 0 */
    const int64_t *valid_rows; /* for mean; NULL: */
    int64_t valid;             /* that many */
    const float *weight_sum;   /* for mean with class weights */
    int64_t padded_end;        /* columns vocab to padded_end - 1 of dlogits become 0 */
    int team_log2;             /* as in forward */
    int slots;                 /* a thread */
    int sms, wave, stagger;    /* about `wave` blocks run at once; of the first each starts `stagger` ns after the one before it
                                  on its SM, but where rows are short */
    int inside;                /* 0 or 1: of short rows, which count for a mean themselves */
    int more;                  /* not 0: rows may have single elements, vectors without a slot, or padding */
    int ordered;               /* not 0: 16-bit dlogits in place of f32 logits */
} lk_cross_entropy_gradient_plan;

/* Where a thread stands: in its team, and its share of a row, which is single elements `rank`, `rank` + `team`, ... and `count`
 * vectors, `jump` elements apart. Those from p.slots on have no slot. What rarely runs is given this anew, out of line, so that
 * nobody holds it in registers. */
template <class T> struct lk_ce_place {
    const T *logits, *first;
    int head, vecs, edge; /* of the row, as in lk_split */
    int rank, team, count, jump;
};

/* The row of a thread, from its number as it is read now. */
LK_DEVICE int64_t lk_ce_row_of(const lk_cross_entropy_gradient_plan &p)
{
    return ((int64_t)blockIdx.x * blockDim.x + lk_tid_x()) >> p.team_log2;
}

template <class T> LK_DEVICE lk_ce_place<T> lk_ce_find(const lk_cross_entropy_gradient_plan &p, int64_t row)
{
    lk_ce_place<T> at = {};
    at.team = 1 << p.team_log2;
    at.rank = (int)(blockIdx.x * blockDim.x + lk_tid_x()) & (at.team - 1), at.jump = at.team * LK_VEC<T>;
    at.logits = (const T *)p.a.logits + row * p.a.logits_stride;
    if (row < p.a.rows) { /* threads without a row take part in barriers and sums */
        const lk_split split = lk_ce_split(at.logits, (int)p.a.vocab);
        at.head = split.head, at.vecs = (int)split.vecs, at.edge = split.edge;
    }
    at.count = (at.vecs >> p.team_log2) + (at.rank < (at.vecs & (at.team - 1)));
    at.first = at.logits + at.head + at.rank * LK_VEC<T>;
    return at;
}

/* The column of single element i of a row. */
template <class T> LK_DEVICE int lk_ce_edge_col(const lk_ce_place<T> &at, int i)
{
    return i < at.head ? i : at.vecs * LK_VEC<T> + i;
}

/* Vector u of a share, from its slot or else from memory, and its first column. */
template <class T> LK_DEVICE lk_vec<T> lk_ce_vec(const lk_ce_place<T> &at, const lk_vec<T> *slot, int slots, int u, int *col)
{
    *col = (int)(at.first - at.logits) + u * at.jump;
    return u < slots ? slot[u * (int)blockDim.x] : lk_load_vec(at.logits + *col);
}

/* What one row's gradient needs, logit_scale included: dlogits[j] = (rise e[j] - fall w[j]) slope[j] for j != y, where e[j] is
 * 2^(rate v[j] - base), p[j] but for a factor in rise, with v = z under a softcap, and slope is 1 without one. In a row that is
 * all 0 or NaN e is 1 and rise is that. */
typedef struct {
    float rate, base, rise, fall;
} lk_ce_gradient;

/* What the thread that writes the target's element and the row's results puts into shared memory, since registers are for
 * vectors: dlogits[y] = (own p[y] - rest sum_{j != y} p[j] + fixed) slope[y] with p = unit e; the sum is `others` where it is
 * known before the end. And the row's state where it is not plain, which results are made of at the end. */
typedef struct {
    lk_ce_row row;
    float own, rest, fixed, unit, others, logit, slope, weight;
    int y;          /* -1: no element is written */
    int8_t counted, bad;
} lk_ce_gradient_aside;

/* The max and sum of a plain share without its target, column y, with a running maximum. */
template <class T>
LK_DEVICE lk_lse lk_ce_gather_slowly(const lk_cross_entropy_gradient_plan &p, int64_t row, const lk_vec<T> *slot, int y,
                                     bool read)
{
    const lk_ce_place<T> at = lk_ce_find<T>(p, row);
    lk_ce_row s = lk_ce_row_empty();
    const float w[LK_VEC<T>] = {}, none[1] = {0.0f};
    for (int u = 0, col; read && u < at.count; u++) {
        float v[LK_VEC<T>];
        lk_unpack(v, lk_ce_vec(at, slot, p.slots, u, &col));
#pragma unroll
        for (int j = 0; j < LK_VEC<T>; j++) v[j] = col + j == y ? -INFINITY : v[j];
        s = lk_ce_row_add(s, v, w, p.a.logit_scale);
    }
    for (int i = at.rank; read && i < at.edge; i += at.team) {
        const int col = lk_ce_edge_col(at, i);
        const float v[1] = {lk_to_float(at.logits[col])};
        if (col != y) s = lk_ce_row_add(s, v, none, p.a.logit_scale);
    }
    return {s.max, s.sum};
}

/* sum 2^(rate v - base) over what a plain share has beyond its slots and its first single element, but column y. */
template <class T>
LK_DEVICE float lk_ce_gather_more(const lk_cross_entropy_gradient_plan &p, int64_t row, int y, float rate, float base)
{
    const lk_ce_place<T> at = lk_ce_find<T>(p, row);
    float sum = 0.0f, lost = 0.0f;
    for (int i = at.rank + at.team; i < at.edge; i += at.team) { /* rows of less than a vector a lane */
        const int col = lk_ce_edge_col(at, i);
        if (col != y) sum += lk_ex2(fmaf(rate, lk_to_float(at.logits[col]), -base));
    }
    for (int u = p.slots; u < at.count; u++) {
        const T *next = at.first + (int64_t)u * at.jump;
        const int hit = y - (int)(next - at.logits);
        const lk_vec<T> raw = lk_load_vec(next);
        float part = -lost; /* Kahan's sum: these rows are long */
        if ((unsigned)hit >= (unsigned)LK_VEC<T>) part += lk_lse_terms(raw, rate, base);
        for (int j = 0; (unsigned)hit < (unsigned)LK_VEC<T> && j < LK_VEC<T>; j++)
            if (j != hit) part += lk_ex2(fmaf(rate, lk_to_float(next[j]), -base));
        const float grown = sum + part;
        lost = (grown - sum) - part;
        sum = grown;
    }
    return sum;
}

/* The max and sum of a team's shares of a plain row without the target, column y; nothing of a row that is not read. slot: the
 * thread's slots, of which `held` are in use and the first `half` are filled first; target: where the target's logit is there,
 * in elements, or -1. single: the share's first single element, -inf where that is the target or there is none. All lanes of a
 * warp call it; every lane of a team, of a warp's 32 at most, gets the result. As lk_lse_read
 * otherwise. */
template <class T>
LK_DEVICE lk_lse lk_ce_gather(const lk_cross_entropy_gradient_plan &p, int64_t row, lk_vec<T> *slot, int held, int half,
                              int target, float single, int y, bool read, bool more)
{
    const int threads = (int)blockDim.x, team = 1 << p.team_log2;
    const float rate = p.a.logit_scale * LK_LOG2E;
    if (!read) held = half = 0, single = -INFINITY;
    lk_cp_async_wait_group<1>();
    if ((unsigned)target < (unsigned)LK_VEC<T>) lk_put((T *)slot + target, -INFINITY);
    float reference = single; /* of the others: a warp's with a target far above would flush what other warps have */
    if (held > 0) {
        float v[LK_VEC<T>];
        lk_unpack(v, slot[0]);
#pragma unroll
        for (int j = 0; j < LK_VEC<T>; j++) reference = fmaxf(reference, v[j]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, offset));
    const float base = rate * reference;
    float sum = single == -INFINITY ? 0.0f : lk_ex2(fmaf(rate, single, -base));
    if (read && more) sum += lk_ce_gather_more<T>(p, row, y, rate, base);
    if (target >= 0) { /* one lane's first group waits for the second */
        lk_cp_async_wait_group<0>();
        lk_put((T *)slot + target, -INFINITY);
    }
    const lk_vec<T> *next = slot;
#pragma unroll 4
    for (int u = 0; u < half; u++, next += threads) sum += lk_lse_terms(*next, rate, base);
    lk_cp_async_wait_group<0>();
#pragma unroll 4
    for (int u = half; u < held; u++, next += threads) sum += lk_lse_terms(*next, rate, base);
    const bool fast = fabsf(base) < LK_LSE_BASE && sum < LK_LSE_LIMIT;
    if (__all_sync(0xffffffffu, fast || !read)) {
        /* base differs from rate reference by a rounding error, which is known exactly. */
        return {reference, lk_sum_warp(sum, team) * lk_ex2(-fmaf(rate, reference, -base))};
    }
    const lk_lse slow = lk_ce_gather_slowly(p, row, slot, y, read);
    lk_ce_row s = lk_ce_row_empty();
    s.max = slow.max, s.sum = slow.sum;
    s = lk_ce_row_warp<false, sizeof(T) == 4>(s, p.a.logit_scale, team);
    return {s.max, s.sum};
}

/* The state of a team's shares of any row without the target, column y, which counts for the argmax alone. */
template <class T>
LK_DEVICE lk_ce_row lk_ce_gather_all(const lk_cross_entropy_gradient_plan &p, int64_t row, const lk_vec<T> *slot, int y,
                                     bool read, float scale)
{
    const lk_ce_place<T> at = lk_ce_find<T>(p, row);
    lk_ce_row s = lk_ce_row_empty();
    lk_cp_async_wait_group<0>();
    for (int u = 0, col; read && u < at.count; u++) {
        float x[LK_VEC<T>];
        lk_unpack(x, lk_ce_vec(at, slot, p.slots, u, &col));
        if ((unsigned)(y - col) >= (unsigned)LK_VEC<T>) {
            s = lk_ce_take(s, x, col, p.a);
        } else {
#pragma unroll 1
            for (int j = 0; j < LK_VEC<T>; j++) s = lk_ce_take_but(s, lk_to_float(at.logits[col + j]), col + j, y, p.a);
        }
    }
    for (int i = at.rank; read && i < at.edge; i += at.team) {
        const int col = lk_ce_edge_col(at, i);
        s = lk_ce_take_but(s, lk_to_float(at.logits[col]), col, y, p.a);
    }
    return lk_ce_row_warp<true, sizeof(T) == 4>(s, scale, at.team);
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

/* How the warps of a row tell each other what they know, in words of 8 bytes. In a cluster by st.async, for which nobody waits
 * until his stores are done, as at a cluster's barrier. Every thread calls lk_ce_mail_begin before lk_cluster_begin(), and who
 * sends has called lk_cluster_ready(); a block that will read says once how many words it expects. */
typedef struct {
    lk_mbarrier full;                                    /* all words are there */
    uint64_t word[8 * LK_CROSS_ENTROPY_BLOCK_MOST / 32]; /* one from each warp of the row */
    uint64_t logit;                                      /* the target's */
} lk_ce_mail;

LK_DEVICE void lk_ce_mail_begin(lk_ce_mail *mail)
{
    if (lk_cluster_nctarank() > 1 && threadIdx.x == 0) {
        lk_mbarrier_init(&mail->full, 1);
        lk_fence_mbarrier_init();
    }
}

LK_DEVICE void lk_ce_mail_expect(lk_ce_mail *mail, int words)
{
    if (lk_cluster_nctarank() > 1) lk_mbarrier_arrive_expect_tx(&mail->full, 8 * (unsigned)words);
}

LK_DEVICE void lk_ce_mail_send(lk_ce_mail *mail, uint64_t *to, float low, float high, int peer)
{
    const uint64_t value = (uint64_t)__float_as_uint(high) << 32 | __float_as_uint(low);
    if (lk_cluster_nctarank() > 1) lk_st_async_b64(lk_mapa_shared(to, peer), value, lk_mapa_shared(&mail->full, peer));
    else *to = value;
}

/* Makes a warp's state the row's and brings everybody the target's logit; source: the rank of who has it, the owner. all: as in
 * lk_ce_row_warp, by a barrier then. */
template <bool all, bool exact>
LK_DEVICE lk_ce_row lk_ce_gathered(lk_ce_mail *mail, lk_ce_row s, float scale, int team, int source, bool owner, float *logit)
{
    const int blocks = (int)lk_cluster_nctarank(), lane = (int)threadIdx.x % 32;
    const int warp = (int)(lk_cluster_ctarank() * blockDim.x + threadIdx.x) / 32;
    if (team <= 32) {
        *logit = __shfl_sync(0xffffffffu, *logit, (lane & ~(team - 1)) + source);
        return s;
    }
    lk_ce_row sum = lk_ce_row_empty();
    if (threadIdx.x == 0) lk_ce_mail_expect(mail, all ? 1 : team / 32 + 1);
    for (int peer = 0; owner && peer < blocks; peer++) lk_ce_mail_send(mail, &mail->logit, *logit, 0.0f, peer);
    if constexpr (all) {
        LK_SHARED(lk_ce_row, inbox, [8 * LK_CROSS_ENTROPY_BLOCK_MOST / 32]);
        if (lane < blocks) *(blocks > 1 ? (lk_ce_row *)lk_mapa(inbox + warp, (unsigned)lane) : inbox + warp) = s;
        lk_ce_sync(team); /* orders the writes into everybody's inbox before their reads */
        if (blocks > 1) lk_mbarrier_wait_parity_cluster(&mail->full, 0);
        for (int i = lane; i < team / 32; i += 32) sum = lk_ce_row_merge<exact>(sum, inbox[i], scale);
    } else {
        if (lane < blocks) lk_ce_mail_send(mail, mail->word + warp, s.max, s.sum, lane);
        if (blocks > 1) lk_mbarrier_wait_parity_cluster(&mail->full, 0);
        else __syncthreads(); /* orders the writes of the words before their reads */
        for (int i = lane; i < team / 32; i += 32) {
            s.max = __uint_as_float((uint32_t)mail->word[i]), s.sum = __uint_as_float((uint32_t)(mail->word[i] >> 32));
            sum = lk_ce_row_merge<exact>(sum, s, scale);
        }
    }
    *logit = __uint_as_float((uint32_t)mail->logit);
    return lk_ce_row_warp<all, exact>(sum, scale);
}

/* The sum over the threads of a row of what each has, for the lanes of the owner's warp; source: as above. Nobody else waits,
 * and other blocks may end. */
LK_DEVICE float lk_ce_delivered(lk_ce_mail *mail, float x, int team, int source)
{
    if (team <= 32) return lk_sum_warp(x, team);
    const int blocks = (int)lk_cluster_nctarank(), lane = (int)threadIdx.x % 32;
    const int warp = (int)(lk_cluster_ctarank() * blockDim.x + threadIdx.x) / 32;
    x = lk_sum_warp(x);
    if (lane == 0) lk_ce_mail_send(mail, mail->word + warp, x, 0.0f, source / (int)blockDim.x);
    if (blocks == 1) __syncthreads(); /* orders the writes of the words before their reads */
    if (warp != source / 32) return 0.0f;
    if (lane == 0) lk_ce_mail_expect(mail, team / 32);
    if (blocks > 1) lk_mbarrier_wait_parity_cluster(&mail->full, 0);
    x = 0.0f;
    for (int i = lane; i < team / 32; i += 32) x += __uint_as_float((uint32_t)mail->word[i]);
    return lk_sum_warp(x);
}

/* What a row's gradient takes from memory beside the logits, asked for before it is needed: f and h, the upstreams of the
 * class term and of the z-loss, and what says itself. */
typedef struct {
    float f, h, dlse, lse, lse_low, weight;
} lk_ce_upstream;

LK_DEVICE lk_ce_upstream lk_ce_ask(const lk_cross_entropy_gradient_plan &p, int64_t row, int y)
{
    lk_ce_upstream up = {1.0f, 1.0f, 0.0f, 0.0f, 0.0f, 1.0f};
    if (y == -1) return up; /* ignored */
    if (p.a.upstream) up.f = up.h = p.a.upstream[p.a.upstream_per_row ? row : 0];
    if (p.a.dlse) up.dlse = p.a.dlse[row];
    if (p.given) up.lse = p.given[row];
    if (p.given_low) up.lse_low = p.given_low[row];
    if (p.a.class_weight && y >= 0) up.weight = p.a.class_weight[y];
    if (p.a.reduction == LK_REDUCTION_MEAN) {
        const float valid = (float)(p.valid_rows ? *p.valid_rows : p.valid), over = p.a.class_weight ? *p.weight_sum : valid;
        up.f = over != 0.0f ? __fdiv_rn(up.f, over) : 0.0f;
        up.h = over != 0.0f ? __fdiv_rn(up.h, valid) : 0.0f;
    }
    return up;
}

/* The factors of a row's gradient but for rate, base and the factor of e; weights: W. */
LK_DEVICE lk_ce_gradient lk_ce_prepare(const lk_cross_entropy_gradient_plan &p, lk_ce_upstream up, float lse, float weights,
                                       lk_ce_gradient_aside *aside)
{
    const lk_cross_entropy_args &a = p.a;
    const float f = up.f * a.logit_scale, h = up.h * a.logit_scale;
    lk_ce_gradient g = {};
    float rest = f * up.weight, own = 0.0f, fixed = 0.0f;
    if (a.label_smoothing > 0.0f) {
        g.fall = f * __fdiv_rn(a.label_smoothing, (float)a.vocab);
        rest = fmaf(f * (1.0f - a.label_smoothing), up.weight, g.fall * weights);
        fixed = g.fall * (weights - up.weight);
    }
    if (a.z_loss > 0.0f) own = 2.0f * a.z_loss * lse * h;
    if (a.dlse) own = fmaf(a.logit_scale, up.dlse, own);
    g.rise = rest + own;
    if (aside) aside->rest = rest, aside->own = own, aside->fixed = fixed;
    return g;
}

/* rate, for logits up to `value`; but where rate value is beyond LK_LSE_BASE a power of two, whose product with value is exact.
 * Floats next to each other differ by a factor of 2^128 in p there, and by more with this rate: as good as 0. */
LK_DEVICE float lk_ce_rate(float rate, float value)
{
    if (fabsf(rate * value) < LK_LSE_BASE) return rate;
    const int exponent = 31 + 2 * 127 - (__float_as_int(value) >> 23 & 255);
    return __int_as_float((exponent < 254 ? exponent : 254) << 23);
}

/* unit, rate and base of p = unit 2^(rate v - base), from a given lse and what it was rounded by. base is rate times a value,
 * as in forward, so that what rate was rounded by does not meet large logits; by how much the value misses (lse + lse_low) /
 * scale, and base its product, is known exactly. With lk_ce_rate's other rate the value is the largest logit, which lse alone
 * may miss: then unit is 1. */
LK_DEVICE float lk_ce_unit(float lse, float lse_low, float scale, float *rate, float *base)
{
    float value = __fdiv_rn(lse, scale);
    if (!lk_is_finite(value)) value = 0.0f;
    *rate = lk_ce_rate(scale * LK_LOG2E, value), *base = *rate * value;
    const float missed = fmaf(scale, value, -lse) - lse_low;
    if (*rate == scale * LK_LOG2E) return lk_ex2(fmaf(missed, LK_LOG2E, -fmaf(*rate, value, -*base)));
    if (lse_low == 0.0f) return 1.0f;
    value -= __fdiv_rn(missed, scale), *base = *rate * value;
    return lk_ex2((fmaf(scale, value, -lse) - lse_low) * LK_LOG2E);
}

/* unit and base from a row's sum and inverse, 1 / sum, with a unit above 1/2: base holds log2 of the sum but for less than 1.
 * What the product and the addition were rounded by is known exactly. It is small, unlike the power of two in the sum, which is
 * a factor of its own: in one exponent it would take the digits of the rest. */
LK_DEVICE float lk_ce_unit_of_sum(lk_lse s, float inverse, float rate, float *base)
{
    const int bits = __float_as_int(s.sum);
    const float product = rate * s.max, power = (float)((bits >> 23 & 255) - 127);
    *base = product + power;
    const float added = *base - product, lost = (product - (*base - added)) + (power - added);
    return lk_ex2(-lost - fmaf(rate, s.max, -product)) * (__int_as_float(bits & 0x7f800000) * inverse);
}

/* The logits x of columns col, col + 1, ... become their gradients, and sum gets their e but that of column `hit`. */
template <bool plain, bool given, int n>
LK_DEVICE void lk_ce_differentiate(float (&x)[n], const lk_ce_gradient &g, const lk_cross_entropy_args &a,
                                   int64_t col, int hit, float *sum)
{
    float part[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < n; j++) {
        float slope = 1.0f, fall = g.fall;
        if (!plain && a.softcap > 0.0f) x[j] = lk_ce_cap(x[j], a.logit_scale, a.softcap, &slope);
        if (!plain && a.class_weight && g.fall != 0.0f) fall *= a.class_weight[col + j];
        const float e = lk_ex2(fmaf(g.rate, x[j], -g.base));
        if (given) part[j % 2] += j == hit ? 0.0f : e;
        x[j] = fmaf(g.rise, e, -fall) * slope;
    }
    if (given) *sum += part[0] + part[1];
}

/* Stores n neighbouring gradients, 16 bytes of them or 8; wide: at an address that is a multiple of that. */
template <class D, int n> LK_DEVICE void lk_ce_store(D *out, const float (&x)[n], bool wide)
{
    float full[LK_VEC<D>];
    lk_vec<D> packed;
#pragma unroll
    for (int j = 0; j < LK_VEC<D>; j++) full[j] = x[j % n];
    lk_pack(&packed, full);
    if (wide && n == LK_VEC<D>) lk_store_vec_wb(out, packed); /* an H200: 1 % faster than a streaming store */
    else if (wide) __stcs((uint2 *)out, make_uint2(packed.raw.x, packed.raw.y));
#pragma unroll
    for (int j = 0; !wide && j < n; j++) lk_put(out + j, x[j]);
}

/* The gradients of one vector; hit: as in lk_ce_differentiate, but a plain row's target is blank. */
template <bool plain, bool given, class T, class D>
LK_DEVICE void lk_ce_emit(lk_vec<T> raw, D *out, int64_t col, int hit, bool wide, const lk_ce_gradient &g,
                          const lk_cross_entropy_args &a, float *sum)
{
    float x[LK_VEC<T>];
    lk_unpack(x, raw);
    lk_ce_differentiate<plain, given>(x, g, a, col, plain ? -1 : hit, sum);
    lk_ce_store(out, x, wide);
}

/* Sums over the threads of a row; every one gets it. */
LK_DEVICE float lk_ce_sum(float x, int team)
{
    float v[1] = {x};
    if (team > 32) lk_sum_cluster(v, 0);
    else v[0] = lk_sum_warp(x, team);
    return v[0];
}

/* The gradients of what a share has beyond its slots, and the padding. read: the row is; y: its target, -1 where no column is
 * special; single: the first single element. Returns the sum of e as lk_ce_differentiate makes it. */
template <class T, class D, bool plain, bool given>
LK_DEVICE float lk_ce_emit_more(const lk_cross_entropy_gradient_plan &p, int64_t row, lk_ce_gradient g, bool read, int y,
                                float single)
{
    const lk_cross_entropy_args &a = p.a;
    const lk_ce_place<T> at = lk_ce_find<T>(p, row);
    D *dlogits = (D *)a.dlogits + row * a.dlogits_stride;
    const bool wide = (uintptr_t)(dlogits + at.head) % (LK_VEC<T> * sizeof(D)) == 0;
    float sum = 0.0f;
    for (int u = p.slots; u <= (int)(a.vocab / LK_VEC<T>) >> p.team_log2; u++) { /* as often in every row */
        const int col = (int)(at.first - at.logits) + u * at.jump;
        lk_vec<T> raw = {};
        if (read && u < at.count) raw = lk_load_vec(at.logits + col);
        if (p.ordered) lk_ce_sync(at.team); /* the logits that lie where this step writes have been read */
        float x[LK_VEC<T>];
        lk_unpack(x, raw);
        if (u < at.count) lk_ce_differentiate<plain, given>(x, g, a, col, y - col, &sum);
        if (u < at.count) lk_ce_store(dlogits + col, x, wide);
    }
    for (int i = at.rank; i < at.edge; i += at.team) {
        const int col = lk_ce_edge_col(at, i);
        float x[1] = {i == at.rank || !read ? single : lk_to_float(at.logits[col])};
        lk_ce_differentiate<plain, given>(x, g, a, col, y - col, &sum);
        lk_put(dlogits + col, x[0]);
    }
    if (row < a.rows)
        for (int64_t end = a.vocab + at.rank; end < p.padded_end; end += at.team) lk_put(dlogits + end, 0.0f);
    return sum;
}

/* given: backward. plain: without a softcap and class weights under smoothing; in forward_backward also without any smoothing,
 * entropy and argmax. */
template <class T, class D, bool plain, bool given>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_BLOCK_MOST, LK_CROSS_ENTROPY_BLOCKS(plain))
    lk_cross_entropy_gradient_kernel(const __grid_constant__ lk_cross_entropy_gradient_plan p)
{
    constexpr int N = LK_VEC<T>;
    constexpr bool exact = sizeof(T) == 4;
    LK_DYN_SMEM(lk_vec<T>, slots); /* and behind them an aside for each row of the block */
    const lk_cross_entropy_args &a = p.a;
    const int threads = (int)blockDim.x, team = 1 << p.team_log2;
    const int64_t row = ((int64_t)blockIdx.x * threads + threadIdx.x) >> p.team_log2;
    const lk_ce_place<T> at = lk_ce_find<T>(p, row);
    const int held = at.count < p.slots ? at.count : p.slots, half = (held + 1) / 2;
    lk_vec<T> *slot = &slots + lk_tid_x(); /* not held: one register more spills below sm_90 */
    lk_ce_gradient_aside *aside = (lk_ce_gradient_aside *)(&slots + p.slots * threads) + (threadIdx.x >> p.team_log2);
    D *out = (D *)a.dlogits + row * a.dlogits_stride + (at.first - at.logits);
    const float scale = !plain && a.softcap > 0.0f ? 1.0f : a.logit_scale, rate = scale * LK_LOG2E;
    LK_SHARED(lk_ce_mail, mail, [1]);
    lk_ce_mail_begin(mail);
    lk_cluster_begin();
    /* Not in backward: forward and backward in turn then take 0 to 1.5 % longer on an H200. As for the rows
     * prefetched, of 4096 rows of 16384 none, half and 90 % ignored take 67.4, 54.3 and 43.5 us for backward; with two vectors
     * always 67.4, 55.7 and 46.1, in the first wave only 67.9, 53.2 and 41.0, never 69.0, 54.0 and 41.0. */
    if (!given) lk_griddepcontrol_launch_dependents();
    if (at.rank == 0 && row < a.rows) lk_ce_prefetch_target(a, row);
    if (at.count > 0) lk_prefetch_l2(at.first);
    if (at.count > 1 && blockIdx.x < (unsigned)p.wave) lk_prefetch_l2(at.first + at.jump);
    lk_griddepcontrol_wait();

    int y = -1; /* the target; or why there is none: -1 ignored, -2 bad. A label takes three registers */
    if (row < a.rows) {
        const lk_ce_label label = lk_ce_look_up(a, row);
        y = label.bad ? -2 : label.y;
    }
    if (blockIdx.x < (unsigned)p.wave && blockIdx.x >= (unsigned)p.sms) /* so many blocks start before it on its SM: */
        lk_nanosleep((blockIdx.x - lk_cluster_ctarank()) / (unsigned)p.sms * (unsigned)p.stagger);
    const bool read = given ? y >= 0 : y != -1;
    if (read) {
        const T *next = at.first;
#pragma unroll 4
        for (int u = 0; u < half; u++, next += team * N) lk_cp_async_16(slot, u * threads * 16, next);
        lk_cp_async_commit_group();
#pragma unroll 4
        for (int u = half; u < held; u++, next += team * N) lk_cp_async_16(slot, u * threads * 16, next);
        lk_cp_async_commit_group();
    } else {
#pragma unroll 1
        for (int u = 0; u < held; u++) slot[u * threads] = {};
    }
    /* Who owns the target's element: its seat among the vectors or the single elements says. */
    const int inner = y - at.head;
    const bool among = (unsigned)inner < (unsigned)(at.vecs * N);
    const int seat = y < 0 ? 0 : among ? inner / N : y < at.head ? y : y - at.vecs * N;
    const bool owner = (seat & (team - 1)) == at.rank;
    int target = -1; /* where in its slots the thread has the target's logit, in elements */
    if (plain && owner && among && seat >> p.team_log2 < held) target = (seat >> p.team_log2) * threads * N + inner % N;
    float single = read ? -INFINITY : 0.0f, logit = -INFINITY, sum = 0.0f, slope = 1.0f;
    if (read && at.rank < at.edge) {
        const int col = lk_ce_edge_col(at, at.rank);
        if (col != y) single = lk_to_float(at.logits[col]);
    }
    if (owner && y >= 0) logit = lk_to_float(at.logits[y]);
    const lk_ce_upstream up = lk_ce_ask(p, row, y);
    lk_cluster_ready();
    float weights = (float)a.vocab; /* W */
    if constexpr (given && !plain) {
        if (a.class_weight && a.label_smoothing > 0.0f) {
            weights = 0.0f;
            for (int64_t col = at.rank; col < a.vocab; col += team) weights += a.class_weight[col];
            weights = lk_ce_sum(weights, team);
        }
    }

    lk_ce_gradient g = {};
    if constexpr (given) {
        if (!plain && a.softcap > 0.0f) logit = lk_ce_cap(logit, a.logit_scale, a.softcap, &slope);
        if (owner && y == -2 && a.bad_targets) atomicAdd(a.bad_targets, 1);
        if (y == -2 || (y >= 0 && !lk_is_finite(up.lse))) {
            g.rise = NAN;
            y = -1;
        } else if (y >= 0) {
            g = lk_ce_prepare(p, up, up.lse, weights, owner ? aside : NULL);
            const float unit = lk_ce_unit(up.lse, up.lse_low, scale, &g.rate, &g.base);
            g.rise *= unit;
            if (owner) aside->unit = unit;
        }
    } else {
        lk_ce_row rest = lk_ce_row_empty(), all;
        if constexpr (plain) {
            const lk_lse got = lk_ce_gather(p, row, slot, held, half, target, single, y, read,
                                            at.count > p.slots || at.edge > team);
            rest.max = got.max, rest.sum = got.sum;
        } else {
            rest = lk_ce_gather_all(p, row, slot, y, read, scale);
        }
        rest = lk_ce_gathered<!plain, exact>(mail, rest, scale, team, seat & (team - 1), owner, &logit);
        if (!plain && a.softcap > 0.0f) logit = lk_ce_cap(logit, a.logit_scale, a.softcap, &slope);
        all = rest;
        if (!plain && y >= 0) { /* of the others as they are: a sum of 0 raised to +inf is no longer 0 if raised again */
            const float v[1] = {logit}, w[1] = {a.label_smoothing > 0.0f ? up.weight : 1.0f};
            all = lk_ce_row_add(rest, v, w, scale);
        }
        /* Against the reference of all: in two steps where rest.max may be far below the largest of the others, since what
         * they sum to may be above 2^-126 where the factor is not. */
        if (plain && y >= 0) rest = lk_ce_row_raise<exact>(rest, fmaxf(rest.max, 0.5f * rest.max + 0.5f * logit), scale);
        if (y >= 0) rest = lk_ce_row_raise<exact>(rest, fmaxf(rest.max, logit), scale);
        if (plain && y >= 0) {
            all = rest;
            all.sum += lk_ex2(rate * (logit - lk_lse_reference(all.max)));
        }
        if (y >= 0) all.target = logit;
        if (plain && owner && row < a.rows) lk_ce_put<false>(a, p.terms, row, {y, y != -1, y == -2}, up.weight, all);
        if (!plain && owner) aside->row = all, aside->counted = y != -1, aside->bad = y == -2, aside->weight = up.weight;
        const float inverse = __fdividef(1.0f, all.sum);
        if (y == -2 || (y >= 0 && !(all.sum > 0.0f && lk_is_finite(all.sum)))) {
            g.rise = NAN;
            y = -1;
        } else if (y >= 0) {
            float lse = 0.0f;
            if (a.z_loss > 0.0f) lse = lk_ce_row_finish<false>(all, {scale, 0.0f, 0.0f, 1.0f, a.vocab}).lse;
            const bool weighted = !plain && a.class_weight && a.label_smoothing > 0.0f;
            g = lk_ce_prepare(p, up, lse, weighted ? all.weights : weights, owner ? aside : NULL);
            g.rate = lk_ce_rate(rate, all.max);
            const float unit = lk_ce_unit_of_sum({all.max, all.sum}, inverse, g.rate, &g.base);
            g.rise *= unit;
            if (owner) aside->unit = unit, aside->others = rest.sum * inverse;
        }
    }
    if (owner) aside->y = y, aside->logit = logit, aside->slope = slope;
    if (p.ordered) {
        lk_cp_async_wait_group<0>();
        lk_ce_sync(team); /* the logits that lie where gradients are written have been read */
    }

    const bool wide = (uintptr_t)out % (N * sizeof(D)) == 0;
    int col = plain ? 0 : (int)(at.first - at.logits), u = 0;
    if constexpr (given) {
        lk_cp_async_wait_group<1>();
        if (target >= 0) {
            lk_cp_async_wait_group<0>();
            lk_put((T *)slot + target, -INFINITY);
        }
        for (; u < half; u++, out += team * N, col += team * N)
            lk_ce_emit<plain, given>(slot[u * threads], out, col, y - col, wide, g, a, &sum);
        lk_cp_async_wait_group<0>();
    }
#pragma unroll 2
    for (; u < held; u++, out += team * N, col += team * N)
        lk_ce_emit<plain, given>(slot[u * threads], out, col, y - col, wide, g, a, &sum);
    if (p.more) sum += lk_ce_emit_more<T, D, plain, given>(p, lk_ce_row_of(p), g, read, y, single);
    if (given) lk_griddepcontrol_launch_dependents();
    float others = 0.0f;
    if constexpr (given) others = lk_ce_delivered(mail, sum, team, seat & (team - 1));
    if (owner && aside->y >= 0) {
        others = given ? others * aside->unit : aside->others;
        const float own = aside->unit * lk_ex2(fmaf(g.rate, aside->logit, -g.base));
        lk_put((D *)a.dlogits + lk_ce_row_of(p) * a.dlogits_stride + aside->y,
               (fmaf(aside->own, own, aside->fixed) - aside->rest * others) * aside->slope);
    }
    if constexpr (!given && !plain) {
        const lk_ce_label label = {-1, aside->counted != 0, aside->bad != 0};
        if (owner && lk_ce_row_of(p) < a.rows) lk_ce_put<true>(a, p.terms, lk_ce_row_of(p), label, aside->weight, aside->row);
    }
}

/* ---- Short rows --------------------------------------------------------------------------------------------------------- */

/* Backward and forward_backward of short plain rows of whole vectors. A team of up to 32 lanes, or of two or four warps, holds
 * a row in registers, as exponentials once they are taken, so that an element costs one in forward_backward too. At this size
 * a row costs instructions, most of them not its elements': whole warps let the compiler know every step, and what a row needs
 * beside its logits is asked for before them. Of the ceiling on an H200, 4096 rows, forward_backward and backward, by the
 * kernel above and by an earlier form of this one: of 2048 0.745 and 0.855, 0.868 and 0.895; of 4096 0.843 and 0.891, 0.879
 * and 0.904; of 8192, by eight warps a row, 0.926 and 0.936, 0.892 and 0.912. */
#define LK_CROSS_ENTROPY_SHORT 4 /* vectors a lane */
#define LK_CROSS_ENTROPY_SHORT_BLOCKS (LK_ARCH >= 1000 ? 3 : 4) /* on an SM, as far as registers go without spills */
/* Rows at most where each cluster counts them all, 4 targets a thread. On an H200 4096 rows of 1024, in an earlier form, took
 * 8.6 us so, and 9.25 with the count in a launch in front; other numbers of rows, and longer ones, were not compared. */
#define LK_CROSS_ENTROPY_INSIDE 8192

/* -inf in every element of a vector. */
template <class T> LK_DEVICE lk_vec<T> lk_ce_nothing(void)
{
    float x[LK_VEC<T>];
    lk_vec<T> none;
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++) x[j] = -INFINITY;
    lk_pack(&none, x);
    return none;
}

/* Puts -inf in element `place` of vector `seat`; -1: nowhere. */
template <class T> LK_DEVICE void lk_ce_blank(lk_vec<T> (&raw)[LK_CROSS_ENTROPY_SHORT], int seat, int place)
{
    constexpr int each = LK_VEC<T> / 4; /* elements of a word */
    const uint32_t one = sizeof(T) == 4 ? 0xffffffffu : 0xffffu << (unsigned)place % each * 16, none = lk_ce_nothing<T>().raw.x;
    uint32_t mask[4];
#pragma unroll
    for (int i = 0; i < 4; i++) mask[i] = place / each == i ? one : 0;
#pragma unroll
    for (int u = 0; u < LK_CROSS_ENTROPY_SHORT; u++) {
        if (u != seat) continue;
        raw[u].raw.x = (raw[u].raw.x & ~mask[0]) | (none & mask[0]);
        raw[u].raw.y = (raw[u].raw.y & ~mask[1]) | (none & mask[1]);
        raw[u].raw.z = (raw[u].raw.z & ~mask[2]) | (none & mask[2]);
        raw[u].raw.w = (raw[u].raw.w & ~mask[3]) | (none & mask[3]);
    }
}

/* The larger elements of two vectors; of a number and a NaN, the number. */
LK_DEVICE void lk_ce_max(lk_vec<lk_f32> *a, lk_vec<lk_f32> b)
{
    float x[4], y[4];
    lk_unpack(x, *a);
    lk_unpack(y, b);
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = fmaxf(x[j], y[j]);
    lk_pack(a, x);
}
template <class Pair> LK_DEVICE void lk_ce_max_pairs(uint4 *a, uint4 b)
{
    Pair x[4], y[4];
    memcpy(x, a, 16);
    memcpy(y, &b, 16);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __hmax2(x[i], y[i]);
    memcpy(a, x, 16);
}
LK_DEVICE void lk_ce_max(lk_vec<lk_f16> *a, lk_vec<lk_f16> b) { lk_ce_max_pairs<__half2>(&a->raw, b.raw); }
LK_DEVICE void lk_ce_max(lk_vec<lk_bf16> *a, lk_vec<lk_bf16> b) { lk_ce_max_pairs<__nv_bfloat162>(&a->raw, b.raw); }

/* e = 2^(rate v - base) of a share's elements, or apart, for a base out of range, 2^(rate (v - base)); returns their sum. */
template <bool apart, class T>
LK_DEVICE float lk_ce_exponentials(float (&e)[LK_CROSS_ENTROPY_SHORT][LK_VEC<T>],
                                   const lk_vec<T> (&raw)[LK_CROSS_ENTROPY_SHORT], float rate, float base)
{
    float sum[4] = {};
#pragma unroll
    for (int u = 0; u < LK_CROSS_ENTROPY_SHORT; u++) {
        lk_unpack(e[u], raw[u]);
#pragma unroll
        for (int j = 0; j < LK_VEC<T>; j++)
            sum[j % 4] += e[u][j] = lk_ex2(apart ? rate * (e[u][j] - base) : fmaf(rate, e[u][j], -base));
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* The barrier of the W warps of a row, the block's number `team`. */
template <int W> LK_DEVICE void lk_ce_meet(int team)
{
    if (team == 0) lk_named_barrier_sync<1>(32 * W);
    else if (team == 1) lk_named_barrier_sync<2>(32 * W);
    else if (W == 2 && team == 2) lk_named_barrier_sync<3>(32 * W);
    else if (W == 2) lk_named_barrier_sync<4>(32 * W);
}

/* given: backward. lanes: a row's, 32, 64 or 128; 0: up to 32, as the plan says. Of several warps each takes its exponentials
 * against a reference of its own, and they meet once, and their logits stay in the caches: by streaming loads 2048 and 4096
 * columns take 2 % longer on an H200, 1024 2 % less.
 *
 * inside: forward_backward with the count for a mean without class weights, in clusters of 8 blocks. Each cluster counts all
 * rows while its logits are on their way, in place of a launch in front, and its warps tell each other by st.async. Every warp
 * waits for all words, one of no row too: then nobody writes into a block that has ended.
 *
 * The first blocks prefetch their rows in front of the wait, those of several warps whole: when every block did so for its own,
 * 4096 rows of 4096 took 17.8 us for backward on an H200, by two vectors a thread, as 1024 are, 18.7, by some rows' behind the
 * wait 19.0; 1024 5.7, 5.0 and 5.8. Now a later row is prefetched by the block that comes a wave before its own, and by then
 * knows whether it is ignored. Backward of 16384 rows of 4096, none, half and 90 % ignored: 65.1, 52.3 and 46.8 us; by blocks
 * that prefetch their own rows before they know their targets 65.3, 64.0 and 64.0; none prefetched 69.1, 54.1 and 43.8. Of
 * 32768 of 1024 34.3, 26.2 and 23.5; 35.1, 30.4 and 27.4; 35.4, 28.2 and 22.9. */
template <class T, bool given, int lanes, bool inside>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_THREADS, LK_CROSS_ENTROPY_SHORT_BLOCKS)
    lk_cross_entropy_short_kernel(const __grid_constant__ lk_cross_entropy_gradient_plan p)
{
    constexpr int N = LK_VEC<T>, U = LK_CROSS_ENTROPY_SHORT;
    constexpr int W = lanes > 32 ? lanes / 32 : 1; /* warps of a row */
    constexpr bool full = lanes >= 32;
    const lk_cross_entropy_args &a = p.a;
    const int team_log2 = lanes == 32 ? 5 : lanes == 64 ? 6 : lanes == 128 ? 7 : p.team_log2;
    const int team = 1 << team_log2;
    const int rank = (int)threadIdx.x & (team - 1), step = team * N;
    const int64_t row = ((int64_t)blockIdx.x * LK_CROSS_ENTROPY_THREADS + threadIdx.x) >> team_log2;
    const bool there = row < a.rows;
    const int64_t next = row + (p.wave << (LK_CROSS_ENTROPY_THREADS_LOG2 - team_log2)); /* as far behind as a wave of blocks */
    const bool early = blockIdx.x < (unsigned)p.wave, asks = LK_ARCH >= 900 && rank == 0;
    const T *const logits = (const T *)a.logits + row * a.logits_stride, *const first = logits + rank * N;
    const int count = there ? ((int)a.vocab / N - rank + team - 1) >> team_log2 : 0;
    const bool mean = !inside && a.reduction == LK_REDUCTION_MEAN; /* with a count from in front */
    constexpr int PEERS = 8, WARPS = LK_CROSS_ENTROPY_THREADS / 32, STEP = PEERS * LK_CROSS_ENTROPY_THREADS;
    constexpr int SHARE = LK_CROSS_ENTROPY_INSIDE / STEP; /* a thread's */
    LK_SHARED(lk_ce_mail, mail, [1]);
    if (inside) {
        if (threadIdx.x == 0) lk_mbarrier_init(&mail->full, 1), lk_fence_mbarrier_init();
        lk_barrier_cluster_arrive_relaxed();
        lk_barrier_cluster_wait(); /* all peers run and have their barriers */
        if (threadIdx.x == 0) lk_mbarrier_arrive_expect_tx(&mail->full, PEERS * WARPS * 8);
    }
    lk_griddepcontrol_launch_dependents();
    if (there && rank == 0) {
        lk_ce_prefetch_target(a, row);
        if (given) lk_prefetch_l2(p.given + row);
        if (W > 1 && early) lk_cp_async_bulk_prefetch_l2(logits, (unsigned)a.vocab * (unsigned)sizeof(T));
    }
    if (W == 1 && early && count > 0) lk_prefetch_l2(first);
    if (W == 1 && early && count > 1) lk_prefetch_l2(first + step);
    lk_griddepcontrol_wait();
    if (full && !inside && !there) return;

    const lk_ce_word word = lk_ce_request(a, row);
    lk_ce_word next_word = {};
    if (asks) next_word = lk_ce_request(a, next);
    const unsigned lane = threadIdx.x % 32, number = lk_cluster_ctarank() * LK_CROSS_ENTROPY_THREADS + threadIdx.x;
    const bool wide = a.target_dtype == LK_TARGET_INT64;
    const int left = (int)a.rows - (int)number;
    const lk_ce_word ignored = {(uint32_t)a.ignore_index, (uint32_t)(a.ignore_index >> 32)};
    lk_ce_word share[SHARE]; /* of all targets; those beyond the last row are ignored */
#pragma unroll
    for (int i = 0; inside && i < SHARE; i++) share[i] = ignored;
    if (inside && wide) {
        const lk_ce_word *target = (const lk_ce_word *)a.target + number;
#pragma unroll
        for (int i = 0; i < SHARE; i++)
            if (i * STEP < left) share[i] = target[i * STEP];
    } else if (inside) {
        const uint32_t *target = (const uint32_t *)a.target + number;
#pragma unroll
        for (int i = 0; i < SHARE; i++)
            if (i * STEP < left) share[i].low = target[i * STEP];
    }
    float f = 1.0f, dlse = 0.0f, lse = 0.0f, lse_low = 0.0f, over = 1.0f;
    int64_t valid = p.valid;
    if (there && given) lse = p.given[row];
    if (there && given && p.given_low) lse_low = p.given_low[row];
    if (there && a.upstream) f = a.upstream[a.upstream_per_row ? row : 0];
    if (there && a.dlse) dlse = a.dlse[row];
    if (mean && p.valid_rows) valid = *p.valid_rows;
    if (mean && a.class_weight) over = *p.weight_sum;
    const lk_ce_label label = lk_ce_received(a, row, word);
    const int y = label.bad ? -2 : label.y; /* the target; or why there is none: -1 ignored, -2 bad */
    const bool read = given ? y >= 0 : y != -1;
    lk_vec<T> raw[U];
#pragma unroll
    for (int u = 0; u < U; u++)
        if (read && u < count) {
            const T *from = first + u * step;
            raw[u] = W > 1 ? lk_load_vec_ca(from) : lk_load_vec(from);
        }
    if (asks && lk_ce_received(a, next, next_word).counted)
        lk_cp_async_bulk_prefetch_l2((const T *)a.logits + next * a.logits_stride, (unsigned)a.vocab * (unsigned)sizeof(T));
    T element = {};
    float weight = 1.0f;
    if (y >= 0) element = logits[y];
    if (y >= 0 && a.class_weight) weight = a.class_weight[y];
    if (inside) {
        unsigned counted = 0;
#pragma unroll
        for (int i = 0; i < SHARE; i++) counted += share[i].low != ignored.low || share[i].high != ignored.high;
        counted = __reduce_add_sync(0xffffffffu, counted);
        if (lane < PEERS)
            lk_st_async_b64(lk_mapa_shared(mail->word + number / 32, lane), counted, lk_mapa_shared(&mail->full, lane));
    }
    const int seat = y >= 0 && (y / N & (team - 1)) == rank ? y / N >> team_log2 : -1;
    const bool owner = y < 0 ? rank == 0 : seat >= 0;
    if (!read || count < U) {
#pragma unroll
        for (int u = 0; u < U; u++)
            if (!read || u >= count) raw[u] = lk_ce_nothing<T>();
    }
    lk_ce_blank(raw, seat, y % N);

    /* dlogits[j] = rise e[j] for j != y, and dlogits[y] = single = own p[y] - rest sum_{j != y} p[j]. */
    const float scale = a.logit_scale, logit = y >= 0 ? lk_to_float(element) : -INFINITY;
    float rate = scale * LK_LOG2E, e[U][N], rise = 0.0f, single = NAN, rest = f * scale * weight;
    float own = 2.0f * a.z_loss * f * scale;
    if (mean) {
        if (!a.class_weight) over = (float)valid;
        rest = over != 0.0f ? __fdiv_rn(rest, over) : 0.0f, own = over != 0.0f ? __fdiv_rn(own, (float)valid) : 0.0f;
    }
    lk_ce_row all = lk_ce_row_empty();
    float sum, low = 0.0f, base = 0.0f, missed = 1.0f; /* missed: what base was rounded by, which is known exactly */
    if constexpr (given) {
        const bool proper = y >= 0 && lk_is_finite(lse);
        if (proper) missed = lk_ce_unit(lse, lse_low, scale, &rate, &base);
        own = (a.z_loss > 0.0f ? own * lse : 0.0f) + dlse * scale;
        rise = proper ? missed * (rest + own) : y != -1 ? NAN : 0.0f;
        sum = lk_ce_exponentials<false, T>(e, raw, rate, base);
    } else {
        lk_vec<T> most = raw[0];
#pragma unroll
        for (int u = 1; u < U; u++) lk_ce_max(&most, raw[u]);
        float v[N], top = logit;
        lk_unpack(v, most);
#pragma unroll
        for (int j = 0; j < N; j++) top = fmaxf(top, v[j]);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            if (offset < team) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
        all.max = top, low = lk_lse_reference(top), base = rate * low;
        if (fabsf(base) < LK_LSE_BASE) {
            missed = lk_ex2(-fmaf(rate, low, -base));
            sum = lk_ce_exponentials<false, T>(e, raw, rate, base);
        } else {
            sum = lk_ce_exponentials<true, T>(e, raw, rate, low);
        }
    }
    float others = lk_sum_warp(sum, team) * missed;
    if constexpr (W > 1) {
        LK_SHARED(float2, parts, [WARPS]);
        const int warp = (int)threadIdx.x / 32, team_first = warp & ~(W - 1);
        if (lane == 0) parts[warp] = make_float2(all.max, others);
        /* Orders these writes before their reads; and in place all warps have read the target's logit. */
        lk_ce_meet<W>(warp / W);
        float2 part[W];
        float top = -INFINITY;
        others = 0.0f;
#pragma unroll
        for (int i = 0; i < W; i++) part[i] = parts[team_first + i], top = fmaxf(top, part[i].x);
        if constexpr (given) {
#pragma unroll
            for (int i = 0; i < W; i++) others += part[i].y;
        } else { /* of two infinities alike the difference is NaN, which fminf passes over */
#pragma unroll
            for (int i = 0; i < W; i++) others = fmaf(part[i].y, lk_ex2(rate * fminf(part[i].x - top, 0.0f)), others);
            missed *= lk_ex2(rate * fminf(all.max - top, 0.0f));
            all.max = top, low = lk_lse_reference(top);
        }
    }
    if (inside) {
        static_assert(PEERS * WARPS == 64, "two words a lane");
        lk_mbarrier_wait_parity_cluster(&mail->full, 0);
        const unsigned counted = __reduce_add_sync(0xffffffffu, (unsigned)mail->word[lane] + (unsigned)mail->word[lane + 32]);
        over = (float)counted;
        rest = over != 0.0f ? __fdiv_rn(rest, over) : 0.0f;
        if (a.z_loss > 0.0f) own = over != 0.0f ? __fdiv_rn(own, over) : 0.0f;
    }
    if constexpr (given) {
        if (y >= 0 && lk_is_finite(lse)) single = own * (missed * lk_ex2(fmaf(rate, logit, -base))) - rest * others;
        if (owner && y == -2 && a.bad_targets) atomicAdd(a.bad_targets, 1);
    } else {
        const float target = lk_ex2(rate * (logit - low));
        all.sum = others;
        if (y >= 0) all.sum += target, all.target = logit;
        const float inverse = __fdividef(1.0f, all.sum);
        if (y >= 0 && all.sum > 0.0f && lk_is_finite(all.sum)) {
            own = a.z_loss > 0.0f ? own * lk_ce_row_finish<false>(all, {scale, 0.0f, 0.0f, 1.0f, a.vocab}).lse : 0.0f;
            own += dlse * scale;
            rise = (rest + own) * missed * inverse;
            single = own * (target * inverse) - rest * (others * inverse);
        } else if (y != -1) {
            rise = NAN;
        }
    }
    T *const dlogits = (T *)a.dlogits + row * a.dlogits_stride, *const out = dlogits + rank * N;
    if (W == 1) __syncwarp(); /* in place: every lane has read the target's logit, which its owner overwrites */
#pragma unroll
    for (int u = 0; u < U; u++) {
        if (u >= count) continue;
        lk_vec<T> packed;
#pragma unroll
        for (int j = 0; j < N; j++) e[u][j] *= rise;
        lk_pack(&packed, e[u]);
        *(uint4 *)(out + u * step) = packed.raw;
    }
    if (owner && y >= 0) lk_put(dlogits + y, single);
    if (!given && owner && there) lk_ce_put<false>(a, p.terms, row, {y, y != -1, y == -2}, weight, all);
}

/* ---- Launchers ---------------------------------------------------------------------------------------------------------- */

#define LK_CROSS_ENTROPY_ROWS ((int64_t)1 << 27) /* most rows of the paths that give each its blocks */

/* What the three calls make. */
enum { LK_CE_FORWARD = 1, LK_CE_BACKWARD = 2, LK_CE_BOTH = 3 };

/* Whether a reduced loss is wanted. */
LK_HOST bool lk_cross_entropy_reduced(const lk_cross_entropy_args *a)
{
    return a->reduction != LK_REDUCTION_NONE && (a->loss || a->z_loss_out);
}

/* The floats between the arrays of terms. */
LK_HOST int64_t lk_cross_entropy_terms_stride(int64_t rows)
{
    const int64_t most = (int64_t)1 << 58; /* more rows than there can be */
    return lk_ceil_div(rows < most ? rows : most, 64) * 64;
}

/* The bytes of workspace: for the terms of a reduced loss, and for the counts that a mean's gradients want before the rows. */
LK_HOST size_t lk_cross_entropy_bytes(const lk_cross_entropy_args *a, int call)
{
    const bool terms = lk_cross_entropy_reduced(a) && a->rows > 0;
    if (call == LK_CE_BACKWARD || (!terms && !(call == LK_CE_BOTH && a->reduction == LK_REDUCTION_MEAN))) return 0;
    const int kinds = terms ? 1 + (a->z_loss > 0.0f) + (a->class_weight || a->weight_sum) : 0;
    return sizeof(lk_ce_tally) + (size_t)kinds * (size_t)lk_cross_entropy_terms_stride(a->rows) * sizeof(float);
}

/* Where the terms of a reduced loss lie, behind the tally. */
LK_HOST lk_ce_terms lk_cross_entropy_terms(const lk_cross_entropy_args *a)
{
    const int64_t stride = lk_cross_entropy_terms_stride(a->rows);
    float *const loss = (float *)((lk_ce_tally *)a->workspace + 1), *const z = a->z_loss > 0.0f ? loss + stride : NULL;
    return {loss, z, a->class_weight || a->weight_sum ? (z ? z : loss) + stride : NULL};
}

/* The values that linear_cross_entropy has too. Scales are such that their products with log2 e, and under a softcap also the
 * quotient of both, are far from the ends of float's range. */
template <class Args> LK_HOST lk_status lk_cross_entropy_check_values(const char *op, const Args *a)
{
    const float scale = a->logit_scale, cap = a->softcap, z = a->z_loss, e = a->label_smoothing;
    const float quotient = (scale == 0.0f ? 1.0f : scale) / cap, least = 0x1p-100f, most = 0x1p100f;
    const bool capped = cap != 0.0f;
    lk_status status = lk_check_number(op, "logit_scale", scale, scale >= 0.0f && scale <= 0x1p127f, "0 to 2^127");
    if (!status)
        status = lk_check_number(op, "softcap", cap, !capped || (cap >= least && cap <= most), "0 or 2^-100 to 2^100");
    if (!status) status = lk_check_number(op, "z_loss", z, z >= 0.0f && z <= FLT_MAX, "finite and at least 0");
    if (!status)
        status = lk_check_number(op, "logit_scale over softcap", quotient, !capped || (quotient >= least && quotient <= most),
                                 "2^-100 to 2^100");
    if (!status) status = lk_check_number(op, "label_smoothing", e, e >= 0.0f && e <= 1.0f, "0 to 1");
    if (!status) status = lk_check_enum(op, "reduction", a->reduction, LK_REDUCTION_SUM, "LK_REDUCTION_*");
    return status ? status : lk_check_enum(op, "target_dtype", a->target_dtype, LK_TARGET_INT32, "LK_TARGET_*");
}

/* Validates a call; a becomes its arguments with every default filled in. arch: lk_device's, or LK_QUERY. */
template <class T>
LK_HOST lk_status lk_cross_entropy_check(const char *op, const lk_cross_entropy_args *args, int call, int arch,
                                         lk_cross_entropy_args *a)
{
    if (!args) return lk_fail(LK_ERR_NULL, op, "args is NULL");
    *a = *args;
    const bool query = arch == LK_QUERY, forward = call == LK_CE_FORWARD, back = call == LK_CE_BACKWARD;
    if (forward) a->upstream = a->dlse = NULL, a->dlogits = NULL, a->zero_padding = 0; /* what a call does not have */
    if (back) a->loss = a->z_loss_out = a->entropy = NULL, a->argmax = NULL;
    const bool mean = back && a->reduction == LK_REDUCTION_MEAN, in_place = !query && a->dlogits == a->logits;
    const int saved = back ? LK_IN : LK_OUT; /* by forward for backward */
    const int64_t losses = a->reduction == LK_REDUCTION_NONE ? a->rows : 1, some = a->rows != 0, counts = back ? some : 1;
    /* The columns of dlogits, with its padding. A stride says where that ends, of a single row too, which has no other use. */
    const int64_t padded = !a->zero_padding ? 0 : in_place ? a->logits_stride : a->dlogits_stride;
    const int64_t end = padded > a->vocab ? padded : a->vocab;
    const size_t bytes = lk_cross_entropy_bytes(a, call);
    lk_tensor list[] = {
        {"logits", a->logits, sizeof(T), LK_REQUIRED, a->vocab, {{a->rows, &a->logits_stride, "logits_stride"}}},
        {"target", a->target, a->target_dtype == LK_TARGET_INT32 ? 4 : 8, LK_REQUIRED, a->rows},
        {"class_weight", a->class_weight, 4, LK_IN, some * a->vocab},
        {"upstream", a->upstream, 4, LK_IN, a->upstream_per_row ? a->rows : some},
        {"dlse", a->dlse, 4, LK_IN, a->rows},
        {"loss", a->loss, 4, LK_OUT, losses},
        {"z_loss_out", a->z_loss_out, 4, LK_OUT, losses},
        {"lse", a->lse, 4, back ? LK_REQUIRED : LK_OUT, a->rows},
        {"lse_low", a->lse_low, 4, saved, a->rows},
        {"entropy", a->entropy, 4, LK_OUT, a->rows},
        {"argmax", a->argmax, 8, LK_OUT, a->rows},
        {"valid_rows", a->valid_rows, 8, mean && (!a->class_weight || a->z_loss != 0.0f) ? LK_REQUIRED : saved, counts},
        {"weight_sum", a->weight_sum, 4, mean && a->class_weight ? LK_REQUIRED : saved, counts},
        {"dlogits", a->dlogits, lk_dtype_bytes<T>(a->dlogits_dtype), forward ? LK_UNUSED : LK_OUT | LK_REQUIRED, end,
         {{a->rows, &a->dlogits_stride, "dlogits_stride"}}, {"logits"}},
        {"bad_targets", a->bad_targets, 4, LK_OUT, some},
        {"workspace", a->workspace, 1, LK_OUT, (int64_t)bytes}, /* the last: it is not an output */
    };
    const int count = lk_used_tensors(list, LK_COUNT(list));
    lk_status status = query ? LK_OK : lk_check_null(op, list, count - 1);
    if (!status) status = lk_check_size(op, "rows", a->rows, 0, INT64_MAX);
    if (!status) status = lk_check_size(op, "vocab", a->vocab, 1, 1 << 30);
    if (!status) status = lk_check_shapes(op, list, count, query);
    if (!status) status = lk_cross_entropy_check_values(op, a);
    if (status) return status;
    if (a->rows < 2) a->logits_stride = a->dlogits_stride = end;
    if (a->logit_scale == 0.0f) a->logit_scale = 1.0f;
    if (a->dlogits_dtype == LK_DTYPE_T) a->dlogits_dtype = lk_dtype<T>;
    const bool half = sizeof(T) == 4 && (a->dlogits_dtype == LK_DTYPE_F16 || a->dlogits_dtype == LK_DTYPE_BF16);
    if (!forward && a->dlogits_dtype != lk_dtype<T> && !half)
        return lk_fail(LK_ERR_VALUE, op, "dlogits_dtype is %d; it must be T, or f16 or bf16 when T is f32", a->dlogits_dtype);
    status = lk_check_enum(op, "path", a->path, LK_CROSS_ENTROPY_CLUSTER, "LK_CROSS_ENTROPY_*");
    if (status) return status;
    if (a->path == LK_CROSS_ENTROPY_CLUSTER && arch < 90)
        return lk_fail(LK_ERR_PATH, op, "path %d (cluster) needs code for sm_90 or later", a->path);
    if (a->path > LK_CROSS_ENTROPY_WARP && a->rows > LK_CROSS_ENTROPY_ROWS)
        return lk_fail(LK_ERR_PATH, op, "path %d takes 2^27 rows at most; rows is %lld", a->path, (long long)a->rows);
    if (query) return LK_OK;
    status = lk_check_alignment(op, list, count);
    if (!status) status = lk_check_workspace(op, a->workspace, a->workspace_bytes, bytes);
    if (!status) lk_check_warn(op, a->rows == 0, "rows is 0; nothing is computed");
    return status ? status : lk_check_allocations(op, list, count);
}

/* The bytes of workspace that a call wants. */
template <class T>
LK_HOST lk_status lk_cross_entropy_query(const char *op, const lk_cross_entropy_args *args, int call, size_t *bytes)
{
    lk_cross_entropy_args a = {};
    const lk_status status = lk_cross_entropy_check<T>(op, args, call, LK_QUERY, &a);
    if (!status && bytes) *bytes = lk_cross_entropy_bytes(&a, call);
    return status;
}
template <class T>
LK_HOST lk_status lk_cross_entropy_forward_workspace(const char *op, const lk_cross_entropy_args *args, size_t *bytes)
{
    return lk_cross_entropy_query<T>(op, args, LK_CE_FORWARD, bytes);
}
template <class T>
LK_HOST lk_status lk_cross_entropy_backward_workspace(const char *op, const lk_cross_entropy_args *args, size_t *bytes)
{
    return lk_cross_entropy_query<T>(op, args, LK_CE_BACKWARD, bytes);
}
template <class T>
LK_HOST lk_status lk_cross_entropy_forward_backward_workspace(const char *op, const lk_cross_entropy_args *args, size_t *bytes)
{
    return lk_cross_entropy_query<T>(op, args, LK_CE_BOTH, bytes);
}

LK_HOST lk_cross_entropy_forward_call lk_cross_entropy_forward_call_of(const lk_cross_entropy_args *a)
{
    return {a->logits, a->target, a->class_weight, a->loss, a->z_loss_out, a->lse, a->lse_low, a->entropy, a->argmax,
            a->valid_rows, a->weight_sum, a->bad_targets, a->workspace, a->workspace_bytes, a->rows, a->vocab,
            a->logits_stride, a->ignore_index, a->logit_scale, a->softcap, a->label_smoothing, a->z_loss,
            a->use_ignore_index, a->reduction, a->zero_when_empty, a->target_dtype, a->path};
}

/* Blocks that add up something of all rows, of so many bytes each: one, or a cluster beyond 128 KiB, a guess: for 4096 rows its
 * barrier takes longer than what it saves. */
LK_HOST int lk_cross_entropy_adders(const lk_device *device, int64_t rows, int64_t bytes)
{
    return device->arch >= 90 && rows > 131072 / bytes ? 8 : 1;
}

/* The counts of all rows, in the tally for gradients, and for the caller where no sum of terms gives them. */
LK_HOST lk_status lk_cross_entropy_count(const char *op, const lk_device *device, const lk_cross_entropy_args *a,
                                         lk_ce_tally *tally, cudaStream_t stream)
{
    lk_cross_entropy_count_plan count = {lk_cross_entropy_forward_call_of(a), tally};
    if (lk_cross_entropy_reduced(a)) count.a.valid_rows = NULL, count.a.weight_sum = NULL;
    const int cluster = lk_cross_entropy_adders(device, a->rows, a->target_dtype == LK_TARGET_INT32 ? 4 : 8);
    void (*kernel)(lk_cross_entropy_count_plan) = lk_cross_entropy_count_kernel<256, 1>;
    if (cluster > 1) kernel = lk_cross_entropy_count_kernel<256, 8>;
    return lk_launch_pdl(op, device, kernel, cluster, cluster, 256, 0, stream, count);
}

/* The reduced loss of the terms that the rows have left, and the counts. Few rows are added up by few warps, since each has its
 * own start, reduction and way through the barrier. */
LK_HOST lk_status lk_cross_entropy_sum(const char *op, const lk_device *device, const lk_cross_entropy_args *a,
                                       lk_ce_terms terms, cudaStream_t stream)
{
    const lk_cross_entropy_sum_plan sum = {terms, a->loss, a->z_loss_out, a->valid_rows, a->weight_sum, a->rows,
                                           a->reduction == LK_REDUCTION_MEAN, a->class_weight != NULL, a->zero_when_empty};
    const bool alone = !terms.z && !terms.weight;
    if (alone && a->rows <= 4096)
        return lk_launch_pdl(op, device, lk_cross_entropy_sum_few_kernel<256>, 1, 1, 256, 0, stream, sum);
    if (alone && a->rows <= 8192)
        return lk_launch_pdl(op, device, lk_cross_entropy_sum_few_kernel<512>, 1, 1, 512, 0, stream, sum);
    if (a->rows <= 8192) return lk_launch_pdl(op, device, lk_cross_entropy_sum_kernel<256, 1>, 1, 1, 256, 0, stream, sum);
    const int cluster = lk_cross_entropy_adders(device, a->rows, sizeof(float));
    return lk_launch_pdl(op, device, lk_cross_entropy_sum_kernel<1024, 8>, cluster, cluster, 1024, 0, stream, sum);
}

/* Whether gradients of 16 bits lie where logits of 32 are read; and the end of the columns from vocab on that become 0. */
template <class T> LK_HOST bool lk_cross_entropy_ordered(const lk_cross_entropy_args *a)
{
    return a->dlogits == a->logits && a->dlogits_dtype != lk_dtype<T>;
}
template <class T> LK_HOST int64_t lk_cross_entropy_padded_end(const lk_cross_entropy_args *a)
{
    return !a->zero_padding ? a->vocab : lk_cross_entropy_ordered<T>(a) ? a->logits_stride : a->dlogits_stride;
}

/* The path where the caller leaves it open, and the threads of a row: lanes until each has two vectors. */
template <class T>
LK_HOST int lk_cross_entropy_team(const lk_device *device, const lk_cross_entropy_args *a, int *cluster)
{
    const int64_t lanes = lk_ceil_div(a->vocab, 2 * LK_VEC<T>);
    int path = a->path, team_log2 = 0;
    if (path == LK_CROSS_ENTROPY_AUTO) {
        if (a->vocab * (int64_t)sizeof(T) <= 16384 || a->rows > LK_CROSS_ENTROPY_ROWS) path = LK_CROSS_ENTROPY_WARP;
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

/* The row kernel where a row's output or a reduced loss is wanted. */
template <class T>
LK_HOST lk_status lk_cross_entropy_forward(const char *op, const lk_cross_entropy_args *args, cudaStream_t stream)
{
    lk_cross_entropy_args a = {};
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    lk_status status = lk_cross_entropy_check<T>(op, args, LK_CE_FORWARD, error ? 90 : device.arch, &a);
    if (!status) status = lk_asked_device(op, error);
    if (status) return status;
    const bool reduced = lk_cross_entropy_reduced(&a);
    if (!reduced && (a.valid_rows || a.weight_sum)) status = lk_cross_entropy_count(op, &device, &a, NULL, stream);

    int cluster;
    lk_cross_entropy_forward_plan plan = {lk_cross_entropy_forward_call_of(&a), {}, 0};
    plan.team_log2 = lk_cross_entropy_team<T>(&device, &a, &cluster);
    if (a.rows < 2) plan.a.logits_stride = 0; /* up to 2^62, which overflows in threads without a row */
    if (reduced) plan.terms = lk_cross_entropy_terms(&a);
    if (a.reduction != LK_REDUCTION_NONE) plan.a.loss = plan.a.z_loss_out = NULL;
    const bool losses = reduced || plan.a.loss || plan.a.z_loss_out;
    const bool rowwise = losses || a.lse || a.lse_low || a.entropy || a.argmax || a.bad_targets;
    if (!status && a.rows > 0 && rowwise) {
        const bool plain = a.softcap == 0.0f && a.label_smoothing == 0.0f && !a.argmax && !a.entropy;
        /* Loads in flight a thread and blocks an SM as in lk_logsumexp_forward, where they were measured. */
        void (*kernel)(lk_cross_entropy_forward_plan) = lk_cross_entropy_forward_kernel<T, 2, 3>;
        if (plain && cluster > 1) kernel = lk_cross_entropy_forward_block_kernel<T, 2, 5>;
        else if (plain && plan.team_log2 > 5) kernel = lk_cross_entropy_forward_block_kernel<T, 8, 4>;
        else if (plain && a.vocab * (int64_t)sizeof(T) > 2048) kernel = lk_cross_entropy_forward_warp_kernel<T, 4>;
        else if (plain) kernel = lk_cross_entropy_forward_warp_kernel<T, 2>;
        const int threads = plain && plan.team_log2 <= 5 ? LK_CROSS_ENTROPY_WARP_THREADS : LK_CROSS_ENTROPY_THREADS;
        const int64_t size = (int64_t)1 << plan.team_log2; /* of a team */
        const int64_t blocks = size > threads ? a.rows * (size / threads) : lk_ceil_div(a.rows, threads / size);
        status = lk_launch_pdl(op, &device, kernel, blocks, cluster, threads, 0, stream, plan);
    }
    if (!status && reduced) status = lk_cross_entropy_sum(op, &device, &a, plan.terms, stream);
    return status;
}

/* The lanes of a row, as a power of two, where rows share blocks of LK_CROSS_ENTROPY_SHARED threads; -1: they do not. */
#define LK_CROSS_ENTROPY_SHARED 128
template <class T> LK_HOST int lk_cross_entropy_gradient_lanes(const lk_cross_entropy_args *a)
{
    const int64_t lanes = lk_ceil_div(a->vocab / LK_VEC<T>, LK_CROSS_ENTROPY_FEW);
    const bool fits = lanes <= 32 || a->rows > LK_CROSS_ENTROPY_ROWS;
    if (a->path != LK_CROSS_ENTROPY_WARP && !(a->path == LK_CROSS_ENTROPY_AUTO && fits)) return -1;
    int team_log2 = lk_cross_entropy_ordered<T>(a) ? 3 : 0; /* single elements are read at once then, one a thread */
    while (team_log2 < 5 && 1 << team_log2 < lanes) team_log2++;
    return team_log2;
}

/* Whether rows are short and plain. */
template <class T> LK_HOST bool lk_cross_entropy_short(const lk_cross_entropy_args *a)
{
    const bool plain = a->softcap == 0.0f && a->label_smoothing == 0.0f && !a->argmax && !a->entropy;
    const bool padded = a->zero_padding && a->dlogits_stride > a->vocab;
    const bool whole = (uintptr_t)a->logits % 16 == 0 && (uintptr_t)a->dlogits % 16 == 0 && a->vocab % LK_VEC<T> == 0 &&
                       (a->rows < 2 || (a->logits_stride % LK_VEC<T> == 0 && a->dlogits_stride % LK_VEC<T> == 0));
    return a->path <= LK_CROSS_ENTROPY_WARP && a->vocab <= 128 * LK_CROSS_ENTROPY_SHORT * LK_VEC<T> && plain && !padded &&
           whole && a->dlogits_dtype == lk_dtype<T>;
}

/* How a row is spread, and the launch: over threads of LK_CROSS_ENTROPY_FEW slots as far as a block goes, in forward_backward
 * then with up to LK_CROSS_ENTROPY_MANY, so that three blocks fit on an SM, then over a cluster, then with as many slots as
 * there is room for. On an H200, us of 4096 rows, with FEW and with MANY before a cluster: backward of 32768 132 and 134, 50264
 * 204 and 210, 65536 259 and 264, 131072 514 and 519; forward_backward 131 and 133, 227 and 206, 261 and 261, 522 and 518. By
 * blocks of 128 threads with FEW backward took 131, 208, 256 and 511. */
template <class T, class D, bool given>
LK_HOST lk_status lk_cross_entropy_gradient_launch(const char *op, const lk_device *device,
                                                   lk_cross_entropy_gradient_plan &plan, cudaStream_t stream)
{
    lk_cross_entropy_args &a = plan.a;
    plan.ordered = lk_cross_entropy_ordered<T>(&a), plan.padded_end = lk_cross_entropy_padded_end<T>(&a);
    const bool brief = lk_cross_entropy_short<T>(&a);
    if (a.rows < 2) a.logits_stride = a.dlogits_stride = 0; /* as in forward */
    if (brief) {
        while (a.vocab > (int64_t)(LK_CROSS_ENTROPY_SHORT * LK_VEC<T>) << plan.team_log2) plan.team_log2++;
        const int cluster = plan.inside ? 8 : 1;
        plan.wave = LK_CROSS_ENTROPY_SHORT_BLOCKS * device->sms;
        const int64_t blocks = lk_ceil_div(a.rows, LK_CROSS_ENTROPY_THREADS >> plan.team_log2);
        void (*const kernels[2][4])(lk_cross_entropy_gradient_plan) = {
            {lk_cross_entropy_short_kernel<T, given, 0, false>, lk_cross_entropy_short_kernel<T, given, 32, false>,
             lk_cross_entropy_short_kernel<T, given, 64, false>, lk_cross_entropy_short_kernel<T, given, 128, false>},
            {lk_cross_entropy_short_kernel<T, given, 0, !given>, lk_cross_entropy_short_kernel<T, given, 32, !given>,
             lk_cross_entropy_short_kernel<T, given, 64, !given>, lk_cross_entropy_short_kernel<T, given, 128, !given>}};
        return lk_launch_pdl(op, device, kernels[plan.inside][plan.team_log2 < 5 ? 0 : plan.team_log2 - 4],
                             lk_ceil_div(blocks, cluster) * cluster, cluster, LK_CROSS_ENTROPY_THREADS, 0, stream, plan);
    }
    const int64_t vecs = a.vocab / LK_VEC<T>, lanes = lk_ceil_div(vecs, LK_CROSS_ENTROPY_FEW);
    const int64_t full = given ? LK_CROSS_ENTROPY_FEW : LK_CROSS_ENTROPY_MANY;
    const int64_t blocks = lk_ceil_div(vecs, full * LK_CROSS_ENTROPY_BLOCK_MOST);
    const bool few = device->arch >= 90 && (blocks > 1 || a.rows < 2 * device->sms);
    int cluster = 1, threads = LK_CROSS_ENTROPY_SHARED;
    plan.team_log2 = lk_cross_entropy_gradient_lanes<T>(&a);
    if (plan.team_log2 < 0) {
        if (a.path == LK_CROSS_ENTROPY_CLUSTER || (a.path == LK_CROSS_ENTROPY_AUTO && few))
            for (cluster = 2; cluster < 8 && (cluster < blocks || a.rows * cluster < 2 * device->sms);) cluster *= 2;
        for (threads = 64; threads < LK_CROSS_ENTROPY_BLOCK_MOST && threads * cluster < lanes;) threads *= 2;
        for (plan.team_log2 = 6; 1 << plan.team_log2 < threads * cluster;) plan.team_log2++;
    }
    const int rows = threads >> plan.team_log2 > 1 ? threads >> plan.team_log2 : 1; /* a block's */
    const int64_t asides = rows * (int64_t)sizeof(lk_ce_gradient_aside);
    const int64_t room = (device->smem > 200 ? 200 : device->smem > 150 ? 150 : 90) * 1024 - asides;
    const int64_t slots = lk_ceil_div(vecs, (int64_t)1 << plan.team_log2), most = room / (threads * 16);
    plan.slots = (int)(slots < most ? slots : most);
    const bool whole = (uintptr_t)a.logits % 16 == 0 && a.vocab % LK_VEC<T> == 0 && a.logits_stride % LK_VEC<T> == 0;
    plan.more = !whole || slots > most || plan.padded_end > a.vocab || plan.ordered;
    bool plain = a.softcap == 0.0f && !(a.class_weight && a.label_smoothing > 0.0f);
    if (!given) plain = a.softcap == 0.0f && a.label_smoothing == 0.0f && !a.argmax && !a.entropy;
    const int64_t bytes = plan.slots * threads * 16 + asides;
    int64_t resident = 227 * 1024 / (bytes + 3 * 1024); /* 3: what is static, and what the system takes of each block */
    if (resident > 5 * LK_CROSS_ENTROPY_BLOCK_MOST / threads) resident = 5 * LK_CROSS_ENTROPY_BLOCK_MOST / threads;
    plan.sms = device->sms, plan.wave = (int)(resident * device->sms);
    plan.stagger = (int)(bytes / LK_CROSS_ENTROPY_STAGGER);
    return lk_launch_pdl(op, device,
                         plain ? lk_cross_entropy_gradient_kernel<T, D, true, given>
                               : lk_cross_entropy_gradient_kernel<T, D, false, given>,
                         lk_ceil_div(a.rows, rows) * cluster, cluster, threads, (size_t)bytes, stream, plan);
}

template <class T, bool given>
LK_HOST lk_status lk_cross_entropy_gradient(const char *op, const lk_device *device, lk_cross_entropy_gradient_plan &plan,
                                            cudaStream_t stream)
{
    if constexpr (sizeof(T) == 4) {
        if (plan.a.dlogits_dtype == LK_DTYPE_F16)
            return lk_cross_entropy_gradient_launch<T, lk_f16, given>(op, device, plan, stream);
        if (plan.a.dlogits_dtype == LK_DTYPE_BF16)
            return lk_cross_entropy_gradient_launch<T, lk_bf16, given>(op, device, plan, stream);
    }
    return lk_cross_entropy_gradient_launch<T, T, given>(op, device, plan, stream);
}

template <class T>
LK_HOST lk_status lk_cross_entropy_backward(const char *op, const lk_cross_entropy_args *args, cudaStream_t stream)
{
    lk_cross_entropy_gradient_plan plan = {};
    lk_cross_entropy_args &a = plan.a;
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    lk_status status = lk_cross_entropy_check<T>(op, args, LK_CE_BACKWARD, error ? 90 : device.arch, &a);
    if (!status) status = lk_asked_device(op, error);
    if (status || a.rows == 0) return status;
    plan.given = a.lse, plan.given_low = a.lse_low;
    plan.valid_rows = a.valid_rows, plan.valid = 1, plan.weight_sum = a.weight_sum;
    return lk_cross_entropy_gradient<T, true>(op, &device, plan, stream);
}

/* For mean the count comes first, since the gradients are divided by it, unless no row can be ignored; where clusters can make
 * it beside few short rows, inside their launch. Who asks for it gets it from the sum then. */
template <class T>
LK_HOST lk_status lk_cross_entropy_forward_backward(const char *op, const lk_cross_entropy_args *args, cudaStream_t stream)
{
    lk_cross_entropy_gradient_plan plan = {};
    lk_cross_entropy_args &a = plan.a;
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    lk_status status = lk_cross_entropy_check<T>(op, args, LK_CE_BOTH, error ? 90 : device.arch, &a);
    if (!status) status = lk_asked_device(op, error);
    if (status) return status;
    const bool mean = a.reduction == LK_REDUCTION_MEAN, reduced = lk_cross_entropy_reduced(&a);
    const bool asked = !reduced && (a.valid_rows || a.weight_sum);
    const bool any = a.use_ignore_index && (a.target_dtype == LK_TARGET_INT64 || a.ignore_index == (int32_t)a.ignore_index);
    const bool known = mean && !any && !a.class_weight;
    plan.valid = known ? a.rows : 1;
    plan.inside = mean && !known && !asked && device.arch >= 90 && !a.class_weight && a.rows <= LK_CROSS_ENTROPY_INSIDE &&
                  lk_cross_entropy_short<T>(&a);
    const bool before = mean && !known && !plan.inside;
    lk_ce_tally *tally = before ? (lk_ce_tally *)a.workspace : NULL;
    const lk_cross_entropy_args given = a;
    if (reduced) plan.terms = lk_cross_entropy_terms(&a);
    if (a.reduction != LK_REDUCTION_NONE) a.loss = a.z_loss_out = NULL;
    if (before || asked) status = lk_cross_entropy_count(op, &device, &given, tally, stream);
    if (tally) plan.valid_rows = &tally->valid_rows, plan.weight_sum = &tally->weight_sum;
    if (!status && a.rows > 0) status = lk_cross_entropy_gradient<T, false>(op, &device, plan, stream);
    if (!status && reduced) status = lk_cross_entropy_sum(op, &device, &given, plan.terms, stream);
    return status;
}

#define LK_DEFINE_CROSS_ENTROPY(T)                                                                                             \
    LK_DECLARE_CROSS_ENTROPY(T)                                                                                                \
    LK_EMIT(cross_entropy, forward, T)                                                                                         \
    LK_EMIT(cross_entropy, backward, T)                                                                                        \
    LK_EMIT(cross_entropy, forward_backward, T)

#else
#define LK_DEFINE_CROSS_ENTROPY(T) LK_NEEDS_NVCC("LK_DEFINE_CROSS_ENTROPY")
#endif /* CUDA or the simulator */
#endif
