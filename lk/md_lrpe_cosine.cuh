// SPDX-License-Identifier: MIT
/* md_lrpe_cosine.cuh - linearised relative positional encoding, cosine form, on a grid of 1 to 8 axes, forward and backward.
 *
 *   tokens     the first `prefix` stand outside the grid; token prefix + i has grid index (i_0 .. i_{axes-1}), the last axis
 *              running fastest, and position s_a = offset[a] + i_a
 *   angle      phi = s_a theta[head,t] radians, for feature f with a = f / e and t = f % e
 *   forward    y[f] = act(x[f]) cos(phi),  y[dim + f] = act(x[f]) sin(phi);          prefix: y = (act(x), 0) exactly
 *   backward   g[f] = dy[f] cos(phi) + dy[dim + f] sin(phi);                         prefix: g = dy[0:dim]
 *              dx = g act'(x),  softmax: dx = act(x) (g - sum_f g[f] act(x[f]))
 *              dtheta[head,t] = sum s_a act(x[f]) (dy[dim + f] cos(phi) - dy[f] sin(phi))
 *                               over batch, tokens of the grid and the features of t
 *
 * x is [batch, heads, tokens, dim], y is [batch, heads, tokens, 2 dim], tokens = prefix + the product of shape. Strides of
 * batch, head and token are free, so [batch, tokens, heads, dim] needs no copy. A dot product of two such y depends on the
 * tokens' difference of positions only, which is what a linear attention needs; `offset` decodes one token at a time.
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/md_lrpe_cosine.cuh"          #include "lk/md_lrpe_cosine.cuh"
 *                LK_DEFINE_MD_LRPE_COSINE(bf16)            LK_DECLARE_MD_LRPE_COSINE(bf16)
 *            T is f32, f16 or bf16. Then, asynchronously on the caller's stream, in a graph too:
 *                lk_md_lrpe_cosine_args args = {.x = x, .theta = theta, .y = y, .batch = 12, .heads = 12, .dim = 128,
 *                    .axes = 2, .shape = {64, 64}, .theta_dtype = LK_DTYPE_F32};
 *                lk_status status = lk_md_lrpe_cosine_forward_bf16(&args, stream);
 * Needs      lk_base.cuh, lk_row.cuh, lk_ptx.cuh. A workspace for dtheta alone: the query says how much, about 2 MiB on an
 *            H200. It depends on the device's number of SMs, so that this query needs a device.
 * Strides    0 means packed, so a tensor that was expanded, whose stride is 0, cannot be passed as it is. A NULL dy means 1
 *            everywhere, not 0.
 * Numerics   The angle is right at any length: theta / 2 pi is kept as 64-bit fixed-point turns, whose product with s drops
 *            whole turns by wrapping. With |theta| <= 1e6 (2^24, in fact; beyond, a bit is lost for every doubling) and any s,
 *            cos(phi) and sin(phi) err by 6.5e-7 at most: 3.4e-7 are those of sin.approx and cos.approx, 3.0e-7 the reduced
 *            angle's, three roundings of a number up to pi, and over one or two batches 1.2e-8 a walk's, which adds turns
 *            rounded to 32 bits up to 15 times. So |y error| <= 8e-7 |act(x)| and |g error| <=
 *            8e-7 (|dy[f]| + |dy[dim + f]|), besides the rounding to T; f32 too. sigmoid and silu err by (|x| + 8) 2^-23
 *            relative, softmax by (max - x + log dim + 8) 2^-23. dtheta's sums are compensated: within 16 2^-24 of the sum of
 *            its terms' magnitudes, besides what cos, sin and act err in each.
 *            A theta that is not finite makes its features NaN; the prefix does not see it. NaN and infinities of x and dy pass
 *            as the formulas say, and as in PyTorch: relu(NaN) = NaN with gradient g, softmax of a row with +inf, NaN or
 *            nothing but -inf is NaN. An angle within 2^-29 turns of 0 may be 0, and infinity times its sine NaN.
 * Traffic    forward reads x and writes y once; backward reads dy and writes dx once, and reads x once where dtheta or an
 *            activation needs it. No table of cosines: over three batches and more, four threads (two of a large
 *            tensor) compute a share of a vector's angles each and take turns over the batch; over one or two a thread walks
 *            along tokens.
 * Repeatable The same bits every time on the same device: fixed order, no atomics.
 * Source     Qin et al., "Linearized Relative Positional Encoding", 2023; xopes' md_lrpe_cosine.
 */
#ifndef LK_MD_LRPE_COSINE_CUH
#define LK_MD_LRPE_COSINE_CUH

#include "lk_base.cuh"

/* Which kernel runs. Both compute the same function with every option. */
enum {
    LK_MD_LRPE_COSINE_AUTO = 0,
    LK_MD_LRPE_COSINE_VECTOR = 1, /* a thread owns 16 bytes of features: dim and strides are multiples of 16 bytes, tensors
                                     start on 16 bytes; softmax: dim is at most 512 bytes */
    LK_MD_LRPE_COSINE_ROW = 2     /* a row by a warp, element by element: any dim, stride and alignment */
};

/* What is applied to x before the rotation, in the prefix too. */
enum {
    LK_MD_LRPE_COSINE_NONE = 0,
    LK_MD_LRPE_COSINE_RELU = 1,
    LK_MD_LRPE_COSINE_SIGMOID = 2,
    LK_MD_LRPE_COSINE_SILU = 3,
    LK_MD_LRPE_COSINE_SOFTMAX = 4 /* over dim */
};

/* One struct for both calls, so that a training step fills it once. F: forward, B: backward. Fields that a call does not have are
 * not looked at, and neither is x in a backward without dtheta and activation. */
typedef struct {
    const void *x;           /* F B in    T [batch, heads, tokens, dim]; B: only with dtheta or an activation */
    const void *theta;       /* F B in    theta_dtype [heads, e] packed, radians a step of the position */
    void *y;                 /* F out     T [batch, heads, tokens, 2 dim] */
    const void *dy;          /* B in      T [batch, heads, tokens, 2 dim], the upstream gradient; NULL means 1, not 0 */
    void *dx;                /* B out     T [batch, heads, tokens, dim]; NULL to skip, but not both */
    float *dtheta;           /* B out     f32 [heads, e] packed; NULL to skip */
    void *workspace;         /* B         scratch of at least the queried bytes, aligned to LK_WORKSPACE_ALIGNMENT; NULL when 0 */
    size_t workspace_bytes;  /* B */
    int64_t batch;           /* at least 0 */
    int64_t heads;           /* at least 0 */
    int64_t dim;             /* features of x, 1 to 2^30 */
    int64_t e;               /* features an axis turns, e axes >= dim; 0 means dim / axes rounded up */
    int64_t prefix;          /* tokens before the grid, at least 0 */
    int axes;                /* of the grid, 1 to 8; 0 means 1 */
    int64_t shape[8];        /* of the grid, each at least 0; tokens = prefix + their product */
    int64_t offset[8];       /* added to grid indices; every position is in (-2^31, 2^31) */
    int64_t x_batch_stride;  /* elements between batches; 0 means packed: heads x_head_stride */
    int64_t x_head_stride;   /* 0 means packed: tokens x_token_stride */
    int64_t x_token_stride;  /* 0 means packed: dim */
    int64_t y_batch_stride;  /* F: likewise, with 2 dim */
    int64_t y_head_stride;
    int64_t y_token_stride;
    int64_t dy_batch_stride; /* B: likewise, with 2 dim */
    int64_t dy_head_stride;
    int64_t dy_token_stride;
    int64_t dx_batch_stride; /* B: likewise, with dim */
    int64_t dx_head_stride;
    int64_t dx_token_stride;
    int theta_dtype;         /* LK_DTYPE_*: T or f32; 0 means T */
    int activation;          /* LK_MD_LRPE_COSINE_NONE to SOFTMAX */
    int accumulate;          /* B: not 0: dtheta is added to what is there */
    int path;                /* LK_MD_LRPE_COSINE_*; 0 chooses */
} lk_md_lrpe_cosine_args;

/* Errors, in the order of the checks (lk/README.md has the rules for all ops):
 *   LK_ERR_NULL       theta; forward: x, y; backward: x where it is read. Every output
 *   LK_ERR_SHAPE      axes outside 0 to 8; a negative size or stride; dim outside 1 to 2^30; e axes < dim; a tensor that spans
 *                     more than 2^62 elements; a workspace of more than 2^62 bytes; elements of y or dx that overlap
 *   LK_ERR_VALUE      a position outside (-2^31, 2^31); theta_dtype is neither T nor f32; activation or path is none of its
 *                     enum
 *   LK_ERR_PATH       VECTOR where dim, a stride or a pointer is no multiple of 16 bytes, or softmax with dim above 512 bytes
 *   LK_ERR_WORKSPACE  dtheta is wanted and workspace is NULL, too small or not aligned to LK_WORKSPACE_ALIGNMENT bytes
 * The queries look at sizes and options alone: tensors may be NULL there, and a NULL dtheta means that it is not wanted.
 * Fastest: dim, strides and pointers that are multiples of 16 bytes. */

#define LK_DECLARE_MD_LRPE_COSINE(T)                                                                                           \
    LK_PROTOTYPES(md_lrpe_cosine, forward, T)                                                                                  \
    LK_PROTOTYPES(md_lrpe_cosine, backward, T)

#if defined(__CUDACC__) || defined(LK_SIMT)

#include "lk_row.cuh"

/* ---- Whole numbers: division, positions --------------------------------------------------------------------------------- */

/* n / size for n >= 0 without a division: with 2^log2 >= size, factor = 2^(63 + log2) / size, rounded up, exceeds the quotient
 * by less than 2^log2 / size, and n < 2^63 times that stays below 1 / size, the distance to the next whole number. Likewise in
 * 32 bits with 2^(31 + log2), a third of the instructions, for n < 2^31; for sizes above 2^30 all n below the size give 0. */
typedef struct {
    int64_t size;
    uint64_t factor;
    int shift; /* log2 - 1, -1 for size 1 */
    uint32_t factor_32;
    int shift_32;
} lk_lrpe_divisor;

LK_HOST lk_lrpe_divisor lk_lrpe_make_divisor(int64_t size)
{
    int log2 = 0;
    while ((int64_t)1 << log2 < size) log2++;
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
    lk_lrpe_divisor behind[8]; /* behind[a]: the product of the shape behind axis a */
    int shape[8], offset[8];
    bool small; /* cells, and what kernels count beside them, stay below 2^30: ints do */
} lk_lrpe_grid;

/* The position on an axis of the grid's cell number `cell`, row-major. */
template <class I> LK_DEVICE int lk_lrpe_position_as(const lk_lrpe_grid &grid, I cell, int axis)
{
    uint32_t index = (uint32_t)lk_lrpe_divide(cell, grid.behind[axis]);
    if (axis > 0) index -= (uint32_t)grid.shape[axis] * (uint32_t)lk_lrpe_divide(cell, grid.behind[axis - 1]);
    return (int)index + grid.offset[axis];
}
LK_DEVICE int lk_lrpe_position(const lk_lrpe_grid &grid, int64_t cell, int axis)
{
    return grid.small ? lk_lrpe_position_as(grid, (int)cell, axis) : lk_lrpe_position_as(grid, cell, axis);
}

/* ---- Angles ------------------------------------------------------------------------------------------------------------- */

/* frac(theta / 2 pi) 2^64 as high 2^32 + low, with low signed. */
typedef struct {
    uint32_t high;
    int low;
} lk_lrpe_turn;

/* The lower word of high 2^32 + low shifted right by `shift` modulo 32. */
LK_DEVICE uint32_t lk_lrpe_funnel(uint32_t low, uint32_t high, int shift)
{
    return (uint32_t)(((uint64_t)high << 32 | low) >> (shift & 31));
}

/* frac(theta / 2 pi) 2^64 of a float's bits, exact but for its last bit, for |theta| < 2^24. theta is mantissa 2^-shift with a
 * mantissa of 24 bits, and 1 / 2 pi is three words: the upper 86 bits of their product, words 2 to 0, are
 * floor(mantissa / 2 pi 2^64), which is then shifted into place. Beyond 2^24 it is shifted to the left, and a bit is lost for
 * every doubling. */
LK_DEVICE uint64_t lk_lrpe_turn_bits(uint32_t theta)
{
    const uint32_t mantissa = (theta & 0x7fffff) | 0x800000; /* below 2^-126 too, where no position makes an angle of it */
    const uint64_t lower = (uint64_t)mantissa * 0x9391054au + __umulhi(mantissa, 0x7f09d5f4u);
    const uint64_t upper = (uint64_t)mantissa * 0x28be60dbu + (lower >> 32);
    const uint32_t word_0 = (uint32_t)lower, word_1 = (uint32_t)upper, word_2 = (uint32_t)(upper >> 32); /* word_2 < 2^22 */
    const int right = 150 - (int)(theta >> 23 & 0xff), shift = min(max(right, 0), 95);
    const uint32_t a = shift < 32 ? word_0 : shift < 64 ? word_1 : word_2, b = shift < 32 ? word_1 : shift < 64 ? word_2 : 0;
    uint64_t turn = (uint64_t)lk_lrpe_funnel(b, shift < 32 ? word_2 : 0, shift) << 32 | lk_lrpe_funnel(a, b, shift);
    turn <<= min(max(-right, 0), 63);
    const uint64_t sign = (uint64_t)((int64_t)(int)theta >> 63);
    return (turn ^ sign) - sign;
}

LK_DEVICE lk_lrpe_turn lk_lrpe_make_turn(uint32_t theta)
{
    const uint64_t turn = lk_lrpe_turn_bits(theta);
    const int low = (int)(uint32_t)turn;
    return {(uint32_t)(turn >> 32) - (uint32_t)(low >> 31), low};
}

/* cos and sin of s turns: the product's upper word counts 2^-32 turns in [-1/2, 1/2). */
LK_DEVICE void lk_lrpe_rotation(lk_lrpe_turn turn, int s, float *cos, float *sin)
{
    const uint32_t phase = (uint32_t)s * turn.high + (uint32_t)__mulhi(s, turn.low);
    const float phi = (float)(int)phase * 0x1.921fb6p-30f; /* 2 pi / 2^32 */
    *cos = lk_cos(phi);
    *sin = lk_sin(phi);
}

/* What N features of a head need of theta. */
template <int N> struct lk_lrpe_turns {
    lk_lrpe_turn of[N];
    uint32_t wild; /* bit j: theta is not finite */
};

/* cos, sin and positions at one token; `still` in the prefix, where they are 1, 0 and 0. */
template <int N> struct lk_lrpe_angles {
    float cos[N], sin[N];
    int s[N];
    bool still;
};

typedef struct {
    lk_lrpe_grid grid;
    const void *theta;
    bool theta_f32;
    int dim, e, e_shift; /* e: dim where it is larger, f / e is then 0; the quotient is f e_factor / 2^e_shift */
    uint32_t e_factor;
    int64_t heads, tokens, batch, theta_stride;
    /* Who owns what: items are numbered by (stretch of the batch, outer, inner, lane), inner and outer being head and token or
     * token and head. An item owns tokens token, token + token_step, ... of a head and a stretch of the batch, and walks over
     * the one in `outers`, over the other in `steps`. */
    lk_lrpe_divisor lanes, inner, outer;
    bool heads_inner;
    int64_t items, token_step, stretch;
    int vecs, tokens_each, steps, outers; /* vecs: lanes with features; tokens_each: tokens / token_step, rounded up */
    /* Forward: in is x. Backward: in is dy, out is dx; what is not used stands for another tensor, so that pointers are
     * pointers. Strides of batch, head, token, and of a step. */
    const void *in, *x;
    void *out;
    int64_t in_stride[4], x_stride[4], out_stride[4];
    bool read_dy, read_x, write_dx;
    int activation, axes, axes_a_vector; /* axes that a vector may lie on, 3 for more than two */
    float *partial;                      /* [slot, head, feature], or NULL */
    /* A walk over tokens without dtheta: a step of token_step tokens is `walk` positions of walk_axis, the first axis longer
     * than 1, and none of another. Token t is cell t + walk_cells of a grid that begins walk_back positions earlier, so that
     * the prefix is in it. */
    int64_t walk, walk_back, walk_cells;
    int walk_axis;
} lk_lrpe_plan;

/* The axis that turns feature f: f / e, as lk_lrpe_divide does it, in 32 bits. */
LK_DEVICE int lk_lrpe_axis(const lk_lrpe_plan &p, int f)
{
    return (int)((uint64_t)(uint32_t)f * p.e_factor >> p.e_shift);
}

template <int STEP> LK_DEVICE int lk_lrpe_feature(const lk_lrpe_plan &p, int feature, int j)
{
    const int f = feature + (STEP ? STEP : 1) * j;
    return f < p.dim ? f : p.dim - 1;
}

/* N features of a head, STEP apart, from `feature` on. Features beyond dim, which nobody asks for, count as the last one.
 * STEP 1: a vector, which lies on one axis or on two neighbouring ones. STEP 0: a vector that may lie on more. */
template <class T, int STEP, int N>
LK_DEVICE void lk_lrpe_load_theta(float (&theta)[N], const lk_lrpe_plan &p, int64_t head, int feature)
{
    const int axis = lk_lrpe_axis(p, feature), t = feature - axis * p.e, left = p.e - t;
    int at[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        at[j] = j < left ? t + j : t + j - p.e;
        if (STEP != 1 && (STEP > 0 || p.axes_a_vector > 2)) {
            const int f = lk_lrpe_feature<STEP>(p, feature, j);
            at[j] = f - lk_lrpe_axis(p, f) * p.e;
        }
    }
    if (p.theta_f32) {
        const float *of_head = (const float *)p.theta + head * p.theta_stride;
#pragma unroll
        for (int j = 0; j < N; j++) theta[j] = of_head[at[j]];
    } else {
        const T *of_head = (const T *)p.theta + head * p.theta_stride;
#pragma unroll
        for (int j = 0; j < N; j++) theta[j] = lk_to_float(of_head[at[j]]);
    }
}

template <class T, int STEP, int N>
LK_DEVICE void lk_lrpe_load_turns(lk_lrpe_turns<N> *turns, const lk_lrpe_plan &p, int64_t head, int feature)
{
    float theta[N];
    lk_lrpe_load_theta<T, STEP>(theta, p, head, feature);
    turns->wild = 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
        turns->of[j] = lk_lrpe_make_turn(__float_as_uint(theta[j]));
        turns->wild |= lk_is_finite(theta[j]) ? 0u : 1u << j;
    }
}

/* The positions of those features at a cell of the grid. */
template <int STEP, int N> LK_DEVICE void lk_lrpe_positions(int (&s)[N], const lk_lrpe_plan &p, int64_t cell, int feature)
{
    const int axis = lk_lrpe_axis(p, feature), left = (axis + 1) * p.e - feature; /* features until the next axis */
    if (STEP != 1 && (STEP > 0 || p.axes_a_vector > 2)) {
#pragma unroll
        for (int j = 0; j < N; j++)
            s[j] = lk_lrpe_position(p.grid, cell, lk_lrpe_axis(p, lk_lrpe_feature<STEP>(p, feature, j)));
        return;
    }
    const int here = lk_lrpe_position(p.grid, cell, axis);
    int next = here;
    if (p.axes_a_vector > 1 && left < N) next = lk_lrpe_position(p.grid, cell, axis + 1);
#pragma unroll
    for (int j = 0; j < N; j++) s[j] = j < left ? here : next;
}

/* The angles of N features at a token. */
template <int STEP, int N>
LK_DEVICE void lk_lrpe_turn_to(lk_lrpe_angles<N> *angles, const lk_lrpe_turns<N> &turns, const lk_lrpe_plan &p, int64_t token,
                               int feature)
{
    const int64_t cell = token - p.grid.prefix;
    angles->still = cell < 0;
    if (p.axes == 1) { /* one position for all: not worth a select an element */
        const int s = angles->still ? 0 : (int)cell + p.grid.offset[0];
#pragma unroll
        for (int j = 0; j < N; j++) {
            angles->s[j] = s;
            lk_lrpe_rotation(turns.of[j], s, &angles->cos[j], &angles->sin[j]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) angles->s[j] = 0;
        if (!angles->still) lk_lrpe_positions<STEP>(angles->s, p, cell, feature);
#pragma unroll
        for (int j = 0; j < N; j++) lk_lrpe_rotation(turns.of[j], angles->s[j], &angles->cos[j], &angles->sin[j]);
    }
    if (turns.wild && !angles->still) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (turns.wild >> j & 1) angles->cos[j] = angles->sin[j] = NAN;
    }
}

/* Where a vector's walk over tokens begins: its first `left` features at position s[0], which grows by step[0] a step, the
 * others, on the next axis, at s[1]. In 64 bits, since the prefix may begin before -2^31. Takes nothing from memory. */
typedef struct {
    int left;
    int64_t s[2], step[2];
} lk_lrpe_stand;

template <int N> LK_DEVICE lk_lrpe_stand lk_lrpe_find_stand(const lk_lrpe_plan &p, int64_t token, int feature)
{
    const int64_t cell = token + p.walk_cells;
    const int axis = lk_lrpe_axis(p, feature);
    lk_lrpe_stand at = {(axis + 1) * p.e - feature, {}, {}};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int a = axis + i;
        at.s[i] = at.s[0], at.step[i] = at.step[0];
        if (i > 0 && (p.axes_a_vector == 1 || at.left >= N)) break;
        at.step[i] = a == p.walk_axis ? p.walk : 0;
        if (a > p.walk_axis) at.s[i] = lk_lrpe_position(p.grid, cell, a);
        else at.s[i] = p.grid.offset[a]; /* all that there is on an axis before it */
        if (a == p.walk_axis)
            at.s[i] += (p.grid.small ? lk_lrpe_divide((int)cell, p.grid.behind[a]) : lk_lrpe_divide(cell, p.grid.behind[a])) -
                       p.walk_back;
    }
    return at;
}

/* The angles of a vector on its walk, in 2^-32 turns, and what they grow by a step; both rounded to nearest, so the n-th step's
 * angle errs by (n + 1) / 2 of them, which is 1.2e-8 radians after LK_LRPE_TOKENS_MOST. */
template <int N> struct lk_lrpe_walk {
    uint32_t phase[N], step[N];
    uint32_t wild; /* bit j: theta is not finite */
};

template <class T, int N>
LK_DEVICE void lk_lrpe_start_walk(lk_lrpe_walk<N> *walk, const lk_lrpe_plan &p, int64_t head, int feature,
                                  const lk_lrpe_stand &at)
{
    float theta[N];
    lk_lrpe_load_theta<T, 1>(theta, p, head, feature);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const uint64_t turn = lk_lrpe_turn_bits(__float_as_uint(theta[j]));
        const int64_t s = j < at.left ? at.s[0] : at.s[1], step = j < at.left ? at.step[0] : at.step[1];
        walk->phase[j] = (uint32_t)((turn * (uint64_t)s + 0x80000000u) >> 32);
        walk->step[j] = (uint32_t)((turn * (uint64_t)step + 0x80000000u) >> 32);
        walk->wild |= lk_is_finite(theta[j]) ? 0u : 1u << j;
    }
}

/* cos and sin here, and a step on. */
template <int N> LK_DEVICE void lk_lrpe_walk_on(lk_lrpe_angles<N> *angles, lk_lrpe_walk<N> *walk, bool still)
{
    const float turn = still ? 0.0f : 0x1.921fb6p-30f; /* 2 pi / 2^32 */
    angles->still = still;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float phi = (float)(int)walk->phase[j] * turn;
        angles->cos[j] = lk_cos(phi);
        angles->sin[j] = lk_sin(phi);
        walk->phase[j] += walk->step[j];
    }
    if (walk->wild && !still) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (walk->wild >> j & 1) angles->cos[j] = angles->sin[j] = NAN;
    }
}

/* ---- Activations -------------------------------------------------------------------------------------------------------- */

/* The sigmoids of x and of -x, which is what 1 - sigmoid(x) would cancel to, for one exponential and one reciprocal; neither
 * overflows, since the exponent is never positive. */
LK_DEVICE float lk_lrpe_sigmoid(float x, float *of_minus_x)
{
    const float e = lk_exp(-fabsf(x)), large = __fdividef(1.0f, 1.0f + e), small = e * large;
    *of_minus_x = x >= 0.0f ? small : large;
    return x >= 0.0f ? large : small;
}

/* act(x) of all but softmax. */
template <int N> LK_DEVICE void lk_lrpe_activate(int activation, float (&x)[N])
{
    float other;
    if (activation == LK_MD_LRPE_COSINE_RELU) {
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = x[j] <= 0.0f ? 0.0f : x[j];
    } else if (activation == LK_MD_LRPE_COSINE_SIGMOID) {
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = lk_lrpe_sigmoid(x[j], &other);
    } else if (activation == LK_MD_LRPE_COSINE_SILU) {
#pragma unroll
        for (int j = 0; j < N; j++) x[j] *= lk_lrpe_sigmoid(x[j], &other);
    }
}

/* g becomes g act'(x) of all but softmax. */
template <int N> LK_DEVICE void lk_lrpe_chain(int activation, float (&g)[N], const float (&x)[N])
{
    if (activation == LK_MD_LRPE_COSINE_RELU) {
#pragma unroll
        for (int j = 0; j < N; j++) g[j] = x[j] <= 0.0f ? 0.0f : g[j];
    } else if (activation == LK_MD_LRPE_COSINE_SIGMOID || activation == LK_MD_LRPE_COSINE_SILU) {
        const bool silu = activation == LK_MD_LRPE_COSINE_SILU;
#pragma unroll
        for (int j = 0; j < N; j++) {
            float other;
            const float slope = lk_lrpe_sigmoid(x[j], &other);
            g[j] *= slope * (silu ? fmaf(x[j], other, 1.0f) : other);
        }
    }
}

/* x becomes its softmax, given the state of its row. */
template <int N> LK_DEVICE void lk_lrpe_normalize(float (&x)[N], lk_lse row)
{
    const float share = lk_is_finite(row.max) ? __frcp_rn(row.sum) : NAN;
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = share * lk_exp(x[j] - row.max);
}

/* act of a vector of a row whose vectors the consecutive lanes of a team hold. All 32 lanes call it; lanes that are no owner
 * add nothing. Softmax takes one exponential an element: the maximum of the row goes round before them. */
template <int N> LK_DEVICE void lk_lrpe_activate_row(float (&x)[N], const lk_lrpe_plan &p, bool owner)
{
    if (p.activation != LK_MD_LRPE_COSINE_SOFTMAX) {
        lk_lrpe_activate(p.activation, x);
        return;
    }
    const int team = (int)p.lanes.size;
    float max = -INFINITY, part[4] = {};
#pragma unroll
    for (int j = 0; j < N; j++) max = fmaxf(max, x[j]);
    if (!owner) max = -INFINITY;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
#pragma unroll
    for (int j = 0; j < N; j++) part[j % 4] += x[j] = lk_exp(x[j] - max);
    const float sum = lk_sum_warp(owner ? (part[0] + part[1]) + (part[2] + part[3]) : 0.0f, team);
    const float share = lk_is_finite(max) ? __fdividef(1.0f, sum) : NAN;
#pragma unroll
    for (int j = 0; j < N; j++) x[j] *= share;
}

/* A sum whose additions' roundings are taken along (Kahan). */
LK_DEVICE void lk_lrpe_add(float *sum, float *lost, float term)
{
    term -= *lost;
    const float grown = *sum + term;
    *lost = lk_is_finite(grown) ? (grown - *sum) - term : 0.0f; /* an infinite sum stays one */
    *sum = grown;
}

/* What a kernel does with N features of one token: (u, v) = dy[f], dy[dim + f]; x is act(x). */
template <int N>
LK_DEVICE void lk_lrpe_turn_back(float (&g)[N], const lk_lrpe_angles<N> &angles, const float (&u)[N], const float (&v)[N])
{
#pragma unroll
    for (int j = 0; j < N; j++) g[j] = fmaf(u[j], angles.cos[j], v[j] * angles.sin[j]);
}
/* Terms of dtheta: sums and what their additions lost. */
template <int N> struct lk_lrpe_sums {
    float of[N], lost[N];
};
template <int N>
LK_DEVICE void lk_lrpe_add_dtheta(lk_lrpe_sums<N> *sums, const lk_lrpe_angles<N> &angles, const float (&x)[N],
                                  const float (&u)[N], const float (&v)[N])
{
    if (angles.still) return;
#pragma unroll
    for (int j = 0; j < N; j++)
        lk_lrpe_add(&sums->of[j], &sums->lost[j],
                    (float)angles.s[j] * (x[j] * fmaf(v[j], angles.cos[j], -(u[j] * angles.sin[j]))));
}

/* ---- Kernels ------------------------------------------------------------------------------------------------------------ */

/* Vectors are loaded and stored by what the caches may keep: of 32768 tokens, batch 12, backward takes 842 us on an H200, and by
 * streaming accesses 842 to 898, as tensors happen to lie in memory. */

/* Threads a block: of walks over tokens and of rows, over the batch, and where dtheta is wanted. */
#define LK_LRPE_THREADS 256
#define LK_LRPE_BATCH_THREADS 128
#define LK_LRPE_DTHETA_THREADS 128
/* Over the batch: groups of a block that share angles, and vectors a thread loads before it uses the first. With 4 groups of 32
 * vectors and 3 loads (2 in backward with an activation, which takes registers) forward at 256 tokens is at 0.94 of the
 * ceiling, measured on an H200, 4 groups of 64 vectors at 0.90, and threads that compute all their angles at 0.87; on
 * 4 x 4 x 4 cells 0.85, 0.83 and 0.59. */
#define LK_LRPE_GROUPS 4
#define LK_LRPE_BATCH_U 3
/* Where 4 groups are more than so many waves of 1024 threads an SM, there are 2, which compute fewer indices a vector: at 8192
 * tokens with silu 0.72 of the ceiling backward instead of 0.69. */
#define LK_LRPE_FEW_GROUPS 2
#define LK_LRPE_GROUPED_WAVES 4
/* Blocks an SM, which is what bounds a thread's registers. Walks wait for their loads: with 4 blocks forward at batch 1 is at
 * 0.92 of the ceiling on an H200, with 3 at 0.88; backward 0.92 and 0.84. Code for sm_100 and up takes more registers, and an
 * SM of sm_120 runs 1536 threads. */
#define LK_LRPE_BATCH_FORWARD_BLOCKS 8
#define LK_LRPE_BATCH_BACKWARD_BLOCKS(ACT) (6 - (ACT))
#define LK_LRPE_WALK_BLOCKS (4 - (LK_ARCH >= 1000) - (LK_ARCH >= 1200))
#define LK_LRPE_DTHETA_BLOCKS (3 - (LK_ARCH >= 1000))
#define LK_LRPE_FEW_WALK_BLOCKS (LK_ARCH < 1000 ? 3 : LK_LRPE_WALK_BLOCKS) /* where 64 registers are one too few */
template <class T, bool ACT> constexpr int lk_lrpe_backward_walk_blocks = ACT ? LK_LRPE_FEW_WALK_BLOCKS : LK_LRPE_WALK_BLOCKS;
template <> constexpr int lk_lrpe_backward_walk_blocks<lk_f16, false> = LK_LRPE_FEW_WALK_BLOCKS;

typedef struct {
    int64_t head, token, batch, slot; /* the first token and batch */
    int lane;
    bool owner;
    int tokens, batches; /* how many of each */
} lk_lrpe_place;

/* I: int in a small grid, which takes half the instructions. */
template <class I> LK_DEVICE lk_lrpe_place lk_lrpe_find_as(const lk_lrpe_plan &p, I item)
{
    const I row = lk_lrpe_divide(item, p.lanes), above = lk_lrpe_divide(row, p.inner), split = lk_lrpe_divide(above, p.outer);
    const I inner = row - above * (I)p.inner.size, outer = above - split * (I)p.outer.size;
    const I head = p.heads_inner ? inner : outer, token = p.heads_inner ? outer : inner;
    lk_lrpe_place at;
    at.head = head, at.token = token;
    at.batch = split * p.stretch;
    at.slot = split * p.token_step + token;
    at.lane = (int)(item - row * (I)p.lanes.size);
    at.owner = item < (I)p.items && at.lane < p.vecs;
    at.tokens = p.tokens_each - (token + (I)(p.tokens_each - 1) * (I)p.token_step >= (I)p.tokens);
    at.batches = (int)(p.batch - at.batch < p.stretch ? p.batch - at.batch : p.stretch);
    return at;
}

LK_DEVICE lk_lrpe_place lk_lrpe_find(const lk_lrpe_plan &p, int64_t item)
{
    return p.grid.small ? lk_lrpe_find_as<int>(p, (int)item) : lk_lrpe_find_as<int64_t>(p, item);
}

LK_DEVICE int64_t lk_lrpe_offset(const int64_t (&stride)[4], int64_t batch, int64_t head, int64_t token)
{
    return batch * stride[0] + head * stride[1] + token * stride[2];
}

/* What forward does with a vector of a token. ACT: with an activation; then all lanes of a warp come here, since softmax is
 * theirs together, and those write whose `mine` it is. */
template <bool ACT, class T, int N>
LK_DEVICE void lk_lrpe_forward_step(T *y, lk_vec<T> x, const lk_lrpe_angles<N> &angles, const lk_lrpe_plan &p, bool owner,
                                    bool mine)
{
    float v[N], z[N];
    lk_unpack(v, x);
    if (ACT) lk_lrpe_activate_row(v, p, owner);
    if (ACT && !mine) return;
#pragma unroll
    for (int j = 0; j < N; j++) z[j] = v[j] * angles.cos[j];
    lk_pack(&x, z);
    lk_store_vec_wb(y, x);
#pragma unroll
    for (int j = 0; j < N; j++) z[j] = v[j] * angles.sin[j];
    lk_pack(&x, z);
    if (angles.still) x = {};
    lk_store_vec_wb(y + p.dim, x);
}

/* A thread owns a vector of features of a head and walks over tokens; the next one is on its way while it turns this one.
 * The launch of dependents is the first thing behind the wait, here and below: behind the first loads, the compiler may move it
 * further, behind their first use. */
template <class T, bool ACT>
LK_KERNEL void __launch_bounds__(LK_LRPE_THREADS, LK_LRPE_WALK_BLOCKS)
    lk_lrpe_forward_walk_kernel(const __grid_constant__ lk_lrpe_plan p)
{
    constexpr int N = LK_VEC<T>;
    const lk_lrpe_place at = lk_lrpe_find(p, (int64_t)blockIdx.x * LK_LRPE_THREADS + threadIdx.x);
    const int feature = at.owner ? at.lane * N : 0, count = at.owner ? at.tokens : 0, steps = ACT ? p.steps : count;
    const T *x = (const T *)p.in + lk_lrpe_offset(p.in_stride, at.batch, at.head, at.token) + feature;
    T *y = (T *)p.out + lk_lrpe_offset(p.out_stride, at.batch, at.head, at.token) + feature;
    const lk_lrpe_stand stand = lk_lrpe_find_stand<N>(p, at.token, feature);
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    lk_vec<T> next = {};
    if (count > 0) next = lk_load_vec_ca(x);
    lk_lrpe_walk<N> walk = {};
    if (at.owner) lk_lrpe_start_walk<T>(&walk, p, at.head, feature, stand);
    int64_t token = at.token;
#pragma unroll 1
    for (int i = 0; i < steps; i++, y += p.out_stride[3], token += p.token_step) {
        const lk_vec<T> now = next;
        x += p.in_stride[3];
        if (i + 1 < count) next = lk_load_vec_ca(x);
        lk_lrpe_angles<N> angles;
        lk_lrpe_walk_on(&angles, &walk, token < p.grid.prefix);
        lk_lrpe_forward_step<ACT>(y, now, angles, p, at.owner, i < count);
    }
}

/* Over the batch a block's threads are K groups with the same vectors of a token: group g takes batches g, g + K, ... of the
 * block's stretch, and its share of each vector's angles, which go round in shared memory. */
#define LK_LRPE_BATCH_VECTORS(K) (LK_LRPE_BATCH_THREADS / (K))
static_assert(LK_LRPE_BATCH_VECTORS(LK_LRPE_GROUPS) % 32 == 0, "a row of softmax lies in a warp, which is of one group");

/* Where a thread's angles come from: found before the wait, since it takes nothing from memory. */
template <int M> struct lk_lrpe_angle_share {
    int64_t at[M]; /* in theta */
    int s[M];
    bool still;
};

template <int M>
LK_DEVICE void lk_lrpe_find_angles(lk_lrpe_angle_share<M> *share, const lk_lrpe_plan &p, const lk_lrpe_place &at, int feature)
{
    const int64_t cell = at.token - p.grid.prefix;
    share->still = cell < 0;
#pragma unroll
    for (int i = 0; i < M; i++) {
        const int axis = lk_lrpe_axis(p, feature + i);
        share->at[i] = at.head * p.theta_stride + (feature + i - axis * p.e);
        share->s[i] = share->still ? 0 : lk_lrpe_position(p.grid, cell, axis);
    }
}

template <class T, int M>
LK_DEVICE void lk_lrpe_load_share(float (&theta)[M], const lk_lrpe_plan &p, const lk_lrpe_angle_share<M> &share)
{
#pragma unroll
    for (int i = 0; i < M; i++)
        theta[i] = p.theta_f32 ? ((const float *)p.theta)[share.at[i]] : lk_to_float(((const T *)p.theta)[share.at[i]]);
}

/* Puts a thread's angles into the table, [feature of a vector][vector], and takes its vector's. All threads call it. */
template <int K, int M, int N>
LK_DEVICE void lk_lrpe_share_angles(lk_lrpe_angles<N> *angles, float2 *table, const float (&theta)[M],
                                    const lk_lrpe_angle_share<M> &share)
{
    constexpr int S = LK_LRPE_BATCH_VECTORS(K);
    const int vector = threadIdx.x % S, group = threadIdx.x / S;
#pragma unroll
    for (int i = 0; i < M; i++) {
        float2 turned;
        lk_lrpe_rotation(lk_lrpe_make_turn(__float_as_uint(theta[i])), share.s[i], &turned.x, &turned.y);
        if (!share.still && !lk_is_finite(theta[i])) turned.x = turned.y = NAN;
        table[(group * M + i) * S + vector] = turned;
    }
    __syncthreads(); /* all groups have put their angles there */
    angles->still = share.still;
#pragma unroll
    for (int j = 0; j < N; j++) angles->cos[j] = table[j * S + vector].x, angles->sin[j] = table[j * S + vector].y;
}

/* How many batches of its block's stretch a group takes. */
template <int K> LK_DEVICE int lk_lrpe_batches(const lk_lrpe_place &at, int group)
{
    return at.owner && at.batches > group ? (at.batches - group - 1) / K + 1 : 0;
}

template <class T, bool ACT, int K>
LK_KERNEL void __launch_bounds__(LK_LRPE_BATCH_THREADS, LK_LRPE_BATCH_FORWARD_BLOCKS)
    lk_lrpe_forward_batch_kernel(const __grid_constant__ lk_lrpe_plan p)
{
    constexpr int N = LK_VEC<T>, M = N / K, S = LK_LRPE_BATCH_VECTORS(K), U = LK_LRPE_BATCH_U;
    LK_SHARED(float2, table, [N * S]);
    const int group = threadIdx.x / S;
    const lk_lrpe_place at = lk_lrpe_find(p, (int64_t)blockIdx.x * S + threadIdx.x % S);
    const int feature = at.owner ? at.lane * N : 0, count = lk_lrpe_batches<K>(at, group), steps = ACT ? p.steps : count;
    const T *x = (const T *)p.in + lk_lrpe_offset(p.in_stride, at.batch + group, at.head, at.token) + feature;
    T *y = (T *)p.out + lk_lrpe_offset(p.out_stride, at.batch + group, at.head, at.token) + feature;
    lk_lrpe_angle_share<M> share;
    lk_lrpe_find_angles(&share, p, at, feature + group * M);
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    float theta[M] = {};
    if (at.owner) lk_lrpe_load_share<T>(theta, p, share);
    lk_vec<T> raw[U];
#pragma unroll
    for (int u = 0; u < U; u++, x += p.in_stride[3]) {
        raw[u] = {};
        if (u < count) raw[u] = lk_load_vec_ca(x);
    }
    lk_lrpe_angles<N> angles;
    lk_lrpe_share_angles<K>(&angles, table, theta, share);
#pragma unroll 1
    for (int i = 0; i < steps; i += U) {
#pragma unroll
        for (int u = 0; u < U; u++, y += p.out_stride[3]) {
            if (i + u >= steps) break;
            lk_lrpe_forward_step<ACT>(y, raw[u], angles, p, at.owner, i + u < count);
        }
#pragma unroll
        for (int u = 0; u < U && i + U < steps; u++, x += p.in_stride[3])
            if (i + U + u < count) raw[u] = lk_load_vec_ca(x);
    }
}

/* What a step of backward reads. The second half of dy is not read in the prefix, whatever stands there: it is 0 before the
 * load and not selected behind it, which would wait for it. */
template <class T> struct lk_lrpe_step {
    lk_vec<T> first, second, x;
};

template <bool ACT, bool DTHETA, class T>
LK_DEVICE void lk_lrpe_load_step(lk_lrpe_step<T> *step, const lk_lrpe_plan &p, const T *dy, const T *x, bool still)
{
    step->second = {};
    if (!ACT || p.read_dy) {
        step->first = lk_load_vec_ca(dy);
        if (!still) step->second = lk_load_vec_ca(dy + p.dim);
    } else {
        float one[LK_VEC<T>];
#pragma unroll
        for (int j = 0; j < LK_VEC<T>; j++) one[j] = 1.0f;
        lk_pack(&step->first, one);
#pragma unroll
        for (int j = 0; j < LK_VEC<T>; j++) one[j] = still ? 0.0f : 1.0f;
        lk_pack(&step->second, one);
    }
    if (DTHETA || (ACT && p.read_x)) step->x = lk_load_vec_ca(x);
}

/* g becomes dx: the activation's part of backward, for a vector of a row. */
template <int N>
LK_DEVICE void lk_lrpe_chain_row(float (&g)[N], const float (&x)[N], const float (&act)[N], const lk_lrpe_plan &p, bool owner)
{
    if (p.activation != LK_MD_LRPE_COSINE_SOFTMAX) {
        lk_lrpe_chain(p.activation, g, x);
        return;
    }
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) dot = fmaf(g[j], act[j], dot);
    dot = lk_sum_warp(owner ? dot : 0.0f, (int)p.lanes.size);
#pragma unroll
    for (int j = 0; j < N; j++) g[j] = act[j] * (g[j] - dot);
}

/* What backward does with a vector of a token, likewise. ACT: also where dy is 1. sums: of dtheta, or NULL. */
template <bool ACT, class T, int N>
LK_DEVICE void lk_lrpe_backward_step(T *dx, const lk_lrpe_step<T> &step, const lk_lrpe_angles<N> &angles, const lk_lrpe_plan &p,
                                     bool owner, bool mine, lk_lrpe_sums<N> *sums)
{
    float g[N], u[N], v[N];
    lk_unpack(u, step.first), lk_unpack(v, step.second);
    lk_lrpe_turn_back(g, angles, u, v);
    if (ACT || sums) {
        float x[N], act[N];
        lk_unpack(x, step.x), lk_unpack(act, step.x);
        if (ACT) lk_lrpe_activate_row(act, p, owner);
        if (sums && mine) lk_lrpe_add_dtheta(sums, angles, act, u, v);
        if (ACT) lk_lrpe_chain_row(g, x, act, p, owner);
    }
    lk_vec<T> out;
    lk_pack(&out, g);
    if (mine && (!sums || p.write_dx)) lk_store_vec_wb(dx, out);
}

template <class T, bool ACT>
LK_KERNEL void __launch_bounds__(LK_LRPE_THREADS, (lk_lrpe_backward_walk_blocks<T, ACT>))
    lk_lrpe_backward_walk_kernel(const __grid_constant__ lk_lrpe_plan p)
{
    constexpr int N = LK_VEC<T>;
    const lk_lrpe_place at = lk_lrpe_find(p, (int64_t)blockIdx.x * LK_LRPE_THREADS + threadIdx.x);
    const int feature = at.owner ? at.lane * N : 0, count = at.owner ? at.tokens : 0, steps = ACT ? p.steps : count;
    const T *dy = (const T *)p.in + lk_lrpe_offset(p.in_stride, at.batch, at.head, at.token) + feature;
    const T *x = (const T *)p.x + lk_lrpe_offset(p.x_stride, at.batch, at.head, at.token) + feature;
    T *dx = (T *)p.out + lk_lrpe_offset(p.out_stride, at.batch, at.head, at.token) + feature;
    const lk_lrpe_stand stand = lk_lrpe_find_stand<N>(p, at.token, feature);
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    lk_lrpe_step<T> next = {};
    int64_t token = at.token;
    if (count > 0) lk_lrpe_load_step<ACT, false>(&next, p, dy, x, token < p.grid.prefix);
    lk_lrpe_walk<N> walk = {};
    if (at.owner) lk_lrpe_start_walk<T>(&walk, p, at.head, feature, stand);
#pragma unroll 1
    for (int i = 0; i < steps; i++, dx += p.out_stride[3]) {
        const lk_lrpe_step<T> now = next;
        const bool still = token < p.grid.prefix, mine = !ACT || i < count;
        dy += p.in_stride[3], x += p.x_stride[3], token += p.token_step;
        if (i + 1 < count) lk_lrpe_load_step<ACT, false>(&next, p, dy, x, token < p.grid.prefix);
        lk_lrpe_angles<N> angles;
        lk_lrpe_walk_on(&angles, &walk, still);
        lk_lrpe_backward_step<ACT>(dx, now, angles, p, at.owner, mine, (lk_lrpe_sums<N> *)NULL);
    }
}

template <class T, bool ACT, int K>
LK_KERNEL void __launch_bounds__(LK_LRPE_BATCH_THREADS, LK_LRPE_BATCH_BACKWARD_BLOCKS(ACT))
    lk_lrpe_backward_batch_kernel(const __grid_constant__ lk_lrpe_plan p)
{
    constexpr int N = LK_VEC<T>, M = N / K, S = LK_LRPE_BATCH_VECTORS(K), U = LK_LRPE_BATCH_U - ACT;
    LK_SHARED(float2, table, [N * S]);
    const int group = threadIdx.x / S;
    const lk_lrpe_place at = lk_lrpe_find(p, (int64_t)blockIdx.x * S + threadIdx.x % S);
    const int feature = at.owner ? at.lane * N : 0, count = lk_lrpe_batches<K>(at, group), steps = ACT ? p.steps : count;
    const T *dy = (const T *)p.in + lk_lrpe_offset(p.in_stride, at.batch + group, at.head, at.token) + feature;
    const T *x = (const T *)p.x + lk_lrpe_offset(p.x_stride, at.batch + group, at.head, at.token) + feature;
    T *dx = (T *)p.out + lk_lrpe_offset(p.out_stride, at.batch + group, at.head, at.token) + feature;
    lk_lrpe_angle_share<M> share;
    lk_lrpe_find_angles(&share, p, at, feature + group * M);
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    float theta[M] = {};
    if (at.owner) lk_lrpe_load_share<T>(theta, p, share);
    lk_lrpe_step<T> raw[U];
#pragma unroll
    for (int u = 0; u < U; u++, dy += p.in_stride[3], x += p.x_stride[3]) {
        raw[u] = {};
        if (u < count) lk_lrpe_load_step<ACT, false>(&raw[u], p, dy, x, share.still);
    }
    lk_lrpe_angles<N> angles;
    lk_lrpe_share_angles<K>(&angles, table, theta, share);
#pragma unroll 1
    for (int i = 0; i < steps; i += U) {
#pragma unroll
        for (int u = 0; u < U; u++, dx += p.out_stride[3]) {
            if (i + u >= steps) break;
            const bool mine = !ACT || i + u < count;
            lk_lrpe_backward_step<ACT>(dx, raw[u], angles, p, at.owner, mine, (lk_lrpe_sums<N> *)NULL);
        }
#pragma unroll
        for (int u = 0; u < U && i + U < steps; u++, dy += p.in_stride[3], x += p.x_stride[3])
            if (i + U + u < count) lk_lrpe_load_step<ACT, false>(&raw[u], p, dy, x, share.still);
    }
}

/* Backward with dtheta: a thread owns a vector of features of a head, several tokens and a stretch of the batch, so that there
 * are few slots of partial sums. It walks over tokens (TOKENS) or over the batch, with angles of its own: dtheta needs the
 * positions too, and its compensated sums take the registers that more loads would. */
template <class T, bool TOKENS, bool ACT>
LK_KERNEL void __launch_bounds__(LK_LRPE_DTHETA_THREADS, LK_LRPE_DTHETA_BLOCKS)
    lk_lrpe_backward_dtheta_kernel(const __grid_constant__ lk_lrpe_plan p)
{
    constexpr int N = LK_VEC<T>;
    const lk_lrpe_place at = lk_lrpe_find(p, (int64_t)blockIdx.x * LK_LRPE_DTHETA_THREADS + threadIdx.x);
    lk_griddepcontrol_wait();
    if (!ACT && !at.owner) return;
    const int feature = at.owner ? at.lane * N : 0;
    lk_lrpe_turns<N> turns = {};
    lk_lrpe_angles<N> angles = {};
    lk_lrpe_sums<N> sums = {};
#pragma unroll 1
    for (int o = 0; o < p.outers; o++) {
        const int64_t batch = at.batch + (TOKENS ? o : 0);
        int64_t token = at.token + (TOKENS ? 0 : o * p.token_step);
        const bool mine = at.owner && o < (TOKENS ? at.batches : at.tokens);
        const int count = !mine ? 0 : TOKENS ? at.tokens : at.batches, steps = ACT ? p.steps : count;
        const T *dy = (const T *)p.in + lk_lrpe_offset(p.in_stride, batch, at.head, token) + feature;
        const T *x = (const T *)p.x + lk_lrpe_offset(p.x_stride, batch, at.head, token) + feature;
        T *dx = (T *)p.out + lk_lrpe_offset(p.out_stride, batch, at.head, token) + feature;
        lk_lrpe_step<T> next = {};
        if (count > 0) lk_lrpe_load_step<ACT, true>(&next, p, dy, x, token < p.grid.prefix);
        if (at.owner) lk_lrpe_load_turns<T, TOKENS>(&turns, p, at.head, feature);
        if (!TOKENS) lk_lrpe_turn_to<TOKENS>(&angles, turns, p, token, feature);
#pragma unroll 1
        for (int i = 0; i < steps; i++, dx += p.out_stride[3]) {
            const lk_lrpe_step<T> now = next;
            const int64_t here = token;
            dy += p.in_stride[3], x += p.x_stride[3], token += TOKENS ? p.token_step : 0;
            if (i + 1 < count) lk_lrpe_load_step<ACT, true>(&next, p, dy, x, token < p.grid.prefix);
            if (TOKENS) lk_lrpe_turn_to<TOKENS>(&angles, turns, p, here, feature);
            lk_lrpe_backward_step<ACT>(dx, now, angles, p, at.owner, !ACT || i < count, &sums);
        }
    }
    lk_griddepcontrol_launch_dependents();
    if (!at.owner) return;
    float *slot = p.partial + (at.slot * p.heads + at.head) * p.dim + feature;
#pragma unroll
    for (int j = 0; j < N; j++) slot[j] = sums.of[j];
}

/* A warp owns rows, and its lanes every 32nd feature. A row of up to LK_LRPE_ROW_FEATURES features is read once; a longer one
 * piece by piece, and for softmax once more a piece, since what a feature needs of its row takes all of it. */
#define LK_LRPE_ROW_N 4
#define LK_LRPE_ROW_FEATURES (32 * LK_LRPE_ROW_N)

/* Features first + lane, first + lane + 32, ... of a row; what lies beyond its end is `beyond`. */
template <class T> LK_DEVICE void lk_lrpe_load_row(float (&v)[LK_LRPE_ROW_N], const T *row, int feature, int dim, float beyond)
{
#pragma unroll
    for (int j = 0; j < LK_LRPE_ROW_N; j++) v[j] = feature + 32 * j < dim ? lk_to_float(row[feature + 32 * j]) : beyond;
}

/* act of a piece of a row: v holds it, with -inf beyond the row's end, where softmax makes 0 of it. */
template <class T>
LK_DEVICE void lk_lrpe_activate_piece(float (&v)[LK_LRPE_ROW_N], lk_lse *state, const lk_lrpe_plan &p, const T *row)
{
    if (p.activation != LK_MD_LRPE_COSINE_SOFTMAX) {
        lk_lrpe_activate(p.activation, v);
        return;
    }
    lk_lse s = lk_lse_empty();
    if (p.dim <= LK_LRPE_ROW_FEATURES) s = lk_lse_add(s, v);
    for (int f = threadIdx.x % 32; p.dim > LK_LRPE_ROW_FEATURES && f < p.dim; f += LK_LRPE_ROW_FEATURES) {
        float all[LK_LRPE_ROW_N];
        lk_lrpe_load_row(all, row, f, p.dim, -INFINITY);
        s = lk_lse_add(s, all);
    }
    *state = lk_lse_warp(s);
    lk_lrpe_normalize(v, *state);
}

template <class T>
LK_KERNEL void __launch_bounds__(LK_LRPE_THREADS, 3) lk_lrpe_forward_row_kernel(const __grid_constant__ lk_lrpe_plan p)
{
    constexpr int N = LK_LRPE_ROW_N;
    const lk_lrpe_place at = lk_lrpe_find(p, (int64_t)blockIdx.x * (LK_LRPE_THREADS / 32) + threadIdx.x / 32);
    lk_griddepcontrol_wait();
    if (!at.owner) return;
    for (int feature = threadIdx.x % 32; feature - (int)(threadIdx.x % 32) < p.dim; feature += LK_LRPE_ROW_FEATURES) {
        lk_lrpe_turns<N> turns;
        lk_lrpe_angles<N> angles;
        lk_lrpe_load_turns<T, 32>(&turns, p, at.head, feature);
        int64_t token = at.token;
        for (int o = 0; o < at.tokens; o++, token += p.token_step) {
            lk_lrpe_turn_to<32>(&angles, turns, p, token, feature);
            for (int i = 0; i < at.batches; i++) {
                const T *x = (const T *)p.in + lk_lrpe_offset(p.in_stride, at.batch + i, at.head, token);
                T *y = (T *)p.out + lk_lrpe_offset(p.out_stride, at.batch + i, at.head, token);
                float v[N];
                lk_lse state;
                lk_lrpe_load_row(v, x, feature, p.dim, -INFINITY);
                lk_lrpe_activate_piece(v, &state, p, x);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    const int f = feature + 32 * j;
                    if (f >= p.dim) break;
                    lk_put(y + f, v[j] * angles.cos[j]);
                    lk_put(y + p.dim + f, angles.still ? 0.0f : v[j] * angles.sin[j]);
                }
            }
        }
    }
    lk_griddepcontrol_launch_dependents();
}

/* A piece of dy: u and v, 0 beyond the row's end. */
template <class T>
LK_DEVICE void lk_lrpe_load_dy(float (&u)[LK_LRPE_ROW_N], float (&v)[LK_LRPE_ROW_N], const lk_lrpe_plan &p, const T *dy,
                               int feature, bool still)
{
#pragma unroll
    for (int j = 0; j < LK_LRPE_ROW_N; j++) {
        const int f = feature + 32 * j;
        u[j] = v[j] = f < p.dim && !p.read_dy ? 1.0f : 0.0f;
        if (f < p.dim && p.read_dy) u[j] = lk_to_float(dy[f]);
        if (f < p.dim && p.read_dy && !still) v[j] = lk_to_float(dy[p.dim + f]);
        if (still) v[j] = 0.0f;
    }
}

/* sum_f g[f] act(x[f]) over a row longer than a piece, angles and all. */
template <class T>
LK_NOINLINE float lk_lrpe_dot(const lk_lrpe_plan &p, const T *x, const T *dy, lk_lse state, int64_t head, int64_t token)
{
    constexpr int N = LK_LRPE_ROW_N;
    float dot = 0.0f;
    for (int feature = threadIdx.x % 32; feature < p.dim; feature += LK_LRPE_ROW_FEATURES) {
        lk_lrpe_turns<N> turns;
        lk_lrpe_angles<N> angles;
        lk_lrpe_load_turns<T, 32>(&turns, p, head, feature);
        lk_lrpe_turn_to<32>(&angles, turns, p, token, feature);
        float act[N], u[N], v[N], g[N];
        lk_lrpe_load_row(act, x, feature, p.dim, -INFINITY);
        lk_lrpe_normalize(act, state);
        lk_lrpe_load_dy(u, v, p, dy, feature, angles.still);
        lk_lrpe_turn_back(g, angles, u, v);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (feature + 32 * j < p.dim) dot = fmaf(g[j], act[j], dot);
    }
    return lk_sum_warp(dot);
}

template <class T>
LK_KERNEL void __launch_bounds__(LK_LRPE_DTHETA_THREADS, LK_LRPE_DTHETA_BLOCKS)
    lk_lrpe_backward_row_kernel(const __grid_constant__ lk_lrpe_plan p)
{
    constexpr int N = LK_LRPE_ROW_N;
    const lk_lrpe_place at = lk_lrpe_find(p, (int64_t)blockIdx.x * (LK_LRPE_DTHETA_THREADS / 32) + threadIdx.x / 32);
    lk_griddepcontrol_wait();
    if (!at.owner) return;
    for (int feature = threadIdx.x % 32; feature - (int)(threadIdx.x % 32) < p.dim; feature += LK_LRPE_ROW_FEATURES) {
        lk_lrpe_turns<N> turns;
        lk_lrpe_angles<N> angles;
        lk_lrpe_load_turns<T, 32>(&turns, p, at.head, feature);
        lk_lrpe_sums<N> sums = {};
        int64_t token = at.token;
        for (int o = 0; o < at.tokens; o++, token += p.token_step) {
            lk_lrpe_turn_to<32>(&angles, turns, p, token, feature);
            for (int i = 0; i < at.batches; i++) {
                const T *dy = (const T *)p.in + lk_lrpe_offset(p.in_stride, at.batch + i, at.head, token);
                const T *x = (const T *)p.x + lk_lrpe_offset(p.x_stride, at.batch + i, at.head, token);
                T *dx = (T *)p.out + lk_lrpe_offset(p.out_stride, at.batch + i, at.head, token);
                float u[N], v[N], g[N], raw[N] = {}, act[N];
                lk_lse state = lk_lse_empty();
                lk_lrpe_load_dy(u, v, p, dy, feature, angles.still);
                if (p.read_x) lk_lrpe_load_row(raw, x, feature, p.dim, -INFINITY);
#pragma unroll
                for (int j = 0; j < N; j++) act[j] = raw[j];
                lk_lrpe_activate_piece(act, &state, p, x);
                lk_lrpe_turn_back(g, angles, u, v);
                if (p.partial) lk_lrpe_add_dtheta(&sums, angles, act, u, v);
                if (p.activation == LK_MD_LRPE_COSINE_SOFTMAX) {
                    float dot = 0.0f;
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (feature + 32 * j < p.dim) dot = fmaf(g[j], act[j], dot);
                    dot = p.dim <= LK_LRPE_ROW_FEATURES ? lk_sum_warp(dot) : lk_lrpe_dot(p, x, dy, state, at.head, token);
#pragma unroll
                    for (int j = 0; j < N; j++) g[j] = act[j] * (g[j] - dot);
                } else {
                    lk_lrpe_chain(p.activation, g, raw);
                }
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (p.write_dx && feature + 32 * j < p.dim) lk_put(dx + feature + 32 * j, g[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            const int f = feature + 32 * j;
            if (p.partial && f < p.dim) p.partial[(at.slot * p.heads + at.head) * p.dim + f] = sums.of[j];
        }
    }
    lk_griddepcontrol_launch_dependents();
}

/* dtheta from the partial sums: a block owns 8 neighbouring elements, its warps' quarters take turns over slots and axes. */
typedef struct {
    const float *partial;
    float *dtheta;
    int64_t heads, e, dim, slots;
    bool accumulate;
} lk_lrpe_dtheta_plan;

#define LK_LRPE_SIDE 8
#define LK_LRPE_SHARERS (LK_LRPE_THREADS / LK_LRPE_SIDE)

LK_KERNEL void __launch_bounds__(LK_LRPE_THREADS) lk_lrpe_dtheta_kernel(lk_lrpe_dtheta_plan p)
{
    LK_SHARED(float, part, [LK_LRPE_THREADS]); /* [sharer][side] */
    const int side = threadIdx.x % LK_LRPE_SIDE, sharer = threadIdx.x / LK_LRPE_SIDE;
    const int64_t at = (int64_t)blockIdx.x * LK_LRPE_SIDE + side, head = at / p.e;
    float sum = 0.0f, lost = 0.0f;
    lk_griddepcontrol_wait();
    if (head < p.heads)
        for (int64_t f = at - head * p.e; f < p.dim; f += p.e)
#pragma unroll 8
            for (int64_t slot = sharer; slot < p.slots; slot += LK_LRPE_SHARERS)
                lk_lrpe_add(&sum, &lost, p.partial[(slot * p.heads + head) * p.dim + f]);
    part[threadIdx.x] = sum;
    for (int half = LK_LRPE_SHARERS / 2; half > 0; half /= 2) {
        __syncthreads(); /* part is complete up to 2 half */
        if (sharer < half) part[threadIdx.x] += part[threadIdx.x + half * LK_LRPE_SIDE];
    }
    lk_griddepcontrol_launch_dependents();
    if (sharer > 0 || head >= p.heads) return;
    p.dtheta[at] = p.accumulate ? p.dtheta[at] + part[side] : part[side];
}

/* ---- Launchers ---------------------------------------------------------------------------------------------------------- */

/* Threads an SM up to which walks are split, and turns over the batch, which cost more to begin: 4 x 4 x 4 cells are at 0.84
 * of the ceiling unsplit and at 0.77 split in two; the most tokens of a walk, which bounds its angles' errors; up to how many
 * batches walks go over tokens; threads an SM that share dtheta's sums. */
#define LK_LRPE_FILL 1024
#define LK_LRPE_BATCH_FILL 512
#define LK_LRPE_TOKENS_MOST 16
#define LK_LRPE_FEW_BATCHES 2
#define LK_LRPE_DTHETA_FILL 384

/* prefix + the product of shape; INT64_MAX where that is more. */
LK_HOST int64_t lk_lrpe_tokens(const lk_md_lrpe_cosine_args *a)
{
    int64_t cells = 1, tokens;
    for (int i = 0; i < a->axes; i++) cells = lk_count(cells, a->shape[i]);
    return __builtin_add_overflow(cells, a->prefix, &tokens) ? INT64_MAX : tokens;
}

/* How much of the work an item does where dtheta is wanted: many tokens and batches of a head, so that its partial sums, `dim`
 * floats for each of `slots` items of a head, are few. */
typedef struct {
    int64_t token_step, stretch, slots;
    size_t bytes; /* of the partial sums: the workspace */
} lk_lrpe_split;

LK_HOST lk_status lk_lrpe_split_dtheta(const char *op, const lk_md_lrpe_cosine_args *a, int sms, lk_lrpe_split *split)
{
    const int64_t tokens = lk_lrpe_tokens(a), features = (int64_t)sms * LK_LRPE_DTHETA_FILL * 8;
    *split = {};
    if (!a->dtheta || a->batch == 0 || a->heads == 0 || tokens == 0) return LK_OK;
    int64_t slots = a->heads > features / a->dim ? 1 : lk_ceil_div(features, a->heads * a->dim);
    while (lk_ceil_div(tokens, slots) >= 1 << 30) slots *= 2; /* steps are counted in ints */
    split->token_step = tokens < slots ? tokens : slots;
    const int64_t splits = slots / split->token_step < a->batch ? slots / split->token_step : a->batch;
    split->stretch = lk_ceil_div(a->batch, splits);
    if (split->stretch >= 1 << 30) split->stretch = 1 << 30;
    split->slots = split->token_step * lk_ceil_div(a->batch, split->stretch);
    if (split->slots > ((int64_t)1 << 60) / a->heads / a->dim)
        return lk_fail(LK_ERR_SHAPE, op, "dtheta's partial sums, %lld x heads x dim, would take more than 2^62 bytes",
                       (long long)split->slots);
    split->bytes = (size_t)(split->slots * a->heads * a->dim) * sizeof(float);
    return LK_OK;
}

#define LK_LRPE_TENSOR(name, use, width)                                                                                       \
    {#name, a->name, sizeof(T), use, width,                                                                                    \
     {{a->batch, &a->name##_batch_stride, #name "_batch_stride"}, {a->heads, &a->name##_head_stride, #name "_head_stride"},    \
      {tokens, &a->name##_token_stride, #name "_token_stride"}}}

/* Validates; a becomes the arguments with every default filled in, the path too, and NULL for what the call does not read. sms:
 * lk_device's, or LK_QUERY. */
template <class T>
LK_HOST lk_status lk_md_lrpe_cosine_check(const char *op, const lk_md_lrpe_cosine_args *args, bool backward, int sms,
                                          lk_md_lrpe_cosine_args *a, lk_lrpe_split *split)
{
    if (!args) return lk_fail(LK_ERR_NULL, op, "args is NULL");
    *a = *args;
    const bool query = sms == LK_QUERY;
    a->axes = a->axes < 1 ? 1 : a->axes > 8 ? 8 : a->axes; /* what was given is checked below */
    if (a->e == 0) a->e = a->dim / a->axes + (a->dim % a->axes != 0);
    if (!backward) a->dtheta = NULL;
    const bool reads_x = !backward || a->dtheta || a->activation;
    if (!reads_x) a->x = NULL;
    const int64_t tokens = lk_lrpe_tokens(a), theta = lk_count(a->heads, a->e), wide = lk_count(2, a->dim);
    lk_tensor list[] = {
        LK_LRPE_TENSOR(x, reads_x ? LK_REQUIRED | LK_MAY_OVERLAP : LK_UNUSED, a->dim),
        {"theta", a->theta, lk_dtype_bytes<T>(a->theta_dtype), LK_REQUIRED, a->batch && tokens ? theta : 0},
        LK_LRPE_TENSOR(y, backward ? LK_UNUSED : LK_OUT | LK_REQUIRED, wide),
        LK_LRPE_TENSOR(dy, backward ? LK_MAY_OVERLAP : LK_UNUSED, wide),
        LK_LRPE_TENSOR(dx, backward ? LK_OUT : LK_UNUSED, a->dim),
        {"dtheta", a->dtheta, 4, backward ? LK_OUT : LK_UNUSED, theta},
        {"workspace", a->workspace, 1, backward ? LK_IN : LK_UNUSED, 0}, /* its size is known below */
    };
    static const char *const shape[8] = {"shape[0]", "shape[1]", "shape[2]", "shape[3]",
                                         "shape[4]", "shape[5]", "shape[6]", "shape[7]"};
    const int count = lk_used_tensors(list, LK_COUNT(list));
    lk_status status = query ? LK_OK : lk_check_null(op, list, count);
    if (!status) status = lk_check_size(op, "axes", args->axes, 0, 8);
    if (!status) status = lk_check_size(op, "batch", a->batch, 0, INT64_MAX);
    if (!status) status = lk_check_size(op, "heads", a->heads, 0, INT64_MAX);
    if (!status) status = lk_check_size(op, "dim", a->dim, 1, (int64_t)1 << 30);
    if (!status) status = lk_check_size(op, "e", a->e, lk_ceil_div(a->dim, a->axes), INT64_MAX);
    if (!status) status = lk_check_size(op, "prefix", a->prefix, 0, INT64_MAX);
    for (int i = 0; i < a->axes && !status; i++) status = lk_check_size(op, shape[i], a->shape[i], 0, INT64_MAX);
    if (!status) status = lk_check_shapes(op, list, count, query);
    const int64_t limit = (int64_t)1 << 31;
    for (int i = 0; i < a->axes && !status && tokens > a->prefix; i++) /* a grid without cells has no positions */
        if (a->offset[i] <= -limit || a->offset[i] >= limit || a->shape[i] > limit || a->offset[i] + a->shape[i] > limit)
            status = lk_fail(LK_ERR_VALUE, op, "offset[%d] %lld and shape[%d] %lld make a position outside (-2^31, 2^31)", i,
                             (long long)a->offset[i], i, (long long)a->shape[i]);
    if (!status) status = lk_check_dtype<T>(op, "theta_dtype", a->theta_dtype);
    if (!status)
        status = lk_check_enum(op, "activation", a->activation, LK_MD_LRPE_COSINE_SOFTMAX, "LK_MD_LRPE_COSINE_NONE to SOFTMAX");
    if (!status) status = lk_check_enum(op, "path", a->path, LK_MD_LRPE_COSINE_ROW, "LK_MD_LRPE_COSINE_*");
    if (status) return status;
    const bool softmax = a->activation == LK_MD_LRPE_COSINE_SOFTMAX;
    bool vector = a->dim % LK_VEC<T> == 0 && !(softmax && a->dim > 32 * LK_VEC<T>);
    for (int i = 0; i < count; i++)
        for (int d = 0; d < 3 && list[i].dim[d].stride; d++)
            vector = vector && *list[i].dim[d].stride % LK_VEC<T> == 0 && (query || (uintptr_t)list[i].pointer % 16 == 0);
    if (a->path == LK_MD_LRPE_COSINE_VECTOR && !vector)
        return lk_fail(LK_ERR_PATH, op, "path %d (vector) needs dim, strides and pointers that are multiples of 16 bytes%s",
                       a->path, softmax ? ", and for softmax dim of 512 bytes at most" : "");
    if (a->path == LK_MD_LRPE_COSINE_AUTO) a->path = vector ? LK_MD_LRPE_COSINE_VECTOR : LK_MD_LRPE_COSINE_ROW;
    if (query) return LK_OK;
    status = lk_check_alignment(op, list, count);
    if (!status) status = lk_lrpe_split_dtheta(op, a, sms, split);
    if (!status) status = lk_check_workspace(op, a->workspace, a->workspace_bytes, split->bytes);
    if (status) return status;
    lk_check_warn(op, a->batch == 0, "batch is 0; nothing is computed");
    lk_check_warn(op, a->heads == 0, "heads is 0; nothing is computed");
    lk_check_warn(op, tokens == 0, "there are no tokens; nothing is computed");
    if (backward) list[count - 1].width = (int64_t)split->bytes;
    return lk_check_allocations(op, list, count);
}

LK_HOST void lk_lrpe_set_strides(int64_t (&to)[4], int64_t batch, int64_t head, int64_t token)
{
    to[0] = batch, to[1] = head, to[2] = token;
}

/* The tensors, theta and the grid. */
template <class T> LK_HOST void lk_lrpe_start_plan(lk_lrpe_plan *p, const lk_md_lrpe_cosine_args &a, bool backward)
{
    p->tokens = lk_lrpe_tokens(&a);
    if (backward) {
        p->read_dy = a.dy, p->read_x = a.x, p->write_dx = a.dx;
        p->partial = a.dtheta ? (float *)a.workspace : NULL;
        p->x = a.x ? a.x : a.dx, p->in = a.dy ? a.dy : p->x, p->out = a.dx ? a.dx : (void *)p->x;
        lk_lrpe_set_strides(p->in_stride, a.dy_batch_stride, a.dy_head_stride, a.dy_token_stride);
        if (a.x) lk_lrpe_set_strides(p->x_stride, a.x_batch_stride, a.x_head_stride, a.x_token_stride);
        lk_lrpe_set_strides(p->out_stride, a.dx_batch_stride, a.dx_head_stride, a.dx_token_stride);
    } else {
        p->in = a.x, p->out = a.y;
        lk_lrpe_set_strides(p->in_stride, a.x_batch_stride, a.x_head_stride, a.x_token_stride);
        lk_lrpe_set_strides(p->out_stride, a.y_batch_stride, a.y_head_stride, a.y_token_stride);
    }
    p->theta = a.theta, p->theta_f32 = a.theta_dtype == LK_DTYPE_F32;
    p->heads = a.heads, p->batch = a.batch, p->dim = (int)a.dim, p->activation = a.activation;
    p->theta_stride = a.e, p->e = (int)(a.e < a.dim ? a.e : a.dim);
    for (p->e_shift = 31; (int64_t)1 << (p->e_shift - 31) < p->e;) p->e_shift++;
    p->e_factor = (uint32_t)lk_ceil_div((int64_t)1 << p->e_shift, p->e);
    p->axes = a.axes, p->axes_a_vector = a.axes == 1 || a.e % LK_VEC<T> == 0 ? 1 : a.e >= LK_VEC<T> ? 2 : 3;
    p->grid.prefix = a.prefix;
    int64_t behind = 1;
    const bool cells = p->tokens > a.prefix; /* of an empty grid nobody asks, and its other axes' product may overflow */
    for (int i = a.axes - 1; i >= 0; i--) {
        p->grid.behind[i] = lk_lrpe_make_divisor(behind);
        p->grid.shape[i] = (int)(uint32_t)a.shape[i], p->grid.offset[i] = (int)a.offset[i];
        if (cells) behind *= a.shape[i];
    }
    while (p->walk_axis < a.axes - 1 && a.shape[p->walk_axis] <= 1) p->walk_axis++;
    const int64_t size = p->grid.behind[p->walk_axis].size;
    p->walk_back = lk_ceil_div(a.prefix, size), p->walk_cells = p->walk_back * size - a.prefix;
}

/* Who owns what. groups: threads that share a vector of a token and take turns over the batch. split: of dtheta. */
template <class T>
LK_HOST void lk_lrpe_share_work(lk_lrpe_plan *p, const lk_md_lrpe_cosine_args &a, int sms, bool walk_tokens,
                                const lk_lrpe_split &split, int groups)
{
    const bool vector = a.path == LK_MD_LRPE_COSINE_VECTOR;
    int64_t lanes = vector ? a.dim / LK_VEC<T> : 1;
    p->vecs = (int)lanes;
    if (vector && a.activation == LK_MD_LRPE_COSINE_SOFTMAX) /* a team of a power of two, some of its lanes idle */
        for (lanes = 1; lanes < p->vecs;) lanes *= 2;
    const int64_t most_rows = (int64_t)1 << 56, tokens = p->tokens; /* so that no product overflows */
    const int64_t rows = vector || a.heads * tokens < most_rows ? a.heads * tokens : most_rows;
    const int64_t threads = rows * (vector ? lanes : 32), fill = (int64_t)sms * LK_LRPE_FILL; /* a batch */
    const int64_t behind = p->grid.behind[p->walk_axis].size;
    p->token_step = tokens, p->stretch = 1;
    if (a.dtheta) {
        p->token_step = split.token_step, p->stretch = split.stretch;
    } else if (walk_tokens) {
        int64_t each = threads * a.batch / fill;
        if (each > LK_LRPE_TOKENS_MOST) each = LK_LRPE_TOKENS_MOST;
        if (each > 1) p->token_step = behind * lk_ceil_div(lk_ceil_div(tokens, behind), each);
        p->walk = p->token_step / behind;
        if (p->token_step > tokens) p->token_step = tokens;
    } else { /* stretches of whole rounds of the groups; steps are counted in ints */
        int64_t splits = (vector ? (int64_t)sms * LK_LRPE_BATCH_FILL : fill) / (threads * groups);
        const int64_t most = lk_ceil_div(a.batch, LK_LRPE_GROUPS), least = lk_ceil_div(a.batch, 1 << 30);
        splits = splits < most ? splits : most;
        p->stretch = lk_ceil_div(a.batch, splits > least ? splits : least);
        if (p->stretch < a.batch) p->stretch = lk_ceil_div(p->stretch, LK_LRPE_GROUPS) * LK_LRPE_GROUPS;
        if (!vector) /* a warp a row: rows may outnumber the warps of a grid */
            while (p->token_step > 1 && a.heads * p->token_step * lk_ceil_div(a.batch, p->stretch) > (int64_t)1 << 33)
                p->token_step = lk_ceil_div(p->token_step, 2);
    }
    p->tokens_each = (int)lk_ceil_div(tokens, p->token_step);
    p->heads_inner = p->in_stride[1] < p->in_stride[2];
    p->lanes = lk_lrpe_make_divisor(lanes);
    p->inner = lk_lrpe_make_divisor(p->heads_inner ? a.heads : p->token_step);
    p->outer = lk_lrpe_make_divisor(p->heads_inner ? p->token_step : a.heads);
    p->items = lanes * a.heads * p->token_step * lk_ceil_div(a.batch, p->stretch);
    p->grid.small = p->items < 1 << 30 && tokens + behind < 1 << 30;
    p->steps = walk_tokens ? p->tokens_each : (int)lk_ceil_div(p->stretch, groups);
    p->outers = walk_tokens ? (int)p->stretch : p->tokens_each;
    int64_t *const strides[3] = {p->in_stride, p->x_stride, p->out_stride};
    for (int i = 0; i < 3; i++) /* unsigned: it may overflow where there is no second step */
        strides[i][3] = walk_tokens ? (int64_t)((uint64_t)p->token_step * (uint64_t)strides[i][2])
                                    : (int64_t)((uint64_t)groups * (uint64_t)strides[i][0]);
}

/* The kernel of the vector path. groups 1: it walks, over tokens, or for dtheta over tokens or the batch. */
template <class T, bool ACT>
LK_HOST void (*lk_lrpe_vector_kernel(bool backward, bool dtheta, bool walk_tokens, int groups))(lk_lrpe_plan)
{
    if (dtheta)
        return walk_tokens ? lk_lrpe_backward_dtheta_kernel<T, true, ACT> : lk_lrpe_backward_dtheta_kernel<T, false, ACT>;
    if (groups == 1) return backward ? lk_lrpe_backward_walk_kernel<T, ACT> : lk_lrpe_forward_walk_kernel<T, ACT>;
    if (groups == LK_LRPE_GROUPS)
        return backward ? lk_lrpe_backward_batch_kernel<T, ACT, LK_LRPE_GROUPS>
                        : lk_lrpe_forward_batch_kernel<T, ACT, LK_LRPE_GROUPS>;
    return backward ? lk_lrpe_backward_batch_kernel<T, ACT, LK_LRPE_FEW_GROUPS>
                    : lk_lrpe_forward_batch_kernel<T, ACT, LK_LRPE_FEW_GROUPS>;
}

/* Over a few batches angles are worth less than theta's turns, which hold for all tokens: a thread walks over tokens. A vector
 * on more than two axes would need too many positions: it shares its angles over a single batch too. */
template <class T>
LK_HOST lk_status lk_lrpe_launch(const char *op, const lk_device *device, const lk_md_lrpe_cosine_args &a, bool backward,
                                 const lk_lrpe_split &split, cudaStream_t stream)
{
    lk_lrpe_plan p = {};
    lk_lrpe_start_plan<T>(&p, a, backward);
    const bool vector = a.path == LK_MD_LRPE_COSINE_VECTOR, act = a.activation || (backward && !a.dy);
    const bool walk_tokens = vector && a.batch <= LK_LRPE_FEW_BATCHES && p.axes_a_vector <= 2;
    int groups = 1, block = backward ? LK_LRPE_DTHETA_THREADS : LK_LRPE_THREADS;
    if (vector && !a.dtheta) {
        const int64_t threads = a.heads * p.tokens * (a.dim / LK_VEC<T>) * LK_LRPE_GROUPS;
        const bool few = threads > (int64_t)device->sms * 1024 * LK_LRPE_GROUPED_WAVES;
        block = walk_tokens ? LK_LRPE_THREADS : LK_LRPE_BATCH_THREADS;
        if (!walk_tokens) groups = few ? LK_LRPE_FEW_GROUPS : LK_LRPE_GROUPS;
    }
    lk_lrpe_share_work<T>(&p, a, device->sms, walk_tokens, split, groups);
    void (*kernel)(lk_lrpe_plan) = backward ? lk_lrpe_backward_row_kernel<T> : lk_lrpe_forward_row_kernel<T>;
    if (vector)
        kernel = act ? lk_lrpe_vector_kernel<T, true>(backward, a.dtheta, walk_tokens, groups)
                     : lk_lrpe_vector_kernel<T, false>(backward, a.dtheta, walk_tokens, groups);
    return lk_launch_pdl(op, device, kernel, lk_ceil_div(p.items, block / (vector ? groups : 32)), 1, block, 0, stream, p);
}

template <class T>
LK_HOST lk_status lk_md_lrpe_cosine_forward(const char *op, const lk_md_lrpe_cosine_args *args, cudaStream_t stream)
{
    lk_md_lrpe_cosine_args a = {};
    lk_lrpe_split split = {};
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    lk_status status = lk_md_lrpe_cosine_check<T>(op, args, false, device.sms, &a, &split);
    if (!status) status = lk_asked_device(op, error);
    if (status || a.batch == 0 || a.heads == 0 || lk_lrpe_tokens(&a) == 0) return status;
    return lk_lrpe_launch<T>(op, &device, a, false, split, stream);
}

template <class T>
LK_HOST lk_status lk_md_lrpe_cosine_backward(const char *op, const lk_md_lrpe_cosine_args *args, cudaStream_t stream)
{
    lk_md_lrpe_cosine_args a = {};
    lk_lrpe_split split = {};
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    lk_status status = lk_md_lrpe_cosine_check<T>(op, args, true, device.sms, &a, &split);
    if (!status) status = lk_asked_device(op, error);
    if (status || a.heads == 0) return status;
    if (a.batch > 0 && lk_lrpe_tokens(&a) > 0) status = lk_lrpe_launch<T>(op, &device, a, true, split, stream);
    if (status || !a.dtheta) return status;
    const lk_lrpe_dtheta_plan sum = {(const float *)a.workspace, a.dtheta, a.heads, a.e, a.dim, split.slots, a.accumulate != 0};
    return lk_launch_pdl(op, &device, lk_lrpe_dtheta_kernel, lk_ceil_div(a.heads * a.e, LK_LRPE_SIDE), 1, LK_LRPE_THREADS, 0,
                         stream, sum);
}

template <class T>
LK_HOST lk_status lk_md_lrpe_cosine_forward_workspace(const char *op, const lk_md_lrpe_cosine_args *args, size_t *bytes)
{
    lk_md_lrpe_cosine_args a = {};
    lk_lrpe_split split = {};
    return lk_no_workspace(lk_md_lrpe_cosine_check<T>(op, args, false, LK_QUERY, &a, &split), bytes);
}

template <class T>
LK_HOST lk_status lk_md_lrpe_cosine_backward_workspace(const char *op, const lk_md_lrpe_cosine_args *args, size_t *bytes)
{
    lk_md_lrpe_cosine_args a = {};
    lk_lrpe_split split = {};
    lk_device device = {};
    lk_status status = lk_md_lrpe_cosine_check<T>(op, args, true, LK_QUERY, &a, &split);
    if (!status && a.dtheta) status = lk_asked_device(op, lk_current_device(&device));
    if (!status) status = lk_lrpe_split_dtheta(op, &a, device.sms, &split);
    if (!status && bytes) *bytes = split.bytes;
    return status;
}

#define LK_DEFINE_MD_LRPE_COSINE(T)                                                                                            \
    LK_DECLARE_MD_LRPE_COSINE(T)                                                                                               \
    LK_EMIT(md_lrpe_cosine, forward, T)                                                                                        \
    LK_EMIT(md_lrpe_cosine, backward, T)

#else
#define LK_DEFINE_MD_LRPE_COSINE(T) LK_NEEDS_NVCC("LK_DEFINE_MD_LRPE_COSINE")
#endif /* CUDA or the simulator */
#endif
