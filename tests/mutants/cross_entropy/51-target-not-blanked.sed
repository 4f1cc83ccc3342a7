# file: cross_entropy.cuh - forward_backward: the target counts among the others
/^LK_DEVICE lk_lse lk_ce_gather(/,/^}/ s/lk_put((T \*)slot + target, -INFINITY);/;/
