# file: linear_cross_entropy.cuh - a bad target's loss is finite where rows are compacted
# case: options forward panels twice
s/a.loss\[token\] = lk_ce_look_up(a, token).bad ? NAN : w.loss\[row\];/a.loss[token] = w.loss[row];/
