// SPDX-License-Identifier: MIT
/* tests/md_lrpe_cosine.cu - lk/md_lrpe_cosine.cuh against its header's formula, on the GPU or on the simulator.
 *
 * The oracle takes angles from the exact product of position and theta: 31 bits times 24 fit in a long double, whose cosl and
 * sinl reduce it exactly; all else is double. Each checked call runs twice, over different poison: the second must give the
 * same bits, so that nothing stale passes for a result. Bytes that are not outputs (zones around every buffer, gaps between
 * strided rows, the inputs) must not change.
 *
 * Limits are those of the header, besides half an ulp of T: 8e-7 |act(x)| for y, 8e-7 (|u| + |v|) for g, u and v the halves of
 * dy; act errs by (|x| + 8) 2^-23 relative, softmax by (|x - max| + log dim + 8) 2^-23, softmax over tokens by
 * (|x - max| + 2 log tokens + 18) 2^-23, and dx by what follows of it; dtheta by 16 2^-24 of the sum of its terms' magnitudes
 * |s act(x)| (|u| + |v|), and what cos, sin and act err in each.
 */
#include "lk/md_lrpe_cosine.cuh"

#include "tests/test.h"

TEST_DEFINE(MD_LRPE_COSINE)

typedef lk_status (*call)(const lk_md_lrpe_cosine_args *, cudaStream_t);
typedef lk_status (*query)(const lk_md_lrpe_cosine_args *, size_t *);
static const call call_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_md_lrpe_cosine_forward), TEST_OF_TYPES(lk_md_lrpe_cosine_backward)};
static const query query_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_md_lrpe_cosine_forward_workspace_bytes),
                                              TEST_OF_TYPES(lk_md_lrpe_cosine_backward_workspace_bytes)};

enum { FORWARD, BACKWARD };
static const char *const direction_name[] = {"forward", "backward"};
static const char *const path_name[] = {"auto", "vector", "row"};
static const char *const activation_name[] = {"none", "relu", "sigmoid", "silu", "softmax", "softmax over tokens"};
enum { ACTIVATIONS = 6 };

/* How a tensor [batch, heads, tokens, width] lies in memory. */
enum { PACKED, TOKENS_FIRST, ODD_GAPS, ALIGNED_GAPS, BATCH_INSIDE, OVERLAPPING, LAYOUTS };
static const char *const layout_name[] = {"packed", "[b,n,h,d]", "odd gaps", "aligned gaps", "[n,h,b,d]", "overlapping"};
/* USUAL: 10000^(-t / e), the signs alternating. HUGE: up to 1e6. BEYOND: 2^24 to 2^30, beyond the promise. WILD: some are
 * infinite or NaN. */
enum { USUAL, ZERO, LARGE, TINY, BEYOND, WILD, THETAS };
static const char *const theta_name[] = {"usual", "0", "up to 1e6", "2^-60 to 2^-30", "2^24 to 2^30", "wild"};
/* PREFIX: infinities and NaN in the prefix's x and in its second half of dy. The others stand at the places below. */
enum { NOTHING, PREFIX, MINUS_INF, PLUS_INF, NOT_A_NUMBER, FAR, NIL, SPECIALS };
static const char *const special_name[] = {"nothing", "prefix wild", "-inf", "+inf", "nan", "1e4", "0"};
enum { FIRST, LAST, VECTOR, LANE, EVEN, ALL, WHERES };
static const char *const where_name[] = {"first", "last", "a vector", "a lane's", "even", "all"};

/* One call. `.._at` is how many elements a pointer is past 256-byte alignment. */
typedef struct {
    int type, direction, path;
    int64_t batch, heads, dim, e, prefix;
    int axes;
    int64_t shape[8], offset[8]; /* offset: with device_offset the sum of both fields */
    bool device_offset;
    int x_layout, y_layout, dx_layout; /* y_layout: of dy too */
    int x_at, y_at, dx_at, theta_at, dtheta_at;
    bool theta_t; /* theta is of type T */
    bool one_head, one_feature; /* all heads or all features share a theta */
    int theta, activation, special, where;
    bool no_dx, dtheta, no_dy, accumulate;
    uint64_t seed;
} problem;

static problem plain(int type, int direction, int path, int64_t batch, int64_t heads, int64_t length, int64_t dim)
{
    problem p = {};
    p.type = type, p.direction = direction, p.path = path;
    p.batch = batch, p.heads = heads, p.dim = dim;
    p.axes = 1, p.shape[0] = length;
    p.seed = test_hash((uint64_t)(batch * 1000003 + heads * 10007 + length * 101 + dim));
    return p;
}

static int64_t cells_of(const problem *p)
{
    int64_t cells = 1;
    for (int i = 0; i < (p->axes ? p->axes : 1); i++) cells *= p->shape[i];
    return cells;
}

static int64_t tokens_of(const problem *p)
{
    return p->prefix + cells_of(p);
}
static int64_t e_of(const problem *p)
{
    const int axes = p->axes ? p->axes : 1;
    return p->e ? p->e : (p->dim + axes - 1) / axes;
}

/* Rows and columns of theta, and which element is that of a head and feature. */
static int64_t theta_rows(const problem *p)
{
    return p->one_head ? 1 : p->heads;
}
static int64_t theta_columns(const problem *p)
{
    return p->one_feature ? 1 : e_of(p);
}
static int64_t theta_at(const problem *p, int64_t head, int64_t f)
{
    return (p->one_head ? 0 : head) * theta_columns(p) + (p->one_feature ? 0 : f % e_of(p));
}

static const char *describe(const problem *p)
{
    static char text[900];
    int used = snprintf(text, sizeof text, "%s %s path=%s batch=%lld heads=%lld dim=%lld e=%lld prefix=%lld axes=%d shape=",
                        direction_name[p->direction], test_type_name[p->type], path_name[p->path], (long long)p->batch,
                        (long long)p->heads, (long long)p->dim, (long long)p->e, (long long)p->prefix, p->axes);
    for (int i = 0; i < p->axes; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%lld", i ? "x" : "", (long long)p->shape[i]);
    for (int i = 0; i < p->axes; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%lld", i ? "," : " offset=", (long long)p->offset[i]);
    snprintf(
        text + used, sizeof text - (size_t)used,
        "%s x=%s y=%s dx=%s x_at=%d y_at=%d dx_at=%d theta_at=%d dtheta_at=%d theta=%s %s%s%s activation=%s special=%s at "
        "%s%s%s%s%s "
        "seed=0x%llx",
        p->device_offset ? " (device)" : "", layout_name[p->x_layout], layout_name[p->y_layout], layout_name[p->dx_layout],
        p->x_at, p->y_at, p->dx_at, p->theta_at,
        p->dtheta_at, p->theta_t ? "T" : "f32", theta_name[p->theta], p->one_head ? " of all heads" : "",
        p->one_feature ? " of all features" : "", activation_name[p->activation], special_name[p->special],
        where_name[p->where], p->no_dx ? " dx=NULL" : "", p->dtheta ? " dtheta" : "", p->no_dy ? " dy=NULL" : "",
        p->accumulate ? " accumulate" : "", (unsigned long long)p->seed);
    return text;
}

/* Strides of batch, head, token; given: as the args say them, 0 for packed. */
typedef struct {
    int64_t given[3], stride[3], span;
} placing;

static placing place(const problem *p, int layout, int64_t width)
{
    const int64_t b = p->batch, h = p->heads, n = tokens_of(p), vec = 16 / test_type_bytes[p->type];
    const int64_t odd = width + 3, aligned = (width + vec - 1) / vec * vec + vec;
    const int64_t strides[LAYOUTS][3] = {{h * n * width, n * width, width},     {n * h * width, width, h * width},
                                         {h * (n * odd + 5), n * odd + 5, odd}, {h * n * aligned + vec, n * aligned, aligned},
                                         {width, b * width, h * b * width},     {n * 2 + 1, 3, 1}};
    placing at = {};
    for (int i = 0; i < 3; i++) {
        at.stride[i] = strides[layout][i];
        at.given[i] = layout == PACKED ? 0 : at.stride[i];
    }
    at.span = b && h && n ? (b - 1) * at.stride[0] + (h - 1) * at.stride[1] + (n - 1) * at.stride[2] + width : 0;
    return at;
}

static int64_t at_of(const placing *a, int64_t batch, int64_t head, int64_t token)
{
    return batch * a->stride[0] + head * a->stride[1] + token * a->stride[2];
}

/* Whether the vector path takes the problem; ones along an axis do not matter to it. */
static bool vector_takes(const problem *p)
{
    const int64_t vec = 16 / test_type_bytes[p->type], size[3] = {p->batch, p->heads, tokens_of(p)};
    if (p->dim % vec || (p->activation == LK_MD_LRPE_COSINE_SOFTMAX && p->dim > 32 * vec)) return false;
    const bool reads_x = p->direction == FORWARD || p->dtheta || p->activation;
    if ((reads_x && p->x_at % vec) || p->y_at % vec || (p->direction == BACKWARD && p->dx_at % vec)) return false;
    for (int which = reads_x ? 0 : 1; which < (p->direction == BACKWARD ? 3 : 2); which++) {
        const int layouts[] = {p->x_layout, p->y_layout, p->dx_layout};
        const placing a = place(p, layouts[which], which == 1 ? 2 * p->dim : p->dim);
        for (int i = 0; i < 3; i++)
            if (size[i] > 1 && a.stride[i] % vec) return false;
        /* What a single one of them is replaced by is packed from the strides inside it, which are multiples then. */
    }
    return true;
}

/* ---- Counts ---------------------------------------------------------------------------------------------------------- */

/* Of layouts, activations, thetas and specials the first is what else is the case; no more than TEST_MOST_OPTIONS in all. */
enum {
    DID_F32, DID_F16, DID_BF16, DID_EMPTY, DID_ONLY_PREFIX, DID_ONE_BATCH, DID_FEW_BATCHES, DID_MANY_BATCHES, DID_PREFIX,
    DID_AXES, DID_STRADDLE = DID_AXES + 5, DID_NARROW, DID_E, DID_ODD_DIM, DID_LONG_DIM, DID_ONE_LONG, DID_NEGATIVE,
    DID_FARTHEST, DID_DEVICE_OFFSET, DID_LAYOUT_X, DID_LAYOUT_Y = DID_LAYOUT_X + LAYOUTS - 1,
    DID_X_OFF = DID_LAYOUT_Y + LAYOUTS - 1,
    DID_OTHER_OFF, DID_THETA_OFF, DID_THETA_T, DID_ONE_HEAD, DID_ONE_FEATURE,
    DID_THETA, DID_ACTIVATION = DID_THETA + THETAS - 1, DID_SPECIAL =
    DID_ACTIVATION + ACTIVATIONS - 1, DID_DTHETA = DID_SPECIAL + SPECIALS - 1, DID_ACCUMULATE, DID_NO_DX, DID_NO_DY, DIDS
};
static_assert((int)DIDS <= (int)TEST_MOST_OPTIONS, "count fewer");
static const char *const did_name[DIDS] = {
    "f32", "f16", "bf16", "empty", "prefix alone", "batch 1", "batch 2 to 11", "batch 12 or more", "prefix", "1 axis",
    "2 axes", "3 axes", "4 to 7 axes", "8 axes", "vector on 2 axes", "vector on 3 axes", "e given", "odd dim", "dim > 256",
    "a length of 1", "position < 0", "position 2^31 - 1", "offset on device",
    "x [b,n,h,d]", "x odd gaps", "x aligned gaps", "x [n,h,b,d]",
    "x overlaps", "y [b,n,h,d]", "y odd gaps", "y aligned gaps", "y [n,h,b,d]", "dy overlaps", "x off", "y off other",
    "theta off", "theta of type T", "theta of all heads", "theta of all features",
    "theta 0", "theta up to 1e6", "theta tiny", "theta beyond 2^24", "theta wild", "relu",
    "sigmoid", "silu", "softmax", "softmax tokens", "prefix wild", "-inf", "+inf", "nan", "1e4", "x = 0", "dtheta",
    "accumulate", "dx NULL", "dy NULL"};
static const char *const counted_paths[] = {"fwd auto", "vector", "row", "bwd auto", "vector", "row"};
enum { COUNTED = 6 };
static const int counted_direction[] = {FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD};
static const int counted_path[] = {0, 1, 2, 0, 1, 2};
static test_counts counts = {counted_paths, did_name, COUNTED, DIDS, {}, {}};

/* Whether this direction and path can be asked for an option at all. */
static bool possible(int counted, int did)
{
    const bool back = counted_direction[counted] == BACKWARD, vector = counted_path[counted] == LK_MD_LRPE_COSINE_VECTOR;
    if (vector && (did == DID_ODD_DIM || did == DID_LAYOUT_X + ODD_GAPS - 1 || did == DID_LAYOUT_Y + ODD_GAPS - 1 ||
                   did == DID_LAYOUT_X + OVERLAPPING - 1 || did == DID_LAYOUT_Y + OVERLAPPING - 1 || did == DID_X_OFF ||
                   did == DID_OTHER_OFF))
        return false;
    if (did == DID_DTHETA || did == DID_ACCUMULATE || did == DID_NO_DX || did == DID_NO_DY ||
        did == DID_LAYOUT_Y + OVERLAPPING - 1)
        return back;
    return true;
}

static void count(const problem *p)
{
    const int64_t vec = 16 / test_type_bytes[p->type], e = e_of(p), cells = cells_of(p);
    const bool some = p->batch > 0 && p->heads > 0 && tokens_of(p) > 0, grid = some && cells > 0;
    const int axes = p->axes ? p->axes : 1, at = 3 * p->direction + p->path;
    bool did[DIDS] = {};
    did[p->type] = true;
    did[DID_EMPTY] = !some;
    if (some) {
        did[DID_ONLY_PREFIX] = cells == 0;
        did[DID_ONE_BATCH] = p->batch == 1;
        did[DID_FEW_BATCHES] = p->batch > 1 && p->batch < 12;
        did[DID_MANY_BATCHES] = p->batch >= 12;
        did[DID_PREFIX] = p->prefix > 0;
        did[DID_AXES + (axes < 4 ? axes - 1 : axes < 8 ? 3 : 4)] = true;
        did[DID_STRADDLE] = axes > 1 && e % vec && e > vec;
        did[DID_NARROW] = axes > 1 && e % vec && e < vec;
        did[DID_E] = p->e > 0;
        did[DID_ODD_DIM] = p->dim % 2 == 1;
        did[DID_LONG_DIM] = p->dim > 256;
        if (p->x_layout) did[DID_LAYOUT_X + p->x_layout - 1] = true;
        if (p->y_layout) did[DID_LAYOUT_Y + p->y_layout - 1] = true;
        did[DID_X_OFF] = p->x_at % vec != 0;
        did[DID_OTHER_OFF] = p->y_at % vec != p->x_at % vec;
        did[DID_THETA_OFF] = p->theta_at > 0;
        if (p->activation) did[DID_ACTIVATION + p->activation - 1] = true;
        if (p->special) did[DID_SPECIAL + p->special - 1] = p->special != PREFIX || p->prefix > 0;
        did[DID_DTHETA] = p->dtheta;
        did[DID_ACCUMULATE] = p->dtheta && p->accumulate;
        did[DID_NO_DX] = p->direction == BACKWARD && p->no_dx;
        did[DID_NO_DY] = p->direction == BACKWARD && p->no_dy;
    }
    if (grid) {
        did[DID_THETA_T] = p->theta_t;
        did[DID_DEVICE_OFFSET] = p->device_offset;
        did[DID_ONE_HEAD] = p->one_head && p->heads > 1;
        did[DID_ONE_FEATURE] = p->one_feature && e_of(p) > 1;
        if (p->theta) did[DID_THETA + p->theta - 1] = true;
        for (int i = 0; i < axes; i++) {
            did[DID_ONE_LONG] |= p->shape[i] == 1;
            did[DID_NEGATIVE] |= p->offset[i] < 0;
            did[DID_FARTHEST] |= p->offset[i] + p->shape[i] == (int64_t)1 << 31;
        }
    }
    counts.runs[at]++;
    for (int i = 0; i < DIDS; i++) counts.of[at][i] += did[i];
}

/* ---- The reference --------------------------------------------------------------------------------------------------- */

static float theta_value(const problem *p, int64_t head, int64_t t)
{
    uint64_t random = p->seed + 31 * (uint64_t)(head * e_of(p) + t);
    const double sign = (head + t) % 2 ? -1 : 1, u = test_uniform(&random);
    float value = (float)(sign * pow(10000.0, -(double)t / (double)e_of(p)) * (1 + 0.1 * u));
    if (p->theta == ZERO) value = 0;
    if (p->theta == LARGE) value = (float)(1e6 * u);
    if (p->theta == TINY) value = (float)ldexp(1.5 + 0.4 * u, -30 - (int)((head * 7 + t) % 31));
    if (p->theta == BEYOND) value = (float)ldexp(sign * (1.5 + 0.4 * u), 24 + (int)((head * 7 + t) % 6));
    if (p->theta == WILD && (head + t) % 3 == 0) value = t % 2 ? INFINITY : t % 4 ? -INFINITY : NAN;
    return value;
}

/* The position on the axis of feature f at a cell. */
static int64_t position_of(const problem *p, int64_t cell, int64_t f)
{
    const int axis = (int)(f / e_of(p));
    for (int i = (p->axes ? p->axes : 1) - 1; i > axis; i--) cell /= p->shape[i];
    return cell % p->shape[axis] + p->offset[axis];
}

/* cos and sin of the exact product. */
static void exact_angle(int64_t s, float theta, double *cos_of, double *sin_of)
{
    const long double phi = (long double)s * (long double)theta;
    *cos_of = (double)cosl(phi), *sin_of = (double)sinl(phi);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* Softmax over tokens: of the tokens of a batch, head and feature, the largest x, sum exp(x - max) and sum a g. */
typedef struct {
    double max, sum, dot, dot_slack;
    int64_t tokens;
} column;

/* a = act(x) of a row and how much it may err; slope of the elementwise ones likewise. c: the row's columns. */
static void activate(int activation, const double *x, const column *c, int64_t dim, double *a, double *err, double *slope,
                     double *slope_err)
{
    double max = -INFINITY, sum = 0;
    for (int64_t f = 0; f < dim; f++) max = fmax(max, x[f]);
    for (int64_t f = 0; f < dim; f++) sum += exp(x[f] - max);
    for (int64_t f = 0; f < dim; f++) {
        const double v = x[f], s = sigmoid(v), back = sigmoid(-v), r = ((isfinite(v) ? fabs(v) : 0) + 8) * 0x1p-23;
        const double flush = (isfinite(v) ? fabs(v) + 1 : 1) * 0x1p-126;
        a[f] = v, slope[f] = 1, err[f] = slope_err[f] = 0;
        if (activation == LK_MD_LRPE_COSINE_RELU) a[f] = v <= 0 ? 0 : v, slope[f] = v <= 0 ? 0 : 1;
        if (activation == LK_MD_LRPE_COSINE_SIGMOID) {
            a[f] = s, err[f] = s * r + flush;
            slope[f] = s * back, slope_err[f] = 2 * r * s * back + flush;
        }
        if (activation == LK_MD_LRPE_COSINE_SILU) {
            a[f] = v * s, err[f] = fabs(a[f]) * r + flush;
            slope[f] = s * (1 + v * back), slope_err[f] = 2 * r * s * (1 + fabs(v) * back) + flush;
        }
        if (activation == LK_MD_LRPE_COSINE_SOFTMAX) {
            a[f] = isfinite(max) ? exp(v - max) / sum : NAN;
            err[f] = a[f] * ((isfinite(v) ? max - v : 0) + log((double)dim) + 8) * 0x1p-23 + 0x1p-126;
        }
        if (activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS) {
            a[f] = isfinite(c[f].max) ? exp(v - c[f].max) / c[f].sum : NAN;
            err[f] = a[f] * ((isfinite(v) ? c[f].max - v : 0) + 2 * log((double)c[f].tokens) + 18) * 0x1p-23 + 0x1p-126;
        }
    }
}

/* ---- One checked call ------------------------------------------------------------------------------------------------ */

static const double ROTATION = 8e-7;

static test_buffer x_buffer, y_buffer, dx_buffer, theta_buffer, dtheta_buffer, work_buffer; /* y_buffer: dy in backward */
static test_buffer offset_buffer;
static unsigned char *kept, *kept_dtheta;                                                   /* the first run's outputs */
static size_t kept_bytes, kept_dtheta_bytes;

static double *table(int which, int64_t count)
{
    static double *tables[16];
    static size_t bytes[16];
    tables[which] = (double *)test_room(tables[which], &bytes[which], (size_t)(count > 0 ? count : 1) * sizeof(double));
    return tables[which];
}

/* The columns of x [batch, heads, tokens, dim], packed; those of a row begin at columns_of. */
static column *columns;

static column *columns_of(const problem *p, int64_t batch, int64_t head)
{
    return columns ? columns + (batch * p->heads + head) * p->dim : NULL;
}

static void make_columns(const problem *p, const double *x)
{
    static size_t bytes;
    const int64_t tokens = tokens_of(p), count = p->batch * p->heads * p->dim;
    if (p->activation != LK_MD_LRPE_COSINE_SOFTMAX_TOKENS || tokens == 0) return;
    columns = (column *)test_room(columns, &bytes, (size_t)(count + 1) * sizeof(column));
    for (int64_t i = 0; i < count; i++) {
        const double *const at = x + i / p->dim * tokens * p->dim + i % p->dim;
        column c = {-INFINITY, 0, 0, 0, tokens};
        for (int64_t n = 0; n < tokens; n++) c.max = fmax(c.max, at[n * p->dim]);
        for (int64_t n = 0; n < tokens; n++) c.sum += exp(at[n * p->dim] - c.max);
        columns[i] = c;
    }
}

/* The same of the x in x_buffer. */
static void read_columns(const problem *p, const placing *xs)
{
    if (p->activation != LK_MD_LRPE_COSINE_SOFTMAX_TOKENS) return;
    const int64_t tokens = tokens_of(p), rows = p->batch * p->heads * tokens;
    double *const x = table(15, rows * p->dim);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = at_of(xs, row / tokens / p->heads, row / tokens % p->heads, row % tokens);
        for (int64_t f = 0; f < p->dim; f++)
            x[row * p->dim + f] = (double)test_get(p->type, test_buffer_host(&x_buffer), at + f);
    }
    make_columns(p, x);
}

static bool is_special(const problem *p, int64_t row, int64_t f)
{
    const int vec = 16 / test_type_bytes[p->type];
    if (row % 3 == 0) return false;
    switch (p->where) {
    case FIRST: return f == 0;
    case LAST: return f == p->dim - 1;
    case VECTOR: return f / vec == (p->dim > vec ? 1 : 0);
    case LANE: return f % 32 == 1;
    case EVEN: return f % 2 == 0;
    }
    return true;
}

/* x, or the halves of dy when width is 2 dim: uniform in [-2, 2), but for what is special. */
static void fill(const problem *p, const placing *a, int64_t width, uint64_t salt, void *out)
{
    static const float value[] = {0, 0, -INFINITY, INFINITY, NAN, 1e4f, 0};
    uint64_t random = p->seed + salt;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->heads; h++)
            for (int64_t n = 0; n < tokens_of(p); n++)
                for (int64_t f = 0; f < width; f++) {
                    float v = (float)(2 * test_uniform(&random));
                    const bool in_prefix = n < p->prefix && (width == p->dim || f >= p->dim);
                    if (p->special == PREFIX && in_prefix) v = f % 3 ? NAN : f % 2 ? INFINITY : -INFINITY;
                    const bool spared = p->special == NIL && width != p->dim; /* dy is not 0 where x is */
                    if (p->special > PREFIX && !spared &&
                        is_special(p, (b * p->heads + h) * tokens_of(p) + n + (width != p->dim), f % p->dim))
                        v = value[p->special];
                    test_put(p->type, out, at_of(a, b, h, n) + f, v);
                }
}

static bool launched(const problem *p, lk_status status) { return test_launched(status, describe(p)); }

/* The part of an offset that the host gives. */
static int64_t host_offset(const problem *p, int axis)
{
    return p->device_offset ? p->offset[axis] / 3 : p->offset[axis];
}

/* Sizes and options. */
static lk_md_lrpe_cosine_args sizes_of(const problem *p)
{
    lk_md_lrpe_cosine_args args = {};
    args.theta = test_buffer_device(&theta_buffer);
    args.batch = p->batch, args.heads = p->heads, args.dim = p->dim, args.e = p->e, args.prefix = p->prefix;
    args.axes = p->axes, args.theta_heads = p->one_head, args.theta_features = p->one_feature;
    for (int i = 0; i < 8; i++) args.shape[i] = p->shape[i], args.offset[i] = host_offset(p, i);
    if (p->device_offset) args.offset_device = (const int32_t *)test_buffer_device(&offset_buffer);
    args.theta_dtype = p->theta_t ? LK_DTYPE_T : LK_DTYPE_F32;
    args.activation = p->activation, args.path = p->path;
    return args;
}

static bool reads_x(const problem *p)
{
    return p->direction == FORWARD || p->dtheta || p->activation;
}

/* Of a field that a call must not look at. */
#define GARBAGE ((char *)1)

static lk_md_lrpe_cosine_args args_of(const problem *p)
{
    lk_md_lrpe_cosine_args args = sizes_of(p);
    const bool back = p->direction == BACKWARD;
    const placing x = place(p, p->x_layout, p->dim), y = place(p, p->y_layout, 2 * p->dim), dx = place(p, p->dx_layout, p->dim);
    args.x = reads_x(p) ? test_buffer_device(&x_buffer) : GARBAGE;
    args.x_batch_stride = x.given[0], args.x_head_stride = x.given[1], args.x_token_stride = x.given[2];
    args.y = back ? GARBAGE : test_buffer_device(&y_buffer);
    args.y_batch_stride = back ? -1 : y.given[0], args.y_head_stride = y.given[1], args.y_token_stride = y.given[2];
    args.dy = !back ? GARBAGE : p->no_dy ? NULL : test_buffer_device(&y_buffer);
    args.dy_batch_stride = y.given[0], args.dy_head_stride = y.given[1], args.dy_token_stride = back ? y.given[2] : -1;
    args.dx = !back ? GARBAGE : p->no_dx ? NULL : test_buffer_device(&dx_buffer);
    args.dx_batch_stride = dx.given[0], args.dx_head_stride = back ? dx.given[1] : -1, args.dx_token_stride = dx.given[2];
    args.dtheta = (float *)(!back ? GARBAGE : p->dtheta ? test_buffer_device(&dtheta_buffer) : NULL);
    args.workspace = back ? NULL : GARBAGE;
    args.accumulate = p->accumulate;
    return args;
}

/* Gives a call the workspace that the query asks for, poisoned. */
static bool give_workspace(const problem *p, lk_md_lrpe_cosine_args *args, int poison)
{
    size_t needed = 12345;
    const lk_status query = query_of[p->direction][p->type](args, &needed);
    const bool wanted = p->dtheta || p->activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS;
    if (!test_that(query == LK_OK && (needed > 0) == (wanted && p->batch * p->heads * tokens_of(p) > 0)))
        test_detail("the query says %s, %zu bytes; %s", lk_status_string(query), needed, describe(p));
    if (query) return false;
    test_buffer_size(&work_buffer, needed, 0, poison);
    test_buffer_upload(&work_buffer);
    if (needed) args->workspace = test_buffer_device(&work_buffer), args->workspace_bytes = needed;
    return true;
}

static void check_workspace(const problem *p)
{
    test_buffer_download(&work_buffer);
    test_buffer_accept_all(&work_buffer);
    test_buffer_untouched(&work_buffer, "workspace", describe(p));
}

/* theta, and offset_device, which has as many elements as there are axes. */
static void prepare_theta(const problem *p, int poison)
{
    test_buffer_size(&offset_buffer, (size_t)(p->axes ? p->axes : 1) * 4, 4, poison);
    for (int i = 0; i < (p->axes ? p->axes : 1); i++)
        ((int32_t *)test_buffer_host(&offset_buffer))[i] = (int32_t)(p->offset[i] - host_offset(p, i));
    test_buffer_upload(&offset_buffer);
    const int bytes = p->theta_t ? test_type_bytes[p->type] : 4;
    const int64_t columns = theta_columns(p);
    test_buffer_size(&theta_buffer, (size_t)(theta_rows(p) * columns * bytes), (size_t)(p->theta_at * bytes), poison);
    for (int64_t h = 0; h < theta_rows(p); h++)
        for (int64_t t = 0; t < columns; t++)
            test_put(p->theta_t ? p->type : TEST_F32, test_buffer_host(&theta_buffer), h * columns + t, theta_value(p, h, t));
    test_buffer_upload(&theta_buffer);
}

/* cos and sin by (head, token, feature), 1 and 0 in the prefix, and the positions. Beyond 2^24 a doubling costs a bit of 2^-64
 * turns: `extra` is what that makes of the angle. */
static double angle_extra(const problem *p, double s)
{
    return p->theta == BEYOND ? fabs(s) * 0x1p-58 * 6.3 : 0;
}

static void make_angles(const problem *p, double *cos_of, double *sin_of, double *s_of)
{
    const int type = p->theta_t ? p->type : TEST_F32;
    const int64_t tokens = tokens_of(p);
    for (int64_t h = 0; h < p->heads; h++)
        for (int64_t n = 0; n < tokens; n++)
            for (int64_t f = 0; f < p->dim; f++) {
                const int64_t at = (h * tokens + n) * p->dim + f;
                const int64_t s = n < p->prefix ? 0 : position_of(p, n - p->prefix, f);
                const float theta = test_get(type, test_buffer_host(&theta_buffer), theta_at(p, h, f));
                cos_of[at] = 1, sin_of[at] = 0, s_of[at] = (double)s;
                if (n >= p->prefix) exact_angle(s, theta, &cos_of[at], &sin_of[at]);
            }
}

static void check_forward(const problem *p)
{
    const placing xs = place(p, p->x_layout, p->dim), ys = place(p, p->y_layout, 2 * p->dim);
    const int bytes = test_type_bytes[p->type];
    const int64_t tokens = tokens_of(p), dim = p->dim, angles = p->heads * tokens * dim;
    double *x = table(0, dim), *a = table(1, dim), *err = table(2, dim), *slope = table(3, dim), *slope_err = table(4, dim);
    double *cos_of = table(5, angles), *sin_of = table(6, angles), *s_of = table(7, angles);
    for (int run = 0; run < 2; run++) {
        test_buffer_size(&x_buffer, (size_t)(xs.span * bytes), (size_t)(p->x_at * bytes), run ? 0x7f : 0xff);
        test_buffer_size(&y_buffer, (size_t)(ys.span * bytes), (size_t)(p->y_at * bytes), run ? 0xff : 0x5a);
        fill(p, &xs, dim, 0, test_buffer_host(&x_buffer));
        prepare_theta(p, run ? 0x7f : 0xff);
        test_buffer_upload(&x_buffer), test_buffer_upload(&y_buffer);
        if (run == 0) make_angles(p, cos_of, sin_of, s_of);
        if (run == 0) read_columns(p, &xs);
        lk_md_lrpe_cosine_args args = args_of(p);
        if (!give_workspace(p, &args, run ? 0xff : 0x5a)) return;
        const bool ran = launched(p, call_of[FORWARD][p->type](&args, test.stream));
        test_buffer_download(&x_buffer), test_buffer_download(&y_buffer), test_buffer_download(&theta_buffer);
        if (!ran) return;
        check_workspace(p);

        const void *y = test_buffer_back(&y_buffer);
        kept = (unsigned char *)test_room(kept, &kept_bytes, y_buffer.bytes);
        for (int64_t b = 0; b < p->batch; b++)
            for (int64_t h = 0; h < p->heads; h++)
                for (int64_t n = 0; n < tokens; n++) {
                    const int64_t row = at_of(&ys, b, h, n);
                    if (run) {
                        if (!test_that(!memcmp(kept + row * bytes, (const char *)y + row * bytes, (size_t)(2 * dim * bytes))))
                            test_detail("a second run gives other bits for y[%lld,%lld,%lld]; %s", (long long)b, (long long)h,
                                        (long long)n, describe(p));
                    } else {
                        for (int64_t f = 0; f < dim; f++)
                            x[f] = (double)test_get(p->type, test_buffer_host(&x_buffer), at_of(&xs, b, h, n) + f);
                        activate(p->activation, x, columns_of(p, b, h), dim, a, err, slope, slope_err);
                        memcpy(kept + row * bytes, (const char *)y + row * bytes, (size_t)(2 * dim * bytes));
                    }
                    for (int64_t f = 0; f < dim && run == 0; f++) {
                        const int64_t at = (h * tokens + n) * dim + f;
                        const double extra = angle_extra(p, s_of[at]);
                        const double slack = n < p->prefix ? err[f] : err[f] + (ROTATION + extra) * fabs(a[f]);
                        const double want[2] = {n < p->prefix ? a[f] : a[f] * cos_of[at],
                                                n < p->prefix ? 0 : a[f] * sin_of[at]};
                        for (int half = 0; half < 2; half++) {
                            const float got = test_get(p->type, y, row + half * dim + f);
                            const bool exact = half == 1 && n < p->prefix;
                            const bool good = exact ? test_that(got == 0)
                                                    : test_near(p->type, got, want[half], isfinite(want[half]) ? slack : 0);
                            if (!good)
                                test_detail("y[%lld,%lld,%lld,%lld] is %.9g, want %.9g +- %.3g (position %.0f); %s",
                                            (long long)b, (long long)h, (long long)n, (long long)(half * dim + f), (double)got,
                                            want[half], slack, s_of[at], describe(p));
                        }
                    }
                    for (int64_t f = 0; f < 2 * dim; f++) test_buffer_accept(&y_buffer, row + f, bytes);
                }
        test_buffer_untouched(&x_buffer, "x", describe(p));
        test_buffer_untouched(&y_buffer, "y", describe(p));
        test_buffer_untouched(&theta_buffer, "theta", describe(p));
        test_buffer_download(&offset_buffer), test_buffer_untouched(&offset_buffer, "offset_device", describe(p));
    }
}

/* Holds dx of one row against the formula and adds its terms of dtheta. u, v: the halves of dy. */
typedef struct {
    double *x, *a, *err, *slope, *slope_err, *g, *g_slack;
    const double *cos_of, *sin_of, *s_of; /* of this row */
    double *sum, *limit;                  /* dtheta */
    int64_t batch, head;
    column *columns; /* whose dots the row belongs to; NULL once they are complete */
} backward_row;

/* g of a row, and what it adds to the dots of its columns. Returns sum_f a g. */
static double row_gradient(const problem *p, const backward_row *r, const double *u, const double *v, bool still,
                           double *dot_slack)
{
    double dot = 0;
    *dot_slack = 0;
    for (int64_t f = 0; f < p->dim; f++) {
        const double extra = angle_extra(p, r->s_of[f]);
        r->g[f] = still ? u[f] : u[f] * r->cos_of[f] + v[f] * r->sin_of[f];
        r->g_slack[f] = still ? 0 : (ROTATION + extra) * (fabs(u[f]) + fabs(v[f]));
        const double term = r->a[f] * r->g[f];
        const double slack = r->a[f] * r->g_slack[f] + r->err[f] * fabs(r->g[f]) + 16 * 0x1p-24 * fabs(term);
        dot += term, *dot_slack += slack;
        if (r->columns) r->columns[f].dot += term, r->columns[f].dot_slack += slack;
    }
    return dot;
}

static void check_dx(const problem *p, const backward_row *r, const void *dx, int64_t at, const double *u, const double *v,
                     bool still)
{
    double dot_slack, dot = row_gradient(p, r, u, v, still, &dot_slack);
    for (int64_t f = 0; f < p->dim; f++) {
        if (!r->sum || still) continue;
        const double s = r->s_of[f], extra = angle_extra(p, s);
        const double w = v[f] * r->cos_of[f] - u[f] * r->sin_of[f], size = fabs(u[f]) + fabs(v[f]);
        r->sum[theta_at(p, r->head, f)] += s * (r->a[f] * w);
        r->limit[theta_at(p, r->head, f)] += fabs(s) * size * (fabs(r->a[f]) * (16 * 0x1p-24 + ROTATION + extra) + r->err[f]);
    }
    for (int64_t f = 0; f < p->dim && dx; f++) {
        double want = r->g[f] * r->slope[f], slack = r->g_slack[f] * fabs(r->slope[f]) + fabs(r->g[f]) * r->slope_err[f];
        if (p->activation == LK_MD_LRPE_COSINE_RELU && r->slope[f] == 0) want = slack = 0; /* whatever g is */
        const bool over_tokens = p->activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS;
        const column *const c = over_tokens ? columns_of(p, r->batch, r->head) + f : NULL;
        if (c) dot = c->dot, dot_slack = c->dot_slack;
        if (over_tokens || p->activation == LK_MD_LRPE_COSINE_SOFTMAX) {
            want = r->a[f] * (r->g[f] - dot);
            slack =
                r->a[f] * (r->g_slack[f] + dot_slack + 0x1p-23 * (fabs(r->g[f]) + fabs(dot))) + r->err[f] * fabs(r->g[f] - dot);
        }
        slack = isfinite(want) ? slack + 0x1p-24 * fabs(want) + 0x1p-126 : 0;
        const float got = test_get(p->type, dx, at + f);
        if (!test_near(p->type, got, want, slack))
            test_detail("dx feature %lld is %.9g, want %.9g +- %.3g (x %.9g, u %.9g, v %.9g, position %.0f); %s", (long long)f,
                        (double)got, want, slack, r->x[f], u[f], v[f], r->s_of[f], describe(p));
    }
}

/* x, act(x) and the halves of dy of a row, and where its angles are. */
static void load_backward_row(const problem *p, backward_row *r, const placing *xs, const placing *ys, int64_t batch,
                              int64_t head, int64_t token, double *u, double *v)
{
    const int64_t x_at = at_of(xs, batch, head, token), dy_at = at_of(ys, batch, head, token), dim = p->dim;
    const int64_t angle = (head * tokens_of(p) + token) * dim, angles = p->heads * tokens_of(p) * dim;
    r->batch = batch, r->head = head;
    r->cos_of = table(5, angles) + angle, r->sin_of = table(6, angles) + angle, r->s_of = table(7, angles) + angle;
    for (int64_t f = 0; f < dim; f++) {
        r->x[f] = reads_x(p) ? (double)test_get(p->type, test_buffer_host(&x_buffer), x_at + f) : 0;
        u[f] = p->no_dy ? 1 : (double)test_get(p->type, test_buffer_host(&y_buffer), dy_at + f);
        v[f] = p->no_dy ? 1 : (double)test_get(p->type, test_buffer_host(&y_buffer), dy_at + dim + f);
    }
    activate(p->activation, r->x, columns_of(p, batch, head), dim, r->a, r->err, r->slope, r->slope_err);
}

static float initial_dtheta(int64_t at)
{
    return (float)(at % 7) - 3.25f;
}

static void check_backward(const problem *p)
{
    const placing xs = place(p, p->x_layout, p->dim), ys = place(p, p->y_layout, 2 * p->dim),
                  ds = place(p, p->dx_layout, p->dim);
    const int bytes = test_type_bytes[p->type];
    const int64_t tokens = tokens_of(p), dim = p->dim, angles = p->heads * tokens * dim, columns = theta_columns(p);
    const int64_t thetas = theta_rows(p) * columns;
    double *u = table(8, dim), *v = table(9, dim), *cos_of = table(5, angles), *sin_of = table(6, angles),
           *s_of = table(7, angles);
    double *sum = table(12, thetas), *limit = table(13, thetas);
    for (int run = 0; run < 2; run++) {
        test_buffer_size(&x_buffer, (size_t)(xs.span * bytes), (size_t)(p->x_at * bytes), run ? 0x7f : 0xff);
        test_buffer_size(&y_buffer, (size_t)(ys.span * bytes), (size_t)(p->y_at * bytes), run ? 0x7f : 0xff);
        test_buffer_size(&dx_buffer, (size_t)(ds.span * bytes), (size_t)(p->dx_at * bytes), run ? 0xff : 0x5a);
        test_buffer_size(&dtheta_buffer, (size_t)(thetas * 4), (size_t)(p->dtheta_at * 4), run ? 0xff : 0x5a);
        fill(p, &xs, dim, 0, test_buffer_host(&x_buffer));
        fill(p, &ys, 2 * dim, 77, test_buffer_host(&y_buffer));
        for (int64_t i = 0; i < thetas && p->accumulate; i++)
            test_put(TEST_F32, test_buffer_host(&dtheta_buffer), i, initial_dtheta(i));
        prepare_theta(p, run ? 0x7f : 0xff);
        if (run == 0) make_angles(p, cos_of, sin_of, s_of);
        if (run == 0) read_columns(p, &xs);
        lk_md_lrpe_cosine_args args = args_of(p);
        if (!give_workspace(p, &args, run ? 0xff : 0x5a)) return;
        test_buffer *const buffers[] = {&x_buffer, &y_buffer, &dx_buffer, &dtheta_buffer, &theta_buffer};
        for (int i = 0; i < 4; i++) test_buffer_upload(buffers[i]);
        const bool ran = launched(p, call_of[BACKWARD][p->type](&args, test.stream));
        for (int i = 0; i < 5; i++) test_buffer_download(buffers[i]);
        if (!ran) return;
        check_workspace(p);

        const void *dx = p->no_dx ? NULL : test_buffer_back(&dx_buffer);
        kept = (unsigned char *)test_room(kept, &kept_bytes, dx_buffer.bytes);
        kept_dtheta = (unsigned char *)test_room(kept_dtheta, &kept_dtheta_bytes, dtheta_buffer.bytes + 4);
        for (int64_t i = 0; i < thetas; i++) sum[i] = limit[i] = 0;
        backward_row r = {};
        r.x = table(0, dim), r.a = table(1, dim), r.err = table(2, dim), r.slope = table(3, dim), r.slope_err = table(4, dim);
        r.g = table(10, dim), r.g_slack = table(11, dim);
        r.sum = p->dtheta ? sum : NULL, r.limit = limit;
        const bool over_tokens = p->activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS;
        for (int64_t b = 0; b < p->batch && run == 0 && over_tokens; b++)
            for (int64_t h = 0; h < p->heads; h++)
                for (int64_t n = 0; n < tokens; n++) {
                    double slack;
                    r.columns = columns_of(p, b, h);
                    load_backward_row(p, &r, &xs, &ys, b, h, n, u, v);
                    row_gradient(p, &r, u, v, n < p->prefix, &slack);
                }
        r.columns = NULL;
        for (int64_t b = 0; b < p->batch; b++)
            for (int64_t h = 0; h < p->heads; h++)
                for (int64_t n = 0; n < tokens; n++) {
                    const int64_t row = at_of(&ds, b, h, n);
                    if (run == 0) {
                        load_backward_row(p, &r, &xs, &ys, b, h, n, u, v);
                        check_dx(p, &r, dx, row, u, v, n < p->prefix);
                        if (dx) memcpy(kept + row * bytes, (const char *)dx + row * bytes, (size_t)(dim * bytes));
                    } else if (dx &&
                               !test_that(!memcmp(kept + row * bytes, (const char *)dx + row * bytes, (size_t)(dim * bytes)))) {
                        test_detail("a second run gives other bits for dx[%lld,%lld,%lld]; %s", (long long)b, (long long)h,
                                    (long long)n, describe(p));
                    }
                    for (int64_t f = 0; f < dim && dx; f++) test_buffer_accept(&dx_buffer, row + f, bytes);
                }
        for (int64_t i = 0; i < thetas && p->dtheta; i++) {
            const float got = test_get(TEST_F32, test_buffer_back(&dtheta_buffer), i);
            const double had = p->accumulate ? (double)initial_dtheta(i) : 0, want = had + sum[i];
            const double slack = isfinite(want) ? limit[i] + 0x1p-24 * fabs(had) : 0;
            if (run == 0 && !test_near(TEST_F32, got, want, slack))
                test_detail("dtheta[%lld,%lld] is %.9g, want %.9g +- %.3g; %s", (long long)(i / columns),
                            (long long)(i % columns), (double)got, want, slack, describe(p));
            if (run == 0) memcpy(kept_dtheta + 4 * i, &got, 4);
            else if (!test_that(!memcmp(kept_dtheta + 4 * i, &got, 4)))
                test_detail("a second run gives other bits for dtheta[%lld]; %s", (long long)i, describe(p));
            test_buffer_accept(&dtheta_buffer, i, 4);
        }
        test_buffer_untouched(&x_buffer, "x", describe(p));
        test_buffer_untouched(&y_buffer, "dy", describe(p));
        test_buffer_untouched(&dx_buffer, "dx", describe(p));
        test_buffer_untouched(&theta_buffer, "theta", describe(p));
        test_buffer_download(&offset_buffer), test_buffer_untouched(&offset_buffer, "offset_device", describe(p));
        test_buffer_untouched(&dtheta_buffer, "dtheta", describe(p));
    }
}

/* Checks the problem; on the vector path only where it can run. Backward: dx, and dx with dtheta. */
static void check(const problem *p)
{
    if (p->path == LK_MD_LRPE_COSINE_VECTOR && !vector_takes(p)) return;
    count(p);
    if (p->direction == FORWARD) check_forward(p);
    else check_backward(p);
}

/* The same again, in a graph and on a busy device: see test_op. */
static test_buffer *output_of(const problem *p) { return p->direction == FORWARD ? &y_buffer : &dx_buffer; }
static bool prepare(const problem *p, int) { return test_buffer_upload(output_of(p)), test_buffer_upload(&dtheta_buffer), true; }
static lk_status launch(const problem *p)
{
    lk_md_lrpe_cosine_args args = args_of(p);
    if (work_buffer.bytes) args.workspace = test_buffer_device(&work_buffer), args.workspace_bytes = work_buffer.bytes;
    return call_of[p->direction][p->type](&args, test.stream);
}
static void collect(const problem *p) { test_buffer_download(output_of(p)), test_buffer_download(&dtheta_buffer); }
static void settle(const problem *p, bool, const char *what)
{
    const test_buffer *const out = output_of(p);
    bool same = !memcmp(test_buffer_back(out), kept, out->bytes);
    if (p->dtheta) same = same && !memcmp(test_buffer_back(&dtheta_buffer), kept_dtheta, dtheta_buffer.bytes);
    if (!test_that(same)) test_detail("%s gives other bits; %s", what, describe(p));
}
static const test_op<problem> op = {describe, prepare, launch, collect, NULL, settle};

static void check_both(problem p)
{
    check(&p);
    if (p.direction == FORWARD || p.dtheta) return;
    p.dtheta = true;
    check(&p);
}

/* ---- Themes: each on every path, in both directions ------------------------------------------------------------------ */

static void empty(int type, int direction, int path)
{
    const int64_t sizes[][4] = {{0, 2, 3, 0}, {2, 0, 3, 0}, {2, 2, 0, 0}, {2, 2, 0, 3}, {0, 0, 0, 0}, {0, 2, 3, 2}};
    for (int i = 0; i < LENGTH_OF(sizes); i++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            problem p = plain(type, direction, path, sizes[i][0], sizes[i][1], sizes[i][2], 16);
            p.prefix = sizes[i][3], p.accumulate = accumulate;
            if (direction == BACKWARD) check_both(p);
            else if (!accumulate) check(&p);
        }
    /* Tensors without elements may be NULL, and theta without tokens. */
    lk_md_lrpe_cosine_args f = {};
    f.batch = 2, f.heads = 2, f.dim = 16, f.path = path;
    const lk_status none = call_of[FORWARD][type](&f, test.stream);
    if (!test_that(none == LK_OK)) test_detail("no tokens and NULL tensors: %s, %s", lk_status_string(none), lk_last_error());
    lk_md_lrpe_cosine_args b = {};
    b.batch = 0, b.heads = 2, b.dim = 16, b.shape[0] = 3, b.path = path;
    const lk_status back = call_of[BACKWARD][type](&b, test.stream);
    if (!test_that(back == LK_OK)) test_detail("no batch and NULL tensors: %s, %s", lk_status_string(back), lk_last_error());
    /* An empty grid, whose other axes' product no integer holds, behind a prefix. */
    problem p = plain(type, direction, path, 2, 2, 0, 3 * 16 / test_type_bytes[type]);
    p.axes = 3, p.shape[1] = p.shape[2] = (int64_t)1 << 32, p.prefix = 3;
    check_both(p);
}

static void axes(int type, int direction, int path)
{
    const int64_t vec = 16 / test_type_bytes[type];
    const int64_t shapes[][8] = {{7},
                                 {1},
                                 {3, 4},
                                 {1, 5},
                                 {5, 1},
                                 {2, 3, 2},
                                 {1, 1, 6},
                                 {3, 1, 2},
                                 {2, 2, 2, 2},
                                 {2, 1, 3, 1},
                                 {1, 2, 1, 2, 3},
                                 {2, 1, 2, 1, 2, 2},
                                 {1, 2, 2, 1, 2, 1, 2},
                                 {2, 1, 2, 1, 1, 2, 1, 2},
                                 {1, 1, 1, 1, 1, 1, 1, 1}};
    const int64_t dims[] = {2 * vec, 3 * vec, 8 * vec, 7};
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int j = 0; j < LENGTH_OF(dims); j++) {
            if (test.small && (i + j) % 3) continue;
            problem p = plain(type, direction, path, 1 + (i + j) % 4, 1 + i % 3, 0, dims[j]);
            for (p.axes = 0; p.axes < 8 && shapes[i][p.axes]; p.axes++)
                p.shape[p.axes] = shapes[i][p.axes], p.offset[p.axes] = (i + j) % 2 ? 0 : 100 * p.axes - 150;
            p.prefix = j;
            check_both(p);
            p.e = e_of(&p) + 1 + j;
            check_both(p);
        }
}

static void dims(int type, int direction, int path)
{
    const int64_t v = 16 / test_type_bytes[type];
    const int64_t sizes[] = {1, v - 1, v, v + 1, 31, 33, 12 * v, 128, 127, 129, 256, 257, 300, 40 * v, 130 * v};
    for (int i = 0; i < LENGTH_OF(sizes) - (test.small ? 1 : 0); i++)
        for (int activation = 0; activation < ACTIVATIONS; activation += activation ? 1 : LK_MD_LRPE_COSINE_SOFTMAX) {
            problem p = plain(type, direction, path, 3, test.small ? 1 : 2, 3, sizes[i]);
            p.activation = activation, p.axes = 1 + i % 2, p.shape[1] = 2;
            check_both(p);
        }
}

static void batches(int type, int direction, int path)
{
    const int64_t batch[] = {1, 2, 3, 5, 12, 13, 33}, tokens[] = {1, 9, 50};
    for (int i = 0; i < LENGTH_OF(batch) - (test.small ? 1 : 0); i++)
        for (int j = 0; j < LENGTH_OF(tokens); j++) {
            if (test.small && j == 2 && i > 1) continue;
            problem p = plain(type, direction, path, batch[i], 3, tokens[j], 32);
            p.prefix = j;
            check_both(p);
        }
    problem p = plain(type, direction, path, 1, 3, test.small ? 120 : 900, 64); /* several tokens a thread */
    p.prefix = 3;
    check_both(p);
    p.activation = LK_MD_LRPE_COSINE_SOFTMAX;
    check_both(p);
    p.axes = 3, p.shape[0] = test.small ? 4 : 15, p.shape[1] = 6, p.shape[2] = 10, p.activation = 0;
    check_both(p);
}

static void prefixes(int type, int direction, int path)
{
    const int64_t prefix[] = {0, 1, 10};
    for (int i = 0; i < LENGTH_OF(prefix); i++)
        for (int activation = 0; activation < ACTIVATIONS; activation++)
            for (int64_t batch = 1; batch < 7; batch += 5) {
                if (test.small && activation % 2 && batch > 1) continue;
                problem p = plain(type, direction, path, batch, 2, activation == 1 ? 0 : 5, 16);
                p.prefix = prefix[i], p.special = PREFIX, p.activation = activation;
                check_both(p);
            }
}

static void activations(int type, int direction, int path)
{
    const int64_t sizes[] = {8, 96, 33, 300};
    for (int activation = 1; activation < ACTIVATIONS; activation++)
        for (int i = 0; i < LENGTH_OF(sizes); i++)
            for (int64_t batch = 1; batch < 6; batch += 4) {
                if (test.small && (i + activation + batch / 4) % 2) continue;
                problem p = plain(type, direction, path, batch, test.small ? 1 : 3, test.small ? 2 : 7, sizes[i]);
                p.activation = activation, p.prefix = test.small ? 1 : 2;
                check_both(p);
                p.special = FAR, p.where = EVEN, p.theta_t = true;
                check_both(p);
                p.special = activation == LK_MD_LRPE_COSINE_RELU ? NIL : FAR;
                if (p.special == NIL) check_both(p);
                p.no_dy = direction == BACKWARD;
                if (p.no_dy) check_both(p);
            }
}

/* Softmax over tokens: of any number, in one split and in several, with strides, prefixes and columns of special values. */
static void token_softmax(int type, int direction, int path)
{
    const int64_t vec = 16 / test_type_bytes[type], lengths[] = {1, 2, 3, 5, 15, 17, 31, 33, 100, 301};
    const bool vector = path == LK_MD_LRPE_COSINE_VECTOR;
    int several = 0;
    for (int i = 0; i < LENGTH_OF(lengths) - (test.small ? 1 : 0); i++)
        for (int k = 0; k < 4; k++) {
            if (test.small && i % 2 && k % 2) continue;
            problem p = plain(type, direction, path, 1 + (i + k) % 3, 1 + i % 2, lengths[i], k == 1 && !vector ? 13 : 2 * vec);
            p.activation = LK_MD_LRPE_COSINE_SOFTMAX_TOKENS, p.prefix = (i + k) % 3;
            if (k == 1) p.axes = 2, p.shape[1] = 2, p.no_dy = direction == BACKWARD && i % 2;
            if (k == 2) p.x_layout = TOKENS_FIRST, p.y_layout = BATCH_INSIDE, p.dx_layout = ALIGNED_GAPS, p.accumulate = true;
            if (k == 3 && !vector) p.x_layout = p.y_layout = p.dx_layout = ODD_GAPS, p.x_at = 1;
            if (k == 3) p.special = MINUS_INF + i / 2 % 3, p.where = EVEN, p.prefix = i % 2;
            check_both(p);
            p.dtheta = direction == BACKWARD;
            if (p.dtheta && k == 2) p.no_dx = true, check(&p);
            lk_md_lrpe_cosine_args args = args_of(&p), filled = {};
            lk_lrpe_split split = {};
            const bool back = direction == BACKWARD;
            const lk_direction direction = back ? LK_BACKWARD : LK_FORWARD;
            const lk_status status = lk_md_lrpe_cosine_check<lk_f32>("", &args, direction, NULL, &filled, &split);
            if (!status && !lk_lrpe_split_work("", &filled, test.sms, &split)) several += split.splits > 2;
        }
    if (!test_that(several > 2)) test_detail("%d cases with more than two splits", several);
}

/* Softmax over tokens where shared memory holds the columns: with 2 and 4 vectors of a token, idle lanes and threads, clusters
 * of every size, walks along the first of several axes, prefixes, strides and columns of special values. */
static void token_slabs(int type, int direction, int path)
{
    const int64_t vec = 16 / test_type_bytes[type];
    static const struct {
        int64_t shape[3], prefix, vecs, batch, heads;
    } cases[] = {{{64, 1, 1}, 0, 1, 1, 1},  {{3, 7, 5}, 2, 2, 3, 1},   {{65, 1, 1}, 3, 3, 2, 3},    {{11, 9, 1}, 70, 4, 2, 2},
                 {{1, 301, 1}, 7, 1, 1, 1}, {{150, 2, 1}, 0, 4, 1, 1}, {{2, 40, 5}, 0, 2, 1, 2},    {{0, 3, 1}, 100, 3, 1, 1},
                 {{63, 9, 1}, 5, 5, 1, 1},  {{1100, 1, 1}, 1, 3, 1, 1}, {{4, 260, 1}, 10, 4, 1, 1}, {{2300, 1, 1}, 0, 2, 1, 1},
                 {{1, 1280, 1}, 0, 3, 4, 2},
                 {{2, 2100, 1}, 0, 3, 1, 1}, {{4500, 1, 1}, 2, 4, 1, 1}};
    lk_device device = {};
    if (!test_that(lk_current_device(&device) == cudaSuccess)) test_detail("no device");
    int fit = 0, clusters = 0;
    for (int i = 0; i < LENGTH_OF(cases) - (test.small ? 2 : 0); i++)
        for (int k = 0; k < 3; k++) {
            if (test.small && i > 4 && k) continue;
            problem p = plain(type, direction, path, cases[i].batch, cases[i].heads, 0, cases[i].vecs * vec);
            p.activation = LK_MD_LRPE_COSINE_SOFTMAX_TOKENS, p.axes = 3, p.prefix = cases[i].prefix;
            for (int a = 0; a < 3; a++) p.shape[a] = cases[i].shape[a], p.offset[a] = 50 * a - 40;
            if (k == 0) p.e = p.dim / 2 + 1, p.special = PREFIX;
            if (k == 1) p.x_layout = TOKENS_FIRST, p.y_layout = BATCH_INSIDE, p.dx_layout = ALIGNED_GAPS, p.device_offset = true;
            if (k == 1) p.no_dy = direction == BACKWARD && i % 2, p.theta = LARGE;
            if (k == 2) p.special = MINUS_INF + i % 3, p.where = i % 2 ? EVEN : FIRST, p.one_head = true, p.theta = WILD;
            check(&p);
            lk_md_lrpe_cosine_args args = args_of(&p), filled = {};
            lk_lrpe_split split = {};
            lk_lrpe_slab_call slab = {};
            const bool back = direction == BACKWARD;
            if (lk_md_lrpe_cosine_check<lk_f32>("", &args, back ? LK_BACKWARD : LK_FORWARD, NULL, &filled, &split)) continue;
            if (type != TEST_F32) filled.dim /= 2; /* as many vectors of floats */
            size_t bytes = 0;
            for (int vecs = 4; vecs > 1 && !bytes; vecs /= 2)
                bytes = lk_lrpe_plan_slabs<lk_f32>(&slab, &device, filled, back, vecs);
            if (!bytes) continue;
            if (!test_that((bytes + 1024) * LK_LRPE_SLAB_BLOCKS(back) <= (size_t)device.smem * 1024))
                test_detail("%zu bytes for a block; %s", bytes, describe(&p));
            fit++, clusters |= 1 << slab.cluster_log2;
        }
    const int all = device.arch < 90 ? 1 : test.sms < 16 ? 15 : 8; /* sizes that came up; a large device has few small ones */
    if (!test_that(fit > 8 && (clusters & all) == all)) test_detail("%d cases with slabs, clusters 0x%x", fit, clusters);
}

static void layouts(int type, int direction, int path)
{
    const int64_t v = 16 / test_type_bytes[type];
    for (int x = 0; x < LAYOUTS; x++)
        for (int y = 0; y < LAYOUTS; y++) {
            if (y == OVERLAPPING && direction == FORWARD) continue;
            if (test.small && (x + 2 * y) % 3) continue;
            problem p = plain(type, direction, path, 2 + (x + y) % 3, 3, 5, (x + y) % 2 ? 3 * v : 3 * v + 1);
            p.x_layout = x, p.y_layout = y, p.dx_layout = (x + 2) % LAYOUTS == OVERLAPPING ? PACKED : (x + 2) % LAYOUTS;
            p.prefix = 1;
            check_both(p);
            p.dim = 3 * v, p.dx_layout = x == OVERLAPPING ? TOKENS_FIRST : x, p.batch = 1 + y % 2;
            check_both(p);
        }
    for (int one = 0; one < 3; one++) { /* a stride of a single batch, head or token does not matter */
        problem p = plain(type, direction, path, one == 0 ? 1 : 4, one == 1 ? 1 : 3, one == 2 ? 1 : 5, 2 * v);
        p.x_layout = p.y_layout = p.dx_layout = ODD_GAPS;
        check_both(p);
        p.x_layout = p.y_layout = p.dx_layout = TOKENS_FIRST;
        check_both(p);
    }
}

static void misaligned(int type, int direction, int path)
{
    const int v = 16 / test_type_bytes[type];
    for (int at = 0; at < v; at += test.small && at > 0 ? v - 2 : 1) {
        problem p = plain(type, direction, path, 3, 2, 4, 2 * v);
        p.x_at = p.y_at = p.dx_at = at, p.theta_at = at % 2, p.dtheta_at = 1;
        check_both(p);
        p.theta_t = true, p.theta_at = 1;
        check_both(p);
        p.y_at = (at + 1) % v, p.dx_at = (at + 3) % v;
        check_both(p);
        p.x_at = 0, p.y_at = 0, p.dx_at = at;
        check_both(p);
    }
}

/* Thetas that heads, features or both share: with one and several axes, long walks, and prefixes. */
static void shared(int type, int direction, int path)
{
    const int64_t vec = 16 / test_type_bytes[type];
    for (int which = 1; which < 4; which++)
        for (int i = 0; i < 4; i++) {
            const bool odd = i == 3 && path != LK_MD_LRPE_COSINE_VECTOR;
            problem p = plain(type, direction, path, 1 + (which + i) % 4, 3, 7, odd ? 37 : 3 * vec);
            p.one_head = (which & 1) != 0, p.one_feature = (which & 2) != 0;
            p.axes = 1 + i % 3, p.shape[1] = 2, p.shape[2] = 3, p.prefix = i, p.accumulate = i % 2, p.theta_at = i % 2;
            p.theta_t = i == 1, p.e = i == 2 ? p.dim + 3 : 0;
            check_both(p);
        }
    problem none = plain(type, direction, path, 2, 0, 3, 2 * vec); /* no head, but a row of dtheta */
    none.one_head = true;
    check_both(none);
    problem given = plain(type, direction, path, 2, 3, 5, 2 * vec); /* sizes spelt out are those of 0 */
    check(&given);
    lk_md_lrpe_cosine_args a = args_of(&given);
    a.theta_heads = 3, a.theta_features = 2 * vec;
    if (direction == BACKWARD) test_buffer_upload(&dx_buffer);
    else test_buffer_upload(&y_buffer);
    if (!launched(&given, call_of[direction][type](&a, test.stream))) return;
    test_buffer *const out = direction == FORWARD ? &y_buffer : &dx_buffer;
    test_buffer_download(out);
    if (!test_that(!memcmp(test_buffer_back(out), kept, out->bytes))) test_detail("other bits; %s", describe(&given));
}

/* Where angles are hard: positions to both ends, theta of every size. */
static void thetas(int type, int direction, int path)
{
    const int64_t last = (int64_t)1 << 31;
    for (int theta = 0; theta < THETAS; theta++)
        for (int i = 0; i < 6; i++) {
            problem p = plain(type, direction, path, 1 + i % 3, 3, 4, 40);
            p.theta = theta, p.axes = 2, p.shape[1] = 3, p.theta_t = i % 2;
            if (type == TEST_F16 && (theta == LARGE || theta == BEYOND || theta == TINY)) p.theta_t = false; /* beyond f16 */
            const int64_t offsets[][2] = {{0, 0},        {100000, 7},           {last - 4, -last + 1},
                                          {-3, 1 << 20}, {-last + 1, last - 3}, {1 << 24, -(1 << 30)}};
            p.offset[0] = offsets[i][0], p.offset[1] = offsets[i][1];
            p.prefix = i % 2;
            check_both(p);
        }
}

/* Offsets in device memory: over tokens and over batches, on several axes, at both ends, with every activation. */
static void device_offsets(int type, int direction, int path)
{
    const int64_t vec = 16 / test_type_bytes[type], last = (int64_t)1 << 31;
    for (int axes = 1; axes <= 8; axes++)
        for (int64_t batch = 1; batch < 6; batch += 4) {
            problem p = plain(type, direction, path, batch, 2, 5, axes % 4 == 3 ? 33 : 3 * vec);
            p.device_offset = true, p.axes = axes, p.prefix = axes % 3, p.activation = axes % ACTIVATIONS;
            for (int i = 1; i < axes; i++) p.shape[i] = 1 + i % 2;
            for (int i = 0; i < axes; i++) p.offset[i] = i % 3 == 0 ? 1000 + 7 * i : i % 3 == 1 ? -last + 1 + i : last - 2 - i;
            check_both(p);
            p.activation = 0, p.theta_t = true;
            check_both(p);
        }
    problem p = plain(type, direction, path, 1, 3, test.small ? 120 : 900, 64); /* several tokens a thread */
    p.device_offset = true, p.prefix = 3, p.offset[0] = 12345;
    check_both(p);
    p.activation = LK_MD_LRPE_COSINE_SOFTMAX, p.dim = path == LK_MD_LRPE_COSINE_VECTOR ? 64 : 300, p.shape[0] = 7;
    check_both(p);
}

static void specials(int type, int direction, int path)
{
    const int64_t sizes[] = {1, 16, 47, 80, 300};
    for (int special = MINUS_INF; special < SPECIALS; special++)
        for (int where = 0; where < WHERES; where++)
            for (int i = 0; i < LENGTH_OF(sizes); i++) {
                if (test.small && (i + special + where) % 4) continue;
                problem p = plain(type, direction, path, 2 + where % 2 * 2, test.small ? 1 : 2, 3, sizes[i]);
                p.special = special, p.where = where, p.activation = (special + 2 * where + i) % ACTIVATIONS;
                p.prefix = 1;
                check_both(p);
            }
}

static void outputs(int type, int direction, int path)
{
    if (direction == FORWARD) return;
    for (int i = 0; i < 16; i++) {
        problem p = plain(type, direction, path, 1 + i % 5, 2, 9, i % 4 == 3 ? 24 : 32);
        p.dtheta = i & 1 || i & 2, p.no_dx = (i & 2) != 0, p.accumulate = (i & 4) != 0, p.no_dy = (i & 8) != 0;
        p.activation = i % 3 == 0 ? LK_MD_LRPE_COSINE_SILU : 0, p.prefix = i % 3, p.axes = 1 + i % 3, p.shape[1] = 2,
        p.shape[2] = 2;
        p.e = i % 5 == 0 ? p.dim + 3 : 0;
        check(&p);
    }
    problem infinite = plain(type, direction, path, 40, 40, 1, 8); /* terms of one sign behind an infinite one */
    infinite.special = PLUS_INF, infinite.where = FIRST, infinite.offset[0] = 5, infinite.no_dy = infinite.dtheta = true;
    check(&infinite);
    for (int i = 0; i < 3; i++) { /* more tokens and batches than slots: long sums */
        problem p =
            plain(type, direction, path, i == 2 ? 40 : 1 + i, i == 2 ? 40 : 2, test.small ? 200 : 900, i == 2 ? 8 : 128);
        if (i == 2) p.shape[0] = test.small ? 2 : 12;
        p.dtheta = true, p.no_dx = i > 0, p.prefix = 2;
        check(&p);
    }
}

/* Walks of several steps, which take as many tokens as the device has threads for: over tokens through a prefix into the grid,
 * along an axis behind one of length 1, from positions at both ends, with vectors on two axes, and with idle lanes; over a
 * batch that gives its groups several rounds of loads, not all alike. */
static void walks(int type, int direction, int path)
{
    const bool few_sms = test.sms < 16; /* elsewhere shorter walks, for the reference's time */
    const int64_t vec = 16 / test_type_bytes[type], last = (int64_t)1 << 31, steps = few_sms ? (test.small ? 3 : 17) : 4;
    const int64_t tokens = steps * test.sms * LK_LRPE_FILL / 32 + 7; /* of 32 lanes each */
    problem p = plain(type, direction, path, 1, 1, tokens - 10, 32 * vec);
    p.prefix = 10, p.offset[0] = -last + 1, p.theta = LARGE;
    check(&p);
    p = plain(type, direction, path, 2, 1, 1, 32 * vec);
    p.axes = 4, p.shape[1] = tokens / 60, p.shape[2] = 3, p.shape[3] = 5, p.prefix = tokens / 2, p.e = 8 * vec + 1;
    p.special = PREFIX;
    p.offset[0] = 1000, p.offset[1] = last - p.shape[1], p.offset[2] = -last + 1, p.offset[3] = -7;
    check(&p);
    p = plain(type, direction, path, 17, 1, 4 * test.sms + 1, 32 * vec);
    check(&p);
    if (!few_sms) return;
    p.activation = LK_MD_LRPE_COSINE_SOFTMAX, p.dim = 24 * vec;
    check(&p);
    p = plain(type, direction, path, 1, 1, tokens / 2, 24 * vec);
    p.activation = LK_MD_LRPE_COSINE_SOFTMAX, p.prefix = 1, p.axes = 2, p.shape[1] = 2;
    check(&p);
}

static void graphs(int type, int direction, int path)
{
    const int activations_of[] = {LK_MD_LRPE_COSINE_NONE, LK_MD_LRPE_COSINE_SOFTMAX_TOKENS};
    for (int activation : activations_of) {
        problem p = plain(type, direction, path, 3, 2, 40, 64);
        p.dtheta = direction == BACKWARD, p.prefix = 2, p.activation = activation;
        check(&p);
        test_graph(op, &p);
        if (activation) p.shape[0] = 400, p.dtheta = false, check(&p), test_graph(op, &p); /* in slabs */
    }
}

static bool backward_alone(int direction, int) { return direction == BACKWARD; }
static bool vectors_alone(int, int path) { return path == LK_MD_LRPE_COSINE_VECTOR; }

static void all_themes(void)
{
    static const test_theme themes[] = {{"empty", empty},
                                        {"axes", axes},
                                        {"dims", dims},
                                        {"batches", batches},
                                        {"prefix", prefixes},
                                        {"activations", activations},
                                        {"softmax over tokens", token_softmax},
                                        {"columns in shared memory", token_slabs, vectors_alone},
                                        {"layouts", layouts},
                                        {"off by elements", misaligned},
                                        {"positions and thetas", thetas},
                                        {"shared thetas", shared},
                                        {"offsets on the device", device_offsets},
                                        {"special values", specials},
                                        {"walks", walks, vectors_alone},
                                        {"outputs", outputs, backward_alone},
                                        {"graph", graphs}};
    for (int at = 0; at < COUNTED; at++)
        test_themes(themes, LENGTH_OF(themes), counted_direction[at], counted_path[at], direction_name[counted_direction[at]],
                    path_name[counted_path[at]]);
}

/* ---- Angles of their own ------------------------------------------------------------------------------------------------ */

#if defined(LK_SIMT)
enum { SWEEP = 256 };
#else
enum { SWEEP = 4096 };
#endif

/* x = 1 in f32: y is the cosines and sines themselves. Many phases, at all sizes of s and theta; the line's error is the worst.
 * Walks over tokens with batch 1, angles shared over the batch with 3. */
static void sweep(int64_t offset, int theta, int64_t batch)
{
    const int64_t length = (test.small ? 32 : SWEEP) / (batch > 1 ? 4 : 1);
    problem p = plain(TEST_F32, FORWARD, LK_MD_LRPE_COSINE_AUTO, batch, 4, length, 256);
    p.theta = theta, p.offset[0] = offset;
    const int64_t tokens = tokens_of(&p), rows = batch * p.heads * tokens;
    test_buffer_size(&x_buffer, (size_t)(rows * p.dim * 4), 0, 0);
    test_buffer_size(&y_buffer, 2 * x_buffer.bytes, 0, 0x5a);
    for (int64_t i = 0; i < rows * p.dim; i++) ((float *)test_buffer_host(&x_buffer))[i] = 1;
    prepare_theta(&p, 0xff);
    test_buffer_upload(&x_buffer), test_buffer_upload(&y_buffer);
    const lk_md_lrpe_cosine_args args = args_of(&p);
    const bool ran = launched(&p, call_of[FORWARD][TEST_F32](&args, test.stream));
    test_buffer_download(&x_buffer), test_buffer_download(&y_buffer), test_buffer_download(&theta_buffer);
    const float *y = (const float *)test_buffer_back(&y_buffer);
    for (int64_t row = 0; row < rows && ran; row++)
        for (int64_t f = 0; f < p.dim; f++) {
            double cos_of, sin_of;
            const float turned = theta_value(&p, row / tokens % p.heads, f);
            exact_angle(row % tokens + offset, turned, &cos_of, &sin_of);
            const float *got = y + row * 2 * p.dim + f;
            if (!test_within(fmax(fabs((double)got[0] - cos_of), fabs((double)got[p.dim] - sin_of)), ROTATION))
                test_detail("position %lld theta %.9g: (%.9g, %.9g), want (%.9g, %.9g)", (long long)(row % tokens + offset),
                            (double)turned, (double)got[0], (double)got[p.dim], cos_of, sin_of);
        }
}

/* By how much a float product of position and theta is wrong at s = 10^5, as PyTorch computes it: printed beside lk's. */
static void peers(void)
{
    double worst = 0, at_most = 0;
    problem p = plain(TEST_F32, FORWARD, LK_MD_LRPE_COSINE_AUTO, 1, 4, 64, 128);
    for (int64_t h = 0; h < p.heads; h++)
        for (int64_t t = 0; t < p.dim; t++)
            for (int64_t s = 100000; s < 100064; s++) {
                const float theta = theta_value(&p, h, t), product = (float)s * theta;
                double cos_of, sin_of;
                exact_angle(s, theta, &cos_of, &sin_of);
                worst = fmax(worst, fmax(fabs(cos((double)product) - cos_of), fabs(sin((double)product) - sin_of)));
                at_most = fmax(at_most, fabs((double)product));
            }
    test_note("     at s = 1e5 a float product (PyTorch's) errs by %.3g in cos and sin, on angles up to %.3g\n", worst, at_most);
}

typedef struct {
    const int64_t *n; /* those for 64 bits, then as many for 32 */
    int64_t *quotient;
    lk_lrpe_divisor by;
    int count;
} division_plan;

LK_KERNEL void division_kernel(division_plan p)
{
    for (int i = threadIdx.x; i < p.count; i += 32) {
        p.quotient[i] = lk_lrpe_divide(p.n[i], p.by);
        p.quotient[p.count + i] = lk_lrpe_divide((int)p.n[p.count + i], p.by);
    }
}

static void divisions(void)
{
    const int64_t sizes[] = {1,
                             2,
                             3,
                             5,
                             7,
                             10,
                             43,
                             64,
                             641,
                             65535,
                             65537,
                             1000003,
                             (1ll << 29) + 1,
                             (1ll << 30) - 1,
                             1ll << 30,
                             (1ll << 30) + 1,
                             (1ll << 31) - 1,
                             1ll << 31,
                             (1ll << 31) + 1,
                             (1ll << 40) + 3,
                             3ll << 55,
                             (1ll << 61) + 1,
                             1ll << 62};
    enum { N = 300 };
    uint64_t random = 3;
    for (int i = 0; i < LENGTH_OF(sizes); i++) {
        test_buffer_size(&x_buffer, 2 * N * 8, 0, 0), test_buffer_size(&y_buffer, 2 * N * 8, 0, 0x5a);
        int64_t *n = (int64_t *)test_buffer_host(&x_buffer);
        for (int k = 0; k < 2 * N; k++) { /* around multiples of the size, of every magnitude; in 32 bits below large sizes */
            const int64_t all = k < N ? INT64_MAX : sizes[i] > 1 << 30 && sizes[i] <= INT32_MAX ? sizes[i] - 1 : INT32_MAX;
            const int64_t most = all >> (k % (k < N ? 60 : 28)), times = most / sizes[i],
                          multiple = (times ? test_below(&random, times) : 0) * sizes[i];
            n[k] = k % 3 == 0 && multiple > 0 ? multiple - 1 : k % 3 == 1 ? multiple : test_below(&random, most);
            if (k == 0 || k == N) n[k] = 0, n[k + 1] = all, n[k + 2] = sizes[i] - 1 < all ? sizes[i] - 1 : all, k += 2;
        }
        test_buffer_upload(&x_buffer), test_buffer_upload(&y_buffer);
        const division_plan plan = {(const int64_t *)test_buffer_device(&x_buffer), (int64_t *)test_buffer_device(&y_buffer),
                                    lk_lrpe_make_divisor(sizes[i]), N};
        TEST_CUDA(lk_launch(division_kernel, 1, 32, 0, test.stream, plan));
        TEST_CUDA(cudaStreamSynchronize(test.stream));
        test_buffer_download(&x_buffer), test_buffer_download(&y_buffer);
        const int64_t *got = (const int64_t *)test_buffer_back(&y_buffer);
        for (int k = 0; k < 2 * N; k++)
            if (!test_that(got[k] == n[k] / sizes[i]))
                test_detail("%lld / %lld is %lld, got %lld in %d bits", (long long)n[k], (long long)sizes[i],
                            (long long)(n[k] / sizes[i]), (long long)got[k], k < N ? 64 : 32);
    }
}

/* Long columns of a thread: values that float sums would lose behind a first one, and values that rise slowly, so that a sum
 * against the largest would be rescaled at each step. g is 1, so dot is the sum as well. */
typedef struct {
    lk_lrpe_column *out;
    int count;
} long_plan;

static __host__ __device__ float long_value(int lane, int i)
{
    return lane % 2 ? 1e-3f * (float)i + (float)lane : i == 0 ? 0.0f : -18.5f - 0.1f * (float)lane;
}

LK_KERNEL void long_kernel(long_plan p)
{
    lk_lrpe_column to[1] = {{-INFINITY, 0.0f, 0.0f}}, lost[1] = {};
    const float one[4][1] = {{1.0f}, {1.0f}, {1.0f}, {1.0f}};
    for (int i = 0; i < p.count; i++) {
        const float value = long_value((int)threadIdx.x, i), x[4][1] = {{value}, {value}, {value}, {value}};
        lk_lrpe_add_tokens<true>(to, lost, x, one);
    }
    p.out[threadIdx.x] = to[0];
}

static void long_columns(void)
{
    const int count = 8192;
    test_buffer_size(&y_buffer, 32 * sizeof(lk_lrpe_column), 0, 0x5a);
    test_buffer_upload(&y_buffer);
    const long_plan plan = {(lk_lrpe_column *)test_buffer_device(&y_buffer), count};
    TEST_CUDA(lk_launch(long_kernel, 1, 32, 0, test.stream, plan));
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    test_buffer_download(&y_buffer);
    for (int lane = 0; lane < 32; lane++) {
        const lk_lrpe_column got = ((const lk_lrpe_column *)test_buffer_back(&y_buffer))[lane];
        double want = 0;
        for (int i = 0; i < count; i++) want += 4 * exp((double)long_value(lane, i) - (double)got.max);
        const double slack = want * (2 * log(4.0 * count) + 18) * 0x1p-23;
        if (!test_near(TEST_F32, got.sum, want, slack) || !test_near(TEST_F32, got.dot, want, slack))
            test_detail("lane %d has sum %.9g and dot %.9g against %.9g, want %.9g +- %.3g", lane, (double)got.sum,
                        (double)got.dot, (double)got.max, want, slack);
    }
}

/* Where items stand in grids that no buffer of a test has room for, on both sides of what ints count. */
typedef struct {
    lk_lrpe_call call;
    const int64_t *item;
    /* head, token, batch, positions on both axes, in the prefix 0, and on the first where a walk's angles are computed,
     * tokens of the walk */
    int64_t *found;
    int count;
} place_plan;

LK_KERNEL void place_kernel(const __grid_constant__ place_plan p)
{
    for (int i = threadIdx.x; i < p.count; i += 32) {
        lk_lrpe_item at = lk_lrpe_find_item(p.call, p.item[i]);
        at.feature = 0;
        const int64_t cell = at.token - p.call.grid.prefix;
        int64_t *found = p.found + 7 * i;
        found[0] = at.head, found[1] = at.token, found[2] = at.batch;
        found[3] = cell < 0 ? 0 : lk_lrpe_position(p.call.grid, cell, 0);
        found[4] = cell < 0 ? 0 : lk_lrpe_position(p.call.grid, cell, 1);
        lk_lrpe_phases<lk_bf16, true> phases;
        lk_lrpe_start_phases(&phases, p.call, at);
        found[5] = phases.s[0], found[6] = at.tokens;
    }
}

static void places(void)
{
    enum { N = 96 };
    static const struct {
        int64_t batch, heads, prefix, shape[2], dim;
    } cases[] = {
        {1, 1, 0, {(1 << 30) - 2, 1}, 8}, {1, 1, 0, {1 << 30, 1}, 8},      {1, 1, 7, {1ll << 31, 1}, 8},
        {3, 5, 3, {1000003, 17}, 128},    {3, 5, 3, {65537, 641}, 8},      {3, 70000, 1, {4, 3}, 64},
        {1000000, 2, 0, {1, 1000}, 32},   {2, 1, 5, {2, 1 << 29}, 8},      {1, 3, (1ll << 40) + 1, {65537, 3}, 8},
        {5, 2, 0, {715827883, 1}, 8},     {1, 1, 0, {1 << 15, 1 << 14}, 8},  {3, 1 << 24, 1, {8, 3}, 128}};
    uint64_t random = 5;
    int large = 0;
    for (int k = 0; k < 2 * LENGTH_OF(cases); k++) {
        const int i = k / 2;
        const bool walks = k % 2; /* over tokens */
        const int64_t heads = cases[i].heads, prefix = cases[i].prefix, width = cases[i].shape[1], lanes = cases[i].dim / 8;
        problem q = plain(TEST_BF16, FORWARD, LK_MD_LRPE_COSINE_VECTOR, cases[i].batch, heads, cases[i].shape[0], cases[i].dim);
        q.prefix = prefix, q.axes = 2, q.shape[1] = width, q.offset[0] = -5, q.e = q.dim;
        test_buffer_size(&x_buffer, N * 8, 0, 0), test_buffer_size(&y_buffer, 7 * N * 8, 0, 0x5a);
        int64_t *const item = (int64_t *)test_buffer_host(&x_buffer);
        const lk_md_lrpe_cosine_args f = sizes_of(&q);
        lk_md_lrpe_cosine_args filled = {};
        lk_lrpe_split split = {};
        const lk_status status = lk_md_lrpe_cosine_check<lk_bf16>("places", &f, LK_FORWARD, NULL, &filled, &split);
        if (!test_that(status == LK_OK)) test_detail("%s; %s", lk_last_error(), describe(&q));
        place_plan p = {};
        lk_lrpe_start_call<lk_bf16>(&p.call, filled, false);
        const int64_t tokens = p.call.tokens;
        p.call.in_stride[1] = 2 * (i % 2), p.call.in_stride[2] = 1; /* heads outside of tokens, or inside */
        lk_lrpe_assign_items<lk_bf16>(&p.call, filled, test.sms, walks, split, walks ? 1 : LK_LRPE_GROUPS);
        large += !p.call.grid.small;
        for (int n = 0; n < N; n++)
            item[n] = n % 2 ? test_below(&random, p.call.items) : p.call.items - 1 - n / 2 % p.call.items;
        test_buffer_upload(&x_buffer), test_buffer_upload(&y_buffer);
        p.item = (const int64_t *)test_buffer_device(&x_buffer), p.count = N;
        p.found = (int64_t *)test_buffer_device(&y_buffer);
        TEST_CUDA(lk_launch(place_kernel, 1, 32, 0, test.stream, p));
        TEST_CUDA(cudaStreamSynchronize(test.stream));
        test_buffer_download(&x_buffer), test_buffer_download(&y_buffer);
        for (int n = 0; n < N; n++) {
            const bool inside = p.call.heads_inner;
            const int64_t row = item[n] / lanes, step = p.call.token_step, inner = row % (inside ? heads : step);
            const int64_t outer = row / (inside ? heads : step) % (inside ? step : heads), token = inside ? outer : inner;
            const int64_t cell = token - prefix, first = cell < 0 ? token + (step - cell - 1) / step * step : token;
            const int64_t *const got = (const int64_t *)test_buffer_back(&y_buffer) + 7 * n;
            const int64_t want[7] = {inside ? inner : outer,
                                     token,
                                     row / (heads * step) * p.call.batch_span,
                                     cell < 0 ? 0 : cell / width - 5,
                                     cell < 0 ? 0 : cell % width,
                                     first < tokens ? (first - prefix) / width - 5 : got[5], /* the walk has such a token */
                                     (tokens - token + step - 1) / step};
            static const char *const what[] = {"head", "token", "batch", "position 0", "position 1", "origin", "tokens"};
            for (int j = 0; j < 7; j++)
                if (!test_that(got[j] == want[j]))
                    test_detail("item %lld has %s %lld, want %lld; %s", (long long)item[n], what[j], (long long)got[j],
                                (long long)want[j], describe(&q));
        }
    }
    if (!test_that(large > 4 && large < 2 * LENGTH_OF(cases) - 4)) test_detail("%d cases beyond ints", large);
}

static void all_angles(void)
{
    const int64_t offsets[] = {0, 100000, ((int64_t)1 << 31) - 4096, -((int64_t)1 << 31) + 1};
    for (int i = 0; i < LENGTH_OF(offsets); i++)
        for (int theta = USUAL; theta <= TINY; theta++) {
            if (theta == ZERO || !test_begin("angles: from %lld, theta %s", (long long)offsets[i], theta_name[theta])) continue;
            sweep(offsets[i], theta, 1), sweep(offsets[i], theta, 3);
            test_finish();
            if (i == 1 && theta == USUAL) peers();
        }
    if (test_begin("division by multiplication")) divisions(), test_finish();
    if (test_begin("places in large grids")) places(), test_finish();
    if (test_begin("long columns")) long_columns(), test_finish();
}

/* ---- Decoding, differences, graphs --------------------------------------------------------------------------------------- */

/* One token at a time, at its offset, gives the bits of the whole. */
static void decoding(int type, int path)
{
    problem p = plain(type, FORWARD, path, 3, 2, 6, 48);
    p.theta = LARGE, p.offset[0] = 1000000;
    check(&p);
    const int bytes = test_type_bytes[type];
    unsigned char *whole = (unsigned char *)malloc(y_buffer.bytes);
    memcpy(whole, kept, y_buffer.bytes);
    for (int64_t n = 0; n < 6; n++) {
        lk_md_lrpe_cosine_args args = args_of(&p);
        args.x = (const char *)args.x + n * p.dim * bytes;
        args.y = (char *)args.y + n * 2 * p.dim * bytes;
        args.shape[0] = 1, args.offset[0] = p.offset[0] + n;
        if (n % 2) { /* as a graph would do it */
            args.offset[0] = 0, args.offset_device = (const int32_t *)test_buffer_device(&offset_buffer);
            ((int32_t *)test_buffer_host(&offset_buffer))[0] = (int32_t)(p.offset[0] + n);
            test_buffer_upload(&offset_buffer);
        }
        args.x_head_stride = 6 * p.dim, args.x_batch_stride = p.heads * args.x_head_stride;
        args.y_head_stride = 12 * p.dim, args.y_batch_stride = p.heads * args.y_head_stride;
        test_buffer_upload(&y_buffer); /* poison */
        if (!launched(&p, call_of[FORWARD][type](&args, test.stream))) break;
        test_buffer_download(&y_buffer);
        for (int64_t row = 0; row < p.batch * p.heads; row++) {
            const int64_t at = (row * 6 + n) * 2 * p.dim * bytes;
            if (!test_that(!memcmp((char *)test_buffer_back(&y_buffer) + at, whole + at, (size_t)(2 * p.dim * bytes))))
                test_detail("token %lld alone differs from the whole in row %lld; %s", (long long)n, (long long)row,
                            describe(&p));
        }
    }
    free(whole);
}

/* sum dy y of the formula in double, of a small problem whose tensors the last check left in the buffers. */
static double weighed(const problem *p, const double *x, const double *theta, const double *dy)
{
    const int64_t tokens = tokens_of(p), dim = p->dim;
    double total = 0, *a = table(1, dim), *err = table(2, dim), *slope = table(3, dim), *slope_err = table(4, dim);
    make_columns(p, x);
    for (int64_t row = 0; row < p->batch * p->heads * tokens; row++) {
        const int64_t n = row % tokens, h = row / tokens % p->heads;
        activate(p->activation, x + row * dim, columns_of(p, 0, row / tokens), dim, a, err, slope, slope_err);
        for (int64_t f = 0; f < dim; f++) {
            const double phi = n < p->prefix ? 0 : (double)position_of(p, n - p->prefix, f) * theta[theta_at(p, h, f)];
            total += a[f] * (dy[row * 2 * dim + f] * cos(phi) + (n < p->prefix ? 0 : dy[row * 2 * dim + dim + f] * sin(phi)));
        }
    }
    return total;
}

/* dx and dtheta against central differences: their own error is about 1e-9 with this step. */
static void differences(int activation, bool one_head, bool one_feature)
{
    problem p = plain(TEST_F32, BACKWARD, LK_MD_LRPE_COSINE_AUTO, 2, 2, 2, 7);
    p.axes = 2, p.shape[1] = 3, p.prefix = 1, p.activation = activation, p.dtheta = true;
    p.one_head = one_head, p.one_feature = one_feature;
    check(&p);
    const int64_t count = p.batch * p.heads * tokens_of(&p) * p.dim, weights = theta_rows(&p) * theta_columns(&p);
    double *x = table(0, count), *dy = table(8, 2 * count), *theta = table(14, weights);
    for (int64_t i = 0; i < count; i++) x[i] = (double)((const float *)test_buffer_host(&x_buffer))[i];
    for (int64_t i = 0; i < 2 * count; i++) dy[i] = (double)((const float *)test_buffer_host(&y_buffer))[i];
    for (int64_t i = 0; i < weights; i++) theta[i] = (double)((const float *)test_buffer_host(&theta_buffer))[i];
    const double step = 1e-5;
    for (int64_t i = 0; i < count + weights; i++) {
        double *at = i < count ? &x[i] : &theta[i - count], middle = *at;
        float got;
        memcpy(&got, i < count ? kept + 4 * i : kept_dtheta + 4 * (i - count), 4);
        if (i < count && activation == LK_MD_LRPE_COSINE_RELU && fabs(middle) < 2 * step) continue; /* the kink */
        *at = middle + step;
        const double above = weighed(&p, x, theta, dy);
        *at = middle - step;
        const double below = weighed(&p, x, theta, dy), want = (above - below) / (2 * step);
        *at = middle;
        if (!test_within(fabs((double)got - want), 1e-7 + 1e-5 * (1 + fabs(want))))
            test_detail("%s[%lld] is %.9g, the difference quotient %.9g; %s", i < count ? "dx" : "dtheta",
                        (long long)(i < count ? i : i - count), (double)got, want, describe(&p));
    }
}

/* dtheta where a float sum that does not take its roundings along would fail: theta is 0, so that a term is s v exactly but for
 * two roundings; each thread's sum begins with 2^24, and what comes behind is terms of 0.9 of which a bare sum keeps nothing,
 * 0.9 `many` of them, for 16 2^-24 of 2^24. WALKED: they are tokens of a thread; STACKED: batches of one; SLOTS: partial sums
 * of a thread of the second kernel. Which tokens are whose is what the workspace's size tells. */
enum { WALKED, STACKED, SLOTS, COMPENSATED };
static const char *const compensated_name[] = {"tokens", "batches", "partial sums"};

static void compensated(int type, int path, int which)
{
    const int bytes = test_type_bytes[type], vec = 16 / bytes, many = 48;
    const int64_t dim = which == SLOTS ? vec : 256, offset = 1 << 14;
    lk_md_lrpe_cosine_args args = {};
    args.batch = args.heads = args.axes = 1, args.dim = dim, args.shape[0] = (int64_t)1 << 24, args.offset[0] = offset;
    args.dtheta = (float *)4096, args.path = path;
    size_t needed = 0;
    const lk_status asked = query_of[BACKWARD][type](&args, &needed);
    const int64_t slots = (int64_t)(needed / 4) / dim; /* the most; item i owns tokens i, i + slots, ... */
    if (!test_that(asked == LK_OK && slots > 0)) {
        test_detail("query: %s", lk_last_error());
        return;
    }
    const int64_t tokens = which == WALKED ? many * slots : slots, batch = which == STACKED ? many : 1;
    args.batch = batch, args.shape[0] = tokens;
    const lk_status again = query_of[BACKWARD][type](&args, &needed);
    if (!test_that(again == LK_OK && (int64_t)needed == slots * dim * 4))
        test_detail("%lld tokens, %lld batches: %zu bytes for %lld slots", (long long)tokens, (long long)batch, needed,
                    (long long)slots);
    const int64_t ones = (batch + tokens) * vec + dim; /* rows of x overlap */
    test_buffer_size(&x_buffer, (size_t)(ones * bytes), 0, 0xff);
    test_buffer_size(&y_buffer, (size_t)(batch * tokens * 2 * dim * bytes), 0, 0);
    test_buffer_size(&theta_buffer, (size_t)dim * 4, 0, 0);
    test_buffer_size(&dtheta_buffer, (size_t)dim * 4, 0, 0x5a);
    test_buffer_size(&work_buffer, needed, 0, 0x5a);
    for (int64_t i = 0; i < ones; i++) test_put(type, test_buffer_host(&x_buffer), i, 1);
    double want = 0, size = 0;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t n = 0; n < tokens; n++) {
            const double s = (double)(offset + n);
            const bool first = which == WALKED ? n < slots : which == STACKED ? b == 0 : n < 32;
            const float v = test_decode(type, test_encode(type, (float)((first ? 0x1p24 : 0.9) / s)));
            want += s * (double)v, size += s * (double)v;
            for (int64_t f = 0; f < dim; f++)
                test_put(type, test_buffer_host(&y_buffer), ((b * tokens + n) * 2 + 1) * dim + f, v);
        }
    test_buffer *const buffers[] = {&x_buffer, &y_buffer, &theta_buffer, &dtheta_buffer, &work_buffer};
    for (int i = 0; i < LENGTH_OF(buffers); i++) test_buffer_upload(buffers[i]);
    args.x = test_buffer_device(&x_buffer), args.dy = test_buffer_device(&y_buffer);
    args.x_batch_stride = args.x_head_stride = args.x_token_stride = vec;
    args.theta = test_buffer_device(&theta_buffer), args.theta_dtype = LK_DTYPE_F32;
    args.dtheta = (float *)test_buffer_device(&dtheta_buffer);
    args.workspace = test_buffer_device(&work_buffer), args.workspace_bytes = needed;
    const lk_status status = call_of[BACKWARD][type](&args, test.stream);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int i = 0; i < LENGTH_OF(buffers); i++) test_buffer_download(buffers[i]);
    if (!test_that(status == LK_OK)) test_detail("%s: %s", lk_status_string(status), lk_last_error());
    for (int64_t f = 0; f < dim; f++) {
        const float got = test_get(TEST_F32, test_buffer_back(&dtheta_buffer), f);
        if (!test_near(TEST_F32, got, want, 16 * 0x1p-24 * size))
            test_detail("dtheta[%lld] is %.9g, want %.17g +- %.3g: %lld tokens, %lld batches, %lld slots", (long long)f,
                        (double)got, want, 16 * 0x1p-24 * size, (long long)tokens, (long long)batch, (long long)slots);
    }
    test_buffer_free(&y_buffer);
}

static void all_sequences(void)
{
    for (int type = 0; type < TEST_TYPES; type++)
        for (int path = 0; path < 3; path++)
            if (test_begin("forward %s %s: token by token", test_type_name[type], path_name[path]))
                decoding(type, path), test_finish();
    for (int activation = 0; activation < ACTIVATIONS; activation++)
        if (test_begin("backward f32 auto: central differences, %s", activation_name[activation])) {
            for (int which = 0; which < 4; which++) differences(activation, which & 1, which & 2);
            test_finish();
        }
    for (int which = 0; which < COMPENSATED; which++)
        for (int path = 1; path < 3; path++)
            for (int type = 0; type < TEST_TYPES; type++)
                if (test_begin("backward %s %s: dtheta's compensation over %s", test_type_name[type], path_name[path],
                               compensated_name[which]))
                    compensated(type, path, which), test_finish();
}

/* ---- Errors ---------------------------------------------------------------------------------------------------------- */

/* A change to good arguments that makes them bad. Pointers move by bytes, or elsewhere where they are negative. */
typedef struct {
    lk_status want, query; /* of the call and of the query, which looks at no pointer but dtheta */
    const char *field;     /* what lk_last_error must name */
    int x, y, theta, dx, dtheta, workspace, workspace_bytes, offset; /* y: dy in backward */
    problem p; /* good but for what is changed */
    int64_t x_stride[3], y_stride[3], dx_stride[3], theta_heads, theta_features;
    int theta_dtype;
    bool no_args, garbage; /* garbage: in the other direction's fields */
} bad_call;

static void *moved(test_buffer *b, int by)
{
    switch (by) {
    case -1: return NULL;
    case -2: return test_buffer_device(&x_buffer);
    case -3: return (char *)test_buffer_device(&x_buffer) + 16;
    case -4: return test_buffer_device(&theta_buffer);
    case -5: return test_buffer_device(&dx_buffer);
    case -6: return test_buffer_device(&y_buffer);
    case -7: return (char *)test_buffer_device(&x_buffer) + 512; /* between rows of 512 elements */
    case -8: return test_buffer_device(&offset_buffer);
    }
    return (char *)test_buffer_device(b) + by;
}

static void set_strides(int64_t *batch_stride, int64_t *head_stride, int64_t *token_stride, const int64_t (&stride)[3])
{
    *batch_stride = stride[0], *head_stride = stride[1], *token_stride = stride[2];
}

static void expect_error(const bad_call *bad)
{
    const problem *p = &bad->p;
    test_buffer *const buffers[] = {&x_buffer,      &y_buffer,    &dx_buffer,    &theta_buffer,
                                    &dtheta_buffer, &work_buffer, &offset_buffer};
    for (int i = 0; i < LENGTH_OF(buffers); i++) test_buffer_size(buffers[i], 65536, 0, 0x3c), test_buffer_upload(buffers[i]);
    size_t asked = TEST_NOT_ASKED;
    const bool back = p->direction == BACKWARD;
    const int64_t wrong[3] = {-1, INT64_MIN, INT64_MAX}, none[3] = {};
    lk_md_lrpe_cosine_args a = sizes_of(p);
    a.x = moved(&x_buffer, bad->x), a.theta = moved(&theta_buffer, bad->theta), a.theta_dtype = bad->theta_dtype;
    a.offset_device = (const int32_t *)moved(&offset_buffer, bad->offset);
    a.theta_heads = bad->theta_heads, a.theta_features = bad->theta_features;
    set_strides(&a.x_batch_stride, &a.x_head_stride, &a.x_token_stride, bad->x_stride);
    a.y = bad->garbage ? GARBAGE : NULL;
    a.dy = a.dx = a.workspace = a.y, a.dtheta = (float *)a.y, a.workspace_bytes = bad->garbage, a.accumulate = bad->garbage;
    set_strides(&a.y_batch_stride, &a.y_head_stride, &a.y_token_stride, bad->garbage ? wrong : none);
    set_strides(&a.dy_batch_stride, &a.dy_head_stride, &a.dy_token_stride, bad->garbage ? wrong : none);
    set_strides(&a.dx_batch_stride, &a.dx_head_stride, &a.dx_token_stride, bad->garbage ? wrong : none);
    if (back || p->activation == LK_MD_LRPE_COSINE_SOFTMAX_TOKENS)
        a.workspace = moved(&work_buffer, bad->workspace), a.workspace_bytes = (size_t)bad->workspace_bytes;
    if (back) {
        a.dy = moved(&y_buffer, bad->y), a.dx = moved(&dx_buffer, bad->dx);
        a.dtheta = (float *)moved(&dtheta_buffer, bad->dtheta);
        set_strides(&a.dy_batch_stride, &a.dy_head_stride, &a.dy_token_stride, bad->y_stride);
        set_strides(&a.dx_batch_stride, &a.dx_head_stride, &a.dx_token_stride, bad->dx_stride);
    } else {
        a.y = moved(&y_buffer, bad->y);
        set_strides(&a.y_batch_stride, &a.y_head_stride, &a.y_token_stride, bad->y_stride);
    }
    const lk_status status = call_of[p->direction][p->type](bad->no_args ? NULL : &a, test.stream);
    test_expect(status, bad->want, bad->field, "lk_md_lrpe_cosine", direction_name[p->direction], p->type);
    const lk_status answer = query_of[p->direction][p->type](bad->no_args ? NULL : &a, &asked);
    test_expect_query(answer, bad->query, asked, bad->field);
    if (!test_that(answer || asked < 65536)) test_detail("%s: %zu bytes of workspace", bad->field, asked);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int i = 0; i < LENGTH_OF(buffers); i++) test_expect_unwritten(status, buffers[i], "a tensor", bad->field);
}

/* What a query says where a call says `status` because of a pointer or of sizes. */
static lk_status queried(lk_status status)
{
    return status == LK_ERR_NULL || status == LK_ERR_ALIGNMENT || status == LK_ERR_WORKSPACE ? LK_OK : status;
}

static void errors(int type, int direction)
{
    const int bytes = test_type_bytes[type], vec = 16 / bytes;
    const bool back = direction == BACKWARD;
    const int64_t big = (int64_t)1 << 62, last = (int64_t)1 << 31;
    static bad_call bad[200];
    int n = 0;
    bad_call *c;
    bad_call good = {};
    good.p = plain(type, direction, 0, 2, 3, 4, 2 * vec);
    good.theta_dtype = LK_DTYPE_F32, good.dtheta = -1, good.workspace = -1, good.offset = -1;
#define BAD(status, what) (c = &bad[n++], *c = good, c->want = status, c->query = queried(status), c->field = what, c)
    BAD(LK_OK, "nothing")->x = 0;
    BAD(LK_ERR_NULL, "args")->no_args = true, c->query = LK_ERR_NULL;
    BAD(LK_OK, "what the other direction has")->garbage = true;
    BAD(LK_ERR_NULL, "theta")->theta = -1;
    BAD(LK_ERR_NULL, "theta")->theta = -1, c->p.shape[0] = 0, c->p.prefix = 2;
    BAD(LK_OK, "nothing is needed without tokens")->theta = -1, c->x = -1, c->y = -1, c->dx = -1, c->p.shape[0] = 0;
    if (back) {
        BAD(LK_OK, "x is not needed")->x = -1;
        BAD(LK_OK, "x is not looked at")->x = 1, c->x_stride[0] = -1, c->x_stride[2] = big;
        BAD(LK_OK, "x is not looked at, whatever the path")->x = bytes, c->p.path = LK_MD_LRPE_COSINE_VECTOR;
        BAD(LK_OK, "dy NULL is 1")->y = -1;
        BAD(LK_ERR_NULL, "x")->x = -1, c->p.activation = 1;
        BAD(LK_ERR_NULL, "x")->x = -1, c->dtheta = 0, c->workspace = 0, c->workspace_bytes = 65536;
        BAD(LK_ERR_NULL, "every output")->dx = -1;
        BAD(LK_OK, "dtheta alone")->dx = -1, c->dtheta = 0, c->workspace = 0, c->workspace_bytes = 65536;
    } else {
        BAD(LK_ERR_NULL, "x")->x = -1;
        BAD(LK_ERR_NULL, "y")->y = -1;
    }
    BAD(LK_ERR_SHAPE, "axes")->p.axes = -1;
    BAD(LK_ERR_SHAPE, "axes")->p.axes = 9;
    BAD(LK_OK, "axes 0 is 1")->p.axes = 0;
    BAD(LK_ERR_SHAPE, "batch")->p.batch = -1;
    BAD(LK_ERR_SHAPE, "heads")->p.heads = -1;
    BAD(LK_ERR_SHAPE, "dim")->p.dim = 0;
    BAD(LK_ERR_SHAPE, "dim")->p.dim = -5;
    BAD(LK_ERR_SHAPE, "dim")->p.dim = ((int64_t)1 << 30) + 1;
    BAD(LK_ERR_SHAPE, "prefix")->p.prefix = -1;
    BAD(LK_ERR_SHAPE, "e is")->p.e = 2 * vec - 1;
    BAD(LK_ERR_SHAPE, "e is")->p.e = -2 * vec;
    BAD(LK_ERR_SHAPE, "e is")->p.e = vec - 1, c->p.axes = 2, c->p.shape[1] = 2;
    BAD(LK_OK, "e reaches dim")->p.e = vec, c->p.axes = 2, c->p.shape[1] = 2;
    BAD(LK_ERR_SHAPE, "theta")->p.e = big;
    BAD(LK_ERR_SHAPE, "theta_heads is 2; it must be 0, 1 or 3")->theta_heads = 2;
    BAD(LK_ERR_SHAPE, "theta_heads is -1;")->theta_heads = -1;
    BAD(LK_OK, "sizes of theta")->theta_heads = 3, c->theta_features = 2 * vec;
    BAD(LK_ERR_SHAPE, "theta_features is 2;")->theta_features = 2;
    BAD(LK_ERR_SHAPE, "shape[0]")->p.shape[0] = -1;
    BAD(LK_ERR_SHAPE, "shape[2]")->p.shape[2] = -1, c->p.axes = 3, c->p.shape[1] = 1;
    BAD(LK_ERR_SHAPE, "2^62 elements")->p.shape[0] = big, c->p.shape[1] = big, c->p.axes = 2;
    BAD(LK_ERR_SHAPE, "2^62 elements")->p.prefix = big;
    BAD(LK_ERR_SHAPE, "2^62 elements")->p.prefix = INT64_MAX, c->p.batch = 0;
    BAD(LK_ERR_SHAPE, "2^62 elements")->p.batch = INT64_MAX;
    BAD(LK_ERR_SHAPE, "2^62 elements")->p.heads = (int64_t)1 << 60;
    BAD(LK_ERR_SHAPE, "2^62 elements")->p.shape[0] = (int64_t)1 << 60;
    static const char *const axis[] = {"batch_stride", "head_stride", "token_stride"};
    for (int i = 0; i < 3; i++) {
        BAD(LK_ERR_SHAPE, axis[i])->x_stride[i] = -1, c->p.activation = 1;
        BAD(LK_ERR_SHAPE, axis[i])->y_stride[i] = -1;
        BAD(LK_ERR_SHAPE, axis[i])->x_stride[i] = big, c->p.activation = 1;
        BAD(LK_ERR_SHAPE, axis[i])->y_stride[i] = big;
        if (back) BAD(LK_ERR_SHAPE, axis[i])->dx_stride[i] = -1;
        int64_t *const out = back ? BAD(LK_ERR_SHAPE, axis[i])->dx_stride : BAD(LK_ERR_SHAPE, axis[i])->y_stride;
        const int64_t width = (back ? 2 : 4) * vec;
        out[2] = width, out[1] = 4 * width, out[0] = 12 * width, out[i]--; /* packed but for one element */
        BAD(LK_OK, "inputs may overlap")->x_stride[i] = 1, c->p.path = LK_MD_LRPE_COSINE_ROW, c->p.activation = 1;
        if (back) BAD(LK_OK, "dy may overlap")->y_stride[i] = 1, c->p.path = LK_MD_LRPE_COSINE_ROW;
        /* A dimension of one element has no stride. */
        BAD(LK_OK, "one element, any stride")->x_stride[i] = big, c->y_stride[i] = big, c->dx_stride[i] = 1;
        c->p.activation = 1, *(i == 0 ? &c->p.batch : i == 1 ? &c->p.heads : &c->p.shape[0]) = 1;
        BAD(LK_ERR_SHAPE, axis[i])->y_stride[i] = -1, *(i == 0 ? &c->p.batch : i == 1 ? &c->p.heads : &c->p.shape[0]) = 1;
    }
    if (back) {
        BAD(LK_ERR_SHAPE, "dx and x overlap")->dx = -2, c->p.activation = 1, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "dx and x overlap")->dx = -3, c->p.activation = 1, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "dx and dy overlap")->dx = -6, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "dx and theta overlap")->dx = -4, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "dx and offset_device overlap")->dx = -8, c->offset = 0, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "dtheta and theta overlap")->dtheta = -4, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "dtheta and dx overlap")->dtheta = -5, c->query = LK_OK;
        BAD(LK_OK, "in the memory of an x that is not read")->dx = -2;
        BAD(LK_OK, "x and dy are one tensor")->y = -2, c->p.activation = 1;
        BAD(LK_OK, "in each other's gaps")->dx = -7, c->p.activation = 1, c->dx_stride[2] = c->x_stride[2] = 512;
    } else {
        BAD(LK_ERR_SHAPE, "y and x overlap")->y = -2, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "y and x overlap")->y = -3, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "y and theta overlap")->y = -4, c->query = LK_OK;
        BAD(LK_ERR_SHAPE, "y and offset_device overlap")->y = -8, c->offset = 0, c->query = LK_OK;
        BAD(LK_OK, "in each other's gaps")->y = -7, c->y_stride[2] = c->x_stride[2] = 512;
    }
    BAD(LK_ERR_VALUE, "offset[0]")->p.offset[0] = last - 3;
    BAD(LK_OK, "up to 2^31 - 1")->p.offset[0] = last - 4;
    BAD(LK_ERR_VALUE, "offset[0]")->p.offset[0] = -last;
    BAD(LK_ERR_VALUE, "offset[0]")->p.offset[0] = INT64_MAX;
    BAD(LK_ERR_VALUE, "offset[0]")->p.offset[0] = INT64_MIN;
    BAD(LK_ERR_VALUE, "offset[1]")->p.offset[1] = last, c->p.axes = 2, c->p.shape[1] = 1;
    BAD(LK_OK, "no position, no rule")->p.offset[0] = last, c->p.shape[0] = 0, c->p.prefix = 1;
    BAD(LK_ERR_VALUE, "theta_dtype")->theta_dtype = -1;
    BAD(LK_ERR_VALUE, "theta_dtype")->theta_dtype = 9;
    BAD(LK_ERR_VALUE, "theta_dtype")->theta_dtype = type == TEST_BF16 ? LK_DTYPE_F16 : LK_DTYPE_BF16;
    BAD(LK_OK, "T spelt out")->theta_dtype = type == TEST_F32 ? LK_DTYPE_F32 : type == TEST_F16 ? LK_DTYPE_F16 : LK_DTYPE_BF16;
    BAD(LK_ERR_VALUE, "activation")->p.activation = -1;
    BAD(LK_ERR_VALUE, "activation")->p.activation = ACTIVATIONS;
    BAD(LK_ERR_VALUE, "path")->p.path = -1;
    BAD(LK_ERR_VALUE, "path")->p.path = LK_MD_LRPE_COSINE_ROW + 1;
    BAD(LK_OK, "the vector path")->p.path = LK_MD_LRPE_COSINE_VECTOR;
    BAD(LK_ERR_PATH, "path")->p.path = LK_MD_LRPE_COSINE_VECTOR, c->p.dim = 2 * vec + 1;
    BAD(LK_ERR_PATH, "path")->p.path = LK_MD_LRPE_COSINE_VECTOR, c->x = bytes, c->p.activation = 1, c->query = LK_OK;
    BAD(LK_ERR_PATH, "path")->p.path = LK_MD_LRPE_COSINE_VECTOR, c->y = bytes, c->query = LK_OK;
    if (back) BAD(LK_ERR_PATH, "path")->p.path = LK_MD_LRPE_COSINE_VECTOR, c->dx = bytes, c->query = LK_OK;
    for (int i = 0; i < 3; i++) {
        BAD(LK_ERR_PATH, "path")->p.path = LK_MD_LRPE_COSINE_VECTOR, c->x_stride[i] = 1000 * vec + 1, c->p.activation = 1;
        BAD(LK_ERR_PATH, "path")->p.path = LK_MD_LRPE_COSINE_VECTOR, c->y_stride[2] = 8 * vec, c->y_stride[1] = 64 * vec,
                         c->y_stride[0] = 512 * vec, c->y_stride[i]++;
    }
    BAD(LK_ERR_PATH, "512 bytes")->p.path = LK_MD_LRPE_COSINE_VECTOR, c->p.dim = 33 * vec,
                     c->p.activation = LK_MD_LRPE_COSINE_SOFTMAX;
    BAD(LK_ERR_ALIGNMENT, "x is")->x = 1, c->p.activation = 1;
    BAD(LK_ERR_ALIGNMENT, back ? "dy is" : "y is")->y = 1;
    BAD(LK_ERR_ALIGNMENT, "theta is")->theta = 2;
    BAD(LK_ERR_ALIGNMENT, "theta is")->theta = 1, c->theta_dtype = 0;
    BAD(LK_ERR_ALIGNMENT, "offset_device is")->offset = 2;
    BAD(LK_OK, "offset_device off by an element, on the vector path")->offset = 4, c->p.path = LK_MD_LRPE_COSINE_VECTOR;
    if (bytes == 2) BAD(LK_OK, "theta of type T")->theta = 2, c->theta_dtype = 0;
    if (back) {
        BAD(LK_ERR_ALIGNMENT, "dx is")->dx = 1;
        BAD(LK_ERR_ALIGNMENT, "dtheta is")->dtheta = 2, c->workspace = 0, c->workspace_bytes = 65536;
        BAD(LK_ERR_WORKSPACE, "workspace")->dtheta = 0;
        BAD(LK_ERR_WORKSPACE, "workspace")->dtheta = 0, c->workspace = 64, c->workspace_bytes = 65536;
        BAD(LK_OK, "128 bytes are enough")->dtheta = 0, c->workspace = 128, c->workspace_bytes = 65536 - 128;
        /* x, dy and dx have 2^62 elements at most, the partial sums more bytes than can be counted. The query says so; the
         * bytes of a call's x or theta are too many. */
        BAD(LK_ERR_SHAPE, "2^62 bytes")->dx = -1, c->dtheta = 0, c->workspace = 0, c->workspace_bytes = 65536, c->p.batch = 1,
                         c->p.shape[0] = 1, c->p.heads = (int64_t)1 << 58, c->p.dim = 8;
        BAD(LK_ERR_SHAPE, "2^62 elements")->dx = -1, c->dtheta = 0, c->x_stride[0] = c->y_stride[0] = 2, c->p.heads = 1,
                         c->p.shape[0] = 1, c->p.batch = (int64_t)1 << 60, c->p.dim = 8;
        /* dy has 2^63 elements, which no number holds, in a smaller span. */
        BAD(LK_ERR_VALUE, "path")->dx = -1, c->dtheta = 0, c->x_stride[0] = c->y_stride[0] = 1, c->p.heads = 1, c->p.path = 77,
                         c->p.shape[0] = 1, c->p.batch = (int64_t)1 << 59, c->p.dim = 8;
        BAD(LK_ERR_WORKSPACE, "workspace")->dtheta = 0, c->workspace = 0, c->workspace_bytes = 2 * 4 * 3 * 2 * vec * 4 - 1;
        BAD(LK_OK, "just enough")->dtheta = 0, c->workspace = 0, c->workspace_bytes = 2 * 4 * 3 * 2 * vec * 4;
    }
    const int states = 2 * 3 * 2 * vec * (int)sizeof(lk_lrpe_column), over_tokens = LK_MD_LRPE_COSINE_SOFTMAX_TOKENS;
    BAD(LK_ERR_WORKSPACE, "workspace is NULL")->p.activation = over_tokens;
    BAD(LK_ERR_WORKSPACE, "aligned")->p.activation = over_tokens, c->workspace = 64, c->workspace_bytes = states;
    BAD(LK_ERR_WORKSPACE, "bytes")->p.activation = over_tokens, c->workspace = 0, c->workspace_bytes = states - 1;
    BAD(LK_OK, "just enough")->p.activation = over_tokens, c->workspace = 0, c->workspace_bytes = states;
    BAD(LK_OK, "no token, no workspace")->p.activation = over_tokens, c->p.shape[0] = 0;
    BAD(LK_OK, "dim above 512 bytes")->p.activation = over_tokens, c->p.path = LK_MD_LRPE_COSINE_VECTOR, c->p.dim = 34 * vec,
                     c->workspace = 0, c->workspace_bytes = 17 * states;
    if (back) {
        const int sums = 2 * 4 * 3 * 2 * vec * 4;
        BAD(LK_ERR_WORKSPACE, "bytes")->p.activation = over_tokens, c->dtheta = 0, c->workspace = 0,
                             c->workspace_bytes = sums + states - 1;
        BAD(LK_OK, "just enough for both")->p.activation = over_tokens, c->dtheta = 0, c->workspace = 0,
                   c->workspace_bytes = sums + states;
    }
    /* Two rules broken at once: the earlier one speaks. */
    BAD(LK_ERR_NULL, "theta")->theta = -1, c->p.batch = -1, c->query = LK_ERR_SHAPE;
    BAD(LK_ERR_SHAPE, "dim")->p.dim = 0, c->p.path = 77;
    BAD(LK_ERR_VALUE, "activation")->p.activation = 99, c->x = 1;
    BAD(LK_ERR_PATH, "path")->p.path = LK_MD_LRPE_COSINE_VECTOR, c->x = 1, c->p.activation = 1, c->query = LK_OK;
    BAD(LK_ERR_SHAPE, "overlap")->p.path = 77, c->y = -2, c->dx = -2, c->p.activation = 1, c->query = LK_ERR_VALUE;
    if (back) BAD(LK_ERR_ALIGNMENT, "dx is")->dx = 1, c->dtheta = 0;
#undef BAD
    if (!test_that(n <= LENGTH_OF(bad))) abort();
    for (int i = 0; i < n; i++) expect_error(&bad[i]);
}

/* Sizes alone make the answer: what a framework asks that has no tensors yet. dtheta says whether it is wanted. */
static void queries(int type)
{
    lk_md_lrpe_cosine_args args = {};
    args.batch = 2, args.heads = 3, args.dim = 40, args.shape[0] = 50, args.dtheta = (float *)4096;
    size_t bytes = 0;
    const lk_status wanted = query_of[BACKWARD][type](&args, &bytes);
    if (!test_that(wanted == LK_OK && bytes > 0 && bytes % (3 * 40 * 4) == 0))
        test_detail("sizes alone: %s, %zu bytes (%s)", lk_status_string(wanted), bytes, lk_last_error());
    args.dtheta = NULL;
    const lk_status skipped = query_of[BACKWARD][type](&args, &bytes);
    if (!test_that(skipped == LK_OK && bytes == 0))
        test_detail("without dtheta: %s, %zu bytes", lk_status_string(skipped), bytes);
    bytes = 1;
    const lk_status first = query_of[FORWARD][type](&args, &bytes);
    if (!test_that(first == LK_OK && bytes == 0)) test_detail("forward: %s, %zu bytes", lk_status_string(first), bytes);
    args.activation = LK_MD_LRPE_COSINE_SOFTMAX_TOKENS;
    const lk_status states = query_of[FORWARD][type](&args, &bytes);
    if (!test_that(states == LK_OK && bytes > 0 && bytes % (2 * 3 * 40 * sizeof(lk_lrpe_column)) == 0))
        test_detail("softmax over tokens: %s, %zu bytes", lk_status_string(states), bytes);
    /* y has 2^62 elements, the states more bytes. */
    args.batch = 1, args.heads = (int64_t)1 << 58, args.dim = 8, args.shape[0] = 1;
    const lk_status more = query_of[FORWARD][type](&args, &bytes);
    if (!test_that(more == LK_ERR_SHAPE && strstr(lk_last_error(), "2^62 bytes")))
        test_detail("states of 2^61 columns: %s: %s", lk_status_string(more), lk_last_error());
}

#if defined(LK_SIMT)
/* More rows than a grid has warps: refused by the launch, after which nothing has been read or written. Not on a GPU, whose
 * sanitizers take a refused launch for a fault. */
static void too_many_rows(int type, int direction)
{
    lk_md_lrpe_cosine_args a = {};
    a.batch = a.dim = a.shape[0] = 1, a.path = LK_MD_LRPE_COSINE_ROW;
    a.x_head_stride = a.dy_head_stride = 1; /* far apart, so that none of them overlap */
    a.x = a.dy = (void *)((uintptr_t)1 << 40), a.theta = (void *)((uintptr_t)2 << 40);
    a.y = a.dx = (void *)((uintptr_t)3 << 40);
    for (int log2 = 31; log2 <= 32; log2++) { /* blocks: CUDA has 2^31 - 1 at most, and 2^32 + 1 are 1 in 32 bits */
        a.heads = LK_LRPE_THREADS / 32 * (((int64_t)1 << log2) + 1); /* a warp each */
        const lk_status status = call_of[direction][type](&a, test.stream);
        if (!test_that(status == (lk_status)cudaErrorInvalidConfiguration))
            test_detail("2^%d blocks: status %s: %s", log2, lk_status_string(status), lk_last_error());
    }
}
#endif

static void all_errors(void)
{
    for (int type = 0; type < TEST_TYPES; type++)
        for (int direction = 0; direction < 2; direction++)
            if (test_begin("%s %s: errors", direction_name[direction], test_type_name[type]))
                errors(type, direction), test_finish();
    for (int type = 0; type < TEST_TYPES; type++)
        if (test_begin("%s: queries without tensors", test_type_name[type])) queries(type), test_finish();
#if defined(LK_SIMT)
    for (int type = 0; type < TEST_TYPES; type++)
        for (int direction = 0; direction < 2; direction++)
            if (test_begin("%s %s: more rows than a grid has", direction_name[direction], test_type_name[type]))
                too_many_rows(type, direction), test_finish();
#endif
}

/* ---- Random draws ---------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const r = &state;
    const int at = (int)test_below(r, COUNTED), type = (int)test_below(r, 3);
    problem p = plain(type, counted_direction[at], counted_path[at], 0, 0, 0, 0);
    const bool back = p.direction == BACKWARD, vector = p.path == LK_MD_LRPE_COSINE_VECTOR;
    const int64_t vec = 16 / test_type_bytes[type];
    p.seed = seed;
    const int64_t batches_drawn[] = {1, 1, 2, 3, 4, 7, 12, 17}, dims_drawn[] = {1, 3, 31, 33, 64, 100, 127, 257, 300};
    p.batch = batches_drawn[test_below(r, 8)], p.heads = 1 + test_below(r, 4);
    p.dim = vector || test_below(r, 2) ? vec * (1 + test_below(r, 17)) : dims_drawn[test_below(r, LENGTH_OF(dims_drawn))];
    p.axes = test_below(r, 3) ? 1 + (int)test_below(r, 3) : (int)test_below(r, 9);
    int64_t cells = 1;
    for (int i = 0; i < (p.axes ? p.axes : 1); i++) {
        const int64_t most = 40 / cells > 1 ? 40 / cells : 1;
        p.shape[i] = 1 + test_below(r, most < 9 || p.axes < 2 ? most : 9);
        cells *= p.shape[i];
        if (test_below(r, 3) == 0) p.offset[i] = test_below(r, 1 << 20);
        if (test_below(r, 8) == 0) p.offset[i] = -test_below(r, ((int64_t)1 << 31) - 1);
        if (test_below(r, 8) == 0) p.offset[i] = ((int64_t)1 << 31) - p.shape[i];
    }
    p.device_offset = test_below(r, 4) == 0;
    if (test_below(r, 3) == 0) p.prefix = 1 + test_below(r, 11);
    if (test_below(r, 30) == 0) p.batch = 0;
    if (test_below(r, 30) == 0) p.shape[0] = 0;
    if (test_below(r, 60) == 0) p.shape[0] = 0, p.prefix = 0;
    if (test_below(r, 4) == 0) p.e = e_of(&p) + test_below(r, p.dim + 5);
    do {
        p.x_layout = test_below(r, 2) ? (int)test_below(r, LAYOUTS) : PACKED;
        p.y_layout = test_below(r, 2) ? (int)test_below(r, back ? LAYOUTS : OVERLAPPING) : PACKED;
        p.dx_layout = back && test_below(r, 2) ? (int)test_below(r, OVERLAPPING) : PACKED;
        if (test_below(r, 4) == 0 && !vector) p.x_at = (int)test_below(r, vec), p.y_at = p.dx_at = p.x_at;
        if (test_below(r, 8) == 0 && !vector) p.y_at = (int)test_below(r, vec);
        p.activation = test_below(r, 2) ? (int)test_below(r, ACTIVATIONS) : 0;
    } while (vector && !vector_takes(&p));
    p.theta_at = test_below(r, 3) ? 0 : 1, p.dtheta_at = (int)test_below(r, 3);
    p.theta = test_below(r, 2) ? USUAL : (int)test_below(r, THETAS);
    p.theta_t = test_below(r, 2) && !(type == TEST_F16 && p.theta != USUAL && p.theta != ZERO && p.theta != WILD);
    if (test_below(r, 3) == 0) p.special = (int)test_below(r, SPECIALS), p.where = (int)test_below(r, WHERES);
    /* An angle below 2^-32 turns is 0 to lk, and its sine times an infinity NaN. */
    if (p.theta == TINY && (p.special == MINUS_INF || p.special == PLUS_INF)) p.special = NOTHING;
    p.one_head = test_below(r, 4) == 0, p.one_feature = test_below(r, 4) == 0;
    p.dtheta = back && test_below(r, 2), p.accumulate = test_below(r, 2), p.no_dx = p.dtheta && test_below(r, 4) == 0;
    p.no_dy = back && test_below(r, 8) == 0;
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

static double huge_at(const lk_bf16 *x, int64_t at) { return (double)test_huge_get(TEST_BF16, x, at); }

/* Forward, then backward of what forward wrote: g = x (cos^2 + sin^2) = x up to roundings. Sampled elements, of which `beyond`
 * is one. */
static void huge(const problem *p)
{
    const int64_t tokens = tokens_of(p), n = p->batch * p->heads * tokens * p->dim, beyond = ((int64_t)1 << 31) + 5;
    if (!test_that(n > beyond)) {
        test_detail("only %lld elements; %s", (long long)n, describe(p));
        return;
    }
    lk_bf16 *const x = (lk_bf16 *)test_huge_allocate(n * 2), *const y = (lk_bf16 *)test_huge_allocate(n * 4);
    lk_bf16 *const dx = (lk_bf16 *)test_huge_allocate(n * 2);
    TEST_CUDA(cudaMemsetAsync(y, 0xff, (size_t)n * 4, test.stream));
    TEST_CUDA(cudaMemsetAsync(dx, 0xff, (size_t)n * 2, test.stream));
    test_huge_fill(x, n, 0);
    prepare_theta(p, 0xff);
    lk_md_lrpe_cosine_args args = sizes_of(p);
    args.x = x, args.y = y, args.dy = y, args.dx = dx;
    const lk_status first = call_of[FORWARD][TEST_BF16](&args, test.stream);
    const lk_status second = call_of[BACKWARD][TEST_BF16](&args, test.stream);
    uint64_t random = p->seed;
    const bool ran = launched(p, first ? first : second);
    for (int k = 0; k < 2000 && ran; k++) {
        const int64_t at = k == 0 ? n - 1 : k == 1 ? 0 : k == 2 ? beyond : test_below(&random, n);
        const int64_t row = at / p->dim, column = at % p->dim, token = row % tokens, h = row / tokens % p->heads;
        const double value = (double)test_huge_value(at);
        double cos_of = 1, sin_of = 0;
        if (token >= p->prefix)
            exact_angle(position_of(p, token - p->prefix, column), theta_value(p, h, column % e_of(p)), &cos_of, &sin_of);
        const double got[2] = {huge_at(y, row * 2 * p->dim + column), huge_at(y, row * 2 * p->dim + p->dim + column)};
        const double want[2] = {value * cos_of, value * sin_of};
        for (int half = 0; half < 2; half++)
            if (!test_near(TEST_BF16, (float)got[half], want[half], ROTATION * fabs(value)))
                test_detail("half %d of y at element %lld is %.9g, want %.9g; %s", half, (long long)at, got[half], want[half],
                            describe(p));
        const double g = token < p->prefix ? got[0] : got[0] * cos_of + got[1] * sin_of;
        if (!test_near(TEST_BF16, (float)huge_at(dx, at), g, ROTATION * (fabs(got[0]) + fabs(got[1]))))
            test_detail("dx at element %lld is %.9g, want %.9g; %s", (long long)at, huge_at(dx, at), g, describe(p));
    }
    test_huge_free();
}

static void busy(int type, int direction, int path)
{
    const int activations_of[] = {LK_MD_LRPE_COSINE_NONE, LK_MD_LRPE_COSINE_SOFTMAX_TOKENS};
    for (int activation : activations_of) {
        problem p = plain(type, direction, path, 4, 6, 300, 64);
        p.dtheta = direction == BACKWARD, p.activation = activation;
        check(&p); /* leaves its bits in kept and kept_dtheta */
        test_busy(op, &p);
        if (activation && p.dtheta) p.dtheta = false, check(&p), test_busy(op, &p); /* in slabs */
    }
}

static void all_huge(void)
{
    typedef struct {
        int64_t batch, heads, prefix, shape[3], dim;
        int axes, path;
        int64_t offset; /* on the first axis */
    } huge_case;
    static const huge_case cases[] = {
        {12, 12, 10, {140000}, 128, 1, LK_MD_LRPE_COSINE_VECTOR, 0},
        {12, 12, 10, {140000}, 128, 1, LK_MD_LRPE_COSINE_ROW, 0},
        {1, 3, 3, {50000, 40, 6}, 64, 3, LK_MD_LRPE_COSINE_VECTOR, -(1ll << 31) + 1},
        {1, 3, 3, {50000, 40, 6}, 63, 3, LK_MD_LRPE_COSINE_ROW, 0},
        {1, 1, 1, {1 << 14, 1 << 14, 2}, 8, 3, LK_MD_LRPE_COSINE_VECTOR, 0},
        {400000, 6, 0, {7}, 128, 1, LK_MD_LRPE_COSINE_VECTOR, 0},
        {1, 1, 2, {1ll << 30, 4}, 1, 2, LK_MD_LRPE_COSINE_ROW, 0},
        /* More tokens than ints count: a walk up to the last position, and a batch whose vectors lie on three axes. */
        {1, 1, 9, {(1ll << 30) + 3}, 8, 1, LK_MD_LRPE_COSINE_VECTOR, (1ll << 30) - 3},
        {1, 1, 5, {1 << 14, 1 << 15, 2}, 8, 3, LK_MD_LRPE_COSINE_VECTOR, -77},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        const huge_case c = cases[i];
        problem p = plain(TEST_BF16, FORWARD, c.path, c.batch, c.heads, c.shape[0], c.dim);
        p.axes = c.axes, p.prefix = c.prefix, p.shape[1] = c.shape[1], p.shape[2] = c.shape[2], p.offset[0] = c.offset;
        if (!test_begin("huge: batch %lld, %lld tokens, dim %lld %s", (long long)c.batch, (long long)tokens_of(&p),
                        (long long)c.dim, path_name[c.path]))
            continue;
        huge(&p);
        test_finish();
    }
    static const test_theme held = {"half of the SMs held", busy};
    for (int at = 0; at < COUNTED; at++)
        test_themes(&held, 1, counted_direction[at], counted_path[at], direction_name[counted_direction[at]],
                    path_name[counted_path[at]]);
}

#endif

/* ---------------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    test_start(argc, argv);
    all_errors();
    all_themes();
    all_angles();
    all_sequences();
    TEST_HUGE(all_huge);
    test_all_ran(&counts, possible);
    fuzz();
    return test_end();
}
