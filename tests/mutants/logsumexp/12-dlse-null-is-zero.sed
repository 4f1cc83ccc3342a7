# file: logsumexp.cuh - a NULL upstream gradient counts as 0
# case: backward f32 auto: options
s/a.dlse ? a.scale \* a.dlse\[at\] : a.scale/a.dlse ? a.scale * a.dlse[at] : 0.0f/
