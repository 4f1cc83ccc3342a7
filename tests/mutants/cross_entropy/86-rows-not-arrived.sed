# file: cross_entropy.cuh - the first warp of a block leaves the sums of all its rows
s/before, 0) != (int)blockDim.x \/ 32 - 1) return 0;/before, 0) != 0) return 0;/
