# file: cross_entropy.cuh - lse_low without what max + log sum was rounded by
# case: around 1e4
s/rounded + ((joined - (r.lse - added)) + (missed - added))/(joined - (r.lse - added)) + (missed - added)/
