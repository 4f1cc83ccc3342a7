# file: cross_entropy.cuh - a second thread of the row counts a bad target
# case: forward f32 auto: lengths
/^    lk_cross_entropy_forward_kernel(/,/^}/ s/^    if (rank == 0 && row < a.rows) {$/    if (rank == 1 \&\& row < a.rows \&\& a.bad_targets \&\& lk_ce_look_up(a, row).bad) atomicAdd(a.bad_targets, 1);\n&/
