# file: lk_gemm.cuh - both consumers multiply the same rows
# case: forward fused, many rows
s|ring->a\[0\] + group \* 64|ring->a[0] + 0 * group * 64|
