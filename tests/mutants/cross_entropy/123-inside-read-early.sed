# file: cross_entropy.cuh - counted inside: the words are read before they are there
# case: forward_backward f32 auto: short rows
/^    lk_cross_entropy_short_kernel(/,/^}/ s/^        lk_mbarrier_wait_parity_cluster(&mail->full, 0);//
