# file: linear_cross_entropy.cuh - fused, cuBLASLt makes dweight from x itself
# case: accuracy bf16
s|m.a = fused ? w.x : lk_lce_x<T>(r, q)|m.a = lk_lce_x<T>(r, q)|; s|m.key.lda = fused ? w.x_stride : lk_lce_x_stride(r)|m.key.lda = lk_lce_x_stride(r), (void)fused|
