# file: lk_base.cuh - a share whose sum left the range of floats is kept
# case: forward f32 auto: empty
s/const bool fast = (fabsf(base) < LK_LSE_BASE \&\& sum < LK_LSE_LIMIT) || !row;/const bool fast = true;/
