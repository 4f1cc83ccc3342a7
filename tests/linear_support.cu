// SPDX-License-Identifier: MIT
/* tests/linear_support.cu - lk/linear_support.cuh against its header's formulas in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits. Bytes that are not outputs (zones around
 * every buffer, gaps between rows, inputs) must not change.
 *
 * The bounds are those of lk/linear_support.md, with U = 2^-24. A logit is 128 chains of hidden / 128 products, or fewer of them, and
 * 7 additions. What follows is held against the logits that the call has, in float. A token's sums of exponentials are as exact as
 * their terms, and these as exact as z, see EXPONENT. dx adds chains of 32 products. dweight adds 64, then the sums of tiles.
 */
#include "lk/linear_support.cuh"

#include "tests/test.h"

TEST_DEFINE(LINEAR_SUPPORT)

typedef lk_status (*call)(const lk_linear_support_args *, cudaStream_t);
typedef lk_status (*query)(const lk_linear_support_args *, size_t *);
static const call call_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_linear_support_forward), TEST_OF_TYPES(lk_linear_support_backward)};
static const query query_of[2][TEST_TYPES] = {TEST_OF_TYPES(lk_linear_support_forward_workspace_bytes),
                                              TEST_OF_TYPES(lk_linear_support_backward_workspace_bytes)};

enum { FORWARD, BACKWARD };
static const char *const direction_name[] = {"forward", "backward"};
enum {
    X, WEIGHT, BIAS, OFFSETS, IDS, TARGET, TEACHER, LOGITS, LOGP, LSE, ENTROPY, KL, SUPPORT_LOGP, BAD, DLOGP, DLSE, DENTROPY, DKL,
    DSUPPORT_LOGP, FULL_LOGITS, DX, DWEIGHT, DBIAS, DFULL_LOGITS, DWEIGHT_IDS, DWEIGHT_ROWS, WORKSPACE, TENSORS
};
static const char *const tensor_name[] = {"x", "weight", "bias", "offsets", "ids", "target", "teacher_logp", "logits", "logp", "lse",
                                          "entropy", "kl", "support_logp", "bad_targets", "dlogp", "dlse", "dentropy", "dkl",
                                          "dsupport_logp", "full_logits", "dx", "dweight", "dbias", "dfull_logits", "dweight_ids", "dweight_rows",
                                          "workspace"};
/* Supports. RAGGED: of 0 to 2 mean entries, so that some are empty. FILLED: of 1 to 2 mean. LONG: the first has all that the others
 * lack. ONE_ID: all entries have the same id. */
enum { RAGGED, FILLED, LONG, ONE_ID, KINDS };
static const char *const kind_name[] = {"ragged", "filled", "one long", "one id"};
enum { NOTHING, MASKED, ALL_MASKED, NOT_A_NUMBER, PLUS_INF, LARGE, CERTAIN, SPECIALS };
static const char *const special_name[] = {"nothing", "-inf", "all -inf", "nan", "+inf", "large", "certain"};

/* One call. `at` is how many elements a tensor's buffer is past 256-byte alignment; gap: behind each row, 0: packed. padding: entries
 * before those of the first token, and as many behind the last. */
typedef struct {
    int type, direction, kind, special;
    int64_t tokens, hidden, vocab, mean, padding;
    int gap[TENSORS], at[TENSORS];
    bool has[TENSORS];
    bool narrow_offsets, narrow_ids, bad, ignores, given, accumulate, wide_bias, wide_dweight, wide_dbias;
    int64_t start, total; /* ranks: of the first row of weight; 0: no ranks */
    float scale, softcap;
    uint64_t seed;
} problem;

static problem plain(int type, int direction, int64_t tokens, int64_t hidden, int64_t vocab, int64_t mean)
{
    problem p = {};
    p.type = type, p.direction = direction, p.tokens = tokens, p.hidden = hidden, p.vocab = vocab, p.mean = mean;
    p.kind = FILLED;
    for (int t = 0; t < TENSORS; t++) p.has[t] = t != BIAS && (t < LOGP || (t <= BAD) == (direction == FORWARD));
    p.has[BAD] = p.has[WORKSPACE] = true, p.has[DBIAS] = p.has[DWEIGHT_IDS] = p.has[DWEIGHT_ROWS] = false;
    p.has[FULL_LOGITS] = p.has[DFULL_LOGITS] = false;
    p.seed = test_hash((uint64_t)(tokens * 1000003 + hidden * 1009 + vocab * 17 + mean * 5 + direction));
    return p;
}

/* The call of a tensor of all logits. */
static problem full(problem p)
{
    for (const int t : {X, WEIGHT, BIAS, DX, DWEIGHT, DBIAS, DWEIGHT_IDS, DWEIGHT_ROWS}) p.has[t] = false;
    p.has[p.direction == FORWARD ? FULL_LOGITS : DFULL_LOGITS] = true;
    return p;
}

static const char *describe(const problem *p)
{
    static char text[1200];
    int n = snprintf(text, sizeof text,
                     "%s %s tokens=%lld hidden=%lld vocab=%lld mean=%lld %s special=%s padding=%lld start=%lld total=%lld scale=%g "
                     "softcap=%g%s%s%s%s%s%s%s%s%s seed=0x%llx without",
                     direction_name[p->direction], test_type_name[p->type], (long long)p->tokens, (long long)p->hidden,
                     (long long)p->vocab, (long long)p->mean, kind_name[p->kind], special_name[p->special], (long long)p->padding,
                     (long long)p->start, (long long)p->total, (double)p->scale, (double)p->softcap,
                     p->narrow_offsets ? " int32 offsets" : "", p->narrow_ids ? " int32 ids" : "", p->bad ? " bad" : "",
                     p->ignores ? " ignore_index" : "", p->given ? " logits_given" : "", p->accumulate ? " accumulate" : "",
                     p->wide_bias ? " f32 bias" : "", p->wide_dweight ? " f32 dweight" : "", p->wide_dbias ? " f32 dbias" : "",
                     (unsigned long long)p->seed);
    for (int t = 0; t < TENSORS; t++) {
        if (!p->has[t]) n += snprintf(text + n, sizeof text - (size_t)n, " %s", tensor_name[t]);
        else if (p->gap[t] || p->at[t]) n += snprintf(text + n, sizeof text - (size_t)n, ", %s +%d gap %d", tensor_name[t], p->at[t], p->gap[t]);
    }
    return text;
}

/* ---- The world of a problem: its offsets, ids and targets --------------------------------------------------------------- */

enum { GOOD, IGNORED, WRONG };
static int64_t *offsets, *ids, *targets, entries;
static int *fate; /* of each token: GOOD, IGNORED or WRONG */
static size_t room[4];
static test_buffer buffer[TENSORS];
static lk_linear_support_args args; /* of the last checked call */

static int64_t all_rows(const problem *p) { return p->total ? p->total : p->vocab; }
static const int64_t ignore_index = -100;

static void build(const problem *p)
{
    uint64_t state = test_hash(p->seed + 1), *const r = &state;
    const int64_t rows = all_rows(p);
    offsets = (int64_t *)test_room(offsets, &room[0], (size_t)(p->tokens + 1) * 8);
    targets = (int64_t *)test_room(targets, &room[1], (size_t)p->tokens * 8 + 8);
    fate = (int *)test_room(fate, &room[2], (size_t)p->tokens * 4 + 4);
    offsets[0] = p->padding;
    for (int64_t t = 0; t < p->tokens; t++) {
        int64_t n = p->mean ? test_below(r, 2 * p->mean + (p->kind == RAGGED)) + (p->kind != RAGGED) : 0;
        if (p->kind == LONG) n = t == 0 ? p->mean * p->tokens : 1;
        offsets[t + 1] = offsets[t] + n;
    }
    entries = offsets[p->tokens] + p->padding;
    ids = (int64_t *)test_room(ids, &room[3], (size_t)entries * 8 + 8);
    for (int64_t e = 0; e < entries; e++) ids[e] = p->kind == ONE_ID ? rows / 2 : test_below(r, rows);
    for (int64_t e = 0; e < p->padding; e++) ids[e] = e % 2 ? -7 : rows + 5, ids[entries - 1 - e] = INT32_MIN; /* never read */
    for (int64_t t = 0; t < p->tokens; t++) {
        const int64_t n = offsets[t + 1] - offsets[t], own = n ? offsets[t] + test_below(r, n) : 0;
        const int kind = p->bad ? (int)test_below(r, 6) : 9;
        fate[t] = n == 0 ? WRONG : GOOD;
        targets[t] = n ? ids[own] : 0;
        if (n && kind == 0) ids[offsets[t] + test_below(r, n)] = test_chance(r, 2) ? -1 : rows, fate[t] = WRONG;
        if (kind == 1 && p->has[TARGET]) targets[t] = test_chance(r, 2) ? -3 : rows + 1, fate[t] = WRONG;
        if (p->ignores && test_chance(r, 3)) targets[t] = ignore_index, fate[t] = IGNORED;
        if (fate[t] == GOOD && p->has[TARGET]) { /* a bad id may have been the target's entry */
            bool found = false;
            for (int64_t e = offsets[t]; e < offsets[t + 1]; e++) found = found || ids[e] == targets[t];
            if (!found) fate[t] = WRONG;
        }
    }
}

static int64_t token_of(const problem *p, int64_t e) /* -1: none */
{
    for (int64_t t = 0; t < p->tokens; t++)
        if (e >= offsets[t] && e < offsets[t + 1]) return t;
    return -1;
}

/* The row of weight of a good token's entry, or -1 where it is another rank's. */
static int64_t row_of(const problem *p, int64_t e)
{
    const int64_t row = ids[e] - p->start;
    return row >= 0 && row < p->vocab ? row : -1;
}

static int64_t most_rows(const problem *p) { return entries < p->vocab ? entries : p->vocab; }

/* The rows of weight that some good token's id names, 1 in `touched`; how many there are. */
static char *touched;
static int64_t touch(const problem *p)
{
    static size_t bytes;
    int64_t count = 0;
    touched = (char *)test_room(touched, &bytes, (size_t)p->vocab + 8);
    memset(touched, 0, (size_t)p->vocab);
    for (int64_t t = 0; t < p->tokens; t++)
        for (int64_t e = offsets[t]; e < offsets[t + 1] && fate[t] == GOOD; e++)
            if (row_of(p, e) >= 0 && !touched[row_of(p, e)]) touched[row_of(p, e)] = 1, count++;
    return count;
}

/* ---- Tensors ------------------------------------------------------------------------------------------------------------ */

static int type_of(const problem *p, int t) /* of floats */
{
    if (t == X || t == WEIGHT || t == DX || t == FULL_LOGITS || t == DFULL_LOGITS) return p->type;
    if (t == BIAS) return p->wide_bias ? TEST_F32 : p->type;
    if (t == DWEIGHT) return p->wide_dweight ? TEST_F32 : p->type;
    if (t == DBIAS) return p->wide_dbias ? TEST_F32 : p->type;
    return TEST_F32;
}
static int bytes_of(const problem *p, int t)
{
    if (t == OFFSETS) return p->narrow_offsets ? 4 : 8;
    if (t == IDS || t == TARGET) return p->narrow_ids ? 4 : 8;
    return t == WORKSPACE ? 1 : t == BAD || t == DWEIGHT_IDS || t == DWEIGHT_ROWS ? 4 : test_type_bytes[type_of(p, t)];
}
static int64_t rows_of(const problem *p, int t)
{
    if (t == X || t == DX || t == FULL_LOGITS || t == DFULL_LOGITS) return p->tokens;
    if (t == DWEIGHT && p->has[DWEIGHT_IDS]) return most_rows(p);
    return t == WEIGHT || t == DWEIGHT ? p->vocab : 1;
}
static int64_t cols_of(const problem *p, int t)
{
    if (t == X || t == DX || t == WEIGHT || t == DWEIGHT) return p->hidden;
    if (t == BIAS || t == DBIAS || t == FULL_LOGITS || t == DFULL_LOGITS) return p->vocab;
    if (t == OFFSETS) return p->tokens + 1;
    if (t == IDS || t == TEACHER || t == LOGITS || t == SUPPORT_LOGP || t == DSUPPORT_LOGP) return entries;
    if (t == DWEIGHT_IDS) return most_rows(p);
    return t == BAD || t == DWEIGHT_ROWS ? 1 : t == WORKSPACE ? (int64_t)args.workspace_bytes : p->tokens;
}
static bool is_output(const problem *p, int t)
{
    if (t == LOGITS) return p->direction == FORWARD && !p->given;
    return (t > LOGITS && t <= BAD) || (t >= DX && t <= DWEIGHT_ROWS);
}

static double value(const problem *p, int t, int64_t i)
{
    uint64_t state = test_hash(p->seed + 31 * (uint64_t)t + 7919 * (uint64_t)i);
    return test_uniform(&state);
}

/* A logit that the call gets, with what is special in it. */
static float logit_of(const problem *p, int64_t e)
{
    const double x = 6 * value(p, LOGITS, e);
    const int64_t t = token_of(p, e), k = t < 0 ? 0 : e - offsets[t];
    const bool here = t >= 0 && t % 2 == 0;
    if (!here) return (float)x;
    switch (p->special) {
    case MASKED: return k % 3 == 1 ? -INFINITY : (float)x;
    case ALL_MASKED: return -INFINITY;
    case NOT_A_NUMBER: return k == 0 ? NAN : (float)x;
    case PLUS_INF: return k == 0 ? INFINITY : (float)x;
    case LARGE: return (float)(x * 2000);
    case CERTAIN: return (float)(k == 0 ? x + 30 : x);
    default: return (float)x;
    }
}

static float *floats(int t) { return (float *)test_buffer_host(&buffer[t]); }

static void fill(const problem *p, int t)
{
    const int64_t rows = rows_of(p, t), cols = cols_of(p, t), stride = cols + p->gap[t];
    void *const to = test_buffer_host(&buffer[t]);
    if (t == OFFSETS || t == IDS || t == TARGET) {
        const int64_t *const from = t == OFFSETS ? offsets : t == IDS ? ids : targets;
        for (int64_t i = 0; i < cols; i++)
            if (bytes_of(p, t) == 4) ((int32_t *)to)[i] = (int32_t)from[i];
            else ((int64_t *)to)[i] = from[i];
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            double x = value(p, t, r * cols + c);
            if (t == BIAS && p->special == MASKED && c % 5 == 1) x = -INFINITY;
            if (t == LOGITS) x = (double)logit_of(p, c);
            if (t == FULL_LOGITS) x = p->special == MASKED && (r + c) % 5 == 1 ? -INFINITY : 6 * x;
            if (t == TEACHER) x = c % 7 == 3 ? -INFINITY : 3 * x - 4;
            if (t == BAD) continue;
            test_put(type_of(p, t), to, r * stride + c, (float)x);
        }
    if (t == BAD) *(int32_t *)to = 5;
    for (int64_t i = 0; (t == DLOGP || t == DKL || t == DLSE || t == DENTROPY) && i < cols; i++)
        if (test_hash(p->seed + (uint64_t)(i / 2)) % 3 == 0) floats(t)[i] = 0; /* of all of them */
    for (int64_t i = 0; t == DSUPPORT_LOGP && i < cols; i++) {
        const int64_t of = token_of(p, i);
        if (of >= 0 && test_hash(p->seed + (uint64_t)(of / 2)) % 3 == 0) floats(t)[i] = 0;
    }
}

static bool prepare(const problem *p, int run)
{
    build(p);
    args = {};
    const bool is_full = p->has[FULL_LOGITS] || p->has[DFULL_LOGITS];
    args.tokens = p->tokens, args.hidden = is_full ? 0 : p->hidden, args.vocab = p->vocab, args.entries = entries;
    args.vocab_start = p->start, args.vocab_total = p->total;
    args.logit_scale = p->scale, args.softcap = p->softcap, args.logits_given = p->given, args.accumulate = p->accumulate;
    args.use_ignore_index = p->ignores, args.ignore_index = p->ignores ? ignore_index : 0;
    args.offsets_dtype = p->narrow_offsets, args.target_dtype = p->narrow_ids;
    args.bias_dtype = p->wide_bias ? LK_DTYPE_F32 : 0, args.dweight_dtype = p->wide_dweight ? LK_DTYPE_F32 : 0;
    args.dbias_dtype = p->wide_dbias ? LK_DTYPE_F32 : 0;
    void *at[TENSORS] = {};
    for (int t = 0; t < TENSORS; t++) {
        if (t == WORKSPACE) { /* the query knows what there is by pointers that are not NULL */
            size_t *const bytes = &args.workspace_bytes;
            if (!test_that(query_of[p->direction][p->type](&args, bytes) == LK_OK))
                return test_detail("the query: %s; %s", lk_last_error(), describe(p)), false;
        }
        const int64_t stride = cols_of(p, t) + p->gap[t], rows = rows_of(p, t);
        const int64_t elements = rows && cols_of(p, t) ? (rows - 1) * stride + cols_of(p, t) : 0;
        const size_t bytes = (size_t)bytes_of(p, t);
        const bool input = !is_output(p, t) || t == BAD || ((t == DWEIGHT || t == DBIAS || t == DFULL_LOGITS) && p->accumulate);
        test_buffer_size(&buffer[t], (size_t)elements * bytes, (size_t)p->at[t] * bytes,
                         is_output(p, t) || t == WORKSPACE ? (run ? 0x7f : 0x5a) : 0xff);
        if (input && t != WORKSPACE && p->has[t]) fill(p, t);
        test_buffer_upload(&buffer[t]);
        at[t] = p->has[t] ? test_buffer_device(&buffer[t]) : NULL;
        const struct {
            int tensor;
            int64_t *stride;
        } strides[] = {{X, &args.x_stride},
                       {WEIGHT, &args.weight_stride},
                       {DX, &args.dx_stride},
                       {DWEIGHT, &args.dweight_stride},
                       {FULL_LOGITS, &args.full_logits_stride},
                       {DFULL_LOGITS, &args.dfull_logits_stride}};
        for (const auto &s : strides)
            if (s.tensor == t && p->gap[t] && p->has[t]) *s.stride = stride;
        args.x = at[X], args.weight = at[WEIGHT], args.bias = at[BIAS], args.offsets = at[OFFSETS], args.ids = at[IDS];
        args.target = at[TARGET], args.teacher_logp = (float *)at[TEACHER], args.logits = (float *)at[LOGITS];
        args.logp = (float *)at[LOGP], args.lse = (float *)at[LSE], args.entropy = (float *)at[ENTROPY], args.kl = (float *)at[KL];
        args.support_logp = (float *)at[SUPPORT_LOGP], args.bad_targets = (int32_t *)at[BAD], args.dlogp = (float *)at[DLOGP];
        args.dlse = (float *)at[DLSE], args.dentropy = (float *)at[DENTROPY], args.dkl = (float *)at[DKL];
        args.dsupport_logp = (float *)at[DSUPPORT_LOGP], args.dx = at[DX], args.dweight = at[DWEIGHT], args.dbias = at[DBIAS];
        args.full_logits = at[FULL_LOGITS], args.dfull_logits = at[DFULL_LOGITS];
        args.dweight_ids = (int32_t *)at[DWEIGHT_IDS], args.dweight_rows = (int32_t *)at[DWEIGHT_ROWS], args.workspace = at[WORKSPACE];
    }
    if (p->direction == BACKWARD) args.support_logp = (float *)test_buffer_device(&buffer[DSUPPORT_LOGP]); /* forward's: not written */
    return true;
}

static lk_status launch(const problem *p) { return call_of[p->direction][p->type](&args, test.stream); }
static void collect(const problem *)
{
    for (int t = 0; t < TENSORS; t++) test_buffer_download(&buffer[t]);
}

/* ---- Counts ------------------------------------------------------------------------------------------------------------- */

enum {
    DID_TYPE, DID_KIND = DID_TYPE + TEST_TYPES, DID_SPECIAL = DID_KIND + KINDS, DID_NARROW_OFFSETS = DID_SPECIAL + SPECIALS,
    DID_NARROW_IDS, DID_WIDE_BOTH, DID_BAD, DID_IGNORES, DID_PADDING, DID_GIVEN, DID_RANK, DID_SCALE, DID_SOFTCAP, DID_BIAS,
    DID_WIDE_BIAS, DID_ACCUMULATE, DID_WIDE_DWEIGHT, DID_DBIAS, DID_WIDE_DBIAS, DID_VECTORS, DID_SINGLES, DID_GAPS, DID_NO_TARGET,
    DID_NO_LOGITS, DID_FULL, DID_ROWS, DID_NO_DX, DID_NO_DWEIGHT, DID_NO_TOKENS, DID_NO_ENTRIES, DID_MANY, DIDS
};
static const char *const did_name[] = {
    "f32", "f16", "bf16", "ragged", "filled", "one long", "one id", "nothing special", "-inf", "all -inf", "nan", "+inf", "large",
    "certain", "int32 offsets", "int32 ids", "int64 indices", "bad tokens", "ignored tokens", "padding", "logits_given", "a rank's",
    "logit_scale", "softcap", "bias", "f32 bias", "accumulate", "f32 dweight", "dbias", "f32 dbias", "vectors", "single elements",
    "gaps", "no target", "logits NULL", "full_logits", "dweight_ids", "dx NULL", "dweight NULL", "0 tokens", "0 entries", "several blocks sort"};
static const char *const path_names[] = {"forward", "backward"};
static test_counts counts = {path_names, did_name, 2, DIDS, {}, {}};
enum { MANY = 4096 }; /* entries of a block of the sort */

static bool possible(int path, int did)
{
    if (did == DID_GIVEN || did == DID_BIAS || did == DID_WIDE_BIAS || did == DID_NO_LOGITS) return path == FORWARD;
    if (did == DID_ACCUMULATE || (did >= DID_WIDE_DWEIGHT && did <= DID_WIDE_DBIAS) || did == DID_ROWS || did == DID_NO_DX || did == DID_NO_DWEIGHT)
        return path == BACKWARD;
    return true;
}

static void count(const problem *p)
{
    bool did[DIDS] = {}, gaps = false, vectors = p->hidden % (16 / test_type_bytes[p->type]) == 0;
    const bool is_full = p->has[FULL_LOGITS] || p->has[DFULL_LOGITS], sixteenth = is_full || (p->direction == FORWARD && p->given);
    did[DID_TYPE + p->type] = did[DID_KIND + p->kind] = did[DID_SPECIAL + p->special] = true;
    did[DID_NARROW_OFFSETS] = p->narrow_offsets, did[DID_NARROW_IDS] = p->narrow_ids;
    did[DID_WIDE_BOTH] = !p->narrow_offsets && !p->narrow_ids, did[DID_BAD] = p->bad, did[DID_IGNORES] = p->ignores;
    did[DID_PADDING] = p->padding, did[DID_GIVEN] = p->given, did[DID_RANK] = p->total, did[DID_SCALE] = p->scale != 0;
    did[DID_SOFTCAP] = p->softcap != 0, did[DID_BIAS] = p->has[BIAS], did[DID_WIDE_BIAS] = p->has[BIAS] && p->wide_bias;
    did[DID_ACCUMULATE] = p->accumulate, did[DID_WIDE_DWEIGHT] = p->has[DWEIGHT] && p->wide_dweight;
    did[DID_DBIAS] = p->has[DBIAS], did[DID_WIDE_DBIAS] = p->has[DBIAS] && p->wide_dbias;
    for (const int t : {X, WEIGHT, DX, DWEIGHT, FULL_LOGITS, DFULL_LOGITS}) {
        const int bytes = bytes_of(p, t);
        gaps = gaps || (p->gap[t] && p->has[t]);
        if (p->has[t] && ((p->at[t] * bytes) % 16 || ((p->hidden + p->gap[t]) * bytes) % 16)) vectors = false;
    }
    did[DID_GAPS] = gaps, did[DID_VECTORS] = vectors && !sixteenth, did[DID_SINGLES] = !vectors && !sixteenth;
    did[DID_NO_TARGET] = !p->has[TARGET], did[DID_NO_LOGITS] = !p->has[LOGITS], did[DID_NO_DX] = !p->has[DX];
    did[DID_ROWS] = p->has[DWEIGHT_IDS], did[DID_FULL] = is_full;
    did[DID_NO_DWEIGHT] = !p->has[DWEIGHT], did[DID_NO_TOKENS] = p->tokens == 0, did[DID_NO_ENTRIES] = p->tokens && entries == 0;
    did[DID_MANY] = entries > MANY;
    counts.runs[p->direction]++;
    for (int i = 0; i < DIDS; i++) counts.of[p->direction][i] += did[i];
}

/* ---- The reference ------------------------------------------------------------------------------------------------------ */

static const double U = 0x1p-24;

static double get(const problem *p, int t, int64_t row, int64_t col) /* an input */
{
    return (double)test_get(type_of(p, t), test_buffer_host(&buffer[t]), row * (cols_of(p, t) + p->gap[t]) + col);
}
static void expect(const problem *p, int t, int64_t row, int64_t col, double want, double slack)
{
    if (!p->has[t]) return;
    const float got = test_get(type_of(p, t), test_buffer_back(&buffer[t]), row * (cols_of(p, t) + p->gap[t]) + col);
    if (!isfinite(want) || !isfinite(slack)) slack = 0;
    if (!test_near(type_of(p, t), got, want, slack))
        test_detail("%s[%lld, %lld] is %.9g, want %.9g +- %.3g; %s", tensor_name[t], (long long)row, (long long)col, (double)got, want,
                    slack, describe(p));
}

/* What z of an entry is, what it may be off by, and the derivative of z by the logit. */
typedef struct {
    double z, error, slope, slope_error;
} value_of_logit;

static value_of_logit z_of(const problem *p, double logit)
{
    const double scale = p->scale == 0 ? 1 : (double)p->scale, cap = (double)p->softcap, u = scale * logit / cap;
    if (cap == 0) return {scale * logit, 0, scale, U * scale};
    const double z = cap * tanh(u), slope = scale / pow(cosh(u), 2);
    if (isinf(u)) return {z, 8 * U * cap, 0, 0x1p-126 * scale};
    return {z, 8 * U * fabs(z), logit != logit ? NAN : slope, slope * (4 * fabs(u) + 24) * U + 0x1p-126 * scale};
}

/* A token's sums. */
typedef struct {
    double top, log, spread; /* lse is top + log, entropy log + spread */
    double error;            /* relative, of a sum of exponentials: the mean of those of its terms */
    double largest;          /* |z| */
    int64_t at;              /* the entry of top */
} sums;

/* EXPONENT: z - top in float is off by U times itself, under a softcap by what both are off by; and an exponential by
 * (|z - top| + 2) 2 U. */
static double exponent_error(double below, double off) { return (3 * fabs(below) + 6) * U + 2 * off; }

static sums add_up(const problem *p, const float *logits, int64_t t)
{
    sums s = {-INFINITY, 0, 0, 0, 0, offsets[t]};
    bool odd = false;
    double off = 0, terms = 0;
    for (int64_t e = offsets[t]; e < offsets[t + 1]; e++) {
        const value_of_logit v = z_of(p, (double)logits[e]);
        odd = odd || v.z != v.z || v.z == INFINITY;
        if (v.z > s.top) s.top = v.z, s.at = e;
        if (isfinite(v.z)) s.largest = fmax(s.largest, fabs(v.z)), off = fmax(off, v.error);
    }
    for (int64_t e = offsets[t]; e < offsets[t + 1]; e++) {
        const double below = z_of(p, (double)logits[e]).z - s.top, term = e == s.at ? 0 : exp(below);
        if (!(term > 0)) continue;
        terms += term, s.spread -= below * term, s.error += term * exponent_error(below, off);
    }
    if (odd || s.top == -INFINITY) return {NAN, NAN, NAN, 0, 0, s.at};
    if (terms > 0) s.error /= terms;
    s.log = log1p(terms), s.spread /= 1 + terms;
    return s;
}

static void verify_forward(const problem *p)
{
    static float *logits;
    static size_t bytes;
    logits = (float *)test_room(logits, &bytes, (size_t)entries * 4 + 4);
    int64_t bad = 5;
    for (int64_t e = 0; e < entries; e++) {
        logits[e] = 0;
        const int64_t t = token_of(p, e);
        if (p->given) {
            logits[e] = floats(LOGITS)[e];
        } else if (t < 0 || fate[t] != GOOD || row_of(p, e) < 0) {
            expect(p, LOGITS, 0, e, 0, 0);
        } else {
            double want = p->has[BIAS] ? get(p, BIAS, 0, row_of(p, e)) : 0, size = fabs(want);
            if (p->has[FULL_LOGITS]) want = get(p, FULL_LOGITS, t, row_of(p, e));
            for (int64_t d = 0; d < p->hidden && !p->has[FULL_LOGITS]; d++) {
                const double term = get(p, X, t, d) * get(p, WEIGHT, row_of(p, e), d);
                want += term, size += fabs(term);
            }
            expect(p, LOGITS, 0, e, want, p->has[FULL_LOGITS] ? 0 : ((double)p->hidden / 32 + 12) * U * size);
            logits[e] = p->has[LOGITS] ? ((float *)test_buffer_back(&buffer[LOGITS]))[e] : (float)want;
        }
        if (t < 0) expect(p, SUPPORT_LOGP, 0, e, 0, 0);
    }
    for (int64_t t = 0; t < p->tokens; t++) {
        bad += fate[t] == WRONG;
        if (fate[t] != GOOD) {
            const double want = fate[t] == IGNORED ? 0 : NAN;
            for (const int output : {LOGP, LSE, ENTROPY, KL}) expect(p, output, 0, t, want, 0);
            for (int64_t e = offsets[t]; e < offsets[t + 1]; e++) expect(p, SUPPORT_LOGP, 0, e, want, 0);
            continue;
        }
        const sums s = add_up(p, logits, t);
        /* without logits, these are what the float logit may be off by */
        double unknown = 0;
        for (int64_t e = offsets[t]; e < offsets[t + 1] && !p->has[LOGITS] && !p->has[FULL_LOGITS]; e++)
            unknown = fmax(unknown, (double)(p->scale == 0 ? 1 : p->scale) * ((double)p->hidden / 32 + 12) * U * (double)p->hidden);
        const double off = p->softcap == 0 ? 0 : 8 * U * s.largest;
        const double log_error = s.log * s.error + 4 * U * s.log + 2 * unknown + 0x1p-126;
        const double spread_error = s.spread * (s.error + 12 * U) + off + 0x1p-126;
        double kl = 0, kl_error = 0;
        bool found = false;
        for (int64_t e = offsets[t]; e < offsets[t + 1]; e++) {
            const value_of_logit v = z_of(p, (double)logits[e]);
            const double logp = v.z - s.top - s.log, q = p->has[TEACHER] ? exp(get(p, TEACHER, 0, e)) : 0;
            const double slack = 2 * U * (fabs(v.z - s.top) + s.log) + v.error + off + log_error + 2 * unknown;
            expect(p, SUPPORT_LOGP, 0, e, logp, slack);
            if (!found && p->has[TARGET] && ids[e] == targets[t]) expect(p, LOGP, 0, t, logp, slack), found = true;
            if (q == 0) continue;
            const double teacher = get(p, TEACHER, 0, e), term = q * (teacher - logp);
            kl += term;
            kl_error += fabs(term) * (2 * fabs(teacher) + 10 + (double)(offsets[t + 1] - offsets[t]) / 32 + 5) * U + q * slack;
        }
        expect(p, LSE, 0, t, s.top + s.log, log_error + off + 2 * U * fabs(s.top));
        expect(p, ENTROPY, 0, t, s.log + s.spread, log_error + spread_error + 2 * unknown * (1 + s.log + s.spread));
        expect(p, KL, 0, t, s.top == s.top ? kl : NAN, kl_error);
    }
    const int32_t got = *(int32_t *)test_buffer_back(&buffer[BAD]);
    if (!test_that(got == bad)) test_detail("bad_targets is %d, want %lld; %s", got, (long long)bad, describe(p));
}

/* dlogits of an entry, what it may be off by, and its token; of a bad token's none. */
typedef struct {
    double x, error;
    int64_t token;
} gradient;

static double gradient_in(const problem *p, int t, int64_t i) { return p->has[t] ? (double)floats(t)[i] : 0; }

static double upstream(const problem *p, int64_t t, int64_t e, int64_t own)
{
    const double q = p->has[DKL] ? exp(get(p, TEACHER, 0, e)) : 0;
    return gradient_in(p, DSUPPORT_LOGP, e) - gradient_in(p, DKL, t) * q + (e == own ? gradient_in(p, DLOGP, t) : 0);
}

/* A row of dfull_logits; spoiled: the token is bad, and a gradient of it is not 0. */
static void verify_full(const problem *p, int64_t t, const gradient *dz, bool spoiled)
{
    static double *sum;
    static size_t bytes;
    sum = (double *)test_room(sum, &bytes, (size_t)p->vocab * 16 + 16);
    memset(sum, 0, (size_t)p->vocab * 16);
    for (int64_t e = offsets[t]; e < offsets[t + 1] && fate[t] == GOOD; e++) {
        if (row_of(p, e) < 0) continue;
        double *const of = sum + 2 * row_of(p, e);
        of[1] += dz[e].error + 0x1p-149 + (double)(offsets[t + 1] - offsets[t]) * U * fabs(dz[e].x), of[0] += dz[e].x;
    }
    for (int64_t c = 0; c < p->vocab; c++) {
        const double old = p->accumulate ? get(p, DFULL_LOGITS, t, c) : 0, slack = sum[2 * c + 1];
        expect(p, DFULL_LOGITS, t, c, spoiled ? NAN : old + sum[2 * c], slack == 0 ? 0 : slack + U * (fabs(old) + fabs(sum[2 * c])));
    }
}

static void verify_backward(const problem *p)
{
    static gradient *dz;
    static double *dx, *dx_error;
    static size_t bytes[3];
    dz = (gradient *)test_room(dz, &bytes[0], (size_t)entries * sizeof *dz + 8);
    dx = (double *)test_room(dx, &bytes[1], (size_t)p->hidden * 8), dx_error = (double *)test_room(dx_error, &bytes[2], (size_t)p->hidden * 8);
    for (int64_t e = 0; e < entries; e++) dz[e] = {0, 0, -1};
    for (int64_t t = 0; t < p->tokens; t++) {
        const int64_t begin = offsets[t], end = offsets[t + 1];
        double all = 0, rest = 0, size = 0, of_top = 0;
        bool asked = gradient_in(p, DLOGP, t) != 0 || gradient_in(p, DLSE, t) != 0 || gradient_in(p, DENTROPY, t) != 0 ||
                     gradient_in(p, DKL, t) != 0;
        int64_t own = -1;
        for (int64_t e = begin; e < end; e++) {
            asked = asked || gradient_in(p, DSUPPORT_LOGP, e) != 0;
            if (own < 0 && p->has[TARGET] && ids[e] == targets[t]) own = e;
        }
        if (fate[t] == GOOD) {
            const sums s = add_up(p, floats(LOGITS), t);
            const double off = p->softcap == 0 ? 0 : 8 * U * s.largest;
            for (int64_t e = begin; e < end; e++) {
                const double u = upstream(p, t, e, own), part = fabs(u) + (p->has[DKL] ? fabs(gradient_in(p, DKL, t)) * exp(get(p, TEACHER, 0, e)) : 0);
                all += u, size += part, rest += e == s.at ? 0 : u;
                if (e == s.at) of_top = part;
            }
            all -= gradient_in(p, DLSE, t), rest -= gradient_in(p, DLSE, t), size += fabs(gradient_in(p, DLSE, t));
            const double dentropy = gradient_in(p, DENTROPY, t), entropy = s.log + s.spread;
            for (int64_t e = begin; e < end; e++) {
                const value_of_logit v = z_of(p, (double)floats(LOGITS)[e]);
                const double logp = v.z - s.top - s.log, share = exp(logp), u = upstream(p, t, e, own);
                const double bend = share > 0 ? dentropy * share * (logp + entropy) : share * 0;
                const double error = exponent_error(v.z - s.top, off) + s.error + 8 * U, q = exp(p->has[DKL] ? get(p, TEACHER, 0, e) : 0);
                const double left = e == s.at ? -expm1(-s.log) : 1; /* of u: 1 - p of the top is no difference */
                const double of_u = left * (U * (4 * fabs(u) + (p->has[DKL] ? fabs(gradient_in(p, DKL, t)) * q * 20 : 0)) +
                                            (e == s.at ? fabs(u) * (s.error + 8 * U) : 0));
                /* q is off by 2 |teacher_logp| + 4 U, 18 U at most */
                const double terms = share * (e == s.at ? size - of_top : size) * (20 * U + (share > 0 ? error : 0));
                const double bends = share > 0 ? fabs(dentropy) * share * ((fabs(v.z - s.top) + s.spread) * (error + 16 * U) + 2 * off) : 0;
                const double z = (e == s.at ? u * left - share * rest : u - share * all) - bend;
                dz[e].x = z * v.slope, dz[e].token = t;
                dz[e].error = (of_u + terms + bends) * v.slope + fabs(z) * (v.slope_error + 2 * U * v.slope) + 0x1p-126 * (size + fabs(dentropy)) * v.slope;
                if (s.top != s.top) dz[e].x = NAN;
            }
        }
        for (int64_t d = 0; p->has[DX] && d < p->hidden; d++) {
            double sum = fate[t] == WRONG && asked ? NAN : 0, error = 0;
            for (int64_t e = begin; e < end && fate[t] == GOOD; e++) {
                if (row_of(p, e) < 0) continue;
                const double w = get(p, WEIGHT, row_of(p, e), d);
                sum += dz[e].x * w, error += fabs(w) * (dz[e].error + 36 * U * fabs(dz[e].x));
            }
            expect(p, DX, t, d, sum, error + 0x1p-126);
        }
        if (p->has[DFULL_LOGITS]) verify_full(p, t, dz, fate[t] == WRONG && asked);
    }
    static double *sum, *error, *bias;
    static size_t more[3];
    const size_t n = (size_t)(p->vocab * p->hidden);
    sum = (double *)test_room(sum, &more[0], n * 8 + 8), error = (double *)test_room(error, &more[1], n * 8 + 8);
    bias = (double *)test_room(bias, &more[2], (size_t)p->vocab * 16 + 16);
    if (p->has[DWEIGHT]) memset(sum, 0, n * 8), memset(error, 0, n * 8);
    memset(bias, 0, (size_t)p->vocab * 16);
    const int64_t rows = touch(p);
    const double chain = (66 + (double)entries / LK_SUPPORT_TILE) * U;
    for (int64_t e = 0; e < entries; e++) {
        const int64_t row = dz[e].token < 0 ? -1 : row_of(p, e);
        if (row < 0) continue;
        bias[2 * row] += dz[e].x, bias[2 * row + 1] += dz[e].error + chain * fabs(dz[e].x);
        for (int64_t d = 0; p->has[DWEIGHT] && d < p->hidden; d++) {
            const double x = get(p, X, dz[e].token, d);
            sum[row * p->hidden + d] += dz[e].x * x;
            error[row * p->hidden + d] += fabs(x) * (dz[e].error + chain * fabs(dz[e].x));
        }
    }
    const int32_t *const of_rows = (const int32_t *)test_buffer_back(&buffer[DWEIGHT_IDS]);
    if (p->has[DWEIGHT_IDS] && !test_that(*(int32_t *)test_buffer_back(&buffer[DWEIGHT_ROWS]) == rows))
        test_detail("dweight_rows is %d, want %lld; %s", *(int32_t *)test_buffer_back(&buffer[DWEIGHT_ROWS]), (long long)rows, describe(p));
    for (int64_t row = 0, k = 0; row < p->vocab; row++) {
        if (p->has[DWEIGHT_IDS] && touched[row] && !test_that(of_rows[k] == row))
            test_detail("dweight_ids[%lld] is %d, want %lld; %s", (long long)k, of_rows[k], (long long)row, describe(p));
        for (int64_t d = 0; p->has[DWEIGHT] && d < p->hidden && p->has[DWEIGHT_IDS] && touched[row]; d++)
            expect(p, DWEIGHT, k, d, sum[row * p->hidden + d], error[row * p->hidden + d] + 0x1p-126);
        k += touched[row];
        for (int64_t d = 0; p->has[DWEIGHT] && d < p->hidden && !p->has[DWEIGHT_IDS]; d++) {
            const double old = p->accumulate ? get(p, DWEIGHT, row, d) : 0, more_of = touched[row] ? U * (fabs(old) + 1) : 0;
            expect(p, DWEIGHT, row, d, old + sum[row * p->hidden + d],
                   touched[row] ? error[row * p->hidden + d] + more_of * (p->accumulate ? 1 : 0) + 0x1p-126 : 0);
        }
        const double old = p->accumulate && p->has[DBIAS] ? get(p, DBIAS, 0, row) : 0;
        expect(p, DBIAS, 0, row, old + bias[2 * row], touched[row] ? bias[2 * row + 1] + 2 * U * fabs(old) + 0x1p-126 : 0);
    }
    const int32_t got = *(int32_t *)test_buffer_back(&buffer[BAD]);
    int64_t bad = 5;
    for (int64_t t = 0; t < p->tokens; t++) bad += fate[t] == WRONG;
    if (!test_that(got == bad)) test_detail("bad_targets is %d, want %lld; %s", got, (long long)bad, describe(p));
}

static void verify(const problem *p)
{
    if (p->direction == FORWARD) verify_forward(p);
    else verify_backward(p);
}

static unsigned char *kept[TENSORS];
static size_t kept_bytes[TENSORS];

static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++) {
        if (t == WORKSPACE) test_buffer_accept_all(&buffer[t]);
        else if (p->has[t] && is_output(p, t)) { /* behind the rows that there are nothing is written */
            const int64_t rows = t == DWEIGHT && p->has[DWEIGHT_IDS] ? touch(p) : rows_of(p, t);
            test_settle(&buffer[t], &kept[t], &kept_bytes[t], keep, rows, t == DWEIGHT_IDS ? touch(p) : cols_of(p, t),
                        cols_of(p, t) + p->gap[t], bytes_of(p, t), tensor_name[t], what, describe(p));
        }
        test_buffer_untouched(&buffer[t], tensor_name[t], describe(p));
    }
}

static const test_op<problem> op = {describe, prepare, launch, collect, verify, settle, count};
static void check(const problem *p) { test_twice(op, p); }

/* ---- Cases -------------------------------------------------------------------------------------------------------------- */

static void lengths(int type, int direction, int)
{
    const int64_t v = 16 / test_type_bytes[type], hidden[] = {1, v - 1, v, 31 * v, 32 * v, 33 * v, 33 * v + 1, 129 * v};
    const int64_t mean[] = {1, 2, 17, 33, 70};
    for (int i = 0; i < LENGTH_OF(hidden) - (test.small ? 1 : 0); i++)
        for (int j = 0; j < LENGTH_OF(mean) - (test.small ? 1 : 0); j++) {
            problem p = plain(type, direction, 5 + i % 3, hidden[i], 40, mean[j]);
            p.kind = (i + j) % KINDS, p.narrow_ids = i % 2, p.narrow_offsets = j % 2;
            check(&p);
            if (direction == FORWARD || (i + j) % 3) continue;
            p.has[DWEIGHT_IDS] = p.has[DWEIGHT_ROWS] = true;
            check(&p);
        }
}

/* Entries in several blocks of the sort, and runs over many tiles. */
static void many(int type, int direction, int)
{
    const int64_t vocab[] = {1, 255, 256, 70000};
    for (int i = 0; i < LENGTH_OF(vocab); i++)
        for (int kind = FILLED; kind < KINDS; kind++) {
            if (kind == LONG && i % 2) continue;
            problem p = plain(type, direction, test.small ? 45 : 150, 1 + i % 2, vocab[i], 100);
            p.kind = kind, p.has[DBIAS] = direction == BACKWARD, p.wide_dbias = true, p.narrow_ids = true;
            check(&p);
            if (vocab[i] < 1000) { /* an id stands many times in a support */
                problem q = full(p);
                q.accumulate = direction == BACKWARD && kind == ONE_ID, q.ignores = i == 2, check(&q);
            }
            if (direction == FORWARD) continue;
            p.has[DWEIGHT_IDS] = p.has[DWEIGHT_ROWS] = true, p.ignores = true;
            check(&p);
        }
}

static void options(int type, int direction, int)
{
    for (int k = 0; k < 48; k++) {
        problem p = plain(type, direction, 7, k % 2 ? 24 : 9, 30, 6);
        p.scale = k % 3 ? 0.0f : 0.625f, p.softcap = k % 4 == 1 ? 5.0f : 0.0f, p.kind = k % 5 ? FILLED : RAGGED;
        p.bad = k % 3 == 1, p.ignores = k % 4 == 2, p.padding = k % 5 == 2 ? 3 : 0;
        p.accumulate = direction == BACKWARD && k % 3 == 2, p.narrow_ids = k & 1, p.narrow_offsets = k & 2;
        p.has[BIAS] = direction == FORWARD && k & 4, p.wide_bias = k & 8, p.wide_dweight = k % 5 == 3, p.wide_dbias = k & 8;
        p.has[DBIAS] = direction == BACKWARD && k & 4;
        if (direction == BACKWARD && k % 7 == 3) p.has[DX] = p.has[WEIGHT] = false;
        if (direction == BACKWARD && k % 7 == 5) p.has[DWEIGHT] = p.has[X] = false;
        if (direction == BACKWARD && k % 7 == 6) p.has[DWEIGHT] = p.has[DX] = p.has[X] = p.has[WEIGHT] = false, p.has[DBIAS] = true;
        if (direction == FORWARD && k % 6 == 3) p.given = true, p.has[X] = p.has[WEIGHT] = p.has[BIAS] = false;
        if (direction == FORWARD && k % 6 == 4) p.has[LOGITS] = false;
        if (k % 11 == 7 && !p.ignores) p.has[TARGET] = p.has[LOGP] = p.has[DLOGP] = false;
        if (direction == BACKWARD && k % 4 == 3 && !p.accumulate && p.has[DWEIGHT]) p.has[DWEIGHT_IDS] = p.has[DWEIGHT_ROWS] = true;
        if (k % 11 == 8) p.has[TEACHER] = p.has[KL] = p.has[DKL] = false;
        check(&p);
        problem q = full(p);
        if (q.given) continue;
        if (k % 6 == 1) q.gap[FULL_LOGITS] = q.gap[DFULL_LOGITS] = 1 + k, q.at[FULL_LOGITS] = q.at[DFULL_LOGITS] = 1;
        q.special = direction == FORWARD && k % 6 == 2 ? MASKED : NOTHING;
        check(&q);
    }
}

/* Each output, and each gradient, alone. */
static void alone(int type, int direction, int)
{
    const int first = direction == FORWARD ? LOGITS : DLOGP, last = direction == FORWARD ? SUPPORT_LOGP : DSUPPORT_LOGP;
    for (int only = first; only <= last; only++)
        for (int cap = 0; cap < 2; cap++) {
            problem p = plain(type, direction, 6, 16, 20, 5);
            for (int t = first; t <= last; t++) p.has[t] = t == only;
            p.softcap = cap ? 3.0f : 0.0f, p.bad = cap;
            p.has[TARGET] = only == LOGP || only == DLOGP, p.has[TEACHER] = only == KL || only == DKL;
            check(&p);
        }
}

static void specials(int type, int direction, int)
{
    for (int special = MASKED; special < SPECIALS; special++)
        for (int k = 0; k < 6; k++) {
            problem p = plain(type, direction, 6, k % 2 ? 16 : 5, 20, 1 + 4 * k);
            p.special = special, p.softcap = k > 3 && special != LARGE ? 8.0f : 0.0f, p.has[BIAS] = direction == FORWARD && special == MASKED;
            if (direction == FORWARD && special != MASKED) p.given = true, p.has[X] = p.has[WEIGHT] = false;
            check(&p);
            if (direction == FORWARD || special != CERTAIN) continue;
            for (int t = DLSE; t <= DSUPPORT_LOGP; t++) p.has[t] = false; /* 1 - p of a target that is almost certain */
            p.tokens = 16, p.mean = 2, check(&p);
        }
    for (int special = MASKED; special < SPECIALS && direction == BACKWARD; special++) {
        problem p = full(plain(type, direction, 6, 5, 20, 7));
        p.special = special, p.bad = special % 2, check(&p);
    }
}

/* backward with dfull_logits in the memory of full_logits: it is not refused, and gives the bits that it gives without full_logits. */
static void in_place(int type, int direction, int)
{
    if (direction == FORWARD) return;
    problem p = full(plain(type, direction, 6, 1, 33, 7));
    if (!prepare(&p, 0) || !test_launched(launch(&p), describe(&p))) return;
    collect(&p);
    const size_t bytes = (size_t)(p.tokens * p.vocab) * (size_t)test_type_bytes[type];
    unsigned char *const right = (unsigned char *)malloc(bytes);
    memcpy(right, test_buffer_back(&buffer[DFULL_LOGITS]), bytes);
    if (prepare(&p, 1)) {
        args.full_logits = args.dfull_logits;
        if (test_launched(launch(&p), describe(&p))) {
            collect(&p);
            if (!test_that(!memcmp(right, test_buffer_back(&buffer[DFULL_LOGITS]), bytes))) test_detail("in place: other bits");
        }
    }
    free(right);
}

static void places(int type, int direction, int)
{
    const int v = 16 / test_type_bytes[type];
    for (int k = 0; k < 10; k++)
        for (const int t : {X, WEIGHT, DX, DWEIGHT}) {
            if ((t >= DX) != (direction == BACKWARD) && k % 2) continue;
            problem p = plain(type, direction, 4, 8 * v, 11, 9);
            p.wide_dweight = k % 3 == 1;
            if (k < 5) p.at[t] = k % v;
            else p.gap[t] = k == 5 ? v : k;
            if (k == 9) p.gap[X] = p.gap[WEIGHT] = p.gap[DX] = p.gap[DWEIGHT] = 4 * v, p.at[t] = v;
            check(&p);
        }
}

static void empty(int type, int direction, int)
{
    for (int k = 0; k < 4; k++) {
        problem p = plain(type, direction, k % 2 ? 0 : 3, 8, 5, 0);
        p.padding = k > 1 ? 4 : 0, p.accumulate = direction == BACKWARD && k == 3, p.has[DBIAS] = direction == BACKWARD;
        p.has[DWEIGHT_IDS] = p.has[DWEIGHT_ROWS] = direction == BACKWARD && k != 3;
        check(&p);
        p = full(p), check(&p);
    }
    lk_linear_support_args none = {};
    none.hidden = 3, none.vocab = 4;
    const lk_status status = call_of[direction][type](&none, test.stream);
    if (direction == FORWARD && !test_that(status == LK_OK)) test_detail("0 tokens and NULL tensors: %s", lk_last_error());
}

/* Each of three ranks, one of them without rows: logits of its own ids, then results from all logits; dx and dweight of its rows. */
static void ranks(int type, int direction, int)
{
    const int64_t cut[] = {0, 7, 7, 30};
    for (int k = 0; k < 3; k++) {
        problem p = plain(type, direction, 6, 16, cut[k + 1] - cut[k], 9);
        p.seed = 4711, p.start = cut[k], p.total = 30, p.has[BIAS] = direction == FORWARD, p.bad = true;
        for (int t = LOGP; t <= SUPPORT_LOGP; t++) p.has[t] = false;
        check(&p);
        p.given = direction == FORWARD;
        if (p.given) p.has[BIAS] = p.has[X] = p.has[WEIGHT] = false, p.has[LOGP] = p.has[LSE] = p.has[ENTROPY] = true;
        if (p.given) check(&p);
        problem q = full(p);
        q.given = false;
        for (int t = LOGP; t <= SUPPORT_LOGP; t++) q.has[t] = false;
        check(&q);
        q.given = direction == FORWARD, q.has[LSE] = q.given; /* the third step may have full_logits still */
        if (q.given) check(&q);
    }
}

static void graphs(int type, int direction, int)
{
    problem p = plain(type, direction, 9, 40, 50, 12);
    p.has[DBIAS] = direction == BACKWARD;
    check(&p);
    test_graph(op, &p);
    p = full(p), check(&p);
    test_graph(op, &p);
}

/* Offsets of any values: results mean nothing, but no address is wrong. Two warps may write the same entry, which TSan would tell. */
static void falling(int type, int direction, int)
{
#if !defined(__SANITIZE_THREAD__)
    for (int k = 0; k < 24; k++) {
        problem p = plain(type, direction, 9, k % 2 ? 8 : 3, 12, 1 + k);
        uint64_t random = test_hash((uint64_t)k);
        p.narrow_offsets = k & 2, p.has[DBIAS] = direction == BACKWARD;
        if (k % 3 == 2) p = full(p);
        if (!prepare(&p, 0)) return;
        for (int64_t t = 0; t <= p.tokens; t++) {
            const int64_t at = test_below(&random, entries + 11) - 5, value = k % 5 ? at : at % 2 ? INT32_MAX : INT32_MIN;
            if (p.narrow_offsets) ((int32_t *)test_buffer_host(&buffer[OFFSETS]))[t] = (int32_t)value;
            else ((int64_t *)test_buffer_host(&buffer[OFFSETS]))[t] = value;
        }
        test_buffer_upload(&buffer[OFFSETS]);
        if (!test_launched(launch(&p), describe(&p))) return;
        collect(&p);
        for (int t = 0; t < TENSORS; t++) {
            if (t == WORKSPACE || is_output(&p, t)) test_buffer_accept_all(&buffer[t]);
            test_buffer_untouched(&buffer[t], tensor_name[t], describe(&p));
        }
    }
#else
    (void)type, (void)direction;
#endif
}

static const test_theme themes[] = {{"falling offsets", falling}, {"empty", empty}, {"lengths", lengths}, {"many", many}, {"options", options}, {"alone", alone},
                                    {"special values", specials}, {"places", places}, {"in place", in_place}, {"ranks", ranks}, {"graph", graphs}};

/* Ids of three digits. The weight would have 2^24 rows, so dbias alone. */
static void three_digits(void)
{
    problem p = plain(TEST_BF16, BACKWARD, 100, 8, (1 << 24) + 9, 30);
    p.has[DX] = p.has[DWEIGHT] = p.has[X] = p.has[WEIGHT] = false, p.has[DBIAS] = true, p.wide_dbias = true;
    p.hidden = 1;
    if (!prepare(&p, 0) || !test_launched(launch(&p), describe(&p))) return;
    test_buffer_download(&buffer[DBIAS]);
    double *const sum = (double *)calloc((size_t)p.vocab, 8);
    for (int64_t t = 0; t < p.tokens; t++) {
        if (fate[t] != GOOD) continue;
        const sums s = add_up(&p, floats(LOGITS), t);
        double all = -gradient_in(&p, DLSE, t);
        int64_t own = -1;
        for (int64_t e = offsets[t]; e < offsets[t + 1]; e++) {
            if (own < 0 && ids[e] == targets[t]) own = e;
            all += upstream(&p, t, e, own);
        }
        own = -1;
        for (int64_t e = offsets[t]; e < offsets[t + 1]; e++) {
            if (own < 0 && ids[e] == targets[t]) own = e;
            const double logp = (double)floats(LOGITS)[e] - s.top - s.log, share = exp(logp);
            sum[ids[e]] += upstream(&p, t, e, own) - share * all - gradient_in(&p, DENTROPY, t) * share * (logp + s.log + s.spread);
        }
    }
    for (int64_t row = 0; row < p.vocab; row++)
        if (!test_within(fabs((double)((float *)test_buffer_back(&buffer[DBIAS]))[row] - sum[row]), sum[row] == 0 ? 0 : 0x1p-16))
            test_detail("dbias[%lld]: want %.9g", (long long)row, sum[row]);
    free(sum);
}

/* ---- Errors ------------------------------------------------------------------------------------------------------------- */

typedef test_bad_call<lk_linear_support_args> bad_call;

static void expect_error(int type, int direction, const bad_call *bad)
{
    problem p = plain(type, direction, 3, 16, 20, 4);
    p.has[BIAS] = direction == FORWARD, p.has[DBIAS] = direction == BACKWARD;
    prepare(&p, 0);
    if (bad->spoil) bad->spoil(&args);
    const bool refused = test_refused(bad, direction);
    size_t asked = TEST_NOT_ASKED;
    const lk_status status = launch(&p), answer = query_of[direction][type](&args, &asked);
    test_expect(status, refused ? bad->want : LK_OK, bad->field, "lk_linear_support", direction_name[direction], type);
    test_expect_query(answer, refused ? bad->asked : LK_OK, asked, bad->field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = 0; t < TENSORS; t++) test_expect_unwritten(status, &buffer[t], tensor_name[t], bad->field);
}

static void errors(int type, int direction)
{
    static const bad_call list[] = {
        {LK_OK, LK_OK, "nothing", NULL},
        {LK_ERR_NULL, LK_OK, "x is NULL", SPOIL(a->x = NULL)},
        {LK_ERR_NULL, LK_OK, "weight is NULL", SPOIL(a->weight = NULL)},
        {LK_ERR_NULL, LK_OK, "offsets is NULL", SPOIL(a->offsets = NULL)},
        {LK_ERR_NULL, LK_OK, "ids is NULL", SPOIL(a->ids = NULL)},
        {LK_ERR_NULL, LK_OK, "logits is NULL", SPOIL(a->logits_given = 1; a->logits = NULL)},
        {LK_ERR_NULL, LK_ERR_NULL, "target is NULL", SPOIL(a->target = NULL)},
        {LK_ERR_NULL, LK_ERR_NULL, "teacher_logp is NULL", SPOIL(a->teacher_logp = NULL)},
        {LK_ERR_NULL, LK_OK, "every output", SPOIL(a->logits = a->dx ? a->logits : NULL; a->logp = a->lse = a->entropy = a->kl = a->support_logp = NULL;
                                                 a->bad_targets = NULL), true, false},
        {LK_ERR_NULL, LK_OK, "every output", SPOIL(a->dx = a->dweight = a->dbias = NULL; a->bad_targets = NULL), false, true},
        {LK_ERR_NULL, LK_OK, "nothing to pass on", SPOIL(a->dlogp = a->dlse = a->dentropy = a->dkl = a->dsupport_logp = NULL), false, true},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens", SPOIL(a->tokens = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "tokens", SPOIL(a->tokens = 1ll << 31)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "hidden", SPOIL(a->hidden = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab", SPOIL(a->vocab = 0)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "entries", SPOIL(a->entries = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "entries", SPOIL(a->entries = 1ll << 31)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab_total", SPOIL(a->vocab_total = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab_start", SPOIL(a->vocab_start = 1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab_start", SPOIL(a->vocab_total = 25; a->vocab_start = 6)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "x_stride", SPOIL(a->x_stride = -1)},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dx_stride", SPOIL(a->dx_stride = 15), false, true},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dweight_stride", SPOIL(a->dweight_stride = 1), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->lse = a->logp), true, false},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->dx = (void *)a->x), false, true},
        {LK_ERR_SHAPE, LK_OK, "overlap", SPOIL(a->workspace = (char *)a->workspace + 128; a->lse = (float *)a->workspace), true, false},
        {LK_ERR_VALUE, LK_ERR_VALUE, "logit_scale", SPOIL(a->logit_scale = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "softcap", SPOIL(a->softcap = NAN)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "over softcap", SPOIL(a->logit_scale = 0x1p90f; a->softcap = 0x1p-20f)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "ignore_index", SPOIL(a->ignore_index = -100)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "use_ignore_index", SPOIL(a->target = NULL; a->logp = NULL; a->dlogp = NULL; a->use_ignore_index = 1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "offsets_dtype", SPOIL(a->offsets_dtype = 2)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "target_dtype", SPOIL(a->target_dtype = -1)},
        {LK_ERR_VALUE, LK_ERR_VALUE, "bias_dtype", SPOIL(a->bias_dtype = 7), true, false},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dweight_dtype", SPOIL(a->dweight_dtype = 7), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dbias_dtype", SPOIL(a->dbias_dtype = 7), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "logits_given", SPOIL(a->vocab_total = 21), true, false},
        {LK_ERR_NULL, LK_ERR_NULL, "dweight_rows is NULL", SPOIL(a->dweight_ids = (int32_t *)a->workspace), false, true},
        {LK_ERR_NULL, LK_ERR_NULL, "dweight is NULL", SPOIL(a->dweight_ids = (int32_t *)a->workspace; a->dweight = NULL), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dweight_rows is given", SPOIL(a->dweight_rows = (int32_t *)a->dbias; a->dbias = NULL), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "accumulate is given", SPOIL(a->dweight_ids = (int32_t *)a->dweight; a->dweight_rows = (int32_t *)a->dbias;
                                                                  a->dweight = a->dx; a->dx = a->dbias = NULL; a->accumulate = 1), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "x is given", SPOIL(a->full_logits = a->x), true, false},
        {LK_ERR_VALUE, LK_ERR_VALUE, "weight is given", SPOIL(a->full_logits = a->x; a->x = a->dx ? a->x : NULL), true, false},
        {LK_ERR_VALUE, LK_ERR_VALUE, "bias is given", SPOIL(a->full_logits = a->x; if (!a->dx) a->x = a->weight = NULL), true, false},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dx is given", SPOIL(a->dfull_logits = a->dweight; a->dweight = a->dbias = NULL), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dweight is given", SPOIL(a->dfull_logits = a->dx; a->dx = a->dbias = NULL), false, true},
        {LK_ERR_VALUE, LK_ERR_VALUE, "dbias is given", SPOIL(a->dfull_logits = a->dweight; a->dx = a->dweight = NULL), false, true},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "full_logits_stride", SPOIL(a->full_logits = a->weight; if (!a->dx) a->x = a->weight = a->bias = NULL;
                                                                 a->full_logits_stride = -1), true, false},
        {LK_ERR_SHAPE, LK_ERR_SHAPE, "dfull_logits_stride", SPOIL(a->dfull_logits = a->dweight; a->dx = a->dweight = a->dbias = NULL;
                                                                  a->dfull_logits_stride = a->vocab - 1), false, true},
        {LK_ERR_ALIGNMENT, LK_OK, "x is not", SPOIL(MOVED(a->x, 1))},
        {LK_ERR_ALIGNMENT, LK_OK, "logits", SPOIL(MOVED(a->logits, 2))},
        {LK_ERR_WORKSPACE, LK_OK, "workspace", SPOIL(a->workspace = NULL)},
        {LK_ERR_WORKSPACE, LK_OK, "workspace_bytes", SPOIL(a->workspace_bytes--)},
        {LK_ERR_WORKSPACE, LK_OK, "aligned", SPOIL(MOVED(a->workspace, 64))}};
    for (int i = 0; i < LENGTH_OF(list); i++) expect_error(type, direction, &list[i]);
    if (!test_that(call_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("args NULL is taken");
}

/* ---- Random draws ------------------------------------------------------------------------------------------------------- */

static problem draw(uint64_t seed)
{
    uint64_t state = test_hash(seed), *const r = &state;
    const int type = (int)test_below(r, 3), direction = (int)test_below(r, 2), vec = 16 / test_type_bytes[type];
    const int64_t hidden = test_chance(r, 2) ? vec * (1 + test_below(r, 40)) : 1 + test_below(r, 70);
    problem p = plain(type, direction, 1 + test_below(r, 12), hidden, 1 + test_below(r, test_chance(r, 3) ? 600 : 30), 1 + test_below(r, 20));
    p.seed = seed, p.kind = (int)test_below(r, KINDS), p.special = test_chance(r, 2) ? NOTHING : (int)test_below(r, SPECIALS);
    if (test_chance(r, 12)) p.tokens = 100, p.mean = 60, p.hidden = 1 + test_below(r, 8), p.vocab = 1 + test_below(r, 300);
    if (test_chance(r, 30)) p.tokens = 0;
    if (test_chance(r, 30)) p.mean = 0, p.kind = FILLED;
    if (p.kind == LONG && p.mean == 0) p.kind = FILLED;
    p.padding = test_chance(r, 4) ? test_below(r, 40) : 0, p.bad = test_chance(r, 4), p.ignores = test_chance(r, 4);
    p.narrow_offsets = test_chance(r, 2), p.narrow_ids = test_chance(r, 2);
    if (test_chance(r, 3)) p.scale = (float)(0.25 + (double)test_below(r, 5) / 2);
    if (test_chance(r, 3) && p.special != LARGE) p.softcap = (float)(1 + test_below(r, 30));
    p.wide_bias = test_chance(r, 2), p.wide_dweight = test_chance(r, 2), p.wide_dbias = test_chance(r, 2);
    for (const int t : {X, WEIGHT, DX, DWEIGHT}) {
        if (test_chance(r, 4)) p.gap[t] = test_chance(r, 2) ? 4 * vec : 1 + (int)test_below(r, 9);
        if (test_chance(r, 4)) p.at[t] = (int)test_below(r, vec);
    }
    if (!p.ignores && test_chance(r, 4)) p.has[TARGET] = p.has[LOGP] = p.has[DLOGP] = false;
    if (test_chance(r, 4)) p.has[TEACHER] = p.has[KL] = p.has[DKL] = false;
    if (test_chance(r, 4)) p.total = p.vocab + test_below(r, 40), p.start = test_below(r, p.total - p.vocab + 1);
    if (direction == FORWARD) {
        for (int t = LSE; t <= SUPPORT_LOGP; t++)
            if (test_chance(r, 4)) p.has[t] = false;
        p.given = p.total > p.vocab || test_chance(r, 4) || (p.special > MASKED);
        if (p.total > p.vocab && p.special == NOTHING && test_chance(r, 2)) {
            for (int t = LOGP; t <= SUPPORT_LOGP; t++) p.has[t] = false;
            p.given = false;
        }
        p.has[BIAS] = !p.given && test_chance(r, 2);
        if (p.given) p.has[X] = p.has[WEIGHT] = false;
        else if (p.has[LSE] && p.softcap == 0 && test_chance(r, 5)) p.has[LOGITS] = false;
    } else {
        p.accumulate = test_chance(r, 3), p.has[DBIAS] = test_chance(r, 2);
        if (test_chance(r, 6)) p.has[DX] = p.has[WEIGHT] = false;
        if (test_chance(r, 6)) p.has[DWEIGHT] = p.has[X] = false, p.has[DBIAS] = p.has[DBIAS] || !p.has[DX];
        p.has[DWEIGHT_IDS] = p.has[DWEIGHT_ROWS] = p.has[DWEIGHT] && !p.accumulate && test_chance(r, 3);
        for (int t = DLSE; t <= DSUPPORT_LOGP; t++)
            if (t != DSUPPORT_LOGP && test_chance(r, 4)) p.has[t] = false;
    }
    if (p.given || !test_chance(r, 4)) return p;
    if (p.special > MASKED && direction == FORWARD) p.special = NOTHING;
    return full(p);
}

static void fuzz(void)
{
    const long n = test_fuzz_begin(&counts, 300, 60);
    test_draws(draw, check, n);
    test_fuzz_end(&counts, possible, n);
}

/* ---- On the GPU only: a busy device, and many elements ------------------------------------------------------------------ */

#if !defined(LK_SIMT)

static void busy(int type, int direction, int)
{
    problem p = plain(type, direction, 200, 264, 900, 20);
    check(&p);
    test_busy(op, &p);
}

/* A weight of more than 2^31 elements: its last row, and an x of many rows. */
static void huge(void)
{
    const int64_t hidden = 4096, vocab = (1ll << 31) / hidden + 3, tokens = 1 << 15;
    const int64_t n = vocab * hidden;
    lk_bf16 *const weight = (lk_bf16 *)test_huge_allocate(n * 2), *const dweight = (lk_bf16 *)test_huge_allocate(n * 2);
    lk_bf16 *const x = (lk_bf16 *)test_huge_allocate(tokens * hidden * 2), *const dx = (lk_bf16 *)test_huge_allocate(tokens * hidden * 2);
    test_huge_fill(weight, n, 0), test_huge_fill(x, tokens * hidden, 0);
    int32_t *const host = (int32_t *)malloc((size_t)tokens * 8 + 4);
    int32_t *const device = (int32_t *)test_huge_allocate(tokens * 12 + 4);
    float *const logits = (float *)test_huge_allocate(tokens * 8), *const lse = (float *)test_huge_allocate(tokens * 4);
    for (int64_t e = 0; e < 2 * tokens; e++) host[e] = (int32_t)(vocab - 1 - e * 7 % vocab);
    TEST_CUDA(cudaMemcpy(device, host, (size_t)tokens * 8, cudaMemcpyHostToDevice));
    for (int64_t t = 0; t <= tokens; t++) host[t] = (int32_t)(2 * t);
    TEST_CUDA(cudaMemcpy(device + 2 * tokens, host, (size_t)tokens * 4 + 4, cudaMemcpyHostToDevice));
    lk_linear_support_args a = {};
    a.x = x, a.weight = weight, a.ids = device, a.offsets = device + 2 * tokens, a.logits = logits, a.lse = lse;
    a.tokens = tokens, a.hidden = hidden, a.vocab = vocab, a.entries = 2 * tokens, a.offsets_dtype = a.target_dtype = LK_TARGET_INT32;
    a.logit_scale = 0x1p-6f;
    size_t bytes = 0;
    a.dlse = lse, a.dx = dx, a.dweight = dweight;
    lk_linear_support_backward_workspace_bytes_bf16(&a, &bytes);
    a.workspace = test_huge_allocate((int64_t)bytes), a.workspace_bytes = bytes;
    if (!test_launched(lk_linear_support_forward_bf16(&a, test.stream), "huge")) return test_huge_free();
    if (!test_launched(lk_linear_support_backward_bf16(&a, test.stream), "huge")) return test_huge_free();
    uint64_t random = 3;
    float pair[2], got;
    for (int s = 0; s < 100; s++) { /* p of the token's two entries, dlse is its lse */
        const int64_t t = s == 0 ? 0 : test_below(&random, tokens), id[2] = {vocab - 1 - 14 * t % vocab, vocab - 1 - (14 * t + 7) % vocab};
        double dot[2] = {}, size = 0;
        for (int k = 0; k < 2; k++)
            for (int64_t d = 0; d < hidden; d++) {
                const double term = (double)test_huge_value(t * hidden + d) * (double)test_huge_value(id[k] * hidden + d);
                dot[k] += term, size += fabs(term);
            }
        TEST_CUDA(cudaMemcpy(pair, logits + 2 * t, 8, cudaMemcpyDeviceToHost));
        TEST_CUDA(cudaMemcpy(&got, lse + t, 4, cudaMemcpyDeviceToHost));
        for (int k = 0; k < 2; k++)
            if (!test_within(fabs((double)pair[k] - dot[k]), 140 * U * size)) test_detail("token %lld: logit %d", (long long)t, k);
        const double z[2] = {(double)pair[0] / 64, (double)pair[1] / 64}, top = fmax(z[0], z[1]);
        const double want = top + log(exp(z[0] - top) + exp(z[1] - top));
        if (!test_within(fabs((double)got - want), 16 * U * (1 + fabs(want)))) test_detail("token %lld: lse", (long long)t);
        const int64_t d = test_below(&random, hidden);
        double sum = 0, terms = 0;
        for (int k = 0; k < 2; k++) {
            const double term = exp(z[k] - want) * want / 64 * (double)test_huge_value(id[k] * hidden + d);
            sum += term, terms += fabs(term);
        }
        test_near(TEST_BF16, test_huge_get(TEST_BF16, dx, t * hidden + d), sum, 64 * U * terms);
        for (int k = 0; k < 2; k++) { /* each id stands once: 7 * 2 * tokens is below vocab */
            const double term = exp(z[k] - want) * want / 64 * (double)test_huge_value(t * hidden + d);
            const double slack = (64 + 4 * (top - z[k])) * U * fabs(term) + 0x1p-120; /* an exponential below 2^-126 may be 0 */
            test_near(TEST_BF16, test_huge_get(TEST_BF16, dweight, id[k] * hidden + d), term, slack);
        }
    }
    free(host), test_huge_free();
}

static void all_huge(void)
{
    if (test_begin("huge: a weight of more than 2^31 elements")) huge(), test_finish();
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
    if (!test.small && test_begin("ids of three digits")) three_digits(), test_finish();
    TEST_HUGE(all_huge);
    test_all_ran(&counts, possible);
    fuzz();
    return test_end();
}
