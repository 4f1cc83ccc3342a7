# file: srms_norm.cuh - x + residual is rounded to T
# case: forward f16 auto: lengths
/lk_srms_norm_load_s(/,/^}/ s/s\[j\] += r\[j\];/{ T rounded; lk_put(\&rounded, s[j] + r[j]); s[j] = lk_to_float(rounded); }/
