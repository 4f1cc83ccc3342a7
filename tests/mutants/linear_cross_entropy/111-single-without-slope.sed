# file: linear_cross_entropy.cuh - the target has no slope under a softcap
# case: switches alone forward_backward fused
s|? slope \* __fdiv_rn(fmaf(own, target|? __fdiv_rn(fmaf(own, target|
