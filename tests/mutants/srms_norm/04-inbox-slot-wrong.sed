# file: lk_block.cuh - all blocks of a cluster write into one slot
/void lk_sum_cluster/,/^}/ s/(rank \* warps + warp) \* N/(0 * rank * warps + warp) * N/
