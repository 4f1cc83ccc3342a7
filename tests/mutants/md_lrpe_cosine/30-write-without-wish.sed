# file: md_lrpe_cosine.cuh - dx is written where it is not wanted
s/(!DTHETA || p.write_dx) \&\& //
