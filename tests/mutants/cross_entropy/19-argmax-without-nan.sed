# file: cross_entropy.cuh - a NaN is the smallest logit
s/x != x ? INT32_MAX/x != x ? INT32_MIN/
