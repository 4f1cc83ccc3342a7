# file: md_lrpe_cosine.cuh - dx is written where it is not wanted
s/if (mine && (!sums || p.write_dx))/if (mine)/
