# file: lk_base.cuh - a thread leaves out its last vector
s/(rank < over)/(rank + 1 < over)/
