# file: lk_gemm.cuh - a transposed A has the same 64 rows twice
# case: forward_backward fused, many rows
s/transpose_a ? row + i : k/transpose_a ? row + 0 * i : k/
