# file: cross_entropy.cuh - what lse was rounded by stays in p
# case: lse_low, 
s/const float missed = fmaf(scale, value, -lse) - lse_low;/const float missed = fmaf(scale, value, -lse);/
