# file: cross_entropy.cuh - forward: a thread's result is that of as many rows as the block has threads
# case: forward, then backward f16
/^    lk_cross_entropy_forward_warp_kernel(/,/^}/ s/result = first + threadIdx.x/result = (int64_t)blockIdx.x * LK_CROSS_ENTROPY_WARP_THREADS + threadIdx.x/
