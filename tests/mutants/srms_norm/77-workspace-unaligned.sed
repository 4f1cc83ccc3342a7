# file: srms_norm.cuh - a misaligned workspace is accepted
# case: backward f32: errors
s/lk_check_workspace(op, a->workspace,/lk_check_workspace(op, (void *)((uintptr_t)a->workspace \& ~(uintptr_t)127),/
