# file: cross_entropy.cuh - counted inside: a block waits for all words but one
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/PEERS \* WARPS \* 8);/PEERS * WARPS * 8 - 8);/
