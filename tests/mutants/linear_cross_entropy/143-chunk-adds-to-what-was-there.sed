# file: linear_cross_entropy.cuh - fused, the first chunk adds to what was in dweight
# case: switches alone forward_backward fused
s/const bool add = !p.first || a.accumulate;/const bool add = true;/
