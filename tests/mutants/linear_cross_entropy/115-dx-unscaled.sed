# file: linear_cross_entropy.cuh - sums of dx are moved without their factor
# case: accuracy bf16
s|p.scale ? p.scale\[row\] : 1.0f|1.0f|
