# file: lk_block.cuh - a block reads its inbox before its peers have written
# case: forward f32 cluster: lengths
/void lk_sum_cluster/,/^}/ { /orders the writes into everybody/ { n
s/lk_barrier_cluster_wait();/;/
} }
