# file: cross_entropy.cuh - forward_backward: a row with a bad target has the lse of nothing
s/const bool read = given ? label.y >= 0 : label.counted;/const bool read = label.y >= 0;/
