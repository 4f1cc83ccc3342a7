# file: cross_entropy.cuh - the third coefficient of tanh, off by 1e-4
# case: lk_ce_tanh
s/-0.0537151214f/-0.0536151214f/
