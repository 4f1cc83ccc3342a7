# file: cross_entropy.cuh - short rows: z-loss's gradient has an lse of 0
/^    lk_cross_entropy_short_kernel(/,/^}/ s/if (a.z_loss > 0.0f) lse = /if (a.z_loss < 0.0f) lse = /
