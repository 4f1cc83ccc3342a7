# file: srms_norm.cuh - eps is never less than 1e-30
# case: f32 auto: limits of squares
s/lk_rsqrt(fmaf(sum\[0\], p\.p\.inverse_cols, p\.a\.eps))/lk_rsqrt(fmaf(sum[0], p.p.inverse_cols, fmaxf(p.a.eps, 1e-30f)))/
