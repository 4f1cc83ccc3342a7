# file: srms_norm.cuh - the mean of g h is that of dy h
/lk_srms_norm_backward_add(/,/^}/ s/lk_srms_norm_weigh<T>(.*/;/
