# file: srms_norm.cuh - the mean is over the columns of whole vectors
# case: forward f32 auto: lengths
s/inverse_cols = 1\.0f \/ (float)cols;/inverse_cols = 1.0f \/ (float)(lk_ceil_div(cols, N) * N);/
