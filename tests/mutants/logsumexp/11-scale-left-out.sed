# file: logsumexp.cuh - the gradient lacks the factor scale
# case: backward f32 auto: scales
s/a.dlse ? a.scale \* a.dlse\[at\] : a.scale/a.dlse ? a.dlse[at] : 1.0f/
