# file: lk_block.cuh - in a cluster, the lanes beyond a block's warps are not merged
# case: forward f32 auto: vocabulary
s/blocks > 1 ? 32 : WARPS/WARPS/
