# file: srms_norm.cuh - the next row is copied where this row's elements are still read
# case: backward f32 auto: many rows
s/(~turn & 1) \* stage_size/(turn \& 1) * stage_size/
