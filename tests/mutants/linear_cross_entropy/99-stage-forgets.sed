# file: lk_gemm.cuh - the sums begin anew with each stage
# case: far apart forward fused
s|, k + j > 0);|, j > 0);|
