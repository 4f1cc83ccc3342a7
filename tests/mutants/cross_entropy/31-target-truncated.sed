# file: cross_entropy.cuh - targets are looked at in 32 bits
# case: forward, then backward f32
s/const int64_t y = a.target_dtype == LK_TARGET_INT32 ?/const int64_t y = (int32_t)(a.target_dtype == LK_TARGET_INT32 ?/;s/((const int64_t \*)a.target)\[row\];/((const int64_t *)a.target)[row]);/
