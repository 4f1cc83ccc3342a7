# file: linear_cross_entropy.cuh - a context that was destroyed is taken
s/^    c->magic = 0;/    ;/
