# file: srms_norm.cuh - the mean of g h is that of dy h
# case: backward f32 auto: lengths
/void lk_srms_norm_backward_sums(/,/^}/ {
s/lk_srms_norm_scale(g, weight);/;/
s/lk_srms_norm_weigh<T>(.*/;/
}
