// SPDX-License-Identifier: MIT
/* lk_ptx.cuh - all inline PTX of lk. A function is one PTX instruction and has its name, unless its comment says otherwise.
 *
 * Section numbers are those of the PTX ISA manual, version 9.0. Where the code is compiled for an older GPU, a function of
 * sm_90 has no instruction. The same holds for functions of sm_90a on every other GPU. The launchers never start a kernel there
 * that needs the instruction, and without programmatic launch there is nothing to wait for.
 *
 * With -DLK_SIMT the functions of tests/simt/simt_ptx.h take the place of these: same names, same parameters, on the CPU.
 *
 * Needs: no other file of lk.
 */
#ifndef LK_PTX_CUH
#define LK_PTX_CUH

#if defined(LK_SIMT)
#include <simt_ptx.h> /* -Itests/simt finds it */
#elif defined(__CUDACC__)

#if defined(__CUDACC_RTC__) /* lk_base.cuh says what stands for the headers of the host */
typedef struct CUtensorMap_st CUtensorMap;
#else
#include <cuda.h> /* CUtensorMap; types alone, nothing to link */
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#endif

/* The architecture that a kernel is compiled for, 0 in host code. */
#if defined(__CUDA_ARCH__)
#define LK_ARCH __CUDA_ARCH__
#else
#define LK_ARCH 0
#endif

/* 1 where the code is compiled for sm_90a, the only architecture with wgmma. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LK_SM90A 1
#else
#define LK_SM90A 0
#endif

#define LK_DEVICE static __device__ __forceinline__
/* For code that rarely runs: it stays out of the caller's registers and instruction cache. */
#define LK_NOINLINE static __device__ __attribute__((noinline))
/* Before a loop: unroll it, n times, or not at all. Only nvcc knows the pragmas; on the simulator these are nothing. */
#define LK_UNROLL _Pragma("unroll")
#define LK_UNROLL_BY(n) LK_PRAGMA(unroll n)
#define LK_NO_UNROLL _Pragma("unroll 1")
#define LK_PRAGMA(text) _Pragma(#text)

/* ex2.approx.ftz.f32 (9.7.3.21): 2^x with a relative error of at most 2^-22.5; 2^-inf is 0, 2^+inf is +inf, NaN stays. */
LK_DEVICE float lk_ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* rcp.approx.ftz.f32 (9.7.3.13): 1 / x with an error of at most one unit in the last place; 0 where |x| is above 2^126. */
LK_DEVICE float lk_rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* min.NaN.f32 (9.7.3.11): the smaller of two numbers, NaN where one of them is. */
LK_DEVICE float lk_min_nan(float x, float y)
{
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
    return least;
}

/* max.NaN.f32 (9.7.3.12): the larger of two numbers, NaN where one of them is. */
LK_DEVICE float lk_max_nan(float x, float y)
{
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
}

/* lg2.approx.ftz.f32 (9.7.3.20): the logarithm to base 2, within 2^-22 from 1/2 to 2, and elsewhere of relative error 2^-22. */
LK_DEVICE float lk_lg2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* cvt.rn.satfinite.e4m3x2.f32 and .e5m2x2.f32 (9.7.9.21), from sm_89 on: y in the upper byte, x in the lower; rounded to nearest
 * even, what is larger than the largest finite number becomes that, NaN 0x7f. */
LK_DEVICE uint32_t lk_cvt_rn_satfinite_e4m3x2(float x, float y)
{
#if LK_ARCH >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(x), "f"(y));
    return pair;
#else
    return 0;
#endif
}
LK_DEVICE uint32_t lk_cvt_rn_satfinite_e5m2x2(float x, float y)
{
#if LK_ARCH >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(x), "f"(y));
    return pair;
#else
    return 0;
#endif
}

/* ld.relaxed.gpu.global.f32 (9.7.9.8): a load beside which other threads may change the number by atomic operations. */
LK_DEVICE float lk_ld_relaxed(const float *at)
{
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
    return x;
}

/* griddepcontrol.wait (9.7.13.13): returns when all earlier grids of the stream have ended and their writes are
 * visible. Every thread of a kernel started by lk_launch_pdl executes it before it reads or writes global memory. */
LK_DEVICE void lk_griddepcontrol_wait(void)
{
#if LK_ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* griddepcontrol.launch_dependents (9.7.13.13): lets the next grid of the stream start its blocks where there is room, once
 * all blocks of this grid have executed it or ended. It may stand before the wait: the next grid's wait needs the end of this
 * grid, and this grid ends only after its own wait has returned, so all earlier grids have ended too. Early in a kernel, it
 * gives the next kernel's blocks time to prefetch. But they all start on the SMs that are free first and stay there. So a
 * kernel with one wave of long blocks executes it late. */
LK_DEVICE void lk_griddepcontrol_launch_dependents(void)
{
#if LK_ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* %cluster_ctarank (10.19): this block's number within its cluster, 0 where there are no clusters. */
LK_DEVICE unsigned lk_cluster_ctarank(void)
{
#if LK_ARCH >= 900
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
#if LK_ARCH >= 900
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
#else
    return 1;
#endif
}

/* barrier.cluster.arrive.release.aligned (9.7.13.3): what this thread wrote before, also to shared
 * memory of other blocks, is visible after the wait. */
LK_DEVICE void lk_barrier_cluster_arrive(void)
{
#if LK_ARCH >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

/* barrier.cluster.arrive.relaxed.aligned (9.7.13.3): the same without ordering any write, which saves a fence. */
LK_DEVICE void lk_barrier_cluster_arrive_relaxed(void)
{
#if LK_ARCH >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}

/* barrier.cluster.wait.acquire.aligned (9.7.13.3): returns when every thread of the cluster has arrived or exited. */
LK_DEVICE void lk_barrier_cluster_wait(void)
{
#if LK_ARCH >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* mapa.u64 (9.7.9.23): the generic address of the same shared variable in block `rank` of the cluster. */
LK_DEVICE void *lk_mapa(void *shared, unsigned rank)
{
#if LK_ARCH >= 900
    void *peer;
    asm("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(shared), "r"(rank));
    return peer;
#else
    return shared;
#endif
}

/* ---- mbarriers, sm_90 ------------------------------------------------------------------------------------------------------
 * An mbarrier counts arrivals and bytes: a phase ends when `count` threads have arrived and as many bytes have landed as
 * threads have announced. A wait names the parity of its phase: 0 for the first phase, then 1, then 0 again. On a new mbarrier,
 * a wait for parity 1 returns at once. So the consumers of a ring begin with parity 0 on the "full" mbarriers, the producer
 * with parity 1 on the "empty" ones. */

typedef uint64_t lk_mbarrier;

/* The 32-bit address of a variable of this block, which the instructions below take. */
LK_DEVICE unsigned lk_shared_address(const void *shared)
{
    return (unsigned)__cvta_generic_to_shared(shared);
}

/* mapa.shared::cluster.u32 (9.7.9.23): the 32-bit address of the same shared variable in block `rank` of the cluster, for
 * lk_mbarrier_arrive_remote_relaxed and lk_st_async_b64. */
LK_DEVICE unsigned lk_mapa_shared(const void *shared, unsigned rank)
{
#if LK_ARCH >= 900
    unsigned peer;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(lk_shared_address(shared)), "r"(rank));
    return peer;
#else
    return 0;
#endif
}

/* mbarrier.init (9.7.13.15.9): by one thread. lk_fence_mbarrier_init and a block or cluster barrier come before the
 * first use. */
LK_DEVICE void lk_mbarrier_init(lk_mbarrier *bar, unsigned count)
{
#if LK_ARCH >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(lk_shared_address(bar)), "r"(count) : "memory");
#endif
}

/* fence.mbarrier_init.release.cluster (9.7.13.4): makes this thread's inits visible to other blocks and to copies. */
LK_DEVICE void lk_fence_mbarrier_init(void)
{
#if LK_ARCH >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/* mbarrier.arrive.expect_tx.release.cta (9.7.13.15.13): announces `bytes` to the phase, then arrives. */
LK_DEVICE void lk_mbarrier_arrive_expect_tx(lk_mbarrier *bar, unsigned bytes)
{
#if LK_ARCH >= 900
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(lk_shared_address(bar)), "r"(bytes)
                 : "memory");
#endif
}

/* CUDA 12.8 is the first with .relaxed here. What stands for it before orders more, and costs time: lk_gemm's stages. */
#if 100 * __CUDACC_VER_MAJOR__ + __CUDACC_VER_MINOR__ >= 1208
#define LK_MBARRIER_RELAXED(before) "relaxed.cluster"
#else
#define LK_MBARRIER_RELAXED(before) before ".cluster"
#endif

/* mbarrier.arrive.relaxed.cluster.shared::cluster (9.7.13.15.13): one arrival at an mbarrier of any block of the cluster, whose
 * address is from lk_mapa_shared. That block must still be running. Relaxed: the arrival does not order what this thread wrote,
 * so it fits where only copies and wgmma have read and written. A release would be a fence for the whole GPU. */
LK_DEVICE void lk_mbarrier_arrive_remote_relaxed(unsigned peer_bar)
{
#if LK_ARCH >= 900
    asm volatile("mbarrier.arrive." LK_MBARRIER_RELAXED("release") ".shared::cluster.b64 _, [%0];" ::"r"(peer_bar) : "memory");
#endif
}

/* mbarrier.try_wait.parity (9.7.13.15.16), repeated until the phase of this parity has ended; each try sleeps a while. There
 * are three:
 *   lk_mbarrier_wait_parity           acquire.cta: then the data of the copies is visible
 *   lk_mbarrier_wait_parity_cluster   acquire.cluster: the same where other blocks arrive or store
 *   lk_mbarrier_wait_parity_relaxed   relaxed.cluster: the same where only copies follow, which order themselves. An acquire
 *                                     would empty the L1 cache of the SM */
#if LK_ARCH >= 900
#define LK_MBARRIER_TRY_WAIT(done, how)                                                                                        \
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity." how ".shared::cta.b64 p, [%1], %2;\n\t"                     \
                 "selp.u32 %0, 1, 0, p;\n\t}"                                                                                  \
                 : "=r"(done) : "r"(lk_shared_address(bar)), "r"(parity) : "memory")
#else
#define LK_MBARRIER_TRY_WAIT(done, how) done = 1
#endif
LK_DEVICE void lk_mbarrier_wait_parity(lk_mbarrier *bar, unsigned parity)
{
    for (unsigned done = 0; !done;) LK_MBARRIER_TRY_WAIT(done, "acquire.cta");
}
LK_DEVICE void lk_mbarrier_wait_parity_cluster(lk_mbarrier *bar, unsigned parity)
{
    for (unsigned done = 0; !done;) LK_MBARRIER_TRY_WAIT(done, "acquire.cluster");
}
LK_DEVICE void lk_mbarrier_wait_parity_relaxed(lk_mbarrier *bar, unsigned parity)
{
    for (unsigned done = 0; !done;) LK_MBARRIER_TRY_WAIT(done, LK_MBARRIER_RELAXED("acquire"));
}

/* st.async.weak.shared::cluster (9.7.9.12): stores 8 bytes into the shared memory of another block, and counts them on an
 * mbarrier of the same block when they have landed. Both addresses are from lk_mapa_shared. */
LK_DEVICE void lk_st_async_b64(unsigned peer, uint64_t value, unsigned peer_bar)
{
#if LK_ARCH >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
                 ::"r"(peer), "l"(value), "r"(peer_bar) : "memory");
#endif
}

/* ---- Tensor copies, sm_90 -------------------------------------------------------------------------------------------------
 * A CUtensorMap, made on the host by cuTensorMapEncodeTiled, describes a matrix in global memory and the size of a box. A copy
 * moves the box whose first element is (x, y); x is the column. The map is a __grid_constant__ argument of the kernel or lies
 * in global memory. In shared memory the rows of the box follow one another, from an address that is a multiple of 128. With a
 * swizzle of 32, 64 or 128 bytes a row has that length, and its 16-byte vectors are permuted: address bits 4, 4-5 or 4-6 are
 * xored with bits 7, 7-8 or 7-9. */

/* prefetch.tensormap (9.7.9.15): fetches the map before the first copy needs it. */
LK_DEVICE void lk_prefetch_tensormap(const CUtensorMap *map)
{
#if LK_ARCH >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

/* cp.async.bulk.tensor.2d.shared::cluster.global.tile (9.7.9.25.5.2): starts to copy the box at (x, y) into this block's shared
 * memory and counts its bytes on `bar` when they have landed. Elements outside of the matrix are zeros, and count too. */
LK_DEVICE void lk_cp_async_bulk_tensor_2d_load(void *shared, const CUtensorMap *map, int x, int y, lk_mbarrier *bar)
{
#if LK_ARCH >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(lk_shared_address(shared)), "l"(map), "r"(x), "r"(y), "r"(lk_shared_address(bar)) : "memory");
#endif
}

/* The same with .multicast::cluster: the box goes to the same address in every block of the cluster whose bit is set in `mask`,
 * and its bytes are counted on the mbarrier at the same address there. These blocks must be running, with their mbarriers
 * initialised and their memory free. */
LK_DEVICE void lk_cp_async_bulk_tensor_2d_load_multicast(void *shared, const CUtensorMap *map, int x, int y, lk_mbarrier *bar,
                                                         uint16_t mask)
{
#if LK_SM90A
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(lk_shared_address(shared)), "l"(map), "r"(x), "r"(y), "r"(lk_shared_address(bar)), "h"(mask)
                 : "memory");
#endif
}

/* ---- Warpgroups, sm_90a ---------------------------------------------------------------------------------------------------
 * A warpgroup is four warps; the number of its first warp is a multiple of 4. Its threads multiply together. The sums, 64 rows,
 * are in registers: d[i] of a thread is in row 16 (thread / 32 % 4) + thread % 32 / 4 + 8 (i / 2 % 2) and in column
 * 8 (i / 4) + 2 (thread % 4) + i % 2. */

/* The matrix descriptor (9.7.15.5.1.2) of an operand in shared memory with a swizzle of 128 bytes, as tensor copies write it.
 * It consists of atoms of 1024 bytes, 8 rows of 128, which start at multiples of 1024. Sections 9.7.15.5.1.2.1.1 and .2 define
 * the two distances, and CUTLASS's make_gmma_desc uses them in the same way:
 * K-major (transpose 0): a row is 64 elements along K of one row of A, or of one column of B. stride_bytes is the distance from
 * 8 rows to the next 8. leading_bytes does not matter. 16 elements along K are 32 bytes, so they add 2 to the descriptor.
 * MN-major (transpose 1): a row is 64 elements along M or N of one k. leading_bytes is the distance from 64 elements along M or
 * N to the next 64, stride_bytes that from 8 values of k to the next 8. */
LK_DEVICE uint64_t lk_wgmma_descriptor(const void *shared, unsigned leading_bytes, unsigned stride_bytes)
{
    const unsigned address = lk_shared_address(shared);
    return (uint64_t)1 << 62 | (uint64_t)(stride_bytes >> 4 & 0x3fff) << 32 | (leading_bytes >> 4 & 0x3fff) << 16 |
           (address >> 4 & 0x3fff);
}

/* wgmma.fence.sync.aligned (9.7.15.7.1): before a warpgroup's first wgmma, and between an access to the registers of sums and
 * a wgmma that uses them. */
LK_DEVICE void lk_wgmma_fence(void)
{
#if LK_SM90A
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/* wgmma.commit_group.sync.aligned (9.7.15.7.2): ends a group: the wgmma since the last commit. */
LK_DEVICE void lk_wgmma_commit_group(void)
{
#if LK_SM90A
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/* wgmma.wait_group.sync.aligned (9.7.15.7.3): returns when all groups except for the latest `groups` are done. Then their
 * operands may be overwritten and, after lk_wgmma_hold, their sums read. */
template <int groups> LK_DEVICE void lk_wgmma_wait_group(void)
{
    static_assert(groups >= 0 && groups <= 7, "0 to 7");
#if LK_SM90A
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
#endif
}

/* No instruction. The compiler does not know that wgmma writes the sums until the wait: what reads them stays after this. */
template <int n> LK_DEVICE void lk_wgmma_hold(float (&d)[n])
{
    LK_UNROLL for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* The 128 registers of a thread's sums, as text and as operands. */
#define LK_SUMS_TEXT                                                                                                           \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"  \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"     \
    "%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,"     \
    "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,"      \
    "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"
#define LK_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LK_SUMS_16(i) LK_SUMS_4(i), LK_SUMS_4(i + 4), LK_SUMS_4(i + 8), LK_SUMS_4(i + 12)
#define LK_SUMS_64(i) LK_SUMS_16(i), LK_SUMS_16(i + 16), LK_SUMS_16(i + 32), LK_SUMS_16(i + 48)

/* wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 (9.7.15.5.2): starts d = A B, plus d where accumulate is not 0. A is
 * 64 x 16 and B is 16 x n, both in shared memory. All threads of a warpgroup pass the same a, b and accumulate. d must not be
 * touched before a wait for the group. */
template <int n, int transpose_a = 0, int transpose_b = 0>
LK_DEVICE void lk_wgmma_m64k16_bf16(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate)
{
    static_assert(n == 256, "n is 256: the text of the instruction has the width in it");
#if LK_SM90A
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " LK_SUMS_TEXT ", %128, %129, p, 1, 1, %131, %132;\n\t}"
                 : LK_SUMS_64(0), LK_SUMS_64(64)
                 : "l"(a), "l"(b), "r"(accumulate), "n"(transpose_a), "n"(transpose_b));
#endif
}
#undef LK_SUMS_TEXT
#undef LK_SUMS_4
#undef LK_SUMS_16
#undef LK_SUMS_64

/* setmaxnreg.inc.sync.aligned.u32 (9.7.19.5): raises the registers per thread of this warp to `registers`, and waits until
 * other warps have given up as many. All warps of a warpgroup execute the same one; `registers` is a multiple of 8 from 24 to
 * 256. */
template <int registers> LK_DEVICE void lk_setmaxnreg_inc(void)
{
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "a multiple of 8 from 24 to 256");
#if LK_SM90A
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

/* setmaxnreg.dec.sync.aligned.u32 (9.7.19.5): gives up all registers per thread beyond `registers`, for other warps. */
template <int registers> LK_DEVICE void lk_setmaxnreg_dec(void)
{
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "a multiple of 8 from 24 to 256");
#if LK_SM90A
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

/* bar.sync (9.7.13.1): returns when `threads` threads of the block, whole warps, have come to barrier number `barrier`, 1 to
 * 15, and orders their accesses to memory. __syncthreads is barrier 0. The number is a constant: a kernel with the number in a
 * register takes 16 barriers of the SM, and an SM of sm_120 has only 24. */
template <int barrier> LK_DEVICE void lk_named_barrier_sync(int threads)
{
    asm volatile("bar.sync %0, %1;" ::"n"(barrier), "r"(threads) : "memory");
}

/* sin.approx.ftz.f32 (9.7.3.18) and cos.approx.ftz.f32 (9.7.3.19): an absolute error of at most 3.4e-7 for |x| <= pi,
 * measured on an H200 for 2^24 arguments. sin 0 is 0 and cos 0 is 1. */
LK_DEVICE float lk_sin(float x)
{
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
LK_DEVICE float lk_cos(float x)
{
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* cp.async.cg.shared.global.L2::128B (9.7.9.25.3.1): copies 16 bytes to shared + offset bytes. Both addresses are aligned to
 * 16. The bytes do not go through registers; the L2 fetches the 128 bytes around them. They do not go through L1 either, unless
 * L1 is true (.ca), for two copies that share a 32-byte sector. This thread sees the bytes after a wait, other threads after a
 * barrier that follows the wait. */
template <bool InL1 = false> LK_DEVICE void lk_cp_async_16(void *shared, int offset, const void *global)
{
    const unsigned to = lk_shared_address(shared) + (unsigned)offset;
    if constexpr (InL1) asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    else asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

/* cp.async.commit_group (9.7.9.25.3.2): ends a group: this thread's copies since the last commit. */
LK_DEVICE void lk_cp_async_commit_group(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* cp.async.wait_group (9.7.9.25.3.3): returns when all of this thread's groups have landed except for the latest
 * `groups`. */
template <int groups> LK_DEVICE void lk_cp_async_wait_group(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

/* prefetch.global.L2 (9.7.9.15): asks the L2 to fetch the bytes around an address. It is a hint and reads nothing. It may stand
 * before lk_griddepcontrol_wait(): what other grids write to this GPU's memory meanwhile goes through the same L2. */
LK_DEVICE void lk_prefetch_l2(const void *global)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/* cp.async.bulk.prefetch.L2.global (9.7.9.25.4.3): the same for `bytes` bytes, a multiple of 16 at a multiple of 16, by one
 * thread. */
LK_DEVICE void lk_cp_async_bulk_prefetch_l2(const void *global, unsigned bytes)
{
#if LK_ARCH >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

/* %tid.x (10.2), read again at each call, so that no register holds what was computed from it before. */
LK_DEVICE unsigned lk_tid_x(void)
{
    unsigned x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* No instruction. The compiler forgets what it knows of a value in registers, so that it computes again what it would
 * otherwise keep, such as the unpacked floats of a packed vector. */
LK_DEVICE void lk_forget(uint4 *v)
{
    asm volatile("" : "+r"(v->x), "+r"(v->y), "+r"(v->z), "+r"(v->w));
}

/* No instruction. The compiler computes x before a choice that may not use it, and does not move x behind a branch. */
LK_DEVICE float lk_hold(float x)
{
    asm("" : "+f"(x));
    return x;
}

#endif /* the simulator or CUDA */
#endif
