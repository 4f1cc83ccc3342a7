# file: linear_cross_entropy.cuh - panels: the gradient lacks softcap's derivative
# case: backward f32: central differences
s/x\[j\] = z \* slope;/x[j] = z;/
