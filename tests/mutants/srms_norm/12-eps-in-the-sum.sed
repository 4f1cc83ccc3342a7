# file: srms_norm.cuh - eps is added to the sum instead of the mean
s/fmaf(sum\[0\], p\.p\.inverse_cols, p\.a\.eps)/((sum[0] + p.a.eps) * p.p.inverse_cols)/
