# file: linear_cross_entropy.cuh - a bad target's loss is that of column 0
# case: switches alone forward auto
s/a.loss\[token\] = label.bad ? NAN : skip/a.loss[token] = skip/
