# file: cross_entropy.cuh - the target's logit is taken from the first lane of its team
# case: forward_backward f32 auto: empty
s/ \& ~(team - 1)) + source)/ \& ~(team - 1)))/
