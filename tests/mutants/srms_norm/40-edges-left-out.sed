# file: srms_norm.cuh - rows with a rest behind their vectors go through the kernel for rows without
# case: backward f32 warp: odd rows
s/ || p->offset_step || cols % N;/ || p->offset_step;/
