# file: cross_entropy.cuh - argmax takes the last of equals
# case: lk_ce_row: two slices, -inf
s/(uint64_t)(0x7fffffff - col)/(uint64_t)col/;s/: 0x7fffffff - (int64_t)(uint32_t)s.top/: (int64_t)(uint32_t)s.top/
