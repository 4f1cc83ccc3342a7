// SPDX-License-Identifier: MIT
/* tests/srms_norm_gated.cu - lk/srms_norm_gated.cuh against its header's formula in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits. Bytes that are not outputs (zones around
 * every buffer, the workspace's too, gaps between rows, inputs) must not change.
 *
 * Limits, in U = 2^-24, besides half an ulp of the output's type. E(c): silu's relative error, (3 |gate| + 10) 2^-23, that of the
 * exponential and of its argument; E: a row's largest one.
 *   rstd          8 U, with the gate first E more
 *   y             14 U + E(c), and the same with the gate first
 *   dx, dgate     of the terms of ds: 24 U + 3 E; then E(c) and 4 U
 *   dweight       of the terms: (16 + log2 rows) U + 2 E
 */
#include "lk/srms_norm_gated.cuh"

#include "tests/test.h"

TEST_DEFINE(SRMS_NORM_GATED)

typedef lk_status (*call)(const lk_srms_norm_gated_args *, cudaStream_t);
typedef lk_status (*query)(const lk_srms_norm_gated_args *, size_t *);
static const call call_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_srms_norm_gated_forward),
                                            TEST_OF_TYPES(lk_srms_norm_gated_backward)};
static const query query_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_srms_norm_gated_forward_workspace_bytes),
                                              TEST_OF_TYPES(lk_srms_norm_gated_backward_workspace_bytes)};

enum { FORWARD, BACKWARD };
static const char *const direction_name[] = {"forward", "backward"};
enum { PATHS = LK_SRMS_NORM_CLUSTER + 1 };
static const char *const path_name[] = {"auto", "warp", "block", "cluster"};
enum { X, GATE, DY, Y, DX, DGATE, MATRICES, WEIGHT = MATRICES, RSTD, DWEIGHT, WORKSPACE, BUFFERS };
static const char *const tensor_name[] = {"x", "gate", "dy", "y", "dx", "dgate", "weight", "rstd", "dweight", "workspace"};
enum { NOTHING, MINUS_INF, PLUS_INF, NOT_A_NUMBER, ZERO_ROW, SPECIALS };
static const char *const special_name[] = {"nothing", "-inf", "+inf", "nan", "a row of 0"};

/* One call. `at` is how many elements a tensor's buffer is past 256-byte alignment; gap: behind each row, 0: packed. */
typedef struct {
    int type, direction, path, special, victim;
    int64_t rows, cols;
    bool first, has[BUFFERS], in_place, strides, accumulate; /* in_place: y over x, dx over dy; strides: given, though packed */
    int gap[MATRICES], at[BUFFERS], groups, weight_dtype, dweight_dtype;
    float eps, weight_offset;
    double spread;
    uint64_t seed;
} problem;

static problem plain(int type, int direction, int path, int64_t rows, int64_t cols)
{
    problem p = {};
    p.type = type, p.direction = direction, p.path = path, p.rows = rows, p.cols = cols, p.spread = 3, p.eps = 1e-6f;
    p.seed = test_hash((uint64_t)(rows * 1000003 + cols * 1009 + direction * 4 + path));
    p.first = p.seed % 2;
    p.has[X] = p.has[GATE] = p.has[WEIGHT] = p.has[RSTD] = true;
    p.has[DY] = p.has[DX] = p.has[DGATE] = p.has[DWEIGHT] = direction == BACKWARD, p.has[Y] = direction == FORWARD;
    return p;
}

static const char *describe(const problem *p)
{
    static char text[768];
    int n = snprintf(text, sizeof text,
                     "%s %s path=%s %lld x %lld gate %s groups=%d eps=%g weight_offset=%g dtypes %d %d%s%s%s special=%s of %s",
                     direction_name[p->direction], test_type_name[p->type], path_name[p->path], (long long)p->rows,
                     (long long)p->cols, p->first ? "first" : "last", p->groups, (double)p->eps, (double)p->weight_offset,
                     p->weight_dtype, p->dweight_dtype, p->in_place ? " in place" : "", p->strides ? " strides given" : "",
                     p->accumulate ? " accumulate" : "", special_name[p->special], tensor_name[p->victim]);
    for (int t = 0; t < WORKSPACE; t++)
        if (p->has[t])
            n += snprintf(text + n, sizeof text - (size_t)n, " %s(gap %d at %d)", tensor_name[t], t < MATRICES ? p->gap[t] : 0,
                          p->at[t]);
    snprintf(text + n, sizeof text - (size_t)n, " seed=0x%llx", (unsigned long long)p->seed);
    return text;
}

/* ---- Counts ------------------------------------------------------------------------------------------------------------- */

enum {
    DID_TYPE, DID_FIRST = DID_TYPE + TEST_TYPES, DID_SPECIAL = DID_FIRST + 2, DID_NO_WEIGHT = DID_SPECIAL + SPECIALS, DID_OFFSET,
    DID_GROUPS, DID_NO_RSTD, DID_NO_MAIN, DID_NO_DGATE, DID_NO_DWEIGHT, DID_NO_DY, DID_PLACE, DID_GAPS, DID_OFF, DID_ALIKE,
    DID_STRIDES, DID_OTHER_WEIGHT, DID_ACCUMULATE, DID_MANY, DIDS
};
static const char *const did_name[] = {
    "f32", "f16", "bf16", "gate last", "gate first", "nothing special", "-inf", "+inf", "nan", "a row of 0", "weight NULL",
    "weight_offset", "groups", "rstd NULL", "y or dx NULL", "dgate NULL", "dweight NULL", "dy NULL", "in place", "gaps",
    "one tensor off", "all off alike", "strides given", "weight of another type", "accumulate", "many rows"};
/* Of each direction the paths, and then the kinds of kernels. */
enum { KINDS = LK_SRMS_NORM_GATED_SINGLES + 1, COUNTED = PATHS + KINDS };
static const char *const counted_paths[] = {"fwd auto", "warp", "block", "cluster", "whole", "short", "few", "any", "singles",
                                            "bwd auto", "warp", "block", "cluster", "whole", "short", "few", "any", "singles"};
static_assert(2 * (int)COUNTED <= (int)TEST_MOST_PATHS, "count fewer");
static test_counts counts = {counted_paths, did_name, 2 * COUNTED, DIDS, {}, {}};

static bool possible(int at, int did)
{
    const bool back = at >= COUNTED;
    const int kind = at % COUNTED - PATHS;
    if (at % COUNTED == LK_SRMS_NORM_CLUSTER && !test_clusters()) return false;
    if (kind >= 0 && kind < LK_SRMS_NORM_GATED_ANY) {
        if (did == DID_OFF || did == DID_ALIKE || (back && did == DID_NO_DY) || (!back && did == DID_OTHER_WEIGHT)) return false;
        if (kind == LK_SRMS_NORM_GATED_FEW && back) return false;
    }
    if (kind == LK_SRMS_NORM_GATED_SINGLES && did == DID_ALIKE) return false;
    return back || !(did == DID_NO_DGATE || did == DID_NO_DWEIGHT || did == DID_NO_DY || did == DID_ACCUMULATE);
}

static lk_srms_norm_gated_args args; /* of the last checked call */

/* The kind of the kernel that a call launches. */
template <class T> static int kind_of_type(lk_direction direction)
{
    lk_device device = {};
    lk_srms_norm_args a;
    if (lk_srms_norm_gated_check<T>("op", &args, direction, &device, &a)) return LK_SRMS_NORM_GATED_ANY;
    return (direction == LK_BACKWARD ? lk_srms_norm_gated_backward_lay_out<T>(&device, &a)
                                     : lk_srms_norm_gated_forward_lay_out<T>(&device, &a)).gated;
}
static int kind_of(const problem *p)
{
    const lk_direction direction = p->direction == BACKWARD ? LK_BACKWARD : LK_FORWARD;
    return p->type == TEST_F32   ? kind_of_type<lk_f32>(direction)
           : p->type == TEST_F16 ? kind_of_type<lk_f16>(direction)
                                 : kind_of_type<lk_bf16>(direction);
}

static void count(const problem *p)
{
    const bool back = p->direction == BACKWARD;
    const int first = p->direction * COUNTED, rows[] = {first + p->path, first + PATHS + kind_of(p)};
    const int vec = 16 / test_type_bytes[p->type];
    bool did[DIDS] = {}, same = true;
    did[DID_TYPE + p->type] = did[DID_FIRST + p->first] = did[DID_SPECIAL + p->special] = true;
    did[DID_NO_WEIGHT] = !p->has[WEIGHT], did[DID_OFFSET] = p->has[WEIGHT] && p->weight_offset != 0;
    did[DID_GROUPS] = p->has[WEIGHT] && p->groups > 1, did[DID_NO_RSTD] = !p->has[RSTD];
    did[DID_NO_MAIN] = !p->has[back ? DX : Y], did[DID_NO_DGATE] = back && !p->has[DGATE];
    did[DID_NO_DWEIGHT] = back && !p->has[DWEIGHT], did[DID_NO_DY] = back && !p->has[DY], did[DID_PLACE] = p->in_place;
    for (int t = 0; t < MATRICES; t++)
        did[DID_GAPS] = did[DID_GAPS] || (p->has[t] && p->gap[t]), same = same && (!p->has[t] || p->at[t] == p->at[X]);
    did[DID_OFF] = !same, did[DID_ALIKE] = same && p->at[X] % vec, did[DID_STRIDES] = p->strides;
    did[DID_OTHER_WEIGHT] = p->has[WEIGHT] && p->weight_dtype && p->weight_dtype != p->type + 1;
    did[DID_ACCUMULATE] = p->has[DWEIGHT] && p->accumulate, did[DID_MANY] = p->rows >= 30;
    for (int k = 0; k < (p->rows ? 2 : 1); k++) {
        counts.runs[rows[k]]++;
        for (int i = 0; i < DIDS; i++) counts.of[rows[k]][i] += did[i];
    }
}

/* ---- One checked call --------------------------------------------------------------------------------------------------- */

static test_buffer buffer[BUFFERS];
static unsigned char *kept[BUFFERS];
static size_t kept_bytes[BUFFERS], room_bytes[2];
static double *dweight_sum, *dweight_size;

static int64_t groups_of(const problem *p) { return p->groups ? p->groups : 1; }
static int type_of(const problem *p, int t)
{
    const int dtype = t == WEIGHT ? p->weight_dtype : t == DWEIGHT ? p->dweight_dtype : t == RSTD ? LK_DTYPE_F32 : 0;
    return dtype ? dtype - LK_DTYPE_F32 : p->type; /* both lists go f32, f16, bf16 */
}
/* The buffer in which a tensor lies, and its rows. */
static int home_of(const problem *p, int t) { return !p->in_place ? t : t == Y ? X : t == DX ? DY : t; }
static int64_t stride_of(const problem *p, int t) { return p->cols + p->gap[home_of(p, t)]; }
static int64_t elements_of(const problem *p, int t)
{
    if (t == RSTD) return p->rows;
    if (t >= MATRICES) return groups_of(p) * p->cols;
    return p->rows ? (p->rows - 1) * stride_of(p, t) + p->cols : 0;
}
static bool is_output(const problem *p, int t)
{
    return p->has[t] && (p->direction == FORWARD ? t == Y || t == RSTD : t == DX || t == DGATE || t == DWEIGHT);
}
static float value_of(const problem *p, int t, int64_t r, int64_t c)
{
    static const float special[] = {0, -INFINITY, INFINITY, NAN, 0};
    uint64_t random = test_hash(p->seed + (uint64_t)((t * 1000 + r) * 100003 + c));
    const double x = p->spread * test_uniform(&random);
    if (p->special == ZERO_ROW) return t == X && r % 2 ? 0 : (float)x;
    return p->special && t == p->victim && (uint64_t)(r * 7 + c) % 11 == 0 && r % 2 == 0 ? special[p->special] : (float)x;
}
static double read(const problem *p, int t, int64_t r, int64_t c)
{
    return (double)test_get(p->type, test_buffer_host(&buffer[t]), r * stride_of(p, t) + c);
}
static double weight_at(const problem *p, int64_t r, int64_t c)
{
    if (!p->has[WEIGHT]) return 1;
    return (double)p->weight_offset +
           (double)test_get(type_of(p, WEIGHT), test_buffer_host(&buffer[WEIGHT]), r % groups_of(p) * p->cols + c);
}

/* A row as the formula has it. */
typedef struct {
    double rstd, error; /* error: E */
} row_values;
typedef struct {
    double s, silu, slope, error, slope_error; /* error: E(c); slope: silu' */
} element;

static element element_of(const problem *p, int64_t r, int64_t c)
{
    const double x = read(p, X, r, c), g = read(p, GATE, r, c), sigmoid = 1 / (1 + exp(-g)), other = 1 / (1 + exp(g));
    const double silu = g * (g != g ? NAN : sigmoid), error = isfinite(g) ? (3 * fabs(g) + 10) * 0x1p-23 : 0;
    return {p->first ? x * silu : x, silu, sigmoid + silu * other, error,
            error * (sigmoid + fabs(silu * other)) + 0x1p-126 * (1 + fabs(g))};
}
static row_values row_of(const problem *p, int64_t r)
{
    double sum = 0, error = 0;
    for (int64_t c = 0; c < p->cols; c++) {
        const element e = element_of(p, r, c);
        sum += e.s * e.s, error = fmax(error, e.error);
    }
    return {1 / sqrt(sum / (double)p->cols + (double)p->eps), error};
}

static bool prepare(const problem *p, int run)
{
    for (int b = 0; b < WORKSPACE; b++)
        test_buffer_size(&buffer[b], (size_t)elements_of(p, b) * (size_t)test_type_bytes[type_of(p, b)],
                         (size_t)(p->at[b] * test_type_bytes[type_of(p, b)]), run ? 0x7f : 0x5a);
    for (int t = X; t <= DY; t++)
        for (int64_t r = 0; r < p->rows; r++)
            for (int64_t c = 0; c < p->cols; c++)
                test_put(p->type, test_buffer_host(&buffer[t]), r * stride_of(p, t) + c, value_of(p, t, r, c));
    uint64_t random = p->seed;
    for (int64_t i = 0; i < elements_of(p, WEIGHT); i++) {
        test_put(type_of(p, WEIGHT), test_buffer_host(&buffer[WEIGHT]), i, (float)(0.2 + fabs(test_uniform(&random))));
        if (p->accumulate) test_put(type_of(p, DWEIGHT), test_buffer_host(&buffer[DWEIGHT]), i, (float)(i % 5));
    }
    for (int64_t r = 0; r < p->rows && p->direction == BACKWARD && p->has[RSTD]; r++)
        ((float *)test_buffer_host(&buffer[RSTD]))[r] = (float)row_of(p, r).rstd;

    void *at[BUFFERS] = {};
    int64_t stride[MATRICES] = {};
    for (int t = 0; t < WORKSPACE; t++) {
        if (!p->has[t]) continue;
        at[t] = test_buffer_device(&buffer[home_of(p, t)]);
        if (t < MATRICES) stride[t] = p->gap[home_of(p, t)] || p->strides ? stride_of(p, t) : 0;
    }
    args = {};
    lk_srms_norm_args &a = args.common;
    a.x = at[X], a.weight = at[WEIGHT], a.rstd = (float *)at[RSTD], a.y = at[Y], a.dy = at[DY], a.dx = at[DX],
    a.dweight = at[DWEIGHT];
    a.rows = p->rows, a.cols = p->cols, a.groups = p->groups, a.eps = p->eps, a.weight_offset = p->weight_offset;
    a.x_stride = stride[X], a.y_stride = stride[Y], a.dy_stride = stride[DY], a.dx_stride = stride[DX];
    a.weight_dtype = p->weight_dtype, a.dweight_dtype = p->dweight_dtype, a.accumulate = p->accumulate, a.path = p->path;
    args.gate = at[GATE], args.dgate = at[DGATE], args.gate_stride = stride[GATE], args.dgate_stride = stride[DGATE];
    args.gate_first = p->first;
    size_t bytes = 0;
    if (!test_launched(query_of[p->direction][p->type](&args, &bytes), describe(p))) return false;
    test_buffer_size(&buffer[WORKSPACE], bytes, 0, run ? 0x7f : 0xff);
    a.workspace = bytes ? test_buffer_device(&buffer[WORKSPACE]) : NULL, a.workspace_bytes = bytes;
    for (int b = 0; b < BUFFERS; b++) test_buffer_upload(&buffer[b]);
    return true;
}

static lk_status launch(const problem *p) { return call_of[p->direction][p->type](&args, test.stream); }
static void collect(const problem *)
{
    for (int b = 0; b < BUFFERS; b++) test_buffer_download(&buffer[b]);
}

static void expect(const problem *p, int t, int64_t at, int64_t r, int64_t c, double want, double slack)
{
    const float got = test_get(type_of(p, t), test_buffer_back(&buffer[home_of(p, t)]), at);
    if (!isfinite(want) || !isfinite(slack)) slack = 0;
    if (!test_near(type_of(p, t), got, want, slack + 0x1p-126))
        test_detail("%s[%lld, %lld] is %.9g, want %.9g +- %.3g; %s", tensor_name[t], (long long)r, (long long)c, (double)got,
                    want, slack, describe(p));
}

/* Holds the outputs against the formula. */
static void verify(const problem *p)
{
    const double u = 0x1p-24;
    const int64_t columns = groups_of(p) * p->cols;
    dweight_sum = (double *)test_room(dweight_sum, &room_bytes[0], (size_t)columns * sizeof(double));
    dweight_size = (double *)test_room(dweight_size, &room_bytes[1], (size_t)columns * sizeof(double));
    for (int64_t i = 0; i < columns; i++) dweight_sum[i] = dweight_size[i] = 0;
    for (int64_t r = 0; r < p->rows; r++) {
        const row_values row = row_of(p, r);
        const double more = p->first ? row.error : 0, rstd = row.rstd;
        double mean = 0, size = 0;
        if (p->direction == FORWARD && p->has[RSTD]) expect(p, RSTD, r, r, 0, rstd, rstd * (8 * u + more));
        for (int64_t c = 0; c < p->cols; c++) {
            const element e = element_of(p, r, c);
            const double w = weight_at(p, r, c), h = e.s * rstd;
            if (p->direction == FORWARD) {
                const double y = p->first ? h * w : h * w * e.silu;
                if (p->has[Y]) expect(p, Y, r * stride_of(p, Y) + c, r, c, y, fabs(y) * (14 * u + e.error + more));
                continue;
            }
            const double dy = p->has[DY] ? read(p, DY, r, c) : 1, of_norm = p->first ? dy : dy * e.silu;
            mean += of_norm * w * h, size += fabs(of_norm * w * h);
            const int64_t i = r % groups_of(p) * p->cols + c;
            dweight_sum[i] += of_norm * h, dweight_size[i] += fabs(of_norm * h) * (1 + 2 * row.error / u / 20);
        }
        if (p->direction == FORWARD) continue;
        mean /= (double)p->cols, size /= (double)p->cols;
        for (int64_t c = 0; c < p->cols; c++) {
            const element e = element_of(p, r, c);
            const double x = read(p, X, r, c), w = weight_at(p, r, c), h = e.s * rstd, dy = p->has[DY] ? read(p, DY, r, c) : 1;
            const double g = (p->first ? dy : dy * e.silu) * w, ds = rstd * (g - h * mean);
            const double off = rstd * (fabs(g) + fabs(h) * size) * (24 * u + 3 * row.error) + 0x1p-126;
            const double dx = p->first ? ds * e.silu : ds, dgate = (p->first ? ds * x : dy * h * w) * e.slope;
            const double dx_off = p->first ? off * fabs(e.silu) + fabs(dx) * (e.error + 4 * u) : off;
            const double of_slope = fabs(p->first ? ds * x : dy * h * w) * e.slope_error;
            const double dgate_off = (p->first ? off * fabs(x * e.slope) : fabs(dgate) * 14 * u) + of_slope + 4 * u * fabs(dgate);
            if (p->has[DX]) expect(p, DX, r * stride_of(p, DX) + c, r, c, dx, dx_off);
            if (p->has[DGATE]) expect(p, DGATE, r * stride_of(p, DGATE) + c, r, c, dgate, dgate_off);
        }
    }
    for (int64_t i = 0; i < columns && p->direction == BACKWARD && p->has[DWEIGHT]; i++) {
        const double old = p->accumulate ? (double)test_get(type_of(p, DWEIGHT), test_buffer_host(&buffer[DWEIGHT]), i) : 0;
        const double slack = dweight_size[i] * (20 + log2((double)p->rows + 1)) * u;
        expect(p, DWEIGHT, i, i / p->cols, i % p->cols, old + dweight_sum[i], slack + u * fabs(old + dweight_sum[i]));
    }
}

static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < WORKSPACE; t++) {
        if (!is_output(p, t)) continue;
        const test_buffer *const b = &buffer[home_of(p, t)];
        const int bytes = test_type_bytes[type_of(p, t)];
        const unsigned char *const back = (const unsigned char *)test_buffer_back(b);
        if (keep) kept[t] = (unsigned char *)test_room(kept[t], &kept_bytes[t], b->bytes + 1), memcpy(kept[t], back, b->bytes);
        const int64_t rows = t < MATRICES ? p->rows : 1, cols = t < MATRICES ? p->cols : elements_of(p, t);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) {
                const int64_t i = r * (t < MATRICES ? stride_of(p, t) : 0) + c;
                if (!keep && !test_that(!memcmp(kept[t] + i * bytes, back + i * bytes, (size_t)bytes)))
                    test_detail("%s gives other bits for %s[%lld, %lld]; %s", what, tensor_name[t], (long long)r, (long long)c,
                                describe(p));
                test_buffer_accept(b, i, bytes);
            }
    }
    test_buffer_accept_all(&buffer[WORKSPACE]);
    for (int b = 0; b < BUFFERS; b++) test_buffer_untouched(&buffer[b], tensor_name[b], describe(p));
}

static const test_op<problem> op = {describe, prepare, launch, collect, verify, settle, count};
static void check(const problem *p) { test_twice(op, p); }

/* Both places of the gate; in backward with and without dweight. */
static void check_both(problem p)
{
    for (int first = 0; first < 2; first++) {
        p.first = first;
        check(&p);
        if (p.direction == FORWARD || !p.has[DWEIGHT] || (!p.has[DX] && !p.has[DGATE])) continue;
        problem other = p;
        other.has[DWEIGHT] = false, other.has[WEIGHT] = first;
        check(&other);
    }
}

/* ---- Cases -------------------------------------------------------------------------------------------------------------- */

static void lengths(int type, int direction, int path)
{
    const int64_t v = 16 / test_type_bytes[type];
    const int64_t cols[] = {1, 2, v - 1, v, v + 1, 16 * v, 33 * v + 1, 128 * v, 130 * v + 5, 600 * v - 1, 2600 * v, 5000 * v + 3};
    for (int i = 0; i < LENGTH_OF(cols) - (test.small ? 2 : 0); i++) {
        problem p = plain(type, direction, path, cols[i] > 200 * v ? 2 : 5, cols[i]);
        check_both(p);
        p.at[GATE] = 1; /* now all elements are read one by one */
        check(&p);
    }
}

static void row_counts(int type, int direction, int path)
{
    const int64_t rows[] = {0, 1, 2, 31, 33, 300}, cols[] = {3, 64, 128, 129};
    for (int i = 0; i < LENGTH_OF(rows) - (test.small ? 1 : 0); i++)
        for (int j = 0; j < LENGTH_OF(cols); j++) {
            problem p = plain(type, direction, path, rows[i], cols[j]);
            p.groups = j % 2 ? 4 : 0;
            if (rows[i] <= 33 || path <= LK_SRMS_NORM_WARP) check_both(p);
        }
}

static void places(int type, int direction, int path)
{
    const int v = 16 / test_type_bytes[type];
    for (int t = 0; t <= MATRICES + 1; t++) /* one tensor is elsewhere; then each is at its own place; then all alike */
        for (int k = 0; k < 4; k++) {
            problem p = plain(type, direction, path, 5, k % 2 ? 37 : 40 * v);
            for (int i = 0; i < MATRICES; i++) {
                if (t > MATRICES) p.gap[i] = v * (k / 2), p.at[i] = 1;
                else if (i == t || t == MATRICES) p.gap[i] = k / 2 ? v : 2 * i + 1, p.at[i] = k / 2 ? (i + 1) % v : 0;
            }
            p.strides = k == 0, p.at[WEIGHT] = k % 3, p.in_place = k == 3;
            check_both(p);
        }
}

/* Whether a case of many short rows runs on a path: a device with many SMs needs more rows for them, and has them on one. */
static bool runs_short(int path) { return path == LK_SRMS_NORM_AUTO || (path == LK_SRMS_NORM_WARP && test.sms <= 8); }

/* As many rows as forward's kernel for short ones asks for; backward's takes any number, and here a team of it has several. */
static int64_t short_count(int type, int direction, int64_t cols)
{
    int64_t teams = LK_SRMS_NORM_SHORT_THREADS;
    while (LK_SRMS_NORM_SHORT_THREADS / teams * (16 / test_type_bytes[type]) < cols) teams /= 2;
    return (direction == BACKWARD && test.sms > 8 ? 20 : 4 * test.sms + 1) * 2 * teams - 3;
}

/* Each option on rows with single elements, on whole ones, on those where tensors do not lie alike modulo 16 bytes, on short ones. */
static void options(int type, int direction, int path)
{
    const int v = 16 / test_type_bytes[type];
    for (int k = 0; k < 4 * 32; k++) {
        const int place = k / 32;
        if (place == 3 && (!runs_short(path) || ((test.small || test.sms > 8) && k % 6 != 2 && k % 32 % 11 != 1))) continue;
        const int64_t cols[] = {k % 2 ? 100 : 33, (k % 2 ? 3 : 9) * v, k % 2 ? 90 : 6 * v, (k % 2 ? 2 : 5) * v};
        const int64_t rows = place == 3 ? short_count(type, direction, cols[3]) : k % 3 ? 7 : 34;
        problem p = plain(type, direction, path, rows, cols[place]);
        p.has[RSTD] = !(k & 1), p.has[WEIGHT] = k % 5 > 0, p.weight_offset = k & 4 ? 1 : 0, p.groups = k & 8 ? 3 : 1;
        p.weight_dtype = k / 2 % 4, p.dweight_dtype = k / 3 % 4, p.accumulate = k & 2, p.eps = k % 7 == 1 ? 0.3f : 0;
        p.in_place = k & 16, p.at[GATE] = place == 2, p.strides = k % 11 == 1;
        for (int t = 0; t < MATRICES; t++) p.gap[t] = k % 4 == 1 ? v : 0;
        if (direction == BACKWARD) {
            p.has[DX] = k % 5 != 1, p.has[DGATE] = k % 5 != 2, p.has[DWEIGHT] = k % 3 != 1, p.has[DY] = k % 6 > 0 || p.in_place;
            if (k % 10 == 3) p.has[DX] = p.has[DGATE] = false, p.has[DWEIGHT] = true;
        } else {
            p.has[Y] = k % 6 != 2;
            if (place != 0 && k % 3) p.weight_dtype = 0;
        }
        check_both(p);
    }
}

static void specials(int type, int direction, int path)
{
    const int v = 16 / test_type_bytes[type];
    const int64_t cols[] = {9, 300, 12 * v, 9 * v, 2 * v};
    for (int special = NOTHING + 1; special < SPECIALS; special++)
        for (int victim = X; victim <= DY; victim++)
            for (int k = 0; k < 5; k++) {
                if ((victim == DY && direction == FORWARD) || (k == 4 && (!runs_short(path) || victim > X))) continue;
                problem p = plain(type, direction, path, k == 4 ? short_count(type, direction, cols[4]) : 4, cols[k]);
                p.special = special, p.victim = victim, p.has[DWEIGHT] = direction == BACKWARD && k, p.at[GATE] = k == 3;
                check_both(p);
            }
}

/* Gates where silu and its slope underflow, and where they are 1. */
static void wide_gates(int type, int direction, int path)
{
    for (int k = 0; k < 4; k++) {
        problem p = plain(type, direction, path, 3, k % 2 ? 65 : 256);
        p.spread = k / 2 ? 60 : 14;
        check_both(p);
    }
}

static void graphs(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 6, 700);
    check(&p); /* leaves its bits in kept */
    test_graph(op, &p);
}

/* Short rows, many and few: lanes without a vector; fewer groups than a block has teams and more; teams with several rows. */
static void short_rows(int type, int direction, int path)
{
    const int v = 16 / test_type_bytes[type], shapes[][2] = {{16, 1}, {5, 3}, {32, 8}, {1, 64}, {16, 32}, {12, 5}, {2, 300}};
    for (int i = 0; i < LENGTH_OF(shapes) && runs_short(path); i++)
        for (int k = 0; k < 3; k++) {
            if (test.sms > 8 && (i + k + type + path) % 3) continue;
            const int64_t cols = shapes[i][0] * v, many = short_count(type, FORWARD, cols);
            problem p = plain(type, direction, path, k ? many * (direction == BACKWARD ? k : 1) : 60, cols);
            p.groups = shapes[i][1], p.has[RSTD] = k < 2, p.in_place = k == 1;
            p.first = (i + k) % 2;
            check(&p);
        }
    if (direction == BACKWARD && path == LK_SRMS_NORM_AUTO) { /* smaller blocks, for the workspace's bound */
        problem p = plain(type, direction, path, 256 * test.sms + 9, v);
        p.groups = 4097;
        check(&p);
    }
}

static const test_theme themes[] = {{"lengths", lengths}, {"rows", row_counts},       {"places", places}, {"options", options},
                                    {"short rows", short_rows},
                                    {"special values", specials}, {"wide gates", wide_gates}, {"graphs", graphs}};

/* ---- Errors ------------------------------------------------------------------------------------------------------------- */

typedef test_bad_call<lk_srms_norm_gated_args> bad_call;

static void expect_error(int type, int direction, const bad_call *bad)
{
    problem p = plain(type, direction, LK_SRMS_NORM_AUTO, 3, 40);
    prepare(&p, 0);
    if (bad->spoil) bad->spoil(&args);
    const bool refused = test_refused(bad, direction);
    size_t asked = TEST_NOT_ASKED;
    const lk_status status = launch(&p), answer = query_of[direction][type](&args, &asked);
    test_expect(status, refused ? bad->want : LK_OK, bad->field, "lk_srms_norm_gated", direction_name[direction], type);
    test_expect_query(answer, refused ? bad->asked : LK_OK, asked, bad->field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = 0; t < BUFFERS; t++)
        if (t == WORKSPACE || is_output(&p, t)) test_expect_unwritten(status, &buffer[t], tensor_name[t], bad->field);
}

static void errors(int type, int direction)
{
    static const bad_call list[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_NULL, LK_OK, "x is NULL", SPOIL(a->common.x = NULL)},
        {LK_ERR_NULL, LK_OK, "gate is NULL", SPOIL(a->gate = NULL)},
        {LK_ERR_NULL, LK_OK, "every output",
         SPOIL(a->common.y = a->common.dx = a->common.dweight = a->dgate = NULL;
               if (a->common.dy == NULL) a->common.rstd = NULL)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "rows", SPOIL(a->common.rows = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "cols", SPOIL(a->common.cols = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "gate_stride", SPOIL(a->gate_stride = 39)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dgate_stride", SPOIL(a->dgate_stride = -1), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->dgate = a->common.dx), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->dgate = (void *)a->gate), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->common.y = (void *)a->gate), true, false},
        {LK_ERR_VALUE, LK_ERR_VALUE, "residual is given", SPOIL(a->common.residual = a->gate)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "residual_out is given", SPOIL(a->common.residual_out = (void *)a->gate)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "round_sum is given", SPOIL(a->common.round_sum = 1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "bias is given", SPOIL(a->common.bias = a->gate), true, false},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dresidual is given", SPOIL(a->common.dresidual = (void *)a->gate), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dresidual_out is given", SPOIL(a->common.dresidual_out = a->gate), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dbias is given", SPOIL(a->common.dbias = (void *)a->gate), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dy_dtype is given", SPOIL(a->common.dy_dtype = 7), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "eps", SPOIL(a->common.eps = -1)},
        {LK_ERR_ALIGNMENT, LK_OK, "gate", SPOIL(MOVED(a->gate, 1))},
        {LK_ERR_WORKSPACE, LK_OK, "workspace", SPOIL(a->common.workspace = NULL), false, true}};
    for (int i = 0; i < LENGTH_OF(list); i++) expect_error(type, direction, &list[i]);
    if (!test_that(call_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL is taken");
}

/* A query without tensors answers for all of them: no call asks for more. */
static void queries(int type, int direction)
{
    for (int k = 0; k < 24; k++) {
        problem p = plain(type, direction, k % PATHS == LK_SRMS_NORM_CLUSTER && !test_clusters() ? 0 : k % PATHS,
                          5 + 40 * (k % 3), 30 + k * 37);
        p.at[GATE] = k % 5 == 1, p.has[DY] = k % 4 > 0;
        prepare(&p, 0);
        lk_srms_norm_gated_args unknown = args;
        unknown.common.x = unknown.common.dy = unknown.gate = NULL, unknown.common.dx = unknown.dgate = NULL;
        size_t bytes = 0;
        const lk_status status = query_of[direction][type](&unknown, &bytes);
        if (!test_that(status == LK_OK && bytes >= args.common.workspace_bytes))
            test_detail("%zu bytes without tensors, %zu with them; %s", bytes, args.common.workspace_bytes, describe(&p));
    }
}

/* Backward's layout for shapes that no test runs. Its teams have rows of one group each, at a distance that is an int, and dweight's
 * workspace is within the bound of srms_norm.cuh. */
template <class T> static void layouts(void)
{
    const int64_t v = LK_VEC<T>, k = 1 << 10;
    const int64_t rows[] = {1000, k * k, 10000001, 2 * k * k * k - 256, INT32_MAX, INT32_MAX + 78ll, 8 * k * k * k};
    const int64_t cols[] = {1, v, 2 * v, 5 * v, 32 * v, 32 * v + 1, 1000};
    const int64_t groups[] = {1, 3, 300, 4097, 10007, 65535, 65536, 32 * k * k + 1, 128 * k * k - 1, 512 * k * k};
    const uintptr_t far = (uintptr_t)1 << 50;
    for (int i = 0; i < 7 * 7 * 10 * 8; i++) {
        lk_srms_norm_gated_args given = {};
        lk_srms_norm_args a, &of = given.common;
        of.rows = rows[i % 7], of.cols = cols[i / 7 % 7], of.groups = groups[i / 49 % 10];
        if (of.groups > ((int64_t)1 << 30) / of.cols) continue;
        const int kind = i / 490;
        of.x = (void *)(far + (kind & 1 ? sizeof(T) : 0)), of.dy = (void *)(2 * far), of.dx = (void *)(3 * far);
        of.x_stride = kind & 2 ? of.cols + 1 : 0, of.weight = (void *)(4 * far);
        of.dweight = kind & 4 ? (void *)(5 * far) : NULL, given.gate = (void *)(6 * far), given.dgate = (void *)(7 * far);
        lk_device device = {};
        lk_srms_norm_layout l = {};
        const lk_status status = lk_srms_norm_gated_check<T>("op", &given, LK_BACKWARD, &device, &a);
        if (!status) l = lk_srms_norm_gated_backward_lay_out<T>(&device, &a);
        const int64_t teams = l.call.in.team_log2 < 0 ? 1 : l.threads >> l.call.in.team_log2, step = l.grid / l.cluster * teams;
        const bool same = step >= a.rows || step % a.groups == 0;
        if (!test_that(!status && teams > 0 && step > 0 && step <= INT32_MAX && same))
            test_detail("%lld rows of %lld in %lld groups, kind %d: %s, %lld teams of a block, %lld rows on", (long long)a.rows,
                        (long long)a.cols, (long long)a.groups, kind, lk_status_string(status), (long long)teams,
                        (long long)step);
        const size_t one = (64u << 20) + 8 * (size_t)a.cols + 128, many = (size_t)a.groups * (8 * (size_t)a.cols + 6144);
        if (!test_that(l.workspace <= (a.groups > 1 && many > one ? many : one)))
            test_detail("%lld rows of %lld in %lld groups, kind %d: %zu bytes", (long long)a.rows, (long long)a.cols,
                        (long long)a.groups, kind, l.workspace);
    }
}

static void all_layouts(void)
{
    void (*const run[])(void) = {layouts<lk_f32>, layouts<lk_f16>, layouts<lk_bf16>};
    for (int type = 0; type < TEST_TYPES; type++)
        if (test_begin("layouts: backward %s", test_type_name[type])) run[type](), test_finish();
}

/* ---- Random draws ------------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const r = &state;
    int path = (int)test_below(r, PATHS);
    if (path == LK_SRMS_NORM_CLUSTER && !test_clusters()) path = LK_SRMS_NORM_AUTO;
    const int64_t cols = test_chance(r, 3) ? 1 + test_below(r, 1500) : 1 + test_below(r, 140);
    problem p = plain((int)test_below(r, 3), (int)test_below(r, 2), path,
                      1 + test_below(r, cols > 300          ? 4
                                        : test_chance(r, 8) ? 150
                                                            : 30),
                      cols);
    const int vec = 16 / test_type_bytes[p.type], gap = test_chance(r, 2) ? 0 : 1 + (int)test_below(r, 12);
    const int at = test_chance(r, 2) ? 0 : (int)test_below(r, vec);
    p.seed = seed, p.first = test_chance(r, 2), p.strides = test_chance(r, 3), p.in_place = test_chance(r, 3);
    for (int t = 0; t < BUFFERS; t++) {
        if (t < MATRICES) p.gap[t] = test_chance(r, 5) ? (int)test_below(r, 9) : gap;
        if (t < MATRICES) p.at[t] = test_chance(r, 5) ? (int)test_below(r, vec) : at;
    }
    if (test_chance(r, 3))
        for (int t = 0; t < MATRICES; t++) p.at[t] = at, p.gap[t] = gap;
    p.at[WEIGHT] = test_chance(r, 2) ? 0 : (int)test_below(r, 3);
    if (test_chance(r, 4)) { /* whole rows */
        p.cols = (p.cols + vec - 1) / vec * vec;
        for (int t = 0; t < MATRICES; t++) p.gap[t] = gap / vec * vec, p.at[t] = 0;
        const bool many = test_chance(r, test.sms > 8 ? 20 : 6);
        if (many) p.cols = vec * (1 + test_below(r, 32)), p.rows = short_count(p.type, p.direction, p.cols);
    }
    p.has[RSTD] = test_chance(r, 2), p.has[WEIGHT] = !test_chance(r, 4), p.weight_offset = test_chance(r, 3) ? 1 : 0;
    p.groups = test_chance(r, 3) ? 2 + (int)test_below(r, 5) : (int)test_below(r, 2);
    p.weight_dtype = (int)test_below(r, 4), p.dweight_dtype = (int)test_below(r, 4), p.accumulate = test_chance(r, 2);
    if (test_chance(r, 3))
        p.special = (int)test_below(r, SPECIALS), p.victim = (int)test_below(r, p.direction == FORWARD ? 2 : 3);
    if (p.direction == FORWARD) {
        p.has[Y] = !test_chance(r, 6) || !p.has[RSTD];
        return p;
    }
    p.has[DX] = !test_chance(r, 5), p.has[DGATE] = !test_chance(r, 5), p.has[DWEIGHT] = test_chance(r, 2),
    p.has[DY] = p.in_place || !test_chance(r, 5);
    if (!p.has[DX] && !p.has[DGATE]) p.has[DWEIGHT] = true;
    return p;
}

static void fuzz(void)
{
    const long n = test_fuzz_begin(&counts, 400, 100);
    test_draws(draw, check, n);
    test_fuzz_end(&counts, possible, n);
}

/* ---- On the GPU only: beyond 2^31 elements, and a busy device ----------------------------------------------------------- */

#if !defined(LK_SIMT)

/* Forward; sampled rows are computed on the host. */
static void huge(int64_t rows, int64_t cols, int first)
{
    const int64_t n = rows * cols;
    lk_bf16 *const x = (lk_bf16 *)test_huge_allocate(n * 2), *const gate = (lk_bf16 *)test_huge_allocate(n * 2);
    lk_bf16 *const y = (lk_bf16 *)test_huge_allocate(n * 2);
    test_huge_fill(x, n, 0), test_huge_fill(gate, n, n);
    lk_srms_norm_gated_args a = {};
    a.common.x = x, a.common.y = y, a.common.rows = rows, a.common.cols = cols, a.common.eps = 1e-6f, a.gate = gate,
    a.gate_first = first;
    uint64_t random = (uint64_t)n;
    for (int s = 0; test_launched(lk_srms_norm_gated_forward_bf16(&a, test.stream), "huge") && s < 20; s++) {
        const int64_t row = s == 0 ? rows - 1 : test_below(&random, rows);
        double sum = 0;
        for (int pass = 0; pass < 2; pass++)
            for (int64_t c = 0; c < cols; c++) {
                const double g = (double)test_huge_value(n + row * cols + c), silu = g / (1 + exp(-g));
                const double v = (double)test_huge_value(row * cols + c), of = first ? v * silu : v;
                if (!pass) sum += of * of;
                const double want = of / sqrt(sum / (double)cols + 1e-6) * (first ? 1 : silu);
                if (pass && c % 37 == 0)
                    test_near(TEST_BF16, test_huge_get(TEST_BF16, y, row * cols + c), want, 0x1p-18 * fabs(want));
            }
    }
    test_huge_free();
}

static void busy(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 700, 1501);
    check(&p);
    test_busy(op, &p);
}

static void all_huge(void)
{
    for (int first = 0; first < 2; first++) {
        if (test_begin("huge: 70000 x 32768, gate %s", first ? "first" : "last")) huge(70000, 32768, first), test_finish();
        if (test_begin("huge: 2^24 + 77 rows of 130, gate %s", first ? "first" : "last"))
            huge((1 << 24) + 77, 130, first), test_finish();
    }
    static const test_theme held = {"half of the SMs held", busy};
    for (int direction = FORWARD; direction <= BACKWARD; direction++)
        for (int path = 0; path < PATHS; path++)
            if (path != LK_SRMS_NORM_CLUSTER || test_clusters())
                test_themes(&held, 1, direction, path, direction_name[direction], path_name[path]);
}

#endif

/* ---------------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    test_start(argc, argv);
    test_of_directions("errors:", errors, direction_name, 2);
    test_of_directions("queries:", queries, direction_name, 2);
    all_layouts();
    for (int direction = FORWARD; direction <= BACKWARD; direction++)
        for (int path = 0; path < PATHS; path++)
            if (path != LK_SRMS_NORM_CLUSTER || test_clusters())
                test_themes(themes, LENGTH_OF(themes), direction, path, direction_name[direction], path_name[path]);
    TEST_HUGE(all_huge);
    test_all_ran(&counts, possible);
    fuzz();
    return test_end();
}
