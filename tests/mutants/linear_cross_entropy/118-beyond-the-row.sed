# file: linear_cross_entropy.cuh - a tile is stored beyond the end of its row
# case: accuracy bf16
s|if (out \&\& block \* 32 + quarter \* 8 < room)|if (out)|
