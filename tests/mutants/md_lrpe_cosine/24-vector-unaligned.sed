# file: md_lrpe_cosine.cuh - the vector path takes rows at any token stride
# case: forward f32: errors
s/(uint64_t)(batch_stride | head_stride | token_stride)/(uint64_t)(batch_stride | head_stride)/
