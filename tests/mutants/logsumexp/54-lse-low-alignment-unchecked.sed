# file: logsumexp.cuh - a misaligned lse_low is accepted
# case: forward f32: errors
/lk_check_aligned(op, "lse_low"/d
