# file: linear_cross_entropy.cuh - fused, one chunk of bf16 dweight replaces what it should be added to
# case: switches alone forward_backward fused
s/const bool add = !p.first || a.accumulate;/const bool add = !p.first;/
