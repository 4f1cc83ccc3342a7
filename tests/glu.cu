// SPDX-License-Identifier: MIT
/* tests/glu.cu - lk/glu.cuh against its header's formula in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits. Bytes that are not outputs (zones around
 * every buffer, gaps between rows, inputs) must not change.
 *
 * The bounds are those of lk/glu.md, with U = 2^-24. act and the terms of its slope: within `error` of their magnitudes, that of the
 * exponential and of its argument; what is below 2^-126 may be flushed to 0. Each product and sum behind it rounds once, at most six
 * of them; an output of T once more. drow_weight sums chains of cols / 256 terms in a team of 256 threads, of 16 in smaller ones.
 */
#include "lk/glu.cuh"

#include "tests/test.h"

TEST_DEFINE(GLU)

typedef lk_status (*call)(const lk_glu_args *, cudaStream_t);
typedef lk_status (*query)(const lk_glu_args *, size_t *);
static const call call_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_glu_forward), TEST_OF_TYPES(lk_glu_backward)};
static const query query_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_glu_forward_workspace_bytes),
                                              TEST_OF_TYPES(lk_glu_backward_workspace_bytes)};

enum { FORWARD, BACKWARD };
static const char *const direction_name[] = {"forward", "backward"};
static const char *const activation_name[] = {"silu", "gelu", "gelu_tanh", "relu", "sigmoid"};
/* APART: gate and up are two tensors. HALVES: of one. TURNS: interleaved. */
enum { APART, HALVES, TURNS };
static const char *const layout_name[] = {"apart", "halves", "interleaved"};
enum { GATE, UP, Y, DY, DGATE, DUP, MATRICES, WEIGHT = MATRICES, DWEIGHT, TENSORS };
static const char *const tensor_name[] = {"gate", "up", "y", "dy", "dgate", "dup", "row_weight", "drow_weight"};
/* Where outputs lie. OVER: y in gate, dgate in gate, dup in up. OTHER: y in up, dgate in dy, dup in up. LAST: y apart, dup in dy. */
enum { NEW, OVER, OTHER, LAST };
static const char *const in_place_name[] = {"", ", over gate", ", over up or dy", ", dup over dy"};
enum { NOTHING, MINUS_INF, PLUS_INF, NOT_A_NUMBER, LARGE, SPECIALS };
static const char *const special_name[] = {"nothing", "-inf", "+inf", "nan", "large"};

/* One call. `at` is how many elements a tensor's buffer is past 256-byte alignment; gap: behind each row, 0: packed. */
typedef struct {
    int type, direction, layout, activation, in_place, special;
    int64_t rows, cols;
    int gap[MATRICES], at[TENSORS];
    float alpha, limit, up_offset;
    bool weight, dweight, no_dgate, no_dup, strides; /* strides: given, though rows are packed */
    double spread;
    uint64_t seed;
} problem;

static problem plain(int type, int direction, int64_t rows, int64_t cols)
{
    problem p = {};
    p.type = type, p.direction = direction, p.rows = rows, p.cols = cols;
    p.activation = (int)((rows + cols) % 5), p.spread = 4;
    p.seed = test_hash((uint64_t)(rows * 1000003 + cols * 1009 + direction));
    return p;
}

static const char *describe(const problem *p)
{
    static char text[512];
    snprintf(text, sizeof text,
             "%s %s %lld x %lld %s %s%s alpha=%g limit=%g up_offset=%g%s%s%s%s special=%s gaps %d %d %d %d %d %d at %d %d %d %d %d "
             "%d%s spread=%g seed=0x%llx",
             direction_name[p->direction], test_type_name[p->type], (long long)p->rows, (long long)p->cols,
             activation_name[p->activation], layout_name[p->layout], in_place_name[p->in_place], (double)p->alpha,
             (double)p->limit, (double)p->up_offset, p->weight ? " row_weight" : "", p->dweight ? " drow_weight" : "",
             p->no_dgate ? " dgate=NULL" : "", p->no_dup ? " dup=NULL" : "", special_name[p->special], p->gap[0], p->gap[1],
             p->gap[2], p->gap[3], p->gap[4], p->gap[5], p->at[0], p->at[1], p->at[2], p->at[3], p->at[4], p->at[5],
             p->strides ? " strides given" : "", p->spread, (unsigned long long)p->seed);
    return text;
}

/* ---- Where tensors lie -------------------------------------------------------------------------------------------------- */

/* Element (row, col) of a tensor is element first + row stride + col step of a buffer. */
typedef struct {
    int buffer;
    int64_t first, stride, step;
} place;

static place place_of(const problem *p, int t)
{
    if (t == Y && p->in_place == OVER) return place_of(p, GATE);
    if (t == Y && p->in_place == OTHER) return place_of(p, UP);
    if (t == DGATE && p->in_place == OVER) return place_of(p, GATE);
    if (t == DGATE && p->in_place == OTHER) return place_of(p, DY);
    if (t == DUP && (p->in_place == OVER || p->in_place == OTHER)) return place_of(p, UP);
    if (t == DUP && p->in_place == LAST) return place_of(p, DY);
    const int first = t == UP ? GATE : t == DUP ? DGATE : t;
    const bool both = p->layout != APART && t != Y && t != DY;
    if (!both) return {t, 0, p->cols + p->gap[t], 1};
    const int64_t stride = 2 * p->cols + p->gap[first], second = p->layout == TURNS ? 1 : p->cols;
    return {first, t == first ? 0 : second, stride, p->layout == TURNS ? 2 : 1};
}

/* The tensors of a call. */
static bool has(const problem *p, int t)
{
    if (t == WEIGHT) return p->weight;
    if (t == DWEIGHT) return p->direction == BACKWARD && p->dweight;
    if (t == DGATE) return p->direction == BACKWARD && !p->no_dgate;
    if (t == DUP) return p->direction == BACKWARD && !p->no_dup;
    return t <= UP || t == (p->direction == BACKWARD ? DY : Y);
}

/* ---- Counts ------------------------------------------------------------------------------------------------------------- */

enum {
    DID_TYPE, DID_ACTIVATION = DID_TYPE + TEST_TYPES, DID_LAYOUT = DID_ACTIVATION + 5, DID_PLACE = DID_LAYOUT + 3,
    DID_SPECIAL = DID_PLACE + 4, DID_LIMIT = DID_SPECIAL + SPECIALS, DID_OFFSET, DID_ALPHA, DID_WEIGHT, DID_NO_DGATE, DID_NO_DUP,
    DID_GAPS, DID_OFF, DID_ALL_OFF, DID_MANY, DID_STRIDES, DID_NO_ROWS, DID_NO_COLS, DIDS
};
static const char *const did_name[] = {
    "f32", "f16", "bf16", "silu", "gelu", "gelu_tanh", "relu", "sigmoid", "apart", "halves", "interleaved", "new outputs",
    "over gate", "over up or dy", "dup over dy", "nothing special", "-inf", "+inf", "nan", "large", "limit", "up_offset", "alpha",
    "row_weight", "dgate NULL", "dup NULL", "gaps", "one tensor off", "all off alike", "several vectors", "strides given", "0 rows",
    "0 cols"};
static const char *const path_names[] = {"forward", "backward", "drow_weight"};
static test_counts counts = {path_names, did_name, 3, DIDS, {}, {}};

/* The vectors from which on a thread has several. */
static int64_t many(void) { return 2048 * (int64_t)test.sms; }

static bool possible(int path, int did)
{
    if (did == DID_MANY && (path == 2 || (test.small && many() > 1 << 16))) return false;
    if (did == DID_NO_DGATE || did == DID_NO_DUP || did == DID_PLACE + LAST) return path > 0;
    return true;
}

static void count(const problem *p)
{
    const int path = p->direction == FORWARD ? 0 : p->dweight ? 2 : 1, vec = 16 / test_type_bytes[p->type];
    bool did[DIDS] = {}, same = true;
    did[DID_TYPE + p->type] = did[DID_ACTIVATION + p->activation] = did[DID_LAYOUT + p->layout] = true;
    did[DID_PLACE + p->in_place] = did[DID_SPECIAL + p->special] = true;
    did[DID_LIMIT] = p->limit > 0, did[DID_OFFSET] = p->up_offset != 0, did[DID_ALPHA] = p->alpha != 0;
    did[DID_WEIGHT] = p->weight, did[DID_NO_DGATE] = p->no_dgate, did[DID_NO_DUP] = p->no_dup;
    for (int t = 0; t < MATRICES; t++) did[DID_GAPS] = did[DID_GAPS] || p->gap[t], same = same && p->at[t] == p->at[0];
    did[DID_OFF] = !same, did[DID_ALL_OFF] = same && p->at[0] % vec && p->layout != TURNS, did[DID_STRIDES] = p->strides;
    did[DID_MANY] = path < 2 && p->rows * ((p->cols + vec - 1) / vec) >= many();
    did[DID_NO_ROWS] = p->rows == 0, did[DID_NO_COLS] = p->rows && p->cols == 0;
    counts.runs[path]++;
    for (int i = 0; i < DIDS; i++) counts.of[path][i] += did[i];
}

/* ---- The reference ------------------------------------------------------------------------------------------------------ */

/* act, its slope, what these may be off by, and the magnitude of the slope's terms. */
typedef struct {
    double act, slope, act_error, slope_error;
} value;

static value reference(int activation, double alpha, double g)
{
    const double flushed = 0x1p-126 * (isfinite(g) ? 1 + fabs(g) : 1);
    double share = 0, rise = 0, z = 0, steep = 1; /* act is g share, and its slope share + g rise */
    if (activation == LK_GLU_RELU) return {g <= 0 ? 0 : g, g <= 0 ? 0.0 : 1.0, 0, 0};
    if (activation == LK_GLU_GELU) {
        share = 0.5 * erfc(-g / sqrt(2)), rise = exp(-0.5 * g * g) / sqrt(2 * 3.14159265358979323846), z = g * g;
    } else {
        const double c = sqrt(2 / 3.14159265358979323846);
        z = activation == LK_GLU_GELU_TANH ? 2 * c * (g + 0.044715 * g * g * g) : alpha * g;
        steep = activation == LK_GLU_GELU_TANH ? 2 * c * (1 + 3 * 0.044715 * g * g) : alpha;
        const double other = 1 / (1 + exp(z));
        share = 1 / (1 + exp(-z)), rise = share * other * (activation == LK_GLU_SIGMOID ? 1 : steep);
        if (g != g) share = rise = NAN;
        if (activation == LK_GLU_GELU_TANH && fabs(g) > 16) return {g * (g > 0), g > 0 ? 1.0 : 0.0, 0, 0}; /* at infinities too */
    }
    const double error = isfinite(z) ? (3 * fabs(z) + 10) * 0x1p-23 : 0;
    if (activation == LK_GLU_SIGMOID) return {share, rise, error * share + flushed, 2 * error * rise + flushed};
    const double act = g * share, slope = share + g * rise;
    const double flushed_slope = isfinite(g) ? 0x1p-126 * (1 + fabs(g) * fmax(1, fabs(steep))) : flushed; /* share was flushed */
    return {act, slope, error * fabs(act) + flushed, error * (share + fabs(g * rise)) + flushed_slope};
}

/* ---- One checked call --------------------------------------------------------------------------------------------------- */

static lk_glu_args args; /* of the last checked call */
static test_buffer buffer[TENSORS];
static unsigned char *kept[TENSORS];
static size_t kept_bytes[TENSORS];

static int bytes_of(const problem *p, int t) { return t < MATRICES ? test_type_bytes[p->type] : 4; }
static int64_t span_of(const problem *p, int b) /* of a buffer's matrix */
{
    const bool both = p->layout != APART && (b == GATE || b == DGATE);
    const int64_t width = both ? 2 * p->cols : p->cols;
    return p->rows && p->cols ? (p->rows - 1) * (width + p->gap[b]) + width : 0;
}

static float value_of(const problem *p, int t, int64_t r, int64_t c)
{
    static const float special[] = {0, -INFINITY, INFINITY, NAN, 0};
    uint64_t random = test_hash(p->seed + (uint64_t)((t * 1000 + r) * 100003 + c));
    const double x = p->spread * test_uniform(&random);
    const bool here = p->special && (uint64_t)(r * 7 + c + t) % 5 == 0;
    if (here && p->special == LARGE) return t == GATE ? (float)(x < 0 ? -3e4 : 3e4) : (float)x;
    return here ? special[p->special] : (float)x;
}

static bool prepare(const problem *p, int run)
{
    for (int b = 0; b < TENSORS; b++) {
        const int64_t elements = b < MATRICES ? span_of(p, b) : p->rows;
        const size_t bytes = (size_t)bytes_of(p, b);
        const int first_poison = b == Y || b > DY ? 0x5a : 0xff;
        test_buffer_size(&buffer[b], (size_t)elements * bytes, (size_t)p->at[b] * bytes, run ? 0x7f : first_poison);
    }
    for (int t = GATE; t <= DY; t++) {
        if (t == Y || !has(p, t)) continue;
        const place at = place_of(p, t);
        for (int64_t r = 0; r < p->rows; r++)
            for (int64_t c = 0; c < p->cols; c++)
                test_put(p->type, test_buffer_host(&buffer[at.buffer]), at.first + r * at.stride + c * at.step,
                         value_of(p, t, r, c));
    }
    for (int64_t r = 0; p->weight && r < p->rows; r++)
        ((float *)test_buffer_host(&buffer[WEIGHT]))[r] = r % 11 == 3 ? 0 : (float)(0.1 + 0.3 * (double)(r % 5));
    for (int b = 0; b < TENSORS; b++) test_buffer_upload(&buffer[b]);

    void *at[TENSORS] = {};
    int64_t stride[MATRICES] = {};
    for (int t = 0; t < TENSORS; t++) {
        if (!has(p, t)) continue;
        if (t >= MATRICES) {
            at[t] = test_buffer_device(&buffer[t]);
            continue;
        }
        const place here = place_of(p, t);
        at[t] = (char *)test_buffer_device(&buffer[here.buffer]) + here.first * bytes_of(p, t);
        const bool packed = p->gap[here.buffer] == 0 && p->layout != HALVES;
        stride[t] = packed && !p->strides ? 0 : here.stride;
        if (p->layout == TURNS && (t == UP || t == DUP)) at[t] = NULL, stride[t] = 0;
    }
    args = {};
    args.gate = at[GATE], args.up = at[UP], args.y = at[Y], args.dy = at[DY], args.dgate = at[DGATE], args.dup = at[DUP];
    args.row_weight = (const float *)at[WEIGHT], args.drow_weight = (float *)at[DWEIGHT];
    args.rows = p->rows, args.cols = p->cols;
    args.gate_stride = stride[GATE], args.up_stride = stride[UP], args.y_stride = stride[Y];
    args.dy_stride = stride[DY], args.dgate_stride = stride[DGATE], args.dup_stride = stride[DUP];
    args.activation = p->activation, args.interleaved = p->layout == TURNS;
    args.alpha = p->alpha, args.limit = p->limit, args.up_offset = p->up_offset;
    return true;
}

static lk_status launch(const problem *p) { return call_of[p->direction][p->type](&args, test.stream); }
static void collect(const problem *)
{
    for (int b = 0; b < TENSORS; b++) test_buffer_download(&buffer[b]);
}

static double read(const problem *p, int t, int64_t r, int64_t c)
{
    const place at = place_of(p, t);
    return (double)test_get(p->type, test_buffer_host(&buffer[at.buffer]), at.first + r * at.stride + c * at.step);
}

static void expect(const problem *p, int t, int64_t r, int64_t c, double want, double slack)
{
    if (!has(p, t)) return;
    const place at = place_of(p, t);
    const float got = test_get(p->type, test_buffer_back(&buffer[at.buffer]), at.first + r * at.stride + c * at.step);
    if (!isfinite(want) || !isfinite(slack)) slack = 0;
    if (!test_near(p->type, got, want, slack))
        test_detail("%s[%lld, %lld] is %.9g, want %.9g +- %.3g; %s", tensor_name[t], (long long)r, (long long)c, (double)got,
                    want, slack, describe(p));
}

/* Holds the outputs against the formula. */
static void verify(const problem *p)
{
    const double limit = (double)p->limit, alpha = p->alpha == 0 ? 1 : (double)p->alpha, u = 0x1p-24;
    for (int64_t r = 0; r < p->rows; r++) {
        const double w = p->weight ? (double)((const float *)test_buffer_host(&buffer[WEIGHT]))[r] : 1;
        double sum = 0, size = 0, error = 0;
        for (int64_t c = 0; c < p->cols; c++) {
            const double gate = read(p, GATE, r, c), up = read(p, UP, r, c);
            const bool low = !(limit > 0) || gate <= limit, inside = !(limit > 0) || fabs(up) <= limit;
            const double g = limit > 0 && gate > limit ? limit : gate;
            const double v = (limit > 0 && up > limit ? limit : limit > 0 && up < -limit ? -limit : up) + (double)p->up_offset;
            const value of = reference(p->activation, alpha, g);
            if (p->direction == FORWARD) {
                const double y = w * of.act * v;
                expect(p, Y, r, c, y, fabs(w * v) * of.act_error + 4 * u * fabs(y) + 0x1p-126);
                continue;
            }
            const double dy = read(p, DY, r, c), upstream = w * dy;
            const double dgate = upstream * v * (low ? of.slope : 0), dup = upstream * (inside ? of.act : 0);
            expect(p, DGATE, r, c, dgate, fabs(upstream * v) * of.slope_error + 6 * u * fabs(dgate) + 0x1p-126);
            expect(p, DUP, r, c, dup, fabs(upstream) * of.act_error + 4 * u * fabs(dup) + 0x1p-126);
            const double term = dy * of.act * v;
            sum += term, size += fabs(term), error += fabs(dy * v) * of.act_error;
        }
        if (!has(p, DWEIGHT)) continue;
        const float got = ((const float *)test_buffer_back(&buffer[DWEIGHT]))[r];
        const double slack = isfinite(sum) ? error + (20 + (double)p->cols / 256) * u * size + 0x1p-126 : 0;
        if (!test_near(TEST_F32, got, sum, slack))
            test_detail("drow_weight[%lld] is %.9g, want %.9g +- %.3g; %s", (long long)r, (double)got, sum, slack, describe(p));
    }
}

static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++) {
        if (!has(p, t) || (t != Y && t < DGATE) || t == WEIGHT) continue;
        const place at = t < MATRICES ? place_of(p, t) : place{t, 0, 1, 1};
        const test_buffer *const b = &buffer[at.buffer];
        const int bytes = bytes_of(p, t);
        const unsigned char *const back = (const unsigned char *)test_buffer_back(b);
        if (keep) kept[t] = (unsigned char *)test_room(kept[t], &kept_bytes[t], b->bytes + 1), memcpy(kept[t], back, b->bytes);
        for (int64_t r = 0; r < p->rows; r++)
            for (int64_t c = 0; c < (t == DWEIGHT ? 1 : p->cols); c++) {
                const int64_t i = at.first + r * at.stride + c * at.step;
                if (!keep && !test_that(!memcmp(kept[t] + i * bytes, back + i * bytes, (size_t)bytes)))
                    test_detail("%s gives other bits for %s[%lld, %lld]; %s", what, tensor_name[t], (long long)r, (long long)c,
                                describe(p));
                test_buffer_accept(b, i, bytes);
            }
    }
    for (int b = 0; b < TENSORS; b++) test_buffer_untouched(&buffer[b], tensor_name[b], describe(p));
}

static const test_op<problem> op = {describe, prepare, launch, collect, verify, settle, count};
static void check(const problem *p) { test_twice(op, p); }

/* ---- Cases -------------------------------------------------------------------------------------------------------------- */

/* A direction's problem with or without drow_weight. */
static void check_both(problem p)
{
    check(&p);
    if (p.direction == FORWARD) return;
    p.dweight = !p.dweight;
    check(&p);
}

static void lengths(int type, int direction, int)
{
    const int64_t v = 16 / test_type_bytes[type];
    const int64_t cols[] = {1,      2,          v - 1,   v,           v + 1,       2 * v + 1,
                            63 * v, 64 * v + 3, 256 * v, 256 * v + 1, 600 * v - 1, 2000 * v + 5};
    for (int i = 0; i < LENGTH_OF(cols) - (test.small ? 1 : 0); i++)
        for (int layout = APART; layout <= TURNS; layout++) {
            problem p = plain(type, direction, cols[i] > 300 * v ? 2 : 5, cols[i]);
            p.layout = layout, p.weight = (i + layout) % 2;
            check_both(p);
        }
}

static void row_counts(int type, int direction, int)
{
    const int64_t rows[] = {1, 2, 31, 33, 300}, cols[] = {1, 3, 24, 129};
    for (int i = 0; i < LENGTH_OF(rows) - (test.small ? 1 : 0); i++)
        for (int j = 0; j < LENGTH_OF(cols); j++) {
            problem p = plain(type, direction, rows[i], cols[j]);
            p.weight = j % 2, p.layout = (i + j) % 3;
            check_both(p);
        }
}

static void strides(int type, int direction, int)
{
    const int v = 16 / test_type_bytes[type];
    for (int t = 0; t <= MATRICES; t++) /* one tensor has gaps, at last all have */
        for (int k = 0; k < 6; k++) {
            problem p = plain(type, direction, 5, k % 2 ? 5 * v : 37);
            p.layout = k / 2, p.strides = t % 2;
            for (int i = 0; i < MATRICES; i++)
                if (i == t || t == MATRICES) p.gap[i] = t % 2 ? v : 2 * i + 1;
            check_both(p);
        }
}

static void misaligned(int type, int direction, int)
{
    const int v = 16 / test_type_bytes[type];
    for (int k = 0; k < 3; k++)
        for (int at = 0; at < v; at += test.small && at > 0 ? v - 2 : 1)
            for (int t = -1; t < MATRICES; t++) {
                problem p = plain(type, direction, 3, k == 2 ? 5 * v + 3 : 40 * v);
                p.layout = k;
                for (int i = 0; i < TENSORS; i++) p.at[i] = i == t ? (at + 1) % v : i < MATRICES ? at : at % 4;
                if (t >= 0 || p.layout != TURNS) check_both(p);
                if (p.layout == TURNS && t < 0) { /* gate and dgate at twice the address of the others */
                    p.at[GATE] = p.at[DGATE] = 2 * at % v;
                    check_both(p);
                }
            }
}

static void activations(int type, int direction, int)
{
    for (int activation = 0; activation < 5; activation++)
        for (int special = 0; special < SPECIALS; special++)
            for (int k = 0; k < 6; k++) {
                problem p = plain(type, direction, 4, k < 3 ? 70 : 9);
                p.activation = activation, p.special = special, p.layout = k % 3, p.weight = k > 3;
                if (special == LARGE && type == TEST_F16) p.spread = 1;
                if (special == NOTHING) p.spread = k == 5 ? 40 : k == 4 ? 12 : 4;
                if (k % 2) p.limit = 2.5f;
                if (k % 3 == 1) p.up_offset = 1;
                if (activation == LK_GLU_SILU && k > 1) p.alpha = 1.702f;
                check_both(p);
                p.alpha = activation == LK_GLU_SILU ? -0.5f : 0, p.seed++;
                check_both(p);
            }
}

/* The tails of Phi and of the sigmoids, and gradients around the extremes of the slopes: every 1/64 or 1/16 from -30 to 30. */
static void every_value(int type, int direction, int)
{
    const int64_t n = test.small ? 960 : 3840;
    for (int activation = 0; activation < 5; activation++) {
        problem p = plain(type, direction, 1, n);
        p.activation = activation;
        prepare(&p, 0);
        for (int64_t c = 0; c < n; c++)
            test_put(type, test_buffer_host(&buffer[GATE]), c, (float)((double)(c - n / 2) * 60.0 / (double)n));
        test_buffer_upload(&buffer[GATE]);
        if (!test_launched(launch(&p), describe(&p))) return;
        collect(&p), verify(&p);
    }
}

static void options(int type, int direction, int)
{
    for (int k = 0; k < 16; k++) {
        problem p = plain(type, direction, 7, k % 2 ? 100 : 33);
        p.layout = k % 3, p.weight = k & 1, p.limit = k & 2 ? 1.5f : 0, p.up_offset = k & 4 ? -0.75f : 0;
        p.no_dgate = direction == BACKWARD && k % 5 == 1, p.no_dup = direction == BACKWARD && k % 5 == 2 && p.layout != TURNS;
        if (p.layout == TURNS) p.no_dup = p.no_dgate;
        if (p.activation == LK_GLU_SILU) p.alpha = k & 8 ? 2.0f : 0;
        if (p.no_dgate && p.no_dup) p.dweight = true, check(&p); /* drow_weight alone */
        else check_both(p);
    }
}

static void in_place(int type, int direction, int)
{
    const int64_t v = 16 / test_type_bytes[type], cols[] = {1, v, 33, 70 * v + 1};
    for (int place = OVER; place <= (direction == FORWARD ? OTHER : LAST); place++)
        for (int layout = APART; layout <= TURNS; layout++)
            for (int i = 0; i < LENGTH_OF(cols); i++)
                for (int at = 0; at < 2; at++) {
                    if (layout == TURNS && (direction == FORWARD || place != OVER)) continue; /* y and dy are narrower */
                    problem p = plain(type, direction, 3, cols[i]);
                    p.layout = layout, p.in_place = place, p.at[GATE] = p.at[UP] = p.at[DY] = at;
                    for (int t = 0; t < MATRICES; t++) p.gap[t] = i % 2 ? 3 : 0;
                    check_both(p);
                }
}

static void empty(int type, int direction, int)
{
    const int64_t sizes[][2] = {{0, 5}, {0, 0}, {1, 0}, {33, 0}, {0, 11008}};
    for (int i = 0; i < LENGTH_OF(sizes); i++)
        for (int layout = APART; layout <= TURNS; layout++) {
            problem p = plain(type, direction, sizes[i][0], sizes[i][1]);
            p.layout = layout, p.weight = i % 2;
            check_both(p);
        }
    lk_glu_args none = {}; /* tensors without elements may be NULL */
    none.cols = 7;
    const lk_status status = call_of[direction][type](&none, test.stream);
    if (!test_that(status == LK_OK)) test_detail("0 rows and NULL tensors: %s", lk_last_error());
    none.rows = 3, none.cols = 0, none.gate_stride = 64;
    const lk_status no_cols = call_of[direction][type](&none, test.stream);
    if (!test_that(no_cols == LK_OK)) test_detail("0 cols and NULL tensors: %s", lk_last_error());
}

static void graphs(int type, int direction, int)
{
    for (int sum = 0; sum < 2; sum++) {
        problem p = plain(type, direction, 5, 1500);
        p.dweight = sum && direction == BACKWARD;
        check(&p);
        test_graph(op, &p);
    }
}

/* So many elements that a thread has several vectors. */
static void many_vectors(int type, int direction, int)
{
    if (!possible(0, DID_MANY)) return;
    for (int layout = APART; layout <= TURNS; layout++) {
        problem p = plain(type, direction, 3, (many() / 3 + 70) * (16 / test_type_bytes[type]) + 3);
        p.layout = layout, p.weight = layout == HALVES;
        check(&p);
        p.rows = 5, p.cols /= 2, p.at[UP] = layout == APART; /* tensors that do not lie alike */
        check(&p);
    }
}

static const test_theme themes[] = {{"empty", empty},
                                    {"lengths", lengths},
                                    {"many", many_vectors},
                                    {"rows", row_counts},
                                    {"strides", strides},
                                    {"off by elements", misaligned},
                                    {"activations", activations},
                                    {"every value", every_value},
                                    {"options", options},
                                    {"in place", in_place},
                                    {"graph", graphs}};

/* ---- Errors ------------------------------------------------------------------------------------------------------------- */

typedef test_bad_call<lk_glu_args> bad_call;

static void expect_error(int type, int direction, const bad_call *bad, int layout)
{
    problem p = plain(type, direction, 3, 40);
    p.layout = layout, p.activation = LK_GLU_GELU, p.weight = true, p.dweight = direction == BACKWARD;
    prepare(&p, 0);
    if (bad->spoil) bad->spoil(&args);
    const bool refused = test_refused(bad, direction);
    size_t asked = TEST_NOT_ASKED;
    const lk_status status = launch(&p), answer = query_of[direction][type](&args, &asked);
    test_expect(status, refused ? bad->want : LK_OK, bad->field, "lk_glu", direction_name[direction], type);
    test_expect_query(answer, refused ? bad->asked : LK_OK, asked, bad->field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = 0; t < TENSORS; t++) test_expect_unwritten(status, &buffer[t], tensor_name[t], bad->field);
}

static void errors(int type, int direction)
{
    static const bad_call list[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_NULL, LK_OK, "gate is NULL", SPOIL(a->gate = NULL)},
        {LK_ERR_NULL, LK_OK, "up is NULL", SPOIL(a->up = NULL)},
        {LK_ERR_NULL, LK_OK, "dy is NULL", SPOIL(a->dy = NULL), false, true},
        {LK_ERR_NULL, LK_OK, "every output", SPOIL(a->y = NULL; a->dgate = a->dup = NULL; a->drow_weight = NULL)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "rows", SPOIL(a->rows = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "cols", SPOIL(a->cols = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "cols", SPOIL(a->cols = INT64_MAX)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "gate_stride", SPOIL(a->gate_stride = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "up_stride", SPOIL(a->up_stride = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "y_stride", SPOIL(a->y_stride = 39), true, false},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dy_stride", SPOIL(a->dy_stride = -5), false, true},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dgate_stride", SPOIL(a->dgate_stride = 39), false, true},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dup_stride", SPOIL(a->dup_stride = 1), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->dup = a->dgate), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->y = (void *)a->row_weight), true, false},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->dgate = (void *)a->up), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "activation", SPOIL(a->activation = 5)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "activation", SPOIL(a->activation = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "alpha", SPOIL(a->alpha = 1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "alpha", SPOIL(a->activation = LK_GLU_SILU; a->alpha = INFINITY)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "limit", SPOIL(a->limit = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "limit", SPOIL(a->limit = NAN)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "up_offset", SPOIL(a->up_offset = NAN)},
        {LK_ERR_ALIGNMENT, LK_OK, "up", SPOIL(MOVED(a->up, 1))},
        {LK_ERR_ALIGNMENT, LK_OK, "row_weight", SPOIL(MOVED(a->row_weight, 2))}};
    static const bad_call turns[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_VALUE, LK_ERR_VALUE, "up is given", SPOIL(a->up = a->gate)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dup is given", SPOIL(a->dup = (void *)a->dy), false, true},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dgate_stride", SPOIL(a->dgate_stride = 79), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->y = (void *)a->gate), true, false}};
    for (int i = 0; i < LENGTH_OF(list); i++) expect_error(type, direction, &list[i], APART);
    for (int i = 0; i < LENGTH_OF(turns); i++) expect_error(type, direction, &turns[i], TURNS);
    if (!test_that(call_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL is taken");
    size_t asked = TEST_NOT_ASKED;
    if (!test_that(query_of[direction][type](&args, &asked) == LK_OK && asked == 0)) test_detail("a workspace is asked for");
}

/* ---- Random draws ------------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const r = &state;
    problem p = plain((int)test_below(r, 3), (int)test_below(r, 2), 0, 0);
    const int vec = 16 / test_type_bytes[p.type];
    p.seed = seed, p.activation = (int)test_below(r, 5), p.layout = (int)test_below(r, 3);
    p.cols = test_chance(r, 3) ? 1 + test_below(r, 1500) : 1 + test_below(r, 60),
    p.rows = 1 + test_below(r, p.cols > 300 ? 4 : 40);
    if (test_chance(r, 300)) p.rows = 3, p.cols = many() * vec / 3 + 1 + test_below(r, 1500);
    if (test_chance(r, 30)) p.rows = 0;
    if (test_chance(r, 30)) p.cols = 0;
    p.dweight = p.direction == BACKWARD && test_chance(r, 2), p.weight = test_chance(r, 2);
    p.in_place = test_chance(r, 2) ? NEW : (int)test_below(r, p.direction == FORWARD ? 3 : 4);
    if (p.layout == TURNS && p.in_place != NEW) p.in_place = p.direction == FORWARD ? NEW : OVER;
    const int gap = test_chance(r, 2) ? 0 : 1 + (int)test_below(r, 12), at = test_chance(r, 2) ? 0 : (int)test_below(r, vec);
    for (int t = 0; t < MATRICES; t++) {
        p.gap[t] = test_chance(r, 5) ? (int)test_below(r, 9) : gap, p.at[t] = test_chance(r, 5) ? (int)test_below(r, vec) : at;
        if (p.layout == TURNS && (t == GATE || t == DGATE) && test_chance(r, 2)) p.at[t] = 2 * at % vec, p.gap[t] = 2 * gap;
    }
    if (test_chance(r, 3))
        for (int t = 0; t < MATRICES; t++) p.at[t] = at, p.gap[t] = gap;
    p.strides = test_chance(r, 3), p.special = test_chance(r, 2) ? NOTHING : (int)test_below(r, SPECIALS);
    if (p.special == LARGE) p.spread = 1;
    if (test_chance(r, 3)) p.limit = (float)(0.5 + (double)test_below(r, 5));
    if (test_chance(r, 3)) p.up_offset = (float)test_uniform(r);
    if (p.activation == LK_GLU_SILU && test_chance(r, 2)) p.alpha = (float)(2 * test_uniform(r));
    if (p.direction == BACKWARD && test_chance(r, 6)) p.no_dgate = true, p.no_dup = p.layout == TURNS;
    else if (p.direction == BACKWARD && p.layout != TURNS && test_chance(r, 6)) p.no_dup = true;
    if (p.no_dgate && p.no_dup) p.dweight = true;
    return p;
}

static void fuzz(void)
{
    const long n = test_fuzz_begin(&counts, 300, 60);
    test_draws(draw, check, n);
    test_fuzz_end(&counts, possible, n);
}

/* ---- On the GPU only: beyond 2^31 elements, and a busy device ----------------------------------------------------------- */

#if !defined(LK_SIMT)

/* Forward, then backward in place; sampled elements are computed on the host. */
static void huge(int64_t rows, int64_t cols, bool halves)
{
    const int64_t n = rows * cols, width = halves ? 2 * cols : cols;
    lk_bf16 *const both = (lk_bf16 *)test_huge_allocate(2 * n * 2), *const up = halves ? both + cols : both + n;
    lk_bf16 *const y = (lk_bf16 *)test_huge_allocate(n * 2);
    test_huge_fill(both, 2 * n, 0);
    lk_glu_args a = {};
    a.gate = both, a.up = up, a.y = y, a.rows = rows, a.cols = cols;
    if (halves) a.gate_stride = a.up_stride = a.dgate_stride = a.dup_stride = width;
    if (!test_launched(lk_glu_forward_bf16(&a, test.stream), "huge")) return test_huge_free();
    uint64_t random = (uint64_t)n;
    for (int back = 0; back < 2; back++) {
        for (int s = 0; s < 200; s++) {
            const int64_t row = s == 0 ? rows - 1 : test_below(&random, rows),
                          col = s == 0 ? cols - 1 : test_below(&random, cols);
            const int64_t g = row * width + col, v = (up - both) + row * width + col;
            const value of = reference(LK_GLU_SILU, 1, (double)test_huge_value(g));
            const double second = (double)test_huge_value(v), dy = (double)test_huge_value(row * cols + col);
            if (!back) {
                const double want = of.act * second;
                test_near(TEST_BF16, test_huge_get(TEST_BF16, y, row * cols + col), want, 0x1p-20 * fabs(want));
                continue;
            }
            const double dgate = dy * second * of.slope, dup = dy * of.act;
            test_near(TEST_BF16, test_huge_get(TEST_BF16, both, g), dgate, fabs(dy * second) * 0x1p-19);
            test_near(TEST_BF16, test_huge_get(TEST_BF16, both, v), dup, 0x1p-20 * fabs(dup));
        }
        if (back) break;
        test_huge_fill(y, n, 0);
        a.dy = y, a.dgate = both, a.dup = up;
        if (!test_launched(lk_glu_backward_bf16(&a, test.stream), "huge")) break;
    }
    test_huge_free();
}

static void busy(int type, int direction, int)
{
    problem p = plain(type, direction, 700, 3001);
    p.dweight = direction == BACKWARD;
    check(&p);
    test_busy(op, &p);
}

static void all_huge(void)
{
    if (test_begin("huge: 70000 x 32768")) huge(70000, 32768, false), test_finish();
    if (test_begin("huge: 70000 x 32768, halves")) huge(70000, 32768, true), test_finish();
    if (test_begin("huge: 2^31 + 77 rows")) huge((1ll << 31) + 77, 1, false), test_finish();
    static const test_theme held = {"half of the SMs held", busy};
    for (int direction = FORWARD; direction <= BACKWARD; direction++)
        test_themes(&held, 1, direction, 0, direction_name[direction], "all");
}

#endif

/* ---------------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    test_start(argc, argv);
    test_of_directions("errors:", errors, direction_name, 2);
    for (int direction = FORWARD; direction <= BACKWARD; direction++)
        test_themes(themes, LENGTH_OF(themes), direction, 0, direction_name[direction], "all");
    TEST_HUGE(all_huge);
    test_all_ran(&counts, possible);
    fuzz();
    return test_end();
}
