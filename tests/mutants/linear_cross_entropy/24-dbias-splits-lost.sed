# file: linear_cross_entropy.cuh - dbias is the sum of the first share of rows
# case: backward: path 0 and the path by name
s/split < w.splits; split++) sum/split < 1; split++) sum/
