# file: logsumexp.cuh - a dx whose elements overlap is accepted
s/^    if (!outer_outside \&\& !cols_outside)/    if (false \&\& !outer_outside \&\& !cols_outside)/
