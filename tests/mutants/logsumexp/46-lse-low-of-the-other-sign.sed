# file: logsumexp.cuh - backward takes lse_low for the opposite
# case: far values
s/-LK_LOG2E \* row.lse_low/LK_LOG2E * row.lse_low/
