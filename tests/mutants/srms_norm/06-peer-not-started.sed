# file: lk_block.cuh - peers write into a block that may not run yet
# case: forward f32 cluster: lengths
/void lk_cluster_begin/,/^}/ s/if (lk_cluster_nctarank() > 1) .*/;/
/void lk_cluster_ready/,/^}/ s/if (lk_cluster_nctarank() > 1) .*/;/
