# file: cross_entropy.cuh - 16 bits in place: single elements are read when they are due
# case: backward f32 auto: switches
s/i == at.rank || !read ? single : lk_to_float/!read ? single : lk_to_float/
