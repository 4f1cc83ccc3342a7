# file: srms_norm.cuh - in place, a single element of dy is read again after dx was written
s/^ *lk_srms_norm_load_dy<T>(dy_one, p\.p, row, at\.begin + col);/if (p.a.dx) lk_put((T *)p.a.dx + row * p.a.dx_stride + at.begin + col, 0.0f);\n&/
