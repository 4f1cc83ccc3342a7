# file: srms_norm.cuh - dweight lacks the elements that no thread holds
# case: backward f32 auto: options
s/if (WEIGHT && p\.a\.dweight) partial\[col + j\] = sums\[j\];/if (false) partial[col + j] = sums[j];/
