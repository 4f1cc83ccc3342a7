// SPDX-License-Identifier: MIT
/* tests/linear_cross_entropy_ids.cu - lk/linear_cross_entropy_ids.cuh and lk/linear_cross_entropy_ids_parallel.cuh against the
 * formulas of linear_cross_entropy.cuh and cross_entropy_ids.cuh in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits. Bytes that are not outputs must not
 * change. The bounds: a logit is a sum of `hidden` products in float, then rounded where logits are T; that moves a log-probability
 * by at most twice the row's largest such error. dZ follows by its formula, and is rounded to T once; dx and dweight sum it times
 * exact factors. In small workspaces dweight is rounded after each chunk. Where FUSED keeps exponentials, these are rounded, once
 * more in a row with several references, and so is v x.
 * Columns that are split over ranks are virtual ranks of one process, one after another, as in tests/linear_cross_entropy.cu. Each
 * rank's part of dx is rounded to T; their sum is compared.
 */
#include "lk/linear_cross_entropy_ids_parallel.cuh"

#include "tests/test.h"

TEST_DEFINE(LINEAR_CROSS_ENTROPY)
TEST_DEFINE(LINEAR_CROSS_ENTROPY_IDS)
TEST_DEFINE(LINEAR_CROSS_ENTROPY_IDS_PARALLEL)

typedef lk_linear_cross_entropy_ids_args args_t;
typedef lk_linear_cross_entropy_ids_parallel_args rank_args;
typedef lk_linear_cross_entropy_plan plan_t;
enum { FORWARD, BACKWARD, BOTH, DIRECTIONS };
static const char *const direction_name[] = {"forward", "backward", "forward_backward"};
typedef lk_status (*call_function)(const args_t *, cudaStream_t);
typedef lk_status (*query_function)(const args_t *, size_t *);
typedef lk_status (*plan_function)(const args_t *, size_t, plan_t *);
typedef lk_status (*rank_function)(const rank_args *, cudaStream_t);
typedef lk_status (*rank_query_function)(const rank_args *, size_t *);
typedef lk_status (*rank_plan_function)(const rank_args *, size_t, plan_t *);
#define ALL(whose, what)                                                                                                       \
    {TEST_OF_TYPES(lk_linear_cross_entropy_ids_##whose##forward##what),                                                        \
     TEST_OF_TYPES(lk_linear_cross_entropy_ids_##whose##backward##what),                                                       \
     TEST_OF_TYPES(lk_linear_cross_entropy_ids_##whose##forward_backward##what)}
static const call_function call_of[][TEST_TYPES] = ALL(, );
static const rank_function split_call_of[][TEST_TYPES] = ALL(parallel_, );
static const query_function query_of[][TEST_TYPES] = ALL(, _workspace_bytes);
static const rank_query_function split_query_of[][TEST_TYPES] = ALL(parallel_, _workspace_bytes);
static const plan_function plan_of[][TEST_TYPES] = ALL(, _plan);
static const rank_plan_function split_plan_of[][TEST_TYPES] = ALL(parallel_, _plan);
static const rank_function finish_of[] = TEST_OF_TYPES(lk_linear_cross_entropy_ids_parallel_finish);
static const rank_query_function finish_query_of[] = TEST_OF_TYPES(lk_linear_cross_entropy_ids_parallel_finish_workspace_bytes);
static lk_linear_cross_entropy_context context;

/* Tensors. The first are inputs; LSE, ENTROPY and TAIL are inputs of backward. */
enum { X, WEIGHT, BIAS, IDS, ID_WEIGHT, ROW_WEIGHT, UPSTREAM, DLSE, DENTROPY, DLOGP, TAIL_WEIGHT, DTAIL, DENOMINATOR, LSE, ENTROPY,
       TAIL, LOSS, Z_LOSS, LOGP, VALID, ARGMAX, DX, DWEIGHT, DBIAS, TENSORS };
static const char *const tensor_name[] = {"x", "weight", "bias", "target_ids", "target_weight", "row_weight", "upstream", "dlse",
                                          "dentropy", "dlogp", "tail_weight", "dtail", "denominator", "lse", "entropy", "tail",
                                          "loss", "z_loss_out", "logp",
                                          "valid_rows", "argmax", "dx", "dweight", "dbias"};
enum { DEFAULT, SMALLEST, BETWEEN }; /* or a number of bytes, no less than the smallest */
enum { AUTO = LK_LINEAR_CROSS_ENTROPY_AUTO, FUSED = LK_LINEAR_CROSS_ENTROPY_FUSED };
static int path_here; /* of the cases */
static bool fused_here; /* the device has FUSED */

typedef struct {
    int type, direction, ids, reduction, budget, path;
    int ranks; /* not 0: the columns are split over so many */
    int64_t tokens, hidden, vocab, chunk, panel, slice;
    int gap, at;
    float scale, softcap, z_loss, spread; /* spread: of the logits, 0: 1 */
    bool has[TENSORS], accumulate, dweight_f32, fast, per_token, int32, ignore, bad, repeated, masked;
    bool cancel; /* the weights add up to 0 */
    bool peaked; /* the second id has all but 10^-6 of p, and all of the weight */
    bool compact; /* max_counted is given: so many tokens as count, and spare more */
    int64_t spare;
    uint64_t seed;
} problem;

static problem plain(int type, int direction, int64_t tokens, int64_t hidden, int64_t vocab, int ids)
{
    problem p = {};
    p.type = type, p.direction = direction, p.tokens = tokens, p.hidden = hidden, p.vocab = vocab, p.ids = ids, p.path = path_here;
    p.ranks = test_split_over;
    p.seed = (uint64_t)(tokens * 1000003 + hidden * 1009 + vocab * 10 + type + 77 * ids), p.per_token = true;
    const int with[] = {X, WEIGHT, IDS, ID_WEIGHT, UPSTREAM, LSE, LOSS, LOGP, DX, DWEIGHT};
    for (int i = 0; i < LENGTH_OF(with); i++) p.has[with[i]] = true;
    return p;
}

static const char *describe(const problem *p)
{
    static char text[800];
    int n = snprintf(text, sizeof text,
                     "%s %s path %d, %d ranks, %lld x %lld x %lld, %d ids, reduction %d, chunk %lld, panel %lld, slice %lld, "
                     "budget %d, gap %d at %d, scale %g, softcap %g, z_loss %g, spread %g%s%s%s%s%s%s%s%s%s%s%s%s, spare %lld, "
                     "seed %llu, has",
                     direction_name[p->direction], test_type_name[p->type], p->path, p->ranks, (long long)p->tokens,
                     (long long)p->hidden, (long long)p->vocab, p->ids, p->reduction, (long long)p->chunk, (long long)p->panel,
                     (long long)p->slice, p->budget, p->gap, p->at,
                     (double)p->scale, (double)p->softcap, (double)p->z_loss, (double)p->spread, p->cancel ? ", cancel" : "",
                     p->peaked ? ", peaked" : "", p->accumulate ? ", accumulate" : "",
                     p->dweight_f32 ? ", f32 dweight" : "", p->fast ? ", fast" : "", p->per_token ? ", per token" : "",
                     p->int32 ? ", int32" : "", p->ignore ? ", ignore" : "", p->bad ? ", bad" : "", p->repeated ? ", repeated" : "",
                     p->masked ? ", masked" : "", p->compact ? ", max_counted" : "", (long long)p->spare,
                     (unsigned long long)p->seed);
    for (int t = 0; t < TENSORS && n < (int)sizeof text; t++)
        if (p->has[t]) n += snprintf(text + n, sizeof text - (size_t)n, " %s", tensor_name[t]);
    return text;
}

/* ---- Inputs -------------------------------------------------------------------------------------------------------------- */

static test_buffer buffer[TENSORS], workspace;
static unsigned char *kept[TENSORS];
static size_t kept_bytes[TENSORS];
static args_t args;
static plan_t plan;

typedef struct {
    int64_t rows, cols, stride;
    int type, bytes, at;
} layout;
static layout layout_of(const problem *p, int t)
{
    const int64_t n = p->tokens, losses = p->reduction == LK_REDUCTION_NONE ? n : 1;
    layout l = {1, n, n, TEST_F32, 4, 0};
    if (t == X || t == DX || t == WEIGHT || t == DWEIGHT) {
        l.rows = t == X || t == DX ? n : p->vocab, l.cols = p->hidden, l.stride = p->hidden + p->gap, l.at = p->at;
        l.type = t == DWEIGHT && p->dweight_f32 ? TEST_F32 : p->type, l.bytes = test_type_bytes[l.type];
    }
    if (p->path == FUSED && (t == X || t == WEIGHT)) l.stride = (l.stride + 7) / 8 * 8, l.at *= 8; /* multiples of 16 bytes */
    if (t == BIAS || t == DBIAS) l.cols = p->vocab, l.type = p->type, l.bytes = test_type_bytes[p->type], l.at = p->at;
    if (t == IDS || t == ID_WEIGHT || t == DLOGP || t == LOGP) l.rows = n, l.cols = p->ids, l.stride = p->ids + p->gap;
    if (t == IDS) l.bytes = p->int32 ? 4 : 8;
    if (t == UPSTREAM && !p->per_token) l.cols = 1;
    if (t == LOSS || t == Z_LOSS) l.cols = losses;
    if (t == DENOMINATOR || t == VALID) l.cols = 1;
    if (t == VALID || t == ARGMAX) l.bytes = 8;
    if (l.rows == 1) l.stride = l.cols;
    return l;
}
static bool is_of(const problem *p, int t) /* whether the call writes it */
{
    if (t == TAIL && p->direction == BACKWARD) return false;
    return p->has[t] && (t >= DX ? p->direction != FORWARD : t >= LSE && p->direction != BACKWARD);
}

static bool *absent; /* [tokens]: whether the call may not read x of a token, which is NaN then */
static size_t absent_bytes;

static double input(const problem *p, int t, int64_t row, int64_t col)
{
    const layout l = layout_of(p, t);
    if (t == X && absent[row]) return 0;
    return (double)test_get(l.type, test_buffer_host(&buffer[t]), row * l.stride + col);
}
static int64_t id_of(const problem *p, int64_t row, int k)
{
    const int64_t at = row * layout_of(p, IDS).stride + k;
    return p->int32 ? ((const int32_t *)test_buffer_host(&buffer[IDS]))[at] : ((const int64_t *)test_buffer_host(&buffer[IDS]))[at];
}
static bool has_tail(const problem *p)
{
    return p->has[TAIL_WEIGHT] || p->has[DTAIL] || (p->has[TAIL] && p->direction != BACKWARD);
}
static double weight_of(const problem *p, int64_t row, int k) { return p->has[ID_WEIGHT] ? input(p, ID_WEIGHT, row, k) : 1; }
enum { SKIPPED, GOOD, IS_BAD };
static int status_of(const problem *p, int64_t row, int k)
{
    const int64_t id = id_of(p, row, k);
    if (p->ignore && id == 3) return SKIPPED;
    return id >= 0 && id < p->vocab ? GOOD : weight_of(p, row, k) == 0 ? SKIPPED : IS_BAD;
}
/* Whether a token counts, and has a bad id. */
static bool counts(const problem *p, int64_t row, bool *bad)
{
    bool any = false;
    *bad = false;
    for (int k = 0; k < p->ids; k++) any = any || status_of(p, row, k) != SKIPPED, *bad = *bad || status_of(p, row, k) == IS_BAD;
    return any;
}

static int64_t max_counted_of(const problem *p)
{
    bool bad;
    int64_t count = p->spare;
    for (int64_t row = 0; p->compact && row < p->tokens; row++) count += counts(p, row, &bad);
    return !p->compact ? 0 : count < 1 ? 1 : count;
}

static double *logits, *log_p, *slope; /* of a row */
static size_t room_bytes[7];
static double row_error, row_lse, row_entropy; /* row_error: of log p */
static double row_tail, tail_error;
static int64_t row_argmax;

/* The head's row in double. */
static void refer(const problem *p, int64_t row)
{
    double **const all[] = {&logits, &log_p, &slope};
    for (int i = 0; i < 3; i++) *all[i] = (double *)test_room(*all[i], &room_bytes[i], (size_t)p->vocab * sizeof(double));
    const double scale = p->scale == 0 ? 1 : (double)p->scale, cap = (double)p->softcap, rounds[TEST_TYPES] = {0, 0x1p-11, 0x1p-8};
    const double stored = p->fast ? rounds[p->type] : 0;
    double most = -INFINITY, least = INFINITY, sum = 0, error = 0;
    for (int64_t j = 0; j < p->vocab; j++) {
        double v = p->has[BIAS] ? input(p, BIAS, 0, j) : 0, size = isfinite(v) ? fabs(v) : 0;
        for (int64_t d = 0; d < p->hidden; d++) {
            const double term = input(p, X, row, d) * input(p, WEIGHT, j, d);
            v += term, size += fabs(term);
        }
        const double t = cap > 0 ? tanh(scale * v / cap) : 0;
        logits[j] = cap > 0 ? cap * t : scale * v, slope[j] = cap > 0 ? 1 - t * t : 1;
        if (isfinite(v)) error = fmax(error, scale * (size * 0x1p-22 + stored * fabs(v)));
        if (j == 0 || logits[j] > most) row_argmax = j;
        most = fmax(most, logits[j]);
        if (isfinite(logits[j])) least = fmin(least, logits[j]);
    }
    for (int64_t j = 0; j < p->vocab; j++) sum += exp(logits[j] - most);
    row_lse = most + log(sum), row_entropy = 0;
    for (int64_t j = 0; j < p->vocab; j++) {
        log_p[j] = logits[j] - row_lse;
        if (isfinite(log_p[j])) row_entropy -= exp(log_p[j]) * log_p[j];
    }
    double others = 0;
    for (int64_t j = 0; j < p->vocab; j++) {
        bool is_id = false;
        for (int k = 0; has_tail(p) && k < p->ids; k++) is_id = is_id || (status_of(p, row, k) == GOOD && id_of(p, row, k) == j);
        if (!is_id) others += exp(log_p[j]);
    }
    row_tail = log(others);
    row_error = 2 * error + 0x1p-21 * (4 + (most - least) + log(sum) + (cap > 0 ? 4 * fmax(fabs(most), fabs(least)) + (p->fast ? 2 * cap : 0) : 0));
    /* 1 minus the sum of p of the ids, where 1/64 is left; else from the columns themselves. */
    tail_error = others == 0 ? 0 : row_error * (2 + (others > 0x1p-7 ? 1 / others : 0)) + 0x1p-21 * (1 + fabs(row_tail));
    if (p->ranks && others <= 0x1p-7) tail_error += 0x1p-15; /* there a rank's part may be a difference that leaves 1/64 */
}

/* Calls that gather are made twice, and by each rank. */
static bool adds_losses(const problem *p) { return test_adds_losses(p) && !(p->ranks && test_gathers(p)); }

static void fill(const problem *p)
{
    absent = (bool *)test_room(absent, &absent_bytes, (size_t)(p->tokens + 1));
    memset(absent, 0, (size_t)(p->tokens + 1));
    for (int t = LOSS; t <= Z_LOSS && adds_losses(p); t++)
        if (p->has[t]) test_fill_losses(layout_of(p, t).cols, &buffer[t]);
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        uint64_t random = test_hash(p->seed + (uint64_t)t);
        const double wide = p->spread == 0 ? 1 : (double)p->spread, spread = t == WEIGHT ? 3 * wide / sqrt((double)l.cols) : 1;
        if (t == IDS || t == VALID || t == ARGMAX || (t >= LSE && !(p->accumulate && (t == DWEIGHT || t == DBIAS)))) continue;
        for (int64_t r = 0; r < l.rows; r++)
            for (int64_t c = 0; c < l.cols; c++) {
                float v = (float)(spread * test_uniform(&random));
                if (t == BIAS && p->masked && test_hash(p->seed + (uint64_t)c) % 5 == 0 && c > 0) v = -INFINITY;
                if (t == ID_WEIGHT && test_chance(&random, 6)) v = 0;
                if (t == ID_WEIGHT && p->cancel) v = c / 2 == p->ids / 2 ? 0.0f : (c % 2 ? -0.5f : 0.5f) * (float)(1 + c / 2 % 2);
                if (t == DLSE && p->cancel) v *= 1e-22f;
                if (t == DTAIL && p->spread > 1) v *= 4096; /* beyond f16's range, if it is not seen */
                if (p->peaked && t == X) v = c == 0;
                if (p->peaked && t == WEIGHT) v = c == 0 && r == p->vocab / 2 ? 20.0f : 0.0f;
                if (p->peaked && t == ID_WEIGHT) v = c == 1;
                if (t == DENOMINATOR) v = 2.75f;
                test_put(l.type, test_buffer_host(&buffer[t]), r * l.stride + c, v);
            }
    }
    uint64_t random = test_hash(p->seed + 99);
    const layout l = layout_of(p, IDS);
    for (int64_t r = 0; r < p->tokens; r++) {
        const bool nothing = p->ignore && (r % 4 == 1 || test_chance(&random, 6)), bad = p->bad && r % 3 == 0;
        for (int k = 0; k < p->ids; k++) {
            int64_t id = k == 0 ? (r % 2 ? 0 : p->vocab - 1) : test_below(&random, p->vocab);
            if (p->repeated && k) id = id_of(p, r, k / 2);
            if (p->peaked && k == 1) id = p->vocab / 2;
            if (nothing || (p->ignore && test_chance(&random, 4))) id = 3;
            if (bad && k == p->ids / 2) {
                id = r % 2 ? -1 : p->vocab;
                if (p->has[ID_WEIGHT] && r % 6 == 0) test_put(TEST_F32, test_buffer_host(&buffer[ID_WEIGHT]), r * l.stride + k, 0);
            }
            if (p->int32) ((int32_t *)test_buffer_host(&buffer[IDS]))[r * l.stride + k] = (int32_t)id;
            else ((int64_t *)test_buffer_host(&buffer[IDS]))[r * l.stride + k] = id;
        }
    }
    const bool compact = max_counted_of(p) && max_counted_of(p) < p->tokens;
    for (int64_t r = 0; r < p->tokens && compact; r++) {
        const layout x = layout_of(p, X);
        bool bad;
        absent[r] = !counts(p, r, &bad);
        for (int64_t c = 0; c < x.cols && absent[r]; c++) test_put(x.type, test_buffer_host(&buffer[X]), r * x.stride + c, NAN);
    }
    for (int64_t r = 0; r < p->tokens && p->has[ROW_WEIGHT]; r++) { /* that of an ignored token is not used */
        bool bad;
        if (!counts(p, r, &bad)) ((float *)test_buffer_host(&buffer[ROW_WEIGHT]))[r] = NAN;
        else if (bad && r % 2) ((float *)test_buffer_host(&buffer[ROW_WEIGHT]))[r] = 0;
    }
    for (int64_t r = 0; r < p->tokens && p->direction == BACKWARD; r++) { /* what forward left */
        bool bad;
        const bool counted = counts(p, r, &bad);
        refer(p, r);
        ((float *)test_buffer_host(&buffer[LSE]))[r] = counted ? (float)row_lse : 0;
        ((float *)test_buffer_host(&buffer[ENTROPY]))[r] = counted ? (float)row_entropy : 0;
        ((float *)test_buffer_host(&buffer[TAIL]))[r] = !counted ? 0 : bad ? NAN : (float)row_tail;
    }
}

/* ---- Columns split over virtual ranks, one after another ------------------------------------------------------------------ */

static const int64_t *const cut = test_ranks.cut;
static size_t room_of[64];   /* each rank's workspace */
static char *rest;           /* counts of bad tokens; each rank's dx; scratch */
static size_t dx_each, scratch_at;
static int64_t handed;       /* tokens of dx that it has handed over */

static char *dx_of(const problem *p, int rank)
{
    const layout l = layout_of(p, DX);
    return rest + 256 + (size_t)rank * dx_each + l.at * l.bytes;
}

/* dx comes once, with all tokens, before the last matmul of dweight. */
static lk_status hand(void *user, void *dx, int64_t tokens, cudaStream_t)
{
    const problem *const p = (const problem *)user;
    if (!test_that(handed == 0 && tokens == p->tokens && dx == (void *)dx_of(p, test_ranks.acting)))
        test_detail("dx of %lld tokens is handed over, after %lld; %s", (long long)tokens, (long long)handed, describe(p));
    handed += tokens;
#if defined(LK_SIMT)
    if (!test_that(simt_cublaslt_sms == 0)) test_detail("a matmul before reduce leaves SMs; %s", describe(p));
    simt_cublaslt_sms = -1;
#endif
    return LK_OK;
}

static rank_args slice_of(const problem *p, int rank)
{
    rank_args x = {args, {}, NULL, test_ranks.table};
    lk_linear_cross_entropy_args &a = x.common.common;
    const int64_t first = cut[rank];
    const layout weight = layout_of(p, WEIGHT), bias = layout_of(p, BIAS), dweight = layout_of(p, DWEIGHT);
    a.vocab = cut[rank + 1] - first;
    a.weight = (const char *)a.weight + first * weight.stride * weight.bytes;
    if (a.bias) a.bias = (const char *)a.bias + first * bias.bytes;
    if (a.dx) a.dx = dx_of(p, rank);
    if (a.dweight) a.dweight = (char *)a.dweight + first * dweight.stride * dweight.bytes;
    if (a.dbias) a.dbias = (char *)a.dbias + first * bias.bytes;
    if (a.vocab == 0 && rank % 2) a.weight = a.bias = NULL; /* of no size */
    test_act_as(&x.parallel, rank, p);
    x.parallel.reduce_sms = (int)((rank + p->tokens) % 3);
    if (p->seed % 8) x.parallel.reduce = hand;
    if (test_gathers(p)) x.parallel.all_gather = test_gather;
    else x.states = test_states_of(rank);
    if (p->direction == BACKWARD) x.states = test_left_states(2);
    a.bad_targets = (int32_t *)rest + rank, a.workspace_bytes = room_of[rank];
    return x;
}

/* The sum of the p of all columns but the target, for backward, by the lse that it gets. */
static double others_of(const problem *p, int64_t row)
{
    int64_t y = -1;
    double sum = 0;
    if (p->direction != BACKWARD) return 0;
    refer(p, row);
    for (int k = 0; k < p->ids; k++)
        if (status_of(p, row, k) == GOOD && (y < 0 || logits[id_of(p, row, k)] > logits[y])) y = id_of(p, row, k);
    for (int64_t j = 0; j < p->vocab; j++) sum += j == y ? 0 : exp(logits[j] - (double)(float)row_lse);
    return sum;
}

static void make_table(const problem *p)
{
    const layout dx = layout_of(p, DX), dweight = layout_of(p, DWEIGHT);
    const bool more = p->has[ENTROPY] || p->has[ARGMAX] || (p->direction == BOTH && p->has[DENTROPY]);
    const size_t of_ids = (size_t)(p->ids * (p->fast ? test_type_bytes[p->type] : 4) + 15) / 16 * 16;
    dx_each = (size_t)(p->tokens * dx.stride * dx.bytes + dx.at * dx.bytes + 511) / 256 * 256;
    scratch_at = 256 + dx_each * (size_t)p->ranks;
    rest = test_fill_table(p, p->tokens, others_of, (size_t)p->tokens * ((more && p->direction != BACKWARD ? 32 : 16) + of_ids),
                           scratch_at + (size_t)(p->vocab * (dweight.stride + 1)) * 4 + 512);
}

/* All ranks' calls; of a forward that does not gather, finish too. */
static lk_status launch_split(const problem *p)
{
    lk_status status = LK_OK;
    const bool back = p->direction != FORWARD;
    const bool gathers = test_gathers(p);
    const bool keeps = gathers && p->seed % 16 < 8 && !(back && p->has[DENTROPY]); /* what backward reads of the call's states */
    const int rounds = gathers && p->ranks > 1 ? 2 : 1;
    TEST_CUDA(cudaMemsetAsync(rest, 0, (size_t)p->ranks * 4, test.stream));
    for (int round = 0; round < rounds; round++)
        for (int rank = 0; rank < p->ranks && !status; rank++) {
            rank_args x = slice_of(p, rank);
            const args_t &i = x.common;
            lk_linear_cross_entropy_args &a = x.common.common;
            const bool rehearsal = round + 1 < rounds, reduces = back && a.dx && x.parallel.reduce;
            handed = 0;
            if (keeps) x.states = test_left_states(0);
            if (rehearsal) a.bad_targets = NULL;
            if (rehearsal && a.dweight) a.dweight = rest + scratch_at;
            if (rehearsal && a.dbias) a.dbias = rest + scratch_at + p->vocab * layout_of(p, DWEIGHT).stride * 4 + 64;
            status = split_call_of[p->direction][p->type](&x, test.stream);
#if defined(LK_SIMT)
            const int sms = x.parallel.reduce_sms, left = test.sms - sms > 2 ? test.sms - sms : 2, want = handed && sms ? left : 0;
            if (!test_that(simt_cublaslt_sms == -1 || simt_cublaslt_sms == want))
                test_detail("a matmul for %d SMs, not %d; %s", simt_cublaslt_sms, want, describe(p));
            if (!test_that(!want || a.vocab == 0 || !a.dweight || simt_cublaslt_sms == want))
                test_detail("dweight's matmul comes before reduce; %s", describe(p));
            simt_cublaslt_sms = 0;
#endif
            if (!status && !test_that(handed == (reduces ? p->tokens : 0)))
                test_detail("dx of %lld tokens was handed over; %s", (long long)handed, describe(p));
            if (status || rehearsal || !test_gathers(p)) continue;
            if (i.tail) test_same_on_ranks(i.tail, p->tokens, rank);
            else if (i.logp)
                test_same_on_ranks(i.logp, p->tokens ? (p->tokens - 1) * layout_of(p, LOGP).stride + p->ids : 0, rank);
            else if (a.lse) test_same_on_ranks(a.lse, p->tokens, rank);
        }
    if (status || p->direction == BACKWARD || (test_gathers(p) && !keeps)) return status;
    rank_args x = slice_of(p, (int)(p->seed % (uint64_t)p->ranks)); /* with columns or without */
    x.states = keeps ? test_left_states(1) : NULL; /* finish by itself leaves the same bits as the call that gathers */
    if (keeps) x.common.common.bad_targets = NULL;
    x.parallel.all_gather = NULL;
    finish_query_of[p->type](&x, &x.common.common.workspace_bytes);
    status = finish_of[p->type](&x, test.stream);
    for (int i = 0; i < 2 && keeps && !status; i++) test_same_on_ranks(test_left_states(i), p->tokens, i);
    return status;
}

/* Each rank, or the one that finishes, counts the tokens with a bad id. */
static void verify_counts(const problem *p)
{
    int32_t count = 0, got[64];
    bool bad;
    for (int64_t row = 0; row < p->tokens; row++) counts(p, row, &bad), count += bad;
    TEST_CUDA(cudaMemcpy(got, rest, (size_t)p->ranks * 4, cudaMemcpyDeviceToHost));
    for (int rank = 0; rank < p->ranks; rank++) {
        const bool here = p->direction != FORWARD || test_gathers(p) || rank == (int)(p->seed % (uint64_t)p->ranks);
        if (!test_that(got[rank] == (here ? count : 0)))
            test_detail("rank %d counts %d bad tokens of %d; %s", rank, got[rank], count, describe(p));
    }
}

/* The workspace of a call: the plan, and its bytes. roundings: of dweight, by the plan of any rank. */
static int64_t roundings;
static size_t choose_room(const problem *p, const rank_args *x)
{
    plan_t any = {};
    size_t bytes = 0;
    const auto ask = [&](size_t budget, plan_t *to) {
        return p->ranks ? split_plan_of[p->direction][p->type](x, budget, to)
                        : plan_of[p->direction][p->type](&x->common, budget, to);
    };
    test_launched(ask(SIZE_MAX, &any), describe(p));
    test_launched(p->ranks ? split_query_of[p->direction][p->type](x, &bytes)
                           : query_of[p->direction][p->type](&x->common, &bytes), describe(p));
    if (p->budget == SMALLEST) bytes = any.minimum_bytes;
    if (p->budget > BETWEEN) bytes = (size_t)p->budget > any.minimum_bytes ? (size_t)p->budget : any.minimum_bytes;
    if (p->budget == BETWEEN) bytes = any.minimum_bytes * (2 + p->seed % 5) / 2 + 100;
    test_launched(ask(bytes, &plan), describe(p));
    if (!test_that(plan.workspace_bytes <= bytes && plan.minimum_bytes == any.minimum_bytes)) test_detail("%s", plan.text);
    if (strstr(plan.text, "rounded after each chunk") && plan.chunks > roundings) roundings = plan.chunks;
    return plan.workspace_bytes;
}

static bool prepare(const problem *p, int run)
{
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        const int64_t elements = l.rows ? (l.rows - 1) * l.stride + l.cols : 0;
        test_buffer_size(&buffer[t], (size_t)(elements * l.bytes), (size_t)(l.at * l.bytes),
                         t >= LSE ? (run ? 0xff : 0x5a) : run ? 0x7f : 0xff);
    }
    fill(p);
    for (int t = 0; t < TENSORS; t++) test_buffer_upload(&buffer[t]);
    void *at[TENSORS];
    for (int t = 0; t < TENSORS; t++) at[t] = p->has[t] ? test_buffer_device(&buffer[t]) : NULL;
    args = {};
    lk_linear_cross_entropy_args *const a = &args.common;
    a->context = &context, a->x = at[X], a->weight = at[WEIGHT], a->bias = at[BIAS], a->row_weight = (float *)at[ROW_WEIGHT];
    a->upstream = (float *)at[UPSTREAM], a->upstream_per_token = p->per_token, a->dlse = (float *)at[DLSE];
    a->dentropy = (float *)at[DENTROPY], a->denominator = (float *)at[DENOMINATOR], a->lse = (float *)at[LSE];
    a->entropy = (float *)at[ENTROPY], a->loss = (float *)at[LOSS], a->z_loss_out = (float *)at[Z_LOSS];
    a->valid_rows = (int64_t *)at[VALID], a->dx = at[DX], a->dweight = at[DWEIGHT], a->dbias = at[DBIAS];
    a->tokens = p->tokens, a->hidden = p->hidden, a->vocab = p->vocab, a->chunk_tokens = p->chunk;
    a->x_stride = layout_of(p, X).stride, a->weight_stride = layout_of(p, WEIGHT).stride;
    if (p->gap) a->dx_stride = a->dweight_stride = p->hidden + p->gap;
    a->argmax = (int64_t *)at[ARGMAX], a->path = p->path, a->panel_vocab = p->panel, a->slice_tokens = p->slice;
    a->logit_scale = p->scale, a->softcap = p->softcap, a->z_loss = p->z_loss, a->reduction = p->reduction;
    a->use_ignore_index = p->ignore, a->ignore_index = p->ignore ? 3 : 0;
    a->target_dtype = p->int32 ? LK_TARGET_INT32 : LK_TARGET_INT64;
    a->accumulate = p->accumulate, a->dweight_dtype = p->dweight_f32 ? LK_DTYPE_F32 : LK_DTYPE_T, a->fast_logits = p->fast;
    a->upstream_value = test_upstream_value(p), a->accumulate_loss = adds_losses(p), a->max_counted = max_counted_of(p);
    args.target_ids = at[IDS], args.target_weight = (float *)at[ID_WEIGHT], args.dlogp = (float *)at[DLOGP];
    args.logp = (float *)at[LOGP], args.ids_per_row = p->ids;
    args.tail_weight = (float *)at[TAIL_WEIGHT], args.dtail = (float *)at[DTAIL], args.tail = (float *)at[TAIL];
    if (p->gap) args.target_ids_stride = args.target_weight_stride = args.dlogp_stride = args.logp_stride = p->ids + p->gap;

    size_t bytes = 0;
    roundings = 0;
    if (p->ranks) make_table(p);
    const rank_args whole = {args, {}, NULL, NULL};
    if (!p->ranks) bytes = choose_room(p, &whole);
    for (int rank = 0; rank < p->ranks; rank++) {
        const rank_args x = slice_of(p, rank);
        size_t of_finish = 0;
        room_of[rank] = choose_room(p, &x);
        if (p->direction != BACKWARD) test_launched(finish_query_of[p->type](&x, &of_finish), describe(p));
        if (of_finish > bytes) bytes = of_finish;
        if (room_of[rank] > bytes) bytes = room_of[rank];
    }
    a->workspace_bytes = bytes;
    test_buffer_size(&workspace, bytes, p->seed % 2 ? 128 : 0, run ? 0xff : 0x7f);
    test_buffer_upload(&workspace);
    a->workspace = bytes ? test_buffer_device(&workspace) : NULL;
    return true;
}

static lk_status launch(const problem *p)
{
    return p->ranks ? launch_split(p) : call_of[p->direction][p->type](&args, test.stream);
}

static void collect(const problem *p)
{
    for (int t = 0; t < TENSORS; t++) test_buffer_download(&buffer[t]);
    if (p->ranks && is_of(p, DX)) test_sum_device_parts(layout_of(p, DX), dx_of(p, 0), dx_each, test_buffer_back(&buffer[DX]));
    test_buffer_download(&workspace), test_buffer_accept_all(&workspace);
}

static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        if (is_of(p, t))
            test_settle(&buffer[t], &kept[t], &kept_bytes[t], keep, l.rows, l.cols, l.stride, l.bytes, tensor_name[t], what,
                        describe(p));
        test_buffer_untouched(&buffer[t], tensor_name[t], describe(p));
    }
    test_buffer_untouched(&workspace, "workspace", describe(p));
    if (p->ranks) verify_counts(p);
}

/* ---- The reference ------------------------------------------------------------------------------------------------------- */

static void verify_number(const problem *p, int t, int64_t row, int64_t col, double want, double slack)
{
    const layout l = layout_of(p, t);
    if (!is_of(p, t)) return;
    const float got = test_get(l.type, test_buffer_back(&buffer[t]), row * l.stride + col);
    if (!test_near(l.type, got, want, isfinite(want) ? slack : 0))
        test_detail("%s[%lld, %lld] is %.9g, want %.9g +- %.3g; %s; plan: %s", tensor_name[t], (long long)row, (long long)col,
                    (double)got, want, slack, describe(p), plan.text);
}

static double *dz, *dz_slack, *own;
static bool *has_id; /* [tokens, vocab] */

/* The gradient of a token's loss. */
static double upstream_of(const problem *p, int64_t row)
{
    if (p->has[UPSTREAM]) return test_upstream_times(p) * input(p, UPSTREAM, 0, p->per_token ? row : 0);
    return p->has[DLOGP] || p->has[DTAIL] ? (double)test_upstream_value(p) : test_upstream_times(p);
}

/* dZ of a token into dz, and its error. over: what a mean divides by. Returns the largest factor of its dZ. */
static double differentiate(const problem *p, int64_t row, double over)
{
    const double scale = p->scale == 0 ? 1 : (double)p->scale, e = row_error, e23 = 0x1p-23;
    const double one = upstream_of(p, row);
    const double f = one * (p->has[ROW_WEIGHT] ? input(p, ROW_WEIGHT, 0, row) : 1) / over;
    const double dlse = p->has[DLSE] ? input(p, DLSE, 0, row) : 0, dentropy = p->has[DENTROPY] ? input(p, DENTROPY, 0, row) : 0;
    double all = dlse + 2 * (double)p->z_loss * row_lse * f, size = fabs(all) + fabs(2 * (double)p->z_loss * e * f);
    double most = fabs(f) + fabs(dlse) + fabs(dentropy);
    memset(own, 0, (size_t)(2 * p->vocab) * sizeof(double));
    for (int k = 0; k < p->ids; k++) {
        if (status_of(p, row, k) != GOOD) continue;
        const double d = p->has[DLOGP] ? input(p, DLOGP, row, k) : 0, u = f * weight_of(p, row, k) - d;
        all += u, size += fabs(f * weight_of(p, row, k)) + fabs(d), most += fabs(d);
        own[id_of(p, row, k)] += u, own[p->vocab + id_of(p, row, k)] += fabs(f * weight_of(p, row, k)) + fabs(d);
    }
    const double dtail = p->has[DTAIL] ? input(p, DTAIL, 0, row) : 0;
    const double wanted = p->has[TAIL_WEIGHT] ? f * input(p, TAIL_WEIGHT, 0, row) : 0;
    const double tail_u = wanted - dtail, tail_size = fabs(wanted) + fabs(dtail);
    all += tail_u, size += tail_size, most += fabs(dtail);
    for (int64_t j = 0; j < p->vocab; j++) {
        const double lp = log_p[j], P = exp(lp), bent = P == 0 ? 0 : -P * (lp + row_entropy);
        const double share = has_tail(p) && !has_id[row * p->vocab + j] && P > 0 ? exp(lp - row_tail) : 0;
        const double want = all * P - own[j] - tail_u * share + dentropy * bent;
        const double bend = p->softcap > 0 ? scale * 2 * e / (double)p->softcap : 0;
        double off = size * P * (e + 16 * e23) + P * fabs(2 * (double)p->z_loss * e * f);
        off += 16 * e23 * (own[p->vocab + j] + size * P);
        off += fabs(dentropy) * P * ((fabs(P == 0 ? 0 : lp) + fabs(row_entropy) + 1) * (2 * e + 16 * e23));
        off += tail_size * share * (2 * e + tail_error + 16 * e23 * (1 + fabs(lp - row_tail)));
        if (has_tail(p)) off += fabs(dentropy) * P * (fabs(row_tail) + 1) * 16 * e23; /* entropy + tail is rounded */
        off += 0x1p-126 * (size + (P > 0 ? fabs(dentropy) * (fabs(lp) + fabs(row_entropy)) : 0)); /* a p below 2^-126 counts as 0 */
        if (p->direction == BACKWARD) off += own[p->vocab + j] * e; /* its lse is not exactly that of its logits */
        if (p->peaked && j == p->vocab / 2) off = 1e-5 * fabs(want); /* no p - 1 */
        dz[row * p->vocab + j] = scale * slope[j] * want;
        dz_slack[row * p->vocab + j] = scale * (slope[j] * off + bend * fabs(want));
    }
    return most * scale;
}

/* A bad token whose dx is 0 and not NaN. */
static bool masked(const problem *p, int64_t row)
{
    static const int others[] = {DLSE, DENTROPY, DTAIL};
    const double one = upstream_of(p, row);
    bool none = one * (p->has[ROW_WEIGHT] ? input(p, ROW_WEIGHT, 0, row) : 1) == 0;
    for (int i = 0; i < LENGTH_OF(others); i++) none = none && !(p->has[others[i]] && input(p, others[i], 0, row) != 0);
    for (int k = 0; k < p->ids && p->has[DLOGP]; k++) none = none && input(p, DLOGP, row, k) == 0;
    return none;
}

static void verify_gradients(const problem *p, double most)
{
    const int64_t n = p->tokens, v = p->vocab;
    const bool fused = plan.path == FUSED, keeps = fused && plan.kept_vocab;
    const double unit = p->type == TEST_F32 ? 0 : p->type == TEST_F16 ? 0x1p-11 : keeps ? 3 * 0x1p-8 : 0x1p-8;
    const double sums = fused ? 0x1p-16 * (double)(plan.panels + plan.chunks) : 0; /* of 24 bits */
    const double lost = p->type == TEST_F16 ? most * 0x1p-33 : keeps ? most * 0x1p-40 : 0; /* of small ones */
    for (int64_t i = 0; i < n * v; i++) dz_slack[i] += (unit + 0x1p-22) * fabs(dz[i]) + lost + 0x1p-126;
    for (int64_t row = 0; row < n && is_of(p, DX); row++) {
        bool bad;
        counts(p, row, &bad);
        for (int64_t d = 0; d < p->hidden; d++) {
            double want = 0, slack = 0;
            for (int rank = 0; rank < (p->ranks ? p->ranks : 1); rank++) { /* each rank's part is rounded */
                const int64_t first = p->ranks ? cut[rank] : 0, end = p->ranks ? cut[rank + 1] : v;
                double part = 0, off = 0, tail = 0;
                for (int64_t j = first; j < end; j++) {
                    const double g = dz[row * v + j], w = input(p, WEIGHT, j, d);
                    part += g * w, off += dz_slack[row * v + j] * fabs(w) + sums * fabs(g * w);
                    tail += j >= first + (end - first) / 8 * 8 ? fabs(g * w) : 0;
                }
                if (p->type == TEST_BF16 && !fused) off += 0x1p-8 * tail; /* of tail columns: rounded before the rest is added */
                if (p->ranks) off += test_half_ulp(p->type, fabs(part) + off);
                want += part, slack += off;
            }
            verify_number(p, DX, row, d, bad && !masked(p, row) ? NAN : want, slack);
        }
    }
    for (int64_t j = 0; j < v; j++)
        for (int64_t d = 0; d <= p->hidden; d++) { /* the last: dbias */
            const int t = d < p->hidden ? DWEIGHT : DBIAS;
            const int64_t at_row = d < p->hidden ? j : 0, at = d < p->hidden ? d : j;
            if (!is_of(p, t)) continue;
            const double old = p->accumulate ? input(p, t, at_row, at) : 0;
            double want = old, slack = 0, size = fabs(old), largest = fabs(old), of_ids = 0;
            for (int64_t row = 0; row < n; row++) {
                const double f = d < p->hidden ? input(p, X, row, d) : 1;
                want += dz[row * v + j] * f, size += fabs(dz[row * v + j] * f), slack += dz_slack[row * v + j] * fabs(f);
                largest = fmax(largest, fabs(want));
                if (fused && has_id[row * v + j]) of_ids += fabs(dz[row * v + j] * f);
            }
            slack += (sums + 0x1p-22) * size;
            if (t == DWEIGHT) slack += (double)roundings * test_half_ulp(layout_of(p, t).type, largest + slack);
            if (of_ids > 0 && t == DWEIGHT) /* the targets' part is added to what has been rounded */
                slack += test_half_ulp(layout_of(p, t).type, fabs(want) + of_ids + slack);
            verify_number(p, t, at_row, at, want, slack);
        }
}

static void verify(const problem *p)
{
    const int64_t n = p->tokens, v = p->vocab;
    double **const all[] = {&dz, &dz_slack, &own};
    for (int i = 0; i < 3; i++) *all[i] = (double *)test_room(*all[i], &room_bytes[3 + i], (size_t)((n + 2) * v) * sizeof(double));
    has_id = (bool *)test_room(has_id, &room_bytes[6], (size_t)(n * v) * sizeof(bool));
    if (n && v) memset(has_id, 0, (size_t)(n * v) * sizeof(bool));
    for (int64_t row = 0; row < n; row++)
        for (int k = 0; k < p->ids; k++)
            if (status_of(p, row, k) == GOOD) has_id[row * v + id_of(p, row, k)] = true;
    int64_t valid = 0;
    bool any_bad = false, bad;
    for (int64_t row = 0; row < n; row++) {
        valid += counts(p, row, &bad);
        any_bad = any_bad || (bad && !(p->has[ROW_WEIGHT] && input(p, ROW_WEIGHT, 0, row) == 0));
    }
    const bool mean = p->reduction == LK_REDUCTION_MEAN, reduced = p->reduction != LK_REDUCTION_NONE;
    const double over = !mean ? 1 : p->has[DENOMINATOR] ? 2.75 : (double)valid;
    const auto near_loss = [&](int t, int64_t row, double want, double slack) {
        const double there = adds_losses(p) ? (double)test_loss_before(row) : 0;
        verify_number(p, t, 0, row, want + there, slack + 0x1p-23 * fabs(there));
    };
    double sum = 0, z_sum = 0, sum_slack = 0, most = 0;
    for (int64_t row = 0; row < n; row++) {
        const bool counted = counts(p, row, &bad);
        const double rw = p->has[ROW_WEIGHT] && counted ? input(p, ROW_WEIGHT, 0, row) : 1;
        double loss = 0, slack = 0;
        refer(p, row);
        for (int k = 0; k < p->ids; k++) {
            const bool good = status_of(p, row, k) == GOOD;
            const double lp = good ? log_p[id_of(p, row, k)] : 0, w = weight_of(p, row, k);
            const bool exact = p->peaked && id_of(p, row, k) == v / 2; /* its logit is */
            verify_number(p, LOGP, row, k, bad ? NAN : lp, exact ? 0x1p-23 : row_error);
            if (good && w != 0) loss -= w * lp, slack += fabs(w) * (row_error + 0x1p-22 * fabs(lp));
        }
        verify_number(p, TAIL, 0, row, !counted ? 0 : bad ? NAN : row_tail, tail_error);
        if (counted && !bad && p->has[TAIL_WEIGHT]) {
            const double w = input(p, TAIL_WEIGHT, 0, row);
            loss -= w * row_tail, slack += fabs(w) * (tail_error + 0x1p-22 * fabs(row_tail));
        }
        const double z = counted ? (double)p->z_loss * row_lse * row_lse : 0;
        const double z_slack = counted ? (double)p->z_loss * (2 * fabs(row_lse) * row_error + 0x1p-20 * row_lse * row_lse) : 0;
        loss += z, slack += z_slack + 0x1p-22 * fabs(loss);
        verify_number(p, LSE, 0, row, counted ? row_lse : 0, row_error);
        verify_number(p, ENTROPY, 0, row, counted ? row_entropy : 0, (1 + fabs(row_entropy)) * (2 * row_error + 0x1p-20));
        if (is_of(p, ARGMAX)) {
            const int64_t got = ((const int64_t *)test_buffer_back(&buffer[ARGMAX]))[row];
            const bool right = !counted ? got == -1 : got >= 0 && got < v && logits[got] >= logits[row_argmax] - row_error;
            if (!test_that(right)) test_detail("argmax[%lld] is %lld; %s", (long long)row, (long long)got, describe(p));
        }
        if (bad) loss = rw == 0 ? 0 : NAN, slack = 0;
        if (!reduced) near_loss(LOSS, row, rw * loss, fabs(rw) * slack);
        if (!reduced) near_loss(Z_LOSS, row, rw * z, fabs(rw) * z_slack + 0x1p-22 * fabs(rw * z));
        if (counted && !bad) sum += rw * loss, sum_slack += fabs(rw) * (slack + 0x1p-20 * fabs(loss));
        if (counted) z_sum += rw * z, sum_slack += bad ? fabs(rw) * (z_slack + 0x1p-20 * z) : 0;
        if (p->direction == FORWARD) continue;
        if (counted && !bad) most = fmax(most, differentiate(p, row, over));
        else memset(dz + row * v, 0, (size_t)v * sizeof(double)), memset(dz_slack + row * v, 0, (size_t)v * sizeof(double));
    }
    if (reduced) {
        const double divisor = mean ? over : 1;
        near_loss(LOSS, 0, any_bad ? NAN : sum / divisor, sum_slack / fabs(divisor));
        near_loss(Z_LOSS, 0, z_sum / divisor, sum_slack / fabs(divisor));
    }
    if (is_of(p, VALID) && !test_that(*(const int64_t *)test_buffer_back(&buffer[VALID]) == valid))
        test_detail("valid_rows; %s", describe(p));
    if (p->direction != FORWARD) verify_gradients(p, most);
}

static const test_op<problem> op = {describe, prepare, launch, collect, verify, settle};
/* Every other call with ignored tokens has max_counted. */
static void check(const problem *p)
{
    problem x = *p;
    if (p->ignore && !p->ranks && p->seed % 2) x.compact = true, x.spare = (int64_t)(p->seed / 2 % 3);
    test_twice(op, &x);
}

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

static void sizes(int type, int direction, int)
{
    const int64_t list[][4] = {{5, 24, 40, 3}, {1, 1, 1, 1}, {3, 7, 13, 33}, {17, 16, 67, 8}, {4, 33, 300, 128}, {2, 8, 9, 2}};
    for (int i = 0; i < LENGTH_OF(list); i++) {
        problem p = plain(type, direction, list[i][0], list[i][1], list[i][2], (int)list[i][3]);
        p.has[DBIAS] = i % 2, p.repeated = i == 3 || i == 4, p.int32 = i % 2;
        if (i == 4) p.has[ID_WEIGHT] = false; /* weights that add up to 128 */
        check(&p);
    }
    /* A whole call like one whose dweight lacked a token on an H200: see lk_cublas_leaves_out. The products are tested by themselves in
     * linear_cross_entropy.cu. */
    if (type == TEST_F32 || direction != BACKWARD || test_ranks.count > 1 || test.sms < 64 || test.small) return;
    problem p = plain(type, direction, 4609, 64, 64, 8);
    p.has[DLOGP] = true;
    check(&p);
}

static void chunks(int type, int direction, int)
{
    for (int i = 0; i < 12; i++) {
        if (test.small && (i + type + direction) % 2) continue;
        problem p = plain(type, direction, i < 6 ? 23 : 150, 16, 71, 1 + i);
        p.seed += (uint64_t)i, p.has[BIAS] = p.has[DBIAS] = i & 1, p.accumulate = i & 2, p.dweight_f32 = i & 4;
        p.budget = i < 6 ? DEFAULT : i % 3 ? BETWEEN : SMALLEST, p.fast = i % 5 == 4, p.reduction = i % 3;
        p.has[DLOGP] = direction != FORWARD && i % 2, p.has[DLSE] = direction != FORWARD && i % 3 == 1;
        p.has[ROW_WEIGHT] = i % 4 == 2;
        if (i < 6) p.chunk = 1 + i * 4;
        if (i == 9) p.slice = 4;
        check(&p);
    }
}

static void options(int type, int direction, int)
{
    for (int i = 0; i < 32; i++) {
        if (test.small && (i + type + direction) % 4) continue;
        problem p = plain(type, direction, 9, 16, i % 2 ? 50 : 129, 1 + i % 9);
        const bool back = direction != FORWARD;
        p.seed += (uint64_t)i, p.reduction = i % 3, p.per_token = i % 4 != 1, p.has[UPSTREAM] = i % 5 != 2;
        if (i & 1) p.scale = 0.5f;
        if (i & 2) p.softcap = 4;
        if (i & 4) p.z_loss = 0.01f;
        p.has[ROW_WEIGHT] = i & 8, p.ignore = i & 16, p.bad = i % 7 == 3, p.repeated = i % 3 == 2, p.int32 = i % 2;
        p.has[DLOGP] = back && i % 3 != 1, p.has[DLSE] = back && (i % 4 == 2 || i % 7 == 3), p.has[DENTROPY] = back && i % 5 == 3;
        p.has[ENTROPY] = (p.has[DENTROPY] && (direction == BACKWARD || i % 2)) || (direction != BACKWARD && i % 6 == 1);
        p.has[ID_WEIGHT] = i % 6 != 4;
        p.has[DENOMINATOR] = p.reduction == LK_REDUCTION_MEAN && i % 2, p.has[VALID] = direction != BACKWARD && i % 2;
        p.has[Z_LOSS] = p.z_loss > 0, p.has[DBIAS] = i % 4 == 1, p.has[ARGMAX] = direction != BACKWARD && i % 7 == 2;
        p.has[LOSS] = i % 8 != 5, p.has[LOGP] = i % 8 != 6, p.has[LSE] = direction == BACKWARD || i % 8 != 7;
        if (i % 16 == 8) { /* logp alone */
            p.has[LOSS] = p.has[LSE] = direction == BACKWARD;
            p.has[Z_LOSS] = p.has[ENTROPY] = p.has[DENTROPY] = false;
        }
        p.fast = i % 8 == 4, p.masked = i % 8 == 3, p.has[BIAS] = p.masked;
        if (p.masked) p.has[ID_WEIGHT] = p.has[LOGP] = p.has[LOSS] = p.has[Z_LOSS] = false; /* weights of 0 times inf */
        check(&p);
    }
}

static void places(int type, int direction, int)
{
    for (int i = 0; i < test_pick(6, 2); i++) {
        problem p = plain(type, direction, 4, 12 + i, 30 + i, 5);
        p.gap = i % 5 + 1, p.at = i % 4, p.has[BIAS] = p.has[DBIAS] = i % 2, p.accumulate = i % 3 == 1;
        p.has[DLOGP] = direction != FORWARD;
        check(&p);
    }
}

static void graphs(int type, int direction, int)
{
    problem p = plain(type, direction, 9, 16, 60, 4);
    p.chunk = 4, p.has[BIAS] = p.has[DBIAS] = true, p.has[DLOGP] = direction != FORWARD;
    check(&p); /* leaves its bits in kept */
    test_graph(op, &p);
}

/* max_counted: in a graph; and fewer than count, so that everything is NaN. */
static void counted(int type, int direction, int)
{
    problem p = plain(type, direction, 23, 16, 60, 4);
    p.chunk = 4, p.has[BIAS] = p.has[DBIAS] = p.ignore = p.compact = true, p.spare = 1;
    p.has[DLOGP] = direction != FORWARD, p.seed = p.seed / 2 * 2; /* check leaves it as it is */
    if (!p.ranks) check(&p), test_graph(op, &p);
    p.tokens = 1500, p.vocab = 20, p.hidden = 8, p.chunk = 0, p.gap = 3; /* more tokens than the list's kernel has threads */
    p.bad = true, p.reduction = LK_REDUCTION_MEAN, p.has[ROW_WEIGHT] = true, p.int32 = direction == BOTH;
    if (!p.ranks) check(&p);
    for (int i = 0; i < 6 && !p.ranks; i++) {
        p = plain(type, direction, 19, 8, 30, 1 + i);
        p.ignore = p.compact = p.has[BIAS] = p.has[DBIAS] = true, p.spare = i % 2 ? -1 : -30, p.reduction = i % 3;
        p.has[ENTROPY] = p.has[Z_LOSS] = p.has[ARGMAX] = p.has[VALID] = direction != BACKWARD, p.z_loss = i % 3 ? 0.1f : 0.0f;
        p.cancel = i == 0, p.has[DLOGP] = direction != FORWARD && i % 2 == 0; /* of one id: a weight of 0 */
        p.bad = i == 5;
        p.has[TAIL] = i == 4 && p.path != FUSED, p.has[ROW_WEIGHT] = i == 3, p.accumulate = i % 2;
        if (p.has[TAIL]) p.has[TAIL_WEIGHT] = true;
        while (adds_losses(&p)) p.seed += 2;
        prepare(&p, 0);
        args_t few = args;
        size_t bytes = 0, of_few = 0;
        few.common.x = few.common.weight = few.target_ids = few.common.lse = NULL; /* a query needs none of them */
        if (direction == BACKWARD) few.tail = NULL;
        else few.common.lse = args.common.lse;
        if (p.path == FUSED) few.common.weight = args.common.weight;
        test_launched(query_of[direction][type](&args, &bytes), describe(&p));
        test_launched(query_of[direction][type](&few, &of_few), describe(&p));
        if (!test_that(bytes == of_few)) test_detail("%zu bytes, without inputs %zu; %s", bytes, of_few, describe(&p));
        if (!test_launched(launch(&p), describe(&p))) continue;
        collect(&p);
        for (int t = LSE; t < TENSORS; t++) {
            const layout l = layout_of(&p, t);
            int64_t numbers = 0;
            for (int64_t at = 0; at < l.rows * l.cols && is_of(&p, t); at++) {
                const int64_t place = at / l.cols * l.stride + at % l.cols;
                if (t == ARGMAX) numbers += ((const int64_t *)test_buffer_back(&buffer[t]))[place] != -1;
                else if (t == VALID) numbers += ((const int64_t *)test_buffer_back(&buffer[t]))[place] <= args.common.max_counted;
                else numbers += !isnan(test_get(l.type, test_buffer_back(&buffer[t]), place));
            }
            if (!test_that(numbers == 0)) test_detail("%lld numbers of %s; %s", (long long)numbers, tensor_name[t], describe(&p));
            if (is_of(&p, t)) test_buffer_accept_all(&buffer[t]);
            test_buffer_untouched(&buffer[t], tensor_name[t], describe(&p));
        }
    }
}

static void empty(int type, int direction, int)
{
    for (int i = 0; i < 2; i++) {
        problem p = plain(type, direction, 0, 5, 7, 3);
        p.has[DBIAS] = true, p.accumulate = i, p.gap = 2, p.reduction = LK_REDUCTION_SUM;
        check(&p);
    }
}

/* The tail, on CHUNKS: the rows in two passes. */
static void tails(int type, int direction, int)
{
    for (int i = 0; i < 24; i++) {
        if (test.small && (i + type + direction) % 3) continue;
        problem p = plain(type, direction, 9 + i % 2 * 70, 16, i % 2 ? 77 : 150, 1 + i % 9);
        const bool back = direction != FORWARD;
        p.seed += (uint64_t)i, p.reduction = i % 3, p.has[TAIL_WEIGHT] = i % 4 != 1;
        p.has[DTAIL] = back && i % 4 != 2 && (direction != BOTH || i % 12 != 9); /* there the tail is an output alone */
        p.has[TAIL] = back || i % 5 != 4, p.has[UPSTREAM] = i % 5 != 2, p.spread = i % 3 ? 1.0f : 4.0f;
        p.has[DLOGP] = back && i % 3 == 1, p.has[DLSE] = back && i % 4 == 3, p.has[DENTROPY] = back && i % 5 == 3;
        p.has[ENTROPY] = p.has[DENTROPY], p.has[ROW_WEIGHT] = i & 8, p.ignore = i % 3 == 2, p.bad = i % 7 == 3;
        p.repeated = i % 3 == 1, p.has[DBIAS] = p.has[BIAS] = i % 4 == 1, p.fast = i % 8 == 4;
        p.has[LSE] = direction == BACKWARD || i % 2;
        p.budget = i % 2 ? i % 4 == 3 ? SMALLEST : BETWEEN : DEFAULT, p.dweight_f32 = i % 3 == 2;
        if (i % 6 == 3) p.scale = 0.5f;
        if (i % 6 == 4) p.softcap = 4;
        if (i % 6 == 5) p.z_loss = 0.01f, p.has[Z_LOSS] = true;
        if (direction == FORWARD && !p.has[TAIL_WEIGHT]) p.has[TAIL] = true;
        if (direction == FORWARD && i % 8 == 1) p.has[LOSS] = p.has[Z_LOSS] = p.has[LOGP] = p.has[LSE] = false; /* the tail alone */
        if (direction == BOTH && i % 4 == 3) p.has[TAIL] = false; /* lk's own */
        check(&p);
    }
}

/* No digits cancel where an id has nearly all of p. */
static void peaks(int type, int direction, int)
{
    for (int i = 0; i < 3; i++) {
        problem p = plain(type, direction, 5, 8, 300, 3 + i);
        p.peaked = true, p.has[DWEIGHT] = i > 0, p.budget = i == 2 ? 1000000 : DEFAULT;
        if (type != TEST_BF16 || direction != BACKWARD || p.path == FUSED) check(&p);
    }
}

/* FUSED: exponentials of no columns, of some and of all, in dweight too; panels; several tiles and stretches. */
static void budgets(int type, int direction, int path)
{
    int none = 0, some = 0, lent = 0, all = 0, panels = 0, chunked = 0;
    for (int i = 0; path == FUSED && i < test_pick(40, 12); i++) {
        const bool many = i % 2; /* columns: so that some of them are kept */
        problem p = plain(type, direction, many ? 20 : 20 + i % 3 * 120, 16, (many ? 9000 : 1000) + 70 * (i % 3), 1 + i % 7);
        const bool back = direction != FORWARD;
        p.seed += (uint64_t)i, p.budget = 100000 + i / 2 % 8 * 50000, p.has[DBIAS] = i % 2, p.dweight_f32 = i % 4 / 2;
        p.reduction = i % 3, p.has[DLOGP] = back && i % 4 == 1, p.has[DLSE] = back && i % 5 == 1, p.accumulate = i % 7 == 6;
        p.spread = i % 3 == 2 ? 40.0f : 1.0f, p.cancel = i % 4 == 2, p.softcap = i % 5 == 3 ? 4.0f : 0.0f;
        if (i % 6 == 4) p.panel = 256 << i / 6 % 2, p.budget = DEFAULT;
        if (i % 8 == 7) p.has[DX] = false;
        if (i % 16 == 9) p.has[DWEIGHT] = false;
        p.ignore = i % 5 == 2, p.repeated = i % 5 == 4;
        if (direction == BOTH && i % 6 == 2) p.chunk = 8 + p.tokens / 3, p.budget = 600000;
        if (i % 9 == 8) p.scale = 0.5f, p.z_loss = 0.01f;
        check(&p);
        none += plan.kept_vocab == 0, all += plan.kept_vocab == p.vocab, panels += plan.panels > 1, lent += plan.lent_vocab > 0;
        some += plan.kept_vocab > 0 && plan.kept_vocab < p.vocab, chunked += plan.chunks > 1;
        if (!test_that(plan.path == FUSED)) test_detail("%s", plan.text);
    }
    if (!test_that(path != FUSED || (none && panels && (direction != BOTH || (some && lent && all && chunked)))))
        test_detail("kept: none %d, some %d, in dweight %d, all %d; panels %d, chunks %d", none, some, lent, all, panels, chunked);
}

/* With columns split over ranks: the i-th time. */
static void of_ranks(int i, int type, int direction, int)
{
    sizes(type, direction, 0), chunks(type, direction, 0), options(type, direction, 0), peaks(type, direction, 0);
    tails(type, direction, 0);
    if (i % 2) places(type, direction, 0), empty(type, direction, 0);
    if (i == 1) graphs(type, direction, 0);
    for (int k = 0; k < 5; k++) { /* slices, and several chunks of each rank's own plan */
        problem p = k < 4 ? plain(type, direction, 70, 16, 90, k % 2 ? 40 : 8) : plain(type, direction, 23, 16, 12, 8);
        if (k == 4) p.spread = 4, p.chunk = 5; /* each token has another p, and some of them more than half */
        p.seed += (uint64_t)k, p.budget = k % 2 ? SMALLEST : BETWEEN, p.dweight_f32 = k & 2, p.bad = k == 1;
        p.slice = k == 2 ? 7 : 0;
        p.has[DLOGP] = direction != FORWARD && k % 2, p.reduction = k % 3, p.has[ROW_WEIGHT] = k == 2;
        check(&p);
    }
}

static void all_themes(void)
{
    static const test_theme themes[] = {{"sizes", sizes}, {"chunks", chunks}, {"options", options},
                                        {"places", places}, {"peaks", peaks},   {"graphs", graphs}, {"empty", empty},
                                        {"counted", counted}};
    test_theme chunks_only[LENGTH_OF(themes) + 2] = {{"tails", tails}, {"split over ranks", test_split<of_ranks, 4>}};
    for (int i = 0; i < LENGTH_OF(themes); i++) chunks_only[i + 2] = themes[i];
    path_here = AUTO;
    for (int direction = 0; direction < DIRECTIONS; direction++)
        test_themes(chunks_only, LENGTH_OF(chunks_only), direction, 0, direction_name[direction], "auto");
    path_here = FUSED;
    for (int direction = 0; fused_here && direction < DIRECTIONS; direction++) {
        for (int i = 0; i <= LENGTH_OF(themes); i++) {
            const test_theme theme = i < LENGTH_OF(themes) ? themes[i] : test_theme{"budgets", budgets};
            if (!test_begin("%s bf16 fused: %s", direction_name[direction], theme.name)) continue;
            theme.run(TEST_BF16, direction, FUSED);
            test_finish();
        }
    }
    path_here = AUTO;
}

/* One id of weight 1 is a target: the bits of linear_cross_entropy's same path in loss, and gradients to their rounding. */
static void one_id(int type, int path)
{
    static lk_status (*const plain_call[])(const lk_linear_cross_entropy_args *, cudaStream_t) =
        TEST_OF_TYPES(lk_linear_cross_entropy_forward_backward);
    static lk_status (*const plain_query[])(const lk_linear_cross_entropy_args *, size_t *) =
        TEST_OF_TYPES(lk_linear_cross_entropy_forward_backward_workspace_bytes);
    problem p = plain(type, BOTH, 12, 24, 90, 1);
    p.path = path;
    p.has[ID_WEIGHT] = false, p.ignore = true, p.z_loss = 0.01f;
    while (adds_losses(&p)) p.seed++; /* the second call would add to the first's */
    check(&p); /* leaves its results in kept */
    lk_linear_cross_entropy_args a = args.common;
    size_t bytes = 0;
    a.target = args.target_ids, a.path = path;
    test_launched(plain_query[type](&a, &bytes), "linear_cross_entropy");
    test_buffer_size(&workspace, bytes, 0, 0x7f), test_buffer_upload(&workspace);
    a.workspace = test_buffer_device(&workspace), a.workspace_bytes = bytes;
    test_launched(plain_call[type](&a, test.stream), "linear_cross_entropy");
    collect(&p);
    for (int64_t row = 0; row < p.tokens; row++) {
        const float got = ((const float *)kept[LOSS])[row], want = ((const float *)test_buffer_back(&buffer[LOSS]))[row];
        if (!test_that(!memcmp(&got, &want, sizeof got)))
            test_detail("loss[%lld] is %.9g, not %.9g", (long long)row, (double)got, (double)want);
        for (int64_t d = 0; d < p.hidden; d++) {
            const double x = (double)test_get(type, kept[DX], row * p.hidden + d);
            const double y = (double)test_get(type, test_buffer_back(&buffer[DX]), row * p.hidden + d);
            if (!test_within(fabs(x - y), 2 * test_half_ulp(type, y) + 1e-6))
                test_detail("dx[%lld] is %g, not %g", (long long)row, x, y);
        }
    }
}

/* Ranks beside the call of all columns: each result differs by the order of its sums alone. */
static void beside_one_call(int type)
{
    static const int list[][2] = {{1, 1}, {2, 8}, {3, 128}, {8, 8}};
    for (int i = 0; i < LENGTH_OF(list); i++) {
        problem p = plain(type, BOTH, 7, 24, 90, list[i][1]);
        p.ranks = list[i][0], p.ignore = true, p.has[LSE] = p.has[DBIAS] = true, p.has[DLOGP] = i % 2, p.dweight_f32 = i == 2;
        p.has[TAIL] = p.has[TAIL_WEIGHT] = i % 3 == 0, p.has[DTAIL] = i == 3;
        for (p.ranks = 0; adds_losses(&p);) p.seed++; /* as the call of ranks, which gathers */
        p.ranks = list[i][0];
        check(&p); /* leaves its results in kept */
        p.ranks = 0, p.path = LK_LINEAR_CROSS_ENTROPY_CHUNKS;
        prepare(&p, 0);
        test_launched(launch(&p), describe(&p)), collect(&p);
        const int outputs[] = {LSE, LOSS, LOGP, TAIL, DX, DWEIGHT, DBIAS};
        for (const int t : outputs) {
            if (!p.has[t]) continue;
            const layout l = layout_of(&p, t);
            for (int64_t k = 0; k < l.rows * l.cols; k++) {
                const double x = (double)test_get(l.type, kept[t], k);
                const double y = (double)test_get(l.type, test_buffer_back(&buffer[t]), k);
                const int ulps = 2 + (t == DX ? 8 * list[i][0] : t >= DX ? 16 : 0);
                const double slack = ulps * test_half_ulp(l.type, 1 + fabs(y)) + 1e-5;
                if (!test_within(fabs(x - y), slack))
                    test_detail("%s[%lld] is %.9g, of all columns %.9g; %s", tensor_name[t], (long long)k, x, y, describe(&p));
            }
        }
    }
}

/* What path 0 takes: FUSED where linear_cross_entropy does, not with a tail or where the dots of many ids cost more; no PANELS. */
static void choices(void)
{
    static const struct {
        int type, direction, ids;
        int64_t vocab;
        size_t budget;
        bool fused, tail = false;
    } list[] = {{TEST_BF16, BOTH, 1, 17000, SIZE_MAX, true},       {TEST_BF16, BOTH, 8, 131072, (size_t)1 << 30, true},
                {TEST_BF16, FORWARD, 8, 131072, SIZE_MAX, true},   {TEST_BF16, BACKWARD, 8, 131072, SIZE_MAX, true},
                {TEST_BF16, BOTH, 22, 17000, SIZE_MAX, true},      {TEST_BF16, BOTH, 23, 17000, SIZE_MAX, false},
                {TEST_BF16, FORWARD, 128, 65536, SIZE_MAX, false}, {TEST_BF16, BOTH, 1, 4096, SIZE_MAX, false},
                {TEST_F16, BOTH, 1, 131072, SIZE_MAX, false},      {TEST_F32, BOTH, 8, 131072, 0, false},
                {TEST_BF16, BOTH, 1, 4096, (size_t)12 << 20, true}, {TEST_BF16, BOTH, 1, 4096, 0, false},
                {TEST_BF16, BOTH, 8, 4096, 0, false},
                {TEST_BF16, BOTH, 1, 131072, SIZE_MAX, false, true}};
    for (int i = 0; i < LENGTH_OF(list); i++) {
        args_t a = {};
        plan_t of = {};
        char dummy;
        a.common.tokens = 4096, a.common.hidden = 1024, a.common.vocab = list[i].vocab, a.ids_per_row = list[i].ids;
        a.common.loss = (float *)&dummy, a.common.dx = a.common.dweight = &dummy;
        lk_status (*const ask)(const args_t *, size_t, plan_t *) = plan_of[list[i].direction][list[i].type];
        (void)ask(&a, SIZE_MAX, &of);
        if (list[i].tail) a.tail_weight = (const float *)&dummy;
        const lk_status status = ask(&a, list[i].budget > of.minimum_bytes ? list[i].budget : of.minimum_bytes, &of);
        int want = list[i].fused && fused_here ? (int)FUSED : (int)LK_LINEAR_CROSS_ENTROPY_CHUNKS;
        if (list[i].vocab == 4096 && list[i].budget == SIZE_MAX && fused_here) { /* it depends on the number of SMs */
            plan_t plain = {};
            (void)lk_linear_cross_entropy_query_plan<__nv_bfloat16>("plain", &a.common, LK_BOTH, SIZE_MAX, false, &plain);
            want = plain.path;
        }
        if (!test_that(status == LK_OK && of.path == want)) test_detail("%d: %s", i, of.text);
    }
    for (int type : {TEST_F16, TEST_BF16}) /* f32 sums of dweight would take 2 GiB: small workspaces have none */
        for (int direction : {BACKWARD, BOTH}) {
            args_t a = {};
            plan_t of[3] = {};
            alignas(256) char room[32]; /* a dweight at a multiple of 256 lends its bytes to logits, and needs no sums */
            char *const dummy = room + 16;
            a.common.tokens = 8192, a.common.hidden = 4096, a.common.vocab = 128256, a.ids_per_row = 4;
            a.common.loss = (float *)dummy, a.common.dx = a.common.dweight = dummy, a.tail_weight = (const float *)dummy;
            for (int i = 0; i < 3; i++)
                if (!test_that(plan_of[direction][type](&a, (size_t)(i == 2 ? 2400 : i == 1 ? 256 : 64) << 20, &of[i]) == LK_OK))
                    test_detail("%s", lk_last_error());
            const bool few = strstr(of[0].text, "rounded after each") && strstr(of[1].text, "rounded after each");
            if (!test_that(few && strstr(of[2].text, "summed in f32") && of[0].minimum_bytes < (size_t)48 << 20 &&
                           of[1].chunks < of[0].chunks && of[2].chunk_tokens >= 512))
                test_detail("%s; %s; %s", of[0].text, of[1].text, of[2].text);
        }
}

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

typedef test_bad_call<args_t> bad_call;

static void expect_error(int type, int direction, const bad_call *bad)
{
    problem p = plain(type, direction, 3, 8, 40, 4);
    p.has[DLOGP] = true;
    prepare(&p, 0);
    args.common.x_stride = args.common.weight_stride = 0;
    if (bad->spoil) bad->spoil(&args);
    const bool refused = test_refused(bad, direction);
    size_t asked = TEST_NOT_ASKED;
    const lk_status status = launch(&p), answer = query_of[direction][type](&args, &asked);
    test_expect(status, refused ? bad->want : LK_OK, bad->field, "lk_linear_cross_entropy_ids", direction_name[direction], type);
    test_expect_query(answer, refused ? bad->asked : LK_OK, asked, bad->field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = direction == BACKWARD ? DX : LSE; t < TENSORS; t++)
        test_expect_unwritten(status, &buffer[t], tensor_name[t], bad->field);
}

static void errors(int type, int direction)
{
    static const bad_call list[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_VALUE, LK_ERR_VALUE, "target is given", SPOIL(a->common.target = a->target_ids)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "class_weight", SPOIL(a->common.class_weight = a->target_weight)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "label_smoothing", SPOIL(a->common.label_smoothing = 0.1f)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "saved", SPOIL(a->common.saved = a->common.workspace)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "max_counted is -1", SPOIL(a->common.max_counted = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "batch_invariant", SPOIL(a->common.batch_invariant = 1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "statistics", SPOIL(a->common.statistics = 1)},
        {LK_ERR_PATH, LK_ERR_PATH, "path", SPOIL(a->common.path = LK_LINEAR_CROSS_ENTROPY_PANELS)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "path", SPOIL(a->common.path = 4)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "ids_per_row", SPOIL(a->ids_per_row = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "ids_per_row", SPOIL(a->ids_per_row = 129)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens", SPOIL(a->common.tokens = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab", SPOIL(a->common.vocab = 0)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "target_dtype", SPOIL(a->common.target_dtype = 5)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "ignore_index", SPOIL(a->common.ignore_index = -100)},
        {LK_ERR_NULL, LK_OK, "target_ids", SPOIL(a->target_ids = NULL)},
        {LK_ERR_NULL, LK_OK, "x is", SPOIL(a->common.x = NULL)},
        {LK_ERR_NULL, LK_OK, "context", SPOIL(a->common.context = NULL)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "target_ids_stride", SPOIL(a->target_ids_stride = 3)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "target_weight_stride", SPOIL(a->target_weight_stride = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dlogp_stride", SPOIL(a->dlogp_stride = 3), false, true},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "target_ids_stride", SPOIL(a->target_ids_stride = 3; a->common.max_counted = 2)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "hidden", SPOIL(a->common.hidden = 0; a->common.max_counted = 2)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "x_stride", SPOIL(a->common.x_stride = 7; a->common.max_counted = 2)},
        {LK_ERR_NULL, LK_OK, "target_ids", SPOIL(a->target_ids = NULL; a->common.max_counted = 2)},
        {LK_ERR_NULL, LK_OK, "x is", SPOIL(a->common.x = NULL; a->common.max_counted = 2)},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->logp = (float *)a->target_weight), true, false},
        {LK_ERR_SHAPE, LK_OK, "logp and loss overlap", SPOIL(a->logp = a->common.loss), true, false},
        {LK_ERR_SHAPE, LK_OK, "target_ids and dx overlap", SPOIL(a->common.dx = (void *)a->target_ids), false, true},
        {LK_ERR_NULL, LK_ERR_SHAPE, " is ", SPOIL(a->common.x = NULL; a->common.vocab = -1)}, /* the query sees vocab */
        {LK_ERR_NULL, LK_OK, "x is", SPOIL(a->common.x = NULL; MOVED(a->target_ids, 2); a->common.workspace = NULL)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "softcap", SPOIL(a->common.softcap = -1)},
        {LK_ERR_ALIGNMENT, LK_OK, "target_ids", SPOIL(MOVED(a->target_ids, 2))},
        {LK_ERR_ALIGNMENT, LK_OK, "dlogp", SPOIL(MOVED(a->dlogp, 2)), false, true},
        {LK_ERR_WORKSPACE, LK_OK, "workspace", SPOIL(a->common.workspace = NULL)},
        {LK_ERR_WORKSPACE, LK_OK, "workspace_bytes", SPOIL(a->common.workspace_bytes = 100)},
    };
    static const bad_call tails_of[] = {
        {LK_ERR_PATH, LK_ERR_PATH, "without a tail",
         SPOIL(a->common.path = LK_LINEAR_CROSS_ENTROPY_FUSED; a->tail_weight = a->target_weight)},
        {LK_ERR_NULL, LK_OK, "tail is NULL", SPOIL(a->tail_weight = a->target_weight; a->tail = NULL), false, true},
        {LK_ERR_ALIGNMENT, LK_OK, "tail_weight", SPOIL(a->tail_weight = a->target_weight; MOVED(a->tail_weight, 2))},
        {LK_ERR_PATH, LK_ERR_PATH, "without a tail", SPOIL(a->common.path = LK_LINEAR_CROSS_ENTROPY_FUSED;
                                                           a->tail_weight = a->tail = (float *)a->target_weight), false, true},
    };
    static const bad_call not_fused = {
        LK_ERR_PATH, LK_ERR_PATH, "FUSED is for", SPOIL(a->common.path = LK_LINEAR_CROSS_ENTROPY_FUSED)};
    for (int i = 0; i < LENGTH_OF(list); i++) expect_error(type, direction, &list[i]);
    expect_error(type, direction, &tails_of[direction == BACKWARD ? 3 : 0]);
    if (direction == BACKWARD) expect_error(type, direction, &tails_of[1]);
    if (direction != BACKWARD) expect_error(type, direction, &tails_of[2]);
    if (type != TEST_BF16 || !fused_here) expect_error(type, direction, &not_fused);
    if (!test_that(call_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL is taken");
    plan_t any;
    problem p = plain(type, direction, 3, 8, 40, 4);
    prepare(&p, 0);
    if (!test_that(plan_of[direction][type](&args, plan.minimum_bytes - 1, &any) == LK_ERR_WORKSPACE))
        test_detail("a small budget is taken");
    if (!test_that(plan_of[direction][type](&args, plan.minimum_bytes, NULL) == LK_ERR_NULL)) test_detail("plan NULL is taken");
}

/* Wrong arguments of ranks, and a callback that fails: its status is the call's. */
static void rank_errors(int type)
{
    enum { FINISH = DIRECTIONS };
    static const test_bad_rank<rank_args> cases[] = {
        {FORWARD, LK_OK, LK_OK, "", SPOIL((void)a)},
        {FINISH, LK_OK, LK_OK, "", SPOIL((void)a)},
        {BACKWARD, LK_OK, LK_OK, "", SPOIL((void)a)},
        {BOTH, LK_OK, LK_OK, "", SPOIL((void)a)},
        TEST_BAD_RANKS(FORWARD, common.common.vocab), TEST_BAD_RANKS(FINISH, common.common.vocab),
        TEST_BAD_RANKS(BACKWARD, common.common.vocab), TEST_BAD_RANKS(BOTH, common.common.vocab),
        {FORWARD, LK_ERR_SHAPE, LK_ERR_SHAPE, "ids_per_row is 0", SPOIL(a->common.ids_per_row = 0)},
        {FINISH, LK_ERR_SHAPE, LK_ERR_SHAPE, "ids_per_row is 129", SPOIL(a->common.ids_per_row = 129)},
        {BOTH, LK_ERR_SHAPE, LK_ERR_SHAPE, "hidden is 0", SPOIL(a->common.common.hidden = 0)},
        {FORWARD, LK_ERR_PATH, LK_ERR_PATH, "path is 3; where columns are split over ranks it is 0",
         SPOIL(a->common.common.path = LK_LINEAR_CROSS_ENTROPY_FUSED)},
        {BOTH, LK_ERR_PATH, LK_ERR_PATH, "path is 2; where columns are split over ranks it is 0",
         SPOIL(a->common.common.path = LK_LINEAR_CROSS_ENTROPY_PANELS)},
        {BOTH, LK_OK, LK_OK, "", SPOIL(a->common.common.path = LK_LINEAR_CROSS_ENTROPY_CHUNKS)},
        {FORWARD, LK_ERR_NULL, LK_OK, "states is NULL", SPOIL(a->states = NULL)},
        {FORWARD, LK_ERR_ALIGNMENT, LK_OK, "states", SPOIL(MOVED(a->states, 8))},
        {FORWARD, LK_ERR_SHAPE, LK_OK, "states and target_ids overlap", /* in the last token's logits */
         SPOIL(a->states = (char *)(uintptr_t)a->common.target_ids - test_ranks.block + 16)},
        {FINISH, LK_ERR_NULL, LK_OK, "all_states is NULL", SPOIL(a->all_states = NULL)},
        {FINISH, LK_ERR_NULL, LK_OK, "target_ids is NULL", SPOIL(a->common.target_ids = NULL)},
        {FINISH, LK_ERR_SHAPE, LK_OK, "all_states and logp overlap", /* in the last rank's logits */
         SPOIL(a->common.logp = (float *)((uintptr_t)a->all_states + 2 * test_ranks.block - 4))},
        {FINISH, LK_ERR_WORKSPACE, LK_OK, "workspace is NULL", SPOIL(a->common.common.workspace = NULL)},
        {FORWARD, LK_ERR_WORKSPACE, LK_OK, "workspace is NULL", SPOIL(a->common.common.workspace = NULL)},
        {BACKWARD, LK_ERR_WORKSPACE, LK_OK, "workspace_bytes is 100", SPOIL(a->common.common.workspace_bytes = 100)},
        {BOTH, LK_ERR_WORKSPACE, LK_OK, "workspace_bytes is", SPOIL(a->common.common.workspace_bytes = plan.minimum_bytes - 1)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "states is NULL", SPOIL(a->states = NULL)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "lse is NULL", SPOIL(a->common.common.lse = NULL)},
        {BOTH, LK_ERR_NULL, LK_ERR_NULL, "parallel.all_gather is NULL; without it call", SPOIL(a->parallel.all_gather = NULL)},
        {BOTH, LK_ERR_NULL, LK_OK, "weight is NULL", SPOIL(a->common.common.weight = NULL)},
        {BOTH, LK_ERR_NULL, LK_OK, "context is NULL", SPOIL(a->common.common.context = NULL)},
        {BOTH, (lk_status)77, LK_OK, "parallel.all_gather returned 77", SPOIL(a->parallel.all_gather = test_broken_gather)},
        {FORWARD, (lk_status)77, LK_OK, "all_gather returned 77", SPOIL(a->parallel.all_gather = test_broken_gather)},
        {BACKWARD, (lk_status)78, LK_OK, "parallel.reduce returned 78", SPOIL(a->parallel.reduce = test_broken_reduce)},
        {FORWARD, LK_OK, LK_OK, "", SPOIL(a->common.tail = (float *)(uintptr_t)3)}, /* finish writes it */
        {FORWARD, LK_ERR_ALIGNMENT, LK_OK, "tail_weight", SPOIL(a->common.tail_weight = (float *)(uintptr_t)3)},
        {FINISH, LK_ERR_SHAPE, LK_OK, "all_states and tail overlap",
         SPOIL(a->common.tail = (float *)(uintptr_t)a->all_states)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "tail is NULL", SPOIL(a->common.dtail = (float *)a->states)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "tail is NULL", SPOIL(a->common.tail_weight = (float *)a->states)},
        {BOTH, LK_ERR_VALUE, LK_ERR_VALUE, "statistics is given", SPOIL(a->common.common.statistics = 1)},
        {BACKWARD, LK_ERR_VALUE, LK_ERR_VALUE, "max_counted is given", SPOIL(a->common.common.max_counted = 2)},
        {FINISH, LK_ERR_VALUE, LK_ERR_VALUE, "class_weight is given", SPOIL(a->common.common.class_weight = a->common.logp)},
        {FINISH, LK_ERR_VALUE, LK_ERR_VALUE, "target is given", SPOIL(a->common.common.target = a->common.target_ids)},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        const bool finish = cases[i].call == FINISH;
        const int direction = finish ? (int)FORWARD : cases[i].call;
        problem p = plain(type, direction, 3, 8, 40, 4);
        p.ranks = 2, p.seed = 6; /* equal slices; of forward three calls */
        prepare(&p, 0);
        handed = 0;
        rank_args x = slice_of(&p, 0);
        x.parallel.reduce_sms = 0, x.parallel.reduce = NULL, x.common.common.bad_targets = NULL;
        if (finish) x.states = NULL, x.common.common.workspace_bytes = args.common.workspace_bytes;
        const lk_status status = test_expect_rank(cases, i, &x, (finish ? finish_of : split_call_of[direction])[type],
                                                  (finish ? finish_query_of : split_query_of[direction])[type]);
        for (int t = direction == BACKWARD ? DX : LSE; t < TENSORS && status < 0; t++)
            test_expect_unwritten(status, &buffer[t], tensor_name[t], cases[i].says);
    }
    for (int direction = 0; direction < DIRECTIONS; direction++) {
        problem p = plain(type, direction, 3, 8, 40, 4);
        p.ranks = 2, p.seed = 6;
        prepare(&p, 0);
        plan_t any;
        rank_args x = slice_of(&p, 0);
        const rank_plan_function ask = split_plan_of[direction][type];
        if (!test_that(split_call_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL is taken");
        if (!test_that(ask(&x, SIZE_MAX, NULL) == LK_ERR_NULL)) test_detail("plan NULL is taken");
        if (!test_that(ask(&x, SIZE_MAX, &any) == LK_OK && any.path == LK_LINEAR_CROSS_ENTROPY_CHUNKS &&
                       any.matmuls == (direction == FORWARD ? 1 : direction == BACKWARD ? 3 : 4)))
            test_detail("%s: %s", direction_name[direction], any.text);
        if (!test_that(ask(&x, any.minimum_bytes - 1, &any) == LK_ERR_WORKSPACE)) test_detail("a small budget is taken");
    }
    size_t asked = TEST_NOT_ASKED;
    if (!test_that(finish_of[type](NULL, test.stream) == LK_ERR_NULL && finish_query_of[type](NULL, &asked) == LK_ERR_NULL))
        test_detail("args NULL: %s", lk_last_error());
}

/* ---- Random draws -------------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const r = &state;
    const int64_t tokens = 1 + test_below(r, test_chance(r, 4) ? 100 : 9), vocab = 1 + test_below(r, test_chance(r, 4) ? 300 : 40);
    const int direction = (int)test_below(r, DIRECTIONS);
    const int ids = 1 + (int)test_below(r, test_chance(r, 4) ? 128 : 8);
    problem p = plain((int)test_below(r, TEST_TYPES), direction, tokens, 1 + test_below(r, 40), vocab, ids);
    p.seed = seed, p.reduction = (int)test_below(r, 3), p.budget = (int)test_below(r, 3);
    if (test_chance(r, 3)) p.gap = (int)test_below(r, 9), p.at = (int)test_below(r, 8);
    if (test_chance(r, 3)) p.chunk = 1 + test_below(r, p.tokens);
    if (test_chance(r, 3)) p.scale = (float)(0.2 + fabs(test_uniform(r)));
    if (test_chance(r, 4)) p.softcap = 5;
    if (test_chance(r, 3)) p.z_loss = 0.01f;
    const int maybe[] = {BIAS, ID_WEIGHT, ROW_WEIGHT, UPSTREAM, DBIAS, LOGP};
    for (int i = 0; i < LENGTH_OF(maybe); i++) p.has[maybe[i]] = test_chance(r, 2);
    const bool back = direction != FORWARD;
    p.has[DLOGP] = back && test_chance(r, 2), p.has[DLSE] = back && test_chance(r, 3), p.has[DENTROPY] = back && test_chance(r, 4);
    p.has[ENTROPY] = p.has[DENTROPY] || (direction != BACKWARD && test_chance(r, 3));
    if (vocab > ids && test_chance(r, 3)) {
        p.has[TAIL] = true, p.has[TAIL_WEIGHT] = test_chance(r, 2), p.has[DTAIL] = back && test_chance(r, 2);
        if (!p.has[TAIL_WEIGHT] && !p.has[DTAIL] && direction == BACKWARD) p.has[TAIL] = false;
    }
    p.per_token = test_chance(r, 2), p.accumulate = test_chance(r, 3), p.dweight_f32 = test_chance(r, 3);
    p.fast = test_chance(r, 4), p.int32 = test_chance(r, 2), p.repeated = test_chance(r, 3), p.bad = test_chance(r, 4);
    p.ignore = p.vocab > 4 && test_chance(r, 2);
    p.has[DENOMINATOR] = p.reduction == LK_REDUCTION_MEAN && test_chance(r, 2);
    if (p.ignore) p.tokens += 4; /* so that some token counts */
    if (p.type == TEST_BF16 && fused_here && test_chance(r, 2) && !has_tail(&p)) p.path = FUSED;
    if (p.path == FUSED && test_chance(r, 3)) p.vocab += 400, p.spread = test_chance(r, 2) ? 30.0f : 1.0f;
    if (p.path == FUSED && test_chance(r, 4)) p.panel = 256;
    p.has[ARGMAX] = direction != BACKWARD && test_chance(r, 4);
    if (p.path != FUSED && test_chance(r, 2)) p.ranks = 1 + (int)test_below(r, 9);
    return p;
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (lk_linear_cross_entropy_init(&context)) printf("%s\n", lk_last_error());
    lk_device device = {};
    fused_here = lk_current_device(&device) == cudaSuccess && lk_gemm_available(&device);
    test_of_directions("errors:", errors, direction_name, DIRECTIONS);
    all_themes();
    for (int type = 0; type < TEST_TYPES; type++)
        if (test_begin("one id %s", test_type_name[type])) one_id(type, LK_LINEAR_CROSS_ENTROPY_CHUNKS), test_finish();
    test_of_types("errors of ranks", rank_errors);
    test_of_types("ranks beside one call", beside_one_call);
    if (test_begin("choices")) choices(), test_finish();
    if (fused_here && test_begin("one id bf16 fused")) one_id(TEST_BF16, FUSED), test_finish();
    test_fuzz(draw, check, 150, 40);
    lk_linear_cross_entropy_destroy(&context);
    return test_end();
}
