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

#endif /* CUDA or the simulator */
#endif
