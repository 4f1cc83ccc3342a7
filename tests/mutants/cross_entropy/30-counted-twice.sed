# file: cross_entropy.cuh - every thread of a row counts a bad target
s/^    if (rank != 0 || row >= a.rows) return;$/    if (row >= a.rows) return;\n    if (rank != 0) { if (rank == 1 \&\& a.bad_targets \&\& lk_ce_look_up(a, row).bad) atomicAdd(a.bad_targets, 1); return; }/
