# file: lk_gemm.cuh - a block keeps its half of B
# case: errors forward bf16
s|transpose_b ? k : col + half, full, 3);|transpose_b ? k : col + half, full, (uint16_t)(1 << rank));|
