# file: cross_entropy.cuh - the first warp merges states that the others have yet to write
# case: forward, then backward f32
/lk_ce_collect(State s)/,/^}/ s/__syncthreads();/;/
