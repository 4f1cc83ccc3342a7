# file: cross_entropy.cuh - short rows: the terms that are taken again are against the base of before
s/reference = rest.max, base = rate \* lk_lse_reference(reference);/reference = rest.max;/
