# file: srms_norm.cuh - dweight lacks the elements that no thread holds
s/if (WEIGHT && p\.a\.dweight) partial\[col + j\] = sums\[j\];/if (false) partial[col + j] = sums[j];/
