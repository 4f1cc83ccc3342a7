# file: cross_entropy.cuh - the sum over all rows leaves out the last block's
s/if (first + u \* threads < to.parts) next/if (first + u * threads + 1 < to.parts) next/
