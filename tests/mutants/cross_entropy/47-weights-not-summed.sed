# file: cross_entropy.cuh - backward takes the sum of the class weights for vocab
# case: backward f32: central differences
s/ weights += a.class_weight\[col\];/ weights += 1.0f;/
