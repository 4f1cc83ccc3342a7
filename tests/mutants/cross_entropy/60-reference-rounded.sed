# file: cross_entropy.cuh - forward_backward: what base was rounded by stays in the sum
# case: forward_backward f32 warp: long rows
s/lk_sum_warp(sum, team) \* lk_ex2(-fmaf(rate, reference, -base))/lk_sum_warp(sum, team)/
