# file: linear_cross_entropy.cuh - every tile has the bias of the first
# case: far apart forward fused
s|(const float \*)w.bias + col + own, left - own|(const float *)w.bias + own, left - own|
