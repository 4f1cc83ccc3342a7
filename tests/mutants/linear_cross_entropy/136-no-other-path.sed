# file: linear_cross_entropy.cuh - path 0 fails where the fused path is not for the call
# case: errors forward f32
s/^    if (only \&\& a->path)/    if (only)/
