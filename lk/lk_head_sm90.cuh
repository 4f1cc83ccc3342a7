// SPDX-License-Identifier: MIT
/* lk_head_sm90.cuh - FUSED: a head whose logits stay in registers, for Hopper: what follows a tile of lk_gemm.cuh, the two products
 * of the gradients, and the steps of a chunk. Another architecture gets a file of its own.
 *
 * lk_head.cuh takes these steps by the entry `fused` of a loss's table. They are for losses of cross entropy: one target for each
 * row, which may be one of several ids, and the state and the gradient of lk_loss.cuh. A loss has functions of its own for the
 * rows' results and for ids besides the target: fused_rows, fused_backward, fused_terms and fused_panel of its table.
 *
 * Needs: lk_head.cuh, lk_gemm.cuh, lk_loss.cuh and what these need.
 */
#ifndef LK_HEAD_SM90_CUH
#define LK_HEAD_SM90_CUH

#include "lk_gemm.cuh"
#include "lk_head.cuh"
#include "lk_loss.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

static_assert(LK_HEAD_TILE_COLS == LK_GEMM_COLS && LK_HEAD_PAIR_ROWS == 2 * LK_GEMM_ROWS, "plans have lk_gemm's tiles");

/* ---- The idea: logits stay in registers ---------------------------------------------------------------------------------- */

/* Kernels of lk_gemm.cuh's tiles. forward stores nothing of the logits; with `saved` it keeps exponentials of all columns.
 * forward_backward keeps those of as many columns as there is memory for, in bf16:
 *   E[t,j] = exp(scale (logit[t,j] - reference[t]))
 * dZ is E times a factor v[t], which is known when the row's sum is. So dx = v (E weight), and dweight = E^T (v x). The logits of
 * the other columns are computed again, a panel at a time, when lse is known. The kernel then writes dZ instead of E. backward
 * without `saved` does this for all columns.
 *
 * The target's dZ is never among them. It is often the largest of its row, so its rounding would be most of the gradients'
 * error. It stays in float: lk_head_products_kernel adds it times a row of weight to dx, lk_head_targets_kernel adds it times a
 * row of x to dweight.
 *
 * A row has one reference, guessed before its logits are known: from a few columns, whose maximum and mean say how large the
 * maximum of all columns may be. bf16 has float's range, so the guess serves every tile whose largest exponential is between
 * 2^-90 and 2^40. Any other tile takes its own maximum as its reference for that row. `references` has all. The factor kernel
 * rescales the tiles whose reference is not the row's largest. */

/* Pairs of row tiles that walk the vocabulary together: few enough for their x, 24 MiB at hidden 4096, to stay in L2. */
#define LK_HEAD_GROUP 12

/* What lk_head_fused_kernel computes from a tile: the rows' states; exponentials too; dZ by a known lse. */
enum { LK_HEAD_STATES, LK_HEAD_KEEP, LK_HEAD_DZ };

template <class Call> struct lk_head_fused {
    CUtensorMap x, weight;
    lk_head_work<Call> chunk;    /* the chunk; all columns, or for dZ those of a panel */
    lk_head_sums *sums;    /* [chunk, stretches] */
    int sampled;          /* columns of the sample */
    float ahead;          /* (largest of vocab columns - mean) / (largest of the sample - mean) - 1, expected */
    int pairs, tiles;     /* of 256 rows, of 256 columns */
    int in_dweight, kept; /* tiles that are written: the first `in_dweight` to ws.dweight_parts, up to `kept` to ws.logits */
    int stretch_tiles, stretches; /* a cluster keeps its rows' states over a stretch of tiles */
    int items;            /* pairs times stretches */
    int steps;            /* of hidden */
    int few;              /* not 0: up to 128 rows, and each block of a cluster has stretches of its own */
};

/* What a value is multiplied by in the exponent. With a softcap the value is z itself, else it is the logit. */
template <class Args> LK_DEVICE float lk_head_scale(const Args &a)
{
    return a.softcap > 0.0f ? 1.0f : a.logit_scale;
}

/* What lk_ce_dz and lk_ce_target_dz need of a row. lk_ce_dz multiplies p_factor by an e of each column. At first p_factor is for
 * e = p, and rate and base are not set: lk_head_by_lse sets them. p_factor is NaN where lse is not finite. */
typedef struct {
    lk_ce_gradient g;
    float f_rest, f_lse, w_term;
} lk_head_terms;

template <class Call>
LK_DEVICE lk_head_terms lk_head_terms_of(const lk_head_work<Call> &p, int64_t row, int y, float lse, float lse_low, float entropy)
{
    const typename Call::args &a = p.call.a;
    const lk_head_workspace &ws = p.ws;
    lk_head_terms t = {};
    if (y < 0) return t;
    lk_ce_upstream up = {};
    up.f = up.h = ws.factor[row], up.weight = ws.weight ? ws.weight[row] : 1.0f, up.dlse = ws.dlse ? ws.dlse[row] : 0.0f;
    lk_ce_target_term term;
    const float share = a.label_smoothing > 0.0f ? __fdiv_rn(a.label_smoothing, (float)p.call.classes) : 0.0f;
    t.g = lk_ce_factors(a, share, up, lse, ws.counts->weights, &term);
    t.f_rest = term.f_rest, t.f_lse = term.f_lse, t.w_term = term.w_term;
    if (!lk_is_finite(lse)) t.g.p_factor = NAN;
    if (ws.dentropy)
        lk_ce_entropy_factors(&t.g, -a.logit_scale * ws.dentropy[row], lse, lse_low, entropy, lk_head_scale(a));
    return t;
}

/* What the lse of a row was rounded by, as far as that is known. */
template <class Call> LK_DEVICE float lk_head_lse_low(const lk_head_work<Call> &p, int64_t row)
{
    return p.ws.lse_low ? p.ws.lse_low[row] : 0.0f;
}

/* lk_head_terms_of for a row whose lse and entropy the workspace has. */
template <class Call> LK_DEVICE lk_head_terms lk_head_terms_at(const lk_head_work<Call> &p, int64_t row, int y)
{
    return lk_head_terms_of(p, row, y, p.ws.lse[row], lk_head_lse_low(p, row), p.ws.dentropy ? p.ws.entropy[row] : 0.0f);
}

/* From here on e is 2^(rate v - base), of a column's value v. Returns p_scale: p = p_scale e. It holds what base and lse lose by
 * rounding, and is multiplied into the factors. */
template <class Call> LK_DEVICE float lk_head_by_lse(const lk_head_work<Call> &p, int64_t row, lk_head_terms *t)
{
    const float p_scale = lk_ce_p_scale(p.ws.lse[row], lk_head_lse_low(p, row), lk_head_scale(p.call.a), &t->g.rate, &t->g.base);
    t->g.p_factor *= p_scale, t->g.entropy_factor *= p_scale;
    return p_scale;
}

/* The target's dZ, by its p and its v. */
template <class Args>
LK_DEVICE float lk_head_target_dz(const Args &a, const lk_head_terms &t, float p, float v, float others, float slope)
{
    return lk_ce_target_dz(t.f_lse, t.f_rest, t.w_term, p, others, lk_ce_entropy_term(t.g, p, v, lk_head_scale(a)), slope);
}

/* Columns counted from that of the thread's first sum: left, up to the row's end; target, the target's. */
typedef struct {
    int left, target;
} lk_head_window;

/* Whether the thread's i-th sum of the row counts: its column exists and is not the target's. */
LK_DEVICE bool lk_head_within(lk_head_window w, int i)
{
    const int c = i / 2 * 8 + i % 2;
    return c < w.left && c != w.target;
}

/* Sets the sums that do not count to value. */
LK_DEVICE void lk_head_mask(float (&v)[LK_GEMM_SUMS / 2], lk_head_window w, float value)
{
    LK_UNROLL for (int i = 0; i < LK_GEMM_SUMS / 2; i++) v[i] = lk_head_within(w, i) ? v[i] : value;
}

/* Adds the bias. The second column of a pair may be behind the last one; it does not count. */
LK_DEVICE void lk_head_add_bias(float (&z)[LK_GEMM_SUMS], const float *bias, int left)
{
    LK_UNROLL for (int i = 0; i < LK_GEMM_SUMS; i += 4) {
        const float2 two = i * 2 < left ? *(const float2 *)(bias + i * 2) : make_float2(0.0f, 0.0f);
        z[i] += two.x, z[i + 1] += two.y, z[i + 2] += two.x, z[i + 3] += two.y;
    }
}

/* Writes the target's logit, if the thread has it. */
LK_DEVICE void lk_head_find(float *logit, const float (&v)[LK_GEMM_SUMS / 2], int target_offset)
{
    float found = 0.0f;
    if (!((unsigned)target_offset < LK_GEMM_COLS && target_offset % 8 < 2)) return;
    LK_UNROLL for (int i = 0; i < LK_GEMM_SUMS / 2; i++) found = i / 2 * 8 + i % 2 == target_offset ? v[i] : found;
    *logit = found;
}

/* Adds a row's columns of a tile to its state. plain: no bias, softcap, smoothing, entropy or argmax. edge: some columns may
 * not count. */
template <bool plain, class State, class Args>
LK_DEVICE State lk_head_add_tile(State s, float (&v)[LK_GEMM_SUMS / 2], lk_head_window window, bool edge, const float *w,
                                     const Args &a)
{
    const float scale = lk_head_scale(a);
    if (!plain && a.argmax) { /* of all columns, the target's too; those behind the last are larger, so -inf there never wins */
        float most = -INFINITY;
        bool nan = false;
        LK_UNROLL for (int i = 0; i < LK_GEMM_SUMS / 2; i++) {
            if (edge && i / 2 * 8 + i % 2 >= window.left) v[i] = -INFINITY;
            most = fmaxf(most, v[i]), nan |= v[i] != v[i];
        }
        if (nan) most = NAN;
        if (lk_ce_order(most) >= (int32_t)(s.top >> 32)) { /* few tiles have a new largest logit */
            int first = 0;
            LK_UNROLL for (int i = LK_GEMM_SUMS / 2 - 1; i >= 0; i--) first = v[i] == most || v[i] != v[i] ? i : first;
            s = lk_ce_row_top(s, most, (int)a.vocab - window.left + first / 2 * 8 + first % 2);
        }
    }
    if (!plain && a.softcap > 0.0f) {
        if (edge) lk_head_mask(v, window, 0.0f);
        LK_UNROLL
        for (int i = 0; i < LK_GEMM_SUMS / 2; i += 2) { /* in pairs, here and below: more at a time would spill registers */
            float two[2] = {v[i], v[i + 1]}, slope[2];
            lk_ce_cap<false>(two, slope, a.logit_scale, a.softcap);
            v[i] = two[0], v[i + 1] = two[1];
        }
    }
    if (edge) lk_head_mask(v, window, -INFINITY);
    if (plain || (a.label_smoothing <= 0.0f && !a.entropy && !a.dentropy)) {
        const lk_lse sum = lk_lse_add({s.max, s.sum}, v, scale);
        s.max = sum.max, s.sum = sum.sum;
        return s;
    }
    if constexpr (lk_ce_has_squares<State>) {
        float total = 0.0f;
        const float unit = lk_ce_mean_unit(scale);
        LK_UNROLL for (int i = 0; i < LK_GEMM_SUMS / 2; i++) total = fmaf(lk_head_within(window, i) ? v[i] : 0.0f, unit, total);
        s.total += total;
    }
    float max = s.max, sum = 0.0f, weights = 0.0f, weighted = 0.0f, entropic = 0.0f, squares = 0.0f;
    LK_UNROLL for (int i = 0; i < LK_GEMM_SUMS / 2; i++) max = fmaxf(max, v[i]);
    s = lk_ce_row_raise(s, max, scale);
    const float reference = lk_lse_reference(max);
    LK_UNROLL for (int i = 0; i < LK_GEMM_SUMS / 2; i += 2) { /* one branch for two weights */
        float weight[2] = {lk_head_within(window, i) ? 1.0f : 0.0f, lk_head_within(window, i + 1) ? 1.0f : 0.0f};
        if (w) {
            if (weight[0] > 0.0f) weight[0] = w[i * 4];
            if (weight[1] > 0.0f) weight[1] = w[i * 4 + 1];
        }
        LK_UNROLL for (int j = 0; j < 2; j++) {
            const bool within = lk_head_within(window, i + j);
            const float d = within ? v[i + j] - reference : 0.0f, e = within ? lk_ex2(scale * LK_LOG2E * d) : 0.0f;
            sum += e;
            if (!lk_ce_has_squares<State>) /* FUSED has statistics without label_smoothing alone */
                weights += weight[j], weighted = fmaf(weight[j], d, weighted);
            entropic = fmaf(e, fmaxf(d, -FLT_MAX), entropic); /* 0 times -inf counts 0 */
            if (lk_ce_has_squares<State>) squares = fmaf(e, e, squares);
        }
    }
    s.sum += sum, s.weights += weights, s.weighted += weighted, s.entropic += entropic;
    if constexpr (lk_ce_has_squares<State>) s.squares += squares;
    return s;
}

/* A row's reference, guessed from the largest and the mean of its sample. */
template <class Call> LK_DEVICE float lk_head_guess(const lk_head_fused<Call> &p, int64_t row)
{
    const typename Call::args &a = p.chunk.call.a;
    const float *const bias = (const float *)p.chunk.ws.bias;
    float max = -INFINITY, sum = 0.0f, slope;
    for (int j = 0; j < p.sampled; j++) {
        float v = p.chunk.ws.sample[row * LK_HEAD_SAMPLE + j] + (bias ? bias[a.vocab / p.sampled * j] : 0.0f);
        if (a.softcap > 0.0f) v = lk_ce_cap(v, a.logit_scale, a.softcap, &slope);
        max = fmaxf(max, v), sum += v;
    }
    max = lk_lse_reference(max);
    const float above = p.ahead * (max - __fdiv_rn(sum, (float)p.sampled));
    const float most = __fdiv_rn(80.0f * LK_LN2, lk_head_scale(a));
    return max + (above > 0.0f && above < INFINITY ? fminf(above, most) : 0.0f); /* 0: a mean of -inf or NaN */
}

/* Puts eight of a thread's values, from v[first] on, under the softcap; edge: those that do not count become 0 before, since
 * lk_ce_logistic mixes two columns. slope: their slopes, 1 without one. One branch for all eight lets the compiler overlap them. */
template <bool plain, class Args>
LK_DEVICE void lk_head_cap(float (&v)[LK_GEMM_SUMS / 2], int first, float (&slope)[8], lk_head_window window, bool edge,
                           const Args &a)
{
    float x[8];
    LK_UNROLL for (int j = 0; j < 8; j++) x[j] = v[first + j], slope[j] = 1.0f;
    if (!plain && a.softcap > 0.0f) {
        if (edge) {
            LK_UNROLL for (int j = 0; j < 8; j++) x[j] = lk_head_within(window, first + j) ? x[j] : 0.0f;
        }
        lk_ce_cap<false>(x, slope, a.logit_scale, a.softcap);
    }
    LK_UNROLL for (int j = 0; j < 8; j++) v[first + j] = x[j];
}

/* Writes a row's exponentials of a tile, times the slopes with a softcap. Adds their sum to the row's state, whose max is the
 * largest reference so far. edge: some columns may not count. out: NULL where they are not kept; a branch around the writes
 * would keep the compiler from overlapping one block's shuffles with the next block's exponentials. */
template <bool plain, class Args>
LK_DEVICE lk_lse lk_head_put_tile(lk_lse s, float (&v)[LK_GEMM_SUMS / 2], lk_head_window window, bool edge, float guess,
                                  int cols_left, lk_bf16 *out, float *reference, const Args &a)
{
    const float scale = lk_head_scale(a), rate = scale * LK_LOG2E;
    float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sums[4] = {}, slope;
    if (plain && edge) lk_head_mask(v, window, -INFINITY);
    LK_UNROLL for (int i = 0; i < LK_GEMM_SUMS / 2; i++)
        if (plain || lk_head_within(window, i)) most[i % 4] = fmaxf(most[i % 4], v[i]);
    float max = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
    if (!plain && a.softcap > 0.0f) max = lk_ce_cap(max, a.logit_scale, a.softcap, &slope); /* -softcap for masked columns */
    const float off = rate * (max - guess);
    const float from = off > 40.0f || off < -90.0f ? max : guess, base = lk_lse_reference(from);
    LK_UNROLL for (int block = 0; block < LK_GEMM_COLS / 32; block++) {
        uint32_t pair[4];
        float e[8], slopes[8];
        lk_head_cap<plain>(v, block * 8, slopes, window, edge, a);
        LK_UNROLL for (int j = 0; j < 8; j++) {
            const int i = block * 8 + j;
            e[j] = plain || lk_head_within(window, i) ? lk_ex2(rate * (v[i] - base)) : 0.0f;
            sums[i % 4] += e[j];
            if (!plain && e[j] > 0.0f) e[j] *= slopes[j]; /* the slope of an ignored row may be NaN */
        }
        LK_UNROLL for (int g = 0; g < 4; g++) pair[g] = lk_gemm_pair(e[2 * g], e[2 * g + 1]);
        lk_gemm_put_block(out, block, cols_left, pair);
    }
    const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (out && threadIdx.x % 4 == 0) *reference = from;
    return lk_lse_merge(s, {sum == 0.0f ? -INFINITY : from, sum}, scale); /* not (+inf, 0), which would give 0 times inf */
}

/* Writes a row's dZ of a tile. Returns the thread's sum of e. t: after lk_head_by_lse. weights: of the thread's first column, or
 * NULL. */
template <bool plain, class Args>
LK_DEVICE float lk_head_put_dz_tile(float (&v)[LK_GEMM_SUMS / 2], lk_head_window window, bool edge, lk_head_terms t, int cols_left,
                                    lk_bf16 *out, const float *weights, const Args &a)
{
    float sums[4] = {};
    if (plain && edge) lk_head_mask(v, window, -INFINITY);
    LK_UNROLL for (int block = 0; block < LK_GEMM_COLS / 32; block++) {
        uint32_t pair[4];
        float z[8], e[8], slope[8], w_factor[8];
        lk_head_cap<plain>(v, block * 8, slope, window, edge, a);
        LK_UNROLL for (int j = 0; j < 8; j++) w_factor[j] = plain ? 0.0f : t.g.w_factor;
        if (!plain && weights) {
            LK_UNROLL for (int j = 0; j < 8; j++)
                if (lk_head_within(window, block * 8 + j)) w_factor[j] *= weights[block * 32 + j / 2 * 8 + j % 2];
        }
        LK_UNROLL for (int j = 0; j < 8; j++) {
            const int i = block * 8 + j;
            e[j] = plain || lk_head_within(window, i) ? lk_ex2(fmaf(t.g.rate, v[i], -t.g.base)) : 0.0f;
            sums[i % 4] += e[j], z[j] = v[i];
        }
        lk_ce_dz<plain>(z, e, w_factor, slope, t.g, a);
        LK_UNROLL for (int j = 0; j < 8; j++)
            if (!plain && !lk_head_within(window, block * 8 + j)) z[j] = 0.0f;
        LK_UNROLL for (int g = 0; g < 4; g++) pair[g] = lk_gemm_pair(z[2 * g], z[2 * g + 1]);
        lk_gemm_put_block(out, block, cols_left, pair);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* Where a row's exponentials or dZ of a tile go: its first column, and the columns from there to the padded end. NULL: they are
 * not kept. */
template <class Call> LK_DEVICE lk_bf16 *lk_head_place(const lk_head_fused<Call> &p, int64_t row, int tile, int *cols_left)
{
    const lk_head_workspace &ws = p.chunk.ws;
    lk_bf16 *at = (lk_bf16 *)ws.logits;
    int64_t stride = ws.logits_stride, first = (int64_t)p.in_dweight * LK_GEMM_COLS;
    LK_UNROLL for (int i = LK_HEAD_DWEIGHT_PARTS - 1; i >= 0; i--) {
        if (tile >= p.in_dweight || tile * LK_GEMM_COLS >= ws.dweight_parts[i].first + ws.dweight_parts[i].cols) continue;
        at = (lk_bf16 *)ws.dweight_parts[i].at, stride = ws.dweight_parts[i].cols, first = ws.dweight_parts[i].first;
    }
    const int col = (int)(tile * LK_GEMM_COLS - first);
    *cols_left = (int)(stride - col);
    return row < p.chunk.rows && tile < p.kept ? at + row * stride + col : NULL;
}

/* A cluster owns a pair of row tiles and a stretch of columns at a time. A consumer thread has a quarter of two rows and keeps
 * their states over the stretch. State: lk_ce_row_squares for states with statistics. */
template <class Call, bool plain, int mode, class State = lk_ce_row>
LK_KERNEL void __launch_bounds__(LK_GEMM_THREADS, 1) lk_head_fused_kernel(const __grid_constant__ lk_head_fused<Call> p)
{
#if LK_SM90A
    LK_DYN_SMEM(lk_gemm_memory, memory);
    lk_gemm_ring *const ring = lk_gemm_begin(&memory);
    const lk_head_work<Call> &chunk = p.chunk;
    const typename Call::args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    const int rank = (int)blockIdx.x % 2;
    unsigned step = 0;
    if (threadIdx.x == 0) lk_prefetch_tensormap(&p.x), lk_prefetch_tensormap(&p.weight);
    lk_griddepcontrol_wait();
    if (lk_gemm_loads()) {
        lk_setmaxnreg_dec<LK_GEMM_LOAD_REGISTERS>();
        for (int i = (int)blockIdx.x / 2; threadIdx.x == 0 && i < p.items; i += (int)gridDim.x / 2) {
            for (int j = 0, tile = (2 * i + rank) * p.stretch_tiles; p.few && j < p.stretch_tiles; j++)
                lk_gemm_load_few(ring, &step, &p.x, &p.weight, (tile + j) * LK_GEMM_COLS, p.steps);
            if (p.few) continue;
            const lk_gemm_item item = lk_gemm_item_of(p.pairs, p.stretches, LK_HEAD_GROUP, i);
            const int row = (2 * item.pair + rank) * LK_GEMM_ROWS, first = item.stretch * p.stretch_tiles;
            for (int tile = first; tile < first + p.stretch_tiles && tile < p.tiles; tile++)
                lk_gemm_load(ring, &step, &p.x, &p.weight, row, tile * LK_GEMM_COLS, p.steps);
        }
    } else {
        lk_setmaxnreg_inc<LK_GEMM_MULTIPLY_REGISTERS>();
        const int own = lk_gemm_col(0), quarter = (int)threadIdx.x % 4;
        const float *const weights = ws.class_weight ? ws.class_weight : a.class_weight;
        float z[LK_GEMM_SUMS];
        for (int i = (int)blockIdx.x / 2; i < p.items; i += (int)gridDim.x / 2) {
            const lk_gemm_item item = p.few ? lk_gemm_item{0, 2 * i + rank} : lk_gemm_item_of(p.pairs, p.stretches, LK_HEAD_GROUP, i);
            const int row = (p.few ? 0 : 2 * item.pair + rank) * LK_GEMM_ROWS + lk_gemm_row(0);
            /* Of few rows a block also walks tiles behind the last one, of which nothing counts: its peer needs its half of x. */
            const int first = item.stretch * p.stretch_tiles, end = p.few ? INT32_MAX : p.tiles;
            int y[2];
            float guess[2] = {0.0f, 0.0f};
            lk_head_terms terms[2] = {};
            State s[2] = {lk_ce_row_empty<State>(), lk_ce_row_empty<State>()};
            LK_UNROLL for (int r = 0; r < 2; r++) {
                const bool here = row + 8 * r < chunk.rows;
                if (mode == LK_HEAD_KEEP) guess[r] = lk_head_guess(p, here ? row + 8 * r : 0);
                y[r] = here ? ws.target[chunk.first_row + row + 8 * r] : -1;
                if (mode != LK_HEAD_DZ) continue;
                s[r].max = 0.0f; /* sums of e need no other reference */
                terms[r].g.rate = 1.0f; /* an ignored row's v are -inf, and its e 0 */
                if (y[r] < 0) continue;
                terms[r] = lk_head_terms_at(chunk, chunk.first_row + row + 8 * r, y[r]);
                lk_head_by_lse(chunk, chunk.first_row + row + 8 * r, &terms[r]);
            }
            for (int tile = first; tile < first + p.stretch_tiles && tile < end; tile++) {
                const int col = (int)chunk.first_col + tile * LK_GEMM_COLS, left = (int)a.vocab - col;
                const float *const tile_weights = weights ? weights + col + own : NULL;
                lk_gemm_multiply(z, ring, &step, p.steps);
                if (!plain && ws.bias) lk_head_add_bias(z, (const float *)ws.bias + col + own, left - own);
                LK_UNROLL for (int r = 0; r < 2; r++) {
                    const bool here = (unsigned)(y[r] - col) < LK_GEMM_COLS;
                    const bool ignored = mode != LK_HEAD_STATES && y[r] < 0; /* then zeros are written */
                    const bool edge = __any_sync(0xffffffffu, here || ignored || left < LK_GEMM_COLS);
                    const lk_head_window window = {ignored ? 0 : left - own, y[r] - col - own};
                    float v[LK_GEMM_SUMS / 2];
                    LK_UNROLL for (int k = 0; k < LK_GEMM_SUMS / 2; k++) v[k] = z[k / 2 * 4 + 2 * r + k % 2];
                    if (edge && y[r] >= 0) lk_head_find(ws.logit + chunk.first_row + row + 8 * r, v, window.target);
                    if (mode == LK_HEAD_STATES) {
                        s[r] = lk_head_add_tile<plain>(s[r], v, window, edge, tile_weights, a);
                        continue;
                    }
                    const int64_t at = row + 8 * r;
                    int cols_left;
                    lk_bf16 *const out = lk_head_place(p, at, tile, &cols_left);
                    if (mode == LK_HEAD_DZ) {
                        const float *const smooth = a.label_smoothing > 0.0f ? tile_weights : NULL;
                        s[r].sum += lk_head_put_dz_tile<plain>(v, window, edge, terms[r], cols_left, out, smooth, a);
                    } else {
                        float *const reference = ws.references + at * p.kept + tile;
                        const lk_lse sum = lk_head_put_tile<plain>({s[r].max, s[r].sum}, v, window, edge, guess[r], cols_left, out,
                                                                   reference, a);
                        s[r].max = sum.max, s[r].sum = sum.sum;
                    }
                }
            }
            LK_UNROLL for (int r = 0; r < 2; r++) {
                const int64_t at = row + 8 * r;
                s[r] = lk_ce_row_warp<!plain && mode == LK_HEAD_STATES>(s[r], lk_head_scale(a), 4);
                if (item.stretch >= p.stretches) continue; /* of few rows */
                if (quarter == 0 && at < chunk.rows)
                    p.sums[at * p.stretches + item.stretch] = {s[r].max, s[r].sum, s[r].weights, s[r].weighted};
                if constexpr (lk_ce_has_squares<State>) {
                    lk_head_more_squares *const more = (lk_head_more_squares *)ws.more + at * p.stretches + item.stretch;
                    if (quarter == 0 && at < chunk.rows) *more = {s[r].top, s[r].entropic, s[r].squares, s[r].total};
                } else if (!plain && mode == LK_HEAD_STATES && ws.more && quarter == 0 && at < chunk.rows)
                    ws.more[at * p.stretches + item.stretch] = {s[r].top, s[r].entropic};
            }
        }
    }
    lk_gemm_end();
#endif
}

/* The state of a row from those of its stretches, by a warp. It has the target's value, but not in the sums. */
template <class State, class Call>
LK_DEVICE State lk_head_merge_stretches(const lk_head_fused<Call> &p, int64_t row, int y, float *slope)
{
    const lk_head_work<Call> &chunk = p.chunk;
    const typename Call::args &a = chunk.call.a;
    const float scale = lk_head_scale(a);
    State s = lk_ce_row_empty<State>();
    for (int stretch = (int)threadIdx.x % 32; stretch < p.stretches; stretch += 32) {
        const lk_head_sums of = p.sums[row * p.stretches + stretch];
        State other = lk_ce_row_empty<State>();
        other.max = of.max, other.sum = of.sum, other.weights = of.weights, other.weighted = of.weighted;
        if constexpr (lk_ce_has_squares<State>) {
            const lk_head_more_squares more = ((const lk_head_more_squares *)chunk.ws.more)[row * p.stretches + stretch];
            other.top = more.top, other.entropic = more.entropic, other.squares = more.squares, other.total = more.total;
        } else if (chunk.ws.more) {
            const lk_head_more more = chunk.ws.more[row * p.stretches + stretch];
            other.top = more.top, other.entropic = more.entropic;
        }
        s = lk_ce_row_merge(s, other, scale);
    }
    s = lk_ce_row_warp<true>(s, scale);
    const bool here = y >= 0 && y != LK_ELSEWHERE;
    s.target = here ? chunk.ws.logit[chunk.first_row + row] : -INFINITY;
    *slope = 1.0f;
    if (here && a.softcap > 0.0f) s.target = lk_ce_cap(s.target, a.logit_scale, a.softcap, slope);
    return s;
}

/* Writes the target's dZ of a row, and counts the row among those with its target. The order of integer atomics does not
 * matter. One thread calls. */
LK_DEVICE void lk_head_put_target_dz(const lk_head_workspace &ws, int64_t row, int y, float target_dz)
{
    ws.target_dz[row] = target_dz;
    if (y < 0 || target_dz == 0.0f || !ws.owners) return;
    atomicMin(&ws.owners[y].first, (int)row);
    atomicAdd(&ws.owners[y].count, 1);
}

/* The largest reference of a row's tiles, by a warp; -inf: all exponentials are 0. */
template <class Call> LK_DEVICE float lk_head_largest_reference(const lk_head_fused<Call> &p, int64_t row, int y)
{
    float base = -INFINITY;
    for (int tile = (int)threadIdx.x % 32; y >= 0 && tile < p.kept; tile += 32)
        base = fmaxf(base, p.chunk.ws.references[row * p.kept + tile]);
    LK_UNROLL for (int offset = 16; offset > 0; offset /= 2) base = fmaxf(base, __shfl_xor_sync(0xffffffffu, base, offset));
    return base;
}

/* Puts the exponentials of a row with target y against base and multiplies them by `times`, by a warp. */
template <class Call>
LK_DEVICE void lk_head_rescale(const lk_head_fused<Call> &p, int64_t row, int y, float rate, float base, float times)
{
    const lk_head_workspace &ws = p.chunk.ws;
    const int lane = (int)threadIdx.x % 32;
    for (int first = 0; y >= 0 && first < p.kept; first += 32) { /* few tiles have another reference; most with large logits */
        const float from = first + lane < p.kept ? ws.references[row * p.kept + first + lane] : -INFINITY;
        const float mine = from > -INFINITY ? times * lk_ex2(rate * (from - base)) : 1.0f;
        for (unsigned out = __ballot_sync(0xffffffffu, mine != 1.0f); out; out &= out - 1) {
            const int tile = first + __ffs((int)out) - 1;
            const float factor = __shfl_sync(0xffffffffu, mine, tile - first);
            int cols_left;
            lk_bf16 *const e = lk_head_place(p, row, tile, &cols_left) + lane * 8;
            float x[8] = {};
            lk_vec<lk_bf16> eight;
            if (lane * 8 >= cols_left) continue;
            if (factor != 0.0f) { /* 0: the tile is far below */
                eight.raw = *(const uint4 *)e;
                lk_unpack(x, eight);
            }
            LK_UNROLL for (int j = 0; j < 8; j++) x[j] *= factor;
            lk_pack(&eight, x);
            *(uint4 *)e = eight.raw;
        }
    }
}

/* Returns v of a row: its dZ is v times its exponentials, when these are relative to base, the row's largest reference. Sets
 * target_dz. s: the row's state without the target in the sums; lse: of all columns. */
template <class Args>
LK_DEVICE float lk_head_row_factor(const Args &a, const lk_ce_row &s, const lk_head_terms &t, float base, float slope,
                                   float lse, float *target_dz)
{
    const float scale = lk_head_scale(a), rate = scale * LK_LOG2E, one[1] = {s.target}, ones[1] = {1.0f};
    const lk_ce_row all = lk_ce_row_add(s, one, ones, scale);
    const float others = __fdiv_rn(lk_ce_row_raise(s, all.max, scale).sum, all.sum);
    const float target = __fdiv_rn(lk_ex2(rate * (s.target - lk_lse_reference(all.max))), all.sum);
    const float p_scale = base > -INFINITY ? lk_ex2(rate * (base - lk_lse_reference(all.max))) : 0.0f; /* 0: all E are 0 */
    *target_dz = lk_is_finite(lse) ? lk_head_target_dz(a, t, target, s.target, others, slope) : NAN;
    return t.g.p_factor * __fdiv_rn(p_scale, all.sum);
}

/* backward: the target's dZ of a row, from its logit and the saved lse. */
template <class Call>
LK_DEVICE float lk_head_target_dz_by_lse(const lk_head_work<Call> &p, int64_t row, int y, const lk_head_terms &t, float others)
{
    const typename Call::args &a = p.call.a;
    const float lse = p.ws.lse[row];
    if (y < 0 || y == LK_ELSEWHERE) return 0.0f;
    if (!lk_is_finite(lse)) return NAN;
    float slope = 1.0f, value = p.ws.logit[row];
    if (a.softcap > 0.0f) value = lk_ce_cap(value, a.logit_scale, a.softcap, &slope);
    const float p_y = lk_exp(fmaf(lk_head_scale(a), value, -lse) - lk_head_lse_low(p, row));
    return lk_head_target_dz(a, t, p_y, value, others, slope);
}

/* backward: a warp owns a row and adds a panel's sums of e to ws.others; with ranks the caller has given it. last: then it makes
 * that a sum of p and finds the target's dZ. */
template <class Call>
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS) lk_head_others_kernel(const __grid_constant__ lk_head_fused<Call> p)
{
    const lk_head_work<Call> &chunk = p.chunk;
    const lk_head_workspace &ws = chunk.ws;
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * (LK_HEAD_THREADS / 32) + threadIdx.x / 32, at = chunk.first_row + row;
    lk_griddepcontrol_wait();
    if (row >= chunk.rows) return;
    float others = 0.0f;
    for (int stretch = lane; stretch < p.stretches; stretch += 32) others += p.sums[row * p.stretches + stretch].sum;
    others = lk_sum_warp(others, 32);
    if (lane != 0) return; /* the other lanes would read ws.others while this one writes it */
    if (chunk.call.split) others = ws.others[at]; /* of all ranks */
    else if (!chunk.first) others += ws.others[at];
    const int y = ws.target[at];
    lk_head_terms unused = {};
    if (chunk.last && !chunk.call.split && y >= 0) others *= lk_head_by_lse(chunk, at, &unused);
    ws.others[at] = others;
    if (chunk.last) lk_head_put_target_dz(ws, at, y, lk_head_target_dz_by_lse(chunk, at, y, lk_head_terms_at(chunk, at, y), others));
}

/* dx = v (E weight) of a panel's columns and, where bf16 dweight is summed over chunks, dweight (+)= E^T (v x). One launch
 * does both, so that no cluster is idle at the end of the first. A transposed factor lies in shared memory as squares of 64 k
 * by 64. The last panel's tiles add the target's dZ times its row of weight.
 *
 * A sum over launches (dx over panels, dweight over chunks) has 24 bits. The caller's bf16 has the rounded sum. The workspace has
 * one byte more per element: the rest of the sum, in units of 2^-8 of a bf16's last place. So no pass has to round after the
 * last launch. Any other dweight is cuBLASLt's, which is faster. */

#define LK_HEAD_BAND 8 /* pairs of row tiles that walk all columns together, as LK_HEAD_GROUP */

typedef struct {
    int pairs, cols; /* of 256 rows, of 256 columns; 0: the product is not wanted, or it is cuBLASLt's */
    int steps;       /* of the dimension that is summed */
} lk_head_tiles;

template <class Call> struct lk_head_gradients {
    CUtensorMap e, weight;    /* dx's factors */
    CUtensorMap e_across, x;  /* dweight's */
    lk_head_work<Call> chunk; /* the chunk, and the panel's columns */
    lk_head_tiles dx, dweight;
    int early;                /* see lk_head_gradient_tile */
    bool first_chunk, last_chunk;
    bool wide_dx, wide_dweight, wide_weight; /* every group of 8 neighbours is complete, at a multiple of 16 bytes */
};

typedef struct {
    int row, col; /* the first of the pair of tiles; row -1: there is none */
    bool dx;
} lk_head_gradient_item;

LK_DEVICE lk_head_gradient_item lk_head_gradient_item_of(const lk_head_tiles &t, int i, bool dx)
{
    const lk_gemm_item item = lk_gemm_item_of(t.pairs, t.cols, LK_HEAD_BAND, i);
    return {2 * LK_GEMM_ROWS * item.pair, LK_GEMM_COLS * item.stretch, dx};
}

/* The item of a cluster in its `round`-th round: those of dx come first, then those of dweight. An item of dx has a step per 64
 * columns, one of dweight a step per 64 rows. In the last round of dx some clusters have no item of it. Meanwhile they do
 * `early` items of dweight each. */
template <class Call> LK_DEVICE lk_head_gradient_item lk_head_gradient_tile(const lk_head_gradients<Call> &p, int round)
{
    const int clusters = (int)gridDim.x / 2, cluster = (int)blockIdx.x / 2;
    const int of_dx = p.dx.pairs * p.dx.cols, rest = of_dx % clusters, more = cluster < rest;
    const int n = round - of_dx / clusters - more; /* this cluster's n-th item of dweight */
    if (n < 0) return lk_head_gradient_item_of(p.dx, round * clusters + cluster, true);
    int i = p.early * (clusters - rest) + (more ? n : n - p.early) * clusters + cluster;
    if (!more && n < p.early) i = n * (clusters - rest) + cluster - rest;
    if (i < p.dweight.pairs * p.dweight.cols) return lk_head_gradient_item_of(p.dweight, i, false);
    return {-1, 0, false};
}

/* The thread's low bytes of a tile. */
LK_DEVICE uint4 *lk_head_low(int8_t *low, const lk_head_tiles &t, int row, int col)
{
    const int64_t tile = (int64_t)(row / LK_GEMM_ROWS) * t.cols + col / LK_GEMM_COLS;
    return (uint4 *)(low + tile * LK_GEMM_ROWS * LK_GEMM_COLS) + threadIdx.x - 128;
}

template <class Call> LK_DEVICE lk_gemm_out lk_head_dx_out(const lk_head_gradients<Call> &p, int row, int col, float alpha)
{
    const lk_head_work<Call> &chunk = p.chunk;
    const typename Call::args &a = chunk.call.a;
    const lk_head_workspace &ws = chunk.ws;
    const int mine = col + (int)threadIdx.x % 4 * 8;
    lk_gemm_out o = {};
    LK_UNROLL for (int r = 0; r < 2; r++) {
        const int64_t in_chunk = row + 8 * r, at = chunk.first_row + in_chunk;
        const int64_t token = in_chunk >= chunk.rows ? -1 : ws.token ? ws.token[at] : at;
        if (token < 0) continue;
        o.out[r] = (lk_bf16 *)a.dx + token * a.dx_stride + mine;
        o.factor[r] = alpha * (ws.scale ? ws.scale[in_chunk] : 1.0f);
        if (!chunk.last || ws.target_dz[at] == 0.0f) continue;
        o.more[r] = (const lk_bf16 *)a.weight + ws.target[at] * a.weight_stride + mine;
        o.times[r] = alpha * ws.target_dz[at];
    }
    if (ws.low_dx) o.low = lk_head_low(ws.low_dx, p.dx, row, col);
    o.old = o.read_low = !chunk.first, o.write_low = !chunk.last;
    o.wide = p.wide_dx, o.wide_more = p.wide_weight, o.left = (int)a.hidden - mine;
    return o;
}

template <class Call> LK_DEVICE lk_gemm_out lk_head_dweight_out(const lk_head_gradients<Call> &p, int row, int col, float alpha)
{
    const typename Call::args &a = p.chunk.call.a;
    const int mine = col + (int)threadIdx.x % 4 * 8;
    lk_gemm_out o = {};
    LK_UNROLL for (int r = 0; r < 2; r++) {
        if (row + 8 * r < a.vocab) o.out[r] = (lk_bf16 *)a.dweight + (row + 8 * r) * a.dweight_stride + mine;
        o.factor[r] = alpha;
    }
    o.low = lk_head_low(p.chunk.ws.low, p.dweight, row, col);
    o.old = !p.first_chunk || a.accumulate, o.read_low = !p.first_chunk, o.write_low = !p.last_chunk;
    o.wide = p.wide_dweight, o.left = (int)a.hidden - mine;
    return o;
}

template <class Call>
LK_KERNEL void __launch_bounds__(LK_GEMM_THREADS, 1) lk_head_products_kernel(const __grid_constant__ lk_head_gradients<Call> p)
{
#if LK_SM90A
    LK_DYN_SMEM(lk_gemm_memory, memory);
    lk_gemm_ring *const ring = lk_gemm_begin(&memory);
    const int below = LK_GEMM_ROWS * ((int)blockIdx.x % 2);
    unsigned step = 0;
    lk_griddepcontrol_wait();
    if (lk_gemm_loads()) {
        lk_setmaxnreg_dec<LK_GEMM_LOAD_REGISTERS>();
        for (int round = 0; threadIdx.x == 0; round++) {
            const lk_head_gradient_item item = lk_head_gradient_tile(p, round);
            if (item.row < 0) break;
            if (item.dx)
                lk_gemm_load<false, true>(ring, &step, &p.e, &p.weight, item.row + below, item.col, p.dx.steps);
            else lk_gemm_load<true, true>(ring, &step, &p.e_across, &p.x, item.row + below, item.col, p.dweight.steps);
        }
    } else {
        lk_setmaxnreg_inc<LK_GEMM_MULTIPLY_REGISTERS>();
        const float alpha = p.chunk.ws.counts->alpha;
        float d[LK_GEMM_SUMS];
        for (int round = 0;; round++) {
            const lk_head_gradient_item item = lk_head_gradient_tile(p, round);
            const int row = item.row + below + lk_gemm_row(0);
            if (item.row < 0) break;
            if (item.dx) {
                lk_gemm_multiply<false, true>(d, ring, &step, p.dx.steps);
                lk_gemm_put_sums<2>(lk_head_dx_out(p, row, item.col, alpha), d);
            } else {
                lk_gemm_multiply<true, true>(d, ring, &step, p.dweight.steps);
                lk_gemm_put_sums<2>(lk_head_dweight_out(p, row, item.col, alpha), d);
            }
        }
    }
    lk_gemm_end();
#endif
}

/* f32_dx: a thread owns 8 neighbours of a row of dx = alpha (v sums + target_dz weight[y]). sums: E weight, or dZ weight where v is
 * NULL. */
template <class Call>
LK_KERNEL void __launch_bounds__(LK_MOVE_THREADS) lk_head_round_dx_kernel(const __grid_constant__ lk_head_work<Call> p)
{
    const typename Call::args &a = p.call.a;
    const lk_head_workspace &ws = p.ws;
    const lk_move_place at = lk_move_place_of(a.hidden);
    const int64_t in_chunk = at.row, row = p.first_row + in_chunk, first = at.col, left = a.hidden - first;
    lk_griddepcontrol_wait();
    if (in_chunk >= p.rows || left <= 0) return;
    const int64_t token = ws.token ? ws.token[row] : row;
    if (token < 0) return;
    const float alpha = ws.counts->alpha, target_dz = ws.target_dz[row], v = ws.scale ? ws.scale[in_chunk] : 1.0f;
    const float *const sums = ws.dx + in_chunk * a.hidden + first;
    lk_bf16 *const out = (lk_bf16 *)a.dx + token * a.dx_stride + first;
    float x[8], target[8] = {};
    lk_move_load(x, sums, left, left >= 8 && (uintptr_t)sums % 16 == 0);
    if (target_dz != 0.0f) {
        const lk_bf16 *const weight = (const lk_bf16 *)a.weight + ws.target[row] * a.weight_stride + first;
        lk_move_load(target, weight, left, left >= 8 && (uintptr_t)weight % 16 == 0);
    }
    LK_UNROLL for (int i = 0; i < 8; i++) x[i] = fmaf(alpha * target_dz, target[i], alpha * v * x[i]);
    lk_move_store(out, x, left, left >= 8 && (uintptr_t)out % 16 == 0);
}

/* ---- The targets' part of dweight, and dbias ----------------------------------------------------------------------------- */

/* A bit for each of eight rows from `at` on: it has target y. */
LK_DEVICE unsigned lk_head_same(const int *target, int64_t at, int64_t rows, int y)
{
    int4 low = {}, high = {};
    unsigned same = 0;
    if (at + 8 <= rows) low = ((const int4 *)(target + at))[0], high = ((const int4 *)(target + at))[1];
    int eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    LK_UNROLL for (int i = 0; i < 8; i++) {
        if (at + 8 > rows) eight[i] = at + i < rows ? target[at + i] : -1;
        same |= (unsigned)(eight[i] == y) << i;
    }
    return same;
}

/* fused: a block owns a target, and 8 columns of hidden per thread. It adds x of all rows with that target, times the target's dZ,
 * to dweight, in the order of rows. dweight's other part has been rounded before, if it has 16 bits. Most targets have one row;
 * then there is nothing to look for. The block finds its target by its first row; where columns are fewer than rows, by its column. */
template <class Out, class Call>
LK_KERNEL void __launch_bounds__(LK_HEAD_THREADS, LK_HEAD_BLOCKS) lk_head_targets_kernel(lk_head_work<Call> p)
{
    constexpr int Window = 8 * LK_HEAD_THREADS, Words = Window / 32; /* rows that are looked at together, a bit each */
    const typename Call::args &a = p.call.a;
    const lk_head_workspace &ws = p.ws;
    const int thread = (int)threadIdx.x;
    const int64_t slices = (a.hidden + LK_MOVE_TILE - 1) / LK_MOVE_TILE, mine = blockIdx.x / slices;
    const int64_t col = blockIdx.x % slices * LK_MOVE_TILE + thread * 8;
    const bool by_column = a.vocab < p.call.rows;
    const int left = (int)(a.hidden - col);
    LK_SHARED(unsigned, same, [Words]);
    LK_SHARED(int, list, [Window + 1]); /* the rows, and behind them their count */
    LK_SHARED(float, list_dz, [LK_HEAD_THREADS]); /* their dZ, so many at a time */
    lk_griddepcontrol_wait();
    const int y = by_column ? (int)mine : ws.target[mine];
    const lk_head_owner owner = y < 0 || y == LK_ELSEWHERE ? lk_head_owner{-1, 0} : ws.owners[y];
    if (by_column ? owner.count == 0 : owner.first != mine) return;
    const int64_t row = owner.first;
    const bool even = a.hidden % 8 == 0, wide = even && (uintptr_t)a.x % 16 == 0 && a.x_stride % 8 == 0;
    const bool wide_out = even && (uintptr_t)a.dweight % 16 == 0 && a.dweight_stride % 8 == 0;
    float sum = 0.0f, total[8] = {};
    int found = 0;
    for (int64_t from = row / 8 * 8; found < owner.count && from < p.call.rows; from += Window) {
        int count = 1;
        if (owner.count > 1) {
            const unsigned eight = lk_head_same(ws.target, from + thread * 8, p.call.rows, y);
            ((uint8_t *)same)[thread] = (uint8_t)eight;
            if (!__syncthreads_or(eight != 0)) continue; /* orders the bits before their reads */
            if (thread < Words) {
                int before = 0;
                for (int i = 0; i < thread; i++) before += __popc(same[i]);
                for (unsigned bits = same[thread]; bits; bits &= bits - 1) list[before++] = thread * 32 + __ffs((int)bits) - 1;
                if (thread == Words - 1) list[Window] = before;
            }
            __syncthreads(); /* orders the list before its reads, and the reads of bits before the next ones */
            count = list[Window];
        }
        for (int begin = 0; begin < count; begin += LK_HEAD_THREADS) {
            const int some = min(count - begin, LK_HEAD_THREADS);
            if (begin) __syncthreads(); /* orders the reads of list_dz before its next writes */
            if (thread < some) list_dz[thread] = ws.target_dz[owner.count > 1 ? from + list[begin + thread] : row];
            __syncthreads(); /* orders list_dz before its reads */
            LK_UNROLL_BY(4) for (int i = 0; i < some; i++) {
                const int64_t at = owner.count > 1 ? from + list[begin + i] : row;
                const float dz = list_dz[i];
                lk_vec<lk_bf16> eight;
                float x[8];
                eight.raw = lk_gemm_get8((const lk_bf16 *)a.x + (ws.token ? ws.token[at] : at) * a.x_stride + col, left, wide);
                lk_unpack(x, eight);
                found += dz != 0.0f, sum += dz;
                LK_UNROLL for (int j = 0; j < 8; j++) total[j] = dz != 0.0f ? fmaf(dz, x[j], total[j]) : total[j]; /* x may be NaN */
            }
        }
    }
    if (a.dbias && col == 0) ws.dbias[y] += sum;
    if (!a.dweight || left <= 0) return;
    Out *const out = (Out *)a.dweight + y * a.dweight_stride + col;
    float x[8];
    lk_move_load(x, out, left, wide_out);
    LK_UNROLL for (int j = 0; j < 8; j++) x[j] = fmaf(ws.counts->alpha, total[j], x[j]);
    lk_move_store(out, x, left, wide_out);
}

/* ---- The steps of FUSED -------------------------------------------------------------------------------------------------- */

template <class Call, class Args>
LK_HOST lk_status lk_head_launch_tiles(const lk_head_job<Call> *job, void (*kernel)(Args), int64_t items, const Args &p)
{
    if (job->mode == LK_CUBLAS_RESOLVE) return LK_OK;
    return lk_gemm_launch(job->op, &job->device, kernel, items, job->stream, p);
}

/* The tiles of a panel's columns. */
template <class T, class Call>
LK_HOST lk_status lk_head_fused_tiles(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk, lk_head_fused<Call> *p)
{
    const Call &call = chunk.call;
    const typename Call::args &a = call.a;
    *p = {};
    p->chunk = chunk, p->sums = chunk.ws.sums;
    p->pairs = (int)lk_ceil_div(chunk.rows, 2 * LK_GEMM_ROWS), p->tiles = (int)lk_ceil_div(chunk.cols, LK_GEMM_COLS);
    p->stretch_tiles = call.gradient || call.saves ? lk_head_stretch(&job->shape, chunk.rows, chunk.cols, chunk.ws.stretches)
                                  : (int)lk_ceil_div(job->plan.panel_vocab, LK_GEMM_COLS);
    p->stretches = (int)lk_ceil_div(p->tiles, p->stretch_tiles);
    p->few = lk_head_at_once(&job->shape, chunk.rows) > job->shape.clusters;
    p->items = p->few ? (p->stretches + 1) / 2 : p->pairs * p->stretches;
    p->steps = (int)lk_ceil_div(a.hidden, LK_GEMM_DEPTH);
    /* Expected: of 8 normal values the largest is 1.4 deviations above the mean; of many, n, it is about sqrt(2 log n). */
    p->sampled = (int)lk_head_min(a.vocab, LK_HEAD_SAMPLE);
    p->ahead = a.vocab > LK_HEAD_SAMPLE ? sqrtf(2.0f * logf((float)a.vocab)) / 1.4f - 1.0f : 0.0f;
    if (job->mode == LK_CUBLAS_RESOLVE) return LK_OK;
    const T *const weight = (const T *)a.weight + chunk.first_col * a.weight_stride;
    const int64_t left = a.vocab - chunk.first_col;
    const void *const x = lk_head_x<T>(job, chunk);
    const lk_status status = lk_gemm_map(job->op, &p->x, x, chunk.rows, a.hidden, lk_head_x_stride(job),
                                         p->few ? LK_GEMM_ROWS / 2 : LK_GEMM_ROWS);
    return status ? status : lk_gemm_map(job->op, &p->weight, weight, left, a.hidden, a.weight_stride, LK_GEMM_COLS / 2);
}

/* Logits of every (vocab / 8)-th column, for the guess of the references; lk_head_guess adds their bias. A stride of 2^31
 * elements was not tried with cuBLASLt: then the columns are closer, and a guess with the bias of others is a worse one. */
template <class T, class Call> LK_HOST lk_status lk_head_sample(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const typename Call::args &a = chunk.call.a;
    lk_cublas_product m = lk_head_product(job, LK_DTYPE_F32, false);
    m.key.transpose_a = 1;
    m.key.m = lk_head_min(a.vocab, LK_HEAD_SAMPLE), m.key.n = chunk.rows, m.key.k = a.hidden;
    const int64_t most = INT32_MAX / a.weight_stride; /* rows of weight from one column to the next */
    m.key.lda = lk_head_min(a.vocab / m.key.m, most > 0 ? most : 1) * a.weight_stride;
    m.key.ldb = lk_head_x_stride(job), m.key.ldd = LK_HEAD_SAMPLE;
    m.a = a.weight, m.b = lk_head_x<T>(job, chunk), m.d = chunk.ws.sample;
    return lk_head_multiply(job, &m);
}

/* dx of a panel's columns; dweight: also that, as a sum over chunks in 24 bits. */
template <class Call>
LK_HOST lk_status lk_head_run_gradients(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk, bool dweight)
{
    const Call &call = chunk.call;
    const typename Call::args &a = call.a;
    const lk_head_workspace &ws = chunk.ws;
    lk_head_gradients<Call> p = {};
    lk_status status = LK_OK;
    if (job->mode == LK_CUBLAS_RESOLVE) return LK_OK;
    p.chunk = chunk, p.first_chunk = chunk.first_row == 0, p.last_chunk = chunk.first_row + chunk.rows >= call.rows;
    const int cols = (int)lk_ceil_div(a.hidden, LK_GEMM_COLS), groups = (int)lk_ceil_div(a.vocab, 2 * LK_GEMM_ROWS);
    if (a.dx) p.dx = {(int)lk_ceil_div(chunk.rows, 2 * LK_GEMM_ROWS), cols, (int)lk_ceil_div(chunk.cols, LK_GEMM_DEPTH)};
    if (dweight) p.dweight = {groups, cols, (int)lk_ceil_div(chunk.rows, LK_GEMM_DEPTH)};
    const int64_t of_dx = (int64_t)p.dx.pairs * p.dx.cols, items = of_dx + (int64_t)p.dweight.pairs * p.dweight.cols;
    if (dweight && of_dx % call.clusters) p.early = p.dx.steps / p.dweight.steps;
    p.wide_dx = (uintptr_t)a.dx % 16 == 0 && a.dx_stride % 8 == 0 && a.hidden % 8 == 0;
    p.wide_dweight = (uintptr_t)a.dweight % 16 == 0 && a.dweight_stride % 8 == 0 && a.hidden % 8 == 0;
    p.wide_weight = a.hidden % 8 == 0;
    const lk_bf16 *const weight = (const lk_bf16 *)a.weight + chunk.first_col * a.weight_stride;
    if (a.dx) status = lk_gemm_map(job->op, &p.e, ws.logits, chunk.rows, chunk.cols, ws.logits_stride, LK_GEMM_ROWS);
    if (a.dx && !status) status = lk_gemm_map(job->op, &p.weight, weight, chunk.cols, a.hidden, a.weight_stride, LK_GEMM_DEPTH);
    if (dweight && !status)
        status = lk_gemm_map(job->op, &p.e_across, ws.logits, chunk.rows, a.vocab, ws.logits_stride, LK_GEMM_DEPTH);
    if (dweight && !status) status = lk_gemm_map(job->op, &p.x, ws.scaled_x, chunk.rows, a.hidden, ws.x_stride, LK_GEMM_DEPTH);
    return status ? status : lk_head_launch_tiles(job, lk_head_products_kernel<Call>, items, p);
}

/* f32_dx: dx of all columns by cuBLASLt. */
template <class T, class Call> LK_HOST lk_status lk_head_run_f32_dx(lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const lk_status status = lk_head_dx<T>(job, chunk);
    if (status || job->mode == LK_CUBLAS_RESOLVE) return status;
    return lk_launch_pdl(job->op, &job->device, lk_head_round_dx_kernel<Call>, lk_move_blocks(chunk.rows, chunk.call.a.hidden), 1,
                         LK_MOVE_THREADS, 0, job->stream, chunk);
}

/* v x, dweight's factor beside exponentials. */
template <class T, class Call> LK_HOST lk_status lk_head_scale_x(const lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const lk_head_workspace &ws = chunk.ws;
    if (!ws.scaled_x) return LK_OK;
    return lk_head_move_rows<T, T>(job, {lk_head_x<T>(job, chunk), ws.scaled_x, NULL, NULL, chunk.rows, chunk.call.a.hidden,
                                         lk_head_x_stride(job), ws.x_stride, 0, ws.scale});
}

/* The states of a chunk's rows over all columns, and what follows from them; exponentials of the columns that are kept. */
template <class T, class Call> LK_HOST lk_status lk_head_fused_forward(lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const Call &call = chunk.call;
    const typename Call::args &a = call.a;
    const int64_t kept = job->plan.kept_vocab;
    const bool plain = !a.bias && a.softcap == 0.0f && a.label_smoothing == 0.0f && !a.entropy && !a.argmax && !a.dentropy;
    lk_head_fused<Call> p;
    lk_status status = LK_OK;
    if (kept) status = lk_head_sample<T>(job, chunk);
    if (!status) status = lk_head_fused_tiles<T>(job, chunk, &p);
    if (status) return status;
    p.kept = (int)lk_ceil_div(kept, LK_GEMM_COLS), p.in_dweight = (int)(job->plan.lent_vocab / LK_GEMM_COLS);
    void (*const states_kernels[])(lk_head_fused<Call>) = {lk_head_fused_kernel<Call, false, LK_HEAD_STATES>,
                                                           lk_head_fused_kernel<Call, true, LK_HEAD_STATES>};
    void (*const keep_kernels[])(lk_head_fused<Call>) = {lk_head_fused_kernel<Call, false, LK_HEAD_KEEP>,
                                                         lk_head_fused_kernel<Call, true, LK_HEAD_KEEP>};
    void (*tiles)(lk_head_fused<Call>) = (kept ? keep_kernels : states_kernels)[plain];
    /* in forward alone, which keeps no exponentials then */
    if (a.statistics) tiles = lk_head_fused_kernel<Call, false, LK_HEAD_STATES, lk_ce_row_squares>;
    status = lk_head_launch_tiles(job, tiles, p.items, p);
    return status || job->mode == LK_CUBLAS_RESOLVE ? status : job->rows->fused_rows(job, p);
}

/* dZ of a panel's columns, by the rows' lse. */
template <class T, class Call> LK_HOST lk_status lk_head_fused_dz(lk_head_job<Call> *job, const lk_head_work<Call> &chunk)
{
    const typename Call::args &a = chunk.call.a;
    const bool plain = !a.bias && a.softcap == 0.0f && a.label_smoothing == 0.0f && !a.dentropy;
    lk_head_fused<Call> p;
    lk_status status = lk_head_fused_tiles<T>(job, chunk, &p);
    if (status) return status;
    p.kept = p.tiles;
    status = lk_head_launch_tiles(job, plain ? lk_head_fused_kernel<Call, true, LK_HEAD_DZ>
                                             : lk_head_fused_kernel<Call, false, LK_HEAD_DZ>, p.items, p);
    if (status || chunk.call.gives_loss) return status;
    return lk_head_launch(job, lk_head_others_kernel<Call>, lk_ceil_div(chunk.rows, LK_HEAD_THREADS / 32), p);
}

/* The targets' part of dweight and dbias, when all chunks are done. */
template <class Call> LK_HOST lk_status lk_head_run_targets(const lk_head_job<Call> *job)
{
    const typename Call::args &a = job->p.call.a;
    if (!a.dweight && !a.dbias) return LK_OK;
    return lk_head_launch(job, a.dweight_dtype == LK_DTYPE_F32 ? lk_head_targets_kernel<float, Call>
                                                              : lk_head_targets_kernel<lk_bf16, Call>,
                          lk_head_min(job->p.call.rows, a.vocab) * lk_ceil_div(a.hidden, LK_MOVE_TILE), job->p);
}

/* `fused` of a loss's table. One chunk whose logits stay in registers: its rows' results, then the gradients, one panel of columns
 * after another. */
template <class T, class Call> LK_HOST lk_status lk_head_run_fused(lk_head_job<Call> *job, int64_t index)
{
    const Call &call = job->p.call;
    const typename Call::args &a = call.a;
    const lk_head_plan &plan = job->plan;
    const lk_head_rows<Call> &loss = *job->rows;
    const bool launches = job->mode == LK_CUBLAS_LAUNCH;
    lk_head_work<Call> chunk = lk_head_panel_at(job, index, 0);
    chunk.cols = a.vocab;
    lk_status status = lk_head_compact<T>(job, chunk);
    if (!status && call.gives_loss) status = lk_head_fused_forward<T>(job, chunk);
    if (!call.gradient || status) return status;
    const lk_head_workspace &ws = job->p.ws;
    if (launches && !call.gives_loss) status = loss.fused_backward(job);
    if (!plan.f32_dx && !status) status = lk_head_scale_x<T>(job, chunk);
    const bool sums = lk_head_sums_dweight(&job->shape, plan.chunk_tokens);
    for (; chunk.first_col < a.vocab && !status; chunk.first_col += chunk.cols) {
        const bool kept = chunk.first_col < plan.kept_vocab;
        chunk.ws = ws; /* then the arrays of these columns */
        chunk.cols = kept ? plan.kept_vocab - chunk.first_col : lk_head_min(plan.panel_vocab, a.vocab - chunk.first_col);
        for (const lk_head_dweight_part &part : ws.dweight_parts)
            if (part.cols && chunk.first_col == part.first)
                chunk.cols = part.cols, chunk.ws.logits = part.at, chunk.ws.logits_stride = part.cols;
        if (!kept) chunk.ws.scale = NULL, chunk.ws.scaled_x = NULL;
        chunk.first = chunk.first_col == 0, chunk.last = chunk.first_col + chunk.cols == a.vocab;
        if (!kept && launches && loss.fused_terms) loss.fused_terms(job, &chunk);
        if (!kept) status = lk_head_fused_dz<T>(job, chunk);
        if (!kept && launches && loss.fused_panel && !status) status = loss.fused_panel(job, chunk);
        if (!status) status = loss.dbias(job, chunk);
        if (!status && plan.f32_dx) status = lk_head_run_f32_dx<T>(job, chunk);
        else if (!status && (a.dx || sums)) status = lk_head_run_gradients(job, chunk, sums);
        if (!status && chunk.last) status = lk_head_reduce_dx(job, chunk);
        if (!status && plan.f32_dx) status = lk_head_scale_x<T>(job, chunk); /* over the memory of dx in f32 */
        if (!status && a.dweight && !sums) status = lk_head_dweight<T>(job, chunk);
    }
    return status || index + 1 < plan.chunks ? status : lk_head_run_targets(job);
}

#endif /* CUDA or the simulator */
#endif
