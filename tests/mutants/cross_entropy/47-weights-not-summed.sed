# file: cross_entropy.cuh - backward takes the sum of the class weights for vocab
s/weights\[0\] += a.class_weight\[col\];/weights[0] += 1.0f;/
