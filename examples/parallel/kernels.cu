// SPDX-License-Identifier: MIT
/* lk's functions for main.c and bench/parallel.c. */
#include "lk/linear_cross_entropy.cuh"
#include "lk/linear_cross_entropy_parallel.cuh"

LK_DEFINE_LINEAR_CROSS_ENTROPY(bf16)
LK_DEFINE_LINEAR_CROSS_ENTROPY_PARALLEL(bf16)
