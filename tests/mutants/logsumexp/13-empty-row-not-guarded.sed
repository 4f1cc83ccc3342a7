# file: logsumexp.cuh - the gradient of a row of -inf is NaN
# case: backward f32 auto: special values
s/row.lse == -INFINITY ? -INFINITY : -row.lse/-row.lse/
