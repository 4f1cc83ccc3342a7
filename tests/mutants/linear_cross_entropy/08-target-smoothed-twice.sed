# file: linear_cross_entropy.cuh - panels: the target's own weight stays in its smoothing
# case: forward, backward and forward_backward f32
s/fall \* (weights - weight))/fall * weights)/
