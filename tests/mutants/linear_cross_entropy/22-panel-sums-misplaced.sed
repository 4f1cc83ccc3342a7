# file: linear_cross_entropy.cuh - the sums of one panel of dweight lie where those of all would
# case: forward, backward and forward_backward f16
s/const int64_t panel_row = .*/const int64_t panel_row = q.first_col;/
