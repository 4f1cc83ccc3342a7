# file: linear_cross_entropy.cuh - the last slice of a chunk is as long as the others
s/slice.rows = lk_lce_min(step, q.rows - from);/slice.rows = step;/
