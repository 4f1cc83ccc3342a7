# file: cross_entropy.cuh - the power of two of a sum takes the digits of what base was rounded by
# case: lk_ce_unit_of_sum
s/return lk_ex2(-lost - fmaf(rate, s.max, -product)) \* (__int_as_float(bits \& 0x7f800000) \* inverse);/return lk_ex2((power - lost) - fmaf(rate, s.max, -product)) * inverse;/
