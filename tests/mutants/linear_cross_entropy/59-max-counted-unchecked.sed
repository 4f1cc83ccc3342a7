# file: linear_cross_entropy.cuh - a negative max_counted is taken
# case: errors forward f32
s/if (!status) status = lk_lce_check_range(op, "max_counted".*/;/
