// SPDX-License-Identifier: MIT
/* The one CUDA file of the project: it makes lk's functions, for the types that the project uses. */
#include "lk/logsumexp.cuh"

LK_DEFINE_LOGSUMEXP(f32)
