# file: lk_gemm.cuh - every stage has the first columns of A
# case: far apart forward fused
s|transpose_a ? row + i : k, transpose_a ? k : row|transpose_a ? row + i : 0 * k, transpose_a ? k : row|
