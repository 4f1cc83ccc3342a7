# file: srms_norm.cuh - in place, dresidual_out is read after dx was written
# case: backward f32 auto: lengths
/void lk_srms_norm_backward_put(/,/^}/ s/^    if (p\.p\.dr\.rows) {/    if (p.a.dx) lk_srms_norm_store((T *)p.a.dx + at.row * p.a.dx_stride + col, g);\n&/
