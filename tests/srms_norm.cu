// SPDX-License-Identifier: MIT
/* tests/srms_norm.cu - lk/srms_norm.cuh against its header's formula in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits, so that nothing stale passes for a
 * result. Bytes that are not outputs (zones around every buffer, the workspace's too, gaps between strided rows, the inputs)
 * must not change. Most options are drawn, from seeds that depend on the case alone; the counts at the end demand that each of
 * them ran on every path.
 *
 * Limits, in 2^-24 of the magnitudes of the terms, besides half an ulp of the output's type:
 *   residual_out  the rounding of the float s, bit for bit
 *   rstd          8: half of what a sum of squares may lose (12), the root, the quotient
 *   y             10: rstd's, and two products; 12 with the sums weight_offset + weight and y + bias
 *   dx, dresidual 16: rstd stands three times in the term of the mean where it is recomputed, and each sum loses its part.
 *                 dx is the rounding of a float dresidual, bit for bit
 *   dweight, dbias  16 + log2 rows: an element's 10, and the sum over rows by blocks, whose errors have random signs
 * A result below 2^-126 may be flushed to 0.
 */
#include "lk/srms_norm.cuh"

#include "tests/test.h"

TEST_DEFINE(SRMS_NORM)

typedef lk_status (*call)(const lk_srms_norm_args *, cudaStream_t);
typedef lk_status (*query)(const lk_srms_norm_args *, size_t *);
static const call call_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_srms_norm_forward), TEST_OF_TYPES(lk_srms_norm_backward)};
static const query query_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_srms_norm_forward_workspace_bytes),
                                              TEST_OF_TYPES(lk_srms_norm_backward_workspace_bytes)};

enum { FORWARD, BACKWARD, BOTH };
static const char *const direction_name[] = {"forward", "backward"};
enum { PATHS = 4 };
static const char *const path_name[PATHS] = {"auto", "warp", "block", "cluster"};

enum { X, RESIDUAL, RESIDUAL_OUT, WEIGHT, BIAS, RSTD, Y, DY, DRESIDUAL_OUT, DX, DRESIDUAL, DWEIGHT, DBIAS, WORKSPACE };
enum { TENSORS = WORKSPACE };
static const char *const tensor_name[] = {"x",  "residual",      "residual_out", "weight",    "bias",    "rstd",  "y",
                                          "dy", "dresidual_out", "dx",           "dresidual", "dweight", "dbias", "workspace"};

/* The elements of odd rows (or of the only row) that are special. Lane, warp, block: of a row that starts on 16 bytes. */
enum { FIRST, LAST, VECTOR, LANE, WARP, BLOCK, EVEN, SPARSE, BUT_ONE, ALL, WHERES };
static const char *const where_name[] = {"first",     "last", "a vector", "a lane's",    "a warp's",
                                         "a block's", "even", "1 in 97",  "all but one", "all"};
/* HUGE: the square overflows (in f16: nearly the largest number). */
enum { NOTHING, MINUS_INF, PLUS_INF, NOT_A_NUMBER, LARGE, HUGE_NUMBER, ZERO, SPECIALS };
static const char *const special_name[] = {"nothing", "-inf", "+inf", "nan", "1e4", "huge", "0"};

/* One call. Strides are as in the args, 0 for packed; `at` is how many elements a pointer is past 256-byte alignment. */
typedef struct {
    int type, direction, path;
    int64_t rows, cols;
    bool has[TENSORS];
    int home[TENSORS]; /* the tensor in whose memory it is: itself, or in place another */
    int64_t stride[TENSORS];
    int at[TENSORS];
    int residual_dtype, weight_dtype, dweight_dtype, dy_dtype;
    bool accumulate, rounded; /* rounded: round_sum */
    float eps, weight_offset;
    int groups; /* as in the args: 0 is 1 too */
    int special, where, victim; /* victim: the tensor with special values; X: s, whatever it comes from */
    double offset, spread;      /* s is uniform in offset +- spread */
    uint64_t seed;
} problem;

/* A problem with its two required tensors. */
static problem plain(int type, int direction, int path, int64_t rows, int64_t cols)
{
    problem p = {};
    p.type = type, p.direction = direction, p.path = path, p.rows = rows, p.cols = cols;
    for (int t = 0; t < TENSORS; t++) p.home[t] = t;
    p.has[X] = p.has[direction == FORWARD ? Y : DX] = true;
    p.spread = 4;
    p.seed = test_hash((uint64_t)(rows * 1000003 + cols * 1009 + type * 101 + direction * 11 + path));
    return p;
}

static const char *describe(const problem *p)
{
    static char text[1024];
    int n = snprintf(text, sizeof text,
                     "%s %s path=%s rows=%lld cols=%lld eps=%g groups=%d weight_offset=%g "
                     "dtypes: residual %d weight %d dweight %d dy %d%s",
                     direction_name[p->direction], test_type_name[p->type], path_name[p->path], (long long)p->rows,
                     (long long)p->cols, (double)p->eps, p->groups, (double)p->weight_offset, p->residual_dtype,
                     p->weight_dtype, p->dweight_dtype, p->dy_dtype, p->accumulate ? " accumulate" : "");
    if (p->rounded) n += snprintf(text + n, sizeof text - (size_t)n, " round_sum");
    for (int t = 0; t < TENSORS; t++)
        if (p->has[t] && p->home[t] != t)
            n += snprintf(text + n, sizeof text - (size_t)n, " %s=%s", tensor_name[t], tensor_name[p->home[t]]);
        else if (p->has[t])
            n += snprintf(text + n, sizeof text - (size_t)n, " %s(stride %lld, at %d)", tensor_name[t], (long long)p->stride[t],
                          p->at[t]);
    snprintf(text + n, sizeof text - (size_t)n, " special=%s at %s of %s offset=%g spread=%g seed=0x%llx",
             special_name[p->special], where_name[p->where], tensor_name[p->victim], p->offset, p->spread,
             (unsigned long long)p->seed);
    return text;
}

static bool is_output(const problem *p, int t)
{
    if (!p->has[t]) return false;
    if (p->direction == FORWARD) return t == Y || t == RESIDUAL_OUT || t == RSTD;
    return t == DX || t == DRESIDUAL || t == DWEIGHT || t == DBIAS;
}

/* Weight, bias and their gradients. */
static bool is_columns(int t)
{
    return t == WEIGHT || t == BIAS || t == DWEIGHT || t == DBIAS;
}

static int64_t groups_of(const problem *p)
{
    return p->groups ? p->groups : 1;
}

/* Where a tensor's elements lie: those of columns are a row per group, those of rstd one column. */
typedef struct {
    int type;
    int64_t rows, cols, stride;
} layout;

static layout layout_of(const problem *p, int t)
{
    int dtype = LK_DTYPE_T;
    if (t == WEIGHT || t == BIAS) dtype = p->weight_dtype;
    if (t == DWEIGHT || t == DBIAS) dtype = p->dweight_dtype;
    if (t == RSTD) dtype = LK_DTYPE_F32;
    if (t == DY) dtype = p->dy_dtype;
    if (t == RESIDUAL || t == RESIDUAL_OUT || t == DRESIDUAL_OUT || t == DRESIDUAL) dtype = p->residual_dtype;
    const int type = dtype == LK_DTYPE_T ? p->type : dtype - LK_DTYPE_F32; /* both lists go f32, f16, bf16 */
    if (is_columns(t)) return {type, groups_of(p), p->cols, p->cols};
    if (t == RSTD) return {type, p->rows, 1, 1};
    const int64_t stride = p->stride[p->home[t]];
    return {type, p->rows, p->cols, stride ? stride : p->cols};
}

/* Whether the stride of a tensor in place is given as 0. */
static bool stride_of_other(const problem *p, int t)
{
    return p->has[t] && p->home[t] != t && p->seed >> t & 1;
}

/* ---- Counts of what ran: the names are collected by the first call --------------------------------------------------- */

static const char *did_name[TEST_MOST_OPTIONS];
static int did_direction[TEST_MOST_OPTIONS];
static const char *const counted_paths[] = {"fwd auto", "warp", "block", "cluster", "bwd auto", "warp", "block", "cluster"};
static test_counts counts = {counted_paths, did_name, 2 * PATHS, 0, {}, {}};

static bool path_here(int path)
{
    return path != LK_SRMS_NORM_CLUSTER || test_clusters();
}

static void count(const problem *p)
{
    const bool back = p->direction == BACKWARD;
    const int vec = 16 / test_type_bytes[p->type], at = p->direction * PATHS + p->path;
    const bool f32 = layout_of(p, RESIDUAL).type == TEST_F32, sum = p->has[X] && p->has[RESIDUAL];
    const bool stream = p->has[RESIDUAL] || p->has[RESIDUAL_OUT] || p->has[DRESIDUAL_OUT] || p->has[DRESIDUAL];
    bool off = false, alike = true, aligned = true, odd_gaps = false, gaps = false, own = false, other = false;
    int64_t first = 0;
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        if (!p->has[t] || is_columns(t) || t == RSTD) continue;
        off |= p->at[p->home[t]] % vec != 0;
        alike &= p->at[p->home[t]] % vec == p->at[p->home[X]] % vec || !p->has[X];
        aligned &= l.stride % vec == 0;
        gaps |= l.stride != l.cols && l.stride % vec == 0, odd_gaps |= l.stride != l.cols && l.stride % vec != 0;
        if (!first) first = l.stride;
        own |= first != l.stride;
        other |= stride_of_other(p, t) && l.stride != l.cols;
    }
    int i = 0;
    counts.runs[at]++;
#define DID(which, name, yes)                                                                                                  \
    (did_name[i] = name, did_direction[i] = which, counts.of[at][i] += (which == BOTH || which == p->direction) && (yes), i++)
    DID(BOTH, "f32", p->type == TEST_F32), DID(BOTH, "f16", p->type == TEST_F16), DID(BOTH, "bf16", p->type == TEST_BF16);
    DID(BOTH, "0 rows", p->rows == 0), DID(BOTH, "1 row", p->rows == 1), DID(BOTH, "many rows", p->rows >= 500);
    DID(BOTH, "1 col", p->cols == 1), DID(BOTH, "long rows", p->cols > 3000);
    DID(BOTH, "residual T", sum && !(f32 && p->type)), DID(BOTH, "residual f32", sum && f32 && p->type);
    DID(BOTH, "round_sum", p->rounded && sum && !f32 && p->type && !p->has[back ? RESIDUAL_OUT : BIAS] && p->rows);
    DID(BOTH, "round_sum without effect", p->rounded && (!sum || f32 || !p->type));
    DID(BOTH, "weight NULL", !p->has[WEIGHT]), DID(BOTH, "weight off", p->has[WEIGHT] && p->at[WEIGHT] % vec);
    DID(BOTH, "weight T", p->has[WEIGHT] && layout_of(p, WEIGHT).type == p->type);
    DID(BOTH, "weight f32", p->has[WEIGHT] && layout_of(p, WEIGHT).type == TEST_F32 && p->type);
    DID(BOTH, "weight of 16 other bits", p->has[WEIGHT] && layout_of(p, WEIGHT).type != p->type && layout_of(p, WEIGHT).type);
    const bool shared = p->has[WEIGHT] || p->has[back ? DWEIGHT : BIAS];
    DID(BOTH, "weight_offset", p->has[WEIGHT] && p->weight_offset != 0), DID(BOTH, "groups", shared && p->groups > 1);
    DID(BOTH, "groups and weight_offset", p->has[WEIGHT] && p->groups > 1 && p->weight_offset != 0);
    DID(FORWARD, "bias", p->has[BIAS] && p->has[Y]), DID(BACKWARD, "dbias", p->has[DBIAS]);
    DID(BACKWARD, "dbias without dweight", p->has[DBIAS] && !p->has[DWEIGHT]);
    DID(BOTH, "dtype spelt out", stream && p->type && p->residual_dtype > LK_DTYPE_F32);
    DID(BOTH, "rows off alike", p->rows > 1 && off && alike && aligned), DID(BOTH, "rows off, each its own", off && !alike);
    DID(BOTH, "packed odd rows", p->rows > 1 && p->cols % vec && !gaps && !odd_gaps), DID(BOTH, "aligned gaps", gaps);
    DID(BOTH, "odd gaps", odd_gaps), DID(BOTH, "strides differ", own);
    DID(BOTH, "gaps of another", other);
    DID(BOTH, "eps 0", p->eps == 0), DID(BOTH, "eps 1e-30", p->eps == 1e-30f), DID(BOTH, "around 1e4", fabs(p->offset) == 1e4);
    for (int s = 1; s < SPECIALS; s++) DID(BOTH, special_name[s], p->special == s && p->rows);
    for (int w = 0; w < WHERES; w++) DID(BOTH, where_name[w], p->special && p->where == w && p->rows);
    DID(BOTH, "zero row", p->special == ZERO && p->where == ALL && p->victim == X && p->rows);
    DID(FORWARD, "y NULL", !p->has[Y]), DID(FORWARD, "residual_out NULL", !p->has[RESIDUAL_OUT]);
    DID(FORWARD, "rstd NULL", !p->has[RSTD]);
    DID(FORWARD, "residual_out of x alone", p->has[RESIDUAL_OUT] && !p->has[RESIDUAL]);
    DID(FORWARD, "y = x", p->has[Y] && p->home[Y] == X);
    DID(FORWARD, "residual_out = residual", p->has[RESIDUAL_OUT] && p->home[RESIDUAL_OUT] == RESIDUAL);
    DID(BACKWARD, "s from x", p->has[X] && !sum), DID(BACKWARD, "s from residual_out", back && p->has[RESIDUAL_OUT]);
    DID(BACKWARD, "rstd given", p->has[RSTD]), DID(BACKWARD, "rstd NULL", !p->has[RSTD]);
    DID(BACKWARD, "dy f32", p->has[DY] && p->dy_dtype == LK_DTYPE_F32 && p->type);
    DID(BACKWARD, "dy NULL", !p->has[DY]), DID(BACKWARD, "dresidual_out", p->has[DRESIDUAL_OUT]);
    DID(BACKWARD, "dx alone", p->has[DX] && !p->has[DRESIDUAL] && !p->has[DWEIGHT]);
    DID(BACKWARD, "dresidual alone", !p->has[DX] && p->has[DRESIDUAL] && !p->has[DWEIGHT]);
    DID(BACKWARD, "dweight alone", !p->has[DX] && !p->has[DRESIDUAL] && p->has[DWEIGHT]);
    DID(BACKWARD, "dx T, dresidual f32", p->has[DX] && p->has[DRESIDUAL] && f32 && p->type);
    DID(BACKWARD, "dweight T", p->has[DWEIGHT] && layout_of(p, DWEIGHT).type == p->type);
    DID(BACKWARD, "dweight f32", p->has[DWEIGHT] && layout_of(p, DWEIGHT).type == TEST_F32 && p->type);
    DID(BACKWARD, "dweight of 16 other bits",
        p->has[DWEIGHT] && layout_of(p, DWEIGHT).type != p->type && layout_of(p, DWEIGHT).type);
    DID(BACKWARD, "accumulate", p->has[DWEIGHT] && p->accumulate);
    DID(BACKWARD, "dx = dy", p->has[DX] && p->home[DX] == DY);
    DID(BACKWARD, "dx = dresidual_out", p->has[DX] && p->home[DX] == DRESIDUAL_OUT);
    DID(BACKWARD, "dresidual = dresidual_out", p->has[DRESIDUAL] && p->home[DRESIDUAL] == DRESIDUAL_OUT);
#undef DID
    static_assert(TEST_MOST_OPTIONS >= 75, "the list above");
    counts.option_count = i;
}

/* Whether this direction and path can be asked for an option at all. */
static bool possible(int at, int did)
{
    return path_here(at % PATHS) && (did_direction[did] == BOTH || did_direction[did] == at / PATHS);
}

/* ---- Draws ----------------------------------------------------------------------------------------------------------- */

/* Which tensors there are, their types and who lies in whose memory. */
static void draw_options(problem *p, uint64_t *r)
{
    static const float eps[] = {0, 1e-6f, 1e-30f, 1e-5f, 0.7f};
    int *const dtypes[] = {&p->residual_dtype, &p->weight_dtype, &p->dweight_dtype};
    for (int i = 0; i < 3; i++) *dtypes[i] = test_chance(r, 2) ? LK_DTYPE_F32 : test_chance(r, 3) ? p->type + 1 : LK_DTYPE_T;
    for (int i = 1; i < 3; i++)
        if (test_chance(r, 3)) *dtypes[i] = (int)test_below(r, 4);
    for (int t = 0; t < TENSORS; t++) p->has[t] = false, p->home[t] = t;
    const bool same = layout_of(p, RESIDUAL).type == p->type;
    const int outputs = test_chance(r, 4) ? 7 : 1 + (int)test_below(r, 7);
    p->has[X] = true, p->has[WEIGHT] = !test_chance(r, 3);
    const int more = test_chance(r, 3) ? 1 + (int)test_below(r, 7) : 0; /* two thirds by the kernels without these */
    p->groups = more & 1 ? 2 + (int)test_below(r, 4) : test_chance(r, 2), p->weight_offset = more & 2 ? 1.0f : 0.0f;
    if (test_chance(r, 4)) p->weight_offset *= -0.3f;
    p->has[p->direction == FORWARD ? BIAS : DBIAS] = more & 4;
    if (p->direction == FORWARD) {
        p->has[RESIDUAL] = !test_chance(r, 3);
        p->has[Y] = outputs & 1, p->has[RESIDUAL_OUT] = outputs & 2, p->has[RSTD] = outputs & 4;
        if (test_chance(r, 3)) p->home[Y] = X;
        if (p->has[RESIDUAL] && test_chance(r, 3)) p->home[RESIDUAL_OUT] = RESIDUAL;
    } else {
        const int source = (int)test_below(r, 3);
        p->has[RESIDUAL_OUT] = source == 0, p->has[X] = source != 0, p->has[RESIDUAL] = source == 2;
        p->has[RSTD] = test_chance(r, 2), p->has[DY] = !test_chance(r, 4), p->has[DRESIDUAL_OUT] = test_chance(r, 2);
        p->has[DX] = outputs & 1, p->has[DRESIDUAL] = outputs & 2, p->has[DWEIGHT] = outputs & 4;
        p->accumulate = test_chance(r, 2);
        const int place = (int)test_below(r, 6);
        if (place < 2 && p->has[DY]) p->home[DX] = DY;
        if ((place == 1 || place == 2) && p->has[DRESIDUAL_OUT]) p->home[DRESIDUAL] = DRESIDUAL_OUT;
        if (place == 3 && p->has[DRESIDUAL_OUT] && same) p->home[DX] = DRESIDUAL_OUT;
    }
    p->eps = eps[test_below(r, LENGTH_OF(eps))];
    if (p->direction == BACKWARD) p->dy_dtype = test_chance(r, 3) ? LK_DTYPE_F32 : test_chance(r, 2) ? p->type + 1 : LK_DTYPE_T;
    if (layout_of(p, DY).type != p->type && p->home[DX] == DY) p->home[DX] = DX;
}

/* How rows lie: packed; packed and all off by as much; with gaps, all alike; with gaps of their own that leave all rows
 * congruent; with one odd stride; each with its own stride and offset. Weight, rstd and dweight are on their own. */
enum { PACKED, PACKED_OFF, GAPS, OWN_GAPS, ODD_GAPS, WILD, PLACES };

static void draw_place(problem *p, uint64_t *r, int place)
{
    const int off = place == PACKED ? 0 : 1 + (int)test_below(r, 7);
    const int64_t full = (p->cols + 7) / 8 * 8, gap = 8 * (1 + test_below(r, 3)), odd = p->cols + 1 + 2 * test_below(r, 4);
    for (int t = 0; t < TENSORS; t++) {
        p->at[t] = place == WILD || is_columns(t) || t == RSTD ? (int)test_below(r, 8) : off;
        p->stride[t] = test_chance(r, 2) ? 0 : p->cols; /* packed, as 0 or spelt out */
        if (place == GAPS) p->stride[t] = full + gap;
        if (place == OWN_GAPS) p->stride[t] = full + 8 * test_below(r, 4);
        if (place == ODD_GAPS) p->stride[t] = odd;
        if (place == WILD) p->stride[t] = p->cols + test_below(r, 12);
    }
    if (test_chance(r, 2)) p->at[WEIGHT] = 0;
}

static void draw_special(problem *p, uint64_t *r)
{
    p->special = 1 + (int)test_below(r, SPECIALS - 1), p->where = (int)test_below(r, WHERES);
    const int victims[] = {X, X, DY, WEIGHT, BIAS, DRESIDUAL_OUT}, victim = victims[test_below(r, LENGTH_OF(victims))];
    p->victim = p->has[victim] ? victim : X;
}

/* A problem with drawn options and places, from a seed that the caller makes of its case. */
static problem drawn(int type, int direction, int path, int64_t rows, int64_t cols, int seed, int place)
{
    problem p = plain(type, direction, path, rows, cols);
    p.seed = test_hash(p.seed + (uint64_t)seed * 0x10001);
    uint64_t random = p.seed;
    draw_options(&p, &random);
    draw_place(&p, &random, place);
    p.rounded = test_hash(p.seed + 1) % 2;
    /* A dweight of many columns is what takes the simulator longest: it turns up in every fourth long row. */
    if (cols > 100000) p.has[DBIAS] = false;
    if (p.has[DWEIGHT] && (cols > 100000 || (cols > test_pick(3000, 150) && (type + path + seed + 1) % 4)))
        p.has[DWEIGHT] = false, p.has[DX] = true;
    return p;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------------- */

static test_buffer buffers[TENSORS + 1]; /* the workspace is the last */
static layout laid[TENSORS];
static unsigned char *kept[TENSORS]; /* the first run's outputs */
static size_t kept_bytes[TENSORS], row_bytes[4];
static double *row_s, *row_g, *column_sum, *column_size;

static bool is_special(const problem *p, int t, int64_t row, int64_t c)
{
    const bool zero = p->special == ZERO && p->victim == X && (t == RESIDUAL || t == X); /* both, so that s is 0 */
    const int victim = p->victim == X && !p->has[X] ? RESIDUAL_OUT : p->victim;
    if (!p->special || (t != victim && !zero) || (!is_columns(t) && p->rows > 1 && row % 2 == 0)) return false;
    const int vec = 16 / test_type_bytes[p->type];
    switch (p->where) {
    case FIRST: return c == 0;
    case LAST: return c == p->cols - 1;
    case VECTOR: return c / vec == (p->cols > vec ? 1 : 0);
    case LANE: return c / vec % 32 == 1;
    case WARP: return c / vec / 32 % 8 == 0;
    case BLOCK: return c / vec / 256 % 2 == 0;
    case EVEN: return c % 2 == 0;
    case SPARSE: return c % 97 == 5;
    case BUT_ONE: return c != row * 7 % p->cols;
    }
    return true;
}

static float value(int t, int64_t row, int64_t c)
{
    return test_get(laid[t].type, test_buffer_host(&buffers[t]), row * laid[t].stride + c);
}

/* s as the float that the header speaks of, with round_sum as the residual's type has it. */
static float load_s(const problem *p, int64_t row, int64_t c)
{
    if (!p->has[X]) return value(RESIDUAL_OUT, row, c);
    if (!p->has[RESIDUAL]) return value(X, row, c);
    const float sum = value(X, row, c) + value(RESIDUAL, row, c);
    return p->rounded ? test_decode(laid[RESIDUAL].type, test_encode(laid[RESIDUAL].type, sum)) : sum;
}

/* rstd of a row, whose s it leaves in row_s. Squares are floats: what overflows is infinite. */
static double load_row(const problem *p, int64_t row)
{
    double sum = 0;
    for (int64_t c = 0; c < p->cols; c++) {
        row_s[c] = (double)load_s(p, row, c);
        sum += row_s[c] * row_s[c];
    }
    if (sum > 0x1.fffffep127) sum = INFINITY;
    return 1 / sqrt(sum / (double)p->cols + (double)p->eps);
}

/* The factor of a column; k of the limit for y. */
static double factor(const problem *p, int64_t row, int64_t c)
{
    return p->has[WEIGHT] ? (double)p->weight_offset + (double)value(WEIGHT, row % groups_of(p), c) : 1;
}
static double limit_y(const problem *p)
{
    return p->has[BIAS] || p->weight_offset != 0 ? 12 : 10;
}

static void fill(const problem *p, int t)
{
    static const float special[] = {0, -INFINITY, INFINITY, NAN, 1e4f, 1e25f, 0};
    void *const host = test_buffer_host(&buffers[t]);
    const layout l = laid[t];
    uint64_t random = p->seed + (uint64_t)t * 0x100000001;
    for (int64_t row = 0; row < l.rows; row++)
        for (int64_t c = 0; c < l.cols; c++) {
            double v = 2 * test_uniform(&random);
            if (t == X || t == RESIDUAL_OUT) v = p->offset + p->spread / 2 * v;
            if (t == WEIGHT) v = v < 0 ? v - 0.2 : v + 0.2;
            if (t == RSTD) v = load_row(p, row);
            if (is_special(p, t, row, c)) v = p->special == HUGE_NUMBER && l.type == TEST_F16 ? 6e4 : special[p->special];
            test_put(l.type, host, row * l.stride + c, (float)v);
        }
}

static lk_srms_norm_args forward, backward;
static const lk_srms_norm_args *args_of(int direction) { return direction == FORWARD ? &forward : &backward; }

/* What a call must not look at: pointers that nothing may follow, strides and types that no check accepts. */
static lk_srms_norm_args garbage(void)
{
    lk_srms_norm_args a = {};
    a.x = a.residual = a.weight = a.bias = a.dy = a.dresidual_out = (const void *)1;
    a.residual_out = a.y = a.dx = a.dresidual = a.dweight = a.dbias = a.workspace = (void *)1, a.rstd = (float *)1;
    a.x_stride = a.residual_stride = a.residual_out_stride = a.y_stride = a.dy_stride = -3;
    a.dresidual_out_stride = a.dx_stride = a.dresidual_stride = -3;
    a.dweight_dtype = a.dy_dtype = a.accumulate = -3, a.workspace_bytes = 7;
    return a;
}

/* The most that the header lets a workspace have. */
static size_t most_bytes(const lk_srms_norm_args *a)
{
    const size_t cols = (size_t)a->cols, one = (64u << 20) + 8 * cols + 128;
    const size_t many = a->groups > 1 ? (size_t)a->groups * (8 * cols + 6144) : 0;
    const size_t results = (a->dweight != NULL) + (a->dbias != NULL);
    return results * (one > many ? one : many);
}

/* Fills and uploads everything for a run, and the two args structs. With rstd given, eps must not matter. A tensor in place has
 * the other's stride, given or as 0. With residual_out, backward ignores x and residual, which may be that one. */
static bool setup(const problem *p, int run)
{
    void *at[TENSORS] = {};
    int64_t strides[TENSORS];
    row_s = (double *)test_room(row_s, &row_bytes[0], (size_t)p->cols * sizeof(double));
    row_g = (double *)test_room(row_g, &row_bytes[1], (size_t)p->cols * sizeof(double));
    const size_t sums = 2 * (size_t)(groups_of(p) * p->cols) * sizeof(double); /* for dweight, then for dbias */
    column_sum = (double *)test_room(column_sum, &row_bytes[2], sums);
    column_size = (double *)test_room(column_size, &row_bytes[3], sums);
    for (int t = 0; t < TENSORS; t++) {
        const int home = p->home[t];
        laid[t] = layout_of(p, t), strides[t] = p->stride[home];
        if (!p->has[t]) continue;
        const layout l = laid[t];
        const size_t bytes = (size_t)test_type_bytes[l.type];
        if (home == t) {
            const bool out = is_output(p, t);
            test_buffer_size(&buffers[t], (size_t)(l.rows ? (l.rows - 1) * l.stride + l.cols : 0) * bytes,
                             (size_t)p->at[t] * bytes, run ? (out ? 0xff : 0x7f) : (out ? 0x5a : 0xff));
            if (!out || (is_columns(t) && p->accumulate)) fill(p, t);
            test_buffer_upload(&buffers[t]);
        }
        at[t] = test_buffer_device(&buffers[home]);
    }
    for (int t = 0; t < TENSORS; t++)
        if (stride_of_other(p, t)) strides[t] = 0;
    forward = backward = garbage();
    forward.x = at[X], forward.residual = at[RESIDUAL], forward.weight = at[WEIGHT], forward.y = at[Y];
    forward.residual_out = at[RESIDUAL_OUT], forward.rstd = (float *)at[RSTD], forward.rows = p->rows, forward.cols = p->cols;
    forward.x_stride = strides[X], forward.residual_stride = strides[RESIDUAL], forward.y_stride = strides[Y];
    forward.residual_out_stride = strides[RESIDUAL_OUT], forward.eps = p->eps, forward.residual_dtype = p->residual_dtype;
    forward.weight_dtype = p->weight_dtype, forward.path = p->path, forward.bias = at[BIAS], forward.groups = p->groups;
    forward.weight_offset = p->weight_offset, forward.round_sum = backward.round_sum = p->rounded;
    if (!p->has[RESIDUAL_OUT]) {
        backward.x = at[X], backward.residual = at[RESIDUAL];
        backward.x_stride = strides[X], backward.residual_stride = strides[RESIDUAL];
    } else if (p->seed & 1) { /* the struct of a forward in place */
        backward.residual = at[RESIDUAL_OUT], backward.residual_stride = strides[RESIDUAL_OUT];
    }
    backward.residual_out = at[RESIDUAL_OUT], backward.rstd = (float *)at[RSTD], backward.weight = at[WEIGHT];
    backward.dy = at[DY], backward.dresidual_out = at[DRESIDUAL_OUT], backward.dx = at[DX], backward.dresidual = at[DRESIDUAL];
    backward.dweight = at[DWEIGHT], backward.dbias = at[DBIAS], backward.rows = p->rows, backward.cols = p->cols;
    backward.groups = p->groups, backward.weight_offset = p->weight_offset;
    backward.residual_out_stride = (p->seed & 3) == 3 && p->has[RESIDUAL_OUT] ? 0 : strides[RESIDUAL_OUT];
    backward.dy_stride = strides[DY];
    backward.dresidual_out_stride = strides[DRESIDUAL_OUT], backward.dx_stride = strides[DX];
    backward.dresidual_stride = strides[DRESIDUAL], backward.eps = p->has[RSTD] ? 3.0f : p->eps;
    backward.residual_dtype = p->residual_dtype, backward.weight_dtype = p->weight_dtype;
    backward.dweight_dtype = p->dweight_dtype, backward.dy_dtype = p->dy_dtype;
    backward.accumulate = p->accumulate, backward.path = p->path;
    size_t bytes = 12345;
    const lk_status status = query_of[p->direction][p->type](args_of(p->direction), &bytes);
    const bool summed = p->has[DWEIGHT] || p->has[DBIAS];
    const bool good = status == LK_OK && bytes <= most_bytes(&backward) && (summed || bytes == 0);
    if (!test_that(good))
        test_detail("the query says %s, %zu bytes; %s", lk_status_string(status), bytes, describe(p));
    if (!good) bytes = 0;
    test_buffer_size(&buffers[WORKSPACE], bytes, 0, run ? 0x5a : 0xff);
    test_buffer_upload(&buffers[WORKSPACE]);
    backward.workspace = bytes ? test_buffer_device(&buffers[WORKSPACE]) : NULL, backward.workspace_bytes = bytes;
    return good;
}

static lk_status launch(const problem *p)
{
    return call_of[p->direction][p->type](args_of(p->direction), test.stream);
}

static bool launched(const problem *p, lk_status status) { return test_launched(status, describe(p)); }

static void collect(const problem *p)
{
    for (int t = 0; t <= TENSORS; t++)
        if (t == WORKSPACE || (p->has[t] && p->home[t] == t)) test_buffer_download(&buffers[t]);
}

/* ---- The reference --------------------------------------------------------------------------------------------------- */

static float result(const problem *p, int t, int64_t row, int64_t c)
{
    return test_get(laid[t].type, test_buffer_back(&buffers[p->home[t]]), row * laid[t].stride + c);
}

static void near(const problem *p, int t, int64_t row, int64_t c, double want, double k, double magnitude)
{
    const float got = result(p, t, row, c);
    const double slack = isfinite(magnitude) ? k * 0x1p-24 * magnitude + 0x1p-126 : 0;
    if (!test_near(laid[t].type, got, want, slack))
        test_detail("%s[row %lld, col %lld] is %.9g, want %.9g +- %.3g; %s", tensor_name[t], (long long)row, (long long)c,
                    (double)got, want, slack, describe(p));
}

/* A result that is the rounding of a float. */
static void exactly(const problem *p, int t, int64_t row, int64_t c, float want)
{
    const float got = result(p, t, row, c);
    if (!test_that(test_encode(laid[t].type, got) == test_encode(laid[t].type, want) || (want != want && got != got)))
        test_detail("%s[row %lld, col %lld] is %.9g, not the rounding of %.9g; %s", tensor_name[t], (long long)row,
                    (long long)c, (double)got, (double)want, describe(p));
}

static void verify_forward(const problem *p)
{
    for (int64_t row = 0; row < p->rows; row++) {
        const double rstd = load_row(p, row);
        if (p->has[RSTD]) near(p, RSTD, row, 0, rstd, 8, rstd);
        for (int64_t c = 0; c < p->cols; c++) {
            const double y = row_s[c] * rstd * factor(p, row, c);
            const double bias = p->has[BIAS] ? (double)value(BIAS, row % groups_of(p), c) : 0;
            if (p->has[Y]) near(p, Y, row, c, y + bias, limit_y(p), fabs(y) + fabs(bias));
            if (p->has[RESIDUAL_OUT]) exactly(p, RESIDUAL_OUT, row, c, (float)row_s[c]);
        }
    }
}

static void verify_backward(const problem *p)
{
    const int64_t groups = groups_of(p), n = groups * p->cols; /* of dweight, and of dbias */
    for (int64_t i = 0; i < 2 * n; i++) {
        const int t = i < n ? DWEIGHT : DBIAS;
        column_sum[i] = p->has[t] && p->accumulate ? (double)value(t, 0, i % n) : 0;
        column_size[i] = fabs(column_sum[i]);
    }
    for (int64_t row = 0; row < p->rows; row++) {
        double rstd = load_row(p, row), mean = 0, size = 0;
        if (p->has[RSTD]) rstd = (double)value(RSTD, row, 0);
        for (int64_t c = 0; c < p->cols; c++) {
            const double dy = p->has[DY] ? (double)value(DY, row, c) : 1, h = row_s[c] * rstd;
            const int64_t i = row % groups * p->cols + c;
            row_g[c] = dy * factor(p, row, c);
            mean += row_g[c] * h / (double)p->cols, size += fabs(row_g[c] * h) / (double)p->cols;
            column_sum[i] += dy * h, column_size[i] += fabs(dy * h);
            column_sum[n + i] += dy, column_size[n + i] += fabs(dy);
        }
        for (int64_t c = 0; c < p->cols; c++) {
            const double more = p->has[DRESIDUAL_OUT] ? (double)value(DRESIDUAL_OUT, row, c) : 0, h = row_s[c] * rstd;
            const double ds = rstd * (row_g[c] - h * mean) + more,
                         magnitude = rstd * (fabs(row_g[c]) + fabs(h) * size) + fabs(more);
            if (p->has[DX]) near(p, DX, row, c, ds, 16, magnitude);
            if (p->has[DRESIDUAL]) near(p, DRESIDUAL, row, c, ds, 16, magnitude);
            if (p->has[DX] && p->has[DRESIDUAL]) exactly(p, DX, row, c, result(p, DRESIDUAL, row, c));
        }
    }
    for (int64_t i = 0; i < 2 * n; i++) {
        const int t = i < n ? DWEIGHT : DBIAS;
        if (!p->has[t]) continue;
        near(p, t, i % n / p->cols, i % p->cols, column_sum[i], 16 + log2((double)p->rows + 1), column_size[i]);
        if (p->rows == 0) exactly(p, t, i % n / p->cols, i % p->cols, (float)column_sum[i]);
    }
}

static void verify(const problem *p)
{
    if (p->direction == FORWARD) verify_forward(p);
    else verify_backward(p);
}

/* Keeps the outputs' bits or compares them with those that were kept; then nothing else may have changed. */
static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++)
        if (is_output(p, t))
            test_settle(&buffers[p->home[t]], &kept[t], &kept_bytes[t], keep, laid[t].rows, laid[t].cols, laid[t].stride,
                        test_type_bytes[laid[t].type], tensor_name[t], what, describe(p));
    test_buffer_accept_all(&buffers[WORKSPACE]);
    for (int t = 0; t <= TENSORS; t++)
        if (t == WORKSPACE || (p->has[t] && p->home[t] == t)) test_buffer_untouched(&buffers[t], tensor_name[t], describe(p));
}

static const test_op<problem> op = {describe, setup, launch, collect, verify, settle, count};
static void check(const problem *p) { test_twice(op, p); }

/* ---- Cases: each on every direction, path and type ------------------------------------------------------------------- */

static void empty(int type, int direction, int path)
{
    const int64_t cols[] = {1, 9, 300, 1001};
    for (int i = 0; i < test_pick(LENGTH_OF(cols), 2); i++)
        for (int seed = 0; seed < 2; seed++) {
            problem p = drawn(type, direction, path, 0, cols[i], seed, seed % PLACES);
            if (direction == BACKWARD) p.has[DWEIGHT] = p.has[DBIAS] = true, p.accumulate = seed % 2;
            check(&p);
        }
    /* Tensors without elements may be NULL. */
    forward = {}, backward = {};
    forward.cols = backward.cols = 7, forward.path = backward.path = path;
    problem p = plain(type, direction, path, 0, 7);
    launched(&p, launch(&p));
}

static void lengths(int type, int direction, int path)
{
    const int64_t cols[] = {1,   2,   7,   8,   9,   15,   16,   17,   31,   32,   33,   63,   64,   65,   127,  129,
                            255, 256, 257, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 4097, 5120, 8191, 8192, 8193, 16385};
    for (int i = 0; i < LENGTH_OF(cols); i++) {
        if (test.small && (cols[i] > 1100 || (i + type + path) % 4)) continue;
        for (int seed = 0; seed < (test.small || cols[i] > 1100 ? 1 : 2); seed++) {
            const problem p = drawn(type, direction, path, 1 + (i / 2 + type) % 4, cols[i], seed, (seed + i + path) % 2);
            check(&p);
        }
    }
}

/* Every option with every other, more or less. */
static void options(int type, int direction, int path)
{
    const int64_t cols[] = {24, 37, test_pick(520, 133)};
    for (int i = 0; i < LENGTH_OF(cols); i++)
        for (int seed = 0; seed < test_pick(24, i ? 3 : 6); seed++) {
            const problem p = drawn(type, direction, path, seed % 3 ? 3 : 6, cols[i], 100 + seed, seed % 2);
            check(&p);
        }
}

static void places(int type, int direction, int path)
{
    const int64_t cols[] = {5, 37, 64, test_pick(1000, 131), test_pick(8191, 300)};
    for (int i = 0; i < LENGTH_OF(cols); i++)
        for (int place = 0; place < PLACES; place++)
            for (int seed = 0; seed < test_pick(i < 3 ? 4 : 1, 1); seed++) {
                if ((test.small || i > 2) && (i + place + path + type) % 3) continue;
                const problem p = drawn(type, direction, path, i < 3 ? 5 : 3, cols[i], 200 + seed, place);
                check(&p);
            }
}

/* More rows than any grid has blocks: the loops over rows go round several times. */
static void many_rows(int type, int direction, int path)
{
#if defined(LK_SIMT)
    const int64_t most = test_pick(3000, 530);
#else
    const int64_t most = test_pick(100003, 2000);
#endif
    const int64_t shapes[][2] = {{most, 24}, {most, 3}, {most / 10 + 300, 100}, {most / 20 + 100, 600}};
    for (int i = 0; i < test_pick(LENGTH_OF(shapes), 1); i++)
        for (int place = 0; place < PLACES; place++) {
            if ((place + i + type + path) % PLACES) continue;
            problem p = drawn(type, direction, path, shapes[i][0], shapes[i][1], 300 + place, place);
            if (direction == BACKWARD) p.has[DWEIGHT] = true;
            check(&p);
        }
    for (int groups = 1; groups <= 2 && direction == BACKWARD; groups++) { /* dbias is the sum of many teams */
        problem p = drawn(type, direction, path, 1100, 9, 310 + groups, PACKED);
        p.groups = groups, p.has[DBIAS] = p.has[DY] = true, p.has[DWEIGHT] = groups == 2;
        check(&p);
    }
    /* Backward's kernels for many rows: alone, beside a residual's gradient, and with s of f32. */
    const int64_t vecs[] = {40, 130, 300};
    for (int i = 0; i < 9 && direction == BACKWARD && path <= LK_SRMS_NORM_BLOCK; i++) {
        const int beside = i / 3;
        if (test.small && ((i + type + path) % 3 || test.sms > 8)) continue;
        problem p = drawn(type, direction, path, 65 * test.sms + 3, vecs[i % 3] * 16 / test_type_bytes[type], 320 + i, i % 2 ? GAPS : PACKED);
        for (int t = 0; t < TENSORS; t++) p.home[t] = t, p.has[t] = false;
        p.has[beside < 2 ? X : RESIDUAL_OUT] = p.has[DY] = p.has[DX] = p.has[WEIGHT] = p.has[DWEIGHT] = true;
        p.has[DRESIDUAL_OUT] = beside > 0, p.has[RSTD] = i % 2, p.groups = i % 4 == 3 ? 3 : 0;
        p.residual_dtype = beside == 2 ? LK_DTYPE_F32 : LK_DTYPE_T, p.dy_dtype = LK_DTYPE_T;
        check(&p);
    }
}

/* Rows at odd offsets with common options: a weight of T, and in backward dy, one source of s and dweight, where all rows of a
 * team start at the same offset; or neither weight nor dweight. */
static void odd_rows(int type, int direction, int path)
{
    const int places[] = {PACKED, PACKED_OFF, ODD_GAPS, GAPS};
    /* On the simulator 16-bit rows of 2501 have 20 blocks, and of 10249 4 clusters, which is no multiple of 8, or less. */
    const int64_t cols[] = {37, test_pick(1003, 131), 2501, 10249};
    for (int i = 0; i < (path == LK_SRMS_NORM_CLUSTER ? 4 : 3); i++)
        for (int k = 0; k < 4 * LENGTH_OF(places); k++) {
            const int source = k / LENGTH_OF(places); /* x; residual_out of T; of f32; x without weight */
            if (k && (test.small ? (k + i + type) % 5 || i > 1 : i && (k + i + type) % 3)) continue;
            const int64_t rows = path < LK_SRMS_NORM_BLOCK && i < 2 ? 700 : i < 3 ? 62 : 9;
            problem p = drawn(type, direction, path, rows, cols[i], 350 + k, places[k % LENGTH_OF(places)]);
            const bool back = direction == BACKWARD, sum = source % 3 > 0;
            for (int t = 0; t < TENSORS; t++) p.home[t] = t, p.has[t] = false;
            p.has[X] = !(back && sum), p.has[back ? DX : Y] = true, p.has[WEIGHT] = source < 3;
            p.has[RESIDUAL_OUT] = sum, p.has[RESIDUAL] = !back && sum;
            p.has[DY] = p.has[DRESIDUAL_OUT] = back, p.has[DWEIGHT] = back && source < 3;
            p.residual_dtype = source == 2 ? LK_DTYPE_F32 : LK_DTYPE_T, p.weight_dtype = LK_DTYPE_T;
            p.dy_dtype = source == 2 && k % 2 ? LK_DTYPE_F32 : LK_DTYPE_T, p.groups = 0, p.weight_offset = 0;
            check(&p);
        }
}

/* Rows of many groups, sums of all kinds: fewer groups than a block has teams and more, odd ones, more than all teams, as many
 * as rows, more; rows that start at other offsets, and rows longer than threads hold. */
static void groups(int type, int direction, int path)
{
    const int64_t shapes[][3] = {{600, 16, 2}, {600, 9, 7}, {500, 40, 64}, {300, 37, 100}, {90, 8, 90}, {60, 33, 65},
                                 {40, test_pick(520, 133), 3}, {9, 20000, 2}, {7, 10249, 3}};
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int seed = 0; seed < 2; seed++) {
            if ((test.small || i > 6) && (i + type + path) % 3) continue;
            if (test.small && i > 6) continue;
            const int places[] = {PACKED, ODD_GAPS, GAPS};
            problem p = drawn(type, direction, path, shapes[i][0], shapes[i][1], 380 + seed, places[(i + seed) % 3]);
            p.groups = (int)shapes[i][2], p.has[WEIGHT] = true;
            if (seed == 0) p.has[direction == FORWARD ? BIAS : DBIAS] = true;
            if (direction == BACKWARD && !p.has[DBIAS]) p.has[DWEIGHT] = true;
            check(&p);
        }
}

/* As many rows of at most 32 vectors as keep all SMs busy: a thread has several. Some lanes of a team have no vector, some teams of
 * the last block no row; a block has all groups several times, or some of them. */
static void short_rows(int type, int direction, int path)
{
    const int shapes[][2] = {{8, 1}, {5, 3}, {16, 32}, {32, 1}, {2, 64}, {1, 4}, {12, 5}, {32, 7}}; /* vectors, groups */
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int k = 0; k < 5; k++) { /* 4: with dbias, which the kernel for short rows does not have */
            if (path > LK_SRMS_NORM_WARP || (test.small && (i + k + type) % 3)) continue;
            const int vec = type == LK_DTYPE_F32 ? 4 : 8, vecs = shapes[i][0];
            int teams = 128;
            while (128 / teams < vecs) teams /= 2;
            /* 3: more rows than the blocks of backward, which stay, have at a time. */
            const int64_t rows = (int64_t)(3 * test.sms + 2) * teams * (k == 3 ? 12 : 4) - 3;
            problem p = drawn(type, direction, path, rows, vecs * vec, 390 + k, k == 1 ? GAPS : PACKED);
            const bool back = direction == BACKWARD;
            for (int t = 0; t < TENSORS; t++) p.home[t] = t, p.has[t] = false;
            p.has[X] = p.has[back ? DX : Y] = true, p.has[DY] = back, p.has[RSTD] = k % 2 == 0;
            p.has[WEIGHT] = k != 3, p.has[DWEIGHT] = back && k != 2, p.has[DBIAS] = back && k == 4, p.groups = shapes[i][1];
            p.weight_dtype = back && k == 1 ? LK_DTYPE_F32 : LK_DTYPE_T, p.dy_dtype = LK_DTYPE_T;
            check(&p);
        }
    if (direction == BACKWARD && path <= LK_SRMS_NORM_WARP) { /* enough rows for the kernel, but not for all groups in its blocks */
        problem p = drawn(type, direction, path, 32 * test.sms, 32 * 16 / test_type_bytes[type], 396, PACKED);
        for (int t = 0; t < TENSORS; t++) p.home[t] = t, p.has[t] = t == X || t == DY || t == DX || t == WEIGHT || t == DWEIGHT;
        p.groups = 5 * test.sms + 1, p.weight_dtype = p.dy_dtype = LK_DTYPE_T;
        check(&p);
    }
}

static void long_rows(int type, int direction, int path)
{
    const int64_t cols[] = {test_pick(5001, 3001), 32771, 70000, 300001};
    for (int i = 0; i < test_pick(LENGTH_OF(cols), 1); i++)
        for (int place = 0; place < test_pick(3 - (i + 1) / 2, 1); place++) {
            if (i > 1 && (type + path + i) % 3) continue; /* each of the longest on some paths */
            const int chosen = (2 * place + i + type + path) % PLACES;
            problem p = drawn(type, direction, path, i > 1 ? 1 : 2, cols[i], 400 + place, chosen);
            if (place == 0 && direction == FORWARD) p.has[RSTD] = true;
            if (i == 3 && direction == BACKWARD && path == LK_SRMS_NORM_CLUSTER) p.has[DWEIGHT] = true;
            check(&p);
        }
    if (direction == BACKWARD && path == LK_SRMS_NORM_BLOCK) { /* a little longer than a block's threads hold, all in vectors */
        problem p = drawn(type, direction, path, 1, 20000, 460, PACKED);
        for (int t = 0; t < TENSORS; t++) p.has[t] = t == X || t == DY || t == DX, p.home[t] = t;
        check(&p);
    }
    if (direction == BACKWARD && path == LK_SRMS_NORM_BLOCK) { /* likewise, with dweight */
        problem p = drawn(type, direction, path, 2, 9000, 461, PACKED);
        for (int t = 0; t < TENSORS; t++) p.has[t] = t == X || t == DY || t == DX || t == DWEIGHT, p.home[t] = t;
        p.groups = 0;
        check(&p);
    }
    for (int i = 0; i < 2 && direction == FORWARD && path == LK_SRMS_NORM_AUTO; i++) { /* many, and with a residual */
        const int64_t rows = i ? 2 : 4 * test.sms, vecs = i ? 2051 : 8201;
        problem p = drawn(type, direction, path, rows, vecs * 16 / test_type_bytes[type], 470 + i, PACKED);
        for (int t = 0; t < TENSORS; t++) p.has[t] = t == X || t == Y || (i && t == RESIDUAL), p.home[t] = t;
        check(&p);
    }
    if (test.small) return;
    /* Equal terms: a running float sum loses the same fraction at each step. */
    problem p = drawn(type, direction, path, 1, 100001, 450, PACKED);
    p.spread = 0, p.offset = 1.2;
    if (direction == FORWARD) p.has[RSTD] = true;
    check(&p);
    if (type != TEST_BF16 || path != LK_SRMS_NORM_AUTO) return;
    p = drawn(type, direction, path, 1, 1 << 20, 451, PACKED_OFF);
    check(&p);
}

static void specials(int type, int direction, int path)
{
    const int64_t cols[] = {24, test_pick(701, 257), 4099};
    for (int special = 1; special < SPECIALS; special++)
        for (int where = 0; where < WHERES; where++)
            for (int i = 0; i < LENGTH_OF(cols); i++) {
                if (test.small && (i == 2 || i != (special + where) % 2 || (special + where + type + path) % 4)) continue;
                if (!test.small && (special + where + type + i) % 2) continue;
                const int seed = special * 100 + where;
                problem p = drawn(type, direction, path, i ? 2 : 5, cols[i], 500 + seed, (special + where + i) % PLACES);
                uint64_t random = p.seed + 1;
                draw_special(&p, &random);
                p.special = special, p.where = where;
                if (i == 2 && where < SPARSE && where != BLOCK) continue;
                check(&p);
            }
}

/* Zero rows beside others: y is 0 and dx = dy weight / sqrt(eps); NaN for eps = 0. */
static void zero_rows(int type, int direction, int path)
{
    const float eps[] = {1e-30f, 0, 1e-6f, 4};
    for (int i = 0; i < LENGTH_OF(eps); i++)
        for (int seed = 0; seed < test_pick(4, 1); seed++) {
            problem p = drawn(type, direction, path, 4, seed % 2 ? 40 : test_pick(333, 100), 700 + seed + 10 * i, seed % 2);
            p.eps = eps[i], p.special = ZERO, p.where = ALL, p.victim = X;
            if (direction == FORWARD) p.has[Y] = p.has[RSTD] = true;
            else p.has[DX] = true;
            check(&p);
        }
}

static void offsets(int type, int direction, int path)
{
    for (int seed = 0; seed < test_pick(12, 1); seed++) {
        problem p = drawn(type, direction, path, 3, seed % 2 ? 300 : 65, 800 + seed, seed % PLACES);
        p.offset = seed % 3 ? 1e4 : -1e4;
        if (seed % 4 == 1) p.spread = 0;
        check(&p);
    }
}

/* Each pair of tensors that may share memory, at lengths of one pass and of several. */
static void in_place(int type, int direction, int path)
{
    const int64_t cols[] = {9, 300, 5001, 33000};
    for (int i = 0; i < test_pick(LENGTH_OF(cols), 2); i++)
        for (int pair = 0; pair < 4; pair++) {
            if (i > 1 && (pair + type + path + i) % 4) continue;
            problem p = drawn(type, direction, path, i < 2 ? 3 : 2, cols[i], 900 + pair, (pair + i) % PLACES);
            for (int t = 0; t < TENSORS; t++) p.home[t] = t;
            if (pair == 3 || direction == FORWARD) p.residual_dtype = pair % 2 ? LK_DTYPE_T : LK_DTYPE_F32;
            if (direction == FORWARD) {
                p.has[Y] = p.has[RESIDUAL_OUT] = true, p.has[RESIDUAL] = pair > 0;
                if (pair != 1) p.home[Y] = X;
                if (pair > 0) p.home[RESIDUAL_OUT] = RESIDUAL;
            } else {
                p.has[DX] = p.has[DY] = p.has[DRESIDUAL_OUT] = true, p.has[DRESIDUAL] = pair != 0;
                if (pair == 0 || pair == 2) p.home[DX] = DY, p.dy_dtype = LK_DTYPE_T;
                if (pair == 1 || pair == 2) p.home[DRESIDUAL] = DRESIDUAL_OUT;
                if (pair == 3) p.home[DX] = DRESIDUAL_OUT;
            }
            check(&p);
        }
}

static void graphs(int type, int direction, int path)
{
    problem p = drawn(type, direction, path, 5, test_pick(700, 140), 1000, PACKED);
    if (direction == BACKWARD) p.has[DWEIGHT] = true;
    check(&p); /* leaves its bits in kept */
    test_graph(op, &p);
}

static void all_themes(void)
{
    static const test_theme themes[] = {{"empty", empty},         {"lengths", lengths},     {"options", options},
                                   {"places", places},       {"many rows", many_rows}, {"odd rows", odd_rows},
                                   {"groups", groups},
                                   {"short rows", short_rows}, {"long rows", long_rows}, {"special values", specials},
                                   {"zero rows", zero_rows}, {"around 1e4", offsets},  {"in place", in_place},
                                   {"graph", graphs}};
    for (int at = 0; at < 2 * PATHS; at++) {
        const int direction = at / PATHS, path = at % PATHS;
        if (!path_here(path)) {
            test_skip("cluster", "the device has no clusters");
            continue;
        }
        test_themes(themes, LENGTH_OF(themes), direction, path, direction_name[direction], path_name[path]);
    }
}

/* ---- Forward, then backward from its results; differences ------------------------------------------------------------ */

static void sequence(int type)
{
    for (int i = 0; i < 4; i++) {
        problem f = plain(type, FORWARD, LK_SRMS_NORM_AUTO, 7, i % 2 ? 1200 : 77);
        f.residual_dtype = f.weight_dtype = i < 2 ? LK_DTYPE_F32 : LK_DTYPE_T, f.eps = 1e-5f;
        f.groups = i > 1 ? 3 : 0, f.weight_offset = i > 1 ? 1.0f : 0.0f, f.has[BIAS] = i % 2;
        problem b = f;
        f.has[RESIDUAL] = f.has[RESIDUAL_OUT] = f.has[RSTD] = f.has[WEIGHT] = true;
        b.direction = BACKWARD, b.has[X] = b.has[Y] = b.has[BIAS] = false, b.has[DBIAS] = i % 2;
        b.has[RESIDUAL_OUT] = b.has[RSTD] = b.has[WEIGHT] = b.has[DY] = b.has[DRESIDUAL_OUT] = true;
        b.has[DX] = b.has[DRESIDUAL] = b.has[DWEIGHT] = true;
        setup(&f, 0);
        const lk_srms_norm_args first = forward;
        collect(&f);  /* which lets go of the buffers that both have */
        setup(&b, 0); /* its residual_out and rstd are about to be overwritten */
        forward = first;
        if (i % 2) { /* one struct for both calls */
            backward.x = first.x, backward.residual = first.residual, backward.y = first.y, backward.eps = first.eps;
            backward.bias = first.bias;
            backward.x_stride = first.x_stride, backward.residual_stride = first.residual_stride;
            backward.y_stride = first.y_stride, forward = backward;
        }
        /* No wait between the two: with programmatic launch the second may start early, and must still see the first's. */
        const lk_status status = launch(&f);
        const bool ran = launched(&b, status ? status : launch(&b));
        collect(&f), collect(&b);
        if (!ran) return;
        verify_forward(&f);
        memcpy(buffers[RESIDUAL_OUT].host, buffers[RESIDUAL_OUT].back, buffers[RESIDUAL_OUT].total);
        memcpy(buffers[RSTD].host, buffers[RSTD].back, buffers[RSTD].total);
        verify_backward(&b);
    }
}

/* sum over the row of dy y + dresidual_out s, by the formula. */
static double loss_of_row(const problem *p, int64_t row, int64_t changed, double x_step, double weight_step)
{
    double squares = 0, loss = 0;
    for (int64_t c = 0; c < p->cols; c++) {
        const double s = (double)load_s(p, row, c) + (c == changed ? x_step : 0);
        squares += s * s;
    }
    for (int64_t c = 0; c < p->cols; c++) {
        const double s = (double)load_s(p, row, c) + (c == changed ? x_step : 0),
                     w = factor(p, row, c) + (c == changed ? weight_step : 0);
        loss += (double)value(DY, row, c) * s / sqrt(squares / (double)p->cols + (double)p->eps) * w +
                (double)value(DRESIDUAL_OUT, row, c) * s;
    }
    return loss;
}

/* dx and dweight against central differences, whose own error is about 1e-9 with this step. */
static void differences(void)
{
    problem p = plain(TEST_F32, BACKWARD, LK_SRMS_NORM_AUTO, 3, 7);
    p.has[RESIDUAL] = p.has[WEIGHT] = p.has[DY] = p.has[DRESIDUAL_OUT] = p.has[DWEIGHT] = true;
    p.eps = 0.3f;
    check(&p);
    const double step = 1e-5, limit = 1e-7 + 64 * 0x1p-24; /* float results of up to about 4 in size */
    for (int64_t c = 0; c < p.cols; c++) {
        double dweight = 0;
        for (int64_t row = 0; row < p.rows; row++) {
            const double dx = (loss_of_row(&p, row, c, step, 0) - loss_of_row(&p, row, c, -step, 0)) / (2 * step);
            dweight += (loss_of_row(&p, row, c, 0, step) - loss_of_row(&p, row, c, 0, -step)) / (2 * step);
            const double got = (double)((const float *)kept[DX])[row * p.cols + c];
            if (!test_within(fabs(got - dx), limit))
                test_detail("dx[row %lld, col %lld] is %.9g, the quotient %.9g", (long long)row, (long long)c, got, dx);
        }
        const double got = (double)((const float *)kept[DWEIGHT])[c];
        if (!test_within(fabs(got - dweight), limit))
            test_detail("dweight[%lld] is %.9g, the difference quotient %.9g", (long long)c, got, dweight);
    }
}

/* Few rows of whole vectors, which have kernels of their own: up to the longest that these take, and one vector more. Rows of
 * four vectors a lane by the kernels for many, which hold a weight as well. */
static void few_rows(int type, int direction)
{
    const int vec = 16 / test_type_bytes[type], vecs[] = {1, 31, 33, 64, 65, 1000, 1024, 1025};
    const int places[] = {PACKED, GAPS, OWN_GAPS};
    for (int i = 0; i < LENGTH_OF(vecs); i++)
        for (int seed = 0; seed < test_pick(12, 6); seed++) {
            if (test.small && i > 4 && seed != 2) continue; /* that one has all that these kernels ask for */
            const int64_t rows = seed % 4 ? 1 + seed % 2 : test_pick(9, 3);
            problem p = drawn(type, direction, LK_SRMS_NORM_AUTO, rows, vecs[i] * vec, 1000 + seed,
                              places[seed % LENGTH_OF(places)]);
            for (int t = 0; t < TENSORS; t++) p.at[t] = t == WEIGHT && seed % 6 == 0 ? 3 : 0;
            p.weight_dtype = seed % 6 == 1 ? seed % 12 == 1 ? LK_DTYPE_F32 : LK_DTYPE_F16 : LK_DTYPE_T;
            if (seed % 6 == 0) p.has[WEIGHT] = true;
            if (direction == BACKWARD && seed % 6 != 5) p.has[DWEIGHT] = false;
            if (direction == BACKWARD && !p.has[DRESIDUAL] && !p.has[DWEIGHT]) p.has[DX] = true;
            check(&p);
        }
    /* The plain call, and each option alone beside it; then without what the plain call writes. */
    static const int forward_options[] = {X, RESIDUAL, RESIDUAL_OUT, WEIGHT, RSTD};
    static const int backward_options[] = {X, RESIDUAL, DY, WEIGHT, RSTD, DRESIDUAL_OUT, DRESIDUAL};
    const int *const options = direction == FORWARD ? forward_options : backward_options;
    const int count = direction == FORWARD ? LENGTH_OF(forward_options) : LENGTH_OF(backward_options);
    for (int i = 0; i < 2 * count; i++) {
        problem p = plain(type, direction, LK_SRMS_NORM_AUTO, 3, (i % 2 ? 70 : 64) * vec);
        p.has[DY] = direction == BACKWARD && options[i / 2] != DY;
        p.has[options[i / 2]] = options[i / 2] != DY;
        check(&p);
        p.has[direction == FORWARD ? Y : DX] = false;
        p.has[direction == FORWARD ? (i % 2 ? RSTD : RESIDUAL_OUT) : DRESIDUAL] = true;
        check(&p);
    }
    /* Rows that start on 16 bytes and do not end there. */
    for (int more = 1; more < vec; more++) {
        problem p = plain(type, direction, LK_SRMS_NORM_AUTO, 3, 64 * vec + more);
        for (int i = 0; i < TENSORS; i++) p.stride[i] = 66 * vec;
        p.has[WEIGHT] = more % 2;
        check(&p);
    }
    for (int i = 0; i < 2; i++) {
        problem p = plain(type, direction, LK_SRMS_NORM_WARP, 3, 100 * vec);
        p.has[WEIGHT] = true, p.has[RESIDUAL] = i;
        check(&p);
    }
}

/* Rows of f32 that start on 16 bytes beside rows of T are read and written 16 bytes at a time, whatever comes first. */
static void boundaries(void)
{
    for (int i = 0; i < 32; i++) {
        lk_srms_norm_args given = {}, a;
        given.rows = 5, given.cols = 1000, given.residual_dtype = LK_DTYPE_F32; /* rows of 1004 floats, 1000 or 1004 bf16 */
        given.residual_out = (void *)(uintptr_t)(4096 + 4 * i), given.residual_out_stride = 1004;
        given.dy = given.dx = (void *)(uintptr_t)65536;
        given.dy_stride = i % 3 ? 1000 : 1004; /* and that of dx */
        given.dresidual = (void *)(uintptr_t)(131072 + 16 * (i % 3));
        lk_device device = {};
        lk_srms_norm_layout l = {};
        const lk_status status = lk_srms_norm_check<lk_bf16>("op", &given, LK_BACKWARD, &device, &a);
        if (!status) l = lk_srms_norm_backward_lay_out<lk_bf16>(&device, &a);
        if (!test_that(!status && l.call.in.aligned == (i % 4 == 0)))
            test_detail("residual_out %d bytes off: %s, aligned %d", 4 * i % 128, lk_status_string(status), l.call.in.aligned);
    }
    for (int i = 0; i < 8; i++) { /* beside dy of f32, a thread holds weight where all of it that is read begins on 16 bytes */
        lk_srms_norm_args given = {}, a;
        given.rows = 6, given.cols = i & 1 ? 1001 : 1000, given.groups = i & 2 ? 3 : 1, given.dy_dtype = LK_DTYPE_F32;
        given.x = (void *)(uintptr_t)65536, given.dy = (void *)(uintptr_t)131072, given.dx = (void *)(uintptr_t)262144;
        given.x_stride = given.dy_stride = given.dx_stride = 1008;
        given.weight = (void *)(uintptr_t)(4096 + (i & 4 ? 2 : 0));
        const bool rereads = i & 4 || (i & 3) == 3;
        lk_device device = {};
        lk_srms_norm_layout l = {};
        const lk_status status = lk_srms_norm_check<lk_bf16>("op", &given, LK_BACKWARD, &device, &a);
        if (!status) l = lk_srms_norm_backward_lay_out<lk_bf16>(&device, &a);
        if (!test_that(!status && l.reread == rereads))
            test_detail("case %d of weight beside dy of f32: %s, reread %d", i, lk_status_string(status), l.reread);
    }
}

/* What the header says of sums of squares that overflow, vanish or are 0, a row of each kind. The numbers need floats: beside T
 * a residual of f32 brings them (as == 1), else x. */
enum { ZEROS, TINY, SMALL, BIG, TOO_BIG, NO_DOT, ONE_INF, USUAL, KINDS };
static const char *const kind_name[] = {"zeros", "tiny", "small", "big", "too big", "too big, as sum g s", "one inf", "usual"};

static float limit_value(int kind, int64_t c, int64_t cols)
{
    const float step = (float)(1 + c % 3);
    switch (kind) {
    case ZEROS: return 0;
    case TINY: return c % 4 ? 0x1p-80f : 0;
    case SMALL: return step * 0x1p-46f; /* a mean square above 2^-92 */
    case BIG: return (c % 2 ? -1 : 1) * step * ldexpf(1, 60 - ilogb((double)cols) / 2);
    case TOO_BIG: return 0x1p64f;
    case NO_DOT: return 0x1p120f;
    case ONE_INF: return c == 1 ? -INFINITY : step;
    }
    return step;
}

static void limits(int type, int path)
{
    const int64_t lengths[] = {40, 333, 2048, 5000};
    for (int i = 0; i < 4 * 2 * 2 * 2; i++) {
        const int64_t cols = lengths[i % 4];
        const bool as = i / 4 % 2, weighed = i / 8 % 2, with_eps = i / 16;
        if ((type == TEST_F16 && !as) || (test.small && i % 4 == 3)) continue;
        const int64_t n = KINDS * cols;
        const float eps = with_eps ? 0x1p-20f : 0, weight = weighed ? 1.5f : 1, given = 0.5f; /* given: dresidual_out */
        for (int t = 0; t < TENSORS; t++)
            test_buffer_size(&buffers[t], (size_t)n * 4, 0, 0x5a);
        for (int64_t k = 0; k < n; k++) {
            const int kind = (int)(k / cols);
            const float s = limit_value(kind, k % cols, cols);
            test_put(type, test_buffer_host(&buffers[X]), k, as ? 0 : s);
            ((float *)test_buffer_host(&buffers[RESIDUAL]))[k] = s;
            test_put(type, test_buffer_host(&buffers[DY]), k, kind == NO_DOT ? 1024.0f : 2.0f);
            if (as) ((float *)test_buffer_host(&buffers[DRESIDUAL_OUT]))[k] = given;
            else test_put(type, test_buffer_host(&buffers[DRESIDUAL_OUT]), k, given);
            test_put(type, test_buffer_host(&buffers[WEIGHT]), k % cols, weight);
        }
        for (int t = 0; t < TENSORS; t++) test_buffer_upload(&buffers[t]);
        forward = {}, backward = {};
        forward.x = test_buffer_device(&buffers[X]), forward.y = test_buffer_device(&buffers[Y]);
        forward.residual = as ? test_buffer_device(&buffers[RESIDUAL]) : NULL;
        forward.rstd = (float *)test_buffer_device(&buffers[RSTD]);
        forward.weight = backward.weight = weighed ? test_buffer_device(&buffers[WEIGHT]) : NULL;
        forward.residual_dtype = backward.residual_dtype = as ? LK_DTYPE_F32 : LK_DTYPE_T;
        forward.rows = backward.rows = KINDS, forward.cols = backward.cols = cols;
        forward.eps = backward.eps = eps, forward.path = backward.path = path;
        backward.x = as ? NULL : forward.x, backward.residual_out = as ? test_buffer_device(&buffers[RESIDUAL]) : NULL;
        backward.dy = test_buffer_device(&buffers[DY]), backward.dx = test_buffer_device(&buffers[DX]);
        backward.dresidual_out = test_buffer_device(&buffers[DRESIDUAL_OUT]);
        backward.rstd = i % 3 ? forward.rstd : NULL;
        backward.dweight = weighed ? test_buffer_device(&buffers[DWEIGHT]) : NULL;
        lk_status status = call_of[FORWARD][type](&forward, test.stream);
        if (!status) status = query_of[BACKWARD][type](&backward, &backward.workspace_bytes);
        test_buffer_size(&buffers[WORKSPACE], backward.workspace_bytes, 0, 0x5a), test_buffer_upload(&buffers[WORKSPACE]);
        backward.workspace = test_buffer_device(&buffers[WORKSPACE]);
        if (!status) status = call_of[BACKWARD][type](&backward, test.stream);
        TEST_CUDA(cudaStreamSynchronize(test.stream));
        for (int t = 0; t <= TENSORS; t++) test_buffer_download(&buffers[t]);
        if (!test_that(status == LK_OK)) test_detail("%s: %s", lk_status_string(status), lk_last_error());

        for (int kind = 0; kind < KINDS; kind++) {
            const bool vanishes = (kind == ZEROS || kind == TINY) && !with_eps;
            const bool overflows = kind == TOO_BIG || kind == NO_DOT || kind == ONE_INF;
            double sum = 0, dot = 0, size = 0;
            for (int64_t c = 0; c < cols; c++) {
                const double s = (double)limit_value(kind, c, cols), g = 2 * (double)weight;
                sum += s * s, dot += s * g, size += fabs(s * g);
            }
            const double rstd = vanishes ? INFINITY : overflows ? 0 : 1 / sqrt(sum / (double)cols + (double)eps);
            const float got_rstd = ((const float *)test_buffer_back(&buffers[RSTD]))[kind];
            bool good = test_near(TEST_F32, got_rstd, rstd, isfinite(rstd) ? 8 * 0x1p-24 * rstd : 0);
            double got_y = 0, got_dx = 0;
            int64_t c = 0;
            for (; c < cols && good; c++) {
                const double s = (double)limit_value(kind, c, cols), g = 2 * (double)weight, more = (double)given;
                double y = s * rstd * (double)weight, dx = more;
                if (overflows) y = isinf(s) ? NAN : 0;
                if (kind == NO_DOT || kind == ONE_INF) dx = NAN;
                double dx_size = 0;
                if (!overflows) {
                    const double slope = dot * rstd / (double)cols * rstd;
                    dx = rstd * (g - s * slope) + more;
                    dx_size = rstd * (g + fabs(s) * size * rstd / (double)cols * rstd) + more;
                }
                got_y = (double)test_get(type, test_buffer_back(&buffers[Y]), kind * cols + c);
                got_dx = (double)test_get(type, test_buffer_back(&buffers[DX]), kind * cols + c);
                good = test_near(type, (float)got_y, y, isfinite(y) ? 10 * 0x1p-24 * fabs(y) + 0x1p-126 : 0);
                if (vanishes) good = test_that(!isfinite(got_dx)) && good;
                else good = test_near(type, (float)got_dx, dx, isfinite(dx) ? 16 * 0x1p-24 * dx_size + 0x1p-126 : 0) && good;
            }
            if (!good)
                test_detail("%s, %lld columns, col %lld, eps %g, residual %d, weight %d: rstd %.9g (%.9g), y %.9g, dx %.9g",
                            kind_name[kind], (long long)cols, (long long)c - 1, (double)eps, as, weighed, (double)got_rstd,
                            rstd, got_y, got_dx);
        }
        for (int64_t c = 0; c < cols && weighed; c++) { /* a row of zeros: all of dweight is NaN. An infinity: that column is */
            const float got = test_get(type, test_buffer_back(&buffers[DWEIGHT]), c);
            if (!test_that((got != got) == (!with_eps || c == 1)))
                test_detail("dweight[%lld] is %.9g, eps %g", (long long)c, (double)got, (double)eps);
        }
    }
}

/* Sizes alone are enough for a query. What it then says is enough for any tensors of these sizes. */
static void queries(int type)
{
    static const int64_t rows[] = {3, 70, 3000, 100000}, cols[] = {5, 16, 64, 777, 1024, 4096, 40000};
    for (int i = 0; i < LENGTH_OF(rows); i++)
        for (int j = 0; j < LENGTH_OF(cols); j++)
            for (int k = 0; k < 2 * 2 * 2 * 4 * 3 * 3; k++) { /* from 144 on, rows of x start at another offset each */
                const int path = k % 4, source = k / 4 % 3, shift = k / 12 % 3;
                if (!path_here(path)) continue;
                lk_srms_norm_args f = {};
                f.rows = rows[i], f.cols = cols[j];
                size_t most = 12345, needed = 0, none = 12345;
                lk_status status = query_of[FORWARD][type](&f, &most);
                if (!test_that(status == LK_OK && most == 0)) test_detail("forward: %s", lk_last_error());
                lk_srms_norm_args a = {};
                a.rows = rows[i], a.cols = cols[j], a.path = path, a.residual_dtype = k / 36 % 2 ? LK_DTYPE_F32 : LK_DTYPE_T;
                a.x_stride = k < 144 ? 0 : cols[j] + 1;
                const bool wide = k / 18 % 2; /* dy is f32 */
                a.dy_dtype = wide ? LK_DTYPE_F32 : LK_DTYPE_T;
                a.dy_stride = k % 3 ? 0 : a.x_stride; /* then dx is dy where there is one of its type */
                status = query_of[BACKWARD][type](&a, &none);
                if (!test_that(status == LK_OK && none == 0))
                    test_detail("without dweight: %s, %zu bytes", lk_last_error(), none);
                a.dweight = (void *)4096, a.groups = k % 7 == 0 ? 3 : 0, a.dbias = k % 7 < 2 ? (void *)2048 : NULL;
                status = query_of[BACKWARD][type](&a, &most);
                /* Each pointer with an offset of its own, an element's multiple. */
                const size_t t = shift ? (size_t)test_type_bytes[type] : 0, r = k / 36 % 2 && shift ? 4 : t;
                a.x = source < 2 ? (void *)(4096 + t) : NULL, a.residual = source == 1 ? (void *)(8192 + r) : NULL;
                a.residual_out = source == 2 ? (void *)(8192 + r) : NULL, a.dx = (void *)(12288 + (shift == 2 ? 0 : t));
                a.dy = k / 72 % 2 ? (void *)(16384 + (wide && shift ? 4 : t)) : NULL;
                a.dresidual_out = k % 5 ? NULL : (void *)(20480 + r);
                if (k % 3 == 0 && a.dy && (!wide || !type)) a.dx = (void *)a.dy;
                const lk_status exact = query_of[BACKWARD][type](&a, &needed);
                if (!test_that(status == LK_OK && exact == LK_OK && needed > 0 && needed <= most))
                    test_detail("%lld rows of %lld, path %s, source %d, shift %d: %s, %zu bytes, at most %zu",
                                (long long)rows[i], (long long)cols[j], path_name[path], source, shift, lk_last_error(), needed,
                                most);
            }
}

/* Without the switch few rows have a kernel of their own, many short rows too, and rows that are resident together more vectors for
 * a thread. */
static void invariant(int type)
{
    static test_buffer in[3], out[3];
    static const int64_t lengths[] = {64, 256, 1000, 4096, 20000};
    enum { KINDS = 4 }; /* bare; weight; residual, weight of groups; bias and a residual of f32 */
    for (int i = 0; i < KINDS * LENGTH_OF(lengths); i++) {
        if (test.small && i % 3 != type) continue;
        const int kind = i % KINDS, bytes = test_type_bytes[type], residual = kind == 3 ? TEST_F32 : type;
        const int64_t cols = lengths[i / KINDS], groups = kind == 2 ? 2 : 1, rows = (cols > 1000 ? 6 : cols > 64 ? 36 : 72) * test.sms;
        lk_srms_norm_args a = {};
        char what[99];
        a.rows = rows, a.cols = cols, a.groups = groups, a.eps = 1e-6f, a.batch_invariant = 1 + i % 2;
        a.residual_dtype = kind == 3 ? LK_DTYPE_F32 : LK_DTYPE_T;
        a.x = test_invariant_input(&in[0], type, rows * cols, 1);
        if (kind > 1) a.residual = test_invariant_input(&in[1], residual, rows * cols, 2);
        if (kind) a.weight = test_invariant_input(&in[2], type, groups * cols, 3);
        if (kind == 3) a.bias = a.weight;
        const size_t of_row[] = {(size_t)(cols * bytes), 4, (size_t)(cols * test_type_bytes[residual])};
        test_rows tensors[5] = {{(void **)&a.x, of_row[0], NULL}};
        int count = 1;
        if (kind > 1) tensors[count++] = {(void **)&a.residual, of_row[2], NULL};
        void **const field[] = {&a.y, (void **)&a.rstd, &a.residual_out};
        for (int k = 0; k < (kind > 1 ? 3 : 2); k++) {
            test_buffer_size(&out[k], (size_t)rows * of_row[k], 0, 0x5a);
            *field[k] = test_buffer_device(&out[k]), tensors[count++] = {field[k], of_row[k], &out[k]};
        }
        snprintf(what, sizeof what, "%s, kind %d, %lld columns", test_type_name[type], kind, (long long)cols);
        test_invariant(tensors, count, &a.rows, groups, what, [&] { return call_of[FORWARD][type](&a, test.stream); });
    }
}

/* With round_sum y and rstd have the bits of a norm of residual_out, for rows of up to 32 KiB with a weight of T. */
static void recomputed(int type)
{
    static test_buffer in[3], sum, out[4];
    static const int64_t lengths[] = {64, 256, 768, 1000, 2048, 4096, 5120, 8192, 12288, 16384};
    const int bytes = test_type_bytes[type];
    for (int i = 0; i < 3 * LENGTH_OF(lengths); i++) {
        const int64_t cols = lengths[i / 3], many = (cols > 4096 ? 3 : cols > 64 ? 36 : 72) * test.sms;
        const int64_t rows = i % 3 == 0 ? 3 : i % 3 == 1 ? test.sms : many;
        if (cols * bytes > 32768 || (test.small && (i + type) % 4)) continue;
        lk_srms_norm_args a = {};
        a.rows = rows, a.cols = cols, a.eps = 1e-6f, a.round_sum = 1;
        a.x = test_invariant_input(&in[0], type, rows * cols, 1), a.residual = test_invariant_input(&in[1], type, rows * cols, 2);
        a.weight = test_invariant_input(&in[2], type, cols, 3);
        for (int k = 0; k < 4; k++) test_buffer_size(&out[k], (size_t)rows * (k % 2 ? 4 : (size_t)(cols * bytes)), 0, 0x5a);
        test_buffer_size(&sum, (size_t)(rows * cols * bytes), 0, 0x5a);
        a.y = test_buffer_device(&out[0]), a.rstd = (float *)test_buffer_device(&out[1]), a.residual_out = test_buffer_device(&sum);
        lk_status status = call_of[FORWARD][type](&a, test.stream);
        a.x = a.residual_out, a.residual = NULL, a.residual_out = NULL, a.round_sum = 0;
        a.y = test_buffer_device(&out[2]), a.rstd = (float *)test_buffer_device(&out[3]);
        if (!status) status = call_of[FORWARD][type](&a, test.stream);
        for (int k = 0; k < 4; k++) test_buffer_download(&out[k]);
        bool same = status == LK_OK;
        for (int k = 0; k < 2; k++)
            same = same && memcmp(test_buffer_back(&out[k]), test_buffer_back(&out[k + 2]), out[k].bytes) == 0;
        if (!test_that(same))
            test_detail("%s, %lld x %lld: %s, or other bits", test_type_name[type], (long long)rows, (long long)cols,
                        lk_status_string(status));
    }
}

static void all_sequences(void)
{
    test_of_types("batch_invariant", invariant);
    test_of_types("computed again", recomputed);
    for (int type = 0; type < TEST_TYPES; type++)
        for (int path = 0; path < PATHS; path++)
            if (path_here(path) && test_begin("%s %s: limits of squares", test_type_name[type], path_name[path]))
                limits(type, path), test_finish();
    for (int type = 0; type < TEST_TYPES; type++)
        if (test_begin("%s: queries without tensors", test_type_name[type])) queries(type), test_finish();
    for (int at = 0; at < 2 * TEST_TYPES; at++) {
        const int direction = at / TEST_TYPES, type = at % TEST_TYPES;
        if (test_begin("%s %s auto: few rows", direction_name[direction], test_type_name[type]))
            few_rows(type, direction), test_finish();
    }
    for (int type = 0; type < TEST_TYPES; type++)
        if (test_begin("forward, then backward %s", test_type_name[type])) sequence(type), test_finish();
    if (test_begin("backward f32 auto: central differences")) differences(), test_finish();
    if (test_begin("backward bf16 auto: f32 on 16 bytes")) boundaries(), test_finish();
}

/* ---- Errors ---------------------------------------------------------------------------------------------------------- */

/* The calls that errors are told from: every tensor given, 4 rows of 8. */
static void good_calls(int type)
{
    void *at[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        test_buffer_size(&buffers[t], 512, 0, 0x3c), test_buffer_upload(&buffers[t]);
        at[t] = test_buffer_device(&buffers[t]);
    }
    forward = {}, backward = {};
    forward.x = at[X], forward.residual = at[RESIDUAL], forward.weight = at[WEIGHT], forward.y = at[Y];
    forward.residual_out = at[RESIDUAL_OUT], forward.rstd = (float *)at[RSTD], forward.rows = 4, forward.cols = 8;
    forward.bias = at[BIAS], backward.dbias = at[DBIAS];
    backward.x = at[X], backward.residual = at[RESIDUAL], backward.rstd = (float *)at[RSTD], backward.weight = at[WEIGHT];
    backward.dy = at[DY], backward.dresidual_out = at[DRESIDUAL_OUT], backward.dx = at[DX], backward.dresidual = at[DRESIDUAL];
    backward.dweight = at[DWEIGHT], backward.rows = 4, backward.cols = 8;
    if (!test_that(query_of[BACKWARD][type](&backward, &backward.workspace_bytes) == LK_OK && backward.workspace_bytes > 0))
        test_detail("the query of 4 rows of 8 says %zu bytes, %s", backward.workspace_bytes, lk_last_error());
    test_buffer_size(&buffers[WORKSPACE], backward.workspace_bytes + 256, 0, 0x3c); /* room to move it */
    test_buffer_upload(&buffers[WORKSPACE]);
    backward.workspace = test_buffer_device(&buffers[WORKSPACE]);
}

/* What the query of the next call must say; it looks at no pointer. */
enum { LIKE_THE_CALL = 1 };
static lk_status queried = LIKE_THE_CALL;

/* `forward` or `backward` as it now is must fail with `want` and name `field`; the query too, whatever the pointers. */
static void expect_error(int type, int direction, lk_status want, const char *field)
{
    problem p = plain(type, direction, LK_SRMS_NORM_AUTO, 4, 8);
    const lk_status status = launch(&p);
    const char *const said = test_expect(status, want, field, "lk_srms_norm", direction_name[direction], type);
    size_t asked = TEST_NOT_ASKED;
    const lk_status answer = query_of[direction][type](args_of(direction), &asked);
    const bool pointers = want == LK_ERR_NULL || want == LK_ERR_ALIGNMENT || want == LK_ERR_WORKSPACE;
    const bool device = strstr(said, "sm_90");
    test_expect_query(answer, queried != LIKE_THE_CALL ? queried : pointers || device ? LK_OK : want, asked, field);
    queried = LIKE_THE_CALL;
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = 0; t <= TENSORS; t++) test_expect_unwritten(status, &buffers[t], tensor_name[t], field);
}

#define BAD(status, field, ...) (good_calls(type), __VA_ARGS__, expect_error(type, direction, status, field))
#define BAD_QUERIED(status, field, query, ...) (queried = query, BAD(status, field, __VA_ARGS__))

/* Many rows with gaps, and no vector of rows: packed tensors of this size would overlap here. */
static void many_with_gaps(lk_srms_norm_args *a, int64_t rows)
{
    a->rows = rows, a->rstd = NULL;
    a->x_stride = a->residual_stride = a->residual_out_stride = a->y_stride = 9;
    a->dy_stride = a->dresidual_out_stride = a->dx_stride = a->dresidual_stride = 9;
}

static void forward_errors(int type)
{
    const int direction = FORWARD;
    const int64_t big = (int64_t)1 << 62;
    lk_srms_norm_args &a = forward;
    BAD(LK_OK, "nothing", a.path = 0);
    BAD(LK_ERR_NULL, "x", a.x = NULL);
    BAD(LK_ERR_NULL, "every output", (a.y = a.residual_out = NULL, a.rstd = NULL));
    BAD(LK_ERR_NULL, "every output", (a.y = a.residual_out = NULL, a.rstd = NULL, a.dx = (void *)16));
    BAD(LK_OK, "rstd alone", a.y = a.residual_out = NULL);
    BAD(LK_OK, "y alone", (a.residual_out = NULL, a.rstd = NULL));
    BAD(LK_OK, "residual_out alone", (a.y = NULL, a.rstd = NULL));
    BAD(LK_ERR_SHAPE, "rows", a.rows = -1);
    BAD(LK_ERR_SHAPE, "cols", a.cols = 0);
    BAD(LK_ERR_SHAPE, "cols", a.cols = -8);
    BAD(LK_ERR_SHAPE, "cols", a.cols = ((int64_t)1 << 30) + 1);
    BAD(LK_ERR_SHAPE, "cols", (a.rows = 0, a.cols = 0));
    BAD(LK_ERR_SHAPE, "2^62", a.rows = INT64_MAX);
    BAD(LK_ERR_SHAPE, "2^62", (a.rows = (int64_t)1 << 40, a.cols = (int64_t)1 << 30));
    int64_t *const strides[] = {&a.x_stride, &a.residual_stride, &a.y_stride, &a.residual_out_stride};
    const char *const names[] = {"x", "residual", "y", "residual_out"};
    for (int i = 0; i < LENGTH_OF(strides); i++) {
        BAD(LK_ERR_SHAPE, names[i], *strides[i] = 7);
        BAD(LK_ERR_SHAPE, names[i], *strides[i] = -8);
        BAD(LK_ERR_SHAPE, "2^62", *strides[i] = big);
        BAD(LK_OK, "a large stride of one row", (*strides[i] = INT64_MAX, a.rows = 1));
        BAD(LK_OK, "a small stride of one row", (*strides[i] = 3, a.rows = 1));
        BAD(LK_ERR_SHAPE, names[i], (*strides[i] = -1, a.rows = 1));
    }
    BAD_QUERIED(LK_ERR_SHAPE, "y_stride must be 0 or 8", LK_OK, (a.y = (void *)a.x, a.y_stride = 9));
    BAD_QUERIED(LK_ERR_SHAPE, "y_stride must be 0 or 9", LK_OK, (a.y = (void *)a.x, a.x_stride = 9, a.y_stride = 8));
    BAD(LK_OK, "y is x, with its gaps", (a.y = (void *)a.x, a.x_stride = 9));
    BAD(LK_OK, "y is x", (a.y = (void *)a.x, a.y_stride = a.x_stride = 9));
    BAD(LK_OK, "y is x, packed spelt out", (a.y = (void *)a.x, a.y_stride = 8));
    BAD_QUERIED(LK_ERR_SHAPE, "residual_out_stride must be 0 or 8", LK_OK,
                (a.residual_out = (void *)a.residual, a.residual_out_stride = 9));
    BAD(LK_OK, "one tensor", (a.residual_out = (void *)a.residual, a.residual_out_stride = a.residual_stride = 9));
    BAD(LK_OK, "one tensor, with its gaps", (a.residual_out = (void *)a.residual, a.residual_stride = 9));
    BAD_QUERIED(LK_ERR_SHAPE, "y and residual overlap", LK_OK, a.y = (void *)a.residual);
    BAD_QUERIED(LK_ERR_SHAPE, "residual_out and x overlap", LK_OK, a.residual_out = (void *)a.x);
    BAD_QUERIED(LK_ERR_SHAPE, "y and residual_out overlap", LK_OK, a.y = a.residual_out);
    BAD_QUERIED(LK_ERR_SHAPE, "y and x overlap", LK_OK, a.y = (char *)a.x + 32);
    BAD_QUERIED(LK_ERR_SHAPE, "weight and y overlap", LK_OK, a.weight = (char *)a.y + 32);
    BAD_QUERIED(LK_ERR_SHAPE, "bias and y overlap", LK_OK, a.bias = (char *)a.y + 32);
    BAD(LK_OK, "weight is bias", a.weight = a.bias);
    BAD_QUERIED(LK_ERR_SHAPE, "rstd and residual_out overlap", LK_OK, a.rstd = (float *)a.residual_out);
    BAD(LK_ERR_SHAPE, "groups", a.groups = -1);
    BAD(LK_ERR_SHAPE, "groups", a.groups = ((int64_t)1 << 27) + 1);
    BAD(LK_ERR_SHAPE, "groups", a.groups = INT64_MAX);
    BAD(LK_OK, "most groups", (a.groups = (int64_t)1 << 27, a.weight = a.bias = NULL));
    BAD(LK_OK, "more groups than rows", a.groups = 7);
    BAD_QUERIED(LK_ERR_SHAPE, "weight and y overlap", LK_OK,
                (a.groups = 3, a.weight = (char *)a.y - 17 * test_type_bytes[type]));
    const float offsets[] = {INFINITY, -INFINITY, NAN};
    for (int i = 0; i < LENGTH_OF(offsets); i++) BAD(LK_ERR_VALUE, "weight_offset", a.weight_offset = offsets[i]);
    BAD(LK_OK, "the largest", a.weight_offset = -FLT_MAX);
    BAD(LK_OK, "y and x in each other's gaps", (a.y = (char *)a.x + 8 * test_type_bytes[type], a.x_stride = a.y_stride = 16));
    BAD(LK_OK, "x is residual", a.x = a.residual);
    BAD(LK_OK, "what forward does not have",
        (a.dy = a.dresidual_out = (void *)1, a.dx = a.dresidual = a.dweight = a.dbias = a.workspace = a.y, a.dy_stride = -1,
         a.dx_stride = a.dresidual_stride = a.dresidual_out_stride = 3, a.dweight_dtype = a.dy_dtype = 9));
    BAD(LK_ERR_VALUE, "eps", a.eps = -1e-9f);
    BAD(LK_ERR_VALUE, "eps", a.eps = INFINITY);
    BAD(LK_ERR_VALUE, "eps", a.eps = NAN);
    int *const dtypes[] = {&a.residual_dtype, &a.weight_dtype};
    const char *const dtype_names[] = {"residual_dtype", "weight_dtype"};
    for (int i = 0; i < LENGTH_OF(dtypes); i++)
        for (int dtype = -1; dtype < 6; dtype++) {
            const bool good = dtype == LK_DTYPE_T || dtype == LK_DTYPE_F32 || dtype == type + 1 ||
                              (i > 0 && dtype >= 0 && dtype <= LK_DTYPE_BF16);
            BAD(good ? LK_OK : LK_ERR_VALUE, dtype_names[i], *dtypes[i] = dtype);
        }
    BAD(LK_ERR_VALUE, "path", a.path = -1);
    BAD(LK_ERR_VALUE, "path", a.path = LK_SRMS_NORM_CLUSTER + 1);
    BAD(LK_ERR_PATH, "path", (a.path = LK_SRMS_NORM_BLOCK, many_with_gaps(&a, ((int64_t)1 << 27) + 1)));
    BAD(LK_ERR_PATH, "path", (a.path = LK_SRMS_NORM_CLUSTER, many_with_gaps(&a, ((int64_t)1 << 27) + 1)));
    BAD(LK_ERR_PATH, "batch_invariant takes 2^27 rows", (a.batch_invariant = 1, many_with_gaps(&a, ((int64_t)1 << 27) + 1)));
    if (!test_clusters()) BAD(LK_ERR_PATH, "path", a.path = LK_SRMS_NORM_CLUSTER);
    BAD(LK_ERR_ALIGNMENT, "x", MOVED(a.x, 1));
    BAD(LK_ERR_ALIGNMENT, "residual", MOVED(a.residual, 1));
    BAD(LK_ERR_ALIGNMENT, "residual", (MOVED(a.residual, 2), a.residual_dtype = LK_DTYPE_F32));
    BAD(LK_ERR_ALIGNMENT, "weight", MOVED(a.weight, 1));
    BAD(LK_ERR_ALIGNMENT, "bias", MOVED(a.bias, 1));
    BAD(LK_ERR_ALIGNMENT, "weight", (MOVED(a.weight, 2), a.weight_dtype = LK_DTYPE_F32));
    BAD(LK_ERR_ALIGNMENT, "y", MOVED(a.y, 1));
    BAD(LK_ERR_ALIGNMENT, "residual_out", MOVED(a.residual_out, 1));
    BAD(LK_ERR_ALIGNMENT, "residual_out", (MOVED(a.residual_out, 2), a.residual_dtype = LK_DTYPE_F32));
    BAD(LK_ERR_ALIGNMENT, "rstd", MOVED(a.rstd, 2));
    /* Two rules broken at once: the earlier one speaks. */
    BAD_QUERIED(LK_ERR_NULL, "x", LK_ERR_SHAPE, (a.x = NULL, a.rows = -1));
    BAD_QUERIED(LK_ERR_NULL, "x", LK_ERR_VALUE, (a.x = NULL, a.eps = NAN));
    BAD(LK_ERR_SHAPE, "cols", (a.cols = 0, a.eps = NAN));
    BAD(LK_ERR_SHAPE, "x", (a.x_stride = 3, a.path = 9));
    BAD_QUERIED(LK_ERR_SHAPE, "y", LK_ERR_VALUE, (a.y = (void *)a.x, a.y_stride = 9, a.eps = -1));
    BAD(LK_ERR_VALUE, "eps", (a.eps = NAN, a.path = LK_SRMS_NORM_BLOCK, many_with_gaps(&a, (int64_t)1 << 28)));
    BAD(LK_ERR_VALUE, "path", (a.path = 9, MOVED(a.x, 1)));
    BAD(LK_ERR_PATH, "path", (a.path = LK_SRMS_NORM_BLOCK, many_with_gaps(&a, (int64_t)1 << 28), MOVED(a.y, 1)));
}

static void backward_errors(int type)
{
    const int direction = BACKWARD, own = type + 1;
    const int64_t big = (int64_t)1 << 62;
    lk_srms_norm_args &a = backward;
    BAD(LK_OK, "nothing", a.path = 0);
    BAD(LK_ERR_NULL, "x", (a.x = NULL, a.residual = NULL));
    BAD(LK_ERR_NULL, "x", (a.x = NULL));
    BAD(LK_ERR_NULL, "every output", a.dx = a.dresidual = a.dweight = a.dbias = NULL);
    BAD(LK_ERR_NULL, "every output",
        (a.residual_out = (void *)a.x, a.dx = a.dresidual = a.dweight = a.dbias = NULL, a.y = (void *)16));
    BAD(LK_OK, "dweight alone", a.dx = a.dresidual = a.dbias = NULL);
    BAD(LK_OK, "dbias alone", a.dx = a.dresidual = a.dweight = NULL);
    BAD(LK_ERR_SHAPE, "groups", a.groups = -1);
    BAD(LK_ERR_SHAPE, "groups", a.groups = ((int64_t)1 << 27) + 1);
    BAD(LK_ERR_SHAPE, "groups is 1073741824; it must be 0 to 2^29", (a.cols = 1, a.groups = (int64_t)1 << 30));
    BAD(LK_ERR_VALUE, "weight_offset", a.weight_offset = NAN);
    BAD_QUERIED(LK_ERR_SHAPE, "dbias and dweight overlap", LK_OK, a.dbias = a.dweight);
    BAD_QUERIED(LK_ERR_SHAPE, "dbias and dy overlap", LK_OK,
                (a.groups = 3, a.dbias = (char *)a.dy - 17 * test_type_bytes[type]));
    BAD(LK_ERR_ALIGNMENT, "dbias", MOVED(a.dbias, 1));
    BAD(LK_OK, "a bias that backward does not have", a.bias = a.dx);
    BAD(LK_OK, "inputs that may be NULL",
             (a.rstd = NULL, a.weight = a.dy = a.dresidual_out = a.residual = NULL));
    BAD(LK_ERR_SHAPE, "rows", a.rows = -1);
    BAD(LK_ERR_SHAPE, "cols", a.cols = 0);
    BAD(LK_ERR_SHAPE, "cols", a.cols = ((int64_t)1 << 30) + 1);
    BAD(LK_ERR_SHAPE, "2^62", a.rows = INT64_MAX);
    int64_t *const strides[] = {&a.x_stride,             &a.residual_stride, &a.dy_stride,
                                &a.dresidual_out_stride, &a.dx_stride,       &a.dresidual_stride};
    const char *const names[] = {"x", "residual", "dy", "dresidual_out", "dx", "dresidual"};
    for (int i = 0; i < LENGTH_OF(strides); i++) {
        BAD(LK_ERR_SHAPE, names[i], *strides[i] = 7);
        BAD(LK_ERR_SHAPE, names[i], *strides[i] = -8);
        BAD(LK_ERR_SHAPE, "2^62", *strides[i] = big);
        BAD(LK_OK, "a small stride of one row", (*strides[i] = 3, a.rows = 1));
    }
    BAD(LK_ERR_SHAPE, "residual_out", (a.residual_out = (void *)a.x, a.x = a.residual = NULL, a.residual_out_stride = 7));
    BAD_QUERIED(LK_ERR_SHAPE, "dx_stride must be 0 or 8", LK_OK, (a.dx = (void *)a.dy, a.dx_stride = 9));
    BAD(LK_OK, "dx is dy", (a.dx = (void *)a.dy, a.dx_stride = a.dy_stride = 9));
    BAD(LK_OK, "dx is dy, with its gaps", (a.dx = (void *)a.dy, a.dy_stride = 9));
    BAD(LK_OK, "dx is dresidual_out, with its gaps", (a.dx = (void *)a.dresidual_out, a.dresidual_out_stride = 9));
    BAD(LK_OK, "dx is dresidual_out", (a.dx = (void *)a.dresidual_out, a.dx_stride = 8));
    BAD(LK_OK, "dx is dy and dresidual_out", (a.dx = (void *)a.dy, a.dresidual_out = a.dy));
    BAD_QUERIED(LK_ERR_SHAPE, "dx and dresidual_out overlap", LK_OK,
                (a.dx = (void *)a.dy, a.dresidual_out = a.dy, a.dresidual_out_stride = 9));
    BAD_QUERIED(LK_ERR_SHAPE, "dx_stride must be 0 or 9", LK_OK,
                (a.dx = (void *)a.dresidual_out, a.dresidual_out_stride = 9, a.dx_stride = 8));
    BAD_QUERIED(LK_ERR_SHAPE, "dresidual_stride must be 0 or 8", LK_OK,
                (a.dresidual = (void *)a.dresidual_out, a.dresidual_stride = 9));
    BAD(LK_OK, "dresidual is dresidual_out", (a.dresidual = (void *)a.dresidual_out, a.dresidual_out_stride = 8));
    BAD_QUERIED(type == TEST_F32 ? LK_OK : LK_ERR_SHAPE, "dx and dresidual_out overlap", LK_OK,
                (a.dx = (void *)a.dresidual_out, a.residual_dtype = LK_DTYPE_F32));
    BAD_QUERIED(type == TEST_F32 ? LK_OK : LK_ERR_SHAPE, "dx and dy overlap", LK_OK,
                (a.dx = (void *)a.dy, a.dy_dtype = LK_DTYPE_F32));
    BAD_QUERIED(LK_ERR_SHAPE, "dx and x overlap", LK_OK, a.dx = (void *)a.x);
    BAD_QUERIED(LK_ERR_SHAPE, "dresidual and dx overlap", LK_OK, a.dresidual = a.dx);
    BAD_QUERIED(LK_ERR_SHAPE, "dresidual and dx overlap", LK_OK, a.dx = a.dresidual = (void *)a.dresidual_out);
    BAD_QUERIED(LK_ERR_SHAPE, "dx and dy overlap", LK_OK, a.dx = (char *)a.dy + 32);
    BAD_QUERIED(LK_ERR_SHAPE, "dweight and weight overlap", LK_OK, a.dweight = (void *)a.weight);
    BAD_QUERIED(LK_ERR_SHAPE, "rstd and dresidual overlap", LK_OK, a.rstd = (float *)a.dresidual);
    BAD(LK_OK, "dx and dy in each other's gaps", (a.dx = (char *)a.dy + 8 * test_type_bytes[type], a.dx_stride = a.dy_stride = 16));
    BAD(LK_ERR_VALUE, "eps", a.eps = -1e-9f);
    BAD(LK_ERR_VALUE, "eps", a.eps = NAN);
    int *const dtypes[] = {&a.residual_dtype, &a.dy_dtype, &a.weight_dtype, &a.dweight_dtype};
    const char *const dtype_names[] = {"residual_dtype", "dy_dtype", "weight_dtype", "dweight_dtype"};
    for (int i = 0; i < LENGTH_OF(dtypes); i++)
        for (int dtype = -1; dtype < 6; dtype++) {
            const bool good = dtype == LK_DTYPE_T || dtype == LK_DTYPE_F32 || dtype == own ||
                              (i > 1 && dtype >= 0 && dtype <= LK_DTYPE_BF16);
            BAD(good ? LK_OK : LK_ERR_VALUE, dtype_names[i], *dtypes[i] = dtype);
        }
    /* With residual_out, x and residual are not looked at. They may be what forward had there, or NULL. Where residual_out is
     * residual and has no stride of its own, it has residual's. */
    BAD(LK_OK, "residual_out beside x", (a.residual_out = a.dx, a.dx = (void *)a.x, a.x_stride = a.residual_stride = -1));
    BAD(LK_ERR_SHAPE, "residual_out_stride", (a.residual_out = (void *)a.residual, a.residual_stride = -1));
    BAD(LK_OK, "residual_out beside anything", (a.residual_out = (void *)a.residual, a.x = a.dx, MOVED(a.residual, 1)));
    BAD(LK_OK, "residual_out alone", (a.residual_out = (void *)a.x, a.x = a.residual = NULL));
    BAD(LK_OK, "what backward does not have", (a.y = a.dx, a.y_stride = -1));
    BAD_QUERIED(LK_ERR_SHAPE, "dx and residual_out overlap", LK_OK, a.residual_out = a.dx);
    BAD(LK_ERR_VALUE, "path", a.path = -1);
    BAD(LK_ERR_VALUE, "path", a.path = LK_SRMS_NORM_CLUSTER + 1);
    BAD(LK_ERR_PATH, "path", (a.path = LK_SRMS_NORM_BLOCK, many_with_gaps(&a, ((int64_t)1 << 27) + 1)));
    BAD(LK_ERR_PATH, "path", (a.path = LK_SRMS_NORM_CLUSTER, many_with_gaps(&a, ((int64_t)1 << 27) + 1)));
    if (!test_clusters()) BAD(LK_ERR_PATH, "path", a.path = LK_SRMS_NORM_CLUSTER);
    BAD(LK_ERR_ALIGNMENT, "x", MOVED(a.x, 1));
    BAD(LK_ERR_ALIGNMENT, "residual", MOVED(a.residual, 1));
    BAD(LK_ERR_ALIGNMENT, "residual_out", (a.residual_out = (void *)a.x, a.x = a.residual = NULL, MOVED(a.residual_out, 1)));
    BAD(LK_ERR_ALIGNMENT, "rstd", MOVED(a.rstd, 2));
    BAD(LK_ERR_ALIGNMENT, "weight", (MOVED(a.weight, 2), a.weight_dtype = LK_DTYPE_F32));
    BAD(LK_ERR_ALIGNMENT, "dy", MOVED(a.dy, 1));
    BAD(LK_ERR_ALIGNMENT, "dy", (MOVED(a.dy, 2), a.dy_dtype = LK_DTYPE_F32));
    BAD(LK_ERR_ALIGNMENT, "dresidual_out", (MOVED(a.dresidual_out, 2), a.residual_dtype = LK_DTYPE_F32));
    BAD(LK_ERR_ALIGNMENT, "dx", MOVED(a.dx, 1));
    BAD(LK_ERR_ALIGNMENT, "dresidual", (MOVED(a.dresidual, 2), a.residual_dtype = LK_DTYPE_F32));
    BAD(LK_ERR_ALIGNMENT, "dweight", (MOVED(a.dweight, 2), a.dweight_dtype = LK_DTYPE_F32));
    BAD(LK_ERR_WORKSPACE, "workspace", a.workspace = NULL);
    BAD(LK_ERR_WORKSPACE, "workspace", a.workspace_bytes -= 1);
    BAD(LK_ERR_WORKSPACE, "workspace", a.workspace_bytes = 0);
    BAD(LK_ERR_WORKSPACE, "workspace", MOVED(a.workspace, 64));
    BAD(LK_OK, "128 bytes are enough", MOVED(a.workspace, 128));
    BAD(LK_OK, "more than is asked", a.workspace_bytes += 1);
    BAD(LK_OK, "none where none is needed", (a.dweight = a.dbias = NULL, a.workspace = NULL, a.workspace_bytes = 0));
    /* Two rules broken at once: the earlier one speaks. */
    BAD_QUERIED(LK_ERR_NULL, "x", LK_ERR_SHAPE, (a.x = NULL, a.rows = -1));
    BAD_QUERIED(LK_ERR_NULL, "every output", LK_ERR_VALUE, (a.dx = a.dresidual = a.dweight = a.dbias = NULL, a.eps = NAN));
    BAD(LK_ERR_SHAPE, "cols", (a.cols = 0, a.residual_dtype = 9));
    BAD_QUERIED(LK_ERR_SHAPE, "dx", LK_ERR_VALUE, (a.dx = (void *)a.dy, a.dx_stride = 9, a.eps = -1));
    BAD(LK_ERR_SHAPE, "dy", (a.dy_stride = 3, a.workspace = NULL));
    BAD(LK_ERR_VALUE, "eps", (a.eps = NAN, MOVED(a.x, 1)));
    BAD(LK_ERR_VALUE, "path", (a.path = 9, a.workspace = NULL));
    BAD(LK_ERR_PATH, "path", (a.path = LK_SRMS_NORM_CLUSTER, many_with_gaps(&a, (int64_t)1 << 28), MOVED(a.dx, 1)));
    BAD(LK_ERR_ALIGNMENT, "dweight", (MOVED(a.dweight, 1), a.workspace_bytes = 0));
}

static void no_args(int type)
{
    size_t asked = 12345;
    const bool forward_says = call_of[FORWARD][type](NULL, test.stream) == LK_ERR_NULL && strstr(lk_last_error(), "args"),
               backward_says = call_of[BACKWARD][type](NULL, test.stream) == LK_ERR_NULL && strstr(lk_last_error(), "args");
    const lk_status first = query_of[FORWARD][type](NULL, &asked), second = query_of[BACKWARD][type](NULL, &asked);
    if (!test_that(forward_says && backward_says && first == LK_ERR_NULL && second == LK_ERR_NULL && asked == 12345))
        test_detail("args NULL: %s", lk_last_error());
}

/* The query's promise for shapes that no test runs: at most 64 MiB + 8 cols + 128, and nothing without dweight. */
static void workspaces(int type)
{
    static const int64_t rows[] = {0, 1, 5, 100, 4096, 131072, 10000001, (int64_t)1 << 27, (int64_t)1 << 32},
                         cols[] = {1, 9, 100, 1024, 5120, 8191, 32768, 131072, 1 << 20, (1 << 30) - 1, 1 << 30};
    good_calls(type);
    for (int t = 0; t <= TENSORS; t++) test_buffer_download(&buffers[t]);
    for (int i = 0; i < LENGTH_OF(rows); i++)
        for (int j = 0; j < LENGTH_OF(cols); j++)
            for (int path = 0; path < PATHS; path++) {
                if (!path_here(path) || (path >= LK_SRMS_NORM_BLOCK && rows[i] > (int64_t)1 << 27)) continue;
                size_t with = 12345, without = 12345;
                lk_srms_norm_args a = backward;
                a.rows = rows[i], a.cols = cols[j], a.path = path, a.dbias = NULL;
                const lk_status first = query_of[BACKWARD][type](&a, &with);
                const int64_t groups[] = {2, 3, 32, 1000, 65535, 1 << 29, 1 << 30}; /* 2^30: of one of dweight and dbias alone */
                const bool good = with <= most_bytes(&a);
                for (int g = 0; g < 2 * LENGTH_OF(groups); g++) {
                    size_t grouped = 12345;
                    a.groups = groups[g / 2], a.dbias = g % 2 ? backward.dbias : NULL;
                    if (a.groups > ((int64_t)1 << 30) / a.cols) continue;
                    const lk_status status = query_of[BACKWARD][type](&a, &grouped);
                    const bool refused = a.dbias && a.groups > 1 << 29;
                    if (!test_that(refused ? status == LK_ERR_SHAPE : status == LK_OK && grouped <= most_bytes(&a)))
                        test_detail("rows=%lld cols=%lld path=%s groups=%lld: %s, %zu bytes", (long long)rows[i],
                                    (long long)cols[j], path_name[path], (long long)a.groups, lk_last_error(), grouped);
                }
                a.groups = 0, a.dweight = a.dbias = NULL;
                const lk_status second = query_of[BACKWARD][type](&a, &without);
                if (!test_that(first == LK_OK && good && second == LK_OK && without == 0))
                    test_detail("rows=%lld cols=%lld path=%s: %s, %zu bytes with dweight, %zu without", (long long)rows[i],
                                (long long)cols[j], path_name[path], lk_status_string(first), with, without);
            }
}

/* Backward's teams have rows of one group each, at a distance that is an int, whatever the numbers of rows and groups. No test
 * has so many rows: this looks at the layout alone. */
template <class T> static void team_steps(void)
{
    const int64_t v = LK_VEC<T>, k = 1 << 10, rows[] = {1000, 2 * k * k * k - 64, INT32_MAX, INT32_MAX + 78ll, 8 * k * k * k};
    const int64_t cols[] = {1, v, 3 * v, 32 * v, 32 * v + 1}, groups[] = {3, 300, 32 * k * k + 1, 128 * k * k - 1, 512 * k * k};
    const uintptr_t far = (uintptr_t)1 << 50;
    for (int i = 0; i < LENGTH_OF(rows) * LENGTH_OF(cols) * LENGTH_OF(groups) * 8; i++) {
        lk_srms_norm_args given = {}, a;
        given.rows = rows[i % 5], given.cols = cols[i / 5 % 5], given.groups = groups[i / 25 % 5];
        if (given.groups > ((int64_t)1 << 30) / given.cols) continue;
        const int kind = i / 125;
        given.x = (void *)(far + (kind & 1 ? sizeof(T) : 0)), given.dy = (void *)(2 * far), given.dx = (void *)(3 * far);
        given.x_stride = kind & 2 ? given.cols + 1 : 0, given.weight = (void *)(4 * far);
        given.dweight = kind & 4 ? (void *)(5 * far) : NULL;
        lk_device device = {};
        lk_srms_norm_layout l = {};
        const lk_status status = lk_srms_norm_check<T>("op", &given, LK_BACKWARD, &device, &a);
        if (!status) l = lk_srms_norm_backward_lay_out<T>(&device, &a);
        const int64_t teams = l.call.in.team_log2 < 0 ? 1 : l.threads >> l.call.in.team_log2, step = l.grid / l.cluster * teams;
        const bool same = step >= a.rows || step % a.groups == 0, counted = l.short_rows || l.call.partials == step;
        if (!test_that(!status && teams > 0 && step > 0 && step <= INT32_MAX && same && counted))
            test_detail("%lld rows of %lld in %lld groups, kind %d: %s, %lld teams of a block, %lld rows on", (long long)a.rows,
                        (long long)a.cols, (long long)a.groups, kind, lk_status_string(status), (long long)teams,
                        (long long)step);
    }
}

static void all_errors(void)
{
    void (*const steps[])(void) = {team_steps<lk_f32>, team_steps<lk_f16>, team_steps<lk_bf16>};
    for (int type = 0; type < TEST_TYPES; type++) {
        const char *const name = test_type_name[type];
        if (test_begin("forward %s: errors", name)) forward_errors(type), no_args(type), test_finish();
        if (test_begin("backward %s: errors", name)) backward_errors(type), test_finish();
        if (test_begin("backward %s: workspace queries", name)) workspaces(type), test_finish();
        if (test_begin("backward %s: steps of teams", name)) steps[type](), test_finish();
    }
}

/* ---- Random draws ---------------------------------------------------------------------------------------------------- */

static void fuzz(void)
{
    static const int64_t lengths_drawn[] = {1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1000, 1025, 2049, 8200};
    const long n = test_fuzz_begin(&counts, 300, 40);
    for (long i = 0; i < n; i++) {
        uint64_t state = test_hash(test_hash(test.fuzz_seed) + (uint64_t)i), *const r = &state;
        const int type = (int)test_below(r, TEST_TYPES), direction = (int)test_below(r, 2), path = (int)test_below(r, PATHS);
        int64_t cols = test_chance(r, 3) ? lengths_drawn[test_below(r, LENGTH_OF(lengths_drawn))] : 1 + test_below(r, 70);
        if (!test.small && test_chance(r, 40)) cols = 1 + test_below(r, 40000);
        const int64_t rows = test_chance(r, 20) ? 0 : test_chance(r, 30) && cols < 80 ? 500 + test_below(r, 200)
                                                                            : 1 + test_below(r, cols > 1000 ? 3 : 20);
        problem p = plain(type, direction, path_here(path) ? path : LK_SRMS_NORM_BLOCK, rows, cols);
        p.seed = test_random(r);
        draw_options(&p, r);
        draw_place(&p, r, (int)test_below(r, PLACES));
        if (test_chance(r, 3)) draw_special(&p, r);
        if (test_chance(r, 8)) p.offset = test_chance(r, 2) ? 1e4 : -1e4;
        if (test_chance(r, 8)) p.spread = 0;
        check(&p);
    }
    test_fuzz_end(&counts, possible, n);
}

/* ---- On the GPU only: beyond 2^31 elements, and a busy device -------------------------------------------------------- */

#if !defined(LK_SIMT)

/* Forward, then backward with dx over dy, and with dweight where rstd is few enough to be read back. Sampled rows and columns
 * are recomputed here. A chain of cols / 256 additions of random numbers loses its square root besides. */
static void huge(int64_t rows, int64_t cols, int path)
{
    const int64_t n = rows * cols, dy_from = 12345;
    const bool columns = rows <= (int64_t)1 << 20;
    const double k = 16 + sqrt((double)cols / 256);
    lk_bf16 *const x = (lk_bf16 *)test_huge_allocate(n * 2), *const y = (lk_bf16 *)test_huge_allocate(n * 2);
    float *const rstd = (float *)test_huge_allocate(rows * 4), *const host_rstd = (float *)malloc((size_t)rows * 4);
    float *const dweight = columns ? (float *)test_huge_allocate(cols * 4) : NULL;
    problem p = plain(TEST_BF16, FORWARD, path, rows, cols);
    test_huge_fill(x, n, 0);
    forward = {}, backward = {};
    forward.x = x, forward.y = y, forward.rstd = rstd, forward.rows = rows, forward.cols = cols, forward.path = path;
    forward.eps = 1e-6f;
    bool ran = launched(&p, launch(&p));
    TEST_CUDA(cudaMemcpy(host_rstd, rstd, (size_t)rows * 4, cudaMemcpyDeviceToHost));
    enum { SAMPLES = 24, COLUMNS = 48 };
    uint64_t random = (uint64_t)n;
    int64_t sample[SAMPLES], sample_col[SAMPLES][COLUMNS];
    double want_rstd[SAMPLES];
    for (int s = 0; ran && s < SAMPLES; s++) {
        const int64_t chosen[3] = {rows - 1, 0, rows / 2}, row = s < 3 ? chosen[s] : test_below(&random, rows);
        double sum = 0;
        sample[s] = s > 0 && cols > 1 << 21 ? -1 : row; /* the host is slow */
        for (int64_t c = 0; c < cols && sample[s] >= 0; c++)
            sum += (double)test_huge_value(row * cols + c) * (double)test_huge_value(row * cols + c);
        want_rstd[s] = 1 / sqrt(sum / (double)cols + (double)1e-6f);
        if (sample[s] >= 0 && !test_near(TEST_F32, host_rstd[row], want_rstd[s], k * 0x1p-24 * want_rstd[s]))
            test_detail("rstd[%lld] is %.9g, want %.9g; %s", (long long)row, (double)host_rstd[row], want_rstd[s],
                        describe(&p));
        for (int i = 0; i < COLUMNS && sample[s] >= 0; i++) {
            const int64_t c = sample_col[s][i] = i == 0 ? cols - 1 : i == 1 ? 0 : test_below(&random, cols);
            const double want = (double)test_huge_value(row * cols + c) * want_rstd[s];
            if (!test_near(TEST_BF16, test_huge_get(TEST_BF16, y, row * cols + c), want, k * 0x1p-24 * fabs(want)))
                test_detail("y[row %lld, col %lld] is wrong; %s", (long long)row, (long long)c, describe(&p));
        }
    }
    test_huge_fill(y, n, dy_from);
    p.direction = BACKWARD;
    backward.x = x, backward.rstd = rstd, backward.dy = y, backward.dx = y, backward.dweight = dweight, backward.rows = rows;
    backward.cols = cols, backward.path = path, backward.dweight_dtype = LK_DTYPE_F32;
    ran = ran && test_that(query_of[BACKWARD][TEST_BF16](&backward, &backward.workspace_bytes) == LK_OK);
    backward.workspace = test_huge_allocate((int64_t)backward.workspace_bytes);
    ran = ran && launched(&p, launch(&p));
    for (int s = 0; ran && s < SAMPLES; s++) {
        const int64_t row = sample[s];
        if (row < 0) continue;
        const double r = (double)host_rstd[row];
        double mean = 0, size = 0;
        for (int64_t c = 0; c < cols; c++) {
            const double term = (double)test_huge_value(row * cols + c) * r * (double)test_huge_value(row * cols + c + dy_from);
            mean += term / (double)cols, size += fabs(term) / (double)cols;
        }
        for (int i = 0; i < COLUMNS; i++) {
            const int64_t at = row * cols + sample_col[s][i];
            const double g = (double)test_huge_value(at + dy_from), h = (double)test_huge_value(at) * r, want = r * (g - h * mean);
            if (!test_near(TEST_BF16, test_huge_get(TEST_BF16, y, at), want, k * 0x1p-24 * r * (fabs(g) + fabs(h) * size)))
                test_detail("dx[row %lld, col %lld] is wrong; %s", (long long)row, (long long)sample_col[s][i], describe(&p));
        }
    }
    for (int i = 0; ran && columns && i < COLUMNS; i++) {
        const int64_t c = sample_col[0][i];
        double want = 0, size = 0;
        for (int64_t row = 0; row < rows; row++) {
            const double term = (double)test_huge_value(row * cols + c + dy_from) * (double)test_huge_value(row * cols + c) *
                                (double)host_rstd[row];
            want += term, size += fabs(term);
        }
        const float got = test_huge_get(TEST_F32, dweight, c);
        if (!test_near(TEST_F32, got, want, (16 + log2((double)rows)) * 0x1p-24 * size))
            test_detail("dweight[%lld] is %.9g, want %.9g; %s", (long long)c, (double)got, want, describe(&p));
    }
    free(host_rstd);
    test_huge_free();
}

static void busy(int type, int direction, int path)
{
    problem p = drawn(type, direction, path, 3000, 1001, 1100, PACKED);
    if (direction == BACKWARD) p.has[DWEIGHT] = true;
    check(&p); /* leaves its bits in kept */
    test_busy(op, &p);
}

static void all_huge(void)
{
    static const int64_t shapes[][2] = {{70001, 32768}, {2100, 1 << 20}, {3, 1 << 30}, {(1ll << 31) + 77, 1}};
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int path = 0; path < PATHS; path++) {
            if (!path_here(path) || (path >= LK_SRMS_NORM_BLOCK && shapes[i][0] > 1 << 27)) continue;
            const int64_t rows = shapes[i][0], cols = shapes[i][1];
            if (!test_begin("huge: %lld x %lld %s", (long long)rows, (long long)cols, path_name[path])) continue;
            huge(rows, cols, path);
            test_finish();
        }
    static const test_theme held = {"half of the SMs held", busy};
    for (int at = 0; at < 2 * PATHS; at++)
        if (path_here(at % PATHS))
            test_themes(&held, 1, at / PATHS, at % PATHS, direction_name[at / PATHS], path_name[at % PATHS]);
}

#endif

/* ---------------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    test_start(argc, argv);
    all_errors();
    all_themes();
    all_sequences();
    TEST_HUGE(all_huge);
    test_all_ran(&counts, possible);
    fuzz();
    return test_end();
}
