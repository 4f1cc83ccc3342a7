# file: linear_cross_entropy.cuh - dbias lacks what 16-bit dZ leaves to alpha
# case: rounding alike f16
s/sum = fmaf(counts.alpha, sum,/sum = fmaf(1.0f, sum,/
