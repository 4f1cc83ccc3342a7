# file: cross_entropy.cuh - short rows: backward's sum of the others is a lane's
s/lk_sum_warp(lk_ce_short_terms<T>(e, raw, rate, base), team)/lk_ce_short_terms<T>(e, raw, rate, base)/
