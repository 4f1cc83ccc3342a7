# file: srms_norm.cuh - in place, a single element of dy is read again after dx was written
# case: backward f32 auto: lengths
/void lk_srms_norm_backward_put(/,/^}/ s/^    float s\[N\], g\[N\];/    if (N == 1 \&\& p.a.dx) lk_put((T *)p.a.dx + at.row * p.a.dx_stride + col, 0.0f);\n&/
