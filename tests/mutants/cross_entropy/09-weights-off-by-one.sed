# file: cross_entropy.cuh - forward takes the class weight of the column before
# case: forward_backward f32: central differences
s/w\[j\] = a.class_weight\[col + j\];/w[j] = a.class_weight[col + j - (col + j > 0)];/
