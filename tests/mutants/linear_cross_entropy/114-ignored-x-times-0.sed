# file: linear_cross_entropy.cuh - x of ignored rows is multiplied by 0
s|x\[i\] = v != 0.0f ? v \* x\[i\] : 0.0f|x[i] = v * x[i]|; s|if (v != 0.0f) lk_lce_load8|lk_lce_load8|
