# file: lk_block.cuh - two blocks of a cluster write one slot
s/&inbox\[rank \* WARPS + warp\]/\&inbox[(rank > 1 ? rank - 1 : rank) * WARPS + warp]/
