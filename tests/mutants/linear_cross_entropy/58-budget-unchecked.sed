# file: linear_cross_entropy.cuh - a plan's budget below the smallest is taken
# case: errors of plans and contexts
s/^    if (budget < smallest \&\& !least)/    if (false \&\& !least)/
