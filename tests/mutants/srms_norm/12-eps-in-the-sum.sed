# file: srms_norm.cuh - eps is added to the sum instead of the mean
# case: forward f32 auto: lengths
s/fmaf(sum\[\([01]\)\], p\.p\.inverse_cols, p\.a\.eps)/((sum[\1] + p.a.eps) * p.p.inverse_cols)/
