# file: linear_cross_entropy.cuh - panels: the gradient of lse^2 is lse
s/2.0f \* a.z_loss \* lse \* f/a.z_loss * lse * f/
