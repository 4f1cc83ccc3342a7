# file: lk_block.cuh - the barrier between the sums of the warps and their addition is gone
/lk_sum_cluster(float/,/^}/ s/__syncthreads();/;/
