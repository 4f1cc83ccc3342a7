// SPDX-License-Identifier: MIT
/* One of two .cu files of a program that both include lk: this one makes the functions for f32. */
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
