# file: linear_cross_entropy.cuh - path 0 takes the fused plan on a device without its instructions
# case: plans of path 0
s/return lk_gemm_available(&device) ? NULL : "sm_90a";/return NULL;/
