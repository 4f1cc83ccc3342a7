# file: linear_cross_entropy.cuh - the warps' tallies are read before they are written
s/__syncthreads(); .. orders the warps' tallies before their reads .*/;/
