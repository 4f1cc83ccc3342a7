// SPDX-License-Identifier: MIT
/* tests/linear_cross_entropy.cu - lk/linear_cross_entropy.cuh against its header's formula in double, on the GPU or on the
 * simulator.
 *
 * Each checked call runs twice, over different poison: the second must give the same bits, so that nothing stale passes for a
 * result. Bytes that are not outputs (zones around every buffer, the workspace's too, the padding of rows, the inputs) must not
 * change. Where rows are compacted, x of ignored tokens is NaN. Most options are drawn, from seeds that depend on the case
 * alone; the counts at the end demand that each of them ran on every path, and each switch alone and with each other one.
 *
 * Limits, in u = 2^-24, besides half an ulp of the output's type. E = 16 u sum_d |x_d w_d| is the error of a logit, a sum of
 * products of float (fast logits: half an ulp of T of it besides; TF32: 2^-9 of the sum), and what it becomes in z under
 * logit_scale and softcap:
 *   lse, loss     E of the row's worst column for each of lse and z_y, and 64 u (1 + log vocab + max |z|); per row also spec's
 *                 1e-5 |loss| + 4e-6 max |z|, in the cases of its own
 *   dlogits       of the sizes of its terms: half an ulp of T, for dZ is kept in it; (64 + 8 |z - lse| + 4 |lse|) u; 2 E and
 *                 the error of lse. Half a unit of f16's smallest subnormal, of dZ as it is stored, where T is f16
 *   dx, dweight, dbias   what these make in the products' sums, and 16 u of the sum of magnitudes (TF32: 2^-9 in dx, dweight);
 *                 dx also half an ulp of bf16 of what the tail columns give in a plan of bf16 chunks
 *   row weights   times the weight's size, and 2 of the product: it is rounded, and so is the sum of two of them
 *   entropy       as lse, and E of each column times p (1 + |z - lse|)
 *   statistics    log sum p^2: 3 of lse's arithmetic and 4 E; mean: the mean of E, 16 of the largest |z|; log p of the argmax:
 *                 lse's arithmetic and 2 E
 *   argmax        a column whose logit is the largest, within the errors of both
 * dentropy's term of dlogits is p (log p + entropy): p's error, and 2 E, lse's and the entropy's errors besides.
 */
#include <cuda_runtime.h>

/* lk asks these what device there is: the plans of other ones are looked at too. */
enum { THIS_DEVICE = -1, NO_DEVICE = 0 }; /* else a compute capability, 80; 90 is code for sm_90 without the a */
static int device_seen = THIS_DEVICE;
static inline cudaError_t seen_device(int *id)
{
    if (device_seen == NO_DEVICE) return cudaSetDevice(9999); /* an error that CUDA keeps, as that of no device */
    return cudaGetDevice(id);
}
#define cudaGetDevice seen_device
#include "lk/lk_gemm.cuh"
static inline bool seen_gemm(const lk_device *device)
{
    return device_seen != 90 && lk_gemm_available(device);
}
#define lk_gemm_available seen_gemm
#include "lk/linear_cross_entropy_parallel.cuh"
#undef lk_gemm_available
#undef cudaGetDevice

static void see_device(int seen)
{
    device_seen = seen;
    lk_code_known = {seen > 0 ? 0 : -1, seen};
}

#include "tests/test.h"

TEST_DEFINE(LINEAR_CROSS_ENTROPY)
TEST_DEFINE(LINEAR_CROSS_ENTROPY_PARALLEL)

typedef lk_linear_cross_entropy_args args_t;
typedef lk_linear_cross_entropy_parallel_args rank_args;
typedef lk_linear_cross_entropy_plan plan_t;

/* The three functions of each direction and type. */
#define OF(name) TEST_OF_TYPES(lk_linear_cross_entropy_##name)
#define ALL(name) {OF(forward##name), OF(backward##name), OF(forward_backward##name)}
#define RANKS(name) {OF(parallel_forward##name), OF(parallel_backward##name), OF(parallel_forward_backward##name)}
static lk_status (*const launch_of[][3])(const args_t *, cudaStream_t) = ALL();
static lk_status (*const query_of[][3])(const args_t *, size_t *) = ALL(_workspace_bytes);
static lk_status (*const plan_function_of[][3])(const args_t *, size_t, plan_t *) = ALL(_plan);
static lk_status (*const saved_bytes_of[])(const args_t *, size_t *) = OF(saved_bytes);
static lk_status (*const rank_saved_bytes_of[])(const rank_args *, size_t *) = OF(parallel_saved_bytes);
static lk_status (*const rank_of[][3])(const rank_args *, cudaStream_t) = RANKS();
static lk_status (*const rank_query_of[][3])(const rank_args *, size_t *) = RANKS(_workspace_bytes);
static lk_status (*const rank_plan_of[][3])(const rank_args *, size_t, plan_t *) = RANKS(_plan);
static lk_status (*const finish_of[])(const rank_args *, cudaStream_t) = OF(parallel_finish);
static lk_status (*const finish_bytes_of[])(const rank_args *, size_t *) = OF(parallel_finish_workspace_bytes);
#undef RANKS
#undef ALL
#undef OF

static lk_linear_cross_entropy_context context;

enum { FORWARD, BACKWARD, BOTH, DIRECTIONS };
static const char *const direction_name[] = {"forward", "backward", "forward_backward"};
enum { FUSED = LK_LINEAR_CROSS_ENTROPY_FUSED, PATHS = FUSED + 1, COUNTED = DIRECTIONS * PATHS };
static const char *const path_name[PATHS] = {"auto", "chunks", "panels", "fused"};
static bool gives_loss(int direction) { return direction != BACKWARD; }
static bool gives_gradient(int direction) { return direction != FORWARD; }
static bool fused_here; /* the device has the fused path */
static bool has_path(int type, int path)
{
    return path != FUSED || (type == TEST_BF16 && fused_here);
}

enum {
    X, WEIGHT, BIAS, TARGET, CLASS_WEIGHT, UPSTREAM, DLSE, LSE, LOSS, Z_LOSS, VALID, WEIGHT_SUM, BAD_COUNT, DX, DWEIGHT, DBIAS,
    ENTROPY, ARGMAX, DENTROPY, DENOMINATOR, ROW_WEIGHTS, LSE_LOW, WORKSPACE, TENSORS = WORKSPACE
};
static const char *const tensor_name[] = {"x",    "weight",     "bias",  "target",     "class_weight", "upstream",
                                          "dlse", "lse",        "loss",  "z_loss_out", "valid_rows",   "weight_sum",
                                          "bad_targets", "dx",  "dweight", "dbias",    "entropy", "argmax", "dentropy",
                                          "denominator", "row_weight", "lse_low", "workspace"};

/* What a call has or has not; every pair is run. BAD: some targets are bad. MASK: some of bias is -inf. OVER: one more token
 * counts than max_counted says. */
enum {
    MEAN, SUM, IGNORE, SMOOTHING, WEIGHTS, Z, SCALE, SOFTCAP, BAD, INT32, HAS_BIAS, BIAS_F32, MASK, FAST, COMPACT, STRIDES,
    ZERO_WHEN_EMPTY, UPSTREAM_ROWS, UPSTREAM_ONE, HAS_DLSE, NO_DX, NO_DWEIGHT, WANT_DBIAS, DWEIGHT_F32, DBIAS_F32, ACCUMULATE,
    TF32, WANT_ENTROPY, WANT_ARGMAX, HAS_DENTROPY, DIVIDED, WEIGHTED, STATISTICS, HOST_UPSTREAM, ADD_LOSS, SWITCHES
};
static const char *const switch_name[] = {
    "mean", "sum", "ignore index", "smoothing", "class weights", "z-loss", "logit scale", "softcap", "bad targets",
    "int32 targets", "bias", "f32 bias", "-inf bias", "fast logits", "max counted", "strides", "zero when empty",
    "upstream a token", "one upstream", "dlse", "dx NULL", "dweight NULL", "dbias", "f32 dweight", "f32 dbias", "accumulate",
    "tf32", "entropy", "argmax", "dentropy", "denominator", "row weights", "statistics", "upstream of the host", "accumulate_loss"};

static bool switch_of(int direction, int s)
{
    if (s == STATISTICS) return direction == FORWARD;
    if (s == ADD_LOSS) return gives_loss(direction);
    if (s == ZERO_WHEN_EMPTY || s == WANT_ENTROPY || s == WANT_ARGMAX) return gives_loss(direction);
    return s < ZERO_WHEN_EMPTY || s == TF32 || s == DIVIDED || s == WEIGHTED || gives_gradient(direction);
}
static bool exclude(int s, int t) /* s < t */
{
    return (s == MEAN && t == SUM) || (s == UPSTREAM_ROWS && t == UPSTREAM_ONE) || (s == SMOOTHING && t == MASK) ||
           (s == SUM && t == DIVIDED);
}
/* What a switch is nothing without; -1: nothing. */
static int needs(int s)
{
    if (s == DIVIDED) return MEAN;
    return s == BIAS_F32 || s == MASK ? HAS_BIAS : s == COMPACT ? IGNORE : s == DBIAS_F32 ? WANT_DBIAS : -1;
}

enum { SOME, ALL_IGNORED, ALL_WEIGHTLESS };

typedef struct {
    int type, direction, path;
    int64_t tokens, hidden, vocab, chunk, panel, slice;
    bool on[SWITCHES], has[TENSORS], over, confident; /* confident: p of the target, one for all tokens, is about 1 - 1e-6 */
    bool opposed;                                     /* dlse all but takes back what comes from the loss */
    double stairs, far;                               /* what 256 columns more add to bias; to that of the confident target */
    int64_t mask_from, mask_to;                       /* columns between them have a bias of -inf */
    int64_t aim;                                      /* the target of every token, and 1; 0: drawn */
    int signs;                                        /* of weight's first column, see positive(); bias's +inf, and 1 */
    int64_t stride[TENSORS]; /* 0: packed */
    int at[TENSORS];         /* how many elements a pointer is past 256-byte alignment */
    float smoothing, z_loss, scale, softcap, one, heavy; /* heavy: the size of row weights beside an upstream */
    int64_t ignore_index;
    int empty, spelt;
    double sigma;  /* of the logits */
    double denominator; /* with DIVIDED */
    size_t budget; /* the workspace; 0: the smallest */
    int ranks;     /* not 0: the columns are split over so many */
    uint64_t seed;
} problem;

static problem plain(int type, int direction, int path, int64_t tokens, int64_t hidden, int64_t vocab)
{
    problem p = {};
    p.type = type, p.direction = direction, p.path = path, p.tokens = tokens, p.hidden = hidden, p.vocab = vocab;
    p.smoothing = 0.1f, p.z_loss = 0.01f, p.scale = 0.7f, p.softcap = 5, p.ignore_index = -100, p.one = 0.75f, p.sigma = 1.3;
    p.denominator = 2.75, p.ranks = test_split_over, p.heavy = 1;
    p.has[LOSS] = p.has[LSE] = true;
    const uint64_t shape = ((uint64_t)tokens * 1009 + (uint64_t)hidden) * 1000003 + (uint64_t)vocab;
    p.seed = test_hash(shape * 101 + (uint64_t)(type * 31 + direction * 11 + path));
    return p;
}

static void settle_tensors(problem *p)
{
    if (p->path == FUSED && p->on[STATISTICS]) p->on[SMOOTHING] = false; /* it has not both */
    if (p->ranks && test_gathers(p)) p->on[ADD_LOSS] = false; /* such calls are made twice, and by each rank */
    const bool back = gives_gradient(p->direction), loss = gives_loss(p->direction);
    for (int s = 0; s < SWITCHES; s++) p->on[s] = p->on[s] && switch_of(p->direction, s);
    for (int s = 0; s < SWITCHES; s++)
        if (p->on[s] && needs(s) >= 0) p->on[needs(s)] = true;
    for (int s = 0; s < SWITCHES; s++)
        for (int t = s + 1; t < SWITCHES; t++)
            if (p->on[s] && exclude(s, t)) p->on[t] = false;
    if (p->on[NO_DX] && p->on[NO_DWEIGHT] && p->direction == BACKWARD) p->on[WANT_DBIAS] = true;
    for (int t = X; t <= WEIGHT; t++) { /* multiples of 16 bytes */
        if (p->path != FUSED) continue;
        p->at[t] = 0, p->stride[t] = ((p->stride[t] ? p->stride[t] : p->hidden) + 7) / 8 * 8;
    }
    p->has[X] = p->has[WEIGHT] = p->has[TARGET] = true, p->has[BIAS] = p->on[HAS_BIAS];
    p->has[DX] = back && !p->on[NO_DX], p->has[DWEIGHT] = back && !p->on[NO_DWEIGHT], p->has[DBIAS] = p->on[WANT_DBIAS];
    p->has[CLASS_WEIGHT] = p->on[WEIGHTS], p->has[UPSTREAM] = p->on[UPSTREAM_ROWS] || p->on[UPSTREAM_ONE];
    p->has[DLSE] = p->on[HAS_DLSE], p->has[ENTROPY] = loss ? p->on[WANT_ENTROPY] || p->on[STATISTICS] : p->on[HAS_DENTROPY];
    p->has[ARGMAX] = p->on[WANT_ARGMAX], p->has[DENTROPY] = p->on[HAS_DENTROPY], p->has[DENOMINATOR] = p->on[DIVIDED];
    p->has[ROW_WEIGHTS] = p->on[WEIGHTED];
    if (!loss) p->has[LSE] = true, p->has[LOSS] = p->has[Z_LOSS] = p->has[VALID] = p->has[WEIGHT_SUM] = false;
}

static const char *describe(const problem *p)
{
    static char text[1300];
    int n = snprintf(text, sizeof text, "%s %s path=%s ranks=%d tokens=%lld hidden=%lld vocab=%lld chunk=%lld panel=%lld "
                     "slice=%lld budget=%zu;",
                     direction_name[p->direction], test_type_name[p->type], path_name[p->path], p->ranks, (long long)p->tokens,
                     (long long)p->hidden, (long long)p->vocab, (long long)p->chunk, (long long)p->panel,
                     (long long)p->slice, p->budget);
    for (int s = 0; s < SWITCHES; s++)
        if (p->on[s]) n += snprintf(text + n, sizeof text - (size_t)n, " %s,", switch_name[s]);
    for (int t = 0; t < TENSORS; t++)
        if (p->has[t]) n += snprintf(text + n, sizeof text - (size_t)n, "%s %s+%d", t ? "," : ";", tensor_name[t], p->at[t]);
    snprintf(text + n, sizeof text - (size_t)n,
             "; e=%g k=%g scale=%g softcap=%g one=%g ignore=%lld over=%d empty=%d sigma=%g stairs=%g mask=%lld-%lld aim=%lld "
             "signs=%d seed=0x%llx", (double)p->smoothing,
             (double)p->z_loss, (double)p->scale, (double)p->softcap, (double)p->one,
             (long long)p->ignore_index, p->over, p->empty, p->sigma, p->stairs, (long long)p->mask_from,
             (long long)p->mask_to, (long long)p->aim, p->signs, (unsigned long long)p->seed);
    return text;
}

static bool is_output(const problem *p, int t)
{
    if (!p->has[t]) return false;
    if (t > DBIAS) return (t <= ARGMAX || t == LSE_LOW) && gives_loss(p->direction);
    return t >= BAD_COUNT || (t >= LSE && gives_loss(p->direction));
}

typedef struct {
    int type, bytes;
    int64_t rows, cols, stride;
} layout;

static layout layout_of(const problem *p, int t)
{
    const bool reduced = p->on[MEAN] || p->on[SUM];
    const int64_t packed = p->stride[t] ? p->stride[t] : p->hidden;
    int type = TEST_F32;
    if (t == X || t == WEIGHT || t == DX || (t == DWEIGHT && !p->on[DWEIGHT_F32]) || (t == BIAS && !p->on[BIAS_F32]) ||
        (t == DBIAS && !p->on[DBIAS_F32]))
        type = p->type;
    const int bytes = t == VALID || t == ARGMAX || (t == TARGET && !p->on[INT32]) ? 8 : test_type_bytes[type];
    if (t == X || t == DX) return {type, bytes, p->tokens, p->hidden, packed};
    if (t == WEIGHT || t == DWEIGHT) return {type, bytes, p->vocab, p->hidden, packed};
    if (t == BIAS || t == DBIAS || t == CLASS_WEIGHT) return {type, bytes, p->vocab, 1, 1};
    const bool one = t == VALID || t == WEIGHT_SUM || t == BAD_COUNT || t == DENOMINATOR ||
                     (t == UPSTREAM && !p->on[UPSTREAM_ROWS]) || ((t == LOSS || t == Z_LOSS) && reduced);
    return {type, bytes, one ? 1 : t == ENTROPY && p->on[STATISTICS] ? 4 * p->tokens : p->tokens, 1, 1};
}

/* ---- Draws ----------------------------------------------------------------------------------------------------------- */

static void draw_places(problem *p, uint64_t *r)
{
    const bool off = test_chance(r, 2);
    for (int t = 0; t <= DBIAS; t++) {
        p->at[t] = off ? (int)test_below(r, 4) : 0;
        p->stride[t] = p->on[STRIDES] ? p->hidden + test_below(r, 9) : 0;
    }
    for (int t = ENTROPY; t < TENSORS; t++) p->at[t] = off ? (int)(test_hash(*r + (uint64_t)t) % 4) : 0;
}

static void draw_values(problem *p, uint64_t *r)
{
    static const float smoothing[] = {0.1f, 0.35f, 1}, z_loss[] = {1e-4f, 0.01f, 0.1f}, scale[] = {0.7f, 3, 0.05f},
                       softcap[] = {5, 30, 2}, one[] = {0.75f, 65536, -1.5e-4f};
    p->smoothing = smoothing[test_below(r, 3)], p->z_loss = z_loss[test_below(r, 3)], p->scale = scale[test_below(r, 3)];
    p->softcap = softcap[test_below(r, 3)], p->one = one[test_below(r, 3)], p->spelt = test_chance(r, 2);
    p->ignore_index = test_chance(r, 2) ? -100 : test_below(r, p->vocab);
    for (int t = LSE; t <= BAD_COUNT; t++) p->has[t] = !test_chance(r, 3);
    if (!p->has[LSE] && !p->has[LOSS]) p->has[VALID] = true;
    p->has[LSE_LOW] = p->has[LSE] && test_hash(p->seed) % 3 > 0;
    static const int64_t chunks[] = {0, 1, 5, 16};
    p->chunk = chunks[test_below(r, 4)];
    p->panel = test_chance(r, 3) ? 0 : 16 * (1 + test_below(r, 4));
    p->budget = test_chance(r, 2) ? 0 : (size_t)1 << (12 + test_below(r, 10));
    p->slice = chunks[test_below(r, 4)];
}

/* Nothing that path 0 would not take the fused plan for. */
static void leave_open(problem *p)
{
    p->chunk = p->panel = p->slice = 0;
    for (int t = X; t <= WEIGHT; t++) p->at[t] = 0, p->stride[t] = (p->hidden + 7) / 8 * 8 + (p->stride[t] ? 8 : 0);
}

static problem drawn(int type, int direction, int path, int64_t tokens, int64_t hidden, int64_t vocab, int seed)
{
    problem p = plain(type, direction, path, tokens, hidden, vocab);
    p.seed = test_hash(p.seed + (uint64_t)seed * 0x10001);
    uint64_t random = p.seed;
    const uint64_t later = test_hash(random + 1);
    for (int s = 0; s < WANT_ENTROPY; s++) p.on[s] = test_chance(&random, 3);
    for (int s = WANT_ENTROPY; s < SWITCHES; s++) p.on[s] = later >> 8 * (s - WANT_ENTROPY) & 1;
    draw_values(&p, &random), draw_places(&p, &random);
    const bool masks = p.on[MASK] && p.on[SOFTCAP] && test_chance(&random, 2); /* without it rows could be all -inf */
    if (masks) p.mask_from = test_below(&random, vocab), p.mask_to = p.mask_from + test_below(&random, vocab) + 1;
    if (path == LK_LINEAR_CROSS_ENTROPY_AUTO && type == TEST_BF16 && test_chance(&random, 2)) leave_open(&p);
    return p;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------------- */

/* What the header's formula says of a token, and within what limits. */
typedef struct {
    bool counted, bad;
    int64_t y;
    double weight, lse, class_loss, z_loss, lse_slack, class_slack, z_slack, most; /* most: the largest |z| */
    double entropy, entropy_slack, best, best_slack; /* best: the largest logit */
    double statistics[3], statistics_slack[3];
} outcome;

static plan_t plan; /* of the last setup */
static test_buffer buffers[TENSORS + 1];
static layout laid[TENSORS];
static unsigned char *kept[TENSORS];
static size_t kept_bytes[TENSORS];
static outcome *outcomes;
static double *z, *z_error, *slope, *dz, *dz_error; /* [tokens, vocab] */
static size_t outcome_bytes, z_bytes, z_error_bytes, slope_bytes, dz_bytes, dz_error_bytes;
static double weight_total, weight_sum;
static int64_t valid_rows, bad_targets;

static float value(int t, int64_t row, int64_t c)
{
    return test_get(laid[t].type, test_buffer_host(&buffers[t]), row * laid[t].stride + c);
}
static int64_t integer(int t, const void *elements, int64_t row)
{
    return laid[t].bytes == 4 ? ((const int32_t *)elements)[row] : ((const int64_t *)elements)[row];
}
static int64_t target_of(int64_t token) { return integer(TARGET, test_buffer_host(&buffers[TARGET]), token); }
static bool ignored(const problem *p, int64_t token) { return p->on[IGNORE] && target_of(token) == p->ignore_index; }
static double weight_of(const problem *p, int64_t c) { return p->has[CLASS_WEIGHT] ? (double)value(CLASS_WEIGHT, c, 0) : 1; }
static double scale_of(const problem *p) { return p->on[SCALE] ? (double)p->scale : 1; }
static double z_loss_of(const problem *p) { return p->on[Z] ? (double)p->z_loss : 0; }
/* What rounding both factors to TF32, at worst towards zero, adds to a product's relative error. */
static double tf32_of(const problem *p) { return p->type == TEST_F32 && p->on[TF32] ? 0x1p-9 : 0; }
/* lk_ce_cap computes z and its slope in the shorter way: z is off by softcap 2^-20, a slope below 2^-59 by itself. */
static bool short_cap(const problem *p) { return p->type != TEST_F32 && p->softcap <= 64; }
static double smoothing_of(const problem *p) { return p->on[SMOOTHING] ? (double)p->smoothing : 0; }
static double over_of(const problem *p)
{
    return p->on[DIVIDED] ? (double)(float)p->denominator : p->has[CLASS_WEIGHT] ? weight_sum : (double)valid_rows;
}
static double z_over_of(const problem *p) { return p->on[DIVIDED] ? over_of(p) : (double)valid_rows; }
/* Whether max_counted is below what counts, so that everything is NaN. */
static bool overflown(const problem *p) { return p->on[COMPACT] && p->over && valid_rows > 1; }

static int64_t max_counted_of(const problem *p)
{
    if (!p->on[COMPACT]) return 0;
    return valid_rows <= 1 ? 1 : overflown(p) ? valid_rows - 1 : p->seed % 3 ? valid_rows : valid_rows + 1;
}
static bool compacted(const problem *p) { return p->on[COMPACT] && max_counted_of(p) < p->tokens; }

static void fill_targets(const problem *p)
{
    const bool small = p->on[INT32];
    const int64_t wrong[] = {-1, p->vocab, -100, small ? INT32_MIN : INT64_MIN, small ? INT32_MAX : INT64_MAX,
                             small ? -p->vocab : ((int64_t)1 << 32) + p->vocab / 2};
    uint64_t random = p->seed + 2;
    for (int64_t token = 0; token < p->tokens; token++) {
        int64_t y = p->confident ? p->vocab / 2 : p->aim ? p->aim - 1 : test_below(&random, p->vocab);
        const int64_t chosen = (int64_t)(p->seed % 4);
        if (p->on[BAD] && (test_chance(&random, 6) || token == chosen)) y = wrong[test_below(&random, LENGTH_OF(wrong))];
        else if (p->on[IGNORE] && (test_chance(&random, 3) || token == (chosen + 1) % 4)) y = p->ignore_index;
        if (p->on[IGNORE] && p->empty == ALL_IGNORED) y = p->ignore_index;
        if (small) ((int32_t *)test_buffer_host(&buffers[TARGET]))[token] = (int32_t)y;
        else ((int64_t *)test_buffer_host(&buffers[TARGET]))[token] = y;
    }
    valid_rows = 0;
    for (int64_t token = 0; token < p->tokens; token++) valid_rows += !ignored(p, token);
}

/* Roughly normal. */
static double normal(uint64_t *random)
{
    return test_uniform(random) + test_uniform(random) + test_uniform(random);
}

static void fill_floats(const problem *p, int t)
{
    uint64_t random = p->seed + (uint64_t)t * 0x100000001;
    const layout l = laid[t];
    for (int64_t row = 0; row < l.rows; row++)
        for (int64_t c = 0; c < l.cols; c++) {
            double v = normal(&random);
            if (t == WEIGHT) v *= p->sigma / sqrt((double)p->hidden);
            if (t == BIAS && p->on[MASK] && (row * 7 + 3) % 5 == 0 && row != p->vocab / 2) v = -INFINITY;
            if (t == BIAS) v += p->stairs * (double)(row / 256);
            if (t == BIAS && row >= p->mask_from && row < p->mask_to) v = -INFINITY;
            if (t == BIAS && p->confident && row == p->vocab / 2) v = p->far + 14 + log((double)p->vocab);
            if (t == DLSE && p->opposed) v = row % 3 ? -1 : row % 2 ? -1.0001 : -0.9999;
            if (t == CLASS_WEIGHT) v = p->empty == ALL_WEIGHTLESS || test_chance(&random, 9) ? 0 : 1 + v / 4;
            if (t == UPSTREAM && !p->on[UPSTREAM_ROWS]) v = p->empty ? NAN : (double)p->one;
            if (t == UPSTREAM && p->on[UPSTREAM_ROWS]) v = row == 3 ? 0 : v * (double)p->one;
            if (t == DENOMINATOR) v = p->denominator;
            if (t == ROW_WEIGHTS) v = row == 4 ? 0 : v * (double)(p->has[UPSTREAM] ? p->heavy : p->one);
            const bool one_a_token = (t == UPSTREAM && p->on[UPSTREAM_ROWS]) || t == DLSE || t == DENTROPY || t == ROW_WEIGHTS || t == X;
            const bool bad = t == ROW_WEIGHTS && (target_of(row) < 0 || target_of(row) >= p->vocab);
            const bool reduced = p->on[MEAN] || p->on[SUM];
            if (bad && row % 2 && !reduced) v = NAN;      /* of no consequence to dweight and dbias */
            if (bad && p->seed % 2 && reduced) v = 0;     /* none of them spoils the loss */
            if (one_a_token && ignored(p, row) && (t != X || compacted(p))) v = NAN;
            test_put(l.type, test_buffer_host(&buffers[t]), row * l.stride + c, (float)v);
        }
}

static double nudge;                                    /* for difference quotients: what is added to element */
static int nudged_tensor = -1;                          /* [nudged_row, nudged_col] of this tensor */
static int64_t nudged_row, nudged_col;
static double exactly(int t, int64_t row, int64_t c)
{
    return (double)value(t, row, c) + (t == nudged_tensor && row == nudged_row && c == nudged_col ? nudge : 0);
}

/* A logit, and its error. */
static double logit_of(const problem *p, int64_t token, int64_t c, double *lost)
{
    const double u = 0x1p-24;
    double v = 0, size = 0;
    for (int64_t d = 0; d < p->hidden; d++) {
        const double term = exactly(X, token, d) * exactly(WEIGHT, c, d);
        v += term, size += fabs(term);
    }
    if (p->has[BIAS]) v += exactly(BIAS, c, 0);
    *lost = 16 * u * (size + (isfinite(v) ? fabs(v) : 0)) + tf32_of(p) * size;
    if (p->on[FAST] && isfinite(v)) *lost += test_half_ulp(p->type, v);
    if (p->on[FAST] && isfinite(v) && p->has[BIAS]) *lost += test_half_ulp(p->type, (double)value(BIAS, c, 0));
    return v;
}

/* z of a token's row with its errors, and what the formula makes of it. */
static outcome examine(const problem *p, int64_t token)
{
    const double u = 0x1p-24, e = smoothing_of(p), a = scale_of(p), s = (double)p->softcap;
    double *const row_z = z + token * p->vocab, *const row_error = z_error + token * p->vocab;
    double *const row_slope = slope + token * p->vocab;
    outcome o = {};
    o.y = target_of(token), o.counted = !ignored(p, token), o.bad = o.counted && (o.y < 0 || o.y >= p->vocab);
    if (!o.counted) return o;
    double max = -INFINITY, error = 0;
    o.best = -INFINITY;
    for (int64_t c = 0; c < p->vocab; c++) {
        double lost;
        const double v = logit_of(p, token, c, &lost);
        if (v > o.best) o.best = v, o.best_slack = lost;
        const double argument = a * v / s, root = 1 / cosh(argument);
        row_slope[c] = p->on[SOFTCAP] ? root * root : 1;
        row_z[c] = p->on[SOFTCAP] ? s * tanh(argument) : a * v;
        row_error[c] = a * lost * fmin(1, row_slope[c] * (1 + 4 * a * lost / s));
        if (p->on[SOFTCAP]) row_error[c] += u * (16 * fabs(row_z[c]) + (short_cap(p) ? 16 * s : 0));
        max = fmax(max, row_z[c]), error = fmax(error, row_error[c]);
        if (isfinite(row_z[c])) o.most = fmax(o.most, fabs(row_z[c]));
    }
    double sum = 0, weighted = 0, squares = 0, total = 0, lost = 0;
    for (int64_t c = 0; c < p->vocab; c++) {
        sum += exp(row_z[c] - max);
        squares += exp(2 * (row_z[c] - max)), total += row_z[c], lost += row_error[c];
        if (e > 0) weighted += weight_of(p, c) * (row_z[c] - max);
    }
    const double log_sum = log(sum), share = e / (double)p->vocab, slack = 64 * u * (1 + log((double)p->vocab) + o.most);
    o.weight = o.bad ? 0 : weight_of(p, o.y), o.lse = max + log_sum, o.lse_slack = error + slack;
    o.entropy = o.lse, o.entropy_slack = o.lse_slack;
    for (int64_t c = 0; c < p->vocab; c++) {
        const double q = exp(row_z[c] - o.lse), far = q > 0 ? fabs(row_z[c] - o.lse) : 0;
        if (q > 0) o.entropy -= q * row_z[c];
        o.entropy_slack += q * ((1 + far) * (row_error[c] + o.lse_slack) + 16 * u * far * (1 + far));
    }
    const double cols = (double)p->vocab, statistics[] = {log(squares) - 2 * log_sum, total / cols, -log_sum};
    const double statistics_slack[] = {4 * error + 3 * slack, lost / cols + 16 * u * o.most + 0x1p-65, 2 * error + slack};
    for (int i = 0; i < 3; i++) o.statistics[i] = statistics[i], o.statistics_slack[i] = statistics_slack[i];
    o.z_loss = z_loss_of(p) * o.lse * o.lse;
    o.z_slack = 2 * z_loss_of(p) * fabs(o.lse) * o.lse_slack + 4 * u * o.z_loss + z_loss_of(p) * o.lse_slack * o.lse_slack;
    if (o.bad) {
        o.class_loss = NAN;
        return o;
    }
    o.class_loss = (1 - e) * o.weight * (o.lse - row_z[o.y]), o.class_slack = (1 - e) * o.weight * 2 * o.lse_slack;
    if (e > 0) o.class_loss += share * (weight_total * log_sum - weighted);
    if (e > 0) o.class_slack += share * weight_total * 2 * o.lse_slack;
    return o;
}

static void examine_all(const problem *p)
{
    const size_t cells = (size_t)(p->tokens * p->vocab + 1) * sizeof(double);
    outcomes = (outcome *)test_room(outcomes, &outcome_bytes, (size_t)(p->tokens + 1) * sizeof(outcome));
    z = (double *)test_room(z, &z_bytes, cells), z_error = (double *)test_room(z_error, &z_error_bytes, cells);
    slope = (double *)test_room(slope, &slope_bytes, cells), dz = (double *)test_room(dz, &dz_bytes, cells);
    dz_error = (double *)test_room(dz_error, &dz_error_bytes, cells);
    weight_total = weight_sum = 0, valid_rows = bad_targets = 0;
    for (int64_t c = 0; c < p->vocab; c++) weight_total += weight_of(p, c);
    for (int64_t token = 0; token < p->tokens; token++) {
        const outcome o = outcomes[token] = examine(p, token);
        valid_rows += o.counted, bad_targets += o.bad, weight_sum += o.counted ? o.weight : 0;
    }
    if (!p->has[CLASS_WEIGHT]) weight_sum = (double)valid_rows;
}

static double row_weight_of(const problem *p, int64_t token)
{
    return p->has[ROW_WEIGHTS] && outcomes[token].counted ? (double)value(ROW_WEIGHTS, token, 0) : 1;
}

/* A token's terms of the loss, times its weight: one of 0 masks a bad target. */
static outcome weighted(const problem *p, int64_t token)
{
    outcome o = outcomes[token];
    const double w = row_weight_of(p, token), u = p->has[ROW_WEIGHTS] ? 0x1p-24 : 0;
    if (o.bad && p->has[ROW_WEIGHTS] && w == 0) o.class_loss = o.class_slack = 0;
    o.class_loss *= w, o.class_slack = fabs(w) * o.class_slack + 2 * u * fabs(o.class_loss);
    if (p->on[Z]) o.z_loss *= w, o.z_slack = fabs(w) * o.z_slack + 2 * u * fabs(o.z_loss); /* without it 0, whatever w is */
    return o;
}

static bool adds_losses(const problem *p) { return p->on[ADD_LOSS]; } /* for test_near_loss */

#define HOST_VALUE (-0.375)
/* The gradients of a token's class term and of its z-loss. */
static void upstream_of(const problem *p, int64_t token, double *f, double *h)
{
    *f = *h = (p->has[UPSTREAM] ? (double)value(UPSTREAM, p->on[UPSTREAM_ROWS] ? token : 0, 0) : 1) * row_weight_of(p, token);
    if (p->on[HOST_UPSTREAM]) *f *= HOST_VALUE, *h = *f;
    if (!p->on[MEAN]) return;
    if (over_of(p) == 0) *f = *h = 0;
    else *f /= over_of(p), *h /= z_over_of(p);
}

/* A bad token whose dx is 0 and not NaN. */
static bool masked(const problem *p, int64_t token)
{
    double f, h;
    upstream_of(p, token, &f, &h);
    return f == 0 && !(p->has[DLSE] && value(DLSE, token, 0) != 0) && !(p->has[DENTROPY] && value(DENTROPY, token, 0) != 0);
}

/* dlogits of all tokens and their errors. */
static void differentiate(const problem *p)
{
    const double u = 0x1p-24, e = smoothing_of(p), share = e / (double)p->vocab, a = scale_of(p);
    /* Exponentials are kept: dweight has roundings of them and of v x; a row that is brought in line has one more. What is
     * 2^-46 of their sum may be 0, since a guessed reference may be 2^80 too large. */
    const double times = plan.path == FUSED && plan.kept_vocab > 0 ? 3 : 1;
    const double half = times * (p->type == TEST_F32 ? u : p->type == TEST_F16 ? 0x1p-11 : 0x1p-8);
    double most = 0; /* of all |f| and |dlse|: f16's dZ is stored relative to it */
    for (int64_t token = 0; token < p->tokens; token++) {
        double f, h;
        if (!outcomes[token].counted || outcomes[token].bad) continue;
        upstream_of(p, token, &f, &h);
        most = fmax(most, fmax(fabs(f), fmax(fabs(h), p->has[DLSE] ? fabs((double)value(DLSE, token, 0)) : 0)));
        most = fmax(most, p->has[DENTROPY] ? fabs((double)value(DENTROPY, token, 0)) : 0);
    }
    for (int64_t token = 0; token < p->tokens; token++) {
        const outcome o = outcomes[token];
        const double *const row_z = z + token * p->vocab, *const row_error = z_error + token * p->vocab;
        double *const row = dz + token * p->vocab, *const error = dz_error + token * p->vocab, f, h, rest = 0;
        for (int64_t c = 0; c < p->vocab; c++) row[c] = error[c] = 0;
        if (!o.counted || o.bad) continue;
        upstream_of(p, token, &f, &h);
        const double class_part = f * ((1 - e) * o.weight + share * weight_total);
        const double dlse = p->has[DLSE] ? (double)value(DLSE, token, 0) : 0;
        const double dentropy = p->has[DENTROPY] ? (double)value(DENTROPY, token, 0) : 0;
        const double own = 2 * z_loss_of(p) * o.lse * h + dlse, rise = class_part + own;
        const double size = fabs(class_part) + fabs(2 * z_loss_of(p) * o.lse * h) + fabs(dlse);
        double worst = 0;
        for (int64_t c = 0; c < p->vocab; c++) worst = fmax(worst, row_error[c]);
        for (int pass = 0; pass < 2; pass++) /* the target last: it needs the sum of the others */
            for (int64_t c = pass ? o.y : 0; c < (pass ? o.y + 1 : p->vocab); c++) {
                const double q = exp(row_z[c] - o.lse), far = isfinite(row_z[c]) ? fabs(row_z[c] - o.lse) : 0;
                if (pass == 0 && c == o.y) continue;
                rest += pass ? 0 : q;
                const double fall = f * share * (pass ? weight_total - o.weight : weight_of(p, c));
                const double terms = pass ? fabs(class_part) * rest + (fabs(own) + size - fabs(class_part)) * q + fabs(fall)
                                          : size * q + fabs(fall);
                const double bend = p->on[SOFTCAP] ? 2 * row_error[c] / (double)p->softcap + 16 * u : 0; /* the slope's error */
                const double relative = half + (64 + 8 * far + 4 * fabs(o.lse)) * u + 2 * worst + o.lse_slack + bend +
                                        (p->on[SOFTCAP] ? u * (16 * fabs(row_z[c]) + (short_cap(p) ? 16 * (double)p->softcap : 0)) : 0);
                const double own_slope = slope[token * p->vocab + c];
                const double spread = q > 0 ? far + fabs(o.entropy) : 0;
                const double bent = q > 0 ? dentropy * q * (row_z[c] - o.lse + o.entropy) : 0;
                const double all = terms + fabs(dentropy) * q * spread;
                row[c] = a * own_slope * ((pass ? own * q - class_part * rest + fall : rise * q - fall) - bent);
                error[c] = a * all * ((own_slope + bend) * relative + bend) + (size + fabs(dentropy) * spread) * (plan.kept_vocab ? 0x1p-46 : short_cap(p) ? 0x1p-59 : 0x1p-126);
                error[c] += a * own_slope * fabs(dentropy) * q * (2 * worst + o.lse_slack + o.entropy_slack + 64 * u * spread);
                if (p->type == TEST_F16) error[c] += most * 2 * a * 0x1p-24 * 0x1p-12;
            }
    }
}

static void fill_saved(const problem *p)
{
    for (int64_t token = 0; token < p->tokens; token++)
        ((float *)test_buffer_host(&buffers[LSE]))[token] = outcomes[token].counted ? (float)outcomes[token].lse : NAN;
    for (int64_t token = 0; p->has[LSE_LOW] && token < p->tokens; token++) {
        const double lse = outcomes[token].lse, low = isfinite(lse) ? lse - (double)(float)lse : 0;
        ((float *)test_buffer_host(&buffers[LSE_LOW]))[token] = outcomes[token].counted ? (float)low : NAN;
    }
    for (int64_t token = 0; p->has[ENTROPY] && token < p->tokens; token++)
        ((float *)test_buffer_host(&buffers[ENTROPY]))[token] = outcomes[token].counted ? (float)outcomes[token].entropy : NAN;
}

static args_t args;
static void *saved_now; /* args.saved of forward and backward */

/* Everything that a direction does not have is garbage: it may not look at it. */
static void spoil_unused(int direction)
{
    void *const nowhere = (void *)0x41;
    if (direction == FORWARD) {
        args.upstream = args.dlse = args.dentropy = (const float *)nowhere, args.dx = args.dweight = args.dbias = nowhere;
        args.dx_stride = args.dweight_stride = args.slice_tokens = -3;
        args.upstream_per_token = args.accumulate = args.dweight_dtype = args.dbias_dtype = 77, args.upstream_value = NAN;
    }
    if (direction == BACKWARD) {
        args.loss = args.z_loss_out = args.weight_sum = (float *)nowhere, args.valid_rows = args.argmax = (int64_t *)nowhere;
        if (!args.dentropy) args.entropy = (float *)nowhere;
        args.zero_when_empty = args.accumulate_loss = 77;
    }
    if (direction == BOTH) args.saved = nowhere;
    if (args.reduction != LK_REDUCTION_MEAN) args.denominator = (const float *)nowhere;
}

static void set_args(const problem *p, void *const *at)
{
    const int own = p->spelt ? p->type + 1 : LK_DTYPE_T; /* both lists go f32, f16, bf16 */
    args_t *const a = &args;
    *a = {};
    a->context = &context, a->x = at[X], a->weight = at[WEIGHT], a->bias = at[BIAS], a->target = at[TARGET];
    a->class_weight = (const float *)at[CLASS_WEIGHT], a->bad_targets = (int32_t *)at[BAD_COUNT];
    a->tokens = p->tokens, a->hidden = p->hidden, a->vocab = p->vocab;
    a->x_stride = p->stride[X], a->weight_stride = p->stride[WEIGHT], a->max_counted = max_counted_of(p);
    a->ignore_index = p->on[IGNORE] ? p->ignore_index : 0, a->chunk_tokens = p->chunk, a->panel_vocab = p->panel;
    a->logit_scale = p->on[SCALE] ? p->scale : 0, a->softcap = p->on[SOFTCAP] ? p->softcap : 0;
    a->label_smoothing = p->on[SMOOTHING] ? p->smoothing : 0, a->z_loss = p->on[Z] ? p->z_loss : 0;
    a->use_ignore_index = p->on[IGNORE];
    a->reduction = p->on[MEAN] ? LK_REDUCTION_MEAN : p->on[SUM] ? LK_REDUCTION_SUM : LK_REDUCTION_NONE;
    a->target_dtype = p->on[INT32], a->bias_dtype = p->on[BIAS_F32] ? LK_DTYPE_F32 : own, a->fast_logits = p->on[FAST];
    a->path = p->path, a->tf32 = p->on[TF32];
    a->upstream = (const float *)at[UPSTREAM], a->dlse = (const float *)at[DLSE], a->dx = at[DX], a->dweight = at[DWEIGHT];
    a->dentropy = (const float *)at[DENTROPY], a->denominator = (const float *)at[DENOMINATOR];
    a->row_weight = (const float *)at[ROW_WEIGHTS], a->statistics = p->on[STATISTICS] ? 1 + (int)(p->seed % 3) : 0;
    a->entropy = (float *)at[ENTROPY], a->argmax = (int64_t *)at[ARGMAX];
    a->dbias = at[DBIAS], a->dx_stride = p->stride[DX], a->dweight_stride = p->stride[DWEIGHT];
    a->slice_tokens = p->slice, a->upstream_per_token = p->on[UPSTREAM_ROWS], a->accumulate = p->on[ACCUMULATE];
    a->dweight_dtype = p->on[DWEIGHT_F32] ? LK_DTYPE_F32 : own, a->dbias_dtype = p->on[DBIAS_F32] ? LK_DTYPE_F32 : own;
    a->loss = (float *)at[LOSS], a->z_loss_out = (float *)at[Z_LOSS], a->lse = (float *)at[LSE];
    a->lse_low = (float *)at[LSE_LOW];
    a->valid_rows = (int64_t *)at[VALID], a->weight_sum = (float *)at[WEIGHT_SUM], a->zero_when_empty = p->on[ZERO_WHEN_EMPTY];
    a->saved = saved_now;
    if (p->on[HOST_UPSTREAM]) a->upstream_value = (float)HOST_VALUE;
    a->accumulate_loss = p->on[ADD_LOSS];
    spoil_unused(p->direction);
}

static lk_status plan_of(const problem *p, size_t budget, plan_t *plan)
{
    return plan_function_of[p->direction][p->type](&args, budget, plan);
}
static lk_status query(const problem *p, size_t *bytes)
{
    return query_of[p->direction][p->type](&args, bytes);
}
/* The smallest workspace, which the plan says. */
static lk_status smallest(const problem *p, size_t *bytes)
{
    plan_t any = {};
    const lk_status status = plan_of(p, SIZE_MAX, &any);
    if (!status) *bytes = any.minimum_bytes;
    return status;
}
static void set_workspace(void *at, size_t bytes)
{
    args.workspace = at, args.workspace_bytes = bytes;
}

/* Also where the last upload's zones are still closed to ASan. */
static void upload(const test_buffer *b)
{
    test_buffer_guard(b, false);
    test_buffer_upload(b);
}

/* ---- Columns split over virtual ranks, one after another ------------------------------------------------------------------ */

static const int64_t *const cut = test_ranks.cut;
static size_t room_of[64], finish_room; /* each rank's workspace, and that of finish */
static bool last_is_empty; /* the last rank has no columns, and the pointer to the count of bad targets */
static char *scratch;     /* outputs of a first round; behind them each rank's dx */
static size_t dx_at, dx_each;
static int64_t handed;    /* tokens of dx that it has handed over */

static char *dx_of(const problem *p, int rank) { return scratch + dx_at + (size_t)rank * dx_each + p->at[DX] * laid[DX].bytes; }

/* dx comes once, with all tokens. */
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

/* The matmuls behind reduce leave so many SMs, and two run at least. */
static void test_left_sms(const problem *p, const rank_args *x)
{
#if defined(LK_SIMT)
    const int sms = x->parallel.reduce_sms, left = test.sms - sms > 2 ? test.sms - sms : 2, want = handed && sms ? left : 0;
    if (!test_that(simt_cublaslt_sms == -1 || simt_cublaslt_sms == want))
        test_detail("a matmul for %d SMs, not %d; %s", simt_cublaslt_sms, want, describe(p));
    simt_cublaslt_sms = 0;
#endif
    (void)p, (void)x;
}

static rank_args slice_of(const problem *p, int rank)
{
    rank_args x = {args, {}, NULL, test_ranks.table};
    args_t &a = x.common;
    const int64_t first = cut[rank];
    a.vocab = cut[rank + 1] - first;
    a.weight = (const char *)args.weight + first * laid[WEIGHT].stride * laid[WEIGHT].bytes;
    if (a.bias) a.bias = (const char *)args.bias + first * laid[BIAS].bytes;
    if (gives_gradient(p->direction)) {
        if (a.dx) a.dx = dx_of(p, rank);
        if (a.dweight) a.dweight = (char *)args.dweight + first * laid[DWEIGHT].stride * laid[DWEIGHT].bytes;
        if (a.dbias) a.dbias = (char *)args.dbias + first * laid[DBIAS].bytes;
    }
    test_act_as(&x.parallel, rank, p);
    x.parallel.reduce = hand, x.parallel.reduce_sms = (int)((rank + p->tokens) % 3); /* 0, 1 or 2 */
    if (test_gathers(p)) x.parallel.all_gather = test_gather;
    if (rank != (last_is_empty ? p->ranks - 1 : 0)) a.bad_targets = NULL; /* each rank counts them all */
    if (!test_gathers(p)) x.states = test_states_of(rank);
    if (p->direction == BACKWARD) x.states = test_left_states(2);
    a.workspace_bytes = room_of[rank];
    return x;
}

/* The sum of the p of all other columns, for backward, by the lse that it gets. */
static double others_of(const problem *p, int64_t token)
{
    const outcome o = outcomes[token];
    double sum = o.counted ? 0 : NAN;
    for (int64_t c = 0; o.counted && c < p->vocab; c++)
        sum += c == o.y ? 0 : exp(z[token * p->vocab + c] - (double)(float)o.lse);
    return sum;
}

static void make_table(const problem *p)
{
    const bool more = p->on[SMOOTHING] || p->has[ENTROPY] || p->has[ARGMAX] || (p->direction == BOTH && p->on[HAS_DENTROPY]);
    dx_at = (256 + (size_t)(p->vocab * laid[DWEIGHT].stride + p->vocab) * 4 + 255) / 256 * 256;
    dx_each = (size_t)(p->tokens * laid[DX].stride * laid[DX].bytes + 512) / 256 * 256;
    scratch = test_fill_table(p, p->tokens, others_of, (size_t)p->tokens * (p->on[STATISTICS] ? 40 : more ? 32 : 16),
                              dx_at + (size_t)p->ranks * dx_each);
    if (last_is_empty) test_ranks.cut[p->ranks - 1] = p->vocab;
}

/* Each rank's workspace, and the plan of one that has columns. */
static bool setup_ranks(const problem *p, int run)
{
    size_t most = 0;
    make_table(p);
    plan_t of = {};
    plan = {};
    for (int rank = 0; rank < p->ranks; rank++) {
        const rank_args x = slice_of(p, rank);
        lk_status status = rank_plan_of[p->direction][p->type](&x, SIZE_MAX, &of);
        const size_t least = status ? 0 : of.minimum_bytes;
        room_of[rank] = p->budget > least ? p->budget : least;
        if (!status) status = rank_plan_of[p->direction][p->type](&x, room_of[rank], &of);
        if (!test_that(status == LK_OK && of.workspace_bytes <= room_of[rank]))
            test_detail("the queries of rank %d say %s (%s); %s", rank, lk_status_string(status), lk_last_error(), describe(p));
        if (of.path > plan.path || of.kept_vocab > plan.kept_vocab) plan = of;
        if (p->direction != BACKWARD) finish_bytes_of[p->type](&x, &finish_room);
        if (room_of[rank] > most) most = room_of[rank];
    }
    if (p->direction == BOTH && finish_room > most) most = finish_room;
    if (p->direction == FORWARD && finish_room > most) most = finish_room;
    test_buffer_size(&buffers[WORKSPACE], most, run ? LK_WORKSPACE_ALIGNMENT : 0, run ? 0x5a : 0xff);
    upload(&buffers[WORKSPACE]);
    set_workspace(most ? test_buffer_device(&buffers[WORKSPACE]) : NULL, most);
    return true;
}

/* forward in three calls; backward; forward_backward with a collective. */
static lk_status launch_split(const problem *p)
{
    lk_status status = LK_OK;
    const bool back = gives_gradient(p->direction); /* else these pointers are garbage */
    const bool gathers = test_gathers(p);
    const bool keeps = gathers && p->seed % 8 < 4 && !(back && p->on[HAS_DENTROPY]); /* what backward reads of the call's states */
    const int rounds = gathers && p->ranks > 1 ? 2 : 1;
    for (int round = 0; round < rounds; round++)
        for (int rank = 0; rank < p->ranks && !status; rank++) {
            rank_args x = slice_of(p, rank);
            args_t &a = x.common;
            const bool rehearsal = round + 1 < rounds;
            handed = 0;
            if (keeps) x.states = test_left_states(0);
            if (rehearsal) a.bad_targets = NULL;
            if (rehearsal && back && a.dweight) a.dweight = scratch, a.dweight_stride = laid[DWEIGHT].stride;
            if (rehearsal && back && a.dbias) a.dbias = scratch + p->vocab * laid[DWEIGHT].stride * 4 + 64;
            status = rank_of[p->direction][p->type](&x, test.stream);
            if (!status && test_gathers(p) && a.lse && !rehearsal) test_same_on_ranks(a.lse, p->tokens, rank);
            const bool all = handed == (back && a.dx ? p->tokens : 0);
            test_left_sms(p, &x);
            if (!status && !test_that(all)) test_detail("dx of %lld tokens was handed over; %s", (long long)handed, describe(p));
        }
    if (status || p->direction == BACKWARD || (test_gathers(p) && !keeps)) return status;
    rank_args x = slice_of(p, last_is_empty ? p->ranks - 1 : 0);
    x.states = keeps ? test_left_states(1) : NULL; /* finish by itself leaves the same bits as the call that gathers */
    if (keeps) x.common.bad_targets = NULL;
    x.parallel.all_gather = NULL, x.common.workspace_bytes = finish_room;
    status = finish_of[p->type](&x, test.stream);
    for (int i = 0; i < 2 && keeps && !status; i++) test_same_on_ranks(test_left_states(i), p->tokens, i);
    return status;
}

static lk_status launch(const problem *p)
{
    if (p->ranks) return launch_split(p);
    return launch_of[p->direction][p->type](&args, test.stream);
}

/* Fills and uploads everything for a run, and the args structs. */
static bool setup(const problem *p, int run)
{
    void *at[TENSORS] = {};
    for (int t = 0; t < TENSORS; t++) {
        const layout l = laid[t] = layout_of(p, t);
        if (!p->has[t]) continue;
        const bool out = is_output(p, t);
        const int64_t elements = l.rows ? (l.rows - 1) * l.stride + l.cols : 0;
        test_buffer_size(&buffers[t], (size_t)(elements * l.bytes), (size_t)(p->at[t] * l.bytes),
                         run ? (out ? 0xff : 0x7f) : (out ? 0x5a : 0xff));
    }
    fill_targets(p);
    const int drawn_tensors[] = {X, WEIGHT, BIAS, CLASS_WEIGHT, UPSTREAM, DLSE, DENTROPY, DENOMINATOR,
                                 ROW_WEIGHTS};
    for (int i = 0; i < LENGTH_OF(drawn_tensors); i++)
        if (p->has[drawn_tensors[i]]) fill_floats(p, drawn_tensors[i]);
    if (p->on[ACCUMULATE] && p->has[DWEIGHT]) fill_floats(p, DWEIGHT);
    if (p->on[ACCUMULATE] && p->has[DBIAS]) fill_floats(p, DBIAS);
    if (p->has[BAD_COUNT]) *(int32_t *)test_buffer_host(&buffers[BAD_COUNT]) = 5;
    for (int t = LOSS; t <= Z_LOSS && adds_losses(p); t++)
        if (p->has[t]) test_put_losses(&buffers[t], laid[t].rows, t);
    if (run == 0) examine_all(p);
    if (p->direction == BACKWARD) fill_saved(p);
    for (int t = 0; t < TENSORS; t++)
        if (p->has[t]) upload(&buffers[t]), at[t] = test_buffer_device(&buffers[t]);
    set_args(p, at);
    size_t least = 12345, wanted = 12345;
    if (p->ranks) return setup_ranks(p, run);
    lk_status status = smallest(p, &least);
    size_t bytes = p->budget > least ? p->budget : least;
    if (!status) status = query(p, &wanted);
    if (!status) status = plan_of(p, bytes, &plan);
    const bool good = status == LK_OK && plan.workspace_bytes <= bytes && plan.minimum_bytes == least && wanted >= least &&
                      (p->tokens ? plan.chunks >= 1 : wanted == 0);
    if (!test_that(good))
        test_detail("the queries say %s (%s), %zu and at least %zu bytes, a plan of %zu; %s", lk_status_string(status),
                    lk_last_error(), wanted, least, plan.workspace_bytes, describe(p));
    test_buffer_size(&buffers[WORKSPACE], bytes, run ? LK_WORKSPACE_ALIGNMENT : 0, run ? 0x5a : 0xff);
    upload(&buffers[WORKSPACE]);
    set_workspace(bytes ? test_buffer_device(&buffers[WORKSPACE]) : NULL, bytes);
    return good;
}

static bool launched(const problem *p, lk_status status) { return test_launched(status, describe(p)); }

static void collect(const problem *p)
{
    for (int t = 0; t <= TENSORS; t++)
        if (t == WORKSPACE || p->has[t]) test_buffer_download(&buffers[t]);
    if (p->ranks && p->has[DX]) test_sum_device_parts(laid[DX], dx_of(p, 0), dx_each, test_buffer_back(&buffers[DX]));
}

/* ---- Against the reference ------------------------------------------------------------------------------------------- */

static float result(int t, int64_t row, int64_t c)
{
    return test_get(laid[t].type, test_buffer_back(&buffers[t]), row * laid[t].stride + c);
}

static void near(const problem *p, int t, int64_t row, int64_t c, double want, double slack)
{
    if (!p->has[t]) return;
    const float got = result(t, row, c);
    const bool one_each = (laid[t].rows == p->tokens || t == ENTROPY) && t != DX && t != DWEIGHT && t != DBIAS;
    const bool no_z = t == Z_LOSS && !p->on[Z];
    const bool stays_0 = p->ranks && (no_z || (one_each && ignored(p, row % p->tokens))); /* finish knows nothing of max_counted */
    if (overflown(p) && !stays_0) want = NAN;
    if (!isfinite(slack)) slack = 0;
    /* it is rounded from somewhere within slack of want, where an ulp may be twice that at want */
    if (isfinite(want)) slack += test_half_ulp(laid[t].type, fabs(want) + slack) - test_half_ulp(laid[t].type, want);
    if (!test_near(laid[t].type, got, want, slack))
        test_detail("%s[%lld, %lld] is %.9g, want %.9g +- %.3g; %s; plan: %s", tensor_name[t], (long long)row, (long long)c,
                    (double)got, want, slack, describe(p), plan.text);
}

/* The argmax is a column with the largest logit, the first one where all are alike. */
static void verify_argmax(const problem *p, int64_t token)
{
    const outcome o = outcomes[token];
    const int64_t got = integer(ARGMAX, test_buffer_back(&buffers[ARGMAX]), token);
    double lost = 0;
    bool right = got == -1;
    if (o.counted && !overflown(p)) {
        right = got >= 0 && got < p->vocab && (p->sigma > 0 || p->has[BIAS] || got == 0);
        right = right && (o.best == -INFINITY || logit_of(p, token, got, &lost) + lost >= o.best - o.best_slack);
    }
    if (!test_that(right))
        test_detail("argmax[%lld] is %lld; %s; plan: %s", (long long)token, (long long)got, describe(p), plan.text);
}

static void verify_loss(const problem *p)
{
    const bool mean = p->on[MEAN], reduced = mean || p->on[SUM];
    double loss = 0, z_part = 0, slack = 0, z_slack = 0;
    for (int64_t token = 0; token < p->tokens; token++) {
        const outcome o = weighted(p, token);
        near(p, LSE, token, 0, o.lse, o.lse_slack);
        if (p->has[LSE_LOW]) { /* the rest of lse, or 0 */
            const float lse = result(LSE, token, 0), low = result(LSE_LOW, token, 0);
            const double error = fabs((double)lse + (double)low - o.lse), rest = isfinite(lse) ? 0x1p-23 * fabs((double)lse) : 0;
            if (!test_that(fabs((double)low) <= rest) || (rest > 0 && o.counted && !test_within(error, o.lse_slack)))
                test_detail("lse_low[%lld] is %.9g beside %.9g; %s", (long long)token, (double)low, (double)lse, describe(p));
        }
        near(p, ENTROPY, token, 0, o.entropy, o.entropy_slack);
        for (int i = 0; i < 3 && p->on[STATISTICS]; i++)
            near(p, ENTROPY, (i + 1) * p->tokens + token, 0, o.statistics[i], o.statistics_slack[i]);
        if (p->has[ARGMAX]) verify_argmax(p, token);
        if (!reduced) test_near_loss(p, LOSS, token, o.class_loss + o.z_loss, o.class_slack + o.z_slack);
        if (!reduced) test_near_loss(p, Z_LOSS, token, o.z_loss, o.z_slack);
        loss += o.class_loss, slack += o.class_slack + 16 * 0x1p-24 * fabs(o.class_loss);
        z_part += o.z_loss, z_slack += o.z_slack + 16 * 0x1p-24 * fabs(o.z_loss);
    }
    if (mean && over_of(p) == 0) {
        const double nothing = p->on[ZERO_WHEN_EMPTY] ? 0 : NAN;
        loss = loss != loss ? NAN : nothing, z_part = z_part != z_part ? NAN : nothing;
    } else if (mean) {
        const double over = over_of(p), z_over = z_over_of(p);
        loss /= over, slack /= fabs(over), z_part = p->on[Z] ? z_part / z_over : 0, z_slack /= fabs(z_over);
    }
    if (reduced) test_near_loss(p, LOSS, 0, loss + z_part, slack + z_slack), test_near_loss(p, Z_LOSS, 0, z_part, z_slack);
    if (p->has[VALID] && !test_that(integer(VALID, test_buffer_back(&buffers[VALID]), 0) == valid_rows))
        test_detail("valid_rows is not %lld; %s", (long long)valid_rows, describe(p));
    const double weights = p->has[CLASS_WEIGHT] ? weight_sum : (double)(valid_rows - bad_targets);
    const double off = fabs((double)(p->has[WEIGHT_SUM] ? result(WEIGHT_SUM, 0, 0) : 0) - weights);
    if (p->has[WEIGHT_SUM] && !test_within(off, 16 * 0x1p-24 * weights))
        test_detail("weight_sum is not %g; %s", weights, describe(p));
}

static bool tail_columns(void)
{
    return strstr(plan.text, " tail column") != NULL;
}

static void verify_gradient(const problem *p)
{
    const double u = 0x1p-24;
    const bool bf16_chunks = p->type == TEST_BF16 && plan.path == LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    const int64_t rounded_twice = bf16_chunks && tail_columns() ? p->vocab % 8 : 0; /* f16's are summed in f32 */
    differentiate(p);
    for (int64_t token = 0; p->has[DX] && token < p->tokens; token++)
        for (int64_t d = 0; d < p->hidden; d++) {
            double sum = 0, slack = 0;
            for (int64_t at = 0; at < p->vocab; at++) { /* the last columns first */
                const int64_t c = p->vocab - 1 - at;
                const double w = (double)value(WEIGHT, c, d), g = dz[token * p->vocab + c];
                sum += g * w, slack += fabs(w) * dz_error[token * p->vocab + c] + (16 * u + tf32_of(p)) * fabs(g * w);
                if (at + 1 == rounded_twice) slack += test_half_ulp(p->type, fabs(sum) + slack);
            }
            for (int rank = 0; rank < p->ranks; rank++) { /* each rank's part is rounded */
                double part = 0;
                for (int64_t c = cut[rank]; c < cut[rank + 1]; c++)
                    part += dz[token * p->vocab + c] * (double)value(WEIGHT, c, d);
                slack += test_half_ulp(p->type, fabs(part) + slack);
            }
            near(p, DX, token, d, outcomes[token].bad && !masked(p, token) ? NAN : sum, slack);
        }
    for (int64_t c = 0; c < p->vocab; c++) {
        double bias = 0, bias_slack = 0;
        for (int64_t d = 0; p->has[DWEIGHT] && d < p->hidden; d++) {
            double sum = p->on[ACCUMULATE] ? (double)value(DWEIGHT, c, d) : 0, slack = 16 * u * fabs(sum), targets = 0;
            for (int64_t token = 0; token < p->tokens; token++) {
                if (!outcomes[token].counted) continue;
                const double x = (double)value(X, token, d), g = dz[token * p->vocab + c];
                sum += g * x, slack += fabs(x) * dz_error[token * p->vocab + c] + (16 * u + tf32_of(p)) * fabs(g * x);
                if (outcomes[token].y == c) targets += g * x;
            }
            /* fused adds the targets' part to what has been rounded */
            if (plan.path == FUSED && targets != 0) slack += test_half_ulp(laid[DWEIGHT].type, fabs(sum - targets) + slack);
            near(p, DWEIGHT, c, d, sum, slack);
        }
        if (!p->has[DBIAS]) continue;
        if (p->on[ACCUMULATE]) bias = (double)value(DBIAS, c, 0), bias_slack = 16 * u * fabs(bias);
        for (int64_t token = 0; token < p->tokens; token++) {
            const double g = dz[token * p->vocab + c];
            bias += g, bias_slack += dz_error[token * p->vocab + c] + 16 * u * fabs(g);
        }
        near(p, DBIAS, c, 0, bias, bias_slack);
    }
}

static void verify(const problem *p)
{
    if (gives_loss(p->direction)) verify_loss(p);
    if (gives_gradient(p->direction)) verify_gradient(p);
    const int64_t want = 5 + bad_targets;
    if (p->has[BAD_COUNT] && !test_that(integer(BAD_COUNT, test_buffer_back(&buffers[BAD_COUNT]), 0) == want))
        test_detail("bad_targets is not %lld; %s", (long long)want, describe(p));
}

/* Keeps the outputs' bits or compares them with those that were kept; then nothing else may have changed. */
static void settle(const problem *p, bool keep, const char *what)
{
    for (int t = 0; t < TENSORS; t++)
        if (is_output(p, t))
            test_settle(&buffers[t], &kept[t], &kept_bytes[t], keep, laid[t].rows, laid[t].cols, laid[t].stride,
                        (int)laid[t].bytes, tensor_name[t], what, describe(p));
    test_buffer_accept_all(&buffers[WORKSPACE]);
    for (int t = 0; t <= TENSORS; t++)
        if (t == WORKSPACE || p->has[t]) test_buffer_untouched(&buffers[t], tensor_name[t], describe(p));
}

/* ---- Counts of what ran ---------------------------------------------------------------------------------------------- */

static const char *did_name[TEST_MOST_OPTIONS];
static int did_direction[TEST_MOST_OPTIONS]; /* DIRECTIONS: any */
static int did_panels[TEST_MOST_OPTIONS];    /* 1: only where the path has panels; -1: only where it may have none */
static const char *const counted_paths[] = {"fwd auto", "chunks", "panels", "fused",
                                            "bwd auto", "chunks", "panels", "fused",
                                            "both auto", "chunks", "panels", "fused"};
static test_counts counts = {counted_paths, did_name, COUNTED, 0, {}, {}};
static long alone[COUNTED][SWITCHES], pairs[COUNTED][SWITCHES][SWITCHES];

static bool possible(int at, int did)
{
    static const char *const not_fused[] = {"f32", "f16", "kept logits", "f16, a large upstream", "f16, large row weights", "chunks and panels"};
    static const char *const not_forward[] = {"tail columns", "workspace above", "pointers off"}; /* of x and weight */
    static const char *const both_only[] = {"chunks", "a short last chunk", "dweight of T in chunks"};
    const int which = did_direction[did], direction = at / PATHS, path = at % PATHS;
    if (!has_path(TEST_BF16, path)) return false;
    if (!strcmp(did_name[did], "a fused plan"))
        return path == FUSED || (path == LK_LINEAR_CROSS_ENTROPY_AUTO && has_path(TEST_BF16, FUSED));
    for (int i = 0; path == FUSED && i < LENGTH_OF(not_fused); i++)
        if (!strcmp(did_name[did], not_fused[i])) return false;
    for (int i = 0; path == FUSED && direction != BOTH && i < LENGTH_OF(both_only); i++)
        if (!strcmp(did_name[did], both_only[i])) return false;
    for (int i = 0; path == FUSED && direction == FORWARD && i < LENGTH_OF(not_forward); i++)
        if (!strcmp(did_name[did], not_forward[i])) return false;
    if (did_panels[did] > 0 && path == LK_LINEAR_CROSS_ENTROPY_CHUNKS) return false;
    if (did_panels[did] < 0 && path > LK_LINEAR_CROSS_ENTROPY_CHUNKS) return false;
    return which == DIRECTIONS || (which == FORWARD ? gives_loss(direction) : gives_gradient(direction));
}

/* Called when the tokens are examined and the plan is known. */
static void count(const problem *p)
{
    if (p->ranks) return;
    const int at = p->direction * PATHS + p->path;
    const bool some = p->tokens > 0, off = p->at[X] || p->at[WEIGHT] || p->at[DX] || p->at[DWEIGHT], mean = p->on[MEAN];
    const bool short_sums = p->has[DWEIGHT] && !p->on[DWEIGHT_F32] && p->type != TEST_F32;
    int switched = 0, i = 0;
    for (int s = 0; s < SWITCHES; s++) switched += p->on[s];
    for (int s = 0; some && s < SWITCHES; s++) {
        alone[at][s] += p->on[s] && switched == 1 + (needs(s) >= 0);
        for (int t = s + 1; t < SWITCHES; t++) pairs[at][s][t] += p->on[s] && p->on[t];
    }
    counts.runs[at]++;
#define DID(which, panels, name, yes)                                                                                          \
    (did_name[i] = name, did_direction[i] = which, did_panels[i] = panels, counts.of[at][i] += possible(at, i) && (yes), i++)
    DID(DIRECTIONS, 0, "f32", p->type == TEST_F32), DID(DIRECTIONS, 0, "f16", p->type == TEST_F16);
    DID(DIRECTIONS, 0, "bf16", p->type == TEST_BF16), DID(DIRECTIONS, 0, "0 tokens", !some);
    DID(DIRECTIONS, 0, "1 token", p->tokens == 1), DID(DIRECTIONS, 0, "1 column", some && p->vocab == 1);
    DID(DIRECTIONS, 0, "hidden not of 8", p->hidden % 8 != 0), DID(DIRECTIONS, 0, "odd vocab", p->vocab % 2 != 0);
    DID(DIRECTIONS, 0, "a fused plan", plan.path == FUSED), DID(DIRECTIONS, 0, "kept logits", some && plan.path != FUSED);
    DID(DIRECTIONS, 0, "one chunk", plan.chunks == 1), DID(DIRECTIONS, 0, "chunks", plan.chunks > 1);
    DID(DIRECTIONS, 0, "a short last chunk", plan.chunks > 1 && plan.chunks * plan.chunk_tokens > p->tokens);
    DID(DIRECTIONS, 0, "tail columns", some && tail_columns());
    const bool sliced = plan.slice_tokens > 0 && plan.slice_tokens < plan.chunk_tokens, chunks = plan.chunks > 1;
    const bool lent = sliced && strstr(plan.text, "time in dweight");
    DID(BACKWARD, -1, "slices of all", sliced && !chunks), DID(BACKWARD, -1, "slices of chunks", sliced && chunks);
    DID(BACKWARD, -1, "slices in dweight", lent), DID(BACKWARD, -1, "slices in workspace", sliced && !lent);
    DID(BACKWARD, -1, "slices of chunks in dweight", lent && chunks);
    DID(BACKWARD, -1, "slices, compacted", sliced && compacted(p));
    DID(DIRECTIONS, 1, "one panel", some && plan.panels == 1), DID(DIRECTIONS, 1, "panels", plan.panels > 1);
    DID(DIRECTIONS, 1, "a short last panel", plan.panels > 1 && plan.panels * plan.panel_vocab > p->vocab);
    DID(DIRECTIONS, 1, "chunks and panels", plan.chunks > 1 && plan.panels > 1);
    DID(DIRECTIONS, 0, "smallest workspace", some && p->budget < plan.minimum_bytes);
    DID(DIRECTIONS, 0, "workspace between", some && p->budget > plan.minimum_bytes && plan.cublas_bytes < p->budget / 2);
    DID(DIRECTIONS, 0, "workspace above", some && p->budget && plan.cublas_bytes > p->budget / 2);
    DID(DIRECTIONS, 0, "pointers off", off), DID(DIRECTIONS, 0, "dtype spelt out", p->spelt);
    DID(DIRECTIONS, 0, "ignored tokens", valid_rows > 0 && valid_rows < p->tokens);
    DID(DIRECTIONS, 0, "all ignored", some && valid_rows == 0), DID(DIRECTIONS, 0, "bad target seen", bad_targets > 0);
    DID(DIRECTIONS, 0, "bad target, compacted", bad_targets > 0 && p->on[COMPACT]);
    DID(DIRECTIONS, 0, "class weights all 0", valid_rows && weight_sum == 0);
    DID(DIRECTIONS, 0, "mean over nothing", some && mean && over_of(p) == 0 && !p->on[DIVIDED]);
    DID(DIRECTIONS, 0, "denominator 0", some && mean && over_of(p) == 0 && p->on[DIVIDED]);
    DID(DIRECTIONS, 0, "denominator not finite", some && mean && !isfinite(over_of(p)));
    DID(DIRECTIONS, 0, "denominator, no token", !some && p->on[DIVIDED]);
    DID(DIRECTIONS, 0, "mean, class weights, z-loss", mean && p->on[WEIGHTS] && p->on[Z]);
    DID(DIRECTIONS, 0, "smoothing with weights", p->on[SMOOTHING] && p->on[WEIGHTS]);
    DID(DIRECTIONS, 0, "too many counted", overflown(p)), DID(FORWARD, 0, "loss NULL", !p->has[LOSS]);
    DID(FORWARD, 0, "lse NULL", !p->has[LSE]), DID(FORWARD, 0, "z_loss_out", p->has[Z_LOSS] && p->on[Z]);
    DID(BACKWARD, 0, "dweight of T in chunks", short_sums && plan.chunks > 1);
    DID(BACKWARD, 0, "f16, a large upstream", p->type == TEST_F16 && p->on[UPSTREAM_ONE] && p->one > 1000);
    DID(BACKWARD, 0, "f16, large row weights", p->type == TEST_F16 && p->on[WEIGHTED] && !p->has[UPSTREAM] && p->one > 1000);
#undef DID
    counts.option_count = i;
}

static bool switched(int at, int s)
{
    return has_path(TEST_BF16, at % PATHS) && switch_of(at / PATHS, s);
}

static void all_counts(void)
{
    test_counts_complete(&counts, possible);
    for (int at = 0; at < COUNTED; at++) {
        for (int s = 0; s < SWITCHES; s++) {
            if (!switched(at, s)) continue;
            if (!test_that(alone[at][s] > 0))
                test_detail("%s %s never ran %s alone", direction_name[at / PATHS], path_name[at % PATHS], switch_name[s]);
            for (int t = s + 1; t < SWITCHES; t++)
                if (switched(at, t) && !exclude(s, t) && !(at % PATHS == FUSED && s == SMOOTHING && t == STATISTICS) &&
                    !test_that(pairs[at][s][t] > 0 || test.small))
                    test_detail("%s %s never ran %s with %s", direction_name[at / PATHS], path_name[at % PATHS], switch_name[s],
                                switch_name[t]);
        }
    }
}

/* ---- Themes ---------------------------------------------------------------------------------------------------------- */

static const test_op<problem> op = {describe, setup, launch, collect, verify, settle, count};

static void run(problem p)
{
    if (!has_path(p.type, p.path)) return;
    settle_tensors(&p);
    test_twice(op, &p);
}

/* Fused makes columns again where the workspace is small or panels are asked for. With this it has room for exponentials of all
 * columns. It keeps them where it may, so not beside entropy or argmax. */
static void give_room(problem *p)
{
    if (p->path == FUSED && p->direction == BOTH) p->panel = 0, p->budget = (size_t)1 << 20;
}
static void keep_columns(problem *p)
{
    give_room(p);
    if (p->path == FUSED && p->direction == BOTH) p->on[WANT_ENTROPY] = p->on[WANT_ARGMAX] = p->on[HAS_DENTROPY] = false;
}
static void run_both_ways(problem p)
{
    run(p);
    if (p.path == FUSED && p.direction == BOTH) give_room(&p), run(p);
}

static void switches_alone(int type, int direction, int path)
{
    for (int s = 0; s < SWITCHES; s++) {
        problem p = plain(type, direction, path, 11, 12, 53);
        p.on[s] = true, p.seed += (uint64_t)s;
        p.chunk = s % 2 ? 5 : 0, p.panel = s % 3 ? 32 : 0;
        if (test.small && (s == TF32 ? TEST_F32 : s % 3) != type && path != FUSED) continue;
        if (switch_of(direction, s)) run_both_ways(p);
    }
}

static void options_drawn(int type, int direction, int path)
{
    static const int64_t tokens[] = {1, 7, 13, 24}, hidden[] = {1, 5, 16, 20}, vocab[] = {1, 3, 64, 97, 150};
    for (int seed = 0; seed < test_pick(path == FUSED ? 260 : 60, path == FUSED ? 8 : 4); seed++) { /* fused, of one type */
        uint64_t r = test_hash((uint64_t)seed * 77 + (uint64_t)path);
        const int64_t some_tokens = tokens[test_below(&r, 4)], some_hidden = hidden[test_below(&r, 4)];
        problem p = drawn(type, direction, path, some_tokens, some_hidden, vocab[test_below(&r, 5)], seed);
        p.over = test_chance(&r, 4);
        if (test_chance(&r, 9)) p.empty = p.on[WEIGHTS] ? ALL_WEIGHTLESS : ALL_IGNORED, p.on[BAD] = false;
        run(p);
    }
}

/* What the draws may miss. */
static void corners(int type, int direction, int path)
{
    for (int i = 0; i < 40; i++) {
        problem p = plain(type, direction, path, 9, 10, 37);
        if (i == 39 && path) continue;
        const double denominators[] = {0, INFINITY, NAN, -2.5, 3};
        const bool slices = i >= 20 && i <= 26, few = i == 19 || i == 27, bf16_only = i == 15 || i == 17 || i == 39;
        const int any = slices ? TEST_F16 + (i + path) % 2 : (i + direction + path) % TEST_TYPES; /* another on another path */
        const int its_own = few || i == 9 || i == 16 || i == 36 || i == 38 ? TEST_F16 : bf16_only ? TEST_BF16 : any;
        if (type != its_own && (few || bf16_only || (test.small && path != FUSED))) continue; /* fused, there is but one */
        if (slices && test.small && (direction == FORWARD || path > LK_LINEAR_CROSS_ENTROPY_CHUNKS)) continue; /* has none */
        p.seed += (uint64_t)i, p.panel = 16, p.chunk = 4;
        if (i == 0) p.tokens = 0;
        if (i == 1) p.tokens = 0, p.on[ZERO_WHEN_EMPTY] = p.on[ACCUMULATE] = true;
        if (i == 1) p.on[MEAN] = p.on[WANT_DBIAS] = p.has[VALID] = true;
        if (i == 2) p.vocab = 1, p.on[SMOOTHING] = true;
        if (i == 3) p.tokens = 1, p.on[MEAN] = true;
        if (i == 4) p.on[IGNORE] = p.on[MEAN] = true, p.empty = ALL_IGNORED;
        if (i == 5) p.on[IGNORE] = p.on[MEAN] = p.on[ZERO_WHEN_EMPTY] = true, p.empty = ALL_IGNORED;
        if (i == 5) p.on[COMPACT] = p.on[WANT_DBIAS] = true;
        if (i == 6) p.on[WEIGHTS] = p.on[MEAN] = p.on[Z] = true, p.empty = ALL_WEIGHTLESS;
        if (i == 7) p.on[IGNORE] = p.on[COMPACT] = p.on[WANT_DBIAS] = p.over = true, p.has[Z_LOSS] = true;
        if (i == 8) p.on[IGNORE] = p.on[COMPACT] = p.on[BAD] = p.on[MEAN] = true, p.tokens = 20;
        if (i == 9) p.on[UPSTREAM_ONE] = p.on[MEAN] = true, p.one = 65536;
        if (i == 36) p.on[WEIGHTED] = p.on[MEAN] = true, p.one = 65536;
        if (i == 38) p.on[WEIGHTED] = p.on[UPSTREAM_ROWS] = p.on[MEAN] = true, p.one = p.heavy = 200; /* beyond the range of either */
        if (i == 37) p.on[WEIGHTED] = p.on[IGNORE] = p.on[COMPACT] = p.on[BAD] = p.on[WANT_DBIAS] = p.on[Z] = true, p.tokens = 20;
        if (i == 10) p.on[WEIGHTS] = p.on[SMOOTHING] = p.on[Z] = p.on[MEAN] = p.has[Z_LOSS] = true;
        if (i == 11) p.budget = (size_t)1 << 22, p.chunk = p.panel = 0, p.spelt = true;
        if (i == 12) p.chunk = p.panel = 0, p.vocab = 600, p.tokens = test_pick(64, 16), p.hidden = 40;
        if (i == 16) p.on[SCALE] = true, p.scale = 50, p.sigma = 0.1; /* f16: 50 2^12 is too large for dZ */
        /* compacted by several blocks, and by blocks that take several turns */
        const bool several = i == 14 || i == 15;
        if (several) p.on[IGNORE] = p.on[COMPACT] = p.on[BAD] = p.on[MEAN] = p.on[UPSTREAM_ROWS] = p.on[HAS_DLSE] = true;
        if (several) p.hidden = 3, p.vocab = 5, p.chunk = 0;
        if (several) p.tokens = i == 14 ? test_pick(600, 300) : test_pick(1536 * test.sms, 40);
        if (i == 17) p.on[WANT_DBIAS] = true, p.hidden = 3, p.vocab = 5, p.tokens = 130, p.chunk = 100; /* dbias in 3 shares */
        /* a bad target's NaN in a mean over no weight */
        if (i == 18) p.on[WEIGHTS] = p.on[MEAN] = p.on[BAD] = p.on[ZERO_WHEN_EMPTY] = true, p.empty = ALL_WEIGHTLESS;
        /* f16: a mean over many, of columns with a small p in every token; a small upstream of each token */
        if (few) p.confident = p.on[HAS_BIAS] = p.on[MEAN] = p.on[WANT_DBIAS] = p.on[DBIAS_F32] = p.on[DWEIGHT_F32] = true;
        if (few) p.sigma = 0.1, p.tokens = i == 19 ? 40 : 9, p.chunk = 0, p.on[UPSTREAM_ROWS] = i == 27, p.one = 1e-4f;
        /* slices: of all tokens and of chunks, in dweight, which has room for 2 rows, and in the workspace */
        if (slices) p.on[WANT_DBIAS] = p.on[UPSTREAM_ROWS] = p.on[MEAN] = true, p.budget = (size_t)1 << 20;
        if (slices) p.chunk = i == 21 || i == 22 || i == 26 ? 5 : 0, p.slice = i == 22 ? 4 : 2;
        if (i == 22) p.on[IGNORE] = p.on[COMPACT] = true, p.tokens = 20;
        /* no place for slices: what is added to, has gaps, is not aligned, or holds the sums of the chunk before */
        if (i == 23) p.on[ACCUMULATE] = true;
        if (i == 24) p.stride[DWEIGHT] = 13;
        if (i == 25) p.at[DWEIGHT] = 1;
        if (i == 26) p.on[DWEIGHT_F32] = true;
        /* denominators: 0, not finite, negative, and of no token; then logits that are all alike, and a workspace for FUSED */
        if (i >= 28 && i < 33) p.denominator = denominators[i - 28], p.on[MEAN] = p.on[DIVIDED] = p.has[Z_LOSS] = true;
        if (i >= 28 && i < 33) p.on[WEIGHTS] = i % 2, p.on[Z] = i % 3 == 0, p.on[ZERO_WHEN_EMPTY] = i == 28;
        if (i == 32) p.tokens = 0;
        if (i == 33) p.sigma = 0, p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = true, p.vocab = 530, p.panel = 256, p.aim = 1;
        if (i == 34) p.tokens = 130, p.vocab = 1100, p.panel = 256, p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = true;
        if (i == 34) p.on[IGNORE] = p.on[HAS_DENTROPY] = true;
        if (i == 35) p.on[IGNORE] = p.on[COMPACT] = p.on[BAD] = true, p.tokens = 20; /* a loss per token, NaN of a bad one */
        /* so large that FUSED takes less time, whatever the number of SMs */
        if (i == 39) p.chunk = p.panel = 0, p.hidden = 8, p.budget = (size_t)1 << 28;
        if (i == 39) p.tokens = test.sms > 8 ? 2112 : 1024, p.vocab = test.sms > 8 ? 20000 : 600;
        if (i == 13) p.chunk = p.panel = 0, p.vocab = 515, p.tokens = test_pick(40, 9), p.budget = 1 << 16;
        run(p);
    }
}

/* Without the one that makes some columns again: chunks of few tokens with fewer matmuls may take longer. */
static int whole_matmuls(const plan_t *of, int64_t vocab)
{
    return of->matmuls - (of->kept_vocab > 0 && of->kept_vocab < vocab);
}

/* Every workspace from the smallest up, one step after another: more bytes never cost matmuls. */
static void workspaces(int type, int direction, int path)
{
    int matmuls = 99;
    for (int i = 0; i < test_pick(7, 3); i++) {
        problem p = plain(type, direction, path, test_pick(60, 20), 9, 400);
        p.on[MEAN] = p.on[WANT_DBIAS] = true, p.on[DWEIGHT_F32] = i % 2;
        p.budget = i ? (size_t)24000 << i : 0;
        run(p);
        if (!test_that(whole_matmuls(&plan, p.vocab) <= matmuls))
            test_detail("%d matmuls where less memory gave %d; %s", plan.matmuls, matmuls, describe(&p));
        if (path == LK_LINEAR_CROSS_ENTROPY_AUTO) matmuls = whole_matmuls(&plan, p.vocab);
    }
}

static void graphs(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 12, 16, 70);
    p.on[MEAN] = p.on[WANT_DBIAS] = p.on[HAS_BIAS] = true, p.chunk = 5, p.panel = 32;
    settle_tensors(&p);
    if (!setup(&p, 0) || !launched(&p, launch(&p))) return;
    collect(&p), verify(&p), settle(&p, true, "the plain call");
    test_graph(op, &p);
}

/* The target's gradient is minus the sum of the others': p - 1 would have few digits here, or none. */
static void confident(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 9, 10, 85);
    p.confident = p.on[HAS_BIAS] = p.on[BIAS_F32] = p.on[WANT_DBIAS] = p.on[DBIAS_F32] = p.on[DWEIGHT_F32] = true;
    p.sigma = 0.1, p.panel = 32;
    p.on[IGNORE] = p.on[COMPACT] = test_split_over && direction == BACKWARD; /* others are given per token, and read per row */
    run_both_ways(p);
    int64_t at = 0;
    while (ignored(&p, at)) at++;
    const double rest = 1 - exp(z[at * p.vocab + p.vocab / 2] - outcomes[at].lse);
    if (!test_that(rest > 3e-7 && rest < 3e-6)) test_detail("1 - p is %g; %s", rest, describe(&p));
}

/* What is not finite stays in its rows of dx, loss and lse, and no ignored token has any of it. */
enum { X_NAN, X_INF, BIAS_INF, BIAS_NAN, ALL_MASKED, UPSTREAM_INF, UPSTREAM_NAN, NOT_FINITE };

/* Whether an infinite x makes a column's logit +inf, not -inf. The last patterns have one such column. */
enum { AS_DRAWN, LOW_FIRST, HIGH_FIRST, ALTERNATING, IN_PAIRS, ONE_HIGH };
static bool positive(const problem *p, int64_t c)
{
    if (p->signs == LOW_FIRST || p->signs == HIGH_FIRST) return (c >= p->vocab / 2) == (p->signs == LOW_FIRST);
    if (p->signs == ALTERNATING || p->signs == IN_PAIRS) return (p->signs == IN_PAIRS ? c / 2 : c) % 2;
    return c == p->signs - ONE_HIGH;
}

static void not_finite_in(problem p, int kind)
{
    const double lse = kind == X_NAN || kind == BIAS_NAN ? NAN : kind == ALL_MASKED ? -INFINITY : INFINITY;
    const bool in_rows = kind < UPSTREAM_INF; /* loss and lse have it too */
    int64_t own = p.tokens - 1;               /* the token with such an x */
    settle_tensors(&p);
    if (!setup(&p, 0)) return;
    float *const saved = (float *)test_buffer_host(&buffers[LSE]);
    void *const x = test_buffer_host(&buffers[X]), *const bias = test_buffer_host(&buffers[BIAS]);
    while (ignored(&p, own)) own--;
    const int64_t place = p.signs && kind == BIAS_INF ? p.signs - 1 : (int64_t)(p.seed % 3) * (p.vocab - 1) / 2;
    if (kind <= X_INF) test_put(p.type, x, own * laid[X].stride + p.hidden / 2, kind == X_NAN ? NAN : INFINITY);
    for (int64_t c = 0; p.signs && kind == X_INF && c < p.vocab; c++)
        test_put(p.type, test_buffer_host(&buffers[WEIGHT]), c * laid[WEIGHT].stride + p.hidden / 2, positive(&p, c) ? 1 : -1);
    if (kind == BIAS_INF || kind == BIAS_NAN) test_put(p.type, bias, place, kind == BIAS_INF ? INFINITY : NAN);
    for (int64_t c = 0; kind == ALL_MASKED && c < p.vocab; c++) test_put(p.type, bias, c, -INFINITY);
    if (!in_rows) *(float *)test_buffer_host(&buffers[UPSTREAM]) = kind == UPSTREAM_INF ? INFINITY : NAN;
    for (int64_t token = 0; p.direction == BACKWARD && in_rows && token < p.tokens; token++)
        if (kind > X_INF || token == own) saved[token] = (float)lse;
    for (int t = X; t <= LSE; t++)
        if (p.has[t] && !is_output(&p, t)) upload(&buffers[t]);
    if (!launched(&p, launch(&p))) return;
    collect(&p);
    for (int64_t token = 0; token < p.tokens; token++) {
        const bool none = ignored(&p, token), hit = !none && (kind > X_INF || token == own);
        if (gives_loss(p.direction)) {
            const double got = (double)result(LSE, token, 0), loss = (double)result(LOSS, p.on[MEAN] ? 0 : token, 0);
            const int64_t top = p.has[ARGMAX] ? integer(ARGMAX, test_buffer_back(&buffers[ARGMAX]), token) : 0;
            const double entropy = p.has[ENTROPY] ? (double)result(ENTROPY, token, 0) : 0;
            int64_t first = kind == BIAS_INF || kind == BIAS_NAN ? place : 0;
            while (p.signs && kind == X_INF && !positive(&p, first) && first + 1 < p.vocab) first++;
            if (p.has[ENTROPY] && !test_that(hit && in_rows ? isnan(entropy) : none ? entropy == 0 : isfinite(entropy)))
                test_detail("entropy[%lld] is %g, kind %d; %s", (long long)token, entropy, kind, describe(&p));
            for (int k = 1; k < 4 && p.on[STATISTICS]; k++) {
                const double more = (double)result(ENTROPY, k * p.tokens + token, 0);
                if (!test_that(hit && in_rows ? isnan(more) : none ? more == 0 : isfinite(more)))
                    test_detail("statistics[%d, %lld] is %g, kind %d; %s", k, (long long)token, more, kind, describe(&p));
            }
            const bool known = hit && in_rows && (p.signs || kind != X_INF);
            if (p.has[ARGMAX] && !test_that(none ? top == -1 : known ? top == first : top >= 0 && top < p.vocab))
                test_detail("argmax[%lld] is %lld, not %lld, kind %d; %s", (long long)token, (long long)top, (long long)first,
                            kind, describe(&p));
            const bool right = hit && in_rows ? (isnan(lse) ? isnan(got) : got == lse) : none ? got == 0 : isfinite(got);
            if (!test_that(right)) test_detail("lse[%lld] is %g, kind %d; %s", (long long)token, got, kind, describe(&p));
            if (!p.on[MEAN] && !test_that(hit && in_rows ? isnan(loss) : none ? loss == 0 : isfinite(loss)))
                test_detail("loss[%lld] is %g, kind %d; %s", (long long)token, loss, kind, describe(&p));
        }
        for (int64_t d = 0; p.has[DX] && d < p.hidden; d++) {
            const double got = (double)result(DX, token, d);
            if (!test_that(hit ? isnan(got) || (!in_rows && isinf(got)) : none ? got == 0 : isfinite(got)))
                test_detail("dx[%lld, %lld] is %g, kind %d; %s", (long long)token, (long long)d, got, kind, describe(&p));
        }
    }
    for (int64_t c = 0; p.has[DWEIGHT] && in_rows && c < p.vocab; c++)
        for (int64_t d = 0; d < p.hidden; d++) {
            const double got = (double)result(DWEIGHT, c, d), bias_got = (double)result(DBIAS, c, 0);
            if (!test_that(isnan(got) && isnan(bias_got)))
                test_detail("dweight[%lld, %lld] is %g, dbias %g, kind %d; %s", (long long)c, (long long)d, got, bias_got, kind,
                            describe(&p));
        }
}

static void not_finite(int type, int direction, int path)
{
    for (int kind = 0; kind < (gives_gradient(direction) ? NOT_FINITE : UPSTREAM_INF); kind++) {
        problem p = plain(type, direction, path, 9, 10, 37);
        p.on[IGNORE] = p.on[HAS_BIAS] = p.on[WANT_DBIAS] = true, p.on[UPSTREAM_ONE] = kind >= UPSTREAM_INF;
        p.seed += (uint64_t)kind, p.chunk = kind % 2 ? 4 : 0, p.panel = kind % 3 ? 16 : 0, p.on[MEAN] = kind == UPSTREAM_NAN;
        p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = p.on[HAS_DENTROPY] = p.on[STATISTICS] = kind != X_INF;
        not_finite_in(p, kind);
        if (path == FUSED && direction == BOTH) keep_columns(&p), not_finite_in(p, kind);
    }
}

/* +inf in every place class of a row: of a lane, of a warp, of a tile, alone beside -inf, and in the target's column or not. */
static void infinite_places(int type, int direction, int path)
{
    static const int64_t vocabs[] = {8, 300}, ones[] = {0, 1, 2, 6, 7, 8, 255, 256, 299};
    for (int v = 0; v < 2; v++)
        for (int i = 0; i < ONE_HIGH - 1 + 2 * LENGTH_OF(ones); i++) {
            const int64_t at = i < ONE_HIGH - 1 ? 0 : ones[(i - ONE_HIGH + 1) % LENGTH_OF(ones)];
            const bool in_bias = i >= ONE_HIGH - 1 + LENGTH_OF(ones);
            problem p = plain(type, direction, path, 3, 8, vocabs[v]);
            if (at >= p.vocab || (test.small && path != FUSED && (i + v + path) % TEST_TYPES != type)) continue;
            p.on[HAS_BIAS] = p.on[WANT_DBIAS] = true, p.seed += (uint64_t)i;
            p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = p.on[HAS_DENTROPY] = p.on[STATISTICS] = (i + v) % 2;
            p.signs = in_bias ? 1 + (int)at : i < ONE_HIGH - 1 ? 1 + i : ONE_HIGH + (int)at;
            p.panel = i % 2 ? 128 : 0, p.aim = i % 3 == 0 ? at + 1 : i % 3 == 1 ? p.vocab : 0;
            if (i % 2 == 0) keep_columns(&p);
            not_finite_in(p, in_bias ? BIAS_INF : X_INF);
        }
}

/* Tiles of 256 columns that are masked as a whole. Under a softcap their logits are -softcap, which counts; else nothing. */
static void masked_tiles(int type, int direction, int path)
{
    static const struct {
        int64_t vocab, from, to;
        double stairs;
        float softcap;
        int64_t aim;
    } cases[] = {
        {130, 0, 130, 0, 30, 0},      {300, 0, 256, -100, 30, 0},   {300, 0, 256, -100, 30, 299}, {300, 0, 256, -100, 30, 3},
        {300, 0, 256, 100, 30, 0},    {600, 256, 512, -100, 30, 0}, {600, 256, 512, 100, 5, 0},   {600, 512, 600, -100, 30, 0},
        {600, 0, 512, -200, 30, 0},   {600, 256, 600, 0, 2, 0},     {257, 0, 257, 0, 30, 257},    {257, 0, 256, 0, 30, 257},
        {300, 0, 256, -100, 0, 299},  {300, 0, 256, 100, 0, 0},     {600, 256, 512, -100, 0, 5},  {600, 0, 599, 0, 0, 600},
        {600, 1, 600, 30, 30, 1},     {257, 0, 256, 200, 0, 257},   {1, 0, 1, 0, 30, 0},          {300, 0, 256, -100, 300, 0},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        problem p = plain(type, direction, path, 5, 8, cases[i].vocab);
        if (test.small && path != FUSED && (i + path) % TEST_TYPES != type) continue;
        p.on[HAS_BIAS] = p.on[BIAS_F32] = p.on[WANT_DBIAS] = true, p.seed += (uint64_t)i;
        p.mask_from = cases[i].from, p.mask_to = cases[i].to, p.stairs = cases[i].stairs, p.aim = cases[i].aim;
        p.on[SOFTCAP] = cases[i].softcap > 0, p.softcap = cases[i].softcap, p.panel = i % 3 ? 256 : 0;
        p.on[MEAN] = i % 4 == 0, p.on[SCALE] = i % 5 == 4, p.on[IGNORE] = i % 3 == 1;
        p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = p.on[HAS_DENTROPY] = i % 2 || direction == FORWARD;
        p.on[STATISTICS] = i % 2;
        run_both_ways(p);
    }
}

/* Tiles of the vocabulary that have nothing to do with each other: what the first one promises does not hold; a target far
 * above everything; a gradient of lse that takes back the loss's. */
static void far_apart(int type, int direction, int path)
{
    static const double stairs[] = {30, 200, -200, 3e4, -3e4, 0, 0, 0};
    for (int i = 0; i < LENGTH_OF(stairs); i++) {
        problem p = plain(type, direction, path, 9, 10, test_pick(1100, 600));
        if (test.small && i % TEST_TYPES != type && path != FUSED) continue;
        p.on[HAS_BIAS] = p.on[BIAS_F32] = p.on[WANT_DBIAS] = true, p.stairs = stairs[i], p.seed += (uint64_t)i;
        p.panel = 256, p.chunk = i % 2 ? 4 : 0;
        p.confident = i == 5 || i == 6, p.far = i == 6 ? 300 : 60, p.opposed = p.on[HAS_DLSE] = i == 7;
        if (i == 0) p.hidden = 330; /* more than a ring of stages */
        p.on[SMOOTHING] = p.on[WEIGHTS] = i == 0 && direction == BACKWARD; /* those of each panel */
        p.on[MASK] = i == 1, p.on[IGNORE] = i == 2, p.on[SOFTCAP] = i == 3, p.on[Z] = i == 4, p.on[UPSTREAM_ROWS] = i == 2;
        p.on[STATISTICS] = i != 3;
        if (type == TEST_F16 && (i == 3 || i == 4)) continue; /* its fast logits are not asked for, but x and weight are f16 */
        run_both_ways(p);
    }
}

/* With columns split over ranks: the i-th time. */
static void of_ranks(int i, int type, int direction, int path)
{
    if (path == LK_LINEAR_CROSS_ENTROPY_CHUNKS) return; /* it is for whole rows */
    switches_alone(type, direction, path);
    options_drawn(type, direction, path);
    if (i % 2) corners(type, direction, path);
    if (i == 1) graphs(type, direction, path);
    confident(type, direction, path);
    if (i != 2) not_finite(type, direction, path);
    if (i == 2) masked_tiles(type, direction, path);
    if (i == 2) far_apart(type, direction, path);
}

/* A rank behind the last column reads class weights of targets, not of its columns. A sanitizer sees what lies behind them. */
static void empty_rank(void)
{
    last_is_empty = true, test_split_over = 3;
    for (int type = 0; type < TEST_TYPES; type++)
        for (int direction = 0; direction < DIRECTIONS; direction++)
            for (int path = LK_LINEAR_CROSS_ENTROPY_PANELS; path < PATHS; path++) {
                problem p = plain(type, direction, path, 9, 10, 37);
                p.on[WEIGHTS] = p.on[BAD] = p.on[SMOOTHING] = p.has[BAD_COUNT] = true;
                run(p);
            }
    last_is_empty = false, test_split_over = 0;
}

typedef void (*theme)(int type, int direction, int path);
static const struct {
    const char *name;
    theme run;
} themes[] = {{"switches alone", switches_alone}, {"options", options_drawn}, {"corners", corners},
              {"workspaces", workspaces},         {"graph", graphs},          {"confident", confident},
              {"not finite", not_finite},         {"far apart", far_apart},   {"infinite places", infinite_places},
              {"masked tiles", masked_tiles},     {"split over ranks", test_split<of_ranks, 4>}};

static void all_themes(void)
{
    for (int i = 0; i < LENGTH_OF(themes); i++)
        for (int direction = 0; direction < DIRECTIONS; direction++)
            for (int path = 0; path < PATHS; path++) {
                if (!has_path(TEST_BF16, path)) continue;
                if (!test_begin("%s %s %s", themes[i].name, direction_name[direction], path_name[path])) continue;
                for (int type = 0; type < TEST_TYPES; type++)
                    if (has_path(type, path)) themes[i].run(type, direction, path);
                test_finish();
            }
}

/* ---- What several calls give together -------------------------------------------------------------------------------- */

/* backward from forward's lse against forward_backward: the same formula from a lse of one more rounding. The limits are those
 * of the reference, on each. */
static void sequences(int type)
{
    static test_buffer saved;
    for (int path = 0; path < FUSED; path++) {
        problem p = plain(type, FORWARD, path, 14, 12, 61);
        p.on[SMOOTHING] = p.on[Z] = p.on[MEAN] = p.on[HAS_BIAS] = p.on[IGNORE] = true, p.chunk = 6, p.panel = 32;
        p.on[WEIGHTS] = path == LK_LINEAR_CROSS_ENTROPY_PANELS; /* of a column in each panel */
        settle_tensors(&p);
        if (!setup(&p, 0) || !launched(&p, launch(&p))) return;
        collect(&p), verify(&p);
        test_buffer_size(&saved, buffers[LSE].bytes, 0, 0);
        memcpy(test_buffer_host(&saved), test_buffer_back(&buffers[LSE]), saved.bytes), upload(&saved);
        p.direction = BACKWARD, settle_tensors(&p);
        if (!setup(&p, 0)) return;
        args.lse = (float *)test_buffer_device(&saved);
        if (!launched(&p, launch(&p))) return;
        collect(&p), verify(&p);
        p.direction = BOTH, p.has[LOSS] = true;
        run(p);
    }
}

/* x, weight and bias of logits near `offset` that float has exactly, so that all errors come behind the matmul. */
static void put_exact(const problem *p, double offset)
{
    for (int64_t token = 0; token < p->tokens; token++)
        for (int64_t d = 0; d < p->hidden; d++)
            test_put(p->type, test_buffer_host(&buffers[X]), token * laid[X].stride + d, (float)((token + d) % 5 - 2) / 2);
    for (int64_t c = 0; c < p->vocab; c++) {
        for (int64_t d = 0; d < p->hidden; d++)
            test_put(p->type, test_buffer_host(&buffers[WEIGHT]), c * laid[WEIGHT].stride + d, (float)((c * 7 + d * d * 3) % 33 - 16) / 16);
        test_put(laid[BIAS].type, test_buffer_host(&buffers[BIAS]), c, (float)offset);
    }
    upload(&buffers[X]), upload(&buffers[WEIGHT]), upload(&buffers[BIAS]);
}

/* Logits far from 0: dbias is as good as around 0, from lse and lse_low, and in one call. */
static void far_from_0(int type, int path)
{
    static test_buffer saved[2];
    const double offsets[] = {0, 256, 3000, 0x1p18}, relative = type == TEST_F32 ? 1e-6 : path == FUSED ? 0x1.8p-8 : 0x1.2p-9;
    for (int i = 0; i < 2 * LENGTH_OF(offsets); i++) {
        const int64_t vocab = 300;
        problem p = plain(type, i % 2 ? BOTH : FORWARD, path, 3, 8, vocab);
        p.on[HAS_BIAS] = p.on[BIAS_F32] = p.on[WANT_DBIAS] = p.on[DBIAS_F32] = p.has[LSE_LOW] = true, p.panel = i % 4 > 1 ? 256 : 0;
        settle_tensors(&p);
        if (!setup(&p, 0)) return;
        put_exact(&p, offsets[i / 2]);
        if (!launched(&p, launch(&p))) return;
        collect(&p);
        for (int k = 0; k < 2 && p.direction == FORWARD; k++) {
            const test_buffer *from = &buffers[k ? LSE_LOW : LSE];
            test_buffer_size(&saved[k], from->bytes, 0, 0);
            memcpy(test_buffer_host(&saved[k]), test_buffer_back(from), from->bytes), upload(&saved[k]);
        }
        if (p.direction == FORWARD) {
            p.direction = BACKWARD, p.on[WANT_DBIAS] = p.on[DBIAS_F32] = true, settle_tensors(&p);
            if (!setup(&p, 0)) return;
            put_exact(&p, offsets[i / 2]);
            args.lse = (float *)test_buffer_device(&saved[0]), args.lse_low = (float *)test_buffer_device(&saved[1]);
            if (!launched(&p, launch(&p))) return;
            collect(&p);
        }
        examine_all(&p);
        for (int64_t c = 0; c < vocab; c++) {
            double want = 0, size = 0;
            for (int64_t token = 0; token < p.tokens; token++) {
                const double q = exp(z[token * vocab + c] - outcomes[token].lse);
                want += q - (c == outcomes[token].y), size += c == outcomes[token].y ? 1 : q;
            }
            const double got = (double)result(DBIAS, c, 0);
            if (!test_within(fabs(got - want), relative * size))
                test_detail("dbias[%lld] is %.9g, want %.9g, around %g; %s", (long long)c, got, want, offsets[i / 2], describe(&p));
        }
    }
}

/* The oracle's loss, upstream and dlse included, as a function of everything. */
static double total(const problem *p)
{
    double sum = 0;
    examine_all(p);
    for (int64_t token = 0; token < p->tokens; token++) {
        const outcome o = outcomes[token];
        double f, h;
        if (!o.counted) continue;
        upstream_of(p, token, &f, &h);
        sum += f * o.class_loss + h * o.z_loss + (p->has[DLSE] ? (double)value(DLSE, token, 0) * o.lse : 0);
        if (p->has[DENTROPY]) sum += (double)value(DENTROPY, token, 0) * o.entropy;
    }
    return sum;
}

/* The gradients of T = f32 are the difference quotients of the loss in double. */
static void differences(int direction)
{
    for (int i = 0; i < 8; i++) {
        problem p = plain(TEST_F32, direction, i % FUSED, 4, 3, 19);
        p.on[i < 4 ? MEAN : SUM] = p.on[HAS_BIAS] = p.on[WANT_DBIAS] = p.on[SMOOTHING] = p.on[Z] = p.on[SCALE] = true;
        p.on[WEIGHTS] = i % 2, p.on[SOFTCAP] = i > 4, p.on[UPSTREAM_ROWS] = p.on[HAS_DLSE] = i % 4 < 2, p.on[IGNORE] = i == 2;
        p.on[HAS_DENTROPY] = i < 2 || i > 4, p.on[DIVIDED] = i == 1, p.on[WEIGHTED] = i > 2;
        p.chunk = 3, p.panel = 16, p.seed += (uint64_t)i;
        settle_tensors(&p);
        if (!setup(&p, 0) || !launched(&p, launch(&p))) return;
        collect(&p);
        const int of[] = {X, WEIGHT, BIAS}, gradient[] = {DX, DWEIGHT, DBIAS};
        for (int k = 0; k < 3; k++)
            for (int64_t row = 0; row < laid[of[k]].rows; row++)
                for (int64_t c = 0; c < laid[of[k]].cols; c++) {
                    const double step = 1e-5, limit = 1e-7 + 256 * 0x1p-24; /* gradients of up to about 8 in size */
                    double ends[2];
                    nudged_tensor = of[k], nudged_row = row, nudged_col = c;
                    for (int end = 0; end < 2; end++) nudge = end ? step : -step, ends[end] = total(&p);
                    nudged_tensor = -1;
                    const double want = (ends[1] - ends[0]) / (2 * step), got = (double)result(gradient[k], row, c);
                    if (!test_within(fabs(got - want), limit))
                        test_detail("%s[%lld, %lld] is %.9g, the quotient %.9g; %s", tensor_name[gradient[k]], (long long)row,
                                    (long long)c, got, want, describe(&p));
                }
    }
}

/* The relative Frobenius error of dx or dweight, and the worst of a row of dx that is not tiny. */
static double frobenius(const problem *p, int t, double *worst_row)
{
    const int64_t rows = laid[t].rows, inner = t == DX ? p->vocab : p->tokens;
    double error = 0, size = 0, largest = 0;
    double *const errors = (double *)calloc((size_t)rows * 2, sizeof(double)), *const sizes = errors + rows;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < p->hidden; d++) {
            double want = 0;
            for (int64_t i = 0; i < inner; i++)
                want += t == DX ? dz[row * p->vocab + i] * (double)value(WEIGHT, i, d)
                                : dz[i * p->vocab + row] * (double)value(X, i, d);
            const double off = (double)result(t, row, d) - want;
            errors[row] += off * off, sizes[row] += want * want;
        }
    *worst_row = 0;
    for (int64_t row = 0; row < rows; row++) error += errors[row], size += sizes[row], largest = fmax(largest, sizes[row]);
    for (int64_t row = 0; row < rows; row++)
        if (sizes[row] > 1e-6 * largest) *worst_row = fmax(*worst_row, sqrt(errors[row] / sizes[row]));
    free(errors);
    return sqrt(error / size);
}

/* spec's limits. sigma 64 makes rows whose softmax is all but one-hot. */
static void accuracy(int type, bool fast)
{
    static const double sigma[] = {0.02, 1.3, 8, 64};
    static const double dx_limit[] = {1e-5, 1e-3, 3e-3}, dweight_limit[] = {1e-5, 1e-3, 3.5e-3};
    for (int i = 0; i < 4; i++)
        for (int way = 0; way <= PATHS; way++) { /* the last: fused that keeps its exponentials */
            const int path = way < PATHS ? way : (int)FUSED;
            problem p = plain(type, BOTH, path, test_pick(64, 16), 32, test_pick(500, 120));
            p.sigma = sigma[i], p.on[FAST] = fast, p.on[DWEIGHT_F32] = i % 2;
            /* f16 gradients are subnormal, and coarse, where a mean divides them: a loss scale, as f16 is trained with */
            p.on[MEAN] = p.on[UPSTREAM_ONE] = true, p.one = type == TEST_F16 ? 1024 : 1;
            p.chunk = path ? 24 : 0, p.panel = 128;
            if (way == PATHS) keep_columns(&p);
            if (!has_path(type, path)) continue;
            if (fast && sigma[i] > 4) continue; /* what the fast mode is for: its own logits have half an ulp of error */
            settle_tensors(&p);
            if (!setup(&p, 0) || !launched(&p, launch(&p))) return;
            collect(&p), differentiate(&p);
            double row;
            const double times = fast ? 2 : 1, dx = frobenius(&p, DX, &row);
            if (!test_within(dx, times * dx_limit[type])) test_detail("dx has %g; %s", dx, describe(&p));
            if (!test_within(row, times * 2e-2)) test_detail("a row of dx has %g; %s", row, describe(&p));
            const double dweight = frobenius(&p, DWEIGHT, &row);
            if (!test_within(dweight, times * dweight_limit[type])) test_detail("dweight has %g; %s", dweight, describe(&p));
            if (fast) continue;
            p.direction = FORWARD, p.on[MEAN] = false, settle_tensors(&p);
            if (!setup(&p, 0) || !launched(&p, launch(&p))) return;
            collect(&p);
            for (int64_t token = 0; token < p.tokens; token++) {
                const double want = outcomes[token].class_loss, off = fabs((double)result(LOSS, token, 0) - want);
                if (!test_within(off, 1e-5 * fabs(want) + 4e-6 * outcomes[token].most))
                    test_detail("loss[%lld] is off by %g from %g; %s", (long long)token, off, want, describe(&p));
            }
        }
}

/* What all tokens have in common, a mean's division and a single upstream, does not round all their dZ the same way: an error
 * that no sum over tokens makes smaller. Here each target's dlogits is 127/128 times a number near halfway between two of T
 * (1/60; 1 + 0.9 ulp / 2). Rounding the exact gradients to T gives 1.7e-3 in bf16. */
static void rounding_alike(int type)
{
    const double half = test_half_ulp(type, 1), limit = 2e-3 * half / 0x1p-8;
    for (int i = 0; i < 3 * PATHS; i++) {
        problem p = plain(type, i / PATHS ? BOTH : BACKWARD, i % PATHS, 60, 16, 128);
        const bool mean = i / PATHS != 1;
        if (!has_path(type, p.path)) continue;
        p.sigma = 0.002, p.on[MEAN] = mean, p.on[SUM] = !mean, p.on[UPSTREAM_ONE] = true, p.one = 1;
        if (i >= PATHS) p.one = (float)((1 + 0.9 * half) * 128 / 127 * (mean ? 60 : 1));
        if (type == TEST_F16) p.one *= 4096; /* else dx would be subnormal */
        p.on[WANT_DBIAS] = true, p.on[DWEIGHT_F32] = (i / PATHS + i) % 2, p.panel = 48, p.chunk = i % PATHS ? 24 : 0;
        keep_columns(&p);
        settle_tensors(&p);
        if (!setup(&p, 0) || !launched(&p, launch(&p))) return;
        collect(&p), verify(&p);
        for (int t = DX; t <= DWEIGHT; t++) {
            double row;
            const double error = frobenius(&p, t, &row);
            if (!test_within(error, plan.path == FUSED ? 1.5 * limit : limit)) /* x has been rounded as well */
                test_detail("%s has %g; %s", tensor_name[t], error, describe(&p));
        }
    }
}

/* Sums of bf16 dweight over many chunks are as good as rounded twice, once before the targets' part is added: to 1.7e-3 sqrt(2)
 * of what they are at most. Rounded to bf16 after every chunk they would have more than that. */
static void sums_of_24_bits(void)
{
    problem p = plain(TEST_BF16, BOTH, FUSED, 24 * test_pick(16, 8), 32, test_pick(300, 130));
    p.sigma = 2, p.on[MEAN] = p.on[DWEIGHT_F32] = true, p.chunk = p.tokens / 24;
    settle_tensors(&p);
    if (!setup(&p, 0) || !launched(&p, launch(&p))) return;
    collect(&p);
    const int64_t n = p.vocab * p.hidden;
    float *const exact = (float *)malloc((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) exact[i] = (float)result(DWEIGHT, i / p.hidden, i % p.hidden);
    p.on[DWEIGHT_F32] = false, settle_tensors(&p);
    if (setup(&p, 0) && launched(&p, launch(&p))) {
        double error = 0, size = 0;
        collect(&p);
        for (int64_t i = 0; i < n; i++) {
            const double want = (double)exact[i], off = (double)result(DWEIGHT, i / p.hidden, i % p.hidden) - want;
            error += off * off, size += want * want;
        }
        if (!test_that(plan.chunks == 24 && strstr(plan.text, "24 bits"))) test_detail("%s", plan.text);
        if (!test_within(sqrt(error / size), 1.8e-3)) test_detail("dweight has %g; %s", sqrt(error / size), describe(&p));
    }
    free(exact);
}

/* Sums of dx over many panels are as good as those of one panel, whose dZ has the same bits. With dlse alone the target, which
 * the last panel adds in float, is no more than the other columns are. */
static void sums_of_dx(void)
{
    problem p = plain(TEST_BF16, BACKWARD, FUSED, 140, 16, 256 * test_pick(16, 8));
    double error[2], row;
    p.on[UPSTREAM_ONE] = p.on[HAS_DLSE] = p.on[NO_DWEIGHT] = true, p.one = 1e-6f;
    for (int i = 0; i < 2; i++) {
        p.panel = i ? 256 : p.vocab;
        settle_tensors(&p);
        if (!setup(&p, 0) || !launched(&p, launch(&p))) return;
        collect(&p), differentiate(&p), error[i] = frobenius(&p, DX, &row);
        if (!test_that(plan.panels == p.vocab / p.panel)) test_detail("%s", plan.text);
    }
    if (!test_within(error[1], 1.05 * error[0]))
        test_detail("dx has %g, of one panel %g; %s", error[1], error[0], describe(&p));
}

/* Rows of dx and dweight that end within a group of 8 though they start at multiples of it: what follows is not theirs. */
static void rows_with_gaps(void)
{
    for (int i = 0; i < 4; i++) {
        problem p = plain(TEST_BF16, BOTH, FUSED, 300, 13, 70);
        p.stride[X] = p.stride[WEIGHT] = p.stride[DX] = p.stride[DWEIGHT] = 16;
        p.on[MEAN] = true, p.on[DWEIGHT_F32] = i % 2, p.on[ACCUMULATE] = i / 2, p.chunk = i == 2 ? 100 : 0;
        run(p);
    }
}

/* A target at -inf: loss +inf, gradient finite and right; only the loss differs from what the other tests see. */
static void masked_target(int type, int path)
{
    problem p = plain(type, BOTH, path, 6, 8, 40);
    p.on[HAS_BIAS] = p.on[MASK] = true, p.panel = 16;
    settle_tensors(&p);
    for (; p.seed % 4096; p.seed++) { /* a seed that masks some targets */
        laid[TARGET] = layout_of(&p, TARGET), test_buffer_size(&buffers[TARGET], 6 * 8, 0, 0), fill_targets(&p);
        if ((target_of(2) * 7 + 3) % 5 == 0) break;
    }
    run(p);
    if (!test_that(isinf(outcomes[2].class_loss))) test_detail("the oracle's loss is %g", outcomes[2].class_loss);
}

/* Fused with every workspace from the smallest up: exponentials of no column, of some and of all are kept, some in dweight. */
static void some_columns_kept(void)
{
    int none = 0, some = 0, lent = 0, all = 0;
    for (int i = 0; i < test_pick(24, 12); i++) {
        problem p = plain(TEST_BF16, BOTH, FUSED, 20, 16, 9000 + 70 * (i % 3));
        p.on[MEAN] = true, p.budget = 100000 + (size_t)i * test_pick(15000, 30000);
        p.on[WANT_DBIAS] = i % 2, p.on[DWEIGHT_F32] = i % 4 / 2, p.on[SOFTCAP] = i % 5 == 1, p.on[ACCUMULATE] = i % 7 == 3;
        p.on[NO_DX] = i % 11 == 5, p.on[NO_DWEIGHT] = i % 11 == 7, p.on[HAS_DLSE] = i % 3 == 1, p.sigma = i % 4 == 2 ? 40 : 1;
        p.on[IGNORE] = p.on[COMPACT] = i % 6 == 4;
        run(p);
        none += plan.kept_vocab == 0, all += plan.kept_vocab == p.vocab;
        some += plan.kept_vocab > 0 && plan.kept_vocab < p.vocab, lent += plan.lent_vocab > 0;
    }
    if (!test_that(none && some && lent > some && all))
        test_detail("kept: none %d, some %d, in dweight %d, all %d", none, some, lent, all);
    for (int i = 0; i < 2; i++) { /* dweight of columns that are kept and of others; what is added to lends nothing */
        problem p = plain(TEST_BF16, BOTH, FUSED, 20, 16, 12000);
        p.on[MEAN] = p.on[WANT_DBIAS] = true, p.on[ACCUMULATE] = i, p.budget = 350000;
        run(p);
        if (!test_that((plan.lent_vocab > 0) == !i && plan.kept_vocab > plan.lent_vocab && plan.kept_vocab < p.vocab))
            test_detail("%s", plan.text);
    }
}

/* What `saved` holds where path 0 chooses: logits, or the exponentials of FUSED. */
static bool saves_logits(const problem *p)
{
    if (test_split_over) return false;
    if (p->path) return p->path == LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    if (p->type != TEST_BF16 || !fused_here || p->on[SMOOTHING]) return true;
    args_t a = {}; /* which takes less time, the planner says: what_is_saved has cases */
    plan_t of = {};
    a.tokens = p->tokens, a.hidden = p->hidden, a.vocab = p->vocab, a.max_counted = max_counted_of(p);
    a.saved = &of, a.loss = (float *)&of, a.bias = p->on[HAS_BIAS] ? &of : NULL, a.softcap = p->on[SOFTCAP] ? p->softcap : 0;
    test_that(lk_linear_cross_entropy_forward_plan_bf16(&a, SIZE_MAX, &of) == LK_OK);
    return of.path == LK_LINEAR_CROSS_ENTROPY_CHUNKS;
}

/* forward leaves logits or exponentials, and backward makes the gradients from them, twice: it only reads them. Some calls are
 * those of one rank, whose backward is given `others`. */
static void saved_for_backward(void)
{
    static const int64_t vocab[] = {1, 97, 600, 256, 16, 17, 32, 2050};
    static const int types[] = {TEST_BF16, TEST_F32, TEST_BF16, TEST_F16};
    static test_buffer saved, before;
    int held[2] = {0, 0}, several = 0, differ = 0;
    for (int seed = 0; seed < test_pick(96, 28); seed++) { /* 27: of a rank with few columns */
        test_split_over = fused_here && seed % 4 == 3;
        int path = seed % 3 ? seed % 3 > 1 ? (int)FUSED : (int)LK_LINEAR_CROSS_ENTROPY_CHUNKS : 0;
        if (test_split_over && path) path = FUSED;
        if (path == FUSED && !fused_here) continue;
        const int type = test_split_over || path == FUSED ? (int)TEST_BF16 : types[seed / 3 % 4];
        problem back = drawn(type, BACKWARD, path, 1 + seed % 4 * 9, 8 + 8 * (seed % 2), vocab[seed / 2 % 8], seed);
        const problem lengths = back;
        if (back.vocab == 2050) back.tokens = 5; /* too many for rounds, and no multiple of 8 */
        leave_open(&back);
        if (!test_split_over && path == 0 && seed % 6) back.on[SMOOTHING] = false;
        if (!saves_logits(&back))
            back.on[SMOOTHING] = back.on[WANT_ENTROPY] = back.on[WANT_ARGMAX] = back.on[HAS_DENTROPY] = back.on[STATISTICS] =
                false;
        else if (seed % 4 == 1) back.chunk = lengths.chunk, back.panel = lengths.panel, back.slice = lengths.slice;
        back.over = seed % 5 == 0, back.sigma = seed % 7 == 3 ? 64 : 1.3;
        if (seed == 6 && fused_here) { /* where p - 1 has few digits, or none */
            back = plain(TEST_BF16, BACKWARD, FUSED, 9, 16, 85), back.sigma = 0.1;
            back.confident = back.on[HAS_BIAS] = back.on[BIAS_F32] = back.on[WANT_DBIAS] = back.on[DBIAS_F32] = true;
            back.on[DWEIGHT_F32] = true;
        }
        const bool logits = saves_logits(&back);
        const int64_t each = logits && !(back.on[FAST] && type != TEST_F32) ? 4 : 2;
        held[logits]++;
        problem there = back;
        there.direction = FORWARD, there.budget = 0;
        if (seed % 8 == 1) there.chunk = 0; /* all at once, and in backward not */
        size_t bytes = 0;
        settle_tensors(&there), settle_tensors(&back), saved_now = NULL;
        if (!setup(&there, 0)) return;
        const rank_args asked = there.ranks ? slice_of(&there, 0) : rank_args{};
        const lk_status status = there.ranks ? rank_saved_bytes_of[type](&asked, &bytes) : saved_bytes_of[type](&args, &bytes);
        const size_t least = (size_t)(there.on[COMPACT] ? 0 : there.tokens * there.vocab * each);
        const size_t most = (size_t)(there.tokens * ((there.vocab + 63) / 64 * 64 * each + 12) + 2048);
        if (!test_that(status == LK_OK && bytes >= least && bytes <= most))
            test_detail("%zu bytes, not %zu to %zu, %s; %s", bytes, least, most, lk_last_error(), describe(&there));
        test_buffer_size(&saved, bytes, (size_t)(seed % 3), 0xff), upload(&saved);
        saved_now = test_buffer_device(&saved);
        run(there);
        test_buffer_download(&saved);
        test_buffer_size(&before, bytes, 0, 0);
        memcpy(test_buffer_host(&before), test_buffer_back(&saved), bytes);
        if (bytes) memcpy(test_buffer_back(&saved), test_buffer_host(&saved), bytes); /* all but its bytes is as it was */
        (void)test_buffer_untouched(&saved, "saved", describe(&there));
        run(back);
        test_buffer_download(&saved);
        if (!test_that(!memcmp(test_buffer_host(&before), test_buffer_back(&saved), bytes))) test_detail("backward wrote into saved");
        const int made_by = logits ? (int)LK_LINEAR_CROSS_ENTROPY_CHUNKS : (int)FUSED;
        several += logits && plan.chunks > 1;
        if (!test_that(plan.path == made_by && plan.matmuls == (int)back.has[DX] + (int)back.has[DWEIGHT] && !plan.slice_tokens))
            test_detail("%s; %s", plan.text, describe(&back));
        if (logits && back.has[DX]) { /* of other logits */
            memset(test_buffer_host(&saved), 0, bytes), upload(&saved);
            if (!setup(&back, 0) || !launched(&back, launch(&back))) return;
            collect(&back);
            const size_t each_row = (size_t)(back.hidden * laid[DX].bytes);
            for (int64_t at = 0; at < back.tokens; at++) {
                const size_t from = (size_t)(at * laid[DX].stride * laid[DX].bytes);
                differ += memcmp(kept[DX] + from, (char *)test_buffer_back(&buffers[DX]) + from, each_row) != 0;
            }
        }
        saved_now = NULL, test_split_over = 0;
    }
    if (!test_that(differ > 0)) test_detail("other logits in saved give the same dx");
    if (!test_that(held[1] > 0 && (held[0] > 0) == fused_here && several > 1))
        test_detail("exponentials %d, logits %d, in several chunks %d", held[0], held[1], several);
}

/* What cannot be saved; and what path 0 saves, which both directions have to find alike. */
static void what_is_saved(void)
{
    alignas(256) static int64_t dummy[32];
    static const char *const said[] = {"PANELS", "batch_invariant", "label_smoothing", "multiples of 16", "entropy", "argmax",
                                       "batch_invariant", "dentropy", "multiples of 16", "entropy", "batch_invariant"};
    for (int i = 0; i < (fused_here ? LENGTH_OF(said) : 1); i++) {
        const bool backward = i == 7, by_itself = i >= 8;
        args_t a = {};
        plan_t of = {};
        a.x = a.weight = a.target = dummy, a.loss = (float *)dummy, a.tokens = 4, a.hidden = a.vocab = 8, a.saved = dummy;
        a.path = by_itself || i == 1 ? 0 : i ? (int)FUSED : (int)LK_LINEAR_CROSS_ENTROPY_PANELS;
        if (by_itself) a.tokens = 8192, a.hidden = 64, a.vocab = 16384; /* FUSED takes less time */
        if (i == 1 || i == 6 || i == 10) a.batch_invariant = 1;
        if (i == 2) a.label_smoothing = 0.1f;
        if (i == 3 || i == 8) a.weight = (char *)dummy + 2;
        if (i == 4) a.entropy = (float *)dummy;
        if (i == 9) a.statistics = 1;
        if (i == 5) a.argmax = dummy;
        if (backward) a.dentropy = a.lse = (float *)dummy, a.dx = dummy;
        const lk_status status = backward ? lk_linear_cross_entropy_backward_plan_bf16(&a, 1 << 30, &of)
                                          : lk_linear_cross_entropy_forward_plan_bf16(&a, 1 << 30, &of);
        if (!test_that(status == LK_ERR_PATH && strstr(lk_last_error(), said[i])))
            test_detail("%d: %s, %s", i, lk_status_string(status), lk_last_error());
    }
    static const struct {
        int64_t vocab;
        bool smoothing, fast, logits;
        int64_t tokens;
    } cases[] = {{4096, false, false, true, 8192},  {16385, false, false, false, 8192}, {16384, false, false, false, 8192},
                 {2049, true, false, true, 8192},   {2047, false, false, true, 8192},  {8200, false, false, false, 16384},
                 {8192, true, true, true, 8192},    {4096, false, true, true, 8192},   {8192, false, false, true, 32}};
    for (const auto &k : cases)
        for (int given = 0; given < 2; given++) {
            args_t a = {};
            plan_t of[2] = {};
            size_t bytes = 0;
            a.loss = (float *)dummy, a.tokens = k.tokens, a.hidden = 2048, a.vocab = k.vocab, a.saved = dummy;
            a.label_smoothing = k.smoothing ? 0.1f : 0, a.fast_logits = k.fast;
            if (given) a.x = a.weight = a.target = dummy;
            lk_status status = lk_linear_cross_entropy_saved_bytes_bf16(&a, &bytes);
            if (!status) status = lk_linear_cross_entropy_forward_plan_bf16(&a, SIZE_MAX, &of[0]);
            a.entropy = (float *)dummy, a.argmax = dummy, a.dx = dummy; /* forward's, which backward does not look at */
            if (!status) status = lk_linear_cross_entropy_backward_plan_bf16(&a, SIZE_MAX, &of[1]);
            const bool logits = k.logits || !fused_here;
            const size_t row = (size_t)((k.vocab + 63) / 64 * 64 * (logits && !k.fast ? 4 : 2));
            const int made_by = logits ? (int)LK_LINEAR_CROSS_ENTROPY_CHUNKS : (int)FUSED;
            const bool alike = of[0].path == made_by && of[1].path == made_by && of[1].matmuls == 1;
            if (!test_that(status == LK_OK && alike && bytes >= (size_t)k.tokens * row && bytes < (size_t)k.tokens * (row + 12) + 2048))
                test_detail("vocab %lld, %zu bytes: %s; %s; %s", (long long)k.vocab, bytes, of[0].text, of[1].text,
                            lk_last_error());
        }
}

/* More rows than a group of the fused path's tiles has, several runs of columns. Then more rows than the targets' kernel looks
 * at together, with few targets, and more of hidden than its blocks have threads for. */
static void many_rows(int direction)
{
    problem p = plain(TEST_BF16, direction, FUSED, test_pick(3300, 300), 8, 300);
    p.panel = 256, p.on[MEAN] = p.on[IGNORE] = true;
    run_both_ways(p);
    for (int i = 0; i < 2 && gives_gradient(direction); i++) {
        p = plain(TEST_BF16, direction, FUSED, i ? 5 : 2100, i ? 2060 : 8, 4);
        p.on[MEAN] = p.on[WANT_DBIAS] = true;
        run(p);
    }
    if (direction != BOTH) return;
    p = plain(TEST_BF16, BOTH, FUSED, 1792, 8, 300); /* a last chunk of fewer tokens could use more stretches */
    p.chunk = 1024;
    run(p);
}

/* The second may say besides that the device, or its code, keeps the fused path away. */
static bool alike_but_for_the_device(const plan_t *one, const plan_t *other)
{
    return !memcmp(one, other, offsetof(plan_t, text)) && !strncmp(one->text, other->text, strlen(one->text));
}

/* A token's results have the same bits for any number of tokens, at any place among them, compacted or not, and whatever the
 * workspace and chunk_tokens. Without the switch 300 tokens of 34 tiles of columns have other stretches than 255. */
static void invariant(int variant)
{
    static const int outputs[] = {LOSS, LSE, Z_LOSS, ENTROPY, ARGMAX};
    static const int64_t subsets[][2] = {{1, 0},    {1, 299},   {1, 150}, {2, 298}, {2, 63},
                                         {127, 100}, {127, 173}, {255, 0}, {255, 45}};
    int64_t between = 0; /* columns between two merges: by the device, as many tiles as columns have or fewer; or by the caller */
    problem p = plain(TEST_BF16, FORWARD, LK_LINEAR_CROSS_ENTROPY_AUTO, 300, 8, variant == 1 ? 30 * 256 + 40 : 34 * 256);
    p.has[Z_LOSS] = p.on[Z] = p.on[IGNORE] = true, p.seed += (uint64_t)variant;
    p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = variant > 0, p.on[HAS_BIAS] = p.on[SOFTCAP] = p.on[WEIGHTS] = variant > 1;
    p.on[SMOOTHING] = variant > 1, p.on[STATISTICS] = variant == 1;
    settle_tensors(&p);
    for (int i = -1; i < 2 * LENGTH_OF(subsets); i++) {
        if (i >= 0 && test.small && i % 3 != variant) continue;
        const int64_t tokens = i < 0 ? p.tokens : subsets[i / 2][0], first = i < 0 ? 0 : subsets[i / 2][1];
        if (i < 0 && !setup(&p, 0)) return;
        for (int o = 0; o < LENGTH_OF(outputs) && i >= 0; o++)
            if (p.has[outputs[o]]) upload(&buffers[outputs[o]]); /* poison */
        const args_t whole = args;
        int64_t counted = 0;
        for (int64_t token = first; token < first + tokens; token++) counted += !ignored(&p, token);
        const int compacts = i % 2;
        args.batch_invariant = 1, args.tokens = tokens;
        args.x = (const lk_bf16 *)whole.x + first * p.hidden, args.target = (const int64_t *)whole.target + first;
        if (i >= 0 && i % 2) args.max_counted = counted ? counted : 1;
        if (i >= 0) args.chunk_tokens = i % 4 * 16;
        if (variant == 2) args.panel_vocab = 3 * 256;
        plan_t of = {};
        size_t bytes = 0;
        lk_status status = smallest(&p, &bytes);
        if (i % 3 == 1) bytes = bytes * 3 / 2;
        if (!status) status = plan_of(&p, bytes, &of);
        static test_buffer own;
        test_buffer_size(&own, bytes, 0, 0x5a), upload(&own);
        set_workspace(test_buffer_device(&own), bytes);
        if (!status) status = launch(&p);
        if (!launched(&p, status)) return;
        collect(&p);
        args = whole;
        if (i < 0) between = of.panel_vocab;
        if (!test_that(of.path == FUSED && of.panel_vocab == between && (variant == 2 ? between == 3 * 256 : between < p.vocab)))
            test_detail("plan: %s", of.text);
        for (int o = 0; o < LENGTH_OF(outputs); o++) {
            const int t = outputs[o];
            if (!p.has[t]) continue;
            const size_t bytes_out = (size_t)laid[t].bytes, from = (size_t)first * bytes_out, all = buffers[t].bytes;
            const char *const back = (const char *)test_buffer_back(&buffers[t]);
            if (i < 0) kept[t] = (unsigned char *)test_room(kept[t], &kept_bytes[t], all), memcpy(kept[t], back, all);
            const int64_t each = t == ENTROPY && p.on[STATISTICS] ? 4 : 1; /* results of a token */
            for (int64_t i = 0; i < each * tokens; i++) {
                const int64_t token = i % tokens, of_all = i / tokens * p.tokens + token;
                if (!test_that(!memcmp(kept[t] + from + (size_t)of_all * bytes_out, back + (size_t)i * bytes_out, bytes_out)))
                    test_detail("%s of token %lld has other bits as token %lld of %lld, variant %d, max_counted %d",
                                tensor_name[t], (long long)(first + token), (long long)token, (long long)tokens, variant,
                                compacts);
            }
        }
        if (i < 0) verify(&p);
    }
}

/* Path 0 with every workspace from the smallest up is the path that the query says, by name, in the same workspace: the same
 * plan and the same bits. `seen` is what device lk is told that there is. Enough tokens and columns for fused gradients to be the
 * faster ones on this number of SMs. */
static void choices_by_name(int direction, int seen)
{
    const bool many = test.sms > 8;
    int fused = 0, kept = 0;
    for (int i = 0; i < (many ? 15 : test_pick(16, 8)); i += many ? 7 : 1) {
        problem p = plain(TEST_BF16, direction, LK_LINEAR_CROSS_ENTROPY_AUTO, many ? 1024 : 600, 16, many ? 16384 : 101);
        p.on[MEAN] = p.on[WANT_DBIAS] = true, p.on[HAS_BIAS] = !many, p.on[DWEIGHT_F32] = i % 2, p.on[FAST] = i % 4 > 1;
        p.budget = many ? (size_t)12000 << i : i / 2 ? (size_t)12000 << i / 2 * test_pick(1, 2) : 0;
        see_device(seen);
        run(p);
        fused += plan.path == FUSED, kept += plan.path != FUSED;
        const plan_t chosen = plan;
        p.path = chosen.path, settle_tensors(&p);
        if (!setup(&p, 0)) break;
        const size_t own_minimum = plan.minimum_bytes;
        plan.minimum_bytes = chosen.minimum_bytes; /* of all paths */
        const bool same = alike_but_for_the_device(&plan, &chosen);
        if (!test_that(own_minimum >= chosen.minimum_bytes && same))
            test_detail("%s; by itself: %s; %s", plan.text, chosen.text, describe(&p));
        if (!launched(&p, launch(&p))) break;
        collect(&p), settle(&p, false, "the path by name");
    }
    see_device(THIS_DEVICE);
    const bool may = seen == THIS_DEVICE && has_path(TEST_BF16, FUSED) && (direction != BACKWARD || many); /* else CHUNKS come first */
    const bool some = kept > 0 || direction == FORWARD; /* its smallest plan is fused too */
    if (!test_that(some && (fused > 0) == may)) test_detail("%d plans fused, %d not", fused, kept);
}

/* What the fused path is not for is refused in words, by the queries too. */
static void fused_refusals(void)
{
    const struct {
        int type, path, seen;
        size_t off; /* of x */
        const char *said;
        bool both = false; /* statistics and label_smoothing */
    } invariants[] = {{TEST_F32, 0, THIS_DEVICE, 0, "batch_invariant needs path LK_LINEAR_CROSS_ENTROPY_FUSED, which is for b"},
                      {TEST_BF16, LK_LINEAR_CROSS_ENTROPY_CHUNKS, THIS_DEVICE, 0, "batch_invariant needs path 0 or"},
                      {TEST_BF16, LK_LINEAR_CROSS_ENTROPY_PANELS, THIS_DEVICE, 0, "path is 2"},
                      {TEST_BF16, 0, 80, 0, "which is for sm_90a"},
                      {TEST_BF16, 0, THIS_DEVICE, 2, "which is for x and weight at multiples of 16"},
                      {TEST_BF16, 0, THIS_DEVICE, 0, "which is for calls without both statistics and label_smoothing", true},
                      {TEST_BF16, 0, THIS_DEVICE, 0, NULL}, {TEST_BF16, FUSED, THIS_DEVICE, 0, NULL}};
    for (int i = 0; i < LENGTH_OF(invariants); i++) {
        alignas(256) static int64_t some[32];
        problem p = plain(invariants[i].type, FORWARD, invariants[i].path, 4, 8, 8);
        void *at[TENSORS] = {};
        at[X] = (char *)some + invariants[i].off, at[WEIGHT] = some, at[LOSS] = some;
        set_args(&p, at), args.batch_invariant = 1;
        if (invariants[i].both) args.statistics = 1, args.label_smoothing = 0.1f;
        plan_t of = {};
        see_device(invariants[i].seen);
        const lk_status status = plan_of(&p, 1 << 30, &of);
        see_device(THIS_DEVICE);
        const char *const said = invariants[i].said;
        if (!test_that(said ? status == LK_ERR_PATH && strstr(lk_last_error(), said) : status == LK_OK && of.path == FUSED))
            test_detail("batch_invariant %d: %s, %s", i, lk_status_string(status), lk_last_error());
        p.direction = BOTH, p.path = LK_LINEAR_CROSS_ENTROPY_CHUNKS; /* a field of forward's alone */
        set_args(&p, at), args.batch_invariant = 1;
        if (!test_that(plan_of(&p, 1 << 30, &of) == LK_OK)) test_detail("batch_invariant: %s", lk_last_error());
    }
    problem none = plain(TEST_BF16, FORWARD, LK_LINEAR_CROSS_ENTROPY_AUTO, 0, 8, 8);
    void *const nowhere[TENSORS] = {};
    set_args(&none, nowhere), args.batch_invariant = 1;
    if (!test_that(launch(&none) == LK_OK)) test_detail("batch_invariant without tokens: %s", lk_last_error());
    alignas(256) static int64_t dummy[32];
    static const char *const said[] = {"", "bf16", "multiples of 16", "multiples of 16", "multiples of 8", "2^38", ""};
    for (int i = 0; i < LENGTH_OF(said); i++) {
        args_t a = {};
        plan_t of = {};
        a.x = a.weight = a.target = a.dx = dummy, a.loss = (float *)dummy, a.tokens = 4, a.hidden = a.vocab = 8, a.path = FUSED;
        if (i == 2 || i == 6) a.x = (char *)dummy + 2;
        if (i == 3) a.weight = (char *)dummy + 8;
        if (i == 4) a.weight_stride = 12;
        if (i == 5) a.x_stride = ((int64_t)1 << 38) + 8;
        if (i == 6) a.max_counted = 2; /* x is copied */
        const lk_status status = i == 1 ? lk_linear_cross_entropy_forward_backward_plan_f16(&a, 1 << 30, &of)
                                        : lk_linear_cross_entropy_forward_backward_plan_bf16(&a, 1 << 30, &of);
        const bool right = said[i][0] ? status == LK_ERR_PATH && strstr(lk_last_error(), said[i]) : status == LK_OK;
        if (!test_that(right)) test_detail("%d: %s, %s", i, lk_status_string(status), lk_last_error());
    }
}

/* With memory for all columns FUSED makes them in one panel, and so it does in the workspace that this plan says. */
static void one_panel(int direction)
{
    static const int64_t vocabs[] = {257, 4000, 32000, 50257, 131072};
    for (int i = 0; i < LENGTH_OF(vocabs); i++) {
        problem p = plain(TEST_BF16, direction, FUSED, 8192, 4096, vocabs[i]);
        alignas(256) static int64_t some[32];
        void *at[TENSORS] = {};
        at[X] = at[WEIGHT] = at[TARGET] = at[LSE] = at[DX] = at[DWEIGHT] = some;
        plan_t of = {}, again = {};
        p.on[SMOOTHING] = true; /* exponentials are not kept */
        set_args(&p, at);
        lk_status status = plan_of(&p, (size_t)8 << 30, &of);
        if (!status) status = plan_of(&p, of.workspace_bytes, &again);
        if (!test_that(!status && of.panels == 1 && again.panels == 1))
            test_detail("%s, then %s, %s", of.text, again.text, status ? lk_last_error() : "");
    }
}

/* The last columns and the others give dx two sums that nearly cancel, each beyond f16's range: dx is within it. A bias makes
 * column 0 all of p, with weights of 3, and the last column is the target, with weights of 3.5. */
static void cancelling_columns(int type, int direction, int path)
{
    for (int i = 0; i < 4; i++) {
        problem p = plain(type, direction, path, 3, 8, i % 2 ? 10 : 43);
        p.on[HAS_BIAS] = p.on[BIAS_F32] = p.on[UPSTREAM_ONE] = true, p.one = 65536, p.aim = p.vocab, p.sigma = 1e-3;
        p.chunk = i == 2 ? 2 : 0, p.on[FAST] = i == 3, p.on[STRIDES] = i == 1;
        settle_tensors(&p);
        if (!setup(&p, 0)) return;
        for (int64_t d = 0; d < p.hidden; d++) {
            test_put(p.type, test_buffer_host(&buffers[WEIGHT]), d, d % 2 ? -3.0f : 3.0f);
            test_put(p.type, test_buffer_host(&buffers[WEIGHT]), (p.vocab - 1) * laid[WEIGHT].stride + d, d % 2 ? -3.5f : 3.5f);
            test_put(p.type, test_buffer_host(&buffers[X]), d, 0);
        }
        ((float *)test_buffer_host(&buffers[BIAS]))[0] = 12;
        upload(&buffers[WEIGHT]), upload(&buffers[X]), upload(&buffers[BIAS]);
        examine_all(&p);
        if (direction == BACKWARD) fill_saved(&p), upload(&buffers[LSE]);
        if (!launched(&p, launch(&p))) return;
        collect(&p), verify(&p);
        const double first = dz[0] * 3, last = dz[p.vocab - 1] * 3.5; /* parts of dx[0, 0], of token 0 */
        if (!test_that(fabs(first) > 65520 && fabs(last) > 65520 && fabs(first + last) < 60000))
            test_detail("the sums are %g and %g, which is no test", first, last);
    }
}

/* The sums of label smoothing and of entropy over a row of many tiles. All logits but each eighth thousand's first are `gap`
 * lower, so all terms are equal and every rounding of a running sum goes the same way: one chain over a thread's quarter of the
 * row is off by several times this limit. A tile has 64 of a thread's terms, and its sum is added to those of the tiles
 * before it. */
static void options_of_long_rows(void)
{
    static const float gaps[] = {50.3f, 0.7f};
    for (int i = 0; i < 2; i++) {
        problem p = plain(TEST_BF16, FORWARD, FUSED, 2, 8, 32768);
        p.on[HAS_BIAS] = p.on[BIAS_F32] = p.on[i ? WANT_ENTROPY : SMOOTHING] = true, p.smoothing = 1, p.aim = p.vocab;
        settle_tensors(&p);
        if (!setup(&p, 0)) return;
        for (int64_t d = 0; d < p.hidden * p.tokens; d++) test_put(p.type, test_buffer_host(&buffers[X]), d / 8 * laid[X].stride + d % 8, 0);
        for (int64_t c = 0; c < p.vocab; c++) ((float *)test_buffer_host(&buffers[BIAS]))[c] = c % 8192 < 256 ? gaps[i] : 0;
        upload(&buffers[X]), upload(&buffers[BIAS]);
        examine_all(&p);
        if (!launched(&p, launch(&p))) return;
        collect(&p);
        const double terms = 64 + (double)p.vocab / 256 + 32, limit = gaps[i] * (terms * 0x1p-24 + 0x1p-22) + 32 * 0x1p-24;
        for (int64_t token = 0; token < p.tokens; token++) {
            const double want = i ? outcomes[token].entropy : outcomes[token].class_loss;
            const double got = result(i ? ENTROPY : LOSS, token, 0);
            if (!test_within(fabs(got - want), limit + 2 * fabs(want) * 0x1p-24))
                test_detail("%s[%lld] is %g, off by %g", i ? "entropy" : "loss", (long long)token, got, got - want);
        }
    }
}

/* An odd number of columns under a softcap: a thread's last pair has a column that is none of the row's, with the bias of nobody. */
static void odd_rows_under_softcap(void)
{
    for (int direction = 0; direction < DIRECTIONS; direction++)
        for (int i = 0; i < 2; i++) {
            problem p = plain(TEST_BF16, direction, FUSED, 6, 40, 59);
            p.on[HAS_BIAS] = p.on[BIAS_F32] = p.on[SOFTCAP] = true, p.on[WANT_ENTROPY] = i, p.softcap = 5;
            settle_tensors(&p);
            run(p);
        }
}

static void all_sequences(void)
{
    for (int type = 0; type < TEST_TYPES; type++) {
        const char *const name = test_type_name[type];
        if (test_begin("forward, backward and forward_backward %s", name)) sequences(type), test_finish();
        for (int path = LK_LINEAR_CROSS_ENTROPY_CHUNKS; path < PATHS; path++) {
            if (type == TEST_F16 || !has_path(type, path) || !test_begin("%s %s: far from 0", path_name[path], name)) continue;
            far_from_0(type, path), test_finish();
        }
        if (test_begin("accuracy %s", name)) accuracy(type, false), test_finish();
        if (test_begin("accuracy %s, fast logits", name)) accuracy(type, true), test_finish();
        if (type != TEST_F32 && test_begin("rounding alike %s", name)) rounding_alike(type), test_finish();
        for (int direction = BACKWARD; direction <= BOTH; direction++) {
            if (!test_begin("%s %s: sums of dx that cancel", direction_name[direction], name)) continue;
            for (int path = 0; path < PATHS; path++)
                if (has_path(type, path)) cancelling_columns(type, direction, path);
            test_finish();
        }
        if (!test_begin("a target at -inf %s", name)) continue;
        for (int path = 0; path < PATHS; path++)
            if (has_path(type, path)) masked_target(type, path);
        test_finish();
    }
    for (int direction = 0; direction < DIRECTIONS; direction++)
        if (has_path(TEST_BF16, FUSED) && test_begin("%s fused, many rows", direction_name[direction]))
            many_rows(direction), test_finish();
    if (fused_here && test_begin("forward fused, options of long rows")) options_of_long_rows(), test_finish();
    if (fused_here && test_begin("fused, odd rows under a softcap")) odd_rows_under_softcap(), test_finish();
    if (fused_here && test_begin("forward_backward fused, rows with gaps")) rows_with_gaps(), test_finish();
    if (fused_here && test_begin("forward_backward fused, some columns kept")) some_columns_kept(), test_finish();
    if (test_begin("backward from what forward saved")) saved_for_backward(), test_finish();
    if (test_begin("what is saved")) what_is_saved(), test_finish();
    if (test_begin("a rank without columns")) empty_rank(), test_finish();
    for (int variant = 0; variant < 3; variant++)
        if (fused_here && test_begin("batch_invariant, variant %d", variant)) invariant(variant), test_finish();
    if (fused_here && test_begin("sums of 24 bits")) sums_of_24_bits(), sums_of_dx(), test_finish();
    if (fused_here && test_begin("what fused is not for")) fused_refusals(), test_finish();
    for (int direction = BACKWARD; fused_here && direction <= BOTH; direction++)
        if (test_begin("%s: one panel where there is memory", direction_name[direction])) one_panel(direction), test_finish();
    for (int direction = 0; direction < DIRECTIONS; direction++)
        if (test_begin("%s: path 0 and the path by name", direction_name[direction])) {
            choices_by_name(direction, THIS_DEVICE);
            choices_by_name(direction, 80);
            test_finish();
        }
    for (int direction = BACKWARD; direction <= BOTH; direction++)
        if (test_begin("%s f32: central differences", direction_name[direction])) differences(direction), test_finish();
}

/* ---- Errors ---------------------------------------------------------------------------------------------------------- */

static lk_linear_cross_entropy_context blank; /* that init has not seen */

/* The calls that errors are told from: every tensor given, 4 tokens, hidden and vocab 8, a mean. */
static void good_calls(const problem *p)
{
    void *at[TENSORS];
    size_t bytes = 0;
    for (int t = 0; t < TENSORS; t++) {
        test_buffer_size(&buffers[t], 512, 0, 0x3c), upload(&buffers[t]);
        at[t] = test_buffer_device(&buffers[t]);
    }
    set_args(p, at);
    if (!test_that(smallest(p, &bytes) == LK_OK && bytes > 0)) test_detail("a plan says %zu bytes, %s", bytes, lk_last_error());
    test_buffer_size(&buffers[WORKSPACE], bytes + 256, 0, 0x3c); /* room to move it */
    upload(&buffers[WORKSPACE]);
    set_workspace(test_buffer_device(&buffers[WORKSPACE]), bytes);
}

/* The direction's args as they now are must fail with `want` and name `field`; the query too, but for what it does not look at:
 * pointers, the context and the workspace. */
static void expect_error(const problem *p, lk_status want, const char *field)
{
    const lk_status status = launch(p);
    test_expect(status, want, field, "lk_linear_cross_entropy", direction_name[p->direction], p->type);
    size_t asked = TEST_NOT_ASKED;
    const lk_status answer = query(p, &asked);
    const bool pointers = want == LK_ERR_NULL || want == LK_ERR_ALIGNMENT;
    const bool not_asked = pointers || want == LK_ERR_WORKSPACE || !strcmp(field, "context") || !strcmp(field, "overlap");
    test_expect_query(answer, not_asked ? LK_OK : want, asked, field);
    TEST_CUDA(cudaStreamSynchronize(test.stream));
    for (int t = 0; t <= TENSORS; t++) test_expect_unwritten(status, &buffers[t], tensor_name[t], field);
}

#define BAD_CALL(status, field, ...) (good_calls(p), __VA_ARGS__, expect_error(p, status, field))

/* The fields that every direction has. */
static void common_errors(const problem *p, args_t &a)
{
    BAD_CALL(LK_OK, "nothing", a.path = 0);
    BAD_CALL(LK_ERR_NULL, "context", a.context = NULL);
    BAD_CALL(LK_ERR_NULL, "x is", a.x = NULL);
    BAD_CALL(LK_ERR_NULL, "weight is", a.weight = NULL);
    BAD_CALL(LK_ERR_NULL, "target is", a.target = NULL);
    struct {
        const char *name;
        int64_t *at, least, most;
    } const sizes[] = {{"tokens", &a.tokens, 0, INT32_MAX}, {"hidden", &a.hidden, 1, 1 << 30}, {"vocab", &a.vocab, 1, 1 << 30},
                       {"max_counted", &a.max_counted, 0, 0}, {"chunk_tokens", &a.chunk_tokens, 0, 0},
                       {"panel_vocab", &a.panel_vocab, 0, 0}};
    for (int i = 0; i < LENGTH_OF(sizes); i++) {
        BAD_CALL(LK_ERR_SHAPE, sizes[i].name, *sizes[i].at = sizes[i].least - 1);
        BAD_CALL(LK_ERR_SHAPE, sizes[i].name, (*sizes[i].at = INT64_MIN, a.z_loss = -1));
        if (sizes[i].most) BAD_CALL(LK_ERR_SHAPE, sizes[i].name, *sizes[i].at = sizes[i].most + 1);
    }
    int64_t *const strides[] = {&a.x_stride, &a.weight_stride};
    const char *const stride_names[] = {"x_stride", "weight_stride"};
    for (int i = 0; i < 2; i++) {
        BAD_CALL(LK_ERR_SHAPE, stride_names[i], *strides[i] = 7);
        BAD_CALL(LK_ERR_SHAPE, stride_names[i], *strides[i] = -8);
        BAD_CALL(LK_ERR_SHAPE, "2^62", *strides[i] = (int64_t)1 << 61);
    }
    float *const options[] = {&a.logit_scale, &a.softcap, &a.z_loss, &a.label_smoothing};
    const char *const names[] = {"logit_scale", "softcap", "z_loss", "label_smoothing"};
    for (int i = 0; i < LENGTH_OF(options); i++) {
        BAD_CALL(LK_ERR_VALUE, names[i], *options[i] = -1e-9f);
        BAD_CALL(LK_ERR_VALUE, names[i], *options[i] = INFINITY);
        BAD_CALL(LK_ERR_VALUE, names[i], *options[i] = NAN);
    }
    BAD_CALL(LK_ERR_VALUE, "label_smoothing", a.label_smoothing = 1.0001f);
    BAD_CALL(LK_ERR_VALUE, "ignore_index is -100, but use_ignore_index is 0", a.ignore_index = -100);
    BAD_CALL(LK_OK, "both are set", (a.ignore_index = -100, a.use_ignore_index = 1));
    int *const enums[] = {&a.reduction, &a.target_dtype, &a.path, &a.bias_dtype};
    const char *const enum_names[] = {"reduction", "target_dtype", "path", "bias_dtype"};
    const int most[] = {LK_REDUCTION_SUM, LK_TARGET_INT32, FUSED, LK_DTYPE_BF16};
    for (int i = 0; i < LENGTH_OF(enums); i++) {
        BAD_CALL(LK_ERR_VALUE, enum_names[i], *enums[i] = -1);
        BAD_CALL(LK_ERR_VALUE, enum_names[i], *enums[i] = most[i] + 1);
    }
    BAD_CALL(LK_ERR_VALUE, "bias_dtype", a.bias_dtype = p->type == TEST_F16 ? LK_DTYPE_BF16 : LK_DTYPE_F16);
    BAD_CALL(LK_ERR_VALUE, "context", a.context = &blank);
    BAD_CALL(LK_ERR_ALIGNMENT, "x is", MOVED(a.x, 1));
    BAD_CALL(LK_ERR_ALIGNMENT, "weight is", MOVED(a.weight, 1));
    BAD_CALL(LK_ERR_ALIGNMENT, "bias is", MOVED(a.bias, 1));
    BAD_CALL(LK_ERR_ALIGNMENT, "target is", MOVED(a.target, 4));
    BAD_CALL(LK_ERR_ALIGNMENT, "class_weight", MOVED(a.class_weight, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "row_weight", MOVED(a.row_weight, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "bad_targets", MOVED(a.bad_targets, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "denominator", MOVED(a.denominator, 2));
    BAD_CALL(LK_OK, "a denominator of no mean", (MOVED(a.denominator, 2), a.reduction = LK_REDUCTION_SUM));
    BAD_CALL(LK_OK, "int32 targets", (a.target_dtype = LK_TARGET_INT32, MOVED(a.target, 4)));
    BAD_CALL(LK_ERR_WORKSPACE, "workspace", a.workspace = NULL);
    BAD_CALL(LK_ERR_WORKSPACE, "workspace", a.workspace_bytes -= 1);
    BAD_CALL(LK_ERR_WORKSPACE, "workspace", a.workspace_bytes = 0);
    BAD_CALL(LK_ERR_WORKSPACE, "128", MOVED(a.workspace, 64));
    BAD_CALL(LK_OK, "a workspace at 128", MOVED(a.workspace, 128));
}

static void gradient_errors(const problem *p, args_t &a)
{
    int64_t *const strides[] = {&a.dx_stride, &a.dweight_stride};
    const char *const stride_names[] = {"dx_stride", "dweight_stride"};
    for (int i = 0; i < 2; i++) {
        BAD_CALL(LK_ERR_SHAPE, stride_names[i], *strides[i] = 7);
        BAD_CALL(LK_ERR_SHAPE, "2^62", *strides[i] = (int64_t)1 << 61);
    }
    BAD_CALL(LK_ERR_SHAPE, "slice_tokens", a.slice_tokens = -1);
    int *const types[] = {&a.dweight_dtype, &a.dbias_dtype};
    const char *const type_names[] = {"dweight_dtype", "dbias_dtype"};
    for (int i = 0; i < 2; i++) {
        BAD_CALL(LK_ERR_VALUE, type_names[i], *types[i] = -1);
        BAD_CALL(LK_ERR_VALUE, type_names[i], *types[i] = p->type == TEST_F16 ? LK_DTYPE_BF16 : LK_DTYPE_F16);
    }
    BAD_CALL(LK_ERR_ALIGNMENT, "upstream", MOVED(a.upstream, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "dlse", MOVED(a.dlse, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "dentropy", MOVED(a.dentropy, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "entropy", MOVED(a.entropy, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "lse", MOVED(a.lse, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "dx", MOVED(a.dx, 1));
    BAD_CALL(LK_ERR_ALIGNMENT, "dweight", MOVED(a.dweight, 1));
    BAD_CALL(LK_ERR_ALIGNMENT, "dbias", MOVED(a.dbias, 1));
}

static void loss_errors(const problem *p, args_t &a)
{
    BAD_CALL(LK_ERR_ALIGNMENT, "loss", MOVED(a.loss, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "z_loss_out", MOVED(a.z_loss_out, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "lse", MOVED(a.lse, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "valid_rows", MOVED(a.valid_rows, 4));
    BAD_CALL(LK_ERR_ALIGNMENT, "weight_sum", MOVED(a.weight_sum, 2));
    BAD_CALL(LK_ERR_ALIGNMENT, "argmax", MOVED(a.argmax, 4));
    if (p->direction == FORWARD) BAD_CALL(LK_ERR_NULL, "entropy is NULL", (a.statistics = 1, a.entropy = NULL));
    if (p->direction == FORWARD)
        BAD_CALL(LK_ERR_SHAPE, "overlap", (a.statistics = 1, a.entropy = a.lse, MOVED(a.entropy, -32)));
}

#define NO_LOSS(a)                                                                                                             \
    a.loss = a.z_loss_out = a.weight_sum = NULL, a.valid_rows = a.argmax = NULL, a.bad_targets = NULL,                         \
    a.lse = gives_loss(p->direction) ? NULL : a.lse, a.lse_low = NULL, a.entropy = gives_loss(p->direction) ? NULL : a.entropy
#define NO_GRADIENT(a) a.dx = a.dweight = a.dbias = NULL

/* Fields that a call does not have are not looked at: a call gives the same bits without garbage in them. set_args has put it
 * there. */
static void unused_errors(const problem *p)
{
    good_calls(p);
    const lk_status spoilt = launch(p);
    if (!test_that(spoilt == LK_OK)) test_detail("garbage in unused fields: %s", lk_last_error());
    const args_t with = args;
    size_t bytes[2] = {1, 2};
    query(p, &bytes[0]);
    if (p->direction == FORWARD) {
        NO_GRADIENT(args), args.upstream = args.dlse = args.dentropy = NULL;
        args.dx_stride = args.dweight_stride = args.slice_tokens = 0;
        args.upstream_per_token = args.accumulate = args.dweight_dtype = args.dbias_dtype = 0;
    } else if (p->direction == BACKWARD) {
        args.loss = args.z_loss_out = args.weight_sum = NULL, args.valid_rows = args.argmax = NULL, args.zero_when_empty = 0;
    }
    query(p, &bytes[1]);
    if (!test_that(bytes[0] == bytes[1])) test_detail("garbage changes the query: %zu, %zu", bytes[0], bytes[1]);
    args = with;
}

/* An output may not lie where another tensor does. */
static void overlap_errors(const problem *p, args_t &a)
{
    if (gives_loss(p->direction)) {
        BAD_CALL(LK_ERR_SHAPE, "overlap", a.loss = a.z_loss_out);
        BAD_CALL(LK_ERR_SHAPE, "overlap", (a.lse = (float *)a.class_weight));
        BAD_CALL(LK_ERR_SHAPE, "overlap", a.row_weight = a.loss);
        BAD_CALL(LK_ERR_SHAPE, "overlap", MOVED(a.lse, (char *)a.target - (char *)a.lse + 4));
    }
    if (!gives_gradient(p->direction)) return;
    BAD_CALL(LK_ERR_SHAPE, "overlap", a.dx = (void *)a.x);
    BAD_CALL(LK_ERR_SHAPE, "overlap", a.dweight = (void *)a.weight);
    BAD_CALL(LK_ERR_SHAPE, "overlap", a.dbias = (void *)a.bias);
    BAD_CALL(LK_ERR_SHAPE, "overlap", (a.dx = a.dweight, MOVED(a.dx, test_type_bytes[p->type])));
    BAD_CALL(LK_OK, "inputs may share memory", a.dlse = a.upstream);
}

/* A dimension of 1 ignores its stride, except for a negative one. */
static void stride_errors(const problem *p, args_t &a)
{
    BAD_CALL(LK_OK, "one token", (a.tokens = 1, a.x_stride = 3));
    BAD_CALL(LK_OK, "one column", (a.vocab = 1, a.weight_stride = 3));
    BAD_CALL(LK_ERR_SHAPE, "x_stride", (a.tokens = 1, a.x_stride = -3));
    BAD_CALL(LK_ERR_SHAPE, "weight_stride", (a.vocab = 1, a.weight_stride = -3));
    if (!gives_gradient(p->direction)) return;
    BAD_CALL(LK_OK, "one token", (a.tokens = 1, a.dx_stride = 3));
    BAD_CALL(LK_OK, "one column", (a.vocab = 1, a.dweight_stride = 3));
}

static void errors_of(int type, int direction)
{
    problem problem_of = plain(type, direction, LK_LINEAR_CROSS_ENTROPY_AUTO, 4, 8, 8);
    const problem *const p = &problem_of;
    problem_of.on[MEAN] = problem_of.on[Z] = true;
    common_errors(p, args);
    if (gives_gradient(direction)) gradient_errors(p, args);
    if (gives_loss(direction)) loss_errors(p, args);
    if (direction != FORWARD) BAD_CALL(LK_ERR_VALUE, "statistics is 3; only forward computes them", args.statistics = 3);
    if (direction == BACKWARD) BAD_CALL(LK_ERR_NULL, "lse is", args.lse = NULL);
    if (direction == BACKWARD) BAD_CALL(LK_ERR_NULL, "entropy is", args.entropy = NULL);
    if (direction == BACKWARD) BAD_CALL(LK_OK, "no entropy", (args.entropy = NULL, args.dentropy = NULL));
    BAD_CALL(LK_ERR_NULL, "every output", (NO_LOSS(args), NO_GRADIENT(args)));
    BAD_CALL(LK_OK, "bad targets alone",
             (NO_LOSS(args), NO_GRADIENT(args), args.bad_targets = (int32_t *)test_buffer_device(&buffers[BAD_COUNT])));
    if (!test_that(launch_of[direction][type](NULL, test.stream) == LK_ERR_NULL)) test_detail("NULL args pass");
    unused_errors(p), overlap_errors(p, args), stride_errors(p, args);
}

/* A budget below the smallest is an error of the plan too, and says how much it takes. */
static void plan_errors(int type)
{
    problem p = plain(type, BOTH, LK_LINEAR_CROSS_ENTROPY_AUTO, 4, 8, 8);
    size_t bytes = 0;
    plan_t said = {};
    char number[32];
    good_calls(&p), smallest(&p, &bytes);
    snprintf(number, sizeof number, "%zu", bytes);
    const lk_status status = plan_of(&p, bytes - 1, &said);
    if (!test_that(status == LK_ERR_WORKSPACE && strstr(lk_last_error(), number)))
        test_detail("a budget of %zu: %s, %s", bytes - 1, lk_status_string(status), lk_last_error());
    if (!test_that(plan_of(&p, bytes, NULL) == LK_ERR_NULL)) test_detail("a NULL plan passes");
}

static void context_errors(void)
{
    static lk_linear_cross_entropy_context own;
    if (!test_that(lk_linear_cross_entropy_init(NULL) == LK_ERR_NULL)) test_detail("init(NULL)");
    if (!test_that(lk_linear_cross_entropy_destroy(NULL) == LK_ERR_NULL)) test_detail("destroy(NULL)");
    if (!test_that(lk_linear_cross_entropy_destroy(&own) == LK_ERR_VALUE)) test_detail("destroy before init");
    if (!test_that(lk_linear_cross_entropy_init(&own) == LK_OK)) test_detail("init: %s", lk_last_error());
    if (!test_that(lk_linear_cross_entropy_destroy(&own) == LK_OK)) test_detail("destroy: %s", lk_last_error());
    if (!test_that(lk_linear_cross_entropy_destroy(&own) == LK_ERR_VALUE)) test_detail("destroy twice");
    if (!test_that(!strcmp(lk_status_string(LK_ERR_CUBLAS), "LK_ERR_CUBLAS"))) test_detail("the status has no name");
}

#if defined(LK_SIMT)
/* What cuBLASLt refuses is LK_ERR_CUBLAS with its number. All is asked of it before anything is launched, so nothing is
 * written. */
static void cublas_errors(int type)
{
    problem problem_of = plain(type, BOTH, LK_LINEAR_CROSS_ENTROPY_PANELS, 4, 8, 8);
    const problem *const p = &problem_of;
    static lk_linear_cross_entropy_context fresh;
    for (int after = 0; after < 3; after++) {
        if (!test_that(lk_linear_cross_entropy_init(&fresh) == LK_OK)) test_detail("init: %s", lk_last_error());
        good_calls(p), args.context = &fresh;
        simt_cublaslt_refuse(after);
        const lk_status status = launch(p);
        simt_cublaslt_refuse(-1);
        const char *const said = lk_last_error();
        if (!test_that(status == LK_ERR_CUBLAS && strstr(said, "status 15") && strstr(said, "NOT_SUPPORTED")))
            test_detail("refused after %d: %s, %s", after, lk_status_string(status), said);
        for (int t = 0; t <= TENSORS; t++) {
            test_buffer_download(&buffers[t]);
            test_buffer_untouched(&buffers[t], tensor_name[t], "refused");
        }
        if (!test_that(lk_linear_cross_entropy_destroy(&fresh) == LK_OK)) test_detail("destroy: %s", lk_last_error());
    }
}
#endif

/* Wrong arguments of ranks, and a callback that fails: its status is the call's. */
static void rank_errors(int type)
{
    enum { FINISH = DIRECTIONS };
    void *room_of_call = NULL;
    TEST_CUDA(cudaMalloc(&room_of_call, 1 << 20));
    TEST_CUDA(cudaMemset(room_of_call, 0xff, 1 << 20)); /* initcheck does not see what some kernels of cuBLASLt write */
    static const test_bad_rank<rank_args> cases[] = {
        TEST_BAD_RANKS(FORWARD, common.vocab), TEST_BAD_RANKS(FINISH, common.vocab),
        TEST_BAD_RANKS(BACKWARD, common.vocab), TEST_BAD_RANKS(BOTH, common.vocab),
        {FORWARD, LK_ERR_NULL, LK_OK, "states", SPOIL(a->states = NULL)},
        {BACKWARD, LK_ERR_NULL, LK_OK, "states", SPOIL(a->states = NULL)},
        {BOTH, LK_ERR_NULL, LK_ERR_NULL, "all_gather", SPOIL(a->parallel.all_gather = NULL)},
        {BOTH, (lk_status)77, LK_OK, "parallel.all_gather returned 77", SPOIL(a->parallel.all_gather = test_broken_gather)},
        {FORWARD, (lk_status)77, LK_OK, "all_gather", SPOIL(a->parallel.all_gather = test_broken_gather)},
        {FINISH, LK_ERR_NULL, LK_OK, "all_states", SPOIL(a->all_states = NULL)},
        {FORWARD, LK_ERR_PATH, LK_ERR_PATH, "CHUNKS", SPOIL(a->common.path = LK_LINEAR_CROSS_ENTROPY_CHUNKS)},
        {FORWARD, LK_ERR_ALIGNMENT, LK_OK, "states", SPOIL(MOVED(a->states, 8))},
        {BACKWARD, LK_ERR_SHAPE, LK_ERR_SHAPE, "parallel.reduce_sms", SPOIL(a->parallel.reduce_sms = -1)},
        {BOTH, LK_ERR_SHAPE, LK_ERR_SHAPE, "vocab_start", /* sizes come first */
         SPOIL(a->parallel.all_gather = NULL, a->parallel.vocab_start = a->parallel.vocab_total - a->common.vocab + 1)},
        {FORWARD, LK_ERR_SHAPE, LK_OK, "states and x overlap", SPOIL(a->common.x = a->states)},
        {BOTH, LK_ERR_VALUE, LK_ERR_VALUE, "statistics is 1", SPOIL(a->common.statistics = 1)},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        const bool finish = cases[i].call == FINISH;
        const int direction = finish ? (int)FORWARD : cases[i].call;
        problem p = plain(type, direction, LK_LINEAR_CROSS_ENTROPY_AUTO, 4, 8, 16);
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
    size_t asked = TEST_NOT_ASKED;
    plan_t any = {};
    if (!test_that(rank_of[BOTH][type](NULL, test.stream) == LK_ERR_NULL && rank_query_of[BOTH][type](NULL, &asked) == LK_ERR_NULL &&
                   rank_plan_of[BOTH][type](NULL, 0, &any) == LK_ERR_NULL && finish_of[type](NULL, test.stream) == LK_ERR_NULL &&
                   finish_bytes_of[type](NULL, &asked) == LK_ERR_NULL && asked == TEST_NOT_ASKED))
        test_detail("args NULL: %s", lk_last_error());
    const rank_args x = {};
    if (!test_that(saved_bytes_of[type](NULL, &asked) == LK_ERR_NULL && rank_saved_bytes_of[type](NULL, &asked) == LK_ERR_NULL &&
                   saved_bytes_of[type](&x.common, NULL) == LK_ERR_NULL && rank_saved_bytes_of[type](&x, NULL) == LK_ERR_NULL &&
                   strstr(lk_last_error(), "parallel_saved_bytes") && asked == TEST_NOT_ASKED))
        test_detail("saved_bytes without args or bytes: %s", lk_last_error());
    TEST_CUDA(cudaFree(room_of_call));
}

static void all_errors(void)
{
    test_of_directions("errors", errors_of, direction_name, DIRECTIONS);
    test_of_types("errors of ranks,", rank_errors);
    if (test_begin("errors of plans and contexts")) {
        for (int type = 0; type < TEST_TYPES; type++) plan_errors(type);
#if defined(LK_SIMT)
        for (int type = 0; type < TEST_TYPES; type++) cublas_errors(type);
#endif
        context_errors(), test_finish();
    }
}

/* ---- Plans at full size: host code alone ----------------------------------------------------------------------------- */

/* goals.csv's workspaces at 12288 tokens of hidden 4096, MiB, and what must come of them: no recomputation, all exact, and
 * fused where that was the faster one. The last line is not of goals.csv: few columns, and some of them tail columns. */
static void goal_plans(void)
{
    static const struct {
        int64_t vocab;
        size_t f32_dweight, dweight;
    } goals[] = {{1024, 163, 179},  {2048, 171, 203},  {4096, 186, 250},   {8192, 216, 344},
                 {16384, 277, 533}, {32768, 399, 911}, {65536, 643, 1667}, {131072, 1130, 3178}, {50257, 529, 1320},
                 {8190, 216, 344}};
    alignas(256) static int64_t dummy[32]; /* dweight may be scratch only where it is aligned so */
    for (int i = 0; i < LENGTH_OF(goals) * 2; i++) {
        args_t a = {};
        plan_t of = {};
        a.x = a.weight = a.target = dummy, a.dx = a.dweight = dummy, a.loss = (float *)dummy, a.reduction = LK_REDUCTION_MEAN;
        a.tokens = 12288, a.hidden = 4096, a.vocab = goals[i / 2].vocab, a.use_ignore_index = 1, a.ignore_index = -100;
        a.dweight_dtype = i % 2 ? LK_DTYPE_F32 : LK_DTYPE_BF16;
        const size_t budget = (i % 2 ? goals[i / 2].f32_dweight : goals[i / 2].dweight) << 20;
        const lk_status status = lk_linear_cross_entropy_forward_backward_plan_bf16(&a, budget, &of);
        test_note("     vocab %6lld, dweight %s, %4zu MiB: %s\n", (long long)a.vocab, i % 2 ? "f32 " : "bf16", budget >> 20,
                  of.text);
        const bool fused = fused_here && a.vocab > 20000; /* of fewer columns the number of SMs says which is faster */
        const bool whole = fused_here && (test.sms <= 8 || a.vocab > 10000) && of.path == FUSED && of.kept_vocab == a.vocab;
        const bool path = fused ? of.path == FUSED : of.path == LK_LINEAR_CROSS_ENTROPY_CHUNKS || whole;
        const bool good = status == LK_OK && path && whole_matmuls(&of, a.vocab) == 3 && of.exact && of.chunk_tokens >= 2048 &&
                          of.workspace_bytes <= budget && of.minimum_bytes <= (size_t)(i % 2 ? 24 : 240) << 20 &&
                          of.cublas_bytes >= (size_t)(of.path == FUSED ? 8 : 20) << 20;
        if (!test_that(good))
            test_detail("vocab %lld: %s, %s, smallest %zu, cuBLASLt %zu", (long long)a.vocab, lk_status_string(status), of.text,
                        of.minimum_bytes, of.cublas_bytes);
    }
    args_t a = {};
    plan_t of = {};
    a.x = a.weight = a.target = dummy, a.loss = (float *)dummy, a.tokens = 12288, a.hidden = 4096, a.vocab = 131072;
    const lk_status status = lk_linear_cross_entropy_forward_plan_bf16(&a, (size_t)64 << 20, &of);
    test_note("     forward, vocab 131072, 64 MiB: %s\n", of.text);
    if (!test_that(status == LK_OK && of.matmuls == 1 && of.exact)) test_detail("%s, %s", lk_status_string(status), of.text);
    static const char *const said[] = {"1 matmuls: ", "1 matmuls, 1 tail column: ", "1 matmuls, 2 tail columns: "};
    a.path = LK_LINEAR_CROSS_ENTROPY_CHUNKS;
    for (int i = 0; i < 6; i++) { /* as tensor cores want it; true float does not mind */
        a.vocab = i % 3 + (i < 3 ? 50256 : 8);
        const lk_status bf16 = lk_linear_cross_entropy_forward_plan_bf16(&a, (size_t)64 << 20, &of);
        if (!test_that(bf16 == LK_OK && strstr(of.text, said[i % 3]))) test_detail("%s, %s", lk_status_string(bf16), of.text);
        const lk_status f32 = lk_linear_cross_entropy_forward_plan_f32(&a, (size_t)64 << 20, &of);
        if (!test_that(f32 == LK_OK && strstr(of.text, said[0]))) test_detail("%s, %s", lk_status_string(f32), of.text);
    }
    a.tf32 = 1;
    const lk_status tf32 = lk_linear_cross_entropy_forward_plan_f32(&a, (size_t)64 << 20, &of);
    if (!test_that(tf32 == LK_OK && strstr(of.text, said[2]))) test_detail("%s, %s", lk_status_string(tf32), of.text);
}

/* What path 0 takes, and that all else leaves it the plan of a device that has no fused path. */
static void choices(void)
{
    alignas(256) static int64_t dummy[64];
    enum { CHUNKS = LK_LINEAR_CROSS_ENTROPY_CHUNKS, PANELS = LK_LINEAR_CROSS_ENTROPY_PANELS, OTHER = 0, MB = 1 << 20 };
    enum { AS_IT_IS, X_OFF, WEIGHT_OFF, X_STRIDE, WEIGHT_STRIDE, LONG_STRIDE, COPIED_X, CHUNK, PANEL, SLICE, NAMED };
    static const struct {
        int direction, type, wide; /* wide: dweight is f32 */
        size_t budget;
        int twist, option; /* a switch, or SWITCHES */
        int want;          /* OTHER: what another device has */
    } cases[] = {
        {FORWARD, TEST_BF16, 0, 64 * MB, AS_IT_IS, SWITCHES, FUSED},
        {FORWARD, TEST_BF16, 0, 500000, AS_IT_IS, SWITCHES, FUSED},
        {FORWARD, TEST_BF16, 0, 300000, AS_IT_IS, SWITCHES, OTHER}, /* it does not fit */
        {FORWARD, TEST_BF16, 0, 64 * MB, AS_IT_IS, SMOOTHING, FUSED},
        {FORWARD, TEST_BF16, 0, 64 * MB, AS_IT_IS, SOFTCAP, FUSED},
        {FORWARD, TEST_BF16, 0, 64 * MB, AS_IT_IS, FAST, FUSED},
        {FORWARD, TEST_BF16, 0, 128 * MB, COPIED_X, SWITCHES, FUSED},
        {FORWARD, TEST_F16, 0, 64 * MB, AS_IT_IS, SWITCHES, OTHER},
        {FORWARD, TEST_F32, 0, 64 * MB, AS_IT_IS, SWITCHES, OTHER},
        {FORWARD, TEST_BF16, 0, 64 * MB, X_OFF, SWITCHES, OTHER},
        {FORWARD, TEST_BF16, 0, 64 * MB, WEIGHT_OFF, SWITCHES, OTHER},
        {FORWARD, TEST_BF16, 0, 64 * MB, X_STRIDE, SWITCHES, OTHER},
        {FORWARD, TEST_BF16, 0, 64 * MB, WEIGHT_STRIDE, SWITCHES, OTHER},
        {FORWARD, TEST_BF16, 0, 64 * MB, LONG_STRIDE, SWITCHES, OTHER},
        {FORWARD, TEST_BF16, 0, 64 * MB, CHUNK, SWITCHES, OTHER},
        {FORWARD, TEST_BF16, 0, 64 * MB, PANEL, SWITCHES, OTHER},
        {FORWARD, TEST_BF16, 0, 64 * MB, NAMED, SWITCHES, PANELS},
        {BACKWARD, TEST_BF16, 1, 1130 * MB, AS_IT_IS, SWITCHES, FUSED},
        {BOTH, TEST_BF16, 1, 1130 * MB, AS_IT_IS, SWITCHES, FUSED},
        {BOTH, TEST_BF16, 1, 1130 * MB, AS_IT_IS, FAST, FUSED},
        {BOTH, TEST_BF16, 0, (size_t)3178 * MB, AS_IT_IS, SWITCHES, FUSED},
        {BOTH, TEST_BF16, 1, (size_t)6208 * MB, AS_IT_IS, SWITCHES, FUSED}, /* all logits would fit */
        {BOTH, TEST_BF16, 1, 512 * MB, AS_IT_IS, SWITCHES, FUSED},
        {BOTH, TEST_BF16, 1, 256 * MB, AS_IT_IS, SWITCHES, FUSED},
        {BOTH, TEST_BF16, 1, 64 * MB, AS_IT_IS, SWITCHES, PANELS},
        {BOTH, TEST_BF16, 0, 1130 * MB, AS_IT_IS, SWITCHES, FUSED},
        {BOTH, TEST_BF16, 0, 512 * MB, AS_IT_IS, SWITCHES, FUSED}, /* some columns are made again */
        {BOTH, TEST_F16, 1, 1130 * MB, AS_IT_IS, SWITCHES, OTHER},
        {BOTH, TEST_F32, 1, 1130 * MB, AS_IT_IS, SWITCHES, OTHER},
        {BOTH, TEST_BF16, 1, 1130 * MB, AS_IT_IS, SMOOTHING, CHUNKS}, /* FUSED has a fourth matmul for these */
        {BOTH, TEST_BF16, 1, 1130 * MB, AS_IT_IS, WANT_ENTROPY, CHUNKS},
        {BOTH, TEST_BF16, 0, 1130 * MB, AS_IT_IS, HAS_DENTROPY, FUSED}, /* dweight has no chunks */
        {BACKWARD, TEST_BF16, 1, 1130 * MB, AS_IT_IS, HAS_DENTROPY, FUSED},
        {BOTH, TEST_BF16, 1, 1130 * MB, X_OFF, SWITCHES, OTHER},
        {BOTH, TEST_BF16, 1, 1130 * MB, CHUNK, SWITCHES, OTHER},
        {BOTH, TEST_BF16, 1, 1130 * MB, SLICE, SWITCHES, OTHER},
        {BOTH, TEST_BF16, 1, 1130 * MB, NAMED, SWITCHES, PANELS},
    };
    for (int i = 0; i < LENGTH_OF(cases); i++) {
        const int twist = cases[i].twist;
        problem p = plain(cases[i].type, cases[i].direction, twist == NAMED ? PANELS : 0, 12288, 4096, 131072);
        void *at[TENSORS] = {};
        p.on[MEAN] = true, p.on[DWEIGHT_F32] = cases[i].wide;
        if (cases[i].option < SWITCHES) p.on[cases[i].option] = true;
        p.chunk = twist == CHUNK ? 64 : 0, p.panel = twist == PANEL ? 1024 : 0, p.slice = twist == SLICE ? 1024 : 0;
        p.stride[X] = twist == X_STRIDE ? 4100 : 0;
        p.stride[WEIGHT] = twist == WEIGHT_STRIDE ? 4100 : twist == LONG_STRIDE ? ((int64_t)1 << 38) + 8 : 0;
        at[X] = (char *)dummy + (twist == X_OFF || twist == COPIED_X ? 2 : 0), at[WEIGHT] = (char *)dummy;
        if (twist == WEIGHT_OFF) at[WEIGHT] = (char *)dummy + 8;
        at[TARGET] = at[LSE] = at[LOSS] = at[DX] = at[DWEIGHT] = dummy;
        at[ENTROPY] = p.on[WANT_ENTROPY] || (p.on[HAS_DENTROPY] && p.direction == BACKWARD) ? dummy : NULL;
        at[DENTROPY] = p.on[HAS_DENTROPY] ? dummy : NULL;
        set_args(&p, at);
        args.max_counted = twist == COPIED_X ? 12000 : 0;
        static const int seen[] = {NO_DEVICE, 80, 100, THIS_DEVICE};
        plan_t of[4] = {};
        for (int k = 0; k < 4; k++) {
            see_device(seen[k]);
            const lk_status status = plan_of(&p, cases[i].budget, &of[k]);
            see_device(THIS_DEVICE);
            const bool alike = k == 3 || (of[k].path != FUSED && !memcmp(&of[k], &of[0], offsetof(plan_t, text)));
            if (!test_that(!status && alike))
                test_detail("%d, device %d: %s, %s", i, seen[k], lk_status_string(status), of[k].text);
        }
        const int want = cases[i].want == FUSED && !fused_here ? OTHER : cases[i].want;
        const bool same = alike_but_for_the_device(&of[3], &of[1]);
        const bool said = strstr(of[0].text, "FUSED, for sm_90a, is left out: there is no usable CUDA device");
        if (!test_that(cases[i].want != FUSED || said)) test_detail("%d: without a device %s", i, of[0].text);
        if (!test_that(want == FUSED ? of[3].path == FUSED && of[3].exact : want == OTHER ? same : same && of[3].path == want))
            test_detail("%d: path %d, %s; elsewhere %s", i, of[3].path, of[3].text, of[1].text);
    }
}

/* Queries from shapes and options alone: with no pointer but for what is wanted they answer what will do wherever tensors lie,
 * and take the plan of aligned ones. */
static void shapes_alone(void)
{
    alignas(256) static int64_t dummy[64];
    static const int64_t shapes[][3] = {{600, 16, 101}, {12288, 4096, 131072}, {1, 8, 8}, {0, 8, 8}, {300, 20, 50257}};
    for (int i = 0; i < LENGTH_OF(shapes) * TEST_TYPES * DIRECTIONS; i++) {
        const int type = i % TEST_TYPES, direction = i / TEST_TYPES % DIRECTIONS, shape = i / TEST_TYPES / DIRECTIONS;
        problem p = plain(type, direction, 0, shapes[shape][0], shapes[shape][1], shapes[shape][2]);
        p.on[MEAN] = p.on[DWEIGHT_F32] = true, p.spelt = i % 2;
        void *at[TENSORS] = {};
        at[DX] = at[DWEIGHT] = at[LOSS] = (void *)1; /* wanted, and nobody knows where */
        set_args(&p, at), args.context = NULL;
        plan_t open = {}, least = {}, given = {}, off = {};
        size_t bytes = 0;
        lk_status status = query(&p, &bytes);
        if (!status) status = plan_of(&p, bytes, &open);
        if (!status && p.tokens) status = plan_of(&p, open.minimum_bytes, &least);
        at[X] = at[WEIGHT] = at[TARGET] = dummy, at[LSE] = dummy;
        set_args(&p, at);
        if (!status) status = plan_of(&p, bytes, &given);
        at[X] = (char *)dummy + 2;
        set_args(&p, at);
        if (!status) status = plan_of(&p, open.minimum_bytes, &off);
        const bool good = !status && open.workspace_bytes == bytes && !strcmp(open.text, given.text) &&
                          open.minimum_bytes == off.minimum_bytes && given.minimum_bytes <= open.minimum_bytes;
        if (!test_that(good))
            test_detail("%s %s, shape %d: %s, %zu bytes, %s; with pointers %s; off %zu for %zu", direction_name[direction],
                        test_type_name[type], shape, status ? lk_last_error() : "", bytes, open.text, given.text,
                        off.minimum_bytes, open.minimum_bytes);
    }
    args_t a = {};
    a.vocab = 0, a.tokens = 1, a.hidden = 1;
    const lk_status called = lk_linear_cross_entropy_forward_backward_f32(&a, test.stream);
    if (!test_that(called == LK_ERR_NULL)) test_detail("NULL comes after vocab");
}

/* ..._workspace_bytes answers the best plan within a sixteenth of the device's memory, which is that of all tokens at once where
 * they fit, and never less than is needed. */
static void default_bytes(void)
{
    size_t free_bytes = 0, total = 0;
    TEST_CUDA(cudaMemGetInfo(&free_bytes, &total));
    const size_t share = total / 16;
    static const int64_t shapes[][3] = {{12288, 4096, 131072}, {12288, 4096, 8192}, {64, 256, 500}, {INT32_MAX, 64, 100000}};
    for (int i = 0; i < LENGTH_OF(shapes) * TEST_TYPES * DIRECTIONS; i++) {
        const int type = i % TEST_TYPES, direction = i / TEST_TYPES % DIRECTIONS, shape = i / TEST_TYPES / DIRECTIONS;
        problem p = plain(type, direction, 0, shapes[shape][0], shapes[shape][1], shapes[shape][2]);
        void *at[TENSORS] = {};
        at[DX] = at[DWEIGHT] = at[LOSS] = (void *)1;
        p.on[MEAN] = true, set_args(&p, at);
        size_t bytes = 0;
        plan_t own = {}, most = {}, all = {};
        lk_status status = query(&p, &bytes);
        if (!status) status = plan_of(&p, bytes, &own);
        const size_t budget = own.minimum_bytes > share ? own.minimum_bytes : share;
        if (!status) status = plan_of(&p, budget, &most);
        if (!status) status = plan_of(&p, SIZE_MAX, &all);
        const bool fits = shape == 2 || all.workspace_bytes <= share;
        if (!test_that(!status && bytes <= budget && bytes <= all.workspace_bytes && !memcmp(&own, &most, sizeof own)))
            test_detail("%s %s, shape %d: %zu bytes, %s; within a sixteenth of the memory %s", direction_name[direction], test_type_name[type],
                        shape, bytes, own.text, most.text);
        if (!test_that((!fits || !memcmp(&own, &all, sizeof own)) && (shape > 1 || whole_matmuls(&own, p.vocab) <= whole_matmuls(&all, p.vocab) + (shape == 0))))
            test_detail("%s %s, shape %d: %s; all at once %s", direction_name[direction], test_type_name[type], shape, own.text,
                        all.text);
        if (!test_that(shape == 3 || own.path == FUSED ? bytes >= own.minimum_bytes : bytes > own.minimum_bytes))
            test_detail("%s %s, shape %d: %zu bytes", direction_name[direction], test_type_name[type], shape, bytes);
    }
}

/* Tail columns of each number, whose matmul for logits may take weight from a copy: with logits of all types, whole and in panels. */
static void tails(void)
{
    for (int i = 0; i < 7 * DIRECTIONS * 4; i++) {
        const int tail = 1 + i % 7, direction = i / 7 % DIRECTIONS, kind = i / 7 / DIRECTIONS;
        const int path = kind < 2 ? LK_LINEAR_CROSS_ENTROPY_CHUNKS : LK_LINEAR_CROSS_ENTROPY_PANELS;
        if (test.small && (tail + kind + direction) % 2) continue;
        problem p = plain(kind % 2 ? TEST_BF16 : TEST_F16, direction, path, tail % 4 ? 9 : 2100, 16, 96 + tail);
        p.on[MEAN] = true, p.on[FAST] = i % 2;
        if (kind > 1) p.panel = 32;
        run(p);
    }
}

/* FUSED's forward works on pairs of tiles of 128 tokens, or on one, so 1 token has the stretches of 128, and 4090 those of 4096: with
 * more memory than it needs, and with that of its own plan. */
static void plans_of_any_number_of_tokens(void)
{
    static const int64_t tokens[] = {1, 8, 100, 252, 500, 1020, 2044, 2047, 4090, 8188, 12284};
    for (int i = 0; i < 2 * LENGTH_OF(tokens); i++) {
        alignas(256) static int64_t some[32];
        void *at[TENSORS] = {};
        at[X] = at[WEIGHT] = at[TARGET] = at[LSE] = at[LOSS] = some;
        plan_t of[2] = {}, own = {};
        lk_status status = LK_OK;
        for (int whole = 0; whole < 2 && !status; whole++) {
            const int64_t few = tokens[i / 2], rounded = few <= 128 ? 128 : (few + 255) / 256 * 256;
            problem p = plain(TEST_BF16, FORWARD, FUSED, whole ? rounded : few, 4096, 131072);
            if (i % 2) at[ENTROPY] = at[ARGMAX] = some, p.on[WANT_ENTROPY] = p.on[WANT_ARGMAX] = true;
            set_args(&p, at);
            status = plan_of(&p, (size_t)8 << 30, &of[whole]);
            if (!status && !whole) status = plan_of(&p, of[0].workspace_bytes, &own);
        }
        if (!test_that(!status && of[0].panel_vocab == of[1].panel_vocab && own.panel_vocab == of[0].panel_vocab))
            test_detail("%lld tokens: %s; in its own bytes %s; rounded up %s%s", (long long)tokens[i / 2], of[0].text, own.text,
                        of[1].text, status ? lk_last_error() : "");
    }
    for (int i = 0; i < 4 * DIRECTIONS; i++) { /* few tokens have stored logits, where there is memory for them */
        static const int64_t some_tokens[] = {1, 64, 4096, 8192};
        const bool small = i / DIRECTIONS == 3; /* as many columns as stored logits once came first for */
        alignas(256) static int64_t some[32];
        void *at[TENSORS] = {};
        problem p = plain(TEST_BF16, i % DIRECTIONS, 0, some_tokens[i / DIRECTIONS], small ? 64 : 4096, small ? 16384 : 131072);
        at[X] = at[WEIGHT] = at[TARGET] = at[LSE] = at[LOSS] = at[DX] = at[DWEIGHT] = some;
        p.on[MEAN] = true, set_args(&p, at);
        plan_t of = {}, least = {};
        lk_status status = plan_of(&p, (size_t)8 << 30, &of);
        if (!status) status = plan_of(&p, of.minimum_bytes, &least);
        const bool stored = i / DIRECTIONS == 0 || (i / DIRECTIONS == 1 && i % DIRECTIONS != FORWARD); /* 64: forward reads as fast */
        const int want = stored ? (int)LK_LINEAR_CROSS_ENTROPY_CHUNKS : (int)FUSED;
        if (!test_that(!status && of.path == want && least.workspace_bytes == of.minimum_bytes))
            test_detail("%lld tokens: %s; with the least memory %s", (long long)p.tokens, of.text, least.text);
    }
}

/* What keeps FUSED away is said, in plans and in the error of the path by name: code for sm_90 without the a, no device. A
 * query leaves no error of its own behind and an error of the caller's where it is. */
static void left_out(void)
{
    int major = 0;
    TEST_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    const char *const other_code = major == 9 ? "for sm_90a, is left out: the code that this device runs was not compiled" : "";
    const struct {
        int seen;
        const char *said;
    } cases[] = {{NO_DEVICE, "for sm_90a, is left out: there is no usable CUDA device"}, {80, other_code}, {90, other_code},
                 {THIS_DEVICE, fused_here ? "" : other_code}};
    for (int i = 0; i < 2 * LENGTH_OF(cases); i++) {
        const bool pending = i % 2;
        args_t a = {};
        plan_t of = {}, f32 = {};
        a.dx = a.loss = (float *)1, a.tokens = 600, a.hidden = 16, a.vocab = 101;
        (void)cudaGetLastError();
        if (pending) (void)cudaSetDevice(-1);
        const cudaError_t before = cudaPeekAtLastError();
        see_device(cases[i / 2].seen);
        const lk_status status = lk_linear_cross_entropy_forward_backward_plan_bf16(&a, SIZE_MAX, &of);
        const lk_status other = lk_linear_cross_entropy_forward_backward_plan_f32(&a, SIZE_MAX, &f32);
        a.path = FUSED;
        const lk_status named = lk_linear_cross_entropy_forward_backward_plan_bf16(&a, SIZE_MAX, &of);
        const char *const why = strstr(cases[i / 2].said, ": "); /* the path by name has the reason too */
        const bool here = cases[i / 2].seen == THIS_DEVICE && fused_here;
        see_device(THIS_DEVICE);
        const cudaError_t after = cudaGetLastError();
        const char *const said = cases[i / 2].said;
        const bool right = said[0] ? strstr(of.text, said) != NULL : !strstr(of.text, "left out");
        if (!test_that(!status && !other && !strstr(f32.text, "left out") && right))
            test_detail("%d: %s; f32 %s", i, of.text, f32.text);
        if (!test_that(here ? !named : named == LK_ERR_PATH && strstr(lk_last_error(), "sm_90a") &&
                                           (!why || strstr(lk_last_error(), why))))
            test_detail("%d: by name %s, %s", i, lk_status_string(named), lk_last_error());
        if (!test_that(pending ? after != cudaSuccess : after == before))
            test_detail("%d: CUDA's error was %d, is %d", i, (int)before, (int)after);
    }
}

/* Whatever the budget, a plan is one that its own bytes have too, what they are is enough for the call, and a larger budget
 * has no more matmuls. */
static void plans_again(void)
{
    alignas(256) static int64_t dummy[32];
    int fused = 0, kept = 0; /* by path 0, where it may choose */
    uint64_t r = 1;
    for (int i = 0; i < 20000; i++) {
        args_t a = {};
        plan_t of = {}, again = {}, larger = {};
        const int type = i % 3, direction = i % 8 == 7 ? BACKWARD : i % 8 > 4 ? FORWARD : BOTH;
        lk_status (*const ask)(const args_t *, size_t, plan_t *) = plan_function_of[direction][type];
        a.x = a.weight = a.target = dummy, a.loss = (float *)dummy, a.dx = i % 5 ? dummy : NULL;
        a.dweight = test_chance(&r, 5) ? NULL : dummy + (test_chance(&r, 3) ? 1 : 0), a.dbias = i % 7 ? NULL : dummy;
        a.tokens = 1 + test_below(&r, (int64_t)1 << test_below(&r, 20));
        a.vocab = 1 + test_below(&r, (int64_t)1 << test_below(&r, 19));
        a.hidden = 1 + test_below(&r, (int64_t)1 << test_below(&r, 14));
        if (test_chance(&r, 2)) a.hidden = (a.hidden + 7) / 8 * 8; /* as the fused path wants it */
        a.accumulate = test_chance(&r, 4), a.fast_logits = test_chance(&r, 4);
        a.dweight_dtype = test_chance(&r, 2) ? LK_DTYPE_F32 : LK_DTYPE_T;
        a.path = (int)(test_chance(&r, 3) ? test_below(&r, FUSED) : 0);
        if (test_chance(&r, 4)) a.max_counted = 1 + test_below(&r, a.tokens);
        const bool fits = type == TEST_BF16 && a.hidden % 8 == 0 && fused_here, lengths = test_chance(&r, 2);
        if (lengths && test_chance(&r, 3)) a.chunk_tokens = 1 + test_below(&r, a.tokens);
        if (lengths && test_chance(&r, 3)) a.panel_vocab = 1 + test_below(&r, a.vocab);
        if (lengths && test_chance(&r, 3)) a.slice_tokens = 1 + test_below(&r, a.tokens);
        if (fits && test_chance(&r, 4)) a.path = FUSED;
        if (direction == FORWARD) a.entropy = test_chance(&r, 2) ? (float *)dummy : NULL;
        if (direction == FORWARD) a.argmax = test_chance(&r, 2) ? dummy : NULL;
        if (direction == FORWARD && i % 16 <= 12) a.statistics = i % 3 == 0;
        if (direction == FORWARD && test_chance(&r, 2)) a.tokens = 1 + a.tokens % 40;
        if (i % 16 > 12) { /* forward and backward */
            a.saved = dummy, a.entropy = NULL, a.argmax = NULL;
            if (a.path == LK_LINEAR_CROSS_ENTROPY_PANELS || a.hidden % 8) a.path = LK_LINEAR_CROSS_ENTROPY_CHUNKS;
        }
        ask(&a, SIZE_MAX, &of);
        const size_t least = of.minimum_bytes, more = of.workspace_bytes - least;
        const size_t budget = least + (size_t)test_below(&r, (int64_t)(test_chance(&r, 4) ? 4096 : more + 1));
        const lk_status status = ask(&a, budget, &of);
        const lk_status second = ask(&a, of.workspace_bytes, &again);
        if (!test_that(!status && !second && of.workspace_bytes <= budget && !memcmp(&of, &again, sizeof of) &&
                       of.panel_vocab <= a.vocab && (of.panels - 1) * of.panel_vocab < a.vocab))
            test_detail("%s %s, %zu of %zu bytes, at least %zu: %s; with those: %s, %s", direction_name[direction], test_type_name[type], of.workspace_bytes,
                        budget, least, of.text, lk_status_string(second), again.text);
        const size_t above = budget + (size_t)test_below(&r, (int64_t)(2 * (least + more - budget) + 1));
        const lk_status third = ask(&a, above, &larger);
        if (!test_that(!third && whole_matmuls(&larger, a.vocab) <= whole_matmuls(&of, a.vocab)))
            test_detail("%s, %zu bytes: %s; %zu: %s, %s", test_type_name[type], budget, of.text, above, lk_status_string(third),
                        larger.text);
        const bool chose = fits && direction == BOTH && !a.path && !(a.chunk_tokens || a.panel_vocab || a.slice_tokens);
        fused += chose && of.path == FUSED, kept += chose && of.path != FUSED;
    }
    if (!test_that(!fused_here || (fused > 100 && kept > 100))) test_detail("%d plans fused, %d not", fused, kept);
    args_t a = {};
    plan_t of = {}; /* 2^63 bytes of panels and as many for sums of dx are more than any budget, and no fewer when they wrap */
    a.x = a.weight = a.target = a.dx = dummy, a.tokens = INT32_MAX, a.hidden = a.vocab = 1 << 30;
    a.path = LK_LINEAR_CROSS_ENTROPY_PANELS;
    const lk_status status = lk_linear_cross_entropy_forward_backward_plan_bf16(&a, (size_t)1 << 42, &of);
    if (!test_that(!status && 4.0 * (double)of.chunk_tokens * (double)(a.hidden + of.panel_vocab) <= 0x1p42))
        test_detail("%s: %s", lk_status_string(status), of.text);
    a.chunk_tokens = INT32_MAX, a.panel_vocab = 1 << 30;
    const lk_status whole = lk_linear_cross_entropy_forward_backward_plan_bf16(&a, (size_t)1 << 42, &of);
    if (!test_that(whole == LK_ERR_WORKSPACE)) test_detail("%s: %s", lk_status_string(whole), of.text);
}

/* ---- Tensors of more than 2^31 elements (small ones on the simulator), and a busy device ------------------------------- */

/* Element i of a tensor: a multiple of 1/128 in [-1, 1), exact in bf16, the same on both sides. */
static __host__ __device__ float huge_number(int64_t i)
{
    return (float)test_huge_number(i) / 128.0f - 1.0f;
}

/* x has but GROUPS different rows and weight KINDS, so that the reference needs few logits. */
enum { GROUPS = 4, KINDS = 97 };
typedef struct {
    lk_bf16 *x, *weight;
    int32_t *target;
    int64_t tokens, hidden, vocab;
    float scale; /* of weights, a power of 2 */
} huge_fill;

LK_KERNEL void huge_fill_kernel(huge_fill p)
{
    const int64_t first = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = first; i < p.tokens * p.hidden; i += step)
        lk_put(p.x + i, huge_number(i / p.hidden % GROUPS * p.hidden + i % p.hidden));
    for (int64_t i = first; i < p.vocab * p.hidden; i += step)
        lk_put(p.weight + i, p.scale * huge_number(i / p.hidden % KINDS * p.hidden + i % p.hidden + (1 << 20)));
    for (int64_t i = first; i < p.tokens; i += step) p.target[i] = (int32_t)test_huge_target(i, p.vocab);
}

/* forward_backward of a mean, or forward and backward with `saved`; f32 dweight. Sampled elements are recomputed here. workspace:
 * a part of what one chunk takes. */
static void huge(int64_t tokens, int64_t hidden, int64_t vocab, int path, int64_t part, bool saves)
{
    void *const x = test_huge_allocate(tokens * hidden * 2), *const dx = test_huge_allocate(tokens * hidden * 2);
    void *const weight = test_huge_allocate(vocab * hidden * 2), *const dweight = test_huge_allocate(vocab * hidden * 4);
    void *const target = test_huge_allocate(tokens * 4), *const lse = test_huge_allocate(tokens * 4);
    void *workspace, *saved = NULL;
    const float scale = exp2f(-floorf(log2f(sqrtf((float)hidden)))) * 4;
    const huge_fill fill = {(lk_bf16 *)x, (lk_bf16 *)weight, (int32_t *)target, tokens, hidden, vocab, scale};
    TEST_CUDA(lk_launch(huge_fill_kernel, test_pick(4096, 4), 256, 0, test.stream, fill));
    void *at[TENSORS] = {};
    at[X] = x, at[WEIGHT] = weight, at[TARGET] = target, at[DX] = dx, at[DWEIGHT] = dweight, at[LSE] = lse;
    bool ran = true;
    for (int step = 0; step <= saves && ran; step++) {
        problem p = plain(TEST_BF16, !saves ? BOTH : step ? BACKWARD : FORWARD, path, tokens, hidden, vocab);
        p.on[MEAN] = p.on[INT32] = p.on[DWEIGHT_F32] = true;
        set_args(&p, at);
        size_t bytes = 0;
        if (saves && step == 0) {
            if (!test_that(saved_bytes_of[TEST_BF16](&args, &bytes) == LK_OK)) test_detail("%s", lk_last_error());
            saved = test_huge_allocate((int64_t)bytes);
        }
        args.saved = saved;
        if (!test_that(smallest(&p, &bytes) == LK_OK)) test_detail("%s", lk_last_error());
        const size_t budget = (size_t)(tokens * (vocab + 64) * 4 / part) + ((size_t)64 << 20);
        if (budget > bytes) bytes = budget;
        TEST_CUDA(cudaMalloc(&workspace, bytes));
        set_workspace(workspace, bytes), plan_of(&p, bytes, &plan);
        ran = launched(&p, launch(&p));
        TEST_CUDA(cudaFree(workspace));
    }
    double q[GROUPS][KINDS], exact[GROUPS] = {};
    int64_t often[KINDS];
    for (int kind = 0; kind < KINDS; kind++) often[kind] = vocab / KINDS + (kind < vocab % KINDS);
    for (int group = 0; group < GROUPS; group++) {
        double sum = 0;
        for (int kind = 0; kind < KINDS; kind++) {
            double v = 0;
            for (int64_t d = 0; d < hidden; d++)
                v += (double)huge_number(group * hidden + d) * (double)(scale * huge_number(kind * hidden + d + (1 << 20)));
            q[group][kind] = exp(v), sum += (double)often[kind] * exp(v);
        }
        for (int kind = 0; kind < KINDS; kind++) q[group][kind] /= sum;
        exact[group] = log(sum);
    }
    uint64_t random = (uint64_t)(tokens + vocab);
    if (saves && !test_that(plan.matmuls == 2)) test_detail("%s", plan.text);
    const double half = plan.path == FUSED ? 0x1p-7 : 0x1p-8; /* dZ is kept in bf16; fused, v x too */
    for (int s = 0; ran && s < 24; s++) {
        const int64_t token = s == 0 ? tokens - 1 : s == 1 ? 0 : test_below(&random, tokens), d = test_below(&random, hidden);
        const int64_t c = s == 0 ? vocab - 1 : s == 1 ? 0 : test_below(&random, vocab), y = test_huge_target(token, vocab);
        if (!test_near(TEST_F32, test_huge_get(TEST_F32, lse, token), exact[token % GROUPS], 1e-5 * exact[token % GROUPS]))
            test_detail("lse[%lld] is wrong; plan: %s", (long long)token, plan.text);
        double want = 0, slack = 0;
        for (int kind = 0; kind < KINDS; kind++) {
            const double w = (double)(scale * huge_number(kind * hidden + d + (1 << 20)));
            const double g = (double)often[kind] * q[token % GROUPS][kind] - (y % KINDS == kind);
            const double size = (double)often[kind] * q[token % GROUPS][kind] + (y % KINDS == kind);
            want += g * w / (double)tokens, slack += size * fabs(w) / (double)tokens * (half + 1e-4);
        }
        if (!test_near(TEST_BF16, test_huge_get(TEST_BF16, dx, token * hidden + d), want, slack))
            test_detail("dx[%lld, %lld] is wrong; plan: %s", (long long)token, (long long)d, plan.text);
        want = slack = 0;
        for (int64_t t = 0; t < tokens; t++) {
            const double v = (double)huge_number(t % GROUPS * hidden + d);
            const double g = q[t % GROUPS][c % KINDS] - (test_huge_target(t, vocab) == c);
            want += g * v / (double)tokens, slack += fabs(g * v) / (double)tokens * (half + 1e-4);
        }
        if (!test_near(TEST_F32, test_huge_get(TEST_F32, dweight, c * hidden + d), want, slack))
            test_detail("dweight[%lld, %lld] is wrong; plan: %s", (long long)c, (long long)d, plan.text);
    }
    test_huge_free();
}

/* Products of ones: an element is the number of terms that were summed. cuBLASLt has algorithms that leave some out. */
static const char *const form_name[3] = {"dweight's", "dx's", "the logits'"};
static void ones(int type, int form)
{
#if defined(LK_SIMT)
    enum { DRAWS = 40, LONGEST = 700, SHAPES = 2, MOST = 64, SMALL = 4287 }; /* SMALL: two parts, and not three, have room */
    static const int64_t shapes[SHAPES][2] = {{9, 8}, {64, 5}};
#else
    enum { DRAWS = 500, LONGEST = 9000, SHAPES = 4, MOST = 4096, SMALL = 1 << 20 };
    static const int64_t shapes[SHAPES][2] = {{768, 128}, {64, 64}, {4096, 8}, {100, 30}};
#endif
    static const int64_t rest[] = {0, 1, 2, 5, 9, 33};
    static const size_t rooms[] = {(size_t)32 << 20, 0, SMALL};
    const int64_t count = MOST * (LONGEST + 64);
    const size_t bytes = (size_t)(count * test_type_bytes[type]), most = (size_t)(768 * 128 * 4);
    void *const host = malloc(bytes), *const one = test_huge_allocate((int64_t)bytes);
    float *const got = (float *)malloc(most), *const d = (float *)test_huge_allocate((int64_t)most);
    void *const room = test_huge_allocate((int64_t)rooms[0]);
    for (int64_t i = 0; i < count; i++) test_put(type, host, i, 1.0f);
    TEST_CUDA(cudaMemcpy(one, host, bytes, cudaMemcpyHostToDevice));
    uint64_t r = test_hash((uint64_t)(type * 3 + form));
    bool right = true;
    for (int i = 0; i < test_pick(DRAWS, 20) && right; i++) {
        const int64_t *const shape = shapes[test_below(&r, SHAPES)], m = shape[0], n = shape[1];
        const int64_t k = (1 + test_below(&r, LONGEST / 64)) * 64 + rest[test_below(&r, LENGTH_OF(rest))];
        const size_t has = rooms[test_chance(&r, 4) ? 1 + test_below(&r, 2) : 0];
        const lk_cublas_call call = {"test", test.stream, (lk_cublas_context *)&context, room, has, LK_CUBLAS_LAUNCH};
        lk_cublas_product p = {};
        p.key.factor_type = LK_DTYPE_F32 + type, p.key.type = LK_DTYPE_F32, p.key.transpose_b = form == 0, p.key.transpose_a = form == 2;
        p.key.m = m, p.key.n = n, p.key.k = k, p.key.ldd = m;
        p.key.lda = ((form == 2 ? k : m) + 7) / 8 * 8, p.key.ldb = ((form == 0 ? n : k) + 7) / 8 * 8;
        p.a = p.b = one, p.d = d;
        TEST_CUDA(cudaMemsetAsync(d, 0xff, (size_t)(m * n * 4), test.stream));
        if (!test_launched(lk_cublas_multiply(&call, &p), "a product")) break;
        TEST_CUDA(cudaMemcpyAsync(got, d, (size_t)(m * n * 4), cudaMemcpyDeviceToHost, test.stream));
        TEST_CUDA(cudaStreamSynchronize(test.stream));
        for (int64_t e = 0; e < m * n && right; e++) right = got[e] == (float)k;
        if (!test_that(right))
            test_detail("%lld x %lld x %lld, %zu bytes of workspace: the first element is %g", (long long)m, (long long)n, (long long)k, has,
                        (double)got[0]);
    }
    test_huge_free(), free(host), free(got);
}

#if !defined(LK_SIMT)

static void busy(int type, int direction, int path)
{
    problem p = plain(type, direction, path, 600, 64, 1500);
    p.on[MEAN] = p.on[WANT_DBIAS] = true, p.chunk = 256, p.panel = 512;
    settle_tensors(&p);
    if (!setup(&p, 0) || !launched(&p, launch(&p))) return;
    collect(&p), settle(&p, true, "the first run");
    test_busy(op, &p);
}

#endif

static void all_huge(void)
{
#if defined(LK_SIMT)
    static const int64_t shapes[][4] = {{300, 8, 700, 1}, {300, 8, 700, 5}, {70, 304, 64, 1}, {64, 304, 70, 3}};
#else
    static const int64_t shapes[][4] = {
        {33000, 8, 66000, 1}, {33000, 8, 66000, 20}, {70001, 32768, 64, 1}, {64, 32768, 70001, 1}};
#endif
    for (int i = 0; i < LENGTH_OF(shapes); i++)
        for (int at = 0; at < 2 * PATHS; at++) {
            const int path = at % PATHS;
            const bool saves = at >= PATHS;
            if (!has_path(TEST_BF16, path) || (saves && (i > 1 || path == LK_LINEAR_CROSS_ENTROPY_PANELS))) continue;
            if (!test_begin("huge: %lld x %lld x %lld, %s, 1 / %lld%s", (long long)shapes[i][0], (long long)shapes[i][1],
                            (long long)shapes[i][2], path_name[path], (long long)shapes[i][3], saves ? ", saved" : ""))
                continue;
            huge(shapes[i][0], shapes[i][1], shapes[i][2], path, shapes[i][3], saves);
            test_finish();
        }
#if !defined(LK_SIMT)
    for (int at = 0; at < COUNTED; at++)
        for (int type = 0; type < TEST_TYPES; type++) {
            const char *const name = direction_name[at / PATHS];
            if (!has_path(type, at % PATHS)) continue;
            if (!test_begin("%s %s %s: half of the SMs held", name, test_type_name[type], path_name[at % PATHS])) continue;
            busy(type, at / PATHS, at % PATHS);
            test_finish();
        }
#endif
}

static void fuzz(void)
{
    if (test.fuzz < 0 || !test_begin("fuzz, %ld calls, seed %llu", test.fuzz, (unsigned long long)test.fuzz_seed)) return;
    uint64_t r = test_hash(test.fuzz_seed);
    for (long i = 0; i < test.fuzz; i++) {
        problem p = drawn((int)test_below(&r, TEST_TYPES), (int)test_below(&r, DIRECTIONS), (int)test_below(&r, PATHS),
                          test_below(&r, 40), 1 + test_below(&r, 40), 1 + test_below(&r, 300), (int)test_below(&r, 1 << 30));
        p.over = test_chance(&r, 4);
        if (test_chance(&r, 9)) p.empty = p.on[WEIGHTS] ? ALL_WEIGHTLESS : ALL_IGNORED, p.on[BAD] = false;
        run(p);
    }
    test_finish();
    test_counts_print(&counts, "calls by path and option");
}

int main(int argc, char **argv)
{
    test_start(argc, argv);
    const lk_status status = lk_linear_cross_entropy_init(&context);
    if (status) printf("FAIL init: %s\n", lk_last_error()), test.failed++;
    if (status) return test_end();
    lk_device device = {};
    fused_here = lk_current_device(&device) == cudaSuccess && lk_gemm_available(&device);
    if (!fused_here) test_skip("fused", "is for sm_90a");
    all_errors();
    if (test_begin("plans within goals.csv's workspaces")) goal_plans(), test_finish();
    if (test_begin("plans of path 0")) choices(), test_finish();
    if (test_begin("plans of plans")) plans_again(), test_finish();
    if (test_begin("tail columns")) tails(), test_finish();
    if (fused_here && test_begin("plans of any number of tokens")) plans_of_any_number_of_tokens(), test_finish();
    if (test_begin("queries from shapes alone")) shapes_alone(), test_finish();
    for (int type = 0; type < TEST_TYPES; type++)
        for (int form = 0; form < 3; form++)
            if (test_begin("products of ones %s: %s", test_type_name[type], form_name[form])) ones(type, form), test_finish();
    if (test_begin("workspaces by default")) default_bytes(), test_finish();
    if (test_begin("plans where fused is left out")) left_out(), test_finish();
    all_sequences();
    all_themes();
    if (test.small) test_skip("huge", "left out of --small");
    else all_huge();
    test_all_ran(&counts, possible, all_counts);
    fuzz();
    lk_linear_cross_entropy_destroy(&context);
    return test_end();
}
