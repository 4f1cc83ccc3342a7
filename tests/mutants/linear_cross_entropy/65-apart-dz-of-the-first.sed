# file: linear_cross_entropy.cuh - the last columns' dZ is that of the first
s/^    if (!rows_of_d) last.b = .*/    ;/
