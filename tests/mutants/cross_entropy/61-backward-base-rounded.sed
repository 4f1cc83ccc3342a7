# file: cross_entropy.cuh - backward: what base was rounded by stays in p
# case: backward f32 auto: special values
s/LK_LOG2E, -fmaf(\*rate, value, -\*base))/LK_LOG2E, 0.0f)/
