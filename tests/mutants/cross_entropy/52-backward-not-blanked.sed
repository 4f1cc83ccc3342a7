# file: cross_entropy.cuh - backward: the target counts among the others
s/^            lk_put((T \*)slot + target, -INFINITY);/            ;/
