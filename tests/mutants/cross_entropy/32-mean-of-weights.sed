# file: cross_entropy.cuh - the mean of z-loss is divided by the weights too
# case: forward_backward f32: central differences
s/s.z = __fdiv_rn(s.z, valid);/s.z = __fdiv_rn(s.z, over);/
