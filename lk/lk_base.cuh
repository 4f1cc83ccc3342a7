// SPDX-License-Identifier: MIT
/* lk_base.cuh - what every op stands on: status codes, types, 16-byte accesses, warp reductions, the state of a running
 * log-sum-exp, how the threads of a row read it for that, and the launch.
 *
 * The first half is plain C11 and needs no CUDA header. The second half is for nvcc, or for g++ with -DLK_SIMT -Itests/simt.
 *
 * Needs: lk_ptx.cuh.
 */
#ifndef LK_BASE_CUH
#define LK_BASE_CUH

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus) && __cplusplus < 201703L
#error "lk needs C++17 or later: -std=c++17"
#endif

#define LK_VERSION "0.1.0"

/* The CUDA runtime's own typedef, repeated so that C code needs no CUDA header. */
typedef struct CUstream_st *cudaStream_t;

/* What a launcher returns: 0, one of these, or a positive cudaError_t. Rules are checked in this order. After a negative status
 * nothing was launched and nothing written. A positive status comes from a CUDA call or from a launch: the outputs are then
 * undefined, since an earlier launch of the same call may have run, and CUDA's own last error (cudaGetLastError) is set too. */
typedef int lk_status;
enum {
    LK_OK = 0,
    LK_ERR_NULL = -1,      /* a required pointer is NULL */
    LK_ERR_SHAPE = -2,     /* a size or a stride is out of range, or tensors overlap in a way that is not allowed */
    LK_ERR_VALUE = -3,     /* an option is out of range */
    LK_ERR_PATH = -4,      /* the path asked for cannot run this shape, or cannot run on this device */
    LK_ERR_ALIGNMENT = -5, /* a pointer is not aligned to its element */
    LK_ERR_WORKSPACE = -6, /* the workspace is NULL, too small or not aligned to LK_WORKSPACE_ALIGNMENT bytes */
    LK_ERR_CUBLAS = -7     /* a cuBLASLt call failed; lk_last_error says which, and cuBLAS's number */
};

/* What a <tensor>_dtype field says. */
enum {
    LK_DTYPE_T = 0, /* the T of the function's name */
    LK_DTYPE_F32 = 1,
    LK_DTYPE_F16 = 2,
    LK_DTYPE_BF16 = 3
};

/* What a workspace pointer must be a multiple of. cudaMalloc gives 256, XLA 128. */
#define LK_WORKSPACE_ALIGNMENT 128

/* Linkage of every function of lk with a name that a linker sees. Say `#define LK_API static` before the include to keep all of
 * them inside one file; two versions of lk can then live in one program. */
#ifndef LK_API
#ifdef __cplusplus
#define LK_API extern "C"
#else
#define LK_API extern
#endif
#endif

#if !defined(__cplusplus) || !(defined(__CUDACC__) || defined(LK_SIMT)) /* else defined below */
/* The name of a status, e.g. "LK_ERR_SHAPE" or "cudaErrorInvalidValue". Never NULL. */
LK_API const char *lk_status_string(lk_status status);
/* The last failed call of this thread as a sentence: which operation, which field, which rule. Empty before the first. */
LK_API const char *lk_last_error(void);
#endif

/* LK_DEFINE_<OP>(T) makes code for a GPU, so it belongs in a .cu file. Elsewhere it says so. */
#if !defined(__CUDACC__) && !defined(LK_SIMT)
#ifdef __cplusplus
#define LK_NEEDS_NVCC(macro) static_assert(sizeof(macro) == 0, macro " belongs in one .cu file, compiled by nvcc");
#else
#define LK_NEEDS_NVCC(macro) _Static_assert(sizeof(macro) == 0, macro " belongs in one .cu file, compiled by nvcc");
#endif
#endif

#if defined(__CUDACC__) || defined(LK_SIMT)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "lk_ptx.cuh"

#define LK_HOST static inline
#define LK_KERNEL static __global__

/* LK_SHARED(float, sums, [32]); is `__shared__ float sums[32];`, spelt so that the simulator can give each block its own. */
#if !defined(LK_SIMT)
#define LK_SHARED(type, name, dims) __shared__ type name dims
#endif
/* LK_DYN_SMEM(struct my_smem, smem); makes `smem` refer to the launch's dynamic shared memory, aligned to 128 bytes: where
 * a warp's 512 bytes began 16 bytes behind such a line, copies into them cost 0.05 of an H200's ceiling. */
#if !defined(LK_SIMT)
#define LK_DYN_SMEM(type, name)                                                                                                \
    extern __shared__ __align__(128) uint4 lk_dynamic_shared[];                                                                \
    type &name = *(type *)lk_dynamic_shared
#endif

/* ---- Errors ---------------------------------------------------------------------------------------------------------- */

/* Weak unless LK_API is static, so that any number of .cu files may include this header and C still finds one symbol. */
LK_API inline __attribute__((used)) const char *lk_last_error(void)
{
    static thread_local char text[512];
    return text;
}

LK_API inline __attribute__((used)) const char *lk_status_string(lk_status status)
{
    switch (status) {
    case LK_OK: return "LK_OK";
    case LK_ERR_NULL: return "LK_ERR_NULL";
    case LK_ERR_SHAPE: return "LK_ERR_SHAPE";
    case LK_ERR_VALUE: return "LK_ERR_VALUE";
    case LK_ERR_PATH: return "LK_ERR_PATH";
    case LK_ERR_ALIGNMENT: return "LK_ERR_ALIGNMENT";
    case LK_ERR_WORKSPACE: return "LK_ERR_WORKSPACE";
    case LK_ERR_CUBLAS: return "LK_ERR_CUBLAS";
    }
    return status > 0 ? cudaGetErrorName((cudaError_t)status) : "unknown lk_status";
}

/* Keeps "op: sentence" for lk_last_error and returns the status. */
__attribute__((format(printf, 3, 4))) LK_HOST lk_status lk_fail(lk_status status, const char *op, const char *format, ...)
{
    char *const text = (char *)lk_last_error(); /* 512 bytes */
    const int used = snprintf(text, 512, "%s: ", op);
    va_list list;
    va_start(list, format);
    vsnprintf(text + used, 512 - (size_t)used, format, list);
    va_end(list);
    return status;
}

/* Whether a pointer is aligned to its element; NULL is. */
LK_HOST lk_status lk_check_aligned(const char *op, const char *field, const void *pointer, size_t bytes)
{
    if ((uintptr_t)pointer % bytes == 0) return LK_OK;
    return lk_fail(LK_ERR_ALIGNMENT, op, "%s is not aligned to its element of %d bytes", field, (int)bytes);
}

/* Whether a workspace will do for a call that needs `needed` bytes. */
LK_HOST lk_status lk_check_workspace(const char *op, const void *workspace, size_t given, size_t needed)
{
    if (!needed) return LK_OK;
    if (!workspace) return lk_fail(LK_ERR_WORKSPACE, op, "workspace is NULL; this call needs %zu bytes", needed);
    if (given < needed) return lk_fail(LK_ERR_WORKSPACE, op, "workspace_bytes is %zu; this call needs %zu", given, needed);
    if ((uintptr_t)workspace % LK_WORKSPACE_ALIGNMENT)
        return lk_fail(LK_ERR_WORKSPACE, op, "workspace is not aligned to %d bytes", LK_WORKSPACE_ALIGNMENT);
    return LK_OK;
}

/* Passes a launch's result on; a CUDA error gets its sentence. */
LK_HOST lk_status lk_launched(const char *op, cudaError_t error)
{
    if (error == cudaErrorNoKernelImageForDevice)
        return lk_fail((lk_status)error, op, "the program has no code for this GPU; tell nvcc its compute capability, as by "
                                             "-gencode arch=compute_90a,code=sm_90a");
    return error == cudaSuccess ? LK_OK : lk_fail((lk_status)error, op, "the launch failed: %s", cudaGetErrorString(error));
}

/* The same for what asks the device before anything is launched. */
LK_HOST lk_status lk_asked_device(const char *op, cudaError_t error)
{
    return error == cudaSuccess || error == cudaErrorNoKernelImageForDevice
               ? lk_launched(op, error)
               : lk_fail((lk_status)error, op, "no usable CUDA device: %s", cudaGetErrorString(error));
}

/* The answer of a workspace query of an op that needs none, once its arguments are checked. */
LK_HOST lk_status lk_no_workspace(lk_status checked, size_t *bytes)
{
    if (checked == LK_OK && bytes) *bytes = 0;
    return checked;
}

LK_HOST int64_t lk_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* What the launchers ask of the current device: its number of SMs, the KiB of shared memory that each one has, and the compute
 * capability that the code it runs was compiled for, 90 for 9.0. A card also runs PTX of older ones: what that code left out is
 * not there, whatever the card could do. A thread's first call loads the code, which makes a context where there is none. */
typedef struct {
    int arch, sms, smem;
} lk_device;

/* Its launch bound says what was loaded. ptxVersion does not where files were linked with -rdc=true: there it is the lowest of
 * all of them. */
LK_KERNEL void __launch_bounds__(LK_ARCH ? LK_ARCH / 10 : 1) lk_code_kernel(void) {}
static thread_local struct {
    int id, arch;
} lk_code_known = {-1, 0};

LK_HOST cudaError_t lk_current_device(lk_device *device)
{
    int id = 0, smem = 0;
    cudaError_t error = cudaGetDevice(&id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device->sms, cudaDevAttrMultiProcessorCount, id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
    if (error == cudaSuccess && id != lk_code_known.id) {
        cudaFuncAttributes code;
        error = cudaFuncGetAttributes(&code, (const void *)lk_code_kernel);
#if defined(LK_SIMT)
        const int arch = code.ptxVersion;
#else
        const int arch = code.maxThreadsPerBlock;
#endif
        if (error == cudaSuccess) lk_code_known = {id, arch};
    }
    device->arch = lk_code_known.arch, device->smem = smem / 1024;
    return error;
}

/* ---- LK_CHECK: tensors against the memory they lie in ----------------------------------------------------------------- */

/* A tensor of a call, for lk_check_memory. */
typedef struct {
    const char *name;
    const void *pointer; /* NULL: not given, nothing to check */
    int element;         /* bytes of an element */
    int64_t elements;    /* from the first to one past the last that the call may touch, strides included; 0: none */
} lk_tensor;

/* Compiled with -DLK_CHECK every launcher calls this before it launches, to find wrong pointers where they are made; otherwise
 * it is empty. An error: memory of the host or of another device, and a tensor that ends behind the allocation it begins in. A
 * line on stderr: an allocation of just twice the tensor, which may be f32 data given to a function of 16 bits. CUDA's
 * allocations are what is looked at; a framework's pool of memory is one large allocation and hides what lies in it. */
LK_HOST lk_status lk_check_memory(const char *op, const lk_tensor *list, int count)
{
    (void)op, (void)list, (void)count;
#if defined(LK_CHECK)
    typedef int range_function(uintptr_t *base, size_t *bytes, uintptr_t pointer); /* CUresult (CUdeviceptr *, ...) */
    void *found = NULL;
    enum cudaDriverEntryPointQueryResult state;
    int current = 0;
    cudaError_t error = cudaGetDevice(&current);
    if (!error) error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found, 12000, cudaEnableDefault, &state);
    if (error) return lk_asked_device(op, error);
    for (int i = 0; i < count; i++) {
        const lk_tensor t = list[i];
        if (!t.pointer || t.elements == 0) continue;
        cudaPointerAttributes about = {};
        error = cudaPointerGetAttributes(&about, t.pointer);
        if (error) return lk_asked_device(op, error);
        if (about.type == cudaMemoryTypeUnregistered || about.type == cudaMemoryTypeHost)
            return lk_fail(LK_ERR_VALUE, op, "%s is a pointer to host memory; it must be memory of the device", t.name);
        if (about.type == cudaMemoryTypeDevice && about.device != current)
            return lk_fail(LK_ERR_VALUE, op, "%s lies on device %d; the current device is %d", t.name, about.device, current);
        uintptr_t base = 0;
        size_t all = 0;
        if (!found || ((range_function *)found)(&base, &all, (uintptr_t)t.pointer)) continue;
        const size_t left = all - (size_t)((uintptr_t)t.pointer - base), needed = (size_t)t.elements * (size_t)t.element;
        if (needed > left)
            return lk_fail(LK_ERR_SHAPE, op,
                           "%s needs %zu bytes, %lld elements of %d, but its allocation ends after %zu; are its sizes, its stride "
                           "and its type right?", t.name, needed, (long long)t.elements, t.element, left);
        if (t.element == 2 && left == all && left == 2 * needed)
            fprintf(stderr, "%s: %s is an allocation of %zu bytes, twice what %lld elements of 2 bytes take; is it f32?\n", op,
                    t.name, all, (long long)t.elements);
    }
#endif
    return LK_OK;
}

/* A line on stderr about what is allowed and seldom meant; nothing without -DLK_CHECK. */
LK_HOST void lk_check_warn(const char *op, bool suspect, const char *sentence)
{
    (void)op, (void)suspect, (void)sentence;
#if defined(LK_CHECK)
    if (suspect) fprintf(stderr, "%s: %s\n", op, sentence);
#endif
}

/* ---- Launch ---------------------------------------------------------------------------------------------------------- */

/* kernel<<<grid, block, smem, stream>>>(args), spelt so that it also runs on the CPU. */
template <class Args>
LK_HOST cudaError_t lk_launch(void (*kernel)(Args), int64_t grid, int block, size_t smem, cudaStream_t stream, const Args &args)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)grid);
    config.blockDim = dim3((unsigned)block);
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, args);
}

/* Lets a kernel have all the shared memory that a block can get on the current device. It is the same number at each call,
 * whatever the call needs: the limit belongs to the kernel, so a smaller one would break launches of other host threads and
 * graphs that were captured before. */
LK_HOST cudaError_t lk_allow_shared_memory(const void *kernel)
{
    int id = 0, most = 0;
    cudaFuncAttributes now;
    cudaError_t error = cudaGetDevice(&id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&now, kernel);
    if (error != cudaSuccess) return error;
    most -= (int)now.sharedSizeBytes; /* its static shared memory */
    if (now.maxDynamicSharedSizeBytes == most) return cudaSuccess;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

/* A launcher's launch, of clusters of `cluster` blocks (1: none). pdl: with programmatic dependent launch, so that the kernel
 * may start while those before it still run. Until lk_griddepcontrol_wait(), which every thread executes, it neither reads nor
 * writes global memory, so nothing that it computes depends on what stands there. It may ask for what it will read to be
 * brought into the L2: DRAM traffic in front of the wait, of which no thread sees anything. On an H200 that saved 13 % of
 * cross_entropy's backward of 4096 rows of 1024, in one run. A plain copy, as in bench.h, does without.
 *
 * An SM keeps the split of its memory into L1 and shared memory as long as it has a block. Blocks that come while those of the
 * kernel in front run have what that one left, so that fewer may fit at once. Where a grid is as many blocks as fit, those that
 * do not come behind the others, each with a whole share. Such a grid, if it is long, is launched without pdl. */
template <class Args>
LK_HOST lk_status lk_launch_blocks(const char *op, bool pdl, void (*kernel)(Args), int64_t grid, int cluster, int block,
                                   size_t smem, cudaStream_t stream, const Args &args)
{
    if (smem > 32 * 1024) { /* 48 KiB, static shared memory included, are a kernel's without asking */
        const cudaError_t error = lk_allow_shared_memory((const void *)kernel);
        if (error) return lk_launched(op, error);
    }
    cudaLaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (pdl) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = (unsigned)cluster;
        attributes[count].val.clusterDim.y = 1;
        attributes[count++].val.clusterDim.z = 1;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid > INT32_MAX ? UINT32_MAX : (unsigned)grid); /* CUDA refuses more than INT32_MAX */
    config.blockDim = dim3((unsigned)block);
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return lk_launched(op, cudaLaunchKernelEx(&config, kernel, args));
}

/* The same with programmatic dependent launch from sm_90 on. */
template <class Args>
LK_HOST lk_status lk_launch_pdl(const char *op, const lk_device *device, void (*kernel)(Args), int64_t grid, int cluster,
                                int block, size_t smem, cudaStream_t stream, const Args &args)
{
    return lk_launch_blocks(op, device->arch >= 90, kernel, grid, cluster, block, smem, stream, args);
}

/* ---- Types and 16-byte accesses --------------------------------------------------------------------------------------- */

typedef float lk_f32;
typedef __half lk_f16;
typedef __nv_bfloat16 lk_bf16;

LK_DEVICE float lk_to_float(lk_f32 x) { return x; }
LK_DEVICE float lk_to_float(lk_f16 x) { return __half2float(x); }
LK_DEVICE float lk_to_float(lk_bf16 x) { return __bfloat162float(x); }

/* *out = x, rounded to nearest even. */
LK_DEVICE void lk_put(lk_f32 *out, float x) { *out = x; }
LK_DEVICE void lk_put(lk_f16 *out, float x) { *out = __float2half_rn(x); }
LK_DEVICE void lk_put(lk_bf16 *out, float x) { *out = __float2bfloat16_rn(x); }

/* LK_VEC<T> elements: 16 bytes, the widest access of a thread. They stay packed until they are used, which keeps many loads
 * in flight in few registers. */
template <class T> constexpr int LK_VEC = 16 / (int)sizeof(T);
template <class T> struct lk_vec {
    uint4 raw;
};

/* Streaming accesses: what passes through once does not push other data out of the caches. */
template <class T> LK_DEVICE lk_vec<T> lk_load_vec(const T *aligned)
{
    return {__ldcs((const uint4 *)aligned)};
}
template <class T> LK_DEVICE void lk_store_vec(T *aligned, lk_vec<T> v)
{
    __stcs((uint4 *)aligned, v.raw);
}
/* What the caches may keep, PTX's ld.ca and st.wb. How tensors happen to lie to each other in memory matters less to these;
 * which are sooner is each kernel's to measure. */
template <class T> LK_DEVICE lk_vec<T> lk_load_vec_ca(const T *aligned)
{
    return {__ldca((const uint4 *)aligned)};
}
template <class T> LK_DEVICE void lk_store_vec_wb(T *aligned, lk_vec<T> v)
{
    *(uint4 *)aligned = v.raw;
}

LK_DEVICE void lk_unpack(float (&x)[4], lk_vec<lk_f32> v)
{
    x[0] = __uint_as_float(v.raw.x), x[1] = __uint_as_float(v.raw.y);
    x[2] = __uint_as_float(v.raw.z), x[3] = __uint_as_float(v.raw.w);
}
LK_DEVICE void lk_unpack(float (&x)[8], lk_vec<lk_bf16> v)
{
    const uint32_t word[4] = {v.raw.x, v.raw.y, v.raw.z, v.raw.w};
    for (int i = 0; i < 4; i++) { /* a bf16 is the upper half of a float */
        x[2 * i] = __uint_as_float(word[i] << 16);
        x[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
}
LK_DEVICE void lk_unpack(float (&x)[8], lk_vec<lk_f16> v)
{
    const uint32_t word[4] = {v.raw.x, v.raw.y, v.raw.z, v.raw.w};
    for (int i = 0; i < 4; i++) {
        __half2 pair;
        memcpy(&pair, &word[i], sizeof pair);
        const float2 two = __half22float2(pair);
        x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
}

LK_DEVICE void lk_pack(lk_vec<lk_f32> *v, const float (&x)[4])
{
    v->raw = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}
LK_DEVICE void lk_pack(lk_vec<lk_bf16> *v, const float (&x)[8])
{
    uint32_t word[4];
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&word[i], &pair, sizeof pair);
    }
    v->raw = make_uint4(word[0], word[1], word[2], word[3]);
}
LK_DEVICE void lk_pack(lk_vec<lk_f16> *v, const float (&x)[8])
{
    uint32_t word[4];
    for (int i = 0; i < 4; i++) {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&word[i], &pair, sizeof pair);
    }
    v->raw = make_uint4(word[0], word[1], word[2], word[3]);
}

/* How a row of any alignment splits into 16-byte vectors: `edge` single elements, `head` of them before the vectors and the
 * rest behind, and `vecs` aligned vectors between. */
typedef struct {
    int head, edge;
    int64_t vecs;
} lk_split;

template <class T> LK_DEVICE lk_split lk_split_row(const T *row, int64_t cols)
{
    const int past = (int)((uintptr_t)row / sizeof(T)) & (LK_VEC<T> - 1);
    int64_t head = past ? LK_VEC<T> - past : 0;
    if (head > cols) head = cols;
    const int64_t vecs = (cols - head) / LK_VEC<T>;
    return {(int)head, (int)(cols - vecs * LK_VEC<T>), vecs};
}

/* The column of single element i, 0 <= i < split.edge. */
template <class T> LK_DEVICE int64_t lk_edge_col(lk_split split, int i)
{
    return i < split.head ? i : split.vecs * LK_VEC<T> + i;
}

/* ---- Mathematics, the same under --use_fast_math ------------------------------------------------------------------------ */

#define LK_LOG2E 1.44269504088896341f
#define LK_LN2 0.693147180559945309f

/* Neither an infinity nor a NaN. */
LK_DEVICE bool lk_is_finite(float x)
{
    return fabsf(x) <= 3.402823466e38f;
}

/* e^x. The relative error is (|x| + 2) 2^-23 at most: lk_ex2's, and the rounding of x log2 e. */
LK_DEVICE float lk_exp(float x)
{
    return lk_ex2(x * LK_LOG2E);
}

/* log(x) = k log 2 + the result, |result| < 0.35, for a normal x: with x = 2^k (1 + f) and 1 + f in [sqrt(1/2), sqrt(2)),
 * log(1 + f) = f + f^2 (f P(f) - 1/2), P a least-maximum fit of degree 7; within 1.3 ulp. */
LK_DEVICE float lk_log_split(float x, float *k)
{
    const int bits = __float_as_int(x), exponent = (bits - 0x3f3504f3) >> 23;
    const float f = __int_as_float(bits - exponent * (1 << 23)) - 1.0f;
    float p = -0x1.41ebfcp-4f;
    p = fmaf(p, f, 0x1.07d08ap-3f);
    p = fmaf(p, f, -0x1.0ce0aep-3f);
    p = fmaf(p, f, 0x1.226e5ap-3f);
    p = fmaf(p, f, -0x1.547888p-3f);
    p = fmaf(p, f, 0x1.99a596p-3f);
    p = fmaf(p, f, -0x1.000220p-2f);
    p = fmaf(p, f, 0x1.55554ap-2f);
    p = fmaf(p, f, -0.5f);
    *k = (float)exponent;
    return fmaf(p, f * f, f);
}

/* The natural logarithm, within 1.3 ulp, near 1 too: of a normal number, 0 or +inf; NaN otherwise. */
LK_DEVICE float lk_log(float x)
{
    if (!(x > 0.0f && lk_is_finite(x))) return x == 0.0f ? -INFINITY : x > 0.0f ? x : NAN;
    float k;
    const float log = lk_log_split(x, &k);
    return fmaf(k, LK_LN2, log);
}

/* 1 / sqrt(x), rounded to nearest. */
LK_DEVICE float lk_rsqrt(float x)
{
    return __frsqrt_rn(x);
}

/* The sum over `team` consecutive lanes, a power of two. All 32 lanes call it; every lane of a team gets its team's sum. */
LK_DEVICE float lk_sum_warp(float x, int team = 32)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

/* ---- The state of a running log-sum-exp --------------------------------------------------------------------------------- */

/* A set of values seen so far: the largest, and sum exp(value - max). A NaN makes the sum NaN, +inf makes it +inf; the empty
 * set is (-inf, 0), and any number of -inf values add nothing to it. Merging states in another order changes only the
 * rounding of the sum. Instead of the largest value any other may stand that is no more than 60 below it: sums stay far from
 * float's limits.
 * Where a function is given a scale, a positive one, the values are not yet multiplied by it: the sum is that of
 * exp(scale (value - max)). So differences of large values are exact, also those to max. */
typedef struct {
    float max, sum;
} lk_lse;

LK_DEVICE lk_lse lk_lse_empty(void)
{
    return {-INFINITY, 0.0f};
}

/* What exponents are taken against: the maximum where it is finite, else 0, since inf - inf would make a NaN of nothing. */
LK_DEVICE float lk_lse_reference(float max)
{
    return lk_is_finite(max) ? max : 0.0f;
}

/* The state of the union of two disjoint sets. */
LK_DEVICE lk_lse lk_lse_merge(lk_lse a, lk_lse b, float scale = 1.0f)
{
    const float max = fmaxf(a.max, b.max), reference = lk_lse_reference(max), rate = scale * LK_LOG2E;
    return {max, a.sum * lk_ex2(rate * (a.max - reference)) + b.sum * lk_ex2(rate * (b.max - reference))};
}

/* Adds n values at the price of n + 1 exponentials; add many at a time. Four chains, so that neither the maxima nor the sums
 * wait for each other's latency. low, unless NULL, is what each value was rounded by. */
template <int n>
LK_DEVICE lk_lse lk_lse_add(lk_lse s, const float (&value)[n], float scale = 1.0f, const float *low = NULL)
{
    const float rate = scale * LK_LOG2E;
    float most[4] = {s.max, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < n; i++) most[i % 4] = fmaxf(most[i % 4], value[i]);
    const float max = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])), reference = lk_lse_reference(max);
    float sum[4] = {s.sum * lk_ex2(rate * (s.max - reference)), 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < n; i++) sum[i % 4] += lk_ex2(rate * (low ? (value[i] - reference) + low[i] : value[i] - reference));
    return {max, (sum[0] + sum[1]) + (sum[2] + sum[3])};
}

/* What rounding scale x to `product` took off; 0 from 2^28 on, where that may be more than an exponential can make up for. */
LK_DEVICE float lk_lse_product_low(float scale, float x, float product)
{
    return fabsf(product) < 0x1p28f ? fmaf(scale, x, -product) : 0.0f;
}

/* max + log(sum), where lk_log_split made k and log of sum. The power of two meets max first, since the two may cancel, and
 * what that addition rounds off is added at the end: one rounding in all, like that of max + log(sum) where nothing cancels.
 * rounded, unless NULL, becomes what that rounding took off: result + *rounded is as good as the terms are. */
LK_DEVICE float lk_lse_join(float max, float k, float log, float *rounded = NULL)
{
    const float power = k * 0x1.62e400p-1f; /* exact: log 2 is this constant's 15 bits and a rest */
    const float high = max + power, back = high - max;
    const float low = (max - (high - back)) + (power - back);
    const float rest = low + fmaf(k, 0x1.7f7d1cp-20f, log), result = high + rest;
    if (rounded) {
        const float added = result - high;
        *rounded = (high - (result - added)) + (rest - added);
    }
    return result;
}

/* log sum exp(value): -inf for the empty set. rounded as in lk_lse_join; 0 where the result is not finite. */
LK_DEVICE float lk_lse_log(lk_lse s, float *rounded = NULL)
{
    if (rounded) *rounded = 0.0f;
    if (!(s.sum > 0.0f && lk_is_finite(s.sum))) return s.sum == 0.0f ? -INFINITY : s.sum;
    float k;
    const float log = lk_log_split(s.sum, &k);
    return lk_lse_join(s.max, k, log, rounded);
}

/* Merges the states of `team` consecutive lanes, a power of two. All 32 lanes call it; every lane of a team gets the result. */
LK_DEVICE lk_lse lk_lse_warp(lk_lse s, int team = 32, float scale = 1.0f)
{
    float max = s.max;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    float sum = s.sum * lk_ex2(scale * LK_LOG2E * (s.max - lk_lse_reference(max)));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        if (offset < team) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return {max, sum};
}

/* ---- Reading a row for its log-sum-exp ---------------------------------------------------------------------------------- */

/* Sums are taken against a reference, a value that the lanes of a team agree on early, and not against a running maximum, so
 * that an element costs a multiply-add, an ex2 and an addition: sum 2^(rate x - base) with rate = scale log2 e and base = rate
 * reference, rounded. A sum of floats does not care that its terms are large as long as it stays below LK_LSE_LIMIT. Where it
 * does not, or where there is a NaN or an infinity of the wrong sign, the warp reads its shares again with a running
 * maximum. */
#define LK_LSE_LIMIT 0x1p80f
#define LK_LSE_BASE 0x1p31f /* likewise for a base, whose rounding a factor of 2^64 can make up for up to here */

/* What scale x is -inf for, the value that adds nothing. */
LK_DEVICE float lk_lse_nothing(float scale)
{
    return scale > 0.0f ? -INFINITY : INFINITY;
}

/* The state of sum = sum 2^(rate x - base), rate = scale log2 e. base differs from rate reference, and the state's maximum
 * from scale reference, by rounding errors, which are known exactly: the sum makes up for both. */
LK_DEVICE lk_lse lk_lse_against(float reference, float base, float sum, float scale)
{
    const float max = scale * reference, low = lk_lse_product_low(scale, reference, max);
    return {max, sum * lk_ex2(fmaf(LK_LOG2E, low, -fmaf(scale * LK_LOG2E, reference, -base)))};
}

/* sum_j 2^(rate x_j - base) over a vector, added pairwise. */
template <class T> LK_DEVICE float lk_lse_terms(lk_vec<T> raw, float rate, float base)
{
    float x[LK_VEC<T>];
    lk_unpack(x, raw);
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++) x[j] = lk_ex2(fmaf(rate, x[j], -base));
#pragma unroll
    for (int n = LK_VEC<T> / 2; n > 0; n /= 2)
#pragma unroll
        for (int j = 0; j < n; j++) x[j] += x[j + n];
    return x[0];
}

/* The share of thread `rank` in a row that 1 << size_log2 threads read together: `count` vectors, the first at `first` and
 * then every size-th, and of the single elements at both ends numbers rank, rank + size, ... All zero: nothing. */
template <class T> struct lk_lse_share {
    const T *row, *first;
    lk_split split;
    int count;
};

template <class T> LK_DEVICE lk_lse_share<T> lk_lse_aim(const T *row, lk_split split, int rank, int size_log2)
{
    const int over = (int)split.vecs & ((1 << size_log2) - 1);
    return {row, row + split.head + rank * LK_VEC<T>, split, (int)(split.vecs >> size_log2) + (rank < over)};
}

/* Loads the first U vectors of a share. */
template <class T, int U> LK_DEVICE void lk_lse_start(lk_vec<T> (&raw)[U], lk_lse_share<T> share, int size_log2)
{
    const int64_t step = (int64_t)LK_VEC<T> << size_log2;
#pragma unroll
    for (int u = 0; u < U; u++) {
        if (u < share.count) raw[u] = lk_load_vec(share.first + u * step);
    }
}

/* Asks for the first n vectors of a share, before there may be loads. */
template <int n, class T> LK_DEVICE void lk_lse_prefetch(lk_lse_share<T> share, int size_log2)
{
#pragma unroll
    for (int u = 0; u < n; u++)
        if (u < share.count) lk_prefetch_l2(share.first + u * ((int64_t)LK_VEC<T> << size_log2));
}

/* The state of a share's vectors with a running maximum. */
template <bool apart, class T> LK_NOINLINE lk_lse lk_lse_read_slowly(const T *next, int count, int64_t step, float scale)
{
    lk_lse s = lk_lse_empty();
    for (int i = 0; i < count; i++, next += step) {
        float x[LK_VEC<T>], z[LK_VEC<T>], low[LK_VEC<T>];
        lk_unpack(x, lk_load_vec(next));
#pragma unroll
        for (int j = 0; j < LK_VEC<T>; j++) z[j] = scale * x[j], low[j] = lk_lse_product_low(scale, x[j], z[j]);
        s = apart ? lk_lse_add(s, x, scale) : lk_lse_add(s, z, 1.0f, low);
    }
    return s;
}

/* The state of the shares of `team` lanes; each lane reads its own. U loads are always in flight: raw holds the share's first
 * U vectors (lk_lse_start); each one is used and the next one loaded into its registers. The lanes agree on a reference early,
 * while they wait for loads anyway, so that at the end they only have to add.
 * apart: the state's values are x, with a scale of their own (see lk_lse); otherwise they are scale x, for any scale.
 * Who calls: all 32 lanes of a warp; those of a team without a row with a share of nothing and row = false. Who holds the
 * result: every lane of a team with a row. */
template <bool apart, class T, int U>
LK_DEVICE lk_lse lk_lse_read(lk_vec<T> (&raw)[U], lk_lse_share<T> share, float scale, int rank, int size_log2, int team,
                             bool row = true)
{
    const int64_t step = (int64_t)LK_VEC<T> << size_log2;
    const bool rising = apart || scale > 0.0f;
    const float rate = scale * LK_LOG2E, nothing = apart ? -INFINITY : lk_lse_nothing(scale);
    const bool edge = rank < share.split.edge;
    float single[1] = {nothing};
    if (edge) single[0] = lk_to_float(share.row[lk_edge_col<T>(share.split, rank)]);

    float x[LK_VEC<T>], reference = share.count > 0 ? nothing : single[0];
    lk_unpack(x, raw[0]);
#pragma unroll
    for (int j = 0; j < LK_VEC<T>; j++)
        if (share.count > 0) reference = rising ? fmaxf(reference, x[j]) : fminf(reference, x[j]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        if (offset >= team) continue;
        const float other = __shfl_xor_sync(0xffffffffu, reference, offset);
        reference = rising ? fmaxf(reference, other) : fminf(reference, other);
    }
    const float base = rate * reference;
    float sum = 0.0f, lost = 0.0f, part = edge ? lk_ex2(fmaf(rate, single[0], -base)) : 0.0f;
    const T *next = share.first + U * step;
    int left = share.count;
    while (left > U) {
        for (const int stop = left > 17 * U ? left - 16 * U : U; left > stop; left -= U) {
#pragma unroll
            for (int u = 0; u < U; u++, next += step) {
                part += lk_lse_terms(raw[u], rate, base);
                if (U + u < left) raw[u] = lk_load_vec(next);
            }
        }
        part -= lost; /* Kahan's sum, now and then: what the additions of a long row round off is taken along */
        const float grown = sum + part;
        lost = (grown - sum) - part;
        sum = grown, part = 0.0f;
    }
#pragma unroll
    for (int u = 0; u < U; u++)
        if (u < left) part += lk_lse_terms(raw[u], rate, base);
    sum += part - lost;
    for (int i = rank + (1 << size_log2); i < share.split.edge; i += 1 << size_log2) /* rows shorter than a vector */
        sum += lk_ex2(fmaf(rate, lk_to_float(share.row[lk_edge_col<T>(share.split, i)]), -base));

    const bool fast = (fabsf(base) < LK_LSE_BASE && sum < LK_LSE_LIMIT) || !row;
    if (__all_sync(0xffffffffu, fast)) {
        if (!apart) return lk_lse_against(reference, base, lk_sum_warp(sum, team), scale);
        return {reference, lk_sum_warp(sum, team) * lk_ex2(-fmaf(rate, reference, -base))}; /* likewise */
    }
    lk_lse s = lk_lse_read_slowly<apart>(share.first, share.count, step, scale);
    for (int i = rank; i < share.split.edge; i += 1 << size_log2) {
        const float value = lk_to_float(share.row[lk_edge_col<T>(share.split, i)]);
        single[0] = apart ? value : scale * value;
        const float low = lk_lse_product_low(scale, value, single[0]);
        s = lk_lse_add(s, single, apart ? scale : 1.0f, apart ? NULL : &low);
    }
    return lk_lse_warp(s, team, apart ? scale : 1.0f);
}

#endif /* CUDA or the simulator */
#endif
