# file: linear_cross_entropy.cuh - where the terms cancel the target has nothing
# case: far apart forward_backward fused
/fabsf(whole) < 0x1p-60f/d
