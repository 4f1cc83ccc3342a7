# file: cross_entropy.cuh - a bad target does not count in a reduced loss
# case: forward, then backward f32
s/= !label.counted ? __uint_as_float/= !label.counted || label.bad ? __uint_as_float/
