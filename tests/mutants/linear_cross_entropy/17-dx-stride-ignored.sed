# file: linear_cross_entropy.cuh - dx is written as if packed
# case: options backward auto
s/r->p.c.compact ? w.x_stride : a.dx_stride;/r->p.c.compact ? w.x_stride : a.hidden;/
