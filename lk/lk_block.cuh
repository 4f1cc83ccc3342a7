// SPDX-License-Identifier: MIT
/* lk_block.cuh - reductions over a block and over a cluster of blocks; the only include of CUB.
 *
 * Needs: lk_base.cuh, lk_ptx.cuh, CUB (part of the CUDA Toolkit).
 */
#ifndef LK_BLOCK_CUH
#define LK_BLOCK_CUH

#include "lk_base.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

#include <cub/block/block_reduce.cuh>

struct lk_lse_merge_op {
    __device__ __forceinline__ lk_lse operator()(lk_lse a, lk_lse b) const { return lk_lse_merge(a, b); }
};

/* Merges the states of all threads of all blocks of a cluster (or of one block, without clusters).
 * Who calls: every thread of every block of the cluster, THREADS a block, once a kernel.
 * Who holds the result: thread 0 of the block with rank 0; elsewhere it is undefined.
 * Shared memory: its own; a second call in one kernel would need another. */
template <int THREADS> LK_DEVICE lk_lse lk_lse_cluster(lk_lse s)
{
    typedef cub::BlockReduce<lk_lse, THREADS> block_reduce;
    LK_SHARED(typename block_reduce::TempStorage, scratch, [1]);
    LK_SHARED(lk_lse, inbox, [16]); /* one state of each block, used in the block with rank 0 */
    const unsigned blocks = lk_cluster_nctarank(), rank = lk_cluster_ctarank();
    if (blocks > 1) lk_barrier_cluster_arrive(); /* says that this block runs, so that peers may write into it */
    s = block_reduce(scratch[0]).Reduce(s, lk_lse_merge_op());
    if (blocks == 1) return s;
    lk_barrier_cluster_wait();
    if (threadIdx.x == 0) *(lk_lse *)lk_mapa(&inbox[rank], 0) = s;
    lk_barrier_cluster_arrive(); /* orders the writes into the inbox before its reads */
    if (rank != 0) return s;     /* a peer may end here: nobody reads or writes its memory any more */
    lk_barrier_cluster_wait();
    if (threadIdx.x == 0)
        for (unsigned i = 1; i < blocks; i++) s = lk_lse_merge(s, inbox[i]);
    return s;
}

#endif /* CUDA or the simulator */
#endif
