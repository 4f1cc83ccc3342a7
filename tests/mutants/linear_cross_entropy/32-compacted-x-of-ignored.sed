# file: linear_cross_entropy.cuh - rows that no token needs read x of an ignored one
s/if (from_row >= 0) lk_lce_load8(x, from + first);/lk_lce_load8(x, from + first);/
