# file: md_lrpe_cosine.cuh - softmax takes the maximum of a lane for that of its row
# case: forward f32 auto: dims
s/if (offset < team) max = fmaxf/if (offset < 0) max = fmaxf/
