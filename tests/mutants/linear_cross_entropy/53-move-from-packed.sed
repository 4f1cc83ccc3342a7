# file: linear_cross_entropy.cuh - rows are gathered as if packed
# case: switches alone forward fused
s/(from_row < 0 ? 0 : from_row) \* p.from_stride/(from_row < 0 ? 0 : from_row) * p.cols/
