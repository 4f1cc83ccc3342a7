// SPDX-License-Identifier: MIT
/* lk_norm.cuh - RMS norm by lk's srms_norm under the names of llm.c's layer norm. It takes the place of layernorm.cuh.
 *
 * This makes another model: no mean is subtracted and no bias is added. The parameters for the bias stay in the model and in
 * its checkpoints, as zeros that never change; `mean` is not written. Do not load a checkpoint that layer norm has trained. */
#include <type_traits>

#include "cuda_common.h"
#include "lk/srms_norm.cuh"

static_assert(std::is_same_v<floatX, lk_bf16>, "this file is for BF16: for FP32 replace each bf16 in it by f32, for FP16 by f16");
LK_DEFINE_SRMS_NORM(bf16)

static void lk_norm_check(lk_status status)
{
    if (status == LK_OK) return;
    fprintf(stderr, "%s\n", lk_last_error());
    exit(EXIT_FAILURE);
}

static lk_srms_norm_args lk_norm_args(int rows, int cols, const floatX *weight, const float *rstd)
{
    lk_srms_norm_args args = {};
    args.rows = rows, args.cols = cols, args.eps = 1e-5f;
    args.weight = weight, args.rstd = (float *)rstd; /* forward writes rstd, backward reads it */
    return args;
}

void layernorm_forward(floatX *out, float *, float *rstd, const floatX *inp, const floatX *weight, const floatX *, int B, int T,
                       int C, cudaStream_t stream)
{
    NVTX_RANGE_FN();
    lk_srms_norm_args args = lk_norm_args(B * T, C, weight, rstd);
    args.x = inp, args.y = out;
    lk_norm_check(lk_srms_norm_forward_bf16(&args, stream));
}

/* residual = inp1 + inp2, normed = its norm */
void fused_residual_forward5(floatX *residual, floatX *normed, float *, float *rstd, const floatX *inp1, const floatX *inp2,
                             const floatX *weight, const floatX *, int N, int C, cudaStream_t stream)
{
    NVTX_RANGE_FN();
    lk_srms_norm_args args = lk_norm_args(N, C, weight, rstd);
    args.x = inp2, args.residual = inp1, args.residual_out = residual, args.y = normed;
    lk_norm_check(lk_srms_norm_forward_bf16(&args, stream));
}

/* dinp += the gradient of inp, dweight += that of weight. scratch is acts.output, a row of logits for each of the B * T rows:
 * lk needs less than two floats per element of inp. */
void layernorm_backward(floatX *dinp, floatX *dweight, floatX *, float *scratch, const floatX *dout, const floatX *inp,
                        const floatX *weight, const float *, const float *rstd, int B, int T, int C, cudaStream_t stream)
{
    NVTX_RANGE_FN();
    lk_srms_norm_args args = lk_norm_args(B * T, C, weight, rstd);
    args.x = inp, args.dy = dout;
    args.dresidual_out = dinp, args.dx = dinp; /* dinp holds the gradient of the residual stream, and the norm's is added */
    args.dweight = dweight, args.accumulate = 1;
    lk_norm_check(lk_srms_norm_backward_workspace_bytes_bf16(&args, &args.workspace_bytes));
    args.workspace = scratch;
    lk_norm_check(lk_srms_norm_backward_bf16(&args, stream));
}
