# file: cross_entropy.cuh - forward_backward: a share whose sum left the range of floats is kept
# case: forward_backward f32 auto: full warps
s/lk_is_finite(base) \&\& sum < LK_LSE_LIMIT/lk_is_finite(base)/
