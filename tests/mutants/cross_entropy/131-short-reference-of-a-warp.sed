# file: cross_entropy.cuh - short rows: the target's exponential is against the reference of a warp
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/all.max = top, low = lk_lse_reference(top);/all.max = top;/
