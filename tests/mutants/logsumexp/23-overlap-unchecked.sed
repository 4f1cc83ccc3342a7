# file: logsumexp.cuh - a dx whose elements overlap is accepted
# case: backward f32: errors
s/^    if (!outer_outside \&\& !cols_outside)/    if (false \&\& !outer_outside \&\& !cols_outside)/
