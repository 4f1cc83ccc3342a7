# file: md_lrpe_cosine.cuh - divisors are rounded down
# case: division by multiplication
s/(power + (uint64_t)size - 1)/power/
