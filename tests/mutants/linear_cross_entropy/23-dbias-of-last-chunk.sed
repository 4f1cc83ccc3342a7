# file: linear_cross_entropy.cuh - dbias is that of the last chunk
# case: rounding alike f16
s/lk_lce_dz_stride(r), q.first_row > 0};/lk_lce_dz_stride(r), 0};/
