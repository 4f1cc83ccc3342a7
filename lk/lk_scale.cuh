// SPDX-License-Identifier: MIT
/* lk_scale.cuh - multiplies a tensor in place by one factor in device memory:  x[i] = factor x[i].
 *
 * Use        forward_backward wants the upstream gradient when it is called. Autograd knows that gradient later. So call
 *            forward_backward with upstream NULL, keep the gradients, and scale each of them when the upstream gradient of the
 *            loss is known. In most training steps it is 1; then the kernel reads the factor and nothing else.
 *                #include "lk/lk_scale.cuh"
 *                LK_DEFINE_SCALE(bf16)                     (in one .cu file; LK_DECLARE_SCALE(bf16) anywhere else)
 *                lk_status status = lk_scale_bf16(dlogits, rows * vocab, upstream, stream);
 * Needs      lk_base.cuh, lk_ptx.cuh.
 * Numerics   The product is float and rounded to T once. 0 times an infinity or NaN is NaN, as in PyTorch.
 * Traffic    Reads x once and writes it once. Where the factor is 1 it does neither.
 * Errors     LK_ERR_NULL       x or factor, unless count is 0
 *            LK_ERR_SHAPE      count below 0 or above 2^62; factor inside x
 *            LK_ERR_ALIGNMENT  x or factor is not aligned to its element
 */
#ifndef LK_SCALE_CUH
#define LK_SCALE_CUH

#include "lk_base.cuh"

/* x: in and out, T [count]; factor: in, f32 [1]; both in device memory. */
#define LK_DECLARE_SCALE(T) LK_API lk_status lk_scale_##T(void *x, int64_t count, const float *factor, cudaStream_t stream);

#if defined(__CUDACC__) || defined(LK_SIMT)

typedef struct {
    void *x;
    int64_t count;
    const float *factor;
} lk_scale_call;

/* A thread owns every gridDim.x * blockDim.x th vector, and of the single elements at both ends likewise. */
template <class T> LK_KERNEL void __launch_bounds__(256) lk_scale_kernel(lk_scale_call c)
{
    lk_griddepcontrol_wait();
    const float factor = *c.factor;
    if (factor == 1.0f) return;
    T *x = (T *)c.x;
    const lk_split split = lk_split_row(x, c.count);
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = first; i < split.vecs; i += step) {
        T *at = x + split.head + i * LK_VEC<T>;
        float v[LK_VEC<T>];
        lk_vec<T> raw = lk_load_vec(at);
        lk_unpack(v, raw);
#pragma unroll
        for (int j = 0; j < LK_VEC<T>; j++) v[j] *= factor;
        lk_pack(&raw, v);
        lk_store_vec(at, raw);
    }
    for (int64_t i = first; i < split.edge; i += step) {
        T *at = x + lk_edge_col<T>(split, (int)i);
        lk_put(at, factor * lk_to_float(*at));
    }
}

template <class T>
LK_HOST lk_status lk_scale(const char *op, void *x, int64_t count, const float *factor, cudaStream_t stream)
{
    const lk_tensor list[] = {{"x", x, sizeof(T), LK_OUT | LK_REQUIRED, count},
                              {"factor", factor, 4, LK_REQUIRED, count != 0}};
    lk_device device = {};
    const cudaError_t error = lk_current_device(&device);
    lk_status status = lk_check_null(op, list, 2);
    if (!status) status = lk_check_size(op, "count", count, 0, (int64_t)1 << 62);
    if (!status) status = lk_check_shapes(op, list, 2, false);
    if (!status) status = lk_check_alignment(op, list, 2);
    if (!status) lk_check_warn(op, count == 0, "count is 0; nothing is computed");
    if (!status) status = lk_asked_device(op, error);
    if (!status) status = lk_check_allocations(op, list, 2);
    if (status || count == 0) return status;
    /* 8 blocks fit on an SM of sm_80, 90 and 100. There all run at once, and none starts only to find that the factor is 1. */
    int64_t grid = lk_ceil_div(lk_ceil_div(count, LK_VEC<T>), 256);
    if (grid > 8 * device.sms) grid = 8 * device.sms;
    const lk_scale_call call = {x, count, factor};
    return lk_launch_pdl(op, &device, lk_scale_kernel<T>, grid, 1, 256, 0, stream, call);
}

#define LK_DEFINE_SCALE(T)                                                                                                     \
    LK_API lk_status lk_scale_##T(void *x, int64_t count, const float *factor, cudaStream_t stream)                            \
    {                                                                                                                          \
        return lk_scale<lk_##T>("lk_scale_" #T, x, count, factor, stream);                                                     \
    }

#else
#define LK_DEFINE_SCALE(T) LK_NEEDS_NVCC("LK_DEFINE_SCALE")
#endif /* CUDA or the simulator */
#endif
