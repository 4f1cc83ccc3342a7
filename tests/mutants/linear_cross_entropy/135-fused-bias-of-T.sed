# file: linear_cross_entropy.cuh - fast logits, fused: the bias is of T where floats are read
# case: forward: path 0 and the path by name
s/^    if (plan.path == LK_LINEAR_CROSS_ENTROPY_FUSED) r.p.c.logits_type = .*//
