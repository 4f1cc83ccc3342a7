# file: logsumexp.cuh - the gradient lacks the factor scale
# case: backward f32 auto: scales
s/row.scale \* row.dlse \* lk_ex2/row.dlse * lk_ex2/
