# file: linear_cross_entropy.cuh - every tile has the bias of the first
s|(const float \*)w.bias + col + own, left - own|(const float *)w.bias + own, left - own|
