# file: cross_entropy.cuh - rows of dlogits that are not of whole vectors are taken for short ones
s/ && a->dlogits_stride % LK_VEC<T> == 0));/));/
