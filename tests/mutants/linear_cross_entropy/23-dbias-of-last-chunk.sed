# file: linear_cross_entropy.cuh - dbias is that of the last chunk
s/lk_lce_dz_stride(r), q.first_row > 0};/lk_lce_dz_stride(r), 0};/
