# file: linear_cross_entropy.cuh - every slice gets the upstream of the chunk's first
# case: options backward chunks
s/b->upstream = r->p.w.factor + q.first_row,/b->upstream = r->p.w.factor + q.first_row - lk_lce_in_chunk(r, q),/
