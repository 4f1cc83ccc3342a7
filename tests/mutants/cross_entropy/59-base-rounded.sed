# file: cross_entropy.cuh - forward_backward: what base was rounded by stays in p
s/lk_ex2((g.base - base) - fmaf(rate, all.max, -base))/lk_ex2(g.base - base)/
