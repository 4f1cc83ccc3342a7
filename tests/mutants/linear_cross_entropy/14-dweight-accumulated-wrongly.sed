# file: linear_cross_entropy.cuh - accumulate adds to the sums in the workspace, which hold anything
s/(a.accumulate \&\& !w.dweight);/a.accumulate;/
