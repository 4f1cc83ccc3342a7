# file: linear_cross_entropy.cuh - dbias is a sum of exponentials
# case: rounding alike bf16
s|w.scale ? w.scale\[row\] : 1.0f|1.0f|
