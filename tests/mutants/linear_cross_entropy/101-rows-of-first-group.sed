# file: lk_gemm.cuh - both consumers multiply the same rows
# case: forward fused, many rows
s|ring->a\[0\] + group \* square|ring->a[0] + 0 * group * square|
