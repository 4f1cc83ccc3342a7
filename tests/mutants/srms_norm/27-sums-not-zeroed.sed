# file: srms_norm.cuh - the sums for dweight that are in the workspace start from what is there
# case: backward f32 auto: options
s/partial\[at\.begin + i\] = 0\.0f;/;/
