# file: srms_norm.cuh - rows with a rest behind their vectors go through the kernel that holds all of a row
# case: backward f32 warp: special values
s/ && a->cols % N == 0 && l->p\.stretch/ \&\& l->p.stretch/
