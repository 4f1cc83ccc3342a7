# file: linear_cross_entropy.cuh - fused, sums of 24 bits are cuBLASLt's, as if f32
# case: switches alone forward_backward fused
s/return lk_lce_sums_dweight(c, chunk) || (chunk >= c->rows \&\& /return (chunk >= c->rows \&\& /
