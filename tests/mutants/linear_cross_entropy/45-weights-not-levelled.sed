# file: linear_cross_entropy.cuh - panels: the sum of class weights lacks what each of them got
# case: backward f32: central differences
s/(w.class_weight ? rate : 1.0f);/1.0f;/
