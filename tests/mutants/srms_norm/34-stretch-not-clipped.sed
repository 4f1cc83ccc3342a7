# file: srms_norm.cuh - every warp takes its vectors up to the row's end, its neighbours' too
# case: forward f32 auto: lengths
s/stop = min(split\.vecs, at\.stop);/stop = split.vecs;/
