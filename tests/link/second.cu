// SPDX-License-Identifier: MIT
/* The other .cu file: its lk is of another version, a copy of ours that other_version changes, so its functions are static. It
 * makes f32 again. */
#define LK_API static
#include "lk/logsumexp.cuh"

LK_DEFINE_LOGSUMEXP(f32)
LK_DEFINE_ONLY(LOGSUMEXP, forward, bf16)
LK_DEFINE_ONLY(LOGSUMEXP, backward, bf16)

#include "runs.h"

static_assert(offsetof(lk_logsumexp_args, of_another_version) == 0, "other_version's copy is another version");

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
extern "C" int second_runs(void)
{
    return runs();
}
extern "C" int second_version(void)
{
    return lk_version();
}
extern "C" const char *second_last_error(void)
{
    return lk_last_error();
}
