# file: cross_entropy.cuh - gradients are written as if their rows were packed
# case: forward, then backward f32
s/lk_ce_row_of(p) \* a.dlogits_stride + aside->y/lk_ce_row_of(p) * a.vocab + aside->y/
