// SPDX-License-Identifier: MIT
/* lk_classifier.cuh - llm.c's fused_classifier, made of lk's cross_entropy. It takes the place of fused_classifier.cuh. */
#include <type_traits>

#include "cuda_common.h"
#include "lk/cross_entropy.cuh"

static_assert(std::is_same_v<floatX, __nv_bfloat16>, "for FP32 or FP16 write f32 or f16 for bf16 in this file");
LK_DEFINE_CROSS_ENTROPY(bf16)

/* *to = value: lk takes an upstream gradient from the device. */
typedef struct {
    float *to, value;
} lk_set_call;
template <class Call> LK_KERNEL void lk_set_kernel(Call c) { *c.to = c.value; }

/* sums[row] += losses[row] */
typedef struct {
    float *sums;
    const float *losses;
    int rows;
} lk_add_losses_call;
template <class Call> LK_KERNEL void lk_add_losses_kernel(Call c)
{
    const int row = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (row < c.rows) c.sums[row] += c.losses[row];
}

/* logits: B * T rows of V columns, P elements apart. With True they become their gradients, 0 in the padding, and each row's
 * loss is added to `losses`: over the micro-steps these are the sums that the trainer divides at the end. With False, for
 * validation, the logits stay, and `losses` is overwritten: the trainer has just set it to 0. */
template <bool WriteDLogits>
void fused_classifier(floatX *logits, float *losses, const float dloss, const int *targets, int B, int T, int V, int P,
                      std::bool_constant<WriteDLogits>, cudaStream_t stream)
{
    NVTX_RANGE_FN();
    const int rows = B * T;
    float *scratch = NULL; /* the rows' losses of this micro-step, then dloss; from the stream's pool, so each thread and GPU has its own */
    lk_cross_entropy_args args = {};
    args.logits = logits, args.logits_stride = P;
    args.target = targets, args.target_dtype = LK_TARGET_INT32;
    args.rows = rows, args.vocab = V;
    args.loss = losses;
    if constexpr (WriteDLogits) {
        cudaCheck(cudaMallocAsync((void **)&scratch, (rows + 1) * sizeof(float), stream));
        const lk_set_call call = {scratch + rows, dloss};
        cudaCheck(lk_launch(lk_set_kernel<lk_set_call>, 1, 1, 0, stream, call));
        args.loss = scratch, args.upstream = scratch + rows;
        args.dlogits = logits, args.zero_padding = 1;
    }
    const lk_status status = WriteDLogits ? lk_cross_entropy_forward_backward_bf16(&args, stream)
                                          : lk_cross_entropy_forward_bf16(&args, stream);
    if (status != LK_OK) {
        fprintf(stderr, "%s\n", lk_last_error());
        exit(EXIT_FAILURE);
    }
    if constexpr (WriteDLogits) {
        const lk_add_losses_call call = {losses, scratch, rows};
        cudaCheck(lk_launch(lk_add_losses_kernel<lk_add_losses_call>, CEIL_DIV(rows, 256), 256, 0, stream, call));
        cudaCheck(cudaFreeAsync(scratch, stream));
    }
}
