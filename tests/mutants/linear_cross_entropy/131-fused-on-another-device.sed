# file: linear_cross_entropy.cuh - path 0 takes the fused plan on a device without its instructions
# case: plans of path 0
s/if (!error \&\& lk_gemm_available(&device)) return NULL;/return NULL;/
