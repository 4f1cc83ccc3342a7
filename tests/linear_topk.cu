// SPDX-License-Identifier: MIT
/* tests/linear_topk.cu - lk/linear_topk.cuh against its header's formulas in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits. Bytes that are not outputs (zones around
 * every buffer, gaps between rows, inputs) must not change.
 *
 * x is a multiple of 1/128 below 1, the weight and the bias are small whole numbers. So every logit is exact in f32, whatever the order
 * of its sum is, also with TF32; and many are equal. ids must therefore be exactly the header's. logp and lse have the bounds of
 * `slack`, with U = 2^-24.
 */
#include "lk/linear_topk.cuh"

#include "tests/test.h"

TEST_DEFINE(LINEAR_TOPK)

typedef lk_linear_topk_args args_t;
typedef lk_linear_topk_plan plan_t;
static lk_status (*const call_of[])(const args_t *, cudaStream_t) = TEST_OF_TYPES(lk_linear_topk_forward);
static lk_status (*const query_of[])(const args_t *, size_t *) = TEST_OF_TYPES(lk_linear_topk_forward_workspace_bytes);
static lk_status (*const plan_of[])(const args_t *, size_t, plan_t *) = TEST_OF_TYPES(lk_linear_topk_forward_plan);
static const char *const direction_name[] = {"forward"};
static lk_linear_topk_context context;

enum { X, WEIGHT, BIAS, SEED, OFFSET, IDS, LOGP, LSE, SCORE, TENSORS };
static const char *const tensor_name[] = {"x", "weight", "bias", "seed", "offset", "ids", "logp", "lse", "score"};
/* Of logits. Those from MASKED to PLUS_INF are in the bias. RISING, FALLING: from column to column. EQUAL: all of a token. LAST: the
 * largest are the last ones. FAR_INF: one large logit, and +inf in the last column. FAR_LOW: the first tile is masked, and the other
 * logits are equal and so low that z times log2(e) overflows, in f32 and bf16. */
enum { NOTHING, RISING, FALLING, EQUAL, LAST, MASKED, ALL_MASKED, NOT_A_NUMBER, PLUS_INF, FAR_INF, FAR_LOW, SPECIALS };
static const char *const special_name[] = {"nothing", "rising", "falling", "equal", "last", "-inf", "all -inf", "nan", "+inf",
                                           "+inf far away", "low behind -inf"};
enum { DEFAULT, SMALLEST, BETWEEN }; /* the workspace: the default plan's, the smallest, a factor of the smallest */

typedef struct {
    int type, k, special, budget;
    int64_t tokens, hidden, vocab, chunk, start;
    int gap, at; /* elements between rows, and past 256-byte alignment */
    float scale, softcap;
    bool has[TENSORS], narrow, tf32;
    uint64_t seed;
} problem;

static problem plain(int type, int64_t tokens, int64_t hidden, int64_t vocab, int k)
{
    problem p = {};
    p.type = type, p.tokens = tokens, p.hidden = hidden, p.vocab = vocab, p.k = k;
    p.seed = (uint64_t)(tokens * 1000003 + hidden * 1009 + vocab * 10 + k);
    for (int t = 0; t < TENSORS; t++) p.has[t] = t != BIAS && t != SEED && t != OFFSET;
    return p;
}

static const char *describe(const problem *p)
{
    static char text[500];
    int n = snprintf(text, sizeof text, "%s, %lld x %lld x %lld, k %d, %s, chunk %lld start %lld, gap %d at %d, scale %g softcap %g%s%s, "
                     "budget %d, seed %llu, has",
                     test_type_name[p->type], (long long)p->tokens, (long long)p->hidden, (long long)p->vocab, p->k,
                     special_name[p->special], (long long)p->chunk, (long long)p->start, p->gap, p->at, (double)p->scale,
                     (double)p->softcap, p->narrow ? ", int32" : "", p->tf32 ? ", tf32" : "", p->budget, (unsigned long long)p->seed);
    for (int t = 0; t < TENSORS; t++)
        if (p->has[t]) n += snprintf(text + n, sizeof text - (size_t)n, " %s", tensor_name[t]);
    return text;
}

/* ---- Inputs -------------------------------------------------------------------------------------------------------------- */

static double x_of(const problem *p, int64_t token, int64_t d)
{
    if (p->special == RISING || p->special == FALLING) return d == 0 ? 1 : d == 1 ? 1.0 / 32 : 0;
    return (double)(test_hash(p->seed + (uint64_t)(token * p->hidden + d)) % 255) / 128 - 127.0 / 128;
}
static double weight_of(const problem *p, int64_t col, int64_t d)
{
    const double sign = p->special == FALLING ? -1 : 1, high = fmin((double)(col / 32) - 127, 127);
    if (p->special == RISING || p->special == FALLING) return sign * (d == 0 ? high : d == 1 ? (double)(col % 32) : 3);
    if (p->special == LAST && col < p->vocab - p->k) return 0;
    if (p->special == FAR_INF || p->special == FAR_LOW) return 0;
    if (p->special == EQUAL) col = 0;
    return (double)(test_hash(p->seed * 3 + (uint64_t)(col * p->hidden + d)) % 63) - 31;
}
static double bias_of(const problem *p, int64_t col)
{
    const uint64_t hash = test_hash(p->seed * 7 + (uint64_t)col);
    if (p->special == ALL_MASKED || (p->special == MASKED && hash % 3)) return -INFINITY;
    if (p->special == NOT_A_NUMBER && hash % 41 == 0) return NAN;
    if (p->special == PLUS_INF && hash % 41 == 0) return INFINITY;
    if (p->special == FAR_INF) return col == 0 ? 200 : col == p->vocab - 1 ? INFINITY : 0;
    if (p->special == FAR_LOW) return col < p->vocab - 50 ? -INFINITY : p->type == TEST_F16 ? -1536 : -201326592; /* 1.5 times 2^27 */
    return (double)(hash % 15) - 7;
}
static uint64_t number_of(const problem *p, int t, int64_t token)
{
    return t == OFFSET && !p->has[OFFSET] ? 0 : test_hash(p->seed * 11 + (uint64_t)(token * 2 + t));
}
static double logit_of(const problem *p, int64_t token, int64_t col)
{
    double sum = p->has[BIAS] ? bias_of(p, col) : 0;
    for (int64_t d = 0; d < p->hidden; d++) sum += x_of(p, token, d) * weight_of(p, col, d);
    return sum;
}

/* ---- A call -------------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t rows, cols, stride;
    int type, at, bytes;
} layout;
static layout layout_of(const problem *p, int t)
{
    const int bytes = test_type_bytes[p->type];
    const layout all[TENSORS] = {{p->tokens, p->hidden, p->hidden + p->gap, p->type, p->at, bytes},
                                 {p->vocab, p->hidden, p->hidden + 2 * p->gap, p->type, p->at, bytes},
                                 {1, p->vocab, p->vocab, p->type, p->at, bytes},
                                 {1, p->tokens, p->tokens, 0, p->at, 8},
                                 {1, p->tokens, p->tokens, 0, p->at, 8},
                                 {p->tokens, p->k, p->k, 0, p->at, p->narrow ? 4 : 8},
                                 {p->tokens, p->k, p->k, TEST_F32, p->at, 4},
                                 {1, p->tokens, p->tokens, TEST_F32, p->at, 4},
                                 {p->tokens, p->k, p->k, TEST_F32, p->at, 4}};
    return all[t];
}

static test_buffer buffer[TENSORS], workspace;
static unsigned char *kept[TENSORS];
static size_t kept_bytes[TENSORS];
static args_t args;
static plan_t plan;

/* The workspace of the call, whose plan becomes `plan`. */
static size_t choose_room(const problem *p)
{
    plan_t any = {}, again = {};
    size_t bytes = 0;
    test_launched(plan_of[p->type](&args, SIZE_MAX, &any), describe(p));
    test_launched(query_of[p->type](&args, &bytes), describe(p));
    if (p->budget == SMALLEST) bytes = any.minimum_bytes;
    if (p->budget == BETWEEN) bytes = any.minimum_bytes * (2 + p->seed % 5) / 2 + 100;
    const bool good = plan_of[p->type](&args, bytes, &plan) == LK_OK && plan_of[p->type](&args, plan.workspace_bytes, &again) == LK_OK;
    if (!test_that(good && plan.workspace_bytes <= bytes && plan.minimum_bytes == any.minimum_bytes && !strcmp(plan.text, again.text) &&
                   plan.chunks * plan.chunk_tokens >= p->tokens && (plan.chunks - 1) * plan.chunk_tokens < p->tokens + !p->tokens))
        test_detail("%zu bytes give %s, and these %s; %s", bytes, plan.text, again.text, describe(p));
    if (!test_that(!p->chunk || !p->tokens || plan.chunk_tokens == (p->chunk < p->tokens ? p->chunk : p->tokens)))
        test_detail("%s; %s", plan.text, describe(p));
    return plan.workspace_bytes;
}

static bool prepare(const problem *p, int run)
{
    void *at[TENSORS] = {};
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        const int64_t elements = l.rows && l.cols ? (l.rows - 1) * l.stride + l.cols : 0;
        test_buffer_size(&buffer[t], (size_t)(elements * l.bytes), (size_t)(l.at * l.bytes), t >= IDS ? (run ? 0x7f : 0x5a) : 0xff);
        for (int64_t r = 0; r < l.rows && t < IDS; r++)
            for (int64_t c = 0; c < l.cols; c++)
                if (t == SEED || t == OFFSET) ((uint64_t *)test_buffer_host(&buffer[t]))[c] = number_of(p, t, c);
                else test_put(l.type, test_buffer_host(&buffer[t]), r * l.stride + c,
                         (float)(t == X ? x_of(p, r, c) : t == WEIGHT ? weight_of(p, r, c) : bias_of(p, c)));
        test_buffer_upload(&buffer[t]);
        at[t] = p->has[t] ? test_buffer_device(&buffer[t]) : NULL;
    }
    args = {};
    args.context = &context, args.x = at[X], args.weight = at[WEIGHT], args.bias = at[BIAS];
    args.ids = at[IDS], args.logp = (float *)at[LOGP], args.lse = (float *)at[LSE], args.score = (float *)at[SCORE];
    args.seed = (const uint64_t *)at[SEED], args.offset = (const uint64_t *)at[OFFSET];
    args.tokens = p->tokens, args.hidden = p->hidden, args.vocab = p->vocab, args.k = p->k;
    if (p->gap) args.x_stride = layout_of(p, X).stride, args.weight_stride = layout_of(p, WEIGHT).stride;
    args.chunk_tokens = p->chunk, args.vocab_start = p->start, args.logit_scale = p->scale, args.softcap = p->softcap;
    args.ids_dtype = p->narrow ? LK_TARGET_INT32 : LK_TARGET_INT64, args.tf32 = p->tf32;
    args.workspace_bytes = choose_room(p);
    test_buffer_size(&workspace, args.workspace_bytes, 0, run ? 0x7f : 0xff), test_buffer_upload(&workspace);
    args.workspace = args.workspace_bytes ? test_buffer_device(&workspace) : NULL;
    return true;
}
static lk_status launch(const problem *p) { return call_of[p->type](&args, test.stream); }
static void collect(const problem *)
{
    for (int t = 0; t < TENSORS; t++) test_buffer_download(&buffer[t]);
    test_buffer_download(&workspace), test_buffer_accept_all(&workspace);
    test_buffer_untouched(&workspace, "workspace", "what lies around it");
}

/* ---- The reference ------------------------------------------------------------------------------------------------------- */

#define U 0x1p-24

/* Whether logit a of column i comes before logit b of column j. */
static bool before(double a, int64_t i, double b, int64_t j)
{
    const bool both = (a != a && b != b) || a == b;
    return both ? i < j : a != a || a > b;
}

/* g of a column, from the header's words. */
static double noise_of(const problem *p, int64_t token, int64_t col)
{
    const uint64_t key = number_of(p, SEED, token), offset = number_of(p, OFFSET, token);
    uint32_t c[4] = {(uint32_t)((p->start + col) / 4), 0, (uint32_t)offset, (uint32_t)(offset >> 32)};
    uint32_t k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xd2511f53 * c[0], b = (uint64_t)0xcd9e8d57 * c[2];
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
        memcpy(c, next, sizeof c);
        k[0] += 0x9e3779b9, k[1] += 0xbb67ae85;
    }
    const double v = (double)fminf((float)(((double)(float)c[col % 4] + 0.5) * 0x1p-32), 1 - 0x1p-24f);
    return -log(-log1p(-v));
}

/* Whether a token's ids are in the order of score, and no other column comes before the last of them. */
static void verify_draws(const problem *p, int64_t token, const double *score, const int64_t *id, const float *found, double cap_slack)
{
    auto off = [=](double y) { return isfinite(y) ? cap_slack + 8 * U * (fabs(y) + 25) : 0; };
    auto wrong = [=](int64_t i, int64_t j) { /* column i must not be ahead of column j */
        const double a = score[i], b = score[j];
        return isfinite(a) && isfinite(b) ? a < b - off(a) - off(b) : !before(a, i, b, j);
    };
    for (int i = 0; i < p->k; i++) {
        if (!test_that(id[i] >= 0 && id[i] < p->vocab)) return test_detail("id %d of token %lld is %lld", i, (long long)token, (long long)id[i]);
        for (int64_t col = 0; col < p->vocab; col++) {
            bool earlier = false;
            for (int j = 0; j <= i; j++) earlier = earlier || id[j] == col;
            if (!earlier && !test_that(!wrong(id[i], col)))
                return test_detail("id %d of token %lld is %lld with %.9g, before %lld with %.9g; %s", i, (long long)token, (long long)id[i],
                                   score[id[i]], (long long)col, score[col], describe(p));
        }
        for (int j = 0; j < i; j++)
            if (!test_that(id[j] != id[i])) return test_detail("id %lld of token %lld is there twice", (long long)id[i], (long long)token);
        if (p->has[SCORE] && !test_near(TEST_F32, found[i], score[id[i]], off(score[id[i]])))
            test_detail("score %d of token %lld is %.9g, not %.9g; %s", i, (long long)token, (double)found[i], score[id[i]], describe(p));
    }
}

static void verify(const problem *p)
{
    static double *logit, *score;
    static size_t room, score_room;
    logit = (double *)test_room(logit, &room, (size_t)p->vocab * 8);
    score = (double *)test_room(score, &score_room, (size_t)p->vocab * 8);
    const double scale = p->scale == 0 ? 1 : (double)p->scale, cap = (double)p->softcap;
    for (int64_t token = 0; token < p->tokens; token++) {
        double top = -INFINITY, sum = 0, spread = 0, largest = 0;
        int64_t last = -1;
        for (int64_t col = 0; col < p->vocab; col++) logit[col] = logit_of(p, token, col);
        auto z_of = [=](int64_t col) { return cap > 0 ? cap * tanh(scale * logit[col] / cap) : scale * logit[col]; };
        for (int64_t col = 0; col < p->vocab; col++) top = fmax(top, z_of(col));
        for (int64_t col = 0; col < p->vocab; col++) {
            const double z = z_of(col), e = exp(z - top);
            sum += e, spread += z == -INFINITY ? 0 : e * (top - z), largest = fmax(largest, z == -INFINITY ? 0 : fabs(z));
        }
        bool nan = false;
        for (int64_t col = 0; col < p->vocab; col++) nan = nan || logit[col] != logit[col];
        const double lse = nan ? NAN : isinf(top) ? top : top + log(sum);
        /* z under a softcap; a thread's sum, its terms, the sum of 256 threads, the logarithm */
        const double slack = (cap > 0 ? 16 * U * largest : 0) + U * (2 * spread / sum + 24 + (double)p->vocab / 1024);
        const float *const scores = (const float *)test_buffer_back(&buffer[SCORE]) + token * p->k;
        int64_t id[LK_TOPK_MOST];
        for (int i = 0; i < p->k; i++) {
            const int64_t at = token * p->k + i;
            const void *const ids = test_buffer_back(&buffer[IDS]);
            id[i] = (p->narrow ? ((const int32_t *)ids)[at] : ((const int64_t *)ids)[at]) - p->start;
        }
        if (p->has[SEED] && p->has[IDS]) {
            for (int64_t col = 0; col < p->vocab; col++) score[col] = z_of(col) + noise_of(p, token, col);
            verify_draws(p, token, score, id, scores, cap > 0 ? 16 * U * largest : 0);
        }
        for (int i = 0; i < p->k && !(p->has[SEED] && !p->has[IDS]); i++) {
            int64_t best = -1;
            for (int64_t col = 0; col < p->vocab; col++) {
                if (last >= 0 && !before(logit[last], last, logit[col], col)) continue;
                if (best < 0 || before(logit[col], col, logit[best], best)) best = col;
            }
            last = best;
            const int64_t at = token * p->k + i;
            if (p->has[SEED]) best = id[i] >= 0 && id[i] < p->vocab ? id[i] : 0;
            if (p->has[IDS] && !test_that(id[i] == best))
                test_detail("id %d of token %lld is %lld, not %lld; %s", i, (long long)token, (long long)id[i], (long long)best, describe(p));
            if (!p->has[SEED] && p->has[SCORE] && !test_near(TEST_F32, scores[i], z_of(best), (cap > 0 ? 16 : 1) * U * fabs(z_of(best))))
                test_detail("score %d of token %lld is %.9g, not %.9g; %s", i, (long long)token, (double)scores[i], z_of(best), describe(p));
            const double logp = isfinite(lse) ? z_of(best) - top - log(sum) : NAN; /* lse may have no digits left for the sum */
            const float found = ((const float *)test_buffer_back(&buffer[LOGP]))[at];
            if (p->has[LOGP] && !test_near(TEST_F32, found, logp, slack + U * fabs(logp)))
                test_detail("logp %d of token %lld is %.9g, not %.9g; %s", i, (long long)token, (double)found, logp, describe(p));
        }
        const float found = ((const float *)test_buffer_back(&buffer[LSE]))[token];
        if (p->has[LSE] && !test_near(TEST_F32, found, lse, slack))
            test_detail("lse of token %lld is %.9g, not %.9g; %s", (long long)token, (double)found, lse, describe(p));
    }
}

static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        if (t >= IDS && p->has[t])
            test_settle(&buffer[t], &kept[t], &kept_bytes[t], keep, l.rows, l.cols, l.stride, l.bytes, tensor_name[t], what, describe(p));
        test_buffer_untouched(&buffer[t], tensor_name[t], describe(p));
    }
}

static const test_op<problem> op = {describe, prepare, launch, collect, verify, settle};
static void check(const problem *p) { test_twice(op, p); }

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

static void sizes(int type, int, int)
{
    static const struct {
        int64_t tokens, hidden, vocab;
        int k;
    } list[] = {{1, 1, 1, 1},      {1, 2, 2, 2},     {3, 8, 64, 64},     {2, 5, 65, 64},    {5, 8, 127, 7},     {4, 16, 1000, 20}, {2, 3, 4095, 64},
                {2, 3, 4096, 1},   {2, 8, 4097, 33}, {3, 16, 8192, 64},  {1, 4, 12289, 50}, {200, 8, 72, 3},    {2, 2, 20003, 64}, {9, 24, 300, 2},
                {2, 100, 515, 31}};
    for (int i = 0; i < LENGTH_OF(list); i++) {
        problem p = plain(type, list[i].tokens, list[i].hidden, list[i].vocab, list[i].k);
        if (test.small && list[i].vocab > 9000) continue;
        p.narrow = i % 2, p.scale = i % 3 ? 0.0625f : 0, p.has[BIAS] = i % 4 == 1;
        check(&p);
    }
}

/* Every special, at lengths where the keys have room and where they are sorted often. */
static void specials(int type, int, int)
{
    for (int special = 0; special < SPECIALS; special++)
        for (int i = 0; i < 4; i++) {
            const int64_t lengths[] = {70, 3000, 4100, 8200};
            if (test.small && (i == 1 || (i == 3 && special != RISING && special != EQUAL))) continue;
            problem p = plain(type, 2, special == EQUAL ? 3 : 2 + special % 2 * 6, lengths[i], i == 0 ? 64 : 1 + (special * 17 + i * 5) % 64);
            p.special = special, p.has[BIAS] = special >= MASKED, p.scale = special == RISING && i == 0 ? 1 : 0.125f; /* 1: all z near -127 */
            p.softcap = (special + i) % 3 == 0 ? 4 : 0;
            check(&p);
        }
}

/* What a thread sees after its first tile: of blocks of 1024 threads and of 256. */
static void far(int type, int, int)
{
    for (int i = 0; i < 4; i++) {
        problem p = plain(type, i < 2 ? 2 : 140, 1, i < 2 ? 8192 + 50 : 2048 + 50, 3);
        p.special = i % 2 ? FAR_LOW : FAR_INF, p.has[BIAS] = true, p.scale = i % 2 ? 0x1p100f : 0;
        check(&p);
    }
    problem p = plain(type, 2, 1, 8192 + 4, 3); /* NaN in the first tile, then few columns */
    p.special = NOT_A_NUMBER, p.has[BIAS] = true;
    check(&p);
}

static void options(int type, int, int)
{
    for (int i = 0; i < 8; i++) {
        problem p = plain(type, 11, 10, 180 + i, 5 + i);
        p.softcap = i % 2 ? 3 : 0, p.scale = i % 3 ? 0.1f : 0, p.has[BIAS] = i % 4 > 1, p.narrow = i % 2, p.start = i % 3 ? 1000 * i : 0;
        p.chunk = i % 3 == 1 ? 4 : 0, p.budget = i % 3, p.tf32 = type == TEST_F32 && i % 2;
        for (int t = IDS; t < TENSORS; t++) p.has[t] = i % 4 == 0 || t == IDS + i % 3;
        if (i == 7) p.scale = 0x1p-90f; /* all z are 0 */
        check(&p);
    }
}

/* Rows that are no multiple of 8, that lie anywhere, and of whose logits the workspace has more columns. */
static void places(int type, int, int)
{
    for (int i = 0; i < 4; i++) {
        problem p = plain(type, i == 3 ? 2100 : 5, 8 + i % 2, i == 3 ? 75 : 260 + i, 6);
        if (test.small && i == 3) p.tokens = 3;
        p.gap = i, p.at = i == 3 ? 0 : 1 + 2 * i, p.has[BIAS] = i % 2, p.scale = 0.125f;
        check(&p);
    }
}

static void graphs(int type, int, int)
{
    problem p = plain(type, 9, 16, 600, 12);
    p.chunk = 4, p.has[BIAS] = true;
    for (int seeded = 0; seeded < 2; seeded++) {
        p.has[SEED] = p.has[OFFSET] = seeded;
        check(&p); /* leaves its bits in kept */
        test_graph(op, &p);
    }
}

static void empty(int type, int, int)
{
    problem p = plain(type, 0, 5, 7, 3);
    check(&p);
    p.has[SEED] = p.has[OFFSET] = true;
    check(&p);
    args.seed = NULL, args.offset = (const uint64_t *)256; /* without tokens all but args may be NULL */
    test_launched(launch(&p), describe(&p));
}

/* Draws: at lengths where a thread has no column, some and several tiles, with each special, option and place. */
static void draws(int type, int, int)
{
    static const int64_t lengths[] = {1, 2, 63, 700, 3000, 4100, 8200, 20003};
    for (int i = 0; i < LENGTH_OF(lengths); i++)
        for (int special = 0; special <= FAR_INF; special++) {
            if (test.small ? (i + special) % 4 || lengths[i] > 9000 : (i + special + type) % 2) continue;
            const int64_t vocab = lengths[i], k = 1 + (special * 7 + i * 5) % 64;
            problem p = plain(type, i == 3 ? 9 : 2, 2 + special % 3, vocab, (int)(k < vocab ? k : vocab));
            p.special = special, p.has[BIAS] = special >= MASKED, p.scale = i % 4 == 3 ? 0.01f : 0.125f;
            p.has[SEED] = true, p.has[OFFSET] = i % 2, p.softcap = (special + i) % 3 == 0 ? 4 : 0, p.start = special % 4 * 1000;
            p.narrow = i % 2, p.chunk = i == 3 ? 4 : 0, p.at = special % 2, p.has[SCORE] = (special + i) % 5 > 0;
            check(&p);
        }
    problem p = plain(type, 2, 1, 8192 + 50, 3); /* the bound of the other tiles is that of very low logits */
    p.special = FAR_LOW, p.has[BIAS] = p.has[SEED] = true;
    check(&p);
    p = plain(type, 3, 4, 900, 64); /* z between -1 and 1, and between -1e9 and 1e9 */
    p.has[SEED] = true, p.scale = 0x1p-10f;
    check(&p);
    p.scale = 0x1p20f;
    check(&p);
}

/* Draws follow the distribution: the first id, and the second over all first ones. 3000 tokens with the same logits. */
static void distribution(void)
{
    problem p = plain(TEST_F32, 3000, 3, 24, 2);
    p.has[SEED] = p.has[OFFSET] = true, p.scale = 1.0f / 64;
    prepare(&p, 0);
    for (int64_t t = 1; t < p.tokens; t++)
        for (int64_t d = 0; d < p.hidden; d++) ((float *)test_buffer_host(&buffer[X]))[t * p.hidden + d] = ((float *)test_buffer_host(&buffer[X]))[d];
    for (int64_t t = 0; t < p.tokens; t++)
        ((uint64_t *)test_buffer_host(&buffer[SEED]))[t] = 7, ((uint64_t *)test_buffer_host(&buffer[OFFSET]))[t] = (uint64_t)t;
    for (int t = X; t < IDS; t++) test_buffer_upload(&buffer[t]);
    if (!test_launched(launch(&p), describe(&p))) return;
    collect(&p);
    double prob[24], sum = 0, second[24] = {}, count[2][24] = {};
    for (int c = 0; c < 24; c++) sum += prob[c] = exp((double)p.scale * logit_of(&p, 0, c));
    for (int c = 0; c < 24; c++) prob[c] /= sum;
    for (int a = 0; a < 24; a++)
        for (int b = 0; b < 24; b++) second[b] += a == b ? 0 : prob[a] * prob[b] / (1 - prob[a]);
    for (int64_t t = 0; t < 2 * p.tokens; t++) count[t % 2][((const int64_t *)test_buffer_back(&buffer[IDS]))[t]]++;
    for (int i = 0; i < 2; i++) {
        double chi = 0;
        for (int c = 0; c < 24; c++) {
            const double want = (double)p.tokens * (i ? second[c] : prob[c]);
            chi += (count[i][c] - want) * (count[i][c] - want) / want;
        }
        if (!test_within(chi, 55)) test_detail("chi square of 23 degrees of freedom, draw %d", i); /* above 55 once in 5000 */
    }
}

/* What a token draws does not depend on its batch; and columns of two ranks, merged by score, are those of one. */
static void draws_alone(void)
{
    enum { TOKENS = 5, K = 8, VOCAB = 3000, SPLIT = 1100 };
    static int64_t ids[3][TOKENS * K];
    static float scores[3][TOKENS * K];
    problem p = plain(TEST_BF16, TOKENS, 6, VOCAB, K);
    p.has[SEED] = p.has[OFFSET] = true, p.scale = 1.0f / 32;
    for (int call = 0; call < 3 + TOKENS; call++) { /* all; the first columns; the others; then token by token */
        prepare(&p, 0);
        if (call == 1) args.vocab = SPLIT;
        if (call == 2) args.weight = (const lk_bf16 *)args.weight + SPLIT * args.hidden, args.vocab = VOCAB - SPLIT, args.vocab_start = SPLIT;
        if (call > 2) {
            const int64_t token = call - 3;
            args.x = (const lk_bf16 *)args.x + token * args.hidden, args.seed += token, args.offset += token, args.tokens = 1;
        }
        if (!test_launched(launch(&p), describe(&p))) return;
        collect(&p);
        const int64_t *const got = (const int64_t *)test_buffer_back(&buffer[IDS]);
        const float *const score = (const float *)test_buffer_back(&buffer[SCORE]);
        if (call < 3) memcpy(ids[call], got, sizeof ids[0]), memcpy(scores[call], score, sizeof scores[0]);
        else if (!test_that(!memcmp(ids[0] + (call - 3) * K, got, K * 8))) test_detail("token %d draws something else alone", call - 3);
    }
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0, a = 0; i < K; i++) {
            const int left = t * K + a, right = t * K + i - a;
            const bool first = scores[1][left] >= scores[2][right];
            const int64_t merged = first ? ids[1][left] : ids[2][right];
            if (!test_that(merged == ids[0][t * K + i])) test_detail("draw %d of token %d is %lld over two ranks", i, t, (long long)merged);
            a += first;
        }
}

#if defined(LK_SIMT) /* a function for the device */

/* The published answers of Philox4x32-10. */
static void philox(void)
{
    const uint4 zero = lk_philox(make_uint4(0, 0, 0, 0), make_uint2(0, 0));
    const uint4 pi = lk_philox(make_uint4(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344), make_uint2(0xa4093822, 0x299f31d0));
    const bool right = zero.x == 0x6627e8d5 && zero.y == 0xe169c58d && zero.z == 0xbc57ac4c && zero.w == 0x9b00dbd8;
    if (!test_that(right && pi.x == 0xd16cfe09 && pi.y == 0x94fdcceb && pi.z == 0x5001e420 && pi.w == 0x24126ea1))
        test_detail("%08x %08x %08x %08x, %08x %08x %08x %08x", zero.x, zero.y, zero.z, zero.w, pi.x, pi.y, pi.z, pi.w);
}

#endif

/* ---- Errors, plans ------------------------------------------------------------------------------------------------------- */

typedef test_bad_call<args_t> bad_call;
static lk_linear_topk_context unmade;

static void expect_error(int type, const bad_call *bad)
{
    problem p = plain(type, 3, 8, 40, 5);
    p.has[BIAS] = true;
    prepare(&p, 0);
    if (bad->spoil) bad->spoil(&args);
    size_t asked = TEST_NOT_ASKED;
    const lk_status status = launch(&p), answer = query_of[type](&args, &asked);
    test_expect(status, bad->want, bad->field, "lk_linear_topk", "forward", type);
    test_expect_query(answer, bad->asked, asked, bad->field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = IDS; t < TENSORS; t++) test_expect_unwritten(status, &buffer[t], tensor_name[t], bad->field);
}

static void errors(int type, int)
{
    static const bad_call list[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_NULL, LK_OK, "context", SPOIL(a->context = NULL)},
        {LK_ERR_VALUE, LK_OK, "context", SPOIL(a->context = &unmade)},
        {LK_ERR_NULL, LK_OK, "x is", SPOIL(a->x = NULL)},
        {LK_ERR_NULL, LK_OK, "weight", SPOIL(a->weight = NULL)},
        {LK_ERR_NULL, LK_OK, "every output", SPOIL((a->ids = NULL, a->logp = a->lse = a->score = NULL))},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens", SPOIL(a->tokens = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens", SPOIL(a->tokens = (int64_t)1 << 31)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "hidden", SPOIL(a->hidden = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab", SPOIL(a->vocab = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "k is 0; it must be 1 to 40", SPOIL(a->k = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "k is 41", SPOIL(a->k = 41)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "k is 65; it must be 1 to 64", SPOIL((a->vocab = 80, a->k = 65))},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab_start", SPOIL(a->vocab_start = -1)},
        {LK_ERR_NULL, LK_ERR_NULL, "seed is NULL, but offset", SPOIL(a->offset = (const uint64_t *)a->x)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab_start is 6; with seed", SPOIL((a->seed = (const uint64_t *)a->x, a->vocab_start = 6))},
        {LK_ERR_ALIGNMENT, LK_OK, "seed is", SPOIL(a->seed = (const uint64_t *)((const char *)a->x + 4))},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "chunk_tokens", SPOIL(a->chunk_tokens = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "x_stride", SPOIL(a->x_stride = 7)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "weight_stride", SPOIL(a->weight_stride = 7)},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->lse = a->logp)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "logit_scale", SPOIL(a->logit_scale = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "logit_scale", SPOIL(a->logit_scale = 0x1p101f)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "softcap", SPOIL(a->softcap = NAN)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "softcap", SPOIL(a->softcap = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "logit_scale over softcap", SPOIL((a->logit_scale = 0x1p60f, a->softcap = 0x1p-60f))},
        {LK_ERR_VALUE, LK_ERR_VALUE, "ids_dtype", SPOIL(a->ids_dtype = 2)},
        {LK_ERR_ALIGNMENT, LK_OK, "x is", SPOIL(MOVED(a->x, 1))},
        {LK_ERR_ALIGNMENT, LK_OK, "ids", SPOIL(MOVED(a->ids, 2))},
        {LK_ERR_ALIGNMENT, LK_OK, "logp", SPOIL(MOVED(a->logp, 2))},
        {LK_ERR_WORKSPACE, LK_OK, "workspace", SPOIL(a->workspace = NULL)},
        {LK_ERR_WORKSPACE, LK_OK, "workspace_bytes", SPOIL(a->workspace_bytes = 100)},
        {LK_ERR_WORKSPACE, LK_OK, "workspace", SPOIL(MOVED(a->workspace, 64))},
    };
    for (int i = 0; i < LENGTH_OF(list); i++) expect_error(type, &list[i]);
    if (!test_that(call_of[type](NULL, test.stream) == LK_ERR_NULL && plan_of[type](&args, 1 << 20, NULL) == LK_ERR_NULL))
        test_detail("NULL is taken");
    if (!test_that(lk_linear_topk_init(NULL) == LK_ERR_NULL && lk_linear_topk_destroy(&unmade) == LK_ERR_VALUE))
        test_detail("a context that is none is taken");
}

/* More memory never gives more chunks, and a plan's own bytes give the plan. Sizes that no memory holds do not wrap around. */
static void plans(void)
{
    static char there;
    args_t a = {};
    a.tokens = 8192, a.hidden = 4096, a.vocab = 151936, a.k = 64, a.logp = (float *)&there;
    plan_t last = {}, p = {};
    test_launched(lk_linear_topk_forward_plan_bf16(&a, SIZE_MAX, &last), "plans");
    if (!test_that(last.chunks == 1)) test_detail("%s", last.text);
    int64_t chunks = INT64_MAX;
    for (size_t budget = last.minimum_bytes; budget < ((size_t)8 << 30); budget += budget / 16 + 1) {
        plan_t again = {};
        test_launched(lk_linear_topk_forward_plan_bf16(&a, budget, &p), "plans");
        test_launched(lk_linear_topk_forward_plan_bf16(&a, p.workspace_bytes, &again), "plans");
        if (!test_that(p.workspace_bytes <= budget && p.chunks <= chunks && !strcmp(p.text, again.text)))
            test_detail("%zu bytes: %s, then %s", budget, p.text, again.text);
        chunks = p.chunks;
    }
    if (!test_that(chunks == 1)) test_detail("%s", p.text);
    if (!test_that(lk_linear_topk_forward_plan_bf16(&a, last.minimum_bytes - 1, &p) == LK_ERR_WORKSPACE)) test_detail("too small");
    a.tokens = INT32_MAX, a.hidden = 1 << 30, a.vocab = 1 << 30;
    test_launched(lk_linear_topk_forward_plan_bf16(&a, SIZE_MAX, &p), "plans");
    if (!test_that(p.chunks > 0 && p.workspace_bytes >= p.minimum_bytes)) test_detail("%s", p.text);
}

/* ---- Random draws -------------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const r = &state;
    const int64_t vocab = 1 + test_below(r, test_chance(r, 6) ? 9000 : test_chance(r, 2) ? 600 : 60);
    problem p = plain((int)test_below(r, TEST_TYPES), 1 + test_below(r, 8), 1 + test_below(r, 20), vocab, 1);
    p.k = 1 + (int)test_below(r, vocab < LK_TOPK_MOST ? vocab : LK_TOPK_MOST), p.seed = seed;
    if (test_chance(r, 2)) p.special = (int)test_below(r, FAR_INF); /* the others are for lengths of their own */
    p.has[BIAS] = p.special >= MASKED || test_chance(r, 2);
    if (test_chance(r, 3)) p.gap = (int)test_below(r, 9), p.at = (int)test_below(r, 8);
    if (test_chance(r, 3)) p.chunk = 1 + test_below(r, p.tokens);
    p.budget = (int)test_below(r, 3), p.narrow = test_chance(r, 2), p.tf32 = p.type == TEST_F32 && test_chance(r, 3);
    if (test_chance(r, 2)) p.scale = (float)(0.02 + 0.2 * fabs(test_uniform(r)));
    if (test_chance(r, 4)) p.softcap = 5;
    if (test_chance(r, 3)) p.start = test_below(r, 1 << 30);
    if (test_chance(r, 3)) p.has[IDS + test_below(r, 4)] = false;
    if (test_chance(r, 3)) p.has[SEED] = true, p.has[OFFSET] = test_chance(r, 2), p.start -= p.start % 4;
    return p;
}

/* ---- Large tensors ------------------------------------------------------------------------------------------------------- */

#if !defined(LK_SIMT)

/* A weight and logits of more than 2^31 elements. */
static void huge(void)
{
    const int64_t hidden = 16, vocab = (1ll << 27) + 3, tokens = 20, k = 64;
    lk_bf16 *const weight = (lk_bf16 *)test_huge_allocate(vocab * hidden * 2), *const x = (lk_bf16 *)test_huge_allocate(tokens * hidden * 2);
    int64_t *const ids = (int64_t *)test_huge_allocate(tokens * k * 8);
    float *const logp = (float *)test_huge_allocate(tokens * k * 4), *const lse = (float *)test_huge_allocate(tokens * 4);
    test_huge_fill(weight, vocab * hidden, 0), test_huge_fill(x, tokens * hidden, 0);
    args_t a = {};
    a.context = &context, a.x = x, a.weight = weight, a.ids = ids, a.logp = logp, a.lse = lse;
    a.tokens = tokens, a.hidden = hidden, a.vocab = vocab, a.k = (int)k;
    plan_t p;
    if (!test_launched(lk_linear_topk_forward_plan_bf16(&a, SIZE_MAX, &p), "huge")) return test_huge_free();
    if (!test_that(p.chunks == 1)) test_detail("%s", p.text);
    a.workspace = test_huge_allocate((int64_t)p.workspace_bytes), a.workspace_bytes = p.workspace_bytes;
    if (!test_launched(lk_linear_topk_forward_bf16(&a, test.stream), "huge")) return test_huge_free();
    for (int64_t token = 0; token < tokens; token += tokens - 1) {
        int64_t id[64], above = 0;
        float found[64], all;
        double logit[64], sum = 0;
        TEST_CUDA(cudaMemcpy(id, ids + token * k, sizeof id, cudaMemcpyDeviceToHost));
        TEST_CUDA(cudaMemcpy(found, logp + token * k, sizeof found, cudaMemcpyDeviceToHost));
        TEST_CUDA(cudaMemcpy(&all, lse + token, sizeof all, cudaMemcpyDeviceToHost));
        auto logit_at = [=](int64_t col) {
            double dot = 0;
            for (int64_t d = 0; d < hidden; d++) dot += (double)test_huge_value(token * hidden + d) * (double)test_huge_value(col * hidden + d);
            return dot;
        };
        bool order = true;
        for (int i = 0; i < k; i++) {
            if (!test_that(id[i] >= 0 && id[i] < vocab)) return test_detail("id %lld", (long long)id[i]), test_huge_free();
            logit[i] = logit_at(id[i]), order = order && (i == 0 || logit[i] <= logit[i - 1] + 1e-5);
            if (!test_within(fabs((double)found[i] - (logit[i] - (double)all)), 1e-5)) test_detail("logp %d of token %lld", i, (long long)token);
        }
        for (int64_t col = 0; col < vocab; col++) {
            const double z = logit_at(col);
            above += z > logit[k - 1] + 1e-5, sum += exp(z - logit[0]);
        }
        if (!test_that(order && above < k)) test_detail("%lld columns are above the last id of token %lld", (long long)above, (long long)token);
        if (!test_within(fabs((double)all - logit[0] - log(sum)), 1e-4)) test_detail("lse of token %lld is %g", (long long)token, (double)all);
    }
    test_huge_free();
}

static void all_huge(void)
{
    if (test_begin("huge: a weight and logits of more than 2^31 elements")) huge(), test_finish();
}

#endif

int main(int argc, char **argv)
{
    test_start(argc, argv);
    if (lk_linear_topk_init(&context)) printf("%s\n", lk_last_error());
    static const test_theme themes[] = {{"sizes", sizes},   {"specials", specials}, {"far", far}, {"options", options},
                                        {"places", places}, {"graphs", graphs},     {"empty", empty}, {"draws", draws}};
    test_of_directions("errors:", errors, direction_name, 1);
    test_themes(themes, LENGTH_OF(themes), 0, 0, "forward", "auto");
    if (test_begin("plans")) plans(), test_finish();
    if (test_begin("draws: the distribution")) distribution(), test_finish();
    if (test_begin("draws: alone, and over ranks")) draws_alone(), test_finish();
#if defined(LK_SIMT)
    if (test_begin("draws: Philox")) philox(), test_finish();
#endif
    TEST_HUGE(all_huge);
    test_fuzz(draw, check, 300, 60);
    lk_linear_topk_destroy(&context);
    return test_end();
}
