# file: md_lrpe_cosine.cuh - ints count items beyond 2^31
s/p->items < 1 << 30 &&/p->items > 0 \&\&/
