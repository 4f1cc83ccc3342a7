// SPDX-License-Identifier: MIT
/* lk_row.cuh - what kernels of rows stand on: teams of threads and their rows, reductions and an exchange over a team, and the
 * running state of a log-sum-exp (lk_lse).
 *
 * A team of threads owns a row: 1 to 32 lanes of a warp, a block, or a cluster of blocks (2 or 4 warps in one kernel of
 * cross_entropy).
 *   host     lk_team_of divides the rows among teams; the kernel gets the lk_team among its arguments.
 *   device   lk_row_of says which columns of which row a thread has. A thread computes the state of its own columns. Then the
 *            states are merged over the lanes of a warp, over the warps of a block and over the blocks of a cluster.
 * examples/row_softmax.cu is a whole kernel on these. NVRTC takes the file too; a block or a warp per row then needs no plan of
 * the host, and {} is its lk_team: examples/nvrtc.py.
 *
 * Needs: lk_base.cuh, lk_ptx.cuh.
 */
#ifndef LK_ROW_CUH
#define LK_ROW_CUH

#include "lk_base.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

/* ---- Teams and rows ------------------------------------------------------------------------------------------------------ */

/* What a kernel knows of its teams when it is compiled. */
enum {
    LK_TEAM_LANES = 0,   /* 1 to 32 lanes of a warp, as lk_team.size_log2 says */
    LK_TEAM_WARP = 1,    /* all lanes of a warp */
    LK_TEAM_BLOCK = 2,   /* a block */
    LK_TEAM_CLUSTER = 3, /* the blocks of a cluster, at least 2 */
    LK_TEAM_ANY = 4      /* lk_row_of: any of these, as lk_team says; lk_inbox_*, lk_lse_team: a block or a cluster */
};

/* How rows are divided among teams of 1 << size_log2 threads. */
typedef struct {
    int size_log2;
    int threads;    /* of a block, a power of two from 32 on */
    int cluster;    /* blocks of a cluster; 1: no clusters */
    int64_t pieces; /* of a row, each with a team; 1 unless lk_team_in_pieces says more */
    int64_t grid;   /* blocks */
} lk_team;

/* log2 of n, rounded up to an integer; 0 for n < 2. */
LK_HOST int lk_log2(int64_t n)
{
    int log2 = 0;
    while ((int64_t)1 << log2 < n) log2++;
    return log2;
}

/* Teams with as many threads as a row can use, `preferred`, rounded up to a power of two, but no more than `most`, a power of two.
 * A team of more than a block has a cluster. */
LK_HOST lk_team lk_team_of(int64_t rows, int64_t preferred, int64_t most, int threads)
{
    const int size_log2 = lk_log2(preferred < most ? preferred : most);
    const int64_t size = (int64_t)1 << size_log2, cluster = size > threads ? size / threads : 1;
    return {size_log2, threads, (int)cluster, 1, lk_ceil_div(rows * cluster, size < threads ? threads / size : 1)};
}

/* The same where threads need not hear of each other: a row that wants more threads has several teams, one for each piece. */
LK_HOST lk_team lk_team_in_pieces(int64_t rows, int64_t preferred, int64_t most, int threads)
{
    const int64_t pieces = preferred > most ? lk_ceil_div(preferred, most) : 1;
    lk_team team = lk_team_of(rows * pieces, preferred, most, threads);
    team.pieces = pieces;
    return team;
}

#define LK_TEAM_ROWS ((int64_t)1 << 27) /* the most rows of a path with a block or more per row */

/* The number of rows by which a call chooses its kernel and its teams. With batch_invariant it is always a large one, so that the
 * bits of a row do not depend on how many rows there are. */
LK_HOST int64_t lk_team_rows(int64_t rows, int batch_invariant) { return batch_invariant ? LK_TEAM_ROWS : rows; }

/* The kind of team for a reduction over rows: LK_TEAM_WARP for rows of up to 16 KiB (a caller may then take LK_TEAM_LANES) or
 * for more than LK_TEAM_ROWS rows; else LK_TEAM_BLOCK, or where these are too few for the card, LK_TEAM_CLUSTER. */
LK_HOST int lk_team_path(const lk_device *device, int64_t rows, int64_t row_bytes)
{
    if (row_bytes <= 16384 || rows > LK_TEAM_ROWS) return LK_TEAM_WARP;
    return rows < 2 * device->sms && device->arch >= 90 ? LK_TEAM_CLUSTER : LK_TEAM_BLOCK;
}

/* The blocks of a cluster: 2 to 8, more while there are few blocks. */
LK_HOST int lk_team_cluster(const lk_device *device, int64_t rows)
{
    int cluster = 2;
    while (cluster < 8 && rows * cluster < 2 * device->sms) cluster *= 2;
    return cluster;
}

/* What a thread has of a row: `count` vectors, the first at `first` and then every size-th of the row's; and the single
 * elements rank, rank + size, ... of both ends. Another tensor whose rows have the same offset modulo 16 bytes has its vectors
 * at the same columns. */
template <class T> struct lk_row {
    const T *data, *first; /* data: column 0 */
    int64_t number;        /* of the row */
    bool there;            /* false: there is no such row; the thread reads nothing, and calls the collectives all the same */
    int rank, size_log2;   /* this thread among the 1 << size_log2 of its team */
    int lanes;             /* of each warp that belong to the team: 1 to 32 */
    int count;
    lk_split split; /* of the whole row; in pieces after the first, edge is 0 */
};

/* The row of a thread. Threads: of a block, where the compiler shall know them; 0: as launched. Vecs: the most vectors of a
 * thread, where rows are in pieces; 0: no limit. stride: from a row to the next, in elements. */
template <int Kind, int Threads, int Vecs = 0, class T>
LK_DEVICE lk_row<T> lk_row_of(const lk_team &team, const T *x, int64_t stride, int64_t rows, int64_t cols)
{
    constexpr bool whole = Kind == LK_TEAM_BLOCK || Kind == LK_TEAM_CLUSTER; /* blocks */
    const int blocks_log2 = Kind == LK_TEAM_CLUSTER ? 31 - __clz((int)lk_cluster_nctarank()) : 0;
    const int threads = Threads ? Threads : (int)blockDim.x;
    const int64_t thread = (int64_t)blockIdx.x * threads + threadIdx.x;
    lk_row<T> row = {};
    row.size_log2 = whole ? 31 - __clz(threads) + blocks_log2 : Kind == LK_TEAM_WARP ? 5 : team.size_log2;
    row.lanes = (Kind == LK_TEAM_LANES || Kind == LK_TEAM_ANY) && row.size_log2 < 5 ? 1 << row.size_log2 : 32;
    row.number = whole ? blockIdx.x >> blocks_log2 : thread >> row.size_log2;
    row.rank = Kind == LK_TEAM_CLUSTER ? (int)lk_cluster_ctarank() * threads + (int)threadIdx.x
               : Kind == LK_TEAM_BLOCK ? (int)threadIdx.x
                                       : (int)thread & ((1 << row.size_log2) - 1);
    int64_t piece = 0;
    if (Vecs && team.pieces > 1) { /* pieces number fewer than 2^32: each has 32 vectors or more */
        const uint32_t unit = (uint32_t)row.number;
        row.number = unit / (uint32_t)team.pieces, piece = unit % (uint32_t)team.pieces;
    }
    row.there = whole || row.number < rows;
    if (!row.there) return row;

    row.data = x + row.number * stride, row.split = lk_split_row(row.data, cols);
    const int64_t skipped = piece * Vecs << row.size_log2, left = row.split.vecs - skipped;
    const int over = (int)left & ((1 << row.size_log2) - 1);
    row.first = row.data + skipped * LK_VEC<T> + row.split.head + row.rank * LK_VEC<T>;
    row.count = (int)(left >> row.size_log2) + (row.rank < over);
    if (Vecs && row.count > Vecs) row.count = Vecs;
    if (piece > 0) row.split.edge = 0;
    return row;
}

/* The column of vector u of this thread, 0 <= u < row.count. */
template <class T> LK_DEVICE int64_t lk_row_col(const lk_row<T> &row, int u)
{
    return row.first - row.data + ((int64_t)u * LK_VEC<T> << row.size_log2);
}

/* The thread's first Vecs vectors, by streaming loads, or cached: by loads that the caches may keep. Loads without predicates all
 * start before the first is waited for; ptxas moves others to where they are used. */
template <bool cached = false, class T, int Vecs> LK_DEVICE void lk_row_load(lk_vec<T> (&raw)[Vecs], const lk_row<T> &row)
{
    const int step = LK_VEC<T> << row.size_log2;
    if (row.count >= Vecs) {
        LK_UNROLL
        for (int u = 0; u < Vecs; u++) raw[u] = cached ? lk_load_vec_ca(row.first + u * step) : lk_load_vec(row.first + u * step);
    } else {
        LK_UNROLL for (int u = 0; u < Vecs; u++)
            if (u < row.count) raw[u] = cached ? lk_load_vec_ca(row.first + u * step) : lk_load_vec(row.first + u * step);
    }
}

/* Prefetches the thread's first n vectors into the L2, before loads are allowed. */
template <int n, class T> LK_DEVICE void lk_row_prefetch(const lk_row<T> &row)
{
    LK_UNROLL for (int u = 0; u < n; u++)
        if (u < row.count) lk_prefetch_l2(row.first + (u * LK_VEC<T> << row.size_log2));
}

/* ---- Reductions over a team ---------------------------------------------------------------------------------------------- */

/* The sum over `team` consecutive lanes, a power of two. All 32 lanes call it; every lane of a team gets its team's sum. */
LK_DEVICE float lk_sum_warp(float x, int team = 32)
{
    LK_UNROLL for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

/* The largest of x, likewise. */
LK_DEVICE float lk_max_warp(float x, int team = 32)
{
    LK_UNROLL for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

/* Kahan's sum: *lost is what the additions so far rounded off, 0 before the first. */
LK_DEVICE void lk_kahan_add(float *sum, float *lost, float x)
{
    const float part = x - *lost, total = *sum + part;
    *lost = (total - *sum) - part;
    *sum = total;
}

/* Before a kernel's first use of the cluster's shared memory: begin anywhere, then ready. Here and below, a warp's threads come
 * together for the .aligned instructions. */
LK_DEVICE void lk_cluster_begin(void)
{
    if (lk_cluster_nctarank() > 1) __syncwarp(), lk_barrier_cluster_arrive_relaxed(); /* says that this block runs */
}
LK_DEVICE void lk_cluster_ready(void)
{
    if (lk_cluster_nctarank() > 1) __syncwarp(), lk_barrier_cluster_wait(); /* the peers run: their memory may be written */
}

/* The barrier of a cluster's threads. What each of them wrote before, to its peers' shared memory too, all read after it. */
LK_DEVICE void lk_cluster_sync(void)
{
    __syncwarp();
    lk_barrier_cluster_arrive(); /* orders what the caller says */
    lk_barrier_cluster_wait();
}

/* The sums of Num values per thread over all threads of a block, or of all blocks of a cluster (at most 8), in a fixed order.
 * Called by: every thread of the cluster's blocks, whose threads are a multiple of 32. number: 0, 1, 2, ... for a kernel's
 * successive calls. In a cluster lk_cluster_begin() and lk_cluster_ready() come before the first call. Alone: the kernel is
 * never launched with clusters.
 * Result: in every thread.
 * Shared memory: its own, two halves, so that one barrier per call is enough. Calls 0 and 2 write the same half. To write in
 * call 2 a thread has passed call 1's barrier, and by then all threads have read the results of call 0. A peer may end after
 * its last call: no other block writes into its memory any more. */
template <int Num, bool Alone = false> LK_DEVICE void lk_sum_cluster(float (&v)[Num], int number)
{
    constexpr int Half = (Alone ? 1 : 8) * 32 * Num; /* blocks of 32 warps */
    LK_SHARED(float, inbox, [2 * Half]);
    const int blocks = Alone ? 1 : (int)lk_cluster_nctarank(), rank = Alone ? 0 : (int)lk_cluster_ctarank();
    const int warps = (int)blockDim.x / 32;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    LK_UNROLL for (int n = 0; n < Num; n++) v[n] = lk_sum_warp(v[n]);
    if (blocks * warps == 1) return;
    float *box = inbox + (number & 1) * Half, *slot = box + (rank * warps + warp) * Num;
    if (lane < blocks) {
        if (blocks > 1) slot = (float *)lk_mapa(slot, (unsigned)lane);
        LK_UNROLL for (int n = 0; n < Num; n++) slot[n] = v[n];
    }
    if (blocks > 1) lk_cluster_sync(); /* orders the writes into every block's inbox before their reads */
    else __syncthreads();              /* likewise */
    const int count = blocks * warps;
    if (count <= 8 && !Alone) { /* a few broadcasts are faster here than five shuffles */
        LK_UNROLL for (int n = 0; n < Num; n++) v[n] = box[n];
        for (int i = 1; i < count; i++)
            LK_UNROLL for (int n = 0; n < Num; n++) v[n] += box[i * Num + n];
        return;
    }
    LK_UNROLL for (int n = 0; n < Num; n++) {
        v[n] = lane < count ? box[lane * Num + n] : 0.0f;
        for (int i = lane + 32; i < count && !Alone; i += 32) v[n] += box[i * Num + n];
        v[n] = lk_sum_warp(v[n]);
    }
}

/* ---- The exchange of states over a block or a cluster -------------------------------------------------------------------- */

/* A state from each warp of a team of blocks, as words of 8 bytes. */
template <class State, int Threads> struct lk_inbox {
    lk_mbarrier full; /* completes when all words have arrived */
    uint64_t word[8 * Threads / 32][sizeof(State) / 8];
};

/* The blocks of a team, and this block's rank among them. */
template <int Kind> LK_DEVICE int lk_team_blocks(void)
{
    return Kind < LK_TEAM_CLUSTER ? 1 : (int)lk_cluster_nctarank();
}
template <int Kind> LK_DEVICE int lk_team_block(void)
{
    return Kind < LK_TEAM_CLUSTER ? 0 : (int)lk_cluster_ctarank();
}

/* Before the kernel's lk_inbox_collect, every thread calls it. In a cluster it waits until the readers run. All: as there. */
template <int Kind, bool All = false, class State, int Threads> LK_DEVICE void lk_inbox_begin(lk_inbox<State, Threads> *inbox)
{
    const bool reader = (All || lk_team_block<Kind>() == 0) && threadIdx.x == 0;
    if (Kind != LK_TEAM_CLUSTER && lk_team_blocks<Kind>() == 1) return;
    if (reader) lk_mbarrier_init(&inbox->full, 1);
    if (reader) lk_fence_mbarrier_init();
    lk_cluster_begin();
    lk_cluster_ready(); /* the blocks that read run and have their barriers */
    if (reader) lk_mbarrier_arrive_expect_tx(&inbox->full, lk_cluster_nctarank() * (Threads / 32) * (unsigned)sizeof(State));
}

/* How many states come. */
template <int Kind, class State, int Threads> LK_DEVICE int lk_inbox_count(lk_inbox<State, Threads> *)
{
    return lk_team_blocks<Kind>() * (Threads / 32);
}

/* Gathers the states of all warps in the block with rank 0; All: in each block. In a cluster they arrive by st.async, and only
 * the readers wait for them. At a cluster's barrier every warp would wait for a fence of the whole GPU.
 * Called by: every thread of every block, Threads per block, with its warp's state, once per kernel.
 * Result: true in the first warp of the block with rank 0, or in all warps, which may read the states; false in the others.
 * Shared memory: inbox, for the whole kernel. A peer may end after the call: all words for it have arrived. */
template <int Kind, bool All = false, class State, int Threads>
LK_DEVICE bool lk_inbox_collect(lk_inbox<State, Threads> *inbox, State s)
{
    constexpr int Words = (int)(sizeof(State) / 8);
    const int blocks = lk_team_blocks<Kind>(), rank = lk_team_block<Kind>();
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    uint64_t *slot = inbox->word[rank * (Threads / 32) + warp], word[Words];
    memcpy(word, &s, sizeof s);
    if (Kind == LK_TEAM_CLUSTER || blocks > 1) {
        LK_UNROLL for (int i = 0; i < Words && lane < (All ? blocks : 1); i++) /* a lane for each reader */
            lk_st_async_b64(lk_mapa_shared(slot + i, lane), word[i], lk_mapa_shared(&inbox->full, lane));
        if (!All && (rank != 0 || warp != 0)) return false;
        lk_mbarrier_wait_parity_cluster(&inbox->full, 0);
    } else {
        LK_UNROLL for (int i = 0; i < Words && lane == 0; i++) slot[i] = word[i];
        __syncthreads(); /* orders the writes into the inbox before its reads */
    }
    return All || warp == 0;
}

/* State i, 0 <= i < lk_inbox_count, for the threads that lk_inbox_collect tells. */
template <class State, int Threads> LK_DEVICE State lk_inbox_state(const lk_inbox<State, Threads> *inbox, int i)
{
    State s;
    memcpy(&s, inbox->word[i], sizeof s);
    return s;
}

/* ---- Exponentials and logarithms, the same under --use_fast_math --------------------------------------------------------- */

/* e^x. The relative error is (|x| + 2) 2^-23 at most: lk_ex2's, and the rounding of x log2 e. */
LK_DEVICE float lk_exp(float x)
{
    return lk_ex2(x * LK_LOG2E);
}

/* The sigmoids of x and of -x, by one exponential and one reciprocal. In 1 - sigmoid(x) digits of the second would cancel.
 * Nothing overflows, since the exponent is never positive. */
LK_DEVICE float lk_sigmoid(float x, float *of_minus_x)
{
    const float e = lk_exp(-fabsf(x)), large = __fdividef(1.0f, 1.0f + e), small = e * large;
    *of_minus_x = x >= 0.0f ? small : large;
    return x >= 0.0f ? large : small;
}

/* log(x) = k log 2 + the result, |result| < 0.35, for a normal x: with x = 2^k (1 + f) and 1 + f in [sqrt(1/2), sqrt(2)),
 * log(1 + f) = f + f^2 (f P(f) - 1/2), P a least-maximum fit of degree 7; within 1.3 ulp. */
LK_DEVICE float lk_log_split(float x, float *k)
{
    const int bits = __float_as_int(x), exponent = (bits - 0x3f3504f3) >> 23;
    const float f = __int_as_float(bits - exponent * (1 << 23)) - 1.0f;
    float p = -0x1.41ebfcp-4f;
    p = fmaf(p, f, 0x1.07d08ap-3f);
    p = fmaf(p, f, -0x1.0ce0aep-3f);
    p = fmaf(p, f, 0x1.226e5ap-3f);
    p = fmaf(p, f, -0x1.547888p-3f);
    p = fmaf(p, f, 0x1.99a596p-3f);
    p = fmaf(p, f, -0x1.000220p-2f);
    p = fmaf(p, f, 0x1.55554ap-2f);
    p = fmaf(p, f, -0.5f);
    *k = (float)exponent;
    return fmaf(p, f * f, f);
}

/* ---- The state of a running log-sum-exp ---------------------------------------------------------------------------------- */

/* A set of values seen so far: the largest, and sum exp(value - max). A NaN makes the sum NaN, +inf makes it +inf; the empty
 * set is (-inf, 0), and any number of -inf values add nothing to it. Merging states in another order changes only the
 * rounding of the sum. Instead of the largest value any other may stand that is no more than 75 below it: sums stay below
 * float's limit, e^88. lk's own kernels keep within 65.
 * Where a function is given a scale, a positive one, the values are not yet multiplied by it: the sum is that of
 * exp(scale (value - max)). So differences of large values are exact, also those to max. */
typedef struct {
    float max, sum;
} lk_lse;

LK_DEVICE lk_lse lk_lse_empty(void)
{
    return {-INFINITY, 0.0f};
}

/* The reference of a sum's exponents: the maximum where it is finite, else 0, since inf - inf would be NaN. */
LK_DEVICE float lk_lse_reference(float max)
{
    return lk_is_finite(max) ? max : 0.0f;
}

/* The state of the union of two disjoint sets. */
LK_DEVICE lk_lse lk_lse_merge(lk_lse a, lk_lse b, float scale = 1.0f)
{
    const float max = fmaxf(a.max, b.max), reference = lk_lse_reference(max), rate = scale * LK_LOG2E;
    return {max, a.sum * lk_ex2(rate * (a.max - reference)) + b.sum * lk_ex2(rate * (b.max - reference))};
}

/* Adds n values with n + 1 exponentials, so add many at a time. Four chains hide the latency of the maxima and of the sums.
 * low, unless NULL, is what rounding took off each value. */
template <int n>
LK_DEVICE lk_lse lk_lse_add(lk_lse s, const float (&value)[n], float scale = 1.0f, const float *low = NULL)
{
    const float rate = scale * LK_LOG2E;
    float most[4] = {s.max, -INFINITY, -INFINITY, -INFINITY};
    LK_UNROLL for (int i = 0; i < n; i++) most[i % 4] = fmaxf(most[i % 4], value[i]);
    const float max = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])), reference = lk_lse_reference(max);
    float sum[4] = {s.sum * lk_ex2(rate * (s.max - reference)), 0.0f, 0.0f, 0.0f};
    LK_UNROLL
    for (int i = 0; i < n; i++) sum[i % 4] += lk_ex2(rate * (low ? (value[i] - reference) + low[i] : value[i] - reference));
    return {max, (sum[0] + sum[1]) + (sum[2] + sum[3])};
}

#define LK_LSE_BASE 0x1p28f /* below it rounding takes at most 2^3 off a product, which an exponential can correct */

/* What rounding took off `product` = scale x; 0 from LK_LSE_BASE on. */
LK_DEVICE float lk_lse_product_low(float scale, float x, float product)
{
    return fabsf(product) < LK_LSE_BASE ? fmaf(scale, x, -product) : 0.0f;
}

/* max + log(sum), where lk_log_split computed k and log of sum. The power of two is added to max first, since the two may cancel.
 * What that addition rounds off is added at the end, so that there is one rounding in all. rounded, unless NULL, becomes what
 * that rounding took off: result + *rounded is as good as the terms are. */
LK_DEVICE float lk_lse_join(float max, float k, float log, float *rounded = NULL)
{
    const float power = k * 0x1.62e400p-1f; /* exact: log 2 is this constant's 15 bits and a rest */
    const float high = max + power, back = high - max;
    const float low = (max - (high - back)) + (power - back);
    const float rest = low + fmaf(k, 0x1.7f7d1cp-20f, log), result = high + rest;
    if (rounded) {
        const float added = result - high;
        *rounded = (high - (result - added)) + (rest - added);
    }
    return result;
}

/* log sum exp(value): -inf for the empty set. rounded as in lk_lse_join; 0 where the result is not finite. */
LK_DEVICE float lk_lse_log(lk_lse s, float *rounded = NULL)
{
    if (rounded) *rounded = 0.0f;
    if (!(s.sum > 0.0f && lk_is_finite(s.sum))) return s.sum == 0.0f ? -INFINITY : s.sum;
    float k;
    const float log = lk_log_split(s.sum, &k);
    return lk_lse_join(s.max, k, log, rounded);
}

/* Merges the states of `team` consecutive lanes, a power of two. All 32 lanes call it; every lane of a team gets the result. */
LK_DEVICE lk_lse lk_lse_warp(lk_lse s, int team = 32, float scale = 1.0f)
{
    const float max = lk_max_warp(s.max, team);
    return {max, lk_sum_warp(s.sum * lk_ex2(scale * LK_LOG2E * (s.max - lk_lse_reference(max))), team)};
}

/* ---- Reading a row for its log-sum-exp ----------------------------------------------------------------------------------- */

/* A row is summed against a reference, a value that the lanes of a team agree on early, instead of a running maximum. Then an
 * element costs a multiply-add, an ex2 and an addition: sum 2^(rate x - base) with rate = scale log2 e and base = rate
 * reference, rounded. Terms may be large as long as the sum stays below LK_LSE_LIMIT. Where it does not, where base is not below
 * LK_LSE_BASE, or where there is a NaN or an infinity of the wrong sign, the warp reads its shares again with a running
 * maximum. So a warp's sum is below 32 2^80, and below 2^105 once it is corrected for the rounding of base and maximum. */
#define LK_LSE_LIMIT 0x1p80f

/* The x that adds nothing: scale x is -inf. */
LK_DEVICE float lk_lse_nothing(float scale)
{
    return scale > 0.0f ? -INFINITY : INFINITY;
}

/* The state of sum = sum 2^(rate x - base), rate = scale log2 e. base differs from rate reference, and the state's maximum
 * from scale reference, by rounding errors that are known exactly: the sum is corrected for both. */
LK_DEVICE lk_lse lk_lse_against(float reference, float base, float sum, float scale)
{
    const float max = scale * reference, low = lk_lse_product_low(scale, reference, max);
    return {max, sum * lk_ex2(fmaf(LK_LOG2E, low, -fmaf(scale * LK_LOG2E, reference, -base)))};
}

/* sum_j 2^(rate x_j - base) over a vector, added pairwise. */
template <class T> LK_DEVICE float lk_lse_terms(lk_vec<T> raw, float rate, float base)
{
    float x[LK_VEC<T>];
    lk_unpack(x, raw);
    LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) x[j] = lk_ex2(fmaf(rate, x[j], -base));
    LK_UNROLL for (int n = LK_VEC<T> / 2; n > 0; n /= 2)
        LK_UNROLL for (int j = 0; j < n; j++) x[j] += x[j + n];
    return x[0];
}

/* Before the terms of x are added. One that is far above the reference would have an error that f32 shows, so there a lane's
 * reference follows its largest term, up to a factor of 4: what the lane has summed up is then to be multiplied by the result. */
template <class T, int n> LK_DEVICE float lk_lse_follow(const float (&x)[n], float rate, float *reference, float *base)
{
    if constexpr (sizeof(T) != 4) return 1.0f;
    else {
        float top = 2.0f;
        LK_UNROLL for (int j = 0; j < n; j++) top = fmaxf(top, fmaf(rate, x[j], -*base));
        if (!(top > 2.0f)) return 1.0f; /* few vectors have a larger one */
        const float before = *base;
        LK_UNROLL for (int j = 0; j < n; j++)
            if (fmaf(rate, x[j], -before) == top) *reference = x[j];
        *base = rate * *reference;
        return lk_ex2(before - *base);
    }
}
template <class T> LK_DEVICE float lk_lse_follow(lk_vec<T> raw, float rate, float *reference, float *base)
{
    float x[LK_VEC<T>];
    lk_unpack(x, raw);
    return lk_lse_follow<T>(x, rate, reference, base);
}

/* The state of `count` vectors that are `step` elements apart, by a running maximum. unscaled: the state's values are x, and
 * lk_lse's functions are given the scale; otherwise they are scale x. */
template <bool unscaled, class T> LK_NOINLINE lk_lse lk_lse_read_slowly(const T *next, int count, int64_t step, float scale)
{
    lk_lse s = lk_lse_empty();
    LK_NO_UNROLL for (int i = 0; i < count; i++, next += step) {
        float x[LK_VEC<T>], z[LK_VEC<T>], low[LK_VEC<T>];
        lk_unpack(x, lk_load_vec(next));
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) z[j] = scale * x[j], low[j] = lk_lse_product_low(scale, x[j], z[j]);
        s = unscaled ? lk_lse_add(s, x, scale) : lk_lse_add(s, z, 1.0f, low);
    }
    return s;
}

/* The state of a row's elements that the lanes of a warp have. Vecs loads are always in flight: raw holds the thread's first Vecs
 * vectors (lk_row_load); each one is used, and the next one is loaded into its registers. The lanes agree on a reference early,
 * while they wait for loads anyway, so that at the end they only have to add.
 * The state's values are scale x, for any scale.
 * Called by: all 32 lanes of a warp. Result: in every lane of a row that is there. */
template <class T, int Vecs>
LK_DEVICE lk_lse lk_lse_read(lk_vec<T> (&raw)[Vecs], const lk_row<T> &row, float scale)
{
    const int step = LK_VEC<T> << row.size_log2;
    const bool edge = row.rank < row.split.edge;
    const float rate = scale * LK_LOG2E, sign = scale > 0.0f ? 1.0f : -1.0f; /* sign x rises with scale x */
    float single[1] = {-sign * INFINITY};
    if (edge) single[0] = lk_to_float(row.data[lk_edge_col<T>(row.split, row.rank)]);

    float most = row.count > 0 && sizeof(T) != 4 ? -INFINITY : sign * single[0];
    if (row.count > 0) {
        float x[LK_VEC<T>];
        lk_unpack(x, raw[0]);
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) most = fmaxf(most, sign * x[j]);
    }
    float reference = sign * lk_max_warp(most, row.lanes), base = rate * reference;
    float sum = 0.0f, lost = 0.0f, part = edge ? lk_ex2(fmaf(rate, single[0], -base)) : 0.0f;
    const T *next = row.first + Vecs * step;
    int left = row.count;
    while (left > Vecs) {
        LK_NO_UNROLL for (const int stop = left > 17 * Vecs ? left - 16 * Vecs : Vecs; left > stop; left -= Vecs) {
            LK_UNROLL for (int u = 0; u < Vecs; u++, next += step) {
                const float by = lk_lse_follow(raw[u], rate, &reference, &base);
                if (by != 1.0f) sum *= by, lost *= by, part *= by;
                part += lk_lse_terms(raw[u], rate, base);
                if (Vecs + u < left) raw[u] = lk_load_vec(next);
            }
        }
        lk_kahan_add(&sum, &lost, part); /* every 16 rounds: it keeps what the additions of a long row round off */
        part = 0.0f;
    }
    LK_UNROLL for (int u = 0; u < Vecs; u++) {
        if (u >= left) continue;
        const float by = lk_lse_follow(raw[u], rate, &reference, &base);
        if (by != 1.0f) sum *= by, lost *= by, part *= by;
        part += lk_lse_terms(raw[u], rate, base);
    }
    sum += part - lost;
    LK_NO_UNROLL
    for (int i = row.rank + (1 << row.size_log2); i < row.split.edge; i += 1 << row.size_log2) { /* more than threads */
        const float one[1] = {lk_to_float(row.data[lk_edge_col<T>(row.split, i)])};
        sum *= lk_lse_follow<T>(one, rate, &reference, &base);
        sum += lk_ex2(fmaf(rate, one[0], -base));
    }

    const bool fast = (fabsf(base) < LK_LSE_BASE && sum < LK_LSE_LIMIT) || !row.there;
    const bool all = __all_sync(0xffffffffu, fast);
    if (all && sizeof(T) == 4) return lk_lse_warp(lk_lse_against(reference, base, sum, scale), row.lanes);
    if (all) return lk_lse_against(reference, base, lk_sum_warp(sum, row.lanes), scale);
    lk_lse s = lk_lse_read_slowly<false>(row.first, row.count, step, scale);
    LK_NO_UNROLL for (int i = row.rank; i < row.split.edge; i += 1 << row.size_log2) {
        const float value = lk_to_float(row.data[lk_edge_col<T>(row.split, i)]);
        single[0] = scale * value;
        const float low = lk_lse_product_low(scale, value, single[0]);
        s = lk_lse_add(s, single, 1.0f, &low);
    }
    return lk_lse_warp(s, row.lanes);
}

/* Merges the states of a team's warps. scale: as in lk_lse.
 * Called by: every thread, with its warp's state, as lk_inbox_collect says. Result: in the thread with rank 0; All, or where a
 * team is in one warp: in every thread. In others it is undefined. */
template <int Kind, bool All = false, int Threads>
LK_DEVICE lk_lse lk_lse_team(lk_inbox<lk_lse, Threads> *inbox, lk_lse s, float scale = 1.0f)
{
    if (Kind < LK_TEAM_BLOCK) return s;
    if (!lk_inbox_collect<Kind, All>(inbox, s)) return s;
    /* The maximum of all first: then each state needs one exponential and waits for no other, where lk_lse_merge has two. */
    constexpr int Most = ((Kind == LK_TEAM_BLOCK ? 1 : 8) * Threads / 32 + 31) / 32; /* states that a lane reads */
    lk_lse part[Most];
    s.max = -INFINITY;
    LK_UNROLL for (int k = 0; k < Most; k++) {
        const int i = (int)threadIdx.x % 32 + 32 * k;
        part[k] = i < lk_inbox_count<Kind>(inbox) ? lk_inbox_state(inbox, i) : lk_lse_empty();
        s.max = fmaxf(s.max, part[k].max);
    }
    const int team = All || Kind == LK_TEAM_CLUSTER || lk_team_blocks<Kind>() > 1 ? 32 : Threads / 32;
    s.max = lk_max_warp(s.max, team), s.sum = 0.0f;
    LK_UNROLL
    for (int k = 0; k < Most; k++) s.sum += part[k].sum * lk_ex2(scale * LK_LOG2E * (part[k].max - lk_lse_reference(s.max)));
    return {s.max, lk_sum_warp(s.sum, team)};
}
template <int Threads> using lk_lse_inbox = lk_inbox<lk_lse, Threads>;

#endif /* CUDA or the simulator */
#endif
