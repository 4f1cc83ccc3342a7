# file: srms_norm.cuh - residual_out is y for few rows
# case: forward f32 auto: few rows
/^        if (!BARE && p\.a\.residual_out) lk_srms_norm_store((R \*)/d
s/^        if (BARE || p\.a\.y) lk_srms_norm_store(.*/&\n        if (p.a.residual_out) lk_srms_norm_store((R *)p.a.residual_out + row * p.a.residual_out_stride + col, s);/
