# file: cross_entropy.cuh - counted inside: ignore_index counts where it is switched off
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/const bool every = !a.use_ignore_index || /const bool every = /
