# file: linear_cross_entropy.cuh - there is room for the samples of one chunk only
# case: forward_backward fused, many rows
s/c->compact ? chunk : rows, sizeof \*w.sample/chunk, sizeof *w.sample/
