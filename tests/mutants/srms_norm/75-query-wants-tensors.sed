# file: srms_norm.cuh - the query of backward refuses NULL tensors
# case: f32: queries without tensors
/lk_srms_norm_backward_check(/,/^}/ s/!query \&\& a->rows != 0/a->rows != 0/
