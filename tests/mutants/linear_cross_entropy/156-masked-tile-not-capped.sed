# file: linear_cross_entropy.cuh - a tile whose columns are all masked has a maximum of -inf under a softcap, too
# case: masked tiles forward_backward fused
s/if (!plain \&\& a.softcap > 0.0f) max = lk_ce_cap/if (!plain \&\& a.softcap > 0.0f \&\& max > -INFINITY) max = lk_ce_cap/
