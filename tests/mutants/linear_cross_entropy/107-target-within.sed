# file: linear_cross_entropy.cuh - the target is among the others
s|return c < w.left \&\& c != w.hit;|return c < w.left;|
