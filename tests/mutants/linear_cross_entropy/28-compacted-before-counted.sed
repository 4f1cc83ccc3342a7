# file: linear_cross_entropy.cuh - a warp's count is read before it is written
s/__syncthreads(); .. orders the counts before their reads .*/;/
