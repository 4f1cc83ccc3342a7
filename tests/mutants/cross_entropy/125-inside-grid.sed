# file: cross_entropy.cuh - counted inside: a cluster has as many blocks as have rows
# case: forward_backward f32 auto: short rows
s/lk_ceil_div(blocks, cluster) \* cluster, cluster, LK/blocks, (int)(blocks < cluster ? blocks : cluster), LK/
