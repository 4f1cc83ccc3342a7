# file: linear_cross_entropy.cuh - dbias is the sum of the first share of rows
s/split < w.splits; split++) sum/split < 1; split++) sum/
