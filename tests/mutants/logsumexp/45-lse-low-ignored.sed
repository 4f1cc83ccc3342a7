# file: logsumexp.cuh - backward leaves out lse_low
# case: far values
s/a\.lse_low ? lk_exp(-a\.lse_low\[at\]) : 1\.0f/1.0f/
