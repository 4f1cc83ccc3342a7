# file: linear_cross_entropy.cuh - a bad target leaves the reduced loss finite
# case: options forward auto
s/if (p.c.rows \&\& w.counts->bad) sums\[0\] = NAN;/;/
