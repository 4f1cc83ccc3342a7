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
 * The kernels, in the order of the file. A team of up to 32 lanes has some heads of a token, LK_ROPE_HEADS at most, and computes or
 * reads their angles once.
 *   lk_rope_kernel                forward, and backward without a norm, which turns the other way
 *   lk_rope_norm_backward_kernel  backward with a norm; teams walk over tokens, and blocks keep sums for the weights' gradients
 *   lk_rope_dweight_kernel        adds these sums
 * For example 8192 tokens of 32 + 8 heads of 128 in bf16: 8 lanes have a head, 16 bytes of both halves each; 4 heads of a token are
 * a team's, so 81,920 teams, 2,560 blocks of 256 threads. The checks of arguments, the workspace and the calls come last.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_ROPE_CUH
#define LK_ROPE_CUH

/* One struct for both calls: a training step fills it once. F: forward, B: backward; no letter: both. A call ignores the fields
 * of the other one. Backward without a norm ignores q, k and their strides too. */
typedef struct {
    const void *q;           /* F B in    T [batch, tokens, q_heads, dim] */
    const void *k;           /* F B in    T [batch, tokens, k_heads, dim]; NULL, and k_heads 0: there is none */
    void *q_out;             /* F out     T, as q; may be q */
    void *k_out;             /* F out     T, as k; may be k */
    const void *dq_out;      /* B in      T, as q: the upstream gradient */
    const void *dk_out;      /* B in      T, as k */
    void *dq;                /* B out     T, as q; may be dq_out, with a norm q too */
    void *dk;                /* B out     T, as k; may be dk_out, with a norm k too */
    const void *position;    /* F B in    position_dtype [axes, batch, tokens] packed; NULL: offset, offset + 1, ... */
    const float *inv_freq;   /* F B in    f32 [rotary / 2], radians per position; NULL: cos and sin are given */
    const int32_t *pair_axis; /* F B in   int32 [rotary / 2], each 0 to axes - 1; lk cannot check it; NULL, with one axis: 0 */
    const void *cos;         /* F B in    table_dtype [batch, tokens, rotary / 2]; NULL: inv_freq is given */
    const void *sin;         /* F B in    table_dtype, as cos */
    const void *q_weight;    /* F B in    weight_dtype [dim]: q has a norm; NULL: it has none */
    const void *k_weight;    /* F B in    weight_dtype [dim]: k has a norm; NULL: it has none */
    float *q_rstd;           /* F out, B in  f32 [batch, tokens, q_heads] packed; NULL: skip in F, computed again in B */
    float *k_rstd;           /* F out, B in  f32 [batch, tokens, k_heads] packed; NULL: as q_rstd */
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
    int64_t table_stride[2]; /* of cos and sin, between batches and between tokens; 0 means packed: rotary / 2 * table_step between
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
 *   LK_ERR_NULL       forward: q, k; backward: dq_out, dk_out, and q or k where it has a norm; pair_axis with axes above 1; all
 *                     outputs are NULL
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
#define LK_ROPE_NORM_DIM 256 /* the most of a head with a norm */

/* Heads of a token that a team has at a time, their loads all in flight. Back: with a norm. Chosen by registers, with no card at
 * hand: two blocks of 256 threads fit on an SM. */
template <bool Norm, bool Back> constexpr int LK_ROPE_HEADS = Back ? 1 : Norm ? 2 : 4;

/* Groups of Num pairs that a lane has at a time. With a norm a team has a head at once: 32 lanes, LK_ROPE_NORM_DIM / 2 pairs. */
template <int Num, bool Norm> constexpr int LK_ROPE_GROUPS = Norm && Num == 1 ? LK_ROPE_NORM_DIM / 64 : 1;

/* q or k. in: q, or in backward dq_out; x: q in backward with a norm. Strides: of batch, token, head. */
typedef struct {
    const void *in, *x, *weight;
    void *out;
    float *rstd, *partial;          /* partial: [blocks, dim], sums for the weight's gradient; NULL: it is not wanted */
    int64_t heads, splits, items;   /* splits: of the heads of a token; items: tokens times splits */
    int64_t blocks;                 /* with a norm, in backward */
    int64_t in_stride[3], x_stride[3], out_stride[3];
} lk_rope_side;

typedef struct {
    lk_rope_side side[2];
    lk_rope_args a;            /* with defaults filled in */
    int lanes_log2;            /* of a team */
    int pairs, groups, paired; /* pairs: rotary / 2. groups: of Num pairs, of the whole head; the first `paired` have angles */
    float sign;                /* -1: the other way */
    bool small;                /* items and tokens are below 2^31 */
} lk_rope_call;

/* ---- Where things are ---------------------------------------------------------------------------------------------------- */

/* A group's two vectors of Num features each; features behind the pairs are in groups too. second < 0: there is none. */
typedef struct {
    int first, second;
} lk_rope_place;

template <int Num> LK_DEVICE lk_rope_place lk_rope_place_of(const lk_rope_call &call, int group)
{
    if (group < call.paired) {
        if (call.a.interleaved) return {2 * Num * group, 2 * Num * group + Num};
        return {Num * group, call.pairs + Num * group};
    }
    const int first = 2 * call.pairs + 2 * Num * (group - call.paired), second = first + Num;
    return {first, second < (int)call.a.dim ? second : -1};
}

/* An item: some heads of a token. */
typedef struct {
    int64_t batch, token, head; /* head: the first one */
    bool there;
} lk_rope_item;

LK_DEVICE lk_rope_item lk_rope_item_of(const lk_rope_call &call, const lk_rope_side &side, int64_t item, int heads)
{
    lk_rope_item at = {0, 0, 0, item < side.items};
    if (!at.there) return at;
    if (call.small) {
        const uint32_t row = (uint32_t)item / (uint32_t)side.splits, batch = row / (uint32_t)call.a.tokens;
        at.head = (int64_t)((uint32_t)item - row * (uint32_t)side.splits) * heads;
        at.batch = batch, at.token = row - batch * (uint32_t)call.a.tokens;
    } else {
        const int64_t row = item / side.splits;
        at.head = (item - row * side.splits) * heads;
        at.batch = row / call.a.tokens, at.token = row - at.batch * call.a.tokens;
    }
    return at;
}

LK_DEVICE int64_t lk_rope_offset(const int64_t (&stride)[3], const lk_rope_item &at)
{
    return at.batch * stride[0] + at.token * stride[1] + at.head * stride[2];
}

/* ---- Angles -------------------------------------------------------------------------------------------------------------- */

/* Num elements of a table from `at` on, every step-th. */
template <int Num> LK_DEVICE void lk_rope_table(float (&x)[Num], const void *table, int dtype, int64_t at, int step)
{
    if constexpr (Num == 4 || Num == 8) {
        const float *const from = (const float *)table + at;
        if (dtype == LK_DTYPE_F32 && step == 1 && (uintptr_t)from % 16 == 0) {
            LK_UNROLL for (int i = 0; i < Num; i += 4) {
                const uint4 v = __ldca((const uint4 *)(from + i));
                x[i] = __uint_as_float(v.x), x[i + 1] = __uint_as_float(v.y);
                x[i + 2] = __uint_as_float(v.z), x[i + 3] = __uint_as_float(v.w);
            }
            return;
        }
    }
    LK_UNROLL for (int j = 0; j < Num; j++) x[j] = lk_get_as(table, dtype, at + (int64_t)j * step);
}

/* C and S of the pairs of a group at a token, S with the sign of the direction. */
template <int Num>
LK_DEVICE void lk_rope_angles(float (&c)[Num], float (&s)[Num], const lk_rope_call &call, const lk_rope_item &at, int group)
{
    const lk_rope_args &a = call.a;
    const int pair = group * Num;
    LK_UNROLL for (int j = 0; j < Num; j++) c[j] = 1.0f, s[j] = 0.0f;
    if (group >= call.paired || !at.there) return;
    if (a.cos) {
        const int64_t from = (a.shared_positions ? 0 : at.batch * a.table_stride[0]) + at.token * a.table_stride[1] +
                             (int64_t)pair * a.table_step;
        lk_rope_table(c, a.cos, a.table_dtype, from, a.table_step);
        lk_rope_table(s, a.sin, a.table_dtype, from, a.table_step);
        LK_UNROLL for (int j = 0; j < Num; j++) c[j] *= a.scale, s[j] *= call.sign * a.scale;
        return;
    }
    const int64_t row = (a.shared_positions ? 0 : at.batch * a.tokens) + at.token;
    const int64_t next_axis = a.shared_positions ? a.tokens : a.batch * a.tokens;
    int axis = -1, position = (int)(a.offset + at.token);
    LK_UNROLL for (int j = 0; j < Num; j++) {
        const int wanted = a.pair_axis ? a.pair_axis[pair + j] : 0;
        if (a.position && wanted != axis) { /* neighbours mostly have one axis */
            const int64_t i = row + wanted * next_axis;
            position = a.position_dtype ? ((const int32_t *)a.position)[i] : (int)((const int64_t *)a.position)[i];
            axis = wanted;
        }
        const float theta = a.inv_freq[pair + j], phi = (float)(int)lk_phase(lk_make_turn(__float_as_uint(theta)), position) *
                                                        LK_PHASE_UNIT;
        const float size = lk_is_finite(theta) ? a.scale : NAN;
        c[j] = size * lk_cos(phi), s[j] = call.sign * size * lk_sin(phi);
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

/* A group's features in pairs, (a[j], b[j]); lk_rope_store puts them back in order. */
template <int Num, class T>
LK_DEVICE void lk_rope_unpack(float (&a)[Num], float (&b)[Num], const lk_rope_raw<T> &raw, bool interleaved)
{
    lk_unpack_n(a, raw.first), lk_unpack_n(b, raw.second);
    if (interleaved) lk_to_pairs(a, b);
}
template <int Num, class T>
LK_DEVICE void lk_rope_store(T *head, lk_rope_place at, float (&a)[Num], float (&b)[Num], bool interleaved)
{
    if (interleaved) lk_from_pairs(a, b);
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

/* weight_offset + weight of a group's features, in pairs; 1 where there is no norm. */
template <class T, int Num>
LK_DEVICE void lk_rope_weights(float (&a)[Num], float (&b)[Num], const lk_rope_call &call, const void *weight, lk_rope_place at)
{
    const int dtype = call.a.weight_dtype;
    LK_UNROLL for (int j = 0; j < Num; j++) {
        a[j] = weight ? call.a.weight_offset + lk_get_as(weight, dtype, at.first + j) : 1.0f;
        b[j] = weight && at.second >= 0 ? call.a.weight_offset + lk_get_as(weight, dtype, at.second + j) : 1.0f;
    }
    if (call.a.interleaved) lk_to_pairs(a, b);
}

/* ---- Forward, and backward without a norm -------------------------------------------------------------------------------- */

/* A team owns an item of q, or behind them of k. */
template <class T, int Num, bool Norm>
LK_KERNEL void __launch_bounds__(LK_ROPE_THREADS, 2) lk_rope_kernel(const __grid_constant__ lk_rope_call call)
{
    constexpr int Heads = LK_ROPE_HEADS<Norm, false>, Groups = LK_ROPE_GROUPS<Num, Norm>;
    const int64_t thread = (int64_t)blockIdx.x * LK_ROPE_THREADS + threadIdx.x, team = thread >> call.lanes_log2;
    const int lanes = 1 << call.lanes_log2, lane = (int)thread & (lanes - 1);
    const bool is_k = team >= call.side[0].items, interleaved = call.a.interleaved;
    const lk_rope_side &side = call.side[is_k];
    const lk_rope_item at = lk_rope_item_of(call, side, team - (is_k ? call.side[0].items : 0), Heads);
    const int64_t left = at.there ? side.heads - at.head : 0;
    const T *const in = (const T *)side.in + lk_rope_offset(side.in_stride, at);
    T *const out = (T *)side.out + lk_rope_offset(side.out_stride, at);
    lk_griddepcontrol_wait();
    for (int first = lane; first - lane < call.groups; first += Groups * lanes) { /* with a norm once */
        lk_rope_raw<T> raw[Groups][Heads] = {};
        float c[Groups][Num], s[Groups][Num], rstd[Heads];
        LK_UNROLL for (int i = 0; i < Groups; i++) {
            const int group = first + i * lanes;
            const lk_rope_place place = lk_rope_place_of<Num>(call, group);
            LK_UNROLL for (int h = 0; h < Heads; h++)
                if (h < left && group < call.groups) raw[i][h] = lk_rope_load<Num>(in + h * side.in_stride[2], place);
        }
        LK_UNROLL for (int i = 0; i < Groups; i++) lk_rope_angles(c[i], s[i], call, at, first + i * lanes);
        if constexpr (Norm) {
            LK_UNROLL for (int h = 0; h < Heads; h++) {
                float sum = 0.0f;
                LK_UNROLL for (int i = 0; i < Groups; i++) {
                    float a[Num], b[Num];
                    lk_rope_unpack(a, b, raw[i][h], false);
                    LK_UNROLL for (int j = 0; j < Num; j++) sum = fmaf(a[j], a[j], fmaf(b[j], b[j], sum));
                }
                sum = lk_sum_warp(sum, lanes);
                rstd[h] = side.weight ? lk_rsqrt(__fdiv_rn(sum, (float)call.a.dim) + call.a.eps) : 1.0f;
                if (side.rstd && h < left && lane == 0)
                    side.rstd[(at.batch * call.a.tokens + at.token) * side.heads + at.head + h] = rstd[h];
            }
        }
        LK_UNROLL for (int i = 0; i < Groups; i++) {
            const int group = first + i * lanes;
            if (group >= call.groups) break;
            const lk_rope_place place = lk_rope_place_of<Num>(call, group);
            float w_a[Num], w_b[Num];
            if constexpr (Norm) lk_rope_weights<T>(w_a, w_b, call, side.weight, place);
            LK_UNROLL for (int h = 0; h < Heads; h++) {
                float a[Num], b[Num];
                if (h >= left) break;
                lk_rope_unpack(a, b, raw[i][h], interleaved);
                if constexpr (Norm) {
                    LK_UNROLL for (int j = 0; j < Num; j++) a[j] *= rstd[h] * w_a[j], b[j] *= rstd[h] * w_b[j];
                }
                lk_rope_turn(a, b, c[i], s[i]);
                lk_rope_store(out + h * side.out_stride[2], place, a, b, interleaved);
            }
        }
    }
    lk_griddepcontrol_launch_dependents();
}

/* ---- Backward with a norm ------------------------------------------------------------------------------------------------ */

/* The first blocks are q's, the others k's. A team owns every so many-th item of its side, and keeps sums of dx z rstd. */
template <class T, int Num>
LK_KERNEL void __launch_bounds__(LK_ROPE_THREADS) lk_rope_norm_backward_kernel(const __grid_constant__ lk_rope_call call)
{
    constexpr int Heads = LK_ROPE_HEADS<true, true>, Groups = LK_ROPE_GROUPS<Num, true>;
    LK_SHARED(float, sums, [2 * Num * Groups * LK_ROPE_THREADS]);
    const bool is_k = blockIdx.x >= call.side[0].blocks, interleaved = call.a.interleaved;
    const lk_rope_side &side = call.side[is_k];
    const int64_t block = blockIdx.x - (is_k ? call.side[0].blocks : 0);
    const int lanes_log2 = call.lanes_log2, lanes = 1 << lanes_log2, lane = (int)threadIdx.x & (lanes - 1);
    const int teams = LK_ROPE_THREADS >> lanes_log2, team = (int)threadIdx.x >> lanes_log2;
    const float each = __fdiv_rn(1.0f, (float)call.a.dim);
    float dw_a[Groups][Num] = {}, dw_b[Groups][Num] = {}, w_a[Groups][Num], w_b[Groups][Num];
    lk_rope_place place[Groups];
    lk_griddepcontrol_wait();
    LK_UNROLL for (int i = 0; i < Groups; i++) {
        place[i] = lk_rope_place_of<Num>(call, lane + i * lanes);
        LK_UNROLL for (int j = 0; j < Num; j++) w_a[i][j] = w_b[i][j] = 1.0f;
        if (lane + i * lanes < call.groups) lk_rope_weights<T>(w_a[i], w_b[i], call, side.weight, place[i]);
    }
    for (int64_t begin = block * teams; begin < side.items; begin += side.blocks * teams) {
        const lk_rope_item at = lk_rope_item_of(call, side, begin + team, Heads);
        const int64_t left = at.there ? side.heads - at.head : 0;
        const T *const in = (const T *)side.in + lk_rope_offset(side.in_stride, at);
        const T *const x = (const T *)side.x + lk_rope_offset(side.x_stride, at);
        T *const out = (T *)side.out + lk_rope_offset(side.out_stride, at);
        lk_rope_raw<T> raw[Groups][Heads] = {}, raw_x[Groups][Heads] = {};
        float c[Groups][Num], s[Groups][Num];
        LK_UNROLL for (int i = 0; i < Groups; i++)
            LK_UNROLL for (int h = 0; h < Heads; h++)
                if (h < left && lane + i * lanes < call.groups) {
                    raw[i][h] = lk_rope_load<Num>(in + h * side.in_stride[2], place[i]);
                    if (side.weight) raw_x[i][h] = lk_rope_load<Num>(x + h * side.x_stride[2], place[i]);
                }
        LK_UNROLL for (int i = 0; i < Groups; i++) lk_rope_angles(c[i], s[i], call, at, lane + i * lanes);
        LK_UNROLL for (int h = 0; h < Heads; h++) {
            float square = 0.0f, dot = 0.0f, rstd = 1.0f;
            LK_UNROLL for (int i = 0; i < Groups; i++) { /* of z^2, and of g z */
                float a[Num], b[Num], z_a[Num], z_b[Num];
                lk_rope_unpack(a, b, raw[i][h], interleaved), lk_rope_unpack(z_a, z_b, raw_x[i][h], interleaved);
                lk_rope_turn(a, b, c[i], s[i]);
                LK_UNROLL for (int j = 0; j < Num; j++) {
                    square = fmaf(z_a[j], z_a[j], fmaf(z_b[j], z_b[j], square));
                    dot = fmaf(a[j] * w_a[i][j], z_a[j], fmaf(b[j] * w_b[i][j], z_b[j], dot));
                }
            }
            dot = lk_sum_warp(dot, lanes);
            const int64_t row = (at.batch * call.a.tokens + at.token) * side.heads + at.head + h;
            if (side.weight && side.rstd) rstd = h < left ? side.rstd[row] : 1.0f;
            else if (side.weight) rstd = lk_rsqrt(fmaf(lk_sum_warp(square, lanes), each, call.a.eps));
            if (h >= left) continue; /* lanes without a head took part in the sums */
            const float factor = side.weight ? rstd * rstd * (dot * each) : 0.0f;
            LK_UNROLL for (int i = 0; i < Groups; i++) {
                float a[Num], b[Num], z_a[Num], z_b[Num];
                if (lane + i * lanes >= call.groups) break;
                lk_rope_unpack(a, b, raw[i][h], interleaved), lk_rope_unpack(z_a, z_b, raw_x[i][h], interleaved);
                lk_rope_turn(a, b, c[i], s[i]);
                LK_UNROLL for (int j = 0; j < Num; j++) {
                    dw_a[i][j] = fmaf(a[j], z_a[j] * rstd, dw_a[i][j]), dw_b[i][j] = fmaf(b[j], z_b[j] * rstd, dw_b[i][j]);
                    a[j] = rstd * fmaf(-z_a[j], factor, a[j] * w_a[i][j]),
                    b[j] = rstd * fmaf(-z_b[j], factor, b[j] * w_b[i][j]);
                }
                if (side.out) lk_rope_store(out + h * side.out_stride[2], place[i], a, b, interleaved);
            }
        }
    }
    lk_griddepcontrol_launch_dependents();
    if (!side.partial) return; /* the same in all threads of a block */
    LK_UNROLL for (int i = 0; i < Groups; i++) {
        float a[Num], b[Num];
        LK_UNROLL for (int j = 0; j < Num; j++) a[j] = dw_a[i][j], b[j] = dw_b[i][j];
        if (interleaved) lk_from_pairs(a, b);
        if (lane + i * lanes >= call.groups) break;
        LK_UNROLL for (int j = 0; j < Num; j++) {
            sums[team * (int)call.a.dim + place[i].first + j] = a[j];
            if (place[i].second >= 0) sums[team * (int)call.a.dim + place[i].second + j] = b[j];
        }
    }
    __syncthreads(); /* all teams have written their sums */
    for (int f = (int)threadIdx.x; f < (int)call.a.dim; f += LK_ROPE_THREADS) {
        float sum = 0.0f;
        for (int t = 0; t < teams; t++) sum += sums[t * (int)call.a.dim + f];
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

/* What backward with a norm has, by numbers of SMs and items alone, so that its workspace does not depend on where tensors lie: two
 * blocks for each SM, q's and k's shares of them as their items are. Lays out their sums; returns the bytes. */
LK_HOST size_t lk_rope_lay_out(lk_rope_call *call, int sms)
{
    const lk_rope_args &a = call->a;
    const int64_t most = 2 * (int64_t)sms, all = call->side[0].items + call->side[1].items;
    lk_arena arena = {(uintptr_t)a.workspace, 0, 256};
    for (int i = 0; i < 2; i++) {
        lk_rope_side *const side = &call->side[i];
        const int64_t share = all ? (int64_t)((double)side->items / (double)all * (double)most + 0.5) : 0;
        side->blocks = share < 1 ? 1 : share;
        if (side->blocks > side->items) side->blocks = side->items;
        lk_take(&side->partial, &arena, i ? a.dk_weight != NULL : a.dq_weight != NULL, lk_count(side->blocks, a.dim));
    }
    return arena.used;
}

/* Heads, splits and items of both sides; a side without an output has none. */
LK_HOST void lk_rope_split(lk_rope_call *call, bool backward)
{
    const lk_rope_args &a = call->a;
    const bool norm = a.q_weight || a.k_weight;
    const int heads = !norm ? LK_ROPE_HEADS<false, false> : backward ? LK_ROPE_HEADS<true, true> : LK_ROPE_HEADS<true, false>;
    const bool wanted[] = {backward ? a.dq || a.dq_weight : a.q_out != NULL, backward ? a.dk || a.dk_weight : a.k_out != NULL};
    for (int i = 0; i < 2; i++) {
        lk_rope_side *const side = &call->side[i];
        side->heads = i ? a.k_heads : a.q_heads, side->splits = lk_ceil_div(side->heads, heads);
        side->items = wanted[i] ? lk_count(lk_count(a.batch, a.tokens), side->splits) : 0;
    }
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
    lk_check_size(&checks, "q_heads", a->q_heads, 0, (int64_t)1 << 30);
    lk_check_size(&checks, "k_heads", a->k_heads, 0, (int64_t)1 << 30);
    lk_check_size(&checks, "dim", a->dim, 1, norm ? LK_ROPE_NORM_DIM : 1 << 20);
    if (a->rotary < 0 || a->rotary > a->dim || a->rotary % 2)
        lk_reject(&checks, LK_ERR_SHAPE, "rotary is %lld; it must be even, and at most dim, which is %lld",
                  (long long)a->rotary, (long long)a->dim);
    lk_check_shapes(&checks, list, count, query);
    if (!checks.status) {
        lk_rope_split(call, backward);
        list[count - 1].width = query ? 0 : (int64_t)lk_rope_lay_out(call, device->sms);
        if (!query) lk_check_overlap(&checks, list, count); /* once more, with the workspace */
    }
    const bool far = a->offset <= INT32_MIN || a->offset > INT32_MAX || a->tokens > INT32_MAX - a->offset;
    lk_check_number(&checks, "offset", (double)a->offset, by_table || a->position || !far,
                    "such that all positions are in (-2^31, 2^31)");
    if (!a->cos != !a->sin)
        lk_reject(&checks, LK_ERR_VALUE, "%s is NULL, and %s is given; they go together", a->cos ? "sin" : "cos", a->cos ? "cos" : "sin");
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
    *vector = a->dim % LK_VEC<T> == 0 && (a->interleaved ? a->rotary % (2 * LK_VEC<T>) : pairs % LK_VEC<T>) == 0;
    for (int i = 0; i < count; i++) /* those of T with three dimensions are q, k and their gradients */
        for (int d = 0; d < 3 && list[i].dim[2].stride && list[i].pointer; d++)
            *vector = *vector && *list[i].dim[d].stride % LK_VEC<T> == 0 && (uintptr_t)list[i].pointer % 16 == 0;
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
    const bool norm = a.q_weight || a.k_weight;
    const int64_t items = call->side[0].items + call->side[1].items;
    call->pairs = (int)(a.rotary / 2), call->paired = call->pairs / Num;
    call->groups = call->paired + (int)lk_ceil_div(a.dim - a.rotary, 2 * Num);
    call->lanes_log2 = call->groups < 32 ? lk_log2(call->groups) : 5;
    call->sign = backward ? -1.0f : 1.0f, call->small = items < INT32_MAX && lk_count(a.batch, a.tokens) < INT32_MAX;
    if (items == 0) return LK_OK;
    if constexpr (backward) {
        LK_ROPE_SIDE(0, q, dq_out, dq);
        LK_ROPE_SIDE(1, k, dk_out, dk);
        if (norm)
            return lk_launch_pdl(op, device, lk_rope_norm_backward_kernel<T, Num>, call->side[0].blocks + call->side[1].blocks,
                                 1, LK_ROPE_THREADS, 0, stream, *call);
    } else {
        LK_ROPE_SIDE(0, q, q, q_out);
        LK_ROPE_SIDE(1, k, k, k_out);
    }
    void (*kernel)(lk_rope_call) = lk_rope_kernel<T, Num, false>;
    if constexpr (!backward) kernel = norm ? lk_rope_kernel<T, Num, true> : kernel;
    const int64_t blocks = lk_ceil_div(items, LK_ROPE_THREADS >> call->lanes_log2);
    return lk_launch_pdl(op, device, kernel, blocks, 1, LK_ROPE_THREADS, 0, stream, *call);
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
