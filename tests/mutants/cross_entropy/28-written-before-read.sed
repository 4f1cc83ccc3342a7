# file: cross_entropy.cuh - 16 bits in place: a step does not wait for the reads of the others
# case: backward f32 warp: rows held in part
s/^        if (p.ordered) lk_ce_sync(at.team);.*/        ;/
