# file: md_lrpe_cosine.cuh - lanes without a vector leave out the softmax of their warp
s/if (!ACT \&\& !at.owner) return;/if (!at.owner) return;/
