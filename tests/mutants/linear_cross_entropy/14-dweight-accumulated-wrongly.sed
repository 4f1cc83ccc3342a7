# file: linear_cross_entropy.cuh - accumulate adds to the sums in the workspace, which hold anything
# case: switches alone backward auto
s/(a.accumulate \&\& !w.dweight);/a.accumulate;/
