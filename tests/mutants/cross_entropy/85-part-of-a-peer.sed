# file: cross_entropy.cuh - clusters leave their sums under the number of a block
s/\[blockIdx.x >> to.cluster_log2\] = s;/[blockIdx.x] = s;/
