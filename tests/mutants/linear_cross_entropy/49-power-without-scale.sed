# file: linear_cross_entropy.cuh - f16: dZ overflows under a large logit_scale
# case: corners backward auto
s/r.p.power = 12 - (int)ceilf(log2f(a.logit_scale));/r.p.power = 12;/
