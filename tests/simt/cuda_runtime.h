// SPDX-License-Identifier: MIT
// Stand-in for CUDA's cuda_runtime.h: keywords, launches and the runtime calls that this project uses. See simt.h.
#ifndef SIMT_CUDA_RUNTIME_H
#define SIMT_CUDA_RUNTIME_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <type_traits>
#include <utility>

#include "cuda_runtime_api.h"
#include "simt.h"
#include "vector_types.h"

/* ---- keywords -----------------------------------------------------------------------------------------------------------
   No __shared__, which no macro can spell: SIMT_SHARED(float, tile, [32][33]); is __shared__ float tile[32][33]; and `rewrite`
   turns the one into the other. No __noinline__ either: as a macro it breaks libstdc++. */

#define SIMT_SHARED(type, name, extent) SIMT_SHARED_ALIGNED(1, type, name, extent)
#define SIMT_SHARED_ALIGNED(alignment, type, name, extent)                                                                 \
    using simt_type_##name = type extent;                                                                                  \
    static const simt_variable simt_variable_##name = {                                                                    \
        #name, sizeof(simt_type_##name),                                                                                   \
        alignof(simt_type_##name) > (alignment) ? alignof(simt_type_##name) : (alignment), __FILE__, __LINE__};            \
    simt_type_##name &name = *(simt_type_##name *)simt_shared(&simt_variable_##name)

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline         // not by force: g++ takes twice the time to compile then, and the tests run as fast
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

/* Functions, so that they are what the running thread's coordinates are; cudaLaunchConfig_t has members of the same names, so that
   `config.gridDim = dim3(8)` compiles too. */
#define threadIdx simt_thread_idx()
#define blockIdx simt_block_idx()
#define blockDim simt_block_dim()
#define gridDim simt_grid_dim()
static inline const uint3 &simt_thread_idx(void) { return simt_here->thread_idx; }
static inline const uint3 &simt_block_idx(void) { return simt_here->block_idx; }
static inline const dim3 &simt_block_dim(void) { return simt_here->block_dim; }
static inline const dim3 &simt_grid_dim(void) { return simt_here->grid_dim; }
static const int warpSize = 32;

/* ---- launch types ---------------------------------------------------------------------------------------------------- */

typedef enum cudaLaunchAttributeID {
    cudaLaunchAttributeIgnore = 0,
    cudaLaunchAttributeCooperative = 2,
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6,
} cudaLaunchAttributeID;

typedef union cudaLaunchAttributeValue {
    char pad[64];
    struct { unsigned x, y, z; } clusterDim;
    int cooperative;
    int programmaticStreamSerializationAllowed;
} cudaLaunchAttributeValue;

typedef struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
} cudaLaunchAttribute;

typedef struct cudaLaunchConfig {
    dim3 grid_, block_;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
    dim3 &simt_grid_dim(void) { return grid_; }         // spelt gridDim
    dim3 &simt_block_dim(void) { return block_; }       // spelt blockDim
    const dim3 &simt_grid_dim(void) const { return grid_; }
    const dim3 &simt_block_dim(void) const { return block_; }
} cudaLaunchConfig_t;

typedef enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 14,
} cudaFuncAttribute;

/* ---- launches, and calls that take a kernel -------------------------------------------------------------------------- */

cudaError_t simt_func_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value);
cudaError_t simt_func_get_attributes(struct cudaFuncAttributes *attributes, const void *kernel);
cudaError_t simt_max_active_blocks(int *blocks, int threads, size_t dynamic_bytes);
cudaError_t simt_max_active_clusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config);
cudaError_t simt_launch(const cudaLaunchConfig_t *config, const void *kernel, const std::function<void()> &body);

static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, cudaGraphNode_t *, char *, size_t) {
    return cudaGraphInstantiate(executable, graph, 0);
}
template <typename T> static inline cudaError_t cudaMalloc(T **pointer, size_t bytes) { return cudaMalloc((void **)pointer, bytes); }
template <typename T> static inline cudaError_t cudaMallocHost(T **pointer, size_t bytes) { return cudaMallocHost((void **)pointer, bytes); }
template <typename T> static inline cudaError_t cudaFuncSetAttribute(T *kernel, cudaFuncAttribute attribute, int value) {
    return simt_func_set_attribute((const void *)kernel, attribute, value);
}
template <typename T> static inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, T *kernel) {
    return simt_func_get_attributes(attributes, (const void *)kernel);
}
template <typename T>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, T *, int threads, size_t dynamic_bytes) {
    return simt_max_active_blocks(blocks, threads, dynamic_bytes);
}
template <typename T>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, T *, int threads, size_t dynamic_bytes, unsigned) {
    return simt_max_active_blocks(blocks, threads, dynamic_bytes);
}
template <typename T> static inline cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, T *kernel, const cudaLaunchConfig_t *config) {
    return simt_max_active_clusters(clusters, (const void *)kernel, config);
}

/* The call is kept as a closure: run at once, or by cudaGraphLaunch if the stream is being captured. */
template <typename... parameters, typename... arguments>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(parameters...), arguments &&...args) {
    static_assert((std::is_trivially_copyable<parameters>::value && ...), "kernel arguments are copied as bytes");
    return [&](parameters... values) {
        return simt_launch(config, (const void *)kernel, [=] { kernel(values...); });
    }(std::forward<arguments>(args)...);
}

/* kernel<<<grid, block, bytes, stream>>>(x, y) is simt_call(simt_config(grid, block, bytes, stream), kernel, x, y), by `rewrite`. */
struct simt_config : cudaLaunchConfig_t {
    simt_config(dim3 grid, dim3 block, size_t bytes = 0, cudaStream_t on = 0) : cudaLaunchConfig_t() {
        grid_ = grid, block_ = block, dynamicSmemBytes = bytes, stream = on;
    }
};
template <typename... parameters, typename... arguments>
static inline void simt_call(const simt_config &config, void (*kernel)(parameters...), arguments &&...args) {
    cudaLaunchKernelEx(&config, kernel, std::forward<arguments>(args)...);
}

#include "simt_device.h"

#endif
