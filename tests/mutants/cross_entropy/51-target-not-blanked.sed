# file: cross_entropy.cuh - forward_backward: the target counts among the others
# case: forward_backward f32: the target's gradient
/^LK_DEVICE lk_lse lk_ce_gather(/,/^}/ s/lk_put((T \*)slot + target, -INFINITY);/;/
