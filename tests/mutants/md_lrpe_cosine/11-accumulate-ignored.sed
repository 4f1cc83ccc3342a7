# file: md_lrpe_cosine.cuh - dtheta is overwritten
# case: backward f32 auto: empty
s/p.accumulate ? p.dtheta\[at\] + part\[side\] : part\[side\]/part[side]/
