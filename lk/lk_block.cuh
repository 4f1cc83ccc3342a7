// SPDX-License-Identifier: MIT
/* lk_block.cuh - reductions over a block and over a cluster of blocks.
 *
 * Needs: lk_base.cuh, lk_ptx.cuh.
 */
#ifndef LK_BLOCK_CUH
#define LK_BLOCK_CUH

#include "lk_base.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

/* Merges the states of all threads of a block: by shuffles within each warp, then once more over the warps' states. Two rounds
 * of shuffles, because a merge costs two exponentials, and a chain of them (one a warp, as in cub::BlockReduce) is what a
 * short row would wait for.
 * Who calls: every thread, THREADS a block.
 * Who holds the result: the first warp; elsewhere it is undefined.
 * Shared memory: its own, two sets; calls alternate between parity 0 and 1, so that one barrier a call is enough. */
template <int THREADS> LK_DEVICE lk_lse lk_lse_block(lk_lse s, int parity = 0)
{
    LK_SHARED(lk_lse, warps, [2][THREADS / 32]);
    s = lk_lse_warp(s);
    if (threadIdx.x % 32 == 0) warps[parity][threadIdx.x / 32] = s;
    __syncthreads(); /* the warps' states are written before the first warp reads them */
    if (threadIdx.x < 32) s = lk_lse_warp(threadIdx.x < THREADS / 32 ? warps[parity][threadIdx.x] : lk_lse_empty());
    return s;
}

/* The same over all threads of a cluster's blocks.
 * Who calls: every thread of every block, once a kernel, and lk_barrier_cluster_arrive_relaxed() before, anywhere.
 * Who holds the result: the first warp of the block with rank 0; elsewhere it is undefined. */
template <int THREADS> LK_DEVICE lk_lse lk_lse_cluster(lk_lse s)
{
    LK_SHARED(lk_lse, inbox, [16]); /* one state of each block, used in the block with rank 0 */
    const unsigned blocks = lk_cluster_nctarank(), rank = lk_cluster_ctarank();
    s = lk_lse_block<THREADS>(s);
    lk_barrier_cluster_wait(); /* rank 0 runs, so that its shared memory may be written */
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) *(lk_lse *)lk_mapa(&inbox[rank], 0) = s;
        lk_barrier_cluster_arrive(); /* orders this write before rank 0's reads */
    } else {
        lk_barrier_cluster_arrive_relaxed(); /* nothing to order, and a release costs a fence */
    }
    if (rank != 0) return s; /* a peer may end here: nobody reads or writes its memory any more */
    lk_barrier_cluster_wait();
    if (threadIdx.x < 32) s = lk_lse_warp(threadIdx.x < blocks ? inbox[threadIdx.x] : lk_lse_empty());
    return s;
}

#endif /* CUDA or the simulator */
#endif
