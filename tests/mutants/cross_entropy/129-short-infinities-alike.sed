# file: cross_entropy.cuh - short rows: warps whose largest logits are the same infinity make NaN of it
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/fminf(part\[i\].x - top, 0.0f)/(part[i].x - top)/
