# file: srms_norm.cuh - the gradient that reaches residual_out is left out
/void lk_srms_norm_backward_put(/,/^}/ s/g\[j\] += s\[j\];/;/
