// SPDX-License-Identifier: MIT
/* lk_scale.cuh - multiplies a tensor by a factor in device memory: gradients, when their upstream gradient becomes known.
 *
 *   lk_scale     x[i] = factor x[i]
 *   lk_rescale   y[i] = factor / divisor x[i]; y may be x
 *
 * Use        forward_backward wants the upstream gradient when it is called. Autograd knows it later. There are three ways:
 *            1. Nothing is known. Call forward_backward with upstream NULL, which means 1, and scale each gradient later:
 *                #include "lk/lk_scale.cuh"
 *                LK_DEFINE_SCALE(bf16)                     (in one .cu file; LK_DECLARE_SCALE(bf16) anywhere else)
 *                lk_status status = lk_scale_bf16(dlogits, rows * vocab, upstream, stream);
 *            2. It is known beforehand: 1 / the steps of gradient accumulation, or a loss scale. Pass it to forward_backward as
 *               upstream. Where it may still turn out to be another number, rescale:
 *                lk_rescale_args args = {};
 *                args.x = args.y = dlogits, args.count = rows * vocab, args.factor = upstream, args.divisor = expected;
 *                status = lk_rescale_bf16(&args, stream);
 *            3. It is most likely what it was last time. Keep two floats {1, 1} in device memory as `history`. Before
 *               forward_backward copy history[0] (4 bytes, cudaMemcpyAsync) to memory of this call, and pass that as upstream,
 *               later as divisor. lk_rescale with args.history = history notes the factor: history[0] becomes one that came twice
 *               in a row. Not in f16, whose gradients for a wrong upstream may be too small.
 * Needs      lk_base.cuh, lk_check.cuh, lk_ptx.cuh.
 * Numerics   The quotient and the product are float; the result is rounded to T once. Gradients that were made for another
 *            upstream have been rounded before, so a product with anything but a power of two rounds them twice. 0 times an
 *            infinity or NaN is NaN, as in PyTorch.
 *            x is of T. For gradients in e5m2 the upstream has to be right in the call that computes them.
 *            history: a factor of 0, of less than 2^-40 or more than 2^40 in size, or NaN changes nothing.
 * Traffic    Reads x once and writes y once. Where factor and divisor are equal and y is x it does neither; where y is not x
 *            it copies.
 * Errors     LK_ERR_NULL       args, x, y or factor, unless count is 0
 *            LK_ERR_SHAPE      count below 0 or above 2^62; tensors that overlap, unless y is x
 *            LK_ERR_ALIGNMENT  a tensor is not aligned to its element
 */
#include "lk_base.cuh" /* before the guard, for its check of versions */

#ifndef LK_SCALE_CUH
#define LK_SCALE_CUH

#include "lk_check.cuh"

typedef struct {
    const void *x;        /* in          T [count] */
    void *y;              /* out         T [count]; may be x */
    int64_t count;        /* at least 0 */
    const float *factor;  /* in          f32 [1] */
    const float *divisor; /* in          f32 [1], finite and not 0; NULL means 1 */
    float *history;       /* in and out  f32 [2]: what to expect, and the last factor; NULL: none is kept */
} lk_rescale_args;

/* lk_scale: x is in and out, T [count]; factor is in, f32 [1]; both in device memory. */
#define LK_PROTOTYPE_SCALE(T)                                                                                                  \
    LK_API lk_status lk_scale_##T(void *x, int64_t count, const float *factor, cudaStream_t stream);                           \
    LK_API lk_status lk_rescale_##T(const lk_rescale_args *args, cudaStream_t stream);
#define LK_SCALE_FUNCTIONS(X, T) X##_SCALE(T)
#define LK_DECLARE_SCALE(T) LK_DECLARE(SCALE, T)
#define LK_DEFINE_SCALE(T) LK_DEFINE(SCALE, T)

#if LK_CUDA

/* A thread owns every gridDim.x * blockDim.x th vector, and of the single elements at both ends likewise. */
template <class T> LK_KERNEL void __launch_bounds__(256) lk_scale_kernel(lk_rescale_args a)
{
    lk_griddepcontrol_wait();
    const float upstream = *a.factor, made_for = a.divisor ? *a.divisor : 1.0f;
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    if (a.history && first == 0 && fabsf(upstream) >= 0x1p-40f && fabsf(upstream) <= 0x1p40f) {
        if (a.history[1] == upstream) a.history[0] = upstream;
        a.history[1] = upstream;
    }
    const T *x = (const T *)a.x;
    T *y = (T *)a.y;
    const bool equal = upstream == made_for;
    if (equal && x == y) return;
    const float factor = equal ? 1.0f : __fdiv_rn(upstream, made_for);
    lk_split split = lk_split_row(x, a.count);
    int64_t edge = split.edge;
    if (((uintptr_t)x ^ (uintptr_t)y) % 16 != 0) split = {0, 0, 0}, edge = a.count; /* no vector of both is aligned */
    for (int64_t i = first; i < split.vecs; i += step) {
        const int64_t at = split.head + i * LK_VEC<T>;
        float v[LK_VEC<T>];
        lk_vec<T> raw = lk_load_vec(x + at);
        lk_unpack(v, raw);
        LK_UNROLL for (int j = 0; j < LK_VEC<T>; j++) v[j] *= factor;
        if (!equal) lk_pack(&raw, v);
        lk_store_vec(y + at, raw);
    }
    for (int64_t i = first; i < edge; i += step) {
        const int64_t at = i < split.head ? i : split.vecs * LK_VEC<T> + i;
        if (equal) y[at] = x[at]; /* NaNs keep their bits */
        else lk_put(y + at, factor * lk_to_float(x[at]));
    }
}

template <class T> LK_HOST lk_status lk_rescale(const char *op, const lk_rescale_args *args, cudaStream_t stream)
{
    if (!args) return lk_fail(LK_ERR_NULL, op, "args is NULL");
    const lk_rescale_args a = *args;
    const int64_t some = a.count != 0;
    const lk_tensor list[] = {{"x", a.x, sizeof(T), LK_REQUIRED, a.count},
                              {"y", a.y, sizeof(T), LK_OUT | LK_REQUIRED, a.count, {}, {"x"}},
                              {"factor", a.factor, 4, LK_REQUIRED, some},
                              {"divisor", a.divisor, 4, LK_IN, some},
                              {"history", a.history, 4, LK_OUT, 2 * some}};
    const int count = LK_COUNT(list);
    lk_device device = {};
    lk_checks checks = lk_check_begin(op, &device);
    lk_check_size(&checks, "count", a.count, 0, (int64_t)1 << 62);
    lk_check_shapes(&checks, list, count, false);
    lk_check_end(&checks, list, count);
    lk_check_warn(&checks, a.count == 0, "count is 0; nothing is computed");
    if (checks.status || a.count == 0) return checks.status;
    /* 8 blocks fit on an SM of sm_80, 90 and 100. There all run at once, and none starts only to find that the factor is 1. */
    int64_t grid = lk_ceil_div(lk_ceil_div(a.count, LK_VEC<T>), 256);
    if (grid > 8 * device.sms) grid = 8 * device.sms;
    return lk_launch_pdl(op, &device, lk_scale_kernel<T>, grid, 1, 256, 0, stream, a);
}

#define LK_EMIT_SCALE(T)                                                                                                       \
    LK_API LK_BODY lk_status lk_scale_##T(void *x, int64_t count, const float *factor, cudaStream_t stream)                    \
    {                                                                                                                          \
        LK_EMIT_COMMON;                                                                                                        \
        const lk_rescale_args a = {x, x, count, factor, NULL, NULL};                                                           \
        return lk_rescale<lk_##T>("lk_scale_" #T, &a, stream);                                                                 \
    }                                                                                                                          \
    LK_API LK_BODY lk_status lk_rescale_##T(const lk_rescale_args *args, cudaStream_t stream)                                  \
    {                                                                                                                          \
        return lk_rescale<lk_##T>("lk_rescale_" #T, args, stream);                                                             \
    }

#endif /* CUDA or the simulator */
#endif
