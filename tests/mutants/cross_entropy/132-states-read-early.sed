# file: cross_entropy.cuh - forward: a block's results are made before its states are written
# case: forward, then backward f32
/^    lk_cross_entropy_forward_warp_kernel(/,/^}/ { /__syncthreads();/d; }
