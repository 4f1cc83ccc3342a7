# file: linear_cross_entropy.cuh - logits are put into a dweight that has gaps between its rows
# case: corners backward auto
s/ || a.dweight_stride != a.hidden || / || /
