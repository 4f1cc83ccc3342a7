# file: md_lrpe_cosine.cuh - divisors of 32 bits are rounded down
# case: forward f32 auto: empty
s/(uint32_t)lk_ceil_div((int64_t)1 << (31 + log2), size)/(uint32_t)(((int64_t)1 << (31 + log2)) \/ size)/
