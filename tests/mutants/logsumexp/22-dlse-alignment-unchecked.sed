# file: logsumexp.cuh - a misaligned dlse is accepted
# case: backward f32: errors
/lk_check_aligned(op, "dlse"/d
