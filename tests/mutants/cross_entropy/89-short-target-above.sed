# file: cross_entropy.cuh - short rows: the reference leaves out the target
s/reference = logit; \/\* and of/reference = -INFINITY; \/* of/
