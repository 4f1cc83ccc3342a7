# file: lk_base.cuh - the single elements behind the vectors are off by one
s/split.vecs \* LK_VEC<T> + i;/split.vecs * LK_VEC<T> + i - 1;/
