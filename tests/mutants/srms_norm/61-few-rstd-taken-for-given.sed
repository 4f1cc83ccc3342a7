# file: srms_norm.cuh - rstd is not computed for few rows
# case: backward f32 auto: few rows
/^    if (!p\.a\.rstd) rstd = lk_rsqrt/d
