# file: cross_entropy.cuh - a workspace that is too small is accepted
# case: forward f32: errors
s/ \&\& given >= bytes))/))/
