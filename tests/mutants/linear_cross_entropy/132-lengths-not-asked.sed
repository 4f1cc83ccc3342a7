# file: linear_cross_entropy.cuh - path 0 takes the fused plan though lengths of kept logits are given
# case: plans of path 0
s/(a->path == LK_LINEAR_CROSS_ENTROPY_AUTO \&\& !lengths)/(a->path == LK_LINEAR_CROSS_ENTROPY_AUTO \&\& (true || lengths))/
