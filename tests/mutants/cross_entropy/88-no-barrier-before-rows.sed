# file: cross_entropy.cuh - forward adds up the rows of a block before all are there
s/^    __syncthreads(); \/\* orders the rows' terms before their sum \*\//    ;/
