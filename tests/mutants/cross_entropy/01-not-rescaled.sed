# file: cross_entropy.cuh - a sum is not rescaled when the maximum grows
# case: lk_ce_row: two slices, nothing
s/^    s.sum \*= factor;/    s.sum *= s.sum > 0.0f ? 1.0f : factor;/
