// SPDX-License-Identifier: MIT
/* A .cu file that only declares: all that it calls is the library's. */
#include <string.h>

#include "lk/logsumexp.cuh"

LK_DECLARE_LOGSUMEXP(f32)

extern "C" int declares_errors(void)
{
    lk_logsumexp_args args = {};
    args.outer = 4, args.cols = 5;
    return lk_logsumexp_backward_f32(&args, NULL) == LK_ERR_NULL && strstr(lk_last_error(), "lk_logsumexp_backward_f32: x ") &&
           !strcmp(lk_status_string(LK_ERR_NULL), "LK_ERR_NULL");
}
extern "C" int (*declares_version(void))(void)
{
    return lk_version;
}
