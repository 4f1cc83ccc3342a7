# file: linear_cross_entropy.cuh - path 0 takes the fused plan though lengths of kept logits are given
s/(a->path == LK_LINEAR_CROSS_ENTROPY_AUTO \&\& !lengths)/(a->path == LK_LINEAR_CROSS_ENTROPY_AUTO \&\& (true || lengths))/
