# file: cross_entropy.cuh - backward's gradient of the target has p - 1, not minus the sum of the others
# case: backward f32: the target's gradient
s/others = given ? others \* aside->unit : aside->others;/others = given ? 1.0f - aside->unit * lk_ex2(fmaf(g.rate, aside->logit, -g.base)) : aside->others;/
