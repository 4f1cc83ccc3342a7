# file: cross_entropy.cuh - counted inside: nobody waits until the peers run
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/^        lk_barrier_cluster_wait();.*//
