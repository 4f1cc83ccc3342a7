# file: cross_entropy.cuh - short rows: each lane's reference is its own
# case: forward_backward f32 auto: lengths
/^    lk_cross_entropy_short_kernel(/,/^}/ s/if (offset < team) top = .*/;/
