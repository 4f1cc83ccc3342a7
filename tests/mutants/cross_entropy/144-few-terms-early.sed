# file: cross_entropy.cuh - the warps' sums of few rows are read before they are written
# case: forward f32: the terms of few rows
s/__syncthreads(); .. the warps' sums of few rows are written.*/;/
