# file: linear_cross_entropy.cuh - panels: smoothing takes the class weights of the first panel
# case: backward f32: central differences
s/class_weight\[q.first_col + at + j\] : 1.0f));/class_weight[at + j] : 1.0f));/
