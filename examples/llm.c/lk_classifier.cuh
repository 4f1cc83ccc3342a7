// SPDX-License-Identifier: MIT
/* lk_classifier.cuh - llm.c's fused_classifier, made of lk's cross_entropy. It takes the place of fused_classifier.cuh. */
#include <type_traits>

#include "cuda_common.h"
#include "lk/cross_entropy.cuh"

static_assert(std::is_same_v<floatX, lk_bf16>, "this file is for BF16: for FP32 replace each bf16 in it by f32, for FP16 by f16");
LK_DEFINE_ONLY(CROSS_ENTROPY, forward, bf16)
LK_DEFINE_ONLY(CROSS_ENTROPY, forward_backward, bf16)

/* logits: B * T rows of V columns, P elements apart. With True they become their gradients, 0 in the padding, and each row's
 * loss is added to `losses`: over the micro-steps these are the sums that the trainer divides at the end. With False, for
 * validation, the logits stay, and `losses` is overwritten: the trainer has just set it to 0. */
template <bool WriteDLogits>
void fused_classifier(floatX *logits, float *losses, const float dloss, const int *targets, int B, int T, int V, int P,
                      std::bool_constant<WriteDLogits>, cudaStream_t stream)
{
    NVTX_RANGE_FN();
    lk_cross_entropy_args args = {};
    args.logits = logits, args.logits_stride = P;
    args.target = targets, args.target_dtype = LK_TARGET_INT32;
    args.rows = B * T, args.vocab = V;
    args.loss = losses, args.accumulate_loss = WriteDLogits;
    args.dlogits = logits, args.zero_padding = 1, args.upstream_value = dloss; /* forward does not look at these */
    const lk_status status = WriteDLogits ? lk_cross_entropy_forward_backward_bf16(&args, stream)
                                          : lk_cross_entropy_forward_bf16(&args, stream);
    if (status != LK_OK) {
        fprintf(stderr, "%s\n", lk_last_error());
        exit(EXIT_FAILURE);
    }
}
