# file: linear_cross_entropy.cuh - fused, sums of 24 bits of all columns of hidden share their bytes
# case: sums of 24 bits
s/(row \/ LK_GEMM_ROWS) \* p.dweight.cols + col \/ LK_GEMM_COLS;/(int64_t)0;/
