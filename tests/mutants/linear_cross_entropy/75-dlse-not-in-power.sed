# file: linear_cross_entropy.cuh - f16: dZ overflows under a large dlse
# case: options backward chunks
s/lk_lce_exponent(fmaxf(most \* fabsf(common), s.dlse));/lk_lce_exponent(most * fabsf(common));/
