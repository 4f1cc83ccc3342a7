# file: srms_norm.cuh - dresidual is written with the stride of dx
# case: backward f32 auto: places
s/at\.row \* p\.a\.dresidual_stride/at.row * p.a.dx_stride/
