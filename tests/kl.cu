// SPDX-License-Identifier: MIT
/* tests/kl.cu - lk/kl.cuh and lk/kl_parallel.cuh against their headers' formula in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits. Bytes that are not outputs (zones
 * around every buffer, gaps between strided rows, the inputs) must not change.
 *
 * The bounds follow from the header's: log p and log q of a column within lp and lq, see refer; what that does to a term,
 * by the term's derivatives; and a few roundings of each term and of the sums.
 *
 * Columns that are split over ranks are virtual ranks of one process, one after another, as in tests/cross_entropy.cu.
 */
#include "lk/kl_parallel.cuh"

#include "tests/test.h"

TEST_DEFINE(KL)
TEST_DEFINE(KL_PARALLEL)

typedef lk_status (*call)(const lk_kl_args *, cudaStream_t);
typedef lk_status (*query)(const lk_kl_args *, size_t *);
enum { FORWARD, BACKWARD, BOTH, DIRECTIONS };
static const char *const direction_name[] = {"forward", "backward", "forward_backward"};
static const call call_of[][TEST_TYPES] = {TEST_OF_TYPES(lk_kl_forward), TEST_OF_TYPES(lk_kl_backward),
                                           TEST_OF_TYPES(lk_kl_forward_backward)};
static const query query_of[][TEST_TYPES] = {TEST_OF_TYPES(lk_kl_forward_workspace_bytes),
                                             TEST_OF_TYPES(lk_kl_backward_workspace_bytes),
                                             TEST_OF_TYPES(lk_kl_forward_backward_workspace_bytes)};
typedef lk_status (*split_call)(const lk_kl_parallel_args *, cudaStream_t);
typedef lk_status (*split_query)(const lk_kl_parallel_args *, size_t *);
enum { BETWEEN = DIRECTIONS, FINISH, SPLIT_CALLS };
static const split_call split_call_of[][TEST_TYPES] = {
    TEST_OF_TYPES(lk_kl_parallel_forward), TEST_OF_TYPES(lk_kl_parallel_backward), TEST_OF_TYPES(lk_kl_parallel_forward_backward),
    TEST_OF_TYPES(lk_kl_parallel_between), TEST_OF_TYPES(lk_kl_parallel_finish)};
#define SPLIT_QUERY(name) TEST_OF_TYPES(lk_kl_parallel_##name##_workspace_bytes)
static const split_query split_query_of[][TEST_TYPES] = {SPLIT_QUERY(forward), SPLIT_QUERY(backward),
                                                         SPLIT_QUERY(forward_backward), SPLIT_QUERY(between), SPLIT_QUERY(finish)};
static const char *const path_name[] = {"auto", "warp", "block", "cluster"};
static const char *const divergence_name[] = {"forward", "reverse", "jensen_shannon", "total_variation"};
enum { PATHS = LK_KL_CLUSTER + 1, DIVERGENCES = LK_KL_TOTAL_VARIATION + 1 };

/* What some rows have. NEAR: the teacher's logits are the student's, within 1e-3. EQUAL: the same. FAR: 50 apart, so
 * that probabilities underflow. MASKED_...: columns of -inf, in the student's row, the teacher's or both; the
 * other's there may be 150 below. ALONE: all of a row. */
enum { NOTHING, NEAR, EQUAL, FAR, MASKED_STUDENT, MASKED_TEACHER, MASKED_BOTH, ALONE, PLUS_INF, NOT_A_NUMBER, SPECIALS };
static const char *const special_name[] = {"nothing",       "near", "equal", "far", "-inf in the student", "-inf in the teacher",
                                           "-inf in both", "a row of -inf", "+inf", "nan"};
enum { LOSS, LSE, TEACHER_LSE, ENTROPY, OUTPUTS };
static const char *const output_name[] = {"loss", "lse", "teacher_lse", "entropy"};
enum { UPSTREAM_NULL, UPSTREAM_ONE, UPSTREAM_PER_ROW };

/* One call. Strides are as in the args, 0 for packed; `.._at` is how many elements a pointer is past 256-byte alignment. */
typedef struct {
    int type, direction, path, divergence;
    int64_t rows, vocab, stride, teacher_stride, gradient_stride;
    int at, teacher_at, gradient_at;
    float scale, teacher_scale, softcap, teacher_softcap, beta;
    bool in_place, weighted, without[OUTPUTS];
    int upstream, special;
    double offset;
    uint64_t seed;
    int ranks; /* not 0: the columns are split over so many */
} problem;

static problem plain(int type, int direction, int path, int64_t rows, int64_t vocab)
{
    problem p = {};
    p.type = type, p.direction = direction, p.path = path, p.rows = rows, p.vocab = vocab;
    p.upstream = UPSTREAM_PER_ROW, p.ranks = test_split_over;
    p.seed = (uint64_t)(rows * 1000003 + vocab * 10 + type);
    p.divergence = (int)(p.seed / 10 % DIVERGENCES);
    return p;
}

static const char *describe(const problem *p)
{
    static char text[600];
    snprintf(text, sizeof text,
             "%s %s %s %s, %lld x %lld, strides %lld %lld %lld, at %d %d %d, scales %g %g, softcaps %g %g, beta %g%s%s, "
             "upstream %d, %s, offset %g, ranks %d, seed %llu",
             direction_name[p->direction], test_type_name[p->type], path_name[p->path], divergence_name[p->divergence],
             (long long)p->rows, (long long)p->vocab, (long long)p->stride, (long long)p->teacher_stride,
             (long long)p->gradient_stride, p->at, p->teacher_at, p->gradient_at, (double)p->scale, (double)p->teacher_scale,
             (double)p->softcap, (double)p->teacher_softcap, (double)p->beta, p->in_place ? ", in place" : "",
             p->weighted ? ", weighted" : "", p->upstream, special_name[p->special], p->offset, p->ranks,
             (unsigned long long)p->seed);
    return text;
}

/* ---- Inputs -------------------------------------------------------------------------------------------------------------- */

static test_buffer logits, teacher, gradient, row_weight, upstream, outputs[OUTPUTS];
static unsigned char *kept[OUTPUTS + 1];
static size_t kept_bytes[OUTPUTS + 1];
static lk_kl_args args;

static int64_t row_stride(const problem *p, int64_t given) { return given ? given : p->vocab; }
static float weight_of(const problem *p, int64_t row)
{
    static const float list[] = {1.0f, 0.0f, 2.5f, -0.5f, 0.25f};
    return p->weighted ? list[(uint64_t)(row + (int64_t)p->seed) % 5] : 1.0f;
}
static float upstream_of(const problem *p, int64_t row)
{
    uint64_t random = p->seed + 77 + (p->upstream == UPSTREAM_PER_ROW ? (uint64_t)row : 0);
    return p->upstream == UPSTREAM_NULL || p->direction == FORWARD ? 1.0f : (float)(2 * test_uniform(&random));
}

static bool adds_losses(const problem *p) { return p->special != NEAR && test_adds_losses(p); }

static void fill(const problem *p)
{
    uint64_t random = test_hash(p->seed);
    void *const x = test_buffer_host(&logits), *const y = test_buffer_host(&teacher);
    for (int64_t r = 0; r < p->rows; r++) {
        const bool special = p->special && (r % 2 == 1 || p->rows == 1);
        for (int64_t c = 0; c < p->vocab; c++) {
            double v = p->offset + 3 * test_uniform(&random), w = p->offset + 3 * test_uniform(&random);
            const bool hit = special && (test_hash(p->seed + (uint64_t)c) % 7 == 0 || c == p->vocab - 1);
            if (special && p->special == NEAR) w = v + 1e-3 * test_uniform(&random);
            if (special && p->special == EQUAL) w = v;
            if (hit && p->special == FAR) (c % 2 ? v : w) += 50, (c % 3 ? w : v) -= 60;
            const double below = r % 4 == 1 ? 150 : 0; /* then the other's probability is 0 as a float */
            if (hit && p->special == MASKED_STUDENT) v = -INFINITY, w -= below;
            if (hit && p->special == MASKED_TEACHER) w = -INFINITY, v -= below;
            if (hit && p->special == MASKED_BOTH) v = w = -INFINITY;
            if (special && p->special == ALONE) (p->seed % 2 ? v : w) = -INFINITY;
            if (hit && p->special >= PLUS_INF) (p->seed % 2 ? v : w) = p->special == PLUS_INF ? INFINITY : NAN;
            test_put(p->type, x, r * row_stride(p, p->stride) + c, (float)v);
            test_put(p->type, y, r * row_stride(p, p->teacher_stride) + c, (float)w);
        }
    }
    for (int64_t r = 0; r < p->rows; r++) {
        ((float *)test_buffer_host(&row_weight))[r] = weight_of(p, r);
        if (r == 0 || p->upstream == UPSTREAM_PER_ROW) ((float *)test_buffer_host(&upstream))[r] = upstream_of(p, r);
    }
}

static bool has(const problem *p, int output) { return p->direction != BACKWARD && !p->without[output]; }

static void prepare_split(const problem *p, int run);
static bool prepare(const problem *p, int run)
{
    const int bytes = test_type_bytes[p->type], poison = run ? 0x7f : 0xff;
    const int64_t rows = p->rows;
    const struct {
        test_buffer *buffer;
        int64_t elements;
        int bytes, at, poison;
    } list[] = {{&logits, rows * row_stride(p, p->stride), bytes, p->at, poison},
                {&teacher, rows * row_stride(p, p->teacher_stride), bytes, p->teacher_at, poison},
                {&gradient, rows * row_stride(p, p->gradient_stride), bytes, p->gradient_at, run ? 0xff : 0x5a},
                {&row_weight, rows, 4, 0, poison},
                {&upstream, p->upstream == UPSTREAM_PER_ROW ? rows : 1, 4, 0, poison}};
    for (int i = 0; i < LENGTH_OF(list); i++)
        test_buffer_size(list[i].buffer, (size_t)(list[i].elements * list[i].bytes), (size_t)(list[i].at * list[i].bytes),
                         list[i].poison);
    for (int i = 0; i < OUTPUTS; i++) test_buffer_size(&outputs[i], (size_t)rows * 4, 0, run ? 0xff : 0x5a);
    fill(p);
    for (int i = 0; i < LENGTH_OF(list); i++) test_buffer_upload(list[i].buffer);
    if (adds_losses(p)) test_fill_losses(rows, &outputs[LOSS]);
    for (int i = 0; i < OUTPUTS; i++) test_buffer_upload(&outputs[i]);

    args = {};
    args.logits = test_buffer_device(&logits), args.teacher = test_buffer_device(&teacher);
    args.row_weight = p->weighted ? (const float *)test_buffer_device(&row_weight) : NULL;
    args.upstream = p->upstream ? (const float *)test_buffer_device(&upstream) : NULL;
    args.upstream_per_row = p->upstream == UPSTREAM_PER_ROW;
    float **const out[OUTPUTS] = {&args.loss, &args.lse, &args.teacher_lse, &args.entropy};
    for (int i = 0; i < OUTPUTS; i++) *out[i] = p->without[i] ? NULL : (float *)test_buffer_device(&outputs[i]);
    args.dlogits = p->in_place ? test_buffer_device(&logits) : test_buffer_device(&gradient);
    args.rows = rows, args.vocab = p->vocab, args.logits_stride = p->stride, args.teacher_stride = p->teacher_stride;
    args.dlogits_stride = p->in_place ? 0 : p->gradient_stride;
    args.logit_scale = p->scale, args.teacher_scale = p->teacher_scale;
    args.softcap = p->softcap, args.teacher_softcap = p->teacher_softcap;
    args.beta = p->beta, args.divergence = p->divergence, args.path = p->path;
    args.upstream_value = test_upstream_value(p), args.accumulate_loss = adds_losses(p);
    if (p->ranks) prepare_split(p, run);
    return true;
}

/* ---- Columns split over virtual ranks, one after another ----------------------------------------------------------------- */

static test_buffer workspace;

static bool twice(const problem *p) { return LK_KL_HAS_BETWEEN(p->divergence); }

/* Whether the call gathers by itself. Else there are three calls, or four. */
static bool gathers(const problem *p) { return p->direction == BOTH || p->seed / 7 % 2 == 0; }

static lk_kl_parallel_args slice_of(const problem *p, int rank)
{
    lk_kl_parallel_args x = {};
    lk_kl_args &a = x.common = args;
    const int64_t first = test_ranks.cut[rank], at = first * test_type_bytes[p->type];
    a.vocab = test_ranks.cut[rank + 1] - first;
    a.logits = (const char *)args.logits + at, a.teacher = (const char *)args.teacher + at, a.dlogits = (char *)args.dlogits + at;
    a.logits_stride = row_stride(p, p->stride), a.teacher_stride = row_stride(p, p->teacher_stride);
    a.dlogits_stride = p->in_place ? 0 : row_stride(p, p->gradient_stride);
    if (a.vocab == 0 && rank % 2) a.logits = a.teacher = NULL, a.dlogits = NULL; /* an empty tensor, as some frameworks have it */
    test_act_as(&x.parallel, rank, p);
    test_give_states(&x, rank);
    return x;
}

/* Poisons what the calls of ranks leave to each other. */
static void prepare_split(const problem *p, int run)
{
    test_cut_columns(p->ranks, p->vocab, p->seed);
    test_poison_states((size_t)p->rows * 32, twice(p) ? 2 : 1, run);
    test_buffer_size(&workspace, test_ranks.block * (size_t)(p->ranks + 1) + 256, 128, run ? 0xff : 0x5a);
    test_buffer_upload(&workspace);
}

/* A call of a rank with the workspace that it asks for. */
static lk_status call_rank(const problem *p, int call, int rank, bool results)
{
    lk_kl_parallel_args x = slice_of(p, rank);
    const bool gathered = gathers(p);
    if (gathered) x.parallel.all_gather = test_gather;
    if (gathered && results && p->seed % 2 && !(p->without[LOSS] && p->without[ENTROPY])) x.states = NULL;
    if (!results) x.common.loss = x.common.lse = x.common.teacher_lse = NULL;
    if (p->direction == BACKWARD) x.common.entropy = NULL;
    const lk_status asked = split_query_of[call][p->type](&x, &x.common.workspace_bytes);
    const size_t most = gathered && call != BACKWARD ? workspace.bytes : 0;
    if (!test_that(asked == LK_OK && x.common.workspace_bytes <= most && (x.common.workspace_bytes > 0) == (most > 0 && p->rows > 0)))
        test_detail("a query: %s, %zu bytes; %s", lk_last_error(), x.common.workspace_bytes, describe(p));
    x.common.workspace = x.common.workspace_bytes ? test_buffer_device(&workspace) : NULL;
    if (results && adds_losses(p)) test_set_losses(&outputs[LOSS]);
    const lk_status status = split_call_of[call][p->type](&x, test.stream);
    if (status || !results) return status;
    const float *const out[] = {x.common.loss, x.common.lse, x.common.teacher_lse, x.common.entropy};
    const int one = (int)(p->seed % OUTPUTS);
    if (has(p, one)) test_same_on_ranks(out[one], p->rows, rank);
    return status;
}

static lk_status launch(const problem *p)
{
    if (p->ranks) return test_split_calls(p, call_rank, gathers(p));
    if (adds_losses(p)) test_set_losses(&outputs[LOSS]);
    return call_of[p->direction][p->type](&args, test.stream);
}

static void collect(const problem *p)
{
    test_buffer *const all[] = {&logits, &teacher, &gradient, &row_weight, &upstream, &test_states, &test_tables, &workspace};
    for (int i = 0; i < LENGTH_OF(all) - (p->ranks ? 0 : 3); i++) test_buffer_download(all[i]);
    for (int i = 0; i < OUTPUTS; i++) test_buffer_download(&outputs[i]);
}

/* Bits, and that nothing else was written. */
static void settle(const problem *p, bool keep, const char *what)
{
    for (int i = 0; i < OUTPUTS; i++) {
        if (has(p, i))
            test_settle(&outputs[i], &kept[i], &kept_bytes[i], keep, p->rows, 1, 1, 4, output_name[i], what, describe(p));
        test_buffer_untouched(&outputs[i], output_name[i], describe(p));
    }
    test_buffer *const out = p->in_place ? &logits : &gradient;
    if (p->direction != FORWARD)
        test_settle(out, &kept[OUTPUTS], &kept_bytes[OUTPUTS], keep, p->rows, p->vocab,
                    row_stride(p, p->in_place ? p->stride : p->gradient_stride), test_type_bytes[p->type], "dlogits", what,
                    describe(p));
    test_buffer_untouched(&logits, "logits", describe(p));
    test_buffer_untouched(&teacher, "teacher", describe(p));
    test_buffer_untouched(&gradient, "dlogits", describe(p));
    if (!p->ranks) return;
    test_buffer *const between[] = {&test_states, &test_tables, &workspace}; /* only the zones around them stay as they were */
    for (int i = 0; i < LENGTH_OF(between); i++) {
        test_buffer_accept_all(between[i]);
        test_buffer_untouched(between[i], "states or workspace", describe(p));
    }
}

/* ---- The reference ------------------------------------------------------------------------------------------------------- */

/* A tensor's row in double: log p, p, the softcap's slope, and the bound of log p's error. */
typedef struct {
    double *z, *log_p, *p, *slope, *error, lse;
    size_t bytes[5];
} reference;
static reference student_row, teacher_row;

static void refer(reference *r, const problem *p, const void *x, int64_t at, float given_scale, float softcap)
{
    double **const all[] = {&r->z, &r->log_p, &r->p, &r->slope, &r->error};
    for (int i = 0; i < 5; i++) *all[i] = (double *)test_room(*all[i], &r->bytes[i], (size_t)p->vocab * sizeof(double));
    const double scale = given_scale == 0 ? 1 : (double)given_scale, cap = (double)softcap;
    double most = -INFINITY, sum = 0, size = 0;
    bool bad = false; /* no probabilities */
    for (int64_t c = 0; c < p->vocab; c++) {
        const double v = (double)test_get(p->type, x, at + c), t = cap > 0 ? tanh(scale * v / cap) : 0;
        r->z[c] = cap > 0 ? cap * t : scale * v, r->slope[c] = cap > 0 ? 1 / (cosh(scale * v / cap) * cosh(scale * v / cap)) : 1;
        bad = bad || isnan(r->z[c]) || r->z[c] == INFINITY;
        most = fmax(most, r->z[c]);
        if (isfinite(r->z[c])) size = fmax(size, fabs(r->z[c]));
    }
    for (int64_t c = 0; c < p->vocab; c++) sum += exp(r->z[c] - most);
    r->lse = bad ? NAN : most + log(sum);
    for (int64_t c = 0; c < p->vocab; c++) {
        r->log_p[c] = bad || most == -INFINITY ? NAN : r->z[c] - r->lse, r->p[c] = exp(r->log_p[c]);
        /* x - max, times scale, minus the sum's log: each rounded; the sum's own error, and with a softcap that of z, which in
         * logits of 16 bits is softcap 2^-20 besides. */
        const double below = isfinite(r->z[c]) ? most - r->z[c] : 0, capped = p->type == TEST_F32 || cap > 64 ? 0 : 8 * cap;
        r->error[c] = 0x1p-23 * (6 + 2 * below + 2 * log(sum) + (cap > 0 ? 8 * size + capped : 0));
    }
    if (most == -INFINITY && !bad) r->lse = -INFINITY;
    bool nan = false;
    for (int64_t c = 0; c < p->vocab; c++) nan = nan || isnan(r->z[c]);
    if (most == INFINITY && !nan) r->lse = INFINITY;
}

/* What a row's results should be, and how far off they may be. */
typedef struct {
    double loss, loss_slack, entropy, entropy_slack, mean, mean_slack; /* mean: of the gradient's formula */
} row_results;

/* w log(w / other) + other - w, never negative; its bound: rounding, and errors of log w and log other. */
static double term(double w, double other, double a, double error, double error_other, double *slack)
{
    const double e = 0x1p-23;
    if (isnan(w) || isnan(other)) return NAN;
    if (w < 0x1p-149) return *slack += other * (error_other + 4 * e) + 0x1p-120, other; /* a float may be 0 already */
    if (a == INFINITY) return INFINITY;
    const double value = fabs(a) < 1e-3 ? w * a * a * (0.5 - a / 6 + a * a / 24) : w * (a + expm1(-a));
    *slack += fabs(w * a) * error + fabs(other - w) * error_other + 8 * e * value + 0x1p-120;
    if (fabs(a) > 0.2) *slack += 4 * e * (w * (1 + fabs(a)) + other) + e * (other * fabs(log(other)) + w * fabs(log(w)));
    if (w < 0x1p-120) *slack += w * (1 + fabs(a));
    return value;
}

static row_results results_of(const problem *p)
{
    row_results r = {};
    const double beta = p->beta == 0 ? 0.5 : (double)p->beta;
    for (int64_t c = 0; c < p->vocab; c++) {
        const double lp = student_row.log_p[c], lq = teacher_row.log_p[c], P = student_row.p[c], Q = teacher_row.p[c];
        const double ep = student_row.error[c], eq = teacher_row.error[c], m = beta * Q + (1 - beta) * P;
        if (p->divergence == LK_KL_FORWARD) r.loss += term(Q, P, lq - lp, eq, ep, &r.loss_slack);
        if (p->divergence == LK_KL_REVERSE) r.loss += term(P, Q, lp - lq, ep, eq, &r.loss_slack);
        if (p->divergence == LK_KL_JENSEN_SHANNON) {
            double slack = 0;
            const double of_p = term(P, m, P == 0 ? 0 : log(P / m), ep + eq, ep + eq, &slack);
            r.mean += of_p, r.mean_slack += slack;
            r.loss += (1 - beta) * of_p, r.loss_slack += (1 - beta) * slack, slack = 0;
            r.loss += beta * term(Q, m, Q == 0 ? 0 : log(Q / m), ep + eq, ep + eq, &slack), r.loss_slack += beta * slack;
        }
        if (p->divergence == LK_KL_TOTAL_VARIATION) {
            /* Where p and q are closer than their errors, the column may count to either side. */
            const double off = P * ep + Q * eq + 0x1p-22 * (P + Q);
            r.loss += fabs(Q - P) / 2, r.loss_slack += off / 2 + 0x1p-120;
            if (Q > P) r.mean += P;
            r.mean_slack += P * ep + (fabs(Q - P) <= off ? P : 0);
        }
        if (P != 0) r.entropy -= P * lp, r.entropy_slack += P * (1 + fabs(lp)) * (ep + 0x1p-22);
    }
    r.loss_slack += 16 * 0x1p-23 * r.loss, r.mean_slack += 16 * 0x1p-23 * r.mean, r.entropy_slack += 16 * 0x1p-23 * r.entropy;
    if (p->divergence == LK_KL_REVERSE) r.mean = r.loss, r.mean_slack = r.loss_slack;
    return r;
}

static void verify_number(const problem *p, int64_t row, int output, double want, double slack)
{
    if (!has(p, output)) return;
    const float got = ((const float *)test_buffer_back(&outputs[output]))[row];
    if (!test_near(TEST_F32, got, want, isfinite(want) ? slack : 0))
        test_detail("%s[%lld] is %.9g, want %.9g +- %.3g; %s", output_name[output], (long long)row, (double)got, want, slack,
                    describe(p));
}

static void verify(const problem *p)
{
    const double beta = p->beta == 0 ? 0.5 : (double)p->beta, scale = p->scale == 0 ? 1 : (double)p->scale;
    const test_buffer *const out = p->in_place ? &logits : &gradient;
    const int64_t out_stride = row_stride(p, p->in_place ? p->stride : p->gradient_stride);
    for (int64_t row = 0; row < p->rows; row++) {
        refer(&student_row, p, test_buffer_host(&logits), row * row_stride(p, p->stride), p->scale, p->softcap);
        refer(&teacher_row, p, test_buffer_host(&teacher), row * row_stride(p, p->teacher_stride), p->teacher_scale,
              p->teacher_softcap);
        const double w = (double)weight_of(p, row), size = fabs(p->offset) + 80;
        const row_results r = results_of(p);
        const double gradient_of_loss = test_upstream_times(p) * (double)upstream_of(p, row);
        const double there = adds_losses(p) ? (double)test_loss_before(row) : 0;
        if (has(p, LOSS) && w >= 0 && !test_that(!((double)((const float *)test_buffer_back(&outputs[LOSS]))[row] < there)))
            test_detail("what is added to loss[%lld] is negative; %s", (long long)row, describe(p));
        verify_number(p, row, LOSS, there + (w == 0 ? 0 : w * r.loss), 0x1p-23 * fabs(there) + (w == 0 ? 0 : fabs(w) * r.loss_slack));
        verify_number(p, row, LSE, w == 0 ? 0 : student_row.lse, 8 * 0x1p-23 * size);
        verify_number(p, row, TEACHER_LSE, w == 0 ? 0 : teacher_row.lse, 8 * 0x1p-23 * size);
        verify_number(p, row, ENTROPY, w == 0 ? 0 : isnan(student_row.log_p[0]) ? NAN : r.entropy, w == 0 ? 0 : r.entropy_slack);
        for (int64_t c = 0; c < p->vocab && p->direction != FORWARD; c++) {
            const double P = student_row.p[c], Q = teacher_row.p[c], ep = student_row.error[c], eq = teacher_row.error[c];
            const double m = beta * Q + (1 - beta) * P, d = student_row.log_p[c] - teacher_row.log_p[c], e = 0x1p-22;
            const double slope = student_row.slope[c], before = gradient_of_loss * w * scale, factor = before * slope;
            const double off_p = P == 0 ? 0 : P * (ep + e * (1 + fabs(student_row.log_p[c])));
            const double off_q = Q == 0 ? 0 : Q * (eq + e * (1 + fabs(teacher_row.log_p[c])));
            double want = P - Q, slack = off_p + off_q;
            if (p->divergence == LK_KL_TOTAL_VARIATION) {
                const double along = isnan(r.loss) ? NAN : r.mean - (Q > P);
                want = P * along, slack = off_p * fabs(along) + P * r.mean_slack;
                if (fabs(Q - P) <= off_p + off_q) slack += P; /* it may count to the other side */
            } else if (p->divergence != LK_KL_FORWARD && P < 0x1p-149) want = slack = 0; /* as a float it is 0 */
            else if (p->divergence != LK_KL_FORWARD) {
                const bool reverse = p->divergence == LK_KL_REVERSE;
                const double along = reverse ? d : log(P / m), mixed = reverse ? 1 : 1 - beta;
                want = mixed * P * (along - r.mean);
                slack = mixed * (P * fabs(along - r.mean) * (ep + e * (2 + fabs(student_row.log_p[c]))) +
                                 P * (ep + eq + e * fabs(along) + r.mean_slack));
            }
            /* The slope's error, as lk/cross_entropy.md has it; |scale logits / softcap| is below log(4 / slope) / 2. */
            const double off = slope > 0 ? slope * (5 + 1.5 * log(4 / slope)) * e + 0x1p-59 : 0x1p-59;
            const double bend = p->softcap > 0 ? fabs(before * want) * off : 0;
            want = w == 0 ? 0 : factor * want;
            slack = w == 0 ? 0 : fabs(factor) * (slack + 0x1p-120) + 16 * e * fabs(want) + 0x1p-140 + bend;
            const float got = test_get(p->type, test_buffer_back(out), row * out_stride + c);
            if (!test_near(p->type, got, want, isfinite(want) ? slack : 0))
                test_detail("dlogits[%lld, %lld] is %.9g, want %.9g +- %.3g (log p %.9g, log q %.9g); %s", (long long)row,
                            (long long)c, (double)got, want, slack, student_row.log_p[c], teacher_row.log_p[c], describe(p));
        }
    }
}

static const test_op<problem> op = {describe, prepare, launch, collect, verify, settle};
static void check(const problem *p) { test_twice(op, p); }

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

/* A length of each kind: fewer columns than a vector, than lanes, odd ones, a block's, and more than slots of a warp or a block. */
static void lengths(int type, int direction, int path)
{
    const int64_t list[] = {1, 2, 7, 8, 33, 64, 257, 1000, 2051, 8 * 32 * 16 / test_type_bytes[type] + 5, 20011};
    for (int i = 0; i < LENGTH_OF(list); i++)
        for (int k = 0; k < (test.small ? 1 : DIVERGENCES); k++) {
            problem p = plain(type, direction, path, list[i] > 5000 ? 2 : i % 3 + 2, list[i]);
            p.divergence = (i + type + direction + k) % DIVERGENCES;
            if (test.small && list[i] > 5000 && (type + direction + path) % 3) continue;
            check(&p);
        }
}

/* Where rows start, and where they lie to each other. */
static void places(int type, int direction, int path)
{
    const int vec = 16 / test_type_bytes[type];
    for (int i = 0; i < test_pick(12, 6); i++) {
        problem p = plain(type, direction, path, 3, i % 2 ? 77 : 640);
        p.divergence = i % DIVERGENCES, p.upstream = i % 3, p.weighted = i % 4 == 1;
        p.at = i % vec, p.teacher_at = i % 3 ? p.at : 1, p.gradient_at = i % 2 ? p.at : 3 % vec;
        p.stride = p.vocab + i % 5, p.teacher_stride = i % 3 == 1 ? p.stride : p.vocab + 2;
        p.gradient_stride = i % 4 ? 0 : p.vocab + 7;
        p.in_place = direction != FORWARD && i % 3 == 2;
        check(&p);
    }
}

static void options(int type, int direction, int path)
{
    for (int i = 0; i < 26; i++) {
        if (test.small && i < 24 && (i + type + direction + path) % 4) continue;
        problem p = plain(type, direction, path, 5, i % 2 ? 300 : 2051);
        p.divergence = i % DIVERGENCES, p.seed += (uint64_t)i;
        if (i & 1) p.scale = 0.5f, p.teacher_scale = 1.5f;
        if (i & 2) p.softcap = 4;
        if (i & 4) p.teacher_softcap = i & 8 ? 30 : 2;
        if (i & 8) p.weighted = true;
        p.beta = i & 16 ? 0.9f : i & 8 ? 0.1f : 0;
        p.upstream = i % 3;
        for (int k = 0; k < OUTPUTS; k++) p.without[k] = direction != BACKWARD && i % 5 == 1 + k && i > 4;
        if (i == 20 && direction == FORWARD) p.without[LOSS] = p.without[ENTROPY] = true;
        /* 10000 is too large for one multiply-add. */
        p.offset = i >= 24 ? -10000 : i % 7 == 3 ? 300 : i == 9 || i == 16 ? 10000 : 0;
        check(&p);
    }
}

static void specials(int type, int direction, int path)
{
    for (int special = NOTHING + 1; special < SPECIALS; special++)
        for (int k = 0; k < DIVERGENCES; k++) {
            if (test.small && (special + k + type + direction + path) % 3) continue;
            problem p = plain(type, direction, path, 2, k == 1 ? 1300 : 40);
            p.special = special, p.divergence = k, p.seed += (uint64_t)(special + k);
            p.softcap = special == NEAR && type == TEST_F32 && k == 2 ? 20 : 0, p.teacher_softcap = p.softcap;
            check(&p);
            p.beta = 0x1p-30f; /* 1 - beta is 1 */
            if (k == LK_KL_JENSEN_SHANNON && special != NEAR) check(&p); /* there the loss is below what 2^-22 of log(p / m) adds */
        }
}

/* As many rows as several blocks have, some of them without a row for each team. */
static void many_rows(int type, int direction, int path)
{
    problem p = plain(type, direction, path, test_pick(1003, 61), path == LK_KL_CLUSTER ? 9 : 20);
    p.weighted = true;
    check(&p);
}

static void graphs(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 5, test_pick(700, 140));
    p.divergence = LK_KL_REVERSE;
    check(&p); /* leaves its bits in kept */
    test_graph(op, &p);
}

/* A column per rank: a masked one leaves its rank without a share of one tensor or of both. */
static void rank_columns(int type, int direction, int path)
{
    for (int special = NOTHING; special < SPECIALS; special++)
        for (int k = 0; k < DIVERGENCES; k++) {
            problem p = plain(type, direction, path, 1, 8);
            p.special = special, p.divergence = k, p.seed = (uint64_t)(30 * k + 3 * special); /* slices are even */
            check(&p);
        }
}

/* With columns split over ranks: the i-th time. */
static void of_ranks(int i, int type, int direction, int path)
{
    lengths(type, direction, path), options(type, direction, path), specials(type, direction, path);
    if (i % 2) places(type, direction, path);
    if (i == 2) many_rows(type, direction, path);
    if (i == 1 && path <= LK_KL_WARP) graphs(type, direction, path);
    if (i == 3) rank_columns(type, direction, path);
}

static void all_themes(void)
{
    static const test_theme themes[] = {{"lengths", lengths}, {"places", places},       {"options", options},
                                        {"special values", specials}, {"many rows", many_rows}, {"graphs", graphs},
                                        {"split over ranks", test_split<of_ranks>}};
    for (int direction = 0; direction < DIRECTIONS; direction++)
        for (int path = 0; path < PATHS; path++)
            if (path != LK_KL_CLUSTER || test_clusters())
                test_themes(themes, LENGTH_OF(themes), direction, path, direction_name[direction], path_name[path]);
}

/* Where p and q nearly agree the loss keeps its digits: the naive sum q log(q / p) of floats is off by 1e-7 there, all of it. */
static void digits(void)
{
    for (int i = 0; i < 2 * DIVERGENCES; i++) {
        problem p = plain(TEST_F32, FORWARD, LK_KL_AUTO, 1, 5000);
        p.special = NEAR, p.divergence = i / 2, p.ranks = i % 2 ? 3 : 0;
        check(&p);
        refer(&student_row, &p, test_buffer_host(&logits), 0, 0, 0), refer(&teacher_row, &p, test_buffer_host(&teacher), 0, 0, 0);
        const double want = results_of(&p).loss, got = (double)*(const float *)kept[LOSS];
        if (!test_within(fabs(got - want) / want, 1e-4)) test_detail("%.9g, want %.9g; %s", got, want, describe(&p));
    }
}

/* Without the switch fewer rows than two per SM get clusters, and many short ones have more vectors for a thread. */
static void invariant(int type)
{
    static test_buffer x, y, out[OUTPUTS];
    static const int64_t lengths[] = {40, 1000, 4096, 24000};
    for (int i = 0; i < DIVERGENCES * LENGTH_OF(lengths); i++) {
        if (test.small && i % 3 != type) continue;
        const int64_t vocab = lengths[i / DIVERGENCES], rows = (vocab > 1000 ? 3 : 17) * test.sms;
        test_rows tensors[2 + OUTPUTS] = {};
        char what[99];
        args = {};
        args.logits = test_invariant_input(&x, type, rows * vocab, 1), args.teacher = test_invariant_input(&y, type, rows * vocab, 2);
        args.rows = rows, args.vocab = vocab, args.divergence = i % DIVERGENCES, args.batch_invariant = 1 + i % 2;
        tensors[0] = {(void **)&args.logits, (size_t)vocab * (size_t)test_type_bytes[type], NULL};
        tensors[1] = {(void **)&args.teacher, tensors[0].row_bytes, NULL};
        float **const field[OUTPUTS] = {&args.loss, &args.lse, &args.teacher_lse, &args.entropy};
        for (int k = 0; k < OUTPUTS; k++) {
            test_buffer_size(&out[k], (size_t)rows * 4, 0, 0x5a);
            *field[k] = (float *)test_buffer_device(&out[k]), tensors[2 + k] = {(void **)field[k], 4, &out[k]};
        }
        snprintf(what, sizeof what, "%s %s, %lld columns", test_type_name[type], divergence_name[i % DIVERGENCES], (long long)vocab);
        test_invariant(tensors, 2 + OUTPUTS, &args.rows, 1, what, [&] { return call_of[FORWARD][type](&args, test.stream); });
        static test_buffer states; /* those of a rank that has all columns */
        lk_kl_parallel_args x = {};
        x.common = args, x.parallel.vocab_total = vocab, x.parallel.ranks = 1;
        x.common.loss = x.common.lse = x.common.teacher_lse = x.common.entropy = NULL;
        test_buffer_size(&states, (size_t)rows * 32, 0, 0x5a);
        x.states = test_buffer_device(&states);
        test_rows of_rank[] = {{(void **)&x.common.logits, tensors[0].row_bytes, NULL},
                               {(void **)&x.common.teacher, tensors[0].row_bytes, NULL}, {&x.states, 32, &states}};
        test_invariant(of_rank, 3, &x.common.rows, 1, what, [&] { return split_call_of[FORWARD][type](&x, test.stream); });
    }
}

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

typedef test_bad_call<lk_kl_args> bad_call;

static void expect_error(int type, int direction, const bad_call *bad)
{
    problem p = plain(type, direction, LK_KL_AUTO, 3, 40);
    prepare(&p, 0);
    if (bad->spoil) bad->spoil(&args);
    const bool refused = test_refused(bad, direction);
    size_t asked = TEST_NOT_ASKED;
    const lk_status status = launch(&p), answer = query_of[direction][type](&args, &asked);
    test_expect(status, refused ? bad->want : LK_OK, bad->field, "lk_kl", direction_name[direction], type);
    test_expect_query(answer, refused ? bad->asked : LK_OK, asked, bad->field);
    if (!test_that(answer || asked == 0)) test_detail("%s: %zu bytes of workspace", bad->field, asked);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int i = 0; i < OUTPUTS; i++) test_expect_unwritten(status, &outputs[i], output_name[i], bad->field);
    test_expect_unwritten(status, &gradient, "dlogits", bad->field);
}

static void too_many(lk_kl_args *a) /* rows for a block each, with gaps: tensors of this size would overlap here */
{
    a->path = LK_KL_BLOCK, a->rows = ((int64_t)1 << 27) + 1, a->upstream_per_row = 0;
    a->logits_stride = a->teacher_stride = a->dlogits_stride = 41, a->loss = a->lse = a->entropy = NULL;
}

static void errors(int type, int direction)
{
    static const bad_call list[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_NULL, LK_OK, "logits", SPOIL(a->logits = NULL)},
        {LK_ERR_NULL, LK_OK, "teacher", SPOIL(a->teacher = NULL)},
        {LK_ERR_NULL, LK_OK, "dlogits", SPOIL(a->dlogits = NULL), false, true},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "rows", SPOIL(a->rows = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab", SPOIL(a->vocab = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab", SPOIL(a->vocab = ((int64_t)1 << 30) + 1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "logits_stride", SPOIL(a->logits_stride = 39)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "teacher_stride", SPOIL(a->teacher_stride = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dlogits_stride", SPOIL(a->dlogits_stride = 39), false, true},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "2^62", SPOIL(a->logits_stride = (int64_t)1 << 62)},
        {LK_ERR_SHAPE, LK_OK, "dlogits", SPOIL(a->dlogits = (void *)a->teacher), false, true},
        {LK_ERR_SHAPE, LK_OK, "loss", SPOIL(a->loss = a->entropy), true, false},
        {LK_ERR_VALUE, LK_ERR_VALUE, "logit_scale", SPOIL(a->logit_scale = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "logit_scale", SPOIL(a->logit_scale = INFINITY)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "teacher_scale", SPOIL(a->teacher_scale = NAN)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "softcap", SPOIL(a->softcap = -2)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "teacher_softcap", SPOIL(a->teacher_softcap = 1e-35f)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "beta", SPOIL(a->beta = 1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "beta", SPOIL(a->beta = NAN)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "divergence", SPOIL(a->divergence = 4)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "path", SPOIL(a->path = -1)},
        {LK_ERR_PATH, LK_ERR_PATH, "rows", SPOIL(too_many(a))},
        {LK_ERR_ALIGNMENT, LK_OK, "logits", SPOIL(MOVED(a->logits, 1))},
        {LK_ERR_ALIGNMENT, LK_OK, "teacher", SPOIL(MOVED(a->teacher, 1))},
        {LK_ERR_ALIGNMENT, LK_OK, "lse", SPOIL(MOVED(a->lse, 2)), true, false},
        {LK_ERR_ALIGNMENT, LK_OK, "upstream", SPOIL(MOVED(a->upstream, 2)), false, true},
        {LK_ERR_NULL, LK_OK, "logits", SPOIL((a->logits = NULL, a->vocab = 40, MOVED(a->teacher, 1)))},
    };
    static const bad_call many = {LK_ERR_PATH, LK_ERR_PATH, "batch_invariant takes 2^27 rows",
                                  SPOIL((too_many(a), a->path = 0, a->batch_invariant = 1))};
    for (int i = 0; i < LENGTH_OF(list); i++) expect_error(type, direction, &list[i]);
    if (direction == FORWARD) expect_error(type, direction, &many);
    problem p = plain(type, direction, LK_KL_AUTO, 3, 40);
    prepare(&p, 0);
    if (direction == FORWARD) args.loss = args.lse = args.teacher_lse = args.entropy = NULL;
    if (direction == FORWARD)
        test_expect(launch(&p), LK_ERR_NULL, "every output", "lk_kl", direction_name[direction], type);
    args = {}, args.vocab = 5;
    if (!test_that(launch(&p) == LK_OK)) test_detail("no rows: %s", lk_last_error());
    if (!test_that(call_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL is taken");
}

/* Wrong arguments of ranks, and a callback that fails: its status is the call's. */
static void rank_errors(int type)
{
    static const test_bad_rank<lk_kl_parallel_args> cases[] = {
        {FORWARD, LK_OK, LK_OK, "", SPOIL((void)a)},
        {BETWEEN, LK_OK, LK_OK, "", SPOIL((void)a)},
        {FINISH, LK_OK, LK_OK, "", SPOIL((void)a)},
        {FINISH, LK_OK, LK_OK, "", SPOIL(a->states = NULL)},
        {FINISH, LK_OK, LK_OK, "", SPOIL(a->common.logits = a->common.teacher = NULL)},
        {BACKWARD, LK_OK, LK_OK, "", SPOIL((void)a)},
        {FORWARD, LK_OK, LK_OK, "", SPOIL(a->common.rows = 0, a->states = NULL)},
        {BOTH, LK_OK, LK_OK, "", SPOIL(a->common.rows = 0, a->common.workspace = NULL)}, /* and gathers nothing */
        TEST_BAD_RANKS(FORWARD, common.vocab), TEST_BAD_RANKS(BETWEEN, common.vocab), TEST_BAD_RANKS(FINISH, common.vocab),
        TEST_BAD_RANKS(BACKWARD, common.vocab), TEST_BAD_RANKS(BOTH, common.vocab),
        {BOTH, LK_ERR_SHAPE, LK_ERR_SHAPE, "rows is -1", SPOIL(a->common.rows = -1)},
        {BETWEEN, LK_ERR_VALUE, LK_ERR_VALUE, "divergence is 1; this call is for LK_KL_JENSEN_SHANNON and _TOTAL_VARIATION",
         SPOIL(a->common.divergence = LK_KL_REVERSE)},
        {FINISH, LK_ERR_VALUE, LK_ERR_VALUE, "divergence is 4", SPOIL(a->common.divergence = 4)},
        {FORWARD, LK_ERR_NULL, LK_OK, "states is NULL", SPOIL(a->states = NULL)},
        {FORWARD, LK_ERR_NULL, LK_OK, "teacher is NULL", SPOIL(a->common.teacher = NULL)},
        {BETWEEN, LK_ERR_NULL, LK_OK, "all_states is NULL", SPOIL(a->all_states = NULL)},
        {FINISH, LK_ERR_NULL, LK_OK, "all_states is NULL", SPOIL(a->all_states = NULL)},
        {FINISH, LK_ERR_NULL, LK_OK, "every output is NULL",
         SPOIL(a->common.loss = a->common.lse = a->common.teacher_lse = a->common.entropy = NULL, a->states = NULL)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "states is NULL", SPOIL(a->states = NULL)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "dlogits is NULL", SPOIL(a->common.dlogits = NULL)},
        {FORWARD, LK_ERR_ALIGNMENT, LK_OK, "states", SPOIL(MOVED(a->states, 8))},
        {FINISH, LK_ERR_SHAPE, LK_OK, "states and loss overlap", SPOIL(a->states = a->common.loss)},
        {FINISH, LK_ERR_SHAPE, LK_OK, "all_states and states overlap", /* with the last rank's */
         SPOIL(a->states = (char *)(uintptr_t)a->all_states + 32 * (2 * a->common.rows - 1))},
        {BOTH, LK_ERR_NULL, LK_ERR_NULL, "parallel.all_gather is NULL; without it call forward, finish and backward",
         SPOIL(a->parallel.all_gather = NULL)},
        {BOTH, LK_ERR_WORKSPACE, LK_OK, "workspace is NULL", SPOIL(a->common.workspace = NULL)},
        {FORWARD, LK_ERR_WORKSPACE, LK_OK, "workspace_bytes is 0",
         SPOIL(a->parallel.all_gather = test_broken_gather, a->common.workspace_bytes = 0)},
        {BOTH, (lk_status)77, LK_OK, "parallel.all_gather returned 77", SPOIL((void)a)},
        {FORWARD, (lk_status)77, LK_OK, "parallel.all_gather returned 77", SPOIL(a->parallel.all_gather = test_broken_gather)},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        const int call = cases[i].call;
        problem p = plain(type, call < DIRECTIONS ? call : FORWARD, LK_KL_AUTO, 3, 40);
        p.ranks = 2, p.divergence = LK_KL_JENSEN_SHANNON;
        prepare(&p, 0);
        lk_kl_parallel_args x = slice_of(&p, 0);
        if (call == BOTH) x.parallel.all_gather = test_broken_gather;
        x.common.workspace = test_buffer_device(&workspace), x.common.workspace_bytes = workspace.bytes;
        const lk_status status = test_expect_rank(cases, i, &x, split_call_of[call][type], split_query_of[call][type]);
        for (int k = 0; k < OUTPUTS; k++) test_expect_unwritten(status, &outputs[k], output_name[k], cases[i].says);
        test_expect_unwritten(status, &gradient, "dlogits", cases[i].says);
        if (status < 0) test_expect_unwritten(status, &test_states, "states", cases[i].says);
    }
    for (int call = 0; call < SPLIT_CALLS; call++)
        if (!test_that(split_call_of[call][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL: %s", lk_last_error());
}

/* ---- Random draws -------------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const r = &state;
    int path = (int)test_below(r, PATHS);
    if (path == LK_KL_CLUSTER && !test_clusters()) path = LK_KL_AUTO;
    problem p = plain((int)test_below(r, TEST_TYPES), (int)test_below(r, DIRECTIONS), path, 1 + test_below(r, 9),
                      1 + (test_chance(r, 4) ? test_below(r, 3000) : test_below(r, 70)));
    const int vec = 16 / test_type_bytes[p.type];
    p.seed = seed, p.divergence = (int)test_below(r, DIVERGENCES);
    if (test_chance(r, 2)) p.stride = p.vocab + test_below(r, 9);
    if (test_chance(r, 2)) p.teacher_stride = test_chance(r, 2) && p.stride ? p.stride : p.vocab + test_below(r, 9);
    if (test_chance(r, 2)) p.gradient_stride = p.vocab + test_below(r, 9);
    if (test_chance(r, 2)) p.at = (int)test_below(r, vec);
    p.teacher_at = test_chance(r, 2) ? p.at : (int)test_below(r, vec), p.gradient_at = test_chance(r, 2) ? p.at : (int)test_below(r, vec);
    p.in_place = p.direction != FORWARD && test_chance(r, 3), p.weighted = test_chance(r, 3), p.upstream = (int)test_below(r, 3);
    if (test_chance(r, 3)) p.scale = (float)(0.2 + fabs(test_uniform(r))), p.teacher_scale = (float)(0.2 + fabs(test_uniform(r)));
    if (test_chance(r, 4)) p.softcap = 5;
    if (test_chance(r, 4)) p.teacher_softcap = 8;
    if (test_chance(r, 2)) p.beta = (float)(0.05 + 0.9 * fabs(test_uniform(r)));
    if (test_chance(r, 3)) p.special = (int)test_below(r, SPECIALS);
    if (test_chance(r, 3)) p.ranks = 1 + (int)test_below(r, 9);
    return p;
}

/* ---- On the GPU only: beyond 2^31 elements, and a busy device -------------------------------------------------------- */

#if !defined(LK_SIMT)

/* A row's results, from how often each pair of a student's and a teacher's value is in it: there are 256 of each. */
typedef struct {
    double lse[2], loss, mean, spread; /* spread: of what errors of log p and log q are multiplied by */
    double tied;                       /* TOTAL_VARIATION: p of the columns that may count to either side */
} huge_row;

#define HUGE_TIE 1e-3 /* of log p - log q. Its values are 1/32 apart, one of them near 0, since both rows have nearly equal sums */

static double huge_z(int value) { return value / 32.0 - 4; }

/* log p, log q, and log(p / m); m is of Jensen-Shannon with beta 1/2. */
static double huge_log_of_m(double log_p, double log_q) { return log_p - log((exp(log_p) + exp(log_q)) / 2); }

static huge_row huge_results(int64_t base, int64_t n, int64_t vocab, int divergence)
{
    static int64_t often[256][256];
    huge_row r = {};
    double sum[2] = {};
    memset(often, 0, sizeof often);
    for (int64_t c = 0; c < vocab; c++) often[test_huge_number(base + c)][test_huge_number(n + base + c)]++;
    for (int v = 0; v < 256; v++)
        for (int w = 0; w < 256; w++)
            sum[0] += (double)often[v][w] * exp(huge_z(v)), sum[1] += (double)often[v][w] * exp(huge_z(w));
    r.lse[0] = log(sum[0]), r.lse[1] = log(sum[1]);
    for (int v = 0; v < 256; v++)
        for (int w = 0; w < 256; w++) {
            const double lp = huge_z(v) - r.lse[0], lq = huge_z(w) - r.lse[1], P = exp(lp), Q = exp(lq);
            const double of_p = P * huge_log_of_m(lp, lq), of_q = Q * huge_log_of_m(lq, lp), times = (double)often[v][w];
            r.spread += times * (P + Q) * (1 + fabs(lp - lq));
            const bool variation = divergence == LK_KL_TOTAL_VARIATION;
            r.mean += times * (variation ? (Q > P ? P : 0) : divergence == LK_KL_REVERSE ? P * (lp - lq) : of_p);
            r.loss += times * (variation                     ? fabs(Q - P) / 2
                               : divergence == LK_KL_FORWARD ? Q * (lq - lp)
                               : divergence == LK_KL_REVERSE ? P * (lp - lq)
                                                             : (of_p + of_q) / 2);
            if (variation && fabs(lp - lq) < HUGE_TIE) r.tied += times * P;
        }
    return r;
}

/* Forward, then backward in place, or both in one pass in place; sampled rows are recomputed here. The teacher's values follow
 * the student's. */
static void huge(int64_t rows, int64_t vocab, int path, int divergence, bool fused)
{
    const int64_t n = rows * vocab;
    lk_bf16 *const x = (lk_bf16 *)test_huge_allocate(n * 2), *const y = (lk_bf16 *)test_huge_allocate(n * 2);
    float *out[OUTPUTS] = {};
    for (int i = LOSS; i <= TEACHER_LSE; i++) {
        out[i] = (float *)test_huge_allocate(rows * 4);
        TEST_CUDA(cudaMemsetAsync(out[i], 0xc2, (size_t)rows * 4, test.stream)); /* -97 */
    }
    test_huge_fill(x, n, 0), test_huge_fill(y, n, n);
    problem p = plain(TEST_BF16, fused ? BOTH : FORWARD, path, rows, vocab);
    p.divergence = divergence, p.upstream = UPSTREAM_NULL;
    args = {};
    args.logits = x, args.teacher = y, args.dlogits = x, args.rows = rows, args.vocab = vocab;
    args.loss = out[LOSS], args.lse = out[LSE], args.teacher_lse = out[TEACHER_LSE], args.divergence = divergence, args.path = path;
    bool ran = test_launched(launch(&p), describe(&p));
    if (!fused) p.direction = BACKWARD, ran = ran && test_launched(launch(&p), describe(&p));
    enum { SAMPLES = 24, COLUMNS = 48 };
    uint64_t random = (uint64_t)(rows + vocab);
    for (int s = 0; ran && s < (vocab > 1 << 21 ? 1 : SAMPLES); s++) { /* the host is slow */
        const int64_t chosen[3] = {rows - 1, 0, rows / 2}, row = s < 3 ? chosen[s] : test_below(&random, rows), base = row * vocab;
        const huge_row r = huge_results(base, n, vocab, divergence);
        /* A chain of vocab / 256 additions loses its root; that of a warp, equal summands among them, up to half of each. */
        const double root = (16 + sqrt((double)vocab / 256)) * 0x1p-24;
        const double chain = path == LK_KL_WARP && vocab >= 1 << 24 ? (double)vocab / 256 * 0x1p-25 : root;
        const double slack = chain * (8 + fmax(r.lse[0], r.lse[1])), want[] = {r.loss, r.lse[0], r.lse[1]};
        for (int i = LOSS; i <= TEACHER_LSE; i++)
            if (!test_near(TEST_F32, test_huge_get(TEST_F32, out[i], row), want[i], i == LOSS ? slack * r.spread : slack))
                test_detail("%s[%lld] is wrong; %s", output_name[i], (long long)row, describe(&p));
        for (int i = 0; i < COLUMNS; i++) {
            const int64_t c = i == 0 ? vocab - 1 : i == 1 ? 0 : test_below(&random, vocab);
            const double lp = huge_z(test_huge_number(base + c)) - r.lse[0], lq = huge_z(test_huge_number(n + base + c)) - r.lse[1];
            const double P = exp(lp), Q = exp(lq), along = divergence == LK_KL_REVERSE ? lp - lq : huge_log_of_m(lp, lq);
            const double mixed = divergence == LK_KL_REVERSE ? 1 : 0.5;
            double gradient = divergence == LK_KL_FORWARD ? P - Q : mixed * P * (along - r.mean);
            double off = slack * (divergence == LK_KL_FORWARD ? P + Q : P * (2 + fabs(along - r.mean) + r.spread));
            if (divergence == LK_KL_TOTAL_VARIATION)
                gradient = P * (r.mean - (Q > P)), off = P * (2 * slack + r.tied + (fabs(lp - lq) < HUGE_TIE));
            if (!test_near(TEST_BF16, test_huge_get(TEST_BF16, x, base + c), gradient, off))
                test_detail("dlogits[row %lld, col %lld] is wrong; %s", (long long)row, (long long)c, describe(&p));
        }
    }
    test_huge_free();
}

static void busy(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 700, 3001);
    check(&p); /* leaves its bits in kept */
    test_busy(op, &p);
}

static void all_huge(void)
{
    static const int64_t shapes[][2] = {{70001, 32768}, {17000, 131071}, {3, 1 << 30}, {(1ll << 31) + 77, 1}};
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int path = 0; path < PATHS; path++) {
            const int64_t rows = shapes[i][0], vocab = shapes[i][1];
            if ((path == LK_KL_CLUSTER && !test_clusters()) || (path >= LK_KL_BLOCK && rows > 1 << 27)) continue;
            for (int fused = 0; fused < 2; fused++) {
                const int divergence = (i + path + 2 * fused) % DIVERGENCES;
                if (!test_begin("huge: %lld x %lld %s %s%s", (long long)rows, (long long)vocab, path_name[path],
                                divergence_name[divergence], fused ? ", forward_backward" : ""))
                    continue;
                huge(rows, vocab, path, divergence, fused);
                test_finish();
            }
        }
    static const test_theme held = {"half of the SMs held", busy};
    for (int direction = 0; direction < DIRECTIONS; direction++)
        for (int path = 0; path < PATHS; path++)
            if (path != LK_KL_CLUSTER || test_clusters())
                test_themes(&held, 1, direction, path, direction_name[direction], path_name[path]);
}

#endif

/* ---------------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    test_start(argc, argv);
    test_of_directions("errors:", errors, direction_name, DIRECTIONS);
    test_of_types("errors of ranks:", rank_errors);
    test_of_types("batch_invariant", invariant);
    all_themes();
    if (test_begin("digits f32")) digits(), test_finish();
    TEST_HUGE(all_huge);
    test_fuzz(draw, check, 300, 40);
    return test_end();
}
