# file: cross_entropy.cuh - the target is subtracted from the maximum after both were scaled and rounded
# case: lk_ce_row: two slices, nothing
s/o.scale \* (s.max - s.target);/o.scale * s.max - o.scale * s.target;/
