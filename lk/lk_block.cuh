// SPDX-License-Identifier: MIT
/* lk_block.cuh - reductions over a block and over a cluster of blocks.
 *
 * Needs: lk_base.cuh, lk_ptx.cuh.
 */
#ifndef LK_BLOCK_CUH
#define LK_BLOCK_CUH

#include "lk_base.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

/* The sums over all threads of a block, or of all blocks of a cluster, of N values a thread, in a fixed order.
 * Who calls: every thread of every block, which is a multiple of 32 threads; turn 0, 1, 2, ... in a kernel's successive calls.
 * In a cluster, before the first call, lk_cluster_begin() anywhere and lk_cluster_ready().
 * Who holds the result: every thread.
 * Shared memory: its own, in two halves used in turn, so that one barrier a call is enough: whoever writes a half again has
 * passed the barrier of the call between, which nobody reaches before having read. A peer may end after its last call. */
LK_DEVICE void lk_cluster_begin(void)
{
    if (lk_cluster_nctarank() > 1) lk_barrier_cluster_arrive_relaxed(); /* says that this block runs */
}
LK_DEVICE void lk_cluster_ready(void)
{
    if (lk_cluster_nctarank() > 1) lk_barrier_cluster_wait(); /* all peers run, so that their memory may be written */
}

template <int N> LK_DEVICE void lk_sum_cluster(float (&v)[N], int turn)
{
    constexpr int HALF = 8 * 32 * N; /* 8 blocks of 32 warps */
    LK_SHARED(float, inbox, [2 * HALF]);
    const int blocks = (int)lk_cluster_nctarank(), rank = (int)lk_cluster_ctarank(), warps = (int)blockDim.x / 32;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = lk_sum_warp(v[n]);
    if (blocks * warps == 1) return;
    float *box = inbox + (turn & 1) * HALF, *slot = box + (rank * warps + warp) * N;
    if (lane < blocks) {
        if (blocks > 1) slot = (float *)lk_mapa(slot, (unsigned)lane);
#pragma unroll
        for (int n = 0; n < N; n++) slot[n] = v[n];
    }
    if (blocks > 1) {
        lk_barrier_cluster_arrive(); /* orders the writes into everybody's inbox before their reads */
        lk_barrier_cluster_wait();
    } else {
        __syncthreads(); /* likewise */
    }
    const int count = blocks * warps;
    if (count <= 8) { /* a few broadcasts are sooner here than five shuffles */
#pragma unroll
        for (int n = 0; n < N; n++) v[n] = box[n];
        for (int i = 1; i < count; i++)
#pragma unroll
            for (int n = 0; n < N; n++) v[n] += box[i * N + n];
        return;
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        v[n] = lane < count ? box[lane * N + n] : 0.0f;
        for (int i = lane + 32; i < count; i += 32) v[n] += box[i * N + n];
        v[n] = lk_sum_warp(v[n]);
    }
}

/* Merges the states of all warps of a block, or of all blocks of a cluster, in the memory of the block with rank 0. By
 * shuffles, because a merge costs two exponentials, and a chain of them (as in cub::BlockReduce) is what a short row would
 * wait for.
 * Who calls: every thread of every block, THREADS a block, with its warp's state, once a kernel; before it, anywhere,
 * lk_cluster_begin(). scale: as in lk_lse.
 * Who holds the result: the first warp of the block with rank 0; elsewhere it is undefined.
 * Shared memory: its own. A peer may end after the call: nobody writes into its memory. */
template <int THREADS> LK_DEVICE lk_lse lk_lse_cluster(lk_lse s, float scale = 1.0f)
{
    constexpr int WARPS = THREADS / 32;
    LK_SHARED(lk_lse, inbox, [8 * WARPS]);
    const int blocks = (int)lk_cluster_nctarank(), rank = (int)lk_cluster_ctarank(), warp = (int)threadIdx.x / 32;
    lk_lse *slot = &inbox[rank * WARPS + warp];
    if (blocks > 1) {
        lk_barrier_cluster_wait(); /* the block with rank 0 runs, so that its memory may be written */
        slot = (lk_lse *)lk_mapa(slot, 0);
    }
    if (threadIdx.x % 32 == 0) *slot = s;
    if (blocks > 1) {
        lk_barrier_cluster_arrive(); /* orders the writes into the inbox before its reads */
        if (rank != 0) return s;
        lk_barrier_cluster_wait();
    } else {
        __syncthreads(); /* likewise */
    }
    if (warp != 0) return s;
    s = lk_lse_empty();
    for (int i = (int)threadIdx.x; i < blocks * WARPS; i += 32) s = lk_lse_merge(s, inbox[i], scale);
    return blocks > 1 ? lk_lse_warp(s, 32, scale) : lk_lse_warp(s, WARPS, scale);
}

#endif /* CUDA or the simulator */
#endif
