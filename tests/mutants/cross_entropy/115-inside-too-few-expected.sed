# file: cross_entropy.cuh - counted inside: a block waits for all words but one
/^    lk_cross_entropy_short_kernel(/,/^}/ s/PEERS \* WARPS \* 8);/PEERS * WARPS * 8 - 8);/
