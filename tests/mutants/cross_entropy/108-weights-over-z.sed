# file: cross_entropy.cuh - the weights of the rows lie where their z-losses do
s/(z ? z : loss) + stride/loss + stride/
