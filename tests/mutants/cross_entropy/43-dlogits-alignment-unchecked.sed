# file: cross_entropy.cuh - a misaligned dlogits is accepted
# case: backward f32: errors
/check_aligned(op, "dlogits"/d
