# file: cross_entropy.cuh - short rows: what forward_backward's base was rounded by is left out
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/missed = lk_ex2(-fmaf(rate, low, -base));/missed = 1.0f;/
