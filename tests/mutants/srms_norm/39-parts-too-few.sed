# file: srms_norm.cuh - what is copied of an f32 tensor overlaps the next tensor's
s/p->parts += N \/ vec;/p->parts++;/
