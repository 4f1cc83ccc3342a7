# file: srms_norm.cuh - the sum over the teams takes their rows of the workspace to start alike
# case: backward f32 auto: odd rows
s/const int past = lk_srms_norm_past(p\.p, warp, p\.vec);.*/const int past = 0;/
