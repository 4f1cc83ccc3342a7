# file: cross_entropy.cuh - forward_backward: a base whose rounding 2^x cannot make up for is kept
# case: forward_backward f32 block: huge logits
s/fabsf(base) < LK_LSE_BASE \&\& sum < LK_LSE_LIMIT/lk_is_finite(base) \&\& sum < LK_LSE_LIMIT/
