// SPDX-License-Identifier: MIT
/* lk_ptx.cuh - every line of inline PTX in lk, one instruction a wrapper, named after the instruction.
 *
 * Each wrapper has two bodies of one signature: asm for the GPU, and the engine of tests/simt for the CPU (LK_SIMT).
 * Section numbers are those of the PTX ISA manual, version 9.0. Instructions of sm_90 compile to nothing on older targets:
 * the launchers never start a kernel there that relies on them, and without programmatic launch there is nothing to wait for.
 *
 * Needs: nothing of lk; the lowest of its files.
 */
#ifndef LK_PTX_CUH
#define LK_PTX_CUH

#if defined(__CUDACC__) || defined(LK_SIMT)

#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

/* The architecture a kernel is compiled for, 0 in host code. */
#if defined(LK_SIMT)
#define LK_ARCH 900
#elif defined(__CUDA_ARCH__)
#define LK_ARCH __CUDA_ARCH__
#else
#define LK_ARCH 0
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
 * visible. Every block of a kernel started by lk_launch_pdl executes it before it touches global memory. */
LK_DEVICE void lk_griddepcontrol_wait(void)
{
#if !defined(LK_SIMT) && LK_ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* griddepcontrol.launch_dependents (9.7.13.13): lets the next grid of the stream start its blocks where there is room. Best
 * late in a kernel: blocks that come early gather on the SMs that are free first and stay there. */
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

/* barrier.cluster.arrive.release.aligned (9.7.13.4): what this thread wrote, to peers' shared memory too, precedes the wait. */
LK_DEVICE void lk_barrier_cluster_arrive(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_cluster_arrive(file, line);
#elif LK_ARCH >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

/* barrier.cluster.arrive.relaxed.aligned (9.7.13.4): the same without ordering any write, which saves a fence. */
LK_DEVICE void lk_barrier_cluster_arrive_relaxed(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)file, (void)line;
#if defined(LK_SIMT)
    simt_cluster_arrive(file, line);
#elif LK_ARCH >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}

/* barrier.cluster.wait.acquire.aligned (9.7.13.4): returns when every thread of the cluster has arrived or exited. */
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

/* createpolicy.fractional.L2::evict_first (9.7.9.18): for lk_cp_async_bulk_load_hint of what is read once. */
LK_DEVICE uint64_t lk_createpolicy_evict_first(void)
{
#if !defined(LK_SIMT) && LK_ARCH >= 900
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
#else
    return 0;
#endif
}

/* lk_cp_async_bulk_load with .L2::cache_hint: what becomes of the lines in the L2 is up to `policy`. */
LK_DEVICE void lk_cp_async_bulk_load_hint(void *shared, const void *global, unsigned bytes, lk_mbarrier *bar, uint64_t policy,
                                          const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    (void)shared, (void)global, (void)bytes, (void)bar, (void)policy, (void)file, (void)line;
#if defined(LK_SIMT)
    simt_bulk_load(shared, global, bytes, bar, file, line);
#elif LK_ARCH >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(lk_shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes),
                 "r"(lk_shared_address(bar)), "l"(policy)
                 : "memory");
#endif
}

/* fence.proxy.async.shared::cta (9.7.13.4): lets bulk stores see what this thread wrote to shared memory. Each writer executes
 * it after its writes and before the barrier that the storing thread waits at. */
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

/* cp.async.cg.shared.global (9.7.9.25.3.1): copies 16 bytes to shared + offset bytes, both addresses aligned to 16, past L1
 * and past registers. The copy is this thread's: it sees the bytes after a wait, others after a barrier behind that. */
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
