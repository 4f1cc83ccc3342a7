// SPDX-License-Identifier: MIT
/* tests/linear_kl.cu - lk/linear_kl.cuh and lk/linear_kl_parallel.cuh against their headers' formula in double, on the GPU or on the
 * simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits. Bytes that are not outputs (zones
 * around every buffer, gaps between strided rows, the inputs) must not change.
 *
 * The bounds: a logit is a sum of `hidden` products in float, then rounded where logits are T (fast_logits) or TF32's. What that
 * does to log p and log q of a column is at most twice the row's largest such error. dZ follows by its formula's derivatives and is
 * rounded to T once; dx and dweight sum dZ times exact factors.
 *
 * Columns that are split over ranks are virtual ranks of one process, one after another, as in tests/cross_entropy.cu. Each rank's
 * part of dx is rounded to T; their sum is compared.
 */
#include "lk/linear_kl_parallel.cuh"

#include "tests/test.h"

TEST_DEFINE(LINEAR_KL)
TEST_DEFINE(LINEAR_KL_PARALLEL)

typedef lk_linear_kl_args args_t;
typedef lk_linear_kl_plan plan_t;
enum { FORWARD, BACKWARD, BOTH, DIRECTIONS };
static const char *const direction_name[] = {"forward", "backward", "forward_backward"};
#define ALL(what)                                                                                                              \
    {TEST_OF_TYPES(lk_linear_kl_forward##what), TEST_OF_TYPES(lk_linear_kl_backward##what),                                   \
     TEST_OF_TYPES(lk_linear_kl_forward_backward##what)}
static lk_status (*const call_of[][TEST_TYPES])(const args_t *, cudaStream_t) = ALL();
static lk_status (*const query_of[][TEST_TYPES])(const args_t *, size_t *) = ALL(_workspace_bytes);
static lk_status (*const plan_of[][TEST_TYPES])(const args_t *, size_t, plan_t *) = ALL(_plan);

/* The calls of ranks. */
typedef lk_linear_kl_parallel_args split_t;
enum { TERMS = DIRECTIONS, FINISH, SPLIT_CALLS };
#define ALL_SPLIT(what)                                                                                                        \
    TEST_OF_TYPES(lk_linear_kl_parallel_forward##what), TEST_OF_TYPES(lk_linear_kl_parallel_backward##what),                   \
        TEST_OF_TYPES(lk_linear_kl_parallel_forward_backward##what), TEST_OF_TYPES(lk_linear_kl_parallel_between##what)
static lk_status (*const split_call_of[][TEST_TYPES])(const split_t *, cudaStream_t) = {
    ALL_SPLIT(), TEST_OF_TYPES(lk_linear_kl_parallel_finish)};
static lk_status (*const split_query_of[][TEST_TYPES])(const split_t *, size_t *) = {
    ALL_SPLIT(_workspace_bytes), TEST_OF_TYPES(lk_linear_kl_parallel_finish_workspace_bytes)};
static lk_status (*const split_plan_of[][TEST_TYPES])(const split_t *, size_t, plan_t *) = {ALL_SPLIT(_plan)};
enum { DIVERGENCES = LK_KL_TOTAL_VARIATION + 1 };
static const char *const divergence_name[] = {"forward", "reverse", "jensen_shannon", "total_variation"};
static lk_linear_kl_context context;

/* Tensors. The first are inputs. */
enum { X, WEIGHT, BIAS, TEACHER_X, TEACHER_WEIGHT, TEACHER_BIAS, ROW_WEIGHT, UPSTREAM, LOSS, LSE, TEACHER_LSE, ENTROPY, DX,
       DWEIGHT, DBIAS, TENSORS };
static const char *const tensor_name[] = {"x", "weight", "bias", "teacher_x", "teacher_weight", "teacher_bias", "row_weight",
                                          "upstream", "loss", "lse", "teacher_lse", "entropy", "dx", "dweight", "dbias"};

/* What some columns have: a bias of -inf in the student's head, the teacher's or both. */
enum { NOTHING, MASKED_STUDENT, MASKED_TEACHER, MASKED_BOTH, SPECIALS };
/* The workspace: the default plan's, the smallest, a factor of the smallest. */
enum { DEFAULT, SMALLEST, BETWEEN };

typedef struct {
    int type, direction, divergence;
    int64_t tokens, hidden, teacher_hidden, vocab, chunk, slice;
    int gap, at; /* elements between rows, and past 256-byte alignment, of T's tensors */
    float scale, teacher_scale, softcap, teacher_softcap, beta;
    bool has[TENSORS], accumulate, dweight_f32, fast, tf32, per_token;
    int special, budget;
    float size; /* of upstream */
    uint64_t seed;
    int ranks; /* not 0: the columns are split over so many */
    bool counts;    /* max_counted is given: so many as count, and spare more */
    int64_t spare;
} problem;

static problem plain(int type, int direction, int64_t tokens, int64_t hidden, int64_t vocab)
{
    problem p = {};
    p.type = type, p.direction = direction, p.tokens = tokens, p.hidden = p.teacher_hidden = hidden, p.vocab = vocab;
    p.seed = (uint64_t)(tokens * 1000003 + hidden * 1009 + vocab * 10 + type), p.divergence = (int)(p.seed / 10 % DIVERGENCES);
    p.size = 1, p.per_token = true, p.ranks = test_split_over;
    for (int t = 0; t < TENSORS; t++) p.has[t] = t != BIAS && t != TEACHER_BIAS && t != ROW_WEIGHT && t != DBIAS;
    return p;
}

static const char *describe(const problem *p)
{
    static char text[700];
    int n = snprintf(text, sizeof text,
                     "%s %s %s, %lld x %lld and %lld x %lld, chunk %lld slice %lld, gap %d at %d, scales %g %g, softcaps %g %g, "
                     "beta %g%s%s%s%s%s, special %d, budget %d, size %g, ranks %d, counts %d spare %lld, seed %llu, has",
                     direction_name[p->direction], test_type_name[p->type], divergence_name[p->divergence], (long long)p->tokens,
                     (long long)p->hidden, (long long)p->teacher_hidden, (long long)p->vocab, (long long)p->chunk,
                     (long long)p->slice, p->gap, p->at, (double)p->scale, (double)p->teacher_scale, (double)p->softcap,
                     (double)p->teacher_softcap, (double)p->beta, p->accumulate ? ", accumulate" : "",
                     p->dweight_f32 ? ", f32 dweight" : "", p->fast ? ", fast" : "", p->tf32 ? ", tf32" : "",
                     p->per_token ? ", per token" : "", p->special, p->budget, (double)p->size, p->ranks,
                     p->counts, (long long)p->spare, (unsigned long long)p->seed);
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

/* A tensor's layout. */
typedef struct {
    int64_t rows, cols, stride;
    int type, at;
} layout;
static layout layout_of(const problem *p, int t)
{
    const int64_t h = p->hidden, th = p->teacher_hidden, n = p->tokens, v = p->vocab;
    const int f32 = TEST_F32, dweight = p->dweight_f32 ? f32 : p->type;
    const layout all[TENSORS] = {{n, h, h + p->gap, p->type, p->at},
                                 {v, h, h + 2 * p->gap, p->type, p->at},
                                 {1, v, v, p->type, p->at},
                                 {n, th, th + p->gap, p->type, p->at},
                                 {v, th, th + 3 * p->gap, p->type, p->at},
                                 {1, v, v, p->type, 0},
                                 {1, n, n, f32, 0},
                                 {1, p->per_token ? n : 1, p->per_token ? n : 1, f32, 0},
                                 {1, n, n, f32, 0},
                                 {1, n, n, f32, 0},
                                 {1, n, n, f32, 0},
                                 {1, n, n, f32, 0},
                                 {n, h, h + p->gap, p->type, p->at},
                                 {v, h, h + p->gap, dweight, p->at},
                                 {1, v, v, p->type, p->at}};
    return all[t];
}
static bool is_output(int t) { return t >= LOSS; }
static bool is_of(const problem *p, int t) /* whether the call writes it */
{
    return p->has[t] && (t >= DX ? p->direction != FORWARD : t >= LOSS && p->direction != BACKWARD);
}

static float weight_of(const problem *p, int64_t token)
{
    static const float weights[] = {1.0f, 0.0f, 2.5f, -0.5f, 0.25f, -0.0f, 0.0f}; /* fewer count where they are counted */
    return weights[(uint64_t)(token + (int64_t)p->seed) % (p->counts ? 7 : 5)];
}
static int64_t max_counted_of(const problem *p)
{
    int64_t count = p->spare;
    for (int64_t token = 0; token < p->tokens; token++) count += weight_of(p, token) != 0;
    return !p->counts ? 0 : count < 1 ? 1 : count;
}
static bool compacted(const problem *p) { return p->counts && max_counted_of(p) < p->tokens; }

/* Whether the call may not read x and teacher_x of a token; they are NaN. */
static bool skips(const problem *p, int64_t token) { return weight_of(p, token) == 0 && compacted(p); }

static void fill(const problem *p)
{
    const bool compact = compacted(p);
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        uint64_t random = test_hash(p->seed + (uint64_t)t);
        const double spread = t == WEIGHT || t == TEACHER_WEIGHT ? 3 / sqrt((double)l.cols) : 1;
        for (int64_t r = 0; r < l.rows; r++)
            for (int64_t c = 0; c < l.cols; c++) {
                float v = (float)(spread * test_uniform(&random));
                const bool hit = test_hash(p->seed + (uint64_t)c) % 5 == 0 && c > 0;
                if (t == BIAS && hit && (p->special == MASKED_STUDENT || p->special == MASKED_BOTH)) v = -INFINITY;
                if (t == TEACHER_BIAS && hit && (p->special == MASKED_TEACHER || p->special == MASKED_BOTH)) v = -INFINITY;
                if (t == ROW_WEIGHT) v = weight_of(p, c);
                if ((t == X || t == TEACHER_X) && compact && weight_of(p, r) == 0) v = NAN;
                if (t == UPSTREAM) v = p->size * (v + 0.1f);
                if (is_output(t) && !(p->accumulate && (t == DWEIGHT || t == DBIAS))) continue; /* poison */
                test_put(l.type, test_buffer_host(&buffer[t]), r * l.stride + c, v);
            }
    }
}

/* The workspace of a call, whose plan becomes `plan`. */
template <class Args>
static size_t choose_room(const problem *p, const Args *x, lk_status (*plan_for)(const Args *, size_t, plan_t *),
                          lk_status (*query)(const Args *, size_t *))
{
    plan_t any = {}, again = {};
    size_t bytes = 0;
    test_launched(plan_for(x, SIZE_MAX, &any), describe(p));
    test_launched(query(x, &bytes), describe(p));
    if (p->budget == SMALLEST) bytes = any.minimum_bytes;
    if (p->budget == BETWEEN) {
        test_launched(plan_for(x, any.minimum_bytes * (2 + p->seed % 5) / 2 + 100, &plan), describe(p));
        bytes = plan.workspace_bytes;
    }
    const bool good = plan_for(x, bytes, &plan) == LK_OK && plan_for(x, plan.workspace_bytes, &again) == LK_OK;
    if (!test_that(good && plan.workspace_bytes <= bytes && plan.minimum_bytes == any.minimum_bytes &&
                   !strcmp(plan.text, again.text) && again.workspace_bytes == plan.workspace_bytes))
        test_detail("%zu bytes give %s in %zu, and these %s in %zu; %s", bytes, plan.text, plan.workspace_bytes, again.text,
                    again.workspace_bytes, describe(p));
    return plan.workspace_bytes;
}

/* ---- Columns split over virtual ranks, one after another ----------------------------------------------------------------- */

static const int64_t *const cut = test_ranks.cut;
static test_buffer parts; /* each rank's dx */
static size_t part_bytes, room_of[SPLIT_CALLS][9];
static int acting_call;   /* which call of the acting rank runs */
static bool keeps[SPLIT_CALLS][9]; /* the plan holds all logits, so the call computes them once */
static int64_t handed;         /* tokens of dx that it has handed over */

static bool twice(const problem *p) { return LK_KL_HAS_BETWEEN(p->divergence); }

/* Whether the call gathers by itself. Else there are three calls, or four. */
static bool gathers(const problem *p) { return p->direction == BOTH || p->seed / 7 % 2 == 0; }

/* A call that holds all logits does not read the teacher's weight after its first collective, which spoils it here. */
static void spoil_teacher(const problem *p, bool back)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const layout l = layout_of(p, TEACHER_WEIGHT);
    const int acting = test_ranks.acting;
    const int64_t bytes = test_type_bytes[p->type], first = cut[acting] * l.stride * bytes;
    const int64_t rows = cut[acting + 1] - cut[acting], size = rows ? ((rows - 1) * l.stride + l.cols) * bytes : 0;
    if (!keeps[acting_call][acting] || cudaStreamIsCapturing(test.stream, &capture) || capture || !size) return;
    char *const to = (char *)test_buffer_device(&buffer[TEACHER_WEIGHT]) + first;
    const char *const from = (char *)test_buffer_host(&buffer[TEACHER_WEIGHT]) + first;
    if (back) cudaMemcpyAsync(to, from, (size_t)size, cudaMemcpyHostToDevice, test.stream);
    else cudaMemsetAsync(to, 0xff, (size_t)size, test.stream);
}

static lk_status gather(void *user, const void *send, void *receive, size_t bytes, cudaStream_t stream)
{
    const lk_status status = test_gather(user, send, receive, bytes, stream);
    spoil_teacher((const problem *)user, false);
    return status;
}

static void *dx_of(const problem *p, int rank)
{
    return (char *)test_buffer_device(&parts) + (size_t)rank * part_bytes + layout_of(p, DX).at * test_type_bytes[p->type];
}

static bool borrows; /* some rank's logits lie in dweight before it is computed */

/* dx comes once, with all tokens. Where there is one chunk, dweight is not computed yet. */
static lk_status hand(void *user, void *dx, int64_t tokens, cudaStream_t)
{
    const problem *const p = (const problem *)user;
    const int acting = test_ranks.acting;
    if (!test_that(handed == 0 && tokens == p->tokens && dx == dx_of(p, acting)))
        test_detail("dx of %lld tokens is handed over, after %lld; %s", (long long)tokens, (long long)handed, describe(p));
    handed += tokens;
#if defined(LK_SIMT)
    const layout l = layout_of(p, DWEIGHT);
    const size_t first = (size_t)(cut[acting] * l.stride * test_type_bytes[l.type]);
    const bool some = p->has[DWEIGHT] && cut[acting] < cut[acting + 1] && plan.chunks == 1 && !borrows;
    if (!test_that(!some || !memcmp((char *)test_buffer_device(&buffer[DWEIGHT]) + first,
                                    (char *)test_buffer_host(&buffer[DWEIGHT]) + first, (size_t)test_type_bytes[l.type])))
        test_detail("dweight's matmul comes before reduce; %s", describe(p));
#endif
    return LK_OK;
}

static split_t slice_of(const problem *p, int rank)
{
    split_t x = {};
    args_t &a = x.common = args;
    const int64_t first = cut[rank], bytes = test_type_bytes[p->type];
    const layout dweight = layout_of(p, DWEIGHT);
    a.vocab = cut[rank + 1] - first;
    a.weight = (const char *)args.weight + first * layout_of(p, WEIGHT).stride * bytes;
    a.teacher_weight = (const char *)args.teacher_weight + first * layout_of(p, TEACHER_WEIGHT).stride * bytes;
    if (a.bias) a.bias = (const char *)a.bias + first * bytes;
    if (a.teacher_bias) a.teacher_bias = (const char *)a.teacher_bias + first * bytes;
    if (a.dx) a.dx = dx_of(p, rank);
    if (a.dweight) a.dweight = (char *)a.dweight + first * dweight.stride * test_type_bytes[dweight.type];
    if (a.dbias) a.dbias = (char *)a.dbias + first * bytes;
    if (a.vocab == 0 && rank % 2) a.weight = a.teacher_weight = NULL; /* of no size */
    test_act_as(&x.parallel, rank, p);
    if (p->seed % 8) x.parallel.reduce = hand;
    test_give_states(&x, rank);
    return x;
}

/* A rank's arguments of a call; results: it writes them. */
static split_t rank_args(const problem *p, int call, int rank, bool results)
{
    split_t x = slice_of(p, rank);
    args_t &a = x.common;
    const bool gathered = gathers(p) && (call == FORWARD || call == BOTH);
    if (gathered) x.parallel.all_gather = gather;
    if (gathered && results && p->seed % 2 && (a.loss || a.entropy)) x.states = NULL;
    if (!results) a.loss = a.lse = a.teacher_lse = NULL;
    if (p->direction == BACKWARD) a.entropy = NULL;
    return x;
}

static test_buffer scratch[2]; /* for dweight and dbias of calls before the one that counts */

/* Cuts the columns, poisons what the calls of ranks leave to each other, and chooses workspaces; returns the largest. */
static size_t prepare_split(const problem *p, int run)
{
    const layout dx = layout_of(p, DX);
    part_bytes = (size_t)((p->tokens * dx.stride + dx.at) * test_type_bytes[p->type] + 511) / 256 * 256;
    test_cut_columns(p->ranks, p->vocab, p->seed);
    test_poison_states((size_t)p->tokens * 32, twice(p) ? 2 : 1, run);
    test_buffer_size(&parts, part_bytes * (size_t)p->ranks, 0, run ? 0xff : 0x5a), test_buffer_upload(&parts);
    for (int i = 0; i < 2; i++) {
        test_buffer_size(&scratch[i], buffer[i ? DBIAS : DWEIGHT].bytes + 256, 0, 0x5a);
        test_buffer_upload(&scratch[i]);
    }
    size_t most = 0;
    plan_t worst = {};
    borrows = false;
    for (int rank = 0; rank < p->ranks; rank++)
        for (int call = FORWARD; call <= TERMS; call++) {
            if (call == TERMS && !twice(p)) continue;
            const split_t x = rank_args(p, call, rank, p->direction != BACKWARD);
            if (call == BOTH && !x.parallel.all_gather) continue;
            if ((call == BACKWARD || call == BOTH) && !x.common.dx && !x.common.dweight && !x.common.dbias) continue;
            room_of[call][rank] = choose_room(p, &x, split_plan_of[call][p->type], split_query_of[call][p->type]);
            if (room_of[call][rank] > most) most = room_of[call][rank];
            keeps[call][rank] = gathers(p) && (call == FORWARD || call == BOTH) && plan.slice_tokens >= p->tokens;
            if (call == FORWARD || call == TERMS) continue;
            if (plan.chunks > worst.chunks) worst.chunks = plan.chunks;
            borrows = borrows || strstr(plan.text, "in dweight");
            worst.dweight_sums = worst.text[0] ? worst.dweight_sums && plan.dweight_sums : plan.dweight_sums;
            snprintf(worst.text, sizeof worst.text, "rank %d: %.200s", rank, plan.text);
            const bool kept = plan.slice_tokens >= p->tokens;
            const int logits = call == BACKWARD || kept ? 2 : twice(p) ? 6 : 4;
            const bool some = p->tokens && x.common.vocab;
            if (!test_that(plan.matmuls == (some ? logits + (x.common.dx != NULL) + (x.common.dweight != NULL) : 0)))
                test_detail("%d matmuls; %s; %s", plan.matmuls, plan.text, describe(p));
        }
    plan = worst;
    return most;
}

/* Other memory for what a call adds to, at the same place modulo 256, since plans and algorithms depend on that. */
static void *rehearsed(const void *at, int which)
{
    char *const begin = (char *)test_buffer_device(&scratch[which]);
    return begin + ((uintptr_t)at - (uintptr_t)begin) % 256;
}

static bool adds_losses(const problem *p) { return p->has[LOSS] && test_adds_losses(p); }

static lk_status call_rank(const problem *p, int call, int rank, bool results)
{
    const bool rehearsal = call == FORWARD && p->direction == BOTH; /* forward's matmuls may have other bits than this call's */
    if (rehearsal) call = BOTH;
    split_t x = rank_args(p, call, rank, results || rehearsal);
    args_t &a = x.common;
    if (rehearsal && a.dweight) a.dweight = rehearsed(a.dweight, 0);
    if (rehearsal && a.dbias) a.dbias = rehearsed(a.dbias, 1);
    acting_call = call, handed = 0;
    a.workspace_bytes = call == FINISH ? 0 : room_of[call][rank];
    a.workspace = a.workspace_bytes ? test_buffer_device(&workspace) : NULL;
    if (results && adds_losses(p)) test_set_losses(&buffer[LOSS]);
    const lk_status status = split_call_of[call][p->type](&x, test.stream);
    if (x.parallel.all_gather) spoil_teacher(p, true);
    const bool reduces = (call == BOTH || call == BACKWARD) && a.dx && x.parallel.reduce;
    if (!status && !test_that(handed == (reduces ? p->tokens : 0)))
        test_detail("dx of %lld tokens was handed over; %s", (long long)handed, describe(p));
    if (status || !results) return status;
    const float *const out[] = {a.loss, a.lse, a.teacher_lse, a.entropy};
    const int one = (int)(p->seed % LENGTH_OF(out));
    if (out[one]) test_same_on_ranks(out[one], p->tokens, rank);
    return status;
}

static bool prepare(const problem *p, int run)
{
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        const int64_t elements = l.rows ? (l.rows - 1) * l.stride + l.cols : 0;
        test_buffer_size(&buffer[t], (size_t)(elements * test_type_bytes[l.type]), (size_t)(l.at * test_type_bytes[l.type]),
                         is_output(t) ? (run ? 0xff : 0x5a) : run ? 0x7f : 0xff);
    }
    fill(p);
    if (adds_losses(p)) test_fill_losses(p->tokens, &buffer[LOSS]);
    for (int t = 0; t < TENSORS; t++) test_buffer_upload(&buffer[t]);
    args = {};
    void *at[TENSORS];
    for (int t = 0; t < TENSORS; t++) at[t] = p->has[t] ? test_buffer_device(&buffer[t]) : NULL;
    args.context = &context, args.x = at[X], args.weight = at[WEIGHT], args.bias = at[BIAS];
    args.teacher_x = at[TEACHER_X], args.teacher_weight = at[TEACHER_WEIGHT], args.teacher_bias = at[TEACHER_BIAS];
    args.row_weight = (float *)at[ROW_WEIGHT], args.upstream = (float *)at[UPSTREAM], args.upstream_per_token = p->per_token;
    args.loss = (float *)at[LOSS], args.lse = (float *)at[LSE], args.teacher_lse = (float *)at[TEACHER_LSE];
    args.entropy = (float *)at[ENTROPY], args.dx = at[DX], args.dweight = at[DWEIGHT], args.dbias = at[DBIAS];
    args.tokens = p->tokens, args.hidden = p->hidden, args.vocab = p->vocab;
    args.teacher_hidden = p->teacher_hidden == p->hidden ? 0 : p->teacher_hidden;
    int64_t *const strides[] = {&args.x_stride, &args.weight_stride, &args.teacher_x_stride, &args.teacher_weight_stride,
                                &args.dx_stride, &args.dweight_stride};
    const int of[] = {X, WEIGHT, TEACHER_X, TEACHER_WEIGHT, DX, DWEIGHT};
    for (int i = 0; i < LENGTH_OF(of); i++) *strides[i] = p->gap ? layout_of(p, of[i]).stride : 0;
    args.chunk_tokens = p->chunk, args.slice_tokens = p->slice;
    args.logit_scale = p->scale, args.teacher_scale = p->teacher_scale;
    args.softcap = p->softcap, args.teacher_softcap = p->teacher_softcap, args.beta = p->beta, args.divergence = p->divergence;
    args.accumulate = p->accumulate, args.dweight_dtype = p->dweight_f32 ? LK_DTYPE_F32 : LK_DTYPE_T;
    args.fast_logits = p->fast, args.tf32 = p->tf32, args.max_counted = (int)max_counted_of(p);
    args.upstream_value = test_upstream_value(p), args.accumulate_loss = adds_losses(p);

    const size_t bytes = p->ranks ? prepare_split(p, run) : choose_room(p, &args, plan_of[p->direction][p->type],
                                                                        query_of[p->direction][p->type]);
    args.workspace_bytes = plan.workspace_bytes;
    test_buffer_size(&workspace, bytes, p->seed % 2 ? 128 : 0, run ? 0xff : 0x7f);
    test_buffer_upload(&workspace);
    args.workspace = bytes ? test_buffer_device(&workspace) : NULL;
    return true;
}

static lk_status launch(const problem *p)
{
    if (p->ranks) return test_split_calls(p, call_rank, gathers(p));
    if (adds_losses(p)) test_set_losses(&buffer[LOSS]);
    return call_of[p->direction][p->type](&args, test.stream);
}

static void collect(const problem *p)
{
    test_buffer *const between[] = {&workspace, &test_states, &test_tables, &parts}; /* only their zones stay as they were */
    for (int t = 0; t < TENSORS; t++) test_buffer_download(&buffer[t]);
    for (int i = 0; i < (p->ranks ? LENGTH_OF(between) : 1); i++) test_buffer_download(between[i]);
    const layout dx = layout_of(p, DX);
    const char *const parts_back = (const char *)test_buffer_back(&parts) + dx.at * test_type_bytes[dx.type];
    if (p->ranks && is_of(p, DX)) test_sum_parts(dx, parts_back, part_bytes, test_buffer_back(&buffer[DX]));
    for (int i = 0; i < (p->ranks ? LENGTH_OF(between) : 1); i++) {
        test_buffer_accept_all(between[i]);
        test_buffer_untouched(between[i], "workspace or states", describe(p));
    }
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
}

/* ---- The reference ------------------------------------------------------------------------------------------------------- */

static double input(const problem *p, int t, int64_t row, int64_t col)
{
    const layout l = layout_of(p, t);
    if ((t == X || t == TEACHER_X) && skips(p, row)) return 0;
    return (double)test_get(l.type, test_buffer_host(&buffer[t]), row * l.stride + col);
}

/* A row of a head in double: log p, p, the softcap's slope; error: the bound of log p's, the same for all columns. */
typedef struct {
    double *log_p, *p, *slope, lse, error;
    size_t bytes[3];
} head_row;
static head_row student_row, teacher_row;

static void refer(head_row *r, const problem *p, bool teacher, int64_t row)
{
    const int x = teacher ? TEACHER_X : X, weight = teacher ? TEACHER_WEIGHT : WEIGHT, bias = teacher ? TEACHER_BIAS : BIAS;
    const int64_t hidden = teacher ? p->teacher_hidden : p->hidden;
    const float given = teacher ? p->teacher_scale : p->scale;
    const double scale = given == 0 ? 1 : (double)given, cap = (double)(teacher ? p->teacher_softcap : p->softcap);
    const double factors = p->tf32 ? 0x1p-10 : 0, rounds[TEST_TYPES] = {0, 0x1p-12, 0x1p-9}, stored = p->fast ? rounds[p->type] : 0;
    double **const all[] = {&r->log_p, &r->p, &r->slope};
    for (int i = 0; i < 3; i++) *all[i] = (double *)test_room(*all[i], &r->bytes[i], (size_t)p->vocab * sizeof(double));
    double most = -INFINITY, least = INFINITY, sum = 0;
    r->error = 0;
    for (int64_t j = 0; j < p->vocab; j++) {
        double v = p->has[bias] ? input(p, bias, 0, j) : 0, size = isfinite(v) ? fabs(v) : 0;
        for (int64_t d = 0; d < hidden; d++) {
            const double term = input(p, x, row, d) * input(p, weight, j, d);
            v += term, size += fabs(term);
        }
        const double t = cap > 0 ? tanh(scale * v / cap) : 0, z = cap > 0 ? cap * t : scale * v;
        r->slope[j] = cap > 0 ? 1 - t * t : 1, r->log_p[j] = z;
        if (isfinite(v)) r->error = fmax(r->error, scale * (size * (0x1p-22 + factors) + stored * fabs(v)));
        most = fmax(most, z);
        if (isfinite(z)) least = fmin(least, z);
    }
    for (int64_t j = 0; j < p->vocab; j++) sum += exp(r->log_p[j] - most);
    r->lse = most + log(sum);
    for (int64_t j = 0; j < p->vocab; j++) r->log_p[j] -= r->lse, r->p[j] = exp(r->log_p[j]);
    r->error = 2 * r->error + 0x1p-21 * (4 + (most - least) + log(sum) + (cap > 0 ? 4 * fmax(fabs(most), fabs(least)) : 0));
}

/* The sum of w log(w / q) + q - w, none of which is negative. Its error for errors of log p and log q up to e: see tests/kl.cu. */
static double divergence(const problem *p, const double *weights, const double *others, double e, double *slack)
{
    double sum = 0;
    for (int64_t j = 0; j < p->vocab; j++) {
        const double w = weights[j], q = others[j], a = w == 0 ? 0 : log(w / q), term = w == 0 ? q : w * a + q - w;
        sum += term, *slack += (w + q) * e * fmin(1, fabs(a) + e) + 8 * 0x1p-23 * (term + w * fabs(a)) + 0x1p-120;
    }
    return sum;
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

static double *dz, *dz_slack, *mixture;
static size_t dz_bytes, dz_slack_bytes, mixture_bytes;

/* The gradient of a token's loss. */
static double upstream_of(const problem *p, int64_t row)
{
    if (p->direction == FORWARD) return 1;
    return test_upstream_times(p) * (p->has[UPSTREAM] ? input(p, UPSTREAM, 0, p->per_token ? row : 0) : 1);
}

static void verify(const problem *p)
{
    const double beta = p->beta == 0 ? 0.5 : (double)p->beta, scale = p->scale == 0 ? 1 : (double)p->scale, e23 = 0x1p-23;
    const int64_t n = p->tokens, v = p->vocab;
    dz = (double *)test_room(dz, &dz_bytes, (size_t)(n * v) * sizeof(double));
    dz_slack = (double *)test_room(dz_slack, &dz_slack_bytes, (size_t)(n * v) * sizeof(double));
    mixture = (double *)test_room(mixture, &mixture_bytes, (size_t)v * sizeof(double));
    for (int64_t row = 0; row < n; row++) {
        refer(&student_row, p, false, row), refer(&teacher_row, p, true, row);
        const double *const P = student_row.p, *const Q = teacher_row.p, e = student_row.error + teacher_row.error;
        const double w = p->has[ROW_WEIGHT] ? input(p, ROW_WEIGHT, 0, row) : 1;
        const double up = upstream_of(p, row), there = adds_losses(p) ? (double)test_loss_before(row) : 0;
        double loss = 0, slack = 0, mean = 0, mean_slack = 0, entropy = 0, entropy_slack = 0;
        for (int64_t j = 0; j < v; j++) mixture[j] = beta * Q[j] + (1 - beta) * P[j];
        if (p->divergence == LK_KL_FORWARD) loss = divergence(p, Q, P, e, &slack);
        if (p->divergence == LK_KL_REVERSE) loss = mean = divergence(p, P, Q, e, &slack), mean_slack = slack;
        if (p->divergence == LK_KL_JENSEN_SHANNON) {
            double slack_q = 0;
            mean = divergence(p, P, mixture, e, &mean_slack);
            loss = beta * divergence(p, Q, mixture, e, &slack_q) + (1 - beta) * mean;
            slack = beta * slack_q + (1 - beta) * mean_slack;
        }
        for (int64_t j = 0; j < v && p->divergence == LK_KL_TOTAL_VARIATION; j++) {
            loss += fabs(Q[j] - P[j]) / 2, slack += (P[j] + Q[j]) * e, mean += Q[j] > P[j] ? P[j] : 0;
            mean_slack += P[j] * e + (fabs(Q[j] - P[j]) <= (P[j] + Q[j]) * e ? P[j] : 0); /* it may count to either side */
        }
        for (int64_t j = 0; j < v; j++)
            if (P[j] != 0)
                entropy -= P[j] * student_row.log_p[j], entropy_slack += P[j] * (1 + fabs(student_row.log_p[j])) * (e + 4 * e23);
        verify_number(p, LOSS, 0, row, there + (w == 0 ? 0 : w * loss), e23 * fabs(there) + fabs(w) * (slack + 16 * e23 * loss));
        verify_number(p, LSE, 0, row, w == 0 ? 0 : student_row.lse, student_row.error);
        verify_number(p, TEACHER_LSE, 0, row, w == 0 ? 0 : teacher_row.lse, teacher_row.error);
        verify_number(p, ENTROPY, 0, row, w == 0 ? 0 : entropy, entropy_slack);
        for (int64_t j = 0; j < v && p->direction != FORWARD; j++) {
            const double factor = up * w * scale * student_row.slope[j];
            double want = P[j] - Q[j], off = (P[j] + Q[j]) * (e + 8 * e23);
            if (p->divergence == LK_KL_TOTAL_VARIATION) {
                const double along = mean - (Q[j] > P[j]);
                want = P[j] * along, off = P[j] * (fabs(along) * (e + 8 * e23) + mean_slack);
                if (fabs(Q[j] - P[j]) <= (P[j] + Q[j]) * e) off += P[j]; /* it may count to the other side */
            } else if (p->divergence != LK_KL_FORWARD) {
                const bool reverse = p->divergence == LK_KL_REVERSE;
                const double along = P[j] == 0 ? 0 : log(P[j] / (reverse ? Q[j] : mixture[j])), mixed = reverse ? 1 : 1 - beta;
                want = mixed * P[j] * (along - mean);
                off = mixed * P[j] * (fabs(along - mean) * (e + 8 * e23) + e + 8 * e23 * fabs(along) + mean_slack);
            }
            if (w == 0) want = off = 0;
            const double bend = p->softcap > 0 ? scale * 2 * e / (double)p->softcap : 0; /* of the slope */
            dz[row * v + j] = factor * want;
            dz_slack[row * v + j] = fabs(factor) * off + fabs(up * w * scale * want) * bend;
        }
    }
    if (p->direction == FORWARD) return;
    /* dZ is rounded to T; f16's least numbers are relative to the largest factor, by 2^-32 with a power of 2^8. */
    const double unit = p->type == TEST_F32 ? (p->tf32 ? 0x1p-10 : 0) : p->type == TEST_F16 ? 0x1p-11 : 0x1p-8, sum_unit = 0x1p-22;
    double most = 0;
    for (int64_t row = 0; row < n; row++)
        most = fmax(most, fabs(scale * (p->has[ROW_WEIGHT] ? input(p, ROW_WEIGHT, 0, row) : 1) * upstream_of(p, row)));
    for (int64_t i = 0; i < n * v; i++)
        dz_slack[i] += (unit + sum_unit) * fabs(dz[i]) + (p->type == TEST_F16 ? most * 0x1p-31 : 0) + 0x1p-130;
    const double factors = p->tf32 ? 0x1p-10 : 0;
    for (int64_t row = 0; row < n && is_of(p, DX); row++)
        for (int64_t d = 0; d < p->hidden; d++) {
            double want = 0, slack = 0, part = 0;
            for (int64_t j = 0; j < v; j++) {
                const double f = input(p, WEIGHT, j, d);
                for (int rank = 1; rank < p->ranks; rank++) /* the part before is rounded to T */
                    if (j == cut[rank] && j > 0) slack += test_half_ulp(p->type, fabs(part) + slack), part = 0;
                part += dz[row * v + j] * f;
                want += dz[row * v + j] * f, slack += (dz_slack[row * v + j] + factors * fabs(dz[row * v + j])) * fabs(f);
            }
            if (p->ranks) slack += test_half_ulp(p->type, fabs(part) + slack);
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
                const double f = d < p->hidden ? input(p, X, row, d) : 1;
                want += dz[row * v + j] * f, size += fabs(dz[row * v + j] * f), largest = fmax(largest, fabs(want));
                slack += (dz_slack[row * v + j] + factors * fabs(dz[row * v + j])) * fabs(f);
            }
            slack += 0x1p-23 * size;
            if (t == DWEIGHT && l.type != TEST_F32 && plan.chunks > 1 && !plan.dweight_sums) /* rounded after each chunk */
                slack += (double)plan.chunks * test_half_ulp(l.type, largest + slack);
            verify_number(p, t, at_row, at, want, slack);
        }
}

static const test_op<problem> op = {describe, prepare, launch, collect, verify, settle};
static void check(const problem *p) { test_twice(op, p); }

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

/* Sizes: none a multiple of 8, all of them, tail columns, one of each. */
static void sizes(int type, int direction, int)
{
    const int64_t list[][4] = {{5, 24, 24, 40}, {1, 1, 3, 1}, {3, 7, 9, 13}, {17, 16, 8, 67}, {4, 33, 64, 300}, {2, 8, 8, 9}};
    for (int i = 0; i < LENGTH_OF(list); i++)
        for (int k = 0; k < (test.small ? 1 : DIVERGENCES); k++) {
            problem p = plain(type, direction, list[i][0], list[i][1], list[i][3]);
            p.teacher_hidden = list[i][2], p.divergence = (i + k + type + direction) % DIVERGENCES, p.has[DBIAS] = i % 2;
            check(&p);
        }
}

/* Chunks and slices: asked for, and in workspaces of several sizes. */
static void chunks(int type, int direction, int)
{
    for (int i = 0; i < 16; i++) {
        if (test.small && (i + type + direction) % 2) continue;
        problem p = plain(type, direction, i < 8 ? 23 : 150, 16, 71);
        p.seed += (uint64_t)i, p.divergence = i % DIVERGENCES;
        p.has[BIAS] = p.has[TEACHER_BIAS] = p.has[DBIAS] = i & 1, p.accumulate = i & 2, p.dweight_f32 = i & 4;
        p.budget = i < 8 ? DEFAULT : i % 3 ? BETWEEN : SMALLEST, p.fast = i % 5 == 4;
        if (i < 8) p.chunk = 1 + i * 3, p.slice = i % 3 ? 1 + i : 0;
        check(&p);
        if (i < 8 && (!p.ranks || direction != FORWARD) && !test_that(plan.chunks == (23 + p.chunk - 1) / p.chunk)) test_detail("%s; %s", plan.text, describe(&p));
    }
}

static void options(int type, int direction, int)
{
    for (int i = 0; i < 24; i++) {
        if (test.small && (i + type + direction) % 4) continue;
        problem p = plain(type, direction, 6, 16, i % 2 ? 50 : 129);
        p.seed += (uint64_t)i, p.divergence = i % DIVERGENCES;
        if (i & 1) p.scale = 0.5f, p.teacher_scale = 1.5f;
        if (i & 2) p.softcap = 4;
        if (i & 4) p.teacher_softcap = i & 8 ? 30 : 2;
        p.has[ROW_WEIGHT] = i & 8, p.has[BIAS] = i & 16, p.has[TEACHER_BIAS] = i & 4, p.has[DBIAS] = i & 2;
        p.beta = i & 16 ? 0.9f : 0, p.per_token = i % 3 != 1, p.has[UPSTREAM] = i % 3 != 2;
        p.size = i % 7 == 3 ? 1e-6f : i % 7 == 5 ? 3e4f : 1;
        p.fast = i % 4 == 1, p.tf32 = type == TEST_F32 && i % 4 == 2;
        const int without[] = {LOSS, LSE, TEACHER_LSE, ENTROPY, DX, DWEIGHT};
        for (int k = 0; k < LENGTH_OF(without); k++) p.has[without[k]] = i % 7 != k;
        check(&p);
    }
}

/* Where rows start, and how far apart they are. */
static void places(int type, int direction, int)
{
    for (int i = 0; i < test_pick(8, 3); i++) {
        problem p = plain(type, direction, 4, 12 + i, 30 + i);
        p.gap = i % 5 + 1, p.at = i % 4, p.has[BIAS] = p.has[DBIAS] = i % 2, p.accumulate = i % 3 == 1;
        check(&p);
    }
}

/* max_counted: as many tokens as count, some more, in chunks, and fewer. Then everything is NaN. */
static void counted(int type, int direction, int)
{
    for (int i = 0; i < 8; i++) {
        if (test.small && (i + type + direction) % 3) continue;
        problem p = plain(type, direction, i == 5 ? 2100 : i == 6 ? 1 : 21 + i, 12 + i % 3, i == 5 ? 9 : 40 + i);
        p.seed += (uint64_t)i, p.divergence = (i + direction) % DIVERGENCES, p.counts = p.has[ROW_WEIGHT] = true, p.spare = i % 3;
        p.teacher_hidden = i % 2 ? 7 : p.hidden, p.gap = i % 4, p.at = i % 3, p.per_token = i % 2, p.has[UPSTREAM] = i != 3;
        p.has[BIAS] = p.has[DBIAS] = i % 2 == 0, p.accumulate = i % 4 == 1, p.budget = i % 3, p.fast = i == 2;
        if (i % 3 == 1) p.chunk = 5, p.slice = i == 4 ? 3 : 0;
        p.has[LSE] = i % 4 != 2, p.has[DX] = i % 5 != 4;
        check(&p);
    }
    for (int i = 0; i < 2; i++) {
        problem p = plain(type, direction, 23, 8, 30);
        p.counts = p.has[ROW_WEIGHT] = p.has[BIAS] = p.has[DBIAS] = true, p.spare = i ? -1 : -30, p.accumulate = i;
        prepare(&p, 0);
        args_t few = args;
        size_t bytes = 0, of_few = 0;
        few.x = few.teacher_x = few.weight = few.teacher_weight = NULL, few.row_weight = NULL; /* a query needs none of them */
        test_launched(query_of[direction][type](&args, &bytes), describe(&p));
        test_launched(query_of[direction][type](&few, &of_few), describe(&p));
        if (!test_that(bytes == of_few)) test_detail("%zu bytes, without inputs %zu; %s", bytes, of_few, describe(&p));
        if (!test_launched(launch(&p), describe(&p))) continue;
        collect(&p);
        for (int t = LOSS; t < TENSORS; t++) {
            const layout l = layout_of(&p, t);
            int64_t numbers = 0;
            for (int64_t at = 0; at < l.rows * l.cols && is_of(&p, t); at++)
                numbers += !isnan(test_get(l.type, test_buffer_back(&buffer[t]), at / l.cols * l.stride + at % l.cols));
            if (!test_that(numbers == 0)) test_detail("%lld numbers of %s; %s", (long long)numbers, tensor_name[t], describe(&p));
            test_buffer_accept_all(&buffer[t]), test_buffer_untouched(&buffer[t], tensor_name[t], describe(&p));
        }
    }
}

static void masks(int type, int direction, int)
{
    for (int i = 0; i < 9; i++) {
        if (test.small && (i + type + direction) % 2) continue;
        problem p = plain(type, direction, 3, 8, 45);
        p.special = i % 3 + 1, p.divergence = i / 3, p.has[BIAS] = p.has[TEACHER_BIAS] = p.has[DBIAS] = true;
        if (p.divergence == LK_KL_FORWARD && p.special == MASKED_STUDENT) p.has[LOSS] = true; /* +inf; its gradient is finite */
        if (p.divergence == LK_KL_REVERSE && p.special == MASKED_TEACHER) continue; /* NaN everywhere: infinite() */
        check(&p);
    }
}

/* Where the teacher has no probability, REVERSE is +inf, and the row's gradient NaN. */
static void infinite(int type)
{
    problem p = plain(type, BOTH, 2, 8, 45);
    p.special = MASKED_TEACHER, p.divergence = LK_KL_REVERSE, p.has[TEACHER_BIAS] = true;
    prepare(&p, 0);
    if (!test_launched(launch(&p), describe(&p))) return;
    collect(&p);
    const float loss = ((const float *)test_buffer_back(&buffer[LOSS]))[0];
    if (!test_that(loss == INFINITY)) test_detail("loss is %g", (double)loss);
    if (!test_that(isnan(test_get(type, test_buffer_back(&buffer[DX]), 0)))) test_detail("dx is no NaN");
}

static void graphs(int type, int direction, int)
{
    problem p = plain(type, direction, 9, 16, 60);
    p.chunk = 4, p.has[BIAS] = p.has[DBIAS] = true;
    check(&p); /* leaves its bits in kept */
    test_graph(op, &p);
}

static void empty(int type, int direction, int)
{
    for (int i = 0; i < 2; i++) {
        problem p = plain(type, direction, 0, 5, 7);
        p.has[DBIAS] = true, p.accumulate = i, p.gap = 2;
        check(&p);
    }
}

/* With columns split over ranks: the i-th time. */
static void of_ranks(int i, int type, int direction, int path)
{
    sizes(type, direction, path), chunks(type, direction, path), options(type, direction, path), empty(type, direction, path);
    if (i % 2) places(type, direction, path), masks(type, direction, path);
    if (i == 1) graphs(type, direction, path);
}

static void all_themes(void)
{
    static const test_theme themes[] = {{"sizes", sizes}, {"chunks", chunks}, {"options", options}, {"places", places},
                                        {"masks", masks}, {"graphs", graphs}, {"empty", empty}, {"counted", counted},
                                        {"split over ranks", test_split<of_ranks>}};
    for (int direction = 0; direction < DIRECTIONS; direction++)
        test_themes(themes, LENGTH_OF(themes), direction, 0, direction_name[direction], "auto");
}

/* ---- Plans --------------------------------------------------------------------------------------------------------------- */

/* More memory never gives more chunks, and a plan's own bytes give the plan. Sizes that no memory holds do not wrap around. */
static void plans(void)
{
    static char there;
    args_t a = {};
    a.tokens = 8192, a.hidden = 4096, a.vocab = 131072, a.dx = a.dweight = &there, a.loss = (float *)&there;
    for (int k = 0; k < 3; k++) {
        plan_t before = {}, p = {};
        a.dweight_dtype = k == 1 ? LK_DTYPE_F32 : LK_DTYPE_T, a.fast_logits = k == 2;
        test_launched(lk_linear_kl_forward_backward_plan_bf16(&a, SIZE_MAX, &before), "plans");
        if (!test_that(before.chunks == 1 && before.matmuls == 4)) test_detail("%s", before.text);
        const size_t least = before.minimum_bytes;
        bool sums = false, rounds = false;
        for (size_t budget = least; budget < ((size_t)20 << 30); budget += budget / 16 + 1) {
            plan_t again = {};
            test_launched(lk_linear_kl_forward_backward_plan_bf16(&a, budget, &p), "plans");
            test_launched(lk_linear_kl_forward_backward_plan_bf16(&a, p.workspace_bytes, &again), "plans");
            const bool same = !strcmp(p.text, again.text) && again.workspace_bytes == p.workspace_bytes;
            if (!test_that(p.workspace_bytes <= budget && same))
                test_detail("%zu bytes: %s, then %s", budget, p.text, again.text);
            const int64_t slices = (p.chunk_tokens + p.slice_tokens - 1) / p.slice_tokens;
            const int64_t last = p.chunk_tokens - (slices - 1) * p.slice_tokens; /* tokens of the last slice: not far fewer */
            const bool whole = p.chunks * p.chunk_tokens >= 8192 && p.slice_tokens <= p.chunk_tokens &&
                               last >= p.slice_tokens - 64 * slices;
            if (!test_that(whole && (!p.dweight_sums || p.chunk_tokens >= 512))) test_detail("%s", p.text);
            const int64_t fewer = p.chunks > 1 ? (8192 / (p.chunks - 1) + 8) / 8 * 8 : 0; /* tokens of a chunk, of one fewer */
            const int64_t slice = k == 2 || fewer < 512 ? fewer : 512;
            const double bytes = (double)a.vocab * (double)(fewer * 2 + slice * (k == 2 ? 2 : 8));
            if (!test_that(p.chunks == 1 || p.dweight_sums || bytes > 0.85 * (double)budget)) test_detail("%zu bytes: %s", budget, p.text);
            sums = sums || p.dweight_sums, rounds = rounds || strstr(p.text, "rounded after each");
        }
        if (!test_that(k == 1 ? !sums && !rounds : rounds)) test_detail("sums %d, rounded %d", sums, rounds);
        if (!test_that(lk_linear_kl_forward_backward_plan_bf16(&a, least - 1, &p) == LK_ERR_WORKSPACE)) test_detail("too small");
    }
    plan_t p = {};
    lk_linear_kl_parallel_args x = {}; /* a rank computes no logits again, where one slice may have all tokens */
    a.dweight_dtype = LK_DTYPE_T, a.fast_logits = 0, a.vocab = 32768, x.common = a;
    x.parallel.vocab_total = 4 * a.vocab, x.parallel.ranks = 4, x.parallel.all_gather = test_gather;
    for (int k = 0; k < 2; k++) {
        test_launched(lk_linear_kl_parallel_forward_backward_plan_bf16(&x, (size_t)(k ? 3000 : 1500) << 20, &p), "plans of ranks");
        if (!test_that(p.matmuls == (k ? 4 : 6))) test_detail("%s", p.text);
    }
    a.tokens = INT32_MAX, a.hidden = a.teacher_hidden = 1 << 30, a.vocab = 1 << 30, a.dweight_dtype = LK_DTYPE_F32;
    test_launched(lk_linear_kl_forward_backward_plan_bf16(&a, SIZE_MAX, &p), "plans");
    if (!test_that(p.chunks > 0 && p.workspace_bytes >= p.minimum_bytes)) test_detail("%s", p.text);
    if (!test_that(lk_linear_kl_forward_backward_plan_bf16(&a, 1 << 20, NULL) == LK_ERR_NULL)) test_detail("plan NULL is taken");
}

/* dweight summed in float, and rounded after each chunk: both happen, and the first is nearer. */
static void sums(int type)
{
    double error[2] = {};
    for (int k = 0; k < 2; k++) {
        problem p = plain(type, BOTH, 600, 8, 24);
        p.chunk = 20, p.divergence = LK_KL_FORWARD, p.budget = k ? SMALLEST : DEFAULT;
        check(&p);
        if (!test_that(plan.dweight_sums == !k && plan.chunks == 30)) test_detail("%s", plan.text);
        for (int64_t j = 0; j < p.vocab; j++)
            for (int64_t d = 0; d < p.hidden; d++) {
                double want = 0;
                for (int64_t row = 0; row < p.tokens; row++) want += dz[row * p.vocab + j] * input(&p, X, row, d);
                const double off = (double)test_get(type, kept[DWEIGHT], j * p.hidden + d) - want;
                error[k] += off * off;
            }
    }
    if (!test_that(error[0] < error[1])) test_detail("summed in float %.3g, rounded %.3g", error[0], error[1]);
}

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

typedef test_bad_call<args_t> bad_call;

static void expect_error(int type, int direction, const bad_call *bad)
{
    problem p = plain(type, direction, 3, 8, 40);
    p.has[BIAS] = p.has[DBIAS] = true;
    prepare(&p, 0);
    if (bad->spoil) bad->spoil(&args);
    const bool refused = test_refused(bad, direction);
    size_t asked = TEST_NOT_ASKED;
    const lk_status status = launch(&p), answer = query_of[direction][type](&args, &asked);
    test_expect(status, refused ? bad->want : LK_OK, bad->field, "lk_linear_kl", direction_name[direction], type);
    test_expect_query(answer, refused ? bad->asked : LK_OK, asked, bad->field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = LOSS; t < TENSORS; t++) test_expect_unwritten(status, &buffer[t], tensor_name[t], bad->field);
}

static lk_linear_kl_context unmade;
static void errors(int type, int direction)
{
    static const bad_call list[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_NULL, LK_OK, "context", SPOIL(a->context = NULL)},
        {LK_ERR_VALUE, LK_OK, "context", SPOIL(a->context = &unmade)},
        {LK_ERR_NULL, LK_OK, "x is", SPOIL(a->x = NULL)},
        {LK_ERR_NULL, LK_OK, "weight", SPOIL(a->weight = NULL)},
        {LK_ERR_NULL, LK_OK, "teacher_x", SPOIL(a->teacher_x = NULL)},
        {LK_ERR_NULL, LK_OK, "teacher_weight", SPOIL(a->teacher_weight = NULL)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens", SPOIL(a->tokens = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens", SPOIL(a->tokens = (int64_t)1 << 31)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "hidden", SPOIL(a->hidden = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "teacher_hidden", SPOIL(a->teacher_hidden = -4)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab", SPOIL(a->vocab = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "chunk_tokens", SPOIL(a->chunk_tokens = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "slice_tokens", SPOIL(a->slice_tokens = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "max_counted", SPOIL(a->max_counted = -1)},
        {LK_ERR_NULL, LK_OK, "row_weight is NULL", SPOIL(a->max_counted = 2)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "x_stride", SPOIL(a->x_stride = 7)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "teacher_weight_stride", SPOIL(a->teacher_weight_stride = 7)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dweight_stride", SPOIL(a->dweight_stride = 7), false, true},
        {LK_ERR_SHAPE, LK_OK, "dx and", SPOIL(a->dx = (void *)a->x), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->loss = a->lse), true, false},
        {LK_ERR_VALUE, LK_ERR_VALUE, "logit_scale", SPOIL(a->logit_scale = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "teacher_softcap", SPOIL(a->teacher_softcap = NAN)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "beta", SPOIL(a->beta = 1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "divergence", SPOIL(a->divergence = 4)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dweight_dtype", SPOIL(a->dweight_dtype = 9), false, true},
        {LK_ERR_ALIGNMENT, LK_OK, "x is", SPOIL(MOVED(a->x, 1))},
        {LK_ERR_ALIGNMENT, LK_OK, "lse", SPOIL(MOVED(a->lse, 2)), true, false},
        {LK_ERR_ALIGNMENT, LK_OK, "dbias", SPOIL(MOVED(a->dbias, 1)), false, true},
        {LK_ERR_WORKSPACE, LK_OK, "workspace", SPOIL(a->workspace = NULL)},
        {LK_ERR_WORKSPACE, LK_OK, "workspace_bytes", SPOIL(a->workspace_bytes = 100)},
        {LK_ERR_WORKSPACE, LK_OK, "workspace", SPOIL(MOVED(a->workspace, 64))},
    };
    for (int i = 0; i < LENGTH_OF(list); i++) expect_error(type, direction, &list[i]);
    problem p = plain(type, direction, 3, 8, 40);
    prepare(&p, 0);
    args.loss = args.lse = args.teacher_lse = args.entropy = NULL, args.dx = args.dweight = args.dbias = NULL;
    test_expect(launch(&p), LK_ERR_NULL, "every output", "lk_linear_kl", direction_name[direction], type);
    if (!test_that(call_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL is taken");
    if (!test_that(lk_linear_kl_init(NULL) == LK_ERR_NULL && lk_linear_kl_destroy(&unmade) == LK_ERR_VALUE))
        test_detail("a context that is none is taken");
}

/* Wrong arguments of ranks, and callbacks that fail: their status is the call's. */
static void rank_errors(int type)
{
    static const test_bad_rank<split_t> cases[] = {
        {FORWARD, LK_OK, LK_OK, "", SPOIL((void)a)},
        {TERMS, LK_OK, LK_OK, "", SPOIL((void)a)},
        {FINISH, LK_OK, LK_OK, "", SPOIL((void)a)},
        {BACKWARD, LK_OK, LK_OK, "", SPOIL((void)a)},
        {FORWARD, LK_OK, LK_OK, "", SPOIL((a->common.tokens = 0, a->states = NULL))},
        {BOTH, LK_OK, LK_OK, "", SPOIL((a->common.tokens = 0, a->common.workspace = NULL))}, /* and gathers nothing */
        TEST_BAD_RANKS(FORWARD, common.vocab), TEST_BAD_RANKS(TERMS, common.vocab), TEST_BAD_RANKS(FINISH, common.vocab),
        TEST_BAD_RANKS(BACKWARD, common.vocab), TEST_BAD_RANKS(BOTH, common.vocab),
        {BOTH, LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens is -1", SPOIL(a->common.tokens = -1)},
        {FORWARD, LK_ERR_VALUE, LK_ERR_VALUE, "max_counted is given", SPOIL(a->common.max_counted = 2)},
        {FINISH, LK_ERR_VALUE, LK_ERR_VALUE, "max_counted is given", SPOIL(a->common.max_counted = 2)},
        {TERMS, LK_ERR_VALUE, LK_ERR_VALUE, "divergence is 0; this call is for LK_KL_JENSEN_SHANNON and _TOTAL_VARIATION",
         SPOIL(a->common.divergence = LK_KL_FORWARD)},
        {FORWARD, LK_ERR_NULL, LK_OK, "states is NULL", SPOIL(a->states = NULL)},
        {FORWARD, LK_ERR_NULL, LK_OK, "teacher_x is NULL", SPOIL(a->common.teacher_x = NULL)},
        {TERMS, LK_ERR_NULL, LK_OK, "all_states is NULL", SPOIL(a->all_states = NULL)},
        {FINISH, LK_ERR_NULL, LK_OK, "all_states is NULL", SPOIL(a->all_states = NULL)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "states is NULL", SPOIL(a->states = NULL)},
        {BACKWARD, LK_ERR_ALIGNMENT, LK_OK, "states is not aligned", SPOIL(MOVED(a->states, 8))},
        {FORWARD, LK_ERR_WORKSPACE, LK_OK, "workspace_bytes is 100", SPOIL(a->common.workspace_bytes = 100)},
        {BOTH, LK_ERR_WORKSPACE, LK_OK, "workspace_bytes is", SPOIL(a->common.workspace_bytes = 32 * 3 * 2)},
        {BOTH, LK_ERR_NULL, LK_ERR_NULL, "parallel.all_gather is NULL", SPOIL(a->parallel.all_gather = NULL)},
        {BOTH, (lk_status)77, LK_OK, "parallel.all_gather returned 77", SPOIL((void)a)},
        {BACKWARD, (lk_status)78, LK_OK, "parallel.reduce returned 78", SPOIL(a->parallel.reduce = test_broken_reduce)},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        const int call = cases[i].call;
        problem p = plain(type, call < DIRECTIONS ? call : FORWARD, 3, 8, 40);
        p.ranks = 2, p.divergence = LK_KL_JENSEN_SHANNON;
        prepare(&p, 0);
        split_t x = slice_of(&p, 0);
        if (call == BOTH) x.parallel.all_gather = test_broken_gather;
        x.parallel.reduce = NULL;
        x.common.workspace = test_buffer_device(&workspace), x.common.workspace_bytes = workspace.bytes;
        const lk_status status = test_expect_rank(cases, i, &x, split_call_of[call][type], split_query_of[call][type]);
        if (status > 0) continue;
        for (int t = LOSS; t < TENSORS; t++) test_expect_unwritten(status, &buffer[t], tensor_name[t], cases[i].says);
        test_expect_unwritten(status, &test_states, "states", cases[i].says);
    }
    for (int call = 0; call < SPLIT_CALLS; call++)
        if (!test_that(split_call_of[call][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL: %s", lk_last_error());
}

/* ---- Random draws -------------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const r = &state;
    const int64_t tokens = 1 + test_below(r, test_chance(r, 4) ? 100 : 9), vocab = 1 + test_below(r, test_chance(r, 4) ? 300 : 40);
    problem p = plain((int)test_below(r, TEST_TYPES), (int)test_below(r, DIRECTIONS), tokens, 1 + test_below(r, 40), vocab);
    p.seed = seed, p.divergence = (int)test_below(r, DIVERGENCES);
    if (test_chance(r, 2)) p.teacher_hidden = 1 + test_below(r, 40);
    if (test_chance(r, 3)) p.gap = (int)test_below(r, 9), p.at = (int)test_below(r, 8);
    if (test_chance(r, 3)) p.chunk = 1 + test_below(r, p.tokens);
    if (test_chance(r, 3)) p.slice = 1 + test_below(r, p.tokens);
    p.budget = (int)test_below(r, 3);
    if (test_chance(r, 3)) p.scale = (float)(0.2 + fabs(test_uniform(r))), p.teacher_scale = (float)(0.2 + fabs(test_uniform(r)));
    if (test_chance(r, 4)) p.softcap = 5;
    if (test_chance(r, 4)) p.teacher_softcap = 8;
    if (test_chance(r, 2)) p.beta = (float)(0.05 + 0.9 * fabs(test_uniform(r)));
    const int maybe[] = {BIAS, TEACHER_BIAS, ROW_WEIGHT, UPSTREAM, DBIAS, LSE, ENTROPY};
    for (int i = 0; i < LENGTH_OF(maybe); i++) p.has[maybe[i]] = test_chance(r, 2);
    p.per_token = test_chance(r, 2), p.accumulate = test_chance(r, 3), p.dweight_f32 = test_chance(r, 3);
    p.fast = test_chance(r, 3), p.tf32 = p.type == TEST_F32 && test_chance(r, 3);
    p.size = test_chance(r, 4) ? 1e-5f : 1;
    if (test_chance(r, 3)) p.ranks = 1 + (int)test_below(r, 9);
    else if (test_chance(r, 3)) p.counts = p.has[ROW_WEIGHT] = true, p.spare = test_below(r, 4);
    return p;
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (lk_linear_kl_init(&context)) printf("%s\n", lk_last_error());
    test_of_directions("errors:", errors, direction_name, DIRECTIONS);
    test_of_types("errors of ranks:", rank_errors);
    all_themes();
    test_of_types("infinite", infinite);
    test_of_types("sums", sums, TEST_F16);
    if (test_begin("plans")) plans(), test_finish();
    test_fuzz(draw, check, 200, 40);
    lk_linear_kl_destroy(&context);
    return test_end();
}
