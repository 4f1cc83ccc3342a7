# file: linear_cross_entropy.cuh - x is read as if packed
# case: switches alone forward auto
s/m.key.ldb = lk_lce_x_stride(r), m.key.ldd = r->p.w.logits_stride;/m.key.ldb = a.hidden, m.key.ldd = r->p.w.logits_stride;/
