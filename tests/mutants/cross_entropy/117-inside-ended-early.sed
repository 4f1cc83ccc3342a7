# file: cross_entropy.cuh - counted inside: warps of no row end without waiting for their peers' words
# case: forward_backward f16 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/^        lk_mbarrier_wait_parity_cluster(&mail->full, 0);/        if (full \&\& !there) return;\n&/
