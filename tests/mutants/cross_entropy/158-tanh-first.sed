# file: cross_entropy.cuh - the first coefficient of tanh
# case: lk_ce_tanh
s/-0.333333293f/-0.333331293f/
