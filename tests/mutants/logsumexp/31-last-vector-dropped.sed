# file: lk_base.cuh - a thread leaves out its last vector
# case: lk_lse: two slices
s/(rank < over)/(rank + 1 < over)/
