# file: logsumexp.cuh - the row paths write dx with the stride of x
# case: backward f32 auto: strides
s/(T \*)a.dx + at \* a.dx_outer_stride/(T *)a.dx + at * a.outer_stride/
