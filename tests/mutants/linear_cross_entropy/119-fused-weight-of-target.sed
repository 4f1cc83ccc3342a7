# file: linear_cross_entropy.cuh - the class weight of the target is not in the gradient
# case: switches alone forward_backward fused
s|rest = f \* (class_weight ? class_weight\[y\] : 1.0f);|rest = f;|
