// SPDX-License-Identifier: MIT
/* md_lrpe_cosine.cuh - linearised relative positional encoding, cosine form, on a grid of 1 to 8 axes, forward and backward.
 *
 *   tokens     The first `prefix` tokens are outside the grid. Token prefix + c is cell c of the grid, with the indices
 *              (i_0 .. i_{axes-1}); the last one changes fastest. Its position on axis a is s_a = offset[a] + i_a, or
 *              offset[a] + offset_device[a] + i_a.
 *   angle      phi = s_a * theta[head,j] radians. Each axis has e features: feature f belongs to axis a = f / e, and j = f % e.
 *              Heads may share one row of theta, and features one column: theta[0,j], theta[head,0] or theta[0,0].
 *   forward    y[f] = act(x[f]) cos(phi),  y[dim + f] = act(x[f]) sin(phi)
 *   backward   g[f] = dy[f] cos(phi) + dy[dim + f] sin(phi)
 *              dx = g act'(x);  softmax: dx = act(x) (g - sum g act(x)), summed as in the softmax
 *              dtheta[head,j] = sum s_a act(x[f]) (dy[dim + f] cos(phi) - dy[f] sin(phi))
 *                               over the batch, the tokens of the grid, all features f with f % e = j, and all heads and
 *                               features that share this theta
 *   softmax    over dim: act(x[f]) = exp(x[f]) / sum_f exp(x[f]). Over tokens: the sum is over all tokens of a batch, head and
 *              feature, those of the prefix too.
 *   prefix     phi = 0 exactly: y = (act(x), 0) and g = dy[0:dim]; dy[dim:2 dim] is not read.
 *
 * x is [batch, heads, tokens, dim] and y is [batch, heads, tokens, 2 dim], with tokens = prefix + the product of shape[0] to
 * shape[axes - 1]. The strides of batch, head and token are free. For x of [batch, tokens, heads, dim] set all three: tokens *
 * heads * dim, dim and heads * dim. The dot product of y of two grid tokens depends on their positions only through the
 * difference, as an attention without softmax needs it. To decode one token, set shape to ones and `offset` to its position. In
 * a graph give the position in `offset_device`, so that one graph serves every token.
 * To rotate only the first features, set e and append axes of length 1 with offset 0, until e * axes is at least dim: their
 * features have the angle 0. With dim = 128, e = 64, axes = 2 and shape = {4096, 1} these are the last 64.
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/md_lrpe_cosine.cuh"          #include "lk/md_lrpe_cosine.cuh"
 *                LK_DEFINE_MD_LRPE_COSINE(bf16)            LK_DECLARE_MD_LRPE_COSINE(bf16)
 *            T is f32, f16 or bf16. Then, asynchronously on the caller's stream, in a graph too:
 *                lk_md_lrpe_cosine_args args = {};
 *                args.x = x, args.theta = theta, args.y = y, args.batch = 12, args.heads = 12, args.dim = 128;
 *                args.axes = 2, args.shape[0] = args.shape[1] = 64, args.theta_dtype = LK_DTYPE_F32;
 *                lk_status status = lk_md_lrpe_cosine_forward_bf16(&args, stream);
 *                args.dy = dy, args.dx = dx;
 *                status = lk_md_lrpe_cosine_backward_bf16(&args, stream);
 * Needs      lk_angle.cuh, lk_base.cuh, lk_check.cuh, lk_row.cuh, lk_ptx.cuh.
 * Workspace  For dtheta about 2 MiB on an H200, more with very many heads. For softmax over tokens, in forward too, at most
 *            13 MiB on an H200, and 12 bytes for each batch, head and feature. The size depends on the number of SMs, so its
 *            function needs a device: lk_md_lrpe_cosine_backward_workspace_bytes_bf16(&args, &args.workspace_bytes), or
 *            that of forward.
 * Options    relu, sigmoid, silu, softmax over dim or over tokens; theta in f32 or T, shared by heads (theta_heads) or features
 *            (theta_features); accumulate: dtheta is added to its old contents; dx or dtheta NULL; dy NULL, which means 1
 *            everywhere, not 0; an offset in device memory. The struct says how. A stride of 0 means packed, so copy an expanded
 *            tensor, whose stride is 0, first.
 * Repeatable The same bits every time on the same device and path: fixed order, no atomics. AUTO chooses by alignment too.
 * Source     Qin et al., "Linearized Relative Positional Encoding", 2023; xopes' md_lrpe_cosine.
 * Read on    lk/md_lrpe_cosine.md: how exact results are, and what is read and written.
 *
 * The kernels, in the order of the file, and when they run unless `path` says otherwise. A vector is 16 bytes of T.
 *   forward, backward without dtheta   lk_lrpe_kernel: the vectors of a thread are at the same features of a head. With 1 or 2
 *                                      batches it walks over some tokens, and its angles walk along. With more it has one token
 *                                      in several batches; their angles are computed once, by four threads together
 *   backward with dtheta               lk_lrpe_backward_dtheta_kernel: a thread has several tokens and batches, and sums of its
 *                                      terms. Then lk_lrpe_dtheta_kernel adds these up
 *   tensors not aligned to 16 bytes,   lk_lrpe_row_kernel: a warp has a row, element by element
 *   softmax of long rows
 *   softmax over tokens                lk_lrpe_slab_kernel: a cluster holds all tokens of a few features in shared memory. Where
 *                                      they do not fit, with dtheta, for fewer than 64 tokens and on the row path:
 *                                      lk_lrpe_columns_kernel sums, lk_lrpe_merge_kernel merges, lk_lrpe_columns_kernel writes
 * For example 12 batches of 12 heads, 64 x 64 tokens and 128 features in bf16, so 16 vectors per token, on an H200: a block of
 * 128 threads has 2 tokens of a head in all batches, each thread one vector of 3 batches. With 1 batch a thread has a vector of
 * up to 5 tokens, which are 13 rows of the grid apart.
 * How a token is found is drawn under "Where a token is". The checks of arguments, the workspace and the calls come last.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_MD_LRPE_COSINE_CUH
#define LK_MD_LRPE_COSINE_CUH

/* The kernel that runs. Both compute the same function. AUTO takes VECTOR, the faster one, wherever it can run. */
enum {
    LK_MD_LRPE_COSINE_AUTO = 0,
    LK_MD_LRPE_COSINE_VECTOR = 1, /* a thread owns 16 bytes of features. dim and strides must be multiples of 16 bytes, and
                                     tensors must start on 16 bytes; softmax over dim: dim is at most 512 bytes */
    LK_MD_LRPE_COSINE_ROW = 2     /* any dim, stride and alignment, element by element: a warp owns a row; with softmax over
                                     tokens a thread owns a feature */
};

/* The function act, in the prefix too. */
enum {
    LK_MD_LRPE_COSINE_NONE = 0,
    LK_MD_LRPE_COSINE_RELU = 1,
    LK_MD_LRPE_COSINE_SIGMOID = 2,
    LK_MD_LRPE_COSINE_SILU = 3,
    LK_MD_LRPE_COSINE_SOFTMAX = 4,       /* over dim */
    LK_MD_LRPE_COSINE_SOFTMAX_TOKENS = 5 /* over tokens, those of the prefix too, for each batch, head and feature */
};

/* One struct for both calls: a training step fills it once. F: forward, B: backward; no letter: both. A call ignores the fields
 * of the other one. Backward with neither dtheta nor an activation ignores x and its strides too. */
typedef struct {
    const void *x;           /* F B in    T [batch, heads, tokens, dim]; B: only with dtheta or an activation */
    const void *theta;       /* F B in    theta_dtype [theta_heads, theta_features] packed, radians per position */
    const int32_t *offset_device; /* F B in  int32 [axes], added to offset; NULL: 0. lk cannot check it: every position must be
                                     in (-2^31, 2^31) with it too */
    void *y;                 /* F out     T [batch, heads, tokens, 2 dim] */
    const void *dy;          /* B in      T [batch, heads, tokens, 2 dim], the upstream gradient; NULL means 1, not 0 */
    void *dx;                /* B out     T [batch, heads, tokens, dim], not in place; NULL to skip */
    float *dtheta;           /* B out     f32 [theta_heads, theta_features] packed; NULL to skip */
    void *workspace;         /* F B       scratch for softmax over tokens, B: and dtheta; aligned to LK_WORKSPACE_ALIGNMENT */
    size_t workspace_bytes;  /* F B       at least what lk_md_lrpe_cosine_<direction>_workspace_bytes_<T> says */
    int64_t batch;           /* at least 0 */
    int64_t heads;           /* at least 0 */
    int64_t dim;             /* features of x, 1 to 2^30 */
    int64_t e;               /* features per axis, e * axes >= dim; 0 means dim / axes rounded up */
    int64_t theta_heads;     /* rows of theta: 0 means heads; 1: all heads share one row */
    int64_t theta_features;  /* columns of theta: 0 means e; 1: all features of a head share one angle per position */
    int64_t prefix;          /* tokens before the grid, at least 0 */
    int axes;                /* of the grid, 1 to 8; 0 means 1 */
    int64_t shape[8];        /* of the grid, each at least 0; those from `axes` on are not used */
    int64_t offset[8];       /* added to grid indices, may be negative; every position is in (-2^31, 2^31) */
    int64_t x_batch_stride;  /* elements between batches; 0 means packed: heads * x_head_stride */
    int64_t x_head_stride;   /* 0 means packed: tokens * x_token_stride */
    int64_t x_token_stride;  /* 0 means packed: dim */
    int64_t y_batch_stride;  /* F: likewise; packed tokens have 2 dim elements */
    int64_t y_head_stride;   /* F */
    int64_t y_token_stride;  /* F */
    int64_t dy_batch_stride; /* B: as for y */
    int64_t dy_head_stride;  /* B */
    int64_t dy_token_stride; /* B */
    int64_t dx_batch_stride; /* B: as for x */
    int64_t dx_head_stride;  /* B */
    int64_t dx_token_stride; /* B */
    int theta_dtype;         /* LK_DTYPE_*: T or f32; 0 means T */
    int activation;          /* LK_MD_LRPE_COSINE_NONE to SOFTMAX_TOKENS */
    int accumulate;          /* B: not 0: the new dtheta is added to the old one; 0: it replaces it */
    int path;                /* LK_MD_LRPE_COSINE_VECTOR or ROW; 0 chooses */
} lk_md_lrpe_cosine_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md (overlap, alignment):
 *   LK_ERR_NULL       theta is NULL; forward: x, y; backward: x for dtheta or an activation; all outputs are NULL
 *   LK_ERR_SHAPE      axes outside 0 to 8; a negative size or stride; dim outside 1 to 2^30; e not 0 and e * axes < dim;
 *                     theta_heads is not 0, 1 or heads; theta_features is not 0, 1 or e; a tensor that spans more than 2^62
 *                     elements; a workspace of more than 2^62 bytes; elements of y or dx that overlap (those of x and dy may)
 *   LK_ERR_VALUE      a position outside (-2^31, 2^31); theta_dtype is neither T nor f32; activation or path is not in its enum
 *   LK_ERR_PATH       VECTOR, but dim, a stride or a pointer is not a multiple of 16 bytes, or softmax over dim has dim above
 *                     512 bytes
 *   LK_ERR_WORKSPACE  with dtheta or softmax over tokens: workspace is NULL, too small or not aligned to
 *                     LK_WORKSPACE_ALIGNMENT bytes
 * The workspace functions look at sizes, options and whether dtheta is NULL. Other tensors may be NULL there. */

#define LK_MD_LRPE_COSINE_FUNCTIONS(X, T)                                                                                      \
    X##_CALL(md_lrpe_cosine, forward, LK_FORWARD, T)                                                                           \
    X##_CALL(md_lrpe_cosine, backward, LK_BACKWARD, T)
#define LK_DECLARE_MD_LRPE_COSINE(T) LK_DECLARE(MD_LRPE_COSINE, T)
#define LK_DEFINE_MD_LRPE_COSINE(T) LK_DEFINE(MD_LRPE_COSINE, T)

#if LK_CUDA

#include "lk_angle.cuh"
#include "lk_check.cuh"
#include "lk_row.cuh"

/* ---- Where a token is ---------------------------------------------------------------------------------------------------- */

/* For example prefix = 2, axes = 2, shape = {2, 3}, offset = {10, 20}, dim = 8 and e = 4:
 *
 *   token     0   1   2   3   4   5   6   7        in the grid   i_1 = 0   1   2
 *            |prefix |        grid         |         i_0 = 0:          2   3   4
 *   cell              0   1   2   3   4   5          i_0 = 1:          5   6   7
 *
 *   Token 6 is cell 4. From a cell to its neighbour on axis a it is stride[a] cells, stride = {3, 1}. So
 *   i_0 = 4 / stride[0] = 1 and i_1 = 4 / stride[1] - shape[1] * (4 / stride[0]) = 4 - 3 * 1 = 1: s_0 = 11, s_1 = 21.
 *
 *   feature     0   1   2   3   4   5   6   7
 *   axis       |      0       |      1       |       f / e
 *   angle      |11 theta[0..3]|21 theta[0..3]|       s_axis theta[f % e]; tokens 0 and 1 have the angle 0
 */

/* n / size for 0 <= n < 2^63 without a division: n factor / 2^(63 + log2) rounded down. Here 2^log2 >= size, and factor is
 * 2^(63 + log2) / size rounded up. That rounding adds less than n / 2^(63 + log2) < 1 / size, so no whole number is crossed.
 * The same in 32 bits with 2^(31 + log2), for n < 2^31, takes a third of the instructions. Sizes above 2^30 have factor_32 = 0,
 * which is right for n below the size. */
typedef struct {
    int64_t size;
    uint64_t factor;
    int shift; /* log2 - 1, -1 for size 1 */
    uint32_t factor_32;
    int shift_32;
} lk_lrpe_divisor;

LK_HOST lk_lrpe_divisor lk_lrpe_make_divisor(int64_t size)
{
    const int log2 = lk_log2(size);
    __extension__ const unsigned __int128 power = (unsigned __int128)1 << (63 + log2);
    lk_lrpe_divisor by = {size, (uint64_t)((power + (uint64_t)size - 1) / (uint64_t)size), log2 - 1, 0, 0};
    if (log2 <= 30) by.factor_32 = (uint32_t)lk_ceil_div((int64_t)1 << (31 + log2), size), by.shift_32 = 31 + log2;
    return by;
}

LK_DEVICE int64_t lk_lrpe_divide(int64_t n, const lk_lrpe_divisor &by)
{
    if (by.shift < 0) return n;
    return (int64_t)(__umul64hi((uint64_t)n, by.factor) >> by.shift);
}
LK_DEVICE int lk_lrpe_divide(int n, const lk_lrpe_divisor &by)
{
    return (int)((uint64_t)(uint32_t)n * by.factor_32 >> by.shift_32);
}

typedef struct {
    int64_t prefix;
    lk_lrpe_divisor stride[8]; /* cells between neighbours on an axis */
    int shape[8], offset[8];
    bool small; /* the numbers of cells and items stay below 2^30, so that kernels count in ints */
} lk_lrpe_grid;

/* The position of a cell on an axis. Cells are numbered row-major. */
template <class Int> LK_DEVICE int lk_lrpe_position_as(const lk_lrpe_grid &grid, Int cell, int axis)
{
    uint32_t index = (uint32_t)lk_lrpe_divide(cell, grid.stride[axis]);
    if (axis > 0) index -= (uint32_t)grid.shape[axis] * (uint32_t)lk_lrpe_divide(cell, grid.stride[axis - 1]);
    return (int)(index + (uint32_t)grid.offset[axis]);
}
LK_DEVICE int lk_lrpe_position(const lk_lrpe_grid &grid, int64_t cell, int axis)
{
    return grid.small ? lk_lrpe_position_as(grid, (int)cell, axis) : lk_lrpe_position_as(grid, cell, axis);
}

/* ---- What every kernel gets ---------------------------------------------------------------------------------------------- */

typedef struct {
    lk_lrpe_grid grid;
    const void *theta;
    bool theta_f32;
    int dim, e, e_shift; /* e: at most dim, since f / e is 0 then; f / e is f e_factor / 2^e_shift */
    uint32_t e_factor;
    const int32_t *offset_device;
    int64_t heads, tokens, batch, theta_stride; /* theta_stride: between heads, 0 where they share theta */
    int theta_step;                             /* between features, 0 where they share theta */
    /* An item is the work of a thread (row path: of a warp): tokens token, token + token_step, ... of a head, in `batch_span`
     * consecutive batches. Its inner loop has `steps` steps over the tokens or over the batches, its outer loop `outers` over
     * the other. Items are numbered by (span, outer, inner, lane); inner and outer are head and token, or token and head. */
    lk_lrpe_divisor lanes, inner, outer;
    bool heads_inner;
    int64_t items, token_step, batch_span;
    int vecs, tokens_each, steps, outers; /* vecs: lanes with features; tokens_each: tokens / token_step, rounded up */
    /* Forward: in is x. Backward: in is dy, out is dx. A pointer that is not used holds another tensor's address, so that all
     * are valid. Strides are those of batch, head, token, and of a step of the inner loop. */
    const void *in, *x;
    void *out;
    int64_t in_stride[4], x_stride[4], out_stride[4];
    bool read_dy, read_x, write_dx;
    int activation;
    float *partial; /* [slot, head, feature], or NULL */
    /* A walk over tokens, without dtheta: a step of token_step tokens is `walk` positions on walk_axis, the first axis longer
     * than 1, and none on the others. */
    int walk, walk_axis;
} lk_lrpe_call;

/* ---- Angles -------------------------------------------------------------------------------------------------------------- */

/* theta of Num features of a head. */
template <int Num> struct lk_lrpe_turns {
    lk_turn of[Num];
    uint32_t not_finite; /* bit j: theta is not finite */
};

/* cos, sin and positions of Num features at one token. In the prefix cos and sin are 1 and 0, and s means nothing. */
template <int Num> struct lk_lrpe_angles {
    float cos[Num], sin[Num];
    int s[Num];
    bool in_prefix;
};

/* The axis of feature f: f / e, as lk_lrpe_divide computes it in 32 bits. */
LK_DEVICE int lk_lrpe_axis(const lk_lrpe_call &call, int f)
{
    return (int)((uint64_t)(uint32_t)f * call.e_factor >> call.e_shift);
}

/* theta of Num features of a head: every Step-th from `feature` on. Here and below features beyond dim, whose results are not
 * used, count as the last one. */
template <class T, int Step, int Num>
LK_DEVICE void lk_lrpe_load_turns(lk_lrpe_turns<Num> *turns, const lk_lrpe_call &call, int64_t head, int feature)
{
    const float *const theta_f32 = (const float *)call.theta + head * call.theta_stride;
    const T *const theta_t = (const T *)call.theta + head * call.theta_stride;
    int t[Num];
    float theta[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) {
        const int f = min(feature + Step * j, call.dim - 1);
        t[j] = (f - lk_lrpe_axis(call, f) * call.e) * call.theta_step;
    }
    if (call.theta_f32) {
        LK_UNROLL for (int j = 0; j < Num; j++) theta[j] = theta_f32[t[j]];
    } else {
        LK_UNROLL for (int j = 0; j < Num; j++) theta[j] = lk_to_float(theta_t[t[j]]);
    }
    turns->not_finite = 0;
    LK_UNROLL for (int j = 0; j < Num; j++) {
        turns->of[j] = lk_make_turn(__float_as_uint(theta[j]));
        turns->not_finite |= lk_is_finite(theta[j]) ? 0u : 1u << j;
    }
}

/* The positions of those features at a cell of the grid, without offset_device. */
template <int Step, int Num> LK_DEVICE void lk_lrpe_positions(int (&s)[Num], const lk_lrpe_call &call, int64_t cell, int feature)
{
    int axis = lk_lrpe_axis(call, min(feature, call.dim - 1)), here = lk_lrpe_position(call.grid, cell, axis);
    const int last = lk_lrpe_axis(call, min(feature + Step * (Num - 1), call.dim - 1));
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] = here;
    LK_NO_UNROLL while (Num > 1 && axis < last) {
        here = lk_lrpe_position(call.grid, cell, ++axis);
        LK_UNROLL for (int j = 0; j < Num; j++) s[j] = feature + Step * j < axis * call.e ? s[j] : here;
    }
}

/* Adds offset_device to them. After the wait only: the kernel before may write it. Loop: in a loop over the axes, which a vector
 * has few of. Even where there is no offset, backward with an activation or dtheta is faster without it, all else with it. */
template <int Step, bool Loop, int Num> LK_DEVICE void lk_lrpe_move(int (&s)[Num], const lk_lrpe_call &call, int feature)
{
    if (!call.offset_device) return; /* one branch, so that calls without it pay for nothing else */
    if (Loop) {
        const int last = lk_lrpe_axis(call, min(feature + Step * (Num - 1), call.dim - 1));
        LK_NO_UNROLL for (int axis = lk_lrpe_axis(call, min(feature, call.dim - 1)); axis <= last; axis++) {
            const uint32_t offset = (uint32_t)call.offset_device[axis];
            const int begin = axis * call.e - feature;
            LK_UNROLL for (int j = 0; j < Num; j++)
                if ((unsigned)(Step * j - begin) < (unsigned)call.e) s[j] = (int)((uint32_t)s[j] + offset);
        }
    } else {
        LK_UNROLL for (int j = 0; j < Num; j++) {
            const int axis = lk_lrpe_axis(call, min(feature + Step * j, call.dim - 1));
            s[j] = (int)((uint32_t)s[j] + (uint32_t)call.offset_device[axis]);
        }
    }
}

/* cos and sin of angles. A phase is an angle in 2^-32 turns; read as an int it is from -1/2 to 1/2 of a turn. */
template <int Num>
LK_DEVICE void lk_lrpe_cos_sin(lk_lrpe_angles<Num> *angles, const uint32_t (&phase)[Num], uint32_t not_finite, bool in_prefix)
{
    const float unit = in_prefix ? 0.0f : LK_PHASE_UNIT;
    angles->in_prefix = in_prefix;
    LK_UNROLL for (int j = 0; j < Num; j++) {
        const float phi = (float)(int)phase[j] * unit;
        angles->cos[j] = lk_cos(phi);
        angles->sin[j] = lk_sin(phi);
    }
    if (not_finite && !in_prefix) {
        LK_UNROLL for (int j = 0; j < Num; j++)
            if (not_finite >> j & 1) angles->cos[j] = angles->sin[j] = NAN;
    }
}

/* The angles of every Step-th of Num features at a token. */
template <int Step, int Num>
LK_DEVICE void lk_lrpe_angles_at(lk_lrpe_angles<Num> *angles, const lk_lrpe_turns<Num> &turns, const lk_lrpe_call &call, int64_t token,
                                 int feature)
{
    uint32_t phase[Num];
    lk_lrpe_positions<Step>(angles->s, call, token - call.grid.prefix, feature);
    lk_lrpe_move<Step, false>(angles->s, call, feature);
    LK_UNROLL for (int j = 0; j < Num; j++) phase[j] = lk_phase(turns.of[j], angles->s[j]);
    lk_lrpe_cos_sin(angles, phase, turns.not_finite, token < call.grid.prefix);
}

/* ---- Activations --------------------------------------------------------------------------------------------------------- */

/* act(x), except for softmax. */
template <int Num> LK_DEVICE void lk_lrpe_activate(int activation, float (&x)[Num])
{
    float other;
    if (activation == LK_MD_LRPE_COSINE_RELU) {
        LK_UNROLL for (int j = 0; j < Num; j++) x[j] = x[j] <= 0.0f ? 0.0f : x[j];
    } else if (activation == LK_MD_LRPE_COSINE_SIGMOID) {
        LK_UNROLL for (int j = 0; j < Num; j++) x[j] = lk_sigmoid(x[j], &other);
    } else if (activation == LK_MD_LRPE_COSINE_SILU) {
        LK_UNROLL for (int j = 0; j < Num; j++) x[j] *= lk_sigmoid(x[j], &other);
    }
}

/* g becomes g act'(x), except for softmax. */
template <int Num> LK_DEVICE void lk_lrpe_chain(int activation, float (&g)[Num], const float (&x)[Num])
{
    if (activation == LK_MD_LRPE_COSINE_RELU) {
        LK_UNROLL for (int j = 0; j < Num; j++) g[j] = x[j] <= 0.0f ? 0.0f : g[j];
    } else if (activation == LK_MD_LRPE_COSINE_SIGMOID || activation == LK_MD_LRPE_COSINE_SILU) {
        LK_UNROLL for (int j = 0; j < Num; j++) {
            float other;
            const float sigmoid = lk_sigmoid(x[j], &other); /* other: the sigmoid of -x */
            g[j] *= sigmoid * (activation == LK_MD_LRPE_COSINE_SILU ? fmaf(x[j], other, 1.0f) : other);
        }
    }
}

/* act of a vector. The consecutive lanes of a team hold the vectors of its row. All 32 lanes call it; those without `mine` have
 * no vector and add nothing. Softmax takes one exponential per element, since the lanes first exchange the row's maximum. */
template <int Num> LK_DEVICE void lk_lrpe_activate_row(float (&x)[Num], const lk_lrpe_call &call, bool mine)
{
    if (call.activation != LK_MD_LRPE_COSINE_SOFTMAX) return lk_lrpe_activate(call.activation, x);
    const int team = (int)call.lanes.size;
    float max = -INFINITY, partial[4] = {};
    LK_UNROLL for (int j = 0; j < Num; j++) max = fmaxf(max, x[j]);
    max = lk_max_warp(mine ? max : -INFINITY, team);
    LK_UNROLL for (int j = 0; j < Num; j++) partial[j % 4] += x[j] = lk_exp(x[j] - max);
    const float sum = lk_sum_warp(mine ? (partial[0] + partial[1]) + (partial[2] + partial[3]) : 0.0f, team);
    const float inverse = lk_is_finite(max) ? __fdividef(1.0f, sum) : NAN;
    LK_UNROLL for (int j = 0; j < Num; j++) x[j] *= inverse;
}

/* ---- dx and dtheta of a token -------------------------------------------------------------------------------------------- */

/* Kahan's sum; an infinite sum stays one. */
LK_DEVICE void lk_lrpe_add(float *sum, float *lost, float term)
{
    lk_kahan_add(sum, lost, term);
    *lost = lk_is_finite(*sum) ? *lost : 0.0f;
}

/* g of Num features of one token; u is dy[f], v is dy[dim + f]. */
template <int Num>
LK_DEVICE void lk_lrpe_rotate_back(float (&g)[Num], const lk_lrpe_angles<Num> &angles, const float (&u)[Num], const float (&v)[Num])
{
    LK_UNROLL for (int j = 0; j < Num; j++) g[j] = fmaf(u[j], angles.cos[j], v[j] * angles.sin[j]);
}

/* Sums of dtheta's terms, and what their additions lost. */
template <int Num> struct lk_lrpe_sums {
    float of[Num], lost[Num];
};

/* Adds the terms of one token; x is act(x). */
template <int Num>
LK_DEVICE void lk_lrpe_add_dtheta(lk_lrpe_sums<Num> *sums, const lk_lrpe_angles<Num> &angles, const float (&x)[Num],
                                  const float (&u)[Num], const float (&v)[Num])
{
    if (angles.in_prefix) return;
    LK_UNROLL for (int j = 0; j < Num; j++)
        lk_lrpe_add(&sums->of[j], &sums->lost[j],
                    (float)angles.s[j] * (x[j] * fmaf(v[j], angles.cos[j], -(u[j] * angles.sin[j]))));
}

/* ---- Who has which tokens ------------------------------------------------------------------------------------------------ */

/* bench/results/choices/md_lrpe_cosine.md has the alternatives to these choices, with figures. Loads and stores of vectors are
 * ld.ca and st.wb: with streaming accesses the time depends on how tensors happen to lie in memory. */

#define LK_LRPE_THREADS 128 /* per block */
/* Over the batch: groups of a block that compute angles together, and vectors that a thread loads before it uses the first. */
#define LK_LRPE_GROUPS 4
#define LK_LRPE_BATCH_U 3
/* Blocks per SM, which limit a thread's registers. Walks wait for their loads, so more blocks are faster. Code for sm_100 and
 * later takes more registers. */
#define LK_LRPE_FORWARD_BLOCKS 8
#define LK_LRPE_WALK_BLOCKS (LK_ARCH < 1200 ? LK_LRPE_FORWARD_BLOCKS : 7) /* forward's walks: as many as do not spill */
#define LK_LRPE_BACKWARD_BLOCKS(Act, Walk) (Walk ? (LK_ARCH < 1000 ? 8 : 6) - 2 * Act : 6 - Act)
#define LK_LRPE_DTHETA_BLOCKS (LK_ARCH < 1000 ? 3 : 2)

typedef struct {
    int64_t head, token, batch, slot; /* the first token and batch; slot: of its partial sums */
    int lane;
    bool owner;          /* false: a thread without an item or without features */
    int tokens, batches; /* their counts */
    int feature, count;  /* of vectors: their first feature, and how many of them the thread has */
} lk_lrpe_item;

/* Int: int in a small grid; it takes half the instructions. */
template <class Int> LK_DEVICE lk_lrpe_item lk_lrpe_find_item_as(const lk_lrpe_call &call, Int number)
{
    const Int row = lk_lrpe_divide(number, call.lanes), above = lk_lrpe_divide(row, call.inner);
    const Int nth = lk_lrpe_divide(above, call.outer);
    const Int inner = row - above * (Int)call.inner.size, outer = above - nth * (Int)call.outer.size;
    const Int head = call.heads_inner ? inner : outer, token = call.heads_inner ? outer : inner;
    lk_lrpe_item item;
    item.head = head, item.token = token;
    item.batch = nth * call.batch_span;
    item.slot = nth * call.token_step + token;
    item.lane = (int)(number - row * (Int)call.lanes.size);
    item.owner = number < (Int)call.items && item.lane < call.vecs;
    item.tokens = call.tokens_each - (token + (Int)(call.tokens_each - 1) * (Int)call.token_step >= (Int)call.tokens);
    item.batches = (int)(call.batch - item.batch < call.batch_span ? call.batch - item.batch : call.batch_span);
    return item;
}

LK_DEVICE lk_lrpe_item lk_lrpe_find_item(const lk_lrpe_call &call, int64_t number)
{
    return call.grid.small ? lk_lrpe_find_item_as<int>(call, (int)number) : lk_lrpe_find_item_as<int64_t>(call, number);
}

LK_DEVICE int64_t lk_lrpe_offset(const int64_t (&stride)[4], int64_t batch, int64_t head, int64_t token)
{
    return batch * stride[0] + head * stride[1] + token * stride[2];
}

/* A walk over tokens is split while the launch has fewer threads per SM than FILL: those that forward runs at once. A loop
 * over the batch, which costs more to begin, is split only below half of that. Walks have at most TOKENS_MOST tokens, which
 * limits the error of their angles. They are for batches that leave half of the groups idle: theta in turns is the same for all
 * tokens, but an angle serves only the batches of one token. DTHETA_FILL: the threads, of 8 features, that dtheta's partial
 * sums are made for; with 16 bits before sm_100 they run at once. */
#define LK_LRPE_FILL (LK_LRPE_FORWARD_BLOCKS * LK_LRPE_THREADS)
#define LK_LRPE_BATCH_FILL (LK_LRPE_FILL / 2)
#define LK_LRPE_DTHETA_FILL (3 * LK_LRPE_THREADS)
#define LK_LRPE_TOKENS_MOST 16
#define LK_LRPE_FEW_BATCHES (LK_LRPE_GROUPS / 2)

/* prefix + the product of shape; INT64_MAX where that is more. */
LK_HOST int64_t lk_lrpe_tokens(const lk_md_lrpe_cosine_args *a)
{
    int64_t cells = 1, tokens;
    for (int i = 0; i < a->axes; i++) cells = lk_count(cells, a->shape[i]);
    return __builtin_add_overflow(cells, a->prefix, &tokens) ? INT64_MAX : tokens;
}

/* exps are exp(x - max). max is a reference: the largest x, or an earlier one at most LK_LRPE_LAZY below. It is raised only
 * beyond that, since the sums are rescaled then: in a column that rises slowly those errors would add up. */
typedef struct {
    float max;
    float sum; /* of exps; merged: its inverse, and NaN where the softmax is NaN */
    float dot; /* sum g exps; merged: sum g act(x) */
} lk_lrpe_column;

/* How the work is split. With dtheta an item has many tokens and batches of a head, so that there are few partial sums. */
typedef struct {
    int64_t token_step, batch_span; /* of such an item */
    int64_t slots;               /* of a head's partial sums, each of dim floats */
    int64_t splits;              /* of a column's tokens, for softmax over tokens */
    size_t columns, bytes;       /* where columns begin in the workspace, behind the partial sums; its size */
} lk_lrpe_split;

/* Splits of columns are as many as fill the device with threads, but each has TOKENS_MOST tokens or more, so that states are
 * few beside x. Paths do not matter here, since a query does not know the alignment of pointers. */
LK_HOST lk_status lk_lrpe_split_work(const char *op, const lk_md_lrpe_cosine_args *a, int sms, lk_lrpe_split *split)
{
    const int64_t tokens = lk_lrpe_tokens(a), columns = lk_count(lk_count(a->batch, a->heads), a->dim);
    *split = {};
    if (columns == 0 || tokens == 0) return LK_OK;
    if (a->dtheta) {
        const int64_t features = (int64_t)sms * LK_LRPE_DTHETA_FILL * 8;
        int64_t slots = a->heads > features / a->dim ? 1 : lk_ceil_div(features, a->heads * a->dim);
        while (lk_ceil_div(tokens, slots) >= 1 << 30) slots *= 2; /* steps are counted in ints */
        split->token_step = tokens < slots ? tokens : slots;
        const int64_t spans = slots / split->token_step < a->batch ? slots / split->token_step : a->batch;
        split->batch_span = lk_ceil_div(a->batch, spans);
        if (split->batch_span >= 1 << 30) split->batch_span = 1 << 30;
        split->slots = split->token_step * lk_ceil_div(a->batch, split->batch_span);
        if (split->slots > ((int64_t)1 << 60) / a->heads / a->dim)
            return lk_fail(LK_ERR_SHAPE, op, "dtheta's partial sums, %lld x heads x dim, would take more than 2^62 bytes",
                           (long long)split->slots);
        split->bytes = (size_t)(split->slots * a->heads * a->dim) * sizeof(float);
    }
    if (a->activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS) {
        const int64_t wanted = lk_ceil_div((int64_t)sms * LK_LRPE_FILL * 8, columns);
        const int64_t most = lk_ceil_div(tokens, LK_LRPE_TOKENS_MOST);
        const int64_t least = lk_ceil_div(tokens, (1 << 30) - 1); /* steps are counted in ints */
        split->splits = wanted < most ? wanted : most;
        if (split->splits < least) split->splits = least;
        if (columns > ((int64_t)1 << 57) / split->splits)
            return lk_fail(LK_ERR_SHAPE, op, "states of columns, %lld x batch x heads x dim, would take more than 2^62 bytes",
                           (long long)split->splits);
        split->columns = split->bytes;
        split->bytes += (size_t)(split->splits * columns) * sizeof(lk_lrpe_column);
    }
    return LK_OK;
}

#define LK_LRPE_SET_STRIDES(to, name) to[0] = a.name##_batch_stride, to[1] = a.name##_head_stride, to[2] = a.name##_token_stride

/* The fields of a call for the tensors, theta and the grid. */
template <class T> LK_HOST void lk_lrpe_start_call(lk_lrpe_call *call, const lk_md_lrpe_cosine_args &a, bool backward)
{
    call->tokens = lk_lrpe_tokens(&a);
    if (backward) {
        call->read_dy = a.dy, call->read_x = a.x, call->write_dx = a.dx;
        call->partial = a.dtheta ? (float *)a.workspace : NULL;
        call->x = a.x ? a.x : a.dx, call->in = a.dy ? a.dy : call->x, call->out = a.dx ? a.dx : const_cast<void *>(call->x);
        LK_LRPE_SET_STRIDES(call->in_stride, dy), LK_LRPE_SET_STRIDES(call->out_stride, dx);
        if (a.x) LK_LRPE_SET_STRIDES(call->x_stride, x);
    } else {
        call->in = call->x = a.x, call->out = a.y;
        LK_LRPE_SET_STRIDES(call->in_stride, x), LK_LRPE_SET_STRIDES(call->out_stride, y);
    }
    call->offset_device = a.offset_device;
    call->theta = a.theta, call->theta_f32 = a.theta_dtype == LK_DTYPE_F32;
    call->heads = a.heads, call->batch = a.batch, call->dim = (int)a.dim, call->activation = a.activation;
    call->theta_stride = a.theta_heads == a.heads ? a.theta_features : 0, call->theta_step = a.theta_features == a.e;
    call->e = (int)(a.e < a.dim ? a.e : a.dim);
    call->e_shift = 31 + lk_log2(call->e);
    call->e_factor = (uint32_t)lk_ceil_div((int64_t)1 << call->e_shift, call->e);
    call->grid.prefix = a.prefix;
    int64_t stride = 1;
    const bool cells = call->tokens > a.prefix; /* in an empty grid the product of the other axes may overflow; it is not used */
    for (int i = a.axes - 1; i >= 0; i--) {
        call->grid.stride[i] = lk_lrpe_make_divisor(stride);
        call->grid.shape[i] = (int)(uint32_t)a.shape[i], call->grid.offset[i] = (int)a.offset[i];
        if (cells) stride *= a.shape[i];
    }
    while (call->walk_axis < a.axes - 1 && a.shape[call->walk_axis] <= 1) call->walk_axis++;
}

/* Numbers the items of a call that has token_step and batch_span. */
LK_HOST void lk_lrpe_number_items(lk_lrpe_call *call, const lk_md_lrpe_cosine_args &a, int64_t lanes, bool walk_tokens,
                                  int groups)
{
    const int64_t tokens = call->tokens, cells = call->grid.stride[call->walk_axis].size;
    call->tokens_each = (int)lk_ceil_div(tokens, call->token_step);
    call->heads_inner = call->in_stride[1] < call->in_stride[2];
    call->lanes = lk_lrpe_make_divisor(lanes);
    call->inner = lk_lrpe_make_divisor(call->heads_inner ? a.heads : call->token_step);
    call->outer = lk_lrpe_make_divisor(call->heads_inner ? call->token_step : a.heads);
    call->items = lanes * a.heads * call->token_step * lk_ceil_div(a.batch, call->batch_span);
    call->grid.small = call->items < 1 << 30 && tokens + cells < 1 << 30;
    call->steps = walk_tokens ? call->tokens_each : (int)lk_ceil_div(call->batch_span, groups);
    call->outers = walk_tokens ? (int)call->batch_span : call->tokens_each;
    int64_t *const strides[3] = {call->in_stride, call->x_stride, call->out_stride};
    for (int i = 0; i < 3; i++) /* unsigned: it may overflow where there is no second step */
        strides[i][3] = walk_tokens ? (int64_t)((uint64_t)call->token_step * (uint64_t)strides[i][2])
                                    : (int64_t)((uint64_t)groups * (uint64_t)strides[i][0]);
}

/* The fields of a call for its items. groups: of a block over the batch, else 1. split: of dtheta. */
template <class T>
LK_HOST void lk_lrpe_assign_items(lk_lrpe_call *call, const lk_md_lrpe_cosine_args &a, int sms, bool walk_tokens,
                                  const lk_lrpe_split &split, int groups)
{
    const bool vector = a.path == LK_MD_LRPE_COSINE_VECTOR;
    int64_t lanes = vector ? a.dim / LK_VEC<T> : 1;
    call->vecs = (int)lanes;
    if (vector && a.activation == LK_MD_LRPE_COSINE_SOFTMAX) lanes = (int64_t)1 << lk_log2(lanes); /* a team; some are idle */
    const int64_t most_rows = (int64_t)1 << 56, tokens = call->tokens; /* most_rows: so that no product overflows */
    const int64_t rows = vector || a.heads * tokens < most_rows ? a.heads * tokens : most_rows;
    const int64_t threads = rows * (vector ? lanes : 32), fill = (int64_t)sms * LK_LRPE_FILL; /* threads: per batch */
    const int64_t cells = call->grid.stride[call->walk_axis].size; /* per position on walk_axis */
    call->token_step = tokens, call->batch_span = 1;
    if (a.dtheta) {
        call->token_step = split.token_step, call->batch_span = split.batch_span;
    } else if (walk_tokens) {
        int64_t each = threads * a.batch / fill;
        if (each > LK_LRPE_TOKENS_MOST) each = LK_LRPE_TOKENS_MOST;
        if (each > 1) call->token_step = cells * lk_ceil_div(lk_ceil_div(tokens, cells), each);
        call->walk = (int)(call->token_step / cells);
        if (call->token_step > tokens) call->token_step = tokens;
    } else { /* a span is whole rounds of the groups; steps are counted in ints */
        int64_t spans = (vector ? (int64_t)sms * LK_LRPE_BATCH_FILL : fill) / (threads * groups);
        const int64_t most = lk_ceil_div(a.batch, LK_LRPE_GROUPS), least = lk_ceil_div(a.batch, 1 << 30);
        spans = spans < most ? spans : most;
        call->batch_span = lk_ceil_div(a.batch, spans > least ? spans : least);
        if (call->batch_span < a.batch) call->batch_span = lk_ceil_div(call->batch_span, LK_LRPE_GROUPS) * LK_LRPE_GROUPS;
        if (!vector) /* a row takes a warp: 2^33 of them are 2^31 blocks, one more than a launch may have */
            while (call->token_step > 1 && a.heads * call->token_step * lk_ceil_div(a.batch, call->batch_span) >= (int64_t)1 << 33)
                call->token_step = lk_ceil_div(call->token_step, 2);
    }
    lk_lrpe_number_items(call, a, lanes, walk_tokens, groups);
}

/* ---- Vectors: forward, and backward without dtheta ----------------------------------------------------------------------- */

/* The vectors of a thread have the same features of a head. Walk: they are those of its item's tokens, and the angles walk
 * along. Otherwise they are those of one token in several batches, and the angles stay. Then the threads of a block are G
 * groups with the same items, and group g has batches g, g + G, ... of an item's span. */
#define LK_LRPE_GROUP_THREADS (LK_LRPE_THREADS / LK_LRPE_GROUPS)
static_assert(LK_LRPE_GROUP_THREADS % 32 == 0, "a row of softmax lies in a warp, and a warp in a group");

template <class T, bool Walk> LK_DEVICE lk_lrpe_item lk_lrpe_find_vectors(const lk_lrpe_call &call)
{
    constexpr int Span = Walk ? LK_LRPE_THREADS : LK_LRPE_GROUP_THREADS;
    const int group = threadIdx.x / Span;
    lk_lrpe_item item = lk_lrpe_find_item(call, (int64_t)blockIdx.x * Span + threadIdx.x % Span);
    item.feature = item.owner ? item.lane * LK_VEC<T> : 0;
    item.count = Walk ? item.tokens : item.batches > group ? (item.batches - group - 1) / LK_LRPE_GROUPS + 1 : 0;
    if (!item.owner) item.count = 0;
    item.batch += group;
    return item;
}

/* The angles that a thread computes for its vectors: all of a walk, or the share of its group. A walk may begin in the prefix;
 * its angles are computed at its first token in the grid. In 2^-32 turns they and their increase per step are rounded to
 * nearest, so an angle errs by (n + 1) / 2 units n steps from there. That is 1.2e-8 radians after LK_LRPE_TOKENS_MOST. */
template <class T, bool Walk> struct lk_lrpe_phases {
    static constexpr int Num = Walk ? LK_VEC<T> : LK_VEC<T> / LK_LRPE_GROUPS;
    int feature, prefix, s[Num]; /* prefix: how many of the vectors are in the prefix */
    uint32_t phase[Num], step[Num]; /* the angle at the next vector, and its increase per vector, in 2^-32 turns */
    uint32_t not_finite; /* bit j: theta is not finite */
};

/* Finds their positions, without offset_device. This reads no memory, so it is done before the wait. */
template <class T, bool Walk>
LK_DEVICE void lk_lrpe_start_phases(lk_lrpe_phases<T, Walk> *phases, const lk_lrpe_call &call, const lk_lrpe_item &item)
{
    int64_t token = item.token;
    phases->feature = item.feature + (Walk ? 0 : threadIdx.x / LK_LRPE_GROUP_THREADS * lk_lrpe_phases<T, Walk>::Num);
    phases->prefix = Walk || token >= call.grid.prefix ? 0 : INT32_MAX;
    for (; Walk && token < call.grid.prefix && phases->prefix < item.tokens; phases->prefix++) token += call.token_step;
    lk_lrpe_positions<1>(phases->s, call, token - call.grid.prefix, phases->feature);
}

/* Computes them, given theta. */
template <bool Loop, class T, bool Walk, int Num>
LK_DEVICE void lk_lrpe_turn_phases(lk_lrpe_phases<T, Walk> *phases, const lk_lrpe_turns<Num> &turns, const lk_lrpe_call &call)
{
    phases->not_finite = turns.not_finite;
    lk_lrpe_move<1, Loop>(phases->s, call, phases->feature);
    LK_UNROLL for (int j = 0; j < Num; j++) {
        const bool along = Walk && lk_lrpe_axis(call, phases->feature + j) == call.walk_axis;
        phases->step[j] = along ? lk_phase(turns.of[j], call.walk) : 0;
        phases->phase[j] = lk_phase(turns.of[j], phases->s[j]) - (uint32_t)phases->prefix * phases->step[j];
    }
}

/* Computes them. Groups exchange theirs through the table, [feature of a vector][vector]: all threads of a block call it. */
template <bool Loop, class T, bool Walk>
LK_DEVICE void lk_lrpe_start_angles(lk_lrpe_phases<T, Walk> *phases, lk_lrpe_angles<LK_VEC<T>> *angles, float2 *table,
                                    const lk_lrpe_call &call, const lk_lrpe_item &item)
{
    constexpr int Num = lk_lrpe_phases<T, Walk>::Num, Span = LK_LRPE_GROUP_THREADS;
    lk_lrpe_turns<Num> turns;
    lk_lrpe_load_turns<T, 1>(&turns, call, item.head, phases->feature);
    lk_lrpe_turn_phases<Loop>(phases, turns, call);
    if (Walk) return;
    lk_lrpe_angles<Num> part;
    lk_lrpe_cos_sin(&part, phases->phase, phases->not_finite, phases->prefix > 0);
    const int vector = threadIdx.x % Span, first = threadIdx.x / Span * Num;
    LK_UNROLL for (int j = 0; j < Num; j++) table[(first + j) * Span + vector] = {part.cos[j], part.sin[j]};
    __syncthreads(); /* all groups have written their angles */
    angles->in_prefix = part.in_prefix;
    LK_UNROLL
    for (int j = 0; j < LK_VEC<T>; j++) angles->cos[j] = table[j * Span + vector].x, angles->sin[j] = table[j * Span + vector].y;
}

/* The angles of the next vector of a walk. */
template <class T> LK_DEVICE void lk_lrpe_walk(lk_lrpe_angles<LK_VEC<T>> *angles, lk_lrpe_phases<T, true> *phases, bool in_prefix)
{
    lk_lrpe_cos_sin(angles, phases->phase, phases->not_finite, in_prefix);
    LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) phases->phase[j] += phases->step[j];
}

/* What a thread reads for one step of its inner loop, a vector: x, and in backward dy[f] (first) and dy[dim + f] (second). In
 * the prefix the second one is not read. It is set to 0 before the load: a select after the load would wait for it. */
template <class T, bool Backward> struct lk_lrpe_step {
    lk_vec<T> x;
};
template <class T> struct lk_lrpe_step<T, true> {
    lk_vec<T> first, second, x;
};

template <bool Act, class T>
LK_DEVICE void lk_lrpe_load_step(lk_lrpe_step<T, false> *step, const lk_lrpe_call &, const T *in, const T *, bool)
{
    step->x = lk_load_vec_ca(in);
}
template <bool Act, class T>
LK_DEVICE void lk_lrpe_load_step(lk_lrpe_step<T, true> *step, const lk_lrpe_call &call, const T *dy, const T *x, bool in_prefix)
{
    step->second = {};
    if (!Act || call.read_dy) {
        step->first = lk_load_vec_ca(dy);
        if (!in_prefix) step->second = lk_load_vec_ca(dy + call.dim);
    } else {
        float one[LK_VEC<T>];
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) one[j] = 1.0f;
        lk_pack(&step->first, one);
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) one[j] = in_prefix ? 0.0f : 1.0f;
        lk_pack(&step->second, one);
    }
    if (Act && call.read_x) step->x = lk_load_vec_ca(x);
}

/* Writes y of a vector of one token; x is act(x). */
template <class T, int Num>
LK_DEVICE void lk_lrpe_write_y(T *y, const float (&x)[Num], const lk_lrpe_angles<Num> &angles, const lk_lrpe_call &call)
{
    float z[Num];
    lk_vec<T> out;
    LK_UNROLL for (int j = 0; j < Num; j++) z[j] = x[j] * angles.cos[j];
    lk_store_n<true>(y, z);
    LK_UNROLL for (int j = 0; j < Num; j++) z[j] = x[j] * angles.sin[j];
    lk_pack(&out, z);
    if (angles.in_prefix) out = {};
    lk_store_vec_wb(y + call.dim, out);
}

/* dx of a vector of one token. Act: any options, or none of them. Without Act, dy is given, there is no activation, and sums is
 * NULL. sums: dtheta's, or NULL without dtheta. */
template <bool Act, class T, int Num>
LK_DEVICE void lk_lrpe_backward_step(T *dx, const lk_lrpe_step<T, true> &step, const lk_lrpe_angles<Num> &angles,
                                     const lk_lrpe_call &call, bool mine, lk_lrpe_sums<Num> *sums)
{
    float g[Num], u[Num], v[Num];
    lk_unpack(u, step.first), lk_unpack(v, step.second);
    lk_lrpe_rotate_back(g, angles, u, v);
    if (Act) {
        float x[Num], act[Num], dot = 0.0f;
        lk_unpack(x, step.x), lk_unpack(act, step.x);
        lk_lrpe_activate_row(act, call, mine);
        if (sums && mine) lk_lrpe_add_dtheta(sums, angles, act, u, v);
        if (call.activation == LK_MD_LRPE_COSINE_SOFTMAX) {
            LK_UNROLL for (int j = 0; j < Num; j++) dot = fmaf(g[j], act[j], dot);
            dot = lk_sum_warp(mine ? dot : 0.0f, (int)call.lanes.size);
            LK_UNROLL for (int j = 0; j < Num; j++) g[j] = act[j] * (g[j] - dot);
        } else {
            lk_lrpe_chain(call.activation, g, x);
        }
    }
    lk_vec<T> out;
    lk_pack(&out, g);
    if (mine && (!sums || call.write_dx)) lk_store_vec_wb(dx, out);
}

/* Forward, and backward without dtheta. A walk loads a vector while it uses the one before, a loop over the batch Vecs vectors
 * after it has used Vecs. The launch of dependents comes directly after the wait: after the first loads, the compiler may move it
 * behind their first use. */
template <class T, bool Backward, bool Act, bool Walk>
LK_KERNEL void __launch_bounds__(LK_LRPE_THREADS, Backward ? LK_LRPE_BACKWARD_BLOCKS(Act, Walk)
                                                  : Walk   ? LK_LRPE_WALK_BLOCKS
                                                           : LK_LRPE_FORWARD_BLOCKS)
    lk_lrpe_kernel(const __grid_constant__ lk_lrpe_call call)
{
    constexpr int Num = LK_VEC<T>, Vecs = Walk ? 1 : LK_LRPE_BATCH_U - (Backward && Act);
    LK_SHARED(float2, table, [Walk ? 1 : Num * LK_LRPE_GROUP_THREADS]);
    const lk_lrpe_item item = lk_lrpe_find_vectors<T, Walk>(call);
    const T *in = (const T *)call.in + lk_lrpe_offset(call.in_stride, item.batch, item.head, item.token) + item.feature;
    const T *x = (const T *)call.x + lk_lrpe_offset(call.x_stride, item.batch, item.head, item.token) + item.feature;
    T *out = (T *)call.out + lk_lrpe_offset(call.out_stride, item.batch, item.head, item.token) + item.feature;
    lk_lrpe_phases<T, Walk> phases;
    lk_lrpe_start_phases(&phases, call, item);
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    lk_lrpe_step<T, Backward> ahead[Vecs] = {};
    LK_UNROLL for (int u = 0; u < Vecs; u++, in += call.in_stride[3], x += call.x_stride[3])
        if (u < item.count) lk_lrpe_load_step<Act>(&ahead[u], call, in, x, u < phases.prefix);
    lk_lrpe_angles<Num> angles;
    lk_lrpe_start_angles<!(Backward && Act)>(&phases, &angles, table, call, item);
    const int steps = Act ? call.steps : item.count;
    LK_NO_UNROLL for (int i = 0; i < steps; i += Vecs) {
        LK_UNROLL for (int u = 0; u < Vecs; u++, out += call.out_stride[3]) {
            if (!Walk && i + u >= steps) break;
            const lk_lrpe_step<T, Backward> now = ahead[u];
            const bool mine = !Act || i + u < item.count;
            if (Walk && i + 1 < item.count) lk_lrpe_load_step<Act>(&ahead[u], call, in, x, i + 1 < phases.prefix);
            if (Walk) in += call.in_stride[3], x += call.x_stride[3];
            float act[Num];
            if constexpr (!Backward) lk_unpack(act, now.x);
            if (!Backward && Act) lk_lrpe_activate_row(act, call, mine);
            if constexpr (Walk) lk_lrpe_walk(&angles, &phases, i < phases.prefix);
            if constexpr (Backward) lk_lrpe_backward_step<Act>(out, now, angles, call, mine, (lk_lrpe_sums<Num> *)NULL);
            else if (mine) lk_lrpe_write_y(out, act, angles, call);
        }
        LK_UNROLL for (int u = 0; u < Vecs && !Walk && i + Vecs < steps; u++, in += call.in_stride[3], x += call.x_stride[3])
            if (i + Vecs + u < item.count) lk_lrpe_load_step<Act>(&ahead[u], call, in, x, i + Vecs + u < phases.prefix);
    }
}

/* ---- Vectors: backward with dtheta --------------------------------------------------------------------------------------- */

/* Backward with dtheta. A thread owns a vector of features of a head, several tokens and a span of the batch, so that there
 * are few slots of partial sums. Its inner loop is over tokens (Tokens), with new angles in each step, or over the batch,
 * with angles computed once. Threads do not share them, since dtheta needs the positions too. The compensated sums take the
 * registers that more loads would need. Lanes that share a row's softmax take the same number of steps. */
template <class T, bool Tokens>
LK_KERNEL void __launch_bounds__(LK_LRPE_THREADS, LK_LRPE_DTHETA_BLOCKS)
    lk_lrpe_backward_dtheta_kernel(const __grid_constant__ lk_lrpe_call call)
{
    constexpr int Num = LK_VEC<T>;
    const lk_lrpe_item item = lk_lrpe_find_item(call, (int64_t)blockIdx.x * LK_LRPE_THREADS + threadIdx.x);
    lk_griddepcontrol_wait();
    const int feature = item.owner ? item.lane * Num : 0;
    lk_lrpe_turns<Num> turns = {};
    lk_lrpe_angles<Num> angles = {};
    lk_lrpe_sums<Num> sums = {};
    LK_NO_UNROLL for (int o = 0; o < call.outers; o++) {
        const int64_t batch = item.batch + (Tokens ? o : 0);
        int64_t token = item.token + (Tokens ? 0 : o * call.token_step);
        const bool mine = item.owner && o < (Tokens ? item.batches : item.tokens);
        const int count = !mine ? 0 : Tokens ? item.tokens : item.batches;
        const int steps = call.activation == LK_MD_LRPE_COSINE_SOFTMAX ? call.steps : count;
        const T *dy = (const T *)call.in + lk_lrpe_offset(call.in_stride, batch, item.head, token) + feature;
        const T *x = (const T *)call.x + lk_lrpe_offset(call.x_stride, batch, item.head, token) + feature;
        T *dx = (T *)call.out + lk_lrpe_offset(call.out_stride, batch, item.head, token) + feature;
        lk_lrpe_step<T, true> next = {};
        if (count > 0) lk_lrpe_load_step<true>(&next, call, dy, x, token < call.grid.prefix);
        if (item.owner) lk_lrpe_load_turns<T, 1>(&turns, call, item.head, feature);
        if (!Tokens) lk_lrpe_angles_at<1>(&angles, turns, call, token, feature);
        LK_NO_UNROLL
        for (int i = 0; i < steps; i++, dx += call.out_stride[3]) {
            const lk_lrpe_step<T, true> now = next;
            const int64_t here = token;
            dy += call.in_stride[3], x += call.x_stride[3], token += Tokens ? call.token_step : 0;
            if (i + 1 < count) lk_lrpe_load_step<true>(&next, call, dy, x, token < call.grid.prefix);
            if (Tokens) lk_lrpe_angles_at<1>(&angles, turns, call, here, feature);
            lk_lrpe_backward_step<true>(dx, now, angles, call, i < count, &sums);
        }
    }
    lk_griddepcontrol_launch_dependents();
    if (!item.owner) return;
    float *slot = call.partial + (item.slot * call.heads + item.head) * call.dim + feature;
    LK_UNROLL for (int j = 0; j < Num; j++) slot[j] = sums.of[j];
}

/* ---- Vectors: the launch ------------------------------------------------------------------------------------------------- */

/* The kernel of the vector path. */
template <class T, bool backward, bool Act> LK_HOST void (*lk_lrpe_vector_kernel(bool dtheta, bool walk_tokens))(lk_lrpe_call)
{
    if constexpr (backward)
        if (dtheta) return walk_tokens ? lk_lrpe_backward_dtheta_kernel<T, true> : lk_lrpe_backward_dtheta_kernel<T, false>;
    return walk_tokens ? lk_lrpe_kernel<T, backward, Act, true> : lk_lrpe_kernel<T, backward, Act, false>;
}

template <class T, bool backward>
LK_HOST lk_status lk_lrpe_launch_vectors(const char *op, const lk_device *device, const lk_md_lrpe_cosine_args &a,
                                         const lk_lrpe_split &split, cudaStream_t stream)
{
    lk_lrpe_call call = {};
    lk_lrpe_start_call<T>(&call, a, backward);
    const bool act = a.activation || (backward && !a.dy), walk_tokens = a.batch <= LK_LRPE_FEW_BATCHES;
    const int groups = !a.dtheta && !walk_tokens ? LK_LRPE_GROUPS : 1;
    lk_lrpe_assign_items<T>(&call, a, device->sms, walk_tokens, split, groups);
    void (*const kernel)(lk_lrpe_call) = act ? lk_lrpe_vector_kernel<T, backward, true>(a.dtheta, walk_tokens)
                                             : lk_lrpe_vector_kernel<T, backward, false>(a.dtheta, walk_tokens);
    const int64_t grid = lk_ceil_div(call.items, LK_LRPE_THREADS / groups);
    return lk_launch_pdl(op, device, kernel, grid, 1, LK_LRPE_THREADS, 0, stream, call);
}

/* ---- dtheta from the partial sums, of any kernel ------------------------------------------------------------------------- */

/* A block owns ELEMENTS neighbouring elements; the threads of each take every ELEMENT_THREADS-th
 * slot of each axis, and of each head and feature that share an element. */
typedef struct {
    const float *partial;
    float *dtheta;
    int64_t rows, columns, heads, dim, slots; /* rows, columns: of dtheta */
    bool accumulate;
} lk_lrpe_dtheta_call;

#define LK_LRPE_ELEMENTS 8
#define LK_LRPE_ELEMENT_THREADS 32
#define LK_LRPE_SUM_THREADS (LK_LRPE_ELEMENTS * LK_LRPE_ELEMENT_THREADS)

LK_KERNEL void __launch_bounds__(LK_LRPE_SUM_THREADS) lk_lrpe_dtheta_kernel(lk_lrpe_dtheta_call call)
{
    LK_SHARED(float, partial, [LK_LRPE_SUM_THREADS]); /* [rank][element] */
    const int element = threadIdx.x % LK_LRPE_ELEMENTS, rank = threadIdx.x / LK_LRPE_ELEMENTS;
    const int64_t at = (int64_t)blockIdx.x * LK_LRPE_ELEMENTS + element, row = at / call.columns;
    float sum = 0.0f, lost = 0.0f;
    lk_griddepcontrol_wait();
    const int64_t step = LK_LRPE_ELEMENT_THREADS * call.heads * call.dim;
    for (int64_t head = row < call.rows && call.slots > 0 ? row : call.heads; head < call.heads; head += call.rows)
        for (int64_t f = at - row * call.columns; f < call.dim; f += call.columns) {
            const float *term = call.partial + (rank * call.heads + head) * call.dim + f;
            LK_UNROLL_BY(8) for (int64_t slot = rank; slot < call.slots; slot += LK_LRPE_ELEMENT_THREADS, term += step)
                lk_lrpe_add(&sum, &lost, *term);
        }
    partial[threadIdx.x] = sum;
    for (int reach = LK_LRPE_ELEMENT_THREADS / 2; reach > 0; reach /= 2) {
        __syncthreads(); /* partial is complete up to rank 2 half */
        if (rank < reach) partial[threadIdx.x] += partial[threadIdx.x + reach * LK_LRPE_ELEMENTS];
    }
    lk_griddepcontrol_launch_dependents();
    if (rank > 0 || row >= call.rows) return;
    call.dtheta[at] = call.accumulate ? call.dtheta[at] + partial[element] : partial[element];
}

LK_HOST lk_status lk_lrpe_sum_dtheta(const char *op, const lk_device *device, const lk_md_lrpe_cosine_args &a, int64_t slots,
                                     cudaStream_t stream)
{
    const lk_lrpe_dtheta_call sum = {(const float *)a.workspace, a.dtheta, a.theta_heads, a.theta_features, a.heads, a.dim,
                                     slots, a.accumulate != 0};
    const int64_t grid = lk_ceil_div(a.theta_heads * a.theta_features, LK_LRPE_ELEMENTS);
    return lk_launch_pdl(op, device, lk_lrpe_dtheta_kernel, grid, 1, LK_LRPE_SUM_THREADS, 0, stream, sum);
}

/* ---- Any dim, stride and alignment --------------------------------------------------------------------------------------- */

/* x becomes its softmax, given the state of its row. */
template <int Num> LK_DEVICE void lk_lrpe_normalize(float (&x)[Num], lk_lse row)
{
    const float inverse = lk_is_finite(row.max) ? __frcp_rn(row.sum) : NAN;
    LK_UNROLL for (int j = 0; j < Num; j++) x[j] = inverse * lk_exp(x[j] - row.max);
}

/* A warp owns rows, and each lane every 32nd feature. A row of up to LK_LRPE_ROW_FEATURES features is read once. A longer row
 * is processed in pieces of that size. For softmax each piece reads the whole row once more, in backward x twice and dy once,
 * since a feature needs a sum over the whole row. */
#define LK_LRPE_ROW_N 4
#define LK_LRPE_ROW_FEATURES (32 * LK_LRPE_ROW_N)

/* Features feature, feature + 32, ... of a row; `beyond` for those beyond its end. */
template <class T> LK_DEVICE void lk_lrpe_load_row(float (&v)[LK_LRPE_ROW_N], const T *row, int feature, int dim, float beyond)
{
    LK_UNROLL for (int j = 0; j < LK_LRPE_ROW_N; j++) v[j] = feature + 32 * j < dim ? lk_to_float(row[feature + 32 * j]) : beyond;
}

/* act of a piece of a row in v. Beyond the row's end v is -inf, and its softmax 0. */
template <class T>
LK_DEVICE void lk_lrpe_activate_piece(float (&v)[LK_LRPE_ROW_N], lk_lse *state, const lk_lrpe_call &call, const T *row)
{
    if (call.activation != LK_MD_LRPE_COSINE_SOFTMAX) return lk_lrpe_activate(call.activation, v);
    lk_lse s = lk_lse_empty();
    if (call.dim <= LK_LRPE_ROW_FEATURES) s = lk_lse_add(s, v);
    for (int f = threadIdx.x % 32; call.dim > LK_LRPE_ROW_FEATURES && f < call.dim; f += LK_LRPE_ROW_FEATURES) {
        float all[LK_LRPE_ROW_N];
        lk_lrpe_load_row(all, row, f, call.dim, -INFINITY);
        s = lk_lse_add(s, all);
    }
    *state = lk_lse_warp(s);
    lk_lrpe_normalize(v, *state);
}

/* y of a piece of a row. */
template <class T>
LK_DEVICE void lk_lrpe_forward_piece(T *y, const T *x, const lk_lrpe_angles<LK_LRPE_ROW_N> &angles, const lk_lrpe_call &call,
                                     int feature)
{
    float v[LK_LRPE_ROW_N];
    lk_lse state;
    lk_lrpe_load_row(v, x, feature, call.dim, -INFINITY);
    lk_lrpe_activate_piece(v, &state, call, x);
    LK_UNROLL for (int j = 0; j < LK_LRPE_ROW_N; j++) {
        const int f = feature + 32 * j;
        if (f >= call.dim) break;
        lk_put(y + f, v[j] * angles.cos[j]);
        lk_put(y + call.dim + f, angles.in_prefix ? 0.0f : v[j] * angles.sin[j]);
    }
}

/* A piece of dy: u and v, 0 beyond the row's end. */
template <class T>
LK_DEVICE void lk_lrpe_load_dy(float (&u)[LK_LRPE_ROW_N], float (&v)[LK_LRPE_ROW_N], const lk_lrpe_call &call, const T *dy,
                               int feature, bool in_prefix)
{
    LK_UNROLL for (int j = 0; j < LK_LRPE_ROW_N; j++) {
        const int f = feature + 32 * j;
        u[j] = v[j] = f < call.dim && !call.read_dy ? 1.0f : 0.0f;
        if (f < call.dim && call.read_dy) u[j] = lk_to_float(dy[f]);
        if (f < call.dim && call.read_dy && !in_prefix) v[j] = lk_to_float(dy[call.dim + f]);
        if (in_prefix) v[j] = 0.0f;
    }
}

/* sum_f g[f] act(x[f]) over a row longer than a piece. It computes the angles once more. */
template <class T>
LK_NOINLINE float lk_lrpe_dot(const lk_lrpe_call &call, const T *x, const T *dy, lk_lse state, int64_t head, int64_t token)
{
    constexpr int Num = LK_LRPE_ROW_N;
    float dot = 0.0f;
    for (int feature = threadIdx.x % 32; feature < call.dim; feature += LK_LRPE_ROW_FEATURES) {
        lk_lrpe_turns<Num> turns;
        lk_lrpe_angles<Num> angles;
        lk_lrpe_load_turns<T, 32>(&turns, call, head, feature);
        lk_lrpe_angles_at<32>(&angles, turns, call, token, feature);
        float act[Num], u[Num], v[Num], g[Num];
        lk_lrpe_load_row(act, x, feature, call.dim, -INFINITY);
        lk_lrpe_normalize(act, state);
        lk_lrpe_load_dy(u, v, call, dy, feature, angles.in_prefix);
        lk_lrpe_rotate_back(g, angles, u, v);
        LK_UNROLL for (int j = 0; j < Num; j++)
            if (feature + 32 * j < call.dim) dot = fmaf(g[j], act[j], dot);
    }
    return lk_sum_warp(dot);
}

/* dx of a piece of a row of this head and token, and its terms of dtheta. */
template <class T>
LK_DEVICE void lk_lrpe_backward_piece(T *dx, const T *dy, const T *x, const lk_lrpe_angles<LK_LRPE_ROW_N> &angles,
                                      lk_lrpe_sums<LK_LRPE_ROW_N> *sums, const lk_lrpe_call &call, int64_t head, int64_t token,
                                      int feature)
{
    constexpr int Num = LK_LRPE_ROW_N;
    float u[Num], v[Num], g[Num], raw[Num] = {}, act[Num];
    lk_lse state = lk_lse_empty();
    lk_lrpe_load_dy(u, v, call, dy, feature, angles.in_prefix);
    if (call.read_x) lk_lrpe_load_row(raw, x, feature, call.dim, -INFINITY);
    LK_UNROLL for (int j = 0; j < Num; j++) act[j] = raw[j];
    lk_lrpe_activate_piece(act, &state, call, x);
    lk_lrpe_rotate_back(g, angles, u, v);
    if (call.partial) lk_lrpe_add_dtheta(sums, angles, act, u, v);
    if (call.activation == LK_MD_LRPE_COSINE_SOFTMAX) {
        float dot = 0.0f;
        LK_UNROLL for (int j = 0; j < Num; j++)
            if (feature + 32 * j < call.dim) dot = fmaf(g[j], act[j], dot);
        dot = call.dim <= LK_LRPE_ROW_FEATURES ? lk_sum_warp(dot) : lk_lrpe_dot(call, x, dy, state, head, token);
        LK_UNROLL for (int j = 0; j < Num; j++) g[j] = act[j] * (g[j] - dot);
    } else {
        lk_lrpe_chain(call.activation, g, raw);
    }
    LK_UNROLL for (int j = 0; j < Num; j++)
        if (call.write_dx && feature + 32 * j < call.dim) lk_put(dx + feature + 32 * j, g[j]);
}

template <class T, bool Backward>
LK_KERNEL void __launch_bounds__(LK_LRPE_THREADS, Backward ? LK_LRPE_DTHETA_BLOCKS : 6)
    lk_lrpe_row_kernel(const __grid_constant__ lk_lrpe_call call)
{
    constexpr int Num = LK_LRPE_ROW_N;
    const lk_lrpe_item item = lk_lrpe_find_item(call, (int64_t)blockIdx.x * (LK_LRPE_THREADS / 32) + threadIdx.x / 32);
    lk_griddepcontrol_wait();
    if (!item.owner) return;
    for (int feature = threadIdx.x % 32; feature - (int)(threadIdx.x % 32) < call.dim; feature += LK_LRPE_ROW_FEATURES) {
        lk_lrpe_turns<Num> turns;
        lk_lrpe_angles<Num> angles;
        lk_lrpe_sums<Num> sums = {};
        lk_lrpe_load_turns<T, 32>(&turns, call, item.head, feature);
        int64_t token = item.token;
        for (int o = 0; o < item.tokens; o++, token += call.token_step) {
            lk_lrpe_angles_at<32>(&angles, turns, call, token, feature);
            for (int64_t batch = item.batch; batch < item.batch + item.batches; batch++) {
                const T *in = (const T *)call.in + lk_lrpe_offset(call.in_stride, batch, item.head, token);
                T *out = (T *)call.out + lk_lrpe_offset(call.out_stride, batch, item.head, token);
                const T *x = Backward ? (const T *)call.x + lk_lrpe_offset(call.x_stride, batch, item.head, token) : in;
                if (Backward) lk_lrpe_backward_piece(out, in, x, angles, &sums, call, item.head, token, feature);
                else lk_lrpe_forward_piece(out, x, angles, call, feature);
            }
        }
        LK_UNROLL for (int j = 0; j < Num; j++) {
            const int f = feature + 32 * j;
            if (Backward && call.partial && f < call.dim)
                call.partial[(item.slot * call.heads + item.head) * call.dim + f] = sums.of[j];
        }
    }
    lk_griddepcontrol_launch_dependents();
}

template <class T, bool backward>
LK_HOST lk_status lk_lrpe_launch_rows(const char *op, const lk_device *device, const lk_md_lrpe_cosine_args &a,
                                      const lk_lrpe_split &split, cudaStream_t stream)
{
    lk_lrpe_call call = {};
    lk_lrpe_start_call<T>(&call, a, backward);
    lk_lrpe_assign_items<T>(&call, a, device->sms, false, split, 1);
    void (*const kernel)(lk_lrpe_call) = lk_lrpe_row_kernel<T, backward>;
    return lk_launch_pdl(op, device, kernel, lk_ceil_div(call.items, LK_LRPE_THREADS / 32), 1, LK_LRPE_THREADS, 0, stream, call);
}

/* ---- Softmax over tokens ------------------------------------------------------------------------------------------------- */

/* A column is all tokens of a batch, head and feature. The first kernel splits its tokens among threads, which add them up. The
 * second one merges the splits. The third one writes y, or dx and dtheta's partial sums. */

#define LK_LRPE_LAZY 2.0f

typedef struct {
    lk_lrpe_call call;
    lk_lrpe_column *states; /* [batch, split, head, feature]; split 0 has the merged ones in the end */
    int64_t splits;
} lk_lrpe_columns_call;

/* u, v and g of a token. */
template <class T, int Num>
LK_DEVICE void lk_lrpe_unpack_dy(float (&u)[Num], float (&v)[Num], float (&g)[Num], const lk_lrpe_step<T, true> &step,
                                 const lk_lrpe_angles<Num> &angles, const lk_lrpe_call &call)
{
    lk_unpack_n(u, step.first), lk_unpack_n(v, step.second);
    LK_UNROLL for (int j = 0; j < Num && !call.read_dy; j++) u[j] = v[j] = 1.0f;
    lk_lrpe_rotate_back(g, angles, u, v);
}

/* Adds Vecs tokens to the states of Num columns. An x of -inf with g = 0 adds nothing. */
template <bool Backward, int Vecs, int Num>
LK_DEVICE void lk_lrpe_add_tokens(lk_lrpe_column (&to)[Num], lk_lrpe_column (&lost)[Num], const float (&x)[Vecs][Num],
                                  const float (&g)[Vecs][Num])
{
    LK_UNROLL for (int j = 0; j < Num; j++) {
        float most = x[0][j], sum = 0.0f, dot = 0.0f;
        LK_UNROLL for (int u = 1; u < Vecs; u++) most = fmaxf(most, x[u][j]);
        const float max = most > to[j].max + LK_LRPE_LAZY ? most : to[j].max, reference = lk_lse_reference(max);
        const float factor = lk_exp(to[j].max - reference); /* 1, unless max is raised */
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            const float e = lk_exp(x[u][j] - reference);
            sum += e;
            if (Backward) dot = fmaf(g[u][j], e, dot);
        }
        to[j].max = max, to[j].sum *= factor, lost[j].sum *= factor;
        lk_lrpe_add(&to[j].sum, &lost[j].sum, sum);
        if (!Backward) continue;
        to[j].dot *= factor, lost[j].dot *= factor;
        lk_lrpe_add(&to[j].dot, &lost[j].dot, dot);
    }
}

/* Writes y of a token, or dx, and adds its terms of dtheta. x becomes act(x). Forward has no dy: u, v are y[f], y[dim + f]. */
template <bool Backward, class T, int Num>
LK_DEVICE void lk_lrpe_write_token(T *out, float (&x)[Num], const lk_lrpe_step<T, true> &step, const lk_lrpe_column (&of)[Num],
                                   const lk_lrpe_angles<Num> &angles, lk_lrpe_sums<Num> *sums, const lk_lrpe_call &call)
{
    float u[Num], v[Num], g[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) x[j] = of[j].sum * lk_exp(x[j] - of[j].max);
    if (Backward) {
        lk_lrpe_unpack_dy(u, v, g, step, angles, call);
        if (call.partial) lk_lrpe_add_dtheta(sums, angles, x, u, v);
        LK_UNROLL for (int j = 0; j < Num; j++) g[j] = x[j] * (g[j] - of[j].dot);
        if (call.write_dx) lk_store_n<true>(out, g);
    } else {
        LK_UNROLL for (int j = 0; j < Num; j++) u[j] = x[j] * angles.cos[j], v[j] = angles.in_prefix ? 0.0f : x[j] * angles.sin[j];
        lk_store_n<true>(out, u), lk_store_n<true>(out + call.dim, v);
    }
}

/* A thread owns an item, Num features of a head, and loads Vecs tokens at a time. Write: the third kernel; otherwise the first. */
template <class T, int Num, bool Backward, bool Write>
LK_KERNEL void __launch_bounds__(LK_LRPE_THREADS, Backward || Write ? LK_LRPE_DTHETA_BLOCKS : 4)
    lk_lrpe_columns_kernel(const __grid_constant__ lk_lrpe_columns_call columns)
{
    constexpr int Vecs = Backward ? 2 : 4;
    const lk_lrpe_call &call = columns.call;
    const lk_lrpe_item item = lk_lrpe_find_item(call, (int64_t)blockIdx.x * LK_LRPE_THREADS + threadIdx.x);
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    if (!item.owner) return;
    const int feature = item.lane * Num;
    lk_lrpe_turns<Num> turns;
    lk_lrpe_angles<Num> angles;
    lk_lrpe_sums<Num> sums = {};
    if (Backward || Write) lk_lrpe_load_turns<T, 1>(&turns, call, item.head, feature);
    LK_NO_UNROLL for (int64_t batch = item.batch; batch < item.batch + item.batches; batch++) {
        const T *in = (const T *)call.in + lk_lrpe_offset(call.in_stride, batch, item.head, item.token) + feature, *x = in;
        if (Backward) x = (const T *)call.x + lk_lrpe_offset(call.x_stride, batch, item.head, item.token) + feature;
        T *out = (T *)call.out + lk_lrpe_offset(call.out_stride, batch, item.head, item.token) + feature;
        const int64_t row = (batch * columns.splits + (Write ? 0 : item.token)) * call.heads + item.head;
        lk_lrpe_column column[Num], lost[Num] = {};
        LK_UNROLL
        for (int j = 0; j < Num; j++)
            column[j] = Write ? columns.states[row * call.dim + feature + j] : lk_lrpe_column{-INFINITY, 0, 0};
        int64_t token = item.token;
        LK_NO_UNROLL for (int i = 0; i < item.tokens; i += Vecs) {
            lk_lrpe_step<T, true> step[Vecs] = {};
            float value[Vecs][Num], g[Vecs][Num] = {};
            LK_UNROLL for (int u = 0; u < Vecs; u++, x += Backward ? call.x_stride[3] : call.in_stride[3], in += call.in_stride[3]) {
                if (i + u >= item.tokens) continue;
                step[u].x = lk_load_n<Num, true>(x);
                if (!Backward || !call.read_dy) continue;
                step[u].first = lk_load_n<Num, true>(in);
                if (token + u * call.token_step >= call.grid.prefix) step[u].second = lk_load_n<Num, true>(in + call.dim);
            }
            LK_UNROLL for (int u = 0; u < Vecs; u++, token += call.token_step, out += call.out_stride[3]) {
                const bool there = i + u < item.tokens;
                float first[Num], second[Num];
                lk_unpack_n(value[u], step[u].x);
                if ((Backward || Write) && there) lk_lrpe_angles_at<1>(&angles, turns, call, token, feature);
                if (Write && there) lk_lrpe_write_token<Backward>(out, value[u], step[u], column, angles, &sums, call);
                if (Backward && !Write && there) lk_lrpe_unpack_dy(first, second, g[u], step[u], angles, call);
                LK_UNROLL for (int j = 0; j < Num; j++) value[u][j] = there ? value[u][j] : -INFINITY;
            }
            if (!Write) lk_lrpe_add_tokens<Backward>(column, lost, value, g);
        }
        LK_UNROLL for (int j = 0; j < Num && !Write; j++) columns.states[row * call.dim + feature + j] = column[j];
    }
    LK_UNROLL for (int j = 0; j < Num; j++)
        if (Backward && Write && call.partial)
            call.partial[(item.slot * call.heads + item.head) * call.dim + feature + j] = sums.of[j];
}

/* The merged state of a column, as lk_lrpe_column says. */
LK_DEVICE void lk_lrpe_finish(lk_lrpe_column *all)
{
    all->sum = lk_is_finite(all->max) ? __frcp_rn(all->sum) : NAN;
    all->dot *= all->sum;
}

/* A thread owns a column and merges its splits. */
LK_KERNEL void __launch_bounds__(LK_LRPE_THREADS) lk_lrpe_merge_kernel(const __grid_constant__ lk_lrpe_columns_call columns)
{
    const int64_t row = columns.call.heads * columns.call.dim, at = (int64_t)blockIdx.x * LK_LRPE_THREADS + threadIdx.x;
    const int64_t batch = at / row;
    lk_lrpe_column *const first = columns.states + batch * columns.splits * row + (at - batch * row);
    lk_lrpe_column all = {-INFINITY, 0.0f, 0.0f}, lost = {};
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    if (batch >= columns.call.batch) return;
    for (int64_t split = 0; split < columns.splits; split++) all.max = fmaxf(all.max, first[split * row].max);
    const float reference = lk_lse_reference(all.max);
    for (int64_t split = 0; split < columns.splits; split++) {
        const lk_lrpe_column part = first[split * row];
        const float factor = lk_exp(part.max - reference);
        lk_lrpe_add(&all.sum, &lost.sum, factor * part.sum);
        lk_lrpe_add(&all.dot, &lost.dot, factor * part.dot);
    }
    lk_lrpe_finish(&all);
    *first = all;
}

/* Softmax over tokens: the three kernels. The first one's items are splits of columns, the third one's a few tokens, or with
 * dtheta those of its slots. */
template <class T, int Num, bool backward>
LK_HOST lk_status lk_lrpe_launch_columns(const char *op, const lk_device *device, const lk_md_lrpe_cosine_args &a,
                                         const lk_lrpe_split &split, cudaStream_t stream)
{
    lk_lrpe_columns_call columns = {{}, (lk_lrpe_column *)((char *)a.workspace + split.columns), split.splits};
    const int64_t lanes = a.dim / Num, count = a.batch * a.heads * a.dim;
    const int threads = LK_LRPE_THREADS;
    lk_lrpe_start_call<T>(&columns.call, a, backward);
    columns.call.vecs = (int)lanes, columns.call.token_step = split.splits, columns.call.batch_span = 1;
    lk_lrpe_number_items(&columns.call, a, lanes, true, 1);
    void (*kernel)(lk_lrpe_columns_call) = lk_lrpe_columns_kernel<T, Num, backward, false>;
    lk_status status = lk_launch_pdl(op, device, kernel, lk_ceil_div(columns.call.items, threads), 1, threads, 0, stream, columns);
    if (!status)
        status = lk_launch_pdl(op, device, lk_lrpe_merge_kernel, lk_ceil_div(count, threads), 1, threads, 0, stream, columns);
    if (status) return status;
    int64_t each = lk_count(count / Num, columns.call.tokens) / ((int64_t)device->sms * LK_LRPE_FILL); /* tokens of an item */
    each = each < 1 ? 1 : each > LK_LRPE_TOKENS_MOST ? LK_LRPE_TOKENS_MOST : each;
    columns.call.token_step = a.dtheta ? split.token_step : lk_ceil_div(columns.call.tokens, each);
    columns.call.batch_span = a.dtheta ? split.batch_span : 1;
    lk_lrpe_number_items(&columns.call, a, lanes, true, 1);
    kernel = lk_lrpe_columns_kernel<T, Num, backward, true>;
    return lk_launch_pdl(op, device, kernel, lk_ceil_div(columns.call.items, threads), 1, threads, 0, stream, columns);
}

/* ---- Softmax over tokens, where shared memory holds the columns ------------------------------------------------------------ */

/* A cluster has a slab: all tokens of two or four vectors of a batch and head. Its threads copy x, and in backward dy, to shared
 * memory, and add up the columns on the way. They merge their states, then write. So x and dy are read once. In backward g
 * takes the place of dy, so that its angles are computed once. A thread has a vector of the tokens first, first + token_step,
 * ..., whose angles walk along as those of lk_lrpe_kernel. */
#define LK_LRPE_SLAB_THREADS 256
#define LK_LRPE_SLAB_WARPS (LK_LRPE_SLAB_THREADS / 32)
#define LK_LRPE_SLAB_BLOCKS(Backward) (Backward ? 2 : 3) /* per SM: one computes while another one waits */
#define LK_LRPE_SLAB_TOKENS 32 /* the most of a thread: they bound the error of its angles, 2.4e-8 */
#define LK_LRPE_SLAB_U 4       /* tokens that a thread adds to its columns at once */
#define LK_LRPE_SLAB_AHEAD 2   /* as many groups of Vecs tokens are on their way to shared memory */

typedef struct {
    lk_lrpe_call call;
    lk_lrpe_divisor slabs, heads; /* slabs: of a batch and head */
    int cluster_log2;             /* of the blocks of a cluster */
    int each;                     /* the most tokens of a thread */
} lk_lrpe_slab_call;

/* A thread's first token, how many it has (count), and its features. Width: the vectors that a slab has of a token. */
template <class T, int Width> LK_DEVICE lk_lrpe_item lk_lrpe_find_slab(const lk_lrpe_slab_call &slab)
{
    constexpr int Team = 32 / Width; /* lanes of a warp with the same features */
    const int thread = (int)lk_tid_x(), warp = (int)lk_cluster_ctarank() * LK_LRPE_SLAB_WARPS + thread / 32;
    const int unit = (int)blockIdx.x >> slab.cluster_log2, row = lk_lrpe_divide(unit, slab.slabs);
    const int batch = lk_lrpe_divide(row, slab.heads);
    lk_lrpe_item item = {};
    item.batch = batch, item.head = row - batch * (int)slab.heads.size, item.token = warp * Team + thread % Team;
    item.lane = (unit - row * (int)slab.slabs.size) * Width + thread % 32 / Team;
    item.owner = item.lane < slab.call.vecs && item.token < slab.call.token_step;
    item.feature = item.owner ? item.lane * LK_VEC<T> : 0;
    item.tokens = slab.each;
    if (item.owner) item.count = slab.each - (item.token + (slab.each - 1) * slab.call.token_step >= slab.call.tokens);
    return item;
}

/* theta of a thread's features. A warp has at most 32 features: a lane computes one of them for all. */
template <class T, int Width, int Num>
LK_DEVICE void lk_lrpe_share_turns(lk_lrpe_turns<Num> *turns, const lk_lrpe_call &call, const lk_lrpe_item &item)
{
    const int lane = threadIdx.x % 32, vec = lane / (32 / Width);
    lk_lrpe_turns<1> one;
    lk_lrpe_load_turns<T, 1>(&one, call, item.head, (item.lane - vec) * Num + lane % (Width * Num));
    LK_UNROLL for (int j = 0; j < Num; j++) {
        turns->of[j].high = __shfl_sync(0xffffffffu, one.of[0].high, vec * Num + j);
        turns->of[j].low = __shfl_sync(0xffffffffu, one.of[0].low, vec * Num + j);
    }
    turns->not_finite = __ballot_sync(0xffffffffu, one.not_finite != 0) >> vec * Num & ((1u << Num) - 1);
}

/* What a thread copies to shared memory next. There are [token][part][thread] vectors. The parts are x, and in backward dy or
 * g. */
template <class T, bool Backward> struct lk_lrpe_next {
    static constexpr int Part = LK_LRPE_SLAB_THREADS, Token = Part * (Backward ? 3 : 1);
    lk_vec<T> *to;
    const T *in, *x;
    int k; /* of its tokens, which one */
};

/* Starts to copy Vecs of the thread's tokens. It has `count` in all, and `prefix` of them are in the prefix. */
template <int Vecs, class T, bool Backward>
LK_DEVICE void lk_lrpe_copy(lk_lrpe_next<T, Backward> *next, const lk_lrpe_call &call, int count, int prefix)
{
    constexpr int Part = lk_lrpe_next<T, Backward>::Part * 16;
    const bool any = next->k < count; /* the waits count groups without copies too */
    LK_UNROLL
    for (int u = 0; u < Vecs && any; u++, next->k++, next->in += call.in_stride[3], next->x += call.x_stride[3]) {
        if (next->k >= count) continue;
        lk_cp_async_16(next->to, u * next->Token * 16, next->x);
        if (!Backward || !call.read_dy) continue;
        lk_cp_async_16(next->to, u * next->Token * 16 + Part, next->in);
        if (next->k >= prefix) lk_cp_async_16(next->to, u * next->Token * 16 + 2 * Part, next->in + call.dim);
    }
    next->to += Vecs * next->Token;
    lk_cp_async_commit_group();
}

/* Merges the states of `team` consecutive lanes, a power of two. All lanes call it; every lane of a team gets the result. */
template <bool Backward> LK_DEVICE lk_lrpe_column lk_lrpe_merge_lanes(lk_lrpe_column of, int team)
{
    const float max = lk_max_warp(of.max, team), factor = lk_exp(of.max - lk_lse_reference(max));
    return {max, lk_sum_warp(factor * of.sum, team), Backward ? lk_sum_warp(factor * of.dot, team) : 0.0f};
}

/* Merges the states of the columns of a slab over the cluster. */
template <int Width, bool Backward, int Pieces>
LK_DEVICE void lk_lrpe_merge_slab(lk_lrpe_column (&column)[Pieces][4], lk_lrpe_column *states)
{
    constexpr int Num = 4 * Pieces, Warps = LK_LRPE_SLAB_WARPS, Team = 32 / Width, Columns = Width * Num;
    const int blocks = (int)lk_cluster_nctarank(), rank = (int)lk_cluster_ctarank(), vec = threadIdx.x % 32 / Team;
    const int mine = threadIdx.x / Warps, nth = threadIdx.x % Warps; /* Warps threads merge a column */
    lk_lrpe_column *const inbox = states + Warps * Columns;
    const lk_lrpe_column none = {-INFINITY, 0.0f, 0.0f};
    LK_UNROLL for (int j = 0; j < Num; j++) {
        lk_lrpe_column *const of = &column[j / 4][j % 4];
        *of = lk_lrpe_merge_lanes<Backward>(*of, Team);
        if (threadIdx.x % Team == 0) states[threadIdx.x / 32 * Columns + vec * Num + j] = *of;
    }
    __syncthreads(); /* all warps have written their states */
    lk_lrpe_column all = mine < Columns ? states[nth * Columns + mine] : none;
    all = lk_lrpe_merge_lanes<Backward>(all, Warps);
    lk_cluster_ready();
    lk_lrpe_column *const slot = inbox + rank * Columns + mine;
    if (mine < Columns && nth < blocks) *(blocks > 1 ? (lk_lrpe_column *)lk_mapa(slot, (unsigned)nth) : slot) = all;
    if (blocks > 1) lk_cluster_sync(); /* orders the writes into every block's inbox before their reads */
    else __syncthreads();              /* the same in one block */
    all = mine < Columns && nth < blocks ? inbox[nth * Columns + mine] : none;
    all = lk_lrpe_merge_lanes<Backward>(all, Warps);
    lk_lrpe_finish(&all);
    if (mine < Columns && nth == 0) states[mine] = all;
    __syncthreads(); /* orders these writes before their reads */
    LK_UNROLL for (int j = 0; j < Num; j++) column[j / 4][j % 4] = states[vec * Num + j];
}

template <class T, int Width, bool Backward>
LK_KERNEL void __launch_bounds__(LK_LRPE_SLAB_THREADS, LK_LRPE_SLAB_BLOCKS(Backward))
    lk_lrpe_slab_kernel(const __grid_constant__ lk_lrpe_slab_call slab)
{
    constexpr int Num = LK_VEC<T>, Vecs = LK_LRPE_SLAB_U, Span = LK_LRPE_SLAB_AHEAD, Part = LK_LRPE_SLAB_THREADS;
    constexpr int Token = lk_lrpe_next<T, Backward>::Token;
    LK_DYN_SMEM(lk_vec<T>, memory); /* the vectors, and after them the states of columns */
    const lk_lrpe_call &call = slab.call;
    const lk_lrpe_item item = lk_lrpe_find_slab<T, Width>(slab);
    lk_lrpe_next<T, Backward> next = {
        &memory + threadIdx.x,
        (const T *)call.in + lk_lrpe_offset(call.in_stride, item.batch, item.head, item.token) + item.feature,
        (const T *)call.x + lk_lrpe_offset(call.x_stride, item.batch, item.head, item.token) + item.feature, 0};
    lk_vec<T> *at = next.to;
    lk_lrpe_phases<T, true> phases;
    lk_lrpe_angles<Num> angles;
    lk_lrpe_start_phases(&phases, call, item);
    lk_cluster_begin();
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    LK_UNROLL for (int s = 0; s < Span; s++) lk_lrpe_copy<Vecs>(&next, call, item.count, phases.prefix);
    lk_lrpe_turns<Num> turns;
    lk_lrpe_share_turns<T, Width>(&turns, call, item);
    lk_lrpe_turn_phases<true>(&phases, turns, call);
    lk_lrpe_column column[Num / 4][4], lost[Num / 4][4] = {};
    LK_UNROLL for (int j = 0; j < Num; j++) column[j / 4][j % 4] = {-INFINITY, 0.0f, 0.0f};
    LK_NO_UNROLL for (int k = 0; k < slab.each; k += Vecs, at += Vecs * Token) {
        lk_cp_async_wait_group<Span - 1>();
        LK_UNROLL for (int u = 0; u < Vecs && Backward; u++) {
            if (k + u >= item.count) continue;
            float first[Num], second[Num], g[Num];
            lk_lrpe_step<T, true> dy = {};
            if (call.read_dy) dy.first = at[u * Token + Part];
            if (call.read_dy && k + u >= phases.prefix) dy.second = at[u * Token + 2 * Part];
            lk_lrpe_walk(&angles, &phases, k + u < phases.prefix);
            lk_lrpe_unpack_dy(first, second, g, dy, angles, call);
            LK_UNROLL for (int i = 0; i < Num / 4; i++) memcpy(at + u * Token + (1 + i) * Part, &g[4 * i], 16);
        }
        lk_lrpe_copy<Vecs>(&next, call, item.count, phases.prefix);
        LK_UNROLL for (int i = 0; i < Num / 4; i++) {
            float value[Vecs][4], g[Vecs][4] = {}, all[Num];
            LK_UNROLL for (int u = 0; u < Vecs; u++) {
                LK_UNROLL for (int j = 0; j < 4; j++) value[u][j] = -INFINITY;
                if (k + u >= item.count) continue;
                lk_unpack(all, at[u * Token]);
                LK_UNROLL for (int j = 0; j < 4; j++) value[u][j] = all[4 * i + j];
                if (Backward) memcpy(g[u], at + u * Token + (1 + i) * Part, 16);
            }
            lk_lrpe_add_tokens<Backward>(column[i], lost[i], value, g);
        }
    }
    lk_lrpe_merge_slab<Width, Backward>(column, (lk_lrpe_column *)(&memory + slab.each * Token));
    const lk_lrpe_item to = lk_lrpe_find_slab<T, Width>(slab); /* once more: the loop above needs the registers */
    T *out = (T *)call.out + lk_lrpe_offset(call.out_stride, to.batch, to.head, to.token) + to.feature;
    at = &memory + threadIdx.x;
    LK_NO_UNROLL for (int k = 0; k < to.count; k++, at += Token, out += call.out_stride[3]) {
        float act[Num], g[Num];
        lk_unpack(act, at[0]);
        LK_UNROLL for (int j = 0; j < Num; j++) act[j] = column[j / 4][j % 4].sum * lk_exp(act[j] - column[j / 4][j % 4].max);
        if (Backward) {
            LK_UNROLL for (int i = 0; i < Num / 4; i++) memcpy(&g[4 * i], at + (1 + i) * Part, 16);
            LK_UNROLL for (int j = 0; j < Num; j++) g[j] = act[j] * (g[j] - column[j / 4][j % 4].dot);
            lk_store_n<true>(out, g);
        } else {
            lk_lrpe_walk(&angles, &phases, k < phases.prefix);
            lk_lrpe_write_y(out, act, angles, call);
        }
    }
}

/* Divides the work into slabs of Width vectors of a token; clusters are as small as possible, and grow while there are few blocks.
 * Returns the bytes of a block's shared memory, or 0 where no slab fits. */
template <class T>
LK_HOST size_t lk_lrpe_plan_slabs(lk_lrpe_slab_call *slab, const lk_device *device, const lk_md_lrpe_cosine_args &a,
                                  bool backward, int Width)
{
    lk_lrpe_start_call<T>(&slab->call, a, backward);
    LK_LRPE_SET_STRIDES(slab->call.x_stride, x);
    const int64_t vecs = a.dim / LK_VEC<T>, tokens = slab->call.tokens, cells = slab->call.grid.stride[slab->call.walk_axis].size;
    const int64_t limit = device->smem * 1024 / LK_LRPE_SLAB_BLOCKS(backward) - 1024; /* 1 KiB is the system's */
    const int64_t slabs = lk_ceil_div(vecs, Width);
    const int most_log2 = device->arch >= 90 ? 3 : 0;
    if (a.dtheta || tokens < LK_LRPE_SLAB_THREADS / 4 || Width >= 2 * vecs) return 0;
    for (int log2 = 0; log2 <= most_log2; log2++) {
        const int64_t slots = (LK_LRPE_SLAB_THREADS << log2) / Width, step = slots / cells * cells;
        const int64_t each = step ? lk_ceil_div(tokens, step) : tokens, blocks = a.batch * a.heads * slabs << log2;
        if (each > LK_LRPE_SLAB_TOKENS || blocks > INT32_MAX) continue;
        const int64_t states = (LK_LRPE_SLAB_WARPS + (1 << log2)) * Width * LK_VEC<T>;
        const int64_t bytes = each * LK_LRPE_SLAB_THREADS * (backward ? 48 : 16) + states * (int)sizeof(lk_lrpe_column);
        if (bytes > limit || (log2 < most_log2 && each > LK_LRPE_SLAB_U && blocks < 2 * device->sms)) continue;
        slab->cluster_log2 = log2, slab->each = (int)each;
        slab->slabs = lk_lrpe_make_divisor(slabs), slab->heads = lk_lrpe_make_divisor(a.heads);
        slab->call.token_step = step, slab->call.batch_span = 1, slab->call.walk = (int)(step / cells);
        lk_lrpe_number_items(&slab->call, a, vecs, true, 1);
        slab->call.vecs = (int)vecs;
        return (size_t)bytes;
    }
    return 0;
}

/* Launches slabs of Width vectors, or of 2. *done: whether any fit. Slabs of one vector are slower than two readings. */
template <class T, int Width, bool backward>
LK_HOST lk_status lk_lrpe_launch_slabs(const char *op, const lk_device *device, const lk_md_lrpe_cosine_args &a,
                                       cudaStream_t stream, bool *done)
{
    lk_lrpe_slab_call slab = {};
    const size_t bytes = lk_lrpe_plan_slabs<T>(&slab, device, a, backward, Width);
    *done = bytes > 0;
    if (!*done) {
        if constexpr (Width > 2) return lk_lrpe_launch_slabs<T, Width / 2, backward>(op, device, a, stream, done);
        return LK_OK;
    }
    const int64_t grid = a.batch * a.heads * slab.slabs.size << slab.cluster_log2;
    return lk_launch_pdl(op, device, lk_lrpe_slab_kernel<T, Width, backward>, grid, 1 << slab.cluster_log2, LK_LRPE_SLAB_THREADS,
                         bytes, stream, slab);
}

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

#define LK_LRPE_TENSOR(name, use, width)                                                                                       \
    {#name, a->name, sizeof(T), use, width,                                                                                    \
     {{a->batch, &a->name##_batch_stride, #name "_batch_stride"}, {a->heads, &a->name##_head_stride, #name "_head_stride"},    \
      {tokens, &a->name##_token_stride, #name "_token_stride"}}}

/* Validates. a becomes the arguments with every default filled in, the path too. x and dtheta become NULL where the call does
 * not have them. device: as in lk_check_begin. */
template <class T>
LK_HOST lk_status lk_md_lrpe_cosine_check(const char *op, const lk_md_lrpe_cosine_args *args, lk_direction direction,
                                          lk_device *device, lk_md_lrpe_cosine_args *a, lk_lrpe_split *split)
{
    *a = *args;
    const bool query = !device, backward = direction == LK_BACKWARD;
    a->axes = a->axes < 1 || a->axes > 8 ? 1 : a->axes; /* what was given is checked below */
    if (a->e == 0) a->e = a->dim / a->axes + (a->dim % a->axes != 0);
    if (a->theta_heads == 0) a->theta_heads = a->heads;
    if (a->theta_features == 0) a->theta_features = a->e;
    if (!backward) a->dtheta = NULL;
    const bool reads_x = !backward || a->dtheta || a->activation;
    if (!reads_x) a->x = NULL;
    const int64_t tokens = lk_lrpe_tokens(a), wide = lk_count(2, a->dim);
    const int64_t theta = lk_count(a->theta_heads, a->theta_features);
    lk_tensor list[] = {
        LK_LRPE_TENSOR(x, reads_x ? LK_REQUIRED | LK_MAY_OVERLAP : LK_UNUSED, a->dim),
        {"theta", a->theta, lk_dtype_bytes<T>(a->theta_dtype), LK_REQUIRED, a->batch && a->heads && tokens ? theta : 0},
        {"offset_device", a->offset_device, 4, LK_IN, a->axes},
        LK_LRPE_TENSOR(y, backward ? LK_UNUSED : LK_OUT | LK_REQUIRED, wide),
        LK_LRPE_TENSOR(dy, backward ? LK_MAY_OVERLAP : LK_UNUSED, wide),
        LK_LRPE_TENSOR(dx, backward ? LK_OUT : LK_UNUSED, a->dim),
        {"dtheta", a->dtheta, 4, backward ? LK_OUT : LK_UNUSED, theta},
        lk_workspace(a->workspace, 0), /* its size is known below */
    };
    static const char *const shape[8] = {"shape[0]", "shape[1]", "shape[2]", "shape[3]",
                                         "shape[4]", "shape[5]", "shape[6]", "shape[7]"};
    const int count = lk_used_tensors(list, LK_COUNT(list));
    lk_checks checks = lk_check_begin(op, device);
    lk_check_size(&checks, "axes", args->axes, 0, 8);
    lk_check_size(&checks, "batch", a->batch, 0, INT64_MAX);
    lk_check_size(&checks, "heads", a->heads, 0, INT64_MAX);
    lk_check_size(&checks, "dim", a->dim, 1, (int64_t)1 << 30);
    lk_check_size(&checks, "e", a->e, lk_ceil_div(a->dim, a->axes), INT64_MAX);
    if (a->theta_heads != 1 && a->theta_heads != a->heads)
        lk_reject(&checks, LK_ERR_SHAPE, "theta_heads is %lld; it must be 0, 1 or %lld", (long long)a->theta_heads,
                  (long long)a->heads);
    if (a->theta_features != 1 && a->theta_features != a->e)
        lk_reject(&checks, LK_ERR_SHAPE, "theta_features is %lld; it must be 0, 1 or %lld", (long long)a->theta_features,
                  (long long)a->e);
    lk_check_size(&checks, "prefix", a->prefix, 0, INT64_MAX);
    for (int i = 0; i < a->axes && !checks.status; i++) lk_check_size(&checks, shape[i], a->shape[i], 0, INT64_MAX);
    lk_check_shapes(&checks, list, count, query);
    if (!query && !checks.status) checks.status = lk_lrpe_split_work(op, a, device->sms, split);
    list[count - 1].width = (int64_t)split->bytes;
    if (!query) lk_check_overlap(&checks, list, count); /* once more, with the workspace */
    const int64_t limit = (int64_t)1 << 31;
    for (int i = 0; i < a->axes && !checks.status && tokens > a->prefix; i++) /* a grid without cells has no positions */
        if (a->offset[i] <= -limit || a->offset[i] >= limit || a->shape[i] > limit || a->offset[i] + a->shape[i] > limit)
            lk_reject(&checks, LK_ERR_VALUE, "offset[%d] %lld and shape[%d] %lld make a position outside (-2^31, 2^31)", i,
                      (long long)a->offset[i], i, (long long)a->shape[i]);
    lk_check_dtype<T>(&checks, "theta_dtype", a->theta_dtype);
    lk_check_enum(&checks, "activation", a->activation, LK_MD_LRPE_COSINE_SOFTMAX_TOKENS,
                  "LK_MD_LRPE_COSINE_NONE to SOFTMAX_TOKENS");
    lk_check_enum(&checks, "path", a->path, LK_MD_LRPE_COSINE_ROW, "LK_MD_LRPE_COSINE_*");
    if (checks.status) return checks.status;
    const bool softmax = a->activation == LK_MD_LRPE_COSINE_SOFTMAX;
    bool vector = a->dim % LK_VEC<T> == 0 && !(softmax && a->dim > 32 * LK_VEC<T>);
    for (int i = 0; i < count; i++)
        for (int d = 0; d < 3 && list[i].dim[d].stride; d++)
            vector = vector && *list[i].dim[d].stride % LK_VEC<T> == 0 && (query || (uintptr_t)list[i].pointer % 16 == 0);
    if (a->path == LK_MD_LRPE_COSINE_VECTOR && !vector)
        lk_reject(&checks, LK_ERR_PATH, "path %d (vector) needs dim, strides and pointers that are multiples of 16 bytes%s",
                  a->path, softmax ? ", and for softmax dim of 512 bytes at most" : "");
    if (a->path == LK_MD_LRPE_COSINE_AUTO) a->path = vector ? LK_MD_LRPE_COSINE_VECTOR : LK_MD_LRPE_COSINE_ROW;
    lk_check_workspace(&checks, a->workspace, a->workspace_bytes, split->bytes);
    lk_check_end(&checks, list, count);
    lk_check_warn(&checks, a->batch == 0, "batch is 0; nothing is computed");
    lk_check_warn(&checks, a->heads == 0, "heads is 0; nothing is computed");
    lk_check_warn(&checks, tokens == 0, "there are no tokens; nothing is computed");
    return checks.status;
}

/* ---- The calls, and the workspace ---------------------------------------------------------------------------------------- */

template <class T, bool backward>
LK_HOST lk_status lk_lrpe_launch(const char *op, const lk_device *device, const lk_md_lrpe_cosine_args &a,
                                 const lk_lrpe_split &split, cudaStream_t stream)
{
    const bool vector = a.path == LK_MD_LRPE_COSINE_VECTOR;
    if (a.activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS) {
        bool done = false;
        const lk_status status = vector ? lk_lrpe_launch_slabs<T, 4, backward>(op, device, a, stream, &done) : LK_OK;
        return done     ? status
               : vector ? lk_lrpe_launch_columns<T, LK_VEC<T>, backward>(op, device, a, split, stream)
                        : lk_lrpe_launch_columns<T, 1, backward>(op, device, a, split, stream);
    }
    return vector ? lk_lrpe_launch_vectors<T, backward>(op, device, a, split, stream)
                  : lk_lrpe_launch_rows<T, backward>(op, device, a, split, stream);
}

/* Forward has no dtheta: the check takes it away. */
template <class T, lk_direction direction>
LK_HOST lk_status lk_md_lrpe_cosine_run(const char *op, const lk_md_lrpe_cosine_args *args, cudaStream_t stream)
{
    lk_md_lrpe_cosine_args a = {};
    lk_lrpe_split split = {};
    lk_device device = {};
    lk_status status = lk_md_lrpe_cosine_check<T>(op, args, direction, &device, &a, &split);
    if (!status && a.batch > 0 && a.heads > 0 && lk_lrpe_tokens(&a) > 0)
        status = lk_lrpe_launch<T, direction == LK_BACKWARD>(op, &device, a, split, stream);
    if (status || !a.dtheta || a.theta_heads == 0) return status;
    return lk_lrpe_sum_dtheta(op, &device, a, split.slots, stream);
}

template <class T>
LK_HOST lk_status lk_md_lrpe_cosine_query(const char *op, const lk_md_lrpe_cosine_args *args, lk_direction direction,
                                          size_t *bytes)
{
    lk_md_lrpe_cosine_args a = {};
    lk_lrpe_split split = {};
    lk_device device = {};
    lk_status status = lk_md_lrpe_cosine_check<T>(op, args, direction, NULL, &a, &split);
    if (!status && (a.dtheta || a.activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS))
        status = lk_asked_device(op, lk_current_device(&device));
    if (!status) status = lk_lrpe_split_work(op, &a, device.sms, &split);
    if (!status && bytes) *bytes = split.bytes;
    return status;
}

#endif /* CUDA or the simulator */
#endif
