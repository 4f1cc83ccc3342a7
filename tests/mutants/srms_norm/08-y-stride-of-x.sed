# file: srms_norm.cuh - y is written with the stride of x
# case: forward f32 auto: places
s/row \* p\.a\.y_stride/row * p.p.x.stride/
