# file: cross_entropy.cuh - short rows: a warp takes the others' parts before they are written
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ { /lk_ce_meet<W>(warp/d; }
