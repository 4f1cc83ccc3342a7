# file: lk_block.cuh - peers write into a block that may not run yet
/void lk_cluster_begin/,/^}/ s/if (lk_cluster_nctarank() > 1) .*/;/
/void lk_cluster_ready/,/^}/ s/if (lk_cluster_nctarank() > 1) .*/;/
