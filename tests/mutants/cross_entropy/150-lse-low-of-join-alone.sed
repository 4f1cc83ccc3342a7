# file: cross_entropy.cuh - lse_low without what the product with scale was rounded by
# case: around 1e4
s/rounded + ((joined - (r.lse - added)) + (missed - added))/rounded/
