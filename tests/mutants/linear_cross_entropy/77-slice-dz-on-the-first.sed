# file: linear_cross_entropy.cuh - dZ of every slice lies where that of the first does
# case: options backward auto
s/b->dlogits = (char \*)w.logits + lk_lce_in_chunk(r, q) .*/;/
