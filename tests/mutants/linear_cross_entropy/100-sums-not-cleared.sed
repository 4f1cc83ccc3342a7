# file: lk_gemm.cuh - the sums begin with those of the tile before
s|, k + j > 0);|, 1);|
