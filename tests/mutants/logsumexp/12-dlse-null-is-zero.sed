# file: logsumexp.cuh - a NULL upstream gradient counts as 0
# case: backward f32 auto: options
s/a.dlse ? a.dlse\[at\] : 1.0f/a.dlse ? a.dlse[at] : 0.0f/
