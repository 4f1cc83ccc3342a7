# file: cross_entropy.cuh - an ignored row is multiplied by its upstream
# case: backward f32 auto: empty
s/^    if (owner) aside->y = y/    if (y == -1 \&\& row < a.rows \&\& a.upstream) g.rise = 0.0f * a.upstream[a.upstream_per_row ? row : 0];\n&/
