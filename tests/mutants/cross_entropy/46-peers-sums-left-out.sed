# file: cross_entropy.cuh - the sum over all rows leaves out the last block of its cluster
s/if (i < warps)$/if (i < (warps > WARPS ? warps - WARPS : warps))/
