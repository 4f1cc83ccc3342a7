# file: cross_entropy.cuh - a bad target does not count in the mean
# case: forward, then backward f16
s/(unsigned)(every | (y\[u\] != ignored)) << u/(unsigned)((every | (y[u] != ignored)) \& (y[u] >= 0) \& (y[u] < a.vocab)) << u/
