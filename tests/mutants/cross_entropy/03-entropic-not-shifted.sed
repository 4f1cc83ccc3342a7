# file: cross_entropy.cuh - sum e (v - reference) keeps the old reference
# case: lk_ce_row: two slices, nothing
s/s.entropic = factor \* fmaf(shift, s.sum, s.entropic);/s.entropic = factor * s.entropic;/
