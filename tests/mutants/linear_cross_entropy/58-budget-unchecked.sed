# file: linear_cross_entropy.cuh - a budget below the smallest is taken
s/^    if (budget < least)/    if (false)/
