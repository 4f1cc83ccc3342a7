# file: md_lrpe_cosine.cuh - forward checks its options before its sizes
# case: forward f32: errors
s/^    lk_status status = lk_lrpe_check_shape(op, a, tokens);/    lk_status status = lk_lrpe_check_values<T>(op, a);\n    if (!status) status = lk_lrpe_check_shape(op, a, tokens);/
