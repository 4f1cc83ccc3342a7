# file: lk_base.cuh - what max + k log 2 rounds off is left out
# case: lk_lse_log: powers of two
s/const float rest = low + fmaf(k,/const float rest = fmaf(k,/
