# file: cross_entropy.cuh - forward_backward: what base was rounded by stays in p
# case: forward_backward f32 auto: long rows
s/lk_ex2(-lost - fmaf(rate, s.max, -product))/lk_ex2(-lost)/
