# file: linear_cross_entropy.cuh - exponentials of ignored rows are kept
# case: forward_backward fused, many rows
s|{ignored ? 0 : left - own, |{left - own, |
