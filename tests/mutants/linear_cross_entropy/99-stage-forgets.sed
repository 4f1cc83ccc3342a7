# file: lk_gemm.cuh - the sums begin anew with each stage
s|, k + j > 0);|, j > 0);|
