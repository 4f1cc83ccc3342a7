# file: srms_norm.cuh - dweight lacks the single elements that a thread holds
# case: backward f32 auto: odd rows
s/if (single) partial\[single_col\] = single_sum;/;/
