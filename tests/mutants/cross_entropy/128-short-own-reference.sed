# file: cross_entropy.cuh - short rows: a warp's exponentials stay against its own reference
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ { /missed \*= lk_ex2/d; }
