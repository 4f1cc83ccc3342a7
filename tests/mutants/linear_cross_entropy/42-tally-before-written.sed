# file: linear_cross_entropy.cuh - the warps' tallies are read before they are written
# case: forward, backward and forward_backward f32
s/__syncthreads(); .. orders the warps' tallies before their reads .*/;/
