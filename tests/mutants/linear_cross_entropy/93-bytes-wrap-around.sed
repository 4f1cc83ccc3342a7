# file: linear_cross_entropy.cuh - more bytes than there are wrap around to a few
# case: plans of plans
s/\*used = bytes > most - \*used ? most : \*used + bytes;/*used += bytes, (void)most;/
