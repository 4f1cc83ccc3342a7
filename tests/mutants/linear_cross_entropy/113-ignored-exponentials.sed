# file: linear_cross_entropy.cuh - exponentials of ignored rows are kept
s|= in \&\& counted ? lk_ex2|= in ? lk_ex2|
