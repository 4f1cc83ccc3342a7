// SPDX-License-Identifier: MIT
/*
The simulator's own tests: what kernels may do gives the right result under every schedule, and each error that simt.h claims to catch is provoked and caught.
Built with a sanitizer, also what that sanitizer must find and must not find: `test_simt --provoke NAME` runs one such case in a process of its own.
*/
#include <cuda_runtime.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cub/block/block_reduce.cuh>

#include "lk/lk_ptx.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

static int passed, failed;
static const char *schedules[] = {"forward", "reverse", "random:1", "random:2"};

static void verdict(int ok, const char *name, const char *detail) {
    printf("%-4s  %-40s %s\n", ok ? "ok" : "FAIL", name, detail);
    ok ? passed++ : failed++;
}

enum { MAX_OUT = 1 << 16 };
static int *out;            // device memory

template <typename... P, typename... A>
static cudaError_t launch_cluster(void (*kernel)(P...), dim3 grid, dim3 block, unsigned cluster, size_t dynamic, A... args) {
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = cluster;
    attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = dynamic;
    config.attrs = attribute;
    config.numAttrs = cluster > 1;
    return cudaLaunchKernelEx(&config, kernel, args...);
}
template <typename... P, typename... A> static cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, A... args) {
    return launch_cluster(kernel, grid, block, 1, 0, args...);
}

/* ---- kernels that are right ------------------------------------------------------------------------------------------ */

static inline unsigned linear_thread(void) { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

__global__ void coordinates_kernel(int *out) {
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + linear_thread()] = (int)(threadIdx.y * 1000 + blockIdx.z * 100 + blockIdx.y * 10 + blockIdx.x);
}

__global__ void shuffles_kernel(int *out) {
    int lane = threadIdx.x % 32, bad = 0;
    const unsigned full = 0xffffffffu;
    bad += __shfl_sync(full, lane, 7) != 7;
    bad += __shfl_sync(full, lane, 35, 8) != (lane & ~7) + 3;
    bad += __shfl_xor_sync(full, (long long)lane << 40, 5) != (long long)(lane ^ 5) << 40;
    bad += __shfl_xor_sync(full, lane, 16, 16) != (lane < 16 ? lane : lane - 16);
    bad += __shfl_down_sync(full, (float)lane, 3) != (lane + 3 < 32 ? lane + 3 : lane);
    bad += __shfl_down_sync(full, lane, 3, 8) != ((lane & 7) + 3 < 8 ? lane + 3 : lane);
    bad += __shfl_up_sync(full, (unsigned)lane, 2, 16) != (unsigned)((lane & 15) >= 2 ? lane - 2 : lane);
    bad += __shfl_sync(full, 0.5 * lane, 9) != 4.5;
    bad += __ballot_sync(full, lane % 3 == 0) != 0x49249249u;
    bad += __all_sync(full, lane < 32) != 1 || __all_sync(full, lane != 4) != 0;
    bad += __any_sync(full, lane == 4) != 1 || __any_sync(full, 0) != 0;
    bad += __reduce_add_sync(full, (unsigned)lane) != 496 || __reduce_add_sync(full, -lane) != -496;
    bad += __reduce_max_sync(full, -lane) != 0 || __reduce_max_sync(full, (unsigned)-lane) != 0xffffffffu;
    bad += __reduce_min_sync(full, lane - 9) != -9 || __reduce_min_sync(full, (unsigned)lane + 2) != 2;
    bad += __reduce_and_sync(full, 0xf0u | lane) != 0xf0 || __reduce_or_sync(full, 1u << lane) != full || __reduce_xor_sync(full, 1u << lane) != full;
    bad += __match_any_sync(full, lane / 8) != 0xffu << (lane & ~7);
    // Halves of a warp that diverge and converge again.
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    for (int i = 0; i < (lane < 16 ? 3 : 5); i++) bad += __reduce_add_sync(half, 1) != 16;
    __syncwarp();
    if (lane % 2) bad += __shfl_xor_sync(0xaaaaaaaau, lane, 2) != (lane ^ 2);
    out[blockIdx.x * blockDim.x + threadIdx.x] = bad;
}

template <int block> __global__ void block_sum_kernel(int *out) {
    LK_SHARED(int, partial, [block / 32]);
    LK_SHARED(int, total, );
    int sum = __reduce_add_sync(0xffffffffu, (int)threadIdx.x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0;
        for (int i = 0; i < block / 32; i++) total += partial[i];
    }
    __syncthreads();
    out[blockIdx.x * block + threadIdx.x] = total;
}

struct pair { float sum, max; };
static inline pair fold_pairs(const pair &a, const pair &b) { return {a.sum + b.sum, fmaxf(a.max, b.max)}; }

template <int block> __global__ void cub_kernel(float *out) {
    typedef cub::BlockReduce<pair, block> reduce;
    LK_SHARED(typename reduce::TempStorage, storage, );
    pair p = reduce(storage).Reduce(pair{1.0f, (float)threadIdx.x}, fold_pairs);
    __syncthreads();
    pair q = reduce(storage).Reduce(pair{2.0f, (float)-(int)threadIdx.x}, fold_pairs);
    if (threadIdx.x == 0) out[0] = p.sum, out[1] = p.max, out[2] = q.sum, out[3] = q.max;
    if (threadIdx.x == block - 1) out[4] = p.sum;       // not defined in this thread: NaN
}

struct dynamic_smem { float4 rows[64]; int tail; };

__global__ void dynamic_kernel(int *out) {
    LK_DYN_SMEM(dynamic_smem, smem);
    LK_SHARED(unsigned char, bytes, [3][5]);
    unsigned untouched = 0;
    __builtin_memcpy(&untouched, bytes[2], 4);
    int poisoned = untouched == 0x01010101u * simt_poison_byte() && smem.tail == (int)untouched;
    __syncthreads();
    smem.rows[threadIdx.x] = make_float4(1, 2, 3, (float)threadIdx.x);
    if (threadIdx.x == 0) smem.tail = 9, bytes[2][4] = 1;
    __syncthreads();
    out[threadIdx.x] = poisoned && smem.rows[63 - threadIdx.x].w == 63 - threadIdx.x && (uintptr_t)&smem % 1024 == 0;
}

__global__ void cluster_kernel(int *out) {
    LK_SHARED(int, mine, [4]);
    unsigned rank = simt_cluster_ctarank(), count = simt_cluster_nctarank();
    if (threadIdx.x < 4) mine[threadIdx.x] = (int)(blockIdx.x * 10 + threadIdx.x);
    simt_cluster_arrive();
    simt_cluster_wait();
    int sum = 0;
    for (unsigned r = 0; r < count; r++) sum += ((const int *)simt_cluster_map(mine, r))[threadIdx.x % 4];
    simt_cluster_arrive();
    simt_cluster_wait();        // no block exits while another still reads
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum - (int)(count * (threadIdx.x % 4)) - 10 * (int)(count * (blockIdx.x - rank) + count * (count - 1) / 2);
}

__global__ void votes_kernel(int *out) {
    int bad = __syncthreads_count(threadIdx.x % 3 == 0) != 34;
    bad += !__syncthreads_or(threadIdx.x == 99) || __syncthreads_or(0);
    bad += !__syncthreads_and(1) || __syncthreads_and(threadIdx.x != 50);
    out[threadIdx.x] = bad;
}

/* The last block to take a ticket sums what the others have written: the usual fence and ticket. */
__global__ void ticket_kernel(int *out, unsigned *ticket) {
    LK_SHARED(int, last, );
    if (threadIdx.x == 0) {
        out[1 + blockIdx.x] = (int)blockIdx.x;
        __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        __threadfence();
        int sum = 0;
        for (unsigned i = 0; i < gridDim.x; i++) sum += out[1 + i];
        out[0] = sum;
    }
}

/* Each block waits for the previous one, which a reverse order starts last. */
__global__ void chain_kernel(unsigned *done) {
    if (threadIdx.x == 0) {
        while (blockIdx.x && !__atomic_load_n(&done[blockIdx.x - 1], __ATOMIC_ACQUIRE)) simt_yield();
        __atomic_store_n(&done[blockIdx.x], blockIdx.x ? done[blockIdx.x - 1] + 1 : 1, __ATOMIC_RELEASE);
    }
}

__global__ void atomics_kernel(int *out) {
    atomicAdd(&out[0], 1);
    atomicAdd((float *)&out[1], 0.5f);
    atomicMax(&out[2], (int)threadIdx.x);
    atomicMin(&out[3], -(int)threadIdx.x);
    atomicOr((unsigned *)&out[4], 1u << threadIdx.x % 32);
    atomicCAS(&out[5], 0, 7);
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicExch(&out[6], 5);
}

/* ---- positive cases -------------------------------------------------------------------------------------------------- */

static int count_other_than(int value, int count) {
    int bad = 0;
    for (int i = 0; i < count; i++) bad += out[i] != value;
    return bad;
}

static int case_coordinates(void) {
    if (launch(coordinates_kernel, dim3(2, 3, 4), dim3(3, 5, 2), out)) return 1;
    int bad = 0;
    for (int b = 0; b < 24; b++)
        for (int t = 0; t < 30; t++) bad += out[b * 30 + t] != t / 3 % 5 * 1000 + b / 6 * 100 + b / 2 % 3 * 10 + b % 2;
    return bad;
}
static int case_shuffles(void) { return launch(shuffles_kernel, 5, 96, out) || count_other_than(0, 480); }
static int case_block_sum(void) {
    return launch(block_sum_kernel<1024>, 7, 1024, out) || count_other_than(1023 * 512, 7 * 1024)
           || launch(block_sum_kernel<64>, 100, 64, out) || count_other_than(63 * 32, 6400);
}
template <int block> static int cub_of(void) {
    float *f = (float *)out;
    if (launch(cub_kernel<block>, 1, block, f)) return 1;
    return f[0] != block || f[1] != block - 1 || f[2] != 2 * block || f[3] != 0 || !isnan(f[4]);
}
static int case_cub(void) { return cub_of<256>() || cub_of<33>() || cub_of<1024>() || cub_of<40>(); }
static int case_dynamic(void) {
    return launch_cluster(dynamic_kernel, 3, 64, 1, sizeof(dynamic_smem), out) || count_other_than(1, 64);
}
static int case_cluster(void) {
    if (launch_cluster(cluster_kernel, 16, 128, 8, 0, out) || count_other_than(0, 16 * 128)) return 1;
    if (launch_cluster(cluster_kernel, 3, 64, 1, 0, out) || count_other_than(0, 3 * 64)) return 2;
    cudaFuncSetAttribute(cluster_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    int bad = launch_cluster(cluster_kernel, 32, 32, 16, 0, out) || count_other_than(0, 32 * 32);
    cudaFuncSetAttribute(cluster_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 0);
    return bad;
}
static int case_votes(void) { return launch(votes_kernel, 1, 100, out) || count_other_than(0, 100); }
static int case_ticket(void) {
    unsigned *ticket = (unsigned *)out + 1000;
    *ticket = 0;
    return launch(ticket_kernel, 50, 64, out, ticket) || out[0] != 49 * 25 || *ticket != 0;
}
static int case_chain(void) {
    memset(out, 0, 24 * sizeof(int));
    return launch(chain_kernel, 24, 32, (unsigned *)out) || out[23] != 24;     // all alive at once; libtsan takes a millisecond per fiber
}
static int case_atomics(void) {
    memset(out, 0, 8 * sizeof(int));
    if (launch(atomics_kernel, 16, 64, out)) return 1;
    return out[0] != 1024 || ((float *)out)[1] != 512.0f || out[2] != 63 || out[3] != -63 || out[4] != -1 || out[5] != 7 || out[6] != 5;
}

static int case_intrinsics(void) {
    int bad = __clz(0) != 32 || __clz(1) != 31 || __popc(0xf0f0u) != 8 || __ffs(8) != 4 || __ffsll(0) != 0 || __brev(1) != 0x80000000u;
    bad += __umulhi(0xffffffffu, 0xffffffffu) != 0xfffffffeu || __umul64hi(~0ull, ~0ull) != ~0ull - 1;
    bad += __float_as_uint(1.0f) != 0x3f800000u || __uint_as_float(0x40000000u) != 2.0f || rsqrtf(0.25f) != 2.0f || __fdividef(1, 4) != 0.25f;
    bad += min(3, 4) != 3 || max(3u, 4) != 4 || max(-1.0f, NAN) != -1.0f || min(5ll, -5ll) != -5;
    bad += alignof(uint4) != 16 || alignof(float2) != 8 || alignof(ulonglong2) != 16 || sizeof(uint3) != 12 || sizeof(__nv_bfloat162) != 4 || alignof(half2) != 4;
    float4 v = make_float4(1, 2, 3, 4);
    bad += __ldg(&v).w != 4 || __expf(0.0f) != 1.0f;
    float2 two = __bfloat1622float2(__floats2bfloat162_rn(1.5f, -2.0f));
    bad += two.x != 1.5f || two.y != -2.0f || __half2float(__float2half(65520.0f)) != INFINITY || __bfloat16_as_ushort(__float2bfloat16(NAN)) != 0x7fff;
    return bad;
}

/* ---- the runtime calls ----------------------------------------------------------------------------------------------- */

__global__ void nothing_kernel(int *) {}
__global__ void increment_kernel(int *out) { out[threadIdx.x]++; }

static int case_launch_checks(void) {
    int bad = 0;
    cudaGetLastError();
    bad += launch(nothing_kernel, 1, 1025, out) != cudaErrorInvalidConfiguration || cudaGetLastError() != cudaErrorInvalidConfiguration;
    bad += cudaGetLastError() != cudaSuccess;
    bad += launch(nothing_kernel, 0, 32, out) != cudaErrorInvalidConfiguration;
    bad += launch(nothing_kernel, dim3(1, 65536), 32, out) != cudaErrorInvalidConfiguration;
    bad += launch(nothing_kernel, 1, dim3(1, 1, 65), out) != cudaErrorInvalidConfiguration;
    bad += launch_cluster(nothing_kernel, 6, 32, 4, 0, out) != cudaErrorInvalidClusterSize;
    bad += launch_cluster(nothing_kernel, 16, 32, 16, 0, out) != cudaErrorInvalidClusterSize;
    bad += launch_cluster(nothing_kernel, 32, 32, 32, 0, out) != cudaErrorInvalidClusterSize;
    bad += launch_cluster(nothing_kernel, 1, 32, 1, 48 * 1024, out) != cudaSuccess;
    bad += launch_cluster(nothing_kernel, 1, 32, 1, 48 * 1024 + 1, out) != cudaErrorInvalidValue;
    bad += cudaFuncSetAttribute(nothing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 + 1) != cudaErrorInvalidValue;
    bad += cudaFuncSetAttribute(nothing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000) != cudaSuccess;
    bad += launch_cluster(nothing_kernel, 1, 32, 1, 100000, out) != cudaSuccess;
    bad += launch_cluster(nothing_kernel, 1, 32, 1, 100001, out) != cudaErrorInvalidValue;
    cudaLaunchAttribute cooperative[1];
    cooperative[0].id = cudaLaunchAttributeCooperative;
    cooperative[0].val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 100000;
    config.blockDim = dim3(64, 16);
    config.attrs = cooperative;
    config.numAttrs = 1;
    bad += config.gridDim.x != 100000 || config.blockDim.y != 16;
    bad += cudaLaunchKernelEx(&config, nothing_kernel, out) != cudaErrorCooperativeLaunchTooLarge;
    cudaGetLastError();
    return bad;
}

static int case_memory(void) {
    int bad = 0;
    char *a = NULL, *b = NULL;
    bad += cudaMalloc(&a, 1000) != cudaSuccess || (uintptr_t)a % 256 || (unsigned char)a[999] != simt_poison_byte();
    bad += cudaMalloc(&b, 1000) != cudaSuccess || cudaMemset(b, 3, 1000) != cudaSuccess;
    bad += cudaMemcpy(a, b, 1000, cudaMemcpyDeviceToDevice) != cudaSuccess || a[500] != 3;
    bad += cudaMemcpy(a + 1, b, 1000, cudaMemcpyDefault) != cudaErrorInvalidValue || cudaMemset(a, 0, 1001) != cudaErrorInvalidValue;
    bad += cudaFree(a + 8) != cudaErrorInvalidValue || cudaFree(NULL) != cudaSuccess;
    bad += cudaFree(a) != cudaSuccess || cudaFree(b) != cudaSuccess || cudaFree(b) != cudaErrorInvalidValue;
    void *huge = NULL;
    bad += cudaMalloc(&huge, (size_t)1 << 60) != cudaErrorMemoryAllocation;
    cudaGetLastError();
    return bad;
}

static int case_device(void) {
    int bad = 0, value = 0, blocks = 0;
    struct cudaDeviceProp p;
    bad += cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0) || value != 9;
    bad += cudaGetDeviceProperties(&p, 0) || strcmp(p.name, "simulator");
    bad += cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing_kernel, 256, 0) || blocks != 8;
    bad += cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing_kernel, 256, 100000) || blocks != 2;
    bad += strcmp(cudaGetErrorName(cudaErrorLaunchFailure), "cudaErrorLaunchFailure") != 0;
    return bad;
}

static int case_graph(void) {
    int bad = 0;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    memset(out, 0, 32 * sizeof(int));
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 32;
    config.stream = stream;
    bad += cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess;
    for (int i = 0; i < 3; i++) bad += cudaLaunchKernelEx(&config, increment_kernel, out) != cudaSuccess;
    bad += cudaMemsetAsync(out + 16, 0, sizeof(int), stream) != cudaSuccess;
    bad += cudaStreamEndCapture(stream, &graph) != cudaSuccess || out[0] != 0;
    bad += cudaGraphInstantiate(&executable, graph, 0) != cudaSuccess || cudaGraphDestroy(graph) != cudaSuccess;
    for (int i = 0; i < 2; i++) bad += cudaGraphLaunch(executable, stream) != cudaSuccess;
    bad += cudaStreamSynchronize(stream) != cudaSuccess || out[0] != 6 || out[31] != 6 || out[16] != 0;
    cudaGraphExecDestroy(executable);

    void *p = NULL;
    bad += cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess;
    bad += cudaMalloc(&p, 16) != cudaErrorStreamCaptureUnsupported || p;
    bad += cudaStreamEndCapture(stream, &graph) != cudaErrorStreamCaptureInvalidated || graph;
    bad += cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess;
    bad += cudaStreamSynchronize(stream) != cudaErrorStreamCaptureUnsupported;
    bad += cudaStreamEndCapture(stream, &graph) != cudaErrorStreamCaptureInvalidated;
    bad += cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess;
    bad += launch(increment_kernel, 1, 32, out) != cudaErrorStreamCaptureImplicit;
    bad += cudaStreamEndCapture(stream, &graph) != cudaErrorStreamCaptureInvalidated;
    cudaStreamDestroy(stream);
    cudaGetLastError();
    return bad;
}
/* A capture of mode Global forbids calls of any thread, ThreadLocal those of its own; a thread may ask for less. */
static cudaError_t malloc_beside(cudaStream_t capturing, cudaStreamCaptureMode mode, cudaStreamCaptureMode exchanged, int other, cudaError_t *end) {
    cudaError_t error = cudaErrorUnknown;
    cudaGraph_t graph = NULL;
    auto body = [&] {
        void *p = NULL;
        cudaStreamCaptureMode swapped = exchanged;
        cudaThreadExchangeStreamCaptureMode(&swapped);
        error = cudaMalloc(&p, 16);
        cudaFree(p);
        cudaThreadExchangeStreamCaptureMode(&swapped);
        if (swapped != exchanged) error = cudaErrorUnknown;
    };
    cudaStreamBeginCapture(capturing, mode);
    if (other) std::thread(body).join();
    else body();
    *end = cudaStreamEndCapture(capturing, &graph);
    cudaGraphDestroy(graph);
    cudaGetLastError();
    return error;
}
static int case_capture_modes(void) {
    const cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed};
    int bad = 0;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (cudaStreamCaptureMode mode : modes)
        for (cudaStreamCaptureMode exchanged : modes)
            for (int other = 0; other < 2; other++) {
                bool forbidden = other ? mode == cudaStreamCaptureModeGlobal && exchanged == cudaStreamCaptureModeGlobal
                                       : mode != cudaStreamCaptureModeRelaxed && exchanged != cudaStreamCaptureModeRelaxed;
                cudaError_t end, error = malloc_beside(stream, mode, exchanged, other, &end);
                bad += error != (forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
                bad += end != (forbidden ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
            }
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    std::thread([&] { bad += cudaStreamEndCapture(stream, &graph) != cudaErrorStreamCaptureWrongThread; }).join();
    bad += cudaStreamEndCapture(stream, &graph) != cudaSuccess || cudaGraphDestroy(graph) != cudaSuccess;
    // A limit of shared memory lowered after the capture.
    cudaGraphExec_t executable;
    cudaLaunchConfig_t config = {};
    config.gridDim = 1, config.blockDim = 32, config.dynamicSmemBytes = 60000, config.stream = stream;
    for (int before = 0; before < 2; before++) {
        bad += cudaFuncSetAttribute(increment_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000) != cudaSuccess;
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        bad += cudaLaunchKernelEx(&config, increment_kernel, out) != cudaSuccess || cudaStreamEndCapture(stream, &graph) != cudaSuccess;
        if (before) cudaFuncSetAttribute(increment_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 59999);
        bad += cudaGraphInstantiate(&executable, graph, 0) != (before ? cudaErrorInvalidValue : cudaSuccess);
        cudaGraphDestroy(graph);
        if (before) continue;
        bad += cudaGraphLaunch(executable, stream) != cudaSuccess;
        cudaFuncSetAttribute(increment_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 59999);
        bad += cudaGraphLaunch(executable, stream) != cudaErrorInvalidValue;
        cudaGraphExecDestroy(executable);
    }
    cudaStreamDestroy(stream);
    cudaGetLastError();
    return bad;
}
/* main asks for two devices. The second is older. Attributes, streams and the current device are separate. */
static int case_two_devices(void) {
    int bad = 0, count = 0, value = 0, here = -1;
    struct cudaFuncAttributes a;
    struct cudaPointerAttributes p;
    cudaStream_t streams[2];
    char *memory[2], *host, own;
    bad += cudaGetDeviceCount(&count) || count != 2 || cudaSetDevice(2) != cudaErrorInvalidDevice || cudaSetDevice(-1) != cudaErrorInvalidDevice;
    for (int d = 0; d < 2; d++) {
        bad += cudaSetDevice(d) || cudaStreamCreate(&streams[d]) || cudaMalloc(&memory[d], 100);
        bad += cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, d) || value != 9 - d;
        bad += cudaFuncGetAttributes(&a, nothing_kernel) || (a.ptxVersion <= 80) != (d == 1);
    }
    bad += cudaMallocHost(&host, 100);
    std::thread([&] { bad += cudaGetDevice(&here) || here != 0; }).join();  // a new thread begins with the first
    bad += cudaGetDevice(&here) || here != 1;
    // attributes belong to a device: too much for the second; set for one, not for the other
    bad += cudaFuncSetAttribute(votes_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 99 * 1024 + 1) != cudaErrorInvalidValue;
    cudaSetDevice(0);
    bad += cudaFuncSetAttribute(votes_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 90000) != cudaSuccess;
    bad += cudaFuncGetAttributes(&a, votes_kernel) || a.maxDynamicSharedSizeBytes != 90000;
    cudaSetDevice(1);
    bad += cudaFuncGetAttributes(&a, votes_kernel) || a.maxDynamicSharedSizeBytes != 48 * 1024;
    bad += launch_cluster(votes_kernel, 1, 100, 1, 90000, out) != cudaErrorInvalidValue;
    bad += launch_cluster(cluster_kernel, 2, 32, 2, 0, out) != cudaErrorNotSupported;
    cudaLaunchConfig_t config = {};
    config.gridDim = 1, config.blockDim = 32, config.stream = streams[0];
    bad += cudaLaunchKernelEx(&config, increment_kernel, out) != cudaErrorInvalidResourceHandle;
    config.stream = streams[1];
    bad += cudaLaunchKernelEx(&config, increment_kernel, out) != cudaSuccess;
    // pointers
    typedef int range_function(uintptr_t *base, size_t *bytes, uintptr_t pointer);
    void *range = NULL;
    uintptr_t base = 0;
    size_t bytes = 0;
    cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &range, 12000, cudaEnableDefault);
    for (int d = 0; d < 2; d++) {
        bad += cudaPointerGetAttributes(&p, memory[d] + 99) || p.type != cudaMemoryTypeDevice || p.device != d || p.devicePointer != memory[d] + 99;
        bad += ((range_function *)range)(&base, &bytes, (uintptr_t)memory[d] + 99) || base != (uintptr_t)memory[d] || bytes != 100;
    }
    bad += cudaPointerGetAttributes(&p, host) || p.type != cudaMemoryTypeHost;
    bad += cudaPointerGetAttributes(&p, &own) || p.type != cudaMemoryTypeUnregistered;
    bad += ((range_function *)range)(&base, &bytes, (uintptr_t)&own) == 0;
    for (int d = 0; d < 2; d++) cudaStreamDestroy(streams[d]), cudaFree(memory[d]);
    cudaFreeHost(host);
    cudaSetDevice(0);
    cudaGetLastError();
    return bad;
}
/* Host threads launch at the same time, with workers of their own, which the next host threads reuse. */
static int case_host_threads(void) {
    int bad[4] = {};
    for (int turn = 0; turn < 3; turn++) {
        std::thread threads[4];
        for (int i = 0; i < 4; i++)
            threads[i] = std::thread([&, i] {
                int *mine = NULL;
                cudaMalloc(&mine, 4 * 64 * sizeof(int));
                for (int n = 0; n < 5; n++) {
                    bad[i] += launch_cluster(cluster_kernel, 4, 64, 2, 0, mine) != cudaSuccess;
                    for (int k = 0; k < 4 * 64; k++) bad[i] += mine[k] != 0;
                }
                cudaFree(mine);
            });
        for (std::thread &t : threads) t.join();
    }
    return bad[0] + bad[1] + bad[2] + bad[3];
}

#if !defined(__SANITIZE_THREAD__)
/* A child that is forked when the simulator has run launches too, and so does the parent after it. */
static int case_fork(void) {
    if (case_ticket()) return 1;
    int status = -1;
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        _exit(case_ticket() || case_chain());
    }
    return child < 0 || waitpid(child, &status, 0) != child || status || case_ticket();
}
#endif

/* ---- kernels that are wrong ------------------------------------------------------------------------------------------ */

__global__ void divergent_barriers_kernel(int *) {
    if (threadIdx.x < 32) __syncthreads();
    else
        __syncthreads();
}
__global__ void missing_thread_kernel(int *) {
    if (threadIdx.x != 5) __syncthreads();
}
__global__ void barrier_and_warp_kernel(int *) {
    if (threadIdx.x < 16) __syncthreads();
    else __syncwarp(0xffffffffu);
    __syncthreads();
}
__global__ void missing_lane_kernel(int *) {
    if (threadIdx.x != 3) __shfl_xor_sync(0xffffffffu, 1, 1);
    else __syncwarp(1u << 3), __syncthreads();
}
__global__ void exited_lane_kernel(int *) {
    if (threadIdx.x == 3) return;
    __shfl_xor_sync(0xffffffffu, 1, 1);
}
__global__ void absent_lane_kernel(int *) { __syncwarp(); }         // in a block of 20
__global__ void not_in_mask_kernel(int *) { __ballot_sync(0xfffffffeu, 1); }
__global__ void source_not_in_mask_kernel(int *) {
    if (threadIdx.x < 8) __shfl_sync(0xffu, 1, 9);
}
__global__ void divergent_warp_kernel(int *out) {
    if (threadIdx.x % 2) out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
    else out[threadIdx.x] = __any_sync(0xffffffffu, 1);
}
__global__ void different_masks_kernel(int *) {
    if (threadIdx.x % 2) __syncwarp(0xffffffffu);
    else __syncwarp(0x55555555u | 2u);
}
__global__ void misaligned_kernel(float *in) { __stcs((float4 *)in, __ldg((const float4 *)(in + 1))); }
__global__ void past_shared_kernel(int *out) {
    LK_SHARED(int, small, [4]);
    volatile int *p = small;
    p[threadIdx.x] = 1;                 // of 5 threads
    out[threadIdx.x] = p[0];
}
__global__ void past_dynamic_kernel(int *) {
    LK_DYN_SMEM(int, first);
    (&first)[threadIdx.x] = 1;
}
__global__ void small_dynamic_kernel(int *) {
    LK_DYN_SMEM(dynamic_smem, smem);
    smem.tail = 0;
}
__global__ void big_static_kernel(int *) {
    LK_SHARED(char, a, [30000]);
    LK_SHARED(char, b, [30000]);
    a[0] = b[0] = 0;
}
__global__ void static_and_dynamic_kernel(int *) {
    LK_SHARED(char, a, [30000]);
    a[0] = 0;
}
__global__ void reused_storage_kernel(float *out) {
    typedef cub::BlockReduce<float, 64> reduce;
    LK_SHARED(reduce::TempStorage, storage, );
    float a = reduce(storage).Sum(1.0f), b = reduce(storage).Sum(2.0f);
    if (threadIdx.x == 0) out[0] = a + b;
}
__global__ void cub_shape_kernel(float *out) {
    typedef cub::BlockReduce<float, 64> reduce;
    LK_SHARED(reduce::TempStorage, storage, );
    float a = reduce(storage).Sum(1.0f);
    if (threadIdx.x == 0) out[0] = a;
}
__global__ void peer_not_started_kernel(int *out) {
    LK_SHARED(int, x, );
    if (threadIdx.x == 0) x = 1;
    out[blockIdx.x * 32 + threadIdx.x] = *(int *)simt_cluster_map(&x, simt_cluster_ctarank() ^ 1);
    simt_cluster_arrive();
    simt_cluster_wait();
}
__global__ void peer_gone_kernel(int *out) {
    LK_SHARED(int, x, );
    if (threadIdx.x == 0) x = 1;
    simt_cluster_arrive();
    simt_cluster_wait();
    if (simt_cluster_ctarank() == 0) out[threadIdx.x] = *(int *)simt_cluster_map(&x, 1);
}
__global__ void arrived_and_gone_kernel(int *out) {
    LK_SHARED(int, x, );
    if (threadIdx.x == 0) x = 1;
    simt_cluster_arrive();
    simt_cluster_wait();
    if (simt_cluster_ctarank() == 0) out[threadIdx.x] = *(int *)simt_cluster_map(&x, 1);
    simt_cluster_arrive();
    if (simt_cluster_ctarank() == 0) simt_cluster_wait();       // rank 1 does not wait for rank 0's read
}
__global__ void cluster_left_early_kernel(int *) {
    if (simt_cluster_ctarank() == 1 && threadIdx.x == 7) return;
    simt_cluster_arrive();
    simt_cluster_wait();
}
__global__ void cluster_stuck_kernel(int *) {
    if (simt_cluster_ctarank() == 1) __syncthreads();
    if (simt_cluster_ctarank() == 1 && threadIdx.x == 7) __syncthreads();
    simt_cluster_arrive();
    simt_cluster_wait();
}
__global__ void arrive_twice_kernel(int *) {
    simt_cluster_arrive();
    simt_cluster_arrive();
}
__global__ void wait_alone_kernel(int *) { simt_cluster_wait(); }
__global__ void map_global_kernel(int *out) {
    simt_cluster_arrive();
    simt_cluster_wait();
    simt_cluster_map(out, 1);
}
__global__ void map_rank_kernel(int *) {
    LK_SHARED(int, x, );
    simt_cluster_arrive();
    simt_cluster_wait();
    simt_cluster_map(&x, 2);
}
__global__ void spin_kernel(unsigned *flag) {
    while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE)) simt_yield();
}
__global__ void spin_on_one_kernel(unsigned *flag) {
    if (threadIdx.x == 0) {
        while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE)) simt_yield();
    }
    __syncthreads();
}
__global__ void trap_kernel(int *) { __trap(); }
template <int warps> __global__ void no_barrier_kernel(int *out) {
    LK_SHARED(int, x, [warps * 32]);
    x[threadIdx.x] = 1;
    out[threadIdx.x] = x[warps * 32 - 1 - threadIdx.x];
}

/* ---- mbarriers and asynchronous copies, right and in every way wrong ------------------------------------------------- */

enum {
    SLOTS = 3, SLOT_INTS = 64, SLOT_BYTES = SLOT_INTS * 4, TILES = 8,
    // what can be wrong in a ring
    RIGHT = 0, WRONG_PARITY, WRONG_FIRST_PARITY, PARITY_OF_TWO, MORE_BYTES, FEWER_BYTES, FEWER_OF_TWO, EXPECT_UNUSED,
    NO_EMPTY_WAIT, NO_FULL_WAIT, MISSING_ARRIVE, STORE_TOO_EARLY, NO_FENCE, FENCE_BEFORE_WRITE, NO_READ_WAIT, NO_LAST_WAIT,
    NO_LAST_COMMIT, WRITE_BEFORE_WAIT, NO_INIT, NO_INIT_FENCE, NO_INIT_BARRIER, INIT_TWICE, INIT_BY_TWO, UNALIGNED_SHARED,
    UNALIGNED_GLOBAL, ODD_SIZE, PAST_SLOTS, PAST_INPUT, NOT_GLOBAL, NOBODY_WAITS,
};

/* A ring of three slots per block. Warp 0 loads, warps 1 and 2 add 1 in place, warp 3 stores and gives the slot back. */
template <int wrong> __global__ void ring_kernel(const int *in, int *result) {
    LK_SHARED(uint4, slots, [SLOTS][SLOT_INTS / 4]);
    LK_SHARED(lk_mbarrier, full, [SLOTS]);
    LK_SHARED(lk_mbarrier, ready, [SLOTS]);
    LK_SHARED(lk_mbarrier, empty, [SLOTS]);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    result += blockIdx.x * TILES * SLOT_INTS;
    if ((threadIdx.x == 0 && wrong != NO_INIT) || (wrong == INIT_BY_TWO && threadIdx.x == 33)) {
        for (int s = 0; s < SLOTS; s++) {
            lk_mbarrier_init(&full[s], 1);
            lk_mbarrier_init(&ready[s], 64);
            lk_mbarrier_init(&empty[s], 1);
            if (wrong == INIT_TWICE) lk_mbarrier_init(&full[s], 1);
        }
        if (wrong != NO_INIT_FENCE) lk_fence_mbarrier_init();
    }
    if (wrong != NO_INIT_BARRIER) __syncthreads();
    for (int tile = 0; tile < (wrong == NOBODY_WAITS ? SLOTS : TILES); tile++) {
        int s = tile % SLOTS, parity = tile / SLOTS & 1;
        int *slot = (int *)slots[s];
        if (warp == 0 && lane == 0) {
            if (wrong != NO_EMPTY_WAIT) lk_mbarrier_wait_parity(&empty[s], parity ^ 1);
            int announced = wrong == MORE_BYTES ? SLOT_BYTES + 16 : wrong == FEWER_BYTES ? SLOT_BYTES - 16 : SLOT_BYTES;
            lk_mbarrier_arrive_expect_tx(&full[s], wrong == FEWER_OF_TWO ? SLOT_BYTES / 2 : announced);
            const int *from = wrong == NOT_GLOBAL ? (const int *)slots : in + tile * SLOT_INTS;
            if (wrong == FEWER_OF_TWO) {
                lk_cp_async_bulk_load(slot, from, SLOT_BYTES / 2, &full[s]);
                lk_cp_async_bulk_load(slot + SLOT_INTS / 2, from + SLOT_INTS / 2, SLOT_BYTES / 2, &full[s]);
            } else {
                int bytes = wrong == ODD_SIZE ? SLOT_BYTES - 4 : wrong == PAST_SLOTS ? SLOTS * SLOT_BYTES + 16 : SLOT_BYTES;
                if (wrong == PAST_INPUT && tile == TILES - 1) bytes += 16;
                lk_cp_async_bulk_load(slot + (wrong == UNALIGNED_SHARED ? 2 : 0), from + (wrong == UNALIGNED_GLOBAL), bytes,
                                      &full[s]);
            }
        } else if (warp == 1 || warp == 2) {
            if (wrong == NOBODY_WAITS) continue;
            int *mine = &slot[threadIdx.x - 32];
            if (wrong == WRONG_PARITY) parity = 0;
            if (wrong == WRONG_FIRST_PARITY) parity ^= 1;
            if (wrong == PARITY_OF_TWO) parity += 2;
            if (wrong != NO_FULL_WAIT) lk_mbarrier_wait_parity(&full[s], parity);
            if (wrong == FENCE_BEFORE_WRITE) lk_fence_proxy_async_shared();
            *mine += 1;
            if (wrong != NO_FENCE && wrong != FENCE_BEFORE_WRITE) lk_fence_proxy_async_shared();
            if (wrong != MISSING_ARRIVE || threadIdx.x != 40) lk_mbarrier_arrive(&ready[s]);
        } else if (warp == 3 && lane == 0) {
            if (wrong == NOBODY_WAITS) continue;
            if (wrong != STORE_TOO_EARLY) lk_mbarrier_wait_parity(&ready[s], parity);
            lk_cp_async_bulk_store(result + tile * SLOT_INTS, slot, SLOT_BYTES);
            if (wrong != NO_LAST_COMMIT || tile < TILES - 1) lk_cp_async_bulk_commit_group();
            if (wrong == WRITE_BEFORE_WAIT) slot[0] = 0;
            if (wrong != NO_READ_WAIT && (wrong != NO_LAST_WAIT || tile < TILES - 1)) lk_cp_async_bulk_wait_group_read<0>();
            lk_mbarrier_arrive(&empty[s]);
        }
    }
    if (wrong == EXPECT_UNUSED && threadIdx.x == 0) lk_mbarrier_expect_tx(&full[0], 16);
}

/* The same ring with stores in flight while the next tile is processed, and with waits that ask instead of parking. */
__global__ void deep_ring_kernel(const int *in, int *result) {
    LK_SHARED(uint4, slots, [SLOTS][SLOT_INTS / 4]);
    LK_SHARED(lk_mbarrier, full, [SLOTS]);
    result += blockIdx.x * TILES * SLOT_INTS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; s++) lk_mbarrier_init(&full[s], 1);
        lk_fence_mbarrier_init();
        for (int tile = 0; tile < SLOTS - 1; tile++) {
            lk_mbarrier_arrive_expect_tx(&full[tile], SLOT_BYTES);
            lk_cp_async_bulk_load(slots[tile], in + tile * SLOT_INTS, SLOT_BYTES, &full[tile]);
        }
    }
    __syncthreads();
    for (int tile = 0; tile < TILES; tile++) {
        int s = tile % SLOTS, next = tile + SLOTS - 1;
        if (threadIdx.x == 0 && next < TILES) {
            lk_cp_async_bulk_wait_group_read<0>();      // the store from that slot, one tile ago
            lk_mbarrier_expect_tx(&full[next % SLOTS], SLOT_BYTES);
            lk_cp_async_bulk_load(slots[next % SLOTS], in + next * SLOT_INTS, SLOT_BYTES, &full[next % SLOTS]);
            lk_mbarrier_arrive(&full[next % SLOTS]);
        }
        while (!simt_mbarrier_try_wait(&full[s], tile / SLOTS & 1, 0, __FILE__, __LINE__));
        ((int *)slots[s])[threadIdx.x] += 1;
        lk_fence_proxy_async_shared();
        __syncthreads();
        if (threadIdx.x == 0) {
            lk_cp_async_bulk_store(result + tile * SLOT_INTS, slots[s], SLOT_BYTES);
            lk_cp_async_bulk_commit_group();
        }
    }
    if (threadIdx.x == 0) {
        lk_cp_async_bulk_wait_group<0>();
        result[0] += 1;                                 // it can read what it has stored
    }
}

enum { EXCHANGES = 5, CTA_SCOPE = 100, ROOM_TOO_EARLY, ST_ASYNC_PARITY, BAR_ELSEWHERE, ST_ASYNC_ODD, PEER_GONE, BEFORE_START,
      NO_WAIT };

enum { WORD_OVERWRITTEN, ARRIVAL_TOO_MANY, BYTES_OUT_OF_RANGE, PHASE_OVERRUN, WAIT_TWICE, COUNT_OF_ZERO, UNALIGNED_BARRIER,
      TWO_LOADS, STORE_OF_A_LOAD, SPIN };

/* One mbarrier, one slot, one mistake. */
template <int wrong> __global__ void barrier_kernel(const int *in, int *result) {
    LK_SHARED(uint4, slot, [1]);
    LK_SHARED(lk_mbarrier, bar, [2]);
    if (threadIdx.x == 0) {
        lk_mbarrier_init(bar, wrong != COUNT_OF_ZERO);
        lk_fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (wrong == WORD_OVERWRITTEN) bar[0] = 0;
        if (wrong == UNALIGNED_BARRIER) lk_mbarrier_arrive((lk_mbarrier *)((char *)bar + 4));
        if (wrong == PHASE_OVERRUN) __nanosleep(20), lk_mbarrier_arrive(bar);   // all the others wait by then
        if (wrong == BYTES_OUT_OF_RANGE) lk_mbarrier_expect_tx(bar, 1 << 19), lk_mbarrier_expect_tx(bar, 1 << 19);
        if (wrong == TWO_LOADS || wrong == STORE_OF_A_LOAD) lk_cp_async_bulk_load(slot, in, 16, bar);
        if (wrong == TWO_LOADS) lk_cp_async_bulk_load(slot, in, 16, bar);
        if (wrong == STORE_OF_A_LOAD) lk_cp_async_bulk_store(result, slot, 16);
        if (wrong == ARRIVAL_TOO_MANY) lk_mbarrier_arrive_expect_tx(bar, 16);
        if (wrong != SPIN) lk_mbarrier_arrive(bar);
    }
    while (wrong == SPIN && !simt_mbarrier_try_wait(bar, 0, 0, __FILE__, __LINE__));
    lk_mbarrier_wait_parity(bar, 0);
    if (wrong == WAIT_TWICE) lk_mbarrier_wait_parity(bar, 0);
}

/* Consumers that only read; early: they give the slot back before they read it. */
template <int early> __global__ void read_ring_kernel(const int *in, int *result) {
    LK_SHARED(uint4, slots, [2][8]);
    LK_SHARED(lk_mbarrier, full, [2]);
    LK_SHARED(lk_mbarrier, empty, [2]);
    int lane = threadIdx.x % 32, sum = 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) lk_mbarrier_init(&full[s], 1), lk_mbarrier_init(&empty[s], 32);
        lk_fence_mbarrier_init();
    }
    __syncthreads();
    for (int tile = 0; tile < TILES; tile++) {
        int s = tile % 2, parity = tile / 2 & 1;
        if (threadIdx.x == 0) {
            lk_mbarrier_wait_parity(&empty[s], parity ^ 1);
            lk_mbarrier_arrive_expect_tx(&full[s], 128);
            lk_cp_async_bulk_load(slots[s], in + tile * 32, 128, &full[s]);
        } else if (threadIdx.x >= 32) {
            lk_mbarrier_wait_parity(&full[s], parity);
            if (early) lk_mbarrier_arrive(&empty[s]), __nanosleep(20);
            sum += ((const int *)slots[s])[lane];
            if (!early) lk_mbarrier_arrive(&empty[s]);
        }
    }
    if (threadIdx.x >= 32) result[lane] = sum;
}

/* Each block sends a number to every other block, into two buffers in turn, and sums what it receives. */
template <int wrong> __global__ void st_async_kernel(int *result) {
    LK_SHARED(uint64_t, inbox, [2][8]);
    LK_SHARED(lk_mbarrier, full, [2]);
    LK_SHARED(lk_mbarrier, room, [2]);
    unsigned rank = lk_cluster_ctarank(), blocks = lk_cluster_nctarank(), t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < 2; i++) lk_mbarrier_init(&full[i], 1), lk_mbarrier_init(&room[i], blocks);
        if (wrong != NO_INIT_FENCE) lk_fence_mbarrier_init();
    }
    if (wrong == BEFORE_START && t == 0) lk_mbarrier_arrive_remote(lk_mapa_shared(&full[0], (rank + 1) % blocks));
    lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait();
    if (wrong == PEER_GONE && rank == 1) return;
    int sum = 0;
    for (int round = 0; round < EXCHANGES; round++) {
        int i = round & 1;
        unsigned parity = round >> 1 & 1;
        if (t == 0) lk_mbarrier_arrive_expect_tx(&full[i], 8 * blocks);
        if (t < blocks) {
            // every other block has read the buffer of two rounds ago
            lk_mbarrier_wait_parity_cluster(&room[i], parity ^ 1);
            unsigned to = lk_mapa_shared(&inbox[i][rank], t);
            lk_st_async_b64(to + (wrong == ST_ASYNC_ODD ? 4 : 0), 100 * round + rank,
                            lk_mapa_shared(&full[i], wrong == BAR_ELSEWHERE ? rank : t));
        }
        if (wrong == CTA_SCOPE) lk_mbarrier_wait_parity(&full[i], parity);
        else if (wrong == ST_ASYNC_PARITY) lk_mbarrier_wait_parity_cluster(&full[i], parity ^ 1);
        else if (wrong != NO_WAIT || round) lk_mbarrier_wait_parity_cluster(&full[i], parity);
        __syncthreads();
        if (wrong == ROOM_TOO_EARLY && t < blocks) lk_mbarrier_arrive_remote(lk_mapa_shared(&room[i], t));
        for (unsigned r = 0; r < blocks; r++) sum += (int)inbox[i][r];
        if (wrong == ROOM_TOO_EARLY) continue;
        __syncthreads();
        if (t < blocks) lk_mbarrier_arrive_remote(lk_mapa_shared(&room[i], t));
    }
    lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait();      // no block ends while another still arrives at its mbarriers
    result[blockIdx.x * blockDim.x + t] = sum;
}

enum { STAGE_VECTORS = SLOT_INTS / 4, NO_COPY_WAIT = 200, WAIT_OF_ANOTHER, NO_COPY_BARRIER, WAIT_BEHIND_BARRIER, NO_COMMIT,
       EXIT_IN_FLIGHT, COPY_UNALIGNED_SHARED, COPY_UNALIGNED_GLOBAL, COPY_SIZE, COPY_TO_GLOBAL, COPY_FROM_SHARED,
       COPY_PAST_STAGES, COPY_PAST_INPUT, TOO_MANY_COPIES, PREFETCH_UNALIGNED, PREFETCH_SIZE,
       PREFETCH_PAST_INPUT, PREFETCH_BEYOND };

/* Two stages of cp.async: each thread sums what its neighbour has copied while its own next vector is in flight. */
template <int wrong> __global__ void stages_kernel(const int *in, int *result) {
    LK_SHARED(uint4, stages, [2][STAGE_VECTORS]);
    const int t = threadIdx.x, last = STAGE_VECTORS - 1;
    int sum = 0;
    if (t == 0) lk_cp_async_bulk_prefetch_l2(in + (wrong == PREFETCH_UNALIGNED),
                                             TILES * SLOT_INTS * 4 + (wrong == PREFETCH_PAST_INPUT) * 16 + (wrong == PREFETCH_SIZE) * 8);
    if (wrong == PREFETCH_BEYOND) lk_prefetch_l2(in + TILES * SLOT_INTS + t);
    for (int tile = 0; tile <= TILES; tile++) {         // copies tile `tile`, sums the previous one
        if (tile < TILES) {
            const int *from = in + tile * SLOT_INTS + 4 * t + (wrong == COPY_UNALIGNED_GLOBAL);
            if (wrong == COPY_FROM_SHARED) from = (const int *)&stages[1][0];
            if (wrong == COPY_PAST_INPUT && tile == TILES - 1 && t == last) from += 4;
            int offset = (tile % 2 * STAGE_VECTORS + t) * 16 + (wrong == COPY_UNALIGNED_SHARED ? 4 : 0);
            if (wrong == COPY_PAST_STAGES && tile == 1 && t == last) offset += 16;
            if (wrong == COPY_SIZE) simt_cp_async(stages[0] + t, from, 12);
            lk_cp_async_16(wrong == COPY_TO_GLOBAL ? (void *)result : stages, offset, from);
            for (int i = 0; wrong == TOO_MANY_COPIES && i < 200; i++) lk_cp_async_16(stages, offset, from);
            if (wrong != NO_COMMIT) lk_cp_async_commit_group();
        } else if (wrong != EXIT_IN_FLIGHT && wrong != NO_COMMIT) {
            lk_cp_async_commit_group();                 // an empty group, so that the wait is the same
        }
        if (tile == 0) continue;
        if (wrong == WAIT_OF_ANOTHER) lk_cp_async_wait_group<2>();
        else if (wrong != NO_COPY_WAIT && wrong != WAIT_BEHIND_BARRIER) lk_cp_async_wait_group<1>();
        if (wrong != NO_COPY_BARRIER) __syncthreads();
        if (wrong == WAIT_BEHIND_BARRIER) lk_cp_async_wait_group<1>();
        if (wrong == NO_COPY_BARRIER) __nanosleep(20);
        const int *mine = (const int *)&stages[(tile - 1) % 2][last - t];
        for (int i = 0; i < 4; i++) sum += mine[i];
        __syncthreads();
    }
    result[t] = sum;
    if (wrong == NO_COPY_WAIT || wrong == WAIT_OF_ANOTHER) lk_cp_async_wait_group<0>();
}

/* The sizes that no function of simt_ptx.h has, groups of several copies, and a wait for all except two. */
__global__ void small_copies_kernel(const int *in, int *result) {
    LK_SHARED(uint4, slots, [3][32]);
    const int t = threadIdx.x;
    const int *from = in + 4 * t;
    for (int g = 0; g < 3; g++, from += 128) {
        simt_cp_async((int *)&slots[g][t], from, 4);
        simt_cp_async((int *)&slots[g][t] + 2, from + 2, 8);
        simt_cp_async((int *)&slots[g][t] + 1, from + 1, 4);
        lk_cp_async_commit_group();
    }
    lk_cp_async_wait_group<2>();
    int bad = 0;
    for (int i = 0; i < 4; i++) bad += ((const int *)&slots[0][t])[i] != in[4 * t + i];
    lk_cp_async_wait_group<0>();
    for (int g = 1; g < 3; g++)
        for (int i = 0; i < 4; i++) bad += ((const int *)&slots[g][t])[i] != in[128 * g + 4 * t + i];
    result[t] = bad;
}

enum { RING_BLOCKS = 5 };
static int *ring_in;            // TILES * SLOT_INTS ints, device memory
static void fill_ring(void) {
    for (int i = 0; i < TILES * SLOT_INTS; i++) ring_in[i] = 3 * i;
    for (int i = 0; i < RING_BLOCKS * TILES * SLOT_INTS; i++) out[i] = -1;
}
template <int wrong> static cudaError_t launch_ring(void) {
    fill_ring();
    return launch(ring_kernel<wrong>, wrong ? 1 : RING_BLOCKS, 128, (const int *)ring_in, out);
}
template <int wrong> static cudaError_t launch_barrier(void) {
    return launch(barrier_kernel<wrong>, 1, 32, (const int *)ring_in, out);
}
/* With copies in flight as long as possible: an eager copy has landed before the mistake. */
template <int wrong> static cudaError_t launch_lazily(void) {
    simt_set_copies("lazy");
    cudaError_t error = launch_barrier<wrong>();
    simt_set_copies(NULL);
    return error;
}
template <int wrong> static cudaError_t launch_st_async(void) {
    return launch_cluster(st_async_kernel<wrong>, 4, 32, 4, 0, out);
}

template <int wrong> static cudaError_t launch_stages(void) {
    fill_ring();
    return launch(stages_kernel<wrong>, 1, STAGE_VECTORS, (const int *)ring_in, out);
}
static int count_stage_errors(void) {
    int bad = 0;
    for (int t = 0; t < STAGE_VECTORS; t++) {
        int sum = 0;
        for (int tile = 0; tile < TILES; tile++)
            for (int i = 0; i < 4; i++) sum += ring_in[tile * SLOT_INTS + 4 * (STAGE_VECTORS - 1 - t) + i];
        bad += out[t] != sum;
    }
    return bad;
}

static int count_ring_errors(int blocks, int first) {
    int bad = 0, count = TILES * SLOT_INTS;
    for (int i = 0; i < blocks * count; i++) bad += out[i] != 3 * (i % count) + 1 + (i % count ? 0 : first);
    return bad;
}
static int count_sum_errors(void) {
    int bad = 0;
    for (int lane = 0; lane < 32; lane++) bad += out[lane] != 3 * (32 * TILES * (TILES - 1) / 2 + TILES * lane);
    return bad;
}
static int case_ring(void) {
    if (launch_ring<RIGHT>() || count_ring_errors(RING_BLOCKS, 0)) return 1;
    fill_ring();
    if (launch(read_ring_kernel<0>, 1, 64, (const int *)ring_in, out) || count_sum_errors()) return 2;
    fill_ring();
    return launch(deep_ring_kernel, RING_BLOCKS, SLOT_INTS, (const int *)ring_in, out) || count_ring_errors(RING_BLOCKS, 1);
}
/* Each order of copies under each schedule, not only the one that belongs to it. */
static int case_ring_orders(void) {
    int bad = 0;
    for (const char *order : {"lazy", "eager", "random:5", "random:6"}) {
        simt_set_copies(order);
        bad += case_ring();
    }
    simt_set_copies(NULL);
    return bad;
}
static int case_stages(void) {
    int bad = 0;
    for (const char *order : {"lazy", "eager", "random:5", "random:6"}) {
        simt_set_copies(order);
        bad += launch_stages<RIGHT>() || count_stage_errors();
        bad += launch(small_copies_kernel, 1, 32, (const int *)ring_in, out) || count_other_than(0, 32);
    }
    simt_set_copies(NULL);
    return bad;
}
static int case_st_async(void) {
    int bad = 0;
    for (unsigned blocks = 2; blocks <= 4; blocks += 2) {
        bad += launch_cluster(st_async_kernel<RIGHT>, 4, 32, blocks, 0, out) != cudaSuccess;
        int sum = EXCHANGES * ((int)blocks * (int)(blocks - 1) / 2) + 100 * (int)blocks * EXCHANGES * (EXCHANGES - 1) / 2;
        bad += count_other_than(sum, 4 * 32);
    }
    return bad;
}

/* ---- tensor copies, wgmma, named barriers, right and in every way wrong ---------------------------------------------- */

static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, int rank, void *at, const cuuint64_t *size,
                       const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapSwizzle swizzle) {
    void *found = NULL;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result)) exit(3);
    if (result != cudaDriverEntryPointSuccess) exit(3);
    return ((PFN_cuTensorMapEncodeTiled_v12000)found)(map, type, rank, at, size, strides, box, steps,
                                                      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
/* A matrix of `rows` rows of `cols` elements, `stride` elements apart. */
static CUtensorMap map_of(CUtensorMapDataType type, void *at, int rows, int cols, int stride, int box_rows, int box_cols,
                          CUtensorMapSwizzle swizzle) {
    const int element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    const cuuint64_t size[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * element};
    const cuuint32_t box[2] = {(cuuint32_t)box_cols, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    CUtensorMap map;
    if (encode(&map, type, 2, at, size, strides, box, steps, swizzle)) printf("FAIL  a map was refused\n"), exit(3);
    return map;
}
static CUtensorMap bf16_map(void *at, int rows, int cols, int stride, int box_rows, int box_cols = 64) {
    return map_of(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, at, rows, cols, stride, box_rows, box_cols, CU_TENSOR_MAP_SWIZZLE_128B);
}

static int case_encode(void) {
    alignas(64) char at[256];
    void *found = at;
    cudaDriverEntryPointQueryResult result;
    CUtensorMap map;
    const cuuint64_t size[3] = {100, 50, 7}, strides[2] = {208, 208 * 50};
    const cuuint32_t box[3] = {64, 8, 1}, steps[3] = {1, 1, 1};
    const CUtensorMapDataType bf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, f32 = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    const CUtensorMapSwizzle none = CU_TENSOR_MAP_SWIZZLE_NONE, b128 = CU_TENSOR_MAP_SWIZZLE_128B;
    int bad = 0;
    for (int rank = 1; rank <= 3; rank++) bad += encode(&map, bf16, rank, at, size, strides, box, steps, b128) != CUDA_SUCCESS;
    bad += encode((CUtensorMap *)(at + 16), bf16, 2, at, size, strides, box, steps, b128) != CUDA_ERROR_INVALID_VALUE;
    bad += encode(&map, bf16, 0, at, size, strides, box, steps, b128) != CUDA_ERROR_INVALID_VALUE;
    bad += encode(&map, bf16, 6, at, size, strides, box, steps, b128) != CUDA_ERROR_INVALID_VALUE;
    bad += encode(&map, bf16, 2, at + 8, size, strides, box, steps, b128) != CUDA_ERROR_INVALID_VALUE;
    bad += encode(&map, f32, 2, at, size, strides, box, steps, b128) != CUDA_ERROR_INVALID_VALUE;        // 256 bytes per row
    bad += encode(&map, f32, 2, at, size, strides, box, steps, none) != CUDA_SUCCESS;
    bad += encode(&map, bf16, 2, at, size, strides, box, steps, CU_TENSOR_MAP_SWIZZLE_64B) != CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < 2; i++) {
        cuuint64_t sizes[2] = {100, 50};
        cuuint32_t boxes[2] = {64, 8}, stepping[2] = {1, 1};
        sizes[i] = 0;
        bad += encode(&map, bf16, 2, at, sizes, strides, box, steps, none) != CUDA_ERROR_INVALID_VALUE;
        sizes[i] = ((cuuint64_t)1 << 32) + 1;
        bad += encode(&map, bf16, 2, at, sizes, strides, box, steps, none) != CUDA_ERROR_INVALID_VALUE;
        boxes[i] = 0;
        bad += encode(&map, bf16, 2, at, size, strides, boxes, steps, none) != CUDA_ERROR_INVALID_VALUE;
        boxes[i] = 264;
        bad += encode(&map, bf16, 2, at, size, strides, boxes, steps, none) != CUDA_ERROR_INVALID_VALUE;
        stepping[i] = 9;
        bad += encode(&map, bf16, 2, at, size, strides, box, stepping, none) != CUDA_ERROR_INVALID_VALUE;
        stepping[i] = 2;
        bad += encode(&map, bf16, 2, at, size, strides, box, stepping, none) != CUDA_ERROR_NOT_SUPPORTED;
    }
    const cuuint64_t odd[1] = {200}, far[1] = {(cuuint64_t)1 << 40};
    const cuuint32_t narrow[2] = {60, 8};
    bad += encode(&map, bf16, 2, at, size, odd, box, steps, none) != CUDA_ERROR_INVALID_VALUE;
    bad += encode(&map, bf16, 2, at, size, far, box, steps, none) != CUDA_ERROR_INVALID_VALUE;
    bad += encode(&map, bf16, 2, at, size, strides, narrow, steps, none) != CUDA_ERROR_INVALID_VALUE;
    bad += encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 2, at, size, strides, box, steps, none) != CUDA_ERROR_NOT_SUPPORTED;
    bad += cudaGetDriverEntryPointByVersion("cuInit", &found, 12000, cudaEnableDefault, &result) || found
           || result != cudaDriverEntryPointSymbolNotFound;
    bad += cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 11080, cudaEnableDefault, &result) || found
           || result != cudaDriverEntryPointVersionNotSufficent;
    return bad;
}

struct alignas(1024) area_4k { unsigned char bytes[4096]; };

enum { MAP_ROWS = 21, MAP_STRIDE = 80, BOX_BYTES = 2048,
       // what can be wrong with a box
       BOX_UNALIGNED = 300, BOX_BYTES_SHORT, BOX_PAST_AREA, BOX_RANK, BOX_MAP_SHARED, BOX_MAP_UNALIGNED, BOX_NOT_A_MAP,
       BOX_OVERWRITTEN, BOX_NO_FENCE, BOX_SOURCE_CHANGED, BOX_NOT_WAITED, BOX_NARROW, BOX_PAST_MATRIX, BOX_STORE_UNALIGNED,
       BOX_ADD_BF16, BOX_FENCE_FIRST, BOX_NO_LOAD_WAIT, BOX_PREFETCH };

/* Loads the box at (x, y), writes out what is in shared memory, and stores the box, or adds it, at (to_x, to_y). */
template <int wrong>
__global__ void box_kernel(const CUtensorMap from, const CUtensorMap to, int x, int y, int to_x, int to_y, int add,
                           unsigned char *raw) {
    LK_SHARED(area_4k, area, );
    LK_SHARED(lk_mbarrier, full, );
    const int t = threadIdx.x;
    unsigned char *slot = area.bytes + (wrong == BOX_UNALIGNED ? 64 : wrong == BOX_PAST_AREA ? 3072 : 0);
    if (t == 0) {
        lk_mbarrier_init(&full, 1);
        lk_fence_mbarrier_init();
        const CUtensorMap *map = &from;
        if (wrong == BOX_MAP_SHARED) map = (const CUtensorMap *)area.bytes;
        if (wrong == BOX_MAP_UNALIGNED) map = (const CUtensorMap *)((const char *)&from + 16);
        if (wrong == BOX_NOT_A_MAP) map = (const CUtensorMap *)raw;
        lk_prefetch_tensormap(wrong == BOX_PREFETCH ? (const CUtensorMap *)raw : &from);
        lk_mbarrier_arrive_expect_tx(&full, wrong == BOX_BYTES_SHORT ? BOX_BYTES - 16 : BOX_BYTES);
        lk_cp_async_bulk_tensor_2d_load(slot, map, x, y, &full);
        if (wrong == BOX_OVERWRITTEN) lk_cp_async_bulk_tensor_2d_load(slot + 1024, map, x, y, &full);
    }
    __syncthreads();
    if (wrong != BOX_NO_LOAD_WAIT || t < 32) lk_mbarrier_wait_parity(&full, 0);
    for (int i = t; i < BOX_BYTES; i += blockDim.x) raw[i] = slot[i];
    if (wrong == BOX_FENCE_FIRST) lk_fence_proxy_async_shared();
    __syncthreads();
    if (wrong == BOX_NO_FENCE || wrong == BOX_FENCE_FIRST) slot[t] += 1;
    __syncthreads();
    if (t == 0) {
        const char *source = (const char *)slot + (wrong == BOX_STORE_UNALIGNED ? 64 : 0);
        if (add) lk_cp_reduce_async_bulk_tensor_2d_add(&to, to_x, to_y, source);
        else lk_cp_async_bulk_tensor_2d_store(&to, to_x, to_y, source);
        lk_cp_async_bulk_commit_group();
        if (wrong == BOX_SOURCE_CHANGED) slot[5] = 7;   // no read before it: TSan remembers only four accesses per word
        if (wrong != BOX_NOT_WAITED) lk_cp_async_bulk_wait_group<0>();
    }
}

static unsigned char *tensor_in, *tensor_out, *tensor_raw;  // MAP_ROWS rows of MAP_STRIDE floats, device memory
enum { TENSOR_BYTES = MAP_ROWS * MAP_STRIDE * 4 };

/* A box of every swizzle and element, loaded from and stored to (x, y), also where it crosses the edges of the matrix. */
static int count_box_errors(CUtensorMapDataType type, CUtensorMapSwizzle swizzle, int x, int y, int add) {
    const int element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2, span = swizzle ? 16 << swizzle : 128;
    const int box_cols = span / element, box_rows = BOX_BYTES / span, cols = MAP_STRIDE - 13, to_x = x + 3, to_y = y - 2;
    for (int i = 0; i < TENSOR_BYTES / 4; i++) {
        const float value = (float)(i % 251);
        if (element == 4) memcpy(tensor_in + 4 * i, &value, 4);
        else for (int j = 2 * i; j < 2 * i + 2; j++) ((unsigned short *)tensor_in)[j] = (unsigned short)j;
        const float before = 1000.0f;
        memcpy(tensor_out + 4 * i, &before, 4);
    }
    const CUtensorMap from = map_of(type, tensor_in, MAP_ROWS, cols, MAP_STRIDE, box_rows, box_cols, swizzle);
    const CUtensorMap to = map_of(type, tensor_out, MAP_ROWS, cols, MAP_STRIDE, box_rows, box_cols, swizzle);
    if (launch(box_kernel<RIGHT>, 1, 64, from, to, x, y, to_x, to_y, add, tensor_raw)) return 1;
    int bad = 0;
    for (int r = 0; r < box_rows; r++)
        for (int c = 0; c < box_cols; c++) {
            const bool inside = y + r >= 0 && y + r < MAP_ROWS && x + c >= 0 && x + c < cols;
            const int byte = r * span + c * element, mask = swizzle ? (1 << swizzle) - 1 : 0;
            const int at = byte ^ ((byte >> 7 & mask) << 4);
            const unsigned char zero[4] = {0, 0, 0, 0};
            const unsigned char *expected = inside ? tensor_in + ((y + r) * MAP_STRIDE + x + c) * element : zero;
            bad += memcmp(tensor_raw + at, expected, element) != 0;
        }
    for (int r = 0; r < MAP_ROWS; r++)
        for (int c = 0; c < MAP_STRIDE; c++) {
            const int in_row = r - to_y, in_col = c - to_x;
            const bool stored = in_row >= 0 && in_row < box_rows && in_col >= 0 && in_col < box_cols && c < cols;
            const int from_row = y + in_row, from_col = x + in_col;
            const bool inside = from_row >= 0 && from_row < MAP_ROWS && from_col >= 0 && from_col < cols;
            const unsigned char *got = tensor_out + (r * MAP_STRIDE + c) * element;
            if (element == 4) {
                float value, expected = 1000.0f, source = 0;
                memcpy(&value, got, 4);
                if (inside) memcpy(&source, tensor_in + (from_row * MAP_STRIDE + from_col) * element, 4);
                if (stored) expected = add ? expected + source : source;
                bad += value != expected;
            } else {
                unsigned short value, expected = (r * MAP_STRIDE + c) % 2 ? 0x447a : 0, source = 0;     // halves of 1000.0f
                memcpy(&value, got, 2);
                if (inside) memcpy(&source, tensor_in + (from_row * MAP_STRIDE + from_col) * element, 2);
                bad += value != (stored ? source : expected);
            }
        }
    return bad;
}
static int case_boxes(void) {
    const int places[][2] = {{8, 4}, {0, 0}, {60, 3}, {5, 14}, {-5, -3}, {-200, 2}, {61, 19}, {3, -100}};
    int bad = 0;
    for (const char *order : {"lazy", "eager", "random:5"}) {
        simt_set_copies(order);
        for (int swizzle = 0; swizzle <= 3; swizzle++)
            for (auto &at : places) {
                const CUtensorMapSwizzle s = (CUtensorMapSwizzle)swizzle;
                bad += count_box_errors(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, s, at[0], at[1], 0);
                bad += count_box_errors(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, s, at[0], at[1], 0);
                bad += count_box_errors(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, s, at[0], at[1], 1);
            }
    }
    bad += count_box_errors(CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, 1, 1, 0);
    simt_set_copies(NULL);
    return bad;
}
template <int wrong> static cudaError_t launch_box(void) {
    memset(tensor_in, 0, TENSOR_BYTES);
    const CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    const CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    const cuuint64_t size[3] = {64, 8, 2}, strides[2] = {4 * MAP_STRIDE, 8 * 4 * MAP_STRIDE};
    const cuuint32_t box[3] = {32, 8, 2}, steps[3] = {1, 1, 1};
    CUtensorMap from = map_of(type, tensor_in, wrong == BOX_PAST_MATRIX ? MAP_ROWS + 1 : MAP_ROWS, MAP_STRIDE, MAP_STRIDE, 16,
                              wrong == BOX_NARROW ? 16 : 32, swizzle);
    if (wrong == BOX_RANK) encode(&from, type, 3, tensor_in, size, strides, box, steps, swizzle);
    const CUtensorMap to = wrong == BOX_ADD_BF16 ? bf16_map(tensor_out, MAP_ROWS, MAP_STRIDE, MAP_STRIDE, 16)
                                                 : map_of(type, tensor_out, MAP_ROWS, MAP_STRIDE, MAP_STRIDE, 16, 32, swizzle);
    simt_set_copies(wrong == BOX_OVERWRITTEN ? "lazy" : NULL);
    cudaError_t error = launch(box_kernel<wrong>, 1, 64, from, to, 0, 6, 0, 0, (int)(wrong == BOX_ADD_BF16), tensor_raw);
    simt_set_copies(NULL);
    return error;
}

/* Every block adds the same box of ones. */
__global__ void add_boxes_kernel(const CUtensorMap to) {
    LK_SHARED(area_4k, area, );
    for (int i = threadIdx.x; i < BOX_BYTES / 4; i += 32) ((float *)area.bytes)[i] = 1.0f;
    lk_fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x == 0) {
        lk_cp_reduce_async_bulk_tensor_2d_add(&to, 3, 2, area.bytes);
        lk_cp_async_bulk_commit_group();
        lk_cp_async_bulk_wait_group_read<0>();
    }
}
static int case_additions(void) {
    float *sum = (float *)tensor_out;
    for (int i = 0; i < TENSOR_BYTES / 4; i++) sum[i] = 5.0f;
    const CUtensorMap to = map_of(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, sum, MAP_ROWS, MAP_STRIDE, MAP_STRIDE, 16, 32,
                                  CU_TENSOR_MAP_SWIZZLE_128B);
    int bad = launch(add_boxes_kernel, 40, 32, to) != cudaSuccess;
    for (int r = 0; r < MAP_ROWS; r++)
        for (int c = 0; c < MAP_STRIDE; c++)
            bad += sum[r * MAP_STRIDE + c] != (r >= 2 && r < 18 && c >= 3 && c < 35 ? 45.0f : 5.0f);
    return bad;
}

enum { CAST_OUT_OF_CLUSTER = 400, CAST_PEER_GONE, CAST_BEFORE_START, CAST_NO_BARRIER };

/* Each block sends its row of a matrix to all blocks, in two rounds; each writes out all that it received. */
template <int wrong> __global__ void cast_kernel(const CUtensorMap from, int *result) {
    LK_SHARED(area_4k, area, );
    LK_SHARED(lk_mbarrier, full, [2]);
    LK_SHARED(lk_mbarrier, empty, );
    const unsigned rank = lk_cluster_ctarank(), blocks = lk_cluster_nctarank(), t = threadIdx.x;
    if (t == 0) {
        lk_mbarrier_init(&full[0], 1), lk_mbarrier_init(&full[1], 1), lk_mbarrier_init(&empty, blocks);
        lk_fence_mbarrier_init();
    }
    const unsigned mask = wrong == CAST_OUT_OF_CLUSTER ? 1u << blocks : (1u << blocks) - 1;
    if (wrong == CAST_BEFORE_START && t == 0)
        lk_cp_async_bulk_tensor_2d_load_multicast(area.bytes, &from, 0, 0, &full[0], (uint16_t)mask);
    lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait();
    if (wrong == CAST_PEER_GONE && rank == 1) return;
    for (int round = 0; round < 2; round++) {
        if (t == 0) {
            if (round && wrong != CAST_NO_BARRIER) lk_mbarrier_wait_parity_cluster(&empty, 0);
            lk_mbarrier_arrive_expect_tx(&full[round], 128 * blocks);
            lk_cp_async_bulk_tensor_2d_load_multicast(area.bytes + 128 * rank, &from, 0, (int)(rank + round * blocks),
                                                      &full[round], (uint16_t)mask);
        }
        lk_mbarrier_wait_parity(&full[round], 0);
        const int *got = (const int *)area.bytes;
        for (unsigned i = t; i < 32 * blocks; i += 32) result[(blockIdx.x * 2 + round) * 128 + i] = got[i];
        __syncwarp();
        if (t < blocks && !round) lk_mbarrier_arrive_remote(lk_mapa_shared(&empty, t));
    }
    lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait();
}
template <int wrong> static cudaError_t launch_cast(unsigned blocks) {
    const CUtensorMap from = map_of(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, tensor_in, MAP_ROWS, 32, MAP_STRIDE, 1, 32,
                                    CU_TENSOR_MAP_SWIZZLE_NONE);
    for (int i = 0; i < TENSOR_BYTES / 4; i++) ((int *)tensor_in)[i] = 7 * i;
    return launch_cluster(cast_kernel<wrong>, 4, 32, blocks, 0, from, out);
}
template <int wrong> static cudaError_t launch_cast_of_two(void) { return launch_cast<wrong>(2); }
static int case_multicast(void) {
    int bad = 0;
    for (const char *order : {"lazy", "eager", "random:5"}) {
        simt_set_copies(order);
        for (unsigned blocks = 2; blocks <= 4; blocks += 2) {
            if (launch_cast<RIGHT>(blocks)) return 1;
            for (unsigned b = 0; b < 4; b++)
                for (unsigned round = 0; round < 2; round++)
                    for (unsigned i = 0; i < 32 * blocks; i++)
                        bad += out[(b * 2 + round) * 128 + i] != 7 * (int)((i / 32 + round * blocks) * MAP_STRIDE + i % 32);
        }
    }
    simt_set_copies(NULL);
    return bad;
}

static unsigned short *mat_a, *mat_b, *mat_out;             // bf16, device memory
static float *sums_out;
enum { MAT_ELEMENTS = 256 * 264 };
static float bf16(unsigned short x) { return simt_bf16_bits_to_float(x); }
static void fill_matrices(void) {
    for (int i = 0; i < MAT_ELEMENTS; i++) {
        mat_a[i] = simt_float_to_bf16_bits((float)((int)(i * 2654435761u >> 24) - 127) / 16.0f); // without a period
        mat_b[i] = simt_float_to_bf16_bits((float)((int)(i * 3266489917u >> 24) - 127) / 32.0f);
        mat_out[i] = 0x4242;
    }
}

struct alignas(1024) product_area { unsigned short a[64 * 64], b[256 * 64]; };

enum { P_NO_FENCE = 500, P_FENCE_MISSING_LATER, P_NO_COMMIT, P_NO_COMMIT_AT_ALL, P_NO_WAIT, P_READ_EARLY, P_WRITE_EARLY,
       P_OTHER_DESCRIPTOR, P_ONE_MISSING, P_OTHER_LINE, P_OTHER_ACCUMULATE, P_START, P_STRIDE, P_SWIZZLE, P_PAST,
       P_THREADS_WROTE, P_OPERAND_CHANGED, P_OPERAND_LOADED, P_NOT_LANDED, P_REGISTER_NO_FENCE, P_OTHER_SUMS, P_HALF_GROUP,
       P_NO_LOAD_WAIT, P_TOO_MANY, P_EXIT_UNWAITED, P_WROTE_AGAIN,
       P_SPREAD };                      // right: n-major, with the atoms of 64 columns next to one another, those of 8 values of k not

/* 64 x n sums over 64 values of k, in two groups of two products each; d begins as 1. */
template <int wrong, int n, int transpose_a, int transpose_b, int in_registers>
__global__ void product_kernel(const CUtensorMap map_a, const CUtensorMap map_b, const unsigned short *a_global,
                               float *result) {
    LK_DYN_SMEM(product_area, area);
    LK_SHARED(lk_mbarrier, full, );
    const int t = threadIdx.x, lane = t % 32, row = t / 32 * 16 + lane / 4;
    if (t == 0) {
        lk_mbarrier_init(&full, 1);
        lk_fence_mbarrier_init();
        lk_mbarrier_arrive_expect_tx(&full, sizeof area.a + n * 128);
        lk_cp_async_bulk_tensor_2d_load(area.a, &map_a, 0, 0, &full);
        // n-major: every 64 columns have a box of 64 rows, one per k
        for (int i = 0; wrong == P_SPREAD && i < n / 8; i++)
            lk_cp_async_bulk_tensor_2d_load(area.b + i * 512, &map_b, i % (n / 64) * 64, i / (n / 64) * 8, &full);
        for (int i = 0; wrong != P_SPREAD && i < n; i += transpose_b ? 64 : n)
            lk_cp_async_bulk_tensor_2d_load(area.b + i * 64, &map_b, transpose_b ? i : 0, 0, &full);
    }
    __syncthreads();
    if (wrong != P_NOT_LANDED && (wrong != P_NO_LOAD_WAIT || t < 96)) lk_mbarrier_wait_parity(&full, 0);
    if (wrong == P_THREADS_WROTE || wrong == P_WROTE_AGAIN) {
        area.a[t] = 0;
        if (wrong == P_WROTE_AGAIN) lk_fence_proxy_async_shared();
        __syncthreads();
    }
    float d[n / 2], other[n / 2];
    uint32_t fragment[4];
    for (int i = 0; i < n / 2; i++) d[i] = other[i] = 1.0f;
    uint64_t a = lk_wgmma_descriptor(area.a, 16, 1024), b = lk_wgmma_descriptor(area.b, transpose_b ? 8192 : 16, 1024);
    if (wrong == P_SPREAD) b = lk_wgmma_descriptor(area.b, 1024, n / 64 * 1024);
    if (wrong == P_START) b = lk_wgmma_descriptor(area.b + 64, 16, 1024);
    if (wrong == P_STRIDE) b = lk_wgmma_descriptor(area.b, 16, 512);
    if (wrong == P_SWIZZLE) b ^= (uint64_t)3 << 62;
    if (wrong == P_PAST) b = lk_wgmma_descriptor(area.b + 64 * 248, 16, 1024);
    if (wrong == P_OTHER_DESCRIPTOR && t == 77) a += 2;
    if (wrong != P_NO_FENCE) lk_wgmma_fence();
    for (int k = 0; k < 4; k++) {
        const uint64_t a_k = a + (transpose_a ? 2048 / 16 : 2) * k;
        const uint64_t b_k = b + (wrong == P_SPREAD ? n / 64 * 2048 / 16 : transpose_b ? 2048 / 16 : 2) * k;
        if (wrong == P_FENCE_MISSING_LATER && k == 2) lk_wgmma_wait_group<0>(), d[3] += 1.0f;
        if (wrong == P_WROTE_AGAIN && k == 2) lk_wgmma_wait_group<0>(), area.a[t] = 7, __syncthreads();
        if (wrong == P_REGISTER_NO_FENCE && k == 2) lk_wgmma_wait_group<0>();
        if (in_registers) {
            for (int i = 0; i < 4; i++)
                memcpy(&fragment[i], &a_global[(row + i % 2 * 8) * 64 + 16 * k + i / 2 * 8 + lane % 4 * 2], 4);
            lk_wgmma_m64k16_bf16_register<n, 0, transpose_b>(d, fragment, b_k, 1);
        } else if (wrong == P_OTHER_LINE && t == 9) {
            lk_wgmma_m64k16_bf16<n, transpose_a, transpose_b>(d, a_k, b_k, 1);
        } else if (wrong != P_ONE_MISSING || t != 5 || k != 3) {
            lk_wgmma_m64k16_bf16<n, transpose_a, transpose_b>(wrong == P_OTHER_SUMS && t == 9 && k == 1 ? other : d, a_k, b_k,
                                                              wrong == P_OTHER_ACCUMULATE ? t != 9 : 1);
        }
        for (int i = 0; wrong == P_TOO_MANY && i < 100; i++) lk_wgmma_m64k16_bf16<n, transpose_a, transpose_b>(d, a_k, b_k, 1);
        if ((k == 1 || (k == 3 && wrong != P_NO_COMMIT)) && wrong != P_NO_COMMIT_AT_ALL) lk_wgmma_commit_group();
    }
    if (wrong == P_READ_EARLY) {
        lk_wgmma_wait_group<1>();
        for (int i = 0; i < n / 2; i++) result[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
        lk_wgmma_wait_group<0>();
        return;
    }
    if (wrong == P_WRITE_EARLY && t == 7) d[2] = 0.0f;
    if (wrong == P_OPERAND_CHANGED) {
        __syncthreads();                            // all have issued it
        if (t == 7) area.b[0] = 7;
        __syncthreads();
    }
    if (wrong == P_OPERAND_LOADED && t == 7) {
        lk_mbarrier_arrive_expect_tx(&full, 64 * 128);
        lk_cp_async_bulk_tensor_2d_load(area.a, &map_a, 0, 0, &full);
    }
    if (wrong == P_EXIT_UNWAITED || wrong == P_NO_COMMIT_AT_ALL) return;
    if (wrong == P_NO_WAIT) lk_wgmma_wait_group<2>();
    else lk_wgmma_wait_group<0>();
    lk_wgmma_hold(d);
    for (int i = 0; i < n / 2; i++) result[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
    if (wrong == P_NO_WAIT) lk_wgmma_wait_group<0>();
}
template <int wrong, int n, int transpose_a, int transpose_b, int in_registers> static cudaError_t launch_product(void) {
    fill_matrices();
    for (int i = 0; i < 64 * 256; i++) sums_out[i] = -1.0f;
    const CUtensorMap map_a = bf16_map(mat_a, 64, 64, 64, 64);
    const CUtensorMap map_b = transpose_b ? bf16_map(mat_b, 64, n, n, wrong == P_SPREAD ? 8 : 64)
                                          : bf16_map(mat_b, n, 64, 64, n);
    auto kernel = product_kernel<wrong, n, transpose_a, transpose_b, in_registers>;
    const unsigned threads = wrong == P_HALF_GROUP ? 96 : 128;
    return launch_cluster(kernel, 1, threads, 1, sizeof(product_area), map_a, map_b, (const unsigned short *)mat_a, sums_out);
}
template <int wrong> static cudaError_t launch_wrong_product(void) {
    simt_set_copies(wrong == P_NOT_LANDED || wrong == P_OPERAND_LOADED ? "lazy" : NULL);
    cudaError_t error = launch_product<wrong, 64, 0, 0, wrong == P_REGISTER_NO_FENCE>();
    simt_set_copies(NULL);
    return error;
}
/* Exact: products of bf16 are floats, and the order of k is the same. */
static int count_sums_wrong(int n, int transpose_a, int transpose_b) {
    int bad = 0;
    for (int row = 0; row < 64; row++)
        for (int col = 0; col < n; col++) {
            float sum = 1.0f;
            for (int k = 0; k < 64; k++)
                sum += bf16(mat_a[transpose_a ? k * 64 + row : row * 64 + k])
                       * bf16(mat_b[transpose_b ? k * n + col : col * 64 + k]);
            bad += sums_out[row * n + col] != sum;
        }
    return bad;
}
template <int n> static int count_product_errors(void) {
    int bad = launch_product<RIGHT, n, 0, 0, 0>() || count_sums_wrong(n, 0, 0);
    bad += launch_product<RIGHT, n, 1, 0, 0>() || count_sums_wrong(n, 1, 0);
    bad += launch_product<RIGHT, n, 0, 1, 0>() || count_sums_wrong(n, 0, 1);
    bad += launch_product<RIGHT, n, 1, 1, 0>() || count_sums_wrong(n, 1, 1);
    bad += launch_product<P_SPREAD, n, 0, 1, 0>() || count_sums_wrong(n, 0, 1);
    bad += launch_product<RIGHT, n, 0, 0, 1>() || count_sums_wrong(n, 0, 0);
    bad += launch_product<RIGHT, n, 0, 1, 1>() || count_sums_wrong(n, 0, 1);
    return bad;
}
static int case_products(void) {
    int bad = 0;
    for (const char *order : {"lazy", "eager", "random:5"}) {
        simt_set_copies(order);
        bad += count_product_errors<64>() + count_product_errors<128>() + count_product_errors<256>();
    }
    simt_set_copies(NULL);
    return bad;
}

enum { DEPTH = 64, WIDTH = 128, STAGES = 2, STAGE_BYTES = (2 * 64 + WIDTH) * DEPTH * 2,
       M_RELEASE_EARLY = 600, M_ONE_SLOT_SHORT, M_NO_OUT_FENCE, M_NO_OUT_BARRIER, M_OUT_REUSED, M_BYTES, M_FENCE_OF_ONE };
struct alignas(1024) matmul_area { unsigned short a[STAGES][2 * 64 * DEPTH], b[STAGES][WIDTH * DEPTH], out[2][64 * WIDTH]; };

/* out = a b' of any size, tiles of 128 x 128: warp 8 loads, two warpgroups multiply 64 rows each and store through shared
   memory. */
template <int wrong>
__global__ void matmul_kernel(const CUtensorMap map_a, const CUtensorMap map_b, const CUtensorMap map_out, int depth) {
    LK_DYN_SMEM(matmul_area, area);
    LK_SHARED(lk_mbarrier, full, [STAGES]);
    LK_SHARED(lk_mbarrier, empty, [STAGES]);
    const int t = threadIdx.x, lane = t % 32, group = t / 128, row0 = (int)blockIdx.y * 128, col0 = (int)blockIdx.x * WIDTH;
    const int steps = (depth + DEPTH - 1) / DEPTH;
    if (t == 256) {
        for (int i = 0; i < STAGES; i++) lk_mbarrier_init(&full[i], 1), lk_mbarrier_init(&empty[i], 2);
        lk_fence_mbarrier_init();
    }
    __syncthreads();
    if (t >= 256) {
        for (int step = 0; lane == 0 && step < steps; step++) {
            const int s = step % STAGES;
            lk_mbarrier_wait_parity(&empty[s], (step / STAGES & 1) ^ 1);
            lk_mbarrier_arrive_expect_tx(&full[s], wrong == M_BYTES ? STAGE_BYTES - 128 : STAGE_BYTES);
            lk_cp_async_bulk_tensor_2d_load(area.a[s], &map_a, step * DEPTH, row0, &full[s]);
            lk_cp_async_bulk_tensor_2d_load(area.b[s], &map_b, step * DEPTH, col0, &full[s]);
        }
        return;
    }
    float d[WIDTH / 2];
    for (int step = 0; step < steps; step++) {
        const int s = step % STAGES;
        lk_mbarrier_wait_parity(&full[s], step / STAGES & 1);
        const uint64_t a = lk_wgmma_descriptor(area.a[s] + group * 64 * DEPTH, 16, 1024);
        const uint64_t b = lk_wgmma_descriptor(area.b[s], 16, 1024);
        lk_wgmma_fence();
        for (int k = 0; k < DEPTH / 16; k++) lk_wgmma_m64k16_bf16<WIDTH>(d, a + 2 * k, b + 2 * k, step + k > 0);
        lk_wgmma_commit_group();
        if (wrong == M_RELEASE_EARLY) {
            if (t % 128 == 0) lk_mbarrier_arrive(&empty[s]);
        } else {
            lk_wgmma_wait_group<1>();               // the products of the previous step: its slot is free
            if (step > 0 && t % 128 == 0) lk_mbarrier_arrive(&empty[(step - 1) % STAGES]);
        }
    }
    lk_wgmma_wait_group<0>();
    lk_wgmma_hold(d);
    for (int j = 0; j < WIDTH / 16; j++) {          // 16 columns of the warp's 16 rows: four matrices of 8 x 8
        uint32_t pair[4];
        for (int i = 0; i < 4; i++)
            pair[i] = simt_float_to_bf16_bits(d[8 * j + 2 * i]) | (uint32_t)simt_float_to_bf16_bits(d[8 * j + 2 * i + 1]) << 16;
        const int row = t % 128 / 32 * 16 + lane % 16, col = 16 * j + lane / 16 * 8;
        char *at = (char *)&area.out[group][col / 64 * 64 * 64 + row * 64] + (col % 64 * 2 ^ row % 8 * 16);
        lk_stmatrix_x4(at, pair[0], pair[1], pair[2], pair[3]);
    }
    if (wrong != M_NO_OUT_FENCE && (wrong != M_FENCE_OF_ONE || t % 128 == 0)) lk_fence_proxy_async_shared();
    if (wrong != M_NO_OUT_BARRIER && group == 0) lk_named_barrier_sync<1>(128);
    if (wrong != M_NO_OUT_BARRIER && group == 1) lk_named_barrier_sync<2>(128);
    if (t % 128 == 0) {
        for (int half = 0; half < 2; half++)
            lk_cp_async_bulk_tensor_2d_store(&map_out, col0 + 64 * half, row0 + 64 * group, area.out[group] + half * 64 * 64);
        lk_cp_async_bulk_commit_group();
        if (wrong == M_OUT_REUSED) area.out[group][17] ^= 1;
        lk_cp_async_bulk_wait_group_read<0>();
    }
}
template <int wrong> static cudaError_t launch_matmul_of(int rows, int cols, int depth) {
    fill_matrices();
    const CUtensorMap map_a = bf16_map(mat_a, rows, depth, depth + 8, 128), map_b = bf16_map(mat_b, cols, depth, depth, WIDTH);
    const CUtensorMap map_out = bf16_map(mat_out, rows, cols, cols + 16, 64);
    if (cudaFuncSetAttribute(matmul_kernel<wrong>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(matmul_area)))
        return cudaErrorUnknown;
    return launch_cluster(matmul_kernel<wrong>, dim3((cols + WIDTH - 1) / WIDTH, (rows + 127) / 128), 288, 1,
                          sizeof(matmul_area), map_a, map_b, map_out, depth);
}
template <int wrong> static cudaError_t launch_matmul(void) { return launch_matmul_of<wrong>(100, 104, 200); }
static int count_matmul_errors(int rows, int cols, int depth) {
    if (launch_matmul_of<RIGHT>(rows, cols, depth)) return 1;
    int bad = 0;
    for (int row = 0; row < rows; row++)
        for (int col = 0; col < cols + 16 && row * (cols + 16) + col < MAT_ELEMENTS; col++) {
            float sum = 0;
            for (int k = 0; k < depth && col < cols; k++)
                sum += bf16(mat_a[row * (depth + 8) + k]) * bf16(mat_b[col * depth + k]);
            bad += mat_out[row * (cols + 16) + col] != (col < cols ? simt_float_to_bf16_bits(sum) : 0x4242);
        }
    return bad;
}
static int case_matmul(void) {
    int bad = 0;
    for (const char *order : {"lazy", "eager", "random:5", "random:6"}) {
        simt_set_copies(order);
        bad += count_matmul_errors(150, 136, 248) + count_matmul_errors(1, 8, 8) + count_matmul_errors(128, 128, 256);
    }
    simt_set_copies(NULL);
    return bad;
}

enum { N_NUMBER_0 = 700, N_NUMBER_16, N_COUNT_40, N_COUNT_TOO_LARGE, N_OTHER_COUNT, N_ONE_MISSING, N_NONE, N_HALF_WARPS };

/* Two halves of a block, each with a barrier of its own, pass numbers from thread to thread. */
template <int wrong> __global__ void halves_kernel(int *result) {
    LK_SHARED(int, x, [256]);
    const int t = threadIdx.x, half = t / 128, neighbour = half * 128 + (t + 1) % 128;
    int sum = 0;
    for (int round = 0; round < (half ? 5 : 3); round++) {
        x[t] = t * round;
        int barrier = 1 + half * 14, threads = 128;
        if (wrong == N_NUMBER_0) barrier = 0;
        if (wrong == N_NUMBER_16) barrier = 16;
        if (wrong == N_COUNT_40) threads = 40;
        if (wrong == N_COUNT_TOO_LARGE) threads = 512;
        if (wrong == N_OTHER_COUNT && t == 7) threads = 64;
        if (wrong == N_HALF_WARPS) barrier = 1 + t % 2, threads = 128;
        if (wrong == N_ONE_MISSING && t == 7 && round == 2) break;
        if (wrong != N_NONE) simt_named_barrier(barrier, threads, __FILE__, __LINE__);
        sum += x[neighbour];
        if (wrong != N_NONE) simt_named_barrier(barrier, threads, __FILE__, __LINE__);
    }
    result[t] = sum - neighbour * (half ? 10 : 3);
}
template <int wrong> static cudaError_t launch_halves(void) { return launch(halves_kernel<wrong>, 2, 256, out); }
static int case_named_barriers(void) { return launch_halves<RIGHT>() || count_other_than(0, 256); }

__global__ void unaligned_row_kernel(int *) {
    LK_SHARED(uint4, rows, [33]);
    lk_stmatrix_x4((char *)&rows[threadIdx.x] + (threadIdx.x == 3 ? 8 : 0), 0, 0, 0, 0);
}

struct negative {
    const char *name, *report;  // report: where schedules give different reports, alternatives with | between
    cudaError_t (*run)(void);
    // 0: a sanitizer's build leaves the report to that sanitizer; 2: only TSan's does; 3: only ASan's build reports it
    int sanitized;
};
static const negative negatives[] = {
    {"two barriers on two lines", "divergent barriers", [] { return launch(divergent_barriers_kernel, 2, 64, out); }, 1},
    {"a thread exits before a barrier", "exited", [] { return launch(missing_thread_kernel, 1, 64, out); }, 1},
    {"half a warp at a barrier", "deadlock", [] { return launch(barrier_and_warp_kernel, 1, 32, out); }, 1},
    {"a lane at a barrier, the rest in a shuffle", "", [] { return launch(missing_lane_kernel, 1, 32, out); }, 1},
    {"a lane that exited", "lane 3", [] { return launch(exited_lane_kernel, 1, 32, out); }, 1},
    {"a lane that does not exist", "does not exist", [] { return launch(absent_lane_kernel, 1, 20, out); }, 1},
    {"a mask without the caller", "not in the mask", [] { return launch(not_in_mask_kernel, 1, 32, out); }, 1},
    {"a shuffle from outside the mask", "reads lane 9", [] { return launch(source_not_in_mask_kernel, 1, 32, out); }, 1},
    {"two warp operations meet", "divergent warp operations", [] { return launch(divergent_warp_kernel, 1, 32, out); }, 1},
    {"two masks that cannot meet", "deadlock", [] { return launch(different_masks_kernel, 1, 32, out); }, 1},
    {"misaligned vector", "misaligned", [] { return launch(misaligned_kernel, 1, 1, (float *)out); }, 1},
    {"past a shared variable", "past the end of small", [] { return launch(past_shared_kernel, 1, 5, out); }, 0},
    {"past the dynamic shared memory", "past the end of the dynamic", [] { return launch_cluster(past_dynamic_kernel, 1, 9, 1, 32, out); }, 0},
    {"too little dynamic shared memory", "the launch gives 16", [] { return launch_cluster(small_dynamic_kernel, 1, 9, 1, 16, out); }, 1},
    {"too much static shared memory", "static shared memory", [] { return launch(big_static_kernel, 1, 1, out); }, 1},
    {"static and dynamic over 48 KiB", "together more", [] { return launch_cluster(static_and_dynamic_kernel, 1, 1, 1, 20000, out); }, 1},
    {"cub TempStorage used again", "TempStorage", [] { return launch(reused_storage_kernel, 1, 64, (float *)out); }, 0},
    {"cub in a block of another size", "block of 96", [] { return launch(cub_shape_kernel, 1, 96, (float *)out); }, 1},
    {"a peer not started", "before the first cluster barrier", [] { return launch_cluster(peer_not_started_kernel, 2, 32, 2, 0, out); }, 1},
    {"a peer gone", "a peer block gone", [] { return launch_cluster(peer_gone_kernel, 2, 32, 2, 0, out); }, 1},
    {"a peer that arrived and left", "a peer block gone", [] { return launch_cluster(arrived_and_gone_kernel, 2, 32, 2, 0, out); }, 1},
    {"a thread exits before a cluster barrier", "exited", [] { return launch_cluster(cluster_left_early_kernel, 2, 32, 2, 0, out); }, 1},
    {"block barrier against cluster barrier", "deadlock", [] { return launch_cluster(cluster_stuck_kernel, 2, 32, 2, 0, out); }, 1},
    {"cluster arrive twice", "second cluster arrive", [] { return launch_cluster(arrive_twice_kernel, 2, 32, 2, 0, out); }, 1},
    {"cluster wait without arrive", "without an arrive", [] { return launch_cluster(wait_alone_kernel, 2, 32, 2, 0, out); }, 1},
    {"global address mapped to a peer", "not in this block's shared memory", [] { return launch_cluster(map_global_kernel, 2, 32, 2, 0, out); }, 1},
    {"rank out of range", "no rank 2", [] { return launch_cluster(map_rank_kernel, 2, 32, 2, 0, out); }, 1},
    {"all spin", "deadlock", [] { out[0] = 0; return launch(spin_kernel, 3, 64, (unsigned *)out); }, 2}, // slow under TSan
    {"one spins, the rest wait", "deadlock", [] { out[0] = 0; return launch(spin_on_one_kernel, 3, 64, (unsigned *)out); }, 1},
    {"trap", "__trap", [] { return launch(trap_kernel, 1, 32, out); }, 1},
    {"wrong parity, a round later", "wrong parity|deadlock", launch_ring<WRONG_PARITY>, 0},
    {"wrong parity, from the start", "wrong parity|deadlock", launch_ring<WRONG_FIRST_PARITY>, 0},
    {"a parity that is a phase's number", "a parity of 2", launch_ring<PARITY_OF_TWO>, 1},
    {"more bytes announced than copied", "16 bytes missing", launch_ring<MORE_BYTES>, 1},
    {"fewer bytes announced than copied", "16 bytes too many", launch_ring<FEWER_BYTES>, 1},
    {"one of two copies announced", "fewer announced than copied|too many", launch_ring<FEWER_OF_TWO>, 0},
    {"bytes announced and no copy", "16 bytes missing", launch_ring<EXPECT_UNUSED>, 1},
    {"no wait for an empty slot", "an arrival too many|could see its end|still being filled|source of the bulk store|deadlock",
     launch_ring<NO_EMPTY_WAIT>, 0},
    {"no wait for a full slot", "still being filled|nobody has waited|could see its end|deadlock", launch_ring<NO_FULL_WAIT>,
     0},
    {"a thread does not arrive", "1 of 64 arrivals missing", launch_ring<MISSING_ARRIVE>, 1},
    {"no proxy fence before a bulk store", "none has executed fence.proxy.async", launch_ring<NO_FENCE>, 1},
    {"a slot loaded before its store has read", "source of the bulk store", launch_ring<NO_READ_WAIT>, 1},
    {"a slot written before its store has read", "written to before the wait", launch_ring<WRITE_BEFORE_WAIT>, 0},
    {"a bulk store not waited for", "has not waited for its bulk group", launch_ring<NO_LAST_WAIT>, 1},
    {"a bulk store not committed", "has not committed", launch_ring<NO_LAST_COMMIT>, 1},
    {"a load nobody waits for", "on their way|nobody has waited", launch_ring<NOBODY_WAITS>, 1},
    {"mbarrier without init", "not an initialised mbarrier", launch_ring<NO_INIT>, 1},
    {"mbarrier without its init's fence", "no fence.mbarrier_init", launch_ring<NO_INIT_FENCE>, 1},
    {"mbarrier initialised twice", "is in use", launch_ring<INIT_TWICE>, 1},
    {"mbarrier initialised by two threads", "is in use", launch_ring<INIT_BY_TWO>, 1},
    {"misaligned shared address of a bulk load", "shared address", launch_ring<UNALIGNED_SHARED>, 1},
    {"misaligned global address of a bulk load", "global address", launch_ring<UNALIGNED_GLOBAL>, 1},
    {"size of a bulk load", "a size of 252 bytes", launch_ring<ODD_SIZE>, 1},
    {"bulk load past a shared variable", "of slots, which ends after 768", launch_ring<PAST_SLOTS>, 1},
    {"bulk load past its source", "leave their allocation", launch_ring<PAST_INPUT>, 2},
    {"bulk load from shared memory", "not in global memory", launch_ring<NOT_GLOBAL>, 1},
    {"mbarrier written over", "not an initialised mbarrier", launch_barrier<WORD_OVERWRITTEN>, 0},
    {"mbarrier with a count of 0", "a count of 0", launch_barrier<COUNT_OF_ZERO>, 1},
    {"mbarrier misaligned", "not aligned to 8", launch_barrier<UNALIGNED_BARRIER>, 1},
    {"an arrival too many", "an arrival too many", launch_barrier<ARRIVAL_TOO_MANY>, 1},
    {"too many bytes announced", "leaves its range", launch_barrier<BYTES_OUT_OF_RANGE>, 1},
    {"a phase ends before the last was seen", "could see its end", launch_barrier<PHASE_OVERRUN>, 1},
    {"a second wait for one phase", "has waited for before", launch_barrier<WAIT_TWICE>, 1},
    {"a phase that never ends, asked for", "1 of 1 arrivals missing", launch_barrier<SPIN>, 1},
    {"two loads into one slot", "still being filled", launch_lazily<TWO_LOADS>, 1},
    {"a bulk store of what has not landed", "still being filled", launch_lazily<STORE_OF_A_LOAD>, 1},
    {"cp.async: never waited for", "exits and has not waited for its group", launch_stages<EXIT_IN_FLIGHT>, 1},
    {"cp.async: never committed", "has not committed it to a group", launch_stages<NO_COMMIT>, 1},
    {"cp.async: misaligned shared address", "shared address", launch_stages<COPY_UNALIGNED_SHARED>, 1},
    {"cp.async: misaligned global address", "global address", launch_stages<COPY_UNALIGNED_GLOBAL>, 1},
    {"cp.async: size", "16 bytes, not 12", launch_stages<COPY_SIZE>, 1},
    {"cp.async: to global memory", "not in this block's shared memory", launch_stages<COPY_TO_GLOBAL>, 1},
    {"cp.async: from shared memory", "not in global memory", launch_stages<COPY_FROM_SHARED>, 1},
    {"cp.async: past a shared variable", "past the end of stages|in no shared variable", launch_stages<COPY_PAST_STAGES>, 2},
    {"cp.async: past its source", "leave their allocation", launch_stages<COPY_PAST_INPUT>, 3},
    {"bulk prefetch: misaligned", "not multiples of 16", launch_stages<PREFETCH_UNALIGNED>, 1},
    {"bulk prefetch: size", "not multiples of 16", launch_stages<PREFETCH_SIZE>, 1},
    {"bulk prefetch: past its source", "leave their allocation", launch_stages<PREFETCH_PAST_INPUT>, 2},
    {"prefetch: past its source", "leave their allocation", launch_stages<PREFETCH_BEYOND>, 3},
    {"cp.async: too many", "more than 128 copies", launch_stages<TOO_MANY_COPIES>, 1},
    {"st.async: a wait at block scope", "the wait needs cluster scope", launch_st_async<CTA_SCOPE>, 1},
    {"st.async: wrong parity", "wrong parity", launch_st_async<ST_ASYNC_PARITY>, 0},
    {"st.async: barrier in another block", "is in rank", launch_st_async<BAR_ELSEWHERE>, 1},
    {"st.async: misaligned", "not a multiple of 8", launch_st_async<ST_ASYNC_ODD>, 1},
    {"st.async: a peer gone", "rank 1", launch_st_async<PEER_GONE>, 1},
    {"st.async: no init fence", "no fence.mbarrier_init", launch_st_async<NO_INIT_FENCE>, 1},
    {"remote arrive: a peer not started", "before the first cluster barrier", launch_st_async<BEFORE_START>, 1},
    {"box: misaligned shared address", "not a multiple of 128", launch_box<BOX_UNALIGNED>, 1},
    {"box: fewer bytes announced", "too many", launch_box<BOX_BYTES_SHORT>, 1},
    {"box: past a shared variable", "of area, which ends after 1024", launch_box<BOX_PAST_AREA>, 1},
    {"box: a map of three dimensions", "of rank 3, not 2", launch_box<BOX_RANK>, 1},
    {"box: a map in shared memory", "is in shared memory", launch_box<BOX_MAP_SHARED>, 1},
    {"box: a misaligned map", "not aligned to 64", launch_box<BOX_MAP_UNALIGNED>, 1},
    {"box: no map", "is not a tensor map", launch_box<BOX_NOT_A_MAP>, 1},
    {"box: a prefetch of no map", "prefetch.tensormap", launch_box<BOX_PREFETCH>, 1},
    {"box: rows narrower than the swizzle", "rows of 64 bytes in a swizzle of 128", launch_box<BOX_NARROW>, 1},
    {"box: a matrix larger than its allocation", "leave", launch_box<BOX_PAST_MATRIX>, 2},
    {"box: two loads into one place", "still being filled", launch_box<BOX_OVERWRITTEN>, 1},
    {"box: no proxy fence before a store", "none has executed fence.proxy.async", launch_box<BOX_NO_FENCE>, 1},
    {"box: source written before the wait", "written to before the wait", launch_box<BOX_SOURCE_CHANGED>, 0},
    {"box: a store not waited for", "has not waited for its bulk group", launch_box<BOX_NOT_WAITED>, 1},
    {"box: misaligned source of a store", "not a multiple of 128", launch_box<BOX_STORE_UNALIGNED>, 1},
    {"box: an addition of 16-bit elements", "adds floats alone", launch_box<BOX_ADD_BF16>, 1},
    {"multicast: a block not in the cluster", "a mask of 0x4 in a cluster of 2", launch_cast_of_two<CAST_OUT_OF_CLUSTER>, 1},
    {"multicast: a peer gone", "rank 1", launch_cast_of_two<CAST_PEER_GONE>, 1},
    {"multicast: a peer not started", "before the first cluster barrier|no fence.mbarrier_init|not an initialised mbarrier",
     launch_cast_of_two<CAST_BEFORE_START>, 1},
    {"wgmma: no fence", "no wgmma.fence before the first", launch_wrong_product<P_NO_FENCE>, 1},
    {"wgmma: sums touched and no fence", "has touched its sums", launch_wrong_product<P_FENCE_MISSING_LATER>, 1},
    {"wgmma: registers of A and no fence", "this use of registers for A", launch_wrong_product<P_REGISTER_NO_FENCE>, 1},
    {"wgmma: a group not committed", "2 wgmma that it has not committed", launch_wrong_product<P_NO_COMMIT>, 1},
    {"wgmma: nothing committed", "has not committed it to a group", launch_wrong_product<P_NO_COMMIT_AT_ALL>, 1},
    {"wgmma: never waited for", "has not waited for its group", launch_wrong_product<P_EXIT_UNWAITED>, 1},
    {"wgmma: sums written before the wait", "thread 7 has written to its sums, d[2]", launch_wrong_product<P_WRITE_EARLY>, 1},
    {"wgmma: other descriptors", "other descriptors", launch_wrong_product<P_OTHER_DESCRIPTOR>, 1},
    {"wgmma: another accumulate", "another shape or accumulate", launch_wrong_product<P_OTHER_ACCUMULATE>, 1},
    {"wgmma: another line", "divergent wgmma", launch_wrong_product<P_OTHER_LINE>, 1},
    {"wgmma: other sums", "passes other sums", launch_wrong_product<P_OTHER_SUMS>, 1},
    {"wgmma: a thread leaves one out", "which 127 of its warpgroup's threads have issued",
     launch_wrong_product<P_ONE_MISSING>, 1},
    {"wgmma: half a warpgroup", "has only 96 threads", launch_wrong_product<P_HALF_GROUP>, 1},
    {"wgmma: an operand's start", "starts 128 bytes behind a multiple of 1024", launch_wrong_product<P_START>, 1},
    {"wgmma: an operand's stride", "512 bytes from atom to atom", launch_wrong_product<P_STRIDE>, 1},
    {"wgmma: an operand's swizzle", "not of a 128-byte swizzle", launch_wrong_product<P_SWIZZLE>, 1},
    {"wgmma: an operand past its variable", "past the end of a shared variable", launch_wrong_product<P_PAST>, 1},
    {"wgmma: no proxy fence", "none has executed fence.proxy.async", launch_wrong_product<P_THREADS_WROTE>, 1},
    {"wgmma: no proxy fence, the second time", "executed fence.proxy.async", launch_wrong_product<P_WROTE_AGAIN>, 1},
    {"wgmma: operand not landed", "still being filled", launch_wrong_product<P_NOT_LANDED>, 1},
    {"wgmma: operand written before the wait", "written to before the wait", launch_wrong_product<P_OPERAND_CHANGED>, 0},
    {"wgmma: operand loaded before the wait", "an operand of the wgmma issued at", launch_wrong_product<P_OPERAND_LOADED>, 1},
    {"wgmma: too many", "more than 64", launch_wrong_product<P_TOO_MANY>, 1},
    {"matmul: a slot given back before the wait", "is an operand of the wgmma issued at", launch_matmul<M_RELEASE_EARLY>, 1},
    {"matmul: no proxy fence before the store", "executed fence.proxy.async", launch_matmul<M_NO_OUT_FENCE>, 1},
    {"matmul: the store's source written", "written to before the wait", launch_matmul<M_OUT_REUSED>, 0},
    {"matmul: fewer bytes announced", "fewer announced|too many", launch_matmul<M_BYTES>, 1},
    {"stmatrix: a misaligned row", "not a multiple of 16", [] { return launch(unaligned_row_kernel, 1, 32, out); }, 1},
    {"named barrier 0", "barrier 0, not 1 to 15", launch_halves<N_NUMBER_0>, 1},
    {"named barrier 16", "barrier 16, not 1 to 15", launch_halves<N_NUMBER_16>, 1},
    {"named barrier: 40 threads", "40 threads, in a block of 256: not whole warps", launch_halves<N_COUNT_40>, 1},
    {"named barrier: more threads than there are", "512 threads, in a block of 256", launch_halves<N_COUNT_TOO_LARGE>, 1},
    {"named barrier: another count", "128 threads at barrier 1|64 threads at barrier 1", launch_halves<N_OTHER_COUNT>, 1},
    {"named barrier: half of each warp", "of warp 0 not all", launch_halves<N_HALF_WARPS>, 1},
    {"named barrier: a thread does not come", "at barrier 1, where 127 of 128 threads are", launch_halves<N_ONE_MISSING>, 1},
};

static int has_one_of(const char *text, const char *alternatives) {
    for (const char *end; *alternatives; alternatives = *end ? end + 1 : end) {
        end = strchrnul(alternatives, '|');
        if (memmem(text, strlen(text), alternatives, end - alternatives)) return 1;
    }
    return 0;
}

static void run_negative(const negative *n) {
    char detail[512] = "";
    int ok = 1;
    for (const char *schedule : schedules) {
        simt_set_schedule(schedule);
        simt_clear_report();
        cudaError_t error = n->run();
        const char *report = simt_last_report();
        int site = strstr(report, ".cpp:") || strstr(report, ".cuh:") || strstr(report, "kernel");
        int told = *report && (!*n->report || has_one_of(report, n->report));
        if (error != cudaErrorLaunchFailure || cudaGetLastError() != cudaErrorLaunchFailure || !told || !site) {
            snprintf(detail, sizeof detail, "%s: %s, report \"%.300s\"", schedule, cudaGetErrorName(error), report);
            ok = 0;
        }
        // The next launch is not affected.
        if (launch(votes_kernel, 1, 100, out) || count_other_than(0, 100)) ok = 0, snprintf(detail, sizeof detail, "%s: the launch after it fails", schedule);
    }
    char name[128];
    snprintf(name, sizeof name, "caught: %s", n->name);
    verdict(ok, name, detail);
}

#if !defined(__SANITIZE_THREAD__)
/* A missing barrier shows as poison under at least one schedule. In a plain build this and wrong numbers are the only signs. */
static int case_missing_barrier_shows(void) {
    int seen = 0;
    for (const char *schedule : schedules) {
        simt_set_schedule(schedule);
        if (launch(no_barrier_kernel<4>, 1, 128, out)) return 1;
        seen += count_other_than(1, 128) > 0;
    }
    return seen < 4;
}
/* A slot given back before it is read: the next load poisons it at once. */
static int case_early_reuse_shows(void) {
    int seen = 0;
    for (const char *schedule : schedules) {
        simt_set_schedule(schedule);
        fill_ring();
        seen += launch(read_ring_kernel<1>, 1, 64, (const int *)ring_in, out) || count_sum_errors();
    }
    return seen < 3;            // a random schedule may let the reader be faster
}
/* A stage read without the wait, or after a wait for the previous stage: poison as long as the copy has not landed. */
static int case_missing_copy_wait_shows(void) {
    int bad = 0;
    for (const char *schedule : schedules) {
        simt_set_schedule(schedule);
        for (const char *order : {"lazy", "random:3"}) {
            simt_set_copies(order);
            bad += launch_stages<NO_COPY_WAIT>() || count_stage_errors() == 0;
            bad += launch_stages<WAIT_OF_ANOTHER>() || count_stage_errors() == 0;
        }
        simt_set_copies("eager");                       // which hides it
        bad += launch_stages<NO_COPY_WAIT>() || count_stage_errors() != 0;
    }
    simt_set_copies(NULL);
    return bad;
}
/* A bulk store that does not wait for the writers: reported, or in the results. */
static int case_early_store_shows(void) {
    int seen = 0;
    for (const char *schedule : schedules) {
        simt_set_schedule(schedule);
        seen += launch_ring<STORE_TOO_EARLY>() || count_ring_errors(1, 0);
    }
    return seen < 4;
}
/* Sums read before the wait that returns them are NaN, whatever has been computed. */
static int case_early_sums_show(void) {
    int bad = 0;
    for (const char *schedule : schedules) {
        simt_set_schedule(schedule);
        for (const char *order : {"lazy", "eager", "random:3"}) {
            simt_set_copies(order);
            bad += launch_product<P_READ_EARLY, 64, 0, 0, 0>() != cudaSuccess;
            for (int i = 0; i < 64 * 64; i++) bad += sums_out[i] == sums_out[i];
            bad += launch_product<P_NO_WAIT, 64, 0, 0, 0>() != cudaSuccess;
            for (int i = 0; i < 64 * 64; i++) bad += sums_out[i] == sums_out[i];
        }
    }
    simt_set_copies(NULL);
    return bad;
}
/* A slot given back before its products are done: under every order of copies some schedule shows it. */
static int case_early_release_shows(void) {
    int seen = 0;
    for (const char *schedule : schedules) {
        simt_set_schedule(schedule);
        seen += launch_matmul_of<M_RELEASE_EARLY>(100, 104, 264) != cudaSuccess;
    }
    return seen < 3;
}
#endif

/* A launch repeats itself exactly under one seed, and another seed differs. */
__global__ void order_kernel(int *out) {
    out[1 + atomicAdd(&out[0], 1)] = (int)threadIdx.x;
    __syncthreads();
}
static int case_schedules(void) {
    int orders[5][128];
    const char *names[] = {"forward", "reverse", "random:1", "random:2", "forward"};
    for (int i = 0; i < 5; i++) {
        simt_set_schedule(names[i]);
        out[0] = 0;
        if (launch(order_kernel, 1, 128, out)) return 1;
        memcpy(orders[i], out + 1, sizeof orders[i]);
    }
    int bad = memcmp(orders[0], orders[4], sizeof orders[0]) != 0 || memcmp(orders[2], orders[3], sizeof orders[0]) == 0;
    for (int i = 0; i < 128; i++) bad += orders[0][i] != i || orders[1][i] != 127 - i;
    return bad;
}

/* ---- what the sanitizers find: one process a case -------------------------------------------------------------------- */

__global__ void past_global_kernel(int *data, int count) {
    if ((int)threadIdx.x <= count) data[threadIdx.x] = 1;
}
__global__ void read_byte_past_kernel(const unsigned char *data, int count, int *out) { out[0] = data[count]; }
__global__ void deref_misaligned_kernel(float *data) { *(float4 *)(data + 1) = make_float4(0, 0, 0, 0); }
__global__ void gone_memory_kernel(int *out) {
    LK_SHARED(int, x, );
    if (threadIdx.x == 0) x = 1;
    simt_cluster_arrive();
    simt_cluster_wait();
    int *peer = simt_cluster_ctarank() == 0 ? (int *)simt_cluster_map(&x, 1) : NULL;
    simt_cluster_arrive();
    simt_cluster_wait();
    for (int i = 0; peer && i < 100; i++) simt_yield();
    if (peer) out[threadIdx.x] = *peer;           // rank 1 has exited; the address was taken long before
}
template <int with_barrier> __global__ void exchange_kernel(int *out) {
    LK_SHARED(int, x, [64]);
    for (int i = 0; i < 3; i++) {
        x[threadIdx.x] = i;
        __syncthreads();
        out[threadIdx.x] = x[63 - threadIdx.x];
        if (with_barrier) __syncthreads();
    }
}
template <int with_sync> __global__ void warp_exchange_kernel(int *out) {
    LK_SHARED(int, x, [32]);
    x[threadIdx.x] = 1;
    if (with_sync) __syncwarp();
    else __shfl_sync(0xffffffffu, 1, 0);
    out[threadIdx.x] = x[31 - threadIdx.x];
}
__global__ void same_word_kernel(int *out) {
    if (threadIdx.x == 0) out[0] += 1;         // every block
}
template <int with_barrier> __global__ void cluster_exchange_kernel(int *out) {
    LK_SHARED(int, x, );
    if (threadIdx.x == 0) x = 1;
    simt_cluster_arrive();
    simt_cluster_wait();
    if (threadIdx.x == 0) out[blockIdx.x] = *(int *)simt_cluster_map(&x, simt_cluster_ctarank() ^ 1);
    if (with_barrier) simt_cluster_arrive(), simt_cluster_wait();
    if (threadIdx.x == 0) x = 2;
    simt_cluster_arrive();
    simt_cluster_wait();
}

/* A word of another block, written before the arrival. */
template <int relaxed> __global__ void cluster_inbox_kernel(int *out) {
    LK_SHARED(int, inbox, );
    lk_barrier_cluster_arrive_relaxed();
    lk_barrier_cluster_wait();
    if (threadIdx.x == 0) *(int *)lk_mapa(&inbox, lk_cluster_ctarank() ^ 1) = 7;
    if (relaxed) lk_barrier_cluster_arrive_relaxed();
    else lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait();
    out[blockIdx.x * 32 + threadIdx.x] = inbox;
}
/* A relaxed arrival and the fence before it are enough for an mbarrier. */
__global__ void relaxed_init_kernel(int *out) {
    LK_SHARED(lk_mbarrier, bar, );
    if (threadIdx.x == 0) lk_mbarrier_init(&bar, 2);
    if (threadIdx.x == 0) lk_fence_mbarrier_init();
    lk_barrier_cluster_arrive_relaxed();
    lk_barrier_cluster_wait();
    if (threadIdx.x == 1) lk_mbarrier_arrive(&bar);
    if (threadIdx.x == 1) lk_mbarrier_arrive_remote(lk_mapa_shared(&bar, lk_cluster_ctarank() ^ 1));
    lk_mbarrier_wait_parity_cluster(&bar, 0);
    lk_barrier_cluster_arrive();
    lk_barrier_cluster_wait();
    out[blockIdx.x * 32 + threadIdx.x] = 1;
}
#if defined(__SANITIZE_THREAD__)
/* Two host threads, each of which launches a kernel that adds to a word. This one has its worker before: else it could reuse
   the other's, and be ordered after all that the other has done. */
static void launch_from_two(int apart) {
    launch(nothing_kernel, 1, 32, out);
    std::thread other([] { launch(same_word_kernel, 1, 32, out); });
    launch(same_word_kernel, 1, 32, out + 100 * apart);
    other.join();
}
#endif

static int *scratch;            // exactly 100 ints
struct provocation {
    const char *name, *sign;    // NULL: nothing may be found
    void (*run)(void);
};
static const provocation provocations[] = {
#if defined(__SANITIZE_ADDRESS__)
    {"global-write-one-past", "heap-buffer-overflow", [] { launch(past_global_kernel, 1, 128, scratch, 100); }},
    {"global-read-one-byte-past", "heap-buffer-overflow", [] { launch(read_byte_past_kernel, 1, 1, (unsigned char *)scratch, 400, out); }},
    {"shared-write-one-past", "use-after-poison", [] { launch(past_shared_kernel, 1, 5, out); }},
    {"dynamic-shared-one-past", "use-after-poison", [] { launch_cluster(past_dynamic_kernel, 1, 9, 1, 32, out); }},
    {"shared-of-a-peer-gone", "use-after-poison", [] { launch_cluster(gone_memory_kernel, 2, 32, 2, 0, out); }},
    {"misaligned-dereference", "misaligned address", [] { launch(deref_misaligned_kernel, 1, 1, (float *)scratch); }},
    {"freed-memory", "heap-use-after-free", [] { int *p = scratch; cudaFree(p); launch(past_global_kernel, 1, 10, p, 100); }},
    {"leak", "LeakSanitizer", [] { void *p; cudaMalloc(&p, 64); memset(&p, 0, sizeof p); }},
    {"all-in-bounds", NULL, [] { launch(past_global_kernel, 4, 100, scratch, 99); launch(divergent_barriers_kernel, 2, 64, out); case_cluster(); case_cub(); }},
#endif
#if defined(__SANITIZE_THREAD__)
    {"shared-without-second-barrier", "data race", [] { launch(exchange_kernel<0>, 1, 64, out); }},
    {"shared-with-both-barriers", NULL, [] { launch(exchange_kernel<1>, 20, 64, out); launch(exchange_kernel<1>, 1, 64, out); }},
    {"warp-without-syncwarp", "data race", [] { launch(warp_exchange_kernel<0>, 1, 32, out); }},
    {"warp-with-syncwarp", NULL, [] { launch(warp_exchange_kernel<1>, 1, 32, out); }},
    {"two-blocks-one-word", "data race", [] { launch(same_word_kernel, 1, 32, out); launch_cluster(same_word_kernel, 2, 32, 2, 0, out); }},
    {"cluster-without-second-barrier", "data race", [] { launch_cluster(cluster_exchange_kernel<0>, 2, 64, 2, 0, out); }},
    {"cluster-with-both-barriers", NULL, [] { launch_cluster(cluster_exchange_kernel<1>, 8, 64, 2, 0, out); }},
    {"cluster-arrive-without-release", "data race", [] { launch_cluster(cluster_inbox_kernel<1>, 2, 32, 2, 0, out); }},
    {"cluster-arrive-with-release", NULL,
     [] { launch_cluster(cluster_inbox_kernel<0>, 8, 32, 2, 0, out); launch_cluster(relaxed_init_kernel, 8, 32, 2, 0, out); }},
    {"host-threads-one-word", "data race", [] { launch_from_two(0); }},
    {"host-threads-a-word-each", NULL, [] { launch_from_two(1); case_host_threads(); }},
    {"load-read-without-waiting", "data race", [] { launch_ring<NO_FULL_WAIT>(); }},
    {"slot-given-back-before-it-is-read", "data race",
     [] { fill_ring(); launch(read_ring_kernel<1>, 1, 64, (const int *)ring_in, out); }},
    {"proxy-fence-before-the-write", "data race", [] { launch_ring<FENCE_BEFORE_WRITE>(); }},
    {"source-of-a-bulk-store-written", "data race", [] { launch_ring<WRITE_BEFORE_WAIT>(); }},
    {"mbarrier-init-without-barrier", "data race", [] { simt_set_schedule("forward"); launch_ring<NO_INIT_BARRIER>(); }},
    {"st-async-read-without-waiting", "data race", [] { launch_st_async<NO_WAIT>(); }},
    {"st-async-into-what-is-being-read", "data race", [] { launch_st_async<ROOM_TOO_EARLY>(); }},
    {"cp-async-read-without-barrier", "lk_cp_async_16", [] { launch_stages<NO_COPY_BARRIER>(); }},
    {"cp-async-waited-for-behind-the-barrier", "lk_cp_async_wait_group", [] { launch_stages<WAIT_BEHIND_BARRIER>(); }},
    {"box-read-without-waiting", "data race", [] { launch_box<BOX_NO_LOAD_WAIT>(); }},
    {"box-stored-with-the-fence-before-the-write", "data race", [] { launch_box<BOX_FENCE_FIRST>(); }},
    {"box-source-written", "data race", [] { launch_box<BOX_SOURCE_CHANGED>(); }},
    {"multicast-into-what-is-being-read", "data race", [] { simt_set_copies("eager"); launch_cast<CAST_NO_BARRIER>(2); }},
    {"wgmma-in-a-warp-that-has-not-waited", "data race", [] { launch_wrong_product<P_NO_LOAD_WAIT>(); }},
    {"wgmma-operand-written", "data race", [] { launch_wrong_product<P_OPERAND_CHANGED>(); }},
    {"matmul-one-fence-for-all", "data race", [] { launch_matmul<M_FENCE_OF_ONE>(); }},
    {"matmul-without-named-barrier", "data race", [] { launch_matmul<M_NO_OUT_BARRIER>(); }},
    {"without-named-barriers", "data race", [] { launch_halves<N_NONE>(); }},
    {"boxes-and-multicast", NULL,
     [] { count_box_errors(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_128B, 3, 9, 0); case_additions();
          launch_cast<RIGHT>(2); launch_cast<RIGHT>(4); case_named_barriers(); }},
    {"wgmma-and-matmul", NULL,
     [] { launch_product<RIGHT, 64, 0, 0, 0>(); launch_product<RIGHT, 64, 1, 1, 0>(); launch_product<RIGHT, 64, 0, 1, 1>();
          launch_matmul<RIGHT>(); }},
    {"rings-and-st-async", NULL, [] { case_ring(); case_st_async(); case_stages(); }},
    {"all-the-right-kernels", NULL, [] { case_cub(); case_cluster(); case_ticket(); case_chain(); case_dynamic(); case_shuffles(); case_block_sum(); case_atomics(); }},
#endif
    {NULL, NULL, NULL},
};

static void run_provocation(const provocation *p) {
    char self[1024], command[1200], name[128], text[65536], detail[400] = "";
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    int ok = 1;
    for (const char *schedule : schedules) {
        snprintf(command, sizeof command, "TSAN_OPTIONS=atexit_sleep_ms=0 SIMT_SCHEDULE=%s '%s' --provoke %s 2>&1", schedule, self, p->name);
        FILE *f = popen(command, "r");
        size_t got = f ? fread(text, 1, sizeof text - 1, f) : 0;
        text[got] = 0;
        char rest[4096];
        while (f && fread(rest, 1, sizeof rest, f));
        int status = f ? pclose(f) : -1;
        int found = strstr(text, "Sanitizer") || strstr(text, "runtime error");
        if (p->sign ? !status || !strstr(text, p->sign) : status || found) {
            snprintf(detail, sizeof detail, "%s: status %d, \"%.300s\"", schedule, status, text);
            ok = 0;
        }
    }
    snprintf(name, sizeof name, "%s: %s", p->sign ? "found" : "silent", p->name);
    verdict(ok, name, detail);
}

static void free_all(void) {
    for (void *at : {(void *)out, (void *)scratch, (void *)ring_in, (void *)tensor_in, (void *)tensor_out, (void *)tensor_raw,
                     (void *)mat_a, (void *)mat_b, (void *)mat_out, (void *)sums_out})
        cudaFree(at);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    simt_quiet(1);
    setenv("SIMT_DEVICES", "2", 1);
    cudaMalloc(&out, MAX_OUT * sizeof(int));
    cudaMalloc(&scratch, 100 * sizeof(int));
    cudaMalloc(&ring_in, TILES * SLOT_BYTES);
    for (unsigned char **at : {&tensor_in, &tensor_out, &tensor_raw}) cudaMalloc(at, TENSOR_BYTES);
    for (unsigned short **at : {&mat_a, &mat_b, &mat_out}) cudaMalloc(at, MAT_ELEMENTS * sizeof **at);
    cudaMalloc(&sums_out, 64 * 256 * sizeof *sums_out);
    if (argc == 3 && !strcmp(argv[1], "--provoke")) {
        for (const provocation *p = provocations; p->name; p++) {
            if (strcmp(p->name, argv[2])) continue;
            p->run();
            free_all();
            return 0;
        }
        return 2;
    }

    static const struct { const char *name; int (*run)(void); int once; } positives[] = {
        {"coordinates", case_coordinates, 0}, {"warp operations", case_shuffles, 0}, {"block sums", case_block_sum, 0},
        {"cub::BlockReduce", case_cub, 0}, {"dynamic shared memory, poison", case_dynamic, 0}, {"clusters", case_cluster, 0},
        {"__syncthreads_count, or, and", case_votes, 0}, {"last block's ticket", case_ticket, 0},
        {"blocks wait for lower ones", case_chain, 0}, {"atomics", case_atomics, 0},
        {"intrinsics", case_intrinsics, 1}, {"launch checks", case_launch_checks, 1}, {"memory calls", case_memory, 1},
        {"device queries", case_device, 1}, {"graphs and capture", case_graph, 1},
        {"modes of capture", case_capture_modes, 1}, {"two devices", case_two_devices, 1}, {"host threads", case_host_threads, 0},
        {"order of the schedules", case_schedules, 1},
        {"a ring of bulk copies", case_ring, 0}, {"a ring, copies in any order", case_ring_orders, 0},
        {"st.async in a cluster", case_st_async, 0}, {"two stages of cp.async", case_stages, 0},
        {"tensor maps", case_encode, 1}, {"boxes at every edge, every swizzle", case_boxes, 0},
        {"additions of boxes", case_additions, 0}, {"multicast in clusters", case_multicast, 0},
        {"wgmma, every layout", case_products, 0}, {"a matmul in two stages", case_matmul, 0},
        {"named barriers", case_named_barriers, 0},
#if !defined(__SANITIZE_THREAD__)
        {"a forked child", case_fork, 1},
        {"a missing barrier shows", case_missing_barrier_shows, 1},
        {"a slot reused early shows", case_early_reuse_shows, 1}, {"a store too early shows", case_early_store_shows, 1},
        {"a missing wait for cp.async shows", case_missing_copy_wait_shows, 1},
        {"sums read early show", case_early_sums_show, 1}, {"a slot given back early shows", case_early_release_shows, 1},
#endif
    };
    for (auto &p : positives) {
        char detail[600] = "";
        int ok = 1;
        for (const char *schedule : schedules) {
            simt_set_schedule(schedule);
            simt_clear_report();
            int bad = p.run();
            if (bad) ok = 0, snprintf(detail, sizeof detail, "%s: %d, report \"%.400s\"", schedule, bad, simt_last_report());
            if (p.once) break;
        }
        verdict(ok, p.name, detail);
    }
    for (const negative &n : negatives) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        if (!n.sanitized) continue;
#if defined(__SANITIZE_THREAD__)
        if (n.sanitized >= 2) continue;
#endif
#endif
#if !defined(__SANITIZE_ADDRESS__)
        if (n.sanitized == 3) continue;
#endif
        run_negative(&n);
    }
    for (const provocation *p = provocations; p->name; p++) run_provocation(p);
    free_all();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
