# file: srms_norm.cuh - rows with a rest behind their vectors go through the kernel for rows without
# case: backward f32 warp: odd rows
s/ || l->p\.offset_step || a->cols % N;/ || l->p.offset_step;/
