# file: cross_entropy.cuh - a mean is over no class weights
# case: forward_backward f32: central differences
s/if (weight) own.weight = lk_ce_add_up/if (weight \&\& p.rows < 0) own.weight = lk_ce_add_up/
