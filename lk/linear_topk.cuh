// SPDX-License-Identifier: MIT
/* linear_topk.cuh - the k largest logits of each token of a language model's head, as ids and log-probabilities, without storing the
 * logits of all tokens. For distillation over the student's own ids, and for a sampler: its top k, or a draw.
 *
 *   logits[t,j] = sum_d x[t,d] weight[j,d] + bias[j]
 *   z[t,j]      = logit_scale logits[t,j], or with the option softcap: softcap * tanh(logit_scale logits[t,j] / softcap)
 *   lse[t]      = log sum_j exp(z[t,j]), over all columns
 *   ids[t,i]    = the column of the i-th largest logit of token t, i = 0 to k - 1; of equal ones the smallest column comes first
 *   logp[t,i]   = z[t,ids[t,i]] - lse[t]
 *   with the option seed the order is that of z[t,j] + g[t,j], with g = -log(-log(1 - v[t,j])) and v uniform between 0 and 1: ids
 *   are a sample of k columns without replacement, in the order of drawing, and ids[t,0] is a draw with the probabilities exp(z - lse)
 *
 * Use        In one .cu file, linked with -lcublasLt:   Anywhere, C included:
 *                #include "lk/linear_topk.cuh"              #include "lk/linear_topk.cuh"
 *                LK_DEFINE_LINEAR_TOPK(bf16)                LK_DECLARE_LINEAR_TOPK(bf16)
 *            T is f32, f16 or bf16. Make a context for each device, and for each host thread that calls at the same time;
 *            lk_linear_topk_destroy(&context) frees it at the end:
 *                lk_linear_topk_context context;
 *                lk_status status = lk_linear_topk_init(&context);
 *            Then, asynchronously on the caller's stream, in a graph too:
 *                lk_linear_topk_args args = {};
 *                args.context = &context, args.x = x, args.weight = weight;
 *                args.tokens = tokens, args.hidden = hidden, args.vocab = vocab, args.k = 32;
 *                args.ids = ids, args.logp = logp;
 *                status = lk_linear_topk_forward_workspace_bytes_bf16(&args, &args.workspace_bytes);
 *                args.workspace = ...;                  // that many bytes, aligned to 128
 *                status = lk_linear_topk_forward_bf16(&args, stream);
 *            The workspace function answers what the fastest plan within a sixteenth of the device's memory (without a device
 *            1 GiB) needs, or the smallest plan if that needs more. For another amount of memory, ask for a plan:
 *                lk_linear_topk_plan plan;
 *                status = lk_linear_topk_forward_plan_bf16(&args, budget, &plan);   puts(plan.text);
 *                args.workspace = ..., args.workspace_bytes = plan.workspace_bytes;
 * Needs      lk_base.cuh, lk_check.cuh, lk_cublas.cuh, lk_head.cuh, lk_head_plan.cuh, lk_loss.cuh, lk_move.cuh, lk_ranks.cuh,
 *            lk_row.cuh, lk_ptx.cuh; cuBLASLt.
 * Options    Zero is off: with context, x, weight, the sizes, k, one output and the workspace, z is the plain logit.
 *            There is no backward. Pass the ids to linear_cross_entropy_ids.cuh for a gradient of these log-probabilities, or
 *            to linear_support.cuh, which takes the softmax over the k ids alone.
 *            bias = -inf masks a column; a masked column comes after all others, with logp -inf. With a softcap nothing is
 *            masked: z is -softcap there. NaN comes before all numbers.
 *            A token with a NaN logit has lse NaN. Without a softcap, one with a logit of +inf and no NaN has lse +inf, and one
 *            whose logits are all -inf has lse -inf. All logp of these tokens are NaN. Their ids are still in order.
 *            Temperature t: pass logit_scale / t as logit_scale, 1 / t if it was 1. With a softcap pass softcap / t too. Where a
 *            softcap rounds two logits to one z, the larger logit still comes first, without seed.
 *            seed: ids are drawn. A token's noise v follows from its seed, its offset and the column alone, not from the batch or the
 *            token's place in it. So give each token a pair of its own: one seed for all, and the position as offset, say.
 *            v[t,j] = b 2^-32 + 2^-33, at most 1 - 2^-24; b and the sum are rounded to f32. b is word j % 4 of Philox4x32-10 with
 *            the key seed[t] and the counter (j / 4, 0, offset[t]), lower words first. j counts from the first column of all ranks,
 *            so vocab_start must be a multiple of 4. A masked column is drawn only after all others whose z is finite. lse and logp
 *            are those of the whole distribution, also of the second draw. For a draw within the top k, call without seed, and draw
 *            from that call's logp.
 *            score: what the order follows, z + g with seed, else z.
 * Ranks      Each rank has the columns from vocab_start on. It calls with k, or with its number of columns if that is smaller. Then
 *            all-gather ids, score and lse, with seed logp too. Where a rank has fewer than k, what lies behind its own is left out.
 *            The lse of all columns is the logarithm of the sum of exp(lse) over the ranks. ids are those of the k largest scores of
 *            all ranks; of equal ones, the rank with the smaller vocab_start comes first; NaN comes before all numbers. logp is z
 *            minus the lse of all columns. z is score; with seed it is logp + lse, and -inf where lse is -inf.
 * Exact      cuBLASLt sums logits in f32. If two logits differ by less than its rounding, their order is not sure. z + g is rounded to
 *            f32, and of equal ones the smallest column comes first: of two equal z of 2e7 the first is drawn seven times in ten. v has
 *            32 bits, so a column with p below 2^-32 is drawn too rarely or too often. Given these logits, lse and logp are off by at most (12 + sum_j p[j] (max z - z[j]) + vocab / 2048) 2^-23, with p[j] = exp(z[j] - lse), and by
 *            a rounding of their own, lse by two with a logit_scale. A softcap adds 2^-20 of the largest |z|.
 * Repeatable The same bits every time for the same shapes, strides, alignment of pointers (modulo 256) and workspace size: a matmul
 *            has the algorithm that cuBLASLt's heuristic names first. Results may depend on the number of tokens.
 * Source     Draws: Gumbel, 1954; without replacement: Vieira, 2014; Philox: Salmon et al., "Parallel random numbers: as easy as 1,
 *            2, 3", 2011. Chunks of tokens: Liger-Kernel, 2024. A threshold that rises while a row is read is common in top-k kernels.
 * Read on    bench/results/choices/linear_topk.md: what else was tried, with numbers.
 *
 * What runs. Tokens come in chunks. For each chunk cuBLASLt computes the logits, in f32 in the workspace, and lk_topk_kernel reads
 * them. A block has a row, the logits of one token. It reads the row once, tile by tile; it reads it again if there is no softcap and a
 * NaN, +inf or very large numbers are in it. Its threads sum exponentials. A logit that may be among the k largest becomes a key in
 * shared memory, a whole number of 64 bits: a larger logit has a larger key, and of equal logits the smaller column has it. When there
 * are more than 2 k + 32 keys, the k largest stay. From then on a key must be larger than the k-th.
 * The first threshold comes before the first key. Each of 128 pairs of threads has the largest logit of its first 16 columns. At least
 * k logits are as large as the k-th largest of these maxima, so no smaller logit can be a result; equal ones still count.
 * With seed a key has z + g in place of the logit. Since -log(1 - v) >= v, a column with v > exp(z - threshold) is no result: so few
 * columns need the logarithms. In the first tile all do.
 * If logits have no order, keys are dropped about five times in a row of 151936. If they rise all the time, several times in a tile.
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LINEAR_TOPK_CUH
#define LK_LINEAR_TOPK_CUH

/* The cuBLASLt handle and the algorithms that were chosen; no device memory. The caller owns it. One host thread at a time uses
 * it, on the device that was current at init. It may not be moved or copied between init and destroy. */
typedef struct {
    uint64_t opaque[2048];
} lk_linear_topk_context;

LK_API lk_status lk_linear_topk_init(lk_linear_topk_context *context);
LK_API lk_status lk_linear_topk_destroy(lk_linear_topk_context *context);

/* What lk does within a workspace of some size. */
typedef struct {
    size_t workspace_bytes; /* what the plan uses, cublas_bytes included; no more than the budget */
    size_t minimum_bytes;   /* the smallest workspace that the call accepts; its plan is slower */
    size_t cublas_bytes;    /* cuBLASLt's part of workspace_bytes */
    int64_t chunk_tokens, chunks; /* tokens whose logits exist at a time; number of chunks */
    char text[300];         /* all of this in words */
} lk_linear_topk_plan;

typedef struct {
    lk_linear_topk_context *context; /* in and out, from init; one call at a time */
    const void *x;          /* in    T [tokens, hidden] */
    const void *weight;     /* in    T [vocab, hidden] */
    const void *bias;       /* in    T [vocab]; NULL: none */
    void *ids;              /* out   ids_dtype [tokens, k]; NULL to skip */
    float *logp;            /* out   f32 [tokens, k]; NULL to skip */
    float *lse;             /* out   f32 [tokens]; NULL to skip */
    float *score;           /* out   f32 [tokens, k]; NULL to skip */
    const uint64_t *seed;   /* in    u64 [tokens]; NULL: no draw, the k largest */
    const uint64_t *offset; /* in    u64 [tokens]; NULL: 0. Only with seed */
    void *workspace;        /* scratch, aligned to LK_WORKSPACE_ALIGNMENT bytes; NULL when 0 */
    size_t workspace_bytes; /* at least a plan's minimum_bytes; it chooses the plan. More is faster, or the same */
    int64_t tokens;         /* 0 to 2^31 - 1 */
    int64_t hidden;         /* 1 to 2^30 */
    int64_t vocab;          /* 1 to 2^30 */
    int64_t x_stride;       /* elements between rows; 0 means packed */
    int64_t weight_stride;  /* as x_stride */
    int64_t chunk_tokens;   /* tokens of a chunk; 0: lk chooses */
    int64_t vocab_start;    /* 0 to 2^30; added to each id */
    float logit_scale;      /* 2^-100 to 2^100; 0 means 1 */
    float softcap;          /* 0: off; else 2^-100 to 2^100, and so is logit_scale / softcap */
    int k;                  /* 1 to 64, and at most vocab */
    int ids_dtype;          /* LK_TARGET_*; 0: int64 */
    int tf32;               /* not 0: matmuls of T = f32 may round their factors to TF32 */
} lk_linear_topk_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md:
 *   LK_ERR_NULL       args, plan, context, x or weight is NULL, or all outputs are, or seed is and offset is not. With tokens = 0
 *                     all except for args and plan may be NULL
 *   LK_ERR_SHAPE      tokens, hidden, vocab, k or vocab_start out of range; with seed, vocab_start is no multiple of 4; a
 *                     stride that is not 0 and below its row; a tensor that spans more than 2^62 elements; chunk_tokens below 0
 *   LK_ERR_VALUE      logit_scale or softcap out of range; ids_dtype is none of its enum; a context that init has not made, or of
 *                     another device
 *   LK_ERR_ALIGNMENT  a pointer is not aligned to its element
 *   LK_ERR_WORKSPACE  workspace_bytes, or a plan's budget, is below the smallest; workspace is NULL or not aligned to
 *                     LK_WORKSPACE_ALIGNMENT bytes
 *   LK_ERR_CUBLAS     cuBLASLt has no algorithm for a matmul: nothing was launched. Or it failed to launch one: outputs are
 *                     undefined. lk_last_error says which
 * Matmuls are fastest where x and weight start at multiples of 16 bytes and hidden is a multiple of 8. */
#define LK_LINEAR_TOPK_FUNCTIONS(X, T) X##_PLANNED(linear_topk, forward, LK_FORWARD, linear_topk, T)
#define LK_DECLARE_LINEAR_TOPK(T) LK_DECLARE(LINEAR_TOPK, T)
#define LK_DEFINE_LINEAR_TOPK(T) LK_DEFINE(LINEAR_TOPK, T)

#if LK_CUDA

#include "lk_check.cuh"
#include "lk_head.cuh"
#include "lk_loss.cuh"

/* ---- A call, and its plan ------------------------------------------------------------------------------------------------ */

struct lk_linear_topk_call {
    typedef lk_linear_topk_args args;
    lk_linear_topk_args a; /* with every default filled in */
};
typedef lk_head_work<lk_linear_topk_call> lk_topk_work;
typedef lk_head_job<lk_linear_topk_call> lk_topk_job;

/* What the plan of a call follows from. */
template <class T> LK_HOST lk_head_shape lk_topk_shape(const lk_linear_topk_args &a)
{
    lk_head_shape s = {};
    s.rows = a.tokens, s.hidden = a.hidden, s.vocab = s.classes = a.vocab, s.chunk_tokens = lk_head_min(a.chunk_tokens, a.tokens);
    s.type = s.dweight_dtype = lk_dtype<T>, s.logits_type = LK_DTYPE_F32, s.why_not_fused = "";
    s.no_panels = s.no_targets = true, s.bias = a.bias, s.tf32 = a.tf32;
    return s;
}

/* ---- The k largest of a row ---------------------------------------------------------------------------------------------- */

#define LK_TOPK_MOST 64 /* ids of a token */
#define LK_TOPK_VECS 2  /* of a thread at a time */
#define LK_TOPK_COLS (LK_TOPK_VECS * LK_VEC<float>)
#define LK_TOPK_KEYS 512 /* room for keys */
#define LK_TOPK_FIRST 128 /* maxima, each of two threads; no fewer than LK_TOPK_MOST, since the first threshold is the k-th of them */
#define LK_TOPK_THREADS 256
#define LK_TOPK_MANY_THREADS 1024 /* where there are no more rows than SMs */
#define LK_TOPK_BLOCKS(threads, draws) \
    ((threads) > LK_TOPK_THREADS ? 1 : (draws) || LK_ARCH >= 1000 ? 3 : 4) /* per SM: as registers allow */

/* The keys of logits that may be among the k largest. lk_ce_top computes them from a logit and its column, so no two are equal. They
 * lie in key[place], and place changes whenever keys are dropped. */
typedef struct {
    int64_t key[2][LK_TOPK_KEYS];
    int count; /* those that stayed, and those offered since; above LK_TOPK_KEYS some found no room */
} lk_topk_keys;

/* Moves the k largest keys to the other place, the largest first: a key's index there is the number of larger keys. Called by: all
 * threads of the block, between barriers. */
LK_DEVICE void lk_topk_keep(lk_topk_keys *keys, int from, int count, int k)
{
    for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) {
        const int64_t own = keys->key[from][i];
        int larger = 0;
        LK_UNROLL_BY(8) for (int j = 0; j < count; j++) larger += keys->key[from][j] > own;
        if (larger < k) keys->key[1 - from][larger] = own;
    }
}

/* No logit below the result has a key above this one. The result may be NaN: then the key alone decides. */
LK_DEVICE float lk_topk_floor(int64_t key)
{
    const int32_t order = (int32_t)(key >> 32);
    return __int_as_float(order < 0 ? order ^ 0x7fffffff : order); /* lk_ce_order, backwards */
}

/* The first column of vector u of this thread, in the tile that begins at column `first`. */
LK_DEVICE int lk_topk_col(int first, int u) { return first + (u * (int)blockDim.x + (int)threadIdx.x) * LK_VEC<float>; }

/* Loads a thread's vectors of a tile. */
LK_DEVICE void lk_topk_load(lk_vec<float> (&raw)[LK_TOPK_VECS], const float *row, int first, int vocab)
{
    LK_UNROLL for (int u = 0; u < LK_TOPK_VECS; u++)
        if (lk_topk_col(first, u) < vocab) raw[u] = lk_load_vec(row + lk_topk_col(first, u)); /* rows have room for whole vectors */
}

/* What a thread has of a tile. */
typedef struct {
    float x[LK_TOPK_COLS];
} lk_topk_part;

/* Offers the columns whose bits are set in `left`, where their keys are above `least`; returns a bit for each column that found no room,
 * and LK_TOPK_FULL where there are more than `full` keys. A function of its own: inline, ptxas computes the keys of all logits, and few
 * are needed. */
#define LK_TOPK_FULL (1u << 31)
LK_NOINLINE unsigned lk_topk_offer(lk_topk_keys *keys, int place, lk_topk_part part, unsigned left, int first, int64_t least, int full)
{
    unsigned rest = 0;
    LK_UNROLL for (int i = 0; i < LK_TOPK_COLS; i++) {
        if (!(left >> i & 1)) continue;
        const int64_t key = lk_ce_top(part.x[i], lk_topk_col(first, i / LK_VEC<float>) + i % LK_VEC<float>);
        if (key <= least) continue;
        const int at = atomicAdd(&keys->count, 1);
        if (at < LK_TOPK_KEYS) keys->key[place][at] = key;
        else rest |= 1u << i;
        if (at >= full) rest |= LK_TOPK_FULL;
    }
    return rest;
}

/* Adds the vector of columns col to col + 3, with a running maximum; softcap 0: none. A function of its own, since that takes fewer
 * registers where it is used. */
LK_NOINLINE lk_lse lk_topk_add(lk_lse s, lk_vec<float> raw, int col, int vocab, float logit_scale, float softcap)
{
    float v[LK_VEC<float>], slope[LK_VEC<float>];
    lk_unpack(v, raw);
    if (softcap > 0.0f) lk_ce_cap<true>(v, slope, logit_scale, softcap);
    LK_UNROLL for (int j = 0; j < LK_VEC<float>; j++) v[j] = col + j < vocab ? v[j] : -INFINITY;
    return lk_lse_add(s, v, softcap > 0.0f ? 1.0f : logit_scale);
}

/* ---- Draws --------------------------------------------------------------------------------------------------------------- */

/* Philox4x32-10: 128 random bits of a counter and a key. */
LK_DEVICE uint4 lk_philox(uint4 counter, uint2 key)
{
    LK_UNROLL for (int round = 0; round < 10; round++) {
        const uint32_t low[2] = {0xd2511f53u * counter.x, 0xcd9e8d57u * counter.z};
        const uint32_t high[2] = {__umulhi(0xd2511f53u, counter.x), __umulhi(0xcd9e8d57u, counter.z)};
        counter = make_uint4(high[1] ^ counter.y ^ key.x, low[1], high[0] ^ counter.w ^ key.y, low[0]);
        key.x += 0x9e3779b9u, key.y += 0xbb67ae85u;
    }
    return counter;
}

/* What a thread's columns of a tile draw. */
typedef struct {
    uint32_t bits[LK_TOPK_COLS];
} lk_topk_drawn;

/* The bits of a thread's columns of the tile that begins at column `first`; start: vocab_start. */
LK_DEVICE lk_topk_drawn lk_topk_draw(int first, int64_t start, uint64_t seed, uint64_t offset)
{
    lk_topk_drawn drawn;
    LK_UNROLL for (int u = 0; u < LK_TOPK_VECS; u++) {
        const unsigned col = (unsigned)start + (unsigned)lk_topk_col(first, u);
        const uint4 counter = make_uint4(col / 4, 0, (uint32_t)offset, (uint32_t)(offset >> 32));
        const uint4 bits = lk_philox(counter, make_uint2((uint32_t)seed, (uint32_t)(seed >> 32)));
        const uint32_t each[4] = {bits.x, bits.y, bits.z, bits.w};
        LK_UNROLL for (int j = 0; j < 4; j++) drawn.bits[4 * u + j] = each[j];
    }
    return drawn;
}

/* v. */
LK_DEVICE float lk_topk_uniform(uint32_t bits) { return fminf(fmaf((float)bits, 0x1p-32f, 0x1p-33f), 1.0f - 0x1p-24f); }

/* z from logits under a softcap. A function of its own, as lk_topk_add. */
LK_NOINLINE lk_topk_part lk_topk_capped(lk_topk_part part, float logit_scale, float softcap)
{
    float slope[LK_TOPK_COLS];
    lk_ce_cap<true>(part.x, slope, logit_scale, softcap);
    return part;
}
/* z + g from z, of the columns whose bits are set in `which`; few are. The others stay. */
LK_NOINLINE lk_topk_part lk_topk_scores(lk_topk_part part, lk_topk_drawn drawn, unsigned which)
{
    LK_UNROLL for (int i = 0; i < LK_TOPK_COLS; i++)
        if (which >> i & 1) part.x[i] -= logf(-log1pf(-lk_topk_uniform(drawn.bits[i])));
    return part;
}

/* The columns that may have z + g of at least `floor`; part: z. Where v is above the bound, g is too small, whatever the rounding. */
LK_DEVICE unsigned lk_topk_may_count(const lk_topk_part &part, const lk_topk_drawn &drawn, float floor)
{
    const float power = LK_LOG2E * floor, from = fmaf(fabsf(power), 0x1p-20f, 0x1p-10f) - power;
    unsigned which = 0;
    LK_UNROLL for (int i = 0; i < LK_TOPK_COLS; i++)
        which |= (unsigned)!(lk_topk_uniform(drawn.bits[i]) > lk_ex2(fmaf(LK_LOG2E, part.x[i], from))) << i;
    return which;
}

/* ---- The kernel ---------------------------------------------------------------------------------------------------------- */

/* A block owns a row of a chunk. Sums are as in lk_lse_read. The lanes of a warp begin with one reference; then each thread raises its
 * own. */
template <int Threads, bool draws>
LK_KERNEL void __launch_bounds__(Threads, LK_TOPK_BLOCKS(Threads, draws)) lk_topk_kernel(const __grid_constant__ lk_topk_work p)
{
    constexpr int Num = LK_VEC<float>, Tile = Threads * LK_TOPK_COLS;
    LK_SHARED(lk_topk_keys, keys, [1]);
    LK_SHARED(lk_lse_inbox<Threads>, inbox, [1]);
    const lk_linear_topk_args &a = p.call.a;
    const int64_t row = blockIdx.x, token = p.first_row + row;
    const int vocab = (int)a.vocab;
    const float *const logits = (const float *)p.ws.logits + row * p.ws.logits_stride;
    const bool cap = a.softcap > 0.0f;
    const float scale = cap ? 1.0f : a.logit_scale, rate = scale * LK_LOG2E;
    const int full = 2 * a.k + 32; /* keys are dropped when there are more */
    int64_t least = INT64_MIN; /* keys above it count */
    float floor = 0.0f;        /* its logit: no smaller logit has such a key */
    float reference = -INFINITY, base = 0.0f, sum = 0.0f; /* -inf: there was no other logit */
    int place = 0;             /* of the keys */
    lk_lse s = lk_lse_empty();
    lk_vec<float> raw[LK_TOPK_VECS] = {};
    if (threadIdx.x == 0) keys->count = 0;
    lk_inbox_begin<LK_TEAM_BLOCK, true>(inbox);
    lk_griddepcontrol_wait();
    const uint64_t seed = draws ? a.seed[token] : 0, offset = draws && a.offset ? a.offset[token] : 0;
    lk_topk_load(raw, logits, 0, vocab);
    for (int first = 0; first < vocab; first += Tile) {
        lk_topk_part part;
        unsigned there = (1u << LK_TOPK_COLS) - 1; /* a bit for each column: it is one of the row's */
        LK_UNROLL for (int u = 0; u < LK_TOPK_VECS; u++) {
            float v[Num];
            lk_unpack(v, raw[u]);
            if (cap) s = lk_topk_add(s, raw[u], lk_topk_col(first, u), vocab, a.logit_scale, a.softcap);
            LK_UNROLL for (int j = 0; j < Num; j++) part.x[u * Num + j] = v[j];
        }
        lk_topk_load(raw, logits, first + Tile, vocab);
        if (first + Tile > vocab) {
            LK_UNROLL for (int i = 0; i < LK_TOPK_COLS; i++)
                if (lk_topk_col(first, i / Num) + i % Num >= vocab) there &= ~(1u << i), part.x[i] = -INFINITY;
        }
        const float most = lk_ce_most(part.x);
        lk_topk_part score = part;
        lk_topk_drawn drawn;
        float best = most;
        if constexpr (draws) {
            drawn = lk_topk_draw(first, a.vocab_start, seed, offset);
            if (cap) score = lk_topk_capped(part, a.logit_scale, a.softcap);
            LK_UNROLL for (int i = 0; i < LK_TOPK_COLS; i++) {
                if (!cap) score.x[i] *= scale;
                if (!(there >> i & 1)) score.x[i] = -INFINITY;
            }
            if (first == 0) score = lk_topk_scores(score, drawn, there), best = lk_ce_most(score.x);
        }
        if (first == 0) { /* at least k logits are as large as the k-th largest of the pairs' maxima */
            const int64_t pair = lk_ce_top_warp((int64_t)((uint64_t)(uint32_t)lk_ce_order(best) << 32 | threadIdx.x), 2);
            if (threadIdx.x % 2 == 0 && threadIdx.x < 2 * LK_TOPK_FIRST) keys->key[0][threadIdx.x / 2] = pair;
            __syncthreads(); /* the maxima are written, and the count */
            lk_topk_keep(keys, 0, LK_TOPK_FIRST, a.k);
            __syncthreads(); /* orders the writes of the largest before their reads */
            least = (keys->key[1][a.k - 1] >> 32) * ((int64_t)1 << 32) - 1, floor = lk_topk_floor(least);
            const float top = lk_max_warp(most); /* the lanes agree on a reference */
            if (lk_is_finite(top)) reference = top, base = rate * top;
        }
        if (!cap) {
            if (most != -INFINITY && (reference == -INFINITY || !(fmaf(rate, most, -base) <= 2.0f))) { /* few vectors raise it */
                const float before = base;
                base = rate * most, sum = reference == -INFINITY ? 0.0f : sum * lk_ex2(before - base), reference = most;
            }
            float term[LK_TOPK_COLS];
            LK_UNROLL for (int i = 0; i < LK_TOPK_COLS; i++) term[i] = lk_ex2(fmaf(rate, part.x[i], -base));
            LK_UNROLL for (int n = LK_TOPK_COLS / 2; n > 0; n /= 2)
                LK_UNROLL for (int i = 0; i < n; i++) term[i] += term[i + n];
            sum += term[0];
        }
        unsigned left = 0; /* columns whose keys may count */
        if (draws && first > 0) {
            left = lk_topk_may_count(score, drawn, floor) & there;
            if (left) score = lk_topk_scores(score, drawn, left);
        } else if (!(best < floor)) {
            LK_UNROLL for (int i = 0; i < LK_TOPK_COLS; i++) left |= (unsigned)!(score.x[i] < floor) << i;
            left &= there;
        }
        for (;;) {
            if (left) left = lk_topk_offer(keys, place, score, left, first, least, full);
            if (!__syncthreads_or(left != 0)) break; /* orders the keys before their reads */
            lk_topk_keep(keys, place, keys->count < LK_TOPK_KEYS ? keys->count : LK_TOPK_KEYS, a.k);
            __syncthreads(); /* orders the writes of the largest before their reads, and the reads of the count before its write */
            place = 1 - place, least = keys->key[place][a.k - 1], floor = lk_topk_floor(least), left &= ~LK_TOPK_FULL;
            if (threadIdx.x == 0) keys->count = a.k;
            __syncthreads(); /* the count is right */
        }
    }
    const bool some = !cap && reference != -INFINITY, fast = fabsf(base) < LK_LSE_BASE && sum < LK_LSE_LIMIT;
    if (some && fast && sum > 0.0f) s = {reference, sum * lk_ex2(-fmaf(rate, reference, -base))}; /* 0: the reference is another lane's */
    if (some && !fast) { /* a NaN, an infinity, or very large numbers */
        for (int first = 0; first < vocab; first += Tile) {
            lk_topk_load(raw, logits, first, vocab);
            LK_UNROLL for (int u = 0; u < LK_TOPK_VECS; u++)
                s = lk_topk_add(s, raw[u], lk_topk_col(first, u), vocab, a.logit_scale, 0.0f);
        }
    }
    s = lk_lse_team<LK_TEAM_BLOCK, true>(inbox, lk_lse_warp(s, 32, scale), scale);
    lk_topk_keep(keys, place, keys->count, a.k);
    __syncthreads(); /* orders the writes of the largest before their reads */
    const int i = (int)threadIdx.x;
    if (i >= a.k) return;
    const int64_t own = keys->key[1 - place][i];
    const int col = lk_ce_top_col(own);
    lk_ce_row state = lk_ce_row_empty();
    float slope, logit = logits[col];
    if (cap) logit = lk_ce_cap(logit, a.logit_scale, a.softcap, &slope);
    state.max = s.max, state.sum = s.sum, state.target = logit;
    const lk_ce_result r = lk_ce_row_finish<false>(state, {scale, 0.0f, 0.0f, 1.0f, vocab});
    const int64_t to = token * a.k + i;
    if (a.logp) a.logp[to] = 0.0f - r.class_loss;
    if (a.lse && i == 0) a.lse[token] = r.lse;
    if (a.score) a.score[to] = draws ? lk_topk_floor(own) : scale * logit;
    if (a.ids && a.ids_dtype == LK_TARGET_INT32) ((int32_t *)a.ids)[to] = (int32_t)(a.vocab_start + col);
    else if (a.ids) ((int64_t *)a.ids)[to] = a.vocab_start + col;
}

/* ---- The context --------------------------------------------------------------------------------------------------------- */

static_assert(sizeof(lk_cublas_context) <= sizeof(lk_linear_topk_context), "the opaque struct is large enough");

LK_CUBLAS_CONTEXT(linear_topk)

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

/* Validates a call, fills it in and begins its plan. A query looks at shapes and options; its pointers say what is wanted. */
template <class T>
LK_HOST lk_status lk_topk_check(const char *op, const lk_linear_topk_args *args, bool query, lk_linear_topk_call *call,
                                lk_head_planner *planner)
{
    *call = {};
    lk_linear_topk_args *const a = &call->a;
    *a = *args;
    const bool some = a->tokens != 0, wide = a->ids_dtype != LK_TARGET_INT32;
    const int64_t tokens = a->tokens, vocab = some ? a->vocab : 0, outputs = lk_count(tokens, a->k), most = (int64_t)1 << 30;
    const lk_tensor list[] = {
        {"x", a->x, sizeof(T), LK_REQUIRED, a->hidden, {{tokens, &a->x_stride, "x_stride"}}},
        {"weight", a->weight, sizeof(T), LK_REQUIRED, a->hidden, {{vocab, &a->weight_stride, "weight_stride"}}},
        {"bias", a->bias, sizeof(T), LK_IN, vocab},
        {"ids", a->ids, wide ? 8 : 4, LK_OUT, outputs},
        {"logp", a->logp, 4, LK_OUT, outputs},
        {"lse", a->lse, 4, LK_OUT, tokens},
        {"score", a->score, 4, LK_OUT, outputs},
        {"seed", a->seed, 8, LK_IN, tokens},
        {"offset", a->offset, 8, LK_IN, tokens},
        lk_workspace(a->workspace, some ? a->workspace_bytes : 0),
    };
    const int count = LK_COUNT(list);
    lk_checks checks = {op, LK_OK};
    if (!query && some && !a->context) lk_reject(&checks, LK_ERR_NULL, "context is NULL");
    if (some && a->offset && !a->seed) lk_reject(&checks, LK_ERR_NULL, "seed is NULL, but offset is given");
    lk_check_size(&checks, "tokens", tokens, 0, INT32_MAX);
    lk_check_size(&checks, "hidden", a->hidden, 1, most);
    lk_check_size(&checks, "vocab", a->vocab, 1, most);
    if (!lk_rejected(&checks, LK_ERR_SHAPE)) lk_check_size(&checks, "k", a->k, 1, lk_head_min(LK_TOPK_MOST, a->vocab));
    lk_check_size(&checks, "vocab_start", a->vocab_start, 0, most);
    if (a->seed && a->vocab_start % 4 && !lk_rejected(&checks, LK_ERR_SHAPE))
        lk_reject(&checks, LK_ERR_SHAPE, "vocab_start is %lld; with seed it must be a multiple of 4", (long long)a->vocab_start);
    lk_check_size(&checks, "chunk_tokens", a->chunk_tokens, 0, INT64_MAX);
    lk_check_shapes(&checks, list, count, query);
    if (a->logit_scale == 0.0f) a->logit_scale = 1.0f;
    const float scale = a->logit_scale, cap = a->softcap;
    lk_check_number(&checks, "logit_scale", (double)scale, scale >= 0x1p-100f && scale <= 0x1p100f, "2^-100 to 2^100, or 0");
    lk_check_number(&checks, "softcap", (double)cap, cap == 0.0f || (cap >= 0x1p-100f && cap <= 0x1p100f), "2^-100 to 2^100, or 0");
    lk_check_number(&checks, "logit_scale over softcap", (double)(scale / cap),
                    cap == 0.0f || (scale / cap >= 0x1p-100f && scale / cap <= 0x1p100f), "2^-100 to 2^100");
    lk_check_enum(&checks, "ids_dtype", a->ids_dtype, LK_TARGET_INT32, "LK_TARGET_*");
    if (!checks.status && !query && some) checks.status = lk_cublas_check(op, (const lk_cublas_context *)a->context);
    if (checks.status) return checks.status;

    if (tokens <= 1) a->x_stride = lk_head_round_up(a->hidden, 8); /* of one row; so a matmul does not depend on it */
    const lk_head_shape shape = lk_topk_shape<T>(*a);
    lk_head_plan_begin(planner, &shape);
    if (!query) {
        lk_check_alignment(&checks, list, count);
        lk_check_workspace(&checks, a->workspace, a->workspace_bytes, planner->least);
        lk_check_warn(&checks, !some, "tokens is 0; nothing is computed");
        lk_check_allocations(&checks, list, count);
    }
    return checks.status;
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* The rows of a chunk. */
LK_HOST lk_status lk_topk_launch(lk_topk_job *job, const lk_topk_work &chunk)
{
    const bool draws = job->p.call.a.seed, many = chunk.rows > job->device.sms;
    void (*const kernels[2][2])(lk_topk_work) = {
        {lk_topk_kernel<LK_TOPK_MANY_THREADS, false>, lk_topk_kernel<LK_TOPK_MANY_THREADS, true>},
        {lk_topk_kernel<LK_TOPK_THREADS, false>, lk_topk_kernel<LK_TOPK_THREADS, true>}};
    return lk_launch_pdl(job->op, &job->device, kernels[many][draws], chunk.rows, 1, many ? LK_TOPK_THREADS : LK_TOPK_MANY_THREADS, 0,
                         job->stream, chunk);
}

/* All chunks, in the job's mode. */
template <class T> LK_HOST lk_status lk_topk_run_all(lk_topk_job *job)
{
    const lk_linear_topk_args &a = job->p.call.a;
    const lk_head_workspace &ws = job->p.ws;
    const int64_t chunks = job->plan.chunks;
    lk_status status = LK_OK;
    if (ws.bias) status = lk_head_move_rows<T, float>(job, {a.bias, ws.bias, NULL, NULL, 1, a.vocab, a.vocab, a.vocab, 0, NULL});
    if (ws.tail && !status)
        status = lk_head_launch(job, lk_head_tail_kernel<T, lk_linear_topk_call>, lk_ceil_div(8 * a.hidden, LK_HEAD_THREADS), job->p);
    for (int64_t i = 0; i < chunks && !status; i = lk_cublas_next(job->mode, i, chunks)) {
        const lk_topk_work chunk = lk_head_panel_at(job, i, 0);
        status = lk_head_logits<T>(job, chunk);
        if (!status && job->mode == LK_CUBLAS_LAUNCH)
            status = lk_topk_launch(job, chunk);
    }
    return status;
}

template <class T, lk_direction>
LK_HOST lk_status lk_linear_topk_run(const char *op, const lk_linear_topk_args *args, cudaStream_t stream)
{
    lk_topk_job job = {};
    const cudaError_t error = lk_current_device(&job.device);
    lk_linear_topk_call &call = job.p.call;
    lk_head_planner planner;
    lk_checks checks = {op, lk_topk_check<T>(op, args, false, &call, &planner)};
    lk_check_device(&checks, error);
    if (checks.status || call.a.tokens == 0) return checks.status;
    job.op = op, job.stream = stream, job.shape = planner.shape;
    lk_head_choose(&planner, call.a.workspace_bytes, &job.plan);
    job.p.ws = lk_head_lay_out(&job.shape, &job.plan, call.a.workspace);
    lk_status status = LK_OK;
    for (job.mode = LK_CUBLAS_RESOLVE; job.mode <= LK_CUBLAS_LAUNCH && !status; job.mode++) status = lk_topk_run_all<T>(&job);
    return status;
}

/* The plan within a budget; least: or the smallest, where that is more. */
template <class T>
LK_HOST lk_status lk_linear_topk_query_plan(const char *op, const lk_linear_topk_args *args, lk_direction, size_t budget, bool least,
                                            lk_linear_topk_plan *answer)
{
    lk_linear_topk_call call;
    lk_head_planner planner;
    lk_head_plan plan;
    lk_status status = lk_topk_check<T>(op, args, true, &call, &planner);
    if (!status) status = lk_head_query(op, &planner, 0, budget, least, &plan);
    if (status) return status;
    *answer = {};
    answer->workspace_bytes = plan.workspace_bytes, answer->minimum_bytes = planner.least, answer->cublas_bytes = plan.cublas_bytes;
    answer->chunk_tokens = plan.chunk_tokens, answer->chunks = plan.chunks;
    lk_head_describe(&planner.shape, &plan, answer->text, sizeof answer->text);
    return LK_OK;
}

#endif /* CUDA or the simulator */
#endif
