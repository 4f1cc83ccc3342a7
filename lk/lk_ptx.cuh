// SPDX-License-Identifier: MIT
/* lk_ptx.cuh - every line of inline PTX in lk, one instruction a wrapper, named after the instruction.
 *
 * Each wrapper has two bodies of one signature: asm for the GPU, and the engine of tests/simt for the CPU (LK_SIMT).
 * Section numbers are those of the PTX ISA manual, version 9.0. Instructions of sm_90 compile to nothing on older targets, and
 * those of sm_90a alone anywhere else: the launchers never start a kernel there that relies on them, and without programmatic
 * launch there is nothing to wait for.
 *
 * Needs: nothing of lk; the lowest of its files.
 */
#ifndef LK_PTX_CUH
#define LK_PTX_CUH

#if defined(__CUDACC__) || defined(LK_SIMT)

#include <cuda.h> /* CUtensorMap; types alone, nothing to link */
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "lk needs compute capability 8.0 or later; tell nvcc your card's, as by -gencode arch=compute_90a,code=sm_90a"
#endif

/* The architecture a kernel is compiled for, 0 in host code. */
#if defined(LK_SIMT)
#define LK_ARCH 900
#elif defined(__CUDA_ARCH__)
#define LK_ARCH __CUDA_ARCH__
#else
#define LK_ARCH 0
#endif

/* Whether the instructions that sm_90a alone has are there: wgmma and setmaxnreg. */
#if defined(LK_SIMT) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LK_SM90A 1
#else
#define LK_SM90A 0
#endif

#define LK_DEVICE static __device__ __forceinline__
/* For what rarely runs: kept out of the caller's registers and instruction cache. */
#define LK_NOINLINE static __device__ __attribute__((noinline))

/* ex2.approx.ftz.f32 (9.7.3.21): 2^x with a relative error of at most 2^-22.5; 2^-inf is 0, 2^+inf is +inf, NaN stays. */
LK_DEVICE float lk_ex2(float x)
{
#if defined(LK_SIMT)
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/* griddepcontrol.wait (9.7.13.13): returns when the grids before this one in the stream have ended and their writes are
 * visible. Every thread of a kernel started by lk_launch_pdl executes it before it reads or writes global memory. */
LK_DEVICE void lk_griddepcontrol_wait(void)
{
#if !defined(LK_SIMT) && LK_ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* griddepcontrol.launch_dependents (9.7.13.13): lets the next grid of the stream start its blocks where there is room, once
 * all blocks of this one have come here or ended. It may stand before the wait: the next grid's wait needs this grid's end, and
 * this grid ends only when its own wait has returned, so all earlier grids have ended too. Early in a kernel, the next one's
 * blocks have time to prefetch; but they gather on the SMs that are free first and stay there, so where there is one wave of
 * long blocks, late is best. */
LK_DEVICE void lk_griddepcontrol_launch_dependents(void)
{
#if !defined(LK_SIMT) && LK_ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* %cluster_ctarank (10.19): this block's number within its cluster, 0 where there are no clusters. */
LK_DEVICE unsigned lk_cluster_ctarank(void)
{
#if defined(LK_SIMT)
    return simt_cluster_ctarank();
#elif LK_ARCH >= 900
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

/* %cluster_nctarank (10.20): the number of blocks in this block's cluster, 1 where there are no clusters. */
LK_DEVICE unsigned lk_cluster_nctarank(void)
{
#if defined(LK_SIMT)
    return simt_cluster_nctarank();
#elif LK_ARCH >= 900
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
#else
    return 1;
#endif
}

/* barrier.cluster.arrive.release.aligned (9.7.13.3): what this thread wrote, to peers' shared memory too, precedes the wait. */
LK_DEVICE void lk_barrier_cluster_arrive(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_cluster_arrive(file, line);
#elif LK_ARCH >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

/* barrier.cluster.arrive.relaxed.aligned (9.7.13.3): the same without ordering any write, which saves a fence. */
LK_DEVICE void lk_barrier_cluster_arrive_relaxed(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_cluster_arrive_relaxed(file, line);
#elif LK_ARCH >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}

/* barrier.cluster.wait.acquire.aligned (9.7.13.3): returns when every thread of the cluster has arrived or exited. */
LK_DEVICE void lk_barrier_cluster_wait(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_cluster_wait(file, line);
#elif LK_ARCH >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* mapa.u64 (9.7.9.23): the generic address of the same shared variable in block `rank` of the cluster. */
LK_DEVICE void *lk_mapa(void *shared, unsigned rank, const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    return simt_cluster_map(shared, rank, file, line);
#elif LK_ARCH >= 900
    void *peer;
    asm("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(shared), "r"(rank));
    return peer;
#else
    return shared;
#endif
}

/* ---- mbarriers and asynchronous copies, sm_90 -----------------------------------------------------------------------------
 * A barrier counts down arrivals and bytes: a phase ends when `count` threads have arrived and as many bytes have landed as
 * were announced. Waits name the parity of the phase, the first being phase 0; to wait for parity 1 on a fresh barrier returns
 * at once. So a ring's consumers begin with parity 0 on the barriers "full", its producer with parity 1 on those "empty". */

typedef uint64_t lk_mbarrier;

/* The 32-bit address of a variable of this block, which the instructions below take. */
#if !defined(LK_SIMT)
LK_DEVICE unsigned lk_shared_address(const void *shared)
{
    return (unsigned)__cvta_generic_to_shared(shared);
}
#endif

/* mapa.shared::cluster.u32 (9.7.9.23): the 32-bit address of the same shared variable in block `rank` of the cluster, for
 * lk_mbarrier_arrive_remote and lk_st_async_b64. */
LK_DEVICE unsigned lk_mapa_shared(const void *shared, unsigned rank, const char *file = __builtin_FILE(),
                                  int line = __builtin_LINE())
{
    (void)shared, (void)rank, (void)file, (void)line;
#if defined(LK_SIMT)
    return simt_cluster_address(shared, rank, file, line);
#elif LK_ARCH >= 900
    unsigned peer;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(lk_shared_address(shared)), "r"(rank));
    return peer;
#else
    return 0;
#endif
}

/* mbarrier.init (9.7.13.15.9): by one thread; lk_fence_mbarrier_init and a block or cluster barrier stand before its use. */
LK_DEVICE void lk_mbarrier_init(lk_mbarrier *bar, unsigned count, const char *file = __builtin_FILE(),
                                int line = __builtin_LINE())
{
    (void)bar, (void)count, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_mbarrier_init(bar, count, file, line);
#elif LK_ARCH >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(lk_shared_address(bar)), "r"(count) : "memory");
#endif
}

/* fence.mbarrier_init.release.cluster (9.7.13.4): this thread's inits, for peers and for the copy engine. */
LK_DEVICE void lk_fence_mbarrier_init(void)
{
#if defined(LK_SIMT)
    simt_fence_mbarrier_init();
#elif LK_ARCH >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/* mbarrier.arrive.release.cta (9.7.13.15.13): one arrival; what this thread did before precedes what follows a wait. */
LK_DEVICE void lk_mbarrier_arrive(lk_mbarrier *bar, const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)bar, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_mbarrier_arrive(bar, 1, 0, file, line);
#elif LK_ARCH >= 900
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(lk_shared_address(bar)) : "memory");
#endif
}

/* mbarrier.arrive.expect_tx.release.cta (9.7.13.15.13): announces `bytes` to the phase, then arrives. */
LK_DEVICE void lk_mbarrier_arrive_expect_tx(lk_mbarrier *bar, unsigned bytes, const char *file = __builtin_FILE(),
                                            int line = __builtin_LINE())
{
    (void)bar, (void)bytes, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_mbarrier_arrive(bar, 1, bytes, file, line);
#elif LK_ARCH >= 900
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(lk_shared_address(bar)), "r"(bytes)
                 : "memory");
#endif
}

/* mbarrier.expect_tx.relaxed.cta (9.7.13.15.11): announces `bytes` without an arrival. */
LK_DEVICE void lk_mbarrier_expect_tx(lk_mbarrier *bar, unsigned bytes, const char *file = __builtin_FILE(),
                                     int line = __builtin_LINE())
{
    (void)bar, (void)bytes, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_mbarrier_arrive(bar, 0, bytes, file, line);
#elif LK_ARCH >= 900
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(lk_shared_address(bar)), "r"(bytes)
                 : "memory");
#endif
}

/* mbarrier.arrive.release.cluster.shared::cluster (9.7.13.15.13): arrives at a barrier of any block of the cluster, whose
 * address is from lk_mapa_shared. That block has to be there still, and waits with lk_mbarrier_wait_parity_cluster. */
LK_DEVICE void lk_mbarrier_arrive_remote(unsigned peer_bar, const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)peer_bar, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_mbarrier_arrive_remote(peer_bar, file, line);
#elif LK_ARCH >= 900
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer_bar) : "memory");
#endif
}

/* mbarrier.arrive.relaxed.cluster.shared::cluster (9.7.13.15.13): the same where nothing that this thread wrote is handed over,
 * as when it only has done with what copies or wgmma read and write. The release would be a fence of the whole GPU. */
LK_DEVICE void lk_mbarrier_arrive_remote_relaxed(unsigned peer_bar, const char *file = __builtin_FILE(),
                                                 int line = __builtin_LINE())
{
    (void)peer_bar, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_mbarrier_arrive_remote(peer_bar, file, line);
#elif LK_ARCH >= 900
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer_bar) : "memory");
#endif
}

/* mbarrier.try_wait.parity.acquire.cta (9.7.13.15.16): whether the phase of this parity has ended; sleeps a while before it
 * says no. The data that copies have landed is visible after a yes. */
LK_DEVICE bool lk_mbarrier_try_wait_parity(lk_mbarrier *bar, unsigned parity, const char *file = __builtin_FILE(),
                                           int line = __builtin_LINE())
{
    (void)bar, (void)parity, (void)file, (void)line;
#if defined(LK_SIMT)
    return simt_mbarrier_try_wait(bar, parity, 0, file, line);
#elif LK_ARCH >= 900
    unsigned done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(lk_shared_address(bar)), "r"(parity) : "memory");
    return done;
#else
    return true;
#endif
}

/* mbarrier.try_wait.parity.acquire.cluster (9.7.13.15.16): the same where peers arrive or store. */
LK_DEVICE bool lk_mbarrier_try_wait_parity_cluster(lk_mbarrier *bar, unsigned parity, const char *file = __builtin_FILE(),
                                                   int line = __builtin_LINE())
{
    (void)bar, (void)parity, (void)file, (void)line;
#if defined(LK_SIMT)
    return simt_mbarrier_try_wait(bar, parity, 1, file, line);
#elif LK_ARCH >= 900
    unsigned done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(lk_shared_address(bar)), "r"(parity) : "memory");
    return done;
#else
    return true;
#endif
}

/* mbarrier.try_wait.parity.relaxed.cluster (9.7.13.15.16): the same where only copies, which order themselves, follow. The
 * acquire would empty the SM's L1. */
LK_DEVICE bool lk_mbarrier_try_wait_parity_relaxed(lk_mbarrier *bar, unsigned parity, const char *file = __builtin_FILE(),
                                                   int line = __builtin_LINE())
{
    (void)bar, (void)parity, (void)file, (void)line;
#if defined(LK_SIMT)
    return simt_mbarrier_try_wait(bar, parity, 1, file, line);
#elif LK_ARCH >= 900
    unsigned done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(lk_shared_address(bar)), "r"(parity) : "memory");
    return done;
#else
    return true;
#endif
}

/* Returns when the phase of this parity has ended. The simulator parks the thread instead of asking again and again. */
LK_DEVICE void lk_mbarrier_wait_parity(lk_mbarrier *bar, unsigned parity, const char *file = __builtin_FILE(),
                                       int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_mbarrier_wait(bar, parity, 0, file, line);
#else
    while (!lk_mbarrier_try_wait_parity(bar, parity)) {
    }
#endif
}

/* The same where peers arrive or store. */
LK_DEVICE void lk_mbarrier_wait_parity_cluster(lk_mbarrier *bar, unsigned parity, const char *file = __builtin_FILE(),
                                               int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_mbarrier_wait(bar, parity, 1, file, line);
#else
    while (!lk_mbarrier_try_wait_parity_cluster(bar, parity)) {
    }
#endif
}

/* Where nothing but copies follows. */
LK_DEVICE void lk_mbarrier_wait_parity_relaxed(lk_mbarrier *bar, unsigned parity, const char *file = __builtin_FILE(),
                                               int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_mbarrier_wait(bar, parity, 1, file, line);
#else
    while (!lk_mbarrier_try_wait_parity_relaxed(bar, parity)) {
    }
#endif
}

/* cp.async.bulk.shared::cluster.global (9.7.9.25.4.1): starts to copy `bytes` bytes into this block's shared memory and counts
 * them on `bar` when they are there. Addresses and size are multiples of 16. */
LK_DEVICE void lk_cp_async_bulk_load(void *shared, const void *global, unsigned bytes, lk_mbarrier *bar,
                                     const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)shared, (void)global, (void)bytes, (void)bar, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_bulk_load(shared, global, bytes, bar, file, line);
#elif LK_ARCH >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(lk_shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes),
                 "r"(lk_shared_address(bar))
                 : "memory");
#endif
}

/* fence.proxy.async.shared::cta (9.7.13.4): lets bulk and tensor stores and wgmma see what this thread wrote to shared memory.
 * Each writer executes it after its writes and before the barrier that the storing or multiplying threads wait at. */
LK_DEVICE void lk_fence_proxy_async_shared(void)
{
#if defined(LK_SIMT)
    simt_fence_proxy_async();
#elif LK_ARCH >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* cp.async.bulk.global.shared::cta.bulk_group (9.7.9.25.4.1): starts to copy `bytes` bytes to global memory, as part of this
 * thread's next bulk group. Addresses and size are multiples of 16. */
LK_DEVICE void lk_cp_async_bulk_store(void *global, const void *shared, unsigned bytes, const char *file = __builtin_FILE(),
                                      int line = __builtin_LINE())
{
    (void)global, (void)shared, (void)bytes, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_bulk_store(global, shared, bytes, file, line);
#elif LK_ARCH >= 900
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(__cvta_generic_to_global(global)), "r"(lk_shared_address(shared)), "r"(bytes)
                 : "memory");
#endif
}

/* cp.async.bulk.commit_group (9.7.9.25.6.1): closes this thread's bulk group: the stores since the last one. */
LK_DEVICE void lk_cp_async_bulk_commit_group(void)
{
#if defined(LK_SIMT)
    simt_bulk_commit();
#elif LK_ARCH >= 900
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/* cp.async.bulk.wait_group.read (9.7.9.25.6.2): returns when all but this thread's `groups` latest groups have read their
 * sources. A thread that stores waits so for all of them before it exits, or its block's memory may be gone. */
template <int groups> LK_DEVICE void lk_cp_async_bulk_wait_group_read(const char *file = __builtin_FILE(),
                                                                      int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_bulk_wait(groups, 1, file, line);
#elif LK_ARCH >= 900
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
#endif
}

/* cp.async.bulk.wait_group (9.7.9.25.6.2): the same until what they wrote is there for this thread to read. */
template <int groups> LK_DEVICE void lk_cp_async_bulk_wait_group(const char *file = __builtin_FILE(),
                                                                 int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_bulk_wait(groups, 0, file, line);
#elif LK_ARCH >= 900
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(groups) : "memory");
#endif
}

/* st.async.weak.shared::cluster (9.7.9.12): stores 8 bytes into a peer's shared memory and counts them on a barrier of the
 * same peer when they are there; both addresses are from lk_mapa_shared. */
LK_DEVICE void lk_st_async_b64(unsigned peer, uint64_t value, unsigned peer_bar, const char *file = __builtin_FILE(),
                               int line = __builtin_LINE())
{
    (void)peer, (void)value, (void)peer_bar, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_st_async(peer, value, peer_bar, file, line);
#elif LK_ARCH >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
                 ::"r"(peer), "l"(value), "r"(peer_bar) : "memory");
#endif
}

/* ---- Tensor copies, sm_90 -------------------------------------------------------------------------------------------------
 * A CUtensorMap, made on the host by cuTensorMapEncodeTiled, describes a matrix in global memory and a box of it: the copies
 * move the box whose first element is (x, y), x along the rows. The map is a __grid_constant__ argument of the kernel or lies
 * in global memory. In shared memory the box's rows follow one another, from an address that is a multiple of 128; with a
 * swizzle of 32, 64 or 128 bytes, the 16-byte pieces of a row of that length change places: address bits 4, 4-5 or 4-6 are
 * xored with bits 7, 7-8 or 7-9. */

/* prefetch.tensormap (9.7.9.15): fetches the map ahead of the first copy that needs it. */
LK_DEVICE void lk_prefetch_tensormap(const CUtensorMap *map, const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)map, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_tensor_prefetch(map, file, line);
#elif LK_ARCH >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

/* cp.async.bulk.tensor.2d.shared::cluster.global.tile (9.7.9.25.5.2): starts to copy the box at (x, y) into this block's shared
 * memory and counts its bytes on `bar` when they are there. Elements outside of the matrix arrive as zeros and count too. */
LK_DEVICE void lk_cp_async_bulk_tensor_2d_load(void *shared, const CUtensorMap *map, int x, int y, lk_mbarrier *bar,
                                               const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)shared, (void)map, (void)x, (void)y, (void)bar, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_tensor_load(shared, map, x, y, bar, file, line);
#elif LK_ARCH >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(lk_shared_address(shared)), "l"(map), "r"(x), "r"(y), "r"(lk_shared_address(bar)) : "memory");
#endif
}

/* The same with .multicast::cluster: the box goes to the same place in every block of the cluster whose bit is set in `mask`,
 * and its bytes are counted on the barrier at the same place there. Those blocks have to be there, their barriers initialised
 * and their memory free. */
LK_DEVICE void lk_cp_async_bulk_tensor_2d_load_multicast(void *shared, const CUtensorMap *map, int x, int y, lk_mbarrier *bar,
                                                         uint16_t mask, const char *file = __builtin_FILE(),
                                                         int line = __builtin_LINE())
{
    (void)shared, (void)map, (void)x, (void)y, (void)bar, (void)mask, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_tensor_load_multicast(shared, map, x, y, bar, mask, file, line);
#elif LK_SM90A
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(lk_shared_address(shared)), "l"(map), "r"(x), "r"(y), "r"(lk_shared_address(bar)), "h"(mask)
                 : "memory");
#endif
}

/* cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group (9.7.9.25.5.2): starts to copy the box at (x, y) to global memory,
 * as part of this thread's next bulk group; elements outside of the matrix are left out. */
LK_DEVICE void lk_cp_async_bulk_tensor_2d_store(const CUtensorMap *map, int x, int y, const void *shared,
                                                const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)map, (void)x, (void)y, (void)shared, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_tensor_store(map, x, y, shared, file, line);
#elif LK_ARCH >= 900
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(map), "r"(x), "r"(y), "r"(lk_shared_address(shared)) : "memory");
#endif
}

/* cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group (9.7.9.25.5.3): the same, but adds to what is there,
 * each element at once and in any order. */
LK_DEVICE void lk_cp_reduce_async_bulk_tensor_2d_add(const CUtensorMap *map, int x, int y, const void *shared,
                                                     const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)map, (void)x, (void)y, (void)shared, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_tensor_add(map, x, y, shared, file, line);
#elif LK_ARCH >= 900
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(map), "r"(x), "r"(y), "r"(lk_shared_address(shared)) : "memory");
#endif
}

/* ---- Warpgroups, sm_90a ---------------------------------------------------------------------------------------------------
 * A warpgroup, four warps of which the first one's number is a multiple of 4, multiplies as one. Its sums of 64 rows lie in
 * registers: d[i] of a thread is of row 16 (thread / 32 % 4) + thread % 32 / 4 + 8 (i / 2 % 2) and of column
 * 8 (i / 4) + 2 (thread % 4) + i % 2. */

/* The matrix descriptor (9.7.15.5.1.2) of an operand in shared memory with a swizzle of 128 bytes, as tensor copies write it.
 * It consists of atoms of 1024 bytes, 8 rows of 128, that start at multiples of 1024. The distances are those of sections
 * 9.7.15.5.1.2.1.1 and .2; CUTLASS's make_gmma_desc has them the same way:
 * K-major (transpose 0): a row is 64 elements along K of one row of A, or of one column of B. stride_bytes lies between atoms
 * of 8 rows and the next 8. leading_bytes does not matter. 16 elements further along K are 32 bytes: 2 more in the descriptor.
 * MN-major (transpose 1): a row is 64 elements along M or N of one k. leading_bytes lies between 64 elements along M or N and
 * the next 64, stride_bytes between 8 values of k and the next 8. */
LK_DEVICE uint64_t lk_wgmma_descriptor(const void *shared, unsigned leading_bytes, unsigned stride_bytes,
                                       const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    const unsigned address = simt_wgmma_address(shared, file, line);
#else
    const unsigned address = lk_shared_address(shared);
#endif
    return (uint64_t)1 << 62 | (uint64_t)(stride_bytes >> 4 & 0x3fff) << 32 | (leading_bytes >> 4 & 0x3fff) << 16 |
           (address >> 4 & 0x3fff);
}

/* wgmma.fence.sync.aligned (9.7.15.7.1): before a warpgroup's first wgmma, and between accesses to the registers of sums or of
 * A and a wgmma that uses them. */
LK_DEVICE void lk_wgmma_fence(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_wgmma_fence(file, line);
#elif LK_SM90A
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/* wgmma.commit_group.sync.aligned (9.7.15.7.2): closes the group of the wgmma since the last one. */
LK_DEVICE void lk_wgmma_commit_group(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_wgmma_commit(file, line);
#elif LK_SM90A
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/* wgmma.wait_group.sync.aligned (9.7.15.7.3): returns when all but the `groups` latest groups are done: their operands may be
 * written over, their sums be read, behind lk_wgmma_hold. */
template <int groups> LK_DEVICE void lk_wgmma_wait_group(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    static_assert(groups >= 0 && groups <= 7, "the engine remembers so many");
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_wgmma_wait(groups, file, line);
#elif LK_SM90A
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
#endif
}

/* No instruction: the compiler does not know that wgmma writes sums until the wait. What stands behind this stays behind it. */
template <int n> LK_DEVICE void lk_wgmma_hold(float (&d)[n])
{
#if !defined(LK_SIMT)
#pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
#else
    (void)d;
#endif
}

/* The registers of n / 2 sums for the instructions of width n below, as text and as operands. */
#define LK_TEXT_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LK_TEXT_64 LK_TEXT_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LK_TEXT_96 LK_TEXT_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define LK_TEXT_128 LK_TEXT_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LK_TEXT_160 LK_TEXT_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define LK_TEXT_192 LK_TEXT_160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define LK_TEXT_224 LK_TEXT_192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define LK_TEXT_256 LK_TEXT_224 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define LK_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LK_SUMS_16(i) LK_SUMS_4(i), LK_SUMS_4(i + 4), LK_SUMS_4(i + 8), LK_SUMS_4(i + 12)
#define LK_SUMS_32 LK_SUMS_16(0)
#define LK_SUMS_64 LK_SUMS_32, LK_SUMS_16(16)
#define LK_SUMS_96 LK_SUMS_64, LK_SUMS_16(32)
#define LK_SUMS_128 LK_SUMS_96, LK_SUMS_16(48)
#define LK_SUMS_160 LK_SUMS_128, LK_SUMS_16(64)
#define LK_SUMS_192 LK_SUMS_160, LK_SUMS_16(80)
#define LK_SUMS_224 LK_SUMS_192, LK_SUMS_16(96)
#define LK_SUMS_256 LK_SUMS_224, LK_SUMS_16(112)
#define LK_WGMMA(n, a, b, accumulate, transpose)                                                                               \
    "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " accumulate ", 0;\n\t"                                                             \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" LK_TEXT_##n "}, " a ", " b ", p, 1, 1, " transpose ";\n\t}"

/* wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16 (9.7.15.5.2): starts d = A B, plus d where accumulate is not 0, with A of
 * 64 x 16 and B of 16 x n in shared memory. All threads of a warpgroup pass the same a, b and accumulate. d must not be touched
 * before a wait for this one's group. n is a multiple of 32 up to 256. */
template <int n, int transpose_a = 0, int transpose_b = 0>
LK_DEVICE void lk_wgmma_m64k16_bf16(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate,
                                    const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    static_assert(n % 32 == 0 && n >= 32 && n <= 256, "n is a multiple of 32 up to 256");
    (void)d, (void)a, (void)b, (void)accumulate, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_wgmma(n, transpose_a, transpose_b, d, a, NULL, b, accumulate, file, line);
#elif LK_SM90A
#define LK_INPUTS "l"(a), "l"(b), "r"(accumulate), "n"(transpose_a), "n"(transpose_b)
    if constexpr (n == 32) asm volatile(LK_WGMMA(32, "%16", "%17", "%18", "%19, %20") : LK_SUMS_32 : LK_INPUTS);
    if constexpr (n == 64) asm volatile(LK_WGMMA(64, "%32", "%33", "%34", "%35, %36") : LK_SUMS_64 : LK_INPUTS);
    if constexpr (n == 96) asm volatile(LK_WGMMA(96, "%48", "%49", "%50", "%51, %52") : LK_SUMS_96 : LK_INPUTS);
    if constexpr (n == 128) asm volatile(LK_WGMMA(128, "%64", "%65", "%66", "%67, %68") : LK_SUMS_128 : LK_INPUTS);
    if constexpr (n == 160) asm volatile(LK_WGMMA(160, "%80", "%81", "%82", "%83, %84") : LK_SUMS_160 : LK_INPUTS);
    if constexpr (n == 192) asm volatile(LK_WGMMA(192, "%96", "%97", "%98", "%99, %100") : LK_SUMS_192 : LK_INPUTS);
    if constexpr (n == 224) asm volatile(LK_WGMMA(224, "%112", "%113", "%114", "%115, %116") : LK_SUMS_224 : LK_INPUTS);
    if constexpr (n == 256) asm volatile(LK_WGMMA(256, "%128", "%129", "%130", "%131, %132") : LK_SUMS_256 : LK_INPUTS);
#undef LK_INPUTS
#endif
}

/* The same with A in registers, which must not be touched before the wait either: a[0] holds columns 2 (lane % 4) and the next
 * one of row lane / 4 of the warp's 16 rows, the earlier one in the lower half; a[1] those 8 rows, a[2] 8 columns and a[3] both
 * further on. So it is K-major: transpose_a is 0. */
template <int n, int transpose_a = 0, int transpose_b = 0>
LK_DEVICE void lk_wgmma_m64k16_bf16_register(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate,
                                             const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    static_assert(n % 32 == 0 && n >= 32 && n <= 256, "n is a multiple of 32 up to 256");
    static_assert(transpose_a == 0, "A in registers has one layout");
    (void)d, (void)a, (void)b, (void)accumulate, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_wgmma(n, 0, transpose_b, d, 0, a, b, accumulate, file, line);
#elif LK_SM90A
#define LK_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(transpose_b)
    if constexpr (n == 32)
        asm volatile(LK_WGMMA(32, "{%16, %17, %18, %19}", "%20", "%21", "%22") : LK_SUMS_32 : LK_INPUTS);
    if constexpr (n == 64)
        asm volatile(LK_WGMMA(64, "{%32, %33, %34, %35}", "%36", "%37", "%38") : LK_SUMS_64 : LK_INPUTS);
    if constexpr (n == 96)
        asm volatile(LK_WGMMA(96, "{%48, %49, %50, %51}", "%52", "%53", "%54") : LK_SUMS_96 : LK_INPUTS);
    if constexpr (n == 128)
        asm volatile(LK_WGMMA(128, "{%64, %65, %66, %67}", "%68", "%69", "%70") : LK_SUMS_128 : LK_INPUTS);
    if constexpr (n == 160)
        asm volatile(LK_WGMMA(160, "{%80, %81, %82, %83}", "%84", "%85", "%86") : LK_SUMS_160 : LK_INPUTS);
    if constexpr (n == 192)
        asm volatile(LK_WGMMA(192, "{%96, %97, %98, %99}", "%100", "%101", "%102") : LK_SUMS_192 : LK_INPUTS);
    if constexpr (n == 224)
        asm volatile(LK_WGMMA(224, "{%112, %113, %114, %115}", "%116", "%117", "%118") : LK_SUMS_224 : LK_INPUTS);
    if constexpr (n == 256)
        asm volatile(LK_WGMMA(256, "{%128, %129, %130, %131}", "%132", "%133", "%134") : LK_SUMS_256 : LK_INPUTS);
#undef LK_INPUTS
#endif
}

/* setmaxnreg.inc.sync.aligned.u32 (9.7.19.5): raises this warp's registers a thread to `registers`, waiting until other warps
 * have given up as many. All warps of a warpgroup execute the same one; `registers` is a multiple of 8 from 24 to 256. */
template <int registers> LK_DEVICE void lk_setmaxnreg_inc(void)
{
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "a multiple of 8 from 24 to 256");
#if !defined(LK_SIMT) && LK_SM90A
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

/* setmaxnreg.dec.sync.aligned.u32 (9.7.19.5): gives up registers beyond `registers` a thread, for other warps to take. */
template <int registers> LK_DEVICE void lk_setmaxnreg_dec(void)
{
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "a multiple of 8 from 24 to 256");
#if !defined(LK_SIMT) && LK_SM90A
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

/* stmatrix.sync.aligned.m8n8.x4.shared.b16 (9.7.14.5.16): a warp stores four matrices of 8 x 8 elements of 16 bits. Lanes 0-7
 * pass the addresses of the rows of the first, lanes 8-15 of the second and so on, multiples of 16; of each matrix a lane holds
 * elements 2 (lane % 4) and the next of row lane / 4. */
LK_DEVICE void lk_stmatrix_x4(void *shared_row, uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                              const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)shared_row, (void)a, (void)b, (void)c, (void)d, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_stmatrix(shared_row, a, b, c, d, file, line);
#elif LK_ARCH >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(lk_shared_address(shared_row)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
#endif
}

/* bar.sync (9.7.13.1): returns when `threads` threads of the block, whole warps, have come to barrier number `barrier`, 1 to
 * 15, and orders what they did to memory. __syncthreads is barrier 0. A constant, since a kernel with a number in a register
 * takes all 16 barriers of an SM's, of which sm_120 has 24. */
template <int barrier>
LK_DEVICE void lk_named_barrier_sync(int threads, const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_named_barrier(barrier, threads, file, line);
#else
    asm volatile("bar.sync %0, %1;" ::"n"(barrier), "r"(threads) : "memory");
#endif
}

/* sin.approx.ftz.f32 (9.7.3.18) and cos.approx.ftz.f32 (9.7.3.19): absolute error of at most 3.4e-7 for |x| <= pi over 2^24
 * arguments, as a prototype found on an H200; sin 0 is 0 and cos 0 is 1. */
LK_DEVICE float lk_sin(float x)
{
#if defined(LK_SIMT)
    return sinf(x);
#else
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
LK_DEVICE float lk_cos(float x)
{
#if defined(LK_SIMT)
    return cosf(x);
#else
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/* cp.async.cg.shared.global.L2::128B (9.7.9.25.3.1): copies 16 bytes to shared + offset bytes, both addresses aligned to 16,
 * past L1 and past registers; the L2 fetches the 128 bytes around them. The copy is this thread's: it sees the bytes after a
 * wait, others after a barrier behind that. */
LK_DEVICE void lk_cp_async_16(void *shared, int offset, const void *global, const char *file = __builtin_FILE(),
                              int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_cp_async((char *)shared + offset, global, 16, file, line);
#elif LK_ARCH >= 800
    const unsigned to = lk_shared_address(shared) + (unsigned)offset;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#endif
}

/* cp.async.commit_group (9.7.9.25.3.2): closes the group of this thread's copies since the last one. */
LK_DEVICE void lk_cp_async_commit_group(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_cp_async_commit(file, line);
#elif LK_ARCH >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* cp.async.wait_group (9.7.9.25.3.3): returns when at most `groups` of this thread's newest groups are still on their way. */
template <int groups> LK_DEVICE void lk_cp_async_wait_group(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_cp_async_wait(groups, file, line);
#elif LK_ARCH >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
#endif
}

/* prefetch.global.L2 (9.7.9.15): asks for the bytes around an address to be brought into the L2. A hint, which reads nothing:
 * it may stand before lk_griddepcontrol_wait(), since what is written meanwhile to this card's memory goes through the same
 * L2. */
LK_DEVICE void lk_prefetch_l2(const void *global, const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_prefetch(global, file, line);
#else
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#endif
}

/* cp.async.bulk.prefetch.L2.global (9.7.9.25.4.3): the same for `bytes` bytes, a multiple of 16 at a multiple of 16, by one
 * thread. */
LK_DEVICE void lk_cp_async_bulk_prefetch_l2(const void *global, unsigned bytes, const char *file = __builtin_FILE(),
                                            int line = __builtin_LINE())
{
    (void)global, (void)bytes, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_bulk_prefetch(global, bytes, file, line);
#elif LK_ARCH >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

/* nanosleep.u32 (9.7.13.14): suspends the thread for about `ns` nanoseconds, at most twice that. */
LK_DEVICE void lk_nanosleep(unsigned ns)
{
#if !defined(LK_SIMT)
    asm volatile("nanosleep.u32 %0;" ::"r"(ns));
#else
    (void)ns;
#endif
}

/* %tid.x (10.2), read anew at each call: what is computed from it is not held in registers from an earlier computation. */
LK_DEVICE unsigned lk_tid_x(void)
{
#if defined(LK_SIMT)
    return threadIdx.x;
#else
    unsigned x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
#endif
}

/* No instruction: makes the compiler forget what it knows of a value in registers, so that it computes again what it would
 * otherwise keep, such as the unpacked floats of a packed vector. */
LK_DEVICE void lk_forget(uint4 *v)
{
#if !defined(LK_SIMT)
    asm volatile("" : "+r"(v->x), "+r"(v->y), "+r"(v->z), "+r"(v->w));
#else
    (void)v;
#endif
}

#endif /* CUDA or the simulator */
#endif
