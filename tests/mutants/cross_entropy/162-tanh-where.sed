# file: cross_entropy.cuh - tanh's polynomial goes beyond what it fits
# case: lk_ce_tanh
s/fabsf(u) < 0.4f ?/fabsf(u) < 0.6f ?/
