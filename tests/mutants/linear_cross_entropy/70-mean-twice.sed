# file: linear_cross_entropy.cuh - the mean's division is in alpha and in dZ
s/0.0f : apart ? factor : __fdiv_rn(factor, divisor);/0.0f : __fdiv_rn(factor, divisor);/
