# file: cross_entropy.cuh - a reduced loss is without its z-loss
# case: forward, then backward f16
s/if (z) own.z = lk_ce_add_up/if (z \&\& p.rows < 0) own.z = lk_ce_add_up/
