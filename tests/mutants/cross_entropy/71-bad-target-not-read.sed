# file: cross_entropy.cuh - forward_backward: a row with a bad target has the lse of nothing
s/const bool read = given ? y >= 0 : y != -1;/const bool read = y >= 0;/
