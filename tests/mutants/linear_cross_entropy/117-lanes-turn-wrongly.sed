# file: linear_cross_entropy.cuh - lanes hold columns of another group
# case: accuracy bf16
s|odd ? pair\[2\] : pair\[3\]|odd ? pair[3] : pair[2]|
