# file: md_lrpe_cosine.cuh - dtheta is overwritten
s/p.accumulate ? p.dtheta\[at\] + part\[side\] : part\[side\]/part[side]/
