# file: lk_base.cuh - forward: a share whose sum left the range of floats is kept
# case: forward f32 auto: special values
s/(fabsf(base) < LK_LSE_BASE \&\& sum < LK_LSE_LIMIT) || !row/fabsf(base) < LK_LSE_BASE || !row/
