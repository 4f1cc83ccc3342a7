# file: logsumexp.cuh - backward leaves out lse_low
# case: far values
s/a.lse_low ? a.lse_low\[at\] : 0.0f/0.0f/
