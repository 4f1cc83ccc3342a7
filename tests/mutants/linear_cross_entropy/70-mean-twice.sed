# file: linear_cross_entropy.cuh - the mean's division is in alpha and in dZ
# case: forward, backward and forward_backward f16
s/0.0f : apart ? factor : __fdiv_rn(factor, divisor);/0.0f : __fdiv_rn(factor, divisor);/
