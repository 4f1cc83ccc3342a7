# file: cross_entropy.cuh - the sum over all blocks is that of its first warp
s/for (unsigned i = 1; i < threads \/ 32; i++) s = lk_ce_sums_add/for (unsigned i = threads; i < threads \/ 32; i++) s = lk_ce_sums_add/
