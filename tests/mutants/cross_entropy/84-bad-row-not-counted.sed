# file: cross_entropy.cuh - a bad target does not count in a reduced loss
s/? weight : 0.0f, label.counted}/? weight : 0.0f, label.counted \&\& !label.bad}/
