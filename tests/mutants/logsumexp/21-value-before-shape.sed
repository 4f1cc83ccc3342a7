# file: logsumexp.cuh - forward checks its options before its sizes
# case: forward f32: errors
s/^    lk_status status = lk_logsumexp_check_sizes(op, a->outer, a->cols, a->inner);/    lk_status status = lk_logsumexp_check_options(op, a->scale, a->path, true, a->outer);\n    if (!status) status = lk_logsumexp_check_sizes(op, a->outer, a->cols, a->inner);/
