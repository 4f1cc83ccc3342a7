# file: cross_entropy.cuh - the slope of tanh, off by 1e-5
# case: lk_ce_tanh
s/\*slope = 4.0f \* e/*slope = 4.00004f * e/
