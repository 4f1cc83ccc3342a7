# file: linear_cross_entropy.cuh - the last slice of a chunk is as long as the others
# case: options forward_backward auto
s/slice.rows = lk_lce_min(step, q.rows - from);/slice.rows = step;/
