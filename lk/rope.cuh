// SPDX-License-Identifier: MIT
/* rope.cuh - rotary position embedding of q and k in one launch, forward and backward, with an optional RMS norm of each head
 * before it (QK norm).
 *
 *   pairs      Pair j of a head, 0 <= j < rotary / 2, is (a, b) = (x[j], x[j + rotary / 2]), or, with `interleaved`,
 *              (x[2 j], x[2 j + 1]). Features from `rotary` on are in no pair.
 *   angles     phi = position inv_freq[j] radians, C = scale cos(phi), S = scale sin(phi); or C = scale cos[token, j] and
 *              S = scale sin[token, j] from tables
 *   forward    y = (a C - b S, b C + a S); features without a pair: y = x
 *   backward   dx = (da C + db S, db C - da S) of the pair (da, db) of dy; features without a pair: dx = dy
 *   norm       x = z rstd (weight_offset + weight), rstd = 1 / sqrt(mean z^2 + eps) over the head's dim features, in place of x:
 *              z is the input, and the rotation's result y. backward: with g = dx (weight_offset + weight),
 *              dz = rstd (g - z rstd^2 mean(g z));  dweight = sum of dx z rstd over all batches, tokens and heads
 *
 * q is [batch, tokens, q_heads, dim], k is [batch, tokens, k_heads, dim]. The strides of batch, token and head are free, so parts
 * of a packed qkv are used where they lie, and so is [batch, heads, tokens, dim]. Results may be in place. k may be NULL.
 * Positions are 0, 1, 2, ... from `offset` on, or a tensor. With several axes (images: time, height, width) there are as many
 * positions for a token, and pair_axis says for each pair which of them is its own: {0, 0, .., 1, 1, .., 2, 2, ..} for sections,
 * {0, 1, 2, 0, 1, 2, ..} where axes are in turns. NTK, linear and YaRN scaling are other inv_freq and another scale.
 *
 * Use        In one .cu file:                          Anywhere, C included:
 *                #include "lk/rope.cuh"                    #include "lk/rope.cuh"
 *                LK_DEFINE_ROPE(bf16)                      LK_DECLARE_ROPE(bf16)
 *            T is f32, f16 or bf16. Then, from C, asynchronously on the caller's stream, in a graph too; here in place:
 *                lk_rope_args args = {};
 *                args.q = args.q_out = q, args.k = args.k_out = k, args.inv_freq = inv_freq;
 *                args.batch = 1, args.tokens = tokens, args.q_heads = 32, args.k_heads = 8, args.dim = 128;
 *                lk_status status = lk_rope_forward_bf16(&args, stream);
 *                args.dq_out = args.dq = dq, args.dk_out = args.dk = dk;   // upstream gradients, which become those of q and k
 *                status = lk_rope_backward_bf16(&args, stream);
 * Needs      lk_angle.cuh, lk_base.cuh, lk_check.cuh, lk_row.cuh, lk_ptx.cuh.
 * Workspace  backward with dq_weight or dk_weight alone: some MiB. The size depends on the number of SMs, so its function needs a
 *            device: lk_rope_backward_workspace_bytes_bf16(&args, &args.workspace_bytes).
 * Strides    0 means packed: dim between heads, heads dim between tokens, tokens heads dim between batches. So an expanded tensor,
 *            whose stride is 0, must be copied first.
 * Repeatable The same bits every time on the same device: fixed order, no atomics.
 * Source     Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
 * Read on    lk/rope.md: how exact results are, and what is read and written.
 *
 * The kernels, in the order of the file. A block has some tokens with all their heads. Its threads compute or read the tokens'
 * angles, each once, into shared memory, while heads are loaded; a team of up to 32 lanes then turns a head.
 *   lk_rope_kernel                forward, and backward without a norm, which turns the other way
 *   lk_rope_norm_backward_kernel  backward with a norm; blocks walk over tokens, and keep sums for the weights' gradients
 *   lk_rope_dweight_kernel        adds these sums
 * For example 8192 tokens of 32 + 8 heads of 128 in bf16: 8 lanes have a head, 16 bytes of both halves each, and a team two heads
 * in flight. A block of 32 teams has 3 tokens, 120 heads, so there are 2,731 blocks. The checks of arguments, the workspace and the
 * calls come last.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_ROPE_CUH
#define LK_ROPE_CUH

/* One struct for both calls: a training step fills it once. F: forward, B: backward; no letter: both. A call ignores the fields
 * of the other one. Backward without a norm ignores q, k and their strides too. */
typedef struct {
    const void *q;           /* F B in    T [batch, tokens, q_heads, dim] */
    const void *k;           /* F B in    T [batch, tokens, k_heads, dim]; NULL, and k_heads 0: there is none */
    void *q_out;             /* F out     T, as q; may be q; NULL to skip */
    void *k_out;             /* F out     T, as k; may be k; NULL to skip */
    const void *dq_out;      /* B in      T, as q: the upstream gradient */
    const void *dk_out;      /* B in      T, as k */
    void *dq;                /* B out     T, as q; may be dq_out, with a norm q too; NULL to skip */
    void *dk;                /* B out     T, as k; may be dk_out, with a norm k too; NULL to skip */
    const void *position;    /* F B in    position_dtype [axes, batch, tokens] packed; NULL: offset, offset + 1, ... */
    const float *inv_freq;   /* F B in    f32 [rotary / 2], radians per position; NULL: cos and sin are given */
    const int32_t *pair_axis; /* F B in   int32 [rotary / 2], each 0 to axes - 1; lk cannot check it; NULL, with one axis: 0 */
    const void *cos;         /* F B in    table_dtype [batch, tokens, rotary / 2]; NULL: inv_freq is given */
    const void *sin;         /* F B in    table_dtype, as cos */
    const void *q_weight;    /* F B in    weight_dtype [dim]: q has a norm; NULL: it has none */
    const void *k_weight;    /* F B in    weight_dtype [dim]: k has a norm; NULL: it has none */
    float *q_rstd;           /* F out, B in  f32 [batch, tokens, q_heads] packed; NULL: skip in F, computed again in B; F refuses
                                             it without q_out */
    float *k_rstd;           /* F out, B in  f32 [batch, tokens, k_heads] packed; NULL: as q_rstd; F refuses it without k_out */
    void *dq_weight;         /* B out     weight_dtype [dim]; NULL to skip */
    void *dk_weight;         /* B out     weight_dtype [dim]; NULL to skip */
    void *workspace;         /* B         scratch for dq_weight and dk_weight; aligned to LK_WORKSPACE_ALIGNMENT */
    size_t workspace_bytes;  /* B         at least what lk_rope_backward_workspace_bytes_<T> says */
    int64_t batch;           /* at least 0 */
    int64_t tokens;          /* at least 0 */
    int64_t q_heads;         /* at least 0 */
    int64_t k_heads;         /* at least 0 */
    int64_t dim;             /* features of a head, 1 to 2^20; with a norm at most 256 */
    int64_t rotary;          /* features in pairs, even, at most dim; 0 means dim */
    int64_t offset;          /* the position of token 0 where `position` is NULL; offset + tokens is in (-2^31, 2^31) */
    int64_t q_stride[3];     /* elements between batches, between tokens and between heads; each 0: packed */
    int64_t k_stride[3];
    int64_t q_out_stride[3]; /* F: 0 means packed, or that of q where q_out is q */
    int64_t k_out_stride[3]; /* F: the same of k */
    int64_t dq_out_stride[3]; /* B */
    int64_t dk_out_stride[3]; /* B */
    int64_t dq_stride[3];    /* B: 0 means packed, or that of dq_out or q where dq is one of these */
    int64_t dk_stride[3];    /* B: the same of dk */
    int64_t
        table_stride[2]; /* of cos and sin, between batches and between tokens; 0 means packed: rotary / 2 * table_step between
                                tokens */
    int table_step;          /* elements between pairs in cos and sin; 0 means 1. 2 where each cosine stands twice */
    int shared_positions;    /* not 0: position is [axes, tokens] and cos and sin are [tokens, ..], the same in each batch */
    int axes;                /* positions of a token, 1 to 8; 0 means 1 */
    int interleaved;         /* not 0: pairs are neighbours; 0: they are halves of the first `rotary` features */
    int position_dtype;      /* 0: int64; 1: int32 */
    int table_dtype;         /* LK_DTYPE_*: T or f32; 0 means T */
    int weight_dtype;        /* LK_DTYPE_*: T or f32; 0 means T */
    int accumulate;          /* B: not 0: dq_weight and dk_weight are added to what is there */
    float scale;             /* of cosines and sines, finite; 0 means 1: YaRN's attention factor */
    float eps;               /* at least 0, finite */
    float weight_offset;     /* finite; 1 in Gemma, whose weights are stored less 1 */
} lk_rope_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md (overlap, alignment):
 *   LK_ERR_NULL       forward: q, k, and q_out or k_out where its rstd is given; backward: dq_out, dk_out, and q or k where it
 *                     has a norm; pair_axis with axes above 1; all outputs are NULL
 *   LK_ERR_SHAPE      a size out of its range; rotary is odd or above dim; dim above 256 with a norm; a negative stride; a tensor of
 *                     more than 2^62 elements with its gaps; elements of an output that overlap
 *   LK_ERR_VALUE      offset out of range; one of cos and sin; inv_freq and cos are both given, or neither; position with cos;
 *                     axes, a dtype, table_step, scale, eps or weight_offset out of its range; dq_weight without q_weight,
 *                     dk_weight without k_weight
 *   LK_ERR_WORKSPACE  dq_weight or dk_weight is wanted, and workspace is NULL, too small or not aligned
 * Fastest: tensors and strides at multiples of 16 bytes, rotary / 2 (interleaved: rotary) and dim too. Others are read and written
 * element by element. */

#define LK_ROPE_FUNCTIONS(X, T)                                                                                                \
    X##_CALL(rope, forward, LK_FORWARD, T)                                                                                     \
    X##_CALL(rope, backward, LK_BACKWARD, T)
#define LK_DECLARE_ROPE(T) LK_DECLARE(ROPE, T)
#define LK_DEFINE_ROPE(T) LK_DEFINE(ROPE, T)

#if LK_CUDA

#include "lk_angle.cuh"
#include "lk_check.cuh"
#include "lk_row.cuh"

#define LK_ROPE_THREADS 256
#define LK_ROPE_TOKENS 16    /* the most of a block at a time */
#define LK_ROPE_NORM_DIM 256 /* the most of a head with a norm */

/* Heads of a run, which a team has at a time: forward has all their loads in flight, backward with a norm those of the next. */
template <bool Back> constexpr int LK_ROPE_HEADS = Back ? 8 : 2;

/* Groups of Num pairs that a lane has at a time. With a norm a team has a head at once: 32 lanes, LK_ROPE_NORM_DIM / 2 pairs. */
template <int Num, bool Norm> constexpr int LK_ROPE_GROUPS = Norm && Num == 1 ? LK_ROPE_NORM_DIM / 64 : 1;

/* Blocks that fit on an SM: as many as registers allow without spills. */
template <bool Norm, bool Turns> constexpr int LK_ROPE_BLOCKS = !Norm ? 4 : Turns || LK_ARCH < 900 ? 2 : 3;

/* The most pairs of a token that a block has at a time. */
template <int Num, bool Norm> constexpr int LK_ROPE_PAIRS = Norm ? LK_ROPE_NORM_DIM / 2 : 32 * Num;

/* q or k. in: q, or in backward dq_out; x: q in backward with a norm. Strides: of batch, token, head. */
typedef struct {
    const void *in, *x, *weight;
    void *out;
    float *rstd, *partial; /* partial: [blocks, dim], sums for the weight's gradient; NULL: it is not wanted */
    int64_t blocks;        /* with a norm, in backward */
    int64_t in_stride[3], x_stride[3], out_stride[3];
    int heads, runs, tokens; /* heads: 0 where no result is wanted; runs: of a token's heads; tokens: of a block in backward */
} lk_rope_side;

typedef struct {
    lk_rope_side side[2];
    lk_rope_args a;            /* with defaults filled in */
    int64_t rows;              /* batch tokens */
    int tokens;                /* of a block */
    int lanes, teams;          /* of a team; of a block */
    int pairs, groups, paired; /* pairs: rotary / 2. groups: of Num pairs, of the whole head; the first `paired` have angles */
    float sign, inverse_dim;   /* sign: -1: the other way */
    bool small;                /* rows, and where elements lie, are below 2^31 */
} lk_rope_call;

/* ---- Where things are ---------------------------------------------------------------------------------------------------- */

/* A group's two vectors of Num features each; features behind the pairs are in groups too. second < 0: there is none. The lanes'
 * first vectors lie one behind another, and so do their second ones, interleaved or not. */
typedef struct {
    int first, second;
} lk_rope_place;

template <int Num> LK_DEVICE lk_rope_place lk_rope_place_of(const lk_rope_call &call, int group)
{
    if (group < call.paired) {
        if (Num == 1 && call.a.interleaved) return {2 * group, 2 * group + 1};
        return {Num * group, call.pairs + Num * group};
    }
    const int first = 2 * call.pairs + Num * (group - call.paired), second = first + Num * (call.groups - call.paired);
    return {first, second < (int)call.a.dim ? second : -1};
}

/* The pair that is number j of a group. Interleaved, both vectors hold whole pairs. */
template <int Num> LK_DEVICE int lk_rope_pair_of(const lk_rope_call &call, int group, int j)
{
    if (Num == 1 || !call.a.interleaved) return Num * group + j;
    return j < Num / 2 ? Num / 2 * group + j : call.pairs / 2 + Num / 2 * (group - 1) + j;
}

/* A token of a batch. */
typedef struct {
    int64_t batch;
    int token;
} lk_rope_row;

LK_DEVICE lk_rope_row lk_rope_row_of(const lk_rope_call &call, int64_t row)
{
    if (row < call.a.tokens) return {0, (int)row};
    const int64_t batch = call.small ? (uint32_t)row / (uint32_t)call.a.tokens : row / call.a.tokens;
    return {batch, (int)(row - batch * call.a.tokens)};
}
LK_DEVICE lk_rope_row lk_rope_row_after(const lk_rope_call &call, lk_rope_row row, int steps)
{
    const unsigned tokens = (unsigned)call.a.tokens;
    unsigned token = (unsigned)row.token + (unsigned)steps;
    while (token >= tokens) token -= tokens, row.batch++;
    return {row.batch, (int)token};
}

LK_DEVICE int64_t lk_rope_offset(const lk_rope_call &call, const int64_t (&stride)[3], lk_rope_row row, int head)
{
    if (call.small) return (int)row.batch * (int)stride[0] + row.token * (int)stride[1] + head * (int)stride[2];
    return row.batch * stride[0] + row.token * stride[1] + head * stride[2];
}

/* ---- Angles -------------------------------------------------------------------------------------------------------------- */

/* Num floats of shared memory. */
template <int Num> LK_DEVICE void lk_rope_get(float (&x)[Num], const float *from)
{
    if constexpr (Num % 4 == 0) {
        LK_UNROLL for (int i = 0; i < Num; i += 4) {
            const float4 v = *(const float4 *)(from + i);
            x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
        }
    } else {
        LK_UNROLL for (int j = 0; j < Num; j++) x[j] = from[j];
    }
}

/* C and S of a group in a block's angles, which has `size` pairs of all its tokens. */
template <int Num> LK_DEVICE void lk_rope_angles(float (&c)[Num], float (&s)[Num], const float *from, int size)
{
    lk_rope_get(c, from), lk_rope_get(s, from + size);
}

/* A block's threads write C and S of the pairs of some groups from `group` on, for each of `tokens` tokens: C [tokens, pairs], and
 * behind it S, with the sign of the direction. A thread has one pair. */
template <int Num> LK_DEVICE void lk_rope_fill(float *angles, int pairs, const lk_rope_call &call, lk_rope_row row, int tokens,
                                               int group)
{
    const lk_rope_args &a = call.a;
    if (pairs == 0) return; /* features without a pair */
    const int step = LK_ROPE_THREADS / pairs, first = (int)threadIdx.x / pairs, slot = (int)threadIdx.x - first * pairs;
    const int pair = lk_rope_pair_of<Num>(call, group + slot / Num, slot % Num);
    if (first >= step) return;
    float *const c = angles + slot, *const s = c + tokens * pairs;
    if (a.cos) {
        for (int t = first; t < tokens; t += step) {
            const lk_rope_row own = lk_rope_row_after(call, row, t);
            const int64_t at = (a.shared_positions ? 0 : own.batch * a.table_stride[0]) + own.token * a.table_stride[1] +
                               (int64_t)pair * a.table_step;
            c[t * pairs] = a.scale * lk_get_as(a.cos, a.table_dtype, at);
            s[t * pairs] = call.sign * a.scale * lk_get_as(a.sin, a.table_dtype, at);
        }
        return;
    }
    const float theta = a.inv_freq[pair], size = lk_is_finite(theta) ? a.scale : NAN;
    const lk_turn turn = lk_make_turn(__float_as_uint(theta));
    const int64_t axis = a.pair_axis ? a.pair_axis[pair] * (a.shared_positions ? a.tokens : call.rows) : 0;
    for (int t = first; t < tokens; t += step) {
        const lk_rope_row own = lk_rope_row_after(call, row, t);
        const int64_t at = (a.shared_positions ? 0 : own.batch * a.tokens) + own.token + axis;
        const int position = !a.position         ? (int)(a.offset + own.token)
                             : a.position_dtype ? ((const int32_t *)a.position)[at]
                                                : (int)((const int64_t *)a.position)[at];
        const float phi = (float)(int)lk_phase(turn, position) * LK_PHASE_UNIT;
        c[t * pairs] = size * lk_cos(phi), s[t * pairs] = call.sign * size * lk_sin(phi);
    }
}

/* ---- A group's features -------------------------------------------------------------------------------------------------- */

/* The two vectors of a group. Num = 1: an element each. */
template <class T> struct lk_rope_raw {
    lk_vec<T> first, second;
};
template <int Num, class T> LK_DEVICE lk_rope_raw<T> lk_rope_load(const T *head, lk_rope_place at)
{
    lk_rope_raw<T> raw = {};
    raw.first = lk_load_n<Num, true>(head + at.first);
    if (at.second >= 0) raw.second = lk_load_n<Num, true>(head + at.second);
    return raw;
}

/* A group's features in pairs, (a[j], b[j]); lk_rope_store puts them back in order. Turns: vectors that are interleaved. */
template <bool Turns, int Num, class T>
LK_DEVICE void lk_rope_unpack(float (&a)[Num], float (&b)[Num], const lk_rope_raw<T> &raw)
{
    lk_unpack_n(a, raw.first), lk_unpack_n(b, raw.second);
    if (Turns) lk_to_pairs(a, b);
}
template <bool Turns, int Num, class T>
LK_DEVICE void lk_rope_store(T *head, lk_rope_place at, float (&a)[Num], float (&b)[Num])
{
    if (Turns) lk_from_pairs(a, b);
    lk_store_n<true>(head + at.first, a);
    if (at.second >= 0) lk_store_n<true>(head + at.second, b);
}

/* (a C - b S, b C + a S). */
template <int Num> LK_DEVICE void lk_rope_turn(float (&a)[Num], float (&b)[Num], const float (&c)[Num], const float (&s)[Num])
{
    LK_UNROLL for (int j = 0; j < Num; j++) {
        const float x = a[j];
        a[j] = fmaf(x, c[j], -b[j] * s[j]), b[j] = fmaf(b[j], c[j], x * s[j]);
    }
}

/* A block's threads write weight_offset + weight of a side, 1 where it has no norm. */
template <class T> LK_DEVICE void lk_rope_fill_weights(float *to, const lk_rope_call &call, const void *weight)
{
    for (int f = (int)threadIdx.x; f < (int)call.a.dim; f += LK_ROPE_THREADS)
        to[f] = weight ? call.a.weight_offset + lk_get_as(weight, call.a.weight_dtype, f) : 1.0f;
}
/* Those of a group's features, in pairs. */
template <bool Turns, int Num>
LK_DEVICE void lk_rope_weights(float (&a)[Num], float (&b)[Num], const float *weights, lk_rope_place at)
{
    LK_UNROLL for (int j = 0; j < Num; j++) b[j] = 1.0f;
    lk_rope_get(a, weights + at.first);
    if (at.second >= 0) lk_rope_get(b, weights + at.second);
    if (Turns) lk_to_pairs(a, b);
}

/* ---- Forward, and backward without a norm -------------------------------------------------------------------------------- */

/* A block owns some tokens, all heads of q and k. A team has a run of heads of a token at a time. */
template <class T, int Num, bool Norm, bool Turns> LK_KERNEL void __launch_bounds__(LK_ROPE_THREADS, LK_ROPE_BLOCKS<Norm, Turns>)
    lk_rope_kernel(const __grid_constant__ lk_rope_call call)
{
    constexpr int Heads = LK_ROPE_HEADS<false>, Groups = LK_ROPE_GROUPS<Num, Norm>;
    constexpr int Size = 2 * LK_ROPE_TOKENS * LK_ROPE_PAIRS<Num, Norm>; /* of the angles */
    LK_SHARED(float4, angles_4, [Size / 4]);
    LK_SHARED(float4, weights_4, [Norm ? LK_ROPE_NORM_DIM / 2 : 1]);
    float *const angles = (float *)angles_4, *const weights = (float *)weights_4;
    const int lanes = call.lanes, team = (int)((unsigned)threadIdx.x / (unsigned)lanes), lane = (int)threadIdx.x - team * lanes;
    const int64_t first_row = (int64_t)blockIdx.x * call.tokens;
    const lk_rope_row row = lk_rope_row_of(call, first_row);
    const int tokens = first_row + call.tokens <= call.rows ? call.tokens : (int)(call.rows - first_row);
    const int q_runs = call.side[0].runs, runs = q_runs + call.side[1].runs, all = tokens * runs;
    lk_griddepcontrol_wait();
    lk_griddepcontrol_launch_dependents();
    for (int base = 0; base < call.groups; base += Groups * lanes) { /* with a norm once */
        const int rest = call.paired - base, pairs = Num * (rest < 0 ? 0 : rest < Groups * lanes ? rest : Groups * lanes);
        for (int begin = 0; begin < all; begin += call.teams) {
            const int own = team < call.teams ? begin + team : all; /* the last threads may have no team */
            const int token = (int)((unsigned)own / (unsigned)runs), run = own - token * runs;
            const bool is_k = run >= q_runs;
            const lk_rope_side &side = call.side[is_k];
            const int head = (run - (is_k ? q_runs : 0)) * Heads, left = own < all ? side.heads - head : 0;
            const lk_rope_row at = lk_rope_row_after(call, row, token);
            const T *const in = (const T *)side.in + lk_rope_offset(call, side.in_stride, at, head);
            T *const out = (T *)side.out + lk_rope_offset(call, side.out_stride, at, head);
            lk_rope_raw<T> raw[Groups][Heads] = {};
            LK_UNROLL for (int i = 0; i < Groups; i++) {
                const int group = base + lane + i * lanes;
                const lk_rope_place place = lk_rope_place_of<Num>(call, group);
                LK_UNROLL for (int h = 0; h < Heads; h++)
                    if (h < left && group < call.groups) raw[i][h] = lk_rope_load<Num>(in + h * side.in_stride[2], place);
            }
            if (begin == 0) { /* while the loads are in flight */
                if (base > 0) __syncthreads(); /* all teams are done with the angles before */
                lk_rope_fill<Num>(angles, pairs, call, row, tokens, base);
                if constexpr (Norm) {
                    lk_rope_fill_weights<T>(weights, call, call.side[0].weight);
                    lk_rope_fill_weights<T>(weights + LK_ROPE_NORM_DIM, call, call.side[1].weight);
                }
                __syncthreads(); /* the angles and weights are there */
            }
            float rstd[Heads];
            if constexpr (Norm) {
                LK_UNROLL for (int h = 0; h < Heads; h++) {
                    float sum = 0.0f;
                    LK_UNROLL for (int i = 0; i < Groups; i++) {
                        float a[Num], b[Num];
                        lk_rope_unpack<false>(a, b, raw[i][h]);
                        LK_UNROLL for (int j = 0; j < Num; j++) sum = fmaf(a[j], a[j], fmaf(b[j], b[j], sum));
                    }
                    sum = lk_sum_warp(sum, lanes);
                    rstd[h] = side.weight ? lk_rsqrt(fmaf(sum, call.inverse_dim, call.a.eps)) : 1.0f;
                    if (side.rstd && h < left && lane == 0) side.rstd[(first_row + token) * side.heads + head + h] = rstd[h];
                }
            }
            LK_UNROLL for (int i = 0; i < Groups; i++) {
                const int group = base + lane + i * lanes;
                if (group >= call.groups || left <= 0) break;
                const lk_rope_place place = lk_rope_place_of<Num>(call, group);
                float c[Num] = {}, s[Num] = {}, w_a[Num], w_b[Num];
                if (group < call.paired) lk_rope_angles(c, s, angles + token * pairs + (group - base) * Num, tokens * pairs);
                if constexpr (Norm)
                    lk_rope_weights<Turns>(w_a, w_b, weights + (is_k ? LK_ROPE_NORM_DIM : 0), place);
                LK_UNROLL for (int h = 0; h < Heads; h++) {
                    float a[Num], b[Num];
                    if (h >= left) break;
                    if (Norm) lk_forget(&raw[i][h].first.raw), lk_forget(&raw[i][h].second.raw); /* or their floats stay too */
                    lk_rope_unpack<Turns>(a, b, raw[i][h]);
                    if constexpr (Norm) {
                        LK_UNROLL for (int j = 0; j < Num; j++) a[j] *= rstd[h] * w_a[j], b[j] *= rstd[h] * w_b[j];
                    }
                    if (group < call.paired) lk_rope_turn(a, b, c, s);
                    lk_rope_store<Turns>(out + h * side.out_stride[2], place, a, b);
                }
            }
        }
    }
}

/* ---- Backward with a norm ------------------------------------------------------------------------------------------------ */

/* Loads head h of a run whose first one is at `in` and x, and has this number in rstd. */
template <int Num, class T, int Groups>
LK_DEVICE void lk_rope_load_head(lk_rope_raw<T> (&raw)[Groups], lk_rope_raw<T> (&raw_x)[Groups], float *rstd,
                                 const lk_rope_call &call, const lk_rope_side &side, const T *in, const T *x, int64_t number,
                                 int h, int left, int lane)
{
    if (h >= left || h >= LK_ROPE_HEADS<true>) return;
    LK_UNROLL for (int i = 0; i < Groups; i++) {
        const int group = lane + i * call.lanes;
        if (group >= call.groups) break;
        const lk_rope_place place = lk_rope_place_of<Num>(call, group);
        raw[i] = lk_rope_load<Num>(in + h * side.in_stride[2], place);
        if (side.weight) raw_x[i] = lk_rope_load<Num>(x + h * side.x_stride[2], place);
    }
    if (side.weight && side.rstd) *rstd = side.rstd[number + h];
}

/* The first blocks are q's, the others k's. A block takes some tokens at a time, and its teams keep sums of dx z rstd. */
template <class T, int Num, bool Turns>
LK_KERNEL void __launch_bounds__(LK_ROPE_THREADS, 2) lk_rope_norm_backward_kernel(const __grid_constant__ lk_rope_call call)
{
    constexpr int Heads = LK_ROPE_HEADS<true>, Groups = LK_ROPE_GROUPS<Num, true>;
    constexpr int Size = 2 * LK_ROPE_TOKENS * LK_ROPE_PAIRS<Num, true>; /* of the angles of a piece */
    LK_SHARED(float4, angles_4, [2 * Size / 4]); /* two pieces; the sums at the end */
    LK_SHARED(float4, weights_4, [LK_ROPE_NORM_DIM / 4]);
    float *const weights = (float *)weights_4;
    const bool is_k = blockIdx.x >= call.side[0].blocks;
    const lk_rope_side &side = call.side[is_k];
    const int64_t block = blockIdx.x - (is_k ? call.side[0].blocks : 0);
    const int lanes = call.lanes, team = (int)((unsigned)threadIdx.x / (unsigned)lanes), lane = (int)threadIdx.x - team * lanes;
    const int runs = side.runs, pairs = Num * call.paired;
    const float each = call.inverse_dim;
    float dw_a[Groups][Num] = {}, dw_b[Groups][Num] = {};
    lk_griddepcontrol_wait();
    lk_rope_fill_weights<T>(weights, call, side.weight);
    int odd = 0; /* which half of angles_4 */
    for (int64_t first_row = block * side.tokens; first_row < call.rows; first_row += side.blocks * side.tokens, odd ^= 1) {
        const lk_rope_row row = lk_rope_row_of(call, first_row);
        const int tokens = first_row + side.tokens <= call.rows ? side.tokens : (int)(call.rows - first_row), all = tokens * runs;
        float *const angles = (float *)angles_4 + odd * Size;
        for (int begin = 0; begin < all; begin += call.teams) {
            const int own = begin + team, token = (int)((unsigned)own / (unsigned)runs), head = (own - token * runs) * Heads;
            const int left = own < all ? side.heads - head : 0;
            const lk_rope_row at = lk_rope_row_after(call, row, token);
            const T *in = (const T *)side.in + lk_rope_offset(call, side.in_stride, at, head);
            const T *x = (const T *)side.x + lk_rope_offset(call, side.x_stride, at, head);
            T *out = (T *)side.out + lk_rope_offset(call, side.out_stride, at, head);
            const int64_t number = (first_row + token) * side.heads + head; /* of the first head */
            lk_rope_raw<T> raw[Groups] = {}, raw_x[Groups] = {};
            float kept = 1.0f;
            lk_rope_load_head<Num>(raw, raw_x, &kept, call, side, in, x, number, 0, left, lane);
            if (begin == 0) { /* while the loads are in flight; the other half is still read */
                lk_rope_fill<Num>(angles, pairs, call, row, tokens, 0);
                __syncthreads(); /* the angles, and the weights, are there */
            }
            LK_NO_UNROLL for (int h = 0; h < Heads && h < side.heads; h++) {
                const bool there = h < left;
                float a[Groups][Num], b[Groups][Num], z_a[Groups][Num], z_b[Groups][Num], square = 0.0f, dot = 0.0f, rstd = kept;
                LK_UNROLL for (int i = 0; i < Groups; i++) {
                    lk_rope_unpack<Turns>(a[i], b[i], raw[i]), lk_rope_unpack<Turns>(z_a[i], z_b[i], raw_x[i]);
                }
                lk_rope_load_head<Num>(raw, raw_x, &kept, call, side, in, x, number, h + 1, left, lane);
                LK_UNROLL for (int i = 0; i < Groups; i++) { /* of z^2, and of g z */
                    const int group = lane + i * lanes;
                    if (!there || group >= call.groups) continue;
                    float w_a[Num], w_b[Num];
                    if (group < call.paired) {
                        lk_rope_angles(w_a, w_b, angles + token * pairs + group * Num, tokens * pairs);
                        lk_rope_turn(a[i], b[i], w_a, w_b);
                    }
                    lk_rope_weights<Turns>(w_a, w_b, weights, lk_rope_place_of<Num>(call, group));
                    LK_UNROLL for (int j = 0; j < Num; j++) {
                        square = fmaf(z_a[i][j], z_a[i][j], fmaf(z_b[i][j], z_b[i][j], square));
                        dot = fmaf(a[i][j] * w_a[j], z_a[i][j], fmaf(b[i][j] * w_b[j], z_b[i][j], dot));
                    }
                }
                dot = lk_sum_warp(dot, lanes);
                if (side.weight && !side.rstd) rstd = lk_rsqrt(fmaf(lk_sum_warp(square, lanes), each, call.a.eps));
                if (!there) continue; /* lanes without a head took part in the sums */
                const float factor = side.weight ? rstd * rstd * (dot * each) : 0.0f;
                LK_UNROLL for (int i = 0; i < Groups; i++) {
                    const int group = lane + i * lanes;
                    if (group >= call.groups) break;
                    const lk_rope_place place = lk_rope_place_of<Num>(call, group);
                    float w_a[Num], w_b[Num];
                    lk_rope_weights<Turns>(w_a, w_b, weights, place);
                    LK_UNROLL for (int j = 0; j < Num; j++) {
                        const float y = a[i][j], z = b[i][j];
                        dw_a[i][j] = fmaf(y, z_a[i][j] * rstd, dw_a[i][j]), dw_b[i][j] = fmaf(z, z_b[i][j] * rstd, dw_b[i][j]);
                        a[i][j] = rstd * fmaf(-z_a[i][j], factor, y * w_a[j]);
                        b[i][j] = rstd * fmaf(-z_b[i][j], factor, z * w_b[j]);
                    }
                    if (side.out) lk_rope_store<Turns>(out + h * side.out_stride[2], place, a[i], b[i]);
                }
            }
        }
    }
    lk_griddepcontrol_launch_dependents();
    if (!side.partial) return; /* the same in all threads of a block */
    float *const sums = (float *)angles_4; /* [teams, dim] */
    __syncthreads(); /* all teams are done with the angles */
    LK_UNROLL for (int i = 0; i < Groups; i++) {
        const int group = lane + i * lanes;
        float a[Num], b[Num];
        LK_UNROLL for (int j = 0; j < Num; j++) a[j] = dw_a[i][j], b[j] = dw_b[i][j];
        if (Turns) lk_from_pairs(a, b);
        if (group >= call.groups) break;
        const lk_rope_place place = lk_rope_place_of<Num>(call, group);
        LK_UNROLL for (int j = 0; j < Num; j++) {
            sums[team * (int)call.a.dim + place.first + j] = a[j];
            if (place.second >= 0) sums[team * (int)call.a.dim + place.second + j] = b[j];
        }
    }
    __syncthreads(); /* all teams have written their sums */
    for (int f = (int)threadIdx.x; f < (int)call.a.dim; f += LK_ROPE_THREADS) {
        float sum = 0.0f;
        for (int t = 0; t < call.teams; t++) sum += sums[t * (int)call.a.dim + f];
        side.partial[block * call.a.dim + f] = sum;
    }
}

/* A warp owns a feature of q's weight, or behind them of k's. */
template <class T>
LK_KERNEL void __launch_bounds__(LK_ROPE_THREADS) lk_rope_dweight_kernel(const __grid_constant__ lk_rope_call call)
{
    const int warp = (int)(blockIdx.x * (LK_ROPE_THREADS / 32) + threadIdx.x / 32), lane = (int)threadIdx.x % 32;
    const int dim = (int)call.a.dim, is_k = warp >= dim, f = is_k ? warp - dim : warp;
    const lk_rope_side &side = call.side[is_k != 0];
    void *const to = is_k ? call.a.dk_weight : call.a.dq_weight;
    lk_griddepcontrol_wait();
    if (f >= dim || !to) return;
    float sum = 0.0f;
    for (int64_t b = lane; b < side.blocks; b += 32) sum += side.partial[b * dim + f];
    sum = lk_sum_warp(sum);
    if (lane) return;
    if (call.a.accumulate) sum += lk_get_as(to, call.a.weight_dtype, f);
    lk_put_as(to, call.a.weight_dtype, f, sum);
}

/* ---- Checks, the workspace and the launches ------------------------------------------------------------------------------ */

/* What backward with a norm has, by numbers of SMs and heads alone, so that its workspace does not depend on where tensors lie: two
 * blocks for each SM, q's and k's shares of them as their heads are. Lays out their sums; returns the bytes. */
LK_HOST size_t lk_rope_lay_out(lk_rope_call *call, int sms)
{
    const lk_rope_args &a = call->a;
    const int64_t most = 2 * (int64_t)sms, all = (int64_t)call->side[0].heads + call->side[1].heads;
    lk_arena arena = {(uintptr_t)a.workspace, 0, 256};
    for (int i = 0; i < 2; i++) {
        lk_rope_side *const side = &call->side[i];
        const int64_t share = all ? (side->heads * most + all / 2) / all : 0, heads = lk_count(call->rows, side->heads);
        side->blocks = share < 1 ? 1 : share;
        if (side->blocks > heads) side->blocks = heads;
        lk_take(&side->partial, &arena, i ? a.dk_weight != NULL : a.dq_weight != NULL, lk_count(side->blocks, a.dim));
    }
    return arena.used;
}

/* Rows, and the heads of both sides; a side without a result has none. */
LK_HOST void lk_rope_count(lk_rope_call *call, bool backward)
{
    const lk_rope_args &a = call->a;
    call->rows = lk_count(a.batch, a.tokens);
    call->side[0].heads = (backward ? a.dq || a.dq_weight : a.q_out != NULL) ? (int)a.q_heads : 0;
    call->side[1].heads = (backward ? a.dk || a.dk_weight : a.k_out != NULL) ? (int)a.k_heads : 0;
    const bool norm = backward && (a.q_weight || a.k_weight);
    for (int i = 0; i < 2; i++)
        call->side[i].runs = (int)lk_ceil_div(call->side[i].heads, norm ? LK_ROPE_HEADS<true> : LK_ROPE_HEADS<false>);
}

/* Tokens of `runs` each that a block has at a time, up to `most`: as its teams are filled best, in up to 7 more rounds than one token
 * takes, and all of `blocks` have as much to do. alone: they are all there are. */
LK_HOST int lk_rope_tokens(int64_t rows, int64_t runs, int64_t teams, int64_t most, int64_t blocks, bool alone)
{
    const int64_t least = lk_ceil_div(runs, teams), limit = most < rows ? most : rows;
    double best = 0.0;
    int64_t tokens = 1, n = 0;
    for (int64_t rounds = least; runs > 0 && rounds < least + 8 && n < limit; rounds++) {
        n = rounds * teams / runs < limit ? rounds * teams / runs : limit;
        const int64_t pieces = lk_ceil_div(rows, n);
        const double fill = (double)(n * runs) / (double)(lk_ceil_div(n * runs, teams) * teams);
        const double even = alone ? (double)pieces / (double)(lk_ceil_div(pieces, blocks) * blocks)
                                  : (double)pieces / ((double)pieces + 0.5 * (double)blocks);
        if (fill * even > 1.02 * best) best = fill * even, tokens = n;
    }
    return (int)tokens;
}

#define LK_ROPE_TENSOR(name, side, use, ...)                                                                                   \
    {#name, a->name, bytes, use, a->dim,                                                                                       \
     {{a->batch, &a->name##_stride[0], #name "_stride[0]"}, {a->tokens, &a->name##_stride[1], #name "_stride[1]"},             \
      {a->side##_heads, &a->name##_stride[2], #name "_stride[2]"}}, {__VA_ARGS__}}
#define LK_ROPE_TABLE(name, use, strides)                                                                                      \
    {#name, a->name, lk_dtype_bytes<T>(a->table_dtype), use, table,                                                            \
     {{batches, &strides[0], "table_stride[0]"}, {a->tokens, &strides[1], "table_stride[1]"}}}

/* Validates a call, and fills in its defaults. device: NULL: a query. vector: whether all lies at multiples of 16 bytes. */
template <class T>
LK_HOST lk_status lk_rope_check(const char *op, lk_rope_call *call, bool backward, lk_device *device, bool *vector)
{
    lk_rope_args *const a = &call->a;
    const bool query = !device, given[] = {backward && a->dq_weight, backward && a->dk_weight};
    const int axes = a->axes, step = a->table_step, bytes = sizeof(T), in = LK_REQUIRED | LK_MAY_OVERLAP;
    if (!a->rotary) a->rotary = a->dim;
    if (axes < 1 || axes > 8) a->axes = 1; /* what was given is checked below */
    if (step < 1 || step > 2) a->table_step = 1;
    if (a->scale == 0.0f) a->scale = 1.0f;
    if (!backward) a->dq_weight = a->dk_weight = NULL;
    const bool norm = a->q_weight || a->k_weight, by_table = a->cos || a->sin;
    const bool reads = !backward || norm || a->dq_weight || a->dk_weight; /* q and k; backward needs those with a norm */
    const bool needs_q = !backward || a->q_weight || a->dq_weight, needs_k = !backward || a->k_weight || a->dk_weight;
    const int forward_out = backward ? LK_UNUSED : LK_OUT, backward_out = backward ? LK_OUT : LK_UNUSED;
    const int upstream = backward ? in : LK_UNUSED, kept = backward ? LK_IN : LK_OUT;
    const char *const over_q = needs_q ? "q" : NULL, *const over_k = needs_k ? "k" : NULL;
    const int64_t pairs = a->rotary > 0 && a->rotary <= a->dim ? a->rotary / 2 : 0, batches = a->shared_positions ? 1 : a->batch;
    const int64_t rows = lk_count(a->batch, a->tokens), positions = lk_count(lk_count(batches, a->tokens), a->axes);
    const int64_t table = pairs ? (pairs - 1) * a->table_step + 1 : 0, some = rows ? pairs : 0;
    if (!a->table_stride[1]) a->table_stride[1] = pairs * a->table_step;
    if (!a->table_stride[0]) a->table_stride[0] = lk_count(a->tokens, a->table_stride[1]);
    int64_t sin_stride[2] = {a->table_stride[0], a->table_stride[1]};
    lk_tensor list[] = {
        LK_ROPE_TENSOR(q, q, needs_q ? in : reads ? LK_MAY_OVERLAP : LK_UNUSED),
        LK_ROPE_TENSOR(k, k, needs_k ? in : reads ? LK_MAY_OVERLAP : LK_UNUSED),
        LK_ROPE_TENSOR(q_out, q, forward_out, "q"),
        LK_ROPE_TENSOR(k_out, k, forward_out, "k"),
        LK_ROPE_TENSOR(dq_out, q, upstream),
        LK_ROPE_TENSOR(dk_out, k, upstream),
        LK_ROPE_TENSOR(dq, q, backward_out, "dq_out", over_q),
        LK_ROPE_TENSOR(dk, k, backward_out, "dk_out", over_k),
        {"position", a->position, a->position_dtype == 1 ? 4 : 8, LK_IN, positions},
        {"inv_freq", a->inv_freq, 4, LK_IN, some},
        {"pair_axis", a->pair_axis, 4, a->axes > 1 ? LK_REQUIRED : LK_IN, some},
        LK_ROPE_TABLE(cos, by_table ? LK_MAY_OVERLAP : LK_UNUSED, a->table_stride),
        LK_ROPE_TABLE(sin, by_table ? LK_MAY_OVERLAP : LK_UNUSED, sin_stride),
        {"q_weight", a->q_weight, lk_dtype_bytes<T>(a->weight_dtype), LK_IN, a->dim},
        {"k_weight", a->k_weight, lk_dtype_bytes<T>(a->weight_dtype), LK_IN, a->dim},
        {"q_rstd", a->q_rstd, 4, a->q_weight ? kept : LK_UNUSED, lk_count(rows, a->q_heads)},
        {"k_rstd", a->k_rstd, 4, a->k_weight ? kept : LK_UNUSED, lk_count(rows, a->k_heads)},
        {"dq_weight", a->dq_weight, lk_dtype_bytes<T>(a->weight_dtype), backward_out, a->dim},
        {"dk_weight", a->dk_weight, lk_dtype_bytes<T>(a->weight_dtype), backward_out, a->dim},
        lk_workspace(a->workspace, 0), /* its size is known below */
    };
    const int count = lk_used_tensors(list, LK_COUNT(list));
    lk_checks checks = lk_check_begin(op, device);
    lk_check_size(&checks, "batch", a->batch, 0, INT64_MAX);
    lk_check_size(&checks, "tokens", a->tokens, 0, INT32_MAX);
    lk_check_size(&checks, "q_heads", a->q_heads, 0, (int64_t)1 << 28);
    lk_check_size(&checks, "k_heads", a->k_heads, 0, (int64_t)1 << 28);
    lk_check_size(&checks, "dim", a->dim, 1, norm ? LK_ROPE_NORM_DIM : 1 << 20);
    if (a->rotary < 0 || a->rotary > a->dim || a->rotary % 2)
        lk_reject(&checks, LK_ERR_SHAPE, "rotary is %lld; it must be even, and at most dim, which is %lld",
                  (long long)a->rotary, (long long)a->dim);
    lk_check_shapes(&checks, list, count, query);
    const bool lacks_q = a->q_rstd && a->q_weight && !a->q_out && a->q_heads;
    const bool lacks_k = a->k_rstd && a->k_weight && !a->k_out && a->k_heads, writes = rows && !backward && !query;
    if (lacks_q && writes) lk_reject(&checks, LK_ERR_NULL, "q_out is NULL, and q_rstd is given; both are written together");
    if (lacks_k && writes) lk_reject(&checks, LK_ERR_NULL, "k_out is NULL, and k_rstd is given; both are written together");
    if (!checks.status) {
        lk_rope_count(call, backward);
        list[count - 1].width = query ? 0 : (int64_t)lk_rope_lay_out(call, device->sms);
        if (!query) lk_check_overlap(&checks, list, count); /* once more, with the workspace */
    }
    const bool far = a->offset <= INT32_MIN || a->offset > INT32_MAX || a->tokens > INT32_MAX - a->offset;
    lk_check_number(&checks, "offset", (double)a->offset, by_table || a->position || !far,
                    "such that all positions are in (-2^31, 2^31)");
    if (!a->cos != !a->sin)
        lk_reject(&checks, LK_ERR_VALUE, "%s is NULL, and %s is given; they go together", a->cos ? "sin" : "cos",
                  a->cos ? "cos" : "sin");
    lk_check_absent(&checks, "inv_freq", by_table && a->inv_freq, "so are cos and sin, and one of both says the angles");
    if (!by_table && !a->inv_freq && some)
        lk_reject(&checks, LK_ERR_VALUE, "inv_freq is NULL, and so are cos and sin; one of both says the angles");
    lk_check_absent(&checks, "position", by_table && a->position, "cos and sin are those of the tokens already");
    if (axes < 0 || axes > 8) lk_reject(&checks, LK_ERR_VALUE, "axes is %d; it must be 0 to 8", axes);
    if (step < 0 || step > 2) lk_reject(&checks, LK_ERR_VALUE, "table_step is %d; it must be 0, 1 or 2", step);
    lk_check_enum(&checks, "position_dtype", a->position_dtype, 1, "0 (int64) and 1 (int32)");
    lk_check_dtype<T>(&checks, "table_dtype", a->table_dtype), lk_check_dtype<T>(&checks, "weight_dtype", a->weight_dtype);
    lk_check_number(&checks, "scale", (double)a->scale, isfinite(a->scale), "finite");
    lk_check_number(&checks, "eps", (double)a->eps, isfinite(a->eps) && a->eps >= 0.0f, "finite and at least 0");
    lk_check_number(&checks, "weight_offset", (double)a->weight_offset, isfinite(a->weight_offset), "finite");
    lk_check_absent(&checks, "dq_weight", given[0] && !a->q_weight, "q_weight is NULL");
    lk_check_absent(&checks, "dk_weight", given[1] && !a->k_weight, "k_weight is NULL");
    if (checks.status) return checks.status;
    a->table_dtype = a->table_dtype == LK_DTYPE_T ? lk_dtype<T> : a->table_dtype;
    a->weight_dtype = a->weight_dtype == LK_DTYPE_T ? lk_dtype<T> : a->weight_dtype;
    call->small = rows < INT32_MAX;
    *vector = a->dim % LK_VEC<T> == 0 && (a->interleaved ? a->rotary % (2 * LK_VEC<T>) : pairs % LK_VEC<T>) == 0;
    for (int i = 0; i < count; i++) /* those of T with three dimensions are q, k and their gradients */
        for (int d = 0; d < 3 && list[i].dim[2].stride && list[i].pointer; d++) {
            *vector = *vector && *list[i].dim[d].stride % LK_VEC<T> == 0 && (uintptr_t)list[i].pointer % 16 == 0;
            call->small = call->small && lk_count(list[i].dim[d].size, *list[i].dim[d].stride) < INT32_MAX / 3;
        }
    if (!query) lk_check_workspace(&checks, a->workspace, a->workspace_bytes, (size_t)list[count - 1].width);
    lk_check_end(&checks, list, count);
    lk_check_warn(&checks, rows == 0, "there are no tokens; nothing is computed");
    return checks.status;
}
#undef LK_ROPE_TENSOR
#undef LK_ROPE_TABLE

template <class T>
LK_HOST lk_status lk_rope_query(const char *op, const lk_rope_args *args, lk_direction direction, size_t *bytes)
{
    lk_rope_call call = {};
    lk_device device = {};
    bool vector = false;
    call.a = *args;
    lk_status status = lk_rope_check<T>(op, &call, direction == LK_BACKWARD, NULL, &vector);
    if (!status && (call.a.dq_weight || call.a.dk_weight)) status = lk_asked_device(op, lk_current_device(&device));
    if (!status && bytes) *bytes = lk_rope_lay_out(&call, device.sms);
    return status;
}

/* What a side of the kernels gets of the arguments. */
#define LK_ROPE_SIDE(i, x_name, in_name, out_name)                                                                             \
    call->side[i].x = a.x_name, call->side[i].in = a.in_name, call->side[i].out = a.out_name;                                  \
    call->side[i].weight = a.x_name##_weight, call->side[i].rstd = a.x_name##_weight ? a.x_name##_rstd : NULL;                 \
    memcpy(call->side[i].x_stride, a.x_name##_stride, sizeof a.x_name##_stride);                                               \
    memcpy(call->side[i].in_stride, a.in_name##_stride, sizeof a.in_name##_stride);                                            \
    memcpy(call->side[i].out_stride, a.out_name##_stride, sizeof a.out_name##_stride)

template <class T, int Num, bool backward>
LK_HOST lk_status lk_rope_launch(const char *op, const lk_device *device, lk_rope_call *call, cudaStream_t stream)
{
    const lk_rope_args &a = call->a;
    const bool norm = a.q_weight || a.k_weight, turns = a.interleaved;
    const int64_t runs = (int64_t)call->side[0].runs + call->side[1].runs;
    call->pairs = (int)(a.rotary / 2), call->paired = call->pairs / Num;
    call->groups = call->paired + (int)lk_ceil_div(a.dim - a.rotary, 2 * Num);
    call->lanes = call->groups >= 32 ? 32 : norm ? 1 << lk_log2(call->groups) : call->groups;
    call->teams = LK_ROPE_THREADS / call->lanes, call->sign = backward ? -1.0f : 1.0f;
    call->inverse_dim = 1.0f / (float)a.dim;
    if (call->rows == 0 || runs == 0) return LK_OK;
    const int64_t own = norm ? LK_ROPE_PAIRS<Num, true> : LK_ROPE_PAIRS<Num, false>; /* pairs that a token can have at a time */
    /* blocks: that run at once, without a norm; with one 2 or 3 on an SM do, and these tokens were timed */
    const int64_t most = LK_ROPE_TOKENS * own / (call->pairs < own ? call->pairs : own), blocks = 4 * (int64_t)device->sms;
    if constexpr (backward) {
        LK_ROPE_SIDE(0, q, dq_out, dq);
        LK_ROPE_SIDE(1, k, dk_out, dk);
        for (int i = 0; i < 2 && norm; i++)
            call->side[i].tokens = lk_rope_tokens(call->rows, call->side[i].runs, call->teams, most, call->side[i].blocks, true);
        if (norm)
            return lk_launch_pdl(
                op, device, turns ? lk_rope_norm_backward_kernel<T, Num, Num != 1> : lk_rope_norm_backward_kernel<T, Num, false>,
                call->side[0].blocks + call->side[1].blocks, 1, LK_ROPE_THREADS, 0, stream, *call);
    } else {
        LK_ROPE_SIDE(0, q, q, q_out);
        LK_ROPE_SIDE(1, k, k, k_out);
    }
    void (*kernel)(lk_rope_call) = turns ? lk_rope_kernel<T, Num, false, Num != 1> : lk_rope_kernel<T, Num, false, false>;
    if constexpr (!backward)
        if (norm) kernel = turns ? lk_rope_kernel<T, Num, true, Num != 1> : lk_rope_kernel<T, Num, true, false>;
    call->tokens = lk_rope_tokens(call->rows, runs, call->teams, most, blocks, false);
    return lk_launch_pdl(op, device, kernel, lk_ceil_div(call->rows, call->tokens), 1, LK_ROPE_THREADS, 0, stream, *call);
}
#undef LK_ROPE_SIDE

template <class T, lk_direction direction>
LK_HOST lk_status lk_rope_run(const char *op, const lk_rope_args *args, cudaStream_t stream)
{
    constexpr bool backward = direction == LK_BACKWARD;
    lk_rope_call call = {};
    lk_device device = {};
    bool vector = false;
    call.a = *args;
    lk_status status = lk_rope_check<T>(op, &call, backward, &device, &vector);
    if (status) return status;
    status = vector ? lk_rope_launch<T, LK_VEC<T>, backward>(op, &device, &call, stream)
                    : lk_rope_launch<T, 1, backward>(op, &device, &call, stream);
    if (status || !backward || !(call.a.dq_weight || call.a.dk_weight)) return status;
    return lk_launch_pdl(op, &device, lk_rope_dweight_kernel<T>, lk_ceil_div(2 * call.a.dim, LK_ROPE_THREADS / 32), 1,
                         LK_ROPE_THREADS, 0, stream, call);
}

#endif /* CUDA or the simulator */
#endif
