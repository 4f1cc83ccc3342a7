# file: srms_norm.cuh - backward computes rstd although it is given
s/if (!p\.a\.rstd) here\.rstd/here.rstd/
