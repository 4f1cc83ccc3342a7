# file: linear_cross_entropy.cuh - tiles with references of their own stay as they are
# case: far apart forward_backward fused
s|from > -INFINITY ? rise \* lk_ex2(rate \* (from - base)) : 1.0f|1.0f|
