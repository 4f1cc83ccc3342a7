# file: cross_entropy.cuh - two blocks of a cluster write one slot
# case: forward, then backward f16
s/&inbox\[rank \* WARPS + warp\]/\&inbox[(rank > 0 ? rank - 1 : rank) * WARPS + warp]/
