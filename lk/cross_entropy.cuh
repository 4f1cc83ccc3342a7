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
 *            +inf is softcap. A counted row whose z are all -inf, or hold +inf or NaN: loss, entropy and all of dlogits NaN, lse
 *            as in logsumexp.cuh: -inf, +inf, NaN.
 * Traffic    forward reads the logits once; backward reads them once and writes dlogits once.
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

/* Errors, in the order of the checks; the forward's and the backward's alike where a field is in both:
 *   LK_ERR_NULL       args; logits; target; all eight outputs (forward); lse; dlogits; valid_rows or weight_sum where mean needs
 *                     it (backward). With rows = 0 each of them but args may be NULL
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

#endif
