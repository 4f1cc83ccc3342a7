# file: logsumexp.cuh - the query of backward refuses NULL tensors
# case: backward f32: errors
s/!query \&\& a->outer != 0 \&\& a->cols != 0/a->outer != 0 \&\& a->cols != 0/
