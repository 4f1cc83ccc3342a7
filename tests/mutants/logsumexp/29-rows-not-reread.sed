# file: logsumexp.cuh - a share whose sum left the range of floats is kept
s/const bool fast = lk_is_finite(base) \&\& sum < LK_LOGSUMEXP_LIMIT;/const bool fast = true;/
