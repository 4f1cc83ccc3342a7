# file: cross_entropy.cuh - counted inside: warps of no row end before they have counted
# case: forward_backward f16 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/if (full \&\& !inside \&\& !there) return;/if (full \&\& !there) return;/
