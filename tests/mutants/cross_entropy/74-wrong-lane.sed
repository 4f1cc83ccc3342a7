# file: cross_entropy.cuh - the target's logit is taken from the first lane of its team
s/ \& ~(team - 1)) + source)/ \& ~(team - 1)))/
