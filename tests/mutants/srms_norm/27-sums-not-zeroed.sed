# file: srms_norm.cuh - the sums of single elements for dweight start from what is in the workspace
# case: backward f32 auto: options
s/partial\[at\.begin + lk_srms_norm_edge<T>(split, i)\] = 0\.0f;/;/
