# file: cross_entropy.cuh - backward: the target counts among the others
# case: forward, then backward f32
s/^            lk_put((T \*)slot + target, -INFINITY);/            ;/
