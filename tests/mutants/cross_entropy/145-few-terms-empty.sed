# file: cross_entropy.cuh - the mean over few rows that are all ignored is 0 / 0, whatever was asked for
# case: forward f32: the terms of few rows
s/sum = empty ? nothing : __fdiv_rn/sum = __fdiv_rn/
