# file: cross_entropy.cuh - forward_backward: where no row can be ignored a mean with class weights is over the rows
# case: forward_backward f32: central differences
s/const bool known = mean \&\& !any \&\& !a.class_weight;/const bool known = mean \&\& !any;/
