# file: md_lrpe_cosine.cuh - ints count items beyond 2^31
# case: places in large grids
s/p->items < 1 << 30 &&/p->items > 0 \&\&/
