# file: linear_cross_entropy.cuh - every slice's lse is written over, and read from, that of the chunk's first
# case: options backward auto
s/f->lse = w.lse + q.first_row;/f->lse = w.lse + q.first_row - lk_lce_in_chunk(r, q);/
