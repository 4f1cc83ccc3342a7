# file: linear_cross_entropy.cuh - fused, the sums of dx take the place of rows that are to come in dweight
# case: rounding alike bf16
s/const bool lent_dx = dx \&\& fused \&\& .*/const bool lent_dx = dx \&\& fused \&\& a.dweight;/
