# file: linear_cross_entropy.cuh - fused, dx is stored in groups of 8 whatever its stride
# case: switches alone forward_backward fused
s/p.wide_dx = (uintptr_t)a.dx % 16 == 0 .*/p.wide_dx = true;/
