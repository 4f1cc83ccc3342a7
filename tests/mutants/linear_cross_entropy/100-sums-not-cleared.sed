# file: lk_gemm.cuh - the sums begin with those of the tile before
# case: accuracy bf16
s|, k + j > 0);|, 1);|
