# file: logsumexp.cuh - lse_rounded is truncated
# case: lk_lse: two slices
s/lk_put((T \*)a.lse_rounded + at, lse);/lk_put((T *)a.lse_rounded + at, __uint_as_float(__float_as_uint(lse) \& 0xffffe000u));/
