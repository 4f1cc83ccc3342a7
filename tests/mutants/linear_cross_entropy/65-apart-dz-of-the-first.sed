# file: linear_cross_entropy.cuh - the last columns' dZ is that of the first
# case: forward, backward and forward_backward f16
s/^    if (!rows_of_d) last.b = .*/    ;/
