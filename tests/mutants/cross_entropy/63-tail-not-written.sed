# file: cross_entropy.cuh - gradients of vectors without a slot are not written
# case: backward f32 warp: lengths
s/^        if (u < at.count) lk_ce_store(/        if (u < at.count \&\& u < p.slots) lk_ce_store(/
