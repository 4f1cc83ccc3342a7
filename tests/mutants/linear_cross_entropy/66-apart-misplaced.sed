# file: linear_cross_entropy.cuh - the last rows of dweight are written as if packed
# case: options backward panels
s/others \* (cols_of_d ? m->key.ldd : 1) \* bytes_out;/others * (cols_of_d ? r->p.c.a.hidden : 1) * bytes_out;/
