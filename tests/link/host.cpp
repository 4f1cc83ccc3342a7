// SPDX-License-Identifier: MIT
/* A C++ file compiled without CUDA: it sees the C half alone. */
#include <string.h>

#include "lk/logsumexp.cuh"

LK_DECLARE_LOGSUMEXP(f32)

extern "C" int host_errors(void)
{
    lk_logsumexp_args args = {};
    args.outer = -1, args.cols = 5;
    return lk_logsumexp_backward_f32(&args, nullptr) == LK_ERR_NULL && strstr(lk_last_error(), "lk_logsumexp_backward_f32: x ");
}
