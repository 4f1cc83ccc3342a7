# file: srms_norm.cuh - rows with a rest behind their vectors go through the kernel that holds all of a row
s/ && a->cols % N == 0 && l->p\.stretch/ \&\& l->p.stretch/
