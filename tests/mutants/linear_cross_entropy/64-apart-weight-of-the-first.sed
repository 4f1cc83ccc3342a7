# file: linear_cross_entropy.cuh - the last columns are multiplied with the weight of the first
s/^    if (!cols_of_d) last.a = .*/    ;/
