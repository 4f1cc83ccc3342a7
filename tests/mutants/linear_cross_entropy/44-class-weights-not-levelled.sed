# file: linear_cross_entropy.cuh - class and z-loss terms are divided by different numbers
# case: backward f32: central differences
s/w.class_weight\[col\] = a.class_weight\[col\] \* rate;/w.class_weight[col] = a.class_weight[col];/
