// SPDX-License-Identifier: MIT
/* The one CUDA file of the project: it makes lk's functions, for the types that the project uses. */
#include "lk/logsumexp.cuh"
#include "lk/srms_norm_fp8.cuh"

LK_DEFINE_LOGSUMEXP(f32)
LK_DEFINE_SRMS_NORM_FP8(f32)
