# file: linear_cross_entropy.cuh - f16: an upstream a token is lost below f16's range
# case: options backward auto
s/int e = sizes ? lk_lce_exponent(most) : p.power;/int e = sizes ? 0 : p.power;/
