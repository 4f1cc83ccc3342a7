# file: lk_block.cuh - peers store to a barrier whose init nothing has published
# case: forward f32 auto: vocabulary
/void lk_lse_cluster_begin/,/^}/ { /lk_fence_mbarrier_init/d
}
