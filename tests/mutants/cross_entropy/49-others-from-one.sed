# file: cross_entropy.cuh - forward_backward's gradient of the target has p - 1, not minus the sum of the others
# case: forward_backward f32: the target's gradient
s/others = given ? others \* aside->unit : aside->others;/others = given ? others * aside->unit : 1.0f - aside->unit * lk_ex2(fmaf(g.rate, aside->logit, -g.base));/
