# file: md_lrpe_cosine.cuh - dx is written where it is not wanted
# case: backward f32 auto: outputs
s/if (mine && (!sums || p.write_dx))/if (mine)/
