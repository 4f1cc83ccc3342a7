# file: cross_entropy.cuh - values are checked before sizes
# case: forward f32: errors
s/^    if (!status) status = lk_cross_entropy_check_sizes(op, a);/    if (!status) status = lk_cross_entropy_check_values(op, a);\n&/
