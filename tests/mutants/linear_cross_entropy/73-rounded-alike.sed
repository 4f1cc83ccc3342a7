# file: linear_cross_entropy.cuh - 16-bit dZ has the mean's division, rounded alike in every token
# case: rounding alike f16
s/const bool apart = .*/const bool apart = false;/
