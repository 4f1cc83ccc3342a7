# file: srms_norm.cuh - y is written with the stride of x
s/row \* p\.a\.y_stride/row * p.p.x.stride/
