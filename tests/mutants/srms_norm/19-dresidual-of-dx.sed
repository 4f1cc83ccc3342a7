# file: srms_norm.cuh - dresidual is computed from the rounded dx
/lk_srms_norm_backward_put(/,/^}/ s/^    if (p\.a\.dresidual) /    for (int j = 0; j < N; j++) { T rounded; lk_put(\&rounded, dy[j]); dy[j] = lk_to_float(rounded); }\n&/
