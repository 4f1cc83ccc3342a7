# file: cross_entropy.cuh - smoothing is made of sums of z
# case: lk_ce_row: two slices, nothing
s/const float others = fmaf(s.weights, log_sum, -o.scale \* s.weighted);/const float others = s.weights * r.lse - o.scale * fmaf(s.max, s.weights, s.weighted);/
