# file: linear_cross_entropy.cuh - an infinite upstream in alpha makes dx of ignored tokens NaN
# case: not finite backward auto
s/lk_is_finite(alpha) \&\& fabsf(alpha) >= 0x1p-126f;/true;/
