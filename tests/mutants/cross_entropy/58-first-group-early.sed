# file: cross_entropy.cuh - backward uses the first group of copies before it has come
# case: forward, then backward f32
s/^        lk_cp_async_wait_group<1>();/        ;/
