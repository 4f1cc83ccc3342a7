# file: cross_entropy.cuh - backward takes the first class weight of a vector for all
s/fall \*= a.class_weight\[col + j\];/fall *= a.class_weight[col];/
