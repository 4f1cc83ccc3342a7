# file: lk_base.cuh - a base whose rounding 2^x cannot make up for is kept
# case: forward f32 auto: huge values
s/fabsf(base) < LK_LSE_BASE \&\& sum/lk_is_finite(base) \&\& sum/
