# file: lk_block.cuh - two blocks of a cluster write one slot
# case: forward f32 auto: vocabulary
s/&inbox->word\[rank \* WARPS + warp\]/\&inbox->word[(rank > 1 ? rank - 1 : rank) * WARPS + warp]/
