# file: cross_entropy.cuh - counted inside: a block's share is left out
# case: forward_backward f32 auto: counted inside
/^    lk_cross_entropy_short_kernel(/,/^}/ s/^        counted = __reduce_add_sync(0xffffffffu, counted);/        counted = lk_cluster_ctarank() == 3 ? 0 : __reduce_add_sync(0xffffffffu, counted);/
