# file: cross_entropy.cuh - forward_backward: the state of the row's last warp is left out
# case: forward_backward f32: the target's gradient
/^LK_DEVICE lk_ce_row lk_ce_gathered(/,/^}/ s/for (int i = lane; i < team \/ 32; i += 32)/for (int i = lane; i < team \/ 32 - 1; i += 32)/
