# file: linear_cross_entropy.cuh - every slice's loss is written over that of the chunk's first
# case: options forward_backward auto
s/f->loss = r->p.w.loss + q.first_row;/f->loss = r->p.w.loss + q.first_row - lk_lce_in_chunk(r, q);/
