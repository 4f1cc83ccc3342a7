# file: linear_cross_entropy.cuh - panels: the target's gradient has p - 1, not minus the sum of the others
# case: options backward panels twice
s/- rest \* w.others\[row\];/- rest * (1.0f - p);/
