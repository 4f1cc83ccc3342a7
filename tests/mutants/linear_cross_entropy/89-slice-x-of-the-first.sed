# file: linear_cross_entropy.cuh - where rows are compacted, every slice of logits is that of the first
# case: options backward auto
s/(const T \*)w.x + lk_lce_in_chunk(r, q) \* w.x_stride/(const T *)w.x/
