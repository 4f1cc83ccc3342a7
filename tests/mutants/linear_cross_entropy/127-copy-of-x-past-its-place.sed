# file: linear_cross_entropy.cuh - fused, v x takes more room than it has
# case: accuracy bf16
s/used = used > instead ? used : instead;/;/
