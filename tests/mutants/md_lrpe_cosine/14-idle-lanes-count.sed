# file: md_lrpe_cosine.cuh - lanes that only fill up a team add to the softmax of its row
s/owner ? lk_lse_add(lk_lse_empty(), x) : lk_lse_empty();/(void(owner), lk_lse_add(lk_lse_empty(), x));/
