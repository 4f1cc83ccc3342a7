# file: lk_block.cuh - the sums of a cluster are those of its first block
# case: forward f32 cluster: lengths
/void lk_sum_cluster/,/^}/ s/count = blocks \* warps;/count = warps;/
