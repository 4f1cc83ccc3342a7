# file: cross_entropy.cuh - the same in the terms of a reduced loss
# case: switches
s/label.counted \&\& !label.bad ? weight : 0.0f/label.counted ? weight : 0.0f/
