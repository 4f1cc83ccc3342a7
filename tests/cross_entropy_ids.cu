// SPDX-License-Identifier: MIT
/* tests/cross_entropy_ids.cu - lk/cross_entropy_ids.cuh against its header's formula in double, on the GPU or on the simulator.
 *
 * As tests/cross_entropy.cu: each checked call runs twice over different poison and must give the same bits; what is no output
 * must not change; ignored rows, and weights and dlogp of skipped ids, hold NaN. Options are drawn, from seeds that depend on the
 * case alone; the counts at the end demand that each ran in each direction and on each path. With one id of weight 1 the bits are
 * those of lk_cross_entropy with that target.
 *
 * Limits, in u = 2^-24, besides half an ulp of the output's type; d_j, P, log sum and those of lse, entropy, z-loss, sums over rows
 * and p are in tests/cross_entropy.cu. Per id:
 *   logp          log sum's, and 16 of max - z: the target's loss and a difference of logits
 *                 where forward's reference is d below a sure id: (d + 2) 2^-23 of the sum, and 2 d of max - z
 *   tail          as that of the class term where the row is read again, with log sum and max - z of the columns that are no ids;
 *                 else that of the ids' p, over P. With ranks a rank's part may be such a difference where the row is read again
 *   class         |w| times that, and 16 of each |w logp|: a sum of 128 products has 4 + 5 additions in a row
 *   dlogits       the target's from the sum of the others' p, as there; of another id p's limit and 4 of |log p| times the size of
 *                 all that it is multiplied by, and 16 of the sizes of its own u
 *                 with a tail: p / P of a column that is no id has p's limit with lse + tail for lse, and P has |tail| 2^-23
 * forward_backward with z-loss adds h and subtracts it, so its size is in that of all terms; and all ids are as "another" one.
 *
 * Columns that are split over ranks are virtual ranks of one process, one after another, as in tests/cross_entropy.cu. Their
 * target's gradient is from the sum of the others' p where it has more than half of p, else it is as another id's. Where two ids
 * have nearly half each, a rank may take either way: they differ by 1 - p minus that sum, and by p's own limit.
 */
#include "lk/cross_entropy_ids_parallel.cuh"

#include "tests/test.h"

/* Those of one target are of this file even where tests/mutate builds the others by themselves. */
LK_DEFINE_CROSS_ENTROPY(f32)
LK_DEFINE_CROSS_ENTROPY(f16)
LK_DEFINE_CROSS_ENTROPY(bf16)
LK_DEFINE_CROSS_ENTROPY_PARALLEL(f32)
LK_DEFINE_CROSS_ENTROPY_PARALLEL(f16)
LK_DEFINE_CROSS_ENTROPY_PARALLEL(bf16)
TEST_DEFINE(CROSS_ENTROPY_IDS)
TEST_DEFINE(CROSS_ENTROPY_IDS_PARALLEL)

typedef lk_status (*call_function)(const lk_cross_entropy_ids_args *, cudaStream_t);
typedef lk_status (*query_function)(const lk_cross_entropy_ids_args *, size_t *);
typedef lk_cross_entropy_ids_parallel_args rank_args;
typedef lk_status (*rank_function)(const rank_args *, cudaStream_t);
typedef lk_status (*rank_query_function)(const rank_args *, size_t *);
typedef lk_status (*one_rank_function)(const lk_cross_entropy_parallel_args *, cudaStream_t);
typedef lk_status (*one_function)(const lk_cross_entropy_args *, cudaStream_t);
typedef lk_status (*one_query_function)(const lk_cross_entropy_args *, size_t *);
enum { FORWARD, BACKWARD, BOTH, DIRECTIONS };
#define CALLS(op, end) {TEST_OF_TYPES(lk_##op##_forward##end), TEST_OF_TYPES(lk_##op##_backward##end),                         \
                        TEST_OF_TYPES(lk_##op##_forward_backward##end)}
static const call_function call_of[DIRECTIONS][TEST_TYPES] = CALLS(cross_entropy_ids, );
static const query_function query_of[DIRECTIONS][TEST_TYPES] = CALLS(cross_entropy_ids, _workspace_bytes);
static const rank_function split_call_of[DIRECTIONS][TEST_TYPES] = CALLS(cross_entropy_ids_parallel, );
static const rank_query_function split_query_of[DIRECTIONS][TEST_TYPES] = CALLS(cross_entropy_ids_parallel, _workspace_bytes);
static const rank_function finish_of[TEST_TYPES] = TEST_OF_TYPES(lk_cross_entropy_ids_parallel_finish);
static const rank_query_function finish_query_of[TEST_TYPES] = TEST_OF_TYPES(lk_cross_entropy_ids_parallel_finish_workspace_bytes);
static const one_rank_function split_one_of[DIRECTIONS][TEST_TYPES] = CALLS(cross_entropy_parallel, );
static const one_function one_of[DIRECTIONS][TEST_TYPES] = CALLS(cross_entropy, );
static const one_query_function one_query_of[DIRECTIONS][TEST_TYPES] = CALLS(cross_entropy, _workspace_bytes);
static const char *const direction_name[] = {"forward", "backward", "forward_backward"};
enum { PATHS = 4, COUNTED = DIRECTIONS * PATHS };
static const char *const path_name[PATHS] = {"auto", "warp", "block", "cluster"};

static bool gives_loss(int direction) { return direction != BACKWARD; }
static bool gives_gradient(int direction) { return direction != FORWARD; }

enum {
    LOGITS, IDS, WEIGHT, DLOGP, TAIL_WEIGHT, DTAIL, ROW_WEIGHT, UPSTREAM, DLSE, DENTROPY, DENOMINATOR, LSE, LSE_LOW, ENTROPY,
    LOSS, Z_LOSS, ARGMAX, VALID, WEIGHT_SUM, BAD_COUNT, LOGP, TAIL, DLOGITS, WORKSPACE, TENSORS = WORKSPACE
};
static const char *const tensor_name[] = {"logits", "target_ids", "target_weight", "dlogp", "tail_weight", "dtail", "row_weight",
                                          "upstream", "dlse", "dentropy", "denominator", "lse", "lse_low", "entropy", "loss",
                                          "z_loss_out", "argmax",
                                          "valid_rows", "weight_sum", "bad_targets", "logp", "tail", "dlogits", "workspace"};

/* What a call has or has not. REPEATED: ids are drawn from a few columns. NARROW: dlogits narrower than logits. */
enum {
    MEAN, SUM, IGNORE, WEIGHTS, Z, SCALE, SOFTCAP, BAD, INT32, REPEATED, DIVIDED, WEIGHTED, LOW, WANT_ENTROPY, WANT_ARGMAX,
    UPSTREAM_ROWS, UPSTREAM_ONE, HAS_DLOGP, HAS_DLSE, HAS_DENTROPY, ZERO_PADDING, IN_PLACE, NARROW, HAS_TAIL_WEIGHT, WANT_TAIL,
    HAS_DTAIL, HOST_UPSTREAM, ADD_LOSS, SWITCHES
};
static const char *const switch_name[] = {"mean", "sum", "ignore index", "weights", "z-loss", "logit scale", "softcap", "bad ids",
                                          "int32 ids", "repeated", "denominator", "row weights", "lse_low", "entropy", "argmax",
                                          "upstream a row", "one upstream", "dlogp", "dlse", "dentropy", "zero padding",
                                          "in place", "narrow dlogits", "tail weights", "tail", "dtail", "upstream of the host",
                                          "accumulate_loss"};

static bool switch_of(int direction, int s)
{
    if (s == WANT_ENTROPY || s == WANT_ARGMAX || s == WANT_TAIL || s == ADD_LOSS) return gives_loss(direction);
    return s < WANT_ENTROPY || s == HAS_TAIL_WEIGHT || gives_gradient(direction);
}

/* What some logits of the odd rows are, of all rows where there is one. IDS_INF: the ids at -inf; ID_INF: one of them; OTHERS_INF:
 * all columns but the ids. HALVES: two columns have nearly half of p each. CONFIDENT: p of one id is about 1 - 1e-6, LOPSIDED: of one
 * that is not the first. SURE: of all ids together 1 - 1e-9, SURER: 1 - 1e-87. */
enum {
    NOTHING, IDS_INF, ID_INF, OTHERS_INF, ALL_INF, PLUS_INF, NOT_A_NUMBER, TIES, CONFIDENT, LOPSIDED, FAR, SURE, SURER, SPECIALS,
    HALVES = SPECIALS
};
static const char *const special_name[] = {"nothing", "ids at -inf", "an id at -inf", "others at -inf", "all at -inf", "+inf",
                                           "nan", "ties", "confident", "lopsided", "ids far below", "others far below",
                                           "others very far below", "halves"};

typedef struct {
    int type, direction, path, ids;
    int64_t rows, vocab;
    bool on[SWITCHES], has[TENSORS];
    int64_t stride[TENSORS]; /* 0: packed */
    int at[TENSORS];         /* elements past 256-byte alignment */
    int narrow; /* the type of dlogits with NARROW: e5m2, of f32 logits also f16 or bf16 */
    int special;
    bool all_ignored;
    float z_loss, scale, softcap;
    int64_t ignore_index;
    double offset, denominator;
    uint64_t seed;
    int ranks; /* not 0: the columns are split over so many */
    int place; /* with ranks: 1: all ids on one; 2: on the first and the last column of a slice; 3: each rank has one or none */
} problem;

static problem plain(int type, int direction, int path, int64_t rows, int64_t vocab, int ids)
{
    problem p = {};
    p.type = type, p.direction = direction, p.path = path, p.rows = rows, p.vocab = vocab, p.ids = ids;
    p.narrow = type ? TEST_E5M2 : TEST_BF16;
    p.z_loss = 0.01f, p.scale = 0.7f, p.softcap = 5, p.ignore_index = -100, p.denominator = 2.75;
    p.has[LOSS] = p.has[LSE] = p.has[LOGP] = true, p.ranks = test_split_over;
    p.seed = test_hash((uint64_t)(rows * 1000003 + vocab * 1009 + ids * 17 + type * 101 + direction * 11 + path));
    return p;
}

/* What follows from the switches. */
static void settle_tensors(problem *p)
{
    const bool back = gives_gradient(p->direction), loss = gives_loss(p->direction);
    for (int s = 0; s < SWITCHES; s++) p->on[s] = p->on[s] && switch_of(p->direction, s);
    if (p->ranks > 1) { /* slices of one tensor: padding of one is another's, and 16-bit slices lie elsewhere */
        p->on[ZERO_PADDING] = false;
        if (p->direction == BOTH || p->on[NARROW]) p->on[IN_PLACE] = false; /* the call is made twice: see launch_split */
    }
    if (p->ranks && test_gathers(p)) p->on[ADD_LOSS] = false; /* such calls are made twice, and by each rank */
    p->on[SUM] = p->on[SUM] && !p->on[MEAN], p->on[UPSTREAM_ONE] = p->on[UPSTREAM_ONE] && !p->on[UPSTREAM_ROWS];
    p->has[LOGITS] = p->has[IDS] = true, p->has[WEIGHT] = p->on[WEIGHTS], p->has[DLOGP] = p->on[HAS_DLOGP];
    p->has[ROW_WEIGHT] = p->on[WEIGHTED], p->has[UPSTREAM] = p->on[UPSTREAM_ROWS] || p->on[UPSTREAM_ONE];
    p->has[DLSE] = p->on[HAS_DLSE], p->has[DENTROPY] = p->on[HAS_DENTROPY], p->has[DENOMINATOR] = p->on[DIVIDED];
    p->has[ENTROPY] = loss ? p->on[WANT_ENTROPY] : p->on[HAS_DENTROPY], p->has[ARGMAX] = p->on[WANT_ARGMAX];
    p->has[TAIL_WEIGHT] = p->on[HAS_TAIL_WEIGHT], p->has[DTAIL] = p->on[HAS_DTAIL];
    p->has[TAIL] = loss ? p->on[WANT_TAIL] : p->has[TAIL_WEIGHT] || p->has[DTAIL];
    p->has[LSE_LOW] = p->on[LOW] && (p->has[LSE] || !loss), p->has[DLOGITS] = back;
    if (!loss) {
        p->has[LSE] = true, p->has[LOSS] = p->has[Z_LOSS] = p->has[LOGP] = p->has[WEIGHT_SUM] = false;
        p->has[VALID] = p->on[MEAN] && !p->on[DIVIDED];
    }
    if (p->on[IN_PLACE]) p->stride[DLOGITS] = 0;
}

static const char *describe(const problem *p)
{
    static char text[1024];
    int n = snprintf(text, sizeof text, "%s %s path=%s ranks=%d rows=%lld vocab=%lld ids=%d strides %lld, %lld;",
                     direction_name[p->direction], test_type_name[p->type], path_name[p->path], p->ranks, (long long)p->rows,
                     (long long)p->vocab, p->ids,
                     (long long)p->stride[LOGITS], (long long)p->stride[DLOGITS]);
    for (int s = 0; s < SWITCHES; s++)
        if (p->on[s]) n += snprintf(text + n, sizeof text - (size_t)n, " %s,", switch_name[s]);
    for (int t = 0; t < TENSORS; t++)
        if (p->has[t]) n += snprintf(text + n, sizeof text - (size_t)n, " %s+%d", tensor_name[t], p->at[t]);
    snprintf(text + n, sizeof text - (size_t)n, "; k=%g scale=%g softcap=%g ignore=%lld special=%s offset=%g seed=0x%llx",
             (double)p->z_loss, (double)p->scale, (double)p->softcap, (long long)p->ignore_index, special_name[p->special],
             p->offset, (unsigned long long)p->seed);
    return text;
}

static bool is_output(const problem *p, int t)
{
    return p->has[t] && (t == BAD_COUNT || t == DLOGITS || (t >= LSE && t <= TAIL && gives_loss(p->direction)));
}

static bool has_tail(const problem *p) { return p->has[TAIL_WEIGHT] || p->has[TAIL] || p->has[DTAIL]; }

/* Whose memory it lies in. */
static int home_of(const problem *p, int t) { return t == DLOGITS && p->on[IN_PLACE] ? LOGITS : t; }

/* Where a tensor's elements lie. Columns cols to end - 1 of dlogits are padding that becomes 0. */
typedef struct {
    int type, bytes;
    int64_t rows, cols, stride, end;
} layout;

static layout layout_of(const problem *p, int t)
{
    const bool reduced = p->on[MEAN] || p->on[SUM], per_id = t == IDS || t == WEIGHT || t == DLOGP || t == LOGP;
    const bool one = t == VALID || t == WEIGHT_SUM || t == BAD_COUNT || t == DENOMINATOR ||
                     (t == UPSTREAM && !p->on[UPSTREAM_ROWS]) || ((t == LOSS || t == Z_LOSS) && reduced);
    layout l = {TEST_F32, t == ARGMAX || t == VALID || (t == IDS && !p->on[INT32]) ? 8 : 4, one ? 1 : p->rows, 1, 1, 1};
    if (t == LOGITS || t == DLOGITS) {
        l.type = t == DLOGITS && p->on[NARROW] ? p->narrow : p->type;
        l.bytes = test_type_bytes[l.type];
    }
    if (per_id) l.cols = l.end = p->ids;
    if (t == LOGITS || t == DLOGITS) l.cols = l.end = p->vocab;
    l.stride = p->stride[t] ? p->stride[t] : l.cols;
    if (t == DLOGITS) {
        const int64_t end = p->on[IN_PLACE] ? (p->stride[LOGITS] ? p->stride[LOGITS] : p->vocab) : l.stride;
        if (p->on[IN_PLACE]) l.stride = end * test_type_bytes[p->type] / l.bytes;
        if (p->on[ZERO_PADDING]) l.end = end;
    }
    return l;
}

/* ---- Draws ----------------------------------------------------------------------------------------------------------- */

/* Half of the draws leave out what the plain kernels do not do. */
static void draw(problem *p, int number)
{
    static const float z_loss[] = {1e-4f, 0.01f, 0.5f}, scale[] = {0.7f, 3, 0.01f}, softcap[] = {5, 30, 0.9f};
    uint64_t r = p->seed = test_hash(p->seed + (uint64_t)number * 0x10001);
    uint64_t other = test_hash(r);
    const bool tail = test_chance(&other, 2);
    for (int s = 0; s < HAS_TAIL_WEIGHT; s++) p->on[s] = test_chance(&r, s < IGNORE || s == IN_PLACE ? 3 : 2);
    for (int s = HAS_TAIL_WEIGHT; s <= HAS_DTAIL; s++) p->on[s] = tail && test_chance(&other, 2);
    p->on[HOST_UPSTREAM] = test_chance(&other, 3), p->on[ADD_LOSS] = test_chance(&other, 3);
    if (test_chance(&r, 2)) p->on[SOFTCAP] = p->on[WANT_ENTROPY] = p->on[WANT_ARGMAX] = p->on[HAS_DENTROPY] = false;
    if (test_chance(&r, 2)) p->on[Z] = false;
    p->z_loss = z_loss[test_below(&r, 3)], p->scale = scale[test_below(&r, 3)], p->softcap = softcap[test_below(&r, 3)];
    p->narrow = p->type || test_chance(&other, 3) ? TEST_E5M2 : test_chance(&r, 2) ? TEST_F16 : TEST_BF16;
    if (p->type && test_chance(&other, 2)) p->on[NARROW] = false; /* short rows have kernels of their own in T alone */
    p->ignore_index = test_chance(&r, 2) ? -100 : test_below(&r, p->vocab < 5 ? p->vocab : 5);
    for (int t = LSE; t <= LOGP; t++) p->has[t] = !test_chance(&r, 3);
    if (!p->has[LOSS] && !p->has[LSE]) p->has[LOGP] = true;
    const int64_t gap = test_chance(&r, 2) ? (p->vocab + 15) / 8 * 8 : p->vocab + test_below(&r, 12);
    for (int t = 0; t < TENSORS; t++) {
        const layout l = layout_of(p, t);
        p->at[t] = test_chance(&r, 2) ? 0 : (int)test_below(&r, l.bytes == 2 ? 8 : 4);
        if (t == LOGITS || t == DLOGITS) p->stride[t] = test_chance(&r, 2) ? 0 : gap;
        else if (l.cols > 1) p->stride[t] = test_chance(&r, 2) ? 0 : p->ids + test_below(&r, 4);
    }
}

/* ---- Tensors --------------------------------------------------------------------------------------------------------- */

enum { SKIPPED, GOOD, IS_BAD };

/* What the header's formula says of a row. */
typedef struct {
    bool counted, bad, proper;
    int64_t argmax, y; /* y: the column of the good id with the largest logit */
    double max, lse, log_sum, log_slack, lse_slack, z_error, entropy, entropy_slack, class_loss, class_slack, z_loss, z_slack;
    double tail, tail_slack;
} outcome;

static test_buffer buffers[TENSORS + 1];
static layout laid[TENSORS];
static unsigned char *kept[TENSORS];
static size_t kept_bytes[TENSORS], z_bytes, id_bytes, outcome_bytes, column_bytes;
static bool *row_id;                           /* of each column: it is one of the row's ids */
static double *row_z, *column_u, *column_size; /* of each column: the sum of u over its ids, and of their sizes */
static outcome *outcomes;
static int64_t valid_rows, bad_targets;
static lk_cross_entropy_ids_args args;

static float value(int t, int64_t row, int64_t c)
{
    return test_get(laid[t].type, test_buffer_host(&buffers[t]), row * laid[t].stride + c);
}
static int64_t integer(int t, const void *elements, int64_t at)
{
    return laid[t].bytes == 4 ? ((const int32_t *)elements)[at] : ((const int64_t *)elements)[at];
}
static int64_t id_of(int64_t row, int k) { return integer(IDS, test_buffer_host(&buffers[IDS]), row * laid[IDS].stride + k); }
static double weight_of(const problem *p, int64_t row, int k) { return p->has[WEIGHT] ? (double)value(WEIGHT, row, k) : 1; }

static int status_of(const problem *p, int64_t row, int k)
{
    const int64_t id = id_of(row, k);
    if (p->on[IGNORE] && id == p->ignore_index) return SKIPPED;
    return id >= 0 && id < p->vocab ? GOOD : weight_of(p, row, k) == 0 ? SKIPPED : IS_BAD;
}

static double scale_of(const problem *p) { return p->on[SCALE] ? (double)p->scale : 1; }
static double z_loss_of(const problem *p) { return p->on[Z] ? (double)p->z_loss : 0; }
static double z_of(const problem *p, double x)
{
    const double softcap = (double)p->softcap;
    return p->on[SOFTCAP] ? softcap * tanh(scale_of(p) * x / softcap) : scale_of(p) * x;
}
/* lk_ce_cap computes z and its slope in the shorter way: z is off by softcap 2^-20, a slope below 2^-59 by itself. */
static bool short_cap(const problem *p) { return p->type != TEST_F32 && p->softcap <= 64; }

/* Where an id lies that has a place among ranks. */
static int64_t placed(const problem *p, int64_t row, int k, int64_t id)
{
    const int64_t *const ends = test_ranks.cut;
    const int rank = p->place == 1 ? (int)(row % p->ranks) : (k + (int)row) % p->ranks;
    const int64_t first = ends[rank], count = ends[rank + 1] - first;
    if (count == 0) return id;
    return p->place == 2 ? (k % 2 ? first : first + count - 1) : first + id % count;
}

/* Ids at the ends of rows and of vectors are among them; and weights. */
static void fill_ids(const problem *p)
{
    const bool small = p->on[INT32];
    const int64_t wrong[] = {-1, p->vocab, -100, small ? INT32_MIN : INT64_MIN, small ? INT32_MAX : INT64_MAX,
                             small ? -p->vocab : ((int64_t)1 << 32) + p->vocab / 2};
    uint64_t r = p->seed + 2;
    for (int64_t row = 0; row < p->rows; row++) {
        /* All of the row are skipped, by their weights. */
        const bool weightless = p->on[WEIGHTS] && !p->on[IGNORE] && (row == 1 || test_chance(&r, 8)) && p->special != ID_INF;
        const bool nothing = p->on[IGNORE] && (p->all_ignored || row == (int64_t)(p->seed % 4) || test_chance(&r, 6));
        const int bad = p->on[BAD] && (row == (int64_t)(p->seed / 4 % 4) || test_chance(&r, 5)) ? (int)test_below(&r, p->ids) : -1;
        const int64_t few = 1 + test_below(&r, p->ids), base = test_below(&r, p->vocab);
        for (int k = 0; k < p->ids; k++) {
            const int64_t at = row * laid[IDS].stride + k;
            int64_t id = test_below(&r, p->vocab);
            if (p->on[REPEATED]) id = (base + 7 * test_below(&r, few)) % p->vocab;
            else if (k < 4) id = k == 0 ? 0 : k == 1 ? p->vocab - 1 : (id / 8 * 8 + (k == 2 ? 7 : 0)) % p->vocab;
            if (p->ids < 4 && !p->on[REPEATED] && row % 2) id = test_below(&r, p->vocab);
            if (p->place) id = placed(p, row, k, id);
            double w = test_chance(&r, 6) ? 0 : 1.5 * test_uniform(&r);
            if (k == bad) id = wrong[test_below(&r, LENGTH_OF(wrong))], w = 0.5;
            else if (nothing || (p->on[IGNORE] && test_chance(&r, 4))) id = p->ignore_index;
            else if (weightless || (p->on[WEIGHTS] && w == 0 && test_chance(&r, 2))) w = 0, id = wrong[test_below(&r, LENGTH_OF(wrong))];
            if (p->on[IGNORE] && id == p->ignore_index) w = NAN;
            if (p->special == ID_INF && k == 0 && row == 3) w = 0;
            if (small) ((int32_t *)test_buffer_host(&buffers[IDS]))[at] = (int32_t)id;
            else ((int64_t *)test_buffer_host(&buffers[IDS]))[at] = id;
            if (p->has[WEIGHT]) test_put(TEST_F32, test_buffer_host(&buffers[WEIGHT]), row * laid[WEIGHT].stride + k, (float)w);
        }
    }
}

static bool is_ignored(const problem *p, int64_t row)
{
    bool some = false;
    for (int k = 0; k < p->ids; k++) some = some || status_of(p, row, k) != SKIPPED;
    return !some;
}

static void fill_logits(const problem *p)
{
    void *const host = test_buffer_host(&buffers[LOGITS]);
    uint64_t r = p->seed + 1;
    for (int64_t row = 0; row < p->rows; row++) {
        if (is_ignored(p, row)) continue;
        const bool special = p->special && (row % 2 || p->rows == 1);
        for (int64_t c = 0; c < p->vocab; c++) {
            const bool others = special && (p->special == OTHERS_INF || p->special == ALL_INF);
            double v = others ? -INFINITY : p->offset + 4 * test_uniform(&r);
            if (special && p->special == TIES) v = floor(v / 2);
            if (special && p->special == SURE) v -= (24 + log((double)p->vocab)) / scale_of(p);
            if (special && p->special == SURER) v -= 200 / scale_of(p);
            test_put(p->type, host, row * laid[LOGITS].stride + c, (float)v);
        }
        for (int k = 0; special && k < p->ids; k++) {
            if (status_of(p, row, k) != GOOD) continue;
            const double sure = p->offset + (14 + log((double)p->vocab)) / scale_of(p);
            double v = p->offset + test_uniform(&r);
            switch (p->special) {
            case IDS_INF: v = -INFINITY; break;
            case ID_INF: v = k ? v : -INFINITY; break;
            case ALL_INF: v = -INFINITY; break;
            case PLUS_INF: v = k == p->ids / 2 ? INFINITY : v; break;
            case NOT_A_NUMBER: v = k == p->ids / 2 ? NAN : v; break;
            case CONFIDENT: v = k ? v : sure; break;
            case LOPSIDED: v = k == p->ids - 1 ? sure : v; break;
            case FAR: v -= 60 / scale_of(p); break;
            case OTHERS_INF:
            case SURE:
            case SURER: break;
            default: continue;
            }
            test_put(p->type, host, row * laid[LOGITS].stride + id_of(row, k), (float)v);
        }
        for (int k = 0; special && p->special == HALVES && k < 2; k++) {
            const double v = 20 / scale_of(p) + (k ? 0x1p-20 * test_uniform(&r) : 0);
            test_put(p->type, host, row * laid[LOGITS].stride + id_of(row, k), (float)v);
        }
    }
}

/* Whether the gradient is that of logp or the tail, and not of the loss. */
static bool logp_alone(const problem *p)
{
    return !p->has[UPSTREAM] && (p->has[DLOGP] || p->has[DTAIL]) && !p->on[HOST_UPSTREAM];
}

static bool is_bad(const problem *p, int64_t row)
{
    bool bad = false;
    for (int k = 0; k < p->ids; k++) bad |= status_of(p, row, k) == IS_BAD;
    return bad;
}

static void fill_floats(const problem *p, int t)
{
    uint64_t r = p->seed + (uint64_t)t * 0x100000001;
    for (int64_t row = 0; row < laid[t].rows; row++)
        for (int64_t c = 0; c < laid[t].cols; c++) {
            double v = test_uniform(&r);
            if (t == UPSTREAM && row == 2 && p->on[UPSTREAM_ROWS]) v = NAN;
            if (t == UPSTREAM && row == 3) v = 0;
            if (t == DENOMINATOR) v = p->denominator;
            if (t == ROW_WEIGHT) v = row == 4 ? 0 : 1.5 * v;
            if (t == ROW_WEIGHT && row == 2 && p->direction == BACKWARD && logp_alone(p)) v = NAN; /* the loss has no gradient */
            if (t == TAIL_WEIGHT) v = row % 3 == 2 ? 0 : 1.5 * v;
            if (laid[t].rows == p->rows && t != DENOMINATOR && (p->rows > 1 || t != UPSTREAM) && is_ignored(p, row)) v = NAN;
            if (t == DLOGP && status_of(p, row, (int)c) != GOOD) v = NAN;
            if (t == DLOGP && row >= 3 && is_bad(p, row)) v = 0; /* with no upstream or weight nothing is asked of it */
            test_put(TEST_F32, test_buffer_host(&buffers[t]), row * laid[t].stride + c, (float)v);
        }
}

#define HOST_VALUE (-0.375)
static bool adds_losses(const problem *p) { return p->on[ADD_LOSS]; } /* for test_near_loss */

static double logp_slack(const outcome &o, double z) { return o.log_slack + 16 * 0x1p-24 * (o.max - z) + 2 * o.z_error; }

/* With ranks, where the row is read again: what parts of ranks whose ids leave enough for a difference are off by. Such a rank's
 * state is without the largest of its ids. max: the largest z of the columns that are no ids, sum: of exp(z - max) of them. */
static double parts_slack(const problem *p, double max, double sum, double z_error)
{
    const int64_t *const ends = test_ranks.cut;
    const double u = 0x1p-24;
    double slack = 0;
    for (int rank = 0; rank < p->ranks; rank++) {
        int64_t top = -1;
        double most = -INFINITY, ids = 0, rest = 0, spread = 0;
        for (int64_t c = ends[rank]; c < ends[rank + 1]; c++)
            if (row_id[c] && (top < 0 || row_z[c] > row_z[top])) top = c;
        for (int64_t c = ends[rank]; c < ends[rank + 1]; c++)
            if (c != top) most = fmax(most, row_z[c]);
        for (int64_t c = ends[rank]; c < ends[rank + 1]; c++) {
            const double e = c == top || isinf(row_z[c]) ? 0 : exp(row_z[c] - most);
            if (row_id[c]) ids += e;
            else rest += e;
            if (e > 0) spread -= e * (row_z[c] - most);
        }
        if (ids == 0 || ids > 65 * rest) continue; /* nothing is subtracted; the columns are read again */
        const double whole = ids + rest, lost = 16 * u * (2 + log(whole) + spread / whole) + 2 * u * spread / whole + 2 * z_error;
        slack += whole * lost * exp(most - max) / sum;
    }
    return slack;
}

/* The tail of a row whose z are in row_z. Left in row_id: which columns are ids. */
static void examine_tail(const problem *p, int64_t row, outcome *o)
{
    const double u = 0x1p-24;
    double max = -INFINITY, sum = 0, first = 0, ids = 0, ids_slack = 8 * u;
    for (int64_t c = 0; c < p->vocab; c++) row_id[c] = false;
    for (int k = 0; k < p->ids; k++)
        if (status_of(p, row, k) == GOOD) row_id[id_of(row, k)] = true;
    for (int64_t c = 0; c < p->vocab; c++) {
        const double above = row_z[c] - o->max - o->log_sum;
        if (!row_id[c]) max = fmax(max, row_z[c]);
        else if (exp(above) > 0) ids += exp(above), ids_slack += exp(above) * (logp_slack(*o, row_z[c]) + 2 * u * (2 - above));
    }
    for (int64_t c = 0; c < p->vocab; c++) {
        const double e = row_id[c] || isinf(max) ? 0 : exp(row_z[c] - max);
        if (e > 0) sum += e, first -= e * (row_z[c] - max);
    }
    o->tail = sum > 0 ? (max - o->max) + log(sum) - o->log_sum : -INFINITY;
    const double P = exp(o->tail), parts = p->ranks && sum > 0 ? parts_slack(p, max, sum, o->z_error) : 0;
    const double again = logp_slack(*o, max) + 16 * u * (2 + log(sum) + first / sum) + 2 * u * fabs(o->tail) + parts;
    const double difference = ids_slack / P + 2 * u * fabs(o->tail);
    o->tail_slack = P < 0x1.fcp-7 ? again : P > 0x1.04p-6 ? difference : fmax(again, difference);
    if (sum == 0) o->tail_slack = 0;
}

/* z of a row, left in row_z, and what the header's formula makes of it. */
static outcome examine(const problem *p, int64_t row)
{
    const double u = 0x1p-24;
    outcome o = {};
    double best = 0, max = -INFINITY, largest = 0, y_logit = -INFINITY;
    bool nan = false;
    o.argmax = o.y = -1, o.counted = !is_ignored(p, row);
    if (!o.counted) return o;
    for (int64_t c = 0; c < p->vocab; c++) {
        const double v = (double)value(LOGITS, row, c), z = row_z[c] = z_of(p, v);
        if (o.argmax < 0 || (best == best && (v != v || v > best))) o.argmax = c, best = v;
        nan |= z != z, max = fmax(max, z), largest = isinf(z) ? largest : fmax(largest, fabs(z));
    }
    double sum = 0, first = 0, second = 0;
    o.proper = !nan && !isinf(max), o.max = max;
    for (int64_t c = 0; o.proper && c < p->vocab; c++) {
        const double d = row_z[c] - max, e = exp(d);
        sum += e;
        if (e > 0) first -= e * d, second += e * d * d;
    }
    const double log_sum = log(sum), mean = first / sum;
    /* forward's sum of plain rows is against a reference that may be as far below a sure logit as that is above the others. */
    const bool forward = !p->ranks && (p->direction == FORWARD || (p->direction == BOTH && has_tail(p)));
    const bool sure = forward && (p->special == CONFIDENT || p->special == LOPSIDED);
    double far = sure ? 14 + log((double)p->vocab) : 0;
    if (forward && p->special == SURE) far = 28 + log((double)p->vocab);
    if (forward && p->special == SURER) far = 60; /* beyond it the row is read again */
    o.log_sum = log_sum, o.log_slack = 16 * u * (2 + log_sum + mean) + 4 * u * (far + 4 * (far > 0)), 
    o.z_error = p->on[SOFTCAP] ? 16 * u * largest + (short_cap(p) ? 16 * u * (double)p->softcap : 0) : 0;
    o.lse = nan ? NAN : isinf(max) ? max : max + log_sum;
    o.lse_slack = o.log_slack + 2 * u * fabs(max) + o.z_error;
    o.z_loss = p->on[Z] ? z_loss_of(p) * o.lse * o.lse : 0;
    o.z_slack = 2 * z_loss_of(p) * fabs(o.lse) * o.lse_slack + 4 * u * o.z_loss;
    o.entropy = o.proper ? log_sum + mean : NAN;
    o.entropy_slack = o.log_slack + 16 * u * (mean + second / sum) + 2 * o.z_error * (1 + o.entropy);
    for (int k = 0; k < p->ids; k++) {
        const int status = status_of(p, row, k);
        o.bad |= status == IS_BAD;
        if (status != GOOD) continue;
        const int64_t id = id_of(row, k);
        const double w = weight_of(p, row, k), logp = row_z[id] - max - log_sum, logit = (double)value(LOGITS, row, id);
        if (o.y < 0 || logit > y_logit || (logit == y_logit && id < o.y)) o.y = id, y_logit = logit;
        if (w != 0) o.class_loss -= w * logp, o.class_slack += fabs(w) * logp_slack(o, row_z[id]) + 16 * u * fabs(w * logp);
    }
    if (o.bad || !o.proper) o.class_loss = o.class_slack = o.tail = NAN;
    if (o.bad || !o.proper || !has_tail(p)) return o;
    examine_tail(p, row, &o);
    const double w = p->has[TAIL_WEIGHT] ? (double)value(TAIL_WEIGHT, row, 0) : 0;
    if (w != 0) o.class_loss -= w * o.tail, o.class_slack += fabs(w) * o.tail_slack + 16 * u * fabs(w * o.tail);
    return o;
}

static void examine_all(const problem *p)
{
    row_z = (double *)test_room(row_z, &z_bytes, (size_t)p->vocab * sizeof(double));
    row_id = (bool *)test_room(row_id, &id_bytes, (size_t)p->vocab * sizeof(bool));
    outcomes = (outcome *)test_room(outcomes, &outcome_bytes, (size_t)(p->rows + 1) * sizeof(outcome));
    valid_rows = bad_targets = 0;
    for (int64_t row = 0; row < p->rows; row++) {
        outcomes[row] = examine(p, row);
        valid_rows += outcomes[row].counted, bad_targets += outcomes[row].bad;
    }
}

static double over_of(const problem *p) { return p->on[DIVIDED] ? (double)(float)p->denominator : (double)valid_rows; }
static double low_of(double x) { return isfinite((float)x) ? x - (double)(float)x : 0; }

static void fill_saved(const problem *p)
{
    for (int64_t row = 0; row < p->rows; row++) {
        if (!outcomes[row].counted) continue;
        ((float *)test_buffer_host(&buffers[LSE]))[row] = (float)outcomes[row].lse;
        if (p->has[LSE_LOW]) ((float *)test_buffer_host(&buffers[LSE_LOW]))[row] = (float)low_of(outcomes[row].lse);
        if (p->has[ENTROPY]) ((float *)test_buffer_host(&buffers[ENTROPY]))[row] = (float)outcomes[row].entropy;
        if (p->has[TAIL]) ((float *)test_buffer_host(&buffers[TAIL]))[row] = (float)outcomes[row].tail;
    }
    if (p->has[VALID]) *(int64_t *)test_buffer_host(&buffers[VALID]) = valid_rows;
}

/* Under ASan padding of the logits cannot be read, nor an ignored row, which may be prefetched. */
static void forbid(const problem *p)
{
    (void)p;
#if TEST_ASAN
    simt_allow_poisoned_prefetch(true);
    const layout l = laid[LOGITS];
    for (int64_t row = 0; row < l.rows && !p->on[IN_PLACE]; row++) {
        const int64_t begin = row * l.stride + (outcomes[row].counted ? l.cols : 0),
                      end = row + 1 < l.rows ? (row + 1) * l.stride : row * l.stride + l.cols;
        char *const elements = (char *)test_buffer_device(&buffers[LOGITS]);
        if (begin < end) __asan_poison_memory_region(elements + begin * l.bytes, (size_t)((end - begin) * l.bytes));
    }
#endif
}

static void set_args(const problem *p, void *const *at)
{
    void *const wild = (void *)(uintptr_t)1; /* what a call does not have is not looked at */
    lk_cross_entropy_args &a = args.common;
    args = {};
    a.logits = at[LOGITS], a.row_weight = (const float *)at[ROW_WEIGHT], a.upstream = (const float *)at[UPSTREAM];
    a.dlse = (const float *)at[DLSE], a.dentropy = (const float *)at[DENTROPY], a.denominator = (const float *)at[DENOMINATOR];
    a.lse = (float *)at[LSE], a.lse_low = (float *)at[LSE_LOW], a.entropy = (float *)at[ENTROPY], a.loss = (float *)at[LOSS];
    a.z_loss_out = (float *)at[Z_LOSS], a.argmax = (int64_t *)at[ARGMAX], a.valid_rows = (int64_t *)at[VALID];
    a.weight_sum = (float *)at[WEIGHT_SUM], a.bad_targets = (int32_t *)at[BAD_COUNT], a.dlogits = at[DLOGITS];
    args.target_ids = at[IDS], args.target_weight = (const float *)at[WEIGHT], args.dlogp = (const float *)at[DLOGP];
    args.logp = (float *)at[LOGP], args.ids_per_row = p->ids;
    args.tail_weight = (const float *)at[TAIL_WEIGHT], args.dtail = (const float *)at[DTAIL], args.tail = (float *)at[TAIL];
    args.target_ids_stride = p->stride[IDS], args.target_weight_stride = p->stride[WEIGHT];
    args.dlogp_stride = p->stride[DLOGP], args.logp_stride = p->stride[LOGP];
    a.rows = p->rows, a.vocab = p->vocab, a.logits_stride = p->stride[LOGITS], a.dlogits_stride = p->stride[DLOGITS];
    if (p->on[SCALE]) a.logit_scale = p->scale;
    if (p->on[SOFTCAP]) a.softcap = p->softcap;
    if (p->on[Z]) a.z_loss = p->z_loss;
    a.use_ignore_index = p->on[IGNORE], a.ignore_index = p->on[IGNORE] ? p->ignore_index : 0;
    a.reduction = p->on[MEAN] ? LK_REDUCTION_MEAN : p->on[SUM] ? LK_REDUCTION_SUM : LK_REDUCTION_NONE;
    if (p->on[HOST_UPSTREAM]) a.upstream_value = (float)HOST_VALUE;
    a.accumulate_loss = p->on[ADD_LOSS];
    a.upstream_per_row = p->on[UPSTREAM_ROWS], a.zero_padding = p->on[ZERO_PADDING];
    a.dlogits_dtype = p->on[NARROW] ? p->narrow + 1 : LK_DTYPE_T; /* both lists go f32, f16, bf16, e5m2 */
    a.target_dtype = p->on[INT32] ? LK_TARGET_INT32 : LK_TARGET_INT64, a.path = p->path;
    if (!p->has[WEIGHT]) args.target_weight_stride = 0;
    if (p->direction == FORWARD && p->seed % 2)
        args.dlogp = args.dtail = a.upstream = (const float *)wild, a.dlogits = wild, a.dlogits_stride = args.dlogp_stride = -5, a.upstream_value = NAN;
    if (p->direction == BACKWARD && p->seed % 2) args.logp = a.loss = (float *)wild, args.logp_stride = -5, a.accumulate_loss = 7;
    if (p->direction == BACKWARD && p->seed % 2 && !p->has[TAIL]) args.tail = (float *)wild;
}

/* ---- Columns split over virtual ranks, one after another ------------------------------------------------------------------ */

/* Of a rank: states of all rows, then the logits of their ids, filled up to 16 bytes a row. */
static size_t bytes_of_states(const problem *p)
{
    return (size_t)p->rows * (p->on[HAS_DENTROPY] || p->on[WANT_ENTROPY] || p->on[WANT_ARGMAX] ? 32 : 16);
}
static size_t block_of(const problem *p)
{
    return bytes_of_states(p) + (size_t)p->rows * ((size_t)(p->ids * test_type_bytes[p->type] + 15) / 16 * 16);
}

static rank_args slice_of(const problem *p, int rank)
{
    rank_args x = {args, {}, NULL, test_ranks.table};
    lk_cross_entropy_args &a = x.common.common;
    const int64_t first = test_ranks.cut[rank];
    a.vocab = test_ranks.cut[rank + 1] - first, a.logits_stride = p->stride[LOGITS] ? p->stride[LOGITS] : p->vocab;
    a.logits = (const char *)args.common.logits + first * test_type_bytes[p->type];
    if (gives_gradient(p->direction)) {
        a.dlogits = (char *)args.common.dlogits + first * laid[DLOGITS].bytes, a.dlogits_stride = laid[DLOGITS].stride;
        if (p->on[ZERO_PADDING]) a.dlogits_stride = args.common.dlogits_stride;
    }
    if (a.vocab == 0 && rank % 2) a.logits = NULL, a.dlogits = NULL; /* an empty tensor, as some frameworks have it */
    test_act_as(&x.parallel, rank, p);
    if (test_gathers(p)) x.parallel.all_gather = test_gather;
    else x.states = test_states_of(rank);
    if (p->direction == BACKWARD) x.states = test_left_states(2);
    if (rank > 0) a.bad_targets = NULL; /* each rank counts them all */
    return x;
}

/* The sum of the p of all columns but the target, for backward, by the lse that it gets. */
static double others_of(const problem *p, int64_t row)
{
    const outcome o = examine(p, row);
    const double lse = p->has[LSE_LOW] ? o.lse : (double)(float)o.lse;
    double sum = 0;
    for (int64_t c = 0; o.counted && c < p->vocab; c++) sum += c == o.y ? 0 : exp(row_z[c] - lse);
    return sum;
}

/* A call with the workspace that it asks for. */
static lk_status call_with(const problem *p, rank_query_function ask, rank_function call, rank_args *x)
{
    size_t *const bytes = &x->common.common.workspace_bytes;
    *bytes = 0;
    const lk_status status = ask(x, bytes);
    if (!test_that(status == LK_OK && *bytes <= args.common.workspace_bytes))
        test_detail("a query: %s, %zu bytes; %s", lk_last_error(), *bytes, describe(p));
    return status ? status : call(x, test.stream);
}

static lk_status launch_split(const problem *p)
{
    lk_status status = LK_OK;
    const bool keeps = test_gathers(p) && p->seed % 8 < 4 && !p->on[HAS_DENTROPY]; /* what backward reads of the call's states */
    for (int round = 0; round < (test_gathers(p) && p->ranks > 1 ? 2 : 1); round++)
        for (int rank = 0; rank < p->ranks && !status; rank++) {
            rank_args x = slice_of(p, rank);
            const lk_cross_entropy_ids_args &i = x.common;
            const bool last = round || p->ranks == 1;
            if (keeps) x.states = test_left_states(0);
            if (!last && test_gathers(p)) x.common.common.bad_targets = NULL;
            status = call_with(p, split_query_of[p->direction][p->type], split_call_of[p->direction][p->type], &x);
            if (status || !last || !test_gathers(p)) continue;
            if (i.tail) test_same_on_ranks(i.tail, p->rows, rank);
            else if (i.logp) test_same_on_ranks(i.logp, p->rows ? (p->rows - 1) * laid[LOGP].stride + p->ids : 0, rank);
            else if (i.common.lse) test_same_on_ranks(i.common.lse, p->rows, rank);
            else if (i.common.loss) test_same_on_ranks(i.common.loss, laid[LOSS].rows, rank);
        }
    if (status || p->direction == BACKWARD || (test_gathers(p) && !keeps)) return status;
    rank_args x = slice_of(p, (int)(p->seed % (uint64_t)p->ranks)); /* with columns or without */
    x.states = keeps ? test_left_states(1) : NULL; /* finish by itself leaves the same bits as the call that gathers */
    x.parallel.all_gather = NULL, x.common.common.bad_targets = keeps ? NULL : args.common.bad_targets;
    status = call_with(p, finish_query_of[p->type], finish_of[p->type], &x);
    for (int i = 0; i < 2 && keeps && !status; i++) test_same_on_ranks(test_left_states(i), p->rows, i);
    return status;
}

/* The table, and the workspace of a rank's calls. */
static bool setup_ranks(const problem *p, int run)
{
    size_t bytes = 0, of_finish = 0;
    test_fill_table(p, p->rows, others_of, block_of(p), 0);
    const rank_args x = slice_of(p, p->ranks - 1);
    lk_status status = split_query_of[p->direction][p->type](&x, &bytes);
    if (!status && gives_loss(p->direction)) status = finish_query_of[p->type](&x, &of_finish);
    if (!test_that(status == LK_OK && (bytes >= 128 || p->rows == 0))) test_detail("a query: %s; %s", lk_last_error(), describe(p));
    if (of_finish > bytes) bytes = of_finish;
    test_buffer_size(&buffers[WORKSPACE], bytes, bytes ? 128 : 0, run ? 0x5a : 0xff);
    test_buffer_upload(&buffers[WORKSPACE]);
    args.common.workspace = bytes ? test_buffer_device(&buffers[WORKSPACE]) : NULL, args.common.workspace_bytes = bytes;
    return status == LK_OK;
}

/* Fills and uploads everything for a run, and the args. */
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
    if (p->ranks) test_cut_columns(p->ranks, p->vocab, p->seed);
    fill_ids(p), fill_logits(p);
    for (int t = DLOGP; t <= DENOMINATOR; t++)
        if (p->has[t]) fill_floats(p, t);
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
    forbid(p);
    set_args(p, at);
    if (p->ranks) return setup_ranks(p, run);
    size_t bytes = 12345;
    const lk_status status = query_of[p->direction][p->type](&args, &bytes);
    const size_t most = 256 + (size_t)(p->rows + 64) * ((has_tail(p) ? 48 : 32) + 4 * (size_t)p->ids);
    if (!test_that(status == LK_OK && bytes >= 128 && bytes <= most))
        test_detail("the query says %s, %zu bytes; %s", lk_status_string(status), bytes, describe(p));
    if (status) return false;
    test_buffer_size(&buffers[WORKSPACE], bytes, 128, run ? 0x5a : 0xff);
    test_buffer_upload(&buffers[WORKSPACE]);
    args.common.workspace = test_buffer_device(&buffers[WORKSPACE]), args.common.workspace_bytes = bytes;
    return true;
}

static lk_status launch(const problem *p)
{
    return p->ranks ? launch_split(p) : call_of[p->direction][p->type](&args, test.stream);
}

static void collect(const problem *p)
{
    for (int t = 0; t <= TENSORS; t++)
        if (t == WORKSPACE || (p->has[t] && home_of(p, t) == t)) test_buffer_download(&buffers[t]);
}

/* ---- Against the reference ------------------------------------------------------------------------------------------- */

static void near(const problem *p, int t, int64_t row, int64_t c, double want, double slack)
{
    if (!p->has[t]) return;
    const float got = test_get(laid[t].type, test_buffer_back(&buffers[home_of(p, t)]), row * laid[t].stride + c);
    if (!test_near(laid[t].type, got, want, isfinite(slack) ? slack : 0))
        test_detail("%s[row %lld, %lld] is %.9g, want %.9g +- %.3g; %s", tensor_name[t], (long long)row, (long long)c, (double)got,
                    want, slack, describe(p));
}

static void equal(const problem *p, int t, int64_t row, int64_t want)
{
    if (!p->has[t]) return;
    const int64_t got = integer(t, test_buffer_back(&buffers[t]), row);
    if (!test_that(got == want))
        test_detail("%s[%lld] is %lld, want %lld; %s", tensor_name[t], (long long)row, (long long)got, (long long)want, describe(p));
}

static double row_weight_of(const problem *p, int64_t row)
{
    return p->has[ROW_WEIGHT] && outcomes[row].counted ? (double)value(ROW_WEIGHT, row, 0) : 1;
}

static void verify_loss(const problem *p)
{
    const bool mean = p->on[MEAN], reduced = mean || p->on[SUM];
    const double u = 0x1p-24;
    double loss = 0, z = 0, slack = 0, z_slack = 0;
    for (int64_t row = 0; row < p->rows; row++) {
        outcome o = outcomes[row];
        near(p, LSE, row, 0, o.lse, o.lse_slack);
        near(p, ENTROPY, row, 0, o.entropy, o.entropy_slack);
        equal(p, ARGMAX, row, o.argmax);
        near(p, TAIL, row, 0, o.counted ? o.tail : 0, o.tail_slack);
        for (int k = 0; k < p->ids && p->has[LOGP]; k++) {
            const bool good = status_of(p, row, k) == GOOD, number = o.proper && !o.bad;
            const double logit = good ? z_of(p, (double)value(LOGITS, row, id_of(row, k))) : 0;
            if (!good && !o.bad) near(p, LOGP, row, k, 0, 0);
            else near(p, LOGP, row, k, number ? logit - o.max - o.log_sum : NAN, number ? logp_slack(o, logit) : 0);
        }
        const double w = row_weight_of(p, row), lost = p->has[ROW_WEIGHT] ? u : 0;
        if (o.bad && p->has[ROW_WEIGHT] && w == 0) o.class_loss = o.class_slack = 0;
        o.class_loss *= w, o.class_slack = fabs(w) * o.class_slack + 2 * lost * fabs(o.class_loss);
        o.z_loss *= w, o.z_slack = fabs(w) * o.z_slack + 2 * lost * fabs(o.z_loss);
        if (!reduced) test_near_loss(p, LOSS, row, o.class_loss + o.z_loss, o.class_slack + o.z_slack);
        if (!reduced) test_near_loss(p, Z_LOSS, row, o.z_loss, o.z_slack);
        loss += o.class_loss, slack += o.class_slack + 16 * u * fabs(o.class_loss);
        z += o.z_loss, z_slack += o.z_slack + 16 * u * fabs(o.z_loss);
    }
    if (mean) {
        const double over = over_of(p);
        loss = over == 0 ? NAN : loss / over, slack /= fabs(over), z = over == 0 ? NAN : p->on[Z] ? z / over : 0;
        z_slack /= fabs(over);
    }
    if (reduced) test_near_loss(p, LOSS, 0, loss + z, slack + z_slack), test_near_loss(p, Z_LOSS, 0, z, z_slack);
    equal(p, VALID, 0, valid_rows);
    near(p, WEIGHT_SUM, 0, 0, (double)(valid_rows - bad_targets), 0);
}

/* The gradient of a row's class term, D included. */
static double upstream_of(const problem *p, int64_t row)
{
    double f = 1;
    if (logp_alone(p)) return 0;
    if (p->has[UPSTREAM]) f = (double)value(UPSTREAM, p->on[UPSTREAM_ROWS] ? row : 0, 0);
    if (p->on[HOST_UPSTREAM]) f *= HOST_VALUE;
    f *= row_weight_of(p, row);
    return !p->on[MEAN] ? f : over_of(p) == 0 ? 0 : f / over_of(p);
}

/* A bad row whose dlogits are 0 and not NaN. */
static bool masked(const problem *p, int64_t row)
{
    static const int others[] = {DLSE, DENTROPY, DTAIL, DLOGP};
    bool none = outcomes[row].bad && upstream_of(p, row) == 0;
    for (int i = 0; i < LENGTH_OF(others); i++)
        for (int64_t c = 0; p->has[others[i]] && c < laid[others[i]].cols; c++) none = none && value(others[i], row, c) == 0;
    return none;
}

static void verify_gradient(const problem *p)
{
    const double u = 0x1p-24, a = scale_of(p), softcap = (double)p->softcap;
    const bool fused = p->direction == BOTH, both_parts = !fused && p->has[LSE_LOW], tails = has_tail(p);
    column_u = (double *)test_room(column_u, &column_bytes, (size_t)p->vocab * 2 * sizeof(double));
    column_size = column_u + p->vocab;
    for (int64_t row = 0; row < p->rows; row++) {
        const outcome o = outcomes[row];
        for (int64_t c = p->vocab; c < laid[DLOGITS].end; c++) near(p, DLOGITS, row, c, 0, 0);
        if (!o.counted || o.bad || !o.proper) {
            const bool zero = masked(p, row), either = zero && !o.proper && fused; /* there its logits may make it NaN */
            for (int64_t c = 0; c < p->vocab; c++) {
                const float got = test_get(laid[DLOGITS].type, test_buffer_back(&buffers[home_of(p, DLOGITS)]), row * laid[DLOGITS].stride + c);
                near(p, DLOGITS, row, c, (o.counted && !zero) || (either && got != got) ? NAN : 0, 0);
            }
            continue;
        }
        const double lse = fused || both_parts ? o.lse : (double)(float)o.lse;
        const double lost = fused ? 2 * o.z_error + o.log_slack : both_parts ? o.z_error + u * fabs(low_of(o.lse)) : o.z_error;
        const double f = upstream_of(p, row);
        for (int64_t c = 0; c < p->vocab; c++) column_u[c] = column_size[c] = 0;
        const double dlse = p->has[DLSE] ? (double)value(DLSE, row, 0) : 0, z_part = p->on[Z] ? 2 * z_loss_of(p) * lse * f : 0;
        double total = z_part + dlse, size = fabs(z_part) + fabs(dlse) + (fused && p->on[Z] ? fabs(f) : 0);
        for (int k = 0; k < p->ids; k++) {
            if (status_of(p, row, k) != GOOD) continue;
            const double w = weight_of(p, row, k), ours = w == 0 ? 0 : f * w, given = p->has[DLOGP] ? (double)value(DLOGP, row, k) : 0;
            total += ours - given, size += fabs(ours) + fabs(given);
            column_u[id_of(row, k)] += ours - given, column_size[id_of(row, k)] += fabs(ours) + fabs(given);
        }
        const double tail = fused ? o.tail : (double)(float)o.tail, tail_lost = fused ? o.tail_slack : 0;
        const double P = tails ? exp(tail) : 0, P_lost = P > 0 ? 4 * u * (2 + fabs(tail)) : 0;
        double tail_u = 0, tail_size = 0;
        if (tails) {
            const double w = p->has[TAIL_WEIGHT] ? (double)value(TAIL_WEIGHT, row, 0) : 0, ours = w == 0 ? 0 : f * w;
            const double given = p->has[DTAIL] ? (double)value(DTAIL, row, 0) : 0;
            tail_u = ours - given, tail_size = fabs(ours) + fabs(given);
            total += tail_u, size += tail_size;
        }
        for (int64_t c = 0; c < p->vocab; c++) row_id[c] = false;
        for (int k = 0; k < p->ids; k++)
            if (status_of(p, row, k) == GOOD) row_id[id_of(row, k)] = true;
        const double bend = p->has[DENTROPY] ? -(double)value(DENTROPY, row, 0) : 0;
        const double bend_lost = lost + o.z_error + (fused ? o.entropy_slack : u * o.entropy);
        const double z_lost = p->on[Z] ? 2 * z_loss_of(p) * fabs(f) * (o.z_error + (fused ? o.lse_slack : 0)) : 0;
        const double own = column_u[o.y], own_size = column_size[o.y];
        double rest = P, rest_slack = P * (tail_lost + P_lost); /* p of the columns that are no ids is in the tail */
        for (int64_t i = 0; i <= p->vocab; i++) { /* the target last: it needs the sum of the others */
            const int64_t c = i < p->vocab ? i : o.y;
            if (i == o.y) continue;
            const double x = (double)value(LOGITS, row, c), z = z_of(p, x);
            const double above = fused ? z - o.max - o.log_sum : z - lse, probability = exp(above);
            const bool others = p->ranks ? probability > 0.5 : tails || (probability >= 0.5 && !(fused && p->on[Z]));
            const bool sharp = i == p->vocab && others, other = tails && !row_id[c];
            double slack, want = total * probability - column_u[c];
            const double here = probability > 0 ? probability * (2 * u * (4 + fabs(above)) + lost) : 0;
            double again = probability > 0 && column_size[c] > 0 ? here + probability * 4 * u * fabs(above) : here;
            if (i < p->vocab && !other) rest += probability, rest_slack += here;
            slack = size * (again + 16 * u * probability + 0x1p-126) + z_lost * probability + 16 * u * column_size[c];
            if (sharp) {
                want = (total - own) * probability - own * rest;
                slack = (size - own_size) * (here + 16 * u * probability) + z_lost * probability +
                        own_size * (rest_slack + 16 * u * rest) + size * 0x1p-126;
            }
            if ((p->ranks || !tails) && fabs(probability - 0.5) < 0.01)
                slack += column_size[c] * (2 * here + (i == p->vocab ? fabs(1 - probability - rest) + rest_slack : 0));
            if (other) { /* dz is this times p / P */
                const double share = isinf(z) ? 0 : exp(above - tail);
                const double lost_here = 2 * u * (4 + fabs(above - tail)) + lost + tail_lost;
                const double sizes = size * P + tail_size;
                want = share > 0 ? (total * P - tail_u) * share : 0;
                slack = sizes * ((share > 0 ? share * (lost_here + 16 * u) : 0) + 0x1p-126) + z_lost * probability;
                again = probability > 0 ? probability * (lost_here + P_lost) : 0;
                if (share > 0) slack += size * P * P_lost * share;
            }
            const double spread = probability > 0 ? fabs(above) + o.entropy : 0;
            if (probability > 0) want += bend * probability * (above + o.entropy);
            const double spread_size = spread + (other ? fabs(tail) : 0); /* entropy + tail is rounded */
            if (probability > 0) slack += fabs(bend) * probability * (16 * u * spread_size + bend_lost);
            slack += fabs(bend) * (again * spread + spread * 0x1p-126);
            if (p->on[SOFTCAP]) {
                const double argument = a * x / softcap, root = 1 / cosh(argument), slope = root * root;
                want *= slope;
                slack = slack * slope + (slope > 0 ? fabs(want) * (16 + 8 * fabs(argument)) * u : 0);
                if (fused && !p->ranks && !p->has[ENTROPY] && !p->has[ARGMAX] && !p->has[DENTROPY]) /* forward_backward's codes */
                    slack += fabs(want) * test_code_error(p->type, laid[DLOGITS].type, p->softcap);
                slack += (size + fabs(bend)) * (short_cap(p) ? 0x1p-59 : 0x1p-126);
            }
            near(p, DLOGITS, row, c, a * want, a * slack + 0x1p-126);
        }
    }
}

static void verify(const problem *p)
{
    if (gives_loss(p->direction)) verify_loss(p);
    if (gives_gradient(p->direction)) verify_gradient(p);
    equal(p, BAD_COUNT, 0, 5 + bad_targets);
}

static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++)
        if (is_output(p, t))
            test_settle(&buffers[home_of(p, t)], &kept[t], &kept_bytes[t], keep, laid[t].rows, laid[t].end, laid[t].stride,
                        laid[t].bytes, tensor_name[t], what, describe(p));
    test_buffer_accept_all(&buffers[WORKSPACE]);
    for (int t = 0; t <= TENSORS; t++)
        if (t == WORKSPACE || (p->has[t] && home_of(p, t) == t)) test_buffer_untouched(&buffers[t], tensor_name[t], describe(p));
}

/* ---- Counts of what ran ---------------------------------------------------------------------------------------------- */

enum { SHORT_ROWS = SWITCHES, SEVERAL_PER_LANE, ONE_ID, IGNORED_ROWS, EIGHT, ONE_RANK, RANKS, EMPTY_SLICES, KINDS };
static const char *did_name[KINDS];
static const char *const counted_paths[] = {"fwd auto", "warp", "block", "cluster", "bwd auto", "warp", "block", "cluster",
                                            "both auto", "warp", "block", "cluster"};
static test_counts counts = {counted_paths, did_name, COUNTED, KINDS, {}, {}};

static bool path_here(int path) { return path != LK_CROSS_ENTROPY_CLUSTER || test_clusters(); }
static bool possible(int at, int did)
{
    if (did == EIGHT) return path_here(at % PATHS) && gives_gradient(at / PATHS);
    if (did == SHORT_ROWS) return gives_gradient(at / PATHS) && at % PATHS <= LK_CROSS_ENTROPY_WARP;
    return path_here(at % PATHS) && (did >= SWITCHES || switch_of(at / PATHS, did));
}

static void count(const problem *p)
{
    static const char *const kinds[] = {"short rows", "several ids per lane", "one id", "ignored rows", "one rank", "ranks",
                                        "empty slices"};
    const int at = p->direction * PATHS + p->path, bytes = test_type_bytes[p->type];
    bool plain_row = !p->ranks && p->rows > 0 && p->vocab * bytes <= 8192 && p->vocab * bytes % 16 == 0;
    plain_row = plain_row && laid[DLOGITS].end == p->vocab;
    static const int more[] = {SOFTCAP, WANT_ENTROPY, WANT_ARGMAX, HAS_DENTROPY, NARROW};
    for (const int s : more) plain_row = plain_row && !p->on[s];
    for (int t = LOGITS; t <= DLOGITS; t += DLOGITS - LOGITS)
        plain_row = plain_row && p->at[home_of(p, t)] * bytes % 16 == 0 && laid[t].stride * bytes % 16 == 0;
    counts.runs[at]++;
    for (int s = 0; s < SWITCHES; s++) did_name[s] = switch_name[s], counts.of[at][s] += p->on[s] && p->rows > 0;
    for (int i = 0; i < LENGTH_OF(kinds); i++) did_name[SWITCHES + i] = kinds[i];
    counts.of[at][SHORT_ROWS] += plain_row, counts.of[at][SEVERAL_PER_LANE] += p->ids > 32, counts.of[at][ONE_ID] += p->ids == 1;
    counts.of[at][IGNORED_ROWS] += valid_rows > 0 && valid_rows < p->rows;
    counts.of[at][EIGHT] += p->rows > 0 && laid[DLOGITS].bytes == 1;
    counts.of[at][ONE_RANK] += p->ranks == 1, counts.of[at][RANKS] += p->ranks > 1;
    bool empty = false;
    for (int i = 0; i < p->ranks; i++) empty = empty || test_ranks.cut[i] == test_ranks.cut[i + 1];
    counts.of[at][EMPTY_SLICES] += empty;
}

static const test_op<problem> op = {describe, setup, launch, collect, verify, settle, count};

static void check(problem p)
{
    settle_tensors(&p);
    test_twice(op, &p);
}

/* ---- Cases: each on every direction, path and type ------------------------------------------------------------------- */

static const int ids_of[] = {1, 2, 7, 64, 128, 33, 32};

static void lengths(int type, int direction, int path)
{
    const int vec = 16 / test_type_bytes[type];
    const int64_t vocab[] = {1, vec - 1, vec + 1, 64 * vec, 250, 1027, test_pick(128 * 1024, 4096)};
    for (int i = 0; i < LENGTH_OF(vocab); i++) check(plain(type, direction, path, vocab[i] > 4000 ? 2 : 5, vocab[i], ids_of[i]));
    problem p = plain(type, direction, path, 0, 9, 3);
    check(p);
    p.on[MEAN] = true, p.rows = test_pick(300, 70), p.vocab = 16;
    check(p);
    p.on[IGNORE] = p.all_ignored = true;
    check(p);
    p = plain(type, direction, path, 7, 40, 2);
    p.on[MEAN] = p.on[WEIGHTS] = true;
    check(p);
}

static void options(int type, int direction, int path)
{
    const int64_t vocab[] = {32, 64, 77, 512, 1000, test_pick(5000, 1300)};
    for (int i = 0; i < test_pick(60, 22); i++) {
        problem p = plain(type, direction, path, i % 3 ? 6 : 9, vocab[i % 6], ids_of[i % LENGTH_OF(ids_of)]);
        draw(&p, i);
        if (i % 4 == 0) /* whole vectors, which short rows are made of */
            for (int t = LOGITS; t <= DLOGITS; t += DLOGITS - LOGITS) p.stride[t] = p.at[t] = 0;
        if (i % 5 == 1) p.special = 1 + i / 5 % (SPECIALS - 1);
        check(p);
    }
}

static void specials(int type, int direction, int path)
{
    for (int special = 1; special < SPECIALS; special++)
        for (int i = 0; i < 2; i++) {
            problem p = plain(type, direction, path, 4, i ? 333 : 128, special % 2 ? 5 : 40);
            p.special = special, p.on[SOFTCAP] = i && special % 3 == 0, p.on[WEIGHTS] = i && special != IDS_INF;
            p.on[REPEATED] = p.ids == 40 && i;
            check(p);
        }
    problem weighted = plain(type, direction, path, 4, 128, 3); /* in row 3 the id at -inf has weight 0 */
    weighted.special = ID_INF, weighted.on[WEIGHTS] = true;
    check(weighted);
    const double offsets[] = {1e4, -3e3};
    for (int i = 0; i < 2; i++) { /* lse alone loses what is beside a large number */
        problem p = plain(type, direction, path, 3, 200, 7);
        p.offset = offsets[i], p.on[LOW] = i, p.on[WEIGHTS] = true;
        check(p);
    }
}

/* The bin of all other columns. */
static void tails(int type, int direction, int path)
{
    const int vec = 16 / test_type_bytes[type];
    const int64_t vocab[] = {1, vec - 1, vec + 1, 3, 64 * vec, 250, 1027, 5003, test_pick(300 * 1024, 4096 * 5)};
    for (int i = 0; i < LENGTH_OF(vocab); i++) /* up to 3 columns: with 64 ids they are all ids */
        for (int special = 0; special < 3; special++) {
            problem p = plain(type, direction, path, vocab[i] > 4000 ? 2 : 5, vocab[i], i == 3 ? 64 : ids_of[(i + special) % 7]);
            p.on[WANT_TAIL] = p.on[HAS_TAIL_WEIGHT] = true, p.on[HAS_DTAIL] = special == 1;
            p.on[WEIGHTS] = i % 2, p.on[REPEATED] = i % 3 == 1;
            p.special = special == 2 ? SURE : special == 1 ? CONFIDENT : NOTHING;
            if (i == 7) p.at[LOGITS] = 3, p.at[DLOGITS] = 1, p.stride[LOGITS] = 5010;
            check(p);
        }
    for (int special = 1; special < SPECIALS; special++)
        for (int i = 0; i < 2; i++) {
            problem p = plain(type, direction, path, 5, i ? 333 : 128, special % 2 ? 5 : 40);
            p.special = special, p.on[SOFTCAP] = i && special % 3 == 0, p.on[WEIGHTS] = i, p.on[WANT_TAIL] = !i;
            p.on[REPEATED] = p.ids == 40 && i, p.on[HAS_TAIL_WEIGHT] = true, p.on[HAS_DTAIL] = i && special % 2;
            p.on[HAS_DENTROPY] = special % 4 == 3, p.on[LOW] = special % 2;
            p.on[IGNORE] = p.on[BAD] = p.on[IN_PLACE] = i && special % 2;
            p.offset = i && special >= CONFIDENT ? 1e4 : 0;
            check(p);
        }
}

static void graphs(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 5, 130, 9);
    p.on[MEAN] = p.on[WEIGHTS] = p.on[IGNORE] = p.on[Z] = p.on[HAS_DLOGP] = true;
    p.on[HAS_TAIL_WEIGHT] = p.on[HAS_DTAIL] = type != TEST_F16;
    settle_tensors(&p);
    if (!setup(&p, 0) || !test_launched(launch(&p), describe(&p))) return;
    collect(&p), settle(&p, true, "");
    test_graph(op, &p);
#if defined(__CUDACC__)
    if (!test.small) test_busy(op, &p); /* under compute-sanitizer a call takes longer than the SMs are held */
#endif
}

/* The results of cross_entropy_parallel.cuh for a target are those of one id. */
static void compare_one(const problem *p, const lk_cross_entropy_args &args_of_one)
{
    static const int outputs[] = {LSE, LSE_LOW, ENTROPY, LOSS, Z_LOSS, ARGMAX, VALID, WEIGHT_SUM};
    static void *room;
    lk_status status = LK_OK;
    lk_cross_entropy_parallel_args one = {args_of_one, {}, NULL, NULL};
    if (!room) TEST_CUDA(cudaMalloc(&room, 1 << 20));
    test_ranks.block = bytes_of_states(p), one.common.workspace = room, one.common.workspace_bytes = 1 << 20;
    for (int round = 0; round < 2; round++)
        for (int rank = 0; rank < p->ranks && !status && gives_loss(p->direction); rank++) {
            const rank_args x = slice_of(p, rank);
            const lk_cross_entropy_args &part = x.common.common;
            one.common.logits = part.logits, one.common.vocab = part.vocab, one.common.logits_stride = part.logits_stride;
            one.common.dlogits = part.dlogits, one.common.dlogits_stride = part.dlogits_stride;
            one.parallel = x.parallel, one.parallel.all_gather = test_gather;
            status = split_one_of[p->direction][p->type](&one, test.stream);
        }
    if (!test_launched(status, describe(p))) return;
    collect(p);
    for (const int t : outputs)
        if (is_output(p, t))
            test_settle(&buffers[t], &kept[t], &kept_bytes[t], false, laid[t].rows, laid[t].end, laid[t].stride, laid[t].bytes,
                        tensor_name[t], "one target of ranks", describe(p));
}

/* One id of weight 1 gives the bits of one target. Gradients do so where nothing is divided by for a mean, row weights are not 0
 * (whose sign may differ, so upstream_value is positive here), and backward has no z-loss: what is in another order there is rounded
 * otherwise. */
static void one_target(int type, int direction, int path)
{
    static const int outputs[] = {LSE, LSE_LOW, ENTROPY, LOSS, Z_LOSS, ARGMAX, VALID, WEIGHT_SUM, DLOGITS};
    for (int i = 0; i < test_pick(40, 14); i++) {
        problem p = plain(type, direction, path, 7, i % 2 ? 256 : 301, 1);
        draw(&p, 1000 + i);
        if (i % 4 == 1) p.stride[LOGITS] = p.stride[DLOGITS] = p.at[LOGITS] = p.at[DLOGITS] = 0;
        p.on[WEIGHTS] = p.on[HAS_DLOGP] = p.on[IN_PLACE] = false, p.stride[IDS] = 0;
        p.on[HAS_TAIL_WEIGHT] = p.on[WANT_TAIL] = p.on[HAS_DTAIL] = false;
        if (p.ranks) p.on[ADD_LOSS] = false; /* compare_one calls each rank */
        if (gives_gradient(direction) && i % 2) p.on[MEAN] = p.on[WEIGHTED] = false;
        const bool bits = !p.on[MEAN] && !p.on[WEIGHTED] && !(direction == BACKWARD && p.on[Z]);
        p.special = i % 7 ? 0 : 1 + i / 7 % (SPECIALS - 1), p.offset = i % 3 ? 0 : 2000;
        settle_tensors(&p);
        if (!setup(&p, 0)) continue;
        args.common.upstream_value = fabsf(args.common.upstream_value);
        if (!test_launched(launch(&p), describe(&p))) continue;
        collect(&p), settle(&p, true, "");
        if (!setup(&p, 0)) continue;
        args.common.upstream_value = fabsf(args.common.upstream_value);
        lk_cross_entropy_args one = args.common;
        one.target = args.target_ids;
        if (p.ranks) {
            compare_one(&p, one);
            continue;
        }
        one_query_of[direction][type](&one, &one.workspace_bytes);
        if (!test_that(one.workspace_bytes <= args.common.workspace_bytes)) test_detail("more than with ids; %s", describe(&p));
        if (!test_launched(one_of[direction][type](&one, test.stream), describe(&p))) continue;
        collect(&p);
        for (const int t : outputs)
            if (is_output(&p, t) && (t != DLOGITS || bits))
                test_settle(&buffers[t], &kept[t], &kept_bytes[t], false, laid[t].rows, laid[t].end, laid[t].stride, laid[t].bytes,
                            tensor_name[t], "one target", describe(&p));
    }
}

/* Where the ids lie: all on one rank, and on the columns at slices' ends. */
static void places(int type, int direction, int path)
{
    for (int i = 0; i < 8; i++) {
        problem p = plain(type, direction, path, 4, i % 2 ? 40 : 133, i % 4 < 2 ? 5 : 33);
        p.place = 1 + i % 3, p.on[WEIGHTS] = i % 2, p.on[HAS_DLOGP] = i % 3 == 1, p.on[Z] = i % 4 == 2;
        p.special = i > 4 ? CONFIDENT : i == 4 ? TIES : NOTHING, p.on[SOFTCAP] = i == 3;
        check(p);
        p.on[WANT_TAIL] = i % 2, p.on[HAS_TAIL_WEIGHT] = i % 4 < 3, p.on[HAS_DTAIL] = i % 3 != 1;
        p.special = i % 4 == 0 ? SURE : i % 4 == 1 ? LOPSIDED : i % 4 == 2 ? SURER : OTHERS_INF;
        check(p);
    }
    problem capped = plain(type, direction, path, 4, 40, 33); /* the ids have nearly all of p under a softcap too */
    capped.special = SURE, capped.on[SOFTCAP] = capped.on[WANT_TAIL] = capped.on[HAS_TAIL_WEIGHT] = true;
    check(capped);
    problem many = plain(type, direction, path, 128, 9, 3); /* no room is left over in the workspace */
    many.on[HAS_DENTROPY] = many.on[MEAN] = many.on[WEIGHTS] = true;
    check(many);
    problem half = plain(type, direction, path, 4, 9, 7); /* two ids have nearly half of p each */
    for (int i = 0; i < 3; i++) half.special = HALVES, half.seed = test_hash(half.seed), check(half);
}

/* With columns split over ranks: the i-th time. */
static void of_ranks(int i, int type, int direction, int path)
{
    places(type, direction, path);
    if (i != 1) lengths(type, direction, path);
    if (i) options(type, direction, path);
    if (i % 2) specials(type, direction, path);
    if (i > 1) tails(type, direction, path);
    if (i != 3) one_target(type, direction, path);
    if (i == 1 && path <= LK_CROSS_ENTROPY_WARP) graphs(type, direction, path);
}

static const test_theme themes[] = {
    {"lengths", lengths},       {"options", options}, {"specials", specials}, {"tails", tails},
    {"one target", one_target}, {"graph", graphs, [](int, int path) { return path <= LK_CROSS_ENTROPY_WARP; }},
    {"split over ranks", test_split<of_ranks>},
};

/* ---- Errors ---------------------------------------------------------------------------------------------------------- */

/* The call that errors are told from: every tensor given, 4 rows of 8 columns and 3 ids. */
static void good_call(int type, int direction)
{
    void *at[TENSORS];
    problem p = plain(type, direction, LK_CROSS_ENTROPY_AUTO, 4, 8, 3);
    for (int t = 0; t < TENSORS; t++) {
        test_buffer_size(&buffers[t], 512, 0, 0), test_buffer_upload(&buffers[t]);
        at[t] = test_buffer_device(&buffers[t]);
    }
    p.seed = 0, p.on[MEAN] = p.on[WEIGHTS] = true, p.has[WEIGHT] = true;
    set_args(&p, at);
    size_t bytes = 0;
    if (!test_that(query_of[direction][type](&args, &bytes) == LK_OK)) test_detail("the query: %s", lk_last_error());
    test_buffer_size(&buffers[WORKSPACE], bytes + 256, 0, 0x3c);
    test_buffer_upload(&buffers[WORKSPACE]);
    args.common.workspace = test_buffer_device(&buffers[WORKSPACE]), args.common.workspace_bytes = bytes;
}

static void expect_error(int type, int direction, lk_status want, const char *field)
{
    const lk_status status = call_of[direction][type](&args, test.stream);
    const char *const said = test_expect(status, want, field, "lk_cross_entropy_ids", direction_name[direction], type);
    size_t asked = TEST_NOT_ASKED;
    const lk_status answer = query_of[direction][type](&args, &asked);
    const bool tensors = want == LK_ERR_WORKSPACE || want == LK_ERR_ALIGNMENT || want == LK_ERR_NULL || strstr(said, " and ");
    test_expect_query(answer, tensors ? LK_OK : want, asked, field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = 0; t <= TENSORS; t++) test_expect_unwritten(status, &buffers[t], tensor_name[t], field);
}

#define BAD_CALL(status, field, ...) (good_call(type, direction), __VA_ARGS__, expect_error(type, direction, status, field))
static void errors(int type, int direction)
{
    lk_cross_entropy_args &a = args.common;
    static float anything;
    BAD_CALL(LK_OK, "nothing wrong", a.path = 0);
    BAD_CALL(LK_ERR_VALUE, "target is given; it is not for rows with target_ids", a.target = args.target_ids);
    BAD_CALL(LK_ERR_VALUE, "target_prob is given", a.target_prob = a.logits);
    BAD_CALL(LK_ERR_VALUE, "class_weight is given", a.class_weight = &anything);
    BAD_CALL(LK_ERR_VALUE, "label_smoothing is given", a.label_smoothing = 0.1f);
    BAD_CALL(LK_ERR_VALUE, "statistics is given", a.statistics = 1);
    BAD_CALL(LK_ERR_VALUE, "batch_invariant is given", a.batch_invariant = 1);
    BAD_CALL(LK_ERR_SHAPE, "ids_per_row is 0; it must be 1 to 128", args.ids_per_row = 0);
    BAD_CALL(LK_ERR_SHAPE, "ids_per_row is 129", args.ids_per_row = 129);
    BAD_CALL(LK_ERR_SHAPE, "ids_per_row is -1", args.ids_per_row = -1);
    BAD_CALL(LK_ERR_NULL, "target_ids is NULL", args.target_ids = NULL);
    BAD_CALL(LK_ERR_NULL, "logits is NULL", a.logits = NULL);
    BAD_CALL(LK_OK, "without a tail", (args.tail_weight = args.dtail = NULL, args.tail = NULL));
    BAD_CALL(LK_ERR_ALIGNMENT, "tail_weight", MOVED(args.tail_weight, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "tail is", MOVED(args.tail, 1));
    BAD_CALL(LK_OK, "weights of 1", args.target_weight = NULL);
    BAD_CALL(LK_ERR_SHAPE, "target_ids_stride is 2", args.target_ids_stride = 2);
    BAD_CALL(LK_ERR_SHAPE, "target_weight_stride is -3", args.target_weight_stride = -3);
    BAD_CALL(LK_ERR_SHAPE, "rows is -1", a.rows = -1);
    BAD_CALL(LK_ERR_SHAPE, "vocab is 0", a.vocab = 0);
    BAD_CALL(LK_ERR_VALUE, "softcap", a.softcap = -1);
    BAD_CALL(LK_ERR_VALUE, "target_dtype", a.target_dtype = 2);
    BAD_CALL(LK_ERR_VALUE, "ignore_index", a.ignore_index = 3);
    BAD_CALL(LK_ERR_VALUE, "path", a.path = 4);
    BAD_CALL(LK_ERR_ALIGNMENT, "target_ids", MOVED(args.target_ids, 4));
    BAD_CALL(LK_ERR_ALIGNMENT, "target_weight", MOVED(args.target_weight, 2));
    BAD_CALL(LK_ERR_WORKSPACE, "workspace is NULL", a.workspace = NULL);
    BAD_CALL(LK_ERR_WORKSPACE, "workspace_bytes", a.workspace_bytes--);
    BAD_CALL(LK_ERR_WORKSPACE, "aligned", MOVED(a.workspace, 64));
    if (gives_loss(direction)) {
        BAD_CALL(LK_ERR_SHAPE, "logp_stride is 1", args.logp_stride = 1);
        BAD_CALL(LK_ERR_SHAPE, "logp and target_weight overlap", args.logp = (float *)(uintptr_t)args.target_weight);
        BAD_CALL(LK_ERR_ALIGNMENT, "logp", MOVED(args.logp, 1));
        BAD_CALL(LK_ERR_SHAPE, "tail and tail_weight overlap", args.tail = (float *)(uintptr_t)args.tail_weight);
        BAD_CALL(LK_ERR_WORKSPACE, "workspace_bytes", args.tail = NULL); /* it takes room there */
    } else {
        BAD_CALL(LK_ERR_NULL, "tail is NULL", (args.tail = NULL, args.dtail = NULL));
        BAD_CALL(LK_ERR_NULL, "tail is NULL", (args.tail = NULL, args.tail_weight = NULL));
        BAD_CALL(LK_ERR_NULL, "lse is NULL", a.lse = NULL);
        BAD_CALL(LK_ERR_NULL, "valid_rows is NULL", (a.valid_rows = NULL, a.denominator = NULL));
    }
    if (gives_gradient(direction)) {
        BAD_CALL(LK_ERR_SHAPE, "dlogp_stride is 2", args.dlogp_stride = 2);
        BAD_CALL(LK_ERR_NULL, "dlogits is NULL", a.dlogits = NULL);
    } else {
        BAD_CALL(LK_ERR_NULL, "every output is NULL",
                 (args.logp = args.tail = a.loss = a.z_loss_out = a.lse = a.lse_low = a.entropy = a.weight_sum = NULL,
                  a.argmax = a.valid_rows = NULL, a.bad_targets = NULL));
    }
    size_t asked = TEST_NOT_ASKED;
    if (!test_that(call_of[direction][type](NULL, test.stream) == LK_ERR_NULL && strstr(lk_last_error(), "args is NULL") &&
                   query_of[direction][type](NULL, &asked) == LK_ERR_NULL && asked == TEST_NOT_ASKED))
        test_detail("args NULL: %s", lk_last_error());
}

/* Wrong arguments of ranks, and a callback that fails: its status is the call's. */
static void rank_errors(int type)
{
    enum { FINISH = DIRECTIONS };
    static void *room;
    static const test_bad_rank<rank_args> cases[] = {
        {FORWARD, LK_OK, LK_OK, "", SPOIL((void)a)},
        {FINISH, LK_OK, LK_OK, "", SPOIL((void)a)},
        {BACKWARD, LK_OK, LK_OK, "", SPOIL((void)a)},
        TEST_BAD_RANKS(FORWARD, common.common.vocab), TEST_BAD_RANKS(FINISH, common.common.vocab),
        TEST_BAD_RANKS(BACKWARD, common.common.vocab), TEST_BAD_RANKS(BOTH, common.common.vocab),
        {FORWARD, LK_ERR_SHAPE, LK_ERR_SHAPE, "ids_per_row is 0", SPOIL(a->common.ids_per_row = 0)},
        {FINISH, LK_ERR_SHAPE, LK_ERR_SHAPE, "ids_per_row is 129", SPOIL(a->common.ids_per_row = 129)},
        {FORWARD, LK_ERR_NULL, LK_OK, "states is NULL", SPOIL(a->states = NULL)},
        {FORWARD, LK_ERR_ALIGNMENT, LK_OK, "states", SPOIL(MOVED(a->states, 8))},
        {FINISH, LK_ERR_NULL, LK_OK, "all_states is NULL", SPOIL(a->all_states = NULL)},
        {FINISH, LK_ERR_NULL, LK_OK, "target_ids is NULL", SPOIL(a->common.target_ids = NULL)},
        {FINISH, LK_ERR_SHAPE, LK_OK, "all_states and logp overlap", SPOIL(a->common.logp = (float *)(uintptr_t)a->all_states)},
        {FINISH, LK_ERR_SHAPE, LK_OK, "all_states and logp overlap", /* in the last rank's logits */
         SPOIL(a->common.logp = (float *)((uintptr_t)a->all_states + 2 * test_ranks.block - 4))},
        {FINISH, LK_ERR_WORKSPACE, LK_OK, "workspace is NULL", SPOIL(a->common.common.workspace = NULL)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "states is NULL", SPOIL(a->states = NULL)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "lse is NULL", SPOIL(a->common.common.lse = NULL)},
        {BOTH, LK_ERR_NULL, LK_ERR_NULL, "parallel.all_gather is NULL; without it call forward, finish and backward",
         SPOIL(a->parallel.all_gather = NULL)},
        {BOTH, LK_ERR_SHAPE, LK_ERR_SHAPE, "parallel.vocab_start is", /* sizes come first */
         SPOIL(a->parallel.all_gather = NULL, a->parallel.vocab_start = 8)},
        {BOTH, (lk_status)77, LK_OK, "parallel.all_gather returned 77", SPOIL(a->parallel.all_gather = test_broken_gather)},
        {FORWARD, (lk_status)77, LK_OK, "all_gather returned 77", SPOIL(a->parallel.all_gather = test_broken_gather)},
        {FORWARD, LK_OK, LK_OK, "", SPOIL(a->common.tail = (float *)(uintptr_t)3)}, /* finish writes it */
        {FINISH, LK_ERR_SHAPE, LK_OK, "all_states and tail overlap", SPOIL(a->common.tail = (float *)(uintptr_t)a->all_states)},
        {FINISH, LK_ERR_ALIGNMENT, LK_OK, "tail_weight", SPOIL(a->common.tail_weight = (float *)(uintptr_t)3)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "tail is NULL", SPOIL(a->common.dtail = (float *)a->states)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "tail is NULL", SPOIL(a->common.tail_weight = (float *)a->states)},
        {BOTH, LK_ERR_VALUE, LK_ERR_VALUE, "statistics is given", SPOIL(a->common.common.statistics = 1)},
        {FINISH, LK_ERR_VALUE, LK_ERR_VALUE, "class_weight is given", SPOIL(a->common.common.class_weight = a->common.logp)},
    };
    if (!room) TEST_CUDA(cudaMalloc(&room, 1 << 20));
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        const bool finish = cases[i].call == FINISH;
        const int direction = finish ? (int)FORWARD : cases[i].call;
        problem p = plain(type, direction, LK_CROSS_ENTROPY_AUTO, 4, 8, 3);
        p.ranks = 2, p.seed = 2; /* of forward three calls */
        settle_tensors(&p);
        if (!setup(&p, 0)) continue;
        rank_args x = slice_of(&p, 0);
        x.common.common.workspace = room, x.common.common.workspace_bytes = 1 << 20;
        if (finish) x.states = NULL;
        test_expect_rank(cases, i, &x, finish ? finish_of[type] : split_call_of[direction][type],
                         finish ? finish_query_of[type] : split_query_of[direction][type]);
    }
    size_t asked = TEST_NOT_ASKED;
    if (!test_that(finish_of[type](NULL, test.stream) == LK_ERR_NULL && finish_query_of[type](NULL, &asked) == LK_ERR_NULL))
        test_detail("args NULL: %s", lk_last_error());
}

static void fuzz(void)
{
    const long n = test_fuzz_begin(&counts, 200, 0);
    uint64_t r = test.fuzz_seed * 0x9e3779b97f4a7c15u;
    for (long i = 0; i < n; i++) {
        int path = (int)test_below(&r, PATHS);
        if (!path_here(path)) path = 0;
        problem p = plain((int)test_below(&r, TEST_TYPES), (int)test_below(&r, DIRECTIONS), path, test_below(&r, 12),
                          1 + test_below(&r, test_chance(&r, 4) ? 3000 : 200), 1 + (int)test_below(&r, test_chance(&r, 2) ? 128 : 9));
        draw(&p, (int)i);
        if (test_chance(&r, 2)) p.special = (int)test_below(&r, SPECIALS);
        if (test_chance(&r, 8)) p.offset = 1e4;
        if (test_chance(&r, 3)) p.ranks = 1 + (int)test_below(&r, 9), p.place = (int)test_below(&r, 4);
        check(p);
    }
    test_fuzz_end(&counts, possible, n);
}

/* ---- On the GPU only: beyond 2^31 elements --------------------------------------------------------------------------- */

#if !defined(LK_SIMT)

/* The weight of id number i of all rows. */
static __host__ __device__ float huge_weight(int64_t i) { return 0.5f + (float)test_huge_number(i + 7) / 256.0f; }

typedef struct {
    int32_t *id;
    float *weight;
    int64_t n, vocab;
} huge_ids;

LK_KERNEL void huge_ids_kernel(huge_ids p)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < p.n; i += (int64_t)gridDim.x * blockDim.x) {
        p.id[i] = (int32_t)test_huge_target(i, p.vocab);
        if (p.weight) p.weight[i] = huge_weight(i);
    }
}

/* Forward, then backward in place, or both in one pass in place; sampled rows are recomputed here. by_logp: the gradient is that of
 * sum_k weight logp, by dlogp. With one id the weights are 1. */
static void huge(int64_t rows, int64_t vocab, int ids, int path, bool fused, bool by_logp)
{
    const int64_t n = rows * ids;
    lk_bf16 *const logits = (lk_bf16 *)test_huge_allocate(rows * vocab * 2);
    int32_t *const id = (int32_t *)test_huge_allocate(n * 4);
    float *const weight = ids > 1 ? (float *)test_huge_allocate(n * 4) : NULL, *const logp = (float *)test_huge_allocate(n * 4);
    float *const lse = (float *)test_huge_allocate(rows * 4), *const loss = (float *)test_huge_allocate(rows * 4);
    const huge_ids fill = {id, weight, n, vocab};
    test_huge_fill(logits, rows * vocab, 0);
    TEST_CUDA(lk_launch(huge_ids_kernel, 4096, 256, 0, test.stream, fill));
    problem p = plain(TEST_BF16, fused ? BOTH : FORWARD, path, rows, vocab, ids);
    args = {};
    lk_cross_entropy_args &a = args.common;
    a.logits = logits, a.dlogits = logits, a.lse = lse, a.loss = loss, a.rows = rows, a.vocab = vocab, a.path = path;
    args.target_ids = id, args.target_weight = weight, args.logp = logp, args.ids_per_row = ids, a.target_dtype = LK_TARGET_INT32;
    for (int direction = 0; direction < DIRECTIONS; direction++) {
        size_t bytes = 0;
        if (fused != (direction == BOTH)) continue;
        if (!test_that(query_of[direction][TEST_BF16](&args, &bytes) == LK_OK)) test_detail("the query: %s", lk_last_error());
        if (bytes > a.workspace_bytes) a.workspace_bytes = bytes;
    }
    a.workspace = test_huge_allocate((int64_t)a.workspace_bytes);
    bool ran = test_launched(launch(&p), describe(&p));
    if (by_logp) args.dlogp = weight;
    if (!fused) p.direction = BACKWARD, ran = ran && test_launched(launch(&p), describe(&p));
    enum { SAMPLES = 24, COLUMNS = 48 };
    uint64_t random = (uint64_t)(rows + vocab);
    for (int s = 0; ran && s < (vocab > 1 << 21 ? 1 : SAMPLES); s++) { /* the host is slow */
        const int64_t chosen[3] = {rows - 1, 0, rows / 2}, row = s < 3 ? chosen[s] : test_below(&random, rows), base = row * vocab;
        /* There are 256 values: the sum over the columns is one over the values with how often each occurs. */
        int64_t often[256] = {};
        for (int64_t c = 0; c < vocab; c++) often[test_huge_number(base + c)]++;
        double sum = 0, all = 0, want = 0;
        for (int v = 0; v < 256; v++) sum += (double)often[v] * exp(v / 32.0 - 4);
        const double exact = log(sum);
        const double slack = (16 + sqrt((double)vocab / 256)) * 0x1p-24; /* a chain of vocab / 256 additions loses its root */
        for (int k = 0; k < ids; k++) {
            const double w = weight ? (double)huge_weight(row * ids + k) : 1;
            const double its = test_huge_number(base + test_huge_target(row * ids + k, vocab)) / 32.0 - 4 - exact;
            all += w, want -= w * its;
            if (!test_near(TEST_F32, test_huge_get(TEST_F32, logp, row * ids + k), its, slack * (12 + exact)))
                test_detail("logp[%lld, %d] is wrong; %s", (long long)row, k, describe(&p));
        }
        if (!test_near(TEST_F32, test_huge_get(TEST_F32, lse, row), exact, slack * (8 + exact)))
            test_detail("lse[%lld] is wrong; %s", (long long)row, describe(&p));
        if (!test_near(TEST_F32, test_huge_get(TEST_F32, loss, row), want, slack * (12 + exact) * all))
            test_detail("loss[%lld] is wrong; %s", (long long)row, describe(&p));
        for (int i = 0; i < COLUMNS; i++) {
            int64_t c = i == 0 ? vocab - 1 : i == 1 ? 0 : test_below(&random, vocab);
            if (i > 1 && i < 2 + ids && i < COLUMNS / 2) c = test_huge_target(row * ids + i - 2, vocab);
            double own = 0; /* the weights of the column's ids */
            for (int k = 0; k < ids; k++)
                if (test_huge_target(row * ids + k, vocab) == c) own += weight ? (double)huge_weight(row * ids + k) : 1;
            const double probability = exp(test_huge_number(base + c) / 32.0 - 4 - exact), gradient = all * probability - own;
            if (!test_near(TEST_BF16, test_huge_get(TEST_BF16, logits, base + c), by_logp ? -gradient : gradient,
                           slack * (8 + exact) * (own > 0 ? all + own : all * probability)))
                test_detail("dlogits[row %lld, col %lld] is wrong; %s", (long long)row, (long long)c, describe(&p));
        }
    }
    test_huge_free();
}

/* The last: in forward_backward its workspace has 28 bytes per row, more than fits an 80 GB card beside the tensors. */
static void all_huge(void)
{
    static const int64_t shapes[][3] = {{70001, 32768, 3}, {17000, 131071, 40}, {3, 1 << 30, 128}, {(1 << 29) + 77, 5, 5},
                                        {(1ll << 31) + 77, 1, 1}};
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int path = 0; path < PATHS; path++) {
            const int64_t rows = shapes[i][0], vocab = shapes[i][1];
            const int ids = (int)shapes[i][2];
            if (!path_here(path) || (path >= LK_CROSS_ENTROPY_BLOCK && rows > 1 << 27)) continue;
            for (int fused = 0; fused < (i + 1 < LENGTH_OF(shapes) ? 2 : 1); fused++) {
                const bool by_logp = !fused && ids > 1 && (i + path) % 2;
                if (!test_begin("huge: %lld x %lld, %d ids, %s%s%s", (long long)rows, (long long)vocab, ids, path_name[path],
                                fused ? ", forward_backward" : "", by_logp ? ", by dlogp" : ""))
                    continue;
                huge(rows, vocab, ids, path, fused, by_logp);
                test_finish();
            }
        }
}

#endif

/* ---------------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    test_start(argc, argv);
    for (int direction = 0; direction < DIRECTIONS; direction++)
        for (int type = 0; type < TEST_TYPES; type++)
            if (test_begin("%s %s: errors", direction_name[direction], test_type_name[type])) errors(type, direction), test_finish();
    test_of_types("errors of ranks,", rank_errors);
    for (int at = 0; at < COUNTED; at++)
        if (path_here(at % PATHS))
            test_themes(themes, LENGTH_OF(themes), at / PATHS, at % PATHS, direction_name[at / PATHS], path_name[at % PATHS]);
    TEST_HUGE(all_huge);
    test_all_ran(&counts, possible);
    fuzz();
    return test_end();
}
