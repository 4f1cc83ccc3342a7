# file: md_lrpe_cosine.cuh - lanes without a vector leave out the softmax of their warp
# case: backward f32 auto: dims
s/if (!ACT \&\& !at.owner) return;/if (!at.owner) return;/
