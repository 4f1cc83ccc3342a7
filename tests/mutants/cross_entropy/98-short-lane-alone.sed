# file: cross_entropy.cuh - short rows: a row's sum of the others is a lane's
# case: backward f16: the target's gradient
/^    lk_cross_entropy_short_kernel(/,/^}/ s/lk_sum_warp(sum, team) \* missed/sum * missed/
