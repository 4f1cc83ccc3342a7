# file: srms_norm.cuh - a sum of squares that overflows counts as the largest float
# case: f32 auto: limits of squares
s/lk_rsqrt(fmaf(sum\[0\], p\.p\.inverse_cols, p\.a\.eps))/lk_rsqrt(fmaf(fminf(sum[0], 3.4e38f), p.p.inverse_cols, p.a.eps))/
