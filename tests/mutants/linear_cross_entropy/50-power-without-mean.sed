# file: linear_cross_entropy.cuh - f16: the mean's division is lost below f16's range
s/if (mean \&\& over != 0.0f) most = __fdiv_rn(most, divisor);/;/
