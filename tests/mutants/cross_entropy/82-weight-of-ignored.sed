# file: cross_entropy.cuh - an ignored row counts in the sum of the weights
# case: forward f32 auto: empty
s/label.counted \&\& !label.bad ? weight : 0.0f/!label.bad ? weight : 0.0f/
