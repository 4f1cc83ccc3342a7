// SPDX-License-Identifier: MIT
/* srms_norm_fp8.cuh - forward of srms_norm.cuh that ends in 8 bits: y as E4M3 or E5M2 with scales, as matrix products of 8 bits
 * take it, from the same single reading of x. Also the transposed copy, for the product that is the weight's gradient.
 *
 *   y[r,c]    = (s[r,c] w[c]) rstd[r],                 the names are those at the top of srms_norm.cuh; without bias
 *   q[r,c]    = y[r,c] / scale, to 8 bits,             so y is nearly scale q
 *   scale     = max |y| / most,                        over the elements that share it; most: 448 (E4M3) or 57344 (E5M2)
 *   TENSOR    one scale, tensor_scale, which the caller knows beforehand; amax is raised to max |y|
 *   ROW       one for each row
 *   BLOCK     one for each 128 columns of a row
 *   MX        one for each 32 columns of a row, a power of two as a byte (ue8m0)
 *   q_transposed[c,r]   the same y with the scale of TENSOR, or a scale for each 128 (MX: 32) rows of a column
 *
 * power_of_two: a scale is the least power of two that is not below max |y| / most. MX is always so.
 * scale_rounding FLOOR: that power of two is 2^(floor(log2 max |y|) - emax) instead, emax: 8 (E4M3) or 15; what is above most scale
 * saturates.
 * Where max |y| is 0 the scale is 1, in MX the byte 0. An infinity or a NaN among y makes the scale NaN, in MX the byte 255, and all
 * q of that scale NaN. TENSOR, whose scale is given: an infinity saturates and makes amax infinite; NaN is NaN, and raises no amax.
 *
 * Use        In one .cu file:                              Anywhere, C included:
 *                #include "lk/srms_norm_fp8.cuh"               #include "lk/srms_norm_fp8.cuh"
 *                LK_DEFINE_SRMS_NORM_FP8(bf16)                 LK_DECLARE_SRMS_NORM_FP8(bf16)
 *            x is of T. `common` is what srms_norm_forward gets; y, residual_out and rstd may be NULL:
 *                lk_srms_norm_fp8_args args = {};
 *                args.common.x = x, args.common.weight = weight, args.common.rows = rows, args.common.cols = cols;
 *                args.common.eps = 1e-6f, args.common.rstd = rstd;
 *                args.scaling = LK_SRMS_NORM_FP8_ROW, args.q = q, args.scale = scale;
 *                lk_status status = lk_srms_norm_fp8_forward_bf16(&args, stream);
 *            Then lk_srms_norm_backward_bf16(&args.common, stream) as ever: the gradient goes straight through the rounding. dy is of
 *            T, or with common.dy_dtype of f32.
 * Needs      srms_norm.cuh and what that needs.
 * Options    Those of srms_norm's forward, without bias and batch_invariant. With q_transposed also without groups, and nothing in place.
 *            A zeroed struct has format E4M3 and one scale of 1 for the tensor. scale_rounding: of scales that are powers of two.
 * Errors     As in srms_norm.cuh. LK_ERR_NULL: q is NULL; scale is NULL, except in TENSOR; transposed_scale is NULL beside
 *            q_transposed, except in TENSOR. LK_ERR_VALUE: a bias; batch_invariant; a scale of TENSOR's beside another scaling, or the other way
 *            round; ROW with q_transposed; scale_rounding beside scales that are no powers of two. LK_ERR_PATH: CLUSTER.
 * Repeatable As in srms_norm.cuh. amax is a maximum, so the order of the rows does not matter.
 * Read on    lk/srms_norm_fp8.md: how exact results are, and what is read and written.
 *
 * Two kernels:
 *   lk_srms_norm_fp8_kernel             a team of 1 to 32 lanes or a block per row; where s is x alone, a team has many rows. A
 *                                       thread holds s w of 4 vectors of a row, from its sum to its result. The largest |s w| of
 *                                       a row is found beside the sum of squares, so one exchange gives both. Lanes find the
 *                                       maxima of 128 or 32 columns among them, those of 4 vectors in one exchange.
 *   lk_srms_norm_fp8_transpose_kernel   with q_transposed: a cluster of blocks has 128 rows, and keeps them in shared memory. The
 *                                       blocks of a cluster run at once, with 4-byte T or a residual each on an SM of its own: they
 *                                       wait while another kernel holds most SMs
 * Fastest: rows of all tensors start and end on 16 bytes (q: on 8, with x of f32 on 4), and a weight of T on 16 bytes. Other rows
 * are read and written element by element.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_SRMS_NORM_FP8_CUH
#define LK_SRMS_NORM_FP8_CUH

#include "srms_norm.cuh"

/* Which elements share a scale. */
enum {
    LK_SRMS_NORM_FP8_TENSOR = 0, /* all */
    LK_SRMS_NORM_FP8_ROW = 1,    /* those of a row */
    LK_SRMS_NORM_FP8_BLOCK = 2,  /* 128 columns of a row */
    LK_SRMS_NORM_FP8_MX = 3      /* 32 columns of a row; scales are bytes e that mean 2^(e - 127), and 255 NaN */
};
/* How a scale becomes a power of two. */
enum {
    LK_SRMS_NORM_FP8_UP = 0,   /* the least that is not below max |y| / most: nothing saturates */
    LK_SRMS_NORM_FP8_FLOOR = 1 /* 2^(floor(log2 max |y|) - emax), as the OCP specification of MX says */
};

/* All fields are forward's. blocks: ceil(cols / 128), MX: ceil(cols / 32), ROW: 1; row_blocks: the same of rows. */
typedef struct {
    lk_srms_norm_args common;           /* of forward; bias is NULL */
    const float *tensor_scale;          /* in      f32 [1], TENSOR: positive and finite; NULL means 1 */
    float *amax;                        /* in out  f32 [1], TENSOR: raised to the largest |y| that is no NaN; NULL to skip */
    void *q;                            /* out     8 bits [rows, cols] */
    void *scale;                        /* out     f32, MX: a byte [rows, blocks]; TENSOR: NULL */
    void *q_transposed;                 /* out     8 bits [cols, rows]; NULL to skip */
    void *transposed_scale;             /* out     like scale, [cols, row_blocks]; NULL without q_transposed and in TENSOR */
    int64_t q_stride;                   /* elements between rows of q; 0 means packed */
    int64_t scale_stride;               /* between the scales of a row and of the next; 0 means packed */
    int64_t scale_block_stride;         /* between the scales of a row; 0 means 1 */
    int64_t q_transposed_stride;        /* between rows of q_transposed, which are columns of x; 0 means packed */
    int64_t transposed_scale_stride;    /* between the scales of a column and of the next; 0 means packed */
    int64_t transposed_block_stride;    /* between the scales of a column; 0 means 1 */
    int scaling;                        /* LK_SRMS_NORM_FP8_* */
    int format;                         /* LK_FP8_*, of q and q_transposed */
    int power_of_two;                   /* not 0: scales are powers of two; ROW and BLOCK */
    int scale_rounding;                 /* LK_SRMS_NORM_FP8_UP or _FLOOR; MX, and ROW and BLOCK with power_of_two */
} lk_srms_norm_fp8_args;

#define LK_SRMS_NORM_FP8_FUNCTIONS(X, T)                                                                                       \
    X##_CALL(srms_norm_fp8, forward, LK_FORWARD, T)
#define LK_DECLARE_SRMS_NORM_FP8(T) LK_DECLARE(SRMS_NORM_FP8, T)
#define LK_DEFINE_SRMS_NORM_FP8(T) LK_DEFINE(SRMS_NORM_FP8, T)

#if LK_CUDA

/* ---- Scales -------------------------------------------------------------------------------------------------------------- */

/* What a kernel gets. */
typedef struct {
    lk_srms_norm_fp8_args x; /* its `common` is not used: norm.a is */
    lk_srms_norm_call norm;
    int block_log2;   /* of the columns that share a scale, and in q_transposed of the rows */
    float most;       /* the largest number of the format */
    float inverse;    /* 1 / most */
    bool narrow;      /* scales are powers of two */
    uint32_t up;      /* then: what is added to the bits of the largest |y| before its exponent is taken */
    int emax;         /* the exponent of the largest number */
    bool wide;        /* of q_transposed: rows start on 16 bytes */
    int chunks, held; /* of a block with q_transposed: chunks of columns, and how many of them it holds */
} lk_srms_norm_fp8_call;

typedef struct {
    float scale, inverse; /* inverse is 1 / scale, within a unit in the last place; exactly where it is a power of two */
} lk_srms_norm_fp8_scale;

/* 1 / x for a normal number, within a unit in the last place, exactly for powers of two. */
LK_DEVICE float lk_srms_norm_fp8_inverse(float x)
{
    const float r = lk_rcp(x);
    return fmaf(fmaf(-x, r, 1.0f), r, r);
}

/* The scale of elements whose largest magnitude is amax. Without branches: lanes have different blocks. */
LK_DEVICE lk_srms_norm_fp8_scale lk_srms_norm_fp8_scale_of(const lk_srms_norm_fp8_call &call, float amax)
{
    const bool mx = call.x.scaling == LK_SRMS_NORM_FP8_MX;
    const float of = mx ? amax : fmaxf(amax, 0x1p-80f); /* below, 1 / scale overflows at last */
    lk_srms_norm_fp8_scale s;
    if (call.narrow) { /* the exponent of 0 is MX's least scale; the float that stands for it is not used */
        const int exponent = max((int)((__float_as_uint(of) + call.up) >> 23) - call.emax, 0);
        s = {__uint_as_float((uint32_t)exponent << 23), __uint_as_float((uint32_t)(254 - exponent) << 23)};
    } else {
        const float quotient = of * call.inverse; /* and once more, to round correctly */
        s.scale = fmaf(fmaf(-call.most, quotient, of), call.inverse, quotient), s.inverse = lk_srms_norm_fp8_inverse(s.scale);
    }
    const float instead = amax == 0.0f ? 1.0f : NAN; /* an infinity would become the largest number */
    if (!(amax <= FLT_MAX) || (amax == 0.0f && !mx)) s.scale = s.inverse = instead;
    return s;
}

/* Stores a scale: a float, or in MX its exponent, of NaN 255. */
LK_DEVICE void lk_srms_norm_fp8_put_scale(const lk_srms_norm_fp8_call &call, void *to, int64_t at, float scale)
{
    if (call.x.scaling == LK_SRMS_NORM_FP8_MX) ((uint8_t *)to)[at] = (uint8_t)(__float_as_uint(scale) >> 23);
    else ((float *)to)[at] = scale;
}

/* TENSOR: raises amax. seen: what it was when the kernel began, since most rows change nothing. As the bits of floats that are
 * not negative are ordered as integers are, this is a maximum of integers. A NaN raises nothing. */
LK_DEVICE void lk_srms_norm_fp8_raise(const lk_srms_norm_fp8_call &call, float most, float seen)
{
    if (most > seen) atomicMax((int *)call.x.amax, __float_as_int(most));
}

/* ---- Elements ------------------------------------------------------------------------------------------------------------ */

/* Num elements. The row has `left` of them; the others are 0. Wide: it has all of them, on 16 bytes. */
template <bool Wide, class Elem, int Num> LK_DEVICE void lk_srms_norm_fp8_load(float (&x)[Num], const Elem *from, int left)
{
    if constexpr (Wide) lk_srms_norm_load(x, from);
    else
        LK_UNROLL for (int j = 0; j < Num; j++) x[j] = j < left ? lk_to_float(from[j]) : 0.0f;
}
template <bool Wide, class Elem, int Num> LK_DEVICE void lk_srms_norm_fp8_store(Elem *to, const float (&x)[Num], int left)
{
    if constexpr (Wide) lk_srms_norm_store(to, x);
    else
        LK_UNROLL for (int j = 0; j < Num; j++)
            if (j < left) lk_put(to + j, x[j]);
}
/* s = x + r. */
template <bool Wide, class T, class Res, int Num>
LK_DEVICE void lk_srms_norm_fp8_load_s(float (&s)[Num], const lk_srms_norm_fp8_call &call, int64_t row, int col)
{
    const lk_srms_norm_input &in = call.norm.in;
    const int left = (int)call.norm.a.cols - col;
    float r[Num];
    lk_srms_norm_fp8_load<Wide>(s, (const T *)in.x.data + row * in.x.stride + col, left);
    if (!in.r.data) return;
    lk_srms_norm_fp8_load<Wide>(r, (const Res *)in.r.data + row * in.r.stride + col, left);
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] += r[j];
    lk_srms_norm_round<Res>(s, in);
}
/* s w. group: the first element of the row's weight. Holds: weight is of T and on 16 bytes, or NULL. */
template <class T, bool Holds, bool Wide, int Num>
LK_DEVICE void lk_srms_norm_fp8_weigh(float (&s)[Num], const lk_srms_norm_fp8_call &call, int group, int col)
{
    const lk_srms_norm_args &a = call.norm.a;
    if constexpr (Holds) {
        if (a.weight) lk_srms_norm_apply<false>(s, lk_load_vec_ca((const T *)a.weight + col), a.weight_offset);
    } else if constexpr (Wide) {
        lk_srms_norm_apply(s, call.norm, group + col);
    } else {
        LK_UNROLL for (int j = 0; j < Num; j++) {
            float one[1] = {s[j]};
            if (col + j < (int)a.cols) lk_srms_norm_apply(one, call.norm, group + col + j);
            s[j] = one[0];
        }
    }
}
/* The largest of most and |x|. Numbers: that is no NaN; else a NaN is the largest. */
template <bool Numbers, int Num> LK_DEVICE float lk_srms_norm_fp8_most(float most, const float (&x)[Num])
{
    LK_UNROLL for (int j = 0; j < Num; j++) most = Numbers ? fmaxf(most, fabsf(x[j])) : lk_max_nan(most, fabsf(x[j]));
    return most;
}
/* lk_max_warp, where a NaN is the largest. */
LK_DEVICE float lk_srms_norm_fp8_max_warp(float x, int team)
{
    LK_UNROLL for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) x = lk_max_nan(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
/* Stores Num numbers of 8 bits: x times inverse. format: call.x.format, a constant where the caller has chosen by it. */
template <bool Wide, int Num>
LK_DEVICE void lk_srms_norm_fp8_put(const lk_srms_norm_fp8_call &call, int format, int64_t row, int col, const float (&x)[Num],
                                    float inverse)
{
    uint8_t *to = (uint8_t *)call.x.q + row * call.x.q_stride + col;
    uint32_t word[Num / 4];
    LK_UNROLL for (int i = 0; i < Num / 4; i++)
        word[i] = lk_fp8x2(format, x[4 * i] * inverse, x[4 * i + 1] * inverse) |
                  lk_fp8x2(format, x[4 * i + 2] * inverse, x[4 * i + 3] * inverse) << 16;
    if constexpr (Wide && Num == 8) *(uint2 *)to = make_uint2(word[0], word[1]);
    else if constexpr (Wide) *(uint32_t *)to = word[0];
    else
        LK_UNROLL for (int j = 0; j < Num; j++)
            if (col + j < (int)call.norm.a.cols) to[j] = (uint8_t)(word[j / 4] >> j % 4 * 8);
}

/* ---- Rows ---------------------------------------------------------------------------------------------------------------- */

#define LK_SRMS_NORM_FP8_VECS 4
/* Where teams have many rows: most threads of a block, and how many run on an SM, with the 80 registers that two such blocks
 * allow. */
#define LK_SRMS_NORM_FP8_MANY_THREADS 384
#define LK_SRMS_NORM_FP8_MANY_RESIDENT 768

/* The sum of v[0] and the largest v[1] over a row's team; v[1] is not negative, NaN the largest. Called by: every thread of the
 * block. number: which call it is, 0, 1, 2, ...: calls take turns in two halves of shared memory, so one barrier for each is enough. */
LK_DEVICE void lk_srms_norm_fp8_reduce(const lk_srms_norm_input &in, float (&v)[2], bool both, int number)
{
    LK_SHARED(float2, inbox, [2 * LK_SRMS_NORM_THREADS / 32]);
    const int warps = (int)blockDim.x / 32;
    if (in.team_log2 >= 0 && in.team_log2 < 5) {
        v[0] = lk_sum_warp(v[0], 1 << in.team_log2);
        if (both) v[1] = lk_srms_norm_fp8_max_warp(v[1], 1 << in.team_log2);
        return;
    }
    v[0] = lk_sum_warp(v[0]);
    if (both) v[1] = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(v[1]))); /* as bits are ordered */
    if (in.team_log2 >= 0 || warps == 1) return;
    float2 *const box = inbox + number % 2 * (LK_SRMS_NORM_THREADS / 32);
    if (threadIdx.x % 32 == 0) box[threadIdx.x / 32] = make_float2(v[0], v[1]);
    __syncthreads(); /* orders the writes into the inbox before its reads */
    v[0] = 0.0f;
    LK_UNROLL_BY(4) for (int i = 0; i < warps; i++) v[0] += box[i].x, v[1] = lk_max_nan(v[1], box[i].y);
}

/* BLOCK and MX: stores the scale of the block that y belongs to, and returns its inverse. The lanes of a block are side by side.
 * Called by: all lanes of a warp. */
template <int Num>
LK_DEVICE float lk_srms_norm_fp8_block(const lk_srms_norm_fp8_call &call, int64_t row, int col, const float (&y)[Num], bool there)
{
    const int lanes = call.block_log2 - (Num == 8 ? 3 : 2);
    const float most = lk_srms_norm_fp8_max_warp(lk_srms_norm_fp8_most<false>(0.0f, y), 1 << lanes);
    const lk_srms_norm_fp8_scale scale = lk_srms_norm_fp8_scale_of(call, most);
    const int block = col >> call.block_log2;
    const int64_t at = row * call.x.scale_stride + block * call.x.scale_block_stride;
    if (there && col == block << call.block_log2) lk_srms_norm_fp8_put_scale(call, call.x.scale, at, scale.scale);
    return scale.inverse;
}

/* Writes Num elements of a row; s is s w, and becomes y. Blocks: all lanes of a warp call it, and those without elements say
 * there = false. */
template <class T, bool Wide, bool Blocks, int Num>
LK_DEVICE void lk_srms_norm_fp8_write(const lk_srms_norm_fp8_call &call, float rstd, float inverse, float (&s)[Num], int64_t row,
                                      int col, bool there)
{
    const lk_srms_norm_args &a = call.norm.a;
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] = there ? s[j] * rstd : 0.0f;
    if (there && a.y) lk_srms_norm_fp8_store<Wide>((T *)a.y + row * a.y_stride + col, s, (int)a.cols - col);
    if constexpr (Blocks) inverse = lk_srms_norm_fp8_block(call, row, col, s, there);
    if (there) lk_srms_norm_fp8_put<Wide>(call, call.x.format, row, col, s, inverse);
}
/* Stores Num elements of s. */
template <class Res, bool Wide, int Num>
LK_DEVICE void lk_srms_norm_fp8_put_s(const lk_srms_norm_fp8_call &call, const float (&s)[Num], int64_t row, int col)
{
    const lk_srms_norm_args &a = call.norm.a;
    if (a.residual_out)
        lk_srms_norm_fp8_store<Wide>((Res *)a.residual_out + row * a.residual_out_stride + col, s, (int)a.cols - col);
}

/* A thread's first Vecs vectors of a row: all loads start before the first is waited for. 0 where the row has none. */
template <class T, int Vecs>
LK_DEVICE void lk_srms_norm_fp8_start(lk_vec<T> (&x)[Vecs][1], const T *from, int count)
{
    if (count > (Vecs - 1) * 32) { /* without predicates */
        LK_UNROLL for (int u = 0; u < Vecs; u++) x[u][0] = lk_load_vec_ca(from + u * 32 * LK_VEC<T>);
    } else {
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            x[u][0].raw = make_uint4(0, 0, 0, 0);
            if (u * 32 < count) x[u][0] = lk_load_vec_ca(from + u * 32 * LK_VEC<T>);
        }
    }
}
/* The same into the thread's slots of shared memory, 32 apart, which take no registers meanwhile. A thread reads only its own. */
template <class T, int Vecs> LK_DEVICE void lk_srms_norm_fp8_start(uint4 *slot, const T *from, int count)
{
    if (count > (Vecs - 1) * 32) {
        LK_UNROLL for (int u = 0; u < Vecs; u++) lk_cp_async_16(slot, u * 32 * 16, from + u * 32 * LK_VEC<T>);
    } else {
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            if (u * 32 < count) lk_cp_async_16(slot, u * 32 * 16, from + u * 32 * LK_VEC<T>);
            else slot[u * 32] = make_uint4(0, 0, 0, 0);
        }
    }
}
/* t: s of the same vectors where that is more than x. Stores s. */
template <class T, class Res, bool Wide, int Vecs>
LK_DEVICE void lk_srms_norm_fp8_take(float (&t)[Vecs][LK_VEC<T>], const lk_srms_norm_fp8_call &call, const lk_srms_norm_thread &at,
                                     int count)
{
    constexpr int Num = LK_VEC<T>;
    const lk_srms_norm_input &in = call.norm.in;
    if constexpr (Wide) {
        lk_vec<T> x[Vecs][1] = {};
        lk_vec<Res> r[Vecs][Num / LK_VEC<Res>] = {};
        lk_srms_norm_load_raw(x, in.x, at.row, at.first, count);
        lk_srms_norm_load_raw(r, in.r, at.row, at.first, count);
        LK_UNROLL for (int u = 0; u < Vecs; u++) lk_srms_norm_add<T, Res>(t[u], in, x[u], r[u]);
    } else {
        LK_UNROLL for (int u = 0; u < Vecs; u++) {
            LK_UNROLL for (int j = 0; j < Num; j++) t[u][j] = 0.0f;
            if (u * 32 < count) lk_srms_norm_fp8_load_s<false, T, Res>(t[u], call, at.row, at.first + u * 32 * Num);
        }
    }
    if (call.norm.a.residual_out)
        LK_UNROLL for (int u = 0; u < Vecs; u++)
            if (u * 32 < count) lk_srms_norm_fp8_put_s<Res, Wide>(call, t[u], at.row, at.first + u * 32 * Num);
}
/* t, or where Packed x, is s: t becomes s w, and 0 where the row has none. Returns the sum of the squares of s. The thread then
 * holds the products, so that the pass behind the sum neither unpacks nor multiplies again. slot: Many has x there, and weight in
 * the next Vecs slots. weight: of Holds. Offset: there is one; most calls have none, and need no addition. */
template <class T, bool Packed, bool Holds, bool Wide, bool Many, bool Offset, int Vecs>
LK_DEVICE float lk_srms_norm_fp8_hold(float (&t)[Vecs][LK_VEC<T>], const lk_vec<T> (&x)[Vecs][1], const lk_vec<T> (&weight)[Vecs][1],
                                      const uint4 *slot, const lk_srms_norm_fp8_call &call, const lk_srms_norm_thread &at,
                                      int count, int group)
{
    constexpr int Num = LK_VEC<T>;
    float squares = 0.0f;
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if constexpr (Many) lk_unpack(t[u], lk_vec<T>{slot[u * 32]});
        else if constexpr (Packed) lk_unpack(t[u], x[u][0]);
        squares += lk_srms_norm_dot(t[u], t[u]);
        if constexpr (Holds) {
            float w[Num];
            if (!call.norm.a.weight) continue;
            if constexpr (Many) lk_unpack(w, lk_vec<T>{slot[(Vecs + u) * 32]});
            else lk_unpack(w, weight[u][0]);
            LK_UNROLL for (int j = 0; j < Num; j++) t[u][j] *= Offset ? call.norm.a.weight_offset + w[j] : w[j];
        } else if (u * 32 < count) {
            lk_srms_norm_fp8_weigh<T, false, Wide>(t[u], call, group, at.first + u * 32 * Num);
        }
    }
    return squares;
}

/* BLOCK and MX: the largest |t| of the blocks of a thread's Vecs vectors, all in one exchange; most[u]: of its own elements. The
 * lanes of a block, 1 << lanes of them, share the maxima of Vecs blocks. At each of the first two steps a lane passes on half of
 * what it has, so that it ends with one maximum: returns which, of vector *number. Vecs is 4. Called by: all lanes of a warp. */
LK_DEVICE float lk_srms_norm_fp8_share(const float (&most)[4], int lanes, int *number)
{
    const int far = 1 << (lanes - 1), near = far >> 1, lane = (int)threadIdx.x;
    const bool upper = lane & far, odd = lane & near;
    float two[2];
    LK_UNROLL for (int i = 0; i < 2; i++) {
        const float given = upper ? most[i] : most[2 + i], kept = upper ? most[2 + i] : most[i];
        two[i] = lk_max_nan(kept, __shfl_xor_sync(0xffffffffu, given, far));
    }
    const float given = odd ? two[0] : two[1], kept = odd ? two[1] : two[0];
    *number = 2 * upper + odd;
    return lk_srms_norm_fp8_max_warp(lk_max_nan(kept, __shfl_xor_sync(0xffffffffu, given, near)), near);
}
/* x of a lane that got the maximum of vector u of this lane's block from lk_srms_norm_fp8_share. Called by: all lanes of a warp. */
LK_DEVICE float lk_srms_norm_fp8_shared(float x, int lanes, int u)
{
    return __shfl_sync(0xffffffffu, x, ((int)threadIdx.x % 32 >> lanes << lanes) + (u << (lanes - 2)));
}

/* Whether t rstd times inverse may be t times (rstd inverse): the factor is a normal number. The same bits for powers of two. */
LK_DEVICE bool lk_srms_norm_fp8_joins(float factor) { return factor >= FLT_MIN && factor <= FLT_MAX; }

/* BLOCK and MX: stores the scales of the blocks of a thread's Vecs vectors. factor: what q is t times. t becomes y where y is wanted,
 * or where the factor of a lane of the warp is no normal number. Called by: all lanes of a warp. */
template <int Num, int Vecs>
LK_DEVICE void lk_srms_norm_fp8_scales(const lk_srms_norm_fp8_call &call, const lk_srms_norm_thread &at, int count, float rstd,
                                       float (&t)[Vecs][Num], float (&factor)[Vecs])
{
    const int lanes = call.block_log2 - (Num == 8 ? 3 : 2), team = call.norm.in.team_log2, lane = (int)threadIdx.x % 32;
    const bool alone = team >= 0 && team < 5; /* the team's lanes have one vector at most */
    float most[Vecs];
    LK_UNROLL for (int u = 0; u < Vecs; u++) most[u] = lk_srms_norm_fp8_most<false>(0.0f, t[u]);
    int number = 0, own = lanes;
    float mine;
    if (alone) own = min(team, lanes), mine = lk_srms_norm_fp8_max_warp(most[0], 1 << own);
    else mine = lk_srms_norm_fp8_share(most, lanes, &number);
    const lk_srms_norm_fp8_scale scale = lk_srms_norm_fp8_scale_of(call, mine * rstd); /* rounding keeps the order */
    const int past = lane & ((1 << own) - 1), behind = alone ? past : past & ((1 << (lanes - 2)) - 1); /* of its block's lanes */
    if (behind == 0 && number * 32 < count + past && at.row < call.norm.a.rows) {
        const int block = (at.first + number * 32 * Num) >> call.block_log2;
        const int64_t to = at.row * call.x.scale_stride + block * call.x.scale_block_stride;
        lk_srms_norm_fp8_put_scale(call, call.x.scale, to, scale.scale);
    }
    float joined = scale.inverse * rstd;
    if (call.norm.a.y || !__all_sync(0xffffffffu, lk_srms_norm_fp8_joins(joined))) {
        joined = scale.inverse;
        LK_UNROLL for (int u = 0; u < Vecs; u++)
            LK_UNROLL for (int j = 0; j < Num; j++) t[u][j] *= rstd;
    }
    LK_UNROLL for (int u = 0; u < Vecs; u++) factor[u] = alone ? joined : lk_srms_norm_fp8_shared(joined, lanes, u);
}

template <bool Wide, int Num, int Vecs>
LK_DEVICE void lk_srms_norm_fp8_put_all(const lk_srms_norm_fp8_call &call, int format, const lk_srms_norm_thread &at, int count,
                                        const float (&t)[Vecs][Num], const float (&factor)[Vecs])
{
    LK_UNROLL for (int u = 0; u < Vecs; u++)
        if (u * 32 < count) lk_srms_norm_fp8_put<Wide>(call, format, at.row, at.first + u * 32 * Num, t[u], factor[u]);
}

/* A team owns a row; Many: rows in turn, and loads the next one while it works on one. Each thread holds its first Vecs vectors, and
 * reads the others of a longer row twice. Holds: weight is of T and on 16 bytes, or NULL.
 * Packed: s is x, and not stored. Blocks: BLOCK and MX, else TENSOR and ROW. */
template <class T, class Res, bool Packed, bool Holds, bool Wide, bool Blocks, bool Many>
LK_KERNEL void __launch_bounds__(Many ? LK_SRMS_NORM_FP8_MANY_THREADS : LK_SRMS_NORM_THREADS,
                                 Many ? 2 : LK_ARCH < 900 ? 1 : LK_SRMS_NORM_FORWARD_BLOCKS(T, Packed))
    lk_srms_norm_fp8_kernel(const __grid_constant__ lk_srms_norm_fp8_call call)
{
    constexpr int Num = LK_VEC<T>, Vecs = LK_SRMS_NORM_FP8_VECS;
    const lk_srms_norm_input &in = call.norm.in;
    const lk_srms_norm_args &a = call.norm.a;
    const int cols = (int)a.cols, lane = (int)threadIdx.x % 32;
    lk_srms_norm_thread at = lk_srms_norm_thread_of<T>(in, (cols + Num - 1) / Num * Num);
    const int before = in.team_log2 >= 0 ? lane >> in.team_log2 : 0; /* rows of the warp: its lanes go together */
    const bool tensor = call.x.scaling == LK_SRMS_NORM_FP8_TENSOR, wants_most = !Blocks && (!tensor || call.x.amax);
    const bool early = LK_ARCH >= 900 && at.size <= 64; /* as in forward */
    if (early && at.row < a.rows && at.count > 0) {
        lk_srms_norm_prefetch<T>(in.x, at);
        lk_srms_norm_prefetch<Res>(in.r, at);
    }
    lk_griddepcontrol_wait();
    if (early && !Many) lk_griddepcontrol_launch_dependents();

    float inverse = 1.0f, seen = 0.0f;
    if (!Blocks && tensor && call.x.tensor_scale) inverse = lk_srms_norm_fp8_inverse(*call.x.tensor_scale);
    if (!Blocks && tensor && call.x.amax && at.rank == 0) seen = lk_ld_relaxed(call.x.amax);
    uint4 *slot = NULL; /* of Many: [warp][x, weight][vector][lane] */
    if constexpr (Many) {
        LK_DYN_SMEM(uint4, slots);
        slot = &slots + (int)threadIdx.x / 32 * (2 * Vecs * 32) + lane;
        if (at.row - before >= a.rows) return; /* a warp without rows; a block has one */
        lk_srms_norm_fp8_start<T, Vecs>(slot, (const T *)in.x.data + at.row * in.x.stride + at.first, at.row < a.rows ? at.count : 0);
        if (a.weight) lk_srms_norm_fp8_start<T, Vecs>(slot + Vecs * 32, (const T *)a.weight + at.first, at.count);
        lk_cp_async_commit_group();
    }
    LK_NO_UNROLL for (int number = 0; at.row - before < a.rows; at.row += at.step, number++) {
        const bool owner = at.row < a.rows, first = owner && at.rank == 0;
        const bool last = !Many || at.row + at.step - before >= a.rows;
        const int count = owner ? at.count : 0, group = Holds ? 0 : lk_srms_norm_group_start(call.norm, at.row);
        float t[Vecs][Num], s[Num], most = 0.0f;
        lk_srms_norm_total total = {};
        lk_vec<T> weight[Vecs][1], x[Vecs][1];
        if (!Many && Holds && a.weight) lk_srms_norm_fp8_start(weight, (const T *)a.weight + at.first, count);
        if constexpr (Many) lk_cp_async_wait_group<0>();
        else if constexpr (Packed) lk_srms_norm_fp8_start(x, (const T *)in.x.data + at.row * in.x.stride + at.first, count);
        else lk_srms_norm_fp8_take<T, Res, Wide>(t, call, at, count);
        if (Holds && a.weight && a.weight_offset != 0.0f)
            total.sum = lk_srms_norm_fp8_hold<T, Packed, Holds, Wide, Many, true>(t, x, weight, slot, call, at, count, group);
        else total.sum = lk_srms_norm_fp8_hold<T, Packed, Holds, Wide, Many, false>(t, x, weight, slot, call, at, count, group);
        if (Many && !last) {
            const int64_t next = at.row + at.step;
            const T *const from = (const T *)in.x.data + next * in.x.stride + at.first;
            lk_srms_norm_fp8_start<T, Vecs>(slot, from, next < a.rows ? at.count : 0);
            lk_cp_async_commit_group();
        }
        if (wants_most && tensor) { /* amax passes over a NaN; a row's scale becomes one */
            LK_UNROLL for (int u = 0; u < Vecs; u++) most = lk_srms_norm_fp8_most<true>(most, t[u]);
        } else if (wants_most) {
            LK_UNROLL for (int u = 0; u < Vecs; u++) most = lk_srms_norm_fp8_most<false>(most, t[u]);
        }
        LK_NO_UNROLL for (int i = Vecs * 32; i < count; i += 32) {
            const int col = at.first + i * Num;
            lk_srms_norm_fp8_load_s<Wide, T, Res>(s, call, at.row, col);
            lk_srms_norm_add(&total, lk_srms_norm_dot(s, s));
            if (!wants_most) continue;
            lk_srms_norm_fp8_weigh<T, Holds, Wide>(s, call, group, col);
            most = tensor ? lk_srms_norm_fp8_most<true>(most, s) : lk_srms_norm_fp8_most<false>(most, s);
        }
        float both[2] = {total.sum + total.chain, most};
        lk_srms_norm_fp8_reduce(in, both, wants_most, number);
        if ((Many || !early) && last) lk_griddepcontrol_launch_dependents();

        const float rstd = lk_rsqrt(fmaf(both[0], in.inverse_cols, a.eps));
        if (first && a.rstd) a.rstd[at.row] = rstd;
        float factor[Vecs];
        if constexpr (Blocks) {
            lk_srms_norm_fp8_scales(call, at, count, rstd, t, factor);
        } else {
            const float amax = both[1] * rstd; /* the largest |y|: rounding keeps the order */
            if (tensor && first && call.x.amax) lk_srms_norm_fp8_raise(call, amax, seen), seen = fmaxf(seen, amax);
            if (!tensor) {
                const lk_srms_norm_fp8_scale scale = lk_srms_norm_fp8_scale_of(call, amax);
                inverse = scale.inverse;
                if (first) ((float *)call.x.scale)[at.row * call.x.scale_stride] = scale.scale;
            }
            float joined = rstd * inverse;
            if (a.y || !lk_srms_norm_fp8_joins(joined)) {
                joined = inverse;
                LK_UNROLL for (int u = 0; u < Vecs; u++)
                    LK_UNROLL for (int j = 0; j < Num; j++) t[u][j] *= rstd;
            }
            LK_UNROLL for (int u = 0; u < Vecs; u++) factor[u] = joined;
        }
        if (a.y) /* then t is y */
            LK_UNROLL for (int u = 0; u < Vecs; u++) {
                const int col = at.first + u * 32 * Num;
                if (u * 32 < count) lk_srms_norm_fp8_store<Wide>((T *)a.y + at.row * a.y_stride + col, t[u], cols - col);
            }
        if (call.x.format == LK_FP8_E5M2) lk_srms_norm_fp8_put_all<Wide>(call, LK_FP8_E5M2, at, count, t, factor);
        else lk_srms_norm_fp8_put_all<Wide>(call, LK_FP8_E4M3, at, count, t, factor);
        /* With Blocks the lanes of a warp go together: as many steps as its first lane has. */
        const int steps = !Blocks ? count : owner ? at.count + lane : 0;
        LK_NO_UNROLL for (int i = Vecs * 32; i < steps; i += 32) {
            const bool there = i < count;
            const int col = at.first + i * Num;
            if (there) {
                lk_srms_norm_fp8_load_s<Wide, T, Res>(s, call, at.row, col);
                lk_srms_norm_fp8_put_s<Res, Wide>(call, s, at.row, col);
                lk_srms_norm_fp8_weigh<T, Holds, Wide>(s, call, group, col);
            }
            lk_srms_norm_fp8_write<T, Wide, Blocks>(call, rstd, inverse, s, at.row, col, there);
        }
        if (last) break;
    }
}

/* Divides the rows among teams; returns the blocks. */
template <class T> LK_HOST int64_t lk_srms_norm_fp8_lay_out(const lk_device *device, lk_srms_norm_fp8_call *call, int *threads)
{
    constexpr int Vecs = LK_SRMS_NORM_FP8_VECS;
    const lk_srms_norm_args *const a = &call->norm.a;
    lk_srms_norm_input *const in = &call->norm.in;
    const int64_t vecs = lk_ceil_div(a->cols, LK_VEC<T>), rows = a->rows;
    int path = a->path;
    if (path == LK_SRMS_NORM_AUTO) path = vecs <= 32 * Vecs || rows > LK_TEAM_ROWS ? LK_SRMS_NORM_WARP : LK_SRMS_NORM_BLOCK;
    if (path == LK_SRMS_NORM_WARP) {
        while (in->team_log2 < 5 && 1 << in->team_log2 < vecs) in->team_log2++;
        *threads = 128;
        return lk_ceil_div(rows, *threads >> in->team_log2);
    }
    int64_t wanted = lk_ceil_div(vecs, Vecs);
    while (wanted < vecs && rows * wanted < 1024 * (int64_t)device->sms) wanted *= 2; /* few rows */
    wanted = lk_ceil_div(wanted < vecs ? wanted : vecs, 32) * 32;
    *threads = (int)(wanted < LK_SRMS_NORM_THREADS ? wanted : LK_SRMS_NORM_THREADS);
    in->team_log2 = -1, in->segment = INT32_MAX, in->warp_span = (int)lk_ceil_div(vecs, *threads) * 32;
    return rows;
}

template <class T, class Res, bool Packed, bool Holds, bool Wide, bool Many>
LK_HOST void (*lk_srms_norm_fp8_choose(bool blocks))(lk_srms_norm_fp8_call)
{
    return blocks ? lk_srms_norm_fp8_kernel<T, Res, Packed, Holds, Wide, true, Many>
                  : lk_srms_norm_fp8_kernel<T, Res, Packed, Holds, Wide, false, Many>;
}
template <class T, class Res>
LK_HOST lk_status lk_srms_norm_fp8_rows(const char *op, const lk_device *device, lk_srms_norm_fp8_call &call, bool wide,
                                        cudaStream_t stream)
{
    const lk_srms_norm_args &a = call.norm.a;
    const bool holds = wide && lk_srms_norm_plain<T>(&a, a.weight), blocks = call.x.scaling >= LK_SRMS_NORM_FP8_BLOCK;
    int threads = 0;
    int64_t grid = lk_srms_norm_fp8_lay_out<T>(device, &call, &threads);
    void (*kernel)(lk_srms_norm_fp8_call) = !wide    ? lk_srms_norm_fp8_choose<T, Res, false, false, false, false>(blocks)
                                            : !holds ? lk_srms_norm_fp8_choose<T, Res, false, false, true, false>(blocks)
                                                     : lk_srms_norm_fp8_choose<T, Res, false, true, true, false>(blocks);
    size_t smem = 0;
    bool pdl = device->arch >= 90;
    if constexpr (sizeof(T) == sizeof(Res)) {
        const bool packed = holds && !a.residual && !a.residual_out;
        if (packed && threads > LK_SRMS_NORM_FP8_MANY_THREADS) {
            kernel = lk_srms_norm_fp8_choose<T, Res, true, true, true, false>(blocks);
        } else if (packed) {
            kernel = lk_srms_norm_fp8_choose<T, Res, true, true, true, true>(blocks);
            smem = (size_t)threads * 2 * LK_SRMS_NORM_FP8_VECS * 16;
            const int by_smem = device->smem * 1024 / ((int)smem + 1280); /* static, and what CUDA takes of each block */
            const int by_threads = LK_SRMS_NORM_FP8_MANY_RESIDENT / threads;
            const int64_t resident = (int64_t)(by_smem < by_threads ? by_smem : by_threads) * device->sms;
            pdl = pdl && grid <= 4 * resident; /* see lk_launch_blocks */
            grid = grid < resident ? grid : resident;
        }
    }
    return lk_launch_blocks(op, pdl, kernel, grid, 1, threads, smem, stream, call);
}

/* ---- The transposed copy ------------------------------------------------------------------------------------------------- */

/* A cluster has 128 rows, each of its blocks some chunks of their columns, a warp some rows of a chunk, and a lane a vector of
 * each. A lane keeps its vectors in slots of shared memory, since registers have no room for them. Chunks that a block has no
 * slots for are read again, into those of its first chunk. Warps: warps of a block. */
#define LK_SRMS_NORM_FP8_BAND 128
#define LK_SRMS_NORM_FP8_EACH(warps) (LK_SRMS_NORM_FP8_BAND / (warps))
#define LK_SRMS_NORM_FP8_CLUSTER 16 /* blocks at most; more than 8 by permission */
/* Slots of 16 bytes that a vector of s takes, as it was loaded or as floats; columns of a chunk; bytes of a held chunk. */
#define LK_SRMS_NORM_FP8_SLOTS(T, packed) ((packed) ? 1 : LK_VEC<T> / 4)
#define LK_SRMS_NORM_FP8_CHUNK(T) (32 * LK_VEC<T>)
#define LK_SRMS_NORM_FP8_INBOX(warps) (8 * 36 * (warps)) /* floats; at least LK_SRMS_NORM_FP8_BAND * LK_SRMS_NORM_FP8_CLUSTER */
#define LK_SRMS_NORM_FP8_CHUNK_BYTES(T, packed) (LK_SRMS_NORM_FP8_BAND * 32 * 16 * LK_SRMS_NORM_FP8_SLOTS(T, packed))

/* Where a thread is: its block's first chunk, the first of its warp's rows, and its slots of chunk 0. */
typedef struct {
    int64_t row;
    int chunk, lane, warp;
    uint4 *slot;
} lk_srms_norm_fp8_place;

/* Vector i of a thread, of the chunk that is in the block's slots number k (-1: in none, and is read from global memory); 0 where
 * there is none. Slots: [chunk][warp][row][slot of a vector][lane]. */
template <class T, bool Packed> LK_DEVICE uint4 *lk_srms_norm_fp8_slot(const lk_srms_norm_fp8_place &at, int k, int i)
{
    return at.slot + (k * LK_SRMS_NORM_FP8_BAND + i) * LK_SRMS_NORM_FP8_SLOTS(T, Packed) * 32;
}
template <class T, class Res, bool Packed, bool Wide>
LK_DEVICE void lk_srms_norm_fp8_get(float (&s)[LK_VEC<T>], const lk_srms_norm_fp8_call &call, const lk_srms_norm_fp8_place &at,
                                    int k, int i, int col)
{
    constexpr int Num = LK_VEC<T>;
    if (k >= 0) {
        const uint4 *slot = lk_srms_norm_fp8_slot<T, Packed>(at, k, i);
        if constexpr (Packed) lk_unpack(s, lk_vec<T>{slot[0]});
        else
            LK_UNROLL for (int m = 0; m < Num / 4; m++) {
                float four[4];
                lk_unpack(four, lk_vec<float>{slot[32 * m]});
                LK_UNROLL for (int j = 0; j < 4; j++) s[4 * m + j] = four[j];
            }
        return;
    }
    LK_UNROLL for (int j = 0; j < Num; j++) s[j] = 0.0f;
    if (at.row + i < call.norm.a.rows && col < (int)call.norm.a.cols)
        lk_srms_norm_fp8_load_s<Wide, T, Res>(s, call, at.row + i, col);
}

/* Fills the slots number `to` of a thread with chunk k. A lane reads only its own slots, behind lk_cp_async_wait_group. */
template <class T, class Res, int Warps, bool Packed, bool Wide>
LK_DEVICE void lk_srms_norm_fp8_fetch(const lk_srms_norm_fp8_call &call, const lk_srms_norm_fp8_place &at, int k, int to)
{
    constexpr int Num = LK_VEC<T>, Each = LK_SRMS_NORM_FP8_EACH(Warps), AtOnce = 4;
    const int col = (at.chunk + k) * LK_SRMS_NORM_FP8_CHUNK(T) + at.lane * Num;
    const bool column = col < (int)call.norm.a.cols;
    if constexpr (Packed && Wide) {
        const T *from = (const T *)call.norm.in.x.data + at.row * call.norm.in.x.stride + col;
        LK_UNROLL_BY(4) for (int i = 0; i < Each; i++, from += call.norm.in.x.stride) {
            uint4 *const slot = lk_srms_norm_fp8_slot<T, Packed>(at, to, i);
            if (column && at.row + i < call.norm.a.rows) lk_cp_async_16(slot, 0, from);
            else *slot = make_uint4(0, 0, 0, 0);
        }
    } else {
        LK_NO_UNROLL for (int i = 0; i < Each; i += AtOnce) {
            float s[AtOnce][Num] = {};
            LK_UNROLL for (int n = 0; n < AtOnce; n++)
                if (column && at.row + i + n < call.norm.a.rows)
                    lk_srms_norm_fp8_load_s<Wide, T, Res>(s[n], call, at.row + i + n, col);
            LK_UNROLL for (int n = 0; n < AtOnce; n++)
                LK_UNROLL for (int m = 0; m < Num / 4; m++) {
                    lk_vec<float> four;
                    lk_pack(&four, {s[n][4 * m], s[n][4 * m + 1], s[n][4 * m + 2], s[n][4 * m + 3]});
                    lk_srms_norm_fp8_slot<T, Packed>(at, to, i + n)[32 * m] = four.raw;
                }
        }
    }
}

/* The sums of 8 values over the lanes of a warp: that of value i in the lanes i, i + 8, ... At each of the first steps a lane
 * passes on half of its sums. Called by: all lanes of a warp. */
LK_DEVICE float lk_srms_norm_fp8_sums(float (&v)[8])
{
    const int lane = (int)threadIdx.x % 32;
    LK_UNROLL for (int reach = 4; reach > 0; reach /= 2) {
        const bool upper = lane & 4 * reach;
        LK_UNROLL for (int i = 0; i < reach; i++) {
            const float given = upper ? v[i] : v[reach + i], kept = upper ? v[reach + i] : v[i];
            v[i] = kept + __shfl_xor_sync(0xffffffffu, given, 4 * reach);
        }
    }
    return __shfl_sync(0xffffffffu, lk_sum_warp(v[0], 4), lane * 4 % 32);
}

/* The sums of squares of the warp's rows over all columns, row i's in lane i. inbox: [block][row of the cluster]. */
template <class T, class Res, int Warps, bool Packed, bool Wide>
LK_DEVICE float lk_srms_norm_fp8_squares(const lk_srms_norm_fp8_call &call, const lk_srms_norm_fp8_place &at, float *inbox)
{
    constexpr int Each = LK_SRMS_NORM_FP8_EACH(Warps), Band = LK_SRMS_NORM_FP8_BAND;
    const int blocks = (int)lk_cluster_nctarank(), row = at.warp * Each + at.lane;
    float mine = 0.0f;
    LK_NO_UNROLL for (int i = 0; i < Each; i += 8) { /* eight rows at once: their sums take registers */
        float sum[8] = {};
        LK_NO_UNROLL for (int k = 0; k < call.chunks;) {
            float part[8] = {}; /* short chains, as in lk_srms_norm_total */
            LK_NO_UNROLL for (const int stop = min(k + 16, call.chunks); k < stop; k++)
                LK_UNROLL for (int n = 0; n < 8; n++) {
                    float s[LK_VEC<T>];
                    const int col = (at.chunk + k) * LK_SRMS_NORM_FP8_CHUNK(T) + at.lane * LK_VEC<T>;
                    lk_srms_norm_fp8_get<T, Res, Packed, Wide>(s, call, at, k < call.held ? k : -1, i + n, col);
                    part[n] += lk_srms_norm_dot(s, s);
                }
            LK_UNROLL for (int n = 0; n < 8; n++) sum[n] += part[n];
        }
        const float eight = lk_srms_norm_fp8_sums(sum);
        if (at.lane / 8 == i / 8) mine = eight;
    }
    lk_cluster_ready();
    for (int block = 0; block < blocks && at.lane < Each; block++) {
        float *slot = inbox + (int)lk_cluster_ctarank() * Band + row;
        if (blocks > 1) slot = (float *)lk_mapa(slot, (unsigned)block);
        *slot = mine;
    }
    if (blocks > 1) lk_cluster_sync(); /* orders the writes into every block's inbox before their reads */
    mine = 0.0f;
    for (int block = 0; block < blocks && at.lane < Each; block++) mine += inbox[block * Band + row];
    return mine;
}

/* Puts numbers of 8 bits of rows i to i + 3 into shared memory, the four rows of a column in a word, in slots of the warp that it
 * has read: [group of 4 rows][Num / 4][lane ^ warp], so that the words of a column from 8 warps lie in different banks. */
template <int Num>
LK_DEVICE void lk_srms_norm_fp8_turn(int format, const lk_srms_norm_fp8_place &at, int i, uint4 *turned, const float (&x)[4][Num])
{
    uint32_t word[Num];
    LK_UNROLL for (int j = 0; j < Num; j++)
        word[j] = lk_fp8x2(format, x[0][j], x[1][j]) | lk_fp8x2(format, x[2][j], x[3][j]) << 16;
    __syncwarp(); /* all lanes have read the slots that are overwritten; shuffles order no memory */
    LK_UNROLL for (int m = 0; m < Num / 4; m++)
        turned[(i / 4 * (Num / 4) + m) * 32 + (at.lane ^ at.warp)] =
            make_uint4(word[4 * m], word[4 * m + 1], word[4 * m + 2], word[4 * m + 3]);
}

/* Writes the rows of a chunk, four at a time. k: its slots; col: the lane's first column. Returns the largest |y| of each of the
 * lane's columns, over the warp's rows. TENSOR: turns them, too. Rows that are not there have y 0, and columns that are not there 0
 * or the NaN of their whole row. format: call.x.format. */
template <class T, class Res, int Warps, bool Packed, bool Wide, bool Tensor>
LK_DEVICE void lk_srms_norm_fp8_put_rows(const lk_srms_norm_fp8_call &call, int format, const lk_srms_norm_fp8_place &at, int k,
                                         int col, float rstds, float inverse, const float (&w)[LK_VEC<T>], float (&most)[LK_VEC<T>],
                                         uint4 *turned)
{
    constexpr int Num = LK_VEC<T>;
    const lk_srms_norm_args &a = call.norm.a;
    const int lanes = call.block_log2 - (Num == 8 ? 3 : 2);
    const bool wants_most = !Tensor || call.x.amax;
    LK_UNROLL for (int j = 0; j < Num; j++) most[j] = 0.0f;
    LK_NO_UNROLL for (int i = 0; i < LK_SRMS_NORM_FP8_EACH(Warps); i += 4) {
        const int64_t row = at.row + i;
        const int left = col < (int)a.cols ? (int)min(a.rows - row, (int64_t)4) : 0; /* rows to write */
        float s[4][Num];
        LK_UNROLL for (int n = 0; n < 4; n++) lk_srms_norm_fp8_get<T, Res, Packed, Wide>(s[n], call, at, k, i + n, col);
        if (a.residual_out)
            LK_UNROLL for (int n = 0; n < 4; n++)
                if (n < left) lk_srms_norm_fp8_put_s<Res, Wide>(call, s[n], row + n, col);
        LK_UNROLL for (int n = 0; n < 4; n++) {
            const float rstd = __shfl_sync(0xffffffffu, rstds, i + n);
            LK_UNROLL for (int j = 0; j < Num; j++) s[n][j] = s[n][j] * w[j] * rstd;
        }
        if (wants_most)
            LK_UNROLL for (int n = 0; n < 4; n++)
                LK_UNROLL for (int j = 0; j < Num; j++)
                    most[j] = Tensor ? fmaxf(most[j], fabsf(s[n][j])) : lk_max_nan(most[j], fabsf(s[n][j]));
        if (a.y)
            LK_UNROLL for (int n = 0; n < 4; n++)
                if (n < left) lk_srms_norm_fp8_store<Wide>((T *)a.y + (row + n) * a.y_stride + col, s[n], (int)a.cols - col);
        float mine = 0.0f; /* the inverse that this lane has of the four rows' blocks */
        if constexpr (!Tensor) {
            float of_row[4];
            int number;
            LK_UNROLL for (int n = 0; n < 4; n++) of_row[n] = lk_srms_norm_fp8_most<false>(0.0f, s[n]);
            const lk_srms_norm_fp8_scale scale = lk_srms_norm_fp8_scale_of(call, lk_srms_norm_fp8_share(of_row, lanes, &number));
            const int block = col >> call.block_log2;
            const int64_t to = (row + number) * call.x.scale_stride + block * call.x.scale_block_stride;
            if (at.lane % (1 << (lanes - 2)) == 0 && row + number < a.rows && block << call.block_log2 < (int)a.cols)
                lk_srms_norm_fp8_put_scale(call, call.x.scale, to, scale.scale);
            mine = scale.inverse;
        }
        LK_UNROLL for (int n = 0; n < 4; n++) {
            const float own = Tensor ? inverse : lk_srms_norm_fp8_shared(mine, lanes, n);
            LK_UNROLL for (int j = 0; j < Num; j++) s[n][j] *= own;
            if (n < left) lk_srms_norm_fp8_put<Wide>(call, format, row + n, col, s[n], 1.0f);
        }
        if constexpr (Tensor) lk_srms_norm_fp8_turn(format, at, i, turned, s);
    }
}

/* BLOCK and MX: the same for the columns' scales, once these are known. */
template <class T, class Res, int Warps, bool Packed, bool Wide>
LK_DEVICE void lk_srms_norm_fp8_turn_rows(const lk_srms_norm_fp8_call &call, int format, const lk_srms_norm_fp8_place &at, int k,
                                          int col, float rstds, const float (&inverse)[LK_VEC<T>], const float (&w)[LK_VEC<T>],
                                          uint4 *turned)
{
    constexpr int Num = LK_VEC<T>;
    LK_NO_UNROLL for (int i = 0; i < LK_SRMS_NORM_FP8_EACH(Warps); i += 4) {
        float s[4][Num];
        LK_UNROLL for (int n = 0; n < 4; n++) {
            const float rstd = __shfl_sync(0xffffffffu, rstds, i + n);
            lk_srms_norm_fp8_get<T, Res, Packed, Wide>(s[n], call, at, k, i + n, col);
            LK_UNROLL for (int j = 0; j < Num; j++) s[n][j] = s[n][j] * w[j] * rstd * inverse[j];
        }
        lk_srms_norm_fp8_turn(format, at, i, turned, s);
    }
}

/* The inverse scales of the lane's columns for the warp's rows; most: their largest |y|. A thread computes and stores each scale
 * for all warps. begin: the chunk's first column. inbox: [warp][element of a vector][lane], where 36 for 32 lanes lets
 * neighbouring columns lie in different banks. Called by: all threads of the block. */
template <int Warps, int Num>
LK_DEVICE void lk_srms_norm_fp8_column_scales(const lk_srms_norm_fp8_call &call, const lk_srms_norm_fp8_place &at, int begin,
                                              const float (&most)[Num], float (&inverse)[Num], float *inbox)
{
    constexpr int Each = LK_SRMS_NORM_FP8_EACH(Warps);
    const int warps = (1 << call.block_log2) / Each; /* of a scale */
    const int64_t band = at.row - at.warp * Each;
    LK_UNROLL for (int j = 0; j < Num; j++) inbox[(at.warp * Num + j) * 36 + at.lane] = most[j];
    __syncthreads(); /* the maxima of all warps are there */
    LK_NO_UNROLL for (int i = (int)threadIdx.x; i < Warps / warps * 32 * Num; i += 32 * Warps) {
        const int first = i / (32 * Num) * warps, c = i % (32 * Num);
        float *const from = inbox + (first * Num + c % Num) * 36 + c / Num;
        float all = 0.0f;
        LK_UNROLL_BY(4) for (int warp = 0; warp < warps; warp++) all = lk_max_nan(all, from[warp * Num * 36]);
        const lk_srms_norm_fp8_scale scale = lk_srms_norm_fp8_scale_of(call, all);
        const int64_t row = band + first * Each, block = row >> call.block_log2;
        const int64_t to = (begin + c) * call.x.transposed_scale_stride + block * call.x.transposed_block_stride;
        if (row < call.norm.a.rows && begin + c < (int)call.norm.a.cols)
            lk_srms_norm_fp8_put_scale(call, call.x.transposed_scale, to, scale.scale);
        *from = scale.inverse; /* no other thread reads or writes these places before the barrier */
    }
    __syncthreads(); /* the inverse scales are there */
    LK_UNROLL for (int j = 0; j < Num; j++) inverse[j] = inbox[(at.warp / warps * warps * Num + j) * 36 + at.lane];
}

/* Writes a chunk of q_transposed: Warps threads write the 128 rows of a column. first: the warps' slots, `step` slots apart. */
template <int Num, int Warps>
LK_DEVICE void lk_srms_norm_fp8_put_columns(const lk_srms_norm_fp8_call &call, const lk_srms_norm_fp8_place &at, int col,
                                            const uint4 *first, int step)
{
    constexpr int Each = LK_SRMS_NORM_FP8_EACH(Warps);
    const int warp = (int)threadIdx.x % Warps;
    const int64_t row = at.row + (warp - at.warp) * Each, left = call.norm.a.rows - row;
    LK_UNROLL_BY(4) for (int c = (int)threadIdx.x / Warps; c < 32 * Num; c += 32) {
        const uint32_t *from = (const uint32_t *)(first + warp * step + c % Num / 4 * 32 + (c / Num ^ warp)) + c % 4;
        uint32_t word[Each / 4];
        LK_UNROLL for (int g = 0; g < Each / 4; g++) word[g] = from[g * (Num / 4) * 128];
        if (col + c >= (int)call.norm.a.cols) break;
        uint8_t *const to = (uint8_t *)call.x.q_transposed + (col + c) * call.x.q_transposed_stride + row;
        if (call.wide && left >= Each) {
            if constexpr (Each == 16) *(uint4 *)to = make_uint4(word[0], word[1], word[2], word[3]);
            else *(uint2 *)to = make_uint2(word[0], word[1]);
        } else {
            LK_UNROLL for (int i = 0; i < Each; i++)
                if (i < left) to[i] = (uint8_t)(word[i / 4] >> i % 4 * 8);
        }
    }
}

/* What a block does for chunk k with the rows' rstd. largest: the largest |y| so far, for amax. */
template <class T, class Res, int Warps, bool Packed, bool Wide, bool Tensor>
LK_DEVICE void lk_srms_norm_fp8_put_chunk(const lk_srms_norm_fp8_call &call, int format, const lk_srms_norm_fp8_place &at, int k,
                                          float rstds, float inverse, float *largest, float *inbox, uint4 *slots)
{
    constexpr int Num = LK_VEC<T>, Slots = LK_SRMS_NORM_FP8_SLOTS(T, Packed) * LK_SRMS_NORM_FP8_EACH(Warps) * 32;
    const int begin = (at.chunk + k) * LK_SRMS_NORM_FP8_CHUNK(T), col = begin + at.lane * Num;
    const int place = k < call.held ? k : call.held ? 0 : -1, step = place < 0 ? 16 * LK_SRMS_NORM_FP8_EACH(Warps) : Slots;
    uint4 *const all = slots + (place < 0 ? 0 : place * Warps * Slots), *const turned = all + at.warp * step;
    if (k >= call.held) __syncthreads(); /* the columns before have been read from where these go */
    if (k >= call.held && place == 0) lk_srms_norm_fp8_fetch<T, Res, Warps, Packed, Wide>(call, at, k, 0);
    if (Packed && Wide && k >= call.held) lk_cp_async_commit_group(), lk_cp_async_wait_group<0>();
    float w[Num], most[Num];
    LK_UNROLL for (int j = 0; j < Num; j++) w[j] = 1.0f;
    if (col < (int)call.norm.a.cols) lk_srms_norm_fp8_weigh<T, false, Wide>(w, call, 0, col);
    lk_srms_norm_fp8_put_rows<T, Res, Warps, Packed, Wide, Tensor>(call, format, at, place, col, rstds, inverse, w, most, turned);
    if constexpr (Tensor) {
        *largest = lk_srms_norm_fp8_most<true>(*largest, most);
    } else {
        float inverses[Num];
        lk_srms_norm_fp8_column_scales<Warps>(call, at, begin, most, inverses, inbox);
        lk_srms_norm_fp8_turn_rows<T, Res, Warps, Packed, Wide>(call, format, at, place, col, rstds, inverses, w, turned);
    }
    __syncthreads(); /* all warps' columns are there, and the maxima have been read */
    lk_srms_norm_fp8_put_columns<Num, Warps>(call, at, begin, all, step);
}

/* A cluster owns 128 rows. Packed, Wide: as in lk_srms_norm_fp8_kernel. Tensor: else BLOCK or MX. Warps: 8 warps where several blocks
 * fit on an SM, else 16. */
template <class T, class Res, int Warps, bool Packed, bool Wide, bool Tensor>
LK_KERNEL void __launch_bounds__(32 * Warps, !(Packed && Wide && Warps == 8) ? 1 : LK_ARCH >= 900 ? 3 : 2)
    lk_srms_norm_fp8_transpose_kernel(const __grid_constant__ lk_srms_norm_fp8_call call)
{
    constexpr int Each = LK_SRMS_NORM_FP8_EACH(Warps), Slots = LK_SRMS_NORM_FP8_SLOTS(T, Packed) * Each * 32;
    LK_DYN_SMEM(uint4, slots);
    LK_SHARED(float, inbox, [LK_SRMS_NORM_FP8_INBOX(Warps)]); /* of a cluster's sums, or of the maxima of Warps warps */
    const lk_srms_norm_args &a = call.norm.a;
    const unsigned blocks = lk_cluster_nctarank();
    lk_srms_norm_fp8_place at;
    at.warp = (int)threadIdx.x / 32, at.lane = (int)threadIdx.x % 32;
    at.row = (int64_t)(blockIdx.x / blocks) * LK_SRMS_NORM_FP8_BAND + at.warp * Each;
    at.chunk = (int)lk_cluster_ctarank() * call.chunks;
    at.slot = &slots + at.warp * Slots + at.lane;
    lk_cluster_begin();
    lk_griddepcontrol_wait();
    LK_NO_UNROLL for (int k = 0; k < call.held; k++) lk_srms_norm_fp8_fetch<T, Res, Warps, Packed, Wide>(call, at, k, k);
    if constexpr (Packed && Wide) lk_cp_async_commit_group(), lk_cp_async_wait_group<0>();
    lk_griddepcontrol_launch_dependents();
    float inverse = 1.0f, seen = 0.0f, largest = 0.0f;
    if (Tensor && call.x.tensor_scale) inverse = lk_srms_norm_fp8_inverse(*call.x.tensor_scale);
    if (Tensor && call.x.amax) seen = lk_ld_relaxed(call.x.amax);
    const float squares = lk_srms_norm_fp8_squares<T, Res, Warps, Packed, Wide>(call, at, inbox);
    const bool there = at.lane < Each && at.row + at.lane < a.rows;
    /* Of row i in lane i. 0 where there is no row: with eps 0 its y would be NaN, and a column's largest. */
    const float rstds = there ? lk_rsqrt(fmaf(squares, call.norm.in.inverse_cols, a.eps)) : 0.0f;
    if (lk_cluster_ctarank() == 0 && there && a.rstd) a.rstd[at.row + at.lane] = rstds;
    __syncthreads(); /* the sums have been read: the inbox is free for the maxima of columns */
    if (call.x.format == LK_FP8_E5M2) {
        LK_NO_UNROLL for (int k = 0; k < call.chunks; k++)
            lk_srms_norm_fp8_put_chunk<T, Res, Warps, Packed, Wide, Tensor>(call, LK_FP8_E5M2, at, k, rstds, inverse, &largest, inbox,
                                                                            &slots);
    } else {
        LK_NO_UNROLL for (int k = 0; k < call.chunks; k++)
            lk_srms_norm_fp8_put_chunk<T, Res, Warps, Packed, Wide, Tensor>(call, LK_FP8_E4M3, at, k, rstds, inverse, &largest, inbox,
                                                                            &slots);
    }
    if (!Tensor || !call.x.amax) return;
    largest = lk_max_warp(largest);
    if (at.lane == 0) lk_srms_norm_fp8_raise(call, largest, seen);
}

template <class T, class Res, int Warps, bool Packed, bool Wide>
LK_HOST lk_status lk_srms_norm_fp8_run_bands(const char *op, const lk_device *device, lk_srms_norm_fp8_call &call, int cluster,
                                             int most_held, cudaStream_t stream)
{
    constexpr int bytes = LK_SRMS_NORM_FP8_CHUNK_BYTES(T, Packed), least = 64 * 32 * 16; /* what a turned chunk takes */
    void (*const kernel)(lk_srms_norm_fp8_call) = call.x.scaling == LK_SRMS_NORM_FP8_TENSOR
                                                      ? lk_srms_norm_fp8_transpose_kernel<T, Res, Warps, Packed, Wide, true>
                                                      : lk_srms_norm_fp8_transpose_kernel<T, Res, Warps, Packed, Wide, false>;
    const int room = (device->smem - 2) * 1024 - LK_SRMS_NORM_FP8_INBOX(Warps) * 4;
    call.held = most_held < room / bytes ? most_held : room / bytes;
    const size_t smem = call.held ? (size_t)call.held * bytes : least;
    cudaError_t error = cudaSuccess;
    if (cluster > 8) error = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error) return lk_launched(op, error);
    return lk_launch_pdl(op, device, kernel, lk_ceil_div(call.norm.a.rows, LK_SRMS_NORM_FP8_BAND) * cluster, cluster, 32 * Warps, smem,
                         stream, call);
}
template <class T, class Res, bool Packed, bool Wide>
LK_HOST lk_status lk_srms_norm_fp8_divide_bands(const char *op, const lk_device *device, lk_srms_norm_fp8_call &call,
                                                cudaStream_t stream)
{
    const int most = device->arch < 90 ? 1 : device->arch < 120 ? LK_SRMS_NORM_FP8_CLUSTER : 8;
    const int64_t chunks = lk_ceil_div(call.norm.a.cols, LK_SRMS_NORM_FP8_CHUNK(T));
    call.chunks = (int)lk_ceil_div(chunks, most);
    const int cluster = (int)lk_ceil_div(chunks, call.chunks);
    const int chunk_kb = LK_SRMS_NORM_FP8_CHUNK_BYTES(T, Packed) / 1024, chunks_held = call.chunks;
    const bool alone = 2 * (call.chunks * chunk_kb + 10) > device->smem;
    if (alone && 3 * (chunk_kb + 10) <= device->smem) /* one chunk and three blocks on an SM; it reads the others again */
        return lk_srms_norm_fp8_run_bands<T, Res, 8, Packed, Wide>(op, device, call, cluster, 1, stream);
    if constexpr (Wide)
        if (alone && chunk_kb + 22 < device->smem) /* else none is held */
            return lk_srms_norm_fp8_run_bands<T, Res, 16, Packed, Wide>(op, device, call, cluster, chunks_held, stream);
    return lk_srms_norm_fp8_run_bands<T, Res, 8, Packed, Wide>(op, device, call, cluster, chunks_held, stream);
}
template <class T, class Res>
LK_HOST lk_status lk_srms_norm_fp8_bands(const char *op, const lk_device *device, lk_srms_norm_fp8_call &call, bool wide,
                                         cudaStream_t stream)
{
    call.wide = (uintptr_t)call.x.q_transposed % 16 == 0 && call.x.q_transposed_stride % 16 == 0;
    if (!wide) return lk_srms_norm_fp8_divide_bands<T, Res, false, false>(op, device, call, stream);
    if constexpr (sizeof(T) == sizeof(Res))
        if (!call.norm.a.residual) return lk_srms_norm_fp8_divide_bands<T, Res, true, true>(op, device, call, stream);
    return lk_srms_norm_fp8_divide_bands<T, Res, false, true>(op, device, call, stream);
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* What norm's table has for forward, and then this header's tensors. */
typedef struct {
    lk_tensor list[LK_COUNT(lk_srms_norm_table().list) + 6];
} lk_srms_norm_fp8_table;

LK_HOST int64_t lk_srms_norm_fp8_blocks(int scaling, int64_t elements)
{
    return elements < 0                        ? elements /* unchecked: not none */
           : scaling == LK_SRMS_NORM_FP8_BLOCK ? lk_ceil_div(elements, 128)
           : scaling == LK_SRMS_NORM_FP8_MX    ? lk_ceil_div(elements, 32)
                                               : 1;
}

template <class T> LK_HOST lk_srms_norm_fp8_table lk_srms_norm_fp8_tensors(lk_srms_norm_fp8_args *x)
{
    lk_srms_norm_args *const a = &x->common;
    const lk_srms_norm_table norm = lk_srms_norm_tensors<T>(a, false);
    const int n = LK_COUNT(norm.list), bytes = x->scaling == LK_SRMS_NORM_FP8_MX ? 1 : 4;
    const bool tensor = x->scaling == LK_SRMS_NORM_FP8_TENSOR;
    const int with_scale = tensor ? LK_UNUSED : LK_OUT | LK_REQUIRED;
    const int64_t rows = a->rows, cols = a->cols;
    lk_srms_norm_fp8_table table = {};
    for (int i = 0; i < n; i++) {
        table.list[i] = norm.list[i];
        if (x->q_transposed) table.list[i].in_place[0] = NULL; /* what is read twice must stay */
    }
    const lk_tensor more[] = {
        {"tensor_scale", x->tensor_scale, 4, tensor ? LK_IN : LK_UNUSED, 1},
        {"amax", x->amax, 4, tensor ? LK_OUT : LK_UNUSED, 1},
        {"q", x->q, 1, LK_OUT | LK_REQUIRED, cols, {{rows, &x->q_stride, "q_stride"}}},
        {"scale", x->scale, bytes, with_scale, 1,
         {{rows, &x->scale_stride, "scale_stride"},
          {lk_srms_norm_fp8_blocks(x->scaling, cols), &x->scale_block_stride, "scale_block_stride"}}},
        {"q_transposed", x->q_transposed, 1, x->q_transposed ? LK_OUT : LK_UNUSED, rows,
         {{cols, &x->q_transposed_stride, "q_transposed_stride"}}},
        {"transposed_scale", x->transposed_scale, bytes, x->q_transposed ? with_scale : LK_UNUSED, 1,
         {{cols, &x->transposed_scale_stride, "transposed_scale_stride"},
          {lk_srms_norm_fp8_blocks(x->scaling, rows), &x->transposed_block_stride, "transposed_block_stride"}}},
    };
    for (int i = 0; i < LK_COUNT(more); i++) table.list[n + i] = more[i];
    return table;
}

/* Validates; x becomes the arguments with every default filled in. device: as in lk_check_begin. */
template <class T>
LK_HOST lk_status lk_srms_norm_fp8_check(const char *op, const lk_srms_norm_fp8_args *args, lk_device *device,
                                         lk_srms_norm_fp8_args *x)
{
    *x = *args;
    lk_srms_norm_args *const a = &x->common;
    if (a->groups == 0) a->groups = 1;
    lk_checks checks = lk_check_begin(op, device);
    lk_check_enum(&checks, "scaling", x->scaling, LK_SRMS_NORM_FP8_MX, "LK_SRMS_NORM_FP8_*");
    if (checks.status) x->scaling = LK_SRMS_NORM_FP8_TENSOR; /* which tensors there are follows from it */
    const bool tensor = x->scaling == LK_SRMS_NORM_FP8_TENSOR;
    lk_check_absent(&checks, "bias", a->bias, "srms_norm_fp8 has none");
    lk_check_absent(&checks, "batch_invariant", a->batch_invariant, "srms_norm_fp8 has none");
    lk_check_absent(&checks, "tensor_scale", !tensor && x->tensor_scale, "it belongs to scaling 0 (tensor)");
    lk_check_absent(&checks, "amax", !tensor && x->amax, "it belongs to scaling 0 (tensor)");
    lk_check_absent(&checks, "scale", tensor && x->scale, "with scaling 0 (tensor) the scale is tensor_scale, an input");
    lk_check_absent(&checks, "transposed_scale", (tensor || !x->q_transposed) && x->transposed_scale,
                    "it belongs to q_transposed with scaling 2 (block) or 3 (MX)");
    lk_check_absent(&checks, "q_transposed", x->q_transposed && x->scaling == LK_SRMS_NORM_FP8_ROW,
                    "scales of rows (1) are no scales of its rows");
    lk_srms_norm_fp8_table table = lk_srms_norm_fp8_tensors<T>(x);
    const int count = lk_used_tensors(table.list, LK_COUNT(table.list));
    lk_check_size(&checks, "rows", a->rows, 0, INT64_MAX);
    lk_check_size(&checks, "cols", a->cols, 1, (int64_t)1 << 30);
    lk_check_size(&checks, "groups", a->groups, 0, ((int64_t)1 << 30) / (a->cols > 0 ? a->cols : 1));
    lk_check_shapes(&checks, table.list, count, !device);
    lk_check_number(&checks, "eps", a->eps, a->eps >= 0.0f && a->eps <= FLT_MAX, "finite and at least 0");
    lk_check_number(&checks, "weight_offset", a->weight_offset, fabsf(a->weight_offset) <= FLT_MAX, "finite");
    lk_check_dtype<T>(&checks, "residual_dtype", a->residual_dtype);
    lk_check_enum(&checks, "weight_dtype", a->weight_dtype, LK_DTYPE_BF16, "LK_DTYPE_*");
    lk_check_enum(&checks, "format", x->format, LK_FP8_E5M2, "LK_FP8_*");
    lk_check_enum(&checks, "scale_rounding", x->scale_rounding, LK_SRMS_NORM_FP8_FLOOR, "LK_SRMS_NORM_FP8_UP or _FLOOR");
    if (x->scale_rounding && x->scaling != LK_SRMS_NORM_FP8_MX && (tensor || !x->power_of_two))
        lk_reject(&checks, LK_ERR_VALUE, "scale_rounding is %d; it belongs to scaling 3 (MX), or 1 and 2 with power_of_two",
                  x->scale_rounding);
    lk_check_enum(&checks, "path", a->path, LK_SRMS_NORM_CLUSTER, "LK_SRMS_NORM_*");
    if (x->q_transposed && a->groups > 1)
        lk_reject(&checks, LK_ERR_VALUE, "groups is %lld; with q_transposed it must be 0 or 1", (long long)a->groups);
    if (!a->residual_dtype) a->residual_dtype = lk_dtype<T>;
    if (!a->weight_dtype) a->weight_dtype = lk_dtype<T>;
    lk_check_rows(&checks, a->path, a->path == LK_SRMS_NORM_BLOCK && a->rows > LK_TEAM_ROWS, "rows", a->rows);
    if (a->path == LK_SRMS_NORM_CLUSTER)
        lk_reject(&checks, LK_ERR_PATH, "path %d (cluster) is not one of this function's", a->path);
    lk_check_end(&checks, table.list, count);
    lk_check_warn(&checks, a->rows == 0, "rows is 0; nothing is computed");
    lk_check_warn(&checks, a->eps == 0.0f, "eps is 0; a row of zeros gives NaN");
    return checks.status;
}

/* Whether the rows of all tensors start and end on whole vectors of T, or on as many elements of 8 bits. */
template <class T> LK_HOST bool lk_srms_norm_fp8_is_wide(lk_srms_norm_fp8_args *x)
{
    const lk_srms_norm_fp8_table table = lk_srms_norm_fp8_tensors<T>(x);
    bool wide = x->common.cols % LK_VEC<T> == 0;
    for (int i = 0; i < LK_COUNT(table.list); i++) {
        const lk_tensor *const t = &table.list[i];
        const bool row = t->width == x->common.cols && t->dim[0].stride && strcmp(t->name, "q_transposed");
        if (!row || !t->pointer || t->use & LK_UNUSED) continue;
        const int bytes = t->bytes == 1 ? LK_VEC<T> : 16;
        wide = wide && (uintptr_t)t->pointer % (unsigned)bytes == 0 && *t->dim[0].stride * t->bytes % bytes == 0;
    }
    return wide;
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_srms_norm_fp8_run(const char *op, const lk_srms_norm_fp8_args *args, cudaStream_t stream)
{
    lk_srms_norm_fp8_call call = {};
    lk_device device = {};
    const lk_status status = lk_srms_norm_fp8_check<T>(op, args, &device, &call.x);
    const lk_srms_norm_args *const a = &call.x.common;
    if (status || a->rows == 0) return status;
    const bool wide = lk_srms_norm_fp8_is_wide<T>(&call.x);
    call.norm.a = *a;
    call.norm.in.x = {a->x, a->x_stride, 0}, call.norm.in.r = {a->residual, a->residual_stride, 0};
    call.norm.in.aligned = 1, call.norm.in.inverse_cols = 1.0f / (float)a->cols;
    call.norm.in.round_sum = lk_srms_norm_rounds(a, false);
    call.block_log2 = call.x.scaling == LK_SRMS_NORM_FP8_MX ? 5 : 7;
    call.most = call.x.format == LK_FP8_E5M2 ? 57344.0f : 448.0f, call.inverse = 1.0f / call.most;
    call.narrow = call.x.power_of_two || call.x.scaling == LK_SRMS_NORM_FP8_MX;
    call.emax = call.x.format == LK_FP8_E5M2 ? 15 : 8;
    call.up = call.x.scale_rounding ? 0 : 0x1fffff; /* the mantissa of both largest numbers is 1.75: above it the next exponent */
    const bool other = a->residual_dtype != lk_dtype<T>;
    if (call.x.q_transposed)
        return other ? lk_srms_norm_fp8_bands<T, float>(op, &device, call, wide, stream)
                     : lk_srms_norm_fp8_bands<T, T>(op, &device, call, wide, stream);
    return other ? lk_srms_norm_fp8_rows<T, float>(op, &device, call, wide, stream)
                 : lk_srms_norm_fp8_rows<T, T>(op, &device, call, wide, stream);
}

/* No workspace. */
template <class T>
LK_HOST lk_status lk_srms_norm_fp8_query(const char *op, const lk_srms_norm_fp8_args *args, lk_direction, size_t *bytes)
{
    lk_srms_norm_fp8_args x = {};
    return lk_no_workspace(lk_srms_norm_fp8_check<T>(op, args, NULL, &x), bytes);
}

#endif /* CUDA or the simulator */
#endif
