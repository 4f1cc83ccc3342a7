# file: srms_norm.cuh - all of a thread's vectors get the first one's weights
# case: forward, then backward f32
s/(const T \*)p\.a\.weight + first + u \* 32 \* N/(const T *)p.a.weight + first/
