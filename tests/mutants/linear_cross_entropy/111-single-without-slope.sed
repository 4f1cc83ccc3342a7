# file: linear_cross_entropy.cuh - the target has no slope under a softcap
s|? slope \* __fdiv_rn(fmaf(own, target|? __fdiv_rn(fmaf(own, target|
