# file: srms_norm.cuh - the sums for dweight are read where they are not
s/sums\[team \* slots + lk_srms_norm_sum_at(p, col)\]/sums[team * slots + col]/
