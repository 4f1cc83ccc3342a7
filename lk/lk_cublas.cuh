// SPDX-License-Identifier: MIT
/* lk_cublas.cuh - matrix products by cuBLASLt, each with an algorithm that is chosen once and kept.
 *
 *   d[i,j] = alpha sum_k a[i,k] b[k,j] + bias[i] + beta d[i,j]      i < m, j < n, all column-major, as cuBLASLt has it
 *
 * a and b are the factors of this product. It is computed in float, beta d included, and rounded once. cuBLASLt has many
 * algorithms for a product, and its heuristic names one first. A context keeps cuBLASLt's handle and the algorithm of each product
 * that it has seen, up to LK_CUBLAS_CHOICES. The same product takes the same algorithm again, so it gives the same bits.
 *
 * Usage      An op keeps a context inside its own, for one device and one host thread at a time:
 *                lk_cublas_context context;
 *                status = lk_cublas_init(op, &context);
 *            A call says where products run. A product has types, sizes, strides and pointers; lk fills in the rest of its key.
 *                const lk_cublas_call call = {op, stream, &context, workspace, workspace_bytes, LK_CUBLAS_LAUNCH};
 *                lk_cublas_product p = {};
 *                p.key.factor_type = LK_DTYPE_BF16, p.key.type = LK_DTYPE_F32, p.key.transpose_a = 1;
 *                p.key.m = m, p.key.n = n, p.key.k = k, p.key.lda = k, p.key.ldb = k, p.key.ldd = m;
 *                p.a = a, p.b = b, p.d = d;
 *                status = lk_cublas_multiply(&call, &p);
 *            LK_CUBLAS_RESOLVE launches nothing. It only makes sure that the product has an algorithm. An op that resolves all
 *            its products first has launched nothing when cuBLASLt refuses one. lk_cublas_next skips the parts of a call whose
 *            products are the same as those of earlier parts.
 * Needs      lk_base.cuh, lk_ptx.cuh; cuBLASLt, linked with -lcublasLt.
 * Repeatable Partial sums are added in float, in a fixed order, with every algorithm that is asked for.
 */
#ifndef LK_CUBLAS_CUH
#define LK_CUBLAS_CUH

#include "lk_base.cuh"

#if defined(__CUDACC__) || defined(LK_SIMT)

#include <cublasLt.h>

/* The choice of an algorithm depends on these. Keys are compared byte by byte, so there is no padding. */
typedef struct {
    int32_t factor_type, type;        /* LK_DTYPE_* of a and b, and of d and the bias */
    int32_t transpose_a, transpose_b; /* not 0: stored as k x m, as n x k */
    int32_t tf32;                     /* not 0: f32 factors may be rounded to TF32 */
    int32_t bias, scalars_on_device;  /* lk_cublas_multiply sets these two, align_*, workspace_bytes and add */
    int32_t align_a, align_b, align_d;
    int64_t m, n, k, lda, ldb, ldd;   /* sizes and strides between columns, in elements */
    int64_t workspace_bytes, add;     /* add: d is read too, which may have another fastest algorithm */
    int64_t sms;                      /* blocks run on this many SMs at a time; 0: on all */
} lk_cublas_key;

typedef struct {
    lk_cublas_key key;
    const void *a, *b, *bias; /* bias: in the type of d; NULL: none */
    void *d;
    bool add;             /* beta is 1, else 0 */
    const float *scalars; /* on the device: alpha, 0 and 1; NULL: alpha is 1 */
} lk_cublas_product;

typedef struct {
    lk_cublas_key key;
    cublasLtMatmulAlgo_t algorithm;
} lk_cublas_choice;

#define LK_CUBLAS_CHOICES 64
#define LK_CUBLAS_MAGIC 0x6c6b6c6365747831u

typedef struct {
    uint64_t magic;
    cublasLtHandle_t handle;
    int device, count;
    lk_cublas_choice choices[LK_CUBLAS_CHOICES];
} lk_cublas_context;

enum { LK_CUBLAS_RESOLVE, LK_CUBLAS_LAUNCH };

typedef struct {
    const char *op;
    cudaStream_t stream;
    lk_cublas_context *context;
    void *workspace;
    size_t workspace_bytes;
    int mode; /* LK_CUBLAS_RESOLVE or .._LAUNCH */
} lk_cublas_call;

/* A product in cuBLASLt's structs. */
typedef struct {
    cublasLtMatmulDescOpaque_t matmul;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulPreferenceOpaque_t preference;
} lk_cublas_description;

LK_HOST lk_status lk_cublas_status(const char *op, const char *call, cublasStatus_t status)
{
    if (status == CUBLAS_STATUS_SUCCESS) return LK_OK;
    return lk_fail(LK_ERR_CUBLAS, op, "%s failed with status %d, %s", call, (int)status, cublasLtGetStatusName(status));
}

LK_HOST lk_status lk_cublas_init(const char *op, lk_cublas_context *c)
{
    if (!c) return lk_fail(LK_ERR_NULL, op, "context is NULL");
    memset((void *)c, 0, sizeof *c);
    lk_status status = lk_asked_device(op, cudaGetDevice(&c->device));
    if (!status) status = lk_cublas_status(op, "cublasLtCreate", cublasLtCreate(&c->handle));
    if (!status) c->magic = LK_CUBLAS_MAGIC;
    return status;
}

LK_HOST lk_status lk_cublas_destroy(const char *op, lk_cublas_context *c)
{
    if (!c) return lk_fail(LK_ERR_NULL, op, "context is NULL");
    if (c->magic != LK_CUBLAS_MAGIC) return lk_fail(LK_ERR_VALUE, op, "context is not one that init has made");
    c->magic = 0;
    return lk_cublas_status(op, "cublasLtDestroy", cublasLtDestroy(c->handle));
}

/* init and destroy of an op whose context holds this one. They are friends, as the functions of lk_common are. They are defined
 * where LK_CUBLAS_EMIT_CONTEXT stands: in the ..._plan functions of each header whose calls take the context. They have no local
 * variables: g++ takes such variables for those of the function that instantiates the template. */
#define LK_CUBLAS_CONTEXT(op)                                                                                                  \
    template <class Once> struct lk_##op##_common {                                                                            \
        friend LK_BODY __attribute__((used)) lk_status lk_##op##_init(lk_##op##_context *context)                              \
        {                                                                                                                      \
            return lk_cublas_init("lk_" #op "_init", (lk_cublas_context *)context);                                            \
        }                                                                                                                      \
        friend LK_BODY __attribute__((used)) lk_status lk_##op##_destroy(lk_##op##_context *context)                           \
        {                                                                                                                      \
            return lk_cublas_destroy("lk_" #op "_destroy", (lk_cublas_context *)context);                                      \
        }                                                                                                                      \
    };                                                                                                                         \
    LK_COMMON_IN_EVERY_FILE(lk_##op##_common)
#define LK_CUBLAS_EMIT_CONTEXT(op) ((void)lk_##op##_common<void>(), (void)lk_##op##_init, (void)lk_##op##_destroy)

/* Refuses a context that init has not made, or not on the current device. Launchers report that there is no device. */
LK_HOST lk_status lk_cublas_check(const char *op, const lk_cublas_context *c)
{
    int device = -1;
    if (c->magic != LK_CUBLAS_MAGIC) return lk_fail(LK_ERR_VALUE, op, "context is not one that init has made");
    if (cudaGetDevice(&device) || device == c->device) return LK_OK;
    return lk_fail(LK_ERR_VALUE, op, "context belongs to device %d; the current device is %d", c->device, device);
}

LK_HOST cudaDataType_t lk_cublas_type(int dtype)
{
    return dtype == LK_DTYPE_F32 ? CUDA_R_32F : dtype == LK_DTYPE_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

LK_HOST int32_t lk_cublas_alignment(const void *pointer)
{
    int32_t bytes = 256; /* the most that cuBLASLt asks about */
    while ((uintptr_t)pointer % (uintptr_t)bytes) bytes /= 2;
    return bytes;
}

LK_HOST cublasStatus_t lk_cublas_describe(const lk_cublas_product *p, lk_cublas_description *s)
{
    const lk_cublas_key *k = &p->key;
    const cudaDataType_t factor = lk_cublas_type(k->factor_type), type = lk_cublas_type(k->type);
    const int32_t mode = k->scalars_on_device ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
    const int32_t transpose_a = k->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t transpose_b = k->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, sms = (int32_t)k->sms;
    const uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS, sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t align_a = (uint32_t)k->align_a, align_b = (uint32_t)k->align_b, align_d = (uint32_t)k->align_d;
    const uint64_t workspace = (uint64_t)k->workspace_bytes, um = (uint64_t)k->m, un = (uint64_t)k->n, uk = (uint64_t)k->k;
    const cublasComputeType_t compute = k->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasStatus_t status = cublasLtMatmulDescInit(&s->matmul, compute, CUDA_R_32F);
#define LK_CUBLAS_SET(what, value)                                                                                             \
    if (!status) status = cublasLtMatmulDescSetAttribute(&s->matmul, CUBLASLT_MATMUL_DESC_##what, &value, sizeof value)
#define LK_CUBLAS_PREFER(what, value)                                                                                          \
    if (!status)                                                                                                               \
    status = cublasLtMatmulPreferenceSetAttribute(&s->preference, CUBLASLT_MATMUL_PREF_##what, &value, sizeof value)
    LK_CUBLAS_SET(POINTER_MODE, mode);
    LK_CUBLAS_SET(TRANSA, transpose_a);
    LK_CUBLAS_SET(TRANSB, transpose_b);
    if (k->bias) {
        LK_CUBLAS_SET(EPILOGUE, epilogue);
        LK_CUBLAS_SET(BIAS_POINTER, p->bias);
    }
    if (k->sms) LK_CUBLAS_SET(SM_COUNT_TARGET, sms);
    if (!status) status = cublasLtMatrixLayoutInit(&s->a, factor, k->transpose_a ? uk : um, k->transpose_a ? um : uk, k->lda);
    if (!status) status = cublasLtMatrixLayoutInit(&s->b, factor, k->transpose_b ? un : uk, k->transpose_b ? uk : un, k->ldb);
    if (!status) status = cublasLtMatrixLayoutInit(&s->d, type, um, un, k->ldd);
    if (!status) status = cublasLtMatmulPreferenceInit(&s->preference);
    LK_CUBLAS_PREFER(MAX_WORKSPACE_BYTES, workspace);
    LK_CUBLAS_PREFER(REDUCTION_SCHEME_MASK, sums); /* partial sums are added in float, in a fixed order */
    LK_CUBLAS_PREFER(MIN_ALIGNMENT_A_BYTES, align_a);
    LK_CUBLAS_PREFER(MIN_ALIGNMENT_B_BYTES, align_b);
    LK_CUBLAS_PREFER(MIN_ALIGNMENT_C_BYTES, align_d);
    LK_CUBLAS_PREFER(MIN_ALIGNMENT_D_BYTES, align_d);
#undef LK_CUBLAS_SET
#undef LK_CUBLAS_PREFER
    return status;
}

LK_HOST lk_status lk_cublas_launch(const lk_cublas_call *c, const lk_cublas_product *p, lk_cublas_description *s,
                                   const cublasLtMatmulAlgo_t *algorithm)
{
    static const float one = 1.0f, zero = 0.0f;
    const float *const alpha = p->scalars ? p->scalars : &one;
    const float *const beta = !p->scalars ? (p->add ? &one : &zero) : p->scalars + (p->add ? 2 : 1);
    const cublasStatus_t status =
        cublasLtMatmul(c->context->handle, &s->matmul, alpha, p->a, &s->a, p->b, &s->b, beta, p->d, &s->d, p->d, &s->d,
                       algorithm, c->workspace, c->workspace_bytes, c->stream);
    return lk_cublas_status(c->op, "cublasLtMatmul", status);
}

/* Whether so many parts leave the last of k terms out. Those of algorithms with this id may: a part sums k / splits terms, rounded
 * down and then up to a multiple of 64. Of k = 2945 in two parts each sums 1472, and the last term is in none. Seen on an H200 with
 * CUDA 13.0; others report it from 12.8 on, and on Blackwell. */
#define LK_CUBLAS_ROUNDS_PARTS 66
LK_HOST bool lk_cublas_leaves_out(int64_t k, int32_t splits)
{
    return splits > 1 && splits * lk_ceil_div(k / splits, 64) * 64 < k;
}

/* Gives an algorithm another number of parts. Fails where it cannot have that many, or they need more workspace. */
LK_HOST cublasStatus_t lk_cublas_split(cublasLtHandle_t handle, const lk_cublas_key *key, lk_cublas_description *s, int32_t splits,
                                       cublasLtMatmulAlgo_t *algorithm)
{
    const uint32_t sums = splits > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    cublasLtMatmulHeuristicResult_t needs = {};
    cublasStatus_t status =
        cublasLtMatmulAlgoConfigSetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits);
    if (!status)
        status = cublasLtMatmulAlgoConfigSetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &sums, sizeof sums);
    if (!status) status = cublasLtMatmulAlgoCheck(handle, &s->matmul, &s->a, &s->b, &s->d, &s->d, algorithm, &needs);
    return status || needs.workspaceSize <= (size_t)key->workspace_bytes ? status : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Asks cuBLASLt for an algorithm. One that leaves terms out gets more parts, or a single one where these fail. */
LK_HOST cublasStatus_t lk_cublas_choose(cublasLtHandle_t handle, const lk_cublas_key *key, lk_cublas_description *s,
                                        cublasLtMatmulAlgo_t *algorithm)
{
    cublasLtMatmulHeuristicResult_t result = {};
    int count = 0;
    int32_t id = 0, splits = 1;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, &s->matmul, &s->a, &s->b, &s->d, &s->d, &s->preference, 1, &result, &count);
    if (!status && (count == 0 || result.state)) status = CUBLAS_STATUS_NOT_SUPPORTED;
    *algorithm = result.algo;
    if (status || cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, NULL) ||
        cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits, NULL) ||
        id != LK_CUBLAS_ROUNDS_PARTS || !lk_cublas_leaves_out(key->k, splits))
        return status;
    while (splits < key->k && lk_cublas_leaves_out(key->k, splits)) splits++;
    status = lk_cublas_split(handle, key, s, splits, algorithm);
    return status ? lk_cublas_split(handle, key, s, 1, algorithm) : status;
}

/* A product with the algorithm that the context keeps for it. If there is none yet, cuBLASLt is asked. */
LK_HOST lk_status lk_cublas_multiply(const lk_cublas_call *call, lk_cublas_product *p)
{
    lk_cublas_context *const c = call->context;
    lk_cublas_key *const key = &p->key;
    key->bias = p->bias != NULL, key->scalars_on_device = p->scalars != NULL, key->add = p->add;
    key->align_a = lk_cublas_alignment(p->a), key->align_b = lk_cublas_alignment(p->b);
    key->align_d = lk_cublas_alignment(p->d);
    key->workspace_bytes = (int64_t)call->workspace_bytes;
    lk_cublas_description s;
    lk_status status = lk_cublas_status(call->op, "a cublasLt attribute", lk_cublas_describe(p, &s));
    int at = 0;
    while (at < c->count && memcmp(&c->choices[at].key, key, sizeof *key)) at++;
    if (!status && at == c->count) {
        cublasLtMatmulAlgo_t algorithm;
        status = lk_cublas_status(call->op, "cuBLASLt's choice of an algorithm", lk_cublas_choose(c->handle, key, &s, &algorithm));
        if (status) return status;
        if (at == LK_CUBLAS_CHOICES) at--; /* a full table: each later product replaces its last one */
        else c->count++;
        c->choices[at] = {*key, algorithm};
    }
    if (status || call->mode == LK_CUBLAS_RESOLVE) return status;
    return lk_cublas_launch(call, p, &s, &c->choices[at].algorithm);
}

/* The part after `part`, of `count` parts of a call, such as chunks of tokens. All parts but the last have the same length, and
 * their pointers are a constant multiple of 2 bytes apart. Keys know alignments of up to 256 bytes, so keys repeat after
 * LK_CUBLAS_PARTS parts. To resolve, the first LK_CUBLAS_PARTS parts and the last one are enough. */
#define LK_CUBLAS_PARTS 128
LK_HOST int64_t lk_cublas_next(int mode, int64_t part, int64_t count)
{
    return mode == LK_CUBLAS_RESOLVE && part + 1 >= LK_CUBLAS_PARTS && part + 1 < count ? count - 1 : part + 1;
}

/* A product whose size `cols` counts columns of a vocabulary, the last `tail` of them as a product of its own: cuBLASLt is several
 * times slower with 16-bit factors whose rows are no multiple of 8. The tail comes first: where bf16 d is a sum of two products,
 * only the tail's is then rounded once more. */
LK_HOST lk_status lk_cublas_multiply_columns(const lk_cublas_call *call, lk_cublas_product *m, int64_t lk_cublas_key::*cols,
                                             int64_t tail)
{
    const bool rows_of_d = cols == &lk_cublas_key::m, cols_of_d = cols == &lk_cublas_key::n;
    const int64_t bytes = lk_dtype_bytes<float>(m->key.factor_type), bytes_out = lk_dtype_bytes<float>(m->key.type);
    const int64_t others = m->key.*cols - tail; /* the first columns */
    if (!tail) return lk_cublas_multiply(call, m);
    lk_cublas_product last = *m;
    last.key.*cols = tail, m->key.*cols = others;
    if (!cols_of_d) last.a = (const char *)m->a + others * m->key.lda * bytes;
    if (!rows_of_d) last.b = (const char *)m->b + others * bytes;
    if (rows_of_d || cols_of_d) last.d = (char *)m->d + others * (cols_of_d ? m->key.ldd : 1) * bytes_out;
    else m->add = 1;
    if (m->bias) last.bias = (const char *)m->bias + others * bytes_out;
    const lk_status status = lk_cublas_multiply(call, &last);
    return status ? status : lk_cublas_multiply(call, m);
}

/* e of 2^e, the first power of two above x, clamped to what 16-bit factors with a product's alpha need; 0 where x is not
 * positive and finite. */
LK_DEVICE int lk_cublas_exponent(float x)
{
    const int e = x > 0.0f && lk_is_finite(x) ? (__float_as_int(x) >> 23) - 126 : 0;
    return e < -80 ? -80 : e > 80 ? 80 : e;
}

#define LK_CUBLAS_DEFAULT_SHARE 16 /* ..._workspace_bytes: a plan may take a 16th of the device's memory */

/* The limit of ..._workspace_bytes. It depends on the device alone: memory in use changes neither it nor the bits. */
LK_HOST size_t lk_cublas_default_budget(void)
{
    static thread_local int known = -1;
    static thread_local size_t bytes;
    size_t unused = 0, total = 0;
    int id = 0;
    if (cudaGetDevice(&id) == cudaSuccess && id == known) return bytes;
    if (cudaMemGetInfo(&unused, &total) != cudaSuccess) return (size_t)1 << 30;
    known = id, bytes = total / LK_CUBLAS_DEFAULT_SHARE;
    return bytes;
}

#endif /* CUDA or the simulator */
#endif
