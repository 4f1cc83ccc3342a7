# file: linear_cross_entropy.cuh - there is room for the samples of one chunk only
s/c->compact ? chunk : rows, sizeof \*w.sample/chunk, sizeof *w.sample/
