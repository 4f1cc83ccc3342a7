# file: lk_block.cuh - peers store to a barrier whose init nothing has published
/void lk_lse_cluster_begin/,/^}/ { /lk_fence_mbarrier_init/d
}
