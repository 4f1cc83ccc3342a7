# file: linear_cross_entropy.cuh - a workspace at an odd multiple of 128 ends too early
# case: switches alone
s/w.bytes = used + 256;/w.bytes = used;/
