# file: cross_entropy.cuh - forward_backward: a row with a bad target has the lse of nothing
# case: forward_backward f32 auto: lengths
s/const bool read = given ? y >= 0 : y != -1;/const bool read = y >= 0;/
