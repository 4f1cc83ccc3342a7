# file: cross_entropy.cuh - lse is made of exp(z) without the maximum
# case: lk_ce_row: two slices, nothing
/LK_DEVICE lk_ce_result lk_ce_row_finish/,/^}/ s/r.class_loss = o.weight \* (lk_is_finite(above) ? lk_lse_join(above, k, log) : above);/r.class_loss = o.weight * (r.lse - o.scale * s.target);/
