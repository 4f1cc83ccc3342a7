# file: cross_entropy.cuh - the weights of the rows lie where their z-losses do
# case: forward_backward f32: central differences
s/(z ? z : loss) + stride/loss + stride/
