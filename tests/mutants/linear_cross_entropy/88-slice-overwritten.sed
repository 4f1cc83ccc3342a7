# file: linear_cross_entropy.cuh - the next slice of logits is made before this one is read
# case: options backward auto
s/^\( *\)status = lk_lce_logits<T>(r, slice);/\1status = lk_lce_logits<T>(r, slice);\n\1lk_lce_panel next = q;\n\1next.first_row += from + step, next.rows = lk_lce_min(step, q.rows - from - step);\n\1if (next.rows > 0) lk_lce_logits<T>(r, next);/
