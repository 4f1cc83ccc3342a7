# file: cross_entropy.cuh - an ignored row is given results as if it were empty
# case: forward, then backward f32
s/if (label.counted) r = lk_ce_row_finish/r = lk_ce_row_finish/
