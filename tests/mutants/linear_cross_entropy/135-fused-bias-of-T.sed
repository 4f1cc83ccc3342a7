# file: linear_cross_entropy.cuh - fast logits, fused: the bias is of T where floats are read
s/^    if (plan.path == LK_LINEAR_CROSS_ENTROPY_FUSED) r.p.c.logits_type = .*//
