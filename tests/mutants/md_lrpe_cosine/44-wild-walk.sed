# file: md_lrpe_cosine.cuh - a walk takes a theta that is not finite for a number
s/walk->wild |= lk_is_finite/walk->wild |= true || lk_is_finite/
