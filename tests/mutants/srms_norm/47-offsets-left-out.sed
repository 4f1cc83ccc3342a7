# file: srms_norm.cuh - rows at odd addresses go through the kernel for rows that start on 16 bytes
# case: backward f32 auto: options
s/l\.edges = p->offset || /l.edges = /
