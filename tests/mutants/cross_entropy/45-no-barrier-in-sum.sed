# file: lk_block.cuh - the barrier between the sums of the warps and their addition is gone
# case: backward f32: central differences
/lk_sum_cluster(float/,/^}/ s/__syncthreads();/;/
