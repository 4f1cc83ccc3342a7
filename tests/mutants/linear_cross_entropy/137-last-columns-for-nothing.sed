# file: linear_cross_entropy.cuh - the last columns of kept logits cost nothing
# case: forward_backward: path 0 and the path by name
s/lk_lce_apart(c, c->a.vocab) ? 0.03 \* (double)c->rows : 0.0;/0.0;/
