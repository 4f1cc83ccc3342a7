# file: linear_cross_entropy.cuh - panels: the gradient lacks softcap's derivative
s/x\[j\] = z \* slope;/x[j] = z;/
