// SPDX-License-Identifier: MIT
/*
The functions of lk/lk_ptx.cuh for the simulator. lk_ptx.cuh includes this file when LK_SIMT is defined. Each function has the
name and the parameters of the one there; its body calls simt.h where that one has a PTX instruction. What a function does, and
the rules for its use, stand in lk_ptx.cuh.

SIMT_SITE at the end of the parameters is the caller's file and line, for the reports.

LK_SHARED and LK_DYN_SMEM declare shared memory; their twins for nvcc are in lk_base.cuh.

The last section has instructions that no kernel of lk uses; test_simt.cpp tests them. A kernel that needs one adds the function
with the PTX to lk_ptx.cuh, and the function here moves to its section above.
*/
#ifndef SIMT_PTX_H
#define SIMT_PTX_H

#include <cuda.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

#define LK_ARCH 900     // kernels are compiled as for an H100 or H200
#define LK_SM90A 1
#define LK_DEVICE static __device__ __forceinline__
#define LK_NOINLINE static __device__ __attribute__((noinline))
#define LK_UNROLL       // for nvcc: g++ does not know the pragmas, and clang says where it could not unroll
#define LK_UNROLL_BY(n)
#define LK_NO_UNROLL

/* LK_SHARED(float, tile, [32][33]); LK_SHARED(int, flag, );  LK_DYN_SMEM(struct my_smem, smem) makes `smem` a reference to
   it. */
#define LK_SHARED(type, name, extent) SIMT_SHARED(type, name, extent)
#define LK_DYN_SMEM(type, name) type &name = *(type *)simt_dynamic_shared(sizeof(type))

/* ---- arithmetic, and what has no effect here ------------------------------------------------------------------------- */

LK_DEVICE float lk_ex2(float x) { return exp2f(x); }
LK_DEVICE float lk_rcp(float x) { return fabsf(x) > 0x1p126f ? copysignf(0, x) : 1 / x; }
LK_DEVICE float lk_min_nan(float x, float y) { return x != x || y != y ? NAN : x < y ? x : y; }
LK_DEVICE float lk_max_nan(float x, float y) { return x != x || y != y ? NAN : x > y ? x : y; }
LK_DEVICE float lk_ld_relaxed(const float *at) {
    float x;
    __atomic_load(at, &x, __ATOMIC_RELAXED);
    return x;
}
LK_DEVICE float lk_lg2(float x) { return log2f(x); }
LK_DEVICE uint32_t lk_cvt_rn_satfinite_e4m3x2(float x, float y) {
    return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
}
LK_DEVICE uint32_t lk_cvt_rn_satfinite_e5m2x2(float x, float y) {
    return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E5M2);
}
LK_DEVICE float lk_sin(float x) { return sinf(x); }
LK_DEVICE float lk_cos(float x) { return cosf(x); }

LK_DEVICE void lk_griddepcontrol_wait(void) {}          // a grid starts when the previous one has ended
LK_DEVICE void lk_griddepcontrol_launch_dependents(void) {}
template <int registers> LK_DEVICE void lk_setmaxnreg_inc(void) {
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "a multiple of 8 from 24 to 256");
}
template <int registers> LK_DEVICE void lk_setmaxnreg_dec(void) {
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "a multiple of 8 from 24 to 256");
}
LK_DEVICE unsigned lk_tid_x(void) { return threadIdx.x; }
LK_DEVICE void lk_forget(uint4 *) {}
LK_DEVICE float lk_hold(float x) { return x; }

/* ---- clusters and named barriers ------------------------------------------------------------------------------------- */

LK_DEVICE unsigned lk_cluster_ctarank(void) { return simt_cluster_ctarank(); }
LK_DEVICE unsigned lk_cluster_nctarank(void) { return simt_cluster_nctarank(); }
LK_DEVICE void lk_barrier_cluster_arrive(SIMT_SITE) { simt_cluster_arrive(file, line); }
LK_DEVICE void lk_barrier_cluster_arrive_relaxed(SIMT_SITE) { simt_cluster_arrive_relaxed(file, line); }
LK_DEVICE void lk_barrier_cluster_wait(SIMT_SITE) { simt_cluster_wait(file, line); }
LK_DEVICE void *lk_mapa(void *shared, unsigned rank, SIMT_SITE) { return simt_cluster_map(shared, rank, file, line); }
LK_DEVICE unsigned lk_mapa_shared(const void *shared, unsigned rank, SIMT_SITE) {
    return simt_cluster_address(shared, rank, file, line);
}
template <int barrier> LK_DEVICE void lk_named_barrier_sync(int threads, SIMT_SITE) {
    simt_named_barrier(barrier, threads, file, line);
}

/* ---- mbarriers ------------------------------------------------------------------------------------------------------- */

typedef uint64_t lk_mbarrier;

LK_DEVICE void lk_mbarrier_init(lk_mbarrier *bar, unsigned count, SIMT_SITE) { simt_mbarrier_init(bar, count, file, line); }
LK_DEVICE void lk_fence_mbarrier_init(void) { simt_fence_mbarrier_init(); }
LK_DEVICE void lk_mbarrier_arrive_expect_tx(lk_mbarrier *bar, unsigned bytes, SIMT_SITE) {
    simt_mbarrier_arrive(bar, 1, bytes, file, line);
}
LK_DEVICE void lk_mbarrier_arrive_remote_relaxed(unsigned peer_bar, SIMT_SITE) {
    simt_mbarrier_arrive_remote(peer_bar, file, line);
}
/* A wait parks the thread instead of asking again and again. */
LK_DEVICE void lk_mbarrier_wait_parity(lk_mbarrier *bar, unsigned parity, SIMT_SITE) {
    simt_mbarrier_wait(bar, parity, 0, file, line);
}
LK_DEVICE void lk_mbarrier_wait_parity_cluster(lk_mbarrier *bar, unsigned parity, SIMT_SITE) {
    simt_mbarrier_wait(bar, parity, 1, file, line);
}
LK_DEVICE void lk_mbarrier_wait_parity_relaxed(lk_mbarrier *bar, unsigned parity, SIMT_SITE) {
    simt_mbarrier_wait(bar, parity, 1, file, line);
}

/* ---- copies ---------------------------------------------------------------------------------------------------------- */

LK_DEVICE void lk_st_async_b64(unsigned peer, uint64_t value, unsigned peer_bar, SIMT_SITE) {
    simt_st_async(peer, value, peer_bar, file, line);
}
template <bool L1 = false> LK_DEVICE void lk_cp_async_16(void *shared, int offset, const void *global, SIMT_SITE) {
    simt_cp_async((char *)shared + offset, global, 16, file, line);
}
LK_DEVICE void lk_cp_async_commit_group(SIMT_SITE) { simt_cp_async_commit(file, line); }
template <int groups> LK_DEVICE void lk_cp_async_wait_group(SIMT_SITE) { simt_cp_async_wait(groups, file, line); }
LK_DEVICE void lk_prefetch_l2(const void *global, SIMT_SITE) { simt_prefetch(global, file, line); }
LK_DEVICE void lk_cp_async_bulk_prefetch_l2(const void *global, unsigned bytes, SIMT_SITE) {
    simt_bulk_prefetch(global, bytes, file, line);
}

LK_DEVICE void lk_prefetch_tensormap(const CUtensorMap *map, SIMT_SITE) { simt_tensor_prefetch(map, file, line); }
LK_DEVICE void lk_cp_async_bulk_tensor_2d_load(void *shared, const CUtensorMap *map, int x, int y, lk_mbarrier *bar,
                                               SIMT_SITE) {
    simt_tensor_load(shared, map, x, y, bar, file, line);
}
LK_DEVICE void lk_cp_async_bulk_tensor_2d_load_multicast(void *shared, const CUtensorMap *map, int x, int y, lk_mbarrier *bar,
                                                         uint16_t mask, SIMT_SITE) {
    simt_tensor_load_multicast(shared, map, x, y, bar, mask, file, line);
}

/* ---- warpgroups ------------------------------------------------------------------------------------------------------ */

LK_DEVICE uint64_t lk_wgmma_descriptor(const void *shared, unsigned leading_bytes, unsigned stride_bytes, SIMT_SITE) {
    const uint64_t address = simt_wgmma_address(shared, file, line) >> 4 & 0x3fff, swizzle_128 = 1;
    const uint64_t leading = leading_bytes >> 4 & 0x3fff, stride = stride_bytes >> 4 & 0x3fff;
    return swizzle_128 << 62 | stride << 32 | leading << 16 | address;
}
LK_DEVICE void lk_wgmma_fence(SIMT_SITE) { simt_wgmma_fence(file, line); }
LK_DEVICE void lk_wgmma_commit_group(SIMT_SITE) { simt_wgmma_commit(file, line); }
template <int groups> LK_DEVICE void lk_wgmma_wait_group(SIMT_SITE) {
    static_assert(groups >= 0 && groups <= 7, "0 to 7");
    simt_wgmma_wait(groups, file, line);
}
template <int n> LK_DEVICE void lk_wgmma_hold(float (&)[n]) {}
/* Here n may be any multiple of 32 up to 256. */
template <int n, int transpose_a = 0, int transpose_b = 0>
LK_DEVICE void lk_wgmma_m64k16_bf16(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate, SIMT_SITE) {
    static_assert(n % 32 == 0 && n >= 32 && n <= 256, "n is a multiple of 32 up to 256");
    simt_wgmma(n, transpose_a, transpose_b, d, a, NULL, b, accumulate, file, line);
}

/* ---- instructions that no kernel of lk uses -------------------------------------------------------------------------- */

/* mbarrier.arrive.release.cta (9.7.13.15.13): one arrival. What this thread did before it is visible after a wait. */
LK_DEVICE void lk_mbarrier_arrive(lk_mbarrier *bar, SIMT_SITE) { simt_mbarrier_arrive(bar, 1, 0, file, line); }
/* mbarrier.expect_tx.relaxed.cta (9.7.13.15.11): announces `bytes` without an arrival. */
LK_DEVICE void lk_mbarrier_expect_tx(lk_mbarrier *bar, unsigned bytes, SIMT_SITE) {
    simt_mbarrier_arrive(bar, 0, bytes, file, line);
}
/* mbarrier.arrive.release.cluster.shared::cluster (9.7.13.15.13): one arrival at an mbarrier of any block of the cluster, whose
   address is from lk_mapa_shared. That block waits with lk_mbarrier_wait_parity_cluster. */
LK_DEVICE void lk_mbarrier_arrive_remote(unsigned peer_bar, SIMT_SITE) { simt_mbarrier_arrive_remote(peer_bar, file, line); }

/* fence.proxy.async.shared::cta (9.7.13.4): makes what this thread wrote to shared memory visible to bulk and tensor stores and
   to wgmma. Each writer executes it after its writes, and before the barrier at which the storing or multiplying threads
   wait. */
LK_DEVICE void lk_fence_proxy_async_shared(void) { simt_fence_proxy_async(); }

/* cp.async.bulk.shared::cluster.global (9.7.9.25.4.1): starts to copy `bytes` bytes into this block's shared memory, and counts
   them on `bar` when they have landed. Addresses and size are multiples of 16. */
LK_DEVICE void lk_cp_async_bulk_load(void *shared, const void *global, unsigned bytes, lk_mbarrier *bar, SIMT_SITE) {
    simt_bulk_load(shared, global, bytes, bar, file, line);
}
/* cp.async.bulk.global.shared::cta.bulk_group (9.7.9.25.4.1): starts to copy `bytes` bytes to global memory, as part of this
   thread's next bulk group. Addresses and size are multiples of 16. */
LK_DEVICE void lk_cp_async_bulk_store(void *global, const void *shared, unsigned bytes, SIMT_SITE) {
    simt_bulk_store(global, shared, bytes, file, line);
}
/* cp.async.bulk.commit_group (9.7.9.25.6.1): ends this thread's bulk group: the stores since the last commit. */
LK_DEVICE void lk_cp_async_bulk_commit_group(void) { simt_bulk_commit(); }
/* cp.async.bulk.wait_group.read (9.7.9.25.6.2): returns when all of this thread's bulk groups except for the latest `groups`
   have read their sources. A thread that stores waits so for all of them before it exits, or its block's memory may be gone. */
template <int groups> LK_DEVICE void lk_cp_async_bulk_wait_group_read(SIMT_SITE) { simt_bulk_wait(groups, 1, file, line); }
/* cp.async.bulk.wait_group (9.7.9.25.6.2): the same, and this thread can read what they wrote. */
template <int groups> LK_DEVICE void lk_cp_async_bulk_wait_group(SIMT_SITE) { simt_bulk_wait(groups, 0, file, line); }

/* cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group (9.7.9.25.5.2): starts to copy the box at (x, y) to global memory,
   as part of this thread's next bulk group. Elements outside of the matrix are not written. */
LK_DEVICE void lk_cp_async_bulk_tensor_2d_store(const CUtensorMap *map, int x, int y, const void *shared, SIMT_SITE) {
    simt_tensor_store(map, x, y, shared, file, line);
}
/* cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group (9.7.9.25.5.3): the same, but adds to the elements in
   global memory, each of them atomically and in any order. */
LK_DEVICE void lk_cp_reduce_async_bulk_tensor_2d_add(const CUtensorMap *map, int x, int y, const void *shared, SIMT_SITE) {
    simt_tensor_add(map, x, y, shared, file, line);
}

/* wgmma.mma_async (9.7.15.5.2) with A in registers, which must not be touched before the wait. Each of a[0] to a[3] is two
   neighbours of one row, the left one in the lower half. a[0] holds columns 2 (lane % 4) and the next of row lane / 4 of the
   warp's 16 rows; a[1] is 8 rows below, a[2] is 8 columns to the right, a[3] is both. So A is K-major: transpose_a is 0. */
template <int n, int transpose_a = 0, int transpose_b = 0>
LK_DEVICE void lk_wgmma_m64k16_bf16_register(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate, SIMT_SITE) {
    static_assert(n % 32 == 0 && n >= 32 && n <= 256, "n is a multiple of 32 up to 256");
    static_assert(transpose_a == 0, "A in registers has one layout");
    simt_wgmma(n, 0, transpose_b, d, 0, a, b, accumulate, file, line);
}

/* stmatrix.sync.aligned.m8n8.x4.shared.b16 (9.7.14.5.16): a warp stores four matrices of 8 x 8 elements of 16 bits. Lanes 0-7
   pass the addresses of the rows of the first, lanes 8-15 those of the second and so on; they are multiples of 16. Of each
   matrix a lane holds elements 2 (lane % 4) and the next of row lane / 4. */
LK_DEVICE void lk_stmatrix_x4(void *shared_row, uint32_t a, uint32_t b, uint32_t c, uint32_t d, SIMT_SITE) {
    simt_stmatrix(shared_row, a, b, c, d, file, line);
}

#endif
