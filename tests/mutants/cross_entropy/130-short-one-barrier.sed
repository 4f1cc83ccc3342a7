# file: cross_entropy.cuh - short rows: all rows of a block meet at one barrier
# case: backward f32 auto: short rows
/^template <int W> LK_DEVICE void lk_ce_meet/,/^}/ s/lk_named_barrier_sync<[234]>/lk_named_barrier_sync<1>/
