# file: srms_norm.cuh - dresidual is computed from the rounded dx
# case: backward f16 auto: lengths
/void lk_srms_norm_backward_put(/,/^}/ s/^    if (p\.a\.dresidual) /    for (int j = 0; j < N; j++) { T rounded; lk_put(\&rounded, g[j]); g[j] = lk_to_float(rounded); }\n&/
