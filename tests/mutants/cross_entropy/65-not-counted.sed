# file: cross_entropy.cuh - forward_backward: mean divides by 1
# case: forward_backward f32: central differences
s/const float valid = (float)(p.valid_rows ? /const float valid = (float)(p.valid_rows \&\& p.given ? /
