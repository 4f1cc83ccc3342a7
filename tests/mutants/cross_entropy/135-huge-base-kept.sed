# file: lk_base.cuh - forward: a base whose rounding 2^x cannot make up for is kept
# case: forward f32 auto: huge logits
s/fabsf(base) < LK_LSE_BASE \&\& sum/lk_is_finite(base) \&\& sum/
