# file: cross_entropy.cuh - the first warp merges states that the others have yet to write
/lk_ce_collect(State s)/,/^}/ s/__syncthreads();/;/
