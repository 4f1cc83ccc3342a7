# file: cross_entropy.cuh - 16 bits in place: gradients are written before all threads of the row have its logits
# case: backward f32 auto: switches
s/^        lk_ce_sync(team); \/\* the logits.*/        ;/
