# file: cross_entropy.cuh - backward takes the first class weight of a vector for all
# case: backward f32: central differences
s/fall \*= a.class_weight\[col + j\];/fall *= a.class_weight[col];/
