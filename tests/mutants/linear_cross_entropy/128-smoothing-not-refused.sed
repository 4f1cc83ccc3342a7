# file: linear_cross_entropy.cuh - fused gradients are made with label smoothing, which they leave out
# case: plans of path 0
s/c->gradient \&\& a.label_smoothing > 0.0f) return/c->gradient \&\& a.label_smoothing > 2.0f) return/
