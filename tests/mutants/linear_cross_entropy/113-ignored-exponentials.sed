# file: linear_cross_entropy.cuh - exponentials of ignored rows are kept
s|{ignored ? 0 : left - own, |{left - own, |
