# file: linear_cross_entropy.cuh - fused, the second of two columns of f32 dweight lies behind an odd hidden
# case: forward_backward fused, rows with gaps
s/if (c + 1 < left) out\[1\] = alpha/out[1] = alpha/
