# file: cross_entropy.cuh - forward_backward: the sum of the class weights is without the target's
# case: forward_backward f32: central differences
s/w\[1\] = {a.label_smoothing > 0.0f ? up.weight : 1.0f};/w[1] = {0.0f};/
