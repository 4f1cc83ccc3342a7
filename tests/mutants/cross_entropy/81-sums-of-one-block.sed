# file: cross_entropy.cuh - the sum over all rows is that of 32 warps of a cluster
# case: forward f32 auto: reduced
s/if (i < warps)$/if (i < warps \&\& i < 32)/
