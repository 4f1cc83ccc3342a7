# file: logsumexp.cuh - a share whose sum left the range of floats is kept
s/lk_is_finite(base) \&\& sum < LK_LOGSUMEXP_LIMIT \&\& //
