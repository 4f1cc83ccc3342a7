# file: linear_cross_entropy.cuh - the last columns are multiplied with the weight of the first
# case: forward, backward and forward_backward f16
s/^    if (!cols_of_d) last.a = .*/    ;/
