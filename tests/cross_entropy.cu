// SPDX-License-Identifier: MIT
/* tests/cross_entropy.cu - lk/cross_entropy.cuh against its header's formula in double, on the GPU or on the simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits, so that nothing stale passes for a
 * result. Bytes that are not outputs (zones around every buffer, the workspace's too, the padding of rows, the inputs) must not
 * change. Ignored rows are never written by the test, so they hold poison: NaN in the first run, NaN or huge in the second;
 * under ASan they, and padding, cannot be read at all. Most options are drawn, from seeds that depend on the case alone; the
 * counts at the end demand that each of them ran on every path, and each switch alone and with each other one.
 *
 * Limits, in u = 2^-24, besides half an ulp of the output's type. d_j = z_j - max, P = sum_j p_j |d_j|:
 *   log sum       16 (2 + log sum + P): a term's relative error is (|d_j| + 2) 2^-23 (lk_exp), and the sum is of many
 *   lse           that, and 2 |max|: scale max is rounded, and so is the sum
 *   lse + lse_low log sum's, 2, 2^-22 |lse|, and 124 where the sum's reference may be 60 below the maximum: not in forward of f32
 *   loss          log sum's and 16 of each difference z_y - max and w_j (z_j - max), never of the logits themselves
 *   entropy       log sum's, and 16 sum_j p_j (|d_j| + d_j^2)
 *   statistics    log sum p^2: twice log sum's, and 16 (2 + log sum e^2 + 2 sum_j q_j |d_j|) with e = exp(d), q = e^2 / sum e^2;
 *                 mean: 16 of the mean of |z|, 2^-65; log p of the argmax: log sum's
 *   row weights   times the weight's size, and 2 of the product: it is rounded, and so is the sum of two of them
 *   reduced       the sum of the rows' limits, and 16 of the sum of their magnitudes
 *   dlogits       (4 + |z - lse|) 2^-23 in each p (the header), 16 of the size of each term. Backward's from the lse that is
 *                 given, with lse_low where that is; in sequences, where it is forward's own, against the exact lse with its
 *                 limit besides, with lse_low log sum's alone; and then against forward_backward, with the limits of both sums.
 *                 forward_backward's against the exact lse with log sum's limit: it goes through no rounded lse.
 *                 dentropy's term is p (log p + entropy): p's error, and 16 of |log p| + entropy besides that of both
 * So forward_backward is as forward, then backward, within the limits of both: each is held against the same formula.
 * The target's p below 1/2 is taken from 1, so its dlogits have p's error and 8 of 1 - p, however many columns there are: that
 * difference's rounding, the product's, and those of its factor.
 * Under a softcap z has an error of 7 |z| and its slope one of 12: see `functions`. Of 16-bit logits these are 16 |z| and 16 + 8 of the
 * argument (tanh's argument has 2, its exponential 6, their quotient 6, the product with softcap 1), and under a softcap of up to 64 also 16 softcap and 2^-59.
 * forward_backward of 16-bit logits under a softcap of up to 32 keeps the gradients of columns without a target as codes of fewer
 * bits, which round by 2^-10 for dlogits in bf16 and by 2^-8 for those in e5m2: `code_error`.
 * Results below 2^-126 may be flushed to 0.
 */
#include "lk/cross_entropy.cuh"
#include "lk/cross_entropy_parallel.cuh"
#include "lk/cross_entropy_probabilities.cuh"

#include "tests/test.h"

TEST_DEFINE(CROSS_ENTROPY)
TEST_DEFINE(CROSS_ENTROPY_PARALLEL)
TEST_DEFINE(CROSS_ENTROPY_PROBABILITIES)

typedef lk_status (*call_function)(const lk_cross_entropy_args *, cudaStream_t);
typedef lk_status (*query_function)(const lk_cross_entropy_args *, size_t *);
typedef lk_cross_entropy_parallel_args rank_args;
typedef lk_status (*rank_function)(const rank_args *, cudaStream_t);
typedef lk_status (*rank_query_function)(const rank_args *, size_t *);
enum { FORWARD, BACKWARD, BOTH, DIRECTIONS };
enum { LABELS, PROBABILITIES, HEADERS }; /* whose functions */
#define CALLS(header) {TEST_OF_TYPES(lk_cross_entropy_##header##forward), TEST_OF_TYPES(lk_cross_entropy_##header##backward),  \
                       TEST_OF_TYPES(lk_cross_entropy_##header##forward_backward)}
#define QUERIES(header) {TEST_OF_TYPES(lk_cross_entropy_##header##forward_workspace_bytes),                                    \
                         TEST_OF_TYPES(lk_cross_entropy_##header##backward_workspace_bytes),                                   \
                         TEST_OF_TYPES(lk_cross_entropy_##header##forward_backward_workspace_bytes)}
static const call_function call_of[HEADERS][DIRECTIONS][TEST_TYPES] = {CALLS(), CALLS(probabilities_)};
static const query_function query_of[HEADERS][DIRECTIONS][TEST_TYPES] = {QUERIES(), QUERIES(probabilities_)};

static const rank_function rank_of[DIRECTIONS][TEST_TYPES] = CALLS(parallel_);
static const rank_query_function rank_query_of[DIRECTIONS][TEST_TYPES] = QUERIES(parallel_);
static const rank_function finish_of[TEST_TYPES] = TEST_OF_TYPES(lk_cross_entropy_parallel_finish);
static const rank_query_function finish_bytes_of[TEST_TYPES] = TEST_OF_TYPES(lk_cross_entropy_parallel_finish_workspace_bytes);

static const char *const direction_name[] = {"forward", "backward", "forward_backward"};
enum { PATHS = 4, COUNTED = DIRECTIONS * PATHS };
static const char *const path_name[PATHS] = {"auto", "warp", "block", "cluster"};

/* What a direction gives. */
static bool gives_loss(int direction) { return direction != BACKWARD; }
static bool gives_gradient(int direction) { return direction != FORWARD; }

enum {
    LOGITS, TARGET, WEIGHT, UPSTREAM, DLSE, LSE, LOSS, Z_LOSS, ENTROPY, ARGMAX, VALID, WEIGHT_SUM, BAD_COUNT, DLOGITS,
    LSE_LOW, DENTROPY, DENOMINATOR, ROW_WEIGHTS, PROBS, WORKSPACE, TENSORS = WORKSPACE
};
static const char *const tensor_name[] = {"logits", "target",     "class_weight", "upstream", "dlse",
                                          "lse",    "loss",       "z_loss_out",   "entropy",  "argmax",
                                          "valid_rows", "weight_sum", "bad_targets",  "dlogits",  "lse_low", "dentropy",
                                          "denominator", "row_weight", "target_prob", "workspace"};

/* What a call has or has not; every pair is run. BAD: some targets are bad. NARROW: dlogits narrower than logits. */
enum {
    MEAN, SUM, IGNORE, SMOOTHING, WEIGHTS, Z, SCALE, SOFTCAP, BAD, INT32, WANT_ENTROPY, WANT_ARGMAX, ZERO_WHEN_EMPTY,
    UPSTREAM_ROWS, UPSTREAM_ONE, HAS_DLSE, ZERO_PADDING, IN_PLACE, NARROW, HAS_DENTROPY, DIVIDED, WEIGHTED,
    STATISTICS, HOST_UPSTREAM, ACCUMULATE, SWITCHES
};
static const char *const switch_name[] = {"mean", "sum", "ignore index", "smoothing", "class weights", "z-loss", "logit scale",
                                          "softcap", "bad targets", "int32 targets", "entropy", "argmax", "zero when empty",
                                          "upstream a row", "one upstream", "dlse", "zero padding", "in place",
                                          "narrow dlogits", "dentropy", "denominator", "row weights", "statistics",
                                          "upstream of the host", "accumulate_loss"};

/* What class probabilities leave without effect, since their rows have no targets and none is bad; or refuse. */
static bool of_targets(int s) { return s == BAD || s == INT32 || s == STATISTICS; }

static bool switch_of(int direction, int s)
{
    if (s == STATISTICS) return direction == FORWARD;
    if (s == ACCUMULATE) return gives_loss(direction);
    if (s >= WANT_ENTROPY && s <= ZERO_WHEN_EMPTY) return gives_loss(direction);
    return s < WANT_ENTROPY || s == DIVIDED || s == WEIGHTED || gives_gradient(direction);
}

static bool exclude(int s, int t)
{
    return (s == MEAN && t == SUM) || (s == UPSTREAM_ROWS && t == UPSTREAM_ONE);
}

/* Which entries of the odd rows (of a single row: of it) are special. The shares are those of a row that starts on 16 bytes:
 * forward's blocks have 8 warps, the gradients' smallest have two, and short rows have up to 4. WARP_OF_TARGET: in a row of
 * two warps, or of 4 where it is long enough, the share of the target's. */
enum {
    FIRST, LAST, VECTOR, LAST_VECTOR, LANE, WARP, BLOCK, WARP_OF_2, BLOCK_OF_2, EVEN, SPARSE, AT_TARGET, BUT_ONE, ALL,
    BUT_TARGET, WARP_OF_4, WARP_OF_TARGET, WHERES
};
static const char *const where_name[] = {"first",     "last",          "a vector", "the last vector", "a lane's",
                                         "a warp's",  "a block's",     "a warp's of 2", "2 warps'",   "even",
                                         "1 in 97",   "the target",    "all but one",   "all",
                                         "all but the target", "a warp's of 4", "the target's warp"};
/* STEP, CLIFF: 40, 200 above the others, less and more than what a sum against a value that is not the maximum can hold.
 * TOWER, of gradients: a step, and the target so far above it that 2^126 is between its exponential and the lowest's.
 * TIES: whole numbers, 0 of either sign. CONFIDENT: p at the target is about 1 - 1e-6. NEIGHBOURS: the offset and the next
 * numbers of the type above it in size; of every third row the target is the outermost. NEIGHBOURS with LAST: all are the same
 * except for the last, which is larger. */
enum { NOTHING, MINUS_INF, PLUS_INF, NOT_A_NUMBER, STEP, CLIFF, TOWER, PLACED, TIES = PLACED, CONFIDENT, NEIGHBOURS, SPECIALS };
static const char *const special_name[] = {"nothing",      "-inf",  "+inf", "nan",      "step of 40",
                                           "cliff of 200", "tower", "ties", "confident", "neighbours"};

/* Nothing to divide a mean by: every row ignored, or every class weight 0. */
enum { SOME, ALL_IGNORED, ALL_WEIGHTLESS };

/* One call. Strides are as in the args, 0 for packed; `at` is how many elements a pointer is past 256-byte alignment. */
typedef struct {
    int type, direction, path;
    int64_t rows, vocab;
    bool on[SWITCHES], has[TENSORS];
    int64_t logits_stride, dlogits_stride;
    int at[TENSORS];
    bool prob, wide_prob; /* class probabilities instead of targets; those are f32 whatever T */
    int64_t prob_stride;
    int narrow; /* the type of dlogits with NARROW: e5m2, of f32 logits also f16 or bf16 */
    bool spelt; /* dlogits_dtype says T by name */
    float smoothing, z_loss, scale, softcap;
    int64_t ignore_index;
    int special, where, empty;
    double offset, spread; /* logits are uniform in offset +- spread */
    double denominator;    /* with DIVIDED */
    float upstream_value;  /* with HOST_UPSTREAM */
    double within;         /* not 0: gradients are right to it, relative to their terms */
    int ranks;             /* not 0: the columns are split over so many */
    uint64_t seed;
} problem;

static bool with_probs; /* what problems get */

/* A problem without a switch. */
static problem plain(int type, int direction, int path, int64_t rows, int64_t vocab)
{
    problem p = {};
    p.type = type, p.direction = direction, p.path = path, p.rows = rows, p.vocab = vocab;
    p.narrow = type ? TEST_E5M2 : TEST_BF16;
    p.smoothing = 0.1f, p.z_loss = 0.01f, p.scale = 0.7f, p.softcap = 5, p.ignore_index = -100;
    p.has[LOSS] = p.has[LSE] = true, p.spread = 4, p.denominator = 2.75, p.upstream_value = -0.375f, p.ranks = test_split_over;
    p.seed = test_hash((uint64_t)(rows * 1000003 + vocab * 1009 + type * 101 + direction * 11 + path));
    p.prob = with_probs, p.wide_prob = p.seed / 2 % 2;
    return p;
}

/* What follows from the switches. */
static void settle_tensors(problem *p)
{
    const bool back = gives_gradient(p->direction), loss = gives_loss(p->direction);
    for (int s = 0; s < SWITCHES; s++) p->on[s] = p->on[s] && switch_of(p->direction, s);
    if (p->type) p->narrow = TEST_E5M2;
    if (p->prob && p->narrow == TEST_E5M2) p->narrow = TEST_BF16, p->on[NARROW] = p->on[NARROW] && !p->type; /* refused */
    if (!back && p->special == TOWER) p->special = CLIFF;
    if (p->ranks > 1) { /* slices of one tensor: padding of one is another's, and narrow slices lie elsewhere */
        p->on[ZERO_PADDING] = false;
        if (p->direction == BOTH || p->on[NARROW]) p->on[IN_PLACE] = false; /* the call is made twice: see launch_split */
    }
    if (p->ranks && test_gathers(p)) p->on[ACCUMULATE] = false; /* such calls are made twice, and by each rank */
    p->on[SUM] = p->on[SUM] && !p->on[MEAN], p->on[UPSTREAM_ONE] = p->on[UPSTREAM_ONE] && !p->on[UPSTREAM_ROWS];
    for (int s = 0; s < SWITCHES; s++) p->on[s] = p->on[s] && !(p->prob && of_targets(s));
    if (p->prob) p->empty = SOME;
    p->has[LOGITS] = p->has[TARGET] = true, p->has[DLOGITS] = back, p->has[PROBS] = p->prob; /* TARGET: for special columns */
    p->has[WEIGHT] = p->on[WEIGHTS], p->has[UPSTREAM] = p->on[UPSTREAM_ROWS] || p->on[UPSTREAM_ONE];
    p->has[DLSE] = p->on[HAS_DLSE], p->has[ENTROPY] = p->on[WANT_ENTROPY] || p->on[STATISTICS], p->has[ARGMAX] = p->on[WANT_ARGMAX];
    p->has[DENTROPY] = p->on[HAS_DENTROPY], p->has[DENOMINATOR] = p->on[DIVIDED], p->has[ROW_WEIGHTS] = p->on[WEIGHTED];
    if (!loss) {
        p->has[ENTROPY] = p->on[HAS_DENTROPY];
        p->has[LSE] = true, p->has[LOSS] = p->has[Z_LOSS] = false; /* and lse_low as it was drawn */
        const bool counts = p->on[MEAN] && !p->on[DIVIDED] && !p->prob;
        p->has[VALID] |= counts && (!p->on[WEIGHTS] || p->on[Z]), p->has[WEIGHT_SUM] |= counts && p->on[WEIGHTS];
    }
}

static const char *describe(const problem *p)
{
    static char text[1024];
    int n = snprintf(text, sizeof text, "%s %s path=%s ranks=%d rows=%lld vocab=%lld strides %lld, %lld;",
                     direction_name[p->direction], test_type_name[p->type], path_name[p->path], p->ranks, (long long)p->rows,
                     (long long)p->vocab, (long long)p->logits_stride, (long long)p->dlogits_stride);
    for (int s = 0; s < SWITCHES; s++)
        if (p->on[s]) n += snprintf(text + n, sizeof text - (size_t)n, " %s", switch_name[s]);
    for (int t = 0; t < TENSORS; t++)
        if (p->has[t]) n += snprintf(text + n, sizeof text - (size_t)n, "%s %s+%d", t ? "," : ";", tensor_name[t], p->at[t]);
    snprintf(text + n, sizeof text - (size_t)n,
             "; e=%g k=%g scale=%g softcap=%g ignore=%lld narrow=%s special=%s at %s empty=%d offset=%g spread=%g "
             "denominator=%g seed=0x%llx",
             (double)p->smoothing, (double)p->z_loss, (double)p->scale, (double)p->softcap, (long long)p->ignore_index, test_type_name[p->narrow],
             special_name[p->special], where_name[p->where], p->empty, p->offset, p->spread, p->denominator,
             (unsigned long long)p->seed);
    return text;
}

static bool is_output(const problem *p, int t)
{
    if (!p->has[t]) return false;
    return t == BAD_COUNT || t == DLOGITS || (((t >= LSE && t <= WEIGHT_SUM) || t == LSE_LOW) && gives_loss(p->direction));
}

/* Whose memory it lies in. */
static int home_of(const problem *p, int t)
{
    return t == DLOGITS && p->on[IN_PLACE] ? LOGITS : t;
}

/* Where a tensor's elements lie: those of class_weight are one row, those of lse and the like one column. Columns cols to
 * end - 1 of dlogits are padding that becomes 0. */
typedef struct {
    int type, bytes;
    int64_t rows, cols, stride, end;
} layout;

static layout layout_of(const problem *p, int t)
{
    const bool reduced = p->on[MEAN] || p->on[SUM];
    const int64_t vocab = p->vocab, stride = p->logits_stride ? p->logits_stride : vocab;
    if (t == LOGITS) return {p->type, test_type_bytes[p->type], p->rows, vocab, stride, vocab};
    if (t == DLOGITS) {
        const int type = p->on[NARROW] ? p->narrow : p->type;
        int64_t own = p->dlogits_stride ? p->dlogits_stride : vocab, end = own;
        if (p->on[IN_PLACE]) own = stride * test_type_bytes[p->type] / test_type_bytes[type], end = stride;
        return {type, test_type_bytes[type], p->rows, vocab, own, p->on[ZERO_PADDING] ? end : vocab};
    }
    if (t == WEIGHT) return {TEST_F32, 4, 1, vocab, vocab, vocab};
    if (t == PROBS) {
        const int type = p->wide_prob ? TEST_F32 : p->type;
        return {type, test_type_bytes[type], p->rows, vocab, p->prob_stride ? p->prob_stride : vocab, vocab};
    }
    const bool one = t == VALID || t == WEIGHT_SUM || t == BAD_COUNT || t == DENOMINATOR ||
                     (t == UPSTREAM && !p->on[UPSTREAM_ROWS]) || ((t == LOSS || t == Z_LOSS) && reduced);
    const int bytes = t == ARGMAX || t == VALID || (t == TARGET && !p->on[INT32]) ? 8 : 4;
    return {TEST_F32, bytes, one ? 1 : t == ENTROPY && p->on[STATISTICS] ? 4 * p->rows : p->rows, 1, 1, 1};
}

/* ---- Draws ----------------------------------------------------------------------------------------------------------- */

/* Half of the draws leave out what the plain kernels do not do. */
static void draw_switches(problem *p, uint64_t *r)
{
    static const float smoothing[] = {0.1f, 0.35f, 1}, z_loss[] = {1e-4f, 0.01f, 0.5f}, scale[] = {0.7f, 3, 0.01f},
                       softcap[] = {5, 30, 0.9f, 60, 1e4f};
    const uint64_t later = test_hash(*r + 1);
    for (int s = 0; s < HAS_DENTROPY; s++) p->on[s] = test_chance(r, 2);
    p->on[HAS_DENTROPY] = later % 3 == 0, p->on[DIVIDED] = later / 3 % 3 == 0, p->on[WEIGHTED] = later / 9 % 3 == 0;
    p->on[STATISTICS] = later / 27 % 3 == 0, p->on[HOST_UPSTREAM] = later / 243 % 3 == 0, p->on[ACCUMULATE] = later / 729 % 3 == 0;
    if (test_chance(r, 2))
        p->on[SMOOTHING] = p->on[SOFTCAP] = p->on[WANT_ENTROPY] = p->on[WANT_ARGMAX] = p->on[HAS_DENTROPY] = p->on[STATISTICS] =
            false;
    if (test_chance(r, 3)) p->on[MEAN] = p->on[SUM] = false;
    if (test_chance(r, 3)) p->on[UPSTREAM_ROWS] = p->on[UPSTREAM_ONE] = false;
    p->smoothing = smoothing[test_below(r, 3)], p->z_loss = z_loss[test_below(r, 3)];
    p->scale = scale[test_below(r, 3)], p->softcap = softcap[test_below(r, 5)];
    p->narrow = test_chance(r, 2) ? TEST_F16 : TEST_BF16, p->spelt = test_chance(r, 2);
    if (p->type || later / 81 % 3 == 0) p->narrow = TEST_E5M2;
    if (p->type && later / 81 % 3 > 0) p->on[NARROW] = false; /* short rows have kernels of their own in T alone */
    p->ignore_index = test_chance(r, 2) ? -100 : test_below(r, p->vocab < 5 ? p->vocab : 5);
    for (int t = LSE; t <= BAD_COUNT; t++) p->has[t] = !test_chance(r, 3);
    const uint64_t apart = test_hash(*r);
    if (test_chance(r, 6)) p->has[LSE] = p->has[LOSS] = p->has[Z_LOSS] = false;
    if (!p->has[LSE] && !p->has[LOSS] && !p->has[Z_LOSS]) p->has[test_chance(r, 2) ? VALID : WEIGHT_SUM] = true;
    p->has[LSE_LOW] = p->has[LSE] || p->has[LOSS] || p->has[Z_LOSS] ? apart % 3 > 0 : apart % 3 == 0;
}

/* Leaves out what the plain kernels do not do, and the scales under which a cliff is none. */
static void make_plain(problem *p)
{
    p->on[SMOOTHING] = p->on[SOFTCAP] = p->on[WANT_ENTROPY] = p->on[WANT_ARGMAX] = p->on[SCALE] = p->on[HAS_DENTROPY] = false;
    p->on[STATISTICS] = false;
}

/* How rows lie: packed; packed and all off by as much; with gaps, all rows alike; with one odd stride; each tensor with its own
 * stride and offset. The other tensors are on their own. */
enum { PACKED, PACKED_OFF, GAPS, ODD_GAPS, WILD, PLACES };

static void draw_place(problem *p, uint64_t *r, int place)
{
    const int off = place == PACKED ? 0 : 1 + (int)test_below(r, 7);
    const int64_t full = (p->vocab + 7) / 8 * 8, odd = p->vocab + 1 + 2 * test_below(r, 4);
    int64_t *const strides[] = {&p->logits_stride, &p->dlogits_stride};
    for (int t = 0; t < LSE_LOW; t++) p->at[t] = (int)test_below(r, 4);
    for (int t = LSE_LOW; t < WORKSPACE; t++) p->at[t] = (int)(test_hash(*r + (uint64_t)(t - LSE_LOW)) % 4);
    for (int i = 0; i < 2; i++) {
        *strides[i] = test_chance(r, 2) ? 0 : p->vocab; /* packed, as 0 or spelt out */
        if (place == GAPS) *strides[i] = full + 8 * (1 + test_below(r, 3));
        if (place == ODD_GAPS) *strides[i] = odd;
        if (place == WILD) *strides[i] = p->vocab + test_below(r, 12);
        p->at[i ? DLOGITS : LOGITS] = place == WILD ? (int)test_below(r, 8) : place == GAPS && test_chance(r, 2) ? 8 : off;
    }
    p->prob_stride = place == WILD ? p->vocab + test_below(r, 12) : p->logits_stride;
    if (place != WILD) p->at[PROBS] = p->at[LOGITS];
}

/* In place the stride of dlogits is 0 or that of logits. */
static void settle_place(problem *p)
{
    if (!p->on[IN_PLACE]) return;
    const int ratio = p->on[NARROW] ? test_type_bytes[p->type] / test_type_bytes[p->narrow] : 1;
    p->dlogits_stride = p->seed % 2 ? 0 : (p->logits_stride ? p->logits_stride : p->vocab) * ratio;
}

/* A problem with drawn switches and places, from a seed that the caller makes of its case. */
static problem drawn(int type, int direction, int path, int64_t rows, int64_t vocab, int seed, int place)
{
    problem p = plain(type, direction, path, rows, vocab);
    p.seed = test_hash(p.seed + (uint64_t)seed * 0x10001);
    p.wide_prob = p.seed / 2 % 2;
    uint64_t random = p.seed;
    draw_switches(&p, &random);
    draw_place(&p, &random, place);
    return p;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------------- */

/* What the header's formula says of a row, and within what limits. */
typedef struct {
    bool counted, bad, proper;
    int64_t y, argmax; /* y: -1 with class probabilities */
    double total;      /* with these, the sum of u */
    double weight, max, lse, class_loss, z_loss, entropy, log_sum, lse_slack, class_slack, z_slack,
        entropy_slack, z_error, log_slack;
    double statistics[3], statistics_slack[3];
} outcome;

static test_buffer buffers[TENSORS + 1]; /* the workspace is the last */
static layout laid[TENSORS];
static unsigned char *kept[TENSORS]; /* the first run's outputs */
static size_t kept_bytes[TENSORS], z_bytes, outcome_bytes;
static double *row_z;
static outcome *outcomes; /* of each row */
static double weight_total, weight_sum; /* of all columns; of the targets of counted rows */
static int64_t valid_rows, bad_targets;

static float value(int t, int64_t row, int64_t c)
{
    return test_get(laid[t].type, test_buffer_host(&buffers[t]), row * laid[t].stride + c);
}

static int64_t integer(int t, const void *elements, int64_t row)
{
    return laid[t].bytes == 4 ? ((const int32_t *)elements)[row] : ((const int64_t *)elements)[row];
}

static double weight_of(const problem *p, int64_t c)
{
    return p->has[WEIGHT] ? (double)value(WEIGHT, 0, c) : 1;
}

static double smoothing_of(const problem *p) { return p->on[SMOOTHING] ? (double)p->smoothing : 0; }
static bool ignores(const problem *p) { return p->on[IGNORE] && !p->prob; }

/* u of a column: its class weight times its smoothed probability. */
static double prob_of(const problem *p, int64_t row, int64_t c)
{
    const double e = smoothing_of(p);
    return weight_of(p, c) * ((1 - e) * (double)value(PROBS, row, c) + e / (double)p->vocab);
}

static double scale_of(const problem *p) { return p->on[SCALE] ? (double)p->scale : 1; }
static double z_loss_of(const problem *p) { return p->on[Z] ? (double)p->z_loss : 0; }

static bool is_special(const problem *p, int64_t row, int64_t c, int64_t y)
{
    if (p->rows > 1 && row % 2 == 0) return false;
    const int vec = 16 / test_type_bytes[p->type];
    switch (p->where) {
    case FIRST: return c == 0;
    case LAST: return c == p->vocab - 1;
    case VECTOR: return c / vec == (p->vocab > vec ? 1 : 0);
    case LAST_VECTOR: return c / vec == (p->vocab >= vec ? p->vocab / vec - 1 : 0);
    case LANE: return c / vec % 32 == 1;
    case WARP: return c / vec / 32 % 8 == 0;
    case BLOCK: return c / vec / 256 % 2 == 0;
    case WARP_OF_2: return c / vec / 32 % 2 == 0;
    case BLOCK_OF_2: return c / vec / 64 % 2 == 0;
    case EVEN: return c % 2 == 0;
    case SPARSE: return c % 97 == 5;
    case AT_TARGET: return c == y;
    case BUT_ONE: return c != row * 7 % p->vocab;
    case BUT_TARGET: return c != y;
    case WARP_OF_4: return c / vec / 32 % 4 == 0;
    case WARP_OF_TARGET: return c / vec / 32 % (p->vocab / vec > 256 ? 4 : 2) == y / vec / 32 % (p->vocab / vec > 256 ? 4 : 2);
    }
    return true;
}

static void fill_logits(const problem *p)
{
    static const float special[] = {0, -INFINITY, INFINITY, NAN};
    void *const host = test_buffer_host(&buffers[LOGITS]);
    uint64_t random = p->seed + 1;
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t y = integer(TARGET, test_buffer_host(&buffers[TARGET]), row);
        if (ignores(p) && y == p->ignore_index) continue;
        for (int64_t c = 0; c < p->vocab; c++) {
            double v = p->offset + p->spread * test_uniform(&random);
            uint32_t above = row % 3 == 2 && c == y ? 3 : (uint32_t)(random >> 40) % 3;
            if (p->where == LAST) above = (c == p->vocab - 1) == (p->offset > 0) ? (uint32_t)(1 + row % 3) : 0;
            if (p->special == TIES) v = floor(v / 2), v = v == 0 && c % 2 ? -0.0 : v;
            else if (p->special == NEIGHBOURS)
                v = (double)test_decode(p->type, test_encode(p->type, (float)p->offset) + above);
            else if (p->special == CONFIDENT) v = c == y ? p->offset + (14 + log((double)p->vocab)) / scale_of(p) : v;
            else if (p->special == TOWER) v += (c == y ? 115 : is_special(p, row, c, y) ? 45 : 0) / scale_of(p);
            else if (p->special && is_special(p, row, c, y))
                v = p->special == STEP ? v + 40 : p->special == CLIFF ? v + 200 : (double)special[p->special];
            test_put(p->type, host, row * laid[LOGITS].stride + c, (float)v);
        }
    }
}

static void fill_targets(const problem *p)
{
    const bool small = p->on[INT32];
    const int64_t wrong[] = {-1, p->vocab, -100, small ? INT32_MIN : INT64_MIN, small ? INT32_MAX : INT64_MAX,
                             small ? -p->vocab : ((int64_t)1 << 32) + p->vocab / 2};
    uint64_t random = p->seed + 2;
    for (int64_t row = 0; row < p->rows; row++) {
        int64_t y = test_below(&random, p->vocab);
        const int64_t chosen = (int64_t)(p->seed % 4);
        if (p->on[BAD] && (test_chance(&random, 5) || row == chosen)) y = wrong[test_below(&random, LENGTH_OF(wrong))];
        else if (ignores(p) && (test_chance(&random, 4) || row == (chosen + 1) % 4)) y = p->ignore_index;
        if (ignores(p) && p->empty == ALL_IGNORED) y = p->ignore_index;
        if (small) ((int32_t *)test_buffer_host(&buffers[TARGET]))[row] = (int32_t)y;
        else ((int64_t *)test_buffer_host(&buffers[TARGET]))[row] = y;
    }
}

/* Class probabilities: some 0, rows that add up to anything, rows of a single 1. In half of the rows with -inf those columns
 * have 0, so that the loss is finite. */
static void fill_probs(const problem *p)
{
    uint64_t random = p->seed + 3;
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t y = integer(TARGET, test_buffer_host(&buffers[TARGET]), row);
        const bool one = test_chance(&random, 3), apart = p->special == MINUS_INF && test_chance(&random, 2);
        for (int64_t c = 0; c < p->vocab; c++) {
            double v = test_chance(&random, 4) ? 0 : (1 + test_uniform(&random)) / (double)p->vocab;
            if (one) v = c == y;
            if (apart && is_special(p, row, c, y)) v = 0;
            test_put(laid[PROBS].type, test_buffer_host(&buffers[PROBS]), row * laid[PROBS].stride + c, (float)v);
        }
    }
}

/* The float inputs that are drawn. Zeros are among row weights, class weights and upstreams, -0 too where all class weights are 0, so that
 * rows have a loss of -0; a NaN upstream is its row's alone, and of no consequence where there is nothing to divide by. */
static void fill_floats(const problem *p, int t)
{
    uint64_t random = p->seed + (uint64_t)t * 0x100000001;
    for (int64_t row = 0; row < laid[t].rows; row++)
        for (int64_t c = 0; c < laid[t].cols; c++) {
            double v = test_uniform(&random);
            if (t == WEIGHT) v = p->empty == ALL_WEIGHTLESS ? (c % 2 ? -0.0 : 0.0) : test_chance(&random, 9) ? 0 : 1 + v / 2;
            if (t == UPSTREAM && (p->empty || (row == 2 && p->on[UPSTREAM_ROWS]))) v = NAN;
            if (t == UPSTREAM && row == 3) v = 0;
            if (t == DENOMINATOR) v = p->denominator;
            if (t == ROW_WEIGHTS) v = row == 4 ? 0 : row == 5 && !p->on[MEAN] && !p->on[SUM] ? NAN : 1.5 * v;
            const int64_t y = row < p->rows ? integer(TARGET, test_buffer_host(&buffers[TARGET]), row) : 0;
            if (t == ROW_WEIGHTS && (y < 0 || y >= p->vocab) && p->seed % 2) v = 0;
            if (row < p->rows && t != WEIGHT && t != DENOMINATOR && ignores(p) && laid[t].rows == p->rows && p->rows > 1 &&
                integer(TARGET, test_buffer_host(&buffers[TARGET]), row) == p->ignore_index)
                v = NAN;
            test_put(TEST_F32, test_buffer_host(&buffers[t]), row + c, (float)v);
        }
}

static bool adds_losses(const problem *p) { return p->on[ACCUMULATE]; } /* for test_near_loss */

/* z of a logit; inf tanh is 1. */
static double z_of(const problem *p, double x)
{
    const double softcap = (double)p->softcap;
    return p->on[SOFTCAP] ? softcap * tanh(scale_of(p) * x / softcap) : scale_of(p) * x;
}

/* lk_ce_cap computes z and its slope in the shorter way. */
static bool short_cap(const problem *p) { return p->type != TEST_F32 && p->softcap <= 64; }

/* What forward_backward's codes round a gradient by, relative to it. */
static double code_error(const problem *p)
{
    const bool keeps = p->direction == BOTH && !p->ranks && !p->prob && p->on[SOFTCAP] && !(smoothing_of(p) > 0) &&
                       !p->has[ENTROPY] && !p->has[ARGMAX] && !p->has[DENTROPY];
    return keeps ? test_code_error(p->type, laid[DLOGITS].type, p->softcap) : 0;
}

static double nudge; /* for difference quotients: what is added to the logit of column nudged */
static int64_t nudged = -1;

/* z of a row, left in row_z, and what the header's formula makes of it. */
static outcome examine(const problem *p, int64_t row)
{
    const double u = 0x1p-24, e = smoothing_of(p);
    outcome o = {};
    o.y = integer(TARGET, test_buffer_host(&buffers[TARGET]), row), o.argmax = -1;
    if (p->prob) o.y = -1, o.weight = 1;
    o.counted = !(ignores(p) && o.y == p->ignore_index), o.bad = o.counted && !p->prob && (o.y < 0 || o.y >= p->vocab);
    if (!o.counted) return o;
    double best = 0, max = -INFINITY, largest = 0;
    bool nan = false;
    for (int64_t c = 0; c < p->vocab; c++) {
        const double v = (double)value(LOGITS, row, c) + (c == nudged ? nudge : 0), z = row_z[c] = z_of(p, v);
        if (o.argmax < 0 || (best == best && (v != v || v > best))) o.argmax = c, best = v;
        nan |= z != z, max = fmax(max, z), largest = isinf(z) ? largest : fmax(largest, fabs(z));
    }
    double sum = 0, first = 0, second = 0, weighted = 0, size = 0, squares = 0, first_of_squares = 0, total = 0, total_size = 0;
    o.proper = !nan && !isinf(max), o.max = max;
    for (int64_t c = 0; o.proper && c < p->vocab; c++) {
        const double d = row_z[c] - max, exponential = exp(d), u_c = p->prob ? prob_of(p, row, c) : 0,
                     w = p->prob ? u_c : e > 0 ? weight_of(p, c) : 0;
        sum += exponential;
        squares += exponential * exponential, total += row_z[c], total_size += fabs(row_z[c]);
        if (exponential > 0) first_of_squares -= exponential * exponential * d;
        if (exponential > 0) first -= exponential * d, second += exponential * d * d; /* 0 times -inf counts 0 */
        if (p->prob ? u_c != 0 : e > 0) weighted += w * d, size += fabs(w * d); /* a probability of 0 times -inf counts 0 */
        o.total += u_c;
    }
    const double log_sum = log(sum), mean = first / sum, log_slack = 16 * u * (2 + log_sum + mean);
    const bool good = !o.bad && o.proper;
    if (!p->prob) o.weight = o.bad ? 0 : weight_of(p, o.y);
    if (p->on[SOFTCAP]) o.z_error = (p->type == TEST_F32 ? 7 : 16) * u * largest + (short_cap(p) ? 16 * u * (double)p->softcap : 0);
    o.log_slack = log_slack;
    o.log_sum = log_sum, o.lse = nan ? NAN : isinf(max) ? max : max + log_sum;
    o.lse_slack = log_slack + 2 * u * fabs(max) + o.z_error;
    o.z_loss = p->on[Z] ? z_loss_of(p) * o.lse * o.lse : 0;
    if (p->on[Z]) o.z_slack = 2 * z_loss_of(p) * fabs(o.lse) * o.lse_slack + 4 * u * o.z_loss; /* else 0, whatever lse is */
    o.entropy = o.proper ? log_sum + mean : NAN;
    o.entropy_slack = log_slack + 16 * u * (mean + second / sum) + 2 * o.z_error * (1 + o.entropy);
    const double cols = (double)p->vocab, log_squares = log(squares);
    const double statistics[] = {log_squares - 2 * log_sum, total / cols, -log_sum};
    const double slack[] = {2 * log_slack + 16 * u * (2 + log_squares + 2 * first_of_squares / squares) + 4 * o.z_error,
                            16 * u * total_size / cols + o.z_error + 0x1p-65, log_slack + 2 * o.z_error};
    for (int i = 0; i < 3; i++) o.statistics[i] = o.proper ? statistics[i] : NAN, o.statistics_slack[i] = slack[i];
    o.class_loss = o.class_slack = NAN;
    if (!good) return o;
    if (p->prob) {
        o.class_loss = o.total * log_sum - weighted;
        o.class_slack = o.total * (log_slack + 2 * o.z_error) + 16 * u * size;
        return o;
    }
    const double above = max - row_z[o.y], share = e / (double)p->vocab;
    o.class_loss = (1 - e) * o.weight * (above + log_sum);
    o.class_slack = (1 - e) * o.weight * (log_slack + 16 * u * above + 2 * o.z_error);
    if (e > 0) o.class_loss += share * (weight_total * log_sum - weighted);
    if (e > 0) o.class_slack += share * (weight_total * (log_slack + 2 * o.z_error) + 16 * u * size);
    return o;
}

static void examine_all(const problem *p)
{
    row_z = (double *)test_room(row_z, &z_bytes, (size_t)p->vocab * sizeof(double));
    outcomes = (outcome *)test_room(outcomes, &outcome_bytes, (size_t)(p->rows + 1) * sizeof(outcome));
    weight_total = weight_sum = 0, valid_rows = bad_targets = 0;
    for (int64_t c = 0; c < p->vocab; c++) weight_total += weight_of(p, c);
    for (int64_t row = 0; row < p->rows; row++) {
        const outcome o = outcomes[row] = examine(p, row);
        valid_rows += o.counted, bad_targets += o.bad, weight_sum += o.counted ? o.weight : 0;
    }
}

/* What a mean divides the class terms by. */
static double over_of(const problem *p)
{
    return p->on[DIVIDED] ? (double)(float)p->denominator : p->has[WEIGHT] ? weight_sum : (double)valid_rows;
}
static double z_over_of(const problem *p) { return p->on[DIVIDED] ? over_of(p) : (double)valid_rows; }

/* What a double is rounded by as a float; 0 where that is not finite. */
static double low_of(double x)
{
    return isfinite((float)x) ? x - (double)(float)x : 0;
}

static void fill_saved(const problem *p)
{
    for (int64_t row = 0; p->has[LSE] && row < p->rows; row++) {
        if (!outcomes[row].counted) continue;
        ((float *)test_buffer_host(&buffers[LSE]))[row] = (float)outcomes[row].lse;
        if (p->has[LSE_LOW]) ((float *)test_buffer_host(&buffers[LSE_LOW]))[row] = (float)low_of(outcomes[row].lse);
        if (p->has[ENTROPY]) ((float *)test_buffer_host(&buffers[ENTROPY]))[row] = (float)outcomes[row].entropy;
    }
    if (p->has[VALID]) *(int64_t *)test_buffer_host(&buffers[VALID]) = valid_rows;
    if (p->has[WEIGHT_SUM]) *(float *)test_buffer_host(&buffers[WEIGHT_SUM]) = (float)weight_sum;
}

static lk_cross_entropy_args args;

/* Under ASan padding of the logits cannot be read, nor an ignored row, which may be prefetched. Without `ignored` such a row may
 * be read, but padding cannot be prefetched. */
static void forbid(const problem *p, bool ignored)
{
    (void)p, (void)ignored;
#if TEST_ASAN
    simt_allow_poisoned_prefetch(ignored);
    for (int t = LOGITS; t <= PROBS; t += PROBS - LOGITS) {
        const layout l = laid[t];
        char *const elements = (char *)test_buffer_device(&buffers[t]);
        for (int64_t row = 0; row < l.rows && p->has[t] && !(t == LOGITS && p->on[IN_PLACE]); row++) {
            const int64_t begin = row * l.stride + (outcomes[row].counted || !ignored ? l.cols : 0),
                          end = row + 1 < l.rows ? (row + 1) * l.stride : row * l.stride + l.cols;
            if (begin < end) __asan_poison_memory_region(elements + begin * l.bytes, (size_t)((end - begin) * l.bytes));
        }
    }
#endif
}

/* What a call does not have holds anything: it is not looked at. */
static void fill_unused(int direction)
{
    void *const wild = (void *)(uintptr_t)1;
    if (!gives_loss(direction)) {
        args.loss = args.z_loss_out = (float *)wild, args.argmax = (int64_t *)wild;
        if (!args.dentropy) args.entropy = (float *)wild;
        args.workspace = wild, args.workspace_bytes = 3, args.zero_when_empty = args.accumulate_loss = 7;
    }
    if (!gives_gradient(direction)) {
        args.upstream = args.dlse = args.dentropy = (const float *)wild, args.dlogits = wild, args.dlogits_stride = -5;
        args.upstream_per_row = args.zero_padding = 1, args.dlogits_dtype = 99, args.upstream_value = NAN;
    }
    if (args.reduction != LK_REDUCTION_MEAN) args.denominator = (const float *)wild;
}

static void set_args(const problem *p, void *const *at)
{
    args = {};
    args.logits = at[LOGITS], args.target = at[TARGET], args.class_weight = (const float *)at[WEIGHT];
    args.upstream = (const float *)at[UPSTREAM], args.dlse = (const float *)at[DLSE];
    args.dentropy = (const float *)at[DENTROPY], args.denominator = (const float *)at[DENOMINATOR];
    args.row_weight = (const float *)at[ROW_WEIGHTS], args.statistics = p->on[STATISTICS] ? 1 + (int)(p->seed % 3) : 0;
    args.loss = (float *)at[LOSS], args.z_loss_out = (float *)at[Z_LOSS], args.lse = (float *)at[LSE];
    args.lse_low = (float *)at[LSE_LOW], args.entropy = (float *)at[ENTROPY], args.argmax = (int64_t *)at[ARGMAX];
    args.valid_rows = (int64_t *)at[VALID], args.weight_sum = (float *)at[WEIGHT_SUM], args.dlogits = at[DLOGITS];
    args.bad_targets = (int32_t *)at[BAD_COUNT];
    args.rows = p->rows, args.vocab = p->vocab;
    args.logits_stride = p->logits_stride, args.dlogits_stride = p->dlogits_stride;
    if (p->on[SCALE]) args.logit_scale = p->scale;
    if (p->on[SOFTCAP]) args.softcap = p->softcap;
    if (p->on[SMOOTHING]) args.label_smoothing = p->smoothing;
    if (p->on[Z]) args.z_loss = p->z_loss;
    if (p->on[HOST_UPSTREAM]) args.upstream_value = p->upstream_value;
    args.accumulate_loss = p->on[ACCUMULATE] ? 1 + (int)(p->seed % 3) : 0;
    args.ignore_index = p->on[IGNORE] ? p->ignore_index : 0;
    args.use_ignore_index = p->on[IGNORE], args.zero_when_empty = p->on[ZERO_WHEN_EMPTY];
    args.reduction = p->on[MEAN] ? LK_REDUCTION_MEAN : p->on[SUM] ? LK_REDUCTION_SUM : LK_REDUCTION_NONE;
    args.upstream_per_row = p->on[UPSTREAM_ROWS], args.zero_padding = p->on[ZERO_PADDING];
    args.dlogits_dtype = p->on[NARROW] ? p->narrow + 1 : p->spelt ? p->type + 1 : LK_DTYPE_T; /* both lists have one order */
    args.target_dtype = p->on[INT32] ? LK_TARGET_INT32 : LK_TARGET_INT64, args.path = p->path;
    if (p->prob) args.target = NULL, args.target_prob = at[PROBS], args.target_prob_stride = p->prob_stride;
    if (p->prob && (p->wide_prob || p->spelt)) args.target_prob_dtype = laid[PROBS].type + 1;
    if (!p->prob && p->seed % 2) args.target_prob_stride = -5, args.target_prob_dtype = 99;
    if (p->seed % 2) fill_unused(p->direction);
}

/* What is left for a query: shapes, options, and of what it asks whether it is wanted, the value of no address. */
static void without_tensors(int direction)
{
    const bool fills_output = gives_loss(direction);
    args.logits = args.target = args.target_prob = NULL, args.dlogits = NULL;
    args.row_weight = args.upstream = args.dlse = args.dentropy = args.denominator = NULL;
    args.lse = args.lse_low = args.entropy = NULL, args.argmax = args.valid_rows = NULL, args.bad_targets = NULL;
    if (!fills_output) args.loss = args.z_loss_out = args.weight_sum = NULL;
    float **const outputs[] = {&args.loss, &args.z_loss_out, &args.weight_sum};
    for (int i = 0; i < LENGTH_OF(outputs); i++)
        if (*outputs[i]) *outputs[i] = (float *)(uintptr_t)1;
    if (args.class_weight) args.class_weight = (const float *)(uintptr_t)3;
}

static int header_of(const problem *p) { return p->prob ? PROBABILITIES : LABELS; }

static lk_status query(int header, int type, int direction, size_t *bytes)
{
    return query_of[header][direction][type](&args, bytes);
}

/* ---- Columns split over virtual ranks, one after another ------------------------------------------------------------------ */

static size_t state_bytes(const problem *p)
{
    const bool more = p->on[SMOOTHING] || p->on[HAS_DENTROPY] || p->on[WANT_ENTROPY] || p->on[WANT_ARGMAX];
    return (size_t)p->rows * (p->on[STATISTICS] ? 40 : more ? 32 : 16);
}

static rank_args slice_of(const problem *p, int rank)
{
    rank_args x = {args, {}, NULL, test_ranks.table};
    lk_cross_entropy_args &a = x.common;
    const int64_t first = test_ranks.cut[rank];
    a.vocab = test_ranks.cut[rank + 1] - first, a.logits_stride = p->logits_stride ? p->logits_stride : p->vocab;
    a.logits = (const char *)args.logits + first * test_type_bytes[p->type];
    if (gives_gradient(p->direction)) {
        a.dlogits = (char *)args.dlogits + first * laid[DLOGITS].bytes, a.dlogits_stride = laid[DLOGITS].stride;
        if (p->on[ZERO_PADDING]) a.dlogits_stride = args.dlogits_stride;
    }
    if (a.vocab == 0 && rank % 2) a.logits = NULL, a.dlogits = NULL; /* an empty tensor, as some frameworks have it */
    test_act_as(&x.parallel, rank, p);
    if (test_gathers(p)) x.parallel.all_gather = test_gather;
    if (rank > 0) a.bad_targets = NULL; /* each rank counts them all */
    return x;
}

/* The sum of the p of all other columns, for backward, by the lse that it gets. */
static double others_of(const problem *p, int64_t row)
{
    const outcome o = examine(p, row);
    const double lse = p->has[LSE_LOW] ? o.lse : (double)(float)o.lse;
    double sum = 0;
    for (int64_t c = 0; o.counted && c < p->vocab; c++) sum += c == o.y ? 0 : exp(row_z[c] - lse);
    return sum;
}
static void make_table(const problem *p) { test_fill_table(p, p->rows, others_of, state_bytes(p), 0); }

static lk_status launch_split(const problem *p)
{
    lk_status status = LK_OK;
    const bool keeps = test_gathers(p) && p->seed % 8 < 4 && !p->on[HAS_DENTROPY]; /* what backward reads of the call's states */
    for (int round = 0; round < (test_gathers(p) && p->ranks > 1 ? 2 : 1); round++)
        for (int rank = 0; rank < p->ranks && !status; rank++) {
            rank_args x = slice_of(p, rank);
            if (!test_gathers(p)) x.states = test_states_of(rank);
            if (keeps) x.states = test_left_states(0);
            if (p->direction == BACKWARD) x.states = test_left_states(2);
            if (round == 0 && test_gathers(p) && p->ranks > 1) x.common.bad_targets = NULL;
            status = rank_of[p->direction][p->type](&x, test.stream);
            const bool complete = !status && test_gathers(p) && (round || p->ranks == 1);
            if (complete && x.common.lse) test_same_on_ranks(x.common.lse, p->rows, rank);
        }
    if (status || p->direction == BACKWARD || (test_gathers(p) && !keeps)) return status;
    rank_args x = slice_of(p, 0);
    if (keeps) { /* finish by itself leaves the same bits as the call that gathers */
        x.states = test_left_states(1), x.parallel.all_gather = NULL, x.common.bad_targets = NULL;
    }
    status = finish_of[p->type](&x, test.stream);
    for (int i = 0; i < 2 && keeps && !status; i++) test_same_on_ranks(test_left_states(i), p->rows, i);
    return status;
}

/* The table and the workspace where columns are split: of finish, or of forward_backward. */
static bool setup_ranks(const problem *p, int run)
{
    size_t bytes = 0;
    make_table(p);
    const rank_args x = slice_of(p, p->ranks - 1);
    const rank_query_function ask =
        p->direction == FORWARD && !test_gathers(p) ? finish_bytes_of[p->type] : rank_query_of[p->direction][p->type];
    const lk_status status = ask(&x, &bytes);
    if (!test_that(status == LK_OK)) test_detail("a query: %s; %s", lk_last_error(), describe(p));
    test_buffer_size(&buffers[WORKSPACE], bytes, bytes ? 128 : 0, run ? 0x5a : 0xff);
    test_buffer_upload(&buffers[WORKSPACE]);
    if (gives_loss(p->direction) || bytes) args.workspace_bytes = bytes;
    if (gives_loss(p->direction) || bytes) args.workspace = bytes ? test_buffer_device(&buffers[WORKSPACE]) : NULL;
    return status == LK_OK;
}

/* Fills and uploads everything for a run, and the args. A tensor that is both written and read, as those of the
 * sequences are, keeps its poison. */
static bool setup(const problem *p, int run)
{
    void *at[TENSORS] = {};
    for (int t = 0; t < TENSORS; t++) {
        const layout l = laid[t] = layout_of(p, t);
        if (!p->has[t] || home_of(p, t) != t) continue;
        const bool out = is_output(p, t);
        int64_t elements = l.rows ? (l.rows - 1) * l.stride + l.end : 0;
        if (t == LOGITS && p->on[IN_PLACE] && p->on[ZERO_PADDING]) elements = l.rows * l.stride;
        test_buffer_size(&buffers[t], (size_t)(elements * l.bytes), (size_t)(p->at[t] * l.bytes),
                         run ? (out ? 0xff : 0x7f) : (out ? 0x5a : 0xff));
    }
    fill_targets(p), fill_logits(p);
    if (p->prob) fill_probs(p);
    for (int t = WEIGHT; t <= ROW_WEIGHTS; t++)
        if (p->has[t] && (t <= DLSE || t >= DENTROPY)) fill_floats(p, t);
    if (p->has[BAD_COUNT]) *(int32_t *)test_buffer_host(&buffers[BAD_COUNT]) = 5;
    for (int t = LOSS; t <= Z_LOSS && adds_losses(p); t++)
        if (p->has[t]) test_put_losses(&buffers[t], laid[t].rows, t);
    if (run == 0) examine_all(p);
    if (!gives_loss(p->direction)) fill_saved(p);
    for (int t = 0; t < TENSORS; t++) {
        if (!p->has[t]) continue;
        if (home_of(p, t) == t) test_buffer_upload(&buffers[t]);
        at[t] = test_buffer_device(&buffers[home_of(p, t)]);
    }
    forbid(p, run == 0);
    set_args(p, at);
    size_t bytes = 12345;
    const bool loss = gives_loss(p->direction), reduced = p->on[MEAN] || p->on[SUM];
    if (p->ranks) return setup_ranks(p, run);
    lk_status status = query(header_of(p), p->type, p->direction, &bytes);
    size_t bare_bytes = 54321;
    const lk_cross_entropy_args all = args;
    without_tensors(p->direction);
    const lk_status bare = query(header_of(p), p->type, p->direction, &bare_bytes);
    args = all;
    if (bare != status || bare_bytes != bytes) status = bare ? bare : LK_ERR_VALUE;
    /* The tally, which has the count that comes before the gradients, and 4 bytes a row for each kind of term. What the query
     * says comes of shapes and options, and of which outputs are wanted: not of where tensors lie. */
    const bool total = loss && reduced && (p->has[LOSS] || p->has[Z_LOSS]), tally = p->direction == BOTH && p->on[MEAN];
    const int kinds = total ? 1 + p->on[Z] + (p->has[WEIGHT] || p->has[WEIGHT_SUM]) : 0;
    const size_t sums = (size_t)kinds * ((size_t)p->rows * 4 + 255);
    const bool weights = p->direction == BACKWARD && p->on[WEIGHTS] && p->on[SMOOTHING] && !p->prob; /* their sum */
    const bool good = status == LK_OK && bytes <= (total || tally || weights ? 128 : 0) + sums && (bytes || !weights);
    if (!test_that(good))
        test_detail("the query says %s, %zu bytes; %s", lk_status_string(status), bytes, describe(p));
    if (!good) bytes = 0;
    test_buffer_size(&buffers[WORKSPACE], bytes, bytes ? 128 : 0, run ? 0x5a : 0xff);
    test_buffer_upload(&buffers[WORKSPACE]);
    if (loss || bytes) args.workspace = bytes ? test_buffer_device(&buffers[WORKSPACE]) : NULL, args.workspace_bytes = bytes;
    return good;
}

static lk_status launch(const problem *p)
{
    if (p->ranks) return launch_split(p);
    return call_of[header_of(p)][p->direction][p->type](&args, test.stream);
}

static bool launched(const problem *p, lk_status status) { return test_launched(status, describe(p)); }

static void collect(const problem *p)
{
    for (int t = 0; t <= TENSORS; t++)
        if (t == WORKSPACE || (p->has[t] && home_of(p, t) == t)) test_buffer_download(&buffers[t]);
}

/* ---- Against the reference ------------------------------------------------------------------------------------------- */

/* A limit that is not finite beside a reference that is: the test is wrong. */
static bool near_within(int type, float got, double want, double slack)
{
    return isfinite(want) && !isfinite(slack) ? test_that(false) : test_near(type, got, want, slack);
}

static void near(const problem *p, int t, int64_t row, int64_t c, double want, double slack)
{
    if (!p->has[t]) return;
    const float got = test_get(laid[t].type, test_buffer_back(&buffers[home_of(p, t)]), row * laid[t].stride + c);
    /* What is within slack may overflow f16. */
    const bool reaches = isfinite(slack) && (got > 0 ? want + slack > 65504 : want - slack < -65504);
    if (laid[t].type == TEST_F16 && isinf(got) && isfinite(want) && reaches) return;
    if (!near_within(laid[t].type, got, want, slack))
        test_detail("%s[row %lld, col %lld] is %.9g, want %.9g +- %.3g; %s", tensor_name[t], (long long)row, (long long)c,
                    (double)got, want, slack, describe(p));
}

static void equal(const problem *p, int t, int64_t row, int64_t want)
{
    if (!p->has[t]) return;
    const int64_t got = integer(t, test_buffer_back(&buffers[t]), row);
    if (!test_that(got == want))
        test_detail("%s[%lld] is %lld, want %lld; %s", tensor_name[t], (long long)row, (long long)got, (long long)want,
                    describe(p));
}

/* lse + lse_low of a row misses what the header says of log's and of lse_low's own rounding, beside the sum's error, and that
 * of a sum against a reference that is not the maximum but up to 60 below it, which forward has in 16 bits alone. */
static void near_both(const problem *p, int64_t row, const outcome &o)
{
    const double far = (p->type == TEST_F32 && p->direction == FORWARD ? 0 : 62) * 0x1p-23; /* else: columns without a slot */
    if (!p->has[LSE] || !p->has[LSE_LOW]) return;
    const float lse = ((float *)test_buffer_back(&buffers[LSE]))[row];
    const float low = ((float *)test_buffer_back(&buffers[LSE_LOW]))[row];
    const double error = o.proper && isfinite(lse) ? fabs((double)lse + (double)low - o.lse) : fabs((double)low);
    const double slack = o.proper && isfinite(lse) ? o.log_slack + far + o.z_error + 0x1p-23 + fabs(o.lse) * 0x1p-46 : 0;
    if (!test_within(error, slack))
        test_detail("lse + lse_low [row %lld] is %.9g + %.9g, want %.12g +- %.3g; %s", (long long)row, (double)lse, (double)low,
                    o.lse, slack, describe(p));
}

static double row_weight_of(const problem *p, int64_t row)
{
    return p->has[ROW_WEIGHTS] && outcomes[row].counted ? (double)value(ROW_WEIGHTS, row, 0) : 1;
}

/* A row's terms of the loss, times its weight: one of 0 masks a bad target. */
static outcome weighted(const problem *p, int64_t row)
{
    outcome o = outcomes[row];
    const double w = row_weight_of(p, row), u = p->has[ROW_WEIGHTS] ? 0x1p-24 : 0;
    if (o.bad && p->has[ROW_WEIGHTS] && w == 0) o.class_loss = o.class_slack = 0;
    o.class_loss *= w, o.class_slack = fabs(w) * o.class_slack + 2 * u * fabs(o.class_loss);
    o.z_loss *= w, o.z_slack = fabs(w) * o.z_slack + 2 * u * fabs(o.z_loss);
    return o;
}

static void verify_loss(const problem *p)
{
    const bool mean = p->on[MEAN], reduced = mean || p->on[SUM];
    double loss = 0, z = 0, slack = 0, z_slack = 0;
    for (int64_t row = 0; row < p->rows; row++) {
        const outcome o = weighted(p, row);
        near(p, LSE, row, 0, o.lse, o.lse_slack);
        near_both(p, row, o);
        near(p, ENTROPY, row, 0, o.entropy, o.entropy_slack);
        for (int i = 0; i < 3 && p->on[STATISTICS]; i++)
            near(p, ENTROPY, (i + 1) * p->rows + row, 0, o.statistics[i], o.statistics_slack[i]);
        equal(p, ARGMAX, row, o.argmax);
        if (!reduced) test_near_loss(p, LOSS, row, o.class_loss + o.z_loss, o.class_slack + o.z_slack);
        if (!reduced) test_near_loss(p, Z_LOSS, row, o.z_loss, o.z_slack);
        loss += o.class_loss, slack += o.class_slack + 16 * 0x1p-24 * fabs(o.class_loss);
        z += o.z_loss, z_slack += o.z_slack + 16 * 0x1p-24 * fabs(o.z_loss);
    }
    if (mean && over_of(p) == 0) {
        const double nothing = p->on[ZERO_WHEN_EMPTY] ? 0 : NAN;
        loss = loss != loss ? NAN : nothing, z = z != z ? NAN : nothing, slack = z_slack = 0;
    } else if (mean) {
        const double over = over_of(p), z_over = z_over_of(p);
        loss /= over, slack /= fabs(over);
        z = p->on[Z] ? z / z_over : 0, z_slack = p->on[Z] ? z_slack / fabs(z_over) : 0; /* 0 / NaN else */
    }
    if (reduced) test_near_loss(p, LOSS, 0, loss + z, slack + z_slack), test_near_loss(p, Z_LOSS, 0, z, z_slack);
    equal(p, VALID, 0, valid_rows);
    near(p, WEIGHT_SUM, 0, 0, weight_sum, 16 * 0x1p-24 * weight_sum);
}

/* The gradients of a row's class term and of its z-loss. */
static void upstream_of(const problem *p, int64_t row, double *f, double *h)
{
    *f = *h = (p->has[UPSTREAM] ? (double)value(UPSTREAM, p->on[UPSTREAM_ROWS] ? row : 0, 0) : 1) * row_weight_of(p, row);
    if (p->on[HOST_UPSTREAM]) *f *= (double)p->upstream_value, *h = *f;
    if (!p->on[MEAN]) return;
    if (over_of(p) == 0) *f = *h = 0;
    else *f /= over_of(p), *h /= z_over_of(p);
}

/* exact: backward was given the lse of a forward, whose error counts: with lse_low only the sum's, as in forward_backward. */
static void verify_gradient(const problem *p, bool exact)
{
    const double u = 0x1p-24, e = smoothing_of(p), share = e / (double)p->vocab, a = scale_of(p), softcap = (double)p->softcap;
    for (int64_t row = 0; row < p->rows; row++) {
        const outcome o = outcomes[row];
        for (int64_t c = p->vocab; c < laid[DLOGITS].end; c++) near(p, DLOGITS, row, c, 0, 0);
        double f, h, rest = 0, rest_slack = 0;
        upstream_of(p, row, &f, &h);
        if (!o.counted || o.bad || !o.proper) {
            const bool masked = o.bad && f == 0 && !(p->has[DLSE] && value(DLSE, row, 0) != 0) &&
                                !(p->has[DENTROPY] && value(DENTROPY, row, 0) != 0);
            for (int64_t c = 0; c < p->vocab; c++) {
                const float got = test_get(laid[DLOGITS].type, test_buffer_back(&buffers[home_of(p, DLOGITS)]), row * laid[DLOGITS].stride + c);
                const bool either = masked && !o.proper && p->direction == BOTH && got != got; /* by what its logits are */
                near(p, DLOGITS, row, c, (o.counted && !masked) || either ? NAN : 0, 0);
            }
            continue;
        }
        const bool fused = p->direction == BOTH, both_parts = !fused && p->has[LSE_LOW];
        const double lse = exact || fused || both_parts ? o.lse : (double)(float)o.lse;
        const double lse_lost = o.z_error + (exact || fused ? o.lse_slack : both_parts ? 2 * u * fabs(o.lse) : 0),
                     low_lost = o.z_error + u * fabs(low_of(o.lse)) + (exact ? o.z_error + o.log_slack + 2 * u : 0),
                     lost = fused ? 2 * o.z_error + o.log_slack : both_parts ? low_lost : lse_lost;
        const double class_part = f * (p->prob ? o.total : (1 - e) * o.weight + share * weight_total),
                     dlse = p->has[DLSE] ? (double)value(DLSE, row, 0) : 0, z_part = 2 * z_loss_of(p) * lse * h,
                     own = z_part + dlse, own_size = fabs(z_part) + fabs(dlse), size = fabs(class_part) + own_size;
        const double own_slack = 2 * z_loss_of(p) * fabs(h) * lse_lost;
        const double bend = p->has[DENTROPY] ? -(double)value(DENTROPY, row, 0) : 0,
                     bend_lost = lost + o.z_error + (exact || fused ? o.entropy_slack : u * o.entropy);
        for (int pass = 0; pass < (p->prob ? 1 : 2); pass++) /* the target last: it needs the sum of the others */
            for (int64_t c = pass ? o.y : 0; c < (pass ? o.y + 1 : p->vocab); c++) {
                const double x = (double)value(LOGITS, row, c), z = z_of(p, x);
                const bool apart = fused || (exact && both_parts); /* lse may be max, rounded */
                const double above = apart ? z - o.max - o.log_sum : z - lse;
                const double probability = exp(above),
                             lost_here = probability > 0 ? probability * (2 * u * (4 + fabs(above)) + lost) : 0;
                if (pass == 0 && c == o.y) continue;
                /* What may count as 0. */
                const double flushed = 0x1p-126 + (fabs(o.max) > 0x1p24 && probability < 0x1p-64 ? probability : 0);
                rest += pass ? 0 : probability, rest_slack += pass ? 0 : lost_here + (fabs(o.max) > 0x1p24 ? flushed : 0);
                const double smoothed = share * (pass ? weight_total - o.weight : weight_of(p, c)),
                             fall = f * (p->prob ? prob_of(p, row, c) : smoothed);
                const double whole = lost_here + flushed + 8 * u, parts = rest_slack + 16 * u * rest; /* 1 - p, or the others' sum */
                double rest_lost = probability < 0.5 ? whole : parts;
                if (fabs(probability - 0.5) < 1e-3) rest_lost = whole + parts + fabs(1 - probability - rest);
                else if (pass && probability < 0.5) rest = 1 - probability; /* with a rounded lse these are not the same */
                double want = pass ? own * probability - class_part * rest + fall : (class_part + own) * probability - fall;
                double slack = pass ? own_size * (lost_here + 16 * u * probability) + own_slack * probability +
                                          fabs(class_part) * rest_lost
                                    : size * (lost_here + 16 * u * probability) + own_slack * probability;
                slack += 16 * u * fabs(fall) + (size + fabs(fall)) * flushed;
                const double spread = probability > 0 ? fabs(above) + o.entropy : 0;
                if (probability > 0) want += bend * probability * (above + o.entropy);
                slack += fabs(bend) * (lost_here * spread + probability * (16 * u * spread + bend_lost) + spread * flushed);
                if (p->on[SOFTCAP]) { /* 1 - tanh^2; its relative error grows with its argument's */
                    const double argument = a * x / softcap, root = 1 / cosh(argument), slope = root * root;
                    want *= slope;
                    slack = slack * slope + (slope > 0 ? fabs(want) * (p->type == TEST_F32 ? 12 : 16 + 8 * fabs(argument)) * u : 0) +
                            (pass ? 0 : fabs(want) * code_error(p)) +
                            (size + fabs(fall) + fabs(bend) * spread) * (short_cap(p) ? 0x1p-59 : 0x1p-126);
                }
                const double terms = fabs(bend) * probability * spread + fabs(fall) +
                                     (pass ? own_size * probability + fabs(class_part) * rest : size * probability);
                if (p->within != 0) slack = fmin(slack, p->within * terms);
                near(p, DLOGITS, row, c, a * want, a * slack + 0x1p-126);
            }
    }
}

static void verify(const problem *p)
{
    if (gives_loss(p->direction)) verify_loss(p);
    if (gives_gradient(p->direction)) verify_gradient(p, false);
    equal(p, BAD_COUNT, 0, 5 + bad_targets);
}

/* Keeps the outputs' bits or compares them with those that were kept; then nothing else may have changed. */
static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++)
        if (is_output(p, t))
            test_settle(&buffers[home_of(p, t)], &kept[t], &kept_bytes[t], keep, laid[t].rows, laid[t].end, laid[t].stride,
                        (int)laid[t].bytes, tensor_name[t], what, describe(p));
    test_buffer_accept_all(&buffers[WORKSPACE]);
    for (int t = 0; t <= TENSORS; t++)
        if (t == WORKSPACE || (p->has[t] && home_of(p, t) == t))
            test_buffer_untouched(&buffers[t], tensor_name[t], describe(p));
}

/* ---- Counts of what ran: the names are collected by the first call --------------------------------------------------- */

static const char *did_name[TEST_MOST_OPTIONS];
static int did_direction[TEST_MOST_OPTIONS]; /* DIRECTIONS: any */
static const char *const counted_paths[] = {"fwd auto", "warp", "block", "cluster", "bwd auto", "warp", "block", "cluster",
                                            "both auto", "warp", "block", "cluster"};
static test_counts counts = {counted_paths, did_name, COUNTED, 0, {}, {}};
static long alone[2][COUNTED][SWITCHES], pairs[2][COUNTED][SWITCHES][SWITCHES]; /* with targets; with class probabilities */
static long low_with[2][COUNTED][SWITCHES + 1]; /* lse_low: at all, and with each switch */
enum { PROB_PLACED, PROB_OFF, PROB_WIDE, PROB_OFF_WIDE, PROB_ODD, PROB_ZERO_AT_INF, PROB_KINDS };
static const char *const prob_kind[] = {"as logits lie", "off", "f32", "f32, off", "odd strides", "0 at -inf"};
static long probs_of[COUNTED][TEST_TYPES][PROB_KINDS];
static long unweighted_bad[COUNTED];          /* weight_sum without class weights, of bad targets too */
static long short_rows_with[COUNTED][SWITCHES], short_rows_of[COUNTED][TEST_TYPES][3], short_rows_not_whole[COUNTED];

static bool path_here(int path)
{
    return path != LK_CROSS_ENTROPY_CLUSTER || test_clusters();
}

/* Whether this direction and path can be asked for an option at all. */
static bool possible(int at, int did)
{
    const int which = did_direction[did], direction = at / PATHS;
    return path_here(at % PATHS) &&
           (which == DIRECTIONS || (which == FORWARD ? gives_loss(direction) : gives_gradient(direction)));
}

/* Gradients of short rows of whole vectors have a kernel of their own, and these switches; smoothing without class weights, in
 * forward_backward. */
static bool short_here(int at) { return gives_gradient(at / PATHS) && at % PATHS <= LK_CROSS_ENTROPY_WARP; }
static bool short_switch(int s)
{
    return s != SOFTCAP && s != WANT_ENTROPY && s != WANT_ARGMAX && s != NARROW && s != HAS_DENTROPY &&
           s != STATISTICS;
}

/* Called when the rows are examined. */
static void count_short(const problem *p, int at)
{
    const layout l = laid[LOGITS], d = laid[DLOGITS];
    bool plain_row = short_here(at) && p->rows > 0 && p->vocab * l.bytes <= 8192 && d.end == p->vocab;
    for (int s = 0; s < SWITCHES; s++) plain_row = plain_row && (short_switch(s) || !p->on[s]);
    if (p->on[SMOOTHING] && (p->on[WEIGHTS] || p->direction == BACKWARD)) plain_row = false;
    const bool whole = p->vocab * l.bytes % 16 == 0 && p->at[LOGITS] * l.bytes % 16 == 0 &&
                       p->at[home_of(p, DLOGITS)] * l.bytes % 16 == 0 &&
                       (p->rows < 2 || (l.stride * l.bytes % 16 == 0 && d.stride * l.bytes % 16 == 0));
    short_rows_not_whole[at] += plain_row && !whole;
    const int64_t warps = (p->vocab * l.bytes + 2047) / 2048; /* of a row: 1, 2 or 4 */
    short_rows_of[at][p->type][warps < 3 ? warps - 1 : 2] += plain_row && whole;
    for (int s = 0; s < SWITCHES; s++) short_rows_with[at][s] += plain_row && whole && p->on[s];
}

static void count_probs(const problem *p, int at)
{
    const layout l = laid[LOGITS], q = laid[PROBS];
    long *const of = probs_of[at][p->type];
    const int vec = 16 / l.bytes; /* vectors of both are at the same columns where they are as many elements behind one */
    const bool off = (p->at[LOGITS] - p->at[PROBS]) % (16 / q.bytes) || (p->rows > 1 && (l.stride - q.stride) % (16 / q.bytes));
    if (p->rows == 0 || p->vocab < 2 * vec) return;
    of[q.type == p->type ? (off ? PROB_OFF : PROB_PLACED) : off ? PROB_OFF_WIDE : PROB_WIDE]++;
    of[PROB_ODD] += p->rows > 1 && l.stride % vec;
    for (int64_t row = 0; p->special == MINUS_INF && row < p->rows; row++)
        of[PROB_ZERO_AT_INF] += isfinite(outcomes[row].class_loss);
}

static void count(const problem *p)
{
    if (p->ranks) return;
    const layout l = laid[LOGITS], d = laid[DLOGITS];
    const bool some = p->rows > 0, several = p->rows > 1;
    const int vec = 16 / test_type_bytes[p->type], at = p->direction * PATHS + p->path;
    const bool plain_kernel =
        !p->on[SMOOTHING] && !p->on[SOFTCAP] && !p->on[WANT_ENTROPY] && !p->on[WANT_ARGMAX] && !p->on[STATISTICS];
    const bool alike = p->at[LOGITS] * l.bytes % 16 == p->at[DLOGITS] * d.bytes % 16;
    int switched = 0, i = 0;
    for (int s = 0; s < SWITCHES; s++) switched += p->on[s];
    for (int s = 0; some && s < SWITCHES; s++) {
        alone[p->prob][at][s] += p->on[s] && switched == 1;
        for (int t = s + 1; t < SWITCHES; t++) pairs[p->prob][at][s][t] += p->on[s] && p->on[t];
    }
    low_with[p->prob][at][0] += some && p->has[LSE_LOW] && p->has[LSE];
    for (int s = 0; s < SWITCHES; s++) low_with[p->prob][at][s + 1] += some && p->has[LSE_LOW] && p->has[LSE] && p->on[s];
    if (p->prob) {
        count_probs(p, at);
        return;
    }
    counts.runs[at]++;
    unweighted_bad[at] += p->has[WEIGHT_SUM] && !p->has[WEIGHT] && bad_targets > 0;
    count_short(p, at);
#define DID(which, name, yes)                                                                                                  \
    (did_name[i] = name, did_direction[i] = which, counts.of[at][i] += possible(at, i) && (yes), i++)
    DID(DIRECTIONS, "f32", p->type == TEST_F32), DID(DIRECTIONS, "f16", p->type == TEST_F16);
    DID(DIRECTIONS, "bf16", p->type == TEST_BF16), DID(DIRECTIONS, "0 rows", !some), DID(DIRECTIONS, "1 row", p->rows == 1);
    DID(DIRECTIONS, "many rows", p->rows >= 40), DID(DIRECTIONS, "1 col", p->vocab == 1 && some);
    DID(DIRECTIONS, "long rows", p->vocab > 2000), DID(FORWARD, "plain kernel", plain_kernel && some);
    DID(DIRECTIONS, "ignored rows", valid_rows > 0 && valid_rows < p->rows);
    DID(DIRECTIONS, "all ignored", some && valid_rows == 0);
    DID(DIRECTIONS, "ignored class", p->ignore_index >= 0 && valid_rows < p->rows);
    DID(DIRECTIONS, "bad target seen", bad_targets > 0);
    DID(DIRECTIONS, "class weights all 0", p->has[WEIGHT] && valid_rows && weight_sum == 0);
    DID(DIRECTIONS, "mean over nothing", p->on[MEAN] && over_of(p) == 0 && !p->on[DIVIDED]);
    DID(DIRECTIONS, "denominator 0", p->on[MEAN] && p->on[DIVIDED] && over_of(p) == 0);
    DID(DIRECTIONS, "denominator not finite", p->on[MEAN] && p->on[DIVIDED] && !isfinite(over_of(p)));
    DID(DIRECTIONS, "denominator, no row", p->on[MEAN] && p->on[DIVIDED] && over_of(p) > 0 && valid_rows == 0);
    DID(DIRECTIONS, "smoothing 1", smoothing_of(p) == 1);
    DID(DIRECTIONS, "smoothing with weights", p->on[SMOOTHING] && p->on[WEIGHTS]);
    DID(FORWARD, "loss NULL", !p->has[LOSS]), DID(FORWARD, "lse NULL", !p->has[LSE]);
    DID(FORWARD, "z_loss_out", p->has[Z_LOSS] && p->on[Z]), DID(FORWARD, "bad_targets NULL", !p->has[BAD_COUNT]);
    DID(FORWARD, "counts alone", plain_kernel && !p->has[LOSS] && !p->has[LSE] && !p->has[Z_LOSS]);
    DID(DIRECTIONS, "rows off", p->at[LOGITS] % vec != 0), DID(DIRECTIONS, "target off", p->at[TARGET] % 2 != 0);
    DID(DIRECTIONS, "packed odd rows", several && l.stride == p->vocab && p->vocab % vec);
    DID(DIRECTIONS, "aligned gaps", several && l.stride > p->vocab && l.stride % vec == 0);
    DID(DIRECTIONS, "odd gaps", several && l.stride > p->vocab && l.stride % vec);
    DID(BACKWARD, "dlogits off as logits", some && !p->on[IN_PLACE] && p->at[LOGITS] % vec && alike);
    DID(BACKWARD, "dlogits off otherwise", some && !p->on[IN_PLACE] && !alike);
    DID(BACKWARD, "strides differ", several && !p->on[IN_PLACE] && l.stride != d.stride);
    DID(BACKWARD, "16 bits in place", some && p->on[IN_PLACE] && p->on[NARROW] && p->narrow != TEST_E5M2);
    DID(BACKWARD, "e5m2", some && d.bytes == 1 && l.bytes == 4);
    DID(BACKWARD, "e5m2 of 16 bits", some && d.bytes == 1 && l.bytes == 2);
    DID(BACKWARD, "e5m2 in place", some && p->on[IN_PLACE] && d.bytes == 1);
    DID(BACKWARD, "e5m2 in vectors", d.bytes == 1 && p->vocab >= 2 * vec && (p->at[LOGITS] - p->at[DLOGITS]) % vec == 0);
    DID(BACKWARD, "e5m2 not in vectors", d.bytes == 1 && p->vocab >= 2 * vec && (p->at[LOGITS] - p->at[DLOGITS]) % vec);
    DID(BACKWARD, "padding", some && d.end > p->vocab);
    DID(BACKWARD, "dtype spelt out", p->spelt && !p->on[NARROW]), DID(BACKWARD, "upstream NULL", !p->has[UPSTREAM]);
    DID(DIRECTIONS, "around 1e4", fabs(p->offset) == 1e4 && some), DID(DIRECTIONS, "all alike", p->spread == 0 && some);
    for (int s = 1; s < SPECIALS; s++) DID(s == TOWER ? BACKWARD : DIRECTIONS, special_name[s], p->special == s && some);
    for (int w = 0; w < WHERES; w++) DID(DIRECTIONS, where_name[w], p->special && p->special < PLACED && p->where == w && some);
#undef DID
    static_assert(TEST_MOST_OPTIONS >= 45 + SPECIALS + WHERES, "the list above");
    counts.option_count = i;
}

static void all_counts(void)
{
    test_counts_complete(&counts, possible);
    for (int at = 0; at < COUNTED; at++) {
        for (int i = 0; i < 2 * SWITCHES && path_here(at % PATHS); i++) {
            const int s = i % SWITCHES, prob = i / SWITCHES;
            const char *const of = prob ? ", class probabilities" : "";
            if (!switch_of(at / PATHS, s) || (prob && of_targets(s))) continue;
            if (!test_that(alone[prob][at][s] > 0))
                test_detail("%s never ran \"%s\" alone%s", counted_paths[at], switch_name[s], of);
            for (int t = s + 1; t < SWITCHES; t++)
                if (switch_of(at / PATHS, t) && !(prob && of_targets(t)) && !exclude(s, t) &&
                    !test_that(pairs[prob][at][s][t] > 0))
                    test_detail("%s never ran \"%s\" with \"%s\"%s", counted_paths[at], switch_name[s], switch_name[t], of);
            if (!test_that(low_with[prob][at][0] > 0 && low_with[prob][at][s + 1] > 0))
                test_detail("%s never ran lse_low with \"%s\"%s", counted_paths[at], switch_name[s], of);
        }
        for (int i = 0; i < TEST_TYPES * PROB_KINDS && path_here(at % PATHS); i++) {
            const int type = i / PROB_KINDS, kind = i % PROB_KINDS;
            if (type == TEST_F32 && (kind == PROB_WIDE || kind == PROB_OFF_WIDE)) continue;
            if (!test_that(probs_of[at][type][kind] > 0))
                test_detail("%s %s never ran probabilities: %s", counted_paths[at], test_type_name[type], prob_kind[kind]);
        }
        if (path_here(at % PATHS) && gives_loss(at / PATHS) && !test_that(unweighted_bad[at] > 0))
            test_detail("%s never ran weight_sum with bad targets and no class weights", counted_paths[at]);
        if (!short_here(at)) continue;
        for (int s = 0; s < SWITCHES; s++)
            if (short_switch(s) && switch_of(at / PATHS, s) && !(s == SMOOTHING && at / PATHS == BACKWARD) &&
                !test_that(short_rows_with[at][s] > 0))
                test_detail("%s never ran short rows with \"%s\"", counted_paths[at], switch_name[s]);
        for (int type = 0; type < TEST_TYPES; type++)
            for (int i = 0; i < 3; i++)
                if (!test_that(short_rows_of[at][type][i] > 0))
                    test_detail("%s never ran short rows of %s by %d warps", counted_paths[at], test_type_name[type], 1 << i);
        if (!test_that(short_rows_not_whole[at] > 0))
            test_detail("%s never ran short rows that are not of whole vectors", counted_paths[at]);
    }
}

/* The same in a graph and on a busy device: see test_op. */
static const test_op<problem> op = {describe, setup, launch, collect, verify, settle, count};

static void check(problem *p)
{
#if defined(__SANITIZE_THREAD__) /* libtsan has no room for the 8192 threads that add up the weights of so many columns */
    if (p->vocab > 32768 && p->on[SMOOTHING]) p->on[WEIGHTS] = false;
#endif
    settle_tensors(p), settle_place(p);
    test_twice(op, p);
}

/* ---- Cases: each on every direction, path and type ------------------------------------------------------------------- */

/* Without rows, and with rows but nothing to divide by. Then denominators: 0, what is not finite, and one of no rows. */
static void empty(int type, int direction, int path)
{
    const double denominators[] = {0, INFINITY, NAN, -2.5, 3};
    for (int i = 0; i < 2 * LENGTH_OF(denominators); i++) {
        const bool none = denominators[i / 2] == 3;
        problem p = drawn(type, direction, path, 4, i % 2 ? 72 : 300, 20 + i, i % PLACES);
        p.denominator = denominators[i / 2], p.empty = none ? ALL_IGNORED : SOME;
        p.on[MEAN] = p.on[DIVIDED] = p.has[LOSS] = p.has[Z_LOSS] = true, p.on[BAD] = p.on[BAD] && i % 4 == 0;
        p.on[IGNORE] |= none, p.has[VALID] = p.has[WEIGHT_SUM] = i % 2;
        check(&p);
    }
    for (int seed = 0; seed < test_pick(18, 6); seed++) {
        problem p = drawn(type, direction, path, seed % 3 ? 4 : 0, seed % 2 ? 9 : 300, seed, seed % PLACES);
        p.empty = seed % 3, p.on[MEAN] = seed % 6 < 4, p.on[SUM] = true;
        if (p.empty) p.on[p.empty == ALL_IGNORED ? IGNORE : WEIGHTS] = true;
        if (p.empty == ALL_WEIGHTLESS) p.on[BAD] = p.on[BAD] && seed % 4 == 0; /* a bad target's NaN stays one */
        p.has[LOSS] = p.has[VALID] = p.has[WEIGHT_SUM] = true, p.on[DIVIDED] = false;
        check(&p);
    }
    problem p = plain(type, direction, path, 0, 7); /* tensors without elements may be NULL */
    if (p.ranks) laid[DLOGITS] = layout_of(&p, DLOGITS), make_table(&p);
    args = {};
    args.vocab = 7, args.path = path;
    launched(&p, launch(&p));
}

static void lengths(int type, int direction, int path)
{
    const int64_t vocab[] = {1,   2,   7,   8,   9,    15,   16,   17,   31,   32,   33,   63,   64,    65,   127,  129,
                             255, 256, 257, 511, 1000, 1024, 1025, 2047, 2048, 2049, 4097, 5120, 8191, 8193, 16385};
    for (int i = 0; i < LENGTH_OF(vocab); i++) {
        if (test.small && ((i + type + 2 * path) % 4 || (vocab[i] > 1100 && i % 3))) continue;
        if (!test.small && vocab[i] > 2000 && (i + type + path) % 2) continue;
        for (int seed = 0; seed < (test.small || vocab[i] > 300 ? 1 : 2); seed++) {
            problem p = drawn(type, direction, path, 1 + (i / 2 + type) % 4, vocab[i], seed, (seed + i + path) % 2);
            check(&p);
        }
    }
}

/* Each switch alone, then draws as long as they bring pairs that this path has yet to see. */
static void switches(int type, int direction, int path)
{
    const int64_t vocab[] = {37, 24, test_pick(520, 133)};
    for (int s = 0; s < SWITCHES; s++) {
        if (!switch_of(direction, s) || (with_probs && of_targets(s)) || (with_probs && s == NARROW && type)) continue;
        if (test.small && (s + path) % 3 != type && s != NARROW) continue;
        problem p = plain(type, direction, path, 5, vocab[(s + path) % 3]);
        p.on[s] = true;
        check(&p);
    }
    bool seen[SWITCHES][SWITCHES] = {};
    for (int seed = 0; seed < 300; seed++) {
        problem p = drawn(type, direction, path, 5, vocab[seed % 3], 100 + seed, seed % 2);
        int fresh = 0;
        settle_tensors(&p);
        for (int s = 0; s < SWITCHES; s++)
            for (int t = s + 1; t < SWITCHES; t++) fresh += p.on[s] && p.on[t] && !seen[s][t];
        if (fresh < (test.small ? 4 : 1) && !(fresh && type == TEST_F32)) continue; /* f32 has them all */
        for (int s = 0; s < SWITCHES; s++)
            for (int t = s + 1; t < SWITCHES; t++) seen[s][t] |= p.on[s] && p.on[t];
        check(&p);
    }
}

static void places(int type, int direction, int path)
{
    const int64_t vocab[] = {5, 37, 64, test_pick(1000, 131), test_pick(4091, 300)};
    for (int i = 0; i < LENGTH_OF(vocab); i++)
        for (int place = 0; place < PLACES; place++)
            for (int seed = 0; seed < test_pick(i < 3 ? 3 : 1, 1); seed++) {
                if ((test.small || i > 2) && (i + place + path + type) % 3) continue;
                problem p = drawn(type, direction, path, i < 3 ? 5 : 3, vocab[i], 400 + seed, place);
                if (seed == 1 && i == 3) p.on[IN_PLACE] = false;
                check(&p);
            }
}

/* Many blocks. */
static void many_rows(int type, int direction, int path)
{
#if defined(LK_SIMT)
    const int64_t shapes[][2] = {{test_pick(400, 40), 3}, {1000, 24}, {300, 100}};
#else
    const int64_t shapes[][2] = {{100003, 3}, {100003, 24}, {20001, 600}};
#endif
    for (int i = 0; i < test_pick(LENGTH_OF(shapes), 1); i++) {
        problem p = drawn(type, direction, path, shapes[i][0], shapes[i][1], 500 + i, i + 1);
        const bool mean = i > 0 || direction == BOTH;
        p.on[mean ? MEAN : SUM] = p.has[LOSS] = true;
        if (i == 0) p.on[mean ? SUM : MEAN] = p.on[BAD] = false; /* whose NaN is the loss */
        if (i == 0) p.has[VALID] = p.has[WEIGHT_SUM] = true;
        check(&p);
    }
}

/* Losses reduced over rows that are a part of what a block of few threads loads at once, that and more, many enough for a
 * cluster, for a block of many threads alone, and for several loads of a cluster's; none a multiple of four, the last of all
 * counts. Losses of +inf, of which a thread has several; and NaN. */
static void reduced(int type, int direction, int path)
{
    const int64_t rows[] = {1030, 5003, 33005, 16501, 140003};
    const int special[] = {NOTHING, MINUS_INF, PLUS_INF};
#if defined(__SANITIZE_THREAD__)
    const int shapes = 2; /* libtsan has no room for a cluster's 8192 threads */
#else
    const int shapes = test_pick(LENGTH_OF(rows), 3);
#endif
    for (int i = 0; i < shapes; i++)
        for (int mean = 0; mean < 2; mean++)
            for (int j = 0; j < LENGTH_OF(special); j++) {
                if (test.small && (i == 2 ? j || mean != (type + direction / 2) % 2 || !type : (i + j) % 3 != type)) continue;
                if (i == 4 && (j || mean != type % 2)) continue; /* too long */
                problem p = plain(type, direction, path, rows[i], 3);
                p.on[mean ? MEAN : SUM] = p.on[IGNORE] = p.on[Z] = true;
                p.has[Z_LOSS] = p.has[VALID] = p.has[WEIGHT_SUM] = p.has[BAD_COUNT] = true;
                p.special = special[j], p.where = special[j] == MINUS_INF ? AT_TARGET : FIRST;
                p.on[WEIGHTS] = special[j] != MINUS_INF; /* 0 times +inf is NaN */
                check(&p);
            }
    for (int weights = 0; weights < 2; weights++) { /* the counts alone, by a block that loads several times and by a cluster */
        problem p = plain(type, direction, path, weights ? 33001 : 9001, 3);
        p.on[IGNORE] = p.on[BAD] = p.has[VALID] = p.has[WEIGHT_SUM] = true, p.on[WEIGHTS] = weights;
        p.on[INT32] = type == TEST_F16;
        if (!test.small || type != TEST_BF16) check(&p);
    }
}

/* A mean's count where rows are short: one row, a few, and more than a block of the count takes. The caller asks for the count
 * too, with a reduced loss and without. */
static void counted_first(int type, int direction, int path)
{
    const int vec = 16 / test_type_bytes[type];
    const int64_t rows[] = {1, 7, 64, 65, 4096, 8192, 8193}, vocab[] = {8, 64, 1000, 1024, 200 * vec, 512 * vec};
    for (int i = 0; i < LENGTH_OF(rows); i++)
        for (int j = 0; j < LENGTH_OF(vocab); j++)
            for (int ignored = 0; ignored < 3; ignored++) /* none, some, all */
                for (int labels = 0; labels < 4; labels++) {
                    const bool large = rows[i] > 65 && j > 0;
                    if (j > 3 && (rows[i] > 65 || (labels + ignored + i + j) % 4 != type)) continue;
                    if (large && (test.small || ignored != 1 || (labels + i + j) % 4 != type)) continue; /* too long */
                    if (!large && test.small && (labels + ignored + i + j) % 4 != type) continue;
                    problem p = plain(type, direction, path, rows[i], vocab[j]);
                    p.on[MEAN] = true, p.on[IGNORE] = ignored > 0, p.empty = ignored == 2 ? ALL_IGNORED : SOME;
                    p.on[INT32] = labels / 2, p.on[BAD] = p.has[BAD_COUNT] = labels % 2, p.on[Z] = (i + j) % 2;
                    if (labels == 2 && j == 1) p.ignore_index = ((int64_t)1 << 32) + 3; /* no int32 target */
                    if (labels == 1 && j == 0) p.ignore_index = vocab[j] / 2; /* and a bad int64 target's lower half */
                    p.has[LOSS] = (i + ignored) % 3 > 0, p.has[VALID] = (i + j + ignored) % 2;
                    check(&p);
                }
}

/* With a cliff that every thread sees after its first vector, too. */
static void long_rows(int type, int direction, int path)
{
    const int64_t vocab[] = {test_pick(5001, 4603), 32771, 131072, 151936};
    for (int i = 0; i < test_pick(LENGTH_OF(vocab), 1); i++)
        for (int seed = 0; seed < (i ? 1 : test_pick(4, 2)); seed++) {
            if (i > 1 && (type + path + i) % 3) continue; /* the longest take turns */
            problem p = drawn(type, direction, path, i > 1 ? 1 : 2, vocab[i], 600 + seed, (seed + i) % PLACES);
            if (i > 1) p.on[SOFTCAP] = false; /* the simulator's tanh takes as long as all the rest */
            p.has[LOSS] = p.has[LSE] = true;
            if (i == 1 || seed == 1) {
                p.special = CLIFF, p.where = SPARSE;
                make_plain(&p), p.on[BAD] = false;
                if (p.prob) p.on[WEIGHTS] = false, p.special = i ? CLIFF : 0; /* plain, with class probabilities */
            }
            check(&p);
        }
    /* Forward with options: 12 vectors for each thread of a block, more than its ring has slots. */
    problem p = drawn(type, direction, path, 1, 49157 / test_type_bytes[type], 650, 1);
    if (direction != FORWARD || p.prob) return;
    p.on[SOFTCAP] = p.on[IGNORE] = p.on[BAD] = false, p.has[LOSS] = p.has[LSE] = true;
    p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = p.on[STATISTICS] = true;
    check(&p);
}

static void specials(int type, int direction, int path)
{
    const int64_t vocab[] = {24, test_pick(701, 257), 4099};
    int special = 1;
    problem masked = plain(type, direction, path, 6, 137);
    masked.on[BAD] = masked.on[WEIGHTED] = true, masked.special = MINUS_INF, masked.where = EVEN, masked.seed |= 1;
    check(&masked);
    for (; special < NEIGHBOURS; special++)
        for (int where = 0; where < (special < PLACED ? (int)WHERES : 2); where++)
            for (int i = 0; i < LENGTH_OF(vocab); i++) {
                const int turn = special + where + type + path;
                if (test.small && (i == 2 || i != (special + where) % 2 || turn % 4)) continue;
                if (!test.small && (turn + i) % 2) continue;
                if (i == 2 && where < SPARSE && where != BLOCK) continue;
                problem p = drawn(type, direction, path, i ? 2 : 5, vocab[i], 700 + special * 100 + where, turn % PLACES);
                p.special = special, p.where = where;
                if (special == MINUS_INF && where % 2) p.on[SMOOTHING] = false; /* its loss is +inf whatever else is wrong */
                check(&p);
            }
    for (special = CLIFF; special <= TOWER; special++) {
        problem p = drawn(type, direction, path, special == TOWER ? 8 : 2, 2603, 700, PACKED);
        make_plain(&p);
        for (int s = 0; s < SWITCHES && special == TOWER; s++) p.on[s] = false;
        p.special = special, p.where = LAST_VECTOR; /* which a sum against a value of the first step cannot hold, and can */
        check(&p);
    }
    problem p = drawn(type, direction, path, 3, 1, 700, PACKED); /* a target at +inf, and no others */
    p.special = PLUS_INF, p.where = FIRST, p.on[WANT_ENTROPY] = p.has[LSE] = true;
    p.on[SOFTCAP] = p.on[BAD] = p.on[IGNORE] = false;
    check(&p);
    for (int options = 0; options < 2; options++) { /* and with others whose exponentials are 0: lse is +inf */
        p = plain(type, direction, path, 2, 2603);
        p.special = PLUS_INF, p.where = AT_TARGET, p.offset = -200, p.has[LSE_LOW] = true;
        p.on[SMOOTHING] = p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = p.on[STATISTICS] = options;
        check(&p);
    }
}

/* Short rows that fill warps, some of them unlike the others. */
static void full_warps(int type, int direction, int path)
{
    const int64_t shapes[][2] = {{140, 24}, {70, 100}};
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int seed = 0; seed < test_pick(6, 3); seed++) {
            problem p = drawn(type, direction, path, shapes[i][0], shapes[i][1], 2400 + seed, (i + seed) % PLACES);
            if (seed < 4) make_plain(&p);
            p.on[IGNORE] = p.on[BAD] = seed % 2;
            if (seed == 2) p.special = CLIFF, p.where = LAST_VECTOR;
            check(&p);
        }
}

/* Short rows of whole vectors, 1 to as many as their kernel takes, by a part of a warp, one, two and four: a block's and three
 * more. */
static void short_rows(int type, int direction, int path)
{
    const int vec = 16 / test_type_bytes[type], vecs[] = {1,  2,  3,   4,   5,   8,   9,   15,  16,  17,  33, 64,
                                                          65, 128, 129, 192, 255, 256, 257, 384, 511, 512};
    static const int where[] = {FIRST,      LAST, VECTOR,     LAST_VECTOR, EVEN,          AT_TARGET,
                                BUT_ONE,    ALL,  BUT_TARGET, WARP_OF_2,   WARP_OF_4,     WARP_OF_TARGET};
    for (int i = 0; i < LENGTH_OF(vecs); i++)
        for (int special = 0; special < NEIGHBOURS; special++)
            for (int j = 0; j < (special && special < PLACED ? LENGTH_OF(where) : 4); j++) {
                const bool apart = where[j] >= WARP_OF_4 || where[j] == WARP_OF_2;
                if ((i + special + j + path) % (apart ? test_pick(3, 7) : test_pick(4, 16))) continue;
                if (apart ? vecs[i] <= 128 : vecs[i] > 256 && (special + j) % 3) continue;
                int rows = LK_CROSS_ENTROPY_THREADS;
                for (int lanes = vecs[i]; lanes > LK_CROSS_ENTROPY_SHORT; lanes -= lanes / 2) rows /= 2;
                const int place = (i + j) % 2 ? GAPS : PACKED, seed = 2500 + special * 20 + j;
                problem p = drawn(type, direction, path, j % 3 ? 5 : rows + 3, vecs[i] * vec, seed, place);
                make_plain(&p);
                p.on[NARROW] = false, p.on[ZERO_PADDING] = p.on[ZERO_PADDING] && place == PACKED;
                p.on[SCALE] = j % 4 == 3;
                p.on[SMOOTHING] = !p.on[WEIGHTS] && (i / 4 + special + j) % 2;
                p.at[LOGITS] = 8 * (i % 2), p.at[DLOGITS] = 8 * (j % 2);
                p.special = special, p.where = where[j];
                if (special == NOTHING) p.offset = j ? 1e4 * (j - 2) : 0;
                check(&p);
            }
    /* Of several warps: what all of them have to agree on, with a warp whose share is nothing or far below the others'. */
    const int several[] = {129, 256, 257, 512}, together[] = {IN_PLACE, IGNORE, BAD, MEAN};
    for (int i = 0; i < LENGTH_OF(several); i++)
        for (int s = 0; s < LENGTH_OF(together); s++)
            for (int special = MINUS_INF; special <= CLIFF; special += CLIFF - MINUS_INF) {
                if (test.small && (i + s + special / CLIFF + type + path) % 4) continue;
                problem p = plain(type, direction, path, 9, several[i] * vec);
                p.on[together[s]] = p.has[BAD_COUNT] = true, p.on[IGNORE] |= s == LENGTH_OF(together) - 1;
                p.special = special, p.where = (i + s) % 2 ? WARP_OF_2 : WARP_OF_TARGET;
                p.seed += (uint64_t)s, p.on[SMOOTHING] = (i + s) / 2 % 2;
                check(&p);
            }
    problem p = drawn(type, direction, path, 5, 64, 2700, PACKED); /* logits whose product with log2 e is out of range */
    if (type != TEST_F32 || direction == BACKWARD) return;
    make_plain(&p);
    for (int s = 0; s < SWITCHES; s++) p.on[s] = false;
    p.offset = 3e38, p.spread = 1e37;
    check(&p);
}

/* Around +-1e4: to 1e-5 with smoothing, weights and entropy, gradients without a saved lse too. */
static void offsets(int type, int direction, int path)
{
    for (int seed = 0; seed < test_pick(9, 2); seed++) {
        problem p = drawn(type, direction, path, 4, seed % 2 ? 300 : 65, 1600 + seed, seed % PLACES);
        p.offset = seed % 3 ? 1e4 : -1e4;
        p.on[SOFTCAP] = p.on[Z] = false; /* one flattens the logits, the other adds 1e8 */
        p.on[SMOOTHING] = p.on[WEIGHTS] = p.on[WANT_ENTROPY] = seed % 4 < 3;
        if (seed % 2) p.on[MEAN] = p.on[SUM] = false, p.on[BAD] = false;
        if (seed % 4 == 1) p.spread = 0;
        if (direction == BOTH) p.within = 1e-5;
        p.on[ACCUMULATE] = false; /* a sum with what is there before is rounded once more */
        check(&p);
        if (!gives_loss(direction) || p.on[MEAN] || p.on[SUM]) continue;
        for (int64_t row = 0; row < p.rows && !bad_targets; row++) {
            const double loss = weighted(&p, row).class_loss, entropy = outcomes[row].entropy;
            if (p.has[LOSS] && !test_within(fabs((double)((float *)kept[LOSS])[row] - loss), 1e-5 * fabs(loss)))
                test_detail("loss[%lld] is not within 1e-5 of %.9g; %s", (long long)row, loss, describe(&p));
            if (p.has[ENTROPY] && !test_within(fabs((double)((float *)kept[ENTROPY])[row] - entropy), 1e-5 * fabs(entropy)))
                test_detail("entropy[%lld] is not within 1e-5 of %.9g; %s", (long long)row, entropy, describe(&p));
        }
    }
}

/* Logits of which rate v is beyond what 2^x is exact for: next to each other they are further apart than a float's range, and
 * several are the largest. Backward without lse_low gets scales that are powers of two, under which lse is scale max without
 * rounding. */
static void huge_logits(int type, int direction, int path)
{
    typedef struct {
        double offset;
        float scale;
    } magnitude;
    static const magnitude floats[] = {{1.3e9, 1},     {1.3e10, 1},     {1.7e20, 1},  {3e38, 1},
                                       {1.3, 0x1p33f}, {2.5e10, 0.7f}, {3e38, 0.3f}},
                           halves[] = {{6e4, 0x1p14f}, {6e4, 0x1p15f}, {1.3, 0x1p33f},  {6e4, 3e4f},
                                       {2e-3, 1e14f},  {6e4, 1e33f},   {300, 0x1p24f}};
    static const int with[] = {MEAN, WEIGHTS, IGNORE, IN_PLACE, SMOOTHING, NARROW, SUM};
    const int vec = 16 / test_type_bytes[type];
    const int64_t vocab[] = {37, 9 * vec, 128 * vec, 200 * vec, 512 * vec, 5001};
    for (int i = 0; i < LENGTH_OF(vocab); i++)
        for (int k = 0; k < LENGTH_OF(floats); k++)
            for (int sign = -1; sign <= 1; sign += 2) {
                const int turn = i + 2 * k + sign + type + path;
                const magnitude m = type == TEST_F16 ? halves[k] : floats[k];
                const bool late = path == LK_CROSS_ENTROPY_WARP && vocab[i] == 512 * vec && m.offset > 1e38 && m.scale == 1;
                const bool few = (turn + k) % 5 == 0 && (sign > 0) == (i + k) % 2;
                const bool some = test.small ? few : vocab[i] < 2000 || turn % 2 == 0;
                if (!some && !late) continue; /* late: larger ones behind others whose sums of differences are out of range */
                problem p = plain(type, direction, path, 4, vocab[i]);
                p.special = NEIGHBOURS, p.offset = sign * m.offset;
                p.has[LSE_LOW] = (turn + sign) % 3 != 0; /* backward is then given what lse alone misses at other scales */
                p.scale = direction == BACKWARD && !p.has[LSE_LOW] ? (float)exp2(floor(log2((double)m.scale))) : m.scale;
                p.on[SCALE] = m.scale != 1;
                if (turn % 3) p.on[with[(turn + i + LENGTH_OF(with)) % LENGTH_OF(with)]] = true; /* turn may be -1 */
                p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = p.on[STATISTICS] = p.on[SMOOTHING];
                if (m.offset > 1e38) p.on[SMOOTHING] = false; /* the sum of differences is out of range */
                check(&p);
            }
    /* Around the largest products with log2 e whose rounding 2^x can correct. The largest comes last: the sum is against a
     * smaller one. Only of f32 do neighbours differ by less than a float's range there. */
    for (int i = test_pick(0, 50); type == TEST_F32 && i < test_pick(160, 90); i++) {
        const float scale[] = {1, 0.7f, 1.4f};
        problem p = plain(type, direction, path, 3, vocab[(i + path) % test_pick(4, 2)]);
        p.special = NEIGHBOURS, p.where = LAST, p.offset = (i % 2 ? 1 : -1) * exp2(28 + 0.02 * i);
        p.on[SCALE] = i % 3, p.scale = scale[i % 3], p.has[LSE_LOW] = true, p.on[with[i % LENGTH_OF(with)]] = true;
        check(&p);
    }
}

/* The ends of what logit_scale, softcap and their quotient may be: finite logits have finite results. */
static void scale_ends(int type, int direction, int path)
{
    static const float ends[][2] = {{0x1p127f, 0}, {0x1p-126f, 0}, {1, 0x1p100f}, {1, 0x1p-100f}, {0x1p120f, 0x1p20f},
                                    {0x1p-60f, 0x1p40f}, {0x1p-100f, 0x1p-50f}, {0x1p-100f, 1}, {0x1p120f, 0}, {1, 0x1p-100f}, {0x1p-40f, 1}};
    static const double spread[] = {0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0x1p-119, 0, 0x1p36}; /* 0: all logits are 0 */
    static const int with[] = {MEAN, WEIGHTS, IGNORE, IN_PLACE, UPSTREAM_ROWS, SUM};
    const int64_t vocab[] = {16, 37, 600};
    for (int i = 0; i < LENGTH_OF(ends); i++)
        for (int j = 0; j < LENGTH_OF(vocab); j++) {
            if (test.small && (i + j + type + path) % 3) continue;
            problem p = plain(type, direction, path, 4, vocab[j]);
            p.on[SCALE] = true, p.scale = ends[i][0], p.on[SOFTCAP] = ends[i][1] > 0, p.softcap = ends[i][1];
            p.on[with[(i + j) % LENGTH_OF(with)]] = true, p.spread = i == 10 && type == TEST_F16 ? 1 : spread[i];
            if (i == 10 && type != TEST_F16) p.offset = 0x1p39; /* one sign of all errors */
            p.has[LSE_LOW] = (i + j) % 2, p.on[STATISTICS] = (i + j) % 3 > 0;
            check(&p);
        }
    for (int i = 0; gives_gradient(direction) && i < 2; i++) { /* every z is almost -softcap, and dz is large all the same */
        problem p = plain(type, direction, path, 3, i ? 333 : 64);
        p.on[SOFTCAP] = true, p.softcap = 30, p.offset = -200, p.spread = 1, p.on[HOST_UPSTREAM] = true, p.upstream_value = 0x1p60f;
        check(&p);
    }
}

/* In place, at lengths of one step and of several: what a step writes has been read. Then the padding of a single row, in place
 * and not, which a stride tells that has no other use. */
static void in_place(int type, int direction, int path)
{
    const int64_t vocab[] = {9, 300, 2051, 20011};
    for (int i = 0; gives_gradient(direction) && i < test_pick(LENGTH_OF(vocab), 3); i++)
        for (int narrow = 0; narrow <= TEST_E5M2; narrow++) {
            if (type && narrow && narrow != TEST_E5M2) continue;
            if (test.small && i == 2 && (narrow + path) % 2) continue;
            problem p = drawn(type, direction, path, i < 2 ? 5 : 2, vocab[i], 1800 + narrow, (narrow + i + path) % PLACES);
            if (i > 1) p.on[IGNORE] = p.on[BAD] = false;
            p.on[IN_PLACE] = true, p.on[NARROW] = narrow, p.narrow = narrow;
            check(&p);
        }
    for (int i = 0; i < 6; i++) {
        problem p = plain(type, direction, path, 1, 21);
        p.logits_stride = 40, p.dlogits_stride = 35, p.seed = 2 * p.seed + (uint64_t)(i % 3 == 2); /* in place odd: 0 */
        p.on[ZERO_PADDING] = true, p.on[IN_PLACE] = i % 3 > 0, p.on[NARROW] = i > 2;
        if (i > 3) p.logits_stride = 60, p.at[LOGITS] = 1; /* more single elements of 16 bits than 8, and zeros as far as they lie */
        check(&p);
    }
}

/* dlogits in e5m2 over its range: the largest numbers, by a logit_scale under which z stay small, and subnormal ones. Then
 * neighbouring columns by single elements and by vectors: which elements a store may write. */
static void narrow(int type, int direction, int path)
{
    const float scale[] = {1e6f, 3e4f, 0x1p-9f, 0x1p-16f};
    for (int i = 0; gives_gradient(direction) && !with_probs && i < LENGTH_OF(scale); i++)
        for (int place = 0; place < PLACES; place++) {
            if (test.small && (i + place + type + path) % 2) continue;
            problem p = plain(type, direction, path, 3, 40 + 9 * i + place);
            uint64_t random = p.seed;
            draw_place(&p, &random, place);
            p.on[NARROW] = p.on[SCALE] = true, p.narrow = TEST_E5M2, p.scale = scale[i];
            p.spread = fmin(4, 4 / (double)scale[i]), p.on[IN_PLACE] = (i + place) % 4 == 0, p.on[ZERO_PADDING] = place % 2;
            check(&p);
        }
}

/* Rows of which a block's shared memory holds a half at most: gradients read the rest again where it is used. */
static void held_in_part(int type, int direction, int path)
{
    const bool cluster = path == LK_CROSS_ENTROPY_CLUSTER;
    const int64_t vocab = (400 << 10) / test_type_bytes[type] * (cluster ? 8 : 1) + 3 * path;
    for (int i = 0; i < 6; i++) { /* 4: a capped row; 5: one with smoothing alone */
        const int turn = (type + direction + path) % 4;
        if (i == 5 ? direction != BOTH || (cluster && type != 1) :
            i == 4 ? !type || cluster || (test.small && (type + direction + path) % 2) :
            cluster ? i != type + (direction == BOTH) : test.small ? i != turn : type && (i + type) % 2) continue;
        problem p = drawn(type, direction, path, cluster ? 1 : 2, vocab, 2300 + i, (i + type) % PLACES);
        p.on[IGNORE] = p.on[BAD] = false, p.has[LOSS] = p.has[LSE] = true, p.on[SOFTCAP] = i == 4, p.softcap = 30;
        p.on[SMOOTHING] = p.on[WEIGHTS] = p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = p.on[STATISTICS] = i == 1;
        if (i == 5) make_plain(&p), p.on[SMOOTHING] = true, p.on[WEIGHTS] = p.on[NARROW] = false;
        if (i == 4) p.on[HAS_DENTROPY] = false;
        if (i < 2 || i == 4) p.special = CONFIDENT; /* wherever the target is, it must not be among the others */
        if (i == 2) p.special = CLIFF, p.where = SPARSE, p.on[SCALE] = false;
        if (i == 3) p.on[IN_PLACE] = p.on[NARROW] = true;
        check(&p);
    }
}

/* forward_backward with smoothing has a kernel of its own where rows have no softcap, class weights, entropy and argmax: with
 * its target among single elements, in a slot and in none, and beside each of the other switches. */
static void smoothed(int type, int direction, int path)
{
    static const int with[] = {SMOOTHING, MEAN, SUM, Z, SCALE, IGNORE, BAD, IN_PLACE, NARROW, HAS_DLSE, UPSTREAM_ROWS, ZERO_PADDING,
                               WEIGHTED, HOST_UPSTREAM, INT32};
    const int64_t vocab[] = {1, 9, 23, 300, 2051, 20011};
    for (int i = 0; direction == BOTH && i < LENGTH_OF(vocab); i++)
        for (int j = 0; j < LENGTH_OF(with); j++) {
            const int turn = i + j + type + path;
            if (test.small ? i == 5 || turn % 4 : i == 5 && turn % 3) continue;
            problem p = plain(type, direction, path, i < 3 ? 70 : i < 5 ? 9 : 2, vocab[i]);
            p.seed = test_hash(p.seed + (uint64_t)j);
            uint64_t random = p.seed;
            draw_place(&p, &random, turn % PLACES);
            p.on[SMOOTHING] = p.on[with[j]] = p.has[LOSS] = true;
            p.has[LSE] = p.has[LSE_LOW] = j % 2, p.has[Z_LOSS] = j % 3 == 0;
            if (turn % 2) p.special = CLIFF, p.where = turn % 4 == 1 ? FIRST : LAST_VECTOR;
            check(&p);
        }
    for (int special = MINUS_INF; direction == BOTH && special <= NOT_A_NUMBER; special++) /* the loss is none */
        for (int where = 0; where < WHERES; where++) {
            problem p = plain(type, direction, path, 3, where % 2 ? 137 : 24);
            p.on[SMOOTHING] = p.has[LOSS] = p.has[LSE] = true, p.special = special, p.where = where;
            check(&p);
        }
    static const float ends[] = {0x1p-126f, 0x1p-60f, 0x1p60f, 0x1p120f};
    for (int i = 0; direction == BOTH && i < 2 * LENGTH_OF(ends); i++) {
        problem p = plain(type, direction, path, 4, i % 2 ? 37 : 600);
        p.on[SMOOTHING] = p.on[SCALE] = p.has[LOSS] = true, p.scale = ends[i / 2], p.spread = 0.2;
        check(&p);
    }
}

static void graphs(int type, int direction, int path)
{
    problem p = drawn(type, direction, path, 5, test_pick(700, 140), 1900, PACKED);
    p.on[MEAN] = p.has[LOSS] = true;
    check(&p); /* leaves its bits in kept */
    test_graph(op, &p);
}

/* With columns split over ranks: the i-th time. */
static void of_ranks(int i, int type, int direction, int path)
{
    empty(type, direction, path);
    if (i != 3) places(type, direction, path);
    if (i != 2) lengths(type, direction, path);
    if (i % 2) switches(type, direction, path);
    if (i) specials(type, direction, path);
    if (i == 2) offsets(type, direction, path);
    if (i != 1 && gives_gradient(direction)) in_place(type, direction, path);
    if (i == 1) graphs(type, direction, path), narrow(type, direction, path);
}

typedef struct {
    const char *name;
    void (*run)(int type, int direction, int path);
    bool probs; /* with class probabilities too */
} theme;

static void all_themes(void)
{
    static const theme themes[] = {{"empty", empty, true},      {"lengths", lengths, true},     {"switches", switches, true},
                                   {"places", places, true},    {"many rows", many_rows, true}, {"long rows", long_rows, true},
                                   {"special values", specials, true}, {"around 1e4", offsets, true},
                                   {"in place", in_place, true}, {"e5m2", narrow, false}, {"rows held in part", held_in_part, false},
                                   {"smoothing alone", smoothed, false},
                                   {"full warps", full_warps, false}, {"reduced", reduced, false},
                                   {"short rows", short_rows, false}, {"counted first", counted_first, false},
                                   {"huge logits", huge_logits, true}, {"the ends of scales", scale_ends, true},
                                   {"graph", graphs, true}, {"split over ranks", test_split<of_ranks>, false}};
    for (int at = 0; at < COUNTED; at++) {
        const int direction = at / PATHS, path = at % PATHS;
        if (!path_here(path)) {
            test_skip("cluster", "the device has no clusters");
            continue;
        }
        for (int type = 0; type < TEST_TYPES; type++)
            for (int k = 0; k < 2 * LENGTH_OF(themes); k++) {
                const int i = k % LENGTH_OF(themes);
                with_probs = k >= LENGTH_OF(themes);
                if (with_probs && !themes[i].probs) continue;
                const bool of_gradients = themes[i].run == in_place || themes[i].run == narrow;
                if (of_gradients && !gives_gradient(direction)) continue;
                if (themes[i].run == smoothed && direction != BOTH) continue;
                if (themes[i].run == full_warps && path > LK_CROSS_ENTROPY_WARP) continue;
                if (themes[i].run == short_rows && !short_here(at)) continue;
                if (themes[i].run == counted_first && (direction != BOTH || path > LK_CROSS_ENTROPY_WARP)) continue;
                if (themes[i].run == reduced && (!gives_loss(direction) || path != LK_CROSS_ENTROPY_AUTO)) continue;
                if (themes[i].run == held_in_part && (!gives_gradient(direction) || path == LK_CROSS_ENTROPY_AUTO)) continue;
                if (themes[i].run == held_in_part && path == LK_CROSS_ENTROPY_CLUSTER && test.small) continue; /* too long */
                if (!test_begin("%s %s %s%s: %s", direction_name[direction], test_type_name[type], path_name[path],
                                with_probs ? ", probabilities" : "", themes[i].name))
                    continue;
                themes[i].run(type, direction, path);
                test_finish();
            }
    }
    with_probs = false;
}

/* Without the switch fewer rows than two per SM get clusters, and rows with options have more slots where they are many. */
static void invariant(int type)
{
    static test_buffer x, y, out[6];
    static const int64_t lengths[] = {40, 1000, 8192, 16384, 30000};
    enum { KINDS = 5 };
    for (int i = 0; i < KINDS * LENGTH_OF(lengths); i++) {
        if (test.small && i % 3 != type) continue;
        const int kind = i % KINDS;
        const int64_t vocab = lengths[i / KINDS], rows = (vocab > 8192 ? 3 : 17) * test.sms;
        char what[99];
        args = {};
        args.logits = test_invariant_input(&x, type, rows * vocab, 1), args.rows = rows, args.vocab = vocab;
        test_buffer_size(&y, (size_t)rows * 8, 0, 0);
        for (int64_t row = 0; row < rows; row++) ((int64_t *)test_buffer_host(&y))[row] = row * 7919 % vocab;
        test_buffer_upload(&y);
        args.target = test_buffer_device(&y), args.batch_invariant = 1 + i % 2, args.z_loss = kind ? 0.01f : 0;
        args.softcap = kind == 1 ? 20.0f : 0, args.label_smoothing = kind == 2 ? 0.1f : 0;
        test_rows tensors[8] = {{(void **)&args.logits, (size_t)vocab * (size_t)test_type_bytes[type], NULL},
                                {(void **)&args.target, 8, NULL}};
        void **const field[] = {(void **)&args.loss,    (void **)&args.lse,    (void **)&args.lse_low,
                                (void **)&args.z_loss_out, (void **)&args.entropy, (void **)&args.argmax};
        const int outputs = kind < 3 ? 4 : 2 + kind + (kind == 4); /* 3: entropy; 4: argmax too */
        for (int k = 0; k < outputs && k < 6; k++) {
            const size_t bytes = k == 5 ? 8 : 4;
            test_buffer_size(&out[k], (size_t)rows * bytes, 0, 0x5a);
            *field[k] = test_buffer_device(&out[k]), tensors[2 + k] = {field[k], bytes, &out[k]};
        }
        snprintf(what, sizeof what, "%s, kind %d, %lld columns", test_type_name[type], kind, (long long)vocab);
        test_invariant(tensors, 2 + (outputs < 6 ? outputs : 6), &args.rows, 1, what,
                       [&] { return call_of[LABELS][FORWARD][type](&args, test.stream); });
    }
}

/* ---- Forward, then backward from its results; differences ------------------------------------------------------------ */

/* Runs both without a wait between: with programmatic launch the second may start early, and must still see the first's lse and
 * counts. Half of them from one struct, as a training step has it. The gradients are checked against the exact lse. */
static void sequence(problem p)
{
    p.direction = BACKWARD;
    settle_tensors(&p), settle_place(&p);
    problem f = p;
    f.direction = FORWARD, f.on[WANT_ENTROPY] = p.on[HAS_DENTROPY];
    f.has[LOSS] = f.has[VALID] = f.has[WEIGHT_SUM] = true, f.has[BAD_COUNT] = false; /* lse_low too */
    p.has[VALID] = p.has[WEIGHT_SUM] = true;
    settle_tensors(&f);
    setup(&f, 0);
    lk_cross_entropy_args first = args;
    collect(&f);  /* which lets go of the buffers that both have */
    setup(&p, 0); /* its lse and counts are about to be overwritten */
    lk_cross_entropy_args second = args;
    const bool needed = p.on[WEIGHTS] && p.on[SMOOTHING]; /* by backward: the sum of the weights */
    const size_t most = needed && second.workspace_bytes > first.workspace_bytes ? second.workspace_bytes : first.workspace_bytes;
    test_buffer_size(&buffers[WORKSPACE], most, most ? 128 : 0, 0x5a);
    test_buffer_upload(&buffers[WORKSPACE]);
    first.workspace = most ? test_buffer_device(&buffers[WORKSPACE]) : NULL, first.workspace_bytes = most;
    if (needed) second.workspace = first.workspace, second.workspace_bytes = most;
    if (p.seed % 4 > 1 && !p.has[BAD_COUNT]) {
        second.loss = first.loss, second.z_loss_out = first.z_loss_out, second.zero_when_empty = first.zero_when_empty;
        second.entropy = first.entropy, second.argmax = first.argmax, second.accumulate_loss = first.accumulate_loss;
        second.workspace = first.workspace, second.workspace_bytes = first.workspace_bytes;
        args = second;
    } else {
        args = first;
    }
    test_buffer_guard(&buffers[WORKSPACE], false); /* forward's, of which backward's setup has left nothing */
    const lk_status status = launch(&f);
    args = second;
    const bool ran = launched(&p, status ? status : launch(&p));
    collect(&f), collect(&p);
    if (!ran) return;
    verify_loss(&f), verify_gradient(&p, true);
}

static void sequences(int type)
{
    for (int k = 0; k < 2 * test_pick(24, 4); k++) {
        const int seed = k / 2;
        problem p = drawn(type, BACKWARD, seed % PATHS, 7, seed % 2 ? 700 : 77, 2000 + seed, seed % PLACES);
        p.prob = k % 2;
        if (!path_here(p.path)) continue;
        if (seed % 4 == 1) p.offset = 1e4, p.on[SOFTCAP] = p.on[Z] = false;
        p.on[IN_PLACE] = false; /* forward's buffers are filled again */
        sequence(p);
    }
}

/* Backward from forward's lse and lse_low against forward_backward, which has no lse between: their p differ by the errors of
 * two sums and of two exponentials, whatever z is. D is that, relative to a gradient's terms. */
static void as_good(int path)
{
    static const int with[] = {MEAN, SOFTCAP, Z, WEIGHTS, HAS_DLSE, SMOOTHING, SCALE, UPSTREAM_ONE, WEIGHTED};
    const int64_t vocab[] = {64, 700, test_pick(32000, 2603)};
    for (int s = 0; s <= LENGTH_OF(with) + 1; s++)
        for (int i = 0; i < LENGTH_OF(vocab); i++)
            for (int offset = 0; offset < 2; offset++) {
                if (test.small && (s + i + offset + path) % 3) continue;
                problem p = plain(TEST_F32, BACKWARD, path, 4, vocab[i]);
                for (int t = 0; t < LENGTH_OF(with); t++) p.on[with[t]] = s == t || s > LENGTH_OF(with);
                p.offset = offset ? 1e4 : 0, p.has[LSE_LOW] = true, p.scale = 0.7f;
                if (offset) p.softcap = 1e4f; /* z around 7600, where lse alone loses 2.4e-4 */
                else p.softcap = 30, p.spread = 40;
                sequence(p);
                const float *const got = (float *)test_buffer_back(&buffers[DLOGITS]);
                float *const back = (float *)malloc(sizeof(float) * (size_t)(p.rows * p.vocab));
                memcpy(back, got, sizeof(float) * (size_t)(p.rows * p.vocab));
                p.direction = BOTH;
                settle_tensors(&p), setup(&p, 0);
                const bool ran = launched(&p, launch(&p));
                collect(&p);
                for (int64_t row = 0; ran && row < p.rows; row++) {
                    const double u = 0x1p-24, e = smoothing_of(&p), share = e / (double)p.vocab, k = z_loss_of(&p);
                    const outcome o = examine(&p, row);
                    double f, h, rest = 0;
                    upstream_of(&p, row, &f, &h);
                    const double class_part = fabs(f) * ((1 - e) * o.weight + share * weight_total),
                                 own = fabs(2 * k * o.lse * h) + (p.has[DLSE] ? fabs((double)value(DLSE, row, 0)) : 0);
                    for (int64_t c = 0; c < p.vocab; c++) rest += c == o.y ? 0 : exp(row_z[c] - o.max - o.log_sum);
                    for (int64_t c = 0; c < p.vocab; c++) {
                        const double above = row_z[c] - o.max - o.log_sum, probability = exp(above), hit = c == o.y;
                        const double fall = fabs(f) * share * (hit ? weight_total - o.weight : weight_of(&p, c));
                        const double terms = fall + (hit ? own * probability + class_part * rest
                                                         : (own + class_part) * probability);
                        const double argument = scale_of(&p) * (double)value(LOGITS, row, c) / (double)p.softcap;
                        const double slope = scale_of(&p) * (p.on[SOFTCAP] ? 1 / (cosh(argument) * cosh(argument)) : 1);
                        const double D = 2 * o.log_slack + u * (64 + 4 * fabs(above) + (hit ? 4 * o.entropy : 0));
                        const double first = (double)back[row * p.vocab + c], second = (double)got[row * p.vocab + c];
                        if (!test_within(fabs(first - second), D * terms * slope * (1 + 1e-4) + 0x1p-125))
                            test_detail("dlogits[row %lld, col %lld] is %.9g from lse and lse_low, %.9g from the sum; %s",
                                        (long long)row, (long long)c, first, second, describe(&p));
                    }
                }
                free(back);
            }
}

/* dlogits at the target where p is 1 - 1e-6, from forward's lse and in the same pass: right to 1e-5, and half an ulp. */
static void confident(int type, int direction)
{
    for (int path = 0; path < PATHS; path++)
        for (int i = 0; i < test_pick(3, 1); i++) {
            problem p = plain(type, direction, path, 3, i == 1 ? 40 : i ? 9001 : 1000);
            if (!path_here(path)) continue;
            p.special = CONFIDENT, p.spread = 1, p.on[SCALE] = i == 1, p.on[MEAN] = i == 2, p.on[WEIGHTS] = i == 1;
            if (direction == BACKWARD) {
                sequence(p);
            } else {
                settle_tensors(&p), setup(&p, 0);
                launched(&p, launch(&p));
                collect(&p);
            }
            for (int64_t row = 0; row < p.rows; row++) {
                const outcome o = examine(&p, row);
                double rest = 0;
                for (int64_t c = 0; c < p.vocab; c++) rest += c == o.y ? 0 : exp(row_z[c] - o.lse);
                const double want = -rest * o.weight * scale_of(&p) / (p.on[MEAN] ? 3 : 1);
                if (!test_that(rest > 5e-7 && rest < 2e-6)) test_detail("1 - p is %g; %s", rest, describe(&p));
                near(&p, DLOGITS, row, o.y, want, 1e-5 * fabs(want));
            }
        }
}

/* f32: a target far above all other logits, in the last column, is the whole sum, so its loss is 0. A sum against the 0 that the
 * columns before it have would be off by the rounding of rate z. */
static void far_above(void)
{
    for (int path = 0; path < PATHS; path++) {
        problem p = plain(TEST_F32, FORWARD, path, 8, 2052);
        if (!path_here(path)) continue;
        settle_tensors(&p);
        if (!setup(&p, 0)) return;
        for (int64_t row = 0; row < p.rows; row++) {
            for (int64_t c = 0; c < p.vocab; c++)
                test_put(p.type, test_buffer_host(&buffers[LOGITS]), row * laid[LOGITS].stride + c,
                         c == p.vocab - 1 ? (float)(40.3 + 2.7 * (double)row) : 0.0f);
            ((int64_t *)test_buffer_host(&buffers[TARGET]))[row] = p.vocab - 1;
        }
        test_buffer_upload(&buffers[LOGITS]), test_buffer_upload(&buffers[TARGET]);
        if (!launched(&p, launch(&p))) return;
        collect(&p);
        for (int64_t row = 0; row < p.rows; row++)
            if (!test_within(fabs(((float *)test_buffer_back(&buffers[LOSS]))[row]), 0x1p-22))
                test_detail("loss [row %lld]; %s", (long long)row, describe(&p));
    }
}

/* With smoothing the loss of a row with one column at the lowest float is finite, and mostly that column's. The rows are long or
 * short, of a part of a warp, one and several. */
static void masked_by_the_lowest(void)
{
    static const int64_t vocab[] = {2052, 2048, 512, 40};
    for (int i = 0; i < 2 * PATHS * LENGTH_OF(vocab); i++) {
        const int path = i / 2 % PATHS;
        problem p = plain(TEST_F32, i % 2 ? BOTH : FORWARD, path, 8, vocab[i / (2 * PATHS)]);
        if (!path_here(path)) continue;
        p.on[SMOOTHING] = true, p.smoothing = 0.1f;
        settle_tensors(&p);
        if (!setup(&p, 0)) return;
        for (int64_t row = 0; row < p.rows; row++) {
            const int64_t masked = row * (p.vocab / 8);
            test_put(p.type, test_buffer_host(&buffers[LOGITS]), row * laid[LOGITS].stride + masked, -FLT_MAX);
            ((int64_t *)test_buffer_host(&buffers[TARGET]))[row] = masked + 1;
        }
        test_buffer_upload(&buffers[LOGITS]), test_buffer_upload(&buffers[TARGET]);
        if (!launched(&p, launch(&p))) return;
        collect(&p);
        const double want = 0.1 / (double)p.vocab * (double)FLT_MAX;
        for (int64_t row = 0; row < p.rows; row++) {
            const double loss = (double)((float *)test_buffer_back(&buffers[LOSS]))[row];
            if (!test_within(fabs(loss - want), 1e-5 * want))
                test_detail("loss [row %lld] is %.9g, not %.9g; %s", (long long)row, loss, want, describe(&p));
        }
    }
}

/* What the gradients are those of, by the formula of the loss. */
static double objective(const problem *p, int64_t row)
{
    double f, h;
    const outcome o = examine(p, row);
    upstream_of(p, row, &f, &h);
    const double bent = p->has[DENTROPY] ? (double)value(DENTROPY, row, 0) * o.entropy : 0;
    return f * o.class_loss + h * o.z_loss + (p->has[DLSE] ? (double)value(DLSE, row, 0) * o.lse : 0) + bent;
}

/* dlogits against central differences, whose own error is about 1e-9 with this step. */
static void differences(int direction)
{
    for (int k = 0; k < 8; k++) {
        const int variant = k / 2;
        problem p = plain(TEST_F32, direction, variant, 2, 7);
        if (!path_here(variant)) continue;
        p.prob = k % 2;
        p.on[SMOOTHING] = p.on[Z] = p.on[SCALE] = p.on[UPSTREAM_ROWS] = p.on[HAS_DLSE] = true;
        p.on[WEIGHTS] = variant != 1, p.on[SOFTCAP] = variant != 2, p.on[MEAN] = variant != 3;
        p.on[HAS_DENTROPY] = p.on[WEIGHTED] = true;
        check(&p);
        const double step = 1e-5, limit = 1e-7 + 64 * 0x1p-24; /* float results of up to about 4 in size */
        for (int64_t i = 0; i < p.rows * p.vocab; i++) {
            const int64_t row = i / p.vocab;
            nudged = i % p.vocab, nudge = step;
            double quotient = objective(&p, row);
            nudge = -step, quotient -= objective(&p, row), quotient /= 2 * step, nudged = -1;
            const double got = (double)((const float *)kept[DLOGITS])[i];
            if (!test_within(fabs(got - quotient), limit))
                test_detail("dlogits[%lld] is %.9g, the quotient %.9g; %s", (long long)i, got, quotient, describe(&p));
        }
    }
}

/* ---- The device types lk_ce_row and lk_ce_row_squares ---------------------------------------------------------------------------------------- */

enum { STATES = 5, SLICES = 40 };
typedef struct {
    const float *values, *weights;
    int vocab, y;
    lk_ce_options options;
    lk_ce_row_squares *states; /* [SLICES + 1][STATES] */
    lk_ce_result *results;     /* likewise */
    lk_ce_statistics *statistics;
} state_plan;

/* Columns begin to end - 1, four at a time where there are four. */
LK_DEVICE lk_ce_row_squares state_of(const state_plan &p, int begin, int end)
{
    lk_ce_row_squares s = lk_ce_row_empty<lk_ce_row_squares>();
    int c = begin;
    for (; c + 4 <= end; c += 4) {
        float v[4], w[4];
        for (int i = 0; i < 4; i++) v[i] = p.values[c + i], w[i] = p.weights[c + i];
        s = lk_ce_row_add(s, v, w, p.options.scale);
    }
    for (; c < end; c++) {
        const float v[1] = {p.values[c]}, w[1] = {p.weights[c]};
        s = lk_ce_row_add(s, v, w, p.options.scale);
    }
    for (c = end - 1; c >= begin; c--) s = lk_ce_row_top(s, p.values[c], c);
    if (p.y >= begin && p.y < end) s.target = p.values[p.y];
    return s;
}

/* Thread t has the slices [0, t) and [t, vocab). */
LK_KERNEL void state_kernel(state_plan p)
{
    const int cut = (int)threadIdx.x;
    if (cut > p.vocab) return;
    const float scale = p.options.scale;
    const lk_ce_row_squares left = state_of(p, 0, cut), right = state_of(p, cut, p.vocab);
    const lk_ce_row_squares nothing = lk_ce_row_merge(state_of(p, 0, 0), state_of(p, 0, 0), scale);
    const lk_ce_row_squares right_first = lk_ce_row_merge(right, left, scale), padded = lk_ce_row_merge(right, nothing, scale);
    const lk_ce_row_squares among = lk_ce_row_merge(nothing, lk_ce_row_merge(left, padded, scale), scale);
    const lk_ce_row_squares s[STATES] = {lk_ce_row_merge(left, right, scale), right_first, among, state_of(p, 0, p.vocab), nothing};
    for (int i = 0; i < STATES; i++) {
        p.states[cut * STATES + i] = s[i];
        p.results[cut * STATES + i] = lk_ce_row_finish(s[i], p.options);
        p.statistics[cut * STATES + i] = lk_ce_row_statistics(s[i], p.options);
    }
}

static const char *const statistic_name[] = {"log_sum_sq_probs", "mean_logits", "top_logprob"};

static void near_state(double got, double want, double slack, const problem *p, int cut, int state, const char *what)
{
    if (!near_within(TEST_F32, (float)got, want, slack))
        test_detail("%s of state %d, cut at %d, is %.9g, want %.9g +- %.3g; %s", what, state, cut, got, want, slack,
                    describe(p));
}

static void states(int special)
{
    static test_buffer out[3];
    static const size_t bytes[] = {sizeof(lk_ce_row_squares), sizeof(lk_ce_result), sizeof(lk_ce_statistics)};
    for (int seed = 0; seed < 2 * WHERES; seed++) {
        problem p = plain(TEST_F32, FORWARD, LK_CROSS_ENTROPY_AUTO, 1, seed % 3 ? SLICES : 13);
        p.seed += (uint64_t)seed, p.special = special, p.where = seed % WHERES, p.scale = seed % 2 ? 0.7f : 2;
        p.offset = special == NEIGHBOURS ? 1.3e10 : seed % 5 == 3 ? 1e4 : 0;
        p.on[SMOOTHING] = seed % 3 != 1, p.on[WEIGHTS] = p.on[Z] = p.on[SCALE] = true;
        settle_tensors(&p), setup(&p, 0);
        const outcome o = outcomes[0];
        for (int i = 0; i < 3; i++) {
            test_buffer_size(&out[i], (SLICES + 1) * STATES * bytes[i], 0, 0x5a);
            test_buffer_upload(&out[i]);
        }
        const state_plan plan = {(const float *)test_buffer_device(&buffers[LOGITS]),
                                 (const float *)test_buffer_device(&buffers[WEIGHT]), (int)p.vocab, (int)o.y,
                                 {p.scale, (float)smoothing_of(&p), p.z_loss, (float)o.weight, p.vocab},
                                 (lk_ce_row_squares *)test_buffer_device(&out[0]),
                                 (lk_ce_result *)test_buffer_device(&out[1]), (lk_ce_statistics *)test_buffer_device(&out[2])};
        TEST_CUDA(lk_launch(state_kernel, 1, 64, 0, test.stream, plan));
        TEST_CUDA(cudaStreamSynchronize(test.stream));
        for (int i = 0; i < 3; i++) test_buffer_download(&out[i]);
        collect(&p);
        for (int cut = 0; cut <= p.vocab; cut++) {
            const lk_ce_row_squares *const s = (lk_ce_row_squares *)test_buffer_back(&out[0]) + cut * STATES;
            const lk_ce_result *const r = (lk_ce_result *)test_buffer_back(&out[1]) + cut * STATES;
            const lk_ce_statistics *const more = (lk_ce_statistics *)test_buffer_back(&out[2]) + cut * STATES;
            for (int i = 0; i < STATES - 1; i++) {
                const bool same = s[i].max == s[3].max && s[i].top == s[3].top && r[i].argmax == o.argmax &&
                                  (s[i].target == s[3].target || s[3].target != s[3].target);
                if (!test_that(same))
                    test_detail("max %g, target %g, argmax %lld of state %d, cut at %d; %s", (double)s[i].max,
                                (double)s[i].target, (long long)r[i].argmax, i, cut, describe(&p));
                near_state((double)r[i].lse, o.lse, o.lse_slack, &p, cut, i, "lse");
                near_state((double)r[i].class_loss, o.class_loss, o.class_slack, &p, cut, i, "class_loss");
                near_state((double)r[i].z_loss, o.z_loss, o.z_slack, &p, cut, i, "z_loss");
                near_state((double)r[i].entropy, o.entropy, o.entropy_slack, &p, cut, i, "entropy");
                near_state((double)s[i].weights, weight_total, 16 * 0x1p-24 * weight_total, &p, cut, i, "weights");
                const float got[] = {more[i].log_sum_sq_probs, more[i].mean_logits, more[i].top_logprob};
                for (int k = 0; k < 3; k++)
                    near_state((double)got[k], o.statistics[k], o.statistics_slack[k], &p, cut, i, statistic_name[k]);
            }
            const lk_ce_row_squares none = s[4];
            if (!test_that(none.max == -INFINITY && none.sum == 0 && none.weights == 0 && none.weighted == 0 &&
                           none.entropic == 0 && none.squares == 0 && none.total == 0 && r[4].lse == -INFINITY && r[4].argmax == -1))
                test_detail("two empties: max %g sum %g lse %g", (double)none.max, (double)none.sum, (double)r[4].lse);
        }
    }
}

/* ---- The functions that every element or row goes through, by themselves --------------------------------------------- */

enum { TANH, CAP, CAP_OF_PAIR, FACTOR, UNIT, UNIT_OF_SUM, FUNCTIONS };
static const char *const function_name[FUNCTIONS] = {"lk_ce_tanh", "lk_ce_cap", "lk_ce_cap of a pair", "lk_ce_factor", "lk_ce_p_scale",
                                                    "lk_ce_p_scale_of_sum"};
enum { POINTS = 1 << 16 };
typedef struct {
    const float (*in)[3];
    float (*out)[3];
    int function;
} function_plan;

LK_KERNEL void function_kernel(function_plan p)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const float *x = p.in[i];
    float y[3] = {0.0f, 0.0f, 0.0f};
    if (p.function == TANH) y[0] = lk_ce_tanh(x[0], &y[1]);
    if (p.function == CAP) y[0] = lk_ce_cap(x[0], x[2], 30.0f, &y[1]);
    if (p.function == CAP_OF_PAIR) { /* whose other logit may be anything but NaN */
        float z[2] = {x[0], x[1]}, slope[2];
        lk_ce_cap<false>(z, slope, x[2], 30.0f);
        y[0] = z[0], y[1] = slope[0];
    }
    if (p.function == FACTOR) y[0] = lk_ce_factor<true>(x[0], x[1]);
    if (p.function == UNIT) y[0] = lk_ce_p_scale(x[0], x[1], x[2], &y[1], &y[2]);
    if (p.function == UNIT_OF_SUM) {
        y[1] = lk_ce_rate(x[2] * LK_LOG2E, x[0]);
        y[0] = lk_ce_p_scale_of_sum({x[0], x[1]}, __fdividef(1.0f, x[1]), y[1], &y[2]);
    }
    for (int k = 0; k < 3; k++) p.out[i][k] = y[k];
}

/* Arguments: every binade of a range, both signs, dense where polynomials and exponentials meet. */
static void draw_arguments(int function, int i, uint64_t *r, float *x)
{
    static const float special[] = {0,           -0.0f,  INFINITY, -INFINITY, NAN, 0x1p-149f,
                                    -0x1p-126f, 3.4e38f, -3.4e38f, 0.4f,      88,  104, 0.6f};
    const double a = test_uniform(r), b = test_uniform(r), c = test_uniform(r);
    if (function <= CAP_OF_PAIR) {
        x[0] = (float)(i % 2 ? copysign(exp2(-26 + 33 * fabs(a)), b) : copysign(0.2 + 0.45 * fabs(a), b));
        if (i < LENGTH_OF(special)) x[0] = special[i];
        if (function != TANH) x[0] *= 30, x[1] = (float)copysign(exp2(-20 + 147 * fabs(c)), b), x[2] = i % 3 ? 1 : 0.3f;
        if (function != TANH && i % 64 == 1) x[1] = i % 128 == 1 ? INFINITY : -INFINITY;
    } else if (function == FACTOR) { /* powers of -124 to 80 */
        x[0] = (float)exp2(8 * b), x[1] = (float)((a < 0 ? 85 : 55) * a / (double)x[0]);
    } else if (function == UNIT) {
        const double lse = copysign(exp2(1 + 14 * fabs(a)), b);
        x[0] = (float)lse, x[1] = (float)low_of(lse), x[2] = (float)exp2(4 * c);
    } else {
        x[0] = (float)copysign(exp2(15 * fabs(a)), b), x[1] = (float)exp2(90 * c), x[2] = i % 2 ? 1 : (float)exp2(3 * b);
    }
}

/* Limits in u = 2^-24, relative: lk_ex2 has 2.9, __fdividef 4, an operation 1.
 *   tanh         below 0.4 the polynomial's misfit 0.1, its roundings 0.3 and the last 1: 1.4. Above, e = exp(-2 |u|) has
 *                (4 |u| + 4), of which slope / (2 tanh) remain; the quotient 7
 *   slope        e's, twice the quotient's 5 and three operations: 17 + 4 |u|; 0 below 2^-126
 *   cap          below 0.6 the polynomial's misfit 0.1, its roundings 0.4, those of logit_scale x and of the last addition: 2.5.
 *                Above, q = e / (1 + e) has e's 4 by 1 / (1 + e), 3 of 1 + e, its inverse and the product; the last addition 1.
 *                At most 6.2. Its slope: e's 4, twice 2 of 1 + e and the inverse, two products; 0 below 2^-126
 *   of a pair    softcap 16: 1 - 2 r, where r has two roundings, rcp's 2, a product's 1, and e's 3 by a quarter. Its slope: e's
 *                argument has 6, so e 3 + 12 |u|, twice r's 5, three operations; 2^-60 where e^2u ends
 *   factor       ex2's, and one operation
 *   unit         2^(base - rate v) e^(scale v - lse - lse_low) for any v, here base / rate: ex2's and two operations
 *   unit of sum  2^(base - rate max) / sum: ex2's, the quotient's and two operations */
static void functions(int function)
{
    static test_buffer in, out;
    const double u = 0x1p-24, ex2 = 2.9;
    test_buffer_size(&in, POINTS * sizeof(float[3]), 0, 0), test_buffer_size(&out, POINTS * sizeof(float[3]), 0, 0x5a);
    float(*const x)[3] = (float(*)[3])test_buffer_host(&in);
    uint64_t random = 77 + (uint64_t)function;
    for (int i = 0; i < POINTS; i++) draw_arguments(function, i, &random, x[i]);
    test_buffer_upload(&in), test_buffer_upload(&out);
    const function_plan plan = {(const float(*)[3])test_buffer_device(&in), (float(*)[3])test_buffer_device(&out), function};
    TEST_CUDA(lk_launch(function_kernel, POINTS / 256, 256, 0, test.stream, plan));
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    test_buffer_download(&in), test_buffer_download(&out);
    const float(*const y)[3] = (const float(*)[3])test_buffer_back(&out);
    for (int i = 0; i < POINTS; i++) {
        const double a = (double)x[i][0], b = (double)x[i][1], c = (double)x[i][2];
        double want[2] = {0, 0}, limit[2] = {0, 0}, got[2] = {(double)y[i][0], (double)y[i][1]};
        if (function == TANH) {
            const double t = tanh(a), root = 1 / cosh(a), size = fabs(a);
            want[0] = t, want[1] = root * root;
            const double above = size < 400 ? want[1] * (2 * size + 2) + 7 * fabs(t) : 7;
            limit[0] = (size < 0.4 ? 1.4 * fabs(t) : above) * u + 0x1p-126;
            limit[1] = (size < 400 ? (17 + 4 * size) * want[1] * u : 0) + 0x1p-124;
        } else if (function == CAP) {
            const double v = a * c / 30, t = tanh(v), root = 1 / cosh(v), size = fabs(v), e = exp(-2 * size), q = e / (1 + e);
            want[0] = 30 * t, want[1] = root * root;
            limit[0] = (size < 0.6 ? 2.5 * fabs(30 * t) : 60 * q * (4 / (1 + e) + 3) + fabs(30 * t)) * u + 0x1p-126;
            limit[1] = (size < 400 ? 11 * want[1] * u : 0) + 0x1p-124;
        } else if (function == CAP_OF_PAIR) {
            const double v = a * c / 30, t = tanh(v), root = 1 / cosh(v), size = fabs(v);
            want[0] = 30 * t, want[1] = root * root;
            limit[0] = 30 * 16 * u, limit[1] = (size < 400 ? (16 + 12 * size) * want[1] * u : 0) + 0x1p-59;
        } else if (function == FACTOR) {
            want[0] = exp(a * b), limit[0] = (ex2 + 1) * want[0] * u;
        } else {
            const double rate = got[1], base = (double)y[i][2];
            want[0] = function == UNIT ? exp(c * (base / rate) - a - b) : exp2(base - rate * a) / b;
            limit[0] = (ex2 + (function == UNIT ? 2 : 6)) * want[0] * u;
            if (function == UNIT_OF_SUM && !test_that(want[0] > 0.49 && want[0] < 1.01)) test_detail("unit is %g", want[0]);
            got[1] = 0;
        }
        for (int k = 0; k < 2; k++) {
            const bool nan = want[k] != want[k];
            if (nan ? !test_that(got[k] != got[k]) : !test_within(fabs(got[k] - want[k]), limit[k]))
                test_detail("output %d for %.9g, %.9g, %.9g is %.9g, want %.9g +- %.3g (%.3g u)", k, a, b, c, got[k], want[k],
                            limit[k], (got[k] - want[k]) / (want[k] * u));
        }
    }
}

/* The class terms of few rows: up to what one block loads at once, whole groups of four and what is left of one. */
static void few_terms(int type, int direction)
{
    const int64_t rows[] = {0, 1, 2, 3, 4, 5, 127, 1024, 2050, 3075, 4095, 4096, 4097, 5000, 7171, 8191, 8192};
    for (int i = 0; i < LENGTH_OF(rows); i++)
        for (int k = 0; k < 6; k++) {
            if (test.small && (i + k) % 3) continue;
            problem p = plain(type, direction, LK_CROSS_ENTROPY_AUTO, rows[i], 3);
            p.on[k % 2 ? SUM : MEAN] = true, p.on[IGNORE] = k > 1, p.empty = k > 3 ? ALL_IGNORED : SOME;
            p.on[ZERO_WHEN_EMPTY] = i % 2, p.has[Z_LOSS] = k > 1, p.has[VALID] = k != 2, p.has[WEIGHT_SUM] = false;
            check(&p);
            if (p.on[SUM] && (p.empty || p.rows == 0) && !test_that(!signbit(((float *)kept[LOSS])[0])))
                test_detail("the sum over nothing is -0; %s", describe(&p));
        }
}

static void all_sequences(void)
{
    for (int direction = FORWARD; direction <= BOTH; direction += BOTH - FORWARD)
        if (test_begin("%s f32: the terms of few rows", direction_name[direction]))
            few_terms(TEST_F32, direction), test_finish();
    for (int special = 0; special < SPECIALS; special++)
        if (test_begin("lk_ce_row: two slices, %s", special_name[special])) states(special), test_finish();
    for (int function = 0; function < FUNCTIONS; function++)
        if (test_begin("%s", function_name[function])) functions(function), test_finish();
    for (int path = 0; path < PATHS; path++)
        if (path_here(path) && test_begin("lse_low, %s: backward as forward_backward", path_name[path]))
            as_good(path), test_finish();
    for (int type = 0; type < TEST_TYPES; type++) {
        if (test_begin("forward, then backward %s", test_type_name[type])) sequences(type), test_finish();
        for (int direction = BACKWARD; direction <= BOTH; direction++) {
            if (!test_begin("%s %s: the target's gradient", direction_name[direction], test_type_name[type])) continue;
            confident(type, direction);
            test_finish();
        }
    }
    test_of_types("batch_invariant", invariant);
    if (test_begin("forward f32: a target far above")) far_above(), test_finish();
    if (test_begin("forward, forward_backward f32: masked by the lowest float")) masked_by_the_lowest(), test_finish();
    for (int direction = BACKWARD; direction <= BOTH; direction++)
        if (test_begin("%s f32: central differences", direction_name[direction])) differences(direction), test_finish();
}

/* ---- Errors ---------------------------------------------------------------------------------------------------------- */

/* The calls that errors are told from: every tensor given, 4 rows of 8, a mean. */
static void good_calls(int type)
{
    void *at[TENSORS];
    problem p = plain(type, FORWARD, LK_CROSS_ENTROPY_AUTO, 4, 8);
    p.on[MEAN] = p.on[Z] = true;
    for (int t = 0; t < TENSORS; t++) {
        test_buffer_size(&buffers[t], 512, 0, 0x3c), test_buffer_upload(&buffers[t]);
        at[t] = test_buffer_device(&buffers[t]);
    }
    p.seed = 0; /* nothing wild: each case is wrong in one way */
    set_args(&p, at);
    args.dentropy = args.denominator = NULL; /* with which less or more is required */
    size_t first = 0, second = 0, third = 1;
    if (!test_that(query(LABELS, type, FORWARD, &first) == LK_OK && first == 128 + 3 * 256 &&
                   query(LABELS, type, BOTH, &second) == LK_OK && second == first &&
                   query(LABELS, type, BACKWARD, &third) == LK_OK && third == 0))
        test_detail("the queries of 4 rows say %zu, %zu and %zu bytes, %s", first, second, third, lk_last_error());
    test_buffer_size(&buffers[WORKSPACE], first + 256, 0, 0x3c); /* room to move it */
    test_buffer_upload(&buffers[WORKSPACE]);
    args.workspace = test_buffer_device(&buffers[WORKSPACE]), args.workspace_bytes = first;
}

/* The direction's args as they now are must fail with `want` and name `field`; the query too, whatever the workspace. */
static void expect_error(int header, int type, int direction, lk_status want, const char *field)
{
    problem p = plain(type, direction, LK_CROSS_ENTROPY_AUTO, 4, 8);
    p.prob = header == PROBABILITIES;
    const lk_status status = launch(&p);
    char name[40];
    snprintf(name, sizeof name, "%s%s", header == PROBABILITIES ? "probabilities_" : "", direction_name[direction]);
    const char *const said = test_expect(status, want, field, "lk_cross_entropy", name, type);
    size_t asked = TEST_NOT_ASKED;
    const lk_status answer = query(header, type, direction, &asked);
    /* Queries ask no device, so that they do not mind if its code has no clusters; nor do they look at tensors. */
    const bool tensors = want == LK_ERR_WORKSPACE || want == LK_ERR_ALIGNMENT || want == LK_ERR_NULL ||
                         (want == LK_ERR_SHAPE && (strstr(said, "dlogits is logits") || strstr(said, " and "))) ||
                         strstr(said, "must be NULL");
    const bool fits = tensors || (strstr(said, "sm_90") && args.rows <= (int64_t)1 << 27);
    const bool later = want == LK_ERR_NULL && answer == LK_ERR_SHAPE; /* of two rules broken at once */
    test_expect_query(answer, later ? answer : fits ? LK_OK : want, asked, field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = 0; t <= TENSORS; t++) test_expect_unwritten(status, &buffers[t], tensor_name[t], field);
}

#define BAD_CALL(status, field, ...) (good_calls(type), __VA_ARGS__, expect_error(LABELS, type, direction, status, field))

/* The fields that every direction has. */
#define NO_OUTPUT                                                                                                              \
    a.loss = a.z_loss_out = a.lse = a.lse_low = a.entropy = a.weight_sum = NULL,                                               \
    a.argmax = a.valid_rows = NULL, a.bad_targets = NULL

/* More rows than the paths take that give each its blocks, in tensors that overlap nowhere for certain. */
static void many_rows(int direction, int path)
{
    lk_cross_entropy_args &a = args;
    float *const lse = a.lse;
    NO_OUTPUT, a.reduction = LK_REDUCTION_NONE, a.dlse = a.upstream = NULL;
    if (gives_gradient(direction)) a.lse = direction == BACKWARD ? lse : NULL;
    else a.weight_sum = (float *)(uintptr_t)256;
    a.logits_stride = a.dlogits_stride = 9, a.rows = ((int64_t)1 << 27) + 1, a.path = path;
}

/* The logits as class probabilities: two inputs may be the same. */
#define PROB_CALL(status, field, ...) (good_calls(type), a.target = NULL, a.target_prob = a.logits, __VA_ARGS__,               \
                                       expect_error(PROBABILITIES, type, direction, status, field))

static void prob_errors(int type, int direction)
{
    lk_cross_entropy_args &a = args;
    PROB_CALL(LK_OK, "class probabilities", a.path = 0);
    if (direction == BACKWARD) PROB_CALL(LK_OK, "no counts", a.valid_rows = NULL, a.weight_sum = NULL);
    PROB_CALL(LK_ERR_NULL, "target_prob is NULL", a.target_prob = NULL);
    if (direction == FORWARD) PROB_CALL(LK_ERR_VALUE, "statistics are not for target_prob", a.statistics = 1);
    PROB_CALL(LK_ERR_VALUE, "batch_invariant is given", a.batch_invariant = 1);
    PROB_CALL(LK_ERR_VALUE, "target_prob is given, so target must be NULL", a.target = a.logits);
    PROB_CALL(LK_ERR_SHAPE, "target_prob_stride", a.target_prob_stride = 7);
    PROB_CALL(LK_ERR_SHAPE, "target_prob_stride", a.target_prob_stride = -8);
    PROB_CALL(LK_ERR_SHAPE, "2^62", a.target_prob_stride = (int64_t)1 << 62);
    PROB_CALL(LK_OK, "a stride of one row is not looked at", (a.target_prob_stride = INT64_MAX, a.rows = 1));
    for (int dtype = -1; dtype < 6; dtype++) {
        const bool good = dtype == LK_DTYPE_T || dtype == LK_DTYPE_F32 || dtype == type + 1;
        if (good && dtype == LK_DTYPE_F32 && type) continue; /* twice as many bytes as there are */
        PROB_CALL(good ? LK_OK : LK_ERR_VALUE, "target_prob_dtype", a.target_prob_dtype = dtype);
    }
    PROB_CALL(LK_ERR_ALIGNMENT, "target_prob", MOVED(a.target_prob, 1));
    PROB_CALL(LK_OK, "a target of any dtype", a.target_dtype = LK_TARGET_INT32);
    if (gives_loss(direction)) PROB_CALL(LK_ERR_SHAPE, "loss and target_prob overlap", a.target_prob = a.loss);
    if (!gives_gradient(direction)) return;
    PROB_CALL(LK_ERR_VALUE, "dlogits_dtype is e5m2, which is not for target_prob", a.dlogits_dtype = LK_DTYPE_E5M2);
    PROB_CALL(LK_ERR_SHAPE, "overlap", a.dlogits = (void *)a.target_prob, a.logits = a.class_weight);
}

static void common_errors(int type, int direction)
{
    lk_cross_entropy_args &a = args;
    char other[96]; /* the function that has this field */
    snprintf(other, sizeof other, "lk_cross_entropy_probabilities_%s, which is in cross_entropy_probabilities.cuh",
             direction_name[direction]);
    BAD_CALL(LK_ERR_VALUE, other, a.target_prob = a.logits);
    BAD_CALL(LK_ERR_VALUE, other, a.target_prob = a.logits, a.target = NULL);
    BAD_CALL(LK_OK, "nothing", a.path = 0);
    BAD_CALL(LK_ERR_NULL, "logits", a.logits = NULL);
    BAD_CALL(LK_ERR_NULL, "target", a.target = NULL);
    prob_errors(type, direction);
    BAD_CALL(LK_ERR_SHAPE, "rows", a.rows = -1);
    BAD_CALL(LK_ERR_SHAPE, "rows", (a.rows = -1, a.z_loss = -1));
    const int64_t sizes[] = {0, -8, ((int64_t)1 << 30) + 1, INT64_MIN};
    for (int i = 0; i < LENGTH_OF(sizes); i++) BAD_CALL(LK_ERR_SHAPE, "vocab", a.vocab = sizes[i]);
    BAD_CALL(LK_ERR_SHAPE, "vocab", (a.rows = 0, a.vocab = 0));
    BAD_CALL(LK_ERR_SHAPE, "logits_stride", a.logits_stride = 7);
    BAD_CALL(LK_ERR_SHAPE, "logits_stride", a.logits_stride = -8);
    BAD_CALL(LK_ERR_SHAPE, "2^62", a.logits_stride = (int64_t)1 << 62);
    BAD_CALL(LK_ERR_SHAPE, "2^62", a.rows = INT64_MAX);
    BAD_CALL(LK_OK, "a stride of one row is not looked at", (a.logits_stride = INT64_MAX, a.rows = 1));
    BAD_CALL(LK_OK, "nor one below vocab", (a.logits_stride = 7, a.rows = 1));
    BAD_CALL(LK_ERR_SHAPE, "logits_stride", (a.logits_stride = -7, a.rows = 1));
    float *const options[] = {&a.logit_scale, &a.softcap, &a.z_loss, &a.label_smoothing};
    const char *const names[] = {"logit_scale", "softcap", "z_loss", "label_smoothing"};
    for (int i = 0; i < LENGTH_OF(options); i++) {
        BAD_CALL(LK_ERR_VALUE, names[i], *options[i] = -1e-9f);
        BAD_CALL(LK_ERR_VALUE, names[i], *options[i] = INFINITY);
        BAD_CALL(LK_ERR_VALUE, names[i], *options[i] = NAN);
        BAD_CALL(i < 3 ? LK_OK : LK_ERR_VALUE, names[i], *options[i] = 1.0001f);
    }
    BAD_CALL(LK_OK, "smoothing of 1", a.label_smoothing = 1);
    BAD_CALL(LK_ERR_VALUE, "ignore_index is -100, but use_ignore_index is 0", a.ignore_index = -100);
    BAD_CALL(LK_ERR_VALUE, "ignore_index is 5", (a.ignore_index = 5, a.reduction = 3));
    BAD_CALL(LK_OK, "both are set", (a.ignore_index = -100, a.use_ignore_index = 1));
    BAD_CALL(LK_OK, "class 0 may be ignored", (a.ignore_index = 0, a.use_ignore_index = 1));
    typedef struct {
        float scale, cap;
        const char *field; /* NULL: right */
    } scales;
    static const scales both_scales[] = {
        {0x1p127f, 0, NULL},          {0x1.000002p127f, 0, "logit_scale"}, {0x1p-149f, 0, NULL},
        {0, 0x1p100f, NULL},          {0, 0x1.000002p100f, ": softcap"},   {0, 0x1p-100f, NULL},
        {0, 0x1.fffffep-101f, ": softcap"}, {0, 2.9e-39f, ": softcap"},    {0, 3e38f, ": softcap"},
        {0x1p120f, 0x1p101f, ": softcap"}, {0x1p-120f, 0x1p-101f, ": softcap"},
        {0x1p120f, 0x1p20f, NULL},    {0x1p120f, 0x1p19f, "over softcap"}, {0x1p-60f, 0x1p40f, NULL},
        {0x1p-60f, 0x1p41f, "over softcap"}, {0x1p-149f, 1, "over softcap"}, {0x1p127f, 0x1p-100f, "over softcap"}};
    for (int i = 0; i < LENGTH_OF(both_scales); i++) {
        const scales each = both_scales[i];
        BAD_CALL(each.field ? LK_ERR_VALUE : LK_OK, each.field ? each.field : "scales",
                 (a.logit_scale = each.scale, a.softcap = each.cap));
    }
    int *const enums[] = {&a.reduction, &a.target_dtype, &a.path};
    const char *const enum_names[] = {"reduction", "target_dtype", "path"};
    const int most[] = {LK_REDUCTION_SUM, LK_TARGET_INT32, LK_CROSS_ENTROPY_CLUSTER};
    for (int i = 0; i < LENGTH_OF(enums); i++) {
        BAD_CALL(LK_ERR_VALUE, enum_names[i], *enums[i] = -1);
        BAD_CALL(LK_ERR_VALUE, enum_names[i], *enums[i] = most[i] + 1);
    }
    for (int path = LK_CROSS_ENTROPY_BLOCK; path <= LK_CROSS_ENTROPY_CLUSTER; path++) {
        BAD_CALL(LK_ERR_PATH, "path", many_rows(direction, path));
        BAD_CALL(LK_ERR_PATH, "path", (many_rows(direction, path), MOVED(a.logits, 1)));
    }
    if (!test_clusters()) BAD_CALL(LK_ERR_PATH, "path", a.path = LK_CROSS_ENTROPY_CLUSTER);
    BAD_CALL(LK_ERR_ALIGNMENT, "logits", MOVED(a.logits, 1));
    BAD_CALL(LK_ERR_ALIGNMENT, "target", MOVED(a.target, 4));
    BAD_CALL(LK_ERR_ALIGNMENT, "target", (MOVED(a.target, 2), a.target_dtype = LK_TARGET_INT32));
    BAD_CALL(LK_OK, "a target of 4 bytes", (MOVED(a.target, 4), a.target_dtype = LK_TARGET_INT32));
    BAD_CALL(LK_ERR_ALIGNMENT, "class_weight", MOVED(a.class_weight, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "row_weight", MOVED(a.row_weight, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "denominator", (a.denominator = a.class_weight, MOVED(a.denominator, 2)));
    BAD_CALL(LK_OK, "a denominator of no mean",
             (a.denominator = a.class_weight, MOVED(a.denominator, 2), a.reduction = LK_REDUCTION_SUM));
    BAD_CALL(LK_ERR_ALIGNMENT, "lse", MOVED(a.lse, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "lse_low", MOVED(a.lse_low, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "valid_rows", MOVED(a.valid_rows, 4));
    BAD_CALL(LK_ERR_ALIGNMENT, "weight_sum", MOVED(a.weight_sum, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "bad_targets", MOVED(a.bad_targets, 2));
    /* Two rules broken at once: the earlier one speaks. */
    BAD_CALL(LK_ERR_NULL, "target", (a.target = NULL, a.rows = -1));
    BAD_CALL(LK_ERR_NULL, "logits", (a.logits = NULL, a.vocab = -1));
    BAD_CALL(LK_ERR_SHAPE, "vocab", (a.vocab = 0, a.softcap = NAN));
    BAD_CALL(LK_ERR_SHAPE, "logits_stride", (a.logits_stride = 3, a.path = 9));
    BAD_CALL(LK_ERR_VALUE, "z_loss", (a.z_loss = NAN, many_rows(direction, LK_CROSS_ENTROPY_BLOCK)));
    BAD_CALL(LK_ERR_VALUE, "reduction", (a.reduction = 3, MOVED(a.logits, 1)));
}

/* The fields of what gives a loss. */
static void loss_errors(int type, int direction)
{
    lk_cross_entropy_args &a = args;
    BAD_CALL(LK_ERR_ALIGNMENT, "loss", MOVED(a.loss, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "z_loss_out", MOVED(a.z_loss_out, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "entropy", MOVED(a.entropy, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "argmax", MOVED(a.argmax, 4));
    BAD_CALL(LK_ERR_WORKSPACE, "workspace", a.workspace = NULL);
    BAD_CALL(LK_ERR_WORKSPACE, "workspace", a.workspace_bytes -= 1);
    BAD_CALL(LK_ERR_WORKSPACE, "workspace", a.workspace_bytes = 0);
    BAD_CALL(LK_ERR_WORKSPACE, "workspace is not aligned to 128", MOVED(a.workspace, 64));
    BAD_CALL(LK_OK, "a workspace at 128 bytes", MOVED(a.workspace, 128));
    BAD_CALL(LK_OK, "more than is asked", a.workspace_bytes += 1);
    BAD_CALL(LK_OK, "no z-loss", (a.z_loss = 0, a.workspace_bytes -= 256));
    BAD_CALL(LK_OK, "no z-loss, no class weights", (a.z_loss = 0, a.class_weight = NULL, a.workspace_bytes -= 256));
    BAD_CALL(LK_ERR_WORKSPACE, "workspace", (a.z_loss = 0, a.class_weight = NULL, a.workspace_bytes -= 257));
    BAD_CALL(LK_OK, "nor weight_sum",
             (a.z_loss = 0, a.class_weight = NULL, a.weight_sum = NULL, a.workspace_bytes -= 512));
    BAD_CALL(LK_ERR_WORKSPACE, "workspace",
             (a.z_loss = 0, a.class_weight = NULL, a.weight_sum = NULL, a.workspace_bytes -= 513));
    BAD_CALL(LK_OK, "none where none is needed", (a.reduction = 0, a.workspace = NULL, a.workspace_bytes = 0));
    BAD_CALL(LK_OK, "a sum that nobody wants", (a.reduction = 2, a.loss = a.z_loss_out = NULL, a.workspace = NULL));
    BAD_CALL(LK_ERR_VALUE, "path", (a.path = 9, a.workspace = NULL));
    BAD_CALL(LK_ERR_ALIGNMENT, "loss", (MOVED(a.loss, 1), a.workspace_bytes = 0));
    BAD_CALL(LK_ERR_SHAPE, "lse and loss overlap", a.lse = a.loss);
    BAD_CALL(LK_ERR_SHAPE, "loss and row_weight overlap", a.row_weight = a.loss);
    BAD_CALL(LK_ERR_SHAPE, "lse_low and lse overlap", (a.lse_low = a.lse, MOVED(a.lse_low, 8)));
    BAD_CALL(LK_ERR_SHAPE, "loss and logits overlap", (a.loss = (float *)a.logits, MOVED(a.loss, 16)));
    BAD_CALL(LK_ERR_SHAPE, "workspace and loss overlap", (a.loss = (float *)a.workspace, MOVED(a.loss, 128)));
    BAD_CALL(LK_OK, "loss behind the workspace", (a.loss = (float *)a.workspace, MOVED(a.loss, a.workspace_bytes)));
    BAD_CALL(LK_OK, "a workspace that is not used", (a.reduction = 0, a.workspace = a.loss, MOVED(a.workspace, 1)));
}

/* The fields of what gives a gradient. */
static void gradient_errors(int type, int direction)
{
    lk_cross_entropy_args &a = args;
    BAD_CALL(LK_ERR_NULL, "dlogits", a.dlogits = NULL);
    BAD_CALL(LK_ERR_SHAPE, "dlogits_stride", a.dlogits_stride = 7);
    BAD_CALL(LK_ERR_SHAPE, "dlogits_stride", a.dlogits_stride = -8);
    BAD_CALL(LK_ERR_SHAPE, "2^62", a.dlogits_stride = (int64_t)1 << 62);
    BAD_CALL(LK_ERR_SHAPE, "dlogits_stride must be 0 or 8", (a.dlogits = (void *)a.logits, a.dlogits_stride = 9));
    BAD_CALL(LK_ERR_SHAPE, "dlogits_stride must be 0 or 9",
             (a.dlogits = (void *)a.logits, a.logits_stride = 9, a.dlogits_stride = 8));
    BAD_CALL(LK_OK, "in place, the stride of logits", (a.dlogits = (void *)a.logits, a.logits_stride = 9));
    BAD_CALL(LK_OK, "in place", (a.dlogits = (void *)a.logits, a.logits_stride = 9, a.dlogits_stride = 9));
    BAD_CALL(LK_OK, "in place, one row", (a.dlogits = (void *)a.logits, a.rows = 1, a.dlogits_stride = 9));
    for (int dtype = -1; dtype < 6; dtype++) {
        const bool half = type == TEST_F32 && (dtype == LK_DTYPE_F16 || dtype == LK_DTYPE_BF16), eight = dtype == LK_DTYPE_E5M2;
        const bool good = half || eight || dtype == LK_DTYPE_T || dtype == type + 1;
        BAD_CALL(good ? LK_OK : LK_ERR_VALUE, "dlogits_dtype", a.dlogits_dtype = dtype);
        if (!half && !eight) continue;
        const int bytes = eight ? 1 : 2, stride = 8 * test_type_bytes[type] / bytes;
        BAD_CALL(LK_OK, "narrow in place", (a.dlogits = (void *)a.logits, a.dlogits_dtype = dtype, a.dlogits_stride = stride));
        BAD_CALL(LK_ERR_SHAPE, "dlogits_stride",
                 (a.dlogits = (void *)a.logits, a.dlogits_dtype = dtype, a.dlogits_stride = 8));
        BAD_CALL(LK_OK, "dlogits at an element", (MOVED(a.dlogits, bytes), a.dlogits_dtype = dtype));
    }
    BAD_CALL(LK_ERR_ALIGNMENT, "dlogits", MOVED(a.dlogits, 1));
    BAD_CALL(LK_ERR_ALIGNMENT, "upstream", MOVED(a.upstream, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "dlse", MOVED(a.dlse, 2));
    BAD_CALL(LK_OK, "dentropy", a.dentropy = a.dlse);
    BAD_CALL(LK_ERR_ALIGNMENT, "dentropy", (a.dentropy = a.dlse, MOVED(a.dentropy, 2)));
    BAD_CALL(LK_ERR_SHAPE, "dlogits and row_weight overlap", a.row_weight = (float *)a.dlogits);
    BAD_CALL(LK_ERR_SHAPE, "dlogits and dentropy overlap", a.dentropy = (float *)a.dlogits);
    BAD_CALL(LK_ERR_SHAPE, "dlogits_stride", (a.dlogits_stride = 3, a.softcap = -1));
    BAD_CALL(LK_ERR_SHAPE, "dlogits and logits overlap", (a.dlogits = (void *)a.logits, MOVED(a.dlogits, 16)));
    BAD_CALL(LK_ERR_SHAPE, "dlogits and dlse overlap", a.dlogits = (void *)a.dlse);
    BAD_CALL(LK_OK, "rows in each other's gaps",
             (a.dlogits = (void *)a.logits, MOVED(a.dlogits, 32), a.logits_stride = a.dlogits_stride = 64 / (type ? 2 : 4)));
    BAD_CALL(LK_ERR_VALUE, "dlogits_dtype", (a.dlogits_dtype = 9, MOVED(a.lse, 1)));
}

static void forward_errors(int type)
{
    const int direction = FORWARD;
    lk_cross_entropy_args &a = args;
    common_errors(type, direction);
    loss_errors(type, direction);
    BAD_CALL(LK_ERR_NULL, "every output", NO_OUTPUT);
    BAD_CALL(LK_OK, "rows = 0", (NO_OUTPUT, a.rows = 0));
    BAD_CALL(LK_ERR_PATH, "batch_invariant takes 2^27 rows", (many_rows(direction, 0), a.batch_invariant = 1));
    BAD_CALL(LK_OK, "statistics", a.statistics = 1);
    BAD_CALL(LK_ERR_NULL, "entropy is NULL", (a.statistics = -1, a.entropy = NULL));
    BAD_CALL(LK_ERR_SHAPE, "overlap", (a.statistics = 1, a.entropy = a.lse, MOVED(a.entropy, -32)));
    BAD_CALL(LK_OK, "a mean that nobody wants", (a.loss = a.z_loss_out = NULL, a.workspace = NULL));
    BAD_CALL(LK_OK, "what forward does not have", fill_unused(direction));
    BAD_CALL(LK_ERR_NULL, "every output", (NO_OUTPUT, fill_unused(direction)));
}

static void backward_errors(int type)
{
    const int direction = BACKWARD;
    lk_cross_entropy_args &a = args;
    common_errors(type, direction);
    gradient_errors(type, direction);
    BAD_CALL(LK_ERR_VALUE, "statistics is 2; only forward computes them", a.statistics = 2);
    BAD_CALL(LK_ERR_NULL, "lse", a.lse = NULL);
    BAD_CALL(LK_ERR_NULL, "valid_rows", (a.class_weight = NULL, a.valid_rows = NULL, a.z_loss = 0));
    BAD_CALL(LK_ERR_NULL, "valid_rows", a.valid_rows = NULL);
    BAD_CALL(LK_ERR_NULL, "weight_sum", a.weight_sum = NULL);
    BAD_CALL(LK_OK, "counts beside a denominator", (a.denominator = a.dlse, a.valid_rows = NULL, a.weight_sum = NULL));
    BAD_CALL(LK_ERR_NULL, "entropy", (a.dentropy = a.dlse, a.entropy = NULL));
    BAD_CALL(LK_OK, "entropy without dentropy", a.entropy = NULL);
    BAD_CALL(LK_OK, "counts that a mean does without", (a.z_loss = 0, a.valid_rows = NULL));
    BAD_CALL(LK_OK, "counts that a mean does without", (a.class_weight = NULL, a.weight_sum = NULL));
    BAD_CALL(LK_OK, "inputs that may be NULL",
             (a.reduction = 2, a.class_weight = a.upstream = a.dlse = NULL, a.weight_sum = NULL, a.valid_rows = NULL));
    BAD_CALL(LK_ERR_NULL, "weight_sum", (a.weight_sum = NULL, a.dlogits_stride = 3));
    BAD_CALL(LK_OK, "what backward does not have", fill_unused(direction));
    BAD_CALL(LK_ERR_NULL, "dlogits", (a.dlogits = NULL, fill_unused(direction)));
}

static void both_errors(int type)
{
    const int direction = BOTH;
    lk_cross_entropy_args &a = args;
    common_errors(type, direction);
    loss_errors(type, direction);
    gradient_errors(type, direction);
    BAD_CALL(LK_ERR_VALUE, "statistics is 1; only forward computes them", a.statistics = 1);
    BAD_CALL(LK_OK, "dlogits alone", NO_OUTPUT);
    BAD_CALL(LK_OK, "inputs that may be NULL", a.class_weight = a.upstream = a.dlse = NULL);
    BAD_CALL(LK_OK, "rows = 0", (NO_OUTPUT, a.dlogits = NULL, a.rows = 0));
    BAD_CALL(LK_ERR_WORKSPACE, "workspace", (NO_OUTPUT, a.workspace_bytes = 127)); /* the gradients want the count */
    BAD_CALL(LK_OK, "128 bytes for the count", (NO_OUTPUT, a.workspace_bytes = 128));
}

static void no_args(int type)
{
    size_t asked = 12345;
    for (int direction = FORWARD; direction <= BOTH; direction++) {
        const lk_status status = call_of[LABELS][direction][type](NULL, test.stream);
        const bool says = strstr(lk_last_error(), "args") != NULL;
        const lk_status answer = query_of[LABELS][direction][type](NULL, &asked);
        if (!test_that(status == LK_ERR_NULL && says && answer == LK_ERR_NULL && asked == 12345))
            test_detail("args NULL: %s", lk_last_error());
    }
}

/* Wrong arguments of ranks, and a callback that fails: its status is the call's. */
static void rank_errors(int type)
{
    enum { FINISH = DIRECTIONS };
    void *room_of_call = NULL;
    TEST_CUDA(cudaMalloc(&room_of_call, 1 << 20));
    static const test_bad_rank<rank_args> cases[] = {
        TEST_BAD_RANKS(FORWARD, common.vocab), TEST_BAD_RANKS(FINISH, common.vocab),
        TEST_BAD_RANKS(BACKWARD, common.vocab), TEST_BAD_RANKS(BOTH, common.vocab),
        {FORWARD, LK_ERR_NULL, LK_OK, "states", SPOIL(a->states = NULL)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "states", SPOIL(a->states = NULL)},
        {BOTH, LK_ERR_NULL, LK_ERR_NULL, "all_gather", SPOIL(a->parallel.all_gather = NULL)},
        {BOTH, (lk_status)77, LK_OK, "parallel.all_gather returned 77", SPOIL(a->parallel.all_gather = test_broken_gather)},
        {FORWARD, (lk_status)77, LK_OK, "all_gather", SPOIL(a->parallel.all_gather = test_broken_gather)},
        {FINISH, LK_ERR_NULL, LK_OK, "all_states", SPOIL(a->all_states = NULL)},
        {FORWARD, LK_ERR_VALUE, LK_ERR_VALUE, "target_prob",
         SPOIL(a->common.target_prob = a->common.logits, a->common.target_prob_stride = 0, a->common.target = NULL)},
        {FORWARD, LK_ERR_ALIGNMENT, LK_OK, "states", SPOIL(MOVED(a->states, 8))},
        {BOTH, LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab_start", /* sizes come first */
         SPOIL(a->parallel.all_gather = NULL, a->parallel.vocab_start = a->parallel.vocab_total - a->common.vocab + 1)},
        {BOTH, LK_ERR_SHAPE, LK_OK, "states and lse overlap", SPOIL(a->states = a->common.lse = (float *)a->states)},
        {FINISH, LK_ERR_SHAPE, LK_OK, "all_states and states overlap", SPOIL(a->states = test_ranks.table)},
        {BACKWARD, LK_ERR_ALIGNMENT, LK_OK, "states", SPOIL(MOVED(a->states, 2))},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        const bool finish = cases[i].call == FINISH;
        const int direction = finish ? (int)FORWARD : cases[i].call;
        problem p = plain(type, direction, LK_CROSS_ENTROPY_AUTO, 4, 8);
        p.ranks = 2, p.on[UPSTREAM_ONE] = false;
        settle_tensors(&p);
        setup(&p, 0);
        rank_args x = slice_of(&p, 0);
        x.states = test_left_states(0);
        if (direction == FORWARD) x.parallel.all_gather = NULL; /* three calls, whatever the seed says */
        if (cases[i].want == 77) x.common.workspace = room_of_call, x.common.workspace_bytes = 1 << 20;
        test_expect_rank(cases, i, &x, finish ? finish_of[type] : rank_of[direction][type],
                         finish ? finish_bytes_of[type] : rank_query_of[direction][type]);
    }
    TEST_CUDA(cudaFree(room_of_call));
}

static void all_errors(void)
{
    for (int type = 0; type < TEST_TYPES; type++) {
        const char *const name = test_type_name[type];
        if (test_begin("forward %s: errors", name)) forward_errors(type), no_args(type), test_finish();
        if (test_begin("backward %s: errors", name)) backward_errors(type), test_finish();
        if (test_begin("forward_backward %s: errors", name)) both_errors(type), test_finish();
        if (test_begin("errors of ranks, %s", name)) rank_errors(type), test_finish();
    }
}

/* ---- Random draws ---------------------------------------------------------------------------------------------------- */

static void fuzz(void)
{
    static const int64_t lengths_drawn[] = {1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1000, 1025, 2049, 8200};
    const long n = test_fuzz_begin(&counts, 300, 40);
    for (long i = 0; i < n; i++) {
        uint64_t state = test_hash(test_hash(test.fuzz_seed) + (uint64_t)i), *const r = &state;
        const int type = (int)test_below(r, TEST_TYPES), direction = (int)test_below(r, DIRECTIONS),
                  path = (int)test_below(r, PATHS);
        int64_t vocab = test_chance(r, 3) ? lengths_drawn[test_below(r, LENGTH_OF(lengths_drawn))] : 1 + test_below(r, 70);
        if (!test.small && test_chance(r, 40)) vocab = 1 + test_below(r, 40000);
        if (test.small && vocab > 2049) vocab = 2049;
        const int64_t rows = test_chance(r, 20) ? 0 : test_chance(r, 30) && vocab < 80 ? 201 + test_below(r, 200)
                                                                             : 1 + test_below(r, vocab > 1000 ? 3 : 12);
        problem p = plain(type, direction, path_here(path) ? path : LK_CROSS_ENTROPY_BLOCK, rows, vocab);
        p.seed = test_random(r), p.prob = p.seed % 4 == 3, p.wide_prob = p.seed / 4 % 2;
        draw_switches(&p, r);
        draw_place(&p, r, (int)test_below(r, PLACES));
        if (test_chance(r, 3)) p.special = 1 + (int)test_below(r, NEIGHBOURS - 1), p.where = (int)test_below(r, WHERES);
        if (test_chance(r, 12)) p.empty = 1 + (int)test_below(r, 2);
        if (test_chance(r, 8)) p.offset = test_chance(r, 2) ? 1e4 : -1e4, p.on[SOFTCAP] = false;
        if (test_chance(r, 8)) p.spread = 0;
        if (p.seed / 8 % 8 == 0) p.denominator = p.seed / 64 % 2 ? 0 : INFINITY;
        if (test_chance(r, 12)) {
            p.special = NEIGHBOURS, p.offset = (test_chance(r, 2) ? 1 : -1) * (type == TEST_F16 ? 6e4 : 1.3e10);
            p.on[SOFTCAP] = p.on[Z] = p.on[SCALE] = false;
        }
        check(&p);
    }
    test_fuzz_end(&counts, possible, n);
}

/* ---- On the GPU only: beyond 2^31 elements, and a busy device -------------------------------------------------------- */

#if !defined(LK_SIMT)

typedef struct {
    int32_t *target;
    int64_t rows, vocab;
} huge_targets;

LK_KERNEL void huge_target_kernel(huge_targets p)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < p.rows; i += (int64_t)gridDim.x * blockDim.x)
        p.target[i] = (int32_t)test_huge_target(i, p.vocab);
}

/* Forward, with smoothing or without, then backward in place, or both in one pass in place, in bf16 or in e5m2; sampled rows are
 * recomputed here. */
static void huge(int64_t rows, int64_t vocab, int path, bool smooth, bool fused, bool eight)
{
    lk_bf16 *const logits = (lk_bf16 *)test_huge_allocate(rows * vocab * 2);
    int32_t *const target = (int32_t *)test_huge_allocate(rows * 4);
    void *const lse = test_huge_allocate(rows * 4), *const loss = test_huge_allocate(rows * 4);
    const huge_targets fill = {target, rows, vocab};
    test_huge_fill(logits, rows * vocab, 0);
    TEST_CUDA(lk_launch(huge_target_kernel, 4096, 256, 0, test.stream, fill));
    problem p = plain(TEST_BF16, fused ? BOTH : FORWARD, path, rows, vocab);
    p.on[INT32] = true, p.on[SMOOTHING] = smooth, p.on[NARROW] = eight;
    const int narrow = eight ? TEST_E5M2 : TEST_BF16;
    void *const at[TENSORS] = {logits, target, NULL, NULL, NULL, lse, loss, NULL, NULL, NULL, NULL, NULL, NULL, logits};
    set_args(&p, at);
    bool ran = launched(&p, launch(&p));
    if (!fused) p.direction = BACKWARD, set_args(&p, at), ran = ran && launched(&p, launch(&p));
    enum { SAMPLES = 24, COLUMNS = 48 };
    uint64_t random = (uint64_t)(rows + vocab);
    for (int s = 0; ran && s < (vocab > 1 << 21 ? 1 : SAMPLES); s++) { /* the host is slow */
        const int64_t chosen[3] = {rows - 1, 0, rows / 2}, row = s < 3 ? chosen[s] : test_below(&random, rows);
        const int64_t y = test_huge_target(row, vocab), base = row * vocab;
        /* There are 256 values: the sums over the columns are over the values with how often each occurs. */
        int64_t often[256] = {};
        for (int64_t c = 0; c < vocab; c++) often[test_huge_number(base + c)]++;
        double sum = 0, mean = 0;
        for (int v = 0; v < 256; v++) {
            sum += (double)often[v] * exp(v / 32.0 - 4);
            mean += (double)often[v] / (double)vocab * (v / 32.0 - 4);
        }
        const double exact = log(sum), z = test_huge_number(base + y) / 32.0 - 4, e = smoothing_of(&p), share = e / (double)vocab;
        const double want = (1 - e) * (exact - z) + (e > 0 ? e * (exact - mean) : 0);
        const double slack = (16 + sqrt((double)vocab / 256)) * 0x1p-24; /* a chain of vocab / 256 additions loses its root */
        if (!test_near(TEST_F32, test_huge_get(TEST_F32, lse, row), exact, slack * (8 + exact)))
            test_detail("lse[%lld] is wrong; %s", (long long)row, describe(&p));
        if (!test_near(TEST_F32, test_huge_get(TEST_F32, loss, row), want, slack * (12 + exact)))
            test_detail("loss[%lld] is wrong; %s", (long long)row, describe(&p));
        for (int i = 0; i < COLUMNS; i++) {
            const int64_t c = i == 0 ? vocab - 1 : i == 1 ? 0 : i == 2 ? y : test_below(&random, vocab);
            const double probability = exp(test_huge_number(base + c) / 32.0 - 4 - exact);
            const double gradient = c == y ? probability - 1 + e - share : probability - share;
            if (!test_near(narrow, test_huge_get(narrow, logits, (eight ? 2 : 1) * base + c), gradient,
                           slack * (8 + exact) * (c == y ? 1 : probability + share)))
                test_detail("dlogits[row %lld, col %lld] is wrong; %s", (long long)row, (long long)c, describe(&p));
        }
    }
    test_huge_free();
}

static void busy(int type, int direction, int path)
{
    problem p = drawn(type, direction, path, 3000, 1001, 2200, PACKED);
    p.on[MEAN] = p.has[LOSS] = true;
    check(&p); /* leaves its bits in kept */
    test_busy(op, &p);
}

static void all_huge(void)
{
    static const int64_t shapes[][2] = {{70001, 32768}, {17000, 131071}, {3, 1 << 30}, {(1ll << 31) + 77, 1}};
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int path = 0; path < PATHS; path++) {
            if (!path_here(path) || (path >= LK_CROSS_ENTROPY_BLOCK && shapes[i][0] > 1 << 27)) continue;
            const int64_t rows = shapes[i][0], vocab = shapes[i][1];
            for (int fused = 0; fused < 2; fused++) {
                if (!test_begin("huge: %lld x %lld %s%s%s", (long long)rows, (long long)vocab, path_name[path],
                                fused ? ", forward_backward" : "", (i + path / 2) % 2 ? ", e5m2" : ""))
                    continue;
                huge(rows, vocab, path, (i + path + fused) % 2, fused, (i + path / 2) % 2);
                test_finish();
            }
        }
    static const test_theme held = {"half of the SMs held", busy};
    for (int at = 0; at < COUNTED; at++)
        if (path_here(at % PATHS))
            test_themes(&held, 1, at / PATHS, at % PATHS, direction_name[at / PATHS], path_name[at % PATHS]);
}

#endif

/* ---------------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    test_start(argc, argv);
    all_errors();
    all_sequences();
    all_themes();
    TEST_HUGE(all_huge);
    test_all_ran(&counts, possible, all_counts);
    fuzz();
    return test_end();
}
