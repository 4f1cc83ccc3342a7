# file: md_lrpe_cosine.cuh - softmax backward of a long row sums the gradients of a piece
# case: backward f32 auto: dims
s/p.dim <= LK_LRPE_ROW_FEATURES ? lk_sum_warp(dot) : lk_lrpe_dot(p, x, dy, state, at.head, token)/lk_sum_warp(dot)/
