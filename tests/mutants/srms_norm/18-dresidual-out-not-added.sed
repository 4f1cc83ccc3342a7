# file: srms_norm.cuh - the gradient that reaches residual_out is left out
# case: backward f32 auto: lengths
/void lk_srms_norm_backward_put(/,/^}/ s/g\[j\] += s\[j\];/;/
