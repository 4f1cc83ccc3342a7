# file: cross_entropy.cuh - short rows: the target's element is written before its vector
# case: backward f16: the target's gradient
/^    lk_cross_entropy_short_kernel(/,/^}/ {s/^    if (owner && y >= 0) lk_put(dlogits + y, single);/    ;/;s/^        lk_vec<T> packed;/        if (u == 0 \&\& owner \&\& y >= 0) lk_put(dlogits + y, single);\n&/}
