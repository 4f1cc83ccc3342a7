# file: linear_cross_entropy.cuh - path 0 fails where the fused path is not for the call
s/^    if (only \&\& a->path)/    if (only)/
