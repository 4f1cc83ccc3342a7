# file: srms_norm.cuh - a row that is longer than a block's threads hold goes to the kernel that holds all of it
# case: backward f32 block: long rows
s/ \&\& l->p.stretch <= 32 \* vecs \&\&$/ \&\&/
