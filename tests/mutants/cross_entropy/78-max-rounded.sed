# file: lk_base.cuh - what base was rounded by stays in a plain row's sum
# case: forward, then backward f16
s/lk_sum_warp(sum, team) \* lk_ex2(-fmaf(rate, reference, -base))/lk_sum_warp(sum, team)/
