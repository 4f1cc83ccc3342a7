# file: md_lrpe_cosine.cuh - a walk takes a theta that is not finite for a number
# case: forward f32 auto: positions and thetas
s/walk->wild |= lk_is_finite/walk->wild |= true || lk_is_finite/
