# file: cross_entropy.cuh - a sum is not rescaled when the maximum grows
s/^    s.sum \*= factor;/    s.sum *= s.sum > 0.0f ? 1.0f : factor;/
