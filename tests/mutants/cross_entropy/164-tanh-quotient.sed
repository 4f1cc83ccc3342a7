# file: cross_entropy.cuh - small arguments of tanh by the quotient, which cancels
# case: lk_ce_tanh
s/fabsf(u) < 0.4f ?/fabsf(u) < 0.1f ?/
