# file: linear_cross_entropy.cuh - columns behind the last one count
# case: accuracy bf16
s|return c < w.left \&\& c != w.hit;|return c != w.hit;|
