# file: cross_entropy.cuh - forward_backward: a sum of nothing is raised to a target at +inf twice
# case: forward_backward f32 auto: special values
s/all = lk_ce_row_add(rest, v, w, scale);/all = lk_ce_row_add(lk_ce_row_raise(rest, fmaxf(rest.max, logit), scale), v, w, scale);/
