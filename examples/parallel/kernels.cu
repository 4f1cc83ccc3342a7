// SPDX-License-Identifier: MIT
/* lk's functions for main.c and bench/parallel.c. */
#include "lk/linear_cross_entropy.cuh"

LK_DEFINE_LINEAR_CROSS_ENTROPY(bf16)
