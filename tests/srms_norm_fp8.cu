// SPDX-License-Identifier: MIT
/* tests/srms_norm_fp8.cu - lk/srms_norm_fp8.cuh against its header's formula in double, on the GPU or on the simulator.
 *
 * As in tests/srms_norm.cu each checked call runs twice, over different poison, and must give the same bits; bytes that are not
 * outputs must not change; most options are drawn. Limits, in 2^-24 of the magnitudes of the terms, besides half an ulp:
 *   residual_out      the rounding of the float s, bit for bit
 *   rstd, y           8 and 10, y with weight_offset 12, as in srms_norm
 *   amax              as y, of which it is one; a scale 2 more, for the quotient. A power of two may be the other one where y's
 *                     error reaches its limit
 *   q                 the rounding of y / scale with y as above, the scale that the call gave, and 3 for the quotient: so it is one
 *                     of two neighbours where the interval has a tie in it, and else is exact
 * Where T is f32 and y is given, amax, scales and q follow from y alone: bit for bit; q where its scale is a power of two. Next to an
 * infinity or a NaN of y the scale is NaN, and so are all q that have it.
 */
#include "lk/srms_norm_fp8.cuh"

#include "tests/test.h"

TEST_DEFINE(SRMS_NORM_FP8)

typedef lk_status (*call)(const lk_srms_norm_fp8_args *, cudaStream_t);
typedef lk_status (*query)(const lk_srms_norm_fp8_args *, size_t *);
static const call call_of[TEST_TYPES] = TEST_OF_TYPES(lk_srms_norm_fp8_forward);
static const query query_of[TEST_TYPES] = TEST_OF_TYPES(lk_srms_norm_fp8_forward_workspace_bytes);

enum { PATHS = 4, TRANSPOSED = 3 }; /* the first three are those of the args */
static const char *const path_name[PATHS] = {"auto", "warp", "block", "transposed"};
enum { TENSOR, ROW, BLOCK, MX, SCALINGS };
static const char *const scaling_name[SCALINGS] = {"tensor", "row", "block", "mx"};

enum { X, RESIDUAL, WEIGHT, TENSOR_SCALE, RESIDUAL_OUT, RSTD, Y, AMAX, Q, SCALE, Q_T, SCALE_T, TENSORS };
static const char *const tensor_name[TENSORS] = {"x", "residual", "weight", "tensor_scale", "residual_out", "rstd", "y",
                                                 "amax", "q", "scale", "q_transposed", "transposed_scale"};
enum { BYTE = TEST_TYPES }; /* the type of 8 bits */

enum { NOTHING, MINUS_INF, PLUS_INF, NOT_A_NUMBER, LARGE, HUGE_NUMBER, TINY, ZERO, SPECIALS };
static const char *const special_name[] = {"nothing", "-inf", "+inf", "nan", "1e4", "huge", "tiny", "0"};
enum { FIRST, LAST, VECTOR, BLOCK_OF_32, BLOCK_OF_128, EVEN, ALL, WHERES };
static const char *const where_name[] = {"first", "last", "a vector", "32 columns", "128 columns", "even", "all"};

/* One call. `at` is how many elements a pointer is past 256-byte alignment. */
typedef struct {
    int type, path, scaling, format;
    int64_t rows, cols;
    bool has[TENSORS], power_of_two, floor; /* floor: scale_rounding, of scales that are powers of two */
    bool rounded;                           /* round_sum */
    int home[TENSORS]; /* the tensor in whose memory it is: itself, or in place another */
    int64_t stride[TENSORS], block_stride[TENSORS]; /* as in the args */
    int at[TENSORS];
    int residual_dtype, weight_dtype, groups;
    float eps, weight_offset, tensor_scale, amax; /* amax: before the call */
    int special, where, victim;                   /* of odd rows, or of the only one; victim: X or WEIGHT */
    double spread;
    uint64_t seed;
} problem;

static const char *describe(const problem *p)
{
    static char text[1024];
    int n = snprintf(text, sizeof text,
                     "%s %s rows=%lld cols=%lld %s %s%s%s%s eps=%g groups=%d weight_offset=%g tensor_scale=%g amax=%g "
                     "dtypes: residual %d weight %d",
                     test_type_name[p->type], path_name[p->path], (long long)p->rows, (long long)p->cols, scaling_name[p->scaling],
                     p->format ? "e5m2" : "e4m3", p->power_of_two ? " 2^k" : "", p->floor ? " floor" : "",
                     p->rounded ? " round_sum" : "", (double)p->eps, p->groups,
                     (double)p->weight_offset, (double)p->tensor_scale, (double)p->amax, p->residual_dtype, p->weight_dtype);
    for (int t = 0; t < TENSORS; t++) {
        const size_t left = sizeof text - (size_t)n;
        if (p->has[t] && p->home[t] != t) n += snprintf(text + n, left, " %s=%s", tensor_name[t], tensor_name[p->home[t]]);
        else if (p->has[t])
            n += snprintf(text + n, left, " %s(stride %lld %lld, at %d)", tensor_name[t], (long long)p->stride[t],
                          (long long)p->block_stride[t], p->at[t]);
    }
    snprintf(text + n, sizeof text - (size_t)n, " special=%s at %s of %s spread=%g seed=0x%llx", special_name[p->special],
             where_name[p->where], tensor_name[p->victim], p->spread, (unsigned long long)p->seed);
    return text;
}

static bool is_output(const problem *p, int t) { return p->has[t] && t >= RESIDUAL_OUT; }
static int64_t groups_of(const problem *p) { return p->groups ? p->groups : 1; }
/* The columns that share a scale; of a row of q_transposed, the rows. */
static int64_t per_scale(const problem *p)
{
    return p->scaling == BLOCK ? 128 : p->scaling == MX ? 32 : p->scaling == ROW ? p->cols : (int64_t)1 << 60;
}
static double most_of(const problem *p) { return p->format ? 57344 : 448; }
static bool is_narrow(const problem *p) { return p->scaling == MX || (p->power_of_two && p->scaling != TENSOR); }

/* Where a tensor's elements lie: element [row, c] at row stride + c step. */
typedef struct {
    int type;
    int64_t rows, cols, stride, step;
} layout;

static int bytes_of(int type) { return type == BYTE ? 1 : test_type_bytes[type]; }

static layout layout_of(const problem *p, int t)
{
    int dtype = LK_DTYPE_T;
    if (t == WEIGHT) dtype = p->weight_dtype;
    if (t == RESIDUAL || t == RESIDUAL_OUT) dtype = p->residual_dtype;
    int type = dtype == LK_DTYPE_T ? p->type : dtype - LK_DTYPE_F32;
    if (t == RSTD || t == TENSOR_SCALE || t == AMAX) type = TEST_F32;
    if (t == Q || t == Q_T) type = BYTE;
    if (t == SCALE || t == SCALE_T) type = p->scaling == MX ? (int)BYTE : (int)TEST_F32;
    if (t == WEIGHT) return {type, groups_of(p), p->cols, p->cols, 1};
    if (t == TENSOR_SCALE || t == AMAX) return {type, 1, 1, 1, 1};
    if (t == RSTD) return {type, p->rows, 1, 1, 1};
    const bool turned = t == Q_T || t == SCALE_T;
    int64_t rows = turned ? p->cols : p->rows, cols = turned ? p->rows : p->cols, step = 1;
    if (t == SCALE || t == SCALE_T) {
        cols = p->scaling == ROW ? 1 : (cols + per_scale(p) - 1) / per_scale(p);
        if (p->block_stride[t] && cols > 1) step = p->block_stride[t];
    }
    const int64_t stride = p->stride[p->home[t]];
    return {type, rows, cols, stride && rows > 1 ? stride : (cols > 0 ? cols : 1) * step, step};
}

/* ---- Counts of what ran ---------------------------------------------------------------------------------------------------- */

static const char *did_name[TEST_MOST_OPTIONS];
static bool did_transposed[TEST_MOST_OPTIONS], did_rows[TEST_MOST_OPTIONS];
static test_counts counts = {path_name, did_name, PATHS, 0, {}, {}};

static void count(const problem *p)
{
    int i = 0;
    counts.runs[p->path]++;
    const int vec = 16 / test_type_bytes[p->type];
    const bool f32 = layout_of(p, RESIDUAL).type == TEST_F32 && p->type, sum = p->has[RESIDUAL];
    bool off = false, gaps = false;
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        if (!p->has[t] || l.cols != p->cols || t == WEIGHT) continue;
        off |= p->at[p->home[t]] % vec != 0, gaps |= l.stride != l.cols;
    }
#define DID(name, yes) (did_name[i] = name, did_transposed[i] = did_rows[i] = true, counts.of[p->path][i++] += (yes))
#define DID_ROWS(name, yes) (DID(name, yes), did_transposed[i - 1] = false)
#define DID_TRANSPOSED(name, yes) (DID(name, yes), did_rows[i - 1] = false)
    DID("f32", p->type == TEST_F32), DID("f16", p->type == TEST_F16), DID("bf16", p->type == TEST_BF16);
    DID("tensor", p->scaling == TENSOR), DID_ROWS("row", p->scaling == ROW);
    DID("block", p->scaling == BLOCK), DID("mx", p->scaling == MX);
    DID("e5m2", p->format), DID("power of two", p->power_of_two && p->scaling == BLOCK);
    DID_ROWS("power of two of a row", p->power_of_two && p->scaling == ROW);
    DID("floor of mx", p->floor && p->scaling == MX), DID("floor of a block", p->floor && p->scaling == BLOCK);
    DID_ROWS("floor of a row", p->floor && p->scaling == ROW);
    DID("tensor_scale", p->has[TENSOR_SCALE]), DID("tensor_scale NULL", p->scaling == TENSOR && !p->has[TENSOR_SCALE]);
    DID("amax", p->has[AMAX]), DID("residual T", sum && !f32), DID("residual f32", sum && f32), DID("x alone", !sum);
    DID("round_sum", p->rounded && sum && !f32 && p->type), DID("round_sum without effect", p->rounded && (!sum || f32 || !p->type));
    DID("residual_out of x", p->has[RESIDUAL_OUT] && !sum), DID("rstd", p->has[RSTD]);
    DID("y", p->has[Y]), DID("y NULL", !p->has[Y]);
    DID("weight NULL", !p->has[WEIGHT]), DID("weight T", p->has[WEIGHT] && layout_of(p, WEIGHT).type == p->type);
    DID("weight of another type", p->has[WEIGHT] && layout_of(p, WEIGHT).type != p->type);
    DID("weight_offset", p->has[WEIGHT] && p->weight_offset != 0), DID_ROWS("groups", p->has[WEIGHT] && p->groups > 1);
    DID("rows off", off), DID("gaps", gaps), DID("packed", !gaps), DID("odd cols", p->cols % vec), DID("long rows", p->cols > 600);
    DID("scales the other way", p->has[SCALE] && p->block_stride[SCALE] > 1);
    DID_TRANSPOSED("its scales the other way", p->has[SCALE_T] && p->block_stride[SCALE_T] > 1);
    DID_TRANSPOSED("odd rows", p->rows % 16), DID_TRANSPOSED("whole rows", p->rows % 16 == 0), DID("many rows", p->rows > 128);
    DID_ROWS("y = x", p->has[Y] && p->home[Y] == X);
    DID_ROWS("residual_out = residual", p->has[RESIDUAL_OUT] && p->home[RESIDUAL_OUT] == RESIDUAL);
    for (int s = 1; s < SPECIALS; s++) DID(special_name[s], p->special == s);
    for (int w = 0; w < WHERES; w++) DID(where_name[w], p->special && p->where == w);
#undef DID
    counts.option_count = i;
}

static bool possible(int path, int option) { return path == TRANSPOSED ? did_transposed[option] : did_rows[option]; }

/* ---- Draws ----------------------------------------------------------------------------------------------------------------- */

enum { PACKED, PACKED_OFF, GAPS, WILD, PLACES };

/* A problem with drawn options and places, from a seed that the caller makes of its case. scaling: -1 draws it. */
static problem drawn(int type, int path, int64_t rows, int64_t cols, int seed, int place, int scaling = -1)
{
    static const float eps[] = {1e-6f, 1e-30f, 1e-5f, 0.7f};
    problem p = {};
    p.type = type, p.path = path, p.rows = rows, p.cols = cols, p.spread = 4;
    p.seed = test_hash((uint64_t)(rows * 1000003 + cols * 1009 + type * 101 + path) + (uint64_t)seed * 0x10001);
    uint64_t r = p.seed;
    p.scaling = scaling >= 0 ? scaling : (int)test_below(&r, SCALINGS);
    if (path == TRANSPOSED && p.scaling == ROW) p.scaling = BLOCK;
    p.format = test_chance(&r, 3), p.power_of_two = test_chance(&r, 2);
    for (int t = 0; t < TENSORS; t++) p.home[t] = t;
    const int residual = (int)test_below(&r, 3);
    p.residual_dtype = residual == 2 ? LK_DTYPE_F32 : test_chance(&r, 2) ? type + 1 : LK_DTYPE_T;
    p.weight_dtype = test_chance(&r, 2) ? LK_DTYPE_T : (int)test_below(&r, 4);
    p.has[X] = p.has[Q] = true, p.has[RESIDUAL] = residual > 0, p.has[WEIGHT] = !test_chance(&r, 4);
    p.has[RESIDUAL_OUT] = test_chance(&r, 2), p.has[RSTD] = test_chance(&r, 2), p.has[Y] = test_chance(&r, 2);
    p.has[TENSOR_SCALE] = p.scaling == TENSOR && !test_chance(&r, 3), p.has[AMAX] = p.scaling == TENSOR && !test_chance(&r, 3);
    p.has[SCALE] = p.scaling != TENSOR, p.has[Q_T] = path == TRANSPOSED, p.has[SCALE_T] = p.has[Q_T] && p.has[SCALE];
    p.tensor_scale = test_chance(&r, 2) ? 0x1p-7f : 0.0123f, p.amax = test_chance(&r, 2) ? 0.0f : 3.0f;
    p.weight_offset = test_chance(&r, 3) ? 1.0f : 0.0f;
    p.groups = path != TRANSPOSED && test_chance(&r, 4) ? 3 : test_chance(&r, 2);
    p.eps = eps[test_below(&r, LENGTH_OF(eps))];
    if (path != TRANSPOSED && test_chance(&r, 3)) p.home[Y] = X;
    if (path != TRANSPOSED && p.has[RESIDUAL] && test_chance(&r, 3)) p.home[RESIDUAL_OUT] = RESIDUAL;
    const int off = place == PACKED ? 0 : 1 + (int)test_below(&r, 7);
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(&p, t);
        p.at[t] = place == WILD || t == WEIGHT ? (int)test_below(&r, 8) : t == Q ? 2 * off : off;
        p.stride[t] = test_chance(&r, 2) || t == RSTD ? 0 : l.cols;
        if (place == GAPS) p.stride[t] = (l.cols + 15) / 16 * 16 + 16, p.at[t] = t == WEIGHT ? p.at[t] : 0;
        if (place == WILD) p.stride[t] = l.cols + test_below(&r, 12);
        if (t != SCALE && t != SCALE_T) continue;
        if (place == WILD || place == GAPS) p.block_stride[t] = 2, p.stride[t] = 2 * l.cols + 1;
        if (test_chance(&r, 2)) p.stride[t] = 1, p.block_stride[t] = l.rows + test_below(&r, 3); /* the other way */
    }
    if (test_chance(&r, 2)) p.at[WEIGHT] = 0;
    p.floor = is_narrow(&p) && test_chance(&r, 2), p.rounded = test_hash(p.seed + 1) % 2;
    return p;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------------------- */

static test_buffer buffers[TENSORS];
static layout laid[TENSORS];
static unsigned char *kept[TENSORS];
static size_t kept_bytes[TENSORS], row_bytes[2];
static double *all_y, *row_s;
static lk_srms_norm_fp8_args args;

static bool is_special(const problem *p, int t, int64_t row, int64_t c)
{
    const bool zero = (p->special == ZERO || p->special == TINY) && p->victim == X && (t == RESIDUAL || t == X); /* both */
    if (!p->special || (t != p->victim && !zero) || (t != WEIGHT && p->rows > 1 && row % 2 == 0)) return false;
    const int vec = 16 / test_type_bytes[p->type];
    switch (p->where) {
    case FIRST: return c == 0;
    case LAST: return c == p->cols - 1;
    case VECTOR: return c / vec == (p->cols > vec ? 1 : 0);
    case BLOCK_OF_32: return c / 32 % 2 == 0;
    case BLOCK_OF_128: return c / 128 % 2 == 0;
    case EVEN: return c % 2 == 0;
    }
    return true;
}

static float value(int t, int64_t row, int64_t c)
{
    return test_get(laid[t].type, test_buffer_host(&buffers[t]), row * laid[t].stride + c);
}

static void fill(const problem *p, int t)
{
    static const float special[] = {0, -INFINITY, INFINITY, NAN, 1e4f, 1e25f, 1e-37f, 0};
    void *const host = test_buffer_host(&buffers[t]);
    const layout l = laid[t];
    uint64_t random = p->seed + (uint64_t)t * 0x100000001;
    for (int64_t row = 0; row < l.rows; row++)
        for (int64_t c = 0; c < l.cols; c++) {
            double v = 2 * test_uniform(&random);
            if (t == X) v = p->spread / 2 * v * exp2((double)test_below(&random, 6) - 3); /* so that blocks differ */
            if (t == WEIGHT) v = v < 0 ? v - 0.2 : v + 0.2;
            if (t == TENSOR_SCALE) v = (double)p->tensor_scale;
            if (t == AMAX) v = (double)p->amax;
            if (is_special(p, t, row, c)) v = p->special == HUGE_NUMBER && l.type == TEST_F16 ? 6e4 : (double)special[p->special];
            test_put(l.type, host, row * l.stride + c, (float)v);
        }
}

static bool setup(const problem *p, int run)
{
    void *at[TENSORS] = {};
    row_s = (double *)test_room(row_s, &row_bytes[0], (size_t)p->cols * sizeof(double));
    all_y = (double *)test_room(all_y, &row_bytes[1], (size_t)(p->rows * p->cols + 1) * sizeof(double));
    for (int t = 0; t < TENSORS; t++) {
        laid[t] = layout_of(p, t);
        if (!p->has[t]) continue;
        const layout l = laid[t];
        const size_t bytes = (size_t)bytes_of(l.type);
        if (p->home[t] == t) {
            const bool out = is_output(p, t);
            const int64_t span = l.rows && l.cols ? (l.rows - 1) * l.stride + (l.cols - 1) * l.step + 1 : 0;
            const int poison = run ? (out ? 0xff : 0x7f) : (out ? 0x5a : 0xff);
            test_buffer_size(&buffers[t], (size_t)span * bytes, (size_t)p->at[t] * bytes, poison);
            if (!out || t == AMAX) fill(p, t);
            test_buffer_upload(&buffers[t]);
        }
        at[t] = test_buffer_device(&buffers[p->home[t]]);
    }
    args = {};
    lk_srms_norm_args *const a = &args.common;
    a->x = at[X], a->residual = at[RESIDUAL], a->residual_out = at[RESIDUAL_OUT], a->rstd = (float *)at[RSTD];
    a->weight = at[WEIGHT];
    a->y = at[Y], a->rows = p->rows, a->cols = p->cols, a->groups = p->groups, a->x_stride = p->stride[X];
    a->residual_stride = p->stride[RESIDUAL], a->eps = p->eps, a->weight_offset = p->weight_offset;
    a->residual_out_stride = p->home[RESIDUAL_OUT] == RESIDUAL_OUT ? p->stride[RESIDUAL_OUT] : 0;
    a->y_stride = p->home[Y] == Y ? p->stride[Y] : 0;
    a->residual_dtype = p->residual_dtype, a->weight_dtype = p->weight_dtype, a->path = p->path == TRANSPOSED ? 0 : p->path;
    a->round_sum = p->rounded;
    a->dy = a->dresidual_out = (const void *)1; /* from here on backward's, which a call must not look at */
    a->dx = a->dresidual = a->dweight = a->dbias = a->workspace = (void *)1;
    a->dy_stride = a->dx_stride = a->dresidual_stride = a->dresidual_out_stride = -3, a->dweight_dtype = -3;
    args.tensor_scale = (const float *)at[TENSOR_SCALE], args.amax = (float *)at[AMAX], args.q = at[Q], args.scale = at[SCALE];
    args.q_transposed = at[Q_T], args.transposed_scale = at[SCALE_T], args.q_stride = p->stride[Q];
    args.scale_stride = p->stride[SCALE], args.scale_block_stride = p->block_stride[SCALE];
    args.q_transposed_stride = p->stride[Q_T], args.transposed_scale_stride = p->stride[SCALE_T];
    args.transposed_block_stride = p->block_stride[SCALE_T], args.scaling = p->scaling, args.format = p->format;
    args.power_of_two = p->power_of_two, args.scale_rounding = p->floor ? LK_SRMS_NORM_FP8_FLOOR : LK_SRMS_NORM_FP8_UP;
    size_t bytes = 12345;
    const lk_status status = query_of[p->type](&args, &bytes);
    if (!test_that(status == LK_OK && bytes == 0))
        test_detail("the query says %s, %zu bytes; %s", lk_last_error(), bytes, describe(p));
    return status == LK_OK;
}

static lk_status launch(const problem *p) { return call_of[p->type](&args, test.stream); }

static void collect(const problem *p)
{
    for (int t = 0; t < TENSORS; t++)
        if (p->has[t] && p->home[t] == t) test_buffer_download(&buffers[t]);
}

/* ---- The reference --------------------------------------------------------------------------------------------------------- */

/* A number of 8 bits by the table of all of them: the nearest one, of two the even one; the largest one for more than it. */
static int encode_8(const problem *p, double x)
{
    static double number[2][128];
    const int mantissa_bits = p->format ? 2 : 3, bias = p->format ? 15 : 7, last = p->format ? 0x7b : 0x7e;
    double *const table = number[p->format];
    if (table[1] == 0)
        for (int i = 0; i <= last; i++) {
            const int field = i >> mantissa_bits, mantissa = (i & ((1 << mantissa_bits) - 1)) + (field ? 1 << mantissa_bits : 0);
            table[i] = ldexp(mantissa, (field ? field : 1) - bias - mantissa_bits);
        }
    if (x != x) return 0x7f;
    const int sign = signbit(x) ? 0x80 : 0;
    const double size = fabs(x);
    int low = 0, high = last; /* the largest one that is at most size */
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table[middle] <= size) low = middle;
        else high = middle - 1;
    }
    if (low == last) return sign | last;
    const double below = size - table[low], above = table[low + 1] - size;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : low + 1);
}

static const void *back(const problem *p, int t) { return test_buffer_back(&buffers[p->home[t]]); }
static float result(const problem *p, int t, int64_t row, int64_t c)
{
    return test_get(laid[t].type, back(p, t), row * laid[t].stride + c * laid[t].step);
}
static int result_8(const problem *p, int t, int64_t row, int64_t c)
{
    return ((const uint8_t *)back(p, t))[row * laid[t].stride + c * laid[t].step];
}
/* A scale as a number: of MX 2^(byte - 127), 255 NaN. */
static double scale_at(const problem *p, int t, int64_t row, int64_t c)
{
    if (laid[t].type != BYTE) return (double)result(p, t, row, c);
    return result_8(p, t, row, c) == 255 ? (double)NAN : ldexp(1, result_8(p, t, row, c) - 127);
}

static double limit(const problem *p) { return p->weight_offset != 0 ? 12 : 10; }

static void near(const problem *p, int t, int64_t row, int64_t c, double want, double k)
{
    const float got = result(p, t, row, c);
    const double slack = isfinite(want) ? k * 0x1p-24 * fabs(want) + 0x1p-126 : 0;
    if (!test_near(laid[t].type, got, want, slack))
        test_detail("%s[%lld, %lld] is %.9g, want %.9g +- %.3g; %s", tensor_name[t], (long long)row, (long long)c, (double)got,
                    want, slack, describe(p));
}

/* Whether y is known as the float that the kernel had. */
static bool exact(const problem *p) { return p->type == TEST_F32 && p->has[Y]; }

/* The y of an element: the float itself where it is known. */
static double y_at(const problem *p, int64_t row, int64_t c)
{
    return exact(p) ? (double)result(p, Y, row, c) : all_y[row * p->cols + c];
}

/* A scale from the largest |y| of its elements, NaN where one of them is. */
static void verify_scale(const problem *p, int t, int64_t row, int64_t c, double amax)
{
    const double got = scale_at(p, t, row, c), relative = exact(p) ? 0 : (limit(p) + 2) * 0x1p-24, most = most_of(p);
    const bool mx = p->scaling == MX;
    bool good;
    if (!(amax <= 0x1.fffffep127)) good = got != got; /* infinite, NaN */
    else if (amax == 0) good = got == (mx ? 0x1p-127 : 1);
    else {
        if (!mx && amax < 0x1p-80) amax = 0x1p-80;
        if (is_narrow(p)) {
            int exponent; /* floor: from the power of two below most up to the next one */
            const double high = p->floor ? got * (p->format ? 65536 : 512) * (1 - 0x1p-53) : got * most;
            const double low = p->floor ? got * (p->format ? 32768 : 256) * (1 - 0x1p-53) : got * most / 2;
            good = frexp(got, &exponent) == 0.5 && amax * (1 - relative) <= high;
            good = good && (amax * (1 + relative) > low || (mx && got == 0x1p-127));
        } else if (exact(p)) {
            good = (float)got == (float)amax / (float)most;
        } else {
            good = test_within(fabs(got - amax / most), relative * amax / most);
        }
    }
    if (!test_that(good))
        test_detail("%s[%lld, %lld] is %.9g, and the largest |y| %.9g; %s", tensor_name[t], (long long)row, (long long)c, got, amax,
                    describe(p));
}

static int ordered(int byte) { return byte & 0x80 ? -(byte & 0x7f) : byte; }

/* A number of 8 bits, of y and the scale that the call gave. */
static void verify_8(const problem *p, int t, int64_t row, int64_t c, double y, double scale)
{
    int exponent;
    const bool bit_for_bit = exact(p) && frexp(scale, &exponent) == 0.5;
    const double relative = bit_for_bit ? 0 : (exact(p) ? 3 : limit(p) + 3) * 0x1p-24, least = bit_for_bit ? 0 : 0x1p-126;
    const int got = result_8(p, t, row, c);
    const double slack = isfinite(y) ? fabs(y) * relative + least : 0;
    const int low = encode_8(p, (y - slack) / scale), high = encode_8(p, (y + slack) / scale);
    /* Several numbers may lie between where y is so small that MX's least scales go with it. */
    const bool between = !bit_for_bit && ordered(low) <= ordered(got) && ordered(got) <= ordered(high);
    if (!test_that(got == low || got == high || between))
        test_detail("%s[%lld, %lld] is 0x%02x, want 0x%02x or 0x%02x: %.9g / %.9g; %s", tensor_name[t], (long long)row,
                    (long long)c, got, low, high, y, scale, describe(p));
}

static void verify(const problem *p)
{
    double most = 0;
    for (int64_t row = 0; row < p->rows; row++) {
        double sum = 0;
        for (int64_t c = 0; c < p->cols; c++) {
            float s = p->has[RESIDUAL] ? value(X, row, c) + value(RESIDUAL, row, c) : value(X, row, c);
            if (p->rounded && p->has[RESIDUAL]) s = test_decode(laid[RESIDUAL].type, test_encode(laid[RESIDUAL].type, s));
            row_s[c] = (double)s, sum += row_s[c] * row_s[c];
            if (!p->has[RESIDUAL_OUT]) continue;
            const float got = result(p, RESIDUAL_OUT, row, c);
            const int type = laid[RESIDUAL_OUT].type;
            if (!test_that(test_encode(type, got) == test_encode(type, s) || (s != s && got != got)))
                test_detail("residual_out[%lld, %lld] is %.9g, not %.9g; %s", (long long)row, (long long)c, (double)got,
                            (double)s, describe(p));
        }
        if (sum > 0x1.fffffep127) sum = INFINITY;
        const double rstd = 1 / sqrt(sum / (double)p->cols + (double)p->eps);
        if (p->has[RSTD]) near(p, RSTD, row, 0, rstd, 8);
        for (int64_t c = 0; c < p->cols; c++) {
            const double w = p->has[WEIGHT] ? (double)p->weight_offset + (double)value(WEIGHT, row % groups_of(p), c) : 1;
            double t = row_s[c] * w;
            if (fabs(t) > 0x1.fffffep127) t = t < 0 ? -INFINITY : INFINITY; /* the product is a float */
            const double y = t * rstd;
            all_y[row * p->cols + c] = y;
            if (p->has[Y]) near(p, Y, row, c, y, limit(p));
        }
    }
    const double given = p->has[TENSOR_SCALE] ? (double)p->tensor_scale : 1;
    for (int turned = 0; turned <= (int)p->has[Q_T]; turned++) {
        const int q = turned ? Q_T : Q, scales = turned ? SCALE_T : SCALE;
        const int64_t per = per_scale(p), rows = turned ? p->cols : p->rows, cols = turned ? p->rows : p->cols;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t c = 0; c < cols; c++) {
                if (p->has[scales] && c % per == 0) {
                    double amax = 0;
                    bool nan = false;
                    for (int64_t i = c; i < cols && i < c + per; i++) {
                        const double y = turned ? y_at(p, i, row) : y_at(p, row, i);
                        if (y != y) nan = true;
                        else amax = fmax(amax, fabs(y));
                    }
                    verify_scale(p, scales, row, c / per, nan ? (double)NAN : amax);
                }
                const double y = turned ? y_at(p, c, row) : y_at(p, row, c);
                if (!turned && y == y) most = fmax(most, fabs(y));
                verify_8(p, q, row, c, y, p->has[scales] ? scale_at(p, scales, row, c / per) : given);
            }
    }
    if (!p->has[AMAX]) return;
    const double got = (double)result(p, AMAX, 0, 0);
    most = fmax(most, (double)p->amax);
    const bool same = exact(p) || isinf(most);
    if (same ? !test_that(got == most) : !test_within(fabs(got - most), limit(p) * 0x1p-24 * most))
        test_detail("amax is %.9g, want %.9g; %s", got, most, describe(p));
}

/* Keeps the outputs' bits or compares them with those that were kept; then nothing else may have changed. */
static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++) {
        const layout l = laid[t];
        if (!is_output(p, t) || l.rows == 0 || l.cols == 0) continue;
        const test_buffer *const b = &buffers[p->home[t]];
        if (l.step == 1) {
            test_settle(b, &kept[t], &kept_bytes[t], keep, l.rows, l.cols, l.stride, bytes_of(l.type), tensor_name[t], what,
                        describe(p));
            continue;
        }
        for (int64_t c = 0; c < l.cols; c++) /* one by one; the bits are compared as well */
            for (int64_t row = 0; row < l.rows; row++) test_buffer_accept(b, row * l.stride + c * l.step, bytes_of(l.type));
    }
    for (int t = 0; t < TENSORS; t++)
        if (p->has[t] && p->home[t] == t) test_buffer_untouched(&buffers[t], tensor_name[t], describe(p));
}

static const test_op<problem> op = {describe, setup, launch, collect, verify, settle, count};
static void check(const problem *p) { test_twice(op, p); }

/* ---- Cases ----------------------------------------------------------------------------------------------------------------- */

static void empty(int type, int, int path)
{
    for (int scaling = 0; scaling < SCALINGS; scaling++) {
        const problem p = drawn(type, path, 0, 37, scaling, PACKED, scaling);
        check(&p);
    }
}

static void lengths(int type, int, int path)
{
    const int64_t cols[] = {1,   2,   3,   4,   7,   8,   9,   16,  31,  32,  33,   63,   64,   65,   100,  127,
                            128, 129, 160, 256, 257, 384, 512, 520, 904, 1024, 1160, 2048, 2056, 4096, 5120, 8200};
    for (int i = 0; i < LENGTH_OF(cols); i++)
        for (int scaling = 0; scaling < SCALINGS; scaling++) {
            if (test.small && (cols[i] > 1200 || (i + type + path + scaling) % 3)) continue;
            const problem p = drawn(type, path, 1 + (i / 2 + type) % 5, cols[i], scaling, i % 4 == 3 ? GAPS : PACKED, scaling);
            check(&p);
        }
}

/* Every option with every other, more or less. */
static void options(int type, int, int path)
{
    const int64_t cols[] = {24, 37, 256, test_pick(648, 392)};
    for (int i = 0; i < LENGTH_OF(cols); i++)
        for (int seed = 0; seed < test_pick(40, 8); seed++) {
            const problem p = drawn(type, path, seed % 3 ? 3 : 6, cols[i], 100 + seed, seed % 2 ? GAPS : PACKED);
            check(&p);
        }
}

static void places(int type, int, int path)
{
    const int64_t cols[] = {5, 64, 131, 264};
    for (int i = 0; i < LENGTH_OF(cols); i++)
        for (int place = 0; place < PLACES; place++)
            for (int seed = 0; seed < test_pick(8, 2); seed++) {
                const problem p = drawn(type, path, 5, cols[i], 200 + seed, place);
                check(&p);
            }
}

static void many_rows(int type, int, int path)
{
    const int64_t rows[] = {127, 128, 129, 144, 200, 300}, cols[] = {16, 40, 129, 272};
    for (int i = 0; i < LENGTH_OF(rows); i++)
        for (int scaling = 0; scaling < SCALINGS; scaling++) {
            if (test.small && (i + scaling + type + path) % 3) continue;
            const int64_t wide = cols[(i + scaling + type) % 4];
            const problem p = drawn(type, path, rows[i], wide, 300 + scaling, (i + scaling) % PLACES, scaling);
            check(&p);
        }
}

/* Plain calls: a team with several rows, or a block with more columns than it holds; and rstd / scale is beyond a float. */
static void in_turn(int type, int, int path)
{
    for (int scaling = 0; scaling < SCALINGS; scaling++)
        for (int tiny = 0; tiny < 2; tiny++) {
            const int64_t rows = tiny ? 5 : path == TRANSPOSED ? 40 : 203, cols = path == TRANSPOSED ? 2056 : 520;
            problem p = drawn(type, path, rows, cols, 350 + scaling, PACKED, scaling);
            p.has[RESIDUAL] = p.has[RESIDUAL_OUT] = false, p.groups = 0, p.weight_dtype = LK_DTYPE_T, p.at[WEIGHT] = 0;
            if (tiny) p.has[Y] = false, p.eps = 1e-30f, p.special = TINY, p.where = ALL, p.victim = X;
            check(&p);
        }
}

/* Longer than threads hold, and than blocks with 128 rows hold. */
static void long_rows(int type, int, int path)
{
    const int64_t cols[] = {1032, 2500, 20480, 70000};
    for (int i = 0; i < test_pick(LENGTH_OF(cols), 2); i++)
        for (int scaling = 0; scaling < SCALINGS; scaling++) {
            if ((test.small || i > 1) && (scaling + type + path + i) % 4) continue;
            const problem p = drawn(type, path, 2, cols[i], 400 + scaling, i % 2 ? PACKED_OFF : PACKED, scaling);
            check(&p);
        }
}

static void specials(int type, int, int path)
{
    const int64_t cols[] = {24, 160, test_pick(777, 296)};
    for (int special = 1; special < SPECIALS; special++)
        for (int where = 0; where < WHERES; where++)
            for (int i = 0; i < LENGTH_OF(cols); i++) {
                if (test.small && (special + where + i + type) % 3) continue;
                problem p = drawn(type, path, i ? 3 : 5, cols[i], 500 + special * 10 + where, (special + where + i) % PLACES);
                p.special = special, p.where = where, p.victim = p.has[WEIGHT] && (where + i) % 3 == 0 ? WEIGHT : X;
                check(&p);
            }
}

/* y in f32: everything follows from it bit for bit. Numbers on both sides of the powers of two too. */
static void from_y(int type, int, int path)
{
    for (int seed = 0; seed < test_pick(48, 12); seed++) {
        problem p = drawn(type, path, 4, seed % 3 ? 256 : 100, 600 + seed, PACKED);
        p.has[Y] = true, p.home[Y] = Y, p.power_of_two = seed % 2, p.spread = seed % 4 ? 4 : 1e-25;
        if (seed % 5 == 0) p.tensor_scale = 0x1p-9f, p.has[TENSOR_SCALE] = p.scaling == TENSOR;
        if (seed % 4 == 1) p.eps = 0; /* then a row that is not there has no rstd */
        p.floor = is_narrow(&p) && seed % 3 == 1;
        check(&p);
    }
}

static void graphs(int type, int, int path)
{
    for (int scaling = 0; scaling < 2; scaling++) {
        problem p = drawn(type, path, 5, 136, 700 + scaling, PACKED, scaling ? BLOCK : TENSOR);
        p.stride[SCALE] = p.block_stride[SCALE] = p.stride[SCALE_T] = p.block_stride[SCALE_T] = 0;
        check(&p); /* leaves its bits in kept */
        test_graph(op, &p);
    }
}

static void all_themes(void)
{
    static const test_theme themes[] = {{"empty", empty},         {"lengths", lengths},         {"options", options},
                                        {"places", places},       {"many rows", many_rows},     {"rows in turn", in_turn},
                                        {"long rows", long_rows}, {"special values", specials}, {"from y", from_y},
                                        {"graph", graphs}};
    for (int path = 0; path < PATHS; path++) test_themes(themes, LENGTH_OF(themes), 0, path, "forward", path_name[path]);
}

/* lk_fp8_bits, which code before sm_89 has, beside what this device has. */
typedef struct {
    uint32_t *differ;
} bits_args;
static __global__ void bits_kernel(bits_args p)
{
    lk_griddepcontrol_wait();
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < 1u << 20; i += gridDim.x * blockDim.x) {
        const float x = __uint_as_float(i * 4093u), y = __uint_as_float(i << 12);
        const bool same = lk_fp8x2(LK_FP8_E4M3, x, y) == (lk_fp8_bits<3>(x) | lk_fp8_bits<3>(y) << 8) &&
                          lk_fp8x2(LK_FP8_E5M2, x, y) == (lk_fp8_bits<2>(x) | lk_fp8_bits<2>(y) << 8);
        if (!same) *p.differ = 1;
    }
}
static void eight_bits(void)
{
    if (!test_begin("conversions to 8 bits")) return;
    uint32_t *device, differ = 0;
    TEST_CUDA(cudaMalloc((void **)&device, 4));
    TEST_CUDA(cudaMemset(device, 0, 4));
    TEST_CUDA(cudaDeviceSynchronize()); /* test.stream does not wait for the default stream */
    TEST_CUDA(lk_launch(bits_kernel, test_pick(256, 4), 128, 0, test.stream, bits_args{device}));
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    TEST_CUDA(cudaMemcpy(&differ, device, 4, cudaMemcpyDeviceToHost));
    TEST_CUDA(cudaFree(device));
    test_that(differ == 0);
    test_finish();
}

/* ---- Errors ---------------------------------------------------------------------------------------------------------------- */

static void expect(const problem *p, lk_status want, const char *field, const lk_srms_norm_fp8_args &a, bool queried)
{
    const int type = p->type;
    const lk_status status = call_of[type](&a, test.stream);
    test_expect(status, want, field, "lk_srms_norm_fp8", "forward", type);
    size_t asked = TEST_NOT_ASKED;
    const lk_status answer = query_of[type](&a, &asked);
    test_expect_query(answer, queried ? want : LK_OK, asked, field);
    for (int t = 0; t < TENSORS; t++)
        if (is_output(p, t)) test_expect_unwritten(status, &buffers[t], tensor_name[t], field);
}

static void errors(int type)
{
    for (int path = 0; path <= TRANSPOSED; path += TRANSPOSED) {
        problem p = drawn(type, path, 3, 40, 1, PACKED, BLOCK);
        for (int t = 0; t < TENSORS; t++) {
            p.has[t] = t != TENSOR_SCALE && t != AMAX && (path || (t != Q_T && t != SCALE_T));
            p.home[t] = t, p.stride[t] = p.block_stride[t] = 0;
        }
        p.groups = 0, p.at[Q] = 0;
        setup(&p, 0);
        const lk_srms_norm_fp8_args good = args;
        lk_srms_norm_fp8_args a;
#define WRONG(want, field, queried, change) (a = good, change, expect(&p, want, field, a, queried))
        WRONG(LK_ERR_VALUE, "scaling", true, a.scaling = 4);
        WRONG(LK_ERR_VALUE, "scaling", true, a.scaling = -1);
        WRONG(LK_ERR_VALUE, "bias", true, a.common.bias = a.common.weight);
        WRONG(LK_ERR_VALUE, "batch_invariant", true, a.common.batch_invariant = 1);
        WRONG(LK_ERR_VALUE, "tensor_scale", true, a.tensor_scale = a.common.rstd);
        WRONG(LK_ERR_VALUE, "amax", true, a.amax = a.common.rstd);
        WRONG(LK_ERR_VALUE, path ? "scale" : "scale is given", true, a.scaling = TENSOR);
        WRONG(LK_ERR_NULL, "x is NULL", false, a.common.x = NULL);
        WRONG(LK_ERR_NULL, "q is NULL", false, a.q = NULL);
        WRONG(LK_ERR_NULL, "scale is NULL", false, a.scale = NULL);
        WRONG(LK_ERR_SHAPE, "rows", true, a.common.rows = -1);
        WRONG(LK_ERR_SHAPE, "cols", true, a.common.cols = 0);
        WRONG(LK_ERR_SHAPE, "groups", true, a.common.groups = -1);
        WRONG(LK_ERR_SHAPE, "q_stride", true, a.q_stride = 39);
        WRONG(LK_ERR_SHAPE, "x_stride", true, a.common.x_stride = 39);
        WRONG(LK_ERR_SHAPE, "scale_stride", true, a.scale_stride = -1);
        WRONG(LK_ERR_SHAPE, "scale and q overlap", false, a.scale = (float *)a.q);
        WRONG(LK_ERR_SHAPE, "overlap", false, a.q = (void *)a.common.x);
        WRONG(LK_ERR_VALUE, "eps", true, a.common.eps = NAN);
        WRONG(LK_ERR_VALUE, "weight_offset", true, a.common.weight_offset = INFINITY);
        WRONG(LK_ERR_VALUE, "weight_dtype", true, a.common.weight_dtype = 9);
        WRONG(LK_ERR_VALUE, "residual_dtype", true, a.common.residual_dtype = 9);
        WRONG(LK_ERR_VALUE, "format", true, a.format = 2);
        WRONG(LK_ERR_VALUE, "scale_rounding", true, a.scale_rounding = 2);
        WRONG(LK_ERR_VALUE, "scale_rounding", true, a.scale_rounding = -1);
        WRONG(LK_ERR_VALUE, "scale_rounding", true, (a.scale_rounding = 1, a.power_of_two = 0));
        WRONG(LK_ERR_VALUE, "scale_rounding", true,
              (a.scaling = TENSOR, a.scale = a.transposed_scale = NULL, a.scale_rounding = a.power_of_two = 1));
        WRONG(LK_ERR_VALUE, "path", true, a.common.path = 4);
        WRONG(LK_ERR_PATH, "path 3", true, a.common.path = 3);
        WRONG(LK_ERR_ALIGNMENT, "scale", false, MOVED(a.scale, 1));
        if (path) {
            WRONG(LK_ERR_VALUE, "q_transposed", true, a.scaling = ROW);
            WRONG(LK_ERR_VALUE, "groups", true, a.common.groups = 2);
            WRONG(LK_ERR_VALUE, "transposed_scale", true, a.q_transposed = NULL);
            WRONG(LK_ERR_NULL, "transposed_scale", false, a.transposed_scale = NULL);
            WRONG(LK_ERR_SHAPE, "q_transposed_stride", true, a.q_transposed_stride = 2);
            WRONG(LK_ERR_SHAPE, "y and x overlap", false, a.common.y = (void *)a.common.x);
        }
        expect(&p, LK_OK, "", good, false);
        TEST_CUDA(cudaStreamSynchronize(test.stream));
    }
    test_expect(call_of[type](NULL, test.stream), LK_ERR_NULL, "args", "lk_srms_norm_fp8", "forward", type);
}

static void fuzz(void)
{
    const long n = test_fuzz_begin(&counts, 200, 30);
    uint64_t r = test.fuzz_seed;
    for (long i = 0; i < n; i++) {
        const int type = (int)test_below(&r, TEST_TYPES), path = (int)test_below(&r, PATHS);
        const int64_t longest = test_chance(&r, 4) ? test_pick(5000, 1100) : 300, most_rows = test_chance(&r, 4) ? 300 : 9;
        const int64_t rows = test_below(&r, most_rows), cols = 1 + test_below(&r, longest);
        problem p = drawn(type, path, rows, cols, (int)test_below(&r, 1 << 30), (int)test_below(&r, PLACES));
        if (test_chance(&r, 2)) p.special = (int)test_below(&r, SPECIALS), p.where = (int)test_below(&r, WHERES);
        if (p.has[WEIGHT] && test_chance(&r, 3)) p.victim = WEIGHT;
        check(&p);
    }
    test_fuzz_end(&counts, possible, n);
}

/* ---- A GPU: more than 2^31 elements, and a device that is busy ------------------------------------------------------------- */

#if defined(__CUDACC__)

/* Each element of x is known from its number. Checks some rows, of q and of q_transposed; one holds element 2^31. */
static void huge(int64_t rows, int64_t cols, bool turned)
{
    problem p = drawn(TEST_BF16, turned ? TRANSPOSED : 0, rows, cols, 1, PACKED, TENSOR);
    lk_srms_norm_fp8_args a = {};
    lk_bf16 *const x = (lk_bf16 *)test_huge_allocate(rows * cols * 2);
    const float scale = 0x1p-7f;
    uint8_t *const q = (uint8_t *)test_huge_allocate(rows * cols), *q_t = NULL, got;
    float *const number = (float *)test_huge_allocate(4);
    if (turned) q_t = (uint8_t *)test_huge_allocate(rows * cols);
    p.format = LK_FP8_E4M3;
    test_huge_fill(x, rows * cols, 0);
    TEST_CUDA(cudaMemcpy(number, &scale, 4, cudaMemcpyHostToDevice));
    TEST_CUDA(cudaDeviceSynchronize());
    a.common.x = x, a.common.rows = rows, a.common.cols = cols, a.common.eps = 1e-6f;
    a.q = q, a.q_transposed = q_t, a.tensor_scale = number;
    const int64_t samples[] = {0, ((int64_t)1 << 31) / cols, rows / 2 + 1, rows - 1};
    if (test_launched(call_of[TEST_BF16](&a, test.stream), describe(&p)))
        for (int i = 0; i < 4; i++) {
            const int64_t row = samples[i] < rows ? samples[i] : rows - 1;
            double sum = 0;
            for (int64_t c = 0; c < cols; c++) {
                const double v = (double)test_huge_value(row * cols + c);
                sum += v * v;
            }
            for (int64_t k = 0; k < 64; k++) {
                const int64_t c = k < 32 ? k * 7 % cols : cols - 1 - k * 5 % cols;
                const double y = (double)test_huge_value(row * cols + c) / sqrt(sum / (double)cols + 1e-6);
                const int low = encode_8(&p, y * (1 - 16 * 0x1p-24) / (double)scale);
                const int high = encode_8(&p, y * (1 + 16 * 0x1p-24) / (double)scale);
                for (int copy = 0; copy <= (int)turned; copy++) {
                    TEST_CUDA(cudaMemcpy(&got, copy ? q_t + c * rows + row : q + row * cols + c, 1, cudaMemcpyDeviceToHost));
                    if (!test_that(got == low || got == high))
                        test_detail("%s[row %lld, col %lld] is 0x%02x, want 0x%02x", copy ? "q_transposed" : "q", (long long)row,
                                    (long long)c, got, low);
                }
            }
        }
    test_huge_free();
}

static void busy(int type, int, int path)
{
    /* Transposed f32: a block needs an SM of its own, and a cluster of 8 would wait until more than half are free. */
    problem p = drawn(type, path, 1000, path == TRANSPOSED && type == TEST_F32 ? 500 : 1000, 800, PACKED, TENSOR);
    check(&p); /* leaves its bits in kept */
    test_busy(op, &p);
}

static void all_huge(void)
{
    static const int64_t shapes[][2] = {{70001, 32768}, {2100, 1 << 20}};
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int turned = 0; turned < 2; turned++) {
            const int64_t rows = shapes[i][0], cols = shapes[i][1];
            if (!test_begin("huge: %lld x %lld%s", (long long)rows, (long long)cols, turned ? " transposed" : "")) continue;
            huge(rows, cols, turned);
            test_finish();
        }
    static const test_theme held = {"half of the SMs held", busy};
    for (int path = 0; path < PATHS; path++) test_themes(&held, 1, 0, path, "forward", path_name[path]);
}

#endif

int main(int argc, char **argv)
{
    test_start(argc, argv);
    test_of_types("errors", errors);
    eight_bits();
    all_themes();
    TEST_HUGE(all_huge);
    test_all_ran(&counts, possible);
    fuzz();
    return test_end();
}
