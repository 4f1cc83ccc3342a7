# file: cross_entropy.cuh - forward takes the class weight of the column before
s/w\[j\] = a.class_weight\[col + j\];/w[j] = a.class_weight[col + j - (col + j > 0)];/
