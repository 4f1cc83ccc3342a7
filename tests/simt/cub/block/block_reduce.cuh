// SPDX-License-Identifier: MIT
// Stand-in for cub::BlockReduce. Fixed order: each warp folds its lanes in order, thread 0 the warps in order. As in CUB, all threads of the block call it, only thread 0
// holds the result (elsewhere it is 0xFF bytes here), and a barrier must stand before the TempStorage is used again (reported if not).
#ifndef SIMT_CUB_BLOCK_REDUCE_CUH
#define SIMT_CUB_BLOCK_REDUCE_CUH

#include <cuda_runtime.h>

#include <new>

namespace cub {

enum BlockReduceAlgorithm { BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY, BLOCK_REDUCE_RAKING, BLOCK_REDUCE_WARP_REDUCTIONS };

template <typename T, int threads, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int threads_y = 1, int threads_z = 1>
struct BlockReduce {
    static_assert(std::is_trivially_copyable<T>::value, "values travel between threads as bytes");
    enum { THREADS = threads * threads_y * threads_z, WARPS = (THREADS + 31) / 32 };

    struct TempStorage {
        alignas(T) unsigned char partial[WARPS][sizeof(T)];
        unsigned used_after, magic;     // barriers passed when it was last used; marks that it was
    };

    TempStorage &storage;
    BlockReduce(TempStorage &given) : storage(given) {}

    template <typename operation> T Reduce(T value, operation fold, SIMT_SITE) {
        unsigned index = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z), warp = index / 32;
        if (blockDim.x * blockDim.y * blockDim.z != THREADS)
            simt_fail(file, line, "cub::BlockReduce for %d threads in a block of %u", THREADS, blockDim.x * blockDim.y * blockDim.z);
        unsigned lanes = THREADS - warp * 32 < 32 ? THREADS - warp * 32 : 32;
        alignas(T) unsigned char all[32][sizeof(T)];
        simt_warp_gather(lanes == 32 ? ~0u : (1u << lanes) - 1, &value, index % 32 ? NULL : all, sizeof(T), file, line);
        T sum = value;
        if (index % 32 == 0) {
            if (storage.magic == 0x43554252 && storage.used_after == simt_barriers_passed())
                simt_fail(file, line, "a cub TempStorage is used again without a barrier between");
            for (unsigned i = 1; i < lanes; i++) sum = fold(sum, *(T *)all[i]);
            __builtin_memcpy(storage.partial[warp], &sum, sizeof(T));
        }
        __syncthreads(file, line);
        if (index == 0) {
            for (unsigned i = 1; i < WARPS; i++) sum = fold(sum, *(T *)storage.partial[i]);
            storage.used_after = simt_barriers_passed();
            storage.magic = 0x43554252;
        } else {
            __builtin_memset((void *)&sum, 0xFF, sizeof(T));
        }
        return sum;
    }

    T Sum(T value, SIMT_SITE) {
        return Reduce(value, [](const T &a, const T &b) { return a + b; }, file, line);
    }
};

}   // namespace cub

#endif
