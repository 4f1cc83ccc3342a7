// SPDX-License-Identifier: MIT
/* tests/logsumexp.cu - lk/logsumexp.cuh against its header's formula in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits, so that nothing stale passes for a
 * result. Bytes that are not outputs (zones around every buffer, gaps between strided rows, the inputs) must not change.
 *
 * Forward: |lse - reference| <= 8 2^-24 (max |scale x| + log cols + 1), the header's promise; the output in T may differ by
 * half an ulp of T besides. lse and lse_low together: within 8 2^-24 (r + log cols + 1), r the range of scale x, at most 56.
 * Backward gets the float lse of the reference, so the header's term for lse's own error is left out:
 * (4 + |scale x - lse|) 2^-23 |dx| and half an ulp of T; with lse_low too (7 + |scale x - lse| + 2 |lse_low|) 2^-23 |dx| from
 * the gradient of the reference's own lse. Results of exp below 2^-126 may be flushed to 0.
 */
#include "lk/logsumexp.cuh"

#include "tests/test.h"

TEST_DEFINE(LOGSUMEXP)

typedef lk_status (*call)(const lk_logsumexp_args *, cudaStream_t);
typedef lk_status (*query)(const lk_logsumexp_args *, size_t *);
static const call call_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_logsumexp_forward), TEST_OF_TYPES(lk_logsumexp_backward)};
static const query query_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_logsumexp_forward_workspace_bytes),
                                              TEST_OF_TYPES(lk_logsumexp_backward_workspace_bytes)};

enum { FORWARD, BACKWARD };
static const char *const direction_name[] = {"forward", "backward"};
static const char *const path_name[] = {"auto", "warp", "block", "cluster", "column"};

/* Which entries of the odd rows (of a single row: of it) are special. The shares are those of a row that starts on 16 bytes. */
enum { FIRST, LAST, VECTOR, LANE, WARP, BLOCK, EVEN, SPARSE, BUT_ONE, ALL, WHERES };
static const char *const where_name[] = {"first",     "last", "a vector", "a lane's",    "a warp's",
                                         "a block's", "even", "1 in 97",  "all but one", "all"};
/* PEAK: the special entries are 1.2 above a constant. STEP, CLIFF: 40, 200 above the others, less and more than what a sum
 * against a reference that is not the maximum can hold. NEIGHBOURS: all are the offset, the next number of the type above it
 * in size, and the one after that; with LAST all are the same except for the last, which is farther from 0. */
enum { NOTHING, MINUS_INF, PLUS_INF, NOT_A_NUMBER, PEAK, STEP, CLIFF, PLACED, NEIGHBOURS = PLACED, SPECIALS };
static const char *const special_name[] = {"nothing", "-inf", "+inf", "nan", "peak", "step", "cliff", "neighbours"};
enum { UPSTREAM_NULL, UPSTREAM_RANDOM, UPSTREAM_ZERO, UPSTREAM_WILD }; /* wild: inf, -inf, NaN, 0 and numbers */
static const char *const upstream_name[] = {"NULL", "random", "0", "wild"};

/* One call. Strides are as in the args, 0 for packed; `.._at` is how many elements a pointer is past 256-byte alignment. */
typedef struct {
    int type, direction, path;
    int64_t outer, cols, inner, outer_stride, col_stride, dx_outer_stride, dx_col_stride;
    float scale;
    int x_at, dx_at, lse_at, dlse_at, rounded_at;
    bool in_place, no_lse, no_rounded;
    bool low; /* lse_low is asked for, or given */
    bool typed; /* backward: dlse is in T, as dlse_rounded */
    int upstream, special, where;
    double offset, spread; /* x is uniform in offset +- spread */
    uint64_t seed;
} problem;

static problem plain(int type, int direction, int path, int64_t outer, int64_t cols, int64_t inner)
{
    problem p = {};
    p.type = type, p.direction = direction, p.path = path;
    p.outer = outer, p.cols = cols, p.inner = inner;
    p.upstream = UPSTREAM_RANDOM;
    p.spread = 4;
    p.low = direction == FORWARD || (outer + cols) % 2;
    p.typed = direction == BACKWARD && (outer + cols / 2) % 3 == 0;
    p.seed = test_hash((uint64_t)(outer * 1000003 + cols * 1009 + inner));
    return p;
}

static const char *describe(const problem *p)
{
    static char text[640];
    snprintf(text, sizeof text,
             "%s %s path=%s outer=%lld cols=%lld inner=%lld outer_stride=%lld col_stride=%lld dx_outer_stride=%lld "
             "dx_col_stride=%lld scale=%.9g x_at=%d dx_at=%d lse_at=%d dlse_at=%d rounded_at=%d%s%s%s%s dlse=%s%s special=%s at "
             "%s offset=%g spread=%g seed=0x%llx",
             direction_name[p->direction], test_type_name[p->type], path_name[p->path], (long long)p->outer, (long long)p->cols,
             (long long)p->inner, (long long)p->outer_stride, (long long)p->col_stride, (long long)p->dx_outer_stride,
             (long long)p->dx_col_stride, (double)p->scale, p->x_at, p->dx_at, p->lse_at, p->dlse_at, p->rounded_at,
             p->in_place ? " in place" : "", p->no_lse ? " lse=NULL" : "", p->no_rounded ? " lse_rounded=NULL" : "",
             p->low ? "" : " lse_low=NULL", upstream_name[p->upstream], p->typed ? " in T" : "", special_name[p->special],
             where_name[p->where], p->offset, p->spread, (unsigned long long)p->seed);
    return text;
}

/* ---- Counts ---------------------------------------------------------------------------------------------------------- */

enum {
    DID_F32, DID_F16, DID_BF16, DID_NO_ROWS, DID_NO_COLS, DID_ONE_COL, DID_INNER, DID_GAPS, DID_ALIGNED_GAPS, DID_PERMUTED,
    DID_OVERLAP, DID_DX_STRIDE, DID_X_OFF, DID_SAME_OFF, DID_OTHER_OFF, DID_LSE_OFF, DID_DLSE_OFF, DID_ROUNDED_OFF, DID_SCALE,
    DID_NEGATIVE, DID_IN_PLACE, DID_NO_LSE, DID_NO_ROUNDED, DID_BOTH, DID_LOW, DID_NO_LOW, DID_DLSE_NULL, DID_DLSE_ZERO,
    DID_DLSE_WILD, DID_DLSE_TYPED,
    DID_MINUS_INF, DID_PLUS_INF, DID_NAN, DID_PEAK, DID_STEP, DID_CLIFF, DID_HUGE, DID_ALL_MINUS_INF, DID_LARGE, DID_WHERE,
    DIDS = DID_WHERE + WHERES
};
static const char *const did_name[] = {
    "f32", "f16", "bf16", "0 rows", "0 cols", "1 col", "inner > 1", "odd gaps", "aligned gaps", "permuted",
    "x rows overlap", "dx stride differs", "x off", "dx off as x", "dx off other", "lse off", "dlse off", "lse_rounded off",
    "scale", "scale < 0", "in place", "lse NULL", "lse_rounded NULL", "both outputs", "lse_low", "lse_low NULL", "dlse NULL",
    "dlse 0", "dlse inf, nan", "dlse in T",
    "-inf", "+inf", "nan", "peak", "step of 40", "cliff of 200", "huge", "all -inf", "offset 1e4",
    "special at first", "special at last", "special vector", "special lane", "special warp", "special block", "special even",
    "special 1 in 97", "special all but one", "special all"};
/* Directions and paths: forward's five, then backward's four. */
static const char *const counted_paths[] = {"fwd auto", "warp", "block", "cluster", "column",
                                            "bwd auto", "warp", "block", "column"};
static const int counted_direction[] = {FORWARD, FORWARD, FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD, BACKWARD};
static const int counted_path[] = {LK_LOGSUMEXP_AUTO,    LK_LOGSUMEXP_WARP,   LK_LOGSUMEXP_BLOCK,
                                   LK_LOGSUMEXP_CLUSTER, LK_LOGSUMEXP_COLUMN, LK_LOGSUMEXP_AUTO,
                                   LK_LOGSUMEXP_WARP,    LK_LOGSUMEXP_BLOCK,  LK_LOGSUMEXP_COLUMN};
enum { COUNTED = 9 };
static test_counts counts = {counted_paths, did_name, COUNTED, DIDS, {}, {}};

/* Whether this direction and path can be asked for an option at all. */
static bool possible(int counted, int did)
{
    const int direction = counted_direction[counted], path = counted_path[counted];
    if (path == LK_LOGSUMEXP_CLUSTER && !test_clusters()) return false;
    if (did == DID_INNER || did == DID_PERMUTED) return path == LK_LOGSUMEXP_AUTO || path == LK_LOGSUMEXP_COLUMN;
    if (did == DID_DX_STRIDE || did == DID_SAME_OFF || did == DID_OTHER_OFF || did == DID_DLSE_OFF || did == DID_IN_PLACE ||
        did == DID_DLSE_NULL || did == DID_DLSE_ZERO || did == DID_DLSE_WILD || did == DID_DLSE_TYPED)
        return direction == BACKWARD;
    if (did == DID_NO_LSE || did == DID_NO_ROUNDED || did == DID_BOTH || did == DID_ROUNDED_OFF) return direction == FORWARD;
    return true;
}

typedef struct {
    int64_t outer, cols, inner, outer_stride, col_stride;
} layout;

static layout layout_of(const problem *p, int64_t outer_stride, int64_t col_stride)
{
    const int64_t inner = p->inner ? p->inner : 1;
    if (!col_stride) col_stride = inner;
    return {p->outer, p->cols, inner, outer_stride ? outer_stride : p->cols * col_stride, col_stride};
}

static int64_t span_of(layout l)
{
    return l.outer && l.cols ? (l.outer - 1) * l.outer_stride + (l.cols - 1) * l.col_stride + l.inner : 0;
}

static void count(const problem *p)
{
    int at = 0;
    while (counted_direction[at] != p->direction || counted_path[at] != p->path) at++;
    const layout x = layout_of(p, p->outer_stride, p->col_stride), dx = layout_of(p, p->dx_outer_stride, p->dx_col_stride);
    const bool back = p->direction == BACKWARD, some = p->outer > 0 && p->cols > 0;
    const int vec = 16 / test_type_bytes[p->type];
    const int64_t gap = p->outer > 1 && x.inner == 1 && x.col_stride == 1 ? x.outer_stride - p->cols : 0;
    bool did[DIDS] = {};
    did[p->type] = true;
    did[DID_NO_ROWS] = p->outer == 0;
    did[DID_NO_COLS] = p->outer > 0 && p->cols == 0;
    did[DID_ONE_COL] = p->outer > 0 && p->cols == 1;
    if (some) {
        did[DID_INNER] = x.inner > 1;
        did[DID_GAPS] = gap > 0 && x.outer_stride % vec != 0;
        did[DID_ALIGNED_GAPS] = gap > 0 && x.outer_stride % vec == 0;
        did[DID_PERMUTED] = p->outer > 1 && p->cols > 1 && x.col_stride > x.outer_stride;
        did[DID_OVERLAP] = gap < 0;
        did[DID_DX_STRIDE] = back && p->outer > 1 && x.outer_stride != dx.outer_stride;
        did[DID_X_OFF] = p->x_at % vec != 0;
        did[DID_SAME_OFF] = back && p->x_at % vec != 0 && p->x_at == p->dx_at;
        did[DID_OTHER_OFF] = back && !p->in_place && (p->x_at - p->dx_at) % vec != 0;
        did[DID_LSE_OFF] = p->lse_at % 4 != 0 && !p->no_lse;
        did[DID_DLSE_OFF] = back && p->dlse_at % 4 != 0 && p->upstream != UPSTREAM_NULL;
        did[DID_ROUNDED_OFF] = !back && p->rounded_at % vec != 0 && !p->no_rounded;
        did[DID_SCALE] = p->scale != 0 && p->scale != 1;
        did[DID_NEGATIVE] = p->scale < 0;
        did[DID_IN_PLACE] = p->in_place;
        did[DID_NO_LSE] = !back && p->no_lse;
        did[DID_NO_ROUNDED] = !back && p->no_rounded;
        did[DID_BOTH] = !back && !p->no_lse && !p->no_rounded;
        did[DID_LOW] = p->low;
        did[DID_DLSE_TYPED] = p->typed && p->upstream != UPSTREAM_NULL;
        did[DID_NO_LOW] = !p->low;
        did[DID_DLSE_NULL] = back && p->upstream == UPSTREAM_NULL;
        did[DID_DLSE_ZERO] = back && p->upstream == UPSTREAM_ZERO;
        did[DID_DLSE_WILD] = back && p->upstream == UPSTREAM_WILD;
        did[DID_MINUS_INF] = p->special == MINUS_INF;
        did[DID_PLUS_INF] = p->special == PLUS_INF;
        did[DID_NAN] = p->special == NOT_A_NUMBER;
        did[DID_PEAK] = p->special == PEAK;
        did[DID_STEP] = p->special == STEP;
        did[DID_CLIFF] = p->special == CLIFF;
        did[DID_HUGE] = p->special == NEIGHBOURS;
        did[DID_ALL_MINUS_INF] = p->special == MINUS_INF && p->where == ALL;
        did[DID_LARGE] = fabs(p->offset) == 1e4;
        if (p->special && p->special < PLACED) did[DID_WHERE + p->where] = true;
    }
    counts.runs[at]++;
    for (int i = 0; i < DIDS; i++) counts.of[at][i] += did[i];
}

/* ---- The reference --------------------------------------------------------------------------------------------------- */

static double reference_lse(const double *z, int64_t cols)
{
    double max = -INFINITY, sum = 0;
    for (int64_t c = 0; c < cols; c++) max = fmax(max, z[c]);
    if (isinf(max)) max = 0; /* exp then gives the 0, inf or NaN that the logarithm turns into the answer */
    for (int64_t c = 0; c < cols; c++) sum += exp(z[c] - max);
    return max + log(sum);
}

static double reference_probability(double z, double lse)
{
    return lse == -INFINITY ? 0 : exp(z - lse);
}

static double forward_slack(const double *z, int64_t cols)
{
    double largest = 0;
    for (int64_t c = 0; c < cols; c++)
        if (fabs(z[c]) <= 1e300) largest = fmax(largest, fabs(z[c]));
    return 8 * 0x1p-24 * (largest + log((double)(cols > 0 ? cols : 1)) + 1);
}

/* How far lse + lse_low may lie from the reference; INFINITY where the header promises nothing of it. */
static double low_slack(const problem *p, const double *z, int64_t cols)
{
    double lowest = INFINITY, highest = -INFINITY;
    int exponent;
    const bool exact = p->scale == 0 || fabs(frexp((double)p->scale, &exponent)) == 0.5; /* scale x is not rounded */
    for (int64_t c = 0; c < cols; c++)
        if (fabs(z[c]) <= 1e300) lowest = fmin(lowest, z[c]), highest = fmax(highest, z[c]);
    if (!exact && fmax(fabs(lowest), fabs(highest)) > 0x1p24) return INFINITY;
    const double reference = 0x1p-52 * fmax(fabs(lowest), fabs(highest)); /* a double's own rounding: 2e-6 near 1e10 */
    return 8 * 0x1p-24 * (fmin(fmax(highest - lowest, 0), 56) + log((double)(cols > 0 ? cols : 1)) + 1) + reference;
}

/* ---- One checked call ------------------------------------------------------------------------------------------------ */

static lk_logsumexp_args args; /* of the last checked call */
static test_buffer x_buffer, dx_buffer, lse_buffer, low_buffer, dlse_buffer, rounded_buffer;
static unsigned char *kept, *kept_rounded, *kept_low; /* the first run's outputs */
static double *row_z;
static size_t kept_bytes, kept_rounded_bytes, kept_low_bytes, row_bytes;

static bool is_special(const problem *p, int64_t row, int64_t rows, int64_t c)
{
    if (rows > 1 && row % 2 == 0) return false;
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

static void fill_x(const problem *p, layout l, void *x)
{
    static const float value[] = {0, -INFINITY, INFINITY, NAN};
    uint64_t random = p->seed;
    for (int64_t o = 0; o < l.outer; o++)
        for (int64_t c = 0; c < l.cols; c++)
            for (int64_t i = 0; i < l.inner; i++) {
                double v = p->offset + p->spread * test_uniform(&random);
                const bool special = p->special && is_special(p, o * l.inner + i, l.outer * l.inner, c);
                if (p->special == PEAK) v = p->offset + (special ? 1.2 : 0);
                else if (p->special == NEIGHBOURS) {
                    const uint32_t last = c == p->cols - 1 ? (uint32_t)(1 + (o + i) % 3) : 0;
                    const uint32_t above = p->where == LAST ? last : (uint32_t)(random >> 40) % 3;
                    v = (double)test_decode(p->type, test_encode(p->type, (float)p->offset) + above);
                } else if (p->special >= STEP) v += special ? (p->special == STEP ? 40 : 200) : 0;
                else if (special) v = value[p->special];
                test_put(p->type, x, o * l.outer_stride + c * l.col_stride + i, (float)v);
            }
}

/* scale x of one row, as exact as double is. */
static const double *load_z(const problem *p, layout l, const void *x, int64_t row)
{
    const double scale = p->scale == 0 ? 1 : (double)p->scale;
    const int64_t at = row / l.inner * l.outer_stride + row % l.inner;
    row_z = (double *)test_room(row_z, &row_bytes, (size_t)l.cols * sizeof(double));
    for (int64_t c = 0; c < l.cols; c++) row_z[c] = scale * (double)test_get(p->type, x, at + c * l.col_stride);
    return row_z;
}

static bool launched(const problem *p, lk_status status) { return test_launched(status, describe(p)); }

static void check_forward(const problem *p)
{
    const layout l = layout_of(p, p->outer_stride, p->col_stride);
    const int64_t rows = l.outer * l.inner;
    const int bytes = test_type_bytes[p->type];
    for (int run = 0; run < 2; run++) {
        test_buffer_size(&x_buffer, (size_t)(span_of(l) * bytes), (size_t)(p->x_at * bytes), run ? 0x7f : 0xff);
        test_buffer_size(&lse_buffer, (size_t)rows * 4, (size_t)p->lse_at * 4, run ? 0xff : 0x5a);
        test_buffer_size(&low_buffer, (size_t)rows * 4, (size_t)p->lse_at * 4, run ? 0xff : 0x5a);
        test_buffer_size(&rounded_buffer, (size_t)(rows * bytes), (size_t)(p->rounded_at * bytes), run ? 0xff : 0x5a);
        fill_x(p, l, test_buffer_host(&x_buffer));
        test_buffer_upload(&x_buffer), test_buffer_upload(&lse_buffer), test_buffer_upload(&low_buffer),
            test_buffer_upload(&rounded_buffer);

        args = {};
        args.x = test_buffer_device(&x_buffer);
        args.lse = p->no_lse ? NULL : (float *)test_buffer_device(&lse_buffer);
        args.lse_low = p->low ? (float *)test_buffer_device(&low_buffer) : NULL;
        args.lse_rounded = p->no_rounded ? NULL : test_buffer_device(&rounded_buffer);
        args.outer = p->outer, args.cols = p->cols, args.inner = p->inner;
        args.outer_stride = p->outer_stride, args.col_stride = p->col_stride;
        args.scale = p->scale, args.path = p->path;
        const bool ran = launched(p, call_of[FORWARD][p->type](&args, test.stream));
        test_buffer_download(&x_buffer), test_buffer_download(&lse_buffer), test_buffer_download(&low_buffer),
            test_buffer_download(&rounded_buffer);
        if (!ran) return;

        const float *lse = (const float *)test_buffer_back(&lse_buffer), *low = (const float *)test_buffer_back(&low_buffer);
        const void *rounded = test_buffer_back(&rounded_buffer);
        kept = (unsigned char *)test_room(kept, &kept_bytes, (size_t)rows * 4);
        kept_rounded = (unsigned char *)test_room(kept_rounded, &kept_rounded_bytes, (size_t)rows * 4);
        kept_low = (unsigned char *)test_room(kept_low, &kept_low_bytes, (size_t)rows * 4);
        for (int64_t r = 0; r < rows; r++) {
            if (run == 0) {
                const double *z = load_z(p, l, test_buffer_host(&x_buffer), r);
                const double want = reference_lse(z, l.cols), slack = forward_slack(z, l.cols);
                if (!p->no_lse && !test_near(TEST_F32, lse[r], want, slack))
                    test_detail("lse[%lld] is %.9g, want %.9g +- %.3g; %s", (long long)r, (double)lse[r], want, slack,
                                describe(p));
                const float got = test_get(p->type, rounded, r);
                if (!p->no_rounded && !test_near(p->type, got, want, slack))
                    test_detail("lse_rounded[%lld] is %.9g, want %.9g +- %.3g; %s", (long long)r, (double)got, want, slack,
                                describe(p));
                if (p->low && !p->no_lse) {
                    const double within = low_slack(p, z, l.cols);
                    bool good = fabs((double)low[r]) <= test_half_ulp(TEST_F32, (double)lse[r]);
                    if (!isfinite(lse[r])) good = low[r] == 0;
                    else if (isfinite(want) && within != INFINITY)
                        good = test_within(fabs((double)lse[r] + (double)low[r] - want), within) && good;
                    if (!test_that(good))
                        test_detail("lse[%lld] + lse_low is %.9g + %.9g, want %.17g +- %.3g; %s", (long long)r, (double)lse[r],
                                    (double)low[r], want, within, describe(p));
                }
                if (!p->no_rounded && !p->no_lse) {
                    const uint32_t bits = test_get_bits(p->type, rounded, r), right = test_encode(p->type, lse[r]);
                    if (!test_that(bits == right || (lse[r] != lse[r] && got != got)))
                        test_detail("lse_rounded[%lld] is 0x%x, lse %.9g rounds to 0x%x; %s", (long long)r, bits,
                                    (double)lse[r], right, describe(p));
                }
                memcpy(kept + r * 4, &lse[r], 4), memcpy(kept_low + r * 4, &low[r], 4);
                memcpy(kept_rounded + r * 4, (const char *)rounded + r * bytes, (size_t)bytes);
            } else {
                const bool same =
                    (p->no_lse || !memcmp(kept + r * 4, &lse[r], 4)) &&
                    (!p->low || !memcmp(kept_low + r * 4, &low[r], 4)) &&
                    (p->no_rounded || !memcmp(kept_rounded + r * 4, (const char *)rounded + r * bytes, (size_t)bytes));
                if (!test_that(same)) test_detail("a second run gives other bits for row %lld; %s", (long long)r, describe(p));
            }
            if (!p->no_lse) test_buffer_accept(&lse_buffer, r, 4);
            if (p->low) test_buffer_accept(&low_buffer, r, 4);
            if (!p->no_rounded) test_buffer_accept(&rounded_buffer, r, bytes);
        }
        test_buffer_untouched(&x_buffer, "x", describe(p));
        test_buffer_untouched(&lse_buffer, "lse", describe(p));
        test_buffer_untouched(&low_buffer, "lse_low", describe(p));
        test_buffer_untouched(&rounded_buffer, "lse_rounded", describe(p));
    }
}

static float untyped_upstream_of(const problem *p, int64_t row)
{
    static const float wild[] = {INFINITY, 1.5f, NAN, -INFINITY, 0.0f, -2.5f};
    uint64_t random = p->seed + 77 + (uint64_t)row;
    if (p->upstream == UPSTREAM_NULL) return 1;
    if (p->upstream == UPSTREAM_ZERO) return 0;
    if (p->upstream == UPSTREAM_WILD) return wild[row % 6];
    return (float)(2 * test_uniform(&random));
}
static float upstream_of(const problem *p, int64_t row)
{
    const float dlse = untyped_upstream_of(p, row);
    return p->typed ? test_decode(p->type, test_encode(p->type, dlse)) : dlse;
}

static void check_gradient(const problem *p, int64_t row, int64_t c, float got, double z, double lse, double extra,
                           double low)
{
    const double scale = p->scale == 0 ? 1 : (double)p->scale, dlse = (double)upstream_of(p, row),
                 probability = reference_probability(z, lse), flushed = 0x1p-126 * exp(fabs(low));
    /* An infinity times a probability that a float flushes to 0 is NaN, as in PyTorch. */
    if (isinf(dlse) && probability != 0 && probability < 1.001 * flushed) return;
    const double want = scale * dlse * probability, t = isfinite(z - lse) ? fabs(z - lse) : 0;
    const double slack = isfinite(want) ? (4 + t + extra) * 0x1p-23 * fabs(want) + fmax(1, fabs(scale * dlse)) * flushed : 0;
    if (!test_near(p->type, got, want, slack))
        test_detail("dx[row %lld, col %lld] is %.9g, want %.9g +- %.3g (scale x %.9g, lse %.9g, dlse %.9g); %s", (long long)row,
                    (long long)c, (double)got, want, slack, z, lse, dlse, describe(p));
}

static void check_backward(const problem *p)
{
    const layout l = layout_of(p, p->outer_stride, p->col_stride);
    const layout d = p->in_place ? l : layout_of(p, p->dx_outer_stride, p->dx_col_stride);
    const int64_t rows = l.outer * l.inner;
    const int bytes = test_type_bytes[p->type];
    test_buffer *const out = p->in_place ? &x_buffer : &dx_buffer;
    for (int run = 0; run < 2; run++) {
        test_buffer_size(&x_buffer, (size_t)(span_of(l) * bytes), (size_t)(p->x_at * bytes), run ? 0x7f : 0xff);
        test_buffer_size(&dx_buffer, (size_t)(span_of(d) * bytes), (size_t)(p->dx_at * bytes), run ? 0xff : 0x5a);
        test_buffer_size(&lse_buffer, (size_t)rows * 4, (size_t)p->lse_at * 4, run ? 0x7f : 0xff);
        test_buffer_size(&low_buffer, (size_t)rows * 4, (size_t)p->lse_at * 4, run ? 0x7f : 0xff);
        const int dlse_bytes = p->typed ? bytes : 4;
        test_buffer_size(&dlse_buffer, (size_t)(rows * dlse_bytes), (size_t)(p->dlse_at * dlse_bytes), run ? 0x7f : 0xff);
        const void *x = test_buffer_host(&x_buffer);
        float *lse = (float *)test_buffer_host(&lse_buffer), *low = (float *)test_buffer_host(&low_buffer);
        float *dlse = (float *)test_buffer_host(&dlse_buffer);
        fill_x(p, l, test_buffer_host(&x_buffer));
        for (int64_t r = 0; r < rows; r++) {
            if (run == 0) {
                const double exact = reference_lse(load_z(p, l, x, r), l.cols);
                lse[r] = (float)exact;
                low[r] = isfinite(lse[r]) ? (float)(exact - (double)lse[r]) : 0;
            }
            if (p->typed) test_put(p->type, dlse, r, upstream_of(p, r));
            else dlse[r] = upstream_of(p, r);
        }
        kept_rounded = (unsigned char *)test_room(kept_rounded, &kept_rounded_bytes, (size_t)rows * 4);
        kept_low = (unsigned char *)test_room(kept_low, &kept_low_bytes, (size_t)rows * 4);
        if (run == 0) memcpy(kept_rounded, lse, (size_t)rows * 4), memcpy(kept_low, low, (size_t)rows * 4);
        else memcpy(lse, kept_rounded, (size_t)rows * 4), memcpy(low, kept_low, (size_t)rows * 4); /* lse is the costly part */
        test_buffer_upload(&x_buffer), test_buffer_upload(&dx_buffer), test_buffer_upload(&lse_buffer),
            test_buffer_upload(&low_buffer), test_buffer_upload(&dlse_buffer);

        args = {};
        args.x = test_buffer_device(&x_buffer);
        args.lse = (float *)test_buffer_device(&lse_buffer);
        args.lse_low = p->low ? (float *)test_buffer_device(&low_buffer) : NULL;
        const void *const dlse_at = p->upstream == UPSTREAM_NULL ? NULL : test_buffer_device(&dlse_buffer);
        args.dlse = p->typed ? NULL : (const float *)dlse_at, args.dlse_rounded = p->typed ? dlse_at : NULL;
        args.dx = test_buffer_device(out);
        args.outer = p->outer, args.cols = p->cols, args.inner = p->inner;
        args.outer_stride = p->outer_stride, args.col_stride = p->col_stride;
        args.dx_outer_stride = p->in_place ? p->outer_stride : p->dx_outer_stride;
        args.dx_col_stride = p->in_place ? p->col_stride : p->dx_col_stride;
        args.scale = p->scale, args.path = p->path;
        const bool ran = launched(p, call_of[BACKWARD][p->type](&args, test.stream));
        test_buffer_download(&x_buffer), test_buffer_download(&dx_buffer), test_buffer_download(&lse_buffer),
            test_buffer_download(&low_buffer), test_buffer_download(&dlse_buffer);
        if (!ran) return;

        void *dx = test_buffer_back(out);
        kept = (unsigned char *)test_room(kept, &kept_bytes, out->bytes);
        for (int64_t r = 0; r < rows; r++) {
            const double *z = run == 0 ? load_z(p, l, x, r) : NULL;
            const double rest = p->low ? (double)low[r] : 0, given = (double)lse[r] + rest;
            const int64_t start = r / d.inner * d.outer_stride + r % d.inner;
            for (int64_t c = 0; c < d.cols; c++) {
                const int64_t at = start + c * d.col_stride;
                if (run == 0) {
                    check_gradient(p, r, c, test_get(p->type, dx, at), z[c], given, p->low ? 3 + 2 * fabs(rest) : 0, rest);
                    memcpy(kept + at * bytes, (char *)dx + at * bytes, (size_t)bytes);
                } else if (!test_that(!memcmp(kept + at * bytes, (char *)dx + at * bytes, (size_t)bytes))) {
                    test_detail("a second run gives other bits for dx[row %lld, col %lld]; %s", (long long)r, (long long)c,
                                describe(p));
                }
                test_buffer_accept(out, at, bytes);
            }
        }
        test_buffer_untouched(&x_buffer, p->in_place ? "dx = x" : "x", describe(p));
        test_buffer_untouched(&dx_buffer, "dx", describe(p));
        test_buffer_untouched(&lse_buffer, "lse", describe(p));
        test_buffer_untouched(&low_buffer, "lse_low", describe(p));
        test_buffer_untouched(&dlse_buffer, "dlse", describe(p));
    }
}

static void check(const problem *p)
{
    count(p);
    if (p->direction == FORWARD) check_forward(p);
    else check_backward(p);
}

/* The same again, in a graph and on a busy device: see test_op. What was kept are lse's bits, or dx's. */
static test_buffer *output_of(const problem *p) { return p->direction == FORWARD ? &lse_buffer : &dx_buffer; }
static bool prepare(const problem *p, int) { return test_buffer_upload(output_of(p)), true; }
static lk_status launch(const problem *p) { return call_of[p->direction][p->type](&args, test.stream); }
static void collect(const problem *p) { test_buffer_download(output_of(p)); }
static void settle(const problem *p, bool, const char *what)
{
    const test_buffer *const out = output_of(p);
    if (!test_that(!memcmp(test_buffer_back(out), kept, out->bytes))) test_detail("%s gives other bits; %s", what, describe(p));
}
static const test_op<problem> op = {describe, prepare, launch, collect, NULL, settle};

/* ---- Cases of rows: each on every path that takes contiguous rows ---------------------------------------------------- */

static void lengths(int type, int direction, int path)
{
    const int64_t v = 16 / test_type_bytes[type];
    const int64_t cols[] = {
        1,           v - 1,   v,           v + 1,        31 * v,   32 * v - 1,   32 * v,       32 * v + 1,  33 * v,
        128 * v - 1, 128 * v, 128 * v + 1, 1024 * v - 1, 1024 * v, 1024 * v + 1, 4096 * v - 1, 4096 * v + 1};
    for (int i = 0; i < LENGTH_OF(cols) - (test.small ? 4 : 0); i++) {
        const problem p = plain(type, direction, path, cols[i] > 1024 * v + 1 || test.small ? 2 : 5, cols[i], i % 2);
        check(&p);
    }
}

static void row_counts(int type, int direction, int path)
{
    const int64_t rows[] = {1, 2, 31, 33, 300}, cols[] = {1, 3, 40, 129};
    for (int i = 0; i < LENGTH_OF(rows) - (test.small ? 1 : 0); i++)
        for (int j = 0; j < LENGTH_OF(cols); j++) {
            if ((rows[i] == 300 && j == 3) || (test.small && rows[i] > 2 && j % 2 == i % 2)) continue;
            const problem p = plain(type, direction, path, rows[i], cols[j], 1);
            check(&p);
        }
}

static void row_strides(int type, int direction, int path)
{
    const int64_t v = 16 / test_type_bytes[type], cols[] = {7, 33, 2 * v * 8, 1000};
    for (int i = 0; i < LENGTH_OF(cols) - (test.small ? 2 : 0); i++) {
        const int64_t n = cols[i], aligned = (n + v - 1) / v * v + v;
        const int64_t strides[][2] = {{n, 0},
                                      {n + 1, n + 1},
                                      {n + 3, 0},
                                      {0, n + 5},
                                      {aligned, aligned},
                                      {aligned, 0},
                                      {aligned, aligned + v},
                                      {aligned, aligned + 1},
                                      {1, 0},
                                      {n / 2 + 1, n + 2}};
        for (int j = 0; j < LENGTH_OF(strides); j++) {
            problem p = plain(type, direction, path, 5, n, 1);
            p.outer_stride = strides[j][0];
            if (direction == BACKWARD) p.dx_outer_stride = strides[j][1];
            check(&p);
        }
    }
}

static void misaligned(int type, int direction, int path)
{
    const int v = 16 / test_type_bytes[type];
    const int64_t cols[] = {2, 5 * v + 3, 70 * v};
    for (int i = test.small ? 1 : 0; i < LENGTH_OF(cols); i++)
        for (int at = 0; at < v; at += test.small && at > 0 ? v - 2 : 1) {
            problem p = plain(type, direction, path, 3, cols[i], 1);
            p.outer_stride = at % 2 ? 0 : (cols[i] + v - 1) / v * v; /* every row alike, or each another */
            p.dx_outer_stride = direction == BACKWARD ? p.outer_stride : 0;
            p.x_at = p.dx_at = at;
            check(&p);
            p.lse_at = p.dlse_at = p.rounded_at = 1;
            check(&p);
            p.dx_at = (at + 1) % v, p.lse_at = 3;
            if (direction == BACKWARD) check(&p);
            p.dx_at = 0, p.dlse_at = 2;
            if (direction == BACKWARD && at) check(&p);
        }
}

static void scales(int type, int direction, int path)
{
    const float scale[] = {0, 1, -1, 0.37f, -3, 1e-3f, 50};
    const int64_t cols[] = {9, 500};
    for (int i = 0; i < LENGTH_OF(scale); i++)
        for (int j = 0; j < LENGTH_OF(cols); j++) {
            problem p = plain(type, direction, path, 3, cols[j], 1);
            p.scale = scale[i];
            check(&p);
        }
}

static void specials(int type, int direction, int path)
{
    const int64_t v = 16 / test_type_bytes[type], cols[] = {1, v, 3 * v + 1, 700, 600 * v + 5};
    for (int special = MINUS_INF; special < PLACED; special++)
        for (int where = 0; where < WHERES; where++)
            for (int i = 0; i < LENGTH_OF(cols); i++) {
                if ((test.small ? i != 2 : i > 2) && i != 3 + where % 2) continue; /* the long ones take turns */
                if (test.small && (i + special + where) % 2) continue;
                problem p = plain(type, direction, path, 2, cols[i], 1);
                p.special = special, p.where = where;
                check(&p);
                p.scale = -0.5f, p.x_at = p.dx_at = 1;
                if (i < 3) check(&p);
            }
}

/* exp(1e4) overflows and exp(-1e4) vanishes. Of equal entries the sum is exact, so lse must be right to float rounding: two
 * ulp of the logarithm and an ulp of the sum with the maximum. */
static void offsets(int type, int direction, int path)
{
    const double offset[] = {1e4, -1e4}, spread[] = {4, 0};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            problem p = plain(type, direction, path, 3, 300, 1);
            p.offset = offset[i], p.spread = spread[j];
            check(&p);
            for (int k = 0; k < 4; k++) { /* scale x is rounded; twice the row is read again, with a running maximum */
                problem q = p;
                q.scale = k % 2 ? -0.7f : 1.3f, q.special = k < 2 ? NOTHING : CLIFF, q.where = LAST, q.x_at = q.dx_at = k / 2;
                check(&q);
            }
            p.scale = -1;
            check(&p);
            if (direction == BACKWARD || p.spread != 0) continue;
            const float *lse = (const float *)kept;
            const double constant = -(double)test_decode(type, test_encode(type, (float)offset[i])),
                         want = constant + log(300.0);
            if (!test_within(fabs((double)lse[0] - want), 0x1p-23 * (fabs(want) + 2 * log(300.0))))
                test_detail("lse[0] of 300 equal entries is %.9g, want %.9g; %s", (double)lse[0], want, describe(&p));
        }
}

/* Scaled values beyond what 2^x is exact for: next to each other they are further apart than a float's range, and several are
 * the largest. Backward gets scales that are powers of two, under which lse is the largest without rounding. */
static void huge_values(int type, int direction, int path, const int64_t *cols, int lengths, int64_t inner)
{
    typedef struct {
        double offset;
        float scale, exact;
    } magnitude;
    static const magnitude floats[] = {{1.3e9, 0, 0},  {1.3e10, -1, -1},      {1.7e20, 0, 0},       {3e38, -1, -1},
                                       {3e38, 0, 0},   {1.3e10, -0.7f, -0.5f}, {1.7e20, 0.37f, 0.5f}, {1.3, 0x1p33f, 0x1p33f}},
                           halves[] = {{6e4, 0x1p14f, 0x1p14f}, {6e4, -0x1p15f, -0x1p15f}, {6e4, 0x1p15f, 0x1p15f},
                                       {1.3, -0x1p33f, -0x1p33f}, {6e4, 1e33f, 0x1p110f},   {300, -3e8f, -0x1p28f},
                                       {2e-3, 1e14f, 0x1p46f},  {1.3, 0x1p33f, 0x1p33f}};
    for (int i = 0; i < lengths; i++)
        for (int k = 0; k < LENGTH_OF(floats); k++)
            for (int sign = -1; sign <= 1; sign += 2) {
                if (test.small && (i + k + sign / 2 + type + path) % 3) continue;
                const magnitude m = type == TEST_F16 ? halves[k] : floats[k];
                problem p = plain(type, direction, path, inner > 1 ? 2 : 5, cols[i], inner);
                p.special = NEIGHBOURS, p.offset = sign * m.offset, p.scale = direction == FORWARD ? m.scale : m.exact;
                check(&p);
            }
    /* Around the largest products with log2 e whose rounding 2^x can correct. The largest scale x comes last: the sum is against
     * a smaller one. Only of f32 do neighbours differ by less than a float's range there. */
    for (int i = test.small ? 50 : 0; type == TEST_F32 && direction == FORWARD && i < (test.small ? 90 : 160); i++) {
        const float scale[] = {1, 0.7f, 1.4f};
        problem p = plain(type, direction, path, inner > 1 ? 2 : 5, cols[i % 2], inner);
        p.special = NEIGHBOURS, p.where = LAST, p.scale = (i % 2 ? 1.0f : -1.0f) * scale[i % 3];
        p.offset = (double)copysignf(1, p.scale) * exp2(28 + 0.02 * i);
        check(&p);
    }
}

static void huge_rows(int type, int direction, int path)
{
    const int64_t v = 16 / test_type_bytes[type], cols[] = {37, 3 * v + 1, 128 * v, 512 * v, 5003};
    huge_values(type, direction, path, cols, LENGTH_OF(cols), 1);
}

static void huge_columns(int type, int direction, int path)
{
    const int64_t cols[] = {7, 90, 1003};
    for (int inner = 3; inner <= 16; inner += 13) huge_values(type, direction, path, cols, LENGTH_OF(cols), inner);
}

static void options(int type, int direction, int path)
{
    const int64_t cols[] = {1, 33, 700};
    for (int i = 0; i < LENGTH_OF(cols); i++) {
        problem p = plain(type, direction, path, 13, cols[i], 1);
        if (direction == FORWARD) {
            p.no_lse = true;
            check(&p);
            p.no_lse = false, p.no_rounded = true;
            check(&p);
            p.low = false;
            check(&p);
            continue;
        }
        for (p.upstream = UPSTREAM_NULL; p.upstream <= UPSTREAM_WILD; p.upstream++) {
            p.special = NOTHING, p.scale = 0;
            check(&p);
            p.low = !p.low;
            check(&p);
            p.special = MINUS_INF, p.where = EVEN, p.scale = -2;
            check(&p);
            p.where = ALL, p.scale = 0.5f;
            check(&p);
        }
    }
}

static void in_place(int type, int direction, int path)
{
    const int64_t v = 16 / test_type_bytes[type], cols[] = {1, v, 33, 128 * v + 1, 1000 * v + 3};
    if (direction == FORWARD) return;
    for (int i = 0; i < LENGTH_OF(cols) - (test.small ? 1 : 0); i++)
        for (int at = 0; at < 2; at++) {
            problem p = plain(type, direction, path, 3, cols[i], 1);
            p.in_place = true, p.x_at = at;
            check(&p);
            p.outer_stride = cols[i] + (at ? 1 : v);
            check(&p);
        }
}

static void vocabulary(int type, int direction, int path)
{
    problem p = plain(type, direction, path, test.small ? 1 : 3, test.small ? 5003 : 50257, 1);
    check(&p);
    p.special = PEAK, p.where = LAST;
    check(&p);
}

static void empty(int type, int direction, int path)
{
    const int64_t sizes[][2] = {{0, 5}, {0, 0}, {1, 0}, {33, 0}, {0, 50257}};
    for (int i = 0; i < LENGTH_OF(sizes); i++) {
        const problem p = plain(type, direction, path, sizes[i][0], sizes[i][1], 0);
        check(&p);
    }
    /* Tensors without elements may be NULL. */
    lk_logsumexp_args forward = {};
    lk_logsumexp_args backward = {};
    forward.path = backward.path = path;
    forward.cols = backward.cols = 7;
    const lk_status status = call_of[direction][type](direction == FORWARD ? &forward : &backward, test.stream);
    if (!test_that(status == LK_OK)) test_detail("0 rows and NULL tensors: %s, %s", lk_status_string(status), lk_last_error());
    backward.outer = 3, backward.cols = 0;
    const lk_status no_cols = direction == FORWARD ? LK_OK : call_of[BACKWARD][type](&backward, test.stream);
    if (!test_that(no_cols == LK_OK))
        test_detail("0 cols and NULL tensors: %s, %s", lk_status_string(no_cols), lk_last_error());
}

static void graphs(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 5, 1500, 1);
    p.low = false;
    check(&p);
    test_graph(op, &p);
}

static bool backward_alone(int direction, int) { return direction == BACKWARD; }

static void all_rows(void)
{
    static const test_theme themes[] = {{"empty", empty},           {"lengths", lengths},   {"rows", row_counts},
                                   {"strides", row_strides},   {"off by elements", misaligned}, {"scales", scales},
                                   {"special values", specials}, {"offsets of 1e4", offsets}, {"options", options},
                                   {"in place", in_place, backward_alone},     {"vocabulary", vocabulary},
                                   {"huge values", huge_rows},  {"graph", graphs}};
    for (int at = 0; at < COUNTED; at++) {
        const int direction = counted_direction[at], path = counted_path[at];
        if (path == LK_LOGSUMEXP_CLUSTER && !test_clusters()) {
            test_skip("forward cluster", "the device has no clusters");
            continue;
        }
        test_themes(themes, LENGTH_OF(themes), direction, path, direction_name[direction], path_name[path]);
    }
}

/* ---- Cases of columns: inner > 1, strided columns -------------------------------------------------------------------- */

static void column_shapes(int type, int direction, int path)
{
    const int64_t inner[] = {1, 2, 3, 8, 31, 32, 64, 100, 264}, cols[] = {1, 2, 7, 8, 9, 33, 100, 1000};
    for (int i = 0; i < LENGTH_OF(inner); i++)
        for (int j = 0; j < LENGTH_OF(cols); j++) {
            if (test.small && (inner[i] * cols[j] > 3400 || (i + j) % 2)) continue;
            const problem p =
                plain(type, direction, path, inner[i] * cols[j] > 20000 ? 1 : 1 + (i + 2 * j) % 5, cols[j], inner[i]);
            check(&p);
        }
}

/* Nests: packed, columns outermost (a permuted tensor), padded columns, padded outers, columns of a matrix; dx like x, or
 * packed, or off on its own. */
static void column_strides(int type, int direction, int path)
{
    const int64_t v = 16 / test_type_bytes[type], inner[] = {1, 3, 16, 40};
    for (int i = 0; i < LENGTH_OF(inner); i++) {
        if (test.small && i % 2) continue;
        const int64_t n = inner[i], outer = 4, cols = 37;
        const int64_t strides[][4] = {
            {n, outer * n, n, outer * n},  {n, outer * n, 0, 0},          {0, 0, n, outer * n},
            {n + 1, outer * (n + 1), 0, 0}, {0, n + 5, 0, n + 3},         {0, n + v, 0, n + v},
            {cols * n + 8, 0, 0, 0},       {cols * n + 3, 0, cols * n + 7, 0}, {n + 16, 4 * (n + 16), n + 8, 4 * (n + 8)},
            {1, n + 2, 0, 0},              {40 * (n + 5), n + 5, 0, 0},   {0, 0, 40 * (n + 5), n + 5}};
        for (int j = 0; j < LENGTH_OF(strides); j++) {
            problem p = plain(type, direction, path, outer, cols, n);
            p.outer_stride = strides[j][0], p.col_stride = strides[j][1];
            if (direction == BACKWARD) p.dx_outer_stride = strides[j][2], p.dx_col_stride = strides[j][3];
            check(&p);
            p.x_at = j % 2, p.dx_at = j % 3, p.lse_at = 1, p.dlse_at = 3, p.rounded_at = 1;
            check(&p);
        }
    }
}

static void column_values(int type, int direction, int path)
{
    const int64_t inner[] = {3, 16};
    for (int i = 0; i < LENGTH_OF(inner); i++)
        for (int special = 0; special < PLACED; special++)
            for (int where = 0; where < (special ? WHERES : 1); where++) {
                if (test.small && (special + where + i) % 2) continue;
                problem p = plain(type, direction, path, 2, test.small ? 90 : 300, inner[i]);
                p.special = special, p.where = where;
                p.scale = where % 2 ? -0.7f : 2;
                p.offset = special >= PEAK ? 1e4 : 0;
                p.in_place = direction == BACKWARD && where % 3 == 0;
                p.upstream = where % 4;
                p.no_lse = direction == FORWARD && where % 4 == 1, p.no_rounded = direction == FORWARD && where % 4 == 2;
                check(&p);
            }
    problem p = plain(type, direction, path, 1, test.small ? 5003 : 50257, 3); /* clusters in forward: few rows, many columns */
    check(&p);
    p = plain(type, direction, path, 1, test.small ? 3001 : 20011, 16);
    check(&p);
    p = plain(type, direction, path, 3, 0, 5); /* no columns: lse is -inf */
    check(&p);
    p = plain(type, direction, path, 0, 9, 5);
    check(&p);
}

static void all_columns(void)
{
    static const test_theme themes[] = {{"inner shapes", column_shapes}, {"nests", column_strides}, {"inner values", column_values},
                                   {"huge inner values", huge_columns}};
    for (int direction = 0; direction < 2; direction++)
        for (int path = LK_LOGSUMEXP_AUTO; path <= LK_LOGSUMEXP_COLUMN; path += LK_LOGSUMEXP_COLUMN)
            test_themes(themes, LENGTH_OF(themes), direction, path, direction_name[direction], path_name[path]);
}

/* ---- Forward, then backward from its lse; differences; graphs -------------------------------------------------------- */

/* The header's whole bound: the error of lse, |lse| 2^-23, more than for the lse of the reference; with lse_low too that of
 * lse + lse_low, which no offset changes. */
static void forward_backward_of(const problem *p)
{
    const layout l = layout_of(p, 0, 0);
    const int64_t rows = l.outer * l.inner;
    const int bytes = test_type_bytes[p->type];
    test_buffer_size(&x_buffer, (size_t)(span_of(l) * bytes), 0, 0xff);
    test_buffer_size(&dx_buffer, x_buffer.bytes, 0, 0x5a);
    test_buffer_size(&lse_buffer, (size_t)rows * 4, 0, 0x5a);
    test_buffer_size(&low_buffer, (size_t)rows * 4, 0, 0x5a);
    test_buffer_size(&dlse_buffer, (size_t)rows * 4, 0, 0xff);
    fill_x(p, l, test_buffer_host(&x_buffer));
    for (int64_t r = 0; r < rows; r++) ((float *)test_buffer_host(&dlse_buffer))[r] = upstream_of(p, r);
    test_buffer_upload(&x_buffer), test_buffer_upload(&dx_buffer), test_buffer_upload(&lse_buffer),
        test_buffer_upload(&low_buffer), test_buffer_upload(&dlse_buffer);
    lk_logsumexp_args forward = {};
    forward.x = test_buffer_device(&x_buffer), forward.lse = (float *)test_buffer_device(&lse_buffer);
    forward.lse_low = p->low ? (float *)test_buffer_device(&low_buffer) : NULL;
    forward.outer = p->outer, forward.cols = p->cols, forward.inner = p->inner;
    forward.scale = p->scale, forward.path = p->path;
    lk_logsumexp_args backward = {};
    backward.x = forward.x, backward.lse = forward.lse, backward.lse_low = forward.lse_low;
    backward.dlse = (const float *)test_buffer_device(&dlse_buffer), backward.dx = test_buffer_device(&dx_buffer);
    backward.outer = p->outer, backward.cols = p->cols, backward.inner = p->inner;
    backward.scale = p->scale, backward.path = p->path == LK_LOGSUMEXP_CLUSTER ? LK_LOGSUMEXP_AUTO : p->path;
    /* No wait between the two: with programmatic launch the second may start early, and must still see the first's lse. */
    const lk_status first = call_of[FORWARD][p->type](&forward, test.stream);
    const lk_status second = call_of[BACKWARD][p->type](&backward, test.stream);
    const bool ran = launched(p, first ? first : second);
    test_buffer_download(&x_buffer), test_buffer_download(&dx_buffer), test_buffer_download(&lse_buffer),
        test_buffer_download(&low_buffer), test_buffer_download(&dlse_buffer);
    if (!ran) return;
    for (int64_t r = 0; r < rows; r++) {
        const double *z = load_z(p, l, test_buffer_host(&x_buffer), r), lse = reference_lse(z, l.cols);
        const double low = p->low ? (double)((const float *)test_buffer_back(&low_buffer))[r] : 0;
        const float high = ((const float *)test_buffer_back(&lse_buffer))[r];
        /* Or a wrong lse_low, which the limit below is made of, would pass for a small gradient. */
        if (p->low && isfinite(lse) && !test_within(fabs((double)high + low - lse), low_slack(p, z, l.cols)))
            test_detail("row %lld: lse + lse_low is %.9g + %.9g, want %.17g; %s", (long long)r, (double)high, low, lse,
                        describe(p));
        const double extra = p->low ? 3 + 2 * fabs(low) + 0x1p23 * low_slack(p, z, l.cols) : fabs(lse);
        for (int64_t c = 0; c < l.cols; c++) {
            const int64_t at = r / l.inner * l.outer_stride + c * l.col_stride + r % l.inner;
            check_gradient(p, r, c, test_get(p->type, test_buffer_back(&dx_buffer), at), z[c], lse, extra, low);
        }
    }
}

static void forward_backward(int type)
{
    for (int i = 0; i < 4; i++) {
        problem p = plain(type, BACKWARD, LK_LOGSUMEXP_AUTO, 3, i < 2 ? 77 : 1200, i == 1 || i == 3 ? 3 : 1);
        p.offset = i >= 2 ? 30 : 0;
        p.scale = 1.25f;
        p.low = false;
        forward_backward_of(&p);
    }
}

/* With lse_low gradients are right wherever the values lie: with lse alone, at 1e4, they are off by up to 5e-4, with a spread
 * of 1/2 the limit is 2e-6 to 5e-6. */
static void forward_backward_far(int type, int path)
{
    static const float scale[] = {0, 1.25f, -0.7f};
    static const double offset[] = {1e3, -1e4, 1e6};
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 3; k++)
            for (int inner = 1; inner <= 8; inner += 7) {
                if (inner > 1 && path != LK_LOGSUMEXP_AUTO && path != LK_LOGSUMEXP_COLUMN) continue;
                if (type == TEST_F16 && k == 2) continue; /* too large for f16 */
                problem p = plain(type, BACKWARD, path, inner > 1 ? 2 : 8, test.small ? 300 : 1500, inner);
                p.scale = scale[i], p.offset = offset[k], p.spread = 0.5, p.low = true;
                forward_backward_of(&p);
                p.special = STEP, p.where = SPARSE;
                forward_backward_of(&p);
                p.special = CLIFF, p.where = LAST;
                forward_backward_of(&p);
            }
}

/* dx against central differences of the formula in double: their own error is about 1e-10 with this step. */
static void differences(void)
{
    problem p = plain(TEST_F32, BACKWARD, LK_LOGSUMEXP_AUTO, 2, 7, 3);
    p.scale = -1.7f;
    check(&p);
    const layout l = layout_of(&p, 0, 0);
    const double step = 1e-5, scale = (double)p.scale;
    for (int64_t r = 0; r < l.outer * l.inner; r++)
        for (int64_t c = 0; c < l.cols; c++) {
            double *z = (double *)load_z(&p, l, test_buffer_host(&x_buffer), r), middle = z[c];
            z[c] = middle + scale * step;
            const double above = reference_lse(z, l.cols);
            z[c] = middle - scale * step;
            const double below = reference_lse(z, l.cols), want = (double)upstream_of(&p, r) * (above - below) / (2 * step);
            float got;
            memcpy(&got, kept + 4 * (r / l.inner * l.outer_stride + c * l.col_stride + r % l.inner), 4);
            if (!test_within(fabs((double)got - want), 1e-8 + 32 * 0x1p-23 * fabs(want)))
                test_detail("dx[row %lld, col %lld] is %.9g, the difference quotient %.9g; %s", (long long)r, (long long)c,
                            (double)got, want, describe(&p));
        }
}

static void all_sequences(void)
{
    for (int type = 0; type < TEST_TYPES; type++)
        if (test_begin("forward, then backward %s", test_type_name[type])) forward_backward(type), test_finish();
    for (int path = LK_LOGSUMEXP_AUTO; path <= LK_LOGSUMEXP_COLUMN; path++)
        for (int type = 0; type < TEST_TYPES; type++) {
            if (path == LK_LOGSUMEXP_CLUSTER && !test_clusters()) continue;
            if (!test_begin("far values, forward, then backward %s %s", test_type_name[type], path_name[path])) continue;
            forward_backward_far(type, path);
            test_finish();
        }
    if (test_begin("backward f32 auto: central differences")) differences(), test_finish();
}

/* ---- Errors ---------------------------------------------------------------------------------------------------------- */

/* A change to good arguments that makes them bad. Pointers move by bytes, or become NULL with -1; sizes are set if not KEEP. */
#define KEEP INT64_MIN
typedef struct {
    lk_status want, query; /* of the call and of the query, which looks at no pointer */
    const char *field;     /* what lk_last_error must name */
    int x, lse, rounded, dlse, dx, low, dlse_rounded; /* -1: NULL; below: see moved */
    int64_t outer, cols, inner, outer_stride, col_stride, dx_outer_stride, dx_col_stride;
    float scale;
    int path;
} bad_call;

static bad_call good_call(lk_status want, const char *field)
{
    const lk_status query = want == LK_ERR_NULL || want == LK_ERR_ALIGNMENT ? LK_OK : want;
    return {want, query, field, 0, 0, 0, 0, 0, 0, -1, KEEP, KEEP, KEEP, KEEP, KEEP, KEEP, KEEP, 0, 0};
}

static void set_size(int64_t *size, int64_t value)
{
    if (value != KEEP) *size = value;
}

/* A pointer into a buffer; into another where by says so: below -1. */
static void *moved(test_buffer *b, int by)
{
    switch (by) {
    case -1: return NULL;
    case -2: return test_buffer_device(&x_buffer);
    case -3: return (char *)test_buffer_device(&x_buffer) + 32; /* of x's 64 bytes or more */
    case -4: return test_buffer_device(&lse_buffer);
    case -5: return (char *)test_buffer_device(&lse_buffer) + 4;
    case -6: return (char *)test_buffer_device(&x_buffer) + 4;
    }
    return (char *)test_buffer_device(b) + by;
}

static void expect_error(int type, int direction, const bad_call *bad)
{
    test_buffer *const buffers[] = {&x_buffer, &dx_buffer, &lse_buffer, &low_buffer, &rounded_buffer, &dlse_buffer};
    for (int i = 0; i < LENGTH_OF(buffers); i++) test_buffer_size(buffers[i], 4096, 0, 0x3c), test_buffer_upload(buffers[i]);
    lk_logsumexp_args a = {};
    size_t asked = TEST_NOT_ASKED;
    a.x = moved(&x_buffer, bad->x), a.lse = (float *)moved(&lse_buffer, bad->lse);
    a.lse_low = (float *)moved(&low_buffer, bad->low), a.lse_rounded = moved(&rounded_buffer, bad->rounded);
    a.dlse = (float *)moved(&dlse_buffer, bad->dlse), a.dx = moved(&dx_buffer, bad->dx);
    a.dlse_rounded = moved(&dlse_buffer, bad->dlse_rounded);
    a.outer = 4, a.cols = 8, a.inner = 1, a.scale = bad->scale, a.path = bad->path;
    set_size(&a.outer, bad->outer), set_size(&a.cols, bad->cols), set_size(&a.inner, bad->inner);
    set_size(&a.outer_stride, bad->outer_stride), set_size(&a.col_stride, bad->col_stride);
    set_size(&a.dx_outer_stride, bad->dx_outer_stride), set_size(&a.dx_col_stride, bad->dx_col_stride);
    const lk_status status = call_of[direction][type](&a, test.stream);
    test_expect(status, bad->want, bad->field, "lk_logsumexp", direction_name[direction], type);
    const lk_status answer = query_of[direction][type](&a, &asked);
    test_expect_query(answer, bad->query, asked, bad->field);
    if (!test_that(answer || asked == 0)) test_detail("%s: %zu bytes of workspace", bad->field, asked);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int i = 0; i < LENGTH_OF(buffers); i++) test_expect_unwritten(status, buffers[i], "a tensor", bad->field);
}

static void errors(int type, int direction)
{
    const int bytes = test_type_bytes[type];
    const bool back = direction == BACKWARD;
    const int64_t big = (int64_t)1 << 62;
    bad_call bad[96];
    int n = 0;
    bad_call *c;
#define BAD(status, field) (c = &bad[n++], *c = good_call(status, field), c)
    BAD(LK_OK, "nothing")->path = LK_LOGSUMEXP_AUTO;
    BAD(LK_ERR_NULL, "x")->x = -1;
    if (back) {
        BAD(LK_ERR_NULL, "lse")->lse = -1;
        BAD(LK_ERR_NULL, "dx")->dx = -1;
        BAD(LK_OK, "dlse NULL is 1")->dlse = -1;
        BAD(LK_OK, "dlse in T")->dlse = -1, c->dlse_rounded = 0;
        BAD(LK_ERR_VALUE, "dlse and dlse_rounded")->dlse_rounded = 0, c->query = LK_OK;
    } else {
        BAD(LK_ERR_NULL, "every output")->lse = -1, c->rounded = -1, c->low = -1;
        BAD(LK_OK, "lse_low alone")->lse = -1, c->rounded = -1;
        BAD(LK_OK, "lse alone")->rounded = -1, c->low = -1;
        BAD(LK_OK, "lse_rounded alone")->lse = -1, c->low = -1;
        BAD(LK_OK, "lse_rounded and lse_low")->lse = -1;
    }
    BAD(LK_ERR_SHAPE, "outer")->outer = -1;
    BAD(LK_ERR_SHAPE, "cols")->cols = -1;
    BAD(LK_ERR_SHAPE, "inner")->inner = -1;
    BAD(LK_ERR_SHAPE, "outer_stride")->outer_stride = -1;
    BAD(LK_ERR_SHAPE, "col_stride")->col_stride = -1;
    BAD(LK_ERR_SHAPE, "2^62")->outer_stride = big;
    BAD(LK_ERR_SHAPE, "2^62")->col_stride = big;
    BAD(LK_ERR_SHAPE, "2^62")->cols = INT64_MAX;
    BAD(LK_ERR_SHAPE, "2^62")->inner = INT64_MAX;
    BAD(LK_ERR_SHAPE, "2^62")->outer = INT64_MAX, c->cols = 1;
    BAD(LK_ERR_SHAPE, "2^62")->cols = (int64_t)1 << 40, c->inner = (int64_t)1 << 40;
    BAD(LK_ERR_SHAPE, "2^62")->outer = (int64_t)1 << 40, c->inner = (int64_t)1 << 40, c->cols = 0;
    /* x fits, since its rows overlap; lse would have 2^64 + 4 elements. */
    BAD(LK_ERR_SHAPE, "2^62")->outer = 20, c->inner = (big + 1) / 5, c->outer_stride = 1, c->cols = 1;
    if (back) {
        BAD(LK_ERR_SHAPE, "dx_outer_stride")->dx_outer_stride = -1;
        BAD(LK_ERR_SHAPE, "dx_col_stride")->dx_col_stride = -1;
        BAD(LK_ERR_SHAPE, "dx_outer_stride")->dx_outer_stride = big;
        BAD(LK_ERR_SHAPE, "dx_outer_stride")->dx_outer_stride = 7; /* rows of 8 */
        BAD(LK_ERR_SHAPE, "dx_col_stride")->inner = 3, c->dx_col_stride = 2;
        BAD(LK_ERR_SHAPE, "dx_outer_stride")->inner = 3, c->dx_outer_stride = 2, c->dx_col_stride = 12;
        BAD(LK_ERR_SHAPE, "dx_col_stride")->dx_outer_stride = 1, c->dx_col_stride = 3; /* 4 outers between columns need 4 */
        BAD(LK_OK, "dx permuted")->dx_outer_stride = 1, c->dx_col_stride = 4;
        BAD(LK_ERR_SHAPE, "dx_outer_stride must be 0 or 9")->dx = -2, c->outer_stride = 9, c->dx_outer_stride = 8, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "dx_outer_stride must be 0 or 8")->dx = -2, c->dx_outer_stride = 9, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "dx_col_stride must be 0 or 2")->dx = -2, c->col_stride = 2, c->dx_col_stride = 1, c->query = LK_OK;
        BAD(LK_OK, "dx is x, with its gaps")->dx = -2, c->outer_stride = 9;
        BAD(LK_OK, "dx is x, with its columns")->dx = -2, c->col_stride = 2, c->dx_outer_stride = 16;
        BAD(LK_OK, "dx is x")->dx = -2, c->outer_stride = 9, c->dx_outer_stride = 9;
        BAD(LK_OK, "dx is x, packed spelt out")->dx = -2, c->outer_stride = 8, c->col_stride = 1;
        BAD(LK_OK, "what backward does not have")->rounded = 1;
        BAD(LK_OK, "dlse is lse: inputs may be the same")->dlse = -4;
        BAD(LK_ERR_SHAPE, "dx and x overlap")->dx = -3, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "dx and lse overlap")->dx = -4, c->query = LK_OK;
        BAD(LK_OK, "dx and x in each other's gaps")->dx = -3, c->outer_stride = c->dx_outer_stride = 32;
    } else {
        BAD(LK_OK, "x may overlap")->outer_stride = 3;
        BAD(LK_OK, "what forward does not have")->dx = 1, c->dlse = 1, c->dlse_rounded = 1, c->dx_outer_stride = -1;
        BAD(LK_ERR_SHAPE, "lse_low and lse overlap")->low = -5, c->query = LK_OK;
        BAD(bytes == 4 ? LK_OK : LK_ERR_SHAPE, "lse_rounded and lse overlap")->rounded = -4, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "lse and x overlap")->lse = -6, c->query = LK_OK;
    }
    BAD(LK_ERR_VALUE, "scale")->scale = INFINITY;
    BAD(LK_ERR_VALUE, "scale")->scale = -INFINITY;
    BAD(LK_ERR_VALUE, "scale")->scale = NAN;
    BAD(LK_ERR_VALUE, "path")->path = -1;
    BAD(LK_ERR_VALUE, "path")->path = LK_LOGSUMEXP_COLUMN + 1;
    for (int path = LK_LOGSUMEXP_WARP; path <= LK_LOGSUMEXP_CLUSTER; path++) {
        BAD(LK_ERR_PATH, "path")->path = path, c->inner = 2;
        BAD(LK_ERR_PATH, "path")->path = path, c->col_stride = 2;
        if (path != LK_LOGSUMEXP_WARP) /* rows with gaps, and one output: tensors of this size would overlap here */
            BAD(LK_ERR_PATH, "path")->path = path, c->outer = ((int64_t)1 << 27) + 1, c->outer_stride = c->dx_outer_stride = 9,
                c->rounded = c->low = -1;
        if (back) BAD(LK_ERR_PATH, "path")->path = path, c->dx_col_stride = 2, c->dx_outer_stride = 16;
    }
    if (back) BAD(LK_ERR_PATH, "path")->path = LK_LOGSUMEXP_CLUSTER;
    BAD(LK_ERR_ALIGNMENT, "x")->x = 1;
    if (bytes == 4) BAD(LK_ERR_ALIGNMENT, "x")->x = 2;
    BAD(LK_ERR_ALIGNMENT, "lse")->lse = 2;
    BAD(LK_ERR_ALIGNMENT, "lse")->lse = 1;
    BAD(LK_ERR_ALIGNMENT, "lse_low")->low = 2;
    if (back) {
        BAD(LK_ERR_ALIGNMENT, "dlse")->dlse = 2;
        BAD(LK_ERR_ALIGNMENT, "dx")->dx = 1;
    } else {
        BAD(LK_ERR_ALIGNMENT, "lse_rounded")->rounded = 1;
    }
    /* Two rules broken at once: the earlier one speaks. */
    BAD(LK_ERR_NULL, "x")->x = -1, c->outer = -1, c->query = LK_ERR_SHAPE;
    BAD(LK_ERR_NULL, "x")->x = -1, c->scale = NAN, c->query = LK_ERR_VALUE;
    BAD(LK_ERR_SHAPE, "cols")->cols = -1, c->scale = NAN;
    BAD(LK_ERR_SHAPE, "cols")->cols = -1, c->lse = 2;
    BAD(LK_ERR_SHAPE, "inner")->inner = -1, c->path = 9;
    BAD(LK_ERR_VALUE, "scale")->scale = NAN, c->path = LK_LOGSUMEXP_WARP, c->inner = 2;
    BAD(LK_ERR_VALUE, "scale")->scale = NAN, c->x = 1;
    BAD(LK_ERR_VALUE, "path")->path = 9, c->lse = 2;
    BAD(LK_ERR_PATH, "path")->path = LK_LOGSUMEXP_BLOCK, c->inner = 2, c->x = 1;
    BAD(LK_ERR_PATH, "path")->path = LK_LOGSUMEXP_WARP, c->inner = 2, c->lse = 2;
    if (back) BAD(LK_ERR_PATH, "path")->path = LK_LOGSUMEXP_CLUSTER, c->dx = 1;
    if (back) BAD(LK_ERR_SHAPE, "dx")->dx = -2, c->dx_outer_stride = 9, c->scale = NAN, c->query = LK_ERR_VALUE;
#undef BAD
    if (!test_that(n <= LENGTH_OF(bad))) abort();
    for (int i = 0; i < n; i++) expect_error(type, direction, &bad[i]);

    char op[64];
    snprintf(op, sizeof op, "lk_logsumexp_%s_workspace_bytes_%s", direction_name[direction], test_type_name[type]);
    size_t asked = 12345;
    const lk_status status = call_of[direction][type](NULL, test.stream), query = query_of[direction][type](NULL, &asked);
    if (!test_that(status == LK_ERR_NULL && query == LK_ERR_NULL && asked == 12345 && strstr(lk_last_error(), op) &&
                   strstr(lk_last_error(), "args")))
        test_detail("args NULL: %s, %s, \"%s\"", lk_status_string(status), lk_status_string(query), lk_last_error());
}

static void status_strings(void)
{
    static const lk_status codes[] = {LK_OK,            LK_ERR_NULL,      LK_ERR_SHAPE,  LK_ERR_VALUE,         LK_ERR_PATH,
                                      LK_ERR_ALIGNMENT, LK_ERR_WORKSPACE, LK_ERR_DEVICE, cudaErrorInvalidValue};
    static const char *const names[] = {"LK_OK",            "LK_ERR_NULL",      "LK_ERR_SHAPE",  "LK_ERR_VALUE",         "LK_ERR_PATH",
                                        "LK_ERR_ALIGNMENT", "LK_ERR_WORKSPACE", "LK_ERR_DEVICE", "cudaErrorInvalidValue"};
    for (int i = 0; i < LENGTH_OF(codes); i++)
        if (!test_that(!strcmp(lk_status_string(codes[i]), names[i])))
            test_detail("%d is \"%s\", want \"%s\"", codes[i], lk_status_string(codes[i]), names[i]);
    if (!test_that(lk_status_string(-1000) != NULL)) test_detail("-1000 is NULL");
}

#if defined(LK_SIMT)
/* What code of an older architecture left out is not relied on; code for newer ones, or from before 8.0, is told of in words. */
static void other_code(void)
{
    static const struct {
        const char *code;
        lk_status automatic, cluster;
        const char *word;
    } cases[] = {{"75", LK_ERR_DEVICE, LK_ERR_DEVICE, "at least 8.0"},
                 {"80", LK_OK, LK_ERR_PATH, "sm_90"},
                 {"90", LK_OK, LK_OK, ""},
                 {"100", LK_ERR_DEVICE, LK_ERR_DEVICE, "-gencode"}};
    const char *const own = getenv("SIMT_CODE");
    char kept[16];
    snprintf(kept, sizeof kept, "%s", own ? own : "90");
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        setenv("SIMT_CODE", cases[i].code, 1), lk_code_known.id = -1;
        lk_logsumexp_args nothing = {};
        nothing.cols = nothing.inner = 1;
        const lk_status automatic = lk_logsumexp_forward_bf16(&nothing, test.stream);
        nothing.path = LK_LOGSUMEXP_CLUSTER;
        const lk_status cluster = lk_logsumexp_forward_bf16(&nothing, test.stream);
        const bool said = strstr(lk_last_error(), cases[i].word) != NULL;
        if (!test_that(automatic == cases[i].automatic && cluster == cases[i].cluster && said))
            test_detail("sm_%s: %s, by cluster %s: \"%s\"", cases[i].code, lk_status_string(automatic),
                        lk_status_string(cluster), lk_last_error());
    }
    setenv("SIMT_CODE", kept, 1), lk_code_known.id = -1;
}
#endif

static void all_errors(void)
{
    if (test_begin("lk_status_string")) status_strings(), test_finish();
#if defined(LK_SIMT)
    if (test_begin("code of other architectures")) other_code(), test_finish();
#endif
    for (int direction = 0; direction < 2; direction++)
        for (int type = 0; type < TEST_TYPES; type++)
            if (test_begin("%s %s: errors", direction_name[direction], test_type_name[type]))
                errors(type, direction), test_finish();
}

/* ---- The device type lk_lse and the functions beneath it ------------------------------------------------------------- */

/* Thread t takes the states of values[0, cut) and values[cut, n) with cut = t, one value or four at a time, and merges them. */
typedef struct {
    const float *values;
    float *out; /* 8 a thread */
    int n;
} lse_plan;

LK_KERNEL void lse_kernel(lse_plan p)
{
    const int cut = (int)threadIdx.x;
    lk_lse left = lk_lse_empty(), right = lk_lse_empty();
    for (int i = 0; i < cut && i < p.n; i++) {
        const float one[1] = {p.values[i]};
        left = lk_lse_add(left, one);
    }
    int i = cut;
    for (; i + 4 <= p.n; i += 4) {
        const float four[4] = {p.values[i], p.values[i + 1], p.values[i + 2], p.values[i + 3]};
        right = lk_lse_add(right, four);
    }
    for (; i < p.n; i++) {
        const float one[1] = {p.values[i]};
        right = lk_lse_add(right, one);
    }
    const lk_lse nothing = lk_lse_merge(lk_lse_empty(), lk_lse_empty()), alone = lk_lse_merge(lk_lse_empty(), left);
    const lk_lse warp = lk_lse_warp(cut < 16 ? left : lk_lse_empty(), 16);
    float *out = p.out + 8 * cut;
    out[0] = lk_lse_log(lk_lse_merge(left, right));
    out[1] = lk_lse_log(lk_lse_merge(right, left));
    out[2] = lk_lse_log(nothing);
    out[3] = nothing.sum;
    out[4] = alone.max == left.max && (alone.sum == left.sum || left.sum != left.sum) ? 1.0f : 0.0f;
    out[5] = lk_lse_log(left);
    out[6] = lk_lse_log(lk_lse_merge(nothing, lk_lse_merge(right, lk_lse_merge(left, nothing))));
    out[7] = lk_lse_log(warp);
}

static void lse_states(int kind)
{
    static const char *const kinds[] = {"numbers", "1e4", "all -inf", "half -inf", "one +inf", "one nan", "-1e30 and 1e30"};
    enum { N = 31, THREADS = 32 };
    double z[N];
    test_buffer_size(&x_buffer, N * 4, 0, 0xff);
    test_buffer_size(&lse_buffer, THREADS * 8 * 4, 0, 0x5a);
    float *values = (float *)test_buffer_host(&x_buffer);
    uint64_t random = 99;
    for (int i = 0; i < N; i++) {
        values[i] = (float)(3 * test_uniform(&random)) + (kind == 1 ? 1e4f : 0);
        if (kind == 2 || (kind == 3 && i < 16)) values[i] = -INFINITY;
        if (kind == 4 && i == 17) values[i] = INFINITY;
        if (kind == 5 && i == 17) values[i] = NAN;
        if (kind == 6) values[i] = i % 3 ? -1e30f : 1e30f;
        z[i] = (double)values[i];
    }
    test_buffer_upload(&x_buffer), test_buffer_upload(&lse_buffer);
    const lse_plan plan = {(const float *)test_buffer_device(&x_buffer), (float *)test_buffer_device(&lse_buffer), N};
    TEST_CUDA(lk_launch(lse_kernel, 1, THREADS, 0, test.stream, plan));
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    test_buffer_download(&x_buffer), test_buffer_download(&lse_buffer);
    const float *out = (const float *)test_buffer_back(&lse_buffer);
    const double whole = reference_lse(z, N), slack = forward_slack(z, N);
    for (int cut = 0; cut < THREADS; cut++, out += 8) {
        const double left = reference_lse(z, cut < N ? cut : N);
        const double want[] = {whole, whole, -INFINITY, 0, 1, left, whole};
        for (int i = 0; i < LENGTH_OF(want); i++)
            if (!test_near(TEST_F32, out[i], want[i], i == 2 || i == 3 || i == 4 ? 0 : slack))
                test_detail("%s, cut at %d, result %d is %.9g, want %.9g", kinds[kind], cut, i, (double)out[i], want[i]);
        /* The first 16 lanes hold the states of prefixes of 0 to 15 values: a team's merge counts value i 15 - i times. */
        double max = -INFINITY, sum = 0;
        for (int i = 0; i < 15; i++) max = fmax(max, z[i]);
        if (isinf(max)) max = 0;
        for (int i = 0; i < 15; i++) sum += (15 - i) * exp(z[i] - max);
        const double team = cut < 16 ? max + log(sum) : -INFINITY;
        if (!test_near(TEST_F32, out[7], team, slack))
            test_detail("%s, lane %d of a team of 16 is %.9g, want %.9g", kinds[kind], cut, (double)out[7], team);
    }
}

/* Slices of one row by the launcher, merged by hand: the sum over both is the whole. */
static void lse_slices(void)
{
    const int64_t cols = 2000, cut = 777;
    const problem p = plain(TEST_F32, FORWARD, LK_LOGSUMEXP_AUTO, 1, cols, 1);
    check(&p);
    float whole;
    memcpy(&whole, kept, 4);
    const layout l = layout_of(&p, 0, 0);
    const double *z = load_z(&p, l, test_buffer_host(&x_buffer), 0), slack = forward_slack(z, cols);
    const double halves[2] = {reference_lse(z, cut), reference_lse(z + cut, cols - cut)};
    if (!test_near(TEST_F32, whole, reference_lse(halves, 2), slack))
        test_detail("the whole is %.9g, its slices give %.9g", (double)whole, reference_lse(halves, 2));
}

/* Every thread of every kind of team gets the state of its row. */
enum { TEAM_THREADS = 64, TEAM_ROWS = 5, TEAM_MOST = 8 * TEAM_THREADS };
typedef struct {
    const float *x; /* [TEAM_ROWS, cols] */
    float *out;     /* [TEAM_ROWS, threads of a row] */
    int64_t cols;
    lk_team team;
} team_plan;

template <int KIND, int THREADS> LK_KERNEL void team_kernel(team_plan p)
{
    const lk_row<float> row = lk_row_of<KIND, THREADS>(p.team, p.x, p.cols, TEAM_ROWS, p.cols);
    LK_SHARED(lk_lse_inbox<TEAM_THREADS>, inbox, [1]);
    lk_vec<float> raw[2];
    lk_inbox_begin<KIND, true>(inbox);
    lk_griddepcontrol_wait();
    lk_row_load(raw, row);
    const lk_lse s = lk_lse_team<KIND, true>(inbox, lk_lse_read(raw, row, 1.0f));
    if (row.there) p.out[(row.number << row.size_log2) + row.rank] = lk_lse_log(s);
}

static void lse_teams(int kind, int64_t cols)
{
    void (*const kernels[])(team_plan) = {team_kernel<LK_TEAM_LANES, TEAM_THREADS>, team_kernel<LK_TEAM_WARP, 0>,
                                          team_kernel<LK_TEAM_BLOCK, TEAM_THREADS>, team_kernel<LK_TEAM_CLUSTER, 0>,
                                          team_kernel<LK_TEAM_ANY, TEAM_THREADS>};
    const int64_t sizes[] = {4, 32, TEAM_THREADS, 4 * TEAM_THREADS, test_clusters() ? TEAM_MOST : TEAM_THREADS};
    lk_device device = {};
    TEST_CUDA(lk_current_device(&device));
    test_buffer_size(&x_buffer, (size_t)(TEAM_ROWS * cols + 1) * 4, 0, 0xff);
    test_buffer_size(&lse_buffer, TEAM_ROWS * TEAM_MOST * 4, 0, 0x5a);
    float *x = (float *)test_buffer_host(&x_buffer) + 1;
    double *z = (double *)calloc((size_t)cols, sizeof(double));
    uint64_t random = 7;
    for (int64_t i = 0; i < TEAM_ROWS * cols; i++) x[i] = (float)(3 * test_uniform(&random));
    test_buffer_upload(&x_buffer), test_buffer_upload(&lse_buffer);
    const team_plan plan = {(const float *)test_buffer_device(&x_buffer) + 1, (float *)test_buffer_device(&lse_buffer), cols,
                            lk_team_of(TEAM_ROWS, sizes[kind], sizes[kind], TEAM_THREADS)};
    test_that(!lk_launch_pdl("lse_teams", &device, kernels[kind], plan.team.grid, plan.team.cluster, plan.team.threads, 0,
                             test.stream, plan));
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    test_buffer_download(&x_buffer), test_buffer_download(&lse_buffer);
    const float *out = (const float *)test_buffer_back(&lse_buffer);
    for (int row = 0; row < TEAM_ROWS; row++) {
        for (int64_t i = 0; i < cols; i++) z[i] = (double)x[row * cols + i];
        for (int64_t i = 0; i < sizes[kind]; i++) {
            const float got = out[row * sizes[kind] + i];
            if (!test_near(TEST_F32, got, reference_lse(z, (int)cols), forward_slack(z, (int)cols)))
                test_detail("team of kind %d, row %d of %lld, thread %lld: %.9g", kind, row, (long long)cols, (long long)i,
                            (double)got);
        }
    }
    free(z);
}

typedef struct {
    const float *in;
    float *logs, *exps;
    int n;
} mathematics_plan;

LK_KERNEL void mathematics_kernel(mathematics_plan p)
{
    const int i = (int)(blockIdx.x * 256 + threadIdx.x);
    if (i >= p.n) return;
    p.logs[i] = lk_lse_log({0.0f, p.in[i]});
    p.exps[i] = lk_exp(p.in[i]);
}

/* lk_lse_log of a sum against 0 within 2 ulp of its logarithm, near 1 too; lk_exp within (|x| + 2) 2^-23. */
static void mathematics(bool logarithm)
{
    const int n = test.small ? 2000 : 100000;
    test_buffer_size(&x_buffer, (size_t)n * 4, 0, 0xff);
    test_buffer_size(&lse_buffer, (size_t)n * 4, 0, 0x5a);
    test_buffer_size(&dlse_buffer, (size_t)n * 4, 0, 0x5a);
    float *in = (float *)test_buffer_host(&x_buffer);
    uint64_t random = 5;
    for (int i = 0; i < n; i++) {
        if (!logarithm) in[i] = (float)(87 * test_uniform(&random));
        else if (i % 3 == 0) in[i] = 1 + (float)(0.3 * test_uniform(&random));
        else in[i] = test_bits_float(0x00800000u + (uint32_t)test_below(&random, 0x7f000000));
    }
    const float edge[] = {0, 1, INFINITY, NAN, 0x1p-126f, 0x1.fffffep127f, 0x1.000002p0f, 0x1.fffffep-1f};
    for (int i = 0; i < (logarithm ? 8 : 4); i++) in[i] = edge[i];
    if (!logarithm) in[4] = -INFINITY;
    test_buffer_upload(&x_buffer), test_buffer_upload(&lse_buffer), test_buffer_upload(&dlse_buffer);
    const mathematics_plan plan = {(const float *)test_buffer_device(&x_buffer), (float *)test_buffer_device(&lse_buffer),
                                   (float *)test_buffer_device(&dlse_buffer), n};
    TEST_CUDA(lk_launch(mathematics_kernel, (n + 255) / 256, 256, 0, test.stream, plan));
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    test_buffer_download(&x_buffer), test_buffer_download(&lse_buffer), test_buffer_download(&dlse_buffer);
    for (int i = 0; i < n; i++) {
        const double x = (double)in[i], want = logarithm ? log(x) : exp(x);
        const float got = ((const float *)test_buffer_back(logarithm ? &lse_buffer : &dlse_buffer))[i];
        /* test_near allows half an ulp besides. */
        double slack = logarithm ? 3 * test_half_ulp(TEST_F32, want) : (fabs(x) + 2) * 0x1p-23 * want;
        if (!isfinite(want) || want == 0) slack = 0;
        if (!test_near(TEST_F32, got, want, slack))
            test_detail("of %.9g (0x%x) is %.9g, want %.9g", x, test_float_bits(in[i]), (double)got, want);
    }
}

typedef struct {
    const float *max;
    float *lse; /* and what it was rounded by behind it */
    int n;
} join_plan;

LK_KERNEL void join_kernel(join_plan p)
{
    const int i = (int)(blockIdx.x * 256 + threadIdx.x);
    if (i < p.n) p.lse[i] = lk_lse_log({p.max[i], ldexpf(1.0f, i % 41 - 20)}, &p.lse[p.n + i]);
}

/* max + k log 2, with max near -k log 2 or anywhere else: rounded once. lk_lse_join adds k log 2 in two parts, of which the
 * lower one is within k 2^-45 and is rounded to 2^-24 k 1.5e-6; so is what the upper one's addition leaves over, that is low,
 * at most 2^-24 (|max| + |k log 2|), to 2^-24 of itself. */
static void joined(void)
{
    const int n = 41 * 200;
    test_buffer_size(&x_buffer, n * 4, 0, 0xff);
    test_buffer_size(&lse_buffer, 2 * n * 4, 0, 0x5a);
    float *max = (float *)test_buffer_host(&x_buffer);
    uint64_t random = 11;
    for (int i = 0; i < n; i++) {
        static const double size[] = {0x1p-20, 0x1p-8, 1, 30, 1e4};
        max[i] = (float)((i % 3 ? 0 : -log(2.0) * (i % 41 - 20)) + size[i / 41 % 5] * test_uniform(&random));
    }
    test_buffer_upload(&x_buffer), test_buffer_upload(&lse_buffer);
    const join_plan plan = {(const float *)test_buffer_device(&x_buffer), (float *)test_buffer_device(&lse_buffer), n};
    TEST_CUDA(lk_launch(join_kernel, (n + 255) / 256, 256, 0, test.stream, plan));
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    test_buffer_download(&x_buffer), test_buffer_download(&lse_buffer);
    for (int i = 0; i < n; i++) {
        const double k = i % 41 - 20, want = (double)max[i] + k * log(2.0);
        const float *got = (const float *)test_buffer_back(&lse_buffer) + i, low = got[n];
        const double slack = fabs(k) * (0x1p-45 + 0x1p-23 * 1.5e-6) + 0x1p-47 * (fabs((double)max[i]) + fabs(k));
        if (!test_near(TEST_F32, *got, want, slack))
            test_detail("%.9g + %g log 2 is %.9g, want %.17g +- %.3g", (double)max[i], k, (double)*got, want, slack);
        if (!test_within(fabs((double)*got + (double)low - want), slack))
            test_detail("%.9g + %g log 2 is %.9g + %.9g, want %.17g +- %.3g", (double)max[i], k, (double)*got, (double)low,
                        want, slack);
    }
}

static void all_states(void)
{
    if (test_begin("lk_lse_log: powers of two")) joined(), test_finish();
    for (int kind = 0; kind < 7; kind++)
        if (test_begin("lk_lse: values %d", kind)) lse_states(kind), test_finish();
    if (test_begin("lk_lse: two slices")) lse_slices(), test_finish();
    for (int kind = LK_TEAM_LANES; kind <= LK_TEAM_ANY; kind++)
        if ((kind != LK_TEAM_CLUSTER || test_clusters()) && test_begin("lk_lse: team of kind %d", kind))
            lse_teams(kind, 3), lse_teams(kind, 1501), test_finish();
    if (test_begin("lk_lse_log")) mathematics(true), test_finish();
    if (test_begin("lk_exp")) mathematics(false), test_finish();
}

/* ---- Long rows: the sum's own rounding ------------------------------------------------------------------------------- */

/* Many equal terms that are no round number: a running float sum loses the same fraction at each step, and after enough of
 * them everything. */
static void all_long(void)
{
    for (int at = 0; at < COUNTED; at++) {
        const int path = counted_path[at];
        if (counted_direction[at] == BACKWARD || path == LK_LOGSUMEXP_AUTO || (path == LK_LOGSUMEXP_CLUSTER && !test_clusters()))
            continue;
        for (int type = 0; type < TEST_TYPES; type++) {
            if (!test_begin("forward %s %s: long rows", test_type_name[type], path_name[path])) continue;
            problem p = plain(type, FORWARD, path, 1, test.small ? 20000 : 1000000, 1);
            p.special = PEAK, p.where = SPARSE; /* so that every thread has seen a maximum of which the rest is a fraction */
            check(&p);
            p.special = NOTHING;
            check(&p);
            test_finish();
        }
    }
}

/* ---- Random draws ---------------------------------------------------------------------------------------------------- */

static int64_t draw_of(uint64_t *random, const int64_t *list, int n)
{
    return list[test_below(random, n)];
}

static problem draw(uint64_t seed)
{
    static const int64_t lengths_drawn[] = {1,  2,  3,  4,   5,   7,   8,   9,    15,   16,   17,  31,
                                            33, 63, 65, 127, 129, 255, 257, 1000, 1023, 1025, 2049};
    static const int64_t inners_drawn[] = {2, 3, 4, 7, 8, 16, 24, 31, 33, 64, 100, 264};
    static const float scales_drawn[] = {1, -1, 0.37f, -3, 1e-3f, 50, -0.01f};
    uint64_t state = test_hash(seed), *const r = &state;
    const int at = (int)test_below(r, COUNTED);
    int path = counted_path[at];
    if (path == LK_LOGSUMEXP_CLUSTER && !test_clusters()) path = LK_LOGSUMEXP_BLOCK;
    problem p = plain((int)test_below(r, 3), counted_direction[at], path, 0, 0, 1);
    const bool back = p.direction == BACKWARD;
    const int vec = 16 / test_type_bytes[p.type];
    p.seed = seed;
    if (path == LK_LOGSUMEXP_AUTO || path == LK_LOGSUMEXP_COLUMN)
        if (test_below(r, 2)) p.inner = draw_of(r, inners_drawn, LENGTH_OF(inners_drawn));
    p.cols = test_below(r, 3) ? 1 + test_below(r, 40) : draw_of(r, lengths_drawn, LENGTH_OF(lengths_drawn));
    if (p.inner == 1 && !test.small && test_below(r, 40) == 0) p.cols = 1 + test_below(r, 40000);
    p.outer = 1 + test_below(r, p.cols * p.inner > 3000 ? 3 : p.cols * p.inner > 100 ? 9 : 70);
    if (test_below(r, 25) == 0) p.cols = 0;
    if (test_below(r, 25) == 0) p.outer = 0;
    const int64_t inner = p.inner, cols = p.cols, outer = p.outer;
    if (p.inner == 1 && test_below(r, 4) == 0) p.inner = 0;

    for (int which = 0; which < (back ? 2 : 1); which++) {
        int64_t outer_stride = 0, col_stride = 0;
        const int64_t pad = test_below(r, 2) ? vec * (1 + test_below(r, 3)) : 1 + test_below(r, 9);
        const bool nest = p.path == LK_LOGSUMEXP_AUTO || p.path == LK_LOGSUMEXP_COLUMN;
        switch (test_below(r, nest ? 7 : 5)) {
        case 0: break;
        case 1: outer_stride = cols * inner, col_stride = inner; break;
        case 2: outer_stride = cols * inner + pad; break;
        case 3: outer_stride = (cols * inner + vec - 1) / vec * vec + vec; break;
        case 4: outer_stride = which ? 0 : 1 + test_below(r, cols * inner + 1); break; /* x's rows may overlap */
        case 5: outer_stride = inner, col_stride = outer * inner; break;
        case 6: outer_stride = inner + pad, col_stride = (outer > 0 ? outer : 1) * (inner + pad); break;
        }
        if (which) p.dx_outer_stride = outer_stride, p.dx_col_stride = col_stride;
        else p.outer_stride = outer_stride, p.col_stride = col_stride;
    }
    if (test_below(r, 2)) p.x_at = (int)test_below(r, vec);
    p.dx_at = test_below(r, 2) ? p.x_at : (int)test_below(r, vec);
    if (test_below(r, 3) == 0) p.lse_at = 1 + (int)test_below(r, 3);
    if (test_below(r, 3) == 0) p.dlse_at = 1 + (int)test_below(r, 3);
    if (test_below(r, 3) == 0) p.rounded_at = 1 + (int)test_below(r, vec - 1);
    if (back) p.typed = test_below(r, 3) == 0;
    if (test_below(r, 2)) p.scale = scales_drawn[test_below(r, LENGTH_OF(scales_drawn))];
    if (!back) p.no_lse = test_below(r, 5) == 0;
    p.low = test_below(r, 2) == 0;
    if (!back && !p.no_lse) p.no_rounded = test_below(r, 4) == 0;
    /* Overlapping x cannot be written in place; layout equal to packed is the only check needed here. */
    if (back && test_below(r, 4) == 0) {
        const layout l = layout_of(&p, p.outer_stride, p.col_stride);
        const int64_t column_span = (l.cols > 0 ? l.cols - 1 : 0) * l.col_stride + l.inner;
        const int64_t outer_span = (l.outer > 0 ? l.outer - 1 : 0) * l.outer_stride;
        p.in_place = l.outer_stride >= column_span || l.col_stride >= outer_span + l.inner;
    }
    p.upstream = test_below(r, 2) ? UPSTREAM_RANDOM : (int)test_below(r, 4);
    if (test_below(r, 2)) p.special = (int)test_below(r, PLACED), p.where = (int)test_below(r, WHERES);
    if (test_below(r, 8) == 0) p.offset = test_below(r, 2) ? 1e4 : -1e4;
    if (test_below(r, 8) == 0) p.spread = 0;
    if (test_below(r, 12) == 0) {
        p.special = NEIGHBOURS, p.scale = test_below(r, 2) ? 0 : -1;
        p.offset = (test_below(r, 2) ? 1 : -1) * (p.type == TEST_F16 ? 6e4 : 1.3e10);
    }
    return p;
}

static void fuzz(void)
{
    const long n = test_fuzz_begin(&counts, 200, 60);
    test_draws(draw, check, n);
    test_fuzz_end(&counts, possible, n);
}

/* ---- On the GPU only: beyond 2^31 elements, and a busy device -------------------------------------------------------- */

#if !defined(LK_SIMT)

/* Forward and backward in place over one shape and path; sampled rows are recomputed on the host. */
static void huge(int64_t outer, int64_t cols, int64_t inner, int path, int64_t longest_checked)
{
    const int64_t n = outer * cols * inner, rows = outer * inner;
    lk_bf16 *const x = (lk_bf16 *)test_huge_allocate(n * 2);
    float *const lse = (float *)test_huge_allocate(rows * 4);
    test_huge_fill(x, n, 0);
    TEST_CUDA(cudaMemsetAsync(lse, 0xc2, (size_t)rows * 4, test.stream)); /* -97 */
    problem p = plain(TEST_BF16, FORWARD, path, outer, cols, inner);
    p.upstream = UPSTREAM_NULL;
    lk_logsumexp_args forward = {};
    forward.x = x, forward.lse = lse, forward.outer = outer, forward.cols = cols, forward.inner = inner, forward.path = path;
    bool ran = launched(&p, lk_logsumexp_forward_bf16(&forward, test.stream));
    enum { SAMPLES = 24 };
    static int64_t sample[SAMPLES];
    static double want[SAMPLES];
    uint64_t random = (uint64_t)n;
    for (int s = 0; ran && s < SAMPLES; s++) {
        const int64_t chosen[3] = {rows - 1, 0, rows / 2}, row = s < 3 ? chosen[s] : test_below(&random, rows);
        sample[s] = row;
        if (s > 2 && cols > longest_checked) {
            sample[s] = -1;
            continue;
        }
        /* There are 256 values: the sum over the columns is one over the values with how often each occurs. */
        int64_t often[256] = {};
        double z[256];
        for (int64_t c = 0; c < cols; c++)
            often[(int)(32 * (test_huge_value(row / inner * cols * inner + c * inner + row % inner) + 4))]++;
        for (int v = 0; v < 256; v++) z[v] = v / 32.0 - 4 + log((double)often[v]);
        want[s] = reference_lse(z, 256);
        const float got = test_huge_get(TEST_F32, lse, row);
        if (!test_near(TEST_F32, got, want[s], 8 * 0x1p-24 * (4 + log((double)cols) + 1)))
            test_detail("lse[%lld] is %.9g, want %.9g; %s", (long long)row, (double)got, want[s], describe(&p));
    }
    if (path != LK_LOGSUMEXP_CLUSTER && ran) {
        p.direction = BACKWARD;
        lk_logsumexp_args backward = {};
        backward.x = x, backward.lse = lse, backward.dx = x, backward.outer = outer, backward.cols = cols,
        backward.inner = inner, backward.path = path;
        ran = launched(&p, lk_logsumexp_backward_bf16(&backward, test.stream));
        for (int s = 0; ran && s < SAMPLES; s++)
            for (int k = 0; k < 64 && sample[s] >= 0; k++) {
                const int64_t row = sample[s], c = k == 0 ? cols - 1 : k == 1 ? 0 : test_below(&random, cols);
                const int64_t at = row / inner * cols * inner + c * inner + row % inner;
                check_gradient(&p, row, c, test_huge_get(TEST_BF16, x, at), (double)test_huge_value(at), want[s],
                               fabs(want[s]) + 40, 0);
            }
    }
    test_huge_free();
}

static void busy(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 700, 3001, 1);
    p.low = false;
    check(&p); /* leaves its bits in kept */
    test_busy(op, &p);
}

static void all_huge(void)
{
    typedef struct {
        int64_t outer, cols, inner;
        int path;
    } huge_case;
    static const huge_case cases[] = {
        {70000, 32768, 1, LK_LOGSUMEXP_AUTO},          {70000, 32768, 1, LK_LOGSUMEXP_WARP},
        {70000, 32768, 1, LK_LOGSUMEXP_BLOCK},         {70000, 32768, 1, LK_LOGSUMEXP_CLUSTER},
        {70000, 32768, 1, LK_LOGSUMEXP_COLUMN},        {1, 70001, 32768, LK_LOGSUMEXP_AUTO},
        {3, (1 << 30) + 5, 1, LK_LOGSUMEXP_BLOCK},     {3, (1 << 30) + 5, 1, LK_LOGSUMEXP_CLUSTER},
        {3, (1 << 30) + 5, 1, LK_LOGSUMEXP_WARP},      {3, (1 << 30) + 5, 1, LK_LOGSUMEXP_COLUMN},
        {(1ll << 31) + 77, 1, 1, LK_LOGSUMEXP_AUTO},   {(1ll << 31) + 77, 1, 1, LK_LOGSUMEXP_WARP},
        {(1ll << 31) + 77, 1, 1, LK_LOGSUMEXP_COLUMN}, {1, 1, (1ll << 31) + 80, LK_LOGSUMEXP_COLUMN},
        {2, (1ll << 31) + 9, 1, LK_LOGSUMEXP_AUTO},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        const huge_case c = cases[i];
        if (c.path == LK_LOGSUMEXP_CLUSTER && !test_clusters()) continue;
        if (!test_begin("huge: %lld x %lld x %lld %s", (long long)c.outer, (long long)c.cols, (long long)c.inner,
                        path_name[c.path]))
            continue;
        huge(c.outer, c.cols, c.inner, c.path, 1 << 20);
        test_finish();
    }
    static const test_theme held = {"half of the SMs held", busy};
    for (int at = 0; at < COUNTED; at++) {
        const int direction = counted_direction[at], path = counted_path[at];
        if (path == LK_LOGSUMEXP_CLUSTER && !test_clusters()) continue;
        test_themes(&held, 1, direction, path, direction_name[direction], path_name[path]);
    }
}

#endif

/* ---------------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    test_start(argc, argv);
    all_errors();
    all_states();
    all_rows();
    all_columns();
    all_sequences();
    all_long();
    TEST_HUGE(all_huge);
    test_all_ran(&counts, possible);
    fuzz();
    return test_end();
}
