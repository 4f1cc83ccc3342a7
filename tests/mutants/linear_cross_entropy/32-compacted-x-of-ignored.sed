# file: linear_cross_entropy.cuh - rows that no token needs read x of an ignored one
# case: forward_backward fused, many rows
s/if (from_row >= 0) lk_lce_load8(x, from + first);/lk_lce_load8(x, from + first);/
