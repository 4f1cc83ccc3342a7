# file: srms_norm.cuh - long rows with a residual ask for more threads than a block has
# case: forward f32 auto: long rows
s/vecs <= 8192) most = 256;/vecs <= 8192) most = 2048;/
