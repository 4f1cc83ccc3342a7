// SPDX-License-Identifier: MIT
/* lk_block.cuh - reductions over a block and over a cluster of blocks.
 *
 * Needs: lk_base.cuh, lk_ptx.cuh.
 */
#ifndef LK_BLOCK_CUH
#define LK_BLOCK_CUH

#include "lk_base.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

/* Merges the states of all threads of all blocks of a cluster (or of one block, without clusters): by shuffles within each
 * warp, then once more over the warps' states, then over the blocks'. Two rounds of shuffles, because a merge costs two
 * exponentials and a chain of merges (one a warp, as in cub::BlockReduce) is what a short row waits for.
 * Who calls: every thread of every block of the cluster, THREADS a block, once a kernel.
 * Who holds the result: thread 0 of the block with rank 0; elsewhere it is undefined.
 * Shared memory: its own; a second call in one kernel would need another. */
template <int THREADS> LK_DEVICE lk_lse lk_lse_cluster(lk_lse s)
{
    LK_SHARED(lk_lse, warps, [THREADS / 32]);
    LK_SHARED(lk_lse, inbox, [16]); /* one state of each block, used in the block with rank 0 */
    const unsigned blocks = lk_cluster_nctarank(), rank = lk_cluster_ctarank();
    if (blocks > 1) lk_barrier_cluster_arrive(); /* says that this block runs, so that peers may write into it */
    s = lk_lse_warp(s);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
    __syncthreads(); /* the warps' states are written before the first warp reads them */
    if (threadIdx.x < 32) s = lk_lse_warp(threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : lk_lse_empty());
    if (blocks == 1) return s;
    lk_barrier_cluster_wait();
    if (threadIdx.x == 0) *(lk_lse *)lk_mapa(&inbox[rank], 0) = s;
    lk_barrier_cluster_arrive(); /* orders the writes into the inbox before its reads */
    if (rank != 0) return s;     /* a peer may end here: nobody reads or writes its memory any more */
    lk_barrier_cluster_wait();
    if (threadIdx.x < 32) s = lk_lse_warp(threadIdx.x < blocks ? inbox[threadIdx.x] : lk_lse_empty());
    return s;
}

#endif /* CUDA or the simulator */
#endif
