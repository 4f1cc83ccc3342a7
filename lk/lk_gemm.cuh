// SPDX-License-Identifier: MIT
/* lk_gemm.cuh - tiles of A B^T on Hopper's tensor cores: copies by TMA, a ring of mbarriers, wgmma.
 *
 *   d[i,j] = sum_k a[row + i, k] b[col + j, k]      i < 128, j < 256; a, b bf16, the sum f32
 *
 * Two blocks of 384 threads make a cluster. They work on tiles side by side, rows 2 i and 2 i + 1 of 128, of the same columns,
 * so each block loads its own rows of A, and half of B for both blocks. A block's first warpgroup loads: one of its threads
 * keeps the ring full. The other two multiply, 64 rows each, with the sums in registers. Then they do the kernel's work on the
 * sums, while the ring fills for the next tile.
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
    const int half = LK_GEMM_COLS / 2 * (int)rank, side = LK_GEMM_DEPTH;
    for (int step_of_tile = 0; step_of_tile < steps; step_of_tile++, ++*step) {
        const unsigned stage = *step % LK_GEMM_STAGES, parity = *step / LK_GEMM_STAGES % 2;
        const int k = step_of_tile * LK_GEMM_DEPTH;
        lk_mbarrier *const full = &ring->full[stage];
        lk_bf16 *const to_a = ring->a[stage], *const to_b = ring->b[stage] + half * LK_GEMM_DEPTH;
        lk_mbarrier_wait_parity_relaxed(&ring->empty[stage], parity ^ 1);
        lk_mbarrier_arrive_expect_tx(full, LK_GEMM_STAGE_BYTES);
        for (int i = 0; i < (transpose_a ? LK_GEMM_ROWS : 1); i += side)
            lk_cp_async_bulk_tensor_2d_load(to_a + i * side, a, transpose_a ? row + i : k, transpose_a ? k : row, full);
        for (int i = 0; i < (transpose_b ? LK_GEMM_COLS / 2 : 1); i += side)
            lk_cp_async_bulk_tensor_2d_load_multicast(to_b + i * side, b, transpose_b ? col + half + i : k,
                                                      transpose_b ? k : col + half, full, 3);
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
#pragma unroll
        for (int j = 0; j < LK_GEMM_DEPTH / 16; j++)
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

/* Describes a matrix of bf16 to TMA, which copies `box_rows` rows of LK_GEMM_DEPTH columns at a time. */
LK_HOST lk_status lk_gemm_map(const char *op, CUtensorMap *map, const void *matrix, int64_t rows, int64_t cols, int64_t stride,
                              int box_rows)
{
    void *found = NULL;
    enum cudaDriverEntryPointQueryResult state;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &state);
    if (error || !found) return lk_launched(op, error ? error : cudaErrorNotSupported);
    const cuuint64_t size[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * 2};
    const cuuint32_t box[2] = {LK_GEMM_DEPTH, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    const CUresult result = ((PFN_cuTensorMapEncodeTiled_v12000)found)(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)matrix, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result ? lk_launched(op, cudaErrorInvalidValue) : LK_OK;
}

#endif /* CUDA or the simulator */
#endif
