# file: linear_cross_entropy.cuh - panels: the target's own weight stays in its smoothing
s/fall \* (weights - weight))/fall * weights)/
