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
 * In a cluster, before the first call, lk_cluster_begin() anywhere and lk_cluster_ready(). ALONE: no launch has clusters.
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

template <int N, bool ALONE = false> LK_DEVICE void lk_sum_cluster(float (&v)[N], int turn)
{
    constexpr int HALF = (ALONE ? 1 : 8) * 32 * N; /* blocks of 32 warps */
    LK_SHARED(float, inbox, [2 * HALF]);
    const int blocks = ALONE ? 1 : (int)lk_cluster_nctarank(), rank = ALONE ? 0 : (int)lk_cluster_ctarank();
    const int warps = (int)blockDim.x / 32;
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
    if (count <= 8 && !ALONE) { /* a few broadcasts are sooner here than five shuffles */
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
        for (int i = lane + 32; i < count && !ALONE; i += 32) v[n] += box[i * N + n];
        v[n] = lk_sum_warp(v[n]);
    }
}

/* Where the block with rank 0 gets the states of all warps of its cluster; words of 8 bytes, the maximum in the low half. */
template <int THREADS> struct lk_lse_inbox {
    lk_mbarrier full; /* all of them are there */
    uint64_t word[8 * THREADS / 32];
};

/* Merges the states of all warps of a block, or of all blocks of a cluster, in the memory of the block with rank 0. In a
 * cluster they come by st.async, for which only the reader waits: before a cluster's barrier every warp would wait for a fence
 * of the whole GPU.
 * Who calls: every thread of every block, THREADS a block, with its warp's state, once a kernel; lk_lse_cluster_begin, which
 * waits for the cluster's peers to run, anywhere before. scale: as in lk_lse.
 * Who holds the result: the first warp of the block with rank 0; elsewhere it is undefined.
 * Shared memory: inbox. A peer may end after the call: nobody writes into its memory. */
template <int THREADS> LK_DEVICE void lk_lse_cluster_begin(lk_lse_inbox<THREADS> *inbox)
{
    const bool reader = lk_cluster_ctarank() == 0 && threadIdx.x == 0;
    if (lk_cluster_nctarank() == 1) return;
    if (reader) lk_mbarrier_init(&inbox->full, 1);
    if (reader) lk_fence_mbarrier_init();
    lk_cluster_begin();
    lk_cluster_ready(); /* the block with rank 0 runs and has its barrier */
    if (reader) lk_mbarrier_arrive_expect_tx(&inbox->full, lk_cluster_nctarank() * (THREADS / 32) * 8);
}
template <int THREADS> LK_DEVICE lk_lse lk_lse_cluster(lk_lse_inbox<THREADS> *inbox, lk_lse s, float scale = 1.0f)
{
    constexpr int WARPS = THREADS / 32, MOST = (8 * WARPS + 31) / 32; /* words that a lane reads */
    const int blocks = (int)lk_cluster_nctarank(), rank = (int)lk_cluster_ctarank();
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    uint64_t *slot = &inbox->word[rank * WARPS + warp];
    const uint64_t word = (uint64_t)__float_as_uint(s.sum) << 32 | __float_as_uint(s.max);
    if (blocks > 1) {
        if (lane == 0) lk_st_async_b64(lk_mapa_shared(slot, 0), word, lk_mapa_shared(&inbox->full, 0));
        if (rank != 0 || warp != 0) return s;
        lk_mbarrier_wait_parity_cluster(&inbox->full, 0);
    } else {
        if (lane == 0) *slot = word;
        __syncthreads(); /* orders the writes into the inbox before its reads */
        if (warp != 0) return s;
    }
    /* The maximum of all comes first: an exponential for each state, none waiting for another, where lk_lse_merge has two. */
    lk_lse part[MOST];
    s.max = -INFINITY;
#pragma unroll
    for (int k = 0; k < MOST; k++) {
        const int i = lane + 32 * k;
        part[k] = lk_lse_empty();
        if (i < blocks * WARPS)
            part[k] = {__uint_as_float((uint32_t)inbox->word[i]), __uint_as_float((uint32_t)(inbox->word[i] >> 32))};
        s.max = fmaxf(s.max, part[k].max);
    }
    const int team = blocks > 1 ? 32 : WARPS;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) s.max = fmaxf(s.max, __shfl_xor_sync(0xffffffffu, s.max, offset));
    s.sum = 0.0f;
#pragma unroll
    for (int k = 0; k < MOST; k++) s.sum += part[k].sum * lk_ex2(scale * LK_LOG2E * (part[k].max - lk_lse_reference(s.max)));
    return {s.max, lk_sum_warp(s.sum, team)};
}

#endif /* CUDA or the simulator */
#endif
