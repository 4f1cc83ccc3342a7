# file: cross_entropy.cuh - of the rows of a block the last is left out of the sum
s/for (int i = lane; i < rows; i += 32) s = lk_ce_sums_add/for (int i = lane; i < (rows > 1 ? rows - 1 : rows); i += 32) s = lk_ce_sums_add/
