# file: linear_cross_entropy.cuh - a row's state is that of its last panel
# case: forward, backward and forward_backward f32
s/s = lk_ce_row_merge(before, s, scale);/;/
