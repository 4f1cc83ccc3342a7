# file: logsumexp.cuh - the warp path takes rows for packed
# case: forward f32 auto: strides
s/(const T \*)p.a.x + row \* p.a.outer_stride/(const T *)p.a.x + row * p.a.cols/
