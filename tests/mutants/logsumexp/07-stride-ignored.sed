# file: logsumexp.cuh - the warp path takes rows for packed
s/(const T \*)p.a.x + row \* p.a.outer_stride/(const T *)p.a.x + row * p.a.cols/
