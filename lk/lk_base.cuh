// SPDX-License-Identifier: MIT
/* lk_base.cuh - what every op stands on: status codes and their sentences, the launch, the types and their 16-byte accesses.
 *
 * The first half is plain C11 and needs no CUDA header, nor does the little arithmetic of the host behind it, in C++. The rest is
 * for nvcc, or for g++ with -DLK_SIMT -Itests/simt. NVRTC takes it without the launch.
 *
 * Needs: lk_ptx.cuh.
 */
#ifndef LK_BASE_CUH
#define LK_BASE_CUH

#if defined(__CUDACC_RTC__) /* NVRTC has no headers of the host. Headers of cuda/std, if any, come before lk. */
typedef int int32_t;
typedef long long int64_t;
typedef unsigned short uint16_t;
typedef unsigned uint32_t;
typedef unsigned long long uint64_t, uintptr_t;
#ifndef INT32_MAX
#define INT32_MAX 0x7fffffff
#define INT64_MAX 0x7fffffffffffffffll
#define INT64_MIN (-INT64_MAX - 1)
#endif
#ifndef FLT_MAX
#define FLT_MAX 0x1.fffffep127f
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#endif
#else
#include <stddef.h>
#include <stdint.h>
#endif

#if defined(__cplusplus) && __cplusplus < 201703L
#error "lk needs C++17 or later: -std=c++17"
#endif
#if defined(__CUDACC_VER_MAJOR__) && 100 * __CUDACC_VER_MAJOR__ + __CUDACC_VER_MINOR__ < 1204
#error "lk needs CUDA 12.4 or later"
#endif

/* The version of these headers, as one number too: 300 for 0.3.0. lk_version() is that of the compiled functions. Before
 * 1.0 a new minor version may change the structs; a new patch version never does. */
#define LK_VERSION_MAJOR 0
#define LK_VERSION_MINOR 3
#define LK_VERSION_PATCH 0
#define LK_VERSION (10000 * LK_VERSION_MAJOR + 100 * LK_VERSION_MINOR + LK_VERSION_PATCH)

/* The CUDA runtime's own typedef, repeated so that C code needs no CUDA header. */
typedef struct CUstream_st *cudaStream_t;

/* What a launcher returns: 0, one of these, or a positive cudaError_t. Arguments are checked in this order. After LK_ERR_NULL
 * to LK_ERR_WORKSPACE nothing was launched and nothing was written, nor after LK_ERR_DEVICE. A positive status comes from CUDA.
 * After that, and after LK_ERR_CUBLAS, the outputs are undefined, since an earlier launch of the same call may have run. With a
 * positive status and with LK_ERR_DEVICE CUDA's own last error (cudaGetLastError) is set too. */
typedef int lk_status;
enum {
    LK_OK = 0,
    LK_ERR_NULL = -1,      /* a required pointer is NULL, or every output is */
    LK_ERR_SHAPE = -2,     /* a size or a stride is out of range, or tensors overlap */
    LK_ERR_VALUE = -3,     /* an option is out of range */
    LK_ERR_PATH = -4,      /* the chosen path cannot run this shape, or cannot run on this device */
    LK_ERR_ALIGNMENT = -5, /* a pointer is not aligned to its element */
    LK_ERR_WORKSPACE = -6, /* the workspace is NULL, too small or not aligned to LK_WORKSPACE_ALIGNMENT bytes */
    LK_ERR_CUBLAS = -7,    /* a cuBLASLt call failed; lk_last_error says which, and cuBLAS's number */
    LK_ERR_DEVICE = -8     /* the program has no code for this GPU; lk has none for those before compute capability 8.0 */
};

/* What a <tensor>_dtype field says. */
enum {
    LK_DTYPE_T = 0, /* the T of the function's name */
    LK_DTYPE_F32 = 1,
    LK_DTYPE_F16 = 2,
    LK_DTYPE_BF16 = 3,
    LK_DTYPE_E5M2 = 4 /* 8 bits; only where a field says so */
};

/* Values of `target_dtype`: of targets and of ids. */
enum { LK_TARGET_INT64 = 0, LK_TARGET_INT32 = 1 };

/* The formats of 8 bits. The largest finite number is 448 in E4M3, which has no infinities, and 57344 in E5M2. */
enum {
    LK_FP8_E4M3 = 0,
    LK_FP8_E5M2 = 1
};

/* For a vocabulary that is split over ranks (GPUs, or processes): rank i has columns vocab_start to vocab_start + vocab - 1.
 * The slices may be of any lengths, 0 too, but every column belongs to one rank. lk_ranks.cuh is the manual. */
typedef struct {
    int64_t vocab_start, vocab_total; /* the first column of this rank; the columns of all ranks together, 1 to 2^30 */
    int rank, ranks;
    void *user; /* both functions get it */
    /* Gathers `bytes` bytes from each rank into `receive`, in the order of ranks, on `stream`. NULL: the caller gathers. Each of the
     * two functions returns 0; one that fails returns a number above 0, and so does the call. */
    lk_status (*all_gather)(void *user, const void *send, void *receive, size_t bytes, cudaStream_t stream);
    /* The ops with linear_ in their names: sums dx, T [tokens, hidden], over all ranks, in place. It is called when all work that
     * computes dx is on `stream`, so the sum may run beside what follows there. NULL: the caller sums dx after the call. */
    lk_status (*reduce)(void *user, void *dx, int64_t tokens, cudaStream_t stream);
    int reduce_sms; /* linear_cross_entropy_parallel: SMs that the matmul after `reduce` leaves free for the blocks of the sum. 0:
                     * none; they may wait until the matmul ends */
} lk_vocab_parallel;

/* What a workspace pointer must be a multiple of. cudaMalloc gives 256, XLA 128. */
#define LK_WORKSPACE_ALIGNMENT 128

/* The linkage of every function that a linker sees. A library or a program that has LK_DEFINE_ lines keeps the functions to
 * itself: hidden, so that libraries with different versions of lk can live in one process. For others to link with them, put
 * `#define LK_EXPORT` before the include. With `#define LK_API static` all of them stay inside one file, so that two versions
 * can live in one program. LK_BODY is what a definition has besides, LK_INNER what is never exported. */
#ifdef LK_API
#define LK_API_GIVEN
#define LK_BODY __attribute__((unused))
#define LK_INNER __attribute__((unused))
#else
#ifdef __cplusplus
#define LK_API extern "C"
#else
#define LK_API extern
#endif
#define LK_INNER __attribute__((visibility("hidden")))
#ifdef LK_EXPORT
#define LK_BODY __attribute__((visibility("default")))
#else
#define LK_BODY LK_INNER
#endif
#endif

#if !defined(__CUDACC_RTC__)
/* The name of a status, "LK_ERR_SHAPE" or "cudaErrorInvalidValue" for example. Never NULL. */
LK_API const char *lk_status_string(lk_status status);
/* The last failed call of this host thread as a sentence: the function, the field, the rule. Empty before the first failure. */
LK_API const char *lk_last_error(void);
/* LK_VERSION of the compiled functions. */
LK_API int lk_version(void);
#endif

/* What a call computes. BOTH: forward and backward. FINISH and BETWEEN: a rank's, from the states of all ranks. */
typedef enum { LK_FORWARD = 1, LK_BACKWARD = 2, LK_BOTH = 3, LK_FINISH = 4, LK_BETWEEN = 5 } lk_direction;

/* An op lists its functions once, as LK_<OP>_FUNCTIONS(X, T). X##_CALL(op, name, direction, T) is a launcher and the query for
 * its workspace; X##_PLANNED(op, name, direction, head, T) also the query for its plan, which is a lk_<head>_plan. */
#define LK_PROTOTYPE_CALL(op, name, direction, T)                                                                              \
    LK_API lk_status lk_##op##_##name##_##T(const lk_##op##_args *args, cudaStream_t stream);                                  \
    LK_API lk_status lk_##op##_##name##_workspace_bytes_##T(const lk_##op##_args *args, size_t *bytes);
#define LK_PROTOTYPE_PLANNED(op, name, direction, head, T)                                                                     \
    LK_PROTOTYPE_CALL(op, name, direction, T)                                                                                  \
    LK_API lk_status lk_##op##_##name##_plan_##T(const lk_##op##_args *args, size_t budget, lk_##head##_plan *plan);

/* macro(list, T) where T is a type of lk's; else one sentence, and none of the errors that would follow. */
#define LK_OF_TYPE(macro, list, T) LK_OF_TYPE_CHOOSE(LK_IS_TYPE_##T, LK_OF_TYPE_REFUSE, ~)(macro, list, T)
#define LK_OF_TYPE_CHOOSE(...) LK_OF_TYPE_SECOND(__VA_ARGS__)
#define LK_OF_TYPE_SECOND(first, second, ...) second
#define LK_OF_TYPE_EXPAND(macro, list, T) macro(list, T)
#ifdef __cplusplus
#define LK_OF_TYPE_REFUSE(macro, list, T) static_assert(0, "T is f32, f16 or bf16");
#else
#define LK_OF_TYPE_REFUSE(macro, list, T) _Static_assert(0, "T is f32, f16 or bf16");
#endif
#define LK_IS_TYPE_f32 ~, LK_OF_TYPE_EXPAND
#define LK_IS_TYPE_f16 ~, LK_OF_TYPE_EXPAND
#define LK_IS_TYPE_bf16 ~, LK_OF_TYPE_EXPAND

#define LK_DECLARE(OP, T) LK_OF_TYPE(LK_PROTOTYPES_OF, LK_##OP##_FUNCTIONS, T)
#define LK_PROTOTYPES_OF(list, T) list(LK_PROTOTYPE, T)
#define LK_DEFINITIONS_OF(list, T) list(LK_PROTOTYPE, T) list(LK_EMIT, T)

/* One function of an op and its queries, with their kernels alone: LK_DEFINE_ONLY(CROSS_ENTROPY, forward_backward, bf16) defines
 * lk_cross_entropy_forward_backward_bf16. `function` is forward, backward or forward_backward; headers for ranks also have finish
 * and between. For one op and one type write LK_DEFINE_<OP>(T) or lines of LK_DEFINE_ONLY, not both. LK_DECLARE_<OP>(T) declares all
 * functions; a call of one that is not defined fails when the program is linked. */
#define LK_DEFINE_ONLY(OP, function, T) LK_NEEDS_NVCC("LK_DEFINE_ONLY") LK_OF_TYPE(LK_ONLY_##function, LK_##OP##_FUNCTIONS, T)
#define LK_ONLY_forward(list, T) list(LK_IF_forward, T)
#define LK_ONLY_backward(list, T) list(LK_IF_backward, T)
#define LK_ONLY_forward_backward(list, T) list(LK_IF_forward_backward, T)
#define LK_ONLY_finish(list, T) list(LK_IF_finish, T)
#define LK_ONLY_between(list, T) list(LK_IF_between, T)
#define LK_IF_forward_CALL(op, name, way, T) LK_IF(LK_IS_forward_##name, LK_ONE_CALL, (op, name, way, T))
#define LK_IF_backward_CALL(op, name, way, T) LK_IF(LK_IS_backward_##name, LK_ONE_CALL, (op, name, way, T))
#define LK_IF_forward_backward_CALL(op, name, way, T) LK_IF(LK_IS_forward_backward_##name, LK_ONE_CALL, (op, name, way, T))
#define LK_IF_finish_CALL(op, name, way, T) LK_IF(LK_IS_finish_##name, LK_ONE_CALL, (op, name, way, T))
#define LK_IF_between_CALL(op, name, way, T) LK_IF(LK_IS_between_##name, LK_ONE_CALL, (op, name, way, T))
#define LK_IF_forward_PLANNED(op, name, way, head, T) LK_IF(LK_IS_forward_##name, LK_ONE_PLANNED, (op, name, way, head, T))
#define LK_IF_backward_PLANNED(op, name, way, head, T) LK_IF(LK_IS_backward_##name, LK_ONE_PLANNED, (op, name, way, head, T))
#define LK_IF_forward_backward_PLANNED(op, name, way, head, T)                                                                 \
    LK_IF(LK_IS_forward_backward_##name, LK_ONE_PLANNED, (op, name, way, head, T))
#define LK_IF_finish_PLANNED(op, name, way, head, T) LK_IF(LK_IS_finish_##name, LK_ONE_PLANNED, (op, name, way, head, T))
#define LK_IF_between_PLANNED(op, name, way, head, T) LK_IF(LK_IS_between_##name, LK_ONE_PLANNED, (op, name, way, head, T))
#define LK_IS_forward_forward ~, LK_YES
#define LK_IS_backward_backward ~, LK_YES
#define LK_IS_forward_backward_forward_backward ~, LK_YES
#define LK_IS_finish_finish ~, LK_YES
#define LK_IS_between_between ~, LK_YES
#define LK_IF(is, macro, args) LK_IF_SECOND(is, LK_NO, ~)(macro, args)
#define LK_IF_SECOND(...) LK_OF_TYPE_SECOND(__VA_ARGS__)
#define LK_YES(macro, args) macro args
#define LK_NO(macro, args)

/* LK_DEFINE_<OP>(T) makes code for a GPU, so it belongs in a .cu file. In other files it stops the compiler with a sentence. */
#if !defined(__CUDACC__) && !defined(LK_SIMT)
#ifdef __cplusplus
#define LK_NEEDS_NVCC(macro) static_assert(sizeof(macro) == 0, macro " belongs in one .cu file, compiled by nvcc");
#else
#define LK_NEEDS_NVCC(macro) _Static_assert(sizeof(macro) == 0, macro " belongs in one .cu file, compiled by nvcc");
#endif
#else
#define LK_NEEDS_NVCC(macro)
#endif

/* 1 where an op's kernels and launchers are; only there LK_DEFINE defines functions. nvcc compiles a file once for each GPU
 * that it is told of; for those before 8.0, which a project's list may have, it declares the functions and has no kernel. */
#if defined(LK_SIMT) || (defined(__CUDACC__) && !(defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800))
#define LK_CUDA 1
#define LK_DEFINE(OP, T) LK_OF_TYPE(LK_DEFINITIONS_OF, LK_##OP##_FUNCTIONS, T)
#define LK_ONE_CALL(op, name, way, T) LK_PROTOTYPE_CALL(op, name, way, T) LK_EMIT_CALL(op, name, way, T)
#define LK_ONE_PLANNED(op, name, way, head, T) LK_PROTOTYPE_PLANNED(op, name, way, head, T) LK_EMIT_PLANNED(op, name, way, head, T)
#else
#define LK_CUDA 0
#define LK_DEFINE(OP, T) LK_NEEDS_NVCC("LK_DEFINE_" #OP) LK_DECLARE(OP, T)
#define LK_ONE_CALL(op, name, way, T) LK_PROTOTYPE_CALL(op, name, way, T)
#define LK_ONE_PLANNED(op, name, way, head, T) LK_PROTOTYPE_PLANNED(op, name, way, head, T)
#if defined(__CUDACC__) && defined(LK_API_GIVEN)
#pragma nv_diag_suppress 114, 177 /* there static functions are referenced and not defined, or neither */
#endif
#endif
#if defined(__CUDACC_RTC__) && !LK_CUDA
#error "lk needs compute capability 8.0 or later"
#elif defined(__CUDA_ARCH_LIST__)
constexpr int lk_arch_list[] = {__CUDA_ARCH_LIST__}; /* in ascending order */
static_assert(lk_arch_list[sizeof lk_arch_list / sizeof *lk_arch_list - 1] >= 800,
              "lk needs compute capability 8.0 or later; tell nvcc your card's, as by -gencode arch=compute_90a,code=sm_90a");
#endif

#ifdef __cplusplus

#if defined(__CUDACC_RTC__)
#define LK_HOST static __device__ inline /* NVRTC refuses functions of the host */
#else
#define LK_HOST static inline
#endif
#define LK_COUNT(list) ((int)(sizeof(list) / sizeof *(list)))

/* ---- Arithmetic of the host, without CUDA -------------------------------------------------------------------------------- */

LK_HOST int64_t lk_ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b > 0); /* a + b - 1 may be too large */
}

/* a * b; INT64_MAX if that is larger, or a size below 0, which has no product. */
LK_HOST int64_t lk_count(int64_t a, int64_t b)
{
    if (a == 0 || b == 0) return 0;
    return a < 0 || b < 0 || a > INT64_MAX / b ? INT64_MAX : a * b;
}

/* A workspace while arrays are laid out in it, one after another, each at a multiple of `align` bytes from its base. */
typedef struct {
    uintptr_t base;
    size_t used, align;
} lk_arena;

/* The next array; NULL if it is not wanted. More bytes than there can be do not wrap around to a few. */
LK_HOST void *lk_take_bytes(lk_arena *arena, bool wanted, int64_t bytes)
{
    if (!wanted) return NULL;
    void *const array = (void *)(arena->base + arena->used);
    const size_t most = (size_t)1 << 62, whole = (size_t)lk_ceil_div(bytes, (int64_t)arena->align) * arena->align;
    arena->used = whole > most - arena->used ? most : arena->used + whole;
    return array;
}
template <class Elem> LK_HOST void lk_take(Elem **array, lk_arena *arena, bool wanted, int64_t elements)
{
    *array = (Elem *)lk_take_bytes(arena, wanted, lk_count(elements, (int64_t)sizeof(Elem)));
}

#endif /* C++ */

#if defined(__CUDACC__) || defined(LK_SIMT)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#if !defined(__CUDACC_RTC__)
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#endif

#include "lk_ptx.cuh"

#define LK_KERNEL static __global__

/* LK_SHARED(float, sums, [32]); is `__shared__ float sums[32];`, written so that the simulator can give each block its own. */
#if !defined(LK_SIMT)
#define LK_SHARED(type, name, dims) __shared__ type name dims
#endif
/* LK_DYN_SMEM(struct my_smem, smem); makes `smem` refer to the launch's dynamic shared memory, aligned to 128 bytes: copies
 * into it are slower where a warp's 512 bytes start inside such a line. */
#if !defined(LK_SIMT)
#define LK_DYN_SMEM(type, name)                                                                                                \
    extern __shared__ __align__(128) uint4 lk_dynamic_shared[];                                                                \
    type &name = *(type *)lk_dynamic_shared
#endif

/* float x LK_UNSET; is `float x;` for a variable that is read only where it was set, though g++ does not see that and warns. A
 * value in it would cost a GPU registers. */
#if defined(LK_SIMT)
#define LK_UNSET = {}
#else
#define LK_UNSET
#endif

typedef float lk_f32;
typedef __half lk_f16;
typedef __nv_bfloat16 lk_bf16;

/* LK_DTYPE_* of T, and the bytes of an element of one; what is none of them counts as T. */
template <class T> inline constexpr int lk_dtype = LK_DTYPE_F32;
template <> inline constexpr int lk_dtype<lk_f16> = LK_DTYPE_F16;
template <> inline constexpr int lk_dtype<lk_bf16> = LK_DTYPE_BF16;
template <class T> LK_HOST int lk_dtype_bytes(int dtype)
{
    if (dtype == LK_DTYPE_E5M2) return 1;
    return dtype == LK_DTYPE_F32 ? 4 : dtype == LK_DTYPE_F16 || dtype == LK_DTYPE_BF16 ? 2 : (int)sizeof(T);
}

/* The current device: its number of SMs, the KiB of shared memory of each SM, and the compute capability that the code it runs
 * was compiled for, 90 for 9.0. A newer card also runs older PTX, which lacks the newer instructions. */
typedef struct {
    int arch, sms, smem;
} lk_device;

#if !defined(__CUDACC_RTC__) /* who compiles by NVRTC also launches by other means */

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

/* This host thread's sentence: one for all .cu files of a library or a program, unless LK_API is static. */
LK_API LK_INNER inline char *lk_error_text(void)
{
    static thread_local char text[512];
    return text;
}

/* The functions of no op. They are defined in files with an LK_DEFINE_ line and in no others: a .cu file that only declares calls
 * those of the library that it is linked with. For this they are friends of a class template, which are defined where it is
 * instantiated, in LK_EMIT_CALL; weak, so that any number of files may do it. */
template <class Once> struct lk_common {
    friend LK_BODY __attribute__((used)) const char *lk_last_error(void) { return lk_error_text(); }
    friend LK_BODY __attribute__((used)) int lk_version(void) { return LK_VERSION; }
    friend LK_BODY __attribute__((used)) const char *lk_status_string(lk_status status)
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
        case LK_ERR_DEVICE: return "LK_ERR_DEVICE";
        }
        return status > 0 ? cudaGetErrorName((cudaError_t)status) : "unknown lk_status";
    }
};
#define LK_EMIT_COMMON ((void)lk_common<void>(), (void)lk_last_error, (void)lk_version, (void)lk_status_string)
/* The same in a file without other LK_DEFINE_ lines, whose own kernels use lk's device functions and lk_launch. */
#define LK_DEFINE_COMMON                                                                                                       \
    static inline __attribute__((used)) void lk_uses_common(void)                                                              \
    {                                                                                                                          \
        LK_EMIT_COMMON;                                                                                                        \
    }
#ifdef LK_API_GIVEN /* in every file, or compilers warn of static functions that are declared alone */
#define LK_COMMON_IN_EVERY_FILE(type) static_assert(sizeof(type<void>) > 0, "");
#else
#define LK_COMMON_IN_EVERY_FILE(type)
#endif
LK_COMMON_IN_EVERY_FILE(lk_common)

/* Emit what LK_PROTOTYPE_... declare, from the templates lk_<op>_run, and _query or, where there is a plan, _query_plan: the plan
 * within a budget, or the smallest one where that needs more and `least` is true. */
#define LK_EMIT_RUN(op, name, direction, T)                                                                                    \
    LK_API LK_BODY lk_status lk_##op##_##name##_##T(const lk_##op##_args *args, cudaStream_t stream)                           \
    {                                                                                                                          \
        LK_EMIT_COMMON;                                                                                                        \
        if (!args) return lk_fail(LK_ERR_NULL, "lk_" #op "_" #name "_" #T, "args is NULL");                                    \
        return lk_##op##_run<lk_##T, direction>("lk_" #op "_" #name "_" #T, args, stream);                                     \
    }
#define LK_EMIT_CALL(op, name, direction, T)                                                                                   \
    LK_EMIT_RUN(op, name, direction, T)                                                                                        \
    LK_API LK_BODY lk_status lk_##op##_##name##_workspace_bytes_##T(const lk_##op##_args *args, size_t *bytes)                 \
    {                                                                                                                          \
        if (!args) return lk_fail(LK_ERR_NULL, "lk_" #op "_" #name "_workspace_bytes_" #T, "args is NULL");                    \
        return lk_##op##_query<lk_##T>("lk_" #op "_" #name "_workspace_bytes_" #T, args, direction, bytes);                    \
    }
#define LK_EMIT_PLANNED(op, name, direction, head, T)                                                                          \
    LK_EMIT_RUN(op, name, direction, T)                                                                                        \
    LK_API LK_BODY lk_status lk_##op##_##name##_workspace_bytes_##T(const lk_##op##_args *args, size_t *bytes)                 \
    {                                                                                                                          \
        const char *const self = "lk_" #op "_" #name "_workspace_bytes_" #T;                                                   \
        lk_##head##_plan plan = {};                                                                                            \
        if (!args) return lk_fail(LK_ERR_NULL, self, "args is NULL");                                                          \
        const lk_status status =                                                                                               \
            lk_##op##_query_plan<lk_##T>(self, args, direction, lk_cublas_default_budget(), true, &plan);                      \
        if (!status && bytes) *bytes = plan.workspace_bytes;                                                                   \
        return status;                                                                                                         \
    }                                                                                                                          \
    LK_API LK_BODY lk_status lk_##op##_##name##_plan_##T(const lk_##op##_args *args, size_t budget, lk_##head##_plan *plan)    \
    {                                                                                                                          \
        LK_CUBLAS_EMIT_CONTEXT(head);                                                                                          \
        if (!plan || !args)                                                                                                    \
            return lk_fail(LK_ERR_NULL, "lk_" #op "_" #name "_plan_" #T, "%s is NULL", plan ? "args" : "plan");                \
        return lk_##op##_query_plan<lk_##T>("lk_" #op "_" #name "_plan_" #T, args, direction, budget, false, plan);            \
    }

/* As in the names of functions. */
LK_HOST const char *lk_direction_name(lk_direction direction)
{
    static const char *const names[] = {"", "forward", "backward", "forward_backward", "finish", "between"};
    return names[direction];
}

/* Keeps "op: sentence" for lk_last_error and returns the status. */
LK_HOST lk_status lk_fail_list(lk_status status, const char *op, const char *format, va_list list)
{
    char *const text = lk_error_text(); /* 512 bytes */
    const int used = snprintf(text, 512, "%s: ", op);
    vsnprintf(text + used, 512 - (size_t)used, format, list);
    return status;
}
__attribute__((format(printf, 3, 4))) LK_HOST lk_status lk_fail(lk_status status, const char *op, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    lk_fail_list(status, op, format, list);
    va_end(list);
    return status;
}

/* The status of a launch; a CUDA error gets its sentence. */
LK_HOST lk_status lk_launched(const char *op, cudaError_t error)
{
    /* the second where it has code for this GPU, but none of lk's: then that is from before 8.0 */
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        return lk_fail(LK_ERR_DEVICE, op, "the program has no code of lk for this GPU; tell nvcc its compute capability, at least 8.0, "
                                          "as by -gencode arch=compute_90a,code=sm_90a");
    return error == cudaSuccess ? LK_OK : lk_fail((lk_status)error, op, "the launch failed: %s", cudaGetErrorString(error));
}

/* The same for calls that ask the device before the first launch. */
LK_HOST lk_status lk_asked_device(const char *op, cudaError_t error)
{
    return error == cudaSuccess || error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction
               ? lk_launched(op, error)
               : lk_fail((lk_status)error, op, "no usable CUDA device: %s", cudaGetErrorString(error));
}

/* Finds a function of the driver, as it is since CUDA 12.0, so that no program has to link with libcuda. */
LK_HOST cudaError_t lk_driver_function(const char *name, void **function)
{
    enum cudaDriverEntryPointQueryResult state;
#if CUDART_VERSION >= 12050
    return cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &state);
#else /* CUDA 13 warns of this one */
    return cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &state);
#endif
}

/* The answer of a workspace query where no workspace is needed, once the arguments are checked. */
LK_HOST lk_status lk_no_workspace(lk_status checked, size_t *bytes)
{
    if (checked == LK_OK && bytes) *bytes = 0;
    return checked;
}

/* Its launch bound tells lk_device.arch, the architecture of the loaded code. ptxVersion does not: where files were linked with
 * -rdc=true it is the lowest of them all. */
LK_KERNEL void __launch_bounds__(LK_ARCH ? LK_ARCH / 10 : 1) lk_code_kernel(void) {}
static thread_local struct {
    int id, arch;
} lk_code_known = {-1, 0};

/* The first call of a host thread loads the code and makes a context where there is none. */
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
        if (error == cudaSuccess && arch < 80) error = cudaErrorNoKernelImageForDevice;
        if (error == cudaSuccess) lk_code_known = {id, arch};
    }
    device->arch = lk_code_known.arch, device->smem = smem / 1024;
    return error;
}

/* ---- Launch -------------------------------------------------------------------------------------------------------------- */

/* kernel<<<grid, block, smem, stream>>>(args), written so that it also runs on the CPU. */
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

/* Allows a kernel all the shared memory that a block can have on the current device. The number is the same at each call: the
 * limit belongs to the kernel, so a smaller one would break launches of other host threads and of graphs captured before. */
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

/* The launch of every op, in clusters of `cluster` blocks (1: none). pdl: with programmatic dependent launch, so that the
 * kernel may start while previous kernels still run. Until lk_griddepcontrol_wait(), which every thread executes, it neither
 * reads nor writes global memory, so nothing that it computes depends on memory. It may prefetch into the L2 before the wait,
 * since no thread sees the data.
 * An SM keeps its split into L1 and shared memory while it runs a block. Blocks that start beside the previous kernel find that
 * kernel's split, so that fewer of them may fit. Where a grid has just as many blocks as fit on the card, the others then run
 * as a second wave. Such a grid, if it is long, is launched without pdl. */
template <class Args>
LK_HOST lk_status lk_launch_blocks(const char *op, bool pdl, void (*kernel)(Args), int64_t grid, int cluster, int block,
                                   size_t smem, cudaStream_t stream, const Args &args)
{
    if (smem > 32 * 1024) { /* up to 48 KiB, static shared memory included, need no permission */
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

#endif /* not NVRTC */

/* ---- 16-byte accesses ---------------------------------------------------------------------------------------------------- */

LK_DEVICE float lk_to_float(lk_f32 x) { return x; }
LK_DEVICE float lk_to_float(lk_f16 x) { return __half2float(x); }
LK_DEVICE float lk_to_float(lk_bf16 x) { return __bfloat162float(x); }

/* *out = x, rounded to nearest even. */
LK_DEVICE void lk_put(lk_f32 *out, float x) { *out = x; }
LK_DEVICE void lk_put(lk_f16 *out, float x) { *out = __float2half_rn(x); }
LK_DEVICE void lk_put(lk_bf16 *out, float x) { *out = __float2bfloat16_rn(x); }
/* Adds x to *out, or writes it there. */
LK_DEVICE void lk_put_or_add(float *out, float x, int add) { *out = add ? *out + x : x; }

/* Element i of an array whose type is known when the kernel runs: LK_DTYPE_F32, LK_DTYPE_F16 or LK_DTYPE_BF16. */
LK_DEVICE float lk_get_as(const void *from, int dtype, int64_t i)
{
    if (dtype == LK_DTYPE_F32) return ((const float *)from)[i];
    return dtype == LK_DTYPE_F16 ? lk_to_float(((const lk_f16 *)from)[i]) : lk_to_float(((const lk_bf16 *)from)[i]);
}
LK_DEVICE void lk_put_as(void *to, int dtype, int64_t i, float x)
{
    if (dtype == LK_DTYPE_F32) ((float *)to)[i] = x;
    else if (dtype == LK_DTYPE_F16) lk_put((lk_f16 *)to + i, x);
    else lk_put((lk_bf16 *)to + i, x);
}

/* Two floats as two numbers of 8 bits, x in the lower byte: rounded to nearest even, beyond the largest finite number that one,
 * NaN 0x7f. `format` is LK_FP8_*. Before sm_89 there is no instruction: then by lk_fp8_bits, which gives the same bits. Mantissa:
 * bits of the format's mantissa, 3 in E4M3 and 2 in E5M2. */
template <int Mantissa> LK_DEVICE uint32_t lk_fp8_bits(float x)
{
    constexpr int Bias = Mantissa == 3 ? 7 : 15, Shift = 23 - Mantissa;
    constexpr float most = Mantissa == 3 ? 448.0f : 57344.0f, least_normal = Mantissa == 3 ? 0x1p-6f : 0x1p-14f;
    constexpr float magic = Mantissa == 3 ? 0x1p14f : 0x1p7f; /* its last place is the format's smallest number */
    const uint32_t sign = __float_as_uint(x) >> 24 & 0x80u, magnitude = __float_as_uint(x) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;
    const float size = fminf(__uint_as_float(magnitude), most);
    const uint32_t bits = __float_as_uint(size);
    if (size < least_normal) return sign | (__float_as_uint(size + magic) - __float_as_uint(magic));
    return sign | (((bits + (1u << (Shift - 1)) - 1 + (bits >> Shift & 1)) >> Shift) - ((127 - Bias) << Mantissa));
}
LK_DEVICE uint32_t lk_fp8x2(int format, float x, float y)
{
    if constexpr (LK_ARCH >= 890) return format == LK_FP8_E5M2 ? lk_cvt_rn_satfinite_e5m2x2(x, y) : lk_cvt_rn_satfinite_e4m3x2(x, y);
    else if (format == LK_FP8_E5M2) return lk_fp8_bits<2>(x) | lk_fp8_bits<2>(y) << 8;
    else return lk_fp8_bits<3>(x) | lk_fp8_bits<3>(y) << 8;
}

/* LK_VEC<T> elements: 16 bytes, the widest access of a thread. They stay packed until they are used, which keeps many loads
 * in flight in few registers. */
template <class T> constexpr int LK_VEC = 16 / (int)sizeof(T);
template <class T> struct lk_vec {
    uint4 raw;
};

/* Streaming accesses: data that is used once does not push other data out of the caches. */
template <class T> LK_DEVICE lk_vec<T> lk_load_vec(const T *aligned)
{
    return {__ldcs((const uint4 *)aligned)};
}
template <class T> LK_DEVICE void lk_store_vec(T *aligned, lk_vec<T> v)
{
    __stcs((uint4 *)aligned, v.raw);
}
/* Accesses that the caches may keep, PTX's ld.ca and st.wb. They depend less on the distance of tensors in memory; each kernel
 * uses the faster kind. */
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

/* Accesses to Num elements: a vector at an aligned address, or Num = 1 element, as a float, at any. cached: by lk_load_vec_ca and
 * lk_store_vec_wb. */
template <int Num, bool cached = false, class T> LK_DEVICE lk_vec<T> lk_load_n(const T *x)
{
    if constexpr (Num > 1) return cached ? lk_load_vec_ca(x) : lk_load_vec(x);
    else return {make_uint4(__float_as_uint(lk_to_float(*x)), 0, 0, 0)};
}
template <class T, int Num> LK_DEVICE void lk_unpack_n(float (&x)[Num], lk_vec<T> raw)
{
    if constexpr (Num > 1) lk_unpack(x, raw);
    else x[0] = __uint_as_float(raw.raw.x);
}
template <bool cached = false, class T, int Num> LK_DEVICE void lk_store_n(T *x, const float (&v)[Num])
{
    if constexpr (Num > 1) {
        lk_vec<T> packed;
        lk_pack(&packed, v);
        if (cached) lk_store_vec_wb(x, packed);
        else lk_store_vec(x, packed);
    } else {
        lk_put(x, v[0]);
    }
}

/* Two vectors, one behind the other in memory, as pairs of neighbours, and back: a has the first of each pair, b the second. */
template <int Num> LK_DEVICE void lk_to_pairs(float (&a)[Num], float (&b)[Num])
{
    float all[2 * Num];
    LK_UNROLL for (int j = 0; j < Num; j++) all[j] = a[j], all[Num + j] = b[j];
    LK_UNROLL for (int j = 0; j < Num; j++) a[j] = all[2 * j], b[j] = all[2 * j + 1];
}
template <int Num> LK_DEVICE void lk_from_pairs(float (&a)[Num], float (&b)[Num])
{
    float all[2 * Num];
    LK_UNROLL for (int j = 0; j < Num; j++) all[2 * j] = a[j], all[2 * j + 1] = b[j];
    LK_UNROLL for (int j = 0; j < Num; j++) a[j] = all[j], b[j] = all[Num + j];
}

/* A row of any alignment as 16-byte vectors: `vecs` aligned vectors and `edge` single elements, `head` of them before the
 * vectors and the rest behind. */
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

/* ---- Mathematics, the same under --use_fast_math ------------------------------------------------------------------------- */

#define LK_LOG2E 1.44269504088896341f
#define LK_LN2 0.693147180559945309f

/* Neither infinite nor NaN. */
LK_DEVICE bool lk_is_finite(float x)
{
    return fabsf(x) <= FLT_MAX;
}

/* 1 / sqrt(x), rounded to nearest. */
LK_DEVICE float lk_rsqrt(float x)
{
    return __frsqrt_rn(x);
}

#endif /* CUDA or the simulator */
#endif

#if LK_VERSION != 300 /* this file's; the macro is of the lk_base.cuh that came first */
#error "two versions of lk in one file: another lk_base.cuh, or a one-file header, came before this one"
#endif
