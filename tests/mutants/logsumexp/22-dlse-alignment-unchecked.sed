# file: logsumexp.cuh - a misaligned dlse is accepted
/lk_logsumexp_check_aligned(op, "dlse"/d
