// SPDX-License-Identifier: MIT
/* The one CUDA file of train_step.c and distill.c: it makes lk's functions, for the type that these programs use. */
#include "lk/linear_cross_entropy.cuh"
#include "lk/linear_kl.cuh"
#include "lk/srms_norm.cuh"

LK_DEFINE_LINEAR_CROSS_ENTROPY(f32)
LK_DEFINE_LINEAR_KL(f32)
LK_DEFINE_SRMS_NORM(f32)
