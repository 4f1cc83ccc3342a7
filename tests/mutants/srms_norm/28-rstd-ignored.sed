# file: srms_norm.cuh - backward computes rstd although it is given
# case: backward f32 auto: lengths
s/if (!p\.a\.rstd) here\.rstd/here.rstd/
