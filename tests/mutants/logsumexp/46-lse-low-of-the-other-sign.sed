# file: logsumexp.cuh - backward takes lse_low for the opposite
# case: far values
s/lk_exp(-a\.lse_low\[at\])/lk_exp(a.lse_low[at])/
