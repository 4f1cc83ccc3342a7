# file: cross_entropy.cuh - a bad target does not count in the mean
s/count += label.counted;/count += label.counted \&\& !label.bad;/
