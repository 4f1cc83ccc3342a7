# file: linear_cross_entropy.cuh - the class weight of the target is not in the gradient
s|rest = f \* (class_weight ? class_weight\[y\] : 1.0f);|rest = f;|
