# file: cross_entropy.cuh - sum e (v - reference) keeps the old reference
# case: lk_ce_row: two slices, nothing
s/s.entropic = fmaf(factor \* fmaxf(shift, -3.402823466e38f), s.sum, factor \* s.entropic);/s.entropic = factor * s.entropic;/
