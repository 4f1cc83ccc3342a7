# file: cross_entropy.cuh - forward_backward: the losses of rows lie where the count does
s/^    if (a.reduction == LK_REDUCTION_MEAN) workspace += LK_CROSS_ENTROPY_COUNTS;//
