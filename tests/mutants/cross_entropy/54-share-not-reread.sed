# file: cross_entropy.cuh - forward_backward: a share whose sum left the range of floats is kept
# case: forward_backward f32 auto: full warps
s/fabsf(base) < LK_LSE_BASE \&\& sum < LK_LSE_LIMIT/fabsf(base) < LK_LSE_BASE/
