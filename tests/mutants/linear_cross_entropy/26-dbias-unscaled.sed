# file: linear_cross_entropy.cuh - f16: dbias keeps the power of two of dZ
s/sum = fmaf(alpha, sum,/sum = fmaf(1.0f, sum,/
