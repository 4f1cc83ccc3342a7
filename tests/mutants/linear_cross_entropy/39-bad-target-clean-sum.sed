# file: linear_cross_entropy.cuh - a bad target leaves the reduced loss finite
s/if (p.c.rows \&\& w.counts->bad) sums\[0\] = NAN;/;/
