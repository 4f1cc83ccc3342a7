# file: cross_entropy.cuh - a difference out of range, whose exponential is 0, makes the entropy NaN
# case: huge logits
s/s.entropic = fmaf(factor \* fmaxf(shift, -3.402823466e38f), s.sum, factor \* s.entropic);/s.entropic = factor * fmaf(shift, s.sum, s.entropic);/
