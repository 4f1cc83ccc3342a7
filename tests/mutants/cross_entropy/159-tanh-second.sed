# file: cross_entropy.cuh - the second coefficient of tanh, off by 2.5e-5
# case: lk_ce_tanh
s/0.133325321f/0.133350321f/
