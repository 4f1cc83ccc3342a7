# file: srms_norm.cuh - a NULL upstream gradient counts as 0
# case: backward f32 auto: options
s/dy\[j\] = 1\.0f;/dy[j] = 0.0f;/
