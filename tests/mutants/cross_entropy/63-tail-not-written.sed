# file: cross_entropy.cuh - gradients of vectors without a slot are not written
s/^        if (u < at.count) lk_ce_store(/        if (u < at.count \&\& u < p.slots) lk_ce_store(/
