# file: cross_entropy.cuh - the sum over all rows leaves out the last block of its cluster
# case: forward f32 auto: reduced
s/if (i < warps)$/if (i < (warps > WARPS ? warps - WARPS : warps))/
