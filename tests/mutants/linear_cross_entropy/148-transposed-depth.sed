# file: lk_gemm.cuh - of a transposed B every 16 k are the first
# case: switches alone forward_backward fused
s/next_b = transpose_b ? 128 : 2;/next_b = transpose_b ? 0 : 2;/
