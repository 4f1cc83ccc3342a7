# file: cross_entropy.cuh - short rows: z-loss's gradient has an lse of 0
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/own = a.z_loss > 0.0f ? own \* lk_ce/own = a.z_loss < 0.0f ? own * lk_ce/
