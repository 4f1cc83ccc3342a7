# file: md_lrpe_cosine.cuh - dtheta lacks the factor s
# case: backward f32 auto: axes
s/(float)angles.s\[j\] \* (x\[j\]/(x[j]/
