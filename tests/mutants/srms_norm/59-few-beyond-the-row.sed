# file: srms_norm.cuh - the kernels for few rows take the next row for the end of this one
# case: forward f32 auto: few rows
s/count = (int)p\.a\.cols \/ N - vec;/count = 32 * U;/
