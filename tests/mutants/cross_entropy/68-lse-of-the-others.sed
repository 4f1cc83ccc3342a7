# file: cross_entropy.cuh - forward_backward: z-loss's gradient has the lse of the others
# case: forward_backward f32: central differences
/^    lk_cross_entropy_gradient_kernel(/,/^}/ s/lse = lk_ce_row_finish<false>(all,/lse = lk_ce_row_finish<false>(rest,/
