// SPDX-License-Identifier: MIT
/* The other .cu file: its functions are static, so that it could come from another version of lk, and it makes f32 again. */
#define LK_API static
#include "lk/logsumexp.cuh"

LK_DEFINE_LOGSUMEXP(f32)
LK_DEFINE_LOGSUMEXP(bf16)

/* Calls all of them with wrong arguments; returns how many said so. */
extern "C" int second_errors(void)
{
    size_t bytes;
    return (lk_logsumexp_forward_f32(NULL, NULL) == LK_ERR_NULL) + (lk_logsumexp_backward_f32(NULL, NULL) == LK_ERR_NULL) +
           (lk_logsumexp_forward_bf16(NULL, NULL) == LK_ERR_NULL) + (lk_logsumexp_backward_bf16(NULL, NULL) == LK_ERR_NULL) +
           (lk_logsumexp_forward_workspace_bytes_f32(NULL, &bytes) == LK_ERR_NULL) +
           (lk_logsumexp_backward_workspace_bytes_f32(NULL, &bytes) == LK_ERR_NULL) +
           (lk_logsumexp_forward_workspace_bytes_bf16(NULL, &bytes) == LK_ERR_NULL) +
           (lk_logsumexp_backward_workspace_bytes_bf16(NULL, &bytes) == LK_ERR_NULL);
}
