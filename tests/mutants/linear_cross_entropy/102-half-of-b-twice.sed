# file: lk_gemm.cuh - both blocks load the first half of B
# case: forward fused, many rows
s|col + half,|col,|
