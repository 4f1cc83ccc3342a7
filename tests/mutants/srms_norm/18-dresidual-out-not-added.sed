# file: srms_norm.cuh - the gradient that reaches residual_out is left out
/lk_srms_norm_backward_put(/,/^}/ s/dr\[j\])/0.0f)/
