# file: srms_norm.cuh - a quarter of the shares of dweight is left out
# case: backward f32 auto: many rows
s/ + (quarter\[2\] + quarter\[3\])/ + quarter[2]/
