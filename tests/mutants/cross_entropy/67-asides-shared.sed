# file: cross_entropy.cuh - the rows of a block share one aside
# case: forward, then backward f32
s/(\&slots + p.slots \* threads) + (threadIdx.x >> p.team_log2);/(\&slots + p.slots * threads);/;s/= aside - (lk_tid_x() >> p.team_log2);/= aside;/
