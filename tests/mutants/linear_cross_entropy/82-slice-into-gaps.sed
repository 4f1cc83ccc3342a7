# file: linear_cross_entropy.cuh - logits are put into a dweight that has gaps between its rows
s/ || a.dweight_stride != a.hidden || / || /
