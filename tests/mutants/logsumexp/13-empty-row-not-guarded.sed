# file: logsumexp.cuh - the gradient of a row of -inf is NaN
s/lse == -INFINITY ? INFINITY : lse/lse/
