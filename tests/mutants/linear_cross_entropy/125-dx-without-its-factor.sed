# file: linear_cross_entropy.cuh - fused, dx lacks the factor of its row
# case: accuracy bf16
s/lk_lce_pair(v \* (alpha \* two\[0\]), v \* (alpha \* two\[1\]))/lk_lce_pair(alpha * two[0], alpha * two[1])/
