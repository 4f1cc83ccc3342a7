# file: linear_cross_entropy.cuh - a bad target leaves the reduced loss finite
# case: options forward auto
s/if (counts.bad) sums\[0\] = NAN;/;/
