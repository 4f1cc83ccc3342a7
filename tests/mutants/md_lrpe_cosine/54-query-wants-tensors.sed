# file: md_lrpe_cosine.cuh - the query of backward refuses NULL tensors
# case: queries without tensors
/lk_lrpe_backward_check(/,/^}/ s/!query \&\& lk_lrpe_has_tokens(a)/lk_lrpe_has_tokens(a)/
