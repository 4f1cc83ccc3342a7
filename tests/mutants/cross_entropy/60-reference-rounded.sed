# file: cross_entropy.cuh - forward_backward: what base was rounded by stays in the sum
s/lk_sum_warp(sum, team) \* lk_ex2(-fmaf(rate, reference, -base))/lk_sum_warp(sum, team)/
