# file: cross_entropy.cuh - counted inside: the z-loss is not over the rows
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/if (a.z_loss > 0.0f) own = over/if (a.z_loss < 0.0f) own = over/
