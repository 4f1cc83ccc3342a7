# file: srms_norm.cuh - the teams' sums for dweight are read where they are not
s/lk_srms_norm_sum_at(p, col)\]/col]/
