# file: cross_entropy.cuh - forward_backward: mean divides by 1
# case: forward_backward f32: central differences
s/const float valid = p.valid_rows/const float valid = p.valid_rows \&\& p.given/;s/over = a.class_weight ? \*p.weight_sum/over = a.class_weight \&\& p.given ? *p.weight_sum/
