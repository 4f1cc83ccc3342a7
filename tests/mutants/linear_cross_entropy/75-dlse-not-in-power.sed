# file: linear_cross_entropy.cuh - f16: dZ overflows under a large dlse
s/lk_lce_exponent(fmaxf(most \* fabsf(common), s.dlse));/lk_lce_exponent(most * fabsf(common));/
