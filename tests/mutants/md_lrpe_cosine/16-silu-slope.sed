# file: md_lrpe_cosine.cuh - the gradient of silu is its first term
s/lk_lrpe_sigmoid(x\[j\]) \* fmaf(x\[j\], lk_lrpe_sigmoid(-x\[j\]), 1.0f);/lk_lrpe_sigmoid(x[j]);/
