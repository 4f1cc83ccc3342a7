# file: md_lrpe_cosine.cuh - divisors are rounded down
s/(power + (uint64_t)size - 1)/power/
