# file: cross_entropy.cuh - a share whose sum left the range of floats is kept
s/lk_is_finite(base) \&\& sum < LK_CROSS_ENTROPY_LIMIT/lk_is_finite(base)/
