# file: cross_entropy.cuh - backward: what base was rounded by stays in p
s/LK_LOG2E, -fmaf(rate, value, -\*base))/LK_LOG2E, 0.0f)/
