# file: srms_norm.cuh - y is computed from the s that residual_out holds
# case: forward f16 auto: options
/lk_srms_norm_forward_put(/,/^}/ s/s\[j\] \*= rstd;/{ R rounded; lk_put(\&rounded, s[j]); s[j] = lk_to_float(rounded) * rstd; }/
