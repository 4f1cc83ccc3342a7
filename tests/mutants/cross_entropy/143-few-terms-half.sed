# file: cross_entropy.cuh - 4097 to 8192 rows' terms are added up by the block for half as many
# case: forward f32: the terms of few rows
s/if (alone \&\& a->rows <= 4096)/if (alone \&\& a->rows <= 8192)/
