# file: lk_block.cuh - all blocks of a cluster write into one slot
# case: forward f32 cluster: lengths
/void lk_sum_cluster/,/^}/ s/(rank \* warps + warp) \* N/(0 * rank * warps + warp) * N/
