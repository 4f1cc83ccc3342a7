# file: cross_entropy.cuh - queries want tensors
# case: forward
s/a->rows != 0 \&\& arch != LK_CROSS_ENTROPY_QUERY/a->rows != 0/
