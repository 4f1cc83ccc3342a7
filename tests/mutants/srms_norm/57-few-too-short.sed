# file: srms_norm.cuh - the kernel for few rows gets half of the threads that a row needs
# case: forward f32 auto: few rows
s/lk_ceil_div(units, 32 \* LK_SRMS_NORM_FEW_VECS) \* 32/lk_ceil_div(units, 64 * LK_SRMS_NORM_FEW_VECS) * 32/
