# file: cross_entropy.cuh - the sum over all rows is that of 32 warps of a cluster
/lk_cross_entropy_sum_kernel(/,/^}/ s/i < threads \/ 32; i += 32/i < threads \/ 32 \&\& i < 32; i += 32/
