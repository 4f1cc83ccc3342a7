# file: linear_cross_entropy.cuh - fused, what sums have beyond bf16 is not written
# case: sums of 24 bits
s/if (!p.last) low\[block \* 256\]/if (false) low[block * 256]/
