# file: linear_cross_entropy.cuh - fused, sums of bf16 dweight are rounded to bf16 after every chunk
# case: sums of 24 bits
s/return low > 127 ? 127 : low;/return 0 * low;/
