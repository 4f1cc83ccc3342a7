# file: cross_entropy.cuh - a misaligned dlogits is accepted
/check_aligned(op, "dlogits"/d
