// SPDX-License-Identifier: MIT
/* lk_gemm.cuh - tiles of A B^T on Hopper's tensor cores: copies by TMA, a ring of mbarriers, wgmma.
 *
 *   d[i,j] = sum_k a[row + i, k] b[col + j, k]      i < 128, j < 256; a, b bf16, the sum f32
 *
 * Two blocks of 384 threads make a cluster. They work on two tiles of the same columns: row tiles 2 i and 2 i + 1, of 128 rows
 * each. So each block loads its own rows of A, and half of B for both blocks. A block's first warpgroup loads: one of its
 * threads keeps the ring full. The other two multiply, 64 rows each, with the sums in registers. Then they do the kernel's work
 * on the sums, while the ring fills for the next tile.
 *
 *   block 0: rows 0-127                              block 1: rows 128-255                   of a tile, columns 0-255
 *   warpgroup 0, one thread: TMA                     warpgroup 0
 *      |  A 128 x 64 of its own rows                    |
 *      |  B 0-127 ------- multicast, into both ---------|---- B 128-255
 *      v                                                v
 *   ring of 4 stages  [A | B 256 x 64] [..] [..] [..]   ring of 4 stages
 *      |  full                       ^ empty            |
 *      v                             |                  v
 *   warpgroups 1, 2: wgmma, rows 0-63 and 64-127     warpgroups 1, 2
 *      |  128 floats per thread, after hidden / 64 stages
 *      v
 *   the kernel's work on a tile, while the other warpgroup multiplies and the ring fills
 *
 *   full    this block's copies have landed: one arrival, and LK_GEMM_STAGE_BYTES, a third of them from the peer's multicast
 *   empty   every consumer warp of both blocks has finished with the stage, 16 arrivals: the next copy of B lands in both
 *
 * With at most 128 rows, both blocks may take the same rows and different columns: lk_gemm_load_few.
 *
 * A transposed factor is stored with its rows along k instead: a[k, row + i], b[k, col + j]. Its copies are squares of 64 k by
 * 64 rows of A or columns of B, one after another, which wgmma reads as they are.
 *
 * Both roles of a kernel's warpgroups walk the same tiles in the same order:
 *     LK_DYN_SMEM(lk_gemm_memory, memory);
 *     lk_gemm_ring *ring = lk_gemm_begin(&memory);
 *     unsigned step = 0;
 *     if (lk_gemm_loads()) {
 *         lk_setmaxnreg_dec<LK_GEMM_LOAD_REGISTERS>();
 *         for (each tile) if (threadIdx.x == 0) lk_gemm_load(ring, &step, &a, &b, row, col, steps);
 *     } else {
 *         lk_setmaxnreg_inc<LK_GEMM_MULTIPLY_REGISTERS>();
 *         float d[LK_GEMM_SUMS];
 *         for (each tile) lk_gemm_multiply(d, ring, &step, steps), ...
 *     }
 *     lk_gemm_end();
 *
 * Needs      lk_base.cuh, lk_ptx.cuh. Only sm_90a has the instructions. Elsewhere the functions do nothing, and
 *            lk_gemm_available is false.
 * Shapes     Any: elements beyond the ends of A or B count as 0. Pointers and strides are multiples of 16 bytes.
 */
#ifndef LK_GEMM_CUH
#define LK_GEMM_CUH

#include "lk_base.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

#include <cudaTypedefs.h> /* PFN_cuTensorMapEncodeTiled_v12000 */

#define LK_GEMM_ROWS 128 /* of A in a block's tile; a cluster has twice as many */
#define LK_GEMM_COLS 256
#define LK_GEMM_DEPTH 64 /* of k in a stage: rows of 128 bytes, the swizzle's width */
#define LK_GEMM_STAGES 4 /* a power of 2; 48 KB each */
#define LK_GEMM_THREADS 384
#define LK_GEMM_SUMS 128 /* floats a consumer thread holds of its warpgroup's 64 x 256 */
#define LK_GEMM_STAGE_BYTES ((LK_GEMM_ROWS + LK_GEMM_COLS) * LK_GEMM_DEPTH * 2)

typedef struct {
    lk_bf16 a[LK_GEMM_STAGES][LK_GEMM_ROWS * LK_GEMM_DEPTH];
    lk_bf16 b[LK_GEMM_STAGES][LK_GEMM_COLS * LK_GEMM_DEPTH];
    lk_mbarrier full[LK_GEMM_STAGES], empty[LK_GEMM_STAGES];
} lk_gemm_ring;

/* The ring begins at a multiple of 1024 bytes, as the swizzle's pattern does. */
typedef struct {
    char bytes[sizeof(lk_gemm_ring) + 1024];
} lk_gemm_memory;

/* Called by every thread of the cluster, first. It touches no global memory. */
LK_DEVICE lk_gemm_ring *lk_gemm_begin(lk_gemm_memory *memory)
{
    lk_gemm_ring *ring = (lk_gemm_ring *)(((uintptr_t)memory + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < LK_GEMM_STAGES; i++) {
            lk_mbarrier_init(&ring->full[i], 1);
            lk_mbarrier_init(&ring->empty[i], 2 * (LK_GEMM_THREADS - 128) / 32);
        }
        lk_fence_mbarrier_init();
    }
    __syncwarp(); /* a cluster's barrier wants whole warps */
    lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait(); /* both blocks' barriers are initialized before either block uses the other's */
    return ring;
}

/* Called by every thread of the cluster, last: a block's memory outlives the copies and arrivals from its peer. */
LK_DEVICE void lk_gemm_end(void)
{
    __syncwarp();
    lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait();
}

/* Whether this thread's warpgroup loads. The kernel's two roles are the two branches of one `if`, and each branch begins with
 * its setmaxnreg: ptxas ignores it in other places. */
LK_DEVICE bool lk_gemm_loads(void)
{
    return threadIdx.x < 128;
}
#define LK_GEMM_LOAD_REGISTERS 40
#define LK_GEMM_MULTIPLY_REGISTERS 232

/* The copies of a tile, by one thread. A transposed factor comes in squares of 64 k by 64 of its rows or columns. */
template <bool transpose_a = false, bool transpose_b = false>
LK_DEVICE void lk_gemm_load(lk_gemm_ring *ring, unsigned *step, const CUtensorMap *a, const CUtensorMap *b, int row, int col,
                            int steps)
{
    const unsigned rank = lk_cluster_ctarank();
    const int begin = LK_GEMM_COLS / 2 * (int)rank, side = LK_GEMM_DEPTH;
    for (int step_of_tile = 0; step_of_tile < steps; step_of_tile++, ++*step) {
        const unsigned stage = *step % LK_GEMM_STAGES, parity = *step / LK_GEMM_STAGES % 2;
        const int k = step_of_tile * LK_GEMM_DEPTH;
        lk_mbarrier *const full = &ring->full[stage];
        lk_bf16 *const to_a = ring->a[stage], *const to_b = ring->b[stage] + begin * LK_GEMM_DEPTH;
        lk_mbarrier_wait_parity_relaxed(&ring->empty[stage], parity ^ 1);
        lk_mbarrier_arrive_expect_tx(full, LK_GEMM_STAGE_BYTES);
        for (int i = 0; i < (transpose_a ? LK_GEMM_ROWS : 1); i += side)
            lk_cp_async_bulk_tensor_2d_load(to_a + i * side, a, transpose_a ? row + i : k, transpose_a ? k : row, full);
        for (int i = 0; i < (transpose_b ? LK_GEMM_COLS / 2 : 1); i += side)
            lk_cp_async_bulk_tensor_2d_load_multicast(to_b + i * side, b, transpose_b ? col + begin + i : k,
                                                      transpose_b ? k : col + begin, full, 3);
    }
}

/* The copies of a tile where both blocks have the same rows, 0 to 127, and different columns. A cluster then multiplies 512 columns
 * at a time, with twice as many bytes of B on their way. Each block loads half of A for both. Boxes of A have 64 rows, of B 128. */
LK_DEVICE void lk_gemm_load_few(lk_gemm_ring *ring, unsigned *step, const CUtensorMap *a, const CUtensorMap *b, int col, int steps)
{
    const int begin = LK_GEMM_ROWS / 2 * (int)lk_cluster_ctarank(), box = LK_GEMM_COLS / 2;
    for (int k = 0; k < steps * LK_GEMM_DEPTH; k += LK_GEMM_DEPTH, ++*step) {
        const unsigned stage = *step % LK_GEMM_STAGES, parity = *step / LK_GEMM_STAGES % 2;
        lk_mbarrier *const full = &ring->full[stage];
        lk_mbarrier_wait_parity_relaxed(&ring->empty[stage], parity ^ 1);
        lk_mbarrier_arrive_expect_tx(full, LK_GEMM_STAGE_BYTES);
        lk_cp_async_bulk_tensor_2d_load_multicast(ring->a[stage] + begin * LK_GEMM_DEPTH, a, k, begin, full, 3);
        for (int i = 0; i < LK_GEMM_COLS; i += box)
            lk_cp_async_bulk_tensor_2d_load(ring->b[stage] + i * LK_GEMM_DEPTH, b, k, col + i, full);
    }
}

/* Gives a stage back to both blocks, once this warp's products of it are done. It hands over no data: the products have read,
 * and copies write next. */
LK_DEVICE void lk_gemm_release(lk_gemm_ring *ring, unsigned step)
{
    const unsigned lane = threadIdx.x % 32;
    if (lane < 2) lk_mbarrier_arrive_remote_relaxed(lk_mapa_shared(&ring->empty[step % LK_GEMM_STAGES], lane));
}

/* The sums of a tile, by a consumer warpgroup: d[i] is of row lk_gemm_row(i) and column lk_gemm_col(i) of the tile. The
 * products of a stage are on their way while those of the next one are issued. */
template <bool transpose_a = false, bool transpose_b = false>
LK_DEVICE void lk_gemm_multiply(float (&d)[LK_GEMM_SUMS], lk_gemm_ring *ring, unsigned *step, int steps)
{
    const int group = (int)threadIdx.x / 128 - 1, square = 64 * LK_GEMM_DEPTH;
    const uint64_t first_a = lk_wgmma_descriptor(ring->a[0] + group * square, 16, 1024);
    const uint64_t first_b = lk_wgmma_descriptor(ring->b[0], transpose_b ? 2 * square : 16, 1024);
    const int next_a = transpose_a ? 128 : 2, next_b = transpose_b ? 128 : 2; /* 16 k further on: 16 rows, or 32 bytes */
    for (int k = 0; k < steps; k++, ++*step) {
        const unsigned stage = *step % LK_GEMM_STAGES, parity = *step / LK_GEMM_STAGES % 2;
        const uint64_t a = first_a + stage * (sizeof ring->a[0] / 16), b = first_b + stage * (sizeof ring->b[0] / 16);
        lk_mbarrier_wait_parity(&ring->full[stage], parity);
        lk_wgmma_fence();
        LK_UNROLL for (int j = 0; j < LK_GEMM_DEPTH / 16; j++)
            lk_wgmma_m64k16_bf16<LK_GEMM_COLS, transpose_a, transpose_b>(d, a + next_a * j, b + next_b * j, k + j > 0);
        lk_wgmma_commit_group();
        lk_wgmma_wait_group<1>();
        if (k > 0) lk_gemm_release(ring, *step - 1);
    }
    lk_wgmma_wait_group<0>();
    lk_gemm_release(ring, *step - 1);
    lk_wgmma_hold(d);
}

/* Row within a block's tile and column of a thread's i-th sum: two neighbours in every 8 columns, in rows r and r + 8. */
LK_DEVICE int lk_gemm_row(int i)
{
    return (int)threadIdx.x / 32 * 16 - 64 + (int)threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}
LK_DEVICE int lk_gemm_col(int i)
{
    return i / 4 * 8 + (int)threadIdx.x % 4 * 2 + i % 2;
}

/* ---- What a kernel does with the sums ------------------------------------------------------------------------------------ */

/* Item i of a kernel's work: a pair of row tiles, of a cluster's two blocks, and a stretch of columns. Clusters that run at the
 * same time have the rows of one group, of `most` pairs, and few stretches. So each tile of columns is read from memory once
 * per group, whose rows stay in the L2. */
typedef struct {
    int pair, stretch;
} lk_gemm_item;

LK_DEVICE lk_gemm_item lk_gemm_item_of(int pairs, int stretches, int most, int i)
{
    const int group = i / (most * stretches), first = group * most, rest = i - first * stretches;
    const int wide = pairs - first < most ? pairs - first : most;
    return {first + rest % wide, rest / wide};
}

/* Two values as a pair of bf16. */
LK_DEVICE uint32_t lk_gemm_pair(float low, float high)
{
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    uint32_t pair;
    memcpy(&pair, &two, sizeof pair);
    return pair;
}

/* Four lanes hold two columns each of four groups of 8, as pairs of bf16. Afterwards each lane holds one group. */
LK_DEVICE uint4 lk_gemm_transpose(const uint32_t (&pair)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t low[2] = {odd ? pair[0] : pair[1], odd ? pair[2] : pair[3]}, u[4], far[2];
    low[0] = __shfl_xor_sync(0xffffffffu, low[0], 1), low[1] = __shfl_xor_sync(0xffffffffu, low[1], 1);
    u[0] = odd ? low[0] : pair[0], u[1] = odd ? pair[1] : low[0];
    u[2] = odd ? low[1] : pair[2], u[3] = odd ? pair[3] : low[1];
    far[0] = __shfl_xor_sync(0xffffffffu, high ? u[0] : u[2], 2), far[1] = __shfl_xor_sync(0xffffffffu, high ? u[1] : u[3], 2);
    return high ? make_uint4(far[0], far[1], u[2], u[3]) : make_uint4(u[0], u[1], far[0], far[1]);
}

/* Writes eight of a row's values per lane, of a block of 32 columns. cols_left: the columns from the tile's first to the padded
 * end, a multiple of 64. out: the tile's first column; NULL: no such row, or not wanted. */
LK_DEVICE void lk_gemm_put_block(lk_bf16 *out, int block, int cols_left, const uint32_t (&pair)[4])
{
    const uint4 group = lk_gemm_transpose(pair);
    const int col = block * 32 + (int)threadIdx.x % 4 * 8;
    if (out && col < cols_left) *(uint4 *)(out + col) = group;
}

/* Eight neighbours of a row, read and written. Behind the row's end zeros are read and nothing is written. wide: by one access
 * of 16 bytes; `left` is then a multiple of 8. */
LK_DEVICE uint4 lk_gemm_get8(const lk_bf16 *from, int left, bool wide)
{
    lk_bf16 x[8];
    uint4 group = {};
    if (wide && left > 0) return *(const uint4 *)from;
    LK_UNROLL for (int i = 0; i < 8; i++) lk_put(x + i, i < left ? lk_to_float(from[i]) : 0.0f);
    memcpy(&group, x, sizeof group);
    return group;
}
LK_DEVICE void lk_gemm_put8(lk_bf16 *to, uint4 group, int left, bool wide)
{
    lk_bf16 x[8];
    if (wide && left > 0) {
        *(uint4 *)to = group;
        return;
    }
    memcpy(x, &group, sizeof group);
    LK_UNROLL for (int i = 0; i < 8; i++)
        if (i < left) to[i] = x[i];
}

/* lk_gemm_join: a sum of 24 bits, from its bf16 and its low byte. lk_gemm_beyond: the low byte of the sum x with this bf16. */
LK_DEVICE float lk_gemm_join(uint32_t bf16, int low)
{
    return __uint_as_float((bf16 << 16) + (uint32_t)(low * 256));
}
LK_DEVICE int lk_gemm_beyond(float x, uint32_t bf16)
{
    const int low = (int)(__float_as_uint(x) - (bf16 << 16) + 128) >> 8; /* any value keeps a NaN a NaN */
    return low > 127 ? 127 : low;
}

/* The two rows of a tile that a thread writes: factor * d + times * more + old. */
typedef struct {
    lk_bf16 *out[2];        /* the thread's first columns; NULL: there is no such row */
    const lk_bf16 *more[2]; /* likewise; NULL: none */
    float factor[2], times[2];
    uint4 *low;             /* the low bytes of old; NULL: none are read or written */
    bool old, read_low, write_low;
    bool wide, wide_more;   /* of lk_gemm_get8 and lk_gemm_put8 */
    int left;               /* columns from the thread's first to the end of the row */
} lk_gemm_out;

/* Four pairs of a thread's columns out of a group of eight neighbours: lk_gemm_transpose is its own inverse. */
LK_DEVICE void lk_gemm_pairs(uint32_t (&pair)[4], uint4 group)
{
    const uint32_t four[4] = {group.x, group.y, group.z, group.w};
    const uint4 turned = lk_gemm_transpose(four);
    pair[0] = turned.x, pair[1] = turned.y, pair[2] = turned.z, pair[3] = turned.w;
}

template <int Ahead> LK_DEVICE void lk_gemm_put_sums(const lk_gemm_out &o, const float (&d)[LK_GEMM_SUMS])
{
    const bool adds = __any_sync(0xffffffffu, o.more[0] || o.more[1]);
    LK_UNROLL for (int begin = 0; begin < LK_GEMM_COLS / 32; begin += Ahead) { /* blocks of 32 columns, loaded together */
        uint4 high[Ahead][2], beyond[Ahead], more[Ahead][2];
        LK_UNROLL for (int i = 0; i < Ahead; i++) {
            const int at = (begin + i) * 32;
            LK_UNROLL for (int r = 0; r < 2; r++) {
                high[i][r] = more[i][r] = make_uint4(0, 0, 0, 0);
                if (o.old && o.out[r]) high[i][r] = lk_gemm_get8(o.out[r] + at, o.left - at, o.wide);
                if (o.more[r]) more[i][r] = lk_gemm_get8(o.more[r] + at, o.left - at, o.wide_more);
            }
            beyond[i] = o.read_low ? o.low[(begin + i) * 256] : make_uint4(0, 0, 0, 0);
        }
        LK_UNROLL for (int i = 0; i < Ahead; i++) {
            const int block = begin + i;
            uint32_t bytes[4] = {beyond[i].x, beyond[i].y, beyond[i].z, beyond[i].w};
            LK_UNROLL for (int r = 0; r < 2; r++) {
                uint32_t pair[4] = {}, extra[4] = {};
                if (o.old) lk_gemm_pairs(pair, high[i][r]);
                if (adds) lk_gemm_pairs(extra, more[i][r]);
                LK_UNROLL
                for (int g = 0; g < 4; g++) { /* two columns: half of bytes[r * 2 + g / 2] */
                    const float *const two = d + block * 16 + g * 4 + 2 * r;
                    uint32_t &four = bytes[r * 2 + g / 2];
                    const int at = g % 2 * 16;
                    float x = o.factor[r] * two[0], y = o.factor[r] * two[1];
                    if (o.old) {
                        x += lk_gemm_join(pair[g] & 0xffff, (int8_t)(four >> at));
                        y += lk_gemm_join(pair[g] >> 16, (int8_t)(four >> (at + 8)));
                    }
                    if (o.more[r]) {
                        x = fmaf(o.times[r], __uint_as_float(extra[g] << 16), x);
                        y = fmaf(o.times[r], __uint_as_float(extra[g] & 0xffff0000u), y);
                    }
                    pair[g] = lk_gemm_pair(x, y);
                    const uint32_t beyond_x = lk_gemm_beyond(x, pair[g] & 0xffff) & 0xff;
                    const uint32_t beyond_y = lk_gemm_beyond(y, pair[g] >> 16) & 0xff;
                    four = (four & ~(0xffffu << at)) | (beyond_x | beyond_y << 8) << at;
                }
                const uint4 group = lk_gemm_transpose(pair);
                if (o.out[r]) lk_gemm_put8(o.out[r] + block * 32, group, o.left - block * 32, o.wide);
            }
            if (o.write_low) o.low[block * 256] = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
        }
    }
}

/* ---- Host ---------------------------------------------------------------------------------------------------------------- */

#if !defined(LK_SIMT)
/* Static shared memory tells which code was loaded: a fat binary may hold sm_90 alone, or PTX. ptxas rounds it up and Hopper
 * has 1 KiB of its own, so the two numbers differ clearly. */
LK_KERNEL void lk_gemm_probe_kernel(int *out)
{
    LK_SHARED(int, probe, [LK_SM90A ? 2048 : 4]);
    probe[threadIdx.x % 4] = 0;
    *out = probe[0];
}
#endif

/* Whether the current device runs the functions above. */
LK_HOST bool lk_gemm_available(const lk_device *device)
{
#if defined(LK_SIMT)
    return device->arch == 90;
#else
    cudaFuncAttributes attributes;
    if (device->arch != 90) return false;
    if (cudaFuncGetAttributes(&attributes, (const void *)lk_gemm_probe_kernel) != cudaSuccess) return false;
    return attributes.sharedSizeBytes >= 2048 * sizeof(int);
#endif
}

/* Launches a kernel of tiles: a cluster of two blocks for each two SMs, or for each item where those are fewer. */
template <class Args>
LK_HOST lk_status lk_gemm_launch(const char *op, const lk_device *device, void (*kernel)(Args), int64_t items,
                                 cudaStream_t stream, const Args &p)
{
    const int64_t most = device->sms / 2 > 0 ? device->sms / 2 : 1;
    const int64_t clusters = items < most ? items : most;
    return lk_launch_pdl(op, device, kernel, 2 * clusters, 2, LK_GEMM_THREADS, sizeof(lk_gemm_memory), stream, p);
}

/* Describes a matrix of bf16 to TMA, which copies `box_rows` rows of LK_GEMM_DEPTH columns at a time. */
LK_HOST lk_status lk_gemm_map(const char *op, CUtensorMap *map, const void *matrix, int64_t rows, int64_t cols, int64_t stride,
                              int box_rows)
{
    void *found = NULL;
    const cudaError_t error = lk_driver_function("cuTensorMapEncodeTiled", &found);
    if (error || !found) return lk_launched(op, error ? error : cudaErrorNotSupported);
    const cuuint64_t size[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * 2};
    const cuuint32_t box[2] = {LK_GEMM_DEPTH, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    const CUresult result = ((PFN_cuTensorMapEncodeTiled_v12000)found)(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(matrix), size, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result ? lk_launched(op, cudaErrorInvalidValue) : LK_OK;
}

#endif /* CUDA or the simulator */
#endif
