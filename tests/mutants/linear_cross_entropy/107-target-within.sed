# file: linear_cross_entropy.cuh - the target is among the others
# case: accuracy bf16
s|return c < w.left \&\& c != w.hit;|return c < w.left;|
