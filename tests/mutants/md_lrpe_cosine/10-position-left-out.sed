# file: md_lrpe_cosine.cuh - dtheta lacks the factor s
s/(float)angles.s\[j\] \* (x\[j\]/(x[j]/
