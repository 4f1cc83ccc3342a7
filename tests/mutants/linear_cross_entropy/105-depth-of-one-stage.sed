# file: lk_gemm.cuh - every stage has the first columns of A
# case: far apart forward fused
s|ring->a\[stage\], a, k \* LK_GEMM_DEPTH, row|ring->a[stage], a, 0 * k, row|
