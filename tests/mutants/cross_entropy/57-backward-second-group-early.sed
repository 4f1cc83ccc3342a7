# file: cross_entropy.cuh - backward uses the second group of copies before it has come
# case: forward, then backward f32
/^        for (; u < half; u++, out/,/^    }/ s/lk_cp_async_wait_group<0>();/;/
