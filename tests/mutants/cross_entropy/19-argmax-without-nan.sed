# file: cross_entropy.cuh - a NaN is the smallest logit
# case: lk_ce_row: two slices, nan
s/x != x ? INT32_MAX/x != x ? INT32_MIN/
