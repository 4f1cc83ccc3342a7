# file: linear_cross_entropy.cuh - the last group of row tiles has as many as the others
# case: forward fused, many rows
s|const int wide = .*;|const int wide = LK_LCE_GROUP;|
