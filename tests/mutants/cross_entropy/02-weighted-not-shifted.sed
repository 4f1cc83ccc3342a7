# file: cross_entropy.cuh - sum w (v - reference) keeps the old reference
# case: lk_ce_row: two slices, nothing
s/s.weighted = fmaf(shift, s.weights, s.weighted);/s.weighted = s.weighted;/
