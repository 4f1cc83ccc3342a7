// SPDX-License-Identifier: MIT
/* cross_entropy.cuh - cross entropy of rows of logits, forward and backward, with the options that language models use.
 *
 *   z[r,j]     = logit_scale logits[r,j], or with the option softcap: softcap * tanh(logit_scale logits[r,j] / softcap)
 *   lse[r]     = log sum_j exp(z[r,j]),   p[r,j] = exp(z[r,j] - lse[r])
 *   class[r]   = (1 - e) w[y] (lse[r] - z[r,y]) + (e / vocab) (W lse[r] - sum_j w[j] z[r,j])
 *                with y = target[r], e = label_smoothing, w = class_weight (1 without), W = sum_j w[j]
 *                with the option row_weight times row_weight[r]
 *   z_loss[r]  = k lse[r]^2,   k = the option z_loss; likewise times row_weight[r]
 *   entropy[r] = lse[r] - sum_j p[r,j] z[r,j]
 *   with the option statistics, in the rows of `entropy` after the first:
 *              log_sum_sq_probs[r] = log sum_j p[r,j]^2
 *              mean_logits[r]      = sum_j z[r,j] / vocab
 *              top_logprob[r]      = max_j z[r,j] - lse[r],   log p of the argmax
 *   loss       none: class[r] + z_loss[r] for each row
 *              sum:  sum_r (class[r] + z_loss[r])
 *              mean: sum_r class[r] / D + sum_r z_loss[r] / valid_rows
 *                    with valid_rows = the number of rows that are not ignored, weight_sum = the sum of w[target[r]] over those
 *                    of them with a good target, D = weight_sum with class weights, else valid_rows
 *                    with the option denominator both sums are divided by it: D and valid_rows are this number then
 *   backward   f = h = upstream * upstream_value * row_weight[r]; for mean f is divided by D, h by valid_rows
 *              F = f ((1 - e) w[y] + (e / vocab) W),   G = 2 k lse[r] h + dlse[r],   S = sum_{j != y} p[r,j]
 *              dz[j] = (F + G) p[r,j] - f (e / vocab) w[j]                  for j != y
 *              dz[y] = G p[r,y] - F S + f (e / vocab) (W - w[y])            which is G - sum_{j != y} dz[j]; S as 1 - p[r,y]
 *                                                                           where that is above 1/2
 *              with dentropy, to each dz[j]: dentropy[r] p[r,j] (lse[r] - entropy[r] - z[r,j])
 *              dlogits[r,j] = logit_scale dz[j], with a softcap times 1 - (z[r,j] / softcap)^2
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/cross_entropy.cuh"           #include "lk/cross_entropy.cuh"
 *                LK_DEFINE_CROSS_ENTROPY(bf16)             LK_DECLARE_CROSS_ENTROPY(bf16)
 *            T is f32, f16 or bf16; LK_DEFINE_ONLY(CROSS_ENTROPY, forward, bf16) compiles one function alone (lk/README.md).
 *            Then, asynchronously on the caller's stream, in a graph too:
 *                lk_cross_entropy_args args = {};
 *                args.logits = logits, args.target = target, args.rows = rows, args.vocab = vocab;
 *                args.loss = loss, args.lse = lse;
 *                lk_status status = lk_cross_entropy_forward_bf16(&args, stream);
 *                args.dlogits = dlogits;
 *                status = lk_cross_entropy_backward_bf16(&args, stream);    // reads the lse of forward
 *            The mean of all rows: loss and valid_rows are one number each, and a workspace is needed:
 *                args.reduction = LK_REDUCTION_MEAN, args.valid_rows = valid_rows;    // with class_weight weight_sum too
 *                lk_cross_entropy_forward_workspace_bytes_bf16(&args, &args.workspace_bytes);
 *                args.workspace = ...;                                      // that many bytes, aligned to 128
 *            lk_cross_entropy_forward_backward_bf16 computes the loss and dlogits in one call, without lse, valid_rows or
 *            weight_sum. It has a workspace function of its own. A reduced loss takes 128 bytes of workspace and 4 per row, 4
 *            more with z_loss, 4 more with class_weight or weight_sum, rows rounded up to 64; a mean in forward_backward takes
 *            the 128 even without loss, and so does backward with class_weight and label_smoothing. The workspace functions
 *            read shapes, options and which outputs are wanted; logits and target may be NULL there.
 *            In a framework with autograd upstream is known later. Call forward_backward with the expected upstream, NULL for 1.
 *            When upstream is known, correct dlogits in place by lk_rescale_bf16 of lk_scale.cuh: factor is upstream, divisor
 *            the expected one, both in device memory; where they are equal it does nothing. It is for one upstream of all rows, without dlse.
 *            lk_ce_row in lk_loss.cuh is the state of a row (empty, add, merge, finish) for kernels of your own.
 * Needs      lk_base.cuh, lk_check.cuh, lk_loss.cuh, lk_row.cuh, lk_ptx.cuh.
 * Options    Zero is off: a struct with logits, target, rows, vocab and one output computes the plain loss of each row.
 *            Ignored row (use_ignore_index and target = ignore_index): its values are not used and it counts nowhere. Its loss,
 *            z-loss, lse and entropy are 0, argmax is -1, dlogits exactly 0, even where the row or its upstream is NaN.
 *            Bad target (outside [0, vocab), not ignored; so is -100 where use_ignore_index is 0): the call returns LK_OK, and
 *            bad_targets counts the row. Its loss and dlogits are NaN, and so is a reduced loss; lse, z-loss, entropy and
 *            argmax are those of its logits. It counts in valid_rows and adds 0 to weight_sum, which without class weights is
 *            the number of rows with a good target. A masked bad target does no harm: if row_weight is 0, its loss is 0; if f,
 *            dlse and dentropy are all 0, its dlogits are 0. f is 0 if upstream or row_weight is. (In forward_backward NaN and
 *            +inf among its logits still make them NaN.)
 *            zero_padding: the columns behind vocab of each row of dlogits become 0 too.
 *            For an expanded upstream of PyTorch, whose stride is 0, pass one value and upstream_per_row 0. A NULL upstream is
 *            1, not 0; a NULL dlse or dentropy is 0.
 *            upstream_value: a factor that the host knows, 1 / micro_batches for example. It multiplies upstream, and stands
 *            alone where upstream is NULL. 0 means 1; for a gradient of 0 put a 0 into upstream.
 *            accumulate_loss: the call adds loss and z_loss_out to what is in memory. Set both to 0 before the first
 *            micro-batch. All other outputs are overwritten.
 *            Mean over nothing (D is 0, since all rows are ignored or all weights are 0): loss and z-loss are NaN. With
 *            zero_when_empty they are 0, unless a row's loss is NaN. f and h are 0; dlse and dentropy are still added.
 *            denominator: for a mean over several calls (micro-batches, devices), the sum of their valid_rows or weight_sum.
 *            Then the losses of the calls add up to the mean of all; a call without a row to count gives 0. valid_rows and
 *            weight_sum stay the counts of the call; backward does not need them. 0 is a mean over nothing, as above. Any other
 *            number is divided by, NaN and infinities too. Only LK_REDUCTION_MEAN uses it.
 *            dentropy: the gradient of each row's entropy, added like dlse and not divided by D. backward also needs the
 *            entropy of forward, in the field entropy; forward_backward does not.
 *            row_weight: any number, also 0 or negative (an advantage). It scales a row's loss, z-loss and their gradient, not
 *            lse, entropy, argmax, dlse and dentropy. valid_rows and weight_sum stay as they are; for a weighted mean pass the
 *            sum of row_weight as denominator. The weight of an ignored row is not used.
 *            statistics: forward computes three numbers of each row more, in the same pass. entropy is required then, and is
 *            [4, rows]: the entropy, then log_sum_sq_probs, mean_logits and top_logprob. The rules are entropy's: 0 where the
 *            row is ignored, of the row's logits where the target is bad, NaN where entropy is. -inf in a column makes the mean
 *            -inf; in the others it counts 0. They have no gradient: backward and forward_backward refuse the option, and so do
 *            class probabilities and several ids. Ranks have it.
 *            dlogits_dtype LK_DTYPE_E5M2: 8 bits, as matrix products of 8 bits take them, 3 bytes to move for a logit of 16 bits.
 *            Rounded to nearest even, what is larger than 57344 becomes that, also an infinity; NaN stays NaN. What is at most
 *            2^-17 becomes 0. So give upstream a power of two as a factor, and take it out in the product that reads dlogits.
 *            Without z_loss, dlse, dentropy and weights above 1, |dz| is at most f: with f = 2^15 nothing is too large, and p above
 *            2^-32 is kept, while f = 1 loses all p up to 2^-17 (for a mean f is upstream / D; logit_scale is one more factor).
 *            The upstream has to be right in the call, since lk_rescale does not take 8 bits. Not for class probabilities.
 *            batch_invariant: in forward each row's loss, z-loss, lse, entropy, argmax and statistics have the same bits for any
 *            number of rows and at any place among them, if all rows lie alike modulo 16 bytes. The rest of the call has to be the
 *            same: device, vocab, options, outputs. Kernels and teams are those of many rows then, so few long rows take longer. A
 *            reduced loss still depends on all rows. Not for class probabilities and several ids. Ranks have it.
 *            Log-probabilities of the targets: minus the loss, with reduction none and without other options. For a
 *            temperature t pass logit_scale = 1 / t; where there is a softcap divide both, logit_scale / t and softcap / t.
 *            Their gradient is minus upstream, one number per row.
 * See also   cross_entropy_probabilities.cuh    functions for this struct with target_prob, class probabilities instead of target;
 *                                               the functions here refuse it with a sentence that names the right one
 *            cross_entropy_ids.cuh              several weighted ids per row instead of target, and the log-probability of each
 *            cross_entropy_parallel.cuh         columns that are split over ranks (a vocabulary-parallel head)
 *            cross_entropy_ids_parallel.cuh     ids and ranks
 * Repeatable The same bits every time on the same device: fixed order, no float atomics.
 * Source     Label smoothing: Szegedy et al., 2016, as PyTorch has it; z-loss: Chowdhery et al., "PaLM", 2022; softcap: Gemma
 *            2, 2024.
 * Read on    lk/cross_entropy.md: how exact results are, and what is read and written.
 *
 * The kernels, in the order of the file, and when they run unless `path` says otherwise. Plain: without softcap, label_smoothing,
 * entropy and argmax, for gradients without dentropy too. The words (team, share, slot, head, state, reference) are explained in
 * lk/README.md; a rank is a GPU, in kernels also a thread's number in its team.
 *   forward, plain                        up to 16 KiB per row: lk_cross_entropy_forward_warp_kernel, 1 to 32 threads per row
 *                                         longer: lk_cross_entropy_forward_block_kernel, 256 threads, or a cluster of 2 to 8 such
 *                                         blocks where there are fewer rows than two per SM
 *   gradients                             lk_cross_entropy_gradient_kernel: 1 to 32 threads, a block or a cluster per row, which
 *                                         stays in shared memory. Also the columns of a rank or a panel. Rows with
 *                                         label_smoothing that are plain otherwise have a form of their own in forward_backward,
 *                                         LK_CE_SMOOTH; not where dlogits is e5m2
 *   forward with options                  the same kernel, with a ring of 8 vectors per thread through which a row passes: up to
 *                                         32 threads or a block per row, where rows are few a cluster. Also of a rank or a panel
 *   gradients, plain: rows of at most     lk_cross_entropy_short_kernel: 1 to 128 threads per row, which is in registers.
 *   512 vectors of 16 bytes, aligned,     forward_backward also with label_smoothing, without class weights
 *   without single elements and padding,
 *   dlogits of T
 *   backward with class weights and       lk_cross_entropy_weights_kernel before the rows: the sum of the weights
 *   smoothing
 *   a reduced loss                        lk_cross_entropy_sum_kernel, after the rows. lk_cross_entropy_count_kernel runs before
 *                                         the rows of a forward_backward whose mean has ignored or weighted rows, and where
 *                                         counts are wanted without a reduced loss
 * For example, the mean of 4096 rows of 50257 columns in bf16: forward has a block of 256 threads per row, then the sum.
 * forward_backward has a cluster of 2 blocks of 256 threads per row, 13 vectors per thread; backward one of 4 blocks, 7 vectors.
 * Rows with options, where they are many, have more vectors per thread: LK_CROSS_ENTROPY_OPTION_SLOTS.
 * The checks of arguments, the workspace and the calls come last. The mathematics is in lk_loss.cuh.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_CROSS_ENTROPY_CUH
#define LK_CROSS_ENTROPY_CUH

/* Who owns a row; 0 chooses. Every path takes every shape and every option, except as under LK_ERR_PATH. */
enum {
    LK_CROSS_ENTROPY_AUTO = 0,
    LK_CROSS_ENTROPY_WARP = 1,   /* a row by a team of 1 to 32 lanes, or of a few warps, several rows per block */
    LK_CROSS_ENTROPY_BLOCK = 2,  /* a row by a block */
    LK_CROSS_ENTROPY_CLUSTER = 3 /* sm_90 and later: a row by a cluster of blocks */
};

/* Values of `reduction`: PyTorch's numbers. */
enum { LK_REDUCTION_NONE = 0, LK_REDUCTION_MEAN = 1, LK_REDUCTION_SUM = 2 };

/* One struct for the calls: a training step fills it once. F: forward, B: backward, FB: forward_backward. A call ignores
 * the fields that are marked for other calls. An output that is NULL is skipped. */
typedef struct {
    const void *logits;        /* F B FB in        T [rows, vocab] */
    const void *target;        /* F B FB in        target_dtype [rows] */
    const void *target_prob;   /* F B FB in        target_prob_dtype [rows, vocab], instead of target, which is NULL then: of
                                                   cross_entropy_probabilities.cuh alone */
    const float *class_weight; /* F B FB in        f32 [vocab]; NULL means 1 */
    const float *row_weight;   /* F B FB in        f32 [rows], a factor of each row's loss and of its gradient; NULL: 1 */
    const float *upstream;     /* B FB in          f32 [1], or [rows] with upstream_per_row: the gradient of loss; NULL: 1 */
    const float *dlse;         /* B FB in          f32 [rows], a gradient of lse from elsewhere, which is added; NULL: none */
    const float *dentropy;     /* B FB in          f32 [rows], the gradient of entropy, likewise; NULL: none */
    const float *denominator;  /* F B FB in        f32 [1], what a mean divides by instead; NULL: its own counts */
    float *loss;               /* F FB out         f32 [rows], or [1] when reduced */
    float *z_loss_out;         /* F FB out         f32, the part of loss that z_loss adds, shaped as loss */
    float *lse;                /* F FB out, B in   f32 [rows]; B: required */
    float *lse_low;            /* F FB out, B in   f32 [rows], the exact lse minus lse; B: NULL means 0 */
    float *entropy;            /* F FB out, B in   f32 [rows], in nats; F: with statistics [4, rows], required; B: required
                                                   with dentropy */
    int64_t *argmax;           /* F FB out         int64 [rows], the smallest column of the largest logit, NaN above all */
    int64_t *valid_rows;       /* F FB out, B in   int64 [1], the number of rows counted; B: required for mean without
                                                   denominator, with class weights only where z_loss is not 0 */
    float *weight_sum;         /* F FB out, B in   f32 [1], the sum of class_weight[target] over good targets; B: required for
                                                   mean with class weights, without denominator */
    void *dlogits;             /* B FB out         dlogits_dtype [rows, vocab]; may be logits */
    int32_t *bad_targets;      /* F B FB out       int32 [1], zeroed by the caller: each call adds its count */
    void *workspace;           /* F B FB           at least the queried bytes, aligned to 128; NULL where that is 0 */
    size_t workspace_bytes;    /* F B FB */
    int64_t rows;              /* at least 0 */
    int64_t vocab;             /* 1 to 2^30; of a rank: 0 to 2^30 */
    int64_t logits_stride;     /* elements between rows; 0 means packed, vocab. What lies between vocab and it is never read */
    int64_t target_prob_stride; /* of target_prob, likewise */
    int64_t dlogits_stride;    /* B FB: of dlogits, in its own elements; 0 means packed, or where dlogits is logits its rows */
    int64_t ignore_index;      /* with use_ignore_index any value, PyTorch's is -100; without it 0 */
    float logit_scale;         /* 0 to 2^127; 0 means 1 */
    float softcap;             /* 2^-100 to 2^100; logit_scale / softcap too; 0: off */
    float label_smoothing;     /* 0 to 1; 0: off */
    float z_loss;              /* the factor k; finite, at least 0; 0: off */
    float upstream_value;      /* B FB: a factor of upstream, or where that is NULL the gradient of loss itself; 0 means 1, and 0
                                  for ids with dlogp or dtail and without upstream */
    int accumulate_loss;       /* F FB: not 0: loss and z_loss_out are added to what is there */
    int use_ignore_index;      /* not 0: rows with target = ignore_index are ignored */
    int reduction;             /* LK_REDUCTION_* */
    int zero_when_empty;       /* F FB: not 0: a mean over nothing is 0 instead of NaN */
    int upstream_per_row;      /* B FB: not 0: upstream is [rows], packed, with any reduction; 0: one number for all rows */
    int zero_padding;          /* B FB: not 0: columns vocab to dlogits_stride - 1 of every row of dlogits become 0, in place to
                                  logits_stride - 1 */
    int dlogits_dtype;         /* B FB: LK_DTYPE_*; 0: T. Also E5M2, and when T is f32 f16 or bf16: in place then at the start of
                                  each row */
    int target_dtype;          /* LK_TARGET_*; 0: int64 */
    int target_prob_dtype;     /* LK_DTYPE_*: T or f32; 0: T */
    int path;                  /* LK_CROSS_ENTROPY_*; 0 chooses */
    int statistics;            /* F: not 0: entropy, then required, is [4, rows]. See Options */
    int batch_invariant;       /* F: not 0: a row's results do not depend on the other rows. See Options */
} lk_cross_entropy_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md. First of all:
 * target_prob is given to a function that does not take it (LK_ERR_VALUE).
 *   LK_ERR_NULL       logits or target is NULL; B: lse, dlogits, entropy where there is dentropy, or valid_rows or weight_sum
 *                     where mean needs it; FB: dlogits; F: all outputs are, or with statistics entropy is
 *   LK_ERR_SHAPE      rows below 0; vocab below 1 or above 2^30
 *   LK_ERR_VALUE      B FB: statistics, before all others;
 *                     logit_scale, softcap, z_loss or label_smoothing out of range; under a softcap logit_scale / softcap
 *                     outside [2^-100, 2^100]; ignore_index without use_ignore_index; reduction, target_dtype, path: none of
 *                     the enum; dlogits_dtype: neither T nor E5M2 nor 16 bits wide for T = f32, or E5M2 with target_prob
 *   LK_ERR_PATH       CLUSTER in code for less than sm_90; BLOCK, CLUSTER or batch_invariant with more than 2^27 rows
 * Rows of any alignment run at full speed, in B and FB where each row of dlogits has its logits' offset modulo 16 bytes
 * (of other types, as 16-bit dlogits of f32 logits: both at multiples of 16; of e5m2: at as many elements behind one). Otherwise
 * dlogits is written element by element. */

#define LK_CROSS_ENTROPY_FUNCTIONS(X, T)                                                                                       \
    X##_CALL(cross_entropy, forward, LK_FORWARD, T)                                                                            \
    X##_CALL(cross_entropy, backward, LK_BACKWARD, T)                                                                          \
    X##_CALL(cross_entropy, forward_backward, LK_BOTH, T)
#define LK_DECLARE_CROSS_ENTROPY(T) LK_DECLARE(CROSS_ENTROPY, T)
#define LK_DEFINE_CROSS_ENTROPY(T) LK_DEFINE(CROSS_ENTROPY, T)

#if LK_CUDA

#include "lk_check.cuh"
#include "lk_loss.cuh"
#include "lk_row.cuh"

/* ---- What all kernels share ---------------------------------------------------------------------------------------------- */

#define LK_CROSS_ENTROPY_THREADS_LOG2 8
#define LK_CROSS_ENTROPY_THREADS (1 << LK_CROSS_ENTROPY_THREADS_LOG2)

template <class Args> LK_DEVICE int64_t lk_ce_target_at(const Args &a, int64_t row)
{
    return a.target_dtype == LK_TARGET_INT32 ? ((const int32_t *)a.target)[row] : ((const int64_t *)a.target)[row];
}
template <class Args> LK_DEVICE lk_ce_label lk_ce_look_up(const Args &a, int64_t row)
{
    return lk_ce_label_among(a, lk_ce_target_at(a, row), a.vocab);
}

/* The same in two steps, so that code between them does not wait for the target: load its words (0 where there is no such row),
 * then interpret them. */
typedef struct {
    uint32_t low, high;
} lk_ce_word;

template <class Args> LK_DEVICE lk_ce_word lk_ce_load_word(const Args &a, int64_t row)
{
    const uint32_t *target = (const uint32_t *)a.target;
    const bool wide = a.target_dtype == LK_TARGET_INT64;
    lk_ce_word word = {0, 0};
    if (row < a.rows) word.low = target[wide ? 2 * row : row];
    if (row < a.rows && wide) word.high = target[2 * row + 1];
    return word;
}
template <class Args> LK_DEVICE lk_ce_label lk_ce_label_of_word(const Args &a, int64_t row, lk_ce_word word)
{
    if (row >= a.rows) return {-1, false, false};
    const int64_t wide = (int64_t)((uint64_t)word.high << 32 | word.low);
    return lk_ce_label_among(a, a.target_dtype == LK_TARGET_INT64 ? wide : (int64_t)(int32_t)word.low, a.vocab);
}

/* The terms of the rows, which a launch after the rows adds up. Each kind is an array [rows] at a multiple of 128 bytes. An
 * ignored row leaves -0 for its class term, which adds nothing to a sum. No other row leaves -0, so the count of the others is
 * valid_rows. */
typedef struct {
    float *loss;   /* the class terms; NULL: no reduced loss is wanted */
    float *z;      /* the z-losses; NULL without z_loss */
    float *weight; /* w[y], 0 where y is ignored or bad; NULL where their sum is not needed */
} lk_ce_row_losses;
#define LK_CE_IGNORED 0x80000000u /* the bits of -0 */

/* The counts of all rows, where a mean's gradients need them before the rows. The first bytes of the workspace; the rows' terms
 * follow. */
typedef struct alignas(LK_WORKSPACE_ALIGNMENT) {
    int64_t valid_rows;
    float weight_sum; /* where there are class weights */
    float weights;    /* backward: W */
} lk_ce_counts;

/* Whose functions made a call: this header's, or those of cross_entropy_parallel.cuh, _probabilities.cuh or _ids.cuh; ids of
 * ranks are IDS too. */
enum { LK_CE_LABELS, LK_CE_RANKS, LK_CE_PROBABILITIES, LK_CE_IDS };

/* Columns that are one rank's, or one panel's, of all. Zeroed: all columns. */
typedef struct {
    int64_t vocab_start;    /* the first of them */
    int split;              /* not 0: there are others */
    int ranks;
    void *states;           /* [rows]: forward writes those of these columns */
    const void *all_states; /* [ranks][rows]: finish reads them */
    float *others;          /* [rows], sum_{j != y} p[j] over all columns: finish writes it, backward reads it */
} lk_ce_slice;

/* What every kernel gets: the caller's arguments with all defaults filled in, and what the launcher computes from them. */
typedef struct {
    lk_cross_entropy_args a;     /* class_weight begins at the first of these columns */
    lk_ce_row_losses row_losses; /* for a reduced loss */
    const float *loss_weight;    /* a.row_weight; linear_cross_entropy, whose upstream has it already, sets this alone */
    lk_ce_counts *counts;        /* the count is written here too; NULL: to the caller alone */
    const int64_t *valid_rows;   /* gradients of a mean: the number of rows counted; NULL: `valid` */
    int64_t valid;               /* forward with statistics: elements between the rows of entropy */
    const float *over;           /* gradients of a mean: the divisor of class terms, weight_sum or denominator; NULL: the count */
    const float *weight_total;   /* backward with class weights and smoothing: W; else NULL */
    int64_t padded_end;          /* columns vocab to padded_end - 1 of dlogits become 0 */
    int team_log2;               /* a row has 1 << team_log2 threads: up to 32, short ones up to 128; or a block, or a cluster */
    int slots;                   /* per thread */
    int wave;                    /* about so many blocks run at once */
    int has_rest;                /* not 0: rows may have single elements, vectors without a slot or padding, or `ordered` */
    int ordered;                 /* not 0: narrower dlogits in place of logits, so a step reads all before it writes */
    int64_t classes;             /* the columns of all ranks or panels; else a.vocab */
    int state_bytes;             /* with ranks or panels, forward: of a row's packed state; else 0, or not used */
    int adds_state;              /* not 0: states are merged into those that are there, of linear_cross_entropy's panels before */
    float share;                 /* gradients, and with target_prob: label_smoothing / classes */
    float confidence;            /* with target_prob: 1 - label_smoothing */
    const float *weights;        /* the class weights of all columns */
    lk_ce_slice slice;
} lk_cross_entropy_call;

/* Whether a reduced loss is wanted; and whether max and sum of a row are enough for what forward gives. */
LK_HOST bool lk_cross_entropy_reduced(const lk_cross_entropy_args *a)
{
    return a->reduction != LK_REDUCTION_NONE && (a->loss || a->z_loss_out);
}
LK_HOST bool lk_cross_entropy_sums_weights(const lk_cross_entropy_args *a) /* backward needs W */
{
    return a->class_weight && a->label_smoothing > 0.0f;
}
LK_HOST bool lk_cross_entropy_is_plain(const lk_cross_entropy_args *a)
{
    return a->softcap == 0.0f && a->label_smoothing == 0.0f && !a->argmax && !a->entropy;
}
LK_HOST bool lk_cross_entropy_is_smooth(const lk_cross_entropy_args *a) /* gradients: plain, or with smoothing of equal weights */
{
    return a->softcap == 0.0f && !a->argmax && !a->entropy && !a->dentropy && !lk_cross_entropy_sums_weights(a);
}

/* Prefetches a row's target into the L2. */
template <class Args> LK_DEVICE void lk_ce_prefetch_target(const Args &a, int64_t row)
{
    lk_prefetch_l2((const char *)a.target + row * (a.target_dtype == LK_TARGET_INT64 ? 8 : 4));
}

/* Writes a row's results, its terms instead of its losses where a reduced loss is wanted. One thread of the row calls it.
 * weight: w[y]; all: entropy and argmax too; smooths, below: the smoothed loss. */
template <bool all>
LK_DEVICE void lk_ce_put_result(const lk_cross_entropy_call &call, int64_t row, lk_ce_label label, float weight, lk_ce_result r)
{
    const lk_cross_entropy_args &a = call.a;
    if (a.lse) a.lse[row] = r.lse;
    if (a.lse_low) a.lse_low[row] = r.lse_low;
    if (all && a.entropy) a.entropy[row] = r.entropy;
    if (all && a.argmax) a.argmax[row] = r.argmax;
    if (call.loss_weight && label.counted) {
        const float by = call.loss_weight[row];
        r.class_loss = label.bad && by == 0.0f ? 0.0f : by * r.class_loss, r.z_loss *= by;
    }
    if (!call.row_losses.loss) {
        float loss = r.class_loss + r.z_loss;
        if (a.accumulate_loss) {
            if (a.loss) loss += a.loss[row];
            if (a.z_loss_out) r.z_loss += a.z_loss_out[row];
        }
        if (a.loss) a.loss[row] = loss;
        if (a.z_loss_out) a.z_loss_out[row] = r.z_loss;
        return;
    }
    call.row_losses.loss[row] = !label.counted ? __uint_as_float(LK_CE_IGNORED) : r.class_loss == 0.0f ? 0.0f : r.class_loss;
    if (call.row_losses.z) call.row_losses.z[row] = r.z_loss;
    if (call.row_losses.weight) call.row_losses.weight[row] = label.counted && !label.bad ? weight : 0.0f;
}

/* Writes a row's statistics behind its entropy; stride: elements between them. */
LK_DEVICE void lk_ce_put_statistics(float *entropy, int64_t stride, int64_t row, lk_ce_statistics r)
{
    entropy[stride + row] = r.log_sum_sq_probs;
    entropy[2 * stride + row] = r.mean_logits;
    entropy[3 * stride + row] = r.top_logprob;
}

/* The same from the row's state. */
template <bool all, bool smooths = all, class State>
LK_DEVICE void lk_ce_put(const lk_cross_entropy_call &call, int64_t row, lk_ce_label label, float weight, State s)
{
    const lk_cross_entropy_args &a = call.a;
    const lk_ce_options options = {a.softcap > 0.0f ? 1.0f : a.logit_scale, a.label_smoothing, a.z_loss, weight, a.vocab};
    lk_ce_result r = {0.0f, 0.0f, 0.0f, 0.0f, -1, 0.0f};
    if (label.counted) r = lk_ce_row_finish<all, smooths>(s, options);
    if (label.bad) r.class_loss = NAN;
    if (label.bad && a.bad_targets) atomicAdd(a.bad_targets, 1);
    lk_ce_put_result<all>(call, row, label, weight, r);
    if constexpr (lk_ce_has_squares<State>)
        lk_ce_put_statistics(a.entropy, call.valid, row, label.counted ? lk_ce_row_statistics(s, options) : lk_ce_statistics{});
}

/* ---- Forward of plain rows ----------------------------------------------------------------------------------------------- */

/* Of plain rows: loss, z-loss, lse and lse_low only, without smoothing and softcap. All others take the gradients' kernel,
 * which then has a ring of vectors and writes no gradient. Plain rows are read as by lk_row_of and lk_lse_read, but with
 * functions of their own: forward was slower with those (bench/results/choices/cross_entropy.md). */

/* The share of thread `rank` in a row that 1 << size_log2 threads read together: `count` vectors, the first at `first` and then
 * every size-th; and the single elements rank, rank + size, ... of both ends. All zero: nothing. */
template <class T> struct lk_ce_plain_share {
    const T *row, *first;
    lk_split split;
    int count;
};

template <class T> LK_DEVICE lk_ce_plain_share<T> lk_ce_plain_aim(const T *row, lk_split split, int rank, int size_log2)
{
    const int left = (int)split.vecs & ((1 << size_log2) - 1);
    return {row, row + split.head + rank * LK_VEC<T>, split, (int)(split.vecs >> size_log2) + (rank < left)};
}

/* Loads the first Vecs vectors of a share. */
template <class T, int Vecs> LK_DEVICE void lk_ce_plain_start(lk_vec<T> (&raw)[Vecs], lk_ce_plain_share<T> share, int size_log2)
{
    const int64_t step = (int64_t)LK_VEC<T> << size_log2;
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u < share.count) raw[u] = lk_load_vec(share.first + u * step);
    }
}

/* Prefetches the first n vectors of a share into the L2, before loads are allowed. */
template <int n, class T> LK_DEVICE void lk_ce_plain_prefetch(lk_ce_plain_share<T> share, int size_log2)
{
    LK_UNROLL for (int u = 0; u < n; u++)
        if (u < share.count) lk_prefetch_l2(share.first + u * ((int64_t)LK_VEC<T> << size_log2));
}

/* The state of the shares of `team` lanes, as lk_lse_read computes it; raw: from lk_ce_plain_start. The state's values are x:
 * lk_lse's functions are given the scale, which is positive.
 * Called by: all 32 lanes of a warp; a team without a row passes an empty share and row = false. Result: in every lane of a
 * team with a row. */
template <class T, int Vecs>
LK_DEVICE lk_lse lk_ce_plain_read(lk_vec<T> (&raw)[Vecs], lk_ce_plain_share<T> share, float scale, int rank, int size_log2,
                                  int team, bool row = true)
{
    const int64_t step = (int64_t)LK_VEC<T> << size_log2;
    const float rate = scale * LK_LOG2E;
    const bool edge = rank < share.split.edge;
    float single[1] = {-INFINITY};
    if (edge) single[0] = lk_to_float(share.row[lk_edge_col<T>(share.split, rank)]);

    float x[LK_VEC<T>], reference = share.count > 0 && sizeof(T) != 4 ? -INFINITY : single[0];
    lk_unpack(x, raw[0]);
    LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++)
        if (share.count > 0) reference = fmaxf(reference, x[j]);
    reference = lk_max_warp(reference, team);
    float base = rate * reference;
    float sum = 0.0f, lost = 0.0f, part = edge ? lk_ex2(fmaf(rate, single[0], -base)) : 0.0f;
    const T *next = share.first + Vecs * step;
    int left = share.count;
    while (left > Vecs) {
        for (const int stop = left > 17 * Vecs ? left - 16 * Vecs : Vecs; left > stop; left -= Vecs) {
            LK_UNROLL for (int u = 0; u < Vecs; u++, next += step) {
                const float by = lk_lse_follow(raw[u], rate, &reference, &base);
                if (by != 1.0f) sum *= by, lost *= by, part *= by;
                part += lk_lse_terms(raw[u], rate, base);
                if (Vecs + u < left) raw[u] = lk_load_vec(next);
            }
        }
        part -= lost; /* Kahan's sum, every 16 rounds: it keeps what the additions of a long row round off */
        const float grown = sum + part;
        lost = (grown - sum) - part;
        sum = grown, part = 0.0f;
    }
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u >= left) continue;
        const float by = lk_lse_follow(raw[u], rate, &reference, &base);
        if (by != 1.0f) sum *= by, lost *= by, part *= by;
        part += lk_lse_terms(raw[u], rate, base);
    }
    sum += part - lost;
    for (int i = rank + (1 << size_log2); i < share.split.edge; i += 1 << size_log2) { /* more single elements than threads */
        const float one[1] = {lk_to_float(share.row[lk_edge_col<T>(share.split, i)])};
        sum *= lk_lse_follow<T>(one, rate, &reference, &base);
        sum += lk_ex2(fmaf(rate, one[0], -base));
    }

    const bool fast = (fabsf(base) < LK_LSE_BASE && sum < LK_LSE_LIMIT) || !row;
    if (__all_sync(0xffffffffu, fast)) { /* base is rounded; the sum is corrected for it */
        const float correction = lk_ex2(-fmaf(rate, reference, -base));
        if (sizeof(T) == 4) return lk_lse_warp({reference, sum * correction}, team, scale);
        return {reference, lk_sum_warp(sum, team) * correction};
    }
    lk_lse s = lk_lse_read_slowly<true>(share.first, share.count, step, scale);
    for (int i = rank; i < share.split.edge; i += 1 << size_log2) {
        single[0] = lk_to_float(share.row[lk_edge_col<T>(share.split, i)]);
        s = lk_lse_add(s, single, scale);
    }
    return lk_lse_warp(s, team, scale);
}

/* For the thread that writes a row's results alone: its label, and the target's logit and class weight. */
template <class T> struct lk_ce_target {
    lk_ce_label label;
    float weight;
    T logit; /* undefined where there is no target */
};

/* Writes the results of a plain row; one thread of it calls it. s has max = v: see lk_ce_row. */
template <class T>
LK_DEVICE void lk_ce_put_plain(const lk_cross_entropy_call &call, int64_t row, const lk_ce_target<T> &target, lk_lse s)
{
    lk_ce_row state = lk_ce_row_empty();
    state.max = s.max, state.sum = s.sum;
    if (target.label.y >= 0) state.target = lk_to_float(target.logit);
    lk_ce_put<false>(call, row, target.label, target.weight, state);
}

/* An ignored row is not read, so rows wait for their targets first. Until then, and while the previous kernel ends, targets and
 * a thread's first vectors are prefetched into the L2. More than that is slower: whole rows, or, except in clusters, an early
 * start of the next kernel. Ignored rows pay for their prefetched vectors; a prefetch by the first wave of blocks alone would
 * cost all others more.
 *
 * A team of up to 32 lanes owns a plain row. The first threads of a block compute the results of all its rows, one row per
 * thread: that work then costs one warp, not every warp. Small blocks are faster. */
#define LK_CROSS_ENTROPY_WARP_THREADS 128
#define LK_CROSS_ENTROPY_WARP_BLOCKS (LK_ARCH >= 1200 ? 6 : 8) /* per SM: as many as registers allow without spills */
template <class T, int Vecs>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_WARP_THREADS, LK_CROSS_ENTROPY_WARP_BLOCKS)
    lk_cross_entropy_forward_warp_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    /* Vecs = 4 is for rows of more than 2048 bytes, which have whole warps. */
    const int team_log2 = Vecs == 2 ? call.team_log2 : 5, rank = threadIdx.x & ((1 << team_log2) - 1);
    const int rows = LK_CROSS_ENTROPY_WARP_THREADS >> team_log2; /* of the block */
    const int64_t first = (int64_t)blockIdx.x * rows, row = first + (threadIdx.x >> team_log2), result = first + threadIdx.x;
    const lk_cross_entropy_args &a = call.a;
    const bool writes = (int)threadIdx.x < rows && result < a.rows;
    LK_SHARED(lk_lse, states, [LK_CROSS_ENTROPY_WARP_THREADS]); /* of the rows */
    lk_ce_plain_share<T> share = {};
    if (row < a.rows) { /* lanes without a row take part in the warp's reduction */
        const T *logits = (const T *)a.logits + row * a.logits_stride;
        share = lk_ce_plain_aim(logits, lk_split_row(logits, a.vocab), rank, team_log2);
    }
    lk_ce_plain_prefetch<Vecs / 2>(share, team_log2);
    if (writes) lk_ce_prefetch_target(a, result);
    lk_griddepcontrol_wait();
    lk_ce_label label = {-1, false, false};
    lk_ce_target<T> target = {};
    if (row < a.rows) label = lk_ce_look_up(a, row);
    if (writes) target.label = lk_ce_look_up(a, result), target.weight = 1.0f;
    if (!label.counted) share.count = share.split.edge = 0;
    lk_vec<T> raw[Vecs];
    lk_ce_plain_start(raw, share, team_log2);
    if (writes && target.label.y >= 0) {
        target.logit = ((const T *)a.logits + result * a.logits_stride)[target.label.y];
        if (a.class_weight) target.weight = a.class_weight[target.label.y];
    }
    const lk_lse s = lk_ce_plain_read(raw, share, a.logit_scale, rank, team_log2, 1 << team_log2, label.counted);
    lk_griddepcontrol_launch_dependents();
    if (rank == 0) states[threadIdx.x >> team_log2] = s;
    __syncthreads(); /* the states are written before they are read */
    if (writes) lk_ce_put_plain(call, result, target, states[threadIdx.x]);
}

/* A cluster of blocks owns a plain row; without clusters, a block. */
template <class T, int Vecs, int Blocks>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_THREADS, Blocks)
    lk_cross_entropy_forward_block_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    const int blocks_log2 = Vecs == 8 ? 0 : 31 - __clz((int)lk_cluster_nctarank());
    const int size_log2 = LK_CROSS_ENTROPY_THREADS_LOG2 + blocks_log2;
    const int rank = (int)(lk_cluster_ctarank() * LK_CROSS_ENTROPY_THREADS + threadIdx.x);
    const int64_t row = blockIdx.x >> blocks_log2; /* Vecs = 8 is for rows of one block */
    const lk_cross_entropy_args &a = call.a;
    const T *logits = (const T *)a.logits + row * a.logits_stride;
    lk_ce_plain_share<T> share = lk_ce_plain_aim(logits, lk_split_row(logits, a.vocab), rank, size_log2);
    LK_SHARED(lk_ce_target<T>, target, [1]); /* of one thread: registers are for loads */
    LK_SHARED(lk_lse_inbox<LK_CROSS_ENTROPY_THREADS>, inbox, [1]);
    lk_vec<T> raw[Vecs];
    lk_inbox_begin<LK_TEAM_ANY>(inbox);
    lk_ce_plain_prefetch<1>(share, size_log2);
    if (rank == 0) lk_ce_prefetch_target(a, row);
    lk_griddepcontrol_wait();
    if (Vecs == 2) lk_griddepcontrol_launch_dependents();
    const lk_ce_label label = lk_ce_look_up(a, row);
    if (!label.counted) share.count = share.split.edge = 0;
    lk_ce_plain_start(raw, share, size_log2);
    T logit = {}; /* the target's; nothing waits for it yet */
    if (rank == 0) {
        target->label = label, target->weight = 1.0f;
        if (label.y >= 0) logit = logits[label.y];
        if (label.y >= 0 && a.class_weight) target->weight = a.class_weight[label.y];
    }
    lk_lse s = lk_ce_plain_read(raw, share, a.logit_scale, rank, size_log2, 32);
    if (Vecs != 2) lk_griddepcontrol_launch_dependents();
    s = lk_lse_team<LK_TEAM_ANY>(inbox, s, a.logit_scale);
    if (rank != 0) return;
    target->logit = logit;
    lk_ce_put_plain(call, row, *target, s);
}

/* The launch of forward's rows that are plain. A row of up to 16 KiB gets lanes of a warp, enough for two vectors each. A
 * longer row gets a block, or where there are few rows a cluster. */
template <class T>
LK_HOST lk_status lk_cross_entropy_plain(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                         cudaStream_t stream)
{
    lk_cross_entropy_args &a = call.a;
    const int64_t bytes = a.vocab * (int64_t)sizeof(T);
    const int64_t rows = lk_team_rows(a.rows, a.batch_invariant);
    const int path = a.path ? a.path : lk_team_path(device, rows, bytes); /* LK_TEAM_* are the numbers of the paths */
    const bool lanes = path == LK_CROSS_ENTROPY_WARP;
    const int cluster = path == LK_CROSS_ENTROPY_CLUSTER ? lk_team_cluster(device, rows) : 1;
    const int threads = lanes ? LK_CROSS_ENTROPY_WARP_THREADS : LK_CROSS_ENTROPY_THREADS, most = lanes ? 32 : cluster * threads;
    const lk_team team = lk_team_of(a.rows, lanes ? lk_ceil_div(a.vocab, 2 * LK_VEC<T>) : most, most, threads);
    call.team_log2 = team.size_log2;
    /* Loads in flight per thread, as LK_LOGSUMEXP_LOADS, and blocks per SM. */
    void (*kernel)(lk_cross_entropy_call) = lk_cross_entropy_forward_block_kernel<T, 8, 4>;
    if (cluster > 1) kernel = lk_cross_entropy_forward_block_kernel<T, 2, 5>;
    else if (lanes && bytes > 2048) kernel = lk_cross_entropy_forward_warp_kernel<T, 4>;
    else if (lanes) kernel = lk_cross_entropy_forward_warp_kernel<T, 2>;
    return lk_launch_pdl(op, device, kernel, team.grid, cluster, threads, 0, stream, call);
}

/* ---- Gradients, and forward with options --------------------------------------------------------------------------------- */

/* One kernel for backward, forward_backward, forward's rows that are not plain, and the columns of a rank. A team of threads
 * owns a row: up to 32 lanes of a warp, a block, or a cluster of blocks. Asynchronous copies bring a row's vectors into shared
 * memory. Each thread copies its own ones into slots of its own, so no barrier is needed, and keeps at most one of the single
 * elements at the row's ends.
 *   forward            sums each vector when it has arrived, and copies another one into its slot; the team exchanges its sums.
 *                      A rank's go into its states. Plain columns of a rank have a slot for each vector, as in forward_backward.
 *   forward_backward   sums the vectors in two halves as they arrive; the team exchanges its sums; gradients: from the slots. A
 *                      capped row (see lk_ce_kind) waits for all of them. In bf16 and e5m2 it leaves codes of its
 *                      gradients there instead of logits. With smoothing alone the second pass also sums the logits, and
 *                      the owner writes the results after it.
 *   backward           has lse, and computes gradients from the vectors as they arrive. It sums the p of all columns but the
 *                      target's; at the end the owner gets that sum and writes the target's gradient.
 * Copies, exponentials and stores overlap because an SM has several rows in different stages. Vectors without a slot, in rows
 * longer than a cluster can hold, are read where they are used: twice in forward_backward. The thread that owns the target's
 * element writes it, after its vector. */
#define LK_CROSS_ENTROPY_FEW_SLOTS 8   /* slots per thread until a row has a whole block; in backward, until it has 8 blocks */
#define LK_CROSS_ENTROPY_MANY_SLOTS 16 /* in forward and forward_backward, slots per thread until a row has 8 blocks */
#define LK_CROSS_ENTROPY_OPTION_SLOTS 20 /* in place of the first where rows have options and are many */
#define LK_CROSS_ENTROPY_RING 8        /* slots per thread of forward with options, which reads a vector once */
#define LK_CROSS_ENTROPY_RING_VECS 32  /* vectors per thread there, in place of the first */
#define LK_CROSS_ENTROPY_BLOCK_MOST 256

/* What a kernel of gradients is for. LK_CE_PLAIN: rows without a softcap, dentropy and class weights under smoothing; in forward and
 * forward_backward also without smoothing, entropy and argmax. LK_CE_SMOOTH: forward_backward of such rows with smoothing.
 * LK_CE_CAPPED: rows of 16-bit logits, with a softcap of up to LK_CE_CAPPED_MOST and nothing else of these; their terms are those
 * of lk_ce_capped. Simple kinds have e alone in their sums, and read the target's logit as -inf for that. */
typedef enum { LK_CE_ANY, LK_CE_CAPPED, LK_CE_PLAIN, LK_CE_SMOOTH } lk_ce_kind;
template <lk_ce_kind kind> constexpr bool lk_ce_is_simple = kind == LK_CE_PLAIN || kind == LK_CE_SMOOTH;

/* Blocks of that size per SM: as many as registers allow without spills. */
#define LK_CROSS_ENTROPY_BLOCKS(kind, direction, ring)                                                                         \
    ((ring) ? 4                                                                                                                \
     : (kind) == LK_CE_PLAIN ? (LK_ARCH >= 1000 ? 4 : 5)                                                                       \
     : (kind) == LK_CE_SMOOTH || ((kind) == LK_CE_CAPPED && (direction) == LK_BACKWARD && LK_ARCH >= 900) ? 4 : 3)

/* lk_split_row in 32 bits. */
template <class T> LK_DEVICE lk_split lk_ce_split(const T *logits, int vocab)
{
    const int past = (int)((uintptr_t)logits / sizeof(T)) & (LK_VEC<T> - 1);
    int head = past ? LK_VEC<T> - past : 0;
    if (head > vocab) head = vocab;
    const int vecs = (int)((unsigned)(vocab - head) / (unsigned)LK_VEC<T>);
    return {head, vocab - vecs * LK_VEC<T>, vecs};
}

/* What a thread reads of a row: single elements `rank`, `rank` + `team`, ... and `count` vectors that are `jump` elements
 * apart. Vectors from call.slots on have no slot. Functions that rarely run compute this again, so that it takes no registers. */
template <class T> struct lk_ce_share {
    const T *logits, *first;
    int head, vecs, edge; /* of the row, as in lk_split */
    int rank, team, count, jump;
};

/* The row of a thread, computed again from %tid.x, so that no register holds it. */
LK_DEVICE int64_t lk_ce_row_of(const lk_cross_entropy_call &call)
{
    return ((int64_t)blockIdx.x * blockDim.x + lk_tid_x()) >> call.team_log2;
}

template <class T> LK_DEVICE lk_ce_share<T> lk_ce_share_of(const lk_cross_entropy_call &call, int64_t row)
{
    lk_ce_share<T> at = {};
    at.team = 1 << call.team_log2;
    at.rank = (int)(blockIdx.x * blockDim.x + lk_tid_x()) & (at.team - 1), at.jump = at.team * LK_VEC<T>;
    at.logits = (const T *)call.a.logits + row * call.a.logits_stride;
    if (row < call.a.rows) { /* threads without a row take part in barriers and sums */
        const lk_split split = lk_ce_split(at.logits, (int)call.a.vocab);
        at.head = split.head, at.vecs = (int)split.vecs, at.edge = split.edge;
    }
    at.count = (at.vecs >> call.team_log2) + (at.rank < (at.vecs & (at.team - 1)));
    at.first = at.logits + at.head + at.rank * LK_VEC<T>;
    return at;
}

/* The column of single element i of a row. */
template <class T> LK_DEVICE int lk_ce_edge_col(const lk_ce_share<T> &at, int i)
{
    return i < at.head ? i : at.vecs * LK_VEC<T> + i;
}

/* The first column of vector u of a share. */
template <class T> LK_DEVICE int lk_ce_share_col(const lk_ce_share<T> &at, int u)
{
    return (int)(at.first - at.logits) + u * at.jump;
}

/* Vector u of a share, from its slot or else from memory, and its first column. */
template <class T> LK_DEVICE lk_vec<T> lk_ce_vec(const lk_ce_share<T> &at, const lk_vec<T> *slot, int slots, int u, int *col)
{
    *col = lk_ce_share_col(at, u);
    return u < slots ? slot[u * (int)blockDim.x] : lk_load_vec(at.logits + *col);
}

/* A rank's kernels number the columns from its first one on. The target's column there; LK_ELSEWHERE: another rank has it, and no
 * column is equal to it. y: the target among the columns of all ranks; what is negative stays as it is. */
LK_DEVICE int lk_ce_local_col(const lk_cross_entropy_call &call, int y)
{
    const unsigned col = (unsigned)y - (unsigned)call.slice.vocab_start;
    return y < 0 ? y : col < (unsigned)call.a.vocab ? (int)col : LK_ELSEWHERE;
}

/* What a thread knows of its row. */
template <class T> struct lk_ce_thread {
    lk_ce_share<T> at;
    int64_t row;
    lk_vec<T> *slot;         /* its first; the next are blockDim.x apart */
    int in_slots, half;      /* slots in use, and how many of them are filled first */
    char *out;               /* the gradients of its first vector */
    lk_ce_target_term *term; /* of the row */
    int y;                   /* lk_ce_local_col; LK_IGNORED: no target, or there is no row; LK_BAD. In a row whose
                              * gradient is NaN it becomes LK_IGNORED. A label would take three registers */
    bool read, owner;        /* the row's logits are used; this thread has the target's element, or is rank 0 without a target */
    int source;              /* the owner's rank */
    int target;              /* where the target's logit is in the owner's slots, in elements; -1: not there or not plain */
    float logit, slope;      /* the owner's: the target's logit, -inf without a target; under a softcap z and its slope */
    float single;            /* the first single element; -inf where that is the target or there is none, 0 where the row is
                                not read */
};

/* sum 2^(rate v - base) over the part of a share, in a plain row, that has no slot, except for its first single element and
 * column y. */
template <class T>
LK_DEVICE float lk_ce_reduce_rest(const lk_cross_entropy_call &call, int64_t row, int y, float rate, float base)
{
    const lk_ce_share<T> at = lk_ce_share_of<T>(call, row);
    float sum = 0.0f, lost = 0.0f;
    for (int i = at.rank + at.team; i < at.edge; i += at.team) { /* more single elements than threads */
        const int col = lk_ce_edge_col(at, i);
        if (col != y) sum += lk_ex2(fmaf(rate, lk_to_float(at.logits[col]), -base));
    }
    for (int u = call.slots; u < at.count; u++) {
        const T *next = at.first + (int64_t)u * at.jump;
        const int target_offset = y - (int)(next - at.logits);
        const lk_vec<T> raw = lk_load_vec(next);
        float part = -lost; /* Kahan's sum: these rows are long */
        if ((unsigned)target_offset >= (unsigned)LK_VEC<T>) part += lk_lse_terms(raw, rate, base);
        for (int j = 0; (unsigned)target_offset < (unsigned)LK_VEC<T> && j < LK_VEC<T>; j++)
            if (j != target_offset) part += lk_ex2(fmaf(rate, lk_to_float(next[j]), -base));
        const float total = sum + part;
        lost = (total - sum) - part;
        sum = total;
    }
    return sum;
}

/* The state of a team's shares of a row without the target, column y, which counts only for the argmax; with a running maximum.
 * plain: max and sum alone. */
template <bool plain, class State = lk_ce_row, class T>
LK_DEVICE State lk_ce_reduce_all(const lk_cross_entropy_call &call, int64_t row, const lk_vec<T> *slot, int y, bool read,
                                     float scale)
{
    constexpr bool exact = sizeof(T) == 4;
    const lk_ce_share<T> at = lk_ce_share_of<T>(call, row);
    State s = lk_ce_row_empty<State>();
    lk_cp_async_wait_group<0>();
    for (int u = 0, col; read && u < at.count; u++) {
        float x[LK_VEC<T>];
        lk_unpack(x, lk_ce_vec(at, slot, call.slots, u, &col));
        if ((unsigned)(y - col) >= (unsigned)LK_VEC<T>) {
            s = lk_ce_add<plain, exact>(s, x, col, call.a);
        } else {
            LK_NO_UNROLL
            for (int j = 0; j < LK_VEC<T>; j++)
                s = lk_ce_add_one<plain, exact>(s, lk_to_float(at.logits[col + j]), col + j, y, call.a);
        }
    }
    for (int i = at.rank; read && i < at.edge; i += at.team) {
        const int col = lk_ce_edge_col(at, i);
        s = lk_ce_add_one<plain, exact>(s, lk_to_float(at.logits[col]), col, y, call.a);
    }
    return lk_ce_row_warp<!plain, exact>(s, scale, at.team);
}

/* Adds the vector x of columns col, col + 1, ... of a row. It has the target, column y, which counts only for the argmax. */
template <class T, class State>
LK_DEVICE void lk_ce_tally_target(lk_ce_tally<State> *t, const float (&x)[LK_VEC<T>], const T *logits, int col, int y,
                                  const lk_cross_entropy_args &a)
{
    const float most = lk_ce_most(x);
    if (a.argmax && (t->col < 0 || most > t->most)) t->most = most, t->col = col;
    if (a.argmax && most != most) t->failed = true;
    LK_NO_UNROLL for (int j = col; j < col + LK_VEC<T>; j++) {
        const float one[1] = {lk_to_float(logits[j])};
        if (j != y) lk_ce_tally_add<sizeof(T) == 4>(t, one, j, a);
    }
}

/* Reads a share vector by vector from its slots, a ring that is filled again as it is read. again: from memory. */
template <class T> struct lk_ce_reader {
    const T *next; /* what is to be copied, or with `again` to be read */
    int left, place;
};
template <class T>
LK_DEVICE void lk_ce_read(lk_ce_reader<T> *r, float (&x)[LK_VEC<T>], lk_vec<T> *slot, int jump, bool again)
{
    constexpr int ring = LK_CROSS_ENTROPY_RING;
    const int threads = (int)blockDim.x;
    if (again) {
        lk_unpack(x, lk_load_vec(r->next));
    } else {
        lk_cp_async_wait_group<ring - 1>();
        lk_unpack(x, slot[r->place]);
        if (r->left > ring) lk_cp_async_16(slot, r->place * 16, r->next);
        lk_cp_async_commit_group();
    }
    r->next += jump, r->left--, r->place += threads;
    if (r->place == ring * threads) r->place = 0;
}

/* The state that lk_ce_reduce_all computes, in forward, where slots are a ring; y: -1 where no column is special. The argmax is
 * left at the first column of its vector: see lk_ce_find_argmax. A tally sums most options up. With class weights and smoothing,
 * and where a tally has failed, the state takes the columns itself. */
template <class State, class T>
LK_DEVICE State lk_ce_reduce_ring(const lk_cross_entropy_call &call, const lk_ce_thread<T> &thread, int y, float scale)
{
    constexpr bool exact = sizeof(T) == 4;
    constexpr int Num = LK_VEC<T>, ring = LK_CROSS_ENTROPY_RING;
    const lk_cross_entropy_args &a = call.a;
    const lk_ce_share<T> &at = thread.at;
    const bool tallies = !(a.class_weight && a.label_smoothing > 0.0f);
    const int first = lk_ce_share_col(at, 0), vectors = thread.read ? at.count : 0, edge = thread.read ? at.edge : 0;
    const T *const copied = at.first + (int64_t)ring * at.jump;
    State s = lk_ce_row_empty<State>();
    bool failed = false;
    float x[Num];
    if (tallies) {
        lk_ce_tally<State> t = lk_ce_tally_empty<State>();
        lk_ce_reader<T> r = {copied, vectors, 0};
        lk_cp_async_wait_group<ring - 1>();
        if (vectors > 0) lk_unpack(x, thread.slot[0]);
        float most = vectors > 0 && (unsigned)(y - first) >= (unsigned)Num ? lk_ce_most(x) : -INFINITY, slope;
        if (a.softcap > 0.0f) most = lk_ce_cap(most, a.logit_scale, a.softcap, &slope);
        most = lk_max_warp(most, at.team); /* the lanes agree on a reference; a NaN is seen below */
        if (lk_ce_tally_fits(most, scale * LK_LOG2E)) lk_ce_tally_move<exact>(&t, most, scale * LK_LOG2E);
        for (int col = first; r.left > 0; col += at.jump) {
            lk_ce_read(&r, x, thread.slot, at.jump, false);
            if ((unsigned)(y - col) < (unsigned)Num) lk_ce_tally_target(&t, x, at.logits, col, y, a);
            else lk_ce_tally_add<exact>(&t, x, col, a);
        }
        for (int i = at.rank; i < edge; i += at.team) {
            const int col = lk_ce_edge_col(at, i);
            const float one[1] = {lk_to_float(at.logits[col])};
            if (a.argmax) s = lk_ce_row_top(s, one[0], col);
            if (col != y) lk_ce_tally_add<exact>(&t, one, col, a);
        }
        failed = t.failed;
        const int64_t top = s.top;
        const float peak = lk_max_warp(t.peak, at.team);
        if (!failed) s = lk_ce_tally_state<exact>(t, peak, scale);
        if (top > s.top) s.top = top;
    }
    if (!tallies || failed) {
        lk_ce_reader<T> r = {failed ? at.first : copied, vectors, 0};
        s = lk_ce_row_empty<State>();
        for (int col = first; r.left > 0; col += at.jump) {
            lk_ce_read(&r, x, thread.slot, at.jump, failed);
            if ((unsigned)(y - col) >= (unsigned)Num) {
                s = lk_ce_add<false, exact>(s, x, col, a);
            } else {
                LK_NO_UNROLL
                for (int j = col; j < col + Num; j++) s = lk_ce_add_one<false, exact>(s, lk_to_float(at.logits[j]), j, y, a);
            }
        }
        for (int i = at.rank; i < edge; i += at.team) {
            const int col = lk_ce_edge_col(at, i);
            s = lk_ce_add_one<false, exact>(s, lk_to_float(at.logits[col]), col, y, a);
        }
    }
    return lk_ce_row_warp<true, exact>(s, scale, at.team);
}

/* The argmax of a row whose state has the first column of its vector; one thread calls it. */
template <class T> LK_DEVICE int64_t lk_ce_find_argmax(const lk_ce_share<T> &at, int64_t top)
{
    const int inner = lk_ce_top_col(top) - at.head;
    if (top == INT64_MIN || inner < 0 || inner >= at.vecs * LK_VEC<T>) return top; /* of a single element */
    const int col = at.head + inner / LK_VEC<T> * LK_VEC<T>;
    float x[LK_VEC<T>];
    lk_unpack(x, lk_load_vec(at.logits + col));
    return lk_ce_add_top(lk_ce_row_empty(), x, col).top;
}

/* sum and the terms of a thread's slots from `from` on, against base; follows: the reference follows them. */
template <bool follows, class T>
LK_DEVICE float lk_ce_add_slots(const lk_vec<T> *slot, int from, int end, int step, float rate, float sum, float *reference,
                                float *base)
{
    const lk_vec<T> *next = slot + from * step;
    LK_UNROLL_BY(4) for (int u = from; u < end; u++, next += step) {
        if constexpr (follows) sum *= lk_lse_follow(*next, rate, reference, base);
        sum += lk_lse_terms(*next, rate, *base);
    }
    return sum;
}

/* The state of a warp's part of a plain row without the target; the empty state of a row that is not read. Its max is the
 * reference: the largest of the lanes' first vectors and single elements. Teams smaller than a warp each get their own state.
 * Called by: all lanes of a warp. As lk_ce_plain_read otherwise. */
template <class T> LK_DEVICE lk_ce_row lk_ce_reduce(const lk_cross_entropy_call &call, const lk_ce_thread<T> &t)
{
    const int threads = (int)blockDim.x, team = 1 << call.team_log2, target = t.target;
    const int in_slots = t.read ? t.in_slots : 0, halfway = t.read ? t.half : 0;
    const float rate = call.a.logit_scale * LK_LOG2E, single = t.read ? t.single : -INFINITY;
    const bool has_rest = t.at.count > call.slots || t.at.edge > team;
    lk_vec<T> *const slot = t.slot;
    lk_cp_async_wait_group<1>();
    if ((unsigned)target < (unsigned)LK_VEC<T>) lk_put((T *)slot + target, -INFINITY);
    float reference = single; /* without the target: were it far above, the others' sums would be 0 */
    if (in_slots > 0) {
        float v[LK_VEC<T>];
        lk_unpack(v, slot[0]);
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) reference = fmaxf(reference, v[j]);
    }
    reference = lk_max_warp(reference, team);
    float base = rate * reference;
    float sum = single == -INFINITY ? 0.0f : lk_ex2(fmaf(rate, single, -base));
    if (t.read && has_rest) sum += lk_ce_reduce_rest<T>(call, t.row, t.y, rate, base);
    if (target >= 0) { /* this lane waits for both groups */
        lk_cp_async_wait_group<0>();
        lk_put((T *)slot + target, -INFINITY);
    }
    /* dlogits of fewer bits do not show the digits that a reference that follows saves, and heads have many such rows. */
    const bool follows = sizeof(T) == 4 && (call.a.dlogits_dtype == LK_DTYPE_T || call.a.dlogits_dtype == LK_DTYPE_F32);
    if (follows) sum = lk_ce_add_slots<true>(slot, 0, halfway, threads, rate, sum, &reference, &base);
    else sum = lk_ce_add_slots<false>(slot, 0, halfway, threads, rate, sum, &reference, &base);
    lk_cp_async_wait_group<0>();
    if (follows) sum = lk_ce_add_slots<true>(slot, halfway, in_slots, threads, rate, sum, &reference, &base);
    else sum = lk_ce_add_slots<false>(slot, halfway, in_slots, threads, rate, sum, &reference, &base);
    const bool fast = fabsf(base) < LK_LSE_BASE && sum < LK_LSE_LIMIT;
    if (__all_sync(0xffffffffu, fast || !t.read)) {
        lk_ce_row s = lk_ce_row_empty();
        s.max = reference; /* base differs from rate reference by a rounding error, which is known exactly */
        s.sum = (follows ? sum : lk_sum_warp(sum, team)) * lk_ex2(-fmaf(rate, reference, -base));
        if (follows) s = lk_ce_row_warp<false, true>(s, call.a.logit_scale, team);
        return s;
    }
    return lk_ce_reduce_all<true>(call, t.row, slot, t.y, t.read, call.a.logit_scale);
}

/* Whether forward_backward keeps codes of its logits (see lk_ce_encode): gradients in f16 have more bits. */
template <class T, bool eight> constexpr bool lk_ce_keeps_codes = eight || lk_dtype<T> == LK_DTYPE_BF16;

/* Adds the terms of eight columns, except that of column `offset` of them; it may lie elsewhere. */
LK_DEVICE void lk_ce_add_terms(float (&sum)[2], float (&e)[8], int offset)
{
    if ((unsigned)offset < 8u) {
        LK_UNROLL for (int j = 0; j < 8; j++) e[j] = j == offset ? 0.0f : e[j];
    }
    LK_UNROLL for (int j = 0; j < 8; j++) sum[j % 2] += e[j];
}

/* The state of a warp's part of a capped row; sum: of a thread's terms. */
template <class T> LK_DEVICE lk_ce_row lk_ce_capped_state(const lk_cross_entropy_call &call, const lk_ce_thread<T> &t, float sum)
{
    lk_ce_row s = lk_ce_row_empty();
    sum = lk_sum_warp(sum, t.at.team);
    if (t.read && t.at.vecs + t.at.edge > 0) s.max = call.a.softcap, s.sum = sum;
    return s;
}

/* Adds the terms of a share of a capped row from vector u on, and those of its single elements. */
template <class T>
LK_DEVICE void lk_ce_reduce_capped_rest(const lk_cross_entropy_call &call, int64_t row, int u, int y, const lk_ce_capped &c,
                                        float (&sum)[2])
{
    const lk_ce_share<T> at = lk_ce_share_of<T>(call, row);
    for (; u < at.count; u++) {
        const int col = lk_ce_share_col(at, u);
        float x[8], e[8], none[8];
        lk_unpack(x, lk_load_vec(at.logits + col));
        lk_ce_capped_terms<false>(c, x, e, none);
        lk_ce_add_terms(sum, e, y - col);
    }
    for (int i = at.rank; i < at.edge; i += at.team) {
        const int col = lk_ce_edge_col(at, i);
        if (col != y) sum[0] += lk_ce_capped_term(c, lk_to_float(at.logits[col]));
    }
}

/* The state of a capped row without the target, column y, in forward, where slots are a ring; y: -1 where no column is special. */
template <class T>
LK_DEVICE lk_ce_row lk_ce_reduce_capped_ring(const lk_cross_entropy_call &call, const lk_ce_thread<T> &t, int y)
{
    const lk_cross_entropy_args &a = call.a;
    const lk_ce_capped c = lk_ce_capped_of(a.logit_scale, a.softcap);
    lk_ce_reader<T> r = {t.at.first + (int64_t)LK_CROSS_ENTROPY_RING * t.at.jump, t.read ? t.at.count : 0, 0};
    float sum[2] = {0.0f, 0.0f};
    for (int offset = y - lk_ce_share_col(t.at, 0); r.left > 0; offset -= t.at.jump) {
        float x[8], e[8], none[8];
        lk_ce_read(&r, x, t.slot, t.at.jump, false);
        lk_ce_capped_terms<false>(c, x, e, none);
        lk_ce_add_terms(sum, e, offset);
    }
    if (t.read && t.at.edge > 0) lk_ce_reduce_capped_rest<T>(call, t.row, t.at.count, y, c, sum);
    return lk_ce_capped_state(call, t, sum[0] + sum[1]);
}

/* The same in forward_backward. Puts codes into the slots where they are kept. */
template <bool eight, class T> LK_DEVICE lk_ce_row lk_ce_reduce_capped(const lk_cross_entropy_call &call, const lk_ce_thread<T> &t)
{
    constexpr bool keeps = lk_ce_keeps_codes<T, eight>;
    const int threads = (int)blockDim.x, in_slots = t.read ? t.in_slots : 0;
    const lk_ce_capped c = lk_ce_capped_of(call.a.logit_scale, call.a.softcap);
    lk_vec<T> *slot = t.slot;
    float sum[2] = {0.0f, 0.0f};
    lk_cp_async_wait_group<0>();
    int offset = t.y - lk_ce_share_col(t.at, 0); /* of the target in a vector */
    for (int u = 0; u < in_slots; u++, slot += threads, offset -= t.at.jump) {
        float x[8], e[8], w[8];
        lk_unpack(x, *slot);
        lk_ce_capped_terms<keeps>(c, x, e, w);
        if (keeps) slot->raw = lk_ce_encode<eight>(w);
        lk_ce_add_terms(sum, e, offset);
    }
    if (t.read && call.has_rest) lk_ce_reduce_capped_rest<T>(call, t.row, call.slots, t.y, c, sum);
    return lk_ce_capped_state(call, t, sum[0] + sum[1]);
}

/* A barrier of the threads of a row. */
LK_DEVICE void lk_ce_sync(int team)
{
    if (team <= 32) __syncwarp();
    else if (lk_cluster_nctarank() > 1) lk_cluster_sync(); /* orders what the caller says */
    else __syncthreads();                                  /* likewise */
}

/* Exchange between the warps of a row, in words of 8 bytes. In a cluster they are sent by st.async: unlike at a cluster's
 * barrier, the sender does not wait until its stores are done. Every thread calls lk_ce_inbox_begin before lk_cluster_begin().
 * A sender has called lk_cluster_ready(). A block that reads says once how many words it expects. */
typedef struct {
    lk_mbarrier full;                                    /* all words are there */
    uint64_t word[8 * LK_CROSS_ENTROPY_BLOCK_MOST / 32]; /* one from each warp of the row */
    uint64_t logit;                                      /* the target's */
} lk_ce_inbox;

LK_DEVICE void lk_ce_inbox_begin(lk_ce_inbox *inbox)
{
    if (lk_cluster_nctarank() > 1 && threadIdx.x == 0) {
        lk_mbarrier_init(&inbox->full, 1);
        lk_fence_mbarrier_init();
    }
}

LK_DEVICE void lk_ce_inbox_expect(lk_ce_inbox *inbox, int words)
{
    if (lk_cluster_nctarank() > 1) lk_mbarrier_arrive_expect_tx(&inbox->full, 8 * (unsigned)words);
}

LK_DEVICE void lk_ce_inbox_send(lk_ce_inbox *inbox, uint64_t *to, float low, float high, int peer)
{
    const uint64_t value = (uint64_t)__float_as_uint(high) << 32 | __float_as_uint(low);
    if (lk_cluster_nctarank() > 1) lk_st_async_b64(lk_mapa_shared(to, peer), value, lk_mapa_shared(&inbox->full, peer));
    else *to = value;
}

/* From the state of a warp to that of the row, for every thread; *logit becomes the target's logit, which the owner has.
 * source: the owner's rank. all: as in lk_ce_row_warp, by a barrier then. */
template <bool all, bool exact, class State>
LK_DEVICE State lk_ce_exchange(lk_ce_inbox *inbox, State s, float scale, int team, int source, bool owner, float *logit)
{
    const int blocks = (int)lk_cluster_nctarank(), lane = (int)threadIdx.x % 32;
    const int warp = (int)(lk_cluster_ctarank() * blockDim.x + threadIdx.x) / 32;
    if (team <= 32) {
        *logit = __shfl_sync(0xffffffffu, *logit, (lane & ~(team - 1)) + source);
        return s;
    }
    State sum = lk_ce_row_empty<State>();
    if (threadIdx.x == 0) lk_ce_inbox_expect(inbox, all ? 1 : team / 32 + 1);
    for (int peer = 0; owner && peer < blocks; peer++) lk_ce_inbox_send(inbox, &inbox->logit, *logit, 0.0f, peer);
    if constexpr (all) {
        LK_SHARED(State, states, [8 * LK_CROSS_ENTROPY_BLOCK_MOST / 32]);
        if (lane < blocks) *(blocks > 1 ? (State *)lk_mapa(states + warp, (unsigned)lane) : states + warp) = s;
        lk_ce_sync(team); /* orders the writes of states before their reads */
        if (blocks > 1) lk_mbarrier_wait_parity_cluster(&inbox->full, 0);
        for (int i = lane; i < team / 32; i += 32) sum = lk_ce_row_merge<exact>(sum, states[i], scale);
    } else {
        if (lane < blocks) lk_ce_inbox_send(inbox, inbox->word + warp, s.max, s.sum, lane);
        if (blocks > 1) lk_mbarrier_wait_parity_cluster(&inbox->full, 0);
        else __syncthreads(); /* orders the writes of the words before their reads */
        for (int i = lane; i < team / 32; i += 32) {
            s.max = __uint_as_float((uint32_t)inbox->word[i]), s.sum = __uint_as_float((uint32_t)(inbox->word[i] >> 32));
            sum = lk_ce_row_merge<exact>(sum, s, scale);
        }
    }
    *logit = __uint_as_float((uint32_t)inbox->logit);
    return lk_ce_row_warp<all, exact>(sum, scale);
}

/* The sum of x over the threads of a row, for the lanes of the owner's warp. In a cluster no other warp waits, and other blocks
 * may end; in one block all warps meet at a barrier. */
LK_DEVICE float lk_ce_sum_for_owner(lk_ce_inbox *inbox, float x, int team, int source)
{
    if (team <= 32) return lk_sum_warp(x, team);
    const int blocks = (int)lk_cluster_nctarank(), lane = (int)threadIdx.x % 32;
    const int warp = (int)(lk_cluster_ctarank() * blockDim.x + threadIdx.x) / 32;
    x = lk_sum_warp(x);
    if (lane == 0) lk_ce_inbox_send(inbox, inbox->word + warp, x, 0.0f, source / (int)blockDim.x);
    if (blocks == 1) __syncthreads(); /* orders the writes of the words before their reads */
    if (warp != source / 32) return 0.0f;
    if (lane == 0) lk_ce_inbox_expect(inbox, team / 32);
    if (blocks > 1) lk_mbarrier_wait_parity_cluster(&inbox->full, 0);
    x = 0.0f;
    for (int i = lane; i < team / 32; i += 32) x += __uint_as_float((uint32_t)inbox->word[i]);
    return lk_sum_warp(x);
}

/* What a row's gradient loads besides logits, target and class weight. f: upstream row_weight; over, valid: as in the call. */
typedef struct {
    float f, dlse, lse, lse_low, over;
    int64_t valid;
} lk_ce_loads;

/* wanted: false loads nothing. Short rows call this early and lk_ce_upstream_of late: nothing waits for the loads between. */
template <bool backward> LK_DEVICE lk_ce_loads lk_ce_load(const lk_cross_entropy_call &call, int64_t row, bool wanted)
{
    const lk_cross_entropy_args &a = call.a;
    lk_ce_loads in = {1.0f, 0.0f, 0.0f, 0.0f, 1.0f, call.valid};
    if (!wanted) return in;
    if (backward) in.lse = a.lse[row];
    if (backward && a.lse_low) in.lse_low = a.lse_low[row];
    if (a.upstream) in.f = a.upstream[a.upstream_per_row ? row : 0]; /* upstream_value waits for it: later */
    if (a.row_weight) in.f *= a.row_weight[row];
    if (a.dlse) in.dlse = a.dlse[row];
    if (a.reduction == LK_REDUCTION_MEAN && call.valid_rows) in.valid = *call.valid_rows;
    if (a.reduction == LK_REDUCTION_MEAN && call.over) in.over = *call.over;
    return in;
}

/* The upstreams of a row, divided for a mean; dlse is not. weight: w[y]. */
LK_DEVICE lk_ce_upstream lk_ce_upstream_of(const lk_cross_entropy_call &call, lk_ce_loads in, float weight)
{
    const float f = call.a.upstream_value * in.f;
    lk_ce_upstream up = {f, f, in.dlse, in.lse, in.lse_low, weight, 0.0f};
    if (call.a.reduction == LK_REDUCTION_MEAN) {
        const float valid = (float)in.valid, over = call.over ? in.over : valid;
        up.f = over != 0.0f ? __fdiv_rn(up.f, over) : 0.0f;
        up.h = over != 0.0f ? __fdiv_rn(up.h, call.a.denominator ? over : valid) : 0.0f;
    }
    return up;
}

template <bool backward, bool may_bend = true>
LK_DEVICE lk_ce_upstream lk_ce_load_upstream(const lk_cross_entropy_call &call, int64_t row, int y)
{
    const lk_ce_loads in = lk_ce_load<backward>(call, row, y != -1); /* -1: ignored */
    const float weight = call.weights && y >= 0 ? call.weights[y] : 1.0f;
    lk_ce_upstream up = lk_ce_upstream_of(call, in, weight);
    if (may_bend && call.a.dentropy && y != -1) up.entropy_factor = -call.a.logit_scale * call.a.dentropy[row];
    return up;
}

/* Stores n neighbouring gradients: 1, or a vector of 16 bytes or 8. wide: the address is a multiple of that. */
template <class Out, int n> LK_DEVICE void lk_ce_store_as(Out *out, const float (&x)[n], bool wide)
{
    float full[LK_VEC<Out>];
    lk_vec<Out> packed;
    LK_UNROLL for (int j = 0; j < LK_VEC<Out>; j++) full[j] = x[j % n];
    lk_pack(&packed, full);
    if (wide && n == LK_VEC<Out>) lk_store_vec_wb(out, packed); /* faster than a streaming store */
    else if (wide) __stcs((uint2 *)out, make_uint2(packed.raw.x, packed.raw.y));
    LK_UNROLL for (int j = 0; !wide && j < n; j++) lk_put(out + j, x[j]);
}

/* The same in e5m2: 1, or n bytes. */
template <int n> LK_DEVICE void lk_ce_store_e5m2(uint8_t *out, const float (&x)[n], bool wide)
{
    uint32_t pair[(n + 1) / 2];
    LK_UNROLL for (int j = 0; j < n; j += 2) pair[j / 2] = lk_fp8x2(LK_FP8_E5M2, x[j], n > 1 ? x[j + 1] : 0.0f);
    if constexpr (n == 8)
        if (wide) __stcs((uint2 *)out, make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16));
    if constexpr (n == 4)
        if (wide) __stcs((unsigned *)out, pair[0] | pair[1] << 16);
    LK_UNROLL for (int j = 0; !wide && j < n; j++) out[j] = (uint8_t)(pair[j / 2] >> j % 2 * 8);
}

/* The same in the type of dlogits. eight, here and below: that type is e5m2. It has kernels of its own: a branch for it would cost
 * the others registers. */
template <class T, bool eight = false, int n>
LK_DEVICE void lk_ce_store(const lk_cross_entropy_args &a, char *out, const float (&x)[n], bool wide)
{
    if (eight) lk_ce_store_e5m2((uint8_t *)out, x, wide);
    else if (sizeof(T) == 2 || a.dlogits_dtype == LK_DTYPE_F32) lk_ce_store_as((T *)out, x, wide);
    else if (a.dlogits_dtype == LK_DTYPE_F16) lk_ce_store_as((lk_f16 *)out, x, wide);
    else lk_ce_store_as((lk_bf16 *)out, x, wide);
}

/* The bytes of an element of dlogits, and the address of one. */
template <class T, bool eight = false> LK_DEVICE int lk_ce_bytes(const lk_cross_entropy_args &a)
{
    return eight ? 1 : sizeof(T) == 2 || a.dlogits_dtype != LK_DTYPE_F32 ? 2 : 4;
}
template <class T, bool eight = false> LK_DEVICE char *lk_ce_at(const lk_cross_entropy_args &a, int64_t row, int64_t col)
{
    return (char *)a.dlogits + (row * a.dlogits_stride + col) * lk_ce_bytes<T, eight>(a);
}

/* The gradients of one vector; target_offset as in lk_ce_differentiate. A plain row has none: its target is -inf, and the owner
 * writes that gradient. */
template <bool plain, lk_ce_summand summand, bool eight, class T>
LK_DEVICE void lk_ce_write_gradients(lk_vec<T> raw, char *out, int64_t col, int target_offset, bool wide,
                                     const lk_ce_gradient &g, const lk_cross_entropy_args &a, float *sum)
{
    float x[LK_VEC<T>];
    lk_unpack(x, raw);
    lk_ce_differentiate<plain, summand, sizeof(T) == 4>(x, g, a, col, plain ? -1 : target_offset, sum);
    lk_ce_store<T, eight>(a, out, x, wide);
}

/* The sum of x over the threads of a row, for all of them. */
LK_DEVICE float lk_ce_sum(float x, int team)
{
    float v[1] = {x};
    if (team > 32) lk_sum_cluster(v, 0);
    else v[0] = lk_sum_warp(x, team);
    return v[0];
}

/* Zeroes the padding of a row, by all its threads. begin: the first column behind the row's. */
template <class T, bool eight = false>
LK_DEVICE void lk_ce_zero_padding(const lk_cross_entropy_call &call, int64_t row, int64_t begin, int rank, int team)
{
    const float zero[1] = {0.0f};
    for (int64_t col = begin + rank; col < call.padded_end; col += team)
        lk_ce_store<T, eight>(call.a, lk_ce_at<T, eight>(call.a, row, col), zero, false);
}

/* The gradients of the part of a share that has no slot, and the padding. read: the row is read; y: its target, -1 where no
 * column is special; single: the first single element. Returns the sum that lk_ce_differentiate adds up. */
template <class T, bool plain, lk_ce_summand summand, bool eight>
LK_DEVICE float lk_ce_write_rest(const lk_cross_entropy_call &call, int64_t row, lk_ce_gradient g, bool read, int y,
                                float single)
{
    const lk_cross_entropy_args &a = call.a;
    const lk_ce_share<T> at = lk_ce_share_of<T>(call, row);
    const bool wide = (uintptr_t)lk_ce_at<T, eight>(a, row, at.head) % (LK_VEC<T> * lk_ce_bytes<T, eight>(a)) == 0;
    float sum = 0.0f;
    for (int u = call.slots; u <= (int)(a.vocab / LK_VEC<T>) >> call.team_log2; u++) { /* as often in every row */
        const int col = lk_ce_share_col(at, u);
        lk_vec<T> raw = {};
        if (read && u < at.count) raw = lk_load_vec(at.logits + col);
        if (call.ordered) lk_ce_sync(at.team); /* the logits that lie where this step writes have been read */
        float x[LK_VEC<T>];
        lk_unpack(x, raw);
        if (u < at.count) lk_ce_differentiate<plain, summand, sizeof(T) == 4>(x, g, a, col, y - col, &sum);
        if (u < at.count) lk_ce_store<T, eight>(a, lk_ce_at<T, eight>(a, row, col), x, wide);
    }
    for (int i = at.rank; i < at.edge; i += at.team) {
        const int col = lk_ce_edge_col(at, i);
        float x[1] = {i == at.rank || !read ? single : lk_to_float(at.logits[col])};
        lk_ce_differentiate<plain, summand, sizeof(T) == 4>(x, g, a, col, y - col, &sum);
        lk_ce_store<T, eight>(a, lk_ce_at<T, eight>(a, row, col), x, false);
    }
    if (row < a.rows) lk_ce_zero_padding<T, eight>(call, row, a.vocab, at.rank, at.team);
    return sum;
}

/* Starts the copies of a thread's vectors into its slots, in two groups, or where they are a ring in a group each. A row that is
 * not read is 0. */
template <bool ring, class T> LK_DEVICE void lk_ce_copy(const lk_ce_thread<T> &t)
{
    const int threads = (int)blockDim.x;
    if constexpr (ring) {
        LK_UNROLL for (int u = 0; u < LK_CROSS_ENTROPY_RING; u++) {
            if (t.read && u < t.in_slots) lk_cp_async_16(t.slot, u * threads * 16, t.at.first + u * t.at.jump);
            lk_cp_async_commit_group();
        }
        return;
    }
    if (!t.read) {
        LK_NO_UNROLL for (int u = 0; u < t.in_slots; u++) t.slot[u * threads] = {};
        return;
    }
    const T *next = t.at.first;
    LK_UNROLL_BY(4) for (int u = 0; u < t.half; u++, next += t.at.jump) lk_cp_async_16(t.slot, u * threads * 16, next);
    lk_cp_async_commit_group();
    LK_UNROLL_BY(4)
    for (int u = t.half; u < t.in_slots; u++, next += t.at.jump) lk_cp_async_16(t.slot, u * threads * 16, next);
    lk_cp_async_commit_group();
}

/* Finds the owner of the target's element, from its index among the vectors or the single elements. Loads the target's logit
 * and the thread's first single element. */
template <bool plain, class T> LK_DEVICE void lk_ce_find_target(const lk_cross_entropy_call &call, lk_ce_thread<T> *t)
{
    constexpr int Num = LK_VEC<T>;
    const lk_ce_share<T> &at = t->at;
    const int y = t->y, inner = y - at.head;
    const bool in_vectors = (unsigned)inner < (unsigned)(at.vecs * Num);
    const int index = y < 0 ? 0 : in_vectors ? inner / Num : y < at.head ? y : y - at.vecs * Num, slot = index >> call.team_log2;
    t->source = index & (at.team - 1), t->owner = t->source == at.rank, t->target = -1;
    if (plain && t->owner && in_vectors && slot < t->in_slots) t->target = slot * (int)blockDim.x * Num + inner % Num;
    t->single = t->read ? -INFINITY : 0.0f, t->logit = -INFINITY, t->slope = 1.0f;
    if (t->read && at.rank < at.edge) {
        const int col = lk_ce_edge_col(at, at.rank);
        if (col != y) t->single = lk_to_float(at.logits[col]);
    }
    if (t->owner && (unsigned)y < (unsigned)call.a.vocab) t->logit = lk_to_float(at.logits[y]);
}

/* W; without class weights, or where it is not used, the number of classes. */
LK_DEVICE float lk_ce_weights(const lk_cross_entropy_call &call)
{
    return call.weight_total ? *call.weight_total : (float)call.classes;
}

/* The factors of a row's gradient from the lse of forward. Where the row becomes NaN, y is -1 from here on. */
template <lk_ce_kind kind, class T>
LK_DEVICE lk_ce_gradient lk_ce_from_lse(const lk_cross_entropy_call &call, lk_ce_thread<T> *t, lk_ce_upstream up, float scale)
{
    const lk_cross_entropy_args &a = call.a;
    lk_ce_gradient g = {};
    const float weights = kind != LK_CE_ANY ? (float)call.classes : lk_ce_weights(call);
    if (!lk_ce_is_simple<kind> && a.softcap > 0.0f) t->logit = lk_ce_cap(t->logit, a.logit_scale, a.softcap, &t->slope);
    if (t->owner && t->y == LK_BAD && a.bad_targets) atomicAdd(a.bad_targets, 1);
    if (t->y == LK_BAD || (t->y >= 0 && !lk_is_finite(up.lse))) {
        if (t->y == LK_BAD) g = lk_ce_bad_factors(up);
        else g.p_factor = NAN;
        t->y = LK_IGNORED;
    } else if (t->y >= 0) {
        g = lk_ce_factors(a, call.share, up, up.lse, weights, t->owner ? t->term : NULL);
        const bool dentropy = kind == LK_CE_ANY && a.dentropy;
        const float p_scale = lk_ce_base_of_lse(&g, up, scale, dentropy, dentropy ? a.entropy[t->row] : 0.0f);
        g.p_factor *= p_scale;
        if (t->owner) t->term->p_scale = p_scale;
        if (t->owner && call.slice.split) t->term->others = call.slice.others[t->row];
    }
    return g;
}

/* The state of a rank's or panel's columns of a row; the target, if it is one of them, is not in the sums. s: as lk_ce_exchange
 * returns it, in all threads; one of them writes. */
template <class T, class State>
LK_DEVICE void lk_ce_put_state(const lk_cross_entropy_call &call, const lk_ce_thread<T> &t, State s, float scale)
{
    if (!t.owner || t.row >= call.a.rows) return;
    if (t.y == LK_IGNORED) s = lk_ce_row_empty<State>();
    if (s.top != INT64_MIN) s.top -= call.slice.vocab_start; /* the argmax is a column of all ranks */
    State before = lk_ce_row_empty<State>();
    if (call.adds_state) before = lk_ce_unpack_state<State>(call.slice.states, call.state_bytes, t.row);
    if (call.adds_state) s = lk_ce_row_merge<true>(before, s, scale);
    s.target = (unsigned)t.y < (unsigned)call.a.vocab ? t.logit : before.target; /* a maximum would lose a NaN */
    lk_ce_pack_state(call.slice.states, call.state_bytes, t.row, s);
}

/* Reads the row and writes its results; in forward with ranks its state. The factors of its gradient, as lk_ce_from_lse; in
 * forward there are none. LK_CE_SMOOTH does not have the sum of the logits yet. So it leaves the row's state in *state, and
 * lk_ce_put_smooth writes the results later; here only those of a row without a good target, or whose sum is 0 or not finite. */
template <lk_ce_kind kind, bool forward, bool eight, class State, class T>
LK_DEVICE lk_ce_gradient lk_ce_from_row(const lk_cross_entropy_call &call, lk_ce_thread<T> *t, lk_ce_inbox *inbox,
                                        lk_ce_upstream up, float scale, State *state)
{
    constexpr bool exact = sizeof(T) == 4, any = kind == LK_CE_ANY;
    const lk_cross_entropy_args &a = call.a;
    const bool smooth = any && a.label_smoothing > 0.0f;
    const bool excludes_target = !forward || call.state_bytes != 0; /* from the sums */
    State others;
    if constexpr (lk_ce_is_simple<kind>) others = lk_ce_reduce(call, *t);
    else if constexpr (kind == LK_CE_CAPPED && forward) others = lk_ce_reduce_capped_ring(call, *t, excludes_target ? t->y : -1);
    else if constexpr (kind == LK_CE_CAPPED) others = lk_ce_reduce_capped<eight>(call, *t);
    else if constexpr (forward) others = lk_ce_reduce_ring<State>(call, *t, excludes_target ? t->y : -1, scale);
    else others = lk_ce_reduce_all<false, State>(call, t->row, t->slot, t->y, t->read, scale);
    others = lk_ce_exchange<any, exact>(inbox, others, scale, t->at.team, t->source, t->owner, &t->logit);
    if (any && forward && a.argmax && t->owner) others.top = lk_ce_find_argmax(t->at, others.top);
    if (!lk_ce_is_simple<kind> && a.softcap > 0.0f) t->logit = lk_ce_cap(t->logit, a.logit_scale, a.softcap, &t->slope);
    if (forward && call.state_bytes) {
        lk_ce_put_state(call, *t, others, scale);
        return {};
    }
    State all = others;
    if (excludes_target) all = lk_ce_with_target<!any, exact>(&others, t->y, t->logit, smooth ? up.weight : 1.0f, scale);
    else if (t->y >= 0) all.target = t->logit;
    const bool later = kind == LK_CE_SMOOTH && t->y >= 0 && all.sum > 0.0f && lk_is_finite(all.sum);
    if (t->owner && t->row < a.rows && !later)
        lk_ce_put<any>(call, t->row, {t->y, t->y != LK_IGNORED, t->y == LK_BAD}, up.weight, all);
    if (kind == LK_CE_SMOOTH) *state = all;

    lk_ce_gradient g = {};
    if (forward) return g;
    const float inverse = __fdividef(1.0f, all.sum);
    if (t->y == LK_BAD || (t->y >= 0 && !(all.sum > 0.0f && lk_is_finite(all.sum)))) {
        if (t->y == LK_BAD) g = lk_ce_bad_factors(up);
        else g.p_factor = NAN;
        t->y = LK_IGNORED;
    } else if (t->y >= 0) {
        float lse = 0.0f;
        if (a.z_loss > 0.0f) lse = lk_ce_row_finish<false>(all, {scale, 0.0f, 0.0f, 1.0f, a.vocab}).lse;
        const float weights = smooth && a.class_weight ? all.weights : (float)a.vocab;
        g = lk_ce_factors(a, call.share, up, lse, weights, t->owner ? t->term : NULL);
        const float p_scale = lk_ce_base_of_state(&g, up, scale, any && a.dentropy, all, inverse);
        g.p_factor *= p_scale;
        if (kind == LK_CE_SMOOTH) g.center = lk_lse_reference(all.max);
        if (t->owner) t->term->p_scale = p_scale, t->term->others = others.sum * inverse;
    }
    return g;
}

/* Writes the gradients of the columns in a thread's slots, of a capped row. Returns the sum of their e as lk_ce_write_row does. */
template <bool backward, bool eight, class T>
LK_DEVICE float lk_ce_write_capped(const lk_cross_entropy_call &call, const lk_ce_thread<T> &t, const lk_ce_gradient &g)
{
    constexpr bool codes = !backward && lk_ce_keeps_codes<T, eight>;
    const int threads = (int)blockDim.x, step = t.at.jump * lk_ce_bytes<T, eight>(call.a);
    const bool wide = (uintptr_t)t.out % (unsigned)(8 * lk_ce_bytes<T, eight>(call.a)) == 0;
    const lk_ce_capped c = lk_ce_capped_of(call.a.logit_scale, call.a.softcap);
    const float grow = lk_ex2(c.base - g.base), both = g.p_factor * (4.0f * grow);
    const bool twice = !lk_is_finite(both) && lk_is_finite(g.p_factor); /* all logits of the row are capped to about -softcap */
    const float factor = twice ? 4.0f * grow : both;
    char *out = t.out;
    int offset = t.y - lk_ce_share_col(t.at, 0), u = 0; /* of the target in a vector */
    float sum[2] = {0.0f, 0.0f};
    if (backward) lk_cp_async_wait_group<1>();
    LK_NO_UNROLL for (int end = backward ? t.half : t.in_slots; u < end; end = t.in_slots) {
        for (; u < end; u++, out += step, offset -= t.at.jump) {
            const lk_vec<T> raw = t.slot[u * threads];
            float w[8];
            if (codes) {
                lk_ce_decode<eight>(w, raw.raw);
            } else {
                float x[8], e[8];
                lk_unpack(x, raw);
                lk_ce_capped_terms<true>(c, x, e, w);
                if (backward) lk_ce_add_terms(sum, e, offset);
            }
            LK_UNROLL for (int j = 0; j < 8; j++) w[j] *= factor;
            if (twice) {
                LK_UNROLL for (int j = 0; j < 8; j++) w[j] *= g.p_factor;
            }
            lk_ce_store<T, eight>(call.a, out, w, wide);
        }
        if (backward) lk_cp_async_wait_group<0>();
    }
    return (sum[0] + sum[1]) * grow;
}

/* Writes the gradients of a thread's columns; the target's is not right yet. Returns a sum over these columns: in backward of e,
 * without the target's; in LK_CE_SMOOTH of x - center, with the target's, whose logit it puts back first. */
template <lk_ce_kind kind, bool backward, bool eight, class T>
LK_DEVICE float lk_ce_write_row(const lk_cross_entropy_call &call, const lk_ce_thread<T> &t, const lk_ce_gradient &g)
{
    constexpr bool plain = lk_ce_is_simple<kind>;
    constexpr lk_ce_summand summand = backward ? LK_CE_SUM_E : kind == LK_CE_SMOOTH ? LK_CE_SUM_X : LK_CE_SUM_NOTHING;
    const int threads = (int)blockDim.x, bytes = lk_ce_bytes<T, eight>(call.a);
    char *out = t.out;
    const bool wide = (uintptr_t)out % (unsigned)(LK_VEC<T> * bytes) == 0;
    int col = plain ? 0 : (int)(t.at.first - t.at.logits), u = 0;
    float sum = 0.0f, single = t.single;
    if (kind == LK_CE_SMOOTH && t.target >= 0) lk_put((T *)t.slot + t.target, t.logit);
    const bool has_single = t.at.rank < t.at.edge;
    if (kind == LK_CE_SMOOTH && t.owner && t.y >= 0 && has_single && lk_ce_edge_col(t.at, t.at.rank) == t.y) single = t.logit;
    if constexpr (kind == LK_CE_CAPPED) sum = lk_ce_write_capped<backward, eight>(call, t, g), u = t.in_slots;
    if constexpr (backward && kind != LK_CE_CAPPED) {
        lk_cp_async_wait_group<1>();
        if (t.target >= 0) {
            lk_cp_async_wait_group<0>();
            lk_put((T *)t.slot + t.target, -INFINITY);
        }
        for (; u < t.half; u++, out += t.at.jump * bytes, col += t.at.jump)
            lk_ce_write_gradients<plain, summand, eight>(t.slot[u * threads], out, col, t.y - col, wide, g, call.a, &sum);
        lk_cp_async_wait_group<0>();
    }
    if constexpr (kind != LK_CE_CAPPED)
        LK_UNROLL_BY(2) for (; u < t.in_slots; u++, out += t.at.jump * bytes, col += t.at.jump)
            lk_ce_write_gradients<plain, summand, eight>(t.slot[u * threads], out, col, t.y - col, wide, g, call.a, &sum);
    if (call.has_rest) sum += lk_ce_write_rest<T, plain, summand, eight>(call, lk_ce_row_of(call), g, t.read, t.y, single);
    return sum;
}

/* Writes the gradient of the target. */
template <bool plain, bool eight, class T>
LK_DEVICE void lk_ce_write_target(const lk_cross_entropy_call &call, const lk_ce_target_term *term, const lk_ce_gradient &g,
                                  float others, float scale)
{
    const float x[1] = {lk_ce_target_gradient<plain>(call.a, term, g, others, scale)};
    lk_ce_store<T, eight>(call.a, lk_ce_at<T, eight>(call.a, lk_ce_row_of(call), term->y), x, false);
}

/* Writes the results of a row of LK_CE_SMOOTH; its owner calls it. s: from lk_ce_from_row; sum: of x - center over all columns. */
template <class T>
LK_DEVICE void lk_ce_put_smooth(const lk_cross_entropy_call &call, const lk_ce_thread<T> &t, lk_ce_row s, float sum)
{
    s.weights = (float)call.a.vocab, s.weighted = sum;
    lk_ce_put<true>(call, lk_ce_row_of(call), {t.y, true, false}, 1.0f, s);
}

/* direction: LK_FORWARD, LK_BACKWARD or LK_BOTH. Ranks do not use LK_BOTH: they call forward, then backward.
 * State: lk_ce_row_squares in forward with statistics. */
template <class T, lk_ce_kind kind, lk_direction direction, class State = lk_ce_row, bool eight = false>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_BLOCK_MOST,
                                 LK_CROSS_ENTROPY_BLOCKS(kind, direction,
                                                         kind != LK_CE_PLAIN && direction == LK_FORWARD && !lk_ce_has_squares<State>))
    lk_cross_entropy_gradient_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    LK_DYN_SMEM(lk_vec<T>, slots); /* and after them a target_term for each row of the block */
    constexpr bool backward = direction == LK_BACKWARD, forward = direction == LK_FORWARD, plain = lk_ce_is_simple<kind>;
    constexpr bool smooth = kind == LK_CE_SMOOTH;
    LK_SHARED(lk_ce_inbox, inbox, [1 + smooth]); /* of the states; and of smoothing's sums */
    const lk_cross_entropy_args &a = call.a;
    const float scale = !plain && a.softcap > 0.0f ? 1.0f : a.logit_scale;
    lk_ce_thread<T> t;
    t.row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> call.team_log2;
    t.at = lk_ce_share_of<T>(call, t.row);
    t.in_slots = t.at.count < call.slots ? t.at.count : call.slots, t.half = (t.in_slots + 1) / 2;
    t.slot = &slots + lk_tid_x(); /* lk_tid_x, not threadIdx.x: one register more would spill below sm_90 */
    t.term = (lk_ce_target_term *)(&slots + call.slots * (int)blockDim.x) + (threadIdx.x >> call.team_log2);
    t.out = lk_ce_at<T, eight>(a, t.row, t.at.first - t.at.logits);
    lk_ce_inbox_begin(inbox);
    if constexpr (smooth) lk_ce_inbox_begin(inbox + 1);
    lk_cluster_begin();
    /* Backward lets the next kernel start only at its end: alternating forward and backward is faster so. */
    if (!backward) lk_griddepcontrol_launch_dependents();
    /* The first wave prefetches two vectors per thread, later blocks one, since an ignored row pays for them in vain. */
    if (t.at.rank == 0 && t.row < a.rows) lk_ce_prefetch_target(a, t.row);
    if (t.at.count > 0) lk_prefetch_l2(t.at.first);
    if (t.at.count > 1 && blockIdx.x < (unsigned)call.wave) lk_prefetch_l2(t.at.first + t.at.jump);
    lk_griddepcontrol_wait();

    int y = LK_IGNORED; /* among the columns of all ranks */
    if (t.row < a.rows) {
        const lk_ce_label label = lk_ce_label_among(a, lk_ce_target_at(a, t.row), call.classes);
        y = label.bad ? LK_BAD : label.y;
    }
    t.y = direction == LK_BOTH ? y : lk_ce_local_col(call, y);
    t.read = backward ? t.y >= 0 : t.y != LK_IGNORED;
    lk_ce_copy<forward && !plain>(t);
    lk_ce_find_target<plain>(call, &t);
    const lk_ce_upstream up = lk_ce_load_upstream<backward, kind == LK_CE_ANY>(call, t.row, y);
    lk_cluster_ready();
    State state;
    const lk_ce_gradient g = backward ? lk_ce_from_lse<kind>(call, &t, up, scale)
                                      : lk_ce_from_row<kind, forward, eight>(call, &t, inbox, up, scale, &state);
    if (forward) return;
    if (t.owner) t.term->y = t.y, t.term->logit = t.logit, t.term->slope = t.slope;
    if (call.ordered) {
        lk_cp_async_wait_group<0>();
        lk_ce_sync(t.at.team); /* the logits that lie where gradients are written have been read */
    }
    const float sum = lk_ce_write_row<kind, backward, eight>(call, t, g);
    if (backward) lk_griddepcontrol_launch_dependents();
    float others = 0.0f;
    const bool sums = backward && !call.slice.split; /* with ranks or panels `others` has the sum over all of them */
    if (sums || smooth) others = lk_ce_sum_for_owner(inbox + smooth, sum, t.at.team, t.source);
    if constexpr (smooth)
        if (t.owner && t.y >= 0) lk_ce_put_smooth(call, t, state, others);
    if (t.owner && (unsigned)t.term->y < (unsigned)a.vocab)
        lk_ce_write_target<kind != LK_CE_ANY, eight, T>(call, t.term, g, sums ? others * t.term->p_scale : t.term->others, scale);
}

/* Whether rows start and end on whole vectors. */
template <class T> LK_HOST bool lk_cross_entropy_whole(const lk_cross_entropy_args &a)
{
    return (uintptr_t)a.logits % 16 == 0 && a.vocab % LK_VEC<T> == 0 && a.logits_stride % LK_VEC<T> == 0;
}

/* How rows that stay in shared memory are launched. */
typedef struct {
    int threads, cluster, rows; /* of a block; blocks of a row; rows of a block */
    int64_t bytes;              /* of dynamic shared memory per block */
} lk_ce_layout;

/* A row of `vecs` vectors, slot_bytes of shared memory for each, and row_bytes besides. It gets threads of `few` slots up to a
 * whole block, then up to `many` slots. Then it gets a cluster of up to 8 blocks, and last as many slots as there is room for.
 * Where rows are few, a row gets a cluster at once. */
#define LK_CROSS_ENTROPY_SEVERAL_THREADS 128 /* of a block with several rows */
LK_HOST lk_ce_layout lk_cross_entropy_layout(const lk_device *device, lk_cross_entropy_call *call, int64_t vecs, int slot_bytes,
                                             int row_bytes, int few, int many)
{
    const lk_cross_entropy_args &a = call->a;
    const int64_t preferred = lk_ceil_div(vecs, few), blocks = lk_ceil_div(vecs, (int64_t)many * LK_CROSS_ENTROPY_BLOCK_MOST);
    const int64_t rows = lk_team_rows(a.rows, a.batch_invariant);
    const bool several_rows = a.path ? a.path == LK_CROSS_ENTROPY_WARP : preferred <= 32 || rows > LK_TEAM_ROWS;
    const bool use_cluster = device->arch >= 90 && (blocks > 1 || rows < 2 * device->sms);
    lk_ce_layout at = {LK_CROSS_ENTROPY_SEVERAL_THREADS, 1, 1, 0};
    if (several_rows) {
        /* Single elements are read at once then, one per thread: up to 6 of f32 logits, 14 of 16 bits. */
        call->team_log2 = !call->ordered ? 0 : a.dlogits_dtype == LK_DTYPE_E5M2 ? 4 : 3;
        while (call->team_log2 < 5 && 1 << call->team_log2 < preferred) call->team_log2++;
    } else {
        if (a.path == LK_CROSS_ENTROPY_CLUSTER || (a.path == LK_CROSS_ENTROPY_AUTO && use_cluster))
            for (at.cluster = 2; at.cluster < 8 && (at.cluster < blocks || rows * at.cluster < 2 * device->sms);) at.cluster *= 2;
        for (at.threads = 64; at.threads < LK_CROSS_ENTROPY_BLOCK_MOST && at.threads * at.cluster < preferred;) at.threads *= 2;
        call->team_log2 = lk_log2(at.threads * at.cluster);
    }
    if (at.threads >> call->team_log2 > 1) at.rows = at.threads >> call->team_log2;
    const int64_t space = (device->smem > 200 ? 200 : device->smem > 150 ? 150 : 90) * 1024 - at.rows * row_bytes;
    const int64_t slots = lk_ceil_div(vecs, (int64_t)1 << call->team_log2), most = space / (at.threads * slot_bytes);
    call->slots = (int)(slots < most ? slots : most), call->has_rest = slots > most;
    at.bytes = (int64_t)call->slots * at.threads * slot_bytes + at.rows * row_bytes;
    int64_t resident = 227 * 1024 / (at.bytes + 3 * 1024); /* 3: static shared memory, and what CUDA takes of each block */
    if (resident > 5 * LK_CROSS_ENTROPY_BLOCK_MOST / at.threads) resident = 5 * LK_CROSS_ENTROPY_BLOCK_MOST / at.threads;
    call->wave = (int)(resident * device->sms);
    return at;
}

/* The launch of gradients, and of forward's rows that are not plain. Except in backward, three blocks with
 * LK_CROSS_ENTROPY_MANY_SLOTS slots per thread fit on an SM. may_be_plain: false saves a kernel where plain rows do not come
 * here. */
template <class T, lk_direction direction, bool may_be_plain = true, bool eight = false>
LK_HOST lk_status lk_cross_entropy_gradient(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                            cudaStream_t stream)
{
    constexpr bool backward = direction == LK_BACKWARD, smooths = direction == LK_BOTH && !eight;
    lk_cross_entropy_args &a = call.a;
    const bool padded = call.padded_end > a.vocab, simple = lk_cross_entropy_is_plain(&a) && !a.dentropy;
    const bool plain = backward ? a.softcap == 0.0f && !a.dentropy && !(a.class_weight && a.label_smoothing > 0.0f) : simple;
    const bool none = a.label_smoothing == 0.0f && !a.dentropy && (backward || (!a.entropy && !a.argmax));
    const bool capped = a.softcap > 0.0f && a.softcap <= LK_CE_CAPPED_MOST && none;
    const bool smooth = smooths && a.label_smoothing > 0.0f && lk_cross_entropy_is_smooth(&a);
    const bool ring = direction == LK_FORWARD && !(may_be_plain && plain); /* a block takes a row of any length then */
    const int64_t vecs = a.vocab / LK_VEC<T>;
    call.share = a.label_smoothing / (float)call.classes;
    /* Options cost each thread many instructions, so rows with them have fewer threads, but 1024 for each SM. */
    const int most = ring ? LK_CROSS_ENTROPY_RING_VECS : plain || smooth ? LK_CROSS_ENTROPY_FEW_SLOTS : LK_CROSS_ENTROPY_OPTION_SLOTS;
    int few = LK_CROSS_ENTROPY_FEW_SLOTS;
    while (few < most && lk_team_rows(a.rows, a.batch_invariant) * vecs >= (int64_t)2 * few * 1024 * device->sms) few *= 2;
    if (few > most) few = most;
    lk_ce_layout at =
        lk_cross_entropy_layout(device, &call, vecs, 16, (int)sizeof(lk_ce_target_term), few,
                                ring ? 1 << 20 : backward ? LK_CROSS_ENTROPY_FEW_SLOTS : LK_CROSS_ENTROPY_MANY_SLOTS);
    if (ring && call.slots > LK_CROSS_ENTROPY_RING)
        at.bytes -= (int64_t)(call.slots - LK_CROSS_ENTROPY_RING) * at.threads * 16, call.slots = LK_CROSS_ENTROPY_RING;
    if (!lk_cross_entropy_whole<T>(a) || padded || call.ordered) call.has_rest = true;
    void (*kernel)(lk_cross_entropy_call) = lk_cross_entropy_gradient_kernel<T, LK_CE_ANY, direction, lk_ce_row, eight>;
    if constexpr (may_be_plain)
        if (plain) kernel = lk_cross_entropy_gradient_kernel<T, LK_CE_PLAIN, direction, lk_ce_row, eight>;
    if constexpr (smooths)
        if (smooth) kernel = lk_cross_entropy_gradient_kernel<T, LK_CE_SMOOTH, direction>;
    if constexpr (sizeof(T) == 2)
        if (capped) kernel = lk_cross_entropy_gradient_kernel<T, LK_CE_CAPPED, direction, lk_ce_row, eight>;
    if constexpr (direction == LK_FORWARD)
        if (a.statistics) kernel = lk_cross_entropy_gradient_kernel<T, LK_CE_ANY, direction, lk_ce_row_squares>;
    return lk_launch_pdl(op, device, kernel, lk_ceil_div(a.rows, at.rows) * at.cluster, at.cluster, at.threads, (size_t)at.bytes,
                         stream, call);
}

/* The launch of gradients in the type of dlogits. */
template <class T, lk_direction direction>
LK_HOST lk_status lk_cross_entropy_gradient_of(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                               cudaStream_t stream)
{
    return call.a.dlogits_dtype == LK_DTYPE_E5M2 ? lk_cross_entropy_gradient<T, direction, true, true>(op, device, call, stream)
                                                 : lk_cross_entropy_gradient<T, direction>(op, device, call, stream);
}

/* ---- Short rows ---------------------------------------------------------------------------------------------------------- */

/* Backward of short plain rows of whole vectors, and forward_backward, also with smoothing without class weights. A team of up to 32
 * lanes, or of two or four warps, holds a row in registers. Once the exponentials are taken, it holds those, so an element needs
 * one exponential in forward_backward too; with smoothing the logits are summed before. At this size most instructions of a
 * row are not for its elements. So with 32 or more threads per row the team's size is a template argument, and targets, upstream,
 * lse and counts are loaded before the logits; class_weight[y] comes after them. */
#define LK_CROSS_ENTROPY_SHORT 4 /* vectors per lane */
#define LK_CROSS_ENTROPY_SHORT_BLOCKS(arch) ((arch) >= 1000 ? 3 : 4) /* per SM: as many as registers allow without spills */

/* -inf in every element of a vector. */
template <class T> LK_DEVICE lk_vec<T> lk_ce_nothing(void)
{
    float x[LK_VEC<T>];
    lk_vec<T> none;
    LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) x[j] = -INFINITY;
    lk_pack(&none, x);
    return none;
}

/* Puts -inf in element `element` of vector number `vector`; -1: nowhere. */
template <class T> LK_DEVICE void lk_ce_blank(lk_vec<T> (&raw)[LK_CROSS_ENTROPY_SHORT], int vector, int element)
{
    constexpr int each = LK_VEC<T> / 4; /* elements of a word */
    const uint32_t bits = sizeof(T) == 4 ? 0xffffffffu : 0xffffu << ((unsigned)element % each * 16);
    const uint32_t none = lk_ce_nothing<T>().raw.x;
    uint32_t mask[4];
    LK_UNROLL for (int i = 0; i < 4; i++) mask[i] = element / each == i ? bits : 0;
    LK_UNROLL for (int u = 0; u < LK_CROSS_ENTROPY_SHORT; u++) {
        if (u != vector) continue;
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
    LK_UNROLL for (int j = 0; j < 4; j++) x[j] = fmaxf(x[j], y[j]);
    lk_pack(a, x);
}
template <class Pair> LK_DEVICE void lk_ce_max_pairs(uint4 *a, uint4 b)
{
    Pair x[4], y[4];
    memcpy(x, a, 16);
    memcpy(y, &b, 16);
    LK_UNROLL for (int i = 0; i < 4; i++) x[i] = __hmax2(x[i], y[i]);
    memcpy(a, x, 16);
}
LK_DEVICE void lk_ce_max(lk_vec<lk_f16> *a, lk_vec<lk_f16> b) { lk_ce_max_pairs<__half2>(&a->raw, b.raw); }
LK_DEVICE void lk_ce_max(lk_vec<lk_bf16> *a, lk_vec<lk_bf16> b) { lk_ce_max_pairs<__nv_bfloat162>(&a->raw, b.raw); }

/* e = 2^(rate v - subtract) of a share's elements; difference: 2^(rate (v - subtract)), for references that are too large times
 * rate. Returns their sum. */
template <bool difference, class T>
LK_DEVICE float lk_ce_exponentials(float (&e)[LK_CROSS_ENTROPY_SHORT][LK_VEC<T>],
                                   const lk_vec<T> (&raw)[LK_CROSS_ENTROPY_SHORT], float rate, float subtract)
{
    float sum[4] = {};
    LK_UNROLL for (int u = 0; u < LK_CROSS_ENTROPY_SHORT; u++) {
        lk_unpack(e[u], raw[u]);
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++)
            sum[j % 4] += e[u][j] = lk_ex2(difference ? rate * (e[u][j] - subtract) : fmaf(rate, e[u][j], -subtract));
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* The barrier of the Warps warps of the block's row number `row`. Barrier 0 is that of __syncthreads. */
template <int Warps> LK_DEVICE void lk_ce_sync_warps(int row)
{
    if (row == 0) lk_named_barrier_sync<1>(32 * Warps);
    else if (row == 1) lk_named_barrier_sync<2>(32 * Warps);
    else if (Warps == 2 && row == 2) lk_named_barrier_sync<3>(32 * Warps);
    else if (Warps == 2) lk_named_barrier_sync<4>(32 * Warps);
}

/* The largest of a row's logits in this warp. target: the target's logit, which every lane of the row has. */
template <class T> LK_DEVICE float lk_ce_short_max(const lk_vec<T> (&raw)[LK_CROSS_ENTROPY_SHORT], float target, int team)
{
    lk_vec<T> largest = raw[0];
    LK_UNROLL for (int u = 1; u < LK_CROSS_ENTROPY_SHORT; u++) lk_ce_max(&largest, raw[u]);
    float v[LK_VEC<T>], most = target;
    lk_unpack(v, largest);
    LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) most = fmaxf(most, v[j]);
    return lk_max_warp(most, team);
}

/* Adds the sums of the row's Warps warps. In forward_backward each is relative to its warp's *max and first rescaled to the row's
 * largest; *max becomes that, and *p_scale is multiplied by this warp's rescaling. */
template <bool backward, int Warps> LK_DEVICE float lk_ce_short_exchange(float sum, float rate, float *max, float *p_scale)
{
    LK_SHARED(float2, states, [LK_CROSS_ENTROPY_THREADS / 32]);
    const int warp = (int)threadIdx.x / 32, team_first = warp & ~(Warps - 1);
    if (threadIdx.x % 32 == 0) states[warp] = make_float2(*max, sum);
    /* Orders these writes before their reads. In place: all warps have read the target's logit. */
    lk_ce_sync_warps<Warps>(warp / Warps);
    float2 other[Warps];
    float top = -INFINITY;
    sum = 0.0f;
    LK_UNROLL for (int i = 0; i < Warps; i++) other[i] = states[team_first + i], top = fmaxf(top, other[i].x);
    if constexpr (backward) {
        LK_UNROLL for (int i = 0; i < Warps; i++) sum += other[i].y;
    } else { /* the difference of two equal infinities is NaN; fminf passes over it */
        LK_UNROLL for (int i = 0; i < Warps; i++) sum = fmaf(other[i].y, lk_ex2(rate * fminf(other[i].x - top, 0.0f)), sum);
        *p_scale *= lk_ex2(rate * fminf(*max - top, 0.0f)), *max = top;
    }
    return sum;
}

/* What smoothing needs of a part of a row: the sum of x - reference, the number of columns, and that reference. */
typedef struct {
    float sum, count, reference;
} lk_ce_spread;

/* Of a warp's part of a short row, target included; count: vectors of this lane. */
template <class T>
LK_DEVICE lk_ce_spread lk_ce_short_spread(const lk_vec<T> (&raw)[LK_CROSS_ENTROPY_SHORT], int count, float reference, int team)
{
    float sum[2] = {0.0f, 0.0f};
    LK_UNROLL for (int u = 0; u < LK_CROSS_ENTROPY_SHORT; u++) {
        if (u >= count) continue;
        float x[LK_VEC<T>];
        lk_unpack(x, raw[u]);
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) sum[j % 2] += x[j] - reference;
    }
    return {lk_sum_warp(sum[0] + sum[1], team), lk_sum_warp((float)(count * LK_VEC<T>), team), reference};
}

/* The parts of the block's warps: a warp writes its own before the barrier of lk_ce_short_exchange; behind it, the sum of
 * x - reference over a row from those of its Warps warps. */
LK_DEVICE lk_ce_spread *lk_ce_short_spreads(void)
{
    LK_SHARED(lk_ce_spread, spread, [LK_CROSS_ENTROPY_THREADS / 32]);
    return spread;
}
LK_DEVICE void lk_ce_short_spread_put(lk_ce_spread own)
{
    if (threadIdx.x % 32 == 0) lk_ce_short_spreads()[threadIdx.x / 32] = own;
}
template <int Warps> LK_DEVICE float lk_ce_short_spread_of_row(float reference)
{
    const lk_ce_spread *spread = lk_ce_short_spreads() + (threadIdx.x / 32 & ~(unsigned)(Warps - 1));
    float sum = 0.0f;
    LK_UNROLL for (int i = 0; i < Warps; i++, spread++) sum += fmaf(spread->reference - reference, spread->count, spread->sum);
    return sum;
}

/* Stores a share's gradients, p_factor e - w_factor. */
template <bool smooth, class T>
LK_DEVICE void lk_ce_short_store(T *out, int step, int count, float (&e)[LK_CROSS_ENTROPY_SHORT][LK_VEC<T>], float p_factor,
                                 float w_factor)
{
    LK_UNROLL for (int u = 0; u < LK_CROSS_ENTROPY_SHORT; u++) {
        if (u >= count) continue;
        lk_vec<T> packed;
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) e[u][j] = smooth ? fmaf(p_factor, e[u][j], -w_factor) : p_factor * e[u][j];
        lk_pack(&packed, e[u]);
        *(uint4 *)(out + u * step) = packed.raw;
    }
}

/* Brings a whole row into the L2. One thread calls; below sm_90 nothing happens. */
template <class T> LK_DEVICE void lk_ce_short_prefetch(const lk_cross_entropy_args &a, const T *logits)
{
    lk_cp_async_bulk_prefetch_l2(logits, (unsigned)a.vocab * (unsigned)sizeof(T));
}

/* lanes: the threads of a row, 32, 64 or 128; 0: 1 to 16 of them, 1 << call.team_log2. smooth: with label_smoothing; a value instead of
 * a template argument cost plain rows up to 8 %. In forward_backward each warp has its own reference, the largest of its logits and
 * the target's; in backward all use lse. The warps of a row exchange their sums once. Rows of several warps are read by cached
 * loads, which is faster.
 *
 * The first wave of blocks prefetches before the wait for the previous kernel: whole rows where a row has several warps, else
 * two vectors per thread. On sm_90 and later each row's first thread also loads the target of the row one wave later, and
 * prefetches that row whole unless it is ignored. */
template <class T, bool backward, int lanes, bool smooth>
LK_KERNEL void __launch_bounds__(LK_CROSS_ENTROPY_THREADS, LK_CROSS_ENTROPY_SHORT_BLOCKS(LK_ARCH))
    lk_cross_entropy_short_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    constexpr int Num = LK_VEC<T>, Vecs = LK_CROSS_ENTROPY_SHORT;
    constexpr int Warps = lanes > 32 ? lanes / 32 : 1; /* warps of a row */
    constexpr bool full = lanes >= 32;
    const lk_cross_entropy_args &a = call.a;
    const int team_log2 = lanes == 32 ? 5 : lanes == 64 ? 6 : lanes == 128 ? 7 : call.team_log2, team = 1 << team_log2;
    const int rank = (int)threadIdx.x & (team - 1), step = team * Num;
    const int64_t row = ((int64_t)blockIdx.x * LK_CROSS_ENTROPY_THREADS + threadIdx.x) >> team_log2;
    const bool there = row < a.rows;
    const int64_t next_row = row + (call.wave << (LK_CROSS_ENTROPY_THREADS_LOG2 - team_log2)); /* a wave of blocks later */
    const bool first_wave = blockIdx.x < (unsigned)call.wave, prefetches_next = LK_ARCH >= 900 && rank == 0;
    const T *const logits = (const T *)a.logits + row * a.logits_stride, *const first = logits + rank * Num;
    const int count = there ? ((int)a.vocab / Num - rank + team - 1) >> team_log2 : 0;
    lk_griddepcontrol_launch_dependents();
    if (there && rank == 0) {
        lk_ce_prefetch_target(a, row);
        if (backward) lk_prefetch_l2(a.lse + row);
        if (Warps > 1 && first_wave) lk_ce_short_prefetch(a, logits);
    }
    if (Warps == 1 && first_wave && count > 0) lk_prefetch_l2(first);
    if (Warps == 1 && first_wave && count > 1) lk_prefetch_l2(first + step);
    lk_griddepcontrol_wait();
    if (full && !there) return;

    const lk_ce_word word = lk_ce_load_word(a, row);
    const lk_ce_word next_word = prefetches_next ? lk_ce_load_word(a, next_row) : lk_ce_word{};
    const lk_ce_loads in = lk_ce_load<backward>(call, row, there);
    const lk_ce_label label = lk_ce_label_of_word(a, row, word);
    const int y = label.bad ? LK_BAD : label.y; /* the target */
    const bool read = backward ? y >= 0 : y != LK_IGNORED;
    lk_vec<T> raw[Vecs];
    LK_UNROLL for (int u = 0; u < Vecs; u++)
        if (read && u < count) raw[u] = Warps > 1 ? lk_load_vec_ca(first + u * step) : lk_load_vec(first + u * step);
    if (prefetches_next && lk_ce_label_of_word(a, next_row, next_word).counted)
        lk_ce_short_prefetch(a, (const T *)a.logits + next_row * a.logits_stride);
    const T element = y >= 0 ? logits[y] : T{};
    const float weight = y >= 0 && a.class_weight ? a.class_weight[y] : 1.0f;
    const int index = y >= 0 && (y / Num & (team - 1)) == rank ? y / Num >> team_log2 : -1;
    const bool owner = y < 0 ? rank == 0 : index >= 0;
    if (!read || count < Vecs) {
        LK_UNROLL for (int u = 0; u < Vecs; u++)
            if (!read || u >= count) raw[u] = lk_ce_nothing<T>();
    }
    if (!smooth) lk_ce_blank(raw, index, y % Num);

    const float scale = a.logit_scale, logit = y >= 0 ? lk_to_float(element) : -INFINITY;
    const lk_ce_upstream up = lk_ce_upstream_of(call, in, weight);
    float rate = scale * LK_LOG2E, e[Vecs][Num], target_gradient = NAN;
    lk_ce_row all = lk_ce_row_empty();
    float sum, reference = 0.0f, base = 0.0f, p_scale = 1.0f; /* p_scale: what makes up for the rounding of base */
    lk_ce_spread spread = {};
    bool proper = y >= 0; /* else dlogits are NaN, or 0 where the row is ignored */
    if constexpr (backward) {
        proper = proper && lk_is_finite(up.lse);
        if (proper) p_scale = lk_ce_p_scale(up.lse, up.lse_low, scale, &rate, &base);
        sum = lk_ce_exponentials<false, T>(e, raw, rate, base);
    } else {
        all.max = lk_ce_short_max(raw, logit, team), reference = lk_lse_reference(all.max), base = rate * reference;
        if constexpr (smooth) {
            spread = lk_ce_short_spread(raw, read ? count : 0, reference, team);
            lk_ce_blank(raw, index, y % Num);
        }
        if (fabsf(base) < LK_LSE_BASE) {
            p_scale = lk_ex2(-fmaf(rate, reference, -base));
            sum = lk_ce_exponentials<false, T>(e, raw, rate, base);
        } else {
            sum = lk_ce_exponentials<true, T>(e, raw, rate, reference);
        }
    }
    if constexpr (smooth && Warps > 1) lk_ce_short_spread_put(spread);
    float others = lk_sum_warp(sum, team) * p_scale, inverse = 1.0f, lse = up.lse, target_e;
    if constexpr (Warps > 1) others = lk_ce_short_exchange<backward, Warps>(others, rate, &all.max, &p_scale);
    if constexpr (backward) {
        target_e = p_scale * lk_ex2(fmaf(rate, logit, -base));
        if (owner && y == LK_BAD && a.bad_targets) atomicAdd(a.bad_targets, 1);
    } else {
        if (Warps > 1) reference = lk_lse_reference(all.max);
        if (smooth) all.weights = (float)a.vocab, all.weighted = spread.sum;
        if constexpr (smooth && Warps > 1) all.weighted = lk_ce_short_spread_of_row<Warps>(reference);
        target_e = lk_ex2(rate * (logit - reference)), all.sum = others;
        if (y >= 0) all.sum += target_e, all.target = logit;
        inverse = __fdividef(1.0f, all.sum);
        proper = proper && all.sum > 0.0f && lk_is_finite(all.sum);
        if (proper && a.z_loss > 0.0f) lse = lk_ce_row_finish<false>(all, {scale, 0.0f, 0.0f, 1.0f, a.vocab}).lse;
    }
    lk_ce_target_term term;
    const lk_ce_gradient g = lk_ce_factors<smooth>(a, call.share, up, lse, (float)a.vocab, &term);
    const float w_term = smooth ? term.w_term : 0.0f;
    if (proper) target_gradient = lk_ce_target_dz(term.f_lse, term.f_rest, w_term, target_e * inverse, others * inverse, 0.0f, 1.0f);
    const bool zero = y == LK_IGNORED || (y == LK_BAD && lk_ce_masked(up.f, up.dlse, 0.0f));
    const float p_factor = proper ? g.p_factor * p_scale * inverse : zero ? 0.0f : NAN;
    T *const dlogits = (T *)a.dlogits + row * a.dlogits_stride;
    if (Warps == 1) __syncwarp(); /* in place: every lane has read the target's logit, which the owner overwrites */
    lk_ce_short_store<smooth>(dlogits + rank * Num, step, count, e, p_factor, proper ? g.w_factor : 0.0f);
    if (owner && y >= 0) lk_put(dlogits + y, target_gradient);
    if (!backward && owner && there) lk_ce_put<false, smooth>(call, row, {y, y != LK_IGNORED, y == LK_BAD}, weight, all);
}

/* Whether the kernel for short rows takes the rows. */
template <class T, bool backward> LK_HOST bool lk_cross_entropy_is_short(const lk_cross_entropy_call &call)
{
    const lk_cross_entropy_args &a = call.a;
    const bool simple = lk_cross_entropy_is_smooth(&a) && !(backward && a.label_smoothing > 0.0f);
    const bool whole = (uintptr_t)a.dlogits % 16 == 0 && a.dlogits_stride % LK_VEC<T> == 0 && lk_cross_entropy_whole<T>(a);
    return a.path <= LK_CROSS_ENTROPY_WARP && a.vocab <= 128 * LK_CROSS_ENTROPY_SHORT * LK_VEC<T> && whole &&
           call.padded_end == a.vocab && a.dlogits_dtype == lk_dtype<T> && simple && !call.slice.split;
}
template <class T, bool backward>
LK_HOST lk_status lk_cross_entropy_short(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                         cudaStream_t stream)
{
    while (call.a.vocab > (int64_t)(LK_CROSS_ENTROPY_SHORT * LK_VEC<T>) << call.team_log2) call.team_log2++;
    call.wave = LK_CROSS_ENTROPY_SHORT_BLOCKS(10 * device->arch) * device->sms;
    call.share = call.a.label_smoothing / (float)call.a.vocab;
    void (*const kernels[2][4])(lk_cross_entropy_call) = {
        {lk_cross_entropy_short_kernel<T, backward, 0, false>, lk_cross_entropy_short_kernel<T, backward, 32, false>,
         lk_cross_entropy_short_kernel<T, backward, 64, false>, lk_cross_entropy_short_kernel<T, backward, 128, false>},
        {lk_cross_entropy_short_kernel<T, backward, 0, !backward>, lk_cross_entropy_short_kernel<T, backward, 32, !backward>,
         lk_cross_entropy_short_kernel<T, backward, 64, !backward>, lk_cross_entropy_short_kernel<T, backward, 128, !backward>}};
    const bool smooth = call.a.label_smoothing > 0.0f;
    const int64_t blocks = lk_ceil_div(call.a.rows, LK_CROSS_ENTROPY_THREADS >> call.team_log2);
    return lk_launch_pdl(op, device, kernels[smooth][call.team_log2 < 5 ? 0 : call.team_log2 - 4], blocks, 1, LK_CROSS_ENTROPY_THREADS, 0,
                         stream, call);
}

/* The launch of gradients: short rows have a kernel of their own. */
template <class T, lk_direction direction>
LK_HOST lk_status lk_cross_entropy_rows(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                        cudaStream_t stream)
{
    constexpr bool backward = direction == LK_BACKWARD;
    return lk_cross_entropy_is_short<T, backward>(call) ? lk_cross_entropy_short<T, backward>(op, device, call, stream)
                                                        : lk_cross_entropy_gradient_of<T, direction>(op, device, call, stream);
}

/* ---- Sums over all rows -------------------------------------------------------------------------------------------------- */

/* Collects one state per warp in the block with rank 0.
 * Called by: every thread of a block of Threads, or of a cluster of at most Most such blocks, with the state of its warp, once
 * per kernel. Unless Most is 1, lk_cluster_begin() comes anywhere before. A peer may end after the call.
 * Result: blocks * Threads / 32 states for the first warp of the block with rank 0, NULL for the others. */
template <int Threads, int Most, class State> LK_DEVICE const State *lk_ce_collect(State s)
{
    constexpr int BlockWarps = Threads / 32;
    LK_SHARED(State, inbox, [Most * BlockWarps]);
    const int warp = (int)threadIdx.x / 32;
    const int blocks = Most > 1 ? (int)lk_cluster_nctarank() : 1, rank = Most > 1 ? (int)lk_cluster_ctarank() : 0;
    State *slot = &inbox[rank * BlockWarps + warp];
    if (blocks > 1) {
        lk_cluster_ready(); /* the block with rank 0 runs, so that its memory may be written */
        slot = (State *)lk_mapa(slot, 0);
    }
    if (threadIdx.x % 32 == 0) *slot = s;
    if (blocks > 1) {
        __syncwarp(); /* for the .aligned instruction */
        lk_barrier_cluster_arrive(); /* orders the writes into the inbox before its reads */
        if (rank != 0) return NULL;
        lk_barrier_cluster_wait();
    } else {
        __syncthreads(); /* likewise */
    }
    return warp == 0 ? inbox : NULL;
}

/* The sums of a warp, or of all. A warp's count is below 2^32, since the rows' targets fit in memory. */
template <class Int> struct alignas(16) lk_ce_sums {
    float loss, z, weight;
    Int count;
};

/* Kahan's sum. An infinite one stays as it is. */
LK_DEVICE void lk_ce_kahan_add(float *sum, float *lost, float x)
{
    const float part = x - *lost, total = *sum + part, error = (total - *sum) - part;
    *lost = lk_is_finite(error) ? error : 0.0f;
    *sum = total;
}

/* The sums over all threads. Returns true for the threads that get the states of lk_ce_collect. */
template <int Threads, int Most>
LK_DEVICE bool lk_ce_sum_up(lk_ce_sums<unsigned> own, bool z, bool weight, lk_ce_sums<int64_t> *all)
{
    own.loss = lk_sum_warp(own.loss);
    if (z) own.z = lk_sum_warp(own.z);
    if (weight) own.weight = lk_sum_warp(own.weight);
    own.count = __reduce_add_sync(0xffffffffu, own.count);
    const lk_ce_sums<unsigned> *inbox = lk_ce_collect<Threads, Most>(own);
    if (!inbox) return false;
    constexpr int BlockWarps = Threads / 32, team = Most * BlockWarps < 32 ? Most * BlockWarps : 32;
    const int warps = Most > 1 ? (int)lk_cluster_nctarank() * BlockWarps : BlockWarps;
    lk_ce_sums<int64_t> s = {};
    LK_UNROLL for (int k = 0; k < Most * BlockWarps; k += 32) {
        const int i = k + (int)threadIdx.x;
        if (i < warps)
            s = {s.loss + inbox[i].loss, s.z + inbox[i].z, s.weight + inbox[i].weight, s.count + inbox[i].count};
    }
    s.loss = lk_sum_warp(s.loss, team);
    if (z) s.z = lk_sum_warp(s.z, team);
    if (weight) s.weight = lk_sum_warp(s.weight, team);
    LK_UNROLL for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) s.count += __shfl_xor_sync(0xffffffffu, s.count, offset);
    *all = s;
    return true;
}

/* The part of the count that a thread computes. It looks at Vecs rows at once, which takes as long as one. */
template <int Threads, int Most, class Int>
LK_DEVICE lk_ce_sums<unsigned> lk_ce_count(const lk_cross_entropy_args &a, const Int *target)
{
    constexpr int Vecs = 16, Batch = Vecs * Threads;
    const int64_t rank = Most > 1 ? lk_cluster_ctarank() : 0, step = Batch * (Most > 1 ? (int64_t)lk_cluster_nctarank() : 1);
    const int64_t ignored = a.ignore_index;
    const bool every = !a.use_ignore_index, weighs = a.class_weight || a.weight_sum;
    lk_ce_sums<unsigned> s = {};
    float lost = 0.0f;
    for (int64_t first = rank * Batch; first < a.rows; first += step) {
        const Int *at = target + first + threadIdx.x;
        const int left = (int)(a.rows - first < Batch ? a.rows - first : Batch) - (int)threadIdx.x;
        Int y[Vecs] = {};
        if (a.rows - first >= Batch) { /* as in lk_ce_add_up */
            LK_UNROLL for (int u = 0; u < Vecs; u++) y[u] = at[u * Threads];
        } else {
            LK_UNROLL for (int u = 0; u < Vecs; u++)
                if (u * Threads < left) y[u] = at[u * Threads];
        }
        unsigned counted = 0; /* one bit per row */
        LK_UNROLL for (int u = 0; u < Vecs; u++) counted |= (unsigned)(every | (y[u] != ignored)) << u;
        s.count += (unsigned)__popc(counted & ((1u << (left + Threads - 1) / Threads) - 1));
        if (!weighs) continue;
        float w[Vecs] = {}, sum = 0.0f;
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            const lk_ce_label label = lk_ce_label_among(a, y[u], a.vocab);
            if (u * Threads < left && label.y >= 0) w[u] = a.class_weight ? a.class_weight[label.y] : 1.0f;
        }
        LK_UNROLL for (int u = 0; u < Vecs; u++) sum += w[u];
        lk_ce_kahan_add(&s.weight, &lost, sum);
    }
    return s;
}

/* The counts over all rows, by one block or one cluster of Most blocks at most. */
template <int Threads, int Most>
LK_KERNEL void __launch_bounds__(Threads) lk_cross_entropy_count_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    const lk_cross_entropy_args &a = call.a;
    lk_griddepcontrol_launch_dependents();
    if (Most > 1) lk_cluster_begin();
    lk_griddepcontrol_wait();
    lk_ce_sums<unsigned> own;
    lk_ce_sums<int64_t> s;
    if (a.target_dtype == LK_TARGET_INT32) own = lk_ce_count<Threads, Most>(a, (const int32_t *)a.target);
    else own = lk_ce_count<Threads, Most>(a, (const int64_t *)a.target);
    if (!lk_ce_sum_up<Threads, Most>(own, false, a.class_weight || a.weight_sum, &s) || threadIdx.x != 0) return;
    if (call.counts) call.counts->valid_rows = s.count, call.counts->weight_sum = s.weight;
    if (a.valid_rows) *a.valid_rows = s.count;
    if (a.weight_sum) *a.weight_sum = s.weight;
}

/* The sum of four terms; those that are not -0 are counted. */
LK_DEVICE float lk_ce_add_four(uint4 t, unsigned *count)
{
    *count += (min(t.x ^ LK_CE_IGNORED, 1u) + min(t.y ^ LK_CE_IGNORED, 1u)) +
              (min(t.z ^ LK_CE_IGNORED, 1u) + min(t.w ^ LK_CE_IGNORED, 1u));
    return (__uint_as_float(t.x) + __uint_as_float(t.y)) + (__uint_as_float(t.z) + __uint_as_float(t.w));
}

/* The part of the sum of an array of terms that a thread computes; it counts the terms that are not -0. Groups of four are
 * read at once, Vecs of them in flight. The first threads take the last rows % 4 terms. Nothing after the last row is read. */
template <int Threads, int Most, int Vecs = 4>
LK_DEVICE float lk_ce_add_up(const float *terms, int64_t rows, unsigned *count)
{
    constexpr int Batch = Vecs * Threads;
    const uint4 *groups = (const uint4 *)terms;
    const int64_t rank = Most > 1 ? lk_cluster_ctarank() : 0, step = Batch * (Most > 1 ? (int64_t)lk_cluster_nctarank() : 1);
    const int64_t whole = rows >> 2;
    const bool adds_last = rank == 0 && threadIdx.x < (unsigned)rows % 4;
    float sum = 0.0f, lost = 0.0f;
    LK_NO_UNROLL for (int64_t first = rank * Batch; first < whole; first += step) {
        const uint4 *at = groups + first + threadIdx.x;
        const int64_t left = whole - first;
        uint4 next[Vecs];
        if (left >= Batch) { /* loads without predicates all start before the first is waited for */
            LK_UNROLL for (int u = 0; u < Vecs; u++) next[u] = at[u * Threads];
        } else {
            LK_UNROLL for (int u = 0; u < Vecs; u++) {
                next[u] = {LK_CE_IGNORED, LK_CE_IGNORED, LK_CE_IGNORED, LK_CE_IGNORED};
                if ((int)threadIdx.x + u * Threads < (int)left) next[u] = at[u * Threads];
            }
        }
        float part = 0.0f;
        LK_UNROLL for (int u = 0; u < Vecs; u++) part += lk_ce_add_four(next[u], count);
        lk_ce_kahan_add(&sum, &lost, part);
    }
    if (!adds_last) return sum;
    const float single = terms[whole * 4 + threadIdx.x];
    *count += __float_as_uint(single) != LK_CE_IGNORED;
    return sum + single;
}

/* A reduced loss from the terms of all rows, by one block or one cluster of Most blocks at most. */
template <int Threads, int Most>
LK_KERNEL void __launch_bounds__(Threads) lk_cross_entropy_sum_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    const lk_cross_entropy_args &a = call.a;
    const bool z = call.row_losses.z != NULL, weight = call.row_losses.weight != NULL;
    lk_griddepcontrol_launch_dependents();
    if (Most > 1) lk_cluster_begin();
    lk_griddepcontrol_wait();
    lk_ce_sums<unsigned> own = {};
    lk_ce_sums<int64_t> s;
    unsigned again = 0; /* the same rows: the class terms have the count already */
    own.loss = lk_ce_add_up<Threads, Most>(call.row_losses.loss, a.rows, &own.count);
    if (z) own.z = lk_ce_add_up<Threads, Most>(call.row_losses.z, a.rows, &again);
    if (weight) own.weight = lk_ce_add_up<Threads, Most>(call.row_losses.weight, a.rows, &again);
    if (!lk_ce_sum_up<Threads, Most>(own, z, weight, &s) || threadIdx.x != 0) return;
    const float valid = a.denominator ? *a.denominator : (float)s.count;
    const float over = a.class_weight && !a.denominator ? s.weight : valid;
    if (a.reduction == LK_REDUCTION_MEAN) {
        const float nothing = a.zero_when_empty ? 0.0f : NAN;
        if (over == 0.0f) s.loss = s.loss != s.loss ? s.loss : nothing, s.z = s.z != s.z ? s.z : nothing;
        else s.loss = __fdiv_rn(s.loss, over);
        if (over != 0.0f && z) s.z = __fdiv_rn(s.z, valid);
    }
    if (a.loss) lk_put_or_add(a.loss, s.loss + s.z, a.accumulate_loss);
    if (a.z_loss_out) lk_put_or_add(a.z_loss_out, s.z, a.accumulate_loss);
    if (a.valid_rows) *a.valid_rows = s.count;
    if (a.weight_sum) *a.weight_sum = s.weight;
}

/* How many blocks add up something of all rows, of so many bytes per row: one, or a cluster beyond 128 KiB. */
LK_HOST int lk_cross_entropy_sum_blocks(const lk_device *device, int64_t rows, int64_t bytes)
{
    return device->arch >= 90 && rows > 131072 / bytes ? 8 : 1;
}

/* The counts of all rows. */
LK_HOST lk_status lk_cross_entropy_count(const char *op, const lk_device *device, const lk_cross_entropy_call &call,
                                         cudaStream_t stream)
{
    const int cluster = lk_cross_entropy_sum_blocks(device, call.a.rows, call.a.target_dtype == LK_TARGET_INT32 ? 4 : 8);
    void (*const kernel)(lk_cross_entropy_call) =
        cluster > 1 ? lk_cross_entropy_count_kernel<256, 8> : lk_cross_entropy_count_kernel<256, 1>;
    return lk_launch_pdl(op, device, kernel, cluster, cluster, 256, 0, stream, call);
}

/* The reduced loss from the rows' terms, and the counts. Few rows are added up by few warps, since each warp costs a start, a
 * reduction and a barrier. */
LK_HOST lk_status lk_cross_entropy_sum(const char *op, const lk_device *device, const lk_cross_entropy_call &call,
                                       cudaStream_t stream)
{
    if (call.a.rows <= 8192) return lk_launch_pdl(op, device, lk_cross_entropy_sum_kernel<256, 1>, 1, 1, 256, 0, stream, call);
    const int cluster = lk_cross_entropy_sum_blocks(device, call.a.rows, sizeof(float));
    return lk_launch_pdl(op, device, lk_cross_entropy_sum_kernel<1024, 8>, cluster, cluster, 1024, 0, stream, call);
}

/* W, once for all rows of backward: the sum of the class weights, by one cluster. */
LK_KERNEL void __launch_bounds__(1024) lk_cross_entropy_weights_kernel(const __grid_constant__ lk_cross_entropy_call call)
{
    const int rank = (int)(lk_cluster_ctarank() * blockDim.x + threadIdx.x), step = (int)(lk_cluster_nctarank() * blockDim.x);
    float sum[1] = {0.0f}, lost = 0.0f;
    lk_cluster_begin();
    lk_griddepcontrol_wait();
    LK_UNROLL_BY(4) for (int64_t col = rank; col < call.classes; col += step) lk_kahan_add(sum, &lost, call.weights[col]);
    lk_cluster_ready();
    lk_sum_cluster(sum, 0);
    if (rank == 0) call.counts->weights = sum[0];
}

/* ---- Checks and workspace ------------------------------------------------------------------------------------------------ */

/* What lies in the workspace of a call. */
typedef struct {
    lk_ce_counts *counts;
    lk_ce_row_losses row_losses; /* of a reduced loss */
    size_t bytes;                /* of all */
} lk_ce_space;

/* The rows of an array in the workspace; `rows` may be unchecked. */
LK_HOST int64_t lk_ce_space_rows(int64_t rows)
{
    const int64_t most = (int64_t)1 << 36; /* more than there can be */
    return rows > most ? most : rows > 0 ? lk_ceil_div(rows, 64) * 64 : 0;
}
/* The counts, and the terms of a reduced loss. */
LK_HOST lk_ce_space lk_ce_take_rows(lk_arena *arena, const lk_cross_entropy_args *a, bool counts, bool reduced)
{
    const int64_t rows = lk_ce_space_rows(a->rows);
    lk_ce_space s = {};
    lk_take(&s.counts, arena, counts, 1);
    lk_take(&s.row_losses.loss, arena, reduced, rows);
    lk_take(&s.row_losses.z, arena, reduced && a->z_loss > 0.0f, rows);
    lk_take(&s.row_losses.weight, arena, reduced && (a->class_weight || a->weight_sum), rows);
    s.bytes = arena->used;
    return s;
}
LK_HOST lk_ce_space lk_ce_space_of(const lk_cross_entropy_args *a, int whose, lk_direction direction)
{
    const bool back = direction == LK_BACKWARD;
    const bool sums_weights = back && whose != LK_CE_PROBABILITIES && lk_cross_entropy_sums_weights(a);
    const bool needs_counts = sums_weights || (direction == LK_BOTH && a->reduction == LK_REDUCTION_MEAN);
    lk_arena arena = {(uintptr_t)a->workspace, 0, LK_WORKSPACE_ALIGNMENT};
    if (back && !sums_weights) return {};
    lk_ce_space s = lk_ce_take_rows(&arena, a, true, !back && lk_cross_entropy_reduced(a));
    if (s.bytes == sizeof *s.counts && !needs_counts) s.bytes = 0;
    return s;
}

/* The values that linear_cross_entropy has too. Products of scales with log2 e, and under a softcap their quotient, stay far
 * from the ends of float's range. */
template <class Args> LK_HOST void lk_cross_entropy_check_values(lk_checks *checks, const Args *a)
{
    const float scale = a->logit_scale, cap = a->softcap, z = a->z_loss, e = a->label_smoothing;
    const float quotient = (scale == 0.0f ? 1.0f : scale) / cap, least = 0x1p-100f, most = 0x1p100f;
    const bool capped = cap != 0.0f;
    const struct {
        const char *name;
        float number;
        bool good;
        const char *rule;
    } numbers[] = {
        {"logit_scale", scale, scale >= 0.0f && scale <= 0x1p127f, "0 to 2^127"},
        {"softcap", cap, !capped || (cap >= least && cap <= most), "0 or 2^-100 to 2^100"},
        {"z_loss", z, z >= 0.0f && z <= FLT_MAX, "finite and at least 0"},
        {"logit_scale over softcap", quotient, !capped || (quotient >= least && quotient <= most), "2^-100 to 2^100"},
        {"label_smoothing", e, e >= 0.0f && e <= 1.0f, "0 to 1"},
    };
    for (const auto &n : numbers) lk_check_number(checks, n.name, n.number, n.good, n.rule);
    if (a->ignore_index && !a->use_ignore_index)
        lk_reject(checks, LK_ERR_VALUE, "ignore_index is %lld, but use_ignore_index is 0; set both or neither",
                  (long long)a->ignore_index);
    lk_check_enum(checks, "reduction", a->reduction, LK_REDUCTION_SUM, "LK_REDUCTION_*");
    lk_check_enum(checks, "target_dtype", a->target_dtype, LK_TARGET_INT32, "LK_TARGET_*");
}

/* Whether a call may have the statistics that it asks for, which linear_cross_entropy has too. */
template <class Args> LK_HOST void lk_cross_entropy_check_statistics(lk_checks *checks, const Args *a, bool forward)
{
    if (a->statistics && !forward)
        lk_reject(checks, LK_ERR_VALUE, "statistics is %d; only forward computes them", a->statistics);
}

/* The fields of another header's functions. */
LK_HOST void lk_cross_entropy_check_function(lk_checks *checks, const lk_cross_entropy_args *a, int whose,
                                             lk_direction direction)
{
    lk_cross_entropy_check_statistics(checks, a, direction == LK_FORWARD || direction == LK_FINISH);
    if (a->statistics && whose == LK_CE_PROBABILITIES) lk_reject(checks, LK_ERR_VALUE, "statistics are not for target_prob");
    lk_check_absent(checks, "batch_invariant", a->batch_invariant && whose == LK_CE_PROBABILITIES, "it is not for target_prob");
    if (a->target_prob && whose == LK_CE_RANKS)
        lk_reject(checks, LK_ERR_VALUE, "target_prob is not for columns that are split over ranks");
    if (a->target_prob && whose == LK_CE_LABELS)
        lk_reject(checks, LK_ERR_VALUE, "target_prob is given; it is for lk_cross_entropy_probabilities_%s, which is in "
                  "cross_entropy_probabilities.cuh", lk_direction_name(direction));
}

/* What another header's struct adds to the checks: its tensors, the bytes of its workspace, the ids of a row as the caller has
 * them, and of a rank what has been checked. */
typedef struct {
    lk_tensor list[7], states[2]; /* states: a rank's */
    size_t bytes;
    int64_t ids_per_row, most_ids; /* 0: rows have a target */
    const lk_vocab_parallel *parallel;
    bool other_gradients; /* dlogp or dtail: where they are given, a NULL upstream is 0 */
} lk_ce_more;
/* A place of such a list that has no tensor has no name. list: NULL where there is none. */
LK_HOST lk_tensor lk_ce_added(const lk_tensor *list, int i)
{
    const lk_tensor none = {"", NULL, 1, LK_UNUSED, 0};
    return list && list[i].name ? list[i] : none;
}

/* Validates a call; a becomes its arguments with every default filled in. device: as in lk_check_begin. */
template <class T>
LK_HOST lk_status lk_cross_entropy_check(const char *op, const lk_cross_entropy_args *args, int whose, lk_direction direction,
                                         lk_device *device, lk_cross_entropy_args *a, const lk_ce_more *more = NULL)
{
    *a = *args;
    const bool query = !device, finish = direction == LK_FINISH, forward = direction == LK_FORWARD || finish;
    const bool back = direction == LK_BACKWARD, prob = whose == LK_CE_PROBABILITIES;
    const lk_vocab_parallel *const parallel = more ? more->parallel : NULL;
    const lk_tensor *const added = more ? more->list : NULL, *const states = more ? more->states : NULL;
    lk_checks checks = lk_check_begin(op, device);
    lk_cross_entropy_check_function(&checks, a, whose, direction);
    if (checks.status) return checks.status; /* before all rules */
    if (forward) { /* what it lacks */
        a->upstream = a->dlse = a->dentropy = NULL, a->dlogits = NULL;
        a->dlogits_stride = 0, a->dlogits_dtype = LK_DTYPE_T, a->zero_padding = 0;
    }
    if (back) a->loss = a->z_loss_out = NULL, a->argmax = NULL;
    if (direction != LK_FORWARD) a->batch_invariant = 0;
    if (back && !a->dentropy) a->entropy = NULL;
    if (a->reduction != LK_REDUCTION_MEAN) a->denominator = NULL;
    const bool mean = back && a->reduction == LK_REDUCTION_MEAN && !a->denominator && !prob; /* needs the counts */
    const bool in_place = !query && a->dlogits == a->logits;
    const int saved = back ? LK_IN : LK_OUT; /* what forward writes and backward reads */
    const int64_t losses = a->reduction == LK_REDUCTION_NONE ? a->rows : 1, some = a->rows != 0, needs_counts = back ? some : 1;
    /* The columns of dlogits with its padding, which ends where the stride says, even of a single row. */
    const int64_t padded = !a->zero_padding ? 0 : in_place ? a->logits_stride : a->dlogits_stride;
    const int64_t end = a->zero_padding && padded > a->vocab ? padded : a->vocab;
    const int64_t classes = parallel ? parallel->vocab_total : a->vocab;
    const size_t bytes = more ? more->bytes : lk_ce_space_of(a, whose, direction).bytes;
    lk_tensor list[] = {
        {"logits", a->logits, sizeof(T), finish ? LK_UNUSED : LK_REQUIRED, a->vocab,
         {{a->rows, &a->logits_stride, "logits_stride"}}},
        {"target", a->target, a->target_dtype == LK_TARGET_INT32 ? 4 : 8, more && more->most_ids ? LK_UNUSED : prob ? LK_IN : LK_REQUIRED, a->rows},
        {"target_prob", a->target_prob, lk_dtype_bytes<T>(a->target_prob_dtype), prob ? LK_REQUIRED : LK_UNUSED, a->vocab,
         {{a->rows, &a->target_prob_stride, "target_prob_stride"}}},
        {"class_weight", a->class_weight, 4, LK_IN, some * classes},
        {"row_weight", a->row_weight, 4, LK_IN, a->rows},
        {"upstream", a->upstream, 4, LK_IN, a->upstream_per_row ? a->rows : some},
        {"dlse", a->dlse, 4, LK_IN, a->rows},
        {"dentropy", a->dentropy, 4, LK_IN, a->rows},
        {"denominator", a->denominator, 4, LK_IN, needs_counts},
        {"loss", a->loss, 4, LK_OUT, losses},
        {"z_loss_out", a->z_loss_out, 4, LK_OUT, losses},
        {"lse", a->lse, 4, back ? LK_REQUIRED : LK_OUT, a->rows},
        {"lse_low", a->lse_low, 4, saved, a->rows},
        {"entropy", a->entropy, 4, back && a->dentropy ? LK_REQUIRED : a->statistics ? LK_OUT | LK_REQUIRED : LK_OUT,
         a->statistics ? lk_count(4, a->rows) : a->rows},
        {"argmax", a->argmax, 8, LK_OUT, a->rows},
        {"valid_rows", a->valid_rows, 8, mean && (!a->class_weight || a->z_loss != 0.0f) ? LK_REQUIRED : saved, needs_counts},
        {"weight_sum", a->weight_sum, 4, mean && a->class_weight ? LK_REQUIRED : saved, needs_counts},
        {"dlogits", a->dlogits, lk_dtype_bytes<T>(a->dlogits_dtype), forward ? LK_UNUSED : LK_OUT | LK_REQUIRED, end,
         {{a->rows, &a->dlogits_stride, "dlogits_stride"}}, {"logits"}},
        {"bad_targets", a->bad_targets, 4, LK_OUT, some},
        lk_ce_added(added, 0), lk_ce_added(added, 1), lk_ce_added(added, 2), lk_ce_added(added, 3), lk_ce_added(added, 4),
        lk_ce_added(added, 5), lk_ce_added(added, 6), lk_ce_added(states, 0), lk_ce_added(states, 1),
        lk_workspace(a->workspace, bytes),
    };
    const int count = lk_used_tensors(list, LK_COUNT(list));
    if (more && more->most_ids) lk_check_size(&checks, "ids_per_row", more->ids_per_row, 1, more->most_ids);
    lk_check_size(&checks, "rows", a->rows, 0, INT64_MAX);
    if (!parallel) lk_check_size(&checks, "vocab", a->vocab, 1, 1 << 30);
    lk_check_shapes(&checks, list, count, query);
    lk_cross_entropy_check_values(&checks, a);
    if (prob) lk_check_dtype<T>(&checks, "target_prob_dtype", a->target_prob_dtype);
    if (!query && prob && a->target) lk_reject(&checks, LK_ERR_VALUE, "target_prob is given, so target must be NULL");
    if (a->rows < 2) a->logits_stride = a->dlogits_stride = end;
    if (a->logit_scale == 0.0f) a->logit_scale = 1.0f;
    const bool from_ids = more && more->other_gradients && !a->upstream; /* then the loss has no gradient, unless one is given */
    if (a->upstream_value == 0.0f && !from_ids) a->upstream_value = 1.0f;
    if (a->dlogits_dtype == LK_DTYPE_T) a->dlogits_dtype = lk_dtype<T>;
    const bool is_16 = sizeof(T) == 4 && (a->dlogits_dtype == LK_DTYPE_F16 || a->dlogits_dtype == LK_DTYPE_BF16);
    if (prob && a->dlogits_dtype == LK_DTYPE_E5M2)
        lk_reject(&checks, LK_ERR_VALUE, "dlogits_dtype is e5m2, which is not for target_prob");
    if (a->dlogits_dtype != lk_dtype<T> && a->dlogits_dtype != LK_DTYPE_E5M2 && !is_16)
        lk_reject(&checks, LK_ERR_VALUE, "dlogits_dtype is %d; it must be T, e5m2, or f16 or bf16 when T is f32", a->dlogits_dtype);
    lk_check_enum(&checks, "path", a->path, LK_CROSS_ENTROPY_CLUSTER, "LK_CROSS_ENTROPY_*");
    lk_check_cluster(&checks, a->path, a->path == LK_CROSS_ENTROPY_CLUSTER && checks.arch < 90);
    lk_check_rows(&checks, a->path, a->path > LK_CROSS_ENTROPY_WARP && a->rows > LK_TEAM_ROWS, "rows", a->rows);
    lk_check_invariant(&checks, a->batch_invariant && a->rows > LK_TEAM_ROWS, a->rows);
    lk_check_workspace(&checks, a->workspace, a->workspace_bytes, bytes);
    lk_check_end(&checks, list, count);
    lk_check_warn(&checks, a->rows == 0, "rows is 0; nothing is computed");
    return checks.status;
}

/* The bytes of workspace that a call needs. */
template <class T>
LK_HOST lk_status lk_cross_entropy_bytes(const char *op, const lk_cross_entropy_args *args, int whose, lk_direction direction,
                                         size_t *bytes)
{
    lk_cross_entropy_args a = {};
    const lk_status status = lk_cross_entropy_check<T>(op, args, whose, direction, NULL, &a);
    if (!status && bytes) *bytes = lk_ce_space_of(&a, whose, direction).bytes;
    return status;
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* What backward needs of all rows, which forward has counted, and W. */
LK_HOST lk_status lk_cross_entropy_prepare_backward(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                                    cudaStream_t stream)
{
    const lk_cross_entropy_args &a = call.a;
    call.valid_rows = a.valid_rows, call.over = a.denominator ? a.denominator : a.class_weight ? a.weight_sum : NULL;
    if (a.rows == 0 || !lk_cross_entropy_sums_weights(&a)) return LK_OK;
    const int cluster = lk_cross_entropy_sum_blocks(device, call.classes, sizeof(float));
    call.counts = (lk_ce_counts *)a.workspace, call.weight_total = &call.counts->weights;
    return lk_launch_pdl(op, device, lk_cross_entropy_weights_kernel, cluster, cluster, 1024, 0, stream, call);
}

/* backward. */
template <class T>
LK_HOST lk_status lk_cross_entropy_run_backward(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                                cudaStream_t stream)
{
    const lk_status status = lk_cross_entropy_prepare_backward(op, device, call, stream);
    return !status && call.a.rows > 0 ? lk_cross_entropy_rows<T, LK_BACKWARD>(op, device, call, stream) : status;
}

/* forward and forward_backward. Rows are read where an output per row or a reduced loss is wanted. The
 * gradients of a mean without denominator need the counts first, where rows may be ignored or have weights. */
template <class T, bool gradient>
LK_HOST lk_status lk_cross_entropy_run_rows(const char *op, const lk_device *device, lk_cross_entropy_call &call,
                                            cudaStream_t stream)
{
    lk_cross_entropy_args &a = call.a;
    lk_status status = LK_OK;
    const bool reduced = lk_cross_entropy_reduced(&a), asked = !reduced && (a.valid_rows || a.weight_sum);
    const bool rowwise = a.loss || a.z_loss_out || a.lse || a.lse_low || a.entropy || a.argmax || a.bad_targets;
    const bool needs_counts = gradient && a.reduction == LK_REDUCTION_MEAN && !a.denominator;
    const bool before = needs_counts && (a.use_ignore_index || a.class_weight);
    call.over = a.denominator;
    if (before) call.counts = (lk_ce_counts *)a.workspace, call.valid_rows = &call.counts->valid_rows;
    if (before && a.class_weight) call.over = &call.counts->weight_sum;
    if (before || asked) status = lk_cross_entropy_count(op, device, call, stream);
    if (!status && a.rows > 0 && (gradient || rowwise)) {
        if constexpr (gradient) status = lk_cross_entropy_rows<T, LK_BOTH>(op, device, call, stream);
        else if (lk_cross_entropy_is_plain(&a)) status = lk_cross_entropy_plain<T>(op, device, call, stream);
        else status = lk_cross_entropy_gradient<T, LK_FORWARD, false>(op, device, call, stream);
    }
    if (!status && reduced) status = lk_cross_entropy_sum(op, device, call, stream);
    return status;
}

/* What all kernels get of checked arguments. */
template <class T> LK_HOST lk_cross_entropy_call lk_cross_entropy_call_of(const lk_cross_entropy_args &a)
{
    lk_cross_entropy_call call = {};
    call.a = a, call.valid = a.rows;
    call.loss_weight = a.row_weight;
    call.classes = a.vocab, call.weights = a.class_weight;
    call.ordered = a.dlogits == a.logits && a.dlogits_dtype != lk_dtype<T>;
    call.padded_end = !a.zero_padding ? a.vocab : call.ordered ? a.logits_stride : a.dlogits_stride;
    if (a.rows < 2) call.a.logits_stride = call.a.dlogits_stride = 0; /* up to 2^62, which overflows in threads without a row */
    return call;
}

/* Checks a call and fills it in. */
template <class T>
LK_HOST lk_status lk_cross_entropy_fill_call(const char *op, const lk_cross_entropy_args *args, int whose,
                                             lk_direction direction, lk_device *device, lk_cross_entropy_call *call)
{
    lk_cross_entropy_args a = {};
    const lk_status status = lk_cross_entropy_check<T>(op, args, whose, direction, device, &a);
    if (status) return status;
    *call = lk_cross_entropy_call_of<T>(a);
    call->row_losses = lk_ce_space_of(&call->a, whose, direction).row_losses;
    return LK_OK;
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_cross_entropy_run(const char *op, const lk_cross_entropy_args *args, cudaStream_t stream)
{
    lk_cross_entropy_call call = {};
    lk_device device = {};
    const lk_status status = lk_cross_entropy_fill_call<T>(op, args, LK_CE_LABELS, direction, &device, &call);
    if (status) return status;
    if constexpr (direction == LK_BACKWARD) return lk_cross_entropy_run_backward<T>(op, &device, call, stream);
    else return lk_cross_entropy_run_rows<T, direction == LK_BOTH>(op, &device, call, stream);
}
template <class T>
LK_HOST lk_status lk_cross_entropy_query(const char *op, const lk_cross_entropy_args *args, lk_direction direction,
                                         size_t *bytes)
{
    return lk_cross_entropy_bytes<T>(op, args, LK_CE_LABELS, direction, bytes);
}

#endif /* CUDA or the simulator */
#endif
