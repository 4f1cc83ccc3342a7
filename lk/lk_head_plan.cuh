// SPDX-License-Identifier: MIT
/* lk_head_plan.cuh - the memory of a head: the arrays of its workspace, the plans that lk chooses from, and what a plan is in
 * words. Arithmetic alone, by the host: any C++17 compiler reads it, and there is no CUDA in it.
 *
 *   what a call needs    lk_head_shape: its sizes, and which tensors and options it has
 *   how it is done       lk_head_plan: the path, and the lengths of chunks, panels and slices
 *   arrays               lk_head_lay_out puts those of a plan into a workspace, or counts their bytes: lk_head_workspace
 *   the choice           lk_head_plan_begin finds the smallest workspace of each path. lk_head_choose takes the first plan of a
 *                        list that fits into a budget (lk_head_search), lk_head_describe says it in words
 *
 *     lk_head_shape shape = {};
 *     shape.rows = 8192, shape.hidden = 4096, shape.vocab = 131072, ...;
 *     lk_head_planner planner;
 *     lk_head_plan plan;
 *     lk_head_plan_begin(&planner, &shape);
 *     lk_head_choose(&planner, budget, &plan);      with budget >= planner.least
 *
 * Plans themselves are described in lk/linear_cross_entropy.md, those of two heads in lk/linear_kl.md.
 *
 * Needs: lk_base.cuh, lk_ptx.cuh.
 */
#ifndef LK_HEAD_PLAN_CUH
#define LK_HEAD_PLAN_CUH

#include "lk_base.cuh"

#ifdef __cplusplus

#include <math.h>
#include <stdio.h>

/* The paths, numbered as LK_LINEAR_CROSS_ENTROPY_* are. */
enum { LK_HEAD_PATH_CHUNKS = 1, LK_HEAD_PATH_PANELS = 2, LK_HEAD_PATH_FUSED = 3 };

/* ---- What a plan follows from -------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t rows;               /* tokens, or max_counted where rows are compacted */
    int64_t hidden, vocab, classes; /* classes: the columns of all ranks */
    int64_t dweight_stride;
    int64_t chunk_tokens, panel_vocab, slice_tokens; /* the caller's; 0: lk chooses */
    void *dweight, *saved;      /* arrays may lie there. NULL: there is none */
    const char *why_not_fused;  /* why fused is ruled out, where the text says it; else "" */
    int path;                   /* the caller's; 0: lk chooses */
    int type, logits_type, dweight_dtype; /* LK_DTYPE_*, not LK_DTYPE_T */
    int clusters;               /* fused: that the device runs at a time, one per two SMs */
    bool gives_loss, gradient, compact;
    bool saves;                 /* forward leaves, or backward reads, `saved` */
    bool split;                 /* the columns are split over ranks */
    bool stores;                /* `saved` has logits, not exponentials */
    bool no_panels;             /* the plan may not be LK_HEAD_PATH_PANELS; with `split` it is CHUNKS */
    bool no_targets;            /* a row has no target, and no lse */
    bool two_heads;             /* other_logits has a second head's logits. Then 16-bit dZ never overwrites f32 logits */
    bool several_passes;        /* the call goes through the logits several times, and keeps them where one slice has all tokens */
    bool fused;                 /* the plan may be, or must be, LK_HEAD_PATH_FUSED */
    bool placement_unknown;     /* a query without x or weight: where they lie may still rule out fused */
    bool bias, other_bias, class_weight, dlse, dentropy, denominator, loss, z_loss_out, entropy, argmax, dx, dbias; /* there is one */
    bool row_weight, statistics, lse_low; /* likewise */
    bool softcap, label_smoothing, z_loss, mean, accumulate, tf32; /* the option is on */
} lk_head_shape;

/* How a call is done. A stretch, in FUSED, is a number of neighbouring tiles of columns: a row has one state for all of them. */
typedef struct {
    int path;
    int64_t chunk_tokens, panel_vocab; /* tokens of a chunk, columns of a panel; FUSED's forward: columns of a stretch */
    int64_t slice_tokens;       /* tokens of a chunk whose f32 logits exist at a time; 0: no slices */
    bool rounds;                /* CHUNKS: dweight is rounded after each chunk, and has no sums in the workspace */
    int64_t kept_vocab;         /* FUSED: columns whose exponentials are kept */
    int64_t lent_vocab;         /* of those, the lent ones: they are kept in dweight's memory */
    bool f32_dx;                /* FUSED, all columns in one panel: cuBLASLt computes dx in f32, and a pass rounds it */
    size_t bytes, need;         /* of the arrays; of the smallest workspace that it fits into. lk_head_fits sets both */
    size_t workspace_bytes;     /* this and what follows, once it is chosen: what the plan uses, cublas_bytes included */
    size_t cublas_bytes;        /* cuBLASLt's part */
    int64_t chunks, panels;
    int matmuls, exact;         /* as in lk_linear_cross_entropy_plan */
} lk_head_plan;

#define LK_HEAD_THREADS 256 /* of a block of the kernels for rows */

/* FUSED's tiles are those of lk_gemm.cuh. */
#define LK_HEAD_TILE_COLS 256
#define LK_HEAD_PAIR_ROWS 256 /* of the two tiles of a cluster */

/* ---- The arrays of the workspace ----------------------------------------------------------------------------------------- */

/* At the start of the workspace. */
typedef struct {
    int64_t counted;
    float divisor;          /* of a mean: denominator, else the sum of class weights, else valid_rows */
    float weights;          /* the sum of all class weights */
    float alpha, zero, one; /* lk_cublas_product's scalars: 16-bit dZ is stored divided by alpha */
    int32_t too_many, bad;  /* not 0: more than max_counted count; some target is bad, */
    int32_t spoils;         /* and its row_weight is not 0 */
} lk_head_counts;

/* A row's state over a stretch of columns, without the target; fields as in lk_ce_row. lk_head_more: for entropy and argmax; its
 * top includes the target. */
typedef struct {
    float max, sum, weights, weighted;
} lk_head_sums;
typedef struct {
    int64_t top;
    float entropic;
} lk_head_more;

/* With statistics lk_head_more is this one, in the same array. It has 32 bytes, so that 16 of them take whole 256 bytes. */
typedef struct alignas(16) {
    int64_t top;
    float entropic, squares, total;
} lk_head_more_squares;

#define LK_HEAD_STATE_BYTES 32 /* of an lk_ce_row: a state takes so many at most; with statistics of an lk_ce_row_squares: */
#define LK_HEAD_STATISTICS_BYTES 40

#define LK_HEAD_SAMPLE 8 /* columns that a row's reference is guessed from; all, where there are fewer */

/* The first row with a target, and how many there are. */
typedef struct alignas(8) {
    int first, count;
} lk_head_owner;

/* Columns whose exponentials are kept in dweight's memory. */
#define LK_HEAD_DWEIGHT_PARTS 3
typedef struct {
    int64_t first, cols; /* multiples of 256; cols is also the distance of rows */
    char *at;
} lk_head_dweight_part;

/* The arrays of the workspace. A row is a token, or a counted token where rows are compacted. NULL: not there. */
typedef struct {
    lk_head_counts *counts;
    int32_t *target;       /* [rows], the target's column; LK_IGNORED: or no token. A bad target's factor is 0. Its column is
                              0, with ranks LK_ELSEWHERE, as that of a target that another rank has. Panels' columns are
                              numbered among those of all ranks */
    float *weight;         /* [rows], the target's class weight, scaled as class_weight */
    float *row_weight;     /* [rows], the caller's; where the call gives a loss */
    int32_t *token;        /* [rows], of compacted rows; -1: none */
    float *factor;         /* [rows], the gradient of the row's loss, divided by counts->alpha; in cross entropy times row_weight */
    float *dlse, *dentropy; /* [rows] */
    float *loss, *z, *lse, *entropy; /* [rows]; entropy with statistics [4, rows] */
    float *lse_low;        /* [rows], what lse was rounded by; NULL: not known */
    int64_t *argmax;       /* [rows] */
    float *others;         /* panels, fused backward: [rows], sum_{j != y} p[j] */
    void *states;          /* panels: packed states [chunk], of the columns so far, except for the target's */
    float *logit;          /* fused: [rows], the target's */
    lk_head_sums *sums;     /* fused: [chunk, stretches] */
    lk_head_more *more;     /* fused, with entropy, argmax or dentropy: [chunk, stretches]; statistics: lk_head_more_squares */
    float *sample;         /* fused: [chunk, LK_HEAD_SAMPLE], logits without bias, of columns spread over the vocabulary */
    float *references;     /* fused: [chunk, kept tiles], what a row's exponentials of a tile are relative to */
    float *scale;          /* fused: [chunk], v of lk_head_sm90.cuh: a row's exponentials times v are its dZ; NULL: 1 */
    float *base;           /* saved: [rows], what the row's exponentials are relative to */
    float *target_dz;      /* fused: [rows], the target's dZ, which is in neither the exponentials nor dz */
    lk_head_owner *owners;  /* fused: [vocab], of the rows with this target and a target_dz that is not 0 */
    void *bias, *other_bias; /* [vocab], in the logits' type, as cuBLASLt wants it */
    float *class_weight;   /* [vocab], panels: [classes], those of all ranks. Each weight times valid_rows / weight_sum, so that
                              class and z-loss terms have one divisor */
    float *dbias;          /* [splits, vocab], sums over tokens */
    void *x;               /* T [chunk, x_stride], compacted; then its dx */
    void *tail;            /* stored logits: T [8, x_stride], weight of the tail columns, and rows of zeros */
    void *scaled_x;        /* fused: T [chunk, x_stride], v x; over sample, sums, more and references */
    float *dx;             /* [chunk, hidden], sums over panels, or of the tail columns and the others; fused: f32_dx, over sample,
                              sums, more and references, before scaled_x, or in dweight */
    float *dweight;        /* [vocab, hidden], sums over chunks */
    int8_t *low;           /* fused: [tiles of dweight, LK_GEMM_ROWS LK_GEMM_COLS], the last 8 of a sum's 24 bits */
    int8_t *low_dx;        /* fused: as low, of dx */
    void *logits;          /* [chunk, logits_stride]; dZ in place, 16-bit dZ of f32 logits in the first half of each row */
    /* fused: [chunk, cols] each, exponentials of the first columns; logits has the others' */
    lk_head_dweight_part dweight_parts[LK_HEAD_DWEIGHT_PARTS];
    float *slice;          /* [slice, logits_stride], f32 logits of a slice, or in saved; logits then holds dZ alone, in T */
    void *other_logits;    /* two heads: [slice, logits_stride], or without slices [chunk, logits_stride] */
    void *cublas;
    int64_t stretches;     /* fused: of a row, at most; sums has room for so many */
    int64_t logits_stride, x_stride, splits;
    size_t bytes;          /* of all but cublas */
} lk_head_workspace;

#define LK_HEAD_CUBLAS_BYTES ((size_t)32 << 20) /* NVIDIA's recommendation for cuBLASLt on Hopper */
#define LK_HEAD_FUSED_VOCAB 16384 /* up to so many columns stored logits come before FUSED that computes some again */
#define LK_HEAD_FEWEST 512 /* tokens of a chunk: each adds to a sum of dweight, which with fewer costs as much as a fourth matmul */
#define LK_HEAD_WIDE 2048  /* columns of a panel: each adds to a sum of dx, which costs little with so many */
#define LK_HEAD_NARROW 256 /* columns of a panel, if nothing else fits */

LK_HOST int64_t lk_head_round_up(int64_t x, int64_t to)
{
    return lk_ceil_div(x, to) * to;
}
LK_HOST int64_t lk_head_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

LK_HOST int64_t lk_head_bytes_of(int type)
{
    return type == LK_DTYPE_F32 ? 4 : 2;
}

/* Arrays begin at multiples of 256 wherever the memory begins, since cuBLASLt's algorithms depend on alignment. 256 bytes more
 * are enough. memory is NULL where only sizes are asked for. Arrays then begin at 256: NULL says that one is not there. */
LK_HOST char *lk_head_base(void *memory)
{
    return memory ? (char *)(((uintptr_t)memory + 255) / 256 * 256) : (char *)256;
}

/* Whether a dweight of 16 bits has to be summed over several chunks. */
LK_HOST bool lk_head_sums_dweight(const lk_head_shape *s, int64_t chunk)
{
    return s->dweight && s->dweight_dtype != LK_DTYPE_F32 && chunk < s->rows;
}

/* Whether short chunks may round dweight. Calls without PANELS need this: else they could not run in a workspace that is smaller
 * than the f32 sums of dweight. */
LK_HOST bool lk_head_may_round(const lk_head_shape *s)
{
    return s->no_panels && s->dweight && s->dweight_dtype != LK_DTYPE_F32;
}

/* Whether a plan of chunks may have slices: where 16-bit dZ needs half the memory of f32 logits. With two heads it then must, since
 * the loss's kernel cannot write such dZ over the logits. */
LK_HOST bool lk_head_slices(const lk_head_shape *s, int path)
{
    const bool wider = s->type != LK_DTYPE_F32 && s->logits_type == LK_DTYPE_F32;
    return path == LK_HEAD_PATH_CHUNKS && s->gradient && wider && !s->stores;
}

/* Whether dweight's memory may be scratch until it is written. */
LK_HOST bool lk_head_lends(const lk_head_shape *s)
{
    return s->dweight && !s->accumulate && s->dweight_stride == s->hidden && (uintptr_t)s->dweight % 256 == 0;
}

/* FUSED: whether dx in f32 fits into dweight, which is written later. */
LK_HOST bool lk_head_dx_in_dweight(const lk_head_shape *s)
{
    return lk_head_lends(s) && s->rows * 4 <= s->vocab * lk_head_bytes_of(s->dweight_dtype);
}

/* How many tokens' logits (with two heads, of both) fit into dweight's memory, which is free until dweight's one matmul, or until
 * the pass that rounds its sums. 0: it may not be scratch, or it is f32 and the sum over chunks itself. */
LK_HOST int64_t lk_head_rows_in_dweight(const lk_head_shape *s, int64_t chunk)
{
    if (!lk_head_lends(s) || !(chunk >= s->rows || lk_head_sums_dweight(s, chunk))) return 0;
    const int64_t each = lk_head_round_up(s->vocab, 64) * 4 * (s->two_heads ? 2 : 1);
    return s->vocab * s->hidden * lk_head_bytes_of(s->dweight_dtype) / each;
}

/* The number of tail columns, which have matmuls of their own: cuBLASLt is several times slower with 16-bit factors whose rows
 * are no multiple of 8. TF32 is assumed to be alike. */
LK_HOST int64_t lk_head_tail_cols(const lk_head_shape *s, int64_t cols)
{
    return cols > 8 && (s->type != LK_DTYPE_F32 || s->tf32) ? cols % 8 : 0;
}

/* Whether a matmul for logits takes the tail columns from a copy that has eight rows. cuBLASLt has no fast algorithm for 3, 5 or 7
 * of them, and for many tokens for no other number; the copy is a launch more. A bias would need a copy too. */
LK_HOST bool lk_head_copies_tail(const lk_head_shape *s)
{
    const int64_t tail = lk_head_tail_cols(s, s->vocab);
    return tail && s->hidden % 8 == 0 && !s->bias && s->rows > 1 && ((tail > 1 && tail % 2) || s->rows >= 2048);
}

/* Whether stored logits take more time than FUSED, if both have as many matmuls: above `few` columns; with a tail above fewer. */
LK_HOST bool lk_head_many_columns(const lk_head_shape *s, int64_t few)
{
    const int64_t vocab = s->vocab;
    return vocab > few || (vocab > LK_HEAD_WIDE && lk_head_tail_cols(s, vocab));
}

/* FUSED: how many stretches of a pair of row tiles run at a time: one per cluster. In forward by itself up to 128 rows are one row
 * tile, and each block of a cluster has stretches of its own. */
LK_HOST int64_t lk_head_at_once(const lk_head_shape *s, int64_t rows)
{
    return !s->gradient && !s->saves && rows <= LK_HEAD_PAIR_ROWS / 2 ? 2 * (int64_t)s->clusters : s->clusters;
}

/* FUSED: how many tiles a stretch has for the least time. Clusters take whole stretches, in rounds. Of about equal times the fewest
 * stretches win, at most `most` of them. They are tried from few to many, so a smaller `most` only ends the list earlier. */
LK_HOST int lk_head_stretch(const lk_head_shape *s, int64_t rows, int64_t cols, int64_t most)
{
    const int64_t pairs = lk_ceil_div(rows, LK_HEAD_PAIR_ROWS), tiles = lk_ceil_div(cols, LK_HEAD_TILE_COLS);
    const int64_t at_once = lk_head_at_once(s, rows);
    const int64_t few = 32; /* up to so many stretches, and up to so many tiles of one, every number is tried */
    int64_t best = tiles;
    double least = INFINITY;
    for (int64_t i = 1; i <= 2 * few; i++) {
        const int64_t stretch = i <= few ? lk_ceil_div(tiles, i) : 2 * few + 1 - i, stretches = lk_ceil_div(tiles, stretch);
        const int64_t items = pairs * stretches;
        if (i > few && stretches <= few) continue;
        if (stretches > most || items >= 1 << 30) break;
        const double time = (double)lk_ceil_div(items, at_once) * ((double)stretch + 0.01); /* 0.01: the merge at its end */
        if (time < 0.995 * least) best = stretch, least = time;
    }
    return (int)best;
}

/* Whether stored logits of all rows take less time than FUSED with as many matmuls. Both times are without the matmuls for dx and
 * dweight, in units of a cluster's time for a tile, of 256 tokens x 256 columns, and one column of hidden: 10.8 ns on an H200.
 *
 * both       the matmul reads the weight: it takes at least 0.8 of the time of 256 tokens.
 * FUSED      rounds of tiles, which take as long for few tokens as for 256, and their exponentials, which nothing hides; with
 *            gradients the kernels for references, v, v x, dx and the targets' part, some of them for all tokens x hidden.
 * stored     the matmul; and the logits, which are written and read, with gradients dZ too. A softcap is computed more often.
 *            Tail columns have a matmul more.
 *
 * The constants were fitted to 1143 calls on an H200: bench/results/choices. forward with saved and its backward must agree, so what
 * only one of them knows is not looked at there. */
LK_HOST bool lk_head_stored_is_faster(const lk_head_shape *s)
{
    const double rows = (double)s->rows, hidden = (double)s->hidden, pairs = rows / LK_HEAD_PAIR_ROWS;
    const double tiles = (double)lk_ceil_div(s->vocab, LK_HEAD_TILE_COLS);
    const bool gradients = s->gradient || s->saves, known = !s->saves;
    const bool options = s->softcap || (known && (s->label_smoothing || s->entropy || s->argmax || s->dentropy || s->statistics));
    const bool plain = !options && !s->bias;
    const int64_t stretch = lk_head_stretch(s, s->rows, s->vocab, s->vocab), at_once = lk_head_at_once(s, s->rows);
    const int64_t items = lk_ceil_div(s->rows, LK_HEAD_PAIR_ROWS) * lk_ceil_div(s->vocab, stretch * LK_HEAD_TILE_COLS);
    const double depth = plain && at_once > s->clusters ? 0.7 * hidden : hidden; /* blocks with tiles of half the rows */
    const double exponentials = gradients ? (plain ? 325.0 : 800.0) : (plain ? 65.0 : 740.0);
    const double rounds = (double)(lk_ceil_div(items, at_once) * stretch), weight = 0.8 * tiles / s->clusters * hidden;
    double fused = fmax(rounds * depth, weight) + rounds * exponentials;
    if (gradients) fused += (plain ? 830.0 : 1300.0) + 0.32 * rows + 4.6e-4 * rows * hidden;
    else fused += plain ? 460.0 : 200.0;
    const double logits = gradients ? (options ? 2160.0 : 1040.0) + (s->saves ? 240.0 : 0.0) : plain ? 800.0 : 1000.0;
    double stored = fmax(tiles / s->clusters * pairs * hidden, weight) + tiles / s->clusters * pairs * logits;
    if (lk_head_tail_cols(s, s->vocab)) stored += 250.0 + 5e-5 * rows * hidden;
    return stored < fused;
}

/* Whether dx of a chunk is summed in f32 of the workspace: over panels, and in f16 with tail columns, since each of two sums
 * that nearly cancel may be beyond f16's range. */
LK_HOST bool lk_head_sums_dx(const lk_head_shape *s, int path)
{
    if (path == LK_HEAD_PATH_CHUNKS) return s->type == LK_DTYPE_F16 && lk_head_tail_cols(s, s->vocab);
    return s->type != LK_DTYPE_F32 || s->compact;
}

/* The arrays that every plan has. */
LK_HOST lk_head_workspace lk_head_lay_out_rows(const lk_head_shape *s, bool fused, int64_t chunk, lk_arena *arena)
{
    const int64_t rows = s->rows;
    lk_head_workspace ws = {};
    ws.x_stride = lk_head_round_up(s->hidden, 64);
    ws.splits = lk_head_min(lk_ceil_div(512, lk_ceil_div(s->vocab, LK_HEAD_THREADS)), lk_ceil_div(rows, 64));
    lk_take(&ws.counts, arena, true, 1);
    lk_take(&ws.target, arena, !s->no_targets, rows);
    lk_take(&ws.weight, arena, s->class_weight, rows);
    lk_take(&ws.row_weight, arena, s->gives_loss && s->row_weight, rows);
    lk_take(&ws.token, arena, s->compact, rows);
    lk_take(&ws.factor, arena, s->gradient, rows);
    lk_take(&ws.dlse, arena, s->gradient && s->dlse, rows);
    lk_take(&ws.dentropy, arena, s->gradient && s->dentropy, rows);
    lk_take(&ws.loss, arena, s->gives_loss && s->loss, rows);
    lk_take(&ws.z, arena, s->gives_loss && s->z_loss_out && s->z_loss, rows);
    lk_take(&ws.lse, arena, !s->no_targets, rows);
    lk_take(&ws.lse_low, arena, s->lse_low || (s->gives_loss && s->gradient), rows);
    lk_take(&ws.entropy, arena, s->entropy || s->dentropy, s->statistics ? 4 * rows : rows);
    lk_take(&ws.argmax, arena, s->argmax, rows);
    ws.bias = lk_take_bytes(arena, s->bias, s->vocab * lk_head_bytes_of(fused ? LK_DTYPE_F32 : s->logits_type));
    ws.other_bias = lk_take_bytes(arena, s->other_bias, s->vocab * lk_head_bytes_of(s->logits_type));
    const bool scaled = s->class_weight && s->mean && !s->denominator && s->z_loss && !(s->split && s->gives_loss);
    lk_take(&ws.class_weight, arena, scaled, fused ? s->vocab : s->classes);
    lk_take(&ws.dbias, arena, s->dbias, ws.splits * s->vocab);
    ws.x = lk_take_bytes(arena, s->compact, chunk * ws.x_stride * lk_head_bytes_of(s->type));
    return ws;
}

/* The arrays of s->saved; returns their bytes. Logits lie where those of a slice would: dZ has memory of its own. */
LK_HOST size_t lk_head_lay_out_saved(const lk_head_shape *s, void *saved, lk_head_workspace *ws)
{
    const int64_t rows = s->rows, stride = lk_head_round_up(s->vocab, 64);
    lk_arena arena = {(uintptr_t)lk_head_base(saved), 0, 256};
    ws->logits_stride = stride;
    if (s->stores) ws->slice = (float *)lk_take_bytes(&arena, true, rows * stride * lk_head_bytes_of(s->logits_type));
    else {
        lk_take(&ws->base, &arena, true, rows);
        lk_take(&ws->others, &arena, true, rows);
        lk_take(&ws->logit, &arena, true, rows);
        ws->logits = lk_take_bytes(&arena, true, rows * stride * 2);
    }
    return arena.used + 256;
}

/* The arrays of a plan that stores logits. Without slices dZ overwrites them. */
LK_HOST lk_head_workspace lk_head_lay_out_stored(const lk_head_shape *s, const lk_head_plan *plan, void *workspace)
{
    const bool panels = plan->path == LK_HEAD_PATH_PANELS;
    const int64_t chunk = plan->chunk_tokens, slice = lk_head_min(plan->slice_tokens, chunk);
    lk_arena arena = {(uintptr_t)lk_head_base(workspace), 0, 256};
    lk_head_workspace ws = lk_head_lay_out_rows(s, false, chunk, &arena);
    ws.logits_stride = lk_head_round_up(plan->panel_vocab, 64);
    ws.tail = lk_take_bytes(&arena, lk_head_copies_tail(s), 8 * ws.x_stride * lk_head_bytes_of(s->type));
    lk_take(&ws.others, &arena, panels, s->rows);
    ws.states = lk_take_bytes(&arena, panels, chunk * (s->statistics ? LK_HEAD_STATISTICS_BYTES : LK_HEAD_STATE_BYTES));
    lk_take(&ws.dx, &arena, s->dx && lk_head_sums_dx(s, plan->path), chunk * s->hidden);
    lk_take(&ws.dweight, &arena, lk_head_sums_dweight(s, chunk) && !plan->rounds, s->vocab * s->hidden);
    const int64_t in_dweight = slice && !plan->rounds ? lk_head_rows_in_dweight(s, chunk) : 0;
    const int64_t row = ws.logits_stride * lk_head_bytes_of(slice || s->stores ? s->type : s->logits_type);
    ws.logits = lk_take_bytes(&arena, !s->stores || s->gradient, chunk * row);
    lk_take(&ws.slice, &arena, slice > in_dweight, slice * ws.logits_stride);
    if (slice && slice <= in_dweight) ws.slice = (float *)s->dweight;
    const int64_t other = s->two_heads ? (slice ? slice : chunk) * ws.logits_stride * lk_head_bytes_of(s->logits_type) : 0;
    if (slice && slice <= in_dweight) ws.other_logits = (char *)s->dweight + other;
    else ws.other_logits = lk_take_bytes(&arena, s->two_heads, other);
    if (s->stores) (void)lk_head_lay_out_saved(s, s->saved, &ws);
    ws.cublas = (void *)(arena.base + arena.used), ws.bytes = arena.used + 256;
    return ws;
}

/* The most stretches of a row, in calls that store exponentials or dZ. Their sums, of 16 bytes, take half as much memory as the
 * copy of x, which may overwrite them; or 1 KiB per row, if that is more. */
LK_HOST int64_t lk_head_most_stretches(const lk_head_shape *s)
{
    return s->hidden / 16 > 64 ? s->hidden / 16 : 64;
}

/* The parts of dweight's memory that are lent to FUSED; returns their columns. Rows of dweight may be written once the exponentials
 * in them have been used. So the first part lies behind the rows of its own columns. The rows of the second part's columns may be
 * where the first part was, and so on: each part is `times` as large as the one before. For example, 8192 x 4096 x 131072:
 *     dweight's rows   0 free | 8704 exponentials of columns 0 to 8703 | 26112 of columns 8704 to 26111 | 60928 of the next
 * Columns 0 to 8703 are finished first, into the free rows; then their exponentials' place is free for the next rows. */
LK_HOST int64_t lk_head_borrow(const lk_head_shape *s, lk_head_dweight_part (&dweight_parts)[LK_HEAD_DWEIGHT_PARTS])
{
    const int64_t row = s->hidden * lk_head_bytes_of(s->dweight_dtype), each = 2 * s->rows, tile = LK_HEAD_TILE_COLS;
    const double times = (double)each / (double)row;
    int64_t first = 0, free = (int64_t)((double)s->vocab / (1.0 + times * (1.0 + times * (1.0 + times)))) / tile * tile;
    if (!lk_head_lends(s)) free = 0;
    /* Rows of dweight before `free` hold no exponentials. Those of columns before `first` have their place. */
    for (lk_head_dweight_part &part : dweight_parts) {
        const int64_t cols = lk_head_min(free - first, (int64_t)((double)(s->vocab - free) / times)) / tile * tile;
        part = {first, free > 0 && cols > 0 ? cols : 0, (char *)s->dweight + free * row};
        first += part.cols, free += lk_ceil_div(part.cols * each, 256 * row) * 256;
    }
    return first;
}

/* The arrays of FUSED. */
LK_HOST lk_head_workspace lk_head_lay_out_fused(const lk_head_shape *s, const lk_head_plan *plan, void *workspace)
{
    const int64_t rows = s->rows, chunk = plan->chunk_tokens, kept = plan->kept_vocab, own = kept - plan->lent_vocab;
    const int64_t width = kept < s->vocab && plan->panel_vocab > own ? plan->panel_vocab : own;
    const int64_t tiles = lk_ceil_div(s->vocab, LK_HEAD_TILE_COLS), pair = LK_HEAD_PAIR_ROWS * LK_HEAD_TILE_COLS;
    const int64_t pairs = lk_ceil_div(chunk, LK_HEAD_PAIR_ROWS), cols = lk_ceil_div(s->hidden, LK_HEAD_TILE_COLS);
    const int64_t alone = lk_ceil_div(s->vocab, plan->panel_vocab); /* stretches of forward by itself */
    const bool states = s->gradient || s->saves; /* stretches of forward by itself are the plan's */
    const int64_t some = states ? lk_ceil_div(tiles, lk_head_stretch(s, chunk, s->vocab, lk_head_most_stretches(s))) : 0;
    const bool keeps = s->gives_loss && kept, more = s->gives_loss && (s->entropy || s->argmax || s->dentropy);
    const bool panels = s->gradient && (plan->lent_vocab || (kept ? kept : plan->panel_vocab) < s->vocab);
    lk_arena arena = {(uintptr_t)lk_head_base(workspace), 0, 256};
    lk_head_workspace ws = lk_head_lay_out_rows(s, true, chunk, &arena);
    if (s->saves) (void)lk_head_lay_out_saved(s, s->saved, &ws);
    else lk_take(&ws.logit, &arena, true, rows);
    lk_take(&ws.target_dz, &arena, s->gradient, rows);
    lk_take(&ws.owners, &arena, s->dweight || s->dbias, s->vocab);
    if (!s->gives_loss && (!s->saves || s->split)) lk_take(&ws.others, &arena, true, rows);
    lk_take(&ws.scale, &arena, s->gradient && kept, chunk);
    /* v x overwrites these: the factor kernel has read them. Panels, which write sums again, come when v x is not needed. */
    lk_arena instead = arena, sum = arena;
    lk_take(&ws.sample, &arena, keeps, chunk * LK_HEAD_SAMPLE);
    ws.stretches = states ? some : alone;
    lk_take(&ws.sums, &arena, s->gives_loss || !kept, chunk * ws.stretches);
    const int64_t more_bytes = s->statistics ? sizeof(lk_head_more_squares) : sizeof(lk_head_more);
    ws.more = (lk_head_more *)lk_take_bytes(&arena, more, chunk * ws.stretches * more_bytes);
    lk_take(&ws.references, &arena, keeps, chunk * lk_ceil_div(kept, LK_HEAD_TILE_COLS));
    ws.scaled_x = lk_take_bytes(&instead, kept && s->dweight, chunk * ws.x_stride * 2);
    if (plan->f32_dx && lk_head_dx_in_dweight(s)) ws.dx = (float *)s->dweight;
    else lk_take(&ws.dx, &sum, plan->f32_dx, chunk * s->hidden);
    if (arena.used < instead.used) arena = instead;
    if (arena.used < sum.used) arena = sum;
    lk_take(&ws.low, &arena, lk_head_sums_dweight(s, chunk), tiles * cols * pair);
    lk_take(&ws.low_dx, &arena, s->dx && panels, pairs * cols * pair);
    if (!s->saves) ws.logits_stride = lk_head_round_up(width, 64);
    if (!s->saves) ws.logits = lk_take_bytes(&arena, s->gradient, chunk * ws.logits_stride * 2);
    if (plan->lent_vocab) (void)lk_head_borrow(s, ws.dweight_parts);
    ws.cublas = (void *)(arena.base + arena.used), ws.bytes = arena.used + 256;
    return ws;
}

LK_HOST lk_head_workspace lk_head_lay_out(const lk_head_shape *s, const lk_head_plan *plan, void *workspace)
{
    return plan->path == LK_HEAD_PATH_FUSED ? lk_head_lay_out_fused(s, plan, workspace)
                                                       : lk_head_lay_out_stored(s, plan, workspace);
}

/* ---- Plans --------------------------------------------------------------------------------------------------------------- */

/* The least bytes for cuBLASLt beside arrays of `bytes`: a ninth of them, which is a tenth of the workspace, and at most
 * LK_HEAD_CUBLAS_BYTES. FUSED: at most a quarter of that, since the memory could keep more columns. */
LK_HOST size_t lk_head_reserve(size_t bytes, bool fused)
{
    const size_t most = fused ? LK_HEAD_CUBLAS_BYTES / 4 : LK_HEAD_CUBLAS_BYTES;
    return bytes / 9 < most ? bytes / 9 / 256 * 256 : most;
}

/* Whether cuBLASLt gets memory. In FUSED it does where it computes dx, or dweight: any but one of 16 bits over several chunks. The
 * sample of the logits gets no more than that. */
LK_HOST bool lk_head_needs_cublas(const lk_head_shape *s, const lk_head_plan *plan)
{
    return plan->path != LK_HEAD_PATH_FUSED || plan->f32_dx || (s->dweight && !lk_head_sums_dweight(s, plan->chunk_tokens));
}

/* Plans on their way to a choice: how many bytes each candidate needs is found once. */
#define LK_HEAD_CANDIDATES 64 /* that are remembered; more are counted again */
typedef struct {
    lk_head_shape shape;
    size_t smallest[LK_HEAD_PATH_FUSED + 1]; /* of a path's plans: the smallest workspace; SIZE_MAX: the path cannot be */
    size_t least;                           /* of all plans; where placement_unknown is set, FUSED may still be ruled out */
    int candidates;
    lk_head_plan seen[LK_HEAD_CANDIDATES];
} lk_head_planner;

/* Counts the plan's bytes. Whatever the budget is, a plan needs the same. */
LK_HOST void lk_head_count_bytes(const lk_head_shape *s, lk_head_plan *plan)
{
    const bool fused = plan->path == LK_HEAD_PATH_FUSED;
    plan->bytes = lk_head_lay_out(s, plan, NULL).bytes;
    plan->need = plan->bytes + (lk_head_needs_cublas(s, plan) ? lk_head_reserve(plan->bytes, fused) : 0);
}

/* The smallest workspace that this plan fits into. */
LK_HOST size_t lk_head_need(lk_head_planner *p, lk_head_plan *plan)
{
    const int known = p->candidates < LK_HEAD_CANDIDATES ? p->candidates : LK_HEAD_CANDIDATES;
    for (int i = known - 1; i >= 0; i--) {
        const lk_head_plan *const seen = &p->seen[i];
        if (seen->chunk_tokens != plan->chunk_tokens || seen->panel_vocab != plan->panel_vocab || seen->path != plan->path ||
            seen->slice_tokens != plan->slice_tokens || seen->kept_vocab != plan->kept_vocab ||
            seen->lent_vocab != plan->lent_vocab || seen->f32_dx != plan->f32_dx || seen->rounds != plan->rounds) continue;
        plan->bytes = seen->bytes, plan->need = seen->need;
        return plan->need;
    }
    lk_head_count_bytes(&p->shape, plan);
    p->seen[p->candidates++ % LK_HEAD_CANDIDATES] = *plan;
    return plan->need;
}
LK_HOST bool lk_head_fits(lk_head_planner *p, lk_head_plan *plan, size_t budget)
{
    return plan->chunk_tokens > 0 && lk_head_need(p, plan) <= budget;
}

/* The length of the fewest about equal parts of at most `most`, rounded up to a multiple of `whole`. */
LK_HOST int64_t lk_head_equal(int64_t all, int64_t most, int64_t whole)
{
    return lk_head_min(lk_head_round_up(lk_ceil_div(all, lk_ceil_div(all, most)), whole), all);
}

/* A plan that stores logits. */
LK_HOST lk_head_plan lk_head_stored_plan(int path, int64_t chunk, int64_t panel, int64_t slice)
{
    lk_head_plan plan = {};
    plan.path = path, plan.chunk_tokens = chunk, plan.panel_vocab = panel, plan.slice_tokens = slice;
    return plan;
}

/* A search for the largest number that fits: low does, high does not. Their needs; 0: not known. */
typedef struct {
    int64_t low, high;
    size_t low_need, high_need;
    int tries;
} lk_head_bracket;

/* The number to try next: where the line through both needs meets the budget, since needs grow about so. Every third time the
 * middle, in case they do not. */
LK_HOST int64_t lk_head_between(lk_head_bracket *b, size_t budget)
{
    const double per_one = (double)(b->high_need - b->low_need) / (double)(b->high - b->low);
    const int64_t line = b->low_need ? (int64_t)((double)(budget - b->low_need) / per_one) : 1;
    const int64_t step = b->tries++ % 3 == 2 ? (b->high - b->low) / 2 : line;
    return b->low + lk_head_min(step > 1 ? step : 1, b->high - b->low - 1);
}
LK_HOST void lk_head_narrow(lk_head_bracket *b, int64_t tried, size_t need, size_t budget)
{
    if (need <= budget) b->low = tried, b->low_need = need;
    else b->high = tried, b->high_need = need;
}

/* Gives the plan the tokens of a chunk within the budget: all, or those of the fewest equal chunks. False: they would be fewer
 * than `fewest`. */
LK_HOST bool lk_head_fit_chunk(lk_head_planner *p, lk_head_plan *plan, size_t budget, int64_t fewest)
{
    const int64_t given = p->shape.chunk_tokens, rows = p->shape.rows, whole = p->shape.two_heads ? 8 : 128;
    plan->chunk_tokens = given ? given : rows;
    const bool fits = lk_head_fits(p, plan, budget);
    if (given || fits || fewest >= rows) return fits;
    lk_head_bracket b = {0, rows, 0, plan->need, 0};
    while (b.high - b.low > 1) {
        plan->chunk_tokens = lk_head_between(&b, budget);
        lk_head_narrow(&b, plan->chunk_tokens, lk_head_need(p, plan), budget);
    }
    plan->chunk_tokens = b.low < whole ? b.low : lk_head_equal(rows, b.low / whole * whole, whole);
    if (plan->chunk_tokens < fewest && plan->chunk_tokens < lk_head_equal(rows, fewest, whole)) return false;
    return lk_head_fits(p, plan, budget);
}

/* The columns of the fewest about equal panels of at most `most`. */
LK_HOST int64_t lk_head_panel_cols(const lk_head_shape *s, int64_t most)
{
    return s->panel_vocab ? s->panel_vocab : lk_head_equal(s->vocab, most, 128);
}

LK_HOST bool lk_head_may_be(const lk_head_shape *s, int path)
{
    if (s->saves) return path == (s->stores ? LK_HEAD_PATH_CHUNKS : LK_HEAD_PATH_FUSED);
    if (path == LK_HEAD_PATH_CHUNKS && s->split && !s->no_panels) return false; /* its kernels see whole rows then */
    if (path == LK_HEAD_PATH_PANELS && s->no_panels) return false;
    return path == LK_HEAD_PATH_FUSED ? s->fused : !s->path || s->path == path;
}

/* A plan of FUSED. kept: the columns whose exponentials are kept, the first `in_dweight` of them in dweight. */
LK_HOST lk_head_plan lk_head_fused_plan(int64_t chunk, int64_t kept, int64_t in_dweight, int64_t panel)
{
    lk_head_plan plan = {};
    plan.path = LK_HEAD_PATH_FUSED, plan.chunk_tokens = chunk;
    plan.kept_vocab = kept, plan.lent_vocab = in_dweight, plan.panel_vocab = panel;
    return plan;
}

/* Whether forward_backward may keep exponentials: where dZ is one factor per row times them. Then it may have chunks of tokens
 * too. */
LK_HOST bool lk_head_keeps(const lk_head_shape *s)
{
    const bool more = s->label_smoothing || s->entropy || s->argmax || s->dentropy;
    return s->gradient && s->gives_loss && !more && !s->panel_vocab;
}

/* The width of panels, of at most `most` tiles, that compute `tiles` tiles of columns again in the least time. The time of a panel:
 * rounds of all clusters for its logits, and 1.5 for its own costs, times `hidden`; and rounds for its dweight, times `rows`. */
LK_HOST int64_t lk_head_even_panel(const lk_head_shape *s, int64_t tiles, int64_t most)
{
    const int64_t hidden = s->hidden, cols = lk_ceil_div(hidden, LK_HEAD_TILE_COLS);
    const int64_t pairs = lk_ceil_div(s->rows, LK_HEAD_PAIR_ROWS);
    int64_t best = most;
    double least = INFINITY;
    if (most >= tiles) return tiles * LK_HEAD_TILE_COLS;
    for (int64_t t = most; t > 0 && t >= most / 2; t--) {
        double time = 0.0;
        for (int last = 0; last < 2; last++) {
            const int64_t part = last ? tiles % t : t;
            const double logits = (double)lk_ceil_div(pairs * part, s->clusters);
            const double dweight = (double)lk_ceil_div(cols * part, s->clusters);
            const double each = (logits + 1.5) * (double)hidden + dweight * (double)s->rows;
            time += !last ? each * (double)(tiles / t) : part ? each : 0.0;
        }
        if (time < least) best = t, least = time;
    }
    return best * LK_HEAD_TILE_COLS;
}

/* Lets cuBLASLt compute dx of a plan that fits and has all columns in one panel, where that fits too. */
LK_HOST void lk_head_try_f32_dx(lk_head_planner *p, size_t budget, lk_head_plan *plan)
{
    lk_head_plan better = *plan;
    better.f32_dx = true;
    const bool one = plan->lent_vocab == 0 && plan->panel_vocab >= p->shape.vocab && plan->chunk_tokens >= p->shape.rows;
    if (p->shape.gradient && p->shape.dx && one && lk_head_fits(p, &better, budget)) *plan = better;
}

/* FUSED with all tokens at once. It keeps exponentials of as many columns as fit: of all in the workspace; else of some or all,
 * in dweight and in the workspace; else of none. The others are computed again, a panel at a time. narrow: the
 * fewest columns of a panel. */
LK_HOST bool lk_head_plan_at_once(lk_head_planner *p, size_t budget, int64_t narrow, lk_head_plan *plan)
{
    const lk_head_shape *const s = &p->shape;
    const int64_t vocab = s->vocab, tile = LK_HEAD_TILE_COLS, given = lk_head_round_up(s->panel_vocab, tile);
    lk_head_dweight_part dweight_parts[LK_HEAD_DWEIGHT_PARTS];
    if (given) {
        *plan = lk_head_fused_plan(s->rows, 0, 0, lk_head_min(given, vocab));
        return lk_head_fits(p, plan, budget);
    }
    *plan = lk_head_fused_plan(s->rows, vocab, 0, vocab);
    if (lk_head_keeps(s) && lk_head_fits(p, plan, budget)) {
        lk_head_try_f32_dx(p, budget, plan);
        return true;
    }
    for (int keeps = lk_head_keeps(s); keeps >= 0; keeps--) {
        const int64_t in_dweight = keeps ? lk_head_borrow(s, dweight_parts) : 0, all = lk_ceil_div(vocab - in_dweight, tile);
        lk_head_bracket b = {0, all + 1, 0, 0, 0}; /* tiles. All come first: outside dweight they need no sums of dx */
        for (int64_t tiles = all; b.high - b.low > 1; tiles = lk_head_between(&b, budget)) {
            const int64_t cols = lk_head_min(tiles * tile, vocab - in_dweight);
            *plan = lk_head_fused_plan(s->rows, keeps ? in_dweight + cols : 0, in_dweight, cols);
            lk_head_narrow(&b, tiles, lk_head_need(p, plan), budget);
        }
        const int64_t fewest = keeps && narrow < LK_HEAD_WIDE ? LK_HEAD_WIDE : narrow; /* keeping costs a copy of x */
        if (b.low == 0 || (b.low < all && b.low * tile < fewest)) continue;
        const int64_t cols = lk_head_min(b.low * tile, vocab - in_dweight), kept = keeps ? in_dweight + cols : 0;
        const int64_t panel = kept == vocab ? vocab : lk_head_even_panel(s, lk_ceil_div(vocab - kept, tile), b.low);
        *plan = lk_head_fused_plan(s->rows, kept, in_dweight, lk_head_min(panel, vocab));
        lk_head_try_f32_dx(p, budget, plan);
        return true;
    }
    return false;
}

/* FUSED with about the fewest chunks of tokens that fit. It keeps all exponentials of a chunk, and sums dweight. */
LK_HOST bool lk_head_plan_fused_chunks(lk_head_planner *p, size_t budget, lk_head_plan *plan)
{
    const lk_head_shape *const s = &p->shape;
    const int64_t given = s->chunk_tokens, whole = LK_HEAD_PAIR_ROWS, row = lk_head_round_up(s->vocab, 64) * 2;
    for (int64_t chunks = 1; lk_head_keeps(s); chunks += 1 + chunks / 16) {
        const int64_t chunk = given ? given : lk_head_min(lk_head_round_up(lk_ceil_div(s->rows, chunks), whole), s->rows);
        *plan = lk_head_fused_plan(chunk, s->vocab, 0, s->vocab);
        if ((size_t)(chunk * row) <= budget && lk_head_fits(p, plan, budget)) return true; /* exponentials alone may not fit */
        if (given || chunk <= whole) break;
    }
    return false;
}

/* Sets the stretches of a plan of FUSED's forward: the best ones that fit. With one stretch the plan fits. A smaller budget only
 * ends the list of lk_head_stretch earlier, so a workspace of the plan's own bytes has the same stretches. */
LK_HOST void lk_head_plan_stretches(lk_head_planner *p, size_t budget, lk_head_plan *plan)
{
    const lk_head_shape *const s = &p->shape;
    const int64_t more = s->statistics ? sizeof(lk_head_more_squares) : s->entropy || s->argmax ? sizeof(lk_head_more) : 0;
    const size_t row = sizeof(lk_head_sums) + (size_t)more, left = budget - lk_head_need(p, plan);
    /* Arrays take whole 256 bytes, so the first stretch may have paid for a part of the others: 255 bytes in each of two arrays. */
    int64_t most = lk_head_min((int64_t)((left + 510) / row / (size_t)s->rows), s->vocab) + 1;
    do {
        plan->panel_vocab = (int64_t)lk_head_stretch(s, s->rows, s->vocab, most) * LK_HEAD_TILE_COLS;
        most = lk_ceil_div(s->vocab, plan->panel_vocab) - 1;
    } while (most > 0 && lk_head_need(p, plan) > budget);
}

/* FUSED. Columns that are computed again cost a matmul's part: a third of the time for all of them. Chunks of C tokens cost the
 * sums of dweight: a share of 60 / C of the time in f32, 170 / C in 24 bits; these two are estimates
 * (bench/results/choices/linear_cross_entropy.md). */
LK_HOST bool lk_head_plan_fused(lk_head_planner *p, size_t budget, int64_t narrow, lk_head_plan *plan)
{
    const lk_head_shape *const s = &p->shape;
    const int64_t vocab = s->vocab, rows = s->rows, given = lk_head_round_up(s->panel_vocab, LK_HEAD_TILE_COLS);
    const int64_t all = given ? given : lk_head_round_up(vocab, LK_HEAD_TILE_COLS); /* forward: the columns of a stretch */
    lk_head_plan chunks = {};
    if (!s->fused) return false;
    if (s->saves || !s->gradient) {
        *plan = lk_head_fused_plan(rows, s->saves ? vocab : 0, 0, s->saves ? vocab : all);
        if (lk_head_need(p, plan) > budget) return false;
        if (s->saves) lk_head_try_f32_dx(p, budget, plan);
        else if (!given) lk_head_plan_stretches(p, budget, plan);
        return true;
    }
    const bool must_chunk = lk_head_keeps(s) && s->chunk_tokens && s->chunk_tokens < rows;
    const bool once = !must_chunk && lk_head_plan_at_once(p, budget, narrow, plan);
    if (once && (plan->kept_vocab == vocab || !lk_head_keeps(s))) return true;
    if (!lk_head_plan_fused_chunks(p, budget, &chunks)) return once;
    const double again = (double)(vocab - plan->kept_vocab) / (double)vocab / 3.0;
    const double sums = !s->dweight ? 0.0 : s->dweight_dtype == LK_DTYPE_F32 ? 60.0 : 170.0;
    if (!once || again > sums / (double)chunks.chunk_tokens) *plan = chunks;
    return true;
}

/* The smallest workspace of a path's plans. Chunks of still fewer tokens would save little. */
LK_HOST size_t lk_head_smallest(lk_head_planner *p, int path)
{
    const lk_head_shape *const s = &p->shape;
    const int64_t given = s->chunk_tokens, vocab = s->vocab, tile = LK_HEAD_TILE_COLS;
    if (!lk_head_may_be(s, path)) return SIZE_MAX;
    if (path == LK_HEAD_PATH_FUSED) {
        const int64_t few = given ? given : lk_head_min(s->rows, LK_HEAD_PAIR_ROWS);
        const int64_t own = lk_head_round_up(s->panel_vocab, tile), stretch = own ? own : lk_head_round_up(vocab, tile);
        const bool keeps = lk_head_keeps(s), must_chunk = keeps && given && given < s->rows;
        lk_head_plan chunk = lk_head_fused_plan(few, vocab, 0, vocab);
        const int64_t panel = s->saves ? vocab : s->gradient ? lk_head_min(own ? own : tile, vocab) : stretch;
        lk_head_plan once = lk_head_fused_plan(s->rows, s->saves ? vocab : 0, 0, panel);
        const size_t in_chunks = keeps ? lk_head_need(p, &chunk) : SIZE_MAX;
        const size_t at_once = must_chunk ? SIZE_MAX : lk_head_need(p, &once);
        return in_chunks < at_once ? in_chunks : at_once;
    }
    const int64_t few = given ? given : lk_head_min(s->rows, 64);
    const int64_t slice = !lk_head_slices(s, path) ? 0 : s->slice_tokens || !s->two_heads ? s->slice_tokens : 32;
    const int64_t panel = path == LK_HEAD_PATH_CHUNKS ? vocab : lk_head_panel_cols(s, LK_HEAD_NARROW);
    lk_head_plan some = lk_head_stored_plan(path, few, panel, slice);
    lk_head_plan all = lk_head_stored_plan(path, given ? given : s->rows, panel, slice);
    some.rounds = all.rounds = s->no_panels; /* then no logits lie in dweight, wherever that is */
    const size_t in_chunks = lk_head_need(p, &some), at_once = lk_head_need(p, &all);
    return in_chunks < at_once ? in_chunks : at_once;
}

/* Begins with the smallest workspaces. */
LK_HOST void lk_head_plan_begin(lk_head_planner *p, const lk_head_shape *shape)
{
    const bool sure = !shape->placement_unknown || shape->path || shape->saves, empty = shape->rows == 0 || shape->vocab == 0;
    p->shape = *shape, p->candidates = 0, p->least = SIZE_MAX;
    for (int path = LK_HEAD_PATH_CHUNKS; path <= LK_HEAD_PATH_FUSED; path++) {
        p->smallest[path] = SIZE_MAX;
        if (path == LK_HEAD_PATH_FUSED && !sure) continue;
        p->smallest[path] = empty ? 0 : lk_head_smallest(p, path);
        if (p->smallest[path] < p->least) p->least = p->smallest[path];
    }
}

/* A plan of CHUNKS. Without slices it stores the logits of a chunk, and dZ overwrites them. With slices it stores a chunk's dZ, and
 * f32 logits of one slice. One head takes the first length of `one` that fits: 0 means no slices, the last one fits into dweight.
 * Two heads take the fewest chunks, and the first length of `two` that allows them; its first one is for several passes alone.
 * Slices below 512 tokens, which do not keep tensor cores busy, are only for a caller's chunk_tokens. rounds: as in
 * lk_head_plan. */
LK_HOST bool lk_head_plan_chunks(lk_head_planner *p, size_t budget, int64_t fewest, lk_head_plan *plan, bool rounds = false)
{
    const lk_head_shape *const s = &p->shape;
    const int path = LK_HEAD_PATH_CHUNKS;
    const bool slices = lk_head_slices(s, path);
    const int64_t given = slices ? s->slice_tokens : 0;
    const int64_t in_dweight = rounds ? 0 : lk_head_rows_in_dweight(s, fewest) / 128 * 128;
    const int64_t one[] = {0, 4096, 2048, in_dweight}, lent = in_dweight > 512 ? in_dweight : 512;
    const int64_t two[] = {s->rows, 4096, 2048, lent, 512, 256, 128, 64, 32};
    const int64_t *const lengths = !slices || given ? &given : s->two_heads ? two + !s->several_passes : one;
    const int count = !slices || given ? 1 : (s->two_heads && s->chunk_tokens ? 8 : 4) + s->several_passes;
    int64_t best = 0;
    if (!lk_head_may_be(s, path)) return false;
    for (int i = 0; i < count; i++) {
        lk_head_plan tried = lk_head_stored_plan(path, 0, s->vocab, lengths[i]);
        tried.rounds = rounds;
        if (!lk_head_fit_chunk(p, &tried, budget, fewest)) continue;
        const int64_t chunks = lk_ceil_div(s->rows, tried.chunk_tokens);
        if (!best || chunks < best) *plan = tried, best = chunks;
        if (!s->two_heads) break;
    }
    return best > 0;
}

/* Panels of about `cols` columns: of all tokens, else of the fewest chunks. Then they are doubled while they fit. */
LK_HOST bool lk_head_plan_panels(lk_head_planner *p, size_t budget, int64_t cols, int64_t fewest,
                                 lk_head_plan *plan)
{
    const lk_head_shape *const s = &p->shape;
    const int path = LK_HEAD_PATH_PANELS;
    if (!lk_head_may_be(s, path)) return false;
    *plan = lk_head_stored_plan(path, 0, lk_head_panel_cols(s, cols), 0);
    if (!lk_head_fit_chunk(p, plan, budget, fewest)) return false;
    for (lk_head_plan wider = *plan; cols < s->vocab; *plan = wider) {
        wider.panel_vocab = lk_head_panel_cols(s, cols *= 2);
        if (!lk_head_fits(p, &wider, budget)) break;
    }
    return true;
}

/* FUSED: all tokens at once, with no matmul for columns that are computed again. */
LK_HOST bool lk_head_is_whole(const lk_head_shape *s, const lk_head_plan *plan)
{
    return plan->chunk_tokens >= s->rows && (!s->gives_loss || plan->kept_vocab == s->vocab);
}

/* The plan: the first of this list that fits. Chunks below 512 tokens come before PANELS only where CHUNKS' smallest plan needs no
 * more memory than that of PANELS. There a workspace that is too small for PANELS gets CHUNKS, so a larger one must not get PANELS,
 * which have one matmul more. The last entry is for calls that may round. */
LK_HOST bool lk_head_search(lk_head_planner *p, size_t budget, lk_head_plan *plan)
{
    const lk_head_shape *const s = &p->shape;
    const bool no_more = !s->gradient || !s->gives_loss || lk_head_keeps(s); /* FUSED has no matmul more than CHUNKS */
    const bool fused_first = no_more && (!s->gradient || lk_head_many_columns(s, LK_HEAD_FUSED_VOCAB));
    const bool short_chunks = p->smallest[LK_HEAD_PATH_CHUNKS] <= p->smallest[LK_HEAD_PATH_PANELS];
    const bool stored = s->fused && lk_head_stored_is_faster(s), all_fused = s->fused && !stored && no_more;
    return (stored && lk_head_plan_chunks(p, budget, s->rows, plan)) ||
           (fused_first && lk_head_plan_fused(p, budget, LK_HEAD_WIDE, plan)) ||
           (all_fused && lk_head_plan_fused(p, budget, LK_HEAD_WIDE, plan) && lk_head_is_whole(s, plan)) ||
           lk_head_plan_chunks(p, budget, s->rows, plan) ||
           lk_head_plan_chunks(p, budget, LK_HEAD_FEWEST, plan) ||
           (!fused_first && lk_head_plan_fused(p, budget, LK_HEAD_WIDE, plan)) ||
           (short_chunks && !lk_head_may_round(s) && lk_head_plan_chunks(p, budget, 1, plan)) ||
           lk_head_plan_panels(p, budget, LK_HEAD_WIDE, LK_HEAD_FEWEST, plan) ||
           lk_head_plan_fused(p, budget, LK_HEAD_NARROW, plan) ||
           lk_head_plan_panels(p, budget, LK_HEAD_NARROW, 1, plan) ||
           (lk_head_may_round(s) && lk_head_plan_chunks(p, budget, 1, plan, true));
}

/* The plan within the budget, which is at least p->least. cuBLASLt gets what is left. A plan may need less than the budget, and
 * with those bytes the search may find another plan. So the search is repeated, each time with the bytes of the plan that it
 * found, until these stay the same. */
LK_HOST void lk_head_choose(lk_head_planner *p, size_t budget, lk_head_plan *plan)
{
    const lk_head_shape *const s = &p->shape;
    *plan = {};
    if (s->rows == 0 || s->vocab == 0) return;
    for (size_t before = 0; before != budget;) {
        before = budget;
        lk_head_search(p, budget, plan);
        lk_head_need(p, plan);
        const size_t left = budget - plan->bytes, most = lk_head_needs_cublas(s, plan) ? LK_HEAD_CUBLAS_BYTES : 0;
        plan->cublas_bytes = left < most ? left / 256 * 256 : most;
        budget = plan->bytes + plan->cublas_bytes < p->least ? p->least : plan->bytes + plan->cublas_bytes;
    }
    const bool fused = plan->path == LK_HEAD_PATH_FUSED;
    const int64_t again = fused && s->gradient ? s->vocab - plan->kept_vocab : 0; /* columns computed again */
    plan->workspace_bytes = budget;
    if (plan->slice_tokens && !s->slice_tokens) /* about equal ones; shorter ones need no more memory */
        plan->slice_tokens = lk_head_equal(plan->chunk_tokens, plan->slice_tokens, plan->slice_tokens < 64 ? 32 : 64);
    plan->slice_tokens = lk_head_min(plan->slice_tokens, plan->chunk_tokens);
    plan->chunks = lk_ceil_div(s->rows, plan->chunk_tokens);
    plan->panel_vocab = lk_head_min(plan->panel_vocab, s->vocab);
    plan->panels = lk_ceil_div(again ? again : s->vocab, plan->panel_vocab);
    plan->matmuls = !(s->saves && s->gradient) + s->two_heads + s->dx + (s->dweight != NULL);
    if (plan->path == LK_HEAD_PATH_PANELS && s->gradient && !s->split) plan->matmuls++;
    if (again && s->gives_loss) plan->matmuls++;
    plan->exact = fused || s->logits_type == LK_DTYPE_F32; /* as the sums of tensor cores are */
}

/* A chosen plan in words. */
LK_HOST void lk_head_describe(const lk_head_shape *s, const lk_head_plan *plan, char *text, size_t size)
{
    static const char *const sums[] = {"", ", dweight summed in the caller's f32", ", dweight summed in f32 of the workspace",
                                       ", dweight summed in 24 bits", ", dweight rounded after each chunk"};
    if (s->rows == 0 || s->vocab == 0) {
        snprintf(text, size, "no %s, no workspace", s->rows ? "columns" : "tokens");
        return;
    }
    const bool fused = plan->path == LK_HEAD_PATH_FUSED, own = lk_head_sums_dweight(s, plan->chunk_tokens);
    const int sum = !s->dweight || plan->chunks == 1 ? 0 : !own ? 1 : fused ? 3 : plan->rounds ? 4 : 2;
    const int64_t columns = fused ? s->vocab : s->vocab - (plan->panels - 1) * plan->panel_vocab;
    const int tail = fused && !plan->f32_dx && (!s->dweight || own) ? 0 : (int)lk_head_tail_cols(s, columns);
    const char *kept = fused ? plan->kept_vocab ? "bf16 exponentials of" : "no stored" : plan->exact ? "f32" : "16-bit";
    char last[40] = "", parts[80] = "";
    if (s->stores) snprintf(parts, sizeof parts, " in saved");
    else if (plan->slice_tokens)
        snprintf(parts, sizeof parts, " of %lld tokens at a time%s", (long long)plan->slice_tokens,
                 !plan->rounds && plan->slice_tokens <= lk_head_rows_in_dweight(s, plan->chunk_tokens) ? " in dweight" : "");
    if (plan->lent_vocab || (plan->kept_vocab && plan->kept_vocab < s->vocab))
        snprintf(parts, sizeof parts, " of %lld columns, %lld of them in dweight", (long long)plan->kept_vocab,
                 (long long)plan->lent_vocab);
    const char *const dx = !plan->f32_dx ? "" : lk_head_dx_in_dweight(s) ? ", dx in f32 in dweight" : ", dx in f32";
    if (tail) snprintf(last, sizeof last, ", %d tail column%s", tail, tail == 1 ? "" : "s");
    snprintf(text, size, "%lld x %lld tokens, %lld x %lld columns, %s logits%s%s%s, %d matmuls%s: %s%s%s",
             (long long)plan->chunks, (long long)plan->chunk_tokens, (long long)plan->panels, (long long)plan->panel_vocab,
             kept, parts, sums[sum], dx, plan->matmuls, last, plan->exact ? "exact" : "fast",
             s->why_not_fused[0] ? "; FUSED, for sm_90a, is left out" : "", s->why_not_fused);
}

#endif /* C++ */
#endif
