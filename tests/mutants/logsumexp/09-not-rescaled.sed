# file: lk_base.cuh - the sum is not rescaled when the maximum grows
# case: lk_lse: values 0
/lk_lse lk_lse_add/,/^}/ s/s.sum \* lk_ex2(rate \* (s.max - reference))/s.sum/
