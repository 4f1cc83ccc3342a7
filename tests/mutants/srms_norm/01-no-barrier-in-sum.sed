# file: lk_block.cuh - a block's warps read the inbox before all have written
/void lk_sum_cluster/,/^}/ s/__syncthreads(); .*/;/
