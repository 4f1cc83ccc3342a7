# file: srms_norm.cuh - the sums for dweight of a thread's vectors go where its neighbours' are
# case: backward f32 auto: graph
s|partial + first + u \* 32 \* N;|partial + first + u * N;|
