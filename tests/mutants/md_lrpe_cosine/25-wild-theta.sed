# file: md_lrpe_cosine.cuh - a theta that is not finite passes for a number
# case: forward f32 row: positions and thetas
s/turns->wild |= lk_is_finite/turns->wild |= true || lk_is_finite/
