// SPDX-License-Identifier: MIT
/* tests/linear_cross_entropy_probabilities.cu - lk/linear_cross_entropy_probabilities.cuh against its formula in double, on the GPU or
 * on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits. Bytes that are not outputs (zones around
 * every buffer, gaps between strided rows, the inputs) must not change.
 *
 * The bounds: a logit is a sum of `hidden` products in float, then rounded where logits are T (fast_logits). Loss, lse and entropy follow
 * from that by their derivatives. dZ is rounded to T once; dx, dweight and dbias sum dZ times exact factors.
 */
#include "lk/linear_cross_entropy_probabilities.cuh"

#include "tests/test.h"

TEST_DEFINE(LINEAR_CROSS_ENTROPY_PROBABILITIES)

typedef lk_linear_cross_entropy_probabilities_args args_t;
typedef lk_linear_cross_entropy_plan plan_t;
enum { FORWARD, BACKWARD, BOTH, DIRECTIONS };
static const char *const direction_name[] = {"forward", "backward", "forward_backward"};
#define OP "lk_linear_cross_entropy_probabilities"
#define ALL(what)                                                                                                              \
    {TEST_OF_TYPES(lk_linear_cross_entropy_probabilities_forward##what),                                                       \
     TEST_OF_TYPES(lk_linear_cross_entropy_probabilities_backward##what),                                                      \
     TEST_OF_TYPES(lk_linear_cross_entropy_probabilities_forward_backward##what)}
static lk_status (*const call_of[][TEST_TYPES])(const args_t *, cudaStream_t) = ALL();
static lk_status (*const query_of[][TEST_TYPES])(const args_t *, size_t *) = ALL(_workspace_bytes);
static lk_status (*const plan_of[][TEST_TYPES])(const args_t *, size_t, plan_t *) = ALL(_plan);
static lk_linear_cross_entropy_context context;

/* Tensors. LSE and ENTROPY are inputs of backward. */
enum { X, WEIGHT, BIAS, PROB, CLASS_WEIGHT, ROW_WEIGHT, UPSTREAM, DLSE, DENTROPY, LSE, ENTROPY, LOSS, Z_LOSS, DX, DWEIGHT, DBIAS, TENSORS };
static const char *const tensor_name[] = {"x", "weight", "bias", "target_prob", "class_weight", "row_weight", "upstream", "dlse", "dentropy",
                                          "lse", "entropy", "loss", "z_loss_out", "dx", "dweight", "dbias"};
enum { DEFAULT, SMALLEST, BETWEEN }; /* the workspace: the default plan's, the smallest, 1.5 times that */

typedef struct {
    int type, direction, reduction, budget, gap, at; /* gap: elements between rows; at: past 256-byte alignment, of T's tensors */
    int64_t tokens, hidden, vocab, chunk, slice;
    float scale, softcap, smoothing, z_loss;
    bool has[TENSORS], accumulate, dweight_f32, fast, prob_f32, per_token, masked;
    uint64_t seed;
} problem;

static problem plain(int type, int direction, int64_t tokens, int64_t hidden, int64_t vocab)
{
    problem p = {};
    p.type = type, p.direction = direction, p.tokens = tokens, p.hidden = hidden, p.vocab = vocab, p.per_token = true;
    p.seed = (uint64_t)(tokens * 1000003 + hidden * 1009 + vocab * 10 + type);
    for (int t : {X, WEIGHT, PROB, UPSTREAM, LSE, LOSS, DX, DWEIGHT}) p.has[t] = true;
    return p;
}

static const char *describe(const problem *p)
{
    static char text[600];
    int n = snprintf(text, sizeof text,
                     "%s %s, %lld x %lld x %lld, chunk %lld slice %lld, gap %d at %d, scale %g softcap %g smoothing %g z_loss %g, reduction "
                     "%d, budget %d%s%s%s%s%s%s, seed %llu, has", direction_name[p->direction], test_type_name[p->type],
                     (long long)p->tokens, (long long)p->hidden, (long long)p->vocab, (long long)p->chunk, (long long)p->slice, p->gap,
                     p->at, (double)p->scale, (double)p->softcap, (double)p->smoothing, (double)p->z_loss, p->reduction, p->budget,
                     p->accumulate ? ", accumulate" : "", p->dweight_f32 ? ", f32 dweight" : "", p->fast ? ", fast" : "",
                     p->prob_f32 ? ", f32 probabilities" : "", p->per_token ? ", per token" : "", p->masked ? ", masked" : "",
                     (unsigned long long)p->seed);
    for (int t = 0; t < TENSORS && n < (int)sizeof text; t++)
        if (p->has[t]) n += snprintf(text + n, sizeof text - (size_t)n, " %s", tensor_name[t]);
    return text;
}

/* ---- Inputs -------------------------------------------------------------------------------------------------------------- */

static test_buffer buffer[TENSORS], workspace, counts; /* counts: argmax [tokens], valid_rows, weight_sum */
static unsigned char *kept[TENSORS];
static size_t kept_bytes[TENSORS];
static args_t args;
static plan_t plan;

typedef struct {
    int64_t rows, cols, stride;
    int type, at;
} layout;
static layout layout_of(const problem *p, int t)
{
    const int64_t h = p->hidden, n = p->tokens, v = p->vocab, losses = p->reduction == LK_REDUCTION_NONE ? n : 1;
    const int f32 = TEST_F32, logits = p->fast ? p->type : f32;
    switch (t) {
    case X: case DX: return {n, h, h + p->gap, p->type, p->at};
    case WEIGHT: return {v, h, h + 2 * p->gap, p->type, p->at};
    case DWEIGHT: return {v, h, h + p->gap, p->dweight_f32 ? f32 : p->type, p->at};
    case BIAS: case DBIAS: return {1, v, v, p->type, p->at};
    case PROB: return {n, v, v + 3 * p->gap, p->prob_f32 ? f32 : logits, p->at};
    case CLASS_WEIGHT: return {1, v, v, f32, 0};
    case UPSTREAM: return {1, p->per_token ? n : 1, p->per_token ? n : 1, f32, 0};
    case LOSS: case Z_LOSS: return {1, losses, losses, f32, 0};
    default: return {1, n, n, f32, 0};
    }
}
static bool is_output(const problem *p, int t) { return t >= LOSS || (t >= LSE && p->direction != BACKWARD); }
static bool is_of(const problem *p, int t) /* whether the call writes it */
{
    return p->has[t] && (t >= DX ? p->direction != FORWARD : t >= LSE && p->direction != BACKWARD);
}
static double input(const problem *p, int t, int64_t row, int64_t col)
{
    const layout l = layout_of(p, t);
    return (double)test_get(l.type, test_buffer_host(&buffer[t]), row * l.stride + col);
}

/* ---- The reference ------------------------------------------------------------------------------------------------------- */

/* A row in double: z, p, u, the softcap's slope; off: the bound of z's error. */
typedef struct {
    double *z, *p, *u, *slope, lse, entropy, sum_u, sum_uz, off, off_lse, off_entropy, off_class;
    size_t bytes[4];
} row_t;
static row_t r;

static void refer(const problem *p, int64_t row)
{
    const double scale = p->scale == 0 ? 1 : (double)p->scale, cap = (double)p->softcap, rounds[] = {0, 0x1p-11, 0x1p-8};
    const double stored = p->fast ? rounds[p->type] : 0, e20 = 0x1p-20;
    double **const all[] = {&r.z, &r.p, &r.u, &r.slope}, most = -INFINITY, sum = 0;
    for (int i = 0; i < 4; i++) *all[i] = (double *)test_room(*all[i], &r.bytes[i], (size_t)p->vocab * sizeof(double));
    r.off = r.sum_u = r.sum_uz = r.entropy = r.off_entropy = r.off_class = 0;
    for (int64_t j = 0; j < p->vocab; j++) {
        double v = p->has[BIAS] ? input(p, BIAS, 0, j) : 0, size = isfinite(v) ? fabs(v) : 0;
        for (int64_t d = 0; d < p->hidden; d++) {
            const double term = input(p, X, row, d) * input(p, WEIGHT, j, d);
            v += term, size += fabs(term);
        }
        const double t = cap > 0 ? tanh(scale * v / cap) : 0;
        r.z[j] = cap > 0 ? cap * t : scale * v, r.slope[j] = cap > 0 ? 1 - t * t : 1;
        if (isfinite(v)) r.off = fmax(r.off, scale * (size * 0x1p-22 + stored * fabs(v)) + e20 * (cap + fabs(r.z[j])));
        r.u[j] = (1 - (double)p->smoothing) * input(p, PROB, row, j) + (double)p->smoothing / (double)p->vocab;
        if (p->has[CLASS_WEIGHT]) r.u[j] *= input(p, CLASS_WEIGHT, 0, j);
        most = fmax(most, r.z[j]), r.sum_u += r.u[j];
        if (r.u[j] != 0) r.sum_uz += r.u[j] * r.z[j], r.off_class += fabs(r.u[j]) * (e20 * fabs(r.z[j]) + 2 * r.off);
    }
    for (int64_t j = 0; j < p->vocab; j++) sum += exp(r.z[j] - most);
    r.lse = most + log(sum), r.off_lse = r.off + e20 * (1 + fabs(r.lse) + fabs(most));
    for (int64_t j = 0; j < p->vocab; j++) {
        r.p[j] = exp(r.z[j] - r.lse);
        if (r.p[j] == 0) continue;
        r.entropy += r.p[j] * (r.lse - r.z[j]);
        r.off_entropy += r.p[j] * (1 + fabs(r.lse - r.z[j])) * 2 * r.off + e20 * r.p[j] * (fabs(r.lse) + fabs(r.z[j]) + 1);
    }
    r.off_class += fabs(r.sum_u) * (r.off_lse + e20 * fabs(r.lse));
}

static void fill(const problem *p)
{
    for (int t = LOSS; t <= Z_LOSS && test_adds_losses(p); t++)
        if (p->has[t]) test_fill_losses(layout_of(p, t).cols, &buffer[t]);
    static const float row_weights[] = {1.0f, 0.0f, 2.5f, -0.5f, 0.25f};
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        uint64_t random = test_hash(p->seed + (uint64_t)t);
        if (is_output(p, t) && !(p->accumulate && (t == DWEIGHT || t == DBIAS))) continue; /* poison */
        for (int64_t row = 0; row < l.rows && t != LSE && t != ENTROPY; row++)
            for (int64_t c = 0; c < l.cols; c++) {
                const double u = test_uniform(&random);
                const bool hit = p->masked && c > 0 && test_hash(p->seed + (uint64_t)c) % 5 == 0;
                double v = t == WEIGHT ? 3 * u / sqrt((double)p->hidden) : u;
                if (t == BIAS && hit) v = -INFINITY;
                if (t == PROB) v = hit || u < -0.3 ? 0 : fabs(u) * 3 / (double)p->vocab;
                if (t == CLASS_WEIGHT) v = 0.2 + fabs(u);
                if (t == ROW_WEIGHT) v = (double)row_weights[(uint64_t)(c + (int64_t)p->seed) % 5];
                test_put(l.type, test_buffer_host(&buffer[t]), row * l.stride + c, (float)v);
            }
    }
    for (int64_t row = 0; row < p->tokens && p->direction == BACKWARD; row++) {
        refer(p, row);
        ((float *)test_buffer_host(&buffer[LSE]))[row] = (float)r.lse, ((float *)test_buffer_host(&buffer[ENTROPY]))[row] = (float)r.entropy;
    }
}

static void verify_number(const problem *p, int t, int64_t row, int64_t col, double want, double slack)
{
    const layout l = layout_of(p, t);
    if (!is_of(p, t)) return;
    const float got = test_get(l.type, test_buffer_back(&buffer[t]), row * l.stride + col);
    if (!test_near(l.type, got, want, isfinite(want) ? slack : 0))
        test_detail("%s[%lld, %lld] is %.9g, want %.9g +- %.3g; %s; plan: %s", tensor_name[t], (long long)row, (long long)col,
                    (double)got, want, slack, describe(p), plan.text);
}

/* A loss, beside what was there before. */
static void near_loss(const problem *p, int t, int64_t row, double want, double slack)
{
    const double there = test_adds_losses(p) ? (double)test_loss_before(row) : 0;
    verify_number(p, t, 0, row, want + there, slack + 0x1p-23 * fabs(there));
}

static double *dz, *dz_slack;
static size_t dz_bytes, dz_slack_bytes;

static void verify(const problem *p)
{
    const double scale = p->scale == 0 ? 1 : (double)p->scale, k = (double)p->z_loss, e20 = 0x1p-20;
    const int64_t n = p->tokens, v = p->vocab;
    const bool each = p->reduction == LK_REDUCTION_NONE, mean = p->reduction == LK_REDUCTION_MEAN;
    double total = 0, total_z = 0, total_off = 0, most = 0;
    dz = (double *)test_room(dz, &dz_bytes, (size_t)(n * v) * sizeof(double));
    dz_slack = (double *)test_room(dz_slack, &dz_slack_bytes, (size_t)(n * v) * sizeof(double));
    for (int64_t row = 0; row < n; row++) {
        refer(p, row);
        const double w = p->has[ROW_WEIGHT] ? input(p, ROW_WEIGHT, 0, row) : 1, z = w * k * r.lse * r.lse;
        const double loss = w * (r.sum_u * r.lse - r.sum_uz) + z, off_z = fabs(w) * k * (2 * fabs(r.lse) * r.off_lse + e20 * r.lse * r.lse);
        const double off = fabs(w) * (r.off_class + e20 * fabs(loss)) + off_z;
        if (each) near_loss(p, LOSS, row, loss, off), near_loss(p, Z_LOSS, row, z, off_z);
        total += loss, total_z += z, total_off += off + e20 * (fabs(loss) + z);
        verify_number(p, LSE, 0, row, r.lse, r.off_lse), verify_number(p, ENTROPY, 0, row, r.entropy, r.off_entropy);
        const int64_t top = ((const int64_t *)test_buffer_back(&counts))[row];
        if (p->direction != BACKWARD && args.common.argmax) {
            double largest = -INFINITY;
            for (int64_t j = 0; j < v; j++) largest = fmax(largest, r.z[j]);
            if (!test_that(top >= 0 && top < v && r.z[top] >= largest - 2 * r.off)) test_detail("argmax is %lld; %s", (long long)top, describe(p));
        }
        if (p->direction == FORWARD) continue;
        const double given = p->has[UPSTREAM] ? input(p, UPSTREAM, 0, p->per_token ? row : 0) : 1;
        const double f = test_upstream_times(p) * given * w / (mean ? (double)n : 1);
        const double dlse = p->has[DLSE] ? input(p, DLSE, 0, row) : 0, dent = p->has[DENTROPY] ? input(p, DENTROPY, 0, row) : 0;
        const double G = 2 * k * r.lse * f + dlse, off_G = 2 * k * fabs(f) * r.off_lse;
        for (int64_t j = 0; j < v; j++) {
            const double by = scale * r.slope[j], lack = r.p[j] == 0 ? 0 : r.lse - r.entropy - r.z[j], by_p = f * r.sum_u + G;
            const double off_p = r.p[j] * (2 * r.off_lse + e20 * (2 + (r.p[j] == 0 ? 0 : fabs(r.lse - r.z[j]))));
            const double want = by_p * r.p[j] - f * r.u[j] + dent * r.p[j] * lack;
            double slack = fabs(by_p) * off_p + off_G * r.p[j] + e20 * (fabs(f * r.sum_u) * r.p[j] + fabs(f * r.u[j]));
            slack += fabs(dent) * (off_p * fabs(lack) + r.p[j] * (r.off_lse + r.off_entropy + r.off));
            dz[row * v + j] = by * want;
            dz_slack[row * v + j] = by * slack + (p->softcap > 0 ? scale * fabs(want) * 2 * r.off / (double)p->softcap : 0);
        }
        most = fmax(most, fabs(f) + fabs(dlse) + fabs(dent));
    }
    const double over = mean ? (double)n : 1;
    if (!each && n > 0) near_loss(p, LOSS, 0, total / over, total_off / over), near_loss(p, Z_LOSS, 0, total_z / over, total_off / over);
    if (!each && n == 0) near_loss(p, LOSS, 0, mean ? NAN : 0, 0), near_loss(p, Z_LOSS, 0, mean ? NAN : 0, 0);
    if (p->direction != BACKWARD && args.common.valid_rows) {
        const char *const behind = (const char *)test_buffer_back(&counts) + n * 8;
        if (!test_that(*(const int64_t *)behind == n && *(const float *)(behind + 8) == (float)n))
            test_detail("valid_rows is %lld, weight_sum %g; %s", (long long)*(const int64_t *)behind, (double)*(const float *)(behind + 8), describe(p));
    }
    if (p->direction == FORWARD) return;
    const double unit = p->type == TEST_F32 ? 0 : p->type == TEST_F16 ? 0x1p-11 : 0x1p-8;
    for (int64_t i = 0; i < n * v; i++) dz_slack[i] += (unit + 0x1p-22) * fabs(dz[i]) + (p->type == TEST_F16 ? scale * most * 0x1p-30 : 0) + 0x1p-130;
    const int64_t tail = v > 8 && p->type == TEST_BF16 ? v % 8 : 0; /* the two parts of dx are rounded */
    for (int64_t row = 0; row < n && is_of(p, DX); row++)
        for (int64_t d = 0; d < p->hidden; d++) {
            double want = 0, slack = 0, part = 0;
            for (int64_t j = 0; j < v; j++) {
                const double by = input(p, WEIGHT, j, d);
                want += dz[row * v + j] * by, slack += dz_slack[row * v + j] * fabs(by);
                if (j < v - tail) part = want;
            }
            if (tail) slack += test_half_ulp(p->type, fabs(part) + slack);
            verify_number(p, DX, row, d, want, slack);
        }
    const int64_t cols = p->hidden + 1; /* the last: dbias */
    for (int64_t j = 0; j < v; j++)
        for (int64_t d = 0; d < cols; d++) {
            const int t = d < p->hidden ? DWEIGHT : DBIAS;
            const layout l = layout_of(p, t);
            if (!is_of(p, t)) continue;
            const int64_t at_row = d < p->hidden ? j : 0, at = d < p->hidden ? d : j;
            const double old = p->accumulate ? input(p, t, at_row, at) : 0;
            double want = old, slack = 0, size = fabs(old), largest = fabs(old);
            for (int64_t row = 0; row < n; row++) {
                const double by = d < p->hidden ? input(p, X, row, d) : 1;
                want += dz[row * v + j] * by, size += fabs(dz[row * v + j] * by), largest = fmax(largest, fabs(want));
                slack += dz_slack[row * v + j] * fabs(by);
            }
            slack += 0x1p-22 * size;
            if (t == DWEIGHT && strstr(plan.text, "rounded after")) slack += (double)plan.chunks * test_half_ulp(l.type, largest + slack);
            verify_number(p, t, at_row, at, want, slack);
        }
}

/* ---- A call -------------------------------------------------------------------------------------------------------------- */

static bool prepare(const problem *p, int run)
{
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        const int64_t elements = l.rows ? (l.rows - 1) * l.stride + l.cols : 0;
        test_buffer_size(&buffer[t], (size_t)(elements * test_type_bytes[l.type]), (size_t)(l.at * test_type_bytes[l.type]),
                         is_output(p, t) ? (run ? 0xff : 0x5a) : run ? 0x7f : 0xff);
    }
    fill(p);
    for (int t = 0; t < TENSORS; t++) test_buffer_upload(&buffer[t]);
    test_buffer_size(&counts, (size_t)p->tokens * 8 + 16, 0, run ? 0xff : 0x5a), test_buffer_upload(&counts);
    void *at[TENSORS];
    for (int t = 0; t < TENSORS; t++) at[t] = p->has[t] ? test_buffer_device(&buffer[t]) : NULL;
    args = {};
    lk_linear_cross_entropy_args &a = args.common;
    a.context = &context, a.x = at[X], a.weight = at[WEIGHT], a.bias = at[BIAS], a.class_weight = (float *)at[CLASS_WEIGHT];
    a.row_weight = (float *)at[ROW_WEIGHT], a.upstream = (float *)at[UPSTREAM], a.upstream_per_token = p->per_token;
    a.dlse = (float *)at[DLSE], a.dentropy = (float *)at[DENTROPY], a.loss = (float *)at[LOSS], a.z_loss_out = (float *)at[Z_LOSS];
    a.lse = (float *)at[LSE], a.entropy = (float *)at[ENTROPY], a.dx = at[DX], a.dweight = at[DWEIGHT], a.dbias = at[DBIAS];
    args.target_prob = at[PROB];
    a.tokens = p->tokens, a.hidden = p->hidden, a.vocab = p->vocab, a.chunk_tokens = p->chunk, a.slice_tokens = p->slice;
    if (p->gap) a.x_stride = a.dx_stride = a.dweight_stride = p->hidden + p->gap, a.weight_stride = p->hidden + 2 * p->gap;
    if (p->gap) args.target_prob_stride = p->vocab + 3 * p->gap;
    a.logit_scale = p->scale, a.softcap = p->softcap, a.label_smoothing = p->smoothing, a.z_loss = p->z_loss, a.reduction = p->reduction;
    a.accumulate = p->accumulate, a.dweight_dtype = p->dweight_f32 ? LK_DTYPE_F32 : LK_DTYPE_T, a.fast_logits = p->fast;
    a.upstream_value = test_upstream_value(p), a.accumulate_loss = test_adds_losses(p);
    args.target_prob_dtype = p->prob_f32 ? LK_DTYPE_F32 : LK_DTYPE_T;
    if (p->seed % 3) {
        int64_t *const numbers = (int64_t *)test_buffer_device(&counts);
        a.argmax = numbers, a.valid_rows = numbers + p->tokens, a.weight_sum = (float *)(numbers + p->tokens + 1);
    }
    if (p->seed % 2) a.use_ignore_index = 1, a.ignore_index = 0; /* they do not apply */
    plan_t any = {};
    test_launched(plan_of[p->direction][p->type](&args, SIZE_MAX, &any), describe(p));
    test_launched(query_of[p->direction][p->type](&args, &a.workspace_bytes), describe(p));
    if (p->budget == SMALLEST) a.workspace_bytes = any.minimum_bytes;
    if (p->budget == BETWEEN) a.workspace_bytes = any.minimum_bytes * 3 / 2;
    test_launched(plan_of[p->direction][p->type](&args, a.workspace_bytes, &plan), describe(p));
    a.workspace_bytes = plan.workspace_bytes;
    test_buffer_size(&workspace, plan.workspace_bytes, p->seed % 2 ? 128 : 0, run ? 0xff : 0x7f);
    test_buffer_upload(&workspace);
    a.workspace = plan.workspace_bytes ? test_buffer_device(&workspace) : NULL;
    return true;
}
static lk_status launch(const problem *p) { return call_of[p->direction][p->type](&args, test.stream); }

static void collect(const problem *p)
{
    for (int t = 0; t < TENSORS; t++) test_buffer_download(&buffer[t]);
    for (test_buffer *b : {&workspace, &counts}) test_buffer_download(b);
    (void)p;
}
static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        if (is_of(p, t))
            test_settle(&buffer[t], &kept[t], &kept_bytes[t], keep, l.rows, l.cols, l.stride, test_type_bytes[l.type],
                        tensor_name[t], what, describe(p));
        test_buffer_untouched(&buffer[t], tensor_name[t], describe(p));
    }
    for (test_buffer *b : {&workspace, &counts}) {
        test_buffer_accept_all(b);
        test_buffer_untouched(b, "workspace or counts", describe(p));
    }
}
static const test_op<problem> op = {describe, prepare, launch, collect, verify, settle};
static void check(const problem *p) { test_twice(op, p); }

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

static void sizes(int type, int direction, int)
{
    const int64_t list[][3] = {{5, 24, 40}, {1, 1, 1}, {3, 7, 13}, {17, 16, 67}, {4, 33, 300}, {2, 8, 9}, {1, 8, 1000}};
    for (int i = 0; i < LENGTH_OF(list); i++)
        for (int k = 0; k < (type == TEST_F32 ? 1 : 2); k++) {
            problem p = plain(type, direction, list[i][0], list[i][1], list[i][2]);
            p.fast = k, p.prob_f32 = i % 2, p.has[DBIAS] = i % 2;
            check(&p);
        }
}

static void chunks(int type, int direction, int)
{
    for (int i = 0; i < 16; i++) {
        if (test.small && (i + type + direction) % 2) continue;
        problem p = plain(type, direction, i < 8 ? 23 : 150, 16, 71);
        p.seed += (uint64_t)i, p.reduction = i % 3, p.has[ROW_WEIGHT] = i & 4, p.has[CLASS_WEIGHT] = i & 8;
        p.has[BIAS] = p.has[DBIAS] = i & 1, p.accumulate = i & 2, p.dweight_f32 = i & 4;
        p.budget = i < 8 ? DEFAULT : i % 3 ? BETWEEN : SMALLEST, p.fast = i % 5 == 4;
        if (i < 8) p.chunk = 1 + i * 3, p.slice = i % 3 ? 1 + i : 0;
        check(&p);
        if (i < 8 && !test_that(plan.chunks == (23 + p.chunk - 1) / p.chunk)) test_detail("%s; %s", plan.text, describe(&p));
    }
}

static void set_options(problem *p, uint64_t bits)
{
    if (bits & 1) p->scale = 0.5f;
    if (bits & 2) p->softcap = 4;
    if (bits & 4) p->smoothing = 0.1f;
    if (bits & 8) p->z_loss = 0.01f;
    p->has[CLASS_WEIGHT] = bits & 16, p->has[ROW_WEIGHT] = bits & 32, p->has[BIAS] = bits & 64, p->has[DBIAS] = bits & 128;
    p->has[DLSE] = bits & 256, p->has[DENTROPY] = p->has[ENTROPY] = bits & 512, p->has[Z_LOSS] = bits & 1024;
    p->per_token = bits & 2048, p->has[UPSTREAM] = bits & 4096, p->fast = bits & 8192, p->prob_f32 = bits & 16384;
    p->reduction = (int)((bits >> 15) % 3);
    p->per_token = p->per_token && p->reduction == LK_REDUCTION_NONE;
    if (p->direction == FORWARD) p->has[DLSE] = p->has[DENTROPY] = false;
}
static void options(int type, int direction, int)
{
    for (int i = 0; i < test_pick(24, 6); i++) {
        problem p = plain(type, direction, 6, 16, i % 2 ? 50 : 129);
        p.seed += (uint64_t)i;
        set_options(&p, test_hash(p.seed + (uint64_t)direction) >> 20);
        const int without[] = {LOSS, LSE, DX, DWEIGHT};
        for (int k = 0; k < LENGTH_OF(without); k++)
            if (!(without[k] == LSE && direction == BACKWARD)) p.has[without[k]] = i % 5 != k;
        check(&p);
    }
}

static void places(int type, int direction, int)
{
    for (int i = 0; i < test_pick(8, 3); i++) {
        problem p = plain(type, direction, 4, 12 + i, 30 + i);
        p.gap = i % 5 + 1, p.at = i % 4, p.has[BIAS] = p.has[DBIAS] = i % 2, p.accumulate = i % 3 == 1, p.fast = i % 2;
        check(&p);
    }
}

static void masks(int type, int direction, int)
{
    problem p = plain(type, direction, 3, 8, 45);
    p.masked = p.has[BIAS] = p.has[DBIAS] = true;
    check(&p);
}

static void graphs(int type, int direction, int)
{
    problem p = plain(type, direction, 9, 16, 60);
    p.chunk = 4, p.has[BIAS] = p.has[DBIAS] = true, p.reduction = LK_REDUCTION_MEAN, p.per_token = false;
    check(&p); /* leaves its bits in kept */
    test_graph(op, &p);
}

static void empty(int type, int direction, int)
{
    for (int i = 0; i < 3; i++) {
        problem p = plain(type, direction, 0, 5, 7);
        p.has[DBIAS] = true, p.accumulate = i == 1, p.gap = 2, p.reduction = i, p.per_token = false;
        check(&p);
    }
}

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

typedef test_bad_call<args_t> bad_call;

static void errors(int type, int direction)
{
    static float there[1];
    static const bad_call list[] = {
        {LK_OK, LK_OK, "nothing", SPOIL((void)a)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "target is given", SPOIL(a->common.target = there)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "saved is given", SPOIL(a->common.saved = there)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "max_counted is given", SPOIL(a->common.max_counted = 2)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "batch_invariant is given", SPOIL(a->common.batch_invariant = 1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "statistics is given", SPOIL(a->common.statistics = 1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "target_prob_dtype is 9", SPOIL(a->target_prob_dtype = 9)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "logit_scale", SPOIL(a->common.logit_scale = -1)},
        {LK_ERR_NULL, LK_OK, "target_prob", SPOIL(a->target_prob = NULL)},
        {LK_ERR_NULL, LK_OK, "x is", SPOIL(a->common.x = NULL)},
        {LK_ERR_NULL, LK_OK, "context", SPOIL(a->common.context = NULL)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens", SPOIL(a->common.tokens = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab", SPOIL(a->common.vocab = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "target_prob_stride", SPOIL(a->target_prob_stride = 39)},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->target_prob = a->common.workspace)},
        {LK_ERR_PATH, LK_ERR_PATH, "with target_prob it is 0", SPOIL(a->common.path = LK_LINEAR_CROSS_ENTROPY_FUSED)},
        {LK_ERR_PATH, LK_ERR_PATH, "with target_prob it is 0", SPOIL(a->common.path = LK_LINEAR_CROSS_ENTROPY_PANELS)},
        {LK_ERR_ALIGNMENT, LK_OK, "target_prob", SPOIL(MOVED(a->target_prob, 1))},
        {LK_ERR_WORKSPACE, LK_OK, "workspace", SPOIL(a->common.workspace = NULL)},
        {LK_ERR_WORKSPACE, LK_OK, "workspace_bytes", SPOIL(a->common.workspace_bytes = 100)},
    };
    for (const bad_call &bad : list) {
        const problem p = plain(type, direction, 3, 8, 40);
        prepare(&p, 0);
        bad.spoil(&args);
        size_t asked = TEST_NOT_ASKED;
        const lk_status status = launch(&p), answer = query_of[direction][type](&args, &asked);
        test_expect(status, bad.want, bad.field, OP, direction_name[direction], type);
        test_expect_query(answer, bad.asked, asked, bad.field);
        TEST_CUDA(cudaStreamSynchronize(test.stream));
        for (int t = LSE; t < TENSORS; t++) test_expect_unwritten(status, &buffer[t], tensor_name[t], bad.field);
    }
    if (!test_that(call_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL is taken");
    plan_t small = {};
    const problem p = plain(type, direction, 3, 8, 40);
    prepare(&p, 0);
    if (!test_that(plan_of[direction][type](&args, plan.minimum_bytes - 1, &small) == LK_ERR_WORKSPACE)) test_detail("a plan of too few bytes");
}

/* ---- Random draws -------------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const random = &state;
    const int64_t tokens = 1 + test_below(random, test_chance(random, 4) ? 100 : 9), vocab = 1 + test_below(random, test_chance(random, 4) ? 300 : 40);
    problem p = plain((int)test_below(random, TEST_TYPES), (int)test_below(random, DIRECTIONS), tokens, 1 + test_below(random, 40), vocab);
    p.seed = seed;
    set_options(&p, test_random(random));
    if (test_chance(random, 3)) p.gap = (int)test_below(random, 9), p.at = (int)test_below(random, 8);
    if (test_chance(random, 3)) p.chunk = 1 + test_below(random, p.tokens);
    if (test_chance(random, 3)) p.slice = 1 + test_below(random, p.tokens);
    p.budget = (int)test_below(random, 3);
    p.accumulate = test_chance(random, 3), p.dweight_f32 = test_chance(random, 3);
    return p;
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (lk_linear_cross_entropy_init(&context)) printf("%s\n", lk_last_error());
    test_of_directions("errors:", errors, direction_name, DIRECTIONS);
    static const test_theme themes[] = {{"sizes", sizes}, {"chunks", chunks}, {"options", options}, {"places", places},
                                        {"masks", masks}, {"graphs", graphs}, {"empty", empty}};
    for (int direction = 0; direction < DIRECTIONS; direction++)
        test_themes(themes, LENGTH_OF(themes), direction, 0, direction_name[direction], "chunks");
    test_fuzz(draw, check, 300, 60);
    lk_linear_cross_entropy_destroy(&context);
    return test_end();
}
