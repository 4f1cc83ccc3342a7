# file: linear_cross_entropy.cuh - what a sum has beyond its bf16 wraps around
# case: sums of 24 bits
s/return low > 127 ? 127 : low;/return low;/
