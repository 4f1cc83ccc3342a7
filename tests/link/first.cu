// SPDX-License-Identifier: MIT
/* A library that has the functions for f32. It is compiled three times: with LK_EXPORT, as a library that others link with; as a
 * plugin that keeps lk to itself, as libraries do that vendor it; and as such a plugin with other_version's copy of lk. */
#include "lk/logsumexp.cuh"

LK_DEFINE_LOGSUMEXP(f32)

#include "runs.h"

extern "C" int first_runs(void)
{
    return runs();
}
extern "C" int first_version(void)
{
    return lk_version();
}
extern "C" int (*first_version_function(void))(void)
{
    return lk_version;
}
extern "C" const char *first_last_error(void)
{
    return lk_last_error();
}
extern "C" int first_errors(void)
{
    return lk_logsumexp_forward_f32(NULL, NULL) == LK_ERR_NULL;
}
