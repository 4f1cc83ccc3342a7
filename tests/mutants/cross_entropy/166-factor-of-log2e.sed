# file: cross_entropy.cuh - what log2 e is rounded by stays in the factor
# case: lk_ce_factor
s/ + scale \* 1.925963e-8f;/;/
