# file: lk_gemm.cuh - both blocks load the first half of B
s|col + half,|col,|
