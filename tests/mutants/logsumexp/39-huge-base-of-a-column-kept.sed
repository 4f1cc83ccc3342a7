# file: logsumexp.cuh - columns: a base whose rounding 2^x cannot make up for is kept
# case: forward f32 column: huge values
s/!(fabsf(base\[j\]) < LK_LSE_BASE)/!lk_is_finite(base[j])/
