# file: linear_cross_entropy.cuh - panels: the gradient of lse^2 is lse
# case: forward, backward and forward_backward f32
s/2.0f \* a.z_loss \* lse \* f/a.z_loss * lse * f/
