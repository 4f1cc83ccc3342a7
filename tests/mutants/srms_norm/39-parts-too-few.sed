# file: srms_norm.cuh - what is copied of an f32 tensor overlaps the next tensor's
# case: backward f16 auto: options
s/p->parts += N \/ vec;/p->parts++;/
