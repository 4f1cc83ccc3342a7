# file: cross_entropy.cuh - short rows: what backward's base was rounded by is left out
/^    lk_cross_entropy_short_kernel(/,/^}/ s/unit = lk_ex2(fmaf(fmaf(scale, value, -up.lse), LK_LOG2E, -fmaf(rate, value, -base)));/unit = 1.0f;/
