// SPDX-License-Identifier: MIT
// Stand-in for CUDA's cublasLt.h: the part that linear_cross_entropy uses, in plain loops. See simt.h.
#ifndef SIMT_CUBLASLT_H
#define SIMT_CUBLASLT_H

#include <stdint.h>
#include <string.h>

#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

/* Column-major D = alpha op(A) op(B) + beta C (+ a bias for each row of D), f32, f16 or bf16, sums in float in the order of k. A
   matmul is a launch of a few blocks of one thread, so it is captured like a kernel and ASan sees every access. Beyond what
   cuBLASLt checks: ranges that leave an allocation, and pointers less aligned than the algorithm's heuristic was told, are
   CUBLAS_STATUS_INVALID_VALUE; the workspace that an algorithm asked for is poisoned by the matmul, and beta = 0 reads no C. As on
   a card, the first algorithm for 16-bit factors splits k where it has workspace, and leaves the last terms out where the parts'
   lengths, which are multiples of 64, do not add up to k. */

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
} cublasStatus_t;
typedef enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 } cublasComputeType_t;
typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;
typedef enum { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 } cudaDataType_t;
typedef cudaDataType_t cudaDataType;

typedef enum { CUBLASLT_POINTER_MODE_HOST = 0, CUBLASLT_POINTER_MODE_DEVICE = 1 } cublasLtPointerMode_t;
typedef enum { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4 } cublasLtEpilogue_t;
typedef enum { CUBLASLT_REDUCTION_SCHEME_NONE = 0, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 } cublasLtReductionScheme_t;
typedef enum {
    CUBLASLT_MATMUL_DESC_POINTER_MODE = 2,
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET = 15,
} cublasLtMatmulDescAttributes_t;
typedef enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
} cublasLtMatmulPreferenceAttributes_t;

typedef enum { CUBLASLT_ALGO_CONFIG_ID = 0, CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME = 3 } cublasLtMatmulAlgoConfigAttributes_t;

typedef struct cublasLtContext *cublasLtHandle_t;
typedef struct {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
} cublasLtMatrixLayoutOpaque_t;
typedef struct {
    int32_t pointer_mode, transpose_a, transpose_b;
    uint32_t epilogue;
    int32_t sms;
    const void *bias;
} cublasLtMatmulDescOpaque_t;
typedef struct {
    size_t workspace_bytes;
    uint32_t alignment[4]; // of A, B, C, D
} cublasLtMatmulPreferenceOpaque_t;
typedef cublasLtMatrixLayoutOpaque_t *cublasLtMatrixLayout_t;
typedef cublasLtMatmulDescOpaque_t *cublasLtMatmulDesc_t;
typedef cublasLtMatmulPreferenceOpaque_t *cublasLtMatmulPreference_t;
typedef struct {
    uint64_t data[8]; // a magic number, its rank in the list, workspace bytes, the four alignments, the parts of k and how they are added
} cublasLtMatmulAlgo_t;
typedef struct {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
} cublasLtMatmulHeuristicResult_t;

static const uint64_t SIMT_CUBLASLT_MAGIC = 0x51b1a5, SIMT_CUBLASLT_WORKSPACE = 4096, SIMT_CUBLASLT_SCHEME = 1 << 16;
static const int SIMT_CUBLASLT_ALGORITHMS = 3;

static inline const char *cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "CUBLAS_STATUS_UNKNOWN";
}

/* For tests: the heuristic knows `after` more matmuls, then none; -1: all. */
inline int simt_cublaslt_left = -1;
/* SM_COUNT_TARGET of this thread's last matmul; 0: all SMs. */
inline thread_local int simt_cublaslt_sms = 0;
static inline void simt_cublaslt_refuse(int after) { simt_cublaslt_left = after; }

/* The handle is an allocation, so that LeakSanitizer sees one that is not destroyed. */
static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = (cublasLtHandle_t) new uint64_t(SIMT_CUBLASLT_MAGIC);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete (uint64_t *)handle;
    return CUBLAS_STATUS_SUCCESS;
}
static inline bool simt_cublaslt_bad_handle(cublasLtHandle_t handle) { return !handle || *(uint64_t *)handle != SIMT_CUBLASLT_MAGIC; }

static inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
    *layout = {type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t desc, cublasComputeType_t, cudaDataType scale) {
    *desc = {CUBLASLT_POINTER_MODE_HOST, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, 0, NULL};
    return scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
static inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t what, const void *value, size_t bytes) {
    void *field = NULL;
    switch (what) {
    case CUBLASLT_MATMUL_DESC_POINTER_MODE: field = &desc->pointer_mode; break;
    case CUBLASLT_MATMUL_DESC_TRANSA: field = &desc->transpose_a; break;
    case CUBLASLT_MATMUL_DESC_TRANSB: field = &desc->transpose_b; break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE: field = &desc->epilogue; break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: field = &desc->bias; break;
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: field = &desc->sms; break;
    }
    if (!field || bytes != (what == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? sizeof(void *) : 4)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
    *preference = {0, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t what,
                                                                  const void *value, size_t bytes) {
    if (bytes != (what == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4)) return CUBLAS_STATUS_INVALID_VALUE;
    if (what == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) memcpy(&preference->workspace_bytes, value, bytes);
    else if (what >= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES)
        memcpy(&preference->alignment[what - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

/* One matmul, all that its blocks need. */
struct simt_matmul {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
    const void *a, *b, *c;
    void *d, *workspace;
    const float *alpha, *beta; // in device memory; NULL: the two numbers
    float alpha_value, beta_value;
    uint64_t m, n, k, tile, workspace_bytes, terms; // terms: those of k that are summed
};

static inline size_t simt_cublaslt_bytes(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }
static inline float simt_cublaslt_get(const void *at, cudaDataType type, uint64_t i) {
    if (type == CUDA_R_32F) return ((const float *)at)[i];
    return type == CUDA_R_16F ? __half2float(((const __half *)at)[i]) : __bfloat162float(((const __nv_bfloat16 *)at)[i]);
}
static inline void simt_cublaslt_put(void *at, cudaDataType type, uint64_t i, float x) {
    if (type == CUDA_R_32F) ((float *)at)[i] = x;
    else if (type == CUDA_R_16F) ((__half *)at)[i] = __float2half_rn(x);
    else ((__nv_bfloat16 *)at)[i] = __float2bfloat16_rn(x);
}

/* Columns of D in groups of 16: op(B)'s are converted once, op(A)'s element by element for each group. */
static inline void simt_matmul_block(const simt_matmul &p) {
    static constexpr uint64_t GROUP = 16;
    const float alpha = p.alpha ? *p.alpha : p.alpha_value, beta = p.beta ? *p.beta : p.beta_value;
    const uint64_t begin = simt_here->block_idx.x * p.tile, end = begin + p.tile < p.n ? begin + p.tile : p.n;
    if (simt_here->block_idx.x == 0 && p.workspace_bytes) memset(p.workspace, simt_poison_byte(), p.workspace_bytes);
    std::vector<float> b(p.k * GROUP);
    for (uint64_t first = begin; first < end; first += GROUP) {
        const uint64_t count = end - first < GROUP ? end - first : GROUP;
        for (uint64_t k = 0; k < p.k; k++)
            for (uint64_t j = 0; j < GROUP; j++)
                b[k * GROUP + j] = j >= count ? 0.0f
                                 : simt_cublaslt_get(p.b, p.b_layout.type, p.desc.transpose_b ? k * p.b_layout.ld + first + j : (first + j) * p.b_layout.ld + k);
        for (uint64_t i = 0; i < p.m; i++) {
            float sum[GROUP] = {};
            for (uint64_t k = 0; k < p.terms; k++) {
                const float a = simt_cublaslt_get(p.a, p.a_layout.type, p.desc.transpose_a ? i * p.a_layout.ld + k : k * p.a_layout.ld + i);
                for (uint64_t j = 0; j < GROUP; j++) sum[j] += a * b[k * GROUP + j];
            }
            for (uint64_t j = 0; j < count; j++) {
                const uint64_t at = (first + j) * p.d_layout.ld + i;
                float d = alpha * sum[j];
                if (beta != 0.0f) d += beta * simt_cublaslt_get(p.c, p.d_layout.type, at);
                if (p.desc.epilogue == CUBLASLT_EPILOGUE_BIAS) d += simt_cublaslt_get(p.desc.bias, p.d_layout.type, i);
                simt_cublaslt_put(p.d, p.d_layout.type, at, d);
            }
        }
    }
}

static inline bool simt_cublaslt_layout_fits(const cublasLtMatrixLayoutOpaque_t *l, const void *at) {
    return simt_range_fits(at, ((l->cols - 1) * (uint64_t)l->ld + l->rows) * simt_cublaslt_bytes(l->type));
}

/* The sizes of op(A) op(B) = D; false where they do not fit each other. */
static inline bool simt_cublaslt_sizes(const cublasLtMatmulDescOpaque_t *desc, const cublasLtMatrixLayoutOpaque_t *a, const cublasLtMatrixLayoutOpaque_t *b,
                                       const cublasLtMatrixLayoutOpaque_t *c, const cublasLtMatrixLayoutOpaque_t *d, simt_matmul *p) {
    p->m = desc->transpose_a ? a->cols : a->rows, p->k = desc->transpose_a ? a->rows : a->cols;
    p->n = desc->transpose_b ? b->rows : b->cols;
    const uint64_t other_k = desc->transpose_b ? b->cols : b->rows;
    for (const cublasLtMatrixLayoutOpaque_t *l : {a, b, c, d})
        if (!l->rows || !l->cols || l->ld < (int64_t)l->rows) return false;
    return p->k == other_k && d->rows == p->m && d->cols == p->n && c->rows == p->m && c->cols == p->n && a->type == b->type &&
           c->type == d->type && c->ld == d->ld && (d->type == a->type || d->type == CUDA_R_32F);
}

/* How many terms so many parts sum. */
static inline uint64_t simt_cublaslt_terms(uint64_t k, uint64_t splits) {
    const uint64_t terms = splits * ((k / splits + 63) / 64 * 64);
    return splits > 1 && terms < k ? terms : k;
}
static inline uint64_t simt_cublaslt_workspace(uint64_t splits) { return SIMT_CUBLASLT_WORKSPACE + (splits > 1 ? 64 * splits : 0); }

static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                                            cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                            cublasLtMatmulPreference_t preference, int requested,
                                                            cublasLtMatmulHeuristicResult_t results[], int *returned) {
    simt_matmul p;
    *returned = 0;
    if (simt_cublaslt_bad_handle(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!simt_cublaslt_sizes(desc, a, b, c, d, &p)) return CUBLAS_STATUS_INVALID_VALUE;
    if (simt_cublaslt_left >= 0 && simt_cublaslt_left-- == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (; *returned < requested && *returned < SIMT_CUBLASLT_ALGORITHMS; ++*returned) {
        cublasLtMatmulHeuristicResult_t *r = &results[*returned];
        *r = {};
        const uint32_t *align = preference->alignment;
        uint64_t splits = *returned == 0 && a->type != CUDA_R_32F && p.k >= 128 ? 2 : 1;
        while (splits > 1 && splits < 8 && simt_cublaslt_terms(p.k, splits) == p.k) splits++; // to one that leaves terms out, if any does
        if (splits > 1 && preference->workspace_bytes < simt_cublaslt_workspace(splits)) splits = 1;
        const uint64_t most = simt_cublaslt_workspace(splits), want = preference->workspace_bytes < most ? preference->workspace_bytes : most;
        const uint64_t data[8] = {SIMT_CUBLASLT_MAGIC, (uint64_t)*returned, want, align[0], align[1], align[2], align[3],
                                  splits | (splits > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE) * SIMT_CUBLASLT_SCHEME};
        memcpy(r->algo.data, data, sizeof data);
        r->workspaceSize = want;
        r->wavesCount = 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t what, void *value,
                                                                  size_t bytes, size_t *) {
    const int32_t splits = (int32_t)(algo->data[7] % SIMT_CUBLASLT_SCHEME), id = splits > 1 ? 66 : 21;
    if ((what != CUBLASLT_ALGO_CONFIG_ID && what != CUBLASLT_ALGO_CONFIG_SPLITK_NUM) || bytes != 4) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(value, what == CUBLASLT_ALGO_CONFIG_ID ? &id : &splits, 4);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t what, const void *value,
                                                                  size_t bytes) {
    int32_t number;
    if (bytes != 4) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&number, value, 4);
    const uint64_t splits = algo->data[7] % SIMT_CUBLASLT_SCHEME, scheme = algo->data[7] / SIMT_CUBLASLT_SCHEME;
    algo->data[7] = what == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? (uint64_t)number + scheme * SIMT_CUBLASLT_SCHEME : splits + (uint64_t)number * SIMT_CUBLASLT_SCHEME;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo,
                                                     cublasLtMatmulHeuristicResult_t *result) {
    simt_matmul p;
    const uint64_t splits = algo->data[7] % SIMT_CUBLASLT_SCHEME, scheme = algo->data[7] / SIMT_CUBLASLT_SCHEME;
    if (simt_cublaslt_bad_handle(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!simt_cublaslt_sizes(desc, a, b, c, d, &p) || algo->data[0] != SIMT_CUBLASLT_MAGIC || !splits) return CUBLAS_STATUS_INVALID_VALUE;
    if ((splits > 1) != (scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) return CUBLAS_STATUS_NOT_SUPPORTED;
    result->state = CUBLAS_STATUS_SUCCESS;
    result->workspaceSize = splits > 1 ? simt_cublaslt_workspace(splits) : 0;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,
                                            const void *b, cublasLtMatrixLayout_t b_layout, const void *beta, const void *c, cublasLtMatrixLayout_t c_layout,
                                            void *d, cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo, void *workspace,
                                            size_t workspace_bytes, cudaStream_t stream) {
    if (simt_cublaslt_bad_handle(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    const bool host = desc->pointer_mode == CUBLASLT_POINTER_MODE_HOST;
    simt_matmul p = {*desc, *a_layout, *b_layout, *d_layout, a, b, c, d, workspace, host ? NULL : (const float *)alpha, host ? NULL : (const float *)beta,
                     host ? *(const float *)alpha : 0, host ? *(const float *)beta : 0, 0, 0, 0, 0, 0, 0};
    if (!simt_cublaslt_sizes(desc, a_layout, b_layout, c_layout, d_layout, &p)) return CUBLAS_STATUS_INVALID_VALUE;
    if (!algo || algo->data[0] != SIMT_CUBLASLT_MAGIC || workspace_bytes < algo->data[2]) return CUBLAS_STATUS_INVALID_VALUE;
    const void *const at[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)at[i] % algo->data[3 + i]) return CUBLAS_STATUS_INVALID_VALUE;
    const uint64_t splits = algo->data[7] % SIMT_CUBLASLT_SCHEME;
    p.terms = simt_cublaslt_terms(p.k, splits);
    p.workspace_bytes = splits > 1 ? simt_cublaslt_workspace(splits) : algo->data[2];
    if (workspace_bytes < p.workspace_bytes) return CUBLAS_STATUS_INVALID_VALUE;
    if (p.workspace_bytes && ((uintptr_t)workspace % 256 || !simt_range_fits(workspace, p.workspace_bytes))) return CUBLAS_STATUS_INVALID_VALUE;
    if (!simt_cublaslt_layout_fits(a_layout, a) || !simt_cublaslt_layout_fits(b_layout, b) || !simt_cublaslt_layout_fits(d_layout, d) ||
        !simt_cublaslt_layout_fits(c_layout, c))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (desc->epilogue == CUBLASLT_EPILOGUE_BIAS && ((uintptr_t)desc->bias % 16 || !simt_range_fits(desc->bias, p.m * simt_cublaslt_bytes(d_layout->type))))
        return CUBLAS_STATUS_INVALID_VALUE;
    simt_cublaslt_sms = desc->sms;
    if (simt_plans()) {
        printf("a matmul of cuBLASLt, %lld x %lld x %lld\n", (long long)p.n, (long long)p.m, (long long)p.k);
        return CUBLAS_STATUS_SUCCESS;
    }
    p.tile = (p.n + 63) / 64 * 16; // at most 4 blocks, of whole groups
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)((p.n + p.tile - 1) / p.tile));
    config.blockDim = dim3(1);
    config.stream = stream;
    return simt_launch(&config, (const void *)simt_matmul_block, [p] { simt_matmul_block(p); }) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

#endif
