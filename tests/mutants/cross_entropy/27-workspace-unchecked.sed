# file: cross_entropy.cuh - a workspace that is too small is accepted
s/ \&\& given >= bytes))/))/
