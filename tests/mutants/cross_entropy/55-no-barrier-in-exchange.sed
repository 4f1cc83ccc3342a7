# file: cross_entropy.cuh - states are read that the other warps have yet to write
/^LK_DEVICE lk_ce_row lk_ce_gathered(/,/^}/ s/else __syncthreads();/;/
