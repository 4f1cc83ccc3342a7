// SPDX-License-Identifier: MIT
/* tests/rope.cu - lk/rope.cuh against its header's formula in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits. Bytes that are not outputs (zones
 * around every buffer, gaps, inputs) must not change.
 *
 * The bounds are those of lk/rope.md, with U = 2^-24. A cosine or sine from inv_freq is within 6.6e-7 scale; one from a table is
 * rounded with scale once. A rotation rounds three times. rstd has a sum of at most 256 squares over 32 lanes, a quotient and a
 * root: 12 U. dweight sums terms of a team one after another, then those of teams and blocks.
 */
#include "lk/rope.cuh"

#include "tests/test.h"

TEST_DEFINE(ROPE)

typedef lk_status (*call)(const lk_rope_args *, cudaStream_t);
typedef lk_status (*query)(const lk_rope_args *, size_t *);
static const call call_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_rope_forward), TEST_OF_TYPES(lk_rope_backward)};
static const query query_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_rope_forward_workspace_bytes),
                                              TEST_OF_TYPES(lk_rope_backward_workspace_bytes)};

enum { FORWARD, BACKWARD };
static const char *const direction_name[] = {"forward", "backward"};
/* PACKED: [batch, tokens, heads, dim]. TURNED: [batch, heads, tokens, dim]. QKV: q and k are parts of one tensor. GAPS: packed, with
 * elements between heads, tokens and batches. */
enum { PACKED, TURNED, QKV, GAPS, LAYOUTS };
static const char *const layout_name[] = {"packed", "turned", "qkv", "gaps"};
enum { ANGLES, TABLE_T, TABLE_F32, SOURCES };
static const char *const source_name[] = {"inv_freq", "tables of T", "tables of f32"};
enum { COUNTED, INT64, INT32, POSITIONS };
static const char *const position_name[] = {"", ", int64 positions", ", int32 positions"};
enum {
    Q, K, Q_OUT, K_OUT, DQ_OUT, DK_OUT, DQ, DK, MATRICES, POSITION = MATRICES, INV_FREQ, PAIR_AXIS, COS, SIN, Q_WEIGHT,
    K_WEIGHT, Q_RSTD, K_RSTD, DQ_WEIGHT, DK_WEIGHT, WORKSPACE, TENSORS
};
static const char *const tensor_name[] = {"q", "k", "q_out", "k_out", "dq_out", "dk_out", "dq", "dk", "position", "inv_freq",
                                          "pair_axis", "cos", "sin", "q_weight", "k_weight", "q_rstd", "k_rstd", "dq_weight",
                                          "dk_weight", "workspace"};
enum { NEW, OVER, OVER_X, PLACES }; /* results over q and k, or over the upstream gradients; OVER_X: dq and dk over q and k */

typedef struct {
    int type, direction, layout, source, positions, in_place, axes, step, at; /* at: elements past 256-byte alignment */
    int64_t batch, tokens, heads[2], dim, rotary, offset;
    int special; /* one feature of each head: 0 as the others, 1 +inf, 2 -inf, 3 NaN; 4: inv_freq[0] is +inf */
    bool interleaved, shared, norm[2], wide_weight, rstd, dweight, accumulate, skip[2]; /* skip: q's or k's result is NULL */
    float scale, eps, weight_offset;
    uint64_t seed;
} problem;

static problem plain(int type, int direction, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t dim)
{
    problem p = {};
    p.type = type, p.direction = direction, p.batch = 2, p.tokens = tokens, p.heads[0] = q_heads, p.heads[1] = k_heads,
    p.dim = dim;
    p.axes = 1, p.step = 1, p.eps = 1e-5f;
    p.seed = test_hash((uint64_t)(tokens * 1000003 + q_heads * 1009 + k_heads * 31 + dim));
    return p;
}

static int64_t rotary_of(const problem *p) { return p->rotary ? p->rotary : p->dim; }
static bool has_norm(const problem *p) { return p->norm[0] || p->norm[1]; }

static const char *describe(const problem *p)
{
    static char text[512];
    snprintf(text, sizeof text,
             "%s %s %lld x %lld tokens, %lld and %lld heads of %lld, rotary=%lld %s %s%s%s offset=%lld axes=%d step=%d%s "
             "scale=%g%s%s%s "
             "weight_offset=%g eps=%g%s%s%s%s%s special=%d in_place=%d at=%d seed=0x%llx",
             direction_name[p->direction], test_type_name[p->type], (long long)p->batch, (long long)p->tokens,
             (long long)p->heads[0], (long long)p->heads[1], (long long)p->dim, (long long)p->rotary, layout_name[p->layout],
             source_name[p->source], position_name[p->positions], p->interleaved ? ", interleaved" : "", (long long)p->offset,
             p->axes, p->step, p->shared ? " shared" : "", (double)p->scale, p->norm[0] ? " q norm" : "",
             p->norm[1] ? " k norm" : "", p->wide_weight ? " f32 weights" : "", (double)p->weight_offset, (double)p->eps,
             p->rstd ? " rstd" : "", p->dweight ? " dweight" : "", p->accumulate ? " accumulate" : "",
             p->skip[0] ? " no q result" : "", p->skip[1] ? " no k result" : "", p->special, p->in_place, p->at,
             (unsigned long long)p->seed);
    return text;
}

/* ---- Where tensors lie --------------------------------------------------------------------------------------------------- */

typedef struct {
    int buffer;
    int64_t first, stride[3]; /* of batch, token, head */
} place;

static place place_of(const problem *p, int t)
{
    const int side = t % 2;
    if ((t == Q_OUT || t == K_OUT) && p->in_place != NEW) return place_of(p, Q + side);
    if ((t == DQ || t == DK) && p->in_place == OVER) return place_of(p, DQ_OUT + side);
    if ((t == DQ || t == DK) && p->in_place == OVER_X) return place_of(p, Q + side);
    const int64_t h = p->heads[side], d = p->dim, n = p->tokens;
    if (p->layout == TURNED) return {t, 0, {h * n * d, d, n * d}};
    if (p->layout == GAPS) return {t, 0, {(h * (d + 8) + 3) * n + 16, h * (d + 8) + 3, d + 8}};
    if (p->layout == QKV) {
        const int64_t row = (p->heads[0] + 2 * p->heads[1]) * d;
        return {t - side, side ? p->heads[0] * d : 0, {n * row, row, d}};
    }
    return {t, 0, {n * h * d, h * d, d}};
}

static int64_t elements_of(const problem *p, int b) /* of a buffer */
{
    const int64_t all = p->batch * p->tokens, half = rotary_of(p) / 2, rows = p->shared ? p->tokens : all;
    const int64_t table = half ? (half - 1) * p->step + 1 : 0;
    if (b < MATRICES) {
        if (p->layout == QKV) return b % 2 ? 0 : all * (p->heads[0] + 2 * p->heads[1]) * p->dim;
        const place at = place_of(p, b);
        return at.buffer == b && all ? p->batch * at.stride[0] : 0;
    }
    switch (b) {
    case POSITION: return p->axes * rows;
    case INV_FREQ: case PAIR_AXIS: return half;
    case COS: case SIN: return rows ? (rows - 1) * half * p->step + table : 0;
    case Q_RSTD: case K_RSTD: return all * p->heads[b - Q_RSTD];
    case WORKSPACE: return 0;
    }
    return p->dim;
}

static bool has(const problem *p, int t)
{
    const bool back = p->direction == BACKWARD;
    const int side = t < MATRICES ? t % 2 : t >= Q_WEIGHT && t < WORKSPACE ? (t - Q_WEIGHT) % 2 : 0;
    if (t < MATRICES && !p->heads[side]) return false;
    switch (t) {
    case Q: case K: return !back || p->norm[side];
    case Q_OUT: case K_OUT: return !back && !p->skip[side];
    case DQ_OUT: case DK_OUT: return back;
    case DQ: case DK: return back && !p->skip[side];
    case POSITION: return p->source == ANGLES && p->positions != COUNTED;
    case INV_FREQ: return p->source == ANGLES;
    case PAIR_AXIS: return p->source == ANGLES && p->axes > 1;
    case COS: case SIN: return p->source != ANGLES;
    case Q_WEIGHT: case K_WEIGHT: return p->norm[side];
    case Q_RSTD: case K_RSTD: return p->norm[side] && p->rstd && (back || !p->skip[side]);
    case DQ_WEIGHT: case DK_WEIGHT: return back && p->norm[side] && p->dweight;
    }
    return back && p->dweight && has_norm(p);
}

static int type_of(const problem *p, int t)
{
    if (t < MATRICES) return p->type;
    if (t == COS || t == SIN) return p->source == TABLE_F32 ? (int)TEST_F32 : p->type;
    if (t == Q_WEIGHT || t == K_WEIGHT || t == DQ_WEIGHT || t == DK_WEIGHT) return p->wide_weight ? (int)TEST_F32 : p->type;
    return TEST_F32;
}
static int bytes_of(const problem *p, int t)
{
    return t == POSITION ? (p->positions == INT32 ? 4 : 8) : test_type_bytes[type_of(p, t)];
}

/* ---- Counts -------------------------------------------------------------------------------------------------------------- */

enum {
    DID_TYPE, DID_LAYOUT = DID_TYPE + TEST_TYPES, DID_SOURCE = DID_LAYOUT + LAYOUTS, DID_POSITIONS = DID_SOURCE + SOURCES,
    DID_PLACE = DID_POSITIONS + POSITIONS, DID_INTERLEAVED = DID_PLACE + 2, DID_AXES, DID_SHARED, DID_STEP, DID_SCALE,
    DID_PARTIAL, DID_ODD, DID_LONG, DID_OFF, DID_OFFSET, DID_SKIP, DID_WIDE, DID_RSTD, DID_WEIGHT_OFFSET, DID_ONE_NORM, DID_NO_K,
    DID_NO_TOKENS, DIDS
};
static const char *const did_name[] = {
    "f32", "f16", "bf16", "packed", "turned", "qkv", "gaps", "inv_freq", "tables of T", "tables of f32", "counted", "int64",
    "int32", "new results", "in place", "interleaved", "axes", "shared", "table_step 2", "scale", "rotary < dim", "odd dim",
    "dim > 256", "off", "offset", "a result NULL", "f32 weights", "rstd", "weight_offset", "one norm", "no k", "no tokens"};
static const char *const path_names[] = {"forward", "backward", "norm fwd", "norm bwd", "dweight"};
static test_counts counts = {path_names, did_name, 5, DIDS, {}, {}};

static bool possible(int path, int did)
{
    if (did == DID_LONG) return path < 2;
    if (did == DID_WIDE || did == DID_RSTD || did == DID_WEIGHT_OFFSET || did == DID_ONE_NORM) return path >= 2;
    return true;
}

static void count(const problem *p)
{
    const bool back = p->direction == BACKWARD;
    const int path = !has_norm(p) ? back : !back ? 2 : p->dweight ? 4 : 3;
    bool did[DIDS] = {};
    did[DID_TYPE + p->type] = did[DID_LAYOUT + p->layout] = did[DID_SOURCE + p->source] =
        did[DID_PLACE + (p->in_place != NEW)] = true;
    if (p->source == ANGLES) did[DID_POSITIONS + p->positions] = true;
    did[DID_INTERLEAVED] = p->interleaved, did[DID_AXES] = p->axes > 1 && p->source == ANGLES, did[DID_SHARED] = p->shared;
    did[DID_STEP] = p->step == 2 && p->source != ANGLES, did[DID_SCALE] = p->scale != 0,
    did[DID_PARTIAL] = rotary_of(p) < p->dim;
    did[DID_ODD] = p->dim % 2, did[DID_LONG] = p->dim > 256, did[DID_OFF] = p->at % 8, did[DID_OFFSET] = p->offset != 0;
    did[DID_SKIP] = p->skip[0] || p->skip[1], did[DID_WIDE] = p->wide_weight, did[DID_RSTD] = p->rstd;
    did[DID_WEIGHT_OFFSET] = p->weight_offset != 0, did[DID_ONE_NORM] = p->norm[0] != p->norm[1], did[DID_NO_K] = !p->heads[1];
    did[DID_NO_TOKENS] = !p->batch || !p->tokens;
    counts.runs[path]++;
    for (int i = 0; i < DIDS; i++) counts.of[path][i] += did[i];
}

/* ---- One checked call ------------------------------------------------------------------------------------------------------ */

static lk_rope_args args; /* of the last checked call */
static test_buffer buffer[TENSORS];
static unsigned char *kept[TENSORS];
static size_t kept_bytes[TENSORS];

static double random_of(const problem *p, int t, int64_t i)
{
    uint64_t state = test_hash(p->seed + (uint64_t)t * 7919 + (uint64_t)i * 31);
    return test_uniform(&state);
}
static int64_t position_of(const problem *p, int64_t batch, int64_t token, int axis)
{
    if (p->positions == COUNTED) return p->offset + token;
    const int64_t row = p->shared ? token : batch * p->tokens + token;
    return row % 5 == 4 ? (int64_t)(1e9 * random_of(p, POSITION, row * 8 + axis)) : row * 3 % 100 + 11 * axis;
}
static int axis_of(const problem *p, int64_t pair)
{
    return (int)(p->interleaved ? pair % p->axes : pair * p->axes / (rotary_of(p) / 2));
}

static bool prepare(const problem *p, int run)
{
    static const float special[] = {0, INFINITY, -INFINITY, NAN};
    const int64_t half = rotary_of(p) / 2, rows = p->shared ? p->tokens : p->batch * p->tokens;
    args = {};
    args.batch = p->batch, args.tokens = p->tokens, args.q_heads = p->heads[0], args.k_heads = p->heads[1], args.dim = p->dim;
    args.rotary = p->rotary, args.offset = p->offset, args.table_step = p->step == 1 ? 0 : p->step,
    args.shared_positions = p->shared;
    args.axes = p->axes == 1 ? 0 : p->axes, args.interleaved = p->interleaved, args.position_dtype = p->positions == INT32;
    args.table_dtype = p->source == TABLE_F32 ? LK_DTYPE_F32 : 0, args.weight_dtype = p->wide_weight ? LK_DTYPE_F32 : 0;
    args.accumulate = p->accumulate, args.scale = p->scale, args.eps = p->eps, args.weight_offset = p->weight_offset;
    for (int b = 0; b < WORKSPACE; b++) {
        const size_t bytes = (size_t)bytes_of(p, b);
        const bool out = b == Q_OUT || b == K_OUT || (b >= DQ && b < MATRICES) || b >= Q_RSTD;
        test_buffer_size(&buffer[b], (size_t)elements_of(p, b) * bytes, (size_t)p->at * bytes, run ? 0x7f : out ? 0x5a : 0xff);
    }
    for (int t = 0; t < MATRICES; t++) {
        if (!has(p, t) || t == Q_OUT || t == K_OUT || t >= DQ) continue;
        const place at = place_of(p, t);
        int64_t number = 0;
        for (int64_t b = 0; b < p->batch; b++)
            for (int64_t n = 0; n < p->tokens; n++)
                for (int64_t h = 0; h < p->heads[t % 2]; h++)
                    for (int64_t f = 0; f < p->dim; f++)
                        test_put(p->type, test_buffer_host(&buffer[at.buffer]),
                                 at.first + b * at.stride[0] + n * at.stride[1] + h * at.stride[2] + f,
                                 p->special % 4 && f == (n + h) % p->dim ? special[p->special]
                                                                   : (float)(2 * random_of(p, t, number++)));
    }
    void *host[TENSORS];
    for (int b = 0; b < WORKSPACE; b++) host[b] = test_buffer_host(&buffer[b]);
    for (int axis = 0; has(p, POSITION) && axis < p->axes; axis++)
        for (int64_t r = 0; r < rows; r++) {
            const int64_t position = position_of(p, p->shared ? 0 : r / p->tokens, p->shared ? r : r % p->tokens, axis);
            if (p->positions == INT32) ((int32_t *)host[POSITION])[axis * rows + r] = (int32_t)position;
            else ((int64_t *)host[POSITION])[axis * rows + r] = position;
        }
    for (int64_t j = 0; j < half; j++) {
        const float theta = p->special == 4 && j == 0 ? INFINITY : (float)pow(10000.0, -(double)j / (double)half);
        if (has(p, INV_FREQ)) ((float *)host[INV_FREQ])[j] = theta;
        if (has(p, PAIR_AXIS)) ((int32_t *)host[PAIR_AXIS])[j] = axis_of(p, j);
        for (int64_t r = 0; has(p, COS) && r < rows; r++) {
            const double phi = 3 * random_of(p, COS, r * half + j);
            test_put(type_of(p, COS), host[COS], (r * half + j) * p->step, (float)cos(phi));
            test_put(type_of(p, SIN), host[SIN], (r * half + j) * p->step, (float)sin(phi));
        }
    }
    for (int side = 0; side < 2; side++) {
        for (int64_t f = 0; has(p, Q_WEIGHT + side) && f < p->dim; f++) {
            test_put(type_of(p, Q_WEIGHT), host[Q_WEIGHT + side], f, (float)(1 + random_of(p, Q_WEIGHT + side, f)));
            if (p->accumulate && has(p, DQ_WEIGHT + side))
                test_put(type_of(p, Q_WEIGHT), host[DQ_WEIGHT + side], f, (float)(f % 7) - 2);
        }
        for (int64_t r = 0; p->direction == BACKWARD && has(p, Q_RSTD + side) && r < elements_of(p, Q_RSTD + side); r++) {
            const place at = place_of(p, Q + side);
            const int64_t h = r % p->heads[side], n = r / p->heads[side] % p->tokens, b = r / p->heads[side] / p->tokens;
            double sum = 0;
            for (int64_t f = 0; f < p->dim; f++) {
                const double z = (double)test_get(p->type, host[at.buffer], at.first + b * at.stride[0] + n * at.stride[1] +
                                                                                h * at.stride[2] + f);
                sum += z * z;
            }
            ((float *)host[Q_RSTD + side])[r] = (float)(1 / sqrt(sum / (double)p->dim + (double)p->eps));
        }
    }
    for (int b = 0; b < WORKSPACE; b++) test_buffer_upload(&buffer[b]);

    void *at[TENSORS] = {};
    int64_t stride[MATRICES][3] = {};
    for (int t = 0; t < WORKSPACE; t++) {
        if (!has(p, t)) continue;
        const place here = t < MATRICES ? place_of(p, t) : place{t, 0, {}};
        at[t] = (char *)test_buffer_device(&buffer[here.buffer]) + here.first * bytes_of(p, t);
        for (int d = 0; t < MATRICES && d < 3; d++) stride[t][d] = p->layout == PACKED && p->seed % 2 ? 0 : here.stride[d];
    }
    int64_t *const strides[] = {args.q_stride,      args.k_stride,      args.q_out_stride, args.k_out_stride,
                                args.dq_out_stride, args.dk_out_stride, args.dq_stride,    args.dk_stride};
    for (int t = 0; t < MATRICES; t++) memcpy(strides[t], stride[t], sizeof stride[t]);
    args.q = at[Q], args.k = at[K], args.q_out = at[Q_OUT], args.k_out = at[K_OUT], args.dq_out = at[DQ_OUT],
    args.dk_out = at[DK_OUT];
    args.dq = at[DQ], args.dk = at[DK], args.position = at[POSITION], args.inv_freq = (float *)at[INV_FREQ];
    args.pair_axis = (int32_t *)at[PAIR_AXIS], args.cos = at[COS], args.sin = at[SIN];
    if (has(p, COS) && p->step == 2) args.table_stride[1] = half * p->step;
    args.q_weight = at[Q_WEIGHT], args.k_weight = at[K_WEIGHT], args.q_rstd = (float *)at[Q_RSTD],
    args.k_rstd = (float *)at[K_RSTD];
    args.dq_weight = at[DQ_WEIGHT], args.dk_weight = at[DK_WEIGHT];
    size_t bytes = 0;
    const lk_status asked = query_of[p->direction][p->type](&args, &bytes);
    const bool sums = (has(p, DQ_WEIGHT) && p->heads[0]) || (has(p, DK_WEIGHT) && p->heads[1]);
    const bool good = test_that(asked == LK_OK && (bytes > 0) == (sums && p->batch && p->tokens));
    if (!good)
        test_detail("the query says %s, %zu bytes, %s; %s", lk_status_string(asked), bytes, lk_last_error(), describe(p));
    test_buffer_size(&buffer[WORKSPACE], bytes, 0, run ? 0x7f : 0xff);
    test_buffer_upload(&buffer[WORKSPACE]);
    args.workspace = bytes ? test_buffer_device(&buffer[WORKSPACE]) : NULL, args.workspace_bytes = bytes;
    return good;
}

static lk_status launch(const problem *p) { return call_of[p->direction][p->type](&args, test.stream); }
static void collect(const problem *)
{
    for (int b = 0; b < TENSORS; b++) test_buffer_download(&buffer[b]);
}

/* cos, sin and what each may be off by, of a pair. */
typedef struct {
    double cos, sin, error;
} angle;
static angle angle_of(const problem *p, int64_t batch, int64_t token, int64_t pair)
{
    const double scale = p->scale == 0 ? 1 : (double)p->scale;
    const int64_t half = rotary_of(p) / 2;
    if (p->source == ANGLES) {
        const double theta = (double)((const float *)test_buffer_host(&buffer[INV_FREQ]))[pair];
        const double phi = (double)position_of(p, batch, token, p->axes > 1 ? axis_of(p, pair) : 0) * theta;
        return {scale * cos(phi), scale * sin(phi), fabs(scale) * 7.5e-7};
    }
    const int64_t at = ((p->shared ? token : batch * p->tokens + token) * half + pair) * p->step;
    return {scale * (double)test_get(type_of(p, COS), test_buffer_host(&buffer[COS]), at),
            scale * (double)test_get(type_of(p, SIN), test_buffer_host(&buffer[SIN]), at), fabs(scale) * 0x1p-24};
}

/* The rotation of a head in double, forward or the other way, and what it may be off by; x may be off by `error` itself. */
static void rotate(const problem *p, int64_t batch, int64_t token, const double *x, const double *error, double *y, double *off)
{
    const int64_t half = rotary_of(p) / 2;
    for (int64_t f = 0; f < p->dim; f++) y[f] = x[f], off[f] = error[f];
    for (int64_t j = 0; j < half; j++) {
        const int64_t a = p->interleaved ? 2 * j : j, b = p->interleaved ? 2 * j + 1 : half + j;
        angle of = angle_of(p, batch, token, j);
        if (p->direction == BACKWARD) of.sin = -of.sin;
        y[a] = x[a] * of.cos - x[b] * of.sin, y[b] = x[b] * of.cos + x[a] * of.sin;
        const double c = fabs(of.cos), s = fabs(of.sin), u = 3 * 0x1p-24;
        off[a] = (of.error + u * c) * fabs(x[a]) + (of.error + u * s) * fabs(x[b]) + c * error[a] + s * error[b];
        off[b] = (of.error + u * c) * fabs(x[b]) + (of.error + u * s) * fabs(x[a]) + c * error[b] + s * error[a];
    }
}

enum { MOST = 1030 };

static void verify(const problem *p)
{
    static double x[MOST], error[MOST], y[MOST], off[MOST], w[MOST], dw[2][MOST], dw_off[2][MOST], dw_size[2][MOST];
    const double u = 0x1p-24, dim = (double)p->dim;
    const bool back = p->direction == BACKWARD;
    memset(dw, 0, sizeof dw), memset(dw_off, 0, sizeof dw_off), memset(dw_size, 0, sizeof dw_size);
    for (int side = 0; side < 2; side++) {
        for (int64_t f = 0; f < p->dim; f++)
            w[f] = p->norm[side] ? (double)p->weight_offset +
                                       (double)test_get(type_of(p, Q_WEIGHT), test_buffer_host(&buffer[Q_WEIGHT + side]), f)
                                 : 1;
        for (int64_t r = 0; r < p->batch * p->tokens * p->heads[side]; r++) {
            const int64_t h = r % p->heads[side], n = r / p->heads[side] % p->tokens, b = r / p->heads[side] / p->tokens;
            const int in_tensor = (back ? DQ_OUT : Q) + side, out_tensor = (back ? DQ : Q_OUT) + side;
            const place in = place_of(p, in_tensor), z_at = place_of(p, Q + side), out = place_of(p, out_tensor);
            const int64_t first = in.first + b * in.stride[0] + n * in.stride[1] + h * in.stride[2];
            const int64_t z_first = z_at.first + b * z_at.stride[0] + n * z_at.stride[1] + h * z_at.stride[2];
            const int64_t to = out.first + b * out.stride[0] + n * out.stride[1] + h * out.stride[2];
            const void *const z_host = test_buffer_host(&buffer[z_at.buffer]);
            double square = 0, rstd = 1, dot = 0, dot_off = 0;
            for (int64_t f = 0; p->norm[side] && f < p->dim; f++) {
                const double z = (double)test_get(p->type, z_host, z_first + f);
                square += z * z;
            }
            if (p->norm[side]) rstd = 1 / sqrt(square / dim + (double)p->eps);
            for (int64_t f = 0; f < p->dim; f++) {
                x[f] = (double)test_get(p->type, test_buffer_host(&buffer[in.buffer]), first + f), error[f] = 0;
                if (!back && p->norm[side]) x[f] *= rstd * w[f], error[f] = 15 * u * fabs(x[f]);
            }
            rotate(p, b, n, x, error, y, off);
            for (int64_t f = 0; back && p->norm[side] && f < p->dim; f++) {
                const double z = (double)test_get(p->type, z_host, z_first + f);
                dot += y[f] * w[f] * z, dot_off += fabs(w[f] * z) * (off[f] + 20 * u * fabs(y[f]));
                dw[side][f] += y[f] * z * rstd, dw_size[side][f] += fabs(y[f] * z * rstd);
                dw_off[side][f] += fabs(z * rstd) * (off[f] + 15 * u * fabs(y[f]));
            }
            for (int64_t f = 0; f < p->dim; f++) {
                if (back && p->norm[side]) {
                    const double z = (double)test_get(p->type, z_host, z_first + f), g = y[f] * w[f],
                                 pull = z * rstd * rstd * dot / dim;
                    off[f] = rstd * (fabs(w[f]) * off[f] + 20 * u * fabs(g) + 40 * u * fabs(pull) +
                                     fabs(z) * rstd * rstd * dot_off / dim);
                    y[f] = rstd * (g - pull);
                }
                if (!has(p, out_tensor)) continue;
                const float got = test_get(p->type, test_buffer_back(&buffer[out.buffer]), to + f);
                if (!test_near(p->type, got, y[f], isfinite(y[f]) ? off[f] : 0))
                    test_detail("%s of batch %lld, token %lld, head %lld, feature %lld is %.9g, want %.9g +- %.3g; %s",
                                tensor_name[out_tensor], (long long)b, (long long)n, (long long)h, (long long)f, (double)got,
                                y[f], off[f], describe(p));
            }
            if (!back && has(p, Q_RSTD + side)) {
                const float got = ((const float *)test_buffer_back(&buffer[Q_RSTD + side]))[r];
                if (!test_near(TEST_F32, got, rstd, 12 * u * rstd))
                    test_detail("rstd %lld is %.9g, want %.9g; %s", (long long)r, (double)got, rstd, describe(p));
            }
        }
        for (int64_t f = 0; has(p, DQ_WEIGHT + side) && f < p->dim; f++) {
            const double rows = (double)(p->batch * p->tokens * p->heads[side]);
            const double want = dw[side][f] + (p->accumulate ? (double)(f % 7) - 2 : 0);
            const float got = test_get(type_of(p, DQ_WEIGHT), test_buffer_back(&buffer[DQ_WEIGHT + side]), f);
            const double slack = dw_off[side][f] + (40 + rows / 8) * u * dw_size[side][f] + u * fabs(want);
            if (!test_near(type_of(p, DQ_WEIGHT), got, want, slack))
                test_detail("%s[%lld] is %.9g, want %.9g +- %.3g; %s", tensor_name[DQ_WEIGHT + side], (long long)f, (double)got,
                            want, slack, describe(p));
        }
    }
}

static void settle(const problem *p, bool keep, const char *what)
{
    const bool back = p->direction == BACKWARD;
    for (int t = 0; t < WORKSPACE; t++) {
        const bool out = t == Q_OUT || t == K_OUT || t == DQ || t == DK || t >= (back ? DQ_WEIGHT : Q_RSTD);
        if (!out || !has(p, t)) continue;
        const place at = t < MATRICES ? place_of(p, t) : place{t, 0, {}};
        const test_buffer *const b = &buffer[at.buffer];
        const int bytes = bytes_of(p, t);
        const unsigned char *const now = (const unsigned char *)test_buffer_back(b);
        if (keep) kept[t] = (unsigned char *)test_room(kept[t], &kept_bytes[t], b->bytes + 1), memcpy(kept[t], now, b->bytes);
        const int64_t rows = t < MATRICES ? p->batch * p->tokens * p->heads[t % 2] : 1,
                      width = t < MATRICES ? p->dim : elements_of(p, t);
        for (int64_t r = 0; r < rows; r++) {
            int64_t first = 0;
            if (t < MATRICES) {
                const int64_t h = r % p->heads[t % 2], n = r / p->heads[t % 2] % p->tokens,
                              batch = r / p->heads[t % 2] / p->tokens;
                first = at.first + batch * at.stride[0] + n * at.stride[1] + h * at.stride[2];
            }
            if (!keep && !test_that(!memcmp(kept[t] + first * bytes, now + first * bytes, (size_t)(width * bytes))))
                test_detail("%s gives other bits for row %lld of %s; %s", what, (long long)r, tensor_name[t], describe(p));
            for (int64_t f = 0; f < width; f++) test_buffer_accept(b, first + f, bytes);
        }
    }
    test_buffer_accept_all(&buffer[WORKSPACE]);
    for (int b = 0; b < TENSORS; b++) test_buffer_untouched(&buffer[b], tensor_name[b], describe(p));
}

static const test_op<problem> op = {describe, prepare, launch, collect, verify, settle, count};
static void check(const problem *p) { test_twice(op, p); }

/* Without a norm, with one, and in backward with the gradient of its weight. */
static void check_norms(problem p)
{
    check(&p);
    if (p.dim > 256) return;
    p.norm[0] = p.norm[1] = true, p.rstd = p.seed % 2;
    check(&p);
    p.dweight = true, p.rstd = !p.rstd, p.wide_weight = p.seed % 3 == 0;
    check(&p);
    p.norm[p.seed % 2] = false, p.weight_offset = 1;
    check(&p);
}

/* ---- Cases ------------------------------------------------------------------------------------------------------------------ */

static void shapes(int type, int direction, int)
{
    static const int64_t dims[][2] = {{128, 0}, {64, 0}, {80, 32}, {96, 0},  {256, 64},   {2, 0},
                                      {7, 4},   {66, 0}, {128, 2}, {512, 0}, {1024, 128}, {70, 68}};
    static const int64_t heads[][2] = {{1, 0}, {4, 1}, {5, 2}, {8, 8}};
    for (int i = 0; i < LENGTH_OF(dims); i++)
        for (int j = 0; j < LENGTH_OF(heads); j += test.small ? 2 : 1)
            for (int interleaved = 0; interleaved < 2; interleaved++) {
                problem p = plain(type, direction, dims[i][0] > 300 ? 2 : 5, heads[j][0], heads[j][1], dims[i][0]);
                p.rotary = dims[i][1], p.interleaved = interleaved, p.seed += (uint64_t)(interleaved + j);
                check_norms(p);
            }
    problem p = plain(type, direction, 3, 2, 1, 9); /* an odd number of features, of which 4 are in pairs */
    p.rotary = 4;
    check_norms(p);
    p.dim = 33, p.rotary = 2;
    check_norms(p);
}

static void token_counts(int type, int direction, int)
{
    static const int64_t tokens[] = {1, 2, 33, 130, 300};
    for (int i = 0; i < LENGTH_OF(tokens) - (test.small ? 1 : 0); i++)
        for (int64_t batch = 1; batch <= 3; batch += 2) {
            problem p = plain(type, direction, tokens[i], 3, 1, 32);
            p.batch = batch;
            check_norms(p);
        }
}

static void layouts(int type, int direction, int)
{
    for (int layout = 0; layout < LAYOUTS; layout++)
        for (int place = NEW; place < PLACES; place++)
            for (int k = 0; k < 4; k++) {
                problem p = plain(type, direction, 4, 4, 2, k % 2 ? 32 : 20);
                p.layout = layout, p.in_place = place, p.interleaved = k / 2, p.seed += (uint64_t)k;
                if (place != OVER_X) check_norms(p);
                else if (direction == BACKWARD) { /* q and k are read with a norm alone */
                    p.norm[0] = p.norm[1] = true, p.dweight = k % 2;
                    check(&p);
                }
            }
}

static void misaligned(int type, int direction, int)
{
    for (int at = 1; at < 16 / test_type_bytes[type]; at += test.small ? 3 : 1)
        for (int k = 0; k < 2; k++) {
            problem p = plain(type, direction, 3, 3, 1, k ? 128 : 48);
            p.at = at, p.interleaved = k, p.source = at % SOURCES;
            check_norms(p);
        }
}

static void positions(int type, int direction, int)
{
    for (int source = 0; source < SOURCES; source++)
        for (int k = 0; k < 12; k++) {
            problem p = plain(type, direction, 6, 2, 1, 64);
            p.source = source, p.interleaved = k % 2, p.shared = k / 2 % 2, p.seed += (uint64_t)k;
            if (source == ANGLES) p.positions = k % POSITIONS, p.axes = k % POSITIONS && k > 5 ? 3 : 1;
            else p.step = 1 + k / 4 % 2;
            if (p.positions == COUNTED) p.offset = source == ANGLES && k > 2 ? (k > 8 ? 2147483000 : -5) : 0;
            if (k % 4 == 3) p.scale = 1.2079f;
            if (k == 7) p.rotary = 24, p.dim = 40;
            check_norms(p);
        }
}

static void options(int type, int direction, int)
{
    for (int k = 0; k < 12; k++) {
        problem p = plain(type, direction, 5, 3, 2, k % 2 ? 64 : 30);
        p.skip[k % 2] = k < 6, p.eps = k % 3 ? 1e-6f : 0.5f, p.norm[0] = p.norm[1] = k > 2, p.dweight = k > 4,
                   p.accumulate = k % 4 == 1;
        p.weight_offset = k % 2, p.wide_weight = k % 4 == 3, p.rstd = k % 3 == 1;
        if (k % 4 == 3) p.norm[1] = false;
        if (k == 4) p.heads[1] = 0, p.skip[0] = false, p.skip[1] = true;
        check(&p);
    }
}

/* An infinity or NaN in one feature of each head. Without a norm it reaches its pair alone. With one, rstd is 0 or NaN; of an
 * infinity the other pairs are 0. Tables, so that no sine is 0. */
static void specials(int type, int direction, int)
{
    for (int special = 1; special <= 4; special++)
        for (int k = 0; k < 8; k++) {
            problem p = plain(type, direction, 5, 3, 1, k % 2 ? 64 : 26);
            p.special = special, p.interleaved = k / 2 % 2, p.source = special == 4 ? ANGLES : TABLE_F32, p.rotary = k > 5 ? 16 : 0;
            check(&p);
            p.norm[0] = p.norm[1] = true, p.rstd = k % 2, p.dweight = k > 3;
            check(&p);
        }
}

static void empty(int type, int direction, int)
{
    static const int64_t sizes[][4] = {{0, 5, 2, 1}, {2, 0, 2, 1}, {2, 3, 0, 0}, {2, 3, 0, 2}, {1, 3, 2, 0}};
    for (int i = 0; i < LENGTH_OF(sizes); i++) {
        problem p = plain(type, direction, sizes[i][1], sizes[i][2], sizes[i][3], 16);
        p.batch = sizes[i][0];
        check(&p);
        p.norm[0] = p.norm[1] = true;
        check(&p);
        if (p.heads[0] && p.heads[1]) p.dweight = true; /* zeros, where there are no tokens */
        check(&p);
    }
}

static void graphs(int type, int direction, int)
{
    problem p = plain(type, direction, 40, 4, 2, 64);
    check(&p), test_graph(op, &p);
    p.norm[0] = p.norm[1] = p.dweight = true;
    check(&p), test_graph(op, &p);
}

static const test_theme themes[] = {{"empty", empty},
                                    {"shapes", shapes},
                                    {"tokens", token_counts},
                                    {"layouts", layouts},
                                    {"off by elements", misaligned},
                                    {"positions", positions},
                                    {"options", options},
                                    {"special values", specials},
                                    {"graph", graphs}};

/* ---- Errors ------------------------------------------------------------------------------------------------------------------ */

typedef test_bad_call<lk_rope_args> bad_call;

static void expect_error(int type, int direction, const bad_call *bad, bool tables)
{
    problem p = plain(type, direction, 3, 2, 2, 16);
    p.layout = GAPS, p.norm[0] = p.norm[1] = p.rstd = true, p.dweight = direction == BACKWARD,
    p.source = tables ? TABLE_F32 : ANGLES;
    p.positions = tables ? COUNTED : INT64;
    prepare(&p, 0);
    if (bad->spoil) bad->spoil(&args);
    const bool refused = test_refused(bad, direction);
    size_t asked = TEST_NOT_ASKED;
    const lk_status status = launch(&p), answer = query_of[direction][type](&args, &asked);
    test_expect(status, refused ? bad->want : LK_OK, bad->field, "lk_rope", direction_name[direction], type);
    test_expect_query(answer, refused ? bad->asked : LK_OK, asked, bad->field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = 0; t < TENSORS; t++) test_expect_unwritten(status, &buffer[t], tensor_name[t], bad->field);
}

static void errors(int type, int direction)
{
    static const bad_call list[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_NULL, LK_OK, "q is NULL", SPOIL(a->q = NULL)},
        {LK_ERR_NULL, LK_OK, "k is NULL", SPOIL(a->k = NULL)},
        {LK_ERR_NULL, LK_OK, "dq_out is NULL", SPOIL(a->dq_out = NULL), false, true},
        {LK_ERR_NULL, LK_OK, "dk_out is NULL", SPOIL(a->dk_out = NULL), false, true},
        {LK_ERR_NULL, LK_OK, "pair_axis is NULL", SPOIL(a->axes = 1; a->axes = 3)},
        {LK_ERR_NULL, LK_OK, "every output", SPOIL(a->q_out = a->k_out = NULL; a->q_rstd = a->k_rstd = NULL), true, false},
        {LK_ERR_NULL, LK_OK, "q_out is NULL, and q_rstd is given", SPOIL(a->q_out = NULL), true, false},
        {LK_ERR_NULL, LK_OK, "k_out is NULL, and k_rstd is given", SPOIL(a->k_out = NULL), true, false},
        {LK_ERR_NULL, LK_OK, "q_out is NULL, and q_rstd is given", SPOIL(a->q_out = a->k_out = NULL), true, false},
        {LK_OK, LK_OK, "neither q_out nor q_rstd", SPOIL(a->q_out = NULL; a->q_rstd = NULL)},
        {LK_OK, LK_OK, "neither k_out nor k_rstd", SPOIL(a->k_out = NULL; a->k_rstd = NULL)},
        {LK_OK, LK_OK, "k_rstd without a norm", SPOIL(a->k_out = NULL; a->k_weight = NULL; a->dk_weight = NULL)},
        {LK_OK, LK_OK, "k_rstd of no heads", SPOIL(a->k_out = NULL; a->k_heads = 0; a->dk_weight = NULL)},
        {LK_OK, LK_OK, "rstd of no tokens", SPOIL(a->q_out = a->k_out = NULL; a->tokens = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "batch", SPOIL(a->batch = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens", SPOIL(a->tokens = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "q_heads", SPOIL(a->q_heads = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "k_heads", SPOIL(a->k_heads = INT64_MAX)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dim", SPOIL(a->dim = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dim", SPOIL(a->dim = 258)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "rotary", SPOIL(a->rotary = 15)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "rotary", SPOIL(a->rotary = 18)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "rotary", SPOIL(a->rotary = -2)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "q_stride[2]", SPOIL(a->q_stride[2] = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "q_out_stride[2]", SPOIL(a->q_out_stride[2] = 15), true, false},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dk_stride[1]", SPOIL(a->dk_stride[1] = 7), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->q_out = (void *)a->inv_freq), true, false},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->dq_weight = (void *)a->q_weight), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->workspace = a->dq), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "offset", SPOIL(a->position = NULL; a->offset = INT32_MAX)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "offset", SPOIL(a->position = NULL; a->offset = INT64_MIN)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "inv_freq", SPOIL(a->inv_freq = NULL)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "axes", SPOIL(a->axes = 9)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "axes", SPOIL(a->axes = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "table_step", SPOIL(a->table_step = 3)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "position_dtype", SPOIL(a->position_dtype = 2)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "table_dtype", SPOIL(a->table_dtype = 7)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "weight_dtype", SPOIL(a->weight_dtype = 4)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "scale", SPOIL(a->scale = INFINITY)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "eps", SPOIL(a->eps = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "weight_offset", SPOIL(a->weight_offset = NAN)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dq_weight is given", SPOIL(a->q_weight = NULL), false, true},
        {LK_ERR_ALIGNMENT, LK_OK, "q is", SPOIL(MOVED(a->q, 1))},
        {LK_ERR_ALIGNMENT, LK_OK, "inv_freq", SPOIL(MOVED(a->inv_freq, 2))},
        {LK_ERR_WORKSPACE, LK_OK, "workspace", SPOIL(a->workspace = NULL), false, true},
        {LK_ERR_WORKSPACE, LK_OK, "workspace_bytes", SPOIL(a->workspace_bytes--), false, true}};
    static const bad_call by_table[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_VALUE, LK_ERR_VALUE, "sin is NULL", SPOIL(a->sin = NULL)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "table_stride[1]", SPOIL(a->table_stride[1] = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "inv_freq", SPOIL(a->inv_freq = (const float *)a->cos)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "position", SPOIL(a->position = a->cos)}};
    for (int i = 0; i < LENGTH_OF(list); i++) expect_error(type, direction, &list[i], false);
    for (int i = 0; i < LENGTH_OF(by_table); i++) expect_error(type, direction, &by_table[i], true);
    if (!test_that(call_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL is taken");
}

/* ---- Random draws -------------------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const r = &state;
    static const int64_t dims[] = {2, 8, 16, 32, 64, 80, 96, 128, 128, 192, 256, 24, 40};
    problem p = plain((int)test_below(r, 3), (int)test_below(r, 2), 1 + test_below(r, 12), 1 + test_below(r, 9),
                      test_below(r, 5), dims[test_below(r, LENGTH_OF(dims))]);
    p.seed = seed, p.batch = 1 + test_below(r, 3);
    if (test_chance(r, 4)) p.dim = 1 + test_below(r, 200);
    if (test_chance(r, 15)) p.dim = 257 + test_below(r, 700);
    p.rotary = p.dim % 2 || test_chance(r, 3) ? 2 * test_below(r, p.dim / 2 + 1) : 0;
    if (p.dim == 1) p.dim = 2, p.rotary = 0;
    if (!p.rotary && p.dim % 2) p.rotary = 2;
    if (test_chance(r, 30)) p.tokens = 0;
    p.interleaved = test_chance(r, 2), p.layout = (int)test_below(r, LAYOUTS), p.source = (int)test_below(r, SOURCES);
    p.shared = test_chance(r, 3), p.at = test_chance(r, 3) ? (int)test_below(r, 8) : 0;
    if (p.source == ANGLES) p.positions = (int)test_below(r, POSITIONS);
    if (p.positions != COUNTED) p.axes = 1 + (int)test_below(r, 4);
    else if (p.source == ANGLES && test_chance(r, 2)) p.offset = test_below(r, 1 << 30) - (1 << 29);
    if (p.source != ANGLES) p.step = 1 + (int)test_below(r, 2);
    if (test_chance(r, 3)) p.scale = (float)(1 + 0.3 * test_uniform(r));
    if (p.dim <= 256 && test_chance(r, 2)) {
        p.norm[0] = !test_chance(r, 4), p.norm[1] = !test_chance(r, 4), p.rstd = test_chance(r, 2);
        p.dweight = has_norm(&p) && test_chance(r, 2), p.accumulate = p.dweight && test_chance(r, 3),
        p.wide_weight = test_chance(r, 3);
        p.weight_offset = test_chance(r, 3) ? 1 : 0, p.eps = test_chance(r, 3) ? 0.1f : 1e-6f;
    }
    p.in_place = (int)test_below(r, 2);
    if (p.direction == BACKWARD && p.norm[0] && p.norm[1] && test_chance(r, 3)) p.in_place = OVER_X;
    if (test_chance(r, 6)) p.skip[p.heads[1] ? test_below(r, 2) : 1] = true;
    return p;
}

static void fuzz(void)
{
    const long n = test_fuzz_begin(&counts, 300, 60);
    test_draws(draw, check, n);
    test_fuzz_end(&counts, possible, n);
}

/* ---- On the GPU only: beyond 2^31 elements, and a busy device ---------------------------------------------------------------- */

#if !defined(LK_SIMT)

/* In place, forward and then backward: the rotation back gives what was there, to two roundings of bf16. */
static void huge(int64_t batch, int64_t tokens, int64_t heads, int64_t dim)
{
    const int64_t n = batch * tokens * heads * dim;
    lk_bf16 *const x = (lk_bf16 *)test_huge_allocate(n * 2);
    float *const inv_freq = (float *)test_huge_allocate(dim * 2);
    float host[512];
    for (int64_t j = 0; j < dim / 2; j++) host[j] = (float)pow(10000.0, -2.0 * (double)j / (double)dim);
    TEST_CUDA(cudaMemcpy(inv_freq, host, (size_t)dim * 2, cudaMemcpyHostToDevice));
    test_huge_fill(x, n, 0);
    lk_rope_args a = {};
    a.q = a.q_out = x, a.dq_out = a.dq = x, a.inv_freq = inv_freq;
    a.batch = batch, a.tokens = tokens, a.q_heads = heads, a.dim = dim;
    if (test_launched(lk_rope_forward_bf16(&a, test.stream), "huge")) {
        uint64_t random = (uint64_t)n;
        for (int s = 0; s < 100; s++) {
            const int64_t row = s == 0 ? batch * tokens * heads - 1 : test_below(&random, batch * tokens * heads);
            const int64_t j = test_below(&random, dim / 2), at = row * dim + j;
            const double phi = (double)(row / heads % tokens) * (double)host[j];
            const double u = (double)test_huge_value(at), v = (double)test_huge_value(at + dim / 2);
            test_near(TEST_BF16, test_huge_get(TEST_BF16, x, at), u * cos(phi) - v * sin(phi), 1e-6 * (fabs(u) + fabs(v)));
            test_near(TEST_BF16, test_huge_get(TEST_BF16, x, at + dim / 2), v * cos(phi) + u * sin(phi),
                      1e-6 * (fabs(u) + fabs(v)));
        }
        if (test_launched(lk_rope_backward_bf16(&a, test.stream), "huge"))
            for (int s = 0; s < 100; s++) {
                const int64_t at = s == 0 ? n - 1 : test_below(&random, n);
                test_within(fabs((double)test_huge_get(TEST_BF16, x, at) - (double)test_huge_value(at)), 6 * 0x1p-7);
            }
    }
    test_huge_free();
}

static void busy(int type, int direction, int)
{
    problem p = plain(type, direction, 700, 8, 2, 128);
    p.norm[0] = p.norm[1] = p.dweight = true;
    check(&p), test_busy(op, &p);
}

static void all_huge(void)
{
    if (test_begin("huge: 4 x 140000 tokens of 32 heads")) huge(4, 140000, 32, 128), test_finish();
    if (test_begin("huge: 2^31 + 77 heads")) huge((1 << 27) + 5, 16, 1, 2), test_finish();
    static const test_theme held = {"half of the SMs held", busy};
    for (int direction = FORWARD; direction <= BACKWARD; direction++)
        test_themes(&held, 1, direction, 0, direction_name[direction], "all");
}

#endif

/* -------------------------------------------------------------------------------------------------------------------------------- */

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
