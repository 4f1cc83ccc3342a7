# file: lk_base.cuh - forward: a share whose sum left the range of floats is kept
# case: forward f32 auto: special values
s/(lk_is_finite(base) \&\& sum < LK_LSE_LIMIT) || !row/lk_is_finite(base) || !row/
