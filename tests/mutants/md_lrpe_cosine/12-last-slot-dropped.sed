# file: md_lrpe_cosine.cuh - the sums of the last slot are left out
# case: backward f32 auto: axes
s/slot < p.slots; slot += LK_LRPE_SHARERS/slot + 1 < p.slots; slot += LK_LRPE_SHARERS/
