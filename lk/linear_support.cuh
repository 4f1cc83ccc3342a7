// SPDX-License-Identifier: MIT
/* linear_support.cuh - log-probabilities over a support. The support of a token is a list of ids, for example those that a
 * sampler's top-p and top-k kept. lk computes only their logits, and a softmax over them. No matmul over the vocabulary.
 *
 *   S[t]            the entries of token t: offsets[t] to offsets[t+1] - 1. Entry e has the id ids[e], a row of weight
 *   logits[e]       = sum_d x[t,d] weight[ids[e],d] + bias[ids[e]], or full_logits[t,ids[e]] where a tensor has the logits of all ids
 *   z[e]            = logit_scale logits[e], or with the option softcap: softcap * tanh(logit_scale logits[e] / softcap)
 *   lse[t]          = log sum_{e in S[t]} exp(z[e])
 *   support_logp[e] = z[e] - lse[t],  p[e] = exp(support_logp[e])
 *   logp[t]         = support_logp of the first entry of t with ids[e] = target[t]
 *   entropy[t]      = -sum_e p[e] support_logp[e]
 *   kl[t]           = sum_e q[e] (teacher_logp[e] - support_logp[e]),  q[e] = exp(teacher_logp[e])
 * backward:
 *   u[e]            = dsupport_logp[e] - dkl[t] q[e]; plus dlogp[t] if e is the entry of logp[t]
 *   dz[e]           = u[e] + p[e] (dlse[t] - sum_{f in S[t]} u[f]) - dentropy[t] p[e] (support_logp[e] + entropy[t])
 *   dlogits[e]      = logit_scale dz[e], with a softcap times 1 - (z[e] / softcap)^2
 *   dx[t,d]         = sum_{e in S[t]} dlogits[e] weight[ids[e],d]
 *   dweight[j,d]    = sum_{e: ids[e] = j} dlogits[e] x[t,d],  dbias[j] = sum_{e: ids[e] = j} dlogits[e];
 *                     with accumulate added to their old contents
 *   dfull_logits[t,j] = sum_{e in S[t]: ids[e] = j} dlogits[e], 0 for other j; with accumulate added to the old contents
 *
 * Use        In one .cu file:                              Anywhere, C included:
 *                #include "lk/linear_support.cuh"              #include "lk/linear_support.cuh"
 *                LK_DEFINE_LINEAR_SUPPORT(bf16)                LK_DECLARE_LINEAR_SUPPORT(bf16)
 *            T is f32, f16 or bf16. Then, asynchronously on the caller's stream, in a graph too:
 *                lk_linear_support_args args = {};
 *                args.x = x, args.weight = weight, args.offsets = offsets, args.ids = ids, args.target = target;
 *                args.tokens = tokens, args.hidden = hidden, args.vocab = vocab, args.entries = entries;
 *                args.logits = (float *)logits, args.logp = logp;
 *                lk_status status = lk_linear_support_forward_workspace_bytes_bf16(&args, &args.workspace_bytes);
 *                args.workspace = ...;                                    // that many bytes, aligned to 128
 *                status = lk_linear_support_forward_bf16(&args, stream);
 *                args.dlogp = dlogp, args.dx = dx, args.dweight = dweight;
 *                status = lk_linear_support_backward_workspace_bytes_bf16(&args, &args.workspace_bytes);
 *                args.workspace = ...;
 *                status = lk_linear_support_backward_bf16(&args, stream);  // reads the logits of forward
 *            forward takes 8 bytes of workspace for each entry and 4 for each token, and without `logits` 4 more for each entry.
 *            backward takes 12 for each entry and 4 for each token. With dweight, dbias or dfull_logits it takes 12 more for each entry
 *            and up to 512 KiB, and with dweight hidden / 8 besides, and a bit for each row of weight: in all 270 MB for 500,000
 *            entries at hidden = 4096. Nothing in it lives from one call to the next, so all calls may share one workspace.
 * Needs      lk_base.cuh, lk_check.cuh, lk_loss.cuh, lk_row.cuh, lk_ptx.cuh.
 * Options    Zero is off. No offset is below the one before it; lk cannot say so where one is, but reads no wrong address. Entries
 *            before offsets[0], and from offsets[tokens] on, belong to no token. Their ids are not read, their support_logp is 0,
 *            and so are their logits where forward computes logits. An id that comes twice in a support is two entries; logp is of
 *            the first.
 *            Ignored token: use_ignore_index is not 0, and target[t] = ignore_index. Its results and its dx are 0, its ids are not
 *            read, and it adds nothing to dweight and dbias.
 *            Bad token: a token that is not ignored, and has no entry, or an id outside the vocabulary, or a target that is none of
 *            its ids. Its results are NaN. Its logits are 0 where forward computes logits. Its dx is 0 if its dlogp, dlse,
 *            dentropy, dkl and dsupport_logp are all 0, else NaN. It adds nothing to dweight and dbias. bad_targets counts it in
 *            each call, so in forward and in backward.
 *            bias = -inf masks an id: its p is 0, and its logp -inf. With a softcap nothing is masked: z is -softcap there. If
 *            all logits of a token are -inf, or one is +inf, both without a softcap, or one is NaN, then its results and its dx
 *            are NaN, and so are the rows of dweight that it adds to.
 *            teacher_logp may be -inf, where q is 0. The teacher's q need not add up to 1. If q is 1 at one id and 0 at the others,
 *            kl is a cross entropy. teacher_logp gets no gradient. kl is +inf where q is above 0 and p is 0. For another loss, such
 *            as the reverse KL, compute it from support_logp, and pass its gradient as dsupport_logp.
 *            Temperature t: pass logit_scale / t as logit_scale, 1 / t if it was 1. With a softcap pass softcap / t too.
 *            logits_given: forward reads logits and does not compute them. It does not use x, weight, bias and full_logits.
 *            full_logits: a tensor [tokens, vocab] has the logits of all ids, and there is no x, weight, bias and hidden. forward reads
 *            the logits of the ids from it. backward computes dfull_logits in place of dx, dweight and dbias; it may lie in
 *            full_logits itself, which backward does not read. What is said of dx above holds of a token's row of dfull_logits.
 *            accumulate: dweight and dbias, or dfull_logits, are added to. Without it all of dweight or dfull_logits is written,
 *            with zeros where no entry is.
 *            dweight_ids: dweight has the rows of the ids alone, one after another by rising id. Row k is that of row
 *            dweight_ids[k] of the weight, and dweight_rows says how many there are. What is behind them is not written. For an
 *            optimizer that updates these rows alone: a dense dweight of 151936 rows at hidden = 4096 has 1.2 GB in 16 bits.
 * Ranks      Each rank has the rows vocab_start to vocab_start + vocab - 1 of a weight of vocab_total rows; or these columns of the
 *            logits, with full_logits. ids and target are those of the whole vocabulary, the same on all ranks. Three steps; the
 *            second is yours, by NCCL for example:
 *                1. forward with `logits` as the only output. The logits of other ranks' ids are 0
 *                2. sum logits over the ranks: 4 bytes for each entry
 *                3. forward with logits_given and the other outputs: every rank has all results
 *            backward is called as without ranks. dweight and dbias are of this rank's rows, dfull_logits of its columns. dx is to be
 *            summed over the ranks.
 * Repeatable The same bits every time: fixed order, no float atomics. A token's results do not depend on the other tokens.
 *            Whether all rows start at multiples of 16 bytes may change bits.
 * Read on    lk/linear_support.md: how exact results are, and what is read and written.
 *
 * What runs:
 *   both      lk_support_begin_kernel: what the targets and offsets mean; the token and the row of weight of each entry
 *   forward   lk_support_logits_kernel: a warp per entry; of full_logits lk_support_gather_kernel: a thread per entry.
 *             lk_support_forward_kernel: a warp per token, the results
 *   backward  lk_support_backward_kernel: a warp per token, dlogits. lk_support_dx_kernel: a warp per token and slice of columns.
 *             dweight: the entries are sorted by id, lk_support_count_kernel and lk_support_sort_kernel for each 9 bits of an id.
 *             With dweight_ids lk_support_starts_kernel and lk_support_scan_kernel number the rows. lk_support_dweight_kernel: a
 *             warp per tile of LK_SUPPORT_TILE sorted entries and slice of columns; it also writes zeros to the rows of no entry.
 *             A run is all sorted entries of one id. A run inside one tile is written at once. If a run crosses tiles, its parts
 *             go to the workspace, and lk_support_runs_kernel adds them up
 *             dfull_logits: zeros and the same sort, then lk_support_scatter_kernel: a thread per sorted entry
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_LINEAR_SUPPORT_CUH
#define LK_LINEAR_SUPPORT_CUH

/* One struct for both calls. F: forward, B: backward; without a letter: both. A call ignores the fields of the other one. */
typedef struct {
    const void *x;              /*   in      T [tokens, hidden]; F: not used with logits_given; B: read for dweight alone */
    const void *weight;         /*   in      T [vocab, hidden]; F: not used with logits_given; B: read for dx alone */
    const void *full_logits;    /* F in      T [tokens, vocab], in place of x, weight and bias; NULL: not given */
    const void *bias;           /* F in      bias_dtype [vocab]; -inf masks an id, not under a softcap; NULL: none */
    const void *offsets;        /*   in      offsets_dtype [tokens + 1], each 0 to entries and not below the one before */
    const void *ids;            /*   in      target_dtype [entries] */
    const void *target;         /*   in      target_dtype [tokens]; NULL: none, and no logp */
    const float *teacher_logp;  /*   in      f32 [entries]; NULL: none, and no kl */
    float *logits;              /* F out, B in: f32 [entries]; F: in with logits_given; F: NULL to skip */
    float *logp;                /* F out     f32 [tokens]; NULL to skip, as the other outputs */
    float *lse;                 /* F out     f32 [tokens] */
    float *entropy;             /* F out     f32 [tokens] */
    float *kl;                  /* F out     f32 [tokens] */
    float *support_logp;        /* F out     f32 [entries] */
    int32_t *bad_targets;       /*   in, out int32 [1], zeroed by the caller: each call adds its bad tokens; NULL to skip */
    const float *dlogp;         /* B in      f32 [tokens], the gradient of logp; NULL: none, as the other gradients */
    const float *dlse;          /* B in      f32 [tokens] */
    const float *dentropy;      /* B in      f32 [tokens] */
    const float *dkl;           /* B in      f32 [tokens] */
    const float *dsupport_logp; /* B in      f32 [entries] */
    void *dx;                   /* B out     T [tokens, hidden]; NULL to skip */
    void *dweight;              /* B out     dweight_dtype [vocab, hidden], with dweight_ids [min(entries, vocab), hidden]; NULL to
                                             skip */
    void *dbias;                /* B out     dbias_dtype [vocab]; NULL to skip */
    void *dfull_logits;         /* B out     T [tokens, vocab], in place of dx, dweight and dbias; NULL to skip */
    int32_t *dweight_ids;       /* B out     int32 [min(entries, vocab)], the row of weight of each row of dweight; NULL: dense */
    int32_t *dweight_rows;      /* B out     int32 [1], how many rows of dweight there are, with dweight_ids */
    void *workspace;            /* scratch, aligned to LK_WORKSPACE_ALIGNMENT bytes */
    size_t workspace_bytes;     /* at least what the query answers */
    int64_t tokens;             /* 0 to 2^31 - 1 */
    int64_t hidden;             /* 1 to 2^30; with full_logits or dfull_logits not used */
    int64_t vocab;              /* 1 to 2^30; of a rank: 0 to 2^30 */
    int64_t entries;            /* 0 to 2^31 - 1 */
    int64_t x_stride;           /* elements between rows; 0 means packed, hidden */
    int64_t weight_stride;      /* as x_stride */
    int64_t dx_stride;          /* B as x_stride */
    int64_t dweight_stride;     /* B as x_stride */
    int64_t full_logits_stride; /* F elements between rows; 0 means packed, vocab */
    int64_t dfull_logits_stride; /* B as full_logits_stride */
    int64_t vocab_start;        /* ranks: the id of the first row of weight */
    int64_t vocab_total;        /* ranks: the rows of all ranks, at most 2^30; 0: no ranks */
    int64_t ignore_index;       /* any value if use_ignore_index is not 0; else 0 */
    float logit_scale;          /* 0 to 2^127; 0 means 1 */
    float softcap;              /* 0: off; else 2^-100 to 2^100, and so is logit_scale / softcap */
    int logits_given;           /* F not 0: logits is an input */
    int use_ignore_index;       /*   not 0: tokens with target = ignore_index are ignored */
    int accumulate;             /* B not 0: dweight and dbias, or dfull_logits, are added to their old contents */
    int offsets_dtype;          /* LK_TARGET_*; 0: int64 */
    int target_dtype;           /* of target and ids: LK_TARGET_*; 0: int64 */
    int bias_dtype;             /* F LK_DTYPE_*: T or f32; 0: T */
    int dweight_dtype;          /* B as bias_dtype */
    int dbias_dtype;            /* B as bias_dtype */
} lk_linear_support_args;

/* Errors, in the order of the checks, besides the rules of all ops in lk/README.md.
 *   LK_ERR_NULL    a pointer that the call reads is NULL: offsets, ids, x or weight (see their fields), in backward logits; logp
 *                  or dlogp without target; kl or dkl without teacher_logp; logits_given without logits; dweight_ids without
 *                  dweight or dweight_rows; all outputs are NULL (bad_targets is one); in backward all gradients are. With
 *                  tokens = 0 all except for args may be NULL
 *   LK_ERR_SHAPE   tokens, hidden, vocab, entries, vocab_start or vocab_total out of range; a stride below 0; dx_stride or
 *                  dweight_stride that is not 0 and below hidden, or such a dfull_logits_stride below vocab, of two rows or more.
 *                  Rows of inputs may overlap
 *   LK_ERR_VALUE   logit_scale or softcap out of range; ignore_index without use_ignore_index; use_ignore_index without target; a
 *                  dtype that is none of its values; forward without logits_given that has outputs besides logits, where vocab is
 *                  below vocab_total; dweight_ids with accumulate; dweight_rows without dweight_ids; in forward x, weight or bias with
 *                  full_logits; in backward dx, dweight or dbias with dfull_logits
 * Fastest: hidden is a multiple of 16 bytes of T, and all rows of x, weight, dx and dweight start at multiples of 16 bytes. */

#define LK_LINEAR_SUPPORT_FUNCTIONS(X, T)                                                                                      \
    X##_CALL(linear_support, forward, LK_FORWARD, T)                                                                           \
    X##_CALL(linear_support, backward, LK_BACKWARD, T)
#define LK_DECLARE_LINEAR_SUPPORT(T) LK_DECLARE(LINEAR_SUPPORT, T)
#define LK_DEFINE_LINEAR_SUPPORT(T) LK_DEFINE(LINEAR_SUPPORT, T)

#if LK_CUDA

#include "lk_check.cuh"
#include "lk_loss.cuh"

#define LK_SUPPORT_WARPS 8       /* of a block */
#define LK_SUPPORT_TILE 64       /* sorted entries of a warp: a multiple of 32 */
#define LK_SUPPORT_DIGIT_BITS 9  /* of a pass of the sort: two passes for ids below 2^18 */
#define LK_SUPPORT_DIGITS (1 << LK_SUPPORT_DIGIT_BITS)
#define LK_SUPPORT_SORT_WARPS 16 /* of a block of the sort */
#define LK_SUPPORT_SORT_BLOCKS 256 /* at most; each reads the counts of all */
#define LK_SUPPORT_TENSORS 28    /* of a call, at most */

/* What every kernel gets: the caller's arguments with all defaults filled in, and the workspace. */
typedef struct {
    lk_linear_support_args a;
    int32_t *own;      /* [tokens]: the entry of the target, 0 without target, LK_IGNORED or LK_BAD */
    int32_t *token;    /* [entries]; -1: of none, or of a token that is ignored or bad */
    int32_t *key;      /* [entries]: the row of weight; vocab where token is -1, or the row is of another rank */
    float *dlogits;    /* backward: [entries] */
    uint32_t *touched; /* a bit for each row of weight: whether an entry adds to it. NULL: no row of dweight is to become 0 */
    int32_t *other_key, *order, *other_order; /* the sort: [entries]. order: entries, sorted by key */
    int32_t *digits;   /* the sort: [sort_blocks, LK_SUPPORT_DIGITS] */
    int32_t *starts;   /* with dweight_ids: [tiles + 1], the runs that begin before a tile */
    float *head, *tail; /* [tiles, hidden]: of a tile the part of a run that began before it; of one that ends behind it */
    float *head_bias, *tail_bias; /* [tiles] */
    int64_t tiles, slices; /* slices: of a row of hidden, one for a warp */
    int64_t words;     /* of touched */
    int64_t rounds;    /* of dweight, for each slice: the larger of tiles and words */
    int64_t share;     /* entries of a warp of the sort, a multiple of 32 */
    int sort_blocks, shift; /* shift: the first bit of the pass */
    size_t bytes;
} lk_support_call;

/* ---- What entries and tokens mean ---------------------------------------------------------------------------------------- */

LK_DEVICE int64_t lk_support_index(const void *list, int dtype, int64_t i)
{
    return dtype == LK_TARGET_INT32 ? ((const int32_t *)list)[i] : ((const int64_t *)list)[i];
}

/* The number of this warp in the grid, and of all warps. */
LK_DEVICE int64_t lk_support_warp(void) { return (int64_t)blockIdx.x * LK_SUPPORT_WARPS + threadIdx.x / 32; }
LK_DEVICE int64_t lk_support_warps(void) { return (int64_t)gridDim.x * LK_SUPPORT_WARPS; }

/* The entries of a token. Offsets that fall, or that end behind the last entry, give no address that is wrong. */
typedef struct {
    int64_t begin, end;
} lk_support_span;

LK_DEVICE lk_support_span lk_support_span_of(const lk_linear_support_args &a, int64_t token)
{
    int64_t begin = lk_support_index(a.offsets, a.offsets_dtype, token);
    int64_t end = lk_support_index(a.offsets, a.offsets_dtype, token + 1);
    begin = begin < 0 ? 0 : begin > a.entries ? a.entries : begin;
    end = end < begin ? begin : end > a.entries ? a.entries : end;
    return {begin, end};
}

/* Entries of no token. */
LK_DEVICE void lk_support_leave_out(const lk_support_call &p, int64_t begin, int64_t end)
{
    for (int64_t e = begin + threadIdx.x % 32; e < end; e += 32) {
        p.token[e] = -1, p.key[e] = (int32_t)p.a.vocab;
        if (p.a.support_logp) p.a.support_logp[e] = 0.0f;
    }
}

/* The row of x of an entry that has a row of weight. With offsets that fall, two warps may have written the one and the other. */
LK_DEVICE int64_t lk_support_row_of(const lk_support_call &p, int64_t e)
{
    return p.token[e] < 0 ? 0 : p.token[e];
}

/* A warp owns a token. */
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 4) lk_support_begin_kernel(const __grid_constant__ lk_support_call p)
{
    const lk_linear_support_args &a = p.a;
    const int lane = (int)threadIdx.x % 32;
    lk_griddepcontrol_wait();
    for (int64_t word = lk_support_warp() * 32 + lane; word < p.words; word += lk_support_warps() * 32) p.touched[word] = 0;
    for (int64_t token = lk_support_warp(); token < a.tokens; token += lk_support_warps()) {
        const lk_support_span s = lk_support_span_of(a, token);
        const int64_t y = a.target ? lk_support_index(a.target, a.target_dtype, token) : 0;
        const bool ignored = a.use_ignore_index && y == a.ignore_index;
        bool bad = s.begin == s.end;
        int64_t own = a.target ? -1 : 0;
        for (int64_t at = s.begin; at < s.end && !ignored; at += 32) {
            const bool there = at + lane < s.end;
            const int64_t id = there ? lk_support_index(a.ids, a.target_dtype, at + lane) : 0;
            const unsigned hits = __ballot_sync(0xffffffffu, there && id == y);
            bad = bad || __ballot_sync(0xffffffffu, id < 0 || id >= a.vocab_total);
            if (hits && own < 0) own = at + __ffs((int)hits) - 1;
        }
        bad = !ignored && (bad || own < 0);
        for (int64_t e = s.begin + lane; e < s.end; e += 32) {
            const int64_t row = ignored || bad ? -1 : lk_support_index(a.ids, a.target_dtype, e) - a.vocab_start;
            p.token[e] = ignored || bad ? -1 : (int32_t)token;
            p.key[e] = (int32_t)(row >= 0 && row < a.vocab ? row : a.vocab);
        }
        if (token == 0) lk_support_leave_out(p, 0, s.begin);
        if (token == a.tokens - 1) lk_support_leave_out(p, s.end, a.entries);
        if (lane != 0) continue;
        p.own[token] = ignored ? LK_IGNORED : bad ? LK_BAD : (int32_t)own;
        if (bad && a.bad_targets) atomicAdd(a.bad_targets, 1);
    }
}

/* ---- Logits -------------------------------------------------------------------------------------------------------------- */

/* Num: elements of an access, LK_VEC<T> where all rows start at multiples of 16 bytes, else 1. A warp owns an entry. */
template <class T, int Num>
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 2) lk_support_logits_kernel(const __grid_constant__ lk_support_call p)
{
    constexpr int Loads = 4, Step = 32 * Num; /* Loads: of each factor in flight */
    const lk_linear_support_args &a = p.a;
    const int lane = (int)threadIdx.x % 32;
    lk_griddepcontrol_wait();
    for (int64_t e = lk_support_warp(); e < a.entries; e += lk_support_warps()) {
        const int64_t row = p.key[e];
        float sums[Loads] = {};
        if (row < a.vocab) {
            const T *const x = (const T *)a.x + lk_support_row_of(p, e) * a.x_stride;
            const T *const weight = (const T *)a.weight + row * a.weight_stride;
            for (int64_t col = lane * Num; col < a.hidden; col += Loads * Step) {
                lk_vec<T> left[Loads] = {}, right[Loads] = {};
                LK_UNROLL for (int u = 0; u < Loads; u++)
                    if (col + u * Step < a.hidden) {
                        left[u] = lk_load_n<Num, true>(x + col + u * Step);
                        right[u] = lk_load_n<Num, true>(weight + col + u * Step);
                    }
                LK_UNROLL for (int u = 0; u < Loads; u++) {
                    float v[Num], w[Num];
                    lk_unpack_n<T>(v, left[u]), lk_unpack_n<T>(w, right[u]);
                    LK_UNROLL for (int j = 0; j < Num; j++) sums[u] = fmaf(v[j], w[j], sums[u]);
                }
            }
        }
        const float sum = lk_sum_warp((sums[0] + sums[1]) + (sums[2] + sums[3]));
        if (lane != 0) continue;
        a.logits[e] = row >= a.vocab ? 0.0f : sum + (a.bias ? lk_get_as(a.bias, a.bias_dtype, row) : 0.0f);
    }
}

/* A thread owns an entry, and reads its logit from the tensor of all. */
template <class T>
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 4) lk_support_gather_kernel(const __grid_constant__ lk_support_call p)
{
    const lk_linear_support_args &a = p.a;
    lk_griddepcontrol_wait();
    for (int64_t e = lk_support_warp() * 32 + threadIdx.x % 32; e < a.entries; e += lk_support_warps() * 32) {
        const int64_t col = p.key[e], row = lk_support_row_of(p, e);
        a.logits[e] = col >= a.vocab ? 0.0f : lk_to_float(((const T *)a.full_logits)[row * a.full_logits_stride + col]);
    }
}

/* ---- Rows of logits ------------------------------------------------------------------------------------------------------ */

/* What a token's logits add up to. Sums leave out the entry with the largest logit, `top`: so a token that is almost certain has
 * an exact log-probability near 0, and an exact 1 - p. */
typedef struct {
    float most, others; /* most: the largest v, under a softcap z, else the logit. others: sum exp(z - z[top]) */
    float log;          /* log(1 + others): lse is z[top] + log */
    float spread;       /* sum p (z[top] - z): entropy is log + spread */
    float inverse;      /* p of top */
    int64_t top;
} lk_support_row;

/* v, and the derivative of z by it. */
LK_DEVICE float lk_support_value(const lk_linear_support_args &a, int64_t e, float *slope)
{
    *slope = a.logit_scale;
    if (a.softcap == 0.0f) return a.logits[e];
    const float z = lk_ce_cap(a.logits[e], a.logit_scale, a.softcap, slope);
    *slope *= a.logit_scale;
    return z;
}

/* z[e] - z[top] */
LK_DEVICE float lk_support_below(const lk_linear_support_args &a, const lk_support_row &row, float v)
{
    return a.softcap == 0.0f ? a.logit_scale * (v - row.most) : v - row.most;
}

/* Called by a warp. */
LK_DEVICE lk_support_row lk_support_read(const lk_linear_support_args &a, lk_support_span s)
{
    const int lane = (int)threadIdx.x % 32;
    lk_support_row row = {-INFINITY, 0.0f, 0.0f, 0.0f, 0.0f, -1};
    float slope, lost = 0.0f, spread_lost = 0.0f;
    for (int64_t e = s.begin + lane; e < s.end; e += 32) {
        const float v = lk_support_value(a, e, &slope);
        if (v > row.most) row.most = v, row.top = e;
    }
    LK_UNROLL for (int offset = 16; offset > 0; offset /= 2) {
        const float v = __shfl_xor_sync(0xffffffffu, row.most, offset);
        const int64_t e = __shfl_xor_sync(0xffffffffu, (long long)row.top, offset);
        if (e >= 0 && (v > row.most || row.top < 0 || (v == row.most && e < row.top))) row.most = v, row.top = e;
    }
    for (int64_t e = s.begin + lane; e < s.end; e += 32) {
        const float below = lk_support_below(a, row, lk_support_value(a, e, &slope)), term = lk_exp(below);
        if (e == row.top) continue;
        lk_kahan_add(&row.others, &lost, term);
        if (term > 0.0f) lk_kahan_add(&row.spread, &spread_lost, -below * term);
    }
    row.others = lk_is_finite(row.most) ? lk_sum_warp(row.others) : NAN; /* all are -inf, or one is +inf */
    row.log = log1pf(row.others), row.inverse = __fdiv_rn(1.0f, 1.0f + row.others);
    row.spread = lk_sum_warp(row.spread) * row.inverse;
    return row;
}

/* A warp owns a token. */
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 4) lk_support_forward_kernel(const __grid_constant__ lk_support_call p)
{
    const lk_linear_support_args &a = p.a;
    const int lane = (int)threadIdx.x % 32;
    lk_griddepcontrol_wait();
    for (int64_t token = lk_support_warp(); token < a.tokens; token += lk_support_warps()) {
        const lk_support_span s = lk_support_span_of(a, token);
        const int own = p.own[token];
        const bool good = own >= 0;
        const float other = own == LK_IGNORED ? 0.0f : NAN; /* the results of a token that is not good */
        const lk_support_row row = good ? lk_support_read(a, s) : lk_support_row{};
        float slope, kl = 0.0f, logp = 0.0f;
        for (int64_t e = s.begin + lane; e < s.end && (a.logp || a.kl || a.support_logp); e += 32) {
            const float of_entry = good ? lk_support_below(a, row, lk_support_value(a, e, &slope)) - row.log : other;
            if (a.support_logp) a.support_logp[e] = of_entry;
            if (e == own) logp = of_entry;
            if (!a.kl || !good) continue;
            const float q = lk_exp(a.teacher_logp[e]);
            if (!(q == 0.0f)) kl = fmaf(q, a.teacher_logp[e] - of_entry, kl);
        }
        logp = lk_sum_warp(logp), kl = lk_sum_warp(kl); /* one lane has logp */
        if (lane != 0) continue;
        const float top = a.softcap == 0.0f ? a.logit_scale * row.most : row.most;
        if (a.logp) a.logp[token] = good ? logp : other;
        if (a.lse) a.lse[token] = good ? top + row.log : other;
        if (a.entropy) a.entropy[token] = good ? row.log + row.spread : other;
        if (a.kl) a.kl[token] = !good ? other : row.log == row.log ? kl : NAN;
    }
}

/* ---- Backward: dlogits --------------------------------------------------------------------------------------------------- */

/* u of an entry. */
LK_DEVICE float lk_support_upstream(const lk_linear_support_args &a, int64_t token, int64_t e, int own)
{
    float u = a.dsupport_logp ? a.dsupport_logp[e] : 0.0f;
    if (a.dkl) u = fmaf(-a.dkl[token], lk_exp(a.teacher_logp[e]), u);
    return e == own && a.dlogp ? u + a.dlogp[token] : u;
}

/* Whether any gradient of a bad token is not 0. Called by a warp. */
LK_DEVICE bool lk_support_asked(const lk_linear_support_args &a, int64_t token, lk_support_span s)
{
    bool asked = (a.dlogp && a.dlogp[token] != 0.0f) || (a.dlse && a.dlse[token] != 0.0f) ||
                 (a.dentropy && a.dentropy[token] != 0.0f) || (a.dkl && a.dkl[token] != 0.0f);
    for (int64_t e = s.begin + threadIdx.x % 32; e < s.end && a.dsupport_logp; e += 32)
        asked = asked || a.dsupport_logp[e] != 0.0f;
    return __any_sync(0xffffffffu, asked);
}

/* A warp owns a token. */
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 4) lk_support_backward_kernel(const __grid_constant__ lk_support_call p)
{
    const lk_linear_support_args &a = p.a;
    const int lane = (int)threadIdx.x % 32;
    lk_griddepcontrol_wait();
    for (int64_t token = lk_support_warp(); token < a.tokens; token += lk_support_warps()) {
        const lk_support_span s = lk_support_span_of(a, token);
        const int own = p.own[token];
        if (own == LK_BAD && !lk_support_asked(a, token, s)) {
            __syncwarp(); /* all lanes have read own */
            if (lane == 0) p.own[token] = LK_IGNORED;
        }
        if (own < 0) continue;
        const lk_support_row row = lk_support_read(a, s);
        float slope, rest = 0.0f, lost = 0.0f, of_top = 0.0f; /* rest: the sum of u of all entries but the top */
        for (int64_t e = s.begin + lane; e < s.end; e += 32) {
            const float u = lk_support_upstream(a, token, e, own);
            if (e == row.top) of_top = u;
            else lk_kahan_add(&rest, &lost, u);
        }
        of_top = lk_sum_warp(of_top), rest = lk_sum_warp(rest) - (a.dlse ? a.dlse[token] : 0.0f);
        const float dentropy = a.dentropy ? a.dentropy[token] : 0.0f;
        for (int64_t e = s.begin + lane; e < s.end; e += 32) {
            const float below = lk_support_below(a, row, lk_support_value(a, e, &slope));
            const float share = e == row.top ? row.inverse : lk_exp(below) * row.inverse;
            float dz = e == row.top ? of_top * (row.others * row.inverse) - share * rest
                                    : lk_support_upstream(a, token, e, own) - share * (rest + of_top);
            if (dentropy != 0.0f && !(share == 0.0f)) dz -= dentropy * share * (below + row.spread);
            p.dlogits[e] = dz * slope;
            if (p.touched && p.key[e] < a.vocab) atomicOr(&p.touched[p.key[e] / 32], 1u << p.key[e] % 32);
        }
    }
}

/* ---- Backward: dx -------------------------------------------------------------------------------------------------------- */

/* Num floats, to be rounded to Out, or added to what is there. */
template <class Out, int Num> LK_DEVICE void lk_support_put(Out *to, const float (&x)[Num], bool add)
{
    constexpr int Some = Num > 1 ? LK_VEC<Out> : 1;
    LK_UNROLL for (int at = 0; at < Num; at += Some) {
        float some[Some] = {};
        if (add) lk_unpack_n<Out>(some, lk_load_n<Some>(to + at));
        LK_UNROLL for (int j = 0; j < Some; j++) some[j] += x[at + j];
        lk_store_n(to + at, some);
    }
}

/* A warp owns a slice of a token's columns. */
template <class T, int Num>
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 3) lk_support_dx_kernel(const __grid_constant__ lk_support_call p)
{
    constexpr int Loads = 4;
    const lk_linear_support_args &a = p.a;
    const int lane = (int)threadIdx.x % 32;
    lk_griddepcontrol_wait();
    for (int64_t unit = lk_support_warp(); unit < a.tokens * p.slices; unit += lk_support_warps()) {
        const int64_t token = unit / p.slices, col = (unit % p.slices * 32 + lane) * Num;
        const lk_support_span s = lk_support_span_of(a, token);
        const int own = p.own[token];
        const T *const weight = (const T *)a.weight + col;
        float sum[Num] = {}, lost[Num] = {};
        for (int64_t at = s.begin; at < s.end && own >= 0; at += 32) {
            const bool there = at + lane < s.end;
            const int key = there ? p.key[at + lane] : (int)a.vocab;
            const float of_lane = there && key < a.vocab ? p.dlogits[at + lane] : 0.0f;
            float part[Num] = {};
            for (int k = 0; k < 32 && at + k < s.end; k += Loads) {
                lk_vec<T> raw[Loads] = {};
                LK_UNROLL for (int u = 0; u < Loads; u++) {
                    const int row = __shfl_sync(0xffffffffu, key, k + u);
                    if (row < a.vocab && col < a.hidden) raw[u] = lk_load_n<Num, true>(weight + row * a.weight_stride);
                }
                LK_UNROLL for (int u = 0; u < Loads; u++) {
                    const float factor = __shfl_sync(0xffffffffu, of_lane, k + u);
                    float w[Num];
                    lk_unpack_n<T>(w, raw[u]);
                    LK_UNROLL for (int j = 0; j < Num; j++) part[j] = fmaf(factor, w[j], part[j]);
                }
            }
            LK_UNROLL for (int j = 0; j < Num; j++) lk_kahan_add(&sum[j], &lost[j], part[j]);
        }
        LK_UNROLL for (int j = 0; j < Num; j++)
            if (own == LK_BAD) sum[j] = NAN;
        if (col < a.hidden) lk_store_n((T *)a.dx + token * a.dx_stride + col, sum);
    }
}

/* ---- Backward: entries sorted by id -------------------------------------------------------------------------------------- */

/* A stable sort by digits, the lowest first. Each block has a range of entries, each of its warps a part of it. */
LK_DEVICE int lk_support_digit(const lk_support_call &p, int64_t at)
{
    return p.key[at] >> p.shift & (LK_SUPPORT_DIGITS - 1);
}
/* The range of this warp. */
LK_DEVICE lk_support_span lk_support_sort_span(const lk_support_call &p)
{
    const int64_t begin = ((int64_t)blockIdx.x * LK_SUPPORT_SORT_WARPS + threadIdx.x / 32) * p.share, n = p.a.entries;
    return {begin < n ? begin : n, begin + p.share < n ? begin + p.share : n};
}
/* How many entries of this warp have each digit: into its part of shared memory. Called by all threads of a block. */
LK_DEVICE void lk_support_count(const lk_support_call &p, int (*counts)[LK_SUPPORT_DIGITS])
{
    const int lane = (int)threadIdx.x % 32;
    int *const mine = counts[threadIdx.x / 32];
    for (int digit = lane; digit < LK_SUPPORT_DIGITS; digit += 32) mine[digit] = 0;
    __syncwarp(); /* zeros before the first addition */
    const lk_support_span s = lk_support_sort_span(p);
    for (int64_t at = s.begin + lane; at < s.end; at += 32) atomicAdd(&mine[lk_support_digit(p, at)], 1);
    __syncthreads(); /* all counts before other warps read them */
}

/* The sum over the threads of a block up to this one. sums: shared memory, a number for each warp. Called by all threads. */
LK_DEVICE int lk_support_up_to(int mine, int *sums)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, mine, (unsigned)offset);
        if (lane >= offset) mine += below;
    }
    if (lane == 31) sums[warp] = mine;
    __syncthreads(); /* the sums of all warps */
    for (int w = 0; w < warp; w++) mine += sums[w];
    return mine;
}

LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_SORT_WARPS, 2) lk_support_count_kernel(const __grid_constant__ lk_support_call p)
{
    LK_SHARED(int, counts, [LK_SUPPORT_SORT_WARPS][LK_SUPPORT_DIGITS]);
    lk_griddepcontrol_wait();
    lk_support_count(p, counts);
    for (int digit = (int)threadIdx.x; digit < LK_SUPPORT_DIGITS; digit += 32 * LK_SUPPORT_SORT_WARPS) {
        int sum = 0;
        for (int warp = 0; warp < LK_SUPPORT_SORT_WARPS; warp++) sum += counts[warp][digit];
        p.digits[(int)blockIdx.x * LK_SUPPORT_DIGITS + digit] = sum;
    }
}

/* other_key and other_order get the entries in the order of this digit; entries with the same one stay in their order. */
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_SORT_WARPS, 2) lk_support_sort_kernel(const __grid_constant__ lk_support_call p)
{
    LK_SHARED(int, counts, [LK_SUPPORT_SORT_WARPS][LK_SUPPORT_DIGITS]);
    LK_SHARED(int, sums, [LK_SUPPORT_SORT_WARPS]);
    const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    lk_griddepcontrol_wait();
    lk_support_count(p, counts);
    int before = 0, all = 0; /* entries of this thread's digit: in the blocks before; in all */
    for (int block = 0; block < p.sort_blocks && thread < LK_SUPPORT_DIGITS; block++) {
        if (block == (int)blockIdx.x) before = all;
        all += p.digits[block * LK_SUPPORT_DIGITS + thread];
    }
    const int up_to = lk_support_up_to(all, sums); /* of this digit and those below it */
    if (thread < LK_SUPPORT_DIGITS) {
        int at = up_to - all + before;
        for (int w = 0; w < LK_SUPPORT_SORT_WARPS; w++) {
            const int count = counts[w][thread];
            counts[w][thread] = at, at += count;
        }
    }
    __syncthreads(); /* where each warp writes its first entry of each digit */
    int *const next = counts[warp];
    const lk_support_span s = lk_support_sort_span(p);
    for (int64_t first = s.begin; first < s.end; first += 32) {
        const int64_t at = first + lane;
        const bool there = at < s.end;
        const int digit = there ? lk_support_digit(p, at) : -1;
        const unsigned same = __match_any_sync(0xffffffffu, digit);
        const int rank = __popc(same & ((1u << lane) - 1)), to = there ? next[digit] + rank : 0;
        __syncwarp(); /* all lanes have read next */
        if (there && rank == 0) next[digit] += __popc(same);
        __syncwarp(); /* next is as the following 32 entries need it */
        if (!there) continue;
        p.other_key[to] = p.key[at];
        p.other_order[to] = p.order ? p.order[at] : (int32_t)at;
    }
}

/* ---- Backward: dweight and dbias ----------------------------------------------------------------------------------------- */

/* How many runs begin in each tile. A warp owns a tile. */
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 4) lk_support_starts_kernel(const __grid_constant__ lk_support_call p)
{
    const int lane = (int)threadIdx.x % 32, none = (int)p.a.vocab;
    lk_griddepcontrol_wait();
    for (int64_t tile = lk_support_warp(); tile < p.tiles; tile += lk_support_warps()) {
        int count = 0;
        for (int64_t at = tile * LK_SUPPORT_TILE + lane; at - lane < (tile + 1) * LK_SUPPORT_TILE; at += 32) {
            const int key = at < p.a.entries ? p.key[at] : none;
            count += __popc(__ballot_sync(0xffffffffu, key < none && (at == 0 || p.key[at - 1] != key)));
        }
        if (lane == 0) p.starts[tile] = count;
    }
}

/* Of each tile, how many begin before it; and of all. One block; a thread has neighbours. */
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_SORT_WARPS, 2) lk_support_scan_kernel(const __grid_constant__ lk_support_call p)
{
    LK_SHARED(int, sums, [LK_SUPPORT_SORT_WARPS]);
    const int64_t each = (p.tiles + 32 * LK_SUPPORT_SORT_WARPS - 1) / (32 * LK_SUPPORT_SORT_WARPS), first = each * threadIdx.x;
    lk_griddepcontrol_wait();
    int mine = 0;
    for (int64_t tile = first; tile < first + each && tile < p.tiles; tile++) mine += p.starts[tile];
    const int up_to = lk_support_up_to(mine, sums);
    int before = up_to - mine;
    for (int64_t tile = first; tile < first + each && tile < p.tiles; tile++) {
        const int count = p.starts[tile];
        p.starts[tile] = before, before += count;
    }
    if (threadIdx.x == 32 * LK_SUPPORT_SORT_WARPS - 1) p.starts[p.tiles] = *p.a.dweight_rows = up_to;
}

/* What a run adds up to, to its row. number: of the run. */
template <class T, int Num>
LK_DEVICE void lk_support_put_row(const lk_linear_support_args &a, int64_t row, int64_t number, int64_t col,
                                  const float (&sum)[Num], float bias)
{
    if (a.dweight_ids && col == 0) a.dweight_ids[number] = (int32_t)row;
    if (a.dweight && col < a.hidden) {
        const int64_t at = (a.dweight_ids ? number : row) * a.dweight_stride + col;
        if (a.dweight_dtype == LK_DTYPE_F32) lk_support_put((float *)a.dweight + at, sum, a.accumulate);
        else lk_support_put((T *)a.dweight + at, sum, a.accumulate);
    }
    if (!a.dbias || col != 0) return;
    lk_put_as(a.dbias, a.dbias_dtype, row, bias + (a.accumulate ? lk_get_as(a.dbias, a.dbias_dtype, row) : 0.0f));
}

/* To a row of head or tail. */
template <int Num> LK_DEVICE void lk_support_put_part(const lk_support_call &p, float *rows, float *of_bias, int64_t tile,
                                                      int64_t col, const float (&sum)[Num], float bias)
{
    if (p.a.dweight && col < p.a.hidden) lk_support_put(rows + tile * p.a.hidden + col, sum, false);
    if (col == 0) of_bias[tile] = bias;
}

/* Zeros in a slice of the 32 rows of a word of touched, except for those that an entry adds to. */
template <class Out, int Num> LK_DEVICE void lk_support_zero_rows(const lk_support_call &p, int64_t word, int64_t col)
{
    const uint32_t touched = p.touched[word];
    const float zeros[Num] = {};
    for (int bit = 0; bit < 32 && word * 32 + bit < p.a.vocab && col < p.a.hidden; bit++)
        if (!(touched >> bit & 1)) lk_support_put((Out *)p.a.dweight + (word * 32 + bit) * p.a.dweight_stride + col, zeros, false);
}

/* A warp owns a slice of columns: of the entries of a tile, and of the 32 rows of a word. All tiles of a slice come before the next
 * slice, since the caches have room for one slice of x. Here p.key and p.order are sorted. */
template <class T, int Num>
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 3) lk_support_dweight_kernel(const __grid_constant__ lk_support_call p)
{
    constexpr int Loads = 4;
    const lk_linear_support_args &a = p.a;
    const int lane = (int)threadIdx.x % 32, none = (int)a.vocab;
    lk_griddepcontrol_wait();
    for (int64_t unit = lk_support_warp(); unit < p.rounds * p.slices; unit += lk_support_warps()) {
        const int64_t tile = unit % p.rounds, col = (unit / p.rounds * 32 + lane) * Num, first = tile * LK_SUPPORT_TILE;
        if (tile < p.words && a.dweight_dtype == LK_DTYPE_F32) lk_support_zero_rows<float, Num>(p, tile, col);
        else if (tile < p.words) lk_support_zero_rows<T, Num>(p, tile, col);
        if (tile >= p.tiles) continue;
        bool began = first > 0 && p.key[first - 1] == p.key[first]; /* in a tile before */
        int number = p.starts ? p.starts[tile] : 0;
        float sum[Num] = {}, bias = 0.0f;
        for (int64_t at = first; at < first + LK_SUPPORT_TILE && at < a.entries; at += 32) {
            const bool there = at + lane < a.entries;
            const int key = there ? p.key[at + lane] : none, behind = at + 32 < a.entries ? p.key[at + 32] : none;
            const int entry = key < none ? p.order[at + lane] : 0;
            const int64_t row = key < none ? lk_support_row_of(p, entry) * a.x_stride : 0;
            const float of_lane = key < none ? p.dlogits[entry] : 0.0f;
            for (int k = 0; k < 32 && __shfl_sync(0xffffffffu, key, k) < none; k += Loads) {
                lk_vec<T> raw[Loads] = {};
                LK_UNROLL for (int u = 0; u < Loads; u++) {
                    const int64_t of_row = __shfl_sync(0xffffffffu, (long long)row, k + u);
                    const bool reads = __shfl_sync(0xffffffffu, key, k + u) < none && a.dweight && col < a.hidden;
                    if (reads) raw[u] = lk_load_n<Num, true>((const T *)a.x + of_row + col);
                }
                LK_UNROLL for (int u = 0; u < Loads; u++) {
                    const int now = __shfl_sync(0xffffffffu, key, k + u), next = __shfl_sync(0xffffffffu, key, (k + u + 1) % 32);
                    const float factor = __shfl_sync(0xffffffffu, of_lane, k + u);
                    const bool last_of_lanes = k + u == 31, last = last_of_lanes && at + 32 == first + LK_SUPPORT_TILE;
                    const bool goes_on = (last_of_lanes ? behind : next) == now;
                    float v[Num];
                    if (now == none) continue;
                    lk_unpack_n<T>(v, raw[u]);
                    LK_UNROLL for (int j = 0; j < Num; j++) sum[j] = fmaf(factor, v[j], sum[j]);
                    bias += factor;
                    if (goes_on && !last) continue;
                    if (began) lk_support_put_part(p, p.head, p.head_bias, tile, col, sum, bias);
                    else if (goes_on) lk_support_put_part(p, p.tail, p.tail_bias, tile, col, sum, bias);
                    else lk_support_put_row<T>(a, now, number, col, sum, bias);
                    LK_UNROLL for (int j = 0; j < Num; j++) sum[j] = 0.0f;
                    number += !began, bias = 0.0f, began = false;
                }
            }
        }
    }
}

/* Adds Num floats to sum. */
template <int Num> LK_DEVICE void lk_support_add_part(const float *part, float (&sum)[Num])
{
    constexpr int Some = Num > 1 ? LK_VEC<float> : 1;
    LK_UNROLL for (int at = 0; at < Num; at += Some) {
        float some[Some];
        lk_unpack_n<float>(some, lk_load_n<Some, true>(part + at));
        LK_UNROLL for (int j = 0; j < Some; j++) sum[at + j] += some[j];
    }
}

/* A warp owns a slice of columns of the run that begins in a tile and goes on behind it, where there is one. */
template <class T, int Num>
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 3) lk_support_runs_kernel(const __grid_constant__ lk_support_call p)
{
    constexpr int Loads = 4;
    const lk_linear_support_args &a = p.a;
    const int lane = (int)threadIdx.x % 32;
    lk_griddepcontrol_wait();
    for (int64_t unit = lk_support_warp(); unit < (p.tiles - 1) * p.slices; unit += lk_support_warps()) {
        const int64_t tile = unit / p.slices, col = (unit % p.slices * 32 + lane) * Num, first = tile * LK_SUPPORT_TILE;
        const int row = p.key[first + LK_SUPPORT_TILE - 1];
        if (row == (int)a.vocab || p.key[first + LK_SUPPORT_TILE] != row) continue;
        if (first > 0 && p.key[first - 1] == row) continue; /* it began before */
        float sum[Num] = {}, bias = p.tail_bias[tile];
        const bool there = a.dweight && col < a.hidden;
        if (there) lk_support_add_part<Num>(p.tail + tile * a.hidden + col, sum);
        int count = 32;
        for (int64_t next = tile + 1; count == 32; next += 32) {
            const bool goes_on = next + lane < p.tiles && p.key[(next + lane) * LK_SUPPORT_TILE] == row;
            const unsigned all = __ballot_sync(0xffffffffu, goes_on);
            count = all == 0xffffffffu ? 32 : __ffs((int)~all) - 1;
            for (int k = 0; k < count; k += Loads) {
                LK_UNROLL for (int u = 0; u < Loads; u++) {
                    if (k + u < count && there) lk_support_add_part<Num>(p.head + (next + k + u) * a.hidden + col, sum);
                    if (k + u < count) bias += p.head_bias[next + k + u];
                }
            }
        }
        lk_support_put_row<T>(a, row, p.starts ? p.starts[tile + 1] - 1 : 0, col, sum, bias); /* the last that begins here */
    }
}

/* ---- Backward: dfull_logits ---------------------------------------------------------------------------------------------- */

/* Whether this sorted entry has the id and is of the token. Such entries stand next to each other, since the sort is stable. */
LK_DEVICE bool lk_support_is_of(const lk_support_call &p, int64_t at, int key, int64_t token)
{
    return at >= 0 && at < p.a.entries && p.key[at] == key && lk_support_row_of(p, p.order[at]) == token;
}

/* A thread owns a sorted entry. If an id comes twice in a support, its first entry adds up all of them. Then a warp owns a token, and
 * writes NaN to the row of a bad one. */
template <class T>
LK_KERNEL void __launch_bounds__(32 * LK_SUPPORT_WARPS, 4) lk_support_scatter_kernel(const __grid_constant__ lk_support_call p)
{
    const lk_linear_support_args &a = p.a;
    const int lane = (int)threadIdx.x % 32;
    T *const to = (T *)a.dfull_logits;
    lk_griddepcontrol_wait();
    for (int64_t first = lk_support_warp() * 32 + lane; first < a.entries; first += lk_support_warps() * 32) {
        const int key = p.key[first];
        const int64_t token = key < a.vocab ? lk_support_row_of(p, p.order[first]) : 0;
        if (key >= a.vocab || lk_support_is_of(p, first - 1, key, token)) continue;
        const int64_t place = token * a.dfull_logits_stride + key;
        float sum = 0.0f;
        for (int64_t at = first; lk_support_is_of(p, at, key, token); at++) sum += p.dlogits[p.order[at]];
        lk_put(to + place, a.accumulate ? lk_to_float(to[place]) + sum : sum);
    }
    for (int64_t token = lk_support_warp(); token < a.tokens; token += lk_support_warps())
        for (int64_t col = lane; p.own[token] == LK_BAD && col < a.vocab; col += 32) lk_put(to + token * a.dfull_logits_stride + col, NAN);
}

/* ---- Checks, and the workspace ------------------------------------------------------------------------------------------- */

/* Validates a call, and fills in its defaults. */
template <class T>
LK_HOST lk_checks lk_support_check(const char *op, lk_linear_support_args *a, bool backward, lk_device *device, lk_tensor *list,
                                   int *count)
{
    const int bytes = sizeof(T), index = a->target_dtype == LK_TARGET_INT32 ? 4 : 8, forward_out = backward ? LK_UNUSED : LK_OUT;
    const int input = LK_MAY_OVERLAP | (a->tokens ? LK_REQUIRED : 0); /* without tokens all may be NULL */
    const int backward_in = backward ? LK_IN : LK_UNUSED, backward_out = backward ? LK_OUT : LK_UNUSED;
    const int64_t most = INT32_MAX, most_vocab = (int64_t)1 << 30;
    const int64_t bounds = a->tokens < 0 ? 1 : a->tokens <= most ? a->tokens + 1 : most; /* a size that is refused too */
    const bool ranks = a->vocab_total != 0, computes = !backward && !a->logits_given, query = !device;
    const bool full = backward ? a->dfull_logits != NULL : a->full_logits != NULL;
    const int of_head = full ? LK_UNUSED : input; /* x and weight */
    const float quotient = (a->logit_scale == 0.0f ? 1.0f : a->logit_scale) / a->softcap;
    const bool cap = a->softcap != 0.0f, more = a->logp || a->lse || a->entropy || a->kl || a->support_logp;

    lk_checks checks = lk_check_begin(op, device);
    lk_check_size(&checks, "tokens", a->tokens, 0, most);
    if (full) a->hidden = 1;
    lk_check_size(&checks, "hidden", a->hidden, 1, most_vocab);
    lk_check_size(&checks, "vocab", a->vocab, ranks ? 0 : 1, most_vocab);
    lk_check_size(&checks, "entries", a->entries, 0, most);
    if (!ranks) a->vocab_total = a->vocab;
    lk_check_size(&checks, "vocab_total", a->vocab_total, 1, most_vocab);
    if (!lk_rejected(&checks, LK_ERR_SHAPE)) lk_check_size(&checks, "vocab_start", a->vocab_start, 0, a->vocab_total - a->vocab);
    const lk_tensor all[] = {
        {"x", a->x, bytes, computes || (backward && a->dweight) ? of_head : LK_UNUSED, a->hidden,
         {{a->tokens, &a->x_stride, "x_stride"}}},
        {"weight", a->weight, bytes, computes || (backward && a->dx) ? of_head : LK_UNUSED, a->hidden,
         {{a->vocab, &a->weight_stride, "weight_stride"}}},
        {"full_logits", a->full_logits, bytes, computes ? LK_IN | LK_MAY_OVERLAP : LK_UNUSED, a->vocab,
         {{a->tokens, &a->full_logits_stride, "full_logits_stride"}}},
        {"offsets", a->offsets, a->offsets_dtype == LK_TARGET_INT32 ? 4 : 8, input, bounds},
        {"ids", a->ids, index, input, a->entries},
        {"target", a->target, index, LK_IN, a->tokens},
        {"bias", a->bias, a->bias_dtype == LK_DTYPE_F32 ? 4 : bytes, computes ? LK_IN : LK_UNUSED, a->vocab},
        {"teacher_logp", a->teacher_logp, 4, LK_IN, a->entries},
        {"logits", a->logits, 4, backward || a->logits_given ? input : LK_OUT, a->entries},
        {"logp", a->logp, 4, forward_out, a->tokens},
        {"lse", a->lse, 4, forward_out, a->tokens},
        {"entropy", a->entropy, 4, forward_out, a->tokens},
        {"kl", a->kl, 4, forward_out, a->tokens},
        {"support_logp", a->support_logp, 4, forward_out, a->entries},
        {"dlogp", a->dlogp, 4, backward_in, a->tokens},
        {"dlse", a->dlse, 4, backward_in, a->tokens},
        {"dentropy", a->dentropy, 4, backward_in, a->tokens},
        {"dkl", a->dkl, 4, backward_in, a->tokens},
        {"dsupport_logp", a->dsupport_logp, 4, backward_in, a->entries},
        {"dx", a->dx, bytes, backward_out, a->hidden, {{a->tokens, &a->dx_stride, "dx_stride"}}},
        {"dweight", a->dweight, a->dweight_dtype == LK_DTYPE_F32 ? 4 : bytes, backward_out, a->hidden,
         {{backward && a->dweight_ids && a->entries < a->vocab ? a->entries : a->vocab, &a->dweight_stride, "dweight_stride"}}},
        {"dweight_ids", a->dweight_ids, 4, backward_out, a->entries < a->vocab ? a->entries : a->vocab},
        {"dweight_rows", a->dweight_rows, 4, backward_out, 1},
        {"dbias", a->dbias, a->dbias_dtype == LK_DTYPE_F32 ? 4 : bytes, backward_out, a->vocab},
        {"dfull_logits", a->dfull_logits, bytes, backward_out, a->vocab,
         {{a->tokens, &a->dfull_logits_stride, "dfull_logits_stride"}}},
        {"bad_targets", a->bad_targets, 4, LK_OUT, 1}};
    static_assert(LK_COUNT(all) < LK_SUPPORT_TENSORS, "one is the workspace");
    for (int i = 0; i < LK_COUNT(all); i++) list[i] = all[i];
    *count = lk_used_tensors(list, LK_COUNT(all));
    lk_check_shapes(&checks, list, *count, query);
    const bool wants_logp = backward ? a->dlogp != NULL : a->logp != NULL, wants_kl = backward ? a->dkl != NULL : a->kl != NULL;
    if (wants_logp && !a->target && a->tokens)
        lk_reject(&checks, LK_ERR_NULL, "target is NULL, and %s is given", backward ? "dlogp" : "logp");
    if (wants_kl && !a->teacher_logp && a->entries && a->tokens)
        lk_reject(&checks, LK_ERR_NULL, "teacher_logp is NULL, and %s is given", backward ? "dkl" : "kl");
    if (backward && !query && a->tokens && a->entries && !a->dlogp && !a->dlse && !a->dentropy && !a->dkl && !a->dsupport_logp)
        lk_reject(&checks, LK_ERR_NULL, "dlogp, dlse, dentropy, dkl and dsupport_logp are NULL: there is nothing to pass on");
    lk_check_number(&checks, "logit_scale", (double)a->logit_scale, a->logit_scale >= 0.0f && a->logit_scale <= 0x1p127f,
                    "0 to 2^127");
    lk_check_number(&checks, "softcap", (double)a->softcap, !cap || (a->softcap >= 0x1p-100f && a->softcap <= 0x1p100f),
                    "0 or 2^-100 to 2^100");
    lk_check_number(&checks, "logit_scale over softcap", (double)quotient,
                    !cap || (quotient >= 0x1p-100f && quotient <= 0x1p100f), "2^-100 to 2^100");
    if (a->ignore_index && !a->use_ignore_index)
        lk_reject(&checks, LK_ERR_VALUE, "ignore_index is %lld, but use_ignore_index is 0; set both or neither",
                  (long long)a->ignore_index);
    lk_check_absent(&checks, "use_ignore_index", a->use_ignore_index && !a->target && a->tokens, "it is for calls with target");
    const char *const instead = backward ? "it is not for calls with dfull_logits" : "it is not for calls with full_logits";
    const struct {
        const char *name;
        bool given;
    } of_a_head[] = {{"x", computes && a->x},     {"weight", computes && a->weight},   {"bias", computes && a->bias},
                     {"dx", backward && a->dx}, {"dweight", backward && a->dweight}, {"dbias", backward && a->dbias}};
    for (const auto &t : of_a_head) lk_check_absent(&checks, t.name, full && t.given, instead);
    lk_check_enum(&checks, "offsets_dtype", a->offsets_dtype, LK_TARGET_INT32, "LK_TARGET_*");
    lk_check_enum(&checks, "target_dtype", a->target_dtype, LK_TARGET_INT32, "LK_TARGET_*");
    if (computes) lk_check_dtype<T>(&checks, "bias_dtype", a->bias_dtype);
    if (backward) lk_check_dtype<T>(&checks, "dweight_dtype", a->dweight_dtype);
    if (backward) lk_check_dtype<T>(&checks, "dbias_dtype", a->dbias_dtype);
    if (backward && a->dweight_ids && (!a->dweight || !a->dweight_rows))
        lk_reject(&checks, LK_ERR_NULL, "%s is NULL, and dweight_ids is given", a->dweight ? "dweight_rows" : "dweight");
    lk_check_absent(&checks, "dweight_rows", backward && a->dweight_rows && !a->dweight_ids, "it is for calls with dweight_ids");
    lk_check_absent(&checks, "accumulate", backward && a->dweight_ids && a->accumulate, "it is not for calls with dweight_ids");
    if (computes && a->vocab < a->vocab_total && more)
        lk_reject(&checks, LK_ERR_VALUE, "logits_given is 0; where a rank has %lld of %lld rows, forward computes logits alone",
                  (long long)a->vocab, (long long)a->vocab_total);
    if (a->logit_scale == 0.0f) a->logit_scale = 1.0f;
    if (a->bias_dtype == LK_DTYPE_T) a->bias_dtype = lk_dtype<T>;
    if (a->dweight_dtype == LK_DTYPE_T) a->dweight_dtype = lk_dtype<T>;
    if (a->dbias_dtype == LK_DTYPE_T) a->dbias_dtype = lk_dtype<T>;
    return checks;
}

/* Whether T's vectors of a tensor start at multiples of 16 bytes. */
LK_HOST bool lk_support_lies_well(const void *tensor, int64_t stride, size_t bytes)
{
    return !tensor || ((uintptr_t)tensor % 16 == 0 && (uint64_t)stride * bytes % 16 == 0);
}

/* Divides the work, and lays out the workspace. */
template <class T> LK_HOST void lk_support_lay_out(lk_support_call *p, bool backward, bool *vectors)
{
    lk_linear_support_args &a = p->a;
    lk_arena arena = {(uintptr_t)a.workspace, 0, LK_WORKSPACE_ALIGNMENT};
    const bool sorts = backward && (a.dweight || a.dbias || a.dfull_logits), dweight = backward && a.dweight;
    const size_t bytes = sizeof(T), of_dweight = a.dweight_dtype == LK_DTYPE_F32 ? 4 : bytes;
    *vectors = a.hidden % LK_VEC<T> == 0 && lk_support_lies_well(a.x, a.x_stride, bytes) &&
               lk_support_lies_well(a.weight, a.weight_stride, bytes) &&
               (!backward || (lk_support_lies_well(a.dx, a.dx_stride, bytes) &&
                              lk_support_lies_well(a.dweight, a.dweight_stride, of_dweight)));
    p->slices = lk_ceil_div(a.hidden, *vectors ? 32 * LK_VEC<T> : 32);
    p->tiles = lk_ceil_div(a.entries, LK_SUPPORT_TILE);
    p->words = dweight && !a.accumulate && !a.dweight_ids && a.entries ? lk_ceil_div(a.vocab, 32) : 0;
    p->rounds = p->tiles > p->words ? p->tiles : p->words;
    const int64_t blocks = lk_ceil_div(a.entries, LK_SUPPORT_SORT_WARPS * 256);
    p->sort_blocks = (int)(blocks < LK_SUPPORT_SORT_BLOCKS ? blocks : LK_SUPPORT_SORT_BLOCKS);
    if (blocks > 0) p->share = lk_ceil_div(a.entries, (int64_t)p->sort_blocks * LK_SUPPORT_SORT_WARPS * 32) * 32;
    lk_take(&p->own, &arena, true, a.tokens);
    lk_take(&p->token, &arena, true, a.entries);
    lk_take(&p->key, &arena, true, a.entries);
    if (!backward && !a.logits) lk_take(&a.logits, &arena, true, a.entries);
    lk_take(&p->dlogits, &arena, backward, a.entries);
    lk_take(&p->touched, &arena, p->words > 0, p->words);
    lk_take(&p->other_key, &arena, sorts, a.entries);
    lk_take(&p->order, &arena, sorts, a.entries);
    lk_take(&p->other_order, &arena, sorts, a.entries);
    lk_take(&p->digits, &arena, sorts, (int64_t)p->sort_blocks * LK_SUPPORT_DIGITS);
    lk_take(&p->starts, &arena, sorts && a.dweight_ids, p->tiles + 1);
    lk_take(&p->head_bias, &arena, sorts, p->tiles);
    lk_take(&p->tail_bias, &arena, sorts, p->tiles);
    lk_take(&p->head, &arena, dweight, lk_count(p->tiles, a.hidden));
    lk_take(&p->tail, &arena, dweight, lk_count(p->tiles, a.hidden));
    p->bytes = a.tokens ? arena.used : 0;
}

template <class T>
LK_HOST lk_status lk_linear_support_query(const char *op, const lk_linear_support_args *args, lk_direction direction,
                                          size_t *bytes)
{
    lk_support_call call = {};
    lk_tensor list[LK_SUPPORT_TENSORS] = {};
    int count = 0;
    bool vectors;
    call.a = *args, call.a.workspace = NULL;
    const lk_checks checks = lk_support_check<T>(op, &call.a, direction == LK_BACKWARD, NULL, list, &count);
    if (checks.status) return checks.status;
    lk_support_lay_out<T>(&call, direction == LK_BACKWARD, &vectors);
    if (bytes) *bytes = call.bytes;
    return LK_OK;
}

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

/* A warp for each of so many units; beyond 2^30 blocks a warp has several. */
LK_HOST lk_status lk_support_launch(const char *op, const lk_device *device, void (*kernel)(lk_support_call), int64_t units,
                                    cudaStream_t stream, const lk_support_call &call)
{
    const int64_t blocks = lk_ceil_div(units, LK_SUPPORT_WARPS), most = (int64_t)1 << 30;
    if (units <= 0) return LK_OK;
    return lk_launch_pdl(op, device, kernel, blocks < most ? blocks : most, 1, 32 * LK_SUPPORT_WARPS, 0, stream, call);
}

/* Zeros in rows of width bytes. CUDA does not look at the stride of a single row. */
LK_HOST cudaError_t lk_support_zeros(void *to, size_t stride, size_t width, int64_t rows, cudaStream_t stream)
{
    if (!to || rows == 0) return cudaSuccess;
    if (stride == width) return cudaMemsetAsync(to, 0, width * (size_t)rows, stream);
    return cudaMemset2DAsync(to, stride, 0, width, (size_t)rows, stream);
}

/* Zeros in dweight and dbias, or in dfull_logits, before the values of the ids. With entries, dweight gets its zeros from the kernel
 * that writes the other rows. */
LK_HOST lk_status lk_support_clear(const char *op, const lk_linear_support_args &a, size_t of_t, cudaStream_t stream)
{
    const size_t bytes = a.dweight_dtype == LK_DTYPE_F32 ? 4 : of_t, of_bias = a.dbias_dtype == LK_DTYPE_F32 ? 4 : of_t;
    const size_t stride = (size_t)a.dweight_stride * bytes, full = (size_t)a.dfull_logits_stride * of_t;
    const bool none = a.tokens == 0 || a.entries == 0;
    cudaError_t error = cudaSuccess;
    if (a.dweight_ids && (none || a.vocab == 0))
        error = cudaMemsetAsync(a.dweight_rows, 0, sizeof(int32_t), stream);
    if (a.accumulate || a.vocab == 0) return lk_launched(op, error);
    if (none && !a.dweight_ids) error = lk_support_zeros(a.dweight, stride, (size_t)a.hidden * bytes, a.vocab, stream);
    if (a.dbias && !error) error = cudaMemsetAsync(a.dbias, 0, (size_t)a.vocab * of_bias, stream);
    if (!error) error = lk_support_zeros(a.dfull_logits, full, (size_t)a.vocab * of_t, a.tokens, stream);
    return lk_launched(op, error);
}

/* Sorts the entries by id: p->key and p->order become those of the sorted entries. */
LK_HOST lk_status lk_support_sort(const char *op, const lk_device *device, lk_support_call *p, cudaStream_t stream)
{
    const int bits = lk_log2(p->a.vocab + 1), threads = 32 * LK_SUPPORT_SORT_WARPS;
    int32_t *spare = p->order;
    lk_status status = LK_OK;
    p->order = NULL;
    for (p->shift = 0; p->shift < bits && !status; p->shift += LK_SUPPORT_DIGIT_BITS) {
        status = lk_launch_pdl(op, device, lk_support_count_kernel, p->sort_blocks, 1, threads, 0, stream, *p);
        if (!status) status = lk_launch_pdl(op, device, lk_support_sort_kernel, p->sort_blocks, 1, threads, 0, stream, *p);
        int32_t *const key = p->key, *const order = p->order ? p->order : spare;
        p->key = p->other_key, p->other_key = key, p->order = p->other_order, p->other_order = order;
    }
    return status;
}

template <class T, int Num>
LK_HOST lk_status lk_support_backward(const char *op, const lk_device *device, lk_support_call *p, cudaStream_t stream)
{
    const lk_linear_support_args &a = p->a;
    lk_status status = lk_support_launch(op, device, lk_support_backward_kernel, a.tokens, stream, *p);
    if (!status && a.dx) status = lk_support_launch(op, device, lk_support_dx_kernel<T, Num>, a.tokens * p->slices, stream, *p);
    if (status || !(a.dweight || a.dbias || a.dfull_logits)) return status;
    status = lk_support_clear(op, a, sizeof(T), stream);
    if (status || a.vocab == 0 || (a.entries == 0 && !a.dfull_logits)) return status;
    if (a.entries) status = lk_support_sort(op, device, p, stream);
    if (a.dfull_logits && !status) {
        const int64_t warps = lk_ceil_div(a.entries, 32), units = warps > a.tokens ? warps : a.tokens;
        return lk_support_launch(op, device, lk_support_scatter_kernel<T>, units, stream, *p);
    }
    if (!status && a.dweight_ids) status = lk_support_launch(op, device, lk_support_starts_kernel, p->tiles, stream, *p);
    if (!status && a.dweight_ids)
        status = lk_launch_pdl(op, device, lk_support_scan_kernel, 1, 1, 32 * LK_SUPPORT_SORT_WARPS, 0, stream, *p);
    if (!status) status = lk_support_launch(op, device, lk_support_dweight_kernel<T, Num>, p->rounds * p->slices, stream, *p);
    if (!status) status = lk_support_launch(op, device, lk_support_runs_kernel<T, Num>, (p->tiles - 1) * p->slices, stream, *p);
    return status;
}

template <class T, lk_direction direction>
LK_HOST lk_status lk_linear_support_run(const char *op, const lk_linear_support_args *args, cudaStream_t stream)
{
    const bool backward = direction == LK_BACKWARD;
    lk_device device = {};
    lk_support_call call = {};
    lk_linear_support_args &a = call.a;
    lk_tensor list[LK_SUPPORT_TENSORS] = {};
    int count = 0;
    bool vectors = false;
    a = *args;
    lk_checks checks = lk_support_check<T>(op, &a, backward, &device, list, &count);
    if (lk_rejected(&checks, LK_ERR_SHAPE)) return checks.status;
    lk_support_lay_out<T>(&call, backward, &vectors);
    lk_check_workspace(&checks, a.workspace, a.workspace_bytes, call.bytes);
    list[count++] = lk_workspace(a.workspace, call.bytes);
    lk_check_overlap(&checks, list, count);
    lk_check_end(&checks, list, count);
    if (checks.status) return checks.status;
    if (backward) a.support_logp = NULL; /* forward's */
    if (a.tokens == 0) { /* entries of no token */
        cudaError_t error = cudaSuccess;
        const size_t bytes = (size_t)a.entries * sizeof(float);
        if (backward) return lk_support_clear(op, a, sizeof(T), stream);
        if (!a.logits_given && args->logits) error = cudaMemsetAsync(a.logits, 0, bytes, stream);
        if (a.support_logp && !error) error = cudaMemsetAsync(a.support_logp, 0, bytes, stream);
        return lk_launched(op, error);
    }
    lk_status status = lk_support_launch(op, &device, lk_support_begin_kernel, a.tokens, stream, call);
    if constexpr (direction == LK_BACKWARD) {
        if (!status) status = vectors ? lk_support_backward<T, LK_VEC<T>>(op, &device, &call, stream)
                                      : lk_support_backward<T, 1>(op, &device, &call, stream);
    } else {
        const bool more = a.logp || a.lse || a.entropy || a.kl || a.support_logp;
        if (!status && !a.logits_given && a.full_logits)
            status = lk_support_launch(op, &device, lk_support_gather_kernel<T>, lk_ceil_div(a.entries, 32), stream, call);
        else if (!status && !a.logits_given)
            status = lk_support_launch(op, &device,
                                       vectors ? lk_support_logits_kernel<T, LK_VEC<T>> : lk_support_logits_kernel<T, 1>,
                                       a.entries, stream, call);
        if (!status && more) status = lk_support_launch(op, &device, lk_support_forward_kernel, a.tokens, stream, call);
    }
    return status;
}

#endif /* CUDA or the simulator */
#endif
