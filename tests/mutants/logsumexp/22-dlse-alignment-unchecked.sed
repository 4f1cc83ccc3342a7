# file: logsumexp.cuh - a misaligned dlse is accepted
/lk_check_aligned(op, "dlse"/d
