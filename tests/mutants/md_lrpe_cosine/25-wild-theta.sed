# file: md_lrpe_cosine.cuh - a theta that is not finite passes for a number
s/turns->wild |= lk_is_finite/turns->wild |= true || lk_is_finite/
