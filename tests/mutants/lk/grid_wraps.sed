# file: lk_base.cuh - a grid of more than 2^32 blocks wraps around
# case: more blocks than CUDA launches
s/dim3(grid > INT32_MAX ? UINT32_MAX : (unsigned)grid)/dim3((unsigned)grid)/
