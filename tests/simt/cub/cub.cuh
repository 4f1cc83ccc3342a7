// SPDX-License-Identifier: MIT
// Stand-in for <cub/cub.cuh>: what of CUB this project uses.
#include "block/block_reduce.cuh"
