# file: cross_entropy.cuh - states are read that the other warps have yet to write
# case: forward_backward f16: the target's gradient
/^LK_DEVICE lk_ce_row lk_ce_gathered(/,/^}/ s/else __syncthreads();/;/
