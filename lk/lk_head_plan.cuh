// SPDX-License-Identifier: MIT
/* lk_head_plan.cuh - the memory of linear_cross_entropy: the arrays of its workspace, and the plans that lk chooses from.
 *
 * A part of linear_cross_entropy.cuh, which includes it behind its struct. Alone it is empty.
 *
 * Needs: lk_gemm.cuh, lk_loss.cuh, lk_base.cuh.
 */
#include "lk_gemm.cuh"
#include "lk_loss.cuh"

#if defined(LK_LINEAR_CROSS_ENTROPY_CUH) && !defined(LK_HEAD_PLAN_CUH)
#define LK_HEAD_PLAN_CUH

#define LK_LCE_THREADS 256

/* At the start of the workspace. */
typedef struct {
    int64_t counted;
    float divisor;          /* of a mean: denominator, else the sum of class weights, else valid_rows */
    float weights;          /* the sum of all class weights */
    float alpha, zero, one; /* lk_cublas_product's scalars for 16-bit dZ: see lk_lce_prepare_kernel */
    int32_t too_many, bad;  /* not 0: more than max_counted count; some target is bad */
} lk_lce_counts;

/* A row's state over a stretch of columns, without the target; fields as in lk_ce_row. lk_lce_more: for entropy and argmax; its
 * top includes the target. */
typedef struct {
    float max, sum, weights, weighted;
} lk_lce_sums;
typedef struct {
    int64_t top;
    float entropic;
} lk_lce_more;

#define LK_LCE_ELSEWHERE INT32_MAX

#define LK_LCE_SAMPLE 8 /* columns that a row's reference is guessed from; all, where there are fewer */

/* Columns whose exponentials are kept in dweight's memory. */
#define LK_LCE_DWEIGHT_PARTS 3
typedef struct {
    int64_t first, cols; /* multiples of 256; cols is also the distance of rows */
    char *at;
} lk_lce_dweight_part;

/* The arrays of the workspace. A row is a token, or a counted token where rows are compacted. NULL: not there. */
typedef struct {
    lk_lce_counts *counts;
    int32_t *target;       /* [rows], the target's column here; -1: ignored, or no token; LK_LCE_ELSEWHERE: another rank has it;
                              a bad one: 0, with ranks LK_LCE_ELSEWHERE, and its factor is 0 */
    float *weight;         /* [rows], the target's class weight, scaled as class_weight */
    int32_t *token;        /* [rows], of compacted rows; -1: none */
    float *factor;         /* [rows], the gradient of the row's loss over counts->alpha */
    float *dlse, *dentropy; /* [rows] */
    float *loss, *z, *lse, *entropy; /* [rows] */
    int64_t *argmax;       /* [rows] */
    float *others;         /* panels, fused backward: [rows], sum_{j != y} p[j] */
    lk_ce_row *states;     /* panels: [chunk], of all columns except for the target's */
    float *logit;          /* fused: [rows], the target's */
    lk_lce_sums *sums;     /* fused: [chunk, stretches] */
    lk_lce_more *more;     /* fused, with entropy or argmax: likewise */
    float *sample;         /* fused: [chunk, LK_LCE_SAMPLE], logits without bias, of columns spread over the vocabulary */
    float *references;     /* fused: [chunk, kept tiles], what a row's exponentials of a tile are relative to */
    float *scale;          /* fused: [chunk], v of "Fused" below: a row's exponentials times v are its dZ; NULL: 1 */
    float *base;           /* saved: [rows], what the row's exponentials are relative to */
    float *target_dz;      /* fused: [rows], the target's dZ, which is in neither the exponentials nor dz */
    int2 *owners;          /* fused: [vocab], of the rows with this target and a target_dz that is not 0: the first, how many */
    void *bias;            /* [vocab], in the logits' type, as cuBLASLt wants it */
    float *class_weight;   /* [vocab], times valid_rows / weight_sum: with it class and z-loss terms have one divisor */
    float *dbias;          /* [splits, vocab], sums over tokens */
    void *x;               /* T [chunk, x_stride], compacted; then its dx */
    void *scaled_x;        /* fused: T [chunk, x_stride], times the row's factor */
    float *dx;             /* [chunk, hidden], sums over panels, or of the tail columns and the others */
    float *dweight;        /* [vocab, hidden], sums over chunks */
    int8_t *low;           /* fused: [tiles of dweight, LK_GEMM_ROWS LK_GEMM_COLS], the last 8 of a sum's 24 bits */
    int8_t *low_dx;        /* fused: likewise, of dx */
    void *logits;          /* [chunk, logits_stride]; dZ in place, 16-bit dZ of f32 logits in the first half of each row */
    /* fused: [chunk, cols] each, exponentials of the first columns; logits has the others' */
    lk_lce_dweight_part dweight_parts[LK_LCE_DWEIGHT_PARTS];
    float *slice;          /* [slice, logits_stride], f32 logits of a slice, or in saved; logits then holds dZ alone, in T */
    void *cublas;
    int64_t stretches;     /* fused: the most of a row that sums has room for */
    int64_t logits_stride, x_stride, splits;
    size_t bytes;          /* of all but cublas */
} lk_lce_workspace;

/* ---- The arrays of the workspace ----------------------------------------------------------------------------------------- */

#define LK_LCE_CUBLAS_BYTES ((size_t)32 << 20) /* NVIDIA's recommendation for cuBLASLt on Hopper */
#define LK_LCE_DEFAULT_SHARE 16 /* ..._workspace_bytes: a plan may take this part of the device's memory; on 80 GB it has all */
#define LK_LCE_FUSED_VOCAB 16384 /* up to so many columns stored logits come before FUSED */
#define LK_LCE_FEWEST 512 /* tokens of a chunk: dweight is added to a sum, with fewer at about the cost of a fourth matmul */
#define LK_LCE_WIDE 2048  /* columns of a panel: dx is added to a sum, with so many at little cost */
#define LK_LCE_NARROW 256 /* columns of a panel, if nothing else fits */

LK_HOST int64_t lk_lce_round_up(int64_t x, int64_t to)
{
    return lk_ceil_div(x, to) * to;
}
LK_HOST int64_t lk_lce_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

LK_HOST int64_t lk_lce_bytes_of(int type)
{
    return lk_dtype_bytes<lk_f32>(type);
}

/* Arrays begin at multiples of 256 wherever the memory begins, since cuBLASLt's algorithms depend on alignment. 256 bytes more
 * are enough. memory is NULL where only sizes are asked for. Arrays then begin at 256: NULL says that one is not there. */
LK_HOST char *lk_lce_base(void *memory)
{
    return memory ? (char *)(((uintptr_t)memory + 255) / 256 * 256) : (char *)256;
}

/* Whether dweight has sums of its own: it has 16 bits and several chunks. */
LK_HOST bool lk_lce_sums_dweight(const lk_lce_call *c, int64_t chunk)
{
    return c->a.dweight && c->a.dweight_dtype != LK_DTYPE_F32 && chunk < c->rows;
}

/* Whether a plan of chunks may have slices: 16-bit dZ needs half the memory of f32 logits. */
LK_HOST bool lk_lce_slices(const lk_lce_call *c, int path)
{
    const bool wider = c->type != LK_DTYPE_F32 && c->logits_type == LK_DTYPE_F32;
    return path == LK_LINEAR_CROSS_ENTROPY_CHUNKS && c->gradient && wider && !c->stores;
}

/* Whether dweight's memory may be scratch until it is written. */
LK_HOST bool lk_lce_lends(const lk_lce_call *c)
{
    const lk_lce_args &a = c->a;
    return a.dweight && !a.accumulate && a.dweight_stride == a.hidden && (uintptr_t)a.dweight % 256 == 0;
}

/* The rows of logits that fit into dweight, until its one product or its sums are written. */
LK_HOST int64_t lk_lce_rows_in_dweight(const lk_lce_call *c, int64_t chunk)
{
    const lk_lce_args &a = c->a;
    if (!lk_lce_lends(c) || !(chunk >= c->rows || lk_lce_sums_dweight(c, chunk))) return 0;
    return a.vocab * a.hidden * lk_lce_bytes_of(a.dweight_dtype) / (lk_lce_round_up(a.vocab, 64) * 4);
}

/* The number of tail columns, which have matmuls of their own: cuBLASLt is several times slower with 16-bit factors whose rows
 * are no multiple of 8. TF32 is assumed to be alike. */
LK_HOST int64_t lk_lce_tail_cols(const lk_lce_call *c, int64_t cols)
{
    return cols > 8 && (c->type != LK_DTYPE_F32 || c->a.tf32) ? cols % 8 : 0;
}

/* Whether stored logits take more time than FUSED, if both have as many matmuls: above `few` columns, and with a tail. */
LK_HOST bool lk_lce_many_columns(const lk_lce_call *c, int64_t few)
{
    const int64_t vocab = c->a.vocab;
    return vocab > few || (vocab > LK_LCE_WIDE && lk_lce_tail_cols(c, vocab));
}

/* Whether dx of a chunk is summed in f32 of the workspace: over panels, and in f16 with tail columns, since each of two sums
 * that nearly cancel may be beyond f16's range. */
LK_HOST bool lk_lce_sums_dx(const lk_lce_call *c, int path)
{
    if (path == LK_LINEAR_CROSS_ENTROPY_CHUNKS) return c->type == LK_DTYPE_F16 && lk_lce_tail_cols(c, c->a.vocab);
    return c->type != LK_DTYPE_F32 || c->compact;
}

/* The arrays that every plan has. */
LK_HOST lk_lce_workspace lk_lce_lay_out_rows(const lk_lce_call *c, bool fused, int64_t chunk, lk_arena *arena)
{
    const lk_lce_args &a = c->a;
    const int64_t rows = c->rows;
    const bool mean = a.reduction == LK_REDUCTION_MEAN;
    lk_lce_workspace w = {};
    w.x_stride = lk_lce_round_up(a.hidden, 64);
    w.splits = lk_lce_min(lk_ceil_div(512, lk_ceil_div(a.vocab, LK_LCE_THREADS)), lk_ceil_div(rows, 64));
    lk_take(&w.counts, arena, true, 1);
    lk_take(&w.target, arena, true, rows);
    lk_take(&w.weight, arena, a.class_weight, rows);
    lk_take(&w.token, arena, c->compact, rows);
    lk_take(&w.factor, arena, c->gradient, rows);
    lk_take(&w.dlse, arena, c->gradient && a.dlse, rows);
    lk_take(&w.dentropy, arena, c->gradient && a.dentropy, rows);
    lk_take(&w.loss, arena, c->gives_loss && a.loss, rows);
    lk_take(&w.z, arena, c->gives_loss && a.z_loss_out && a.z_loss > 0.0f, rows);
    lk_take(&w.lse, arena, true, rows);
    lk_take(&w.entropy, arena, a.entropy || a.dentropy, rows);
    lk_take(&w.argmax, arena, a.argmax, rows);
    w.bias = lk_take_bytes(arena, a.bias, a.vocab * lk_lce_bytes_of(fused ? LK_DTYPE_F32 : c->logits_type));
    const bool scaled = a.class_weight && mean && !a.denominator && a.z_loss > 0.0f && !(c->split && c->gives_loss);
    lk_take(&w.class_weight, arena, scaled, a.vocab);
    lk_take(&w.dbias, arena, a.dbias, w.splits * a.vocab);
    w.x = lk_take_bytes(arena, c->compact, chunk * w.x_stride * lk_lce_bytes_of(c->type));
    return w;
}

/* The arrays of a.saved; returns their bytes. Logits lie where those of a slice would: dZ has memory of its own. */
LK_HOST size_t lk_lce_lay_out_saved(const lk_lce_call *c, void *saved, lk_lce_workspace *w)
{
    const int64_t rows = c->rows, stride = lk_lce_round_up(c->a.vocab, 64);
    lk_arena arena = {(uintptr_t)lk_lce_base(saved), 0, 256};
    w->logits_stride = stride;
    if (c->stores) w->slice = (float *)lk_take_bytes(&arena, true, rows * stride * lk_lce_bytes_of(c->logits_type));
    else {
        lk_take(&w->base, &arena, true, rows);
        lk_take(&w->others, &arena, true, rows);
        lk_take(&w->logit, &arena, true, rows);
        w->logits = lk_take_bytes(&arena, true, rows * stride * 2);
    }
    return arena.used + 256;
}

/* The arrays of a plan that stores logits. Without slices dZ overwrites them. */
LK_HOST lk_lce_workspace lk_lce_lay_out_stored(const lk_lce_call *c, const lk_lce_plan *plan, void *workspace)
{
    const lk_lce_args &a = c->a;
    const bool panels = plan->path == LK_LINEAR_CROSS_ENTROPY_PANELS;
    const int64_t chunk = plan->chunk_tokens, slice = lk_lce_min(plan->slice_tokens, chunk);
    lk_arena arena = {(uintptr_t)lk_lce_base(workspace), 0, 256};
    lk_lce_workspace w = lk_lce_lay_out_rows(c, false, chunk, &arena);
    w.logits_stride = lk_lce_round_up(plan->panel_vocab, 64);
    lk_take(&w.others, &arena, panels, c->rows);
    lk_take(&w.states, &arena, panels, chunk);
    lk_take(&w.dx, &arena, a.dx && lk_lce_sums_dx(c, plan->path), chunk * a.hidden);
    lk_take(&w.dweight, &arena, lk_lce_sums_dweight(c, chunk), a.vocab * a.hidden);
    const int64_t in_dweight = slice ? lk_lce_rows_in_dweight(c, chunk) : 0;
    const int64_t row = w.logits_stride * lk_lce_bytes_of(slice || c->stores ? c->type : c->logits_type);
    w.logits = lk_take_bytes(&arena, !c->stores || c->gradient, chunk * row);
    lk_take(&w.slice, &arena, slice > in_dweight, slice * w.logits_stride);
    if (slice && slice <= in_dweight) w.slice = (float *)a.dweight;
    if (c->stores) (void)lk_lce_lay_out_saved(c, a.saved, &w);
    w.cublas = (void *)(arena.base + arena.used), w.bytes = arena.used + 256;
    return w;
}

/* FUSED: tiles of a stretch: the fewest rounds of all clusters, then the fewest stretches, at most `most`. */
LK_HOST int lk_lce_stretch(const lk_lce_call *c, int64_t rows, int64_t cols, int64_t most)
{
    const int64_t pairs = lk_ceil_div(rows, 2 * LK_GEMM_ROWS), tiles = lk_ceil_div(cols, LK_GEMM_COLS);
    int64_t best = tiles;
    double least = (double)lk_ceil_div(pairs, c->clusters) * ((double)tiles + 0.01);
    for (int64_t stretch = tiles; stretch > 1;) {
        stretch = lk_ceil_div(stretch, 2);
        const int64_t stretches = lk_ceil_div(tiles, stretch), items = pairs * stretches;
        const double time = (double)lk_ceil_div(items, c->clusters) * ((double)stretch + 0.01); /* 0.01: the merge at its end */
        if (time < 0.995 * least && stretches <= most && items < 1 << 30) best = stretch, least = time;
    }
    return (int)best;
}

/* The most stretches where exponentials or dZ are made: their states take half of the copy of x that may overwrite them, or
 * 1 KiB per row. */
LK_HOST int64_t lk_lce_most_stretches(const lk_lce_call *c)
{
    return c->a.hidden / 16 > 64 ? c->a.hidden / 16 : 64;
}

/* The memory of dweight that FUSED borrows. Rows of dweight may be written once the exponentials in them have been used. So the
 * first part lies behind the rows of its own columns. The rows of the second part's columns may be where the first part was,
 * and so on: each part is `times` as large as the one before. Returns all their columns. */
LK_HOST int64_t lk_lce_borrow(const lk_lce_call *c, lk_lce_dweight_part (&dweight_parts)[LK_LCE_DWEIGHT_PARTS])
{
    const lk_lce_args &a = c->a;
    const int64_t row = a.hidden * lk_lce_bytes_of(a.dweight_dtype), each = 2 * c->rows, tile = LK_GEMM_COLS;
    const double times = (double)each / (double)row;
    int64_t first = 0, free = (int64_t)((double)a.vocab / (1.0 + times * (1.0 + times * (1.0 + times)))) / tile * tile;
    if (!lk_lce_lends(c)) free = 0;
    /* Rows of dweight before `free` hold no exponentials. Those of columns before `first` have their place. */
    for (lk_lce_dweight_part &part : dweight_parts) {
        const int64_t cols = lk_lce_min(free - first, (int64_t)((double)(a.vocab - free) / times)) / tile * tile;
        part = {first, free > 0 && cols > 0 ? cols : 0, (char *)a.dweight + free * row};
        first += part.cols, free += lk_ceil_div(part.cols * each, 256 * row) * 256;
    }
    return first;
}

/* The arrays of FUSED. */
LK_HOST lk_lce_workspace lk_lce_lay_out_fused(const lk_lce_call *c, const lk_lce_plan *plan, void *workspace)
{
    const lk_lce_args &a = c->a;
    const int64_t rows = c->rows, chunk = plan->chunk_tokens, kept = plan->kept_vocab, own = kept - plan->lent_vocab;
    const int64_t width = kept < a.vocab && plan->panel_vocab > own ? plan->panel_vocab : own;
    const int64_t tiles = lk_ceil_div(a.vocab, LK_GEMM_COLS), pair = 2 * LK_GEMM_ROWS * LK_GEMM_COLS;
    const int64_t pairs = lk_ceil_div(chunk, 2 * LK_GEMM_ROWS), cols = lk_ceil_div(a.hidden, LK_GEMM_COLS);
    const int64_t alone = lk_ceil_div(a.vocab, plan->panel_vocab); /* stretches of forward by itself */
    const int64_t some = lk_ceil_div(tiles, lk_lce_stretch(c, chunk, a.vocab, lk_lce_most_stretches(c)));
    const bool keeps = c->gives_loss && kept, more = c->gives_loss && (a.entropy || a.argmax || a.dentropy);
    const bool panels = c->gradient && (plan->lent_vocab || (kept ? kept : plan->panel_vocab) < a.vocab);
    lk_arena arena = {(uintptr_t)lk_lce_base(workspace), 0, 256};
    lk_lce_workspace w = lk_lce_lay_out_rows(c, true, chunk, &arena);
    if (c->saves) (void)lk_lce_lay_out_saved(c, a.saved, &w);
    else lk_take(&w.logit, &arena, true, rows);
    lk_take(&w.target_dz, &arena, c->gradient, rows);
    lk_take(&w.owners, &arena, a.dweight || a.dbias, a.vocab);
    if (!c->gives_loss && (!c->saves || c->split)) lk_take(&w.others, &arena, true, rows);
    lk_take(&w.scale, &arena, c->gradient && kept, chunk);
    lk_arena instead = arena; /* v x overwrites what the factor kernel is the last to read */
    lk_take(&w.sample, &arena, keeps, chunk * LK_LCE_SAMPLE);
    w.stretches = c->gradient || c->saves ? some : alone;
    lk_take(&w.sums, &arena, c->gives_loss || !kept, chunk * w.stretches);
    lk_take(&w.more, &arena, more, chunk * w.stretches);
    lk_take(&w.references, &arena, keeps, chunk * lk_ceil_div(kept, LK_GEMM_COLS));
    w.scaled_x = lk_take_bytes(&instead, kept && a.dweight, chunk * w.x_stride * 2);
    if (arena.used < instead.used) arena = instead;
    lk_take(&w.low, &arena, lk_lce_sums_dweight(c, chunk), tiles * cols * pair);
    lk_take(&w.low_dx, &arena, a.dx && panels, pairs * cols * pair);
    if (!c->saves) w.logits_stride = lk_lce_round_up(width, 64);
    if (!c->saves) w.logits = lk_take_bytes(&arena, c->gradient, chunk * w.logits_stride * 2);
    if (plan->lent_vocab) (void)lk_lce_borrow(c, w.dweight_parts);
    w.cublas = (void *)(arena.base + arena.used), w.bytes = arena.used + 256;
    return w;
}

LK_HOST lk_lce_workspace lk_lce_lay_out(const lk_lce_call *c, const lk_lce_plan *plan, void *workspace)
{
    return plan->path == LK_LINEAR_CROSS_ENTROPY_FUSED ? lk_lce_lay_out_fused(c, plan, workspace)
                                                       : lk_lce_lay_out_stored(c, plan, workspace);
}

/* ---- Plans --------------------------------------------------------------------------------------------------------------- */

/* The bytes for cuBLASLt besides arrays of `bytes`, at least: a ninth, which is a tenth of both. FUSED has fewer, since they
 * could be columns that are kept. */
LK_HOST size_t lk_lce_reserve(size_t bytes, bool fused)
{
    const size_t most = fused ? LK_LCE_CUBLAS_BYTES / 4 : LK_LCE_CUBLAS_BYTES;
    return bytes / 9 < most ? bytes / 9 / 256 * 256 : most;
}

/* Whether cuBLASLt gets memory. In FUSED it does where it makes dweight: all but sums over chunks in 16 bits. The sample of
 * the logits gets no more than that. */
LK_HOST bool lk_lce_needs_cublas(const lk_lce_call *c, const lk_lce_plan *plan)
{
    return plan->path != LK_LINEAR_CROSS_ENTROPY_FUSED || (c->a.dweight && !lk_lce_sums_dweight(c, plan->chunk_tokens));
}

/* The smallest workspace that this plan fits into. Whatever the budget is, a plan needs the same. */
LK_HOST size_t lk_lce_need(const lk_lce_call *c, const lk_lce_plan *plan)
{
    const size_t bytes = lk_lce_lay_out(c, plan, NULL).bytes;
    const bool fused = plan->path == LK_LINEAR_CROSS_ENTROPY_FUSED;
    return bytes + (lk_lce_needs_cublas(c, plan) ? lk_lce_reserve(bytes, fused) : 0);
}
LK_HOST bool lk_lce_fits(const lk_lce_call *c, const lk_lce_plan *plan, size_t budget)
{
    return plan->chunk_tokens > 0 && lk_lce_need(c, plan) <= budget;
}

/* The length of the fewest about equal parts of at most `most`, rounded up to a multiple of `whole`. */
LK_HOST int64_t lk_lce_equal(int64_t all, int64_t most, int64_t whole)
{
    return lk_lce_min(lk_lce_round_up(lk_ceil_div(all, lk_ceil_div(all, most)), whole), all);
}

/* A plan that stores logits. */
LK_HOST lk_lce_plan lk_lce_stored_plan(int path, int64_t chunk, int64_t panel, int64_t slice)
{
    lk_lce_plan plan = {};
    plan.path = path, plan.chunk_tokens = chunk, plan.panel_vocab = panel, plan.slice_tokens = slice;
    return plan;
}

/* Gives the plan the tokens of a chunk within the budget: all, or those of the fewest equal chunks. False: they would be fewer
 * than `fewest`. */
LK_HOST bool lk_lce_fit_chunk(const lk_lce_call *c, lk_lce_plan *plan, size_t budget, int64_t fewest)
{
    const int64_t given = c->a.chunk_tokens, whole = 128;
    plan->chunk_tokens = given ? given : c->rows;
    if (given || lk_lce_fits(c, plan, budget)) return lk_lce_fits(c, plan, budget);
    int64_t low = 0, high = c->rows; /* low fits, high does not */
    while (high - low > 1) {
        plan->chunk_tokens = low + (high - low) / 2;
        *(lk_lce_fits(c, plan, budget) ? &low : &high) = plan->chunk_tokens;
    }
    plan->chunk_tokens = low < whole ? low : lk_lce_equal(c->rows, low / whole * whole, whole);
    if (plan->chunk_tokens < fewest && plan->chunk_tokens < lk_lce_equal(c->rows, fewest, whole)) return false;
    return lk_lce_fits(c, plan, budget);
}

/* The columns of the fewest about equal panels of at most `most`. */
LK_HOST int64_t lk_lce_panel_cols(const lk_lce_call *c, int64_t most)
{
    return c->a.panel_vocab ? c->a.panel_vocab : lk_lce_equal(c->a.vocab, most, 128);
}

LK_HOST bool lk_lce_may_be(const lk_lce_call *c, int path)
{
    if (c->saves) return path == (c->stores ? LK_LINEAR_CROSS_ENTROPY_CHUNKS : LK_LINEAR_CROSS_ENTROPY_FUSED);
    if (path == LK_LINEAR_CROSS_ENTROPY_CHUNKS && c->split) return false; /* its kernels see whole rows */
    return path == LK_LINEAR_CROSS_ENTROPY_FUSED ? c->fused : !c->a.path || c->a.path == path;
}

/* A plan of FUSED. kept: the columns whose exponentials are kept, the first `in_dweight` of them in dweight. */
LK_HOST lk_lce_plan lk_lce_fused_plan(int64_t chunk, int64_t kept, int64_t in_dweight, int64_t panel)
{
    lk_lce_plan plan = {};
    plan.path = LK_LINEAR_CROSS_ENTROPY_FUSED, plan.chunk_tokens = chunk;
    plan.kept_vocab = kept, plan.lent_vocab = in_dweight, plan.panel_vocab = panel;
    return plan;
}

/* Whether forward_backward may keep exponentials: where dZ is one factor per row times them. Then it may have chunks of tokens
 * too. */
LK_HOST bool lk_lce_keeps(const lk_lce_call *c)
{
    const lk_lce_args &a = c->a;
    const bool more = a.label_smoothing > 0.0f || a.entropy || a.argmax || a.dentropy;
    return c->gradient && c->gives_loss && !more && !a.panel_vocab;
}

/* The width of panels of at most `most` tiles that make `tiles` tiles of columns again in the least time: rounds of all
 * clusters for the logits and for dweight, times the length of their sums, and a round and a half for a panel's own costs. */
LK_HOST int64_t lk_lce_even_panel(const lk_lce_call *c, int64_t tiles, int64_t most)
{
    const int64_t hidden = c->a.hidden, cols = lk_ceil_div(hidden, LK_GEMM_COLS);
    const int64_t pairs = lk_ceil_div(c->rows, 2 * LK_GEMM_ROWS);
    int64_t best = most;
    double least = INFINITY;
    if (most >= tiles) return tiles * LK_GEMM_COLS;
    for (int64_t t = most; t > 0 && t >= most / 2; t--) {
        double time = 0.0;
        for (int64_t part : {t, tiles % t}) {
            const double logits = (double)lk_ceil_div(pairs * part, c->clusters);
            const double dweight = (double)lk_ceil_div(cols * part, c->clusters);
            const double each = (logits + 1.5) * (double)hidden + dweight * (double)c->rows;
            time += part == t ? each * (double)(tiles / t) : part ? each : 0.0;
        }
        if (time < least) best = t, least = time;
    }
    return best * LK_GEMM_COLS;
}

/* FUSED with all tokens at once. It keeps exponentials of as many columns as fit: of all, if the workspace has room for them;
 * else of some, in dweight and in the workspace; else of none. The other columns are made again, a panel at a time. narrow: the
 * fewest columns of a panel. */
LK_HOST bool lk_lce_plan_at_once(const lk_lce_call *c, size_t budget, int64_t narrow, lk_lce_plan *plan)
{
    const int64_t vocab = c->a.vocab, tile = LK_GEMM_COLS, given = lk_lce_round_up(c->a.panel_vocab, tile);
    lk_lce_dweight_part dweight_parts[LK_LCE_DWEIGHT_PARTS];
    if (given) {
        *plan = lk_lce_fused_plan(c->rows, 0, 0, lk_lce_min(given, vocab));
        return lk_lce_fits(c, plan, budget);
    }
    *plan = lk_lce_fused_plan(c->rows, vocab, 0, vocab);
    if (lk_lce_keeps(c) && lk_lce_fits(c, plan, budget)) return true;
    for (int keeps = lk_lce_keeps(c); keeps >= 0; keeps--) {
        const int64_t in_dweight = keeps ? lk_lce_borrow(c, dweight_parts) : 0, all = lk_ceil_div(vocab - in_dweight, tile);
        int64_t low = 0, high = all + 1; /* tiles: low fits, high does not. All come first: they need no sums of dx */
        for (int64_t tiles = all; high - low > 1; tiles = low + (high - low) / 2) {
            const int64_t cols = lk_lce_min(tiles * tile, vocab - in_dweight);
            *plan = lk_lce_fused_plan(c->rows, keeps ? in_dweight + cols : 0, in_dweight, cols);
            *(lk_lce_fits(c, plan, budget) ? &low : &high) = tiles;
        }
        const int64_t fewest = keeps && narrow < LK_LCE_WIDE ? LK_LCE_WIDE : narrow; /* keeping costs a copy of x */
        if (low == 0 || (low < all && low * tile < fewest)) continue;
        const int64_t cols = lk_lce_min(low * tile, vocab - in_dweight), kept = keeps ? in_dweight + cols : 0;
        const int64_t panel = kept == vocab ? vocab : lk_lce_even_panel(c, lk_ceil_div(vocab - kept, tile), low);
        *plan = lk_lce_fused_plan(c->rows, kept, in_dweight, lk_lce_min(panel, vocab));
        return true;
    }
    return false;
}

/* FUSED with about the fewest chunks of tokens that fit. It keeps all exponentials of a chunk, and sums dweight. */
LK_HOST bool lk_lce_plan_fused_chunks(const lk_lce_call *c, size_t budget, lk_lce_plan *plan)
{
    const int64_t given = c->a.chunk_tokens, whole = 2 * LK_GEMM_ROWS;
    for (int64_t chunks = 1; lk_lce_keeps(c); chunks += 1 + chunks / 16) {
        const int64_t chunk = given ? given : lk_lce_min(lk_lce_round_up(lk_ceil_div(c->rows, chunks), whole), c->rows);
        *plan = lk_lce_fused_plan(chunk, c->a.vocab, 0, c->a.vocab);
        if (lk_lce_fits(c, plan, budget)) return true;
        if (given || chunk <= whole) break;
    }
    return false;
}

/* FUSED. Columns that are made again cost a matmul's part: a third of the time for all of them. Chunks of C tokens cost the
 * sums of dweight: a share of 60 / C of the time in f32, 170 / C in 24 bits; these two are estimates
 * (bench/results/choices/linear_cross_entropy.md). */
LK_HOST bool lk_lce_plan_fused(const lk_lce_call *c, size_t budget, int64_t narrow, lk_lce_plan *plan)
{
    const int64_t vocab = c->a.vocab, rows = c->rows, given = lk_lce_round_up(c->a.panel_vocab, LK_GEMM_COLS);
    const int64_t all = given ? given : lk_lce_round_up(vocab, LK_GEMM_COLS); /* forward: the columns of a stretch */
    lk_lce_plan chunks = {};
    if (!c->fused) return false;
    if (c->saves || !c->gradient) { /* nothing to choose */
        *plan = lk_lce_fused_plan(rows, c->saves ? vocab : 0, 0, c->saves ? vocab : all);
        const size_t least = lk_lce_need(c, plan);
        if (least > budget) return false;
        const size_t each = sizeof(lk_lce_sums) + (c->a.entropy || c->a.argmax ? sizeof(lk_lce_more) : 0);
        /* Stretches besides the first. Arrays take whole 256 bytes: 16 states. */
        const int64_t extra = (int64_t)((budget - least) / each / (size_t)lk_lce_round_up(rows, 16));
        if (!c->saves && !given)
            plan->panel_vocab = (int64_t)lk_lce_stretch(c, rows, vocab, lk_lce_min(1 + extra, vocab)) * LK_GEMM_COLS;
        return true;
    }
    const bool must_chunk = lk_lce_keeps(c) && c->a.chunk_tokens && c->a.chunk_tokens < rows;
    const bool once = !must_chunk && lk_lce_plan_at_once(c, budget, narrow, plan);
    if (once && (plan->kept_vocab == vocab || !lk_lce_keeps(c))) return true;
    if (!lk_lce_plan_fused_chunks(c, budget, &chunks)) return once;
    const double again = (double)(vocab - plan->kept_vocab) / (double)vocab / 3.0;
    const double sums = !c->a.dweight ? 0.0 : c->a.dweight_dtype == LK_DTYPE_F32 ? 60.0 : 170.0;
    if (!once || again > sums / (double)chunks.chunk_tokens) *plan = chunks;
    return true;
}

/* The smallest workspace of a path's plans. Chunks of still fewer tokens would save little. */
LK_HOST size_t lk_lce_smallest(const lk_lce_call *c, int path)
{
    const int64_t given = c->a.chunk_tokens, vocab = c->a.vocab, tile = LK_GEMM_COLS;
    if (!lk_lce_may_be(c, path)) return SIZE_MAX;
    if (path == LK_LINEAR_CROSS_ENTROPY_FUSED) {
        const int64_t few = given ? given : lk_lce_min(c->rows, 2 * LK_GEMM_ROWS);
        const int64_t own = lk_lce_round_up(c->a.panel_vocab, tile), stretch = own ? own : lk_lce_round_up(vocab, tile);
        const bool keeps = lk_lce_keeps(c), must_chunk = keeps && given && given < c->rows;
        const lk_lce_plan chunk = lk_lce_fused_plan(few, vocab, 0, vocab);
        const int64_t panel = c->saves ? vocab : c->gradient ? lk_lce_min(own ? own : tile, vocab) : stretch;
        const lk_lce_plan once = lk_lce_fused_plan(c->rows, c->saves ? vocab : 0, 0, panel);
        const size_t in_chunks = keeps ? lk_lce_need(c, &chunk) : SIZE_MAX;
        const size_t at_once = must_chunk ? SIZE_MAX : lk_lce_need(c, &once);
        return in_chunks < at_once ? in_chunks : at_once;
    }
    const int64_t few = given ? given : lk_lce_min(c->rows, 64), slice = lk_lce_slices(c, path) ? c->a.slice_tokens : 0;
    const int64_t panel = path == LK_LINEAR_CROSS_ENTROPY_CHUNKS ? vocab : lk_lce_panel_cols(c, LK_LCE_NARROW);
    const lk_lce_plan some = lk_lce_stored_plan(path, few, panel, slice);
    const lk_lce_plan all = lk_lce_stored_plan(path, given ? given : c->rows, panel, slice);
    const size_t in_chunks = lk_lce_need(c, &some), at_once = lk_lce_need(c, &all);
    return in_chunks < at_once ? in_chunks : at_once;
}

/* The smallest workspace of all plans. In an open query FUSED may still be ruled out. */
LK_HOST size_t lk_lce_minimum(const lk_lce_call *c)
{
    const bool sure = !c->placement_unknown || c->a.path || c->saves;
    size_t least = SIZE_MAX;
    if (c->rows == 0 || c->a.vocab == 0) return 0;
    for (int path = LK_LINEAR_CROSS_ENTROPY_CHUNKS; path <= LK_LINEAR_CROSS_ENTROPY_FUSED; path++) {
        if (path == LK_LINEAR_CROSS_ENTROPY_FUSED && !sure) continue;
        const size_t bytes = lk_lce_smallest(c, path);
        if (bytes < least) least = bytes;
    }
    return least;
}

/* All columns of chunks of tokens: their logits; else their dZ, and f32 logits of slices, the longest that fit. The last ones
 * lie in dweight. */
LK_HOST bool lk_lce_plan_chunks(const lk_lce_call *c, size_t budget, int64_t fewest, lk_lce_plan *plan)
{
    const int path = LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    const bool slices = lk_lce_slices(c, path);
    const int64_t given = slices ? c->a.slice_tokens : 0, in_dweight = lk_lce_rows_in_dweight(c, fewest) / 128 * 128;
    const int64_t lengths[] = {given, 4096, 2048, in_dweight};
    if (!lk_lce_may_be(c, path)) return false;
    for (int i = 0; i < (slices && !given ? LK_COUNT(lengths) : 1); i++) {
        *plan = lk_lce_stored_plan(path, 0, c->a.vocab, lengths[i]);
        if (lk_lce_fit_chunk(c, plan, budget, fewest)) return true;
    }
    return false;
}

/* Panels of about `cols` columns: of all tokens, else of the fewest chunks. Then they are doubled while they fit. */
LK_HOST bool lk_lce_plan_panels(const lk_lce_call *c, size_t budget, int64_t cols, int64_t fewest,
                                lk_lce_plan *plan)
{
    const int path = LK_LINEAR_CROSS_ENTROPY_PANELS;
    if (!lk_lce_may_be(c, path)) return false;
    *plan = lk_lce_stored_plan(path, 0, lk_lce_panel_cols(c, cols), 0);
    if (!lk_lce_fit_chunk(c, plan, budget, fewest)) return false;
    for (lk_lce_plan wider = *plan; cols < c->a.vocab; *plan = wider) {
        wider.panel_vocab = lk_lce_panel_cols(c, cols *= 2);
        if (!lk_lce_fits(c, &wider, budget)) break;
    }
    return true;
}

/* The plan: the first of this list that fits. Chunks are short only where CHUNKS' smallest plan needs no more than that of
 * PANELS; else more memory could mean PANELS, and one more matmul. */
LK_HOST bool lk_lce_search(const lk_lce_call *c, size_t budget, lk_lce_plan *plan)
{
    const bool no_more = !c->gradient || !c->gives_loss || lk_lce_keeps(c); /* FUSED has no matmul more than CHUNKS */
    const bool fused_first = no_more && (!c->gradient || lk_lce_many_columns(c, LK_LCE_FUSED_VOCAB));
    const size_t panels = lk_lce_smallest(c, LK_LINEAR_CROSS_ENTROPY_PANELS);
    const bool short_chunks = lk_lce_smallest(c, LK_LINEAR_CROSS_ENTROPY_CHUNKS) <= panels;
    return (fused_first && lk_lce_plan_fused(c, budget, LK_LCE_WIDE, plan)) ||
           lk_lce_plan_chunks(c, budget, c->rows, plan) ||
           lk_lce_plan_chunks(c, budget, LK_LCE_FEWEST, plan) ||
           lk_lce_plan_fused(c, budget, LK_LCE_WIDE, plan) ||
           (short_chunks && lk_lce_plan_chunks(c, budget, 1, plan)) ||
           lk_lce_plan_panels(c, budget, LK_LCE_WIDE, LK_LCE_FEWEST, plan) ||
           lk_lce_plan_fused(c, budget, LK_LCE_NARROW, plan) ||
           lk_lce_plan_panels(c, budget, LK_LCE_NARROW, 1, plan);
}

/* What the plan's text says. */
LK_HOST void lk_lce_describe(const lk_lce_call *c, const lk_lce_workspace &w, lk_lce_plan *plan)
{
    static const char *const sums[] = {"", ", dweight summed in the caller's f32", ", dweight summed in f32 of the workspace",
                                       ", dweight summed in 24 bits"};
    const bool fused = plan->path == LK_LINEAR_CROSS_ENTROPY_FUSED, own = lk_lce_sums_dweight(c, plan->chunk_tokens);
    const int sum = !c->a.dweight || plan->chunks == 1 ? 0 : !own ? 1 : fused ? 3 : 2;
    const int64_t columns = fused ? c->a.vocab : c->a.vocab - (plan->panels - 1) * plan->panel_vocab;
    const int tail = fused && (!c->a.dweight || own) ? 0 : (int)lk_lce_tail_cols(c, columns);
    const char *kept = fused ? plan->kept_vocab ? "bf16 exponentials of" : "no stored" : plan->exact ? "f32" : "16-bit";
    char last[40] = "", parts[80] = "";
    if (c->stores) snprintf(parts, sizeof parts, " in saved");
    else if (w.slice)
        snprintf(parts, sizeof parts, " of %lld tokens at a time%s", (long long)plan->slice_tokens,
                 (void *)w.slice == c->a.dweight ? " in dweight" : "");
    if (plan->lent_vocab || (plan->kept_vocab && plan->kept_vocab < c->a.vocab))
        snprintf(parts, sizeof parts, " of %lld columns, %lld of them in dweight", (long long)plan->kept_vocab,
                 (long long)plan->lent_vocab);
    if (tail) snprintf(last, sizeof last, ", %d tail column%s", tail, tail == 1 ? "" : "s");
    snprintf(plan->text, sizeof plan->text, "%lld x %lld tokens, %lld x %lld columns, %s logits%s%s, %d matmuls%s: %s%s%s",
             (long long)plan->chunks, (long long)plan->chunk_tokens, (long long)plan->panels, (long long)plan->panel_vocab,
             kept, parts, sums[sum], plan->matmuls, last, plan->exact ? "exact" : "fast",
             c->why_not_fused[0] ? "; FUSED, for sm_90a, is left out" : "", c->why_not_fused);
}

/* The plan within the budget, which is at least `least`. cuBLASLt gets what is left. A plan may need less than the budget, and
 * with those bytes the search may find another plan. So it is repeated until a plan is also that of its own bytes. */
LK_HOST void lk_lce_choose(const lk_lce_call *c, size_t least, size_t budget, lk_lce_plan *plan)
{
    const int64_t vocab = c->a.vocab;
    lk_lce_workspace w = {};
    *plan = {};
    if (c->rows == 0 || c->a.vocab == 0) {
        snprintf(plan->text, sizeof plan->text, "no %s, no workspace", c->rows ? "columns" : "tokens");
        return;
    }
    bool fused = false;
    for (size_t before = 0; before != budget;) {
        before = budget;
        lk_lce_search(c, budget, plan);
        fused = plan->path == LK_LINEAR_CROSS_ENTROPY_FUSED;
        w = lk_lce_lay_out(c, plan, NULL);
        const size_t left = budget - w.bytes, most = lk_lce_needs_cublas(c, plan) ? LK_LCE_CUBLAS_BYTES : 0;
        plan->cublas_bytes = left < most ? left / 256 * 256 : most;
        budget = w.bytes + plan->cublas_bytes < least ? least : w.bytes + plan->cublas_bytes;
    }
    const int64_t again = fused && c->gradient ? vocab - plan->kept_vocab : 0; /* columns that are made for the gradients */
    plan->workspace_bytes = budget, plan->minimum_bytes = least;
    plan->slice_tokens = lk_lce_min(plan->slice_tokens, plan->chunk_tokens);
    plan->chunks = lk_ceil_div(c->rows, plan->chunk_tokens);
    plan->panel_vocab = lk_lce_min(plan->panel_vocab, vocab);
    plan->panels = lk_ceil_div(again ? again : vocab, plan->panel_vocab);
    plan->matmuls = !(c->saves && c->gradient) + (c->a.dx != NULL) + (c->a.dweight != NULL);
    if (plan->path == LK_LINEAR_CROSS_ENTROPY_PANELS && c->gradient && !c->split) plan->matmuls++;
    if (again && c->gives_loss) plan->matmuls++;
    plan->exact = fused || c->logits_type == LK_DTYPE_F32; /* as the sums of tensor cores are */
    lk_lce_describe(c, w, plan);
}

#endif
