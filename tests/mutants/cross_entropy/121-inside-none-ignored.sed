# file: cross_entropy.cuh - counted inside: ignore_index counts where it is switched off
# case: forward_backward f32 auto: short rows
s/const bool any = a.use_ignore_index \&\& (/const bool any = (/
